"Shards over S3, on real servers: each fault brought about for real, and the answer promised for it"
import copy, io, json, logging, os, pickle, random, re, signal, subprocess, sys, tarfile, threading, time, traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from conftest import HOLD, busy, fails, holding, in_time, wait_for
pytest.importorskip('s3fs'); pytest.importorskip('moto'); pytest.importorskip('boto3')
from PIL import Image
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import MSELossFlat
from joblib.externals.loky import get_reusable_executor
from torch import nn

import fastai_remote.block, fastai_remote.load.loader
from fastai_remote.core import seal
from fastai_remote import (CorruptSample, MissingSample, ShardStore, StoreBusy, StoreError, StoreExists, StoreNotFound,
    StoreUnavailable, UnsupportedFormat,
    index_shards, s3_options, to_shards)
from fastai_remote.store.cache import FileCache
from fastai_remote.store.storage import Storage
from fastai_remote.write.shards import ShardWriter
from s3proxy import S3Proxy
from test_s3servers import open_server

N,EACH = 240,30   # samples, and samples a shard
INF,WRONG = float('inf'),'n0t-the-one'
workers = pytest.mark.parametrize('num_workers', [0,2])

def noise(k):
    "A small JPEG of noise"
    Image.fromarray(np.random.default_rng(k).integers(0, 255, (16,16,3)).astype(np.uint8)).save(b:=io.BytesIO(), 'JPEG')
    return b.getvalue()

ITEMS = [{'jpg':noise(i), 'cls':'abc'[i%3], 'id':i} for i in range(N)]

@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    "No credentials but those that a test gives, and a cache of the test's own"
    for k in [k for k in os.environ if k.startswith(('AWS_','FASTAI_REMOTE_','XDG_'))]: monkeypatch.delenv(k)
    for k,v in dict(AWS_EC2_METADATA_DISABLED='true', AWS_SHARED_CREDENTIALS_FILE=tmp_path/'credentials',
            AWS_CONFIG_FILE=tmp_path/'config', FASTAI_REMOTE_CACHE=tmp_path/'usual').items():
        monkeypatch.setenv(k, str(v))

@pytest.fixture(scope='module', params=['moto','swift'])
def s3(request):
    "Each server, with a dataset `pets` of eight shards"
    stack,s = open_server(request.param)
    with stack:
        make(s, 'pets')
        yield s

@pytest.fixture
def proxy(s3):
    "A proxy before the server"
    with S3Proxy(s3.endpoint) as p: yield p

@pytest.fixture
def own(s3):
    "The dataset in a folder of the test's own, to be damaged"
    c,to = s3.client(),f'own-{time.monotonic_ns()}'
    for k in names(s3, 'pets'): c.copy_object(Bucket=s3.bucket, Key=f'{to}/{k}', CopySource=f'{s3.bucket}/pets/{k}')
    return to

def url(s, folder='pets'): return f's3://{s.bucket}/{folder}'
def opts(s, at=None, **kw): return dict(endpoint_url=(at or s).endpoint, key=s.key, secret=s.secret, **kw)
def make(s, folder, items=ITEMS, at=None, **kw):
    return to_shards(items, url(s, folder),
        **{'maxcount':EACH, 'num_workers':1, 'progress':False, 'storage_options':opts(s, at), **kw})
def opened(s, at=None, folder='pets', cache=None, **kw):
    return ShardStore(url(s, folder), cache=cache, storage_options=opts(s, at), **kw)
def loaders(store, **kw):
    return DataLoaders.from_store(store,
        **{'y':'id', 'bs':16, 'num_workers':0, 'device':'cpu', 'interleave':2, 'seed':1, **kw})
def ids(dl): return [int(i) for _,y in dl for i in y]
def epoch(dls): return sorted(ids(dls.train.new(drop_last=False))+ids(dls.valid))

def names(s, folder):
    "What is in `folder`"
    pages = s.client().get_paginator('list_objects_v2').paginate(Bucket=s.bucket, Prefix=f'{folder}/')
    return [o['Key'].removeprefix(f'{folder}/') for page in pages for o in page.get('Contents', ())]

def objects(s, folder):
    "The same, `{name: bytes}`"
    c = s.client()
    return {k:c.get_object(Bucket=s.bucket, Key=f'{folder}/{k}')['Body'].read() for k in names(s, folder)}

def put(s, folder, name, b): s.client().put_object(Bucket=s.bucket, Key=f'{folder}/{name}', Body=b)

def alike(a, b):
    "Are two folders the same, byte for byte, but for name, time and number of the writing?"
    if a.keys()!=b.keys(): return False
    ms = [{k:v for k,v in json.loads(o['manifest.json']).items() if k not in ('uid','created','name','crc')}
        for o in (a,b)]
    return ms[0]==ms[1] and all(a[k]==b[k] for k in a if k!='manifest.json')

def is_tar(request): return request.partition('?')[0].endswith('.tar')
def gets(p, end='.tar'):
    return [(path.rsplit('/', 1)[-1],r) for m,path,r,_ in list(p.log) if m=='GET' and path.endswith(end)]

# --- what is to be there

def test_there_and_back(s3):
    "All samples, in the shards they should be in, as WebDataset's tars; and nothing else is left"
    got = opened(s3).get_many(range(N), ['jpg','cls','id'], check=True)
    assert sorted(got['id'].tolist())==list(range(N)) and all(got['jpg'][k]==ITEMS[i]['jpg']
        for k,i in enumerate(got['id'].tolist()))
    assert set(o:=objects(s3, 'pets'))=={'manifest.json', 'labels.json',
        *(f'shard-{k:06}.{e}' for k in range(8) for e in ('tar','tar.fastai_remote'))}
    with tarfile.open(fileobj=io.BytesIO(o['shard-000003.tar'])) as t: assert len(t.getnames())==3*EACH

def test_a_folder_whose_name_is_a_pattern_is_that_folder_alone(s3):
    "Files are read, listed and removed by their names; `run1` matches `run[1]`"
    for folder,content in (('run[1]',b'own'), ('run1',b'other'), ('run*',b'own'), ('run?',b'own')):
        for name in 'ab': put(s3, folder, name, content)
    for folder in ('run[1]','run*','run?'):
        storage = Storage(url(s3, folder), storage_options=opts(s3))
        assert storage.names()==storage.files()==['a','b'] and storage.read('a')==b'own'
        assert storage.ranges(['a'], [0], [2])==[b'ow'] and storage.size_and_stamp('a')[0]==3
        storage.write('c', b'c')
        storage.remove(['a','b'])
        assert storage.names()==['c'] and names(s3, 'run1')==['a','b']
        storage.remove(['c'])

def test_what_botocore_knows_about_s3_is_read_once(s3, monkeypatch):
    "Of two stores, the second makes its client without the files that describe the services of AWS"
    from botocore.loaders import JSONFileLoader
    assert opened(s3)[0]
    def load_file(self, path): raise AssertionError(f'{path} is read again')
    monkeypatch.setattr(JSONFileLoader, 'load_file', load_file)
    assert opened(s3)[0]

def test_two_writers(s3):
    "The same with two processes, byte for byte"
    assert make(s3, 'twice', num_workers=2).written==N
    assert alike(objects(s3, 'pets'), objects(s3, 'twice'))

@workers
@pytest.mark.parametrize('cached', [True,False])
def test_epochs(s3, tmp_path, num_workers, cached):
    "Every sample once an epoch, with a cache and without"
    dls = loaders(opened(s3, cache=str(tmp_path/'c') if cached else None), num_workers=num_workers)
    for _ in range(2): assert epoch(dls)==list(range(N))

def test_threads(s3, tmp_path):
    "One store, many threads; the first requests of a process, and of a cache, come at the same time"
    for cache in (None, str(tmp_path/'c')):
        store = opened(s3, cache=cache)
        with ThreadPoolExecutor(8) as ex:
            got = list(ex.map(lambda i: store.get_many([i,(i+31)%N], ['jpg','id'], check=True), range(N)))
        assert all(g['jpg'][j]==ITEMS[g['id'][j]]['jpg'] for g in got for j in (0,1))

def test_usual_cache(s3, tmp_path):
    "Without being told, whole shards go where the environment says"
    assert epoch(loaders(ShardStore(url(s3), storage_options=opts(s3))))==list(range(N))
    assert len(list((tmp_path/'usual').glob('*/*.tar')))==8

# --- who may, and who may not

def how(s, tmp_path, monkeypatch, way):
    "Options that give the credentials in one of the usual ways"
    get_reusable_executor().shutdown()   # joblib's processes live on, with the environment they were started in
    if way=='options': return opts(s)
    if way=='s3_options': return s3_options(s.endpoint, s.key, s.secret)
    if way=='environment':
        monkeypatch.setenv('AWS_ACCESS_KEY_ID', s.key)
        monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', s.secret)
        return s3_options(s.endpoint)
    if way=='all from environment':
        monkeypatch.setenv('AWS_ENDPOINT_URL', s.endpoint)
        return how(s, tmp_path, monkeypatch, 'environment') and {}
    (tmp_path/'credentials').write_text(f'[someone]\naws_access_key_id = {s.key}\naws_secret_access_key = {s.secret}\n')
    return dict(profile='someone', endpoint_url=s.endpoint)

@pytest.mark.parametrize('way', ['options','s3_options','environment','all from environment','profile'])
def test_ways_in(s3, tmp_path, monkeypatch, way):
    "Every usual way of being let in: for writing, reading, in workers, and deleting"
    kw,u = how(s3, tmp_path, monkeypatch, way),url(s3, f"w-{way.replace(' ', '-')}")
    assert to_shards(ITEMS[:40], u, num_workers=2, progress=False, storage_options=kw).written==40
    assert sum(len(y) for _,y in DataLoaders.from_shards(u, y='id', bs=8, num_workers=2, device='cpu', cache=None,
        valid_pct=.5, storage_options=kw).valid)==20
    ShardStore.delete(u, storage_options=kw)
    with pytest.raises(StoreNotFound, match='no dataset here'): ShardStore(u, storage_options=kw)

def doors(s, at=None, **kw):
    "All that asks a server: `{name: function}`"
    kw = {**opts(s, at), **kw}
    return dict(store=lambda: ShardStore(url(s), storage_options=kw),
        loaders=lambda: DataLoaders.from_shards(url(s), storage_options=kw),
        write=lambda: to_shards(ITEMS, url(s, 'w'), num_workers=1, progress=False, storage_options=kw),
                index=lambda: index_shards(url(s), num_workers=1, progress=False, storage_options=kw),
                delete=lambda: ShardStore.delete(url(s), storage_options=kw))
door = pytest.mark.parametrize('door', ['store','loaders','write','index','delete'])

@door
def test_wrong_secret(s3, proxy, door):
    "Refused at once, with the address and the server's words, asked for hardly more than once; the secret is not in it"
    if not s3.strict: pytest.skip('moto takes any signature')
    with in_time(), pytest.raises(StoreUnavailable, match=f's3://{s3.bucket}/.*refused.*1 attempt') as e:
        doors(s3, proxy, secret=WRONG)[door]()
    assert WRONG not in ''.join(traceback.format_exception(e.value)) and proxy.requests.total()<=4, proxy.log

@door
def test_forbidden(s3, proxy, door):
    "The same for an account that may not"
    proxy.fail(403, 'AccessDenied', n=INF)
    with in_time(), pytest.raises(StoreUnavailable, match=f's3://{s3.bucket}/.*refused: AccessDenied|Forbidden'):
        doors(s3, proxy)[door]()
    assert proxy.requests.total()<=4, proxy.log

@workers
def test_forbidden_in_epoch(s3, proxy, num_workers):
    "Rights that are taken away in the middle of an epoch: said at once, in parent and workers; no storm"
    dls = loaders(opened(s3, proxy), num_workers=num_workers)
    dls.one_batch()
    proxy.clear().fail(403, 'AccessDenied', n=INF)
    with in_time(), fails(StoreUnavailable, 'refused: AccessDenied'): epoch(dls)
    assert proxy.requests.total()<=100, Counter(proxy.log)

@door
def test_no_credentials(s3, door):
    "None anywhere: said at once"
    with in_time(), pytest.raises(StoreUnavailable, match=r'refused: Unable to locate credentials'):
        doors(s3, key=None, secret=None)[door]()

def test_no_such_profile(s3):
    "A profile that is not there is named"
    with in_time(), pytest.raises(Exception, match='nobody') as e:
        ShardStore(url(s3), storage_options=dict(endpoint_url=s3.endpoint, profile='nobody'))
    assert isinstance(e.value, StoreUnavailable)

class Tokens:
    "A credentials file with a session token, and a proxy that takes only the token of the day"
    def __init__(self, s, proxy, path):
        self.s,self.path,self.good = s,path,None
        self.give('one')
        proxy.fail(400, 'ExpiredToken', n=INF, match=lambda req: req.header('x-amz-security-token')!=self.good)
    def give(self, token):
        self.good = token
        self.path.write_text(f'[default]\naws_access_key_id = {self.s.key}\n'
            f'aws_secret_access_key = {self.s.secret}\naws_session_token = {token}\n')

@pytest.fixture
def tokens(s3, proxy, tmp_path): return Tokens(s3, proxy, tmp_path/'credentials')

@workers
def test_expired_in_epoch(s3, proxy, tokens, num_workers):
    """Credentials run out in mid-epoch, and others are where they came from: taken, in parent and workers, and no
    sample is lost"""
    dls = loaders(ShardStore(url(s3), cache=None, storage_options=dict(endpoint_url=proxy.endpoint)),
        num_workers=num_workers, prefetch=2)
    dl,seen = dls.train.new(drop_last=False),[]
    for k,(_,y) in enumerate(dl):
        seen += y.long().tolist()
        if k==1: tokens.give('two')
    assert sorted(seen+ids(dls.valid))==list(range(N))
    assert sum(o[3]==400 for o in proxy.log)<=90   # one burst of ranges a process

def test_expired_in_threads(s3, proxy, tokens):
    "Of many threads that are refused at the same time, all go on"
    store = ShardStore(url(s3), cache=None, storage_options=dict(endpoint_url=proxy.endpoint))
    store.get_many(range(N), 'id')
    proxy.latency = .02
    for day in ('two','three'):
        tokens.give(day)
        with ThreadPoolExecutor(8) as ex:
            assert sum(len(o['jpg']) for o in ex.map(lambda i: store.get_many([i], 'jpg'), range(64)))==64

def test_expired_for_good(s3, proxy, tokens):
    "Nobody renewed them: refused, soon, and the server's word for it"
    store = ShardStore(url(s3), cache=None, storage_options=dict(endpoint_url=proxy.endpoint))
    store.get_many([0], 'jpg')
    tokens.good = 'another'
    n = proxy.requests.total()
    with in_time(), pytest.raises(StoreUnavailable, match='refused: ExpiredToken.*2 attempts'):
        store.get_many([0], 'jpg')
    assert proxy.requests.total()-n<=4

def test_expired_in_ingest(s3, proxy, tokens):
    "An ingest outlives its credentials"
    def fn(o):
        if o['id']==ITEMS[100]['id']: tokens.give('two')
        return o
    assert to_shards(ITEMS, url(s3, 'renewed'), fn=fn, num_workers=1, maxcount=EACH, progress=False,
        storage_options=dict(endpoint_url=proxy.endpoint)).written==N
    assert alike(objects(s3, 'pets'), objects(s3, 'renewed'))

# --- wrong addresses

@pytest.mark.parametrize('door', ['store','loaders','write','index','delete'])
def test_no_such_bucket(s3, door):
    "A bucket that is not there: said, with the address, at every door"
    class Elsewhere: bucket,endpoint,key,secret = 'nowhere-at-all',s3.endpoint,s3.key,s3.secret
    with in_time(), pytest.raises((StoreError,FileNotFoundError), match='s3://nowhere-at-all/(pets|w).*'):
        doors(Elsewhere)[door]()

def test_no_such_folder(s3, own):
    "An empty folder; one with other things; one with tars and no manifest"
    with pytest.raises(StoreNotFound, match='no such folder, or an empty one'): opened(s3, folder='nope')
    with pytest.raises(StoreNotFound, match='there are: .*pets'):
        ShardStore(f's3://{s3.bucket}', storage_options=opts(s3))
    put(s3, 'other', 'a.txt', b'x')
    with pytest.raises(StoreNotFound, match='there are: a.txt'): opened(s3, folder='other')
    s3.client().delete_object(Bucket=s3.bucket, Key=f'{own}/manifest.json')
    with pytest.raises(StoreNotFound, match='index_shards'): opened(s3, folder=own)
    with pytest.raises(StoreExists, match='is there, and no manifest'): make(s3, own)

@pytest.mark.parametrize('endpoint', ['http://127.0.0.1:9','http://nowhere.invalid:9000'])
def test_nobody_there(s3, endpoint):
    "No server, no such host: within seconds, with the address"
    with in_time(), pytest.raises(StoreUnavailable, match=f's3://{s3.bucket}/pets.*attempt'):
        ShardStore(url(s3), timeout=2, storage_options={**opts(s3), 'endpoint_url':endpoint})

# --- a server that is busy, breaks off, goes away

@workers
def test_busy_for_a_while(s3, proxy, tmp_path, num_workers):
    "503s pass: the epoch goes on, and the server is not asked much more often than it must"
    dls = loaders(opened(s3, proxy, cache=str(tmp_path/'c')), num_workers=num_workers)
    dls.one_batch()
    f = proxy.fail(503, 'SlowDown', n=25, match=is_tar)
    assert epoch(dls)==list(range(N)) and f.n==0
    assert sum(o[3]==503 for o in proxy.log)==25

def test_busy_requests_are_bounded(s3, proxy):
    """What has come is not asked for again: of a batch's ranges only those that failed

    And between attempts there is time."""
    store = opened(s3, proxy)
    store.get_many(range(N), 'id')
    proxy.clear().fail(503, 'SlowDown', n=INF, match='shard-000005.tar')
    proxy.latency = .001
    def later(): time.sleep(1.5); proxy.faults.clear()
    (t:=threading.Thread(target=later)).start()
    assert len(store.get_many(range(0, N, 7), 'jpg', check=True)['jpg'])==35
    t.join()
    c = Counter(n for n,_ in gets(proxy))
    assert c.pop('shard-000005.tar')<=12 and set(c.values())=={1}

@pytest.mark.parametrize('code', [(503,'SlowDown'),(500,'InternalError'),(503,'ServiceUnavailable')])
def test_busy_for_ever(s3, proxy, code):
    "`StoreUnavailable` when the time stated is over: address, attempts, seconds"
    store = opened(s3, proxy, timeout=60)   # on a busy machine, the first request takes seconds
    store.get_many([0], 'id')
    store.storage.timeout = 6
    proxy.fail(*code, n=INF)
    with in_time(), pytest.raises(StoreUnavailable,
            match=rf's3://{s3.bucket}/pets: .*{code[1]}.*\d+ attempts? in \d+\.\d s'):
        store.get_many([0], 'jpg')
    proxy.clear()
    assert len(store.get_many([0], 'jpg')['jpg'])==1

def test_busy_for_ever_in_loader(s3, proxy, num_workers=2):
    "The same out of the loader and its workers"
    dls = loaders(opened(s3, proxy, timeout=6), num_workers=num_workers)
    dls.one_batch()
    proxy.fail(503, 'SlowDown', n=INF)
    with in_time(), fails(StoreUnavailable, r'\d+ attempts? in \d+\.\d s'): epoch(dls)

@pytest.mark.parametrize('fault',
    [lambda p: p.reset(n=9, match=is_tar), lambda p: p.cut(0, n=5, match=is_tar),
    lambda p: p.cut(700, n=9, match=is_tar), lambda p: p.reset(n=4, match='.fastai_remote')],
    ids=['reset','cut at 0','cut','reset index'])
@pytest.mark.parametrize('cached', [True,False])
def test_line_breaks(s3, proxy, tmp_path, fault, cached):
    "Connections that are reset, or break off in the middle of an answer: asked again, and answered right"
    store = opened(s3, proxy, cache=str(tmp_path/'c') if cached else None)
    fault(proxy)
    if cached: store.prefetch(list(range(8)), wait=True)
    got = store.get_many(range(N), ['jpg','id'], check=True)
    assert all(b==ITEMS[i]['jpg'] for b,i in zip(got['jpg'], got['id'].tolist())) and proxy.faults[0].n==0

@workers
def test_server_goes_and_comes(s3, proxy, tmp_path, num_workers):
    "A server that is away for a second, all connections lost: every sample comes, once"
    dls = loaders(opened(s3, proxy, timeout=120), num_workers=num_workers, bs=8)
    dl,seen,ts = dls.train.new(drop_last=False),[],[]
    def later():
        time.sleep(1)   # so that some requests fail; the test is right without it, too
        proxy.__enter__()
    for k,(_,y) in enumerate(dl):
        seen += y.long().tolist()
        if k==2:
            proxy.__exit__()
            ts.append(threading.Thread(target=later)); ts[0].start()
    ts[0].join()
    assert sorted(seen+ids(dls.valid))==list(range(N))

# --- damage on the way, and at rest

def flipped(b, at):
    "`b` with a byte that is another"
    b = bytearray(b)
    b[at] ^= 0x55
    return bytes(b)

def place(store, i, f='jpg'):
    "Name of the shard of sample `i`, offset and length of field `f` in it"
    u,k = (int(o[0]) for o in store.shards.at(np.array([i])))
    a,n = store.indices([u])[u].spans(f, np.array([k]))
    return store.shards.name(u),int(a[0]),int(n[0])

@pytest.mark.parametrize('fault', ['flip','short'])
def test_damaged_on_the_way(s3, proxy, fault):
    "A range that comes damaged, or short, is asked for again"
    store = opened(s3, proxy)
    store.get_many(range(N), 'id')
    proxy.flip(match=is_tar) if fault=='flip' else proxy.short(50, match=is_tar)
    assert store.get_many([5,6], 'jpg', check=True)['jpg']==opened(s3).get_many([5,6],
        'jpg')['jpg'] and proxy.faults[0].n==0

@pytest.mark.parametrize('fault', ['flip','short'])
def test_always_damaged_on_the_way(s3, proxy, fault):
    "If it stays so: shard, offset and sample are named, after a few requests"
    store = opened(s3, proxy)
    name,at,n = place(store, 5)
    proxy.clear()
    proxy.flip(n=INF, match=is_tar) if fault=='flip' else proxy.short(50, n=INF, match=is_tar)
    with pytest.raises(CorruptSample,
            match=f"pets: sample 5, field 'jpg' in {name} at byte {at:,}: .*{n if fault=='flip' else n-50}"):
        store.get_many([5], 'jpg', check=True)
    assert len(gets(proxy))<=6

def test_damaged_sample(s3, own, tmp_path, num_workers=2):
    """A sample that is damaged where it is stored: named

    With a stand-in the epoch finishes, says so, and loses no other."""
    store = opened(s3, folder=own)
    name,at,n = place(store, 77)
    put(s3, own, name, flipped(objects(s3, own)[name], at+n//2))
    for cache in (None, str(tmp_path/'c')):
        store = opened(s3, folder=own, cache=cache)
        with fails(CorruptSample, f"pets: sample 77, field 'jpg' in {name} at byte {at:,}"):
            epoch(loaders(store, num_workers=num_workers))
        dls = loaders(store, num_workers=num_workers, on_bad='replace', valid_pct=0.)
        dl = dls.train.new(drop_last=False)
        with pytest.warns(UserWarning, match='1 samples were missing or damaged.*77'): got = ids(dl)
        bad = int(store.get_many([77], 'id')['id'][0])
        assert dl.replaced==[77] and len(got)==N and set(range(N))-set(got)<={bad} and len(set(got))>=N-1

@pytest.mark.parametrize('fault', ['flip','short','cut'])
def test_whole_shard_damaged_on_the_way(s3, proxy, tmp_path, fault):
    "Noticed by length and checksum, and fetched again; what is in the cache is right"
    store = opened(s3, proxy, cache=str(tmp_path/'c'))
    store.get_many(range(N), 'id')
    proxy.clear()
    {'flip':lambda: proxy.flip(n=2, match=is_tar), 'short':lambda: proxy.short(999, n=2, match=is_tar),
        'cut':lambda: proxy.cut(999, n=2, match=is_tar)}[fault]()
    store.prefetch([3], wait=True)
    assert len(store.get_many(range(3*EACH, 4*EACH), 'jpg', check=True)['jpg'])==EACH
    assert (tmp_path/'c').glob('*/shard-000003.tar').__next__().read_bytes()==objects(s3,
        'pets')['shard-000003.tar'] and len(gets(proxy))==3

def test_truncated_shard(s3, own, tmp_path, num_workers=2):
    """A shard cut off at rest: fetched three times, not kept, whole samples read one by one, the others named or
    stood in for"""
    name = 'shard-000004.tar'
    b = objects(s3, own)[name]
    put(s3, own, name, b[:len(b)//2])
    with S3Proxy(s3.endpoint) as p:
        store = opened(s3, p, folder=own, cache=str(tmp_path/'c'))
        store.prefetch([4], wait=True)
        assert len(store.get_many([4*EACH,4*EACH+1], 'jpg', check=True)['jpg'])==2
        whole = [o for o in gets(p) if o[0]==name and (o[1] or 'bytes=0-').startswith('bytes=0-')]
        # each short answer is asked for again as well
        assert 3<=len(whole)<=9 and not list((tmp_path/'c').glob(f'*/{name}'))
        with pytest.raises(CorruptSample,
                match=rf"pets: sample 149, field 'jpg' in {name} at byte .*: 0 of [\d,]+ bytes: the shard is cut off"):
            store.get_many([149], 'jpg')
        dls = loaders(store, num_workers=num_workers, on_bad='replace', valid_pct=0.)
        dl = dls.train.new(drop_last=False)
        with pytest.warns(UserWarning, match='samples were missing or damaged'): got = ids(dl)
        lost = set(range(N))-set(got)
        assert len(got)==N and 0<len(dl.replaced)<EACH and len(lost)<=len(dl.replaced) and all(4*EACH<=i<5*EACH
            for i in dl.replaced)

@pytest.mark.parametrize('fault', ['flip','short'])
def test_index_damaged_on_the_way(s3, proxy, fault):
    "Asked for again"
    store = opened(s3, proxy)
    proxy.flip(match='.fastai_remote') if fault=='flip' else proxy.short(99, match='.fastai_remote')
    assert len(store.get_many(range(N), 'jpg', check=True)['jpg'])==N and proxy.faults[0].n==0

@pytest.mark.parametrize('damage',
    [lambda b: b'', lambda b: b[:40], lambda b: b[:-9], lambda b: flipped(b, len(b)-99), lambda b: flipped(b, 2),
    lambda b: flipped(b, 30), lambda b: os.urandom(len(b)), None],
                         ids=['empty','head','short','value','magic','header','noise','gone'])
@pytest.mark.parametrize('cached', [True,False])
def test_damaged_index(s3, own, tmp_path, damage, cached):
    "Dataset and index are named; nothing of it stays in the cache"
    name = 'shard-000002.tar.fastai_remote'
    if damage: put(s3, own, name, damage(objects(s3, own)[name]))
    else: s3.client().delete_object(Bucket=s3.bucket, Key=f'{own}/{name}')
    store = opened(s3, folder=own, cache=str(tmp_path/'c') if cached else None)
    with pytest.raises((CorruptSample,MissingSample), match='pets: .*shard-000002'): store.get_many([2*EACH], 'jpg')
    assert not list((tmp_path/'c').glob(f'*/{name}')) and len(store.get_many([0], 'jpg')['jpg'])==1

def changed(b, f):
    "`b`, a manifest, with the table of shards as `f` changes it, and a checksum that is right: what it says is wrong"
    f((d:=json.loads(b))['shards'])
    return sealed(d)
def sealed(d): return seal({k:v for k,v in d.items() if k!='crc'}).encode()
def middle(b): return changed(b, lambda t: t.update(n=t['n'][:-8]+'AAAAAAA='))
def fewer(b): return changed(b, lambda t: t.pop('size'))

@pytest.mark.parametrize('damage',
    [lambda b: b'', lambda b: b[:-50], lambda b: flipped(b, 0), lambda b: b'[]', lambda b: b'{"format":1}', fewer,
    middle, lambda b: sealed({**json.loads(b), 'n':250}), lambda b: os.urandom(500)],
                         ids=['empty','short','first','list','nothing','fewer','table','other n','noise'])
def test_damaged_manifest(s3, own, damage):
    "It is said that it is, and where"
    put(s3, own, 'manifest.json', damage(objects(s3, own)['manifest.json']))
    with pytest.raises((UnsupportedFormat,StoreNotFound), match=f'{own}/manifest.json'): opened(s3, folder=own)

def test_manifest_that_does_not_match_its_checksum(s3, own):
    put(s3, own, 'manifest.json', objects(s3, own)['manifest.json'].replace(b'"n":240', b'"n":250'))
    with pytest.raises(CorruptSample, match=f'{own}/manifest.json: the manifest does not match its checksum'):
        opened(s3, folder=own)

def test_shard_deleted_in_epoch(s3, own, tmp_path, num_workers=2):
    "Dataset, shard and its samples are named; with a stand-in the epoch finishes"
    def go(**kw):
        store = opened(s3, folder=own, cache=str(tmp_path/'c'))
        store.get_many(range(N), 'id')
        s3.client().delete_object(Bucket=s3.bucket, Key=f'{own}/shard-000006.tar')
        return loaders(store, num_workers=num_workers, valid_pct=0., **kw).train.new(drop_last=False)
    message = 'pets: shard shard-000006.tar is not there, with samples 180 to 209: .*/shard-000006.tar'
    with fails(MissingSample, message):
        ids(go())
    dl = go(on_bad='replace')
    with pytest.warns(UserWarning, match='30 samples were missing or damaged'): got = ids(dl)
    assert len(got)==N and dl.replaced==list(range(180, 210))

@pytest.mark.parametrize('cached', [True,False])
@pytest.mark.parametrize('how', ['overwrite','delete and write'])
def test_replaced_under_a_reader(s3, own, tmp_path, cached, how):
    "A dataset that is replaced while it is read is not taken for the old one, and is not called damaged"
    store = opened(s3, folder=own, cache=str(tmp_path/'c') if cached else None)
    store.get_many(range(N), 'id')
    if how!='overwrite': ShardStore.delete(url(s3, own), storage_options=opts(s3))
    make(s3, own, [{'jpg':noise(1000+i), 'cls':'x', 'id':1000+i} for i in range(N)], overwrite=how=='overwrite')
    for _ in range(2):
        with pytest.raises(StoreNotFound, match=f'{own}: replaced since it was opened: open it again'):
            store.get_many(range(N), 'jpg', check=True)
    new = opened(s3, folder=own, cache=str(tmp_path/'c') if cached else None)
    got = new.get_many(range(N), ['jpg','id'], check=True)
    assert got['id'].min()==1000 and got['jpg'][9]==noise(int(got['id'][9]))

def test_replaced_in_epoch(s3, own, num_workers=2):
    "The same in the loader"
    dls = loaders(opened(s3, folder=own), num_workers=num_workers)
    dls.one_batch()
    make(s3, own, overwrite=True)
    with fails(StoreNotFound, 'replaced since it was opened'): epoch(dls)

# --- ingests that meet, die, or find the server busy

def test_ingest_through_busy_server(s3, proxy):
    "503s, resets and 500s on the way: the same objects as without"
    for f in (lambda m: proxy.fail(503, 'SlowDown', n=3, match=m), lambda m: proxy.reset(n=3, match=m)):
        f('PUT ')
        f('.ingest/chunk')
    proxy.fail(500, 'InternalError', n=3, match='DELETE ')
    assert make(s3, 'busy', at=proxy).written==N and alike(objects(s3, 'pets'), objects(s3, 'busy'))

@pytest.mark.parametrize('at,num_workers',
    [('shard-000003.tar',1),('shard-000003.tar.fastai_remote',1),('chunk-000003',2),('manifest.json',1)])
def test_ingest_interrupted(s3, proxy, at, num_workers):
    """A server that refuses from some point on: `StoreUnavailable` in time, nothing to be seen by readers

    Repeated, the same bytes as without it."""
    to = f"stop-{num_workers}-{at.split('.')[-1].split('-')[0]}"
    proxy.fail(503, 'SlowDown', n=INF, match=lambda r: r.startswith('PUT ') and at in r)
    with in_time(), pytest.raises(StoreUnavailable, match=rf'{to}: .*SlowDown.*attempts?'):
        make(s3, to, at=proxy, timeout=6*busy(), num_workers=num_workers)
    with pytest.raises(StoreNotFound, match='not finished'): opened(s3, folder=to)
    proxy.clear()
    rep = make(s3, to, at=proxy)
    assert rep.written==N and rep.resumed>=(N if at=='manifest.json' else 60) and alike(objects(s3, 'pets'),
        objects(s3, to))

def test_ingest_server_gone(s3, proxy):
    "A server that is gone altogether: it does not take much longer than the time stated, locks and all"
    def fn(o):
        if o['id']==100: proxy.fail(503, 'SlowDown', n=INF)
        return o
    with in_time(), pytest.raises(StoreUnavailable, match='attempt'):
        make(s3, 'gone', at=proxy, fn=fn, timeout=6, shuffle=False)
    with pytest.raises(StoreNotFound): opened(s3, folder='gone')
    ShardStore.abandon(url(s3, 'gone'), storage_options=opts(s3))
    assert not names(s3, 'gone')

_ingest = HOLD + '''
import sys
from fastai_remote import to_shards
def fn(o): hold(); return {'txt':f"sample {o['id']} "*30, 'cls':'abc'[o['id']%3], 'id':o['id']}
to_shards([{'id':i} for i in range(240)], sys.argv[1], fn=fn, num_workers=int(sys.argv[2]), maxcount=30, progress=False)
'''

@pytest.fixture
def ingest(s3, tmp_path, monkeypatch):
    "Starts an ingest as a process of its own; `hold`: each process stops after so many samples"
    (f:=tmp_path/'ingest.py').write_text(_ingest)
    how(s3, tmp_path, monkeypatch, 'all from environment')
    ps = []
    def go(u, num_workers, hold=None):
        ps.append(p:=subprocess.Popen([sys.executable, '-W', 'ignore', f, u, str(num_workers)], start_new_session=True,
            env=holding(hold, tmp_path/'never')))
        return p
    yield go
    for p in ps:
        try: os.killpg(p.pid, signal.SIGKILL)
        except ProcessLookupError: pass
        p.wait()

def test_ingest_killed(s3, ingest, num_workers=2):
    "Killed in the middle; meanwhile nobody else may write there; afterwards the same call ends as if nothing had been"
    # a chunk each, and a part of the next one
    p = ingest(url(s3, to:=f'killed-{num_workers}'), num_workers, hold=EACH+10)
    wait_for(lambda: p.poll() is not None or any('chunk-' in k for k in names(s3, to)))
    with pytest.raises(StoreBusy, match=rf'{to}: process {p.pid} on .* is writing here now \(\d of 8 chunks done\)'):
        make(s3, to)
    with pytest.raises(StoreNotFound, match='not finished'): opened(s3, folder=to)
    os.killpg(p.pid, signal.SIGKILL)
    p.wait()
    whole = f'whole-{num_workers}'
    ps = [ingest(url(s3, o), num_workers) for o in (to, whole)]
    assert [p.wait(300) for p in ps]==[0,0]
    assert alike(objects(s3, to), objects(s3, whole))

def test_two_at_once(s3):
    "Of two that begin at the same moment one is told to wait, and the other is not disturbed"
    def go(_):
        try: return make(s3, 'both').written
        except StoreBusy: return 0
        except StoreExists: return -1
    with ThreadPoolExecutor(2) as ex: res = list(ex.map(go, range(2)))
    assert N in res and sum(res)<=N and alike(objects(s3, 'pets'), objects(s3, 'both'))

def test_overwrite_meets_failure(s3, own, proxy):
    "While a dataset is being replaced, and where that fails, the old one is whole"
    proxy.fail(503, 'SlowDown', n=INF, match=lambda r: r.startswith('PUT ') and 'chunk-000004' in r)
    with pytest.raises(StoreUnavailable): make(s3, own, ITEMS[::-1], at=proxy, overwrite=True, timeout=6)
    assert epoch(loaders(opened(s3, folder=own)))==list(range(N))
    assert make(s3, own, ITEMS[::-1],
        overwrite=True).resumed>0 and epoch(loaders(opened(s3, folder=own)))==list(range(N))

@pytest.fixture
def small_parts(monkeypatch):
    "Uploads in parts of 5 MiB, the least there is, where s3fs would begin at 100 MB"
    monkeypatch.setattr('s3fs.core.calculate_chunksize', lambda size, chunksize=None, max_parts=0: 5<<20)

def test_shard_in_parts(s3, proxy, small_parts):
    "A large shard is uploaded in parts; one that fails is sent again, and no part is left behind"
    items = [{'bin':random.Random(i).randbytes(1<<20), 'id':i} for i in range(11)]
    f = proxy.fail(503, 'SlowDown', n=1, match='partNumber=2')
    assert to_shards(items, url(s3, 'parts'), num_workers=1, progress=False,
        storage_options=opts(s3, proxy)).written==11 and f.n==0
    assert sum(o[0]=='PUT' and 'partNumber=' in o[1] for o in proxy.log)>=5
    got = opened(s3, folder='parts').get_many(range(11), ['bin','id'], check=True)
    assert all(b==items[i]['bin'] for b,i in zip(got['bin'], got['id'].tolist()))
    assert not s3.client().list_multipart_uploads(Bucket=s3.bucket).get('Uploads')

def test_many_shards(s3, proxy, tmp_path):
    "More files than one page of a list has, which has 1,000: written, resumed, read, deleted"
    if s3.strict: pytest.skip('the same over moto, which is quicker')
    n = 510   # shards; each has an index, too
    items = [{'bin':bytes([i%256])*9, 'id':i} for i in range(n)]
    f = proxy.fail(403, 'AccessDenied', n=INF, match='shard-000009')
    with pytest.raises(StoreUnavailable, match='refused'):
        make(s3, 'many', items, at=proxy, maxcount=1, chunk=51, shuffle=False)
    f.n = 0
    assert make(s3, 'many', items, at=proxy, maxcount=1, chunk=51, shuffle=False).resumed==459
    store = opened(s3, proxy, folder='many', timeout=120)   # 510 requests are one call
    assert len(store.shards)==n and store.get_many(range(n), ['bin','id'], check=True)['id'].tolist()==list(range(n))
    assert sum(k.endswith('.tar')
        for k in names(s3, 'many'))==n and len(names(s3, 'many'))==2*n+1 and not any('.ingest' in k
        for k in names(s3, 'many'))
    ShardStore.delete(url(s3, 'many'), storage_options=opts(s3))
    assert not names(s3, 'many')

# --- shards of others

def tar(samples):
    "A tar as WebDataset writes it"
    with tarfile.open(fileobj=(b:=io.BytesIO()), mode='w') as t:
        for k,s in samples:
            for f,v in s.items():
                (i:=tarfile.TarInfo(f'{k:05}.{f}')).size = len(v)
                t.addfile(i, io.BytesIO(v))
    return b.getvalue()

@pytest.fixture
def foreign(s3):
    "Three tars of others"
    to = f'foreign-{time.monotonic_ns()}'
    for k in range(3):
        put(s3, to, f'part-{k}.tar', tar((i, {'jpg':ITEMS[i]['jpg'], 'cls':str(i%3).encode()})
            for i in range(k*EACH, (k+1)*EACH)))
    return to

def indexed(s, folder, at=None, **kw):
    return index_shards(url(s, folder), num_workers=1, progress=False, storage_options=opts(s, at), **kw)

@pytest.mark.parametrize('fault',
    [None, lambda p: p.fail(503, 'SlowDown', n=5), lambda p: p.cut(999, n=4, match=is_tar),
    lambda p: p.short(999, n=2, match='part-1.tar'), lambda p: p.short(3*EACH*512+512, n=1, match='part-2.tar')],
                         ids=['none','busy','cut','short','short again'])
def test_index(s3, foreign, proxy, fault):
    "Indexed where they are, whatever happens on the way: every sample, and the bytes"
    if fault: fault(proxy)
    rep = indexed(s3, foreign, proxy)
    assert (rep.written,rep.failed)==(3*EACH,0) and (not fault or proxy.faults[0].n==0)
    got = opened(s3, folder=foreign).get_many(range(3*EACH), ['jpg','cls'], check=True)
    assert got['jpg']==[o['jpg'] for o in ITEMS[:3*EACH]] and got['cls'].tolist()==[i%3 for i in range(3*EACH)]

def test_index_never_whole(s3, foreign, proxy):
    "Answers that stay short are not taken for the end of a shard"
    proxy.short(3000, n=INF, match='part-1.tar')
    with pytest.raises(StoreUnavailable, match='part-1.tar: .* bytes came of'): indexed(s3, foreign, proxy, timeout=6)
    with pytest.raises(StoreNotFound): opened(s3, folder=foreign)
    proxy.clear()
    assert indexed(s3, foreign, proxy).written==3*EACH

def test_index_of_truncated(s3, foreign):
    "A tar that is cut off: what is whole is there, the rest is reported; both read back"
    b = objects(s3, foreign)['part-1.tar']
    put(s3, foreign, 'part-1.tar', b[:len(b)//2-100])
    rep = indexed(s3, foreign)
    assert rep.failed==1 and 2*EACH<rep.written<3*EACH and re.search('part-1.tar: after 000.*cut off',
        str(rep.failures))
    store = opened(s3, folder=foreign)
    assert len(store.get_many(range(len(store)), 'jpg', check=True)['jpg'])==rep.written

def test_index_elsewhere(s3, foreign, tmp_path):
    "Manifest and indices on a disk, shards on the server, whose options are given again; deleting takes what is ours"
    index_shards(url(s3, foreign), to=str(tmp_path/'ix'), num_workers=2, progress=False, storage_options=opts(s3))
    assert set(objects(s3, foreign))=={f'part-{k}.tar' for k in range(3)}
    store = ShardStore(str(tmp_path/'ix'), cache=str(tmp_path/'c'), storage_options=opts(s3),
        shards_url=url(s3, foreign))
    assert len(ids(loaders(store, y='cls', num_workers=2, valid_pct=0.).train.new(drop_last=False)))==3*EACH
    assert s3.secret.encode() not in b''.join(p.read_bytes() for p in (tmp_path/'ix').rglob('*') if p.is_file())
    indexed(s3, foreign)
    ShardStore.delete(url(s3, foreign), storage_options=opts(s3))
    assert set(objects(s3, foreign))=={f'part-{k}.tar' for k in range(3)}

# --- secrets

def says_none(s, *texts):
    "Assert that no secret is in `texts`, which may be bytes"
    for t in texts: assert s.secret.encode() not in (t if isinstance(t, bytes) else str(t).encode()), t

def test_secrets_in_nothing_kept(s3, proxy, tmp_path, caplog):
    "Not in what is shown, logged, pickled, exported or stored"
    caplog.set_level(logging.DEBUG, 'fastai_remote')
    store = ShardStore(url(s3), cache=str(tmp_path/'c'), storage_options=s3_options(s3.endpoint, s3.key, s3.secret))
    dls = loaders(store, num_workers=2)
    learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(3*16*16, 1)), MSELossFlat(), path=tmp_path)
    learn.export('e.pkl')
    w = ShardWriter(store.storage)
    says_none(s3, repr(store), store._repr_html_(), repr(store.storage), repr(store.cache), repr(dls.train),
        repr(dls.train_ds), repr(store.opener()), repr(w.opener()), repr(s3_options(s3.endpoint, s3.key, s3.secret)),
        store.manifest.to_json(), repr(store.manifest), pickle.dumps(store), pickle.dumps(store.storage),
        pickle.dumps(copy.deepcopy(dls.train_ds)), pickle.dumps(dls),
        pickle.dumps(s3_options(s3.endpoint, s3.key, s3.secret)), (tmp_path/'e.pkl').read_bytes(), caplog.text)
    says_none(s3, *objects(s3, 'pets').values(), *(p.read_bytes() for p in (tmp_path/'c').rglob('*') if p.is_file()))

@pytest.mark.parametrize('num_workers', [1,2])
def test_secrets_in_no_ingest(s3, proxy, num_workers):
    "Nor in the report, in what an ingest leaves, or in how it fails"
    rep = make(s3, f'said-{num_workers}', [*ITEMS, {'bin':3}], num_workers=num_workers)
    assert rep.failed==1
    says_none(s3, repr(rep), rep._repr_html_(), vars(rep))
    proxy.fail(403, 'AccessDenied', n=INF, match='chunk-000003')
    with pytest.raises(StoreUnavailable) as e: make(s3, f'half-{num_workers}', at=proxy, num_workers=num_workers)
    says_none(s3, e.value, repr(e.value), ''.join(traceback.format_exception(e.value)))
    left = objects(s3, f'half-{num_workers}')
    assert any('.ingest/plan' in k for k in left)
    says_none(s3, *left.values())

def test_secrets_in_errors(s3, proxy):
    "An error that repeats what it was given does not repeat the secret"
    store = opened(s3, proxy, timeout=6)
    for status,code in ((403,s3.secret),(503,s3.secret),(400,s3.secret)):
        proxy.clear().fail(status, code, n=INF)
        with pytest.raises(StoreError) as e: store.get_many([0], 'jpg')
        says_none(s3, e.value, repr(e.value))

def test_kept_pickle_asks_the_environment(s3, tmp_path, monkeypatch):
    "What was pickled has no secrets: it says what to set, and then it works"
    b = pickle.dumps(opened(s3))
    with in_time(), pytest.raises(StoreUnavailable, match='secrets are not kept in exports.*AWS_ACCESS_KEY_ID'):
        pickle.loads(b).get_many([0], 'jpg')
    how(s3, tmp_path, monkeypatch, 'environment')
    assert len(pickle.loads(b).get_many([0], 'jpg')['jpg'])==1
    says_none(s3, pickle.dumps(pickle.loads(b)))

_starts = '''
import json, os, sys, torch
from fastai.data.core import DataLoaders
import fastai_remote.block
if __name__=='__main__':
    u,how,kw = json.loads(os.environ.pop('ASKED'))
    torch.multiprocessing.set_start_method(how, force=True)
    torch.multiprocessing.get_context('forkserver').set_forkserver_preload(['fastai.data.core'])
    dls = DataLoaders.from_shards(u, y='id', bs=16, num_workers=1, device='cpu', storage_options=kw)
    print(sum(len(y) for _,y in dls.valid))
'''

@pytest.mark.parametrize('how', ['fork','spawn','forkserver'])
def test_secrets_reach_workers(s3, tmp_path, how, interpreters):
    "Loader workers are let in however they are started"
    if not s3.strict and how!='spawn': pytest.skip('moto takes any secret: one way will do')
    (f:=tmp_path/'starts.py').write_text(_starts)
    p = interpreters.run(f, env={**os.environ, 'ASKED':json.dumps([url(s3), how, opts(s3)])})
    assert p.stdout=='48\n', p.stderr
    says_none(s3, p.stdout, p.stderr)

# --- what it costs

def wholes(p, store):
    "How often each shard was fetched whole"
    size = {store.shards.name(u):int(store.shards.size[u]) for u in range(len(store.shards))}
    return Counter(n for n,r in gets(p) if r==f'bytes=0-{size[n]-1}')

def test_each_shard_once(s3, proxy, tmp_path):
    """Two workers with one cache fetch each shard once, and a few ranges while the first are on their way

    The second epoch asks for nothing."""
    store = opened(s3, proxy, cache=FileCache(str(tmp_path/'c')))
    dls = loaders(store, num_workers=2)
    proxy.clear()
    assert epoch(dls)==list(range(N))
    c = wholes(proxy, store)
    ranges,used = len(gets(proxy))-c.total(),sum(len(o['jpg']) for o in ITEMS)
    print(f'{c.total()} shards whole, {ranges} ranges, {proxy.bytes_out/used:.2f} bytes fetched for one used')
    assert len(c)==8 and set(c.values())=={1} and ranges<=4*2*8 and len(gets(proxy, '.fastai_remote'))<=2*8
    proxy.clear()
    assert epoch(dls)==list(range(N)) and not proxy.log

def test_neighbours_are_joined(s3, proxy):
    "In any order without a cache, neighbours in a batch come in one request, however many samples and fields there are"
    store = opened(s3, proxy)
    dls = loaders(store, interleave=None, bs=60, valid_pct=0.)
    store.get_many(range(N), 'id')
    proxy.clear()
    got = ids(dls.train)
    assert sorted(got)==list(range(N)) and len(gets(proxy))<=N//60*8*2 and not gets(proxy, '.fastai_remote')
    proxy.clear()
    store.get_many(range(2*EACH), ['jpg','cls','id'], check=True)
    assert len(gets(proxy))==2

def test_small_cache(s3, tmp_path):
    "A cache that cannot hold what is in flight is refused beforehand; one that holds a part of the whole will do"
    big = int(opened(s3).shards.size.max())
    with pytest.raises(ValueError, match='pets: 8 shards of up to .* the cache .* holds'):
        loaders(opened(s3, cache=str(tmp_path/'a'), cache_size=2*big), num_workers=2)
    dls = loaders(opened(s3, cache=str(tmp_path/'b'), cache_size=5*big), interleave=1, num_workers=2)
    for _ in range(2): assert epoch(dls)==list(range(N))
    assert FileCache(str(tmp_path/'b')).used()[0]<=5*big
