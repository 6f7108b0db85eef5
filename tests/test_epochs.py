"""Epochs of `RemoteDataset`: every sample once over all ranks and workers, in orders that depend on seed and epoch only

Most of it is tested in this process, which reads the shares of all processes in turn."""
import copy, os, pickle, random, warnings
from collections import Counter
from multiprocessing import context

import numpy as np
import pytest
import torch
from conftest import examples, fails
from hypothesis import given, strategies as st
from interpreters import start_fork
from torch.utils.data import DataLoader

from fastai_remote import MemoryStore, mix, RemoteDataset, ShardStore, to_shards
from fastai_remote.load.epochs import Consumer, EpochIterator
from fastai_remote.load.mix import RoundRobin

N = 60   # in shards of 7
KINDS = 'batches','batched','stream'

def sample(i): return {'txt':f'{i}', 'cls':i%3}

@pytest.fixture(scope='module')
def datasets(tmp_path_factory):
    folder = tmp_path_factory.mktemp('shards')
    to_shards(list(range(N)), folder, sample, num_workers=1, maxcount=7, shuffle=False, progress=False)
    memory = MemoryStore({'txt':[f'{i}'.encode() for i in range(N)], 'cls':np.arange(N, dtype=np.uint8)%3}, 'mem')
    stores = {'shards':ShardStore(folder), 'memory':memory}
    return {name:RemoteDataset(o).decode().to_tuple('txt', 'cls').map_tuple(int, None) for name,o in stores.items()}

@pytest.fixture
def ds(datasets): return datasets['shards']

@pytest.fixture
def as_rank(monkeypatch):
    "Sets the environment that torchrun makes"
    def set_rank(rank, world_size):
        monkeypatch.setenv('RANK', str(rank))
        monkeypatch.setenv('WORLD_SIZE', str(world_size))
    return set_rank

def source(ds, kind, **options):
    if kind=='batches': return ds.batches(8, **options)
    return ds.batched(8, **options) if kind=='batched' else ds.stream(shuffle=True, **options)

def loader(source, workers=0, **options):
    is_sampler = hasattr(source, 'sampler')
    if is_sampler: source.num_workers = max(workers, 1)
    given = dict(dataset=source.ds, batch_sampler=source) if is_sampler else dict(dataset=source, batch_size=None)
    return DataLoader(**given, num_workers=workers, **options)

def numbers(results):
    "The numbers of samples, which come in batches or one by one; their labels must be theirs"
    pairs = [pair for columns in results for pair in zip(*(np.atleast_1d(column).tolist() for column in columns))]
    assert all(label==i%3 for i,label in pairs)
    return [i for i,_ in pairs]

def read(source, workers=0, **options): return numbers(loader(source, workers, **options))
def identity(x): return x
def third(sample): return sample[1]==0

# --- every sample once

def batches_of_rank(ds, kind, bs, seed, workers, **options):
    "Lists of the samples of all batches of a rank, and their number as `len` says it"
    if kind=='batches':
        made = ds.batches(bs, num_workers=workers, seed=seed, **options)
        return [ds.__getitems__(positions) for positions in made],len(made)
    made = ds.batched(bs, None, **options)
    ranks = options['rank'],options['world_size']
    consumers = [Consumer(*ranks, worker, workers) for worker in range(workers)]
    return [batch for consumer in consumers for batch in made.results((seed,), consumer, 0)],len(made)

@pytest.mark.slow
@given(st.sampled_from(['memory','shards']), st.sampled_from(['batches','batched']), st.slices(N), st.integers(1, 4),
       st.integers(1, 3), st.integers(1, 20), st.integers(0, 2**62), st.fixed_dictionaries(dict(
           shuffle=st.booleans(), drop_last=st.booleans(), interleave=st.sampled_from([None,1,4]))))
@examples(120)
def test_batches_of_all_processes_contain_every_sample_once(datasets, store, kind, part, world, workers, bs, seed,
                                                            options):
    "Ranks have equally many; what evens them out comes twice, and only the last batch is short or left out"
    ds = datasets[store][part]
    share,epoch = -(-len(ds)//world),[]
    for rank in range(world):
        batches,length = batches_of_rank(ds, kind, bs, seed, workers, rank=rank, world_size=world, **options)
        sizes = sorted(map(len, batches), reverse=True)
        whole,rest = divmod(share, bs)
        assert sizes==[bs]*whole+[rest]*(rest>0 and not options['drop_last']) and length==len(sizes)
        epoch += [numbers([sample])[0] for batch in batches for sample in batch]
    times,expected = Counter(epoch),range(N)[part]
    if world==1: assert max(times.values(), default=1)==1
    assert times.keys()<=set(expected)
    if not options['drop_last']: assert times.keys()==set(expected) and len(epoch)==share*world
    if not options['shuffle'] and world==workers==1: assert epoch==list(expected)[:len(epoch)]

# of a part and the rest of the dataset: a stream, the number of its samples, and how often one comes at most
STREAMS = {
    'in order': lambda part, rest: (part.stream(), len(part), 1),
    'shuffled': lambda part, rest: (part.shuffle(100), len(part), 1),
    'select': lambda part, rest: (part.select(third).shuffle(interleave=1), sum(map(third, part)), 1),
    'buffer': lambda part, rest: (part.shuffle().listed(5).unlisted().shuffle(50), len(part), 1),
    'slice': lambda part, rest: (part.shuffle().slice(1, 40, 2), len(range(len(part))[1:40:2]), 1),
    'batches': lambda part, rest: (part.shuffle().select(bool).batched(16).unbatched(), len(part), 1),
    'mix': lambda part, rest: (mix([part.shuffle(), rest]), N, 1),
    'parts in turn': lambda part, rest: (RoundRobin([part.shuffle(), rest], longest=True), N, 1),
    'repeat': lambda part, rest: (part.shuffle().repeat(3), 3*len(part), 3),
    'repeat up to a number': lambda part, rest: (part.repeat(2, 2*N), 2*len(part), 2)}

def shares(stream, world=1, workers=1, key=(3,1)):
    "Numbers of the samples of each worker of each rank"
    consumers = [[Consumer(rank, world, worker, workers) for worker in range(workers)] for rank in range(world)]
    return [[numbers(sample for _,sample in stream.start(key, consumer)) for consumer in rank] for rank in consumers]

def flat(lists): return [number for rank in lists for worker in rank for number in worker]

@pytest.mark.slow
@given(st.sampled_from(['memory','shards']), st.sampled_from(sorted(STREAMS)), st.integers(0, N), st.integers(1, 3),
       st.integers(1, 4), st.integers(0, 2**62))
@examples(150)
def test_streams_of_all_processes_contain_every_sample_once(datasets, store, kind, size, world, workers, seed):
    "Ranks differ by one at most, and have as many as `len` says"
    ds = datasets[store]
    stream,length,at_most = STREAMS[kind](ds[:size], ds[size:])
    epoch = shares(stream, world, workers, (seed,1))
    times = Counter(flat(epoch))
    assert sum(times.values())==length and set(times.values())<={at_most}
    if kind not in ('mix','parts in turn'): assert times.keys()<=set(range(size))
    per_rank = [sum(map(len, rank)) for rank in epoch]
    apart = {'select':size, 'mix':2, 'parts in turn':2, 'repeat':3, 'repeat up to a number':2}.get(kind, 1)
    assert max(per_rank)-min(per_rank)<=apart
    if kind!='select': assert [stream.count(rank, world) for rank in range(world)] in (per_rank, [None]*world)

@pytest.mark.slow
@pytest.mark.parametrize('kind,workers', [
    *((kind, 0) for kind in (*KINDS,'mix','buffer')),
    *(pytest.param(kind, 2, marks=pytest.mark.slow) for kind in ('batches','batched','mix'))])
@pytest.mark.filterwarnings('error::UserWarning', 'ignore:This DataLoader will create')
def test_workers_of_a_loader_read_every_epoch_in_its_own_order(ds, kind, workers):
    "Of the seed and `set_epoch`, or else of torch's generator; also persistent workers, whatever was read before"
    def make(**options):
        if kind=='mix': return mix([ds[:25].shuffle(), ds[25:].shuffle()], **options)
        if kind=='buffer': return ds.compose(identity).shuffle(20, **options)
        return source(ds, kind, **options)
    def epochs(made, kept=workers>0):
        dl = loader(made, workers, persistent_workers=kept)
        for epoch in (0,1,0):
            if made.seed is None: next(iter(made))
            else: made.set_epoch(epoch)
            yield numbers(dl)
    a,b,c = epochs(make(seed=1))
    assert a==c!=b and sorted(a)==sorted(b)==list(range(N))
    assert a==read(make(seed=1), workers)!=read(make(seed=2), workers)
    orders = [*epochs(make())]
    assert len(set(map(tuple, orders)))==3 and all(sorted(order)==list(range(N)) for order in orders)
    torch.manual_seed(1)
    first = read(make(), workers)
    torch.manual_seed(1)
    assert read(make(), workers)==first!=read(make(), workers)

@pytest.mark.slow
def test_a_worker_of_a_forkserver_gets_lambda_functions(ds):
    "One that is forked, or spawned, reads an epoch in other tests of this file"
    add = 0
    stream = ds.shuffle(seed=1, interleave=2).map(lambda sample: (sample[0]+add, sample[1])).listed(4).unlisted()
    assert sorted(read(stream, 1, multiprocessing_context='forkserver'))==list(range(N))

# --- lengths

def test_lengths(ds):
    assert [len(ds.stream(rank=rank, world_size=7)) for rank in range(7)]==[9]*4+[8]*3
    assert [ds.with_epoch(10).count(rank, 3) for rank in range(3)]==[4,3,3]
    assert len(ds.batched(16).repeat(2))==8==len(list(ds.batched(16).repeat(2)))
    assert len(DataLoader(ds.shuffle(), batch_size=16))==4 and len(ds.repeat(-1, 999))==999
    for unknown in ds.map(identity).shuffle(), ds.select(bool), ds.rsample(), ds.repeat(), ds.repeat(1, N-1):
        with pytest.raises(TypeError, match='not known'): len(unknown)

@pytest.mark.parametrize('size,at_most', [(40,1), (150,4)])
@pytest.mark.parametrize('workers', [1,3])
def test_with_epoch_is_divided(ds, workers, size, at_most):
    "So many results of all ranks and workers together, in passes with orders of their own"
    epoch = shares(ds.shuffle().with_epoch(size), 2, workers)
    assert [sum(map(len, rank)) for rank in epoch]==[size//2]*2
    counts = Counter(flat(epoch))
    assert len(counts)==min(size, N) and max(counts.values())<=at_most

def test_a_repeat_has_another_order_in_each_pass(ds):
    one = read(ds.shuffle(rng=random.Random(4)).repeat(2))
    assert one[:N]!=one[N:] and sorted(one[:N])==sorted(one[N:])==list(range(N))
    assert read(ds.shuffle(rng=random.Random(4)))==one[:N]!=read(ds.shuffle(rng=random.Random(5)))

def test_fewer_samples_than_processes(ds):
    for made in ds[:1].stream(), ds[:1].batched(4).unbatched(): assert flat(shares(made, 1, 2))==[0]
    assert flat(shares(ds[:0].shuffle(), 2, 2))==[]==list(ds[:0].stream())==list(ds[:0].repeat(2))
    assert len(ds[:0])==0 and not any(list(loader(source(ds[:0], kind))) for kind in KINDS)
    with pytest.raises(ValueError, match='nothing to repeat for worker 1'): shares(ds[:1].with_epoch(10), 1, 2)
    for empty in ds[:0].with_epoch(3), ds.select(lambda sample: False).with_epoch(3):
        with pytest.raises(ValueError, match='nothing to repeat'): list(empty)

def test_a_slice_of_what_is_left_needs_one_process(ds):
    some = ds.select(third).slice(5)
    assert read(some)==read(some, 1)==[0,3,6,9,12]
    with fails(ValueError, 'call slice before that step'): read(some, 2)
    with pytest.raises(ValueError, match='call slice before'): shares(some, 2)
    with pytest.raises(TypeError, match='has no positions'): some[3]

# --- when epochs begin

@pytest.mark.parametrize('options', [dict(rank=0, world_size=2), dict(seed=5)], ids=['ranks','seed'])
@pytest.mark.parametrize('kind', KINDS)
def test_an_epoch_that_is_read_again_in_the_same_order_is_noticed(ds, kind, options):
    made = source(ds, kind, **options)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        if kind!='stream': next(iter(loader(made)))   # a look at a batch is no epoch
        for epoch in range(2):
            made.set_epoch(epoch)
            last = read(made)
    if kind=='stream' and 'rank' in options:
        with pytest.raises(ValueError, match=r'call set_epoch\(epoch\).*2 ranks'): read(made)
        return
    message = 'epoch 1 is read again, in the same order .* call set_epoch'
    if kind=='stream': message = r'shuffle\(\): this epoch has the same random order.*set_epoch'
    with pytest.warns(UserWarning, match=message): assert read(made)==last

@pytest.mark.parametrize('kind', ['batched','stream'])
def test_a_worker_that_ends_before_the_first_one_begins_has_read_no_epoch(ds, kind):
    made = source(ds, kind, seed=5)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        others,first = [list(EpochIterator(made, worker, 2)) for worker in (1,0)]
    assert sorted(numbers(others+first))==list(range(N))

@pytest.mark.parametrize('make', [lambda ds: ds.shuffle(), lambda ds: mix([ds,ds]), lambda ds: ds.rsample(),
                                  lambda ds: ds.compose(identity).shuffle(9)], ids=['shuffle','mix','rsample','buffer'])
def test_random_streams_of_several_ranks_need_set_epoch(ds, make, as_rank):
    as_rank(0, 2)
    stream = make(ds)
    for epoch,workers in (0,0), (1,1):
        assert read(stream, workers)
        with fails(ValueError, r'call set_epoch\(epoch\).*2 ranks'): read(stream, workers)
        stream.set_epoch(epoch)
    assert read(ds.stream())==read(ds.stream())

def test_what_is_made_of_a_stream_shares_its_epoch(ds, as_rank):
    "Each may be read once in it"
    stream = ds.shuffle(seed=1)
    batched = stream.batched(16)
    family = stream,batched,batched.map(identity),batched.unbatched()
    for epoch,one in enumerate(family, 3):
        one.set_epoch(epoch)
        assert [other.epoch for other in family]==[epoch]*4
    as_rank(0, 2)
    rank = ds.shuffle()
    both = rank.compose(identity),rank.compose(identity)
    for epoch in range(2):
        rank.set_epoch(epoch)
        for stream in both: assert read(stream)
        with fails(ValueError, r'call set_epoch\(epoch\).*2 ranks'): read(both[0])

# --- which rank this is

@pytest.mark.parametrize('kind', KINDS)
def test_ranks_of_the_environment_are_found_when_the_epoch_begins(ds, kind, as_rank, monkeypatch):
    "Without `init_process_group`; what was made before is divided, too"
    made,given = source(ds, kind, seed=1),source(ds, kind, seed=1, rank=0, world_size=1)
    whole = len(made)
    epoch = []
    for rank in range(4):
        as_rank(rank, 4)
        made.set_epoch(0)
        assert (made.rank,made.world_size)==(rank,4) and len(made)==(15 if kind=='stream' else 2) and len(given)==whole
        epoch += read(made, rank%2)
    assert sorted(epoch)==list(range(N))
    for rank,world_size in ('4','4'),('-1','4'),('0','0'),('first','4'),('0','many'):
        as_rank(rank, world_size)
        with pytest.raises(ValueError, match=f'RANK={rank} and WORLD_SIZE={world_size} .*give rank='): len(made)
    as_rank(0, 4)
    monkeypatch.delenv('RANK')
    with pytest.raises(ValueError, match='WORLD_SIZE=4 .*RANK is not'): len(made)
    monkeypatch.setenv('WORLD_SIZE', '1')
    assert len(made)==whole

def test_a_rank_that_is_spawned_finds_out_which_one_it_is(ds, as_rank):
    "As with `torch.multiprocessing.spawn`: the process that pickles a stream or batches is no rank itself"
    made = [source(ds, kind) for kind in KINDS]
    context.set_spawning_popen(object())
    try: pickled = pickle.dumps(made)
    finally: context.set_spawning_popen(None)
    as_rank(1, 2)
    assert [epochs.ranks for epochs in pickle.loads(pickled)]==[(1,2)]*3

@pytest.mark.parametrize('kind', ['stream','batched'])
def test_ranks_that_are_forked_have_epochs_of_their_own(ds, kind):
    "Where the stream was made before; the workers of a rank have the epochs of the rank"
    made = source(ds, kind)
    dl = loader(made, 1, persistent_workers=True)
    def epochs(rank):
        warnings.simplefilter('error')
        os.environ.update(RANK=str(rank), WORLD_SIZE='2')
        result = []
        for epoch in range(2):
            made.set_epoch(epoch)
            result.append(numbers(dl))
        return result
    ranks = [start_fork(epochs, rank)() for rank in range(2)]
    for one,other in zip(*ranks): assert sorted(one+other)==list(range(N))
    assert ranks[0][0]!=ranks[0][1] and made.epoch==0

@pytest.mark.parametrize('kind', ['stream','batched'])
def test_workers_that_start_before_a_forked_rank_names_an_epoch(ds, kind):
    made,want = (source(ds, kind, seed=1) for _ in range(2))
    def orders(made):
        dl = loader(made, 1, persistent_workers=True)
        first = numbers(dl)
        made.set_epoch(7)
        return first,numbers(dl)
    assert start_fork(orders, made)()==orders(want)

def test_persistent_workers_of_a_copy_get_new_epochs(ds):
    for made in copy.deepcopy(source(ds, 'stream', seed=1)), pickle.loads(pickle.dumps(source(ds, 'batched', seed=1))):
        dl,orders = loader(made, 1, persistent_workers=True),[]
        for epoch in range(2):
            made.set_epoch(epoch)
            orders.append(numbers(dl))
        assert orders[0]!=orders[1]

def epochs_of_a_rank(ds, rank, meet):
    made = [ds.shuffle(), ds.select(bool).shuffle().batched(16).unbatched(), mix([ds[:9].shuffle(), ds[9:]]),
            source(ds, 'batches'), source(ds, 'batched'), source(ds, 'batched')]
    os.environ['GLOO_SOCKET_IFNAME'] = 'lo'
    torch.distributed.init_process_group('gloo', init_method=meet, rank=rank, world_size=2)
    def epoch(one, number):
        one.set_epoch(number)
        return read(one, 2)
    result = [epoch(one, number) for number in range(2) for one in made[:5]]
    result.append(read(made[5], 1, multiprocessing_context='spawn'))
    torch.distributed.destroy_process_group()
    return result

@pytest.mark.slow
@pytest.mark.xdist_group('processes')
def test_two_ranks_with_gloo_read_every_sample_once(ds, tmp_path):
    """Each with two workers, or one that is spawned, and that knows the rank of its parent

    The streams are made before `init_process_group`, and the environment names no rank."""
    meet = f'file://{tmp_path}/meet'
    started = [start_fork(epochs_of_a_rank, ds, rank, meet) for rank in range(2)]
    ranks = [result() for result in started]
    assert all(isinstance(rank, list) and len(rank)==11 for rank in ranks), ranks
    for one,other in zip(*ranks): assert sorted(one+other)==list(range(N)) and abs(len(one)-len(other))<=2
    assert not any(first==second for first,second in zip(ranks[0][:5], ranks[0][5:10]))
