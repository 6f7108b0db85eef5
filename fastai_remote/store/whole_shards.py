"""Whole shards as open files; a thread fetches the next shards into the cache

Docs: page `store/whole_shards`"""

# A loader knows the order of its epoch, so it knows which shards come next. `WholeShards` fetches them in this order
# into the cache. It keeps the wanted shards open and no others, so they can be read even if files that other processes
# fetch push them out of the cache.
#
# Until a shard has been fetched, its samples are read by ranges. With `wait`, a sample that is needed earlier waits for
# its shard, because fetching both at the same time would only divide the bandwidth.
#
# A shard that arrives damaged is fetched once more. If it stays damaged, its samples are read one by one, and those
# that are intact are used. A copy in the cache that turns out to be damaged is removed and fetched again, once.

import os, threading, warnings
from collections import OrderedDict
from functools import partial

from zlib_ng.zlib_ng import crc32

from ..clock import wait
from ..core import CorruptSample
from .shard_index import decompressor
from .storage import open_regular, stamp_number

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
