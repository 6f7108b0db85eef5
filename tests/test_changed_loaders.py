"""Loaders that are changed, wrapped or used without their store, and odd images, do what stock fastai does

A part of the changes happens during an epoch."""
import functools, io, pickle, zlib
from itertools import islice

import numpy as np
import pytest
import torch
from fastai.vision.all import *
from fastai.vision.core import load_image
from fasttransform import Pipeline, Transform
from PIL import ImageOps, JpegImagePlugin, UnidentifiedImageError
from torch.utils.data._utils.collate import default_collate_fn_map

from fastai_remote import *
from fastai_remote.codec.arrays import NpyImageCodec
from fastai_remote.codec.base import Codec
from fastai_remote.codec.fields import register_codec
from fastai_remote.core import CorruptSample
from fastai_remote.load.equivalence import is_shipped, why_functions_changed
from fastai_remote.load.lazy_image import open_image
from fastai_remote.load.loader import RemoteDL
from fastai_remote.load.whole import WholeBatches
from fastai_remote.store.base import MemoryStore

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

# Datasets of a store, and fastai's own loader of the same dataset

def png(pixels): return encoded(Image.fromarray(pixels), 'PNG')

def encoded(image, format):
    image.save(f:=io.BytesIO(), format)
    return f.getvalue()

def noise(i): return np.random.default_rng(i).integers(0, 256, (24,30,3), np.uint8)

def memory_store(**values):
    "A store of 8 samples: `cls`, and the values of each field"
    values = {name.replace('_', '.'):value for name,value in values.items()}
    return MemoryStore({**values, 'cls':np.arange(8)%2}, 'changed', vocab={'cls':['a','b']})

def jpegs(): return memory_store(jpg=[encoded(Image.fromarray(noise(i)), 'JPEG') for i in range(8)])

def labels(): return [Fetch('cls'),Categorize(vocab=['a','b'])]

def loaders(store, *tfms, item=(), **kwargs):
    "fastai's loader of the pipelines `tfms`, and that of this package"
    dataset = Datasets(get_remote_items(store), tfms)
    kwargs = {**dict(bs=4, num_workers=0, after_item=[*item,ToTensor()], after_batch=[IntToFloatTensor()]), **kwargs}
    return [cls(dataset, **kwargs) for cls in (TfmdDL,RemoteDL)]

def check(stock, ours):
    "Fail if an epoch differs, with the same random numbers; returns the batches"
    epochs = []
    for dl in (stock,ours):
        random.seed(0)
        epochs.append(list(dl))
    for a,b in zip(*epochs, strict=True): same(a, b)
    return epochs[1]

class Bgr(Codec):
    "Pictures whose pixels are stored as blue, green and red"
    def unpack(self, b): return np.frombuffer(b, np.uint8).reshape(4, 5, 3)
    def image(self, b): return Image.fromarray(np.ascontiguousarray(self.unpack(b)[...,::-1]))

class Negatives(NpyImageCodec):
    def image(self, b): return Image.fromarray(255-self.from_bytes(b))

@pytest.mark.parametrize('codec', [Bgr('bgr'),Negatives('negative')], ids=repr)
def test_a_codec_of_a_user_makes_its_own_pictures(codec, monkeypatch):
    register_codec(codec)
    pixels = np.full((4,5,3), (10,20,30), np.uint8)
    pack = codec.pack if codec.name=='negative' else np.ndarray.tobytes
    store = memory_store(**{f'x_{codec.name}':[pack(pixels)]*8})
    check(*loaders(store, [Fetch(f'x.{codec.name}', img_cls=PILImage)], labels()))

class Batches(torch.utils.data.IterableDataset):
    def __init__(self, dl): self.dl = dl
    def __iter__(self):
        for batch in self.dl: yield [o.clone() for o in batch]   # within the worker, they are tensors already

@pytest.mark.parametrize('size', [16,300])
def test_a_loader_within_a_worker_of_another_loader(size):
    "Also where batches are larger than what goes through the pipe of a queue"
    store = memory_store(png=[png(np.full((size,size,3), i, np.uint8)) for i in range(8)])
    _,ours = loaders(store, [Fetch('png', img_cls=PILImage)], labels())
    batches = list(torch.utils.data.DataLoader(Batches(ours), batch_size=None, num_workers=1))
    assert len(batches)==2 and all(type(x) is TensorImage and type(y) is TensorCategory for x,y in batches)
    for a,b in zip(batches, ours, strict=True): same(a, b)

def negative_opener(fp, filename): return ImageOps.invert(JpegImagePlugin.jpeg_factory(fp, filename).convert('RGB'))
def plus_100(batch, *, collate_fn_map=None): return torch.stack(batch)+100

@pytest.mark.parametrize('item', [(),(Resize(16),),(Resize(16),Transform(lambda x: x, order=2))], ids=len)
@pytest.mark.parametrize('what', ['collate function','opener','first opener'])
def test_functions_registered_with_torch_and_pillow(what, item, monkeypatch):
    store = jpegs()
    dls = loaders(store, [Fetch('jpg', img_cls=PILImage)], labels(), item=item)
    before = check(*dls)
    if what=='collate function': monkeypatch.setitem(default_collate_fn_map, TensorCategory, plus_100)
    else:
        name = 'JPEG' if what=='opener' else 'MINE'
        monkeypatch.setitem(Image.OPEN, name, (negative_opener,lambda prefix: prefix[:2]==b'\xff\xd8'))
        monkeypatch.setattr(Image, 'ID', ['MINE']*(name=='MINE')+Image.ID)
    after = check(*dls)
    assert not all(torch.equal(x, y) for a,b in zip(before, after) for x,y in zip(a, b)), 'the change does not show'

def test_openers_of_other_formats_change_nothing(monkeypatch):
    "Pillow loads most of its plugins when it meets a file that the first ones do not open"
    Image.init()
    monkeypatch.setitem(Image.OPEN, 'MINE', (negative_opener,lambda prefix: prefix[:4]==b'mine'))
    monkeypatch.setattr(Image, 'ID', ['MINE',*Image.ID])
    assert why_functions_changed()==''

def thumbnail(x):
    assert type(x) is PILImage
    x.thumbnail((10,8), Image.Resampling.BILINEAR, reducing_gap=None)
    return x

def test_a_fetch_of_two_pipelines_gives_transforms_of_a_user_images_of_fastai():
    store,fetch = jpegs(),Fetch('jpg', img_cls=PILImage)
    check(*loaders(store, [fetch], [fetch,thumbnail], item=[Resize(8)]))

def test_an_image_that_is_not_decoded_is_pickled_and_refused_as_that_of_fastai():
    Image.fromarray(noise(1)).save(file:=io.BytesIO(), 'JPEG', dpi=(72,72))
    stock,lazy = PILImage.create(file.getvalue()),open_image(file.getvalue(), PILImage)
    copies = [pickle.loads(pickle.dumps(image)) for image in (stock,lazy)]
    assert np.array_equal(*copies) and copies[0].info['dpi']==copies[1].info['dpi']
    for image in (stock,open_image(file.getvalue(), PILImage)):
        with pytest.raises(ValueError): image.transpose(99)

def test_a_function_of_a_user_that_wraps_one_of_fastai_is_not_shipped():
    "`functools.wraps` lets it look like that, also if it is there before this package is imported"
    @functools.wraps(load_image)
    def of_user(*args, **kwargs): return load_image(*args, **kwargs).rotate(90)
    assert is_shipped(load_image) and is_shipped(functools.lru_cache(load_image))
    wrappers = of_user, functools.lru_cache(of_user), classmethod(of_user), property(of_user)
    assert not any(map(is_shipped, wrappers))

def test_pixels_that_pillow_sets_replace_those_that_were_not_decoded_yet():
    content = encoded(Image.fromarray(noise(1)), 'JPEG')
    stock,lazy = PILImage.create(content),open_image(content, PILImage)
    for image in (stock,lazy): image.thumbnail((10,8), Image.Resampling.BILINEAR, reducing_gap=None)
    assert lazy.is_decoded and lazy.size==stock.size and np.array_equal(lazy, stock)

def test_arguments_of_opening_changed_in_place(monkeypatch):
    store = memory_store(png=[png(noise(i)[...,0]) for i in range(8)])
    dls = loaders(store, [Fetch('png', img_cls=PILImage)])
    monkeypatch.setitem(PILImage._open_args, 'mode', 'RGBA')
    assert check(*dls)[0][0].shape[1]==4 and 'PILImage._open_args was changed' in dls[1].explain()

class Brighter(Pipeline):
    def __call__(self, o):
        o = super().__call__(o)
        if not isinstance(o, Image.Image): return TensorCategory(1-o)
        assert type(o) is PILImage
        return PILImage.create(np.asarray(o)//2+128)

@pytest.mark.parametrize('item', [(),(Resize(16),Transform(lambda x: x, order=2))], ids=len)
@pytest.mark.parametrize('k', [0,1])
@pytest.mark.parametrize('what', ['pipeline','_after_item'])
def test_pipelines_of_a_dataset_that_were_replaced(what, k, item):
    store = jpegs()
    dls = loaders(store, [Fetch('jpg', img_cls=PILImage)], labels(), item=item)
    before,tl = check(*dls),dls[0].dataset.tls[k]
    if what=='pipeline': tl.tfms = Brighter(tl.tfms)
    else: tl._after_item = Brighter(tl.tfms)
    after = check(*dls)
    assert not torch.equal(before[0][k], after[0][k]), 'the change does not show'

@pytest.mark.parametrize('dtype', [torch.float16,torch.bfloat16,torch.float32,torch.float64], ids=str)
def test_targets_are_rounded_to_the_default_dtype(dtype):
    store = memory_store(age_f8=np.arange(8)+.1, n_i8=2**30+np.arange(8), png=[png(noise(i)) for i in range(8)])
    targets = [[Fetch(field),RegressionSetup(c=1)] for field in ('age.f8','n.i8')]
    dls = loaders(store, [Fetch('png', img_cls=PILImage)], *targets)
    was = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        check(*dls)
        assert ('Whole batches' in dls[1].explain())==(dtype in (torch.float32,torch.float64))
    finally: torch.set_default_dtype(was)

def with_checksum(content): return content[:29]+zlib.crc32(content[12:29]).to_bytes(4, 'big')+content[33:]

def changed(content, at, to): return content[:at]+to+content[at+1:]

@pytest.mark.parametrize('at,checksum', [(5,False), (19,False), (30,False), (27,True), (15,True)],
    ids=['signature','width','checksum','filter method','name of the header'])
def test_a_png_that_stock_cannot_identify_is_damaged(at, checksum):
    content = png(noise(0))
    broken = changed(content, at, bytes([content[at]^1]))
    if checksum: broken = with_checksum(broken)
    with pytest.raises(UnidentifiedImageError): PILImage.create(broken)
    stock,ours = loaders(memory_store(png=[content]*5+[broken]+[content]*2), [Fetch('png', img_cls=PILImage)])
    for dl in (stock,ours):
        with pytest.raises(CorruptSample, match="changed: sample 5, field 'png'"): list(dl)

def test_a_header_of_arrays_that_another_thread_replaces():
    store = memory_store(x_npyimg=[NpyImageCodec('npyimg').pack(noise(i)) for i in range(8)])
    maker = WholeBatches(loaders(store, [Fetch('x.npyimg', img_cls=PILImage)])[1]).makers[0]
    maker.__class__ = type('Forgetful', (type(maker),), {'headers':property(lambda self: {}, lambda self, value: None)})
    x = maker(store.get_many(range(8), 'x.npyimg')['x.npyimg'])
    assert np.array_equal(x.x, np.stack([noise(i).transpose(2, 0, 1) for i in range(8)]))
