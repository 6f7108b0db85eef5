"""fastai's cleaners open the images of a store, whenever the widgets were imported, and nothing that they say can
damage a file"""
import builtins, importlib, os, pickle, shutil, subprocess, sys

import numpy as np
import pytest
import torch
from fastai.vision.all import *

from conftest import CLASSES, class_of
from fastai_remote import *
from fastai_remote.load.cleaners import RemoteImage

pytest.importorskip('ipywidgets', reason='the cleaners are made of ipywidgets')

@pytest.fixture(autouse=True)
def notebook(monkeypatch):
    "`display`, which fastai expects of a notebook, keeps what it is to show"
    shown = []
    monkeypatch.setattr(builtins, 'display', shown.append, raising=False)
    return shown

@pytest.fixture(params=['redis','shards'])
def store(request, redis_pics, tmp_path):
    if request.param=='redis': return redis_pics
    redis_pics.copy(str(tmp_path/'pics'), num_workers=1, progress=False)
    return ShardStore(tmp_path/'pics')

@pytest.fixture
def learn(store):
    return Learner(DataLoaders.from_store(store, item_tfms=Resize(16, 'squish'), bs=8, num_workers=0, seed=1),
        nn.Sequential(nn.Flatten(), nn.Linear(768, 3)))

def cleaner_of(learn, **kw):
    from fastai.vision.widgets import ImageClassifierCleaner
    with learn.no_bar(): return ImageClassifierCleaner(learn, **kw)

def thumb(im): return im.to_thumb(128, 256).convert('RGBA').tobytes()

def test_shows_the_images_of_a_class_hardest_first(learn, store, notebook):
    c = cleaner_of(learn, max_n=5)
    with learn.no_bar():
        losses = learn.get_preds(dl=learn.dls.train.new(shuffle=False, drop_last=False), with_loss=True)[2]
    items = list(learn.dls.train_ds.items)
    for label in CLASSES:
        c.dd_cats.value = label
        order = sorted((k for k,i in enumerate(items) if store[i]['cls']==label), key=lambda k: -losses[k])
        assert [int(o) for o in c.fns]==[items[k] for k in order[:5]]
        assert [im.tobytes() for im in notebook[-5:]]==[
            thumb(PILImage.create(store.get_many([int(o)], 'jpg')['jpg'][0])) for o in c.fns]
    c.dd_ds.value = 'Valid'
    assert len(c.fns) and {int(o) for o in c.fns}<=set(learn.dls.valid_ds.items)

def test_delete_and_change_name_samples(learn, store):
    c = cleaner_of(learn)
    boxes = c.iw.widget.children
    boxes[0].children[1].value,boxes[2].children[1].value = '<Delete>','dog'
    assert list(c.delete())==[0] and [tuple(o) for o in c.change()]==[(2,'dog')]
    bad = [c.fns[i] for i in c.delete()]
    keep = np.setdiff1d(np.arange(len(store)), bad)
    assert len(keep)==len(store)-1 and store[bad[0]]['cls']==c.dd_cats.value
    dls = DataBlock((RedisBlock,RedisBlock('cls')), get_items=lambda s: get_remote_items(s)[keep],
        splitter=RandomStoreSplitter(), item_tfms=Resize(16)).dataloaders(store, bs=8, num_workers=0)
    assert sorted([*dls.train_ds.items, *dls.valid_ds.items])==keep.tolist()

def test_what_was_marked_is_applied_to_the_dataset(server, images):
    to_redis(image_samples(images, label=class_of, path=True), server.url, 'cleaned', num_workers=1, progress=False)
    store = RedisStore(server.url, 'cleaned')
    cleaner = cleaner_of(Learner(DataLoaders.from_store(store, item_tfms=Resize(16, 'squish'), bs=8, num_workers=0, seed=1), nn.Sequential(nn.Flatten(), nn.Linear(768, 3))))
    boxes = cleaner.iw.widget.children
    boxes[0].children[1].value,boxes[2].children[1].value = '<Delete>','dog'
    label = cleaner.dd_cats.value
    bad,changed = store[int(cleaner.fns[0])]['path'],store[int(cleaner.fns[2])]['path']
    new = store.edit(drop=[int(cleaner.fns[i]) for i in cleaner.delete()], set={'cls':{int(cleaner.fns[i]):label for i,label in cleaner.change()}})
    labels = {row['path']:row['cls'] for row in new}
    assert bad not in labels and labels[changed]=='dog'!=label and len(new)==len(store)-1
    assert {row['path']:row['cls'] for row in new if row['path']!=changed}=={row['path']:row['path'].split('/')[0] for row in new if row['path']!=changed}

def test_what_is_done_to_files_is_refused_for_samples(learn, tmp_path, monkeypatch):
    "With advice, and without touching a file that is called like a sample's number"
    monkeypatch.chdir(tmp_path)
    o = cleaner_of(learn).fns[0]
    (tmp_path/str(int(o))).write_text('mine')
    for f in o.unlink,lambda: o.rename('x'):
        with pytest.raises(TypeError, match=f"sample {int(o)} of .*is not a file.*store.map"): f()
    with pytest.raises(FileNotFoundError, match='is not a file'): shutil.move(str(o), tmp_path/'moved')
    for f in os.remove,os.unlink,Path,lambda o: shutil.move(o, tmp_path/'moved'):
        with pytest.raises(TypeError): f(o)
    assert (tmp_path/str(int(o))).read_text()=='mine'

def test_images_cleaner(learn, store, images, notebook):
    from fastai.vision.widgets import ImagesCleaner
    w,items,files = ImagesCleaner(('good',), max_n=4),learn.dls.valid_ds.items,get_image_files(images)
    want = [thumb(PILImage.create(store.get_many([i], 'jpg')['jpg'][0])) for i in items[:4]]
    for fns in items,items[[0,1,2,3]],items[np.arange(4)]:
        w.set_fns(fns)
        assert [im.tobytes() for im in notebook[-4:]]==want and len(w.widget.children)==4
    w.set_fns(files)
    assert notebook[-1].tobytes()==thumb(PILImage.create(files[3])) and w.fns==files[:4]
    with pytest.raises(TypeError, match='get_remote_items\\(store\\)\\[numbers\\]'): w.set_fns([3,4])

def test_many_images_are_opened_in_processes(store, notebook):
    from fastai.vision.widgets import ImagesCleaner
    w = ImagesCleaner(max_n=40)
    w.set_fns(get_remote_items(store))
    assert [im.tobytes() for im in notebook]==[thumb(PILImage.create(b))
        for b in store.get_many(range(40), 'jpg')['jpg']]

def test_stock_learners_are_cleaned_as_before(images):
    dls = ImageDataLoaders.from_folder(images, valid_pct=.2, item_tfms=Resize(16), bs=8, num_workers=0)
    c = cleaner_of(Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(768, 3))))
    assert all(isinstance(o, Path) and o.parent.name==c.dd_cats.value for o in c.fns)

def test_drawings_too(server, notebook):
    "What is no image file is shown as the learner sees it"
    to_redis([{'strokes':[[[0,255],[0,5*i]]], 'cls':'ab'[i%2]} for i in range(20)], server.url, 'drawn', num_workers=1,
        progress=False, overwrite=True)
    draw = Rasterise(32)
    learn = Learner(DataLoaders.from_redis(server.url, 'drawn', draw=draw, bs=4, num_workers=0),
        nn.Sequential(nn.Flatten(), nn.Linear(32*32*3, 2)))
    c = cleaner_of(learn)
    s = RedisStore(server.url, 'drawn')
    assert [im.tobytes() for im in notebook]==[
        thumb(PILImage.create(draw.create(s.get_many([int(o)], 'strokes')['strokes'][0]))) for o in c.fns]

def test_a_remote_image_is_a_number_and_a_file_to_read(redis_pics):
    o = RemoteImage(7, Fetch('jpg', redis_pics, PILImage))
    again = pickle.loads(pickle.dumps(o))
    for r in o,again:
        assert r==7 and redis_pics[r]['path']==redis_pics[7]['path'] and Image.open(r).tobytes()==redis_pics[7][
            'jpg'].tobytes()==PILImage.create(r).tobytes()

@pytest.mark.parametrize('imports',
    ['import fastai_remote; from fastai.vision.widgets import *',
    'from fastai.vision.widgets import *; import fastai_remote'])
def test_whenever_the_widgets_are_imported(redis_pics, imports, interpreters):
    code = f'''import builtins; builtins.display = lambda o: None
{imports}
from fastai_remote import RedisStore, get_remote_items
w = ImagesCleaner(max_n=2)
w.set_fns(get_remote_items(RedisStore({redis_pics.link.url!r}, 'pics')))
print(len(w.widget.children))'''
    assert interpreters.run(code, fastai='fastai_remote' not in imports.split(';')[0]).stdout.strip()=='2'
