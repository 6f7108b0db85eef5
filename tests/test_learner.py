"All that a fastai user does with a Learner works over a store, with and without workers"
import io, json, os, pickle, random, subprocess, sys, tarfile, textwrap

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from conftest import CLASSES, N, class_of, draw, fails
from fastai.data.load import SkipItemException
from fastai.vision.all import *

from fastai_remote import *
from fastai_remote.codec.fields import get_codec
from fastai_remote.order.base import Order
from fastai_remote.codec.raster import rasterise
from fastai_remote.store.redis_link import RedisLink

from fastcore.test import test_close as close

class Tiny(nn.Module):
    "32 by 32 pixels in, three classes out"
    def __init__(self, c=3):
        super().__init__()
        self.conv,self.lin = nn.Conv2d(3, 8, 5, stride=4),nn.Linear(8*7*7, c)
    def forward(self, x): return self.lin(F.relu(self.conv(x)).flatten(1))

@pytest.fixture(params=[0,2], ids=['in process','two workers'])
def workers(request): return request.param

@pytest.fixture(scope='module')
def shards(images, tmp_path_factory):
    "The same images in shards of 16"
    to_shards(image_samples(images, label=class_of, path=True), d:=tmp_path_factory.mktemp('shards')/'pics', chunk=16,
        num_workers=1, progress=False)
    return ShardStore(d)

@pytest.fixture(params=['redis','shards','tiered'])
def store(request, server, redis_pics, shards):
    return dict(redis=redis_pics, shards=shards, tiered=TieredStore(server.url, shards))[request.param]

@pytest.fixture
def dls(store, workers):
    return DataLoaders.from_store(store, item_tfms=Resize(32), bs=8, num_workers=workers, seed=1, normalize=False)

@pytest.fixture
def learn(dls, tmp_path): return Learner(dls, Tiny(), metrics=accuracy, path=tmp_path)

@pytest.fixture(autouse=True)
def tidy():
    "The same seed for each test, and no figures left open"
    set_seed(0)
    yield
    plt.close('all')

@pytest.fixture(params=['redis','shards'])
def numbered(request, server, tmp_path):
    "A store whose label is the sample's own number, and its loaders"
    if request.param=='shards':
        to_shards(list(range(100)), tmp_path/'numbered', lambda i: {'png':draw(i), 'age.f4':float(i)}, chunk=10,
            num_workers=1, shuffle=False, progress=False)
        return ShardStore(tmp_path/'numbered')
    if 'numbered' not in RedisStore.names(server.url):
        to_redis(list(range(100)), server.url, 'numbered', lambda i: {'png':draw(i), 'age.f4':float(i)}, num_workers=1,
            shuffle=False, progress=False)
    return RedisStore(server.url, 'numbered')

def seen(dl): return [int(o) for b in dl for o in b[1]]

# --- looking at data

def test_batch_and_show(dls):
    x,y = dls.one_batch()
    assert x.shape==(8,3,32,32) and x.dtype==torch.float32 and 0<=x.min() and x.max()<=1
    assert type(x) is TensorImage and type(y) is TensorCategory and dls.vocab==list(CLASSES) and dls.c==3
    dls.show_batch()
    dls.valid.show_batch(max_n=4)
    dls.show_batch(unique=True)
    assert set(t.get_title() for t in plt.gcf().axes if t.get_title())<=set(CLASSES)

def test_summary(store, workers, capsys):
    DataBlock((RedisBlock, RedisBlock('cls')), get_items=get_remote_items, splitter=RandomStoreSplitter(),
        item_tfms=Resize(32)).summary(store, bs=4)
    out = capsys.readouterr().out
    assert 'Found 60 items' in out and '2 datasets of sizes 48,12' in out and 'applying Fetch' in out

# --- training

def test_trains(learn):
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(8, 0.01)
    assert learn.validate()[1]>0.6

def test_lr_find(learn):
    with learn.no_bar(): r = learn.lr_find(num_it=8, show_plot=False)
    assert 0<r.valley<10

def test_validate(learn):
    with learn.no_bar(): l,a = learn.validate()
    p,y = learn.get_preds()
    assert np.isclose(l, F.cross_entropy(p.log(), y).item(), atol=1e-4) and np.isclose(a,
        (p.argmax(1)==y).float().mean().item())

# --- predicting

def test_get_preds_keeps_the_order(learn, store):
    with learn.no_bar():
        x,p,y,d = learn.get_preds(with_input=True, with_decoded=True)
        p2,y2 = learn.get_preds(dl=learn.dls.valid.new(shuffle=True))
        pt,yt = learn.get_preds(ds_idx=0)
    ids = list(learn.dls.valid_ds.items)
    assert y.tolist()==store.get_many(ids, 'cls')['cls'].tolist()==y2.tolist() and torch.allclose(p,
        p2) and d.tolist()==p.argmax(1).tolist()
    assert x.shape==(12,3,32,32) and len(pt)==48 and yt.tolist()==store.get_many(list(learn.dls.train_ds.items),
        'cls')['cls'].tolist()

def test_predict(learn, store):
    i = 7
    b = store.get_many([i], 'jpg')['jpg'][0]
    with learn.no_bar(): res = [learn.predict(o) for o in (i, np.int64(i), b, PILImage.create(b), {'jpg':b})]
    for lbl,k,p in res: assert lbl==CLASSES[k] and torch.allclose(p, res[0][2])

def test_test_dl(learn, store, images):
    files,ids = get_image_files(images)[:9],[3,1,4,1,5]
    with learn.no_bar():
        p,_ = learn.get_preds(dl=learn.dls.test_dl(ids))
        q,y = learn.get_preds(dl=learn.dls.test_dl(np.array(ids), with_labels=True))
        f,_ = learn.get_preds(dl=learn.dls.test_dl(files))
        g,z = learn.get_preds(dl=learn.dls.test_dl(image_samples(files, label=class_of), with_labels=True))
        h,_ = learn.get_preds(dl=learn.dls.test_dl([o.read_bytes() for o in files]))
    assert torch.allclose(p, q) and torch.allclose(p[1], p[3]) and y.tolist()==store.get_many(ids,
        'cls')['cls'].tolist()
    assert torch.allclose(f, g) and torch.allclose(f, h) and [CLASSES[k] for k in z]==[class_of(o) for o in files]

def test_test_dl_of_another_store(learn, server, store):
    "A test set in a dataset of its own, with labels in another order"
    if 'other' not in RedisStore.names(server.url):
        to_redis(list(range(100,130)), server.url, 'other', lambda i: {'jpg':draw(i), 'cls':CLASSES[i%3]},
            vocab=['dog','bird','cat'], num_workers=1, progress=False)
    other = RedisStore(server.url, 'other')
    dl = learn.dls.test_dl(get_remote_items(other), with_labels=True)
    with learn.no_bar(): p,y = learn.get_preds(dl=dl)
    assert [CLASSES[k] for k in y]==[other[i]['cls'] for i in range(30)]
    assert dl.dataset[3][1]==CLASSES.index(other[3]['cls'])
    with learn.no_bar(): q = learn.predict(other.get_many([4], 'jpg')['jpg'][0])[2]
    assert torch.allclose(p[4], q, atol=1e-5)
    assert learn.dls.valid.stores==[store]

def test_show_results(learn):
    with learn.no_bar(): learn.show_results(max_n=4)
    assert len([a for a in plt.gcf().axes if a.get_title()])==4

def test_interpretation(learn):
    with learn.no_bar():
        interp = ClassificationInterpretation.from_learner(learn)
        interp.plot_top_losses(4)
        interp.most_confused()
        losses,idx,items = interp.top_losses(3, items=True)
        cm = interp.confusion_matrix()
    assert cm.sum()==12 and list(items)==[learn.dls.valid_ds.items[int(i)] for i in idx] and losses[0]>=losses[-1]

# --- keeping

def test_export_and_load_elsewhere(learn, store, tmp_path, interpreters):
    b = store.get_many([5], 'jpg')['jpg'][0]
    with learn.no_bar(): want = learn.predict(b)[2].tolist()
    learn.export()
    (tmp_path/'b.jpg').write_bytes(b)
    script = f'''
        import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
        from fastai.vision.all import *
        from test_learner import Tiny
        learn = load_learner({str(tmp_path/'export.pkl')!r})
        with learn.no_bar():
            print(learn.predict(Path({str(tmp_path/'b.jpg')!r}))[2].tolist())
            print(learn.predict(5)[2].tolist())
    '''
    out = interpreters.run(textwrap.dedent(script), check=True).stdout.splitlines()
    for l in out[-2:]: assert np.allclose(json.loads(l), want, atol=1e-5)

def test_pickled_loaders(dls):
    assert len(d:=pickle.dumps(dls))<100_000
    assert pickle.loads(d).one_batch()[0].shape==(8,3,32,32)

# --- the loader's own promises

def test_every_sample_once_in_another_order(numbered, workers):
    dls = DataLoaders.from_store(numbered, y='age.f4', item_tfms=Resize(16), bs=8, num_workers=workers, drop_last=False)
    a,b = seen(dls.train),seen(dls.train)
    assert a!=b and sorted(a)==sorted(b)==sorted(dls.train_ds.items) and len(a)==80
    assert seen(dls.valid)==list(dls.valid_ds.items)
    assert sorted(a+seen(dls.valid))==list(range(100))

def test_same_seed_same_order(numbered, workers):
    def epochs(nw):
        set_seed(42)
        dls = DataLoaders.from_store(numbered, y='age.f4', item_tfms=Resize(16), bs=8, num_workers=nw)
        return [seen(dls.train), seen(dls.train)]
    # workers have shards of their own
    assert epochs(workers)==epochs(workers if isinstance(numbered, ShardStore) else 0)

def test_new_n_and_drop_last(numbered, workers):
    dls = DataLoaders.from_store(numbered, y='age.f4', item_tfms=Resize(16), bs=16, num_workers=workers)
    tr = dls.train
    assert len(tr)==5 and tr.drop_last and len(seen(tr))==80
    big = tr.new(bs=30)
    assert [len(b[1]) for b in big]==[30,30] and [len(b[1]) for b in big.new(drop_last=False)]==[30,30,20]
    few = tr.new(n=24, bs=8)
    assert len(few)==3 and sorted(seen(few))==sorted(tr.dataset.items[i] for i in range(24)) and few.new(bs=4).n==24
    assert [len(dl) for dl in dls.new_empty()]==[0,0]
    again = dls.train.new(dls.valid_ds, shuffle=False, drop_last=False)
    assert seen(again)==list(dls.valid_ds.items)

class Brighter(Transform):
    "An `after_item` hook"
    order = 9
    def encodes(self, o:TensorImage): return o//2+127

def twice(b): return b+b
def thirds(o):
    if int(o[1])%3==0: raise SkipItemException()
    return o

def test_hooks(numbered, workers):
    dls = DataLoaders.from_store(numbered, y='age.f4', item_tfms=[Resize(16), Brighter], bs=8, num_workers=workers,
        before_batch=twice)
    x,y = next(iter(dls.valid))
    assert x.shape[0]==16 and y[:8].tolist()==y[8:].tolist() and x.min()>=0.49

class SkipThirds(ItemTransform):
    def encodes(self, o): return thirds(o)

def test_skipped_items(numbered, workers):
    dls = DataLoaders.from_store(numbered, y='age.f4', item_tfms=[Resize(16), SkipThirds], bs=8, num_workers=workers,
        valid_pct=0.5)
    got = seen(dls.valid)
    assert sorted(got)==sorted(i for i in dls.valid_ds.items if i%3)

def test_persistent_workers(numbered):
    dls = DataLoaders.from_store(numbered, y='age.f4', item_tfms=Resize(16), bs=8, num_workers=2,
        persistent_workers=True)
    assert dls.valid.fake_l.persistent_workers
    assert sorted(seen(dls.valid))==sorted(seen(dls.valid))==sorted(dls.valid_ds.items)

@pytest.mark.parametrize('method', ['spawn','forkserver'])
def test_start_methods(method, numbered, tmp_path, interpreters):
    """The server process of `forkserver` has fastai, but neither the script nor us

    A worker by `spawn` has nothing, and imports fastai; so there is one for each loader."""
    where = f"from_shards({numbered.storage.url!r}" if isinstance(numbered,
        ShardStore) else f"from_redis({numbered.link.url!r}, 'numbered'"
    script = f'''
        import torch
        from fastai.vision.all import *
        from fastai_remote import *
        if __name__=='__main__':
            torch.multiprocessing.set_start_method({method!r})
            torch.multiprocessing.get_context('forkserver').set_forkserver_preload(['fastai.vision.all'])
            dls = DataLoaders.{where}, y='age.f4', item_tfms=Resize(16), bs=32,
                num_workers={1 if method=='spawn' else 2})
            seen = [int(o) for dl in (dls.train.new(drop_last=False), dls.valid) for b in dl for o in b[1]]
            print(sorted(seen)==list(range(100)))
    '''
    (f:=tmp_path/'s.py').write_text(textwrap.dedent(script))
    r = interpreters.run(f)
    assert r.stdout.splitlines()[-1:]==['True'], r.stderr

def test_two_loaders_taking_turns(numbered):
    "Batches in hand are not mixed up when epochs interleave, in one process"
    dls = DataLoaders.from_store(numbered, y='age.f4', item_tfms=Resize(16), bs=8, num_workers=0, drop_last=False)
    other = dls.train.new(bs=5)
    a,b = [],[]
    for u,v in zip(dls.train, other): a += u[1].int().tolist(); b += v[1].int().tolist()
    assert sorted(a)==sorted(dls.train_ds.items) and len(set(b))==len(b)==50

# --- as stock fastai

@pytest.mark.parametrize('how', ['C','Pillow'])
def test_as_stock_fastai(images, server, workers, tmp_path, how, monkeypatch):
    """The same pixels and the same loss, batch by batch, as stock fastai reading the same files in the same order

    Without the C modules, too."""
    if how=='Pillow':
        for m in '_jpeg','_pixels': monkeypatch.setattr(f'fastai_remote.codec.pixels.{m}', None)
    if 'asis' not in RedisStore.names(server.url):
        to_redis(image_samples(images, label=class_of, path=True), server.url, 'asis', num_workers=1, progress=False)
    store = RedisStore(server.url, 'asis')
    tfms,kw = dict(item_tfms=RandomResizedCrop(32, min_scale=.5), batch_tfms=[Flip()]),dict(bs=8, num_workers=workers)
    ours = DataLoaders.from_store(store, valid_pct=0.25, normalize=False, **tfms, **kw)
    files = [images/store[i]['path'] for i in range(N)]
    at = [[i for i in ds.items] for ds in (ours.train_ds, ours.valid_ds)]
    stock = DataBlock((ImageBlock, CategoryBlock), get_items=lambda _: files, get_y=class_of, splitter=lambda _: at,
        **tfms).dataloaders(images, **kw)
    stock.train.shuffle_fn = lambda idxs: list(RemoteDL.shuffle_fn(stock.train, Order(len(idxs))))
    losses = []
    for dls in ours,stock:
        set_seed(3)
        dls.train.rng = random.Random(5)
        torch.manual_seed(7)
        model = Tiny()
        learn = Learner(dls, model, opt_func=SGD, path=tmp_path, cbs=(rec:=Trace()))
        set_seed(9)
        with learn.no_bar(), learn.no_logging(): learn.fit(2, 0.1)
        losses.append((rec.seen_losses, rec.pixels))
    (la,pa),(lb,pb) = losses
    assert len(pa)==len(pb)==2*(5+2)
    assert pa==pb and la==lb

class Trace(Callback):
    "Keeps each batch's loss and the sum of its pixels"
    def __init__(self): self.seen_losses,self.pixels = [],[]
    def after_loss(self):
        self.seen_losses.append(self.learn.loss_grad.item())
        self.pixels.append(self.x.double().sum().item())

# --- what the store knows of its images

@pytest.mark.parametrize('img_cls', [PILImage,PILImageBW])
def test_normalized(store, img_cls):
    "Batches are normalised by the store's own statistics where that is asked for, unless the caller does it"
    kw = dict(item_tfms=Resize(32), bs=48, num_workers=0, valid_pct=0., img_cls=img_cls)
    plain = DataLoaders.from_store(store, **kw)
    kw['normalize'] = True
    s = store.image_stats()
    want = ([s['grey'][0]],[s['grey'][1]]) if img_cls is PILImageBW else store.stats
    norm, = [t for t in DataLoaders.from_store(store, **kw).train.after_batch.fs if isinstance(t, Normalize)]
    close(norm.mean.flatten().tolist(), want[0], eps=1e-4)
    means = [np.array(plain.train_ds[i][0]).reshape(-1, len(want[0])).mean(0)/255 for i in range(60)]
    close(np.mean(means, 0), want[0], eps=1e-3)
    b = DataLoaders.from_store(store, **kw).train.one_batch()[0]
    assert b.mean().abs()<.15 and .6<b.std()<1.2
    for tfm in (Normalize.from_stats([.5]*3, [.5]*3, cuda=False),MeanImage(store)):
        fs = DataLoaders.from_store(store, batch_tfms=tfm, **kw).train.after_batch.fs
        assert sum(isinstance(t, (Normalize,MeanImage)) for t in fs)==1 and tfm in list(fs)
    assert not any(isinstance(t, Normalize) for t in plain.train.after_batch.fs)

def test_balance(server, workers):
    "Rare labels are drawn as often as common ones, from a split too; validation is as it is"
    src = [{'png':np.full((8,8), i%256, np.uint8), 'cls':'rare' if i%20==0 else 'common', 'id':i} for i in range(400)]
    to_redis(src, server.url, 'uneven', splits={'train':300, 'valid':100}, num_workers=1, progress=False,
        overwrite=True)
    s = RedisStore(server.url, 'uneven')
    assert s.class_counts()=={'common':380, 'rare':20}
    dls = DataLoaders.from_store(s, bs=20, num_workers=workers, balance='cls')
    y = torch.cat([b[1] for _ in range(3) for b in dls.train])
    assert .4<y.float().mean()<.6 and len(y)==900
    valid = torch.cat([b[1] for b in dls.valid])
    assert len(valid)==100 and valid.float().mean()<.2
    weighted = DataLoaders.from_store(s, bs=20, num_workers=workers, balance=('cls',[1,0]))
    assert all((b[1]==0).all() for b in weighted.train)

# --- pictures that are no image files

def test_strokes(server, workers):
    "Drawings stored as strokes are drawn in the worker, as `draw` says, and train like images"
    rng = np.random.default_rng(0)
    def drawing(i):
        return [np.stack([np.arange(5)*50, 20+i%2*100+rng.integers(0, 20, 5)]), np.stack([[10,240],[i%256,30]])]
    to_redis([{'strokes':drawing(i), 'cls':'ab'[i%2]} for i in range(64)], server.url, 'doodles', num_workers=1,
        progress=False, overwrite=True)
    s = RedisStore(server.url, 'doodles')
    dls = DataLoaders.from_store(s, bs=16, num_workers=workers, draw=Rasterise(32), normalize=False)
    x,y = dls.one_batch()
    assert x.shape==(16,3,32,32) and x.max()>.5 and x.min()==0
    for i in (0,7):
        want = rasterise(s.get_many([int(dls.train_ds.items[i])], 'strokes')['strokes'][0], 32)
        assert (np.array(dls.train_ds[i][0])[...,0]==want).all()
    grey = DataLoaders.from_store(s, bs=16, num_workers=workers, draw=Rasterise(32), img_cls=PILImageBW)
    assert grey.one_batch()[0].shape==(16,1,32,32) and s.image_stats('strokes')['n']>=16
    learn = Learner(grey, nn.Sequential(nn.Flatten(), nn.Linear(1024, 2)), metrics=accuracy)
    with learn.no_bar(): learn.fit(4, 1e-2)
    assert learn.validate()[1]>.8
    grey.show_batch()
    assert learn.predict({'strokes':drawing(1)})[0] in ('a','b')
    with pytest.raises(TypeError, match='give get_remote_items'): dls.test_dl(s, num_workers=0).one_batch()

def test_predict_strokes(server, tmp_path):
    """On strokes of any form a learner sees the picture that it was trained on, in the colours of its `img_cls`, from
    an export too"""
    def drawing(i): return [[[0,200],[i,255-i]], [[10,90,240],[i,30,i]]]
    to_redis([{'strokes':drawing(i), 'cls':'ab'[i%2]} for i in range(32)], server.url, 'lines', shuffle=False,
        num_workers=1, progress=False, overwrite=True)
    s = RedisStore(server.url, 'lines')
    dls = DataLoaders.from_store(s, bs=8, num_workers=0, draw=Rasterise(32, width=8))
    learn = Learner(dls, Tiny(2), path=tmp_path)
    learn.export()
    b = s.get_many([3], 'strokes')['strokes'][0]
    raw = [[x,y,list(range(len(x)))] for x,y in drawing(3)]
    for l in (learn,load_learner(tmp_path/'export.pkl')):
        with l.no_bar():
            want = l.predict(3)[2]
            for x in (s[3],{'strokes':drawing(3)},drawing(3),b,Rasterise(32, width=8).create(b)):
                close(l.predict(x)[2], want, eps=1e-5)
            assert len(l.predict(raw)[2])==2

@pytest.mark.parametrize('draw', [Rasterise(64),Rasterise(64, width=8),Rasterise(64, time='colour', width=6)], ids=str)
def test_strokes_normalized(server, draw):
    "What is drawn is normalised by statistics of what is drawn"
    rng = np.random.default_rng(0)
    to_redis([{'strokes':rng.integers(0, 256, (3,2,6)).tolist(), 'cls':'ab'[i%2]} for i in range(128)], server.url,
        'scribbles', num_workers=1, progress=False, overwrite=True)
    x = DataLoaders.from_redis(server.url, 'scribbles', bs=96, num_workers=0, draw=draw, valid_pct=0.,
        normalize=True).one_batch()[0]
    assert x.mean((0,2,3)).abs().max()<.1 and (x.std((0,2,3))-1).abs().max()<.15

def test_strokes_that_only_some_samples_have_are_normalized(tmp_path):
    "The statistics are those of the samples that `having` and `where` select"
    with tarfile.open(tmp_path/'a.tar', 'w') as tar:
        for i in range(60):
            strokes = get_codec('strokes').to_bytes([np.uint8([[10,200,i],[10,i,200]])]*(1+i%2))
            for field,content in (('cls',b'ab'[i%2:i%2+1]), ('strokes',strokes))[:2 if i%3 else 1]:
                (member:=tarfile.TarInfo(f'{i:03}.{field}')).size = len(content)
                tar.addfile(member, io.BytesIO(content))
    index_shards(tmp_path, num_workers=1, progress=False)
    store,options = ShardStore(tmp_path),dict(x='strokes', having='strokes', draw=Rasterise(32), num_workers=0, bs=16)
    both,a = [DataLoaders.from_store(store, normalize=True, where=where, **options) for where in (None,{'cls':'a'})]
    mean = lambda dls: next(t for t in dls.after_batch.fs if isinstance(t, Normalize)).mean.item()
    assert both.one_batch()[0].shape==(16,3,32,32) and mean(both)!=mean(a)

def test_damaged_strokes(server, workers):
    "A damaged drawing in a batch names dataset and sample"
    to_redis([{'strokes':[[[0,i],[0,9]]], 'cls':'ab'[i%2]} for i in range(32)], server.url, 'broken', num_workers=1,
        progress=False, overwrite=True)
    s = RedisStore(server.url, 'broken')
    s.link.client.set(f'{s.manifest.prefix}:strokes:7', b'\x05ab')
    dls = DataLoaders.from_store(s, bs=8, num_workers=workers, draw=Rasterise(32), valid_pct=.25, check=False)
    with fails(CorruptSample, 'broken: sample 7, field .strokes.'): [b for d in dls for b in d]

def test_from_keys(server, workers):
    "The forum post's layout trains as it stands, and becomes a dataset of ours by `map`"
    c = RedisLink(server.url).client
    for i in range(40):
        np.savez_compressed(f:=io.BytesIO(), np.full((16,16,3), 200*(i%2), np.uint8))
        c.mset({f'quick:orig:{i}':f.getvalue(), f'quick:pred:{i}':i%2})
    s = RedisStore.from_keys(server.url, x='quick:orig:{}', y='quick:pred:{}', n=40, codec='npz',
        vocab=['dark','light'])
    dls = DataLoaders.from_store(s, bs=8, num_workers=workers)
    x,y = dls.one_batch()
    assert x.shape==(8,3,16,16) and ((x.mean((1,2,3))>.5)==y.bool()).all()
    rep = s.resize(8, name='quick_small', num_workers=1, progress=False, overwrite=True)
    small = RedisStore(server.url, 'quick_small')
    assert rep.written==40 and small[3]['png'].size==(8,8) and small.vocab==['dark','light']
