"What a node of a cluster loses during an ingest is written again; and errors say what happened in all nodes"
import numpy as np
import pytest
import redis
from redis.crc import key_slot

from clusters import SLOTS
from conftest import wait_for
from fault_backends import NetworkFaults
from fastai_remote import (MissingSample, RedisStore, redis_server, StoreBusy, StoreError, StoreFull, StoreUnavailable, to_redis)
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.write.base import ServerRestarted
from fastai_remote.write.redis import RedisWriter
from fastai_remote.write.redis_state import LOCKS_KEY

N = 240
one = dict(num_workers=1, progress=False, chunk=16, shuffle=False)

def items(n=N): return [{'txt':f'text {i}' if i%5 else '', 'id.i4':i, 'cls':'abc'[i%3], 'y.f4':i/4} for i in range(n)]

def contents(store):
    values = store.get_many(np.arange(len(store)), ['txt','id.i4','cls','y.f4'], check=True)
    return [(bytes(text),int(number),int(code),float(y)) for text,number,code,y in zip(*values.values())]

def expected(numbers): return [(f'text {i}'.encode() if i%5 else b'', i, i%3, i/4) for i in numbers]

def by_number(row): return row[1]

def node_without(key):
    "The number of a master that does not have `key`, nor the others with its hash tag"
    return (3*key_slot(key.encode())//SLOTS+1)%3

acts = [] # What `at_150` does once

def at_150(sample):
    "For `to_redis`"
    if sample['id.i4']==150 and acts: acts.pop()()
    return sample

def without_some(sample):
    "For `to_redis`: some samples fail"
    if sample['id.i4']%9==3: raise ValueError('bad')
    return at_150(sample)

def good(fn): return [i for i in range(N) if fn is at_150 or i%9!=3]

def forget(cluster, key):
    "A function that drops all that one of the nodes has, which does not have `key`"
    return lambda: cluster.client(node_without(key)).flushall()

@pytest.mark.parametrize('fn', [at_150,without_some])
def test_chunks_that_a_node_lost_are_written_again(cluster, fn):
    "The records of the chunks are on another node, which lost nothing"
    acts.append(forget(cluster, '{d}:ingest'))
    def write(): return to_redis(items(), cluster.url, 'd', fn, max_failed=N, **one)
    with pytest.raises(StoreBusy, match='repeat the same call'): write()   # the copy of the lock is lost, too
    report = write()
    store = RedisStore(cluster.url, 'd')
    assert sorted(contents(store), key=by_number)==expected(good(fn)) and not store.verify(num_workers=1).bad
    assert report.failed==N-len(good(fn))

@pytest.mark.parametrize('field', ['txt','txt.crc','id.i4','cls~'])
def test_each_kind_of_value_that_is_lost_before_the_commit_is_written_again(cluster, field):
    def lose():
        keys = [key for k in range(3) for key in cluster.client(k).scan_iter(f'*:{field}[:#]*')]
        assert keys
        for k in range(3):
            for key in keys:
                try: cluster.client(k).delete(key)
                except redis.ResponseError: pass   # it is on another node
    acts.append(lose)
    to_redis(items(), cluster.url, 'd', at_150, **one)
    assert contents(RedisStore(cluster.url, 'd'))==expected(range(N))

def test_values_that_are_lost_while_gaps_are_filled_are_an_error(cluster, monkeypatch):
    "It is too late to write chunks again, whose samples have other numbers now"
    fill = RedisWriter._fill_gaps
    def interrupted(self, moves, run):
        fill(self, moves, run)
        raise KeyboardInterrupt
    monkeypatch.setattr(RedisWriter, '_fill_gaps', interrupted)
    with pytest.raises(KeyboardInterrupt): to_redis(items(), cluster.url, 'd', without_some, max_failed=N, **one)
    monkeypatch.undo()
    cluster.client(node_without('{d}:ingest')).flushall()
    with pytest.raises(StoreError, match='lost values.*abandon'):
        to_redis(items(), cluster.url, 'd', without_some, max_failed=N, **one)
        to_redis(items(), cluster.url, 'd', without_some, max_failed=N, **one)
    RedisStore.abandon(cluster.url, 'd')
    to_redis(items(), cluster.url, 'd', without_some, max_failed=N, **one)
    assert sorted(contents(RedisStore(cluster.url, 'd')), key=by_number)==expected(good(without_some))

@pytest.mark.parametrize('step', ['_fill_gaps','_encode_staged'])
def test_values_that_are_lost_in_a_commit_without_gaps_are_written_again(cluster, monkeypatch, step):
    original = getattr(RedisWriter, step)
    def interrupted(self, *args):
        original(self, *args)
        raise KeyboardInterrupt
    monkeypatch.setattr(RedisWriter, step, interrupted)
    def write(): return to_redis(items(), cluster.url, 'd', at_150, **one)
    with pytest.raises(KeyboardInterrupt): write()
    monkeypatch.undo()
    cluster.client(node_without('{d}:ingest')).flushall()
    write()
    store = RedisStore(cluster.url, 'd')
    assert contents(store)==expected(range(N)) and not store.verify(num_workers=1).bad

def test_copies_of_a_lock_whose_number_the_cluster_forgot_are_replaced(cluster):
    "A writer was killed, and the node that counts locks lost its data: the next writer has a smaller number"
    link = RedisLink(cluster.url)
    for _ in range(3):
        to_redis(items(20), cluster.url, 'other', overwrite=True, **one)
    killed = RedisWriter(link, 'd')
    plan = dict(n=N, chunk=16, fields={'txt':{'codec':'txt', 'dtype':None}}, splits={}, vocab={}, signature='s', stats=None)
    killed.begin(plan)
    killed.lock.stop.set()
    for key in (killed.keys.lock, LOCKS_KEY): link.call(lambda c: c.delete(key))
    to_redis(items(), cluster.url, 'd', overwrite=True, **one)
    assert contents(RedisStore(cluster.url, 'd'))==expected(range(N))
    with pytest.raises(StoreError): killed.put(np.arange(4), {'txt':[b'1']*4})

# --- messages

def test_the_cause_of_a_missing_sample_is_that_of_its_node(cluster):
    to_redis(items(), cluster.url, 'd', **one)
    store = RedisStore(cluster.url, 'd')
    node = cluster.client(node_without('{d}:meta'))
    node.config_set('maxmemory-policy', 'allkeys-random')
    try:
        node.flushall()
        with pytest.raises(MissingSample, match='maxmemory-policy allkeys-random'): store.get_many(range(N), 'txt')
    finally: node.config_set('maxmemory-policy', 'noeviction')

def test_a_node_that_is_full_is_named_with_its_memory(cluster):
    to_redis(items(), cluster.url, 'd', **one)
    node = cluster.client(node_without('{d}:meta'))
    node.config_set('maxmemory', 3_000_000)
    try:
        with pytest.raises(StoreFull, match=r'of maxmemory 2\.86M used|has .* left of'):
            to_redis([{'x.bin':bytes(9000), 'id.i4':i} for i in range(N*4)], cluster.url, 'big', **one)
        with pytest.raises(StoreFull, match=r'of maxmemory 2\.86M used'):
            link = RedisLink(cluster.url)
            for i in range(1000): link.send([('SET', f'x{i}', bytes(9000))])
    finally: node.config_set('maxmemory', 0)

# --- passwords

@pytest.fixture
def proxied():
    "A server with a password, a proxy before it, and a link through the proxy, which has been used"
    with redis_server(port=-1, requirepass='pw') as server, NetworkFaults(('127.0.0.1', server.port)) as proxy:
        link = RedisLink(f'redis://:pw@127.0.0.1:{proxy.port}', timeout=10)
        assert link.call(lambda c: c.ping())
        yield redis.Redis.from_url(server.url),proxy,link

@pytest.mark.parametrize('requests', [False,True])
def test_a_damaged_answer_to_the_password_is_not_a_refusal(proxied, requests):
    "The server has accepted it before: it is sent again"
    admin,proxy,link = proxied
    def damage(part):
        if not (b'AUTH' in part if requests else part.startswith(b'+OK')): return part
        proxy.damage = proxy.damage_requests = None
        proxy.hits += 1
        return part.replace(b'pw', b'pv') if requests else part.replace(b'K', b'J')
    setattr(proxy, 'damage_requests' if requests else 'damage', damage)
    admin.execute_command('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes')
    assert link.call(lambda c: c.ping()) and proxy.hits==1

def test_a_password_that_was_changed_is_refused_soon(proxied):
    admin,_,link = proxied
    admin.config_set('requirepass', 'other')
    admin.execute_command('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes')
    with pytest.raises(StoreUnavailable, match=r'refused.*[3-6] attempts in [0-4]\.'): link.call(lambda c: c.ping())

# --- Sentinel

@pytest.mark.slow
def test_a_commit_to_a_master_that_sentinel_is_replacing_is_noticed(monkeypatch):
    "The old master accepts writes until the sentinels tell it, and then it forgets them"
    from clusters import Sentinels
    def is_role(client, role):
        try: return client.info('replication')['role']==role
        except redis.RedisError: return False   # it hangs up when its role changes
    with Sentinels() as group:
        publish,reported = RedisWriter.publish,[]
        def in_a_failover(self, manifest, run):
            redis.Redis(port=group.ports[0]).execute_command('SENTINEL', 'FAILOVER', 'drawings')
            wait_for(lambda: is_role(group.b, 'master'), 30)
            publish(self, manifest, run)
        monkeypatch.setattr(RedisWriter, 'publish', in_a_failover)
        try: to_redis(items(), group.url, 'd', **one)
        except (ServerRestarted,StoreBusy): pass
        else: reported.append(1)
        wait_for(lambda: is_role(group.a, 'slave'), 60)   # the failover is over
        monkeypatch.undo()
        if reported: assert 'd' in RedisStore.names(group.url), 'the commit was lost'
        else: to_redis(items(), group.url, 'd', **one)
        assert contents(RedisStore(group.url, 'd'))==expected(range(N))

def test_a_server_that_drops_keys_during_an_ingest_is_noticed():
    "Its policy was changed after the ingest began; the lock and the records happen to stay"
    with redis_server() as server:
        client = redis.Redis.from_url(server.url)
        def evict():
            kept = {key:client.dump(key) for key in client.keys() if b':txt:' not in key}
            client.config_set('maxmemory-policy', 'allkeys-random')
            client.config_set('maxmemory', client.info('memory')['used_memory']-30_000)
            try: client.set('other', bytes(2000))
            except redis.RedisError: pass
            client.config_set('maxmemory', 0)
            client.config_set('maxmemory-policy', 'noeviction')
            for key,value in kept.items(): client.restore(key, 0, value, replace=True)
            assert client.info('stats')['evicted_keys']>5
        acts.append(evict)
        to_redis([{**item, 'txt':item['txt']*50} for item in items()], server.url, 'd', at_150, **one)
        store = RedisStore(server.url, 'd')
        texts = store.get_many(range(N), 'txt', check=True)['txt']
        assert [bytes(text).decode() for text in texts]==[item['txt']*50 for item in items()]
