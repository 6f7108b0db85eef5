"Datasets in the memory of this process, for tests that need no server"
import inputs
import numpy as np
from PIL import Image

from fastai_remote.core import MissingSample
from fastai_remote.ingest.stores import MemoryStore
from fastai_remote.write.base import MemoryWriter
from inputs import column as values, encoded

def written(source, fn=None, name='memory', **options):
    "Write `source` to memory, in its order and in this process; returns the store and the report"
    return inputs.in_memory(source, fn, MemoryWriter(name), **options)

def in_memory(source, fn=None, name='memory', **options):
    "A `MemoryStore` with the samples of `source`, converted as `to_redis` does it"
    return written(source, fn, name, **options)[0]

class Counted(MemoryStore):
    "Notes in `reads` of how many samples values were read at a time"
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.reads = []

    def read_values(self, numbers, fields):
        self.reads.append(len(numbers))
        return super().read_values(numbers, fields)

class Lossy(MemoryStore):
    "20 grey images that show their numbers; `png` of samples `missing` is gone, `jpg` of samples `cut` lacks its end"
    def __init__(self, *missing, cut=(), name='lossy'):
        images = [Image.new('L', (32, 32), i) for i in range(20)]
        jpgs = [encoded(im, 'JPEG')[:-150 if i in cut else None] for i,im in enumerate(images)]
        pngs = [encoded(im)[:-40 if i in cut else None] for i,im in enumerate(images)]
        numbers = np.arange(20, dtype='i4')
        columns = {'png':pngs, 'jpg':jpgs, 'k.i4':numbers, 'cls':(numbers%2).astype('u1')}
        super().__init__(columns, name, vocab={'cls':['a', 'b']})
        self.missing = missing

    def read_values(self, numbers, fields):
        gone = [int(i) for i in numbers if i in self.missing]
        if gone and 'png' in fields: raise MissingSample(f'{self.name}: sample {gone[0]} is missing')
        return super().read_values(numbers, fields)
