"""Orders for samples of different lengths: sorted, sorted within windows, and all of them as one long sequence"""
from typing import Any
__all__: Any
from .permutation import PositionMap
_BLOCK: Any

class LongestFirst(PositionMap):
    numbers: Any

    def __init__(self, lengths, n: int):
        ...

    def __len__(self):
        ...

    def _at(self, i):
        ...

def longest_of(lengths, n: int) -> int:
    ...

class SortedWindows(PositionMap):
    n_batches: Any
    batches: Any
    base: Any
    n: Any
    lengths: Any
    bs: Any
    seed: Any
    lanes: Any
    longest: Any
    window: Any

    def __init__(self, base, n: int, lengths, bs: int=64, seed: int=0, lanes: int | None=None, longest: int | None=None, window: int=50):
        ...

    def __reduce__(self):
        ...

    def __len__(self):
        ...

    def over(self, base, n: int):
        ...

    def _base_at(self, positions):
        ...

    def _batches_of(self, window):
        ...

    def _sorted(self, window):
        ...

    def _place(self, batch):
        ...

    def _at(self, i):
        ...

class TokenSequence:
    step: Any
    starts: Any
    base: Any
    n: Any
    lengths: Any

    def __init__(self, base, n: int, lengths):
        ...

    def __reduce__(self):
        ...

    def __len__(self):
        ...

    def _sizes(self, positions):
        ...

    def _ends(self, group):
        ...

    def parts(self, start: int, stop: int) -> list:
        ...
