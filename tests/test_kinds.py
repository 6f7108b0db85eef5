"Every kind of sample with images: the block that its fields get, the same training as with stock fastai, pictures"
import os, random

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from conftest import fails
from fastai.vision.all import *

from fastai_remote import *
from fastai_remote.load.kinds import FieldChoice, kind_of
from fastai_remote.load.loader import SeveralInputs
from fastai_remote.order.base import Order

N,CODES,SHAPES = 20,['ground','disc','square'],['disc','square']

def sample(i):
    "A picture with up to three shapes on noise, and everything that is known of it"
    rng = np.random.default_rng(i)
    h,w = int(rng.integers(26, 36)),int(rng.integers(26, 36))
    pixels = rng.integers(0, 60, (h,w,3)).astype(np.uint8)
    codes,boxes,labels = np.zeros((h,w), np.uint8),[],[]
    for k in range(i%4):   # each fourth sample has no shape
        x,y,shape = 1+8*k,int(rng.integers(1, h-9)),SHAPES[int(rng.integers(2))]
        yy,xx = np.mgrid[:h,:w]
        inside = (yy>=y)&(yy<y+7)&(xx>=x)&(xx<x+7)
        if shape=='disc': inside = (yy-y-3)**2+(xx-x-3)**2<=9
        pixels[inside] = (230,90,40) if shape=='disc' else (40,90,230)
        codes[inside] = CODES.index(shape)
        boxes.append([x,y,x+7,y+7])
        labels.append(shape)
    brightest = np.argwhere(codes>0) if boxes else np.array([[h//2,w//2]])
    return {'png':Image.fromarray(pixels), 'mask.png':Image.fromarray(codes), 'boxes.npy':np.float32(boxes).reshape(-1, 4),
            'labels':labels, 'points.npy':np.float32([brightest[0,::-1],brightest[-1,::-1]]), 'cls':CODES[len(boxes)%3],
            'age.f4':len(boxes)/2, 'xy.npy':np.float32([h,w,i])/36, 'other.png':Image.fromarray(np.roll(pixels, i, 1)),
            'same.cls':'yes' if i%2 else 'no', 'caption.txt':f'{len(boxes)} shapes'}

SAMPLES = [sample(i) for i in range(N)]
OPTIONS = dict(vocab={'mask.png':CODES}, shuffle=False, num_workers=1, progress=False)

@pytest.fixture(scope='module')
def stores(server, tmp_path_factory):
    to_redis(SAMPLES, server.url, 'shapes', **OPTIONS)
    to_shards(SAMPLES, d:=tmp_path_factory.mktemp('shapes')/'shapes', chunk=7, **OPTIONS)
    return dict(redis=RedisStore(server.url, 'shapes'), shards=ShardStore(d))

@pytest.fixture(params=['redis','shards'])
def store(request, stores): return stores[request.param]

@pytest.fixture(scope='module')
def files(tmp_path_factory):
    "The images of all samples as files, for stock fastai"
    d = tmp_path_factory.mktemp('files')
    for i,o in enumerate(SAMPLES):
        for field in 'png','mask.png','other.png': o[field].save(d/f'{i:02}.{field}')
    return d

@pytest.fixture(autouse=True)
def tidy():
    set_seed(0)
    yield
    plt.close('all')

class Small(nn.Module):
    "A model with `n` numbers per image, or per pair of images; of shape `shape`"
    def __init__(self, n, *shape):
        super().__init__()
        self.conv,self.lin,self.shape = nn.Conv2d(3, 4, 3, stride=2),nn.Linear(4, n),shape
    def forward(self, *xs):
        features = sum(k*F.relu(self.conv(x)).mean((2,3)) for k,x in enumerate(xs, 1) if isinstance(x, torch.Tensor))
        out = self.lin(features)
        return out.view(-1, *self.shape) if self.shape else out.squeeze(-1)

class Detector(nn.Module):
    "`n` boxes and their labels"
    def __init__(self, n=3, c=3):
        super().__init__()
        self.boxes,self.labels = Small(n*4, n, 4),Small(n*c, n, c)
    def forward(self, x): return self.boxes(x).tanh(),self.labels(x)

class DetectionLoss:
    "The first boxes of a batch beside those of the model"
    def __call__(self, pred, boxes, labels):
        n = min(boxes.shape[1], 3)
        return F.mse_loss(pred[0][:,:n], boxes[:,:n])+F.cross_entropy(pred[1][:,:n].flatten(0, 1), labels[:,:n].flatten().long())
    def activation(self, pred): return pred
    def decodes(self, pred): return TensorBBox(pred[0]),TensorMultiCategory(pred[1].argmax(-1))

class BoxLoss(DetectionLoss):
    def __call__(self, pred, boxes): return F.mse_loss(pred[:,:boxes.shape[1]], boxes[:,:3])
    def decodes(self, pred): return TensorBBox(pred)

class Segment(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
    def forward(self, x): return self.conv(x)

def image(name): return lambda i: f'{i:02}.{name}'
def value(field): return lambda i: SAMPLES[i][field] if not isinstance(SAMPLES[i][field], np.ndarray) else SAMPLES[i][field].tolist()
BOXES = BBoxBlock,BBoxLblBlock(vocab=SHAPES)

# `{kind: (x, y, blocks of stock fastai, getters of its targets, model, loss or `None` for fastai's)}`
CASES = {
    'category':('png', 'cls', [CategoryBlock], lambda: Small(3, 3), None),
    'multi-category':('png', 'labels', [MultiCategoryBlock(vocab=SHAPES)], lambda: Small(2, 2), None),
    'mask':('png', 'mask.png', [MaskBlock(CODES)], Segment, None),
    'points':('png', 'points.npy', [PointBlock], lambda: Small(4, 2, 2), None),
    'boxes':('png', ['boxes.npy','labels'], BOXES, Detector, DetectionLoss()),
    'one number':('png', 'age.f4', [RegressionBlock], lambda: Small(1, 1), None),
    'several numbers':('png', 'xy.npy', [RegressionBlock], lambda: Small(3, 3), None),
    'pair of images':(['png','other.png'], 'same.cls', [CategoryBlock], lambda: Small(2, 2), None)}

class Losses(Callback):
    name = 'seen_losses'
    def __init__(self): self.seen = []
    def after_batch(self): self.seen.append(self.learn.loss.item())

def trained(dls, make, loss):
    "The losses of an epoch"
    set_seed(3)
    dls.train.rng = random.Random(5)
    learn = Learner(dls, make(), loss_func=loss, opt_func=SGD, cbs=(losses:=Losses()))
    set_seed(9)
    with learn.no_bar(), learn.no_logging(): learn.fit(1, .1)
    return losses.seen

def tfms(): return dict(item_tfms=Resize(20), batch_tfms=aug_transforms(max_rotate=20., size=16))

def from_store(store, x, y, **kwargs):
    return DataLoaders.from_store(store, x=x, y=y, seed=1, **{**tfms(), **dict(bs=6, num_workers=0, device='cpu'), **kwargs})

def stock(files, x, y, blocks, splits, order):
    xs,ys = L(x),L(y)
    getters = [(lambda i, f=f: files/f'{i:02}.{f}') if f.endswith('png') else value(f) for f in xs+ys]
    blocks = [ImageBlock]*len(xs)+list(blocks)
    block = DataBlock(blocks, n_inp=len(xs), getters=getters, splitter=lambda _: splits, **tfms())
    dls = block.dataloaders(list(range(N)), bs=6, num_workers=0, device='cpu')
    dls.train.shuffle_fn = lambda idxs: list(RemoteDL.shuffle_fn(dls.train, Order(len(idxs))))
    return dls

@pytest.mark.parametrize('kind', CASES)
def test_losses_are_those_of_stock_fastai(store, files, kind):
    "One epoch with random crops and augmentations, bit for bit"
    x,y,blocks,make,loss = CASES[kind]
    ours = from_store(store, x, y, interleave=None)
    theirs = stock(files, x, y, blocks, [list(ds.items) for ds in ours], None)
    a,b = trained(ours, make, loss),trained(theirs, make, loss)
    assert len(a)==len(b)==2+1 and a==b and all(np.isfinite(a))
    assert str(ours.loss_func)==str(theirs.loss_func) and get_c(ours)==get_c(theirs)
    vocab = getattr(theirs, 'vocab', None)
    if vocab is not None: assert list(ours.vocab)==list(vocab)

# `{kind: what a Learner is made of}`; the other kinds are those of `CASES`
MORE = {'boxes without labels':('png', 'boxes.npy', [], lambda: Small(12, 3, 4), BoxLoss()),
        'grayscale image':({'png':PILImageBW}, 'cls', [], lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 3)), None),
        'image and numbers':(['png','xy.npy','age.f4'], 'cls', [], lambda: Several(), None),
        'image and caption':(['png','caption.txt'], 'cls', [], lambda: Captioned(), None)}

def save(kind, what):
    "Keep the picture, if a folder for pictures is given: to be looked at"
    if 'SHOW_IN' in os.environ: plt.savefig(f"{os.environ['SHOW_IN']}/{kind} {what}.png", dpi=60)

class Several(Module):
    "An image and numbers"
    def __init__(self): self.image,self.numbers = Small(3, 3),nn.Linear(4, 3)
    def forward(self, x, several, one): return self.image(x)+self.numbers(torch.cat([several,one[:,None]], 1))

class Captioned(Module):
    "An image and its caption, of which the model uses the length"
    def __init__(self): self.image,self.lin = Small(3, 3),nn.Linear(1, 3)
    def forward(self, x, texts): return self.image(x)+self.lin(torch.tensor([[len(text)/10] for text in texts]))

@pytest.mark.parametrize('kind', [*CASES, *MORE])
def test_everything_that_a_user_does(store, kind, tmp_path):
    "Show a batch, train, show results, predict, export and load"
    x,y,_,make,loss = {**CASES, **MORE}[kind]
    dls = from_store(store, x, y)
    dls.show_batch()
    assert len(plt.gcf().axes)==6 and all(len(ax.images)==(2 if kind=='mask' else 1) for ax in plt.gcf().axes)
    save(kind, 'batch')
    learn = Learner(dls, make(), loss_func=loss, path=tmp_path)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        learn.show_results(max_n=2)
        assert all(ax.images for ax in plt.gcf().axes)
        save(kind, 'results')
        learn.export(tmp_path/'learner.pkl')
        again = load_learner(tmp_path/'learner.pkl')
        if kind=='image and caption': return   # fastai cannot join texts, which `predict` would do
        a,b = learn.predict(2),again.predict(2)
        given = {field:SAMPLES[2][field] for field in L(list(x) if isinstance(x, dict) else x)}
        c = learn.predict(given)
    assert str(a)==str(b)==str(c)
