"""Sample numbers as fastai's items"""
from typing import Any
__all__: Any
import numpy as np
from fastcore.foundation import L
from ..order.base import Order
from ..order.permutation import PositionMap
from ..store.base import Store
_BLOCK: Any

class SampleSelection(PositionMap):
    bits: Any
    starts: Any
    n: Any

    def __init__(self, parts):
        ...

    def __len__(self):
        ...

    def __invert__(self):
        ...

    def _at(self, positions):
        ...

    def __and__(self, other):
        ...

    def before(self, numbers: np.ndarray) -> np.ndarray:
        ...

class RemoteItems(Order, L):
    _xtra: Any
    known: Any
    copy: Any
    items: Any
    iloc: Any
    itertuples: Any
    store: Any

    def __init__(self, store: Store, r: range | int | None=None, *maps):
        ...

    def _like(self, r, *maps):
        ...

    def __getitem__(self, i) -> Any:
        ...

    def _new(self, items, *args, **kwargs):
        ...

    def __copy__(self):
        ...

    def _repr_pretty_(self, p, cycle):
        ...

    def has_same_maps(self, other: 'RemoteItems') -> bool:
        ...

    @property
    def is_complete(self) -> bool:
        ...

    def before(self, numbers: np.ndarray) -> np.ndarray:
        ...

    @property
    def shard_sizes(self) -> np.ndarray:
        ...

    def where(self, field: str, values):
        ...

    def class_weights(self, field: str='cls') -> np.ndarray:
        ...

def get_remote_items(store: Store, having: str | list | None=None, where: dict | None=None) -> RemoteItems:
    ...

def _items_having(store, fields):
    ...

def _known_names(store, field):
    ...

def field_values(items: RemoteItems, field: str, optional: bool=False):
    ...

def read_parts(read, numbers):
    ...

def check_label_codes(store: Store, field: str, numbers: np.ndarray, values):
    ...

def field_masks(items: RemoteItems, field: str, values, optional: bool=False):
    ...

def _matcher(store, field, values):
    ...

def _listed(values):
    ...

def _shown(values):
    ...

def _chosen_by(function, values):
    ...

def _wanted_labels(store, field, vocab, values):
    ...

def _number_matcher(store, field, dtype, values):
    ...

def _stored_number(codec, value):
    ...

def _in_range(values, wanted):
    ...
