"""Redis before shards: what is there comes from Redis, what is not from the shards, and no fault of Redis changes a
batch"""
import io, math, os, pickle, signal, tarfile, warnings
from contextlib import contextmanager
from multiprocessing import get_context

import numpy as np
import pytest

from conftest import class_of
from conftest import N as N_IMAGES
from fastai_remote.core import CorruptSample, MissingSample, StoreFull, StoreUnavailable
from fastai_remote.ingest import stores
from fastai_remote.ingest.index import index_shards
from fastai_remote.ingest.redis import to_redis
from fastai_remote.ingest.shards import to_shards
from fastai_remote.ingest.stores import MemoryStore, RedisStore, ShardStore
from fastai_remote.source.files import image_samples
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.store.server import redis_server
from snapshots import client

pytestmark = pytest.mark.filterwarnings('ignore:.*(come from the shards|Redis is full|Redis takes no samples)')
n,each = 160,20
one = dict(num_workers=1, progress=False, shuffle=False)
def text(i): return (f'number {i} '*(20+i%30)).encode()
def samples(word='number'):
    return [{'txt':text(i).decode().replace('number', word), 'json':{'i':i}, 'cls':'ab'[i%2], 'id':i} for i in range(n)]

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "Eight shards of texts, labels and ids"
    to_shards(samples(), d := tmp_path_factory.mktemp('shards')/'texts', maxcount=each, **one)
    return d

class Asked(ShardStore):
    "Shards that count the samples they are asked for, and note which shards are wanted ahead"
    def __init__(self, *args, **kwargs):
        self.asked,self.wanted = [],[]
        super().__init__(*args, **kwargs)
    def read_values(self, numbers, fields):
        if any(self.manifest.fields[field]['dtype'] is None for field in fields):
            self.asked += [int(i) for i in numbers]
        return super().read_values(numbers, fields)
    def prefetch(self, shards, wait=False): self.wanted.append((shards, wait))

def TieredStore(*args, redis_timeout=3., **kwargs):
    "A store that waits long enough for a server that is there, however busy the machine is"
    return stores.TieredStore(*args, redis_timeout=redis_timeout, **kwargs)

@pytest.fixture
def store(fresh, folder): return TieredStore(fresh.url, Asked(folder))

@pytest.fixture
def sent(monkeypatch):
    "A list that has an entry for each request to Redis"
    requests,send = [],RedisLink.send
    def noted(link, commands, **kwargs):
        requests.append(commands)
        return send(link, commands, **kwargs)
    monkeypatch.setattr(RedisLink, 'send', noted)
    return requests

def after_the_pause(clock): clock.advance(61)   # Redis is left alone for up to a minute

@pytest.fixture
def closed_url(fresh):
    "Where nobody answers"
    fresh.kill()
    return fresh.url

def is_right(store, numbers=range(n)):
    return store.get_many(numbers, 'txt', check=True)['txt']==[text(i) for i in numbers]
def is_flushed(store): return store.flush(120)
def is_kept(store, numbers=range(n)):
    "Are these samples right, and written to Redis then?"
    return is_right(store, numbers) and is_flushed(store)
def epoch(store, seed=0, bs=20):
    order = np.random.default_rng(seed).permutation(n).tolist()
    return all(is_right(store, order[k:k+bs]) for k in range(0, n, bs))

@contextmanager
def warned(store):
    "A list of what `store` warns about its server; the thread of an earlier test's store may still warn about its own"
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        yield said
    said += [str(o.message) for o in caught if o.category is UserWarning and store.link.url in str(o.message)]

# --- what is read from where

def test_values_come_first_from_the_shards_and_then_from_redis(fresh, store, sent):
    "One request for a batch, whatever the fields"
    assert epoch(store) and is_flushed(store) and sorted(store.store.asked)==list(range(n))
    store.store.asked.clear()
    assert epoch(store, 1) and not store.store.asked and store.held(n)==1.
    assert store.hits=={'from_redis':n, 'from_shards':n}
    assert client(fresh).get(f'{store.prefix}:txt:7')==text(7)
    store.get_many(range(100), store.fields)
    assert is_flushed(store)
    sent.clear()
    store.get_many(range(90), store.fields, check=True)
    assert len(sent)==1

def test_a_part_of_a_batch_may_be_in_redis(store):
    "Fields and samples that are there in part, repeats, empty lists"
    assert is_kept(store, [1,2])
    store.store.asked.clear()
    got = store.get_many([3,2,1,3], ['json','txt'])
    assert got['txt']==[text(i) for i in (3,2,1,3)] and got['json']==[b'{"i":%d}'%i for i in (3,2,1,3)]
    assert store.store.asked==[3,2,1,3] and store.get_many([], ['txt','id'])['txt']==[]
    assert is_flushed(store) and store.held(n)==3/n

def test_what_is_damaged_in_redis_is_right_all_the_same_and_put_right(fresh, store):
    c = client(fresh)
    assert is_kept(store, range(50))
    def key(i): return f'{store.prefix}:txt:{i}'
    for i,value in ((3,b''), (4,text(5)), (5,text(5)[:-1])): c.set(key(i), value)
    c.delete(key(6), key(7))
    c.lpush(key(7), 'a list')
    assert store.get_many(range(3, 8), 'txt')['txt']==[text(i) for i in range(3, 8)]   # without check=True too
    assert is_flushed(store) and [c.get(key(i)) for i in range(3, 8)]==[text(i) for i in range(3, 8)]
    c.set(key(3), b'nonsense')
    [(what,reason)] = store.check_rest()
    assert what==key(3) and 'in Redis: its 8 bytes do not match their checksum' in reason
    assert is_flushed(store) and c.get(key(3))==text(3)

def test_what_is_damaged_in_the_shards_is_named_and_does_not_get_into_redis(fresh):
    below = MemoryStore({'txt':[text(i) for i in range(9)]}, 'd')
    store = TieredStore(fresh.url, below)
    below.columns['txt'][4],below.columns['txt'][5] = b'nonsense',None
    with pytest.raises(CorruptSample, match="d: sample 4, field 'txt'"): store.get_many([3,4], 'txt', check=True)
    with pytest.raises(MissingSample, match='1 of 2 samples missing, first 5'): store.get_many([5,6], 'txt')
    assert is_flushed(store) and sorted(key.split(b':')[-1] for key in client(fresh).keys())==[b'3',b'6']

def test_a_dataset_written_anew_never_meets_the_values_of_the_old_one(fresh, tmp_path):
    for word in ('old','new'):
        to_shards([{'txt':f'{word} {i}'} for i in range(20)], tmp_path/'d', overwrite=True, **one)
        store = TieredStore(fresh.url, ShardStore(tmp_path/'d'))
        for _ in range(2): assert store.get_many([7], 'txt')['txt']==[f'{word} 7'.encode()] and is_flushed(store)
    assert client(fresh).dbsize()==2

# --- a Redis that forgets, is full, away, slow, or refuses

def test_a_redis_that_evicts_gives_what_it_has():
    rng = np.random.default_rng(0)
    below = MemoryStore({'npy':[rng.bytes(20_000+int(k)) for k in rng.integers(0, 2000, n)]}, 'd')
    with redis_server(maxmemory_policy='allkeys-lru') as s:
        store,c = TieredStore(s.url, below),client(s)
        c.config_set('maxmemory', c.info('memory')['used_memory']+n*12_000)
        for k in range(6):
            for batch in np.split(np.random.default_rng(k).permutation(n), 8):
                assert store.get_many(batch, 'npy')['npy']==[below.columns['npy'][i] for i in batch.tolist()]
            assert is_flushed(store)
        assert c.info('stats')['evicted_keys']>0 and .1<store.held()<.9 and store.hits['from_redis']>0

def test_a_full_redis_keeps_what_it_has(fresh, store, clock):
    "It is said once, and Redis is left alone for a while; reads come from it"
    c = client(fresh)
    assert is_kept(store, range(60))
    c.config_set('maxmemory', c.info('memory')['used_memory']-100_000)
    with warned(store) as said:
        for k in range(3):
            assert epoch(store, k) and is_flushed(store)
            after_the_pause(clock)
    assert ['Redis is full' in o for o in said]==[True] and store.hits['from_redis']>=180
    with pytest.raises(StoreFull, match='no room'): store.warm(num_workers=1)
    c.config_set('maxmemory', 0)
    after_the_pause(clock)
    assert store.warm(num_workers=1)==1.

def test_a_server_that_was_never_there_is_asked_no_more_than_now_and_then(closed_url, folder):
    "It is said once; labels and numbers never come from there, and shards are fetched ahead as without it"
    store = stores.TieredStore(closed_url, shards := Asked(folder))
    got = store.get_many([3,8], ['cls','id','txt.crc'])
    assert got['id'].tolist()==[3,8] and got['cls'].tolist()==[1,0]
    with warned(store) as said:
        for k in range(3): assert epoch(store, k)
    assert len(said)==1 and 'texts: samples come from the shards' in said[0]
    assert store.hits['from_redis']==0 and store.held() is None and 'does not answer' in store._repr_html_()
    with pytest.raises(StoreUnavailable): store.warm(num_workers=1)
    store.prefetch([1,2])
    assert shards.wanted==[([1,2],False)]

def test_a_server_that_is_killed_in_mid_epoch_is_used_again_when_it_is_back(fresh, folder, clock):
    store = TieredStore(fresh.url, ShardStore(folder), redis_timeout=20)
    assert epoch(store) and is_flushed(store)
    had = []
    for k in range(0, n, 20):
        if k==40: fresh.kill()
        if k==80:
            fresh.start()
            after_the_pause(clock)
        before = store.hits['from_redis']
        assert is_right(store, range(k, k+20))
        had.append(store.hits['from_redis']-before)
    assert had==[20]*2+[0]*6 and is_flushed(store) and client(fresh).dbsize()==80   # it came back empty
    assert is_right(store, range(80, n)) and store.hits['from_redis']==40+80

def test_a_server_that_says_nothing_costs_one_timeout(fresh, folder, clock):
    store = stores.TieredStore(fresh.url, ShardStore(folder), socket_timeout=.5)
    assert is_kept(store, range(10))
    os.kill(fresh.proc.pid, signal.SIGSTOP)
    try:
        with warned(store) as said:
            for k in range(5): assert is_right(store, range(10*k, 10*k+40))
        assert len(said)==1 and is_flushed(store)
    finally: os.kill(fresh.proc.pid, signal.SIGCONT)
    after_the_pause(clock)
    before = store.hits['from_redis']
    assert is_kept(store, range(10)) and store.hits['from_redis']==before+10

def test_what_does_not_fit_into_the_queue_comes_again_when_it_is_next_read(fresh, folder):
    store,c = TieredStore(fresh.url, ShardStore(folder), queue=5_000),client(fresh)
    assert store.held()==0
    c.client_pause(100_000, all=False)   # writes
    assert epoch(store)
    c.client_unpause()
    assert is_flushed(store) and 0<store.held(n)<.2
    for k in range(40): assert epoch(store, k) and is_flushed(store)
    assert store.held(n)>.5

def test_a_write_may_take_longer_than_a_read(fresh, folder):
    "As on a slow network: a batch of values has the usual timeout of a link, and `warm` waits for it"
    store = TieredStore(fresh.url, ShardStore(folder), redis_timeout=.5)
    assert store.held()==0
    client(fresh).client_pause(900, all=False)
    with warned(store) as said: assert store.warm(num_workers=0)==1.
    assert not said

def test_passwords_are_used_and_not_shown(folder):
    "A wrong password is an answer too; a right one is in no repr and no pickle, and goes along to our workers"
    with redis_server(port=-1, requirepass='s3same') as s:
        store = TieredStore(s.url, ShardStore(folder))
        assert is_kept(store, range(9)) and store.held(n)==9/n
        shown = [pickle.dumps(store), store._repr_html_(), *map(repr, (store, store.opener(), store.link))]
        assert 's3same' not in str([*shown, store.__getstate__()]) and len(shown[0])<1100
        assert store.warm(num_workers=2)==1.
        lost = pickle.loads(pickle.dumps(store))   # knows no password any more
        for other in (lost, TieredStore(s.url.replace('s3same', 'wrong'), ShardStore(folder))):
            with pytest.warns(UserWarning, match='come from the shards.*refused') as caught:
                assert is_right(other, range(9))
            assert 's3same' not in str(caught[0].message)

def test_who_may_not_write_still_reads(folder):
    with redis_server(port=-1) as s:
        store = TieredStore(s.url, ShardStore(folder))
        store.warm(num_workers=1)
        client(s).execute_command('ACL', 'SETUSER', 'reader', 'on', '>pw', '~*', '+@read', '+@connection')
        client(s).delete(*[f'{store.prefix}:txt:{i}' for i in range(10)])
        other = TieredStore(f'redis://reader:pw@127.0.0.1:{s.port}', ShardStore(folder))
        for _ in range(2): assert is_kept(other, range(100))
        assert other.hits=={'from_redis':180, 'from_shards':20}

# --- threads and processes

def _pass(store, queue): queue.put((epoch(store, 1), is_flushed(store), store.hits))

def test_two_processes_share_one_cache(store):
    "What one has read the next one finds, and their reads are counted together"
    context = get_context('fork')
    assert is_right(store, range(5))
    for want in ('from_shards','from_redis'):
        child = context.Process(target=_pass, args=(store, queue := context.Queue()))
        child.start()
        was_right,was_flushed,hits = queue.get()
        child.join()
        assert was_right and was_flushed and hits[want]>=n-5
    assert store.hits['from_redis']>=n

def test_values_that_come_while_the_process_ends_are_dropped(store):
    "No thread can be started any more; reading goes on"
    store._redis.executor.shutdown()
    assert epoch(store) and store.flush(0) and store.held(n)==0

def test_a_process_that_ends_finishes_its_writes(store):
    (p:=get_context('fork').Process(target=is_right, args=(store, range(100)))).start()
    p.join()
    assert store.held(n)==100/n

# --- shards ahead

def test_shards_that_redis_holds_are_not_fetched_ahead(fresh, store, sent):
    wanted = store.store.wanted
    assert is_kept(store, range(3*each))   # shards 0, 1, 2, of one field
    store.prefetch([4,0,2,7], wait=True)
    sent.clear()
    store.prefetch([4,0,2,7], wait=True)
    assert wanted==[([4,7],True)]*2 and not sent   # asked once
    assert is_right(store, range(6*each, 7*each))   # these were known to be missing: nothing new
    assert wanted[-1]==([4,7],True)
    client(fresh).flushall()
    assert is_right(store, range(2*each, 2*each+12))   # evicted meanwhile
    assert wanted[-1]==([4,2,7],True)
    assert is_flushed(store) and store.warm(num_workers=1)==1.
    store.prefetch([7,4,2,0], wait=False)   # another epoch
    assert wanted[-1]==([],False)

def test_once_redis_has_it_all_the_shards_are_asked_for_nothing(fresh, faults, images, tmp_path):
    "Shard by shard, or sample by sample"
    from fastai.vision.all import DataLoaders, Resize
    import fastai_remote.block
    to_shards(image_samples(images, label=class_of), 'faulty://pics', maxcount=15, num_workers=1, progress=False)
    for cache in (tmp_path/'cache', None):
        client(fresh).flushall()
        store = TieredStore(fresh.url, ShardStore('faulty://pics', cache=cache and str(cache)))
        dls = DataLoaders.from_store(store, item_tfms=Resize(32), bs=8, num_workers=0, device='cpu')
        def run(): return sum(len(y) for dl in (dls.train.new(drop_last=False), dls.valid) for _,y in dl)
        assert run()==N_IMAGES and is_flushed(store)
        faults.clear()
        assert run()==N_IMAGES and not faults.requests

def some_lack_fields(folder, fields_of):
    "Shards of twenty samples, of which sample `i` has the fields `fields_of(i)`"
    with tarfile.open(folder/'a.tar', 'w') as tar:
        for i in range(20):
            for field in fields_of(i):
                info = tarfile.TarInfo(f'{i:02}.{field}')
                info.size = 2
                tar.addfile(info, io.BytesIO(b'{}'))
    index_shards(folder, num_workers=0, progress=False)
    return Asked(folder)

def test_samples_that_lack_a_field_are_no_sign_that_redis_lost_values(fresh, tmp_path):
    "Their shards are not fetched again; those whose values are lost are"
    shards = some_lack_fields(tmp_path, lambda i: ('json',) if i%2 else ('json','txt'))
    store = TieredStore(fresh.url, shards)
    assert store.warm(0)==1. and len(client(fresh).keys(f'{store.prefix}:*'))==30
    store.prefetch([0])
    shards.wanted.clear()
    store.get_many(range(20), ['txt?'])
    assert not shards.wanted
    client(fresh).flushall()
    store.get_many(range(20), ['txt?'])
    assert shards.wanted==[([0],False)] and is_flushed(store)

def test_warm_writes_all_that_there_is(fresh, folder, tmp_path):
    "In parallel; values end with their time to live, or by `clear`, which leaves other keys"
    store,c = TieredStore(fresh.url, ShardStore(folder), ttl=100),client(fresh)
    assert store.warm(num_workers=2, chunk=64)==1. and epoch(store) and store.hits=={'from_redis':n, 'from_shards':0}
    assert 0<c.ttl(c.randomkey())<=100 and c.dbsize()==2*n
    c.set('another', 1)
    store.clear()
    assert c.keys()==[b'another']
    assert TieredStore(fresh.url, some_lack_fields(tmp_path, lambda i: ('txt' if i%2 else 'json',))).warm(0)==1.

# --- a copy of the dataset, and arguments

def test_the_values_of_a_copy_are_read_and_put_back_where_they_were_evicted(fresh, folder):
    "A later writing of it is not touched"
    shards,c = ShardStore(folder),client(fresh)
    to_redis(shards, fresh.url, 'copy', **one)
    store = TieredStore(RedisStore(fresh.url, 'copy'), shards)
    assert epoch(store) and store.hits=={'from_redis':n, 'from_shards':0}
    c.delete(*[f'copy:txt:{i}' for i in range(100)])
    assert epoch(store, 1) and is_flushed(store) and is_right(RedisStore(fresh.url, 'copy'))
    with pytest.raises(ValueError, match='RedisStore.delete'): store.clear()
    to_redis(samples('other'), fresh.url, 'copy', overwrite=True, **one)
    with pytest.warns(UserWarning, match='copy: replaced, deleted or lost'): assert epoch(store) and is_flushed(store)
    assert RedisStore(fresh.url, 'copy').get_many([7], 'txt')['txt'][0].startswith(b'other 7')

def test_what_is_no_copy_is_refused(fresh, folder):
    "And one that has lost its values: whether they were those of the shards cannot be told any more"
    shards,c = ShardStore(folder),client(fresh)
    to_redis(samples('other'), fresh.url, 'other', **one)
    to_redis([{'txt':'a'}], fresh.url, 'short', **one)
    to_redis(shards, fresh.url, 'copy', **one)
    c.delete(*[key for key in c.scan_iter('copy:*', count=1000) if key.split(b':')[1] in (b'txt',b'json')])
    for name,match in (('other','other in .* is no copy of texts: '),
                       ('short','short in .* is no copy of texts: 1 samples, not 160'),
                       ('copy','copy in .* holds none of the .* that were looked at.*copy it again')):
        with pytest.raises(ValueError, match=match): TieredStore(RedisStore(fresh.url, name), shards)

def test_a_copy_with_only_labels_and_numbers_has_no_values_to_compare(fresh, tmp_path):
    to_shards([{'cls':'ab'[i%2], 'id':i} for i in range(20)], tmp_path/'d', **one)
    shards = ShardStore(tmp_path/'d')
    to_redis(shards, fresh.url, 'd', **one)
    store = TieredStore(RedisStore(fresh.url, 'd'), shards)
    assert store.get_many(range(20), 'id')['id'].tolist()==list(range(20)) and store[3]=={'cls':'b', 'id':3}
    assert store.held()==0 and store.warm(num_workers=1)==0 and list(store.check_rest())==[]

@pytest.mark.parametrize('options,match', [
    (dict(timeout=3), 'timeout: .*redis_timeout='), (dict(socket_timeout=math.nan), 'socket_timeout=nan'),
    (dict(ttl=0), 'ttl=0'), (dict(ttl='1'), "ttl='1'"), (dict(ttl=math.inf), 'ttl=inf'),
    (dict(redis_timeout=-1), 'redis_timeout=-1'), (dict(queue=0), 'queue=0'), (dict(queue=math.inf), 'queue=inf')])
def test_arguments_that_make_no_sense_are_refused(fresh, folder, options, match):
    "A queue without a limit could take all memory, and one of none would keep nothing, and never say so"
    with pytest.raises((TypeError,ValueError), match=match): TieredStore(fresh.url, ShardStore(folder), **options)

def test_large_values_are_written_a_few_at_a_time(fresh, sent, tmp_path):
    "Each round trip has a deadline, and one copy of what it sends"
    to_shards([{'bin':bytes(1<<20)} for _ in range(10)], tmp_path, num_workers=1, progress=False)
    store = TieredStore(fresh.url, ShardStore(tmp_path))
    store.get_many(range(10), 'bin')
    assert is_flushed(store)
    writes = [commands for commands in sent if commands and commands[0][0]=='SET']
    assert sum(map(len, writes))==10 and max(map(len, writes))==4
