"""Write a dataset to Redis from many processes; it becomes visible when it is complete

Docs: page `write/redis`"""

import hashlib, uuid
from dataclasses import replace
from functools import partial

import numpy as np
from zlib_ng.zlib_ng import crc32

from ..core import CorruptSample, Manifest, packed_crcs, seal, StoreError
from ..store.base import Store
from ..store.redis import read_failures
from ..store.redis_link import RedisLink
from ..store.redis_parts import element_size, KEY_BITS, key_layout, packed_reads, unpack_replies
from .base import chunk_count, ChunksLost, ServerRestarted, Writer
from .redis_place import packed_writes, parse_record, RedisPlace, value_keys
from .revision import Change, NewPart, NewVersion

# --- Labels become codes
#
# As in fastai, the vocabulary is the sorted list of the labels that occur, whether they are texts or integers. So the
# integers 3 and 7 are two classes, not eight. More than 2²⁰ distinct integers are not treated as classes; they are
# stored as numbers. If `vocab=` or the source names the classes, integers are codes of these names.

def _label_hash(labels):
    "Returns a 64-bit hash (BLAKE2b) of each of `labels`, a list of `str`, as which it is staged: an `int64` array"
    digests = b''.join(hashlib.blake2b(label.encode(), digest_size=8).digest() for label in labels)
    return np.frombuffer(digests, '>i8').astype(np.int64)

def _write_codes(writer, field, dtype, vocab, gaps, run):
    """Writes the codes of `field`, whose labels are staged, as `dtype`; `writer` is a `RedisWriter` that holds the lock

    `vocab` has the labels in the order of their codes; if it is `None`, integers are stored as they are. `gaps` are
    those of all places, and `run` is as in `RedisPlace.publish`. Returns the number of samples of each label, and the
    places of samples whose label is not in `vocab`, both int64: a label that is in no record was written by another
    attempt than the one that has recorded its chunk. Raises `CorruptSample` for damaged labels, `StoreError` for lost
    ones, and `ValueError` if two labels have the same hash."""
    layout,plan,place = writer.layout,writer.plan,writer.place
    # codes of an earlier commit that did not end: it may have had a wider type
    keys = [layout.packed(field, key_number) for key_number in range((plan['n']>>KEY_BITS)+1)]
    place.write([('UNLINK', key) for key in keys], run)
    spec,counts,unknown = plan['fields'][field],np.zeros(len(vocab or ()), np.int64),[np.zeros(0, np.int64)]
    if vocab is None: limits = np.iinfo(dtype)
    else:
        hashes = _label_hash(vocab) if isinstance(vocab[0], str) else np.array(vocab, np.int64)
        order = np.argsort(hashes)
        hashes = hashes[order]
        if (hashes[1:]==hashes[:-1]).any():
            raise ValueError(f'{writer.name}: two labels of field {field!r} have the same hash; name all labels in '
                             'vocab=')
    for places,staged in _staged(writer, field, gaps):
        if vocab is None: codes,is_known = staged,(staged>=limits.min)&(staged<=limits.max)
        else:
            at = np.searchsorted(hashes, staged).clip(max=len(order)-1)
            codes,is_known = order[at],hashes[at]==staged
        unknown.append(places[~is_known])
        first,stop = int(places[0]),int(places[-1])+1
        whole = np.zeros(stop-first, codes.dtype)   # places without a sample get zeros: one command writes all
        whole[places-first] = codes
        place.write(packed_writes(layout, field, dtype, np.arange(first, stop), whole, spec.get('check')), run)
        if len(counts): counts += np.bincount(codes, minlength=len(counts))
    return counts,np.concatenate(unknown)

def _staged(writer, field, gaps, step=1<<19):
    """Returns an iterator of `(places, values)`, arrays, over the staged values of all samples, in parts

    A part has the samples of `step` places; `step` divides `2**KEY_BITS`, as a part is read from one key. Parts
    without samples are left out. When iterated, raises `CorruptSample` for a value that does not match its checksum,
    and `StoreError` if values are lost."""
    layout,spec = writer.layout,writer.plan['fields'][field]
    advice = f'{writer.place.how_to_abandon} drops what is there, then ingest again'
    starts = np.arange(0, gaps.n_places+step, step).clip(max=gaps.n_places)
    numbers = gaps.samples_before(starts).tolist()
    for first,stop in zip(numbers, numbers[1:]):
        if first==stop: continue
        places,crcs = gaps.places(np.arange(first, stop)),np.zeros(stop-first, np.uint32)
        commands,reads = packed_reads(layout, f'{field}~', spec['dtype'], places, spec['check'])
        values,missing = unpack_replies(reads, iter(writer.link.send(commands)), spec['dtype'], len(places), crcs)
        if missing: raise StoreError(f'{writer.name}: the server lost values of {field!r}: {advice}')
        bad = places[packed_crcs(values, places)!=crcs].tolist()
        if bad:
            key,offset = layout.packed(f'{field}~', bad[0]>>KEY_BITS),(bad[0]&((1<<KEY_BITS)-1))*element_size(spec)
            raise CorruptSample(f'{writer.name}: the value of {field!r} for sample {bad[0]}, in key {key} at byte '
                                f'{offset:,}, in {writer.url} is damaged: {advice}')
        yield places,values

# --- Lost values
#
# A server that crashes may come back as it was some time before. On a single server, everything goes back together: a
# chunk whose values are gone has no record any more, so it is written again. In a cluster, the records of chunks are on
# one node and most values on others. If one of those loses its data, because it restarts, a replica takes over that was
# behind, or somebody empties it, then the records still say that the chunks are written.
#
# So before the commit of a dataset in a cluster, every value is looked for. This costs one `EXISTS` per value of
# variable width, many of them in one command, and reads the packed values.

def _lost_of_field(link, layout, field, spec, numbers):
    """Those of the samples `numbers` that lack a value of a field, or whose packed value does not match its checksum

    `numbers` and the result are ascending `int64` arrays; `spec` is the entry of the field in the plan."""
    if spec['dtype'] is None: return _without_key(link, layout, field, numbers)
    check = spec.get('check')
    commands,reads = packed_reads(layout, f'{field}~' if spec.get('staged') else field, spec['dtype'], numbers, check)
    crcs = np.zeros(len(numbers), np.uint32) if check else None
    values,_ = unpack_replies(reads, iter(link.send(commands)), spec['dtype'], len(numbers), crcs)
    if check: return numbers[packed_crcs(values, numbers)!=crcs]
    # these are the checksums of the values of another field; only that of an empty value is 0, and of one in 2**32
    unsure = numbers[values==0]   # one that is not there is read as 0
    keys = layout.values(field.removesuffix('.crc'), unsure.tolist())
    lengths = link.send([('STRLEN', key) for key in keys])
    return unsure[np.array(lengths, np.int64)>0]

def _without_key(link, layout, field, numbers):
    "Returns those of the samples `numbers` that have no key for the value of `field`; both are ascending arrays"
    groups = [numbers[numbers%len(layout.starts)==k] for k in range(len(layout.starts))]
    groups = [group for group in groups if len(group)]
    counts = link.send([('EXISTS', *layout.values(field, group.tolist())) for group in groups])
    unsure = [group for group,count in zip(groups, counts) if count!=len(group)]
    if not unsure: return numbers[:0]
    unsure = np.sort(np.concatenate(unsure))
    exist = link.send([('EXISTS', key) for key in layout.values(field, unsure.tolist())])
    return unsure[np.array(exist)==0]

def lost_of_range(
    link:RedisLink, # The cluster or server
    layout, # `key_layout` of the dataset
    fields:dict, # `fields` of a plan
    n:int, # Sample numbers below `n` are looked for
    gaps:np.ndarray=(), # Numbers without a sample, ascending
    step:int=1<<13 # Samples that are looked for at a time
): # Iterator of arrays of sample numbers, ascending and not empty
    "Finds samples that lack a value, or have a packed one that does not match; memory does not grow with `n`"
    gaps = np.asarray(gaps, np.int64)
    for start in range(0, n, step):
        stop = min(start+step, n)
        low,high = np.searchsorted(gaps, [start,stop])
        numbers = np.setdiff1d(np.arange(start, stop), gaps[low:high], assume_unique=True)
        if not len(numbers): continue
        lost = [_lost_of_field(link, layout, field, spec, numbers) for field,spec in fields.items()]
        if any(map(len, lost)): yield np.unique(np.concatenate(lost))

# --- New versions
#
# Values are never changed after their dataset has become visible. `RedisStore.append`, `edit`, `add_fields` and
# `drop_fields` make a new version: what is new is written as a part, with keys of its own, by an ordinary ingest, which
# can be interrupted and continued. Its commit replaces the manifest. (Decision note 0027.)

MAX_UNUSED = 100_000   # ranges of keys that an edit frees; what is beyond stays until the dataset is copied or deleted

class RedisVersion(NewVersion):
    "The next version of a dataset in Redis"
    def __init__(self, store):
        super().__init__(store)
        self.manifest.uid = uuid.uuid4().hex
        # Keys that only the version before uses, and those that nobody uses any more, as `value_keys` returns them
        self.before,self.dropped = [],[]
        self._mean_bytes = {}

    def mean_bytes(self,
        field:str # A variable-width field
    )->float:
        """Returns the mean bytes of a value of a field, measured on up to 256 samples; a missing value counts as empty

        Further calls for the same field return the same number."""
        if field not in self._mean_bytes:
            numbers = np.unique(np.linspace(0, len(self.store)-1, 256).astype(np.int64))
            keys = [key for part,_,places in self.store.groups(numbers, field)
                    for key in part.layout.values(field, places.tolist())]
            self._mean_bytes[field] = sum(self.store.link.send([('STRLEN', key) for key in keys]))/len(keys)
        return self._mean_bytes[field]

    def free(self,
        numbers:np.ndarray, # Sample numbers of the version before, ascending
        fields # Fields whose values are not needed any more
    ):
        """Adds the keys of values that are not needed any more to `before`, as long as `MAX_UNUSED` allows

        Subtracts about their bytes from `manifest.nbytes`. Fixed-width values stay where they are."""
        for field in fields:
            if self.fields[field]['dtype'] is not None: continue
            self.subtract_bytes(round(self.mean_bytes(field)*len(numbers)))
            for part,_,places in self.store.groups(numbers, field):
                starts,places = part.layout.starts,np.sort(places)
                n_tags,ends = len(starts),np.flatnonzero(np.diff(places)!=1)+1
                if len(self.before)+(len(ends)+1)*n_tags>MAX_UNUSED: continue
                for run in np.split(places, ends):   # of consecutive places
                    first,stop = int(run[0]),int(run[-1])+1
                    for k,start in enumerate(starts):
                        begin = first+(k-first)%n_tags   # a tag has every n-th number
                        if begin<stop: self.before.append([f'{start}:{field}:', begin, stop, n_tags])

    def forget(self, fields):
        for field in fields:
            n,dtype = len(self.store),self.fields[field]['dtype']
            if dtype is None: self.subtract_bytes(round(self.mean_bytes(field)*n))
            elif not field.endswith('.crc'): self.subtract_bytes(n*np.dtype(dtype).itemsize)
        for part in self.store.parts:
            dropped = {field:spec for field,spec in part.fields.items() if field in fields}
            self.dropped += value_keys(part.layout, dropped, part.n_places)[2:]   # without its failures and gaps

    @property
    def tables_key(self): return f"{self.store.manifest_key.removesuffix(':meta')}:~runs@{self.manifest.uid}#0"

# --- The writer
#
# One process leads an ingest: it calls `begin`, hands chunks to workers, and calls `commit` at the end. The workers
# write values under numbers that were assigned beforehand. There is no manifest, `NAME:meta`, until the commit, so no
# reader sees an unfinished dataset. What an unfinished ingest keeps in the server is described in `write.redis_state`.

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
        return partial(_open_writer, self.link.opener(), self.name, self.plan, self.place.token, self.place.tags)

    @property
    def layout(self):
        "What names the keys of the values: `key_layout` of the plan"
        return key_layout(self.plan['prefix'], self.plan['tags'])

    def server_run(self): return self.place.server_run()

    def check_value(self, field, value):
        if len(value)<=1<<20: return   # the setting cannot be less
        if self.max_bytes is None:
            try: setting = self.link.call(lambda c: c.config_get('proto-max-bulk-len'))
            except StoreError: setting = {}   # this user may not read settings: that of most servers
            self.max_bytes = int(setting.get('proto-max-bulk-len', 512<<20))
        if len(value)>self.max_bytes:
            raise ValueError(f'{field}: {len(value):,} bytes, where {self.url} accepts values of at most '
                             f'{self.max_bytes:,} (its setting proto-max-bulk-len)')

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
            if spec.get('staged'): field,values = f'{field}~',_label_hash(values) if spec['text'] else values
            if isinstance(values, list):
                values_of = {}   # `{hash tag: [key, value, …]}`; on a single server there is one
                for key,value in zip(layout.values(field, numbers.tolist()), values):
                    values_of.setdefault(key[:key.find('}')] if self.plan['tags'] else '', []).extend((key, value))
                commands += [('MSET', *pairs) for pairs in values_of.values()]
            else:
                commands += packed_writes(layout, field, values.dtype, numbers, values, spec.get('check'))
        self.place.write(commands, run)

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
        place,keys = self.place,self.place.keys
        key = keys.record(self.plan, chunk)
        # without failures: a record that was damaged, or whose values were lost, may have had some
        told = ('HSET', self.layout.failures, chunk, seal({'chunk':chunk, 'failures':failures}))
        commands = [('SET', key, seal({**record, 'chunk':chunk})),
                    told if failures else ('HDEL', self.layout.failures, chunk)]
        def is_first(has_plan, has_record):
            if not has_plan: raise place.lost()   # the ingest has ended
            return not has_record
        place.transaction(commands, run, reads=[('EXISTS', keys.plan), ('EXISTS', key)], when=is_first)

    def _forget_chunks(self, chunks, run=None):
        "Removes the records of `chunks`, so that they are written again"
        keys = [self.place.keys.record(self.plan, chunk) for chunk in chunks]
        self.place.write([('UNLINK', *keys)], run)

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
        try: memory = self.link.info('memory')
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
        lost = {chunk for some in lost for chunk in np.unique(some//plan['chunk']).tolist()}
        if lost: self._write_again(lost, run)
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
        for field in [field for field,spec in self.plan['fields'].items() if spec.get('staged')]:
            vocab = manifest.vocab.get(field)
            counts,unknown = _write_codes(self, field, manifest.fields[field]['dtype'], vocab, gaps, run)
            if len(unknown): self._write_again({*np.unique(unknown//self.plan['chunk']).tolist()}, run)
            if vocab is not None: manifest.counts[field] = counts.tolist()

    def _write_again(self, chunks, run):
        """Removes the records of a set of chunks of which values are lost, and raises `ChunksLost`

        The next run writes these chunks again."""
        self._forget_chunks(sorted(chunks), run)
        who = 'a node of the cluster' if self.plan['tags'] else 'the server'
        raise ChunksLost(f'{self.url}: {who} lost values of {len(chunks):,} chunks of {self.name!r}; '
                     'repeat the same call to write these chunks again')

    def _lost_values(self, n, gaps):
        """Returns an iterator of arrays of places below `n`, without `gaps`, of which a value is lost

        It looks for them in a cluster, of which a node may have lost values, and on a single server that was full and
        has dropped keys."""
        has_all = not self.plan['tags'] and not self.link.info('stats')[0].get('evicted_keys', 0)
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
            self.place.write([('UNLINK', key) for field in fields for key in self.layout.values(field, some)], run)

# A worker receives an opener, a callable that recreates the writer there. It contains the password, because a worker
# has no other way to get it. The connection is opened once per process and shared by all writers in it.

def _open_writer(open_link, name, plan, token, tags):
    """Returns a new writer, which uses the connection that all writers of this process share

    `open_link` is what `RedisLink.opener` returned; `token` and `tags` are those of the leader's lock."""
    writer = RedisWriter(open_link(), name)
    writer.plan,writer.place = plan,RedisPlace(writer.link, name, token, tags)
    return writer
