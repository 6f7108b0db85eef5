"""What do n samples cost before the first of them is used? Lists of integers in stock fastai, computed ones here

Purpose: stock fastai gets synthetic samples as `range(n)`, one and five million of them. (Fifty million would need tens
         of gigabytes.) This package gets the same samples, one, five and fifty million. Each measurement is a separate
         process: it builds the loaders, starts a shuffled epoch, and reads 200 batches with two workers.

Command: python tests/bench/memory.py

Result:  the cost of stock fastai grows with n everywhere, and the cost of this package does not. With five million
         samples, a worker of stock fastai has 703 MB of private memory, and one of this package 17 MB
         (results/memory.json).

Reason:  stock fastai keeps lists of Python integers in items, splits and subsets, and one more shuffled list in each
         epoch. The workers count references to these integers, and so copy the memory pages that contain them. This
         package computes positions and keeps no list.
"""
import json, os, platform, subprocess, sys, time
from pathlib import Path

here = Path(__file__).parent
sys.path.insert(0, str(here.parent))
import fastai.vision.all as fv
from test_memory import children, Numbers, measure, ours

class Picture(fv.Transform):
    "Fetches the image of a sample, as a type transform of stock fastai would"
    def __init__(self, store): self.store = store
    def encodes(self, i): return self.store.get_many([i], 'png')['png'][0]

class Label(Picture):
    "The label of a sample"
    def encodes(self, i): return 'abcdefgh'[i%8]

def stock(
    n # Number of samples
): # `DataLoaders`, and items for a test loader
    "The loaders of stock fastai over `range(n)`"
    store = Numbers(n)
    blocks = fv.ImageBlock, fv.CategoryBlock(vocab=list('abcdefgh'))
    dblock = fv.DataBlock(blocks, getters=[Picture(store), Label(store)])
    return dblock.dataloaders(range(n), bs=64, num_workers=2), [0,1,2,3]

def cpu_time():
    "Seconds of CPU time that this process and its living children have used, other than of those that end meanwhile"
    seconds = time.process_time()
    for pid in children():
        try: seconds += int(Path(f'/proc/{pid}/schedstat').read_text().split()[0])/1e9
        except FileNotFoundError: pass   # it has ended
    return seconds

def timed(
    loaders, # `stock` or `ours`
    n # Number of samples
): # `{'setup': seconds, 'start': seconds}`
    "CPU time, here and in the workers, until the loaders are made, and then until the first batch of an epoch"
    before = cpu_time()
    dls,_ = loaders(n)
    made = cpu_time()
    batches = iter(dls.train)
    next(batches)
    return dict(setup=made-before, start=cpu_time()-made)

def measure_in_process(
    loader, # 'stock' or 'ours'
    millions # Number of samples, in millions
): # A row of the result
    "Measure one loader in a process of its own, and print the row"
    command = [sys.executable, '-W', 'ignore', __file__, loader, str(millions*1_000_000)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    row = {'loader':loader, **json.loads(output.splitlines()[-1])}
    print(f"{loader:6} {millions:3} million: set-up {row['setup']:6.2f} s, epoch start {row['start']:6.2f} s, "
          f"parent +{row['parent']/1e6:6.1f} MB, worker {max(row['workers'])/1e6:6.1f} MB private, "
          f"pickle {row['pickle']:,} bytes")
    return row

def run():
    "Run all measurements and write the result file"
    import fastai, torch
    cases = [('stock', 1), ('ours', 1), ('stock', 5), ('ours', 5), ('ours', 50)]
    rows = [measure_in_process(*case) for case in cases]
    machine = dict(platform=platform.platform(), cores=os.cpu_count(), python=platform.python_version())
    result = dict(command='python tests/bench/memory.py', machine=machine,
                  versions=dict(fastai=fastai.__version__, torch=torch.__version__), rows=rows)
    (here/'results/memory.json').write_text(json.dumps(result, indent=1)+'\n')

if __name__=='__main__':
    if len(sys.argv)>1:
        loader,n = sys.argv[1:]
        loaders = dict(stock=stock, ours=ours)[loader]
        figures = measure(int(n), loaders=loaders)
        print(json.dumps(figures|timed(loaders, int(n))))
    else: run()
