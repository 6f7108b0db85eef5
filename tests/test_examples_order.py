"What each module of `order` does, in short: examples that were tried first"
from fastcore.test import test_eq
from fastai_remote.order.base import Order
from fastai_remote.order.ranks import rank_share, worker_batches

def test_order_ranks():
    test_eq([list(rank_share(Order(10), r, 4)) for r in range(4)], [[0,4,8],[1,5,9],[2,6,0],[3,7,1]])
    test_eq([list(rank_share(Order(10), r, 4, consecutive=True)) for r in range(4)], [[0,1,2],[3,4,5],[6,7,8],[9,0,1]])
    def batches_of(worker): return [b.tolist() for b in worker_batches(Order(10), 3, worker, 2)]
    test_eq([batches_of(0), batches_of(1)], [[[0,1,2],[6,7,8]], [[3,4,5],[9]]])
