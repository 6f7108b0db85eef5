"""What is known of a dataset without reading all of it, and which samples are shown

Docs: page `view/overview`"""

# The manifest has most of it: samples, splits, fields, labels and how often each occurs, sizes of images, bytes. An
# ingest counts labels, and each change of the dataset counts on. Where labels are not counted, an `Overview` says so.
# What the manifest does not have is estimated from a few samples, and the number of these is part of the result.

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field as dataclass_field
from itertools import islice

import numpy as np

from ..codec.images import ImageCodec
from ..core import StoreUnavailable
from ..load.items import get_remote_items, RemoteItems
from ..order.permutation import Permutation
from ..store.base import Store
from ..write.revision import codes_of_labels
from .pictures import cut_text, read_values, shown_kind

@dataclass
class FieldOverview:
    "What is known of a field"
    kind:str # How its values are shown, as of `shown_kind`
    codec:str # Name of the codec
    dtype:str # Of numbers and labels; else `None`
    samples:int # Samples that have it
    nbytes:int # Bytes of all its values; `None` if that is not known
    is_exact:bool # Was `nbytes` computed, and not estimated from a sample?

@dataclass
class LabelCounts:
    "How often the labels of a field occur"
    n_labels:int # Labels in the vocabulary
    # The most frequent labels, `(label, number of samples)`; if they are not counted, the first ones, with `None`
    most:list
    others:int # How often other labels than those in `most` occur
    unused:int # Labels that no sample has
    counted:bool # Are labels counted? Else only the vocabulary is known
    in_splits:dict = dataclass_field(default_factory=dict) # `{split: list of numbers}`, for `most`: `count_in_splits`

@dataclass
class ImageSizes:
    "Sizes of images, measured on some of them"
    n:int # Images that were measured
    width:tuple # Smallest, mean and largest, in pixels
    height:tuple
    most:list = dataclass_field(default_factory=list) # The most frequent sizes, `((width, height), images)`
    # How many of the images have width/height below 1/2, 1/2 to 3/4, about 1, 4/3 to 2, and above
    ratios:list = dataclass_field(default_factory=list)

RATIOS = 'narrower than 1:2','1:2 to 3:4','about square','4:3 to 2:1','wider than 2:1' # What `ImageSizes.ratios` counts
_RATIO_LIMITS = .5,.76,1.3,2.

@dataclass
class Overview:
    "A dataset at a glance"
    name:str
    samples:int
    nbytes:int # Bytes of all encoded values
    splits:dict # `{split: number of samples}`
    fields:dict # `{field: FieldOverview}`
    labels:dict # `{field with labels: LabelCounts}`
    sizes:dict # `{field of images: ImageSizes}`
    failed:int # Samples that could not be converted
    reasons:list # `(reason, number of samples)`, the most frequent first
    n_reasons:int # Failures whose reasons were read
    sampled:int # Samples that were read for sizes and bytes; 0 if none
    # `generation` (how often the dataset was written), `uid`, `created`, `format`, `earlier`: versions that it was made
    # from
    version:dict
    store_rows:dict # `{title: text}` about the store, such as what a `TieredStore` holds in Redis

MAX_BYTES = 1<<25 # Bytes that an overview reads, about
_MOST = 50 # Labels that are listed
_FAILURES = 1000 # Failures that are read
_AT_ONCE = 1<<16 # Samples whose labels are read at once

def overview(
    store:Store,
    sample:int=200, # Samples to read for the sizes of images and the bytes of fields; 0: none
)->Overview:
    """What is known of a dataset, from its manifest and a few samples

    Values that cannot be read are left out. Raises `StoreUnavailable`."""
    manifest = store.manifest
    values,numbers = _some_values(store, sample)
    reasons,n_reasons = _reasons(store) if manifest.failed else ([],0)
    fields = {field:_field(store, field, values.get(field)) for field in store.fields}
    labels = {field:_labels(manifest, field) for field in manifest.vocab if field in fields}
    sizes = {field:found for field in fields if (found := _sizes(store, field, values.get(field))) is not None}
    splits = {split:stop-start for split,(start,stop) in store.splits.items()}
    version = dict(generation=manifest.generation, uid=manifest.uid, created=manifest.created, format=manifest.format,
                   earlier=len(manifest.earlier))
    return Overview(store.name, len(store), manifest.nbytes, splits, fields, labels, sizes, manifest.failed, reasons,
                    n_reasons, len(numbers), version, store.more_rows)

def some_numbers(
    samples, # A store, or its items
    n:int # How many
)->np.ndarray: # Positions in `samples`, ascending
    "Some from all over the samples, always the same ones"
    order = Permutation(len(samples), 0)
    return np.sort(order[np.arange(min(n, len(samples)))])

def _some_values(store, sample):
    "`{field: list of values}` of some samples, as they are stored, without those that cannot be read; their numbers"
    each = max(store.manifest.nbytes//max(len(store), 1), 1)
    numbers = some_numbers(store, min(sample, max(MAX_BYTES//each, 4)))
    if not len(numbers): return {},numbers
    fields = [field for field in store.fields if store.manifest.fields[field]['dtype'] is None]
    values = read_values(store, numbers, fields)
    return {field:[v for v in found if isinstance(v, bytes)] for field,found in values.items()},numbers

def _reasons(store):
    "The most frequent reasons of failures, and how many failures were looked at"
    try: found = Counter(cut_text(reason, 200) for _,reason in islice(store.failures(), _FAILURES))
    except StoreUnavailable: raise
    except Exception: return [],0   # damaged: `failures` says so to who asks for them
    return found.most_common(10),sum(found.values())

def _field(store, field, values):
    entry = store.manifest.fields[field]
    n = store.field_table.counts[field]
    nbytes,is_exact = None,bool(entry['dtype'])
    if is_exact: nbytes = n*np.dtype(entry['dtype']).itemsize
    elif values: nbytes = round(n*sum(map(len, values))/len(values))
    return FieldOverview(shown_kind(store, field), entry['codec'], entry['dtype'], n, nbytes, is_exact)

def _are_counted(manifest, field): return len(manifest.counts.get(field, ()))==len(manifest.vocab[field])

def _most_frequent(manifest, field):
    "The codes of the labels that are listed, an array"
    if not _are_counted(manifest, field): return np.arange(min(len(manifest.vocab[field]), _MOST))
    return np.argsort(-np.array(manifest.counts[field], np.int64), kind='stable')[:_MOST]

def _labels(manifest, field):
    vocab,first = manifest.vocab[field],_most_frequent(manifest, field)
    if not _are_counted(manifest, field):
        return LabelCounts(len(vocab), [(str(vocab[k]), None) for k in first.tolist()], 0, 0, False)
    counts = np.array(manifest.counts[field], np.int64)
    most = [(str(vocab[k]), int(counts[k])) for k in first.tolist()]
    return LabelCounts(len(vocab), most, int(counts.sum()-counts[first].sum()), int((counts==0).sum()), True)

def count_in_splits(
    store:Store,
    o:Overview, # Of this store; its `LabelCounts` get `in_splits`
    step # `step(done, of)` is called as samples are read; it may raise an error
):
    "Counts the labels in each split, if there are several; raises `ValueError`, and what reading raises"
    fields = [field for field in o.labels if o.fields[field].codec in ('cls','labels') and len(store.splits)>1]
    for at,field in enumerate(fields):
        shown,n_labels = _most_frequent(store.manifest, field),o.labels[field].n_labels
        for split,(start,stop) in store.splits.items():
            counts = np.zeros(n_labels, np.int64)
            for first in range(start, stop, _AT_ONCE):
                step(at*len(store)+first, len(fields)*len(store))
                numbers = np.arange(first, min(first+_AT_ONCE, stop))
                counts += np.bincount(codes_of_labels(store, field, numbers), minlength=n_labels)
            o.labels[field].in_splits[split] = counts[shown].tolist()

def _sizes(store, field, values):
    "The `ImageSizes` of a field: by its statistics in the manifest, and by the headers of `values`; or `None`"
    stats,found = store.manifest.stats.get(field),Counter()
    if shown_kind(store, field)=='image':
        for value in values or ():
            with suppress(ValueError): found[ImageCodec('img').opened(value).size] += 1   # by its header
    if not found:
        return stats and ImageSizes(stats['n'], tuple(stats['width']), tuple(stats['height']))
    n,(width,height) = sum(found.values()),np.array(list(found.elements())).T
    ratios = np.bincount(np.searchsorted(_RATIO_LIMITS, width/height), minlength=len(RATIOS))
    if stats: n,(width,height) = stats['n'],(np.array(stats[side]) for side in ('width','height'))
    def ends(side): return float(side.min()),float(side.mean() if not stats else side[1]),float(side.max())
    return ImageSizes(n, ends(width), ends(height), found.most_common(5), ratios.tolist())

# --- Which samples

def label_field(
    store:Store
)->str: # Name of a field
    "The field that `label=` means: `cls`, or else the first with labels; raises `ValueError` if there is none"
    fields = [field for field in store.fields if shown_kind(store, field) in ('label','labels')]
    if not fields: raise ValueError(f'{store.name}: no field has labels; where= takes values of other fields')
    return 'cls' if 'cls' in fields else fields[0]

def typed_label(
    store:Store,
    field:str, # A field with one label, or several, for each sample
    text:str, # A label as a person writes it
    may_be_new:bool=False # May it be a label that the dataset does not have yet?
): # `str` or `int`
    "The label that a text means, as labels may be numbers; raises `UnknownField`, and `ValueError` if there is none"
    if store.field_table.entry(field)['codec'] not in ('cls','labels'):
        raise ValueError(f'{store.name}: {field!r} has no labels')
    vocab = store.manifest.vocab.get(field)
    for label in vocab or ():
        if str(label)==text: return label
    are_numbers = vocab is None or bool(vocab) and not any(isinstance(label, str) for label in vocab)
    if are_numbers and (may_be_new or vocab is None) and text.removeprefix('-').isdecimal(): return int(text)
    if may_be_new and text and not are_numbers: return text
    hint = ', whose labels are numbers' if are_numbers else ''
    raise ValueError(f'{store.name}: no label {text!r:.60} in field {field!r}{hint}')

def items_of(
    store:Store,
    split:str|list=None, # Only samples of this split, or of these splits
    where:dict=None, # `{field: values}`, as in `RemoteItems.where`
    label=None # Only samples with this label, or one of a list of labels, of `label_field`
)->RemoteItems:
    """The samples of a store that fit, in its order, as a lazy sequence of their numbers

    Raises `ValueError` for an unknown split, or if no sample fits, and what `RemoteItems.where` raises."""
    where = {**(where or {}), **({} if label is None else {label_field(store):label})}
    items = get_remote_items(store, where=where or None)
    if split is None: return items
    spans = []
    for name in [split] if isinstance(split, str) else split:
        if name not in store.splits:
            raise ValueError(f"{store.name}: no split {name!r}; there are {', '.join(store.splits) or 'none'}")
        spans.append(items.before(store.splits[name]).tolist())
    found = items[_joined(sorted(spans))]
    if not len(found): raise ValueError(f'{store.name}: no sample of {split!r} is among them')
    return found

def _joined(spans):
    "Sorted ranges `[start, stop]` as one slice if they follow each other, else as an array of their positions"
    if all(before[1]==after[0] for before,after in zip(spans, spans[1:])): return slice(spans[0][0], spans[-1][1])
    return np.concatenate([np.arange(*span) for span in spans])

def chosen_numbers(
    store:Store,
    numbers=None, # Sample numbers; default: some of those that fit, from all over them, always the same ones
    n:int=12, # How many, if `numbers` are not given
    split:str|list=None, # As in `items_of`
    where:dict=None, # As in `items_of`
    label=None # As in `items_of`
)->np.ndarray: # Sample numbers, int64
    """The samples to show, ascending if they are not given

    Raises `TypeError` if `numbers` and what they are to be chosen by are given, `IndexError` for a sample that does not
    exist, and what `items_of` raises."""
    if numbers is not None:
        if split is not None or where or label is not None:
            raise TypeError(f'{store.name}: either numbers, or what they are chosen by')
        return store.check_numbers([numbers] if np.ndim(numbers)==0 else numbers)
    items = items_of(store, split, where, label)
    return items.numbers_at(some_numbers(items, max(n, 1)))
