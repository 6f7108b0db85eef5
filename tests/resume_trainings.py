"""A training that writes down what it did, for tests of trainings that are stopped and go on

It is small, and has everything whose randomness or state could be lost: `RandomResizedCrop`, an item transform that
draws from NumPy and torch, `aug_transforms`, MixUp, dropout, BatchNorm, a module with a state that is no tensor,
momentum, and metrics that gather predictions."""
import contextlib, hashlib, json, os, sys, warnings
from pathlib import Path

import numpy as np
import torch
from fastai.callback.mixup import CutMix, MixUp
from fastai.text.all import AWD_LSTM, awd_lstm_clas_config, BaseTokenizer, text_classifier_learner
from fastai.vision.all import *

from fastai_remote import *

def digest(*tensors):
    "A short hash of the bytes of tensors"
    return hashlib.md5(b''.join(t.detach().cpu().contiguous().numpy().tobytes() for t in tensors)).hexdigest()[:12]

class Jitter(Transform):
    "Draws from NumPy and torch, and keeps images from being built as a whole batch"
    order,split_idx = 2,0
    def encodes(self, x:PILImage):
        pixels = np.array(x).astype(np.int16)+np.random.randint(-9, 9)+int(torch.randint(0, 9, (1,)))
        return PILImage.create(pixels.clip(0, 255).astype(np.uint8))

class Counter(nn.Module):
    "Passes on what it gets, and keeps what is no tensor in the state of the model: the number of batches it has seen"
    seen = 0
    def forward(self, x):
        self.seen += self.training
        return x
    def get_extra_state(self): return {'seen':self.seen}
    def set_extra_state(self, state): self.seen = state['seen']

class BatchLog(Callback):
    "Writes down each batch; stops the process, or calls `stop`, after batch number `at` that it sees"
    order = 999   # before `Resume` saves
    def __init__(self, lines, at=None, stop=None): self.lines,self.at,self.stop,self.seen = lines,at,stop,0
    def state_dict(self): return {}   # what it has seen in this process is no state
    def load_state_dict(self, state): pass
    def after_loss(self): self.batch = digest(*self.xb, *self.yb)
    def after_batch(self):
        if not hasattr(self.learn, 'resume') or not self.learn.resume.is_fitting: return
        place = (self.learn.resume.fits_done, self.epoch, self.training, self.iter)
        done = self.batch,digest(*self.model.parameters()),float(self.loss),float(self.opt.hypers[-1]['lr'])
        self.lines.append([list(place), list(done)])
        self.seen += 1
        if self.seen==self.at: self.stop()

CALLBACKS = {'mixup':MixUp, 'cutmix':CutMix, 'accumulate':lambda: GradientAccumulation(20),
    'short':lambda: ShortEpochCallback(.5, short_valid=False),
    'csv':CSVLogger, 'save':lambda: SaveModelCallback(monitor='valid_loss'),
    'plateau':lambda: ReduceLROnPlateau(min_delta=10.), 'early':lambda: EarlyStoppingCallback(min_delta=10.),
    'bf16':lambda: MixedPrecision('bf16'), 'fp16':lambda: MixedPrecision(init_scale=2.**40, growth_interval=3)}

OPTIMIZERS = {'ranger':ranger, 'torch_adamw':partial(OptimWrapper, opt=torch.optim.AdamW)}

def learner(store, folder, options, lines, resume, log=None, **kwargs):
    "A learner over `store` as the words in `options` say"
    item_tfms = [RandomResizedCrop(16), Jitter()] if 'jitter' in options else RandomResizedCrop(16)
    if 'balance' in options: kwargs['balance'] = 'cls'
    if 'gpu' in options:
        kwargs['device'] = 'cuda'
        torch.backends.cudnn.deterministic,torch.backends.cudnn.benchmark = True,False
    kwargs |= {name:value for name,value in (('on_bad','skip'),('on_bad','replace')) if value in options}
    cbs = [log or BatchLog(lines), resume, *(make() for name,make in CALLBACKS.items() if name in options)]
    if 'texts' in options: return text_learner(store, folder, cbs, **kwargs)
    set_seed(1)   # of the model's first weights
    dls = DataLoaders.from_store(store, **{**dict(bs=8, num_workers=0, item_tfms=item_tfms, device='cpu', path=folder,
                                                  batch_tfms=aug_transforms(size=16)), **kwargs})
    head = nn.AdaptiveAvgPool2d(1),Flatten(),nn.Dropout(.3),nn.Linear(8, dls.c),Counter()
    model = nn.Sequential(ConvLayer(3, 8, stride=2), *head)
    learn = Learner(dls, model, metrics=[accuracy, F1Score(average='macro')], cbs=cbs, loss_func=CrossEntropyLossFlat(),
                    opt_func=next((func for name,func in OPTIMIZERS.items() if name in options), Adam))
    learn.recorder.add_time,learn.recorder.train_metrics = False,'train_metrics' in options
    return learn

def text_learner(store, folder, cbs, **kwargs):
    "A learner of texts, which are sorted by length"
    set_seed(1)
    config = dict(awd_lstm_clas_config, emb_sz=8, n_hid=8, n_layers=2)
    dls = DataLoaders.from_store(store, text=TextOptions(tok=BaseTokenizer(), seq_len=16), bs=8, num_workers=0,
                                 device='cpu', path=folder, **kwargs)
    learn = text_classifier_learner(dls, AWD_LSTM, config=config, pretrained=False, seq_len=16, cbs=cbs)
    learn.recorder.add_time = False
    return learn

def train(learn, options, epochs=2):
    "Train; returns all results as plain data"
    with learn.no_bar(), contextlib.redirect_stdout(sys.stderr):
        if 'lr_find' in options: learn.lr_find(num_it=8, show_plot=False)
        if 'fine_tune' in options: learn.fine_tune(epochs, 1e-2)
        elif 'flat' in options: learn.fit_flat_cos(epochs, 1e-2)
        else: learn.fit_one_cycle(epochs, 1e-2)
        predictions = tensor(0) if 'skip' in options else learn.get_preds()[0]   # a prediction for each sample
    recorder,states = learn.recorder,learn.opt.state_dict()['state']
    states = states.values() if isinstance(states, dict) else states   # torch numbers the parameters
    def plain(state): return {k:digest(v) if isinstance(v, Tensor) else str(v) for k,v in state.items()}
    result = dict(model=plain(learn.model.state_dict()), predictions=digest(predictions), opt=list(map(plain, states)),
        values=[list(map(float, v)) for v in recorder.values], losses=list(map(float, recorder.losses)),
        lrs=list(map(float, recorder.lrs)), iters=list(recorder.iters))
    if 'csv' in options: result['csv'] = (learn.path/'history.csv').read_text()
    return result

def merged(lines):
    "`{place: what was done}`; a training that goes on repeats the batches after its state, with the same results"
    found = {}
    for place,done in lines: assert found.setdefault(tuple(place), done)==done, place
    return found

class LogFile(list):
    "Lines that are written to a file at once, so that a killed process leaves them"
    def __init__(self, path): self.path = path
    def append(self, line):
        with open(self.path, 'a') as f: f.write(json.dumps(line)+'\n')

def read_lines(path): return [json.loads(line) for line in Path(path).read_text().split('\n')[:-1]]   # complete lines

def training(url, folder, options, workers, every=3, at=None, stop=None, epochs=2, place=None, **kwargs):
    "Train from `url`, and leave batches and results in `folder`, and the state there or at `place`"
    store = ShardStore(url) if url.startswith('/') else RedisStore(url, 'd')
    log = BatchLog(LogFile(folder/'lines.txt'), at, stop)
    resume = Resume(f'{place or folder}/run.ckpt', every=every, **kwargs)
    learn = learner(store, folder, options, None, resume, log, num_workers=workers)
    (folder/'result.json').write_text(json.dumps(train(learn, options, epochs)))

def compare(a, b):
    "Raise `AssertionError` if the trainings in folders `a` and `b` differ"
    lines = [merged(read_lines(folder/'lines.txt')) for folder in (a, b)]
    results = [json.loads((folder/'result.json').read_text()) for folder in (a, b)]
    assert lines[0]==lines[1], f'batches differ: {[k for k in lines[0] if lines[0][k]!=lines[1].get(k)][:5]}'
    differ = [name for name in results[0] if results[0][name]!=results[1][name]]
    assert not differ, f'{differ} differ'

if __name__=='__main__':
    warnings.filterwarnings('ignore')
    torch.set_num_threads(1)
    url,folder,options,workers,at,number = sys.argv[1:]
    training(url, Path(folder), options, int(workers), at=int(at), stop=lambda: os.kill(os.getpid(), int(number)))
