"""Epochs: their numbers, the processes that share them, and their order

Docs: page `load/epochs`"""

import multiprocessing, os, sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import get_worker_info

from ..order.base import Order, WeightedOrder
from ..order.lengths import longest_of, LongestFirst, SortedWindows
from ..order.permutation import checked_seed, Permutation
from ..order.shards import ShardPermutation
from .items import RemoteItems

# --- Who reads what

# A process that reads is a worker of a rank. It computes its own share, so nothing has to be divided by the user.

def rank_and_world_size():
    """`(rank of this process, number of ranks)`: of `torch.distributed` if it is initialized, else of the environment

    There, `torchrun` sets `RANK` and `WORLD_SIZE`. If `WORLD_SIZE` is not set, or 1, the result is `(0, 1)`. Raises
    `ValueError` if it is anything else and `RANK` is not set, or these are not whole numbers with `RANK` the lower."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(),distributed.get_world_size()
    rank,world_size = os.environ.get('RANK'),os.environ.get('WORLD_SIZE') or '1'
    if world_size=='1': return 0,1
    advice = 'give rank= and world_size=, or call torch.distributed.init_process_group'
    if rank is None:
        raise ValueError(f'WORLD_SIZE={world_size} is set in the environment, and RANK is not: {advice}')
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank)<int(world_size)):
        raise ValueError(f'RANK={rank} and WORLD_SIZE={world_size} in the environment are no rank below a number of '
                         f'ranks: {advice}')
    return int(rank),int(world_size)

def share_of(
    n:int, # How many there are
    k:int, # Number of the part, in [0, count)
    count:int # How many parts there are
)->int:
    "The size of part `k` if `n` are divided into `count` parts, whose sizes differ by one at most"
    return n//count+(k<n%count)

def this_worker()->tuple:
    "`(number of this worker, number of workers)` of a torch `DataLoader`; `(0, 1)` elsewhere"
    info = get_worker_info()
    return (info.id,info.num_workers) if info else (0,1)

@dataclass(frozen=True)
class Consumer:
    "A process that reads: a worker of a rank"
    rank:int=0 # This rank
    world_size:int=1 # Number of ranks
    worker:int=0 # This worker of the rank
    num_workers:int=1 # Workers of each rank
    lanes:int=None # What `num_workers` was when the epoch began, if another process goes on; the order depends on it

    @property
    def order_workers(self)->int:
        "The number of workers that the order of the epoch was made for"
        return self.lanes or self.num_workers

    @property
    def count(self)->int:
        "The number of processes that read"
        return self.world_size*self.num_workers

    def share(self, n:int)->int:
        "How many of `n` results this process gives; ranks differ by one at most, and so do the workers of a rank"
        return share_of(share_of(n, self.rank, self.world_size), self.worker, self.num_workers)

# --- Epochs

# The seed of an epoch is drawn from torch's generator: each epoch has a new order, and `torch.manual_seed` repeats it.
# Several ranks must agree on the seed, and their generators may differ. So with several ranks, or with a `seed`, an
# epoch depends on `(seed, epoch)`, and `set_epoch` has to be called before each epoch, as with torch's
# `DistributedSampler`. The number of the epoch is in shared memory, where persistent workers see it.
#
# A rank that was not given is looked up whenever an epoch begins: a framework such as Lightning starts the other
# processes after the loaders were made.

class SharedNumbers:
    """Integers in shared memory: workers of a torch `DataLoader` see it when their parent changes them

    Any other process, such as a rank, gets a copy of its own when it first uses them or forks a process itself: of what
    they are then in the process that made them."""
    def __init__(self,
        n:int # How many; all are 0 at first
    ): self.__setstate__(dict(tensor=torch.zeros(n, dtype=torch.int64), pid=os.getpid()))

    def own(self):
        "The tensor, which a worker shares with its parent; any other process first replaces it by a copy of its own"
        owners = [os.getpid()]
        if get_worker_info() is not None: owners.append(multiprocessing.parent_process().pid)
        if self.pid not in owners: self.tensor,self.pid = self.tensor.clone().share_memory_(),os.getpid()
        return self.tensor

    def __getitem__(self, i): return int(self.own()[i])
    def __setitem__(self, i, value): self.own()[i] = value

    def __getstate__(self): return dict(tensor=self.own(), pid=self.pid)

    def __setstate__(self, state):
        self.__dict__.update(state)
        if not self.tensor.is_shared(): self.tensor,self.pid = self.tensor.share_memory_(),os.getpid()   # a copy
        _all_numbers.add(self)

_all_numbers = WeakSet()

def _own_all():
    "Let this process own all numbers that it has, as `SharedNumbers.own` does"
    for numbers in list(_all_numbers): numbers.own()

# Workers share the numbers of their parent: a rank that has not used its numbers must own them when it starts workers.
os.register_at_fork(before=_own_all)

class Epochs:
    "What is read in epochs, by several ranks and workers: a base class"
    def __init__(self,
        seed:int=None, # Seed of random numbers, one for all ranks; default: 0 on several ranks, else drawn from torch
        rank:int=None, # This rank; default: as `torch.distributed` or the environment of `torchrun` says
        world_size:int=None # Number of ranks; both this and `rank` are given, or neither; others raise `ValueError`
    ):
        if (rank,world_size)!=(None,None) and (rank is None or world_size is None or not 0<=rank<world_size):
            raise ValueError(f'want a rank below world_size, not {rank=}, {world_size=}: give both or none')
        self.seed = seed
        self.given_rank = None if world_size is None else (rank,world_size)
        self.found_rank = None   # what `rank_and_world_size` returned last
        # Number of the next epoch; how often `set_epoch` was called; 1 if `keep_undivided` was called
        self.numbers = SharedNumbers(3)
        self.found_refusal = ''   # what `refusal` returned in the process that made this one
        self.times = 0   # epochs that began in this process

    @property
    def epoch(self)->int:
        "The number that `set_epoch` was given last, at first 0; it does not change when an epoch begins or ends"
        return self.numbers[0]

    def set_epoch(self,
        epoch:int # Number of the next epoch
    ):
        """Choose the order of the next epoch, as in `DistributedSampler`

        Needed with several ranks or with `seed`, where each epoch has the same order otherwise."""
        self.numbers[0] = epoch
        self.numbers[1] += 1

    def keep_undivided(self):
        "Promise that no framework divides again what is read, so that there is no `refusal`"
        self.numbers[2] = 1

    def refusal(self)->str:
        """Why this epoch must not begin; empty if it may

        accelerate may be about to divide among its processes what is divided already. Nobody can see whether it is: so
        where it has several processes, `prepare_loader` has to be called."""
        state = sys.modules.get('accelerate.state')
        if self.numbers[2]: return ''
        if state is None or not state.is_initialized(): return self.found_refusal
        if state.PartialState().num_processes==1 or self.world_size==1: return ''
        return (f'{self!r}: these samples are divided among the {self.world_size} ranks, and accelerate would divide '
                'them again. Call prepare_loader(accelerator, loader) of fastai_remote.load.distributed in place of '
                'accelerator.prepare(loader); a loader of ds.batched(…) needs batch_size=None')

    @property
    def ranks(self)->tuple:
        "`(rank, world_size)` as given, or else as `rank_and_world_size` finds them, which may raise `ValueError`"
        if self.given_rank is not None: return self.given_rank
        distributed = torch.distributed
        # A worker that was spawned does not know its rank. Its parent does.
        is_known = self.found_rank is not None and get_worker_info() is not None
        if not is_known or distributed.is_available() and distributed.is_initialized():
            self.found_rank = rank_and_world_size()
        return self.found_rank

    rank = property(lambda self: self.ranks[0])
    world_size = property(lambda self: self.ranks[1])

    def __getstate__(self):
        # Looked up now, for a worker that is spawned, and knows neither its rank nor of accelerate
        try: _,refusal = self.ranks,self.refusal()
        except ValueError: refusal = ''   # raised again when this is used
        return self.__dict__ | dict(found_refusal=refusal)

    def draw_key(self)->tuple:
        """A tuple of ints that seeds the random numbers of the epoch that begins; the same in all workers and ranks

        With a seed or several ranks it is `(seed or 0, epoch)`. Otherwise it differs from epoch to epoch: it is drawn
        from torch's generator, or in a worker it consists of the seed of the loader and `times`. Call it once per
        epoch, as it counts the epoch in `times`. Raises `ValueError` for a seed that is no int of at least 0, and if
        there is a `refusal`."""
        if refusal:=self.refusal(): raise ValueError(refusal)
        if self.seed is not None: checked_seed(self.seed)
        info = get_worker_info()
        self.times += 1   # because a persistent worker has the same `info.seed` in each epoch
        if self.seed is not None or self.world_size>1: return self.seed or 0,self.epoch
        if info is None: return int(torch.empty((), dtype=torch.int64).random_()),
        return info.seed-info.id,self.times

    def results(self,
        key:tuple, # What `draw_key` returned
        consumer:Consumer,
        first:int # Results to leave out at the beginning
    ):
        "An iterator of the results of one process in an epoch, from number `first` on"
        raise NotImplementedError

    in_turn = False # Is result `k` of an epoch, whoever makes it, known from `k` and the order alone?

    def options(self)->dict:
        "What else the results of an epoch depend on, as far as it can be compared: names and numbers"
        return {}

    def ended(self,
        epoch:int # Its number
    ): "Called when those results of an epoch that the first worker has to give have been read to their end"

def check_options(
    what:str, # What is read, for the message
    state:dict, # Of the epoch that is to be continued
    options:dict # `{name: value}` of what its results depend on; `which` is a checksum of some sample numbers
):
    "Raise `ValueError` if the epoch had other options"
    for name,value in options.items():
        if state.get(name)==value: continue
        if name=='which': had,now = 'was of other samples, or of shards of other sizes','these samples'
        else: had,now = f'had {name} {state.get(name)!r}',repr(value)
        raise ValueError(f'{what}: the epoch {had}, and cannot be continued with {now}')

class EpochIterator:
    """The results of one process in one epoch, as an iterator with a state

    torchdata's `StatefulDataLoader` stores the state, and another process continues where it was."""
    def __init__(self,
        source:Epochs, # What is read
        worker:int, # This worker
        num_workers:int # Number of workers of each rank
    ):
        self.source,self.consumer = source,Consumer(*source.ranks, worker, num_workers)
        self.key = source.draw_key()   # drawn now, and not with the first result
        self.count,self.iterator,self.epoch = 0,None,source.epoch

    def __iter__(self): return self

    def __next__(self):
        if self.iterator is None: self.iterator = self.source.results(self.key, self.consumer, self.count)
        try: result = next(self.iterator)
        except StopIteration:
            # of the first worker alone: another one may have little to read, and end before that one begins
            if not self.consumer.worker: self.source.ended(self.epoch)
            raise
        self.count += 1
        return result

    def close(self):
        "Stop reading"
        if self.iterator is not None: self.iterator.close()

    def _options(self):
        return {name:value for name,value in asdict(self.consumer).items() if name!='lanes'}|self.source.options()

    def state_dict(self)->dict:
        "The place in the epoch, and all that its order depends on; `for_workers` knows by `lanes` what it can change"
        lanes = self.consumer.order_workers if self.source.in_turn else None
        return self._options()|dict(key=list(self.key), count=self.count, lanes=lanes)

    def load_state_dict(self,
        state:dict # What `state_dict` returned
    ):
        """Continue at this place

        Raises `ValueError` if an option has changed, such as the number of workers, samples or samples per batch, or
        which samples they are."""
        check_options(repr(self.source), state, self._options())
        self.consumer = replace(self.consumer, lanes=state['lanes'])
        self.key,self.count,self.iterator = tuple(state['key']),state['count'],None

# --- The order of an epoch
#
# Stock fastai makes a list of all indices and shuffles it. Here, an `Order` computes the positions. There are few kinds
# of orders: as stored; shuffled; shuffled shard by shard; by length, as in fastai's `SortedDL`; or drawn with
# replacement, so that rare labels come as often as others. `RemoteDL.get_idxs` chooses, and `shuffle_fn` is fastai's
# hook for another random order.

def shard_sizes(
    dl # A `RemoteDL`
)->np.ndarray: # int64
    "Number of samples in each shard, if an epoch reads whole shards; else `None`"
    if dl.interleave is None or dl.balance is not None or not dl.indexed: return None
    if dl.shuffle and dl.shuffles_otherwise: return None
    items = getattr(dl.dataset, 'items', None)
    sizes = items.shard_sizes if isinstance(items, RemoteItems) else None
    return sizes if sizes is not None and sizes.sum()==dl.n else None

def shuffled_shards(
    dl, # A `RemoteDL`
    sizes:np.ndarray # What `shard_sizes` returned
)->ShardPermutation:
    """A new `ShardPermutation`, with a seed from `rng`: a shuffled order in which each worker reads whole shards

    With a `seed` it depends neither on the number of workers nor on that of the ranks: each batch of all ranks together
    has as many samples of each lane, so that each rank reads lanes of its own."""
    lanes,bs = dl.fake_l.num_workers,dl.bs or 1
    if dl.is_seeded: lanes,bs = dl.lanes,max(1, dl.global_bs//dl.lanes)
    return ShardPermutation(sizes, dl.rng.getrandbits(63), dl.interleave, bs, lanes)

def order_by_length(
    dl # A `RemoteDL` with `known_lengths`
)->Order:
    "The order of fastai's `SortedDL`: if shuffled, similar lengths share a batch; else the longest come first"
    if not dl.shuffle: return Order(dl.n, LongestFirst(dl.known_lengths, dl.n))
    sizes,lanes,longest = shard_sizes(dl),None,None
    if sizes is not None:
        # with a `seed`, each batch has samples of all lanes
        base,lanes = shuffled_shards(dl, sizes),1 if dl.is_seeded else max(1, dl.fake_l.num_workers)
    else:
        base = Permutation(dl.n, dl.rng.getrandbits(63))
        if dl.longest is None: dl.longest = longest_of(dl.known_lengths, dl.n)
        longest = dl.longest
    seed = dl.rng.getrandbits(63)
    return Order(dl.n, SortedWindows(base, dl.n, dl.known_lengths, dl.global_bs, seed, lanes, longest))

def balanced_order(
    dl # A `RemoteDL`
)->WeightedOrder:
    "Draws labels by `balance`; raises what `check_balance` raises, and `ValueError` for another `shuffle_fn`"
    items = getattr(dl.dataset, 'items', dl.dataset)
    check_balance(items, dl.balance)
    if dl.shuffles_otherwise:
        raise ValueError(f'{items.store.name}: balance= draws the samples, and shuffle_fn was replaced, which '
                         'would put them in an order of its own: leave out one of them')
    field,weights = dl.balance if isinstance(dl.balance, tuple) else (dl.balance,None)
    if weights is None: weights = items.class_weights(field)
    return WeightedOrder(dl.n, partial(_codes_at, items, field), weights, dl.rng.getrandbits(63))

def _codes_at(items, field, positions):
    "The codes of the labels at `positions` of `items`, an array; a function that can be pickled, for spawned workers"
    return items.store.get_many(items.numbers_at(positions), field, check=True)[field]

def check_balance(
    items:RemoteItems, # What is drawn from
    balance # As in `RemoteDL`
):
    """Raise an error unless labels of `items` can be drawn by `balance`, which is not `None`

    `TypeError` if it is no field or pair, its field has no codes of labels, or the items are of no store; `ValueError`
    if labels are not counted, or there is not one weight for each; `UnknownField`."""
    if not isinstance(balance, str) and not (isinstance(balance, tuple) and len(balance)==2):
        raise TypeError('balance= takes a field, or a field and the weight of each of its labels, not '
                        f'{balance!r:.100}')
    if not isinstance(items, RemoteItems):
        raise TypeError(f'balance= needs the items of a store, not a {type(items).__name__}')
    store = items.store
    field,weights = (balance,None) if isinstance(balance, str) else balance
    if weights is None: store.class_weights(field)
    entry,labels = store.field_table.entry(field),store.manifest.vocab.get(field)
    if entry['dtype'] is None or np.dtype(entry['dtype']).kind not in 'iu':
        raise TypeError(f"{store.name}: balance= takes a field with one label for each sample, and {field!r} holds "
                        f"{entry['codec']}")
    if labels is None or weights is None or len(weights)==len(labels): return
    raise ValueError(f'{store.name}: balance= has {len(weights)} weights, but field {field!r} has '
                     f'{len(labels)} labels: one weight for each label, in the order of the vocabulary')

# --- torchdata's state
#
# torchdata loads a state only into a loader with the number of workers that saved it, because the state has an entry
# for each worker. Batches of a `RemoteDataset` need one place: their order, which the first process of the epoch made,
# and how many of them the loader has given. `for_workers` writes that place into a state for other workers.

def for_workers(
    state:dict, # What `StatefulDataLoader.state_dict` returned, of a loader of `ds.batches(…)` or `ds.batched(…)`
    num_workers:int # Workers of the loader that is to go on; 0: none
)->dict: # What `load_state_dict` of that loader takes
    """The same place in the same order, for another number of workers: `loader.load_state_dict(for_workers(state, 3))`

    Raises `ValueError` for a state of anything else: what a worker makes of a stream, or of samples that may be left
    out, depends on the number of workers."""
    snapshot = state.get('_snapshot')   # only with workers
    main = state if snapshot is None else snapshot['_main_snapshot']
    given = state['_num_yielded'] if snapshot is None else snapshot['_snapshot_step']+state['_steps_since_snapshot']
    sampler = main['_sampler_iter_state']   # of `ds.batches`; a worker of `ds.batched` has a state of its own
    workers = [state] if snapshot is None else list(snapshot['_worker_snapshots'].values())
    place = sampler or ((workers[0] or {}).get('fetcher_state') or {}).get('dataset_iter_state')
    if not isinstance(place, dict) or place.get('lanes') is None:
        raise ValueError('this state is not of batches that are all known in advance: it can only be continued with '
                         'the number of workers that it was saved with')
    count = max(num_workers, 1)
    def at(worker, n): return dict(place, worker=worker, num_workers=count, count=n)
    def fetcher(worker):
        if sampler: return None
        return {'dataset_iter_state':at(worker, share_of(given, worker, count)), 'fetcher_ended':False}
    result = {name:main[name] for name in ('_index_sampler_state','_IterableDataset_len_called','_shared_seed')}
    result |= {'_sampler_iter_state':at(0, given) if sampler else None, '_sampler_iter_yielded':given}
    finished = {'_iterator_finished':state['_iterator_finished']}
    if not num_workers:
        return {**result, '_num_yielded':given, 'dataset_state':None, 'fetcher_state':fetcher(0), **finished}
    base_seed = main.get('_base_seed', torch.initial_seed())   # of the random numbers of workers
    return {'_snapshot':{'_snapshot_step':given, '_last_yielded_worker_id':(given-1)%count,
                         '_main_snapshot':{**result, '_num_workers':num_workers, '_base_seed':base_seed},
                         '_worker_snapshots':{f'worker_{w}':{'worker_id':w, 'dataset_state':None,
                                                             'fetcher_state':fetcher(w)} for w in range(num_workers)}},
            '_steps_since_snapshot':0, **finished}
