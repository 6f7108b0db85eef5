"""Which samples are shown, if a person does not name them

Docs: page `view/choose`"""
import numpy as np

from .overview import some_numbers
from .pictures import shown_kind
from ..load.items import get_remote_items, RemoteItems
from ..store.base import Store

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
