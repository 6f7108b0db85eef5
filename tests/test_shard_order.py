"Orders that read shard by shard: each sample once, whole shards, well mixed within them; splits that spread; measures that measure"
import pickle, subprocess, sys

import numpy as np
import pytest
from conftest import examples
from hypothesis import example, given, strategies as st

from fastai_remote.order.base import Order, SplitOrder
from fastai_remote.order.lengths import SortedWindows
from fastai_remote.order.permutation import Permutation
from fastai_remote.order.ranks import rank_share, shard_permutation_of, worker_batches
from fastai_remote.order.shards import ShardFolds, ShardPermutation, ShardSplit, sizes_of
from fastai_remote.order.quality import shuffle_quality

seeds,some_sizes = st.integers(0, 2**63),st.lists(st.one_of(st.integers(0, 3), st.integers(0, 60)), max_size=14)

def shard_of(sizes, i): return np.searchsorted(np.cumsum(sizes), i, 'right')
def whole(m): return m[np.arange(len(m))]
def lanes(sp): return [np.concatenate([np.zeros(0, np.int64), *worker_batches(Order(len(sp), sp), sp.bs, w, sp.num_workers)]) for w in range(sp.num_workers)]
def chi(table, e): return float(((table-e)**2/e).sum())
def even(table, e, dof): return abs(chi(np.asarray(table), e)-dof)<5*np.sqrt(2*dof)

@given(some_sizes, seeds, st.integers(1, 5), st.integers(1, 9), st.integers(0, 4), st.integers(1, 5))
@example([500], 1, 4, 8, 3, 2)          # a shard larger than a lane
@example([3], 1, 4, 64, 4, 1)           # less than a batch
@example([5,0,9], 1, 2, 8, 4, 1)        # less than a batch for each worker
@example([1], 0, 1, 1, 4, 5)            # fewer samples than ranks
@example([0,0], 0, 1, 1, 2, 2)
@examples(300)
def test_each_once(sizes, seed, interleave, bs, workers, world):
    "Ranks and workers together visit each sample once, but for what evens out the ranks; each keeps to its shards, group by group"
    n,ranks = sum(sizes),[ShardPermutation(sizes, seed, interleave, bs, workers, r, world) for r in range(world)]
    size,seen,reads = -(-n//world),np.zeros(n, int),0
    for sp in ranks:
        assert len(sp)==size and sp.num_workers==max(workers, 1)
        got = lanes(sp)
        assert [len(g) for g in got]==sp.counts.tolist() and sum(map(len, got))==size
        for w,g in enumerate(got):
            np.add.at(seen, g, 1)
            mine,at = sp.shards(w),[sp.group_at(w, j) for j in range(len(g)+1)]
            reads += len(mine)
            assert at==sorted(at) and at[-1]==-(-len(mine)//interleave) and (len(g)>0)==(len(mine)>0)
            assert all(s in mine[k*interleave:(k+1)*interleave] for s,k in zip(shard_of(sizes, g), at))
            assert set(shard_of(sizes, g).tolist())==set(mine.tolist())
    assert seen.sum()==size*world and (n==0 or seen.min()>=1)
    if world<=n: assert seen.max(initial=0)<=2
    if n==size*world: assert reads<=np.count_nonzero(sizes)+sum(len(g)>0 for sp in ranks for g in lanes(sp))

@pytest.mark.parametrize('consecutive', [False,True])
def test_an_order_of_shards_is_divided_by_shards(consecutive):
    order = Order(40, ShardPermutation([10]*4, 1, interleave=1, bs=4, num_workers=2))
    for rank in range(2):
        share = rank_share(order, rank, 2, consecutive)
        want = ShardPermutation([10]*4, 1, interleave=1, bs=4, num_workers=2, rank=rank, world_size=2)
        assert shard_permutation_of(share)==want and list(share)==whole(want).tolist()

def test_maps_after_the_shards_are_applied_to_the_share_of_a_rank():
    perm,numbers = ShardPermutation([10]*4, 1, interleave=1, bs=4, num_workers=2),np.arange(1000, 1040)
    windows = SortedWindows(perm, 40, np.arange(40), 4)
    for first in perm,windows:
        for rank in range(2):
            plain,mapped = (rank_share(Order(40, first, *maps), rank, 2) for maps in ((), (numbers,)))
            assert list(mapped)==[1000+i for i in plain] and shard_permutation_of(mapped)==shard_permutation_of(plain)
    assert list(rank_share(Order(38, perm), 1, 2))==list(rank_share(Order(40, perm), 1, 2))[:19]

def test_what_cannot_be_divided_by_shards_is_refused():
    order = Order(40, ShardPermutation([10]*4, 1, interleave=1, bs=4, num_workers=2))
    for part in order[20:], order[::2], order[::-1], order[Order(40, Permutation(40, 1))]:
        with pytest.raises(ValueError, match='divided by its shards.*rank_share'): rank_share(part, 0, 2)
        assert rank_share(part, 0, 1) is part
    with pytest.raises(ValueError, match='a share of 2 ranks'): rank_share(rank_share(order, 0, 2), 0, 2)

@given(some_sizes.filter(any), seeds, st.integers(1, 5), st.integers(1, 9), st.integers(0, 4), st.data())
@examples(100)
def test_random_access(sizes, seed, interleave, bs, workers, data):
    "Any positions, in any sequence, from a copy, one by one: the same numbers"
    sp,o = (ShardPermutation(sizes, seed, interleave, bs, workers) for _ in range(2))
    all_,at = whole(sp),data.draw(st.lists(st.integers(0, len(sp)-1)))
    assert o[np.array(at, int)].tolist()==all_[at].tolist()==[sp[i] for i in at] and all(type(sp[i]) is int for i in at[:1])
    p = pickle.loads(pickle.dumps(sp))
    assert p==sp and np.array_equal(whole(p), all_) and all_.dtype==np.int64
    assert p!=ShardPermutation(sizes, seed, interleave+1, bs, workers) and p!=ShardPermutation([*sizes,0], seed, interleave, bs, workers)
    assert list(Order(len(sp), sp))==all_.tolist()
    for bad in (-1, len(sp), np.array([0,len(sp)])):
        with pytest.raises(IndexError): sp[bad]

def test_bad_arguments():
    for kw in (dict(interleave=0), dict(bs=0), dict(num_workers=-1), dict(rank=1), dict(rank=-1), dict(world_size=0)):
        with pytest.raises(ValueError): ShardPermutation([5], **kw)
    for sizes in ([-1], [[1]], [2**31+1]):
        for f in (ShardPermutation, ShardSplit):
            with pytest.raises(ValueError): f(sizes)
    for pct in (-.1, 1.1):
        with pytest.raises(ValueError): ShardSplit([5], pct)

def test_frozen():
    "Orders are part of what a seed means: these numbers must never change"
    assert ShardPermutation([1000]*1000, 42, num_workers=2)[np.arange(0, 600, 64)].tolist()==[916726, 738939, 859128, 738818, 916268, 738956, 933004, 80805, 933872, 744215]
    assert ShardPermutation([10_000]*1000, 42, num_workers=2)[np.arange(0, 600, 64)].tolist()==[8591264, 4191182, 9784507, 7382805, 8594598, 7448553, 9166904, 809930, 9167324, 4191560]
    assert ShardSplit([1000]*1000, .2, 42).valid[np.arange(0, 200_000, 30_001)].tolist()==[73, 150291, 300671, 450186, 600458, 750067, 900458]
    assert ShardSplit([1000]*1000, .2, 42).train[np.arange(0, 800_000, 130_001)].tolist()==[273, 162011, 325652, 487628, 650376, 812048, 975895]

def test_numpy_only():
    code = "import sys, fastai_remote.order.shards; print(*{'torch','fastai','matplotlib','PIL','fastcore'}&{m.split('.')[0] for m in sys.modules})"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip()==''

def test_memory():
    "What is held grows with shards, not with samples"
    sp = ShardPermutation([10**9]*1000, 1, num_workers=4)
    sp[np.arange(64)]
    assert sum(v.nbytes for v in vars(sp).values() if isinstance(v, np.ndarray))<50_000 and len(pickle.dumps(sp))<9000
    split = ShardSplit([10**6]*1000, .2)
    assert len(pickle.dumps([SplitOrder(range(len(m)), m) for m in (split.train, split.valid)]))<9000   # sizes once

# Statistics: seeds are fixed, so that these pass or fail for good; bounds are five deviations

def test_all_permutations_of_a_group():
    "Two shards of two samples, side by side in a group: 24 orders, equally often"
    got = {}
    for seed in range(4800):
        sp = ShardPermutation([2,2], seed, interleave=2, bs=4)
        k = tuple(whole(sp).tolist())
        got[k] = got.get(k, 0)+1
    assert len(got)==24 and even(list(got.values()), 200, 23)

@pytest.mark.parametrize('size', [12, 5000])   # a group that is held, and one that is computed
def test_places_within_a_group(size):
    "From each place to each position equally often"
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

@pytest.mark.parametrize('two', ['groups', 'workers', 'ranks', 'epochs'])
def test_independent(two):
    "Where a place of one group goes says nothing of where the same place of another goes"
    table = np.zeros((8, 8))
    def place(x): return int(np.flatnonzero(x%4==1)[0])   # position, in a group of eight, of the first sample with local number 1
    for seed in range(3000):
        if two=='groups':  a,b = whole(ShardPermutation([4]*4, seed, interleave=2, bs=8)).reshape(2, 8)
        if two=='workers': a,b = whole(ShardPermutation([4]*4, seed, interleave=2, bs=8, num_workers=2)).reshape(2, 8)
        if two=='ranks':   a,b = (whole(ShardPermutation([4]*4, seed, interleave=2, bs=8, rank=r, world_size=2)) for r in range(2))
        if two=='epochs':  a,b = (whole(ShardPermutation([4]*4, s, interleave=2, bs=8))[:8] for s in (seed, seed+1))
        table[place(a),place(b)] += 1
    e = table.sum(1)[:,None]*table.sum(0)[None]/table.sum()
    table,e = table[e.sum(1)>0][:,e.sum(0)>0],e[e.sum(1)>0][:,e.sum(0)>0]
    assert even(table, e, (len(table)-1)*(table.shape[1]-1))

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
    "Two of a batch meet again when their shards share a group again (one shard always does), and chance has them in one batch of it"
    z,S,bs = 500,100,50
    q = shuffle_quality(lambda seed: ShardPermutation([z]*S, seed, interleave, bs), z*S, bs, seed=2)
    same = (z-1)/(interleave*z-1)
    want = (same+(1-same)*(interleave-1)/(S-1))*(bs-1)/(interleave*z-1)
    assert q.again_pct==pytest.approx(100*want, rel=.1) and q.again==pytest.approx(want/((bs-1)/(z*S-1)), rel=.1)

def test_labels_as_predicted():
    "Sorted by class: a batch has the classes of `interleave` shards, so counts vary bs/interleave times as much, and a little as they do anyway"
    n,z = 1_000_000,1000
    got = [shuffle_quality(ShardPermutation([z]*(n//z), 3, interleave), n, labels=lambda i: i*50//n, batches=2000).labels for interleave in (1, 4, 16)]
    for v,interleave in zip(got, (1,4,16)): assert v==pytest.approx(64/interleave+1-1/interleave, rel=.1)
    mixed = Permutation(n, 1)
    assert shuffle_quality(ShardPermutation([z]*(n//z), 3, 1), n, labels=lambda i: mixed[i]*50//n, batches=2000).labels==pytest.approx(1, abs=.05)

def test_a_full_shuffle_is_as_good_as_one():
    n,starts = 50_000,np.arange(0, 50_001, 500)
    q = shuffle_quality(lambda seed: Permutation(n, seed+9), n, labels=lambda i: i//5000, starts=starts, batches=2000)
    for v in (q.near, q.labels, q.again): assert v==pytest.approx(1, abs=.1)
    assert q.span==pytest.approx(100*(1-.99**64), abs=.5) and abs(q.span-q.span_full)<.5
    assert repr(q).count('as often as')==2 and 'times' not in repr(q)

def test_a_share_of_a_full_shuffle_is_too():
    "A rank sees half: that is no reason to call its order worse"
    n = 20_000
    q = shuffle_quality(lambda seed: rank_share(Order(n, Permutation(n, seed+9)), 1, 2), n, batches=2000)
    assert q.near==pytest.approx(1, abs=.1) and q.again==pytest.approx(1, abs=.1)

def test_few_batches_without_replacement():
    "Of four batches that share out everything none can be far off"
    assert np.mean([shuffle_quality(Permutation(256, s), 256, labels=lambda i: i%2).labels for s in range(300)])==pytest.approx(1, abs=.1)

def test_again_from_a_part_of_two_long_epochs():
    n,G = 4_000_000,4000
    q = shuffle_quality(lambda seed: ShardPermutation([1000]*(n//1000), seed), n)
    assert q.again_pct==pytest.approx(100*999/(G-1)*63/G, rel=.15)

def test_quality_of_little():
    for sizes in ([1], [2], [1,1], [30], [70]):
        n = sum(sizes)
        q = shuffle_quality(lambda seed: ShardPermutation(sizes, seed), n, labels=lambda i: i*0, starts=np.cumsum([0,*sizes]))
        assert q.bs==min(n, 64) and q.labels==1 and 1<=q.span<=len(sizes) and repr(q)
        assert q._repr_png_()[:4]==b'\x89PNG'
    assert shuffle_quality(Permutation(100), 100, bs=1)._repr_png_()[:4]==b'\x89PNG'
    with pytest.raises(ValueError, match='empty'): shuffle_quality(ShardPermutation([]), 0)
    for bs in (0, -1):
        with pytest.raises(ValueError, match=f'bs={bs}'): shuffle_quality(Permutation(9), 9, bs=bs)

def test_quality_shows():
    n = 100_000
    q = shuffle_quality(ShardPermutation([1000]*100, 1, num_workers=2), n)
    assert q.again is None and q.labels is None and q.span is None and 'classes' not in repr(q).lower()
    l = shuffle_quality(ShardPermutation([1000]*100, 1), n, labels=lambda i: np.where(i<50_000, 7, -3))
    for o in (q, l): assert o._repr_png_()[:4]==b'\x89PNG' and len(o._repr_png_())<16_000 and [len(a.get_xlabel())>0 for a in o.plot().axes]==[True]*2

# Splits

@given(some_sizes, st.one_of(st.floats(0, 1), st.sampled_from([0, .1, .2, .5, 1, 1-2**-53])), seeds)
@examples(300)
def test_split(sizes, pct, seed):
    n,split = sum(sizes),ShardSplit(sizes, pct, seed)
    t,v = whole(split.train),whole(split.valid)
    assert np.array_equal(np.sort(np.concatenate([t, v])), np.arange(n)) and len(v)==len(split.valid)==int(pct*n)
    for m,got in ((split.train,t), (split.valid,v)):
        s = shard_of(sizes, got)
        assert (np.diff(s)>=0).all() and np.array_equal(np.bincount(s, minlength=len(sizes)), m.sizes) and got.dtype==np.int64
        o = SplitOrder(range(len(m)), m)
        assert list(o)==got.tolist() and list(pickle.loads(pickle.dumps(o)))==got.tolist() and all(o[i]==x for i,x in enumerate(got[:5].tolist()))
        with pytest.raises(IndexError): m[len(m)]
        assert sorted(whole(Order(len(m), ShardPermutation(m.sizes, seed), m)))==sorted(got.tolist()) or not len(m)
    assert (np.abs(split.valid.sizes-pct*np.asarray(sizes))<1+1e-6).all()
    assert pickle.loads(pickle.dumps(split))==split!=ShardSplit([*sizes,1], pct, seed)

@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=8), st.one_of(st.floats(0, 1), st.sampled_from([1-2**-53, 1-2**-50, 1/3])))
@example([536_870_916, 1, 1], 0.9999999906867743)   # rounding would take two of one
@examples(300)
def test_split_of_much(sizes, pct):
    "No shard gives more than it has, however floats are rounded"
    split = ShardSplit(sizes, pct)
    assert len(split.valid)==int(pct*sum(sizes)) and len(split.train)+len(split.valid)==sum(sizes)
    assert (split.train.sizes>=0).all() and (split.valid.sizes>=0).all() and np.array_equal(split.train.sizes+split.valid.sizes, sizes)

def test_split_of_a_large_shard():
    "The largest there may be: no number is too large to be multiplied"
    split,at = ShardSplit([3,2**31], .5, 1),np.arange(0, 2**30, 10**6)
    v,t = split.valid[at],split.train[at]
    assert len(np.unique(np.concatenate([v, t])))==2*len(at) and min(v.min(), t.min())>=0 and max(v.max(), t.max())<2**31+3

@pytest.mark.parametrize('z', [60, 100, 210, 1000, 1024, 2310, 10_000, 30_030, 99_991])
@pytest.mark.parametrize('pct', [.1, .2, .35])
def test_split_spreads(z, pct):
    "Each tenth of a shard gives its share, more evenly than by lot; and over seeds each sample is as likely as the next"
    S = 200 if z<20_000 else 40
    v = whole(split:=ShardSplit([z]*S, pct, 3).valid)
    c,k,w = np.zeros((S, 10)),split.sizes[:,None],np.bincount(np.arange(z)*10//z)/z
    np.add.at(c, (v//z, v%z*10//z), 1)
    assert ((c-k*w)**2).mean()<.7*(k*w*(1-w)*(z-k)/(z-1)).mean()
    assert (np.abs(c-k*w)<np.maximum(3, .6*k*w)).all()

def test_split_is_fair():
    "Over shards and seeds each place is taken equally often, and seeds differ"
    for z in (7, 16, 100):
        u = sum(np.bincount(whole(ShardSplit([z]*300, 1/z+1e-9, seed).valid)%z, minlength=z) for seed in range(50))
        assert even(u, u.sum()/z, z-1)
    a,b = (set(whole(ShardSplit([1000]*100, .2, seed).valid).tolist()) for seed in (1,2))
    assert len(a&b)/len(a)==pytest.approx(.2, abs=.05)

@given(some_sizes, st.data())
@examples(100)
def test_sizes_of(sizes, data):
    n = sum(sizes)
    a = data.draw(st.integers(0, n)); b = data.draw(st.integers(a, n))
    got = sizes_of(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), a, b)
    assert np.array_equal(got, np.bincount(shard_of(sizes, np.arange(a, b)), minlength=len(sizes)))

def test_folds_that_are_not_there_are_refused():
    for n_folds,fold in ((2,2), (2,-1), (1,0), (0,0)):
        with pytest.raises(ValueError, match='n_folds'): ShardFolds([10,10], n_folds, fold)

def test_sizes_that_are_no_integers_are_refused():
    with pytest.raises(ValueError, match='integers'): ShardPermutation([2.5,3])
    assert len(ShardPermutation([]))==0
