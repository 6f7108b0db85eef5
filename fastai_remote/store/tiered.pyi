"""Shards with Redis as a cache: values that were read once come from memory the next time, on all nodes"""
from typing import Any
__all__: Any
from .base import Store
from .redis import RedisReader
from .redis_link import RedisLink
_PIPELINE_BYTES: Any
_VALUE_OVERHEAD: Any
_LONGEST_PAUSE: Any

class _ValueCache:
    size: Any
    paused: Any
    failures: Any
    warned: Any
    mean_bytes: Any
    held: Any
    prefetched: Any
    link: Any
    name: Any
    ttl: Any
    limit: Any
    write_timeout: Any
    guard: Any
    executor: Any
    lock: Any

    def __init__(self, store):
        ...

    def is_paused(self, kind):
        ...

    def succeeded(self, kind):
        ...

    def failed(self, kind, error):
        ...

    def flush(self, timeout):
        ...

    def request(self, commands):
        ...

    def values(self, keys):
        ...

    def put(self, items):
        ...

    def _forget(self, items):
        ...

    def _write(self, items):
        ...

def _pieces(items):
    ...

def _flush_at_exit(ref, timeout=1.0):
    ...
_SLOTS: Any

def _of_shards(name):
    ...

class _StoreAbove(Store):
    manifest: Any
    shards: Any
    unchecked: Any
    why_missing: Any
    failures: Any
    keys: Any
    location: Any
    presence: Any
    check_cache: Any
    new_epoch: Any
    shard_url: Any
    compare_checksums: Any

class TieredReader(_StoreAbove):
    for_users: Any
    link: Any
    _write_timeout: Any
    prefix: Any
    tags: Any
    guard: Any
    store: Any
    ttl: Any
    queue: Any
    _states: Any
    _counts: Any

    def __init__(self, redis: str | RedisLink | RedisReader, store: Store, ttl: float | None=None, queue: int=64000000, redis_timeout: float=0.25, **kwargs):
        ...

    def _begin(self):
        ...

    @property
    def not_read(self):
        ...

    def opener(self):
        ...

    def __getstate__(self):
        ...

    def __setstate__(self, state):
        ...

    def __copy__(self):
        ...

    def __deepcopy__(self, memo):
        ...

    @property
    def _redis(self) -> _ValueCache:
        ...

    @property
    def _kept_fields(self):
        ...

    def _is_kept(self, field):
        ...

    def _keys(self, fields, ids):
        ...

    @property
    def hits(self) -> dict:
        ...

    def _check_copy(self, copy, n=64):
        ...

    @property
    def more_rows(self):
        ...

    def read_values(self, numbers, fields):
        ...

    def _read_lacking(self, numbers, places, fields, lacking, keys, checksums, values):
        ...

    def _fetch_shards_of(self, numbers):
        ...

    def flush(self, timeout: float=10.0) -> bool:
        ...

    def check_rest(self, step: int=512):
        ...

    def _check_kept(self, field, numbers):
        ...

    def _is_held(self, numbers):
        ...

    def held(self, n: int=1000) -> float:
        ...

    def prefetch(self, shards: list, wait: bool=False):
        ...

    def _which_shards_are_held(self, shards):
        ...

    def warm(self, num_workers: int | None=None, chunk: int=2048) -> float:
        ...

    def clear(self, step: int=5000):
        ...

def _prefix_of(store):
    ...

def _open_store(**state):
    ...

def _are_missing(values):
    ...
_SAMPLES_PER_SHARD: Any

def _warm_chunk(opener, start, stop):
    ...
