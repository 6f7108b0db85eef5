"""Decides once per epoch how batches are built: by fastai's own code, or faster where the result is certainly the same

Docs: page `load/fast_path`"""

# A loader builds a batch in one of three ways. Stock fastai code builds it item by item. Or it is built item by item
# with images that stay undecoded through the first item transforms, where these are fastai's own. Or the whole batch is
# built at once. The decision is made when an epoch begins, by the types and the implementations that are in force then.

from dataclasses import dataclass, field

import numpy as np
import torch
from fastai.data.core import Datasets, TfmdLists
from fastai.data.transforms import IntToFloatTensor, Normalize
from fastai.torch_core import TensorImage, TensorImageBW
from fastai.vision.core import PILImage, PILImageBW
from fasttransform import compose_tfms, Pipeline
from fasttransform.cast import retain_type

from .batch import fetch_of, NoSamples, StoreInputs
from .equivalence import IMAGE_TFMS, is_idle, NotCertain, why_changed, why_image, why_stock_changed, why_unknown
from .fetch_transform import Fetch
from .lazy_image import BatchMemory, image_floats
from .timed import TimedBatch
from .whole import WholeBatches

# --- BatchPipeline

# A pipeline of batch transforms that begins with fastai's `IntToFloatTensor`, or with this and `Normalize`, writes the
# floats into memory that is reused.

class BatchPipeline(Pipeline):
    """An `after_batch` that reuses memory if it begins with fastai's `IntToFloatTensor`, and then also for `Normalize`

    Everything else is done as `Pipeline` does it."""
    memory = None   # the `BatchMemory` of the floats
    known = ()   # the first transforms, during an epoch at whose beginning they were `known_tfms()`
    seeds = None   # the `EpochSeeds`, during an epoch of a loader with a `seed`
    times = None   # `BatchTimes`, if the batches of the loader are to be timed
    @classmethod
    def of(cls,
        pipeline # The `after_batch` of a loader
    ):
        "Change the class of `pipeline` to this one, unless it is of a class of its own"
        if type(pipeline) is Pipeline: pipeline.__class__,pipeline.memory = cls,BatchMemory()
        return pipeline

    def known_tfms(self)->tuple:
        "The first transforms that need not run as fastai's code: none, `IntToFloatTensor`, or this and `Normalize`"
        if why_stock_changed() or why_changed(*_images): return ()
        is_known = [not why_unknown(t, (cls,), *_images) for t,cls in zip(self.fs, (IntToFloatTensor,Normalize))]
        return tuple(self.fs[:is_known.index(False) if False in is_known else len(is_known)])

    def __call__(self, o):
        if type(o) is TimedBatch: return self.times.opened(o, self)
        if self.seeds is not None: self.seeds.begin_step()
        if type(o) is NoSamples: return o
        if not self.known or type(o) is not tuple or not any(type(x) in _images for x in o): return super().__call__(o)
        n,tfms = len(self.known),list(self.fs)
        if len(tfms)<n or any(a is not b for a,b in zip(tfms, self.known)):   # changed during the epoch
            return super().__call__(tuple(map(_own_channels, o)))
        return compose_tfms(tuple(map(self._floats, o)), tfms[n:], split_idx=self.split_idx)

    def _floats(self, x):
        "What the known transforms make of `x`, an element of a batch; floats of images are in reused memory"
        tfms = [t for t in self.known if t.split_idx in (None,self.split_idx)]
        if type(x) not in _images or not tfms or type(tfms[0]) is not IntToFloatTensor or np.ndim(tfms[0].div):
            return compose_tfms(x, tfms, split_idx=self.split_idx)
        div,stats = tfms[0].div,_stats_of(tfms[1], x) if len(tfms)>1 else None
        floats = image_floats(x, div, self.memory, stats)
        if floats is None: return compose_tfms(x, tfms, split_idx=self.split_idx)
        return compose_tfms(retain_type(floats, x), tfms[2 if stats else 1:], split_idx=self.split_idx)

_images = TensorImage,TensorImageBW

def _stats_of(t, x):
    "What `t`, a `Normalize`, has for the channels of images `x`, for `image_floats`; `None` if it is of another kind"
    shape = 1,x.as_subclass(torch.Tensor).shape[1],1,1
    known = [o for o in (t.mean, t.std) if type(o) in (torch.Tensor,type(x)) and o.dtype==torch.float32
             and o.device.type=='cpu' and not o.requires_grad and o.shape==shape]
    return tuple(o.as_subclass(torch.Tensor).flatten().contiguous().numpy() for o in known) if len(known)==2 else None

def floats_next(
    dl # A `RemoteDL`
)->bool:
    "Does `after_batch` convert a batch of bytes to floats, before any other code can write to it?"
    pipeline = dl.after_batch
    on_cpu = dl.device is None or torch.device(dl.device).type=='cpu'
    known = pipeline.known_tfms() if type(pipeline) is BatchPipeline and on_cpu else ()
    return len(known)>0 and known[0].split_idx in (None, pipeline.split_idx)

def _own_channels(x):
    "`x`; a copy if it is a tensor of images whose channels are one and the same memory"
    is_shared = type(x) in _images and x.ndim==4 and x.shape[1]>1 and x.stride(1)==0
    return x.contiguous() if is_shared else x

# --- The decision

# `decide_path` returns a `BatchPath`. `RemoteDL.explain` prints its reason.

@dataclass
class BatchPath:
    "How a loader builds its batches in one epoch"
    whole:WholeBatches=None # Builds whole batches, if the result is certainly the same
    fetches:list=field(default_factory=list) # Otherwise: each `Fetch` whose images stay undecoded
    known:tuple=() # The first item transforms, which these images pass undecoded
    why:str='' # What prevents whole batches

    def explain(self,
        after_item:Pipeline # The item transforms
    )->str:
        "How the batches are built, and what prevents a faster way, in one sentence"
        if self.whole: return "Whole batches are built at once: all transforms of items are fastai's own, unchanged."
        passed = [t for t in self.known if not is_idle(t)] if self.fetches else []
        names = ', '.join(t.name.split(' -- ')[0] for t in passed)
        how = f'images stay undecoded through {names}' if names else "by fastai's own code"
        return f'Items are built one by one, {how}: {self.why}.'

    def n_known(self,
        item_tfms # The item transforms now, a list
    )->int:
        "Number of item transforms that images pass undecoded; 0 if the transforms were changed during the epoch"
        is_same = len(item_tfms)>=len(self.known) and all(a is b for a,b in zip(item_tfms, self.known))
        return len(self.known) if is_same else 0

def decide_path(
    dl # A `RemoteDL`
)->BatchPath:
    "How `dl` builds its batches. Stock fastai code does whatever is not certainly the same otherwise."
    inputs = StoreInputs(dl.dataset)
    if not inputs.fetches: return BatchPath(why='the items are not samples of a store')
    if why:=dl.why_not_stock(): return BatchPath(why=why)
    if why:=_why_other_pipelines(dl, inputs.lists): return BatchPath(why=why)
    same_samples = len(inputs.same_items())==len(getattr(dl.dataset, 'tls', []))
    why = '' if same_samples else 'the pipelines do not read the same samples'
    try: whole = WholeBatches(dl, own=not floats_next(dl))
    except NotCertain as e: why = str(e)
    # A reason that names one of the user's transforms helps more than one about fastai, so it comes first
    if changed:=why_stock_changed(): return BatchPath(why=why or changed)
    if not why: return BatchPath(whole=whole)
    is_known = type(dl.dataset) in (Datasets,TfmdLists) and all(type(tl) is TfmdLists for tl in inputs.lists)
    return _undecoded_path(inputs, dl.after_item.fs, why) if is_known else BatchPath(why=why)

def _why_other_pipelines(dl, lists):
    "Which pipeline that an item of `dl` passes is not one of fastai; empty if all are. `lists` are its `TfmdLists`."
    pipelines = {'after_item':dl.after_item, 'before_batch':dl.before_batch}
    for k,tl in enumerate(lists):
        if not isinstance(tl, TfmdLists): continue
        if '_after_item' in vars(tl): return f'_after_item of pipeline {k} of the dataset was replaced on the object'
        pipelines[f'pipeline {k} of the dataset'] = tl.tfms
    wrong = next((name for name,pipeline in pipelines.items() if type(pipeline) is not Pipeline), None)
    return f'{wrong} is a {type(pipelines[wrong]).__name__}, not a Pipeline' if wrong else ''

def _undecoded_path(inputs, item_tfms, why):
    """`BatchPath` of items whose images stay undecoded through the first item transforms, as far as these are known

    `why` is what prevents whole batches. No image stays undecoded if the first transform is not known."""
    def can_wait(tl):
        fetch = fetch_of(tl)
        if type(fetch) is not Fetch or fetch.img_cls not in (PILImage,PILImageBW): return False
        return not why_image(fetch.img_cls) and all(map(is_idle, tl.tfms.fs[1:]))
    other = [fetch_of(tl) for tl in inputs.lists if not can_wait(tl)]   # a `Fetch` may be in several pipelines
    fetches = [fetch for fetch in inputs.fetches if not any(fetch is o for o in other)]
    types = {fetch.img_cls for fetch in fetches}
    def is_known(t): return is_idle(t) or not why_unknown(t, IMAGE_TFMS, *types)
    n_known = 0
    while fetches and n_known<len(item_tfms) and is_known(item_tfms[n_known]): n_known += 1
    return BatchPath(None, fetches if n_known else [], tuple(item_tfms[:n_known]), why)
