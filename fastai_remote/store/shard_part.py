"""A part of a dataset in shards: its tars as open files, how values are read from them, and how all are checked

Docs: page `store/shard_part`"""

import hashlib, os, threading, warnings
from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32, crc32_combine

from ..clock import wait
from ..core import CorruptSample, MissingSample, StoreError
from .parts import Part, PartRequest
from .shard_index import decompressor, INDEX_FOLDER, pack_labels, ShardIndices, ShardTable
from .storage import open_regular, stamp_number, Storage

# --- Whole shards
#
# A loader knows the order of its epoch, so it knows which shards come next. `WholeShards` fetches them in this order
# into the cache. It keeps the wanted shards open and no others, so they can be read even if files that other processes
# fetch push them out of the cache.
#
# Until a shard has been fetched, its samples are read by ranges. With `wait`, a sample that is needed earlier waits for
# its shard, because fetching both at the same time would only divide the bandwidth.
#
# A shard that arrives damaged is fetched once more. If it stays damaged, its samples are read one by one, and those
# that are intact are used. A copy in the cache that turns out to be damaged is removed and fetched again, once.

_MAX_FILES = 64   # files that a process keeps open, unless more of them are wanted

class _File:
    "Owns the descriptor of an open file, which is closed when nobody uses this object any more"
    def __init__(self, fd): self.fd = fd
    def __del__(self, close=os.close): close(self.fd)

class WholeShards:
    "The shards of a part that one process has open as files, and a thread that fetches the next ones"
    def __init__(self,
        part # A `ShardPart`
    ):
        self.part,self.lock,self.files = part,threading.RLock(),OrderedDict()
        self.changed = threading.Condition(self.lock) # Notified when a shard has been fetched, dropped or given up
        self.wanted,self.wait = [],False # What `prefetch` was called with
        self.failed = {} # `{shard: reason}`: wanted shards that cannot be fetched
        self.thread = None # Fetches `wanted`, and ends when all are there
        self.dropped = set() # Shards whose copies were damaged
        self.stamps = {} # `{shard: stamp_number}` of those that were looked at in this epoch
        # `{shard: (stamp_number, what is wrong, a text)}` of those whose stamp is another than when they were indexed;
        # '' if their bytes are the same
        self.compared = {}

    def new_epoch(self):
        "If the shards have stamps, these are looked at again when a shard is needed, and all are opened again"
        if not self.part.table.stamp.any(): return
        with self.lock:
            self.wanted = []
            for known in self.stamps,self.files,self.failed: known.clear()
            self.changed.notify_all()

    def stamp(self,
        shard:int # Number of the shard
    )->int:
        """The `stamp_number` that a shard has now, looked at once in an epoch; 0 if none was recorded

        Raises `CorruptSample` if it has another size than when it was indexed, `StoreUnavailable`, `StoreNotFound`."""
        part,table = self.part,self.part.table
        recorded,known = table.stamp_of(shard),self.stamps.get(shard, 0)
        if known or not recorded: return known
        try: size,stamp = part.tars.size_and_stamp(part.file(shard))
        except FileNotFoundError: return recorded   # reading it is an error that says more
        if size not in (None, table.size[shard]):
            raise part.changed_error(shard, f'it has {size:,} bytes, and had {int(table.size[shard]):,}')
        now = self.stamps[shard] = stamp_number(stamp) or recorded   # some storage does not tell
        return now

    def check(self,
        shard:int # Number of the shard
    ):
        """Raises `CorruptSample` if a shard of others has changed since it was indexed

        If its time or its ETag is the same, so are its bytes. If not, as it may have been copied, its bytes are
        compared with their checksum: those that come into the cache, if there is one. Raises what `stamp` and `fetch`
        raise."""
        now = self.stamp(shard)
        if now==self.part.table.stamp_of(shard): return
        stamp,wrong = self.compared.get(shard, (0,''))
        if stamp!=now:
            try: self._compare(shard)
            except CorruptSample as e: wrong = str(e)
            else: wrong = ''
            self.compared[shard] = now,wrong
        if wrong: raise CorruptSample(wrong)

    def _compare(self, shard):
        "Raises `CorruptSample` unless a shard has the bytes that were indexed"
        table,fd = self.part.table,None
        if self.part.cache is not None and not self.part.in_place(shard):
            key = self.part.shard_key(shard)   # what is there by this name was compared when it came
            fd = self.part.cache.open(key, table.whole(shard)) or self.fetch(shard)
        if fd is not None: os.close(fd)
        else:
            with open(os.devnull, 'wb') as file: self.download(shard, file)

    def get(self,
        shard:int # Number of the shard
    )->_File: # With the descriptor `fd`; `None` if the shard is not on this machine
        """A shard as an open file: where it is stored, if it is read there, else its copy in the cache

        A compressed shard is fetched into the cache first, if there is a cache that can keep it. May wait for a shard
        that `prefetch` fetches. Raises `MissingSample`, `CorruptSample`, `StoreNotFound`, `StoreUnavailable`."""
        with self.lock:
            if shard in self.files:
                self.files.move_to_end(shard)
                return self.files[shard]
        part = self.part
        if part.in_place(shard):
            try: fd = open_regular(part.tars.path(part.file(shard)))
            except FileNotFoundError: raise part.missing_shard_error(shard) from None
            file = _File(fd)
            part.store.check_version()   # another dataset may have files of the same names
        else:
            fd = None if part.cache is None else self._open_cached(shard)
            if fd is None: return
            file = _File(fd)
        with self.lock:
            self.files[shard] = file
            # those that are wanted stay: who reads them waits until they are in `files`
            others = [shard for shard in self.files if shard not in self.wanted]
            for shard in others[:max(0, len(self.files)-_MAX_FILES)]: del self.files[shard]
            return file

    def _open_cached(self, shard):
        """A new descriptor of a shard in the cache, for the caller to close; None if it is not there

        If the shard is wanted, and `wait` was given, waits until the thread has fetched it or failed. A compressed
        shard is fetched here if it is not there; raises what `fetch` raises."""
        with self.lock:
            while self.wait and shard in self.wanted and shard not in self.failed:
                if shard in self.files: return os.dup(self.files[shard].fd)
                wait(self.changed, 1)
        part = self.part
        fd = part.cache.open(part.shard_key(shard), part.table.whole(shard))
        if fd is not None: return fd
        if part.table.compression(shard): return self.fetch(shard)   # a compressed shard cannot be read in parts

    def prefetch(self,
        shards:list, # Numbers of shards, in the order in which they will be used
        wait:bool # Wait for a shard of `shards` when one of its samples is read?
    ):
        "Fetch `shards` in the background, keep these open, and close those that are not among them"
        with self.lock:
            self.wait = wait
            if self.wanted==shards: return
            self.wanted = list(shards)
            for known in self.files,self.failed:
                for shard in [shard for shard in known if shard not in shards]: del known[shard]
            self._start_thread()

    def _start_thread(self):
        if self.thread is not None: return
        thread = threading.Thread(target=self._fetch_wanted, daemon=True, name='shards')
        try: thread.start()
        except RuntimeError:   # the system has no thread left
            self.wanted = []   # nobody may wait for shards that nothing fetches
            self.changed.notify_all()
            raise
        self.thread = thread

    def drop(self,
        shard:int # Number of the shard
    ):
        """Remove a shard's copy that this process has open, which is damaged, from the cache, and warn

        If the shard is wanted, it is fetched again, but only once. Does nothing if this process has no copy open."""
        with self.lock: file = None if self.part.in_place(shard) else self.files.pop(shard, None)
        if file is None: return
        part,name = self.part,self.part.file(shard)
        removed = part.cache.drop(part.shard_key(shard), file.fd)
        with self.lock:
            if shard in self.wanted and shard in self.dropped:
                self.failed[shard] = 'its copies in the cache are damaged again and again'
            elif shard in self.wanted: self._start_thread()
            self.dropped.add(shard)
            self.changed.notify_all()
        what = ', and was removed' if removed else ', but cannot be removed'
        warnings.warn(f'{part.name}: the copy of {name} in the cache {part.cache.folder} is damaged{what}; '
                      'what it holds is fetched again; is the disk failing?', stacklevel=2)

    def _fetch_wanted(self):
        """Run by the thread: fetch the wanted shards one after the other into `files`, and end when none is left

        Shards that are read in place are not fetched. A shard that cannot be fetched is put into `failed`."""
        while True:
            with self.lock:
                shard = next((s for s in self.wanted if s not in self.files and s not in self.failed
                              and not self.part.in_place(s)), None)
                if shard is None:
                    self.thread = None
                    return
            fd,reason = None,'the cache cannot keep it'
            try: fd = self.fetch(shard)
            except Exception as e: reason = e   # whoever needs one of its samples gets the error then
            with self.lock:
                file = None if fd is None else _File(fd)
                if file is None: self.failed[shard] = reason
                elif shard in self.wanted: self.files[shard] = file
                self.changed.notify_all()

    def fetch(self,
        shard:int # Number of the shard
    )->int: # `None` if the cache cannot keep the shard
        """A new descriptor of a shard in the cache, for the caller to close

        If the shard is not there, it is fetched into the cache first. Raises what `download` raises."""
        part = self.part
        return part.cache.fetch(part.shard_key(shard), part.table.whole(shard), partial(self.download, shard))

    def download(self,
        shard:int, # Number of the shard
        file # A binary file to write to
    ):
        """Write a shard to `file`, decompressed, and compare the checksum of the shard as it is stored

        If the bytes are not those that were indexed, all are transferred once more, to the start of `file`. Raises
        `CorruptSample`, `MissingSample`, `StoreNotFound` if the dataset was replaced, and `StoreUnavailable`."""
        part,table = self.part,self.part.table
        for _ in range(2):
            file.seek(0)
            unpack = decompressor(table.compression(shard)) or (lambda content: (content,))
            crc,received,left = 0,0,table.whole(shard)
            for content in self.pieces(shard):
                crc,received = crc32(content, crc),received+len(content)
                for piece in unpack(content):
                    left -= len(piece)
                    if left<0: break   # more than `file` has a place for
                    file.write(piece)
            if crc==table.crc[shard] and not left: return
        size = int(table.size[shard])
        if received==size and self.stamp(shard)!=table.stamp_of(shard):
            raise part.changed_error(shard, 'its bytes do not match their checksum')
        what = f'{received:,} of {size:,} bytes' if received<size else 'not the bytes that were indexed'
        raise CorruptSample(f'{part.name}: shard {part.file(shard)}: {what} (2 times)')

    def pieces(self,
        shard:int # Number of the shard
    ): # Iterator of `bytes`
        """The bytes of a shard as it is stored, to its end or to where it is cut off

        Raises `MissingSample`, or `StoreNotFound` if the dataset was replaced, and `StoreUnavailable`."""
        table = self.part.table
        for content in self.part.tars.parts(self.part.file(shard), int(table.size[shard])):
            if content is None: raise self.part.missing_shard_error(shard)
            yield content

# --- A part
#
# Shards are never changed. `store.append` writes more of them, which are another part of the dataset.
# `store.add_fields` computes embeddings, texts or images of another size, and `store.edit` replaces a few of them: the
# new values are parts, too, whose shards are in the folder `.fastai_remote`. Numbers and labels of these are only in
# their indices, as no other tool reads their tars. A table of runs says for each field which part has the values of
# which samples. A sample that is dropped leaves the tables, so a part never has to be written again.
#
# Values of fixed-width fields are in the index of the shard. Values of variable-width fields are read from the shard's
# file, if it is on this machine or in the cache, or by ranges over the network.

_MAX_GAP,_MAX_SPAN = 1<<15,1<<23   # ranges that are closer than this are read together, up to so many bytes

class ShardPart(Part):
    "Shards that were written at the same time, as one process reads them"
    gaps = {} # A sample that fails leaves no place in a shard
    def __init__(self,
        store, # The `ShardReader`
        table:ShardTable, # Of its shards
        is_added:bool # Are these values that were added or changed, whose shards are in our own folder?
    ):
        self.store,self.table,self.fields,self.n = store,table,store.manifest.fields,int(table.starts[-1])
        self.name,self.storage,self.cache = store.name,store.storage,store.cache
        self.folder = f'{INDEX_FOLDER}/' if is_added else '' # Path of its shards in the folder `tars`
        self.tars:Storage = store.storage if is_added else store.tars # The folder of the dataset that has its shards
        self.indices,self.whole_shards,self._codes = ShardIndices(self),WholeShards(self),{}

    def file(self,
        shard:int # Number of a shard
    )->str:
        "Path of a shard in the folder `tars`"
        return self.folder+self.table.name(shard)

    def samples(self,
        shard:int # Number of a shard
    )->str:
        "Which samples a shard has, for messages; of a dataset that was changed, only how many"
        if self.store.manifest.runs: return f'{self.table.n[shard]:,} samples'
        first,stop = self.table.starts[shard:shard+2].tolist()
        return f'samples {first:,} to {stop-1:,}'

    def in_place(self,
        shard:int # Number of a shard
    )->bool:
        "Is a shard a file on this machine that is read where it is stored, without a copy in the cache?"
        if not self.tars.local or self.table.compression(shard): return False
        return self.cache is None or not self.store.copies_local

    def cache_key(self,
        file:str, # Path of a file of the dataset
        crc:int # Its checksum
    )->str:
        """Name of its copy in the cache

        It says where the file comes from, as a dataset of somebody else may repeat names and checksums of this one,
        which anyone can read. A new version of the dataset finds the files that it shares with the one before."""
        place = hashlib.sha256(f'{self.store.origin}/{file}'.encode()).hexdigest()[:16]
        return f"{place}.{crc:08x}-{file.replace('/', '%2F')[-50:]}"   # names of files have at most 255 bytes

    def shard_key(self,
        shard:int # Number of a shard
    )->str:
        """Name of the copy of a shard in the cache, as `cache_key`

        A shard of others whose time or ETag has changed since it was indexed has another name than before. So what is
        in the cache by a name was compared with the checksum when it had this stamp. Raises what `WholeShards.stamp`
        raises."""
        stamp,key = self.whole_shards.stamp(shard),self.cache_key(self.file(shard), int(self.table.crc[shard]))
        return key if stamp==self.table.stamp_of(shard) else f'{key}@{stamp:x}'

    def new_epoch(self):
        "As in `Store`"
        self.whole_shards.new_epoch()
        self.indices.new_epoch()

    # Errors

    def changed_error(self,
        shard:int, # Number of the shard
        why:str # What is different
    )->CorruptSample:
        "The error to raise when others have changed a shard since it was indexed; `StoreNotFound` if replaced"
        self.store.check_version(is_missing=True)
        return CorruptSample(f'{self.name}: shard {self.file(shard)} has changed since it was indexed: {why}; '
                             f'index_shards({self.tars.url!r}, …, overwrite=True) indexes all shards anew')

    def missing_shard_error(self,
        shard:int # Number of the shard
    )->MissingSample:
        "The error to raise when the file of a shard does not exist; raises `StoreNotFound` if the dataset was replaced"
        self.store.check_version(is_missing=True)
        file = self.file(shard)
        return MissingSample(f'{self.name}: shard {file} is not there, with {self.samples(shard)}: '
                             f'{self.tars.url}/{file}')

    def location(self, place, field):
        "As in `Part`: ' in SHARD at byte OFFSET', without the offset if it is not known"
        shard,position = (int(o[0]) for o in self.table.at(np.array([place])))
        try:
            index = self.indices.get([shard])[shard]
            (start,),(length,) = index.spans(field, np.array([position]))
        except StoreError: length = -1
        return f' in {self.file(shard)}'+(f' at byte {int(start):,}' if length>=0 else '')

    # What is in the indices

    def by_shard(self,
        places:np.ndarray # Of samples in the part, shape (k,)
    ): # Yields `(shard, its ShardIndex, positions in places, positions in the shard)`
        "The samples by their shards; raises what `ShardIndices.get` raises"
        shard_of,position = self.table.at(places)
        for shard,index in self.indices.get(np.unique(shard_of).tolist()).items():
            here = np.flatnonzero(shard_of==shard)
            yield shard,index,here,position[here]

    def has(self, field, places):
        result = np.zeros(len(places), bool)
        for _,index,here,positions in self.by_shard(places): result[here] = index.has(field, positions)
        return result

    def keys(self,
        places:np.ndarray # Of samples in the part, shape (k,)
    )->list: # Of `str`
        "The keys of samples; no shard is read for them"
        result = [None]*len(places)
        for _,index,here,positions in self.by_shard(places):
            order = np.argsort(positions, kind='stable')   # neighbouring keys are compressed together
            for place,key in zip(here[order].tolist(), index.keys(positions[order])): result[place] = key
        return result

    def value_bytes(self,
        field:str, # A variable-width field
        places:np.ndarray # Of samples in the part, shape (k,)
    )->int:
        "How many bytes the values of samples have together"
        return sum(int(index.spans(field, at)[1].clip(0).sum()) for _,index,_,at in self.by_shard(places))

    # Reading

    def read(self,
        request, # A `PartRequest`
        whole:bool # Read copies in the cache, and open files? Else only compressed shards are read from them
    )->tuple: # `{field: values}`; a list of `Span`, the values that are still missing
        "Read values that are on this machine, and say where the others are"
        fields,n,spans = self.fields,len(request.places),[]
        variable = [field for field in request.fields if fields[field]['dtype'] is None]
        # checksums alone are for values in another cache, which are those of the shards when they were indexed
        checks = bool(variable) or any(field.endswith('.crc') for field in request.fields)
        result = {field:[None]*n if field in variable else np.zeros(n, fields[field]['dtype'])
                  for field in request.fields}
        for shard,index,here,positions in self.by_shard(request.places):
            if checks: self.whole_shards.check(shard)
            for field in request.fields:
                if field in variable: continue
                result[field] = self._read_numbers(index, field, positions, result[field], here)
            if variable: spans += self._read_variable(shard, index, here, positions, variable, request, result, whole)
        return result,spans

    def _read_numbers(self, index, field, positions, values, here):
        """Put the values of a fixed-width field at the positions `here` of `values`, and return `values`

        `positions` are those of the samples in the shard with this `ShardIndex`; both are int arrays of the same
        length. If a sample has no value, `values` becomes a list with `None`; the checksum of such a value is 0."""
        dtype,is_present = self.fields[field]['dtype'],index.has(field, positions)
        if isinstance(values, np.ndarray) and is_present.all():
            values[here] = index.values(field, positions, dtype, self._codes_of(field))
            return values
        if field.endswith('.crc'): return values   # no sample of the shard has the field
        values = list(values)
        for place in here.tolist(): values[place] = None
        if not is_present.any(): return values
        found = index.values(field, positions[is_present], dtype, self._codes_of(field))
        for place,value in zip(here[is_present].tolist(), found): values[place] = value
        return values

    def _read_variable(self, shard, index, here, positions, fields, request, result, whole):
        """Put the values of variable-width `fields` of a shard into `result`, if the shard is on this machine

        `here` and `positions` as in `_read_numbers`. Returns a list of `Span` for what has to be requested. Raises
        `CorruptSample`, and what `WholeShards.get` raises."""
        size,spans = self.table.whole(shard),[]
        is_compressed = self.table.compression(shard)!=''
        file = self.whole_shards.get(shard) if whole or is_compressed else None
        for field in fields:
            starts,lengths = index.spans(field, positions)
            values = result[field]
            for place,start,length in zip(here.tolist(), starts.tolist(), lengths.tolist()):
                if length<0: continue   # this sample has no such field
                is_inside = start>=0 and start+length<=size   # else the index is damaged
                value = os.pread(file.fd, length, start) if file is not None and is_inside else None
                if value is not None and len(value)==length:
                    values[place] = value
                    continue
                span = Span(self, shard, start, length, field, values, place, request)
                if not is_inside: raise span.cut_off(max(0, min(length, size-start)))
                if value is not None: file = self._other_copy(span, len(value))
                if file is None: spans.append(span)
                else: span.put(os.pread(file.fd, length, start))
        if not spans or not is_compressed: return spans
        why = 'ShardStore(url, cache=folder) has one' if self.cache is None else f'{self.cache!r} cannot keep it'
        raise StoreError(f'{self.name}: {self.file(shard)} is compressed, and so read whole, into a cache: {why}')

    def _other_copy(self, span, received):
        """Another copy of a shard than the one that is cut off, as a file; `None` if its values are read one by one

        The copy in the cache is removed. Raises what `Span.cut_off` raises if there is no other copy."""
        if self.in_place(span.shard): raise span.cut_off(received)
        self.whole_shards.drop(span.shard)
        return self.whole_shards.get(span.shard) if self.table.compression(span.shard) else None

    def _codes_of(self, field):
        "`{label: code}` of `field` in the dataset; empty if the field has no vocabulary"
        if field not in self._codes:
            self._codes[field] = {label:code for code,label in enumerate(self.store.manifest.vocab.get(field, []))}
        return self._codes[field]

class Span(NamedTuple):
    "Where a value is in a shard, and where it belongs"
    part:ShardPart
    shard:int # Number of the shard
    start:int # First byte in the shard, decompressed
    length:int # Bytes
    field:str
    values:list # Of the field; gets the value
    place:int # Its position there
    request:object # The `PartRequest` that it is for

    def put(self,
        value:bytes # What was read
    ):
        "Put the value where it belongs; raises `CorruptSample` if it is too short, and what `cut_off` raises"
        if len(value)<self.length: raise self.cut_off(len(value))
        self.values[self.place] = value

    def cut_off(self,
        received:int # Bytes of the value that came
    )->CorruptSample:
        "The error to raise if that is not all of it; raises `StoreNotFound` if the dataset was replaced"
        part,number = self.part,self.request.numbers[self.place]
        part.store.check_version(is_missing=True)
        where = part.location(int(self.request.places[self.place]), self.field)
        return CorruptSample(f'{part.name}: sample {number}, field {self.field!r}{where}: {received:,} of '
                             f'{self.length:,} bytes: the shard is cut off, or not the one that was indexed')

def _read_spans(tars, spans):
    """Read `spans`, a list of `Span`, from the folder `tars`, neighbours in one request; sorts `spans`

    Raises `MissingSample`, `CorruptSample`, `StoreNotFound` and `StoreUnavailable`."""
    joined,files = [],{}
    spans.sort(key=lambda span: (id(span.part), span.shard, span.start, span.length))
    for span in spans:
        file = files.setdefault((id(span.part), span.shard), span.part.file(span.shard))
        end,last = span.start+span.length,joined[-1] if joined else None
        is_near = last and last[0]==file and span.start<=last[2]+_MAX_GAP and end-last[1]<=_MAX_SPAN
        if is_near: last[2] = max(last[2], end)
        else: joined.append([file, span.start, end, []])
        joined[-1][3].append(span)
    for (_,start,_,some),content in zip(joined, tars.ranges(*map(list, list(zip(*joined))[:3]))):
        for span in some:
            if content is None: raise span.part.missing_shard_error(span.shard)
            span.put(content[span.start-start:span.start-start+span.length])

def read_shards(
    requests:list, # Of `PartRequest` of a `ShardPart`
    whole:bool=True # As in `ShardPart.read`
)->list: # `{field: values}` for each of them
    """Read values of several parts, those that are not on this machine in one set of requests

    Raises `MissingSample`, `CorruptSample`, `StoreNotFound` and `StoreUnavailable`."""
    results,spans = [],{}
    for request in requests:
        values,missing = request.part.read(request, whole)
        results.append(values)
        if missing: spans.setdefault(id(request.part.tars), (request.part.tars, []))[1].extend(missing)
    for tars,some in spans.values(): _read_spans(tars, some)
    return results

# --- Checks
#
# Each value has a checksum, which is compared when the value is read. A tar contains more than values: headers,
# padding, and members that no sample uses. A dataset has more files than tars, and the cache contains copies.
# `damaged_parts` reads all of it, part by part, and compares it with the checksums in the manifest.

# --- Damage within values, or outside of them

# The checksum of a tar says that something in it is damaged, but not what. `verify` reports damaged values by sample,
# so the question here is whether there is other damage as well.
#
# A crc32 answers this without further checksums, because it is linear. If two contents of the same length differ by `d`
# (an exclusive or), their checksums differ by a value that depends only on `d`. So the differences of the checksums of
# damaged values, each moved to its place in the file (a multiplication by a power of x), must add up to the difference
# of the checksum of the whole file. If they do not, other bytes are damaged too. `crc32_combine` moves a difference: it
# is that of the checksums of two contents, after the same bytes are appended to both.

# --- All files

_PART_BYTES = 1<<22   # bytes read at a time

def damaged_parts(
    part # A `ShardPart`
): # Iterator of `(what, reason)`: the name of a file, and a text
    """Finds files of a dataset that are damaged or missing, and damaged copies in the cache

    In an uncompressed shard whose index is intact, damage within values is left out: reading the samples finds it.
    Damaged copies are removed from the cache. Raises `StoreUnavailable`, and `StoreNotFound` if the dataset was
    replaced."""
    for shard in np.flatnonzero(part.table.idx).tolist():   # those whose files are needed
        yield from _check_index(part, shard)
        try: key = part.shard_key(shard)
        except CorruptSample:   # it has changed since it was indexed
            key = part.cache_key(part.file(shard), int(part.table.crc[shard]))
        fd = None if part.cache is None else part.cache.open(key)
        try:
            expected = yield from _check_shard(part, shard, fd is not None)
            if fd is not None and expected is not None: yield from _check_copy(part, shard, key, fd, expected)
        finally:
            if fd is not None: os.close(fd)

def check_labels(
    store # A `ShardReader`
): # As from `damaged_parts`
    """Finds out whether `labels.json` is missing or is not as it was written

    Nothing is yielded if there are no labels, or if others have written the shards."""
    manifest,name = store.manifest,'labels.json'
    expected = pack_labels(manifest.vocab) if manifest.prefix else b''
    if not expected: return
    stored = store.storage.ranges([name], [0], [len(expected)+1], beyond=True)[0]
    if stored==expected: return
    reason = 'it is not there' if stored is None else 'it is not as it was written'
    yield name,f'{store.name}: {name}: {reason}; only other tools read it'

def _check_index(part, shard):
    """Yields `(what, reason)`, as `damaged_parts`, if the index of a shard is missing or damaged where it is stored

    Also if its copy in the cache is damaged; the copy is removed then."""
    indices = part.indices
    name = indices.file(shard)
    if not part.storage.local and part.cache is not None:
        try: indices.cached(shard)
        except CorruptSample as e: yield name,f'{e}; it was removed there, and is fetched again'
    try: indices.stored([shard])
    except (CorruptSample,MissingSample) as e: yield name,str(e)

def _check_shard(part, shard, has_copy):
    """Yields `(what, reason)`, as `damaged_parts`, if shard number `shard` is missing or damaged where it is stored

    `has_copy` says whether it is in the cache, too. The value of `yield from` is the checksum that this copy, which is
    decompressed, must have; `None` if it is unknown, as the shard is missing, or compressed and damaged."""
    table,name,size = part.table,part.file(shard),int(part.table.size[shard])
    compressed = table.compression(shard)
    unpack = decompressor(compressed) if has_copy else None
    crc = unpacked_crc = received = 0
    try:
        for content in part.whole_shards.pieces(shard):
            crc,received = crc32(content, crc),received+len(content)
            for piece in unpack(content) if unpack else (): unpacked_crc = crc32(piece, unpacked_crc)
    except MissingSample as e:
        yield name,str(e)
        return
    if crc==table.crc[shard]: return unpacked_crc if unpack else crc
    where = f'{part.name}: shard {name}, with {part.samples(shard)}'
    wrong = f'{where}: its {size:,} bytes do not match their checksum'
    try: part.whole_shards.check(shard)
    except CorruptSample as e:
        yield name,str(e)
        return None
    if received<size: yield name,f'{where}: {received:,} of {size:,} bytes: it is cut off'
    elif compressed: yield name,f'{wrong}; it is compressed, so that all of it is suspect'
    elif (change := _damage_of_values(part, shard)) is None:
        yield name,f'{wrong}; its index is damaged, too, or cannot be read, so that all of it is suspect'
    elif change!=crc^int(table.crc[shard]):
        yield name,(f"{wrong}, some of them outside the samples' values (headers, padding, members that are not used, "
                    'or labels and numbers, which are read from the index): samples are read all the same, with the '
                    'labels and numbers of the index, which may be others than in the shard; `tar` and WebDataset '
                    'may not read it')
    return None if compressed else int(table.crc[shard])

def _damage_of_values(part, shard, batch=256):
    """How damaged values change the checksum of a shard: an `int`, the exclusive or of the checksums with and without

    It is 0 if no value is damaged, and None if the index of the shard is damaged or cannot be read. Reads `batch`
    values at a time."""
    table,change = part.table,0
    try: index = part.indices.get([shard])[shard]
    except StoreError: return None
    for field in [f for f in part.fields if f'{f}@' in index.columns and f'{f}.crc' in part.fields]:
        for first in range(0, index.n, batch):
            positions = np.arange(first, min(first+batch, index.n))
            starts,lengths = index.spans(field, positions)
            exists = lengths>=0
            positions,starts,ends = positions[exists],starts[exists],(starts+lengths)[exists]
            if (starts<0).any() or (ends>table.size[shard]).any(): return None
            places = table.starts[shard]+positions
            got, = read_shards([PartRequest(part, [field,f'{field}.crc'], places, places, slice(None))], whole=False)
            for value,expected,end in zip(got[field], got[f'{field}.crc'].tolist(), ends.tolist()):
                change ^= crc32_combine(crc32(value)^expected, 0, int(table.size[shard])-end)
    return change

def _check_copy(part, shard, key, fd, expected):
    """Yields `(what, reason)`, as `damaged_parts`, unless the copy of a shard in the cache has the checksum `expected`

    It is open as `fd`, its name there is `key`, and it is removed if it is damaged."""
    name,crc,size = part.file(shard),0,0
    while content:=os.pread(fd, _PART_BYTES, size): crc,size = crc32(content, crc),size+len(content)
    if crc==expected and size==part.table.whole(shard): return
    removed = part.cache.drop(key, fd)
    then = 'it was removed there, and is fetched again' if removed else 'it cannot be removed there'
    what = f'{part.name}: {name} in the cache {part.cache.folder}: its {size:,} bytes do not match their checksum'
    yield name,f'{what}; {then}'
