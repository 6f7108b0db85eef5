"""The lock of a folder in which shards are written

Docs: page `write/folder_lock`"""

# The lock is a file that names its holder: the machine, the process and when that process was started. The holder
# renews the lock by counting up a number in it. No clock is compared with that of another machine. What another process
# does that wants to write here depends on the holder:
#
# | The holder | What happens | After |
# |---|---|---|
# | is dead, and was on this machine | the lock is taken over | at once |
# | runs on this machine | `StoreBusy` | at once |
# | is stopped, or on another machine, and renews the lock | `StoreBusy` | about five seconds |
# | is stopped, or on another machine, and does not renew it | the lock is taken over | `LEASE_SECONDS`, on the clock of
# the process that watches |
#
# A process that was only stopped may go on later. It checks the lock before it publishes a file. On a disk, `flock`
# ensures that nobody takes over between this check and the file. Object stores have no such locks. So a process that
# takes over there gives its shards names that the other one does not use (`shard-000003-1000000.tar`), and removes the
# rest when it commits. One moment remains that nothing protects on an object store: a process that is stopped exactly
# between its last check and the request that writes the manifest, for longer than the lease.

import fcntl, os, threading, uuid
from contextlib import contextmanager, ExitStack

from ..clock import monotonic, sleep, time, wait
from ..core import seal, StoreBusy, StoreError, unseal
from ..store.storage import Storage
from .base import held_locks, host_id, is_alive, LEASE_SECONDS, process_state

LOCK_FILE = '.ingest/lock.json'

class FolderLock:
    """The right to write a dataset in a folder: a file there that the leading process renews, from `take` to `close`

    If it is not renewed for `LEASE_SECONDS`, or its process has ended, another process may take it; from then on,
    `check` and `publishing` raise `StoreBusy`. The locks of its workers have the same `token`, and only check it."""
    def __init__(self,
        storage:Storage, # The folder
        token:str=None, # ID of the lock; default: `take` chooses it
        url:str=None # What messages call the folder; default: its own URL
    ):
        self.storage,self.token,self.url = storage,token,url or storage.url
        self.stop = threading.Event() # Set by `close`: do not renew the lease any longer
        self.beats = 0 # How many times the lock was written
        self.is_fenced = True # Can no process of an earlier run publish a file any more?
        self.lost = False # Has another process taken the lock?

    @contextmanager
    def exclusive(self,
        create:bool=False # Make the folder `.ingest` if it does not exist?
    ):
        """A context in which no other process takes, renews or releases the lock, or publishes files

        Yields `True`, or `False` if others are not excluded. Between a check of the lock and what depends on it, this
        process may be stopped for a long time. So the folder `.ingest` is locked with `flock`. That is not possible on
        object stores and some file servers, nor if there is no such folder and `create` is false. Raises `StoreBusy` if
        another process keeps it locked for `LEASE_SECONDS`."""
        folder = self.storage.path('.ingest') if self.storage.local else None
        if folder is None:
            yield False
            return
        with ExitStack() as stack:
            yield _lock_folder(folder, stack, self.url, create)

    def take(self,
        progress=None # Called without arguments, for the message: returns how far the holder is, as `progress_text`
    ):
        """Takes the lock, and renews it in a thread until `close`; raises `StoreBusy` if another process has it

        Sets `token` and `is_fenced`. Waits for up to `LEASE_SECONDS` if it cannot know otherwise whether a holder is at
        work."""
        watched = self._await(self.holder(), progress)
        me = dict(host=host_id(), pid=os.getpid(), start=process_state(os.getpid())[0], id=uuid.uuid4().hex)
        self.token,self.beats,self.lost = me['id'],0,False
        self.stop = threading.Event()
        held_locks.add(self.token)
        def write():
            self.beats += 1
            self.storage.write(LOCK_FILE, seal({**me, 'beat':self.beats, 'time':time()}))
        try:
            self._acquire(me, watched, write, progress)
            threading.Thread(target=self._renew, args=(write, self.stop), daemon=True).start()
        except BaseException:   # the file may be written: while this process lives, it would exclude all others
            self.close()
            raise

    def _acquire(self, me, watched, write, progress):
        """Writes the lock by `write()`; raises `StoreBusy` if another process has written it since `watched` was read

        `watched` is what `holder` returned, `me` has the entries `host`, `pid`, `start` and `id` of the new holder, and
        `progress` is as in `take`. Sets `is_fenced`. If another process has written the lock right after this one, it
        raises `StoreBusy` as well."""
        with self.exclusive(create=True) as is_exclusive:
            earlier = self.holder()
            if earlier not in (None, watched): raise self._busy(earlier, progress)   # it has come in the meantime
            # whoever had the lock may still be about to write a file, unless it is excluded here or dead
            is_here = earlier and earlier['host']==me['host']
            self.is_fenced = not earlier or is_here and (is_exclusive or _is_at_work(earlier) is False)
            write()
        if is_exclusive: return
        sleep(.2)   # a process that came at the same time has written by now; the last one has the lock
        if not self._is_holder():
            raise StoreBusy(f'{self.url}: another process has just begun to write here; try again when it is done')

    def _busy(self, holder, progress):
        return StoreBusy(f"{self.url}: process {holder['pid']} on {holder['host'].split()[0]} is writing here now"
                         f"{progress() if progress else ''}; try again when it is done")

    def _await(self, holder, progress):
        """Waits until the lock of `holder` may be taken, and returns `holder`; raises `StoreBusy` if it is at work

        `holder` is what the method `holder` returned, and `progress` is as in `take`. If `holder` is `None`, so is the
        result.

        If nobody can know, as of a holder that is on another machine or stopped, the lock is watched. No clock but that
        of this process is used: a holder that has not renewed its lock for `LEASE_SECONDS` is taken to be dead."""
        if not holder: return None
        running = _is_at_work(holder)
        if running is None: running = self._is_renewed(holder, LEASE_SECONDS)
        if running: raise self._busy(holder, progress)
        return holder

    def is_running(self,
        holder:dict # As from `holder`
    )->bool:
        """Returns whether the process that has written `holder` is at work

        If that is not known here, watches the lock for up to a third of `LEASE_SECONDS`."""
        running = _is_at_work(holder)
        return self._is_renewed(holder, LEASE_SECONDS/3) if running is None else running

    def _is_renewed(self, holder, seconds):
        "Returns whether the stored lock becomes another than `holder` within `seconds`; `False` if it is released"
        started = monotonic()
        while monotonic()-started<seconds:
            sleep(LEASE_SECONDS/60)
            now = self.holder()
            if now!=holder: return now is not None
        return False

    def _renew(self, write, stop):
        """Runs in a thread: renews the lock by `write()` at regular times, until the event `stop` is set

        If the stored lock is another one, or is gone, it sets `lost` and ends. Errors are ignored."""
        while not wait(stop, LEASE_SECONDS/6):
            try:
                with self.exclusive():
                    if stop.is_set(): return   # released, and perhaps taken again
                    if not self._is_holder():
                        self.lost = True
                        return
                    write()
            except Exception: pass   # the next turn tries again

    def holder(self)->dict: # `host`, `pid`, `start` of the process, `id`, `beat` (counts renewals), `time`
        "Returns what the file of the lock says of its holder; `None` if there is no such file, or a damaged one"
        try: return unseal(self.storage.read(LOCK_FILE))
        except (FileNotFoundError,ValueError): return None

    def _is_holder(self): return (self.holder() or {}).get('id')==self.token

    def check(self):
        """Raises `StoreBusy` if the stored lock is gone or is not this one, or if `lost` is set

        A worker that outlived its ingest must not write into another."""
        if self.lost or not self._is_holder():
            raise StoreBusy(f'{self.url}: the lock was lost (this process slept, and another took over); '
                            'repeat the same call to finish')

    @contextmanager
    def publishing(self):
        """A context in which the holder of the lock publishes files; uses `exclusive`, and yields nothing

        Raises `StoreBusy` if the lock was lost: before the block, or in place of an error of the storage in it."""
        with self.exclusive():
            self.check()
            try: yield
            except (OSError,StoreError):   # whoever has taken over has perhaps removed what this process has begun
                self.check()
                raise

    def close(self):
        "Releases the lock; errors of the storage are ignored, since the lease will end"
        self.stop.set()
        held_locks.discard(self.token)
        try:
            with self.exclusive():
                if self._is_holder(): self.storage.remove([LOCK_FILE])
                if self.storage.local: os.rmdir(self.storage.path('.ingest'))
        except (OSError,StoreError): pass   # the folder is not empty, or the storage is away: the lease will end

def _is_at_work(holder):
    """Returns whether the process that has written `holder` is at work; `None` if that cannot be known here

    `holder` is a dict as from `FolderLock.holder`. It cannot be known of a process on another machine, of one that is
    stopped, of one that this user may not see, and of one that has not renewed the lock for `LEASE_SECONDS`: it may
    have released the lock, and not been able to remove its file. Of this process it is always known."""
    if holder['host']!=host_id(): return None
    if holder['pid']==os.getpid(): return holder['id'] in held_locks
    if not is_alive(holder['pid']): return False
    start,state = process_state(holder['pid'])
    if start is None: return None   # this user may not see it
    if start!=holder.get('start') or state in 'ZX': return False   # another process of this number, or it has ended
    is_renewed = 0<=time()-holder['time']<LEASE_SECONDS
    return True if is_renewed and state not in 'Tt' else None

def _lock_folder(folder, stack, url, create):
    """Locks `folder` with `flock` until `stack`, an `ExitStack`, is closed; returns whether that is possible

    It is not if the file system cannot do it, or if the folder cannot be opened. If it does not exist, it is made if
    `create` is true. Waits while another process has it locked, and raises `StoreBusy` after `LEASE_SECONDS`; `url` is
    for the message."""
    started = monotonic()
    while True:
        try:
            if create: os.makedirs(folder, exist_ok=True)
            fd = os.open(folder, os.O_RDONLY|os.O_CLOEXEC)
        except FileNotFoundError:
            if create: continue   # whoever had the lock has removed the folder
            return False
        except OSError: return False   # whoever writes here gets this error, too
        with ExitStack() as closing:
            closing.callback(os.close, fd)
            try: fcntl.flock(fd, fcntl.LOCK_EX|fcntl.LOCK_NB)
            except BlockingIOError:
                if monotonic()-started>LEASE_SECONDS:
                    raise StoreBusy(f'{url}: another process is publishing a file here, and does not go on; is it '
                                    'stopped?') from None
                sleep(.01)
                continue
            except OSError: return False
            # `close` is not enough: a process that was forked meanwhile has the descriptor, too
            closing.callback(fcntl.flock, fd, fcntl.LOCK_UN)
            if not _is_folder(fd, folder): continue
            stack.push(closing.pop_all())
            return True

def _is_folder(fd, folder):
    "Returns whether the descriptor `fd` is that of the folder which is at the path `folder` now"
    try: return os.path.samestat(os.fstat(fd), os.stat(folder))
    except FileNotFoundError: return False
