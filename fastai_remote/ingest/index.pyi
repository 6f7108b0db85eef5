"""Indexes tars that others wrote, so that any sample can be read by number"""
from typing import Any
__all__: Any
from .run import IngestJob
from .report import IngestReport
from ..store.shard_index import ShardRow
from ..store.storage import Storage
from ..write.shards import ShardWriter

class _StoredFile:
    compression: Any
    content: Any
    storage: Any
    name: Any
    parallel: Any
    crc: Any
    size: Any
    total: Any
    stamp: Any

    def __init__(self, storage: Storage, name: str, parallel: int=4):
        ...

    def _pieces(self):
        ...
_MAX_VALUE: Any
_MAX_FIELDS: Any

def _is_nameable(field):
    ...

def _late_field(field):
    ...

class _ShardFields:
    counts: Any
    masks: Any
    codes: Any
    columns: Any
    shard: Any
    notes: Any
    specs: Any
    vocab: Any

    def __init__(self, fields: dict, vocab: dict, shard: str):
        ...

    def _add(self, field):
        ...

    def count(self, values, members):
        ...

    def _count(self, field, labels):
        ...

    def values(self, members):
        ...

    def record(self):
        ...

def _too_many_fields(where, fields):
    ...

def _number_or_label(field, spec, member, codes):
    ...

def _labels(content, codes=None):
    ...

def index_shard(open_writer, source: dict, chunk: int, part) -> dict:
    ...

def _keep_shard(writer, k, row):
    ...

def _earlier_record(writer, row):
    ...

def _check_unchanged(source, shards, advice='overwrite=True indexes all shards anew'):
    ...

def _fields_of(storage, names, vocab, n=100):
    ...

def _plan_fields(first, vocab):
    ...
_EXAMPLE: Any

def _first_values(members):
    ...

class ShardIndexJob(IngestJob):
    verb: Any

    def __init__(self, writer: ShardWriter, source: Storage, names: list, known: '_KnownShards'):
        ...

    def write(self):
        ...

    def chunks(self, marks):
        ...

    @property
    def notes(self):
        ...

class _KnownShards:
    table: Any
    positions: Any
    stamps: Any
    is_complete: Any
    fields: Any
    vocab: Any
    dataset: Any

    def __init__(self, writer: ShardWriter, source: Storage, names: list, labels: dict, overwrite: bool):
        ...

    def row(self, name: str) -> ShardRow:
        ...

def _source_of(url, timeout, storage_options):
    ...

def _tars_in(source, to):
    ...

def _named(source, given, splits, to=None):
    ...

def _first_repeated(names):
    ...

def _sizes(source, names, step=1000):
    ...

def _check_not_ours(source):
    ...

def _index_plan(writer, source, names, known, patterns, labels, ranges, base):
    ...

def index_shards(url: str | list | Storage, to: str | None=None, splits: dict | None=None, num_workers: int | None=None, vocab: list | dict | None=None, overwrite: bool=False, progress: bool | None=None, timeout: float=20.0, max_failed: int | float | None=None, storage_options: dict | None=None) -> IngestReport:
    ...
