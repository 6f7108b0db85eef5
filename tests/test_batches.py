"Batches made at once are those made item by item: bits, types, shapes, strides, errors, requests"
import io, pickle, tarfile, threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import draw, fails
from fastai.vision.all import *
from fasttransform import Transform

from fastai_remote import *
from fastai_remote.codec.fields import get_codec
from fastai_remote.core import CorruptSample, MissingSample
from fastai_remote.store.base import MemoryStore
from fastai_remote.load.whole import WholeBatches
from fastai_remote.load import loader
from fastai_remote.load.batch import BatchReader, fetch_of, StoreInputs
from fastai_remote.load.loader import RemoteDL
from fastai_remote.load.fast_path import BatchPath
from fastai_remote.load.shared_buffers import SharedBuffers
from fastai_remote.order.base import SplitOrder


def both(o): return [list(range(20)), SplitOrder(range(20))]   # all in training, and all in order

def strokes(rng):
    return [np.clip(np.cumsum(rng.integers(-20, 21, (2,9)), 1)+127, 0, 255).astype(np.uint8) for _ in range(3)]

def sample(i):
    "One of every kind, all pictures of one size, grey and in colour by turns"
    rng = np.random.default_rng(i)
    a = rng.integers(0, 256, (20,24) if i%3 else (20,24,3), np.uint8)
    grey = rng.integers(0, 9, (20,24), np.uint8)
    return {'a.png':Image.fromarray(a), 'g.png':Image.fromarray(grey), 'a.jpg':Image.fromarray(a),
        'a.webp':Image.fromarray(a), 'a.npyimg':grey, 'c.npyimg':rng.integers(0, 256, (20,24,3), np.uint8),
        'b.npzimg':a, 'p.png':Image.fromarray(grey).convert('P'), 'd.strokes':strokes(rng), 'cls':'abc'[i%3],
        'age.f4':i/7, 'k.i8':i-5, 'w.f8':1/(i+1), 'labels':['x','y'][:i%3], 'txt':str(i)}

@pytest.fixture(scope='module', params=['redis','shards'])
def store(request, server, tmp_path_factory):
    rows = [sample(i) for i in range(50)]
    if request.param=='shards':
        to_shards(rows, d:=tmp_path_factory.mktemp('batches')/'all', chunk=10, num_workers=1, shuffle=False,
            progress=False)
        return ShardStore(d)
    if 'batches' not in RedisStore.names(server.url):
        to_redis(rows, server.url, 'batches', num_workers=1, shuffle=False, progress=False)
    return RedisStore(server.url, 'batches')

def loaders(store, x, y='cls', **kwargs):
    return DataLoaders.from_store(store, x=x, y=y,
        **{**dict(bs=8, num_workers=0, seed=1, normalize=False, device='cpu'), **kwargs})

@pytest.fixture
def made(monkeypatch):
    "Which batches were made at once"
    log,call = [],WholeBatches.finish
    def logged(self, *a): log.append((b:=call(self, *a)) is not None); return b
    monkeypatch.setattr(WholeBatches, 'finish', logged)
    return log

def stock(dl): return BatchPath(why='this is the way of stock fastai, for comparison')

def batches(dl, whole=True):
    "What `dl` gives, before `after_batch`, of an order that depends on the seed alone"
    dl = dl.new(after_batch=[])
    dl.rng = random.Random(3)
    if whole: return list(dl)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(loader, 'decide_path', stock)
        return list(dl)

def same(a, b):
    assert len(a)==len(b)>0
    for s,t in zip(a, b):
        assert type(s) is type(t) is tuple and len(s)==len(t)
        for x,y in zip(s, t):
            assert type(x) is type(y) and x.dtype==y.dtype and x.shape==y.shape and x.stride()==y.stride() and vars(
                x)==vars(y) and torch.equal(x, y)

PICS = 'a.png g.png a.jpg a.webp a.npyimg c.npyimg b.npzimg p.png d.strokes'.split()

@pytest.mark.parametrize('cls', [PILImage,PILImageBW])
@pytest.mark.parametrize('x', PICS)
def test_pictures(store, made, x, cls):
    dls = loaders(store, x, ['cls','age.f4','k.i8','w.f8'], img_cls=cls, draw=Rasterise(32) if x=='d.strokes' else None)
    for dl in dls: same(batches(dl), batches(dl, False))
    assert all(made) and len(made)==5+2

TFMS = [[RandomResizedCrop(16),FlipItem()], [Resize(16),DihedralItem()], [Resize((12,18), method='squish')],
    [Resize(16, method='pad', pad_mode='zeros')], [CropPad(30)], [CropPad(9),FlipItem(1.)], [RandomCrop(14)]]

KINDS = ('a.jpg',PILImage),('a.png',PILImageBW),('d.strokes',PILImage),('c.npyimg',PILImage)

@pytest.mark.parametrize('kw',
    [dict(num_workers=0), dict(num_workers=2), dict(num_workers=0, threads=3), dict(num_workers=1, threads=2)], ids=str)
@pytest.mark.parametrize('tfms', TFMS, ids=str)
def test_transforms(store, made, tfms, kw):
    """Transforms of pictures draw the same numbers, in training and validation, epoch after epoch

    In workers, each transform with two kinds of pictures where there are two workers, and with the two others where
    there is one: half of the time of these tests goes into starting workers."""
    first = (TFMS.index(tfms)+(kw['num_workers']==1))%2
    for x,cls in KINDS[first::2] if kw['num_workers'] else KINDS:
        dls = loaders(store, x, ['cls','age.f4'], img_cls=cls, item_tfms=tfms,
            draw=Rasterise(32) if x=='d.strokes' else None, drop_last=kw['num_workers']!=0, **kw)
        for dl in dls:
            res = []
            for whole in True,False:
                random.seed(4)
                torch.manual_seed(5)
                res.append(batches(dl, whole)+batches(dl, whole))
            same(*res)
    assert all(made) and (kw['num_workers'] or len(made)==4*2*(5+2))

@pytest.mark.parametrize('draw',
    [Rasterise(16, time='grey'), Rasterise(16, time='colour'), Rasterise(300, antialias=False)])
@pytest.mark.parametrize('cls', [PILImage,PILImageBW])
def test_drawings(store, made, draw, cls):
    dls = loaders(store, 'd.strokes', draw=draw, img_cls=cls)
    same(batches(dls.train), batches(dls.train, False))
    assert all(made) and len(made)==5*(draw.time!='colour' or cls is PILImage)

def test_masks(store, made):
    dls = DataBlock((RedisBlock(store, 'a.jpg'), RedisBlock(store, 'g.png', PILMask),
        RedisBlock(store, 'a.npyimg', PILMask)), get_items=get_remote_items,
        splitter=RandomStoreSplitter()).dataloaders(store, bs=8, num_workers=0)
    same(batches(dls.train), batches(dls.train, False))
    assert made==[True]*5 and dls.one_batch()[1].dtype==torch.int64

class _Scribble(Transform):
    "Writes to a batch before it is floats"
    order = -5
    def encodes(self, o:TensorImage): o[:,0] = 7; return o

@pytest.mark.parametrize('C', [True,False], ids=['C','Pillow'])
@pytest.mark.parametrize('kw', [dict(num_workers=0), dict(num_workers=2), dict(num_workers=0, threads=2)], ids=str)
def test_one_channel_until_floats(store, made, kw, C, monkeypatch):
    "Grey pictures have three channels of their own before anybody can write to them"
    if not C: monkeypatch.setattr('fastai_remote.codec.pixels._pixels', None)
    for x in 'g.png','d.strokes':
        dls = loaders(store, x, draw=Rasterise(200) if x=='d.strokes' else None, bs=40, val_bs=10, **kw)
        for tfms in [],[_Scribble()]:
            dl = dls.train.new(after_batch=[*tfms, IntToFloatTensor()])
            assert dl.floats_next()==(not tfms)
            res = []
            for whole in True,False:
                dl.rng = random.Random(3)
                with monkeypatch.context() as m:
                    if not whole: m.setattr(loader, 'decide_path', stock)
                    res.append([(o.clone(),y) for o,y in dl if o.is_contiguous()])
            same(*res)
            assert res[0][0][0].dtype==torch.float32 and res[0][0][0].shape[1]==3 and (not tfms
                or (res[0][0][0][:,0]==7/255).all())

@pytest.mark.parametrize('x', ['g.png','d.strokes'])
@pytest.mark.parametrize('size', [32,200])
def test_workers(store, x, size):
    "Small batches leave a worker by value, large ones in shared memory; both can be written to"
    dls = loaders(store, x, draw=Rasterise(size) if x=='d.strokes' else None, num_workers=2, bs=40, val_bs=10)
    for dl in dls:
        got = batches(dl)
        same(got, batches(dl.new(num_workers=0), False))
        for b in got: b[0].add_(1)

def test_after_batch_and_show(store, made):
    dls = loaders(store, 'g.png')
    x,y = dls.one_batch()
    assert type(x) is TensorImage and x.dtype==torch.float32 and x.max()<=1 and type(y) is TensorCategory
    dls.show_batch(); dls.show_batch(unique=True); dls.valid.show_batch(max_n=2)
    assert all(made)
    plt.close('all')

def test_learner(store, made):
    dls = loaders(store, 'g.png', num_workers=0)
    learn = Learner(dls, nn.Sequential(Flatten(), nn.Linear(3*20*24, 3)), metrics=accuracy)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        p,y = learn.get_preds()
        q,z = learn.get_preds(dl=dls.test_dl(get_remote_items(store), with_labels=True))
        r,_ = learn.get_preds(dl=dls.test_dl([3,1,4]))
        lbl,k,s = learn.predict(3)
    ids = list(dls.valid_ds.items)
    assert torch.allclose(p, q[ids]) and y.tolist()==z[ids].tolist() and torch.allclose(r,
        q[[3,1,4]]) and torch.allclose(s, q[3]) and all(made) and len(made)>10

def test_n_drop_last_repeats(store, made):
    dls = loaders(store, 'g.png')
    for kw in (dict(n=20), dict(n=20, drop_last=False), dict(n=20, drop_last=True, shuffle=False), dict(balance='cls'),
            dict(bs=1), dict(shuffle=True, bs=7, drop_last=False)):
        same(batches(dls.train.new(**kw)), batches(dls.train.new(**kw), False))
    assert all(made)

def test_vocabularies(store, made):
    "The store's own, a user's in another order, and one that lacks a label"
    def block(vocab):
        return DataBlock((RedisBlock(store, 'g.png'),
            TransformBlock([Fetch('cls', store), Categorize(vocab, sort=False)])), get_items=get_remote_items,
            splitter=RandomStoreSplitter()).dataloaders(store, bs=8, num_workers=0)
    for v in (['a','b','c'],['c','x','a','b']):
        dls = block(v)
        same(batches(dls.train), batches(dls.train, False))
        assert [v[k] for b in batches(dls.valid) for k in b[1]]==[store[i]['cls'] for i in dls.valid_ds.items]
    assert all(made)

def test_item_path(store, made):
    "Anything else in the way, and items are made one by one"
    dls = loaders(store, 'g.png', num_workers=0)
    class Own(RemoteDL):
        def create_item(self, s): return super().create_item(s)
    class Negative(PILImage):
        @classmethod
        def create(cls, b): return cls(Image.fromarray(255-np.array(PILImage.create(b))))
    others = [loaders(store, 'g.png', item_tfms=RatioResize(16)).train,
        loaders(store, ['g.png','a.jpg'], item_tfms=Resize(16)).train, loaders(store, 'g.png', 'labels').train,
        dls.train.new(cls=Own), dls.train.new(create_batch=fa_collate), dls.train.new(before_batch=[lambda b: b]),
              dls.train.new(after_item=[ToTensor, Transform(lambda o: o)]),
              loaders(store, 'g.png', img_cls=Negative).train]
    for dl in others: assert len(list(dl))==5
    assert not made

def test_taught_otherwise(store, made):
    "A class of images with a `ToTensor` of its own is noticed, and its batches are its own"
    class Inverted(PILImage): pass
    @ToTensor
    def encodes(self, o:Inverted): return TensorImage(255-image2tensor(o))
    dls = loaders(store, 'g.png', img_cls=Inverted)
    got = batches(dls.train)
    same(got, batches(dls.train, False))
    assert made==[] and got[0][0].min()>=255-8 and "Inverted is an image class of your own" in dls.train.explain()

def test_sizes_that_differ(server, made):
    "As item by item; and a batch is read once"
    if 'sizes' not in RedisStore.names(server.url):
        to_redis(list(range(20)), server.url, 'sizes', lambda i: {'png':Image.new('L', (8,8+i//10)), 'cls':'ab'[i%2]},
            num_workers=1, shuffle=False, progress=False)
    s,calls = RedisStore(server.url, 'sizes'),[]
    get_many = s.get_many
    s.get_many = lambda *a, **kw: calls.append(len(a[0])) or get_many(*a, **kw)
    dls = DataBlock((RedisBlock(s), RedisBlock(s, 'cls')), get_items=get_remote_items, splitter=both).dataloaders(s,
        bs=5, num_workers=0)
    calls.clear()
    assert [b[0].shape[2] for b in dls.valid]==[8,8,9,9] and calls==[5]*4
    with pytest.raises(RuntimeError, match='Mismatch found on axis 0'): list(dls.valid.new(bs=20))

def test_damaged():
    "The same words as item by item"
    good = [get_codec('png').to_bytes(draw(i).resize((8,8))) for i in range(20)]
    for field,b in (('png',good[7][:60]+b'\0'*20),('d.strokes',b'\xff\1\2'),('a.npyimg',b'\x93NUMPY\1\0v\0')):
        vals = good if field=='png' else [get_codec(field).to_bytes(strokes(np.random.default_rng(i))
            if field!='a.npyimg' else np.zeros((8,8), np.uint8)) for i in range(20)]
        s = MemoryStore({field:[b if i==7 else v for i,v in enumerate(vals)], 'cls':np.zeros(20, np.uint8)}, 'gaps',
            vocab={'cls':['a']})
        for nw in (0,2):
            dl = loaders(s, field, splitter=both, num_workers=nw).valid
            with fails(CorruptSample, match=f"gaps: sample 7, field '{field}'"): list(dl)
    s = MemoryStore({'png':good, 'cls':np.arange(20, dtype=np.uint8)//7}, 'codes', vocab={'cls':['a','b']})
    with fails(CorruptSample, match="codes: sample 14, field 'cls': code 2, but there are 2 labels"):
        list(loaders(s, 'png', splitter=both).valid)

def test_a_damaged_sample_is_replaced(server, made):
    if 'lost' not in RedisStore.names(server.url):
        to_redis(list(range(20)), server.url, 'lost',
            lambda i: {'png':Image.new('L', (8,8), i), 'cls':'ab'[i%2], 'k.i8':i}, num_workers=1, shuffle=False,
            progress=False)
        s = RedisStore(server.url, 'lost')
        s.link.call(lambda c: c.delete(f'{s.manifest.prefix}:png:7'))
    s = RedisStore(server.url, 'lost')
    for nw in (0,2):
        dl = loaders(s, 'png', ['cls','k.i8'], num_workers=nw, on_bad='replace', valid_pct=.1).train
        with warnings.catch_warnings(record=True):
            warnings.simplefilter('always')
            got = batches(dl)
            same(got, batches(dl.new(num_workers=0), False))
        assert 7 not in [int(k) for b in got for k in b[2]] and all(int(k)==int(x[0,0,0]) for b in got
            for x,k in zip(b[0], b[2]))
    assert all(made)

def own_transform(): return Transform(lambda x: x, order=2)   # it keeps batches from being built as a whole

def ordered(o): return [list(range(15)), SplitOrder(range(15, 20))]

@pytest.fixture
def lacking(server):
    "A function that opens a dataset of 20 samples without the pictures of some"
    def opened(*bad):
        to_redis(list(range(20)), server.url, 'lacking', lambda i: {'png':Image.new('L', (8,8), i), 'cls':'ab'[i%2]},
            num_workers=1, shuffle=False, progress=False, overwrite=True)
        s = RedisStore(server.url, 'lacking')
        for i in bad: s.link.call(lambda c: c.delete(f'{s.manifest.prefix}:png:{i}'))
        return s
    return opened

@pytest.mark.filterwarnings('ignore:.*were missing or damaged')
@pytest.mark.parametrize('on_bad', ['replace','skip'])
@pytest.mark.parametrize('tfms', [None,own_transform()])
def test_a_dataset_never_shows_the_stand_in_of_a_batch(lacking, on_bad, tfms):
    "Neither in the midst of an epoch, nor when a loader was left early, nor after the epoch"
    ds = (dls:=loaders(lacking(5), 'png', splitter=ordered, on_bad=on_bad, item_tfms=tfms, shuffle=False)).train_ds
    def check():
        with fails(MissingSample, match='lacking: sample 5 is missing'): ds[5]
        assert [fetch_of(tl).values for tl in ds.tls]==[{},{}] and not ds.items.known
    check()
    assert len(dls.one_batch()[0])==8-(on_bad=='skip')
    check()
    for batch in dls.train: check()
    check()

@pytest.mark.filterwarnings('ignore:.*were missing or damaged')
@pytest.mark.parametrize('on_bad', ['replace','skip'])
@pytest.mark.parametrize('tfms', [None,own_transform()])
def test_the_first_sample_may_be_bad(lacking, on_bad, tfms):
    "In training, in validation and in both; for a regression, too, whose block looks at the first target"
    store = lacking(0, 15)
    dls = loaders(store, 'png', splitter=ordered, on_bad=on_bad, item_tfms=tfms, shuffle=False, drop_last=False)
    numbers = [[int(k) for b in batches(dl, False) for k in b[0][:,0,0,0]] for dl in dls]
    if on_bad=='skip': assert numbers==[list(range(1, 15)),list(range(16, 20))]
    else: assert numbers[0][1:]==list(range(1, 15)) and 0<numbers[0][0]<15 and len(numbers[1])==5
    assert dls.n_inp==1 and not any(fetch_of(tl).values for dl in dls for tl in dl.dataset.tls)
    with fails(MissingSample, match='lacking: sample 0 is missing'): loaders(store, 'png', splitter=ordered)
    with fails(MissingSample, match='lacking: sample'):   # and none can take its place
        loaders(lacking(*range(20)), 'png', splitter=ordered, on_bad=on_bad)

@pytest.mark.filterwarnings('ignore:.*were missing or damaged')
@pytest.mark.parametrize('on_bad', ['replace','skip'])
@pytest.mark.parametrize('tfms', [None,own_transform()])
def test_the_first_sample_may_be_no_picture(on_bad, tfms):
    "although its checksum is right; in training and in validation"
    def store(*bad):
        pictures = [png_file(k)[:-40] if k in bad else png_file(k) for k in range(20)]
        return MemoryStore({'png':pictures, 'cls':np.arange(20, dtype='u1')%2}, 'cut', vocab={'cls':['a','b']})
    options = dict(splitter=ordered, item_tfms=tfms, shuffle=False, drop_last=False)
    dls = loaders(store(0, 15), 'png', on_bad=on_bad, **options)
    numbers = [[int(k) for b in batches(dl, False) for k in b[0][:,0,0,0]] for dl in dls]
    assert not {0,15}&set(sum(numbers, []))
    assert numbers[0][on_bad=='replace':]==list(range(1, 15)) and len(numbers[1])==5-(on_bad=='skip')
    assert not any(fetch_of(tl).values for dl in dls for tl in dl.dataset.tls)
    with fails(CorruptSample, match="cut: sample 0, field 'png'"): loaders(store(0), 'png', **options).one_batch()
    with fails(CorruptSample, match="cut: sample 0, field 'png'"):
        loaders(store(*range(20)), 'png', on_bad=on_bad, **options)

@pytest.mark.filterwarnings('ignore:.*were missing or damaged')
def test_predictions_are_never_shifted(lacking):
    "Where results belong to samples by position, a bad sample is not skipped, but an error that names it"
    def learner(on_bad):
        dls = loaders(lacking(17), 'png', splitter=ordered, on_bad=on_bad)
        return Learner(dls, nn.Sequential(Flatten(), nn.Linear(192, 2)), loss_func=CrossEntropyLossFlat())
    learn = learner('skip')
    items = learn.dls.valid_ds.items
    calls = [lambda: learn.get_preds(), lambda: learn.tta(n=1), lambda: learn.predict(17),
             lambda: learn.get_preds(dl=learn.dls.test_dl(items)), lambda: list(learn.dls.test_dl(items)),
             lambda: learn.get_preds(dl=learn.dls.test_dl(items), reorder=False),
             lambda: learn.get_preds(dl=learn.dls.test_dl(items, on_bad='skip'))]
    with learn.no_bar(), learn.no_logging():
        for call in calls:
            with fails(MissingSample, match='lacking: .*17') as e: call()
            assert e.value.__notes__==[loader._not_skipped]
        assert len(learn.validate())==1 and sum(len(b[0]) for b in learn.dls.valid)==4
        assert len(learn.get_preds(reorder=False)[0])==4
        assert len(learn.get_preds(dl=learn.dls.test_dl([15,16,18]))[0])==3
        learn.fit(1)
    learn = learner('replace')
    with learn.no_bar(): assert len(learn.get_preds()[0])==5

@pytest.mark.parametrize('n', [1,3])
def test_weights_for_other_labels_are_refused(lacking, n):
    with fails(ValueError, match=f"lacking: balance= has {n} weights, but field 'cls' has 2 labels"):
        loaders(lacking(), 'png', balance=('cls', [1]*n))

def test_balance_is_for_what_is_trained_with():
    "Files to predict, test sets without labels and inputs of another store are no reason to refuse a loader"
    images,labels = {'png':[png_file(k) for k in range(20)]},{'cls':np.arange(20, dtype='u1')%2}
    store,inputs,targets = (MemoryStore(o, name, vocab={'cls':['a','b']} if 'cls' in o else None)
        for name,o in (('both',{**images,**labels}), ('inputs',images), ('targets',labels)))
    for o in store,targets: o.manifest.counts = {'cls':[10,10]}
    dls = loaders(store, 'png', balance='cls')
    for items in [{'png':png_file(1)}],[png_file(1)],get_remote_items(inputs)[:1]:
        assert dls.test_dl(items).one_batch()[0].shape==(1,3,8,8)
    two = DataBlock((RedisBlock(inputs,'png'),RedisBlock('cls')), get_items=get_remote_items, splitter=RandomStoreSplitter())
    x,y = two.dataloaders(targets, balance='cls', bs=8, num_workers=0, device='cpu').one_batch()
    assert (x[:,0,0,0]*255).round().long().remainder(2).tolist()==y.tolist()

def png_file(k):
    Image.new('L', (8,8), k).save(f:=io.BytesIO(), 'PNG')
    return f.getvalue()

@pytest.mark.parametrize('options,error', [
    (dict(balance=['cls',[1,1]]), "balance= takes a field, or a field and the weight of each of its labels, not .'cls', .1"),
    (dict(balance=('cls',)), 'balance= takes a field, or'), (dict(balance=3), 'balance= takes a field, or'),
    (dict(balance=('txt',[1,1])), "field with one label for each sample, and 'txt' holds txt"),
    (dict(balance=('no',[1,1])), "no field 'no'"), (dict(balance='age.f4'), "labels of 'age.f4' are not counted"),
    (dict(prefetch=-1), 'prefetch and threads must be at least 0, not prefetch=-1, threads=0'),
    (dict(threads=-2), 'prefetch and threads must be at least 0, not prefetch=1, threads=-2'),
    (dict(interleave=0), 'interleave must be at least 1, or None, not 0')])
def test_wrong_options_are_refused_when_a_loader_is_made(options, error):
    store = MemoryStore({'png':[b'']*9, 'cls':np.zeros(9, 'u1'), 'txt':[b'a']*9, 'age.f4':np.zeros(9, 'f4')}, vocab={'cls':['a','b']})
    dataset = Datasets(get_remote_items(store), [[Fetch('txt')],[Fetch('cls')]])
    with pytest.raises((TypeError,ValueError,UnknownField), match=error): RemoteDL(dataset, bs=2, shuffle=True, **options)

def test_balance_needs_a_store():
    with pytest.raises(TypeError, match='balance= needs the items of a store, not a list'): RemoteDL([1,2], shuffle=True, balance='cls')

def test_indices(store, made):
    "A splitter that lists indices is no hindrance"
    dls = loaders(store, 'g.png', splitter=IndexSplitter(list(range(10, 20))))
    for dl in dls: same(batches(dl), batches(dl, False))
    assert all(made) and len(made)==5+2

def test_items_are_as_ever(store):
    "What a loader says of an item, and makes of some, is what stock fastai's says"
    dl = loaders(store, 'a.jpg', item_tfms=Resize(16)).train
    x,y = dl.do_item(0)
    assert type(x) is TensorImage and type(y) is TensorCategory and x.shape==(3,16,16)
    b = dl.do_batch([dl.do_item(i) for i in range(3)])
    assert type(b[0]) is TensorImage and b[0].shape==(3,3,16,16)

class _Own(Transform):
    "A transform of a user's"
    order = 2
    def encodes(self, o:PILImage): return o

def test_explain_names_what_prevents_the_fast_path(store, capsys):
    "In one sentence, for a loader and in `DataBlock.summary`; and what it says is what is done"
    def train(**kw): return loaders(store, 'a.jpg', **kw).train
    assert train(item_tfms=Resize(
        16)).explain()=="Whole batches are built at once: all transforms of items are fastai's own, unchanged."
    assert train(item_tfms=[Resize(16),
        _Own]).explain()==('Items are built one by one, images stay undecoded through Resize: '
            '_Own is not a transform that images can pass undecoded.')
    assert "by fastai's own code: _Own is" in train(item_tfms=[_Own]).explain()
    assert 'MultiCategorize' in train(y='labels',
        item_tfms=Resize(16)).explain() or 'one transform' in train(y='labels', item_tfms=Resize(16)).explain()
    t = FlipItem()
    t.before_call = lambda b, split_idx: None
    assert 'FlipItem.before_call was replaced on the object' in train(item_tfms=[Resize(16),t]).explain()
    assert 'create_item was replaced' in train(item_tfms=Resize(16)).new(create_item=lambda s: s).explain()
    block = DataBlock((RedisBlock(store, 'a.jpg'), RedisBlock(store, 'cls')), get_items=get_remote_items,
        splitter=both, item_tfms=[Resize(16),_Own])
    block.summary(store)
    assert 'images stay undecoded through Resize: _Own is not a transform' in capsys.readouterr().out

def test_item_transforms_that_do_nothing_are_no_whole_batches(store):
    dl = loaders(store, 'a.jpg').train
    dl.after_item.fs = type(dl.after_item.fs)([Transform(noop)])
    assert dl.explain()=="Items are built one by one, by fastai's own code: there is no ToTensor."

def test_images_are_stock_outside_a_loader(store):
    "One item of a dataset is what stock fastai has: decoded, of its type"
    dls = loaders(store, 'a.jpg', item_tfms=Resize(16))
    dls.one_batch()
    im = dls.train_ds[3][0]
    assert type(im) is PILImage and type(im).__mro__==PILImage.__mro__
    it = iter(dls.train)
    next(it)
    assert type(dls.train_ds[3][0]) is PILImage   # in the middle of an epoch, too

def test_reducing_gap_is_an_option(store):
    with pytest.raises(ValueError, match='reducing_gap must be 1.0 or more'): loaders(store, 'a.jpg', reducing_gap=.5)
    dl = loaders(store, 'a.jpg', item_tfms=Resize(16), reducing_gap=2.).train
    assert dl.new(bs=4).reducing_gap==2. and len(list(dl))

def test_a_field_and_a_class_are_taken_for_what_they_are(store):
    dls = DataBlock((RedisBlock('a.jpg'), RedisBlock('g.png', PILMask)), get_items=get_remote_items,
        splitter=both).dataloaders(store, bs=8, num_workers=0)
    assert type(dls.one_batch()[1]) is TensorMask
    with pytest.raises(TypeError, match="not the str 'a' and 'b'"): RedisBlock('a', 'b')

def every(items): return [14,15],SplitOrder(range(len(items)))

def picture_and_label(dl):
    "`(number that the picture shows, label)` of each sample of an epoch, batch by batch"
    return [[(round(float(v)*255) if v.is_floating_point() else int(v), int(label)) for v,label in zip(x.flatten(1)[:,0], y)] for x,y in dl]

@pytest.mark.filterwarnings('ignore:.*were missing or damaged')
@pytest.mark.parametrize('num_workers', [0,2])
@pytest.mark.parametrize('tfms', [None,own_transform()])
@pytest.mark.parametrize('kind', ['getter','two stores','list'])
def test_a_replaced_sample_is_replaced_for_all_pipelines(lacking, kind, tfms, num_workers):
    "also where the label is computed from the item, comes from another store, or the items are a list"
    store,n = lacking(3, 10),20
    labels = MemoryStore({'y.i4':np.arange(n, dtype='i4')})
    get_items = (lambda s: list(range(n))) if kind=='list' else get_remote_items
    blocks = (RedisBlock('png') if kind!='list' else TransformBlock(type_tfms=[Fetch('png', store, PILImage)], item_tfms=ToTensor, dls_kwargs={}, batch_tfms=IntToFloatTensor),
              TransformBlock(type_tfms=Fetch('y.i4', labels)) if kind=='two stores' else RegressionBlock)
    block = DataBlock(blocks, get_items=get_items, get_y=None if kind=='two stores' else lambda number: number, splitter=lambda items: ([0,1], list(range(n))), item_tfms=tfms,
                      dl_type=RemoteDL)
    dls = block.dataloaders(store, bs=4, num_workers=num_workers, device='cpu', on_bad='replace')
    pairs = sum(picture_and_label(dls.valid), [])
    assert len(pairs)==n and all(picture==label for picture,label in pairs) and dls.valid.replaced==[3,10]
    assert [label for _,label in pairs if label in (3,10)]==[] and [pair[0] for k,pair in enumerate(pairs) if k not in (3,10)]==[i for i in range(n) if i not in (3,10)]

@pytest.mark.filterwarnings('ignore:.*were missing or damaged')
@pytest.mark.parametrize('num_workers', [0,2])
@pytest.mark.parametrize('tfms', [None,own_transform()])
def test_only_bad_samples_are_skipped(lacking, tfms, num_workers):
    "not their batches, although loaders for training leave out a last batch that is smaller"
    all_twenty = lambda items: (SplitOrder(range(20)), [0,1])
    dls = loaders(lacking(3, 10, 11), 'png', bs=4, splitter=all_twenty, on_bad='skip', item_tfms=tfms, num_workers=num_workers)
    assert dls.train.drop_last
    batches = picture_and_label(dls.train)
    assert sum(map(len, batches))==17 and sorted(picture for batch in batches for picture,_ in batch)==[i for i in range(20) if i not in (3,10,11)]
    assert len(batches)==5 and sum(len(batch)==4 for batch in batches)>=2
    assert len([b for b in loaders(lacking(3), 'png', bs=8, splitter=all_twenty, on_bad='skip', item_tfms=tfms, num_workers=num_workers).train])==2   # of 20

@pytest.mark.filterwarnings('ignore:.*were missing or damaged')
@pytest.mark.parametrize('tfms', [None,own_transform()])
@pytest.mark.parametrize('bad', [range(4), range(4, 8), range(16, 20), range(2, 14)])
def test_batches_keep_their_order_if_all_samples_of_one_are_skipped(lacking, bad, tfms):
    "Workers give batches in turn. One that has nothing to give must not lose its turn"
    dls = loaders(lacking(*bad), 'png', bs=4, splitter=every, on_bad='skip', item_tfms=tfms, num_workers=2)
    batches = picture_and_label(dls.valid)
    assert [picture for batch in batches for picture,_ in batch]==[i for i in range(20) if i not in bad] and all(batches)

@pytest.mark.filterwarnings('ignore:.*were missing or damaged')
@pytest.mark.parametrize('num_workers', [0,2])
@pytest.mark.parametrize('tfms', [None,own_transform()])
@pytest.mark.parametrize('on_bad', ['raise','replace','skip'])
def test_a_picture_that_cannot_be_decoded_is_a_damaged_sample(tmp_path, tfms, num_workers, on_bad):
    "In tars of others, its checksum is right"
    def jpg(i):
        f = io.BytesIO()
        Image.new('L', (32,32), i).save(f, 'JPEG')
        return f.getvalue()[:-150] if i in (5,9) else f.getvalue()
    with tarfile.open(tmp_path/'a.tar', 'w') as tar:
        for i in range(20):
            for name,content in ((f'{i:02}.jpg',jpg(i)),(f'{i:02}.cls',str(i).encode())):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    index_shards(tmp_path, num_workers=1, progress=False)
    dls = loaders(ShardStore(tmp_path), 'jpg', bs=4, splitter=every, on_bad=on_bad, item_tfms=tfms, num_workers=num_workers)
    if on_bad=='raise':
        with fails(CorruptSample, match="sample 5, field 'jpg'"): list(dls.valid)
        return
    pairs = sum(picture_and_label(dls.valid), [])
    assert all(abs(picture-label)<2 for picture,label in pairs) and dls.valid.replaced==[5,9]
    assert len(pairs)==(20 if on_bad=='replace' else 18) and not {5,9}&{label for _,label in pairs}
    if on_bad=='skip':
        with fails(CorruptSample, match="sample 5, field 'jpg'"): list(dls.test_dl(dls.valid.items))

def test_buffers_of_batches_that_begin_with_a_grey_image_are_freed():
    "Its pixels are repeated when the first image in colour comes"
    def png(i):
        image = Image.new('RGB' if i%16 else 'L', (300,300), (i,0,2*i) if i%16 else 9)
        image.save(f:=io.BytesIO(), 'PNG', compress_level=1)
        return f.getvalue()
    store = MemoryStore({'png':[png(i) for i in range(96)], 'cls':np.arange(96)%2}, 'grey', vocab={'cls':['a','b']})
    options = dict(splitter=lambda items: [items, items], bs=16, device='cpu')
    alone,dl = [DataLoaders.from_store(store, num_workers=n, **options).valid for n in (0,1)]
    batches = iter(dl)
    found = [next(batches)]
    buffers = dl.buffers
    found += batches
    assert buffers is not None and buffers.busy.sum()==0
    assert all(torch.equal(a[0], b[0]) for a,b in zip(alone, found, strict=True))

def test_threads_of_a_worker_never_get_the_same_buffer(monkeypatch):
    buffers,find,start = SharedBuffers(1),np.flatnonzero,threading.Barrier(4)
    def slow(*args):
        free = find(*args)
        threading.Event().wait(.05)
        return free
    monkeypatch.setattr(np, 'flatnonzero', slow)
    found = []
    def allocate():
        start.wait()
        found.append(buffers.allocate(0, 10).ctypes.data)
    threads = [threading.Thread(target=allocate) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(set(found))==4

def test_a_list_without_a_store_is_not_searched_for_sample_numbers():
    class Unsearched(list):
        def __iter__(self): raise AssertionError('searched')
    dataset = TfmdLists(Unsearched('ab'), [str.upper], do_setup=False)
    assert StoreInputs(dataset).stores==[]

def test_bad_samples_are_reported_by_the_thread_that_takes_the_batches():
    "Several threads read in advance, and would overwrite each other's report"
    class Bad(MemoryStore):
        def read_values(self, numbers, fields):
            if (numbers%3==0).any(): raise MissingSample('gone')
            return super().read_values(numbers, fields)
    store = Bad({'x.f4':np.arange(60, dtype='f4')})
    dataset = TfmdLists(get_remote_items(store), [Fetch('x.f4', store)], do_setup=False)
    for on_bad in 'skip','replace':
        reported = []
        def report(number): reported.append((number, threading.get_ident()))
        reader = BatchReader(StoreInputs(dataset), True, 3, on_bad=on_bad, report=report)
        assert [len(batch.positions) for batch in reader.batches(range(60), 6)]==[4 if on_bad=='skip' else 6]*10
        assert reported==[(number, threading.get_ident()) for number in range(0, 60, 3)]

# --- methods of a loader that are replaced or called from outside

@pytest.fixture(scope='module')
def in_shards(tmp_path_factory):
    "60 numbers in shards of 10"
    rows = [{'x.f4':i, 'cls':'ab'[i%2]} for i in range(60)]
    to_shards(rows, d:=tmp_path_factory.mktemp('in_shards'), num_workers=1, maxcount=10, shuffle=False, progress=False)
    return ShardStore(d)

def numbers_of(batches): return [int(x) for batch in batches for x in batch[0]]

def loader_of_numbers(store, cls=RemoteDL, **kwargs):
    dataset = Datasets(get_remote_items(store), [[Fetch('x.f4')],[Fetch('cls')]])
    return cls(dataset, **{**dict(bs=8, num_workers=0), **kwargs})

def backwards(positions): return list(positions)[::-1]

class BackwardsDL(RemoteDL):
    def shuffle_fn(self, idxs): return backwards(idxs)

@pytest.mark.parametrize('how', ['argument','attribute','override'])
@pytest.mark.parametrize('options', [{},dict(lengths=lambda ds: np.arange(60))], ids=['shards','lengths'])
def test_a_shuffle_of_ones_own_is_used(in_shards, options, how):
    "also for shards and samples of similar lengths; an epoch that is not shuffled does not ask it"
    cls = BackwardsDL if how=='override' else RemoteDL
    if how=='argument': options = {**options,'shuffle_fn':backwards}
    dl = loader_of_numbers(in_shards, cls, shuffle=True, **options)
    if how=='attribute': dl.shuffle_fn = backwards
    assert numbers_of(dl)==list(range(60))[::-1]
    if not options.get('lengths'): assert numbers_of(dl.new(shuffle=False))==list(range(60))

def test_a_shuffle_of_ones_own_does_not_go_with_balance(in_shards):
    dl = loader_of_numbers(in_shards, BackwardsDL, shuffle=True, balance='cls')
    with fails(ValueError, match='balance= draws the samples, and shuffle_fn was replaced'): next(iter(dl))
    assert numbers_of(dl.new(balance=None))==list(range(60))[::-1]

@pytest.mark.parametrize('on_bad', ['raise','skip'])
def test_a_batch_may_be_none(in_shards, on_bad):
    "as in stock fastai: it does not end the epoch"
    def create_batch(samples): return None if int(samples[0][0])==8 else torch.tensor([x for x,_ in samples])
    dl = loader_of_numbers(in_shards, create_batch=create_batch, on_bad=on_bad)
    assert [batch is None for batch in dl]==[False,True]+[False]*6

def test_the_order_of_balanced_labels_is_pickled(in_shards):
    "for workers that are spawned"
    order = loader_of_numbers(in_shards, shuffle=True, balance='cls').get_idxs()
    assert list(pickle.loads(pickle.dumps(order)))==list(order)

@pytest.mark.filterwarnings('ignore:.*were missing or damaged')
@pytest.mark.parametrize('num_workers', [0,2])
@pytest.mark.parametrize('on_bad', ['replace','skip'])
def test_samples_one_by_one_may_be_bad(lacking, on_bad, num_workers):
    dataset = Datasets(get_remote_items(lacking(3, 4)), [[Fetch('png', img_cls=PILImage)]])
    dl = RemoteDL(dataset, bs=None, num_workers=num_workers, after_item=[ToTensor()], on_bad=on_bad)
    shown = [int(x[0,0,0]) for x, in dl]
    assert [i for i in shown if i not in (3,4)]==shown and len(shown)==(20 if on_bad=='replace' else 18)

@pytest.mark.parametrize('on_bad', ['replace','skip'])
def test_bad_samples_are_reported_whatever_before_iter_does(lacking, on_bad):
    dl = loaders(lacking(3), 'png', splitter=every, on_bad=on_bad, before_iter=noop).valid
    with pytest.warns(UserWarning, match='1 samples were missing or damaged'): list(dl)
    assert dl.replaced==[3]

@pytest.mark.filterwarnings('ignore:.*were missing or damaged')
def test_all_samples_of_a_batch_are_skipped_in_learn_distrib_ctx(lacking, monkeypatch):
    "with one process"
    monkeypatch.setenv('WORLD_SIZE', '1')
    from fastai.distributed import DistributedTrainer
    dl = loaders(lacking(*range(4, 8)), 'png', bs=4, splitter=every, on_bad='skip', num_workers=2).valid
    trainer = SimpleNamespace(learn=SimpleNamespace(model=SimpleNamespace(device='cpu')))
    batches = picture_and_label(DistributedTrainer._wrap_dl(trainer, dl))
    assert [picture for batch in batches for picture,_ in batch]==[i for i in range(20) if i not in range(4, 8)]

def test_batches_before_any_epoch(in_shards):
    "as in stock fastai: of positions that are given"
    dl = loader_of_numbers(in_shards, bs=4, shuffle=True)
    assert numbers_of(dl.create_batches([7,50,3,9,8,11]))==[7,50,3,9,8,11]
    list(dl)
    assert numbers_of(dl.create_batches([7,50,3,9,8,11]))==[7,50,3,9,8,11]
