"""Turns a sample number into the sample's value; the values of a batch are read before, by `load/batch`

Docs: page `load/fetch_transform`"""

# fastai's items are plain integers here, the numbers of samples. The first transform of a block turns a number into the
# sample's value. In training the loader has read the values of the whole batch with one request before. A number on its
# own, as in `dsets[0]`, costs one request.

from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from fastai.torch_core import Tensor
from fastai.vision.core import PILMask
from fasttransform import DisplayedTransform

from ..codec.arrays import from_pixels, NpyCodec, NpzCodec
from ..codec.fields import is_image, mask_image
from ..codec.images import ImageCodec
from ..codec.raster import Rasterise
from ..codec.numbers import StrokeSequence
from ..codec.strokes import simplify
from .lazy_image import create_image, open_image, picture_of
from .timed import stage
from ..store.base import corrupt_value, decode_value, field_codec, Store
from ..store.fields import parse_field

# --- Fetch

# `Fetch` is the first transform of a block. While `RemoteDL` makes a batch, `values` holds what the store has for its
# samples, and `Fetch` only decodes. Otherwise it reads the value first. `predict` and `test_dl` also pass new inputs: a
# file, bytes or an image is decoded, and of a sample in a dict the field is taken.

NO_SAMPLE_NUMBER = ('a number in a tensor is no sample number: give a list or a NumPy array of them, such as '
                    'items.tolist()')

class Fetch(DisplayedTransform):
    """Reads field `field` of a sample and decodes it

    An image becomes what `img_cls.create` makes of it. Without `img_cls` an image file stays `bytes`, for fastai's
    `ImageBlock` to open. Other values are decoded by the codec of the field. Besides sample numbers, `Fetch` accepts
    new inputs of `predict` and `test_dl`: samples as dicts, and for images also files, bytes, arrays and pictures."""
    order = -1   # before the getters
    undecoded = None   # options of `open_image` while a loader makes items whose images may stay undecoded
    def __init__(self,
        field:str=None, # Field to read; default: the first that holds images, else the first
        store:Store=None, # Store to read from; default: the store of the items
        img_cls:type=None, # Type of the image: `PILImage`, `PILImageBW` or `PILMask`; default: images stay bytes
        draw:Rasterise|StrokeSequence=None, # How to draw strokes, or to make sequences of them; default: `Rasterise()`
        # `convert(value)` -> what to use in place of a decoded value. Its `ValueError` gets the sample's name
        convert=None
    ):
        if draw is not None and not isinstance(draw, (Rasterise,StrokeSequence)):
            raise TypeError(f'draw takes a Rasterise(…) or a StrokeSequence(…), not {draw!r}')
        self.field,self.store,self.img_cls,self.draw,self.convert = field,store,img_cls,draw,convert
        self.values = {}   # `{sample number: value}` of the batch that a loader is making
        self.follow = store is None   # read from the store of the items, whichever that is?
        image_types = (bytes,str,Path,np.ndarray,Tensor,Image.Image) if img_cls is not None else ()
        self.input_types = (int,np.integer,dict)+image_types

    def setups(self, items):
        """Choose the store and the field, if they are not set; `items` is a `TfmdLists`, whose `items` have the store

        Raises `ValueError` if there is no store, and `UnknownField`."""
        store = getattr(getattr(items, 'items', None), 'store', None)
        if self.store is None and store is not None: self.bind(store)
        if self.store is None: raise self._lacks('store')
        self.follow = self.follow or self.store==store
        if self.field is None: self.field = self.store.field_table.default
        self.store.field_table.entry(self.field)   # raises `UnknownField`
        if self.codec.name=='strokes':
            self.draw = self.draw or Rasterise()
            self.input_types = (*self.input_types,list)

    def _lacks(self, what):
        return ValueError(f'Fetch({self.field!r}) knows no {what}: use get_items=get_remote_items, or '
                          'Fetch(field, store)')

    def bind(self, store):
        "Read from `store` from now on, and forget the values of the batch"
        self.store,self.values = store,{}

    @property
    def codec(self):
        "The codec of the field; raises what `field_codec` raises"
        return field_codec(self.store, self.field)

    def receive(self,
        values:dict # `{sample number: stored value}` of a batch
    ):
        "Keep the values of a batch: its items need no request. With `draw`, strokes are drawn here, all at once."
        if self.draw is not None:
            try: values = dict(zip(values, self.draw.batch(list(values.values()))))
            except ValueError: pass   # one is damaged: each is drawn alone, and this one raises `CorruptSample`
        self.values = values

    def _call(self, nm, x, split_idx=None, **kwargs):
        # Dispatch on the type of `x` by `isinstance`: fastai's dispatch on `encodes` would cost 15 µs a value
        if nm!='encodes': return x
        is_number = isinstance(x, (int,np.integer))
        if is_number and self.store is None: raise self._lacks('store')
        if self.field is None and (is_number or isinstance(x, dict)): raise self._lacks('field')   # before `setups`
        if is_number: return self._of_number(int(x))
        if isinstance(x, dict):
            field = next((name for name in parse_field(self.field)[0] if name in x), None)
            if field is None: raise KeyError(f"no {self.field!r} in a sample with {', '.join(x)}")
            x = x[field] if self.convert is None else self._converted(x[field], 'a sample')
        if isinstance(x, Store): raise TypeError(f'{x!r} is no item: give get_remote_items(store)')
        if self.draw is not None: x = self._drawn(x)
        if self.img_cls is None: return x
        if isinstance(x, (bytes,Image.Image)): return create_image(x, self.img_cls)
        if isinstance(x, Tensor) and x.ndim==0: raise TypeError(NO_SAMPLE_NUMBER)
        if not isinstance(x, (str,Path)): return self.img_cls.create(x)
        try: return create_image(Path(x).read_bytes(), self.img_cls)
        except UnidentifiedImageError as e: raise UnidentifiedImageError(f'{x}: not an image') from e

    def _drawn(self, x):
        """What `draw` makes of strokes `x`, a list or stored bytes: a Pillow image, or an array for a `StrokeSequence`

        Anything else, such as the bytes of an image file, is returned as it is."""
        if isinstance(x, list): return self.draw.create(simplify(x))
        try: return self.draw.create(x) if isinstance(x, bytes) else x
        except ValueError: return x   # an image file

    @stage('decode')
    def _of_number(self, number):
        """The object of sample `number`: what `_image` returns for images, else the decoded and converted value

        Raises `CorruptSample`, `ValueError` from `convert`, and what `get_many` raises if the value has to be read."""
        value = self.values.get(number)
        if value is None: value = self.store.get_many([number], self.field, check=True)[self.field][0]
        if self.img_cls is None and not is_image(self.codec.name):
            value = self.store.decode(number, self.field, value)
            return value if self.convert is None else self._converted(value, f'sample {number}')
        fail = partial(self._corrupt, number, value)
        return decode_value(self.store, number, self.field, value, partial(self._image, fail), fail)

    def _image(self, fail, value):
        """The image of a stored value, of type `img_cls`

        Without `img_cls`, it is the bytes of an image file, or else what `_not_a_file` returns. `fail(exception)`
        returns the exception to raise if decoding is put off and fails later."""
        codec = self.codec
        if type(codec) in (NpyCodec,NpzCodec):   # arrays become images only because the block asked for an image type
            to_image = mask_image if issubclass(self.img_cls, PILMask) else from_pixels
            value = to_image(codec.from_bytes(value))
        if isinstance(value, bytes) and not isinstance(codec, ImageCodec): value = self._not_a_file(codec, value)
        if self.img_cls is None: return value
        if self.undecoded is None: return create_image(value, self.img_cls)
        return open_image(value, self.img_cls, fail, **self.undecoded)

    def _not_a_file(self, codec, value):
        """What is in the bytes `value` of `codec`, which are not an image file: what `draw` makes, if it is set

        Otherwise a Pillow image; if `img_cls` opens it next, an array where the codec's `array` gives one. Raises
        `ValueError` if there is no picture, and what the codec raises."""
        if self.draw: return self.draw.create(value)
        picture = picture_of(codec, value) if self.img_cls else codec.image(value)
        if picture is None: raise ValueError(f'the codec {codec.name!r} stores no pictures')
        return picture

    def _converted(self, value, sample):
        "`convert(value)`; raises its `ValueError` with the names of the dataset, the field and `sample`: `sample 7`"
        try: return self.convert(value)
        except ValueError as e:
            name = '' if self.store is None else f'{self.store.name}: '
            raise ValueError(f'{name}{sample}, field {self.field!r}: {e}') from None

    def _corrupt(self, number, value, cause):
        reader = getattr(self.img_cls, '__name__', self.codec.name)
        what = f'{len(value)} bytes' if isinstance(value, bytes) else f'the number {value!r}'
        return corrupt_value(self.store, number, self.field, cause, f': {what} that {reader} cannot read')

    def __getstate__(self): return {k:v for k,v in self.__dict__.items() if k!='undecoded'} | {'values':{}}
