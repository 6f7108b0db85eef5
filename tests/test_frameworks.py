"""Every framework reads each sample once per epoch, in two processes, in an order that differs between epochs

Or it says clearly what to do. The scripts are those of the section "Other frameworks" of the guide."""
import itertools, json, math, os, re, subprocess, sys, tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from clusters import one_ray_at_a_time
from fastai_remote import mix, RemoteDataset, ShardStore, to_shards
from fastai_remote.load.epochs import for_workers

processes = pytest.mark.xdist_group('processes')

N = 201   # odd, so that two ranks need one sample twice
HEAD = '''
import json, os, sys, warnings
import torch
from torch.utils.data import DataLoader
from fastai_remote import RemoteDataset, ShardStore

path,out = sys.argv[1:3]
ds = RemoteDataset(ShardStore(path)).to_tuple('x.f4', 'y.f4')
def save(rank, **epochs):
    with open(f'{out}/{rank}.json', 'w') as f: json.dump(epochs, f)
def numbers(x): return [int(i) for i in x.flatten()]
def error(f):
    "The message of the error that `f` raises"
    try: f()
    except Exception as e: return f'{type(e).__name__}: {e}'
'''

@pytest.fixture(scope='module')
def path(tmp_path_factory):
    "201 samples in shards of 20"
    folder = tmp_path_factory.mktemp('numbers')
    to_shards([{'x.f4':i, 'y.f4':i} for i in range(N)], folder, num_workers=1, maxcount=20, progress=False)
    return str(folder)

@pytest.fixture
def two_ranks(interpreters, path, tmp_path):
    "Runs a script in two processes, with the environment that torchrun makes; returns what each saves"
    def run(script):
        (tmp_path/'script.py').write_text(HEAD+script)
        interpreters.ranks(tmp_path/'script.py', path, tmp_path)
        return saved(tmp_path)
    return run

def saved(folder): return [json.loads((folder/f'{rank}.json').read_text()) for rank in range(2)]

def run_script(folder, path, *args, seconds=300):
    "The exit code of `script.py` of `folder`, which starts the ranks by itself; what it says is in the file `said`"
    env = {**os.environ, 'OMP_NUM_THREADS':'1', 'CUDA_VISIBLE_DEVICES':''}
    command = [sys.executable, '-W', 'ignore', folder/'script.py', path, folder, *args]
    with open(folder/'said', 'w') as said:   # what the ranks start may outlive them, and would hold a pipe open
        try: return subprocess.run(command, stdout=said, stderr=said, env=env, timeout=seconds).returncode
        except subprocess.TimeoutExpired: return 'it does not end'

def said(folder): return (folder/'said').read_text()[-3000:]

def each_once(a, b, twice=1):
    "Are all samples in each of two epochs, with at most `twice` repeated, and in another order?"
    assert len(a)==len(b)==2
    for one,other in zip(a, b):
        counts = Counter(one+other)
        assert counts.keys()==set(range(N)), f'{len(counts)} of {N} samples'
        assert len(one+other)==N+twice and len(one)==len(other)
    assert a[0]!=a[1] and b[0]!=b[1]

# --- accelerate

ACCELERATE = '''
if __name__=='__main__':   # and not in a worker that is spawned: it gets pickles, and here it has torch already
    torch.multiprocessing.set_forkserver_preload(['torch', 'fastai_remote.load.dataset'])
    from accelerate import Accelerator, DataLoaderConfiguration
    from fastai_remote.load.distributed import prepare_loader

def loaders():
    accelerator = Accelerator()
    loader = DataLoader(ds, batch_sampler=ds.batches(8, num_workers=1), num_workers=1)
    loader = prepare_loader(accelerator, loader)
    yield 'batches', accelerator.prepare(loader)   # which has no effect
    yield 'batched', prepare_loader(accelerator, DataLoader(ds.batched(8), batch_size=None, num_workers=1))
    spawned = DataLoader(ds.batched(8), batch_size=None, num_workers=1, multiprocessing_context='forkserver')
    yield 'spawned', prepare_loader(accelerator, spawned)
    yield 'stream', prepare_loader(accelerator, DataLoader(ds.shuffle(seed=1), batch_size=8, num_workers=1))
    yield 'shuffle', prepare_loader(accelerator, DataLoader(ds, batch_size=8, shuffle=True))
    for name,options in dict(dispatch=dict(dispatch_batches=True), uneven=dict(even_batches=False)).items():
        other = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
        yield name, prepare_loader(other, DataLoader(ds, batch_sampler=ds.batches(8)))
        yield name+' batched', prepare_loader(other, DataLoader(ds.batched(8), batch_size=None))

def divided_again(accelerator):
    "Loaders that accelerate prepares by itself, and would divide again"
    workers = dict(num_workers=1, multiprocessing_context='forkserver')
    for loader in (DataLoader(ds, batch_sampler=ds.batches(8)), DataLoader(ds.batched(8)),
                   DataLoader(ds.shuffle(seed=1), batch_size=8), DataLoader(ds.batched(8), batch_size=None, **workers)):
        yield accelerator.prepare(loader)

if __name__=='__main__':
    warnings.simplefilter('error', UserWarning)
    epochs = {name:[[i for x,_ in loader for i in numbers(x)] for _ in range(2)] for name,loader in loaders()}
    accelerator = Accelerator()
    given = ds.batches(8, rank=accelerator.process_index, world_size=3)
    errors = [error(lambda: prepare_loader(accelerator, DataLoader(ds.batched(8)))),
              error(lambda: prepare_loader(accelerator, DataLoader(ds, batch_sampler=given))),
              *(error(lambda: list(loader)) for loader in divided_again(accelerator))]
    save(accelerator.process_index, errors=errors, **epochs)
'''
@pytest.mark.slow
@processes
def test_accelerate(two_ranks):
    "No loader is divided a second time; one with torch's sampler is divided, and its last batches are filled"
    pytest.importorskip('accelerate')
    a,b = two_ranks(ACCELERATE)
    errors = a.pop('errors')
    streams = list(zip(a.pop('stream'), b.pop('stream')))   # without repeats, so one rank has one sample more
    assert all(sorted(one+other)==list(range(N)) for one,other in streams) and streams[0]!=streams[1]
    assert 'batches of 1 of them: DataLoader(ds.batched(…), batch_size=None)' in errors[0]
    assert 'divided among 3 ranks, of which this is rank 0, and accelerate has 2' in errors[1]
    assert all('Call prepare_loader(accelerator, loader)' in message for message in errors[2:]) and len(errors)==6
    for name in a:
        if name!='errors': each_once(a[name], b[name], twice=7 if name=='shuffle' else 1)

class Mesh:
    "What accelerate asks a `DeviceMesh` for: its names, and the size of each"
    def __init__(self, **sizes): self.sizes,self.mesh_dim_names = sizes,tuple(sizes)
    def __getitem__(self, name): return Mesh(**{name:self.sizes[name]})
    def size(self): return math.prod(self.sizes.values())

@pytest.mark.parametrize('sizes,n', [(dict(dp_replicate=2, dp_shard=2), 4), (dict(dp_shard=2, tp=2), 2),
                                     (dict(cp=4), 1)])
def test_meshes_of_accelerate(path, sizes, n):
    "Ranks that divide a model or a sequence read the same samples, so these are divided among fewer ranks"
    pytest.importorskip('accelerate')
    from fastai_remote.load.distributed import prepare_loader
    def prepared(world_size, process=0):
        loader = DataLoader(ds, batch_sampler=ds.batches(8, rank=0, world_size=world_size))
        accelerator = SimpleNamespace(
            num_processes=4, process_index=process, torch_device_mesh=Mesh(**sizes), state=None, device='cpu',
            device_placement=True, rng_types=[], non_blocking=False, use_stateful_dataloader=False)
        assert prepare_loader(accelerator, loader).batch_sampler is loader.batch_sampler
    ds = dataset(path)
    prepared(n)
    prepared(n, 4//n-1)
    with pytest.raises(ValueError, match=f'divided among 3 ranks, .*, and accelerate has {n}, .* world_size='):
        prepared(3)
    for process in range(4//n, 4):
        message = f'{n} ranks, of which this is rank 0, .* of which this is rank {process*n//4}:'
        with pytest.raises(ValueError, match=message): prepared(n, process)

def test_fastai_divides_no_loader_of_ours(path):
    from fastai.distributed import DistributedDL
    import fastai_remote.block
    ds = dataset(path)
    with pytest.raises(ValueError, match='would divide a torch DataLoader of a RemoteDataset again: '):
        DistributedDL(DataLoader(ds, batch_sampler=ds.batches(8)))

def test_the_examples_of_the_guide_are_those_of_these_tests():
    guide = (Path(__file__).parents[1]/'nbs/guide/training.md').read_text(encoding='utf-8')
    examples = re.findall(r'(?ms)^```py\n(.*?)^```', guide)
    scripts = {line.strip() for line in Path(__file__).read_text(encoding='utf-8').splitlines()}
    lines = [re.sub(' +#.*', '', line).strip() for line in '\n'.join(examples).splitlines()]
    assert len(examples)==8 and not [line for line in lines if line not in scripts and line!='for x,y in loader: …']

# --- torchdata

def numbers(x): return [int(i) for i in x.flatten()]
def dataset(path): return RemoteDataset(ShardStore(path)).to_tuple('x.f4', 'y.f4')

# kind: a stream or batches of a dataset, and how often each sample comes, or `None`
KINDS = {
    'batches': (lambda ds: ds.batches(8), 1), 'batched': (lambda ds: ds.batched(8), 1),
    'batches of a seed': (lambda ds: ds.batches(8, seed=3), 1),
    'batched of a seed': (lambda ds: ds.batched(8, seed=3), 1),
    'shuffled': (lambda ds: ds.shuffle(), 1), 'mix': (lambda ds: mix([ds[:90].shuffle(), ds[90:].shuffle()]), 1),
    'select': (lambda ds: ds.shuffle().select(lambda sample: int(sample[0])%3).batched(4), None),
    'buffer': (lambda ds: ds.stream(shuffle=True).batched(3).unbatched().shuffle(20), 1),
    'weighted': (lambda ds: mix([ds[:90], ds[90:].shuffle()], [1,5], end=300), None),
    'repeat': (lambda ds: ds.shuffle().repeat(2), 2)}

def stateful(made, workers=0):
    "torchdata's loader of batches or a stream"
    loader = pytest.importorskip('torchdata.stateful_dataloader').StatefulDataLoader
    if hasattr(made, 'sampler'):
        made.num_workers = max(workers, 1)
        return loader(made.ds, batch_sampler=made, num_workers=workers)
    return loader(made, batch_size=None, num_workers=workers)

@pytest.mark.parametrize('kind,workers,stops', [
    *((kind, 0, (0,1,5,26)) for kind in KINDS),
    *(pytest.param(kind, 2, (5,), marks=pytest.mark.slow) for kind in ('batches','batched','mix'))])
def test_an_epoch_continues_where_its_state_was_saved(path, kind, workers, stops):
    "In another process, with other random numbers: nothing is lost and nothing comes twice"
    make,times = KINDS[kind]
    def loader(): return stateful(make(dataset(path)), workers)
    for stop in stops:
        batches = iter(first:=loader())
        before = [numbers(next(batches)[0]) for _ in range(stop)]
        state = first.state_dict() if workers else json.loads(json.dumps(first.state_dict()))
        rest = [numbers(x) for x,_ in batches]
        torch.manual_seed(stop+99)
        again = loader()
        again.load_state_dict(state)
        assert [numbers(x) for x,_ in again]==rest and (rest or len(before)==26)
        seen = Counter(sum(before+rest, []))
        if times: assert seen==dict.fromkeys(range(N), times)
        if kind=='select': assert seen==dict.fromkeys((i for i in range(N) if i%3), 1)
        if stop==1 and times:
            assert Counter(i for x,_ in again for i in numbers(x))==dict.fromkeys(range(N), times)   # the next epoch

@pytest.mark.slow
@pytest.mark.parametrize('kind', ['batches','batched'])
def test_any_number_of_workers_continues_the_batches_of_an_epoch(path, kind):
    "Also what others have continued, with states of every third step; the next epoch has all samples again"
    def loader(workers):
        made = stateful(KINDS[kind][0](dataset(path)), workers)
        made.snapshot_every_n_steps = 3
        return made
    state,seen = state_after(first:=loader(2), 0),[]
    first.load_state_dict(state)
    whole = [numbers(x) for x,_ in first]
    for workers,n in (2,5),(3,4),(0,7),(1,30):
        again = loader(workers)
        again.load_state_dict(for_workers(state, workers))
        batches = iter(again)
        seen += [numbers(x) for x,_ in itertools.islice(batches, n)]
        state = again.state_dict()
    assert seen==whole and Counter(sum(seen, []))==dict.fromkeys(range(N), 1)
    assert Counter(i for x,_ in again for i in numbers(x))==dict.fromkeys(range(N), 1)

def state_after(loader, n):
    "The state of `loader` after `n` batches"
    batches = iter(loader)
    for _ in range(n): next(batches)
    return loader.state_dict()

@pytest.mark.parametrize('kind,workers', [('mix',2), ('select',0), ('repeat',0)])
def test_workers_of_a_stream_cannot_be_others(path, kind, workers):
    state = state_after(stateful(KINDS[kind][0](dataset(path)), workers), 2)
    with pytest.raises(ValueError, match='only be continued with the number of workers that it was saved with'):
        for_workers(state, 3)

def another_copy(path, folder):
    "The same samples in shards of another size"
    ShardStore(path).copy(folder/'copy', maxcount=50, shuffle=False, num_workers=1, progress=False)
    return dataset(folder/'copy')

OTHERS = 'was of other samples, or of shards of other sizes'
@pytest.mark.parametrize('of,other,message', [
    (lambda ds: ds.batches(8), lambda path, folder: dataset(path).batches(9), 'had bs 8, .* continued with 9'),
    (lambda ds: ds.batches(8), lambda path, folder: dataset(path)[:100].batches(8), 'had samples 201, .* with 100'),
    (lambda ds: ds[:100].batches(8), lambda path, folder: dataset(path)[100:200].batches(8), OTHERS),
    (lambda ds: ds.batches(8), lambda path, folder: another_copy(path, folder).batches(8), OTHERS),
    (lambda ds: ds.stream(), lambda path, folder: dataset(path)[:100].stream(),
     'had at least 150 results in this process, and now there are 100')])
def test_a_state_of_another_epoch_is_refused(path, tmp_path, of, other, message):
    loader = stateful(of(dataset(path)))
    batches = iter(loader)
    for _ in range(150 if 'results' in message else 1): next(batches)
    second = stateful(other(path, tmp_path))
    second.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match=message): next(iter(second))

def test_a_state_of_other_workers_is_refused(path):
    stream = dataset(path).stream()
    state = iter(stream).state_dict()|dict(num_workers=3)
    with pytest.raises(ValueError, match='had num_workers 3, and cannot be continued with 1'):
        iter(stream).load_state_dict(state)

def test_stateful_loaders_of_two_ranks_continue(path, monkeypatch):
    "As the guide says it"
    StatefulDataLoader = pytest.importorskip('torchdata.stateful_dataloader').StatefulDataLoader
    ds,seen = dataset(path),[]
    monkeypatch.setenv('WORLD_SIZE', '2')
    for rank in range(2):
        monkeypatch.setenv('RANK', str(rank))
        loader = StatefulDataLoader(ds, batch_sampler=ds.batches(8))
        batches = iter(loader)
        for _ in range(5): seen += numbers(next(batches)[0])
        state = loader.state_dict()
        loader = StatefulDataLoader(ds, batch_sampler=ds.batches(8))
        loader.load_state_dict(state)
        seen += [i for x,_ in loader for i in numbers(x)]
    assert set(seen)==set(range(N)) and len(seen)==N+1

# --- Lightning

LIGHTNING = '''
import logging
import lightning as L

class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.line,self.epochs = torch.nn.Linear(1, 1),[]
    def on_train_epoch_start(self): self.epochs.append([])
    def training_step(self, batch, k):
        self.epochs[-1] += numbers(batch[0])
        return (self.line(batch[0][:,None])[:,0]-batch[1]).square().mean()*1e-9
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=1e-6)

class LineOfBatched(Line):
    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        self.trainer.train_dataloader.dataset.set_epoch(self.current_epoch)

options = dict(accelerator='cpu', devices=2, strategy='ddp', logger=False, enable_checkpointing=False,
               enable_progress_bar=False, enable_model_summary=False)
# made before Lightning starts the second process
loader = DataLoader(ds, batch_sampler=ds.batches(8, num_workers=1), num_workers=1)
if __name__=='__main__':
    logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
    trainer = L.Trainer(max_epochs=2, use_distributed_sampler=False, **options)
    trainer.fit(model:=Line(), loader)
    epochs = dict(batches=model.epochs)
    loader_of_batched = DataLoader(ds.batched(8), batch_size=None, num_workers=1)
    L.Trainer(max_epochs=2, **options).fit(model:=LineOfBatched(), loader_of_batched)
    epochs['batched'] = model.epochs
    epochs['error'] = error(lambda: L.Trainer(max_epochs=2, **options).fit(Line(), loader))
    save(torch.distributed.get_rank(), **epochs)
'''
@pytest.mark.slow
@processes
def test_lightning(interpreters, path, tmp_path):
    "Lightning starts the second process itself; it cannot replace our batches, and says how to leave them as they are"
    pytest.importorskip('lightning')
    (tmp_path/'script.py').write_text(HEAD+LIGHTNING)
    interpreters.run(tmp_path/'script.py', path, tmp_path, env={**os.environ, 'CUDA_VISIBLE_DEVICES':''}, check=True)
    a,b = saved(tmp_path)
    assert 'Trainer(use_distributed_sampler=False)' in a.pop('error') and b.pop('error')
    for kind in a: each_once(a[kind], b[kind])

# --- HuggingFace's Trainer

TRANSFORMERS = '''
from fastai_remote.load.distributed import prepare_loader
from transformers import Trainer, TrainerCallback, TrainingArguments

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line,self.seen = torch.nn.Linear(1, 1),[]
    def forward(self, x, y):
        if self.training: self.seen.append(numbers(x))
        return dict(loss=(self.line(x[:,None])[:,0]-y).square().mean()*1e-9)

def collate(samples):
    x,y = zip(*samples)
    return dict(x=torch.tensor(x), y=torch.tensor(y))

class RemoteTrainer(Trainer):
    def get_train_dataloader(self):
        workers = self.args.dataloader_num_workers
        batches = self.train_dataset.batches(self.args.per_device_train_batch_size, num_workers=workers,
                                             seed=self.args.seed)
        loader = DataLoader(self.train_dataset, batch_sampler=batches, num_workers=workers,
                            collate_fn=self.data_collator)
        return prepare_loader(self.accelerator, loader)

def fit(cls, ds, collate=collate, resume=None):
    args = TrainingArguments(out, per_device_train_batch_size=8, num_train_epochs=2, use_cpu=True, report_to='none',
                             save_strategy='steps', save_steps=20, logging_strategy='no', disable_tqdm=True)
    model = Line()
    cls(model, args, train_dataset=ds, data_collator=collate).train(resume_from_checkpoint=resume)
    return model.seen

def two_epochs(batches):
    half = len(batches)//2
    return [sum(batches[:half], []), sum(batches[half:], [])]

if __name__=='__main__':
    own,batches = fit(Trainer, ds),fit(RemoteTrainer, ds)
    rest = fit(RemoteTrainer, ds, resume=f'{out}/checkpoint-20')   # in the second epoch
    save(torch.distributed.get_rank(), own=two_epochs(own), batches=two_epochs(batches), resumed=[batches[20:], rest],
         error=error(lambda: fit(Trainer, ds.batched(8), collate=None)))
'''
@pytest.mark.slow
@processes
def test_huggingface_trainer(two_ranks):
    "Its own sampler is divided by accelerate, which fills the last batches; ours is divided once"
    pytest.importorskip('transformers')
    a,b = two_ranks(TRANSFORMERS)
    for rank in a,b:
        all_at_once,resumed = rank.pop('resumed')
        assert all_at_once==resumed and len(resumed)==6
    assert 'batch_size=None' in a.pop('error')
    each_once(a['batches'], b['batches'])
    each_once(a['own'], b['own'], twice=7)

# --- Ray Train

RAY = '''
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def train(config):
    import ray.train.torch
    rank = ray.train.get_context().get_world_rank()
    open(f'{out}/{rank}.began', 'w').close()
    ds = RemoteDataset(ShardStore(config['path'])).to_tuple('x.f4', 'y.f4')
    seen = []
    loader = DataLoader(ds.batched(8), batch_size=None)
    loader = ray.train.torch.prepare_data_loader(loader)
    for epoch in range(2):
        loader.dataset.set_epoch(epoch)
        seen.append([i for x,_ in loader for i in numbers(x)])
    epochs = dict(batched=seen, batches=[], error=error(lambda: ds.batches(8)))
    loader = DataLoader(ds, batch_sampler=ds.batches(8, rank=rank, world_size=2))
    loader = ray.train.torch.prepare_data_loader(loader, add_dist_sampler=False)
    for epoch in range(2):
        loader.batch_sampler.set_epoch(epoch)
        epochs['batches'].append([i for x,_ in loader for i in numbers(x)])
    save(rank, **epochs)

if __name__=='__main__':
    ray.init(num_cpus=2, include_dashboard=False, logging_level='ERROR', log_to_driver=False, _temp_dir=sys.argv[3])
    trainer = TorchTrainer(train, train_loop_config=dict(path=path), scaling_config=ScalingConfig(num_workers=2),
                           run_config=RunConfig(storage_path=out, name='run'))
    trainer.fit()
    ray.shutdown()
'''
@pytest.mark.slow
@processes
@pytest.mark.timeout(1200)
def test_ray_train(path, tmp_path):
    "`prepare_data_loader` leaves `batched` as it is, and `batches` with `add_dist_sampler=False`"
    pytest.importorskip('ray')
    (tmp_path/'script.py').write_text(HEAD+RAY)
    for _ in range(2):   # if Ray does not start the ranks, it is started anew; the ranks have one attempt
        # the path of Ray's sockets must be short
        with one_ray_at_a_time(), tempfile.TemporaryDirectory(prefix='ray', ignore_cleanup_errors=True) as logs:
            code = run_script(tmp_path, path, logs, seconds=480)
        if list(tmp_path.glob('*.began')): break
    assert code==0, said(tmp_path)
    a,b = saved(tmp_path)
    for rank in a,b: assert 'It keeps DataLoader(ds.batched(…), batch_size=None)' in rank.pop('error')
    for kind in a: each_once(a[kind], b[kind])
