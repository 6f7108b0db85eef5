"Shards being written that are killed at every step, by whatever signal: repeated, the folder is that of an ingest to which nothing happened, byte for byte, and nothing else is in it"
import json, os, random, re, shutil, signal, subprocess, sys, time, zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import HOLD, holding, kill, wait_for

from fastai_remote import ShardStore, StoreBusy, StoreExists, StoreNotFound, index_shards, to_shards
from fastai_remote.write import shards as shard_writer
from test_shards import dead, index, items, lock, names, seen, sound, tar, values

# --- at every operation

LOCK = '.ingest','.ingest/lock.json'   # of the dead, where nothing else is left: whoever comes next takes it

_changes = {'os.rename','os.remove','os.rmdir','os.mkdir'}

def dies_at(k, f, folder):
    "Run `f` in a fork that dies before its `k`-th change of a file or folder in `folder`; did it die?"
    if (pid:=os.fork())==0:
        left,folder = [k],os.fspath(folder)
        def hook(event, args):
            if event not in _changes and not (event=='open' and isinstance(args[2], int) and args[2]&(os.O_WRONLY|os.O_RDWR)): return
            if not str(args[0]).startswith(folder): return
            if not left[0]: os._exit(9)
            left[0] -= 1
        sys.addaudithook(hook)
        try: f()
        except BaseException: pass
        finally: os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])==9

def fn(o):
    if o['id']%7==3: raise ValueError(f"no {o['id']}")
    return o

one = dict(num_workers=1, progress=False)
def known(d, w='a', **kw): return to_shards({'train':items(w, 30), 'valid':items(w, 8)}, d, fn, chunk=16, maxsize=30_000, max_failed=1., **one, **kw)
def stream(d, w='a', **kw): return to_shards({'train':iter(items(w, 30)), 'valid':iter(items(w, 8))}, d, fn, chunk=16, maxsize=30_000, max_failed=1., **one, **kw)

def see(d):
    "What a reader sees; the shards of an index that is beside them are in the folder `w`"
    try: s = ShardStore(d, shards_url=d.parent/'w' if d.name=='d' and (d.parent/'w').is_dir() else None)
    except StoreNotFound: return
    return [s[i] for i in range(len(s))],s.splits,s.manifest.failed,sorted(s.failures())

def undisturbed(act, d):
    act(d)
    return seen(d),see(d)

@pytest.mark.parametrize('act', [known,stream])
def test_writing(tmp_path, act):
    "Wherever it dies: nothing is to be seen, or all; the same call again makes the same files"
    want,after = undisturbed(act, tmp_path/'want'/'d')
    for k in range(300):
        d = tmp_path/f'{k}'/'d'
        died = dies_at(k, lambda: act(d), d)
        now = see(d)
        assert now in (None,after), k
        try: act(d)
        except StoreExists: assert now, k
        assert seen(d)==want, (k, set(names(d))^set(want))
        sound(d, 30_000)
        shutil.rmtree(d.parent)
        if not died: break
    assert k>30

@pytest.mark.parametrize('first', [known,stream])
def test_overwriting(tmp_path, first):
    "Wherever it dies: the old is to be seen whole, or the new; the same call again ends it, another one too"
    first(tmp_path/'old'/'d', 'o')
    shutil.copytree(tmp_path/'old', tmp_path/'want')
    before,(want,after) = see(tmp_path/'old'/'d'),undisturbed(lambda d: known(d, overwrite=True), tmp_path/'want'/'d')
    for k in range(300):
        d = tmp_path/f'{k}'/'d'
        shutil.copytree(tmp_path/'old'/'d', d)
        died = dies_at(k, lambda: known(d, overwrite=True), d)
        now = see(d)
        assert now in (before,after), k
        if k%3==2: stream(d, 'x', overwrite=True); sound(d, 30_000)
        if k%3==1 and now==before:
            try: ShardStore.abandon(d)
            except StoreNotFound: pass
            assert see(d)==before and not [n for n in names(d) if 'shard2' in n or '.ingest/' in n and n not in LOCK], k
        known(d, overwrite=True)
        sound(d, 30_000)
        assert see(d)==after, k
        if now==before and k%3!=2: assert seen(d)==want, (k, set(names(d))^set(want))
        shutil.rmtree(d.parent)
        if not died: break
    assert k>30

@pytest.mark.parametrize('what', ['whole','unfinished','replaced'])
def test_deleting(tmp_path, what):
    "Wherever it dies: once more, and all is gone; what others have in the folder stays"
    old = tmp_path/'old'/'d'
    def interrupt(self): raise KeyboardInterrupt
    def unfinished(w, **kw):
        with pytest.MonkeyPatch.context() as m:
            m.setattr(shard_writer.ShardWriter, 'commit', interrupt)
            with pytest.raises(KeyboardInterrupt): known(old, w, **kw)
    if what!='unfinished': known(old, 'o')
    if what!='whole': unfinished('n', overwrite=True)
    (old/'notes.txt').write_text('mine')
    before = see(old)
    for k in range(100):
        d = tmp_path/f'{k}'/'d'
        shutil.copytree(old, d)
        died = dies_at(k, lambda: ShardStore.delete(d), d)
        assert see(d) in (before,None), k
        if k%3==1: known(d, overwrite=True); sound_but(d, 'notes.txt')
        try: ShardStore.delete(d)
        except StoreNotFound: pass
        assert [n for n in names(d) if n not in LOCK]==['notes.txt'], (k, names(d))
        shutil.rmtree(d.parent)
        if not died: break
    assert k>5

def sound_but(d, name):
    b = (d/name).read_bytes()
    (d/name).unlink()
    sound(d, 30_000)
    (d/name).write_bytes(b)

@pytest.mark.parametrize('beside', [True,False])
def test_indexing(tmp_path, beside):
    "Wherever it dies: nothing is to be seen, or all; tars are not touched"
    w = tmp_path/'w'
    w.mkdir()
    for k in range(3): tar(w/f'shard-{k:06}.tar', [o for i in range(5) for o in ((f'{k}-{i}.txt', f'{k} {i}'.encode()),(f'{k}-{i}.cls', b'ab'[i%2:i%2+1]))])
    tars = {n:(w/n).read_bytes() for n in names(w)}
    def act(d): return index_shards(d.parent/'w' if beside else d, d if beside else None, **one)
    def start(k):
        d = tmp_path/f'{k}'/('d' if beside else 'w')
        shutil.copytree(w, d.parent/'w')
        return d
    want,after = undisturbed(act, start('want'))
    for k in range(100):
        died = dies_at(k, lambda: act(d), d:=start(k))
        now = see(d)
        assert now in (None,after), k
        try: act(d)
        except StoreExists: assert now, k
        got = seen(d)
        got['manifest']['base'] = want['manifest']['base']
        assert got==want and {n:b for n,b in seen_tars(d.parent/'w').items()}==tars, (k, set(names(d))^set(want))
        shutil.rmtree(d.parent)
        if not died: break
    assert k>15

def seen_tars(d): return {n:(d/n).read_bytes() for n in names(d) if n.endswith('.tar')}

# --- processes

_script = HOLD + '''
import os, sys, time
from fastai_remote import to_shards
url,what,num_workers = sys.argv[1],sys.argv[2],int(sys.argv[3])
def fn(i):
    hold()
    time.sleep(float(os.environ.get('PAUSE', 0)))   # the value of a variable would make it another fn
    if i%19==3: raise ValueError(f'no {i}')
    return {'txt':f'{what} {i}', 'cls':f'c{i%7}', 'id':i, 'labels':[f'l{i%3}',f'm{i%11}']}
src = range(4000) if what!='other' else range(10_000, 14_000)
if what=='stream': src = {'train':iter(src[:3500]), 'valid':iter(src[3500:])}
else: src = {'train':src[:3500], 'valid':src[3500:]}
print(to_shards(src, url, fn, num_workers=num_workers, progress=False, chunk=100, max_failed=1., maxsize=150_000, overwrite='over' in sys.argv))
'''

@pytest.fixture
def script(tmp_path):
    "Starts the script as a process group of its own; `hold`: each process stops after so many samples, until there is a file `go on`"
    (f:=tmp_path/'ingest.py').write_text(_script)
    ps = []
    def go(d, what='known', pause=0., num_workers=2, *more, hold=None):
        out = (tmp_path/f'{len(ps)}.out').open('w+')
        args = [sys.executable, '-W', 'ignore', f, str(d), what, str(num_workers), *more]
        ps.append(p:=subprocess.Popen(args, stdout=out, stderr=out, start_new_session=True, env={**holding(hold, tmp_path/'go on'), 'PAUSE':str(pause)}))
        p.said = lambda: (p.wait(500), Path(out.name).read_text())[1]
        return p
    yield go
    for p in ps: kill(p)

def done(d): return sum(n.startswith('.ingest/chunk-') for n in names(d)) if d.exists() else 0
def kids(p): return [int(k) for t in Path(f'/proc/{p.pid}/task').glob('*/children') for k in t.read_text().split() if b'popen_loky' in Path(f'/proc/{k}/cmdline').read_bytes()]

@pytest.fixture(scope='module')
def plain(tmp_path_factory):
    "What the script leaves that meets no accident"
    (f:=(t:=tmp_path_factory.mktemp('plain'))/'ingest.py').write_text(_script)
    got = {}
    def get(what):
        if what not in got:
            subprocess.run([sys.executable, f, str(t/what/'d'), what, '1'], check=True, capture_output=True)
            got[what] = seen(t/what/'d')
        return got[what]
    return get

@pytest.mark.parametrize('what,num_workers', [('known',2),('stream',1)])
def test_killed_again_and_again(tmp_path, script, plain, what, num_workers):
    "All of it is killed, some chunks on each time"
    d,rng = tmp_path/'d',random.Random(what)
    for k in range(3):
        n,p = done(d),script(d, what, .001, num_workers, hold=900//num_workers)   # of 40 chunks, 9 at most
        want = n+rng.randrange(1, 9)
        wait_for(lambda: p.poll() is not None or done(d)>=want)
        kill(p)
        with pytest.raises(StoreNotFound): ShardStore(d)
    out = (p:=script(d, what, 0, num_workers)).said()
    assert p.returncode==0 and 'by an earlier run' in out, out
    assert seen(d)==plain(what)

def test_leader_killed(tmp_path, script, plain):
    "Only the leader is killed, and its workers outlive it: they do no harm to who goes on at once, with the same or with something else"
    d = tmp_path/'d'
    p = script(d, 'known', hold=250)
    wait_for(lambda: done(d)>3)
    left = kids(p)
    p.kill(); p.wait()
    (tmp_path/'go on').touch()
    q = script(d, 'other', 0, 1, 'over')
    out = q.said()
    assert q.returncode==0, out
    s = ShardStore(d)
    assert {o.split()[0] for o in values(s, 'txt')}=={'other'} and min(values(s, 'id'))==10_000 and len(left)==2
    wait_for(lambda: not any(Path(f'/proc/{k}').exists() and b'popen_loky' in Path(f'/proc/{k}/cmdline').read_bytes() for k in left))   # they leave by themselves
    sound(d, 150_000)

def test_worker_killed(tmp_path, script, plain):
    "A worker dies: the ingest stops and says so; the same call again goes on"
    d,p = tmp_path/'d',script(tmp_path/'d', 'known', hold=250)
    wait_for(lambda: done(d)>3)
    os.kill(kids(p)[0], signal.SIGKILL)
    assert 'TerminatedWorkerError' in p.said() and p.returncode
    with pytest.raises(StoreNotFound): ShardStore(d)
    (p:=script(d)).said()
    assert p.returncode==0 and seen(d)==plain('known')

@pytest.mark.parametrize('num_workers', [1,2])
def test_interrupted(tmp_path, script, plain, num_workers):
    "Ctrl-C: says how far it is and what to do; the same call again goes on"
    d,p = tmp_path/'d',script(tmp_path/'d', 'known', 0, num_workers, hold=450)
    wait_for(lambda: done(d)>3)
    p.send_signal(signal.SIGINT)
    (tmp_path/'go on').touch()
    out = p.said()
    assert p.returncode and re.search(r'KeyboardInterrupt.*\n.*d: what is written is kept \([0-9]+ of 40 chunks done\): repeat the same call to go on, or ShardStore.abandon', out), out
    assert not (d/'.ingest/lock.json').exists()
    p = script(d)
    out = p.said()
    assert p.returncode==0 and 'by an earlier run' in out and seen(d)==plain('known')

def test_second_is_told(tmp_path, script, plain):
    "Two start the same: the second is refused, and told how far the first is; after `abandon`, nothing is left"
    d,p = tmp_path/'d',script(tmp_path/'d', 'known', hold=250)
    wait_for(lambda: done(d)>3)
    with pytest.raises(StoreBusy, match=rf'process {p.pid} on .* is writing here now \([0-9]+ of 40 chunks done\)'): to_shards([{'id':1}], d, **one)
    for act in (ShardStore.abandon,ShardStore.delete):
        with pytest.raises(StoreBusy): act(d)
    kill(p)
    ShardStore.abandon(d)
    assert names(d)==[]
