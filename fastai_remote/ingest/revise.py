"""Append to a dataset, change some of its samples, add fields and drop them

Docs: page `ingest/revise`"""

# A dataset is not written anew because it grows, or because some of its labels were wrong. These functions do the work
# of the methods `append`, `edit`, `add_fields` and `drop_fields` of a store. Each returns the new version; a store or a
# `DataLoaders` that was made before goes on with the samples that it had.
#
# ## Append

import hashlib
from itertools import islice

import numpy as np
from fastcore.basics import listify

from ..codec.webdataset import check_members
from ..core import StoreError, unknown_arguments, UnknownField
from .chunk import as_vocab, check_vocab, convert, failure_reason, plain_label, plan_fields
from .report import IngestError
from .run import ingest
from ..source.arrays import by_position
from ..source.base import fn_fingerprint, IndexedSource, stable_repr, storable, unchanged
from ..source.datasets import as_source, stored_samples, stored_values
from ..store.base import field_codec, Store
from ..store.shards import ShardReader
from ..write.revision import AddFields, Append, Edit
from ..write.shards import ShardWriter

class _NamedLabels:
    """Applies `fn` to a sample, and replaces codes in the result by their labels; returns a dict

    Labels of `vocab` stay as they are. Raises `ValueError` for what is neither a label nor a code of its field."""
    def __init__(self,
        fn, # As `to_redis` takes it
        vocab:dict # `{field: list of labels}` of the source
    ):
        self.fn,self.vocab = fn,vocab
        self.known = {field:frozenset(labels) for field,labels in vocab.items()}
        self.fingerprint = fn_fingerprint(fn)   # an interrupted call is continued only with the same `fn`

    def __call__(self, sample):
        sample = dict(convert(unchanged, self.fn, sample))
        for field in self.vocab:
            if field in sample: sample[field] = self._label(field, sample[field])
        return sample

    def _label(self, field, label):
        "The label that `label`, which may be a code if labels are text, stands for; raises `ValueError`, `TypeError`"
        label = plain_label(field, label)
        if label in self.known[field]: return label
        labels = self.vocab[field]
        # as in `Columns`: where labels are numbers themselves, a number that is not among them is no code
        if isinstance(label, int) and 0<=label<len(labels) and isinstance(labels[label], str): return labels[label]
        raise ValueError(f'label {label!r} is not in the vocab of {field!r}, which has {len(labels)}')

def append_samples(
    store:Store, # The dataset
    source, # As in `DatasetOps.append`, like what follows
    fn=None,
    again:bool=False,
    **options
)->Store: # The new version
    "Do what `DatasetOps.append` does"
    known = {'num_workers','shuffle','seed','chunk','progress','max_failed'}
    more = options.keys()-known
    if more-{'overwrite','splits','vocab','maxsize','maxcount'}: raise unknown_arguments('append', more, known)
    if more:
        raise TypeError(f'{store.name}: append takes no {min(more)}=: splits and labels are those of the source, and '
                        'nothing that is there is replaced')
    source = as_source(source, fn is not None)
    if bool(source.splits or source.srcs)!=bool(store.splits):
        has = f"has the splits {', '.join(store.splits)}" if store.splits else 'has no splits'
        advice = f"{{{next(iter(store.splits))!r}: source}} names one" if store.splits else 'append them without'
        raise ValueError(f'{store.name} {has}, and the new samples have {"none" if store.splits else "some"}: {advice}')
    codecs = {field:spec['codec'] for field,spec in store.manifest.fields.items()}
    # of a mask, the vocabulary names the codes that its pixels have
    vocab = {field:labels for field,labels in store.manifest.vocab.items() if codecs[field] not in ('cls','labels')}
    named = {field:labels for field,labels in as_vocab(source.vocab).items() if codecs.get(field)=='cls'}
    if named: fn = _NamedLabels(fn, named)
    # where it is not sure that the data are the same, nothing is refused
    ingest(source, store.reviser(Append(again or not source.is_identified)), fn, vocab=vocab, **options)
    return store.reopened()

# --- Add fields, and drop them

def _needed(dataset, sample, reason):
    "Returns the error for a sample without a value: `dataset` and `sample` are names, and `reason` is an error"
    return IngestError(f'{dataset}: each sample needs a value, so nothing has changed:\n  {storable(str(sample))}: '
                       f'{failure_reason(reason)}')

def _write_overlay(reviser, k, source, fn, **options):
    """Writes the `k`-th overlay of a new version, counted from 0, from an `IndexedSource`; returns its `ShardReader`

    `options` are those of `ingest`. Raises `IngestError` if a sample has no value; then no overlay is left."""
    storage = reviser.overlay_storage(k)
    writer = ShardWriter(storage, name=f'{reviser.name}/{storage.name}', for_others=False)
    try: ingest(source, writer, fn, shuffle=False, max_failed=0, overwrite=True, **options)
    except IngestError as e:
        failures = '\n  '.join(f'{sample}: {reason}' for sample,reason in islice(writer.failures(), 5))
        reviser.place.clean_up()
        raise IngestError(f'{reviser.name}: each sample needs a value, so nothing has changed:\n  '
                          f'{failures or e}') from e
    overlay = ShardReader(storage, cache=None)
    if len(overlay)!=len(source):
        raise StoreError(f'{reviser.url}: {len(overlay):,} values for {len(source):,} samples')
    return overlay

def _add_to_shards(store, source, fn, vocab=None, **options):
    """`add_fields` for shards, which are not changed; `source` is an `IndexedSource` of all samples

    The new values are written into an overlay, whose sample i belongs to sample i of the dataset."""
    vocab,load = as_vocab(vocab),source.load if fn is None else source.loader(True)
    reviser = store.reviser(AddFields())
    (name,raw), = source.read(np.array([0]))
    try: fields = plan_fields(convert(load, fn, raw), vocab, source.codecs)
    except Exception as e: raise _needed(store.name, name, e) from e
    check_vocab(vocab, fields)
    reviser.change.check(store, {'fields':fields})
    check_members(store.name, fields, store.manifest.fields)
    source.splits = None
    with reviser.revising() as overlays:
        overlays.append((_write_overlay(reviser, 0, source, fn, vocab=vocab, **options), None))

class _Columns(IndexedSource):
    "A source whose sample i has entry i of each array; raises `ValueError` or `TypeError` if there are not `n` entries"
    def __init__(self,
        arrays:dict, # `{field: array or list}`, with an entry for each sample
        n:int # Samples
    ):
        arrays = {field:by_position(field, values) for field,values in arrays.items()}
        for field,values in arrays.items():
            if getattr(values, 'shape', None)==(): raise TypeError(f'{field!r} is one value, for {n:,} samples')
            if len(values)!=n: raise ValueError(f'{field!r} has {len(values):,} values, for {n:,} samples')
        self.arrays,self.n = arrays,n

    def __len__(self): return self.n
    def read(self, numbers):
        rows = zip(*(values[numbers] if isinstance(values, np.ndarray) else [values[i] for i in numbers.tolist()]
                     for values in self.arrays.values()))
        return [(f'sample {i}', dict(zip(self.arrays, row))) for i,row in zip(numbers.tolist(), rows)]

    def fingerprint(self):
        def digest(values):
            if not isinstance(values, np.ndarray) or values.dtype.hasobject:
                return hashlib.sha256(stable_repr(list(values)).encode()).hexdigest()
            digest = hashlib.sha256(f'{values.dtype} {values.shape} '.encode())
            digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
            return digest.hexdigest()
        return {field:digest(values) for field,values in self.arrays.items()}

def write_fields(
    store:Store, # The dataset
    fn, # As in `DatasetOps.add_fields`
    fields:list=None, # As in `DatasetOps.add_fields`
    num_workers:int=None, # As for `to_redis`, like those below
    vocab:list|dict=None,
    chunk:int=None, # For shards, only of values that are no numbers and no labels: these are written shard by shard
    progress:bool=None
)->Store: # The new version
    "Do what `DatasetOps.add_fields` does"
    if callable(fn): source = stored_samples(store, None if fields is None else _known_fields(store, listify(fields)))
    elif isinstance(fn, dict) and fields is not None:
        raise TypeError('fields= names what a function gets of each sample; the values of a dict are added as they are')
    elif isinstance(fn, dict) and not fn: raise ValueError(f'{store.name}: an empty dict: there is no field to add')
    elif isinstance(fn, dict): source,fn = _Columns(fn, len(store)),None
    else: raise TypeError(f'want a function of a sample, or a dict of arrays, not {type(fn).__name__}')
    options = dict(vocab={} if vocab is None else vocab, num_workers=num_workers, chunk=chunk, progress=progress)
    if store.shards is not None: _add_to_shards(store, source, fn, **options)
    else: ingest(source, store.reviser(AddFields()), fn, shuffle=False, max_failed=0, **options)
    return store.reopened()

def remove_fields(
    store:Store, # The dataset
    fields # Names of fields, or one name
)->Store: # The new version; `store` itself if there is nothing to remove
    "Do what `DatasetOps.drop_fields` does"
    fields = _known_fields(store, [name for field in listify(fields) for name in listify(field)])
    if set(fields)==set(store.fields): raise ValueError(f'{store.name}: no field would be left')
    return _edit(store, {}, np.zeros(0, np.int64), fields) if fields else store

def _known_fields(store, fields):
    "Returns `fields`, names of fields, if `store` has all of them; else raises `UnknownField`"
    unknown = [field for field in fields if field not in store.fields]
    if unknown: raise UnknownField(f"{store.name}: no field {unknown[0]!r}; there are {', '.join(store.fields)}")
    return fields

# --- Edit

class _ChangedSamples(IndexedSource):
    """A source of the samples that an edit changes, in the order of their numbers, with the fields that it changes

    Where a sample has no new value of such a field, the source has the stored one."""
    def __init__(self,
        store:Store, # The dataset
        edit:Edit # The new values
    ): self.store,self.values,self.numbers = store,edit.values,edit.numbers

    def __len__(self): return len(self.numbers)
    def read(self, numbers):
        numbers = self.numbers[numbers]
        fields = [field for field,changed in self.values.items() if any(i not in changed for i in numbers.tolist())]
        stored = {field:stored_values(self.store, field, values)
                  for field,values in self.store.get_many(numbers, fields, check=True).items()}
        return [(f'sample {i}', {field:changed[i] if i in changed else stored[field][k]
                                 for field,changed in self.values.items()})
                for k,i in enumerate(numbers.tolist())]

    def fingerprint(self):
        digest = hashlib.sha256()
        for field,changed in self.values.items():
            codec = field_codec(self.store, field)
            for number in sorted(changed):
                digest.update(stable_repr((field, number)).encode())
                digest.update(_content(codec, changed[number]))
        return digest.hexdigest()

def _content(codec, value):
    "Bytes that tell `value` from others: those that `codec` stores; for a number, or what cannot be stored, a text"
    try: return stable_repr(value).encode() if codec.dtype is not None else bytes(codec.to_bytes(value))
    except Exception: return stable_repr(value).encode()   # writing it fails, too, and that error names the sample

def edit_samples(
    store:Store, # The dataset
    drop=(), # As in `DatasetOps.edit`
    set:dict=None, # As in `DatasetOps.edit`
)->Store: # The new version; `store` itself if there is nothing to change
    """Do what `DatasetOps.edit` does

    Numbers are `int`, or what a cleaner of fastai and `RemoteItems` return, which know their version of the dataset.
    Raises `ValueError` for those of another version."""
    _check_version(store, drop)
    drop = np.unique(store.check_numbers(list(drop) if np.iterable(drop) else drop))
    changes = list(set.values()) if isinstance(set, dict) else [set or {}]
    if not all(isinstance(changed, dict) for changed in changes):
        raise TypeError(f'{store.name}: set= is {{field: {{sample number: new value}}}}, not {set!r:.100}')
    for changed in changes: _check_version(store, changed)
    values = {field:dict(zip(store.check_numbers(list(changed)).tolist(), changed.values()))
              for field,changed in (set or {}).items() if changed}
    _known_fields(store, values)
    both = [number for changed in values.values() for number in np.intersect1d(list(changed), drop).tolist()]
    if both: raise ValueError(f'{store.name}: sample {both[0]} is to be removed and changed')
    if len(drop)==len(store): raise ValueError(f'{store.name}: no sample would be left; delete the dataset')
    values = {field:_with_plain_labels(store, field, changed) for field,changed in values.items()}
    return _edit(store, values, drop) if len(drop) or values else store

def _check_version(store, numbers):
    """Raise `ValueError` for `numbers` of another version than `store`, if they know theirs

    Those are `RemoteItems`, and the images of a cleaner in a list or as keys: they have an attribute `store`."""
    is_list = np.iterable(numbers) and not isinstance(numbers, np.ndarray) and not hasattr(numbers, 'store')
    for o in numbers if is_list else [numbers]:
        other = getattr(o, 'store', None)
        if other is None or other.manifest.uid==store.manifest.uid: continue
        what = 'these are numbers' if o is numbers else f'{o!r} is a number'
        raise ValueError(f'{store.name}: {what} of another version of the dataset, or of another dataset, where it may '
                         'be another sample: take the numbers from loaders and cleaners of this store')

def _with_plain_labels(store, field, values):
    """Returns `values`, `{sample number: new value}` of a field; those of a label field as `plain_label` returns them

    Raises `IngestError`, which names the sample, for what `plain_label` refuses."""
    if store.manifest.fields[field]['codec']!='cls': return values
    labels = {}
    for number,value in values.items():
        try: labels[number] = plain_label(field, value)
        except Exception as e: raise _needed(store.name, f'sample {number}', e) from e
    return labels

def _edit_shards(store, reviser):
    "`edit_samples` for shards: the new values of each field go into an overlay"
    reviser.check_edit()
    with reviser.revising() as overlays:
        for field,values in reviser.change.values.items():
            one = Edit({field:values}, np.zeros(0, np.int64))
            vocab = {field:store.manifest.vocab[field]} if _names_codes(store, field) else {}
            overlay = _write_overlay(reviser, len(overlays), _ChangedSamples(store, one), None, num_workers=1,
                                     vocab=vocab, progress=False)
            overlays.append((overlay, one.numbers))

def _names_codes(store, field):
    "Has `field` a vocabulary that names the codes of its pixels?"
    return field in store.manifest.vocab and store.manifest.fields[field]['codec'] not in ('cls','labels')

def _edit(store, values, drop, dropped_fields=()):
    """Makes a new version of a dataset, with values changed, and samples and fields dropped; returns its store

    The arguments are those of `Edit`, already checked; `dropped_fields` is its `drop_fields`."""
    edit = Edit(values, drop, dropped_fields)
    reviser = store.reviser(edit)
    if store.shards is not None: _edit_shards(store, reviser)
    elif not values: reviser.revise()
    else:
        masks = {field:store.manifest.vocab[field] for field in values if _names_codes(store, field)}
        ingest(_ChangedSamples(store, edit), reviser, shuffle=False, max_failed=0, num_workers=1, vocab=masks,
               progress=False)
    return store.reopened()

# --- Example

# More samples arrive, one of which has a label that is new. Then one sample is removed, the label of another is
# corrected, and a field is added that is computed in the workers.
