"""Worker processes that end when nobody needs them, and temporary folders that a killed process does not leave for ever

Docs: page `processes`"""
import fcntl, os, shutil, signal, sys, tempfile, threading
from contextlib import suppress
from multiprocessing import parent_process, Pipe, Process
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from pathlib import Path

# --- Workers end

# A worker must not outlive its parent, not even one that is killed: it would keep memory, sockets and the pipe of the
# standard output, so that `python ingest.py | tee log` never returns. And it must not keep a parent waiting that has no
# use for it anymore. Python and PyTorch ask a worker to end and wait until it has sent what it still holds, which takes
# 5 s for each worker if nobody reads that. So every worker of ours has a thread that waits for the end of its parent,
# and then ends the process without waiting for anything.
#
# Ctrl-C in a terminal, and the interrupt of a notebook, reach the workers too. They ignore it, because the parent
# decides what becomes of them.

_watching = None   # number of the process that `end_with_parent` was called in

def end_with_parent(
    told=None, # A `Connection`: the process ends as well when something is sent there
    may_end:threading.Event=None # With `told`: what is sent there has its effect when this is set
):
    """In a worker process: have it end at once when its parent has ended, and ignore SIGINT, which its parent gets too

    Does so once per process, and nothing in a process that `multiprocessing` or loky has not started."""
    global _watching
    parent = parent_process()
    if parent is None or _watching==os.getpid(): return
    _watching = os.getpid()
    if threading.current_thread() is threading.main_thread(): signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A sentinel is ready if the parent had ended before; loky's workers have none, and their parent has started them.
    # The one of a forked worker may be held open by a sibling, and the server of `forkserver` is not the parent.
    sentinel = parent.sentinel
    starter = parent.pid if sentinel is None else os.getppid()
    threading.Thread(target=_watch, args=(starter,sentinel,told,may_end), daemon=True, name='parent').start()

def _watch(starter, sentinel, told, may_end):
    "Run by the thread: end the process when its parent has ended, or when it is told"
    while os.getppid()==starter:
        ready = wait([o for o in (sentinel,told) if o is not None], 1)
        if sentinel in ready or told in ready and may_end.wait(1): break
    os._exit(0)

# `Worker` is the process of a loader. PyTorch joins its workers where it wants them to end, after an epoch or after an
# error. One that has made all of its batches runs its finalisers first, and one that has not ends at once.

class Worker(Process):
    "A process that ends with its parent; and when it is joined: at once, or after `finish` with its finalisers"
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.told,self.tell = Pipe(duplex=False)

    def __getstate__(self): return {name:value for name,value in vars(self).items() if name!='tell'}

    def run(self):
        self.may_end = threading.Event()
        self.may_end.set()
        end_with_parent(self.told, self.may_end)
        # Called before the process waits, at -5, for the threads of its queues, which nobody may read anymore
        Finalize(None, self._at_exit, exitpriority=-4)
        super().run()

    def finish(self):
        "In the process: all of its work is done, and it is about to end by itself"
        self.may_end.clear()

    def _at_exit(self):
        for stream in sys.stdout,sys.stderr:
            with suppress(AttributeError, ValueError): stream.flush()   # there is none, or it is closed
        self.may_end.set()

    def join(self,
        timeout:float=None # Seconds; default: no limit
    ):
        "Tell the process to end, and wait until it has ended"
        if self.is_alive(): self.tell.send_bytes(b'.')
        super().join(timeout)

# --- What a killed process leaves

# A file that workers read, or that is about to be uploaded, lies in a temporary folder of its own, which is removed
# with its object. A process that is killed removes nothing. So the folder has a file `owner`, which its process keeps
# locked, and each ingest begins by removing the folders of this user whose lock nobody holds. Locks may be invisible on
# other machines that share the folder, so the file names the running kernel. Folders without such a file stay.

_boot_id = Path('/proc/sys/kernel/random/boot_id')   # names a running kernel; Linux only

class OwnedFolder(tempfile.TemporaryDirectory):
    "A temporary folder that is removed with this object; or by `remove_leftovers`, if this process was killed"
    def __init__(self,
        prefix:str # Of its name, after `fr-`
    ):
        super().__init__(prefix=f'fr-{prefix}-')
        new = Path(self.name)/'new'
        self.lock = new.open('w')
        with suppress(OSError):   # not on Linux, or a disk without locks: then `remove_leftovers` leaves it alone
            self.lock.write(_boot_id.read_text())
            self.lock.flush()
            fcntl.flock(self.lock, fcntl.LOCK_EX|fcntl.LOCK_NB)
            new.rename(new.with_name('owner'))   # it is locked before anyone can find it

    def cleanup(self):
        super().cleanup()
        self.lock.close()

def remove_leftovers():
    "Remove what `OwnedFolder` has made in processes of this user, on this machine, that were killed"
    folder = tempfile.gettempdir()
    # Each ingest does this: `Path.glob` takes ten times as long, and there may be thousands of files of others
    try: names = os.listdir(folder)
    except PermissionError: return   # one may make folders there without being able to list it
    owners = [f'{folder}/{name}/owner' for name in names if name.startswith('fr-')]
    for owner in map(Path, filter(os.path.exists, owners)):
        with suppress(OSError):   # locked; or another process removes it
            if owner.parent.is_symlink() or owner.parent.lstat().st_uid!=os.getuid(): continue
            with open(os.open(owner, os.O_RDWR|os.O_NOFOLLOW|os.O_NONBLOCK)) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX|fcntl.LOCK_NB)
                if lock.read()==_boot_id.read_text(): shutil.rmtree(owner.parent)
