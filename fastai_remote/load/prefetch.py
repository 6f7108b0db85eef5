"""Which shards a worker reads next, and threads that read in advance

Docs: page `load/prefetch`"""

# If the store has shards, an epoch goes through them group by group, and a worker fetches whole shards into the cache
# before it needs them. `ShuffledShards` and `ShardsInOrder` say which ones, batch by batch. `in_advance` runs
# requests for batches in the background.

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import numpy as np

from .items import RemoteItems
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
    """Which shards a process fetches in a shuffled epoch: those of the groups that it reads from, and of the next ones

    Call it with each batch. It returns the arguments of the store's `prefetch` when a new group begins, else `None`."""
    def __init__(self,
        store:Store, # A store with shards
        perm:ShardPermutation, # The order of the epoch
        first_of # `first_of(k)`: the position in `perm` of the first sample of batch `k` of this process
    ): self.store,self.perm,self.first_of,self.k,self.groups = store,perm,first_of,0,None

    def __call__(self,
        positions:list # Positions of a batch; only their number matters
    ): # `(shards, wait)`: their numbers, and whether samples wait for their shards; or `None`
        "The arguments of `prefetch` if this batch begins a new group"
        groups = self._groups(self.first_of(self.k), len(positions))
        is_first,is_new = self.groups is None,groups!=self.groups
        self.k,self.groups = self.k+1,groups
        if not is_new: return
        per_group = self.perm.interleave
        def shards(n):   # of `n` groups, from the current one on
            found = [self.perm.shards(lane)[group*per_group:(group+n)*per_group].tolist() for lane,group in groups]
            return list(dict.fromkeys(sum(found, [])))
        return shards(2), not is_first or self._is_quick(shards(1), len(positions))

    def _groups(self, first, n):
        "A pair `(worker, its group)` of the permutation for each worker that `n` positions from `first` on belong to"
        bs,workers = self.perm.bs,self.perm.num_workers
        found = {}
        for batch in range(first//bs, -(-(first+n)//bs)):
            turn,worker = divmod(batch, workers)
            found.setdefault(worker, self.perm.group_at(worker, turn*bs))
        return sorted(found.items())

    def _is_quick(self, shards, n):
        "Does it cost less to read `shards`, a list of their numbers, as a whole than `n` single samples?"
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
    first_of # As `ShuffledShards` takes it
): # `None` if samples are read one by one
    "A function to call with each batch of a process, which returns the arguments of the store's `prefetch`, or `None`"
    if not reads_whole_shards(items): return
    perm = shard_permutation_of(order)
    return ShardsInOrder(items) if perm is None else ShuffledShards(items.store, perm, first_of)

def in_advance(
    f, # Called in threads
    # Iterable of `(what it is for, arguments of f)`, from which this thread takes the next one with each result
    work,
    n:int, # Number of results that are computed in advance, each in a thread; 0: a result is computed when it is taken
    init=None # Called first in each thread
): # Yields `(what it is for, what f returns)`, in the order of `work`; raises what `f` raises
    """Calls `f` with the arguments of each piece of `work`, while the results before are used

    The stages of `f` are those of the batch that this thread works on. If nobody takes the rest, what has not begun is
    cancelled; what runs goes on, and is not waited for."""
    if not n:
        for what,arguments in work: yield what,f(*arguments)
        return
    waiting,threads = deque(),ThreadPoolExecutor(n, thread_name_prefix='fetch', initializer=init)
    def oldest():
        what,future = waiting.popleft()
        return what,future.result()
    try:
        for what,arguments in work:
            waiting.append((what, threads.submit(copy_context().run, f, *arguments)))
            if len(waiting)>n: yield oldest()
        while waiting: yield oldest()
    finally: threads.shutdown(wait=False, cancel_futures=True)
