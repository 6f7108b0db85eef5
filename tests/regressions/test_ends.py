"""Workers end with the process that started them, or with the epoch, and Ctrl-C is never swallowed

pytorch/pytorch#5736 reports workers that outlive a process that was killed, #9985 errors in a finaliser after `break`,
and #22924 interrupts that workers get."""
import os, signal, sys, tempfile, threading, warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fastai.data.core import DataLoaders
from fastai_remote import hf_samples, to_shards
from fastai_remote.parallel import OwnedFolder
from fastai_remote.ingest.stores import ShardStore

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('processes')]
DEADLINE = 100   # seconds until a process counts as one that does not end; the faults took 5 s, or minutes

@pytest.fixture(scope='module')
def shards(tmp_path_factory):
    "160 images whose batches of eight, of 98 KB, fill the pipe of a worker"
    folder = tmp_path_factory.mktemp('ends')/'shards'
    source = [{'png':Image.effect_noise((64,64), 90).convert('RGB'), 'cls':i%2} for i in range(160)]
    to_shards(source, folder, num_workers=1, progress=False)
    return folder

@pytest.fixture
def start(interpreters, tmp_path):
    "Starts a Python process that runs a script; `.end()` waits for it and whatever it starts"
    def call(code, *args, **env):
        file = tmp_path/'script.py'
        file.write_text(f'import signal, sys\nsys.path += {sys.path}\n'
                        f'signal.signal(signal.SIGINT, signal.default_int_handler)\n{code}')
        env = {**os.environ, 'PYTHONPATH':os.pathsep.join([str(tmp_path), *sys.path]), **env}
        return interpreters.start(file, *args, env=env, pipe=True)
    return call

TRAINING = '''
import os, sys, threading, torch
from fastai.vision.all import *
from fastai_remote import *
from torch.utils.data import DataLoader
from clusters import wait_for
import multiprocessing

def interrupt_at_the_next_end():
    "Ctrl-C, once, when a worker ends"
    interrupts = [signal.SIGINT]
    signal.signal(signal.SIGCHLD, lambda *args: interrupts and os.kill(os.getpid(), interrupts.pop()))

def fill_pipes():
    "Wait until the pipe of the workers is full: a thread of one of them is blocked, and the others wait for that"
    def waits_in(worker): return ''.join(f.read_text() for f in Path(f'/proc/{worker.pid}/task').glob('*/wchan'))
    wait_for(lambda: any('pipe_write' in waits_in(worker) for worker in multiprocessing.active_children()))

class At(Callback):
    "Call a function with the second batch of each epoch"
    def __init__(self, f): self.f = f
    def before_batch(self):
        if self.iter==1: self.f()

def learner(f, num_workers=2, **options):
    dls = DataLoaders.from_shards(sys.argv[1], bs=8, num_workers=num_workers, **options)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3*64*64, 2))
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), cbs=At(f))
    learn.remove_cb(ProgressCallback)
    learn.remove_cb(Recorder)
    return learn
'''

# --- 20: Ctrl-C where an epoch ends

@pytest.mark.parametrize('epoch', [
    "learner(f, on_bad='skip', persistent_workers=True).fit(1)", 'learner(f, pin_memory=True).fit(1)',
    'left_early(learner(f).dls.train)'])
def test_an_interrupt_where_an_epoch_ends_is_not_swallowed(start, shards, epoch):
    "It comes while the process waits for the end of its workers: of complete epochs, and of those that are left early"
    code = TRAINING+f'''
f = interrupt_at_the_next_end
def left_early(dl):
    for b in dl:
        f()
        break
try:
    {epoch}
    threading.Event().wait({DEADLINE//2})
    print('swallowed')
except KeyboardInterrupt: print('interrupted')
'''
    # Python may say before that it has ignored the interrupt in one of its own hooks: then it came once more
    assert start(code, shards).end(DEADLINE).splitlines()[-1]=='interrupted'

def test_persistent_workers_are_refused_once(shards):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        dls = DataLoaders.from_shards(shards, bs=8, num_workers=2, persistent_workers=True)
        dls.train.new(bs=4)
        dls.test_dl(dls.valid_ds.items)
    warned, = [w for w in caught if 'persistent_workers=True has no effect' in str(w.message)]
    assert not any(dl.fake_l.persistent_workers for dl in dls)

# --- 21: workers that do not end

def test_no_worker_is_left_when_an_epoch_ends_with_an_error(start, shards):
    "Not even while its traceback is kept, as a notebook does; workers whose pipe is full do not wait for a reader"
    code = TRAINING+'''
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 10_000.   # nothing ends because somebody is tired of waiting
def send(): threading.Thread(target=os.killpg, args=(0, signal.SIGINT)).start()
def interrupt(): (fill_pipes(), send())
def fail(): (fill_pipes(), exec('raise KeyboardInterrupt'))
def predict():
    learn = learner(interrupt)
    learn.get_preds(dl=learn.dls.train.new(shuffle=False))
kept = []
def end(epoch):
    try: epoch()
    except KeyboardInterrupt as e: kept.append(e)
    print(multiprocessing.active_children(), flush=True)
for f in interrupt,fail: end(lambda: learner(f).fit(1))
end(predict)
end(lambda: learner(send, pin_memory=True).fit(1))
print(len(kept))
'''
    assert start(code, shards).end(DEADLINE).split()==['[]']*4+['4']

KILLED = {
    'RemoteDL':"dl = learner(noop).dls.train",
    'spawned':"torch.multiprocessing.set_start_method('spawn'); dl = learner(noop, num_workers=1).dls.train",
    'stream':"dl = DataLoader(RemoteDataset(ShardStore(sys.argv[1])).stream().batched(8, None), None, num_workers=2)"}

@pytest.mark.parametrize('made', KILLED)
def test_workers_of_a_training_that_is_killed_end(start, shards, made):
    code = TRAINING+f'''
if __name__=='__main__':
    {KILLED[made]}
    batches = iter(dl)
    next(batches)
    fill_pipes()
    os.kill(os.getpid(), signal.SIGKILL)
'''
    assert not start(code, shards).end(DEADLINE)

# Prepended to a script whose workers kill the process that started them
KILL = '''
import os, sys
os.environ.setdefault('LEADER', str(os.getpid()))
def kill_leader():
    if os.getppid()==int(os.environ['LEADER']): os.kill(os.getppid(), 9)   # else it is dead, or this is the leader
    return {'n':1}
'''

@pytest.mark.parametrize('backend', ['loky','multiprocessing'])
def test_workers_of_an_ingest_that_is_killed_end(start, tmp_path, backend):
    code = KILL+f'''
from joblib import parallel_config
from fastai_remote import to_shards
with parallel_config({backend!r}):
    to_shards(range(100), sys.argv[1], lambda i: kill_leader(), num_workers=2, progress=False)
print('it was not killed')
'''
    assert 'not killed' not in start(code, tmp_path/'d').end(DEADLINE)

@pytest.mark.parametrize('module', ['joblib.externals.loky.process_executor','fastai_remote.parallel'])
def test_workers_that_start_when_an_ingest_is_killed_end(start, tmp_path, module):
    "When they import a module: `python ingest.py | tee log` comes back"
    (tmp_path/'sitecustomize.py').write_text(KILL+f'''
class Finder:
    def find_spec(name, *args):
        if name=={module!r} and 'joblib.externals.loky.backend.popen_loky_posix' in sys.orig_argv: kill_leader()
sys.meta_path.insert(0, Finder)
''')
    code = KILL+'''
from fastai_remote import to_shards
to_shards(range(100), sys.argv[1], lambda i: {'n':i}, num_workers=2, chunk=1, progress=False)
print('it was not killed')
'''
    assert 'not killed' not in start(code, tmp_path/'d').end(DEADLINE)

# --- what a killed process leaves in the temporary folder

class Numbers(torch.utils.data.Dataset):
    "A dataset that cannot be pickled"
    def __init__(self): self.lock = threading.Lock()
    def __len__(self): return 6
    def __getitem__(self, i): return np.full(3, i),i

def rows():
    from datasets import Dataset
    return hf_samples(Dataset.from_dict({'a':[1,2,3,4]}))

@pytest.fixture
def temporary(tmp_path, monkeypatch):
    "The temporary folder"
    folder = tmp_path/'tmp'
    folder.mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(folder))
    return folder

@pytest.mark.parametrize('source', [Numbers,rows])
@pytest.mark.parametrize('num_workers', [0,1])
def test_without_workers_no_dataset_is_written_for_them(temporary, tmp_path, source, num_workers):
    seen = []
    def fn(item):
        seen.append(list(temporary.glob('fr-*')))
        return {'n':len(seen)}
    to_shards(source(), tmp_path/'d', fn, num_workers=num_workers, progress=False)
    assert len(seen)>3 and not any(seen)

@pytest.mark.parametrize('kind,leave', [
    ('dataset','to_shards(Numbers(), sys.argv[1], lambda o: kill_leader(), num_workers=2, progress=False)'),
    ('upload',"with Storage('memory://x').create('y') as f: os.kill(os.getpid(), 9)")])
def test_what_a_killed_process_leaves_is_removed_by_the_next_ingest(start, temporary, tmp_path, kind, leave):
    code = KILL+f'''
import torch, numpy as np
from fastai_remote import to_shards
from fastai_remote.store.storage import Storage
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, i): return np.full(3, i),i
{leave}
'''
    start(code, tmp_path/'d', TMPDIR=str(temporary)).end(DEADLINE)
    assert list(temporary.glob(f'fr-{kind}-*'))
    to_shards([{'n':1}], tmp_path/'other', num_workers=0, progress=False)
    assert not list(temporary.glob('fr-*'))

def test_only_what_is_certainly_left_is_removed(start, temporary, tmp_path):
    "Not the folder of a process that lives, of another machine, of another user's choice, or one behind a link"
    code = '''
from fastai_remote.parallel import OwnedFolder
folder = OwnedFolder('dataset')
print(folder.name, flush=True)
signal.pause()
'''
    def ingest(): to_shards([{'n':1}], tmp_path/'other', num_workers=0, overwrite=True, progress=False)
    process = start(code, TMPDIR=str(temporary))
    theirs,ours = Path(process.line()),OwnedFolder('dataset')
    left = OwnedFolder('dataset')
    left.lock.close()   # as when its process is killed
    elsewhere = Path(left.name).rename(tmp_path/'elsewhere')
    (temporary/'fr-link').symlink_to(elsewhere)
    for name,text in ('machine','another kernel'),('empty',''):
        (temporary/f'fr-{name}').mkdir()
        (temporary/f'fr-{name}'/'owner').write_text(text)
    before = set(temporary.iterdir())
    ingest()
    assert set(temporary.iterdir())==before and (elsewhere/'owner').exists() and len(before)==5
    process.kill()
    process.end(DEADLINE)
    ingest()
    assert set(temporary.iterdir())==before-{theirs}
    ours.cleanup()
