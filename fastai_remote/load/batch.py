"""Reads the values of each batch from the store, and brings its tensors to the main process

Docs: page `load/batch`"""

import itertools, math, mmap, threading, weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch
from fastcore.foundation import L

from ..core import CorruptSample, MissingSample
from ..order.permutation import Permutation
from .fetch_transform import Fetch
from .items import read_parts, RemoteItems
from .lazy_image import BatchMemory
from .timed import stage

# --- Shared memory
#
# PyTorch sends a tensor from a worker to the main process through shared memory of its own, which needs a file, a
# descriptor, a mapping and new pages on both sides. Up to a megabyte the pipe is cheaper, by a factor of three for a
# batch of digits. Larger tensors go through `SharedBuffers`, memory that a worker has shared with its parent since the
# fork: the worker writes a batch into a buffer, and the main process copies it out and frees the buffer. If no buffer
# is free, the batch goes PyTorch's way. A grey image with three equal channels is sent as one channel.

_max_in_pipe = 1<<20   # bytes of the largest tensor that goes through the pipe of PyTorch's queue
_buffer_bytes = 1<<25   # of one buffer; the system gives it memory as far as it is written
_n_buffers = 4   # for each worker

_all_buffers,_counter = weakref.WeakValueDictionary(),itertools.count()   # by `id`, so that a pickle can name them

class SharedBuffers:
    """Memory that the main process shares with the workers it forks, for the batches of one epoch

    A worker marks a buffer as busy and writes a batch into it. The main process copies the batch out and frees the
    buffer."""
    def __init__(self,
        workers:int # Number of worker processes
    ):
        self.bytes = _shared_array(workers, _buffer_bytes)
        self.busy = _shared_array(workers, 1)[...,0]   # 1 for a buffer in use
        self.lock = threading.Lock()   # several threads of a worker build batches
        self.id = next(_counter)
        self.memory = BatchMemory()   # for the copies
        _all_buffers[self.id] = self

    def allocate(self,
        worker:int, # Number of the worker
        nbytes:int
    )->np.ndarray: # `uint8`, shape (nbytes,); `None` if it is too large or no buffer is free
        "Memory in a free buffer of `worker`"
        with self.lock:
            free = np.flatnonzero(self.busy[worker]==0)
            if nbytes>_buffer_bytes or not len(free): return
            self.busy[worker,free[0]] = 1
        return self.bytes[worker,free[0],:nbytes]

    def offset_of(self, x:torch.Tensor)->int:
        "Where `x` begins in these buffers, in bytes; `None` if it is not in them, or not contiguous"
        offset = x.data_ptr()-self.bytes.ctypes.data
        return offset if 0<=offset<self.bytes.size and x.is_contiguous() else None

    def receive(self,
        offset:int, # Result of `offset_of` in the worker
        shape:tuple,
        copy:bool=True # Copy the bytes out? Else the caller copies them before it calls `free`
    )->torch.Tensor:
        "The tensor of bytes that a worker left at `offset`"
        x = torch.from_numpy(self.bytes.reshape(-1)[offset:offset+math.prod(shape)].reshape(shape))
        return self.memory(shape).copy_(x) if copy else x

    def free(self, offset:int):
        "Let the worker use the buffer at `offset` again"
        self.busy.reshape(-1)[offset//_buffer_bytes] = 0

    def __reduce__(self): return type(None),()   # a spawned worker shares no memory

def _shared_array(workers, nbytes):
    "A `uint8` array of zeros that forked processes share, shape (workers, _n_buffers, nbytes)"
    return np.frombuffer(mmap.mmap(-1, workers*_n_buffers*nbytes), np.uint8).reshape(workers, _n_buffers, nbytes)

@dataclass(eq=False, repr=False)
class OutgoingTensor:
    """A tensor on its way from a worker to the main process, which unpickles it as the tensor

    A small one is sent in the pickle, a larger one in shared memory. If all channels are equal, one is sent, and `open`
    repeats it."""
    x:torch.Tensor # What is sent
    cls:type # Type of the result, such as `TensorImage`
    channels:int=1 # Channels that the only one of `x` stands for
    own:bool=True # Give each of these memory of its own? Else the result is a view of one
    buffers:SharedBuffers=None # Those of the epoch

    def open(self,
        memory:BatchMemory=None # Allocates the result if channels are repeated with `own`; default: new memory
    )->torch.Tensor: # A `cls`
        "The tensor, with all its channels"
        x = self.x
        if self.channels>1 and self.own:
            x = (memory or BatchMemory(0))((x.shape[0], self.channels, *x.shape[2:])).copy_(x)
        elif self.channels>1: x = x.expand(-1, self.channels, -1, -1)
        return x.as_subclass(self.cls)

    def __reduce__(self):
        kind = self.cls,self.channels,self.own
        if self.x.nbytes<=_max_in_pipe: return _opened,(self.x.numpy(), *kind)
        offset = None if self.buffers is None else self.buffers.offset_of(self.x)
        if offset is None: return _opened,(self.x, *kind)   # PyTorch moves it through shared memory of its own
        return _from_buffer,(self.buffers.id, offset, tuple(self.x.shape), *kind)

def _opened(x, *kind): return OutgoingTensor(torch.as_tensor(x), *kind).open()
def _from_buffer(id, offset, shape, cls, channels, own):
    """In the main process: the tensor that a worker left at `offset` of the `SharedBuffers` with number `id`

    Its buffer is freed. The other arguments are those of `OutgoingTensor`, and the shape of its `x`."""
    buffers = _all_buffers[id]
    repeated = channels>1 and own   # `open` copies then
    res = OutgoingTensor(buffers.receive(offset, shape, not repeated), cls, channels, own).open(buffers.memory)
    buffers.free(offset)
    return res

@dataclass
class WorkerMemory:
    "Allocates the tensors that a worker sends: large ones lie in memory that the main process can read"
    worker:int # Number of this worker
    buffers:SharedBuffers # Those of the epoch, or `None`
    memory:BatchMemory # For small ones, which are sent in the pipe

    def __call__(self, shape:tuple)->torch.Tensor: # `uint8`
        "Uninitialised tensor, in a free buffer or, if none is free or large enough, in shared memory of PyTorch"
        nbytes = int(math.prod(shape))
        if nbytes<=_max_in_pipe: return self.memory(shape)
        array = None if self.buffers is None else self.buffers.allocate(self.worker, nbytes)
        if array is not None: return torch.from_numpy(array).view(shape)
        return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(nbytes)).view(shape)

    def give_up(self, x:torch.Tensor):
        "Free the buffer that `x` is in, if it is in one: it will not be sent"
        offset = None if self.buffers is None else self.buffers.offset_of(x)
        if offset is not None: self.buffers.free(offset)

# --- Batches
#
# A batch passes through five stages, and each has its place in the code:
#
# - *Order*: `RemoteDL.get_idxs` and `sample` say which positions the batch has.
# - *Fetch*: `StoreInputs.read` reads the values of all its samples, with one request per store.
# - *Decode* and *transform*: item by item, as in fastai, or for the whole batch at once where `WholeBatches` has shown
#   that the result is the same.
# - *Collate*: the items become tensors.
#
# The stages pass on a `Batch`.

# --- Batch

@dataclass
class Batch:
    "One batch on its way from the store to the model: which samples, and what the stores hold for them"
    positions:list # Position of each sample in the dataset of the epoch; `None`s for an iterable dataset
    numbers:list # Sample number in the store at each position; items such as dicts have none
    values:list # For each `Fetch` of the pipelines: the value of each of `numbers`, a list or an array
    wanted:int # Number of samples before some were skipped
    bad:tuple=() # Numbers of samples that were replaced or skipped
    first:int=0 # Place in the epoch of the first sample, of a loader with a `seed`

class NoSamples:
    "What a worker sends in place of a batch whose samples were all skipped, so that the other batches keep their order"

def without_empty(
    batches # Iterable of batches and `NoSamples`
): # Yields batches
    "The batches that have samples. Holds none of them while the next one is made."
    for batch in batches:
        if type(batch) is not NoSamples: yield batch
        del batch

# --- StoreInputs

# The values of a batch are read with one request per store. fastai calls `dataset[i]` for each item. So that this call
# finds the values of the batch, the pipelines receive them beforehand: the items get the sample number at each
# position, and each `Fetch` gets the value of each sample number.

def fetch_of(
    tl # A `TfmdLists`, or any other dataset
)->Fetch: # `None` if there is none
    "The `Fetch` that the pipeline of `tl` starts with"
    transforms = getattr(getattr(tl, 'tfms', None), 'fs', [])
    return transforms[0] if transforms and isinstance(transforms[0], Fetch) else None

class StoreInputs:
    "The parts of a dataset that read from stores: its items, and the `Fetch` at the beginning of each pipeline"
    def __init__(self,
        dataset, # `Datasets`, `TfmdLists` or any other dataset of a loader
        check:bool=True, # Compare checksums?
        on_bad:str='raise' # For a missing or damaged sample: `raise`, `replace` it by another one, or `skip` it
    ):
        self.check,self.on_bad = check,on_bad
        self.items = getattr(dataset, 'items', dataset)
        self.lists = getattr(dataset, 'tls', [dataset])   # the `TfmdLists`, one for each input and target
        self.fetches = [fetch for fetch in map(fetch_of, self.lists) if fetch is not None]
        if self.fetches and not self._has_numbers(dataset): self.fetches = []
        self.stores = list({id(fetch.store):fetch.store for fetch in self.fetches}.values())   # each once

    def _has_numbers(self, dataset):
        """Can batches be read by sample numbers, which the items have at the positions of `dataset`?

        False for a list without any sample number, for which no store is read, and for a wrapper that passes on the
        attributes of a dataset, but has another length: its items are read one by one. True for an iterable dataset."""
        try: is_wrapped = dataset is not self.items and len(dataset)!=len(self.items)
        except TypeError: return True   # an iterable dataset
        if is_wrapped: return False
        if isinstance(self.items, RemoteItems): return len(self.items)>0
        return not isinstance(self.items, (list,L)) or any(isinstance(o, (int,np.integer)) for o in self.items)

    def same_items(self)->list:
        """The `RemoteItems` of all pipelines that have the same sample numbers at the same positions as the dataset

        Empty if the items of the dataset are not `RemoteItems`."""
        if not isinstance(self.items, RemoteItems): return []
        found = [getattr(tl, 'items', None) for tl in self.lists]
        return [items for items in found if isinstance(items, RemoteItems) and items.has_same_maps(self.items)]

    def numbers_at(self, positions)->list:
        """The sample number at each of `positions`; `None`, of an iterable dataset, counts as position 0

        Items that are not sample numbers, such as dicts, are left out."""
        positions = [p or 0 for p in positions]
        if isinstance(self.items, RemoteItems): return self.items.numbers_at(positions).tolist()
        items = [self.items[p] for p in positions]
        return [int(o) for o in items if isinstance(o, (int,np.integer))]

    def number_at(self, position)->int:
        "The sample number at `position`; `None` without one, or if `position` is `None`, as of an iterable dataset"
        numbers = [] if position is None else self.numbers_at([position])
        return numbers[0] if numbers else None

    def instead(self,
        number:int, # A sample that cannot be used
        error:Exception, # Why
        f # `f(position, sample number)` for another sample
    ):
        """What `f` returns for the first of the same items for which it raises no `CorruptSample` or `MissingSample`

        Up to 99 are tried, in a random order that depends on `number`; else `error` is raised. Sample `number` may be
        among them. Items that are no sample numbers are left out."""
        n = len(self.items)
        for position in Permutation(n, number)[np.arange(min(n, 99))].tolist():
            other = self.number_at(position)
            if other is None: continue
            with suppress(CorruptSample, MissingSample): return f(position, other)
        raise error

    @stage('fetch')
    def read(self,
        positions:list, # Of one batch
        shards:tuple=None # Arguments of the store's `prefetch`; default: it goes on fetching the same shards
    )->Batch:
        """One batch, with one request per store; with more of them if one is bad and `on_bad` is not 'raise'

        A bad sample is always an error if one of the positions is `None`, or has an item that is no sample number.
        Raises `MissingSample`, `CorruptSample`, `StoreUnavailable`."""
        if shards: self.items.store.prefetch(*shards)   # here, because the batches before are read by now
        numbers = self.numbers_at(positions)
        unique = list(dict.fromkeys(numbers))
        if not unique: return Batch(positions, numbers, [[] for _ in self.fetches], len(positions))
        # To skip or replace a sample, its position must be known: each position must have a number
        may_be_bad = self.on_bad!='raise' and len(numbers)==len(positions) and None not in positions
        parts = list(read_parts(self._values, unique)) if may_be_bad else [(unique,self._values(unique))]
        if len(parts)>1 or isinstance(parts[0][1], Exception): return self._without_bad(positions, numbers, parts)
        values = parts[0][1]
        if len(unique)<len(numbers):
            where = {number:k for k,number in enumerate(unique)}
            at = [where[number] for number in numbers]
            values = [v[at] if isinstance(v, np.ndarray) else [v[k] for k in at] for v in values]
        return Batch(positions, numbers, values, len(positions))

    def _values(self, numbers):
        "For each `Fetch`: the values of samples `numbers`, a list or an array"
        values = {}
        for store in self.stores:
            fields = list(dict.fromkeys(fetch.field for fetch in self.fetches if fetch.store is store))
            values[id(store)] = store.get_many(numbers, fields, check=self.check)
        return [values[id(fetch.store)][fetch.field] for fetch in self.fetches]

    def _without_bad(self, positions, numbers, parts):
        """The `Batch` of samples `numbers` at `positions`, where one is missing or damaged; `parts` as of `read_parts`

        A sample that is replaced gets the position of the other one, so that all pipelines see the other one. Skipped
        samples are left out, and counted in `wanted`."""
        found = {}
        for some,values in parts:
            if isinstance(values, Exception): found[some[0]] = self._other(some[0], values)
            else: found |= {number:(None, number, [v[k] for v in values]) for k,number in enumerate(some)}
        bad = tuple(number for number,result in found.items() if not result or result[0] is not None)
        used = [(position, *found[number]) for position,number in zip(positions, numbers) if found[number]]
        new_positions = [position if other is None else other for position,other,_,_ in used]
        columns = zip(*(values for _,_,_,values in used)) if used else [[] for _ in self.fetches]
        values = [np.array(v) if len(v) and isinstance(v[0], np.generic) else list(v) for v in columns]
        return Batch(new_positions, [number for _,_,number,_ in used], values, len(positions), bad)

    def _other(self, number, error):
        "`(position, number, values)` of one in place of sample `number`, which had `error`; `()` if it is skipped"
        if self.on_bad=='skip': return ()
        def read(position, other): return position,other,[values[0] for values in self._values([other])]
        return self.instead(number, error, read)

    def positions_of(self, batch:Batch):
        "Yields each position of `batch`. Meanwhile the pipelines hold the values of the batch, and need no request."
        numbers,same_items = dict(zip(batch.positions, batch.numbers)),self.same_items()
        for fetch,values in zip(self.fetches, batch.values):
            fetch.receive(dict(zip(batch.numbers, values.tolist() if isinstance(values, np.ndarray) else values)))
        received = [fetch.values for fetch in self.fetches]
        for position in batch.positions:
            # Set again for each item: meanwhile they may be released, and another loader may have set its own
            for fetch,values in zip(self.fetches, received): fetch.values = values
            for items in same_items: items.known = numbers
            yield position

    def release(self):
        "Forget the values of the last batch: its memory can be used again, and `dataset[i]` reads sample `i` itself"
        for fetch in self.fetches: fetch.values = {}
        for tl in self.lists:
            if isinstance(items:=getattr(tl, 'items', None), RemoteItems): items.known = {}

    def released(self,
        batches # An iterator that takes items from `positions_of`
    ):
        "Yields what `batches` yields. Meanwhile the values are released, as the loader may never be asked to go on."
        while True:
            try: batch = next(batches)
            except StopIteration: return
            finally: self.release()
            yield batch

@contextmanager
def first_or_other(
    dataset, # `Datasets` or `TfmdLists` with at least one sample
    check:bool=True, # Compare checksums?
):
    """A context in which the pipelines hold values for the first sample; those of another one if it is bad

    For what fastai finds out from the first sample, such as types, any other one does as well. Raises `CorruptSample`
    or `MissingSample`, of the first sample, if it and up to 99 others cannot be read and decoded."""
    inputs = StoreInputs(dataset, check)
    numbers = inputs.numbers_at([0])
    def hold(position, number=None):
        # under the number of the first sample, which is the one that fastai asks for
        next(inputs.positions_of(Batch([0], numbers, inputs.read([position]).values, 1)))
        for number in numbers:
            for fetch in inputs.fetches: fetch(number)   # raises `CorruptSample` if it cannot be decoded
    try:
        try: hold(0)
        except (CorruptSample,MissingSample) as e: inputs.instead(numbers[0], e, hold)
        yield
    finally: inputs.release()
