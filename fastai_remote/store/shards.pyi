"""A dataset in tar shards, on a disk or on object storage: any sample by number"""
from typing import Any
__all__: Any
from ..order.quality import ShuffleQuality
from .cache import FileCache
from .parts import StoredDataset
from .shard_index import ShardTable
from .storage import Storage

def _file_of(key):
    ...

def _find_manifest(storage):
    ...

def _why_not_found(storage, error):
    ...
_MAX_SHARDS: Any

def _unpacked_tables(manifest, where):
    ...

class ShardReader(StoredDataset):
    for_users: Any
    why_missing: Any
    copies_local: Any
    _home: Any
    _shards: Any
    _opened: Any
    storage: Any
    tars: Any
    _uid: Any
    _cache_setting: Any
    _cache: Any
    _tables: Any

    def __init__(self, url: str | Storage, cache: bool | str | FileCache=True, cache_size: int | None=None, timeout: float=20.0, uid: str | None=None, storage_options: dict | None=None, shards_url: str | Storage | None=None):
        ...

    @property
    def unchecked(self) -> list:
        ...

    def replaced_error(self, exists=True):
        ...

    @property
    def not_read(self):
        ...

    def __getstate__(self):
        ...

    @property
    def place_rows(self):
        ...

    def read_manifest(self):
        ...

    @property
    def tables(self) -> list:
        ...

    @property
    def shards(self) -> ShardTable:
        ...

    @property
    def opened(self) -> dict:
        ...

    def part(self, number):
        ...

    def read_parts(self, requests, again=False):
        ...

    def keys(self, numbers):
        ...

    def shard_url(self, i: int) -> str:
        ...

    def new_epoch(self):
        ...

    def check_rest(self):
        ...

    @property
    def origin(self) -> str:
        ...

    @property
    def manifest_key(self) -> str:
        ...

    def place_of(self, key):
        ...

    def stored_bytes(self, key, n):
        ...

    @property
    def cache(self) -> FileCache:
        ...

    def opener(self):
        ...

    def prefetch(self, shards: list, wait: bool=False):
        ...

    def check_cache(self, workers: int, each: int):
        ...

    def shuffle_quality(self, interleave: int=4, bs: int=64, num_workers: int=1, field: str | None=None, batches: int=200) -> ShuffleQuality:
        ...

    def wids_index(self, split: str | None=None) -> dict:
        ...

    def failures(self):
        ...

def _added_numbers(store):
    ...

def _failures_of(store, part):
    ...
