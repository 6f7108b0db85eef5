"The stores that faults are tried on, behind one interface: write a dataset, open it, read all of it, break it"
import io, os, shutil, signal, tempfile, time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import redis
from PIL import Image
from redis.crc import key_slot

from clusters import LocalCluster, Sentinels, SLOTS, wait_for
from fastai_remote import RedisStore, redis_server, ShardStore, StoreError, StoreNotFound, to_redis, to_shards
from faultproxy import FaultProxy as NetworkFaults

class Backend:
    """A place for datasets, with a connection that can be disturbed; a context manager

    `kind` says which faults can be tried on it. Each object is new and empty, and is used for one fault only."""
    name = kind = ''
    is_redis = False

    def __init__(self): self.stack,self.folder = ExitStack(),Path(tempfile.mkdtemp(prefix='fr-faults-'))
    def __enter__(self): return self
    def __exit__(self, *args):
        self.stack.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, source, name, fn=None, direct=False, **options):
        "Write dataset `name`; around the disturbances if `direct`"
        raise NotImplementedError
    def open(self, name, direct=False, **options):
        "The store of dataset `name`"
        raise NotImplementedError
    def address(self, name):
        "Where a script writes dataset `name`: the arguments of `to_redis` or `to_shards` after the source"
        raise NotImplementedError
    def abandon(self, name):
        "Drop what an unfinished ingest has written"
        raise NotImplementedError
    def settle(self): "Wait until replicas have what was written"

class RedisBackend(Backend):
    """Redis behind a proxy: one server, or several

    Faults of a server happen to `server`, one of them; `client` is connected to it without the proxy."""
    is_redis = True
    def __init__(self):
        super().__init__()
        self.proxy = self.stack.enter_context(NetworkFaults())

    def url(self, direct=False):
        "The address, with the proxy; without it if `direct`, where the address of the server is always the same"
        raise NotImplementedError
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
    def abandon(self, name): RedisStore.abandon(self.url(True), name)

    def choose(self, rng):
        "Let faults happen to another of the servers, chosen by `rng`"
        self.server = rng.choice(self.servers)
        self.client = redis.Redis.from_url(self.server.url)

    def restart(self, seconds=.5):
        "Kill the server as a crash would, and start it again after `seconds`"
        self.server.kill()
        time.sleep(seconds)
        self.server.start()

class OneServer(RedisBackend):
    "A single Redis server"
    name,kind = 'Redis','server'
    def __init__(self):
        super().__init__()
        self.server = self.stack.enter_context(redis_server())
        self.proxy.add(str(self.server.socket))
        self.client = redis.Redis.from_url(self.server.url)

    def url(self, direct=False): return self.server.url if direct else f'redis://127.0.0.1:{self.proxy.port}'

class Cluster(RedisBackend):
    """A Redis Cluster of three masters, which tell clients the ports of the proxy

    `server` has values, and counters that ingests of all names share, but not what describes a dataset."""
    name,kind = 'Redis Cluster','cluster'
    replicas = 0 # Of all masters together
    def __init__(self):
        super().__init__()
        node_timeout = 1000 if self.replicas else 5000
        cluster = LocalCluster(3, self.replicas, node_timeout=node_timeout, announce=self.proxy.add)
        self.cluster = self.stack.enter_context(cluster)
        self.server_number = self.node()
        self.server = self.cluster.servers[self.server_number]
        self.client = redis.Redis.from_url(self.server.url)

    def node(self): return node_of('fastai_remote:locks')
    @property
    def servers(self): return self.cluster.servers[:3]
    def url(self, direct=False): return self.cluster.urls

    def settle(self):
        for client in self.clients if self.replicas else (): client.wait(1, 5000)

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
    def __init__(self):
        super().__init__()
        self.group = self.stack.enter_context(Sentinels(self.n_sentinels, self.proxy.add, self.down_after))
        self.server = self.group.master
        self.client = redis.Redis.from_url(self.server.url)

    def url(self, direct=False): return self.group.url
    def settle(self): self.client.wait(1, 5000)

class SentinelFailover(Sentinel):
    "Three sentinels, which replace a master that is away for half a second"
    kind,n_sentinels,down_after = 'sentinel-failover',3,500
    @property
    def servers(self):
        "The one that is the master now"
        def is_master(server):
            try: return redis.Redis.from_url(server.url).info('replication')['role']=='master'
            except redis.RedisError: return False   # it is just becoming a replica, and hangs up
        return wait_for(lambda: [*filter(is_master, self.group.servers)][:1])

    def hand_over(self):
        "Let the replica take over"
        redis.Redis(port=self.group.ports[0]).execute_command('SENTINEL', 'FAILOVER', 'drawings')

    def wait_until_handed_over(self):
        "Until all sentinels name one master, and the other server is its replica"
        def is_over():
            sentinels = [redis.Redis(port=port) for port in self.group.ports]
            named = {tuple(sentinel.execute_command('SENTINEL', 'GET-MASTER-ADDR-BY-NAME', 'drawings'))
                for sentinel in sentinels}
            try: states = [redis.Redis.from_url(server.url).info('replication') for server in self.group.servers]
            except redis.RedisError: return False   # it is just becoming a replica, and hangs up
            roles = [state['role'] for state in states]
            links = [state['master_link_status'] for state in states if state['role']=='slave']
            return len(named)==1 and sorted(roles)==['master','slave'] and links==['up']
        wait_for(is_over)

class Disk(Backend):
    "Shards in a folder"
    name,kind = 'shards on disk','disk'
    def url(self, name): return str(self.folder/name)
    def write(self, source, name, fn=None, direct=False, **options):
        return to_shards(source, self.url(name), fn, **{'progress':False, 'maxcount':20, **options})
    def open(self, name, direct=False, **options):
        options.pop('timeout', None)
        return ShardStore(self.url(name), **options)
    def address(self, name): return (self.url(name),)
    def abandon(self, name): ShardStore.abandon(self.url(name))
    def file(self, name, pattern): return sorted((self.folder/name).glob(pattern))[0]

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
        cache = None if direct else options.pop('cache', self.cache)
        return ShardStore(self.url(name), storage_options=self.options(direct), cache=cache, **options)
    def abandon(self, name): ShardStore.abandon(self.url(name), storage_options=self.options(True))

BACKENDS = {cls.kind:cls for cls in (OneServer, Cluster, ClusterHome, ClusterReplicas, ClusterHomeReplicas, Sentinel,
                                     SentinelFailover, Disk, S3)}

# The samples that are written, and a function that is called for each of them

N_TRAIN,N_VALID = 128,32
N = N_TRAIN+N_VALID

def picture(number):
    "The pixels of sample `number`, which no other sample has"
    return np.random.default_rng(number).integers(0, 255, (8,8,3)).astype(np.uint8)

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

def write_script(address, flag, num_workers=2, **options):
    "What a script of its own runs: writes the samples to `address`, which `Backend.address` returned"
    options = {'progress':False, 'chunk':16, 'num_workers':num_workers, **options}
    if len(address)==2: return to_redis(samples(), *address, Slow(flag), **options)
    return to_shards(samples(), address[0], Slow(flag), maxcount=20, **options)
