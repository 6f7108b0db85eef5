"""How many bytes do images take with each codec, and what does it cost to make a training item of them?

Purpose: bytes and CPU time, to choose what to store. Photographs become uint8 tensors after `RandomResizedCrop(224)`,
         with the same crops for all codecs. They are also shrunk and encoded. Drawings of 256x256 and 28x28, in two
         levels and with grey edges, become uint8 tensors, and are encoded. Everything runs in one process, without
         store or loader, whose cost differs only by the bytes. The contenders take turns, in an order that is reversed
         in every round. A drawing that is stored as strokes is drawn in a batch of 64, as in the loader. lz4 and zstd
         are also measured if they are installed (pip install lz4 zstandard); the package uses neither.

Command: python tests/bench/codecs.py [--images FOLDER] [--drawings FOLDER] [--n 150] [--rounds 7]
         Without folders it makes photo-like JPEGs and drawings.

Result:  150 ImageNet photographs and 600 raw Quick, Draw! drawings (results/codecs.json: one core of a busy machine,
         medians of 7 rounds). Photographs: in full size 107 KB and 2.4 ms per item; shrink(256) as a JPEG of quality 90
         takes 28 KB and is 2.2 times as fast, of quality 75 18 KB and 2.3; as raw pixels 255 KB and 3.5 times as fast;
         npyimg 3.2, npzimg (201 KB) 1.2, PNG (147 KB) 0.8. Drawings of 256x256 in two levels: strokes 85 bytes and
         0.105 ms; bits 850 bytes and 0.076 ms; PNG with one bit per pixel 1.1 KB and 0.151 ms; npzimg 1.3 KB and 0.223
         ms; raw 65.5 KB and 0.048 ms. With grey edges: strokes the same, PNG 3.5 KB and 0.231 ms. Drawings of 28x28:
         bits 64 bytes and 0.043 ms, raw 794 bytes and 0.039 ms, PNGs 121 or 326 bytes and 0.08 ms, npzimg 0.12 ms.

Reason:  of the 0.69 ms of raw pixels, 0.52 are the crop and Pillow's resize, 0.06 are the conversion from three to the
         four bytes of Pillow's pixels, and 0.06 are the tensor: only the resize could still be made faster. Decoding a
         shrunk JPEG costs 0.43 ms more. npyimg parses its header as Python code, 40 us; npzimg also opens a zip file.
         For 28x28, fastai's transforms take the 0.04 ms of an item. lz4 makes photographs 7% smaller for 5% of the
         speed. It makes drawings small (3.2 or 5.2 KB), but bits and strokes are smaller, so it is not a dependency.
         zstd in place of zlib would save 30 of the 850 bytes of bits and 11 of its 76 us, and is not a dependency
         either.
"""
import argparse, io, json, random, statistics, tempfile, time, zlib
from functools import partial
from pathlib import Path

import numpy as np
import torch
from fastai.data.transforms import ToTensor
from fastai.vision.augment import RandomResizedCrop
from fastai.vision.core import PILImage, PILImageBW
from PIL import Image

from fastai_remote import Rasterise, drawing_samples, image_samples, shrink
from fastai_remote.codec.images import ImageCodec, _head
from fastai_remote.codec.fields import get_codec
from fastai_remote.core import size_str
from fastai_remote.load.lazy_image import open_image
from ingest import make_drawings
from loader import make_images
from machine import about
try: import lz4.block as lz4
except ImportError: lz4 = None
try: import zstandard as zstd
except ImportError: zstd = None

# The contenders

class Kind:
    "A way to store images: `encode(object)` returns bytes, `decode(list of bytes)` images, or files of images"
    def __init__(self, name, encode, decode=None):
        codec = get_codec(name.split(',')[0])
        def decode_all(values): return values if isinstance(codec, ImageCodec) else [codec.image(b) for b in values]
        self.name,self.encode,self.decode = name,encode or codec.to_bytes,decode or decode_all

def packed(
    name, # Name of the contender
    compress, # From bytes to bytes
    decompress, # Back
    codec='raw' # 'raw' or 'bits'
): # A `Kind`
    "The bytes of `codec`, compressed in another way"
    inner = get_codec(codec)
    def decode(b):
        b = decompress(b)
        if codec=='raw': return inner.image(b)
        *_,width,height = _head.unpack_from(b)
        rows = np.frombuffer(b, np.uint8, offset=_head.size).reshape(height, -1)
        pixels = np.unpackbits(rows, axis=1, count=width)
        pixels *= np.uint8(255)
        return Image.frombuffer('L', (width,height), pixels, 'raw', 'L', 0, 1)
    def uncompressed(b): return b[:_head.size]+zlib.decompress(b[_head.size:]) if codec=='bits' else b
    return Kind(name, lambda o: compress(uncompressed(inner.to_bytes(o))), lambda values: [decode(b) for b in values])

def other_compressors(codec='raw'):
    "The contenders that need another package"
    if lz4: yield packed(f'{codec}, lz4', lz4.compress, lz4.decompress, codec)
    if zstd:
        compress = lambda b: zstd.ZstdCompressor(3).compress(b)
        yield packed(f'{codec}, zstd', compress, zstd.ZstdDecompressor().decompress, codec)

def photo_kinds():
    "The contenders for photographs, which encode the bytes of a JPEG file"
    shrunk = {codec:shrink(256, codec=codec)._one for codec in ('raw','png')}
    raw = get_codec('raw')
    def array(name, b): return get_codec(name).to_bytes(raw.array(shrunk['raw'](b)))
    yield Kind('jpg, full size', lambda b: b)
    for quality in (75,90): yield Kind(f'jpg, shrink(256), quality {quality}', shrink(256, quality)._one)
    yield Kind('png, shrink(256)', shrunk['png'])
    for name in ('npzimg','npyimg'): yield Kind(f'{name}, shrink(256)', partial(array, name))
    yield Kind("raw, shrink(256, codec='raw')", shrunk['raw'])
    for kind in other_compressors():
        yield Kind(kind.name, lambda b, encode=kind.encode: encode(raw.image(shrunk['raw'](b))), kind.decode)

def drawing_kinds(size, antialias):
    "The contenders for drawings, which encode arrays of pixels; strokes are passed as they are"
    raster = Rasterise(size, antialias=antialias)
    def draw(values): return [im for k in range(0, len(values), 64) for im in raster.batch(values[k:k+64])]
    yield Kind('strokes', None, draw)
    if antialias: yield Kind('png', None)
    else:
        yield Kind('bits', None)
        yield from other_compressors('bits')
        yield Kind('png, a bit a pixel', lambda pixels: get_codec('png').to_bytes(Image.fromarray(pixels>0)))
    for name in ('npzimg','npyimg','raw'): yield Kind(name, None)
    yield from other_compressors()

# Measurement

class Bench:
    "Contenders that take turns with the same images"
    def __init__(self,
        kinds, # The contenders
        objects, # `objects(kind)` is a list of what `kind` encodes
        cls, # Class of the images
        tfm=None # A transform of an item
    ):
        self.kinds,self.cls,self.tfms = list(kinds),cls,[t for t in (tfm, ToTensor()) if t]
        self.bytes,self.encode_ms,self.item_ms = {},{},{kind.name:[] for kind in self.kinds}
        for kind in self.kinds:
            started = time.process_time()
            self.bytes[kind.name] = [kind.encode(o) for o in objects(kind)]
            self.encode_ms[kind.name] = (time.process_time()-started)/len(self.bytes[kind.name])*1000

    def turn(self, i):
        "Measure each contender in round `i`"
        for kind in self.kinds[::1 if i%2 else -1]:
            random.seed(i)
            values,started = self.bytes[kind.name],time.process_time()
            for decoded in kind.decode(values):
                item = open_image(decoded, self.cls)
                for tfm in self.tfms: item = tfm(item, split_idx=0)
            self.item_ms[kind.name].append((time.process_time()-started)/len(values)*1000)

    def results(self, base):
        "The measures of each contender; `speed` is the median over rounds of the time of `base` divided by its own"
        found = {}
        for name,times in self.item_ms.items():
            functions = dict(median=statistics.median, min=min, max=max)
            found[name] = dict(bytes=round(statistics.mean(map(len, self.bytes[name]))),
                encode_ms=round(self.encode_ms[name], 4),
                item_ms={key:round(function(times), 4) for key,function in functions.items()},
                speed=round(statistics.median(a/b for a,b in zip(self.item_ms[base], times)), 2))
        return found

def load_data(images, drawings, n):
    "The bytes of `n` photographs, and the strokes of four times as many drawings"
    with tempfile.TemporaryDirectory(prefix='fr-bench-') as temporary:
        temporary = Path(temporary)
        for name in ('images','drawings'): (temporary/name).mkdir()
        if images is None: make_images(temporary/'images', n, 400)
        if drawings is None: make_drawings(temporary/'drawings', 4*n)
        photos = [path.read_bytes() for path in list(image_samples(images or temporary/'images').paths)[:n]]
        source = drawing_samples(drawings or temporary/'drawings')
        strokes = [sample['strokes'] for sample in source[::max(1, len(source)//(4*n))][:4*n]]
    return photos,strokes

def run(
    images=None, # Folder of photographs; default: make some
    drawings=None, # Folder of ndjson files; default: make some
    n:int=150, # Number of photographs; there are four times as many drawings
    rounds:int=7, # Timed turns of each contender
)->dict: # Content of the result file
    "Measure the contenders in turns"
    torch.set_num_threads(1)
    photos,strokes = load_data(images, drawings, n)
    for photo in photos[:5]: shrink(256)._one(photo)   # what is made only once is not measured
    crop = RandomResizedCrop(224)
    benches,bases = {},{}
    benches['photographs, RandomResizedCrop(224)'] = Bench(photo_kinds(), lambda kind: photos, PILImage, crop)
    bases['photographs, RandomResizedCrop(224)'] = 'jpg, full size'
    for size,antialias in ((256,False),(256,True),(28,False),(28,True)):
        pixels = Rasterise(size, antialias=antialias).arrays(strokes)
        title = f"drawings, {size}x{size}, {'grey edges' if antialias else 'two levels'}"
        def objects(kind, pixels=pixels): return strokes if kind.name=='strokes' else pixels
        benches[title] = Bench(drawing_kinds(size, antialias), objects, PILImageBW)
        bases[title] = 'png' if antialias else 'png, a bit a pixel'
    for i in range(rounds):
        for bench in benches.values(): bench.turn(i)
    data = dict(images=f"{Path(images).name if images else 'made'}, {len(photos)} JPEGs",
                drawings=f"{Path(drawings).name if drawings else 'made'}, {len(strokes)} drawings")
    packages = ['torch','fastai','pillow','numpy',*(['lz4'] if lz4 else []),*(['zstandard'] if zstd else [])]
    return dict(data=data, rounds=rounds, results={title:b.results(bases[title]) for title,b in benches.items()},
                speed_is_relative_to=bases, **about(None, ' '.join(packages)))

def table(result):
    "The lines of a readable table"
    yield (f"{result['data']['images']}; {result['data']['drawings']}; {result['rounds']} rounds: bytes, CPU ms per "
           'item (min to max), relative speed, CPU ms to encode')
    for title,rows in result['results'].items():
        yield f"\n{title}: relative to {result['speed_is_relative_to'][title]}"
        for name,measure in rows.items():
            item = measure['item_ms']
            yield (f"  {name:32}{size_str(measure['bytes']):>10}  {item['median']:7.3f} ms ({item['min']:.3f} to "
                   f"{item['max']:.3f})  x {measure['speed']:5.2f}  encode {measure['encode_ms']:7.3f} ms")

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--images', help='folder of photographs; default: make some')
    parser.add_argument('--drawings', help='folder of ndjson files; default: make some')
    parser.add_argument('--n', type=int, default=150, help='photographs; there are four times as many drawings')
    parser.add_argument('--rounds', type=int, default=7, help='timed turns of each contender')
    parser.add_argument('--out', default=Path(__file__).parent/'results'/'codecs.json',
                        help='result file; an empty text writes none')
    args = parser.parse_args()
    result = run(args.images, args.drawings, args.n, args.rounds)
    folders = f"{' --images FOLDER' if args.images else ''}{' --drawings FOLDER' if args.drawings else ''}"
    result['command'] = f'python tests/bench/codecs.py{folders} --n {args.n} --rounds {args.rounds}'
    print('\n'.join(table(result)))
    if args.out: Path(args.out).write_text(json.dumps(result, indent=1)+'\n')
