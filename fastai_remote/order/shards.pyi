"""Shuffle a dataset that is read shard by shard"""
from typing import Any
__all__: Any
import numpy as np
from .permutation import Computed, PositionMap

def _starts(sizes):
    ...

def _check_sizes(sizes):
    ...

class _OfShards(Computed):

    def __repr__(self):
        ...

class ShardPermutation(_OfShards, PositionMap):
    arguments: Any
    shard_order: Any
    stored_starts: Any
    sequence_starts: Any
    n: Any
    length: Any
    counts: Any
    worker_starts: Any
    first_shards: Any
    sizes: Any
    seed: Any
    interleave: Any
    bs: Any
    num_workers: Any
    rank: Any
    world_size: Any
    equal: Any

    def __init__(self, sizes, seed: int=0, interleave: int=4, bs: int=64, num_workers: int=1, rank: int=0, world_size: int=1, equal: bool=True):
        ...

    def __len__(self):
        ...

    def _shard_index(self, places):
        ...

    def _group(self, worker, group):
        ...

    def _at(self, i):
        ...

    def shards(self, worker: int=0) -> np.ndarray:
        ...

    def group_at(self, worker: int, given: int) -> int:
        ...

def _steps(sizes, hashes):
    ...

class SplitPart(PositionMap):
    split: Any
    name: Any
    starts: Any
    skip: Any

    def __init__(self, split, name: str, starts: np.ndarray, skip: np.ndarray | None=None):
        ...

    def __reduce__(self):
        ...

    def __len__(self):
        ...

    def __repr__(self):
        ...

    @property
    def sizes(self) -> np.ndarray:
        ...

    def _at(self, i):
        ...

class ShardSplit(_OfShards):
    arguments: Any
    starts: Any
    sizes: Any
    valid_pct: Any
    seed: Any
    train: Any
    valid: Any

    def __init__(self, sizes, valid_pct: float=0.2, seed: int=0):
        ...

    def _numbers(self, shards, indices):
        ...

class ShardFolds(ShardSplit):
    arguments: Any
    starts: Any
    valid: Any
    train: Any
    sizes: Any
    n_folds: Any
    fold: Any
    seed: Any

    def __init__(self, sizes, n_folds: int, fold: int, seed: int=0):
        ...
