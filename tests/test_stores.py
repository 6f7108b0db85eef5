"The contract that every store keeps: one suite, run over each of them"
import atexit, copy, os, pickle, shutil, struct, tempfile, zlib
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import draw
from fastcore.test import expect_fail
from redis.connection import HiredisRespSerializer

from fastai_remote.codec.fields import get_codec
from fastai_remote.core import CorruptSample, Manifest, MissingSample, UnknownField
from fastai_remote.store.base import MemoryStore, Store
from fastai_remote.ingest.run import to_redis
from fastai_remote.store.redis import read_failures, RedisStore
from fastai_remote.store.shards import ShardStore
from fastai_remote.ingest.shards import to_shards
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.store.redis_servers import _Packer
from fastai_remote.store.redis_layout import key_layout, packed_reads
from fastai_remote.store.tiered import TieredStore

n = 37
LABELS = ['bird','cat','dog']
def sample(i): return {'png':draw(i), 'txt':f'picture {i}', 'cls':LABELS[i%3], 'score.f4':i/8, 'id':-i<<40, 'half.f2':i/2, 'exact.f8':i/7, 'flag.u1':i%2}

def memory(server):
    png,txt = get_codec('png'),get_codec('txt')
    s = [sample(i) for i in range(n)]
    cols = {'png':[png.to_bytes(o['png']) for o in s], 'txt':[txt.to_bytes(o['txt']) for o in s], 'cls':np.array([LABELS.index(o['cls']) for o in s], np.uint8)}
    for f,d in (('score.f4','f4'), ('id','i8'), ('half.f2','f2'), ('exact.f8','f8'), ('flag.u1','u1')): cols[f] = np.array([o[f] for o in s], d)
    return MemoryStore(cols, 'all', vocab={'cls':LABELS}, splits={'train':[0,30], 'valid':[30,37]})

def redis(server):
    if 'all' not in RedisStore.names(server.url): to_redis({'train':list(range(30)), 'valid':list(range(30,n))}, server.url, 'all', sample, num_workers=1, shuffle=False, progress=False)
    return RedisStore(server.url, 'all')

def shards(server):
    folder = Path(tempfile.gettempdir())/f'fr-shards-{os.getpid()}'/'all'
    if not folder.exists():
        atexit.register(shutil.rmtree, folder.parent)
        to_shards({'train':list(range(30)), 'valid':list(range(30,n))}, folder, sample, num_workers=1, shuffle=False, chunk=20, progress=False)
    return ShardStore(folder)

def tiered(server): return TieredStore(server.url, shards(server))

@pytest.fixture(params=[memory, redis, shards, tiered], ids=['memory','redis','shards','tiered'])
def store(request, server): return request.param(server)

def damage(store, i, field, value):
    "Change, or delete, a stored value behind the store's back"
    if isinstance(store, MemoryStore): store.columns[field] = [value if k==i else v for k,v in enumerate(store.columns[field])]
    elif isinstance(store, ShardStore):   # its bytes in the tar, and its length in the index, whose own checksum is made right
        u,k = (int(o[0]) for o in store.shards.at(np.array([i])))
        ix,addr = store.indices([u])[u],lambda a: a.__array_interface__['data'][0]
        at = addr(ix.columns[f'{field}#'])-addr(np.frombuffer(ix.buf, np.uint8))+4*k
        with open(store.storage.path(store.index_file(u)), 'r+b') as f: f.seek(at); f.write((0xFFFFFFFF if value is None else len(value)).to_bytes(4, 'little'))
        (icrc:=store.table.icrc.copy())[u] = zlib.crc32(Path(store.storage.path(store.index_file(u))).read_bytes())
        store.table.icrc = icrc
        store.new_epoch()
        with open(store.storage.path(store.shards.name(u)), 'r+b') as f: f.seek(int(ix.columns[f'{field}@'][k])); f.write(value or b'')
    elif isinstance(store, TieredStore):   # in both
        damage(store.store, i, field, value)
        if store.flush(): store.link.client.delete(f'{store.prefix}:{field}:{i}')
    elif value is None: store.link.client.delete(f'all:{field}:{i}')
    else: store.link.client.set(f'all:{field}:{i}', value)

def test_length_fields_vocab_splits(store):
    assert len(store)==n and set(store.fields)==set(sample(0)) and store.vocab==LABELS and store.splits=={'train':[0,30], 'valid':[30,37]}

def test_values_come_back(store):
    idxs = [5,0,36,5]
    got = store.get_many(idxs, store.fields, check=True)
    for f,vs in got.items():
        for i,v in zip(idxs, vs):
            o,want = store.decode(i, f, v),sample(i)[f]
            if f=='png': assert np.array_equal(np.asarray(o), np.asarray(want))
            else: assert o==(np.float16(want) if f=='half.f2' else np.float32(want) if f=='score.f4' else want)

def test_kinds_of_columns(store):
    got = store.get_many([1,2,3], ['txt','score.f4','id','cls'])
    assert got['txt']==[b'picture 1',b'picture 2',b'picture 3'] and all(type(o) is bytes for o in got['txt'])
    assert got['score.f4'].dtype==np.float32 and got['score.f4'].tolist()==[1/8,2/8,3/8]
    assert got['id'].dtype==np.int64 and got['id'].tolist()==[-1<<40,-2<<40,-3<<40] and got['cls'].dtype==np.uint8

def test_no_samples_and_one_field_by_name(store):
    assert store.get_many([], 'txt')=={'txt':[]} and len(store.get_many([], 'id')['id'])==0 and list(store.get_many(range(2), 'txt'))==['txt']

def test_any_kind_of_numbers(store):
    for idxs in (range(3), np.arange(3), [0,np.int32(1),2], (0,1,2)): assert store.get_many(idxs, 'txt')['txt'][1]==b'picture 1'

def test_a_sample_as_objects(store):
    s = store[-1]
    assert s['txt']=='picture 36' and s['cls']==LABELS[0] and 'png.crc' not in s and len(list(iter(store)))==n
    with expect_fail(IndexError): store[n]

def test_a_field_may_be_named_twice(store):
    once = store.get_many([3,1], ['png','cls'])
    twice = store.get_many([3,1], ['png','cls','png','cls'])
    assert list(twice)==['png','cls'] and twice['png']==once['png'] and list(twice['cls'])==list(once['cls'])
    assert store.get_many([3], ['txt','txt'], decode=True)=={'txt':['picture 3']}
    both = store.get_many([3,1], ['png','png.crc','none;txt','txt.crc','txt.crc'])
    assert both['png']==once['png'] and list(both['png.crc'])==list(map(zlib.crc32, both['png']))
    assert [bytes(b) for b in both['none;txt']]==[b'picture 3', b'picture 1']
    assert list(both['txt.crc'])==[zlib.crc32(b'picture 3'), zlib.crc32(b'picture 1')]

def test_a_slice_is_read_in_few_requests(store, monkeypatch):
    def same(a, b):
        others = a.keys()-{'png'}
        return a.keys()==b.keys() and a['png'].tobytes()==b['png'].tobytes() and all(a[f]==b[f] for f in others)
    for part in slice(None), slice(3, 9), slice(-1, None, -7), slice(5, 5), slice(100, 200):
        samples = store[part]
        assert len(samples)==len(range(n)[part]) and all(same(o, store[i]) for o,i in zip(samples, range(n)[part]))
    requests,read = [],type(store).get_many
    def get_many(self, numbers, *args, **kwargs):
        requests.append(len(numbers))
        return read(self, numbers, *args, **kwargs)
    monkeypatch.setattr(type(store), 'get_many', get_many)
    store[:]
    assert requests==[n]
    monkeypatch.setattr(store.manifest, 'nbytes', n*(5<<20))   # large samples: few at a time
    requests.clear()
    store[:20]
    assert sum(requests)==20 and max(requests)==6

def test_an_error_in_a_slice_is_that_of_the_sample():
    store = MemoryStore({'txt':[b'a']*30, 'other.txt':[b'b']*30}, 'texts')
    damage(store, 25, 'txt', b'c')
    damage(store, 7, 'other.txt', None)
    for k,kind,part in ((7, MissingSample, slice(30)), (25, CorruptSample, slice(10, 30))):
        with pytest.raises(kind) as one: store[k]
        with pytest.raises(kind) as many: store[part]
        assert str(many.value)==str(one.value)

def test_numbers_out_of_range(store):
    for i in (-1, n):
        with expect_fail(IndexError, contains=f'no sample {i}; there are 37'): store.get_many([0,i], 'txt')
    with expect_fail(TypeError, contains='must be integers'): store.get_many([.5], 'txt')
    with expect_fail(TypeError, contains='all: sample numbers must not be masked'): store.get_many(np.ma.array([0,1], mask=[0,1]), 'txt')
    with expect_fail(TypeError, contains='all: a field is a text, not 5'): store.get_many([0], 5)

def test_statistics_that_are_not_there_are_those_of_a_field(store):
    with expect_fail(UnknownField, contains="no field 'jpg'"): store.mean_image('jpg')
    with expect_fail(ValueError, contains="no statistics of images of 'txt'"): store.mean_image('txt')

def test_alternatives_of_the_default_field_are_pictures_of_the_same_thing():
    "Not masks, whose codec may be that of a picture; and a field that is not named after its codec has none"
    def default(fields, **kwargs):
        store = MemoryStore({field:[b'x']*4 for field in fields}, **kwargs)
        for field in fields: store.manifest.fields[field]['n'] = 3
        return store.default_field
    assert default(['jpg','png'])=='jpg;png' and default(['a.jpg','b.jpg','a.png'])=='a.jpg;a.png'
    assert default(['jpg','png'], vocab={'png':['road','sky']})=='jpg'
    assert default(['photo','sketch'], codecs={'photo':'jpg', 'sketch':'jpg'})=='photo'

def test_unknown_field(store):
    with expect_fail(UnknownField, contains="all: no field 'jpg'; there are 'png'"): store.get_many([0], ['txt','jpg'])
    with expect_fail(UnknownField, contains="all: no field 'jpg'; there are 'png'"): store.may_lack('jpg')

def test_damage_is_noticed(store):
    was = store.get_many([4], 'txt')['txt'][0]
    try:
        damage(store, 4, 'txt', b'pictUre 4')
        with expect_fail(CorruptSample, contains="all: sample 4, field 'txt'"): store.get_many([3,4], 'txt', check=True)
        assert store.get_many([3,4], 'txt', check=False)['txt'][1]==b'pictUre 4'
        damage(store, 4, 'txt', None)
        with expect_fail(MissingSample, contains="all: 1 of 2 samples missing, first 4 (field 'txt')"): store.get_many([3,4], 'txt')
    finally: damage(store, 4, 'txt', was)

def test_pickles(store):
    s = pickle.loads(d:=pickle.dumps(store))
    assert s.get_many([3], 'txt')=={'txt':[b'picture 3']} and copy.deepcopy(store).name=='all'
    if not isinstance(store, MemoryStore): assert len(d)<1000

def _read(store, q): q.put(store.get_many([1,2], ['txt','cls'])['txt'])

@pytest.mark.parametrize('method', ['fork','spawn','forkserver'])
def test_survives(store, method):
    "A store that is in use goes along to a child, and goes on in the parent"
    store.get_many([0], 'txt')
    ctx = get_context(method)
    (p:=ctx.Process(target=_read, args=(store, q:=ctx.Queue()))).start()
    assert q.get(timeout=300)==[b'picture 1',b'picture 2']==store.get_many([1,2], 'txt')['txt']
    p.join()

def test_threads(store):
    with ThreadPoolExecutor(8) as ex: assert list(ex.map(lambda i: store.get_many([i], 'txt')['txt'][0], list(range(n))*5))==[f'picture {i}'.encode() for i in range(n)]*5

def test_shows_itself(store):
    assert repr(store)==f"{type(store).__name__}('all', 37 samples, fields {', '.join(store.fields)})"
    assert '<table>' in (h:=store._repr_html_()) and 'split train' in h and '3 labels' in h

def test_one_round_trip_a_batch(server):
    "Whatever the fields: Redis sees one request"
    store = redis(server)
    sent = []
    conn = store.link.client.connection_pool.get_connection()
    cls,send = type(conn),type(conn).send_packed_command
    store.link.client.connection_pool.release(conn)
    cls.send_packed_command = lambda self, *a, **k: sent.append(1) or send(self, *a, **k)
    try: store.get_many(range(n), store.fields, check=True)
    finally: cls.send_packed_command = send
    assert len(sent)==1

def test_the_layout_is_what_it_says(server):
    "A value is the file itself; a column is big-endian, and each value followed by the crc32 of value and sample number; a column of checksums is plain"
    c = redis(server).link.client
    assert c.get('all:png:3')[:4]==b'\x89PNG' and c.get('all:txt:3')==b'picture 3'
    score,cls = np.frombuffer(c.get('all:score.f4#0'), '>f4,>u4'),np.frombuffer(c.get('all:cls#0'), 'u1,>u4')
    assert score['f0'].tolist()==[i/8 for i in range(n)] and cls['f0'].tolist()==[i%3 for i in range(n)]
    assert score['f1'].tolist()==[zlib.crc32(struct.pack('>fQ', i/8, i)) for i in range(n)] and cls['f1'].tolist()==[zlib.crc32(struct.pack('>BQ', i%3, i)) for i in range(n)]
    assert np.frombuffer(c.get('all:txt.crc#0'), '>u4').tolist()==[zlib.crc32(f'picture {i}'.encode()) for i in range(n)]
    assert c.smembers('fastai_remote:names')>={b'all'}

@pytest.mark.parametrize('name', ['plain','bögen 2'])
@pytest.mark.parametrize('dtype,check', [('i2',None), ('i2','u4'), ('f8','u4')])
def test_requests_packed_by_hand_are_those_of_redis_py(server, name, dtype, check):
    commands,_ = packed_reads(key_layout(name), 'x', dtype, np.array([7,1<<24,12345,(1<<24)+900]), check)
    packer,plain = _Packer(),HiredisRespSerializer()
    def gets(t, i): return ('GET','i64',f'{96*i}','GET','u32',f'{96*i+64}') if t=='i64+u32' else ('GET',t,f'#{i}')
    for cmd,key,*rest in commands:
        want = plain.pack(cmd, key, *(a for i in rest[1] for a in gets(rest[0], i))) if rest else plain.pack(cmd, key)
        assert b''.join(packer.pack(cmd, key, *rest))==b''.join(want)
    for args in (('MGET', f'{name}:x:1', f'{name}:x:2'), ('CONFIG GET', 'maxmemory'), ('SET', name, bytearray(b'x'))): assert packer.pack(*args)==plain.pack(*args)

def test_failures_that_redis_scans_twice_come_once():
    "HSCAN may return an entry again while the server moves the table"
    client = SimpleNamespace(hscan=lambda key, cursor, count: (0 if cursor else 5, {b'0':b'[["a","why"]]'}))
    link = SimpleNamespace(url='redis://host', call=lambda f: f(client))
    assert list(read_failures(link, key_layout('d'), 'd'))==[('a','why')]

def test_what_has_no_checksums_is_named():
    "Also in a store of a user, whose numbers nothing covers"
    store = MemoryStore({'txt':[b'a',b'b'], 'value.f4':np.zeros(2, 'f4')})
    assert store.unchecked==['value.f4'] and 'value.f4' in repr(store.verify(num_workers=1))
    class Numbers(Store):
        def __init__(self): self.manifest = Manifest('numbers', 3, {'value.i4':{'codec':'i4', 'dtype':'i4'}}).stamp()
        def read_values(self, numbers, fields): return {field:numbers.astype('i4') for field in fields}
    assert Numbers().unchecked==['value.i4'] and 'value.i4' in repr(Numbers().verify(num_workers=1))
