"""Train fastai models from samples in Redis or tar shards

A public name is imported from its module when it is first used. So a process that only writes does not import torch."""
__version__ = "0.1.0"

from importlib import import_module as _import_module
from sys import modules as _modules

# The module in which each public name is defined
_names = {
    'core': 'CorruptSample MissingSample StoreBusy StoreError StoreExists StoreFull StoreNotFound StoreUnavailable '
            'UnknownField UnsupportedFormat',
    'order.permutation': 'Permutation',
    'codec.strokes': 'simplify',
    'codec.raster': 'Rasterise',
    'codec.numbers': 'StrokeSequence',
    'store.base': 'Store',
    'store.server': 'redis_server',
    'store.storage': 's3_options',
    'write.redis': 'RedisWriter',
    'source.files': 'image_samples',
    'source.shrink': 'shrink',
    'source.csv_files': 'csv_samples',
    'source.frames': 'table_samples',
    'source.arrays': 'array_samples',
    'source.tars': 'DamagedTar tar_samples',
    'source.img2dataset': 'img2dataset_samples',
    'source.huggingface': 'hf_samples',
    'source.drawings': 'drawing_samples',
    'ingest.report': 'IngestError IngestReport',
    'ingest.stores': 'MemoryStore RedisStore ShardStore TieredStore',
    'ingest.redis': 'to_redis',
    'ingest.shards': 'to_shards',
    'ingest.index': 'index_shards',
    'ingest.verify': 'VerifyReport',
    'load.items': 'RemoteItems get_remote_items',
    'load.fetch_transform': 'Fetch',
    'load.dataset': 'RemoteDataset',
    'load.mix': 'mix',
    'load.texts': 'TextOptions tokenize_store',
    'load.audio': 'CropAudio',
    'load.splitters': 'FieldSplitter KFoldSplitter RandomStoreSplitter StoreSplitter',
    'load.normalize': 'MeanImage',
    'load.resume': 'Resume',
    'load.stats': 'LoaderStats',
    'block': 'RedisBlock RemoteDL ShardBlock',
}
_module_of = {name: module for module,names in _names.items() for name in names.split()}
# Not in a star import: what users receive without naming it, what extends the package, or serves one kind of source
_by_name = 'DamagedTar IngestReport Permutation RedisWriter RemoteItems VerifyReport simplify'.split()
__all__ = sorted(_module_of.keys()-_by_name)

def __getattr__(name):
    """Import a public name from its module

    With `block`, fastai's classes get our methods: a star import brings it, and after fastai's import any name does."""
    if name not in _module_of: raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    if 'fastai.data.core' in _modules: _import_module(f'{__name__}.block')
    res = globals()[name] = getattr(_import_module(f'{__name__}.{_module_of[name]}'), name)
    return res

def __dir__(): return sorted({*globals(), *_module_of})
