"""Sources of lists, tables, datasets, stores and iterators

Docs: page `source/datasets`"""

# Data is seldom a folder of files. `as_source` makes a source of what there is.

import hashlib
from collections.abc import Iterator
from datetime import date, time
from functools import cached_property, partial
from inspect import getgeneratorstate
from pathlib import Path, PurePath
from types import GeneratorType

import numpy as np

from ..codec.base import Encoded
from ..codec.fields import get_codec
from ..codec.images import ImageCodec
from ..core import CorruptSample, MissingSample
from .base import AsIs, evenly_spaced, IndexedSource, LazyPart, refuse_address, SampleStream
from .base import shown_path, Source, split_names
from .base import SplitChunk, stable_repr, StreamedSource, unchanged
from .arrays import array_samples, is_array_file, is_array_path, is_dict_of_arrays
from .files import image_field, image_samples
from .csv_files import csv_samples
from .frames import is_table, is_table_path, table_samples
from .huggingface import agree, hf_samples, is_huggingface
from .torch_items import DatasetSource
from ..store.base import Store

# --- Items

# The items of a list are sent to the workers. DataFrames and other tables are in `source/frames`, and arrays by field
# in `source/arrays`. A dataset is written to a file, which each worker loads once, and the worker asks it for samples.
# A list of paths, whether `Path` or `str`, becomes `image_samples`.
#
# An image that a dataset returns is stored as PNG, which keeps its pixels. `fn=lambda o: {'jpg':o[0], 'cls':o[1]}`
# stores a JPEG. For image files, `image_samples` is better: it stores their bytes unchanged.

class _Items(IndexedSource):
    "A source of the items of a list, tuple or array; a worker is sent the items of its chunks"
    def __init__(self, items): self.items = items
    def __len__(self): return len(self.items)
    def read(self, numbers): return [(f'item {i}', self.items[i]) for i in numbers.tolist()]
    @cached_property
    def _digest(self):
        """A hash of all items, as text; `None` for an `np.memmap`, and if some are not plain data

        Such items may be large, or look like one another."""
        hashed = hashlib.sha256()
        if isinstance(self.items, np.memmap): return None
        try:
            if isinstance(self.items, np.ndarray): hashed.update(repr(_plain(self.items)).encode())
            else:
                for item in self.items: hashed.update(repr(_plain(item)).encode('utf-8', 'backslashreplace')+b'\n')
        except (TypeError,ValueError,RecursionError): return None   # `ValueError`: of integers with thousands of digits
        return hashed.hexdigest()

    @property
    def is_identified(self): return self._digest is not None
    def fingerprint(self):
        n = len(self)
        if self.is_identified: return n,self._digest
        return n,stable_repr([self.items[i] for i in evenly_spaced(n, 100).tolist()])   # of a list, it is a hash

_PLAIN = str,int,float,bool,bytes,type(None),complex,np.generic,date,time,PurePath
_usual = frozenset(_PLAIN)   # quicker to ask for

def _plain(o):
    """A value whose `repr` tells all of `o`, at any depth; raises `TypeError` unless `o` is plain data

    In place of arrays it has `(dtype, shape, hash)`, and in place of lists and tuples `(name of the type, list)`."""
    kind = type(o)
    if kind in _usual: return o
    if isinstance(o, np.void): o = np.asarray(o)   # a record, of which `repr` shows only a part
    elif kind is not dict and isinstance(o, _PLAIN): return o
    if isinstance(o, dict): return {key:_plain(value) for key,value in o.items()}
    if isinstance(o, (list,tuple)): return type(o).__name__,[_plain(value) for value in o]
    if isinstance(o, np.ndarray) and not o.dtype.hasobject:
        return str(o.dtype),o.shape,hashlib.sha256(np.ascontiguousarray(o)).hexdigest()
    raise TypeError(type(o).__name__)

# --- Class names

# The labels of a dataset are often numbers, and their names are an attribute: `vocab`, `classes` or `class_to_idx`.
# They are also found through PyTorch's `Subset`, `random_split` and `ConcatDataset`. Names are not used if they may be
# wrong: because the parts of a concatenation differ, or because a `target_transform` or a wrapper may change the
# numbers. Then labels stay numbers, and the report says so.

# --- Splits and streams

# A dict of sources is one source with splits. A chunk may contain samples of two splits; `SplitChunk` keeps them apart,
# in the order of the splits. Datasets with different classes cannot be splits of one source, because their numbers mean
# different things.
#
# What can only be iterated over is a stream.

class _OfSplits:
    "Base class of sources that consist of a source per split: their attributes, which follow from those of each"
    def __init__(self,
        srcs:dict # `{split: source}`, or of what is used in its place, as `as_is`
    ): self.srcs = srcs
    @property
    def is_identified(self): return all(s.is_identified for s in self.srcs.values())
    @property
    def implicit_keys(self): return all(s.implicit_keys for s in self.srcs.values())
    @property
    def codecs(self): return {field:codec for s in self.srcs.values() for field,codec in s.codecs.items()}
    @property
    def opens_images(self): return all(s.opens_images for s in self.srcs.values())
    @property
    def vocab(self):
        "`{field: labels}` of all splits, or `None`; raises `ValueError` if a number would mean several classes"
        merged = _merged_vocab([s.vocab for s in self.srcs.values()])
        for source in self.srcs.values():
            if not isinstance(source, DatasetSource): continue
            for field,labels in (source.vocab or {}).items():
                if merged[field][:len(labels)]==labels: continue
                classes = '; '.join(f'{split}: {s.vocab and s.vocab.get(field)}' for split,s in self.srcs.items())
                raise ValueError(f'splits with different classes: {classes[:300]}: a label that is a number would '
                                 'change its meaning; give datasets of the same classes, labels as text, or vocab=')
        return merged

    @property
    def load(self): return partial(_load_split, {split:s.load for split,s in self.srcs.items()})
    @property
    def as_is(self):
        parts = {split:s.as_is for split,s in self.srcs.items()}
        return None if None in parts.values() else _OfSplits(parts)

    def fingerprint(self): return {split:s.fingerprint() for split,s in self.srcs.items()}

    @property
    def notes(self): return list(dict.fromkeys(note for s in self.srcs.values() for note in s.notes))
    @property
    def label_notes(self):
        found = [notes for s in self.srcs.values() if (notes := s.label_notes) is not None]
        return list(dict.fromkeys(note for notes in found for note in notes)) if found else None

def _load_split(loads, split_raw):
    "The sample of `(split, raw)`, as a `SplitChunk` yields it; `loads` is `{split: raw -> sample}`"
    split,raw = split_raw
    return loads[split](raw)

class _Splits(_OfSplits, IndexedSource):
    "An indexed source of the samples of a source per split, one split after the other; raw samples are `(split, raw)`"
    def __init__(self,
        srcs:dict # `{split: indexed source}`
    ):
        self.srcs,self.block = srcs,min((s.block or 0 for s in srcs.values()), default=0)
        self.interleave = min((s.interleave for s in srcs.values()), default=16)
        ends = np.cumsum([0]+[len(s) for s in self.srcs.values()]).tolist()
        self.splits = {split:[start,stop] for split,start,stop in zip(self.srcs, ends, ends[1:])}

    def __len__(self): return max((stop for _,stop in self.splits.values()), default=0)
    def read(self, numbers):
        splits = list(self.splits)
        which = np.array([stop for _,stop in self.splits.values()]).searchsorted(numbers, side='right')
        runs = np.split(np.arange(len(numbers)), np.flatnonzero(np.diff(which))+1) if len(numbers) else []
        parts = ((splits[which[run[0]]], numbers[run]) for run in runs)
        return SplitChunk((split, self.srcs[split].read(mine-self.splits[split][0])) for split,mine in parts)

def _merged_vocab(vocabs):
    """`{field: labels}`: the labels of all `vocabs`, a list of such dicts, field by field, each label once

    If some are `None` or empty, it is the first that is not, or `None`."""
    if not all(vocabs): return next((v for v in vocabs if v), None)
    fields = dict.fromkeys(field for v in vocabs for field in v)
    return {field:list(dict.fromkeys(label for v in vocabs for label in v.get(field, []))) for field in fields}

class _Stream(SampleStream):
    "A source of what an iterable yields"
    is_identified = False
    def __init__(self, items):
        if isinstance(items, GeneratorType) and getgeneratorstate(items)!='GEN_CREATED':
            raise ValueError(f'{items.__qualname__}: this generator has been read from already; make a new one')
        self.items,self.once = items,isinstance(items, Iterator)

    def _raw_samples(self): return ((f'item {i}', o) for i,o in enumerate(self.items))
    def fingerprint(self): return type(self.items).__qualname__,getattr(self.items, '__qualname__', '')

class _StreamSplits(_OfSplits, StreamedSource):
    "A stream of the samples of one source per split, one split after the other; at least one of them is a stream"
    def __init__(self,
        srcs:dict # `{split: source}`
    ):
        self.srcs,self.once = srcs,any(isinstance(s, StreamedSource) and s.once for s in srcs.values())

    @cached_property
    def raw_bytes(self)->int:
        return max(source.raw_bytes or 0 for source in self.srcs.values() if isinstance(source, StreamedSource)) or None

    def stream(self, size):
        for split,source in self.srcs.items():
            parts = source.stream(size) if isinstance(source, StreamedSource) else _parts(source, size)
            for part in parts: yield SplitChunk([(split,part)])

def _parts(source, size):
    "An iterator over the parts of an indexed source, of up to `size` samples, as `StreamedSource.stream` yields them"
    return (source.read(np.arange(start, min(start+size, len(source)))) for start in range(0, len(source), size))

# --- Stores

# Another store is a source too. Workers read it batch by batch, and compare checksums. The bytes are therefore known to
# be what was written, and need not be decoded to check them.

class _Stored(IndexedSource):
    "A source of the samples of a store"
    opens_images = True
    def __init__(self, store, fields=None):
        self.store,self.splits,self.fields = store,store.splits or None,list(fields or store.fields)
        missing = next((field for field in self.fields if field not in store.fields), None)
        if missing is not None:
            raise ValueError(f"{store.name}: no field {missing!r}; there are {', '.join(store.fields)}")
        self.vocab = {f:labels for f,labels in store.manifest.vocab.items() if f in self.fields}
        self.codecs = {f:spec['codec'] for f,spec in store.manifest.fields.items()}
    def __len__(self): return len(self.store)
    def read(self, numbers):
        return LazyPart(partial(_read_stored, self.store.opener(), self.fields), numbers, size=64)
    @property
    def load(self): return _Decode(self.codecs)
    as_is = AsIs(unchanged)
    implicit_keys = True
    def fingerprint(self): return self.store.name,self.store.manifest.uid,self.fields

def stored_samples(
    store:Store, # A dataset
    fields:list=None # Fields to read; default: all
)->IndexedSource:
    "A source of the samples of a store; raises `ValueError` for a field that it does not have"
    return _Stored(store, fields)

def _read_stored(opener, fields, numbers):
    """Yields `(name, {field: value})` for samples of the store that `opener()` opens, for a `LazyPart`

    It is `(name, exception)` for a sample that is damaged or missing. Fields that a sample lacks are left out. If the
    shards have keys of samples, `__key__` is added."""
    store = opener()
    specs = {f'{f}?' if store.may_lack(f) else f:f for f in fields}
    try: columns = store.get_many(numbers, list(specs), check=True)
    except (CorruptSample,MissingSample) as e:
        if len(numbers)==1: yield f'sample {numbers[0]}',e
        else:   # one by one, to find out which one it is
            for k in range(len(numbers)): yield from _read_stored(opener, fields, numbers[k:k+1])
        return
    columns = {specs[spec]:stored_values(store, specs[spec], values) for spec,values in columns.items()}
    if store.shards is not None: columns['__key__'] = store.keys(numbers)
    for k,i in enumerate(numbers.tolist()):   # without the fields that a sample lacks
        yield f'sample {i}',{f:values[k] for f,values in columns.items() if values[k] is not None}

def stored_values(
    store:Store, # A dataset
    field:str, # One of its fields
    values # What `get_many` returned for it, with `check=True`
)->list: # Of as many values; `None` in place of that of a sample that has no such field
    """Values of a field as a source gives them: labels, Python numbers, and bytes that are stored again as they are

    Bytes are `Encoded` if there are checksums of the field, which `get_many` compared."""
    manifest = store.manifest
    codec = manifest.fields[field]['codec']
    if isinstance(values, np.ndarray): values = values.tolist()
    def each(function): return [None if value is None else function(value) for value in values]
    if field in manifest.vocab and codec=='cls': return each(lambda code: manifest.vocab[field][code])
    if manifest.fields[field]['dtype'] is not None:
        return each(lambda number: number.item() if isinstance(number, np.generic) else number)
    # bytes need no check where their checksum was compared
    return each(lambda value: Encoded.of(value, codec)) if f'{field}.crc' in manifest.fields else values

class _Decode:
    "raw -> sample for `fn`: image files stay bytes, all other bytes are decoded, and labels and numbers stay"
    def __init__(self,
        codecs:dict # `{field: name of its codec}`
    ): self.codecs = codecs
    def __call__(self, sample): return {f:self._value(f, v) for f,v in sample.items()}
    def _value(self, field, value):
        if not isinstance(value, bytes): return value
        codec = get_codec(self.codecs[field])
        return value if isinstance(codec, ImageCodec) else codec.from_bytes(value)

# --- as_source

# Objects of other libraries are recognised by their members, so that none of these libraries needs to be imported.

def _has(o, *members): return all(hasattr(o, member) for member in members)

def _is_fastai_datasets(o):
    "Is `o` a `Datasets` or `TfmdLists` of fastai with splits, and not one of these splits?"
    if not _has(o, 'n_subsets', 'subset', 'splits') or getattr(o, 'split_idx', None) is not None: return False
    return not any(isinstance(split, slice) for split in o.splits)   # a slice of all: there are no splits

def _is_stream(o):
    """Has `o` an `__iter__`, but not both `__len__` and `__getitem__`, as a generator, a set, an `IterableDataset`?

    PyTorch gives each `IterableDataset` a `__getitem__` that only raises an error. It may have a length."""
    method = getattr(type(o), '__getitem__', None)
    is_abstract = (getattr(method, '__module__', ''),getattr(method, '__qualname__', ''))==_ABSTRACT
    return (is_abstract or not _has(o, '__len__', '__getitem__')) and _has(o, '__iter__')

_ABSTRACT = 'torch.utils.data.dataset','Dataset.__getitem__'

def _refuse_loader(o):
    "Raise `TypeError`, which says what to give instead, for loaders of PyTorch or fastai, and fastai's `DataLoaders`"
    if not any(cls.__name__ in ('DataLoader','DataLoaders') and cls.__module__.startswith(('torch.','fastai.'))
               for cls in type(o).__mro__): return
    name = type(o).__name__
    if hasattr(o, 'loaders'):
        raise TypeError(f"{name}: its loaders return batches of transformed samples. Give the samples themselves: "
                        "{'train': dls.train_ds, 'valid': dls.valid_ds}")
    raise TypeError(f'{name}: it returns batches of transformed samples. Give the samples themselves: dl.dataset')

def _from_datasets(o):
    names = 'train','valid','test',*(f'split{k}' for k in range(3, o.n_subsets))
    return _Splits(_alike({split:DatasetSource(o.subset(k)) for k,split in zip(range(o.n_subsets), names)}))

def _alike(srcs):
    """Let the datasets and CSV files in `srcs`, `{split: source}`, use the same fields in all splits

    Changes these sources, and returns `srcs`. Raises `ValueError` as `agree` does."""
    for cls in DatasetSource,csv_samples:
        siblings = [s for s in srcs.values() if isinstance(s, cls)]
        for s in siblings: s.siblings = siblings
    return agree(srcs)

def _from_dict(splits, has_fn):
    "The source of `{split: what as_source takes}`; raises `TypeError` if their `load` are of different types"
    names = split_names(splits)
    srcs = _alike({name:_source_of_split(name, o, has_fn) for name,o in zip(names, splits.values())})
    if len({type(s.load) for s in srcs.values()})>1:
        kinds = '; '.join(f'{split}: {_kind_of(source)}' for split,source in srcs.items())
        raise TypeError(f'splits of different kinds: {kinds}. An fn would get samples of several kinds: give all '
                        'splits in the same way, with the same options such as fields=')
    return (_Splits if all(isinstance(s, IndexedSource) for s in srcs.values()) else _StreamSplits)(srcs)

def _kind_of(source):
    "The types of `source` and of its `load`, as text for a message"
    made = 'stay as they are' if source.load is unchanged else f'{type(source.load).__name__} makes'
    return f'{type(source).__name__}, whose samples {made}'

def _source_of_split(split, o, has_fn):
    try: return as_source(o, has_fn)
    except TypeError as e: raise TypeError(f'{split}: {e}') from e
    except ValueError as e: raise ValueError(f'{split}: {e}') from e

def _from_list(items, has_fn):
    "The source of a list or array, by its first item: paths of tables, paths of images, or other items"
    if has_fn or not len(items) or not isinstance(items[0], (str,Path)): return _Items(items)
    if is_table_path(items[0]): return table_samples(list(items))
    is_images = isinstance(items[0], Path) or _are_image_paths(items)
    return image_samples(items) if is_images else _Items(items)

def _from_path(o):
    "The source of a file of a table or of arrays, by its name; raises `TypeError`, or `FileNotFoundError` for a URL"
    if is_table_path(o): return table_samples(o)
    if is_array_path(o): return array_samples(o)
    refuse_address(o)
    raise TypeError(f'{str(o)!r} is a path: say what it holds: image_samples(…), drawing_samples(…), '
                    'table_samples(…), array_samples(…), csv_samples(…), tar_samples(…)')

def as_source(
    # A source, store, list, array, DataFrame, map-style dataset or iterator; a list of paths of images; the path of a
    # table or of arrays; or a dict of splits, `{split: one of these}`
    o,
    has_fn:bool=False, # Does an `fn` make the samples? It gets the elements of a list as they are, also paths
)->Source: # `o` itself if it is a source
    "The source of the samples in `o`; raises `TypeError` if it is none of these kinds"
    if isinstance(o, Source): return o
    if isinstance(o, Store): return _Stored(o)
    if isinstance(o, (list,tuple)) or type(o).__name__=='L': return _from_list(o, has_fn)
    _refuse_loader(o)
    if isinstance(o, (bytes,bytearray,memoryview)) or getattr(o, 'shape', None)==():
        raise TypeError(f'{type(o).__name__}: one value, and no samples: a list may hold it')
    if is_huggingface(o): return hf_samples(o)
    if _is_fastai_datasets(o): return _from_datasets(o)
    if is_dict_of_arrays(o) or is_array_file(o): return array_samples(o)
    if isinstance(o, dict): return _from_dict(o, has_fn)
    if is_table(o): return table_samples(o)
    if isinstance(o, (str,Path)): return _from_path(o)   # it does not say how to read what is there
    if _is_stream(o): return _Stream(o)
    if not _has(o, '__len__', '__getitem__'):
        raise TypeError(f'{type(o).__name__}: can be neither indexed nor gone through')
    if isinstance(o, np.ndarray): return _from_list(o, has_fn)
    # `[]` of a Series of pandas looks up its index, not the position
    return _from_list(o.to_numpy(), has_fn) if _has(o, 'iloc', 'to_numpy') else DatasetSource(o)

def _are_image_paths(items):
    """Are `items`, of which the first is a string, strings that name image files, by their extensions?

    Raises `TypeError` if only some of them name images, or if one that does is a URL."""
    def is_path(o): return isinstance(o, str) and image_field(o) is not None
    first = is_path(items[0])
    for i,o in enumerate(items):
        if is_path(o)!=first:
            other,one = (shown_path(item) if isinstance(item, str) else item for item in (o, items[0]))
            raise TypeError(f'item {i} is {other!r}, and item 0 {one!r}: paths of images and other things; '
                            'image_samples(…) takes paths, and a list of dicts says what is what')
        if first and '://' in o:
            raise TypeError(f'{shown_path(o)}: an address, not a file: download it first, or give an fn that does, and '
                            'a list of dicts')
    return first
