"Datasets with a field of an unusual name, a manifest that another tool has formatted, or files and keys that are empty or gone"
import http.server as http_server, io, json, os, pickle, re, shutil, subprocess, tarfile, threading

from contextlib import nullcontext

import numpy as np
import pytest

from fastai_remote.core import CorruptSample, Manifest, StoreNotFound, sum_content, UnsupportedFormat
from fastai_remote.ingest.index import index_shards
from fastai_remote.ingest.report import IngestError
from fastai_remote.ingest.run import ingest, to_redis
from fastai_remote.ingest.shards import to_shards
from fastai_remote.store.base import MemoryStore
from fastai_remote.store.redis import RedisStore
from fastai_remote.store.shards import ShardStore
from fastai_remote.store.storage import Storage
from fastai_remote.store.tiered import TieredStore
from fastai_remote.write.base import MemoryWriter

N = 20
SAMPLES = [{'txt':f'number {i}', 'z.cls':'ba'[i%2], 'a.cls':i%3, 'value.f4':i/7} for i in range(N)]
OPTIONS = dict(num_workers=1, progress=False)

@pytest.fixture
def folder(tmp_path):
    to_shards(SAMPLES, tmp_path/'shards', chunk=5, maxcount=5, shuffle=False, **OPTIONS)
    return tmp_path/'shards'

@pytest.fixture
def http(folder):
    "The folder over HTTP, from a server that knows ranges"
    class Handler(http_server.BaseHTTPRequestHandler):
        def _answer(self, content=True):
            path = folder/self.path.strip('/')
            b = path.read_bytes() if path.is_file() else None
            asked = re.fullmatch(r'bytes=(\d+)-(\d+)', self.headers.get('Range', ''))
            part = b if b is None or not asked else b[int(asked[1]):int(asked[2])+1]
            self.send_response(404 if b is None else 206 if asked else 200)
            self.send_header('Content-Length', str(len(part or b'')))
            self.send_header('Accept-Ranges', 'bytes')
            if asked and b: self.send_header('Content-Range', f'bytes {asked[1]}-{int(asked[1])+len(part)-1}/{len(b)}')
            self.end_headers()
            if content: self.wfile.write(part or b'')
        def do_GET(self): self._answer()
        def do_HEAD(self): self._answer(False)
        def log_message(self, *args): pass
    server = http_server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()
    server.server_close()

def values(store): return store.get_many(range(len(store)), store.fields, decode=True)

# A user's field x.crc

def refused(call):
    with pytest.raises((ValueError,IngestError), match=r"'x\.crc'.*\.crc.*checksums"): call()

@pytest.mark.parametrize('sample', [{'x.crc':7}, {'x':b'1', 'x.crc':7}, {'x':1., 'x.crc':b'1'}, {'x.crc':'text', 'x':'other'}], ids=str)
def test_a_field_that_would_hide_checksums_is_refused(sample, tmp_path, server):
    refused(lambda: ingest([sample], MemoryWriter(), **OPTIONS))
    refused(lambda: to_shards([sample], tmp_path/'d', **OPTIONS))
    refused(lambda: to_redis([sample], server.url, 'crc', **OPTIONS))
    refused(lambda: MemoryStore({field:[b'1'] for field in sample}))
    assert not RedisStore.unfinished(server.url) and not ShardStore.unfinished(tmp_path/'d')

def test_a_member_of_this_name_is_refused(tmp_path):
    "in a tar that others wrote"
    with tarfile.open(tmp_path/'a.tar', 'w') as tar:
        for i in range(3):
            for name in 'x.txt','x.crc':
                (info := tarfile.TarInfo(f'{i}.{name}')).size = 1
                tar.addfile(info, io.BytesIO(b'%d' % i))
    refused(lambda: index_shards(tmp_path, **OPTIONS))

# A manifest that jq has formatted

def whole_floats(o):
    "As some versions of jq write numbers: 1.0 as 1"
    if isinstance(o, dict): return {k:whole_floats(v) for k,v in o.items()}
    if isinstance(o, list): return list(map(whole_floats, o))
    return int(o) if isinstance(o, float) and o==int(o) else o

FORMATS = {'jq .': lambda d: json.dumps(d, indent=2, ensure_ascii=False)+'\n', 'jq -c': lambda d: json.dumps(d, separators=(',',':'), ensure_ascii=False)+'\n',
    'jq -S': lambda d: json.dumps(d, indent=2, sort_keys=True, ensure_ascii=False)+'\n', 'jq -cS': lambda d: json.dumps(d, separators=(',',':'), sort_keys=True, ensure_ascii=False)+'\n',
    'jq -a': lambda d: json.dumps(d, indent=2)+'\n', 'tab': lambda d: json.dumps(d, indent='\t'), 'old jq .': lambda d: json.dumps(whole_floats(d), indent=2)}

@pytest.fixture(params=['shards','http','redis','cache'])
def dataset(request, tmp_path, server):
    "`open()` opens the dataset, and `write(format)` formats its manifest anew"
    if request.param=='redis':
        to_redis(SAMPLES, server.url, 'jq', overwrite=True, **OPTIONS)
        def write(f): client.set('jq:meta', f(json.loads(client.get('jq:meta'))))
        import redis
        client = redis.Redis.from_url(server.url)
        yield (lambda: RedisStore(server.url, 'jq')),write
        return
    folder = request.getfixturevalue('folder')
    def write(f):
        path = folder/'manifest.json'
        path.write_text(f(json.loads(path.read_text())))
    if request.param=='http':
        url = request.getfixturevalue('http')
        yield (lambda: ShardStore(url, cache=tmp_path/'cache')),write
    else: yield (lambda: ShardStore(folder, cache=tmp_path/'cache' if request.param=='cache' else None)),write

@pytest.mark.parametrize('name', FORMATS)
def test_a_manifest_may_be_formatted_anew(dataset, name):
    "The dataset is the same for those who have it open, for those who open it, and for `verify`"
    open,write = dataset
    before = open()
    want = values(before)
    copy = pickle.dumps(before)
    other = open()
    write(FORMATS[name])
    other.new_epoch()
    assert values(before)==values(other)==want
    after = open()
    assert after.manifest==before.manifest and after.fields==before.fields and after.vocab==before.vocab
    assert list(after.manifest.vocab)==list(before.manifest.vocab)
    assert values(after)==values(pickle.loads(copy))==want
    for store in before,after: assert (report := store.verify(num_workers=1)).bad==0, report

@pytest.mark.skipif(not shutil.which('jq'), reason='jq is not installed')
@pytest.mark.parametrize('options', [['.'], ['-c','.'], ['-S','.'], ['-cS','.']], ids=' '.join)
def test_jq_itself(folder, options):
    want = values(store := ShardStore(folder))
    path = folder/'manifest.json'
    path.write_bytes(subprocess.run(['jq', *options], input=path.read_bytes(), capture_output=True, check=True).stdout)
    assert values(ShardStore(folder))==values(store)==want and ShardStore(folder).manifest==store.manifest
    assert store.verify(num_workers=1).bad==ShardStore(folder).verify(num_workers=1).bad==0

def test_a_dataset_that_jq_has_formatted_is_replaced(dataset):
    "The new dataset has another generation, whatever the manifest of the old one looks like"
    open,write = dataset
    write(FORMATS['jq .'])
    store = open()
    if isinstance(store, RedisStore): to_redis(SAMPLES[:7], store.link.url, 'jq', overwrite=True, **OPTIONS)
    elif store.storage.local: to_shards(SAMPLES[:7], store.storage.url, overwrite=True, shuffle=False, **OPTIONS)
    else: return
    assert sorted(o['txt'] for o in open())==[o['txt'] for o in SAMPLES[:7]] and open().verify(num_workers=1).bad==0

def test_whole_numbers_are_the_same_with_and_without_a_point():
    manifest = Manifest('d', 3, {'a.f4':{'codec':'f4', 'dtype':'f4'}}, stats={'jpg':{'mean':[1.,.5,0.], 'std':[1e-5], 'width':[1,50.,100]}}, uid='u').stamp()
    text = manifest.to_json()
    assert Manifest.from_json(text)==manifest and not manifest.altered(text.encode())
    assert '1.0,' in text and Manifest.from_json(text.replace('1.0,', '1,').replace('50.0', '50'))==manifest
    with pytest.raises(CorruptSample): Manifest.from_json(text.replace('50.0', '51'))
    changed = text.replace('1e-05', '1E-05').encode()
    assert 'means the same' in Manifest.from_json(changed).altered(changed)

def test_an_epoch_goes_on_while_the_manifest_is_formatted(dataset):
    open,write = dataset
    seen = []
    for k,sample in enumerate(_samples(open())):
        if k in (3,9): write(list(FORMATS.values())[k%4])
        seen.append(sample)
    assert sorted(seen)==sorted(o['txt'] for o in SAMPLES)

def _samples(store): return (store[int(i)]['txt'] for i in np.random.default_rng(0).permutation(len(store)))

def test_a_changed_manifest_is_damage(dataset):
    "also one that means nearly the same"
    open,write = dataset
    write(lambda d: json.dumps({**d, 'n':d['n']-1}))
    with pytest.raises((CorruptSample,UnsupportedFormat)): open()

# Keys that are gone

def test_an_evicted_manifest_is_named(fresh):
    import redis
    to_redis(SAMPLES, fresh.url, 'pets', **OPTIONS)
    client = redis.Redis.from_url(fresh.url)
    store = RedisStore(fresh.url, 'pets')
    client.config_set('maxmemory-policy', 'allkeys-lru')
    client.delete('pets:meta')   # as an eviction does
    for read in (lambda: store.get_many([1], 'txt'), lambda: store.get_many([1], 'value.f4'), lambda: store.get_many([1], 'txt', check=False), lambda: store[3], lambda: pickle.loads(pickle.dumps(store)).manifest, lambda: RedisStore(fresh.url, 'pets')):
        with pytest.raises(StoreNotFound, match=r"pets.*pets:meta.*(evict|drop).*allkeys-lru"): read()
    report = store.verify(num_workers=1)
    assert report.bad and any('pets:meta' in what for what,_ in report.rest) and any('allkeys-lru' in reason for _,reason in report.rest)
    client.config_set('maxmemory-policy', 'noeviction')
    with pytest.raises(StoreNotFound, match=r"pets:meta.*deleted"): RedisStore(fresh.url, 'pets')
    with pytest.raises(StoreNotFound, match=r"pets:meta.*deleted"): store[3]

def test_an_evicted_manifest_behind_a_tier(fresh, folder):
    store = TieredStore(fresh.url, ShardStore(folder))
    import redis
    want = values(store)
    client = redis.Redis.from_url(fresh.url)
    for key in client.keys():
        if key.endswith(b'meta'): client.delete(key)
    assert values(store)==want

# Files that are empty or cut off

@pytest.mark.parametrize('size', [0, 1, 100, -1])
@pytest.mark.parametrize('kind', ['.idx','.tar'])
def test_a_cut_off_file_in_the_cache_is_fetched_again(http, tmp_path, kind, size):
    want = values(ShardStore(http, cache=tmp_path/'cache'))
    store = ShardStore(http, cache=tmp_path/'cache')
    store.prefetch(range(4), wait=True)
    values(store)
    del store
    files = [p for p in (tmp_path/'cache').rglob('*') if p.name.endswith(kind)]
    assert files
    for path in files: os.truncate(path, path.stat().st_size-1 if size<0 else size)
    store = ShardStore(http, cache=tmp_path/'cache')
    with pytest.warns(UserWarning, match='fetched again') if kind=='.idx' else nullcontext(): assert values(store)==want
    store.prefetch(range(4), wait=True)
    assert values(store)==want and store.verify(num_workers=1).bad==0

@pytest.mark.parametrize('size', [0, 1, 20, -1])
def test_a_cut_off_index_is_named(folder, size):
    path = sorted(folder.glob('*.idx'))[1]
    os.truncate(path, path.stat().st_size-1 if size<0 else size)
    store = ShardStore(folder)
    assert store[0]['txt']=='number 0'
    with pytest.raises(CorruptSample, match=f'{path.name}.*samples 5 to 9.*do not match their checksum'): store[7]
    report = store.verify(num_workers=1)
    assert report.bad and report.rest[0][0]==path.name

@pytest.mark.parametrize('size', [0, 1, 100, -1])
def test_a_cut_off_manifest_is_named(folder, size):
    store,path = ShardStore(folder),folder/'manifest.json'
    os.truncate(path, path.stat().st_size-1 if size<0 else size)
    with pytest.raises(UnsupportedFormat, match='manifest.json: not a manifest'): ShardStore(folder)
    report = store.verify(num_workers=1)
    assert report.bad and 'manifest' in report.rest[0][0]
