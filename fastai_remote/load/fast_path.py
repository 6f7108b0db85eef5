"""How batches are built: by fastai's own code, or faster where the result is certainly the same

Docs: page `load/fast_path`"""

from dataclasses import dataclass, field

import numpy as np
import torch
from fastai.data.core import Datasets, TfmdLists
from fastai.data.transforms import CategoryMap, IntToFloatTensor, Normalize, RegressionSetup, ToTensor
from fastai.torch_core import TensorCategory, TensorImage, TensorImageBW
from fastai.vision.core import PILImage, PILImageBW, PILMask
from fasttransform import compose_tfms, Pipeline
from fasttransform.cast import retain_type
from torch.utils.data import get_worker_info

from ..codec.arrays import NpyCodec, NpyImageCodec, NpzCodec, NpzImageCodec
from ..codec.images import ImageCodec
from ..codec.pixels import png_pixels
from ..codec.raster import Rasterise
from .batch import fetch_of, NoSamples, OutgoingTensor, StoreInputs, WorkerMemory
from .equivalence import (
    CATEGORY_TFMS, IMAGE_TFMS, is_idle, NotCertain, why_changed, why_image, why_stock_changed, why_unknown)
from .fetch_transform import Fetch
from .lazy_image import BatchMemory, EncodedImage, image_floats, open_image, picture_of
from .timed import stage, TimedBatch

# --- Whole batches
#
# Decoding is a small part of the cost of a small image. Its item transforms, their dispatch, a tensor of its own and
# the copy into the batch cost fifty times as much as drawing a digit. If the item transforms are only `ToTensor`, or
# fastai's own transforms of images, none of this is needed, because the tensors of a batch can be made from all its
# values at once. `WholeBatches` makes them: the same tensors as stock fastai, bit for bit and type for type. What it
# cannot make, or finds damaged, is made item by item, which also raises the right error.

# --- Images

# Plain PNGs are decoded by `png_pixels`. Other PNGs, JPEGs and other formats go through `open_image`, as they do item
# by item.

_array_codecs = NpyCodec,NpzCodec,NpyImageCodec,NpzImageCodec   # what they decode is the pixels of their picture

class _TensorMaker:
    "Makes one tensor of the values of a batch in one pipeline"
    cls = None   # type of the pipeline's own results, before item transforms: `PILImage`, not `TensorImage`
    tfms,split_idx = (),None   # item transforms before `ToTensor` that change these values; `begin` applies them
    def __call__(self, values)->OutgoingTensor:
        """The tensor of a batch, whose `values` are a list or an array, or with `tfms` what `begin` returned

        `None`, or any exception, says that the items have to be made one by one."""
        raise NotImplementedError

def _pixels(image):
    "Pixels of a Pillow image, which may be an `EncodedImage`: shape (height, width) or (height, width, channels)"
    return image.pixels().transpose(1, 2, 0) if isinstance(image, EncodedImage) else np.asarray(image)

class _ImageMaker(_TensorMaker):
    "Makes one tensor of the images of a batch; `None` if they differ in size"
    def __init__(self,
        fetch, # The `Fetch` of the pipeline
        memory, # The `BatchMemory` or `WorkerMemory` for tensors of bytes
        options # Options of `open_image`
    ):
        self.fetch,self.codec,self.cls,self.memory,self.options = fetch,fetch.codec,fetch.img_cls,memory,options
        self.channels = 3 if self.cls._open_args['mode']=='RGB' else 1
        self.headers = {}   # `{header of an npy file: an array that was read from such a file}`

    def begin(self, values, begin_sample):
        """A list of what the item transforms return, each an `EncodedImage` with a `plan`

        It must be called in the order of the batches, because transforms draw random numbers. `values` are those of a
        batch, a list. `begin_sample(k)`, if it is not `None`, is called before the transforms of sample `k`. Raises
        what opening an image or a transform raises."""
        images = self._opened(values)
        for k,image in enumerate(images):
            if begin_sample: begin_sample(k)
            images[k] = compose_tfms(image, self.tfms, split_idx=self.split_idx)
        return [image if isinstance(image, EncodedImage) and image.plan is not None   # a padded one is decoded
                else open_image(image, self.cls) for image in images]

    @stage('decode')
    def _opened(self, values):
        "The images in `values`, a list; JPEGs, arrays and drawings are not decoded yet, or not resized"
        if self.codec.name=='strokes': values = list(self.fetch.draw.arrays(values))
        elif not isinstance(self.codec, ImageCodec): values = [picture_of(self.codec, b) for b in values]
        return [open_image(o, self.cls, **self.options) for o in values]

    def __call__(self, values):
        if self.tfms:
            size = values[0].size
            if any(image.size!=size for image in values): return
            x = self.memory((len(values), self.channels, *size[::-1]))
            for image,pixels in zip(values, x.numpy()): image.pixels(pixels)   # decoded into its part of the tensor
            return OutgoingTensor(x, self.cls._tensor_cls)
        x = self._drawn(values) if self.codec.name=='strokes' else self._joined_arrays(values)
        if x is None: x = self._stacked(map(self._array, values), len(values))
        if x is None: return
        is_mask = issubclass(self.cls, PILMask)
        return OutgoingTensor(x[:,0] if is_mask else x, self.cls._tensor_cls, self.channels//x.shape[1])

    @stage('decode')
    def _drawn(self, values):
        """Drawings of strokes as a tensor of bytes, shape (n, channels, height, width)

        Grey ones are drawn into the tensor itself."""
        if self.fetch.draw.time=='colour': return self._stacked(list(self.fetch.draw.arrays(values)))
        tensors = []
        def empty(n):
            tensors.append(self.memory((n,)))
            return tensors[0].numpy()
        array = self.fetch.draw.arrays(values, empty)
        start = array.ctypes.data-tensors[0].data_ptr()
        return tensors[0].view(-1)[start:start+array.size].view(len(array), 1, *array.shape[1:])

    def _joined_arrays(self, values):
        """The pixels of `values`, npy files that all have the same header, copied into a tensor without parsing each

        A tensor of bytes, shape (n, channels, height, width); `None` for other files, codecs and pixels."""
        if type(self.codec) is not NpyImageCodec: return
        first = values[0]
        start = 10+int.from_bytes(first[8:10], 'little')   # of the pixels
        header,size = first[:start],len(first)
        if first[6:8]!=b'\1\0' or any(len(b)!=size or b[:start]!=header for b in values): return
        like = self.headers.get(header)
        if like is None:
            like = self.codec.from_bytes(first)
            self.headers = {header:like}   # other threads may do the same
        is_plain = like.dtype==np.uint8 and like.flags.c_contiguous and like.nbytes==size-start
        if not is_plain or not self._fits(like): return
        rows = np.frombuffer(b''.join(values), np.uint8).reshape(len(values), size)
        x = rows[:,start:].reshape(len(values), *like.shape)
        x = x[:,None] if like.ndim==2 else x.transpose(0, 3, 1, 2)
        out = self.memory(x.shape)
        out.numpy()[:] = x
        return out

    def _fits(self, array):
        "Can `array` be the pixels of an image of the wanted type, without a conversion? One channel fits RGB, too"
        has_shape = array.ndim==2 or array.ndim==3 and array.shape[2] in {1,self.channels}
        return array.dtype==np.uint8 and array.size>0 and has_shape

    @stage('decode')
    def _stacked(self, arrays, n=None):
        """Arrays of shape (height, width) or (height, width, channels) as a tensor (n, channels, height, width)

        All are `uint8`. If some are grey and some in colour, the grey ones are repeated in all channels. `n` is the
        number of `arrays`, needed if they have no `len`. `None` if they differ in size."""
        out = None
        for k,array in enumerate(arrays):
            array = array[None] if array.ndim==2 else array.transpose(2, 0, 1)
            if out is None:
                out = self.memory((n or len(arrays), *array.shape))
                view = out.numpy()
            if array.shape[1:]!=view.shape[2:]:
                self.memory.give_up(out)
                return
            if len(array)>view.shape[1]:   # the first one in colour, after grey ones
                grey,out = out,self.memory((len(out), 3, *out.shape[2:]))
                out[:k] = grey[:k]
                self.memory.give_up(grey)
                view = out.numpy()
            view[k] = array
        return out

    def _array(self, value):
        "Pixels of one stored value, a `uint8` array of shape (height, width) or (height, width, channels)"
        if isinstance(self.codec, ImageCodec):
            pixels = png_pixels(value, self.channels)
            return _pixels(open_image(value, self.cls)) if pixels is None else pixels
        array = self.codec.array(value)
        if array is None and type(self.codec) in _array_codecs: array = self.codec.from_bytes(value)
        if array is not None and self._fits(array): return array
        return _pixels(open_image(picture_of(self.codec, value), self.cls))

# --- Labels and numbers

@dataclass
class _CategoryMaker(_TensorMaker):
    "Makes category codes: the store's codes become those of the transform's vocabulary"
    labels:list # The store's, in the order of its codes; `None` if it has none
    o2i:dict # `{label: code}` of the transform's vocabulary
    cls = TensorCategory
    def __call__(self, values):
        values = values.tolist()
        if self.labels:
            if min(values)<0: return   # else Python would count from the end
            values = [self.labels[code] for code in values]
        return OutgoingTensor(torch.tensor([self.o2i[o] for o in values]), TensorCategory)

class _NumberMaker(_TensorMaker):
    "Makes floats, as `RegressionSetup` does"
    cls = torch.Tensor
    def __call__(self, values):
        wide = values.astype(np.float64 if values.dtype.kind=='f' else np.int64)   # as Python numbers are
        return OutgoingTensor(torch.from_numpy(wide).float(), torch.Tensor)

# --- WholeBatches

# A pipeline is supported if it begins with `Fetch` and has no further transform, or one of the two above. Transforms
# that do nothing when they encode are ignored: `AddMaskCodes`, which only decodes, and `noop`, which a `DataBlock` uses
# as a getter.

def _maker_of(tl, memory, options):
    """A `_TensorMaker` for pipeline `tl`, a `TfmdLists`; other arguments are as for `_ImageMaker`

    Raises `NotCertain` if it is not certain that a maker gives the same result as stock fastai."""
    fetch,*tfms = tl.tfms.fs
    tfms = [tfm for tfm in tfms if not is_idle(tfm)]
    if type(fetch) is not Fetch: raise NotCertain(f'a pipeline begins with {type(fetch).__name__}, not with Fetch')
    if fetch.convert is not None: raise NotCertain(f'the values of {fetch.field!r} are converted')
    if fetch.img_cls is not None:
        if tfms: raise NotCertain(f'{getattr(tfms[0], "name", tfms[0])} comes after {fetch.field!r}')
        if why:=why_image(fetch.img_cls): raise NotCertain(why)
        draw,is_grey = fetch.draw,fetch.img_cls._open_args['mode']=='L'
        if fetch.codec.name=='strokes' and (type(draw) is not Rasterise or is_grey and draw.time=='colour'):
            raise NotCertain(f'{draw!r} draws {fetch.field!r}')
        return _ImageMaker(fetch, memory, options)
    if len(tfms)!=1 or fetch.codec.dtype is None:
        raise NotCertain(f'{fetch.field!r} is neither an image, a category nor a number with one transform')
    tfm = tfms[0]
    if tfm.split_idx is not None: raise NotCertain(f'{tfm.name} has a split_idx')
    if fetch.codec.name=='cls' and type(tfm) is not RegressionSetup:
        why = why_unknown(tfm, CATEGORY_TFMS, str, int)
        if not why and type(tfm.vocab) is not CategoryMap: why = f'{tfm.name} has a vocabulary of its own kind'
        if why: raise NotCertain(why)
        return _CategoryMaker(fetch.store.manifest.vocab.get(fetch.field), tfm.vocab.o2i)
    why = why_unknown(tfm, (RegressionSetup,), int, float)
    default = torch.get_default_dtype()
    if not why and np.dtype(fetch.codec.dtype).kind=='f' and default not in (torch.float32,torch.float64):
        why = f'{tfm.name} rounds {fetch.field!r} to the default dtype, {default}'
    if why: raise NotCertain(why)
    return _NumberMaker()

def _transforms_of(dl):
    "Flat list of the pipelines of loader `dl` that items pass until they are collated, each before its transforms"
    pipelines = [dl.after_item, dl.before_batch, *(tl.tfms for tl in dl.dataset.tls)]
    return [o for pipeline in pipelines for o in (pipeline, *getattr(pipeline, 'fs', ()))]

class WholeBatches:
    """Makes the batches of a loader as a whole, where it is certain that stock fastai would make the same

    Making a batch has two parts: `begin` is called in the order of the batches, and `finish` may run in any thread."""
    def __init__(self,
        dl # A `RemoteDL`
    ):
        "Raises `NotCertain`"
        dataset = dl.dataset
        if type(dataset) is not Datasets: raise NotCertain(f'the dataset is a {type(dataset).__name__}')
        other = next((type(tl).__name__ for tl in dataset.tls if type(tl) is not TfmdLists), None)
        if other: raise NotCertain(f'the dataset has a {other}')
        if dl.before_batch.fs: raise NotCertain('before_batch transforms see lists of items')
        self.buffers,self.memory = dl.buffers,BatchMemory(3+dl.threads)
        # No other code can write to the bytes of a batch if the `after_batch` of this epoch makes floats of them first
        on_cpu,pipeline = dl.device is None or torch.device(dl.device).type=='cpu',dl.after_batch
        known = pipeline.known if on_cpu and type(pipeline) is BatchPipeline else ()
        self.own = not known or known[0].split_idx not in (None,pipeline.split_idx)   # as for `OutgoingTensor`
        # A loader without workers may be used in a worker of another loader
        self.is_sent = dl.fake_l.num_workers>0 and get_worker_info() is not None
        memory = WorkerMemory(dl.offs, dl.buffers, self.memory) if self.is_sent else self.memory
        self.makers = [_maker_of(tl, memory, {'reducing_gap':dl.reducing_gap}) for tl in dataset.tls]
        self.dl,self.transforms = dl,_transforms_of(dl)
        # The maker of images applies the item transforms
        active,types = [t for t in dl.after_item.fs if not is_idle(t)],[maker.cls for maker in self.makers]
        if not active: raise NotCertain('there is no ToTensor')
        *tfms,last = active
        for t in tfms:
            if why:=why_unknown(t, IMAGE_TFMS, *types): raise NotCertain(why)
        if last.split_idx is not None: raise NotCertain('ToTensor has a split_idx')
        if why:=why_unknown(last, (ToTensor,), *types): raise NotCertain(why)
        if not tfms: return
        images = [maker for maker in self.makers if isinstance(maker, _ImageMaker)]
        if len(images)!=1 or images[0] is not self.makers[0] or types[0] is PILMask:
            raise NotCertain('item transforms see more than one image, or none in the first place')
        images[0].tfms,images[0].split_idx = tfms,dl.after_item.split_idx

    @stage('transform')
    def begin(self,
        columns:list, # The values of each pipeline: a list or an array, one value for each position
        begin_sample=None # `begin_sample(k)`, called before the transforms of sample `k` of the batch
    )->list: # For `finish`; `None` if the items have to be made one by one, which also raises the right error
        """The part of making a batch that draws random numbers

        After transforms were added, removed, replaced or put in another order, items are made one by one."""
        now = _transforms_of(self.dl)
        if len(now)!=len(self.transforms) or any(a is not b for a,b in zip(now, self.transforms)): return
        try: return [maker.begin(values, begin_sample) if maker.tfms else values
                     for maker,values in zip(self.makers, columns)]
        except Exception: return None

    @stage('collate')
    def finish(self,
        begun:list # Result of `begin`
    )->tuple: # A tensor for each pipeline, or in a worker of the loader an `OutgoingTensor`; `None` as in `begin`
        "The batch"
        if begun is None: return
        try: outgoing = [maker(values) for maker,values in zip(self.makers, begun)]
        except Exception: return
        if None in outgoing: return
        for o in outgoing: o.buffers,o.own = self.buffers,self.own
        return tuple(outgoing if self.is_sent else (o.open(self.memory) for o in outgoing))

# --- The decision of an epoch
#
# A loader builds a batch in one of three ways. Stock fastai code builds it item by item. Or it is built item by item
# with images that stay undecoded through the first item transforms, where these are fastai's own. Or the whole batch is
# built at once. The decision is made when an epoch begins, by the types and the implementations that are in force then.

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
    same_samples = len(inputs.same_items())==len(getattr(dl.dataset, 'tls', []))
    why = '' if same_samples else 'the pipelines do not read the same samples'
    try: whole = WholeBatches(dl)
    except NotCertain as e: why = str(e)
    # A reason that names one of the user's transforms helps more than one about fastai, so it comes first
    if changed:=why_stock_changed(): return BatchPath(why=why or changed)
    if not why: return BatchPath(whole=whole)
    is_known = type(dl.dataset) in (Datasets,TfmdLists) and all(type(tl) is TfmdLists for tl in inputs.lists)
    return _undecoded_path(inputs, dl.after_item.fs, why) if is_known else BatchPath(why=why)

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
