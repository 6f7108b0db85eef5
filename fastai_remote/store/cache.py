"""Whole files on a local disk, up to a total size, shared by all processes; a killed process leaves nothing to repair

Docs: page `store/cache`"""

# A shard that has been transferred once should not be transferred again: not for the next epoch, not for the next run,
# and not by each worker. So its file is kept on a local disk. The cache has an upper size, and removes the files that
# have not been opened for the longest time.
#
# Many processes share the folder, and any of them may be killed at any moment. There is no server, no index and no list
# of users. A file is complete when it has its name. A process that writes one holds a lock on it, and the kernel
# releases a lock when its holder dies. Readers need no lock: a file that is removed while somebody has it open can be
# read to its end, as on all disks of Linux and macOS. It takes space until it is closed, so the upper size is a soft
# limit: it holds for the files that have a name, and the disk needs room for those that are open in addition.

import errno, fcntl, io, math, os, shutil, stat, time, warnings
from contextlib import contextmanager, suppress

from ..core import size_str
from .connection import Opener

# --- Locks

# All locks are `flock`s. There is one for the folder, and one for each part, a file that is being written. A lock
# belongs to an open file, so threads exclude each other as processes do: each opens the file for itself.

@contextmanager
def _opened(path):
    """Context manager: the descriptor of `path`, opened in order to lock it, and closed at the end

    The file is made if it does not exist, and so is its folder, which then belongs to its owner only. Files have the
    permissions of their folder."""
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    mode = os.stat(folder).st_mode&0o666|0o600
    fd = os.open(path, os.O_RDWR|os.O_CREAT|os.O_NOFOLLOW|os.O_NONBLOCK, mode)   # a pipe is not waited for
    try: yield fd
    finally:
        # `close` is not enough: a process that was forked meanwhile has the file open, too
        with suppress(OSError): fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

def _is_same(fd, path):
    "Is `path` still the file that is open as `fd`?"
    try: return os.path.samestat(os.fstat(fd), os.lstat(path))
    except (FileNotFoundError, NotADirectoryError): return False

def _lock_if_free(fd, path):
    """Lock `path`, which is open as `fd`, if nobody else has locked it. Returns whether it is ours now

    It is not if `path` is another file by now. Raises `OSError` if the disk has no locks."""
    try: fcntl.flock(fd, fcntl.LOCK_EX|fcntl.LOCK_NB)
    except BlockingIOError: return False
    return _is_same(fd, path)

@contextmanager
def _part(path):
    """Context manager: the descriptor of the part `path`, locked; or None, after another process has released it

    It is made if it does not exist. At the end, a locked part that still has this name is removed. Raises `OSError` if
    the disk has no locks; then it is removed, too."""
    with _opened(path) as fd:
        is_ours = True
        try:
            is_ours = _lock_if_free(fd, path)
            if not is_ours: fcntl.flock(fd, fcntl.LOCK_SH)
            yield fd if is_ours else None
        finally:
            if is_ours and _is_same(fd, path): _remove(path)

def _remove(path):
    "Remove a file. Returns whether it is gone: one of another user may stay"
    with suppress(OSError): os.unlink(path)
    return not os.path.lexists(path)

def _remove_part(path):
    "Remove a part, unless somebody writes it. Returns whether it is gone"
    with suppress(OSError), _opened(path) as fd:
        if _lock_if_free(fd, path): _remove(path)
    return not os.path.lexists(path)

# --- Opening a file

# All files are in one folder, without subfolders. The time of modification of a file says when it was last opened.

class FileCache:
    """Whole files on a local disk, up to a total size; the least recently used go first; processes share the folder

    A file that is removed can still be read by those who have it open, and takes space until they close it: so `size`
    is a limit for what has a name. If `folder` has other files, the cache is its subfolder `fastai_remote`, as they
    could be removed; raises `ValueError` if that has other files, too."""
    def __init__(self,
        # New, empty, or a cache, which has a file `.lock`; else its subfolder; default: `$FASTAI_REMOTE_CACHE`, else
        # `fastai_remote` in `$XDG_CACHE_HOME` or ~/.cache
        folder:str=None,
        # Bytes that it may hold; default: half of what would be free on that disk if it held nothing
        size:int=None,
    ):
        if size is not None and not 0<=size<math.inf:
            raise ValueError(f'a cache of {size} bytes: want a number, 0 or more, or None for half of the free space')
        default = os.path.join(os.environ.get('XDG_CACHE_HOME') or '~/.cache', 'fastai_remote')
        folder = folder or os.environ.get('FASTAI_REMOTE_CACHE') or default
        self.folder = os.path.abspath(os.path.expanduser(folder))
        self._given_size = self._size = None if size is None else int(size)
        if self._other_file(): self.folder = f'{self.folder}/fastai_remote'
        if other := self._other_file():
            raise ValueError(f'{self.folder} has {other!r}, and is no cache: a cache removes files in its folder, so '
                             'it needs a folder of its own; give another one (`cache=`, `FASTAI_REMOTE_CACHE`)')

    def _other_file(self):
        """The name of something in the folder that is neither hidden nor a part; `None` if there is none, or in a cache

        A cache has a file `.lock`."""
        def is_cache(): return os.path.lexists(f'{self.folder}/.lock')
        if is_cache() or not os.path.isdir(self.folder): return None
        other = next((name for name in os.listdir(self.folder) if name[0]!='.' and not name.endswith('.part')), None)
        return None if is_cache() else other   # another process may have made the lock, and then a file

    @property
    def size(self)->int:
        "Bytes that it may hold"
        if self._size is None:   # free and used bytes together stay constant, so all processes get the same number
            folder = self.folder
            while not os.path.isdir(folder): folder = os.path.dirname(folder)
            self._size = (shutil.disk_usage(folder).free+self.used()[0])//2
        return self._size

    def open(self,
        key:str, # Name of a file, such as 'uid-shard-000000.tar'
        size:int=None, # Bytes that it must have
    )->int|None: # Its descriptor, for reading
        """Open the file `key`; None if it does not exist, or does not have `size` bytes

        Raises `ValueError` if `key` is not a valid name."""
        try: fd = os.open(self._path(key), os.O_RDONLY|os.O_NOFOLLOW|os.O_NONBLOCK)
        except OSError: return None
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or size not in (None, status.st_size):
            os.close(fd)
            return None
        now = time.time_ns()   # more precise than the kernel's own time stamps, which are some ms apart
        with suppress(OSError): os.utime(fd, ns=(now, now))   # one of another user keeps its time
        return fd

    def used(self)->tuple: # Bytes, including those reserved for files that are being written; number of whole files
        "How much the cache holds"
        files = self._files()
        return sum(size for _,size,_ in files), sum(not path.endswith('.part') for _,_,path in files)

    def _files(self):
        "List of `(time of use in ns, bytes, path)` of each file and each part"
        result = []
        with suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name[0]=='.' or entry.is_dir(follow_symlinks=False): continue
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    result.append((status.st_mtime_ns, status.st_size, entry.path))
        return result

    def _path(self, key):
        "Path of the file `key`; raises `ValueError` if this is not a valid name, such as 'uid-shard-000000.tar'"
        if not isinstance(key, str) or not key or key[0]=='.' or set(key)&{'/','\0'} or key.endswith('.part'):
            raise ValueError(f"{key!r} cannot name a file of a cache: 'uid-shard-000000.tar' could")
        return f'{self.folder}/{key}'

    def opener(self)->Opener:
        "An `Opener` that recreates this cache in a worker"
        return Opener(FileCache, self.folder, folder=self.folder, size=self._given_size)
    def __reduce__(self): return type(self),(self.folder, self._given_size)
    def __repr__(self):
        used,n_files = self.used()
        usage = f"{size_str(used)} of {size_str(self.size)} used, {n_files:,} file{'s'*(n_files!=1)}"
        return f'{type(self).__name__}({self.folder!r}, {usage})'

    # A lookup takes a few system calls. The cache is still empty.

    # --- Making space

    # A process that makes space, or gives a file its name, holds the lock of the folder while it lists the folder.
    # Parts that no process holds were left by processes that died, and are removed.
    #
    # Space is reserved before the first byte is written: an empty part of the final size is created. So the upper size
    # holds at all times, for files that have a name.

    @contextmanager
    def _locked(self):
        "Context manager: wait for the lock of the folder, and hold it"
        with _opened(f'{self.folder}/.lock') as fd:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield

    def _shrink(self, size):
        """Remove parts that nobody writes, and least recently used files until at most `size` bytes are left

        Returns how many bytes are left."""
        files = sorted(self._files(), key=lambda file: (not file[2].endswith('.part'), file[0]))
        used = sum(n for _,n,_ in files)
        for _,n,path in files:
            if path.endswith('.part'): is_gone = _remove_part(path)
            else: is_gone = used>size and _remove(path)
            if is_gone: used -= n
        return used

    def _reserve(self, fd, size):
        """Make `size` bytes available for the part that is open as `fd`, and make it as long

        Removes least recently used files. Raises `OSError` if too much is being written, or the disk is full."""
        with self._locked():
            os.ftruncate(fd, 0)   # remove what a process that died has written
            used = self._shrink(self.size-size)
            if used+size>self.size: raise OSError(errno.EBUSY, f'{size_str(used)} are being written')
            os.ftruncate(fd, size)
        # reserve the bytes on the disk too
        if size and hasattr(os, 'posix_fallocate'): os.posix_fallocate(fd, 0, size)

    def clear(self):
        "Remove all files but hidden ones and those that are being written"
        with self._locked(): self._shrink(-1)

    def drop(self,
        key:str, # Name of a file, such as 'uid-shard-000000.tar'
        fd:int, # Its descriptor: a file that has replaced it since stays
    )->bool: # Is it gone?
        "Remove a damaged file: whoever asks for it next has it written again"
        path = self._path(key)
        if _is_same(fd, path): _remove(path)   # it stays if it belongs to another user
        return not _is_same(fd, path)

    def check(self,
        n:int, # Shards in use at the same time
        size:int, # Bytes of the largest shard
        what:str, # Explanation of `n`: '8 workers with 3 shards each'
        name:str='', # Name of the dataset
    ):
        """Raise `ValueError` if `n` shards of `size` bytes do not fit at the same time

        Not if the disk has no space at all for a cache without a given size: `fetch` warns of it, and keeps nothing."""
        if n*size<=self.size or self.size==0 and self._given_size is None: return
        dataset = f'{name}: ' if name else ''
        raise ValueError(f"{dataset}{n:,} shard{'s'*(n!=1)} of up to {size_str(size)} in flight ({what}) need "
        f'{size_str(n*size)}; the cache {self.folder} holds {size_str(self.size)}: '
        'give it more (`cache_size=`), or have fewer in flight (`interleave=`, `num_workers=`)')

    def fetch(self,
        key:str, # Name of a file, such as 'uid-shard-000000.tar'
        size:int, # Its bytes
        write, # Called with a binary file, to which it writes the content; its exceptions are passed on
    )->int|None: # A descriptor, as from `open`
        """As `open`, but a file that does not exist is written first; one process writes, and all others wait for it

        `write` may go back to the start of the file and begin again. None, and a warning the first time, if the cache
        or its disk cannot keep the file. Raises what `write` raises, and `OSError` if the last byte that it writes is
        not at the end of `size` bytes."""
        path,file = f'{self._path(key)}.part',None
        fd = self.open(key, size)
        if fd is not None: return fd
        try:
            if size>self.size: raise OSError(errno.EFBIG, 'it is larger than the cache')
            while True:
                with _part(path) as part:
                    fd = self.open(key, size)
                    if fd is not None: return fd
                    if part is None: continue   # the process that was writing has failed or died: try to be the next
                    self._reserve(part, size)
                    file = _PartFile(part, key, size)
                    write(file)
                    if file.tell()<size: raise OSError(f'{key}: {file.tell():,} bytes came of {size:,}')
                    file = None
                    return self._finish(part, key)
        except Exception as e:
            # Errors of the disk: all outside of `write`, and those that the file has met within it
            error = file.error if file else e
            if not isinstance(error, OSError): raise
            self._warn_once(f'{key} ({size_str(size)})', error)

    def _finish(self, fd, key):
        """Give the complete part of `key`, which is open as `fd`, its name, and return a new descriptor of it, for
        reading

        Raises `OSError` if the part was removed."""
        path = self._path(key)
        os.fsync(fd)   # after a power cut, a file that has its name must have its bytes
        with self._locked():   # nobody may list the folder meanwhile, and see neither the part nor the file
            if not _is_same(fd, f'{path}.part'): raise OSError(errno.ENOENT, 'it was removed while it came')
            os.replace(f'{path}.part', path)
            return os.open(path, os.O_RDONLY)

    def _warn_once(self, what, error):
        "Warn that `what`, a text, cannot be kept because of `error`, an `OSError`; once per folder and `errno`"
        if (self.folder, error.errno) in _warned: return
        _warned.add((self.folder, error.errno))
        text = f'{what} cannot be kept, reading goes on without the cache: {error.strerror}; {self!r}'
        warnings.warn(text, stacklevel=3)

# --- Fetching a file

# A file is written as `key.part`, and gets its name when it is complete. If several processes ask for it at the same
# time, one gets the exclusive lock of the part, and writes. The others wait for a shared lock. They get it when the
# file is complete, and also when the writer fails or dies; then another one begins. `write` should have time limits of
# its own, as the waiting processes have none.
#
# An error of `write` is raised. An error of the disk is no reason to stop reading: the result is None, and there is one
# warning. The file object that `write` gets distinguishes the two, so it must be used for writing. It writes all bytes
# of a call at once, so large pieces are best.

class _PartFile(io.FileIO):
    "A part that is to be filled with `size` bytes; remembers an error of the disk"
    def __init__(self, fd, key, size):
        super().__init__(fd, 'r+b', closefd=False)
        self.key,self.size,self.error = key,size,None

    def write(self, content):
        "Write all of `content`, and return its length in bytes; raises `OSError`, also if more than `size` bytes come"
        content,done = memoryview(content).cast('B'),0
        if self.tell()+len(content)>self.size: raise OSError(f'{self.key}: more than its {self.size:,} bytes came')
        while done<len(content):
            try: done += super().write(content[done:])
            except OSError as e:
                self.error = e
                raise
        return done

_warned = set()   # folders and errors of which this process has warned
