"""New Python processes in which torch and fastai are there at once, for tests that need a process of their own

Importing fastai takes four seconds of CPU time, more than most of these tests. One process imports torch and fastai,
another one torch only, and they are forked for each call. `fastai_remote` is imported anew in each, which takes a
second, unless a third process is asked for, which has imported it, too."""
import gc, itertools, json, os, signal, socket, subprocess, sys, threading, traceback
from functools import cached_property
from multiprocessing import get_context

# The process that is forked. Each line that it reads is a call, each that it writes the number of a process or its
# exit code.
_SERVER = '''
import atexit, gc, json, os, random, select, signal, sys, tempfile, threading, time, traceback, types
gc.disable()   # imports take a third less time
import numpy, matplotlib.pyplot, pandas, scipy.ndimage, torch, torchvision
if 'fastai' in sys.argv: import fastai.vision.all, IPython, nbdev.test
if 'ours' in sys.argv: from fastai_remote import *

def become(call):
    "In a fork: run the code of a call, as `python -c` or `python file` would, and end"
    os.setsid()
    os.environ.clear()
    os.environ.update(call['env'])
    tempfile.tempdir = None   # as the environment says
    os.chdir(call['cwd'])
    with open(os.devnull) as nothing, open(call['out'], 'wb') as out, open(call['err'], 'wb') as err:
        for number,file in enumerate((nothing, out, err)): os.dup2(file.fileno(), number)
    random.seed()
    numpy.random.seed()
    sys.argv[:] = [call['file'] or '-c', *call['args']]
    sys.path[0] = os.path.dirname(call['file']) if call['file'] else ''
    main = sys.modules['__main__'] = types.ModuleType('__main__')
    if call['file']: main.__file__ = call['file']
    code = 1
    try:
        exec(compile(call['code'], call['file'] or '<string>', 'exec'), vars(main))
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else e.code is not None
        if isinstance(e.code, str): print(e.code, file=sys.stderr)
    except BaseException: traceback.print_exc()
    # what an interpreter does at its end, but for freeing every object of torch, which takes longer than most tests
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

def say(*words): os.write(1, (' '.join(map(str, words))+'\\n').encode())

assert 'ours' in sys.argv or not [m for m in sys.modules if m.split('.')[0]=='fastai_remote']
gc.freeze()   # else each fork copies what the garbage collector visits
gc.enable()
running,lines,is_open = {},b'',True
while is_open:
    if select.select([0], [], [], .002 if running else None)[0]:
        more = os.read(0, 1<<20)
        is_open = bool(more)
        *calls,lines = (lines+more).split(b'\\n')
        for call in map(json.loads, calls):
            pid = os.fork()
            if pid==0: become(call)
            running[pid] = call['id']
            say(call['id'], 'pid', pid)
    for pid in list(running):
        ended,status = os.waitpid(pid, os.WNOHANG)
        if ended: say(running.pop(pid), 'code', os.waitstatus_to_exitcode(status))
for pid in running:   # the tests have ended, or were killed: nobody waits for what still runs
    try: os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError): pass
os._exit(0)
'''

def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

def start_fork(f, *args):
    """Start `f(*args)` in a fork of this process, which is no worker of a loader

    Returns a function that waits for the result, or the traceback; `EOFError` if the process has died."""
    receiver,sender = get_context('fork').Pipe(False)
    def run():
        gc.disable()   # it would touch, and so copy, all that this process has
        try: sender.send(f(*args))
        except Exception: sender.send(traceback.format_exc())
    process = get_context('fork').Process(target=run)
    process.start()
    sender.close()
    def result():
        try: return receiver.recv()
        finally:
            process.kill()
            process.join()
    return result

class Interpreters:
    "Starts Python processes, each a fork of one that has imported what is not ours"
    def __init__(self, folder): self.folder,self.servers,self.answers,self.numbers = folder,{},{},itertools.count()

    def start(self,
        code, # Source code, or the `Path` of a file
        *args, # Arguments of the script
        fastai:bool=True, # Is fastai imported already?
        ours:bool=False, # And `fastai_remote`?
        env=None, # Environment; default: ours
        cwd=None, # Folder to run in; default: ours
        pipe:bool=False # Is what it says read with `.line()` and `.end()`?
    ):
        "Start a process; `.wait()` gives what `subprocess.run` would"
        imported = ['fastai']*fastai+['ours']*ours
        if (server := self.servers.get((fastai, ours))) is None:
            server = subprocess.Popen([sys.executable, '-W', 'ignore', '-c', _SERVER, *imported], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
            self.servers[fastai, ours] = server
        process = Process(self, server, next(self.numbers))
        file = '' if isinstance(code, str) else str(code)
        call = dict(id=process.number, code=code if not file else code.read_text(), file=file,
                    args=list(map(str, args)), env=dict(os.environ if env is None else env),
                    cwd=str(cwd or os.getcwd()), out=str(process.out), err=str(process.err))
        if pipe: call['err'] = call['out']
        if pipe: os.mkfifo(process.out)
        print(json.dumps(call), file=process.server.stdin, flush=True)
        if pipe: process.output = open(process.out)   # the process waits for this
        return process

    def run(self, code, *args, check=False, **kwargs):
        "Run a process to its end; `subprocess.CompletedProcess`"
        res = self.start(code, *args, **kwargs).wait()
        if check: res.check_returncode()
        return res

    def ranks(self, script, *args, n=2, code=0, **env):
        "Run the file `script` in `n` processes, with the environment that torchrun makes; all end with the exit `code`"
        env = dict(os.environ, OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='', GLOO_SOCKET_IFNAME='lo', **env)
        if n>1: env |= dict(WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n), MASTER_ADDR='127.0.0.1',
                            MASTER_PORT=str(free_port()), ACCELERATE_USE_CPU='true')
        of_rank = [dict(RANK=str(rank), LOCAL_RANK=str(rank)) if n>1 else {} for rank in range(n)]
        started = [self.start(script, *args, env=env|own) for own in of_rank]
        for ended in [process.wait() for process in started]: assert ended.returncode==code, ended.stderr[-3000:]

    def close(self):
        for server in self.servers.values():
            try:
                server.stdin.close()
                server.wait(20)
            except subprocess.TimeoutExpired: os.killpg(server.pid, signal.SIGKILL)
            finally: server.wait()

class Process:
    "A process that was started, and all that it starts"
    def __init__(self, interpreters, server, number):
        self.answers,self.server,self.number = interpreters.answers,server,number
        self.out,self.err = (interpreters.folder/f'{number}.{name}' for name in ('out', 'err'))

    def answer(self, what):
        "The answer of the server about this process: its `pid`, or its exit `code`"
        while (self.number, what) not in self.answers:
            line = self.server.stdout.readline()
            if not line: raise RuntimeError('the process that is forked for others has died')
            *key,value = line.split()
            self.answers[int(key[0]), key[1]] = int(value)
        return self.answers.pop((self.number, what))

    @cached_property
    def pid(self): return self.answer('pid')

    def kill(self):
        "Kill it and all that it has started"
        try: os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError): pass

    def wait(self):
        "Wait until it has ended"
        try: code = self.answer('code')
        finally: self.kill()   # the test's time may be over
        out,err = (f.read_text() for f in (self.out, self.err))
        return subprocess.CompletedProcess(['python', self.out.stem], code, out, err)

    def line(self): return self.output.readline().strip()

    def end(self, seconds):
        "What it says until it and all that it has started have ended: each of them holds the pipe open"
        late = threading.Event()
        def is_late(): late.set(), self.kill()
        timer = threading.Timer(seconds, is_late)
        timer.start()
        with self.output: text = self.output.read()
        timer.cancel()
        if late.is_set(): raise TimeoutError(f'not all processes have ended after {seconds} s: {text}')
        return text
