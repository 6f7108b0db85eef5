"""The table of the kinds of values that a field can hold, and the block of each

Docs: page `load/kinds`"""

# `RedisBlock` and `from_store` look up a field in a table. Each row says how a kind of value is recognised, and which
# transforms and which loss belong to it. A new kind is a new row.

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
from fastai.data.block import TransformBlock
from fastai.data.transforms import IntToFloatTensor, OneHotEncode, RegressionSetup
from fastai.torch_core import TensorBase
from fastai.vision.core import (
    BBoxLabeler, LabeledBBox, PILImage, PILImageBW, PILMask, PointScaler, TensorBBox, TensorPoint)
from fastcore.foundation import L

from ..codec.audio import is_audio
from ..codec.numbers import as_points, boxes_of, holds_boxes, holds_points, StrokeSequence
from ..codec.fields import get_codec, is_image, is_mask
from ..codec.raster import Rasterise
from .audio import FetchAudio, pad_audio
from .boxes import pad_boxes, StoreBoxLabels
from ..core import UnknownField
from .fetch_transform import Fetch
from .targets import ArraySetup, is_points, MaskCodes, pad_strokes, StoreCategorize, StoreMultiCategorize, ToStrokes
from .texts import is_tokens, length_field, RemoteLMDL, StoredTokens, TextOptions
from ..store.base import field_codec, Store

@dataclass(frozen=True)
class FieldChoice:
    """A field that a block is asked for, with the options of `RedisBlock`, and what is known of the field

    Raises `UnknownField` if the store has no such field, `ValueError` for an optional one, such as `txt?`, and
    `TypeError` for a name that is no `str`, or `text` that is no `TextOptions`."""
    field:str # Name of the field, or alternatives such as `jpg;png`; `None`: the first that holds images
    store:Store=None # `None` if the block gets its store later
    img_cls:type=None # Type that the user chose; `None` if none was chosen
    draw:Rasterise|StrokeSequence=None # How to draw strokes, or to make sequences of them
    text:TextOptions=None # How texts become numbers; default: `TextOptions()`

    def __post_init__(self):
        if self.text is not None and not isinstance(self.text, TextOptions):
            raise TypeError(f'text takes TextOptions(…), not {self.text!r:.100}')
        if self.field is None: return
        if not isinstance(self.field, str): raise TypeError(f"a field is a name such as 'jpg', not {self.field!r:.100}")
        if self.store is not None: self.store.field_table.entry(self.field)   # raises `UnknownField`
        if self.field.endswith('?') and (self.store is None or self.field not in self.store.manifest.fields):
            raise ValueError(f'RedisBlock({self.field!r}): a block needs a value of each sample: leave out the ?, and '
                             f'restrict the items to samples that have one, by having={self.field.removesuffix("?")!r}')

    @property
    def codec(self)->str:
        """Name of the codec: from the store; without one 'img' if a type was chosen, else from the field's name

        Raises `UnknownField`, and `ValueError` if the name does not tell, or this process does not know the codec."""
        if self.store is not None: return field_codec(self.store, self.field).name
        if self.field is None or self.img_cls is not None: return 'img'
        if ';' in self.field and all(is_image(name) for name in self.field.split(';')): return 'img'
        if get_codec(self.field): return self.field.rsplit('.', 1)[-1].lower()
        if is_mask(self.field, 'img'): return 'img'
        raise ValueError(f'RedisBlock({self.field!r}): the name does not say what it holds: '
                         f'give the store too, RedisBlock(store, {self.field!r})')

    @property
    def holds_images(self)->bool:
        "Does the field hold images other than masks, and was `PILMask` not chosen? Needs a `store` and a `field`."
        return is_image(self.codec) and not self.store.field_table.holds_masks(self.field) and not self.is_type(PILMask)

    def is_type(self, *types)->bool:
        "Did the user choose one of `types`, or a subclass?"
        return isinstance(self.img_cls, type) and issubclass(self.img_cls, types)

@dataclass(frozen=True)
class Kind:
    "A kind of value that a field can hold: how it is recognised, and the block that fastai needs for it"
    name:str # In words
    example:str # Name of a field of this kind
    shown:str # Type that fastai sees in a batch, or in an item if that differs
    rule:str # How a field of this kind is recognised, in words
    loss:str # The loss that a `Learner` chooses if a field of this kind is the target; '' for inputs
    fits:Callable # `fits(choice)` -> bool: is the field of this kind? The first kind in the table that fits is used
    type_tfms:Callable # `type_tfms(choice)` -> list of transforms, of which the first reads the value
    item_tfms:tuple=() # Transforms of an item, which the block adds
    batch_tfms:tuple=(IntToFloatTensor,) # Transforms of a batch, which the block adds
    before_batch:Callable=None # `before_batch(list of tuples)` -> the same, with items of equal length
    loader:Callable=None # `loader(choice)` -> `{argument of the loader: value}`, besides `before_batch`
    dl_type:Callable=None # `dl_type(choice)` -> type of the loaders; default: the one that `block` is given

    def block(self,
        choice:FieldChoice, # The field
        dl_type:type # Type of the loaders
    )->TransformBlock:
        "The block for a field of this kind"
        options = {} if self.before_batch is None else {'before_batch':self.before_batch}
        if self.loader: options.update(self.loader(choice))
        if self.dl_type: dl_type = self.dl_type(choice) or dl_type
        return TransformBlock(type_tfms=FreshTransforms(self.type_tfms(choice)), item_tfms=list(self.item_tfms),
                              batch_tfms=list(self.batch_tfms), dl_type=dl_type, dls_kwargs=options)

class FreshTransforms(L):
    "Transforms of a block, copied each time they are used: one `DataBlock` may serve many stores"
    def __iter__(self): return (copy(t) for t in self.items)

# The table goes from special kinds to general ones. The user can choose by the type, and otherwise the name and the
# codec of the field decide.

def _is_drawing(choice):
    "Is `choice`, a `FieldChoice`, a field of strokes or of points with times that becomes sequences?"
    if not isinstance(choice.draw, StrokeSequence) or choice.field is None: return False
    return is_points(choice.field) or choice.codec=='strokes'

def _sequence(choice):
    points = is_points(choice.field)
    return [Fetch(choice.field, choice.store, draw=None if points else choice.draw), ToStrokes(choice.draw, points)]

def _is_mask_field(choice):
    "Does the field hold masks, by the type that was chosen, or else by its name, its codec and the store's vocabulary?"
    if choice.img_cls is not None: return choice.is_type(PILMask)
    if choice.field is None: return False
    if choice.store is None: return is_mask(choice.field, choice.codec)
    return choice.store.field_table.holds_masks(choice.field)

def _image(choice, img_cls=None):
    "The `Fetch` that reads an image, as `img_cls`, else the type of `choice`, else `PILImage`; it draws strokes"
    draw = None if isinstance(choice.draw, StrokeSequence) else choice.draw
    return Fetch(choice.field, choice.store, img_cls or choice.img_cls or PILImage, draw)

def _image_or_mask(choice):
    "Reads an image; without a store, which would tell whether it is a mask, `MaskCodes` finds out later"
    is_undecided = choice.store is None and choice.field is not None and choice.img_cls is None
    return [_image(choice), MaskCodes(True)] if is_undecided else [_image(choice)]

def _value(choice, *tfms, convert=None): return [Fetch(choice.field, choice.store, convert=convert), *tfms]

def _is_array_that(holds, choice):
    "Does `holds(field, codec)` say yes to a field without a chosen type?"
    return choice.img_cls is None and choice.field is not None and holds(choice.field, choice.codec)

def _is_boxes(choice):
    return choice.is_type(TensorBBox) or _is_array_that(holds_boxes, choice)

def _is_box_labels(choice):
    if choice.img_cls is not None: return choice.is_type(LabeledBBox)
    return choice.field is not None and 'boxes' in choice.field.split('.') and choice.codec=='labels'

def _is_points(choice):
    return choice.is_type(TensorPoint) or _is_array_that(holds_points, choice)

def _boxes(choice):
    return _value(choice, TensorBBox.create, convert=partial(boxes_of, choice.field))

def _is_numbers(choice):
    return choice.img_cls in (torch.Tensor,TensorBase) or choice.img_cls is None and choice.codec in ('npy','npz')

def _text_options(choice): return choice.text or TextOptions()

def _text(choice):
    text = _text_options(choice)
    return _value(choice, text.tokenizer(), text.numericalize(), *text.after_numbers())

def _tokens(choice):
    text = _text_options(choice)
    return _value(choice, StoredTokens(text.vocab), *text.after_numbers())

_of_texts = dict(batch_tfms=(), loader=lambda choice: _text_options(choice).loader_options(),
                 dl_type=lambda choice: RemoteLMDL if _text_options(choice).is_lm else None)

KINDS = [   # the first that fits a field is used, so special kinds come before general ones
    Kind('drawing as a sequence', 'strokes', 'TensorStrokes',
         '`draw=StrokeSequence(…)`, and the codec `strokes` or points with times in `points.npy`', '',
         _is_drawing, _sequence, batch_tfms=(), before_batch=pad_strokes),
    Kind('audio', 'wav', 'TensorAudio',
         'a name that ends in `wav`, `flac`, `mp3`, `ogg`, `opus` or `m4a`, or has a part `audio` and is `npy` '
         'or `npz`', '',
         lambda choice: choice.field is not None and choice.img_cls is None and is_audio(choice.field),
         lambda choice: [FetchAudio(choice.field, choice.store)], batch_tfms=(), before_batch=pad_audio),
    Kind('mask', 'mask.png', 'TensorMask',
         'a part `mask` of the name, or an image with a vocabulary, or the type `PILMask`', 'CrossEntropyLossFlat',
         _is_mask_field, lambda choice: [_image(choice, choice.img_cls or PILMask), MaskCodes()]),
    Kind('bounding boxes', 'boxes.npy', 'TensorBBox',
         'an array, or a list in JSON, with a part `boxes`, `bboxes` or `bbox` of the name, or the type `TensorBBox`; '
         'shape (n,4), corners (x1, y1, x2, y2) in pixels, or (x, y, width, height) with a part `xywh` of the name', '',
         _is_boxes, _boxes, item_tfms=(PointScaler,), before_batch=pad_boxes),
    Kind('labels of boxes', 'boxes.labels', 'TensorMultiCategory',
         'the codec `labels` and a part `boxes` of the name, or a field `labels` that is a target beside boxes, or the '
         'type `LabeledBBox`', '', _is_box_labels,
         lambda choice: _value(choice, StoreBoxLabels(choice.field)), item_tfms=(BBoxLabeler,)),
    Kind('points', 'points.npy', 'TensorPoint',
         'an array, or a list in JSON, with a part `points`, `keypoints` or `landmarks` of the name, or the type '
         '`TensorPoint`; shape (n,2), (x, y) in pixels', 'MSELossFlat',
         _is_points, lambda choice: _value(choice, TensorPoint.create, convert=as_points), item_tfms=(PointScaler,)),
    Kind('tokens', 'tokens.npy', 'TensorText', 'the codec `npy` and a part `tokens` of the name', '',
         lambda choice: choice.field is not None and choice.img_cls is None and is_tokens(choice.field), _tokens,
         **_of_texts),
    Kind('several numbers', 'xy.npy', 'Tensor', 'the codec `npy` or `npz`, or the type `Tensor`', 'MSELossFlat',
         _is_numbers, lambda choice: _value(choice, ArraySetup())),
    Kind('grayscale image', 'png', 'TensorImageBW', 'the type `PILImageBW`', '',
         lambda choice: choice.is_type(PILImageBW), lambda choice: [_image(choice)]),
    Kind('image', 'jpg', 'TensorImage', 'a codec of images, or the type `PILImage`', '',
         lambda choice: choice.img_cls is not None or is_image(choice.codec), _image_or_mask),
    Kind('category', 'cls', 'TensorCategory', 'the codec `cls`', 'CrossEntropyLossFlat',
         lambda choice: choice.codec=='cls', lambda choice: _value(choice, StoreCategorize(choice.field))),
    Kind('multi-category', 'labels', 'TensorMultiCategory', 'the codec `labels`', 'BCEWithLogitsLossFlat',
         lambda choice: choice.codec=='labels',
         lambda choice: _value(choice, StoreMultiCategorize(choice.field), OneHotEncode())),
    Kind('text', 'txt', 'TensorText', 'the codec `txt`; only as an input', '', lambda choice: choice.codec=='txt',
         _text, **_of_texts),
    Kind('one number', 'age.f4', 'Tensor', 'a codec of numbers', 'MSELossFlat',
         lambda choice: get_codec(choice.codec).dtype is not None,
         lambda choice: _value(choice, RegressionSetup())),
    Kind('any other value', 'json', 'the value', 'the codec `json` or `bin`, or one of your own; only as an input', '',
         lambda choice: True, _value)]

def kind_of(
    choice:FieldChoice # A field
)->Kind:
    "The kind of values that a field holds; raises `UnknownField`, `ValueError`, and `TypeError` for an unknown type"
    chosen = choice.img_cls
    if chosen is None or hasattr(chosen, 'create') or chosen in (LabeledBBox,torch.Tensor,TensorBase):
        return next(kind for kind in KINDS if kind.fits(choice))
    raise TypeError(f'RedisBlock({choice.field!r}): img_cls takes a type of image, such as PILImageBW or PILMask, '
                    f'TensorPoint, TensorBBox, LabeledBBox or Tensor, not {chosen!r}')

def kinds_table()->str:
    "The table of kinds in Markdown, for the guide"
    def code(text): return f'`{text}`' if text else ''
    rows = [(f'**{kind.name}**', code(kind.example), kind.rule, code(kind.shown), code(kind.loss)) for kind in KINDS]
    header = 'kind','example of a field','how it is recognised','fastai sees','loss'
    return '\n'.join(f"| {' | '.join(cells)} |" for cells in (header, ['---']*len(header), *rows))

# --- The fields of inputs and targets

# `from_store` takes the names of fields, or none. `choose_fields` decides which fields are meant.

def choose_fields(
    store:Store,
    # Field, or fields, of the input, or `{field: type}`, where `None` is no type; default: the store's `default_field`
    x:str|list|dict=None,
    # The same of the target; default: `cls`, or boxes and their labels, or `labels`, or the only one of `_TARGETS`
    y:str|list|dict=None,
    img_cls:type=PILImage, # Type of images for which the user chose none
    draw:Rasterise|StrokeSequence=None, # How to draw strokes, or to make sequences of them
    text:TextOptions=None, # How texts become numbers; for a language model there is no target
)->tuple: # A list of `FieldChoice` for the inputs, and one for the targets
    """The fields that a model is trained with

    Raises `UnknownField`, also if there is no target, and `ValueError` for an optional field, for a target of a
    language model, and if labels of boxes do not follow their boxes."""
    is_lm = isinstance(text, TextOptions) and text.is_lm
    if is_lm and y is not None: raise ValueError(f'TextOptions(is_lm=True): a language model has no target y={y!r}')
    x = x or store.field_table.default
    y = [] if is_lm else y or _default_targets(store, x)
    def choices(fields):   # a field may be input and target, of different types
        pairs = fields.items() if isinstance(fields, dict) else [(field, None) for field in L(fields)]
        return [FieldChoice(field, store, chosen, draw, text) for field,chosen in pairs]
    def with_type(choice):
        return replace(choice, img_cls=img_cls) if choice.img_cls is None and choice.holds_images else choice
    inputs,targets = choices(x),choices(y)
    return [*map(with_type, inputs)],[*map(with_type, _with_labels_of_boxes(targets))]

LOSS,PREDICTED,CONFIDENCE = RESULTS = 'loss.f4','pred.cls','confidence.f4' # What `add_losses` stores: never a target

# Names of kinds, in the order in which a target is looked for
_TARGETS = 'category','multi-category','mask','points','several numbers','one number'

def _default_targets(store, x):
    """List of the names of the target's fields if the user names none, and the inputs are `x`

    Raises `UnknownField` if there is none, and if several fields of the first kind in `_TARGETS` could be the target;
    one that is called `target` is preferred."""
    if 'cls' in store.fields: return ['cls']
    boxes = [field for field in store.fields if _is_boxes(FieldChoice(field, store))]
    labels = [field for field in store.fields if store.field_table.entry(field)['codec']=='labels']
    if len(boxes)==1 and len(labels)==1: return boxes+labels
    if 'labels' in store.fields: return ['labels']
    inputs = [name for field in (x if isinstance(x, dict) else L(x)) for name in field.split(';')]
    idle = [*inputs, *RESULTS, *map(length_field, filter(is_tokens, store.fields))]
    choices = [FieldChoice(field, store) for field in store.fields if field not in idle and not store.may_lack(field)]
    for name in _TARGETS:
        found = [o.field for o in choices if o.codec not in ('id','index') and kind_of(o).name==name]
        called_target = [field for field in found if field.split('.')[0]=='target']
        if len(called_target)==1: return called_target
        if len(found)==1: return found
        if found:
            raise UnknownField(f"{store.name}: no target: several fields could be it: y= takes one of "
                               f"{', '.join(map(repr, found))}")
    raise UnknownField(f"{store.name}: no target: y= takes one of {', '.join(map(repr, store.fields))}")

def _with_labels_of_boxes(targets):
    """`targets`, a list of `FieldChoice`, where a field of labels right after boxes gets the type `LabeledBBox`

    Raises `ValueError` if there are boxes and labels, but never labels right after boxes."""
    boxes = [_is_boxes(choice) for choice in targets]
    labels = [choice.img_cls is None and choice.codec=='labels' for choice in targets]
    found = [labels[k] and k>0 and boxes[k-1] for k in range(len(targets))]
    if any(boxes) and any(labels) and not any(found):
        names = [choice.field for choice in targets]
        raise ValueError(f'{targets[0].store.name}: y={names}: the labels of boxes come right after the boxes')
    return [replace(choice, img_cls=LabeledBBox) if of_boxes else choice for choice,of_boxes in zip(targets, found)]
