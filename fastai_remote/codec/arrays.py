"""NumPy arrays, and pictures stored as arrays

Docs: page `codec/arrays`"""
import io, math, zipfile

import numpy as np
from PIL import Image

from .base import Codec, described, utf8

def refuse_mask(
    o, # Any value
    name:str # What it is, for the message
):
    """Raise `ValueError` for a masked array with masked elements, of which only the values would be stored

    Also for a list, or lists in it, that contain one."""
    if isinstance(o, np.ma.MaskedArray) and _has_true(np.ma.getmaskarray(o)):
        raise ValueError(f'{name}: a masked array, whose mask would be lost: give o.filled(…)')
    if not isinstance(o, (list,tuple)): return
    if any(issubclass(kind, (np.ma.MaskedArray,list,tuple)) for kind in set(map(type, o))):
        for value in o: refuse_mask(value, name)

def _has_true(mask):
    "Is an element of `mask` true? It is of bool, or of a compound dtype of bools"
    return any(_has_true(mask[name]) for name in mask.dtype.names) if mask.dtype.names else bool(mask.any())

def _as_array(o, name):
    """Array, tensor, image, number or nested list `o` as a NumPy array of the same values; of an image, its pixels

    Raises `TypeError` or `ValueError`, whose messages begin with `name`."""
    if isinstance(o, (str,dict,set,frozenset)):
        raise TypeError(f'{name}: want an array, a tensor or numbers, got {described(o)}')
    refuse_mask(o, name)
    try: array = np.asarray(o.detach() if hasattr(o, 'detach') else o)
    except MemoryError: raise
    except Exception as e:   # libraries raise many kinds of errors, PyTorch a `RuntimeError`
        raise ValueError(f'{name}: {e}') from None
    if array.dtype.hasobject:
        raise ValueError(f'{name}: want numbers, got an array of dtype object, which would be a pickle '
                         '(allow_pickle=False): give numbers of one type, and lists of one length, or store them '
                         'as json')
    if isinstance(o, Image.Image):
        mode = from_pixels(array).mode
        if o.mode!=mode:
            raise ValueError(f'{name}: pixels of a picture of mode {o.mode} would come back as {mode}: give '
                             f'o.convert({mode!r}), or the array that you mean')
    if isinstance(o, (list,tuple)): _check_list(o, array, name)
    return array

def _check_list(o, a, name):
    """Raise `ValueError` if a value in list `o` became text, or an integer a rounded float, in `a`, the array of `o`

    `name`, that of the codec, begins the message."""
    if a.dtype.kind not in 'fcUS': return
    for x,y in zip(np.array(o, object).ravel(), a.ravel().tolist()):
        if hasattr(x, 'item'): x = x.item()   # a number of NumPy or PyTorch
        if a.dtype.kind in 'US' and x!=y: raise ValueError(f'{name}: {x!r} would become text, {y!r}')
        if a.dtype.kind in 'fc' and isinstance(x, int) and int(x)!=y:
            raise ValueError(f'{name}: {x} would become {y!r} in an array of {a.dtype}')

MAX_ARRAY_BYTES = 1<<31 # The arrays of an npz file may have so many bytes together when they are decompressed

def _read_npy(
    file, # A binary file
    size:int # Its bytes
)->np.ndarray:
    "The array in an npy file; raises `ValueError` if the file is damaged, or contains objects"
    try:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version==(1, 0) else np.lib.format.read_array_header_2_0
        shape,_,dtype = read_header(file)
        if dtype.hasobject: raise ValueError('objects, which would be a pickle (allow_pickle=False)')
        n,there = math.prod(shape),size-file.tell()
        if min(shape, default=0)<0 or n*dtype.itemsize>there:   # before memory for it is allocated
            raise ValueError(f'an array of {dtype} of shape {shape} in {there:,} bytes')
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)
    except MemoryError: raise
    except Exception as e:   # NumPy raises many kinds of errors for damaged bytes
        raise ValueError(f'a damaged npy file, or another kind of file: {e}') from None

class NpyCodec(Codec):
    "Codec of one array, stored as an npy file; tensors and lists of numbers are converted to arrays"
    def pack(self, o):
        np.save(f:=io.BytesIO(), _as_array(o, self.name), allow_pickle=False)
        return f.getvalue()
    def unpack(self, b): return _read_npy(io.BytesIO(b), len(b))

class NpzCodec(Codec):
    "Codec of one array, or of several as `{name: array}`, stored as a compressed npz file"
    def pack(self, o):
        if isinstance(o, dict): self._check_names(o)
        arrays = o if isinstance(o, dict) else {'arr_0':o}
        arrays = {name:_as_array(a, self.name) for name,a in arrays.items()}
        np.savez_compressed(f:=io.BytesIO(), **arrays)
        return f.getvalue()

    def _check_names(self, arrays):
        "Raise `ValueError` unless an npz file can store `{name: array}` and give it back under the same names"
        if list(arrays)==['arr_0']:
            raise ValueError(f"{self.name}: {{'arr_0': array}} would come back as the array alone: give that, "
                             "or another name")
        taken = 'file','args','kwds','allow_pickle'   # parameters of `np.savez_compressed`
        for name in arrays:
            if not isinstance(name, str) or name in taken or name.endswith('.npy') or '\0' in name:
                raise ValueError(f'{self.name}: {name!r} cannot name an array in an npz file')
            utf8(name)

    def unpack(self, b):
        """`{name: array}`, or the array alone if its name is `arr_0` and it is the only one

        Raises `ValueError` if `b` is damaged, or if the arrays have more than `MAX_ARRAY_BYTES`."""
        try:
            with zipfile.ZipFile(io.BytesIO(b)) as file: arrays = self._arrays(file)
        except (ValueError,MemoryError): raise
        except Exception as e:   # `zipfile` raises many kinds of errors for damaged bytes
            raise ValueError(f'a damaged npz file, or another kind of file: {e or type(e).__name__}') from None
        return arrays['arr_0'] if list(arrays)==['arr_0'] else arrays

    def _arrays(self, file):
        """`{name: array}` of an open `ZipFile`; raises `ValueError` if they have more than `MAX_ARRAY_BYTES` in all

        If one is damaged, it raises a `ValueError`, or an error of `zipfile` or `zlib`, which `unpack` converts."""
        total = sum(member.file_size for member in file.infolist())
        if total>MAX_ARRAY_BYTES:
            raise ValueError(f'an npz file of {total:,} bytes when decompressed; codec.arrays.MAX_ARRAY_BYTES, '
                             f'{MAX_ARRAY_BYTES:,}, is the limit')
        arrays = {}
        for member in file.infolist():
            # with a size, no more is decompressed than the file says; at the end, the crc32 of the member is compared
            with file.open(member) as f: content = f.read(member.file_size)
            arrays[member.filename.removesuffix('.npy')] = _read_npy(io.BytesIO(content), len(content))
        return arrays

def refuse_channels_first(shape):
    "Raises `TypeError` for the shape (channels,h,w), which is that of torchvision's tensors"
    if len(shape)==3 and shape[0] in (1,3,4) and shape[2]>4:
        raise TypeError(f'want pixels of shape (h,w) or (h,w,channels), got {tuple(shape)}: of a tensor with channels '
                        'first, give permute(1, 2, 0), of an array transpose(1, 2, 0)')

def from_pixels(
    a # Array or tensor of shape (h,w), (h,w,1) or (h,w,channels)
)->Image.Image:
    """The Pillow image of an array or tensor

    Raises `ValueError` if elements are masked or it has another number of dimensions, and `TypeError` if no mode of
    Pillow fits its dtype and channels."""
    refuse_mask(a, 'pixels')
    a = np.asarray(a)
    if a.ndim not in (2, 3): raise ValueError(f'want pixels of shape (h,w) or (h,w,channels), got {a.shape}')
    refuse_channels_first(a.shape)
    return Image.fromarray(a[...,0] if a.ndim==3 and a.shape[-1]==1 else a)

class _PictureCodec(Codec):
    """Adds pictures to a codec of arrays, the other base class: `image` makes them, and values are read as arrays

    `pack` raises `ValueError` for an array of which Pillow can make no picture. Bytes that are encoded already are only
    decoded, and not refused for that, as files of other programs may hold any array; then only `image` raises it."""
    def image(self, b): return self._picture(self.from_bytes(b))

    def pack(self, o):
        b = super().pack(o)
        self._picture(o if isinstance(o, dict) else _as_array(o, self.name))
        return b

    def _picture(self, pixels):
        "The Pillow image of an array; raises `ValueError` if there is none, and for a dict of arrays"
        try: return from_pixels(pixels)
        except (TypeError,ValueError):
            found = (f"the arrays {', '.join(pixels)}" if isinstance(pixels, dict)
                     else f'an array of {pixels.dtype} of shape {pixels.shape}')
            raise ValueError(f'{self.name}: want pixels of a dtype and shape that Pillow has a mode for, such as uint8 '
                             f'of shape (h,w) or (h,w,3), got {found}; npy and npz store any array') from None

class NpyImageCodec(_PictureCodec, NpyCodec):
    "Codec of pictures, stored as an npy file of their pixels; values come back as an array, and `image` makes pictures"

class NpzImageCodec(_PictureCodec, NpzCodec):
    "Codec of pictures, stored as a compressed npz file of their pixels; values come back as an array, see `image`"
