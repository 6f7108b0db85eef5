"""The order of an epoch of `RemoteDL`

Docs: page `load/epoch_order`"""

# Stock fastai makes a list of all indices and shuffles it. Here, an `Order` computes the positions. There are few kinds
# of orders: as stored; shuffled; shuffled shard by shard; by length, as in fastai's `SortedDL`; or drawn with
# replacement, so that rare labels come as often as others. `epoch_order` chooses, and nothing else makes an order.
# `shuffle_fn` is fastai's hook for another random order.

from functools import partial

import numpy as np

from .items import RemoteItems
from ..order.base import Order, WeightedOrder
from ..order.lengths import longest_of, LongestFirst, SortedWindows
from ..order.permutation import Permutation
from ..order.shards import ShardPermutation

def epoch_order(
    dl # A `RemoteDL`
)->Order: # Positions in its dataset
    """The order of the epoch that begins, for all workers and ranks together

    Its random numbers are drawn from `dl.rng`. Raises what `check_balance` raises, and `ValueError` if `shuffle_fn` was
    replaced where labels are balanced."""
    if dl.shuffle and dl.balance is not None: return _balanced(dl)
    if dl.shuffle and dl.shuffles_otherwise: return dl.shuffle_fn(Order(dl.n))
    if dl.lengths is not None and dl.known_lengths is None: dl.known_lengths = dl.lengths(dl.dataset)
    if dl.known_lengths is not None: return _by_length(dl)
    if not dl.shuffle: return Order(dl.n)
    sizes = shard_sizes(dl)
    return dl.shuffle_fn(Order(dl.n)) if sizes is None else Order(dl.n, _shuffled_shards(dl, sizes))

def shard_sizes(
    dl # A `RemoteDL`
)->np.ndarray: # int64
    "Number of samples in each shard, if an epoch reads whole shards; else `None`"
    if dl.interleave is None or dl.balance is not None or not dl.indexed: return None
    if dl.shuffle and dl.shuffles_otherwise: return None
    items = getattr(dl.dataset, 'items', None)
    sizes = items.shard_sizes if isinstance(items, RemoteItems) else None
    return sizes if sizes is not None and sizes.sum()==dl.n else None

def _shuffled_shards(dl, sizes):
    """A new `ShardPermutation`, with a seed from `rng`: a shuffled order in which each worker reads whole shards

    With a `seed` it depends neither on the number of workers nor on that of the ranks: each batch of all ranks together
    has as many samples of each lane, so that each rank reads lanes of its own."""
    lanes,bs = dl.fake_l.num_workers,dl.bs or 1
    if dl.is_seeded: lanes,bs = dl.lanes,max(1, dl.global_bs//dl.lanes)
    return ShardPermutation(sizes, dl.rng.getrandbits(63), dl.interleave, bs, lanes)

def _by_length(dl):
    "The `Order` of fastai's `SortedDL`: if shuffled, similar lengths share a batch; else the longest come first"
    if not dl.shuffle: return Order(dl.n, LongestFirst(dl.known_lengths, dl.n))
    sizes,lanes,longest = shard_sizes(dl),None,None
    if sizes is not None:
        # with a `seed`, each batch has samples of all lanes
        base,lanes = _shuffled_shards(dl, sizes),1 if dl.is_seeded else max(1, dl.fake_l.num_workers)
    else:
        base = Permutation(dl.n, dl.rng.getrandbits(63))
        if dl.longest is None: dl.longest = longest_of(dl.known_lengths, dl.n)
        longest = dl.longest
    seed = dl.rng.getrandbits(63)
    return Order(dl.n, SortedWindows(base, dl.n, dl.known_lengths, dl.global_bs, seed, lanes, longest))

def _balanced(dl):
    "A `WeightedOrder` that draws labels according to `balance`"
    items = getattr(dl.dataset, 'items', dl.dataset)
    check_balance(items, dl.balance)
    if dl.shuffles_otherwise:
        raise ValueError(f'{items.store.name}: balance= draws the samples, and shuffle_fn was replaced, which '
                         'would put them in an order of its own: leave out one of them')
    field,weights = dl.balance if isinstance(dl.balance, tuple) else (dl.balance,None)
    if weights is None: weights = items.class_weights(field)
    return WeightedOrder(dl.n, partial(_codes_at, items, field), weights, dl.rng.getrandbits(63))

def _codes_at(items, field, positions):
    "The codes of the labels at `positions` of `items`, an array; a function that can be pickled, for spawned workers"
    return items.store.get_many(items.numbers_at(positions), field, check=True)[field]

def check_balance(
    items:RemoteItems, # What is drawn from
    balance # As in `RemoteDL`
):
    """Raise an error unless labels of `items` can be drawn by `balance`, which is not `None`

    `TypeError` if it is no field or pair, its field has no codes of labels, or the items are of no store; `ValueError`
    if labels are not counted, or there is not one weight for each; `UnknownField`."""
    if not isinstance(balance, str) and not (isinstance(balance, tuple) and len(balance)==2):
        raise TypeError('balance= takes a field, or a field and the weight of each of its labels, not '
                        f'{balance!r:.100}')
    if not isinstance(items, RemoteItems):
        raise TypeError(f'balance= needs the items of a store, not a {type(items).__name__}')
    store = items.store
    field,weights = (balance,None) if isinstance(balance, str) else balance
    if weights is None: store.class_weights(field)
    entry,labels = store.field_table.entry(field),store.manifest.vocab.get(field)
    if entry['dtype'] is None or np.dtype(entry['dtype']).kind not in 'iu':
        raise TypeError(f"{store.name}: balance= takes a field with one label for each sample, and {field!r} holds "
                        f"{entry['codec']}")
    if labels is None or weights is None or len(weights)==len(labels): return
    raise ValueError(f'{store.name}: balance= has {len(weights)} weights, but field {field!r} has '
                     f'{len(labels)} labels: one weight for each label, in the order of the vocabulary')
