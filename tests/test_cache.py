"The cache under many processes, kills, full and read-only disks: never above its bound, never in the way of reading, nothing left behind"
import errno, fcntl, gc, math, os, pickle, random, resource, shutil, signal, subprocess, sys, threading, time, warnings
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import examples, wait_for
from hypothesis import given, strategies as st

from fastai_remote.store import cache as mod
from fastai_remote.store.cache import FileCache

KB = 1000

def content(key, n): return (key.encode()*(n//len(key)+1))[:n]
def writer(key, n, log=None, pause=0):
    "A `write` that is slow, and leaves a line for each time it ran"
    def write(f):
        if log: log_line(log, key)
        b = content(key, n)
        for i in range(0, n, n//4): f.write(b[i:i+n//4]); time.sleep(pause)
    return write
def log_line(log, s):
    fd = os.open(log, os.O_WRONLY|os.O_APPEND|os.O_CREAT)
    os.write(fd, f'{s}\n'.encode())
    os.close(fd)
def lines(log): return log.read_text().split('\n')[:-1] if log.exists() else []

def get(c, key, n=10*KB, **kw):
    "A descriptor of `key`, of which all bytes have been read; or None"
    if (fd:=c.fetch(key, n, writer(key, n, **kw))) is not None: assert os.pread(fd, n+1, 0)==content(key, n)
    return fd
def put(c, key, n=10*KB): os.close(get(c, key, n))
def here(c, key):
    "Is `key` there? Its time of use does not change"
    return (Path(c.folder)/key).is_file()
def left(c): return sorted(str(p.relative_to(c.folder)) for p in Path(c.folder).rglob('*') if p.name!='.lock')
def no(f): raise AssertionError('it is there, and should not be written')

class Child:
    "A fork that does `f`, and what it is asked after that"
    def __init__(self, f):
        r,w = os.pipe()
        if (pid:=os.fork())==0:
            code = 1
            signal.alarm(120)   # whatever becomes of us
            try:
                os.close(r)
                f(lambda: os.write(w, b'.'))
                code = 0
            except BaseException as e: print(repr(e), file=sys.stderr, flush=True)
            finally: os._exit(code)
        os.close(w)
        self.pid,self.r,self.code = pid,r,None
    def ready(self): assert os.read(self.r, 1)==b'.'
    def kill(self): os.kill(self.pid, signal.SIGKILL); return self.wait()
    def wait(self):
        if self.code is None: self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]); os.close(self.r)
        return self.code

@pytest.fixture
def child():
    "Starts children, and ends what is left of them"
    cs = []
    def go(f): cs.append(c:=Child(f)); return c
    yield go
    for c in cs:
        if c.code is None: c.kill()

@pytest.fixture(autouse=True)
def untold(): mod._warned.clear()

@pytest.fixture
def folder(tmp_path): return tmp_path/'cache'

def forever(): threading.Event().wait()

@contextmanager
def fds():
    "No descriptor is left open"
    gc.collect()   # what earlier tests have left may be closed now, and not in between
    n = len(os.listdir('/proc/self/fd'))
    yield
    assert len(os.listdir('/proc/self/fd'))<=n

# --- one process

def test_lru(folder):
    "What was opened longest ago goes first"
    c = FileCache(folder, 35*KB)
    for k in 'abc': put(c, f'u/{k}')
    os.close(c.open('u/a'))
    put(c, 'u/d')
    assert left(c)==['u','u/a','u/c','u/d']
    put(c, 'u/e', 25*KB)   # room for a large one: two go
    assert left(c)==['u','u/d','u/e'] and c.used()==(35*KB,2)

def test_uid_folders(folder):
    "A folder goes with its last file, however deep, and the cache's own stays"
    c = FileCache(folder, 10*KB)
    for k in ('a/b/c/1','d/2','a/b/3'): put(c, k)
    assert left(c)==['a','a/b','a/b/3']
    (folder/'empty'/'deep').mkdir(parents=True)   # by somebody who was killed before there was a file in it
    c.clear(); c.clear()
    assert left(c)==[] and folder.is_dir()

def test_in_use(folder):
    "A file in use stays; one that is removed by force is read to its end"
    c = FileCache(folder, 20*KB)
    a,b = get(c, 'u/a'),get(c, 'u/b')
    with pytest.warns(UserWarning, match=r'u/c \(10.0 KB\) cannot be kept, reading goes on without the cache: 20.0 KB are in use; FileCache') as w:
        assert get(c, 'u/c') is None and get(c, 'u/c') is None
    assert len(w)==1
    c.clear()
    assert left(c)==['u','u/a','u/b']
    os.close(b)
    c.clear()
    assert left(c)==['u','u/a']
    (folder/'u'/'a').unlink()
    assert os.pread(a, 10*KB, 0)==content('u/a', 10*KB)
    os.close(a)

def test_read_only_descriptor(folder):
    "Nobody damages a file through its descriptor"
    c = FileCache(folder, 20*KB)
    for fd in (get(c, 'u/a'), c.open('u/a')):
        with pytest.raises(OSError): os.write(fd, b'x')
        os.close(fd)

def test_two_objects(folder):
    "Two caches of one folder in one process are one; each has its own bound"
    a,b = FileCache(folder, 30*KB),FileCache(folder, 20*KB)
    fd = get(a, 'u/a')
    for k in 'bc': put(a, f'u/{k}')
    assert b.open('u/x') is None
    put(b, 'u/d')
    assert left(a)==['u','u/a','u/d']
    b.clear()
    assert left(a)==['u','u/a']
    os.close(fd)

def test_larger_than_cache(folder):
    c = FileCache(folder, 5*KB)
    with pytest.warns(UserWarning, match='u/a .10.0 KB. cannot be kept.*it is larger than the cache'): assert get(c, 'u/a') is None
    assert not folder.exists() and c.open('u/a') is None

def test_wrong_length(folder):
    "Bytes that lack, or are too many, are an error that says so; a second try may begin again"
    c = FileCache(folder, 50*KB)
    def twice(f):
        f.write(b'x'*4000)
        f.seek(0)
        f.write(content('u/a', 10*KB))
    def hole(f):
        f.seek(5000)
        f.write(b'x'*5000)
    with fds():
        for w,m in ((lambda f: f.write(b'x'*9999), 'u/a: 9,999 bytes came of 10,000'), (lambda f: None, '0 bytes came'), (hole, '5,000 bytes came'),
                    (lambda f: f.write(b'x'*10001), 'u/a: more than its 10,000 bytes')):
            with pytest.raises(OSError, match=m): c.fetch('u/a', 10*KB, w)
            assert left(c)==[]
        for e in (ConnectionError('reset'), OSError(errno.ENOSPC, 'theirs'), KeyError('k'), KeyboardInterrupt()):
            def w(f): f.write(b'x'); raise e
            with pytest.raises(type(e)) as got: c.fetch('u/a', 10*KB, w)
            assert got.value is e and left(c)==[]
        os.close(c.fetch('u/a', 10*KB, twice))
        put(c, 'u/a')
        os.close(c.fetch('u/none', 0, lambda f: None))

def test_begin_again(folder):
    "A `write` that empties the file to begin again keeps the room set aside, and has to write all of it"
    c = FileCache(folder, 50*KB)
    def again(n):
        def write(f):
            f.write(b'x'*10*KB)
            f.seek(0)
            f.truncate()
            assert c.used()==(10*KB,0)
            f.write(content('u/a', n))
        return write
    with pytest.raises(OSError, match='u/a: 9,000 bytes came of 10,000'): c.fetch('u/a', 10*KB, again(9*KB))
    fd = c.fetch('u/a', 10*KB, again(10*KB))
    assert os.pread(fd, 20*KB, 0)==content('u/a', 10*KB)
    os.close(fd)

def test_damaged_length(folder):
    "A file that is not as long as it should be is written again, and who reads the old one goes on"
    c = FileCache(folder, 50*KB)
    put(c, 'u/a')
    os.truncate(folder/'u'/'a', 5)
    fd = c.open('u/a')
    put(c, 'u/a')
    assert os.pread(fd, 100, 0)==content('u/a', 5)
    os.close(fd)

@pytest.mark.parametrize('key', ['../a','a/../../b','/etc/passwd','.lock','u/.lock','a//b','a/','u/a.part','','a\0b',None,b'a'])
def test_keys(folder, key):
    "No key leads out of the folder"
    with pytest.raises(ValueError, match='cannot name a file'): FileCache(folder, 1).open(key)
    with pytest.raises(ValueError, match='cannot name a file'): FileCache(folder, 1).fetch(key, 1, no)

def test_links_and_folders(folder, tmp_path):
    "What is no plain file is not opened, nor followed"
    (tmp_path/'secret').write_bytes(b'x'*10)
    (folder/'u'/'d').mkdir(parents=True)
    (folder/'u'/'l').symlink_to(tmp_path/'secret')
    c = FileCache(folder, 1*KB)
    assert c.open('u/l') is None and c.open('u/d') is None and c.open('u') is None
    put(c, 'u/l', 10)
    assert (tmp_path/'secret').read_bytes()==b'x'*10 and not (folder/'u'/'l').is_symlink()

def test_defaults(tmp_path, monkeypatch):
    "Where it is, and how large"
    monkeypatch.setenv('HOME', str(tmp_path/'home'))
    for v in ('FASTAI_REMOTE_CACHE','XDG_CACHE_HOME'): monkeypatch.delenv(v, raising=False)
    assert FileCache().folder==f'{tmp_path}/home/.cache/fastai_remote'
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path/'xdg'))
    assert FileCache().folder==f'{tmp_path}/xdg/fastai_remote'
    monkeypatch.setenv('FASTAI_REMOTE_CACHE', str(tmp_path/'env'))
    c = FileCache()
    assert c.folder==f'{tmp_path}/env'
    monkeypatch.setattr(mod.shutil, 'disk_usage', lambda p: os.stat(p) and type('o', (), {'free':100*KB}))
    assert c.size==50*KB and not Path(c.folder).exists()
    put(c, 'u/a')
    monkeypatch.setattr(mod.shutil, 'disk_usage', lambda p: type('o', (), {'free':90*KB}))
    assert FileCache().size==50*KB   # the same, now that it holds something
    d = pickle.loads(pickle.dumps(c))
    assert (d.folder,d._given_size)==(c.folder,None)
    assert repr(c)==f"FileCache('{tmp_path}/env', 10.0 KB of 50.0 KB used, 1 file)"

def test_check(folder):
    c = FileCache(folder, 1e9)
    c.check(10, 100_000_000, 'one each')
    with pytest.raises(ValueError, match=r'^pets: 24 shards of up to 100 MB in flight \(8 workers × \(interleave 2 \+ 1 ahead\)\) need 2.4 GB; the cache .* holds 1.0 GB: give'):
        c.check(24, 100_000_000, '8 workers × (interleave 2 + 1 ahead)', 'pets')

# --- disks

def told(c, reason, key='u/a', n=10*KB):
    with fds(), pytest.warns(UserWarning, match=f'cannot be kept, reading goes on without the cache: {reason}') as w:
        assert get(c, key, n) is None and get(c, key, n) is None
    assert len(w)==1

@pytest.fixture
def tmpfs(tmp_path):
    "A disk of 1 MB, where we may mount one"
    (d:=tmp_path/'disk').mkdir()
    if subprocess.run(['mount','-t','tmpfs','-o','size=1m','none',d], capture_output=True).returncode: pytest.skip('no right to mount')
    yield d
    subprocess.run(['umount','-l',d], check=True)

def test_disk_full(tmpfs):
    "The room is set aside at once, so a full disk shows before the first byte comes"
    c = FileCache(tmpfs, 10_000*KB)
    with pytest.warns(UserWarning, match='No space left on device'): assert c.fetch('u/a', 2000*KB, no) is None
    assert left(c)==[]
    put(c, 'u/b', 500*KB)
    assert 0<FileCache(tmpfs).size<=1<<19

def test_disk_full_in_write(tmpfs, monkeypatch):
    "Where nothing can be set aside, the disk is full in the middle: also no reason to stop, whatever `write` makes of the error"
    monkeypatch.delattr(os, 'posix_fallocate')
    c = FileCache(tmpfs, 10_000*KB)
    told(c, 'No space left on device', n=2000*KB)
    def wraps(f):
        try: f.write(bytes(2000*KB))
        except Exception as e: raise RuntimeError('source failed') from e
    assert c.fetch('u/a', 2000*KB, wraps) is None
    assert left(c)==[]

def test_file_size_limit(folder):
    "A limit on the size of files is a full disk"
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5*KB,old[1]))
    try: told(c:=FileCache(folder, 50*KB), 'File too large')
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert left(c)==[]

def test_read_only(tmpfs):
    "What is there is found on a read-only disk; what is not, is read without the cache"
    c = FileCache(tmpfs/'c', 500*KB)
    put(c, 'u/a')
    subprocess.run(['mount','-o','remount,ro',tmpfs], check=True)
    os.close(c.fetch('u/a', 10*KB, no))
    told(c, 'Read-only file system', 'u/b')

def test_no_folder(tmp_path):
    "A file in place of the folder; a place where there can be none"
    (tmp_path/'f').write_bytes(b'')
    told(FileCache(tmp_path/'f', 50*KB), '(File exists|Not a directory)')
    told(FileCache(tmp_path/'f'/'g', 50*KB), 'Not a directory')
    mod._warned.clear()
    told(FileCache('/proc/none', 50*KB), 'No such file or directory')

@pytest.mark.parametrize('only_part', [True,False])
def test_no_flock(folder, monkeypatch, only_part):
    "No locks, no cache, and nothing left there"
    def flock(fd, how):
        if how&fcntl.LOCK_NB or not only_part: raise OSError(errno.ENOLCK, 'No locks available')
    monkeypatch.setattr(fcntl, 'flock', flock)
    told(c:=FileCache(folder, 50*KB), 'No locks available')
    assert left(c)==[]

def test_removed_while_it_comes(folder):
    "Somebody empties the folder by hand: the half of another is not taken for the file"
    c = FileCache(folder, 50*KB)
    def write(f):
        (folder/'u'/'a.part').unlink()
        (folder/'u'/'a.part').write_bytes(b'half')
        f.write(content('u/a', 10*KB))
    with pytest.warns(UserWarning, match='it was removed while it came'): assert c.fetch('u/a', 10*KB, write) is None
    assert not here(c, 'u/a')
    put(c, 'u/a')
    assert left(c)==['u','u/a']

# --- processes

def test_bound(folder, child):
    "Eight processes, keys at random, folders that come and go: right bytes, never above the bound, nothing left over"
    size,n_keys = 100*KB,20
    def work(seed):
        def go(ready):
            rng,c = random.Random(seed),FileCache(folder, size)
            warnings.simplefilter('error')
            for _ in range(150):
                k = rng.randrange(n_keys)
                fd = get(c, f'u{k}/s', 5*KB+k*200, pause=rng.choice([0,0,.001]))
                if rng.random()<.1: time.sleep(.002)
                os.close(fd)
        return go
    c = FileCache(folder, size)
    c.clear()
    ps = [child(work(s)) for s in range(8)]
    most,looked = 0,0
    while any(os.waitid(os.P_PID, p.pid, os.WEXITED|os.WNOHANG|os.WNOWAIT) is None for p in ps):
        with c._locked(): most = max(most, c.used()[0])   # held, as else one file goes and another comes while we count
        looked += 1
        time.sleep(.002)
    assert [p.wait() for p in ps]==[0]*8
    assert size//2<most<=size and looked>10
    assert not [p for p in left(c) if p.endswith('.part')]
    c.clear()
    assert left(c)==[]

def test_one_download(folder, tmp_path, child):
    "Eight processes, and four threads in each, ask for the same at the same time: it is written once"
    log,gate = tmp_path/'log',tmp_path/'gate'
    def go(ready):
        c = FileCache(folder, 100*KB)
        wait_for(gate.exists)
        for k in range(5):
            with ThreadPoolExecutor(4) as ex:
                for fd in ex.map(lambda _: get(c, f'u/{k}', log=log, pause=.005), range(4)): os.close(fd)
    ps = [child(go) for _ in range(8)]
    gate.touch()
    assert [p.wait() for p in ps]==[0]*8
    assert sorted(lines(log))==[f'u/{k}' for k in range(5)]

def test_failure_passes_on(folder, tmp_path, child):
    "The one who gets it fails: those who wait try themselves"
    log,c = tmp_path/'log',FileCache(folder, 100*KB)
    def fails(ready):
        def write(f):
            f.write(b'x')
            ready()
            time.sleep(.1)
            raise ConnectionError
        with pytest.raises(ConnectionError): c.fetch('u/a', 10*KB, write)
    (p:=child(fails)).ready()
    ps = [child(lambda ready: put_logged(c, log)) for _ in range(4)]
    assert [o.wait() for o in (p, *ps)]==[0]*5
    assert lines(log)==['u/a'] and left(c)==['u','u/a']

def put_logged(c, log, key='u/a'): os.close(get(c, key, log=log))

def hangs(c, key='u/a', n=10*KB):
    "A child's work: begins to write, and never ends"
    def go(ready):
        def write(f):
            f.write(b'half')
            ready()
            forever()
        c.fetch(key, n, write)
    return go

def test_killed_download(folder, tmp_path, child):
    "kill -9 while it comes: one of those who wait begins anew, at once, and no part is left"
    log,c = tmp_path/'log',FileCache(folder, 100*KB)
    for k in range(10):
        (p:=child(hangs(c, f'u/{k}'))).ready()
        ps = [child(lambda ready: (ready(), put_logged(c, log, f'u/{k}'))) for _ in range(3)]
        for o in ps: o.ready()
        time.sleep(.01)
        assert not lines(log)[k:]
        p.kill()
        assert [o.wait() for o in ps]==[0]*3
        assert lines(log)==[f'u/{i}' for i in range(k+1)] and left(c)==sorted(['u', *lines(log)])

def test_killed_anywhere(folder, child):
    "kill -9 at any moment, forty times: the bytes are right afterwards, and nothing is left"
    c,rng = FileCache(folder, 30*KB),random.Random(5)
    def go(ready):
        ready()
        while True:
            for k in range(6): put(c, f'u{k}/s')
    for _ in range(40):
        ps = [child(go) for _ in range(2)]
        for p in ps: p.ready()
        time.sleep(rng.uniform(0, .02))
        for p in ps: p.kill()
        for k in range(6):
            if (fd:=c.open(f'u{k}/s')) is not None:
                assert os.pread(fd, 20*KB, 0)==content(f'u{k}/s', 10*KB)
                os.close(fd)
    put(c, 'last/s')
    assert not [p for p in left(c) if p.endswith('.part')] and c.used()[0]<=30*KB
    c.clear()
    assert left(c)==[]

def test_parts_of_the_dead(folder, child):
    "What the killed have left goes when room is made, and what the living get stays and counts"
    c = FileCache(folder, 100*KB)
    for k in range(3):
        (p:=child(hangs(c, f'u/{k}'))).ready()
        p.kill()
    (p:=child(hangs(c, 'u/living'))).ready()
    assert left(c)==['u','u/living.part']   # each made room, and found the one before
    put(c, 'u/a', 90*KB)
    assert c.used()==(100*KB,1)
    with pytest.warns(UserWarning, match='10.0 KB are in use'): assert get(c, 'v/b', 95*KB) is None
    p.kill()
    put(c, 'v/b', 95*KB)
    assert left(c)==['v','v/b']

def test_killed_holder(folder, child):
    "kill -9 of who has a file open: it can go"
    c = FileCache(folder, 15*KB)
    def hold(ready):
        get(c, 'u/a')
        ready()
        forever()
    (p:=child(hold)).ready()
    with pytest.warns(UserWarning, match='in use'): assert get(c, 'u/b') is None
    p.kill()
    put(c, 'u/b')
    assert left(c)==['u','u/b']

def test_fork(folder, child):
    "A forked child inherits what is open, and what is being locked it does not"
    c = FileCache(folder, 15*KB)
    fd = get(c, 'u/a')
    def inherits(ready):
        assert os.pread(fd, 10*KB, 0)==content('u/a', 10*KB)
        ready()
        forever()
    (p:=child(inherits)).ready()
    os.close(fd)
    c.clear()
    assert here(c, 'u/a')   # the child's copy
    p.kill()
    c.clear()
    assert not here(c, 'u/a')


def test_fork_while_it_comes(folder, child):
    "A child that another thread starts in the midst of a download holds nothing of it, now or later"
    c,go,began = FileCache(folder, 15*KB),threading.Event(),[]
    def write(f):
        f.write(content('u/a', 10*KB))
        began.append(1)
        assert go.wait(60)
    def stays(ready):
        assert not mod._held
        ready()
        forever()
    with ThreadPoolExecutor(1) as ex:
        r = ex.submit(c.fetch, 'u/a', 10*KB, write)
        wait_for(lambda: began)
        child(stays).ready()
        go.set()
        os.close(r.result())
    with c._locked(): child(stays).ready()
    c.clear()
    assert left(c)==[]

def test_fork_in_write(folder, child):
    "A child that `write` starts, and that leaves by an exception, takes nothing with it"
    c = FileCache(folder, 15*KB)
    def write(f):
        if (pid:=os.fork())==0: raise KeyError
        assert os.waitpid(pid, 0)[1]==0 and left(c)==['u','u/a.part']
        f.write(content('u/a', 10*KB))
    def go(ready):
        me = os.getpid()
        try: os.close(c.fetch('u/a', 10*KB, write))
        except KeyError: assert os.getpid()!=me   # the child's, which ends here
    assert child(go).wait()==0 and left(c)==['u','u/a']

def in_spawned(c, key): put(c, key); return c.folder,c._given_size,c.used()

def test_spawn(folder):
    "A cache goes to spawned workers by its folder and size"
    c = FileCache(folder, 50*KB)
    with get_context('spawn').Pool(1) as p: assert p.apply(in_spawned, (c,'u/a'))==(str(folder),50*KB,(10*KB,1))
    os.close(c.fetch('u/a', 10*KB, no))

def test_a_part_that_is_not_locked_yet(folder, monkeypatch):
    "Its maker has opened it, and somebody who makes room removes it before it is locked: its maker makes it again"
    c,alone,n = FileCache(folder, 50*KB),mod._alone,[0]
    def late(fd, path):
        if path.endswith('u/a.part') and n[0]<3:
            n[0] += 1
            with monkeypatch.context() as m:
                m.setattr(mod, '_alone', alone)
                c.clear()
            assert left(c)==[]
        return alone(fd, path)
    monkeypatch.setattr(mod, '_alone', late)
    put(c, 'u/a')
    assert n==[3] and left(c)==['u','u/a']

def test_a_file_that_goes_as_it_is_opened(folder, monkeypatch):
    "Opened, and removed before it is locked: it is not there"
    c,flock = FileCache(folder, 50*KB),fcntl.flock
    put(c, 'u/a')
    def late(fd, how):
        if how==fcntl.LOCK_SH: monkeypatch.undo(); c.clear()
        flock(fd, how)
    monkeypatch.setattr(fcntl, 'flock', late)
    with fds(): assert c.open('u/a') is None
    assert left(c)==[]

def test_a_folder_that_goes_as_it_is_made(folder, monkeypatch):
    "Made, and removed as empty before there is a file in it: it is made again; but not for ever"
    c,makedirs,n = FileCache(folder, 50*KB),os.makedirs,[0]
    def goes(d, **kw):
        makedirs(d, **kw)
        if str(d).endswith('/u') and n[0]<3: n[0] += 1; os.rmdir(d)
    monkeypatch.setattr(os, 'makedirs', goes)
    put(c, 'u/a')
    n[0] = -1000
    with pytest.warns(UserWarning, match='No such file'): assert get(FileCache(folder, 50*KB), 'v/u/b') is None
    assert here(c, 'u/a')

def test_lock_file_removed(folder):
    "Somebody empties the folder by hand: who waits for the lock that was in it takes the new one"
    c,waits = FileCache(folder, 50*KB),threading.Event()
    def other():
        waits.set()
        with c._locked(): return (folder/'.lock').exists()
    with ThreadPoolExecutor(1) as ex:
        with c._locked():
            r = ex.submit(other)
            waits.wait()
            time.sleep(.05)
            (folder/'.lock').unlink()
        assert r.result()

# --- files of others

def all_files(folder): return sorted(str(p.relative_to(folder)) for p in folder.rglob('*'))

@pytest.mark.parametrize('theirs', ['a.csv','b/c/d.csv','u/a.part.csv'])
def test_a_folder_with_files_of_others_gets_a_subfolder(folder, theirs, monkeypatch):
    "They would be removed. Nothing is made before a file is kept, and a subfolder with files of others is refused"
    theirs = folder/theirs
    theirs.parent.mkdir(parents=True)
    theirs.write_text('mine')
    (folder/'u').mkdir(exist_ok=True)
    (folder/'u'/'x.part').write_text('mine')
    before = all_files(folder)
    monkeypatch.setenv('FASTAI_REMOTE_CACHE', str(folder))
    caches = FileCache(folder, 10*KB),FileCache(size=10*KB)
    assert {cache.folder for cache in caches}=={f'{folder}/fastai_remote'} and all_files(folder)==before
    for key in 'u/a','u/b': put(caches[0], key)
    again = pickle.loads(pickle.dumps(FileCache(folder, 10*KB)))
    assert again.folder==caches[0].folder and again.used()==(10*KB,1) and {*before} < {*all_files(folder)}
    (folder/'fastai_remote/.lock').unlink()
    match = f"^{folder}/fastai_remote has '{folder}/fastai_remote/u/b', and is no cache: .*FASTAI_REMOTE_CACHE"
    with pytest.raises(ValueError, match=match): FileCache(folder, 10*KB)

def test_a_folder_of_others_is_searched_up_to_the_first_file(tmp_path, monkeypatch):
    for k in range(100): (tmp_path/f'{k}.csv').write_text('mine')
    seen,scandir = [],os.scandir
    class Noted:
        def __init__(self, path): self.entries = scandir(path)
        def __enter__(self): return self
        def __exit__(self, *_): self.entries.close()
        def __iter__(self): return self
        def __next__(self):
            seen.append(1)
            return next(self.entries)
    monkeypatch.setattr(os, 'scandir', Noted)
    assert FileCache(tmp_path).folder==f'{tmp_path}/fastai_remote' and len(seen)==1

def test_a_cache_is_opened_again_at_any_time(folder, child):
    "By another process, and from a pickle: while the first file comes, after it has come, and when all is removed"
    def opened(): return [FileCache(folder, 50*KB), pickle.loads(pickle.dumps(c))]
    def in_child(ready):
        for other in opened(): assert other.folder==str(folder)
    def write(f):
        assert child(in_child).wait()==0 and left(c)==['u','u/a.part']
        f.write(content('u/a', 10*KB))
    c = FileCache(folder, 50*KB)
    os.close(c.fetch('u/a', 10*KB, write))
    for other in opened(): os.close(other.fetch('u/a', 10*KB, no))
    c.clear()
    for other in opened(): put(other, 'u/b')

def test_a_part_of_a_killed_first_download_is_no_file_of_others(folder, child):
    (p:=child(hangs(FileCache(folder, 50*KB)))).ready()
    p.kill()
    (folder/'.lock').unlink()   # killed before it was made
    put(FileCache(folder, 50*KB), 'u/b')
    assert left(folder_cache:=FileCache(folder))==['u','u/b'] and folder_cache.used()==(10*KB,1)

def test_a_disk_without_any_space_is_no_error(folder, monkeypatch):
    "`fetch` warns, and reading goes on without the cache; a size that was given is one"
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: SimpleNamespace(free=0))
    cache = FileCache(folder)
    cache.check(2, 10*KB, 'two')
    with pytest.warns(UserWarning, match='reading goes on without the cache'):
        assert cache.fetch('u/a', 10*KB, no) is None
    with pytest.raises(ValueError, match='give it more'): FileCache(folder, 0).check(2, 10*KB, 'two')

def test_without_its_lock_file_a_new_object_leaves_a_cache_alone(folder):
    "It cannot know whose files these are; an object that exists goes on"
    c = FileCache(folder, 50*KB)
    put(c, 'u/a')
    (folder/'.lock').unlink()
    assert FileCache(folder, 50*KB).folder==f'{folder}/fastai_remote'
    put(c, 'u/b')
    put(FileCache(folder, 50*KB), 'u/c')

def test_a_file_that_comes_while_it_is_looked_for_is_none_of_others(folder, monkeypatch):
    "A cache whose first download ends after its lock file was looked for"
    (folder/'u').mkdir(parents=True)
    scandir = os.scandir
    def late(path):
        monkeypatch.undo()
        put(FileCache(folder, 50*KB), 'u/a')
        return scandir(path)
    monkeypatch.setattr(os, 'scandir', late)
    os.close(FileCache(folder, 50*KB).fetch('u/a', 10*KB, no))

def test_hidden_files_and_folders_stay(folder):
    c = FileCache(folder, 20*KB)
    put(c, 'u/a')
    for path in ('.git/config','u/.git/deep/config','u/.hidden'):
        (folder/path).parent.mkdir(parents=True, exist_ok=True)
        (folder/path).write_bytes(b'mine')
    (folder/'v'/'.empty').mkdir(parents=True)
    assert c.used()==(10*KB,1)
    c.clear()
    assert all_files(folder)==['.git','.git/config','.lock','u','u/.git','u/.git/deep','u/.git/deep/config','u/.hidden',
                               'v','v/.empty']

def test_synced(folder, monkeypatch):
    "Its bytes are on the disk before it has its name"
    c,done = FileCache(folder, 50*KB),[]
    def noted(n, f): return lambda *a: (done.append(n), f(*a))
    for n in ('fsync','replace'): monkeypatch.setattr(os, n, noted(n, getattr(os, n)))
    put(c, 'u/a')
    assert done==['fsync','replace']

def test_cost(folder):
    "A lookup takes a few system calls, also in a full folder"
    c = FileCache(folder, 10_000*KB)
    put(c, 'u/a')
    for k in range(300): (folder/'u'/f'{k}').write_bytes(b'')
    calls,names = [0],('open','close','fstat','lstat','utime','scandir','stat')
    real = {n:getattr(os, n) for n in names}
    def counted(f):
        def g(*a, **kw): calls[0] += 1; return f(*a, **kw)
        return g
    try:
        for n in names: setattr(os, n, counted(real[n]))
        fd = c.open('u/a')
    finally:
        for n in names: setattr(os, n, real[n])
    os.close(fd)
    assert calls[0]<=6

# --- against a model

key = st.sampled_from(['a/1','a/2','b/1','b/2','c'])
op = st.one_of(st.tuples(st.just('fetch'), key), st.tuples(st.just('open'), key), st.tuples(st.just('fail'), key),
               st.tuples(st.just('close'), st.integers(0, 9)), st.tuples(st.just('clear'), st.none()))
SIZES = {'a/1':10, 'a/2':20, 'b/1':30, 'b/2':5, 'c':25}

@examples(60)
@given(st.lists(op, max_size=25), st.integers(20, 70))
def test_model(tmp_path_factory, ops, size):
    "Whatever is done in whatever order: there is what a dict in order of use would have"
    c,there,opened = FileCache(tmp_path_factory.mktemp('c'), size),OrderedDict(),[]
    def used(k): there[k] = SIZES[k]; there.move_to_end(k)
    def room(n):
        for k in list(there):
            if sum(there.values())+n<=size: break
            if k not in {k for k,_ in opened}: del there[k]
        return sum(there.values())+n<=size
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for what,k in ops:
            if what=='clear':
                c.clear()
                for k in set(there)-{k for k,_ in opened}: del there[k]
            elif what=='close':
                if k<len(opened): os.close(opened.pop(k)[1])
            elif what=='open':
                assert ((fd:=c.open(k)) is not None)==(k in there)
                if fd is not None: used(k); opened.append((k,fd))
            elif what=='fail':
                def bad(f): f.write(b'x'); raise KeyError(k)
                if k in there: continue
                fits = SIZES[k]<=size and room(SIZES[k])
                try: assert c.fetch(k, SIZES[k], bad) is None and not fits
                except KeyError: assert fits
            else:
                was = k in there
                fd = c.fetch(k, SIZES[k], no if was else writer(k, SIZES[k]))
                assert (fd is not None)==(was or SIZES[k]<=size and room(SIZES[k]))
                if fd is not None:
                    used(k); opened.append((k,fd))
                    assert os.pread(fd, 100, 0)==content(k, SIZES[k])
            assert {str(p.relative_to(c.folder)) for p in Path(c.folder).rglob('*') if p.is_file() and p.name!='.lock'}==set(there)
            assert c.used()==(sum(there.values()), len(there)) and c.used()[0]<=size
            assert {p.name for p in Path(c.folder).iterdir() if p.is_dir()}=={k[0] for k in there if '/' in k}
    for _,fd in opened: os.close(fd)

@pytest.mark.parametrize('size', [math.nan, math.inf, -1])
def test_a_size_is_a_number_of_bytes(tmp_path, size):
    with pytest.raises(ValueError, match=f'cache of {size} bytes'): FileCache(tmp_path/'cache', size)
