"""The samples of a store for a plain torch `DataLoader`, with the methods of WebDataset"""
from typing import Any
__all__: Any
from dataclasses import dataclass
from torch.utils.data import Dataset, default_collate, IterableDataset, Sampler
from .epochs import Epochs
from .stream import Pipeline, RemoteStream, StreamInput
from ..store.base import Store

class _Positions(list):
    prefetch: Any
    epoch: Any

def _label_numbers(store, vocab):
    ...

class RemoteDataset(Pipeline, Dataset):
    items: Any
    steps: Any
    seed: Any
    handler: Any
    vocabs: Any
    label_numbers: Any
    _epoch_seen: Any

    def __new__(cls, *args, resampled=False, **kwargs):
        ...

    def __init__(self, store: Store, *, resampled: bool=False, seed: int | None=None, handler=None, vocab: list | dict | None=None):
        ...

    @property
    def store(self) -> Store:
        ...

    def __len__(self):
        ...

    def __repr__(self):
        ...

    @property
    def may_drop(self) -> bool:
        ...

    @property
    def read_vocabs(self) -> dict:
        ...

    def split(self, name: str):
        ...

    def stream(self, shuffle: bool=False, resampled: bool=False, seed: int | None=None, interleave: int=4, rank: int | None=None, world_size: int | None=None) -> RemoteStream:
        ...

    def as_stream(self):
        ...

    def slice(self, *bounds):
        ...

    def _with(self, **attributes):
        ...

    def _then(self, step):
        ...

    def __getitem__(self, i):
        ...

    def __getitems__(self, idxs: list) -> list:
        ...

    def __iter__(self):
        ...

    def read(self, positions, shards=None) -> tuple:
        ...

    def _values(self, numbers):
        ...

    def _read_handled(self, numbers):
        ...

    def results(self, read: tuple) -> list:
        ...

    def _samples(self, read):
        ...

    def _are_columns(self, step, columns):
        ...

    def _metadata_of(self, numbers):
        ...

    def _sample(self, k, columns):
        ...

    def pairs(self, reads):
        ...

    def kept(self, reads):
        ...

    def read_ahead(self, batches, prefetch=None):
        ...

    def batches(self, bs: int=64, num_workers: int=0, **kwargs) -> RemoteBatches:
        ...

    def batched(self, bs: int=64, collate=default_collate, partial: bool=True, collation_fn=default_collate, batchsize: int | None=None, **kwargs) -> BatchedDataset:
        ...

def _check_interleave(interleave):
    ...

def _shard_sizes(source):
    ...

class _BatchEpochs(Epochs):
    finished: Any
    ds: Any
    bs: Any
    shuffle: Any
    interleave: Any
    drop_last: Any

    def __init__(self, ds: RemoteDataset, bs: int=64, shuffle: bool=True, seed: int | None=None, interleave: int=4, drop_last: bool=False, rank: int | None=None, world_size: int | None=None):
        ...

    def _n_batches(self, world_size):
        ...

    def __len__(self):
        ...

    def draw_key(self):
        ...

    def ended(self, epoch):
        ...

    def options(self):
        ...

    def _order(self, key, consumer):
        ...

    def _shard_prefetch(self, order, worker, workers, skipped=0):
        ...

class RemoteBatches(_BatchEpochs, Sampler):
    num_workers: Any
    in_turn: Any
    sampler: Any

    def __iter__(self):
        ...

    def __repr__(self):
        ...

    def results(self, key, consumer, first):
        ...

def _check_options(method, options):
    ...

def _check_not_replaced(ds, rank=None, **kwargs):
    ...

class BatchedDataset(Pipeline, _BatchEpochs, StreamInput, IterableDataset):
    is_random: Any
    in_turn: Any
    vocabs: Any

    def __iter__(self):
        ...

    def results(self, key, consumer, first):
        ...

    def run(self, key, consumer):
        ...

    def count(self, rank, world_size):
        ...

    def __repr__(self):
        ...

    def as_stream(self):
        ...

    def _then(self, step):
        ...
_READ: Any

class _Draws:
    n: Any
    seed: Any

    def __init__(self, n, seed):
        ...

    def __getitem__(self, i):
        ...

@dataclass(eq=False, repr=False)
class SampleInput(StreamInput):
    ds: RemoteDataset
    shuffle: bool = False
    resampled: bool = False
    interleave: int = 4
    parts: tuple = ()
    is_random: Any
    vocabs: Any

    def __post_init__(self):
        ...

    def then(self, step):
        ...

    def shuffled(self, interleave):
        ...

    def sliced(self, part):
        ...

    def in_batches(self, stream, bs, collate, partial):
        ...

    def count(self, rank, world_size):
        ...

    def _size(self):
        ...

    def run(self, key, consumer):
        ...

    def _order(self, seed, consumer, n_read):
        ...

    def __repr__(self):
        ...
