"The measures of an order are what theory predicts. Seeds are fixed, so that these tests pass or fail for good"
import numpy as np
import pytest

from fastai_remote.order.base import Order
from fastai_remote.order.permutation import Permutation
from fastai_remote.order.quality import shuffle_quality
from fastai_remote.order.ranks import rank_share
from fastai_remote.order.shards import ShardPermutation

def near_pairs(z, w=100): return z*w-w*(w+1)//2   # of z numbers in a row, z>w: z-1 that differ by 1, z-2 by 2, ...

@pytest.mark.parametrize('interleave', [1, 2, 5])
def test_near_is_as_predicted(interleave):
    "Pairs of a batch are pairs of its group, any equally likely; of those, the near ones can be counted"
    z,S,bs = 400,100,50
    order = lambda seed: ShardPermutation([z]*S, seed, interleave, bs)
    q = shuffle_quality(order, z*S, bs, batches=10**6, seed=4)
    near = 0
    for g in order(4).shards().reshape(-1, interleave):
        side_by_side = int((np.diff(np.sort(g))==1).sum())
        near += interleave*near_pairs(z)+side_by_side*100*101//2
    want = near/(S//interleave)/(interleave*z*(interleave*z-1)/2)
    assert q.near_pct==pytest.approx(100*want, rel=.02)
    assert q.near==pytest.approx(want/(near_pairs(z*S)/(z*S*(z*S-1)/2)), rel=.02)

@pytest.mark.parametrize('interleave', [1, 4])
def test_again_is_as_predicted(interleave):
    """Two of a batch meet again when their shards share a group again, and chance has them in one batch of it

    One shard always shares a group with itself."""
    z,S,bs = 500,100,50
    q = shuffle_quality(lambda seed: ShardPermutation([z]*S, seed, interleave, bs), z*S, bs, seed=2)
    same = (z-1)/(interleave*z-1)
    want = (same+(1-same)*(interleave-1)/(S-1))*(bs-1)/(interleave*z-1)
    assert q.again_pct==pytest.approx(100*want, rel=.1) and q.again==pytest.approx(want/((bs-1)/(z*S-1)), rel=.1)

@pytest.mark.slow
def test_again_from_a_part_of_two_long_epochs():
    n,G = 4_000_000,4000
    q = shuffle_quality(lambda seed: ShardPermutation([1000]*(n//1000), seed), n)
    assert q.again_pct==pytest.approx(100*999/(G-1)*63/G, rel=.15)

def test_labels_are_as_predicted():
    """Sorted by class: a batch has the classes of `interleave` shards

    So counts vary bs/interleave times as much, and a little as they do anyway."""
    n,z,mixed = 1_000_000,1000,Permutation(1_000_000, 1)
    def labels_of(interleave, labels):
        return shuffle_quality(ShardPermutation([z]*(n//z), 3, interleave), n, labels=labels, batches=2000).labels
    for interleave in (1, 4, 16):
        assert labels_of(interleave, lambda i: i*50//n)==pytest.approx(64/interleave+1-1/interleave, rel=.1)
    assert labels_of(1, lambda i: mixed[i]*50//n)==pytest.approx(1, abs=.05)

def test_a_full_shuffle_is_as_good_as_one():
    "And so is a share of one: a rank sees half"
    n,starts = 50_000,np.arange(0, 50_001, 500)
    q = shuffle_quality(lambda seed: Permutation(n, seed+9), n, labels=lambda i: i//5000, starts=starts, batches=2000)
    for v in (q.near, q.labels, q.again): assert v==pytest.approx(1, abs=.1)
    assert q.span==pytest.approx(100*(1-.99**64), abs=.5) and abs(q.span-q.span_full)<.5
    assert repr(q).count('as often as')==2 and 'times' not in repr(q)
    n = 20_000
    q = shuffle_quality(lambda seed: rank_share(Order(n, Permutation(n, seed+9)), 1, 2), n, batches=2000)
    assert q.near==pytest.approx(1, abs=.1) and q.again==pytest.approx(1, abs=.1)

def test_few_batches_without_replacement():
    "Of four batches that share out everything none can be far off"
    labels = [shuffle_quality(Permutation(256, seed), 256, labels=lambda i: i%2).labels for seed in range(300)]
    assert np.mean(labels)==pytest.approx(1, abs=.1)

@pytest.mark.parametrize('sizes', [[1], [1,1], [70]])
def test_quality_of_little(sizes):
    n = sum(sizes)
    starts = np.cumsum([0,*sizes])
    q = shuffle_quality(lambda seed: ShardPermutation(sizes, seed), n, labels=lambda i: i*0, starts=starts)
    assert q.bs==min(n, 64) and q.labels==1 and 1<=q.span<=len(sizes) and repr(q)

def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match='empty'): shuffle_quality(ShardPermutation([]), 0)
    for bs in (0, -1):
        with pytest.raises(ValueError, match=f'bs={bs}'): shuffle_quality(Permutation(9), 9, bs=bs)

@pytest.mark.slow
def test_quality_is_shown():
    n = 10_000
    q = shuffle_quality(ShardPermutation([100]*100, 1, num_workers=2), n)
    assert q.again is None and q.labels is None and q.span is None and 'classes' not in repr(q).lower()
    with_labels = shuffle_quality(ShardPermutation([100]*100, 1), n, labels=lambda i: np.where(i<n//2, 7, -3))
    for o in (q, with_labels):
        png = o._repr_png_()
        assert png[:4]==b'\x89PNG' and len(png)<16_000
        assert [len(axis.get_xlabel())>0 for axis in o.plot().axes]==[True]*2
    for o in shuffle_quality(Permutation(100), 100, bs=1), shuffle_quality(Permutation(1), 1, labels=lambda i: i*0):
        assert o._repr_png_()[:4]==b'\x89PNG'
