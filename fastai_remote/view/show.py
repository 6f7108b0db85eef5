"""Samples of a store, shown as fastai shows those of a batch, and how wrong a model is about each

Docs: page `view/show`"""

import textwrap

import numpy as np
import pandas as pd
from fastai.callback.core import Callback
from fastai.torch_core import display_df, find_bs, TitledStr
from fastai.vision.core import LabeledBBox, PILImage, PILMask, TensorBBox, TensorPoint
from fastai.vision.data import get_grid
from fastcore.basics import getcallable

from ..load.audio import audio_of
from ..load.items import RemoteItems
from ..load.kinds import CONFIDENCE, LOSS, PREDICTED, RESULTS
from ..store.base import field_codec, Store
from .overview import chosen_numbers, items_of
from .pictures import box_labels, cut_text, label_texts, read_values, shown_kind, shown_value, tile_fields

# --- Losses
#
# The samples that a model is most wrong about are the ones to look at: a label may be wrong, or a picture damaged.
# fastai's cleaners keep all predictions, and all samples as objects. Here each batch puts three numbers per sample into
# arrays, which then become fields of the dataset, so that it can be sorted and searched by them.

class SampleLosses(Callback):
    "Gathers the loss of each sample of a pass, and if the target is a category, what was predicted"
    def __init__(self,
        n:int, # Samples of the dataset
        items:RemoteItems, # The samples of the pass
        positions, # Positions in `items`, in the order of the batches
        activation # Makes probabilities of what the model returns
    ):
        self.n,self.items,self.positions,self.activation,self.done = n,items.items,positions,activation,0
        self.losses = np.full(n, np.nan, np.float32)
        self.codes = self.confidences = None # Codes in the vocabulary of the model, -1 for none; and probabilities

    def after_batch(self):
        pred,targets,loss = self.learn.pred,self.learn.yb,self.learn.loss
        n = find_bs(targets)
        numbers = np.asarray(self.items[np.asarray(self.positions[np.arange(self.done, self.done+n)])])
        self.done += n
        self.losses[numbers] = _array(loss.view(n, -1).float().mean(1))
        is_category = len(targets)==1 and targets[0].ndim==1 and not targets[0].is_floating_point()
        if not is_category or getattr(pred, 'ndim', 0)!=2: return
        if self.codes is None:
            self.codes,self.confidences = np.full(self.n, -1, np.int32),np.full(self.n, np.nan, np.float32)
        confidences,codes = self.activation(pred).max(-1)
        self.codes[numbers],self.confidences[numbers] = _array(codes),_array(confidences)

def _array(tensor): return tensor.detach().cpu().numpy()

def add_losses(
    store:Store, # The dataset
    learn, # As in `DatasetOps.add_losses`, like what follows
    split:str|list='valid',
    bs:int=None
)->Store: # The new version
    "Do what `DatasetOps.add_losses` does"
    items = items_of(store, split)
    found = sample_losses(store, learn, items, bs)
    fields,vocab = {LOSS:found.losses},{}
    if found.codes is not None:
        fields[PREDICTED],vocab[PREDICTED] = _labels(found.codes, list(learn.dls.vocab))
        fields[CONFIDENCE] = found.confidences
    left = [field for field in RESULTS if field in store.fields and field not in fields]
    if left: store = store.drop_fields(*left)   # of a model with another kind of target
    return store.add_fields(fields, replace=True, vocab=vocab, num_workers=0, progress=False)

def sample_losses(
    store:Store, # The dataset
    learn, # As in `add_losses`
    items:RemoteItems, # The samples
    bs:int=None # As in `add_losses`
)->SampleLosses: # With the results
    "Loss, prediction and confidence of each of some samples; raises `CorruptSample` and `MissingSample`"
    dl = learn.dls.test_dl(items, with_labels=True, **({} if bs is None else {'bs':bs}))
    order = dl.get_idxs()
    dl = dl.new(get_idxs=lambda: order)
    activation = getcallable(learn.loss_func, 'activation')
    found = SampleLosses(len(store), items, order, activation)
    with learn.validation_context(cbs=[found]), learn.loss_not_reduced(): learn._do_epoch_validate(dl=dl)
    if found.done!=len(items):
        raise ValueError(f'{store.name}: the model was given {found.done:,} of {len(items):,} samples')
    return found

def _labels(codes, vocab):
    "Values of a field with labels for `codes` in `vocab`, where -1 stands for none; and the vocabulary of the field"
    is_text = any(isinstance(label, str) for label in vocab)
    vocab = [str(label) if is_text else int(label) for label in vocab]
    if (codes<0).any(): vocab.append('' if is_text else min([0,*vocab])-1)
    codes = np.where(codes<0, len(vocab)-1, codes)
    return (codes if is_text else np.array(vocab)[codes]),vocab

# --- Showing
#
# fastai's types know how they are shown: an image draws itself on axes, a mask half transparent over it, boxes and
# points on it, and a label is the title. Samples that consist of texts and numbers are rows of a table. So a value of a
# store becomes such a type first. What cannot be read is shown as its error.
#
# matplotlib takes `$` in a title for the beginning of a formula. Titles here are plain text.

_DRAWN = 'image','drawing','mask','boxes','points','audio' # Kinds that are not only text, in the order of drawing
_PIXELS = 400 # Longer side of the images that are drawn; more would only take longer
_LINE,_LINES = 28,3 # Characters of a line of a title, and lines of a text

def show_samples(
    store:Store,
    numbers=None, # As in `DatasetOps.show`, like what follows
    n:int=12,
    split:str=None,
    where:dict=None,
    label=None,
    ncols:int=None, # Columns of the grid
    figsize:tuple=None, # Its width and height in inches
    **kwargs # As for `get_grid`
): # List of axes, or a DataFrame
    "Do what `DatasetOps.show` does"
    numbers = chosen_numbers(store, numbers, n, split, where, label)
    if not len(numbers): raise ValueError(f'{store.name}: there is no sample to show')
    fields = tile_fields(store)
    values = read_values(store, numbers, fields)
    samples = [{field:shown_value(store, number, field, values[field][k], _PIXELS) for field in fields}
               for k,number in enumerate(numbers.tolist())]
    if not any(shown_kind(store, field) in _DRAWN for field in fields): return _show_table(numbers, samples)
    n_columns = ncols or min(len(numbers), 4)
    n_rows = -(-len(numbers)//n_columns)
    axes = get_grid(len(numbers), ncols=n_columns, figsize=figsize or (3*n_columns,3*n_rows), **kwargs)
    for k,(number,sample,ax) in enumerate(zip(numbers.tolist(), samples, axes)):
        recordings = {field:audio_of(field_codec(store, field).from_bytes(values[field][k]))
                      for field,shown in sample.items() if shown.kind=='audio'}
        _show_on(ax, number, list(sample.values()), recordings)
    # room for the titles, without which `tight_layout` would have to be called twice
    n_lines = max(ax.get_title().count('\n')+1 for ax in axes)
    if not figsize: axes[0].figure.set_figheight((3.2+.2*n_lines)*n_rows)
    axes[0].figure.tight_layout()
    return axes

def _show_table(numbers, samples):
    "Samples without pictures as a table, which is displayed and returned"
    table = pd.DataFrame([{field:shown.text for field,shown in sample.items()} for sample in samples], index=numbers)
    with pd.option_context('display.max_colwidth', 160): display_df(table)
    return table

def _show_on(ax, number, values, recordings):
    "Draw one sample: `values` is a list of `Shown`, `recordings` are `{field: TensorAudio}`"
    labels = box_labels(values)
    titles = {shown.kind:shown.text for shown in reversed(values) if shown is not labels}
    bases = [shown for kind in ('image','drawing') for shown in values if shown.kind==kind][:1]
    drawn = bases+[shown for kind in ('mask','boxes','points') for shown in values if shown.kind==kind]
    drawn = drawn or [shown for shown in values if shown.kind=='audio'][:1]
    for shown in drawn: _as_fastai(shown, labels, recordings).show(ctx=ax, **_extent(shown))
    if not any(shown.kind=='audio' for shown in drawn): ax.axis('off')
    texts = label_texts(values)
    other = next((titles[kind] for kind in ('text','tokens') if titles.get(kind)), None)
    if other: texts.append('\n'.join(textwrap.wrap(other[:_LINE*_LINES], _LINE)))
    elif not texts and 'number' in titles: texts.append(titles['number'])
    errors = [shown.text for shown in values if shown.kind=='error']
    for text in [*texts, *('\n'.join(textwrap.wrap(error[:160], _LINE)) for error in errors), f'#{number}']:
        TitledStr(text).show(ctx=ax)
    for drawn in [ax.title, *ax.texts]: drawn.set_parse_math(False)

def _extent(shown):
    "Arguments of `imshow` that give an image that was made smaller the coordinates of the one that is stored"
    if shown.kind not in ('image','drawing','mask'): return {}
    width,height = shown.full_size
    place = {'extent':(-.5,width-.5,height-.5,-.5)}
    if shown.kind=='mask': place |= {'vmin':0, 'vmax':max(int(shown.marks.max()), 1), 'interpolation':'nearest'}
    return place

def _as_fastai(shown, labels, recordings):
    "What is shown as an object of fastai, which shows itself"
    if shown.kind in ('image','drawing'): return PILImage(shown.image.convert('RGB'))
    if shown.kind=='mask': return PILMask.create(shown.marks)
    if shown.kind=='points': return TensorPoint.create(shown.marks)
    if shown.kind=='audio': return recordings[shown.field]
    boxes = TensorBBox.create(shown.marks)
    if labels is None or len(labels.marks)!=len(shown.marks): return boxes   # they are those of other boxes
    return LabeledBBox(boxes, [cut_text(label, 24) for label in labels.marks])
