"""The share of an epoch that a rank or a worker reads

Docs: page `order/ranks`"""
import numpy as np

from .base import Order, WeightedOrder
from .lengths import SortedWindows
from .shards import ShardPermutation

# --- Shares

# A worker reads every k-th batch. A rank reads every k-th sample, consecutive samples, or shards of its own. All of
# these are views of the same order, so no list is sent to anybody and nobody iterates over the samples of others. Every
# rank must have the same number of batches, because a rank that has more would wait for the others for ever. If the
# number of samples is no multiple of the number of ranks, the first samples are visited again, as with PyTorch's
# `DistributedSampler`.

def rank_share(
    order:Order, # The epoch's order, the same on each rank
    rank:int, # This rank, in [0, world_size); `ValueError` is raised for another
    world_size:int, # Number of ranks
    consecutive:bool=False, # Give each rank consecutive positions instead of every `world_size`-th one?
    # Give each rank `bs` positions in turn, so that the batches of all ranks, one after the other, have the order of
    # the epoch, whatever the order is; default: as `consecutive` says
    bs:int=None,
)->Order: # ceil(len(order)/world_size) positions
    """The part of `order` that `rank` visits; all ranks get equally many positions

    Where `len(order)` is no multiple of `world_size`, the first positions are visited again at the end. By default a
    rank gets every `world_size`-th position, as from torch's `DistributedSampler`. With `consecutive`, as in fastai's
    `DistributedDL`, a rank reads few shards, if the order is that of the shards. Without `bs`, an order that is a
    `ShardPermutation` is always divided by that: each rank reads shards of its own. So it must begin at position 0, and
    the `ShardPermutation`, or the `SortedWindows` of one, must be its first map; for other parts of such an order, and
    for the share of a rank, `ValueError` is raised, and so it is for the share of a `WeightedOrder`. Of a
    `WeightedOrder`, all ranks together make as many draws as one; further draws, not the first ones, make the shares
    equally long."""
    if not 0<=rank<world_size: raise ValueError(f'there is no rank {rank} of {world_size}: ranks count from 0')
    n = len(order)
    if not n or world_size==1: return order
    length = -(-n//world_size)
    if bs: return Order(length, BatchesInTurn(n, rank, world_size, bs), Modulo(n), order)
    if isinstance(order, WeightedOrder):
        if order.positions!=range(order.n): raise ValueError('a share of a `WeightedOrder` cannot be shared again')
        return order.at(range(rank, rank+length*world_size, world_size))
    perm = shard_permutation_of(order)
    if perm is not None:
        _check_divisible(order, perm)
        share = ShardPermutation(perm.sizes, perm.seed, perm.interleave, perm.bs, perm.num_workers, rank, world_size)
        first,*others = order.maps
        return Order(length, first.over(share, length) if isinstance(first, SortedWindows) else share, *others)
    positions = range(rank*length, (rank+1)*length) if consecutive else range(rank, rank+length*world_size, world_size)
    return order[Order(positions, Modulo(n))]

def _check_divisible(order, perm):
    "Raise `ValueError` unless `order`, which is computed by the `ShardPermutation` `perm`, can be divided by shards"
    if perm.world_size>1: raise ValueError(f'{perm!r} is a share of {perm.world_size} ranks: it cannot be shared again')
    positions,first = order.positions,order.maps[0]
    is_first = first is perm or isinstance(first, SortedWindows) and first.base is perm
    if is_first and isinstance(positions, range) and positions.start==0 and positions.step==1: return
    what = f'{positions!r} of it' if is_first else f'what a {type(first).__name__} selects of it'
    raise ValueError(f'an order of shards is divided by its shards, from its beginning, and not {what}: divide it '
                     'first, and take a part of rank_share(order, rank, world_size)')

def shard_permutation_of(
    order # An `Order`, or anything else
)->ShardPermutation: # `None` if there is none
    "The `ShardPermutation` that `order` is computed by: the first among its maps, or that a `SortedWindows` there has"
    if isinstance(order, SortedWindows): order = order.base
    if isinstance(order, ShardPermutation): return order
    maps = order.maps if isinstance(order, Order) else ()
    return next((perm for m in maps if (perm:=shard_permutation_of(m)) is not None), None)

class BatchesInTurn:
    """Maps positions in the share of a rank, an int or an array, to positions in the epoch

    Batch `k` of a rank follows batch `k` of the rank before it.
    What is left after the last round, less than `world_size` batches, is divided evenly. So that all ranks get equally
    many, the last positions may be `n` or more, and begin again at 0 by `Modulo(n)`."""
    def __init__(self,
        n:int, # Positions in the epoch
        rank:int, # This rank
        world_size:int, # Number of ranks
        bs:int # Positions per batch
    ):
        self.rank,self.world_size,self.bs = rank,world_size,bs
        self.rounds = n//(bs*world_size)
        self.last = -(-(n-self.rounds*bs*world_size)//world_size)   # size of the last batch of each rank

    def __getitem__(self, position):
        turn,at = np.divmod(position, self.bs)
        size = np.where(turn<self.rounds, self.bs, self.last)
        return turn*self.bs*self.world_size+self.rank*size+at

class Modulo:
    "Maps positions, an int or an array, to positions modulo `n`"
    def __init__(self, n): self.n = n
    def __getitem__(self, i): return i%self.n

def worker_batches(
    order:Order, # The epoch's order
    bs:int, # Samples per batch
    worker:int=0, # This worker
    num_workers:int=1, # Number of workers
    first:int=0 # Batches of the epoch that are left out, for all workers together; they are not computed either
): # Iterator of int64 arrays, at most `bs` long
    """The sample numbers of each batch of `worker`: every `num_workers`-th one from batch `first+worker` on

    They are computed a few batches at a time."""
    starts = range((first+worker)*bs, len(order), num_workers*bs)
    step = max(1, order.chunk_size//bs)   # batches that are computed at once
    for some in (starts[k:k+step] for k in range(0, len(starts), step)):
        positions = (np.asarray(some)[:,None]+np.arange(bs)).ravel()
        numbers = order.numbers_at(positions[positions<len(order)])
        yield from (numbers[k:k+bs] for k in range(0, len(numbers), bs))
