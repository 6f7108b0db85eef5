"""Images that stay encoded: the region that is decoded is that of a whole decode, with the C module and without

What is damaged is said to be."""
import importlib.util, io, shutil, subprocess, sysconfig
from pathlib import Path

import numpy as np
import pytest
from conftest import examples, fails
import redis
import torch
from fastai.vision.all import (DataLoaders, FlipItem, PILImage, PILImageBW, RandomResizedCrop, Resize, TensorImage,
    ToTensor)
from hypothesis import given, strategies as st
from PIL import Image

import fastai_remote.block   # gives `DataLoaders` its `from_redis`
from fastai_remote.codec import pixels as images
from fastai_remote.core import CorruptSample
from fastai_remote.load.lazy_image import EncodedImage, open_image, stack_images
from fastai_remote.codec.pixels import JpegSource, jpeg_header, read_pixels
from fastai_remote.ingest.run import to_redis
from fastai_remote.store.redis import RedisStore

def jpeg(w=120, h=90, mode='RGB', seed=0, **kw):
    a = np.random.default_rng(seed).integers(0, 256, (h//6+1,w//6+1,3), np.uint8)
    Image.fromarray(a).resize((w,h), Image.Resampling.BICUBIC).convert(mode).save(f:=io.BytesIO(), 'JPEG',
        **{'quality':92, **kw})
    return f.getvalue()

def whole(b, mode='RGB'): return np.asarray(Image.open(io.BytesIO(b)).convert(mode))

@pytest.fixture(params=['C','Pillow'])
def how(request, monkeypatch):
    if request.param=='Pillow': monkeypatch.setattr(images, '_jpeg', None); monkeypatch.setattr(images, '_pixels', None)
    elif images._jpeg is None or images._pixels is None:
        pytest.skip('the C modules are not built: no compiler, or no jpeglib.h')
    return request.param

def test_c_modules_are_built():
    "Where there is a compiler and a header, as in CI, there are the modules"
    if not shutil.which('cc') or not any(Path(d, 'jpeglib.h').exists() for d in ('/usr/include','/usr/local/include')):
        pytest.skip('no compiler, or no jpeglib.h')
    for m in '_jpeg','_pixels': assert importlib.import_module(f'fastai_remote.codec.{m}').read

KINDS = [dict(), dict(subsampling=0), dict(subsampling=1), dict(progressive=True), dict(mode='L'),
    dict(restart_marker_blocks=3), dict(quality=20), dict(w=1, h=1), dict(w=17, h=3), dict(optimize=True)]

@pytest.mark.parametrize('kind', KINDS, ids=str)
def test_region(how, kind):
    b = jpeg(**kind)
    (w,h,_),rng,want = jpeg_header(b),np.random.default_rng(1),whole(jpeg(**kind))
    for _ in range(60):
        (x0,x1),(y0,y1) = (sorted(rng.choice(n+1, 2, replace=False).tolist()) for n in (w,h))
        assert np.array_equal(read_pixels(JpegSource(b, (w,h), 3), (x0,y0,x1,y1)).transpose(1,2,0), want[y0:y1,x0:x1])

@pytest.fixture(params=['vectors','plain C'])
def pixels(request, tmp_path_factory, monkeypatch):
    "The C module as it is installed; and compiled without vector instructions, as for another processor"
    if images._pixels is None: pytest.skip('the C module is not built')
    if request.param=='plain C':
        if not (cc:=shutil.which('cc')): pytest.skip('no compiler')
        so = tmp_path_factory.mktemp('plain')/'_pixels.abi3.so'
        subprocess.run([cc, '-O2', '-ffp-contract=off', '-DNO_AVX2', '-fPIC', '-shared',
            '-I'+sysconfig.get_paths()['include'], str(Path(images.__file__).parent/'c/pixels.c'), '-o', str(so),
            '-lm'], check=True)
        spec = importlib.util.spec_from_file_location('_pixels', so)
        m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)
        monkeypatch.setattr(images, '_pixels', m)
    return images._pixels

@pytest.mark.parametrize('n', [1,3])
def test_resized_as_pillow_does(pixels, n):
    "To the bit: any region, size, filter, cut and turn, whole and fractional boxes"
    rng = np.random.default_rng(n)
    for k in range(1500):
        w,h = rng.integers(1, 90, 2).tolist()
        a = rng.integers(0, 256, (h,w,n), dtype=np.uint8)
        if k%3==0: a = (a>128).view(np.uint8)*np.uint8(255)
        (x0,x1),(y0,y1) = (sorted(rng.choice(m+1, 2, replace=False).tolist()) for m in (w,h))
        to = tuple(rng.integers(1, 60, 2).tolist()) if k%5 else (x1-x0, 3)
        (cx0,cx1),(cy0,cy1) = (sorted(rng.choice(m+1, 2, replace=False).tolist()) for m in to)
        part = (0,0,x1-x0,y1-y0) if k%4 else tuple(float(np.float32(v*(y1-y0 if i%2 else x1-x0)))
            for i,v in enumerate([*rng.uniform(0, .4, 2), *rng.uniform(.6, 1, 2)]))
        cubic,(t,fx,fy) = bool(k%2),(rng.integers(0, 2, 3)>0).tolist()
        im = Image.fromarray(a[...,0] if n==1 else a).crop((x0,y0,x1,y1)).resize(to,
            Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR, part).crop((cx0,cy0,cx1,cy1))
        want = np.asarray(im).reshape(im.height, im.width, n).transpose((2,1,0) if t else (2,0,1))[:,::-1 if fy else 1,
            ::-1 if fx else 1]
        pixels.read(a, out:=np.full(want.shape, 7, np.uint8), w, n, (x0,y0,x1,y1), part, to, cubic, (cx0,cy0,cx1,cy1),
            (t,fx,fy), images._new_order and y1-y0>to[1] and y1-y0-to[1]>2*(x1-x0-to[0]))
        assert np.array_equal(out, want), (k, w, h, to)

@pytest.mark.parametrize('mode', ['CMYK','RGB','L'])
def test_other_colours(how, mode):
    "Kinds that are not decoded here come out as fastai has them"
    b = jpeg(mode=mode)
    for cls in PILImage,PILImageBW:
        a,c = open_image(b, cls),cls.create(b)
        assert (a.size,a.mode)==(c.size,c.mode) and np.array_equal(np.asarray(a), np.asarray(c)) and isinstance(a, cls)

def test_is_a_pil_image(how):
    "To everybody else: methods of Pillow, of fastai, tensors"
    b = jpeg()
    a,c = open_image(b, PILImage),PILImage.create(b)
    assert repr(a).endswith('mode=RGB size=120x90') and a.shape==c.shape and a.aspect==c.aspect and a.n_px==c.n_px
    for f in (lambda o: o.rotate(10), lambda o: o.convert('L'), lambda o: o.resize((30,20)),
            lambda o: o.crop((-5,-5,50,60)), lambda o: o.reduce(2), lambda o: o.getpixel((3,4)), lambda o: o.tobytes(),
            lambda o: o.split()[1],
              lambda o: o.resize((33,22), Image.Resampling.BILINEAR, box=(1.5,2,50,60)),
              lambda o: o.transform((50,50), Image.Transform.AFFINE, (1,.2,0,0,1,0)), lambda o: o.copy(),
              lambda o: o.point(lambda v: 255-v), lambda o: o.getextrema()):
        x,y = f(open_image(b, PILImage)),f(c)
        assert np.array_equal(np.asarray(x), np.asarray(y)) if isinstance(y, Image.Image) else x==y
    t = ToTensor()(a)
    assert type(t) is TensorImage and t.shape==(3,90,120)
    (d:=open_image(b, PILImage)).paste((1,2,3), (0,0,9,9))
    assert d.getpixel((0,0))==(1,2,3) and open_image(b, PILImage)!=d

def test_scaled(how):
    "A large photograph for a small crop is decoded small: near what Pillow makes of all its pixels"
    b = jpeg(1600, 1200)
    pil,box = PILImage.create(b),(100,50,1500,1150)
    for to,k in ((200,150),2),((90,70),4),((80,60),8):
        want = np.asarray(pil.crop(box).resize(to, Image.Resampling.BILINEAR)).astype(int)
        a = open_image(b, PILImage, reducing_gap=2.).crop(box).resize(to, Image.Resampling.BILINEAR)
        assert JpegSource(b, (1600,1200), 3, 2.).scale(box, to)==k and JpegSource(b, (1600,1200), 3).scale(box, to)==1
        d = np.abs(np.asarray(a).astype(int)-want)
        assert a.size==to and d.mean()<1.5 and d.max()<40

def test_reducing_gap():
    "As in Pillow's thumbnail; without it every pixel counts"
    def scale(gap, *args): return JpegSource(b'', (4000,3000), 3, gap).scale(*args)
    assert scale(2., (0,0,4000,3000), (224,224))==4 and scale(2., (0,0,400,300), (224,224))==1 and scale(2.,
        (0,0,4000,3000), None)==1
    assert scale(None, (0,0,4000,3000), (224,224))==1 and scale(1., (0,0,4000,3000), (224,224))==8

@examples(150)
@given(st.data())
def test_damaged(data):
    "Bytes that are cut off or changed give a picture or an exception, and Pillow's word where there is one"
    b = bytearray(jpeg(64, 48, progressive=data.draw(st.booleans())))
    for _ in range(data.draw(st.integers(0, 4))):
        b[data.draw(st.integers(0, len(b)-1))] = data.draw(st.integers(0, 255))
    b = bytes(b[:data.draw(st.integers(0, len(b)))])
    try: im = open_image(b, PILImage).crop((3,3,40,40)).resize((16,16), Image.Resampling.BILINEAR)
    except (OSError,ValueError,SyntaxError,Image.DecompressionBombError): return
    try: a = np.asarray(im)
    except (OSError,ValueError,SyntaxError,Image.DecompressionBombError): return
    assert a.shape==(16,16,3)

@examples(200)
@given(st.binary(max_size=200))
def test_header_of_anything(b):
    for o in b,b'\xff\xd8\xff'+b:
        h = jpeg_header(o)
        assert h is None or len(h)==3 and h[2] in (1,3)

def _how(region=(0,0,10,10), part=None, to=None, cubic=False, cut=None):
    to = to or (region[2]-region[0],region[3]-region[1])
    return region,part or (0,0,region[2]-region[0],region[3]-region[1]),to,cubic,cut or (0,0,*to),(False,)*3,True

BAD = [dict(region=(5,5,5,9)), dict(region=(115,0,125,10)), dict(region=(0,85,10,95)), dict(region=(-1,0,5,5)),
    dict(region=(0,0,1<<20,9)), dict(to=(20,20)), dict(to=(0,5)), dict(to=(1<<20,1)), dict(cut=(0,0,11,10)),
    dict(cut=(3,3,3,5)),
       dict(cut=(-1,0,9,10)), dict(part=(0,0,11,10)), dict(part=(-.5,0,9,9)), dict(part=(3,3,3,3)),
       dict(part=(0,0,float('nan'),5))]

@pytest.mark.parametrize('kw', BAD, ids=str)
def test_c_refuses(how, kw):
    "What does not fit, and nothing is written or read past an end"
    if how!='C': return
    b,out = jpeg(),np.empty((3,10,10), np.uint8)
    a = np.zeros((90,120,3), np.uint8)
    with pytest.raises(ValueError): images._jpeg.read(b, out, 1, 3, *_how(**kw))
    with pytest.raises(ValueError): images._pixels.read(a, out, 120, 3, *_how(**kw))

def test_c_refuses_other_data():
    if images._jpeg is None: pytest.skip('the C module is not built')
    b,out = jpeg(),np.empty((3,10,10), np.uint8)
    images._jpeg.read(b, out, 1, 3, *_how())
    for data,k,n in ((b,0,3),(b,3,3),(b,1,2),(b,1,1),(b[:900],1,3),(b'',1,3),(b'x'*99,1,3)):
        with pytest.raises(ValueError): images._jpeg.read(data, out, k, n, *_how())
    for a,w in ((np.zeros((9,120,3), np.uint8), 120),(np.zeros((90,9,3), np.uint8), 9),
            (np.zeros((0,0,3), np.uint8), 0)):
        with pytest.raises(ValueError): images._pixels.read(a, out, w, 3, *_how())
    with pytest.raises((TypeError,BufferError)): images._jpeg.read(b, bytes(300), 1, 3, *_how())

def test_a_bomb_is_pillows_to_refuse(monkeypatch):
    b = bytearray(jpeg())
    i = b.index(b'\xff\xc0')
    b[i+5:i+9] = b'\xff\xff\xff\xff'   # 65,535 pixels squared
    with pytest.raises(Image.DecompressionBombError): open_image(bytes(b), PILImage)

@pytest.mark.parametrize('kw', [dict(num_workers=0), dict(num_workers=2), dict(num_workers=0, threads=2)], ids=str)
def test_a_damaged_sample_is_named(server, kw):
    "Of what was stored damaged, which checksums do not see: when its pixels are asked for, in whatever process"
    b = jpeg(64, 48)
    rows = [{'jpg':b, 'cls':i%2} for i in range(40)]
    to_redis(rows, server.url, 'hurt', num_workers=1, shuffle=False, progress=False, overwrite=True)
    store = RedisStore(server.url, 'hurt')
    dls = DataLoaders.from_store(store, valid_pct=0., bs=8, item_tfms=[RandomResizedCrop(16),FlipItem()], check=False,
        **kw)
    c = redis.Redis.from_url(server.url)
    key = next(k for k in c.keys('hurt*') if k.endswith(b':jpg:7'))
    c.set(key, b[:400])
    with fails(CorruptSample, 'hurt: sample 7, field .jpg.: 400 bytes that PILImage cannot read'): list(dls.train)

def test_stack_is_what_collating_gives(how):
    ims = [open_image(jpeg(seed=i), PILImage) for i in range(6)]
    for tfms in [Resize(32)],[FlipItem(1.),RandomResizedCrop(24)]:
        out = list(ims)
        for t in tfms: out = [t(o, split_idx=1) for o in out]
        assert torch.equal(stack_images(out), torch.stack([ToTensor()(o) for o in out]))
    assert isinstance(ims[0], EncodedImage)
