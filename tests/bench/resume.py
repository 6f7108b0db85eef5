"""What does it cost to be able to go on, and how long does it take to go on?

Purpose: (1) photographs with `RandomResizedCrop(224)`, and digits without transforms, from memory, with and without
         `seed=`: samples per CPU second, in rounds whose order is reversed each time. (2) The first batch of an epoch
         of fifty million synthetic samples in shards, from its beginning and at nine tenths, with two workers. (3) A
         model of so many bytes is saved: how long the training is held, and how long writing takes beside it.

Command: python tests/bench/resume.py [FOLDER] [--rounds 15] [--model 1000]
         FOLDER has photographs; without it, the benchmark makes some. The model has so many MB.

Result:  30 rounds, 330 ImageNet photographs, two cores without other work (results/resume.json; the intervals are of
         the middle 80% of the rounds): photographs came 1.01 times as fast with a seed (0.89 to 1.13), digits 1.02
         times (0.89 to 1.24), so rounds differ by more than a seed costs. The first batch came after 0.12 s, at the
         beginning of fifty million samples and at nine tenths. A model of 1,000 MB held the training for 1.5 s, of
         which a copy takes 0.7 s; writing took 4.7 s.

Reason:  where transforms of a sample draw random numbers, three generators are seeded for it, or `random` alone where
         batches are built as a whole. Samples without such transforms are not seeded. The order of an epoch is
         computed, so nothing before the place is visited. The training waits while weights are copied, and a thread
         writes the copy.
"""
import argparse, gc, json, statistics, sys, tempfile, time
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from fastai.vision.all import Callback, DataLoaders, Learner, nn, RandomResizedCrop, SGD
from PIL import Image

here = Path(__file__).parent
sys.path[:0] = [str(here.parent)]
import fastai_remote.block   # adds `from_store` to `DataLoaders`
from fastai_remote import Resume
from fastai_remote.ingest.stores import MemoryStore
from in_memory import in_memory
from loader import make_images
from machine import about
from shards import cpu_seconds
from test_memory import of_store, ShardNumbers

# --- With a seed, and without

def photographs(
    folder, # A folder of JPEGs
    n=512 # Number of samples
):
    "A store in memory with the JPEGs in `folder`, repeated up to `n` of them"
    files = sorted(path for path in Path(folder).rglob('*') if path.suffix.lower() in ('.jpg','.jpeg'))
    contents = [path.read_bytes() for path in files[:n]]
    jpgs = [contents[i%len(contents)] for i in range(n)]
    return MemoryStore({'jpg':jpgs, 'cls':(np.arange(n)%4).astype('u1')}, 'photographs', vocab={'cls':list('abcd')})

def digits(n=8192):
    "A store in memory with small grey PNGs"
    def png(i):
        pixels = np.random.default_rng(i).integers(0, 255, (28,28), dtype=np.uint8)
        Image.fromarray(pixels*(pixels>200)).save(content:=BytesIO(), 'PNG')
        return content.getvalue()
    return MemoryStore({'png':[png(i%256) for i in range(n)], 'cls':(np.arange(n)%4).astype('u1')}, 'digits',
                       vocab={'cls':list('abcd')})

def samples_per_cpu_second(dl):
    gc.collect()
    before,n = cpu_seconds(),0
    for x,y in dl: n += len(y)
    return n/(cpu_seconds()-before)

def with_and_without(store, rounds, **kwargs):
    "`{median, low, high}` of the ratio with a seed over without, one for each round; the interval is of the middle 80%"
    def train(seed): return DataLoaders.from_store(store, bs=64, num_workers=0, threads=2, seed=seed, **kwargs).train
    loaders = [train(0),train(None)]
    for dl in loaders: samples_per_cpu_second(dl)
    ratios = []
    for k in range(rounds):
        turn = loaders[::-1] if k%2 else loaders
        speed = {id(dl):samples_per_cpu_second(dl) for dl in turn}
        ratios.append(speed[id(loaders[0])]/speed[id(loaders[1])])
    deciles = statistics.quantiles(ratios, n=10)
    return dict(median=round(statistics.median(ratios), 4), low=round(deciles[0], 4), high=round(deciles[-1], 4))

# --- Going on

def first_batch(millions, share):
    "Seconds to the first batch of an epoch of so many samples that begins at this share of its batches"
    dl = of_store(ShardNumbers(millions*10**6), seed=0)[0].train
    dl.set_epoch(0, start=int(share*len(dl)))
    started = time.perf_counter()
    next(batches:=iter(dl))
    seconds = time.perf_counter()-started
    batches.close()
    return seconds

def medians(f, cases, rounds=5):
    "`{case: median of f(*case)}`, measured in turn"
    found = {case:[] for case in cases}
    for _ in range(rounds):
        for case in cases: found[case].append(f(*case))
    return {case:round(statistics.median(values), 3) for case,values in found.items()}

# --- Saving

class Around(Callback):
    "Measures how long `Resume` holds the training after a batch"
    order = 999
    def __init__(self): self.held,self.written,self.end = [],[],_End()
    def after_batch(self):
        self.end.before,self.end.writing = time.perf_counter(),self.learn.resume.writing

class _End(Callback):
    order = 1001
    held,written = (),()
    def after_batch(self):
        now,writing = time.perf_counter(),self.learn.resume.writing
        if writing is self.writing: return
        writing.result()
        self.held,self.written = (*self.held, now-self.before),(*self.written, time.perf_counter()-self.before)

def saving(megabytes):
    "Seconds that the training waits for a state and for a mere copy, and that writing takes, for a model of so many MB"
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.line,self.table = nn.Linear(1, 1),nn.Parameter(torch.ones(megabytes, 250_000))
        def forward(self, x): return self.line(x[:,None])+self.table[0,0]
    store = in_memory(range(40), lambda i: {'x.f4':float(i), 'y.f4':float(i)})
    with tempfile.TemporaryDirectory() as folder:
        dls = DataLoaders.from_store(store, x='x.f4', y='y.f4', bs=4, num_workers=0, device='cpu')
        around = Around()
        learn = Learner(dls, Large(), loss_func=nn.MSELoss(), opt_func=partial(SGD, mom=0.),
                        cbs=[around, around.end, Resume(Path(folder)/'run.ckpt', every=3)])
        with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-6)
        started = time.perf_counter()
        copies = [p.detach().clone() for p in learn.model.parameters()]
        copied = time.perf_counter()-started
        size = (Path(folder)/'run.ckpt').stat().st_size
        del copies
    return dict(megabytes=round(size/1e6), held_s=round(statistics.median(around.end.held), 3),
                copy_s=round(copied, 3), written_s=round(statistics.median(around.end.written), 3))

def run(folder, rounds, megabytes):
    "Run all measurements and write the result file"
    with tempfile.TemporaryDirectory() as made:
        if not folder: make_images(Path(folder := made), 64, 400)
        pictures = photographs(folder)
    seeds = {'photographs':with_and_without(pictures, rounds, item_tfms=RandomResizedCrop(224)),
             'digits':with_and_without(digits(), rounds)}
    cases = [(millions,share) for millions in (1,50) for share in (0.,.9)]
    first = [dict(millions=m, share=share, seconds=s) for (m,share),s in medians(first_batch, cases).items()]
    result = dict(command='python tests/bench/resume.py', **about(None, 'fastai torch numpy pillow'), rounds=rounds,
                  seed=seeds, first_batch=first, saving=saving(megabytes))
    print(json.dumps({k:result[k] for k in ('seed','first_batch','saving')}, indent=1))
    (here/'results/resume.json').write_text(json.dumps(result, indent=1)+'\n')

if __name__=='__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('folder', nargs='?')
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--model', type=int, default=1000, help='MB')
    args = parser.parse_args()
    torch.set_num_threads(1)
    run(args.folder, args.rounds, args.model)
