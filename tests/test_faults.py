"What bad things get: each fault brought about for real, on real servers and processes, and the answer promised for it"
import io, json, os, pickle, random, re, shutil, signal, socket, struct, subprocess, sys, threading, time, traceback
import zipfile, zlib
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest
import redis
from PIL import Image
from fastai.data.block import DataBlock
from fastai.data.core import DataLoaders
from fastai.learner import Learner, load_learner
from fastai.losses import CrossEntropyLossFlat
from fastai.vision.augment import Resize
from torch import nn

import fastai_remote.block
from conftest import HOLD, N, class_of, dies_at, fails, holding, in_time, wait_for
from fastai_remote import (CorruptSample, IngestError, MissingSample, RedisBlock, RedisStore, StoreBusy, StoreError,
    StoreExists, StoreFull, StoreNotFound,
    StoreUnavailable, UnknownField, UnsupportedFormat, get_remote_items, image_samples, redis_server, to_redis)
from fastai_remote.ingest.chunk import write_chunk
from fastai_remote.write.redis import RedisWriter
from fastai_remote.store.redis_link import RedisLink
from faultproxy import FaultProxy

workers = pytest.mark.parametrize('num_workers', [0,2])

@pytest.fixture
def pics(fresh, images):
    "The images in a server of the test's own"
    to_redis(image_samples(images, label=class_of), fresh.url, 'pics', num_workers=1, progress=False)
    return RedisStore(fresh.url, 'pics')

@pytest.fixture
def two():
    "Two servers, to compare"
    with redis_server() as a, redis_server() as b: yield a,b

@pytest.fixture
def closed():
    "A port where nobody listens"
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        yield s.getsockname()[1]

def grey(k):
    "A small grey JPEG"
    Image.new('L', (8,8), k).save(b:=io.BytesIO(), 'JPEG')
    return b.getvalue()

def client(server): return redis.Redis.from_url(server.url)
def keys(server): return sorted(re.sub('@[0-9]+', '@', k.decode()) for k in client(server).keys())
def loaders(store, **kw):
    return DataLoaders.from_store(store, item_tfms=Resize(32), **{'bs':8, 'num_workers':0, 'device':'cpu', **kw})
def run_through(dls): return [b for dl in (dls.train.new(drop_last=False), dls.valid) for b in dl]

def whole(url, name='d'):
    "All that a reader sees of a dataset, the time of its making and its keys' prefix apart"
    s = RedisStore(url, name)
    res = {f:v if isinstance(v, list) else v.tolist()
        for f,v in s.get_many(range(len(s)), s.fields, check=True).items()}
    m = s.manifest
    return res,m.n,m.fields,m.splits,m.vocab,m.nbytes

# --- wrong address, name, field, format

@pytest.mark.parametrize('ask', [lambda u: RedisStore(u, 'pics'), lambda u: DataLoaders.from_redis(u, 'pics'),
                                 lambda u: to_redis([1,2], u, 'd', num_workers=1, progress=False)],
                                 ids=['store','from_redis','to_redis'])
def test_closed_port(closed, ask):
    "Nobody there: said within seconds, with the address"
    with in_time(), pytest.raises(StoreUnavailable, match=f'127.0.0.1:{closed}.*attempt'):
        ask(f'redis://127.0.0.1:{closed}')

def test_no_such_host():
    "A name that does not resolve is as good as a closed port"
    with in_time(), pytest.raises(StoreUnavailable, match='nowhere.invalid'):
        RedisStore('redis://nowhere.invalid', 'pics')

@pytest.mark.parametrize('url', ['http://localhost:6379', 'localhost:6379', '', 'redis://localhost:port'])
def test_no_redis_url(url):
    "What is no Redis URL is refused before anything is tried"
    with pytest.raises(ValueError, match='URL'): RedisStore(url, 'pics')

def test_not_redis():
    "A server that speaks something else is named, and is a `StoreUnavailable`"
    with socket.create_server(('127.0.0.1', 0)) as s:
        def answer():
            while True:
                try: c,_ = s.accept()
                except OSError: return
                c.recv(1000); c.sendall(b'HTTP/1.1 400 Bad Request\r\n\r\n'); c.close()
        threading.Thread(target=answer, daemon=True).start()
        port = s.getsockname()[1]
        with in_time(), pytest.raises(StoreUnavailable, match=str(port)):
            RedisStore(f'redis://127.0.0.1:{port}', 'pics', timeout=1)

def test_wrong_name(server, store):
    "The names there are, beside the one there is not"
    for f in (lambda: RedisStore(server.url, 'pcis'), lambda: DataLoaders.from_redis(server.url, 'pcis'),
            lambda: RedisStore.delete(server.url, 'pcis')):
        with pytest.raises(StoreNotFound, match="'pcis'"): f()
    with pytest.raises(StoreNotFound, match='there are:.*pics'): RedisStore(server.url, 'pcis')

def test_unknown_field(store):
    "The fields there are, at every door"
    block = lambda: DataBlock((RedisBlock, RedisBlock('mask.png')), get_items=get_remote_items).datasets(store)
    for f in (lambda: store.get_many([0], 'png'), lambda: RedisBlock(store, 'png'), lambda: loaders(store, x='png'),
            lambda: loaders(store, y='png'), block):
        with pytest.raises(UnknownField, match="pics: no field '(mask.)?png'; there are 'jpg', 'cls', 'path'"): f()

def test_newer_format(fresh, pics):
    "A later version's dataset is not misread, and not overwritten either"
    c = client(fresh)
    c.set('pics:meta', json.dumps({**json.loads(c.get('pics:meta')), 'format':99, 'news':1}))
    before = keys(fresh)
    for f in (lambda: RedisStore(fresh.url, 'pics'),
            lambda: DataLoaders.from_redis(fresh.url, 'pics', item_tfms=Resize(32)),
              lambda: to_redis([1,2], fresh.url, 'pics', overwrite=True, num_workers=1, progress=False)):
        with pytest.raises(UnsupportedFormat, match='pics: format 99; .*upgrade'): f()
    assert keys(fresh)==before

def test_manifest_of_another(fresh):
    "Something else under the manifest's key is not a dataset"
    client(fresh).set('pics:meta', 'hello')
    with pytest.raises(UnsupportedFormat, match='pics: not a manifest'): RedisStore(fresh.url, 'pics')

# --- missing and damaged samples

def test_deleted_key(fresh, pics):
    "Dataset, sample, field and the likely cause"
    client(fresh).delete('pics:jpg:7')
    with pytest.raises(MissingSample, match=r"pics: 1 of 3 samples missing, first 7 \(field 'jpg'\): deleted, or lost"):
        pics.get_many([1,7,9], 'jpg')
    with pytest.raises(MissingSample, match="sample 7 is missing"): pics[7]
    client(fresh).delete('pics:cls#0')
    with pytest.raises(MissingSample, match=r"pics: 2 of 2 values missing, first of sample 4 \(field 'cls'\)"):
        pics.get_many([4,5], 'cls')

@workers
def test_deleted_key_in_loader(fresh, pics, num_workers):
    "The same out of a worker: its class and its words come through"
    client(fresh).delete('pics:jpg:7')
    with in_time(), fails(MissingSample, match=r"pics: 1 of 8 samples missing, first 7 \(field 'jpg'\): deleted"):
        run_through(loaders(pics, num_workers=num_workers))

def test_evicted(fresh, pics):
    "A policy that drops keys is the likely cause, and is named"
    c = client(fresh)
    c.config_set('maxmemory-policy', 'allkeys-lru')
    c.delete('pics:jpg:3')
    with pytest.raises(MissingSample, match='sample 3 is missing .*maxmemory-policy allkeys-lru.*set noeviction'):
        pics.get_many([3], 'jpg')

def test_deleted_dataset(fresh, pics):
    "A dataset that was deleted, or replaced, under a reader"
    RedisStore.delete(fresh.url, 'pics')
    with pytest.raises(StoreNotFound, match='since it was opened: deleted'): pics.get_many([3], 'jpg')

def test_created_anew(fresh, pics):
    "A reader of a deleted dataset does not take the next one of that name for it"
    RedisStore.delete(fresh.url, 'pics')
    to_redis([{'jpg':grey(k), 'cls':'x'} for k in range(N)], fresh.url, 'pics', num_workers=1, progress=False)
    with pytest.raises(StoreError, match='replaced|deleted'): pics.get_many([3], ['jpg','cls'])

def flip(server, key, at=200):
    "One byte of a value, flipped"
    b = bytearray(client(server).get(key))
    b[at] ^= 0x55
    client(server).set(key, bytes(b))

@workers
def test_flipped_byte(fresh, pics, num_workers):
    "The checksum tells: dataset and sample are named"
    flip(fresh, 'pics:jpg:11')
    with in_time(), fails(CorruptSample,
            match="pics: sample 11, field 'jpg': the .* bytes do not match their checksum"):
        run_through(loaders(pics, num_workers=num_workers))
    with pytest.raises(CorruptSample, match='sample 11'): pics[11]
    assert len(pics.get_many([11], 'jpg', check=False)['jpg'])==1

@workers
def test_undecodable(fresh, pics, num_workers):
    "Without checksums, what cannot be decoded still names its sample"
    b = client(fresh).get('pics:jpg:12')
    for bad in (b'no jpeg', b[:len(b)//2], b''):
        client(fresh).set('pics:jpg:12', bad)
        with in_time(), fails(CorruptSample, match="pics: sample 12, field 'jpg'"):
            run_through(loaders(pics, check=False, num_workers=num_workers))

def test_wild_code(fresh, pics):
    "A label's code out of range is damage too, though its checksum is right"
    client(fresh).setrange('pics:cls#0', 5*5, struct.pack('>BI', 238, zlib.crc32(struct.pack('>BQ', 238, 5))))
    with pytest.raises(CorruptSample, match="pics: sample 5, field 'cls': code 238, but there are 3 labels"):
        run_through(loaders(pics))

# --- a server that goes away, or does not answer

@workers
def test_restart_in_epoch(fresh, images, num_workers):
    "A server killed and started again within the epoch: every sample comes, once"
    items = [{'jpg':grey(i), 'id':i} for i in range(200)]
    to_redis(items, fresh.url, 'd', num_workers=1, progress=False)
    dls = loaders(RedisStore(fresh.url, 'd', timeout=120), y='id', bs=4, num_workers=num_workers)
    dl,end,seen = dls.train.new(drop_last=False),threading.Event(),[]
    client(fresh).save()
    def later():
        time.sleep(1)   # so that some requests fail; the test is right without it, too
        fresh.start()
        end.wait()
    try:
        for k,(_,y) in enumerate(dl):
            seen += y.long().tolist()
            if k==2: fresh.kill(); (t:=threading.Thread(target=later)).start()
        assert len(seen)==160 and len(set(seen))==160
        assert sorted(seen+[int(o) for _,y in dls.valid for o in y])==list(range(200))
    finally: end.set(); t.join()

def test_started_in_thread(fresh):
    "A server lives as long as the process that started it, whichever thread did"
    fresh.kill()
    (t:=threading.Thread(target=fresh.start)).start()
    t.join()
    with pytest.raises(subprocess.TimeoutExpired): fresh.proc.wait(.3)
    assert client(fresh).ping()

@workers
def test_stopped_server(fresh, pics, num_workers):
    "A server that never answers: `StoreUnavailable` when the time stated is over"
    dls = wait_for(lambda: answer(lambda: loaders(RedisStore(fresh.url, 'pics', timeout=2, socket_timeout=.7),
        num_workers=num_workers)))
    fresh.proc.send_signal(signal.SIGSTOP)
    try:
        with in_time(), fails(StoreUnavailable, match=r'attempts? in \d+\.\d s'): dls.one_batch()
        with in_time(), pytest.raises(StoreUnavailable): RedisStore(fresh.url, 'pics', timeout=1, socket_timeout=.5)
    finally: fresh.proc.send_signal(signal.SIGCONT)
    assert wait_for(lambda: answer(lambda: len(dls.one_batch()[0])))==8

def answer(f):
    "`f()`, or `None` while the server is away: a busy machine may take longer than the short time-outs of these tests"
    try: return f()
    except StoreUnavailable: return None

def test_stalled_line(fresh, pics):
    "The same for a line that goes dead, and the store works again when it comes back"
    with FaultProxy(str(fresh.socket)) as p:
        s = wait_for(lambda: answer(lambda: RedisStore(f'redis://127.0.0.1:{p.port}', 'pics', timeout=1,
            socket_timeout=.3)))
        p.stall = True
        with in_time(), pytest.raises(StoreUnavailable, match=f'127.0.0.1:{p.port}.*attempts?'): s.get_many([1], 'jpg')
        p.stall = False
        assert wait_for(lambda: answer(lambda: s.get_many([1], 'jpg')))==pics.get_many([1], 'jpg')

@pytest.mark.parametrize('cut', [0,7,500,4000])
def test_line_cut(fresh, pics, cut):
    "A connection that breaks off in the middle of an answer: asked again, and answered right"
    with FaultProxy(str(fresh.socket)) as p:
        s = RedisStore(f'redis://127.0.0.1:{p.port}', 'pics')
        p.cut = cut
        got,want = (o.get_many(range(20), ['jpg','cls']) for o in (s,pics))
        assert got['jpg']==want['jpg'] and (got['cls']==want['cls']).all() and p.cut is None

# --- ingests that meet, die, or run out of room

_script = HOLD + '''
import os, sys, time
from fastai_remote import to_redis
url,num_workers = sys.argv[1],int(sys.argv[2])
def fn(o):
    time.sleep(float(os.environ.get('PAUSE', 0)))   # the value of a variable would make it another fn
    hold()
    i = o['id']
    if i%17==3 or i>200 and i%2: raise ValueError('no good')
    return {'txt':f'sample {i} '*30, 'cls':'abc'[i%3], 'id':i}
items = {'train':[{'id':i} for i in range(180)], 'valid':[{'id':i} for i in range(180,240)]}
print(to_redis(items, url, 'd', fn=fn, max_failed=1., num_workers=num_workers, progress=False))
'''

@pytest.fixture
def script(tmp_path):
    """Starts an ingest of 240 samples, some of them bad, as a process of its own; `hold`: stop after so many samples,
    until there is a file `go on`"""
    (f:=tmp_path/'ingest.py').write_text(_script)
    ps = []
    def go(server, num_workers=2, pause=0., hold=None):
        out = (tmp_path/f'{len(ps)}.out').open('w+')   # no pipe: the workers of a killed ingest would hold it open
        args = [sys.executable, f, server.url, str(num_workers)]
        ps.append(p:=subprocess.Popen(args, stdout=out, stderr=out, start_new_session=True,
            env={**holding(hold, tmp_path/'go on'), 'PAUSE':str(pause)}))
        p.said = lambda: (p.wait(500), Path(out.name).read_text())[1]
        return p
    yield go
    for p in ps:
        try: os.killpg(p.pid, signal.SIGKILL)
        except ProcessLookupError: pass
        p.wait()

def finish(p):
    "What a process says that is to end well"
    out = p.said()
    assert p.returncode==0, out
    return out

@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    "What the script's ingest leaves that meets no accident"
    (f:=tmp_path_factory.mktemp('undisturbed')/'ingest.py').write_text(_script)
    with redis_server() as s:
        subprocess.run([sys.executable, f, s.url, '1'], check=True, capture_output=True)
        return whole(s.url),keys(s)

def test_two_at_once(fresh, script, undisturbed, tmp_path):
    "Two processes write one name: one wins, the other is told who; the dataset is as if there had been one"
    ps = [script(fresh, 1, hold=100) for _ in range(2)]
    wait_for(lambda: any(p.poll() is not None for p in ps))
    (tmp_path/'go on').touch()
    outs = [p.said() for p in ps]
    (won,),(lost,) = ([k for k in (0,1) if (ps[k].returncode==0)==w] for w in (True,False))
    assert f"StoreBusy: {fresh.url}: process {ps[won].pid} on {socket.gethostname()} is writing 'd' now" in outs[lost]
    assert (whole(fresh.url),keys(fresh))==undisturbed

def test_killed_ingest(fresh, script, undisturbed):
    "Killed in the middle: invisible to readers, and the same call again ends as if nothing had happened"
    p = script(fresh, 2, hold=100)
    wait_for(lambda: client(fresh).hlen('d:ingest:chunks')>2)
    p.kill(); p.wait()
    with pytest.raises(StoreNotFound, match="no dataset 'd'; there are: none"): RedisStore(fresh.url, 'd')
    with pytest.raises(StoreExists, match='unfinished ingest'):
        to_redis([1,2], fresh.url, 'd', num_workers=1, progress=False)
    assert 'by an earlier run' in finish(script(fresh))
    assert (whole(fresh.url),keys(fresh))==undisturbed

def test_killed_again_and_again(fresh, script, undisturbed):
    "Killed at any moment, any number of times; readers see nothing, then all"
    for _ in range(2):
        p = script(fresh, 2, .002)
        try: p.wait(random.uniform(.5, 1.2))
        except subprocess.TimeoutExpired: pass
        p.kill(); p.wait()
        try: assert whole(fresh.url)==undisturbed[0]
        except StoreNotFound: pass
    p = script(fresh)
    out = p.said()
    assert p.returncode==0 or 'StoreExists' in out, out
    assert (whole(fresh.url),keys(fresh))==undisturbed

def numbered(a, word='s'):
    "A source with two splits, a label, two labels and failures at the end of one and the start of the other"
    def item(i):
        return {'txt':f'{word}{i}'*5, 'cls':f'{word}{i%3}', 'labels':[f'{word}{i%2}'],
            'id':i if i not in (a+2,a+20,a+29,a+30,a+31) else 'bad'}
    return {'train':[item(i) for i in range(a, a+30)], 'valid':[item(i) for i in range(a+30, a+40)]}

@pytest.mark.parametrize('what,step', [('ingest',1),('overwrite',1),('other',4),('delete',1)])
def test_dies_at_each_request(two, what, step):
    """Wherever a writer dies, readers see one whole dataset or none, and the same call again leaves what an
    undisturbed one leaves"""
    a,b = two
    old,kw = what!='ingest',dict(num_workers=1, progress=False, chunk=16)
    def start(s):
        if old: to_redis(numbered(100, 'old'), s.url, 'd', **kw)
    def act(s):
        if what=='delete': return RedisStore.delete(s.url, 'd')
        # an unfinished ingest to be dropped
        if what=='other' and s is a: dies_at(9, lambda: to_redis(numbered(50), s.url, 'd', overwrite=True, **kw))
        return to_redis(numbered(0), s.url, 'd', overwrite=old, **kw)
    def see(s):
        try: return whole(s.url)
        except StoreNotFound: return None
    start(b); before = see(b)
    act(b); after,left = see(b),keys(b)
    for k in range(0, 200, step):
        client(a).flushall()
        start(a)
        died = dies_at(k, lambda: act(a))
        seen = see(a)
        assert seen in (before,after), k
        if not died: break
        try: act(a)
        except (StoreExists,StoreNotFound): assert seen==after
        assert see(a)==after and keys(a)==left, k
    assert k>5 and seen==after and keys(a)==left

@pytest.mark.parametrize('old', [False,True], ids=['ingest','overwrite'])
def test_line_cut_in_ingest(two, old):
    """Wherever a writer's line breaks, in a request or before its answer: it asks again, and the dataset is as if
    nothing had been"""
    a,b = two
    kw = dict(num_workers=1, progress=False, chunk=16)
    def act(s, url):
        client(s).flushall()
        if old: to_redis(numbered(100, 'old'), s.url, 'd', **kw)
        to_redis(numbered(0), url, 'd', overwrite=old, **kw)
        return whole(s.url),keys(s)
    want = act(b, b.url)
    with FaultProxy(str(a.socket)) as p:
        url,p.cut = f'redis://127.0.0.1:{p.port}',1<<40
        assert act(a, url)==want
        total = (1<<40)-p.cut
        for cut in range(0, total, total//40):
            p.cut = cut
            assert act(a, url)==want, cut
            # the answers hold a time, whose digits vary: the last cut may come after the last byte
            assert p.cut is None or total-cut<64, cut
            p.cut = None

def test_late_worker(fresh):
    "A worker of a killed ingest that wakes up when another has finished the dataset changes nothing"
    calls = []
    def fn(o):
        calls.append(o)
        if len(calls)==9: raise KeyboardInterrupt
        return o
    def act():
        return to_redis([{'txt':str(i)} for i in range(32)], fresh.url, 'd', fn=fn, num_workers=1, progress=False)
    with pytest.raises(KeyboardInterrupt): act()
    w = RedisWriter(RedisLink(fresh.url), 'd')
    w.begin(json.loads(client(fresh).get('d:ingest')))
    asleep = w.opener()
    w.close()
    act()
    seen,left = whole(fresh.url),keys(fresh)
    try: write_chunk(asleep, 0, [(str(i), {'txt':f'late {i}'}) for i in range(16)], lambda o: o, None)
    except StoreError: pass
    assert whole(fresh.url)==seen and keys(fresh)==left

def test_lock_lost(fresh):
    "An ingest whose lock another took over while it slept does not commit"
    def fn(o):
        if o['id']==30: client(fresh).set('d:ingest:lock', '{"host":"elsewhere","pid":1}')
        return o
    src = [{'id':i} for i in range(32)]
    with pytest.raises(StoreBusy, match='lock was lost'):
        to_redis(src, fresh.url, 'd', fn=fn, shuffle=False, num_workers=1, progress=False)
    with pytest.raises(StoreNotFound): RedisStore(fresh.url, 'd')
    with pytest.raises(StoreBusy, match='process 1 on elsewhere'):
        to_redis(src, fresh.url, 'd', fn=fn, shuffle=False, num_workers=1, progress=False)

@pytest.mark.parametrize('save', [True,False], ids=['old snapshot','no snapshot'])
def test_server_lost_chunks(two, save):
    """A server that comes back from a crash without the last chunks: the ingest notices, or writes them again

    Nothing is missing."""
    a,b = two
    def fn(o):
        if s is a and o['id']==35 and save: client(a).save()
        if s is a and o['id']==75 and not down: down.append(1); a.kill(); a.start()
        if o['id'] in (5,50,99): raise ValueError('no good')
        return o
    down,src = [],[{'id':i, 'txt':f'sample {i}'} for i in range(100)]
    def act(): return to_redis(src, s.url, 'd', fn=fn, shuffle=False, chunk=16, num_workers=1, progress=False)
    s = b; act()
    s = a
    try: act()
    except StoreError:
        with pytest.raises(StoreNotFound): RedisStore(a.url, 'd')
        act()
    assert whole(a.url)==whole(b.url) and keys(a)==keys(b)

def test_server_set_back(two, monkeypatch):
    """A server that comes back from a crash as it was a request or two before, whenever that is: the same call again,
    until it is there, makes it whole"""
    a,b = two
    call,at,kw = RedisLink.call,[0],dict(num_workers=1, progress=False, chunk=16)
    def counted(self, *args, **kws):
        if threading.current_thread() is threading.main_thread() and self.url==a.url:
            at[0] += 1
            if at[0]==k: client(a).save()
            if at[0]==k+2: a.kill(); a.start()
        return call(self, *args, **kws)
    monkeypatch.setattr(RedisLink, 'call', counted)
    def act(s):
        for _ in range(4):
            try: to_redis(numbered(0), s.url, 'd', **kw)
            except StoreExists: return whole(s.url),[k for k in keys(s) if not k.endswith(':lock')]
            except StoreError: pass
            client(s).delete('d:ingest:lock')   # may have come back too; its lease would end in 30 s
    k,want = 0,act(b)
    while at[0]>=k:
        k += 1
        client(a).flushall()
        at[0] = 0
        assert act(a)==want, k
    assert k>20

def test_failed_on_second_try(fresh):
    "A sample that a killed run had written, and that fails now, leaves no key behind"
    state = SimpleNamespace(run=1)   # data that changes would make `fn` another function
    def fn(o):
        if state.run==1 and o['id']==15: raise KeyboardInterrupt
        if state.run==2 and o['id']>=14: raise ValueError('gone since')
        return {'bin':o['id'].to_bytes(1, 'big')*(5_000_000 if o['id']==14 else 9)}   # five million: written at once
    def act():
        return to_redis([{'id':i} for i in range(16)], fresh.url, 'd', fn=fn, shuffle=False, num_workers=1,
            progress=False)
    with pytest.raises(KeyboardInterrupt): act()
    assert client(fresh).exists('d:bin:14')
    state.run = 2
    assert (act().written,len(RedisStore(fresh.url, 'd')))==(14,14)
    assert keys(fresh)==sorted(['d:bin.crc#0','d:~failures#0','d:meta','fastai_remote:names',
        *(f'd:bin:{i}' for i in range(14))])

@pytest.mark.parametrize('known,why',
    [(True,r'150 samples take about 3\.\d MB \(20,\d+ bytes each\), .* left of'),
    (False,'no room: .* of maxmemory .*noeviction')])
@pytest.mark.parametrize('num_workers', [1,2])
def test_no_room(two, num_workers, known, why):
    """No room: the figures, nothing visible; with more room, the same call goes on and finishes

    Of a stream it is known when it happens."""
    a,b = two
    c,src = client(a),[{'bin':random.Random(i).randbytes(20_000), 'cls':i%5} for i in range(150)]
    c.config_set('maxmemory', c.info('memory')['used_memory']+1_500_000)
    def act(s):
        return to_redis(src if known else iter(src), s.url, 'd', num_workers=num_workers, progress=False, chunk=16)
    with pytest.raises(StoreFull, match=f'd: .*{why}.*repeat the same call'): act(a)
    with pytest.raises(StoreNotFound): RedisStore(a.url, 'd')
    c.config_set('maxmemory', 0)
    assert act(a).resumed>0
    act(b)
    assert whole(a.url)==whole(b.url) and keys(a)==keys(b)

def test_other_number_of_workers(fresh):
    "An ingest that stopped can be finished with fewer workers, or more"
    src,c = [{'bin':bytes([i%256])*3000, 'cls':i%5} for i in range(600)],client(fresh)
    c.config_set('maxmemory', c.info('memory')['used_memory']+900_000)
    with pytest.raises(StoreFull): to_redis(src, fresh.url, 'd', num_workers=1, progress=False)
    c.config_set('maxmemory', 0)
    assert to_redis(src, fresh.url, 'd', num_workers=2, progress=False).written==600

_fns = '''
import functools
from PIL import Image
from fastai_remote.source.base import fn_fingerprint
from fastai_remote.source.datasets import as_source
def words(o): return {'txt':' '.join(w for w in o['txt'].split() if w not in {'a','b','the','of','in'})}
def scale(o, k): return {'f4':o['f4']*k}
class Scale:
    def __init__(self, k): self.k = k
    def __call__(self, o): return {'f4':o['f4']*self.k}
class Pictures:
    def __len__(self): return 3
    def __getitem__(self, i): return Image.new('L', (3,3), i),i
print(as_source(Pictures()).fingerprint(), as_source([(Image.new('L', (3,3)),0)]).fingerprint())
print([fn_fingerprint(f) for f in (words, lambda o: [x for x in o], functools.partial(scale, k=2), Scale(2))])
class Options: pass
options = Options()
options.keep = {'a','b','c'}
for keep in {'a','b','c'}, [{'a':frozenset({'a','b','c'})}], ({'x','y'},{'z':{'a','b'}}), options:
    def kept(o, k=keep): return k
    print([fn_fingerprint(f) for f in (functools.partial(scale, k=keep), Scale(keep), Scale(keep).__call__, kept)])
'''

def test_same_in_another_process():
    "The same call from another process is the same: no address or hash order gets into what an ingest is known by"
    a,b = (subprocess.run([sys.executable, '-c', _fns], capture_output=True, text=True, check=True,
        env={**os.environ, 'PYTHONHASHSEED':s}).stdout for s in '12')
    assert a==b

# --- passwords

PW,WRONG = 's3cr%t/p@ss','wr0ng%/p@ss'
forms = [o for p in (PW,WRONG) for o in (p, quote(p), quote(p, safe=''))]

def says_none(*texts):
    "Assert that no password is in `texts`, which may be bytes"
    for t in texts:
        t = t if isinstance(t, bytes) else str(t).encode()
        for o in forms: assert o.encode() not in t, t

@pytest.fixture(scope='module')
def locked(images):
    "A server with a password, on a port, and the images in it"
    with redis_server(port=-1, requirepass=PW) as s:
        to_redis(image_samples(images, label=class_of), s.url, 'pics', num_workers=1, progress=False)
        yield s

def said(f, err):
    "What `f` says when it fails with `err`, traceback and all"
    with pytest.raises(err) as e: f()
    return str(e.value),repr(e.value),''.join(traceback.format_exception(e.value))

def test_password_in_no_error(locked, closed):
    "Wrong, unreachable, malformed: no error shows a password, in its text or in its traceback"
    q,at = quote(PW, safe=''),f'@127.0.0.1:{locked.port}'
    says_none(*said(lambda: RedisStore(f'redis://:{quote(WRONG, safe="")}{at}', 'pics'), StoreUnavailable))
    says_none(*said(lambda: RedisStore(f'redis://127.0.0.1:{locked.port}', 'pics'), StoreUnavailable))
    says_none(*said(lambda: RedisStore(f'redis://:{q}@127.0.0.1:{closed}', 'pics'), StoreUnavailable))
    says_none(*said(lambda: RedisStore(f'redis://:{q}@nowhere.invalid', 'pics'), StoreUnavailable))
    for u in (f'redis://:{PW}{at}', f'redis://:{PW}@[::1', f'redis://u:{PW}@h:x', f'http://:{q}{at}', f'{PW}{at}',
            f'redis:/:{PW}{at}', f'{q}{at}'):
        says_none(*said(lambda: RedisStore(u, 'pics'), ValueError))
    says_none(*said(lambda: RedisStore(locked.url, 'nope'), StoreNotFound))
    says_none(*said(lambda: RedisStore(locked.url, 'pics').get_many([0], 'nope'), UnknownField))

def test_password_of_a_key(locked):
    "The password of a client certificate's key is one too"
    try: link = RedisLink(f'rediss://localhost?ssl_password={quote(PW)}')
    except (TypeError,ValueError) as e: says_none(e)
    else: says_none(repr(link), pickle.dumps(link))

def test_password_in_nothing_kept(locked, tmp_path):
    "Not in what is shown, pickled, exported or stored"
    store = RedisStore(locked.url, 'pics')
    dls = loaders(store)
    learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(3*32*32, 3)), CrossEntropyLossFlat(), path=tmp_path)
    learn.export('e.pkl')
    says_none(repr(store), store._repr_html_(), repr(store.link), repr(locked), repr(dls.train), repr(dls.train_ds),
        repr(dls.train_ds.items), store.manifest.to_json(),
              repr(store.manifest), pickle.dumps(store), pickle.dumps(dls.train_ds), pickle.dumps(dls),
              (tmp_path/'e.pkl').read_bytes(), repr(RedisWriter(store.link, 'd').opener()), repr(store.opener()))
    with zipfile.ZipFile(tmp_path/'e.pkl') as z: says_none(*(z.read(o) for o in z.namelist()))
    c = client(locked)
    for k in c.keys('*meta'): says_none(c.get(k))

@pytest.mark.parametrize('num_workers', [1,2])
def test_password_in_no_ingest(locked, num_workers):
    "Ingest with a password works from several processes; neither its report, what it leaves, nor its failure shows it"
    src = [{'bin':random.Random(i).randbytes(20_000)} for i in range(150)]
    rep = to_redis(src+[{'bin':3}], locked.url, 'd', num_workers=num_workers, progress=False)
    assert (rep.written,rep.failed)==(150,1)
    says_none(repr(rep), rep._repr_html_(), vars(rep))
    c = client(locked)
    c.config_set('maxmemory', c.info('memory')['used_memory']+900_000)
    says_none(*said(lambda: to_redis(src, locked.url, 'e', num_workers=num_workers, progress=False), StoreFull))
    c.config_set('maxmemory', 0)
    says_none(c.get('e:ingest'))
    for k in 'de': RedisStore.delete(locked.url, k)
    says_none(*said(lambda: to_redis([{'bin':3}]*20, locked.url, 'f', num_workers=num_workers, progress=False),
        IngestError))

_starts = '''
import os, torch
from fastai.data.core import DataLoaders
from fastai.vision.augment import Resize
import fastai_remote.block
if __name__=='__main__':
    for how in ('fork','spawn'):
        torch.multiprocessing.set_start_method(how, force=True)
        dls = DataLoaders.from_redis(os.environ.pop(f'SERVER_{how}'), 'pics', item_tfms=Resize(32), bs=8,
            num_workers=1, device='cpu')
        print(how, sum(len(y) for _,y in dls.valid))
'''

def test_password_reaches_workers(locked, tmp_path, interpreters):
    "Loader workers are let in however they are started"
    (f:=tmp_path/'starts.py').write_text(_starts)
    env = {k:v for k,v in os.environ.items() if k not in ('REDIS_URL','FASTAI_REMOTE_URL')}
    p = interpreters.run(f, env=env|{f'SERVER_{how}':locked.url for how in ('fork','spawn')})
    assert p.stdout.split()==['fork','12','spawn','12'], p.stderr
    says_none(p.stdout, p.stderr)

_reads = '''
import multiprocessing, sys
from fastai_remote import RedisStore
def read(store, q): q.put(store.get_many([0], 'txt')['txt'][0])
if __name__=='__main__':
    ctx,store = multiprocessing.get_context(sys.argv[1]),RedisStore(sys.argv[2], 'd')
    p = ctx.Process(target=read, args=(store, q:=ctx.Queue()))
    p.start(); print(q.get(timeout=250).decode()); p.join()
'''

@pytest.mark.parametrize('how', ['fork','spawn','forkserver'])
def test_workers_read_what_their_parent_reads(two, tmp_path, how):
    "A URL in the environment is for exports that are loaded: a worker reads from the server that its parent was given"
    for s,word in zip(two, ('mine','other')): to_redis([{'txt':word}], s.url, 'd', num_workers=1, progress=False)
    (f:=tmp_path/'reads.py').write_text(_reads)
    p = subprocess.run([sys.executable, f, how, two[0].url], capture_output=True, text=True, timeout=300,
        env={**os.environ, 'FASTAI_REMOTE_URL':two[1].url})
    assert p.stdout=='mine\n', p.stdout+p.stderr

@pytest.mark.parametrize('var', ['FASTAI_REMOTE_URL','REDIS_URL'])
def test_password_from_environment(locked, tmp_path, monkeypatch, var):
    "What was pickled or exported asks the environment for its password, or says to set it"
    for k in ('FASTAI_REMOTE_URL','REDIS_URL'): monkeypatch.delenv(k, raising=False)
    store = RedisStore(locked.url, 'pics')
    learn = Learner(loaders(store), nn.Sequential(nn.Flatten(), nn.Linear(3*32*32, 3)), CrossEntropyLossFlat(),
        path=tmp_path)
    learn.export('e.pkl')
    b,want = pickle.dumps(store),store[3]['cls']
    with in_time(): texts = said(lambda: pickle.loads(b).get_many([0], 'cls'), StoreUnavailable)
    assert 'set FASTAI_REMOTE_URL or REDIS_URL' in texts[0]
    says_none(*texts)
    monkeypatch.setenv(var, locked.url)
    assert pickle.loads(b)[3]['cls']==want
    assert load_learner(tmp_path/'e.pkl').predict(3)[0] in store.vocab
    b = pickle.dumps(pickle.loads(b))
    says_none(b)
    assert len(pickle.loads(b))==N

@pytest.fixture(scope='module')
def certs(tmp_path_factory):
    "A self-signed certificate for 127.0.0.1"
    if not shutil.which('openssl'): pytest.skip('no openssl to make a certificate with')
    d = tmp_path_factory.mktemp('certs')
    subprocess.run(['openssl','req','-x509','-newkey','ec','-pkeyopt','ec_paramgen_curve:prime256v1','-nodes','-keyout',
        d/'key','-out',d/'crt','-days','1',
                    '-subj','/CN=localhost','-addext','subjectAltName=IP:127.0.0.1,DNS:localhost'], check=True,
                    capture_output=True)
    return d/'crt',d/'key'

def test_tls(locked, certs):
    """TLS, password and all: through a proxy that ends it, for many servers are built without

    A certificate not trusted is named, soon."""
    with FaultProxy(str(locked.socket), cert=certs) as p:
        url = f'rediss://:{quote(PW, safe="")}@127.0.0.1:{p.port}'
        store = RedisStore(url, 'pics', ssl_ca_certs=str(certs[0]))
        assert len(run_through(loaders(store, num_workers=2)))==8
        assert to_redis([{'id':i} for i in range(40)], url, 'd', num_workers=2, progress=False,
            ssl_ca_certs=str(certs[0])).written==40
        with in_time(): texts = said(lambda: RedisStore(url, 'pics'), StoreUnavailable)
        assert 'certificate verify failed' in texts[0] and '(1 attempt ' in texts[0]
        says_none(*texts)

def test_tls_server(certs):
    "The same with a server that speaks TLS itself"
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); port = s.getsockname()[1]
    try:
        s = redis_server(requirepass=PW, tls_port=port, tls_cert_file=certs[0], tls_key_file=certs[1],
            tls_ca_cert_file=certs[0], tls_auth_clients='no')
    except RuntimeError: pytest.skip('the redis-server here is built without TLS')
    with s:
        url = f'rediss://:{quote(PW, safe="")}@127.0.0.1:{port}'
        to_redis([{'id':i} for i in range(40)], url, 'd', num_workers=1, progress=False, ssl_ca_certs=str(certs[0]))
        assert len(RedisStore(url, 'd', ssl_ca_certs=str(certs[0])))==40
