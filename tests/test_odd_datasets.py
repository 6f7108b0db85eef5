"Datasets with a field of an unusual name, a manifest that another tool has formatted, or files and keys that are empty or gone"
import fcntl, http.server as http_server, io, json, os, pickle, re, shutil, signal, subprocess, sys, tarfile, threading, time

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import HOLD, holding, kill, wait_for
from fastai_remote.core import CorruptSample, Manifest, StoreBusy, StoreNotFound, UnsupportedFormat, seal, sum_content
from fastai_remote.ingest.index import index_shards
from fastai_remote.ingest.report import IngestError
from fastai_remote.ingest.run import ingest, to_redis
from fastai_remote.ingest.shards import to_shards
from fastai_remote.store.base import MemoryStore
from fastai_remote.store.redis import RedisStore
from fastai_remote.store.shards import ShardStore
from fastai_remote.store.storage import Storage
from fastai_remote.store.tiered import TieredStore
from fastai_remote.write import folder_lock
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

def test_a_member_of_this_name_is_left_out(tmp_path):
    "in a tar that others wrote, where it cannot be renamed; the report says so"
    with tarfile.open(tmp_path/'a.tar', 'w') as tar:
        for i in range(3):
            for name in 'x.txt','x.crc':
                (info := tarfile.TarInfo(f'{i}.{name}')).size = 1
                tar.addfile(info, io.BytesIO(b'%d' % i))
    report = index_shards(tmp_path, **OPTIONS)
    assert ShardStore(tmp_path).fields==['x.txt'] and any("'x.crc'" in note and n==3 for note,n in report.notes.items())

def test_a_field_of_this_name_is_stored_under_another(tmp_path, server):
    "The function of an ingest renames it"
    def fn(sample): return {'x':sample['x'], 'x_crc.i8':sample['x.crc']}
    for put in (lambda: to_redis([{'x':b'1', 'x.crc':7}], server.url, 'crc', fn, **OPTIONS), lambda: to_shards([{'x':b'1', 'x.crc':7}], tmp_path/'d', fn, **OPTIONS)):
        assert put().written==1
    for store in (RedisStore(server.url, 'crc'), ShardStore(tmp_path/'d')): assert values(store)=={'x':[b'1'], 'x_crc.i8':[7]}

# Fields whose members in a shard could not be told apart

ALIKE = {'label and text':({'cls':'cat', 'cls.txt':'a caption'}, "'cls' and 'cls.txt' .* as 'cls.txt'"), 'number and JSON':({'age.f4':3., 'age.f4.json':[1]}, "'age.f4' and 'age.f4.json'"),
         'capitals':({'X.txt':'a', 'x.txt':'b'}, "'X.txt' and 'x.txt'"), 'folder':({'a/b.txt':'x', 'c.txt':'y'}, "'a/b.txt' .* no / and no NUL"), 'NUL':({'a\0b.txt':'x'}, r"'a\\x00b.txt' .* no NUL")}

@pytest.mark.parametrize('what', ALIKE)
def test_members_that_webdataset_would_mistake_are_refused(what, tmp_path, server):
    "wherever shards are written; Redis has such names"
    sample,reason = ALIKE[what]
    def refuse(call):
        with pytest.raises(ValueError, match=reason): call()
    refuse(lambda: to_shards([sample]*2, tmp_path/'d', **OPTIONS))
    refuse(lambda: to_shards(iter([sample]*2), tmp_path/'d', **OPTIONS))
    assert not (tmp_path/'d').exists() or not os.listdir(tmp_path/'d')
    to_redis([sample]*2, server.url, 'alike', overwrite=True, **OPTIONS)
    store = RedisStore(server.url, 'alike')
    assert store[1]==sample and store.verify(num_workers=1).bad==0
    refuse(lambda: store.map(dict, tmp_path/'e', vocab={}, **OPTIONS))
    if 'cls' in sample:   # a copy has codes, `cls`, beside the texts
        store.copy(tmp_path/'copy', **OPTIONS)
        assert ShardStore(tmp_path/'copy')[1]==sample and {member.partition('.')[2] for member in tarfile.open(tmp_path/'copy/shard-000000.tar').getnames()}=={'cls','cls.txt'}
        return
    refuse(lambda: store.copy(tmp_path/'copy', **OPTIONS))
    if len(sample)<2: return
    (first,value),(second,more) = sample.items() if what!='folder' else list(sample.items())[::-1]
    to_shards([{first:value}]*2, tmp_path/'s', **OPTIONS)
    refuse(lambda: ShardStore(tmp_path/'s').add_fields(lambda sample: {second:more}, **OPTIONS))
    assert ShardStore(tmp_path/'s').fields==[first]

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

def test_a_store_of_a_dataset_that_was_renamed_says_so(fresh):
    to_redis(SAMPLES, fresh.url, 'pets', **OPTIONS)
    store = RedisStore(fresh.url, 'pets')
    RedisStore(fresh.url, 'pets').rename('dogs')
    for read in (lambda: store.get_many([1], 'txt'), lambda: store[3], lambda: store.rename('cats')):
        with pytest.raises(StoreNotFound, match="renamed|there are: dogs"): read()
    with pytest.raises(StoreNotFound, match="is gone since it was opened: deleted, or lost .*; or it was renamed"): store[3]

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
@pytest.mark.parametrize('kind', ['.fastai_remote','.tar'])
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
    with pytest.warns(UserWarning, match='fetched again') if kind=='.fastai_remote' else nullcontext(): assert values(store)==want
    store.prefetch(range(4), wait=True)
    assert values(store)==want and store.verify(num_workers=1).bad==0

@pytest.mark.parametrize('size', [0, 1, 20, -1])
def test_a_cut_off_index_is_named(folder, size):
    path = sorted(folder.glob('*.fastai_remote'))[1]
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

# Locks of shards, and clocks that are wrong

@pytest.fixture
def lease(monkeypatch):
    monkeypatch.setattr(folder_lock, 'LEASE_SECONDS', 1.)

_shared_fn = HOLD+'''
def fn(i):
    hold()
    return {'txt':f"{_os.environ.get('WHO', 'us')} {i}"}   # what it returns depends on who calls it
'''

@pytest.fixture(autouse=True)
def shared_fn(tmp_path, monkeypatch):
    "A module that other processes can import, too"
    (tmp_path/'modules').mkdir()
    (tmp_path/'modules/shared_fn.py').write_text(_shared_fn)
    monkeypatch.syspath_prepend(tmp_path/'modules')
    monkeypatch.delitem(sys.modules, 'shared_fn', raising=False)

def write(folder, n=12, **kw):
    import shared_fn
    return to_shards(list(range(n)), folder, shared_fn.fn, chunk=4, maxcount=4, shuffle=False, **OPTIONS, **kw)

def lock(folder, beat=1, host='elsewhere', seconds=0, **kw):
    "The lock of a process whose clock is wrong by so many seconds, on a file server whose clock is, too"
    (folder/'.ingest').mkdir(parents=True, exist_ok=True)
    content = folder_lock.seal_json(dict(host=host, pid=os.getppid(), start=1, id='x', beat=beat, time=time.time()+seconds)|kw)
    (folder/'.ingest/new').write_bytes(content)
    os.utime(folder/'.ingest/new', (time.time()+seconds,)*2)
    os.replace(folder/'.ingest/new', folder/'.ingest/lock.json')

@pytest.mark.parametrize('seconds', [-3600, 0, 3600])
def test_clocks_of_others_do_not_matter(tmp_path, lease, seconds):
    "A lock that is renewed is kept, and one that is not is taken over, whatever time it says"
    stop = threading.Event()
    def renew():
        beat = 1
        while not stop.wait(.1): lock(tmp_path, beat := beat+1, seconds=seconds)
    lock(tmp_path, seconds=seconds)
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(StoreBusy, match=f'process {os.getppid()} on elsewhere is writing here now'): write(tmp_path)
    finally:
        stop.set()
        thread.join()
    started = time.monotonic()
    write(tmp_path)
    assert time.monotonic()-started>=1 and ShardStore(tmp_path).verify(num_workers=1).bad==0

def test_our_own_clock_may_jump(tmp_path, lease, monkeypatch):
    "Only the time that passes counts"
    jumps = iter(range(0, 10**9, 10_000))
    monkeypatch.setattr(folder_lock, 'time', SimpleNamespace(time=lambda: float(next(jumps)), sleep=lambda s: None))
    lock(tmp_path)
    started = time.monotonic()
    write(tmp_path)
    assert time.monotonic()-started>=1

def test_the_number_of_a_dead_process_may_be_anothers_now(tmp_path):
    "No lease has to run out for a process that is known to be dead"
    lock(tmp_path, host=folder_lock.host_id())   # our parent lives, but it was not started at tick 1
    started = time.monotonic()
    write(tmp_path)
    assert time.monotonic()-started<folder_lock.LEASE_SECONDS/2

_other = '''
import contextlib, os, signal, sys
from fastai_remote import to_shards
from fastai_remote.write import folder_lock
folder,host,stop_at,flock = sys.argv[1:]
folder_lock.LEASE_SECONDS = .3
if host: folder_lock.host_id = lambda: host
@contextlib.contextmanager
def nothing(self, create=False): yield False
if flock=='no': folder_lock.FolderLock.exclusive = nothing
checks,check = [0],folder_lock.FolderLock.check
def checked(self):
    check(self)
    checks[0] += 1
    if str(checks[0])==stop_at: os.kill(os.getpid(), signal.SIGSTOP)   # it has just seen that it holds the lock
folder_lock.FolderLock.check = checked
import shared_fn
to_shards(list(range(12)), folder, shared_fn.fn, chunk=4, maxcount=4, shuffle=False, num_workers=1, progress=False)
'''

@pytest.fixture
def other(tmp_path):
    "Starts another process that writes to a folder"
    started = []
    def start(folder, samples=None, host='', stop_at='never', flock='yes'):
        p = subprocess.Popen([sys.executable, '-W', 'ignore', '-c', _other, str(folder), host, str(stop_at), flock], stderr=subprocess.PIPE, text=True,
            env=holding(samples, tmp_path/'go on')|{'WHO':'they', 'PYTHONPATH':os.pathsep.join([str(tmp_path/'modules'), *sys.path])}, start_new_session=True)
        started.append(p)
        return p
    yield start
    for p in started: kill(p)

def wait(f): return wait_for(f, 30)
def records(folder): return len(list(folder.glob('.ingest/chunk-*.json')))
def is_stopped(p): return all((t/'stat').read_text().rpartition(')')[2].split()[0]=='T' for t in Path(f'/proc/{p.pid}/task').iterdir())

def stop(p, folder):
    "Stop a process while it does not renew its lock"
    fd = os.open(folder/'.ingest', os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.kill(p.pid, signal.SIGSTOP)
    wait(lambda: is_stopped(p))
    os.close(fd)
def texts(folder): return [o['txt'].split()[0] for o in ShardStore(folder)]

def test_a_killed_process_is_followed_at_once(tmp_path, other):
    p = other(tmp_path/'d', 18)
    wait(lambda: records(tmp_path/'d')==1)
    p.kill()   # and not waited for: a zombie has its number
    wait(lambda: 'Z' in Path(f'/proc/{p.pid}/stat').read_text().rpartition(')')[2])
    started = time.monotonic()
    write(tmp_path/'d')
    assert time.monotonic()-started<folder_lock.LEASE_SECONDS/2
    assert ShardStore(tmp_path/'d').verify(num_workers=1).bad==0

@pytest.mark.parametrize('host', ['','elsewhere'])
def test_a_slow_process_keeps_its_lock(tmp_path, other, host, monkeypatch):
    monkeypatch.setattr(folder_lock, 'LEASE_SECONDS', 3.)
    p = other(tmp_path/'d', 18, host)
    wait(lambda: records(tmp_path/'d')==1)
    for _ in range(2):
        with pytest.raises(StoreBusy, match=f'process {p.pid} on .* is writing here now .1 of 3 chunks'): write(tmp_path/'d')
        assert ShardStore.unfinished(tmp_path/'d')[0]['running']
        time.sleep(.5)   # more than the lease of that process
    (tmp_path/'go on').touch()
    assert p.wait(60)==0 and texts(tmp_path/'d')==['they']*12

@pytest.mark.parametrize('host,flock', [('','yes'), ('elsewhere','yes'), ('elsewhere','no')])
@pytest.mark.parametrize('same', [True,False])
def test_a_stopped_process_does_no_harm_when_it_goes_on(tmp_path, other, lease, host, flock, same):
    "Another one has taken over, with the same source or another one. It is told"
    folder = tmp_path/'d'
    p = other(folder, 18, host, flock=flock)
    wait(lambda: records(folder)==1)
    stop(p, folder)
    assert not ShardStore.unfinished(folder)[0]['running']
    if same: write(folder)
    else: write(folder, n=11, overwrite=True)
    assert texts(folder)==(['they']*4+['us']*8 if same else ['us']*11)
    want,there = texts(folder),{f.name:f.read_bytes() for f in folder.iterdir() if f.is_file()}
    (tmp_path/'go on').touch()
    os.kill(p.pid, signal.SIGCONT)
    said = p.communicate(timeout=300)[1]
    assert 'StoreBusy' in said and p.returncode, said
    assert {f.name:f.read_bytes() for f in folder.iterdir() if f.is_file()}==there
    assert texts(folder)==want and ShardStore(folder).verify(num_workers=1).bad==0

@pytest.mark.parametrize('k', [3, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 4, 5, 6, 7))])
def test_a_process_that_is_stopped_while_it_publishes_cannot_be_overtaken(tmp_path, other, lease, k):
    "On a disk, nobody takes over between the check of the lock and the file that depends on it"
    folder = tmp_path/'d'
    p = other(folder, stop_at=k)
    wait(lambda: is_stopped(p))
    with pytest.raises(StoreBusy, match='another process is publishing a file here, and does not go on; is it stopped'): write(folder)
    os.kill(p.pid, signal.SIGCONT)
    assert p.wait(60)==0 and texts(folder)==['they']*12

@pytest.mark.parametrize('k', [1, *(pytest.param(k, marks=pytest.mark.slow) for k in range(2, 7))])
def test_a_late_file_does_no_harm_where_there_is_no_flock(tmp_path, other, lease, k, monkeypatch):
    "as on object storage: it has a name of its own. (`they` and `us` write different samples, as a random `fn` would)"
    folder = tmp_path/'d'
    monkeypatch.setattr(folder_lock, 'host_id', lambda: 'here')
    p = other(folder, stop_at=k, flock='no')
    wait(lambda: is_stopped(p))
    write(folder)
    want = texts(folder)
    assert 'us' in want or k==6
    os.kill(p.pid, signal.SIGCONT)
    said = p.communicate(timeout=300)[1]
    assert 'StoreBusy' in said and p.returncode, said
    assert texts(folder)==want and ShardStore(folder).verify(num_workers=1).bad==0

@pytest.mark.parametrize('change', [dict(splits={'train':[5,-2]}), dict(splits={'train':[0,4]}), dict(splits={'train':[2,1]}),
    dict(format=4, parts=[dict(prefix='a', tags=0, n=3, fields={}, failed=0)], runs=dict(key='k', crc=1, lengths=[1], columns={'cls':0.0}))])
def test_a_manifest_with_a_right_checksum_and_impossible_contents_is_refused(change):
    manifest = Manifest('d', 3, {'cls':{'codec':'cls', 'dtype':'u1'}}, {'train':[0,3]}, {'1':['a'], '0':['b']}, uid='u')
    content = json.loads(manifest.to_json())
    assert list(Manifest.from_json(seal({**content, 'order':{'vocab':[0,1]}})).vocab)==['0','1']
    with pytest.raises(UnsupportedFormat, match='damaged: .*(split .train.|runs)'): Manifest.from_json(seal({**content, **change}))
