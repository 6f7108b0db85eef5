"Datasets in a Redis Cluster: as on one server, spread evenly, and nothing is lost when a master fails or slots move"
import json, re, time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from redis import Redis, RedisCluster
from redis.crc import key_slot

from conftest import examples, in_time, wait_for
from clusters import LocalCluster
from fastai_remote import (MissingSample, RedisStore, ShardStore, StoreBusy, StoreError, StoreExists, StoreNotFound, StoreUnavailable, TieredStore, to_redis,
    to_shards)
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.store.redis_layout import key_layout
from fastai_remote.write.redis import RedisWriter
from fastai_remote.write.redis_state import IngestKeys

N = 400

def sample(i): return {'x.bin':np.random.default_rng(i).bytes(100+i%50), 'txt':f'sample {i}', 'id.i4':i, 'cls':'abc'[i%3]}
def samples(n=N): return [sample(i) for i in range(n)]
def put(url, name='d', src=None, **kw): return to_redis(samples() if src is None else src, url, name, **{'num_workers':1, 'progress':False, 'shuffle':False, **kw})
def contents(store):
    got = store.get_many(np.arange(len(store)), ['x.bin','txt','id.i4','cls'], check=True)
    return [(bytes(x),t,int(i),int(c)) for x,t,i,c in zip(*got.values())]
def keys_of(c): return [set(c.client(k).keys()) for k in range(c.n_masters)]
def leftover(c, name='d'): return {k.decode() for keys in keys_of(c) for k in keys if k not in (b'fastai_remote:locks',b'fastai_remote:generations')}

@pytest.fixture(scope='module')
def single():
    from fastai_remote.store.server import redis_server
    with redis_server() as s:
        put(s.url)
        yield RedisStore(s.url, 'd')

@pytest.mark.parametrize('num_workers', [1,3])
@pytest.mark.parametrize('which', ['url','urls'])
def test_a_dataset_is_as_on_one_server(cluster, single, which, num_workers):
    url = getattr(cluster, which)
    put(url, num_workers=num_workers)
    store = RedisStore(url, 'd')
    assert contents(store)==contents(single) and store.splits==single.splits and store.vocab==single.vocab
    assert store.manifest.format==3 and store.manifest.tags==12 and single.manifest.format==2
    assert store.verify(num_workers=1).bad==0 and RedisStore.names(url)==['d'] and RedisStore.unfinished(url)==[]
    assert store[7]['txt']==single[7]['txt'] and cluster.password not in repr(store)
    order = np.random.default_rng(0).integers(0, N, 64)
    for f in ('x.bin','id.i4'): assert list(store.get_many(order, f)[f])==list(single.get_many(order, f)[f])

def test_keys_are_spread_evenly(cluster):
    put(cluster.url, src=[{'x.bin':bytes([i%251])} for i in range(3000)])
    counts = [sum(b':x.bin:' in key for key in keys) for keys in keys_of(cluster)]
    assert sum(counts)==3000 and max(counts)-min(counts)<=12

@pytest.mark.parametrize('tags', [6,12,16,60])
@pytest.mark.parametrize('prefix', ['d','drawings of 2016/a.b@7','ö'])
def test_tags_are_spread_evenly_over_the_slots(tags, prefix):
    layout = key_layout(prefix, tags)
    slots = sorted(key_slot(start.encode()) for start in layout.starts)
    assert [slot*tags//16384 for slot in slots]==list(range(tags)) and len(set(layout.starts))==tags
    assert layout.values('x', [5])==[f'{layout.starts[5%tags]}:x:5']

def test_samples_that_fail_leave_no_gap(cluster):
    "Samples move to other numbers, so their values move to other nodes"
    def fn(s):
        if s['id.i4']%7==3: raise ValueError('no')
        return s
    rep = put(cluster.url, fn=fn, num_workers=2, max_failed=1000, splits={'train':.75, 'valid':.25}, shuffle=True)
    store = RedisStore(cluster.url, 'd')
    want = [i for i in range(N) if i%7!=3]
    ids = store.get_many(np.arange(len(store)), 'id.i4')['id.i4'].tolist()
    assert rep.failed==N-len(want) and sorted(ids)==want and store.verify(num_workers=1).bad==0
    assert all(store[k]['txt']==f'sample {i}' for k,i in enumerate(ids)) and len(list(store.failures()))==rep.failed

def test_overwrite_rename_copy_map_and_delete(cluster):
    put(cluster.url)
    with pytest.raises(StoreExists): put(cluster.url)
    put(cluster.url, src=[sample(i) for i in range(50)], overwrite=True)
    store = RedisStore(cluster.url, 'd')
    assert len(store)==50 and store.manifest.prefix=='d@2'
    other = store.rename('e')
    assert RedisStore.names(cluster.url)==['e'] and len(contents(other))==50
    with pytest.raises(StoreNotFound): RedisStore(cluster.url, 'd')
    other.copy(cluster.url, 'f', num_workers=1, progress=False)
    assert contents(RedisStore(cluster.url, 'f'))==contents(other)
    other.map(lambda s: {'txt':s['txt'].upper()}, cluster.url, 'g', num_workers=1, progress=False)
    assert RedisStore(cluster.url, 'g')[3]['txt']=='SAMPLE 3'
    put(cluster.url, src=[sample(i) for i in range(9)])   # the old name again: the keys of 'e' stay
    assert len(contents(RedisStore(cluster.url, 'e')))==50 and RedisStore(cluster.url, 'e').verify(num_workers=1).bad==0
    for name in 'defg': RedisStore.delete(cluster.url, name)
    assert RedisStore.names(cluster.url)==[] and leftover(cluster)==set()

def test_an_ingest_that_was_interrupted_is_finished_or_abandoned(cluster):
    calls = []
    def dies(s):
        calls.append(1)
        if len(calls)>150: raise KeyboardInterrupt
        return s
    with pytest.raises(KeyboardInterrupt): put(cluster.url, fn=dies)
    unfinished, = RedisStore.unfinished(cluster.url)
    assert unfinished['name']=='d' and 0<unfinished['chunks']<unfinished['of'] and not unfinished['running'] and RedisStore.names(cluster.url)==[]
    link = RedisLink(cluster.url)
    link.call(lambda c: c.set(IngestKeys('d', 1).plan, link.call(lambda c: c.get(IngestKeys('d', 1).plan)).replace(b'"n":', b'"m":')))
    assert [(o['name'],o['of'],o['began']) for o in RedisStore.unfinished(cluster.url)]==[('d',0,'')]
    link.call(lambda c: c.set(IngestKeys('d', 1).plan, link.call(lambda c: c.get(IngestKeys('d', 1).plan)).replace(b'"m":', b'"n":')))
    RedisStore.abandon(cluster.url, 'd')
    assert leftover(cluster)==set() and RedisStore.unfinished(cluster.url)==[]
    put(cluster.url)
    assert len(contents(RedisStore(cluster.url, 'd')))==N and RedisStore(cluster.url, 'd').manifest.prefix=='d@2'   # no key is used again

def test_a_holder_of_the_lock_that_slept_cannot_write(cluster):
    "Its copies of the lock, in the slots of values, are replaced by those of the next holder, and never the other way round"
    first,second = (RedisWriter(RedisLink(cluster.url), 'd') for _ in range(2))
    plan = dict(n=100, chunk=100, fields={'x':{'codec':'bin', 'dtype':None}}, splits={}, vocab={}, signature='s', stats=None)
    first.begin(plan)
    first.lock.stop.set()
    first.put(np.arange(4), {'x':[b'1']*4})
    first.link.call(lambda c: c.delete(first.keys.lock))   # its lease has ended
    second.begin(plan)
    second.put(np.arange(4), {'x':[b'2']*4})
    with pytest.raises(StoreBusy): first.put(np.arange(100), {'x':[b'1']*100})
    first.lock.fences.clear()
    with pytest.raises(StoreBusy): first.lock.fence(first.layout.starts)
    assert second.link.send([('GET', key) for key in second.layout.values('x', range(5))])==[b'2']*4+[None]
    second.abandon()
    second.close()
    assert leftover(cluster)==set()

def test_missing_values_and_a_dataset_that_was_replaced_are_errors(cluster):
    put(cluster.url)
    store = RedisStore(cluster.url, 'd')
    key, = key_layout('d', 12).values('txt', [17])
    store.link.call(lambda c: c.delete(key))
    with pytest.raises(MissingSample, match='17'): store.get_many([3,17], 'txt', check=True)
    assert store.get_many([3], 'txt', check=True)['txt']==[b'sample 3']
    put(cluster.url, overwrite=True)
    with pytest.raises(StoreNotFound, match='replaced'): store.get_many([3], 'txt')

@pytest.mark.parametrize('finish', [True,False])
def test_slots_that_move_while_the_dataset_is_read(finish):
    "MOVED and ASK: the reader that is open goes on"
    with LocalCluster(2) as c:
        put(c.url)
        store = RedisStore(c.urls, 'd')
        want = contents(store)
        for k,start in enumerate(store.parts[0].layout.starts[:6]):
            slot = key_slot(start.encode())
            source = 0 if slot<8192 else 1
            moved = c.move_slot(slot, source, 1-source, finish, keys=None if finish or k%2 else 10)
            assert moved>5 and contents(store)==want
        assert contents(RedisStore(c.url, 'd'))==want

def test_an_epoch_goes_on_after_a_failover():
    with LocalCluster(3, 3) as c:
        put(c.url)
        for k in range(3): c.client(k).wait(1, 5000)
        store = RedisStore(c.urls, 'd', timeout=60)
        want = contents(store)
        c.servers[1].kill()
        got = []
        for a in range(0, N, 50): got += store.get_many(np.arange(a, a+50), ['txt'], check=True)['txt']
        assert [t.encode() if isinstance(t, str) else t for _,t,_,_ in want]==got
        assert contents(RedisStore(c.urls, 'd', timeout=60))==want
        # the node in a URL need not be there
        assert len(RedisStore(f'redis://:secret%20word@127.0.0.1:{c.servers[1].port},127.0.0.1:{c.servers[2].port}', 'd', timeout=30))==N

def test_a_master_that_is_away_is_an_error_in_time():
    with LocalCluster(3) as c:
        put(c.url)
        store = RedisStore(c.url, 'd', timeout=2)
        store.get_many(np.arange(64), 'txt')
        c.servers[2].kill()
        with in_time(10), pytest.raises(StoreUnavailable): store.get_many(np.arange(64), 'txt')

def test_a_wrong_password_is_refused_at_once(cluster):
    url = cluster.urls.replace('secret%20word', 'other')
    with pytest.raises(StoreUnavailable, match='refused') as e: RedisStore(url, 'd')
    assert 'other' not in str(e.value)

def test_a_reader_with_the_rights_of_the_guide(cluster):
    "And nothing is tried that is not allowed"
    guide = (Path(__file__).parents[1]/'nbs/guide/credentials.md').read_text(encoding='utf-8')
    rights = re.search(r'^ACL SETUSER cluster_reader on >PASSWORD (.*)$', guide, re.M)[1].replace('pets', 'd').split()
    put(cluster.url)
    put(cluster.url, overwrite=True)   # keys of a later generation
    for k in range(3):
        cluster.client(k).acl_log_reset()
        cluster.client(k).execute_command('ACL', 'SETUSER', 'reader', 'reset', 'on', '>pw', *rights)
    store = RedisStore(cluster.urls.replace(':secret%20word@', 'reader:pw@'), 'd', timeout=5)
    assert len(contents(store))==N and [cluster.client(k).acl_log() for k in range(3)]==[[]]*3
    with pytest.raises(StoreUnavailable, match='refused'): store.link.send([('SET', '{d}:meta', b'')])
    for k in range(3): cluster.client(k).execute_command('ACL', 'DELUSER', 'reader')

def test_an_ingest_from_two_processes_has_one_writer(cluster):
    one = RedisWriter(RedisLink(cluster.url), 'd')
    one.take_lock()
    with pytest.raises(StoreBusy, match='is writing'): put(cluster.url)
    one.close()
    put(cluster.url)

def test_shards_before_a_cluster(cluster, tmp_path):
    "A `TieredStore` keeps values in a cluster"
    to_shards(samples(), tmp_path/'d', num_workers=1, progress=False, shuffle=False)
    store = TieredStore(cluster.url, ShardStore(tmp_path/'d'))
    want = [t.encode() for t in (f'sample {i}' for i in range(N))]
    order = np.arange(N)
    assert store.get_many(order, 'txt')['txt']==want
    def is_kept():   # a cluster that takes longer than a quarter of a second to answer is left alone for a while
        assert store.flush() and store.get_many(order, 'txt')['txt']==want
        return store.hits['from_redis']>=N-64
    wait_for(is_kept)
    assert store.held()>.9
    store.clear()
    assert not [k for keys in keys_of(cluster) for k in keys]

def test_training_reads_from_a_cluster(cluster):
    "Loaders with workers see each sample once"
    from fastai_remote import RemoteDataset
    import torch
    put(cluster.url)
    dl = torch.utils.data.DataLoader(RemoteDataset(RedisStore(cluster.url, 'd')).to_tuple('id.i4'), batch_size=32, num_workers=2)
    assert sorted(int(i) for b in dl for i in b[0])==list(range(N))

def test_a_dataset_of_a_single_server_is_read_from_a_cluster_and_the_other_way_round(cluster, single, fresh):
    "If somebody has moved its keys"
    for url in moved_to(cluster, single, fresh): assert contents(RedisStore(url, 'd'))==contents(single)

def moved_to(cluster, single, fresh, is_listed=True):
    "The URLs of `cluster` with the keys of `single`, and of `fresh` with those of a cluster; each is yielded when it has them"
    to,one = RedisCluster.from_url(cluster.url),single.link.client
    for key in one.scan_iter('d:*'): to.restore(key, 0, one.dump(key))
    to.sadd('fastai_remote:names', 'd')
    yield cluster.url
    for k in range(3): cluster.client(k).flushall()
    put(cluster.url)
    two = Redis.from_url(fresh.url)
    for k in range(3):
        for key in cluster.client(k).scan_iter('{d*'): two.restore(key, 0, cluster.client(k).dump(key))
    if is_listed: two.sadd('fastai_remote:names', 'd')
    yield fresh.url

def all_keys(url):
    link = RedisLink(url)
    return {k for master in link.call(lambda _: link.servers.masters()) for k in master.keys() if not k.startswith(b'fastai_remote:')}

@pytest.mark.parametrize('is_listed', [True,False])
def test_moved_datasets_are_not_changed_and_can_be_copied_and_deleted(cluster, single, fresh, is_listed):
    "Where the keys that describe it are not those that a writer uses there"
    for url in moved_to(cluster, single, fresh, is_listed):
        store,before = RedisStore(url, 'd'),all_keys(url)
        put(url, 'e', samples(9))
        other = RedisStore(url, 'e')
        acts = [lambda: store.append(samples(9), num_workers=1, progress=False), lambda: store.edit(drop=[3]),
                lambda: store.edit(set={'txt':{3:'x'}}), lambda: store.rename('f')]
        # without its name in the list, nobody looks for the keys of a cluster on a single server
        if is_listed: acts += [lambda: put(url), lambda: put(url, overwrite=True), lambda: other.rename('d')]
        for act in acts:
            with pytest.raises(StoreError, match=r"'d' was (written|moved).*copy\(.*RedisStore\.delete"): act()
            assert contents(RedisStore(url, 'd'))==contents(single) and len(contents(RedisStore(url, 'e')))==9
        RedisStore.delete(url, 'e')
        assert all_keys(url)==before
        store.copy(url, 'g', num_workers=1, progress=False)
        RedisStore.delete(url, 'd')
        assert RedisStore.names(url)==['g'] and contents(RedisStore(url, 'g'))==contents(single)
        with pytest.raises(StoreNotFound): RedisStore(url, 'd')
        with pytest.raises(StoreNotFound): RedisStore.delete(url, 'd')
        RedisStore(url, 'g').rename('d')
        RedisStore.delete(url, 'd')
        assert all_keys(url)==set()

def test_a_moved_dataset_whose_manifest_is_damaged_or_newer(cluster, single, fresh):
    for url in moved_to(cluster, single, fresh):
        link,key = RedisLink(url),RedisStore(url, 'd').manifest_key
        stored = link.call(lambda c: c.get(key))
        link.call(lambda c: c.set(key, json.dumps({**json.loads(stored), 'format':9, 'crc':None})))
        for act in (lambda: RedisStore.delete(url, 'd'), lambda: put(url, overwrite=True)):
            with pytest.raises(StoreError, match='upgrade fastai_remote|was (written|moved)'): act()
            assert link.call(lambda c: c.exists(key))
        link.call(lambda c: c.set(key, stored[:-9]))
        with pytest.raises(StoreError): put(url, overwrite=True)
        with pytest.warns(UserWarning, match='is damaged'): RedisStore.delete(url, 'd')
        assert not link.call(lambda c: c.exists(key)) and RedisStore.names(url)==[]

@examples(60)
@given(st.lists(st.text('{}a:1', max_size=6), min_size=1, max_size=40))
def test_a_command_has_keys_of_one_slot(keys):
    "By the rule of Redis: the text in the first braces decides, unless it is empty"
    link = RedisLink('redis://127.0.0.1:1,127.0.0.1:2')
    commands,places = link.value_reads(keys, 10)
    assert sorted(k for place in places for k in place)==list(range(len(keys)))
    for (name,*parts),place in zip(commands, places):
        assert name=='MGET' and parts==[keys[k] for k in place] and len({key_slot(key.encode()) for key in parts})==1
