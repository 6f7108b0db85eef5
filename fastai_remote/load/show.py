"""Shows batches and results of all kinds of samples

Docs: page `load/show`"""

# fastai shows each input of a sample in the same place, so that the second image of a pair would hide the first one. It
# cannot take a batch with texts apart into samples, and its functions for the results of texts, and of images with
# several targets, fail. `RemoteDL` is a `ShownDL`, which shows these. Everything else is shown by fastai's own
# functions. Those are not changed.

import math, textwrap
from functools import partial

import pandas as pd
import torch
import torch.nn.functional as F
from fastai.data.core import show_results, TfmdDL
from fastai.text.data import TensorText
from fastai.torch_core import (
    batch_to_samples, display_df, get_empty_df, show_image, TensorImage, TitledFloat, TitledInt, TitledStr, TitledTuple)
from fastai.vision.core import LabeledBBox
from fastai.vision.data import get_grid
from fastcore.basics import compose, fastuple, getcallable
from fastcore.foundation import L

from .batch import fetch_of

# --- Samples with several inputs

# Images are shown side by side. A text among the inputs, such as a caption, becomes a title.

class SeveralInputs(fastuple):
    "The inputs of a sample, shown together: images side by side, and anything else as a title"
    def show(self, ctx=None, **kwargs):
        images = [value for value in self if isinstance(value, TensorImage)]
        channels,height = [max((image.shape[k] for image in images), default=0) for k in (0,1)]
        parts = [F.pad(image.expand(channels, -1, -1), (2*(k>0),0,0,height-image.shape[1]))
                 for k,image in enumerate(images)]
        row = torch.cat([part.as_subclass(torch.Tensor) for part in parts], 2)
        ctx = show_image(row, ctx=ctx, **{**images[0]._show_args, **kwargs})
        for value in self:
            if not isinstance(value, TensorImage): ctx = _wrapped(value).show(ctx=ctx)
        return ctx

def _wrapped(value, width=32, longest=96):
    "`value`; of a `TitledStr` the first `longest` characters, divided into lines of `width`"
    return TitledStr(textwrap.fill(value[:longest], width)) if type(value) is TitledStr else value

def _joined_inputs(samples, n_inp):
    "Decoded `samples`, an `L`, with the first `n_inp` values of each, its inputs, in one `SeveralInputs`"
    return samples.map(lambda sample: (SeveralInputs(*sample[:n_inp]),*sample[n_inp:]))

# --- Results that fastai cannot show

# Both functions are called as `show_results` of fastai: `samples` are tuples of one input and the targets, and `outs`
# those of what a model predicted.

def _show_beside(x, y, samples, outs, ctxs=None, max_n=6, figsize=None, **kwargs):
    """Show images with any other target than fastai knows, on the left with the targets, on the right with predictions

    Returns new axes, two for each sample."""
    n = min(len(samples), max_n)
    axes = get_grid(n, ncols=1, figsize=figsize, double=True, title='Target/Prediction')
    for k,(sample,out) in enumerate(zip(samples[:n], outs[:n])):
        for values,axis in ((sample,axes[2*k]),((sample[0],*out),axes[2*k+1])):
            for value,after in zip(values, (*values[1:], None)):
                if not isinstance(after, LabeledBBox): value.show(ctx=axis, **kwargs)   # it shows the boxes, too
    return axes

def _show_texts(x, y, samples, outs, ctxs=None, max_n=10, trunc_at=150, **kwargs):
    """Show texts, of each `trunc_at` tokens, with targets and predictions as a table, and return its rows

    It is what `show_results` of fastai 2.8 is meant to do. That fails, as it calls `show_results[object]`."""
    if ctxs is None: ctxs = get_empty_df(min(len(samples), max_n))
    samples = L((sample[0].truncate(trunc_at),*sample[1:]) for sample in samples)
    stock = show_results._resolve_method_with_cache((object,object,object,object))[0]
    ctxs = stock(x, y, samples, outs, ctxs=ctxs, max_n=max_n, **kwargs)
    display_df(pd.DataFrame(ctxs))
    return ctxs

# --- ShownDL

# A batch whose values are all numbers is shown as a table.

def _unwrapped(number):
    """A number of fastai (`TitledFloat`, …) as a table shows it: a plain `int` or `float`

    A tuple becomes one of floats rounded to four significant digits; if it has one number, a `float`, not rounded."""
    if not isinstance(number, tuple): return number.real
    return tuple(float(f'{v:.4g}') for v in number) if len(number)!=1 else float(number[0])

def _room_for_texts(samples, max_n):
    "`{'figsize': size in inches}` for images that have texts as titles; else an empty dict"
    is_captioned = samples is not None and len(samples) and isinstance(samples[0][0], TensorImage)
    if not is_captioned or not any(type(value) is TitledStr for value in samples[0]): return {}
    n = min(len(samples), max_n)
    columns = max(2, math.ceil(math.sqrt(n)))
    return {'figsize':(4*columns,5*math.ceil(n/columns))}

def _is_image_first(x): return isinstance(x, (tuple,list)) and len(x)>1 and isinstance(x[0], TensorImage)

def _is_texts(values): return isinstance(values, (tuple,list)) and len(values)>0 and isinstance(values[0], str)

class ShownDL(TfmdDL):
    "A `TfmdDL` that shows samples with several inputs, texts, and numbers"
    _joins_inputs = False   # while a batch is shown

    def _decode_batch(self, b, max_n=9, full=True):
        texts = [k for k,values in enumerate(b) if _is_texts(values)] if isinstance(b, (tuple,list)) else []
        if not texts: return super()._decode_batch(b, max_n, full)
        # fastai's `batch_to_samples` does not end for a text, so numbers take its place
        columns = [torch.arange(len(values)) if k in texts else values for k,values in enumerate(b)]
        samples = [tuple(b[k][int(value)] if k in texts else value for k,value in enumerate(sample))
                   for sample in batch_to_samples(type(b)(columns), max_n=max_n)]
        of_dataset = partial(getcallable(self.dataset, 'decode'), full=full)
        return L(samples).map(compose(self.before_batch.decode, self.after_item.decode, of_dataset))

    def show_batch(self, b=None, max_n=9, ctxs=None, show=True, unique=False, **kwargs):
        if show and not unique and ctxs is None:
            if b is None: b = self.one_batch()
            samples = self._pre_show_batch(b, max_n)[2]
            if self._shown_as_table(samples, max_n): return
            kwargs = {**_room_for_texts(samples, max_n), **kwargs}
        self._joins_inputs = show
        try: return super().show_batch(b, max_n, ctxs, show, unique, **kwargs)
        finally: self._joins_inputs = False

    def _pre_show_batch(self, b, max_n=9):
        x,y,samples = super()._pre_show_batch(b, max_n)
        if not self._joins_inputs or not _is_image_first(x): return x,y,samples
        return x[0],y,_joined_inputs(samples, self.n_inp)   # the type of the first input decides how a batch is shown

    def show_results(self, b, out, max_n=9, ctxs=None, show=True, **kwargs):
        x,y,samples,outs = result = super().show_results(b, out, max_n, ctxs, False, **kwargs)
        if not show: return result
        if ctxs is None and self._shown_as_table(samples, max_n, outs): return
        if ctxs is None: kwargs = {**_room_for_texts(samples, max_n), **kwargs}
        if _is_image_first(x): x,samples = x[0],_joined_inputs(samples, self.n_inp)
        self._shower(x, y, samples, outs)(x, y, samples, outs, ctxs=ctxs, max_n=max_n, **kwargs)

    def _shower(self, *args):
        "The function that shows results `args`: that of fastai, or ours for two kinds for which fastai's fails"
        method = show_results._resolve_method_with_cache(args)[0]
        kinds = method.__annotations__
        if method.__module__=='fastai.vision.learner' and 'y' not in kinds: return _show_beside
        is_text = method.__module__=='fastai.text.learner' and kinds.get('x') is TensorText
        return _show_texts if is_text and not hasattr(type(show_results), '__getitem__') else show_results

    def _shown_as_table(self, samples, max_n, outs=None):
        "Show decoded samples, with predictions `outs`, as a table if all values are numbers. Was this done?"
        if samples is None: return False
        rows = [(*sample, *(outs[k] if outs is not None else ())) for k,sample in enumerate(samples[:max_n])]
        shown = TitledFloat,TitledInt,TitledTuple
        if not all(isinstance(value, shown) for row in rows for value in row): return False
        fields = [getattr(fetch_of(tl), 'field', f'value {k}') for k,tl in enumerate(self.dataset.tls)]
        columns = fields if outs is None else fields+[f'predicted {field}' for field in fields[self.n_inp:]]
        display_df(pd.DataFrame([list(map(_unwrapped, row)) for row in rows], columns=columns))
        return True
