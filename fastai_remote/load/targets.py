"""Transforms of targets: categories and masks with the vocabulary of the store, arrays, drawings as sequences

Docs: page `load/targets`"""

# Categories take their vocabulary from the store. Stock fastai would read every label of every sample to find it.
# `get_y` is called with the label, and the vocabulary consists of its results for the store's labels.

import matplotlib.pyplot as plt
import numpy as np
import torch
from fastai.data.transforms import Categorize, CategoryMap, MultiCategorize, RegressionSetup
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import show_title, TensorBase, TitledFloat, TitledTuple
from fastai.vision.core import AddMaskCodes, PILMask
from fastai.vision.data import get_grid, get_show_batch_func, show_batch
from fasttransform import compose_tfms, DisplayedTransform
from torch.nn.utils.rnn import pack_padded_sequence, PackedSequence

from ..codec.numbers import StrokeSequence
from .equivalence import watch
from .fetch_transform import Fetch

class StoreCategorize(Categorize):
    """fastai's `Categorize`, with the labels of `field` in the store as vocabulary, as `get_y` returns them

    If `get_y` changes a label, the vocabulary is sorted. A given `vocab` is used in its own order instead."""
    def __init__(self,
        field:str='cls', # Field with one label for each sample
        vocab:list=None # Labels; default: those of the store
    ):
        self.field,self.add_na = field,False
        self.vocab = None if vocab is None else CategoryMap(vocab, sort=False)

    def setups(self, dsets):
        if self.vocab is None: self.vocab = _vocab_of(self, dsets)
        self.c = len(self.vocab)

# The functions of fastai's class, so that types which a user registers with `Categorize` work here, too
StoreCategorize.encodes = vars(Categorize)['encodes']
StoreCategorize.decodes = vars(Categorize)['decodes']
watch(StoreCategorize)

class StoreMultiCategorize(MultiCategorize):
    """fastai's `MultiCategorize`, with the labels of `field` in the store as vocabulary, as `get_y` returns them

    If `get_y` changes a label, the vocabulary is sorted. A given `vocab` is used in its own order instead."""
    def __init__(self,
        field:str='labels', # Field with a list of labels for each sample
        vocab:list=None # Labels; default: those of the store
    ):
        self.field,self.add_na = field,False
        self.vocab = None if vocab is None else CategoryMap(vocab, sort=False)

    def setups(self, dsets):
        if self.vocab is None: self.vocab = _vocab_of(self, dsets, several=True)

StoreMultiCategorize.encodes = vars(MultiCategorize)['encodes']
StoreMultiCategorize.decodes = vars(MultiCategorize)['decodes']

def _fetch_in(t, tl):
    "The index of the first `Fetch` in the pipeline of `tl`, a `TfmdLists`; `ValueError` with the name of `t` if none"
    at = next((k for k,o in enumerate(tl.tfms.fs) if isinstance(o, Fetch)), None)
    if at is None: raise ValueError(f'{type(t).__name__} needs a Fetch before it in the pipeline, to know the store')
    return at

def _vocab_of(t, tl, several=False):
    """`CategoryMap` of the store's labels of field `t.field`, after `get_y` or `getters` of `tl`, a `TfmdLists`

    If these change a label, the labels are sorted, as in fastai, unless their types cannot be compared. If `several`,
    they get and return lists of labels. Raises `ValueError` if no `Fetch` comes before `t`, a transform, if the store
    has no vocabulary of the field, or if `get_y` or one of `getters` fails."""
    tfms,at,field = list(tl.tfms.fs),_fetch_in(t, tl),t.field
    store,getters = tfms[at].store,tfms[at+1:]
    labels = store.manifest.vocab.get(field)
    if not labels: raise ValueError(f'{store.name}: field {field!r} has no vocabulary; give vocab= at ingest')
    made = [_after_getters(store, field, [label] if several else label, getters) for label in labels]
    if several: made = [label for group in made for label in group]
    unchanged = len(made)==len(labels) and all(a is b or a==b for a,b in zip(made, labels))
    if unchanged: return CategoryMap(labels, sort=False)
    try: return CategoryMap(made)
    except TypeError: return CategoryMap(made, sort=False)   # labels of several types cannot be sorted

def _after_getters(store, field, label, getters):
    """What the transforms `getters`, which came with `get_y` or `getters`, make of a label, or of a list of one label

    Raises `ValueError` if one fails."""
    try: return compose_tfms(label, getters)
    except Exception as e:
        raise ValueError(
            f'{store.name}: get_y failed for {label!r} of field {field!r} ({type(e).__name__}: {e}). '
            f'RedisBlock({field!r}) calls it with the label, not with the item; where it needs the item, or returns '
            'something that is not known beforehand, give CategoryBlock(vocab=…) in place of that RedisBlock') from e

# A field holds masks if it is called `mask` or `mask.png`, or if it holds images and has a vocabulary of its own. A
# block that has no store yet decides this when it gets one.

class MaskCodes(AddMaskCodes):
    "fastai's `AddMaskCodes`, whose `setups` takes the vocabulary of the mask's field, if it has one, as codes"
    def __init__(self,
        decide:bool=False # Do this only if the field holds masks? For a block that does not know its store yet
    ):
        super().__init__()
        self.decide = decide

    def setups(self, tl):
        """Set `loss_func`, and if the field has a vocabulary, `codes`, `vocab` and `c`

        If `decide`, only for a field of masks, whose `Fetch` is also set to return each as a `PILMask`. Raises
        `ValueError` if no `Fetch` comes before."""
        fetch = tl.tfms.fs[_fetch_in(self, tl)]
        if self.decide:
            if not fetch.store.field_table.holds_masks(fetch.field): return
            fetch.img_cls = PILMask
        self.loss_func = CrossEntropyLossFlat(axis=1)   # which fastai takes from `PILMask.create`
        if vocab:=fetch.store.manifest.vocab.get(fetch.field): self.codes,self.vocab,self.c = vocab,vocab,len(vocab)

watch(MaskCodes)

# Numbers and arrays become floats, as in `RegressionBlock`. An array of any shape can be shown.

class ShownArray(TensorBase):
    """A tensor of any shape whose `show` draws one dimension as a curve, and two as a picture

    Given `ctx`, and for other dimensions, it shows only a title with the shape and the mean."""
    def show(self, ctx=None, **kwargs):
        array = self.detach().cpu().numpy()
        if ctx is not None or array.ndim not in (1,2):
            return show_title(f"array of {' x '.join(map(str, array.shape))}, mean {array.mean():.3g}", ctx=ctx)
        ctx = plt.subplots(figsize=(3,2))[1]
        if array.ndim==1: ctx.plot(array)
        else: ctx.imshow(array, aspect='auto')
        return ctx

class ShownNumbers(TitledTuple):
    "A tuple of a few numbers; `show` writes them as a title, each with three significant digits"
    def show(self, ctx=None, **kwargs): return show_title(', '.join(f'{o:.3g}' for o in self), ctx=ctx, **kwargs)

class ArraySetup(RegressionSetup):
    """fastai's `RegressionSetup` for arrays of any shape; only `decodes` differs

    It returns a `TitledFloat` for a single number, `ShownNumbers` for up to 10 in one dimension, else `ShownArray`."""
    def decodes(self, o):
        if o.ndim==0: return TitledFloat(o)
        return ShownNumbers(o.tolist()) if o.ndim==1 and len(o)<=_max_shown_numbers else ShownArray(o)

# The function of fastai's class, so that types which a user registers with `RegressionSetup` work here, too
ArraySetup.encodes = vars(RegressionSetup)['encodes']

_max_shown_numbers = 10   # a longer array is shown as a curve

# --- Drawings as sequences
#
# The drawings of a batch have different lengths. `pad_strokes` makes them equal, and `stroke_lengths` and
# `packed_strokes` say again which steps are real.

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
