"""Random SIGKILLs of the process that leads, of a worker, and of a server, while a dataset is written or changed

make kills                                    20 of each for each place
make kills KILLS=100                          100 of each
python tests/kills.py --place cluster --who server --seed 7

The places are a Redis server that appends each write to its file, a cluster of three of these, and a folder. After each
kill, readers see the dataset as it was before or as it is in the end; the same call finishes, with the same result as
if nothing had been; and nothing is left over. A line per kill says how far the call was.
"""
import argparse, json, os, random, shutil, signal, sys, tempfile, time, traceback, warnings
from contextlib import contextmanager
from itertools import product
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
os.environ['PYTHONPATH'] = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get('PYTHONPATH', '')])
os.environ.setdefault('OMP_NUM_THREADS', '1')
import redis

from clusters import LocalCluster, wait_for
from crashes import may_kill, passed, upper, will_kill
from fastai_remote import redis_server, RedisStore, StoreExists, StoreNotFound
from snapshots import FolderPlace, items, known, nothing, old, RedisPlace, replaced

OPTIONS = dict(chunk=4, progress=False)

def more(): return {'train':items('new', 40, 64), 'valid':items('old', 64, 72)}

# What is there before; and what is done in `num_workers` processes, with a store that was opened before
CALLS = {
    'ingest':(nothing, lambda place,_,n: place.write(known(), fn=passed, num_workers=n, **OPTIONS)),
    'overwrite':(old, lambda place,_,n: place.write(known(), fn=passed, num_workers=n, overwrite=True, **OPTIONS)),
    'append':(old, lambda _,store,n: store.append(more(), passed, num_workers=n, max_failed=1., **OPTIONS)),
    'add_fields':(old, lambda _,store,n: store.add_fields(upper, num_workers=n, **OPTIONS)),
    'edit':(old, lambda _,store,__: store.edit(drop=[1,5], set={'cls':{3:'z'}, 'txt':{4:'new'}})),
    'abandon':(replaced, lambda place,_,__: place.abandon()), 'delete':(replaced, lambda place,_,__: place.delete()),
    'rename':(old, lambda _,store,__: store.rename('b'))}
IN_WORKERS = ['ingest','overwrite','append','add_fields']

class Servers:
    "One or more servers with the data on disk, which are started again after they were killed"
    conf = dict(appendonly='yes', appendfsync='always')
    def __init__(self, in_cluster):
        self.cluster = LocalCluster(**self.conf) if in_cluster else None
        self.servers = self.cluster.servers if in_cluster else [redis_server(**self.conf)]
    @property
    def url(self): return (self.cluster or self.servers[0]).url

    def revive(self):
        "Start those again that were killed; were there any?"
        dead = [server for server in self.servers if server.proc.poll() is not None]
        for server in dead: server.start()
        if not dead or not self.cluster: return bool(dead)
        clients = [redis.Redis.from_url(server.url) for server in self.servers]
        return wait_for(lambda: all(c.execute_command('CLUSTER INFO')['cluster_state']=='ok' for c in clients))

    def close(self):
        for server in self.servers: server.kill()
        for server in self.servers: server.close()

@contextmanager
def opened(name):
    "The place of a name, and its `Servers` or `None`"
    folder,servers = Path(tempfile.mkdtemp(prefix='fr-kills-')),None
    try:
        if name!='folder': servers = Servers(name=='cluster')
        yield RedisPlace(servers) if servers else FolderPlace(folder),servers
    finally:
        if servers: servers.close()
        shutil.rmtree(folder, ignore_errors=True)

class Run:
    "A call in a process of its own, which notes each of its steps in a file; `kill` are the arguments of `will_kill`"
    def __init__(self, act, place, log, **kill):
        self.log = Path(log)
        self.log.write_text('')
        shutil.rmtree(f'{log}.killed', ignore_errors=True)
        self.pid = os.fork()
        if self.pid: return
        try:
            os.setsid()
            will_kill(log=str(log), folder=place.folder and str(place.folder), **kill)
            may_kill()
            act()
        except BaseException: Path(f'{log}.error').write_text(traceback.format_exc())
        finally: os._exit(0)

    def wait(self, servers):
        "Wait for its end, and meanwhile start servers again that were killed"
        while os.waitpid(self.pid, os.WNOHANG)==(0,0):
            if servers: servers.revive()
            time.sleep(.005)
        if servers: servers.revive()

    def wait_for_workers(self):
        "Those of a process that was killed leave by themselves"
        def are_gone():
            try: os.killpg(self.pid, 0)
            except ProcessLookupError: return True
        wait_for(are_gone)

    def steps(self):
        "What the process that noted most steps has done, a list of names of functions"
        lines = [line.split() for line in self.log.read_text().splitlines()]
        pids = [pid for pid,_ in lines]
        most = max(pids, key=pids.count, default=None)
        return [what for pid,what in lines if pid==most]

    def victim(self):
        "How many steps the process had done that was killed, or that killed a server, and the last one"
        killed = Path(f'{self.log}.killed')
        if not killed.exists(): return 0,'nothing'
        pid, = os.listdir(killed)
        mine = [line.split()[1] for line in self.log.read_text().splitlines() if line.split()[0]==pid]
        return len(mine),mine[-1]

class Undisturbed:
    "What a call leaves if nothing happens, and how many steps it has"
    def __init__(self, place, what, num_workers, who, log):
        start,act = CALLS[what]
        place.clear()
        start(place)
        self.before = place.visible()
        run = Run(lambda: act(place, opened_store(place), num_workers), place, log, who=who, at=None)
        run.wait(None)
        run.wait_for_workers()
        self.steps,self.after,self.names = len(run.steps()),place.everything(),place.names()
        assert self.steps>3 and self.after[0]!=self.before or what=='abandon', (what, who, self.steps)

def opened_store(place):
    try: return place.open()
    except StoreNotFound: return None

def check(place, servers, undisturbed, run, act):
    "After a kill: which version a reader saw; and what is wrong, `None` if nothing is"
    was = place.visible()
    if was not in (undisturbed.before, undisturbed.after[0]): return 'neither',f'a reader saw {str(was)[:300]}'
    saw = 'new' if was==undisturbed.after[0] else 'old'
    try: act()
    except (StoreExists,StoreNotFound) as error:
        if place.visible()!=undisturbed.after[0]: return saw,f'the same call failed: {error}'
    run.wait_for_workers()
    if place.visible()!=undisturbed.after[0]: return saw,'the result differs'
    if place.names()!=undisturbed.names: return saw,f'left over: {set(place.names())^set(undisturbed.names)}'
    if servers and place.everything()!=undisturbed.after: return saw,'keys or unfinished ingests differ'
    return saw,None

def kill_once(place, servers, what, who, num_workers, undisturbed, rng, log):
    "Returns whether it was in the middle, a text that says how far the call was, and what is wrong"
    start,act = CALLS[what]
    for part in (1., .6, .3, .1):   # a worker may have less to do than in the run that was not disturbed
        place.clear()
        start(place)
        store,at = opened_store(place),1+int(undisturbed.steps*rng.uniform(.02, .96)*part)
        pid = rng.choice(servers.servers).proc.pid if who=='server' else 0
        run = Run(lambda: act(place, store, num_workers), place, log,
                  who=who, at=at, pid=pid, delay=rng.uniform(0, .001))
        run.wait(servers)
        n,last = run.victim()
        if n: break
    chunks = sum(ingest['chunks'] for ingest in place.unfinished())
    saw,problem = check(place, servers, undisturbed, run, lambda: act(place, store, 1))
    far = f'step {n} of {undisturbed.steps}, in {last}; {chunks} chunks are done; readers see the {saw} version'
    return 1<n<undisturbed.steps, far, problem

def main(kills, places, whos, calls, seed):
    "Kill again and again, and print how far each call was; returns how many kills did harm"
    print(f'seed {seed}', flush=True)
    rng,counts,folder = random.Random(seed),{},tempfile.mkdtemp(prefix='fr-kills-log-')
    log = f'{folder}/log'
    for name,who in product(places, whos):
        if name=='folder' and who=='server': continue
        with opened(name) as (place,servers):
            known,count = {},counts.setdefault((name, who), [0, 0, 0])
            own = [what for what in calls if (servers or what!='rename') and (who!='worker' or what in IN_WORKERS)]
            for k in range(kills if own else 0):
                key = what,num_workers = own[k%len(own)],2 if who=='worker' else rng.choice([1,1,2])
                if key not in known: known[key] = Undisturbed(place, what, num_workers, who, log)
                is_middle,far,problem = kill_once(place, servers, what, who, num_workers, known[key], rng, log)
                print(f'{name}, {what}, {who}: {far}', *([f'WRONG: {problem}'] if problem else []), flush=True)
                for i,value in enumerate((1, is_middle, bool(problem))): count[i] += value
    shutil.rmtree(folder)
    for (name,who),(n,middle,wrong) in counts.items():
        print(f'{name}, {who}: {n} kills, {middle} in the middle; {wrong} did harm')
    return sum(wrong for _,_,wrong in counts.values())

if __name__=='__main__':
    warnings.simplefilter('ignore')
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--kills', type=int, default=int(os.environ.get('KILLS') or 20))
    parser.add_argument('--seed', type=int, default=random.randrange(1<<30))
    parser.add_argument('--place', nargs='*', default=['redis','cluster','folder'])
    parser.add_argument('--who', nargs='*', default=['parent','worker','server'])
    parser.add_argument('--call', nargs='*', default=[*CALLS])
    args = parser.parse_args()
    sys.exit(bool(main(args.kills, args.place, args.who, args.call, args.seed)))
