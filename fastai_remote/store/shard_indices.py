"""The indices of shards: where they are stored, in the cache, and in memory

Docs: page `store/shard_indices`"""

# When a process needs an index, it reads the whole file, from the folder, the cache or the network, and compares it
# with its checksum in the manifest. The index that is used is this copy in memory, so later changes on the disk do not
# affect it. Up to 64 MB of indices are kept, and the least recently used are forgotten first. At the beginning of an
# epoch, `new_epoch` forgets all indices that came from a disk, so each epoch reads and compares them again.
#
# A damaged copy in the cache is removed and fetched again, with a warning. `CorruptSample` is raised only if the index
# is damaged where it is stored.

import os, threading, warnings
from collections import OrderedDict

import numpy as np
from zlib_ng.zlib_ng import crc32

from ..core import CorruptSample, MissingSample
from .shard_index import INDEX_FOLDER, ShardIndex

_MAX_BYTES = 1<<26   # bytes of indices that a process keeps
_OVERHEAD = 4096   # bytes of Python's objects for each index

class ShardIndices:
    "The indices of the shards of a part, of which one process keeps those that were used last"
    def __init__(self,
        part # A `ShardPart`
    ):
        self.part,self.lock = part,threading.Lock()
        self.kept,self.nbytes = OrderedDict(),0 # `{shard: ShardIndex}`, least recently used first, and their bytes

    def file(self,
        shard:int # Number of a shard
    )->str:
        "Path of the index file of a shard in the folder of the dataset"
        return f'{INDEX_FOLDER}/{self.part.table.index_name(shard)}'

    def get(self,
        shards:list # Numbers of shards
    )->dict: # `{shard: ShardIndex}`, in the order of `shards`
        """The indices of `shards`

        Raises `CorruptSample`, `MissingSample`, `StoreUnavailable`, and `StoreNotFound` if the dataset was replaced."""
        with self.lock:
            result = {shard:self.kept[shard] for shard in shards if shard in self.kept}
            for shard in result: self.kept.move_to_end(shard)
        missing = [shard for shard in shards if shard not in result]
        if missing:
            new = self._read(missing)
            self._keep(new, len(shards))
            result |= new
        return {shard:result[shard] for shard in shards}

    def new_epoch(self):
        """Forgets indices that are in files on this machine, in the folder or in the cache

        Without a cache, indices that came over the network stay in memory."""
        if not self.part.storage.local and self.part.cache is None: return
        with self.lock:
            self.kept.clear()
            self.nbytes = 0

    def _keep(self, new, n):
        """Keep `new`, `{shard: ShardIndex}`, and forget the least recently used beyond `_MAX_BYTES`

        At least the `n` that were used last are kept, however large they are."""
        with self.lock:
            for shard,index in new.items():
                self._forget(shard)
                self.kept[shard] = index
                self.nbytes += len(index.buf)+_OVERHEAD
            while self.nbytes>_MAX_BYTES and len(self.kept)>n: self._forget(next(iter(self.kept)))

    def _forget(self, shard):
        index = self.kept.pop(shard, None)
        if index is not None: self.nbytes -= len(index.buf)+_OVERHEAD

    def _read(self, shards):
        """`{shard: ShardIndex}`, from the cache or from where they are stored, in any order

        Warns of damaged indices in the cache, and fetches them again; raises what `get` raises."""
        result = {}
        for shard in () if self.part.storage.local or self.part.cache is None else shards:
            try: index = self.cached(shard)
            except CorruptSample as e: warnings.warn(f'{e}; it is fetched again; is the disk failing?', stacklevel=2)
            else:
                if index is not None: result[shard] = index
        return result|self.stored([shard for shard in shards if shard not in result])

    def cached(self,
        shard:int # Number of a shard
    )->ShardIndex: # `None` if it is not in the cache
        "The index of a shard in the cache; if it is damaged, it is removed, and `CorruptSample` is raised"
        key,cache = self._key(shard),self.part.cache
        fd = cache.open(key)
        if fd is None: return
        with os.fdopen(fd, 'rb') as file:
            content = file.read(int(self.part.table.idx[shard])+1)
            try: return self._parse(shard, content, f' in the cache {cache.folder}')
            except CorruptSample:
                cache.drop(key, fd)
                raise

    def stored(self,
        shards:list, # Numbers of shards
        again:bool=True # Read those that come over the network damaged once more?
    )->dict: # `{shard: ShardIndex}`, in any order
        "The indices of `shards`, read from where they are stored, and put into the cache; raises what `get` raises"
        storage,cache,result,damaged = self.part.storage,self.part.cache,{},[]
        for shard,content in zip(shards, self._contents(shards)):
            if content is None: raise self._missing_error(shard)
            try: result[shard] = self._parse(shard, content)
            except CorruptSample as e:
                if storage.local or not again: raise self._damaged_error(e) from None
                damaged.append(shard)
                continue
            if storage.local or cache is None: continue
            fd = cache.fetch(self._key(shard), len(content), lambda f, content=content: f.write(content))
            if fd is not None: os.close(fd)
        return result|self.stored(damaged, again=False) if damaged else result

    def _contents(self, shards):
        "The `bytes` of the index files of `shards`, `None` for one that does not exist"
        storage,files,sizes = self.part.storage,[self.file(shard) for shard in shards],self.part.table.idx[shards]
        # on this machine, one byte more shows that a file is longer
        return storage.ranges(files, [0]*len(files), (sizes.astype(np.int64)+storage.local).tolist())

    def _parse(self, shard, content, where=''):
        """The `ShardIndex` in `content`, the bytes of its file

        `content` is a copy in memory, so what is compared with the checksum is what is used. Raises `CorruptSample`,
        which names the file and `where` it was read, and `UnsupportedFormat` for a newer format."""
        part,table = self.part,self.part.table
        file = f'{part.name}: {self.file(shard)}{where}'
        if len(content)!=table.idx[shard] or crc32(content)!=table.icrc[shard]:
            about = f'the index of shard {table.name(shard)}, with labels and places of {part.samples(shard)}'
            size = f' (want {table.idx[shard]:,} bytes)' if len(content)!=table.idx[shard] else ''
            raise CorruptSample(f'{file}: {about}: {len(content):,} bytes that do not match their checksum{size}')
        index = ShardIndex(content, file)
        if index.n!=table.n[shard]:
            raise CorruptSample(f'{file}: {index.n:,} samples, where the manifest has {table.n[shard]:,}')
        return index

    def _damaged_error(self, error):
        "The error to raise when an index is damaged where it is stored, as `error` says; `StoreNotFound` if replaced"
        self.part.store.check_version(is_missing=True)
        return CorruptSample(f'{error}: damaged in {self.part.storage.url}; put back a copy of this file, or ingest '
                             'again')

    def _missing_error(self, shard):
        "The error to raise when the file of an index does not exist: `MissingSample`; `StoreNotFound` if replaced"
        part,file = self.part,self.file(shard)
        part.store.check_version(is_missing=True)
        about = f'the index of shard {part.table.name(shard)}, with labels and places of {part.samples(shard)}'
        return MissingSample(f'{part.name}: {file}, {about}, is not there: {part.storage.url}/{file}; put back a copy '
                             'of this file, or ingest again')

    def _key(self, shard):
        table = self.part.table
        return self.part.cache_key(self.part.folder+table.index_name(shard), int(table.icrc[shard]))
