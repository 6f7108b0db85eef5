"""Write a dataset to Redis from many processes; it becomes visible when it is complete

Docs: page `write/redis`"""

# One process leads an ingest: it calls `begin`, hands chunks to workers, and calls `commit` at the end. The workers
# write values under numbers that were assigned beforehand. There is no manifest, `NAME:meta`, until the commit, so no
# reader sees an unfinished dataset. What an unfinished ingest keeps in the server is described in `write.redis_state`.

import uuid
from dataclasses import replace
from functools import partial

import numpy as np
from zlib_ng.zlib_ng import crc32

from ..core import Manifest, seal, StoreError
from ..store.base import Store
from ..store.redis import read_failures
from ..store.redis_layout import element_size, key_layout
from ..store.redis_link import RedisLink
from .base import chunk_count, ChunksLost, ServerRestarted, Writer
from .redis_labels import label_hash, RedisLabels
from .redis_lost import lost_of_range
from .redis_place import RedisPlace
from .redis_state import packed_writes, parse_record
from .redis_version import RedisVersion
from .revision import Change, NewPart

# --- RedisWriter

# `begin` returns the plan of an earlier ingest if it has the same signature, and the ingest continues with it.
# Otherwise it stores the new plan. A dataset that replaces another one gets keys of its own, so that both exist until
# the commit. What describes the dataset and the ingest is in `RedisPlace`.

class RedisWriter(Writer):
    "Writes a dataset to Redis: call `begin`, then `put` and `done` from any process, then `commit` and `close`"

    def __init__(self,
        link:RedisLink, # The server
        name:str, # Name of the dataset
        base:Store=None, # As in `Writer`, like `change`
        change:Change=None
    ):
        self.place,self.base,self.change = RedisPlace(link, name),base,change
        if base is not None: self.place.manifest_key = base.manifest_key
        self.link = link
        self.max_bytes = None # Bytes of the largest value that the server accepts, when it is known

    def opener(self):
        lock = self.place.lock
        return partial(_open_writer, self.link.opener(), self.name, self.plan, lock.token, lock.tags)

    @property
    def layout(self):
        "What names the keys of the values: `key_layout` of the plan"
        return key_layout(self.plan['prefix'], self.plan['tags'])

    def server_run(self): return self.place.lock.server_run()

    def check_value(self, field, value):
        if len(value)<=1<<20: return   # the setting cannot be less
        if self.max_bytes is None: self.max_bytes = self._read_max_bytes()
        if len(value)>self.max_bytes:
            raise ValueError(f'{field}: {len(value):,} bytes, where {self.url} accepts values of at most '
                             f'{self.max_bytes:,} (its setting proto-max-bulk-len)')

    def _read_max_bytes(self):
        try: setting = self.link.call(lambda c: c.config_get('proto-max-bulk-len'))
        except StoreError: setting = {}   # this user may not read settings: that of most servers
        return int(setting.get('proto-max-bulk-len', 512<<20))

    def known_labels(self,
        field:str # A field with labels
    )->list:
        "Returns the labels of `base` in the order of their codes; `None` if it stores the integers of `field` without"
        return [] if self.base is None or field not in self.base.fields else self.base.manifest.vocab.get(field)

    def new_version(self): return RedisVersion(self.base)

    # --- Writing chunks

    # A worker writes values in batches of limited size. Each write can be repeated. Then it records that the chunk is
    # done. A server that crashes may come back as it was some seconds before, so a record is only stored if the server
    # has run without a restart since the chunk began.

    def put(self,
        numbers:np.ndarray, # Sample numbers, ascending, shape (n,)
        columns:dict, # `{field: list of bytes or labels, or array}`, each of length n
        run:str=None # The `server_run` that must still be the current one; default: any
    ):
        """Writes samples, on a single server in one transaction while the lock is held

        Raises `StoreFull`, `StoreBusy`, and `ServerRestarted` if `run` has ended."""
        if not len(numbers): return
        layout,fields,commands = self.layout,self.plan['fields'],[]
        for field,values in columns.items():
            spec = fields.get(field, {})
            if spec.get('staged'): field,values = f'{field}~',label_hash(values) if spec['text'] else values
            if isinstance(values, list):
                values_of = {}   # `{hash tag: [key, value, …]}`; on a single server there is one
                for key,value in zip(layout.values(field, numbers.tolist()), values):
                    values_of.setdefault(key[:key.find('}')] if self.plan['tags'] else '', []).extend((key, value))
                commands += [('MSET', *pairs) for pairs in values_of.values()]
            else:
                commands += packed_writes(layout, field, values.dtype, numbers, values, spec.get('check'))
        self.place.lock.write(commands, run)

    def write_part(self, new, run):
        part = self.plan = self.place.new_part(new.part.fields, new.part.n)
        for numbers,columns in new.pieces(): self.put(numbers, columns, run=run)
        if next(self._lost_values(part['n'], ()), None) is not None:
            raise ServerRestarted(f'{self.url}: the server lost values of {self.name!r}; repeat the same call')
        return NewPart(replace(new.part, **part), new.numbers)

    def done(self,
        chunk:int, # Number of the chunk
        record:dict, # As in `Writer.done`
        failures:list=(), # `(sample, reason)` of each sample that failed, both `str`
        run:str=None, # What `server_run` returned when the chunk began; default: it is not checked
    ):
        """Records that a chunk is written; if it has a record already, nothing changes

        Raises `ServerRestarted`, `StoreBusy`."""
        lock,keys = self.place.lock,self.place.keys
        key = keys.record(self.plan, chunk)
        def queue(p):
            p.set(key, seal({**record, 'chunk':chunk}))
            # a record that was damaged, or whose values were lost, may have had others
            if failures: p.hset(self.layout.failures, chunk, seal({'chunk':chunk, 'failures':failures}))
            else: p.hdel(self.layout.failures, chunk)
        def is_first(p):
            if not p.exists(keys.plan): raise lock.lost()   # the ingest has ended
            return not p.exists(key)
        lock.transaction(queue, run, watch=(key, keys.plan), when=is_first)

    def _forget_chunks(self, chunks, run=None):
        "Removes the records of `chunks`, so that they are written again"
        keys = [self.place.keys.record(self.plan, chunk) for chunk in chunks]
        self.place.lock.write([('UNLINK', *keys)], run)

    def records(self,
        step:int=256 # Records to read at once
    ):
        """Returns an iterator of `(chunk, record)` for the chunks that are done, in their order

        A chunk whose record is damaged loses it, so that it is written again."""
        n = chunk_count(self.plan)
        for start in range(0, n, step):
            chunks = range(start, min(start+step, n))
            stored, = self.link.send([('MGET', *(self.place.keys.record(self.plan, chunk) for chunk in chunks))])
            for chunk,content in zip(chunks, stored):
                record = None if content is None else parse_record(chunk, content)
                if record is not None: yield chunk,record
                elif content is not None: self._forget_chunks([chunk])

    def failures(self):
        "What could not be converted, as an iterator of `(sample, reason)`, both `str`; raises `CorruptSample`"
        return read_failures(self.link, self.layout, self.name, f' ({self.place.how_to_abandon} drops what is there)')

    # --- Free memory

    # `space` measures what some written samples cost, including their keys, and asks how much memory the server has
    # left.
    # An ingest uses it after its first chunk to estimate whether the rest will fit.

    def space(self,
        numbers, # Sample numbers that are written
    )->tuple: # Bytes per sample, free bytes, total bytes; the last two are `None` if the server does not tell
        """Returns how much memory a sample takes, with its keys, as a mean of the samples `numbers`, and how much is
        left"""
        layout,fields = self.layout,self.plan['fields']
        blob_fields = [field for field,spec in fields.items() if spec['dtype'] is None]
        replies = self.link.send([('MEMORY USAGE', key) for field in blob_fields
                                  for key in layout.values(field, numbers)],
                                 strict=False)
        try: memory = self.link.memory()
        except StoreError: memory = []
        # 16 bytes more per key, for its entry in the table of keys, whose size is doubled when it is full
        sizes = [size+16 for size in replies if isinstance(size, int)]
        per_sample = sum(element_size(spec)*(2 if spec.get('staged') else 1) for spec in fields.values()
                         if spec['dtype'])
        if sizes: per_sample += len(blob_fields)*sum(sizes)/len(sizes)
        limits = [m.get('maxmemory') or m.get('total_system_memory') for m in memory]
        if not limits or None in limits: return per_sample,None,None
        return per_sample,sum(limits)-sum(m['used_memory'] for m in memory),sum(limits)

    # --- Commit

    # Every step can be repeated: if a commit is killed, the next run starts it again from the beginning. Samples stay
    # at the places at which they were written; which places have none, as their samples have failed, is stored as a
    # table in the transaction that stores the manifest. The first record of a chunk counts, so that a task that an
    # engine runs twice changes nothing, even if other samples fail in it.
    #
    # In a cluster, one node may have lost values of chunks whose records are on another. So all values are looked for
    # first (redis_lost). The records of chunks that lack values are removed, and the ingest writes these chunks again.

    def commit(self)->Manifest:
        """Encodes labels, and makes the dataset visible in one step; returns its manifest

        Samples stay at their places; a table of gaps says which places have none. The dataset that it replaces is
        removed. Raises `ServerRestarted` (also `ChunksLost`), `StoreBusy`, `CorruptSample`, `StoreError` for values
        that are lost, and `ValueError` if two labels have the same hash."""
        plan,run = self.plan,self.server_run()
        totals = self.totals()
        gaps = totals.gaps()
        lost = self._lost_values(plan['n'], gaps.gaps())
        self._write_again({chunk for some in lost for chunk in np.unique(some//plan['chunk']).tolist()}, run)
        self._remove_under(gaps.gaps(), run)
        manifest = Manifest(self.name, 0, {}, prefix=plan['prefix'], tags=plan['tags'], uid=uuid.uuid4().hex)
        totals.describe(manifest, self.known_labels)
        self._encode_labels(manifest, gaps, run)
        if not gaps: return self.publish([NewPart(manifest)], {}, run)
        stored = gaps.to_bytes()
        manifest.gaps = dict(places=gaps.n_places, runs=len(gaps), crc=crc32(stored))
        return self.publish([NewPart(manifest)], {self.layout.gaps:stored}, run)

    def _encode_labels(self, manifest, gaps, run):
        "Writes the codes of staged labels, by the vocabularies of `manifest`, and counts them; raises as `commit`"
        labels = RedisLabels(self.place, self.plan, gaps, run)
        for field in [field for field,spec in self.plan['fields'].items() if spec.get('staged')]:
            vocab = manifest.vocab.get(field)
            counts,unknown = labels.encode(field, manifest.fields[field]['dtype'], vocab)
            self._write_again({*np.unique(unknown//self.plan['chunk']).tolist()}, run)
            if vocab is not None: manifest.counts[field] = counts.tolist()

    def _write_again(self, chunks, run):
        """Removes the records of a set of chunks of which values are lost, and raises `ChunksLost`; not if it is empty

        The next run writes these chunks again."""
        if not chunks: return
        self._forget_chunks(sorted(chunks), run)
        who = 'a node of the cluster' if self.plan['tags'] else 'the server'
        raise ChunksLost(f'{self.url}: {who} lost values of {len(chunks):,} chunks of {self.name!r}; '
                     'repeat the same call to write these chunks again')

    def _lost_values(self, n, gaps):
        """Returns an iterator of arrays of places below `n`, without `gaps`, of which a value is lost

        It looks for them in a cluster, of which a node may have lost values, and on a single server that was full and
        has dropped keys."""
        has_all = not self.plan['tags'] and not self.link.call(lambda c: c.info('stats').get('evicted_keys', 0))
        if has_all: return iter(())
        return lost_of_range(self.link, self.layout, self.plan['fields'], n, gaps)

    # --- Gaps

    def _remove_under(self,
        places, # Places without a sample, ascending
        run, # As in `publish`
        step=500 # Places per transaction
    ):
        "Removes values of places that have no sample: another attempt may have written them before its sample failed"
        fields = [field for field,spec in self.plan['fields'].items() if spec['dtype'] is None]
        for k in range(0, len(places), step):
            some = places[k:k+step].tolist()
            self.place.lock.write([('UNLINK', key) for field in fields for key in self.layout.values(field, some)], run)

# A worker receives an opener, a callable that recreates the writer there. It contains the password, because a worker
# has no other way to get it. The connection is opened once per process and shared by all writers in it.

def _open_writer(open_link, name, plan, token, tags):
    """Returns a new writer, which uses the connection that all writers of this process share

    `open_link` is what `RedisLink.opener` returned; `token` and `tags` are those of the leader's lock."""
    writer = RedisWriter(open_link(), name)
    writer.plan,writer.place = plan,RedisPlace(writer.link, name, token, tags)
    return writer
