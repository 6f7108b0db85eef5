"""Drawings as tensors for recurrent networks: padded batches, lengths, and how they are shown

Docs: page `load/sequences`"""

# The drawings of a batch have different lengths. `pad_strokes` makes them equal, and `stroke_lengths` and
# `packed_strokes` say again which steps are real.

import matplotlib.pyplot as plt
import numpy as np
import torch
from fastai.torch_core import TensorBase
from fastai.vision.data import get_grid, get_show_batch_func, show_batch
from fasttransform import DisplayedTransform
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from ..codec.sequences import StrokeSequence

def stroke_lengths(
    x:torch.Tensor # Sequences with at least 5 columns, shape (batch, steps, columns)
)->torch.Tensor: # Shape (batch,)
    "Steps of each drawing, without its end and without padding; raises `ValueError` for the format with 3 columns"
    if x.shape[-1]<5:
        raise ValueError('the format with 3 columns does not say where a drawing ends: use StrokeSequence(fmt=5)')
    return (x.as_subclass(torch.Tensor)[...,-1]==0).sum(-1)

def packed_strokes(
    x:torch.Tensor # Sequences with at least 5 columns, shape (batch, steps, columns)
)->PackedSequence:
    "The batch for PyTorch's recurrent layers, without padding; the steps include the end of each drawing"
    lengths = (stroke_lengths(x)+1).clamp(max=x.shape[1]).cpu()
    return pack_padded_sequence(x.as_subclass(torch.Tensor), lengths, batch_first=True, enforce_sorted=False)

class TensorStrokes(TensorBase):
    """Sequences that `StrokeSequence` makes: shape (steps, columns), or (batch, steps, columns) with padding

    fastai passes plain tensors to a model, so there `stroke_lengths` and `packed_strokes` are functions."""

    def show(self, ctx=None, figsize=(2,2), **kwargs):
        "Draw the steps of one drawing"
        steps = self.detach().cpu().float().as_subclass(torch.Tensor).numpy()
        lifted = steps[:,-2] if steps.shape[1]>=5 else steps[:,-1]
        if steps.shape[1]>=5: steps,lifted = steps[steps[:,-1]==0],lifted[steps[:,-1]==0]
        if ctx is None: ctx = plt.subplots(figsize=figsize)[1]
        points = steps[:,:2].cumsum(0)
        for stroke in np.split(points, np.flatnonzero(lifted>0)+1):
            ctx.plot(*stroke.T, 'k', marker='.' if len(stroke)==1 else '')
        ctx.set_aspect('equal')
        if not ctx.yaxis_inverted(): ctx.invert_yaxis()
        ctx.axis('off')
        return ctx

class ToStrokes(DisplayedTransform):
    "Makes `TensorStrokes` of what `Fetch` reads: a sequence, or points with times"
    def __init__(self,
        sequence:StrokeSequence, # The format
        points:bool=False # Are points read, and not strokes?
    ): self.sequence,self.points = sequence,points
    def encodes(self, o:np.ndarray):
        return TensorStrokes(torch.from_numpy(self.sequence.of_points(o) if self.points else o))

def pad_strokes(
    samples:list # Tuples, some of whose items are `TensorStrokes`
)->list: # The same, with sequences of one length
    "Pads drawings at their ends, with rows 0, …, 0, 1 (no more steps) if there are 5 columns or more, else with zeros"
    def pad(drawings):
        longest = max(map(len, drawings))
        return [_padded(steps, longest) for steps in drawings]
    return padded_items(samples, TensorStrokes, pad)

def padded_items(
    samples:list, # Tuples
    cls:type, # Of the items to pad
    pad # `pad(list of items)` -> list of items of one length
)->list: # Of tuples
    "The samples with items of equal length, in each place where the first sample has a `cls`"
    columns = [pad(column) if isinstance(column[0], cls) else column for column in zip(*samples)]
    return list(zip(*columns))

def _padded(steps, n):
    padding = steps.new_zeros((n-len(steps), steps.shape[1]))
    if steps.shape[1]>=5: padding[:,-1] = 1
    return TensorStrokes(torch.cat([steps.as_subclass(torch.Tensor), padding.as_subclass(torch.Tensor)]))

@show_batch.dispatch
def show_batch(x:TensorStrokes, y, samples, ctxs=None, max_n=9, nrows=None, ncols=None, figsize=None, **kwargs):
    if ctxs is None: ctxs = get_grid(min(len(samples), max_n), nrows=nrows, ncols=ncols, figsize=figsize)
    return get_show_batch_func(object)(x, y, samples, ctxs=ctxs, max_n=max_n, **kwargs)

def is_points(
    field:str # Name of a field
)->bool:
    "Is this a field of points with times, such as `points.npy`?"
    return 'points' in field.split('.') and field.rsplit('.', 1)[-1]=='npy'
