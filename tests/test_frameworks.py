"""Every framework reads each sample once per epoch, in two processes, in an order that differs between epochs

Or it says clearly what to do. The scripts are those of the section "Other frameworks" of the guide."""
import json, os, socket, subprocess, sys
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fastai_remote import RemoteDataset, ShardStore, to_shards

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
    to_shards([{'x.f4':i, 'y.f4':i} for i in range(N)], d:=tmp_path_factory.mktemp('numbers'), num_workers=1, maxcount=20,
              progress=False)
    return str(d)

def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

@pytest.fixture
def two_ranks(interpreters, path, tmp_path):
    "Runs a script in two processes, with the environment that torchrun makes; returns what each saves"
    def run(script):
        (tmp_path/'script.py').write_text(HEAD+script)
        env = dict(os.environ, WORLD_SIZE='2', LOCAL_WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', CUDA_VISIBLE_DEVICES='',
                   MASTER_PORT=str(free_port()), ACCELERATE_USE_CPU='true', GLOO_SOCKET_IFNAME='lo')
        ranks = [interpreters.start(tmp_path/'script.py', path, tmp_path, fastai=False,
                                    env=dict(env, RANK=str(rank), LOCAL_RANK=str(rank))) for rank in range(2)]
        for ended in [rank.wait() for rank in ranks]: assert ended.returncode==0, ended.stderr[-3000:]
        return saved(tmp_path)
    return run

def saved(folder): return [json.loads((folder/f'{rank}.json').read_text()) for rank in range(2)]

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
from accelerate import Accelerator, DataLoaderConfiguration

def loaders():
    accelerator = Accelerator()
    loader = DataLoader(ds, batch_sampler=ds.batches(8, num_workers=2), num_workers=2)
    loader = accelerator.prepare(loader)
    yield 'batches', loader
    yield 'batched', accelerator.prepare(DataLoader(ds.batched(8), batch_size=None, num_workers=2))
    yield 'shuffle', accelerator.prepare(DataLoader(ds, batch_size=8, shuffle=True))
    for name,options in dict(dispatch=dict(dispatch_batches=True), uneven=dict(even_batches=False)).items():
        other = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
        yield name, other.prepare(DataLoader(ds, batch_sampler=ds.batches(8)))
        yield name+' batched', other.prepare(DataLoader(ds.batched(8), batch_size=None))

if __name__=='__main__':
    warnings.simplefilter('error', UserWarning)
    epochs = {name:[[i for x,_ in loader for i in numbers(x)] for _ in range(2)] for name,loader in loaders()}
    accelerator = Accelerator()
    errors = [error(lambda: accelerator.prepare(DataLoader(ds.batched(8)))),
              error(lambda: accelerator.prepare(DataLoader(ds, batch_sampler=ds.batches(8, rank=0, world_size=1))))]
    save(accelerator.process_index, errors=errors, **epochs)
'''
def test_accelerate(two_ranks):
    "`prepare` divides no loader a second time; a loader with torch's sampler it divides, and fills the last batches"
    pytest.importorskip('accelerate')
    a,b = two_ranks(ACCELERATE)
    errors = a.pop('errors')
    assert 'batches of 1 of them: DataLoader(ds.batched(…), batch_size=None)' in errors[0]
    assert 'divided among 1 ranks, and accelerate has 2' in errors[1]
    for name in a:
        if name!='errors': each_once(a[name], b[name], twice=7 if name=='shuffle' else 1)

# --- torchdata

def loader_of(ds, kind, workers, seed=None, bs=8):
    stateful = pytest.importorskip('torchdata.stateful_dataloader')
    if kind=='batches': source = dict(dataset=ds, batch_sampler=ds.batches(bs, num_workers=workers, seed=seed))
    else: source = dict(dataset=ds.batched(bs, seed=seed), batch_size=None)
    return stateful.StatefulDataLoader(**source, num_workers=workers)

def numbers(x): return [int(i) for i in x.flatten()]

@pytest.mark.parametrize('seed', [None,3])
@pytest.mark.parametrize('workers', [0,2])
@pytest.mark.parametrize('kind', ['batches','batched'])
def test_an_epoch_continues_where_its_state_was_saved(path, kind, workers, seed):
    ds = RemoteDataset(ShardStore(path)).to_tuple('x.f4', 'y.f4')
    for stop in (0,1,5,26):
        first = loader_of(ds, kind, workers, seed)
        batches = iter(first)
        before = [numbers(next(batches)[0]) for _ in range(stop)]
        state = json.loads(json.dumps(first.state_dict()))
        rest = [numbers(x) for x,_ in batches]
        again = loader_of(RemoteDataset(ShardStore(path)).to_tuple('x.f4', 'y.f4'), kind, workers, seed)
        torch.manual_seed(stop)
        again.load_state_dict(state)
        assert [numbers(x) for x,_ in again]==rest and sorted(sum(before+rest, []))==list(range(N))
        if stop==1: assert sorted(i for x,_ in again for i in numbers(x))==list(range(N))   # the next epoch

def test_a_state_of_other_batches(path):
    ds = RemoteDataset(ShardStore(path)).to_tuple('x.f4', 'y.f4')
    loader = loader_of(ds, 'batches', 0)
    next(iter(loader))
    for other,message in ((loader_of(ds, 'batches', 0, bs=9), 'bs=8, and cannot be continued with bs=9'),
                          (loader_of(ds[:100], 'batches', 0), 'samples=201, .* with samples=100')):
        other.load_state_dict(loader.state_dict())
        with pytest.raises(ValueError, match=message): next(iter(other))

TORCHDATA = '''
from torchdata.stateful_dataloader import StatefulDataLoader

def loader_of(kind):
    if kind=='batches': return StatefulDataLoader(ds, batch_sampler=ds.batches(8))
    return StatefulDataLoader(ds.batched(8), batch_size=None)

def epochs(kind):
    for epoch in range(2):
        loader = loader_of(kind)
        (loader.batch_sampler or loader.dataset).set_epoch(epoch)
        seen,batches = [],iter(loader)
        for _ in range(5): seen += numbers(next(batches)[0])
        state = loader.state_dict()
        loader = loader_of(kind)   # as in a new process
        loader.load_state_dict(state)
        yield seen+[i for x,_ in loader for i in numbers(x)]

if __name__=='__main__': save(os.environ['RANK'], **{kind:[*epochs(kind)] for kind in ('batches','batched')})
'''
def test_stateful_loaders_of_two_ranks(two_ranks):
    pytest.importorskip('torchdata')
    a,b = two_ranks(TORCHDATA)
    for kind in a: each_once(a[kind], b[kind])
