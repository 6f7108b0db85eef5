"""Batches that take the time of their stages along, and points in time on a CPU or GPU

Docs: page `load/timed`"""

# If a loader is asked for the times of its batches, `timed` makes a `TimedBatch` of each. It takes the seconds of its
# stages along to the main process, as a `NoSamples` takes along that there is no batch. There it comes to
# `after_batch`, and `BatchTimes` opens it. fastai moves only tensors to the device: `BatchTimes` moves the batch.

from contextlib import closing
from dataclasses import dataclass

import torch
from fastai.torch_core import find_bs, to_device
from torch.utils.data._utils.pin_memory import pin_memory

from ..clock import monotonic
from .stages import Stopwatch

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
