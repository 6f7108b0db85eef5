"""The codec of a field, which its name decides

Docs: page `codec/fields`"""
from collections.abc import Mapping

import numpy as np
from PIL import Image

from .arrays import NpyCodec, NpyImageCodec, NpzCodec, NpzImageCodec
from .base import Codec
from .images import BitsCodec, ImageCodec, RawCodec
from .numbers import FixedCodec
from .raster import StrokesCodec
from .text import are_labels, JsonCodec, LabelsCodec, TextCodec
from ..parallel import share_setting

# --- By name

# The last part of a field's name is the name of its codec. If there is no codec of that name (`age`, `caption`), the
# first value of the field decides, and the manifest stores the choice.

_codecs = {codec.name:codec for codec in (
    ImageCodec('jpg', 'JPEG'), ImageCodec('jpeg', 'JPEG'), ImageCodec('png', 'PNG'), ImageCodec('webp', 'WEBP'),
    ImageCodec('img'), RawCodec('raw'), BitsCodec('bits'), StrokesCodec('strokes'),
    TextCodec('txt'), JsonCodec('json'), LabelsCodec('labels'), Codec('bin'),
    NpyCodec('npy'), NpzCodec('npz'), NpyImageCodec('npyimg'), NpzImageCodec('npzimg'),
    FixedCodec('cls', 'i8'), FixedCodec('id', 'i8'), FixedCodec('index', 'i8'), FixedCodec('crc', 'u4'),
    *(FixedCodec(k, k) for k in ('i1','i2','i4','i8','u1','u2','u4','f2','f4','f8')))}

_codecs_of_package = dict(_codecs)

def _registered(): return {name:codec for name,codec in _codecs.items() if codec is not _codecs_of_package.get(name)}
def _put_registered(codecs): _codecs.update(codecs)

share_setting(_registered, _put_registered)

def get_codec(
    name:str, # Name of a field, or of a codec
)->Codec: # `None` if there is no such codec
    "The codec of a field: that of the last part of its name"
    return _codecs.get(name.rsplit('.', 1)[-1].lower())

def register_codec(
    codec:Codec # Its name is lower case, without dots, and not that of a codec of another class
):
    """Make `codec` available under its name; raises `ValueError` if the name cannot be used

    It replaces a codec of the same class that has this name. It is known to this process, to those forked from it, and
    to the workers of an ingest."""
    if '.' in codec.name or codec.name!=codec.name.lower():
        raise ValueError(f'{codec.name!r} cannot name a codec: use lower case, and no dot')
    known = _codecs.get(codec.name)
    if known is not None and type(known) is not type(codec):
        raise ValueError(f'there is a codec {codec.name!r} already: {known!r}')
    _codecs[codec.name] = codec

def is_image(
    name:str # Name of a field, or of a codec
)->bool:
    "Does the codec store pictures?"
    codec = get_codec(name)
    return codec is not None and type(codec).image is not Codec.image

def is_mask(
    field:str, # Name of a field
    codec:str, # Name of its codec
    vocab:list=None # Its vocabulary, if it has one
)->bool:
    """Does `field` contain segmentation masks?

    A field of pictures or arrays does if `mask` is a part of its name, between dots, as in `mask.png`. A field of
    pictures also does if it has a vocabulary."""
    if is_image(codec): return bool(vocab) or 'mask' in field.split('.')
    return codec in ('npy','npz') and 'mask' in field.split('.')

def mask_image(
    a:np.ndarray # Class codes from 0 to 255, shape (h,w) or (h,w,1)
)->Image.Image: # Of mode L
    "The picture of a mask that is stored as an array; raises `ValueError` if `a` is not a mask"
    a = np.asarray(a)
    if a.ndim==3 and a.shape[2]==1: a = a[...,0]
    if a.ndim!=2 or a.dtype.kind not in 'biu' or a.size==0 or a.min()<0 or a.max()>255:
        raise ValueError(f'want whole numbers from 0 to 255 of shape (h,w), not {a.dtype} of shape {a.shape}; '
                         'targets that are no masks need a name without `mask`')
    return Image.fromarray(a.astype(np.uint8))

def value_kind(
    value # What a dataset returns, or a part of it
)->str: # `image`, `empty` for a list without values, or the last part of a field's name; `None` for `None`
    """What kind of value this is, mostly as the codec of a field for it is called; raises `TypeError` if no field fits

    Arrays and tensors are recognised by their `shape`, and scalars of NumPy and PyTorch by `item`, so that their
    libraries need not be imported."""
    if value is None: return None
    if isinstance(value, Image.Image): return 'image'
    if isinstance(value, (bytes,bytearray,memoryview)): return 'bin'
    if isinstance(value, str): return 'cls'
    if are_labels(value): return 'labels' if len(value) else 'empty'
    if getattr(value, 'shape', ())!=(): return 'npy'
    number = value.item() if hasattr(value, 'item') else value
    if isinstance(number, (bool,int)): return 'cls'
    if isinstance(number, float): return 'f4'
    if isinstance(value, (list,tuple,Mapping)): return 'json'
    raise TypeError(f'no field for a {type(value).__name__}: write an fn that returns a dict of fields')

def infer_codec(
    field:str, # Name of the field
    value, # A value of the field
)->str: # Name of a codec
    "Choose the codec of `field`: by the last part of its name if that names a codec, else by the type of `value`"
    if get_codec(field): return field.rsplit('.', 1)[-1].lower()
    try: kind = value_kind(value)
    except TypeError: return 'json'   # whose codec says what is wrong
    if kind=='cls': return 'txt' if isinstance(value, str) else 'i8'
    return {'image':'png', 'f4':'f8', 'empty':'json', None:'json'}.get(kind, kind)
