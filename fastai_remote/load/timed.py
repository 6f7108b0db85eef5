"""The stages of a batch and the time that each takes, on a CPU or GPU

Docs: page `load/timed`"""

import threading
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps

import torch
from fastai.torch_core import find_bs, to_device
from torch.utils.data._utils.pin_memory import pin_memory

from ..clock import monotonic

# --- Stages
#
# A function of a stage has the decorator `stage`. It measures nothing unless a `Stopwatch` runs, which only a loader
# starts whose batches are timed. A context variable has the stopwatch of the loader for which a thread works: threads
# get a copy of the context of the thread that starts their work, and loaders may take turns in one thread.

_stopwatch = ContextVar('stopwatch', default=None)

def stage(
    name:str # `fetch`, `decode`, `transform` or `collate`
): # A decorator
    "The time of each call is added to stage `name`, but for that of stages within it; only if the batch is timed"
    def decorate(f):
        @wraps(f)
        def with_stopwatch(*args, **kwargs):
            watch = _stopwatch.get()
            return f(*args, **kwargs) if watch is None else watch.call(name, f, args, kwargs)
        return with_stopwatch
    return decorate

class Stopwatch:
    "Adds up the seconds of each stage, in all threads that work for a loader"
    def __init__(self): self.seconds,self.lock,self.local = {},threading.Lock(),threading.local()

    def call(self, name, f, args, kwargs):
        "`f(*args, **kwargs)`; its time is added to stage `name`, but for that of stages within it"
        outer = getattr(self.local, 'within', 0.)   # what the calls within the stage around this one took so far
        self.local.within,start = 0.,monotonic()
        try: return f(*args, **kwargs)
        finally:
            total = monotonic()-start
            own,self.local.within = total-self.local.within,outer+total
            with self.lock: self.seconds[name] = self.seconds.get(name, 0.)+own

    def take(self)->dict: # `{stage: seconds}`
        "The seconds since the last call"
        with self.lock: seconds,self.seconds = self.seconds,{}
        return seconds

    def next(self, iterator):
        "`next(iterator)`, of which the stages are measured, also those in threads that are started meanwhile"
        token = _stopwatch.set(self)
        try: return next(iterator)
        finally: _stopwatch.reset(token)

# --- Timed batches
#
# If a loader is asked for the times of its batches, `timed` makes a `TimedBatch` of each. It takes the seconds of its
# stages along to the main process, as a `NoSamples` takes along that there is no batch. There it comes to
# `after_batch`, and `BatchTimes` opens it. fastai moves only tensors to the device: `BatchTimes` moves the batch.

class TimedBatch:
    "A batch on its way to the model, with the time of its stages"
    def __init__(self,
        batch, # As collated, before `after_batch`
        seconds:dict # `{stage: seconds}` of what was done for this loader since the batch before
    ): self.batch,self.seconds = batch,seconds

    def __len__(self): return find_bs(self.batch)   # fastai asks a batch without a shape

    def pin_memory(self, device=None):
        "As PyTorch pins a batch; fastai makes a tuple of the list that results"
        pinned = pin_memory(self.batch, device)
        return TimedBatch(tuple(pinned) if type(pinned) is list else pinned, self.seconds)

    # The arguments are unpickled one after the other: `_Now` before the batch
    def __reduce__(self): return _received,(_Now(), self.batch, self.seconds)

class _Now:
    "Is unpickled as the time when that happens"
    def __reduce__(self): return monotonic,()

def _received(start, batch, seconds):
    "A `TimedBatch` that comes from a worker, whose unpickling began at `start`"
    return TimedBatch(batch, {**seconds, 'receive':monotonic()-start})

def timed(
    batches, # Generator of batches
    other=() # Types of what is no batch, and passes as it is
): # Yields `TimedBatch`es
    "The batches, with the time of the stages that `batches` passes, in this thread and in those that work for it"
    watch = Stopwatch()
    with closing(batches):
        while True:
            try: batch = watch.next(batches)
            except StopIteration: return
            yield batch if isinstance(batch, other) else TimedBatch(batch, watch.take())
            del batch

class CpuMarks:
    "Points in time, as the main process passes them"
    def mark(self): return monotonic()
    def is_past(self, mark)->bool: return True
    def seconds(self, start, end)->float: return end-start

class GpuMarks:
    "Points in the work of a GPU, which does what the main process has asked for some time later: CUDA events"
    def mark(self):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, mark)->bool: return mark.query()
    def seconds(self, start, end)->float:
        "Waits until the GPU has passed `end`"
        end.synchronize()
        return start.elapsed_time(end)/1000

def marks_on(
    device:torch.device|None # Of the model
): # `CpuMarks` or `GpuMarks`
    "How to take the time of what is done on `device`"
    return GpuMarks() if device is not None and torch.device(device).type=='cuda' else CpuMarks()

@dataclass
class Opened:
    "The times of a batch that is ready for the model"
    seconds:dict # `{stage: seconds}`, as of `TimedBatch`
    samples:int # Number of its samples
    arrived:object # When the main process had it: a mark
    copied:object # When it was on the device: a mark
    ready:object # When the batch transforms were done: a mark

class BatchTimes:
    "Opens the `TimedBatch`es of a loader in the main process, and keeps the times of the last one"
    def __init__(self,
        device:torch.device|None=None, # Where batches are moved to
    ):
        self.device,self.marks,self.last = device,marks_on(device),None

    def opened(self,
        timed:TimedBatch,
        after_batch # The batch transforms
    ):
        "The batch, moved to the device as fastai does it, and transformed"
        arrived = self.marks.mark()
        batch = timed.batch if self.device is None else to_device(timed.batch, self.device)
        copied = self.marks.mark()
        res = after_batch(batch)
        self.last = Opened(timed.seconds, len(timed), arrived, copied, self.marks.mark())
        return res

    def __reduce__(self): return BatchTimes,()   # a spawned worker only has to know that its batches are timed
