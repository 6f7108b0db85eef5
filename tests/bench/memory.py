"""What n samples cost fastai before the first of them is used: stock lists of integers against computed ones

    python tests/bench/memory.py

Stock fastai is given the same synthetic samples as `range(n)`, at one and five million (at fifty it needs tens of gigabytes); ours one, five and fifty million. Each
measurement is a process of its own: set-up, the start of a shuffled epoch, 200 batches in two workers. Stock grows with n everywhere: lists of Python ints in items,
splits and subsets, a shuffled one each epoch, and workers that copy the pages of it as they count references. Ours does not: positions are computed.
Result: tests/bench/results/memory.json
"""
import json, os, platform, subprocess, sys
from pathlib import Path

here = Path(__file__).parent
sys.path.insert(0, str(here.parent))
import fastai.vision.all as fv
from test_memory import Numbers, measure, ours

class Picture(fv.Transform):
    "Fetches a sample, as a type transform of stock fastai would"
    def __init__(self, store): self.store = store
    def encodes(self, i): return self.store.get_many([i], 'png')['png'][0]

class Label(Picture):
    "Its label"
    def encodes(self, i): return 'abcdefgh'[i%8]

def stock(n):
    "`DataLoaders` of stock fastai over `range(n)`"
    store = Numbers(n)
    block = fv.DataBlock((fv.ImageBlock, fv.CategoryBlock(vocab=list('abcdefgh'))), getters=[Picture(store), Label(store)])
    return block.dataloaders(range(n), bs=64, num_workers=2), [0,1,2,3]

def run():
    "All of it; writes the result file"
    import fastai, torch
    jobs = [('stock', 1), ('ours', 1), ('stock', 5), ('ours', 5), ('ours', 50)]
    rows = []
    for who,m in jobs:
        out = subprocess.run([sys.executable, '-W', 'ignore', __file__, who, str(m*1_000_000)], check=True, capture_output=True, text=True).stdout
        rows.append({'loader':who, **json.loads(out.splitlines()[-1])})
        r = rows[-1]
        print(f"{who:6} {m:3} million: set-up {r['setup']:6.2f} s, epoch start {r['start']:6.2f} s, parent +{r['parent']/1e6:6.1f} MB, worker {max(r['workers'])/1e6:6.1f} MB private, "
              f"pickle {r['pickle']:,} bytes")
    res = dict(command='python tests/bench/memory.py', machine=dict(platform=platform.platform(), cores=os.cpu_count(), python=platform.python_version()),
               versions=dict(fastai=fastai.__version__, torch=torch.__version__), rows=rows)
    (here/'results/memory.json').write_text(json.dumps(res, indent=1)+'\n')

if __name__=='__main__':
    if len(sys.argv)>1: print(json.dumps(measure(int(sys.argv[2]), loaders=dict(stock=stock, ours=ours)[sys.argv[1]])))
    else: run()
