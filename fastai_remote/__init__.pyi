"""Train fastai models from samples in Redis or tar shards

A public name is imported from its module when it is first used. So a process that only writes does not import torch."""
from .block import RedisBlock as RedisBlock
from .block import RemoteDL as RemoteDL
from .block import ShardBlock as ShardBlock
from .codec.numbers import StrokeSequence as StrokeSequence
from .codec.raster import Rasterise as Rasterise
from .codec.strokes import simplify as simplify
from .core import CorruptSample as CorruptSample
from .core import MissingSample as MissingSample
from .core import StoreBusy as StoreBusy
from .core import StoreError as StoreError
from .core import StoreExists as StoreExists
from .core import StoreFull as StoreFull
from .core import StoreNotFound as StoreNotFound
from .core import StoreUnavailable as StoreUnavailable
from .core import UnknownField as UnknownField
from .core import UnsupportedFormat as UnsupportedFormat
from .ingest.index import index_shards as index_shards
from .ingest.redis import to_redis as to_redis
from .ingest.report import IngestError as IngestError
from .ingest.report import IngestReport as IngestReport
from .ingest.shards import to_shards as to_shards
from .ingest.stores import MemoryStore as MemoryStore
from .ingest.stores import RedisStore as RedisStore
from .ingest.stores import ShardStore as ShardStore
from .ingest.stores import TieredStore as TieredStore
from .ingest.verify import VerifyReport as VerifyReport
from .load.audio import CropAudio as CropAudio
from .load.dataset import RemoteDataset as RemoteDataset
from .load.fetch_transform import Fetch as Fetch
from .load.items import RemoteItems as RemoteItems
from .load.items import get_remote_items as get_remote_items
from .load.mix import mix as mix
from .load.normalize import MeanImage as MeanImage
from .load.resume import Resume as Resume
from .load.splitters import FieldSplitter as FieldSplitter
from .load.splitters import KFoldSplitter as KFoldSplitter
from .load.splitters import RandomStoreSplitter as RandomStoreSplitter
from .load.splitters import StoreSplitter as StoreSplitter
from .load.stats import LoaderStats as LoaderStats
from .load.texts import TextOptions as TextOptions
from .load.texts import tokenize_store as tokenize_store
from .order.permutation import Permutation as Permutation
from .source.arrays import array_samples as array_samples
from .source.csv_files import csv_samples as csv_samples
from .source.drawings import drawing_samples as drawing_samples
from .source.files import image_samples as image_samples
from .source.frames import table_samples as table_samples
from .source.huggingface import hf_samples as hf_samples
from .source.img2dataset import img2dataset_samples as img2dataset_samples
from .source.shrink import shrink as shrink
from .source.tars import DamagedTar as DamagedTar
from .source.tars import tar_samples as tar_samples
from .store.base import Store as Store
from .store.server import redis_server as redis_server
from .store.storage import s3_options as s3_options
from .write.redis import RedisWriter as RedisWriter

__version__: str
__all__ = [
    'CorruptSample',
    'CropAudio',
    'Fetch',
    'FieldSplitter',
    'IngestError',
    'KFoldSplitter',
    'LoaderStats',
    'MeanImage',
    'MemoryStore',
    'MissingSample',
    'RandomStoreSplitter',
    'Rasterise',
    'RedisBlock',
    'RedisStore',
    'RemoteDL',
    'RemoteDataset',
    'Resume',
    'ShardBlock',
    'ShardStore',
    'Store',
    'StoreBusy',
    'StoreError',
    'StoreExists',
    'StoreFull',
    'StoreNotFound',
    'StoreSplitter',
    'StoreUnavailable',
    'StrokeSequence',
    'TextOptions',
    'TieredStore',
    'UnknownField',
    'UnsupportedFormat',
    'array_samples',
    'csv_samples',
    'drawing_samples',
    'get_remote_items',
    'hf_samples',
    'image_samples',
    'img2dataset_samples',
    'index_shards',
    'mix',
    'redis_server',
    's3_options',
    'shrink',
    'table_samples',
    'tar_samples',
    'to_redis',
    'to_shards',
    'tokenize_store',
]
