"""Write a dataset as tar shards from many processes; it becomes visible when it is complete

Docs: page `write/shards`"""

import json, re, sys
from array import array
from contextlib import ExitStack, suppress
from functools import partial
from itertools import starmap

import numpy as np
from fastcore.basics import chunked
from zlib_ng.zlib_ng import crc32

from ..codec.fields import check_members
from ..codec.numbers import code_dtype, narrow
from ..core import CorruptSample, MissingSample, seal, unseal
from ..store.base import Store
from ..store.bounded import MAX_FILE
from ..store.shard_index import (
    has_added_values, index_name, joined_tables, ordered_shards, ShardFile, ShardManifest, ShardRow, ShardTable,
    SummingFile)
from ..store.shards import ShardReader
from ..store.storage import Storage
from .base import chunk_count, Writer
from .folder_place import added_prefix, FolderPlace, MAX_STATE, RECORD_FILE, record_number
from .revision import Change, NewPart, NewVersion, wider_dtype

# --- New versions
#
# Neither a shard nor its index is ever changed: WebDataset, `tar` and copies in caches go on working. Appended samples
# and new values are parts of their own, as in Redis. The table that says where the samples are has the generation in
# its name, so the version before stays complete until the manifest is replaced. (Decision note 0027.)

class ShardVersion(NewVersion):
    """The next version of a dataset in shards

    Shards are never changed; those without a sample are left out. As everywhere, its `nbytes` are those of the values
    that the version has: values that were replaced or dropped do not count, though they stay in the shards. Numbers and
    labels are only subtracted with their field."""
    def __init__(self,
        store:ShardReader, # The version that is there
        generation:int # Of the new version
    ):
        super().__init__(store)
        self.counts = dict(store.field_table.counts) # Number of samples that have each field
        self.manifest.generation,self.tables = generation,list(store.tables) # Table of the shards of each part

    @property
    def tables_key(self): return f'.runs-{self.manifest.generation}'

    def add_part(self, part):
        number = super().add_part(part)
        self.tables.append(ShardTable.unpack(part.shards))
        for field in self.counts.keys()&part.fields.keys(): self.counts[field] += part.fields[field].get('n', part.n)
        for field,spec in part.fields.items():
            if spec['codec']!='cls': continue
            # the type has to hold all codes of the vocabulary; without one, the integers themselves
            vocab,labels,known = self.manifest.vocab.get(field),[0, *part.vocab.get(field, ())],self.fields[field]
            needed = narrow(min(labels), max(labels)) if vocab is None else code_dtype(len(vocab))
            self.fields[field] = {**known, 'dtype':wider_dtype(self.manifest.name, field, known['dtype'], needed)}
        return number

    def free(self, numbers, fields):
        for field in fields:
            self.counts[field] -= int(self.store.has(field, numbers).sum())
            if self.fields[field]['dtype'] is None: self.subtract_bytes(_value_bytes(self.store, field, numbers))

    def forget(self, fields):
        for field in fields:
            n,dtype = self.counts.pop(field, 0),self.fields[field]['dtype']
            self.subtract_bytes(_field_bytes(self.store, field) if dtype is None else n*np.dtype(dtype).itemsize)

    def finish(self):
        manifest,files = super().finish()
        for field,n in self.counts.items():
            spec = manifest.fields.get(field)
            if spec is None: continue
            spec = manifest.fields[field] = {key:value for key,value in spec.items() if key!='n'}
            if n<manifest.n: spec['n'] = n
        # the tables of shards are without those whose samples or fields were dropped
        joined = joined_tables(self.tables)
        used,_ = ordered_shards(self.columns[''], joined, [part['n'] for part in self.parts])
        is_unused = np.ones(len(joined), bool)
        is_unused[used] = False
        ends = np.cumsum(list(map(len, self.tables)))[:-1]
        for part,table,unused in zip(self.parts, self.tables, np.split(is_unused, ends)):
            is_added = has_added_values(part)
            if not is_added or not part['fields']: part['shards'] = table.freed(unused|is_added).pack()
        return manifest,files

def _value_bytes(store, field, numbers):
    """Returns how many bytes the values of a variable-width field of samples `numbers`, an array, have together

    0 if an index is damaged or gone: values that are lost can be replaced or dropped."""
    try: return sum(part.value_bytes(field, places) for part,_,places in store.groups(numbers, field))
    except (CorruptSample,MissingSample): return 0

def _field_bytes(store, field, n=16):
    """Returns about how many bytes all values of a variable-width field have: those in `n` shards, times a factor

    It is exact if there are no more shards. Reading the indices of all of them might take long."""
    starts = store.shards.starts.tolist()
    shards = np.unique(np.linspace(0, len(starts)-2, n).astype(np.int64)).tolist() if len(store) else []
    measured = sum(_value_bytes(store, field, np.arange(*starts[shard:shard+2])) for shard in shards)
    return round(measured*len(store)/max(1, sum(starts[shard+1]-starts[shard] for shard in shards)))

# --- The writer
#
# An ingest writes shards, an index for each of them, and at the end `manifest.json`. Without a manifest, readers see no
# dataset. While it runs, its state is in the folder `.fastai_remote/.ingest`: the plan, a lock, and a record for each
# chunk that is done. Each of these files ends with a checksum. A chunk whose record is damaged counts as not written,
# and is written again. A damaged plan is an error, whose message says how to drop the ingest.

# --- ShardWriter

# A chunk is about as large as a shard, so that each chunk becomes one shard or a few. `begin` returns the plan of an
# earlier ingest if it has the same signature, and the ingest continues with it. Shards that others wrote are never
# changed: if they are only to be indexed (`foreign=True`), the plan has no prefix, and nothing is removed but the files
# of the index.

# A chunk has fewer shards. If an ingest is taken over for the k-th time, its new shards are numbered from k times this,
# so that no process of an earlier run, which may only be stopped, has shards of the same names
_SHARDS_PER_CHUNK = 1_000_000
_CHUNK_BYTES = 64e6 # Of the raw samples of a stream: two chunks per worker wait in memory

class ShardWriter(Writer):
    "Writes tar shards into a folder: call `begin`, then `put` and `done` from any process, then `commit` and `close`"
    n_examples = 32
    takes_keys = True

    def __init__(self,
        storage:Storage, # The folder
        maxsize:float=1e8, # Bytes that a shard may have
        maxcount:int=100_000, # Samples that a shard may have
        name:str=None, # Name of the dataset; default: that of the folder
        foreign:bool=False, # Were the shards written by others, and are they only to be indexed?
        base:Store=None, # As in `Writer`, like `change`
        change:Change=None
    ):
        if not (1<=maxsize<np.inf and 1<=maxcount<np.inf):
            raise ValueError(f'maxsize and maxcount are numbers of at least 1, not {maxsize} and {maxcount}')
        self.place,self.base,self.change = FolderPlace(storage, name, foreign),base,change
        self.storage,self.hidden = storage,self.place.hidden
        self.maxsize,self.maxcount = int(maxsize),int(maxcount)
        # The chunk that is being written
        self.stack = ExitStack() # Closes the file of the open shard
        self.open_shard,self.chunk = None,None # A `ShardFile`, or `None`; number of its chunk
        self.shards = [] # A `ShardRow` of each shard that was written
        self.put_samples,self.put_bytes = 0,0

    @property
    def tars(self)->Storage:
        "The folder of the shards that are written: our own one for values that are added or changed"
        return self.hidden if 'part' in self.plan else self.storage

    @property
    def index_version(self)->int:
        "The version, as in `index_name`, of what is written for others' shards: the dataset before needs its own files"
        return self.plan['generation'] if self.plan['generation']>1 else 0

    def chunk_size(self, n:int, each:float, num_workers:int)->int:
        "Returns how many samples fit into a shard, but at most an eighth of all `n`, or 64 if that is more"
        fitting = int(.85*self.maxsize/max(each, 1))   # .85, because `each` is an estimate
        return max(1, min(self.maxcount, fitting, max(64, -(-n//8))))

    def stream_chunk_size(self, source)->int:
        """Returns how many samples of a stream fit into a shard, and into 64 MB when they are sent to a worker

        At most 16,384 and `maxcount`; 1024 if their size is not known."""
        each = source.raw_bytes   # may read the first samples
        fitting = int(min(self.maxsize, _CHUNK_BYTES))//each if each else 1024
        return min(self.maxcount, 16384, max(fitting, 1))

    def cost(self, sample:dict)->int:
        "Returns the bytes that an encoded sample takes in a tar: a header per field, and its content, padded to 512"
        return max(1, sum(map(_member_bytes, sample.values())))

    def check_dataset(self, dataset, overwrite):
        super().check_dataset(dataset, overwrite)
        if self.change is not None and self.change.has_samples and not dataset.prefix:
            raise TypeError(f'{self.name}: others wrote these shards: index_shards adds more of theirs')

    def checked_plan(self, plan):
        plan = super().checked_plan(plan)
        if self.change is not None:
            plan |= dict(has_samples=self.change.has_samples, has_fields=self.change.has_fields)
        known = self.base.manifest.fields if plan.get('has_fields') else {}
        others = {field:spec for field,spec in known.items() if field not in plan['fields']}
        if others or not self.place.foreign: check_members(self.url, plan['fields'], others)
        sizes = f'{self.maxsize} {self.maxcount}'
        return {**plan, 'signature':f"{plan['signature']} {sizes} {ShardManifest.newest_format}"}

    def new_version(self):
        return ShardVersion(self.base, self.plan['generation'] if self.plan else self.base.manifest.generation+1)

    def write_part(self, new, run):
        self.shards,generation = [],self.base.manifest.generation+1
        self.plan = dict(n=new.part.n, chunk=new.part.n, fields=new.part.fields, splits=None, generation=generation,
                         part=added_prefix(generation))
        for numbers,columns in new.pieces(): self.put(numbers, columns)
        self._close_shard()
        part = new.part
        table = _TableOfRows()
        table.add(dict(shards=self.shards))
        shards = table.table().pack()
        return NewPart(ShardManifest(part.name, part.n, part.fields, vocab=part.vocab, nbytes=part.nbytes,
                                     counts=part.counts, prefix=self.plan['part'], shards=shards), new.numbers)

    def opener(self):
        return partial(_open_writer, self.storage.opener(), self.maxsize, self.maxcount, self.name, self.plan,
                       self.place.lock.token)

    # --- Writing chunks

    # Samples are appended to the open shard. A new shard begins if the open one has too many bytes or samples, and at
    # the start of another split: a shard never holds samples of two splits. If a chunk is too large for one shard, it
    # is divided into shards of about the same size. Fields keep the order of the plan, and the fields of a sample
    # follow each other.
    #
    # `done` publishes the last shard of the chunk and writes its record.

    def put(self,
        numbers:np.ndarray, # Sample numbers, ascending, shape (n,)
        columns:dict, # `{field: list of bytes or labels, or array}`, each of length n, as in `Writer.put`
    ):
        """Appends samples to the open shard, and begins new ones where needed; raises `StoreFull`, `StoreBusy`

        After an error, the open shard is not published; the chunk has to be written again, by a new writer."""
        try: self._put(numbers, columns)
        except BaseException:
            # closes the file without publishing it, and turns an error of the disk into `StoreFull`
            self.stack.__exit__(*sys.exc_info())
            raise

    def _put(self, numbers, columns):
        """Does what `put` does, but after an error the file of the open shard may still be open

        An error of writing to it stays an `OSError`."""
        fields = self.plan['fields']
        checksums = {f'{field}.crc' for field in fields}
        values_of = {field:columns[field] if isinstance(columns[field], list) else columns[field].tolist()
                     for field in fields if field in columns and field not in checksums}
        has_crc = [field for field in values_of if f'{field}.crc' in fields]
        keys = columns.get('__key__') or [None]*len(numbers)
        # samples that are appended have keys that no sample before has
        key_start = f"{self.plan['generation']}-" if self.plan.get('has_samples') else ''
        for k,number in enumerate(numbers.tolist()):
            sample = {field:values[k] for field,values in values_of.items()}
            self._ensure_shard(number, self.cost(sample))
            self.open_shard.add(f'{key_start}{number:09}' if keys[k] is None else keys[k], sample,
                                {field:int(columns[f'{field}.crc'][k]) for field in has_crc})

    def _ensure_shard(self, number, cost):
        """Counts a sample of `cost` bytes, and makes sure that a shard is open for it

        If the open shard is of another split than sample `number`, or is full, it is published and a new one is
        opened."""
        splits = self.plan['splits'] or {}
        split = next((split for split,(start,stop) in splits.items() if start<=number<stop), self.chunk_split)
        self.put_samples += 1
        self.put_bytes += cost
        if self.open_shard and (split!=self.split or self._is_full(cost)): self._close_shard()
        if self.open_shard: return
        chunk,part = number//self.plan['chunk'],_SHARDS_PER_CHUNK*self.plan.get('takeovers', 0)+len(self.shards)
        self.split,self.chunk = split,chunk
        prefix = self.plan.get('part') or self.plan['prefix']
        self.shard_name = f"{prefix}-{_name_part(split)}{chunk:06}{f'-{part}' if part else ''}.tar"
        file = self.stack.enter_context(self.tars.create(self.shard_name))
        self.open_shard = ShardFile(file, self.plan['fields'], has_numbers='part' not in self.plan)

    def _is_full(self, cost):
        """Returns whether the open shard has no space for a sample of `cost` bytes, or has its share of a large chunk

        If a chunk needs k shards, each gets about 1/k of it, unless they would be 90% full anyway."""
        shard = self.open_shard
        if shard.n>=self.maxcount or shard.size+cost+1024>self.maxsize: return True
        if self.put_samples<8: return False   # too few to estimate the size of the chunk
        chunk_bytes = self.put_bytes/self.put_samples*self.plan['chunk']
        share = chunk_bytes/-(-chunk_bytes//self.maxsize)
        return shard.size>=share and share<self.maxsize*.9

    def _close_shard(self):
        "Publishes the open shard, if any, and its index; adds its row to `shards`; raises `StoreBusy`, `StoreFull`"
        shard = self.open_shard
        if not shard: return
        self.open_shard = None
        with self.place.lock.publishing():
            if self._is_recorded(self.chunk):
                with suppress(_OtherAttempt), self.stack.pop_all(): raise _OtherAttempt   # removes what was begun
                return
            with self.stack.pop_all():   # publishes the shard; turns an error of the disk into `StoreFull`
                shard.close()
                index = shard.columns.pack()
                self.hidden.write(index_name(self.shard_name), index)   # first: a shard with an index is one of ours
        self.shards.append(ShardRow(self.shard_name, shard.n, shard.size, shard.crc, len(index), shard.size,
                                    crc32(index)))

    def _is_recorded(self, chunk):
        "Has an attempt recorded this chunk? For use while `publishing`"
        return bool(self._read_records([chunk], 1)[0])

    def done(self,
        chunk:int, # Number of the chunk
        record:dict, # As in `Writer.done`
        failures:list=(), # `(sample, reason)` of each sample that failed, both `str`
        run:str=None, # Not used: files do not get lost when a server restarts
    ):
        """Publishes the open shard, and records that the chunk is written, with all shards of this writer

        If the chunk has a record already, nothing changes. A writer, as `opener` makes it, is used for one chunk only.
        Raises `StoreBusy`, `StoreFull`."""
        self._close_shard()
        record = dict(record, shards=self.shards, failures=list(failures))
        with self.place.lock.publishing():
            if not self._is_recorded(chunk): self.hidden.write(_record_file(chunk), seal(record))

    def records(self):
        """Returns an iterator of `(chunk, record)`, in order, for the chunks that are done and whose record is not
        damaged

        Records of chunks that the plan does not have are left out. A record is what `done` got, with `shards` (of each
        the values of a `ShardRow`) and `failures`."""
        chunks = sorted(map(record_number, filter(RECORD_FILE.match, self.hidden.names('.ingest'))))
        for some in chunked([chunk for chunk in chunks if chunk<chunk_count(self.plan)], 64):
            for chunk,content in zip(some, self._read_records(some, _USUAL_RECORD)):
                if content is not None and len(content)==_USUAL_RECORD: content, = self._read_records([chunk], MAX_FILE)
                if content is None: continue   # removed by a process that has taken over
                try: record = unseal(content, MAX_STATE)
                except ValueError:   # it is damaged: the chunk is written again
                    with self.place.lock.publishing(): self.hidden.remove([_record_file(chunk)])
                else: yield chunk,record

    def _read_records(self, chunks, n_bytes):
        "The first bytes of the files with the records of `chunks`, at the same time; `None` for what is not there"
        files = list(map(_record_file, chunks))
        return self.hidden.ranges(files, [0]*len(files), [n_bytes]*len(files), beyond=True)

    def failures(self):
        "Returns an iterator of `(sample, reason)`, both `str`, for the samples that could not be converted"
        for _,record in self.records(): yield from map(tuple, record['failures'])

    def space(self,
        numbers, # Not used: the size is the average of all samples written so far
    )->tuple: # Bytes per sample, in tar and index; free bytes; total bytes; the last two are `None` on object storage
        "Returns how much space a sample takes on average, 0 if none is recorded, and how much is left"
        size,n = 0,0
        for _,record in self.records():
            n += record['ok']
            size += sum(row.size+row.idx for row in starmap(ShardRow, record['shards']))
        return size/max(n, 1),*self.storage.free_space()

    # Two chunks are written, the second one first. One of the samples fails.

    # --- Commit

    # The manifest is written last. What belongs to a dataset that was replaced is removed after that.

    def commit(self)->ShardManifest:
        """Adds up the records and publishes the dataset; returns its manifest

        Raises `ChunksLost` if chunks have no record, and `StoreBusy`."""
        plan,table = self.plan,_TableOfRows()
        totals = self.totals(table.add)
        prefix = plan.get('part', plan['prefix'])
        manifest = ShardManifest(self.name, 0, {}, generation=plan['generation'], prefix=prefix)
        totals.describe(manifest)
        shards = table.table()
        manifest.shards = shards.pack()
        if 'base' in plan:   # an index of others' shards has splits that are ranges of shards
            manifest.base,ends = plan['base'],shards.starts.tolist()
            manifest.splits = {split:[ends[start],ends[stop]] for split,(start,stop) in (plan['splits'] or {}).items()}
        self._write_failures(manifest)
        return self.publish([NewPart(manifest)], {})

    def _write_failures(self, manifest):
        "Writes the file of failures, if there are any, and sets its name and checksum in `manifest`"
        if not manifest.failed: return
        prefix = self.plan['prefix'] or f"index{self.index_version or ''}"
        manifest.failures = f'{prefix}-failures.json'
        with self.hidden.create(manifest.failures) as file:
            failures = SummingFile(file)
            for failure in self.failures():
                failures.write((json.dumps(failure, ensure_ascii=False)+'\n').encode('utf-8', 'surrogatepass'))
        manifest.failures_crc = failures.crc

def _member_bytes(value):
    if isinstance(value, str): value = value.encode()
    return 512*(2+(len(value)-1)//512) if isinstance(value, bytes) else 1024

def _open_writer(open_storage, maxsize, maxcount, name, plan, token):
    """Returns a new writer, which uses the connection that all writers of this process share

    `open_storage` is what `Storage.opener` returned; `token` is that of the leader's lock."""
    writer = ShardWriter(open_storage(), maxsize, maxcount, name)
    writer.plan,writer.place.lock.token = plan,token
    return writer

def _name_part(split):
    """The part of the name of a shard that tells its split, such as `train-`

    Empty without a split, or if its name is not a letter and then at most 63 ASCII letters, digits and underscores."""
    return f'{split}-' if split and re.fullmatch('[A-Za-z][A-Za-z0-9_]{0,63}', split) else ''

class _OtherAttempt(Exception): "Another attempt has recorded the chunk first: its shards count"

_USUAL_RECORD = 1<<19   # bytes; longer ones are read once more, alone

def _record_file(chunk): return f'.ingest/chunk-{chunk:06}.json'

class _TableOfRows:
    "A table of shards that is made of rows, in little memory"
    def __init__(self): self.columns = {name:[] if name=='name' else array('q') for name in ShardRow._fields}

    def add(self, record):
        "Adds the shards of a record"
        for row in starmap(ShardRow, record['shards']):
            for column,value in zip(self.columns.values(), row): column.append(value)

    def table(self):
        "The `ShardTable`"
        names,*_ = self.columns.values()
        return ShardTable(names, **{name:np.array(self.columns[name]) for name in ShardRow._fields[1:]})
