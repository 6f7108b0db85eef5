"Loaders that are changed during an epoch, wrapped or used without their store, and odd JPEGs, do what stock fastai does"
import io
from itertools import islice

import numpy as np
import pytest
import torch
from fastai.vision.all import *

from fastai_remote import *

N = 20

def halves(items): return list(range(N)),[0]

def pair(files, store, batch_tfms=list, **kwargs):
    "Loaders of stock fastai, and those of the store with the same samples"
    kwargs = {**dict(bs=4, num_workers=0, shuffle=False, device='cpu'), **kwargs}
    def block(*blocks, get_items, **kw):
        return DataBlock(blocks, get_items=get_items, splitter=halves, item_tfms=Resize(16), batch_tfms=batch_tfms(), **kw)
    stock = block(ImageBlock, CategoryBlock, get_items=lambda _: files, get_y=lambda file: 'ab'[int(file.stem)%2])
    ours = block(RedisBlock, RedisBlock('cls'), get_items=get_remote_items)
    return stock.dataloaders(None, **kwargs),ours.dataloaders(store, **kwargs)

@pytest.fixture(scope='module')
def data(server, tmp_path_factory):
    "20 small images as files and in Redis"
    folder = tmp_path_factory.mktemp('images')
    for i in range(N):
        pixels = np.random.default_rng(i).integers(0, 256, (40,40,3), np.uint8)
        Image.fromarray(pixels if i%3 else pixels[...,0]).save(folder/f'{i:02}.jpg')
    files = sorted(folder.glob('*.jpg'))
    rows = [{'jpg':file.read_bytes(), 'cls':'ab'[i%2]} for i,file in enumerate(files)]
    to_redis(rows, server.url, 'changed', shuffle=False, num_workers=1, progress=False)
    return files,RedisStore(server.url, 'changed')

def same(a, b): assert len(a)==len(b)>0 and all(type(x) is type(y) and torch.equal(x, y) for x,y in zip(a, b))

class ZeroChannel(Transform):
    order = 5
    def encodes(self, x:TensorImage):
        x[:,0] = 0
        return x

class Signed(IntToFloatTensor):
    def encodes(self, x:TensorImage): return x.float().div(127.5)-1

class Dark(Transform):
    order = 2
    def encodes(self, x:PILImage): return PILImage.create(np.asarray(x)//4)

class DarkFirst(Dark): order = -5

def change_of(pipeline, change):
    "Images of an epoch in which `change(pipeline of the loader)` happens after the second batch"
    def epoch(dl):
        images = []
        for k,(x,_) in enumerate(dl):
            images.append(x)
            if k==1: change(getattr(dl, pipeline))
        return images
    return epoch

def set_tfms(*tfms): return lambda pipeline: setattr(pipeline, 'fs', L(*tfms))

CHANGES = {'a transform is added':('after_batch', lambda p: p.add(ZeroChannel())), 'a subclass':('after_batch', set_tfms(Signed())),
    'no transform':('after_batch', set_tfms()), 'an item transform is added':('after_item', lambda p: p.add(Dark())),
    'one before the others':('after_item', lambda p: p.add(DarkFirst())), 'only ToTensor':('after_item', set_tfms(ToTensor()))}

@pytest.mark.parametrize('threads', [0, 2])
@pytest.mark.parametrize('what', CHANGES)
def test_transforms_changed_during_an_epoch(data, what, threads):
    pipeline,change = CHANGES[what]
    stock,ours = pair(*data)
    ours.train.threads = threads if pipeline=='after_batch' else 0   # threads are ahead of the loop, as workers are
    sizes = {} if what!='only ToTensor' else {'bs':1}
    stock,ours = (dls.train.new(**sizes) for dls in (stock,ours))
    same(change_of(pipeline, change)(stock), change_of(pipeline, change)(ours))

def test_transforms_changed_during_an_epoch_of_items(data):
    "Also where images stay undecoded, item by item"
    for change in (lambda p: p.add(DarkFirst()), lambda p: p.add(Dark())):
        stock,ours = pair(*data)
        for dls in (stock,ours): dls.train.after_item.add(Transform(lambda x: x, order=3))
        same(change_of('after_item', change)(stock.train), change_of('after_item', change)(ours.train))

@pytest.mark.parametrize('workers', [0, 2])
def test_a_transform_that_writes_to_grey_images(data, workers, tmp_path):
    "It is added during an epoch, whose workers send one channel for three"
    files,store = data
    stock,ours = pair(files[::3]*3, store, num_workers=workers)
    numbers = [*range(0, N, 3)]*3
    ours = pair(files, store, num_workers=workers)[1].train.new(dataset=Datasets(
        get_remote_items(store)[numbers], tfms=[t.tfms for t in ours.train_ds.tls]))
    stock = stock.train.new(dataset=Datasets(L(files)[numbers], tfms=[t.tfms for t in stock.train_ds.tls]))
    epoch = change_of('after_batch', lambda p: p.add(ZeroChannel()))
    same(epoch(stock), epoch(ours))

class DarkDatasets(Datasets):
    def __getitem__(self, i):
        x,y = super().__getitem__(i)
        return (PILImage.create(np.asarray(x)//4) if type(x) is PILImage else x),y

class DarkLists(TfmdLists):
    def __getitem__(self, i):
        x = super().__getitem__(i)
        return PILImage.create(np.asarray(x)//4) if type(x) is PILImage else x

@pytest.mark.parametrize('where', ['Datasets','TfmdLists'])
def test_a_subclass_sees_images_of_fastai(data, where):
    results = []
    for dls in pair(*data):
        if where=='Datasets': dls.train.dataset.__class__ = DarkDatasets
        else: dls.train.dataset.tls[0].__class__ = DarkLists
        results.append([x for x,_ in dls.train])
    same(*results)

class Repeated:
    "A dataset twice, which passes on the attributes of the dataset"
    def __init__(self, dataset): self.dataset = dataset
    def __len__(self): return 2*len(self.dataset)
    def __getitem__(self, i): return self.dataset[i%len(self.dataset)]
    def __getattr__(self, name):
        if name=='dataset': raise AttributeError(name)
        return getattr(self.dataset, name)

def test_a_wrapper_that_is_longer_than_its_items(data):
    same(*[[x for x,_ in dls.train.new(dataset=Repeated(dls.train_ds))] for dls in pair(*data)])

@pytest.mark.parametrize('div', [255, 100., np.float32(3), torch.tensor(7.), torch.tensor([9.]), torch.tensor([58.4,57.1,57.4])[:,None,None]], ids=str)
def test_divisors_of_floats(data, div):
    same(*[[x for x,_ in dls.train] for dls in pair(*data, batch_tfms=lambda: [IntToFloatTensor(div=div)])])

@pytest.mark.parametrize('name', ['float','div_'])
def test_a_method_of_tensors_that_was_replaced(data, name, monkeypatch):
    was = getattr(TensorImage, name)
    monkeypatch.setattr(TensorImage, name, lambda self, *args: was(self, *args)*2)
    same(*[[x for x,_ in dls.train] for dls in pair(*data)])

@pytest.mark.parametrize('kind', ['redis','shards'])
def test_an_exported_learner_predicts_without_its_store(fresh, tmp_path, data, kind):
    "Files, images and arrays; sample numbers are an error"
    files,_ = data
    rows = [{'jpg':file.read_bytes(), 'cls':'ab'[i%2]} for i,file in enumerate(files)]
    if kind=='redis': to_redis(rows, fresh.url, 'lost', num_workers=1, progress=False)
    else: to_shards(rows, tmp_path/'lost', num_workers=1, progress=False)
    make = partial(DataLoaders.from_redis, fresh.url, 'lost', timeout=1) if kind=='redis' else partial(DataLoaders.from_shards, tmp_path/'lost')
    dls = make(item_tfms=Resize(16), bs=4, num_workers=0, device='cpu', valid_pct=.2)
    model = nn.Sequential(nn.Conv2d(3, 4, 5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), path=tmp_path)
    want = learn.predict(files[3])[2]
    learn.export('model.pkl')
    if kind=='redis': fresh.kill()
    else: (tmp_path/'lost').rename(tmp_path/'elsewhere')
    learn = load_learner(tmp_path/'model.pkl')
    for item in (files[3], str(files[3]), PILImage.create(files[3]), np.asarray(PILImage.create(files[3]))):
        assert torch.equal(learn.predict(item)[2], want)
    assert torch.equal(learn.get_preds(dl=learn.dls.test_dl(files[3:5]))[0][0], want)
    with pytest.raises(StoreError): learn.predict(3)

def incomplete(i, kind):
    "A progressive JPEG that lacks data, and that Pillow opens without an error"
    image = Image.fromarray(np.random.default_rng(i).integers(0, 256, (12,9,3), np.uint8)).resize((160,120), 2)
    if kind=='grey': image = image.convert('L')
    image.save(f:=io.BytesIO(), 'JPEG', progressive=True, quality=85)
    content = f.getvalue()
    scans = [k for k in range(len(content)-1) if content[k:k+2]==b'\xff\xda']
    end = scans[-1] if kind=='no last scan' else scans[1] if kind=='one scan' else int(len(content)*(.4+.012*i))
    return content[:end]+b'\xff\xd9'

@pytest.mark.parametrize('kind', ['colour','grey','no last scan','one scan'])
def test_progressive_jpegs_that_lack_scans(server, tmp_path, kind):
    "libjpeg smooths them, in its own way in each version: Pillow decodes them"
    def opens(content):
        try: return bool(Image.open(io.BytesIO(content)).load())
        except OSError: return False
    contents = list(islice(filter(opens, (incomplete(i, kind) for i in range(2*N))), N))
    for i,content in enumerate(contents): (tmp_path/f'{i:02}.jpg').write_bytes(content)
    rows = [{'jpg':content, 'cls':'ab'[i%2]} for i,content in enumerate(contents)]
    to_redis(rows, server.url, f'incomplete {kind}', shuffle=False, num_workers=1, progress=False)
    for item_tfms in (Resize(16), Resize(150), CropPad(50), RandomResizedCrop(64), None):
        results = []
        for dls in pair(sorted(tmp_path.glob('*.jpg')), RedisStore(server.url, f'incomplete {kind}')):
            set_seed(3)
            after_item = [item_tfms, ToTensor()] if item_tfms else [ToTensor()]
            results.append([x for x,_ in dls.train.new(after_item=after_item)])
        same(*results)
