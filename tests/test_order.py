"Orders: a bijection for every n, the same everywhere, well mixed, shared without gaps"
import pickle, subprocess, sys

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

@given(st.integers(0, 20_000), seeds)
@examples(150)
def test_bijection(n, seed): assert np.array_equal(np.sort(Permutation(n, seed)[np.arange(n)]), np.arange(n))

@given(st.integers(1, 2**40), seeds, st.data())
@examples(150)
def test_large_n_is_injective_and_inside(n, seed, data):
    "A bijection cannot be listed at 2**40; distinct positions must give distinct numbers within range"
    p,at = Permutation(n, seed),np.unique(data.draw(st.lists(st.integers(0, n-1), min_size=1, max_size=300)))
    out = p[at]
    assert len(np.unique(out))==len(at) and out.min()>=0 and out.max()<n and out.dtype==np.int64
    assert [p[int(i)] for i in at[:20]]==out[:20].tolist()

@pytest.mark.parametrize('n', [4097, 8191, 8192, 8193, 65_536, 99_991, 1_000_003])
def test_bijection_around_powers_of_two(n): assert np.array_equal(np.sort(Permutation(n, 7)[np.arange(n)]), np.arange(n))

def test_bad_n():
    for n in (-1, 2**40+1):
        with pytest.raises(ValueError): Permutation(n)
    for i in (-1, 10_000):
        with pytest.raises(IndexError): Permutation(10_000, 1)[i]

@pytest.mark.parametrize('make', [lambda: Permutation(10), lambda: Permutation(5000), lambda: BlockPermutation(500, 7, parts=[100,400]),
    lambda: LongestFirst(np.arange(9), 9), lambda: SortedWindows(Permutation(90), 90, np.arange(90), 8), lambda: SampleSelection([np.arange(5000)%7==3]),
    lambda: ShardPermutation([50,60])], ids=['table','computed','blocks','longest','sorted','selection','shards'])
def test_positions_outside_are_an_error(make):
    order = make()
    n = len(order)
    for i in (-1, -n, n, n+1000, 2*n, 8192, 2**63):
        with pytest.raises(IndexError, match=r'not in \[0, '): order[i]
    for i in ([-1], [0,n], [n+1000], [9000], np.array([2**64-1], np.uint64), np.array([-2**63])):
        with pytest.raises(IndexError, match=r'not all in \[0, '): order[i]
    with pytest.raises(TypeError, match='must be integers'): order[[.5]]
    assert order[[]].tolist()==[] and order[[n-1,0]].tolist()==[order[n-1],order[np.uint8(0)]]

def test_same_in_another_process():
    code = 'from fastai_remote.order.permutation import Permutation; import numpy as np; print(Permutation(10**9, 5)[np.arange(5)].tolist())'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.strip()==str(Permutation(10**9, 5)[np.arange(5)].tolist())

def test_frozen():
    "Orders are part of what a seed means: these numbers must never change"
    assert Permutation(10**6, 42)[np.arange(6)].tolist()==[11709, 872599, 11190, 953755, 828414, 269827]

@pytest.mark.parametrize('n', [5000, 50_000, 1_000_000])
def test_mixing(n):
    "As a true shuffle: where numbers go, how neighbours part, how seeds differ"
    k,bins,seeds = min(n//5, 5000),20,40
    cells = np.zeros((bins, bins))
    for seed in range(seeds):
        pos = np.random.default_rng(seed).permutation(n)[:k]
        np.add.at(cells, (pos*bins//n, Permutation(n, seed)[pos]*bins//n), 1)
    e,k = seeds*k/bins**2,20_000
    chi = ((cells-e)**2/e).sum()
    dof = bins**2-1
    assert abs(chi-dof)<6*np.sqrt(2*dof), chi
    p = Permutation(n, 3)[np.arange(min(n, k))].astype(float)
    assert abs(np.corrcoef(p[:-1], p[1:])[0,1])<5/np.sqrt(len(p))
    step = np.diff(p)
    assert (step==1).mean()<10/n+1e-3
    a,b = (Permutation(n, s)[np.arange(min(n, k))] for s in (1,2))
    assert (a==b).mean()<10/n+1e-3 and abs(np.corrcoef(a, b)[0,1])<5/np.sqrt(len(a))

@given(st.integers(0, 3000), st.integers(1, 20), st.lists(st.integers(0, 3000), max_size=4), seeds)
@examples(200)
@example(1393, 3, [366, 504], 3)   # the last window has one number, which rounding gave to two parts
def test_blocks_with_parts_are_a_bijection(n, block, cuts, seed):
    parts = np.diff([0, *sorted(min(c, n) for c in cuts), n]).tolist()
    assert np.array_equal(np.sort(BlockPermutation(n, block, seed, parts)[np.arange(n)]), np.arange(n))

def test_constant_memory():
    assert len(pickle.dumps(Order(50_000_000, Permutation(50_000_000, 1))))<300 and len(pickle.dumps(SplitOrder(range(10, 50_000_000), Permutation(50_000_000, 1))))<300

@given(st.integers(0, 300), st.data())
@examples(200)
def test_views_are_what_lists_would_be(n, data):
    o,l = Order(n, Permutation(n, 1)),Permutation(n, 1)[np.arange(n)].tolist()
    sl = data.draw(st.slices(n))
    v,w = o[sl],l[sl]
    assert list(v)==w and len(v)==len(w)
    if w:
        i = data.draw(st.integers(-len(w), len(w)-1))
        assert v[i]==w[i] and type(v[i]) is int
        at = data.draw(st.lists(st.integers(-len(w), len(w)-1)))
        assert v[at].tolist()==[w[j] for j in at]
        assert list(v[Order(len(w), Permutation(len(w), 2))])==[w[j] for j in Permutation(len(w), 2)[np.arange(len(w))]]
    assert np.array(v).tolist()==w and list(pickle.loads(pickle.dumps(v)))==w

@given(st.integers(0, 500), st.integers(1, 9), st.integers(1, 7), st.integers(1, 40), st.booleans())
@examples(200)
def test_shares(n, world, workers, bs, consecutive):
    "Ranks and workers together visit everything; only what evens out the ranks is visited twice"
    order = Order(n, Permutation(n, 3))
    ranks = [rank_share(order, r, world, consecutive) for r in range(world)]
    assert len({len(r) for r in ranks})==1
    got = [[i for w in range(workers) for b in worker_batches(r, bs, w, workers) for i in b.tolist()] for r in ranks]
    assert all(sorted(g)==sorted(r) for g,r in zip(got, ranks))
    flat = [i for g in got for i in g]
    assert set(flat)==set(range(n)) and len(flat)-n<world

@given(st.integers(1, 300), st.integers(1, 9))
@examples(100)
def test_consecutive_shares_are_those_of_fastai(n, world):
    "`DistributedDL` repeats the indices until they can be divided, and gives each rank a slice"
    order = Order(n, Permutation(n, 3))
    length = -(-n//world)
    repeated = (list(order)*world)[:length*world]
    for rank in range(world):
        assert list(rank_share(order, rank, world, consecutive=True))==repeated[rank*length:(rank+1)*length]

@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 40), st.integers(1, 4))
@examples(200)
def test_batches_of_all_ranks_in_turn_have_the_order_of_the_epoch(n, world, bs, workers):
    "as `get_preds` gathers them: batch 0 of each rank, then batch 1. What comes twice is at the end"
    order = Order(n, Permutation(n, 3))
    def batches(rank):
        share = rank_share(order, rank, world, consecutive=True, bs=bs)
        each = [[b.tolist() for b in worker_batches(share, bs, w, workers)] for w in range(workers)]
        return [each[k%workers][k//workers] for k in range(sum(map(len, each)))]   # as torch's loader takes turns
    ranks = [batches(rank) for rank in range(world)]
    assert len({tuple(map(len, b)) for b in ranks})==1
    gathered = [i for turn in zip(*ranks) for batch in turn for i in batch]
    assert gathered[:n]==list(order) and len(gathered)-n<world
    assert len(gathered)-n<=sum(len(b[-1]) for b in ranks)   # all in the last turn

def test_ranks_draw_as_many_as_one_with_weights():
    labels = np.arange(1000)%10
    order = WeightedOrder(1000, lambda numbers: labels[numbers], [1]*9+[9], 3)
    shares = [rank_share(order, rank, 3) for rank in range(3)]
    assert [len(share) for share in shares]==[334]*3
    assert [shares[k%3][k//3] for k in range(1000)]==list(order)

def test_batches_are_the_same_however_many_are_computed_at_once():
    "Those of a batch at a time"
    for n,bs,workers in ((5000,64,2), (1025,7,3), (70,64,1), (3,64,4), (0,64,2), (9000,2000,2)):
        o = Order(n, Permutation(n, 3))
        for w in range(workers):
            want = [o.numbers_at(range(b, min(b+bs, n))).tolist() for b in range(w*bs, n, workers*bs)]
            assert [b.tolist() for b in worker_batches(o, bs, w, workers)]==want

def test_a_split_of_more_items_than_there_are_is_an_error():
    "and never the samples of another split"
    train = Order(range(10, 20))
    for split in (SplitOrder(range(8, 12)), Order(12), Order(1, np.array([-1])), Order(20)[8:12]):
        for read in (list, lambda o: o[[0,-1]], lambda o: (o[0], o[-1])):
            with pytest.raises(IndexError, match='there are 10'): read(train[split])
    for last in (np.arange(10), range(10)):
        for read in (list, lambda o: o[0]):
            with pytest.raises(IndexError, match='there are 10'): read(Order(1, np.array([-1]), last))
    assert list(train[SplitOrder(range(8, 10))])==[18, 19]

def test_positions_that_are_no_list_are_refused():
    for i in ({1,2}, {1:2}, iter([1])):
        with pytest.raises(TypeError, match=f'the {type(i).__name__}'): Order(10)[i]
    for i in (1.5, 'a', None, {1}):
        with pytest.raises(TypeError, match=f'the {type(i).__name__}'): Permutation(10)[i]
    assert Permutation(10)[np.array(3)]==Permutation(10)[3]

def test_a_rank_that_is_not_there_is_an_error():
    for order in (Order(10), WeightedOrder(10, lambda numbers: numbers, np.ones(10)), Order(10, ShardPermutation([10]))):
        for rank,world in ((2,2), (-1,2), (1,1), (0,0)):
            with pytest.raises(ValueError, match=f'rank {rank} of {world}'): rank_share(order, rank, world)

def test_a_share_of_weighted_draws_is_not_shared_again():
    order = WeightedOrder(20, lambda numbers: numbers%2, [1,2], 3)
    with pytest.raises(ValueError, match='cannot be shared again'): rank_share(rank_share(order, 1, 2), 0, 2)

def test_weights_and_labels_that_do_not_fit_are_errors():
    for weights in ([1,np.inf], [1,np.nan], [-1,2], [0,0], []):
        with pytest.raises(ValueError, match='weights'): WeightedOrder(10, lambda numbers: numbers%2, weights)
    for code in (-1, 2):
        with pytest.raises(ValueError, match=f'label code {code}.*2 weights'):
            list(WeightedOrder(10, lambda numbers: np.full(len(numbers), code), [1,1]))

def test_parts_that_are_not_all_numbers_are_refused():
    for parts in ([3,4], [30,4], [-1,11]):
        with pytest.raises(ValueError, match='parts'): BlockPermutation(10, 2, parts=parts)
    for bad in (dict(block=0), dict(block=2, interleave=0), dict(block=2, n=1<<32, parts=[1<<31,1<<31])):
        with pytest.raises(ValueError): BlockPermutation(**{'n':10, **bad})
    assert len(BlockPermutation(1<<32, 1<<20)[[0, (1<<32)-1]])==2

def test_the_longest_sample_is_in_one_share_only():
    "a share of a rank need not have the sample that comes first in the whole order"
    perm = ShardPermutation([20]*5, 1, 2, 4)
    order = Order(100, SortedWindows(perm, 100, np.arange(100)[::-1].copy(), 4, longest=0))
    assert order[0]==0 and sorted(i for rank in range(2) for i in rank_share(order, rank, 2))==list(range(100))
    with pytest.raises(ValueError, match='lanes'): SortedWindows(perm, 100, np.arange(100), 4, lanes=2, longest=99)

@pytest.mark.parametrize('seed', [-1, 1.5, '7', None])
def test_a_wrong_seed_is_refused(seed):
    "1.5 and '7' were 1 and 7"
    for make in (lambda: Permutation(10, seed), lambda: BlockPermutation(10, 2, seed),
                 lambda: ShardPermutation([4,6], seed), lambda: ShardSplit([4,6], .2, seed),
                 lambda: ShardFolds([4,6], 2, 0, seed)):
        with pytest.raises(ValueError, match='seed is an integer of at least 0, not '): make()
