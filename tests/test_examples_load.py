"What each module of `load` does, in short: examples that were tried first"
import io, itertools, pickle, random, tempfile
import fastai_remote.block
from accelerate import Accelerator
from fastai.torch_core import TensorImageBW
from fastai.vision.all import AddMaskCodes, DataLoaders, Datasets, expect_fail, FlipItem, Image, IntToFloatTensor, L
from fastai.vision.all import noop, np, PILBase, PILImage, PILImageBW, Resize, TensorCategory, TensorImage
from fastai.vision.all import TensorMask, test_eq, torch, ToTensor, Transform
from fastcore.test import test_is, test_ne
from torch.utils.data import DataLoader
from unittest import mock
from fastai_remote.codec.pixels import TURNS
from fastai_remote.codec.sequences import StrokeSequence
from fastai_remote.core import MissingSample, UnknownField
from fastai_remote.ingest.shards import to_shards
from fastai_remote.ingest.stores import MemoryStore
from fastai_remote.load.batch import Batch, BatchReader, StoreInputs
from fastai_remote.load.dataset import RemoteDataset
from fastai_remote.load.distributed import RemoteDistributedDL
from fastai_remote.load.epoch_order import epoch_order
from fastai_remote.load.epochs import Consumer, Epochs
from fastai_remote.load.equivalence import image_tfms, is_idle, Watched, why_stock_changed, why_unknown
from fastai_remote.load.fetch_transform import Fetch
from fastai_remote.load.frameworks import divided_batches, prepare_loader
from fastai_remote.load.items import get_remote_items
from fastai_remote.load.kinds import choose_fields, FieldChoice, kind_of
from fastai_remote.load.lazy_image import BatchMemory, image_floats, open_image, stack_images
from fastai_remote.load.seeds import key_of
from fastai_remote.load.sequences import packed_strokes, pad_strokes, stroke_lengths, TensorStrokes
from fastai_remote.load.shared_buffers import OutgoingTensor, SharedBuffers
from fastai_remote.load.show import joined_inputs
from fastai_remote.load.steps import ask_handler, decode_step, ignore_and_continue, ignore_and_stop, reading_plan
from fastai_remote.load.steps import run_steps, Step
from fastai_remote.load.stream import RemoteStream, StreamInput
from fastai_remote.load.targets import ArraySetup, ShownArray, StoreCategorize
from fastai_remote.order.base import SplitOrder

def png(i):
    f = io.BytesIO()
    Image.fromarray(np.full((8,8), i, np.uint8)).save(f, 'PNG')
    return f.getvalue()

def greys():
    "A store of 100 PNGs, each of another grey, with labels"
    columns = {'png':[png(i) for i in range(100)], 'cls':np.arange(100, dtype=np.uint8)%3}
    return MemoryStore(columns, 'greys', vocab={'cls':['a','b','c']})

def test_load_batch():
    batch = Batch([0,1,2], [7,9,7], [7,9], [[b'seven',b'nine'], np.array([70,90])])
    test_eq(batch.columns()[0], [b'seven',b'nine',b'seven'])
    test_eq(batch.columns()[1], np.array([70,90,70]))
    batch.by_number()
    store = greys()
    splits = [SplitOrder(range(0,80)), SplitOrder(range(80,100))]
    dsets = Datasets(get_remote_items(store), [[Fetch('png', img_cls=PILImageBW)], [Fetch('cls')]], splits=splits)
    inputs = StoreInputs(dsets.valid)
    first,*rest = BatchReader(inputs).batches(range(20), bs=8)
    test_eq(first.numbers, list(range(80,88)))
    test_eq([len(b.positions) for b in rest], [8,4])
    test_eq(first.columns()[1], np.arange(80,88)%3)
    for k,position in enumerate(inputs.positions_of(first)): test_eq(dsets.valid[position][1], 'abc'[(80+k)%3])
    inputs.release()
    class Gaps(MemoryStore):
        "A store without sample 83"
        def read_values(self, numbers, fields):
            columns = super().read_values(numbers, fields)
            def without(values): return [None if i==83 else v for i,v in zip(numbers.tolist(), values)]
            return {f:without(values) if isinstance(values, list) else values for f,values in columns.items()}

    gaps = Gaps({'png':store.columns['png'], 'cls':store.columns['cls']}, 'gaps', vocab={'cls':['a','b','c']})
    dsets = Datasets(get_remote_items(gaps), [[Fetch('png', img_cls=PILImageBW)], [Fetch('cls')]], splits=splits)
    inputs,bad = StoreInputs(dsets.valid),[]
    with expect_fail(MissingSample, contains='sample 83 is missing'): BatchReader(inputs, prefetch=0).read([3])
    test_eq(len(BatchReader(inputs, on_bad='replace', report=bad.append).read(range(8)).positions), 8)
    batch = BatchReader(inputs, on_bad='skip', report=bad.append).read(list(range(8)))
    test_eq(batch.numbers, [80,81,82,84,85,86,87])

def test_load_distributed():
    tmp = tempfile.TemporaryDirectory()
    to_shards([{'x.f4':i, 'cls':i%3} for i in range(1000)], f'{tmp.name}/numbers', chunk=50, num_workers=1, progress=False)
    dls = DataLoaders.from_shards(f'{tmp.name}/numbers', x='x.f4', bs=8, num_workers=2, valid_pct=.1)
    def epoch(rank):
        dl = RemoteDistributedDL(dls.train, rank, 2)
        dl.dl.rng = random.Random(1)
        return [int(x) for b in dl for x in b[0]]
    a,b = epoch(0),epoch(1)
    test_eq((len(a), len(b), len({*a,*b})), (448, 448, 896))   # fastai drops the last batch of training, if it is short

def test_load_epoch_order():
    from fastai.data.core import DataLoaders
    columns = {'x.f4':np.arange(1000, dtype='f4'), 'cls':(np.arange(1000)%10==0).astype(np.uint8)}
    store = MemoryStore(columns, 'numbers', vocab={'cls':['often','rare']})
    def loader(**options): return DataLoaders.from_store(store, x='x.f4', bs=8, num_workers=0, seed=3, **options).train
    test_eq(sorted(epoch_order(loader())), range(800))
    dl = loader(balance=('cls', [1,9]))   # a weight for each label
    labels = columns['cls'][dl.dataset.items.numbers_at(epoch_order(dl).numbers_at(range(800)))]
    assert .4<labels.mean()<.6
    epoch_order(dl)

def test_load_epochs():
    test_eq([Consumer(r, 2, w, 2).share(7) for r in range(2) for w in range(2)], [2,2,2,1])
    test_eq(len({key_of(), key_of(0), key_of(0, 0), key_of(1)}), 4)
    epochs = Epochs(seed=3)
    epochs.set_epoch(2)
    test_eq((epochs.draw_key(), epochs.ranks), ((3,2), (0,1)))
    test_ne(Epochs().draw_key(), Epochs().draw_key())

def test_load_equivalence():
    from fastai.vision.all import Image, test_eq
    w = Watched(PILImage)
    test_eq(w.change(), '')
    with mock.patch.object(PILBase, 'crop', lambda self, box: self, create=True):
        test_eq(w.change(), 'PILImage.crop was replaced')
    with mock.patch.object(PILImage, '__array__', lambda self: 0, create=True):
        test_eq(w.change(), 'PILImage.__array__ was added')
    with mock.patch.object(PILImage, '_tensor_cls', TensorMask):
        test_eq(w.change(), 'PILImage._tensor_cls was replaced')
    with mock.patch.object(Image.Image, 'resize', lambda self, *a: self):
        test_eq(Watched(PILImage).change(), 'PILImage.resize is not what fastai ships')
    w.change()
    test_eq(why_unknown(Resize(8), image_tfms(), PILImage, TensorCategory), '')
    class Mine(Resize):
        def encodes(self, x:PILImage): return x
    test_eq(why_unknown(Mine(8), image_tfms(), PILImage), "Mine is not a transform that images can pass undecoded")
    t = FlipItem()
    t.before_call = lambda b, split_idx: None
    test_eq(why_unknown(t, image_tfms(), PILImage), 'FlipItem.before_call was replaced on the object')
    assert is_idle(Transform(noop)) and not is_idle(Transform(lambda o: o)) and is_idle(AddMaskCodes())
    test_eq(why_stock_changed(), '')

def test_load_frameworks():
    ds = RemoteDataset(MemoryStore({'x.f4':np.arange(10, dtype='f4')}, 'numbers'))
    batches = ds.batches(4, rank=0, world_size=2)
    assert divided_batches(DataLoader(ds, batch_sampler=batches)) is batches
    test_is(divided_batches(DataLoader(ds, batch_size=4)), None)
    with expect_fail(ValueError, contains='batches of 8 of them'): divided_batches(DataLoader(ds.batched(4), batch_size=8))
    accelerator = Accelerator(cpu=True)
    loader = prepare_loader(accelerator, DataLoader(ds, batch_sampler=ds.batches(4, shuffle=False)))
    test_eq([x['x.f4'].tolist() for x in loader], [[0,1,2,3],[4,5,6,7],[8,9]])
    with expect_fail(ValueError, contains='divided among 2 ranks, of which this is rank 0, and accelerate has 1'):
        prepare_loader(accelerator, DataLoader(ds, batch_sampler=batches))

def test_load_kinds():
    fields = 'jpg','mask.png','cls','age.f4'
    test_eq([kind_of(FieldChoice(field)).name for field in fields], ['image','mask','category','one number'])
    test_eq(kind_of(FieldChoice('png', img_cls=PILImageBW)).name, 'grayscale image')
    columns = {'jpg':[b''], 'boxes.npy':[b''], 'labels':[b'[]']}
    inputs,targets = choose_fields(MemoryStore(columns, 'animals', vocab={'labels':['cat']}))
    test_eq([(choice.field, kind_of(choice).name) for choice in inputs+targets],
            [('jpg','image'), ('boxes.npy','bounding boxes'), ('labels','labels of boxes')])

def test_load_lazy_image():
    from fastai.vision.all import Image, io, np, test_eq, test_is
    def photo(w=500, h=375, quality=90, mode='RGB', seed=0, **kw):
        rng = np.random.default_rng(seed)
        def noise(k):   # with details of the size w/k
            small = Image.fromarray(rng.integers(0, 256, (k*3//4,k,3), np.uint8))
            return np.asarray(small.resize((w,h), Image.Resampling.BICUBIC), float)/k**.3
        a = sum(noise(k) for k in (3,20,90))
        Image.fromarray((a*255/a.max()).astype(np.uint8)).convert(mode).save(f:=io.BytesIO(), 'JPEG', quality=quality, **kw)
        return f.getvalue()
    b = photo()
    im,pil = open_image(b, PILImage),PILImage.create(b)
    test_eq((im.size, im.mode, isinstance(im, PILImage)), (pil.size, pil.mode, True))
    for ops in itertools.product(TURNS, TURNS):
        a,c = im,pil
        for t in ops: a,c = a.transpose(t),c.transpose(t)
        steps = [lambda o: o.crop((10,20,310,320)), lambda o: o.resize((96,64), Image.Resampling.BILINEAR),
                 lambda o: o.transpose(ops[0]), lambda o: o.crop((5,7,50,60)), lambda o: o.crop((2,1,30,20))]
        for f in steps:
            a,c = f(a),f(c)
            test_eq(a.size, c.size)
        assert a._plan is not None
        test_eq(np.asarray(a), np.asarray(c))
    crop = im.crop((10,20,310,320)).resize((224,224), Image.Resampling.BILINEAR).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    assert crop._plan is not None
    want = pil.crop((10,20,310,320)).resize((224,224), Image.Resampling.BILINEAR).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    test_eq(np.asarray(crop), np.asarray(want))
    test_eq(np.asarray(im), np.asarray(pil))
    for o in im,crop:
        c = pickle.loads(pickle.dumps(o))
        test_eq((type(c),np.asarray(c)), (PILImage,np.asarray(o)))
    exif = Image.Exif()
    exif[0x0112] = 6   # orientation
    b = photo(exif=exif, dpi=(72,72), icc_profile=b'profile')
    a,c = open_image(b, PILImage).crop((10,20,310,320)).decoded(),PILImage(PILImage.create(b).crop((10,20,310,320)))
    test_eq((type(a), a.size, a.mode, a.info, dict(a.getexif())), (PILImage, c.size, c.mode, c.info, {0x0112:6}))
    test_eq(set(vars(a)), set(vars(c)))
    test_eq(np.asarray(a), np.asarray(c))
    ims = [open_image(b, PILImage).crop((k,k,k+200,k+220)).resize((64,64), Image.Resampling.BILINEAR) for k in range(8)]
    batch = stack_images(ims)
    test_eq(batch, torch.stack([ToTensor()(o) for o in ims]))
    test_is(type(batch), TensorImage)
    for bad in (*ims, open_image(b, PILImage)),(*ims, pil),(pil, *ims): test_is(stack_images(bad), None)
    x = TensorImage(torch.randint(0, 256, (4,3,50,60), dtype=torch.uint8))
    memory = BatchMemory()
    def t(x): return image_floats(x, 255., memory).as_subclass(type(x))
    a,b = t(x),IntToFloatTensor()(x)
    test_eq(a, b)
    test_eq((a.dtype,a.stride()), (b.dtype,b.stride()))
    batches = [t(x+k) for k in range(4)]   # all of them kept
    for k,o in enumerate(batches): test_eq(o, IntToFloatTensor()(x+k))
    part,at = batches[3][1,:,3:],batches[3].data_ptr()
    del batches, o
    assert t(x).data_ptr()!=at   # a part of it is in use
    want = part.clone()
    t(x+9); t(x+10)
    test_eq(part, want)
    grey = TensorImage(torch.randint(0, 256, (4,1,50,60), dtype=torch.uint8)).expand(-1, 3, -1, -1)
    a,b = t(grey),IntToFloatTensor()(grey)
    test_eq(a, b)
    assert a.is_contiguous()

def test_load_sequences():
    import torch
    short,long = [StrokeSequence().create([np.arange(2*n, dtype=np.uint8).reshape(2, n)]) for n in (2, 5)]
    batch = pad_strokes([(TensorStrokes(short), 0), (TensorStrokes(long), 1)])
    x = TensorStrokes(torch.stack([steps for steps,_ in batch]))
    test_eq((x.shape, stroke_lengths(x).tolist()), ((2,6,5), [2,5]))
    test_eq(x[0,-3:].tolist(), [[0,0,0,0,1]]*3)
    test_eq(packed_strokes(x).batch_sizes.tolist(), [2,2,2,1,1,1])
    x[1].show();

def test_load_shared_buffers():
    import torch
    from fastai.torch_core import TensorImage, TensorMask
    x = torch.arange(8, dtype=torch.uint8).view(2, 1, 2, 2)
    y = pickle.loads(pickle.dumps(OutgoingTensor(x, TensorImage, 3)))
    test_eq((type(y), y.shape, y.is_contiguous()), (TensorImage, (2,3,2,2), True))
    test_eq(y[:,2], x[:,0])
    y = pickle.loads(pickle.dumps(OutgoingTensor(x, TensorImage, 3, False)))
    test_eq((type(y), y.shape, y.stride(1)), (TensorImage, (2,3,2,2), 0))
    buffers = SharedBuffers(2)
    x = torch.from_numpy(buffers.allocate(1, 3<<20)).view(3, 1, 1024, 1024)
    x[1] = 7
    p = OutgoingTensor(x[:,0], TensorMask); p.buffers = buffers
    y = pickle.loads(pickle.dumps(p))
    test_eq((type(y), y.shape, y.sum()), (TensorMask, (3,1024,1024), 7<<20))
    test_eq((buffers.busy.sum(), pickle.loads(pickle.dumps(buffers))), (0,None))
    len(pickle.dumps(p))

def test_load_show():
    from fastai.vision.all import test_eq
    sample = TensorImage(torch.rand(3,8,8)),TensorImageBW(torch.rand(1,6,4)),'same'
    (inputs,target), = joined_inputs(L([sample]), 2)
    test_eq((len(inputs), target), (2, 'same'))
    inputs.show(figsize=(2,1));

def test_load_steps():
    try: ask_handler(ignore_and_continue, ValueError('no'), '') and ask_handler(None, ValueError('no'), 'pets: sample 3')
    except ValueError as e: test_eq(e.__notes__, ['pets: sample 3'])
    seen = []
    assert ask_handler(lambda e: seen.append(e) or True, KeyError('x'), 'pets: sample 3, in .map')
    assert isinstance(seen[0], KeyError)
    pets = MemoryStore({'txt':[b'cat', b'dog'], 'cls':np.array([0,1], np.uint8)}, 'pets')
    cat = {'__key__':'000000000', 'txt':b'cat', 'cls':0}
    chain = decode_step(()),Step('rename', True, {'name':'txt'}),Step('to_tuple', 'name', 'cls')
    test_eq(run_steps(pets, 0, cat, chain), ('cat',0))
    dropped = run_steps(pets, 0, cat, [Step('map', lambda sample: None)])
    test_eq((dropped.place, dropped.stops), ('pets: sample 0, in .map', False))
    dropped = run_steps(pets, 0, cat, [Step('to_tuple', 'jpg', handler=ignore_and_stop)])
    test_eq(dropped.stops, True)
    copied, = pickle.loads(pickle.dumps([Step('map', lambda sample: len(sample))]))
    test_eq(run_steps(pets, 0, cat, [copied]), 3)
    plan = reading_plan(pets, [decode_step(()), Step('to_tuple', 'cls')])
    test_eq(plan, dict(fields=['cls'], may_lack=False, metadata=()))
    test_eq(reading_plan(pets, [Step('rename', False, {'y':'cls'})])['fields'], ['cls'])

def test_load_stream():
    class Numbers(StreamInput):
        def run(self, key, consumer): return ((None,k) for k in range(consumer.worker, 10, consumer.num_workers))
        def count(self, rank, world_size): return 10
        def __repr__(self): return 'Numbers'
    numbers = RemoteStream(Numbers())
    test_eq(list(numbers.select(lambda k: k%2).map(lambda k: k*10)), [10,30,50,70,90])
    test_eq(list(numbers.with_epoch(13)), [*range(10),0,1,2])
    test_eq(sorted(DataLoader(numbers.with_epoch(13), batch_size=None, num_workers=2)), sorted([*range(10),0,1,2]))
    test_eq(sorted(numbers.listed(3).unlisted().shuffle(4, seed=1)), list(range(10)))
    test_eq([len(numbers), len(numbers.repeat(3)), len(numbers.with_epoch(7))], [10,30,7])
    with expect_fail(TypeError, contains='not known'): len(numbers.select(bool))
    numbers.select(bool).with_epoch(100)
    test_eq(list(numbers.select(lambda k: k%2).slice(2)), [1,3])
    with expect_fail(ValueError, contains='counts what comes'):
        list(numbers.select(bool).slice(2).start((0,), Consumer(0, 2)))

def test_load_targets():
    import torch
    test_eq(StoreCategorize('cls', ['b','a']).vocab, ['b','a'])
    test_eq(ArraySetup().decodes(torch.tensor([1.,2.])), (1.,2.))
    test_eq(type(ArraySetup().decodes(torch.zeros(3,4))), ShownArray)

def test_load_fetch_transform():
    store = greys()
    items = get_remote_items(store)
    splits = [SplitOrder(range(0,80)), SplitOrder(range(80,100))]
    dsets = Datasets(items, [[Fetch('png', img_cls=PILImageBW)], [Fetch('cls')]], splits=splits)
    x,y = dsets.valid[3]
    test_eq((np.array(x)[0,0], y), (83, store.vocab[83%3]))
    test_eq(np.array(Fetch('png', store, PILImageBW)({'png':png(5), 'cls':'a'})), np.array(x)-78)
    with expect_fail(UnknownField, contains="greys: no field 'jpg'; there are 'png', 'cls'"):
        Datasets(items, [[Fetch('jpg')]])
