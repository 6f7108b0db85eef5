"""Does reading samples from Redis cost throughput? `DataLoaders.from_redis` beside stock `ImageDataLoaders.from_folder`

Purpose: one epoch of the training loader over the same JPEG files, the same splits' sizes, the same item transforms
(`RandomResizedCrop(224)` and a flip, both in the workers), batches of 64, two workers. The contenders take turns in
one run, in an order that is reversed every round, so that ratios hold on a machine with other work.

Command: python tests/bench/loader.py [FOLDER] [--n 640] [--rounds 5] [--size 350]
         without FOLDER it makes photo-like JPEGs; FOLDER has a sub-folder a class, or file names that begin `CLASS_`

Result:  on 330 ImageNet photographs, each read six times (results/loader.json: two cores, 5 rounds), RemoteDL gave 1.88 times the samples per CPU second of
         stock fastai reading files from the page cache, and 1.87 times the samples/s; the first batch came in 0.74 of the time, with 1.09 times the private
         memory a worker. Shrunk to 256 pixels on the way in, the same photographs gave 2.9 times the samples per CPU second. (Here memory is read at every
         batch, which costs each a little; peers.py has threads, and everybody else.)

Reason:  of a JPEG the region of the crop alone is decoded, PyTorch resizes it, batches are filled in place; see nbs/decisions/0015 and 0016. The server's
         CPU time, which is counted, is a fiftieth.

Tried:   glibc told to keep freed memory (`mallopt`) in the workers: expected a tenth, since it gives that where one process
         does all; it gave 1% and cost 12 MB a worker. Not kept.
"""
import argparse, gc, json, multiprocessing, os, resource, statistics, tempfile, time
from pathlib import Path

import numpy as np
import torch
from fastai.data.core import DataLoaders
from fastai.vision.augment import FlipItem, RandomResizedCrop
from fastai.vision.data import ImageDataLoaders
from PIL import Image

import fastai_remote.block   # gives `DataLoaders` its `from_redis`
from fastai_remote import image_samples, redis_server, shrink, to_redis
from fastai_remote.core import size_str
from machine import about

STOCK,OURS,SMALL = 'stock fastai, files','RemoteDL, Redis','RemoteDL, Redis, shrink(256)'
UNITS = dict(samples_s='samples/s', samples_cpu_s='samples/CPU s', first_s='first batch, s', worker_mb='worker private, MB')

def make_images(folder, n, size):
    "Write `n` photo-like JPEGs of four classes: clouds of noise in five octaves and grain, shorter side about `size`"
    rng = np.random.default_rng(0)
    for i in range(n):
        w,h = int(size*rng.uniform(1.2, 1.5)),int(size*rng.uniform(.95, 1.1))
        a = rng.uniform(60, 190, 3)+rng.normal(0, 7, (h,w,1))
        for k in (3, 7, 20, 60, 180):
            o = Image.fromarray(rng.integers(0, 256, (k*3//4,k,3), np.uint8)).resize((w,h), Image.Resampling.BICUBIC)
            a = a+(np.asarray(o, float)-128)*1.2/k**.3
        (d:=folder/f'class{i%4}').mkdir(parents=True, exist_ok=True)
        Image.fromarray(a.clip(0, 255).astype(np.uint8)).save(d/f'{i:05}.jpg', quality=90)

def link_images(folder, to, n):
    "Make `n` links in `to`, a sub-folder a class, to the images of `folder`, over again where there are fewer; how many there are"
    paths = list(image_samples(folder).paths)
    for i in range(n):
        p = paths[i%len(paths)].resolve()
        cls = p.parent.name if p.parent!=Path(folder).resolve() else p.stem.split('_')[0]
        (d:=to/cls).mkdir(parents=True, exist_ok=True)
        (d/f'{i:05}{p.suffix}').symlink_to(p)
    return len(paths)

def private_mb(pid):
    "Memory that process `pid` shares with no other; None if it has gone"
    try: ls = Path(f'/proc/{pid}/smaps_rollup').read_text().splitlines()
    except OSError: return None
    return sum(int(l.split()[1]) for l in ls if l.startswith('Private_'))/1000 or None

def cpu_seconds(pid):
    "Of this process, of its children that have ended, and of the server `pid`"
    us = [resource.getrusage(w) for w in (resource.RUSAGE_SELF,resource.RUSAGE_CHILDREN)]
    server = sum(map(int, Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[11:13]))/os.sysconf('SC_CLK_TCK')
    return sum(u.ru_utime+u.ru_stime for u in us)+server

def epoch(dl, server):
    "One epoch of `dl`, as `{measure: value}`"
    gc.collect()
    n,first,mem = 0,None,{}
    cpu,t0 = cpu_seconds(server),time.perf_counter()
    for b in dl:
        n,first = n+len(b[0]),first or time.perf_counter()-t0
        for p in multiprocessing.active_children():
            if m:=private_mb(p.pid): mem[p.pid] = max(m, mem.get(p.pid, 0))
    wall = time.perf_counter()-t0
    while multiprocessing.active_children(): time.sleep(.01)   # their CPU time counts when they are reaped
    return dict(samples_s=n/wall, samples_cpu_s=n/(cpu_seconds(server)-cpu), first_s=first, worker_mb=statistics.mean(mem.values()) if mem else 0.)

def run(
    folder=None, # Images; default: make some
    n:int=640, # How many, by using them again if need be
    rounds:int=5, # Timed epochs of each contender
    size:int=350, # Shorter side of images that are made, pixels
    name:str=None, # What to call the data
)->dict: # What goes into the results file
    "Time the contenders in turns"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)   # threads that wait for a core spin, which is noise here
    try: return _run(folder, n, rounds, size, name)
    finally: torch.set_num_threads(threads)

def _run(folder, n, rounds, size, name):
    with tempfile.TemporaryDirectory(prefix='fr-bench-') as d, redis_server(port=-1) as s:
        if folder is None: make_images(Path(d)/'made', n, size)
        images,have = Path(d)/'images',link_images(folder or Path(d)/'made', Path(d)/'images', n)
        kw = dict(valid_pct=.01, seed=0, bs=min(64, n//2), num_workers=2, device='cpu', item_tfms=[RandomResizedCrop(224),FlipItem()])
        dls = {STOCK:ImageDataLoaders.from_folder(images, **kw)}
        sizes = {STOCK:sum(p.stat().st_size for p in images.rglob('*') if p.is_file())/n}
        for k,ds,fn in ((OURS,'asis',None),(SMALL,'small',shrink(256))):
            rep = to_redis(image_samples(images, label=lambda p: p.parent.name), s.url, ds, fn=fn, num_workers=1, progress=False)
            if rep.failed: raise ValueError(f'stock fastai would stop at these: {rep}')
            dls[k],sizes[k] = DataLoaders.from_redis(s.url, ds, normalize=False, **kw),rep.nbytes/n
        for o in dls.values(): epoch(o.train, s.proc.pid)
        res = {k:[] for k in dls}
        for r in range(rounds):
            for k in list(dls)[::1 if r%2 else -1]: res[k].append(epoch(dls[k].train, s.proc.pid))
        where = about(s.url, 'torch fastai pillow redis numpy')
    def spread(vs): return dict(median=round(statistics.median(vs), 3), min=round(min(vs), 3), max=round(max(vs), 3))
    out = {k:{'bytes_a_sample':round(sizes[k]), **{u:spread([e[u] for e in es]) for u in UNITS}} for k,es in res.items()}
    ratios = {k:{u:round(statistics.median(e[u]/e0[u] if e0[u] else 1. for e,e0 in zip(es, res[STOCK])), 3) for u in UNITS} for k,es in res.items()}
    return dict(data=name or f"{Path(folder).name if folder else 'made'}, {have} JPEGs", n=n, rounds=rounds, contenders=out, ratios_to_stock=ratios, **where)

def table(res):
    "`res` for reading: medians, spreads, and ratios to stock"
    yield f"{res['data']}: {res['n']} samples, {res['rounds']} rounds; median (min to max) and ratio to stock, the median over the rounds"
    for k,o in res['contenders'].items():
        yield f"\n{k}, {size_str(o['bytes_a_sample'])} a sample"
        for u,name in UNITS.items(): yield f"  {name:20}{o[u]['median']:9.2f}  ({o[u]['min']:.2f} to {o[u]['max']:.2f})   x {res['ratios_to_stock'][k][u]:.2f}"

if __name__=='__main__':
    ap = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    ap.add_argument('folder', nargs='?', help='images; default: make some')
    ap.add_argument('--n', type=int, default=1980, help='samples')
    ap.add_argument('--rounds', type=int, default=5, help='timed epochs of each')
    ap.add_argument('--size', type=int, default=350, help='shorter side of images that are made')
    ap.add_argument('--name', help='what the results call the data')
    ap.add_argument('--out', default=Path(__file__).parent/'results'/'loader.json', help='results file; an empty one writes none')
    a = ap.parse_args()
    res = run(a.folder, a.n, a.rounds, a.size, a.name)
    res['command'] = f"python tests/bench/loader.py{' FOLDER' if a.folder else ''} --n {a.n} --rounds {a.rounds}" + ('' if a.folder else f' --size {a.size}')
    print('\n'.join(table(res)))
    if a.out: Path(a.out).write_text(json.dumps(res, indent=1)+'\n')
