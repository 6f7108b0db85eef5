"""The codec of a field, which its name decides, and the names of the files in a tar

Docs: page `codec/fields`"""

import math, re
from collections.abc import Mapping

import numpy as np
from PIL import Image

from ..parallel import share_setting
from .arrays import NpyCodec, NpyImageCodec, NpzCodec, NpzImageCodec
from .base import Codec, utf8
from .images import BitsCodec, ImageCodec, RawCodec
from .numbers import FixedCodec
from .raster import StrokesCodec
from .text import are_labels, JsonCodec, LabelsCodec, TextCodec

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

# --- Names

# A file in a tar is called `KEY.EXTENSION`: `000012.left.jpg` is the field `left.jpg` of the sample `000012`.

# As in WebDataset: the key goes up to the first dot of the last part of the path, and the extension follows
_sample_name = re.compile('((?:.*/|)[^.]+)[.]([^/]*)$')
_metadata_name = re.compile('__[^/]*__($|/)')

def split_name(
    name:str # Name of a member, as WebDataset writes it: `folder/000012.left.jpg`
)->tuple: # Key of the sample, and extension in small letters: `folder/000012`, `left.jpg`; else `(None, None)`
    """The key and the extension in the name of a member, by WebDataset's rules

    Files without an extension and hidden files belong to no sample. Nor does a file that is called `__…__` and is in no
    folder, or one whose outermost folder is called so. WebDataset makes samples of hidden files in folders, such as
    those that macOS writes (`folder/._000012.jpg`); here they belong to none."""
    if '/' not in name and name.startswith('__') and name.endswith('__') or _metadata_name.match(name): return None,None
    found = _sample_name.match(name)
    if not found or found[1].endswith('/'): return None,None
    return found[1],found[2].lower()

def utf8_key(
    key:str # Of a sample of others
)->str: # `key` itself if it can be stored as UTF-8
    "A key in which bytes that are no UTF-8, such as those of a name in another encoding, are written as `%E9`"
    return re.sub('[\ud800-\udfff]', lambda found: f'%{ord(found[0])&0xff:02X}', key)

def writable_key(
    key # Of a sample of others
)->str: # `key` itself if nothing is wrong with it; `None` if nothing is left of it
    """A key for a sample in a tar that is as much as possible like `key`, which may be that of a sample in another tar

    Bytes that are no UTF-8 become `%E9`, backslashes and line breaks `_`; empty parts of the path, `.` and `..` are
    left out, and of a very long key the end is kept. Raises `TypeError` if it is no text."""
    if not isinstance(key, str): raise TypeError(f'__key__ {key!r:.60}: the key of a sample is a str')
    parts = [part for part in re.sub(r'[\\\0\n]', '_', utf8_key(key)).split('/') if part not in ('','.','..')]
    return '/'.join(parts)[-1000:].lstrip('/') or None

def check_key(
    key # Of a sample that is written to shards
):
    "Raise `ValueError` or `TypeError` unless a sample in a tar can have this key, and be read by WebDataset"
    if not isinstance(key, str): raise TypeError(f'__key__ {key!r:.60}: the key of a sample is a str')
    utf8(key)
    if any(part in ('','.','..') for part in key.split('/')) or re.search(r'[\\\0\n]', key) or len(key)>1000:
        raise ValueError(f'__key__ {key!r:.200} cannot name a sample: it is a path without empty parts, . and ..')
    if split_name(f'{key}.x')!=(key,'x'):
        raise ValueError(f'__key__ {key!r:.200} cannot name a sample in a tar: there is a dot in its last part, or it '
                         'begins with __…__; WebDataset would read another key')

# --- Labels and numbers

# A value of fixed width, such as a label, is written as text. WebDataset and HuggingFace's `datasets` read integers
# from `cls`, `id` and `index`. Other numbers become JSON, `age.f4.json`, and labels that are text become `cls.txt`.

INTEGER_FIELDS = 'cls','id','index' # The last parts of field names that WebDataset and `datasets` read as integers

def number_extension(
    field:str, # Name of a field
    value # Its value in a sample: bytes, a label as `str`, or a number
)->str: # '', '.txt' or '.json'
    """What is appended to the name of a field in a shard, so that other tools read its value

    A label that is text becomes `cls.txt`. A number whose field other tools do not know becomes JSON: `age.f4.json`."""
    if isinstance(value, bytes): return ''
    if isinstance(value, str): return '.txt'
    return '' if field.rsplit('.', 1)[-1].lower() in INTEGER_FIELDS else '.json'

def member_extension(
    field:str, # Name of a field
    spec:dict, # Its entry in the plan of an ingest: `dtype`, and of labels without a vocabulary `staged` and `text`
)->str: # Such as `jpg`, `cls.txt` for labels that are text, or `age.f4.json`
    "The extension that a field has in shards: what follows the key of a sample and a dot"
    if spec['dtype'] is None: return field
    return field+number_extension(field, '' if spec.get('staged') and spec['text'] else 0)

def check_members(
    where:str, # Name or URL of the dataset, for messages
    fields:dict, # `{field: entry}` of the plan of an ingest
    others:dict=None, # Fields that the samples have already
):
    """Raises `ValueError` if two fields would have the same extension in shards, in small letters

    It is also raised for a field whose name would not be read back, such as one with a slash."""
    known = {member_extension(field, spec).lower():field for field,spec in (others or {}).items()}
    for field,spec in fields.items():
        if field.endswith('.crc'): continue   # a checksum, which is in the index
        extension = member_extension(field, spec)
        if '\0' in field or split_name(f'0.{extension}')!=('0',extension.lower()):
            raise ValueError(f'{where}: {field!r} cannot name a field in shards, whose members have the names of the '
                             'fields: no / and no NUL; rename it, for instance in fn')
        other = known.setdefault(extension.lower(), field)
        if other!=field:
            raise ValueError(f'{where}: {other!r} and {field!r} cannot both name fields in shards: WebDataset would '
                             f'read the members of both as {extension.lower()!r}; rename one, for instance in fn')

def field_of(
    extension:str # From `split_name`
)->str:
    """The field that an extension stands for: `cls` for `cls.txt`, a text label; `age.f4` for `age.f4.json`, a number

    Any other extension is the name of its field: the result is `extension` itself."""
    base,_,last = extension.rpartition('.')
    codec = get_codec(base) if base else None
    if last=='txt': return base if codec is not None and codec.name=='cls' else extension
    is_number = codec is not None and codec.dtype is not None and codec.name not in INTEGER_FIELDS
    return base if last=='json' and is_number else extension

# As `str` writes an integer: 7 is one, and 007 is text, since both may be there, as different labels
_integer = re.compile('0|-?[1-9][0-9]{0,18}')

def integer_of(
    text:str, # A label
)->int: # `None` if it is none, or does not fit 64 bits with a sign
    """The integer that a label is, if `str` writes it so: `007` and `+7` are none

    White space around it, such as the end of a line, does not count."""
    text = text.strip()
    number = int(text) if _integer.fullmatch(text) else None
    return number if number is not None and -1<<63<=number<1<<63 else None

def is_exact_label(
    name:str, # Of a member with a label
)->bool:
    "Does the name end in `.txt`, so that all of the text is the label?"
    return name.lower().endswith('.txt')

def parse_number(
    field:str, # Name of the field
    value:bytes, # Its value in a tar
    is_text:bool=False, # Is a label text, also if it looks like an integer?
    is_exact:bool=False, # Is a label all of the text, with the end of the line? See `is_exact_label`
): # The number or label as `int`, `float` or `str`; `value` itself if the field does not have a fixed width
    """The value of a field whose numbers and labels are written as text, as WebDataset does

    A label with leading zeros is text, so that `007` and `7` are two labels. Raises `ValueError` for bytes that are not
    UTF-8, and in a field of floats for text that is no number, or one such as `1e999` that does not fit. In a field of
    integers, text that is no integer is returned, and the codec refuses it."""
    codec = get_codec(field)
    if codec is None or codec.dtype is None: return value
    text = value.decode()
    if codec.name=='cls':
        if is_exact: return text
        number = None if is_text else integer_of(text)
        return text.removesuffix('\n').removesuffix('\r') if number is None else number
    text = text.strip()
    if re.fullmatch('-?[0-9]+', text): return int(text)
    if codec.dtype.kind!='f': return text
    try: number = float(text.replace('_', '?'))   # Python reads 1_000 as a number
    except ValueError: raise ValueError(f'{field}: {text[:40]!r} is no number') from None
    if math.isinf(number) and 'inf' not in text.lower(): raise ValueError(f'{field}: {text[:40]} does not fit a float')
    return number
