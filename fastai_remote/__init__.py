"fastai over remote samples. Names are looked up when used, so that a worker that only writes need not import torch"
__version__ = "0.1.0"

from importlib import import_module as _import_module

from .imported import add_late_methods as _add_late_methods, when_imported as _when_imported

_names = {   # where to look: for a class that later notebooks patch, the last of those
    'core': 'CorruptSample MissingSample StoreBusy StoreError StoreExists StoreFull StoreNotFound StoreUnavailable UnknownField UnsupportedFormat',
    'stats': 'MemoryStore',
    'rasterise': 'Rasterise',
    'order': 'Permutation',
    'server': 'redis_server',
    'redis_commit': 'RedisWriter',
    'sources': 'image_samples shrink',
    'streams': 'csv_samples tar_samples',
    'ingest': 'IngestError IngestReport to_redis',
    'drawings': 'drawing_samples simplify',
    'ops': 'ShardStore Store VerifyReport',
    'partitions': 'RedisStore',
    'tiered': 'TieredStore',
    'storage': 'make_client',
    'shards': 'to_shards',
    'foreign_shards': 'index_shards',
    'fetch': 'Fetch RemoteItems get_remote_items',
    'loader': 'RemoteDL',
    'remote_dataset': 'RemoteDataset',
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
_when_imported('fastai.data.core', lambda m: _add_late_methods(m.DataLoaders, ['from_redis','from_shards'], 'fastai_remote.block'))
_when_imported('fastai.vision.widgets', lambda m: _import_module('fastai_remote.cleaners').fit_cleaners(m))
