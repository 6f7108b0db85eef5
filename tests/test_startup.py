"""Starting: what an import adds to fastai's, and what comes before the first batch

Work is counted in lines of Python that run, and in bytes that are allocated at once: neither depends on the machine."""
import subprocess, sys, threading, tracemalloc

import pytest
from fastai.vision.all import CategoryBlock, DataBlock, ImageBlock, PILImage, RandomSplitter, Resize
from torch.utils.data import DataLoader

import fastai_remote as fr
from test_memory import MB, million, Numbers, ShardNumbers

class Work:
    "Counts the lines of Python that run in a block, in all threads, and the most bytes that are allocated then"
    def __enter__(self):
        self.lines,self.before = 0,(sys.gettrace(),threading.gettrace())   # of a measurement of coverage, for example
        tracemalloc.start()
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        return self
    def trace(self, frame, event, arg):
        self.lines += event=='line'
        return self.trace
    def __exit__(self, *args):
        sys.settrace(self.before[0])
        threading.settrace(self.before[1])
        self.peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

def begin(loaders):
    "Make the first batch of each; imports things, and computes what is computed once"
    for loader in loaders: next(iter(loader))

def work(start):
    "The work of `start()`, which returns loaders, and of the first batch of each"
    with Work() as done: begin(start())
    return done

def of_fastai(store):
    block = DataBlock((fr.RedisBlock, fr.RedisBlock('cls')), get_items=fr.get_remote_items, item_tfms=Resize(16),
                      splitter=fr.RandomStoreSplitter(.2))
    return block.dataloaders(store, bs=64, num_workers=0)

def of_torch(store):
    ds = fr.RemoteDataset(store).to_tuple('png', 'cls')
    return [DataLoader(ds, batch_sampler=ds.batches(64), collate_fn=list),
            DataLoader(ds.batched(64, collate=list), batch_size=None),
            DataLoader(ds.shuffle(), batch_size=64, collate_fn=list)]

@pytest.mark.parametrize('make', [pytest.param(of_fastai, marks=pytest.mark.slow), of_torch])
@pytest.mark.parametrize('store', [Numbers, ShardNumbers])
def test_set_up_and_first_batches_do_not_grow_with_n(make, store):
    "Shards have a table, of which some columns are computed: 8 bytes a shard each"
    few,many = store(million),store(50*million)
    begin(make(few))
    a,b = (work(lambda: make(o)) for o in (few,many))
    assert b.lines<1.2*a.lines and b.peak<20*MB, (a.lines,b.lines,b.peak)

@pytest.mark.slow
def test_a_first_batch_is_less_work_than_that_of_stock_fastai():
    "The same pictures out of memory, decoded by the same transforms"
    png = Numbers(1).png
    def stock():
        getters = [lambda i: PILImage.create(png), lambda i: 'abcdefgh'[i%8]]
        block = DataBlock((ImageBlock, CategoryBlock), getters=getters, splitter=RandomSplitter(), item_tfms=Resize(16))
        return block.dataloaders(list(range(100)), bs=64, num_workers=0)
    for loaders in of_fastai(Numbers(100)),stock(): begin(loaders)
    assert work(lambda: of_fastai(Numbers(100))).lines<work(stock).lines

@pytest.mark.slow
def test_import_adds_little_to_fastai(interpreters):
    "Only packages that storage needs, and no clients of object storage, tables or engines"
    code = '''if True:
    import sys
    from fastai.vision.all import *
    before = set(sys.modules)
    from fastai_remote import *
    added = set(sys.modules)-before
    print(len(added), *{name.split('.')[0] for name in added})'''
    n,*packages = interpreters.run(code, check=True).stdout.split()
    storage = {'cryptography','fsspec','hiredis','orjson','redis','xxhash','zlib_ng','zstandard'}
    assert 'fastai_remote' in packages and set(packages)<={'fastai_remote','fastai','PIL',*storage} and int(n)<300, (n,packages)

def test_names_alone_import_nothing_heavy():
    code = 'import sys, fastai_remote; assert not {"torch","fastai","redis","numpy"}&sys.modules.keys()'
    subprocess.run([sys.executable, '-c', code], check=True)
