"""Append to a dataset, change some of its samples, add fields and drop them

Docs: page `ingest/revise`"""

# A dataset is not written anew because it grows, or because some of its labels were wrong. `RevisionOps` has the
# methods of a store that change its dataset. Each returns the new version; a store or a `DataLoaders` that was made
# before goes on with the samples that it had.

import hashlib
from typing import Self

import numpy as np
from fastcore.basics import listify

from ..codec.numbers import code_dtype, narrow
from ..core import Manifest, unknown_arguments, UnknownField
from .chunk import as_vocab, Columns, convert, failure_reason, plain_label
from .report import IngestError
from .run import ingest
from ..source.arrays import by_position
from ..source.base import fn_fingerprint, IndexedSource, stable_repr, unchanged
from ..source.datasets import as_source, stored_samples
from ..store.base import field_codec
from ..write.base import drop_before, revise
from ..write.revision import AddFields, Append, Change, check_fields, Edit, joined_vocab, NewValues, sorted_labels

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

# --- Add fields

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
        return [(f'sample {i}', {field:values[i] for field,values in self.arrays.items()}) for i in numbers.tolist()]

    def fingerprint(self):
        def digest(values):
            if not isinstance(values, np.ndarray) or values.dtype.hasobject:
                return hashlib.sha256(stable_repr(list(values)).encode()).hexdigest()
            digest = hashlib.sha256(f'{values.dtype} {values.shape} '.encode())
            digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
            return digest.hexdigest()
        return {field:digest(values) for field,values in self.arrays.items()}

def _known_fields(store, fields):
    "Returns `fields`, names of fields, if `store` has all of them; else raises `UnknownField`"
    unknown = [field for field in fields if field not in store.fields]
    if unknown: raise UnknownField(f"{store.name}: no field {unknown[0]!r}; there are {', '.join(store.fields)}")
    return fields

# --- Edit

# The values of an edit are in memory, so it needs no plan, no chunks and no workers: they are encoded first, so that
# what cannot be stored is refused before anything is written, and then written as a part for each field. Of labels, the
# codes of the new version are stored.

def _encoded(store, field, values, check_value, step):
    """The `NewValues` of a field: `values`, `{sample number: new value}`, encoded; of labels their codes

    Labels that are new get the next codes. `check_value` is that of the writer, and `step` that of `NewValues`, which
    is called here as well. Raises `IngestError`, which names the sample, for a value that cannot be stored, and
    `TypeError` or `ValueError` for labels of another kind."""
    def failed(number, error):
        return IngestError(f'{store.name}: each sample needs a value, so nothing has changed:\n  sample {number}: '
                           f'{failure_reason(error)}')
    field_codec(store, field)   # raises `ValueError` if this process does not know it
    known,vocab = store.manifest.fields[field],store.manifest.vocab.get(field)
    spec,numbers,part_vocab,counts = dict(codec=known['codec'], dtype=known['dtype']),sorted(values),{},{}
    if spec['codec']=='cls':
        for number in numbers:
            try: values[number] = plain_label(field, values[number])
            except Exception as e: raise failed(number, e) from e
        kinds = {isinstance(value, str) for value in values.values()}
        if len(kinds)>1: raise TypeError(f'{store.name}: new labels of {field!r} are text and numbers')
        spec |= dict(dtype='i8', staged=True, text=kinds.pop())
    check_fields(store, {field:spec}, [field])
    has_labels = spec['codec'] in ('cls','labels')
    columns = Columns({field:spec}, {} if vocab is None or has_labels else {field:vocab}, check_value=check_value)
    for number in numbers:
        try: columns.add(number, {field:values[number]})
        except Exception as e: raise failed(number, e) from e
        step(1)
    found,fields = columns.columns(),{field:spec}
    if spec['codec']=='cls':
        labels = columns.values[field]
        if vocab is not None: part_vocab[field] = joined_vocab(vocab, sorted(set(labels)))
        found[field],dtype,counts = _codes(field, labels, part_vocab.get(field))
        fields[field] = dict(codec='cls', dtype=dtype)
    elif spec['codec']=='labels':
        part_vocab[field] = joined_vocab(vocab or [], sorted_labels(columns.counts[field]))
        counts[field] = [columns.counts[field].get(label, 0) for label in part_vocab[field]]
    if spec['dtype'] is None: fields[f'{field}.crc'] = dict(codec='crc', dtype='u4')
    nbytes = sum(map(len, found[field])) if spec['dtype'] is None else 0   # as those of numbers are not subtracted
    part = Manifest(store.name, len(numbers), fields, vocab=part_vocab, nbytes=nbytes, counts=counts)
    return NewValues(part, np.array(numbers, np.int64), found, step)

def _codes(field, labels, vocab):
    """`(codes, dtype, counts)` of labels: an array; its type; `{field: number of samples of each label}`

    Without `vocab`, the codes are the labels, which are integers, and there are no counts."""
    if vocab is None:
        dtype = narrow(min(0, *labels), max(labels))
        return np.array(labels, dtype),dtype,{}
    code_of = {label:code for code,label in enumerate(vocab)}
    dtype,codes = code_dtype(len(vocab)),[code_of[label] for label in labels]
    return np.array(codes, dtype),dtype,{field:np.bincount(codes, minlength=len(vocab)).tolist()}

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

# --- The methods

class RevisionOps:
    "The methods of `DatasetOps` that make a new version of the dataset: what is there is not written again"
    for_users = 'add_fields','append','clean','drop_fields','edit'

    def reviser(self,
        change # A `Change`
    ): # A `Writer`
        "What writes a new version of this dataset; by default, raises `TypeError`, as the dataset cannot be changed"
        raise TypeError(f'{self.name}: a {type(self).__name__} cannot be changed; store.copy or store.map writes a new '
                        'dataset')

    def reopened(self)->Self:
        "The version that is there now, a store of the same class"
        raise NotImplementedError

    def append(self,
        source, # As `to_redis` takes it; with the fields of this dataset, and with its splits, if it has any
        fn=None, # `fn(sample)` -> sample, run in the workers
        again:bool=False, # Append samples from a source that was appended before?
        **kwargs # `num_workers`, `shuffle`, `seed`, `chunk`, `progress` and `max_failed`, as for `to_redis`
    )->Self: # The new version
        """Add samples, each at the end of its split; what is there is not written again

        Labels that are new get the next codes, so that those of a trained model stay the same. The new version becomes
        visible at once, when all is written. An interrupted call is continued by the same call. Stores that were opened
        before go on with the samples that they had. Raises `ValueError` if fields or splits do not fit, `StoreExists`
        if the source was appended before, and what `to_redis` raises. Files, tables and lists of plain data are
        recognised; generators, datasets of PyTorch and lists of other objects are not, and are appended again."""
        known = {'num_workers','shuffle','seed','chunk','progress','max_failed'}
        more = kwargs.keys()-known
        if more-{'overwrite','splits','vocab','maxsize','maxcount'}: raise unknown_arguments('append', more, known)
        if more:
            raise TypeError(f'{self.name}: append takes no {min(more)}=: splits and labels are those of the source, '
                            'and nothing that is there is replaced')
        source = as_source(source, fn is not None)
        _check_splits(self, source)
        codecs = {field:spec['codec'] for field,spec in self.manifest.fields.items()}
        # of a mask, the vocabulary names the codes that its pixels have
        vocab = {field:labels for field,labels in self.manifest.vocab.items() if codecs[field] not in ('cls','labels')}
        named = {field:labels for field,labels in as_vocab(source.vocab).items() if codecs.get(field)=='cls'}
        if named: fn = _NamedLabels(fn, named)
        # where it is not sure that the data are the same, nothing is refused
        ingest(source, self.reviser(Append(again or not source.is_identified)), fn, vocab=vocab, **kwargs)
        return self.reopened()

    def edit(self,
        drop=(), # Numbers of samples to remove
        set:dict=None, # `{field: {sample number: new value}}`
        # `progress(done, of)` is called as new values are encoded and written; if it raises an error, nothing changes
        progress=None
    )->Self: # The new version
        """Remove samples, and change values of others, by the numbers that they have now

        What has not changed is not written again. The samples behind one that is removed move up. Labels that are new
        get the next codes. If images of a field change, the new version has no `stats` of this field, and none at all
        if samples are removed: `copy` writes a dataset that has them. The new version becomes visible at once. Stores
        that were opened before go on with the earlier values, which stay until the next version, or until `clean`. If
        there is nothing to do, returns this store. Numbers are `int`, or what a cleaner of fastai and `RemoteItems`
        return, which know their version of the dataset. Raises `IndexError` for a sample that does not exist,
        `UnknownField`, `IngestError` for a value that cannot be stored, and `ValueError` if a sample is to be removed
        and changed, if none would be left, or for numbers of another version."""
        _check_version(self, drop)
        drop = np.unique(self.check_numbers(list(drop) if np.iterable(drop) else drop))
        values = _values_to_set(self, set)
        both = [number for changed in values.values() for number in np.intersect1d(list(changed), drop).tolist()]
        if both: raise ValueError(f'{self.name}: sample {both[0]} is to be removed and changed')
        if len(drop)==len(self): raise ValueError(f'{self.name}: no sample would be left; delete the dataset')
        if not len(drop) and not values: return self
        reviser,done,of = self.reviser(Edit(drop)),0,2*sum(map(len, values.values()))
        def step(n):   # each value is encoded, and written
            nonlocal done
            done += n
            if progress: progress(done, of)
        new = [_encoded(self, field, changed, reviser.check_value, step) for field,changed in values.items()]
        revise(reviser, new)
        return self.reopened()

    def add_fields(self,
        # `fn(sample)` -> `{new field: value}`, run in the workers on every sample, as in `map`; or `{new field: array
        # or list}`, with a value for each sample
        fn,
        fields:list=None, # Fields that the function `fn` gets; default: all
        replace:bool=False, # Replace fields of the same names? Their values are freed at once, as by `drop_fields`
        num_workers:int=None, # As for `to_redis`, like what follows
        vocab:list|dict=None,
        chunk:int=None,
        progress:bool=None
    )->Self: # The new version
        """Add fields to all samples, such as predictions, embeddings, or the images in another size

        The new version becomes visible at once, when all is written; stores that were opened before go on as they are.
        An interrupted call is continued by the same call. Each sample needs a value: if `fn` fails for one,
        `IngestError` is raised, and nothing has changed. Raises `ValueError` if there are fields of these names that
        are not to be replaced, or not one value for each sample, `UnknownField` for names in `fields` that do not
        exist, and what `to_redis` raises."""
        if callable(fn): source = stored_samples(self, None if fields is None else _known_fields(self, listify(fields)))
        elif isinstance(fn, dict) and fields is not None:
            raise TypeError('fields= names what a function gets of each sample; the values of a dict are added as they '
                            'are')
        elif isinstance(fn, dict) and not fn: raise ValueError(f'{self.name}: an empty dict: there is no field to add')
        elif isinstance(fn, dict): source,fn = _Columns(fn, len(self)),None
        else: raise TypeError(f'want a function of a sample, or a dict of arrays, not {type(fn).__name__}')
        options = dict(vocab={} if vocab is None else vocab, num_workers=num_workers, chunk=chunk, progress=progress)
        ingest(source, self.reviser(AddFields(replace)), fn, shuffle=False, max_failed=0, **options)
        return self.reopened()

    def drop_fields(self,
        *fields # Names
    )->Self: # The new version; this store if no field is named
        "Remove fields from all samples, at once; raises `UnknownField`, and `ValueError` if none would be left"
        fields = _known_fields(self, [name for field in fields for name in listify(field)])
        if {*fields}=={*self.fields}: raise ValueError(f'{self.name}: no field would be left')
        if not fields: return self
        revise(self.reviser(Edit(np.zeros(0, np.int64), fields)))
        return self.reopened()

    def clean(self):
        """Free what only the version before this one uses, now, and not when the next version is published

        Stores that were opened before raise `StoreNotFound` then. Raises `StoreBusy`, `StoreNotFound`."""
        drop_before(self.reviser(Change()))

def _check_splits(store, source):
    "Raises `ValueError` unless a source has splits if the dataset has some, and none if it has none"
    if bool(source.splits or source.srcs)==bool(store.splits): return
    has = f"has the splits {', '.join(store.splits)}" if store.splits else 'has no splits'
    advice = f"{{{next(iter(store.splits))!r}: source}} names one" if store.splits else 'append them without'
    raise ValueError(f'{store.name} {has}, and the new samples have {"none" if store.splits else "some"}: {advice}')

def _values_to_set(store, changes):
    "`{field: {sample number: new value}}`, with numbers as `int` and without fields that do not change"
    all_changed = list(changes.values()) if isinstance(changes, dict) else [changes or {}]
    if not all(isinstance(changed, dict) for changed in all_changed):
        raise TypeError(f'{store.name}: set= is {{field: {{sample number: new value}}}}, not {changes!r:.100}')
    for changed in all_changed: _check_version(store, changed)
    values = {field:dict(zip(store.check_numbers(list(changed)).tolist(), changed.values()))
              for field,changed in (changes or {}).items() if changed}
    _known_fields(store, values)
    return values
