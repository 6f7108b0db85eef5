"Starting: what an import adds to fastai's, and a first batch to a worker's start. Ratios within one run, no absolute times"
import statistics, subprocess, sys, time

import pytest
import torch
from fastai.data.block import CategoryBlock, DataBlock
from fastai.vision.all import DataLoaders, ImageBlock, PILImage, Resize
from torch.utils.data import DataLoader, Dataset

import fastai_remote.block   # gives `DataLoaders` its `from_redis`
from fastai_remote import RemoteDataset
from test_memory import Numbers, million, ours

class Trivial(Dataset):
    "Nothing to read: its first batch is a worker's start"
    def __len__(self): return 1000
    def __getitem__(self, i): return torch.zeros(1)

@pytest.fixture(autouse=True)
def one_thread():
    "Threads of torch that wait for a core spin"
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)

def first(dl):
    "Seconds to the first batch of an epoch"
    t = time.perf_counter()
    it = iter(dl)
    next(it)
    return time.perf_counter()-t

def ratio(a, b, rounds=9):
    "How much longer `a()` takes than `b()`, by turns: of the shortest times, or the median of ratios, whichever other work on the machine disturbed less"
    ts = [(a(),b()) for _ in range(rounds)]
    return min(min(t for t,_ in ts)/min(t for _,t in ts), statistics.median(s/t for s,t in ts))

def test_import_adds_little_to_fastai():
    code = 'import time; t=time.process_time(); from fastai.vision.all import *; u=time.process_time(); from fastai_remote import *; print((time.process_time()-u)/(u-t))'
    r = float(subprocess.run([sys.executable, '-W', 'ignore', '-c', code], check=True, capture_output=True, text=True).stdout)
    assert r<.3, r   # of CPU time; it is a twentieth

def test_names_alone_import_nothing_heavy():
    code = 'import sys, fastai_remote; assert not {"torch","fastai","redis","numpy"} & sys.modules.keys(), sorted(sys.modules)'
    subprocess.run([sys.executable, '-c', code], check=True)

def test_first_batch_of_bytes_against_a_worker_start(redis_pics):
    ds,stock = RemoteDataset(redis_pics).to_tuple('jpg','cls'),DataLoader(Trivial(), 64, shuffle=True, num_workers=2)
    dl = DataLoader(ds.batched(16), batch_size=None, num_workers=2)
    assert (r:=ratio(lambda: first(dl), lambda: first(stock)))<1.5, r

def test_first_batch_of_pictures_against_stock_fastai(redis_pics):
    "The same pictures out of memory, decoded by the same transforms"
    files,kw = redis_pics.get_many(range(len(redis_pics)), 'jpg')['jpg'],dict(bs=16, num_workers=2, device='cpu')
    ours = DataLoaders.from_redis(redis_pics.link.url, 'pics', normalize=False, item_tfms=Resize(64), **kw).train
    block = DataBlock((ImageBlock, CategoryBlock), getters=[lambda i: PILImage.create(files[i]), lambda i: i%3], item_tfms=Resize(64))
    stock = block.dataloaders(list(range(len(files))), **kw).train
    assert (r:=ratio(lambda: first(ours), lambda: first(stock)))<1.5, r

@pytest.mark.parametrize('make', [lambda n: ours(n)[0].train, lambda n: DataLoader(RemoteDataset(Numbers(n)).batched(64, collate=list), batch_size=None, num_workers=2)], ids=['RemoteDL','RemoteDataset'])
def test_first_batch_does_not_grow_with_n(make):
    few,many = make(1000),make(50*million)
    assert (r:=ratio(lambda: first(many), lambda: first(few)))<1.5, r
