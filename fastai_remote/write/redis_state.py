"""What an ingest keeps in Redis until its dataset is visible

Docs: page `write/redis_state`"""

# An unfinished ingest must be able to continue after a kill, from any machine. So everything that is known about it is
# kept in the server, next to the values that are written already. `ID` is the `id` of its plan:
#
# | key | holds |
# |---|---|
# | `NAME:ingest` | the plan: signature, number of samples, chunk size, fields, splits, prefix of the keys |
# | `NAME:ingest:lock` | who is writing. The lock has a lease of 30 s that is renewed, and every write checks it |
# | `NAME:ingest:ID:record:CHUNK` | the record of a chunk that is done: counts, gaps, labels, statistics of images |
# | `NAME:~failures#0` | the samples that could not be converted, and why. This key stays with the dataset |
# | `NAME:register` | ranges of keys by what needs them, so that they can be removed when nothing does |
# | `fastai_remote:ingests` | the names of all unfinished ingests |
# | `fastai_remote:used` | the names under which something was ever written |
#
# All of it has checksums: JSON has the crc32 of its content under `crc`. A chunk whose record is damaged is written
# again. A damaged plan or value stops the commit, and the message says what to do.
#
# This module has the names of these keys, and how their contents become bytes and are read back. Nothing here talks
# to a server.

import numpy as np
import redis

from ..core import packed_crcs, parse_json, unseal
from ..store.redis import home_of
from ..store.redis_layout import element_dtype, KEY_BITS
from .base import chunk_count

# --- Names of keys

# The first dataset of a name has keys that begin with `NAME:`. Whatever is written under this name later has keys that
# begin with `NAME@ID:`, where `ID` is that of its ingest, so that no key is ever used for two things. (Decision note
# 0041.) The names above are the same for all of them, because only one ingest of a name runs at a time.

INGESTS_KEY = 'fastai_remote:ingests'

class IngestKeys:
    "The names of the keys that hold the state of an ingest"
    def __init__(self,
        name:str, # Name of the dataset
        tags:int=0 # Hash tags of its layout; 0 on a single server
    ):
        name = home_of(name, tags)
        self.manifest = f'{name}:meta' # JSON; a dataset is visible if it is there
        self.register = f'{name}:register' # Hash: `{ID: ranges of keys, as `value_keys` returns them, sealed}`
        self.plan = f'{name}:ingest' # JSON
        self.lock = f'{self.plan}:lock' # JSON: the process that leads; it expires

    def record(self,
        plan:dict, # The plan
        chunk:int # Number of a chunk
    )->str:
        "The key of the record of a chunk, which is there when the chunk is written"
        return f"{self.plan}:{plan['id']}:record:{chunk}"

# Keys are deleted by name and never searched for, because `KEYS` and `SCAN` would block or slow down a server with
# fifty million keys. A list of ranges is enough to name them all: each range is what precedes the number, and a range
# of numbers; in a cluster there is a range for each hash tag. Staged labels, which the commit replaces by codes, have
# keys of their own, with `~` after the name of the field.

def value_keys(
    layout, # `key_layout` of what is written
    fields:dict, # `fields` of a plan or manifest
    n:int, # Number of places
)->list: # Of `[start of the key, first, stop, step]`: the keys end with the numbers of this range
    "Returns the ranges of all keys with values of `fields`; the first two are the keys of failures and of gaps"
    ranges,step = [[key[:-1], 0, 1, 1] for key in (layout.failures, layout.gaps)],len(layout.starts)
    for field,spec in fields.items():
        if spec['dtype'] is None:
            ranges += [[f'{start}:{field}:', k, n, step] for k,start in enumerate(layout.starts)]
        else: ranges += _packed_ranges(layout, field, n)
    return ranges

def _packed_ranges(layout, field, n):
    "Returns the ranges of the keys of a packed field with values of `n` samples, as `value_keys`"
    starts = [layout.packed(field, chunk).removesuffix(str(chunk)) for chunk in range(1+(n>>KEY_BITS))]
    return [[start, chunk, chunk+1, 1] for chunk,start in enumerate(starts)]

def state_keys(
    keys:IngestKeys, # The keys of the dataset
    layout, # `key_layout` of what is written
    plan:dict # The plan
)->list: # As `value_keys`
    "Returns the ranges of all keys that only the ingest needs: records, and labels that are staged"
    ranges = [[keys.record(plan, 0)[:-1], 0, chunk_count(plan), 1]]
    for field,spec in plan['fields'].items():
        if spec.get('staged'): ranges += _packed_ranges(layout, f'{field}~', plan['n'])
    return ranges

# --- Packed values

# The layout of fixed-width values is that of `store.redis_layout`: 2²⁴ values in one key, each followed by its
# checksum. `packed_reads` there reads them; `packed_writes` writes them. Consecutive numbers in the same key become one
# `SETRANGE`.

def with_checks(
    fields:dict # `fields` of a plan
)->dict:
    """Returns a copy of `fields`, with `check` in the entry of each fixed-width field: a checksum follows each value

    A field `FIELD.crc`, which has the checksums of `FIELD`, gets none."""
    def is_checksum(field): return field.endswith('.crc') and field.removesuffix('.crc') in fields
    return {field:spec if spec['dtype'] is None or is_checksum(field) else {**spec, 'check':'u4'}
            for field,spec in fields.items()}

def _split_runs(numbers):
    "The runs of consecutive `numbers`, ascending and not empty, whose packed values are in one key: index arrays"
    key_of = numbers>>KEY_BITS
    is_break = (np.diff(numbers)!=1)|(key_of[1:]!=key_of[:-1])
    return np.split(np.arange(len(numbers)), np.flatnonzero(is_break)+1)

def packed_writes(
    layout, # `key_layout` of what is written
    field:str, # A fixed-width field; with `~` for its staged values
    dtype, # numpy dtype of the stored values
    numbers:np.ndarray, # Sample numbers, ascending, shape (n,), not empty
    values, # Array or list, shape (n,)
    check:str=None, # Does a checksum follow each value? As `check` in the plan
)->list: # Of commands: `('SETRANGE', key, offset, bytes)`
    "Returns the commands that write `values` into packed keys"
    dtype = np.dtype(dtype)
    values = np.asarray(values, dtype)
    if check:
        elements = np.empty(len(numbers), element_dtype(dtype))
        elements['value'] = values
        elements['crc'] = packed_crcs(values, np.asarray(numbers, np.int64))
    else: elements = values.astype(dtype.newbyteorder('>'))
    commands = []
    for run in _split_runs(numbers):
        start = int(numbers[run[0]])
        offset = (start&((1<<KEY_BITS)-1))*elements.itemsize
        commands.append(('SETRANGE', layout.packed(field, start>>KEY_BITS), offset, elements[run].tobytes()))
    return commands

# --- Checksums of the state

def parse_record(
    chunk:int, # Number of the chunk
    stored:bytes # JSON, sealed
)->dict: # `None` if it is damaged, or belongs to another chunk
    "Returns the record of a chunk"
    try: record = unseal(stored)
    except ValueError: return None
    return record if record.get('chunk')==chunk else None

def watched_transaction(
    client, # A `redis.Redis`
    keys, # Keys that must not change meanwhile
    attempt # `attempt(pipeline)` reads, and may then call `multi`, queue commands and `execute`; may be called again
): # What `attempt` returns
    "Runs a transaction that depends on what it reads, again whenever one of `keys` was changed by others meanwhile"
    while True:
        with client.pipeline() as p:
            try:
                p.watch(*keys)
                return attempt(p)
            except redis.WatchError as e:
                # redis-py reports a connection that was lost between `WATCH` and `EXEC` by the same class of error.
                # `RedisLink.call` repeats it, with pauses, and ends at its deadline.
                if 'variable changed' not in str(e): raise redis.ConnectionError(str(e)) from e

def parse_lock(
    token:bytes # What the lock holds
)->dict: # `host`, `pid`, `id`; `host` and `pid` are 'unknown' if it is damaged
    "Returns who holds a lock"
    unknown = {'host':'unknown', 'pid':'unknown'}
    try: holder = {**unknown, **parse_json(token)}
    except (ValueError,TypeError): return unknown
    is_whole = isinstance(holder['host'], str) and holder['host'].strip() and type(holder['pid']) is int
    return holder if is_whole else {**holder, **unknown}
