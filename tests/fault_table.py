"""The table of faults in the guide: each fault happens for real during an epoch or an ingest, and samples are counted

python tests/fault_table.py              all faults; writes tests/bench/results/faults.json
python tests/fault_table.py restart S3   those whose name contains one of the words; writes nothing

Every case counts the samples that are lost, repeated or wrong in the end, by number and content, and records what the
user sees and how many seconds it takes. An epoch has two workers and compares checksums, as by default. An ingest is
done in this process, except where its workers matter. After an error in it, the same call is repeated, and the dataset
that it completes is counted.
"""
import ctypes, json, multiprocessing, os, random, re, signal, subprocess, sys, threading, time, traceback
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent/'bench')]
import redis
from redis.crc import key_slot

import fault_backends
from clusters import SLOTS, wait_for
from fault_backends import BACKENDS, N, picture, samples, Slow
from fastai_remote import StoreError
from fastai_remote.store.redis_layout import key_layout

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
    run:object # `run(backend) -> Row`
    def __str__(self): return f'{self.fault}, {self.during}, {BACKENDS[self.kind].name}'

CASES = []

# What is tried with Redis is tried with one server, with a cluster, and with servers that Sentinel watches. What a node
# of a cluster forgets is also tried with the node that has the description of the dataset.
KINDS = {'redis':('server','cluster','sentinel'), 'each redis':('server','cluster','cluster-home','sentinel'),
         'replicated redis':('cluster-replicas','cluster-home-replicas','sentinel-failover')}

def case(fault, during, *kinds):
    "Decorator: `run(backend) -> Row` is a case for each of these kinds of backends, or entries of `KINDS`"
    def add(run):
        every = [kind for kinds_or_one in kinds for kind in KINDS.get(kinds_or_one, [kinds_or_one])]
        CASES.extend(Case(fault, during, kind, run) for kind in every)
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

AGAIN = 'Run again, the same call completes the dataset.'

def then_again(seen): return f"{seen.rstrip('.')}. {AGAIN}"

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
    """Runs the generator `steps(backend)`: its first part when `begin` is called, and then the rest beside the block

    At the end of the block, `backend.over` is set, and the rest is waited for."""
    steps,backend.over = steps(backend),threading.Event()
    def rest():
        for _ in steps: pass
    thread = threading.Thread(target=rest)
    def begin():
        next(steps, None)
        thread.start()
    yield begin
    backend.over.set()
    if thread.ident: thread.join()

# --- during an epoch

OPTIONS = dict(timeout=20., socket_timeout=1.)

def batches(store):
    "The batches of an epoch, training and validation, as `(numbers, pixels)`"
    from fastai.data.core import DataLoaders
    import fastai_remote.block
    dls = DataLoaders.from_store(store, x='png', y='id', bs=8, num_workers=2, device='cpu', seed=1)
    for loader in (dls.train.new(drop_last=False), dls.valid):
        for x,y in loader: yield y.long().tolist(),(x*255).round().byte().permute(0, 2, 3, 1).numpy()

def prepare(backend):
    "Write the dataset that epochs read, if it is not there yet"
    if getattr(backend, 'is_prepared', False): return
    backend.write(samples(), 'pets', direct=True, num_workers=1, overwrite=True)
    backend.settle()
    backend.is_prepared = True

def is_picture(number, pixels): return 0<=number<N and bool((pixels==picture(number)).all())

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
        expected = fault_backends.png_of(number),f'number {number}'.encode(),'abc'[number%3]
        tally.add(number, (bytes(png),bytes(text),labels[code])==expected)
    return tally

def run_ingest(fault, backend, steps, repair=lambda backend: None, kill=False, **options):
    "Write a dataset; when half of it is converted, `steps(backend)` begins. After an error, the same call is repeated."
    flag = backend.folder/'flag'
    fn = Slow(flag, kill=kill)
    def write(): return backend.write(samples(), 'new', fn, **{'num_workers':1, 'chunk':16, **options})
    began,seen = [],CONTINUES['ingest']
    with disturbance(backend, steps) as begin:
        def watch():
            while not flag.exists():
                if backend.over.wait(.002): return
            began.append(time.monotonic())
            begin()
        thread = threading.Thread(target=watch)
        thread.start()
        try: write()
        except Exception as error: seen = shortened(error)
        seconds = time.monotonic()-(began[0] if began else time.monotonic())
        backend.over.set()
        thread.join()
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
    "Decorator of a generator `steps(backend)`: a case for each of `where`, such as 'epoch redis'"
    def add(steps):
        for place in where:
            during,kind = place.split(' ', 1)
            def run(backend, during=during):
                if during=='epoch': return run_epoch(name, backend, steps, options=options)
                return run_ingest(name, backend, steps, repair, num_workers=num_workers)
            case(name, during, kind)(run)
        return steps
    return add

def lasting(seconds, begin, end):
    "A fault that `begin(backend)` causes, and `end(backend)` ends after some seconds"
    def steps(backend):
        begin(backend)
        yield
        backend.over.wait(seconds)
        end(backend)
    return steps

def setting(seconds, **values):
    "A fault that lasts while attributes of the proxy have these values"
    def exchange(backend):
        for name,value in values.items():
            values[name] = getattr(backend.proxy, name)
            setattr(backend.proxy, name, value)
    return lasting(seconds, exchange, exchange)

# --- the network

REDIS_PLACES = 'epoch redis','ingest redis'

fault('connection refused for 0.5 s', *REDIS_PLACES)(
    lasting(.5, lambda backend: backend.proxy.refuse(), lambda backend: backend.proxy.accept()))

def breaking(what, *counts):
    "Faults one after the other, each after so many bytes of answers: `what` is an attribute of the proxy"
    def steps(backend):
        for nbytes in counts:
            setattr(backend.proxy, what, nbytes)
            yield
            time.sleep(.05)
    return steps

fault('connection reset during a reply', *REDIS_PLACES, num_workers=2)(breaking('cut', 0, 7, 500, 4000))
fault('reply truncated', *REDIS_PLACES)(breaking('end_after', 3, 300, 3000))
fault('connection stalls for 1.5 s', *REDIS_PLACES)(setting(1.5, stall=True))
fault('connection stalls for longer than timeout=2', 'epoch redis', options=dict(timeout=2., socket_timeout=.7))(
    setting(4, stall=True))
fault('slow replies, 50 KB/s', *REDIS_PLACES)(setting(1, rate=50_000))

def damaging(change, every=6, seed=0, what='damage'):
    "A fault: `change(bytes, random)` is applied to each `every`-th part of the answers, or of `damage_requests`"
    def begin(backend):
        rng,parts = random.Random(seed),[0]
        def damage(part):
            parts[0] += 1
            if parts[0]%every or not part: return part
            backend.proxy.hits += 1
            return change(bytearray(part), rng)
        setattr(backend.proxy, what, damage)
    return lasting(3, begin, lambda backend: setattr(backend.proxy, what, None))

def flip_bit(part, rng):
    part[rng.randrange(len(part))] ^= 1<<rng.randrange(8)
    return bytes(part)

def lose_byte(part, rng):
    del part[rng.randrange(len(part))]
    return bytes(part)

QUICK = dict(timeout=20., socket_timeout=.2)
fault('bit flipped in every 6th reply', *REDIS_PLACES, options=QUICK)(damaging(flip_bit))
fault('byte lost in every 6th reply', *REDIS_PLACES, options=QUICK)(damaging(lose_byte))
fault('bit flipped in every 6th request', 'epoch redis', options=QUICK)(damaging(flip_bit, what='damage_requests'))

# --- the server

@fault('server loads its data for 1 s (LOADING)', *REDIS_PLACES)
def loading(backend):
    backend.client.save()
    keys = max(1, backend.client.dbsize())
    backend.server.conf['key-load-delay'] = 1_000_000//keys
    if backend.client.config_get('loading-process-events-interval-bytes'):   # Redis 6.2 has it as a constant
        backend.server.conf['loading-process-events-interval-bytes'] = 1024
    backend.restart(0)
    yield
    backend.server.conf.pop('key-load-delay')

def become_replica(backend): backend.client.replicaof('127.0.0.1', 1)
def become_master(backend): backend.client.replicaof('NO', 'ONE')

def lose_master(backend):
    backend.client.config_set('replica-serve-stale-data', 'no')
    become_replica(backend)

fault('server is a replica for 0.5 s (READONLY)', 'ingest server', 'ingest sentinel')(
    lasting(.5, become_replica, become_master))
fault('replica without its master for 0.5 s (MASTERDOWN)', 'epoch server', 'epoch sentinel')(
    lasting(.5, lose_master, become_master))

@fault('server cannot save to its disk for 0.5 s (MISCONF)', 'ingest redis')
def misconf(backend):
    client,snapshot = backend.client,backend.server.dir/'dump.rdb'
    client.config_set('save', '3600 1')
    snapshot.mkdir()   # the server cannot put a file in its place
    client.bgsave()
    wait_for(lambda: client.info('persistence')['rdb_last_bgsave_status']=='err')
    yield
    time.sleep(.5)
    snapshot.rmdir()
    client.config_set('save', '')
    client.bgsave()

@fault('server runs a script for 1 s (BUSY)', *REDIS_PLACES)
def busy(backend):
    client = backend.client
    client.config_set('lua-time-limit', 50)
    script = "local s=redis.call('TIME') while true do local t=redis.call('TIME') " \
             "if (t[1]-s[1])*1e6+t[2]-s[2]>1e6 then return 1 end end"
    thread = threading.Thread(target=lambda: client.eval(script, 0))
    thread.start()
    time.sleep(.1)
    yield
    thread.join()

@fault('CLIENT KILL, ten times', *REDIS_PLACES)
def client_kill(backend):
    clients = backend.clients
    for _ in range(10):
        for client in clients: client.execute_command('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes')
        yield
        time.sleep(.02)

@fault('CLIENT PAUSE for 1.5 s', *REDIS_PLACES)
def client_pause(backend):
    backend.client.client_pause(1500)
    yield

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
    backend.restart(0)
    yield

def old_snapshot(backend):
    backend.client.save()
    time.sleep(.15)   # an ingest goes on meanwhile
    backend.restart(0)
    yield

fault('server restarts with an older snapshot', 'ingest each redis')(old_snapshot)

OLDER = 'server restarts with an older snapshot, of the dataset before'

@case(OLDER, 'epoch', 'each redis')
def older_dataset(backend):
    another = {'png':fault_backends.png_of(7), 'id':7, 'cls':'a', 'txt':''}
    backend.write([another]*N, 'pets', direct=True, num_workers=1)
    backend.client.save()
    def steps(backend):
        backend.restart(0)
        yield
    return run_epoch(OLDER, backend, steps)

@fault('FLUSHDB', 'epoch each redis', 'ingest each redis')
def flushdb(backend):
    backend.client.flushdb()
    yield

@fault('server evicts keys (maxmemory-policy allkeys-random)', *REDIS_PLACES,
       repair=lambda backend: roomy(backend))
def evicts(backend):
    client = backend.client
    client.config_set('maxmemory-policy', 'allkeys-random')
    client.config_set('maxmemory', client.info('memory')['used_memory']-60_000)
    try: client.set('other', bytes(2000))
    except redis.RedisError: pass
    yield

def roomy(backend):
    "The server keeps what it has; what is damaged is dropped"
    backend.client.config_set('maxmemory', 0)
    backend.client.config_set('maxmemory-policy', 'noeviction')

@fault('server is full (maxmemory)', 'ingest redis', repair=roomy)
def full(backend):
    backend.client.config_set('maxmemory', backend.client.info('memory')['used_memory']+1000)
    yield

@fault('dataset is replaced', 'epoch redis', 'epoch disk', 'epoch s3')
def replaced(backend):
    others = [{'png':fault_backends.png_of(i+1000), 'id':i, 'cls':'a', 'txt':''} for i in range(N)]
    backend.write(others, 'pets', direct=True, overwrite=True, num_workers=1)
    yield

# --- several servers

@fault('a master fails, and its replica takes over', 'epoch replicated redis', 'ingest replicated redis')
def failover(backend):
    backend.server.kill()
    yield

@fault('a master hands over to its replica', 'epoch replicated redis', 'ingest replicated redis',
       repair=lambda backend: backend.wait_until_handed_over())
def planned_failover(backend):
    backend.hand_over()
    yield

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

def answers(make):
    "A fault of an S3 server: `make(proxy)` adds it to the next requests"
    def steps(backend):
        make(backend.proxy)
        yield
    return steps

S3_PLACES = 'epoch s3','ingest s3'
fault('connection refused for 0.5 s', *S3_PLACES)(
    lasting(.5, lambda backend: backend.proxy.__exit__(None, None, None), lambda backend: backend.proxy.__enter__()))
fault('connection stalls for 1.5 s', *S3_PLACES)(setting(.5, latency=1.5))
fault('server answers 503, six times', *S3_PLACES)(answers(lambda proxy: proxy.fail(503, 'SlowDown', 6)))
fault('connection reset before a reply, three times', *S3_PLACES)(answers(lambda proxy: proxy.reset(3)))
fault('connection reset during a reply', 'epoch s3')(answers(lambda proxy: proxy.cut(300, 3, '.tar')))
fault('reply truncated', 'epoch s3')(answers(lambda proxy: proxy.short(40, 2, '.tar')))
fault('bit flipped in replies', 'epoch s3')(answers(lambda proxy: proxy.flip(3, '.tar')))
fault('slow replies, 0.2 s each', *S3_PLACES)(setting(1, latency=.2))

@fault('bit flipped in a shard', 'epoch disk')
def disk_flip(backend):
    for file in (backend.folder/'pets').glob('shard-*.tar'):
        data = bytearray(file.read_bytes())
        at = data.rindex(b'IDAT')
        data[at+20] ^= 4
        file.write_bytes(data)
    yield

@fault('a shard is deleted', 'epoch disk')
def disk_delete(backend):
    for file in (backend.folder/'pets').glob('shard-*.tar'): file.unlink()
    yield

@fault('cached files are emptied', 'epoch s3')
def s3_cache_emptied(backend):
    for file in backend.cache.rglob('*.tar*'):
        try: os.truncate(file, 0)
        except FileNotFoundError: pass   # it has just got its final name
    yield

# --- processes

@case('a worker is killed', 'epoch', 'redis', 'disk', 's3')
def kill_worker(backend):
    def steps(backend):
        worker = next(p for p in multiprocessing.active_children() if 'loky' not in type(p).__name__.lower())
        os.kill(worker.pid, signal.SIGKILL)
        yield
    return run_epoch('a worker is killed', backend, steps)

def nothing(backend): yield

@case('a worker is killed', 'ingest', 'redis', 'disk', 's3')
def kill_ingest_worker(backend): return run_ingest('a worker is killed', backend, nothing, kill=True, num_workers=2)

def forked_epoch(backend, output, first=lambda: None):
    "The epoch of a process of its own, which calls `first` before it; writes a line per batch"
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        store = backend.open('pets')
        first()
        for numbers,images in batches(store):
            right = [is_picture(*pair) for pair in zip(numbers, images)]
            os.write(output, json.dumps([numbers, right]).encode()+b'\n')
            time.sleep(.02)
    except BaseException as error: os.write(output, json.dumps(shortened(error)).encode()+b'\n')
    finally: os._exit(0)

def stop_epoch(fault_name, backend, stop, seen):
    "An epoch in a process of its own, which `stop(pid)` ends; waits until its workers have ended, too"
    prepare(backend)
    (reading,writing),tally = os.pipe(),Tally()
    pid = os.fork()
    if pid==0:
        os.close(reading)
        forked_epoch(backend, writing)
    os.close(writing)
    try:
        with os.fdopen(reading) as lines:
            for k,line in enumerate(lines):
                content = json.loads(line)
                if isinstance(content, str): seen = f'{content}. {seen}'
                else:
                    for number,right in zip(*content): tally.add(number, right)
                if k==3:
                    stop(pid)
                    began = time.monotonic()
        os.waitpid(pid, 0)
        wait_for(lambda: not group_exists(pid))
    finally:
        if group_exists(pid): os.killpg(pid, signal.SIGKILL)
    return tally.row(fault_name, 'epoch', backend, seen, time.monotonic()-began, complete=False)

def group_exists(pid):
    "Are there processes in the group of process `pid`, other than zombies?"
    for folder in Path('/proc').glob('[0-9]*'):
        try: state,_,group = (folder/'stat').read_text().rsplit(')', 1)[1].split()[:3]
        except OSError: continue
        if int(group)==pid and state!='Z': return True
    return False

@case('Ctrl-C', 'epoch', 'redis', 'disk')
def interrupt_epoch(backend):
    return stop_epoch('Ctrl-C', backend, lambda pid: os.killpg(pid, signal.SIGINT), 'No process stays.')

@case('the training process is killed', 'epoch', 'redis', 'disk')
def kill_epoch(backend):
    return stop_epoch('the training process is killed', backend, lambda pid: os.kill(pid, signal.SIGKILL),
                      'No process stays.')

SCRIPT = '''
import json, sys
from fault_backends import write_script
write_script(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
'''

def start_ingest(backend, flag, num_workers=2):
    "The ingest in a process group of its own"
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get('PYTHONPATH', '')])
    args = [sys.executable, '-c', SCRIPT, json.dumps(backend.address('new')), str(flag), str(num_workers)]
    return subprocess.Popen(args, env={**os.environ, 'PYTHONPATH':path}, text=True, start_new_session=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)

def stop_ingest(fault_name, backend, stop, seen):
    "An ingest that `stop(pid)` ends; then the same again"
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
    if seen is None: seen = anonymous('. '.join(last[-2:]))
    again = start_ingest(backend, flag, num_workers=1)
    assert again.wait(100)==0, again.stderr.read()
    seen = then_again(seen)
    return count_dataset(backend, 'new').row(fault_name, 'ingest', backend, seen, seconds)

@case('Ctrl-C', 'ingest', 'redis', 'disk')
def interrupt_ingest(backend):
    return stop_ingest('Ctrl-C', backend, lambda pid: os.killpg(pid, signal.SIGINT), None)

@case('the ingest is killed', 'ingest', 'redis', 'disk')
def kill_ingest(backend):
    return stop_ingest('the ingest is killed', backend, lambda pid: os.kill(pid, signal.SIGKILL),
                       'Readers see nothing. No process stays.')

@case('two ingests of one name', 'ingest', 'redis', 'disk')
def two_ingests(backend):
    began = time.monotonic()
    processes = [start_ingest(backend, backend.folder/f'flag{k}', num_workers=1) for k in range(2)]
    outputs = [process.communicate(timeout=300) for process in processes]
    codes = sorted(process.returncode for process in processes)
    assert codes==[0,1], outputs
    errors = next(error for process,(_,error) in zip(processes, outputs) if process.returncode)
    kind,message = errors.strip().split('\n')[-1].split(': ', 1)
    seen = shortened(type(kind.split('.')[-1], (Exception,), {})(message))
    row = count_dataset(backend, 'new').row('two ingests of one name', 'ingest', backend, '', time.monotonic()-began)
    row.seen = f'One writes the dataset; the other gets {seen}'
    return row

@case('clock jumps by a day, there and back', 'epoch', 'redis', 's3')
def clock_in_epoch(backend): return run_epoch('clock jumps by a day, there and back', backend, clock_jumps)

@case('clock jumps by a day, there and back', 'ingest', 'redis', 'disk')
def clock_in_ingest(backend):
    return run_ingest('clock jumps by a day, there and back', backend, clock_jumps)

def clock_jumps(backend):
    "`time.time` of this process, and the times of the files"
    real = time.time
    for days in (1, -1):
        time.time = lambda: real()+86400*days
        for path in backend.folder.rglob('*'):
            try: os.utime(path, (real()+86400*days,)*2)
            except OSError: pass
        yield
        time.sleep(.1)
    time.time = real

@case('of two processes with one cache, one is killed', 'epoch', 's3')
def shared_cache(backend):
    prepare(backend)
    backend.proxy.latency = .03
    reading,writing = os.pipe()
    if (pid:=os.fork())==0: forked_epoch(backend, writing)
    os.close(writing)
    def steps(backend):
        os.read(reading, 1)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        yield
    row = run_epoch('of two processes with one cache, one is killed', backend, steps, after=1)
    os.close(reading)
    return row

# --- a full disk

FEW = 16   # samples that are written to a disk of every size

DISK_FULL = r'''
import json, subprocess, sys
from fault_backends import *
disk,url,few,step,options = Path(sys.argv[1]),sys.argv[2],int(sys.argv[3]),int(sys.argv[4]),json.loads(sys.argv[5])
errors,places,size = [],set(),4
def written(): return sorted(str(path.relative_to(disk)) for path in disk.rglob('*') if path.is_file())
def ingest():
    to_shards(samples()['train'][:few], url, chunk=4, maxcount=8, num_workers=1, progress=False,
              storage_options=options)
while True:
    try: ingest(); break
    except StoreError as error:
        errors.append(f'{type(error).__name__}: {error}')
        places.add(tuple(written()))
    try: ShardStore(url, storage_options=options); sys.exit('it is visible')
    except StoreNotFound: pass
    size += step
    subprocess.run(['mount','-o',f'remount,size={size}k',str(disk)], check=True)
store = ShardStore(url, storage_options=options, cache=None)
values = store.get_many(range(len(store)), ['id','png'], check=True)
right = [bytes(png)==png_of(int(number)) for number,png in zip(values['id'], values['png'])]
print(json.dumps(dict(errors=errors, places=len(places), numbers=[int(i) for i in values['id']], right=right)))
'''

def can_mount():
    "May this process mount a file system in a name space of its own?"
    try: run = subprocess.run(['unshare','-Urm','mount','-t','tmpfs','none','/mnt'], capture_output=True)
    except OSError: return False
    return run.returncode==0

def fill(fault_name, backend, url, step, options=None, **env):
    "An ingest to `url`, again and again, while a disk of 4 KB grows by `step` KB each time"
    disk = backend.folder/'disk'
    disk.mkdir()
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get('PYTHONPATH', '')])
    script = [sys.executable, '-c', DISK_FULL, disk, url, str(FEW), str(step), json.dumps(options)]
    began = time.monotonic()
    run = subprocess.run(['unshare','-Urm','sh','-c','mount -t tmpfs -o size=4k disk "$0" && exec "$@"', disk, *script],
                         env={**os.environ, 'PYTHONPATH':path, **env}, capture_output=True, text=True, timeout=300)
    assert run.returncode==0, run.stdout[-500:]+run.stderr[-3000:]
    found,tally = json.loads(run.stdout),Tally(FEW)
    for number,right in zip(found['numbers'], found['right']): tally.add(number, right)
    assert {error.split(':')[0] for error in found['errors']}=={'StoreFull'}, found['errors']
    seen = then_again(anonymous(found['errors'][-1]).split('. ')[0])
    return found,tally.row(fault_name, 'ingest', backend, seen, time.monotonic()-began)

@case('disk full, at each size until all fits', 'ingest', 'disk')
def disk_full(backend):
    found,row = fill('disk full, at each size until all fits', backend, backend.folder/'disk', 4)
    assert found['places']>4, found   # it was full at different files
    return row

@case('disk for temporary files full', 'ingest', 's3')
def temporary_disk_full(backend):
    return fill('disk for temporary files full', backend, backend.url('new'), 16, backend.options(True),
                TMPDIR=str(backend.folder/'disk'))[1]

def mount_small(folder, kilobytes):
    "Give this process, which was just forked, a name space of its own, and mount a small file system at `folder`"
    uid,gid = os.getuid(),os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x10000000|0x00020000): raise OSError(ctypes.get_errno(), 'unshare')   # CLONE_NEWUSER, CLONE_NEWNS
    Path('/proc/self/setgroups').write_text('deny')
    Path('/proc/self/uid_map').write_text(f'0 {uid} 1')
    Path('/proc/self/gid_map').write_text(f'0 {gid} 1')
    subprocess.run(['mount','-t','tmpfs','-o',f'size={kilobytes}k','disk',folder], check=True)

def fill_disk(folder):
    with open(folder/'of others', 'wb', buffering=0) as file:
        try:
            while True: file.write(bytes(4096))
        except OSError: pass

@case('the disk of the cache is full', 'epoch', 's3')
def cache_full(backend):
    prepare(backend)
    backend.cache.mkdir()
    reading,writing = os.pipe()
    if (pid:=os.fork())==0:
        try: mount_small(backend.cache, 4096)
        except BaseException as error: os.write(writing, json.dumps(f'no mount: {error}').encode()+b'\n')
        else: forked_epoch(backend, writing, lambda: fill_disk(backend.cache))
        os._exit(1)
    os.close(writing)
    tally,seen,began = Tally(),CONTINUES['epoch'],time.monotonic()
    with os.fdopen(reading) as lines:
        for content in map(json.loads, lines):
            if isinstance(content, str): seen = content
            else:
                for number,right in zip(*content): tally.add(number, right)
    os.waitpid(pid, 0)
    complete = seen==CONTINUES['epoch']
    if complete: seen += ' A warning says that it reads without the cache.'
    return tally.row('the disk of the cache is full', 'epoch', backend, seen, time.monotonic()-began, complete)

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
    (REDIS, r'bit flipped in replies', 'see: every 6th reply'),
    (REDIS, r'slow replies, 0.2 s', 'see: 50 KB/s'),
    ('shards on disk', r'.*cache', 'no cache'),
    ('shards on disk', r'connection|.*repl(y|ies)|.*request|server answers', 'no network'),
    ('shards on disk', r'disk for temporary', 'none are written'),
    ('shards', SERVER, 'no Redis server'),
    ('shards on S3', r'.*6th (reply|request)', 'see: in replies'),
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

def run_case(found:Case)->Row:
    "Run a case on a new backend"
    with BACKENDS[found.kind]() as backend: return found.run(backend)

def main(words):
    # a process that a shell starts in the background ignores SIGINT, and so do its children
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = []
    for found in CASES:
        if words and not any(word.lower() in str(found).lower() for word in words): continue
        began = time.monotonic()
        try:
            row = run_case(found)
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
