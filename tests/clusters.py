"A Redis Cluster, and a master with a replica and sentinels: real servers on loopback, which tests break"
import fcntl, os, shutil, socket, subprocess, tempfile, time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import redis

from fastai_remote.store.server import find_server, redis_server

def wait_for(f, seconds=240):
    "Call `f` until it returns something true, and return that; the pauses between calls grow from 1 to 10 ms"
    deadline,pause = time.monotonic()+seconds,.001
    while not (result:=f()):
        assert time.monotonic()<deadline, 'what the test waits for does not happen'
        time.sleep(pause)
        pause = min(1.2*pause, .01)
    return result

# On a busy machine, Ray's workers would hardly run, as they have a niceness of 15, and those that take a minute to
# begin would be stopped and started anew, for ever
RAY = dict(RAY_worker_niceness='0', RAY_worker_register_timeout_seconds='600',
    RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S='600', RAY_USAGE_STATS_ENABLED='0', RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO='0')

@contextmanager
def one_ray_at_a_time():
    """Waits until no other test process runs Ray, which does not support several clusters on one machine

    Meanwhile, the environment is one in which Ray also starts beside many other processes."""
    with open(Path(tempfile.gettempdir())/'fastai_remote_tests.ray', 'w') as lock, patch.dict(os.environ, RAY):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

def several_servers(test):
    "Marks a test that starts a cluster, or a master with replicas"
    return pytest.mark.slow(pytest.mark.xdist_group('processes')(test))

def start_server(conf, announce=None, prefix='replica'):
    """Start a server with a TCP port

    `announce(address)` returns the port of a proxy before `address`. Then the server tells others this port instead of
    its own, so that clients reach it through the proxy."""
    for _ in range(20):   # a port that is free may be taken before the server has it, or the port of its bus may be
        try: server = redis_server(port=-1, **conf)
        except RuntimeError: continue
        server.public_port = announce(('127.0.0.1', server.port)) if announce else server.port
        if announce:
            ports = {f'{prefix}-announce-port':server.public_port}
            if prefix=='cluster': ports['cluster-announce-bus-port'] = server.port+10_000
            for name,port in ports.items(): redis.Redis.from_url(server.url).config_set(name, port)
            server.conf |= ports
        return server
    raise RuntimeError('no free ports')

SLOTS = 16384

class LocalCluster:
    """Servers that form a cluster, the masters first; slots are spread evenly over the masters. A context manager

    `announce` as in `start_server`; then `url` and `urls` are those of the proxies."""
    def __init__(self, masters=3, replicas=0, password='secret word', node_timeout=1000, announce=None, **conf):
        self.password,self.n_masters = password,masters
        conf = dict(requirepass=password, masterauth=password, cluster_enabled='yes', cluster_node_timeout=node_timeout,
                    cluster_config_file='nodes.conf', repl_diskless_sync_delay=0, **conf)
        self.servers = [start_server(conf, announce, 'cluster') for _ in range(masters+replicas)]
        clients = [self.client(k) for k in range(len(self.servers))]
        self.ids = [client.execute_command('CLUSTER MYID').decode() for client in clients]
        for k,client in enumerate(clients[:masters]):
            start,stop = SLOTS*k//masters,SLOTS*(k+1)//masters
            client.execute_command('CLUSTER ADDSLOTSRANGE', start, stop-1)
            client.execute_command('CLUSTER SET-CONFIG-EPOCH', k+1)
        for server in self.servers[1:]: clients[0].execute_command('CLUSTER MEET', '127.0.0.1', server.port)
        def all_have(name, value): return all(client.execute_command('CLUSTER INFO')[name]==value for client in clients)
        wait_for(lambda: all_have('cluster_known_nodes', str(len(clients))))
        for k,client in enumerate(clients[masters:]):
            def replicate():
                try: return client.execute_command('CLUSTER REPLICATE', self.ids[k%masters])
                except redis.ResponseError: return False   # it does not know its master yet
            wait_for(replicate)
        wait_for(lambda: all_have('cluster_state', 'ok'))
        for client in clients[masters:]:
            wait_for(lambda: client.info('replication').get('master_link_status')=='up')
        def knows_replicas(client):
            return sum(len(nodes)-1 for _,_,*nodes in client.execute_command('CLUSTER SLOTS'))==replicas
        wait_for(lambda: all(map(knows_replicas, clients)))

    def client(self, k): return redis.Redis.from_url(self.servers[k].url)
    @property
    def url(self): return self._login+f'@127.0.0.1:{self.servers[0].public_port}'
    @property
    def urls(self):
        "One URL with all nodes"
        return f'{self._login}@'+','.join(f'127.0.0.1:{server.public_port}' for server in self.servers)
    @property
    def _login(self): return self.servers[0].url.partition('@')[0]

    def move_slot(self, slot, source, target, finish=True, keys=None):
        "Move a slot, with its keys (or the first `keys` of them), from one master to another"
        a,b = self.client(source),self.client(target)
        b.execute_command('CLUSTER SETSLOT', slot, 'IMPORTING', self.ids[source])
        a.execute_command('CLUSTER SETSLOT', slot, 'MIGRATING', self.ids[target])
        names = a.execute_command('CLUSTER GETKEYSINSLOT', slot, 1_000_000)[:keys]
        for name in names:
            a.execute_command('MIGRATE', '127.0.0.1', self.servers[target].port, name, 0, 5000, 'AUTH', self.password)
        if finish:
            for k in (target,source): self.client(k).execute_command('CLUSTER SETSLOT', slot, 'NODE', self.ids[target])
        return len(names)

    def __enter__(self): return self
    def __exit__(self, *args):
        for server in self.servers: server.kill()
        for server in self.servers: server.close()

class Pair:
    "A master and a replica; `announce` as in `start_server`"
    def __init__(self, announce=None):
        conf = dict(requirepass='pw', masterauth='pw', repl_diskless_sync_delay=0)
        self.master,self.replica = self.servers = [start_server(conf, announce) for _ in range(2)]
        self.a,self.b = (redis.Redis.from_url(server.url) for server in self.servers)
        self.b.replicaof('127.0.0.1', self.master.public_port)
        wait_for(lambda: self.b.info('replication').get('master_link_status')=='up'
                 and self.a.info('replication').get('slave0', {}).get('state')=='online')
    def sync(self): assert wait_for(lambda: self.a.wait(1, 1000))
    def __enter__(self): return self
    def __exit__(self, *args):
        for server in self.servers: server.kill()   # one that is asked to end waits for its replica
        for server in self.servers: server.close()

class Sentinels(Pair):
    "A master, a replica, and `n` sentinels; a master that is away for `down_after` milliseconds is replaced"
    def __init__(self, n=3, announce=None, down_after=500):
        super().__init__(announce)
        self.folder,self.procs,self.ports = Path(tempfile.mkdtemp(prefix='fr-sentinel-')),[],[]
        for k in range(n): self._start(k, n, down_after)
        def ready(client):
            try: state = client.sentinel_master('drawings')
            except redis.RedisError: return False
            return state['num-slaves']==1 and state['num-other-sentinels']==n-1
        clients = [redis.Redis(port=port) for port in self.ports]
        wait_for(lambda: all(map(ready, clients)))

    def _start(self, k, n, down_after):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)   # another thread may fork, and keep it
            sock.bind(('127.0.0.1', 0))
            port = sock.getsockname()[1]
        file = self.folder/f'{k}.conf'
        file.write_text(f'port {port}\nbind 127.0.0.1\ndir {self.folder}\nprotected-mode no\n'
                        f'sentinel monitor drawings 127.0.0.1 {self.master.public_port} {n//2+1}\n'
                        f'sentinel auth-pass drawings pw\nsentinel down-after-milliseconds drawings {down_after}\n'
                        'sentinel failover-timeout drawings 3000\n')
        self.procs.append(subprocess.Popen([find_server(), file, '--sentinel'], stdout=subprocess.DEVNULL,
                                           stderr=subprocess.DEVNULL))
        self.ports.append(port)

    @property
    def url(self):
        return f"redis+sentinel://:pw@{','.join(f'127.0.0.1:{port}' for port in self.ports)}/drawings"
    def __exit__(self, *args):
        for process in self.procs:
            process.kill()
            process.wait(60)
        super().__exit__(*args)
        shutil.rmtree(self.folder, ignore_errors=True)
