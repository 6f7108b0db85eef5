"""Training on several ranks, which agree on a seed instead of a list of indices

Docs: page `load/distributed`"""

# fastai's `DistributedDL` makes a list of all indices on every rank, sends the list of rank 0 to the others, and lets
# each worker iterate over its share. At fifty million samples this takes 4 GB. With `RemoteDistributedDL` the ranks
# only agree on the seed of the epoch, and each computes its own share of the order. If the store has shards, each rank
# reads shards of its own, and so does each of its workers.
#
# `learn.distrib_ctx()` makes a `DistributedDL` of every loader, and that of a `RemoteDL` is a `RemoteDistributedDL`:
# see block. It needs `accelerate`, as fastai's own does.

import math, random, warnings

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from fastai.distributed import DistributedDL
from fastai.torch_core import apply

from ..order.base import Order
from .batch import NoSamples, without_empty
from .dataset import BatchedDataset, RemoteBatches
from .epochs import shard_sizes
from .loader import ending_workers, RemoteDL, WorkerLoader
from .stream import RemoteStream

class RemoteDistributedDL(DistributedDL):
    """`DistributedDL` of a `RemoteDL`: the ranks agree on a seed, and each computes its own share of the epoch

    The ranks of `get_preds` read their batches in turn. So predictions, which fastai gathers batch by batch, have the
    order of the samples."""
    def __init__(self, dl, *args, **kwargs):
        "Raises `ValueError` for a loader with `on_bad='skip'` on several ranks"
        super().__init__(dl, *args, **kwargs)
        self.has_told = False   # that ranks read some of the same shards
        self.fake_l = WorkerLoader(self.fake_l)
        if dl.on_bad=='skip' and self.world_size>1:
            raise ValueError(f"{dl.store_names}: on_bad='skip' would give the ranks different numbers of samples, and "
                             "they would wait for each other: use on_bad='replace' to train on several ranks")

    start = property(lambda self: self.dl.start)   # number of the batch that the epoch begins with, as in `RemoteDL`
    global_bs = RemoteDL.global_bs

    def __len__(self):
        if not self.dl.is_seeded: return super().__len__()
        n,bs = self.dl.n,self.global_bs
        return n//bs if self.drop_last else -(-n//bs)

    def randomize(self):
        self.dl.rank,self.dl.world_size = self.rank,self.world_size
        super().randomize()

    def get_idxs(self):
        dl = self.dl
        if not dl.is_seeded: self._agree()
        self._tell_of_overlap()
        order = dl.get_idxs()
        if not isinstance(order, Order): order = Order(len(order), np.asarray(order, np.int64))
        if dl.in_place: _check_same(order, dl)
        # with a seed, the batches of all ranks together do not depend on the number of ranks
        rest = len(order)%self.global_bs if dl.is_seeded and self.drop_last else 0
        if rest: order = Order(len(order)-rest, order)   # a `WeightedOrder` cannot be sliced
        share = dl.share(order, self.rank, self.world_size)
        self.n,self.n_padded = len(order),len(share)*self.world_size   # for gathering predictions
        return share

    def _tell_of_overlap(self):
        "Warn once, on the first rank, if the shards of lanes that a seed fixes are read by several ranks"
        dl,n,bs = self.dl,self.world_size,self.global_bs
        if self.has_told or self.rank or n==1 or not dl.is_seeded or not dl.shuffle or shard_sizes(dl) is None: return
        if dl.lanes%n==0 and bs%dl.lanes==0: return
        self.has_told = True
        warnings.warn(f'{dl.store_names}: {n} ranks with batches of {bs} samples together do not divide {dl.lanes} '
                      'lanes evenly, so some shards are read by several ranks; they are not with a lanes= that is a '
                      f'multiple of {n} and divides {bs}', stacklevel=3)

    def _agree(self):
        "Gives all ranks the random generator of the first one; with a `seed`, they have the same without asking"
        seed = torch.tensor([self.dl.rng.getrandbits(62)])
        if torch.distributed.is_initialized():
            if torch.distributed.get_backend()=='nccl': seed = seed.cuda()
            torch.distributed.broadcast(seed, 0)
        self.dl.rng = random.Random(int(seed))

    def after_batch(self, b): return b if type(b) is NoSamples else super().after_batch(b)
    def __iter__(self):
        batches = super().__iter__()
        if self.dl.is_seeded: batches = self.dl.seeded_batches(batches)
        return ending_workers(without_empty(batches))

    def to_detach(self, b, cpu=True, gather=True):
        "As fastai's; results of `get_preds` are gathered in the order of the samples, without repeated ones at the end"
        if not gather or not self.dl.in_place or not hasattr(self, 'n_padded'): return super().to_detach(b, cpu, gather)
        b = self._to_detach(b, cpu, gather)
        is_last = self.i*self.world_size>=self.n_padded
        repeated = self.n_padded-self.n if is_last else 0   # samples at the end that have come before
        return apply(lambda x: x[:len(x)-repeated] if getattr(x, 'ndim', 0) else x, b)

    def sample(self): return RemoteDL.sample(self)

    def create_batches(self, samps):
        # The `RemoteDL` builds the batches, and needs the order and the worker of this loader
        self.dl._DataLoader__idxs,self.dl.offs,self.dl.num_workers = self._DataLoader__idxs,self.offs,self.num_workers
        yield from self.dl.create_batches(samps)

def _check_same(order, dl):
    "Raise `ValueError` if the ranks have different orders: `get_preds` drew them, in each rank by itself"
    if not torch.distributed.is_initialized(): return
    checksums = [None]*torch.distributed.get_world_size()
    torch.distributed.all_gather_object(checksums, (len(order),order.checksum()))
    if len(set(checksums))>1:
        raise ValueError(f'{dl.store_names}: get_preds over several ranks needs the same order on each, and this '
                         'loader is shuffled: use dls.valid, dls.test_dl(…), or .new(shuffle=False)')

# --- Loaders of frameworks
#
# `RemoteDataset.batches` and `batched` divide an epoch among the ranks. accelerate divides the loaders that it
# prepares, too. Together, each rank would get a quarter of the samples where there are two. So these loaders are
# prepared by `prepare_loader`, and where accelerate has several processes, an epoch that was not is an error that names
# it. HuggingFace's Trainer prepares its loaders with accelerate. The page training has an example for each framework.
#
# `prepare_loader` knows such a loader by its batches or its dataset. It prepares any other loader as accelerate does.

def _divided_batches(loader):
    """What divides the batches of a torch `DataLoader`, or of what a framework made of one, among the ranks

    It is a `RemoteBatches`, `BatchedDataset` or `RemoteStream`; `None` for any other loader. Raises `ValueError` for
    batches of batches."""
    batches,dataset = getattr(loader, 'batch_sampler', None),getattr(loader, 'dataset', None)
    if isinstance(batches, RemoteBatches): return batches
    if isinstance(dataset, RemoteStream): return dataset
    if not isinstance(dataset, BatchedDataset): return
    if loader.batch_size is not None:
        raise ValueError(f'{dataset.ds.store.name}: ds.batched(…) yields whole batches, and this loader would make '
                         f'batches of {loader.batch_size} of them: DataLoader(ds.batched(…), batch_size=None)')
    return dataset

def _peers(accelerator):
    "The number of processes that read the same samples, by the mesh of `accelerator`: those of a model"
    mesh = getattr(accelerator.state, 'ds_device_mesh', None) or accelerator.torch_device_mesh
    names = () if mesh is None else mesh.mesh_dim_names
    return math.prod(mesh[name].size() for name in ('tp','cp') if name in names)   # tensor and context parallelism

def prepare_loader(
    accelerator:Accelerator,
    loader # A torch `DataLoader`; one of other datasets is prepared by `accelerator.prepare`
): # The loader to iterate over
    """As `accelerator.prepare(loader)`, for a loader whose batches are divided among the ranks already

    They are moved to the device, and accelerate sets the epochs, but does not divide them again. Raises `ValueError` if
    they are divided among another number of ranks, or are those of another rank."""
    batches = _divided_batches(loader)
    if batches is None: return accelerator.prepare(loader)
    peers = _peers(accelerator)
    n,rank = accelerator.num_processes//peers,accelerator.process_index//peers
    if (n,rank)!=(batches.world_size,batches.rank):
        advice = 'leave out rank= and world_size=' if peers==1 else (
            f'give rank=accelerator.process_index//{peers} and world_size={n}, as {peers} processes read the same '
            'samples to divide the model or a sequence')
        raise ValueError(f'{batches!r}: these samples are divided among {batches.world_size} ranks, of which this is '
                         f'rank {batches.rank}, and accelerate has {n}, of which this is rank {rank}: {advice}')
    batches.keep_undivided()
    prepared = prepare_data_loader(
        loader, accelerator.device, num_processes=1, process_index=0, put_on_device=accelerator.device_placement,
        rng_types=accelerator.rng_types.copy(), dispatch_batches=False, non_blocking=accelerator.non_blocking,
        use_stateful_dataloader=accelerator.use_stateful_dataloader)
    prepared._is_accelerate_prepared = True   # else `accelerator.prepare` of it would divide it
    return prepared

def distributed_class(
    dl # A loader that fastai is about to divide among the ranks
)->type:
    """The subclass of `DistributedDL` to use for `dl`

    Raises `ValueError` for a torch `DataLoader` whose batches are divided among the ranks already."""
    if isinstance(dl, RemoteDL): return RemoteDistributedDL
    batches = _divided_batches(dl)
    if batches is None: return DistributedDL
    raise ValueError(f'{batches!r}: learn.distrib_ctx() would divide a torch DataLoader of a RemoteDataset '
                     'again: make the loaders of a Learner by DataLoaders.from_store')
