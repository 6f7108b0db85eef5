"""Is this package faster than what a user would choose instead? All loaders over the same images, in one run

Purpose: photographs with `RandomResizedCrop(224)` and a flip, in batches of 64, with two workers or threads, one epoch
         per turn. All contenders end at the same point: float32, (64, 3, 224, 224), in [0,1], and int64 labels, in the
         main process. With --uint8 they end before the conversion to floats, as if a GPU did it. Loaders without
         fastai take part with Pillow and with `fast`, one decoder for all. Then follow small images through fastai:
         drawings of 256 x 256 and digits of 28 x 28, without transforms. Then values of 2 KB are read without
         decoding. The contenders take turns in an order that is reversed in every round. Each has a process of its
         own, which is forked for it. Its first epoch is not timed; it is used to check the shapes and to measure
         memory. Samples per CPU second count that process, its workers and the Redis server. They are valid on a
         machine with other work; samples per second are not. Ratios are medians of the ratios of the rounds, with the
         interval that contains the median of all possible rounds in 95 of 100 cases.

Command: python tests/bench/peers.py [FOLDER] [--drawings FILE.ndjson] [--n 1920] [--rounds 5] [--uint8]
         FOLDER has one subfolder per class, or file names that begin with `CLASS_`. Without it, and without drawings,
         the benchmark makes some. A contender that is not installed is named and left out: pip install webdataset wids
         litdata mosaicml-streaming datasets ffcv spdl spdl-io simplejpeg. (A folder that is passed to pip's --target
         must be called site-packages, otherwise `datasets` pickles what it should not.) redis-benchmark is used if it
         is on the PATH. The results are written to results/peers.json and results/peers.png.

Result:  330 ImageNet photographs, 960 samples per epoch, 15 rounds, two cores, an idle but slow machine
         (results/peers.json, results/peers.png). Per CPU second, `from_redis` with two threads gave 3.58 times the
         samples of stock fastai (3.31 to 3.73), 2.20 times those of FFCV reading JPEGs, 1.55 (1.43 to 1.67) to 1.85
         times those of every other loader with the same decoder, 2.5 to 3.1 times those of the same loaders with
         Pillow, and 1.17 times those of decoding and cropping alone in one process. `shrink(256)` gave 2.25 times as
         many again, and pixels 2.07 times those of FFCV's raw arrays. Drawings as strokes gave 16.7 times (22.0 with
         one channel) the samples of the forum post's recipe and 12.3 times (8.0) those of stock fastai from PNG files,
         as PNGs 6.9 times. Digits as arrays gave 10.3 and 6.9 times, as PNGs 7.9 and 5.4 times with two workers, and
         11.0 and 7.3 times in the process. Values of 2 KB: get_many read 0.64 times as many as pipelined GETs on a
         socket, RemoteDataset 0.52, in two workers 0.18.

Reason:  the region of a photograph is decoded, resized and flipped in one call without Python, row by row while the
         row is in the cache. Two thirds of the time of that call are the Huffman codes before the region's last row.
         Redis with its checksums costs a tenth, fastai's transforms 0.04 ms, and the conversion to floats 0.04 ms in
         memory that is reused (stock fastai: 0.33 ms, in newly allocated pages each time). Decoding alone pays for
         those pages too, which is why it is slower. Worker processes cost a quarter: their start (70 ms each) and a
         copy. Strokes are drawn without Python, so threads work for them too; a grey image gets three channels only
         when it becomes floats. PNGs are inflated by zlib-ng, 5 us for a digit, which Pillow and its objects took 35 us
         for; what is left is the start of two workers, 15 us for each of 9,600 digits, and their pipe. When values are
         read in workers, each batch costs a pickle and a pipe. In order, the checksums arrive as one copy; shuffled,
         each arrives by itself, which costs the server as much as the values. Of the client's time for values in
         order, half is `send` and `recv`; pipelined GETs discard what they receive.

Tried:   requesting the next 64 values while the last ones are read, on one connection: gained a tenth, not kept.
         Threads for digits: no gain, because NumPy and torch hold the GIL for most of the time.
"""
import argparse, collections, gc, json, multiprocessing, os, shutil, socket, statistics, subprocess, sys, tempfile
import time, warnings
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from contenders import (ARRAYS, At, BS, DIGITS, DRAWINGS, FFCV, FORUM, LIMIT, PHOTOS, PIXELS, PNG, PNG2, RAW, REDIS,
                        SHARDS, SIZE, SMALL, STOCK, STOCK1, STROKES, STROKES1, WORKERS, finish, lacks)
from fastai_remote import RedisStore, RemoteDataset, redis_server
from fastai_remote.core import size_str
from formats import write_digits, write_drawings, write_photos, write_raw
from machine import about
from rounds import compare, spread
from shards import cpu_seconds, private_mb

UNITS = dict(samples_cpu_s='per CPU s', samples_s='per s', server='server %', first_s='first, s', worker_mb='worker MB',
             main_mb='main MB')

# Contenders that read values of 2 KB, without decoding

VALUE_BYTES = 2048

def _read(url, numbers, bs=256):
    store = RedisStore(url, 'raw')
    for k in range(0, len(numbers), bs): yield store.get_many(numbers[k:k+bs], ['bin'], check=True)['bin'],None

class many:
    "`get_many` in batches of 256, in one process or in two"
    elsewhere = 0   # samples of the other process
    def __init__(self, at, n, procs=1): self.at,self.n,self.procs = at,n,procs
    def __iter__(self):
        def share(k): return np.arange(k*self.n//self.procs, (k+1)*self.n//self.procs)
        own,others = share(0),share(self.procs-1)
        pid = os.fork() if self.procs==2 else None
        if pid==0:
            try: collections.deque(_read(self.at.url, others), 0)
            finally: os._exit(0)
        yield from _read(self.at.url, own)
        if pid:
            self.elsewhere = len(others)
            os.waitpid(pid, 0)

def _without_label(values): return values,None
def _itself(batch): return batch

def dataset_pass(at, n, workers, shuffle=False):
    dataset = RemoteDataset(RedisStore(at.url, 'raw')).to_tuple('bin')
    dataset = dataset.batched(256, collate=_without_label, shuffle=shuffle)
    return DataLoader(dataset, batch_size=None, num_workers=workers, collate_fn=_itself)   # torch's looks at each value

class tool:
    "redis-benchmark: GETs in pipelines of 64, of random keys out of `n`"
    def __init__(self, at, n, clients=50): self.at,self.n,self.clients = at,n,clients
    def __iter__(self):
        options = dict(s=self.at.url.removeprefix('unix://'), n=2*self.n, r=self.n, P=64, c=self.clients)
        arguments = [text for key,value in options.items() for text in (f'-{key}',str(value))]
        command = [benchmark_program(), *arguments, '-q', 'GET', 'bench:__rand_int__']
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        yield range(2*self.n),None

class pipelined:
    "GETs in pipelines of 64 on a socket, whose answers are counted and discarded: the least that reading values costs"
    def __init__(self, at, n): self.at,self.n,self.buffer = at,n,bytearray(1<<20)
    def __iter__(self):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.at.url.removeprefix('unix://'))
            for start in range(0, self.n, 64):
                numbers = range(start, min(start+64, self.n))
                connection.sendall(b''.join(b'*2\r\n$3\r\nGET\r\n$18\r\nbench:%012d\r\n' % i for i in numbers))
                left = len(numbers)*(VALUE_BYTES+9)   # with the length before and the line ends
                while left>0: left -= connection.recv_into(self.buffer)
                yield numbers,None

def benchmark_program(): return shutil.which('redis-benchmark') or shutil.which('valkey-benchmark')

TOOL,TOOL1,SOCKET = 'redis-benchmark -P 64','redis-benchmark -P 64 -c 1','pipelined GETs on a socket'
MANY,MANY2,PASS = 'ours, get_many','ours, get_many, two processes','ours, RemoteDataset'
PASS2,PASS3 = 'ours, RemoteDataset, two workers','ours, RemoteDataset, shuffled'

def value_contenders(n):
    "The contenders that read `n` values"
    functions = {TOOL:tool, TOOL1:partial(tool, clients=1)} if benchmark_program() else {}
    functions |= {SOCKET:pipelined, MANY:many, MANY2:partial(many, procs=2), PASS:partial(dataset_pass, workers=0),
                  PASS2:partial(dataset_pass, workers=WORKERS), PASS3:partial(dataset_pass, workers=0, shuffle=True)}
    return {name:(None,partial(function, n=n)) for name,function in functions.items()}

# Measurement

def server_seconds(pid):
    "CPU seconds of all threads of process `pid`, which are exact to the microsecond"
    schedules = Path(f'/proc/{pid}/task').glob('*/schedstat')
    return sum(int(path.read_text().split()[0]) for path in schedules)/1e9

def epoch(
    dl, # Something to iterate over
    server, # Process id of the server
    floats=True, # Convert images to floats?
    check_batch=None # Called with the first batch; then memory is measured as well, and the times mean nothing
): # `{measure: value}`
    "Measure one epoch"
    gc.collect()
    n,first,memory = 0,None,{}
    cpu_before,server_before,started = cpu_seconds(),server_seconds(server),time.perf_counter()
    for k,batch in enumerate(dl):
        x,y = finish(*batch, floats)
        n += len(x)
        first = first or time.perf_counter()-started
        if not check_batch: continue
        if k==0: check_batch(x, y)
        if k%4!=3: continue
        for process in multiprocessing.active_children():
            private = private_mb(process.pid)
            if private: memory[process.pid] = max(private, memory.get(process.pid, 0))
    n += getattr(dl, 'elsewhere', 0)
    seconds = time.perf_counter()-started
    for process in multiprocessing.active_children(): process.join(5)   # CPU time counts once they have ended
    cpu,server_cpu = cpu_seconds()-cpu_before,server_seconds(server)-server_before
    return dict(samples_cpu_s=n/(cpu+server_cpu), samples_s=n/seconds, server=100*server_cpu/(cpu+server_cpu),
                first_s=first, n=n, worker_mb=statistics.mean(memory.values()) if memory else 0.,
                main_mb=private_mb(os.getpid()) or 0.)

SHAPES = {'photographs':{(BS,3,SIZE,SIZE)}, 'drawings':{(BS,3,256,256),(BS,1,256,256)}, 'digits':{(BS,3,28,28)}}

def check_batch(kind, floats, x, y):
    "Raises `ValueError` unless a batch is what every contender should give"
    if kind=='values': return
    top,dtype = (1,torch.float32) if floats else (255,torch.uint8)
    right_images = tuple(x.shape) in SHAPES[kind] and x.dtype==dtype
    right_labels = y.dtype==torch.int64 and y.shape==(BS,)
    if right_images and right_labels and 0<=x.min() and .3*top<x.max()<=top: return
    raise ValueError(f'batch of {tuple(x.shape)} {x.dtype}, {float(x.min()):.2f} to {float(x.max()):.2f}, '
                     f'labels {tuple(y.shape)} {y.dtype}')

class ContenderProcess:
    "A forked process for one contender, so that no contender has the threads, memory or settings of another one"
    connections = []   # our ends, which processes that are forked later must not keep open
    def __init__(self,
        kind, # Of data
        make, # The contender
        at, # Where the data is
        server # Process id of the server
    ):
        self.connection,theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context('fork')
        self.process = context.Process(target=self._run, args=(theirs,kind,make,at,server))
        self.process.start()
        theirs.close()
        ContenderProcess.connections.append(self.connection)

    def epoch(self):
        "The measures of one epoch; raises `RuntimeError` if it fails"
        try:
            self.connection.send(0)
            measures = self.connection.recv()
        except (EOFError,OSError): measures = f'died ({self.process.exitcode})'
        if isinstance(measures, str): raise RuntimeError(measures)
        return measures

    def close(self):
        ContenderProcess.connections.remove(self.connection)
        self.connection.close()
        self.process.join(10)
        self.process.kill()

    def _run(self, connection, kind, make, at, server):
        for inherited in [*ContenderProcess.connections, self.connection]: inherited.close()
        gc.freeze()   # otherwise the garbage collector writes to pages that are shared with the parent process
        dl,memory_before,check = None,0,None
        try:
            while True:
                connection.recv()
                try:
                    if dl is None:
                        memory_before = private_mb(os.getpid()) or 0
                        dl,check = make(at),partial(check_batch, kind, at.floats)
                    else: check = None
                    measures = epoch(dl, server, at.floats, check)
                    connection.send(measures|dict(main_mb=measures['main_mb']-memory_before))
                except Exception as error: connection.send(f'{type(error).__name__}: {str(error).strip()[-300:]}')
        except EOFError: pass
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)   # does not wait for threads of the contender

def absent(module):
    """Why a module cannot be imported, if it cannot

    A process of its own tries it, because an import may start threads, which do not survive a fork.
    """
    ours,theirs = multiprocessing.Pipe(False)
    process = multiprocessing.get_context('fork').Process(target=lambda: theirs.send(lacks(module)))
    process.start()
    theirs.close()
    try: return ours.recv()
    except EOFError: return f'died ({process.exitcode})'
    finally: process.join()

def take_turns(
    processes, # `{(kind, name): ContenderProcess}`
    rounds, # Timed epochs of each
    missing # `{(kind, name): reason}`; contenders that fail in their first epoch are added
): # `{(kind, name): measures of each round}`, with None for a failed round; and the measures of the first epochs
    "Let each contender run one epoch per round, after a first epoch that is not timed"
    measured,memory = {job:[] for job in processes},{}
    for i in range(rounds+1):
        for job in list(processes)[::1 if i%2 else -1]:
            if job not in memory and i: continue
            try: measures = processes[job].epoch()
            except RuntimeError as error:
                print(f"{', '.join(job)}: {error}", file=sys.stderr)
                if i: measured[job].append(None)
                else: missing[job] = str(error)
                continue
            if i: measured[job].append(measures)
            else: memory[job] = measures
        print(f'round {i} of {rounds}' if i else 'first epochs', file=sys.stderr)
    return measured,memory

def write_data(
    at, # Where to write
    folder, # Photographs; None: make some
    drawings, # Quick, Draw! ndjson; None: make some
    counts, # `{kind: number of samples}`
    kinds, # What to write
    size, # Shorter side of photographs that are made
    installed, # Modules that can be imported
    name # Name of the photographs in the results, or None
): # `{kind: description}`
    "Write the samples of all kinds in all formats"
    described = {}
    if 'photographs' in kinds:
        n_files = write_photos(at, folder, counts['photographs'], size, installed)
        described['photographs'] = name or f"{Path(folder).name if folder else 'made'}, {n_files} JPEGs"
    if 'drawings' in kinds:
        write_drawings(at, drawings, counts['drawings'])
        described['drawings'] = Path(drawings).name if drawings else 'made'
    if 'digits' in kinds:
        write_digits(at, counts['digits'])
        described['digits'] = 'made'
    if 'values' in kinds:
        write_raw(at, counts['values'], VALUE_BYTES)
        described['values'] = 'random bytes'
    return described

def summarise(measured, memory):
    "The measures of each kind of data, and the ratios of this package to all others"
    results,ratios = {},{}
    for (kind,name),epochs in measured.items():
        done = [e for e in epochs if e]
        if not done: continue
        times = {unit:spread([e[unit] for e in done]) for unit in ('samples_cpu_s','samples_s','server','first_s')}
        sizes = {unit:round(memory[kind,name][unit], 1) for unit in ('worker_mb','main_mb')}
        results.setdefault(kind, {})[name] = {**times, **sizes, 'n':done[0]['n']}
    for kind,rows in results.items():
        units = ('samples_cpu_s','samples_s','first_s')
        def ratio(a, b): return {unit:compare(measured[kind,a], measured[kind,b], unit) for unit in units}
        ratios[kind] = {a:{b:ratio(a, b) for b in rows if b!=a} for a in rows if a.startswith('ours')}
    return results,ratios

PEER_PACKAGES = 'hiredis simplejpeg webdataset wids litdata mosaicml-streaming datasets ffcv spdl-io'.split()

@contextmanager
def started(
    folder=None, # Photographs; default: make some
    drawings=None, # Quick, Draw! ndjson; default: make some
    # Number of photographs, which are used several times if there are fewer. There are five times as many drawings and
    # ten times as many digits.
    n:int=1920,
    values:int=50_000, # Values of 2 KB
    size:int=350, # Shorter side of photographs that are made, in pixels
    only:str='', # Parts of the names of contenders, separated by |
    kinds:str='photographs,drawings,digits,values', # Kinds of data
    uint8:bool=False, # Leave batches uint8, as if a GPU made the floats?
    name:str=None, # Name of the data in the results
): # `(processes, missing, described)`: `{(kind, name): ContenderProcess}`, `{(kind, name): reason}`, about the data
    "Context manager: the data are written, and each contender has its process"
    torch.set_num_threads(1)   # threads that wait for a core spin, which would be noise here
    os.environ |= dict(HF_HUB_OFFLINE='1', OMP_NUM_THREADS='1', TQDM_DISABLE='1')
    # One tracker for all processes: at its end, a turn's own tracker would unlink the shared memory of the next turn,
    # which has the same name.
    resource_tracker.ensure_running()
    contenders = {'photographs':PHOTOS, 'drawings':DRAWINGS, 'digits':DIGITS, 'values':value_contenders(values)}
    jobs = {(kind,contender):job for kind in kinds.split(',') for contender,job in contenders[kind].items()
            if any(part in contender for part in only.split('|'))}
    modules = {module for module,_ in jobs.values() if module}
    not_installed = {module:reason for module in sorted(modules) if (reason:=absent(module))}
    missing = {job:not_installed[module] for job,(module,_) in jobs.items() if module in not_installed}
    counts = dict(photographs=n, drawings=5*n, digits=10*n, values=values)
    with tempfile.TemporaryDirectory(prefix='fr-bench-') as temporary, redis_server() as server:
        at,installed = At(temporary, server.url, not uint8),{m.split('.')[0] for m in modules-set(not_installed)}
        data = write_data(at, folder, drawings, counts, kinds, size, installed, name)
        described = dict(data=data, n={kind:counts[kind] for kind in data},
                         bytes_a_sample={dataset:round(size) for dataset,size in at.nbytes.items()})
        processes = {job:ContenderProcess(job[0], make, at, server.proc.pid)
                     for job,(_,make) in jobs.items() if job not in missing}
        try: yield processes,missing,described|about(server.url, 'torch torchvision fastai pillow redis numpy')
        finally:
            for process in processes.values(): process.close()

def run(
    rounds:int=5, # Timed epochs of each contender
    uint8:bool=False, # As `started`
    **kwargs # More for `started`
)->dict: # Content of the result file
    "Measure the contenders in turns"
    with started(uint8=uint8, **kwargs) as (processes,missing,described):
        measured,memory = take_turns(processes, rounds, missing)
    for package in PEER_PACKAGES:
        try: described['versions'][package] = version(package)
        except PackageNotFoundError: pass
    results,ratios = summarise(measured, memory)
    return dict(**described, ends='uint8' if uint8 else 'float32', bs=BS, workers=WORKERS, rounds=rounds,
                missing={': '.join(job):reason for job,reason in missing.items()}, results=results, ratios=ratios,
                targets=list(targets(ratios)))

# Goals: `(kind, contender of this package, compared with, at least)`; '*' is the best of all others. A goal is met if
# the lower end of the interval per CPU second is.
TARGETS = [
    ('photographs', REDIS, STOCK, 3.3), ('photographs', REDIS, FFCV, 1.2), ('photographs', REDIS, '*', 1.5),
    ('photographs', REDIS, LIMIT, .9), ('photographs', SMALL, REDIS, 2.), ('photographs', PIXELS, RAW, .7),
    ('drawings', STROKES, FORUM, 10.), ('drawings', STROKES1, FORUM, 10.), ('drawings', STROKES, STOCK, 5.),
    ('drawings', STROKES1, STOCK1, 5.), ('drawings', PNG, STOCK, 2.5),
    ('digits', PNG, FORUM, 10.), ('digits', PNG, STOCK, 6.), ('digits', PNG2, FORUM, 10.), ('digits', PNG2, STOCK, 6.),
    ('digits', ARRAYS, FORUM, 10.), ('digits', ARRAYS, STOCK, 5.),
    ('values', MANY, SOCKET, .8), ('values', PASS, SOCKET, .75), ('values', PASS2, SOCKET, .5)]

def targets(ratios):
    "Each of `TARGETS` that was measured, with its result"
    for kind,contender,other,at_least in TARGETS:
        measured = ratios.get(kind, {}).get(contender, {})
        def is_compared(name):
            return name==other or other=='*' and not name.startswith(('ours','decode')) and name!=RAW
        others = {name:ratio for name,ratio in measured.items() if is_compared(name)}
        if not others: continue
        best = min(others, key=lambda name: others[name]['samples_cpu_s']['median'])
        cpu,wall = (others[best][unit] for unit in ('samples_cpu_s','samples_s'))
        yield dict(kind=kind, ours=contender, over=best, best=other=='*', at_least=at_least, cpu=cpu, wall=wall,
                   met=cpu['low']>=at_least)

# Output

def kind_table(result, kind, rows):
    "The lines of a readable table of medians for one kind of data"
    compared = [name for name in (REDIS,SHARDS,STROKES,PNG,MANY2,PASS2) if name in rows][:2]
    yield (f"\n{kind}: {result['data'][kind]}, {result['n'][kind]:,} samples, {result['rounds']} rounds, "
           f"{result['ends']}: medians")
    yield f"  (last columns: speed of {' | '.join(compared)} divided by this contender's, per CPU second (per second))"
    yield f"  {'':38}"+''.join(f'{title:>11}' for title in UNITS.values())
    for name,row in sorted(rows.items(), key=lambda item: -item[1]['samples_cpu_s']['median']):
        median = {unit:value['median'] if isinstance(value, dict) else value for unit,value in row.items()}
        texts = []
        for ours in compared:
            ratio = result['ratios'][kind][ours].get(name)
            medians = [ratio[unit]['median'] for unit in ('samples_cpu_s','samples_s')] if ratio else []
            texts.append(f'{medians[0]:7.2f} ({medians[1]:.2f})' if ratio else f"{'':14}")
        yield (f"  {name:38}{median['samples_cpu_s']:11,.0f}{median['samples_s']:11,.0f}{median['server']:11.1f}"
               f"{median['first_s']:11.2f}{median['worker_mb']:11.0f}{median['main_mb']:11.0f}   {'  |'.join(texts)}")

def table(result):
    "The lines of readable tables"
    for kind,rows in result['results'].items(): yield from kind_table(result, kind, rows)
    yield '\nbytes per sample: '+', '.join(f'{name} {size_str(size)}' for name,size in result['bytes_a_sample'].items())
    for target in result['targets']:
        other = target['over']+', the best of all others'*target['best']
        verdict = 'met    ' if target['met'] else 'not met'
        cpu,wall = target['cpu'],target['wall']['median']
        yield (f"{verdict} {target['kind']}: {target['ours']} compared with {other}: at least {target['at_least']}, is "
               f"{cpu['median']:.2f} ({cpu['low']:.2f} to {cpu['high']:.2f}) per CPU s, {wall:.2f} per s")
    for name,reason in result['missing'].items(): yield f'left out: {name}: {reason}'

def picture(result, file):
    "Draw samples per CPU second as bars, with minimum and maximum"
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot as plt
    kinds = {kind:sorted(rows.items(), key=lambda item: item[1]['samples_cpu_s']['median'])
             for kind,rows in result['results'].items()}
    heights = [len(rows)+2 for rows in kinds.values()]
    figure,axes = plt.subplots(len(kinds), 1, figsize=(9, .24*sum(heights)+.7*len(kinds)), height_ratios=heights,
                               squeeze=False, layout='constrained')
    def color(name): return 'C1' if name.startswith('ours') else '.75' if name.startswith('decode') else 'C0'
    for (kind,rows),ax in zip(kinds.items(), axes[:,0]):
        speeds = np.array([[row['samples_cpu_s'][key] for key in ('median','min','max')] for _,row in rows]).T
        ax.barh([name for name,_ in rows], speeds[0], xerr=abs(speeds[1:]-speeds[0]),
                color=[color(name) for name,_ in rows], error_kw=dict(lw=.8))
        ax.set_title(f"{kind}: {result['data'][kind]}", loc='left', fontsize=10)
        ax.set_xlabel('samples per CPU second', fontsize=8)
        ax.tick_params(labelsize=8)
        ax.spines[['top','right']].set_visible(False)
        for i,speed in enumerate(speeds[0]): ax.text(speeds[2,i], i, f' {speed:,.0f}', va='center', fontsize=7)
    figure.savefig(file, dpi=110)

if __name__=='__main__':
    warnings.filterwarnings('ignore')
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('folder', nargs='?', help='photographs; default: make some')
    parser.add_argument('--drawings', help='Quick, Draw! drawings, .ndjson; default: make some')
    parser.add_argument('--n', type=int, default=1920, help='number of samples')
    parser.add_argument('--values', type=int, default=50_000, help='number of values of 2 KB')
    parser.add_argument('--rounds', type=int, default=5, help='timed epochs of each contender')
    parser.add_argument('--size', type=int, default=350, help='shorter side of photographs that are made, in pixels')
    parser.add_argument('--only', default='', help='parts of the names of contenders, separated by |')
    parser.add_argument('--kinds', default='photographs,drawings,digits,values', help='kinds of data')
    parser.add_argument('--uint8', action='store_true', help='leave batches uint8, as if a GPU made the floats')
    parser.add_argument('--name', help='name of the data in the results')
    parser.add_argument('--out', default=Path(__file__).parent/'results'/'peers.json',
                        help='result file, and a picture next to it; an empty text writes none')
    args = parser.parse_args()
    result = run(**{option:value for option,value in vars(args).items() if option!='out'})
    result['command'] = ' '.join(['python tests/bench/peers.py', 'FOLDER' if args.folder else f'--size {args.size}',
                                  *['--drawings FILE']*bool(args.drawings),
                                  f'--n {args.n} --values {args.values} --rounds {args.rounds}',
                                  *['--uint8']*args.uint8])
    print('\n'.join(table(result)))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1)+'\n')
        picture(result, Path(args.out).with_suffix('.png'))
