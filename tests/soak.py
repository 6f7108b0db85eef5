"""Two trainings and an ingest on one Redis server, for an hour, with a random fault every few seconds

make soak                                     one hour
make soak SOAK_SECONDS=120                    two minutes
make soak SOAK_STORE=cluster                  a Redis Cluster of three masters, or SOAK_STORE=sentinel
python tests/soak.py --seconds 60 --seed 7    the same order of faults again

Every epoch must have every sample once, with the right pixels. Every ingest must end with exactly the samples that were
written; after an error it repeats the same call, as a user does. File descriptors, threads and memory of the trainings
must not grow: the medians of the first and the last third of the epochs are compared, after a warm-up.
"""
import argparse, json, os, random, signal, statistics, subprocess, sys, threading, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import redis
from redis.crc import key_slot

from clusters import wait_for
from fault_backends import (Cluster, disturbed, hang_up, is_picture, loaders, masterless, N,
                            OneServer, png_of, read, refused, run_script, samples, SentinelFailover, unsaved)

HERE = Path(__file__).parent
WARM_UP = 2 # Epochs that are not compared
GROWTH = dict(descriptors=4, threads=3, megabytes=40) # What the medians may differ by

# --- the three processes

def resources():
    "File descriptors, threads and megabytes of this process that it does not share with others"
    rollup = Path('/proc/self/smaps_rollup').read_text().splitlines()
    private = sum(int(line.split()[1]) for line in rollup if line.startswith('Private_'))
    return dict(descriptors=len(os.listdir('/proc/self/fd')), threads=len(os.listdir('/proc/self/task')),
                megabytes=private/1024)

def say(**what): print(json.dumps(what), flush=True)

def train(url, stop, seed):
    "Read epoch after epoch, until the file `stop` exists; says what each was like"
    from fastai_remote import RedisStore
    parts = loaders(RedisStore(url, 'pets', timeout=60., socket_timeout=1.), bs=16, seed=seed)
    while not stop.exists():
        began,found,wrong = time.monotonic(),[],0
        for numbers,images in read(parts):
            found += numbers
            wrong += sum(not is_picture(*pair) for pair in zip(numbers, images))
            time.sleep(.03)   # a step of the training
        del images
        say(exact=sorted(found)==[*range(N)] and not wrong, seconds=time.monotonic()-began, **resources())

def write(url, stop, seed):
    "Replace a dataset again and again, until the file `stop` exists; says what each ingest was like"
    from fastai_remote import RedisStore, StoreError, to_redis
    source,version,options = samples(),0,dict(timeout=60., socket_timeout=1.)
    while not stop.exists():
        version += 1
        began,errors = time.monotonic(),{}
        word = f'version {version}, '.encode()
        marked = {split:[{**s, 'txt':word+str(s['id']).encode()} for s in part] for split,part in source.items()}
        while sum(errors.values())<200:
            try:
                to_redis(marked, url, 'new', overwrite=True, chunk=16, num_workers=2, progress=False, **options)
                break
            except StoreError as error:
                kind = type(error).__name__
                errors[kind] = errors.get(kind, 0)+1
                time.sleep(.5)
        store = RedisStore(url, 'new', **options)
        values = store.get_many(range(len(store)), ['id','png','txt'])
        numbers = sorted(values['id'].tolist())
        right = all((bytes(png),bytes(text))==(png_of(int(i)),word+str(i).encode())
                    for i,png,text in zip(*values.values()))
        say(exact=numbers==[*range(N)] and right, seconds=time.monotonic()-began, errors=errors)

# --- faults

def for_a_while(name, trouble, shortest, longest, **options):
    "A fault of this name that lasts some seconds: `trouble(backend, **options)` is a context manager"
    def fault(backend, rng):
        with trouble(backend, **options): time.sleep(rng.uniform(shortest, longest))
    fault.__name__ = name
    return fault

def restart(backend, rng):
    backend.client.save()
    backend.restart(rng.uniform(0, 1))

def pause(backend, rng): backend.client.client_pause(int(rng.uniform(100, 1500)))
def kill_clients(backend, rng): hang_up(backend)
def busy(backend, rng): run_script(backend, rng.uniform(.2, 1.5))

def move_slot(backend, rng):
    "A slot with keys moves to another node (MOVED, ASK)"
    key = backend.client.randomkey()
    if key is None: return
    source,slot = backend.servers.index(backend.server),key_slot(key)
    backend.cluster.move_slot(slot, source, (source+rng.choice([1,2]))%3)

def hand_over(backend, rng):
    "The replica becomes the master"
    before = backend.server
    try: backend.hand_over()
    except redis.ResponseError: return   # the sentinels are still busy with an earlier failover
    try: wait_for(lambda: backend.servers[0] is not before, 20)
    except AssertionError: pass   # the sentinels began a failover, and gave it up

def reset(backend, rng): backend.proxy.cut = rng.randrange(9000)
def truncate(backend, rng): backend.proxy.end_after = rng.randrange(9000)

refuse,misconf = for_a_while('refuse', refused, .1, 1),for_a_while('misconf', unsaved, .1, 1)
stall = for_a_while('stall', disturbed, .2, 2, stall=True)
slow,slower = (for_a_while('slow', disturbed, .5, 2, rate=rate) for rate in (200_000, 20_000))
readonly = for_a_while('readonly', masterless, .1, 1)
masterdown = for_a_while('masterdown', masterless, .1, 1, answers='no')

ANYWHERE = [restart, pause, kill_clients, refuse, stall, slow, slower, reset, truncate, busy, misconf]
BACKENDS = {'server':(OneServer, [*ANYWHERE, readonly, masterdown]), 'cluster':(Cluster, [*ANYWHERE, move_slot]),
            'sentinel':(SentinelFailover, [*ANYWHERE, hand_over])}

# --- the whole

class Role:
    "A process that runs `train` or `write`, and what it has said"
    def __init__(self, role, url, stop, seed):
        self.role,self.lines = role,[]
        path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get('PYTHONPATH', '')])
        self.process = subprocess.Popen([sys.executable, '-W', 'ignore', __file__, '--role', role, '--url', url,
            '--stop', str(stop), '--seed', str(seed)], env={**os.environ, 'PYTHONPATH':path}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        self.errors = []
        self.threads = [threading.Thread(target=self._read, daemon=True),
                        threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True)]
        for thread in self.threads: thread.start()

    def _read(self):
        for line in self.process.stdout: self.lines.append(json.loads(line))

    def end(self):
        "Wait for the end of the process; returns what is wrong, as a list of sentences"
        try: self.process.wait(180)
        except subprocess.TimeoutExpired: os.killpg(self.process.pid, signal.SIGKILL)
        for thread in self.threads: thread.join(10)
        problems = []
        if self.process.returncode:
            problems.append(f"{self.role} ended with {self.process.returncode}: {''.join(self.errors)[-1500:]}")
        if not self.lines: problems.append(f'{self.role} did nothing')
        wrong = [(k, line) for k,line in enumerate(self.lines) if not line['exact']]
        problems += [f'{self.role}, round {k}: not exact: {line}' for k,line in wrong]
        return problems+(self.growth() if self.role=='train' else [])

    def growth(self):
        lines = self.lines[WARM_UP:]
        third = len(lines)//3
        if not third: return []
        problems = []
        for what,most in GROWTH.items():
            first,last = (statistics.median(line[what] for line in part) for part in (lines[:third], lines[-third:]))
            if last-first>most: problems.append(f'{self.role}: {what} grew from {first:.0f} to {last:.0f}')
        return problems

    def __repr__(self):
        line = self.lines[-1] if self.lines else {}
        used = ', '.join(f'{line[what]:.0f} {what}' for what in GROWTH if what in line)
        errors = sum(sum(line.get('errors', {}).values()) for line in self.lines)
        again = f', {errors} errors, each followed by the same call' if errors else ''
        return f"{self.role}: {', '.join(filter(None, [f'{len(self.lines)} rounds{again}', used]))}"

def soak(seconds, seed, store='server', pause=(1., 4.)):
    "Run everything for `seconds` with one of `BACKENDS`; returns what is wrong, as a list of sentences"
    print(f'{store}, seed {seed}: the same faults again with --seed {seed}', flush=True)
    rng,counts = random.Random(seed),{}
    backend_class,faults = BACKENDS[store]
    with backend_class() as backend:
        backend.write(samples(), 'pets', direct=True, num_workers=1)
        stop = backend.folder/'stop'
        roles = [Role(role, backend.url(), stop, seed+k) for k,role in enumerate(['train','train','write'])]
        try:
            deadline = time.monotonic()+seconds
            while time.monotonic()<deadline and all(role.process.poll() is None for role in roles):
                time.sleep(rng.uniform(*pause))
                if not all(role.lines for role in roles): continue   # they are still starting
                backend.choose(rng)
                fault = rng.choice(faults)
                counts[fault.__name__] = counts.get(fault.__name__, 0)+1
                fault(backend, rng)
            stop.touch()
            problems = [problem for role in roles for problem in role.end()]
        finally:
            for role in roles:
                if role.process.poll() is None: os.killpg(role.process.pid, signal.SIGKILL)
    print(f"{sum(counts.values())} faults: {', '.join(f'{name} {count}' for name,count in sorted(counts.items()))}")
    print('\n'.join(map(repr, roles)))
    return problems

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--seconds', type=float, default=float(os.environ.get('SOAK_SECONDS') or 3600))
    parser.add_argument('--seed', type=int, default=None, help='default: a random one, which is printed')
    parser.add_argument('--store', choices=[*BACKENDS], default=os.environ.get('SOAK_STORE') or 'server')
    for name in ('role','url','stop'): parser.add_argument(f'--{name}', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role: {'train':train, 'write':write}[args.role](args.url, Path(args.stop), args.seed)
    else:
        problems = soak(args.seconds, random.randrange(1<<30) if args.seed is None else args.seed, args.store)
        print('\n'.join(problems) or 'Every epoch and every dataset was exact, and nothing grew.')
        sys.exit(bool(problems))
