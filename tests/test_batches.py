"How a loader makes batches: as a whole or item by item, what of it is noticed, and what becomes of bad samples"
import pickle, threading, warnings, zlib
from types import SimpleNamespace

import fastai, pytest
from conftest import fails
from fastai.vision.all import *
from fasttransform import Transform
from in_memory import Counted, Lossy, encoded, in_memory
from PIL import UnidentifiedImageError

from fastai_remote import *
from fastai_remote.codec.arrays import NpyImageCodec
from fastai_remote.codec.fields import register_codec
from fastai_remote.load import equivalence, fast_path, lazy_image, loader
from fastai_remote.load.equivalence import is_shipped
from fastai_remote.load.fast_path import WholeBatches
from fastai_remote.load.lazy_image import BatchMemory, image_floats, open_image
from fastai_remote.load.batch import SharedBuffers
from fastai_remote.order.base import SplitOrder

pytestmark = pytest.mark.filterwarnings('ignore:.*were missing or damaged')

def own_transform(): return Transform(lambda x: x, order=2)   # it keeps batches from being built as a whole
def every(items): return [14, 15],SplitOrder(range(len(items)))
def twice(items): return [items, items]
def ordered(items): return [list(range(15)), SplitOrder(range(15, 20))]

paths = pytest.mark.parametrize('tfms', [None, own_transform()], ids=['whole', 'items'])
if_bad = pytest.mark.parametrize('on_bad', ['replace', 'skip'])

def strokes(rng):
    return [np.clip(np.cumsum(rng.integers(-20, 21, (2, 9)), 1)+127, 0, 255).astype(np.uint8) for _ in range(3)]

def sample(i):
    "One of every kind, all pictures of one size, grey and in colour by turns"
    rng = np.random.default_rng(i)
    a = rng.integers(0, 256, (20, 24) if i%3 else (20, 24, 3), np.uint8)
    grey,both = rng.integers(0, 9, (20, 24), np.uint8),Image.fromarray(a)
    return {'a.png':both, 'g.png':Image.fromarray(grey), 'a.jpg':both, 'a.npyimg':grey,
        'c.npyimg':rng.integers(0, 256, (20, 24, 3), np.uint8), 'b.npzimg':a, 'd.strokes':strokes(rng),
        'cls':'abc'[i%3], 'age.f4':i/7, 'k.i8':i-5, 'w.f8':1/(i+1), 'labels':['x', 'y'][:i%3]}

@pytest.fixture(scope='module')
def store(): return in_memory(range(50), sample, 'all')

def loaders(store, x, y='cls', **kwargs):
    return DataLoaders.from_store(store, x=x, y=y,
        **{**dict(bs=8, num_workers=0, seed=1, normalize=False, device='cpu'), **kwargs})

def batches(dl):
    "What `dl` gives, before `after_batch`, of an order that depends on the seed alone"
    dl = dl.new(after_batch=[])
    dl.rng = random.Random(3)
    random.seed(4)
    return list(dl)

def same(a, b):
    assert len(a)==len(b)>0
    for s,t in zip(a, b):
        assert type(s) is type(t) is tuple and len(s)==len(t)
        for x,y in zip(s, t):
            assert type(x) is type(y) and x.stride()==y.stride() and vars(x)==vars(y) and torch.equal(x, y)

# --- batches as a whole. That they are those of stock fastai is tested in `test_equivalence.py`

@pytest.fixture
def made(monkeypatch):
    "Which batches were made at once"
    log,call = [],WholeBatches.finish
    def logged(self, *args):
        log.append((b:=call(self, *args)) is not None)
        return b
    monkeypatch.setattr(WholeBatches, 'finish', logged)
    return log

@pytest.mark.parametrize('function,x,others', [
    ('fastai.vision.core.load_image', 'a.png', ['age.f4']), ('fastai.data.transforms.Categorize.encodes', 'a.png', []),
    ('fastai.data.load.fa_collate', 'age.f4', [])])
def test_a_function_of_an_unknown_version_turns_off_what_needs_it(store, monkeypatch, function, x, others):
    "And it is named, once, with its version"
    equivalence.why_other_source.cache_clear()
    monkeypatch.setitem(equivalence._known_sources, function, '0123456789ab')
    why = f'{function} of fastai {fastai.__version__} is not one that fastai_remote knows'
    with pytest.warns(UserWarning, match=re.escape(why)):
        dl = loaders(store, x, item_tfms=Resize(16) if x=='a.png' else None).train
        assert why in dl.explain()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert len(list(dl))==5 and why in dl.explain()
        for other in others: assert loaders(store, other).train.explain().startswith('Whole batches')
    equivalence.why_other_source.cache_clear()

TFMS = [[], [RandomResizedCrop(16), FlipItem()], [Resize(16), DihedralItem()], [Resize((12, 18), method='squish')],
    [RandomCrop(14)], [CropPad(9), FlipItem(1.)]]

@pytest.mark.parametrize('k,x', enumerate('a.png g.png a.jpg a.npyimg c.npyimg b.npzimg d.strokes'.split()))
def test_batches_are_built_at_once(store, made, k, x):
    "Of each field with each transform, as images in colour and as grey ones by turns"
    draw = Rasterise(32) if x=='d.strokes' else None
    for j,tfms in enumerate(TFMS, k):
        cls = (PILImage, PILImageBW)[j%2]
        dls = loaders(store, x, ['cls', 'age.f4', 'k.i8', 'w.f8'], img_cls=cls, draw=draw, item_tfms=tfms)
        for dl in dls: list(dl)
    assert made==[True]*(5+2)*len(TFMS)

def same_item_by_item(dl): same(batches(dl), batches(dl.new(after_item=[own_transform(), ToTensor()])))

@pytest.mark.parametrize('draw,cls', [(Rasterise(16, time='grey'), PILImage), (Rasterise(16, time='colour'), PILImage),
    (Rasterise(16, time='colour'), PILImageBW), (Rasterise(300, antialias=False), PILImageBW)])
def test_drawings_are_built_at_once_unless_colours_become_grey(store, made, draw, cls):
    same_item_by_item(loaders(store, 'd.strokes', draw=draw, img_cls=cls).train)
    assert made==[True]*5*(draw.time!='colour' or cls is PILImage)

def test_masks_lists_and_other_loaders_are_built_at_once(store, made):
    same_item_by_item(loaders(store, 'a.jpg', {'g.png':PILMask, 'a.npyimg':PILMask}).train)
    dls = loaders(store, 'g.png', splitter=IndexSplitter(list(range(10, 20))))   # lists indices
    for kw in (dict(n=20, drop_last=True, shuffle=False), dict(balance='cls'), dict(bs=1)):
        same_item_by_item(dls.train.new(**kw))
    assert all(made) and len(made)==5+2+5+40

@pytest.mark.parametrize('img_cls,x,compiled', [
    (PILImage, 'a.jpg', True), (PILImage, 'g.png', True), (PILImageBW, 'a.png', True), (PILImage, 'a.jpg', False)])
def test_floats_are_normalised_at_once(store, monkeypatch, img_cls, x, compiled):
    "Also those of grey pictures with three channels. That they are those of stock is tested in `test_equivalence.py`"
    def logged(o, div, memory, stats=None):
        at_once.append(stats is not None)
        return image_floats(o, div, memory, stats)
    monkeypatch.setattr(fast_path, 'image_floats', logged)
    if not compiled: monkeypatch.setattr(lazy_image, '_pixels', None)
    n,at_once = 1 if img_cls is PILImageBW else 3,[]
    t = Normalize.from_stats([.4,.5,.6][:n], [.2,.3,.1][:n], cuda=False)
    for tfm in t,Normalize():
        list(loaders(store, x, item_tfms=Resize(16), img_cls=img_cls, batch_tfms=tfm).train)
    assert at_once==[True]*10

class _Own(Transform):
    "A transform of a user's"
    order = 2
    def encodes(self, o:PILImage): return o

def test_explain_names_what_prevents_the_fast_path(store, made, capsys):
    "In one sentence, for a loader and in `DataBlock.summary`; and what it says is what is done"
    def train(x='a.jpg', y='cls', **kw): return loaders(store, x, y, **kw).train
    flip,resize = FlipItem(),Resize(16)
    flip.before_call = lambda b, split_idx: None
    idle,plain = train(),train(item_tfms=resize)
    idle.after_item.fs = L(Transform(noop))
    undecoded = ('Items are built one by one, images stay undecoded through Resize: '
        '_Own is not a transform that images can pass undecoded.')
    for dl,why in ((train(item_tfms=[resize, _Own]), undecoded), (train(y='labels', item_tfms=resize), 'one transform'),
            (train(item_tfms=[resize, flip]), 'FlipItem.before_call was replaced on the object'),
            (plain.new(create_batch=fa_collate), 'create_batch was replaced'),
            (plain.new(before_batch=[lambda b: b]), 'before_batch transforms see'),
            (train(['g.png', 'a.jpg'], item_tfms=resize), 'item transforms see more than one image')):
        assert why in dl.explain() and len(list(dl))==5
    assert not made
    assert idle.explain()=="Items are built one by one, by fastai's own code: there is no ToTensor."
    assert plain.explain()=="Whole batches are built at once: all transforms of items are fastai's own, unchanged."
    assert plain.after_batch.known_tfms() and not plain.new(after_batch=[_Own()]).after_batch.known_tfms()
    DataBlock((RedisBlock(store, 'a.jpg'), RedisBlock(store, 'cls')), get_items=get_remote_items, splitter=ordered,
        item_tfms=[resize, _Own]).summary(store)
    assert 'images stay undecoded through Resize: _Own is not a transform' in capsys.readouterr().out

def test_images_and_items_are_stock_outside_a_loader(store):
    "Also in the middle of an epoch"
    dls = loaders(store, 'a.jpg', item_tfms=Resize(16))
    it = iter(dls.train)
    next(it)
    assert type(dls.train_ds[3][0]) is PILImage
    x,y = dls.train.do_item(0)
    assert type(x) is TensorImage and type(y) is TensorCategory and x.shape==(3, 16, 16)
    b = dls.train.do_batch([dls.train.do_item(i) for i in range(3)])
    assert type(b[0]) is TensorImage and b[0].shape==(3, 3, 16, 16)

def test_images_of_different_sizes_are_read_once_and_made_item_by_item():
    store = Counted({'png':[encoded(Image.new('L', (8, 8+i//10))) for i in range(20)], 'cls':np.arange(20)%2},
        vocab={'cls':['a', 'b']})
    dls = loaders(store, 'png', splitter=every, bs=5)
    store.reads.clear()
    assert [b[0].shape[2] for b in dls.valid]==[8, 8, 9, 9] and store.reads==[5]*4

def test_openers_of_other_formats_change_nothing(store, monkeypatch):
    "Pillow loads most of its plugins when it meets a file that the first ones do not open"
    Image.init()
    monkeypatch.setitem(Image.OPEN, 'MINE', (None, lambda prefix: prefix[:4]==b'mine'))
    monkeypatch.setattr(Image, 'ID', ['MINE', *Image.ID])
    assert loaders(store, 'a.jpg').train.explain().startswith('Whole batches')

def test_a_function_of_a_user_that_wraps_one_of_fastai_is_not_shipped():
    "`functools.wraps` lets it look like that, also if it is there before this package is imported"
    @functools.wraps(load_image)
    def of_user(*args, **kwargs): return load_image(*args, **kwargs).rotate(90)
    assert is_shipped(load_image)
    wrappers = of_user,functools.lru_cache(of_user),classmethod(of_user),property(of_user)
    assert not any(map(is_shipped, wrappers))

class Negatives(NpyImageCodec):
    def image(self, b): return Image.fromarray(255-self.from_bytes(b))

def test_a_codec_of_a_user_makes_its_own_pictures():
    "Also if it is a kind of one that whole batches know"
    register_codec(Negatives('negative'))
    value = NpyImageCodec('npyimg').pack(np.full((4, 5, 3), (10, 20, 30), np.uint8))
    dataset = Datasets(get_remote_items(MemoryStore({'x.negative':[value]*20})), [[Fetch(img_cls=PILImage)]])
    assert [int(x[0, 0, 0, 0]) for x, in RemoteDL(dataset, bs=4, after_item=[ToTensor()])]==[245]*5

@pytest.mark.parametrize('at,checksum', [(15, True), (30, False), (27, True)], ids=['start', 'checksum', 'filter'])
def test_a_png_that_stock_cannot_identify_is_damaged(at, checksum):
    content = encoded(Image.fromarray(sample(0)['c.npyimg']))
    broken = content[:at]+bytes([content[at]^1])+content[at+1:]
    if checksum: broken = broken[:29]+zlib.crc32(broken[12:29]).to_bytes(4, 'big')+broken[33:]
    with pytest.raises(UnidentifiedImageError): PILImage.create(broken)
    store = MemoryStore({'png':[content]*5+[broken]+[content]*2}, 'changed')
    for cls in (TfmdDL, RemoteDL):
        dl = cls(Datasets(get_remote_items(store), [[Fetch('png', img_cls=PILImage)]]), after_item=[ToTensor()],
            num_workers=0)
        with pytest.raises(CorruptSample, match="changed: sample 5, field 'png'"): list(dl)

def test_threads_may_replace_the_header_of_arrays_that_was_seen(store):
    dl = RemoteDL(Datasets(get_remote_items(store), [[Fetch('c.npyimg', img_cls=PILImage)]]), after_item=[ToTensor()])
    maker = WholeBatches(dl).makers[0]
    forgets = property(lambda self: {}, lambda self, value: None)
    maker.__class__ = type('Forgetful', (type(maker),), {'headers':forgets})
    x = maker(store.get_many(range(8), 'c.npyimg')['c.npyimg'])
    assert np.array_equal(x.x, np.stack([sample(i)['c.npyimg'].transpose(2, 0, 1) for i in range(8)]))

@pytest.mark.parametrize('kwargs', [{}, {'after_item':[own_transform(), ToTensor()]}], ids=['whole','items'])
def test_one_batch_reads_and_builds_one_batch(store, kwargs):
    "Threads and reading in advance are for epochs. What is drawn later is as after stock fastai's `one_batch`, too."
    counted = Counted({field:store.columns[field] for field in ('a.jpg', 'cls')}, vocab={'cls':list('abc')})
    dl = loaders(counted, 'a.jpg', bs=4, threads=3, prefetch=2).train.new(**kwargs)
    counted.reads.clear()
    dl.one_batch()
    assert counted.reads==[4] and (dl.threads,dl.prefetch)==(3,2)
    assert len(list(dl))==len(dl)

# --- memory that batches are sent in

class Batches(torch.utils.data.IterableDataset):
    def __init__(self, dl): self.dl = dl
    def __iter__(self):
        for batch in self.dl: yield [o.clone() for o in batch]   # within the worker, they are tensors already

def test_a_loader_within_a_worker_of_another_loader():
    "Also where batches are larger than what goes through the pipe of a queue"
    for size in 16,300:
        store = MemoryStore({'png':[encoded(Image.new('RGB', (size, size), (i, 0, 0))) for i in range(8)],
            'cls':np.arange(8)%2}, vocab={'cls':['a', 'b']})
        ours = loaders(store, 'png', splitter=twice, bs=4).valid
        for a,b in zip(torch.utils.data.DataLoader(Batches(ours), batch_size=None, num_workers=1), ours, strict=True):
            same([tuple(a)], [b])

def test_buffers_of_batches_that_begin_with_a_grey_image_are_freed():
    "Its pixels are repeated when the first image in colour comes"
    images = [Image.new('RGB' if i%16 else 'L', (300, 300), (i, 0, 2*i) if i%16 else 9) for i in range(96)]
    store = MemoryStore({'png':[encoded(im, compress_level=1) for im in images], 'cls':np.arange(96)%2}, 'grey',
        vocab={'cls':['a', 'b']})
    alone,dl = [loaders(store, 'png', num_workers=n, splitter=twice, bs=16).valid for n in (0, 1)]
    batches = iter(dl)
    found = [next(batches)]
    buffers = dl.buffers
    found += batches
    assert buffers is not None and buffers.busy.sum()==0
    assert all(torch.equal(a[0], b[0]) for a,b in zip(alone, found, strict=True))

def test_threads_of_a_worker_never_get_the_same_buffer(monkeypatch):
    "Each waits while it looks for one, until all look or the lock keeps the others out"
    buffers,find,looking,found = SharedBuffers(1),np.flatnonzero,threading.Barrier(4),[]
    def slow(*args):
        free = find(*args)
        try: looking.wait(.02)
        except threading.BrokenBarrierError: pass
        return free
    monkeypatch.setattr(np, 'flatnonzero', slow)
    def allocate(): found.append(buffers.allocate(0, 10).ctypes.data)
    threads = [threading.Thread(target=allocate) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(set(found))==4

# --- samples that are missing or damaged

def picture_and_label(dl):
    "`(number that the picture shows, label)` of each sample of an epoch, batch by batch"
    def shown(v): return round(float(v)*255) if v.is_floating_point() else int(v)
    return [[(shown(v), int(label)) for v,label in zip(x.flatten(1)[:, 0], y)] for x,y in dl]

def pictures(dl): return [[picture for picture,_ in batch] for batch in picture_and_label(dl)]

@pytest.mark.slow
def test_damage_is_described_in_the_same_words_item_by_item(store):
    arrays = [NpyImageCodec('npyimg').pack(np.zeros((8, 8), np.uint8))]*20
    pngs,jpgs,strokes = (store.columns[field][:20] for field in ('g.png', 'a.jpg', 'd.strokes'))
    for field,good,bad in (('g.png', pngs, pngs[7][:60]+b'\0'*20), ('a.jpg', jpgs, jpgs[7][:400]),
            ('d.strokes', strokes, b'\xff\1\2'), ('a.npyimg', arrays, b'\x93NUMPY\1\0v\0')):
        s = MemoryStore({field:[*good[:7], bad, *good[8:]], 'cls':np.zeros(20, np.uint8)}, 'gaps', vocab={'cls':['a']})
        for options in {}, dict(item_tfms=own_transform()), dict(threads=2), dict(num_workers=1):
            dl = loaders(s, field, splitter=every, **options).valid
            with fails(CorruptSample, match=f"gaps: sample 7, field '{field}'"): list(dl)
    s = MemoryStore({'a.npyimg':arrays, 'cls':np.arange(20, dtype=np.uint8)//7}, 'codes', vocab={'cls':['a', 'b']})
    with fails(CorruptSample, match="codes: sample 14, field 'cls': code 2, but there are 2 labels"):
        list(loaders(s, 'a.npyimg', splitter=every).valid)

@pytest.mark.parametrize('workers,on_bad,tfms', [
    *((0, on_bad, tfms) for on_bad in ('replace', 'skip') for tfms in (None, own_transform())),
    (2, 'replace', None), pytest.param(2, 'skip', own_transform(), marks=pytest.mark.slow)])
def test_a_bad_sample_is_replaced_or_skipped(tfms, on_bad, workers):
    "Whether it is missing, or cannot be decoded although its checksum is right; all others keep their places"
    cases = ('png', [3, 10], Lossy(3, 10)),('jpg', [5, 9], Lossy(cut=(5, 9)))
    for x,bad,store in cases[:1] if workers else cases:
        dls = loaders(store, x, 'k.i4', bs=4, splitter=every, on_bad=on_bad, item_tfms=tfms, num_workers=workers)
        pairs = sum(picture_and_label(dls.valid), [])
        assert all(picture==label for picture,label in pairs) and dls.valid.replaced==bad
        found,good = [label for _,label in pairs],[i for i in range(20) if i not in bad]
        if on_bad=='skip': assert found==good
        else: assert [i for k,i in enumerate(found) if k not in bad]==good and not set(bad)&set(found)
        assert len(found)==20-2*(on_bad=='skip')
        with fails((CorruptSample, MissingSample), match=f'lossy: sample {bad[0]}'):
            list(dls.valid.new(on_bad='raise'))
        if on_bad=='skip':   # results belong to samples
            with fails((CorruptSample, MissingSample), match=f'sample {bad[0]}'): list(dls.test_dl(dls.valid.items))

@paths
@pytest.mark.parametrize('kind', ['getter', 'two stores', 'list'])
def test_a_replaced_sample_is_replaced_for_all_pipelines(kind, tfms):
    "Also where the label is computed from the item, comes from another store, or the items are a list"
    store,labels = Lossy(3, 10),MemoryStore({'y.i4':np.arange(20, dtype='i4')})
    get_items = (lambda s: list(range(20))) if kind=='list' else get_remote_items
    images = RedisBlock('png') if kind!='list' else TransformBlock(type_tfms=[Fetch('png', store, PILImage)],
        item_tfms=ToTensor, batch_tfms=IntToFloatTensor)
    targets = TransformBlock(type_tfms=Fetch('y.i4', labels)) if kind=='two stores' else RegressionBlock
    block = DataBlock((images, targets), get_items=get_items, get_y=None if kind=='two stores' else lambda i: i,
        splitter=lambda items: ([0, 1], list(range(20))), item_tfms=tfms, dl_type=RemoteDL)
    dl = block.dataloaders(store, bs=4, num_workers=0, device='cpu', on_bad='replace').valid
    pairs = sum(picture_and_label(dl), [])
    assert len(pairs)==20 and all(picture==label for picture,label in pairs) and dl.replaced==[3, 10]
    assert [label for k,(_,label) in enumerate(pairs) if k not in (3, 10)]==[i for i in range(20) if i not in (3, 10)]
    assert not {3, 10}&{label for _,label in pairs}

@pytest.mark.slow
@paths
def test_only_bad_samples_are_skipped_by_loaders_that_drop_the_last_batch(tfms):
    def trained(items): return SplitOrder(range(20)),[0, 1]
    for workers in 0,2:
        kw = dict(splitter=trained, on_bad='skip', item_tfms=tfms, num_workers=workers)
        dl = loaders(Lossy(3, 10, 11), 'png', bs=4, **kw).train
        found = pictures(dl)
        assert dl.drop_last and sorted(sum(found, []))==[i for i in range(20) if i not in (3, 10, 11)]
        assert len(found)==5 and sum(len(batch)==4 for batch in found)>=2
        assert len(list(loaders(Lossy(3), 'png', bs=8, **kw).train))==2   # of 20

@pytest.mark.slow
@paths
def test_batches_keep_their_order_if_all_samples_of_one_are_skipped(tfms, monkeypatch):
    "Workers give batches in turn. One that has nothing to give must not lose its turn; in `learn.distrib_ctx`, too"
    from fastai.distributed import DistributedTrainer
    monkeypatch.setenv('WORLD_SIZE', '1')
    trainer = SimpleNamespace(learn=SimpleNamespace(model=SimpleNamespace(device='cpu')))
    for bad in range(4),range(4, 8),range(2, 14),range(16, 20):
        dl = loaders(Lossy(*bad), 'png', bs=4, splitter=every, on_bad='skip', item_tfms=tfms, num_workers=2).valid
        if bad[0]==4: dl = DistributedTrainer._wrap_dl(trainer, dl)
        found = pictures(dl)
        assert sum(found, [])==[i for i in range(20) if i not in bad] and all(found)

@paths
@if_bad
def test_a_dataset_never_shows_the_stand_in_of_a_batch(on_bad, tfms):
    "Neither in the midst of an epoch, nor when a loader was left early, nor after the epoch"
    dls = loaders(Lossy(5), 'png', splitter=ordered, on_bad=on_bad, item_tfms=tfms, shuffle=False)
    def check():
        with fails(MissingSample, match='lossy: sample 5 is missing'): dls.train_ds[5]
        assert int(np.asarray(dls.train_ds[6][0])[0, 0, 0])==6
    check()
    assert len(dls.one_batch()[0])==8-(on_bad=='skip')
    check()
    for batch in dls.train: check()
    check()

@pytest.mark.parametrize('damage,on_bad,tfms', [
    ('missing', 'replace', None), ('cut', 'skip', None), ('missing', 'skip', own_transform()),
    ('cut', 'replace', own_transform())])
def test_the_first_sample_may_be_bad(damage, on_bad, tfms):
    "In training, in validation and in both; for a regression, too, whose block looks at the first target"
    def lossy(*bad): return Lossy(*bad) if damage=='missing' else Lossy(cut=bad)
    options = dict(splitter=ordered, item_tfms=tfms, shuffle=False, drop_last=False)
    dls = loaders(lossy(0, 15), 'png', on_bad=on_bad, **options)
    train,valid = [sum(pictures(dl), []) for dl in dls]
    if on_bad=='skip': assert train==list(range(1, 15)) and valid==list(range(16, 20))
    else: assert train[1:]==list(range(1, 15)) and 0<train[0]<15 and len(valid)==5 and not {0, 15}&{*train, *valid}
    assert dls.n_inp==1
    with fails((CorruptSample, MissingSample), match='lossy: sample'):   # and none can take its place
        loaders(lossy(*range(20)), 'png', on_bad=on_bad, **options)

def test_predictions_are_never_shifted():
    "Where results belong to samples by position, a bad sample is not skipped, but an error that names it"
    def learner(on_bad):
        dls = loaders(Lossy(17), 'png', splitter=ordered, on_bad=on_bad)
        return Learner(dls, nn.Sequential(Flatten(), nn.Linear(3072, 2)), loss_func=CrossEntropyLossFlat())
    learn = learner('skip')
    items = learn.dls.valid_ds.items
    calls = [lambda: learn.get_preds(), lambda: learn.tta(n=1), lambda: learn.predict(17),
        lambda: learn.get_preds(dl=learn.dls.test_dl(items)), lambda: list(learn.dls.test_dl(items)),
        lambda: learn.get_preds(dl=learn.dls.test_dl(items), reorder=False),
        lambda: learn.get_preds(dl=learn.dls.test_dl(items, on_bad='skip'))]
    with learn.no_bar(), learn.no_logging():
        for call in calls:
            with fails(MissingSample, match='lossy: .*17') as e: call()
            assert e.value.__notes__==[loader._not_skipped]
        assert len(learn.validate())==1 and sum(len(b[0]) for b in learn.dls.valid)==4
        assert len(learn.get_preds(reorder=False)[0])==4
        assert len(learn.get_preds(dl=learn.dls.test_dl([15, 16, 18]))[0])==3
        learn.fit(1)
    learn = learner('replace')
    with learn.no_bar(): assert len(learn.get_preds()[0])==5

def test_samples_one_by_one_may_be_bad():
    dataset = Datasets(get_remote_items(Lossy(3, 4)), [[Fetch('png', img_cls=PILImage)]])
    for on_bad,workers in ('replace',0), ('skip',0), ('skip',2):
        dl = RemoteDL(dataset, bs=None, num_workers=workers, after_item=[ToTensor()], on_bad=on_bad)
        shown = [int(x[0, 0, 0]) for x, in dl]
        assert [i for i in shown if i not in (3, 4)]==shown and len(shown)==(20 if on_bad=='replace' else 18)

@if_bad
@pytest.mark.parametrize('threads', [0, 3])
def test_bad_samples_are_reported_whatever_before_iter_does(on_bad, threads):
    "Several threads read in advance, and do not overwrite each other's report"
    dl = loaders(Lossy(*range(0, 20, 3)), 'png', splitter=every, on_bad=on_bad, before_iter=noop, threads=threads).valid
    with pytest.warns(UserWarning, match='7 samples were missing or damaged'): list(dl)
    assert dl.replaced==list(range(0, 20, 3))

# --- options, and methods of a loader that are replaced or called from outside

@pytest.mark.parametrize('options,error', [
    (dict(balance=['cls', [1, 1]]), "balance= takes a field, or a field and the weight of each .*, not .'cls', .1"),
    (dict(balance=('cls', [1])), "lossy: balance= has 1 weights, but field 'cls' has 2 labels"),
    (dict(balance=('png', [1, 1])), "field with one label for each sample, and 'png' holds png"),
    (dict(balance=('no', [1, 1])), "no field 'no'"), (dict(balance='k.i4'), "labels of 'k.i4' are not counted"),
    (dict(prefetch=-1), 'prefetch and threads must be at least 0, not prefetch=-1, threads=0'),
    (dict(interleave=0), 'interleave must be at least 1, or None, not 0'),
    (dict(reducing_gap=.5), 'reducing_gap must be 1.0 or more')])
def test_wrong_options_are_refused_when_a_loader_is_made(options, error):
    dataset = Datasets(get_remote_items(Lossy()), [[Fetch('png')], [Fetch('cls')]])
    with pytest.raises((TypeError, ValueError, UnknownField), match=error):
        RemoteDL(dataset, bs=2, shuffle=True, **options)
    with pytest.raises(TypeError, match='needs the items of a store'): RemoteDL([1], shuffle=True, balance='cls')

def test_balance_is_for_what_is_trained_with():
    "Files to predict, test sets without labels and inputs of another store are no reason to refuse a loader"
    inputs,store = MemoryStore({'png':Lossy().columns['png']}),Lossy()
    store.manifest.counts = {'cls':[10, 10]}
    dls = loaders(store, 'png', balance='cls')
    for items in [{'png':store.columns['png'][1]}],store.columns['png'][1:2],get_remote_items(inputs)[:1]:
        assert dls.test_dl(items).one_batch()[0].shape==(1, 3, 32, 32)
    two = DataBlock((RedisBlock(inputs, 'png'), RedisBlock('cls')), get_items=get_remote_items,
        splitter=RandomStoreSplitter()).dataloaders(store, balance='cls', bs=8, num_workers=0, device='cpu')
    assert all(picture%2==label for picture,label in picture_and_label([two.one_batch()])[0])

def test_reducing_gap_is_kept(store):
    dl = loaders(store, 'a.jpg', item_tfms=Resize(16), reducing_gap=2.).train
    assert dl.new(bs=4).reducing_gap==2. and len(list(dl))

@pytest.fixture(scope='module')
def in_shards(tmp_path_factory):
    "60 numbers in shards of 10"
    rows = [{'x.f4':i, 'cls':'ab'[i%2]} for i in range(60)]
    to_shards(rows, d:=tmp_path_factory.mktemp('in_shards'), num_workers=1, maxcount=10, shuffle=False, progress=False)
    return ShardStore(d)

def numbers_of(batches): return [int(x) for batch in batches for x in batch[0]]

def loader_of_numbers(store, cls=RemoteDL, **kwargs):
    dataset = Datasets(get_remote_items(store), [[Fetch('x.f4')], [Fetch('cls')]])
    return cls(dataset, **{**dict(bs=8, num_workers=0), **kwargs})

def backwards(positions): return list(positions)[::-1]

class BackwardsDL(RemoteDL):
    def shuffle_fn(self, idxs): return backwards(idxs)

@pytest.mark.parametrize('how', ['argument', 'attribute', 'override'])
def test_a_shuffle_of_ones_own_is_used(in_shards, how):
    "Also for shards and samples of similar lengths, but not with `balance`; an epoch that is not shuffled asks nobody"
    cls,own = BackwardsDL if how=='override' else RemoteDL,{'shuffle_fn':backwards} if how=='argument' else {}
    for options in own,dict(own, lengths=lambda ds: np.arange(60)):
        dl = loader_of_numbers(in_shards, cls, shuffle=True, **options)
        if how=='attribute': dl.shuffle_fn = backwards
        assert numbers_of(dl)==list(range(60))[::-1]
        if not options.get('lengths'): assert numbers_of(dl.new(shuffle=False))==list(range(60))
    if how!='override': return
    dl = loader_of_numbers(in_shards, cls, shuffle=True, balance='cls')
    with fails(ValueError, match='balance= draws the samples, and shuffle_fn was replaced'): next(iter(dl))
    assert numbers_of(dl.new(balance=None))==list(range(60))[::-1]

@pytest.mark.parametrize('on_bad', ['raise', 'skip'])
def test_a_batch_may_be_none(in_shards, on_bad):
    "As in stock fastai: it does not end the epoch"
    def create_batch(samples): return None if int(samples[0][0])==8 else torch.tensor([x for x,_ in samples])
    dl = loader_of_numbers(in_shards, create_batch=create_batch, on_bad=on_bad)
    assert [batch is None for batch in dl]==[False, True]+[False]*6

def test_the_order_of_balanced_labels_is_pickled_for_workers_that_are_spawned(in_shards):
    order = loader_of_numbers(in_shards, shuffle=True, balance='cls').get_idxs()
    assert list(pickle.loads(pickle.dumps(order)))==list(order)

def test_batches_of_given_positions_need_no_epoch(in_shards):
    dl = loader_of_numbers(in_shards, bs=4, shuffle=True)
    assert numbers_of(dl.create_batches([7, 50, 3, 9, 8, 11]))==[7, 50, 3, 9, 8, 11]
    list(dl)
    assert numbers_of(dl.create_batches([7, 50, 3, 9, 8, 11]))==[7, 50, 3, 9, 8, 11]

def test_memory_of_a_batch_is_used_again_only_when_nothing_refers_to_it():
    x,memory = TensorImage(torch.randint(0, 200, (4,3,50,60), dtype=torch.uint8)),BatchMemory()
    def floats(o): return image_floats(o, 255., memory).as_subclass(type(o))
    kept = [floats(x+k) for k in range(4)]
    for k,batch in enumerate(kept): test_eq(batch, IntToFloatTensor()(x+k))
    part,at = kept[3][1,:,3:],kept[3].data_ptr()
    before = part.clone()
    del kept, batch
    assert floats(x).data_ptr()!=at   # a part of that batch is in use
    floats(x+9), floats(x+10)
    test_eq(part, before)
    free = floats(x).data_ptr()
    assert floats(x).data_ptr()==free
