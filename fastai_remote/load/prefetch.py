"""Which shards a worker reads next, and threads that read in advance

Docs: page `load/prefetch`"""

# If the store has shards, an epoch goes through them group by group, and a worker fetches whole shards into the cache
# before it needs them. `ShuffledShards` and `ShardsInOrder` say which ones, batch by batch. `FetchThreads` runs
# requests for batches in the background.

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .items import RemoteItems
from .stages import in_threads
from ..order.ranks import shard_permutation_of
from ..order.shards import ShardPermutation
from ..store.base import Store

# Cost of a byte that is read sample by sample, in bytes of whole shards: 7.5 ms of CPU time per MB against 1.3 ms
READ_COST = 6

def reads_whole_shards(
    items:RemoteItems # Sample numbers
)->bool:
    """Are the items in the order of shards, and at least half of the samples of those shards that they come from?

    Otherwise single samples are read, and no shards are fetched."""
    sizes = items.shard_sizes
    return sizes is not None and 2*sizes.sum()>=items.store.shards.n[sizes>0].sum(dtype=np.int64)

class ShuffledShards:
    """Which shards a worker fetches in a shuffled epoch: those of the group that it reads from, and of the next group

    Call it with each batch. It returns the arguments of the store's `prefetch` when a new group begins, else `None`."""
    def __init__(self,
        store:Store, # A store with shards
        perm:ShardPermutation, # The order of the epoch
        worker:int, # Number of the worker
        given:int=0 # Samples that it has read before
    ):
        self.store,self.perm,self.worker,self.shards = store,perm,worker,perm.shards(worker)
        self.given,self.group = given,None   # samples so far, number of the current group

    def __call__(self,
        positions:list # Positions of a batch; only their number matters
    ): # `(shards, wait)`: their numbers, and whether samples wait for their shards; or `None`
        "The arguments of `prefetch` if this batch begins a new group"
        group = self.perm.group_at(self.worker, self.given)
        is_new = group!=self.group
        self.given,self.group = self.given+len(positions),group
        if not is_new: return
        per_group = self.perm.interleave
        shards = list(dict.fromkeys(self.shards[group*per_group:(group+2)*per_group].tolist()))
        return shards, group>0 or self._is_quick(self.shards[:per_group], len(positions))

    def _is_quick(self, shards, n):
        "Does it cost less to read `shards`, an array of their numbers, as a whole than `n` single samples?"
        manifest = self.store.manifest
        sample_bytes = n*manifest.nbytes/max(1, manifest.n)
        return self.store.shards.size[shards].sum()<=READ_COST*sample_bytes

class ShardsInOrder:
    "Which shards are fetched if samples come in their stored order: those of this batch, and the next shard"
    def __init__(self,
        items:RemoteItems # Sample numbers by position
    ):
        self.items,self.wait = items,False

    def __call__(self,
        positions:list # Positions of a batch in `items`; `None` counts as 0
    )->tuple: # `(shards, wait)`; only the first batch does not wait for its shards
        "The arguments of `prefetch` for this batch"
        table = self.items.store.shards
        used = np.unique(table.at(self.items.numbers_at([p or 0 for p in positions]))[0])
        after = range(used[-1]+1, min(used[-1]+2, len(table)))
        wait,self.wait = self.wait,True
        return [*used.tolist(), *after],wait

def shard_prefetch(
    items:RemoteItems, # Sample numbers, by shards
    order, # The `Order` of the epoch of this rank, or `None`
    worker:int, # Number of the worker
    given:int=0 # Samples that it has read before
): # `None` if samples are read one by one
    "A function to call with each batch of `worker`, which returns the arguments of the store's `prefetch`, or `None`"
    if not reads_whole_shards(items): return
    perm = shard_permutation_of(order)
    return ShardsInOrder(items) if perm is None else ShuffledShards(items.store, perm, worker, given)

class FetchThreads:
    """Threads that work in advance. As a context manager it returns `submit`.

    At the end of the context, what has not begun is cancelled; what runs goes on, and is not waited for."""
    def __init__(self,
        n:int, # Number of threads; with 0 the work is done when its result is asked for
        init=None # Called first in each thread
    ):
        self.executor = ThreadPoolExecutor(n, thread_name_prefix='fetch', initializer=init) if n else None

    def submit(self, f, *args):
        """Start `f(*args)` in one of the threads; returns a function that waits for the result and returns it

        That function raises what `f` raises. With 0 threads, it calls `f(*args)` itself: call it only once."""
        return self.executor.submit(in_threads(f), *args).result if self.executor else lambda: f(*args)

    def __enter__(self): return self.submit
    def __exit__(self, *exc):
        if self.executor: self.executor.shutdown(wait=False, cancel_futures=True)
