"""How much slower is loading without the C modules?

Purpose: an epoch from memory, in this process, with both C modules, without `_jpeg`, and without both. Photographs of
         500 x 400 pixels are cropped to 224 by `RandomResizedCrop`; drawings of 100 points are drawn from strokes;
         digits of 28 x 28 pixels are PNGs. The contenders take turns. `fastai_remote doctor` quotes the ratios.

Command: python tests/bench/c_modules.py [--rounds 5]

Result:  results/c_modules.json (two cores): see `ratio`, samples per CPU second compared with both modules.

Reason:  without `_jpeg`, Pillow decodes whole images, where the module decodes the region of the crop. Without `_pixels`,
         NumPy draws, and Pillow opens PNGs.
"""
import argparse, json, statistics, sys, time, warnings
from io import BytesIO
from pathlib import Path
warnings.filterwarnings('ignore')

import numpy as np
import torch
from fastai.data.core import DataLoaders
from fastai.vision.augment import RandomResizedCrop
from PIL import Image

import fastai_remote.block   # adds `from_store` to `DataLoaders`
from fastai_remote.codec import pixels, raster
from fastai_remote.ingest.run import ingest
from fastai_remote.load import lazy_image
from fastai_remote.write.base import MemoryWriter
from machine import about

WITHOUT = {'both modules':[], 'without _jpeg':['_jpeg'], 'without both':['_jpeg','_pixels']}

def photograph(i):
    noise = np.random.default_rng(i).integers(0, 256, (50,40,3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(noise).resize((500,400), Image.Resampling.BICUBIC).save(file, 'JPEG', quality=90)
    return {'jpg':file.getvalue(), 'cls':str(i%3)}

def drawing(i):
    steps = np.random.default_rng(i).integers(-20, 21, (4,2,25))
    return {'strokes':(128+steps.cumsum(2)).clip(0, 255).tolist(), 'cls':str(i%3)}

def digit(i):
    noise = np.random.default_rng(i).integers(0, 256, (7,7), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(noise).resize((28,28), Image.Resampling.BICUBIC).save(file, 'PNG')
    return {'png':file.getvalue(), 'cls':str(i%3)}

def store_of(fn, n):
    writer = MemoryWriter('bench')
    ingest(range(n), writer, fn, num_workers=1, progress=False)
    return writer.store

def speed(store, absent, **kwargs):
    "Samples of an epoch per CPU second, without the modules `absent`"
    changed = [(m, name, getattr(m, name)) for m in (pixels,raster,lazy_image) for name in absent if hasattr(m, name)]
    for module,name,_ in changed: setattr(module, name, None)
    try:
        dl = DataLoaders.from_store(store, bs=50, num_workers=0, normalize=False, device='cpu', **kwargs).train
        next(iter(dl))
        started = time.process_time()
        n = sum(len(batch[0]) for batch in dl)
        return n/(time.process_time()-started)
    finally:
        for module,name,value in changed: setattr(module, name, value)

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    kinds = {'photographs':(store_of(photograph, 500), dict(item_tfms=RandomResizedCrop(224))),
             'drawings':(store_of(drawing, 5000), {}), 'digits as PNGs':(store_of(digit, 10000), {})}
    speeds = {kind:{name:[] for name in WITHOUT} for kind in kinds}
    for _ in range(rounds):
        for kind,(store,kwargs) in kinds.items():
            for name,absent in WITHOUT.items(): speeds[kind][name].append(speed(store, absent, **kwargs))
    results = {}
    for kind,found in speeds.items():
        medians = {name:statistics.median(values) for name,values in found.items()}
        results[kind] = {name:dict(samples_cpu_s=round(value, 1), ratio=round(value/medians['both modules'], 2))
                         for name,value in medians.items()}
    file = Path(__file__).parent/'results'/'c_modules.json'
    where = about(None, 'fastai_remote fastai torch numpy pillow')
    file.write_text(json.dumps(dict(rounds=rounds, results=results, **where), indent=1)+'\n')
    print(json.dumps(results, indent=1))

if __name__=='__main__': main()
