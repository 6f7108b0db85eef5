"fastai over remote samples. Names are looked up when used, so that a worker that only writes need not import torch"
__version__ = "0.1.0"

from importlib import import_module as _import_module

from .imported import add_late_methods as _add_late_methods, when_imported as _when_imported

_names = {   # where each public name is defined
    'core': 'CorruptSample MissingSample StoreBusy StoreError StoreExists StoreFull StoreNotFound StoreUnavailable UnknownField UnsupportedFormat',
    'order.permutation': 'Permutation',
    'codec.strokes': 'simplify',
    'codec.raster': 'Rasterise',
    'store.base': 'MemoryStore Store',
    'store.redis': 'RedisStore',
    'store.server': 'redis_server',
    'store.storage': 's3_options',
    'store.shards': 'ShardStore',
    'store.tiered': 'TieredStore',
    'write.redis': 'RedisWriter',
    'source.files': 'image_samples',
    'source.shrink': 'shrink',
    'source.tables': 'csv_samples',
    'source.tars': 'tar_samples',
    'source.drawings': 'drawing_samples',
    'ingest.run': 'IngestError IngestReport to_redis',
    'ingest.shards': 'to_shards',
    'ingest.index': 'index_shards',
    'ingest.ops': 'VerifyReport',
    'load.items': 'RemoteItems get_remote_items',
    'load.fetch': 'Fetch',
    'load.loader': 'RemoteDL',
    'load.dataset': 'RemoteDataset',
    'block': 'MeanImage RandomStoreSplitter RedisBlock ShardBlock StoreSplitter',
}
_home = {n: m for m, ns in _names.items() for n in ns.split()}
__all__ = sorted(_home)

def __getattr__(name):
    if name not in _home: raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    res = globals()[name] = getattr(_import_module(f'{__name__}.{_home[name]}'), name)
    return res

def __dir__(): return sorted({*globals(), *__all__})

# What fastai's classes get from us is there as soon as both have been imported, in any order
_when_imported('fastai.data.core', lambda m: _add_late_methods(m.DataLoaders, ['from_store','from_redis','from_shards'], 'fastai_remote.block'))
_when_imported('fastai.vision.widgets', lambda m: _import_module('fastai_remote.load.cleaners').fit_cleaners(m))
