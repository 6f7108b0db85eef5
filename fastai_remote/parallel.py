"""A map over any backend of joblib (processes, threads, Dask, Ray, Spark), and worker processes that end in time

Docs: page `parallel`"""

import fcntl, os, shutil, signal, sys, tempfile, threading, traceback, warnings
from contextlib import closing, suppress
from copy import copy
from functools import partial
from itertools import islice
from multiprocessing import parent_process, Pipe, Process
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from numbers import Integral
from pathlib import Path

import cloudpickle
from joblib import delayed, Parallel
from joblib.externals.loky import reusable_executor
from joblib.parallel import BACKENDS, get_active_backend

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

# --- What a backend runs
#
# An ingest runs on whatever joblib runs on: inside `with joblib.parallel_config(backend='dask')`, the same call runs on
# a cluster. But joblib's backends differ. Some return results as they become available, some only when all of them are
# there, and some wrap errors in errors of their own. `parallel_map` behaves in the same way on all of them. It reads
# inputs as workers need them, returns results as they become available, and raises errors as they were raised.

# --- What is sent to workers

# The function is pickled once, and not once per call. Each thread of each worker unpickles it once. An error is
# returned as a value, so no backend can wrap it in another error. Errors are pickled with cloudpickle in both
# directions, so an error class that was defined in a notebook is still the same class when it comes back.

class _Failed:
    """An error of a worker, as a value that can be pickled

    `error()` returns the exception, with the worker's traceback as a note; a `RuntimeError` with its message if the
    exception cannot be pickled."""
    def __init__(self, error):
        self.note = 'In a worker:\n'+''.join(traceback.format_exception(error)).rstrip()
        try:
            self.pickled = cloudpickle.dumps(error)
            cloudpickle.loads(self.pickled)
        except Exception:   # it cannot be pickled, but its message can
            self.pickled = cloudpickle.dumps(RuntimeError(f'{type(error).__name__}: {error}'))

    def error(self):
        error = cloudpickle.loads(self.pickled)
        error.add_note(self.note)
        return error

def _load(pickled):
    """The function in `pickled`, the bytes of a `_Task`; a thread keeps the one that it has unpickled last

    Each thread has its own: Dask may use several threads per worker, and `f` need not be thread-safe."""
    thread = threading.current_thread()
    if getattr(thread, '_task', (None,))[0]!=pickled:
        f,settings = cloudpickle.loads(pickled)
        for put,value in settings: put(value)
        thread._task = pickled,f
    return thread._task[1]

def _apply(f, x): return f(*x) if isinstance(x, tuple) else f(x)

_settings = []   # pairs of functions: what `share_setting` was given

def share_setting(
    get, # Returns the setting of this process, which can be pickled
    put # A function of a module. Called in a worker process with what `get` has returned, it makes the setting there
):
    "Have the workers of `parallel_map` use a setting of this process, such as a limit that is an attribute of a module"
    _settings.append((get, put))

class _Task:
    "`f` in a form that can be sent to workers. Called with an input, it returns the result, or an error as `_Failed`"
    def __init__(self, f): self.pickled = cloudpickle.dumps((f, [(put,get()) for get,put in _settings]))
    def __call__(self, x):
        try: return _apply(_load(self.pickled), x)
        except Exception as e: return _Failed(e)

# --- How many workers

# Without a backend, there is one process per core. With a backend, its own number of workers counts: a cluster has
# other cores than this machine.

def effective_workers(
    num_workers:int=None # The number that the caller asked for; default: that of the backend
)->int: # 0 for 0. Otherwise, a Dask cluster has the workers that it has, whatever `num_workers` says
    """How many workers `parallel_map` uses; connects to Ray if that is the active backend

    Raises `ValueError` unless `num_workers` is an integer, 0 or more, or `None`."""
    if num_workers is not None and not (isinstance(num_workers, Integral) and num_workers>=0):
        raise ValueError(f'num_workers={num_workers!r}: want an integer, 0 or more, or None for one process per core')
    if num_workers==0: return 0
    backend,n = get_active_backend()
    if _is_ray(backend): _connected_ray()
    return backend.effective_n_jobs(num_workers or n or -1)

def _is_ray(backend): return any(o.__module__.startswith('ray.') for o in type(backend).__mro__)

def _connected_ray():
    """The module `ray`, after connecting if it was not connected

    `ray.init()` connects to the cluster of `RAY_ADDRESS`, else to one that runs on this machine, or starts one here."""
    import ray
    if not ray.is_initialized(): ray.init()
    return ray

# --- The map

# There are three cases. Processes, threads and Dask return a generator of results, which is used as it is. Ray's joblib
# backend starts a new pool of actors for each call, and when an actor dies its work is lost. So with Ray, the inputs
# become tasks of Ray's own, which Ray repeats if a worker dies. All other backends (Spark) process a few inputs per
# worker at a time.
#
# joblib writes arrays above 1 MB to files, which workers map read-only. This is switched off. Each input goes to one
# worker only, so it would save nothing, and a function may want to write into its array.

_modules = {}   # `{name: ModuleSpec}` of the modules that were imported when joblib's workers were last used
_path = []   # what `sys.path` was then

def _replace_old_workers():
    """End joblib's workers of loky if, since they were last used, a module was reloaded, or `sys.path` was changed

    They live on after each use, and functions of modules are sent to them by name: they would import a module from
    elsewhere, or run its old code. A module that is reloaded, as by `%autoreload`, gets a new `ModuleSpec`."""
    specs = {name:getattr(module, '__spec__', None) for name,module in list(sys.modules.items())}
    is_old = _path!=sys.path or any(spec is not specs.get(name, spec) for name,spec in _modules.items())
    # `get_reusable_executor` would make an executor of another class if there is none
    if is_old and reusable_executor._executor is not None: reusable_executor._executor.shutdown(wait=True)
    _modules.update(specs)
    _path[:] = sys.path

_inherited = []   # executors of loky in a forked process; kept, because their end would end the parent's workers

def _leave_workers_to_parent():
    "In a forked process: the workers of loky are the parent's, which alone hears from them"
    _inherited.append(reusable_executor._executor)
    reusable_executor._executor = None

os.register_at_fork(after_in_child=_leave_workers_to_parent)

def _with_parent(backend):
    "A copy of `backend`, one of joblib's, whose worker processes call `end_with_parent` before anything else"
    backend,options = copy(backend),getattr(backend, 'backend_kwargs', {})
    backend.configure = partial(backend.configure, initializer=_begin,
                                initargs=(options.get('initializer'),options.get('initargs', ())))
    return backend

def _begin(initializer, arguments):
    "Run first in a worker process: `initializer` is what the user gave joblib, or `None`"
    end_with_parent()
    if initializer is not None: initializer(*arguments)

_inputs_per_round = 4   # per worker: few enough to hold, and enough that waiting for the slowest worker costs little

def parallel_map(
    f, # Called in the workers: `f(*x)` if the input is a tuple, else `f(x)`
    xs, # Iterable of inputs, read as workers need them
    # 0, or 1 except with Ray: do the work in this process. Default: all workers of the active joblib backend, or one
    # process per core without a backend
    num_workers:int=None,
): # Generator of results, as they become available
    """Apply `f` to each of `xs` with the active joblib backend; results may come in another order than `xs`

    An error of `f` is raised as it is; one from a worker process has its traceback as a note, and becomes a
    `RuntimeError` with its message if it cannot be pickled. `StopIteration` becomes a `RuntimeError`."""
    backend,n = get_active_backend()[0],effective_workers(num_workers)
    if n==0: return (_apply(f, x) for x in xs)
    if _is_ray(backend): results = _map_ray(backend, _Task(f), xs, n if n<effective_workers() else 2*n)
    elif n==1: return (_apply(f, x) for x in xs)
    elif getattr(backend, 'uses_threads', False): return _map_stream(backend, lambda x: _apply(f, x), xs, n)
    else:
        if type(backend) is BACKENDS['loky']: _replace_old_workers()
        if type(backend) in (BACKENDS['loky'],BACKENDS['multiprocessing']): backend = _with_parent(backend)
        map_tasks = _map_stream if backend.supports_return_generator else _map_rounds
        results = map_tasks(backend, _Task(f), xs, n)
    return _raise_errors(results)

def _raise_errors(results):
    "Yield the items of the generator `results`, raise the error of the first `_Failed` among them, and close `results`"
    with closing(results):
        for result in results:
            if isinstance(result, _Failed): raise result.error()
            yield result

def _map_stream(backend, task, xs, n):
    "For backends that return a generator: yields `task(x)` for `xs` as results become available, with `n` workers"
    parallel = Parallel(n, backend, 'generator_unordered', pre_dispatch='2*n_jobs', max_nbytes=None)
    results = parallel(delayed(task)(x) for x in xs)
    try:
        for result in results: yield result   # not `yield from`, which would close `results` with a warning
    finally:
        # joblib warns of results that were not read. We stop because nobody wants them.
        with warnings.catch_warnings(action='ignore'): results.close()

def _map_rounds(backend, task, xs, n):
    "For backends that return a list: yields `task(x)` for `xs` in order, a few inputs per worker at a time"
    xs = iter(xs)
    while inputs:=list(islice(xs, n*_inputs_per_round)):
        yield from Parallel(n, backend, max_nbytes=None)(delayed(task)(x) for x in inputs)

def _run(task, pickled): return task(cloudpickle.loads(pickled))

def _map_ray(backend, task, xs, n):
    "For Ray: yields `task(x)` for `xs` as results become available, with `n` of Ray's tasks at a time"
    ray,pending = _connected_ray(),[]
    run = ray.remote(_run).options(**(backend.ray_remote_args or {}))
    def next_result():
        nonlocal pending
        (done,),pending = ray.wait(pending)
        return ray.get(done)
    try:
        for x in xs:
            if len(pending)>=n: yield next_result()
            pending.append(run.remote(task, cloudpickle.dumps(x)))   # pickled here, because Ray's arrays are read-only
        while pending: yield next_result()
    finally:
        for o in pending: ray.cancel(o)
