"A dataset of eight small shards, for tests of shards on S3 and on a storage with faults"
import json

import numpy as np
from fastai.data.core import DataLoaders
from PIL import Image

import fastai_remote.block
from in_memory import encoded

N,EACH,ALWAYS = 80,10,float('inf') # Samples, and samples of a shard

def noise(k):
    "A small JPEG of noise"
    return encoded(Image.fromarray(np.random.default_rng(k).integers(0, 255, (16,16,3)).astype(np.uint8)), 'JPEG')

ITEMS = [{'jpg':noise(i), 'cls':'abc'[i%3], 'id':i} for i in range(N)]
WRITING = dict(maxcount=EACH, num_workers=1, progress=False)

def loaders(store, **kwargs):
    options = {'y':'id', 'bs':8, 'num_workers':0, 'device':'cpu', 'interleave':2, 'seed':1, **kwargs}
    return DataLoaders.from_store(store, **options)
def ids(dl): return [int(i) for _,y in dl for i in y]
def epoch(dls): return sorted(ids(dls.train.new(drop_last=False))+ids(dls.valid))

def is_right(store, numbers=range(N)):
    "Are the images those of the numbers that were written with them?"
    got = store.get_many(numbers, ['jpg','id'], check=True)
    return got['jpg']==[ITEMS[i]['jpg'] for i in got['id'].tolist()]

def alike(one, other):
    "Are two folders, `{name: bytes}`, the same, but for name, time and number of the writing?"
    own = 'uid','created','name','crc'
    manifests = [{key:value for key,value in json.loads(folder['manifest.json']).items() if key not in own}
                 for folder in (one, other)]
    return manifests[0]==manifests[1] and one.keys()==other.keys() and all(
        one[name]==other[name] for name in one if name!='manifest.json')
