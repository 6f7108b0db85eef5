"""Shuffles of fifty million numbers in constant memory"""
from typing import Any
__all__: Any
import numpy as np
MASK64: Any
MIX_A: Any
MIX_B: Any
_rounds: Any
_small: Any

def mix64(x: np.ndarray, key: np.uint64) -> np.ndarray:
    ...

def mix64_int(x: int, key: int) -> int:
    ...

class PositionMap:

    def __getitem__(self, i):
        ...

def checked_seed(seed) -> int:
    ...

class Computed:
    arguments: Any

    def _values(self):
        ...

    def __reduce__(self):
        ...

    def __eq__(self, other):
        ...

class Permutation(Computed, PositionMap):
    arguments: Any
    table: Any
    bits: Any
    keys: Any
    n: Any
    seed: Any

    def __init__(self, n: int, seed: int=0):
        ...

    def __len__(self):
        ...

    def __repr__(self):
        ...

    def _at(self, i):
        ...

    def _encrypt(self, x):
        ...

    def _many(self, x):
        ...

class BlockPermutation(PositionMap):
    parts: Any
    blocks: Any
    largest: Any
    whole: Any
    inner: Any
    tail: Any
    n: Any
    block: Any
    window: Any

    def __init__(self, n: int, block: int, seed: int=0, parts: list | None=None, interleave: int=16):
        ...

    def __len__(self):
        ...

    def _at(self, i):
        ...

    def _before(self, part, windows):
        ...

    def _place(self, part, j):
        ...

    def _number(self, windows, offsets):
        ...
