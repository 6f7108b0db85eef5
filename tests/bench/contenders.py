"""The loaders that take part in peers.py: each reads the same images in its own format

Purpose: each contender is a function that returns something to iterate over, once per epoch. All of them end at the
         same point: a batch in the main process that is float32, (64, 3, 224, 224), in [0,1], with int64 labels. On
         request the images stay uint8. Crops are drawn at random in the same way as fastai does. Loaders without
         fastai take part twice, with Pillow and with `fast`, the decoder of this package. This module has no command
         of its own.
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

import fastai_remote.block   # adds `from_redis` and `from_shards` to `DataLoaders`
from fastai_remote.codec.pixels import JpegSource, jpeg_header, PixelPlan

BS,WORKERS,SIZE = 64,2,224

# The work on a sample: from a JPEG to (SIZE, SIZE, 3) uint8

def random_crop(width, height):
    "The crop of `RandomResizedCrop` for an image of this size: x, y, width, height"
    for _ in range(10):
        area = random.uniform(.08, 1)*width*height
        ratio = math.exp(random.uniform(math.log(3/4), math.log(4/3)))
        crop_width,crop_height = round(math.sqrt(area*ratio)),round(math.sqrt(area/ratio))
        if crop_width<=width and crop_height<=height:
            return random.randint(0, width-crop_width),random.randint(0, height-crop_height),crop_width,crop_height
    if width/height<3/4: crop_width,crop_height = width,int(width*4/3)
    elif width/height>4/3: crop_width,crop_height = int(height*4/3),height
    else: crop_width,crop_height = width,height
    return (width-crop_width)//2,(height-crop_height)//2,crop_width,crop_height

def pillow(jpeg, crop, size, flip):
    "The same as `fast`, with Pillow; returns uint8 of shape (size, size, 3)"
    image = Image.open(io.BytesIO(jpeg)).convert('RGB')
    x,y,width,height = crop(*image.size)
    image = image.crop((x,y,x+width,y+height)).resize((size,size), Image.Resampling.BILINEAR, reducing_gap=1)
    return torch.from_numpy(np.array(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else image))

def fast(
    jpeg, # Bytes of a JPEG
    crop, # `crop(width, height)` returns x, y, width and height of the crop
    size, # Width and height of the result in pixels
    flip, # Flip it from left to right?
): # uint8, shape (3, size, size)
    """Decode a JPEG as this package does, for any contender

    Only the region of the crop is decoded. It is resized and flipped in C, if the C modules could be compiled.
    """
    width,height,_ = jpeg_header(jpeg)
    x,y,crop_width,crop_height = crop(width, height)
    region = (x,y,x+crop_width,y+crop_height)
    source = JpegSource(jpeg, (width,height), 3)
    return torch.from_numpy(PixelPlan(source, region, (size,size), orientation=(False,flip,False)).pixels())

class Work:
    "What a loader without fastai does with the bytes of a JPEG: decode, crop, resize, flip"
    def __init__(self, decode): self.decode = decode
    def __call__(self, jpeg): return self.decode(jpeg, random_crop, SIZE, random.random()<.5)

def finish(
    x, # Images of a batch, shape (n, h, w, 3) or (n, 3, h, w)
    y, # Labels
    floats=True # Convert the images to floats?
):
    "What remains to be done in the main process: returns images of shape (n, 3, h, w), and labels"
    if getattr(x, 'dtype', None)!=torch.uint8: return x,y   # already floats by `IntToFloatTensor`, or no pixels
    if x.shape[-1]==3: x = x.permute(0, 3, 1, 2)
    return x.float().div_(255) if floats else x,y.squeeze(-1) if y.ndim==2 else y

# Through fastai

class At:
    "Where the data is"
    def __init__(self,
        folder, # Of the files
        url, # Of the Redis server
        floats=True # Do batches end as floats?
    ):
        self.folder,self.url,self.floats = Path(folder),url,floats
        self.vocab,self.nbytes = [],{}   # sorted labels, and bytes per sample of each dataset
    def __truediv__(self, name): return self.folder/name

# There is no validation set; 0 would mean something else in `from_folder`.
FASTAI = dict(valid_pct=1e-9, bs=BS, num_workers=WORKERS, device='cpu')
CROP = dict(item_tfms=[RandomResizedCrop(SIZE),FlipItem()])

# For photographs and strokes, this package runs with its best settings: as many threads as others have processes.
OURS = dict(num_workers=0, threads=WORKERS)
# With processes, as stock fastai has them, for small pictures, where much of the work is Python code.
FORKED = dict(num_workers=WORKERS, threads=0)
ALONE = dict(num_workers=0, threads=0)

def _train(at, dls):
    if not at.floats: dls.train.after_batch.fs.clear()
    return dls.train

def stock(at, images='images', **kwargs):
    return _train(at, ImageDataLoaders.from_folder(at/images, **FASTAI, **kwargs))

def ours_redis(at, dataset, **kwargs):
    return _train(at, DataLoaders.from_redis(at.url, dataset, normalize=False, **{**FASTAI, **OURS, **kwargs}))

def ours_shards(at, **kwargs):
    return _train(at, DataLoaders.from_shards(str(at/'tars'), normalize=False, **{**FASTAI, **OURS, **kwargs}))

class _Get:
    "Reads the array of key `name:i` with a GET; connects once per process"
    def __init__(self, url, name): self.url,self.name,self.pid = url,name,None
    def __call__(self, i):
        if self.pid!=os.getpid(): self.client,self.pid = redis.Redis.from_url(self.url),os.getpid()
        return np.load(io.BytesIO(self.client.get(f'{self.name}:{i}')))['arr_0']

def forum(at, dataset, **kwargs):
    """The recipe of the forum post: arrays of `np.savez_compressed`, one GET each

    Labels come from a list, which is faster than the post's own key for each label.
    """
    labels = json.loads((at/f'{dataset}.json').read_text())
    dblock = DataBlock((ImageBlock,CategoryBlock), get_items=lambda source: list(range(len(labels))),
                       get_x=_Get(at.url, dataset), get_y=lambda i: labels[i], splitter=RandomSplitter(0.), **kwargs)
    return _train(at, dblock.dataloaders(None, bs=BS, num_workers=WORKERS, device='cpu'))

# Without fastai

def _loader(dataset, **kwargs):
    return DataLoader(dataset, BS, num_workers=WORKERS, **{'shuffle':True, 'drop_last':True, **kwargs})

def torchvision(at, work):
    from torchvision.datasets import ImageFolder
    return _loader(ImageFolder(at/'images', transform=work, loader=lambda path: Path(path).read_bytes()))

def webdataset(at, work):
    import webdataset as wds
    urls = sorted(map(str, (at/'tars').glob('*.tar')))
    dataset = wds.WebDataset(urls, shardshuffle=len(urls), seed=0).shuffle(1000)
    dataset = dataset.map(lambda sample: (work(sample['jpg']),int(sample['cls'])))
    dataset = dataset.batched(BS, collation_fn=default_collate, partial=False)
    return DataLoader(dataset, batch_size=None, num_workers=WORKERS)

def wids(at, work):
    from wids import ChunkedSampler, ShardListDataset
    tars = json.loads((at/'wids.json').read_text())
    shards = [dict(url=str(at/'tars'/tar['name']), nsamples=tar['n']) for tar in tars]
    def transform(sample): return work(sample['.jpg'].read()),int(sample['.cls'].read())
    with redirect_stderr(io.StringIO()):   # it prints what it opens
        dataset = ShardListDataset(shards, cache_dir=str(at/'tars'), keep=True, lru_size=len(shards),
                                   transformations=[transform])
    sampler = ChunkedSampler(dataset, chunksize=1000, shuffle=True, shufflefirst=True)
    return _loader(dataset, sampler=sampler, shuffle=None)

def litdata(at, work):
    from litdata import StreamingDataLoader, StreamingDataset
    dataset = StreamingDataset(str(at/'chunks'), shuffle=True, drop_last=False, max_cache_size='30GB',
                               transform=lambda sample: (work(sample['jpg']),sample['cls']))
    return StreamingDataLoader(dataset, batch_size=BS, num_workers=WORKERS, drop_last=True)

def mosaicml(at, work):
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    clean_stale_shared_memory()
    class Pictures(StreamingDataset):
        def __getitem__(self, i):
            sample = super().__getitem__(i)
            return work(sample['jpg']),sample['cls']
    dataset = Pictures(local=str(at/'mds'), shuffle=True, batch_size=BS)
    return StreamingDataLoader(dataset, batch_size=BS, num_workers=WORKERS, drop_last=True)

def huggingface(at, work):
    from datasets import load_from_disk
    dataset = load_from_disk(at/'arrow')
    dataset.set_transform(lambda rows: {'x':[work(image['bytes']) for image in rows['jpg']], 'y':rows['cls']})
    def collate(samples):
        return torch.stack([sample['x'] for sample in samples]),torch.tensor([sample['y'] for sample in samples])
    return _loader(dataset, collate_fn=collate)

def ffcv(at, name):
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage
    image = [RandomResizedCropRGBImageDecoder((SIZE,SIZE)), RandomHorizontalFlip(), ToTensor(),
             ToTorchImage(convert_back_int16=False)]
    pipelines = dict(image=image, label=[IntDecoder(), ToTensor()])
    return Loader(str(at/f'{name}.beton'), batch_size=BS, num_workers=WORKERS, order=OrderOption.RANDOM, os_cache=True,
                  drop_last=True, pipelines=pipelines)

class spdl:
    "SPDL, which uses threads of one process"
    def __init__(self, at, work):
        self.work = work
        self.files = [(path,at.vocab.index(path.parent.name)) for path in sorted((at/'images').rglob('*.*'))]
    def load(self, file):
        path,label = file
        return self.work(path.read_bytes()),label
    def __iter__(self):
        from spdl.pipeline import PipelineBuilder
        builder = PipelineBuilder().add_source(random.sample(self.files, len(self.files)))
        builder = builder.pipe(self.load, concurrency=WORKERS).aggregate(BS, drop_last=True).pipe(default_collate)
        pipeline = builder.add_sink(3).build(num_threads=WORKERS, max_failures=0)
        with pipeline.auto_stop(): yield from pipeline.get_iterator(timeout=60)

def spdl_decode(jpeg, crop, size, flip):
    "The same as `fast`, with SPDL's own FFmpeg"
    import spdl.io
    packets = spdl.io.demux_image(jpeg)
    x,y,width,height = crop(packets.width, packets.height)
    filters = [f'crop={width}:{height}:{x}:{y}:exact=1', f'scale={size}:{size}:flags=bilinear', *['hflip']*flip,
               'format=pix_fmts=rgb24']
    frames = spdl.io.decode_packets(packets, filter_desc=','.join(filters))
    return spdl.io.to_torch(spdl.io.convert_frames(frames))

class limit:
    "Only the work, over bytes in memory; with two processes, each does half of it"
    elsewhere = 0   # samples of the other process
    def __init__(self, at, work, procs=1):
        self.jpegs = [path.read_bytes() for path in (at/'images').rglob('*.*')]
        self.work,self.procs,self.floats = work,procs,at.floats

    def starts(self, k): return range(k*BS, len(self.jpegs)-BS+1, self.procs*BS)
    def batches(self, k):
        "The batches of process `k`"
        for start in self.starts(k):
            images = [self.work(jpeg) for jpeg in self.jpegs[start:start+BS]]
            yield torch.stack(images),torch.zeros(BS, dtype=torch.int64)

    def __iter__(self):
        if self.procs==1:
            yield from self.batches(0)
            return
        self.elsewhere = BS*len(self.starts(1))
        pid = os.fork()
        if pid==0:
            try:
                for batch in self.batches(1): finish(*batch, self.floats)
            finally: os._exit(0)
        yield from self.batches(0)
        os.waitpid(pid, 0)

# The contenders of each kind of data: `{name: (module that it needs besides torch and fastai, function)}`

STOCK,FORUM,REDIS,SHARDS = 'stock fastai, files','forum recipe','ours, from_redis','ours, from_shards'
REDIS2,SHARDS2 = 'ours, from_redis, processes','ours, from_shards, processes'
SMALL,PIXELS = 'ours, from_redis, shrink(256)','ours, from_redis, pixels of 256'
FFCV,RAW = 'FFCV, JPEG','FFCV, pixels of 256'
LIMIT,LIMIT2 = 'decode and crop alone','decode and crop alone, two processes'

_peers = {'torchvision ImageFolder':('torchvision',torchvision), 'webdataset':('webdataset',webdataset),
          'wids':('wids',wids), 'litdata':('litdata',litdata), 'mosaicml-streaming':('streaming',mosaicml),
          'HuggingFace datasets':('datasets',huggingface), 'SPDL':('spdl.pipeline',spdl)}
PHOTOS = {
    REDIS:(None,partial(ours_redis, dataset='photos', **CROP)),
    SHARDS:(None,partial(ours_shards, **CROP)),
    REDIS2:(None,partial(ours_redis, dataset='photos', **CROP, **FORKED)),
    SHARDS2:(None,partial(ours_shards, **CROP, **FORKED)),
    STOCK:(None,partial(stock, **CROP)),
    FORUM:(None,partial(forum, dataset='photos-npz', **CROP)),
    **{f'{name}, {decoder}':(module,partial(function, work=Work(decode))) for name,(module,function) in _peers.items()
       for decoder,decode in (('Pillow',pillow),('fast',fast))},
    'SPDL, its own decoder':('spdl.io',partial(spdl, work=Work(spdl_decode))),
    FFCV:('ffcv.loader',partial(ffcv, name='jpg')),
    LIMIT:(None,partial(limit, work=Work(fast))),
    LIMIT2:(None,partial(limit, work=Work(fast), procs=2)),
    SMALL:(None,partial(ours_redis, dataset='photos-small', **CROP)),
    PIXELS:(None,partial(ours_redis, dataset='photos-pixels', **CROP)),
    RAW:('ffcv.loader',partial(ffcv, name='raw'))}

BW = dict(img_cls=PILImageBW)
STROKES,STROKES1 = 'ours, strokes','ours, strokes, one channel'
STROKES2,STROKES3 = 'ours, strokes, one channel, processes','ours, strokes, processes'
PNG,STOCK1 = 'ours, PNG','stock fastai, files, one channel'
DRAWINGS = {
    STROKES:(None,partial(ours_redis, dataset='strokes')),
    STROKES1:(None,partial(ours_redis, dataset='strokes', **BW)),
    STROKES3:(None,partial(ours_redis, dataset='strokes', **FORKED)),
    STROKES2:(None,partial(ours_redis, dataset='strokes', **BW, **FORKED)),
    PNG:(None,partial(ours_redis, dataset='drawings', **FORKED)),
    STOCK:(None,partial(stock, images='drawings')),
    STOCK1:(None,partial(stock, images='drawings', **BW)),
    FORUM:(None,partial(forum, dataset='drawings-npz'))}

ARRAYS,ARRAYS2,PNG2 = 'ours, arrays','ours, arrays, in process','ours, PNG, in process'
DIGITS = {
    PNG:(None,partial(ours_redis, dataset='digits', **FORKED)),
    PNG2:(None,partial(ours_redis, dataset='digits', **ALONE)),
    ARRAYS:(None,partial(ours_redis, dataset='digits-arrays', **FORKED)),
    ARRAYS2:(None,partial(ours_redis, dataset='digits-arrays', **ALONE)),
    STOCK:(None,partial(stock, images='digits')),
    FORUM:(None,partial(forum, dataset='digits-npz'))}

def lacks(
    module # Name of a module, or None
): # A text, or None
    "Why a module cannot be imported, if it cannot"
    try: module and import_module(module)
    except Exception as error: return f'{type(error).__name__}: {error}'
