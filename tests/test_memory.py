"The promise: fifty million samples cost what one million cost. Measured from /proc/*/smaps_rollup, in a process of its own"
import gc, io, json, os, pickle, subprocess, sys, tempfile, time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastai_remote.core import Manifest, Store

pytestmark = pytest.mark.skipif(sys.platform!='linux', reason='needs /proc')
MB,million = 1_000_000,1_000_000

class Numbers(Store):
    "Makes its bytes from the number: one picture, and a label"
    def __init__(self, n):
        Image.fromarray(np.zeros((16,16,3), np.uint8)).save(f:=io.BytesIO(), 'PNG')
        self.png = f.getvalue()
        self.manifest = Manifest('numbers', n, {'png':{'codec':'png','dtype':None}, 'cls':{'codec':'cls','dtype':'u1'}}, vocab={'cls':list('abcdefgh')})
    def _read(self, idxs, fields): return {f:[self.png]*len(idxs) if f=='png' else (idxs%8).astype(np.uint8) for f in fields}

def smaps(pid, what): return 1024*sum(int(l.split()[1]) for l in Path(f'/proc/{pid}/smaps_rollup').read_text().splitlines() if l.startswith(what))
def private(pid):
    "Memory of a worker that it shares with nobody, bytes"
    return smaps(pid, 'Private_')
def own():
    "Memory of this process that is not a file's, bytes: its private memory, whether or not workers share it just now"
    return smaps('self', 'Anonymous')

def children():
    "Processes that this one has forked"
    return [int(p) for t in os.listdir('/proc/self/task') for p in Path(f'/proc/self/task/{t}/children').read_text().split()]

class clock:
    def __enter__(self): self.t = time.perf_counter(); return self
    def __exit__(self, *a): self.t = time.perf_counter()-self.t

def ours(n):
    "`DataLoaders` of a store of `n` samples"
    from fastai.vision.all import DataBlock
    from fastai_remote import RandomStoreSplitter, RedisBlock, get_remote_items
    block = DataBlock((RedisBlock, RedisBlock('cls')), get_items=get_remote_items, splitter=RandomStoreSplitter(0.2))
    return block.dataloaders(Numbers(n), bs=64, num_workers=2), get_remote_items(Numbers(n))

def measure(n, batches=200, loaders=ours):
    "A working day of `n` samples in a `DataLoaders` with two workers: seconds and bytes"
    import fastai.vision.all as fv
    def day(n, batches):
        with clock() as setup: dls,items = loaders(n)
        with clock() as start: next(it:=iter(dls.train))
        seen = {}
        for _ in range(batches):
            next(it)
            for p in children(): seen.setdefault(p, []).append(private(p))
        with clock() as valid: next(iter(dls.valid))
        next(iter(dls.test_dl(items)))
        learn = fv.Learner(dls, fv.nn.Sequential(fv.nn.Flatten(), fv.nn.Linear(3*16*16, 8)), loss_func=fv.CrossEntropyLossFlat(), path=tempfile.mkdtemp())
        learn.export()
        gc.collect()
        return dict(own=own(), setup=setup.t, start=start.t, valid=valid.t, workers=[max(o) for o in seen.values()], growth=[max(o)-o[0] for o in seen.values()],
                    pickle=len(pickle.dumps(dls)), export=(learn.path/'export.pkl').stat().st_size)
    day(20_000, batches)   # imports, thread pools and the allocator's reserve for batches are not the data's
    gc.collect()
    before = own()
    res = day(n, batches)
    return dict(n=n, parent=res.pop('own')-before, **res)   # taken while the loaders live

@pytest.fixture(scope='module')
def figures():
    def run(n): return json.loads(subprocess.run([sys.executable, '-W', 'ignore', __file__, str(n)], check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    return {n:run(n*million) for n in (1,50)}

def test_parent_grows_by_less_than_30_MB(figures): assert figures[50]['parent']<30*MB, figures
def test_workers_grow_by_less_than_20_MB(figures): assert len(figures[50]['growth'])==2 and max(figures[50]['growth'])<20*MB, figures
def test_set_up_and_epoch_start_take_less_than_2_s(figures): assert sum(figures[50][k] for k in ('setup','start','valid'))<2, figures
def test_pickles_are_under_1_MB(figures): assert max(figures[50]['pickle'], figures[50]['export'])<MB, figures
def test_a_million_costs_the_same(figures):
    a,b = figures[1],figures[50]
    assert abs(b['parent']-a['parent'])<15*MB, figures
    assert abs(max(b['workers'])-max(a['workers']))<8*MB, figures
    assert b['pickle']-a['pickle']<1000, figures

if __name__=='__main__': print(json.dumps(measure(int(sys.argv[1]))))
