"Learners and loaders over a store: what fastai's own tests of `test_fastai_api.py` do not compare with stock fastai"
import json, os, pickle, textwrap

import pytest
from conftest import CLASSES, class_of, draw
from fastai.vision.all import *
from in_memory import in_memory
from inputs import write_tar

from fastai_remote import *
from fastai_remote.codec.fields import get_codec

from fastcore.test import test_close as close

class Tiny(nn.Module):
    "32 by 32 pixels in, three classes out"
    def __init__(self, c=3):
        super().__init__()
        self.conv,self.lin = nn.Conv2d(3, 8, 5, stride=4),nn.Linear(8*7*7, c)
    def forward(self, x): return self.lin(F.relu(self.conv(x)).flatten(1))

@pytest.fixture(scope='module')
def stores(server, redis_pics, images, tmp_path_factory):
    source,folder = image_samples(images, label=class_of, path=True),tmp_path_factory.mktemp('shards')/'pics'
    to_shards(source, folder, chunk=16, num_workers=1, progress=False)
    return dict(redis=redis_pics, shards=ShardStore(folder), tiered=TieredStore(server.url, ShardStore(folder)))

@pytest.fixture(autouse=True)
def same_seed(): set_seed(0)

# --- training and predicting

def learner(store, tmp_path, **kwargs):
    dls = DataLoaders.from_store(store, item_tfms=Resize(32), seed=1, **{**dict(bs=8, num_workers=0), **kwargs})
    learn = Learner(dls, Tiny(), metrics=accuracy, path=tmp_path)
    learn.remove_cb(ProgressCallback)
    return learn

def test_items_to_predict_take_many_forms(stores, tmp_path, images):
    "More of them are compared with stock fastai in `test_fastai_api.py`"
    store,files,numbers = stores['redis'],get_image_files(images)[:9],[3,1,4,1,5]
    learn = learner(store, tmp_path)
    for o in np.int64(7),{'jpg':store.get_many([7], 'jpg')['jpg'][0]}:
        assert torch.allclose(learn.predict(o)[2], learn.predict(7)[2])
    def preds(items, **kw): return learn.get_preds(dl=learn.dls.test_dl(items, **kw))
    p,(q,y) = preds(numbers)[0],preds(np.array(numbers), with_labels=True)
    assert torch.allclose(p, q) and torch.allclose(p[1], p[3])
    assert y.tolist()==store.get_many(numbers, 'cls')['cls'].tolist()
    of_files,(of_samples,z) = preds(files)[0],preds(image_samples(files, label=class_of), with_labels=True)
    assert torch.allclose(of_files, of_samples) and [CLASSES[k] for k in z]==[class_of(f) for f in files]
    with pytest.raises(TypeError, match='give get_remote_items'): learn.dls.test_dl(store).one_batch()

def test_test_sets_of_another_store_keep_the_vocabulary_of_training(stores, tmp_path):
    "Also where its labels are in another order"
    learn = learner(stores['redis'], tmp_path)
    other = in_memory(range(100, 112), lambda i: {'jpg':draw(i), 'cls':CLASSES[i%3]}, vocab=['dog', 'bird', 'cat'])
    dl = learn.dls.test_dl(get_remote_items(other), with_labels=True)
    p,y = learn.get_preds(dl=dl)
    assert [CLASSES[k] for k in y]==[other[i]['cls'] for i in range(12)]
    assert dl.dataset[3][1]==CLASSES.index(other[3]['cls']) and learn.dls.valid.stores==[stores['redis']]
    assert torch.allclose(p[4], learn.predict(other.get_many([4], 'jpg')['jpg'][0])[2], atol=1e-5)

# --- keeping

@pytest.mark.slow
def test_an_exported_learner_predicts_in_another_process(store, tmp_path, images, interpreters):
    learn,file = learner(store, tmp_path),get_image_files(images)[0]
    want = [learn.predict(o)[2].tolist() for o in (file, 5)]
    learn.export()
    out = interpreters.run(textwrap.dedent(f'''
        import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
        from fastai.vision.all import *
        from test_learner import Tiny
        learn = load_learner({str(tmp_path/'export.pkl')!r})
        with learn.no_bar(): print([learn.predict(o)[2].tolist() for o in (Path({str(file)!r}), 5)])
    '''), check=True).stdout.splitlines()
    assert np.allclose(json.loads(out[-1]), want, atol=1e-5)

@pytest.mark.parametrize('where', ['redis', 'shards'])
def test_an_exported_learner_predicts_without_its_store(fresh, tmp_path, images, where):
    "Files, images and arrays; sample numbers are an error"
    files,kw = get_image_files(images)[:12],dict(num_workers=1, progress=False)
    if where=='redis': to_redis(image_samples(files, label=class_of), fresh.url, 'lost', **kw)
    else: to_shards(image_samples(files, label=class_of), tmp_path/'lost', **kw)
    store = RedisStore(fresh.url, 'lost') if where=='redis' else ShardStore(tmp_path/'lost')
    learn = learner(store, tmp_path)
    want = learn.predict(files[3])[2]
    if where=='redis': store.link.timeout = .2
    learn.export('model.pkl')
    if where=='redis': fresh.kill()
    else: (tmp_path/'lost').rename(tmp_path/'elsewhere')
    learn = load_learner(tmp_path/'model.pkl')
    for item in files[3],str(files[3]),PILImage.create(files[3]),np.asarray(PILImage.create(files[3])):
        assert torch.equal(learn.predict(item)[2], want)
    assert torch.allclose(learn.get_preds(dl=learn.dls.test_dl(files[3:5]))[0][0], want)
    with pytest.raises(StoreError): learn.predict(3)

@pytest.mark.parametrize('where', ['redis', 'shards', 'tiered'])
def test_loaders_are_pickled_in_few_bytes(stores, where, tmp_path):
    content = pickle.dumps(learner(stores[where], tmp_path).dls)
    assert len(content)<100_000 and pickle.loads(content).one_batch()[0].shape==(8,3,32,32)

@pytest.mark.slow
@pytest.mark.xdist_group('processes')
@pytest.mark.parametrize('method,where', [('spawn', 'redis'), ('forkserver', 'shards')])
def test_workers_are_started_in_any_way(method, where, stores, tmp_path, interpreters):
    "The server process of `forkserver` has fastai, but neither the script nor us; a worker by `spawn` has nothing"
    make = "from_redis({!r}, 'pics'" if where=='redis' else 'from_shards({!r}'
    url = stores['redis'].link.url if where=='redis' else stores['shards'].storage.url
    (f:=tmp_path/'s.py').write_text(textwrap.dedent(f'''
        import torch
        from fastai.vision.all import *
        from fastai_remote import *
        if __name__=='__main__':
            torch.multiprocessing.set_start_method({method!r})
            torch.multiprocessing.get_context('forkserver').set_forkserver_preload(['fastai.vision.all'])
            dls = DataLoaders.{make.format(url)}, item_tfms=Resize(16), bs=32, valid_pct=0.,
                num_workers=1)
            print(sum(len(b[1]) for b in dls.train.new(drop_last=False)))
    '''))
    r = interpreters.run(f)
    assert r.stdout.splitlines()[-1:]==['60'], r.stderr

# --- what the store knows of its images and labels

def test_batches_are_normalised_by_statistics_of_the_store(stores):
    "Where that is asked for, unless the caller does it"
    store = stores['tiered']
    kw = dict(item_tfms=Resize(32), bs=48, num_workers=0, valid_pct=0., normalize=True)
    dls = DataLoaders.from_store(store, **kw)
    means = [np.array(dls.train_ds[i][0]).reshape(-1, 3).mean(0)/255 for i in range(60)]
    close(np.mean(means, 0), store.stats[0], eps=1e-3)
    x = dls.train.one_batch()[0]
    assert x.mean().abs()<.15 and .6<x.std()<1.2
    for tfm in Normalize.from_stats([.5]*3, [.5]*3, cuda=False),MeanImage(store):
        fs = DataLoaders.from_store(store, batch_tfms=tfm, **kw).train.after_batch.fs
        assert sum(isinstance(t, (Normalize, MeanImage)) for t in fs)==1 and tfm in list(fs)

def test_balance_draws_rare_labels_as_often_as_common_ones(server):
    "From a split, too; validation is as it is. With workers it is tested in `test_distributed.py`"
    rows = [{'x.f4':i, 'cls':'rare' if i%20==0 else 'common'} for i in range(400)]
    to_redis(rows, server.url, 'uneven', splits={'train':300, 'valid':100}, num_workers=1, progress=False)
    store = RedisStore(server.url, 'uneven')
    assert store.class_counts()=={'common':380, 'rare':20}
    options = dict(x='x.f4', y='cls', bs=20, num_workers=0)
    dls = DataLoaders.from_store(store, balance='cls', **options)
    y = torch.cat([b[1] for _ in range(3) for b in dls.train])
    assert .4<y.float().mean()<.6 and len(y)==900
    valid = torch.cat([b[1] for b in dls.valid])
    assert len(valid)==100 and valid.float().mean()<.2
    weighted = DataLoaders.from_store(store, balance=('cls', [1,0]), **options)
    assert all((b[1]==0).all() for b in weighted.train)

# --- pictures that are no image files

def test_drawings_are_drawn_as_asked_and_predicted_in_any_form(tmp_path):
    """On strokes of any form a learner sees the picture that it was trained on, in the colours of its `img_cls`, from
    an export too"""
    def drawing(i): return [[[0,200],[i,255-i]], [[10,90,240],[i%2*100,30,i]]]
    store = in_memory([{'strokes':drawing(i), 'cls':'ab'[i%2]} for i in range(32)])
    how = Rasterise(32, width=8)
    dls = DataLoaders.from_store(store, bs=8, num_workers=0, draw=how)
    strokes = store.get_many([int(dls.train_ds.items[7])], 'strokes')['strokes'][0]
    assert (np.array(dls.train_ds[7][0])[...,0]==how.arrays([strokes])[0]).all()
    grey = DataLoaders.from_store(store, bs=16, num_workers=0, draw=how, img_cls=PILImageBW)
    assert dls.one_batch()[0].shape==(8,3,32,32) and grey.one_batch()[0].shape==(16,1,32,32)
    learn = Learner(dls, Tiny(2), path=tmp_path)
    learn.export()
    b,raw = store.get_many([3], 'strokes')['strokes'][0],[[x,y,list(range(len(x)))] for x,y in drawing(3)]
    for other in learn,load_learner(tmp_path/'export.pkl'):
        with other.no_bar():
            want = other.predict(3)[2]
            for o in store[3],{'strokes':drawing(3)},drawing(3),b,how.create(b):
                close(other.predict(o)[2], want, eps=1e-5)
            assert len(other.predict(raw)[2])==2

@pytest.mark.parametrize('draw', [Rasterise(64, width=8), Rasterise(64, time='colour', width=6)], ids=str)
def test_drawings_are_normalised_by_statistics_of_what_is_drawn(server, draw):
    rng = np.random.default_rng(0)
    rows = [{'strokes':rng.integers(0, 256, (3,2,6)).tolist(), 'cls':'ab'[i%2]} for i in range(128)]
    to_redis(rows, server.url, 'scribbles', num_workers=1, progress=False, overwrite=True)
    dls = DataLoaders.from_redis(server.url, 'scribbles', bs=96, num_workers=0, draw=draw, valid_pct=0., normalize=True)
    x = dls.one_batch()[0]
    assert x.mean((0,2,3)).abs().max()<.1 and (x.std((0,2,3))-1).abs().max()<.15

def test_statistics_of_drawings_are_those_of_the_samples_that_are_selected(tmp_path):
    "By `having` and `where`"
    members = []
    for i in range(60):
        strokes = get_codec('strokes').to_bytes([np.uint8([[10,200,i],[10,i,200]])]*(1+i%2))
        members += [(f'{i:03}.cls', b'ab'[i%2:i%2+1]), (f'{i:03}.strokes', strokes)][:2 if i%3 else 1]
    write_tar(tmp_path/'a.tar', members)
    index_shards(tmp_path, num_workers=1, progress=False)
    store,options = ShardStore(tmp_path),dict(x='strokes', having='strokes', draw=Rasterise(32), num_workers=0, bs=16)
    both,a = [DataLoaders.from_store(store, normalize=True, where=where, **options) for where in (None, {'cls':'a'})]
    def mean(dls): return next(t for t in dls.after_batch.fs if isinstance(t, Normalize)).mean.item()
    assert both.one_batch()[0].shape==(16,3,32,32) and mean(both)!=mean(a)
