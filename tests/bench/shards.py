"""Samples from shards: `DataLoaders.from_shards` and `RemoteDataset` beside webdataset, litdata and mosaicml-streaming

Purpose: two epochs, cold cache and warm, over the same JPEG files in each one's own format, with the same bytes a shard; batches of 64, two workers.
From a disk (page cache) and from a server that shows a folder as S3 does, each answer 2 ms late, which counts requests and bytes. "decoded": Pillow
and what `RandomResizedCrop(224)` does, the same code for all but fastai's own transforms in ours; "bytes only": no work on a sample, what loaders
themselves cost. Private memory is what a worker shares with nobody and could not drop (`Private_Dirty`). Each turn is a process of its own, forked;
imports are done before. The contenders take turns in an order that is reversed every round; samples per CPU second (the server's not counted) hold
on a machine with other work, where the wall's do not. webdataset reads the very tars that `to_shards` wrote.

Command: python tests/bench/shards.py [FOLDER] [--n 1920] [--rounds 5] [--shard 8e6]
         without FOLDER it makes photo-like JPEGs; a contender that is not installed (pip install webdataset litdata mosaicml-streaming) is named and left out

Result:  on 330 ImageNet photographs, 1,280 samples, shards of 8 MB, two cores, quiet (results/shards.json). Samples per CPU second, ours without fastai over
         webdataset, litdata, mosaicml-streaming: decoded, cold from S3 1.02 (0.98 with its cache), 0.96, 0.94; warm 1.22 (1.04), 1.00, 1.07. Through fastai
         0.82 to 0.89 cold, 0.88 to 1.08 warm. Bytes only, from a disk: 1.29, 0.65, 0.95; cold S3 0.95, 0.79, 0.55; warm 3.4 (1.24), 0.76, 0.94. First batch
         within 0.1 s of the others. Each byte is fetched once (1.02; litdata 1.06 to 1.18), in two requests a shard, tar and index, and a few single ranges.

Reason:  ours compares checksums: of each sample (27 us of 107 KB), and of each shard that comes; no other does. litdata hands out views of a mapped chunk, we copy. fastai's pipeline of transforms costs 0.5 ms
         a sample beside 2.3 of decoding. A client of s3fs costs 0.09 s of CPU in this process and in each worker, once, of which epochs of 640 samples
         make 0.4 ms each. A shard is fsynced before it has its name (0.5 ms a MB of waiting), so that a power cut leaves no half ones. Shards ahead
         wait in buffers, which is the memory: 100 MB a worker while they come, 49 MB after; webdataset's shuffle buffer 80 to 106, litdata 192 and 43, mosaicml 39.
         mosaicml's cold epoch from S3 failed in some rounds with an IndexError (a shard that was not there yet); those are left out.
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

import fastai_remote.block   # gives `DataLoaders` its `from_shards`
from fastai_remote import RemoteDataset, ShardStore, image_samples, s3_options, to_shards
from fastai_remote.core import size_str
from loader import link_images, make_images
from machine import about

BS,WORKERS,MIX = 64,2,4
UNITS = dict(samples_s='samples/s', samples_cpu_s='samples/CPU s', first_s='first batch, s', open_s='opening, s', requests='requests', fetched='bytes fetched / used', worker_mb='worker private, MB')

# The work: the same for all who have bytes in hand
_rng = Random(0)

def decode(b, rng=_rng):
    "What `RandomResizedCrop(224)` does to a JPEG, as a uint8 tensor"
    im = Image.open(io.BytesIO(b)).convert('RGB')
    (w,h),box = im.size,None
    for _ in range(10):
        area,ratio = rng.uniform(.08, 1)*w*h,np.exp(rng.uniform(np.log(3/4), np.log(4/3)))
        nw,nh = round((area*ratio)**.5),round((area/ratio)**.5)
        if nw<=w and nh<=h:
            x,y = rng.randint(0, w-nw),rng.randint(0, h-nh)
            box = x,y,x+nw,y+nh
            break
    im = im.crop(box or (0,0,w,h)).resize((224,224), Image.Resampling.BILINEAR, reducing_gap=1)
    return torch.from_numpy(np.array(im)).permute(2,0,1)

class Raw:
    "For fastai: an image that is left as it is"
    create = staticmethod(len)

WORKS = {'decoded':decode, 'bytes only':len}

# The server: a folder as S3 shows it to who reads, every answer `latency` late
class Files:
    "Files of `folder` by GET, with ranges, and HEAD, in a process of its own that counts; `count` tells, and begins anew"
    def __init__(self, folder, latency): self.folder,self.latency = Path(folder),latency

    def __enter__(self):
        self.conn,there = multiprocessing.Pipe()
        self.proc = multiprocessing.Process(target=self._run, args=(there,), daemon=True)
        self.proc.start()
        there.close()
        self.url = f'http://127.0.0.1:{self.conn.recv()}'
        return self
    def __exit__(self, *a): self.conn.close(); self.proc.terminate(); self.proc.join()
    def count(self): self.conn.send(0); return self.conn.recv()

    def _run(self, conn):
        self.conn.close()
        self.lock,self.counts,srv = threading.Lock(),[0,0],socket.create_server(('127.0.0.1', 0), backlog=256)
        def accept():
            while True: threading.Thread(target=self._serve, args=(srv.accept()[0],), daemon=True).start()
        threading.Thread(target=accept, daemon=True).start()
        conn.send(srv.getsockname()[1])
        while True:
            try: conn.recv()
            except EOFError: return
            with self.lock: res,self.counts = self.counts,[0,0]
            conn.send(res)

    def _serve(self, s):
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buf = b''
        try:
            while True:
                while b'\r\n\r\n' not in buf:
                    if not (b:=s.recv(1<<16)): return
                    buf += b
                head,buf = buf.split(b'\r\n\r\n', 1)
                time.sleep(self.latency)
                self._answer(s, *head.decode('latin1').split('\r\n'))
        except OSError: pass
        finally: s.close()

    def _answer(self, s, first, *hs):
        (method,target,_),asked = first.split(),next((h.split('=')[1] for h in hs if h.lower().startswith('range:')), None)
        f = self.folder/unquote(urlsplit(target).path).lstrip('/')
        if method not in ('GET','HEAD') or not f.is_file():
            body = b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code></Error>' if method=='GET' else b''
            with self.lock: self.counts[0] += 1
            return s.sendall(b'HTTP/1.1 404 Not Found\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n' % len(body)+body)
        with open(f, 'rb') as o:
            size = os.fstat(o.fileno()).st_size
            a,b = 0,size
            if asked:
                x,y = asked.split('-')
                a,b = (int(x),min(size, int(y)+1 if y else size)) if x else (max(0, size-int(y)),size)
            hs = [f"HTTP/1.1 {'206 Partial Content' if asked else '200 OK'}", f'Content-Length: {b-a}', 'Accept-Ranges: bytes', 'Content-Type: binary/octet-stream',
                  f'ETag: "{size:x}"', 'Last-Modified: Sun, 01 Jan 2023 00:00:00 GMT', *([f'Content-Range: bytes {a}-{b-1}/{size}'] if asked else [])]
            s.sendall(('\r\n'.join(hs)+'\r\n\r\n').encode())
            with self.lock: self.counts = [self.counts[0]+1,self.counts[1]+(b-a)*(method=='GET')]
            while method=='GET' and a<b: a += os.sendfile(s.fileno(), o.fileno(), a, b-a)

# The contenders: each opens its dataset in `at`, with a cache in folder `cache` if that is far, and gives something to loop over once an epoch
class At:
    "Where the datasets are: a folder, or a server"
    def __init__(self, folder, server=None): self.folder,self.server = Path(folder),server
    def __call__(self, kind): return f'{self.folder}/b/{kind}' if self.server is None else f's3://b/{kind}'
    @property
    def client(self): return {} if self.server is None else s3_options(self.server.url, 'anyone', 'anything')

def ours_fastai(at, cache, work, **kw):
    store = ShardStore(at('tars'), cache=cache if at.server else True, storage_options=at.client)   # a folder given would be used on a disk, too
    tfms = dict(img_cls=Raw) if work is len else dict(item_tfms=RandomResizedCrop(224))
    dl = DataLoaders.from_store(store, valid_pct=0., interleave=MIX, normalize=False, bs=BS, num_workers=WORKERS, device='cpu', **tfms, **kw).train
    dl.after_batch.fs.clear()   # to float: the others leave that to whoever trains
    return dl

def ours_plain(at, cache, work):
    ds = RemoteDataset(ShardStore(at('tars'), cache=cache if at.server else True, storage_options=at.client)).to_tuple('jpg', 'cls').map_tuple(work, None)
    return DataLoader(ds.batched(BS, interleave=MIX), batch_size=None, num_workers=WORKERS)

def _s3_open(url, mode='rb', bufsize=8192):
    "WebDataset's own schemes know no S3: a stream of boto3's"
    import boto3
    bucket,key = url.removeprefix('s3://').split('/', 1)
    return boto3.client('s3').get_object(Bucket=bucket, Key=key)['Body']

def webdataset(at, cache, work, keep=False):
    import webdataset as wds
    wds.gopen_schemes['s3'] = _s3_open
    urls = [f"{at('tars')}/{p.name}" for p in sorted((at.folder/'b/tars').glob('*.tar'))]
    ds = wds.WebDataset(urls, shardshuffle=len(urls), cache_dir=cache if keep else None, seed=0).shuffle(1000).map(lambda s: (work(s['jpg']),int(s['cls']))).batched(BS, collation_fn=default_collate)
    return DataLoader(ds, batch_size=None, num_workers=WORKERS)

def litdata(at, cache, work):
    from litdata import StreamingDataLoader, StreamingDataset, streaming
    streaming.downloader._OBSTORE_CLIENT_OPTIONS['allow_http'] = True   # it would speak https only
    far = {} if at.server is None else dict(cache_dir=cache, storage_options=dict(endpoint_url=at.server.url, aws_access_key_id='anyone', aws_secret_access_key='anything', region_name='us-east-1'))
    ds = StreamingDataset(at('chunks'), shuffle=True, drop_last=False, max_cache_size='30GB', transform=lambda s: (work(s['jpg']),s['cls']), **far)
    return StreamingDataLoader(ds, batch_size=BS, num_workers=WORKERS)

def mosaicml(at, cache, work):
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    clean_stale_shared_memory()
    class Pictures(StreamingDataset):
        def __getitem__(self, i): s = super().__getitem__(i); return work(s['jpg']),s['cls']
    where = dict(local=at('mds')) if at.server is None else dict(remote=at('mds'), local=cache)
    return StreamingDataLoader(Pictures(shuffle=True, batch_size=BS, **where), batch_size=BS, num_workers=WORKERS)

OURS,PLAIN,WDS,WDSC,LIT,MDS = 'ours, fastai','ours, plain torch','webdataset','webdataset, cache_dir','litdata','mosaicml-streaming'
CONTENDERS = {OURS:ours_fastai, PLAIN:ours_plain, WDS:webdataset, WDSC:partial(webdataset, keep=True), LIT:litdata, MDS:mosaicml}
MODULES = {WDS:'webdataset', WDSC:'webdataset', LIT:'litdata', MDS:'streaming'}

def write_litdata(samples, to, size):
    from litdata.streaming.writer import BinaryWriter
    w = BinaryWriter(str(to), chunk_bytes=int(size))
    for i,(b,c) in enumerate(samples): w[i] = dict(jpg=b, cls=c)
    w.done()
    w.merge(1)

def write_mosaicml(samples, to, size):
    from streaming import MDSWriter
    with MDSWriter(out=str(to), columns=dict(jpg='bytes', cls='int'), size_limit=int(size)) as w:
        for b,c in samples: w.write(dict(jpg=b, cls=c))

# The measure
def in_child(f, *args):
    "`f(*args)` in a process that is forked for it: nobody inherits another's threads, memory or settings"
    here,there = multiprocessing.Pipe(False)
    def run():
        try: there.send((f(*args),None))
        except BaseException as e: there.send((None,f'{type(e).__name__}: {str(e).strip()[-300:]}'))
        finally:
            sys.stdout.flush(); sys.stderr.flush()
            os._exit(0)   # without waiting for anybody's threads
    p = multiprocessing.get_context('fork').Process(target=run)
    p.start()
    there.close()
    try: res,err = here.recv()
    except EOFError: res,err = None,'died'
    p.join()
    if err: raise RuntimeError(err)
    return res

def private_mb(pid):
    "Memory that process `pid` shares with nobody and that is not just a file's; None if it has gone"
    try: ls = Path(f'/proc/{pid}/smaps_rollup').read_text().splitlines()
    except OSError: return None
    return sum(int(l.split()[1]) for l in ls if l.startswith('Private_Dirty'))/1000 or None

def cpu_seconds():
    "Of this process, and of its children that have ended"
    us = [resource.getrusage(w) for w in (resource.RUSAGE_SELF,resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime+u.ru_stime for u in us)

def epochs(make, at, work, nbytes):
    "Two epochs: cold and warm"
    with tempfile.TemporaryDirectory(prefix='fr-bench-cache-') as cache:
        torch.manual_seed(0)
        if at.server: at.server.count()
        t0 = time.perf_counter()
        dl,res = make(at, cache, work),[]
        opened = time.perf_counter()-t0
        for e in range(2):
            gc.collect()
            n,first,mem,cpu,t0 = 0,None,{},cpu_seconds(),time.perf_counter()
            for k,b in enumerate(dl):
                n,first = n+len(b[1]),first or time.perf_counter()-t0
                if work is decode and k%8==7:
                    for p in multiprocessing.active_children():
                        if m:=private_mb(p.pid): mem[p.pid] = max(m, mem.get(p.pid, 0))
            wall = time.perf_counter()-t0
            for p in multiprocessing.active_children(): p.join(1)
            reqs,got = at.server.count() if at.server else (0,0)
            res.append(dict(samples_s=n/wall, samples_cpu_s=n/(cpu_seconds()-cpu), first_s=first, open_s=opened, requests=reqs, fetched=got/nbytes, worker_mb=statistics.mean(mem.values()) if mem else 0., n=n))
        return res

def missing(name):
    "Why contender `name` cannot be had, if so"
    try: import_module(MODULES.get(name, 's3fs'))   # here, before the forks: imports are nobody's opening time
    except ImportError as e: return f'{name}: {e}'

def make_data(folder, to, n, size, shard):
    "The same `n` images in everybody's format: tars (ours, webdataset), chunks, mds; what there was of them, bytes of all images, and who is missing"
    src = folder or to/'made'
    if folder is None: make_images(src, n, size)
    have = link_images(src, to/'images', n)
    paths = sorted((to/'images').rglob('*.*'))
    vocab,gone = sorted({p.parent.name for p in paths}),{}
    b = to/'b'
    rep = to_shards(image_samples(to/'images', label=lambda p: p.parent.name), str(b/'tars'), maxsize=shard, num_workers=1, vocab=vocab, progress=False)
    if rep.failed: raise ValueError(f'these should all do: {rep}')
    def samples():
        order = np.random.default_rng(0).permutation(len(paths))
        return ((paths[i].read_bytes(),vocab.index(paths[i].parent.name)) for i in order)
    for k,f,d in ((LIT,write_litdata,'chunks'),(MDS,write_mosaicml,'mds')):
        if missing(k): continue
        try: in_child(lambda: f(samples(), b/d, shard))
        except RuntimeError as e: gone[k] = f'{k}: cannot write: {e}'
    return have,sum(p.stat().st_size for p in paths),gone

def run(
    folder=None, # Images; default: make some
    n:int=1920, # How many, by using them again if need be
    rounds:int=5, # Timed turns of each contender
    size:int=350, # Shorter side of images that are made, pixels
    shard:float=8e6, # Bytes a shard
    latency:float=.002, # Of the server, seconds
    only:str='', # Part of the contenders' names
    name:str=None, # What to call the data
)->dict: # What goes into the results file
    "Time the contenders in turns"
    torch.set_num_threads(1)   # threads that wait for a core spin, which is noise here
    resource_tracker.ensure_running()   # one for all: a tracker of its own, as a turn ends, would unlink the next turn's shared memory of the same name
    os.environ |= dict(AWS_ACCESS_KEY_ID='anyone', AWS_SECRET_ACCESS_KEY='anything', AWS_DEFAULT_REGION='us-east-1', AWS_REGION='us-east-1')
    with tempfile.TemporaryDirectory(prefix='fr-bench-') as d, Files(d, latency) as server:
        os.environ |= dict(AWS_ENDPOINT_URL=server.url, S3_ENDPOINT_URL=server.url)
        have,nbytes,gone = make_data(folder, Path(d), n, size, shard)
        gone |= {k:w for k in CONTENDERS if (w:=missing(k))}
        for w in gone.values(): print(w, file=sys.stderr)
        who = [k for k in CONTENDERS if k not in gone and only in k]
        jobs = [(work,place,k) for work in WORKS for place in ('disk','S3') for k in who if not (k==WDSC and place=='disk')]
        res = {j:[] for j in jobs}
        for r in range(rounds):
            for j in jobs[::1 if r%2 else -1]:
                work,place,k = j
                try: res[j].append(in_child(epochs, CONTENDERS[k], At(d, server if place=='S3' else None), WORKS[work], nbytes))
                except RuntimeError as e:
                    print(f'{j}: {e}', file=sys.stderr)
                    res[j].append(None)
        shards = len(list((Path(d)/'b/tars').glob('*.tar')))
    out,ratios = {},{}
    for work,place in dict.fromkeys(j[:2] for j in jobs):
        for e in range(2):
            g = {k:[x and x[e] for x in res[work,place,k]] for k in who if any(res.get((work,place,k), []))}
            out[c:=f'{work}, {place}, epoch {e+1}'] = {k:{u:spread([x[u] for x in xs if x]) for u in (*UNITS,'n')} for k,xs in g.items()}
            def ratio(a, b, u): return round(statistics.median(r), 2) if (r:=[x[u]/y[u] for x,y in zip(g[a], g[b]) if x and y]) else None
            ratios[c] = {a:{b:{u:ratio(a, b, u) for u in ('samples_s','samples_cpu_s','first_s')} for b in g if b not in (OURS,PLAIN)} for a in g if a in (OURS,PLAIN)}
    return dict(data=name or f"{Path(folder).name if folder else 'made'}, {have} JPEGs", n=n, bytes_a_sample=round(nbytes/n), shards=shards, shard_bytes=shard, latency_s=latency, rounds=rounds,
                missing=list(gone.values()), results=out, ratios=ratios, **about(None, ' '.join(['torch','fastai','pillow','numpy','s3fs','boto3',*(k for k in ('webdataset','litdata','mosaicml-streaming') if k not in gone)])))

def spread(vs):
    def r(v): return round(v, 3) if v<100 else round(v, 1)
    return dict(median=r(statistics.median(vs)), min=r(min(vs)), max=r(max(vs)))

def table(res):
    "`res` for reading: medians"
    yield f"{res['data']}: {res['n']} samples of {size_str(res['bytes_a_sample'])} in {res['shards']} shards, {res['rounds']} rounds: medians (min to max of samples/s)"
    for what,rows in res['results'].items():
        yield f'\n{what}'
        for k,o in rows.items():
            m = {u:o[u]['median'] for u in o}
            rs = ', '.join(f"{r['samples_cpu_s']:.2f} of {p}" for p,r in res['ratios'][what].get(k, {}).items() if r['samples_cpu_s'])
            yield f"  {k:24}{m['samples_s']:9,.0f}/s ({o['samples_s']['min']:,.0f} to {o['samples_s']['max']:,.0f})  {m['samples_cpu_s']:7,.0f}/CPU s  first {m['first_s']:.2f} s  opening {m['open_s']:.2f} s  requests {m['requests']:5,.0f}  fetched/used {m['fetched']:.2f}  worker {m['worker_mb']:4,.0f} MB  n {m['n']:.0f}"
            if rs: yield f"{'':26}per CPU s: {rs}"

if __name__=='__main__':
    ap = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    ap.add_argument('folder', nargs='?', help='images; default: make some')
    ap.add_argument('--n', type=int, default=1920, help='samples')
    ap.add_argument('--rounds', type=int, default=5, help='timed turns of each')
    ap.add_argument('--size', type=int, default=350, help='shorter side of images that are made')
    ap.add_argument('--shard', type=float, default=8e6, help='bytes a shard')
    ap.add_argument('--latency', type=float, default=.002, help='of the server, seconds')
    ap.add_argument('--only', default='', help="part of the contenders' names")
    ap.add_argument('--name', help='what the results call the data')
    ap.add_argument('--out', default=Path(__file__).parent/'results'/'shards.json', help='results file; an empty one writes none')
    a = ap.parse_args()
    res = run(a.folder, a.n, a.rounds, a.size, a.shard, a.latency, a.only, a.name)
    res['command'] = f"python tests/bench/shards.py{' FOLDER' if a.folder else ''} --n {a.n} --rounds {a.rounds} --shard {a.shard:g} --latency {a.latency}" + ('' if a.folder else f' --size {a.size}')
    print('\n'.join(table(res)))
    if a.out: Path(a.out).write_text(json.dumps(res, indent=1)+'\n')
