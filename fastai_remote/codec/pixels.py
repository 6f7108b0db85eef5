"""A region of an image: decoded, resized and transposed in one step

Docs: page `codec/pixels`"""

import io, struct, warnings
from dataclasses import dataclass, replace
from importlib import import_module

import numpy as np
from PIL import Image
from zlib_ng.zlib_ng import crc32, decompressobj, error

from .images import check_image

try: from fastai_remote.codec import _jpeg
except ImportError: _jpeg = None   # there was no compiler or no libjpeg-turbo at installation: Pillow decodes
try: from fastai_remote.codec import _pixels
except ImportError: _pixels = None   # there was no compiler at installation: Pillow resizes, and decodes PNGs

# --- C modules

@dataclass(frozen=True)
class CModule:
    "A C module of this package, which works without it as well"
    name:str
    cost:str # What its absence costs, as measured by `tests/bench/c_modules.py`
    needs:str # What it needs to be compiled

    @property
    def there(self)->bool:
        "Was it compiled?"
        try: import_module(f'fastai_remote.codec.{self.name}')
        except ImportError: return False
        return True

C_MODULES = (
    CModule('_jpeg', 'JPEG photographs load 0.4 times as fast', 'a C compiler and libjpeg-turbo with its header (apt '
            'install libjpeg62-turbo-dev, or brew install jpeg-turbo)'),
    CModule('_pixels', 'drawings load 0.4 times as fast, small PNGs 0.3 times', 'a C compiler'))

_told = []   # has this process warned?

def warn_without_c_modules():
    "Warns once in a process of C modules that were not compiled"
    missing = [module for module in C_MODULES if not module.there] if not _told else []
    _told.append(True)
    if not missing: return
    costs = '; '.join(f'without the C module {module.name}, {module.cost}' for module in missing)
    warnings.warn(f'{costs}. `fastai_remote doctor` says what is needed to compile', stacklevel=3)

# --- Size of a JPEG

# The first bytes of a JPEG contain its size. `jpeg_header` reads only these. Pillow's `open` reads more and takes 60
# µs.

_START_OF_SCAN,_END_OF_IMAGE = 0xDA,0xD9
_FRAMES = 0xC0,0xC1,0xC2   # baseline, extended, progressive
_OTHER_FRAMES = set(range(0xC3, 0xD0))-{0xC4,0xC8,0xCC}   # lossless, arithmetic coding and others

def jpeg_header(
    content:bytes, # The contents of a file
)->tuple: # `(width, height, channels)`, with 1 or 3 channels; `None` if it is not a JPEG, or a rare kind of JPEG
    "Size and number of channels of a JPEG, read from its header"
    if content[:3]!=b'\xff\xd8\xff': return None
    i,n = 2,len(content)
    while i+9<n and content[i]==0xFF:   # each segment: 0xFF, marker, two bytes of length, contents
        marker = content[i+1]
        if marker==0xFF:   # padding
            i += 1
            continue
        if marker in _FRAMES:   # bits per channel, height, width, channels
            bits,channels = content[i+4],content[i+9]
            if bits!=8 or channels not in (1,3): return None
            return (content[i+7]<<8)+content[i+8], (content[i+5]<<8)+content[i+6], channels
        if marker in (_START_OF_SCAN,_END_OF_IMAGE) or marker in _OTHER_FRAMES: return None
        i += 2+(content[i+2]<<8)+content[i+3]

# --- Sources

# libjpeg-turbo can skip the rows above a region, stop after its last row, and decode only its columns. It still has to
# read all Huffman codes before the region. It can also decode at a half, a quarter or an eighth of the size, for little
# more than that share of the work. Pillow offers the second (`draft`) but not the first. So [a C
# module](../../fastai_remote/codec/c/jpeg.c) calls libjpeg-turbo, and resizes each row while it is in the processor's
# cache ([resample.h](../../fastai_remote/codec/c/resample.h)). If the module could not be compiled, Pillow does all of
# this, with the same result.
#
# By default, an image is decoded at full size, because stock fastai does so and the pixels must be the same. With
# `reducing_gap=2.`, it is decoded at a lower scale if its crop still has at least twice the pixels of the result, in
# width and in height. Pillow's `thumbnail` and `resize` have this argument with the same meaning. It changes pixels a
# little, and makes small crops of large photographs faster.

@dataclass(eq=False, repr=False)
class JpegSource:
    "A source for a `PixelPlan`: a JPEG file, decoded to `channels` channels"
    data:bytes # The contents of the file
    size:tuple # (width, height)
    channels:int # 1 or 3
    # Decode at 1/2, 1/4 or 1/8 of the size while that leaves at least `reducing_gap` times the pixels of the result, in
    # width and in height. This changes pixels. `None`: always decode at full size
    reducing_gap:float=None

    def scale(self,
        box:tuple, # Region (x0, y0, x1, y1) of the image
        to:tuple, # Size (width, height) of the result; `None`: that of `box`
    )->int: # 1, 2, 4 or 8
        "The number `k` for which the image is decoded at 1/`k` of its size"
        if to is None or not self.reducing_gap: return 1
        ratio = min((box[2]-box[0])/to[0], (box[3]-box[1])/to[1])/self.reducing_gap
        for k in (8,4,2):
            if ratio>=k: return k
        return 1

    def write(self, out, scale, *plan):
        """Write the result to array `out` with the C module; raises `ValueError` if that cannot be done

        `plan`: region and crop, see `_scaled_box`, then size, whether the filter is bicubic, window and orientation,
        as in `PixelPlan`, and whether the region is resized in y before x."""
        if _jpeg is None: raise ValueError('the C module `_jpeg` was not compiled')
        _jpeg.read(self.data, out, scale, self.channels, *plan)

    def image(self, region, scale)->Image.Image:
        """The part of the image that Pillow decodes at 1/`scale` of its size; mode L or RGB

        `region` is (x0, y0, x1, y1) in pixels of the smaller image."""
        check_image(self.data)
        im = Image.open(io.BytesIO(self.data))
        if scale>1: im.draft(None, (-(-im.width//scale), -(-im.height//scale)))
        im.load()
        mode = 'L' if self.channels==1 else 'RGB'
        if im.mode!=mode: im = im.convert(mode)
        return im.crop(region)

class PixelSource:
    """A source for a `PixelPlan`: a Pillow image of mode L or RGB, or a `uint8` array

    The array has shape (height, width), (height, width, 1) or (height, width, 3)."""
    reducing_gap = None   # the pixels are there at full size
    def __init__(self, pixels:Image.Image|np.ndarray):
        self.pixels = pixels
        if isinstance(pixels, Image.Image): self.size,self.channels = pixels.size,len(pixels.mode)
        else: self.size,self.channels = pixels.shape[1::-1],1 if pixels.ndim==2 else pixels.shape[2]

    def write(self, out, scale, region, *plan):
        """Write the result to array `out` with the C module; raises `ValueError` if that cannot be done

        `region` and `plan` as in `JpegSource.write`; `scale` is 1."""
        if _pixels is None: raise ValueError('the C module `_pixels` was not compiled')
        if isinstance(self.pixels, Image.Image):
            array = np.asarray(self.pixels.crop(region))
            region = 0, 0, region[2]-region[0], region[3]-region[1]
        else: array = np.ascontiguousarray(self.pixels)
        _pixels.read(array, out, array.shape[1], self.channels, region, *plan)

    def image(self, region, scale):
        "Region (x0, y0, x1, y1) of the pixels as a Pillow image; `scale` is 1"
        if isinstance(self.pixels, Image.Image): return self.pixels.crop(region)
        x0,y0,x1,y1 = region
        shape = (y1-y0, x1-x0, 3) if self.channels==3 else (y1-y0, x1-x0)
        return Image.fromarray(self.pixels[y0:y1,x0:x1].reshape(shape))

# --- Reading pixels

# A `PixelPlan` is carried out when its pixels are needed. The result is what a tensor needs: one plane per channel. It
# can be written directly to its place in a batch. Bilinear and bicubic resizing are bit-identical to Pillow's, with its
# anti-aliasing. Pillow computes with whole numbers, and vector instructions do the same four times as fast. (From
# version 13 on, Pillow resizes columns before rows if that is less work, which changes how results are rounded. So does
# the C module if this Pillow does.)

_T = Image.Transpose
RESAMPLES = {Image.Resampling.BILINEAR:False, Image.Resampling.BICUBIC:True}

def _resizes_columns_first():
    """Does this version of Pillow resize columns before rows if that is less work?

    Versions from 13 on do. The order of the two passes changes how results are rounded."""
    im = Image.frombytes('L', (32,64), bytes(i*i*7%251 for i in range(2048)))
    return im.resize((30,8), 2)==im.resize((32,8), 2).resize((30,8), 2)

_new_order = _resizes_columns_first()

def _scaled_box(box, scale, size):
    """Returns `(region, crop)`, both (x0, y0, x1, y1), for an image of `size` that is decoded at 1/`scale`, not at 1

    `region` is what to decode for `box`, in whole pixels of the smaller image; `crop` is what to resize, in pixels of
    `region`, which may be fractions. `size` is (width, height) of the image at full size."""
    x0,y0 = box[0]//scale,box[1]//scale
    x1,y1 = (min(-(-end//scale), -(-n//scale)) for end,n in zip(box[2:], size))
    crop = (box[0]/scale-x0, box[1]/scale-y0, min(box[2]/scale, x1)-x0, min(box[3]/scale, y1)-y0)
    return (x0,y0,x1,y1),crop

def _resize(im, to, resample, crop, transposed):
    "`im.resize(to, resample, crop)`; if `transposed`, as of the transposed image, whose result is transposed back"
    if not transposed: return im.resize(to, resample, crop)
    crop = *crop[1::-1], *crop[:1:-1]
    return im.transpose(_T.TRANSPOSE).resize(to[::-1], resample, crop).transpose(_T.TRANSPOSE)

def _oriented(im, channels, orientation):
    "The pixels of `im`, shape (channels, height, width), transposed and flipped by `orientation`, see `PixelPlan`"
    transpose,flip_x,flip_y = orientation
    a = np.asarray(im).reshape(im.height, im.width, channels).transpose((2,1,0) if transpose else (2,0,1))
    return a[:,::-1 if flip_y else 1,::-1 if flip_x else 1]

# Each of Pillow's operations as a transposition ('t') and then flips.
TURNS = {_T.FLIP_LEFT_RIGHT:'x', _T.FLIP_TOP_BOTTOM:'y', _T.ROTATE_180:'xy', _T.TRANSPOSE:'t', _T.ROTATE_90:'ty',
    _T.ROTATE_270:'tx', _T.TRANSVERSE:'txy'}

@dataclass(eq=False, repr=False)
class PixelPlan:
    "Operations on an image that are recorded, and carried out by `pixels`"
    src:JpegSource|PixelSource
    box:tuple # Region (x0, y0, x1, y1) of the image, in whole pixels
    to:tuple=None # Size (width, height) to which the region is resized; default: not resized
    resample:int=Image.Resampling.BILINEAR # or `BICUBIC`
    window:tuple=None # Region (x0, y0, x1, y1) of the resized image that is kept; default: all of it
    orientation:tuple=(False,False,False) # Whether the result is transposed, then flipped in x, then flipped in y
    transposed:bool=False # Was the image transposed before it was resized? This changes how results are rounded

    @property
    def size(self)->tuple: # (width, height)
        "Size of the result"
        x0,y0,x1,y1 = self.window or ((0,0,*self.to) if self.to else self.box)
        return (y1-y0,x1-x0) if self.orientation[0] else (x1-x0,y1-y0)

    def crop(self, x0, y0, x1, y1):
        "A new plan, which crops the result of this one to region (x0, y0, x1, y1) of it"
        transpose,flip_x,flip_y = self.orientation
        width,height = self.size
        if flip_x: x0,x1 = width-x1,width-x0
        if flip_y: y0,y1 = height-y1,height-y0
        if transpose: x0,y0,x1,y1 = y0,x0,y1,x1
        left,top = (self.box if self.to is None else self.window or (0,0))[:2]
        region = (left+x0, top+y0, left+x1, top+y1)
        return replace(self, box=region) if self.to is None else replace(self, window=region)

    def resize(self, size, resample):
        "A new plan, which resizes the result of this one to `size`, (width, height); this one must not resize yet"
        transpose = self.orientation[0]
        to = tuple(size[::-1]) if transpose else tuple(size)
        return replace(self, to=to, resample=resample, transposed=transpose)

    def transpose(self,
        ops:str # Any of 't' (transpose), 'x' and 'y' (flip along this axis), as in the values of `TURNS`
    )->'PixelPlan':
        "A new plan, whose result is that of this one, then transposed and flipped"
        transpose,flip_x,flip_y = self.orientation
        if 't' in ops: transpose,flip_x,flip_y = not transpose,flip_y,flip_x
        return replace(self, orientation=(transpose, flip_x!=('x' in ops), flip_y!=('y' in ops)))

    def pixels(self,
        out:np.ndarray=None # Where to write the result; default: a new array
    )->np.ndarray: # `uint8`, shape (channels, height, width)
        """What Pillow's `crop`, `resize`, `crop` and `transpose` return, bit for bit, as an array: `out` if given

        A `JpegSource` with `reducing_gap` may be decoded at a smaller size first, as Pillow does after `draft`. Only
        the pixels that contribute to the result are decoded. If the C module cannot do it, Pillow does, or raises its
        error for a damaged file."""
        src,box = self.src,self.box
        width,height = box[2]-box[0],box[3]-box[1]
        to,region,crop = self.to or (width,height),box,(0, 0, width, height)
        scale = src.scale(box, self.to) if src.reducing_gap else 1
        if scale>1: region,crop = _scaled_box(box, scale, src.size)
        window = self.window or (0, 0, *to)
        dx,dy = region[2]-region[0]-to[0],region[3]-region[1]-to[1]   # by how much it becomes smaller
        if self.transposed: dx,dy = dy,dx   # as Pillow sees it
        columns_first = (_new_order and dy>max(0, 2*dx))!=self.transposed
        if out is None: out = np.empty((src.channels, *self.size[::-1]), np.uint8)
        bicubic = RESAMPLES[self.resample]
        try: src.write(out, scale, region, crop, to, bicubic, window, self.orientation, columns_first)
        except ValueError:   # Pillow can do it, or raises an error that says what is wrong
            im = src.image(region, scale)
            if to!=im.size or scale>1: im = _resize(im, to, self.resample, crop, self.transposed)
            out[:] = _oriented(im.crop(window), src.channels, self.orientation)
        return out

# --- PNG
#
# Small pictures are often PNGs. Pillow takes 60 µs to open and decode one of a digit, most of it for objects: it looks
# for a plugin, reads each chunk in Python, and makes an image that NumPy then copies. A PNG with eight bits per channel
# and nothing but pixels needs none of this. What is not so plain, or damaged in any way, goes through Pillow, which
# also raises the right error.

_png_start = b'\x89PNG\r\n\x1a\n\0\0\0\rIHDR'

def _plain_png(content):
    """`((width, height), channels, compressed rows)` of `content`, the bytes of a PNG file; 1 channel or 3

    `None` unless it has 8 bits per channel, is not interlaced, and has no chunks but header, pixels and end. `None`
    also for an image of more than `Image.MAX_IMAGE_PIXELS`."""
    if content[:16]!=_png_start or content[37:41]!=b'IDAT': return
    width,height,bits,colour,_,filters,is_interlaced,checksum = struct.unpack_from('>IIBBBBBI', content, 16)
    if bits!=8 or colour not in (0,2) or is_interlaced: return
    if filters or crc32(content[12:29])!=checksum: return   # Pillow cannot identify such a file
    start,parts = 33,[]   # after the header; a chunk is its length, its type, its data and a checksum
    while content[start+4:start+8]==b'IDAT':
        length = int.from_bytes(content[start:start+4], 'big')
        parts.append(content[start+8:start+8+length])
        start += length+12
    if content[start+4:start+8]!=b'IEND' or not 0<width*height<=(Image.MAX_IMAGE_PIXELS or 1<<62): return
    return (width,height),1 if colour==0 else 3,b''.join(parts)

def png_pixels(
    content:bytes, # The contents of a file
    channels:int, # Channels of the wanted image: 1 or 3
)->np.ndarray: # `uint8`, shape (height, width) or (height, width, 3)
    "The pixels of a plain PNG with not more than `channels` channels; `None` for any other content"
    png = _plain_png(content) if _pixels is not None else None
    if png is None or png[1]>channels: return
    (width,height),found,data = png
    n_bytes = height*(found*width+1)
    inflate = decompressobj()
    try: rows = inflate.decompress(data, n_bytes+1)   # one byte more would show that there is more
    except error: return
    if len(rows)!=n_bytes or not inflate.eof: return
    pixels = np.empty((height,width) if found==1 else (height,width,3), np.uint8)
    try: _pixels.unfilter(rows, pixels, found*width, found)
    except ValueError: return   # there is no such filter
    return pixels
