"Redis before shards: what is there comes from Redis, what is not from the shards, and no fault of Redis changes a batch"
import io, math, os, pickle, signal, tarfile, threading, time, warnings
from contextlib import contextmanager
from multiprocessing import get_context

import numpy as np
import pytest
import redis
from fastcore.test import expect_fail

from conftest import N, class_of, in_time, wait_for
from fastai_remote.core import CorruptSample, MissingSample, StoreFull, StoreUnavailable
from fastai_remote.store.base import MemoryStore
from fastai_remote.store.redis import RedisStore
from fastai_remote.store.server import redis_server
from fastai_remote.store.shards import ShardStore
from fastai_remote.ingest.index import index_shards
from fastai_remote.ingest.shards import to_shards
from fastai_remote.source.files import image_samples
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.store import tiered

pytestmark = pytest.mark.filterwarnings('ignore:.*(come from the shards|Redis is full|Redis takes no samples)')
n,each = 400,50
one = dict(num_workers=1, progress=False, shuffle=False)
def text(i): return (f'number {i} '*(20+i%30)).encode()

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "Eight shards of fifty texts, labels and ids"
    d = str(tmp_path_factory.mktemp('shards')/'texts')
    to_shards([{'txt':text(i).decode(), 'json':{'i':i}, 'cls':'ab'[i%2], 'id':i} for i in range(n)], d, maxcount=each, **one)
    return d

@pytest.fixture(scope='module')
def pictures(tmp_path_factory, images):
    "The images in four shards"
    d = str(tmp_path_factory.mktemp('shards')/'pics')
    to_shards(image_samples(images, label=class_of), d, maxcount=15, num_workers=1, progress=False)
    return d

class Asked(ShardStore):
    "Shards that count the samples they are asked for, and note which shards are wanted ahead"
    def __init__(self, *a, **kw): self.asked,self.wanted = [],[]; super().__init__(*a, **kw)
    def read_values(self, idxs, fields):
        if any(self.manifest.fields[f]['dtype'] is None for f in fields): self.asked += [int(i) for i in idxs]
        return super().read_values(idxs, fields)
    def prefetch(self, shards, wait=False): self.wanted.append((shards, wait))

def TieredStore(*args, redis_timeout=3., **kwargs):
    "A store that waits long enough for a server that is there, however busy the machine is"
    return tiered.TieredStore(*args, redis_timeout=redis_timeout, **kwargs)

def client(server): return redis.Redis.from_url(server.url)
def again(store): store._redis.paused.clear()   # as if the pause were over
def right(store, idxs): return store.get_many(idxs, 'txt', check=True)['txt']==[text(i) for i in idxs]
def epoch(store, seed=0, bs=40):
    p = np.random.default_rng(seed).permutation(n).tolist()
    return all(right(store, p[k:k+bs]) for k in range(0, n, bs))

@contextmanager
def said():
    "A list of what our own warnings say"
    res = []
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        yield res
    res += [o.message for o in w if o.category is UserWarning]

def requests(link):
    "Have each request over `link` counted; returns the list they go to, and something to call at the end"
    conn = link.client.connection_pool.get_connection()
    cls,send,sent = type(conn),type(conn).send_packed_command,[]
    link.client.connection_pool.release(conn)
    cls.send_packed_command = lambda self, cmd, *a, **k: sent.append(b''.join(cmd) if isinstance(cmd, list) else cmd) or send(self, cmd, *a, **k)
    return sent,lambda: setattr(cls, 'send_packed_command', send)

# --- what is read from where

def test_first_from_the_shards_then_from_redis(fresh, folder):
    store = TieredStore(fresh.url, shards:=Asked(folder))
    assert epoch(store) and store.flush(120) and sorted(shards.asked)==list(range(n))
    shards.asked.clear()
    assert epoch(store, 1) and not shards.asked and store.hits=={'from_redis':n, 'from_shards':n} and store.held()==1.
    assert client(fresh).get(f'texts~{shards.manifest.uid[:8]}:txt:7')==text(7)

def test_labels_and_numbers_never_ask_redis(closed_url, folder):
    got = TieredStore(closed_url, ShardStore(folder)).get_many([3,8], ['cls','id','txt.crc'])
    assert got['id'].tolist()==[3,8] and got['cls'].tolist()==[1,0]

def test_one_request_a_batch(fresh, folder):
    "Whatever the fields, hit or miss"
    store = TieredStore(fresh.url, ShardStore(folder))
    store.get_many(range(100), store.fields)
    store.flush(120)
    sent,end = requests(store.link)
    try: store.get_many(range(90), store.fields, check=True); assert len(sent)==1 and b'MGET' in sent[0]
    finally: end()

def test_part_of_a_batch(fresh, folder):
    "Fields and samples that are there in part, repeats, empty lists"
    store = TieredStore(fresh.url, shards:=Asked(folder))
    store.get_many([1,2], 'txt'); store.flush(120); shards.asked.clear()
    got = store.get_many([3,2,1,3], ['json','txt'])
    assert got['txt']==[text(i) for i in (3,2,1,3)] and got['json']==[b'{"i":%d}'%i for i in (3,2,1,3)] and shards.asked==[3,2,1,3]
    assert store.get_many([], ['txt','id'])['txt']==[] and store.flush(120)
    assert store.held(n)==3/n

def test_damaged_in_redis(fresh, folder):
    "Right all the same, and put right"
    store,c = TieredStore(fresh.url, ShardStore(folder)),client(fresh)
    assert right(store, range(50)) and store.flush(120)
    for i,v in ((3,b''), (4,text(5)), (5,text(5)[:-1])): c.set(f'{store.prefix}:txt:{i}', v)
    c.delete(f'{store.prefix}:txt:6'); c.delete(f'{store.prefix}:txt:7'); c.lpush(f'{store.prefix}:txt:7', 'a list')
    assert store.get_many(range(3, 8), 'txt')['txt']==[text(i) for i in range(3, 8)]   # without check=True too
    assert store.flush(120) and [c.get(f'{store.prefix}:txt:{i}') for i in range(3, 8)]==[text(i) for i in range(3, 8)]

def test_damaged_in_the_shards(fresh):
    "Said as a store says it; damaged bytes do not get into Redis; what is missing is missing"
    below = MemoryStore({'txt':[text(i) for i in range(9)]}, 'd')
    store = TieredStore(fresh.url, below)
    below.columns['txt'][4],below.columns['txt'][5] = b'nonsense',None
    with expect_fail(CorruptSample, contains="d: sample 4, field 'txt'"): store.get_many([3,4], 'txt', check=True)
    assert store.get_many([4], 'txt', check=False)['txt']==[b'nonsense']
    with expect_fail(MissingSample, contains="d: 1 of 2 samples missing, first 5 (field 'txt')"): store.get_many([5,6], 'txt')
    assert store.flush(120) and sorted(k.split(b':')[-1] for k in client(fresh).keys())==[b'3',b'6']

def test_a_dataset_written_anew(fresh, tmp_path):
    "Never meets the old one's values"
    for word in ('old','new'):
        to_shards([{'txt':f'{word} {i}'} for i in range(20)], d:=str(tmp_path/'d'), overwrite=True, **one)
        store = TieredStore(fresh.url, ShardStore(d))
        for _ in range(2): assert store.get_many([7], 'txt')['txt']==[f'{word} 7'.encode()] and store.flush(120)
    assert client(fresh).dbsize()==2

# --- a Redis that forgets, is full, away, slow, or refuses

def test_eviction():
    "A Redis with room for half: the epochs are right, and a part comes from it"
    rng = np.random.default_rng(0)
    below = MemoryStore({'npy':[rng.bytes(20_000+int(k)) for k in rng.integers(0, 2000, n)]}, 'd')
    with redis_server(maxmemory_policy='allkeys-lru') as s:
        store,c = TieredStore(s.url, below),client(s)
        c.config_set('maxmemory', c.info('memory')['used_memory']+n*12_000)
        for k in range(6):
            p = np.random.default_rng(k).permutation(n)
            for b in np.split(p, 20): assert store.get_many(b, 'npy')['npy']==[below.columns['npy'][i] for i in b.tolist()]
            assert store.flush(120)
        assert c.info('stats')['evicted_keys']>0 and .1<store.held()<.9 and store.hits['from_redis']>0

def test_full(folder, fresh):
    "Under noeviction it keeps what it has, is said once, and left alone for a while; reads come from it"
    store,c = TieredStore(fresh.url, ShardStore(folder)),client(fresh)
    assert right(store, range(100)) and store.flush(120)
    c.config_set('maxmemory', c.info('memory')['used_memory']-100_000)
    with said() as w:
        for k in range(3):
            assert epoch(store, k) and store.flush(120)
            again(store)
    assert ['Redis is full' in str(o) for o in w]==[True] and store.hits['from_redis']>=300
    with expect_fail(StoreFull, contains='no room'): store.warm(num_workers=1)
    c.config_set('maxmemory', 0)
    assert store.warm(num_workers=1)==1.

@pytest.fixture
def closed_url(fresh):
    "Where nobody answers"
    fresh.kill()
    return fresh.url

def test_never_there(closed_url, folder):
    "Said once, and asked no more than now and then"
    store = tiered.TieredStore(closed_url, ShardStore(folder))
    with said() as w, in_time():
        for k in range(3): assert epoch(store, k)
    assert len(w)==1 and 'texts: samples come from the shards' in str(w[0]) and store.hits['from_redis']==0 and store.held() is None
    assert 'does not answer' in store._repr_html_()
    with expect_fail(StoreUnavailable): store.warm(num_workers=1)

def test_killed_and_back_in_mid_epoch(fresh, folder):
    store = TieredStore(fresh.url, ShardStore(folder), redis_timeout=1)
    assert epoch(store) and store.flush(120)
    p,had = np.random.default_rng(3).permutation(n).tolist(),[]
    for k in range(0, n, 20):
        if k==100: fresh.kill()
        if k==200: fresh.start(); again(store)
        before = store.hits['from_redis']
        assert right(store, p[k:k+20])
        had.append(store.hits['from_redis']-before)
    assert had==[20]*5+[0]*15 and store.flush(120) and client(fresh).dbsize()==200   # it came back empty
    assert right(store, p[200:]) and store.hits['from_redis']==100+200

def test_stopped(fresh, folder):
    "A server that takes the connection and says nothing costs one time-out, then nothing for a while; the queue stays in its bounds"
    store = tiered.TieredStore(fresh.url, ShardStore(folder), queue=10_000, socket_timeout=.2)
    assert right(store, range(10)) and store.flush(120)
    os.kill(fresh.proc.pid, signal.SIGSTOP)
    try:
        with in_time():
            store._redis.put([(f'k{i}', bytes(1000)) for i in range(100)])
            assert store._redis.size<=10_000
            for k in range(5): assert right(store, range(10*k, 10*k+40))
        assert store.flush(120) and not store._redis.todo
    finally: os.kill(fresh.proc.pid, signal.SIGCONT)
    again(store)
    assert right(store, range(100, 110)) and store.flush(120)

def test_queue_is_bounded(fresh, folder):
    "What does not fit is dropped, and comes again when it is next read"
    store = TieredStore(fresh.url, ShardStore(folder), queue=5_000)
    f,write,go = store._redis,store._redis._write,threading.Event()
    f._write = lambda part: go.wait(120) and write(part)
    try:
        assert epoch(store) and 0<f.size<=5_000
    finally: go.set()
    assert store.flush(120) and 0<store.held(n)<.2
    del f._write
    for k in range(60): epoch(store, k); store.flush(120)
    assert store.held(n)>.5

def test_password_and_refusal(folder):
    "A wrong password is an answer too; a right one is in no repr and no pickle, and goes along to our workers"
    with redis_server(port=-1, requirepass='s3same') as s:
        store = TieredStore(s.url, ShardStore(folder))
        assert right(store, range(9)) and store.flush(120) and store.held(n)==9/n
        for o in (pickle.dumps(store), repr(store), store._repr_html_(), repr(store.opener()), repr(store.link), repr(store.__getstate__())): assert 's3same' not in str(o)
        assert len(pickle.dumps(store))<1000 and store.warm(num_workers=2)==1.
        lost = pickle.loads(pickle.dumps(store))   # knows no password any more
        for o in (lost, TieredStore(s.url.replace('s3same', 'wrong'), ShardStore(folder))):
            with pytest.warns(UserWarning, match='come from the shards.*refused') as w: assert right(o, range(9))
            assert 's3same' not in str(w[0].message)

def test_read_only(folder):
    "One who may not write still reads"
    with redis_server(port=-1) as s:
        store = TieredStore(s.url, ShardStore(folder))
        store.warm(num_workers=1)
        client(s).execute_command('ACL', 'SETUSER', 'reader', 'on', '>pw', '~*', '+@read', '+@connection')
        client(s).delete(*[f'{store.prefix}:txt:{i}' for i in range(10)])
        other = TieredStore(f'redis://reader:pw@127.0.0.1:{s.port}', ShardStore(folder))
        assert right(other, range(100)) and other.flush(120) and right(other, range(100)) and other.hits=={'from_redis':180, 'from_shards':20}

# --- many processes

def _pass(store, q, seed): q.put((epoch(store, seed), store.flush(120), store.hits))

@pytest.mark.parametrize('method', ['fork','spawn','forkserver'])
def test_two_processes_share_one_cache(folder, method):
    "A store in use goes along to a child, password and all, and what one has read the next one finds"
    ctx = get_context(method)
    with redis_server(requirepass='s3same') as s:
        store = TieredStore(s.url, ShardStore(folder))
        right(store, range(5))
        for want in ('from_shards','from_redis'):
            (p:=ctx.Process(target=_pass, args=(store, q:=ctx.Queue(), 1))).start()
            ok,flushed,hits = q.get(timeout=300)
            p.join()
            assert ok and flushed and hits[want]>=n-5
        assert store.hits['from_redis']>=(n if method=='fork' else 0)   # forks count together

def _quick(store): right(store, range(100))

def test_a_process_that_ends_finishes_its_writes(fresh, folder):
    store = TieredStore(fresh.url, ShardStore(folder))
    (p:=get_context('fork').Process(target=_quick, args=(store,))).start()
    p.join()
    assert store.held(n)==100/n

def test_kill_9(fresh, folder):
    "Of a process that reads and writes: whole values in Redis, and others go on"
    store = TieredStore(fresh.url, ShardStore(folder))
    right(store, range(5)); store.flush(120)
    for seed in range(3):
        if (pid:=os.fork())==0:
            while True: epoch(store, seed); client(fresh).flushall()
        time.sleep(.1)
        os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)
        assert epoch(store, seed) and store.flush(120) and right(store, range(n))
    c = client(fresh)
    assert all(c.get(k)==text(int(k.split(b':')[-1])) for k in c.keys() if b':txt:' in k)

@pytest.mark.parametrize('num_workers', [0,2])
def test_a_learner(fresh, pictures, num_workers):
    "Trains, first from the shards, then from Redis; its export finds both"
    fv = pytest.importorskip('fastai.vision.all')
    from torch import nn
    import fastai_remote.block
    store = TieredStore(fresh.url, ShardStore(pictures))
    dls = fv.DataLoaders.from_store(store, item_tfms=fv.Resize(32), bs=8, num_workers=num_workers, device='cpu')
    with fv.Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(3*32*32, 3)), loss_func=fv.CrossEntropyLossFlat()).no_bar() as learn:
        learn.fit(1, 1e-4)
        wait_for(lambda: store.held(N)>.8)   # the last batches of an epoch are dropped where they are not full
        had = store.hits
        learn.fit(2, 1e-4)
    now = store.hits
    assert now['from_redis']-had['from_redis']>4*(now['from_shards']-had['from_shards'])
    assert len(learn.get_preds()[0])==len(dls.valid_ds) and len(pickle.dumps(dls.train_ds.items.store))<1000

# --- shards ahead

def test_ahead_skips_what_redis_holds(fresh, folder):
    store = TieredStore(fresh.url, shards:=Asked(folder))
    store.get_many(range(150), 'txt'); store.flush(120)   # shards 0, 1, 2, of one field
    store.prefetch([4,0,2,7], wait=True)
    assert shards.wanted==[([4,7],True)]
    sent,end = requests(store.link)
    try: store.prefetch([4,0,2,7], wait=True); assert not sent   # asked once
    finally: end()
    store.get_many(range(300, 320), 'txt')   # these were known to be missing: nothing new
    assert shards.wanted[-1]==([4,7],True)
    client(fresh).flushall()
    store.get_many(range(100, 130), 'txt')   # evicted meanwhile
    assert shards.wanted[-1]==([4,2,7],True)
    store.flush(120); store.warm(num_workers=1)
    store.prefetch([7,4,2,0], wait=False)   # another epoch
    assert shards.wanted[-1]==([],False)

def test_ahead_of_a_dead_server(closed_url, folder):
    store = tiered.TieredStore(closed_url, shards:=Asked(folder))
    store.prefetch([1,2])
    assert shards.wanted==[([1,2],False)]

def test_no_requests_in_the_second_epoch(fresh, tmp_path, images):
    "From S3: not a byte more once Redis has it all, shard by shard or sample by sample"
    pytest.importorskip('moto'); pytest.importorskip('s3fs')
    from fastai.vision.all import DataLoaders, Resize
    import fastai_remote.block
    from s3proxy import S3Proxy
    from s3servers import moto_server
    with moto_server() as s3, S3Proxy(s3.endpoint) as proxy:
        opts = {**s3.options, 'endpoint_url':proxy.endpoint}
        to_shards(image_samples(images, label=class_of), url:=f's3://{s3.bucket}/pics', maxcount=15, num_workers=1, progress=False, storage_options=opts)
        for cache in (str(tmp_path/'cache'), None):
            client(fresh).flushall()
            store = TieredStore(fresh.url, ShardStore(url, cache=cache, storage_options=opts))
            dls = DataLoaders.from_store(store, item_tfms=Resize(32), bs=8, num_workers=0, device='cpu')
            def run(): return sum(len(b[1]) for dl in (dls.train.new(drop_last=False), dls.valid) for b in dl)
            assert run()==N and store.flush(120)
            proxy.clear()
            assert run()==N and not proxy.requests, cache
            assert store.warm(num_workers=1)==1.

# --- a copy, and the rest

def test_a_copy_in_redis(fresh, folder):
    "Its own values are read, and put back where they were evicted; a later writing of it is not touched"
    shards = ShardStore(folder)
    from fastai_remote.ingest.run import to_redis
    to_redis(shards, fresh.url, 'copy', **one)
    store,c = TieredStore(RedisStore(fresh.url, 'copy'), shards),client(fresh)
    assert epoch(store) and store.hits=={'from_redis':n, 'from_shards':0}
    c.delete(*[f'copy:txt:{i}' for i in range(100)])
    assert epoch(store, 1) and store.flush(120) and RedisStore(fresh.url, 'copy').get_many(range(n), 'txt', check=True)['txt']==[text(i) for i in range(n)]
    with expect_fail(ValueError, contains='RedisStore.delete'): store.clear()
    to_redis([{'txt':f'other {i}', 'json':{}, 'cls':'ab'[i%2], 'id':i} for i in range(n)], fresh.url, 'copy', overwrite=True, **one)
    with pytest.warns(UserWarning, match='copy: replaced, deleted or lost'): assert epoch(store) and store.flush(120)
    assert RedisStore(fresh.url, 'copy').get_many([7], 'txt')['txt']==[b'other 7']
    with expect_fail(ValueError, contains='is no copy of texts: '): TieredStore(RedisStore(fresh.url, 'copy'), shards)
    to_redis([{'txt':'a'}], fresh.url, 'short', **one)
    with expect_fail(ValueError, regex='short in .* is no copy of texts: 1 samples, not 400'): TieredStore(RedisStore(fresh.url, 'short'), shards)

def test_a_copy_with_only_labels_and_numbers(fresh, tmp_path):
    "Redis keeps none of its values, so there are none to compare"
    from fastai_remote.ingest.run import to_redis
    to_shards([{'cls':'ab'[i%2], 'id':i} for i in range(20)], tmp_path/'d', **one)
    shards = ShardStore(tmp_path/'d')
    to_redis(shards, fresh.url, 'd', **one)
    for address in RedisStore(fresh.url, 'd'), fresh.url:
        store = TieredStore(address, shards)
        assert store.get_many(range(20), 'id')['id'].tolist()==list(range(20)) and store[3]=={'cls':'b', 'id':3}
        assert store.held()==0 and store.warm(num_workers=1)==0 and list(store.check_rest())==[]
    to_redis([{'cls':'a', 'id':1}], fresh.url, 'short', **one)
    with expect_fail(ValueError, contains='1 samples, not 20'): TieredStore(RedisStore(fresh.url, 'short'), shards)

def test_a_copy_that_has_lost_its_values_is_named_as_such(fresh, folder):
    "Whether they were those of the shards cannot be told any more"
    from fastai_remote.ingest.run import to_redis
    shards = ShardStore(folder)
    to_redis(shards, fresh.url, 'copy', **one)
    c = client(fresh)
    c.delete(*[key for key in c.scan_iter('copy:*', count=1000) if key.split(b':')[1] in (b'txt',b'json')])
    with pytest.raises(ValueError, match='copy in .* holds none of the .* that were looked at.*copy it again'):
        TieredStore(RedisStore(fresh.url, 'copy'), shards)

def test_ttl_and_clear(fresh, folder):
    store,c = TieredStore(fresh.url, ShardStore(folder), ttl=100),client(fresh)
    store.warm(num_workers=1)
    assert 0<c.ttl(c.randomkey())<=100 and c.dbsize()==2*n
    c.set('another', 1)
    store.clear()
    assert c.keys()==[b'another']

def test_warm_in_parallel(fresh, folder):
    store = TieredStore(fresh.url, ShardStore(folder))
    assert store.warm(num_workers=2, chunk=64)==1. and epoch(store) and store.hits=={'from_redis':n, 'from_shards':0}

def test_threads(fresh, folder):
    from concurrent.futures import ThreadPoolExecutor
    store = TieredStore(fresh.url, ShardStore(folder))
    with ThreadPoolExecutor(8) as ex: assert all(ex.map(lambda k: epoch(store, k), range(8)))
    assert store.flush(120) and store.held()==1. and sum(store.hits.values())==8*n

def test_a_thread_that_ends_is_started_again(fresh, folder):
    store = TieredStore(fresh.url, ShardStore(folder))
    right(store, range(10)); store.flush(120)
    wait_for(lambda: store._redis.thread is None)
    assert right(store, range(20)) and store.flush(120) and store.held(n)==20/n

def test_samples_that_lack_fields_are_warmed(fresh, tmp_path):
    with tarfile.open(tmp_path/'a.tar', 'w') as tar:
        for i in range(10):
            info = tarfile.TarInfo(f'{i}.{"txt" if i%2 else "json"}')
            info.size = 2
            tar.addfile(info, io.BytesIO(b'{}'))
    index_shards(tmp_path, num_workers=0, progress=False)
    store = TieredStore(fresh.url, ShardStore(tmp_path))
    assert store.warm(0)==1. and len(client(fresh).keys(f'{store.prefix}:*'))==10

def test_a_write_may_take_longer_than_a_read(fresh, folder):
    "As on a slow network: a batch of values has the usual timeout of a link, and `warm` waits for it"
    store = TieredStore(fresh.url, ShardStore(folder), redis_timeout=.5)
    assert store.held()==0
    client(fresh).client_pause(900, all=False)   # writes only
    with said() as warned: assert store.warm(num_workers=0)==1.
    assert not warned

def test_samples_that_lack_a_field_are_no_sign_that_redis_lost_values(fresh, tmp_path):
    "Their shards are not fetched again; those whose values are lost are"
    with tarfile.open(tmp_path/'a.tar', 'w') as tar:
        for i in range(20):
            for field in ('json',) if i%2 else ('json','txt'):
                info = tarfile.TarInfo(f'{i:02}.{field}')
                info.size = 2
                tar.addfile(info, io.BytesIO(b'{}'))
    index_shards(tmp_path, num_workers=0, progress=False)
    store = TieredStore(fresh.url, shards:=Asked(tmp_path))
    assert store.warm(0)==1.
    store.prefetch([0])
    shards.wanted.clear()
    store.get_many(range(20), ['txt?'])
    assert not shards.wanted
    client(fresh).flushall()
    store.get_many(range(20), ['txt?'])
    assert shards.wanted==[([0],False)] and store.flush(120)

def test_a_thread_that_fails_while_another_succeeds(fresh, folder):
    "What is known about pauses goes at any moment"
    class Vanishing(dict):
        def __contains__(self, kind): return self.pop(kind, None) is not None
    state = TieredStore(fresh.url, ShardStore(folder))._redis
    pause = time.monotonic()+60,StoreUnavailable('away')
    state.paused = Vanishing(read=pause)
    assert state.is_paused('read') in (True,False)
    state.paused = {'read':pause}
    state.failed('read', StoreUnavailable('away'))
    assert state.failures=={'read':0}

def test_options_of_a_connection_that_is_there_are_refused(fresh, folder):
    copy = ShardStore(folder).copy(fresh.url, 'options', num_workers=0, progress=False) and RedisStore(fresh.url, 'options')
    with pytest.raises(TypeError, match='socket_timeout: a RedisLink has its own'): TieredStore(copy, ShardStore(folder), socket_timeout=1)

@pytest.mark.parametrize('options,what', [
    (dict(timeout=3), 'timeout: .*redis_timeout='), (dict(ttl=0), 'ttl=0'), (dict(ttl=-1.), 'ttl=-1'),
    (dict(ttl=math.inf), 'ttl=inf'), (dict(ttl=math.nan), 'ttl=nan'), (dict(ttl='1'), "ttl='1'"),
    (dict(redis_timeout=math.nan), 'redis_timeout=nan'), (dict(redis_timeout=math.inf), 'redis_timeout=inf'),
    (dict(redis_timeout=-1), 'redis_timeout=-1'), (dict(socket_timeout=math.nan), 'socket_timeout=nan')])
def test_times_that_would_not_be_those_that_are_meant(closed_url, folder, options, what):
    with pytest.raises((TypeError,ValueError), match=what): TieredStore(closed_url, ShardStore(folder), **options)

@pytest.mark.parametrize('queue', [0, -1, math.nan, math.inf])
def test_a_queue_has_a_number_of_bytes(closed_url, folder, queue):
    "Without a limit it could take all memory, and with none it would keep nothing, and never say so"
    with pytest.raises(ValueError, match=f'queue={queue}'): TieredStore(closed_url, ShardStore(folder), queue=queue)
