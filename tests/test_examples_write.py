"What each module of `write` does, in short: examples that were tried first"
import os, tempfile
import numpy as np
from fastcore.test import expect_fail, test_eq
from fastai_remote.codec.numbers import narrow
from fastai_remote.core import CorruptSample, crc32s, Manifest, seal, StoreBusy, StoreExists, StoreNotFound
from fastai_remote.ingest.stores import RedisStore, ShardStore
from fastai_remote.store.redis_layout import key_layout
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.store.server import redis_server
from fastai_remote.store.storage import Storage
from fastai_remote.write.base import check_name, chunk_count, host_id, is_alive, label_hash, MemoryWriter
from fastai_remote.write.base import progress_text
from fastai_remote.write.redis import RedisWriter
from fastai_remote.write.redis_lost import lost_of_range, lost_samples
from fastai_remote.write.redis_place import RedisPlace
from fastai_remote.write.redis_state import IngestKeys, packed_writes, parse_record, read_sealed
from fastai_remote.write.shard_files import generation_of
from fastai_remote.write.totals import Totals
from fastai_remote.write.shards import ShardWriter

def test_write_base():
    test_eq([narrow(0,9), narrow(0,344), narrow(-1,3), narrow(0,1<<40)], ['u1','u2','i1','i8'])
    test_eq(len(set(label_hash([f'class {i}' for i in range(10_000)]).tolist())), 10_000)
    test_eq(check_name('quick draw/v1.0'), 'quick draw/v1.0')
    with expect_fail(ValueError, contains="'a:b' cannot name a dataset"): check_name('a:b')
    assert is_alive(os.getpid()) and host_id()==host_id()
    test_eq(chunk_count(dict(n=100, chunk=16)), 7)
    progress_text(dict(n=100, chunk=16, open=True), 3)
    w = MemoryWriter('tiny')
    fields = {'txt':{'codec':'txt','dtype':None}, 'cls':{'codec':'cls','dtype':'i8','staged':True,'text':True}}
    w.begin(dict(signature='demo', n=4, chunk=4, fields=fields, splits=None, vocab={}))
    w.put(np.array([0,2,3]), {'txt':[b'a',b'c',b'd'], 'cls':['x','y','x']})
    record = dict(ok=3, failed=1, bytes=3, gaps=[[1,2]], counts={'cls':[['x',2], ['y',1]]})
    w.done(0, record, [('item 1','ValueError: no text')])
    w.commit()
    w.close()
    test_eq((len(w.store), w.store.vocab, w.store[1]), (3, ['x','y'], {'txt':'c', 'cls':'y'}))

def test_write_redis():
    server = redis_server()
    w = RedisWriter(RedisLink(server.url), 'tiny')
    fields = {'txt':{'codec':'txt','dtype':None}, 'age':{'codec':'u1','dtype':'u1'}}
    w.begin(dict(signature='demo', n=4, chunk=4, fields=fields, splits={}, vocab={}))
    w.put(np.array([0,2,3]), {'txt':[b'a',b'c',b'd'], 'age':np.array([7,8,9], np.uint8)})
    w.done(0, dict(ok=3, bytes=6, gaps=[[1,2]], failed=1), [['item 1', 'ValueError: no text']])
    with expect_fail(StoreBusy, contains="is writing 'tiny' now (1 of 1 chunks done)"):
        RedisWriter(w.link, 'tiny').begin(dict(signature='demo'))
    with expect_fail(StoreNotFound, contains="no dataset 'tiny'"): RedisStore(server.url, 'tiny')
    test_eq(np.frombuffer(w.link.client.get('tiny:age#0'), 'u1,>u4')['f0'], [7,0,8,9])   # a checksum follows each
    w.close()
    with expect_fail(StoreBusy, contains='tiny: the lock was lost'): w.put(np.array([1]), {'txt':[b'late']})
    server.close()
    # Four samples are written. The one at place 1 fails, and the labels are not in order:
    server = redis_server()
    w = RedisWriter(RedisLink(server.url), 'tiny')
    fields = {'txt':{'codec':'txt','dtype':None}, 'cls':{'codec':'cls','dtype':'i8','staged':True,'text':True}}
    w.begin(dict(signature='demo', n=4, chunk=4, fields=fields, splits={}, vocab={}))
    labels = ['dog','cat','ant']
    w.put(np.array([0,2,3]), {'txt':[b'a',b'c',b'd'], 'cls~':label_hash(labels)})
    record = dict(ok=3, bytes=3, gaps=[[1,2]], failed=1, counts={'cls':[[label, 1] for label in labels]})
    w.done(0, record, [['item 1', 'ValueError: no text']])
    with expect_fail(StoreNotFound, contains='there are: none'): RedisStore(server.url, 'tiny')
    w.commit()
    w.close()
    store = RedisStore(server.url, 'tiny')
    test_eq(store.get_many(range(3), 'txt')['txt'], [b'a',b'c',b'd'])
    test_eq(store.get_many(range(3), 'cls')['cls'], [2,1,0])
    test_eq(w.link.client.get('tiny:txt:3'), b'd')
    keys = ['fastai_remote:names', 'fastai_remote:used', 'tiny:cls#0', 'tiny:meta', 'tiny:register',
            'tiny:txt:0', 'tiny:txt:2', 'tiny:txt:3', 'tiny:~failures#0', 'tiny:~gaps#0']
    test_eq(sorted(key.decode() for key in w.link.client.keys()), keys)
    with expect_fail(StoreExists, contains="'tiny' is there already (3 samples"): w.begin(dict(signature='demo'))
    with expect_fail(ValueError, contains='cannot name a dataset'): RedisWriter(w.link, 'a:b')
    server.close()

def test_write_redis_admin():
    server = redis_server()
    def write(name, n=3, commit=True):
        w = RedisWriter(RedisLink(server.url), name)
        w.begin(dict(signature='demo', n=n, chunk=n, fields={'txt':{'codec':'txt','dtype':None}}, splits={}, vocab={}))
        w.put(np.arange(n-1), {'txt':[f'{name} {i}'.encode() for i in range(n-1)]})
        w.done(0, dict(ok=n-1, bytes=9*n, gaps=[[n-1,n]], failed=1), [['item 1', 'ValueError: no text']])
        if commit: w.commit()
        w.close()
        return w.link.client

    c = write('tiny')
    RedisStore.delete(server.url, 'tiny')
    test_eq(c.keys(), [b'fastai_remote:used'])
    with expect_fail(StoreNotFound, contains="no dataset 'tiny' to delete"): RedisStore.delete(server.url, 'tiny')
    write('tiny')
    test_eq(list(RedisStore(server.url, 'tiny').failures()), [('item 1', 'ValueError: no text')])
    write('half', commit=False)
    left, = RedisStore.unfinished(server.url)
    test_eq((left['name'], left['chunks'], left['of'], left['running']), ('half',1,1,False))
    RedisStore.abandon(server.url, 'half')
    test_eq(RedisStore.unfinished(server.url), [])
    with expect_fail(StoreNotFound, contains="no unfinished ingest of 'tiny'"): RedisStore.abandon(server.url, 'tiny')
    test_eq(len(RedisStore(server.url, 'tiny')), 2)
    new = RedisStore(server.url, 'tiny').rename('small')
    test_eq((new.name, new.get_many([1], 'txt')['txt'], RedisStore.names(server.url)), ('small', [b'tiny 1'], ['small']))
    write('tiny')
    prefixes = [RedisStore(server.url, name).manifest.prefix for name in ('small','tiny')]
    assert prefixes[0]!=prefixes[1] and all(prefix.startswith('tiny@') for prefix in prefixes)   # it was used before
    with expect_fail(StoreExists, contains="'tiny' is there already"): new.rename('tiny')
    RedisStore.delete(server.url, 'small')
    test_eq(RedisStore(server.url, 'tiny').get_many([0,1], 'txt')['txt'], [b'tiny 0',b'tiny 1'])
    RedisStore.delete(server.url, 'tiny')
    test_eq(c.keys(), [b'fastai_remote:used'])
    server.close()

def test_write_redis_lost():
    server = redis_server()
    link,layout = RedisLink(server.url),key_layout('tiny')
    fields = {'txt':{'codec':'txt','dtype':None}, 'age':{'codec':'u1','dtype':'u1','check':'u4'}}
    for k in (0,2,3): link.client.set(f'tiny:txt:{k}', b'text')
    for k in (0,1,3): link.send(packed_writes(layout, 'age', 'u1', np.array([k]), [7], 'u4'))
    test_eq(lost_samples(link, layout, fields, np.arange(4)), [1,2])
    test_eq(list(lost_of_range(link, layout, fields, 4, gaps=np.array([1,2]))), [])
    list(lost_of_range(link, layout, fields, 4, step=2))
    server.close()

def test_write_redis_place():
    # An ingest that is abandoned leaves nothing behind but the note that its name was used:
    server = redis_server()
    place = RedisPlace(RedisLink(server.url), 'tiny')
    with place.locked():
        plan = place.begin(dict(n=4, chunk=4, fields={'txt':{'codec':'txt', 'dtype':None}}))
        place.lock.write([('SET', 'tiny:txt:0', b'a')])
        test_eq(sorted(place.link.client.hkeys('tiny:register')), sorted([b'tiny', plan['id'].encode()]))
        place.drop_plan()
        test_eq(sorted(place.link.client.keys()), [b'fastai_remote:used', b'tiny:ingest:lock'])
        later = place.begin(dict(n=4, chunk=4, fields={'txt':{'codec':'txt', 'dtype':None}}))
        test_eq(later['prefix'], f"tiny@{later['id']}")
    server.close()

def test_write_redis_state():
    keys,plan = IngestKeys('pets'),{'id':'7c1', 'fields':{'cls':{'dtype':'i8', 'staged':True}}, 'n':100, 'chunk':16}
    test_eq(keys.record(plan, 6), 'pets:ingest:7c1:record:6')
    sealed = seal({'n':3})
    test_eq(read_sealed(sealed, 'the plan'), {'n':3})
    with expect_fail(CorruptSample, contains='the plan does not match its checksum'):
        read_sealed(sealed.replace(b'3}', b'7}'), 'the plan')
    test_eq(parse_record(1, seal({'ok':16, 'chunk':0})), None)   # the record of another chunk
    parse_record(0, seal({'ok':16, 'chunk':0}))

def test_write_shard_files():
    names = 'shard-000000.tar','shard2-train-000012-1.tar','shard-000000.tar.fastai_remote','shard.tar'
    test_eq(list(map(generation_of, names)), [1,2,1,None])

def test_write_totals():
    totals = Totals(dict(n=20, chunk=10, fields={}, splits={'train':[0,10], 'valid':[10,20]}, vocab={}))
    for gaps in [[2,4],[9,10]],[[10,11],[19,25]]: totals.add(dict(ok=7, bytes=0, failed=3, gaps=gaps))
    test_eq(totals.describe(Manifest('d', 0, {})).splits, {'train':[0,7], 'valid':[7,15]})

def test_write_shards():
    tmp = tempfile.TemporaryDirectory()
    w = ShardWriter(Storage(f'{tmp.name}/digits'), maxsize=6000)
    fields = {'txt':{'codec':'txt','dtype':None}, 'txt.crc':{'codec':'crc','dtype':'u4'},
              'cls':{'codec':'cls','dtype':'i8','staged':True,'text':True}}
    w.begin(dict(signature='s', n=8, chunk=4, fields=fields, splits={'train':[0,6], 'valid':[6,8]}, vocab={}, stats=None))
    for chunk,numbers,gaps,failures in [(1, [4,5,6,7], [], []), (0, [0,1,3], [[2,3]], [('2','why not')])]:
        part = w.opener()()
        txt = [f'number {i}'.encode() for i in numbers]
        cls = ['odd' if i%2 else 'even' for i in numbers]
        part.put(np.array(numbers), {'txt':txt, 'txt.crc':crc32s(txt), 'cls':cls})
        record = dict(ok=len(txt), bytes=sum(map(len, txt)), failed=len(gaps), gaps=gaps)
        counts = {'cls':[[label, cls.count(label)] for label in set(cls)]}
        part.done(chunk, dict(record, counts=counts), failures)
    test_eq([r['shards'][0][:2] for _,r in w.records()], [['shard-train-000000.tar',2], ['shard-train-000001.tar',2]])
    w.storage.names()
    with expect_fail(StoreNotFound): ShardStore(f'{tmp.name}/digits')
    w.commit()
    w.close()
    store = ShardStore(f'{tmp.name}/digits')
    got = store.get_many(range(7), ['txt','cls'], check=True)
    test_eq(got['txt'], [f'number {i}'.encode() for i in (0,1,3,4,5,6,7)])
    test_eq((store.splits, store.vocab), ({'train':[0,5], 'valid':[5,7]}, ['even','odd']))
    test_eq((store.manifest.counts, len(store.shards)), ({'cls':[3,4]}, 4))
    store.storage.names()
