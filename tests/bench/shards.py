"""How fast are samples read from shards? This package, webdataset, litdata and mosaicml-streaming

Purpose: two epochs, the first with a cold cache and the second with a warm one, over the same JPEG files in the format
         of each contender, with the same number of bytes per shard, batches of 64 and two workers. The files are read
         from a disk (page cache), and from a server that shows a folder as S3 does, delays each answer by 2 ms, and
         counts requests and bytes. "decoded" does with Pillow what `RandomResizedCrop(224)` does; the code is the same
         for all contenders, but for this package through fastai, which uses fastai's transform. "bytes only" does no
         work on a sample and shows what the loaders themselves cost. Private memory is what a worker shares with no
         other process and could not drop (`Private_Dirty`). Each turn is a process of its own, which is forked after
         the imports. The contenders take turns in an order that is reversed in every round. Samples per CPU second
         (without the CPU time of the server) are valid on a machine with other work; samples per second are not.
         webdataset reads the same tars that `to_shards` wrote.

Command: python tests/bench/shards.py [FOLDER] [--n 1920] [--rounds 5] [--shard 8e6]
         Without FOLDER it makes photo-like JPEGs. A contender that is not installed (pip install webdataset litdata
         mosaicml-streaming) is named and left out.

Result:  330 ImageNet photographs, 1,280 samples, shards of 8 MB, two cores, 7 rounds (results/shards.json, which has the
         intervals). The following are medians of the ratios of samples per CPU second of this package without fastai
         to webdataset, litdata and mosaicml-streaming. Decoded: cold from S3 1.05 (1.01 with webdataset's cache), 1.00,
         1.04; warm 1.28 (1.03), 1.01, 1.12. Through fastai, where the package's own decoder works, they are 1.76 to
         1.84 cold and 2.1 to 2.7 warm. Bytes only: from a disk 1.6, 1.11, 1.19; cold from S3 1.12 (1.01), 0.84, 0.63;
         warm 4.2 (1.5), 1.10, 1.29. Through fastai, bytes only are 0.44 times as many as litdata and 0.43 to 0.51 times
         as many as mosaicml-streaming. Each byte is fetched once (1.02 times; litdata 1.06 times), with two requests
         per shard, for tar and index, and a few single ranges.

Reason:  this package compares checksums of each sample (7 us for 107 KB) and of each shard that arrives; no other
         loader does. Cold from S3, a request costs about 5 ms of CPU time in botocore and aiohttp, where mosaicml and
         litdata use a client that writes into a file (boto3, and obstore, which is written in Rust); a client of s3fs
         costs 0.09 s once in the main process and in each worker; and a shard is written with fsync before it gets its
         name (0.5 ms of waiting per MB), so that a power failure leaves no partial shard. Another client would be a
         second way to reach storage. fastai's `Datasets` and pipelines cost 0.5 ms per sample, where all else takes
         0.35 ms: half is the dispatch on types of transforms that do nothing for a number or a
         label, which stock fastai pays, too.
         Shards that are fetched ahead wait in buffers, which explains the memory: 60 to 86 MB per worker while they
         arrive and 34 to 60 MB afterwards. webdataset's shuffle buffer takes 83 to 106 MB, litdata 142 and 54 MB,
         mosaicml 37 MB. In some rounds, mosaicml's cold epoch from S3 failed with an IndexError (for a shard that had
         not arrived); those rounds are left out.
"""
import argparse, gc, io, json, multiprocessing, os, resource, socket, statistics, sys, tempfile, threading, time
from functools import partial
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path
from random import Random
from urllib.parse import unquote, urlsplit

import numpy as np
import torch
from fastai.data.core import DataLoaders
from fastai.vision.augment import RandomResizedCrop
from PIL import Image
from torch.utils.data import DataLoader, default_collate

import fastai_remote.block   # adds `from_shards` to `DataLoaders`
from fastai_remote import RemoteDataset, ShardStore, image_samples, s3_options, to_shards
from fastai_remote.core import size_str
from loader import link_images, make_images
from machine import about
from rounds import compare, spread

BS,WORKERS,INTERLEAVE = 64,2,4
UNITS = dict(samples_s='samples/s', samples_cpu_s='samples/CPU s', first_s='first batch, s', open_s='opening, s',
             requests='requests', fetched='bytes fetched / used', worker_mb='worker private, MB')

# The work on a sample: the same for all loaders that have its bytes

_random = Random(0)

def decode(jpeg, rng=_random):
    "What `RandomResizedCrop(224)` does to a JPEG; returns a uint8 tensor of shape (3, 224, 224)"
    image = Image.open(io.BytesIO(jpeg)).convert('RGB')
    width,height = image.size
    region = 0,0,width,height
    for _ in range(10):
        area,ratio = rng.uniform(.08, 1)*width*height,np.exp(rng.uniform(np.log(3/4), np.log(4/3)))
        crop_width,crop_height = round((area*ratio)**.5),round((area/ratio)**.5)
        if crop_width<=width and crop_height<=height:
            x,y = rng.randint(0, width-crop_width),rng.randint(0, height-crop_height)
            region = x,y,x+crop_width,y+crop_height
            break
    image = image.crop(region).resize((224,224), Image.Resampling.BILINEAR, reducing_gap=1)
    return torch.from_numpy(np.array(image)).permute(2,0,1)

class Raw:
    "An image class for fastai that leaves the bytes as they are"
    create = staticmethod(len)

WORKS = {'decoded':decode, 'bytes only':len}

# The server

NO_SUCH_KEY = b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code></Error>'

class Files:
    """A server that shows the files of a folder as S3 does: GET, with ranges, and HEAD

    It runs in a process of its own, which counts requests and bytes. Each answer is delayed by `latency` seconds.
    """
    def __init__(self, folder, latency): self.folder,self.latency = Path(folder),latency

    def __enter__(self):
        self.conn,server_end = multiprocessing.Pipe()
        self.proc = multiprocessing.Process(target=self._run, args=(server_end,), daemon=True)
        self.proc.start()
        server_end.close()
        self.url = f'http://127.0.0.1:{self.conn.recv()}'
        return self

    def __exit__(self, *args):
        self.conn.close()
        self.proc.terminate()
        self.proc.join()

    def count(self):
        "Returns `[requests, bytes]` since the last call"
        self.conn.send(0)
        return self.conn.recv()

    def _run(self, conn):
        self.conn.close()
        self.lock,self.counts = threading.Lock(),[0,0]
        server = socket.create_server(('127.0.0.1', 0), backlog=256)
        def accept():
            while True: threading.Thread(target=self._serve, args=(server.accept()[0],), daemon=True).start()
        threading.Thread(target=accept, daemon=True).start()
        conn.send(server.getsockname()[1])
        while True:
            try: conn.recv()
            except EOFError: return
            with self.lock: counts,self.counts = self.counts,[0,0]
            conn.send(counts)

    def _serve(self, connection):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        received = b''
        try:
            while True:
                while b'\r\n\r\n' not in received:
                    data = connection.recv(1<<16)
                    if not data: return
                    received += data
                head,received = received.split(b'\r\n\r\n', 1)
                time.sleep(self.latency)
                self._answer(connection, *head.decode('latin1').split('\r\n'))
        except OSError: pass
        finally: connection.close()

    def _not_found(self, connection, method):
        body = NO_SUCH_KEY if method=='GET' else b''
        with self.lock: self.counts[0] += 1
        head = b'HTTP/1.1 404 Not Found\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n' % len(body)
        connection.sendall(head+body)

    def _answer(self, connection, first_line, *headers):
        method,target,_ = first_line.split()
        byte_range = next((h.split('=')[1] for h in headers if h.lower().startswith('range:')), None)
        path = self.folder/unquote(urlsplit(target).path).lstrip('/')
        if method not in ('GET','HEAD') or not path.is_file(): return self._not_found(connection, method)
        with open(path, 'rb') as file:
            size = os.fstat(file.fileno()).st_size
            start,stop = 0,size
            if byte_range:
                first,last = byte_range.split('-')
                if first: start,stop = int(first),min(size, int(last)+1 if last else size)
                else: start = max(0, size-int(last))
            lines = [f"HTTP/1.1 {'206 Partial Content' if byte_range else '200 OK'}", f'Content-Length: {stop-start}',
                     'Accept-Ranges: bytes', 'Content-Type: binary/octet-stream', f'ETag: "{size:x}"',
                     'Last-Modified: Sun, 01 Jan 2023 00:00:00 GMT']
            if byte_range: lines.append(f'Content-Range: bytes {start}-{stop-1}/{size}')
            connection.sendall(('\r\n'.join(lines)+'\r\n\r\n').encode())
            with self.lock: self.counts = [self.counts[0]+1,self.counts[1]+(stop-start)*(method=='GET')]
            if method=='HEAD': return
            while start<stop: start += os.sendfile(connection.fileno(), file.fileno(), start, stop-start)

# The contenders: each opens its dataset in `at` and returns something to iterate over, once per epoch. If `at` is a
# server, `cache` is the folder of its cache.

class At:
    "Where the datasets are: a folder, or a server that shows it"
    def __init__(self, folder, server=None): self.folder,self.server = Path(folder),server
    def __call__(self, kind): return f'{self.folder}/b/{kind}' if self.server is None else f's3://b/{kind}'
    @property
    def client(self): return {} if self.server is None else s3_options(self.server.url, 'anyone', 'anything')

def open_store(at, cache):
    "The store of this package. It gets no cache folder for a local disk, because it would use it there as well."
    return ShardStore(at('tars'), cache=cache if at.server else True, storage_options=at.client)

def ours_fastai(at, cache, work, **kwargs):
    tfms = dict(img_cls=Raw) if work is len else dict(item_tfms=RandomResizedCrop(224))
    dls = DataLoaders.from_store(open_store(at, cache), valid_pct=0., interleave=INTERLEAVE, normalize=False, bs=BS,
                                 num_workers=WORKERS, device='cpu', **tfms, **kwargs)
    dls.train.after_batch.fs.clear()   # no conversion to floats, which the other loaders leave to the training loop
    return dls.train

def ours_plain(at, cache, work):
    dataset = RemoteDataset(open_store(at, cache)).to_tuple('jpg', 'cls').map_tuple(work, None)
    return DataLoader(dataset.batched(BS, interleave=INTERLEAVE), batch_size=None, num_workers=WORKERS)

def _s3_open(url, mode='rb', bufsize=8192):
    "A stream of boto3 for webdataset, which does not support S3 by itself"
    import boto3
    bucket,key = url.removeprefix('s3://').split('/', 1)
    return boto3.client('s3').get_object(Bucket=bucket, Key=key)['Body']

def webdataset(at, cache, work, keep=False):
    import webdataset as wds
    wds.gopen_schemes['s3'] = _s3_open
    urls = [f"{at('tars')}/{path.name}" for path in sorted((at.folder/'b/tars').glob('*.tar'))]
    dataset = wds.WebDataset(urls, shardshuffle=len(urls), cache_dir=cache if keep else None, seed=0).shuffle(1000)
    dataset = dataset.map(lambda sample: (work(sample['jpg']),int(sample['cls'])))
    return DataLoader(dataset.batched(BS, collation_fn=default_collate), batch_size=None, num_workers=WORKERS)

def litdata(at, cache, work):
    from litdata import StreamingDataLoader, StreamingDataset, streaming
    streaming.downloader._OBSTORE_CLIENT_OPTIONS['allow_http'] = True   # by default it uses https only
    remote = {}
    if at.server:
        keys = dict(aws_access_key_id='anyone', aws_secret_access_key='anything', region_name='us-east-1')
        remote = dict(cache_dir=cache, storage_options=dict(endpoint_url=at.server.url, **keys))
    dataset = StreamingDataset(at('chunks'), shuffle=True, drop_last=False, max_cache_size='30GB',
                               transform=lambda sample: (work(sample['jpg']),sample['cls']), **remote)
    return StreamingDataLoader(dataset, batch_size=BS, num_workers=WORKERS)

def mosaicml(at, cache, work):
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    clean_stale_shared_memory()
    class Pictures(StreamingDataset):
        def __getitem__(self, i):
            sample = super().__getitem__(i)
            return work(sample['jpg']),sample['cls']
    where = dict(local=at('mds')) if at.server is None else dict(remote=at('mds'), local=cache)
    return StreamingDataLoader(Pictures(shuffle=True, batch_size=BS, **where), batch_size=BS, num_workers=WORKERS)

OURS,PLAIN = 'ours, fastai','ours, plain torch'
WDS,WDS_CACHE,LIT,MDS = 'webdataset','webdataset, cache_dir','litdata','mosaicml-streaming'
CONTENDERS = {OURS:ours_fastai, PLAIN:ours_plain, WDS:webdataset, WDS_CACHE:partial(webdataset, keep=True),
              LIT:litdata, MDS:mosaicml}
MODULES = {WDS:'webdataset', WDS_CACHE:'webdataset', LIT:'litdata', MDS:'streaming'}

# Data

def write_litdata(
    samples, # Of `(bytes of a JPEG, class)`
    to, # Folder to write
    size # Bytes per chunk
):
    from litdata.streaming.writer import BinaryWriter
    writer = BinaryWriter(str(to), chunk_bytes=int(size))
    for i,(jpeg,label) in enumerate(samples): writer[i] = dict(jpg=jpeg, cls=label)
    writer.done()
    writer.merge(1)

def write_mosaicml(
    samples, # Of `(bytes of a JPEG, class)`
    to, # Folder to write
    size # Bytes per shard
):
    from streaming import MDSWriter
    with MDSWriter(out=str(to), columns=dict(jpg='bytes', cls='int'), size_limit=int(size)) as writer:
        for jpeg,label in samples: writer.write(dict(jpg=jpeg, cls=label))

def missing(
    name # Name of a contender
): # A text, or None
    "Why a contender cannot take part, if it cannot"
    try: import_module(MODULES.get(name, 's3fs'))   # before the forks, so that imports are in nobody's opening time
    except ImportError as error: return f'{name}: {error}'

def make_data(
    folder, # Folder of images; None: make some
    to, # Folder to write
    n, # Number of samples
    size, # Shorter side of images that are made, in pixels
    shard # Bytes per shard
): # Number of images, bytes of all samples, and `{contender: reason}` of the contenders without data
    "Write the same `n` images in the formats of all contenders: tars (also for webdataset), chunks and mds"
    source = folder or to/'made'
    if folder is None: make_images(source, n, size)
    n_files = link_images(source, to/'images', n)
    paths = sorted((to/'images').rglob('*.*'))
    vocab,left_out = sorted({path.parent.name for path in paths}),{}
    samples = image_samples(to/'images', label=lambda path: path.parent.name)
    report = to_shards(samples, str(to/'b/tars'), maxsize=shard, num_workers=1, vocab=vocab, progress=False)
    if report.failed: raise ValueError(f'all samples of a benchmark must be converted: {report}')
    def shuffled():
        order = np.random.default_rng(0).permutation(len(paths))
        return ((paths[i].read_bytes(),vocab.index(paths[i].parent.name)) for i in order)
    for name,write,kind in ((LIT,write_litdata,'chunks'),(MDS,write_mosaicml,'mds')):
        if missing(name): continue
        try: in_child(lambda: write(shuffled(), to/'b'/kind, shard))
        except RuntimeError as error: left_out[name] = f'{name}: cannot write: {error}'
    return n_files,sum(path.stat().st_size for path in paths),left_out

# Measurement

def in_child(function, *args):
    """Returns `function(*args)`, called in a forked process

    So no contender inherits the threads, memory or settings of another one. Raises `RuntimeError` if it fails.
    """
    ours,theirs = multiprocessing.Pipe(False)
    def run():
        try: theirs.send((function(*args),None))
        except BaseException as error: theirs.send((None,f'{type(error).__name__}: {str(error).strip()[-300:]}'))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)   # does not wait for threads of the contender
    process = multiprocessing.get_context('fork').Process(target=run)
    process.start()
    theirs.close()
    try: result,error = ours.recv()
    except EOFError: result,error = None,'died'
    process.join()
    if error: raise RuntimeError(error)
    return result

def private_mb(pid):
    "Memory in MB of process `pid` that is neither shared nor only a copy of a file; None if the process has ended"
    try: lines = Path(f'/proc/{pid}/smaps_rollup').read_text().splitlines()
    except OSError: return None
    return sum(int(line.split()[1]) for line in lines if line.startswith('Private_Dirty'))/1000 or None

def cpu_seconds():
    "CPU seconds of this process and of its children that have ended"
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF,resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime+usage.ru_stime for usage in usages)

def epoch(
    dl, # A loader
    measure_memory # Read the memory of the workers at every eighth batch?
): # `{measure: value}`
    "Measure one epoch"
    gc.collect()
    n,first,memory = 0,None,{}
    cpu_before,started = cpu_seconds(),time.perf_counter()
    for k,batch in enumerate(dl):
        n += len(batch[1])
        first = first or time.perf_counter()-started
        if not measure_memory or k%8!=7: continue
        for process in multiprocessing.active_children():
            private = private_mb(process.pid)
            if private: memory[process.pid] = max(private, memory.get(process.pid, 0))
    seconds = time.perf_counter()-started
    for process in multiprocessing.active_children(): process.join(1)   # CPU time counts once they have ended
    return dict(samples_s=n/seconds, samples_cpu_s=n/(cpu_seconds()-cpu_before), first_s=first,
                worker_mb=statistics.mean(memory.values()) if memory else 0., n=n)

def epochs(
    make, # A contender
    at, # Where the data is
    work, # What is done with the bytes of a sample
    nbytes # Bytes of all samples
): # A list of two
    "Measure a cold and a warm epoch"
    with tempfile.TemporaryDirectory(prefix='fr-bench-cache-') as cache:
        torch.manual_seed(0)
        if at.server: at.server.count()
        started = time.perf_counter()
        dl,measured = make(at, cache, work),[]
        opened = time.perf_counter()-started
        for _ in range(2):
            measures = epoch(dl, work is decode)
            requests,fetched = at.server.count() if at.server else (0,0)
            measured.append(dict(measures, open_s=opened, requests=requests, fetched=fetched/nbytes))
        return measured

def run_jobs(jobs, folder, server, rounds, nbytes):
    "Let the contenders take turns; returns `{job: measures of each round}`, with None for a round that failed"
    measured = {job:[] for job in jobs}
    for i in range(rounds):
        for job in jobs[::1 if i%2 else -1]:
            work,place,name = job
            at = At(folder, server if place=='S3' else None)
            try: measured[job].append(in_child(epochs, CONTENDERS[name], at, WORKS[work], nbytes))
            except RuntimeError as error:
                print(f'{job}: {error}', file=sys.stderr)
                measured[job].append(None)
    return measured

def summarise(measured, names):
    "The measures of each kind of epoch, and the ratios of this package to the others"
    results,ratios = {},{}
    for work,place in dict.fromkeys(job[:2] for job in measured):
        for k in range(2):
            group = {name:[epochs and epochs[k] for epochs in measured[work,place,name]] for name in names
                     if any(measured.get((work,place,name), []))}
            title = f'{work}, {place}, epoch {k+1}'
            results[title] = {name:{unit:spread([e[unit] for e in es if e]) for unit in (*UNITS,'n')}
                              for name,es in group.items()}
            units = ('samples_s','samples_cpu_s','first_s')
            def ratio(a, b): return {unit:compare(group[a], group[b], unit) for unit in units}
            ratios[title] = {a:{b:ratio(a, b) for b in group if b not in (OURS,PLAIN)}
                             for a in group if a in (OURS,PLAIN)}
    return results,ratios

def run(
    folder=None, # Folder of images; default: make some
    n:int=1920, # Number of samples; images are used several times if there are fewer
    rounds:int=5, # Timed turns of each contender
    size:int=350, # Shorter side of images that are made, in pixels
    shard:float=8e6, # Bytes per shard
    latency:float=.002, # Delay of the server in seconds
    only:str='', # Part of the names of the contenders
    name:str=None, # Name of the data in the results
)->dict: # Content of the result file
    "Measure the contenders in turns"
    torch.set_num_threads(1)   # threads that wait for a core spin, which would be noise here
    # One tracker for all processes: at its end, a turn's own tracker would unlink the shared memory of the next turn,
    # which has the same name.
    resource_tracker.ensure_running()
    os.environ |= dict(AWS_ACCESS_KEY_ID='anyone', AWS_SECRET_ACCESS_KEY='anything', AWS_DEFAULT_REGION='us-east-1',
                       AWS_REGION='us-east-1')
    with tempfile.TemporaryDirectory(prefix='fr-bench-') as temporary, Files(temporary, latency) as server:
        os.environ |= dict(AWS_ENDPOINT_URL=server.url, S3_ENDPOINT_URL=server.url)
        n_files,nbytes,left_out = make_data(folder, Path(temporary), n, size, shard)
        left_out |= {contender:reason for contender in CONTENDERS if (reason:=missing(contender))}
        for reason in left_out.values(): print(reason, file=sys.stderr)
        names = [contender for contender in CONTENDERS if contender not in left_out and only in contender]
        jobs = [(work,place,contender) for work in WORKS for place in ('disk','S3') for contender in names
                if not (contender==WDS_CACHE and place=='disk')]
        measured = run_jobs(jobs, temporary, server, rounds, nbytes)
        n_shards = len(list((Path(temporary)/'b/tars').glob('*.tar')))
    results,ratios = summarise(measured, names)
    peers = [package for package in ('webdataset','litdata','mosaicml-streaming') if package not in left_out]
    return dict(data=name or f"{Path(folder).name if folder else 'made'}, {n_files} JPEGs", n=n,
                bytes_a_sample=round(nbytes/n), shards=n_shards, shard_bytes=shard, latency_s=latency, rounds=rounds,
                missing=list(left_out.values()), results=results, ratios=ratios,
                **about(None, ' '.join(['torch','fastai','pillow','numpy','s3fs','boto3',*peers])))

def table(result):
    "The lines of a readable table of medians"
    yield (f"{result['data']}: {result['n']} samples of {size_str(result['bytes_a_sample'])} in {result['shards']} "
           f"shards, {result['rounds']} rounds: medians (min to max of samples/s)")
    for title,rows in result['results'].items():
        yield f'\n{title}'
        for name,measures in rows.items():
            median,speed = {unit:measures[unit]['median'] for unit in measures},measures['samples_s']
            yield (f"  {name:24}{median['samples_s']:9,.0f}/s ({speed['min']:,.0f} to {speed['max']:,.0f})  "
                   f"{median['samples_cpu_s']:7,.0f}/CPU s  first {median['first_s']:.2f} s  "
                   f"opening {median['open_s']:.2f} s  requests {median['requests']:5,.0f}  "
                   f"fetched/used {median['fetched']:.2f}  worker {median['worker_mb']:4,.0f} MB  n {median['n']:.0f}")
            ratios = result['ratios'][title].get(name, {})
            cpu = {peer:units['samples_cpu_s'] for peer,units in ratios.items() if units['samples_cpu_s']['median']}
            texts = [f"{r['median']:.2f} ({r['low']:.2f} to {r['high']:.2f}) of {peer}" for peer,r in cpu.items()]
            if texts: yield f"{'':26}per CPU s: {', '.join(texts)}"

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('folder', nargs='?', help='images; default: make some')
    parser.add_argument('--n', type=int, default=1920, help='number of samples')
    parser.add_argument('--rounds', type=int, default=5, help='timed turns of each contender')
    parser.add_argument('--size', type=int, default=350, help='shorter side of images that are made, in pixels')
    parser.add_argument('--shard', type=float, default=8e6, help='bytes per shard')
    parser.add_argument('--latency', type=float, default=.002, help='delay of the server in seconds')
    parser.add_argument('--only', default='', help='part of the names of the contenders')
    parser.add_argument('--name', help='name of the data in the results')
    parser.add_argument('--out', default=Path(__file__).parent/'results'/'shards.json',
                        help='result file; an empty text writes none')
    args = parser.parse_args()
    result = run(args.folder, args.n, args.rounds, args.size, args.shard, args.latency, args.only, args.name)
    result['command'] = (f"python tests/bench/shards.py{' FOLDER' if args.folder else ''} --n {args.n} "
                         f'--rounds {args.rounds} --shard {args.shard:g} --latency {args.latency}'
                         f'{"" if args.folder else f" --size {args.size}"}')
    print('\n'.join(table(result)))
    if args.out: Path(args.out).write_text(json.dumps(result, indent=1)+'\n')
