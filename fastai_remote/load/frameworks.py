"""Prepares a loader whose batches are divided among the ranks for a framework that divides loaders

Docs: page `load/frameworks`"""

# `RemoteDataset.batches` and `batched` divide an epoch among the ranks. accelerate divides the loaders that it
# prepares, too. Together, each rank would get a quarter of the samples where there are two. So these loaders are
# prepared by `prepare_loader`, and where accelerate has several processes, an epoch that was not is an error that names
# it. HuggingFace's Trainer prepares its loaders with accelerate. The page training has an example for each framework.
#
# `prepare_loader` knows such a loader by its batches or its dataset. It prepares any other loader as accelerate does.

import math

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from fastai.distributed import DistributedDL

from .dataset import BatchedDataset, RemoteBatches
from .distributed import RemoteDistributedDL
from .loader import RemoteDL
from .stream import RemoteStream

def divided_batches(
    loader # A torch `DataLoader`, or what a framework made of one
): # `RemoteBatches`, `BatchedDataset`, `RemoteStream`, or `None` for any other loader
    "What divides the batches of `loader` among the ranks; raises `ValueError` for batches of batches"
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
    batches = divided_batches(loader)
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
    batches = divided_batches(dl)
    if batches is None: return DistributedDL
    raise ValueError(f'{batches!r}: learn.distrib_ctx() would divide a torch DataLoader of a RemoteDataset '
                     'again: make the loaders of a Learner by DataLoaders.from_store')
