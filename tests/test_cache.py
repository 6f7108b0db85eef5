"""The cache under many processes, kills, full and read-only disks: never above its bound, never in the way of reading,
nothing left behind"""
import errno, fcntl, gc, math, os, pickle, random, resource, shutil, subprocess, threading, warnings
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import examples
from hypothesis import given, strategies as st

from clusters import wait_for
from crashes import dies_at
from fastai_remote.store import cache as cache_module
from fastai_remote.store.cache import FileCache

KB = 1000
fork = get_context('fork')

def content(key, n=10*KB): return (key.encode()*(n//len(key)+1))[:n]
def writer(key, n=10*KB, log=None):
    "A `write` that leaves a line in the file `log` when it runs"
    def write(file):
        if log: log.open('a').write(f'{key}\n')
        for i in range(0, n, n//4): file.write(content(key, n)[i:i+n//4])
    return write

def get(cache, key, n=10*KB, **kwargs):
    "A descriptor of `key`, of which all bytes have been read; or None"
    fd = cache.fetch(key, n, writer(key, n, **kwargs))
    assert fd is None or os.pread(fd, n+1, 0)==content(key, n)
    return fd
def put(cache, key, n=10*KB, **kwargs): os.close(get(cache, key, n, **kwargs))
def left(cache):
    "Paths of what is in the folder, but for the lock"
    return sorted(str(p.relative_to(cache.folder)) for p in Path(cache.folder).rglob('*') if p.name!='.lock')
def no(file): raise AssertionError('it is there, and should not be written')
def forever(): threading.Event().wait()

@pytest.fixture
def child():
    "Starts forks that call `f(ready)`, and ends what is left of them; `child.ready()` waits until one has called it"
    processes = []
    def start(f):
        ready = fork.Event()
        processes.append(process := fork.Process(target=f, args=(ready.set,)))
        process.start()
        process.ready = ready.wait
        return process
    yield start
    for process in processes: killed(process)

def killed(process):
    process.kill()
    return ended(process)

def ended(process):
    process.join()
    return process.exitcode

def interfere(monkeypatch, module, name, act, times=1, of=lambda *args: True):
    """`act()` runs before the next calls of the system `module.name(*args)` of which `of(*args)` is true

    Returns a list with the number of calls that are still to come."""
    call,left = getattr(module, name),[times]
    def late(*args, **kwargs):
        if left[0] and of(*args):
            left[0] -= 1
            monkeypatch.setattr(module, name, call)
            act()
            monkeypatch.setattr(module, name, late)
        return call(*args, **kwargs)
    monkeypatch.setattr(module, name, late)
    return left

@pytest.fixture(autouse=True)
def nobody_is_warned_yet(): cache_module._warned.clear()

@pytest.fixture
def folder(tmp_path): return tmp_path/'cache'

@pytest.fixture
def cache(folder): return FileCache(folder, 50*KB)

@contextmanager
def no_descriptor_left_open():
    gc.collect()   # what earlier tests have left may be closed now, and not in between
    n = len(os.listdir('/proc/self/fd'))
    yield
    assert len(os.listdir('/proc/self/fd'))<=n

# --- one process

def test_a_file_that_is_removed_by_hand_can_be_read_by_those_who_have_it_open(cache, folder):
    "Nobody damages a file through its descriptor"
    fds = get(cache, 'u-a'),cache.open('u-a')
    (folder/'u-a').unlink()
    for fd in fds:
        with pytest.raises(OSError): os.write(fd, b'x')
        assert os.pread(fd, 20*KB, 0)==content('u-a')
        os.close(fd)

def test_two_objects_of_one_folder_have_bounds_of_their_own(folder):
    "A file larger than the cache is not kept"
    one,other = FileCache(folder, 30*KB),FileCache(folder, 20*KB)
    for key in 'bca': put(one, f'u-{key}')
    put(other, 'u-d')
    assert left(one)==['u-a','u-d']
    assert_not_kept(one, 'it is larger than the cache', 'u-large', 31*KB)
    assert left(one)==['u-a','u-d']

def rewriting(n, is_emptied):
    "A `write` that begins again after some bytes, and then writes `n`"
    def write(file):
        file.write(b'x'*(10*KB if is_emptied else 4*KB))
        file.seek(0)
        if is_emptied: file.truncate()
        file.write(content('u-a', n))
    return write

@pytest.mark.parametrize('write,match', [
    (lambda file: file.write(b'x'*9999), 'u-a: 9,999 bytes came of 10,000'), (lambda file: None, '0 bytes came'),
    (lambda file: file.write(b'x'*10001), 'u-a: more than its 10,000 bytes'),
    (rewriting(9*KB, True), 'u-a: 9,000 bytes came of 10,000')])
def test_bytes_that_lack_or_are_too_many_are_an_error_that_says_so(cache, write, match):
    with no_descriptor_left_open(), pytest.raises(OSError, match=match): cache.fetch('u-a', 10*KB, write)
    assert left(cache)==[]

def test_errors_of_the_source_are_passed_on_and_a_write_may_begin_again(cache):
    for error in (OSError(errno.ENOSPC, 'theirs'), KeyError('k'), KeyboardInterrupt()):
        def fails(file):
            file.write(b'x')
            assert cache.used()==(10*KB,0)   # what is set aside
            raise error
        with no_descriptor_left_open(), pytest.raises(type(error)) as got: cache.fetch('u-a', 10*KB, fails)
        assert got.value is error and left(cache)==[]
    for is_emptied in (True,False):
        os.close(cache.fetch('u-a', 10*KB, rewriting(10*KB, is_emptied)))
        put(cache, 'u-a')
        cache.clear()
    os.close(cache.fetch('u-none', 0, lambda file: None))

def test_a_file_of_another_length_is_written_again(cache, folder):
    "Who reads the old one goes on"
    put(cache, 'u-a')
    os.truncate(folder/'u-a', 5)
    fd = cache.open('u-a')
    put(cache, 'u-a')
    assert os.pread(fd, 100, 0)==content('u-a', 5)
    os.close(fd)

def test_a_damaged_file_is_dropped_by_those_who_have_it_open_and_a_newer_one_stays(cache):
    put(cache, 'u-a')
    fd = cache.open('u-a')
    assert cache.drop('u-a', fd) and cache.open('u-a') is None
    put(cache, 'u-a')
    cache.drop('u-a', fd)
    os.close(fd)
    os.close(cache.fetch('u-a', 10*KB, no))

def test_no_key_leads_out_of_the_folder(cache, folder, tmp_path):
    "And what is no plain file is not opened, nor followed"
    for key in ('../a','/etc/passwd','u/a','.lock','..','u-a.part','','a\0b',None):
        with pytest.raises(ValueError, match='cannot name a file'): cache.open(key)
        with pytest.raises(ValueError, match='cannot name a file'): cache.fetch(key, 1, no)
    (tmp_path/'secret').write_bytes(b'x'*10)
    (folder/'u-d').mkdir(parents=True)
    (folder/'u-l').symlink_to(tmp_path/'secret')
    os.mkfifo(folder/'u-p')   # which would be waited for
    for key in 'u-l','u-d','u-p': assert cache.open(key) is None and cache.open(key, 10) is None
    put(cache, 'u-l', 10)
    assert (tmp_path/'secret').read_bytes()==b'x'*10 and not (folder/'u-l').is_symlink()

def test_folder_and_size_of_a_cache(tmp_path, monkeypatch):
    "By default, and as given"
    def free(n): monkeypatch.setattr(shutil, 'disk_usage', lambda path: os.stat(path) and SimpleNamespace(free=n))
    monkeypatch.setenv('HOME', str(tmp_path/'home'))
    for name in ('FASTAI_REMOTE_CACHE','XDG_CACHE_HOME'): monkeypatch.delenv(name, raising=False)
    assert FileCache().folder==f'{tmp_path}/home/.cache/fastai_remote'
    for name,folder in (('XDG_CACHE_HOME',f'{tmp_path}/fastai_remote'), ('FASTAI_REMOTE_CACHE',f'{tmp_path}')):
        monkeypatch.setenv(name, str(tmp_path))
        assert FileCache().folder==folder
    free(100*KB)
    cache = FileCache(tmp_path/'cache')
    assert cache.size==50*KB and not Path(cache.folder).exists()
    put(cache, 'u-a')
    free(90*KB)
    assert FileCache(cache.folder).size==50*KB   # the same, now that it holds something
    assert repr(cache)==f"FileCache('{tmp_path}/cache', 10.0 KB of 50.0 KB used, 1 file)"
    again = pickle.loads(pickle.dumps(cache))
    free(30*KB)
    assert (again.folder,again.size)==(cache.folder,20*KB)   # no size was given
    for size in (math.nan, math.inf, -1):
        with pytest.raises(ValueError, match=f'cache of {size} bytes'): FileCache(tmp_path/'cache', size)

def test_what_cannot_be_in_flight_is_refused(folder, monkeypatch):
    "But a disk without any space is no error: `fetch` warns, and reading goes on without the cache"
    FileCache(folder, 1e9).check(10, 100_000_000, 'one each')
    match = r'^pets: 24 shards of up to 100 MB in flight .8 workers. need 2.4 GB; .* holds 1.0 GB: give it more'
    with pytest.raises(ValueError, match=match): FileCache(folder, 1e9).check(24, 100_000_000, '8 workers', 'pets')
    with pytest.raises(ValueError, match='give it more'): FileCache(folder, 0).check(2, 10*KB, 'two')
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: SimpleNamespace(free=0))
    cache = FileCache(folder)
    cache.check(2, 10*KB, 'two')
    assert_not_kept(cache, '')

# --- disks

def assert_not_kept(cache, reason, key='u-a', n=10*KB):
    "Reading goes on without the cache, which is said once, with the reason"
    match = f'cannot be kept, reading goes on without the cache: {reason}'
    with no_descriptor_left_open(), pytest.warns(UserWarning, match=match) as warned:
        for _ in range(2): assert get(cache, key, n) is None
    assert len(warned)==1

@pytest.fixture
def tmpfs(tmp_path, mount):
    "A disk of 1 MB, where we may mount one"
    return mount(tmp_path/'disk', '-t', 'tmpfs', '-o', 'size=1m', 'none')

def test_a_full_disk_is_no_reason_to_stop(tmpfs, monkeypatch):
    "It shows before the first byte comes; or in the middle, whatever `write` makes of the error"
    cache = FileCache(tmpfs, 10_000*KB)
    with pytest.warns(UserWarning, match='No space left on device'): assert cache.fetch('u-a', 2000*KB, no) is None
    put(cache, 'u-b', 500*KB)
    assert left(cache)==['u-b'] and 0<FileCache(tmpfs).size<=1<<19
    cache_module._warned.clear()
    monkeypatch.delattr(os, 'posix_fallocate')   # nothing can be set aside
    assert_not_kept(cache, 'No space left on device', n=2000*KB)
    def wraps(file):
        try: file.write(bytes(2000*KB))
        except Exception as e: raise RuntimeError('source failed') from e
    assert cache.fetch('u-a', 2000*KB, wraps) is None and not any(name.endswith('.part') for name in left(cache))

def test_a_read_only_disk_is_read(tmpfs):
    cache = FileCache(tmpfs/'c', 500*KB)
    put(cache, 'u-a')
    subprocess.run(['mount','-o','remount,ro',tmpfs], check=True)
    os.close(cache.fetch('u-a', 10*KB, no))
    assert_not_kept(cache, 'Read-only file system', 'u-b')

@pytest.mark.slow
def test_where_there_can_be_no_cache_reading_goes_on_without(folder, tmp_path, monkeypatch):
    "A limit on the size of files, a file in place of the folder, disks without locks"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5*KB,limit[1]))
    try: assert_not_kept(FileCache(folder, 50*KB), 'File too large')
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    (tmp_path/'f').write_bytes(b'')
    for place,reason in ((tmp_path/'f', '(File exists|Not a directory)'), (tmp_path/'f'/'g', 'Not a directory'),
                         ('/proc/none', 'No such file or directory')):
        assert_not_kept(FileCache(place, 50*KB), reason)
    def flock(fd, how): raise OSError(errno.ENOLCK, 'No locks available')
    monkeypatch.setattr(fcntl, 'flock', flock)
    assert_not_kept(FileCache(folder, 50*KB), 'No locks available')
    assert left(FileCache(folder))==[]

# --- processes

def test_processes_together_never_exceed_the_bound(folder, child):
    "Keys at random, folders that come and go: right bytes, and nothing left over"
    size = 50*KB
    def work(seed):
        def go(ready):
            rng,cache = random.Random(seed),FileCache(folder, size)
            warnings.simplefilter('error')
            for _ in range(100):
                k = rng.randrange(12)
                os.close(get(cache, f'u{k}-s', 5*KB+k*200))
        return go
    cache = FileCache(folder, size)
    cache.clear()
    children,seen = [child(work(seed)) for seed in range(4)],[]
    def count():
        with open(folder/'.lock') as lock:   # else one file goes and another comes while they are counted
            fcntl.flock(lock, fcntl.LOCK_EX)
            seen.append(cache.used()[0])
        return not any(c.is_alive() for c in children)
    wait_for(count)
    assert [*map(ended, children)]==[0]*4 and size//2<max(seen)<=size
    assert not [name for name in left(cache) if name.endswith('.part')]
    cache.clear()
    assert left(cache)==[]

def hangs(cache, key='u-a', n=10*KB):
    "A child's work: begins to write, and never ends"
    def go(ready):
        def write(file):
            file.write(b'half')
            ready()
            forever()
        cache.fetch(key, n, write)
    return go

def n_waiting(path):
    "How many processes wait for the lock of a file"
    inode = f':{path.stat().st_ino} '
    return sum('->' in line and inode in line for line in Path('/proc/locks').read_text().splitlines())

@pytest.mark.parametrize('is_killed', [True,False])
def test_what_several_ask_for_is_written_once_if_the_first_one_fails(cache, folder, tmp_path, child, is_killed):
    "Also if it is killed; no part is left. Processes ask, and threads of each"
    log,go_on = tmp_path/'log',fork.Event()
    def fails(ready):
        def write(file):
            file.write(b'half')
            ready()
            go_on.wait()
            raise ConnectionError
        with pytest.raises(ConnectionError): cache.fetch('u-a', 10*KB, write)
    def asks(ready):
        with ThreadPoolExecutor(2) as threads: list(threads.map(lambda _: put(cache, 'u-a', log=log), range(2)))
    (first:=child(fails)).ready()
    others = [child(asks) for _ in range(3)]
    wait_for(lambda: n_waiting(folder/'u-a.part')>=3)
    if is_killed: killed(first)
    else: go_on.set()
    assert [*map(ended, (first,*others))]==[-9 if is_killed else 0, 0, 0, 0]
    assert log.read_text()=='u-a\n' and left(cache)==['u-a']

def test_killed_at_any_change_of_a_file_it_leaves_nothing_to_repair(folder):
    cache,n = FileCache(folder, 30*KB),0
    def work():
        for key in ('v-d','u-a'): put(cache, key)   # removes others
    while True:
        for key in 'abc': put(cache, f'u-{key}')
        if not dies_at(n, work, folder): break
        for key in 'u-a','u-b','u-c','v-d':
            if (fd:=cache.open(key)) is not None:
                assert os.pread(fd, 20*KB, 0)==content(key)
                os.close(fd)
        put(cache, 'last-s')
        assert not [name for name in left(cache) if name.endswith('.part')] and cache.used()[0]<=30*KB
        cache.clear()
        assert left(cache)==[]
        n += 1
    assert n>10

def test_parts_of_the_dead_go_and_those_of_the_living_count(folder, child):
    cache = FileCache(folder, 100*KB)
    for k in range(2):
        (c:=child(hangs(cache, f'u-{k}'))).ready()
        killed(c)
    (living:=child(hangs(cache, 'u-living'))).ready()
    assert left(cache)==['u-living.part']   # each made room, and found the one before
    put(cache, 'u-a', 90*KB)
    assert cache.used()==(100*KB,1)
    with pytest.warns(UserWarning, match='10.0 KB are being written'): assert get(cache, 'v-b', 95*KB) is None
    killed(living)
    put(cache, 'v-b', 95*KB)
    assert left(cache)==['v-b']

def test_a_fork_holds_nothing_that_is_being_written_or_locked(cache, folder, child, monkeypatch):
    "One that another thread starts in the midst of a download, one while the folder is locked"
    def stays(ready):
        ready()
        forever()
    def write(file):
        file.write(content('u-a'))
        began.set()
        go_on.wait()
    began,go_on = threading.Event(),threading.Event()
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(cache.fetch, 'u-a', 10*KB, write)
        began.wait()
        child(stays).ready()
        interfere(monkeypatch, os, 'replace', lambda: child(stays).ready())
        go_on.set()
        os.close(result.result())
    cache.clear()
    assert left(cache)==[]
    assert n_waiting(folder/'.lock')==0

# --- others who remove or make files at the same moment

def test_a_part_that_is_removed_while_it_is_written(cache, folder):
    "The half of another is not taken for the file"
    def write(file):
        (folder/'u-a.part').unlink()
        (folder/'u-a.part').write_bytes(b'half')
        file.write(content('u-a'))
    with pytest.warns(UserWarning, match='it was removed while it came'):
        assert cache.fetch('u-a', 10*KB, write) is None
    assert 'u-a' not in left(cache)
    put(cache, 'u-a')
    assert left(cache)==['u-a']

def test_what_is_removed_before_it_is_locked_is_made_again(cache, folder, monkeypatch):
    def of(*names): return lambda fd, how: os.readlink(f'/proc/self/fd/{fd}').endswith(names) and how!=fcntl.LOCK_UN
    coming = interfere(monkeypatch, fcntl, 'flock', cache.clear, 3, of('u-a.part'))
    put(cache, 'u-a')
    assert coming==[0] and left(cache)==['u-a']
    shutil.rmtree(folder)   # by hand
    put(cache, 'u-b')
    assert left(cache)==['u-b']

# --- files of others

def all_files(folder): return sorted(str(p.relative_to(folder)) for p in folder.rglob('*'))

@pytest.mark.parametrize('theirs', ['a.csv','b/c/d.csv','a.part.csv'])
def test_a_folder_with_files_of_others_gets_a_subfolder(folder, theirs, monkeypatch):
    "They would be removed. Nothing is made before a file is kept, and a subfolder with files of others is refused"
    for path in folder/theirs,folder/'x.part':
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('mine')
    before = all_files(folder)
    monkeypatch.setenv('FASTAI_REMOTE_CACHE', str(folder))
    caches = FileCache(folder, 10*KB),FileCache(size=10*KB)
    assert {cache.folder for cache in caches}=={f'{folder}/fastai_remote'} and all_files(folder)==before
    for key in 'u-a','u-b': put(caches[0], key)
    again = pickle.loads(pickle.dumps(FileCache(folder, 10*KB)))
    assert again.folder==caches[0].folder and again.used()==(10*KB,1) and {*before} < {*all_files(folder)}
    (folder/'fastai_remote/.lock').unlink()
    match = f"^{folder}/fastai_remote has 'u-b', and is no cache: .*FASTAI_REMOTE_CACHE"
    with pytest.raises(ValueError, match=match): FileCache(folder, 10*KB)

def test_what_tells_a_cache_from_files_of_others(cache, folder, child, monkeypatch):
    "The lock file; a part of a download that was killed is none of others, nor is a file that comes meanwhile"
    (c:=child(hangs(cache))).ready()
    killed(c)
    (folder/'.lock').unlink()   # killed before it was made
    put(FileCache(folder, 50*KB), 'u-b')
    assert left(cache)==['u-b']
    (folder/'.lock').unlink()
    assert FileCache(folder, 50*KB).folder==f'{folder}/fastai_remote'   # it cannot know whose files these are
    put(cache, 'u-c')   # an object that exists goes on
    (folder/'.lock').unlink()
    interfere(monkeypatch, os, 'listdir', lambda: put(cache, 'u-a'))   # after the lock file was looked for
    os.close(FileCache(folder, 50*KB).fetch('u-a', 10*KB, no))

def test_hidden_files_and_all_that_is_in_folders_stay(cache, folder):
    put(cache, 'u-a')
    mine = ['.git/config','.hidden','d/.git/config','d/x.part','d/y']
    for path in mine:
        (folder/path).parent.mkdir(parents=True, exist_ok=True)
        (folder/path).write_bytes(b'mine')
    assert cache.used()==(10*KB,1)
    cache.clear()
    assert [path for path in all_files(folder) if (folder/path).is_file()]==['.git/config','.hidden','.lock',*mine[2:]]

def test_a_file_is_on_the_disk_before_it_has_its_name(cache, monkeypatch):
    calls = []
    def note(name, call):
        def noted(*args):
            calls.append(name)
            return call(*args)
        monkeypatch.setattr(os, name, noted)
    for name in ('fsync','replace'): note(name, getattr(os, name))
    put(cache, 'u-a')
    assert calls==['fsync','replace']

# --- against a model

SIZES = {'a-1':10, 'a-2':20, 'b-c-1':30, 'b-2':5, 'c':25}
key = st.sampled_from(list(SIZES))
operation = st.one_of(st.tuples(st.sampled_from(['fetch','open','fail']), key),
                      st.tuples(st.just('clear'), st.none()))

@examples(60)
@given(st.lists(operation, max_size=25), st.integers(20, 70))
def test_there_is_what_a_dict_in_order_of_use_would_have(tmp_path_factory, operations, size):
    "Whatever is done in whatever order"
    cache,there,opened = FileCache(tmp_path_factory.mktemp('c'), size),OrderedDict(),[]
    def fits(n):
        "Make room for `n` bytes, if that is possible"
        for key in list(there):
            if sum(there.values())+n>size: del there[key]
        return True
    def use(key, fd):
        there[key] = SIZES[key]
        there.move_to_end(key)
        opened.append((key, fd))
        assert os.pread(fd, 100, 0)==content(key, SIZES[key])
    def fail(file):
        file.write(b'x')
        raise KeyError
    with warnings.catch_warnings(action='ignore'):
        for what,key in operations:
            if what=='clear':
                cache.clear()
                there.clear()
            elif what=='open':
                fd = cache.open(key)
                assert (fd is not None)==(key in there)
                if fd is not None: use(key, fd)
            elif what=='fetch':
                was_there = key in there
                fd = cache.fetch(key, SIZES[key], no if was_there else writer(key, SIZES[key]))
                assert (fd is not None)==(was_there or SIZES[key]<=size and fits(SIZES[key]))
                if fd is not None: use(key, fd)
            elif key not in there and SIZES[key]<=size and fits(SIZES[key]):
                with pytest.raises(KeyError): cache.fetch(key, SIZES[key], fail)
            assert left(cache)==sorted(there)
            assert cache.used()==(sum(there.values()), len(there)) and cache.used()[0]<=size
    for key,fd in opened:   # also those that were removed
        assert os.pread(fd, 100, 0)==content(key, SIZES[key])
        os.close(fd)
