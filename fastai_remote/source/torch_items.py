"""Map-style datasets, as of PyTorch and torchvision: names of classes, original files, and fields for each value

Docs: page `source/torch_items`"""

# A dataset of PyTorch is an object with a length and `dataset[i]`. It does not say what its items are, and an image
# that it returns is no longer a file. This module finds out both.

import io, os, random, sys, threading
from collections import Counter
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from PIL import Image

from ..codec.base import Encoded
from ..codec.fields import get_codec, value_kind
from ..codec.images import check_image
from .base import as_json, AsIs, evenly_spaced, IndexedSource, read_file, Sent, stable_repr
from .files import image_field

# --- torchvision

# A few datasets of torchvision have boxes, captions or names of classes where nothing in their items says so. What is
# known of them is one line of a table for each.

def _names_of_pets(dataset):
    kinds = {'category':dataset.classes, 'binary-category':getattr(dataset, 'bin_classes', None)}
    return next((kinds[kind] for kind in dataset._target_types if kind in kinds), None)

def _names_of_species(dataset):
    "Names of the classes of `INaturalist`, for its first type of targets; `None` if there are none"
    kind = dataset.target_type[0]
    if kind=='full': return dataset.all_categories
    index = dataset.categories_index.get(kind, {})
    return sorted(index, key=index.get) or None

def _fields_of_celeba(dataset):
    "`{place: field}` of the targets of CelebA whose meaning their shape does not tell"
    names,kinds = {'bbox':'bbox.xywh.npy', 'landmarks':'landmarks.npy'},dataset.target_type
    return {'[1]' if len(kinds)==1 else f'[1][{k}]':names[kind] for k,kind in enumerate(kinds) if kind in names}

def _annotated_boxes(item, objects, names):
    """`{field: value}` of an item: the boxes in the annotations of torchvision, and the labels of their classes

    The fields are `boxes.npy`, corners x1, y1, x2, y2, `float32` of shape (n,4), and `boxes.labels`, a list. `objects`
    and `names`: as in `_Known`."""
    found = objects(item[1] or [], names)
    boxes = np.array([box for box,_ in found], np.float32).reshape(-1, 4)
    return {'boxes.npy':boxes, 'boxes.labels':[label for _,label in found]}

def _coco_objects(target, names):
    def corners(x, y, w, h): return x,y,x+w,y+h
    return [(corners(*o['bbox']), names.get(o['category_id'], o['category_id'])) for o in target]

def _voc_objects(target, names):
    def corners(box): return [float(box[side]) for side in ('xmin','ymin','xmax','ymax')]
    return [(corners(o['bndbox']), o['name']) for o in target['annotation'].get('object', [])]

def _kitti_objects(target, names): return [(o['bbox'], o['type']) for o in target]

def _names_of_coco(dataset): return {number:category['name'] for number,category in dataset.coco.cats.items()}

@dataclass
class _Known:
    "What is known of a dataset of torchvision that its items and attributes do not tell"
    names:object = None # dataset -> names of its classes, if they are elsewhere or depend on the target that was chosen
    captions:str = None # Name of the second value, if it is one caption or several, and no label
    fields:object = None # dataset -> `{place: field}` where boxes are (x, y, width, height), or arrays are points
    # dataset -> `(objects, {number of a class: its name} or None)`, or `None`; `objects(target, names)` returns a list
    # of the corners and the label of each box
    boxes:object = None
    note:str = None # For the report

_COCO_NOTE = ('class names are left out: annotations have a category_id, and dataset.coco.cats has its name; fn= can '
              'put it into each')
_KNOWN = {
    'CelebA': _Known(fields=_fields_of_celeba),
    'CocoCaptions': _Known(captions='captions'),
    'CocoDetection': _Known(boxes=lambda dataset: (_coco_objects, _names_of_coco(dataset)), note=_COCO_NOTE),
    'Flickr30k': _Known(captions='captions'),
    'Flickr8k': _Known(captions='captions'),
    'INaturalist': _Known(names=_names_of_species),
    'Kitti': _Known(boxes=lambda dataset: (_kitti_objects, None) if dataset.train else None),
    'Omniglot': _Known(names=lambda dataset: dataset._characters),
    'OxfordIIITPet': _Known(names=_names_of_pets),
    'SBU': _Known(captions='caption'),
    'VOCDetection': _Known(boxes=lambda dataset: (_voc_objects, None)),
    'WIDERFace': _Known(fields=lambda dataset: {"[1]['bbox']":'bbox.xywh.npy'}),
}

def _known(dataset)->_Known:
    "What is known of the nearest class of torchvision that `dataset` is one of"
    names = [cls.__name__ for cls in type(dataset).__mro__ if cls.__module__.startswith('torchvision.')]
    return next((_KNOWN[name] for name in names if name in _KNOWN), _Known())

# --- Class names

# The labels of a dataset are often numbers, and their names are an attribute. They are also found through PyTorch's
# `Subset`, `random_split` and `ConcatDataset`. Names are not used if they may be wrong, because a `target_transform` or
# a wrapper may change the numbers. Then labels stay numbers, and the report says so. A concatenation of datasets with
# different classes is an error, because the same number would mean two things.

def class_names(dataset):
    """Returns `(names, reason)`: a list of names of classes or `None`, and why names are changed or not used or `None`

    Classes of one name, such as the two cranes of ImageNet, get their numbers, `crane (134)`; the reason says so. Looks
    through PyTorch's wrappers `Subset` and `ConcatDataset`, which do not change labels. The reason is a text; it is a
    `ValueError`, to be raised unless the user gives names, if the parts of a concatenation have different classes, or
    if the classes are numbers other than 0, 1, … in this order."""
    found = [_names_and_reason(part) for part in _innermost(dataset)]
    if not found: return None,None
    if all(o==found[0] for o in found): return found[0]
    first = ', '.join(str(names and names[:3]) for names,_ in found[:3])
    return None,ValueError(
        f'a concatenation of {len(found)} datasets with different classes, {first}: a label that is a number would '
        'mean several of them; give datasets of the same classes, labels as text, or vocab=')

def _names_and_reason(dataset):
    "`(names, reason)`, see `class_names`, of a dataset that is no wrapper of PyTorch"
    names = _own_class_names(dataset)
    if names is None:
        wrapped = getattr(dataset, 'dataset', None)
        if wrapped is None or not class_names(wrapped)[0]: return None,None
        return None,f'class names are left out: {type(dataset).__name__} may change the numbers that they belong to'
    names = [_as_name(o) for o in names]
    if not all(isinstance(o, (str,int)) for o in names):
        return None,f'class names are left out: {str(names)[:100]} are no names'
    if getattr(dataset, 'target_transform', None) is not None:
        return None,'class names are left out: target_transform may change the numbers that they belong to'
    if all(isinstance(o, int) for o in names) and names!=list(range(len(names))):
        return None,ValueError(
            f'the classes of {type(dataset).__name__} are numbers, {str(names)[:40]}, so that a label may be a class '
            'or its position: vocab= with these numbers says that it is a class, and with texts that it is a position')
    return _distinct(names)

def _distinct(names):
    "Returns `(names, note or None)`: names that are there several times get the numbers of their classes"
    counts = Counter(names)
    distinct = [f'{name} ({code})' if counts[name]>1 else name for code,name in enumerate(names)]
    changed = [new for name,new in zip(names, distinct) if new is not name]
    if not changed: return names,None
    return distinct,f"classes that share a name are called {', '.join(map(repr, changed[:4]))}"

def _is_torch_wrapper(dataset):
    "Is `dataset` indexed by code of `torch.utils.data`, as `Subset` is? Other wrappers may change labels"
    method = getattr(type(dataset), '__getitem__', None)
    return getattr(method, '__module__', '').startswith('torch.utils.data')

def _own_class_names(dataset):
    """The names of the classes of a dataset, in the order of their numbers; `None` if it has none

    They are in `vocab` (fastai), `classes`, `categories` or `class_to_idx` (torchvision). What has no order or is no
    list there, such as a set or the number of classes, does not count."""
    special = _known(dataset).names
    if special: return special(dataset)
    for name in 'vocab','classes','categories':
        names = getattr(dataset, name, None)
        is_list = hasattr(names, '__len__') and hasattr(names, '__getitem__') and not isinstance(names, (Mapping,str))
        if is_list and len(names): return names
    numbers = getattr(dataset, 'class_to_idx', None)
    if not isinstance(numbers, dict) or not all(isinstance(o, (int,np.integer)) for o in numbers.values()): return None
    if sorted(numbers.values())==list(range(len(numbers))):
        return sorted(numbers, key=numbers.get)

def _innermost(dataset):
    "Yields the datasets in PyTorch's wrappers `Subset` and `ConcatDataset`; a dataset without a wrapper itself"
    parts = getattr(dataset, 'datasets', None) if _is_torch_wrapper(dataset) else None
    if isinstance(parts, list):
        for part in parts: yield from _innermost(part)
    elif _is_torch_wrapper(dataset) and hasattr(dataset, 'dataset'): yield from _innermost(dataset.dataset)
    else: yield dataset

def _as_name(o):
    if isinstance(o, tuple) and all(isinstance(x, str) for x in o): return ', '.join(o)   # synonyms, as in ImageNet
    return o.item() if isinstance(o, np.generic) else o

# --- Original files

# A dataset opens an image file, decodes it and often converts it to RGB. To encode the pixels again would lose quality
# (JPEG) or take three times the space (PNG). So the files that Pillow opens while the dataset returns an item are
# recorded. A file is stored in place of an image if decoding it gives exactly the pixels of the image. This works for
# any dataset that uses Pillow, whatever its attributes are called. An image that a transform has changed has other
# pixels, and is stored as PNG.

_recorded,_lock = threading.local(),threading.Lock()   # files that the dataset opens in this thread
_open_image,_n_recording = None,0   # Pillow's function, while a thread records

def _open_and_record(fp, *args, **kwargs):
    if getattr(_recorded, 'files', None) is not None: _recorded.files.append(fp)
    return _open_image(fp, *args, **kwargs)

@contextmanager
def opened_files():
    """Context manager: a list, to which each file is added that `PIL.Image.open` opens in this block and thread

    Such a block must not contain another one. Its elements are what `open` was called with: paths, or open files."""
    global _open_image,_n_recording
    with _lock:
        if _n_recording==0: _open_image,Image.open = Image.open,_open_and_record
        _n_recording += 1
    _recorded.files = files = []
    try: yield files
    finally:
        _recorded.files = None
        with _lock:
            _n_recording -= 1
            if _n_recording==0: Image.open = _open_image

def _bytes_of(fp):
    "The bytes of what Pillow was given: a path, an open file, or a `BytesIO`; `None` if they cannot be read again"
    path = fp if isinstance(fp, (str,bytes,os.PathLike)) else getattr(fp, 'name', None)
    try:
        if isinstance(path, (str,bytes,os.PathLike)): return read_file(path)
        return fp.getvalue() if isinstance(fp, io.BytesIO) else None
    except (OSError,ValueError): return None   # it is gone or closed

def original_file(
    image:Image.Image, # What a dataset returned
    files:list, # What it has opened, from `opened_files`
): # `(bytes of the file, the image in it)`, or `None`: `image` was changed, or made otherwise
    """The file that `image` is the content of

    The file is decoded again and compared, pixel by pixel. It may be of any mode where the dataset returns RGB, as
    fastai converts it, and black and white where the dataset returns grey."""
    for fp in files:
        content = _bytes_of(fp)
        if content is None: continue
        try:
            check_image(content)
            opened = Image.open(io.BytesIO(content))
            if opened.size==image.size and _same_pixels(opened, image): return content,opened
        except Exception: continue   # a damaged file: Pillow raises many kinds of errors

def _same_pixels(opened, image):
    """Does `image` have the pixels of `opened`, or of its conversion to RGB, or from black and white to grey?

    Both are Pillow images of the same size, which is not checked."""
    if opened.mode==image.mode:
        return opened.tobytes()==image.tobytes() and opened.getpalette()==image.getpalette()
    if (opened.mode,image.mode)!=('1','L') and image.mode!='RGB': return False
    return opened.convert(image.mode).tobytes()==image.tobytes()

# --- The values of an item

# An item is often a tuple of an image and a target. The target may be a number, a text, a mask, a list of boxes, a dict
# of tensors, or a tuple of these. `flat_items` takes tuples apart, and dicts if they contain arrays. Other lists and
# dicts, such as the annotations of COCO and VOC, are stored as JSON.

def _has_arrays(o):
    "Is `o` an array, a tensor, an image or a scalar of NumPy or PyTorch, or a dict with one of these in it?"
    if isinstance(o, Mapping): return any(_has_arrays(value) for value in o.values())
    return getattr(o, 'shape', ())!=() or isinstance(o, Image.Image) or hasattr(o, 'item')

def flat_items(
    item, # What a dataset returns
    name:str='', # Its name, if it is a value of a dict
    place:str='', # Where it is in the whole, such as `[1]`
): # Yields `(place, name, value)`
    """The values in an item, which may consist of tuples and dicts, also one inside the other

    An item that is a tuple or a dict is taken apart, and so is a list with arrays, images or scalars of NumPy or
    PyTorch in it. Of what is inside, so are tuples, and dicts and namedtuples with such values. Other dicts and lists
    are values."""
    if isinstance(item, tuple) and hasattr(item, '_asdict'): item = item._asdict()   # a namedtuple
    is_tuple = isinstance(item, tuple) or isinstance(item, list) and not place and any(map(_has_arrays, item))
    if is_tuple:
        for k,value in enumerate(item): yield from flat_items(value, name, f'{place}[{k}]')
    elif isinstance(item, Mapping) and (not place or _has_arrays(item)):
        for key,value in item.items():
            yield from flat_items(value, f'{name}.{key}'.strip('.'), f'{place}[{key!r}]')
    else: yield place,name,item

def _kind_of(value):
    "As `value_kind`, and `labels` for a tensor of labels of fastai"
    return 'labels' if type(value).__name__=='TensorMultiCategory' else value_kind(value)

@dataclass
class _ItemPart:
    "A part of the items of a dataset: where it is, what it holds, and the field that stores it"
    place:str # Such as `[1]`, or `['boxes']`
    name:str # Key of a dict; '' in a tuple
    kinds:set = field(default_factory=set) # What `_kind_of` returned
    formats:set = field(default_factory=set) # Fields for the files of images; `None` for images of no file
    modes:set = field(default_factory=set) # Of images
    types:set = field(default_factory=set) # Names of the types of the values
    are_codes:bool = True # Are all values lists of integers?
    field:str = None # That stores it

    def look(self, value, files):
        "Add what `value` shows to the attributes; `files`: what the dataset has opened for it, see `opened_files`"
        kind = _kind_of(value)
        if kind is None: return
        self.kinds.add(kind)
        self.types.add(type(value).__name__)
        # by its attributes: a tensor may be one that is no array of NumPy, which is the error of its sample later
        name = str(getattr(value, 'dtype', '')).rpartition('.')[2]
        self.are_codes &= kind=='npy' and len(value.shape)==1 and name.startswith(('int','uint'))
        if kind!='image': return
        found = original_file(value, files)
        self.formats.add(found and _format_field(found[1]))
        self.modes.add(value.mode)

    @property
    def kind(self):
        """The kind of its values, as of `_kind_of`; `json` for values of several kinds, and lists that are all empty

        Whole numbers and floats together are `f4`. By its name, `caption` is `txt`, and `captions` are `json`."""
        kinds = self.kinds-{'empty'}
        if kinds=={'labels'} and self.name=='captions': return 'json'
        if kinds=={'cls'} and self.name=='caption': return 'txt'
        if kinds=={'cls','f4'} and 'str' not in self.types: return 'f4'
        return next(iter(kinds)) if len(kinds)==1 else 'json'

def _format_field(image): return {'JPEG':'jpg', 'MPO':'jpg', 'PNG':'png', 'WEBP':'webp'}.get(image.format, 'img')

# --- Fields

# All samples have the same fields. So they are decided once, by ten items, and not item by item: an item may have an
# empty list where others have boxes. The first value of each kind has the usual name (`png`, `cls`, `npy`); further
# ones are called by their position in the tuple, such as `1.png`. The second image is a mask if its mode is that of
# masks.

def _known_of_all(datasets, what, transform):
    """The value of `_Known.fields` or `boxes`, as `what` says, for each of `datasets` if it is the same for all

    It is `None` otherwise, and if one has an attribute `transform`: that may change labels, or what boxes surround."""
    found = []
    for dataset in datasets:
        find = getattr(_known(dataset), what) if getattr(dataset, transform, None) is None else None
        found.append(find and find(dataset))
    return found[0] if found and all(o==found[0] for o in found) else None

_MASK_MODES = 'P','1','I','I;16'
_TYPE_FIELDS = {'TensorBBox':'boxes.npy', 'TensorPoint':'points.npy'}   # of fastai

class ItemLayout:
    """Which values of an item of a dataset are stored in which fields

    It is decided by some items, evenly spaced, so that all samples have the same fields. `parts` is
    `{place: _ItemPart}`. Items that cannot be read, or have a value that no field can store, are passed over:
    they are failed samples later."""
    def __init__(self,
        datasets:list, # The splits of one dataset
        looks:int=10, # Items of each that are looked at
    ):
        self.parts = {}
        for dataset in datasets:
            for i in evenly_spaced(len(dataset), looks).tolist():
                with suppress(Exception): self._look(dataset, i)
        self.parts = {place:part for place,part in self.parts.items() if part.kinds}
        self.extensions = set.union(set(), *map(_file_formats, datasets))
        parts = [part for dataset in datasets for part in _innermost(dataset)]
        self.known_fields = _known_of_all(parts, 'fields', 'target_transform') or {}
        self.boxes = _known_of_all(parts, 'boxes', 'transforms')
        for part in self.parts.values(): self._choose_field(part)

    def _look(self, dataset, i):
        "Add what item `i` shows to `parts`; raises what the dataset raises, and `TypeError` if no field fits"
        with opened_files() as files: item = dataset[i]
        captions = _known(next(_innermost(dataset), dataset)).captions
        found = list(flat_items(item))
        for _,_,value in found: _kind_of(value)   # raises an error before anything is kept of this item
        for place,name,value in found:
            if captions and place=='[1]': name = captions
            self.parts.setdefault(place, _ItemPart(place, name)).look(value, files)

    def _choose_field(self, part):
        "Set `part.field`, by its kind, its key, and what is known of the dataset"
        taken = {other.field for other in self.parts.values()}
        if part.kind!='image': extension = part.kind
        elif self._is_mask(part): extension = 'mask.png'
        else: extension = self._image_field(part)
        position = part.place.strip('[]').replace('][', '.')
        known = self.known_fields.get(part.place)
        known = known or next((_TYPE_FIELDS[name] for name in part.types if name in _TYPE_FIELDS), None)
        has_boxes = any(o.name=='boxes' for o in self.parts.values())
        if part.name=='labels' and part.are_codes and has_boxes: known = 'labels'   # of torchvision's detection models
        if known and known not in taken: part.field = known
        elif part.name:
            is_label = part.name in ('label','labels') and part.kind=='cls' and 'cls' not in taken
            part.field = 'cls' if is_label else _field_of_key(part, extension)
            while part.field in taken: part.field = f'_{part.field}'
        elif part.kind=='f4': part.field = 'target.f4' if 'target.f4' not in taken else f'{position}.f4'
        else: part.field = extension if extension not in taken else f"{position}.{extension.split('.')[-1]}"

    def _is_mask(self, part):
        "Are the images of `part` masks: a `PILMask`, or in a tuple a later image whose modes are those of masks?"
        images = [o for o in self.parts.values() if 'image' in o.kinds]
        if 'PILMask' in part.types: return True
        if part.name or part is images[0]: return False
        return part.modes<=set(_MASK_MODES) or part.modes=={'L'} and 'L' not in images[0].modes

    def _image_field(self, part):
        "The field for images: that of the format of their files, `img` for several formats, `png` without files"
        if part.formats=={None}: return 'png'
        formats = part.formats|(self.extensions if part.place in ('','[0]') else set())
        return next(iter(formats)) if len(formats)==1 else 'img'

    @property
    def notes(self)->list:
        "A list of one remark for the report: which value of an item is which field; empty if these are called as usual"
        listed = ', '.join(f"item{part.place} -> {part.field}" for part in self.parts.values())
        unusual = any(part.field.split('.')[0].isdigit() or part.name=='label' or part.field=='cls' and part.name
                      for part in self.parts.values())
        return [f'values are stored as fields: {listed}'] if unusual else []

def _field_of_key(part, extension):
    """The field for `part`, a value of a dict: its key, with `_` for characters that a field cannot have

    If the key does not end in the name of a codec, the last part of `extension` is appended for images, and for the
    kinds `json` and `txt`. If it ends in one for numbers, text, labels or JSON, `npy` is appended for arrays, and if it
    ends in the one for several labels, `cls` is appended for a single label."""
    name = ''.join('_' if c in ':#~@ /' else c for c in part.name)
    codec = get_codec(name)
    if codec is None: return f"{name}.{extension.split('.')[-1]}" if part.kind in ('image','json','txt') else name
    no_arrays = codec.dtype is not None or codec.name in ('txt','labels','json')
    if part.kind=='cls' and codec.name=='labels': return f'{name}.cls'
    return f'{name}.npy' if part.kind=='npy' and no_arrays else name

def _file_formats(dataset):
    "Set of the fields for the files that torchvision's `ImageFolder` lists; empty for other datasets"
    extensions = set()
    for part in _innermost(dataset):
        listed = getattr(part, 'samples', None) if hasattr(part, 'loader') else None
        if not isinstance(listed, list) or not listed: continue
        if isinstance(listed[0], tuple) and isinstance(listed[0][0], str):
            extensions |= {os.path.splitext(path)[1] for path,*_ in listed}
    return {image_field(f'image{extension}') or 'img' for extension in extensions}

# A value that does not fit its field makes its sample a failed one. A mask with a palette is stored as its codes, which
# is what NumPy and PyTorch see in it. `PILMask` would convert the colours of the palette to grey.

class _LoadItem:
    "raw -> item: indexes the dataset that `sent`, a `Sent`, has"
    def __init__(self, sent): self.sent = sent
    def __call__(self, i): return self.sent.get()[i]

class _LoadSample(_LoadItem):
    "raw -> sample: indexes the dataset, and makes `{field: value}` of the item, by the places of an `ItemLayout`"
    def __init__(self,
        sent:Sent, # The dataset
        layout:ItemLayout,
        names:list=None, # Of the classes, for lists of their numbers
    ): self.sent,self.names,self.boxes,self.parts = sent,names,layout.boxes,layout.parts

    def __call__(self, i):
        dataset = self.sent.get()
        with opened_files() as files: item = dataset[i]
        return self._sample(item, files)

    def _sample(self, item, files):
        """The sample of `item`; `files`: what the dataset has opened for it, see `opened_files`

        Raises `ValueError` for an item that lacks a value, or has one that the others do not have."""
        sample = {}
        for place,_,value in flat_items(item):
            if place not in self.parts:
                if value is None: continue
                raise ValueError(f'item{place} is a {type(value).__name__}, which other items do not have: give fn=, '
                                 'a function that returns a dict of fields')
            part = self.parts[place]
            sample[part.field] = self._value(part, value, files)
        missing = [place for place,part in self.parts.items() if part.field not in sample]
        if missing: raise ValueError(f'item{missing[0]} is missing, which other items have')
        return sample if self.boxes is None else {**sample, **_annotated_boxes(item, *self.boxes)}

    def _value(self, part, value, files):
        """What the field of `part` stores for `value`

        Raises `ValueError` for `None`, except in a field of JSON, for the class -1 if classes have names, and as
        `_image_value` and `_labels` do."""
        if value is None and not part.field.endswith('json'):
            raise ValueError(f'item{part.place} is None, which field {part.field!r} cannot store')
        if part.kind=='image': return _image_value(part, value, files)
        if part.kind=='npy' and part.field=='labels': return np.asarray(value).tolist()
        if type(value).__name__=='TensorMultiCategory': return self._labels(part, value)
        if part.kind=='cls' and hasattr(value, 'item'): value = value.item()
        if part.field=='cls' and value==-1 and self.names:
            raise ValueError(f'item{part.place} is -1, which marks a sample without a label: leave such samples out')
        return as_json(value) if part.kind=='json' else value

    def _labels(self, part, value):
        """List of the classes in a tensor of fastai: their names, or their numbers if there are no names

        Floats are zeros and ones, and integers are numbers of classes. Raises `ValueError` for a class without a
        name."""
        codes = value.numpy()
        codes = (np.flatnonzero(codes) if codes.dtype.kind=='f' else codes).tolist()
        if not self.names: return codes
        for code in codes:
            if not 0<=code<len(self.names):
                raise ValueError(f'item{part.place} has class {code}: there are {len(self.names)} names of classes')
        return [self.names[code] for code in codes]

def _image_value(part, image, files):
    """What the field of `part`, an `_ItemPart`, stores for `image`: its file as `Encoded`, or else the image

    `files` is what the dataset opened for the item, a list as from `opened_files`. The file is taken if it has the same
    pixels as the image, and a format that the field takes. A mask with a palette or two colours becomes an image of its
    codes. Raises `ValueError` if the field was chosen because the images looked at are JPEG files, and this one is not
    from a JPEG file."""
    if not isinstance(image, Image.Image): return image
    if 'mask' in part.field.split('.') and image.mode in ('P','1'):
        return Image.fromarray(np.asarray(image).astype(np.uint8))
    found = original_file(image, files)
    fmt,codec = found and _format_field(found[1]),part.field.rsplit('.', 1)[-1].lower()
    if found and codec in (fmt,'img') or codec=='jpeg' and fmt=='jpg': return Encoded.of(found[0], codec, found[1])
    if codec!='jpg' or part.name.rsplit('.', 1)[-1].lower()=='jpg': return image   # the user has chosen the field
    what = f'a file of another format ({fmt})' if found else 'not as it is in a file'
    raise ValueError(f'item{part.place} is {what}, while the images that were looked at are JPEG files; '
                     "fn=lambda item: {'img': item[0], 'cls': item[1]} stores both")

# --- The source

# If there is an `fn`, it gets the item as the dataset returns it.

class DatasetSource(IndexedSource):
    """A source of the samples of a map-style dataset

    Worker processes, if there are any, load it from a temporary file, and each of them indexes its own."""
    def __init__(self, dataset):
        self.items,self.sent = dataset,Sent(dataset)
        self.siblings = [self]   # of all splits, which have the same fields; the first of them knows which

    @property
    def layout(self)->ItemLayout:
        "Which values of an item are stored in which fields"
        return self.siblings[0]._layout

    @cached_property
    def _layout(self): return ItemLayout([s.items for s in self.siblings])

    @cached_property
    def names(self):
        "`(names, reason)`, see `class_names`"
        return class_names(self.items)

    @property
    def vocab(self):
        names,reason = self.names
        if isinstance(reason, Exception): raise reason
        if not names: return None
        fields = {part.field:part for part in self.layout.parts.values()}
        if 'cls' in fields: return {'cls':names}
        if 'labels' in fields and 'TensorMultiCategory' in fields['labels'].types: return {'labels':names}
        if 'mask.png' in fields and 'PILMask' in fields['mask.png'].types: return {'mask.png':names}
        return {'cls':names}

    @property
    def label_notes(self):
        names,reason = self.names
        return [f'{reason}; vocab= names them'] if reason else []

    @property
    def notes(self):
        notes = {_known(part).note for part in _innermost(self.items)}-{None}
        if self.layout.boxes is not None:
            notes = ['the boxes of the annotations are stored as boxes.npy, in pixels (x1, y1, x2, y2), and the names '
                     'of their classes as boxes.labels']
        return [*notes, *self.layout.notes]

    def __len__(self): return len(self.items)
    def read(self, numbers): return [(f'item {i}', i) for i in numbers.tolist()]
    @property
    def load(self): return _LoadItem(self.sent)
    @property
    def as_is(self):
        if not self.layout.parts: return None   # no item could be read: errors say why
        return AsIs(_LoadSample(self.sent, self.layout, self.names[0]))

    is_identified = False   # by three items, which may look like others
    def fingerprint(self):
        n = len(self)
        texts = [self._item_text(i) for i in sorted({0, n//2, n-1}) if 0<=i<n]
        return n,type(self.items).__qualname__,stable_repr(texts)   # of a list, it is a hash

    def _item_text(self, i):
        "Text that identifies item `i`; empty if the item is another one each time, although generators begin anew"
        texts = set()
        for _ in range(2):
            with _seeded():
                try: texts.add(stable_repr(self.items[i]))
                except Exception as e: texts.add(stable_repr(e))   # the item is a failed sample later
        return texts.pop() if len(texts)==1 else ''

@contextmanager
def _seeded():
    "Context manager: the random generators of Python, NumPy and PyTorch begin anew; afterwards they go on as before"
    torch = sys.modules.get('torch')   # a dataset can use its generator only where it is imported
    of_python,of_numpy,of_torch = random.getstate(),np.random.get_state(),torch and torch.get_rng_state()
    random.seed(0)
    np.random.seed(0)
    if torch: torch.default_generator.manual_seed(0)
    try: yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if torch: torch.set_rng_state(of_torch)
