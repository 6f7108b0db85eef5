"What each module of `order` does, in short: examples that were tried first"
import numpy as np
from fastcore.test import test_eq
from fastai_remote.order.base import Order
from fastai_remote.order.ranks import rank_share, worker_batches
from fastai_remote.order.permutation import Permutation
from fastai_remote.order.quality import shuffle_quality
from fastai_remote.order.shards import ShardPermutation

def test_order_ranks():
    test_eq([list(rank_share(Order(10), r, 4)) for r in range(4)], [[0,4,8],[1,5,9],[2,6,0],[3,7,1]])
    test_eq([list(rank_share(Order(10), r, 4, consecutive=True)) for r in range(4)], [[0,1,2],[3,4,5],[6,7,8],[9,0,1]])
    def batches_of(worker): return [b.tolist() for b in worker_batches(Order(10), 3, worker, 2)]
    test_eq([batches_of(0), batches_of(1)], [[[0,1,2],[6,7,8]], [[3,4,5],[9]]])

def test_order_quality():
    n,starts = 100_000,np.arange(0, 100_001, 1000)
    def quality(interleave, order=None):
        if order is None: order = lambda seed: ShardPermutation([1000]*100, seed, interleave)
        return shuffle_quality(order, n, labels=lambda i: i//5000, starts=starts)
    q = quality(4)
    assert q.labels>10 and 3.5<q.span<4.5 and q.near>15
    q16,same = quality(16),quality(0, lambda seed: Permutation(n, seed+7))
    assert q16.labels<q.labels/2 and q16.near<q.near/2
    for v in (same.near, same.labels, same.again): assert .7<v<1.4
    mixed = Permutation(n, 5)[np.arange(n)]//5000
    q = shuffle_quality(ShardPermutation([1000]*100, 1, 4), n, labels=lambda i: mixed[i])
    assert .8<q.labels<1.2
