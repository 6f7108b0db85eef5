"Replicas that are read from, and the servers that Sentinel names"
import random
from types import SimpleNamespace

import pytest
import redis
from redis.sentinel import Sentinel

from clusters import Pair, Sentinels, several_servers
from conftest import wait_for
from fastai_remote import RedisStore, StoreBusy, StoreUnavailable, to_redis
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.store.redis_servers import SentinelServers
from fastai_remote.testing import ManualClock
from fastai_remote.write.base import ServerRestarted
from fastai_remote.write.redis import RedisWriter

N = 120

def write(url, mark='', **kwargs):
    samples = [{'txt':f'{mark}{i}', 'id.i4':i} for i in range(N)]
    return to_redis(samples, url, 'd', num_workers=1, progress=False, shuffle=False, **kwargs)

def is_right(store, mark=''):
    return store.get_many(range(N), 'txt', check=True, decode=True)['txt']==[f'{mark}{i}' for i in range(N)]

def reads(client): return client.info('commandstats').get('cmdstat_mget', {}).get('calls', 0)

@pytest.fixture
def pair():
    "A master and a replica that has the same dataset"
    with Pair() as pair:
        write(pair.master.url)
        pair.sync()
        yield pair

@several_servers
def test_values_are_read_from_a_replica_and_what_it_lacks_from_the_master(pair):
    """A value, as the replica of one node of a cluster may have the manifest before that of another has all values; or
    the whole dataset, as it still has the one that was replaced"""
    def opened(): return RedisStore(pair.master.url, 'd', read_from='replica')
    old,before = opened(),reads(pair.a)
    find,old.link.servers.pause = old.link.servers._replicas,.2
    old.link.servers._replicas = lambda: []
    assert is_right(old) and reads(pair.b)==0<reads(pair.a)-before
    old.link.servers._replicas = find   # a replica appears
    wait_for(lambda: is_right(old) and reads(pair.b)>0)   # reads all the time, more often than there are pauses
    random.seed(7)
    state = random.getstate()
    old,before = opened(),reads(pair.a)
    assert is_right(old) and reads(pair.a)==before and random.getstate()==state
    # the master, if nothing is said
    assert is_right(RedisStore(pair.master.url, 'd')) and reads(pair.a)>before
    pair.b.config_set('replica-read-only', 'no')
    pair.b.delete('d:txt:5')
    assert is_right(old)
    pair.b.replicaof('NO', 'ONE')   # from now on it does not receive anything
    write(pair.master.url, 'new ', overwrite=True)
    new,before = opened(),reads(pair.b)
    # the master does not name it any more
    new.link.servers._replicas = lambda: [('127.0.0.1', pair.replica.port)]
    assert is_right(new, 'new ') and reads(pair.b)>before
    pair.replica.kill()
    assert is_right(new, 'new ')

def test_read_from_has_two_values_and_a_master_without_replicas_is_read_from(server):
    with pytest.raises(ValueError, match="'nearest'.*'master' or 'replica'"):
        RedisLink('redis://localhost', read_from='nearest')
    write(server.url)
    assert is_right(RedisStore(server.url, 'd', read_from='replica'))

# --- Sentinel

def test_tls_options_in_the_url_are_those_of_the_sentinels_too(monkeypatch):
    monkeypatch.setattr(Sentinel, 'discover_master', lambda self, name: ('127.0.0.1',1))
    url = 'rediss+sentinel://h1,h2:3/main?ssl_ca_certs=/ca.crt&ssl_check_hostname=False'
    link = RedisLink(url, ssl_ca_certs='/other.crt', ssl_keyfile='/a.key')
    want = dict(ssl_ca_certs='/ca.crt', ssl_check_hostname=False, ssl_keyfile='/a.key')
    for client in link.client,*link.servers._sentinel.sentinels:
        assert client.connection_pool.connection_kwargs.items()>=want.items()
        assert issubclass(client.connection_pool.connection_class, redis.SSLConnection)

def role(client):
    try: return client.info('replication')['role']
    except redis.RedisError: return None   # it hangs up when its role changes

@several_servers
def test_sentinel_names_the_master_also_after_a_failover(monkeypatch):
    "A commit to a master that is being replaced is noticed: until it is told, it accepts what it will forget"
    with Sentinels() as group:
        url,publish = group.url,RedisWriter.publish
        def in_a_failover(self, *args):
            redis.Redis(port=group.ports[0]).execute_command('SENTINEL', 'FAILOVER', 'drawings')
            wait_for(lambda: role(group.b)=='master')
            publish(self, *args)
        with monkeypatch.context() as patched:
            patched.setattr(RedisWriter, 'publish', in_a_failover)
            try: write(url)
            except (ServerRestarted,StoreBusy): is_reported = False
            else: is_reported = True
            wait_for(lambda: role(group.a)=='slave')   # the failover is over
        if not is_reported: write(url)
        assert RedisStore.names(url)==['d'], 'the commit was lost'
        store = RedisStore(url, 'd', timeout=300)
        assert is_right(store) and 'pw' not in repr(store) and 'pw' not in store.link.url
        wait_for(lambda: group.a.info('replication').get('master_link_status')=='up')
        wait_for(lambda: group.b.wait(1, 1000))
        replica = RedisStore(url+'/0', 'd', read_from='replica')
        assert replica.link.call(lambda client: client.get_connection_kwargs()['db'])==0
        wait_for(lambda: is_right(replica) and reads(group.a)>0)
        group.replica.kill()   # which is the master now
        assert is_right(store)
        write(url, 'new ', overwrite=True)   # the other one accepts writes now
        assert is_right(RedisStore(url, 'd', timeout=300), 'new ')
        group.procs[0].kill()   # a sentinel need not be there
        assert is_right(RedisStore(url, 'd', timeout=300), 'new ')

def test_sentinels_that_are_away_or_know_no_such_server_are_errors():
    with ManualClock(), pytest.raises(StoreUnavailable, match='127.0.0.1:1,127.0.0.1:2/drawings: '):
        RedisStore('redis+sentinel://127.0.0.1:1,127.0.0.1:2/drawings', 'd')
    with pytest.raises(ValueError, match='NAME'): RedisStore('redis+sentinel://127.0.0.1:1', 'd')

def test_sentinels_that_do_not_answer_do_not_say_that_there_are_no_replicas():
    "A writer would not wait for them then, just when a master has failed"
    def away(name): raise redis.ConnectionError('away')
    def no_replica(name): return []
    def one(name): return [dict(ip=ip, port=1, is_odown=False, is_sdown=ip=='b') for ip in 'ab']
    servers = SentinelServers.__new__(SentinelServers)
    servers._sentinel,servers._name = Sentinel([]),'d'
    for answers,count in (((away, one), 1), ((no_replica, one), 1), ((away, no_replica), 0)):
        servers._sentinel.sentinels = [SimpleNamespace(sentinel_slaves=answer) for answer in answers]
        assert servers.count_replicas()==count
    servers._sentinel.sentinels = [SimpleNamespace(sentinel_slaves=away)]*3
    with pytest.raises(redis.ConnectionError, match='no sentinel'): servers.count_replicas()
