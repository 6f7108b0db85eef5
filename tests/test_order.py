"Orders: a bijection for every n, the same everywhere, well mixed, shared without gaps"
import pickle

import numpy as np
import pytest
from conftest import examples
from hypothesis import example, given, strategies as st

from fastai_remote.load.items import SampleSelection
from fastai_remote.order.base import Order, SplitOrder, WeightedOrder
from fastai_remote.order.lengths import LongestFirst, SortedWindows
from fastai_remote.order.permutation import BlockPermutation, Permutation
from fastai_remote.order.ranks import rank_share, worker_batches
from fastai_remote.order.shards import ShardFolds, ShardPermutation, ShardSplit

seeds = st.integers(0, 2**63)
def whole(m): return m[np.arange(len(m))]
def shuffled(n, seed=3): return Order(n, Permutation(n, seed))

# --- permutations

@given(st.integers(0, 20_000), seeds)
@example(4097, 7)
@example(8192, 7)
@example(1_000_003, 7)
@examples(100)
def test_a_permutation_is_a_bijection(n, seed):
    assert np.array_equal(np.sort(whole(Permutation(n, seed))), np.arange(n))

@given(st.integers(1, 2**40), seeds, st.data())
@examples(100)
def test_large_n_is_injective_and_inside(n, seed, data):
    "A bijection cannot be listed at 2**40; distinct positions must give distinct numbers within range"
    p,at = Permutation(n, seed),np.unique(data.draw(st.lists(st.integers(0, n-1), min_size=1, max_size=300)))
    out = p[at]
    assert len(np.unique(out))==len(at) and out.min()>=0 and out.max()<n and out.dtype==np.int64
    assert [p[int(i)] for i in at[:20]]==out[:20].tolist()

@given(st.integers(0, 3000), st.integers(1, 20), st.lists(st.integers(0, 3000), max_size=4), seeds)
@examples(100)
@example(1393, 3, [366, 504], 3)   # the last window has one number, which rounding gave to two parts
def test_blocks_with_parts_are_a_bijection(n, block, cuts, seed):
    parts = np.diff([0, *sorted(min(c, n) for c in cuts), n]).tolist()
    assert np.array_equal(np.sort(whole(BlockPermutation(n, block, seed, parts))), np.arange(n))
    assert len(BlockPermutation(1<<32, 1<<20)[[0, (1<<32)-1]])==2

def test_the_numbers_of_a_seed_never_change():
    "Orders are part of what a seed means"
    assert Permutation(10**6, 42)[np.arange(6)].tolist()==[11709, 872599, 11190, 953755, 828414, 269827]

@pytest.mark.parametrize('n', [5000, 50_000, 1_000_000])
def test_mixing_is_that_of_a_true_shuffle(n):
    "Where numbers go. How neighbours part and how seeds differ is tested in `test_shuffle_quality.py`"
    k,bins,seeds = min(n//5, 5000),20,40
    cells = np.zeros((bins, bins))
    for seed in range(seeds):
        pos = np.random.default_rng(seed).choice(n, k, replace=False)
        np.add.at(cells, (pos*bins//n, Permutation(n, seed)[pos]*bins//n), 1)
    e,dof = seeds*k/bins**2,bins**2-1
    assert abs(((cells-e)**2/e).sum()-dof)<6*np.sqrt(2*dof)

def test_pickles_do_not_grow_with_n():
    n = 50_000_000
    for order in Order(n, Permutation(n, 1)), SplitOrder(range(10, n), Permutation(n, 1)):
        assert len(pickle.dumps(order))<300

# --- positions

@pytest.mark.slow
@given(st.integers(0, 300), st.data())
@examples(200)
def test_views_are_what_lists_would_be(n, data):
    o,l = shuffled(n),whole(Permutation(n, 3)).tolist()
    part = data.draw(st.slices(n))
    v,w = o[part],l[part]
    assert list(v)==w and len(v)==len(w)
    if w:
        i,at = (data.draw(st.integers(-len(w), len(w)-1)) for _ in range(2))
        assert v[i]==w[i] and type(v[i]) is int and v[[i,at]].tolist()==[w[i],w[at]]
        assert list(v[shuffled(len(w))])==[w[j] for j in whole(Permutation(len(w), 3))]
    assert np.array(v).tolist()==w and list(pickle.loads(pickle.dumps(v)))==w and v[[]].tolist()==[]

@pytest.mark.parametrize('make', [
    lambda: Permutation(10), lambda: Permutation(5000), lambda: BlockPermutation(500, 7, parts=[100,400]),
    lambda: LongestFirst(np.arange(9), 9), lambda: SortedWindows(Permutation(90), 90, np.arange(90), 8),
    lambda: SampleSelection([np.arange(5000)%7==3]), lambda: ShardPermutation([50,60])],
    ids=['table','computed','blocks','longest','sorted','selection','shards'])
def test_positions_outside_are_an_error(make):
    order = make()
    n = len(order)
    for i in (-1, n, 8192, 2**63):
        with pytest.raises(IndexError, match=r'not in \[0, '): order[i]
    for i in ([-1], [0,n], [9000], np.array([2**64-1], np.uint64)):
        with pytest.raises(IndexError, match=r'not all in \[0, '): order[i]
    with pytest.raises(TypeError, match='must be integers'): order[[.5]]
    assert order[[]].tolist()==[] and order[[n-1,0]].tolist()==[order[n-1],order[np.uint8(0)]]

def test_positions_that_are_no_list_are_refused():
    for order,wrong in (Order(10), {1,2}), (Order(10), {1:2}), (Permutation(10), 1.5), (Permutation(10), None):
        with pytest.raises(TypeError, match=f'the {type(wrong).__name__}'): order[wrong]

def test_a_split_of_more_items_than_there_are_is_an_error():
    "And never the samples of another split"
    train,before = Order(range(10, 20)),np.array([-1])
    for split in SplitOrder(range(8, 12)), Order(12), Order(1, before), Order(20)[8:12]:
        for read in list, lambda o: o[[0,-1]], lambda o: (o[0], o[-1]):
            with pytest.raises(IndexError, match='there are 10'): read(train[split])
    for last in np.arange(10), range(10):
        for read in list, lambda o: o[0]:
            with pytest.raises(IndexError, match='there are 10'): read(Order(1, before, last))
    assert list(train[SplitOrder(range(8, 10))])==[18, 19]

# --- shares of ranks and workers

@pytest.mark.slow
@given(st.integers(0, 400), st.integers(1, 9), st.integers(1, 7), st.integers(1, 40),
       st.sampled_from(['in turn','consecutive','by batches']))
@examples(250)
def test_shares_contain_every_position(n, world, workers, bs, kind):
    "Only what evens out the ranks is visited twice. Consecutive shares are those of fastai's `DistributedDL`"
    order,options = shuffled(n),dict(consecutive=kind!='in turn', bs=bs if kind=='by batches' else None)
    ranks,length = [rank_share(order, rank, world, **options) for rank in range(world)],-(-n//world)
    assert [len(rank) for rank in ranks]==[length]*world
    each = [[[b.tolist() for b in worker_batches(rank, bs, w, workers)] for w in range(workers)] for rank in ranks]
    for rank,by_worker in zip(ranks, each): assert sorted(i for w in by_worker for b in w for i in b)==sorted(rank)
    all_positions = [i for rank in ranks for i in rank]
    assert set(all_positions)==set(range(n)) and len(all_positions)-n<world
    if kind=='consecutive':
        repeated = (list(order)*world)[:length*world]
        assert all_positions==repeated
    # the batches of all ranks in turn, as `get_preds` gathers them, have the order of the epoch
    if kind=='by batches':
        in_turn = [[w[k%workers][k//workers] for k in range(-(-length//bs))] for w in each]   # as torch's loader does
        assert len({tuple(map(len, rank)) for rank in in_turn})==1
        gathered = [i for turn in zip(*in_turn) for batch in turn for i in batch]
        assert gathered[:n]==list(order) and len(gathered)-n<=sum(len(rank[-1]) for rank in in_turn if rank)

@pytest.mark.parametrize('n,bs,workers', [(5000,64,2), (1025,7,3), (3,64,4), (9000,2000,2)])
def test_batches_are_the_same_however_many_are_computed_at_once(n, bs, workers):
    order = shuffled(n)
    for w in range(workers):
        want = [order.numbers_at(range(b, min(b+bs, n))).tolist() for b in range(w*bs, n, workers*bs)]
        assert [b.tolist() for b in worker_batches(order, bs, w, workers)]==want

def test_ranks_draw_as_many_as_one_with_weights():
    labels = np.arange(1000)%10
    order = WeightedOrder(1000, lambda numbers: labels[numbers], [1]*9+[9], 3)
    shares = [rank_share(order, rank, 3) for rank in range(3)]
    assert [len(share) for share in shares]==[334]*3 and [shares[k%3][k//3] for k in range(1000)]==list(order)
    with pytest.raises(ValueError, match='cannot be shared again'): rank_share(shares[1], 0, 2)

def test_the_longest_sample_is_in_one_share_only():
    "A share of a rank need not have the sample that comes first in the whole order"
    perm = ShardPermutation([20]*5, 1, 2, 4)
    order = Order(100, SortedWindows(perm, 100, np.arange(100)[::-1].copy(), 4, longest=0))
    assert order[0]==0 and sorted(i for rank in range(2) for i in rank_share(order, rank, 2))==list(range(100))
    with pytest.raises(ValueError, match='lanes'): SortedWindows(perm, 100, np.arange(100), 4, lanes=2, longest=99)

@pytest.mark.parametrize('rank,world', [(2,2), (-1,2), (1,1), (0,0)])
def test_a_rank_that_is_not_there_is_an_error(rank, world):
    for order in Order(10), WeightedOrder(10, lambda numbers: numbers, np.ones(10)), Order(10, ShardPermutation([10])):
        with pytest.raises(ValueError, match=f'rank {rank} of {world}'): rank_share(order, rank, world)

# --- arguments

@pytest.mark.parametrize('make,message', [
    *((lambda n=n: Permutation(n), r'n must lie in 0\.\.2\*\*40, not') for n in (-1, 2**40+1)),
    *((lambda parts=parts: BlockPermutation(10, 2, parts=parts), 'parts') for parts in ([3,4], [-1,11])),
    (lambda: BlockPermutation(10, 0), 'want block=0'), (lambda: BlockPermutation(10, 2, interleave=0), 'interleave=0'),
    (lambda: BlockPermutation(1<<32, 2, parts=[1<<31,1<<31]), 'too many to divide into parts'),
    *((lambda weights=weights: WeightedOrder(10, lambda numbers: numbers%2, weights), 'weights')
      for weights in ([1,np.inf], [1,np.nan], [-1,2], [0,0], [])),
    *((lambda code=code: list(WeightedOrder(10, lambda numbers: np.full(len(numbers), code), [1,1])),
       f'label code {code}.*2 weights') for code in (-1, 2)),
    *((lambda make=make: make(1.5), 'seed is an integer of at least 0, not 1.5')
      for make in (lambda seed: Permutation(10, seed), lambda seed: BlockPermutation(10, 2, seed),
                   lambda seed: ShardPermutation([4,6], seed), lambda seed: ShardSplit([4,6], .2, seed),
                   lambda seed: ShardFolds([4,6], 2, 0, seed))),
    *((lambda seed=seed: Permutation(10, seed), 'seed is an integer') for seed in (-1, '7', None))])
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message): make()
