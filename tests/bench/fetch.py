"""How fast do bytes come out of Redis, and how many batches ahead should a loader ask?

Purpose: a pass over values of 2 KB without decoding, beside `redis-benchmark -P 64` on the same values: `get_many` in batches of
64 and 256, with checksums and without, over TCP and a unix socket, in one process and in two, and `RemoteDataset.batched` in two
workers. Then `RemoteDL` with `prefetch` 0, 1, 2 and 4, over loopback and through a proxy that answers 1 and 20 ms later, for JPEGs
of photographs (decoded, cropped to 224) and for small PNGs. The contenders take turns, in an order that is reversed every round.

Command: python tests/bench/fetch.py [--rounds 5] [--n 40000] [--images 256]
         redis-benchmark is looked for on the PATH, or where REDIS_BENCHMARK says; without it that row is left out

Result:  on a machine with much other work (results/fetch.json: two cores, 3 rounds), in batches of 256 over TCP, `get_many` gave 0.69
         times the samples/s of redis-benchmark without checksums and 0.42 with them; per CPU second, the server's included, 0.91 and
         0.54; in batches of 64, 0.53 and 0.29, and 0.80 and 0.42. Two processes with checksums gave 0.47, and `RemoteDataset` in two
         workers 0.30. `prefetch=0` gave 0.68 to 0.95 times the samples/s of 1 for photographs, whatever the delay; 2 was within noise
         of 1. For PNGs of 28x28, 4 gave 1.26 times as much with answers 20 ms late; within 1 ms the rows contradict each other.

Reason:  redis-benchmark throws away what it reads, and packs its requests once. Of the 260 us of our CPU time that a checked batch of
         64 takes, its checksums take 40 us, asking for them about 85, and 131 KB out of the socket into bytes, 47. A worker's batch is
         pickled and crosses a pipe to the main process, which costs some 400 us more. A batch of photographs takes longer to decode than any of
         these delays, so one ahead hides them; only small samples and a far server want more.
"""
import argparse, asyncio, json, multiprocessing, os, re, shutil, statistics, subprocess, sys, tempfile, time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from fastai.data.core import DataLoaders
from fastai.vision.augment import RandomResizedCrop
from PIL import Image
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))
import fastai_remote.block   # gives `DataLoaders` its `from_redis`
from fastai_remote import RedisStore, RemoteDataset, redis_server, to_redis
from faultproxy import FaultProxy
from loader import cpu_seconds, make_images
from machine import about

SIZE,DEPTHS,DELAYS = 2048,(0,1,2,4),(0,.001,.02)
MGET,RD = 'get_many','RemoteDataset, 2 workers'

class Late(FaultProxy):
    "A proxy whose answers come `delay` seconds later, as many at once as there are"
    def __init__(self, up, delay): super().__init__(up); self.delay = delay
    async def _pipe(self, r, w, answer=False):
        if not answer: return await super()._pipe(r, w)
        q,clock = asyncio.Queue(),asyncio.get_running_loop().time
        async def out():
            while o:=await q.get():
                if (late:=o[0]-clock())>0: await asyncio.sleep(late)
                w.write(o[1]); await w.drain()
        task = asyncio.create_task(out())
        try:
            while b:=await r.read(1<<18): q.put_nowait((clock()+self.delay, b))
        except OSError: pass
        finally:
            q.put_nowait(None)
            try: await task
            except OSError: pass
            w.close()

def _serve(up, delay, pipe):
    with Late(up, delay) as p:
        pipe.send(p.port)
        pipe.recv()

def value(i): return {'bin':np.random.default_rng(i).bytes(SIZE)}
def photo(paths, i): return {'jpg':(p:=paths[i%len(paths)]).read_bytes(), 'cls':p.parent.name}
def digit(i): return {'png':Image.fromarray(np.random.default_rng(i).integers(0, 256, (28,28), np.uint8)), 'cls':str(i%10)}

class Raw:
    "Passes over `n` values of 2 KB in server `s`"
    def __init__(self, s, n):
        self.s,self.n,self.bench = s,n,os.environ.get('REDIS_BENCHMARK') or shutil.which('redis-benchmark')
        to_redis(list(range(n)), s.url, 'raw', value, num_workers=1, progress=False)
        self.stores = {k:RedisStore(u, 'raw') for k,u in (('tcp', s.url), ('unix', f'unix://{s.socket}'))}
        p = self.stores['tcp'].link.client.pipeline(transaction=False)
        for i in range(n):   # as redis-benchmark calls them
            p.set(f'key:{i:012}', value(i)['bin'])
            if i%1000==999 or i==n-1: p.execute()

    def cases(self):
        if self.bench:
            for to in self.stores: yield f'redis-benchmark, {to}',lambda to=to: self.benchmark(to)
        for to in self.stores:
            for bs in (64,256):
                for check in (False,True): yield f"{MGET}, {to}, batches of {bs}{', checked' if check else ''}",lambda a=(to, bs, check): self.process(*a)
        for bs in (64,256): yield f'{MGET}, tcp, batches of {bs}, checked, 2 processes',lambda bs=bs: self.processes('tcp', bs, True)
        for bs in (64,256): yield f'{RD}, batches of {bs}',lambda bs=bs: self.dataset(bs)

    def timed(self, f, n):
        "Samples/s of `f()`, by the seconds it returns or else by the clock"
        c,t = cpu_seconds(self.s.proc.pid),time.perf_counter()
        wall = f() or time.perf_counter()-t
        return dict(samples_s=n/wall, samples_cpu_s=n/(cpu_seconds(self.s.proc.pid)-c))

    def benchmark(self, to, n=400_000):
        at = ['-p',str(self.s.port)] if to=='tcp' else ['-s',str(self.s.socket)]
        def go():
            out = subprocess.run([self.bench,*at,*f'-t get -q -P 64 -d {SIZE} -r {self.n} -n {n}'.split()], capture_output=True, text=True, check=True).stdout
            return n/float(re.findall(r'GET: ([\d.]+) requests per second', out)[-1])
        return self.timed(go, n)

    def read(self, to, bs, check, seed=0, share=slice(None)):
        ids = np.random.default_rng(seed).permutation(self.n)[share]
        for k in range(0, len(ids), bs): self.stores[to].get_many(ids[k:k+bs], 'bin', check=check)

    def process(self, *args): return self.timed(lambda: self.read(*args), self.n)
    def processes(self, *args):
        def go():
            ctx = multiprocessing.get_context('fork')
            gate,ps = ctx.Barrier(3),[]
            def work(k): self.read(*args, share=slice(0, 64)); gate.wait(); self.read(*args, share=slice(k, None, 2)); gate.wait()
            for k in range(2): (p:=ctx.Process(target=work, args=(k,))).start(); ps.append(p)
            gate.wait()
            t = time.perf_counter()
            gate.wait()
            wall = time.perf_counter()-t
            for p in ps: p.join()
            return wall
        return self.timed(go, self.n)

    def dataset(self, bs):
        "From the first batch on, for wall time: workers take as long to start as they do for any dataset"
        dl = DataLoader(RemoteDataset(self.stores['tcp']).to_tuple('bin').batched(bs), batch_size=None, num_workers=2)
        def go():
            it = iter(dl)
            next(it)
            n,t = 0,time.perf_counter()
            for b in it: n += len(b[0])
            return (time.perf_counter()-t)*self.n/n
        return self.timed(go, self.n)

def depth_cases(s, folder, images):
    "`(values, delay, prefetch)` and an epoch of each in samples/s; and the proxies"
    make_images(folder, images, 415)
    to_redis(list(range(4*images)), s.url, 'jpg', partial(photo, sorted(folder.rglob('*.jpg'))), num_workers=1, progress=False)
    to_redis(list(range(8*images)), s.url, 'png', digit, num_workers=1, progress=False)
    res,ps = {},[]
    for delay in DELAYS:
        port = s.port
        if delay:
            here,there = multiprocessing.Pipe()
            ps.append(multiprocessing.Process(target=_serve, args=(('127.0.0.1', s.port), delay, there), daemon=True))
            ps[-1].start()
            port = here.recv()
        for nm,tfms in (('jpg', RandomResizedCrop(224)), ('png', None)):
            dl = DataLoaders.from_redis(f'redis://127.0.0.1:{port}', nm, item_tfms=tfms, normalize=False, valid_pct=.01, seed=0, bs=64, num_workers=2, device='cpu').train
            for k in DEPTHS: res[nm,delay,k] = dl.new(prefetch=k)
    return res,ps

def epoch(dl):
    n,it = 0,iter(dl)
    next(it)
    t = time.perf_counter()
    for b in it: n += len(b[0])
    return dict(samples_s=n/(time.perf_counter()-t))

def spread(rows): return {u:dict(median=round(statistics.median(vs), 1), min=round(min(vs), 1), max=round(max(vs), 1)) for u in rows[0] for vs in [[r[u] for r in rows]]}

def turns(cases, rounds):
    "`rounds` results of each of `cases`, which take turns"
    res = {k:[] for k in cases}
    for f in cases.values(): f()
    for r in range(rounds):
        for k in list(cases)[::1 if r%2 else -1]: res[k].append(cases[k]())
    return res

def ratio(rows, base, u): return round(statistics.median(a[u]/b[u] for a,b in zip(rows, base)), 3)

def run(
    n:int=40_000, # Values of 2 KB
    images:int=256, # JPEGs, each stored four times
    rounds:int=5, # Timed passes of each contender
)->dict: # What goes into the results file
    "Time the contenders in turns"
    torch.set_num_threads(1)   # threads that wait for a core spin, which is noise here
    with tempfile.TemporaryDirectory(prefix='fr-bench-') as d, redis_server(port=-1) as s:
        raw = turns(dict(Raw(s, n).cases()), rounds)
        loaders,ps = depth_cases(s, Path(d)/'images', images)
        deep = turns({k:lambda dl=dl: epoch(dl) for k,dl in loaders.items()}, rounds)
        where,nbytes = about(s.url, 'torch fastai redis hiredis numpy'),RedisStore(s.url, 'jpg').manifest.nbytes//(4*images)
        for p in ps: p.terminate(); p.join()
    def base(k): return raw.get(f"redis-benchmark, {'unix' if ', unix' in k else 'tcp'}")
    return dict(n=n, images=images, jpg_bytes=nbytes, rounds=rounds,
        raw={k:{**spread(v), **({'to_redis_benchmark':{u:ratio(v, b, u) for u in v[0]}} if (b:=base(k)) else {})} for k,v in raw.items()},
        depth=[dict(values=nm, delay_ms=1000*d, prefetch=k, **spread(v), to_prefetch_1=ratio(v, deep[nm,d,1], 'samples_s')) for (nm,d,k),v in deep.items()], **where)

def table(res):
    "`res` for reading"
    yield f"{res['n']} values of 2 KB, {res['rounds']} rounds; samples/s, per CPU second (server's included); ratios to redis-benchmark on the same socket"
    for k,o in res['raw'].items():
        r = o.get('to_redis_benchmark')
        yield f"  {k:50}{o['samples_s']['median']:9,.0f}{o['samples_cpu_s']['median']:10,.0f}" + (f"   x {r['samples_s']:.2f}  x {r['samples_cpu_s']:.2f}" if r else '')
    yield f"\nRemoteDL, 2 workers, samples/s by `prefetch`, and ratio to prefetch=1; JPEGs of {res['jpg_bytes']//1000} KB, PNGs of 28x28"
    for o in res['depth']: yield f"  {o['values']}  {o['delay_ms']:4.0f} ms later  prefetch={o['prefetch']}{o['samples_s']['median']:9,.0f}   x {o['to_prefetch_1']:.2f}"

if __name__=='__main__':
    ap = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    ap.add_argument('--n', type=int, default=40_000, help='values of 2 KB')
    ap.add_argument('--images', type=int, default=256, help='JPEGs, each stored four times')
    ap.add_argument('--rounds', type=int, default=5, help='timed passes of each')
    ap.add_argument('--out', default=Path(__file__).parent/'results'/'fetch.json', help='results file; an empty one writes none')
    a = ap.parse_args()
    res = run(a.n, a.images, a.rounds)
    res['command'] = f'python tests/bench/fetch.py --n {a.n} --images {a.images} --rounds {a.rounds}'
    print('\n'.join(table(res)))
    if a.out: Path(a.out).write_text(json.dumps(res, indent=1)+'\n')
