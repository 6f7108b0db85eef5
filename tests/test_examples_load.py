"What each module of `load` does, in short: examples that were tried first"
import itertools, pickle
import fastai_remote.block
from accelerate import Accelerator
from fastai.torch_core import TensorImageBW
from fastai.vision.all import AddMaskCodes, expect_fail, FlipItem, IntToFloatTensor, L
from fastai.vision.all import noop, np, PILBase, PILImage, Resize, TensorCategory, TensorImage
from fastai.vision.all import TensorMask, test_eq, torch, ToTensor, Transform
from fastcore.test import test_is
from torch.utils.data import DataLoader
from unittest import mock
from fastai_remote.codec.pixels import TURNS
from fastai_remote.ingest.stores import MemoryStore
from fastai_remote.load.dataset import RemoteDataset
from fastai_remote.load.epoch_order import epoch_order
from fastai_remote.load.equivalence import image_tfms, is_idle, Watched, why_stock_changed, why_unknown
from fastai_remote.load.frameworks import divided_batches, prepare_loader
from fastai_remote.load.lazy_image import BatchMemory, image_floats, open_image, stack_images
from fastai_remote.load.shared_buffers import OutgoingTensor, SharedBuffers
from fastai_remote.load.show import joined_inputs

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
