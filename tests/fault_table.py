"""The table of faults in the guide: each fault happens for real during an epoch or an ingest, and samples are counted

python tests/fault_table.py              all faults; writes tests/bench/results/faults.json
python tests/fault_table.py restart S3   those whose name contains one of the words; writes nothing

Every case counts the samples that are lost, repeated or wrong in the end, by number and content, and records what the
user sees and how many seconds it takes. An epoch has two workers and compares checksums, as by default. An ingest is
done in this process, except where its workers matter. After an error in it, the same call is repeated, and the dataset
that it completes is counted.
"""
import ctypes, json, multiprocessing, os, re, signal, subprocess, sys, tempfile, threading, time, traceback
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent/'bench')]
import redis
from redis.crc import key_slot

import fault_backends
from clusters import SLOTS, wait_for
from fault_backends import (BACKENDS, disturbed, hang_up, is_picture, masterless, N, png_of,
                            refused, run_script, samples, Slow, unsaved, write_script)
from fastai_remote import StoreError, StoreNotFound
from fastai_remote.store.redis_parts import key_layout

HERE = Path(__file__).parent
RESULT = HERE/'bench'/'results'/'faults.json'
CONTINUES = {'epoch':'The epoch continues.', 'ingest':'The ingest continues.'}

@dataclass
class Row:
    "A row of the table"
    fault:str # What happened
    during:str # `epoch` or `ingest`
    backend:str # Name of the backend
    seen:str # What the user saw: that it continues, or the shortened error
    seconds:float # Longest wait for a batch or for the end of the ingest after the fault; or until the error
    lost:int = 0 # Samples that never came, though there was no error
    repeated:int = 0 # Samples that came more often than once
    wrong:int = 0 # Samples whose content was that of no, or another, sample

@dataclass
class Case:
    fault:str
    during:str
    kind:str # Of the backend
    run:object # `run(fault, backend) -> Row`
    def __str__(self): return f'{self.fault}, {self.during}, {BACKENDS[self.kind].name}'

CASES = []

# What is tried with Redis is tried with one server, with a cluster, and with servers that Sentinel watches. What a node
# of a cluster forgets is also tried with the node that has the description of the dataset.
KINDS = {'redis':('server','cluster','sentinel'), 'each redis':('server','cluster','cluster-home','sentinel'),
         'replicated redis':('cluster-replicas','cluster-home-replicas','sentinel-failover')}

def case(fault, *where):
    "Decorator: `run(fault, backend) -> Row` is a case for each of `where`, such as 'epoch redis'; see `KINDS`"
    def add(run):
        for place in where:
            during,kind = place.split(' ', 1)
            CASES.extend(Case(fault, during, kind, run) for kind in KINDS.get(kind, [kind]))
        return run
    return add

def shortened(error):
    "Type and message of an error, without addresses, paths and numbers of processes, and at most 200 characters long"
    message = str(error)
    if re.match(r'Caught \w+ in DataLoader worker', message):   # its last line has the type and the message
        message = message.strip().split('\n')[-1].split(': ', 1)[-1]
    message = message.split('\n')[0]
    text = f'{type(error).__name__}: {message}'.rstrip(': ')
    notes = [note for note in getattr(error, '__notes__', ()) if '\n' not in note]   # the others are tracebacks
    if notes: text = text.split('. ')[0]
    text = anonymous(text)
    text = text if len(text)<=200 else f'{text[:199]}…'
    return '. '.join([text, *map(anonymous, notes)])

def anonymous(text):
    "`text` without addresses, paths, and numbers of processes"
    text = re.sub(r'(redis://|redis\+sentinel://|s3://|http://)[\w.:/,-]*\w', r'\1…', text)
    text = re.sub(r'/tmp/[\w./-]*', '…', re.sub(r'\bprocess \d+ on \S+', 'process … on …', text))
    return re.sub(r'pid\(s\) [\d, ]+', 'pid …', text)

def then_again(seen): return f"{seen.rstrip('.')}. Run again, the same call completes the dataset."

class Tally:
    "Counts samples by number and content"
    def __init__(self, n=N): self.n,self.counts,self.wrong = n,Counter(),0
    def add(self, number, is_right):
        self.counts[number] += 1
        self.wrong += not is_right or not 0<=number<self.n
    def row(self, fault, during, backend, seen, seconds, complete=True):
        lost = self.n-sum(0<=number<self.n for number in self.counts) if complete else 0
        repeated = sum(count-1 for count in self.counts.values())
        return Row(fault, during, backend.name, seen, round(seconds, 1), lost, repeated, self.wrong)

@contextmanager
def disturbance(backend, steps):
    """Gives a function that calls `steps(backend)`; if that is a generator, it goes on after its first part beside the
    block

    At the end of the block, `backend.over` is set, and the rest is waited for."""
    backend.over = threading.Event()
    def go_on(rest):
        for _ in rest: pass
    with ThreadPoolExecutor(1) as thread:
        rests = []
        def begin():
            rest = steps(backend)
            if isinstance(rest, Generator):
                next(rest)
                rests.append(thread.submit(go_on, rest))
        yield begin
        backend.over.set()
        for rest in rests: rest.result()

# --- during an epoch

OPTIONS = dict(timeout=20., socket_timeout=1.)

def batches(store):
    "The batches of an epoch, training and validation, as `(numbers, pixels)`"
    return fault_backends.read(fault_backends.loaders(store, bs=8, seed=1))

def prepare(backend):
    "Write the dataset that epochs read, if it is not there"
    if backend.is_prepared: return
    backend.write(samples(), 'pets', direct=True, num_workers=1, overwrite=True)
    backend.settle()
    backend.is_prepared = True

def run_epoch(fault, backend, steps, after=3, options=OPTIONS):
    "Read an epoch; after some batches `steps(backend)` begins"
    prepare(backend)
    options = {name:value for name,value in options.items() if backend.is_redis or name=='timeout'}
    store,tally,longest,seen,is_complete = backend.open('pets', **options),Tally(),0.,CONTINUES['epoch'],True
    with disturbance(backend, steps) as begin:
        waiting_since,began = time.monotonic(),None
        try:
            for k,(numbers,images) in enumerate(batches(store)):
                if began is not None: longest = max(longest, time.monotonic()-waiting_since)
                for number,pixels in zip(numbers, images): tally.add(number, is_picture(number, pixels))
                waiting_since = time.monotonic()
                if k==after:
                    begin()
                    began = time.monotonic()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            seen,longest,is_complete = shortened(error),time.monotonic()-(began or waiting_since),False
    return tally.row(fault, 'epoch', backend, seen, longest, is_complete)

# --- during an ingest

def count_dataset(backend, name):
    "Counts what a reader of a dataset gets"
    tally,store = Tally(),backend.open(name, direct=True)
    values = store.get_many(range(len(store)), ['png','id','txt','cls'], check=True)
    labels = store.manifest.vocab['cls']
    for png,number,text,code in zip(*values.values()):
        number = int(number)
        expected = png_of(number),f'number {number}'.encode(),'abc'[number%3]
        tally.add(number, (bytes(png),bytes(text),labels[code])==expected)
    return tally

def run_ingest(fault, backend, steps, repair=lambda backend: None, kill=False, options=OPTIONS, num_workers=1):
    "Write a dataset; when half of it is converted, `steps(backend)` begins. After an error, the same call is repeated."
    flag = backend.folder/'flag'
    fn = Slow(flag, kill=kill)
    options = dict(options if backend.is_redis else {}, num_workers=num_workers, chunk=16)
    def write(): return backend.write(samples(), 'new', fn, **options)
    began,seen = [],CONTINUES['ingest']
    with disturbance(backend, steps) as begin, ThreadPoolExecutor(1) as thread:
        def watch():
            while not flag.exists():
                if backend.over.wait(.002): return
            began.append(time.monotonic())
            begin()
        watching = thread.submit(watch)
        try: write()
        except Exception as error: seen = shortened(error)
        seconds = time.monotonic()-(began[0] if began else time.monotonic())
        backend.over.set()
        watching.result()
    assert began, 'the fault did not happen'
    if seen!=CONTINUES['ingest']:
        repair(backend)
        for repeats in range(1, 4):   # the fault may go on
            try: write()
            except StoreError: continue
            break
        seen = then_again(seen) if repeats==1 else f"{then_again(seen)} It had to be run {repeats} times."
    return count_dataset(backend, 'new').row(fault, 'ingest', backend, seen, seconds)

def fault(name, *where, options=OPTIONS, repair=lambda backend: None, num_workers=1):
    "Decorator of `steps(backend)`: a case for each of `where`, such as 'epoch redis'"
    def add(steps):
        runs = {'epoch':partial(run_epoch, steps=steps, options=options),
                'ingest':partial(run_ingest, steps=steps, options=options, repair=repair, num_workers=num_workers)}
        for place in where: case(name, place)(runs[place.split()[0]])
        return steps
    return add

def lasting(seconds, trouble, **options):
    "A fault that lasts some seconds: `trouble(backend, **options)` is a context manager"
    def steps(backend):
        with trouble(backend, **options):
            yield
            backend.over.wait(seconds)
    return steps

# --- the network

REDIS_PLACES = 'epoch redis','ingest redis'
QUICK = dict(timeout=20., socket_timeout=.2)

def breaking(what, *counts):
    "Faults one after the other, each after so many bytes of answers: `what` is an attribute of the proxy"
    def steps(backend):
        for nbytes in counts:
            setattr(backend.proxy, what, nbytes)
            yield
            time.sleep(.05)
    return steps

fault('connection refused for 0.5 s', *REDIS_PLACES)(lasting(.5, refused))
fault('connection reset during a reply', *REDIS_PLACES, num_workers=2)(breaking('cut', 0, 7, 500, 4000))
fault('reply truncated', *REDIS_PLACES)(breaking('end_after', 3, 300, 3000))
fault('connection stalls for 1.5 s', *REDIS_PLACES)(lasting(1.5, disturbed, stall=True))
fault('connection stalls for longer than timeout=2', 'epoch redis', options=dict(timeout=2., socket_timeout=.7))(
    lasting(4, disturbed, stall=True))
fault('slow replies, 50 KB/s', *REDIS_PLACES)(lasting(1, disturbed, rate=50_000))

# --- the server

@fault('server loads its data for 1 s (LOADING)', *REDIS_PLACES)
def loading(backend):
    backend.client.save()
    keys = max(1, backend.client.dbsize())
    backend.server.conf['key-load-delay'] = 1_000_000//keys
    if backend.client.config_get('loading-process-events-interval-bytes'):   # Redis 6.2 has it as a constant
        backend.server.conf['loading-process-events-interval-bytes'] = 1024
    backend.restart()
    backend.server.conf.pop('key-load-delay')

fault('server is a replica for 0.5 s (READONLY)', 'ingest server', 'ingest sentinel')(lasting(.5, masterless))
fault('replica without its master for 0.5 s (MASTERDOWN)', 'epoch server', 'epoch sentinel')(
    lasting(.5, masterless, answers='no'))
fault('server cannot save to its disk for 0.5 s (MISCONF)', 'ingest redis')(lasting(.5, unsaved))

@fault('server runs a script for 1 s (BUSY)', *REDIS_PLACES)
def busy(backend):
    thread = threading.Thread(target=run_script, args=(backend, 1))
    thread.start()
    time.sleep(.1)
    yield
    thread.join()

@fault('CLIENT KILL, ten times', *REDIS_PLACES)
def client_kill(backend):
    for _ in range(10):
        hang_up(backend)
        yield
        time.sleep(.02)

@fault('CLIENT PAUSE for 1.5 s', *REDIS_PLACES)
def client_pause(backend): backend.client.client_pause(1500)

@fault('server restarts with its data after 0.5 s', 'epoch each redis', 'ingest each redis', num_workers=2)
def restarts(backend):
    backend.client.save()
    backend.server.kill()
    yield
    time.sleep(.5)
    backend.server.start()

@fault('server restarts without its data', 'epoch each redis', 'ingest each redis')
def restarts_empty(backend):
    (backend.server.dir/'dump.rdb').unlink(missing_ok=True)
    backend.restart()

@fault('server restarts with an older snapshot', 'ingest each redis')
def old_snapshot(backend):
    backend.client.save()
    time.sleep(.15)   # an ingest goes on meanwhile
    backend.restart()

@case('server restarts with an older snapshot, of the dataset before', 'epoch each redis')
def older_dataset(name, backend):
    another = {'png':png_of(7), 'id':7, 'cls':'a', 'txt':''}
    backend.write([another]*N, 'pets', direct=True, num_workers=1)
    backend.client.save()
    return run_epoch(name, backend, lambda backend: backend.restart())

@fault('FLUSHDB', 'epoch each redis', 'ingest each redis')
def flushdb(backend): backend.client.flushdb()

def roomy(backend):
    "The server keeps what it has; what is damaged is dropped"
    backend.client.config_set('maxmemory', 0)
    backend.client.config_set('maxmemory-policy', 'noeviction')

@fault('server evicts keys (maxmemory-policy allkeys-random)', *REDIS_PLACES, repair=roomy)
def evicts(backend):
    client = backend.client
    client.config_set('maxmemory-policy', 'allkeys-random')
    client.config_set('maxmemory', client.info('memory')['used_memory']-60_000)
    with suppress(redis.RedisError): client.set('other', bytes(2000))

@fault('server is full (maxmemory)', 'ingest redis', repair=roomy)
def full(backend): backend.client.config_set('maxmemory', backend.client.info('memory')['used_memory']+1000)

@fault('dataset is replaced', 'epoch redis', 'epoch disk', 'epoch s3')
def replaced(backend):
    backend.is_prepared = False
    others = [{'png':png_of(i+1000), 'id':i, 'cls':'a', 'txt':''} for i in range(N)]
    backend.write(others, 'pets', direct=True, overwrite=True, num_workers=1)

# --- several servers

@fault('a master fails, and its replica takes over', 'epoch replicated redis', 'ingest replicated redis')
def failover(backend): backend.server.kill()

@fault('a master hands over to its replica', 'epoch replicated redis', 'ingest replicated redis',
       repair=lambda backend: backend.wait_until_handed_over())
def planned_failover(backend): backend.hand_over()

def tags_of(backend, node):
    "Slots of the values of the two datasets that master `node` has"
    slots = {key_slot(start.encode()) for name in ('pets','new') for start in key_layout(name, 12).starts}
    return sorted(slot for slot in slots if 3*slot//SLOTS==node)

@fault('slots move to another node (MOVED)', 'epoch cluster', 'ingest cluster')
def moved(backend):
    source = backend.server_number
    for slot in tags_of(backend, source):
        backend.cluster.move_slot(slot, source, (source+1)%3)
        yield

@fault('slots are half moved for 0.5 s (ASK)', 'epoch cluster', 'ingest cluster')
def ask(backend):
    source = backend.server_number
    slots = tags_of(backend, source)
    for slot in slots: backend.cluster.move_slot(slot, source, (source+1)%3, finish=False, keys=5)
    yield
    time.sleep(.5)
    for slot in slots: backend.cluster.move_slot(slot, source, (source+1)%3)

# --- object storage and disks

S3_PLACES = 'epoch s3','ingest s3'
fault('connection refused for 0.5 s', *S3_PLACES)(lasting(.5, refused))
fault('connection stalls for 1.5 s', *S3_PLACES)(lasting(.5, disturbed, latency=1.5))
fault('server answers 503, six times', *S3_PLACES)(lambda backend: backend.proxy.fail(503, 'SlowDown', 6))
fault('connection reset before a reply, three times', *S3_PLACES)(lambda backend: backend.proxy.reset(3))
fault('connection reset during a reply', 'epoch s3')(lambda backend: backend.proxy.cut(300, 3, '.tar'))
fault('reply truncated', 'epoch s3')(lambda backend: backend.proxy.short(40, 2, '.tar'))
fault('bit flipped in replies', 'epoch s3')(lambda backend: backend.proxy.flip(3, '.tar'))
fault('slow replies, 0.2 s each', *S3_PLACES)(lasting(1, disturbed, latency=.2))

@fault('bit flipped in a shard', 'epoch disk')
def disk_flip(backend):
    for file in (backend.folder/'pets').glob('shard-*.tar'):
        data = bytearray(file.read_bytes())
        data[data.rindex(b'IDAT')+20] ^= 4
        file.write_bytes(data)

@fault('a shard is deleted', 'epoch disk')
def disk_delete(backend):
    for file in (backend.folder/'pets').glob('shard-*.tar'): file.unlink()

@fault('cached files are emptied', 'epoch s3')
def s3_cache_emptied(backend):
    for file in backend.cache.rglob('*.tar*'):
        with suppress(FileNotFoundError): os.truncate(file, 0)   # it has just got its final name

# --- processes

@fault('a worker is killed', 'epoch redis', 'epoch disk', 'epoch s3')
def kill_worker(backend):
    worker = next(p for p in multiprocessing.active_children() if 'loky' not in type(p).__name__.lower())
    os.kill(worker.pid, signal.SIGKILL)

case('a worker is killed', 'ingest redis', 'ingest disk', 'ingest s3')(
    partial(run_ingest, steps=lambda backend: None, kill=True, num_workers=2))

def group_exists(pid):
    "Are there processes in the group of process `pid`, other than zombies?"
    for folder in Path('/proc').glob('[0-9]*'):
        try: state,_,group = (folder/'stat').read_text().rsplit(')', 1)[1].split()[:3]
        except OSError: continue
        if int(group)==pid and state!='Z': return True
    return False

@contextmanager
def forked(run):
    """Calls `run(say)` in a process group of its own; gives its number, and an iterator of what it says

    The last that it says is its error, if there is one."""
    reading,writing = os.pipe()
    if (pid:=os.fork())==0:
        os.close(reading)
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        def say(what): os.write(writing, json.dumps(what).encode()+b'\n')
        try: run(say)
        except BaseException as error: say(shortened(error))
        finally: os._exit(0)
    os.close(writing)
    try:
        with os.fdopen(reading) as lines: yield pid,map(json.loads, lines)
        os.waitpid(pid, 0)
    finally:
        if group_exists(pid): os.killpg(pid, signal.SIGKILL)

def say_epoch(store, say):
    for numbers,images in batches(store):
        say([[number, is_picture(number, pixels)] for number,pixels in zip(numbers, images)])
        time.sleep(.02)

def listen(said, tally, act=None):
    "Counts the samples of an epoch, and calls `act()` after some batches; returns the error, if there is one"
    for k,content in enumerate(said):
        if isinstance(content, str): return content
        for number,is_right in content: tally.add(number, is_right)
        if act and k==3: act()

def stop_epoch(name, backend, stop):
    "An epoch in a process of its own, which `stop(pid)` ends; waits until its workers have ended, too"
    prepare(backend)
    tally,began = Tally(),[]
    with forked(lambda say: say_epoch(backend.open('pets'), say)) as (pid,said):
        def act():
            stop(pid)
            began.append(time.monotonic())
        error = listen(said, tally, act)
        wait_for(lambda: not group_exists(pid))
        seconds = time.monotonic()-began[0]
    seen = f'{error}. No process stays.' if error else 'No process stays.'
    return tally.row(name, 'epoch', backend, seen, seconds, complete=False)

SCRIPT = '''
import json, sys
from fault_backends import write_script
write_script(json.loads(sys.argv[1]), sys.argv[2], num_workers=2)
'''

def start_ingest(backend, flag):
    "The ingest, with two workers, in a process group of its own"
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get('PYTHONPATH', '')])
    args = [sys.executable, '-c', SCRIPT, json.dumps(backend.address('new')), str(flag)]
    return subprocess.Popen(args, env={**os.environ, 'PYTHONPATH':path}, text=True, start_new_session=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)

def stop_ingest(name, backend, stop, seen=None):
    "An ingest that `stop(pid)` ends; then the same again. The user sees the last lines of the first, or `seen`"
    flag = backend.folder/'flag'
    process = start_ingest(backend, flag)
    wait_for(lambda: flag.exists() or process.poll() is not None)
    stop(process.pid)
    began = time.monotonic()
    process.wait(60)
    wait_for(lambda: not group_exists(process.pid))
    seconds = time.monotonic()-began
    assert process.returncode, 'it ended before the fault'
    last = [line for line in process.stderr.read().strip().split('\n') if 'resource_tracker' not in line]
    write_script(backend.address('new'), flag, num_workers=1)
    seen = then_again(seen or anonymous('. '.join(last[-2:])))
    return count_dataset(backend, 'new').row(name, 'ingest', backend, seen, seconds)

def interrupt(pid): os.killpg(pid, signal.SIGINT)
def kill(pid): os.kill(pid, signal.SIGKILL)

case('Ctrl-C', 'epoch redis', 'epoch disk')(partial(stop_epoch, stop=interrupt))
case('the training process is killed', 'epoch redis', 'epoch disk')(partial(stop_epoch, stop=kill))
case('Ctrl-C', 'ingest redis', 'ingest disk')(partial(stop_ingest, stop=interrupt))
case('the ingest is killed', 'ingest redis', 'ingest disk')(
    partial(stop_ingest, stop=kill, seen='Readers see nothing. No process stays.'))

@case('two ingests of one name', 'ingest redis', 'ingest disk')
def two_ingests(name, backend):
    began = time.monotonic()
    def write(say, k): write_script(backend.address('new'), backend.folder/f'flag{k}', num_workers=1)
    with forked(partial(write, k=0)) as (_,one), forked(partial(write, k=1)) as (_,other):
        seen, = [*one, *other]   # one of them says nothing
    return count_dataset(backend, 'new').row(name, 'ingest', backend, f'One writes the dataset; the other gets {seen}',
                                             time.monotonic()-began)

@fault('clock jumps by a day, there and back', 'epoch redis', 'epoch s3', 'ingest redis', 'ingest disk')
def clock_jumps(backend):
    "`time.time` of this process, and the times of the files"
    real = time.time
    for days in (1, -1):
        time.time = lambda: real()+86400*days
        for path in backend.folder.rglob('*'):
            with suppress(OSError): os.utime(path, (real()+86400*days,)*2)
        yield
        time.sleep(.1)
    time.time = real

@case('of two processes with one cache, one is killed', 'epoch s3')
def shared_cache(name, backend):
    prepare(backend)
    backend.proxy.latency = .03
    with forked(lambda say: say_epoch(backend.open('pets'), say)) as (pid,said):
        def steps(backend):
            next(said)
            os.killpg(pid, signal.SIGKILL)
        return run_epoch(name, backend, steps, after=1)

# --- a full disk

def can_mount():
    "May this process mount a file system in a name space of its own?"
    try: run = subprocess.run(['unshare','-Urm','mount','-t','tmpfs','none','/mnt'], capture_output=True)
    except OSError: return False
    return run.returncode==0

def mount_small(folder, kilobytes):
    "Give this process, which was just forked, a name space of its own, and mount a small file system at `folder`"
    uid,libc = os.getuid(),ctypes.CDLL(None, use_errno=True)
    gid = os.getgid()
    if libc.unshare(0x10000000|0x00020000): raise OSError(ctypes.get_errno(), 'unshare')   # CLONE_NEWUSER, CLONE_NEWNS
    Path('/proc/self/setgroups').write_text('deny')
    Path('/proc/self/uid_map').write_text(f'0 {uid} 1')
    Path('/proc/self/gid_map').write_text(f'0 {gid} 1')
    subprocess.run(['mount','-t','tmpfs','-o',f'size={kilobytes}k','disk',folder], check=True)

FEW = 16   # samples that are written to a disk of every size

def fill(fault_name, backend, name, step, is_temporary=False):
    "An ingest of `name`, again and again, while a disk of 4 KB grows by `step` KB each time; and where files were"
    disk = backend.folder/'disk'
    disk.mkdir()
    options,size = dict(chunk=4, maxcount=8, num_workers=1, direct=True),4
    def run(say):
        nonlocal size
        mount_small(disk, size)
        if is_temporary: tempfile.tempdir = str(disk)
        while True:
            try: backend.write(samples()['train'][:FEW], name, **options)
            except StoreError as error: say([shortened(error), sorted(map(str, disk.rglob('*')))])
            else: break
            with suppress(StoreNotFound): sys.exit(f'it is visible: {backend.open(name, direct=True)}')
            size += step
            subprocess.run(['mount','-o',f'remount,size={size}k',disk], check=True)
        store = backend.open(name, direct=True)
        values = store.get_many(range(len(store)), ['id','png'], check=True)
        say([[int(number), bytes(png)==png_of(int(number))] for number,png in zip(*values.values())])
    began,tally = time.monotonic(),Tally(FEW)
    with forked(run) as (_,said): *failed,written = said
    assert isinstance(written, list), written
    for number,is_right in written: tally.add(number, is_right)
    assert {error.split(':')[0] for error,_ in failed}=={'StoreFull'}, failed
    row = tally.row(fault_name, 'ingest', backend, then_again(failed[-1][0].split('. ')[0]), time.monotonic()-began)
    return row,{tuple(files) for _,files in failed}

@case('disk full, at each size until all fits', 'ingest disk')
def disk_full(name, backend):
    row,places = fill(name, backend, 'disk', 4)
    assert len(places)>4, places   # it was full at different files
    return row

@case('disk for temporary files full', 'ingest s3')
def temporary_disk_full(name, backend): return fill(name, backend, 'new', 16, is_temporary=True)[0]

@case('the disk of the cache is full', 'epoch s3')
def cache_full(name, backend):
    prepare(backend)
    backend.cache.mkdir()
    def run(say):
        mount_small(backend.cache, 4096)
        store = backend.open('pets')
        with suppress(OSError), open(backend.cache/'of others', 'wb', buffering=0) as file:
            while True: file.write(bytes(4096))
        say_epoch(store, say)
    tally,began = Tally(),time.monotonic()
    with forked(run) as (_,said): error = listen(said, tally)
    seen = error or f"{CONTINUES['epoch']} A warning says that it reads without the cache."
    return tally.row(name, 'epoch', backend, seen, time.monotonic()-began, error is None)

# --- what does not apply

STORES = [BACKENDS[kind].name for kind in ('server','cluster','sentinel','disk','s3')]
REDIS = 'Redis.*|Sentinel'
SERVER = r'server (?!answers)|replica|CLIENT|FLUSHDB|a master|slots'
# Names of stores, names of faults, and why these faults are not tried there; the first that matches counts
WHY_NOT = [
    ('Redis', r'a master', 'no replica'),
    ('Redis|Sentinel', r'slots', 'one server has all keys'),
    ('Redis Cluster', r'server is a replica|replica without', 'replicas of a cluster redirect'),
    (REDIS, r'.*\bshard\b', 'no shards'),
    (REDIS, r'.*cache', 'no cache'),
    (REDIS, r'disk', 'writes no files'),
    (REDIS, r'server answers 503|connection reset before', 'no HTTP'),
    (REDIS, r'bit flipped in replies', 'TLS is for that'),
    (REDIS, r'slow replies, 0.2 s', 'see: 50 KB/s'),
    ('shards on disk', r'.*cache', 'no cache'),
    ('shards on disk', r'connection|.*repl(y|ies)|.*request|server answers', 'no network'),
    ('shards on disk', r'disk for temporary', 'none are written'),
    ('shards', SERVER, 'no Redis server'),
    ('shards on S3', r'slow replies, 50', 'see: 0.2 s each'),
    ('shards on S3', r'connection stalls for longer', 'see: stalls for 1.5 s'),
    ('shards on S3', r'disk full', 'see: for temporary files'),
    ('shards on S3', r'bit flipped in a shard|a shard is deleted|Ctrl-C|the .* is killed|two ingests', 'tried on disk')]

def why_not(fault, store):
    "Why `fault` is not tried with `store`; None if nothing says why"
    return next((why for stores,faults,why in WHY_NOT if re.match(stores, store) and re.match(faults, fault)
                 and (stores.startswith('shards') or re.fullmatch(stores, store))), None)

def store_of(case): return next(store for store in reversed(STORES) if BACKENDS[case.kind].name.startswith(store))

def not_tried():
    "`(fault, store, why)` for each fault and store without a case"
    tried = {(case.fault, store_of(case)) for case in CASES}
    faults = dict.fromkeys(case.fault for case in CASES)
    return [(fault, store, why_not(fault, store)) for fault in faults for store in STORES
            if (fault, store) not in tried]

# --- running them

def main(words):
    # a process that a shell starts in the background ignores SIGINT, and so do its children
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = []
    for found in CASES:
        if words and not any(word.lower() in str(found).lower() for word in words): continue
        began = time.monotonic()
        try:
            with BACKENDS[found.kind]() as backend: row = found.run(found.fault, backend)
            print(f'{found} [{time.monotonic()-began:.1f} s in all]: {row.seconds:.1f} s, lost {row.lost}, '
                  f'repeated {row.repeated}, wrong {row.wrong}: {row.seen}')
            rows.append(asdict(row))
        except Exception as error: print(f'{found}: FAILED: {type(error).__name__}: {error}')
    if words: return
    from machine import about
    missing = [dict(fault=fault, store=store, why=why) for fault,store,why in not_tried()]
    RESULT.write_text(json.dumps(dict(command='python tests/fault_table.py', rows=rows, not_tried=missing,
                                      **about(None, 'fastai torch redis')), indent=1)+'\n')

if __name__=='__main__': main(sys.argv[1:])
