"What every store does beyond the suite of its interface, which is in `test_interfaces.py`: slices, processes, memory"
import copy, os, pickle, platform, struct, subprocess, sys, zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import draw, private_server

from fastai_remote import (CorruptSample, MemoryStore, MissingSample, RedisStore, ShardStore, TieredStore, UnknownField,
    to_redis, to_shards)
from fastai_remote.core import Manifest, seal
from fastai_remote.ingest.run import ingest
from fastai_remote.ingest.stores import changeable, DatasetOps
from fastai_remote.store.base import Store
from fastai_remote.store.redis import read_failures
from fastai_remote.store.redis_parts import key_layout
from fastai_remote.write.base import MemoryWriter
from inputs import put_texts

N = 37
LABELS = ['bird','cat','dog']
SPLITS = {'train':[0,30], 'valid':[30,N]}
options = dict(num_workers=1, shuffle=False, progress=False)

def sample(i):
    return {'png':draw(i), 'txt':f'picture {i}', 'cls':LABELS[i%3], 'score.f4':i/8, 'id':-i<<40, 'half.f2':i/2,
            'exact.f8':i/7, 'flag.u1':i%2}

@pytest.fixture(scope='module')
def server():
    with private_server(requirepass='s3same') as server: yield server

@pytest.fixture(scope='module')
def stores(server, tmp_path_factory):
    "A store of each kind, with the same samples"
    source = {split:list(range(*ends)) for split,ends in SPLITS.items()}
    folder,writer = tmp_path_factory.mktemp('shards')/'all',MemoryWriter('all')
    ingest(source, writer, sample, **options)
    to_redis(source, server.url, 'all', sample, **options)
    to_shards(source, folder, sample, chunk=20, **options)
    return {'memory':changeable(writer.store), 'redis':RedisStore(server.url, 'all'), 'shards':ShardStore(folder),
            'tiered':TieredStore(server.url, ShardStore(folder))}

@pytest.fixture(params=['memory','redis','shards','tiered'])
def store(request, stores): return stores[request.param]

def test_values_come_back_with_their_types_for_any_kind_of_numbers(store):
    numbers = [5,0,36,5]
    read = store.get_many(numbers, store.fields, check=True, decode=True)
    for k,i in enumerate(numbers):
        want = sample(i)
        assert np.array_equal(np.asarray(read['png'][k]), np.asarray(want.pop('png')))
        want |= {'score.f4':np.float32(i/8), 'half.f2':np.float16(i/2)}
        assert {field:read[field][k] for field in want}==want
    assert store.splits==SPLITS and len(list(iter(store)))==N and 'png.crc' not in store[0]
    for numbers in (range(3), np.arange(3), [0,np.int32(1),2], (0,1,2)):
        read = store.get_many(numbers, ['txt','score.f4','id','cls'])
        assert read['txt']==[b'picture 0',b'picture 1',b'picture 2'] and all(type(o) is bytes for o in read['txt'])
        assert (read['score.f4'].dtype,read['id'].dtype,read['cls'].dtype)==(np.float32,np.int64,np.uint8)

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
    def plain(o): return {**o, 'png':o['png'].tobytes()}
    for part in slice(None), slice(3, 9), slice(-1, None, -7), slice(5, 5), slice(100, 200):
        assert [plain(o) for o in store[part]]==[plain(store[i]) for i in range(N)[part]]
    requests,read = [],type(store).get_many
    def get_many(self, numbers, *args, **kwargs):
        requests.append(len(numbers))
        return read(self, numbers, *args, **kwargs)
    monkeypatch.setattr(type(store), 'get_many', get_many)
    store[:]
    monkeypatch.setattr(store.manifest, 'nbytes', N*(5<<20))   # large samples: few at a time
    store[:20]
    assert requests[0]==N and sum(requests[1:])==20 and max(requests[1:])==6

def test_an_error_in_a_slice_is_that_of_the_sample():
    store = MemoryStore({'txt':[b'a']*30, 'other.txt':[b'b']*30}, 'texts')
    store.columns['txt'][25],store.columns['other.txt'][7] = b'c',None
    for k,kind,part in ((7, MissingSample, slice(30)), (25, CorruptSample, slice(10, 30))):
        with pytest.raises(kind) as one: store[k]
        with pytest.raises(kind) as many: store[part]
        assert str(many.value)==str(one.value)
    assert store.get_many([25], 'txt', check=False)['txt']==[b'c']   # as it is, where nobody wants it compared

def test_wrong_numbers_and_fields_are_named(store):
    for error,message,numbers,field in [
            (IndexError, 'no sample -1; there are 37', [0,-1], 'txt'),
            (TypeError, 'all: a field is a text, not 5', [0], 5),
            (TypeError, 'all: sample numbers must not be masked', np.ma.array([0,1], mask=[0,1]), 'txt')]:
        with pytest.raises(error, match=message): store.get_many(numbers, field)
    for ask in partial(store.get_many, [0]),store.may_lack,store.mean_image:
        with pytest.raises(UnknownField, match="all: no field 'jpg'; there are 'png'"): ask('jpg')
    with pytest.raises(ValueError, match="no statistics of images of 'txt'"): store.mean_image('txt')

def test_alternatives_of_the_default_field_are_pictures_of_the_same_thing():
    "Not masks, whose codec may be that of a picture; and a field that is not named after its codec has none"
    def default(fields, **kwargs):
        store = MemoryStore({field:[b'x']*4 for field in fields}, **kwargs)
        for field in fields: store.manifest.fields[field]['n'] = 3
        return store.field_table.default
    assert default(['jpg','png'])=='jpg;png' and default(['a.jpg','b.jpg','a.png'])=='a.jpg;a.png'
    assert default(['jpg','png'], vocab={'png':['road','sky']})=='jpg'
    assert default(['photo','sketch'], codecs={'photo':'jpg', 'sketch':'jpg'})=='photo'

@pytest.mark.parametrize('method', ['fork', pytest.param('spawn', marks=pytest.mark.slow)])
def test_stores_in_use_go_along_to_a_child_and_on_in_the_parent(stores, method):
    "With their passwords"
    for store in stores.values(): store.get_many([1,2], 'txt')
    assert stores['tiered'].flush(120)
    queue = (context := get_context(method)).Queue()
    child = context.Process(target=put_texts, args=(stores, [1,2], queue))
    child.start()
    texts,hits = queue.get()
    child.join()
    assert texts==[[b'picture 1',b'picture 2']]*4 and hits['from_redis']>=2
    for store in stores.values(): assert store.get_many([1,2], 'txt')['txt']==texts[0]

def test_threads_share_a_store(store):
    def read(i): return store.get_many([i], 'txt')['txt'][0]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(read, [*range(N)]*5))==[f'picture {i}'.encode() for i in range(N)]*5

def test_a_store_shows_itself_and_is_small_when_pickled(store):
    assert repr(store)==f"{type(store).__name__}('all', 37 samples, fields {', '.join(store.fields)})"
    shown = store._repr_html_()
    assert '<table>' in shown and '<bdi>train</bdi>' in shown and '3 labels' in shown
    assert copy.deepcopy(store).name=='all' and (isinstance(store, MemoryStore) or len(pickle.dumps(store))<1100)

# --- Redis

def test_a_batch_is_one_round_trip_whatever_the_fields(stores, monkeypatch):
    "Commands are counted in writes: a pipeline comes as one"
    store,connections = stores['redis'],[]
    store.get_many([0], 'txt')
    pool = store.link.client.connection_pool
    kind = type(connection := pool.get_connection())
    pool.release(connection)
    send = kind.send_packed_command
    def counted(self, *args, **kwargs):
        connections.append(self)
        return send(self, *args, **kwargs)
    monkeypatch.setattr(kind, 'send_packed_command', counted)
    store.get_many(range(N), store.fields, check=True)
    assert len(connections)==1

def test_the_layout_in_redis_is_what_it_says(stores):
    "A value is the file itself; a column is big-endian, each number with the crc32 of value and number of the sample"
    client = stores['redis'].link.client
    assert client.get('all:png:3')[:4]==b'\x89PNG' and client.get('all:txt:3')==b'picture 3'
    for field,kind,values in (('score.f4','f',[i/8 for i in range(N)]), ('cls','B',[i%3 for i in range(N)])):
        packed = [struct.pack(f'>{kind}', value)+struct.pack('>I', zlib.crc32(struct.pack(f'>{kind}Q', value, i)))
                  for i,value in enumerate(values)]
        assert client.get(f'all:{field}#0')==b''.join(packed)
    crcs = [zlib.crc32(f'picture {i}'.encode()) for i in range(N)]
    assert client.get('all:txt.crc#0')==struct.pack(f'>{N}I', *crcs)
    assert client.smembers('fastai_remote:names')>={b'all'}

def test_what_was_asked_for_may_be_long_or_look_like_something_else(server):
    "Repeated samples, a value that is longer than all that the manifest counts, and texts like replies of Redis"
    texts = ['x'*20_000_000, *(f'*{10**12+i}\r\n>{10**12+i}\r\n'*i for i in range(20))]
    to_redis([{'txt':text} for text in texts], server.url, 'long', **options)
    for _ in range(2):
        store = RedisStore(server.url, 'long')
        store.manifest.nbytes = 0
        assert store.get_many(range(21), 'txt', decode=True)['txt']==texts
    assert len(store.get_many([7]*5000, 'txt')['txt'])==5000

PAGE_FAULTS = '''
import resource, sys
from fastai_remote import RedisStore
def faults(store):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for k in range(10): store.get_many(range(k, k+64), 'x.bin')
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt-before)/10
for name in '100','250':
    faults(store := RedisStore(sys.argv[1], name))
    print(faults(store))
'''

@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0]!='glibc', reason='it is about the malloc of glibc')
def test_the_memory_of_a_batch_is_used_again(server):
    "A batch whose pages are new has a page fault for each 4 KB: 1,600 for values of 100 KB"
    env = {name:value for name,value in os.environ.items() if not name.startswith(('MALLOC_','GLIBC_TUNABLES'))}
    for kilobytes in (100,250):
        samples = [{'x.bin':bytes([i])*kilobytes*1000} for i in range(80)]
        to_redis(samples, server.url, f'{kilobytes}', **options)
    command = [sys.executable, '-c', PAGE_FAULTS, server.url]
    run = subprocess.run(command, env=env, check=True, capture_output=True)
    assert max(map(float, run.stdout.split()))<200

def test_failures_that_redis_scans_twice_come_once():
    "HSCAN may return an entry again while the server moves the table"
    found = {b'0':seal({'chunk':0, 'failures':[['a','why']]})}
    client = SimpleNamespace(hscan=lambda key, cursor, count: (0 if cursor else 5, found))
    link = SimpleNamespace(url='redis://host', call=lambda f: f(client))
    assert list(read_failures(link, key_layout('d'), 'd'))==[('a','why')]

def test_what_has_no_checksums_is_named():
    "Also in a store of a user, whose numbers nothing covers"
    class Numbers(DatasetOps, Store):
        def __init__(self): self.manifest = Manifest('d', 3, {'value.i4':{'codec':'i4', 'dtype':'i4'}}).stamp()
        def read_values(self, numbers, fields): return {field:numbers.astype('i4') for field in fields}
    for store in (MemoryStore({'txt':[b'a',b'b'], 'value.i4':np.zeros(2, 'i4')}), Numbers()):
        report = repr(store.verify(num_workers=1))
        assert store.unchecked==['value.i4'] and 'no checksums: value.i4' in report and 'all good' not in report
