"Who may write in a folder: clocks that are wrong, processes that are killed, slow, or stopped and go on later"
import contextlib, fcntl, os, signal, time, traceback
from itertools import count
from pathlib import Path

import pytest

import shard_helpers
from clusters import wait_for
from fastai_remote import ShardStore, StoreBusy, to_shards
from fastai_remote.store.storage import Storage
from fastai_remote.testing import ManualClock
from fastai_remote.write import folder_place
from fastai_remote.write.base import LEASE_SECONDS
from fastai_remote.write.folder_place import FolderLock, FolderPlace, LOCK_FILE

def records(folder): return len(list(folder.glob('.fastai_remote/.ingest/chunk-*.json')))

def fn(i):
    "What it returns depends on who calls it; a process that is to be slow goes on after its first chunk when told so"
    until = os.environ.get('HOLD_UNTIL')
    while until and records(Path(until).parent/'d') and not os.path.exists(until): time.sleep(.005)
    return {'txt':f'{os.environ.get("WHO", "us")} {i}'}

def write(folder, n=12, **options):
    options = dict(chunk=4, maxcount=4, shuffle=False, num_workers=1, progress=False, **options)
    return to_shards(list(range(n)), folder, fn, **options)

def writers(folder): return [o['txt'].split()[0] for o in ShardStore(folder)]
def is_right(folder): return ShardStore(folder).verify(num_workers=1).bad==0

def lock(folder, beat=1, host='elsewhere', seconds=0):
    "The lock of a process whose clock is wrong by so many seconds, on a file server whose clock is, too"
    shard_helpers.lock(folder, host=host, start=1, beat=beat, time=time.time()+seconds)
    os.utime(folder/'.fastai_remote/.ingest/lock.json', (time.time()+seconds,)*2)

class OtherRenews(ManualClock):
    "A clock in each pause of which another process renews its lock"
    def __init__(self, renew):
        super().__init__()
        self.renew = renew
    def advance(self, seconds):
        super().advance(seconds)
        self.renew()

@pytest.mark.parametrize('seconds', [-3600, 0, 3600])
def test_clocks_of_others_do_not_matter(tmp_path, seconds):
    "A lock that is renewed is kept, and one that is not is taken over, whatever time it says"
    beats = count(1)
    def renew(): lock(tmp_path, next(beats), seconds=seconds)
    renew()
    with OtherRenews(renew), pytest.raises(StoreBusy, match=f'process {os.getppid()} on elsewhere is writing here now'):
        write(tmp_path)
    with ManualClock() as clock: write(tmp_path)
    assert sum(clock.pauses)>LEASE_SECONDS*.99 and is_right(tmp_path)

class Jumping(ManualClock):
    "A clock of which only the time that passes is right"
    def time(self): return next(self.jumps)
    jumps = count(0, 10_000)

def test_our_own_clock_may_jump(tmp_path):
    lock(tmp_path)
    with Jumping() as clock: write(tmp_path)
    assert sum(clock.pauses)>LEASE_SECONDS*.99

def test_the_number_of_a_dead_process_may_be_anothers_now(tmp_path):
    "No lease has to run out for a process that is known to be dead"
    lock(tmp_path, host=folder_place.host_id())   # our parent lives, but it was not started at tick 1
    with ManualClock() as clock: write(tmp_path)
    assert sum(clock.pauses)<LEASE_SECONDS/2

# --- other processes

@contextlib.contextmanager
def not_exclusive(self, create=False): yield False

BUSY = 7   # exit code of a process that was told that another one has taken over

@pytest.fixture
def other(tmp_path):
    "Starts another process that writes to a folder; returns its number. With a long lease, it never renews its lock"
    started = []
    def start(holds=False, host=None, stop_at=None, has_flock=True, lease=1e6):
        if (pid := os.fork()): return started.append(pid) or pid
        code = 1
        try:
            os.environ['WHO'] = 'they'
            if holds: os.environ['HOLD_UNTIL'] = str(tmp_path/'go on')
            folder_place.LEASE_SECONDS = lease
            if host: folder_place.host_id = lambda: host
            if not has_flock: FolderLock.exclusive = not_exclusive
            checks,check = count(1),FolderLock.check
            def checked(self):
                check(self)
                if next(checks)==stop_at: os.kill(os.getpid(), signal.SIGSTOP)   # it has just seen that it has the lock
            FolderLock.check = checked
            write(tmp_path/'d')
            code = 0
        except StoreBusy: code = BUSY
        except BaseException: traceback.print_exc()
        finally: os._exit(code)
    yield start
    for pid in started:
        with contextlib.suppress(ProcessLookupError): os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError): os.waitpid(pid, 0)

def state(path): return path.read_text().rpartition(')')[2].split()[0]
def await_stop(pid): wait_for(lambda: all(state(t/'stat')=='T' for t in Path(f'/proc/{pid}/task').iterdir()))
def ends_with(pid): return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def stop(pid, folder):
    "Stop a process while it does not renew its lock"
    fd = os.open(folder/'.fastai_remote/.ingest', os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.kill(pid, signal.SIGSTOP)
    await_stop(pid)
    os.close(fd)

def test_a_killed_process_is_followed_at_once(tmp_path, other):
    pid = other(holds=True)
    wait_for(lambda: records(tmp_path/'d')==1)
    os.kill(pid, signal.SIGKILL)   # and not waited for: a zombie has its number
    wait_for(lambda: state(Path(f'/proc/{pid}/stat'))=='Z')
    with ManualClock() as clock: write(tmp_path/'d')
    assert sum(clock.pauses)<LEASE_SECONDS/2 and is_right(tmp_path/'d') and writers(tmp_path/'d')==['they']*4+['us']*8

@pytest.mark.parametrize('host', [None,'elsewhere'])
def test_a_slow_process_keeps_its_lock(tmp_path, other, host):
    def beats(): return FolderLock(Storage(tmp_path/'d/.fastai_remote')).holder()['beat']
    pid = other(holds=True, host=host, lease=.3)
    wait_for(lambda: records(tmp_path/'d')==1)
    for _ in range(2):
        match = f'process {pid} on .* is writing here now .1 of 3 chunks'
        with pytest.raises(StoreBusy, match=match): write(tmp_path/'d')
        for drop in ShardStore.abandon,ShardStore.delete:
            with pytest.raises(StoreBusy, match=f'process {pid} '): drop(tmp_path/'d')
        assert ShardStore.unfinished(tmp_path/'d')[0]['running']
        n = beats()
        wait_for(lambda: beats()>n+7)   # more than the lease of that process
    (tmp_path/'go on').touch()
    assert ends_with(pid)==0 and writers(tmp_path/'d')==['they']*12

@pytest.mark.parametrize('host,has_flock,same', [(None,True,True), ('elsewhere',True,False), ('elsewhere',False,True)])
def test_a_stopped_process_does_no_harm_when_it_goes_on(tmp_path, other, host, has_flock, same):
    "Another one has taken over, with the same source or another one. It is told"
    folder = tmp_path/'d'
    pid = other(holds=True, host=host, has_flock=has_flock)
    wait_for(lambda: records(folder)==1)
    stop(pid, folder)
    with ManualClock():
        assert not ShardStore.unfinished(folder)[0]['running']
        if same: write(folder)
        else: write(folder, n=11, overwrite=True)
    assert writers(folder)==(['they']*4+['us']*8 if same else ['us']*11)
    there = {f.name:f.read_bytes() for f in folder.iterdir() if f.is_file()}
    (tmp_path/'go on').touch()
    os.kill(pid, signal.SIGCONT)
    assert ends_with(pid)==BUSY and {f.name:f.read_bytes() for f in folder.iterdir() if f.is_file()}==there
    assert is_right(folder)

@pytest.mark.parametrize('k', [1,3,5,7])
def test_a_process_that_is_stopped_while_it_publishes_cannot_be_overtaken(tmp_path, other, k):
    "On a disk, nobody takes over between the check of the lock and the file that depends on it"
    pid = other(stop_at=k)
    await_stop(pid)
    match = 'another process is publishing a file here, and does not go on; is it stopped'
    with ManualClock(), pytest.raises(StoreBusy, match=match): write(tmp_path/'d')
    os.kill(pid, signal.SIGCONT)
    assert ends_with(pid)==0 and writers(tmp_path/'d')==['they']*12

@pytest.mark.parametrize('k', [2,4,6])
def test_a_late_file_does_no_harm_where_there_is_no_flock(tmp_path, other, k):
    "As on object storage: it has a name of its own. (`they` and `us` write different samples, as a random `fn` would)"
    folder = tmp_path/'d'
    pid = other(host='elsewhere', stop_at=k, has_flock=False)
    await_stop(pid)
    with ManualClock(): write(folder)
    want = writers(folder)
    assert 'us' in want or k==6
    os.kill(pid, signal.SIGCONT)
    assert ends_with(pid)==BUSY and writers(folder)==want and is_right(folder)

@pytest.mark.parametrize('call', ['clean_up','remove_all'])
def test_who_has_lost_the_lock_removes_nothing(tmp_path, call):
    "Nobody knows what the next one is about to publish: an edit has no plan, and its files are not in the manifest yet"
    write(tmp_path/'d')
    late,other = FolderPlace(Storage(f'{tmp_path}/d')),FolderPlace(Storage(f'{tmp_path}/d'))
    late.take()
    late.hidden.remove([LOCK_FILE])   # as if it had slept for too long
    with other.locked():
        other.hidden.write('.part-2-0123abcd-000000.tar', b'')
        before = sorted(tmp_path.rglob('*'))
        with pytest.raises(StoreBusy): getattr(late, call)()
        assert sorted(tmp_path.rglob('*'))==before and is_right(tmp_path/'d')
    late.close()
