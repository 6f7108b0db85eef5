"""Does reading samples from Redis cost throughput? `DataLoaders.from_redis` and stock `ImageDataLoaders.from_folder`

Purpose: one epoch of the training loader over the same JPEG files, with the same sizes of the splits and the same item
         transforms (`RandomResizedCrop(224)` and a flip, both in the workers), batches of 64 and two workers. The
         contenders take turns in one run, in an order that is reversed in every round, so that ratios are valid on a
         machine with other work.

Command: python tests/bench/loader.py [FOLDER] [--n 640] [--rounds 5] [--size 350]
         Without FOLDER it makes photo-like JPEGs. FOLDER has one subfolder per class, or file names that begin with
         `CLASS_`.

Result:  330 ImageNet photographs, each read six times (results/loader.json: two cores, 5 rounds). RemoteDL gave 1.88
         times the samples per CPU second of stock fastai reading files from the page cache, and 1.87 times the
         samples/s. The first batch arrived in 0.74 of the time, and a worker had 1.09 times the private memory. Shrunk
         to 256 pixels when they were written, the same photographs gave 2.9 times the samples per CPU second. (This
         benchmark reads the memory at every batch, which costs each contender a little. peers.py compares threads and
         all other loaders.)

Reason:  only the region of the crop is decoded and resized, and batches are filled in place; see the decision notes
         0016 and 0017. The CPU time of the server is included and is a fiftieth.

Tried:   glibc was told to keep freed memory (`mallopt`) in the workers. We expected to gain a tenth, as in a single
         process. It gained 1% and cost 12 MB per worker, so it was not kept.
"""
import argparse, gc, json, multiprocessing, os, resource, statistics, tempfile, time
from pathlib import Path

import numpy as np
import torch
from fastai.data.core import DataLoaders
from fastai.vision.augment import FlipItem, RandomResizedCrop
from fastai.vision.data import ImageDataLoaders
from PIL import Image

import fastai_remote.block   # adds `from_redis` to `DataLoaders`
from fastai_remote import image_samples, redis_server, shrink, to_redis
from fastai_remote.core import size_str
from machine import about
from rounds import spread

STOCK,OURS,SMALL = 'stock fastai, files','RemoteDL, Redis','RemoteDL, Redis, shrink(256)'
UNITS = dict(samples_s='samples/s', samples_cpu_s='samples/CPU s', first_s='first batch, s',
             worker_mb='worker private, MB')

# Data

def make_images(
    folder, # Where to write them, one subfolder per class
    n, # Number of images
    size # Shorter side in pixels, approximately
):
    "Write `n` photo-like JPEGs of four classes: noise at five scales, and grain"
    rng = np.random.default_rng(0)
    for i in range(n):
        width,height = int(size*rng.uniform(1.2, 1.5)),int(size*rng.uniform(.95, 1.1))
        pixels = rng.uniform(60, 190, 3)+rng.normal(0, 7, (height,width,1))
        for cells in (3, 7, 20, 60, 180):
            noise = Image.fromarray(rng.integers(0, 256, (cells*3//4,cells,3), np.uint8))
            noise = noise.resize((width,height), Image.Resampling.BICUBIC)
            pixels = pixels+(np.asarray(noise, float)-128)*1.2/cells**.3
        class_folder = folder/f'class{i%4}'
        class_folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(class_folder/f'{i:05}.jpg', quality=90)

def link_images(
    folder, # Folder of images
    to, # Folder of links, one subfolder per class
    n # Number of links
): # Number of images in `folder`
    "Make `n` links to the images of `folder`; images are used several times if there are fewer"
    paths = list(image_samples(folder).paths)
    for i in range(n):
        path = paths[i%len(paths)].resolve()
        label = path.parent.name if path.parent!=Path(folder).resolve() else path.stem.split('_')[0]
        class_folder = to/label
        class_folder.mkdir(parents=True, exist_ok=True)
        (class_folder/f'{i:05}{path.suffix}').symlink_to(path)
    return len(paths)

# Measurement

def private_mb(pid):
    "Memory in MB that process `pid` shares with no other process; None if the process has ended"
    try: lines = Path(f'/proc/{pid}/smaps_rollup').read_text().splitlines()
    except OSError: return None
    return sum(int(line.split()[1]) for line in lines if line.startswith('Private_'))/1000 or None

def cpu_seconds(pid):
    "CPU seconds of this process, of its children that have ended, and of the server with process id `pid`"
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF,resource.RUSAGE_CHILDREN)]
    ticks = sum(map(int, Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[11:13]))
    return sum(usage.ru_utime+usage.ru_stime for usage in usages)+ticks/os.sysconf('SC_CLK_TCK')

def epoch(
    dl, # A loader
    server # Process id of the server
): # `{measure: value}`
    "Measure one epoch"
    gc.collect()
    n,first,memory = 0,None,{}
    cpu_before,started = cpu_seconds(server),time.perf_counter()
    for batch in dl:
        n += len(batch[0])
        first = first or time.perf_counter()-started
        for process in multiprocessing.active_children():
            private = private_mb(process.pid)
            if private: memory[process.pid] = max(private, memory.get(process.pid, 0))
    seconds = time.perf_counter()-started
    while multiprocessing.active_children(): time.sleep(.01)   # their CPU time is counted after they have ended
    return dict(samples_s=n/seconds, samples_cpu_s=n/(cpu_seconds(server)-cpu_before), first_s=first,
                worker_mb=statistics.mean(memory.values()) if memory else 0.)

def run(
    folder=None, # Folder of images; default: make some
    n:int=640, # Number of samples; images are used several times if there are fewer
    rounds:int=5, # Timed epochs of each contender
    size:int=350, # Shorter side of images that are made, in pixels
    name:str=None, # Name of the data in the results
)->dict: # Content of the result file
    "Measure the contenders in turns"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)   # threads that wait for a core spin, which would be noise here
    try: return run_in_one_thread(folder, n, rounds, size, name)
    finally: torch.set_num_threads(threads)

def make_loaders(images, n, server):
    "The `DataLoaders` of each contender, and the mean size of its samples in bytes"
    options = dict(valid_pct=.01, seed=0, bs=min(64, n//2), num_workers=2, device='cpu',
                   item_tfms=[RandomResizedCrop(224),FlipItem()])
    loaders = {STOCK:ImageDataLoaders.from_folder(images, **options)}
    sizes = {STOCK:sum(path.stat().st_size for path in images.rglob('*') if path.is_file())/n}
    for contender,dataset,fn in ((OURS,'asis',None),(SMALL,'small',shrink(256))):
        source = image_samples(images, label=lambda path: path.parent.name)
        report = to_redis(source, server.url, dataset, fn=fn, num_workers=1, progress=False)
        if report.failed: raise ValueError(f'stock fastai would stop at these images: {report}')
        loaders[contender] = DataLoaders.from_redis(server.url, dataset, normalize=False, **options)
        sizes[contender] = report.nbytes/n
    return loaders,sizes

def run_in_one_thread(folder, n, rounds, size, name):
    with tempfile.TemporaryDirectory(prefix='fr-bench-') as temporary, redis_server(port=-1) as server:
        temporary = Path(temporary)
        if folder is None: make_images(temporary/'made', n, size)
        n_files = link_images(folder or temporary/'made', temporary/'images', n)
        loaders,sizes = make_loaders(temporary/'images', n, server)
        for dls in loaders.values(): epoch(dls.train, server.proc.pid)   # not counted
        epochs = {contender:[] for contender in loaders}
        for i in range(rounds):
            for contender in list(loaders)[::1 if i%2 else -1]:
                epochs[contender].append(epoch(loaders[contender].train, server.proc.pid))
        where = about(server.url, 'torch fastai pillow redis numpy')
    contenders,ratios = {},{}
    for contender,measured in epochs.items():
        spreads = {unit:spread([e[unit] for e in measured]) for unit in UNITS}
        contenders[contender] = {'bytes_a_sample':round(sizes[contender]), **spreads}
        def ratio(unit):
            pairs = [(e[unit], stock[unit]) for e,stock in zip(measured, epochs[STOCK])]
            return round(statistics.median(ours/stock if stock else 1. for ours,stock in pairs), 3)
        ratios[contender] = {unit:ratio(unit) for unit in UNITS}
    data = name or f"{Path(folder).name if folder else 'made'}, {n_files} JPEGs"
    return dict(data=data, n=n, rounds=rounds, contenders=contenders, ratios_to_stock=ratios, **where)

def table(result):
    "The lines of a readable table: medians, minima, maxima, and ratios to stock fastai"
    yield (f"{result['data']}: {result['n']} samples, {result['rounds']} rounds; median (min to max), and the median "
           'ratio to stock fastai')
    for contender,measures in result['contenders'].items():
        yield f"\n{contender}, {size_str(measures['bytes_a_sample'])} per sample"
        for unit,title in UNITS.items():
            measure,ratio = measures[unit],result['ratios_to_stock'][contender][unit]
            yield (f"  {title:20}{measure['median']:9.2f}  ({measure['min']:.2f} to {measure['max']:.2f})   "
                   f'x {ratio:.2f}')

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('folder', nargs='?', help='images; default: make some')
    parser.add_argument('--n', type=int, default=1980, help='number of samples')
    parser.add_argument('--rounds', type=int, default=5, help='timed epochs of each contender')
    parser.add_argument('--size', type=int, default=350, help='shorter side of images that are made, in pixels')
    parser.add_argument('--name', help='name of the data in the results')
    parser.add_argument('--out', default=Path(__file__).parent/'results'/'loader.json',
                        help='result file; an empty text writes none')
    args = parser.parse_args()
    result = run(args.folder, args.n, args.rounds, args.size, args.name)
    result['command'] = (f"python tests/bench/loader.py{' FOLDER' if args.folder else ''} --n {args.n} "
                         f'--rounds {args.rounds}{"" if args.folder else f" --size {args.size}"}')
    print('\n'.join(table(result)))
    if args.out: Path(args.out).write_text(json.dumps(result, indent=1)+'\n')
