"""What pictures take as each codec, and what it costs to make a training item of them

Purpose: bytes and CPU time, for choosing what to store. Photographs: each as a uint8 tensor after `RandomResizedCrop(224)`, the same crops for all,
and shrunk and encoded. Drawings of 256x256 and 28x28, in two levels and with grey edges: as a uint8 tensor, and encoded. In one process, without store
or loader, which cost the same for all but for the bytes. The contenders take turns, in an order that is reversed every round; each drawing from strokes
is made with 63 others, as by the loader. lz4 and zstd are contenders, too, where they are installed (pip install lz4 zstandard); the package uses neither.

Command: python tests/bench/codecs.py [--images FOLDER] [--drawings FOLDER] [--n 150] [--rounds 7]
         without folders it makes photo-like JPEGs and drawings

Result:  on 150 ImageNet photographs and 600 raw Quick, Draw! drawings (results/codecs.json: one core of a busy machine, medians of 7 rounds). Photographs: full size
         107 KB and 2.4 ms an item; shrink(256) as JPEG of quality 90 28 KB and 2.2 times as fast, quality 75 18 KB and 2.3; as raw pixels 255 KB and 3.5 times as
         fast; npyimg 3.2, npzimg (201 KB) 1.2, PNG (147 KB) 0.8. Drawings of 256x256 in two levels: strokes 85 bytes, 0.105 ms; bits 850 bytes, 0.076 ms; PNG of a
         bit a pixel 1.1 KB, 0.151 ms; npzimg 1.3 KB, 0.223 ms; raw 65.5 KB, 0.048 ms. With grey edges: strokes the same, PNG 3.5 KB and 0.231 ms. Of 28x28: bits
         64 bytes and 0.043 ms, raw 794 and 0.039, PNGs 121 or 326 and 0.08, npzimg 0.12.

Reason:  of raw's 0.69 ms, 0.52 are the crop and Pillow's resize, 0.06 are Pillow's pixels of four bytes made from three, 0.06 the tensor: what is left to save is in
         the resize. A shrunk JPEG costs 0.43 ms more, of decoding. npyimg parses its header as Python, 40 us; npzimg opens a zip, too. Of 28x28, an item's 0.04 ms
         are fastai's transforms. lz4 saves 7% of photographs for 5% of the speed; drawings it makes small, 3.2 or 5.2 KB, but bits and strokes are smaller,
         and so it is no dependency. zstd in place of zlib saves 30 of bits' 850 bytes and 11 of 76 us, and is none either.
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

class Kind:
    "A way to store pictures: `enc(o)` gives bytes, `dec(bs)` pictures, or files of some"
    def __init__(self, name, enc, dec=None):
        c = get_codec(name.split(',')[0])
        self.name,self.enc = name,enc or c.to_bytes
        self.dec = dec or (lambda bs: bs if isinstance(c, ImageCodec) else [c.image(b) for b in bs])

def packed(name, compress, decompress, codec='raw'):
    "`codec`'s bytes in another compressor's hands"
    c = get_codec(codec)
    def dec(b):
        b = decompress(b)
        if codec=='raw': return c.image(b)
        *_,w,h = _head.unpack_from(b)
        a = np.unpackbits(np.frombuffer(b, np.uint8, offset=_head.size).reshape(h, -1), axis=1, count=w)
        a *= np.uint8(255)
        return Image.frombuffer('L', (w,h), a, 'raw', 'L', 0, 1)
    def rows(b): return b[:_head.size]+zlib.decompress(b[_head.size:]) if codec=='bits' else b
    return Kind(name, lambda o: compress(rows(c.to_bytes(o))), lambda bs: [dec(b) for b in bs])

def others(codec='raw'):
    "What would need a package"
    if lz4: yield packed(f'{codec}, lz4', lz4.compress, lz4.decompress, codec)
    if zstd: yield packed(f'{codec}, zstd', lambda b: zstd.ZstdCompressor(3).compress(b), zstd.ZstdDecompressor().decompress, codec)

def photo_kinds():
    shrunk = {c:shrink(256, codec=c)._one for c in ('raw','png')}
    def array(name, b): return get_codec(name).to_bytes(get_codec('raw').array(shrunk['raw'](b)))
    yield Kind('jpg, full size', lambda b: b)
    for q in (75,90): yield Kind(f'jpg, shrink(256), quality {q}', shrink(256, q)._one)
    yield Kind('png, shrink(256)', shrunk['png'])
    for k in ('npzimg','npyimg'): yield Kind(f'{k}, shrink(256)', partial(array, k))
    yield Kind("raw, shrink(256, codec='raw')", shrunk['raw'])
    for o in others(): yield Kind(o.name, lambda b, enc=o.enc: enc(get_codec('raw').image(shrunk['raw'](b))), o.dec)

def drawing_kinds(size, antialias):
    "Of pictures as arrays, but for strokes, which draw them"
    r = Rasterise(size, antialias=antialias)
    yield Kind('strokes', None, lambda bs: [o for k in range(0, len(bs), 64) for o in r.batch(bs[k:k+64])])
    if antialias: yield Kind('png', None)
    else:
        yield Kind('bits', None)
        yield from others('bits')
        yield Kind('png, a bit a pixel', lambda a: get_codec('png').to_bytes(Image.fromarray(a>0)))
    for k in ('npzimg','npyimg','raw'): yield Kind(k, None)
    yield from others()

class Bench:
    "Kinds that take turns at the same pictures"
    def __init__(self, kinds, objs, cls, tfm=None):
        self.kinds,self.cls,self.tfms = list(kinds),cls,[o for o in (tfm, ToTensor()) if o]
        self.bytes,self.enc,self.res = {},{},{k.name:[] for k in self.kinds}
        for k in self.kinds:
            t0 = time.process_time()
            self.bytes[k.name] = [k.enc(o) for o in objs(k)]
            self.enc[k.name] = (time.process_time()-t0)/len(self.bytes[k.name])*1000

    def turn(self, r):
        for k in self.kinds[::1 if r%2 else -1]:
            random.seed(r)
            t0 = time.process_time()
            for o in k.dec(self.bytes[k.name]):
                im = open_image(o, self.cls)
                for t in self.tfms: im = t(im, split_idx=0)
            self.res[k.name].append((time.process_time()-t0)/len(self.bytes[k.name])*1000)

    def results(self, base):
        "Of each kind; ratios are those of `base` over it, the median over rounds"
        return {k:dict(bytes=round(statistics.mean(map(len, self.bytes[k]))), encode_ms=round(self.enc[k], 4), item_ms={n:round(f(v), 4) for n,f in dict(median=statistics.median, min=min, max=max).items()},
                       speed=round(statistics.median(a/b for a,b in zip(self.res[base], v)), 2)) for k,v in self.res.items()}

def run(
    images=None, # Folder of photographs; default: make some
    drawings=None, # Folder of ndjson files; default: make some
    n:int=150, # Photographs; four times as many drawings
    rounds:int=7, # Timed turns of each contender
)->dict: # What goes into the results file
    "Time the contenders in turns"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix='fr-bench-') as d:
        for k in ('images','drawings'): (Path(d)/k).mkdir()
        if images is None: make_images(Path(d)/'images', n, 400)
        if drawings is None: make_drawings(Path(d)/'drawings', 4*n)
        photos = [p.read_bytes() for p in list(image_samples(images or Path(d)/'images').paths)[:n]]
        src = drawing_samples(drawings or Path(d)/'drawings')
        strokes = [o['strokes'] for o in src[::max(1, len(src)//(4*n))][:4*n]]
    for b in photos[:5]: shrink(256)._one(b)   # what is made once is nobody's time
    benches = {'photographs, RandomResizedCrop(224)':(Bench(photo_kinds(), lambda k: photos, PILImage, RandomResizedCrop(224)),'jpg, full size')}
    for size,aa in ((256,False),(256,True),(28,False),(28,True)):
        pics = Rasterise(size, antialias=aa).arrays(strokes)
        benches[f"drawings, {size}x{size}, {'grey edges' if aa else 'two levels'}"] = Bench(drawing_kinds(size, aa), lambda k: strokes if k.name=='strokes' else pics, PILImageBW),'png' if aa else 'png, a bit a pixel'
    for r in range(rounds):
        for b,_ in benches.values(): b.turn(r)
    return dict(data=dict(images=f"{Path(images).name if images else 'made'}, {len(photos)} JPEGs", drawings=f"{Path(drawings).name if drawings else 'made'}, {len(strokes)} drawings"), rounds=rounds,
                results={k:b.results(base) for k,(b,base) in benches.items()}, speed_is_relative_to={k:base for k,(_,base) in benches.items()},
                **about(None, ' '.join(['torch','fastai','pillow','numpy',*(['lz4'] if lz4 else []),*(['zstandard'] if zstd else [])])))

def table(res):
    "`res` for reading"
    yield f"{res['data']['images']}; {res['data']['drawings']}; {res['rounds']} rounds: bytes, CPU ms an item (min to max), speed relative to the first named, CPU ms to encode"
    for what,rows in res['results'].items():
        yield f"\n{what}: relative to {res['speed_is_relative_to'][what]}"
        for k,o in rows.items(): yield f"  {k:32}{size_str(o['bytes']):>10}  {o['item_ms']['median']:7.3f} ms ({o['item_ms']['min']:.3f} to {o['item_ms']['max']:.3f})  x {o['speed']:5.2f}  encode {o['encode_ms']:7.3f} ms"

if __name__=='__main__':
    ap = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    ap.add_argument('--images', help='folder of photographs; default: make some')
    ap.add_argument('--drawings', help='folder of ndjson files; default: make some')
    ap.add_argument('--n', type=int, default=150, help='photographs; four times as many drawings')
    ap.add_argument('--rounds', type=int, default=7, help='timed turns of each')
    ap.add_argument('--out', default=Path(__file__).parent/'results'/'codecs.json', help='results file; an empty one writes none')
    a = ap.parse_args()
    res = run(a.images, a.drawings, a.n, a.rounds)
    res['command'] = f"python tests/bench/codecs.py{' --images FOLDER' if a.images else ''}{' --drawings FOLDER' if a.drawings else ''} --n {a.n} --rounds {a.rounds}"
    print('\n'.join(table(res)))
    if a.out: Path(a.out).write_text(json.dumps(res, indent=1)+'\n')
