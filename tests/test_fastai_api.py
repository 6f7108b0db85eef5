"""fastai's API over a store beside stock fastai over the same JPEG files: the same to the last bit

Each row of `ROWS` is a call, written as in the documentation, and what it is to give. It is made three times: with
stock fastai's loaders over files, with `from_redis` and with `from_shards`, with the same split, the same order and the
same seeds. `python tests/test_fastai_api.py` writes the table into the tutorial.
"""
import builtins, json
from contextlib import redirect_stdout
from functools import cached_property

import matplotlib.pyplot as plt
import pytest
from fastai.vision.all import *
from fastai.vision.learner import _add_norm, model_meta
from pipelines import Data, N_TRAIN, TARGETS, sample

from fastai_remote import *
from fastai_remote.load.cleaners import fit_cleaners
from fastai_remote.order.base import Order

NOTEBOOK = Path(__file__).parents[1]/'nbs/tutorials/fastai_api.ipynb'
N,STORES,SIZE,CODES = 24,{'Redis':'redis', 'shards':'shards'},40,['sky', 'sea', 'land', 'air']

def make_data(url, folder):
    "JPEGs of all kinds and sizes, with a target of each kind"
    rows = [sample(i) for i in range(N)]
    fields = 'sizes.jpg','cls','labels','age.f4','mask.png'
    return Data.make([{k:row[k] for k in fields} for row in rows], url, 'photographs', folder, vocab={'mask.png':CODES})

# --- loaders that visit the same samples in the same order

BLOCKS = {'cls':CategoryBlock, 'labels':MultiCategoryBlock, 'age.f4':RegressionBlock,
    'mask.png':partial(MaskBlock, codes=CODES)}

class InStep(TfmdDL):
    "Stock fastai's loader, which shuffles in the order of ours"
    def shuffle_fn(self, idxs): return list(RemoteDL.shuffle_fn(self, Order(len(idxs))))

class Trace(Callback):
    "Keeps the loss of each batch of training"
    def __init__(self): self.losses = []
    def before_backward(self): self.losses.append(self.learn.loss_grad.item())

class Env:
    "One of the three ways to load, and what it takes to make a `Learner` over it; `dls` and `learn` are the usual ones"
    def __init__(self, data, which, stock:bool, tmp):
        self.data,self.store,self.stock,self.tmp = data,data.stores[STORES[which]],stock,tmp
        self.files = [data.path('sizes.jpg', i) for i in range(N)]
        self.items = get_remote_items(self.store)
        self.source,self.interleave = (None,{}) if stock else (self.store,{'interleave':None})   # over all shards
        self.splitter = (lambda _: [list(range(N_TRAIN)), list(range(N_TRAIN, N))]) if stock else StoreSplitter()

    def block(self, y='cls', **tfms):
        kw = dict(splitter=self.splitter, **{'item_tfms':Resize(SIZE), **tfms})
        if not self.stock: return DataBlock((RedisBlock, RedisBlock(self.store, y)), get_items=get_remote_items, **kw)
        def get_y(file): return self.data.path(y, file.stem) if y=='mask.png' else TARGETS[y](int(file.stem))
        return DataBlock((ImageBlock, BLOCKS[y]()), get_items=lambda _: self.files, get_y=get_y, dl_type=InStep, **kw)

    def loaders(self, y='cls', item_tfms=None, batch_tfms=None, **kw):
        set_seed(1)
        kw = {**dict(bs=6, num_workers=0, device=torch.device('cpu'), path=self.tmp), **kw}
        tfms = dict(item_tfms=item_tfms or Resize(SIZE), batch_tfms=batch_tfms)
        if self.stock: return self.in_step(self.block(y, **tfms).dataloaders(None, **kw))
        kw = {**tfms, **self.interleave, **kw}
        return self.in_step(DataLoaders.from_store(self.store, y=y, splitter=self.splitter, **kw))

    def in_step(self, dls):
        "Have all begin with the same seeds"
        for dl in dls: dl.rng = random.Random(5)
        set_seed(4)
        return dls

    def of_block(self, block):
        set_seed(1)
        return block.dataloaders(self.source, bs=6, num_workers=0, device='cpu', **self.interleave)

    def learner(self, dls=None, y='cls', n_out=None, metrics=accuracy, model=None, pooled=9):
        dls = dls or self.loaders(y)
        set_seed(2)
        head = nn.Sequential(nn.AdaptiveAvgPool2d(pooled), nn.Flatten(), nn.Linear(6*pooled**2, n_out or get_c(dls)))
        model = model or nn.Sequential(nn.Sequential(nn.Conv2d(3, 6, 5, stride=4), nn.ReLU()), head)
        return self.traced(Learner(dls, model, metrics=metrics, path=self.tmp, opt_func=SGD,
            splitter=lambda m: [params(m[0]), params(m[1])] if isinstance(m, nn.Sequential) else [params(m)]))

    def traced(self, learn):
        learn.trace = Trace()
        learn.add_cb(learn.trace)
        learn.remove_cb(ProgressCallback)
        learn.logger = noop
        set_seed(3)
        return learn

    dls = cached_property(lambda self: self.loaders())
    learn = cached_property(lambda self: self.learner())
    masks = cached_property(lambda self: self.loaders('mask.png', item_tfms=Resize(SIZE, 'squish')))

    def losses(self, f, learn=None):
        "The loss of each batch while `f` trains"
        f(learn or self.learn)
        return (learn or self.learn).trace.losses

    def some(self, *ks): return [self.files[k] for k in ks] if self.stock else list(ks)   # items: files, and numbers

def drawn():
    "Pictures, curves and titles of all figures"
    res = [([np.asarray(im.get_array()) for im in ax.images], [line.get_xydata() for line in ax.lines], ax.get_title(),
        [t.get_text() for t in ax.texts]) for k in plt.get_fignums() for ax in plt.figure(k).axes]
    plt.close('all')
    return res

def printed(f):
    "What `f` prints"
    with redirect_stdout(out:=io.StringIO()): f()
    return out.getvalue()

# --- the rows: heading, or (call, what is compared, function of an `Env`)

ROWS = []
def row(call, what, f=None):
    "Add a row; without `f` it decorates the function"
    if f is None: return partial(row, call, what)
    ROWS.append((call, what, f))

CROP = RandomResizedCrop(SIZE, min_scale=.5)

ROWS.append('Loaders')
row('`dls.one_batch()`', 'the batch', lambda e: e.dls.one_batch())
@row('`for b in dls.train`, `dls.valid`', 'every batch of two epochs')
def _(e):
    dls = e.loaders(item_tfms=CROP)
    return [*dls.train, *dls.train, *dls.valid]
row('`dls.train_ds[3]`, `dls.valid_ds[[0,2]]`, `dls.train_ds[tensor(1)]`', 'pictures and labels', lambda e: (
    e.dls.train_ds[3], e.dls.valid_ds[[0,2]], e.dls.train_ds[tensor(1)], e.dls.train_ds[np.int64(2)]))
row('`dls.vocab`, `c`, `n_inp`, `device`, `len(dls)`, `dl.n`, `len(dl)`, `dl.bs`, `get_c(dls)`', 'the values',
    lambda e: (list(e.dls.vocab), e.dls.c, e.dls.n_inp, e.dls.device, len(e.dls), [(dl.n, len(dl), dl.bs)
        for dl in e.dls], get_c(e.dls)))
@row('`dls.show_batch()`, `dls.valid.show_batch(max_n=4)`', 'pictures and titles of the figures')
def _(e):
    e.dls.show_batch()
    e.dls.valid.show_batch(max_n=4)
    return drawn()
@row('`dls.show_batch(unique=True)`', 'pictures and titles of the figure')
def _(e):
    e.loaders(item_tfms=RandomResizedCrop(SIZE)).show_batch(unique=True, max_n=4)
    return drawn()
row('`dls.decode_batch(b)`', 'pictures and labels', lambda e: e.dls.decode_batch(e.dls.valid.one_batch()))
row('`dls.new(bs=4)`, `dls.train.new(shuffle=False)`, `dls.new(shuffled=False)`', 'the batch', lambda e: (
    e.dls.valid.new(bs=4).one_batch(), e.dls.train.new(shuffle=False).one_batch(),
    e.dls.valid.new(shuffled=False).one_batch()))
row('`dls.new(after_item=…)`: another size', 'the batch', lambda e: e.dls.valid.new(
    after_item=[Resize(50, 'pad', pad_mode='zeros'), ToTensor()]).one_batch())
row('pictures a fifth of the size of the photographs', 'an epoch', lambda e: [*e.loaders(item_tfms=Resize(16)).train])
@row("`dls.add_tfms([…], 'after_batch')`", 'an epoch')
def _(e):
    e.dls.add_tfms([Flip(p=.5), Normalize.from_stats(*imagenet_stats, cuda=False)], 'after_batch')
    return [*e.dls.train]
row('`batch_tfms=aug_transforms()`', 'an epoch', lambda e: [*e.loaders(batch_tfms=aug_transforms()).train])
row('`dls.cpu()`, `dls.to(device)`, `dls.cuda()`', 'device and batch', lambda e: (e.dls.cpu().one_batch()[0].device,
    e.dls.to('cpu').device, e.dls.to(torch.device('cpu')).valid.one_batch(), e.dls.cuda().device==default_device()))
@row('`dls.new_empty()`', 'lengths, and a test loader of it')
def _(e):
    dls = e.dls.new_empty()
    return [len(dl.dataset) for dl in dls],dls.test_dl(e.files[:3]).one_batch()
row('`dl.get_idxs()`', 'positions of a shuffled epoch and of the validation set', lambda e: (
    list(e.dls.train.get_idxs()), list(e.dls.valid.get_idxs())))
row('`num_workers=2`', 'an epoch', lambda e: [*e.loaders(num_workers=2).train])
@row('`pin_memory`, `drop_last`, `val_bs`, `shuffle=False`, `n=`', 'an epoch')
def _(e):
    dls = e.loaders(drop_last=False, val_bs=5, shuffle=False, n=13)
    return [*dls.train, *dls.valid]

ROWS.append('`DataBlock`')
@row('`dblock.datasets(source)`', 'lengths, items of both parts')
def _(e):
    ds = e.block().datasets(e.source)
    return len(ds),len(ds.train),len(ds.valid),ds.train[5],ds.valid[1],ds.n_inp,list(ds.vocab)
row('`dblock.dataloaders(source)`', 'an epoch', lambda e: [*e.in_step(e.of_block(e.block())).train])
row('`dblock.new(item_tfms=…)`', 'the batch', lambda e: e.of_block(e.block().new(item_tfms=CropPad(30))
    ).valid.one_batch())
row('`dblock.summary(source)`', 'the last steps that it prints', lambda e: printed(lambda: e.block(
    batch_tfms=Flip(0.)).summary(e.source)).partition('Collating items in a batch')[2].count('applying'))
@row('`dblock.weighted_dataloaders(source, wgts)`', 'an epoch')
def _(e):
    set_seed(1)
    return [*e.block().weighted_dataloaders(e.source, np.arange(1, N+1), bs=6, num_workers=0, device='cpu').train]
@row('`dsets.partial_dataloaders(n)`', 'an epoch')
def _(e):
    set_seed(1)
    return [*e.block().datasets(e.source).partial_dataloaders(12, bs=6, num_workers=0, device='cpu',
        after_item=[Resize(SIZE), ToTensor()]).train]
row('`FuncSplitter`, `IndexSplitter`, `RandomSplitter`', 'positions', lambda e: [[list(map(int, s))
    for s in f(list(range(N)))] for f in (IndexSplitter([1,5,9]), RandomSplitter(.2, seed=1))])

ROWS.append('Targets')
for y,note in (('labels', 'several labels'), ('age.f4', 'numbers'), ('mask.png', 'masks')):
    @row(f'{note}: batches, `show_batch`, `vocab`, `get_c(dls)`, the loss', 'an epoch, pictures, the values')
    def _(e, y=y):   # stock fastai keeps the codes of masks elsewhere than in `vocab`
        dls = e.masks if y=='mask.png' else e.loaders(y)
        res = [*dls.train, *dls.valid]
        dls.valid.show_batch(max_n=4)
        vocab = list(getattr(dls, 'vocab', [])) if y=='labels' else 0
        return res,drawn(),vocab,get_c(dls),str(dls.train_ds.loss_func)
@row('several labels: `fit`, `get_preds`, `predict`, `show_results`', 'losses and predictions')
def _(e):
    learn = e.learner(y='labels', metrics=accuracy_multi)
    learn.fit(1, .1)
    learn.show_results(max_n=3, shuffle=False)
    return learn.trace.losses,learn.get_preds(),learn.predict(e.some(3)[0]),drawn()
@row('numbers: `fit`, `get_preds`, `predict`', 'losses and predictions')
def _(e):   # stock fastai 2.8.12 has no `show_results` of pictures and numbers: it fails there
    learn = e.learner(y='age.f4', n_out=1, metrics=[mae])
    learn.fit(1, .001)
    return learn.trace.losses,learn.get_preds(),learn.predict(e.some(3)[0])
@row('masks: `fit`, `get_preds`, `predict`, `show_results`, `SegmentationInterpretation`', 'losses and predictions')
def _(e):
    learn = e.learner(e.masks, metrics=[foreground_acc], model=nn.Conv2d(3, 4, 3, padding=1))
    learn.fit(1, .1)
    learn.show_results(max_n=3, shuffle=False)
    interp = SegmentationInterpretation.from_learner(learn)
    return learn.trace.losses,learn.get_preds()[0],learn.predict(e.some(3)[0])[2],drawn(),interp.losses
@row('masks: `unet_learner(dls, resnet18)`', 'losses')
def _(e):
    dls = e.loaders('mask.png', item_tfms=Resize(SIZE, 'squish'), n=4, bs=4)
    set_seed(2)
    return e.losses(lambda l: l.fit(1), e.traced(unet_learner(dls, resnet18, pretrained=False, path=e.tmp)))

ROWS.append('Training')
@row('`learn.fit(2)`', 'the loss of each batch, the metrics')
def _(e):
    learn = e.learner(e.loaders(item_tfms=CROP, batch_tfms=Flip()))
    return e.losses(lambda l: l.fit(2, .1), learn),learn.recorder.values
row('`learn.fit_one_cycle`, `fit_flat_cos`, `fit_sgdr`', 'the loss of each batch', lambda e: e.losses(
    lambda l: (l.fit_one_cycle(1, .1), l.fit_flat_cos(1, .1), l.fit_sgdr(1, 1, .1))))
row('`learn.fine_tune(1)`', 'the loss of each batch', lambda e: e.losses(lambda l: l.fine_tune(1, .1)))
row('`learn.lr_find()`', 'suggestion and losses', lambda e: (e.learn.lr_find(num_it=8, show_plot=False).valley,
    e.learn.trace.losses))
row('`learn.validate()`', 'loss and metrics', lambda e: e.learn.validate())
row('`MixUp`, `CutMix`', 'the loss of each batch', lambda e: [e.losses(lambda l: l.fit(1, .1, cbs=cb), e.learner())
    for cb in (MixUp(), CutMix())])
row('`GradientAccumulation`, `GradientClip`, `SaveModelCallback`, `EarlyStoppingCallback`, `CSVLogger`, '
    '`ShortEpochCallback`', 'the loss of each batch', lambda e: e.losses(lambda l: (l.fit(1, .1,
    cbs=[GradientAccumulation(16), GradientClip, SaveModelCallback(), EarlyStoppingCallback(), CSVLogger()]),
    l.fit(1, .1, cbs=ShortEpochCallback(.5)))))
@row('larger pictures: `learn.dls = …`', 'the loss of each batch')
def _(e):
    learn = e.learner(pooled=4)
    learn.fit(1, .1)
    learn.dls = e.loaders(item_tfms=Resize(56))
    return e.losses(lambda l: l.fit(1, .1), learn)
@row('`vision_learner(dls, resnet18, pretrained=False)`, `fit`', 'the loss of each batch')
def _(e):
    dls = e.loaders(n=6)
    set_seed(2)
    losses = e.losses(lambda l: l.fit(1), e.traced(vision_learner(dls, resnet18, pretrained=False, path=e.tmp)))
    return losses,[type(o).__name__ for o in dls.after_batch.fs]
@row('`vision_learner` with a pretrained body: its statistics', "`Normalize` of ImageNet's, and a batch")
def _(e):
    _add_norm(e.dls, model_meta[resnet18], True)
    return [(o.mean, o.std) for o in e.dls.after_batch.fs if isinstance(o, Normalize)],e.dls.valid.one_batch()

ROWS.append('Predicting')
row('`learn.get_preds()`, `with_input`, `with_decoded`, `with_loss`', 'the tensors', lambda e: e.learn.get_preds(
    with_input=True, with_decoded=True, with_loss=True))
@row('`learn.get_preds(ds_idx=0)`, `reorder=False`, of a shuffled `dl`', 'the tensors')
def _(e):
    dl = e.learn.dls.valid.new(shuffle=True)
    dl.rng = random.Random(3)
    return e.learn.get_preds(ds_idx=0, reorder=False),e.learn.get_preds(dl=dl)
row('`learn.predict(item)`', 'label, number and probabilities; items are files, and sample numbers',
    lambda e: e.learn.predict(e.some(7)[0], with_input=True))
row('`learn.predict` of a path, `str`, bytes, `PILImage`', 'label, number and probabilities', lambda e: [
    e.learn.predict(f(e.files[7])) for f in (noop, str, Path.read_bytes, PILImage.create)])
row('`dls.test_dl(items)`, `with_labels=True`', 'batches; items are files, and sample numbers', lambda e: [
    [*e.dls.test_dl(e.some(3, 1, 4), **kw)] for kw in ({}, {'with_labels':True})])
row('`dls.test_dl(files)`, of `str`s, of bytes, of pictures', 'batches', lambda e: [
    [*e.dls.test_dl([f(o) for o in e.files[:3]])] for f in (noop, str, Path.read_bytes, PILImage.create)])
row('`learn.get_preds(dl=dls.test_dl(…))`', 'the tensors', lambda e: e.learn.get_preds(dl=e.learn.dls.test_dl(
    e.some(5, 2, 9, 11)))[0])
@row('`learn.tta()`', 'the tensors')
def _(e):
    learn = e.learner(e.loaders(item_tfms=RandomResizedCrop(SIZE), batch_tfms=Flip()))
    return learn.tta(n=2),learn.tta(ds_idx=0, n=1, use_max=True)
row('`learn.show_results()`', 'pictures and titles of the figure', lambda e: (e.learn.show_results(max_n=4,
    shuffle=False), drawn()))

ROWS.append('Looking into')
@row('`Interpretation.from_learner`, `top_losses`, `plot_top_losses`', 'losses, positions, the figure')
def _(e):
    interp = Interpretation.from_learner(e.learn)
    interp.plot_top_losses(4)
    items = [Path(o) if e.stock else e.files[o] for o in interp.top_losses(4, items=True)[2]]
    return interp.top_losses(4),items,drawn()
@row('`ClassificationInterpretation`: `confusion_matrix`, `plot_confusion_matrix`, `most_confused`, '
    '`print_classification_report`, `show_results`', 'numbers, text, the figure')
def _(e):
    interp = ClassificationInterpretation.from_learner(e.learn)
    interp.plot_confusion_matrix()
    interp.show_results([0,1,2])
    return interp.confusion_matrix(),interp.most_confused(),printed(interp.print_classification_report),drawn()
@row('`ImageClassifierCleaner(learn)`, `ImagesCleaner`', 'which images, in which order, and their thumbnails')
def _(e):
    from fastai.vision import widgets
    from fastai.vision.widgets import ImageClassifierCleaner, ImagesCleaner
    if not e.stock: fit_cleaners(widgets)   # as in a notebook
    shown = []
    builtins.display = shown.append
    try:
        c = ImageClassifierCleaner(e.learner(e.loaders(item_tfms=Resize(SIZE, 'squish'))))
        c.dd_cats.value = 'bird'
        c.iw.widget.children[1].children[1].value = '<Delete>'
        ImagesCleaner().set_fns(e.files[:3] if e.stock else e.items[[0,1,2]])
    finally: del builtins.display
    return [np.asarray(o) for o in shown],list(c.delete()),[e.files.index(o) if e.stock else int(o) for o in c.fns]

ROWS.append('Keeping')
@row('`learn.save`, `learn.load`', 'predictions')
def _(e):
    e.learn.save('m')
    e.learn.model[1][2].bias.data.fill_(0)
    e.learn.load('m')
    return e.learn.get_preds()
@row('`learn.export`, `load_learner`', 'predictions')
def _(e):
    e.learn.remove_cb(e.learn.trace)
    e.learn.export('l.pkl')
    learn = load_learner(e.tmp/'l.pkl')
    return (learn.predict(e.some(7)[0]), learn.predict(e.files[8].read_bytes()),
        learn.get_preds(dl=learn.dls.test_dl(e.some(1, 2)))[0], list(learn.dls.vocab))

# --- comparing

def same(a, b):
    "Are results `a` and `b` the same, type, shape and every bit? Pictures may be subclasses that are not decoded yet"
    if isinstance(a, Image.Image):
        return isinstance(b, type(a)) and a.mode==b.mode and a.size==b.size and np.array_equal(a, b)
    if isinstance(a, torch.Tensor):
        if type(a) is not type(b) or a.dtype!=b.dtype or a.shape!=b.shape: return False
        return np.array_equal(a.numpy(), b.numpy(), equal_nan=a.is_floating_point())
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype==b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind=='f')
    if isinstance(a, (list, tuple, L)):
        return isinstance(b, (list, tuple, L)) and len(a)==len(b) and all(map(same, a, b))
    return a==b or a!=a and b!=b

CALLS = [o for o in ROWS if not isinstance(o, str)]

TABLE = ['| call | what is compared | '+' | '.join(STORES)+' |', '|---|---|'+'---|'*len(STORES)]
TABLE += [f'| **{o}** | | '+' | '.join(['']*len(STORES))+' |' if isinstance(o, str)
    else f'| {o[0]} | {o[1]} | '+' | '.join(['same']*len(STORES))+' |' for o in ROWS]

# --- the tests

@pytest.fixture(scope='module')
def data(server, tmp_path_factory): return make_data(server.url, tmp_path_factory.mktemp('photographs'))

# What trains or draws learners takes longer, and starts with the same loaders
SLOW = [k for k,o in enumerate(CALLS) if any(name in o[0] for name in ('resnet', 'MixUp', 'Cleaner', 'workers', 'tta',
    'fit_', 'fine_tune', 'lr_find', 'GradientAccumulation', 'Interpretation', 'larger pictures', 'export',
    'several labels: `fit`', 'numbers: `fit`'))]
NAMES = [o[0].replace('`', '')[:40] for o in CALLS]

@pytest.mark.parametrize('k', [pytest.param(k, marks=pytest.mark.slow if k in SLOW else (), id=name)
    for k,name in enumerate(NAMES)])
def test_as_stock_fastai(k, data, tmp_path):
    "Over Redis and over shards, and with stock fastai over their files"
    call = CALLS[k][2]
    if 'Cleaner' in CALLS[k][0]: pytest.importorskip('ipywidgets')
    stock = call(Env(data, 'Redis', True, tmp_path))
    for which in STORES:
        plt.close('all')
        assert same(stock, call(Env(data, which, False, tmp_path))), f'{CALLS[k][0]} over {which}'

def test_the_table_in_the_documentation_is_this_one():
    "Each of its calls is tested above"
    cells = json.loads(NOTEBOOK.read_text())['cells']
    assert '\n'.join(TABLE) in ''.join(''.join(c['source']) for c in cells), 'run python tests/test_fastai_api.py'

def test_what_differs_is_noticed():
    "The comparison itself: a bit, a type, an order, a picture"
    x = torch.arange(6.)
    for a,b in ((x, x+1e-6), (x, x.double()), (x, TensorImage(x)), ([1,2], [2,1]), (np.eye(2), np.eye(2)*2),
            (Image.new('L', (2,2)), Image.new('L', (2,2), 1)), ((x, x), (x,))):
        assert not same(a, b) and same(a, a)

if __name__=='__main__':   # write the table into the notebook
    nb = json.loads(NOTEBOOK.read_text())
    cell = next(c for c in nb['cells'] if ''.join(c['source']).startswith('| call |'))
    cell['source'] = '\n'.join(TABLE).splitlines(keepends=True)
    NOTEBOOK.write_text(json.dumps(nb, indent=1, ensure_ascii=False)+'\n')
