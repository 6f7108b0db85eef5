"Replicas that are read from, and the servers that Sentinel names"
import time
from types import SimpleNamespace

import numpy as np
import pytest
import redis
from redis.sentinel import Sentinel

from clusters import LocalCluster, Pair, Sentinels
from conftest import in_time, wait_for
from fastai_remote import RedisStore, StoreUnavailable, to_redis
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.store import redis_servers
from fastai_remote.store.redis_servers import ClusterServers, SentinelServers
from fastai_remote.store.server import redis_server

N = 120
def samples(n=N, mark=''): return [{'txt':f'{mark}{i}', 'id.i4':i} for i in range(n)]
def put(url, n=N, mark='', **kw):
    return to_redis(samples(n, mark), url, 'd', **{'num_workers':1, 'progress':False, 'shuffle':False, **kw})
def texts(store): return [t.decode() for t in store.get_many(np.arange(len(store)), 'txt', check=True)['txt']]
def reads(client): return client.info('commandstats').get('cmdstat_mget', {}).get('calls', 0)

@pytest.fixture
def pair():
    with Pair() as p: yield p

def test_values_are_read_from_a_replica(pair):
    put(pair.master.url)
    pair.sync()
    store = RedisStore(pair.master.url, 'd', read_from='replica')
    before = reads(pair.a)
    assert texts(store)==[str(i) for i in range(N)] and reads(pair.b)>0 and reads(pair.a)==before
    # the master, if nothing is said
    assert texts(RedisStore(pair.master.url, 'd'))==texts(store) and reads(pair.a)>before

def test_what_a_replica_lacks_is_read_from_the_master(pair):
    "It has not received the dataset yet; or it still has the one that was replaced"
    put(pair.master.url, mark='old ')
    pair.sync()
    old = RedisStore(pair.master.url, 'd', read_from='replica')
    assert texts(old)[3]=='old 3'
    pair.b.replicaof('NO', 'ONE')   # from now on it does not receive anything
    put(pair.master.url, mark='new ', overwrite=True)
    new = RedisStore(pair.master.url, 'd', read_from='replica')
    new.link.servers._replicas = lambda: [('127.0.0.1', pair.replica.port)]   # the master does not name it any more
    assert texts(new)==[f'new {i}' for i in range(N)] and reads(pair.b)>0

def test_a_value_that_a_replica_lacks_is_read_from_the_master(pair):
    "In a cluster, the replica of one node may have the manifest before that of another node has all values"
    put(pair.master.url)
    pair.sync()
    store = RedisStore(pair.master.url, 'd', read_from='replica')
    pair.b.config_set('replica-read-only', 'no')
    pair.b.delete('d:txt:5')
    assert texts(store)==[str(i) for i in range(N)] and reads(pair.b)>0

def test_a_replica_that_is_away_does_not_matter(pair):
    put(pair.master.url)
    pair.sync()
    store = RedisStore(pair.master.url, 'd', read_from='replica')
    assert texts(store)[0]=='0'
    pair.replica.kill()
    assert texts(store)==[str(i) for i in range(N)]

def test_a_replica_that_appears_is_found_while_the_master_is_read_from(pair):
    put(pair.master.url)
    pair.sync()
    store = RedisStore(pair.master.url, 'd', read_from='replica')
    servers = store.link.servers
    servers.pause,find = .2,servers._replicas
    servers._replicas = lambda: []
    assert texts(store)[0]=='0' and reads(pair.b)==0
    servers._replicas = find
    def is_found():   # reads all the time, more often than there are pauses
        texts(store)
        return reads(pair.b)>0
    assert wait_for(is_found)

def test_a_master_without_replicas_is_read_from(tmp_path):
    with redis_server() as s:
        put(s.url)
        assert texts(RedisStore(s.url, 'd', read_from='replica'))==[str(i) for i in range(N)]

def test_read_from_has_two_values():
    with pytest.raises(ValueError, match="'nearest'.*'master' or 'replica'"):
        RedisLink('redis://localhost', read_from='nearest')

def test_replicas_of_a_cluster_are_read_from():
    with LocalCluster(2, 2) as c:
        put(c.url)
        for k in range(2): assert wait_for(lambda: c.client(k).wait(1, 1000))
        store = RedisStore(c.url, 'd', read_from='replica')
        want = [str(i) for i in range(N)]
        texts(store)   # now it is known to be a cluster
        def only_replicas_are_asked():   # but for some seconds after one of them was too busy to answer
            before = [reads(c.client(k)) for k in range(4)]
            assert texts(store)==want
            after = [reads(c.client(k)) for k in range(4)]
            return after[:2]==before[:2] and after[2]>before[2] and after[3]>before[3]
        assert wait_for(only_replicas_are_asked)
        c.servers[2].kill()
        assert texts(store)==want

def test_each_replica_of_a_node_of_a_cluster_may_be_read_from(monkeypatch):
    monkeypatch.setattr(redis_servers, '_client', lambda url, options: url)
    nodes = [SimpleNamespace(name=host, host=host, port=1) for host in ('master','a','b')]
    def servers(choice, slots):
        servers = ClusterServers.__new__(ClusterServers)
        servers.client = SimpleNamespace(keyslot=len, nodes_manager=SimpleNamespace(slots_cache=slots))
        servers.url,servers.options,servers._replica_clients,servers._choice = 'redis://master:1',{},{},choice
        return servers
    asked = {servers(choice, {3:nodes})._replica_of('key') for choice in range(5)}
    assert asked=={'redis://a:1','redis://b:1'}
    assert servers(1, {3:nodes[:1]})._replica_of('key') is None and servers(1, {})._replica_of('key') is None

# --- Sentinel

def test_tls_options_in_the_url_are_those_of_the_sentinels_too(monkeypatch):
    class Named:
        def __init__(self, nodes, sentinel_kwargs): self.options = sentinel_kwargs
        def discover_master(self, name): return '127.0.0.1',1
    monkeypatch.setattr(redis_servers, 'Sentinel', Named)
    url = 'rediss+sentinel://h1,h2:3/main?ssl_ca_certs=/ca.crt&ssl_check_hostname=False'
    link = RedisLink(url, ssl_ca_certs='/other.crt', ssl_keyfile='/a.key')
    options = link.servers._sentinel.options
    of_server = link.client.connection_pool.connection_kwargs
    for name,value in dict(ssl_ca_certs='/ca.crt', ssl_check_hostname=False, ssl_keyfile='/a.key', ssl=True).items():
        assert options[name]==value and of_server.get(name, True)==value

def test_sentinel_names_the_master_also_after_a_failover():
    with Sentinels() as s:
        put(s.url)
        assert s.a.exists('d:meta') and RedisStore.names(s.url)==['d']
        s.sync()
        store = RedisStore(s.url, 'd', timeout=60)
        assert texts(store)==[str(i) for i in range(N)] and 'pw' not in repr(store) and 'pw' not in store.link.url
        assert RedisStore(s.url+'/0', 'd').link.call(lambda c: c.get_connection_kwargs()['db'])==0
        replica = RedisStore(s.url, 'd', read_from='replica')
        assert texts(replica)==texts(store) and reads(s.b)>0
        s.master.kill()
        assert texts(store)==[str(i) for i in range(N)]
        put(s.url, mark='new ', overwrite=True)   # the replica accepts writes now
        assert texts(RedisStore(s.url, 'd', timeout=60))[5]=='new 5'
        s.procs[0].kill()   # a sentinel need not be there
        assert texts(RedisStore(s.url, 'd', timeout=60))[5]=='new 5'

def test_sentinels_that_are_away_or_know_no_such_server_are_errors_in_time():
    with in_time(8), pytest.raises(StoreUnavailable):
        RedisStore('redis+sentinel://127.0.0.1:1,127.0.0.1:2/drawings', 'd', timeout=1)
    with pytest.raises(ValueError, match='NAME'): RedisStore('redis+sentinel://127.0.0.1:1', 'd', timeout=1)

def test_sentinels_that_do_not_answer_do_not_say_that_there_are_no_replicas():
    "A writer would not wait for them then, just when a master has failed"
    def away(name): raise redis.ConnectionError('away')
    def no_replica(name): return []
    def one(name): return [dict(ip='a', port=1, is_odown=False, is_sdown=False), dict(ip='b', port=1, is_odown=False, is_sdown=True)]
    servers = SentinelServers.__new__(SentinelServers)
    servers._sentinel,servers._name = Sentinel([]),'d'
    for answers,count in (((away, one), 1), ((no_replica, one), 1), ((away, no_replica), 0)):
        servers._sentinel.sentinels = [SimpleNamespace(sentinel_slaves=answer) for answer in answers]
        assert servers.count_replicas()==count
    def may_not(name): raise redis.exceptions.NoPermissionError
    servers._sentinel.sentinels = [SimpleNamespace(sentinel_slaves=may_not)]
    assert servers.count_replicas()==0
    servers._sentinel.sentinels = [SimpleNamespace(sentinel_slaves=away)]*3
    with pytest.raises(redis.ConnectionError, match='no sentinel'): servers.count_replicas()
