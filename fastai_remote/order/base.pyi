"""An order: the sample number at each position, with random access and in constant memory"""
from typing import Any
__all__: Any
import numpy as np

def _check_positions(x, low, n):
    ...

class Order:
    positions: Any
    maps: Any
    chunk_size: Any

    def __init__(self, positions: range | int, *maps):
        ...

    def __len__(self):
        ...

    def _like(self, positions, *maps):
        ...

    def __getitem__(self, i):
        ...

    def _at(self, x):
        ...

    def __iter__(self):
        ...

    def __array__(self, dtype=None, copy=None):
        ...

    def __eq__(self, other):
        ...

    def __repr__(self):
        ...

    def numbers_at(self, i) -> np.ndarray:
        ...

    def blocks(self, size: int):
        ...

    def checksum(self) -> int:
        ...

class WeightedOrder(Order):
    chunk_size: Any
    n: Any
    labels: Any
    weights: Any
    seed: Any

    def __init__(self, n: int, labels, weights: np.ndarray, seed: int=0, positions: range | None=None):
        ...

    def _like(self, positions, *maps):
        ...

    def at(self, positions: range) -> 'WeightedOrder':
        ...

    def _at(self, x, tries=16):
        ...

    def _codes(self, numbers):
        ...

    def _candidates(self, pos, attempts):
        ...

def _is_no_slice(self):
    ...

class SplitOrder(Order):
    __class__: Any
    start: Any
    stop: Any
    step: Any

    def __reduce__(self):
        ...
