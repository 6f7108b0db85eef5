"""Images that stay encoded: the region that is decoded is that of a whole decode, with the C module and without

What is damaged is said to be."""
import importlib.util, itertools, pickle, shutil, subprocess, sysconfig
from pathlib import Path

import numpy as np
import pytest
from fastai.vision.all import PILImage, PILImageBW, TensorImage, ToTensor
from hypothesis import given, strategies as st
from PIL import Image

from conftest import examples
from fastai_remote.codec import pixels as images
from fastai_remote.codec.pixels import JpegSource, jpeg_header, PixelPlan, TURNS
from fastai_remote.load.lazy_image import open_image
from inputs import encoded

BILINEAR = Image.Resampling.BILINEAR

def jpeg(w=120, h=90, mode='RGB', seed=0, **kw):
    a = np.random.default_rng(seed).integers(0, 256, (h//6+1,w//6+1,3), np.uint8)
    im = Image.fromarray(a).resize((w,h), Image.Resampling.BICUBIC).convert(mode)
    return encoded(im, 'JPEG', **{'quality':92, **kw})

def part_of(rng, n):
    "Where a random part of `n` pixels begins and ends"
    return sorted(rng.choice(n+1, 2, replace=False).tolist())

@pytest.fixture(params=['C','Pillow'])
def how(request, monkeypatch):
    if request.param=='Pillow':
        for module in '_jpeg','_pixels': monkeypatch.setattr(images, module, None)
    elif images._jpeg is None or images._pixels is None:
        pytest.skip('the C modules are not built: no compiler, or no jpeglib.h')

@pytest.fixture(params=['vectors', pytest.param('plain C', marks=pytest.mark.slow)])
def pixels(request, tmp_path, monkeypatch):
    "The C module as it is installed; and compiled without vector instructions, as for another processor"
    if images._pixels is None: pytest.skip('the C module is not built')
    if request.param=='vectors': return images._pixels
    if not (cc:=shutil.which('cc')): pytest.skip('no compiler')
    source,library = Path(images.__file__).parent/'c/pixels.c',tmp_path/'_pixels.abi3.so'
    subprocess.run([cc, '-O2', '-ffp-contract=off', '-DNO_AVX2', '-fPIC', '-shared', source, '-o', library, '-lm',
                    '-I'+sysconfig.get_paths()['include']], check=True)
    spec = importlib.util.spec_from_file_location('_pixels', library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def test_c_modules_are_built_where_there_is_a_compiler_and_a_header():
    if not shutil.which('cc') or not any(Path(d, 'jpeglib.h').exists() for d in ('/usr/include','/usr/local/include')):
        pytest.skip('no compiler, or no jpeglib.h')
    for m in '_jpeg','_pixels': assert importlib.import_module(f'fastai_remote.codec.{m}').read

KINDS = [dict(), dict(subsampling=0), dict(subsampling=1), dict(progressive=True), dict(mode='L'), dict(quality=20),
         dict(restart_marker_blocks=3), dict(w=1, h=1), dict(w=17, h=3), dict(optimize=True)]

def test_a_region_has_the_pixels_of_the_whole(how):
    for kind in KINDS:
        b,rng = jpeg(**kind),np.random.default_rng(1)
        (w,h,_),want = jpeg_header(b),np.asarray(PILImage.create(b))
        for _ in range(40):
            (x0,x1),(y0,y1) = part_of(rng, w),part_of(rng, h)
            region = PixelPlan(JpegSource(b, (w,h), 3), (x0,y0,x1,y1)).pixels().transpose(1,2,0)
            assert np.array_equal(region, want[y0:y1,x0:x1]), kind

def test_pixels_are_resized_as_pillow_does(pixels):
    "To the bit: any region, size, filter, cut and turn, whole and fractional boxes"
    rng = np.random.default_rng(1)
    for k in range(1000):
        w,h = rng.integers(1, 90, 2).tolist()
        n = 1+2*(k//500)   # channels
        a = rng.integers(0, 256, (h,w,n), dtype=np.uint8)
        if k%3==0: a = (a>128).view(np.uint8)*np.uint8(255)
        (x0,x1),(y0,y1) = part_of(rng, w),part_of(rng, h)
        size = width,height = x1-x0,y1-y0
        to = tuple(rng.integers(1, 60, 2).tolist()) if k%5 else (width, 3)
        (cx0,cx1),(cy0,cy1) = (part_of(rng, m) for m in to)
        shares = [*rng.uniform(0, .4, 2), *rng.uniform(.6, 1, 2)]
        part = tuple(float(np.float32(v*size[i%2])) for i,v in enumerate(shares)) if k%4==0 else (0,0,*size)
        cubic,(t,fx,fy) = bool(k%2),(rng.integers(0, 2, 3)>0).tolist()
        im = Image.fromarray(a[...,0] if n==1 else a).crop((x0,y0,x1,y1))
        im = im.resize(to, Image.Resampling.BICUBIC if cubic else BILINEAR, part).crop((cx0,cy0,cx1,cy1))
        turned = np.asarray(im).reshape(im.height, im.width, n).transpose((2,1,0) if t else (2,0,1))
        want = turned[:,::-1 if fy else 1,::-1 if fx else 1]
        order = images._new_order and height>to[1] and height-to[1]>2*(width-to[0])
        pixels.read(a, out:=np.full(want.shape, 7, np.uint8), w, n, (x0,y0,x1,y1), part, to, cubic, (cx0,cy0,cx1,cy1),
                    (t,fx,fy), order)
        assert np.array_equal(out, want), (k, w, h, to)

def thumbnail(o):
    "Pillow sets the pixels of the image itself"
    o.thumbnail((10,8), BILINEAR, reducing_gap=None)
    return o

METHODS = [lambda o: o.rotate(10), lambda o: o.convert('L'), lambda o: o.resize((30,20)), lambda o: o.reduce(2),
           lambda o: o.crop((-5,-5,50,60)), lambda o: o.getpixel((3,4)), lambda o: o.tobytes(), lambda o: o.split()[1],
           lambda o: o.resize((33,22), BILINEAR, box=(1.5,2,50,60)), lambda o: o.copy(), lambda o: o.getextrema(),
           lambda o: o.transform((50,50), Image.Transform.AFFINE, (1,.2,0,0,1,0)), lambda o: o.point(lambda v: 255-v),
           lambda o: pickle.loads(pickle.dumps(o)), lambda o: pickle.loads(pickle.dumps(o)).info, thumbnail]

def test_an_encoded_image_is_one_of_pillow_and_fastai(how):
    "Also of the kinds of JPEG that are not decoded here"
    for mode in 'CMYK','RGB','L':
        b = jpeg(mode=mode)
        for cls in PILImage,PILImageBW:
            a,c = open_image(b, cls),cls.create(b)
            assert isinstance(a, cls) and a.mode==c.mode and np.array_equal(np.asarray(a), np.asarray(c))
    b = jpeg()
    a,c = open_image(b, PILImage),PILImage.create(b)
    for o in a,c:
        with pytest.raises(ValueError): o.transpose(99)
    assert repr(a).endswith('mode=RGB size=120x90') and (a.shape,a.aspect,a.n_px)==(c.shape,c.aspect,c.n_px)
    for f in METHODS:
        x,y = f(open_image(b, PILImage)),f(c)
        assert np.array_equal(np.asarray(x), np.asarray(y)) if isinstance(y, Image.Image) else x==y
    t = ToTensor()(a)
    assert type(t) is TensorImage and t.shape==(3,90,120)
    (d:=open_image(b, PILImage)).paste((1,2,3), (0,0,9,9))
    assert d.getpixel((0,0))==(1,2,3) and open_image(b, PILImage)!=d

def test_an_image_stays_encoded_through_crops_a_resize_and_turns(how):
    b = jpeg()
    for first,second in itertools.product(TURNS, TURNS):
        lazy,stock = open_image(b, PILImage),PILImage.create(b)
        for step in (
                lambda o: o.transpose(first), lambda o: o.crop((10,20,85,88)), lambda o: o.resize((48,40), BILINEAR),
                lambda o: o.transpose(second), lambda o: o.crop((5,7,35,38)), lambda o: o.crop((2,1,20,30))):
            lazy,stock = step(lazy),step(stock)
            assert lazy.size==stock.size
        assert lazy.plan is not None and np.array_equal(lazy, stock)

def test_a_large_photograph_for_a_small_crop_is_decoded_small(how):
    "Near what Pillow makes of all its pixels"
    b = jpeg(1600, 1200)
    pil,box = PILImage.create(b),(100,50,1500,1150)
    for to,k in ((200,150),2),((90,70),4),((80,60),8):
        want = np.asarray(pil.crop(box).resize(to, BILINEAR)).astype(int)
        a = open_image(b, PILImage, reducing_gap=2.).crop(box).resize(to, BILINEAR)
        assert JpegSource(b, (1600,1200), 3, 2.).scale(box, to)==k and JpegSource(b, (1600,1200), 3).scale(box, to)==1
        d = np.abs(np.asarray(a).astype(int)-want)
        assert a.size==to and d.mean()<1.5 and d.max()<40

def test_the_reducing_gap_is_as_in_pillows_thumbnail():
    "Without it every pixel counts"
    def scale(gap, box, to=(224,224)): return JpegSource(b'', (4000,3000), 3, gap).scale(box, to)
    whole = 0,0,4000,3000
    assert [scale(gap, whole) for gap in (None,1.,2.)]==[1,8,4]
    assert scale(2., (0,0,400,300))==1 and scale(2., whole, None)==1

# --- damaged and wrong arguments

@examples(100)
@given(st.data())
def test_damaged_bytes_give_a_picture_or_the_error_of_pillow(data):
    b = bytearray(jpeg(64, 48, progressive=data.draw(st.booleans())))
    for _ in range(data.draw(st.integers(0, 4))):
        b[data.draw(st.integers(0, len(b)-1))] = data.draw(st.integers(0, 255))
    b = bytes(b[:data.draw(st.integers(0, len(b)))])
    try: a = np.asarray(open_image(b, PILImage).crop((3,3,40,40)).resize((16,16), BILINEAR))
    except (OSError,ValueError,SyntaxError,Image.DecompressionBombError): return
    assert a.shape==(16,16,3)

@examples(200)
@given(st.binary(max_size=200))
def test_the_header_of_anything_is_none_or_that_of_a_jpeg(b):
    for o in b,b'\xff\xd8\xff'+b:
        h = jpeg_header(o)
        assert h is None or len(h)==3 and h[2] in (1,3)

def test_padding_before_a_segment_of_a_jpeg_is_passed_over():
    b = jpeg(17, 3)
    assert jpeg_header(b)==jpeg_header(b[:2]+b'\xff\xff'+b[2:]) and jpeg_header(b)[:2]==(17,3)

def arguments(region=(0,0,10,10), part=None, to=None, cubic=False, cut=None):
    size = region[2]-region[0],region[3]-region[1]
    to = to or size
    return region,part or (0,0,*size),to,cubic,cut or (0,0,*to),(False,)*3,True

WRONG = [*(dict(region=o) for o in ((5,5,5,9),(115,0,125,10),(0,85,10,95),(-1,0,5,5),(0,0,1<<20,9))),
         *(dict(to=o) for o in ((20,20),(0,5),(1<<20,1))), *(dict(cut=o) for o in ((0,0,11,10),(3,3,3,5),(-1,0,9,10))),
         *(dict(part=o) for o in ((0,0,11,10),(-.5,0,9,9),(3,3,3,3),(0,0,float('nan'),5)))]

def test_the_c_modules_refuse_what_does_not_fit():
    "Nothing is written or read past an end"
    if images._jpeg is None or images._pixels is None: pytest.skip('the C modules are not built')
    b,out,a = jpeg(),np.empty((3,10,10), np.uint8),np.zeros((90,120,3), np.uint8)
    images._jpeg.read(b, out, 1, 3, *arguments())
    images._pixels.read(a, out, 120, 3, *arguments())
    for kw in WRONG:
        with pytest.raises(ValueError): images._jpeg.read(b, out, 1, 3, *arguments(**kw))
        with pytest.raises(ValueError): images._pixels.read(a, out, 120, 3, *arguments(**kw))
    for data,k,n in ((b,0,3),(b,3,3),(b,1,2),(b,1,1),(b[:900],1,3),(b'',1,3),(b'x'*99,1,3)):
        with pytest.raises(ValueError): images._jpeg.read(data, out, k, n, *arguments())
    for data,w in ((a[:9], 120),(a[:,:9].copy(), 9),(np.zeros((0,0,3), np.uint8), 0)):
        with pytest.raises(ValueError): images._pixels.read(data, out, w, 3, *arguments())
    with pytest.raises((TypeError,BufferError)): images._jpeg.read(b, bytes(300), 1, 3, *arguments())

def test_a_bomb_is_pillows_to_refuse():
    b = bytearray(jpeg())
    i = b.index(b'\xff\xc0')
    b[i+5:i+9] = b'\xff\xff\xff\xff'   # 65,535 pixels squared
    with pytest.raises(Image.DecompressionBombError): open_image(bytes(b), PILImage)
