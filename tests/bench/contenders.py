"""Who takes part in peers.py: each is given the same pictures in its own format, and gives something to loop over, once an epoch

All end at the same place: a batch in the main process is float32, (64, 3, 224, 224), in [0,1], with int64 labels; or, asked for, still uint8.
Crops are drawn as fastai draws them. Peers without fastai come twice: with Pillow, and with `fast`, the fast decoder that is the same for all.
"""
import io, json, math, os, random
from contextlib import redirect_stderr
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import redis
import torch
from fastai.data.block import CategoryBlock, DataBlock
from fastai.data.core import DataLoaders
from fastai.data.transforms import RandomSplitter
from fastai.vision.augment import FlipItem, RandomResizedCrop
from fastai.vision.core import PILImageBW
from fastai.vision.data import ImageBlock, ImageDataLoaders
from PIL import Image
from torch.utils.data import DataLoader, default_collate

import fastai_remote.block   # gives `DataLoaders` its `from_redis` and `from_shards`
from fastai_remote.codec.pixels import JpegSource, jpeg_header, read_pixels

BS,WORKERS,SIZE = 64,2,224

# The work: a JPEG to (SIZE, SIZE, 3) uint8
def box(w, h):
    "Where `RandomResizedCrop` crops a picture of `w` x `h`: x, y, width, height"
    for _ in range(10):
        area,ratio = random.uniform(.08, 1)*w*h,math.exp(random.uniform(math.log(3/4), math.log(4/3)))
        cw,ch = round(math.sqrt(area*ratio)),round(math.sqrt(area/ratio))
        if cw<=w and ch<=h: return random.randint(0, w-cw),random.randint(0, h-ch),cw,ch
    cw,ch = (w,int(w*4/3)) if w/h<3/4 else (int(h*4/3),h) if w/h>4/3 else (w,h)
    return (w-cw)//2,(h-ch)//2,cw,ch

def pillow(b, box, size, flip):
    "`fast`, as Pillow does it"
    im = Image.open(io.BytesIO(b)).convert('RGB')
    x,y,w,h = box(*im.size)
    im = im.crop((x,y,x+w,y+h)).resize((size,size), Image.Resampling.BILINEAR, reducing_gap=1)
    return torch.from_numpy(np.array(im.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else im))

def fast(
    b, # A JPEG
    box, # Of its width and height: x, y, width, height of the crop
    size, # Pixels a side
    flip, # Left to right?
): # uint8, shape (3, size, size)
    "What ours does with a JPEG, for every peer: its region alone is decoded, resized and turned in C, where that could be compiled"
    w,h,_ = jpeg_header(b)
    x,y,cw,ch = box(w, h)
    return torch.from_numpy(read_pixels(JpegSource(b, (w,h), 3), (x,y,x+cw,y+ch), (size,size), orientation=(False,flip,False)))

class Work:
    "A JPEG to pixels, with `decode`"
    def __init__(self, decode): self.decode = decode
    def __call__(self, b): return self.decode(b, box, SIZE, random.random()<.5)

def finish(x, y, floats=True):
    "What is left of a batch for the main process: pixels of shape (n, h, w, 3) to (n, 3, h, w), and to floats"
    if getattr(x, 'dtype', None)!=torch.uint8: return x,y   # fastai's `IntToFloatTensor` has seen to it, or there are no pixels
    if x.shape[-1]==3: x = x.permute(0, 3, 1, 2)
    return x.float().div_(255) if floats else x,y.squeeze(-1) if y.ndim==2 else y

# Through fastai
class At:
    "Where the data is: a folder, a Redis server, the labels, what a sample takes; and whether batches end as floats"
    def __init__(self, folder, url, floats=True): self.folder,self.url,self.floats,self.vocab,self.nbytes = Path(folder),url,floats,[],{}
    def __truediv__(self, o): return self.folder/o

FASTAI = dict(valid_pct=1e-9, bs=BS, num_workers=WORKERS, device='cpu')   # no validation; 0 has a meaning of its own in `from_folder`
CROP = dict(item_tfms=[RandomResizedCrop(SIZE),FlipItem()])

OURS = dict(num_workers=0, threads=WORKERS)   # what ours is given for photographs and strokes: its own best settings, as many threads as others have processes
FORKED = dict(num_workers=WORKERS, threads=0)   # and with processes, as fastai's own: for PNG and digits, whose making is Python's work, the best
ALONE = dict(num_workers=0, threads=0)

def _train(at, dls):
    if not at.floats: dls.train.after_batch.fs.clear()
    return dls.train

def stock(at, images='images', **kw): return _train(at, ImageDataLoaders.from_folder(at/images, **FASTAI, **kw))
def ours_redis(at, ds, **kw): return _train(at, DataLoaders.from_redis(at.url, ds, normalize=False, **{**FASTAI, **OURS, **kw}))
def ours_shards(at, **kw): return _train(at, DataLoaders.from_shards(str(at/'tars'), normalize=False, **{**FASTAI, **OURS, **kw}))

class _Get:
    "The array of key `name:i`, with a GET"
    def __init__(self, url, name): self.url,self.name,self.pid = url,name,None
    def __call__(self, i):
        if self.pid!=os.getpid(): self.c,self.pid = redis.Redis.from_url(self.url),os.getpid()
        return np.load(io.BytesIO(self.c.get(f'{self.name}:{i}')))['arr_0']

def forum(at, ds, **kw):
    "The forum post's recipe: `np.savez_compressed` arrays, a GET each; labels out of a list, which is kinder than the post's own key for each"
    ys = json.loads((at/f'{ds}.json').read_text())
    db = DataBlock((ImageBlock,CategoryBlock), get_items=lambda o: list(range(len(ys))), get_x=_Get(at.url, ds), get_y=lambda i: ys[i], splitter=RandomSplitter(0.), **kw)
    return _train(at, db.dataloaders(None, bs=BS, num_workers=WORKERS, device='cpu'))

# Without fastai
def _loader(ds, **kw): return DataLoader(ds, BS, num_workers=WORKERS, **{'shuffle':True, 'drop_last':True, **kw})

def torchvision(at, work):
    from torchvision.datasets import ImageFolder
    return _loader(ImageFolder(at/'images', transform=work, loader=lambda p: Path(p).read_bytes()))

def webdataset(at, work):
    import webdataset as wds
    urls = sorted(map(str, (at/'tars').glob('*.tar')))
    ds = wds.WebDataset(urls, shardshuffle=len(urls), seed=0).shuffle(1000).map(lambda s: (work(s['jpg']),int(s['cls'])))
    return DataLoader(ds.batched(BS, collation_fn=default_collate, partial=False), batch_size=None, num_workers=WORKERS)

def wids(at, work):
    from wids import ChunkedSampler, ShardListDataset
    shards = [dict(url=str(at/'tars'/s['name']), nsamples=s['n']) for s in json.loads((at/'wids.json').read_text())]
    with redirect_stderr(io.StringIO()):   # it tells what it opens
        ds = ShardListDataset(shards, cache_dir=str(at/'tars'), keep=True, lru_size=len(shards), transformations=[lambda s: (work(s['.jpg'].read()),int(s['.cls'].read()))])
    return _loader(ds, sampler=ChunkedSampler(ds, chunksize=1000, shuffle=True, shufflefirst=True), shuffle=None)

def litdata(at, work):
    from litdata import StreamingDataLoader, StreamingDataset
    ds = StreamingDataset(str(at/'chunks'), shuffle=True, drop_last=False, max_cache_size='30GB', transform=lambda s: (work(s['jpg']),s['cls']))
    return StreamingDataLoader(ds, batch_size=BS, num_workers=WORKERS, drop_last=True)

def mosaicml(at, work):
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    clean_stale_shared_memory()
    class Pictures(StreamingDataset):
        def __getitem__(self, i): s = super().__getitem__(i); return work(s['jpg']),s['cls']
    return StreamingDataLoader(Pictures(local=str(at/'mds'), shuffle=True, batch_size=BS), batch_size=BS, num_workers=WORKERS, drop_last=True)

def huggingface(at, work):
    from datasets import load_from_disk
    ds = load_from_disk(at/'arrow')
    ds.set_transform(lambda o: {'x':[work(im['bytes']) for im in o['jpg']], 'y':o['cls']})
    return _loader(ds, collate_fn=lambda os: (torch.stack([o['x'] for o in os]),torch.tensor([o['y'] for o in os])))

def ffcv(at, name):
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage
    return Loader(str(at/f'{name}.beton'), batch_size=BS, num_workers=WORKERS, order=OrderOption.RANDOM, os_cache=True, drop_last=True, pipelines=dict(
        image=[RandomResizedCropRGBImageDecoder((SIZE,SIZE)), RandomHorizontalFlip(), ToTensor(), ToTorchImage(convert_back_int16=False)], label=[IntDecoder(), ToTensor()]))

class spdl:
    "Threads of one process"
    def __init__(self, at, work):
        self.work = work
        self.files = [(p,at.vocab.index(p.parent.name)) for p in sorted((at/'images').rglob('*.*'))]
    def load(self, o): return self.work(o[0].read_bytes()),o[1]
    def __iter__(self):
        from spdl.pipeline import PipelineBuilder
        p = (PipelineBuilder().add_source(random.sample(self.files, len(self.files))).pipe(self.load, concurrency=WORKERS)
             .aggregate(BS, drop_last=True).pipe(default_collate).add_sink(3).build(num_threads=WORKERS, max_failures=0))
        with p.auto_stop(): yield from p.get_iterator(timeout=60)

def spdl_decode(b, box, size, flip):
    "`fast`, as SPDL's own FFmpeg does it"
    import spdl.io
    p = spdl.io.demux_image(b)
    x,y,w,h = box(p.width, p.height)
    f = f"crop={w}:{h}:{x}:{y}:exact=1,scale={size}:{size}:flags=bilinear,{'hflip,' if flip else ''}format=pix_fmts=rgb24"
    return spdl.io.to_torch(spdl.io.convert_frames(spdl.io.decode_packets(p, filter_desc=f)))

class limit:
    "The work alone, over bytes in RAM; in two processes, each does half"
    elsewhere = 0   # samples of the other process
    def __init__(self, at, work, procs=1): self.bs,self.work,self.procs,self.floats = [p.read_bytes() for p in (at/'images').rglob('*.*')],work,procs,at.floats
    def batches(self, k):
        for i in range(k*BS, len(self.bs)-BS+1, self.procs*BS): yield torch.stack([self.work(b) for b in self.bs[i:i+BS]]),torch.zeros(BS, dtype=torch.int64)
    def __iter__(self):
        if self.procs==1: yield from self.batches(0); return
        self.elsewhere = BS*len(range(BS, len(self.bs)-BS+1, 2*BS))
        if not (pid:=os.fork()):
            try:
                for b in self.batches(1): finish(*b, self.floats)
            finally: os._exit(0)
        yield from self.batches(0)
        os.waitpid(pid, 0)

# Names, what a name needs besides torch and fastai, and who makes it
STOCK,FORUM,REDIS,SHARDS = 'stock fastai, files','forum recipe','ours, from_redis','ours, from_shards'
REDIS2,SHARDS2 = 'ours, from_redis, processes','ours, from_shards, processes'
SMALL,PIXELS = 'ours, from_redis, shrink(256)','ours, from_redis, pixels of 256'
FFCV,RAW,LIMIT,LIMIT2 = 'FFCV, JPEG','FFCV, pixels of 256','decode and crop alone','decode and crop alone, two processes'
_peers = {'torchvision ImageFolder':('torchvision',torchvision), 'webdataset':('webdataset',webdataset), 'wids':('wids',wids), 'litdata':('litdata',litdata),
          'mosaicml-streaming':('streaming',mosaicml), 'HuggingFace datasets':('datasets',huggingface), 'SPDL':('spdl.pipeline',spdl)}
PHOTOS = {REDIS:(None,partial(ours_redis, ds='photos', **CROP)), SHARDS:(None,partial(ours_shards, **CROP)),
          REDIS2:(None,partial(ours_redis, ds='photos', **CROP, **FORKED)), SHARDS2:(None,partial(ours_shards, **CROP, **FORKED)),
          STOCK:(None,partial(stock, **CROP)), FORUM:(None,partial(forum, ds='photos-npz', **CROP)),
          **{f'{k}, {n}':(m,partial(f, work=Work(w))) for k,(m,f) in _peers.items() for n,w in (('Pillow',pillow),('fast',fast))},
          'SPDL, its own decoder':('spdl.io',partial(spdl, work=Work(spdl_decode))), FFCV:('ffcv.loader',partial(ffcv, name='jpg')),
          LIMIT:(None,partial(limit, work=Work(fast))), LIMIT2:(None,partial(limit, work=Work(fast), procs=2)),
          SMALL:(None,partial(ours_redis, ds='photos-small', **CROP)), PIXELS:(None,partial(ours_redis, ds='photos-pixels', **CROP)),
          RAW:('ffcv.loader',partial(ffcv, name='raw'))}
BW = dict(img_cls=PILImageBW)
STROKES,STROKES1,PNG,STOCK1 = 'ours, strokes','ours, strokes, one channel','ours, PNG','stock fastai, files, one channel'
STROKES2,STROKES3,ARRAYS,ARRAYS2 = 'ours, strokes, one channel, processes','ours, strokes, processes','ours, arrays','ours, arrays, in process'
DRAWINGS = {STROKES:(None,partial(ours_redis, ds='strokes')), STROKES1:(None,partial(ours_redis, ds='strokes', **BW)), STROKES3:(None,partial(ours_redis, ds='strokes', **FORKED)),
            STROKES2:(None,partial(ours_redis, ds='strokes', **BW, **FORKED)), PNG:(None,partial(ours_redis, ds='drawings', **FORKED)),
            STOCK:(None,partial(stock, images='drawings')), STOCK1:(None,partial(stock, images='drawings', **BW)), FORUM:(None,partial(forum, ds='drawings-npz'))}
DIGITS = {PNG:(None,partial(ours_redis, ds='digits', **FORKED)), ARRAYS:(None,partial(ours_redis, ds='digits-arrays', **FORKED)), ARRAYS2:(None,partial(ours_redis, ds='digits-arrays', **ALONE)),
          STOCK:(None,partial(stock, images='digits')), FORUM:(None,partial(forum, ds='digits-npz'))}

def lacks(module):
    "Why `module` cannot be had, if so"
    try: module and import_module(module)
    except Exception as e: return f'{type(e).__name__}: {e}'
