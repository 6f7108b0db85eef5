"Starting: what an import adds to fastai's, and a first batch to a worker's start. Ratios of CPU time within one run, which other work on the machine changes little"
import subprocess, sys, time

import pytest
import torch
from fastai.data.block import CategoryBlock, DataBlock
from fastai.vision.all import DataLoaders, ImageBlock, PILImage, Resize
from torch.utils.data import DataLoader, Dataset

import fastai_remote.block   # gives `DataLoaders` its `from_redis`
from fastai_remote import RemoteDataset
from test_memory import Numbers, cpu_time, million, ours

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
    "Seconds of CPU time to the first batch of an epoch, here and in the worker, which makes no other batch until it is asked for one"
    started = cpu_time()
    batches = iter(dl)
    next(batches)
    return cpu_time()-started

def ratio(a, b, rounds=9):
    "How much more the first batch of `a` takes than that of `b`: the least times of each, by turns"
    times = [(first(a),first(b)) for _ in range(rounds)]
    return min(t for t,_ in times)/min(t for _,t in times)

ONE = dict(num_workers=1, prefetch_factor=1) # for torch's loaders

def one_worker(dl):
    "fastai's loader `dl` with `ONE`, which it does not take as arguments"
    dl.fake_l.num_workers = dl.fake_l.prefetch_factor = 1
    return dl

def test_import_adds_little_to_fastai():
    code = 'import time; t=time.process_time(); from fastai.vision.all import *; u=time.process_time(); from fastai_remote import *; print((time.process_time()-u)/(u-t))'
    r = float(subprocess.run([sys.executable, '-W', 'ignore', '-c', code], check=True, capture_output=True, text=True).stdout)
    assert r<.3, r   # of CPU time; it is a twentieth

def test_names_alone_import_nothing_heavy():
    code = 'import sys, fastai_remote; assert not {"torch","fastai","redis","numpy"} & sys.modules.keys(), sorted(sys.modules)'
    subprocess.run([sys.executable, '-c', code], check=True)

def test_first_batch_of_bytes_against_a_worker_start(redis_pics):
    ds,stock = RemoteDataset(redis_pics).to_tuple('jpg','cls'),DataLoader(Trivial(), 64, shuffle=True, **ONE)
    dl = DataLoader(ds.batched(16), batch_size=None, **ONE)
    assert (r:=ratio(dl, stock))<1.5, r

def test_first_batch_of_pictures_against_stock_fastai(redis_pics):
    "The same pictures out of memory, decoded by the same transforms"
    files,kw = redis_pics.get_many(range(len(redis_pics)), 'jpg')['jpg'],dict(bs=16, num_workers=1, device='cpu')
    ours = DataLoaders.from_redis(redis_pics.link.url, 'pics', normalize=False, item_tfms=Resize(64), **kw).train
    block = DataBlock((ImageBlock, CategoryBlock), getters=[lambda i: PILImage.create(files[i]), lambda i: i%3], item_tfms=Resize(64))
    stock = block.dataloaders(list(range(len(files))), **kw).train
    assert (r:=ratio(one_worker(ours), one_worker(stock)))<1.5, r

@pytest.mark.parametrize('make', [lambda n: one_worker(ours(n)[0].train), lambda n: DataLoader(RemoteDataset(Numbers(n)).batched(64, collate=list), batch_size=None, **ONE)], ids=['RemoteDL','RemoteDataset'])
def test_first_batch_does_not_grow_with_n(make):
    few,many = make(1000),make(50*million)
    assert (r:=ratio(many, few))<1.5, r
