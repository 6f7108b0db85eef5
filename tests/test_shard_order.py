"""Orders that read shard by shard: each sample once, whole shards, well mixed within them; splits that spread

`test_shuffle_quality.py` tests the measures of an order."""
import pickle

import numpy as np
import pytest
from conftest import examples
from hypothesis import example, given, strategies as st

from fastai_remote.order.base import Order, SplitOrder
from fastai_remote.order.lengths import SortedWindows
from fastai_remote.order.permutation import Permutation
from fastai_remote.order.ranks import rank_share, shard_permutation_of, worker_batches
from fastai_remote.order.shards import ShardFolds, ShardPermutation, ShardSplit

seeds,some_sizes = st.integers(0, 2**63),st.lists(st.one_of(st.integers(0, 3), st.integers(0, 60)), max_size=14)

def shard_of(sizes, i): return np.searchsorted(np.cumsum(sizes), i, 'right')
def whole(m): return m[np.arange(len(m))]
def lane(sp, worker):
    batches = worker_batches(Order(len(sp), sp), sp.bs, worker, sp.num_workers)
    return np.concatenate([np.zeros(0, np.int64), *batches])
def even(table, e, dof):
    table = np.asarray(table)
    return abs(float(((table-e)**2/e).sum())-dof)<5*np.sqrt(2*dof)

@pytest.mark.slow
@given(some_sizes, seeds, st.integers(1, 5), st.integers(1, 9), st.integers(0, 4), st.integers(1, 5), st.booleans())
@example([500], 1, 4, 8, 3, 2, True)    # a shard larger than a lane
@example([3], 1, 4, 64, 4, 1, True)     # less than a batch
@example([5,0,9], 1, 2, 8, 4, 1, True)  # less than a batch for each worker
@example([1], 0, 1, 1, 4, 5, True)      # fewer samples than ranks
@example([0,0], 0, 1, 1, 2, 2, True)
@examples(150)
def test_ranks_and_workers_together_visit_each_sample_once(sizes, seed, interleave, bs, workers, world, equal):
    "But for what evens out the ranks; each keeps to its shards, group by group"
    n,seen,reads,used = sum(sizes),np.zeros(sum(sizes), int),0,0
    ranks = [ShardPermutation(sizes, seed, interleave, bs, workers, r, world, equal=equal) for r in range(world)]
    lengths = [len(sp) for sp in ranks]
    assert lengths==[-(-n//world)]*world if equal else sum(lengths)==n and max(lengths)-min(lengths)<=1
    for sp in ranks:
        assert sp.num_workers==max(workers, 1)
        got = [lane(sp, worker) for worker in range(sp.num_workers)]
        assert [len(g) for g in got]==sp.counts.tolist() and sum(map(len, got))==len(sp)
        for w,g in enumerate(got):
            np.add.at(seen, g, 1)
            mine,at = sp.shards(w),[sp.group_at(w, j) for j in range(len(g)+1)]
            reads,used = reads+len(mine),used+(len(g)>0)
            assert at==sorted(at) and at[-1]==-(-len(mine)//interleave) and (len(g)>0)==(len(mine)>0)
            assert all(s in mine[k*interleave:(k+1)*interleave] for s,k in zip(shard_of(sizes, g), at))
            assert set(shard_of(sizes, g).tolist())==set(mine.tolist())
    assert seen.sum()==sum(lengths) and (n==0 or seen.min()>=1)
    if world<=n: assert seen.max(initial=0)<=2
    if n==sum(lengths): assert reads<=np.count_nonzero(sizes)+used

@given(some_sizes.filter(any), seeds, st.integers(1, 5), st.integers(1, 9), st.integers(0, 4), st.data())
@examples(100)
def test_random_access(sizes, seed, interleave, bs, workers, data):
    "Any positions, in any sequence, from a copy, one by one: the same numbers"
    sp,o = (ShardPermutation(sizes, seed, interleave, bs, workers) for _ in range(2))
    numbers,at = whole(sp),data.draw(st.lists(st.integers(0, len(sp)-1)))
    assert o[np.array(at, int)].tolist()==numbers[at].tolist()==[sp[i] for i in at]
    assert all(type(sp[i]) is int for i in at[:1]) and numbers.dtype==np.int64
    p = pickle.loads(pickle.dumps(sp))
    assert p==sp and np.array_equal(whole(p), numbers) and list(Order(len(sp), sp))==numbers.tolist()
    assert p!=ShardPermutation(sizes, seed, interleave+1, bs, workers)
    assert p!=ShardPermutation([*sizes,0], seed, interleave, bs, workers)

# --- shares of ranks

def test_shares_of_ranks_and_workers():
    order = Order(10)
    assert [list(rank_share(order, rank, 4)) for rank in range(4)]==[[0,4,8],[1,5,9],[2,6,0],[3,7,1]]
    assert [list(rank_share(order, rank, 4, consecutive=True)) for rank in range(4)]==[[0,1,2],[3,4,5],[6,7,8],[9,0,1]]
    batches = [[batch.tolist() for batch in worker_batches(order, 3, worker, 2)] for worker in range(2)]
    assert batches==[[[0,1,2],[6,7,8]], [[3,4,5],[9]]]

PERM = ShardPermutation([10]*4, 1, interleave=1, bs=4, num_workers=2)
ORDER = Order(40, PERM)

@pytest.mark.parametrize('consecutive', [False,True])
def test_an_order_of_shards_is_divided_by_shards(consecutive):
    for rank in range(2):
        share = rank_share(ORDER, rank, 2, consecutive)
        want = ShardPermutation([10]*4, 1, interleave=1, bs=4, num_workers=2, rank=rank, world_size=2)
        assert shard_permutation_of(share)==want and list(share)==whole(want).tolist()

def test_maps_after_the_shards_are_applied_to_the_share_of_a_rank():
    for first in PERM, SortedWindows(PERM, 40, np.arange(40), 4):
        for rank in range(2):
            plain,mapped = (rank_share(Order(40, first, *maps), rank, 2) for maps in ((), (np.arange(1000, 1040),)))
            assert list(mapped)==[1000+i for i in plain] and shard_permutation_of(mapped)==shard_permutation_of(plain)
    assert list(rank_share(Order(38, PERM), 1, 2))==list(rank_share(ORDER, 1, 2))[:19]

def test_what_cannot_be_divided_by_shards_is_refused():
    for part in ORDER[20:], ORDER[::2], ORDER[::-1], ORDER[Order(40, Permutation(40, 1))]:
        with pytest.raises(ValueError, match='divided by its shards.*rank_share'): rank_share(part, 0, 2)
        assert rank_share(part, 0, 1) is part
    with pytest.raises(ValueError, match='a share of 2 ranks'): rank_share(rank_share(ORDER, 0, 2), 0, 2)

# --- arguments, memory, and numbers that never change

@pytest.mark.parametrize('make,message', [
    *((lambda name=name, value=value: ShardPermutation([5], **{name:value}), f'not .*{name}={value}')
      for name,value in dict(interleave=0, bs=0, num_workers=-1, rank=-1, world_size=0).items()),
    *((lambda f=f, sizes=sizes: f(sizes), message) for f in (ShardPermutation, ShardSplit) for sizes,message in (
        ([-1], 'not -1'), ([2**31+1], 'not 2,147,483,649'), ([[1]], r'not of shape \(1, 1\)'))),
    (lambda: ShardPermutation([2.5,3]), 'integers'), (lambda: ShardSplit([5], 1.1), 'valid_pct must .* not 1.1'),
    *((lambda n=n, fold=fold: ShardFolds([10,10], n, fold), 'n_folds') for n,fold in ((2,2), (2,-1), (1,0)))])
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message): make()
    assert len(ShardPermutation([]))==0

def test_the_numbers_of_a_seed_never_change():
    "Orders are part of what a seed means"
    at,split = np.arange(0, 600, 128),ShardSplit([1000]*1000, .2, 42)
    assert ShardPermutation([1000]*1000, 42, num_workers=2)[at].tolist()==[916726, 859128, 916268, 933004, 933872]
    assert ShardPermutation([10_000]*1000, 42, num_workers=2)[at].tolist()==[
        8591264, 9784507, 8594598, 9166904, 9167324]
    assert split.valid[np.arange(0, 200_000, 60_002)].tolist()==[73, 300671, 600458, 900458]
    assert split.train[np.arange(0, 800_000, 260_002)].tolist()==[273, 325652, 650376, 975895]

def test_memory_grows_with_shards_and_not_with_samples():
    sp = ShardPermutation([10**9]*1000, 1, num_workers=4)
    sp[np.arange(64)]
    assert sum(v.nbytes for v in vars(sp).values() if isinstance(v, np.ndarray))<50_000 and len(pickle.dumps(sp))<9000
    split = ShardSplit([10**6]*1000, .2)
    assert len(pickle.dumps([SplitOrder(range(len(m)), m) for m in (split.train, split.valid)]))<9000   # sizes once

# --- statistics: seeds are fixed, so that these pass or fail for good; bounds are five deviations

@pytest.mark.parametrize('size', [12, 5000])   # a group that is held, and one that is computed
def test_places_within_a_group_are_equally_likely(size):
    "From each place to each position"
    k,table = 2*size,np.zeros((24, 24))
    at = np.linspace(0, k-1, 24).astype(int)
    for seed in range(500):
        sp = ShardPermutation([size]*6, seed, interleave=2, bs=k)
        a,b = sp.shards()[:2]
        x = sp[at]
        np.add.at(table, (np.arange(24), ((x//size==b)*size+x%size)*24//k), 1)
    assert even(table, 500/24, 23*23 if size==12 else 24*23)

def test_shards_go_anywhere():
    table = np.zeros((10, 10))
    for seed in range(1000): np.add.at(table, (np.arange(10), ShardPermutation([3]*10, seed, interleave=2).shards()), 1)
    assert even(table, 100, 81)

def eight(seed, **kw): return whole(ShardPermutation([4]*4, seed, interleave=2, bs=8, **kw))
TWO = dict(groups=lambda seed: eight(seed).reshape(2, 8), workers=lambda seed: eight(seed, num_workers=2).reshape(2, 8),
           ranks=lambda seed: [eight(seed, rank=rank, world_size=2) for rank in range(2)],
           epochs=lambda seed: [eight(s)[:8] for s in (seed, seed+1)])

@pytest.mark.parametrize('two', TWO)
def test_places_of_two_groups_are_independent(two):
    "Where a place of one group goes says nothing of where the same place of another goes"
    table = np.zeros((8, 8))
    def place(x): return int(np.flatnonzero(x%4==1)[0])   # in a group of eight, of the first sample with local number 1
    for seed in range(1000):
        a,b = TWO[two](seed)
        table[place(a),place(b)] += 1
    table = table[table.sum(1)>0][:,table.sum(0)>0]
    assert even(table, table.sum(1)[:,None]*table.sum(0)[None]/table.sum(), (len(table)-1)*(table.shape[1]-1))

# --- splits

@pytest.mark.slow
@given(some_sizes, st.one_of(st.floats(0, 1), st.sampled_from([0, .1, .2, .5, 1, 1-2**-53])), seeds)
@examples(100)
def test_a_split_takes_its_part_of_each_shard(sizes, pct, seed):
    n,split = sum(sizes),ShardSplit(sizes, pct, seed)
    t,v = whole(split.train),whole(split.valid)
    assert np.array_equal(np.sort(np.concatenate([t, v])), np.arange(n)) and len(v)==len(split.valid)==int(pct*n)
    for m,got in ((split.train,t), (split.valid,v)):
        s,o = shard_of(sizes, got),SplitOrder(range(len(m)), m)
        assert (np.diff(s)>=0).all() and np.array_equal(np.bincount(s, minlength=len(sizes)), m.sizes)
        assert list(o)==got.tolist()==list(pickle.loads(pickle.dumps(o))) and got.dtype==np.int64
        assert all(o[i]==x for i,x in enumerate(got[:5].tolist()))
        with pytest.raises(IndexError): m[len(m)]
        assert not len(m) or sorted(whole(Order(len(m), ShardPermutation(m.sizes, seed), m)))==sorted(got.tolist())
    assert (np.abs(split.valid.sizes-pct*np.asarray(sizes))<1+1e-6).all()
    assert pickle.loads(pickle.dumps(split))==split!=ShardSplit([*sizes,1], pct, seed)

@pytest.mark.slow
@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=8),
       st.one_of(st.floats(0, 1), st.sampled_from([1-2**-53, 1-2**-50, 1/3])))
@example([536_870_916, 1, 1], 0.9999999906867743)   # rounding would take two of one
@examples(100)
def test_no_shard_gives_more_than_it_has_however_floats_are_rounded(sizes, pct):
    split = ShardSplit(sizes, pct)
    assert len(split.valid)==int(pct*sum(sizes))
    assert min(*split.train.sizes, *split.valid.sizes)>=0
    assert np.array_equal(split.train.sizes+split.valid.sizes, sizes)

def test_no_number_of_the_largest_shard_is_too_large_to_be_multiplied():
    split,at = ShardSplit([3,2**31], .5, 1),np.arange(0, 2**30, 10**6)
    both = np.concatenate([split.valid[at], split.train[at]])
    assert len(np.unique(both))==2*len(at) and both.min()>=0 and both.max()<2**31+3

@pytest.mark.parametrize('z,pct', [(60, .1), (210, .35), (1000, .2), (1024, .35), (10_000, .1), (99_991, .2)])
def test_a_split_spreads_over_each_shard(z, pct):
    "Each tenth of a shard gives its share, more evenly than by lot"
    S = 200 if z<2000 else 40
    v = whole(split:=ShardSplit([z]*S, pct, 3).valid)
    c,k,w = np.zeros((S, 10)),split.sizes[:,None],np.bincount(np.arange(z)*10//z)/z
    np.add.at(c, (v//z, v%z*10//z), 1)
    assert ((c-k*w)**2).mean()<.7*(k*w*(1-w)*(z-k)/(z-1)).mean() and (np.abs(c-k*w)<np.maximum(3, .6*k*w)).all()

def test_a_split_is_fair():
    "Over shards and seeds each place is taken equally often, and seeds differ"
    for z in (7, 16, 100):
        valid = [whole(ShardSplit([z]*300, 1/z+1e-9, seed).valid)%z for seed in range(50)]
        u = np.bincount(np.concatenate(valid), minlength=z)
        assert even(u, u.sum()/z, z-1)
    a,b = (set(whole(ShardSplit([1000]*100, .2, seed).valid).tolist()) for seed in (1,2))
    assert len(a&b)/len(a)==pytest.approx(.2, abs=.05)
