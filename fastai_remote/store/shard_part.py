"""A part of a dataset in shards: its tars, their indices, and how values are read from them

Docs: page `store/shard_part`"""

# Shards are never changed. `store.append` writes more of them, which are another part of the dataset.
# `store.add_fields` computes embeddings, texts or images of another size, and `store.edit` replaces a few of them: the
# new values are parts, too, whose shards are in the folder `.fastai_remote`. Numbers and labels of these are only in
# their indices, as no other tool reads their tars. A table of runs says for each field which part has the values of
# which samples. A sample that is dropped leaves the tables, so a part never has to be written again.
#
# Values of fixed-width fields are in the index of the shard. Values of variable-width fields are read from the shard's
# file, if it is on this machine or in the cache, or by ranges over the network.

import hashlib, os
from typing import NamedTuple

import numpy as np

from ..core import CorruptSample, MissingSample, StoreError
from .parts import Part
from .shard_index import INDEX_FOLDER, ShardTable
from .shard_indices import ShardIndices
from .storage import Storage
from .whole_shards import WholeShards

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

    def cut_off_error(self, number, place, field, received, length)->CorruptSample:
        "The error to raise for a value of which only `received` of `length` bytes came; `StoreNotFound` if replaced"
        self.store.check_version(is_missing=True)
        return CorruptSample(f'{self.name}: sample {number}, field {field!r}{self.location(place, field)}: '
                             f'{received:,} of {length:,} bytes: the shard is cut off, or not the one that was indexed')

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

        The copy in the cache is removed. Raises what `cut_off_error` raises if there is no other copy."""
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
        "Put the value where it belongs; raises `CorruptSample` if it is too short, and what `cut_off_error` raises"
        if len(value)<self.length: raise self.cut_off(len(value))
        self.values[self.place] = value

    def cut_off(self, received):
        number,place = self.request.numbers[self.place],int(self.request.places[self.place])
        return self.part.cut_off_error(number, place, self.field, received, self.length)

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
