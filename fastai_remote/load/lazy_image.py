"""Images that are decoded when their pixels are needed, and only as far as they are needed

Docs: page `load/lazy_image`"""

# A loader of photographs spends most of its time decoding them, and throws most of the pixels away: a random crop uses
# about half of them. Which half is known before the first byte is decoded, if decoding can wait. So where the first
# item transforms are fastai's own, images pass through them undecoded. An undecoded image reads its size from the
# header, records crops, a resize and flips, and computes its pixels when they are needed. Before any other transform
# sees the image, `decoded` turns it into what stock fastai would pass: the same type, pixels, size, mode and `info`.

import io, math, threading, weakref

import numpy as np
import torch
from PIL import Image
from fastai.torch_core import TensorImage
from fastai.vision.core import load_image, PILImage, PILImageBW

from ..codec.arrays import from_pixels
from ..codec.base import Codec
from ..codec.images import check_image
from ..codec.pixels import RESAMPLES, PixelPlan, TURNS, jpeg_header, JpegSource, PixelSource
from .timed import stage

try: from fastai_remote.codec import _pixels
except ImportError: _pixels = None   # the C extension was not built: PyTorch divides, and Pillow resizes

# --- EncodedImage

# Operations on an `EncodedImage` give the same pixels as on a `PILImage`. Its `info` (EXIF, ICC profile, resolution) is
# read from the file when it is asked for.

class EncodedImage:
    """Makes a Pillow image lazy: it records crops, one resize and flips, and decodes when its pixels are needed

    It comes before a `PILBase` class in the bases of a class, such as `EncodedPILImage`. As long as `plan` is set,
    there are no pixels, and `plan` says how to compute them. Every operation that cannot be recorded decodes first."""
    plan = None   # the `PixelPlan` of an image that is not decoded; `None` once it has pixels
    fail = None   # `fail(exception)` -> the exception to raise if decoding fails
    _info = None   # Pillow's `info` as a dict, or the bytes of the image file to read it from

    @property
    def info(self):
        if isinstance(self._info, bytes): self._info = Image.open(io.BytesIO(self._info)).info
        if self._info is not None: return self._info
        return self.__dict__.get('info', {})   # an image that Pillow made and that was cast to this class
    @info.setter
    def info(self, info): self._info = info

    @property
    def im(self):
        if self.plan is not None: self.load()
        return self._im
    @im.setter
    def im(self, im): self._im,self.plan = im,None   # Pillow may set it, as `thumbnail` does

    def load(self):
        if self.plan is not None:
            pixels = np.ascontiguousarray(self.pixels().transpose(1, 2, 0))
            if pixels.shape[2]==3: decoded = Image.fromarray(pixels)
            else: decoded = Image.fromarray(pixels[...,0]).copy()   # Pillow maps one channel read-only: copy it
            self._im,self.plan = decoded.im,None
        return super().load()

    def decoded(self):
        "Turns this object into the image that stock fastai would have: decoded, of its type, with `info`; returns it"
        self.load()
        info = self.info
        for name in ('plan','fail','_info'): self.__dict__.pop(name, None)
        self.__class__ = self._stock_type()
        self.info = dict(info)
        return self

    @classmethod
    def _stock_type(cls):
        "The class of fastai that this one makes lazy"
        return cls.__mro__[2]

    @stage('decode')
    def pixels(self,
        out:np.ndarray=None # Where to write them; default: a new array
    )->np.ndarray: # `uint8`, shape (channels, height, width)
        "The pixels of an image that is not decoded; raises what `fail` makes of an exception"
        try: return self.plan.pixels(out)
        except MemoryError: raise
        except Exception as e: raise (self.fail(e) if self.fail else e) from e

    def _with(self, plan):
        "A new image of the same file and mode, with another `PixelPlan`"
        image = object.__new__(type(self))
        Image.Image.__init__(image)
        image.plan,image._mode,image._size = plan,self._mode,plan.size
        image.fail,image._info = self.fail,self._info
        return image

    def crop(self, box=None):
        if self.plan is None or box is None: return super().crop(box)
        x0,y0,x1,y1 = (int(round(o)) for o in box)
        width,height = self._size
        inside = 0<=x0<x1<=width and 0<=y0<y1<=height
        return self._with(self.plan.crop(x0, y0, x1, y1)) if inside else super().crop(box)

    def resize(self, size, resample=None, box=None, reducing_gap=None):
        can_wait = (self.plan is not None and self.plan.to is None and resample in RESAMPLES and box is None
                    and reducing_gap is None and min(size)>=1)
        if not can_wait: return super().resize(size, resample, box, reducing_gap)
        if tuple(size)==self._size: return self.copy()
        return self._with(self.plan.resize(size, resample))

    def transpose(self, method):
        if self.plan is None or method not in TURNS: return super().transpose(method)
        return self._with(self.plan.transpose(TURNS[method]))

    def _do_crop_pad(self, sz, tl, orig_sz, resize_mode=Image.Resampling.BILINEAR, resize_to=None, **kwargs):
        "As fastai's. A crop inside the image is only recorded, and done when the pixels are needed."
        (x,y),(w,h),(width,height) = tl,sz,self._size
        inside = x>=0 and y>=0 and x+w<=width and y+h<=height
        if self.plan is None or not inside or tuple(orig_sz)!=(width,height):
            return super()._do_crop_pad(sz, tl, orig_sz=orig_sz, resize_mode=resize_mode, resize_to=resize_to, **kwargs)
        res = self._with(self.plan if (w,h)==(width,height) else self.plan.crop(x, y, x+w, y+h))
        # A crop that touches the right or lower edge is padded by 0 pixels in fastai, and padding drops `info`
        if x+w==width or y+h==height: res._info = {}
        return res if resize_to is None else res.resize(resize_to, resize_mode)

    def copy(self): return super().copy() if self.plan is None else self._with(self.plan)
    __copy__ = copy
    def __reduce__(self):
        image = Image.fromarray(np.asarray(self))
        image.info = dict(self.info)
        return self._stock_type(),(image,)

class EncodedPILImage(EncodedImage, PILImage): "A `PILImage` that is decoded when its pixels are needed"
class EncodedPILImageBW(EncodedImage, PILImageBW): "A `PILImageBW` that is decoded when its pixels are needed"
_encoded_types = {PILImage:EncodedPILImage, PILImageBW:EncodedPILImageBW}

def open_image(
    o:bytes|Image.Image|np.ndarray, # An image file, a picture, or `uint8` pixels
    img_cls:type, # `PILImage`, or any class with a `create`
    fail=None, # `fail(exception)` -> the exception to raise if decoding fails later; default: as it is
    reducing_gap:float=None, # As in `JpegSource`
): # An `img_cls`
    """`img_cls.create(o)`. A `PILImage` or `PILImageBW` is lazy: it is decoded, cropped and resized when it is needed

    Raises what `_load_file` raises."""
    if img_cls not in _encoded_types: return create_image(o, img_cls)
    mode,source = img_cls._open_args['mode'],None
    if isinstance(o, bytes):
        header = jpeg_header(o)
        if header:
            width,height,channels = header
            too_large = width*height>(Image.MAX_IMAGE_PIXELS or math.inf)   # `load_image` warns or raises
            can_decode = not too_large and (mode=='RGB' or channels==1)
            if can_decode: source,info = JpegSource(o, (width,height), len(mode), reducing_gap),o
        if source is None: o = _load_file(o)
    elif isinstance(o, np.ndarray):
        if (1 if o.ndim==2 else o.shape[2])==len(mode): source,info = PixelSource(o),{}
        else: o = Image.fromarray(o)
    if source is None:
        if o.mode!=mode: o = o.convert(mode)
        source,info = PixelSource(o),dict(o.info)
    image = object.__new__(_encoded_types[img_cls])   # a template, which has neither pixels nor a plan
    image._mode,image.fail,image._info = mode,fail,info
    return image._with(PixelPlan(source, (0,0,*source.size)))

def _load_file(b):
    """fastai's `load_image` of the bytes of an image file: a Pillow image

    Raises `ValueError` as `check_image` does, and what Pillow raises: `DecompressionBombError`, which is no
    `ValueError`, for too many pixels, and others, such as `OSError`, for what it cannot read."""
    check_image(b)
    return load_image(io.BytesIO(b))

def create_image(
    o:bytes|Image.Image|np.ndarray, # An image file, a picture, or `uint8` pixels
    img_cls:type, # Any class with a `create`
): # An `img_cls`
    "`img_cls.create(o)`. A picture is first converted to the mode in which `img_cls` opens files."
    if isinstance(o, np.ndarray): o = from_pixels(o)
    if isinstance(o, bytes): check_image(o)
    mode = getattr(img_cls, '_open_args', {}).get('mode')   # in which it opens files, such as `RGB`
    if isinstance(o, Image.Image) and mode not in (None, o.mode): o = o.convert(mode)
    return img_cls.create(o)

def picture_of(
    codec:Codec, # A codec, but not one of image files
    value:bytes # A stored value
): # An `np.ndarray` or an `Image.Image`; `None` if `codec` stores no pictures
    """The picture in `value`: `codec.array(value)`, which saves a copy, or `codec.image(value)` if that is `None`

    `raw` and `bits` give an array, `npyimg`, `npzimg` and `strokes` a Pillow image. Raises what the codec raises."""
    pixels = codec.array(value)
    return codec.image(value) if pixels is None else pixels

# --- Memory

# A batch of 64 photographs takes 10 MB as bytes and 38 MB as floats. If its memory is new each time, the system has to
# provide fresh pages, which on a CPU takes eight times as long as the division by 255. So `BatchMemory` reuses the
# memory of a batch that nothing refers to any more. A weak reference to the array below its tensors tells. A grey image
# with three equal channels is kept as one channel until then.

class BatchMemory:
    "Allocates tensors for batches, and reuses the memory of batches that are no longer in use"
    def __init__(self,
        keep:int=2 # Blocks of memory to keep: one for the batch in use, one for the next
    ):
        self.keep,self.lock = keep,threading.Lock()
        self.blocks = []   # (memory, weak reference to the array that a tensor was made of), the latest first

    def __call__(self,
        shape:tuple,
        dtype=np.uint8
    )->torch.Tensor:
        "Uninitialised tensor, which may reuse the memory of a freed batch"
        nbytes = math.prod(shape)*np.dtype(dtype).itemsize
        with self.lock:
            free = (block for block,user in self.blocks if user() is None and block.size==nbytes)
            block = next(free, None)
            if block is None: block = np.empty(nbytes, np.uint8)
            array = block.view(dtype).reshape(shape)
            others = [o for o in self.blocks if o[0] is not block]
            self.blocks = [(block, weakref.ref(array)), *others][:self.keep]
        return torch.from_numpy(array)

    def give_up(self, x:torch.Tensor): "As of `WorkerMemory`; the memory of `x` is reused when nothing refers to `x`"
    def __reduce__(self): return type(self),(self.keep,)

def image_floats(
    o:TensorImage, # Bytes, shape (n, channels, height, width)
    div:float, # Divisor
    memory:BatchMemory, # Allocates the result
    stats:tuple=None # Mean and standard deviation of the channels, `float32` arrays of shape (channels,)
)->torch.Tensor: # `float32`, same shape; `None` for what is no dense batch of bytes in the memory of the CPU
    """`o.float().div_(div)`, or `(o.float().div_(div)-mean)/std`, bit for bit

    It takes an eighth of the time of the first, and a twentieth of that of the second, because memory is reused."""
    x = o.as_subclass(torch.Tensor)   # the attributes of a subclass are slow
    shape = tuple(x.shape)
    is_shared = x.ndim==4 and x.shape[1]>1 and x.stride(1)==0   # one channel that is seen several times
    if is_shared: x = x[:,:1]
    if x.device.type!='cpu' or x.dtype!=torch.uint8 or not x.is_contiguous() or not x.numel(): return
    n_channels = shape[1] if is_shared or stats else 1   # else all numbers are one channel
    mean,std = stats or (np.zeros(n_channels, np.float32),np.ones(n_channels, np.float32))
    res = memory(shape, np.float32)
    if _pixels is None:
        mean,std = (torch.from_numpy(values).view(-1, 1, 1) for values in (mean,std))
        return res.copy_(x).div_(div).sub_(mean).div_(std)
    plane = x.numel() if n_channels==1 else x[0,0].numel()
    _pixels.floats(x.numpy(), res.numpy(), plane, is_shared, div, mean, std)
    return res
