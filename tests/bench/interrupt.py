"""How long does Ctrl-C take in `learn.fit` and `get_preds` with two workers, ours and stock fastai's?

Purpose: a notebook sends SIGINT to the whole process group. The time from there until the call has raised
         `KeyboardInterrupt` and no worker is left, for both loaders in turn in one run, as the median and the longest.

Command: python tests/bench/interrupt.py [TRIES]

Reason:  PyTorch waits until each worker has sent what it still holds, and gives up after 5 s; ours end at once.
"""
import multiprocessing, os, random, signal, sys, tempfile, threading, time
from pathlib import Path
from statistics import median

from fastai.vision.all import *
from PIL import Image

from fastai_remote import image_samples, to_shards

class Interrupt(Callback):
    "Interrupt the process group some time after the second batch"
    def before_batch(self):
        if self.iter==1: threading.Thread(target=self.send).start()
    def send(self):
        time.sleep(random.random()*.2)
        self.at = time.perf_counter()
        os.killpg(0, signal.SIGINT)

def seconds(learn, run):
    "Seconds from the interrupt to the end of `run(learn)` and of its workers"
    interrupt = Interrupt()
    try:
        with learn.no_bar(), learn.no_logging(), learn.added_cbs(interrupt): run(learn)
    except KeyboardInterrupt: pass
    for process in multiprocessing.active_children(): process.join()
    return time.perf_counter()-interrupt.at

def fit(learn): learn.fit(1)
def predict(learn): learn.get_preds(dl=learn.dls.train.new(shuffle=False))

def main(tries):
    folder = Path(tempfile.mkdtemp())
    for i in range(2000):
        (folder/'images'/'ab'[i%2]).mkdir(parents=True, exist_ok=True)
        Image.effect_noise((96,96), 80).convert('RGB').save(folder/'images'/'ab'[i%2]/f'{i}.jpg')
    to_shards(image_samples(folder/'images', label=parent_label), folder/'shards', num_workers=1, progress=False)
    options = dict(item_tfms=Resize(64), bs=8, num_workers=2)
    loaders = {'stock fastai':ImageDataLoaders.from_folder(folder/'images', valid_pct=.1, **options),
               'from_shards':DataLoaders.from_shards(folder/'shards', **options)}
    for name,dls in loaders.items():
        learn = Learner(dls, nn.Sequential(nn.Conv2d(3, 4, 3), AdaptiveAvgPool(), Flatten(), nn.Linear(4, 2)),
                        loss_func=CrossEntropyLossFlat())
        for run in fit,predict:
            times = sorted(seconds(learn, run) for _ in range(tries))
            print(f'{name:12} {run.__name__:8} median {median(times):.2f} s, longest {times[-1]:.2f} s', flush=True)

if __name__=='__main__':
    if os.getpgid(0)!=os.getpid(): os.setpgid(0, 0)   # not those who started this
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(int(sys.argv[1]) if len(sys.argv)>1 else 10)
