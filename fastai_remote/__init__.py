"""Train fastai models from samples in Redis or tar shards

A public name is imported from its module when it is first used. So a process that only writes does not import torch."""
__version__ = "0.1.0"

from functools import wraps as _wraps
from importlib import import_module as _import_module

from .imported import add_late_methods as _add_late_methods, when_imported as _when_imported

# The module in which each public name is defined
_names = {
    'core': 'CorruptSample MissingSample StoreBusy StoreError StoreExists StoreFull StoreNotFound StoreUnavailable '
            'UnknownField UnsupportedFormat',
    'order.permutation': 'Permutation',
    'codec.strokes': 'simplify',
    'codec.raster': 'Rasterise',
    'codec.sequences': 'StrokeSequence',
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
    'load.loader': 'RemoteDL',
    'load.dataset': 'RemoteDataset',
    'load.mix': 'mix',
    'load.texts': 'TextOptions tokenize_store',
    'load.audio': 'CropAudio',
    'load.splitters': 'FieldSplitter KFoldSplitter RandomStoreSplitter StoreSplitter',
    'load.normalize': 'MeanImage',
    'block': 'RedisBlock ShardBlock',
}
_module_of = {name: module for module,names in _names.items() for name in names.split()}
# Not in a star import: what users receive without naming it, what extends the package, or serves one kind of source
_by_name = 'DamagedTar IngestReport Permutation RedisWriter RemoteItems VerifyReport simplify'.split()
__all__ = sorted(_module_of.keys()-_by_name)

def __getattr__(name):
    if name not in _module_of: raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    res = globals()[name] = getattr(_import_module(f'{__name__}.{_module_of[name]}'), name)
    return res

def __dir__(): return sorted({*globals(), *_module_of})

# fastai's classes get our methods as soon as fastai and this package have been imported, in any order
def _add_to_loaders(module):
    _add_late_methods(module.DataLoaders, ['from_store','from_redis','from_shards'], 'fastai_remote.block')

def _add_to_widgets(module): _import_module('fastai_remote.load.cleaners').fit_cleaners(module)

def _add_to_distributed(module):
    """Replace the method `_wrap_dl` of `DistributedTrainer` of `module`, which is `fastai.distributed`

    The new method is `load.distributed.wrap_dl`, which calls the stock method for loaders that are no `RemoteDL`, after
    a check that their batches are not divided among the ranks already."""
    stock_wrap_dl = module.DistributedTrainer._wrap_dl
    def _checked_wrap_dl(self, dl):
        _import_module('fastai_remote.load.frameworks').check_undivided(dl)
        return stock_wrap_dl(self, dl)
    def _wrap_dl(self, dl): return _import_module('fastai_remote.load.distributed').wrap_dl(self, dl, _checked_wrap_dl)
    module.DistributedTrainer._wrap_dl = _wrap_dl

# Other frameworks prepare loaders: those whose batches are divided among the ranks are not divided again
def _add_to_accelerate(module): _replace_prepare(module, 'prepare_for_accelerate')
def _add_to_ray(module): _replace_prepare(module, 'prepare_for_ray')

def _replace_prepare(module, name):
    "Replace `prepare_data_loader` of `module` by function `name` of `load.frameworks`, called as `f(stock, …)`"
    stock = module.prepare_data_loader
    @_wraps(stock)
    def prepare_data_loader(*args, **kwargs):
        return getattr(_import_module('fastai_remote.load.frameworks'), name)(stock, *args, **kwargs)
    module.prepare_data_loader = prepare_data_loader

_when_imported('fastai.data.core', _add_to_loaders)
_when_imported('fastai.distributed', _add_to_distributed)
_when_imported('fastai.vision.widgets', _add_to_widgets)
_when_imported('accelerate.accelerator', _add_to_accelerate)
_when_imported('ray.train.torch', _add_to_ray)
