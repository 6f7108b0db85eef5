"""How the tensors of a batch get from a worker to the main process

Docs: page `load/shared_buffers`"""

# PyTorch sends a tensor from a worker to the main process through shared memory of its own, which needs a file, a
# descriptor, a mapping and new pages on both sides. Up to a megabyte the pipe is cheaper, by a factor of three for a
# batch of digits. Larger tensors go through `SharedBuffers`, memory that a worker has shared with its parent since the
# fork: the worker writes a batch into a buffer, and the main process copies it out and frees the buffer. If no buffer
# is free, the batch goes PyTorch's way. A grey image with three equal channels is sent as one channel.

import itertools, math, mmap, threading, weakref
from dataclasses import dataclass

import numpy as np
import torch

from .lazy_image import BatchMemory

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
