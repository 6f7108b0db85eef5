"""Crashes in this process: from a given call on, everything that a writer does to the outside fails

A process that is killed at its k-th request leaves what the requests before have done, and nothing that `finally` would
clean up. So from the k-th call on each one raises `Crash`, which no `except Exception` catches, also those of clean-up
code and of threads in the background. The calls are those that reach the outside: requests to Redis, changes of files
in a folder (as Python's audit events tell, whoever makes them), and calls to object storage."""
import gc, json, os, signal, sys, threading
from contextlib import contextmanager

from fastai_remote.store.redis_link import RedisLink
from fastai_remote.store.storage import Storage
from fastai_remote.write.base import held_locks

class Crash(BaseException):
    "The process has been killed, as far as its writer can see"

class _Crash:
    "The crash that is to come: after `left` calls; `folder` has the files that count, or is None for requests"
    def __init__(self, left, folder=None):
        self.left,self.folder,self.lock = left,folder,threading.Lock()
        self.has_come = False

    def count(self):
        "Called before each call to the outside"
        with self.lock:
            self.has_come = self.has_come or self.left==0
            self.left -= 1
        if self.has_come: raise Crash

_crash = None # The one that is to come in this process

_CHANGES = {'os.rename','os.remove','os.rmdir','os.mkdir'}

def _is_change(event, args):
    "Is this audit event a change of a file or folder, or the opening of a file to write?"
    if event in _CHANGES: return True
    return event=='open' and isinstance(args[2], int) and bool(args[2]&(os.O_WRONLY|os.O_RDWR))

def _audit(event, args):
    if _crash is None or _crash.folder is None or not _is_change(event, args): return
    if str(args[0]).startswith(_crash.folder): _crash.count()

sys.addaudithook(_audit)

def _counted(method):
    def call(self, *args, **kwargs):
        counts = _crash is not None and _crash.folder is None and not getattr(self, 'local', False)
        if counts: _crash.count()
        return method(self, *args, **kwargs)
    return call

@contextmanager
def crash(k, folder=None):
    """From the `k`-th call to the outside on, all fail until the block ends; then this process holds no lock any more

    With `folder`, the calls are changes of files in it; without, requests to Redis or object storage. The block ends
    normally when it is interrupted so. Yields an object whose `has_come` tells whether it was."""
    global _crash
    before,locks = _crash,set(held_locks)   # a crash within the block of another one is not one of the other
    _crash = coming = _Crash(k, None if folder is None else os.fspath(folder))
    methods = {} if before else {owner:owner.call for owner in (RedisLink,Storage)}
    for owner,method in methods.items(): owner.call = _counted(method)
    try: yield coming
    except Crash: pass
    finally:
        if coming.has_come: held_locks.intersection_update(locks)   # a dead process holds none
        gc.collect(1)   # what a generator of the dead writer still would do, it does not do later
        for owner,method in methods.items(): owner.call = method
        _crash = before

def dies_at(k, f, folder=None):
    """Run `f()`, which dies at its `k`-th call to the outside, counted from 0; did it die?

    `f` must do its work in this process (`num_workers=1`). The next writer continues as after SIGKILL."""
    with crash(k, folder) as coming: f()
    return coming.has_come

# --- for `kills.py`: real kills, at a call that is counted in the same way

class _Kill(_Crash):
    "Notes each call in the file `log`; soon after call number `at`, it kills this process, or `pid`, unless one did"
    def __init__(self, log, folder, at, pid=0, delay=0.):
        super().__init__(-1, folder)
        self.log,self.at,self.pid,self.delay,self.n = os.open(log, os.O_WRONLY|os.O_APPEND),at,pid,delay,0
        self.killed = f'{log}.killed'

    def count(self):
        with self.lock:
            self.n += 1
            os.write(self.log, f'{os.getpid()} {_what_runs()}\n'.encode())
            if self.n==self.at: threading.Timer(self.delay, self.kill).start()

    def kill(self):
        mine = f'{self.killed}-{os.getpid()}'
        os.makedirs(f'{mine}/{os.getpid()}', exist_ok=True)
        try: os.rename(mine, self.killed)   # at once: this process may end meanwhile, when it kills a server
        except OSError: return   # another worker was first
        os.kill(self.pid or os.getpid(), signal.SIGKILL)

def _what_runs():
    "The function of the package's writers that makes this call"
    frame,names = sys._getframe(1),[]
    while frame:
        if 'fastai_remote/write/' in frame.f_code.co_filename: names.append(frame.f_code.co_name)
        frame = frame.f_back
    return next((name for name in names if name not in ('<lambda>','call')), 'reading')

def will_kill(**kill):
    "Sets what `may_kill` does in this process and its workers: the arguments of `_Kill`"
    os.environ['KILL'] = json.dumps({**kill, 'parent':os.getpid()})

def may_kill():
    "Begins to count the calls of this process, if it is one of those of which `who`, 'worker' or another word, speaks"
    global _crash
    kill = json.loads(os.environ.get('KILL', 'null'))
    if _crash is not None or kill is None or (kill.pop('who')=='worker')==(os.getpid()==kill.pop('parent')): return
    _crash = _Kill(**kill)
    for owner in (RedisLink,Storage): owner.call = _counted(owner.call)

def passed(sample):
    "For a worker, which counts its calls from its first sample on"
    import crashes   # as a global, it would be one of the variables that `fn` uses, by which a call is known
    crashes.may_kill()
    return sample

def upper(sample): return {'up.txt':passed(sample)['txt'].upper()}
