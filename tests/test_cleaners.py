"""fastai's cleaners open the images of a store, whenever the widgets were imported, and nothing that they say can
damage a file"""
import builtins, os, pickle, shutil

import pytest
from fastai.vision.all import *
pytest.importorskip('ipywidgets', reason='the cleaners are made of ipywidgets')
import fastai.vision.widgets

from conftest import class_of
from in_memory import in_memory
from fastai_remote import *
from fastai_remote.load.cleaners import fit_cleaners, RemoteImage

fit_cleaners(fastai.vision.widgets)   # as in a notebook: in this process, these may have been imported too late

@pytest.fixture(autouse=True)
def notebook(monkeypatch):
    "`display`, which fastai expects of a notebook, keeps what it is to show"
    shown = []
    monkeypatch.setattr(builtins, 'display', shown.append, raising=False)
    return shown

def learner(store, **kw):
    dls = DataLoaders.from_store(store, **{**dict(item_tfms=Resize(16, 'squish'), bs=8, num_workers=0, seed=1), **kw})
    learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.LazyLinear(dls.c)))
    learn.remove_cb(ProgressCallback)
    learn.model(dls.one_batch()[0])
    return learn

@pytest.fixture
def learn(store): return learner(store)

def cleaner_of(learn, **kw):
    from fastai.vision.widgets import ImageClassifierCleaner
    return ImageClassifierCleaner(learn, **kw)

def thumb(im): return im.to_thumb(128, 256).convert('RGBA').tobytes()

def test_validation_images_are_shown_too(learn):
    "Which images, and in which order, is compared with stock fastai in `test_fastai_api.py`"
    c = cleaner_of(learn, max_n=5)
    c.dd_ds.value = 'Valid'
    assert len(c.fns) and {int(o) for o in c.fns}<=set(learn.dls.valid_ds.items)

def test_what_was_marked_is_left_out_or_applied_to_the_dataset(server, images):
    to_redis(image_samples(images, label=class_of, path=True), server.url, 'cleaned', num_workers=1, progress=False)
    store = RedisStore(server.url, 'cleaned')
    cleaner = cleaner_of(learner(store))
    boxes = cleaner.iw.widget.children
    boxes[0].children[1].value,boxes[2].children[1].value = '<Delete>','dog'
    assert list(cleaner.delete())==[0] and [tuple(o) for o in cleaner.change()]==[(2,'dog')]
    first,third = int(cleaner.fns[0]),int(cleaner.fns[2])
    assert store[first]['cls']==cleaner.dd_cats.value!='dog'
    keep = np.setdiff1d(np.arange(len(store)), [first])
    dls = DataBlock((RedisBlock, RedisBlock('cls')), get_items=lambda s: get_remote_items(s)[keep],
        splitter=RandomStoreSplitter(), item_tfms=Resize(16)).dataloaders(store, bs=8, num_workers=0)
    assert len(keep)==59 and sorted([*dls.train_ds.items, *dls.valid_ds.items])==keep.tolist()
    bad,changed = store[first]['path'],store[third]['path']
    new = store.edit(drop=[cleaner.fns[i] for i in cleaner.delete()],
        set={'cls':{int(cleaner.fns[i]):label for i,label in cleaner.change()}})
    labels = {row['path']:row['cls'] for row in new}
    assert labels.pop(changed)=='dog' and bad not in labels and len(new)==len(store)-1
    assert labels=={path:path.split('/')[0] for path in labels}

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
    "Many images are opened in processes"
    from fastai.vision.widgets import ImagesCleaner
    w,items,files = ImagesCleaner(('good',), max_n=4),learn.dls.valid_ds.items,get_image_files(images)
    want = [thumb(PILImage.create(store.get_many([i], 'jpg')['jpg'][0])) for i in items[:4]]
    for fns in items,items[[0,1,2,3]],items[np.arange(4)]:
        w.set_fns(fns)
        assert [im.tobytes() for im in notebook[-4:]]==want and len(w.widget.children)==4
    w.set_fns(files)
    assert notebook[-1].tobytes()==thumb(PILImage.create(files[3])) and w.fns==files[:4]
    with pytest.raises(TypeError, match='get_remote_items\\(store\\)\\[numbers\\]'): w.set_fns([3,4])
    ImagesCleaner(max_n=40).set_fns(get_remote_items(store))
    jpgs = store.get_many(range(40), 'jpg')['jpg']
    assert [im.tobytes() for im in notebook[-40:]]==[thumb(PILImage.create(jpg)) for jpg in jpgs]

def test_stock_learners_are_cleaned_as_before(images):
    dls = ImageDataLoaders.from_folder(images, valid_pct=.2, item_tfms=Resize(16), bs=8, num_workers=0)
    learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(768, 3)))
    learn.remove_cb(ProgressCallback)
    c = cleaner_of(learn)
    assert all(isinstance(o, Path) and o.parent.name==c.dd_cats.value for o in c.fns)

def test_drawings_are_shown_as_the_learner_sees_them(notebook):
    draw,rows = Rasterise(32),[{'strokes':[[[0,255],[0,5*i]]], 'cls':'ab'[i%2]} for i in range(20)]
    s = in_memory(rows)
    c = cleaner_of(learner(s, draw=draw, bs=4))
    assert [im.tobytes() for im in notebook]==[
        thumb(PILImage.create(draw.create(s.get_many([int(o)], 'strokes')['strokes'][0]))) for o in c.fns]

def test_a_remote_image_is_a_number_and_a_file_to_read(redis_pics):
    image = RemoteImage(7, Fetch('jpg', redis_pics, PILImage))
    for r in image,pickle.loads(pickle.dumps(image)):
        pixels = redis_pics[7]['jpg'].tobytes()
        assert r==7 and Image.open(r).tobytes()==pixels==PILImage.create(r).tobytes()

# `ipykernel` tells that this is a notebook
@pytest.mark.slow
@pytest.mark.parametrize('imports', [
    "sys.modules['ipykernel'] = sys; from fastai_remote import *; del sys.modules['ipykernel']; "
    'from fastai.vision.widgets import *',
    'from fastai.vision.widgets import *; from fastai_remote import *'])
def test_whenever_the_widgets_are_imported(redis_pics, imports, interpreters):
    code = f'''import builtins, sys; builtins.display = lambda o: None
{imports}
w = ImagesCleaner(max_n=2)
w.set_fns(get_remote_items(RedisStore({redis_pics.link.url!r}, 'pics')))
print(len(w.widget.children))'''
    assert interpreters.run(code).stdout.strip()=='2'   # which has imported the rest of fastai
