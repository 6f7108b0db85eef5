"""How fast can values be read from Redis, and how many batches should a loader fetch ahead?

Purpose: values of 2 KB are read without decoding, and compared with `redis-benchmark -P 64` on the same values:
         `get_many` in batches of 64 and 256, with and without checksums, over TCP and a Unix socket, in one process and
         in two, and `RemoteDataset.batched` in two workers. Then `RemoteDL` is measured with `prefetch` 0, 1, 2 and 4,
         over loopback and through a proxy that delays the answers by 1 and 20 ms, for JPEGs of photographs (decoded and
         cropped to 224) and for small PNGs. The contenders take turns, in an order that is reversed in every round.

Command: python tests/bench/fetch.py [--rounds 5] [--n 40000] [--images 256]
         redis-benchmark is searched for on the PATH, or where REDIS_BENCHMARK points to. Without it, that row is left
         out.

Result:  on a machine with much other work (results/fetch.json: two cores, 3 rounds), in batches of 256 over TCP,
         `get_many` gave 0.69 times the samples/s of redis-benchmark without checksums and 0.42 times with them. Per CPU
         second, including the server's, it gave 0.91 and 0.54. In batches of 64 it gave 0.53 and 0.29, and per CPU
         second 0.80 and 0.42. Two processes with checksums gave 0.47, and `RemoteDataset` in two workers 0.30. For
         photographs, `prefetch=0` gave 0.68 to 0.95 times the samples/s of `prefetch=1`, with any delay; 2 differed
         from 1 only by noise. For PNGs of 28x28, 4 gave 1.26 times as many samples/s with a delay of 20 ms. Up to 1 ms,
         the rows contradict each other.

Reason:  redis-benchmark discards what it reads, and encodes its requests only once. `get_many` takes 260 us of CPU time
         for a checked batch of 64: 40 us for its checksums, about 85 us to request these, and 47 us to copy 131 KB from
         the socket into bytes objects. A batch of a worker is pickled and sent through a pipe to the main process,
         which costs 400 us more. Decoding a batch of photographs takes longer than any of these delays, so one batch
         ahead hides them. Only small samples from a distant server need more.
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
import fastai_remote.block   # adds `from_redis` to `DataLoaders`
from fastai_remote import RedisStore, RemoteDataset, redis_server, to_redis
from faultproxy import FaultProxy
from loader import cpu_seconds, make_images
from machine import about

VALUE_BYTES = 2048
DEPTHS,DELAYS = (0,1,2,4),(0,.001,.02) # Values of `prefetch`, and delays in seconds
GET_MANY,DATASET = 'get_many','RemoteDataset, 2 workers'

# Data

class Late(FaultProxy):
    "A proxy that delays all answers by `delay` seconds, without a limit on their number"
    def __init__(self, up, delay):
        super().__init__(up)
        self.delay = delay

    async def _pipe(self, r, w, answer=False):
        if not answer: return await super()._pipe(r, w)
        queue,clock = asyncio.Queue(),asyncio.get_running_loop().time
        async def send():
            while item:=await queue.get():
                due,data = item
                late = due-clock()
                if late>0: await asyncio.sleep(late)
                w.write(data)
                await w.drain()
        task = asyncio.create_task(send())
        try:
            while data:=await r.read(1<<18): queue.put_nowait((clock()+self.delay, data))
        except OSError: pass
        finally:
            queue.put_nowait(None)
            try: await task
            except OSError: pass
            w.close()

def run_proxy(up, delay, connection):
    "Run a `Late` proxy until something is received from `connection`; sends its port first"
    with Late(up, delay) as proxy:
        connection.send(proxy.port)
        connection.recv()

def value(i): return {'bin':np.random.default_rng(i).bytes(VALUE_BYTES)}

def photo(paths, i):
    path = paths[i%len(paths)]
    return {'jpg':path.read_bytes(), 'cls':path.parent.name}

def digit(i):
    return {'png':Image.fromarray(np.random.default_rng(i).integers(0, 256, (28,28), np.uint8)), 'cls':str(i%10)}

# Contenders

class Raw:
    "The contenders that read all of `n` values of 2 KB from a server"
    def __init__(self, server, n):
        self.server,self.n = server,n
        self.program = os.environ.get('REDIS_BENCHMARK') or shutil.which('redis-benchmark')
        to_redis(list(range(n)), server.url, 'raw', value, num_workers=1, progress=False)
        urls = dict(tcp=server.url, unix=f'unix://{server.socket}')
        self.stores = {network:RedisStore(url, 'raw') for network,url in urls.items()}
        pipeline = self.stores['tcp'].link.client.pipeline(transaction=False)
        for i in range(n):   # again, under the keys that redis-benchmark reads
            pipeline.set(f'key:{i:012}', value(i)['bin'])
            if i%1000==999 or i==n-1: pipeline.execute()

    def cases(self):
        "Yields `(name, function)`; the function measures one pass"
        if self.program:
            for network in self.stores: yield f'redis-benchmark, {network}',partial(self.benchmark, network)
        for network in self.stores:
            for bs in (64,256):
                for check in (False,True):
                    name = f"{GET_MANY}, {network}, batches of {bs}{', checked' if check else ''}"
                    yield name,partial(self.process, network, bs, check)
        for bs in (64,256):
            yield f'{GET_MANY}, tcp, batches of {bs}, checked, 2 processes',partial(self.processes, 'tcp', bs, True)
        for bs in (64,256): yield f'{DATASET}, batches of {bs}',partial(self.dataset, bs)

    def timed(self, function, n):
        "Measures of reading `n` values with `function()`, by the seconds that it returns, otherwise by the clock"
        pid = self.server.proc.pid
        cpu_before,started = cpu_seconds(pid),time.perf_counter()
        seconds = function() or time.perf_counter()-started
        return dict(samples_s=n/seconds, samples_cpu_s=n/(cpu_seconds(pid)-cpu_before))

    def benchmark(self, network, n=400_000):
        address = ['-p',str(self.server.port)] if network=='tcp' else ['-s',str(self.server.socket)]
        options = f'-t get -q -P 64 -d {VALUE_BYTES} -r {self.n} -n {n}'.split()
        def run_program():
            done = subprocess.run([self.program,*address,*options], capture_output=True, text=True, check=True)
            return n/float(re.findall(r'GET: ([\d.]+) requests per second', done.stdout)[-1])
        return self.timed(run_program, n)

    def read(self, network, bs, check, seed=0, share=slice(None)):
        numbers = np.random.default_rng(seed).permutation(self.n)[share]
        for k in range(0, len(numbers), bs): self.stores[network].get_many(numbers[k:k+bs], 'bin', check=check)

    def process(self, *args): return self.timed(lambda: self.read(*args), self.n)

    def processes(self, *args):
        def run_processes():
            context = multiprocessing.get_context('fork')
            barrier,started_processes = context.Barrier(3),[]
            def work(k):
                self.read(*args, share=slice(0, 64))   # connects
                barrier.wait()
                self.read(*args, share=slice(k, None, 2))
                barrier.wait()
            for k in range(2):
                process = context.Process(target=work, args=(k,))
                process.start()
                started_processes.append(process)
            barrier.wait()
            started = time.perf_counter()
            barrier.wait()
            seconds = time.perf_counter()-started
            for process in started_processes: process.join()
            return seconds
        return self.timed(run_processes, self.n)

    def dataset(self, bs):
        "The time starts at the first batch, because workers take as long to start as for any other dataset"
        dataset = RemoteDataset(self.stores['tcp']).to_tuple('bin').batched(bs)
        loader = DataLoader(dataset, batch_size=None, num_workers=2)
        def run_loader():
            batches = iter(loader)
            next(batches)
            n,started = 0,time.perf_counter()
            for batch in batches: n += len(batch[0])
            return (time.perf_counter()-started)*self.n/n
        return self.timed(run_loader, self.n)

def make_loaders(server, folder, images):
    "`{(field, delay, prefetch): loader}`, and the processes of the proxies"
    make_images(folder, images, 415)
    photo_of = partial(photo, sorted(folder.rglob('*.jpg')))
    to_redis(list(range(4*images)), server.url, 'jpg', photo_of, num_workers=1, progress=False)
    to_redis(list(range(8*images)), server.url, 'png', digit, num_workers=1, progress=False)
    loaders,proxies = {},[]
    for delay in DELAYS:
        port = server.port
        if delay:
            ours,theirs = multiprocessing.Pipe()
            args = ('127.0.0.1', server.port),delay,theirs
            proxies.append(multiprocessing.Process(target=run_proxy, args=args, daemon=True))
            proxies[-1].start()
            port = ours.recv()
        for field,tfms in (('jpg', RandomResizedCrop(224)), ('png', None)):
            dls = DataLoaders.from_redis(f'redis://127.0.0.1:{port}', field, item_tfms=tfms, normalize=False,
                                         valid_pct=.01, seed=0, bs=64, num_workers=2, device='cpu')
            for depth in DEPTHS: loaders[field,delay,depth] = dls.train.new(prefetch=depth)
    return loaders,proxies

# Measurement

def epoch(dl):
    "The speed of one epoch from its first batch on"
    n,batches = 0,iter(dl)
    next(batches)
    started = time.perf_counter()
    for batch in batches: n += len(batch[0])
    return dict(samples_s=n/(time.perf_counter()-started))

def spread(rows):
    "Median, minimum and maximum of each measure"
    found = {}
    for unit in rows[0]:
        values = [row[unit] for row in rows]
        functions = dict(median=statistics.median, min=min, max=max)
        found[unit] = {key:round(function(values), 1) for key,function in functions.items()}
    return found

def turns(
    cases, # `{name: function that measures}`
    rounds # Number of timed rounds
): # `{name: measures of each round}`
    "Let the cases take turns, after one run of each that is not counted"
    measured = {name:[] for name in cases}
    for function in cases.values(): function()
    for i in range(rounds):
        for name in list(cases)[::1 if i%2 else -1]: measured[name].append(cases[name]())
    return measured

def ratio(rows, base_rows, unit):
    return round(statistics.median(row[unit]/base[unit] for row,base in zip(rows, base_rows)), 3)

def run(
    n:int=40_000, # Number of values of 2 KB
    images:int=256, # Number of JPEGs, each of which is stored four times
    rounds:int=5, # Timed passes of each contender
)->dict: # Content of the result file
    "Measure the contenders in turns"
    torch.set_num_threads(1)   # threads that wait for a core spin, which would be noise here
    with tempfile.TemporaryDirectory(prefix='fr-bench-') as temporary, redis_server(port=-1, requirepass='') as server:
        raw = turns(dict(Raw(server, n).cases()), rounds)
        loaders,proxies = make_loaders(server, Path(temporary)/'images', images)
        depths = turns({case:partial(epoch, dl) for case,dl in loaders.items()}, rounds)
        where = about(server.url, 'torch fastai redis hiredis numpy')
        jpg_bytes = RedisStore(server.url, 'jpg').manifest.nbytes//(4*images)
        for proxy in proxies:
            proxy.terminate()
            proxy.join()
    raw_result,depth_result = {},[]
    for name,rows in raw.items():
        base = raw.get(f"redis-benchmark, {'unix' if ', unix' in name else 'tcp'}")
        ratios = {'to_redis_benchmark':{unit:ratio(rows, base, unit) for unit in rows[0]}} if base else {}
        raw_result[name] = {**spread(rows), **ratios}
    for (field,delay,depth),rows in depths.items():
        to_one = ratio(rows, depths[field,delay,1], 'samples_s')
        depth_result.append(dict(values=field, delay_ms=1000*delay, prefetch=depth, **spread(rows),
                                 to_prefetch_1=to_one))
    return dict(n=n, images=images, jpg_bytes=jpg_bytes, rounds=rounds, raw=raw_result, depth=depth_result, **where)

def table(result):
    "The lines of readable tables"
    yield (f"{result['n']} values of 2 KB, {result['rounds']} rounds; samples/s, and per CPU second (including the "
           "server's); ratios to redis-benchmark on the same socket")
    for name,measures in result['raw'].items():
        ratios = measures.get('to_redis_benchmark')
        text = f"   x {ratios['samples_s']:.2f}  x {ratios['samples_cpu_s']:.2f}" if ratios else ''
        yield f"  {name:50}{measures['samples_s']['median']:9,.0f}{measures['samples_cpu_s']['median']:10,.0f}{text}"
    yield (f"\nRemoteDL, 2 workers, samples/s by `prefetch`, and ratio to prefetch=1; JPEGs of "
           f"{result['jpg_bytes']//1000} KB, PNGs of 28x28")
    for row in result['depth']:
        yield (f"  {row['values']}  {row['delay_ms']:4.0f} ms later  prefetch={row['prefetch']}"
               f"{row['samples_s']['median']:9,.0f}   x {row['to_prefetch_1']:.2f}")

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--n', type=int, default=40_000, help='number of values of 2 KB')
    parser.add_argument('--images', type=int, default=256, help='number of JPEGs, each of which is stored four times')
    parser.add_argument('--rounds', type=int, default=5, help='timed passes of each contender')
    parser.add_argument('--out', default=Path(__file__).parent/'results'/'fetch.json',
                        help='result file; an empty text writes none')
    args = parser.parse_args()
    result = run(args.n, args.images, args.rounds)
    result['command'] = f'python tests/bench/fetch.py --n {args.n} --images {args.images} --rounds {args.rounds}'
    print('\n'.join(table(result)))
    if args.out: Path(args.out).write_text(json.dumps(result, indent=1)+'\n')
