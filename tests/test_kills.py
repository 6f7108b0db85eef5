"Ingests whose processes are killed, doubled or interrupted: refused, or whole in the end, as if nothing had been"
import random, re, shutil, subprocess, sys
from pathlib import Path

import pytest

from conftest import HOLD, holding, kill, private_server, wait_for
from fastai_remote import StoreBusy, StoreNotFound
from snapshots import client, FolderPlace, RedisPlace

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('processes')]

SCRIPT = HOLD + '''
import sys
from fastai_remote import to_redis, to_shards
what,num_workers,*address = sys.argv[1:]
def fn(i):
    hold()
    if i%19==3: raise ValueError(f'no {i}')
    return {'txt':f'sample {i}', 'cls':f'c{i%7}', 'id':i, 'labels':[f'l{i%3}',f'm{i%11}']}
def part(start, stop): yield from range(start, stop)
sources = dict(known={'train':range(1700), 'valid':range(1700, 2000)}, stream=part(0, 2000),
               splits={'train':part(0, 1700), 'valid':part(1700, 2000)}, other=range(5000, 7000))
options = dict(num_workers=int(num_workers), progress=False, chunk=50, max_failed=1., overwrite=what=='other')
if len(address)==2: print(to_redis(sources[what], *address, fn, **options))
else: print(to_shards(sources[what], *address, fn, maxsize=150_000, **options))
'''

class Ingests:
    "Starts the script in process groups of their own, which write to one place"
    def __init__(self, place, tmp_path):
        self.place,self.folder,self.processes = place,tmp_path,[]
        self.script,self.may_go_on = tmp_path/'ingest.py',tmp_path/'go on'
        self.script.write_text(SCRIPT)
        self.address = [place.url] if place.folder else [place.url, 'd']

    def start(self, what, num_workers=2, hold=None, before=()):
        "`hold`: each process stops after so many samples, until the file `may_go_on` is there"
        log = self.folder/f'{len(self.processes)}.log'   # no pipe: the workers of a killed ingest would hold it open
        args = [*before, sys.executable, '-W', 'ignore', self.script, what, str(num_workers), *self.address]
        with log.open('w') as out:
            process = subprocess.Popen(args, stdout=out, stderr=out, start_new_session=True,
                                       env=holding(hold, self.may_go_on))
        process.says = lambda: (process.wait(500), log.read_text())[1]
        self.processes.append(process)
        return process

    def held(self, what, chunks=3, **options):
        "An ingest of which at least so many chunks are done, and which waits"
        process = self.start(what, **options)
        wait_for(lambda: process.poll() is not None or self.done()>=chunks)
        assert process.poll() is None, process.says()
        return process

    def done(self): return sum(ingest['chunks'] for ingest in self.place.unfinished())

    def finish(self, what, **options):
        process = self.start(what, **options)
        text = process.says()
        assert process.returncode==0, text
        return text

@pytest.fixture
def ingests(request, tmp_path):
    place = FolderPlace(tmp_path) if request.param=='folder' else RedisPlace(request.getfixturevalue('fresh'))
    place.clear()
    ingests = Ingests(place, tmp_path)
    yield ingests
    for process in ingests.processes: kill(process)

def cases(names, *values):
    "A case for each, whose first value is `redis` or `folder`"
    return pytest.mark.parametrize(f'ingests,{names}', values, indirect=['ingests'])

@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    "What the script leaves in a place of this kind if nothing happens to it"
    seen = {}
    def get(place, what):
        key = type(place),what
        if key in seen: return seen[key]
        folder = tmp_path_factory.mktemp('undisturbed')
        with private_server() as server:
            ingests = Ingests(FolderPlace(folder) if place.folder else RedisPlace(server), folder)
            ingests.place.clear()
            ingests.finish(what, num_workers=1)
            return seen.setdefault(key, ingests.place.everything())
    return get

def workers_of(process):
    children = Path(f'/proc/{process.pid}/task').glob('*/children')
    return [int(pid) for file in children for pid in file.read_text().split() if is_worker(pid)]

def is_worker(pid):
    try: return b'popen_loky' in Path(f'/proc/{pid}/cmdline').read_bytes()
    except FileNotFoundError: return False

@cases('what,num_workers', ('redis','splits',1), ('folder','known',2))
def test_an_ingest_that_is_killed_again_and_again_is_whole_in_the_end(ingests, undisturbed, what, num_workers):
    "Readers see nothing meanwhile"
    rng = random.Random(what)
    for _ in range(3):
        wanted = ingests.done()+rng.randrange(1, 8)   # of 40 chunks, and of 9 that are begun
        kill(ingests.held(what, wanted, num_workers=num_workers, hold=450//num_workers))
        with pytest.raises(StoreNotFound): ingests.place.open()
    assert 'by an earlier run' in ingests.finish(what, num_workers=num_workers)
    assert ingests.place.everything()==undisturbed(ingests.place, what)

@cases('then', ('redis','other'), ('folder','stream'))
def test_workers_that_outlive_a_killed_leader_do_no_harm(ingests, undisturbed, then):
    "Neither to the same call, which is repeated at once, nor to another one. They leave by themselves"
    process = ingests.held('stream', hold=125)
    workers = workers_of(process)
    process.kill()
    process.wait()
    ingests.may_go_on.touch()
    ingests.finish(then, num_workers=1)
    if then=='stream': assert ingests.place.everything()==undisturbed(ingests.place, then)
    else: assert ingests.place.visible()==undisturbed(ingests.place, then)[0]
    assert len(workers)==2
    wait_for(lambda: not any(map(is_worker, workers)))

@cases('what,of', ('redis','known',40), ('folder','stream',None))
def test_a_second_writer_is_refused_and_told_how_far_the_first_is(ingests, undisturbed, what, of):
    "Nor can its ingest be abandoned or deleted, until it is killed; then nothing is left"
    place,process = ingests.place,ingests.held(what, hold=125)
    second = ingests.start(what)
    text = second.says()
    assert second.returncode and re.search(rf'StoreBusy: .*process {process.pid} on .* is writing (.d.|here) now '
                                           rf'\([1-9][0-9]*{" of 40" if of else ""} chunks done\)', text), text
    unfinished, = place.unfinished()
    assert unfinished['name']=='d' and unfinished['running'] and unfinished['of']==of and 3<=unfinished['chunks']<40
    for act in place.abandon,place.delete:
        with pytest.raises(StoreBusy, match=f'process {process.pid}'): act()
    kill(process)
    place.abandon()
    nothing = place.everything()
    assert place.unfinished()==[] and not place.visible()
    with pytest.raises(StoreNotFound): place.abandon()
    place.clear()
    assert place.everything()==nothing

def test_a_process_of_another_container_is_not_taken_for_dead(fresh, tmp_path):
    "It has the same host name, and its number means nothing here"
    inside = ['unshare','-Urpf','--mount-proc']
    if not shutil.which('unshare') or subprocess.run([*inside,'true'], capture_output=True).returncode:
        pytest.skip('no namespaces here')
    ingests = Ingests(RedisPlace(fresh), tmp_path)
    try:
        # a number that no process has here
        numbered = [*inside, 'sh', '-c', 'for i in $(seq 400); do /bin/true; done; "$@"; true', 'sh']
        ingests.held('known', num_workers=1, hold=200, before=numbered)
        holder = re.search(rb'"pid": ?(\d+)', client(fresh).get('d:ingest:lock'))[1].decode()
        if Path(f'/proc/{holder}').exists(): pytest.skip('the number is taken')
        second = ingests.start('known', num_workers=1)
        assert 'StoreBusy' in second.says() and second.returncode
    finally:
        for process in ingests.processes: kill(process)
