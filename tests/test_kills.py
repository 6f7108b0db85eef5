"An ingest that is killed, doubled, cut off from its server, fed changed or damaged sources: whole in the end, or refused; and small whatever its size"
import functools, io, json, os, pickle, random, re, shutil, signal, subprocess, sys, time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import redis
import torch
from PIL import Image

from conftest import HOLD, dies_at, holding, kill, wait_for
from fastai_remote import CorruptSample, RedisStore, StoreBusy, StoreExists, StoreNotFound, StoreUnavailable
from fastai_remote import image_samples, redis_server, to_redis
from fastai_remote.ingest.report import IngestError
from fastai_remote.source.base import fn_fingerprint
from fastai_remote.write.redis import RedisWriter
from fastai_remote.store.redis_link import RedisLink

one = dict(num_workers=1, progress=False)

@pytest.fixture
def two():
    "Two servers"
    with redis_server() as a, redis_server() as b: yield a,b

def client(server): return redis.Redis.from_url(server.url)
def keys(server): return sorted(re.sub('@[0-9]+', '@', k.decode()) for k in client(server).keys() if k!=b'fastai_remote:generations')

def whole(server, name='d'):
    "All that a reader sees of a dataset, the time of its making and its keys' prefix apart, and all keys of the server"
    s = RedisStore(server.url, name)
    res = {f:v if isinstance(v, list) else v.tolist() for f,v in s.get_many(range(len(s)), s.fields, check=True).items()}
    m = s.manifest
    return res,m.n,m.fields,m.splits,m.vocab,m.nbytes,m.failed,m.counts,m.stats,sorted(s.failures()),keys(server)

# --- kill -9, again and again

_n,_valid = 20_000,3_000

_script = HOLD.replace('%', '%%') + '''
import io, sys, time
from PIL import Image
from fastai_remote import RedisStore, redis_server, shrink, to_redis
url,what,pause,num_workers = sys.argv[1],sys.argv[2],float(sys.argv[3]),int(sys.argv[4])
n,valid = %d,%d

def grey(k):
    Image.new('L', (3+k,5), 20*k).save(b:=io.BytesIO(), 'PNG')
    return b.getvalue()
pics = [grey(k) for k in range(9)]

def fn(i):
    hold()
    if i%%100==0: time.sleep(pause)
    if i%%19==3: raise ValueError(f'no {i}')
    return {'txt':f'sample {i}', 'cls':f'c{i%%7}', 'id':i, 'png':pics[i%%9], 'labels':[f'l{i%%3}',f'm{i%%11}']}
def mapped(o):
    hold()
    time.sleep(pause/50)
    return {**o, 'txt':o['txt'].upper(), 'id':o['id']+1}
def gen(a, b): yield from range(a, b)

kw = dict(num_workers=num_workers, progress=False, chunk=100, max_failed=1.)
if what=='known': r = to_redis({'train':range(n)[:-valid], 'valid':range(n)[-valid:]}, url, 'd', fn, **kw)
elif what=='splits': r = to_redis({'train':gen(0, n-valid), 'valid':gen(n-valid, n)}, url, 'd', fn, **kw)
elif what=='stream': r = to_redis(gen(0, n), url, 'd', fn, **kw)
else:
    s = RedisStore(sys.argv[5], 'src')
    if what=='map': r = s.map(mapped, url, 'd', **kw)
    elif what=='resize': r = s.resize(3, url, 'd', **kw)
    else: r = s.copy(url, 'd', **kw)
print(r)
''' % (_n,_valid)

@pytest.fixture
def script(tmp_path):
    "Starts the script as a process group of its own; `hold`: each process stops after so many samples, until there is a file `go on`"
    (f:=tmp_path/'ingest.py').write_text(_script)
    ps = []
    def go(server, what, pause=0., num_workers=2, *more, hold=None):
        out = (tmp_path/f'{len(ps)}.out').open('w+')
        args = [sys.executable, f, server.url, what, str(pause), str(num_workers), *more]
        ps.append(p:=subprocess.Popen(args, stdout=out, stderr=out, start_new_session=True, env=holding(hold, tmp_path/'go on')))
        p.said = lambda: (p.wait(500), Path(out.name).read_text())[1]
        return p
    yield go
    for p in ps: kill(p)

def plan_of(c): return json.loads(c.get('d:ingest') or '{}')
def holds(c, p): return json.loads(c.get('d:ingest:lock') or '{}').get('pid')==p.pid
def goes(c, p): return p.poll() is not None or holds(c, p)

@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    "What the script leaves that meets no accident"
    (f:=tmp_path_factory.mktemp('undisturbed')/'ingest.py').write_text(_script)
    seen = {}
    def get(what, src=()):
        if what not in seen:
            with redis_server() as s:
                subprocess.run([sys.executable, f, s.url, what, '0', '1', *src], check=True, capture_output=True)
                seen[what] = whole(s)
        return seen[what]
    return get

def kill_often(start, server, rng, kills, of):
    "Kill `start()` `kills` times, most of them in between chunks, the last ones as it commits; then let it finish; how many died in the commit?"
    c,in_commit = client(server),0
    for k in range(kills):
        p,late = start(),k>=kills-4
        wait_for(lambda: goes(c, p))
        done = c.hlen('d:ingest:chunks')
        if late: wait_for(lambda: p.poll() is not None or plan_of(c).get('moved') or c.exists('d:meta'))
        else:
            want = done+rng.randrange(0, max(2, 2*of//kills))
            wait_for(lambda: p.poll() is not None or c.hlen('d:ingest:chunks')>=want or 'moved' in plan_of(c))
        time.sleep(rng.uniform(0, .002 if late else .02))
        kill(p)
        in_commit += 'moved' in plan_of(c)
        if c.exists('d:meta'):
            wait_for(lambda: not c.exists('d:ingest:lock'))   # of the process that was killed; it expires
            return in_commit
        with pytest.raises(StoreNotFound): RedisStore(server.url, 'd')
    out = (p:=start()).said()
    assert p.returncode==0 and 'by an earlier run' in out, out
    return in_commit

@pytest.mark.parametrize('what', ['known','splits'])
def test_twenty_kills(fresh, script, undisturbed, what):
    "Twenty times killed, in its chunks and in its commit: then each sample is there once, with its label, in its split, as if nothing had been"
    in_commit = kill_often(lambda: script(fresh, what, .001), fresh, random.Random(what), 20, _n//100)
    assert in_commit
    s = RedisStore(fresh.url, 'd')
    d = s.get_many(range(len(s)), s.fields, check=True)
    good = [i for i in range(_n) if i%19!=3]
    assert sorted(d['id'].tolist())==good and s.manifest.failed==_n-len(good)==len(list(s.failures()))
    for k,(a,b) in s.splits.items(): assert sorted(d['id'][a:b].tolist())==[i for i in good if (i<_n-_valid)==(k=='train')]
    for t,y,l,i in zip(d['txt'], d['cls'], d['labels'], d['id'].tolist()):
        assert t==b'sample %d'%i and s.vocab[y]==f'c{i%7}' and json.loads(l)==[f'l{i%3}',f'm{i%11}']
    assert whole(fresh)==undisturbed(what)

def test_parent_killed(fresh, script, undisturbed):
    "Only the parent is killed, and its workers outlive it: they do no harm to those who go on"
    c,rng = client(fresh),random.Random(1)
    for _ in range(4):
        p = script(fresh, 'stream', hold=2200)   # of 200 chunks, 44 at most
        wait_for(lambda: goes(c, p))
        want = c.hlen('d:ingest:chunks')+rng.randrange(1, 25)
        wait_for(lambda: p.poll() is not None or c.hlen('d:ingest:chunks')>=want)
        kids = Path(f'/proc/{p.pid}/task/{p.pid}/children').read_text().split() if p.poll() is None else []
        p.kill(); p.wait()
    p = script(fresh, 'stream')
    out = p.said()
    assert p.returncode==0, out
    assert whole(fresh)==undisturbed('stream')
    wait_for(lambda: not any(b'popen_loky' in o.read_bytes() for k in kids if (o:=Path(f'/proc/{k}/cmdline')).exists()))   # they leave by themselves

def test_worker_killed(fresh, script, undisturbed):
    "A worker dies (out of memory, say): the ingest stops and says so; the same call again goes on"
    c,p = client(fresh),script(fresh, 'known', hold=400)
    wait_for(lambda: c.hlen('d:ingest:chunks')>5)
    kids = [int(k) for k in Path(f'/proc/{p.pid}/task/{p.pid}/children').read_text().split()]
    for k in kids:
        if b'popen_loky' in Path(f'/proc/{k}/cmdline').read_bytes(): os.kill(k, signal.SIGKILL); break
    else: pytest.fail('no worker')
    assert 'TerminatedWorkerError' in p.said() and p.returncode
    (p:=script(fresh, 'known')).said()
    assert p.returncode==0 and whole(fresh)==undisturbed('known')

@pytest.mark.parametrize('what,of', [('known',' of 200 chunks done'), ('stream',' chunks done')])
def test_second_is_told(fresh, script, undisturbed, tmp_path, what, of):
    "Two processes start the same: the second is refused, and told how far the first is"
    c,p = client(fresh),script(fresh, what, hold=400)
    wait_for(lambda: c.hlen('d:ingest:chunks')>5)
    out = (q:=script(fresh, what)).said()
    assert q.returncode and (m:=re.search(rf"StoreBusy: .*process {p.pid} on .* is writing 'd' now \(([0-9,]+){of}\)", out)), out
    assert 5<int(m[1])<200
    (tmp_path/'go on').touch()
    p.said()
    assert p.returncode==0 and whole(fresh)==undisturbed(what)

@pytest.mark.parametrize('what', ['known','stream'])
@pytest.mark.parametrize('kept', ['always','snapshot','nothing'])
def test_server_killed(script, undisturbed, what, kept):
    "The server is killed and started again, with all, some or nothing of what it was told: whole in the end, by the same call"
    with redis_server(**(dict(appendonly='yes', appendfsync='always') if kept=='always' else {})) as s:
        rng = random.Random(f'{what} {kept}')
        for k in range(2):
            p,c = script(s, what, .004),client(s)
            wait_for(lambda: goes(c, p))
            done = c.hlen('d:ingest:chunks')
            wait_for(lambda: p.poll() is not None or c.hlen('d:ingest:chunks')>=done+rng.randrange(5, 30))
            if kept=='snapshot':
                c.save()
                wait_for(lambda: p.poll() is not None or c.hlen('d:ingest:chunks')>=done+40)
            os.killpg(p.pid, signal.SIGSTOP)   # what is committed may be lost, and nobody will say so
            if c.exists('d:meta'): os.killpg(p.pid, signal.SIGCONT); p.wait(); break
            s.kill(); os.killpg(p.pid, signal.SIGCONT); time.sleep(rng.uniform(0, .3)); s.start()
            out = p.said()
            if p.returncode==0: break
            assert re.search('ServerRestarted|StoreBusy|StoreUnavailable', out), out
        if p.returncode: out = (p:=script(s, what)).said()
        assert p.returncode==0, out
        assert whole(s)==undisturbed(what)

def test_second_in_another_container(fresh, script, tmp_path):
    "A process of the same host name, whose number means nothing here, is not taken for dead"
    inside = ['unshare','-Urpf','--mount-proc']
    if not shutil.which('unshare') or subprocess.run([*inside,'true'], capture_output=True).returncode: pytest.skip('no namespaces here')
    script(fresh, 'none')   # writes the file
    c,py = client(fresh),f'{sys.executable} {tmp_path}/ingest.py {fresh.url} known 0 1'
    with (tmp_path/'inside').open('w+') as out:
        args = [*inside,'sh','-c',f'for i in $(seq 400); do /bin/true; done; {py}; true']
        p = subprocess.Popen(args, stdout=out, stderr=out, start_new_session=True, env=holding(400, tmp_path/'never'))
        try:
            wait_for(lambda: c.hlen('d:ingest:chunks')>2)
            if Path(f"/proc/{json.loads(c.get('d:ingest:lock'))['pid']}").exists(): pytest.skip('the number is taken')
            assert 'StoreBusy' in (q:=script(fresh, 'known', 0, 1)).said() and q.returncode
        finally: kill(p)

# --- damaged sources

@pytest.mark.parametrize('each', [100,9])
def test_damaged_jpegs(fresh, tmp_path, each):
    "Truncated JPEGs among 2,000 files: every one is reported, nothing else is lost, numbers are dense"
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (24,24,3), np.uint8)).save(b:=io.BytesIO(), 'JPEG')
    b = b.getvalue()
    for i in range(2000): (tmp_path/f'{i:04}.jpg').write_bytes(b[:rng.integers(0, len(b)-60)] if i%each==7 else b)
    bad = {str(tmp_path/f'{i:04}.jpg') for i in range(2000) if i%each==7}
    rep = to_redis(image_samples(tmp_path, path=True), fresh.url, 'd', num_workers=2, progress=False, max_failed=1.)
    s = RedisStore(fresh.url, 'd')
    assert (rep.written,rep.failed,s.manifest.failed,len(rep.failures))==(2000-len(bad),len(bad),len(bad),min(100, len(bad)))
    assert sorted(n for n,_ in s.failures())==sorted(bad) and {n for n,_ in rep.failures}<=bad
    d = s.get_many(range(len(s)), ['jpg','path'], check=True)
    assert sorted(o.decode() for o in d['path'])==[f'{i:04}.jpg' for i in range(2000) if i%each!=7] and set(d['jpg'])=={b}
    assert s.verify(num_workers=1).bad==0
    RedisStore.delete(fresh.url, 'd')
    assert keys(fresh)==[]

# --- memory

_big = '''
import sys, threading
import numpy as np
from fastai_remote import RedisStore, redis_server, to_redis
from fastai_remote.source.base import IndexedSource
def rss(): return int(open('/proc/self/statm').read().split()[1])*4096/1e6
class Part:
    def __init__(self, idxs): self.idxs = idxs
    def __len__(self): return len(self.idxs)
    def __iter__(self): return ((f'item {i}',i) for i in self.idxs.tolist())
class Source(IndexedSource):
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def read(self, idxs): return Part(idxs)
    load = staticmethod(lambda o: o)
    def fingerprint(self): return self.n
class Watch:
    "What the process grows by, at most"
    def __enter__(self):
        self.first = self.top = rss()
        self.end = threading.Event()
        self.t = threading.Thread(target=self.look); self.t.start()
        return self
    def look(self):
        while not self.end.wait(.005): self.top = max(self.top, rss())
    def __exit__(self, *a): self.end.set(); self.t.join(); print('grew', round(self.top-self.first))
kw = dict(num_workers=1, progress=False)
s = redis_server()
to_redis(({'x.u1':1} for i in range(5000)), s.url, 'warm', **kw)
'''

def grew(code):
    "Run `code` in a process of its own: what `Watch` printed"
    p = subprocess.run([sys.executable, '-c', _big+code], capture_output=True, text=True, timeout=580)
    assert p.returncode==0, p.stdout+p.stderr
    return [int(l.split()[1]) for l in p.stdout.splitlines() if l.startswith('grew')]

def test_ten_million():
    "A plan of ten million samples, and the records of their chunks, cost the parent nothing"
    a,b = grew('''
import json, redis
left = [200_000]
def fn(i):
    left[0] -= 1
    if not left[0]: raise KeyboardInterrupt
    return {'x.u1':1}
with Watch():
    try: to_redis(Source(10_000_000), s.url, 'd', fn, **kw)
    except KeyboardInterrupt: pass
c = redis.Redis.from_url(s.url)
size = json.loads(c.get('d:ingest'))['chunk']
done = {int(k) for k in c.hkeys('d:ingest:chunks')}
recs = {k:json.dumps(dict(ok=min(size, 10_000_000-k*size), bytes=size, failed=0, gaps=[])) for k in range(-(-10_000_000//size)) if k not in done}
assert len(recs)>9000
c.hset('d:ingest:chunks', mapping=recs); del recs
with Watch(): rep = to_redis(Source(10_000_000), s.url, 'd', fn, **kw)
assert rep.written==10_000_000 and len(RedisStore(s.url, 'd'))==10_000_000
''')
    assert max(a, b)<50, (a, b)

def test_endless_stream():
    "A stream of three hundred thousand costs no more than one of fifty thousand"
    a,b = grew('''
for n in (50_000,300_000):
    with Watch(): rep = to_redis(({'x.u1':i%7} for i in range(n)), s.url, f'd{n}', **kw)
    assert rep.written==n
''')
    assert max(a, b)<30, (a, b)

def test_million_failures():
    "A million samples that fail are all kept, on the server, and the parent stays small"
    a,b,c = grew('''
def fn(i):
    if i%1000: raise ValueError('a reason that is as long as reasons are, with the name of a file and what Pillow says of it')
    return {'x.u1':1}
n = 1_000_000
with Watch(): rep = to_redis(Source(n), s.url, 'd', fn, shuffle=False, max_failed=1., **kw)
assert (rep.written,rep.failed,len(rep.failures))==(1000,n-1000,100)
with Watch(): first = next(RedisStore(s.url, 'd').failures())
with Watch(): assert sum(1 for _ in RedisStore(s.url, 'd').failures())==n-1000
''')
    assert max(a, b, c)<50, (a, b, c)

# --- map, resize, copy

@pytest.fixture(scope='module')
def source():
    "A server with a dataset to be made into others: 6,000 samples, the numbers in `gone` damaged"
    with redis_server() as s:
        def png(i):
            Image.fromarray(np.full((6,8,3), i%251, np.uint8)).save(b:=io.BytesIO(), 'PNG')
            return b.getvalue()
        pics = [png(i) for i in range(251)]
        items = [{'png':pics[i%251], 'txt':f'sample {i}', 'cls':f'c{i%7}', 'id':i, 'labels':[f'l{i%3}'], 'npy':np.arange(i%5)} for i in range(6000)]
        to_redis({'train':items[:5000], 'valid':items[5000:]}, s.url, 'src', num_workers=2, progress=False)
        c = client(s)
        for i in (17,4999,5000): c.set(f'src:png:{i}', b'damaged')
        c.delete('src:txt:555')
        yield s

@pytest.mark.parametrize('what', ['map','resize','copy'])
def test_killed_ops(fresh, source, script, undisturbed, what):
    "Killed in the middle and repeated: as if nothing had been; damaged samples are left out, and reported"
    kill_often(lambda: script(fresh, what, .004, 2, source.url), fresh, random.Random(what), 5, 60)
    seen = whole(fresh)
    assert seen==undisturbed(what, [source.url]) and seen[6]==4 and [n for n,_ in seen[9]]==['sample 17','sample 4999','sample 5000','sample 555']
    s,old = RedisStore(fresh.url, 'd'),RedisStore(source.url, 'src')
    ids = old.get_many([i for i in range(6000) if i not in (17,555,4999,5000)], 'id')['id']+(what=='map')
    assert sorted(seen[0]['id'])==sorted(ids.tolist()) and s.vocab==old.vocab
    assert {k:b-a for k,(a,b) in s.splits.items()}=={'train':4997, 'valid':999} and s.verify(num_workers=1).bad==0

def test_source_replaced(two, script, tmp_path):
    "A map whose source is replaced meanwhile stops, and cannot be finished with the new one"
    a,b = two
    def make(w): to_redis([{'txt':f'{w} {i}', 'id':i} for i in range(3000)], a.url, 'src', overwrite=True, **one)
    make('old')
    p = script(b, 'map', 0, 1, a.url, hold=500)
    wait_for(lambda: client(b).hlen('d:ingest:chunks')>3)
    make('new')
    (tmp_path/'go on').touch()
    assert re.search('StoreNotFound: src: replaced since it was opened', p.said()) and p.returncode
    assert 'StoreExists' in script(b, 'map', 0, 1, a.url).said()
    RedisStore.abandon(b.url, 'd')
    assert keys(b)==[]
    script(b, 'map', 0, 1, a.url).said()
    d = RedisStore(b.url, 'd').get_many(range(3000), ['txt','id'], check=True)
    assert [o.decode() for o in d['txt']]==[f'NEW {i-1}' for i in d['id'].tolist()]

def test_verify_finds_all(fresh):
    "Exactly the damaged ones: missing, changed, cut off; whichever worker reads them"
    to_redis([{'txt':f'sample {i}', 'bin':bytes([i%256])*20, 'cls':'ab'[i%2]} for i in range(3000)], fresh.url, 'd', **one)
    c,rng = client(fresh),random.Random(0)
    bad = sorted(rng.sample(range(3000), 137))
    for k,i in enumerate(bad):
        if k%3==0: c.delete(f'd:txt:{i}')
        elif k%3==1: c.setrange(f'd:bin:{i}', rng.randrange(20), b'\xff\x00'[i%256==255:][:1])
        else: c.set(f'd:txt:{i}', c.get(f'd:txt:{i}')[:-1])
    for num_workers,chunk in ((1,2048),(2,100)):
        rep = RedisStore(fresh.url, 'd').verify(num_workers=num_workers, chunk=chunk)
        assert (rep.samples,rep.bad,[i for i,_ in rep.failures])==(3000,137,bad[:100])
    c.setrange('d:cls#0', 5*1234, b'\x77')   # a label and its checksum are five bytes
    assert RedisStore(fresh.url, 'd').verify(**{'num_workers':1}).bad==138-(1234 in bad)

# --- names that change hands, and what is left

def items(w, n=60): return [{'txt':f'{w} {i}', 'cls':f'{w}{i%3}', 'labels':[w], 'id':i} for i in range(n)]
def texts(server, name):
    s = RedisStore(server.url, name)
    return {o.decode().split()[0] for o in s.get_many(range(len(s)), s.fields, check=True)['txt']}

@contextmanager
def stopped(server, name, w, at=40, **kw):
    "An ingest of `name` that stops in the middle; then what it raised"
    def fn(o):
        if o['id']==at: raise KeyboardInterrupt
        return o
    with pytest.raises(KeyboardInterrupt): to_redis(items(w), server.url, name, fn, shuffle=False, chunk=16, **{**one, **kw})
    yield

@pytest.mark.parametrize('which', ['a','b'])
def test_rename_while_writing(fresh, which):
    "Not while an ingest of either name runs; afterwards, unless the new name has an unfinished one"
    to_redis(items('a'), fresh.url, 'a', **one)
    s,before = RedisStore(fresh.url, 'a'),texts(fresh, 'a')
    w = RedisWriter(RedisLink(fresh.url), which)
    w.take_lock()
    with pytest.raises(StoreBusy, match=f"is writing '{which}' now"): s.rename('b')
    w.close()
    with stopped(fresh, which, 'z', overwrite=True): pass
    if which=='b':
        with pytest.raises(StoreExists, match="'b' is there already, an unfinished ingest"): s.rename('b')
        RedisStore.abandon(fresh.url, 'b')
    assert texts(fresh, s.rename('b').name)==before and RedisStore.names(fresh.url)==['b']
    if which=='a':
        to_redis(items('z'), fresh.url, 'a', lambda o: o, **one, overwrite=True)
        assert (texts(fresh, 'a'),texts(fresh, 'b'))==({'z'},{'a'})

@pytest.mark.parametrize('seed', range(12))
def test_names_change_hands(fresh, seed):
    "Whatever is written, stopped, renamed and deleted under three names: each holds its own, and nothing else is left"
    rng,have,left = random.Random(seed),{},set()
    for k in range(14):
        a,b = rng.sample('xyz', 2)
        act = rng.choice(['put','stop','rename','rename','delete','abandon'])
        if act=='put': to_redis(items(f'w{k}', 20+k), fresh.url, a, overwrite=True, **one); have[a] = f'w{k}'; left.discard(a)
        elif act=='stop':
            with stopped(fresh, a, f'w{k}', overwrite=True): left.add(a)
        elif act=='rename' and a in have:
            if b in have or b in left:
                with pytest.raises(StoreExists): RedisStore(fresh.url, a).rename(b)
            else: RedisStore(fresh.url, a).rename(b); have[b] = have.pop(a)
        elif act=='delete' and (a in have or a in left): RedisStore.delete(fresh.url, a); have.pop(a, 0); left.discard(a)
        elif act=='abandon' and a in left: RedisStore.abandon(fresh.url, a); left.discard(a)
        assert RedisStore.names(fresh.url)==sorted(have) and [d['name'] for d in RedisStore.unfinished(fresh.url)]==sorted(left)
        for n,w in have.items(): assert texts(fresh, n)=={w}
    for n in left: RedisStore.abandon(fresh.url, n)
    want = {'fastai_remote:names'} if have else set()
    for n in have:
        m = RedisStore(fresh.url, n).manifest
        var = [f for f,d in m.fields.items() if d['dtype'] is None]
        want |= {f'{n}:meta', *(f'{m.prefix}:{f}:{i}' for f in var for i in range(m.n)), *(f'{m.prefix}:{f}#0' for f in m.fields if f not in var)}
    assert {k.decode() for k in client(fresh).keys()}-{'fastai_remote:generations'}==want
    for n in have: RedisStore.delete(fresh.url, n)
    assert keys(fresh)==[]

@pytest.mark.parametrize('what', ['rename','rename to another\'s old name','abandon','stream'])
def test_dies_at_each_request(fresh, what):
    "Wherever it dies: one whole dataset, under one name; the same call again ends it; no key is lost or left over"
    def start():
        client(fresh).flushall()
        if 'another' in what: to_redis(items('z'), fresh.url, 'b', **one); RedisStore(fresh.url, 'b').rename('c'); RedisStore.delete(fresh.url, 'c')
        if what!='stream': to_redis(items('a'), fresh.url, 'a', **one)
        if what=='abandon':
            with stopped(fresh, 'a', 'z', overwrite=True): pass
    def act():
        if what=='abandon': RedisStore.abandon(fresh.url, 'a')
        elif what=='stream': to_redis({'t':iter(items('a')[:33]), 'v':iter(items('a')[33:])}, fresh.url, 'a', stop_after(0), **{**one, 'chunk':16})
        else: RedisStore(fresh.url, 'a').rename('b')
    def see(): return [(n,whole(fresh, n)[:10]) for n in RedisStore.names(fresh.url)]
    start(); before = see(); act(); after,left = see(),keys(fresh)
    for k in range(200):
        start()
        died = dies_at(k, act)
        assert see() in (before,after), k
        if not died: break
        try: act()
        except (StoreNotFound,StoreExists): assert see()==after
        assert see()==after and [o for o in keys(fresh) if not o.endswith(':lock')]==left and RedisStore.unfinished(fresh.url)==[], k   # a lock has a lease
    assert k>3

@pytest.mark.parametrize('what', ['known','splits','stream'])
def test_abandoned_after_kills(fresh, script, what):
    "`unfinished` tells of it, whether it runs and how far it is; `abandon` not while it runs, and then it leaves no key"
    c,p = client(fresh),script(fresh, what, hold=400)
    wait_for(lambda: c.hlen('d:ingest:chunks')>5)
    d, = RedisStore.unfinished(fresh.url)
    assert d['name']=='d' and d['running'] and d['of']==(200 if what=='known' else None) and 5<d['chunks']<200
    with pytest.raises(StoreBusy): RedisStore.abandon(fresh.url, 'd')
    kill(p)
    RedisStore.abandon(fresh.url, 'd')
    assert RedisStore.unfinished(fresh.url)==[] and keys(fresh)==[]
    with pytest.raises(StoreNotFound): RedisStore.abandon(fresh.url, 'd')

@pytest.mark.parametrize('when', ['during','after'])
@pytest.mark.parametrize('where', ['server','cluster'])
def test_an_attempt_that_outlives_the_commit_of_partitions_writes_nothing(where, when, request, monkeypatch):
    "A speculative attempt of Spark ends while the leader removes chunks of such attempts, or when it has moved samples"
    url = request.getfixturevalue({'server':'fresh', 'cluster':'cluster'}[where]).url
    rows = [{'id':i, 'txt':f't{i}'} for i in range(8)]
    with RedisStore.writer(url, 'd', sample=rows[0], chunk=8) as w:
        late = pickle.loads(pickle.dumps(w))
        def go_on():
            "The rest of an attempt that had claimed chunk 0 before the commit"
            monkeypatch.setattr(RedisWriter, 'claim', lambda self: 0)
            with pytest.raises(StoreBusy): list(late([{'id':i, 'txt':'late'} for i in range(100, 108)]))
        w.writer.claim()
        records = list(w(rows))
        method = {'during':'undo', 'after':'_fill_gaps'}[when]
        original = getattr(RedisWriter, method)
        def then_goes_on(self, *args):
            original(self, *args)
            go_on()
        monkeypatch.setattr(RedisWriter, method, then_goes_on)
        w.commit(records)
    store = RedisStore(url, 'd')
    assert sorted(store.get_many(range(len(store)), 'id', check=True)['id'].tolist())==list(range(8))
    assert not store.verify(num_workers=1).bad

def test_commit_of_partitions_may_be_repeated(fresh):
    "After an `IngestError`, also with rows that were written in between"
    def fn(i):
        if i%2: raise ValueError('odd')
        return {'id':i}
    with RedisStore.writer(fresh.url, 'd', 0, fn, chunk=4) as w:
        records = list(w(range(40)))
        with pytest.raises(IngestError): w.commit(records)
        records += list(w(range(40, 48)))
        assert w.commit(records, max_failed=.5).written==24

def test_an_interrupt_stays_one_while_the_server_is_away():
    "It says what to do, and does not wait for the server as long as a read does"
    with redis_server() as server:
        def fn(i):
            if i<40: return {'id':i}
            server.kill()
            raise KeyboardInterrupt
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt) as caught:
            to_redis(list(range(100)), server.url, 'd', fn, chunk=8, shuffle=False, **one)
        assert time.monotonic()-started<15
    assert 'd: what is written is kept: repeat the same call to go on' in caught.value.__notes__[0]

def test_a_damaged_number_of_generations_is_named_by_rename(fresh):
    to_redis([{'id':1}], fresh.url, 'a', **one)
    client(fresh).hset('fastai_remote:generations', 'a', b'1x')
    with pytest.raises(CorruptSample, match="fastai_remote:generations has b'1x' for 'a'"):
        RedisStore(fresh.url, 'a').rename('b')

@pytest.mark.parametrize('error', [KeyboardInterrupt,StoreUnavailable])
def test_a_lock_whose_taking_was_interrupted_is_taken_at_once(fresh, error, monkeypatch):
    original = RedisLink.call
    def call(self, f, *args, **kwargs):
        result = original(self, f, *args, **kwargs)
        if f.__name__!='acquire': return result
        monkeypatch.setattr(RedisLink, 'call', original)
        raise error('no answer')
    monkeypatch.setattr(RedisLink, 'call', call)
    with pytest.raises(error): to_redis([{'id':1}], fresh.url, 'd', **one)
    to_redis([{'id':1}], fresh.url, 'd', **one)

def test_set_back_and_abandoned(fresh):
    "A server set back to when less of a stream was planned, and an ingest that went on from there and died: no key is left when it is abandoned"
    c,down = client(fresh),[]
    def fn(o):
        if o['id']==100: c.save()
        if o['id']==5000 and not down: down.append(1); fresh.kill(); fresh.start()
        if o['id']==7000: raise KeyboardInterrupt
        return o
    with pytest.raises(KeyboardInterrupt): to_redis(({'txt':f'{i}', 'id':i} for i in range(20_000)), fresh.url, 'd', fn, **one)
    RedisStore.abandon(fresh.url, 'd')
    assert keys(fresh)==[]

# --- a source, or a call, that is not the same any more

def put(server, src, fn=None, **kw): return to_redis(src, server.url, 'd', fn, **{**one, 'chunk':16, **kw})

def stop_after(n, value=0):
    "An fn that stops the ingest at its `n`-th sample, never if `n` is 0"
    left = [n]
    def fn(o):
        left[0] -= 1
        if not left[0]: raise KeyboardInterrupt
        return {**o, 'i4':value}
    return fn

def changed(o, at): return [{**d, 'txt':'changed'} if i==at else d for i,d in enumerate(o)]

base = items('a', 100)
@pytest.mark.parametrize('src,kw', [(changed(base, 0),{}), (changed(base, 99),{}), (changed(base, 50),{}), (base[:-1],{}), (base+base[:1],{}),
    (base,{'value':1}), (base,{'seed':1}), (base,{'shuffle':False}), (base,{'vocab':['a0','a1','a2']}),
    (base,{'splits':{'t':.5, 'v':.5}}), ({'train':base},{})],
    ids=['first','last','middle','fewer','more','fn','seed','shuffle','vocab','splits','as split'])
def test_known_changed(fresh, src, kw):
    "Refused, nothing touched; the old call still finishes"
    with pytest.raises(KeyboardInterrupt): put(fresh, base, stop_after(50))
    before = keys(fresh)
    with pytest.raises(StoreExists, match='unfinished ingest.*another source or fn'): put(fresh, src, stop_after(0, kw.pop('value', 0)), **kw)
    assert keys(fresh)==before
    assert put(fresh, base, stop_after(0)).resumed==48 and len(RedisStore(fresh.url, 'd'))==100

class Texts:
    "A map-style dataset"
    def __init__(self, o): self.o = o
    def __len__(self): return len(self.o)
    def __getitem__(self, i): return self.o[i]

@pytest.mark.parametrize('kind', [pd.DataFrame,Texts])
@pytest.mark.parametrize('at', [0,50,99])
def test_other_known_changed(fresh, kind, at):
    "The same for rows and datasets"
    src = [{'txt':o['txt']} for o in base]
    with pytest.raises(KeyboardInterrupt): put(fresh, kind(src), stop_after(50))
    with pytest.raises(StoreExists, match='unfinished ingest'): put(fresh, kind(changed(src, at)), stop_after(0))

def test_label_changed(fresh, tmp_path):
    "A label function that was mended meanwhile is another: no dataset with labels of both"
    for i in range(60): Image.new('L', (9,9), i).save(tmp_path/f'{i}.jpg')
    with pytest.raises(KeyboardInterrupt): put(fresh, image_samples(tmp_path, label=lambda p: 'wrong'), stop_after(30))
    with pytest.raises(StoreExists, match='unfinished ingest'): put(fresh, image_samples(tmp_path, label=lambda p: 'right'), stop_after(0))

def scaled(o, by): return {'id':by}

def versions():
    "Pairs of an fn and what it became; only what they hold on to differs"
    def kw(k):
        def fn(o, *, n=k): return {'id':o['id']*n}
        return fn
    def inner(k): return (lambda o: {'id':o['id']*2}) if k==1 else lambda o: {'id':o['id']*3}
    def closed(k):
        f = inner(k)
        return lambda o: f(o)
    def table(k):
        names = {'a':k}
        return lambda o: {'id':names['a']}
    def assigned(k):
        names = {'a':k}
        def fn(o):
            sample = dict(o)
            sample['id'] = names['a']
            sample.update(id=names['a'])
            return sample
        return fn
    def numbers(k):
        table = np.arange(5000)
        table[2500] = k
        return lambda o: {'id':table[o['id']]}
    def series(k):
        table = pd.Series(['a','b',str(k)])
        return lambda o: {'id':table[o['id']]}
    def tensor(k):
        table = torch.tensor([1,2,k])
        return lambda o: {'id':table[o['id']]}
    def several(k):
        names = [{'a':{k}}]
        return lambda o: {'id':names[0]}
    def method(k): return type('Fn', (), {'__call__':lambda self, o: self.one(o), 'one':(lambda self, o: {'id':7}) if k==1 else lambda self, o: {'id':8}})()
    def of_class(**members): return type('Fn', (), {'__call__':lambda self, o: self.one(o), **members})()
    def two(k): return (lambda *args: {'id':7}) if k==1 else lambda *args: {'id':8}
    def static_method(k): return of_class(one=staticmethod(two(k)))
    def static_partial(k): return of_class(one=staticmethod(functools.partial(scaled, by=k)))
    def class_method(k): return of_class(one=classmethod(two(k)))
    def property_(k): return of_class(one=property(two(k)))
    def setter(k): return of_class(one=property(None, two(k)))
    def cached(k): return of_class(one=functools.cached_property(two(k)))
    def partial_method(k): return of_class(one=functools.partialmethod(scaled, by=k))
    def remembered(k): return of_class(one=functools.lru_cache(two(k)))
    def default_of_method(k):
        def one(self, o, n=k): return {'id':n}
        return of_class(one=one)
    def of_base(k): return type('Fn', (type(static_method(k)),), {})()
    def remembered_function(k):
        f = functools.lru_cache(two(k))
        return lambda o: f(o)
    def remembered_argument(k): return functools.partial(scaled, by=functools.lru_cache(two(k)))
    def of_module(code):
        "The last function of a module that contains this code"
        exec(code, module:={'__name__':'of_a_user'})
        return module['fn']
    def helper(k): return of_module(f'def label(o): return {k}\ndef fn(o): return dict(id=label(o))')
    def variable(k): return of_module(f'names = dict(a=[{k}])\ndef fn(o): return dict(id=names)')
    def inside(k): return of_module(f'names = dict(a=[{k}])\ndef fn(o): return dict(id=[names for _ in o])')
    def mutual(k): return of_module(f'def odd(o): return fn(o) if o else {k}\ndef fn(o): return odd(o-1)')
    return {f.__name__:(f(1),f(2)) for f in (kw,closed,table,assigned,numbers,series,tensor,several,method,helper,
        variable,inside,mutual,static_method,static_partial,class_method,property_,setter,cached,partial_method,
        remembered,default_of_method,of_base,remembered_function,remembered_argument)}

@pytest.mark.parametrize('which', versions())
def test_fn_changed(which):
    "An fn that differs in what it holds on to is another"
    a,b = versions()[which]
    assert fn_fingerprint(a)!=fn_fingerprint(b) and fn_fingerprint(a)==fn_fingerprint(versions()[which][0])

class Table:
    "An object without a `repr` of its own"
    def __init__(self, values): self.values = values
    def __call__(self, o): return {'id':self.values[o['id']]}
    def run(self, o): return self(o)

@dataclass
class Size:
    values:object

def arguments(k):
    "Values of which a `repr` shows nothing or only a part; those for `k` 1 and 2 differ"
    table = np.arange(10_000)
    table[5000] = k
    return dict(array=table, tensor=torch.tensor(table), in_a_list=[{'a':table}], function=lambda o: table,
        object=Table(k), nested=Table([Table(table)]), dataclass=Size(table),
        image=Image.new('L', (4,4), k), times=np.array([k], 'M8[ns]'), half=torch.tensor([float(k)],
            dtype=torch.bfloat16), sparse=torch.tensor([0,k]).to_sparse(),
        pattern=re.compile('x'*300+str(k)), partial=functools.partial(scaled, by=table), method=Table(k).run,
            lookup={'a':k}.get)

@pytest.mark.parametrize('which', arguments(1))
def test_an_argument_that_changed_is_noticed_wherever_it_is(which):
    "In a `partial`, a default, an attribute, the object of a method, a function in a closure; also far inside"
    def made(k):
        value = arguments(k)[which]
        def default(o, x=value): return x
        made_of = functools.partial(scaled, by=value)
        methods = [Table(value).run]
        return functools.partial(scaled, by=value), functools.partial(scaled,
            value), default, Table(value), Table(value).run, lambda o: made_of(o), lambda o: methods[0](o)
    for a,b,same in zip(made(1), made(2), made(1),
        strict=True): assert fn_fingerprint(a)!=fn_fingerprint(b) and fn_fingerprint(a)==fn_fingerprint(same)

def test_arguments_that_contain_themselves_are_identified():
    table,values = Table(None),[]
    table.values = table.run
    values.append(values)
    def default(o, x=None): return x
    default.__defaults__ = default,
    for fn in table, table.run, functools.partial(scaled,
        by=values), default: assert fn_fingerprint(fn)==fn_fingerprint(fn)

def counting():
    "Functions that change what they name, in each of the ways that there are"
    seen,totals,left,count = [],{},np.array([5]),0
    def append(o): seen.append(o)
    def store(o): totals[o] = 1
    def subtract(o): left[0] -= 1
    def replace(o):
        nonlocal count
        count += 1
    def inner(o): return [seen.append(x) for x in o]
    return seen,totals,left,(append,store,subtract,replace,inner)

def test_what_a_function_changes_does_not_make_it_another():
    "An interrupted ingest in this process is continued by the same call"
    seen,totals,left,functions = counting()
    before = [fn_fingerprint(f) for f in functions]
    for f in functions: f([1] if f.__name__=='inner' else 1)
    assert seen and totals and left[0]==4 and [fn_fingerprint(f) for f in functions]==before

def test_an_fn_may_name_anything(tmp_path):
    "Classes, modules, open files and sets of classes are identified, and left as they are"
    kinds,names = {int, np.float32},{'image':Image.Image, 'lib':np}
    with open(tmp_path/'log', 'wb') as log:
        def fn(o): return kinds, names, io.BufferedWriter, Image, torch.nn, print, log, o
        assert fn_fingerprint(fn)==fn_fingerprint(fn)
        log.write(b'still open')
    assert (tmp_path/'log').read_bytes()==b'still open'
    def other(o): return kinds, names, io.BufferedWriter, Image, torch.nn, print, log, o
    before = fn_fingerprint(other)
    kinds.add(str)
    assert fn_fingerprint(other)!=before

class Text:
    "A raw sample that remembers what was made of it, and has no `repr` of its own"
    def __init__(self, n): self.n,self.made = n,None

def test_a_stream_whose_fn_changes_what_it_is_given_is_resumed(fresh):
    "The parts are recognised by what they were before `fn` got them, and are told apart"
    left = [50]
    def fn(o):
        left[0] -= 1
        if not left[0]: raise KeyboardInterrupt
        o.made = {'id':o.n}
        return o.made
    def write(first=0): return put(fresh, map(Text, range(first, 100)), fn)
    with pytest.raises(KeyboardInterrupt): write()
    with pytest.raises(StoreExists): write(1)
    assert write().resumed==48

def test_known_other_chunk(fresh):
    "Another size of chunks is no other ingest: the one begun with stays"
    with pytest.raises(KeyboardInterrupt): put(fresh, base, stop_after(50))
    assert put(fresh, base, stop_after(0), chunk=7).resumed==48
    s = RedisStore(fresh.url, 'd')
    assert sorted(s.get_many(range(100), 'id', check=True)['id'].tolist())==list(range(100)) and s.verify(num_workers=1).bad==0

@pytest.mark.parametrize('src,kw', [(changed(base, 0),{}), (changed(base, 15),{}), (changed(base, 16),{}), (changed(base, 47),{}), (base[1:],{}),
    (base[:40],{}), (base[:32],{}), (base[:16],{}), (base[:20]+base[21:],{}), (base[:20]+base[19:],{}), (base,{'chunk':8}), (base,{'value':1})],
    ids=['first','last of a part','first of a part','last of all done','without the first','fewer','by a part','by two parts',
         'one gone','one twice','chunk','fn'])
def test_stream_changed(fresh, src, kw):
    "Refused before anything of it becomes visible; the old call still finishes, with the old samples"
    with pytest.raises(KeyboardInterrupt): put(fresh, iter(base), stop_after(50))
    with pytest.raises(StoreExists): put(fresh, iter(src), stop_after(0, kw.pop('value', 0)), **kw)
    with pytest.raises(StoreNotFound): RedisStore(fresh.url, 'd')
    assert put(fresh, iter(base), stop_after(0)).resumed==48
    d = RedisStore(fresh.url, 'd').get_many(range(100), ['txt','id'], check=True)
    assert d['id'].tolist()==list(range(100)) and [o.decode() for o in d['txt']]==[f'a {i}' for i in range(100)]

@pytest.mark.parametrize('n', [96,100])
@pytest.mark.parametrize('more', [1,16,-1,-16,-20])
def test_stream_longer_after_its_end(two, n, more, monkeypatch):
    "An ingest killed in its commit knew the stream's end: one that is longer or shorter now is refused, or becomes all of it; never some of both"
    def stop(self): raise KeyboardInterrupt
    def fn(o): return {**o, 'cls':f"c{o['id']}", 'labels':[f"l{o['id']}"]}
    a,b = two
    with monkeypatch.context() as m:
        m.setattr(RedisWriter, 'commit', stop)
        with pytest.raises(KeyboardInterrupt): put(a, iter(items('a', n)), fn)
    try: put(a, iter(items('a', n+more)), fn)
    except StoreExists: put(a, iter(items('a', n)), fn); more = 0
    put(b, iter(items('a', n+more)), fn)
    assert whole(a)==whole(b)

def test_iterator_refused_is_whole(fresh):
    "What refuses an iterator has taken nothing from it: the same one can be given again"
    to_redis([{'id':-1}], fresh.url, 'd', **one)
    it = ({'id':i} for i in range(200))
    with pytest.raises(StoreExists): to_redis(it, fresh.url, 'd', **one)
    to_redis(it, fresh.url, 'd', overwrite=True, **one)
    assert RedisStore(fresh.url, 'd').get_many(range(200), 'id')['id'].tolist()==list(range(200))

@pytest.mark.parametrize('num_workers', [1,2])
def test_stream_breaks_off(fresh, num_workers):
    "A stream that raises in the middle ends the ingest with its own error; nothing is visible; mended, it goes on"
    def gen(bad):
        for i in range(3000):
            if i==bad: raise OSError(f'disk gone at {i}')
            yield {'id':i}
    with pytest.raises(OSError, match='disk gone at 2000'): to_redis(gen(2000), fresh.url, 'd', num_workers=num_workers, progress=False)
    with pytest.raises(StoreNotFound): RedisStore(fresh.url, 'd')
    assert to_redis(gen(None), fresh.url, 'd', num_workers=num_workers, progress=False).written==3000
    assert RedisStore(fresh.url, 'd').get_many(range(3000), 'id')['id'].tolist()==list(range(3000))
