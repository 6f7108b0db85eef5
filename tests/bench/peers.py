"""Is ours ahead of what a user would pick instead? Every loader over the same pictures, side by side, in one run

Purpose: photographs with `RandomResizedCrop(224)` and a flip, in batches of 64 with two workers (or threads), an epoch a turn. All end at the same place: float32,
         (64, 3, 224, 224), in [0,1], and int64 labels, in the main process (with --uint8 before that, as where a GPU makes the floats). Those without fastai
         come with Pillow and with `fast`, one decoder for all. Then small pictures through fastai, drawings of 256 x 256 and digits of 28 x 28, without
         transforms; then a pass over values of 2 KB, without decoding. The contenders take turns in an order that is reversed every round, each in a process
         of its own, forked for it, whose first epoch is not timed but looked at: shapes, and memory. Samples per CPU second count that process, its workers,
         and the Redis server; they hold on a machine with other work, where the wall's do not. Ratios are medians of the rounds' ratios.

Command: python tests/bench/peers.py [FOLDER] [--drawings FILE.ndjson] [--n 1920] [--rounds 5] [--uint8]
         FOLDER has a sub-folder a class, or file names that begin `CLASS_`; without it, and without drawings, it makes some. A contender that is not installed is named
         and left out: pip install webdataset wids litdata mosaicml-streaming datasets ffcv spdl spdl-io simplejpeg (a folder given to pip's --target must be
         called site-packages, or `datasets` pickles what it should not); redis-benchmark is used where it is on the PATH. Writes results/peers.json, results/peers.png

Result:  on 330 ImageNet photographs, 1,920 samples an epoch, 5 rounds, two cores, quiet but slow (results/peers.json, peers.png). Per CPU second `from_redis` with two threads gave 3.15 times
         stock fastai (3.12 in wall time; aimed at: 2.6), 2.17 times FFCV reading JPEGs, 1.35 to 1.63 times every other loader given the same decoder (SPDL, in a run of its own: 1.47), 2.3 to 2.8
         times the same with Pillow, 1.10 times decoding and cropping alone in one process; `shrink(256)` 2.34 times that (2.10), pixels 1.71 times FFCV's raw arrays. Drawings as strokes 15.0
         (20.5 with one channel) times the forum post's recipe, 13.0 (7.4) times stock fastai from PNG files; digits as arrays 14.7 and 10.2, as PNG 7.2 and 5.1. Values of 2 KB: get_many
         0.64 of redis-benchmark's (0.52), from two processes 0.50 (0.58), RemoteDataset 0.52 (0.43), in workers 0.29 (0.35).

Reason:  a photograph's region is decoded, resized and turned in one call without Python, each row while it is in the cache; of that two thirds are the Huffman codes before its last row.
         Redis costs a tenth with its checksums, fastai's transforms 0.04 ms, floats 0.04 in memory that is used again (stock: 0.33, in pages that are new each time). Alone, decoding
         pays those pages too, which is why it is behind. Processes cost a quarter: their start (70 ms each) and a copy. Strokes are drawn without Python, so threads serve them, too;
         a grey picture becomes three channels only as it becomes floats. PNGs of digits are Pillow's zlib and its objects, 35 us. A pass over values in workers pays a pickle and
         a pipe a batch; in order, checksums come as one copy, shuffled, each by itself (which costs the server as much as the values); redis-benchmark keeps nothing of what it gets.

Tried:   asking for the next 64 values while the last ones are read, on one connection: a tenth, left out. Threads for digits: NumPy and torch hold Python for most of it.
"""
import argparse, collections, gc, json, multiprocessing, os, shutil, socket, statistics, subprocess, sys, tempfile, time, warnings
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from contenders import (ARRAYS, At, BS, DIGITS, DRAWINGS, FFCV, FORUM, LIMIT, PHOTOS, PIXELS, PNG, RAW, REDIS, SHARDS, SIZE, SMALL, STOCK, STOCK1, STROKES, STROKES1,
                        WORKERS, finish, lacks)
from fastai_remote import RedisStore, RemoteDataset, redis_server
from fastai_remote.core import size_str
from formats import write_digits, write_drawings, write_photos, write_raw
from machine import about
from shards import cpu_seconds, private_mb, spread

UNITS = dict(samples_cpu_s='per CPU s', samples_s='per s', server='server %', first_s='first, s', worker_mb='worker MB', main_mb='main MB')

# Values of 2 KB, without decoding
def _pass(url, ids, bs=256):
    store = RedisStore(url, 'raw')
    for k in range(0, len(ids), bs): yield store.get_many(ids[k:k+bs], ['bin'], check=True)['bin'],None

class many:
    "`get_many` of 256, in one process or in two"
    elsewhere = 0
    def __init__(self, at, n, procs=1): self.at,self.n,self.procs = at,n,procs
    def __iter__(self):
        a,b = (np.arange(k*self.n//self.procs, (k+1)*self.n//self.procs) for k in (0, self.procs-1))
        if self.procs==2 and not (pid:=os.fork()):
            try: collections.deque(_pass(self.at.url, b), 0)
            finally: os._exit(0)
        yield from _pass(self.at.url, a)
        if self.procs==2: self.elsewhere = len(b); os.waitpid(pid, 0)

def _same(o): return o,None
def _itself(o): return o

def passed(at, n, workers, shuffle=False):
    ds = RemoteDataset(RedisStore(at.url, 'raw')).to_tuple('bin').batched(256, collate=_same, shuffle=shuffle)
    return DataLoader(ds, batch_size=None, num_workers=workers, collate_fn=_itself)   # torch's own looks at each value

class tool:
    "redis-benchmark: GETs in pipelines of 64, of any of `n` keys"
    def __init__(self, at, n, clients=50): self.at,self.n,self.clients = at,n,clients
    def __iter__(self):
        opts = dict(s=self.at.url.removeprefix('unix://'), n=2*self.n, r=self.n, P=64, c=self.clients)
        subprocess.run([benchmark(),*(str(o) for k,v in opts.items() for o in (f'-{k}',v)),'-q','GET','bench:__rand_int__'], check=True, stdout=subprocess.DEVNULL)
        yield range(2*self.n),None

class pipelined:
    "In place of redis-benchmark, where there is none: a socket, GETs in pipelines of 64, answers counted and thrown away"
    def __init__(self, at, n): self.at,self.n,self.buf = at,n,bytearray(1<<20)
    def __iter__(self):
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(self.at.url.removeprefix('unix://'))
            for k in range(0, self.n, 64):
                m = min(64, self.n-k)
                s.sendall(b''.join(b'*2\r\n$3\r\nGET\r\n$18\r\nbench:%012d\r\n' % i for i in range(k, k+m)))
                left = m*(2048+9)
                while left>0: left -= s.recv_into(self.buf)
                yield range(m),None

def benchmark(): return shutil.which('redis-benchmark') or shutil.which('valkey-benchmark')

TOOL,TOOL1,SOCKET = 'redis-benchmark -P 64','redis-benchmark -P 64 -c 1','pipelined GETs on a socket'
MANY,MANY2,PASS,PASS2,PASS3 = 'ours, get_many','ours, get_many, two processes','ours, RemoteDataset','ours, RemoteDataset, two workers','ours, RemoteDataset, shuffled'

def raw_contenders(n):
    fs = {TOOL:tool, TOOL1:partial(tool, clients=1)} if benchmark() else {SOCKET:pipelined}
    fs |= {MANY:many, MANY2:partial(many, procs=2), PASS:partial(passed, workers=0), PASS2:partial(passed, workers=WORKERS), PASS3:partial(passed, workers=0, shuffle=True)}
    return {k:(None,partial(f, n=n)) for k,f in fs.items()}

# The measure
def server_seconds(pid):
    "CPU seconds of process `pid`, to the microsecond"
    return sum(int(p.read_text().split()[0]) for p in Path(f'/proc/{pid}/task').glob('*/schedstat'))/1e9

def epoch(dl, server, floats=True, look=None):
    "One epoch of `dl`, as `{measure: value}`; `look(x, y)` at batches, and at memory, makes it worthless as a time"
    gc.collect()
    n,first,mem = 0,None,{}
    cpu,srv,t0 = cpu_seconds(),server_seconds(server),time.perf_counter()
    for k,b in enumerate(dl):
        x,y = finish(*b, floats)
        n,first = n+len(x),first or time.perf_counter()-t0
        if look:
            if not k: look(x, y)
            for p in multiprocessing.active_children():
                if k%4==3 and (m:=private_mb(p.pid)): mem[p.pid] = max(m, mem.get(p.pid, 0))
    n += getattr(dl, 'elsewhere', 0)
    wall = time.perf_counter()-t0
    for p in multiprocessing.active_children(): p.join(5)   # their CPU time counts when they are reaped
    cpu,srv = cpu_seconds()-cpu,server_seconds(server)-srv
    return dict(samples_cpu_s=n/(cpu+srv), samples_s=n/wall, server=100*srv/(cpu+srv), first_s=first, n=n,
                worker_mb=statistics.mean(mem.values()) if mem else 0., main_mb=private_mb(os.getpid()) or 0.)

def look(kind, floats, x, y):
    "Raise unless a batch is what all should give"
    if kind=='values': return
    want = {'photographs':{(BS,3,SIZE,SIZE)}, 'drawings':{(BS,3,256,256),(BS,1,256,256)}, 'digits':{(BS,3,28,28)}}[kind]
    top,dtype = (1,torch.float32) if floats else (255,torch.uint8)
    if tuple(x.shape) not in want or x.dtype!=dtype or y.dtype!=torch.int64 or y.shape!=(BS,) or not (0<=x.min() and .3*top<x.max()<=top):
        raise ValueError(f'batch of {tuple(x.shape)} {x.dtype}, {float(x.min()):.2f} to {float(x.max()):.2f}, labels {tuple(y.shape)} {y.dtype}')

class Booth:
    "A process, forked for a contender, that gives an epoch when asked: nobody has another's threads, memory or settings"
    others = []   # this side's ends, which a later booth must not hold open
    def __init__(self, kind, make, at, server):
        self.conn,there = multiprocessing.Pipe()
        self.proc = multiprocessing.get_context('fork').Process(target=self._run, args=(there,kind,make,at,server))
        self.proc.start()
        there.close()
        Booth.others.append(self.conn)
    def ask(self):
        "An epoch's measures; raises `RuntimeError`"
        try: self.conn.send(0); res = self.conn.recv()
        except (EOFError,OSError): res = f'died ({self.proc.exitcode})'
        if isinstance(res, str): raise RuntimeError(res)
        return res
    def close(self): Booth.others.remove(self.conn); self.conn.close(); self.proc.join(10); self.proc.kill()

    def _run(self, there, kind, make, at, server):
        for c in [*Booth.others, self.conn]: c.close()
        gc.freeze()   # else the collector writes on what is shared with the parent
        dl,base = None,0
        try:
            while True:
                there.recv()
                try:
                    if dl is None: base,dl,seen = private_mb(os.getpid()) or 0,make(at),partial(look, kind, at.floats)
                    else: seen = None
                    res = epoch(dl, server, at.floats, seen)
                    there.send(res|dict(main_mb=res['main_mb']-base))
                except Exception as e: there.send(f'{type(e).__name__}: {str(e).strip()[-300:]}')
        except EOFError: pass
        finally:
            sys.stdout.flush(); sys.stderr.flush()
            os._exit(0)   # without waiting for anybody's threads

def run(
    folder=None, # Photographs; default: make some
    drawings=None, # Quick, Draw! ndjson; default: make some
    n:int=1920, # Photographs, by using them again if need be; five times as many drawings, ten times as many digits
    values:int=50_000, # Values of 2 KB
    rounds:int=5, # Timed epochs of each contender
    size:int=350, # Shorter side of photographs that are made, pixels
    only:str='', # Parts of contenders' names, separated by |
    kinds:str='photographs,drawings,digits,values', # Which parts
    uint8:bool=False, # Leave batches uint8, as where a GPU makes the floats?
    name:str=None, # What the results call the data
)->dict: # What goes into the results file
    "Time the contenders in turns"
    torch.set_num_threads(1)   # threads that wait for a core spin, which is noise here
    os.environ |= dict(HF_HUB_OFFLINE='1', OMP_NUM_THREADS='1', TQDM_DISABLE='1')
    resource_tracker.ensure_running()   # one for all: a tracker of its own, as a turn ends, would unlink the next turn's shared memory of the same name
    all_ = {'photographs':PHOTOS, 'drawings':DRAWINGS, 'digits':DIGITS, 'values':raw_contenders(values)}
    jobs = {(kind,k):o for kind in kinds.split(',') for k,o in all_[kind].items() if any(o in k for o in only.split('|'))}
    modules = {m for m,_ in jobs.values() if m}
    gone = {m:why for m in sorted(modules) if (why:=absent(m))}
    missing = {j:gone[m] for j,(m,_) in jobs.items() if m in gone}
    with tempfile.TemporaryDirectory(prefix='fr-bench-') as d, redis_server() as s:
        at,what = At(d, s.url, not uint8),{}
        ns = dict(photographs=n, drawings=5*n, digits=10*n, values=values)
        if 'photographs' in kinds:
            have = {m.split('.')[0] for m in modules-set(gone)}
            found = write_photos(at, folder, n, size, have)
            what['photographs'] = name or f"{Path(folder).name if folder else 'made'}, {found} JPEGs"
        if 'drawings' in kinds: write_drawings(at, drawings, 5*n); what['drawings'] = Path(drawings).name if drawings else 'made'
        if 'digits' in kinds: write_digits(at, 10*n); what['digits'] = 'made'
        if 'values' in kinds: write_raw(at, values); what['values'] = 'random bytes'
        booths = {j:Booth(j[0], make, at, s.proc.pid) for j,(_,make) in jobs.items() if j not in missing}
        try: res,memory = take_turns(booths, rounds, missing)
        finally:
            for b in booths.values(): b.close()
        where = about(s.url, 'torch torchvision fastai pillow redis numpy')
    for p in ('hiredis','simplejpeg','webdataset','wids','litdata','mosaicml-streaming','datasets','ffcv','spdl-io'):
        try: where['versions'][p] = version(p)
        except PackageNotFoundError: pass
    out,ratios = {},{}
    for kind,k in booths:
        if not (es:=[e for e in res[kind,k] if e]): continue
        times = {u:spread([e[u] for e in es]) for u in ('samples_cpu_s','samples_s','server','first_s')}
        out.setdefault(kind, {})[k] = {**times, **{u:round(memory[kind,k][u], 1) for u in ('worker_mb','main_mb')}, 'n':es[0]['n']}
    for kind,rows in out.items():
        def ratio(a, b, u): return round(statistics.median([x[u]/y[u] for x,y in zip(res[kind,a], res[kind,b]) if x and y] or [0.]), 3)   # 0: never in one round
        ratios[kind] = {a:{b:{u:ratio(a, b, u) for u in ('samples_cpu_s','samples_s','first_s')} for b in rows if b!=a} for a in rows if a.startswith('ours')}
    return dict(data=what, n={k:ns[k] for k in what}, bytes_a_sample={k:round(v) for k,v in at.nbytes.items()}, ends='uint8' if uint8 else 'float32', bs=BS, workers=WORKERS, rounds=rounds,
                missing={': '.join(j):why for j,why in missing.items()}, results=out, ratios=ratios, targets=list(targets(ratios)), **where)

def absent(m):
    "Why module `m` cannot be had, if so; asked in a process of its own: an import may start threads, which a fork does not survive"
    here,there = multiprocessing.Pipe(False)
    p = multiprocessing.get_context('fork').Process(target=lambda: there.send(lacks(m)))
    p.start(); there.close()
    try: return here.recv()
    except EOFError: return f'died ({p.exitcode})'
    finally: p.join()

def take_turns(booths, rounds, missing):
    "Epochs of each, round by round, `None` where one failed; and what each had of memory in its first"
    res,memory = {j:[] for j in booths},{}
    for r in range(rounds+1):
        for j in list(booths)[::1 if r%2 else -1]:
            if j not in memory and r: continue
            try: e = booths[j].ask()
            except RuntimeError as why:
                print(f"{', '.join(j)}: {why}", file=sys.stderr)
                if r: res[j].append(None)
                else: missing[j] = str(why)
                continue
            if r: res[j].append(e)
            else: memory[j] = e
        print(f'round {r} of {rounds}' if r else 'warm', file=sys.stderr)
    return res,memory

# What it is for: `(kind, ours, over whom, at least)`; '*' is the best of all others
TARGETS = [*(('photographs',REDIS,o,v) for o,v in ((STOCK,2.6),(FFCV,1.2),('*',1.),(LIMIT,.9))), ('photographs',SMALL,REDIS,2.), ('photographs',PIXELS,RAW,.7),
           *(('drawings',o,FORUM,10.) for o in (STROKES,STROKES1)), ('drawings',STROKES,STOCK,5.), ('drawings',STROKES1,STOCK1,5.), ('drawings',PNG,STOCK,2.5),
           *(('digits',o,b,v) for o in (PNG,ARRAYS) for b,v in ((FORUM,10.),(STOCK,5.))), *(('values',o,b,.5) for o in (MANY,MANY2,PASS,PASS2) for b in (TOOL,SOCKET))]   # one of the two is there

def targets(ratios):
    "Each of `TARGETS` with what came of it, where it was measured"
    for kind,a,b,least in TARGETS:
        rs = ratios.get(kind, {}).get(a, {})
        others = {k:v for k,v in rs.items() if k==b or b=='*' and not k.startswith(('ours','decode')) and k!=RAW}
        if not others: continue
        k = min(others, key=lambda o: others[o]['samples_cpu_s'])
        cpu,wall = (others[k][u] for u in ('samples_cpu_s','samples_s'))
        yield dict(kind=kind, ours=a, over=k, best=b=='*', at_least=least, cpu=cpu, wall=wall, met=min(cpu, wall)>=least)

# For reading
def table(res):
    "`res` for reading: medians"
    for kind,rows in res['results'].items():
        mine = [k for k in (REDIS,SHARDS,STROKES,PNG,MANY2,PASS2) if k in rows][:2]
        yield f"\n{kind}: {res['data'][kind]}, {res['n'][kind]:,} samples, {res['rounds']} rounds, {res['ends']}: medians"
        yield f"  (last: how many times as many samples per CPU second, in brackets per second, has {' | '.join(mine)})"
        yield f"  {'':38}" + ''.join(f'{o:>11}' for o in UNITS.values())
        for k,o in sorted(rows.items(), key=lambda o: -o[1]['samples_cpu_s']['median']):
            m = {u:v['median'] if isinstance(v, dict) else v for u,v in o.items()}
            rs = '  |'.join(f"{r['samples_cpu_s']:7.2f} ({r['samples_s']:.2f})" if (r:=res['ratios'][kind][a].get(k)) else f"{'':14}" for a in mine)
            yield f"  {k:38}{m['samples_cpu_s']:11,.0f}{m['samples_s']:11,.0f}{m['server']:11.1f}{m['first_s']:11.2f}{m['worker_mb']:11.0f}{m['main_mb']:11.0f}   {rs}"
    yield '\nbytes a sample: '+', '.join(f'{k} {size_str(v)}' for k,v in res['bytes_a_sample'].items())
    for t in res['targets']:
        over = t['over']+', the best of all others'*t['best']
        yield f"{'met    ' if t['met'] else 'not met'} {t['kind']}: {t['ours']} over {over}: at least {t['at_least']}, is {t['cpu']:.2f} per CPU s, {t['wall']:.2f} per s"
    for k,why in res['missing'].items(): yield f'left out: {k}: {why}'

def picture(res, file):
    "Bars of samples per CPU second"
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot as plt
    rows = {k:sorted(v.items(), key=lambda o: o[1]['samples_cpu_s']['median']) for k,v in res['results'].items()}
    high = [len(v)+2 for v in rows.values()]
    fig,axs = plt.subplots(len(rows), 1, figsize=(9, .24*sum(high)+.7*len(rows)), height_ratios=high, squeeze=False, layout='constrained')
    for (kind,os_),ax in zip(rows.items(), axs[:,0]):
        ms = np.array([[o['samples_cpu_s'][u] for u in ('median','min','max')] for _,o in os_]).T
        colors = ['C1' if k.startswith('ours') else '.75' if k.startswith('decode') else 'C0' for k,_ in os_]
        ax.barh([k for k,_ in os_], ms[0], xerr=abs(ms[1:]-ms[0]), color=colors, error_kw=dict(lw=.8))
        ax.set_title(f"{kind}: {res['data'][kind]}", loc='left', fontsize=10)
        ax.set_xlabel('samples per CPU second', fontsize=8); ax.tick_params(labelsize=8); ax.spines[['top','right']].set_visible(False)
        for i,v in enumerate(ms[0]): ax.text(ms[2,i], i, f' {v:,.0f}', va='center', fontsize=7)
    fig.savefig(file, dpi=110)

if __name__=='__main__':
    warnings.filterwarnings('ignore')
    ap = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    ap.add_argument('folder', nargs='?', help='photographs; default: make some')
    ap.add_argument('--drawings', help='Quick, Draw! drawings, .ndjson; default: make some')
    ap.add_argument('--n', type=int, default=1920, help='samples')
    ap.add_argument('--values', type=int, default=50_000, help='values of 2 KB')
    ap.add_argument('--rounds', type=int, default=5, help='timed epochs of each')
    ap.add_argument('--size', type=int, default=350, help='shorter side of photographs that are made')
    ap.add_argument('--only', default='', help="parts of the contenders' names, separated by |")
    ap.add_argument('--kinds', default='photographs,drawings,digits,values', help='which parts')
    ap.add_argument('--uint8', action='store_true', help='leave batches uint8, as where a GPU makes the floats')
    ap.add_argument('--name', help='what the results call the data')
    ap.add_argument('--out', default=Path(__file__).parent/'results'/'peers.json', help='results file, and a picture beside it; an empty one writes none')
    a = ap.parse_args()
    res = run(a.folder, a.drawings, a.n, a.values, a.rounds, a.size, a.only, a.kinds, a.uint8, a.name)
    res['command'] = ' '.join(['python tests/bench/peers.py', *(['FOLDER'] if a.folder else [f'--size {a.size}']), *(['--drawings FILE'] if a.drawings else []),
                               f'--n {a.n} --values {a.values} --rounds {a.rounds}', *['--uint8']*a.uint8])
    print('\n'.join(table(res)))
    if a.out: Path(a.out).write_text(json.dumps(res, indent=1)+'\n'); picture(res, Path(a.out).with_suffix('.png'))
