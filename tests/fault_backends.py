"""The stores that faults are tried on, behind one interface: write a dataset, open it, read all of it, break it; and
faults that last as long as a block"""
import io, os, shutil, signal, tempfile, time
from contextlib import contextmanager, ExitStack, suppress
from pathlib import Path

import numpy as np
import redis
from PIL import Image
from redis.crc import key_slot

from clusters import LocalCluster, Sentinels, SLOTS, wait_for
from fastai_remote import RedisStore, redis_server, ShardStore, StoreNotFound, to_redis, to_shards
from faultproxy import FaultProxy

class Backend:
    """A place for datasets, with a connection that can be disturbed; a context manager

    `kind` says which faults can be tried on it. Each object is new and empty, and is used for one fault only, unless it
    can be renewed.
    `write(source, name, fn, direct, **options)` writes a dataset, and `open(name, direct, **options)` is its store;
    `direct` means around the disturbances. `address(name)` are the arguments of `to_redis` or `to_shards` after the
    source, for a script."""
    name = kind = ''
    is_redis = False
    is_prepared = False # Has it the dataset that epochs read?

    def __init__(self): self.stack,self.folder = ExitStack(),Path(tempfile.mkdtemp(prefix='fr-faults-'))
    def __enter__(self): return self
    def __exit__(self, *args):
        self.stack.close()
        shutil.rmtree(self.folder, ignore_errors=True)
    def settle(self): "Wait until replicas have what was written"

    def renew(self):
        "Be as new, after a fault that has left the servers as they were"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = Path(tempfile.mkdtemp(prefix='fr-faults-'))

class RedisBackend(Backend):
    """Redis behind a proxy: one server, or several

    Faults of a server happen to `server`, one of them; `client` is connected to it without the proxy. `url(direct)` is
    the address, without the proxy if `direct` and the address of the server is always the same."""
    is_redis = True
    def __init__(self):
        super().__init__()
        self.proxy = self.stack.enter_context(FaultProxy())
        self.start()
        self.client = redis.Redis.from_url(self.server.url)

    @property
    def servers(self)->list:
        "Those that clients write to"
        return [self.server]
    @property
    def clients(self): return [redis.Redis.from_url(server.url) for server in self.servers]
    def write(self, source, name, fn=None, direct=False, **options):
        return to_redis(source, self.url(direct), name, fn, progress=False, **options)
    def open(self, name, direct=False, **options): return RedisStore(self.url(direct), name, **options)
    def address(self, name): return self.url(),name

    def renew(self):
        "Be new and empty again"
        super().renew()
        vars(self.proxy).update(stall=False, cut=None, end_after=None, rate=None)
        for client in self.clients:
            client.config_set('maxmemory', 0)
            client.config_set('maxmemory-policy', 'noeviction')
            client.flushall()
        self.is_prepared = False

    def choose(self, rng):
        "Let faults happen to another of the servers, chosen by `rng`"
        self.server = rng.choice(self.servers)
        self.client = redis.Redis.from_url(self.server.url)

    def restart(self, seconds=0.):
        "Kill the server as a crash would, and start it again after `seconds`"
        self.server.kill()
        time.sleep(seconds)
        self.server.start()

class OneServer(RedisBackend):
    "A single Redis server"
    name,kind = 'Redis','server'
    def start(self):
        self.server = self.stack.enter_context(redis_server())
        self.proxy.add(str(self.server.socket))

    def url(self, direct=False): return self.server.url if direct else f'redis://127.0.0.1:{self.proxy.port}'

class Cluster(RedisBackend):
    """A Redis Cluster of three masters, which tell clients the ports of the proxy

    `server` has values, and counters that ingests of all names share, but not what describes a dataset."""
    name,kind = 'Redis Cluster','cluster'
    replicas = 0 # Of all masters together
    def start(self):
        node_timeout = 1000 if self.replicas else 5000
        cluster = LocalCluster(3, self.replicas, node_timeout=node_timeout, announce=self.proxy.add)
        self.cluster,self.server_number = self.stack.enter_context(cluster),self.node()
        self.server = self.cluster.servers[self.server_number]

    def node(self): return node_of('fastai_remote:locks')
    @property
    def servers(self): return self.cluster.servers[:3]
    def url(self, direct=False): return self.cluster.urls

    def settle(self):
        for client in self.clients if self.replicas else (): client.wait(1, 5000)

    def renew(self):
        "Also after a node was restarted"
        def is_whole(client): return client.execute_command('CLUSTER INFO')['cluster_state']=='ok'
        wait_for(lambda: all(map(is_whole, self.clients)))
        super().renew()

    def hand_over(self):
        "Let the replica of `server` take over"
        self.cluster.client(self.server_number+3).execute_command('CLUSTER FAILOVER')

    def wait_until_handed_over(self):
        "Not needed: a master of a cluster takes no writes while it hands over"

def node_of(key): return 3*key_slot(key.encode())//SLOTS

class ClusterHome(Cluster):
    "The same; `server` has what describes the datasets, and the names of keys that one node has for both of them"
    name,kind = 'Redis Cluster, node of the manifest','cluster-home'
    def node(self):
        assert node_of('pets')==node_of('new')!=node_of('fastai_remote:locks')
        return node_of('new')

class ClusterReplicas(Cluster):
    "A cluster in which each master has a replica"
    kind,replicas = 'cluster-replicas',3

class ClusterHomeReplicas(ClusterHome):
    "The same; `server` has what describes the datasets"
    kind,replicas = 'cluster-home-replicas',3

class Sentinel(RedisBackend):
    """A master and a replica that tell clients the ports of the proxy, and a sentinel

    The sentinel waits for a master that is away, as an administrator would who restarts it."""
    name,kind = 'Sentinel','sentinel'
    n_sentinels,down_after = 1,60_000 # Milliseconds
    def start(self):
        self.group = self.stack.enter_context(Sentinels(self.n_sentinels, self.proxy.add, self.down_after))
        self.server = self.group.master

    def url(self, direct=False): return self.group.url
    def settle(self): self.client.wait(1, 5000)

class SentinelFailover(Sentinel):
    "Three sentinels, which replace a master that is away for half a second"
    kind,n_sentinels,down_after = 'sentinel-failover',3,500

    @property
    def servers(self):
        "The one that is the master now"
        def masters(): return [server for server in self.group.servers if replication(server).get('role')=='master']
        return wait_for(masters)[:1]

    def hand_over(self):
        "Let the replica take over"
        redis.Redis(port=self.group.ports[0]).execute_command('SENTINEL', 'FAILOVER', 'drawings')

    def wait_until_handed_over(self):
        "Until all sentinels name one master, and the other server is its replica"
        def is_over():
            sentinels = [redis.Redis(port=port) for port in self.group.ports]
            named = {sentinel.sentinel_get_master_addr_by_name('drawings') for sentinel in sentinels}
            states = map(replication, self.group.servers)
            roles = {state.get('role'):state.get('master_link_status') for state in states}
            return len(named)==1 and roles=={'master':None, 'slave':'up'}
        wait_for(is_over)

def replication(server):
    "What a server says about it; nothing while it is away, or is just becoming a replica, and hangs up"
    try: return redis.Redis.from_url(server.url).info('replication')
    except redis.RedisError: return {}

class Disk(Backend):
    "Shards in a folder"
    name,kind = 'shards on disk','disk'
    def url(self, name): return str(self.folder/name)
    def write(self, source, name, fn=None, direct=False, **options):
        return to_shards(source, self.url(name), fn, **{'progress':False, 'maxcount':20, **options})
    def open(self, name, direct=False, timeout=None, **options): return ShardStore(self.url(name), **options)
    def address(self, name): return (self.url(name),)

class S3(Backend):
    "Shards on an S3 server behind a proxy, read through a cache"
    name,kind = 'shards on S3','s3'
    def __init__(self):
        from s3proxy import S3Proxy
        from s3servers import moto_server
        super().__init__()
        self.server = self.stack.enter_context(moto_server())
        self.proxy = self.stack.enter_context(S3Proxy(self.server.endpoint))
        self.cache = self.folder/'cache'

    def url(self, name): return f's3://{self.server.bucket}/{name}'
    def options(self, direct):
        endpoint = (self.server if direct else self.proxy).endpoint
        return dict(endpoint_url=endpoint, key=self.server.key, secret=self.server.secret)
    def write(self, source, name, fn=None, direct=False, **options):
        return to_shards(source, self.url(name), fn, storage_options=self.options(direct),
                         **{'progress':False, 'maxcount':20, **options})
    def open(self, name, direct=False, **options):
        cache = None if direct else self.cache
        return ShardStore(self.url(name), storage_options=self.options(direct), cache=cache, **options)

    def renew(self):
        "The dataset that epochs read stays, as it takes two seconds to write"
        super().renew()
        self.cache,self.proxy.latency = self.folder/'cache',0.
        self.proxy.clear()
        with suppress(StoreNotFound): ShardStore.delete(self.url('new'), storage_options=self.options(True))

BACKENDS = {cls.kind:cls for cls in (OneServer, Cluster, ClusterHome, ClusterReplicas, ClusterHomeReplicas, Sentinel,
                                     SentinelFailover, Disk, S3)}

# --- faults of the network and of a server; those that are context managers last as long as the block

@contextmanager
def refused(backend):
    "The ports are closed"
    backend.proxy.refuse()
    yield
    backend.proxy.accept()

@contextmanager
def disturbed(backend, **values):
    "Attributes of the proxy have these values"
    before = {name:getattr(backend.proxy, name) for name in values}
    vars(backend.proxy).update(values)
    yield
    vars(backend.proxy).update(before)

@contextmanager
def masterless(backend, answers='yes'):
    "The server is a replica whose master is gone; it answers reads (READONLY), or nothing (MASTERDOWN) with 'no'"
    backend.client.config_set('replica-serve-stale-data', answers)
    backend.client.replicaof('127.0.0.1', 1)
    yield
    backend.client.replicaof('NO', 'ONE')

@contextmanager
def unsaved(backend):
    "The server cannot save to its disk, and refuses to be written to (MISCONF): a folder is in the place of the file"
    client,file = backend.client,backend.server.dir/'dump.rdb'
    file.unlink(missing_ok=True)
    file.mkdir()
    client.config_set('save', '3600 1')
    client.bgsave()
    wait_for(lambda: client.info('persistence')['rdb_last_bgsave_status']=='err')
    yield
    file.rmdir()
    client.config_set('save', '')
    client.bgsave()
    wait_for(lambda: not client.info('persistence')['rdb_bgsave_in_progress'])

def run_script(backend, seconds):
    "The server runs a script (BUSY)"
    backend.client.config_set('lua-time-limit', 50)
    script = "local s=redis.call('TIME') while true do local t=redis.call('TIME') " \
             "if (t[1]-s[1])*1e6+t[2]-s[2]>tonumber(ARGV[1]) then return 1 end end"
    with suppress(redis.ResponseError): backend.client.eval(script, 0, int(seconds*1e6))   # a sentinel may end it

def hang_up(backend):
    "All connections of clients are closed"
    for client in backend.clients: client.execute_command('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes')

# --- the samples that are written, a function that is called for each of them, and how they are read

N_TRAIN,N_VALID = 128,32
N = N_TRAIN+N_VALID

def picture(number):
    "The pixels of sample `number`, which no other sample has"
    return np.random.default_rng(number).integers(0, 255, (8,8,3)).astype(np.uint8)

def is_picture(number, pixels): return 0<=number<N and bool((pixels==picture(number)).all())

def png_of(number):
    Image.fromarray(picture(number)).save(buffer:=io.BytesIO(), 'PNG')
    return buffer.getvalue()

def samples():
    "`{split: list of samples}`"
    every = [{'png':png_of(i), 'id':i, 'cls':'abc'[i%3], 'txt':f'number {i}'} for i in range(N)]
    return {'train':every[:N_TRAIN], 'valid':every[N_TRAIN:]}

class Slow:
    """Takes some time for a sample; at sample `number` it makes the file `flag`, and the first time kills its process

    From then on it takes five times as long, so that the fault happens before the end."""
    def __init__(self, flag, number=60, seconds=.001, kill=False):
        self.flag,self.number,self.seconds,self.kill = str(flag),number,seconds,kill
    def __call__(self, sample):
        is_made = os.path.exists(self.flag)
        time.sleep(self.seconds*(5 if is_made else 1))
        if sample['id']==self.number and not is_made:
            open(self.flag, 'w').close()
            if self.kill: os.kill(os.getpid(), signal.SIGKILL)
        return sample

def write_script(address, flag, num_workers):
    "What a script of its own runs: writes the samples to `address`, which `Backend.address` returned"
    options = dict(progress=False, chunk=16, num_workers=num_workers)
    if len(address)==2: return to_redis(samples(), *address, Slow(flag), **options)
    return to_shards(samples(), address[0], Slow(flag), maxcount=20, **options)

def loaders(store, bs, seed):
    "Training and validation of two workers, from the first sample to the last"
    from fastai.data.core import DataLoaders
    import fastai_remote.block
    dls = DataLoaders.from_store(store, x='png', y='id', bs=bs, num_workers=2, device='cpu', seed=seed)
    return dls.train.new(drop_last=False),dls.valid

def read(loaders):
    "The batches of an epoch, as `(numbers, pixels)`"
    for loader in loaders:
        for x,y in loader: yield y.long().tolist(),(x*255).round().byte().permute(0, 2, 3, 1).numpy()
