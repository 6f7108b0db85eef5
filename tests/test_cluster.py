"Datasets in a Redis Cluster: as on one server, spread evenly, and nothing is lost when a node fails or forgets"
import random
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import redis
from hypothesis import given, strategies as st
from redis.crc import key_slot
from torch.utils.data import DataLoader

from clusters import LocalCluster, several_servers, SLOTS
from conftest import examples, wait_for
from crashes import dies_at
from fastai_remote import (MissingSample, RedisStore, RemoteDataset, ShardStore, StoreBusy, StoreError, StoreExists,
    StoreFull, StoreNotFound, StoreUnavailable, TieredStore, redis_server, to_redis, to_shards)
from fastai_remote.store.redis_parts import key_layout
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.write.redis import RedisWriter
from snapshots import RedisPlace

N = 240
FIELDS = 'txt','id.i4','cls','y.f4'
one = dict(num_workers=1, progress=False)

def sample(i): return {'txt':f'text {i}' if i%5 else '', 'id.i4':i, 'cls':'abc'[i%3], 'y.f4':i/4}

acts = [] # What `write` does once, at sample 150

def at_150(o):
    if o['id.i4']==150 and acts: acts.pop()()
    return o

def without_some(o):
    if o['id.i4']%9==3: raise ValueError('bad')
    return at_150(o)

def write(url, name='d', n=N, fn=at_150, **kwargs):
    options = dict(chunk=16, shuffle=False, max_failed=N, **one)
    return to_redis([sample(i) for i in range(n)], url, name, fn, **{**options, **kwargs})

def is_right(store, numbers=range(N)):
    "Does it have these samples, in any order?"
    values = store.get_many(range(len(store)), FIELDS, check=True, decode=True)
    return sorted(zip(*values.values()), key=lambda row: row[1])==[tuple(sample(i).values()) for i in numbers]

GOOD = [i for i in range(N) if i%9!=3] # What `without_some` lets pass

def all_keys(cluster, own=(b'fastai_remote:locks', b'fastai_remote:used')):
    "The keys of all masters, without what is never removed"
    return {key for k in range(cluster.n_masters) for key in cluster.client(k).keys()}-set(own)

def call(url, command, *args): return RedisLink(url).call(lambda client: getattr(client, command)(*args))

def node_without(key):
    "The number of a master that does not have `key`, nor the others with its hash tag"
    return (3*key_slot(key.encode())//SLOTS+1)%3

# --- where keys are

def test_tags_are_spread_evenly_over_the_slots():
    for tags in (6,12,16,60):
        for prefix in ('d', 'drawings of 2016/a.b@7', 'ö'):
            layout = key_layout(prefix, tags)
            slots = sorted(key_slot(start.encode()) for start in layout.starts)
            assert [slot*tags//SLOTS for slot in slots]==list(range(tags)) and len(set(layout.starts))==tags
            assert layout.values('x', [5])==[f'{layout.starts[5%tags]}:x:5']

@examples(60)
@given(st.lists(st.text('{}a:1', max_size=6), min_size=1, max_size=40))
def test_a_command_has_keys_of_one_slot(keys):
    "By the rule of Redis: the text in the first braces decides, unless it is empty"
    commands,places = RedisLink('redis://127.0.0.1:1,127.0.0.1:2').value_reads(keys, 10)
    assert sorted(k for place in places for k in place)==list(range(len(keys)))
    for (name,*parts),place in zip(commands, places):
        assert name=='MGET' and parts==[keys[k] for k in place] and len({key_slot(key.encode()) for key in parts})==1

def written_once(cluster):
    "Writes a dataset; returns a function after which nothing else is there, which is faster than to write it again"
    place = RedisPlace(SimpleNamespace(url=cluster.url, cluster=True))
    write(cluster.url, n=16, chunk=64)
    before = place.copy()
    def put_back():
        place.clear()
        place.put_back(before)
    return put_back

# --- as on one server

@several_servers
def test_a_dataset_is_as_on_one_server_and_spread_evenly(cluster):
    for url in cluster.url,cluster.urls:
        write(url, overwrite=True)
        random.seed(7)
        before = random.getstate()
        store = RedisStore(url, 'd', read_from='replica')   # there is none
        assert is_right(store) and random.getstate()==before
        store = RedisStore(url, 'd')
        assert is_right(store) and store.vocab==['a','b','c'] and (store.manifest.format,store.manifest.tags)==(1,12)
        assert store.verify(num_workers=1).bad==0 and RedisStore.names(url)==['d'] and RedisStore.unfinished(url)==[]
        assert store[7]['txt']=='text 7' and cluster.password not in repr(store)
        order = np.random.default_rng(0).integers(0, N, 64)
        assert store.get_many(order, 'id.i4')['id.i4'].tolist()==order.tolist()
        assert store.get_many(order, 'txt', decode=True)['txt']==[sample(i)['txt'] for i in order]
    keys = [cluster.client(k).keys('*:txt:*') for k in range(3)]
    assert sum(map(len, keys))==N and max(map(len, keys))-min(map(len, keys))<=12
    dl = DataLoader(RemoteDataset(store).to_tuple('id.i4'), batch_size=32, num_workers=1)
    assert sorted(int(i) for batch in dl for i in batch[0])==list(range(N))
    with pytest.raises(StoreUnavailable, match='refused') as e:
        RedisStore(cluster.urls.replace('secret%20word', 'other'), 'd')
    assert 'other' not in str(e.value)

@several_servers
def test_no_chunk_is_written_twice(cluster, tmp_path):
    "Each worker knows from the beginning that this is a cluster; finding it out would look like a restart"
    log = tmp_path/'numbers'
    def fn(i):
        with log.open('a') as f: f.write(f'{i}\n')
        return sample(i)
    def conversions(url, num_workers):
        log.write_text('')
        to_redis(list(range(12)), url, 'd', fn=fn, chunk=4, num_workers=num_workers, overwrite=True, progress=False)
        return sorted(log.read_text().split())
    with redis_server() as single:
        for num_workers in (0,1): assert conversions(cluster.url, num_workers)==conversions(single.url, num_workers)

@several_servers
def test_the_next_call_on_either_name_finishes_a_rename_that_was_killed(cluster):
    "Between two steps the dataset has both names: who removes one must not remove the samples of the other"
    url,put_back,seen = cluster.url,written_once(cluster),set()
    def check(k, name):
        "What the names are when the rename has died at its `k`-th call, and did it? Then `name` is written"
        put_back()
        died = dies_at(k, lambda: RedisStore(url, 'd').rename('e'))
        names = RedisStore.names(url)
        seen.add((name, *names))
        write(url, n=9, name=name, overwrite=True)
        has = {key:range(9) if key==name else range(16) for key in {name, *names}}
        if len(names)==2: has = {name:range(9), 'e':range(9 if name=='e' else 16)}   # 'd' has gone
        assert RedisStore.names(url)==sorted(has) and all(is_right(RedisStore(url, key), has[key]) for key in has), k
        return names,died
    for k in range(20, 70, 2):
        names,died = check(k, 'de'[k//2%2])
        if len(names)==2: check(k, 'ed'[k//2%2])
        if not died: break
    assert seen=={(name, *names) for name in 'de' for names in ('d', 'de', 'e')} and not died
    for key in 'de':
        with suppress(StoreNotFound): RedisStore.delete(url, key)
    assert all_keys(cluster)==set()

@several_servers
def test_no_list_has_a_name_after_a_call_that_was_killed_is_repeated(cluster):
    "The lists are on other nodes than what they name"
    url,lists = cluster.url,('fastai_remote:ingests','fastai_remote:names')
    def repeated(act, error, k):
        died = dies_at(k, act)
        with suppress(error): act()
        return died
    def ingest(): write(url, n=16, chunk=16)
    for k in range(20, 100, 3):
        died = repeated(ingest, StoreExists, k)
        assert [call(url, 'smembers', key) for key in lists]==[set(), {b'd'}], k
        RedisStore.delete(url, 'd')
        if not died: break
    put_back = written_once(cluster)
    for k in range(20, 300, 8):
        put_back()
        died = repeated(lambda: RedisStore.delete(url, 'd'), StoreNotFound, k)
        assert all_keys(cluster)==set(), k
        if not died: break
    assert k>40

@several_servers
def test_the_cause_of_a_missing_sample_is_that_of_its_node(cluster):
    write(cluster.url)
    store,node = RedisStore(cluster.url, 'd'),cluster.client(node_without('{d}:meta'))
    call(cluster.url, 'delete', *key_layout('d', 12).values('txt', [17]))
    with pytest.raises(MissingSample, match='17'): store.get_many([3,17], 'txt', check=True)
    assert store.get_many([3], 'txt', check=True)['txt']==[b'text 3']
    node.config_set('maxmemory-policy', 'allkeys-random')
    try:
        node.flushall()
        with pytest.raises(MissingSample, match='maxmemory-policy allkeys-random'): store.get_many(range(N), 'txt')
    finally: node.config_set('maxmemory-policy', 'noeviction')

@several_servers
def test_shards_before_a_cluster(cluster, tmp_path):
    "A `TieredStore` keeps values in a cluster"
    to_shards([sample(i) for i in range(N)], tmp_path/'d', shuffle=False, **one)
    store = TieredStore(cluster.url, ShardStore(tmp_path/'d'))
    assert is_right(store)
    def is_kept():   # a cluster that takes longer than a quarter of a second to answer is left alone for a while
        assert store.flush() and is_right(store)
        return store.hits['from_redis']>=N-64
    wait_for(is_kept)
    assert store.held()>.9
    store.clear()
    assert all_keys(cluster, ())==set()

# --- one writer

def begun(cluster, field, codec):
    "A writer that has begun to write `d`"
    writer,fields = RedisWriter(RedisLink(cluster.url), 'd'),{field:{'codec':codec, 'dtype':None}}
    writer.begin(dict(n=N, chunk=16, fields=fields, splits={}, vocab={}, signature='s', stats=None))
    return writer

@several_servers
def test_a_holder_of_the_lock_that_slept_changes_nothing(cluster):
    "It may write values, which are those of the same plan; it records nothing, and does not publish"
    first = begun(cluster, 'x', 'bin')
    with pytest.raises(StoreBusy, match='is writing'): write(cluster.url)
    first.place.stop.set()
    def put(writer, chunk):
        numbers = np.arange(16*chunk, min(N, 16*chunk+16))
        writer.put(numbers, {'x':[b'%d' % i for i in numbers]})
        return len(numbers)
    put(first, 0)
    call(cluster.url, 'delete', first.place.keys.lock)   # its lease has ended
    second = begun(cluster, 'x', 'bin')
    for chunk in range(-(-N//16)): second.done(chunk, dict(ok=put(second, chunk), failed=0, bytes=1, gaps=[]))
    put(first, 1)
    for late in (lambda: first.done(2, dict(ok=0, failed=16, bytes=0, gaps=list(range(32, 48)))), first.commit):
        with pytest.raises(StoreBusy): late()
    second.commit()
    put(first, 2)
    with pytest.raises(StoreBusy): first.done(2, dict(ok=0, failed=16, bytes=0, gaps=list(range(32, 48))))
    second.close()
    assert RedisStore(cluster.url, 'd').get_many(range(N), 'x')['x']==[b'%d' % i for i in range(N)]
    RedisStore.delete(cluster.url, 'd')
    assert all_keys(cluster)==set()

# --- nodes that lose what they had, are full, or away

@several_servers
def test_chunks_that_a_node_lost_are_written_again(cluster):
    "The records of the chunks are on another node, which lost nothing. Without failures, the table of faults has it"
    acts.append(cluster.client(node_without('{d}:ingest')).flushall)
    report = write(cluster.url, fn=without_some)
    store = RedisStore(cluster.url, 'd')
    assert is_right(store, GOOD) and not store.verify(num_workers=1).bad
    assert len(list(store.failures()))==report.failed==N-len(GOOD)

@several_servers
def test_each_kind_of_value_that_is_lost_before_the_commit_is_written_again(cluster):
    clients = [cluster.client(k) for k in range(3)]
    for field in ('txt','txt.crc','id.i4','cls~'):
        def lose():
            found = [(client,key) for client in clients for key in client.scan_iter(f'*:{field}[:#]*')]
            assert found
            for client,key in found: client.delete(key)
        acts.append(lose)
        write(cluster.url, overwrite=True)
        assert is_right(RedisStore(cluster.url, 'd')) and not acts, field

@several_servers
def test_values_that_are_lost_during_a_commit_are_written_again(cluster, monkeypatch):
    def interrupt(*args): raise KeyboardInterrupt
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(RedisWriter, 'publish', interrupt)
        write(cluster.url, fn=without_some)
    cluster.client(node_without('{d}:ingest')).flushall()
    write(cluster.url, fn=without_some)
    store = RedisStore(cluster.url, 'd')
    assert is_right(store, GOOD) and not store.verify(num_workers=1).bad

def test_a_server_that_drops_keys_during_an_ingest_is_noticed(server):
    "Its policy was changed after the ingest began; the lock and the records happen to stay"
    client = redis.Redis.from_url(server.url)
    def evict():
        kept = {key:client.dump(key) for key in client.keys() if b':txt:' not in key}
        client.config_set('maxmemory-policy', 'allkeys-random')
        client.config_set('maxmemory', client.info('memory')['used_memory']-30_000)
        with suppress(redis.RedisError): client.set('other', bytes(2000))
        client.config_set('maxmemory', 0)
        client.config_set('maxmemory-policy', 'noeviction')
        for key,value in kept.items(): client.restore(key, 0, value, replace=True)
        assert client.info('stats')['evicted_keys']>5
    acts.append(evict)
    samples = [{**sample(i), 'txt':f'text {i}'*50} for i in range(N)]
    to_redis(samples, server.url, 'd', at_150, chunk=16, shuffle=False, overwrite=True, **one)
    read = RedisStore(server.url, 'd').get_many(range(N), 'txt', check=True, decode=True)
    assert read['txt']==[o['txt'] for o in samples]

@several_servers
def test_a_node_that_is_full_is_named_with_its_memory(cluster):
    write(cluster.url)
    node,link = cluster.client(node_without('{d}:meta')),RedisLink(cluster.url)
    node.config_set('maxmemory', 3_000_000)
    try:
        with pytest.raises(StoreFull, match=r'of maxmemory 2\.86M used'):
            for i in range(1000): link.send([('SET', f'x{i}', bytes(9000))])
    finally: node.config_set('maxmemory', 0)

@several_servers
def test_replicas_are_read_from_and_a_part_without_master_is_an_error():
    "That replicas take over during an epoch is in the table of faults"
    with LocalCluster(3, 3) as cluster:
        write(cluster.url)
        clients = [cluster.client(k) for k in range(6)]
        for client in clients[:3]: wait_for(lambda: client.wait(1, 1000))
        from_replicas = RedisStore(cluster.url, 'd', read_from='replica')
        def reads(): return [client.info('commandstats').get('cmdstat_mget', {}).get('calls', 0) for client in clients]
        def only_replicas_are_asked():   # but for some seconds after one of them was too busy to answer
            before = reads()
            assert is_right(from_replicas)
            return all((a==b) if k<3 else a>b for k,(a,b) in enumerate(zip(reads(), before)))
        wait_for(only_replicas_are_asked)
        cluster.servers[3].kill()
        assert is_right(from_replicas)   # a replica that is away does not matter
        cluster.servers[1].kill()
        ports = [server.port for server in cluster.servers]
        # the node in a URL need not be there
        url = f'redis://:secret%20word@127.0.0.1:{ports[1]},127.0.0.1:{ports[2]}'
        assert is_right(RedisStore(url, 'd', timeout=300))
        cluster.servers[4].kill()
        store = RedisStore(cluster.urls, 'd', timeout=300)
        store.link.timeout = 2
        with pytest.raises(StoreUnavailable): is_right(store)

# --- keys that somebody has moved from a cluster to a single server, or the other way round

@pytest.fixture(scope='module')
def dumps(running_cluster, server):
    "The keys of a dataset on a single server, and of one in a cluster, as `DUMP` gives them"
    client,clients = redis.Redis.from_url(server.url),[running_cluster.client(k) for k in range(3)]
    for one_of_them in (client, *clients): one_of_them.flushall()
    write(server.url)
    write(running_cluster.url)
    single = {key:client.dump(key) for key in client.keys('d:*')}
    several = {key:client.dump(key) for client in clients for key in client.keys('{d*')}
    return single,several

@pytest.fixture(params=[('in a cluster',True), ('on a server',True), ('on a server',False)])
def moved(request, dumps, cluster, server):
    "Moves a dataset to where it was not written; returns the URL there, and whether its name is in the list there"
    where,is_listed = request.param
    url = cluster.url if where=='in a cluster' else server.url
    redis.Redis.from_url(server.url).flushall()
    for key,stored in dumps[where=='on a server'].items(): call(url, 'restore', key, 0, stored)
    if is_listed: call(url, 'sadd', 'fastai_remote:names', 'd')
    return url,is_listed

def keys_at(url):
    link = RedisLink(url)
    masters = link.call(lambda _: link.servers.masters())
    return {key for master in masters for key in master.keys() if not key.startswith(b'fastai_remote:')}

@several_servers
def test_moved_datasets_are_read_copied_and_deleted_but_not_changed(moved):
    "Where the keys that describe it are not those that a writer uses there"
    url,is_listed = moved
    store,before = RedisStore(url, 'd'),keys_at(url)
    write(url, 'e', 9)
    other,more = RedisStore(url, 'e'),[sample(i) for i in range(9)]
    acts = [lambda: store.append(more, **one), lambda: store.edit(drop=[3]), lambda: store.edit(set={'txt':{3:'x'}}),
            lambda: store.rename('f')]
    # without its name in the list, nobody looks for the keys of a cluster on a single server
    if is_listed: acts += [lambda: write(url), lambda: write(url, overwrite=True), lambda: other.rename('d')]
    for act in acts:
        with pytest.raises(StoreError, match=r"'d' was (written|moved).*copy\(.*RedisStore\.delete"): act()
        assert is_right(RedisStore(url, 'd')) and is_right(RedisStore(url, 'e'), range(9))
    RedisStore.delete(url, 'e')
    assert keys_at(url)==before
    store.copy(url, 'g', **one)
    RedisStore.delete(url, 'd')
    assert RedisStore.names(url)==['g'] and is_right(RedisStore(url, 'g'))
    for missing in (RedisStore, RedisStore.delete):
        with pytest.raises(StoreNotFound): missing(url, 'd')
    RedisStore(url, 'g').rename('d')
    RedisStore.delete(url, 'd')
    assert keys_at(url)==set()
