"A Redis Cluster of real servers on loopback, which tests break"
import redis

from conftest import wait_for
from fastai_remote.store.server import redis_server

SLOTS = 16384

class LocalCluster:
    "Servers that form a cluster, the masters first; slots are spread evenly over the masters. A context manager"
    def __init__(self, masters=3, replicas=0, password='secret word', node_timeout=1000, **conf):
        self.password,self.n_masters = password,masters
        conf = dict(requirepass=password, masterauth=password, cluster_enabled='yes', cluster_node_timeout=node_timeout,
                    cluster_config_file='nodes.conf', repl_diskless_sync_delay=0, **conf)
        self.servers = [self._start(conf) for _ in range(masters+replicas)]
        first = self.client(0)
        ids = [self.client(k).execute_command('CLUSTER MYID').decode() for k in range(len(self.servers))]
        for k in range(masters):
            start,stop = SLOTS*k//masters,SLOTS*(k+1)//masters
            self.client(k).execute_command('CLUSTER ADDSLOTSRANGE', start, stop-1)
            self.client(k).execute_command('CLUSTER SET-CONFIG-EPOCH', k+1)
        for server in self.servers[1:]: first.execute_command('CLUSTER MEET', '127.0.0.1', server.port)
        wait_for(lambda: all(self.info(k)['cluster_known_nodes']==len(self.servers) for k in range(len(self.servers))))
        for k in range(masters, masters+replicas):
            def replicate(k=k):
                try: return self.client(k).execute_command('CLUSTER REPLICATE', ids[k%masters])
                except redis.ResponseError: return False   # it does not know its master yet
            wait_for(replicate)
        wait_for(lambda: all(self.info(k)['cluster_state']=='ok' for k in range(len(self.servers))))
        for k in range(masters, masters+replicas):
            wait_for(lambda: self.client(k).info('replication').get('master_link_status')=='up')
        self.ids = ids

    def _start(self, conf):
        for _ in range(20):   # a port that is free may be taken before the server has it, or the port of its bus may be
            try: return redis_server(port=-1, **conf)
            except RuntimeError: pass
        raise RuntimeError('no free ports')

    def client(self, k): return redis.Redis.from_url(self.servers[k].url)
    def info(self, k): return _parse(self.client(k).execute_command("CLUSTER INFO"))
    @property
    def url(self): return self.servers[0].url
    @property
    def urls(self):
        "One URL with all nodes"
        return self.servers[0].url+''.join(f',127.0.0.1:{server.port}' for server in self.servers[1:])

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

def _parse(reply):
    if isinstance(reply, dict): return {k:int(v) if str(v).isdigit() else v for k,v in reply.items()}
    pairs = (line.split(':', 1) for line in reply.decode().split() if ':' in line)
    return {k:int(v) if v.isdigit() else v for k,v in pairs}
