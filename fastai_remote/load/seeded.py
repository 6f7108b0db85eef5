"""Loaders whose batches anybody can compute again: what is random is a function of the seed, the epoch and the position

Docs: page `load/seeded`"""

# A place in a training is plain data: the number of the fit, of the epoch in the fit, and of the batch in the epoch. A
# loader with a `seed` computes everything else from it, so that any process can go on there, with any number of
# workers.

import random, warnings

from fastai.data.core import TfmdLists

from .batch import StoreInputs
from .epochs import check_options, shard_sizes
from .fast_path import BatchPipeline
from .items import RemoteItems
from .seeds import EpochSeeds, key_of, own_generators
from ..order.ranks import BatchesInTurn

class SeededDL:
    "What a `RemoteDL` with a `seed` does: a base class"
    seed = None
    fit = epoch = start = 0   # which epoch is next, and the number of the batch that it begins with
    seeds = None   # the `EpochSeeds` of the epoch that is being read, or was not read to its end
    rank,world_size = 0,1   # set by the `RemoteDistributedDL` of this loader
    _warned = False   # about random generators of transforms

    @property
    def is_seeded(self)->bool:
        "Is all that is random a function of `seed`? Not for `get_preds`: each pass of `tta` draws other numbers"
        return self.seed is not None and not self.in_place

    @property
    def global_bs(self)->int:
        "Samples in a batch of all ranks together"
        return (self.bs or 1)*self.world_size

    def set_epoch(self,
        epoch:int, # Its number, from 0 on
        fit:int=0, # Number of the call of `fit`, which has epochs of its own
        start:int=0 # Number of the batch that it begins with: nothing before it is read
    ):
        "Which epoch is read next; a `Learner` calls it. Raises `ValueError` without a `seed`."
        self._check_seed('set_epoch')
        self.fit,self.epoch,self.start,self.seeds = fit,epoch,start,None

    def _check_seed(self, what):
        if self.seed is None: raise ValueError(f'{self.store_names}: {what} needs a loader with seed=')

    # The state, for training loops that are not fastai's

    def state_dict(self)->dict:
        """The place after the batch that was given last, and what the order depends on: plain data

        Raises `ValueError` without a `seed`."""
        self._check_seed('state_dict')
        batch = self.start if self.seeds is None else self.seeds.step
        return self._options()|dict(fit=self.fit, epoch=self.epoch, batch=batch)

    def load_state_dict(self,
        state:dict # What `state_dict` returned, in any process with any number of workers
    ):
        "Begin the next epoch there; after a last batch, with the epoch that follows. Raises what `check_state` raises."
        self.check_state(state)
        is_over = state['batch']>=len(self)
        self.set_epoch(state['epoch']+is_over, state['fit'], 0 if is_over else state['batch'])

    def check_state(self,
        state:dict # What `state_dict` returned
    ):
        "Raise `ValueError` if this loader has other samples or batches than that of `state`, or no `seed`"
        self._check_seed('load_state_dict')
        check_options(self.store_names, state, self._options())

    def _options(self):
        "What batches depend on, as far as it can be compared; `which` is a checksum of some sample numbers"
        items = getattr(self.dataset, 'items', None)
        sizes = shard_sizes(self) if self.shuffle else None
        balance = self.balance if isinstance(self.balance, str|None) else str(self.balance[0])
        by_shards = {} if sizes is None else dict(lanes=self.lanes, interleave=self.interleave)
        return dict(seed=self.seed, samples=self.n, batch_of_all_ranks=self.global_bs, shuffle=self.shuffle,
                    balance=balance, drop_last=self.drop_last,
                    which=items.checksum() if isinstance(items, RemoteItems) else None,
                    shards=None if sizes is None else len(sizes), **by_shards)

    # An epoch

    def seed_epoch(self):
        """Make `seeds` and `rng` for the epoch that begins; warns once about transforms with generators of their own

        Raises `ValueError` if `after_batch` was replaced."""
        # transforms that are set up by a batch are so before the end of `__init__`
        if type(BatchPipeline.of(self.after_batch)) is not BatchPipeline:
            raise ValueError(f'{self.store_names}: seed= needs an after_batch that is a Pipeline, not a '
                             f'{type(self.after_batch).__name__}')
        key = key_of(self.seed, self.fit, self.epoch)
        self.seeds = self.after_batch.seeds = EpochSeeds(key, self.start, self.rank)
        self.rng = random.Random(key)
        lists = [tl for tl in StoreInputs(self.dataset).lists if isinstance(tl, TfmdLists)]
        pipelines = self.after_item,self.before_batch,self.after_batch,*(tl.tfms for tl in lists)
        names = own_generators(t for pipeline in pipelines for t in getattr(pipeline, 'fs', ()))
        if not names or self._warned: return
        self._warned = True
        warnings.warn(f'{self.store_names}: {", ".join(names)} has a random generator of its own, which seed= does not '
                      'reach: draw from the functions of random, numpy.random or torch', stacklevel=3)

    def seeded_batches(self,
        batches # Generator of the batches of an epoch, or `NoSamples`
    ): # Yields them
        "The batches of an epoch: each is made with its own random numbers, and the next epoch follows the last"
        pipeline,seeds = self.after_batch,None
        try:
            while True:
                # between two batches, another epoch of this loader may have begun, such as that of `one_batch`
                if seeds is not None: self.seeds = pipeline.seeds = seeds
                try: batch = next(batches)
                except StopIteration: break
                finally: pipeline.seeds = None
                seeds = self.seeds
                yield batch
                del batch
            self.set_epoch(self.epoch+1, self.fit)
        finally: batches.close()

    def one_batch(self):
        before = self.seeds,self.threads,self.prefetch
        self.threads = self.prefetch = 0   # the batches after it would be read and built for nothing
        try: return super().one_batch()
        finally: self.seeds,self.threads,self.prefetch = before

    def first_of(self,
        k:int # Number of a batch of this process
    )->int:
        "The place in the epoch of its first sample; without a `seed`, in the part of this rank"
        first = (self.start+self.offs+k*self.num_workers)*(self.bs or 1)
        if self.world_size==1 or not self.is_seeded: return first
        return int(BatchesInTurn(self.n, self.rank, self.world_size, self.bs or 1)[first])

    def seeded(self,
        positions, # Of the samples of a batch, an iterable
        first:int # The place in the epoch of the first of them
    ): # Yields them
        "The positions; before each, what is drawn for its sample is seeded, if there is a `seed`"
        for k,position in enumerate(positions):
            if self.is_seeded: self.seeds.begin_sample(first+k)
            yield position
