"""Random numbers that are functions of a seed and of a place in the training

Docs: page `load/seeds`"""

# Whoever computes a batch gets the same one: any worker, any rank, a process that has just started, or a notebook in
# which one looks at an old batch. So no state of a generator ever has to be saved.

import random

import numpy as np
import torch

from ..order.permutation import MASK64, MIX_A, mix64_int

def key_of(
    *numbers:int # At least 0
)->int: # 63 bits
    "A seed that depends on all `numbers`, and on their order"
    key = len(numbers)
    for n in numbers: key = mix64_int(key, (n+1)*MIX_A&MASK64)
    return key>>1

def seed_all(
    key:int, # 63 bits
    devices:bool=False # The generators of all GPUs, too?
):
    "Seed the global generators of `random`, NumPy and torch, from which fastai's transforms and callbacks draw"
    random.seed(key)
    np.random.seed(key&0xFFFFFFFF)
    torch.default_generator.manual_seed(key)   # `torch.manual_seed` takes a hundred times as long
    if devices and torch.cuda.is_available(): torch.cuda.manual_seed_all(key)
    if devices and torch.backends.mps.is_available(): torch.mps.manual_seed(key)

_SAMPLE,_STEP = 0,1   # what a key is for

class EpochSeeds:
    "Seeds the global generators in one epoch: for each sample by its position, and for each batch by its number"
    def __init__(self,
        key:int, # As `key_of` makes it, of what distinguishes this epoch from others
        step:int=0, # Number in the epoch of the next batch
        rank:int=0 # This rank; it draws its own numbers for its part of a batch
    ): self.key,self.step,self.rank = key,step,rank

    def begin_sample(self,
        position:int, # In the epoch; not the number of the sample, which may be drawn several times
        known:bool=False # Are its transforms those that whole batches are built with? These draw from `random` alone
    ):
        "Called before the transforms of an item, in whichever process they run"
        key = key_of(self.key, _SAMPLE, position)
        if known: random.seed(key)   # 12 of the 30 us that all three generators take in a loader
        else: seed_all(key)

    def begin_step(self):
        "Called before the transforms of the next batch: what they draw, the model and the callbacks, until the next"
        seed_all(key_of(self.key, _STEP, self.step, self.rank), devices=True)
        self.step += 1

_generators = random.Random,np.random.Generator,np.random.RandomState,torch.Generator

def own_generators(
    transforms # Iterable of transforms
)->list: # Names of their types
    "Which of `transforms` hold a random generator of their own, also inside of an object that they hold"
    def has_one(o, depth=2):
        if isinstance(o, _generators): return True
        return depth>0 and any(has_one(value, depth-1) for value in getattr(o, '__dict__', {}).values())
    return [type(t).__name__ for t in transforms if has_one(t)]
