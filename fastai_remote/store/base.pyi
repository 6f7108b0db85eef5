"""The interface of a store, which reads samples by number, and the reference implementation, a store in memory"""
from typing import Any
__all__: Any
import numpy as np
from PIL import Image
from ..codec.base import Codec
from ..core import CorruptSample, Manifest
from .fields import FieldTable

def _identity(obj):
    ...

def new_store(cls) -> 'Store':
    ...

class Store:
    manifest: Manifest
    shards: Any
    not_read: Any
    place_rows: Any
    more_rows: Any
    why_missing: Any
    for_users: Any
    origin: Any

    @property
    def name(self) -> str:
        ...

    def __len__(self):
        ...

    @property
    def fields(self) -> list:
        ...

    @property
    def splits(self) -> dict:
        ...

    @property
    def vocab(self) -> list:
        ...

    def read_values(self, numbers: np.ndarray, fields: list) -> dict:
        ...

    def opener(self):
        ...

    def new_epoch(self):
        ...

    def failures(self):
        ...

    @property
    def unchecked(self) -> list:
        ...

    def check_rest(self):
        ...

    def location(self, number: int, field: str) -> str:
        ...

    @property
    def field_table(self) -> FieldTable:
        ...

    def may_lack(self, field: str) -> bool:
        ...

    def presence(self, field: str, start: int=0, stop: int | None=None):
        ...

    def get_many(self, numbers, fields, check: bool=True, decode: bool=False) -> dict:
        ...

    def check_numbers(self, numbers) -> np.ndarray:
        ...

    def compare_checksums(self, numbers: np.ndarray, field: str, values: dict, checksums: np.ndarray):
        ...

    def keys(self, numbers) -> list:
        ...

    def key(self, i: int) -> str:
        ...

    def shard_url(self, i: int) -> str:
        ...

    def __dir__(self):
        ...

    def __repr__(self):
        ...

    def _repr_html_(self):
        ...

    def decode(self, i: int, field: str, b):
        ...

    def __getitem__(self, i: int) -> dict:
        ...

    @property
    def stats(self) -> tuple:
        ...

    def mean_image(self, field: str | None=None) -> Image.Image:
        ...

    def class_counts(self, field: str='cls') -> dict:
        ...

    def class_weights(self, field: str='cls') -> np.ndarray:
        ...

def mismatches(numbers: np.ndarray, values, checksums: np.ndarray) -> np.ndarray:
    ...

def raise_missing(store: Store, numbers: np.ndarray, field: str, values: list):
    ...

def has_keys(store: Store) -> bool:
    ...

class MemoryReader(Store):
    _failures: Any
    columns: Any
    manifest: Any

    def __init__(self, columns: dict, name: str='memory', vocab: dict | None=None, splits: dict | None=None, codecs: dict | None=None, failures=()):
        ...

    def failures(self):
        ...

    def __copy__(self):
        ...

    def __deepcopy__(self, memo):
        ...

    def read_values(self, numbers, fields):
        ...

def corrupt_value(store: Store, number: int, field: str, cause, detail: str | None=None) -> CorruptSample:
    ...

def field_codec(store: Store, field: str) -> Codec:
    ...

def decode_value(store: Store, number: int, field: str, value, decode=None, fail=None):
    ...
_samples_at_once: Any
_bytes_at_once: Any

def _read_samples(store, numbers):
    ...

def _read_slice(store, numbers):
    ...
HOW_TO_GET_STATS: Any

def image_stats(store: Store, field: str | None=None) -> dict:
    ...

def _no_stats(store, field=None):
    ...

def balanced_weights(counts) -> np.ndarray:
    ...
