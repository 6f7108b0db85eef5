"""How wrong a model is about each sample, stored beside the samples

Docs: page `view/losses`"""

# The samples that a model is most wrong about are the ones to look at: a label may be wrong, or a picture damaged.
# fastai's cleaners keep all predictions, and all samples as objects. Here each batch puts three numbers per sample into
# arrays, which then become fields of the dataset, so that it can be sorted and searched by them.

import numpy as np
from fastai.callback.core import Callback
from fastai.torch_core import find_bs
from fastcore.basics import getcallable

from .choose import items_of
from ..load.items import RemoteItems
from ..load.kinds import CONFIDENCE, LOSS, PREDICTED, RESULTS
from ..store.base import Store

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
