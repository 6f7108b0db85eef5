"What each module of `codec` does, in short: examples that were tried first"
import random
import PIL.Image as Image
import numpy as np
from fastai.vision.all import io, test_is
from fastcore.test import expect_fail, test_close, test_eq
from fastai_remote.codec.arrays import NpyCodec, NpzCodec
from fastai_remote.codec.fields import get_codec, infer_codec
from fastai_remote.codec.pixels import jpeg_header, JpegSource, PixelSource, read_pixels
from fastai_remote.codec.sequences import StrokeSequence
from fastai_remote.codec.text import JsonCodec, LabelsCodec, TextCodec
from fastai_remote.codec.webdataset import check_members, field_of, parse_number, split_name
from fastai_remote.codec.numbers import FixedCodec, LabelCodes
from fastai_remote.codec.stats import has_stats, ImageStats

def test_codec_arrays():
    for c,o in (TextCodec('txt'),'Größe'), (JsonCodec('json'),{'a':[1,None]}), (LabelsCodec('labels'),['cat','dog']):
        test_eq(c.from_bytes(c.to_bytes(o)), o)
    a = np.arange(6, dtype=np.float32).reshape(2,3)
    for c in NpyCodec('npy'),NpzCodec('npz'): test_eq(c.from_bytes(c.to_bytes(a)), a)
    with expect_fail(ValueError, contains='allow_pickle'): NpyCodec('npy').to_bytes(np.array([{}], dtype=object))
    NpzCodec('npz').from_bytes(NpzCodec('npz').to_bytes({'x':a, 'y':a[0]}))

def test_codec_fields():
    im,a = Image.new('L', (4,4)),np.zeros(3)
    names = 'jpg','mask.png','PNG','age.f4','pixels.raw','mask.bits'
    test_eq([get_codec(o).name for o in names], ['jpg','png','png','f4','raw','bits'])
    test_eq([infer_codec('x', o) for o in (im, b'', 'a', ['a','b'], a, 3, np.float32(2), {'k':1}, [1.,2.])],
            ['png','bin','txt','labels','npy','i8','f8','json','json'])

def test_codec_pixels():
    from fastai.vision.all import Image, np, test_eq
    def photo(w=500, h=375, quality=90, mode='RGB', seed=0, **kw):
        rng = np.random.default_rng(seed)
        a = np.zeros((h,w,3))
        for k in (3,20,90):   # coarse and fine structures
            noise = Image.fromarray(rng.integers(0, 256, (k*3//4,k,3), np.uint8))
            a += np.asarray(noise.resize((w,h), Image.Resampling.BICUBIC), float)/k**.3
        im = Image.fromarray((a*255/a.max()).astype(np.uint8)).convert(mode)
        im.save(f:=io.BytesIO(), 'JPEG', quality=quality, **kw)
        return f.getvalue()

    test_eq(jpeg_header(photo()), (500,375,3))
    test_eq(jpeg_header(photo(mode='L', progressive=True)), (500,375,1))
    test_is(jpeg_header(photo(mode='CMYK')), None)
    for b in b'', photo()[:20], b'\xff\xd8\xff'+bytes(100), b'\x89PNG': test_is(jpeg_header(b), None)
    s = JpegSource(photo(2000, 1500), (2000,1500), 3, reducing_gap=2)
    test_eq([s.scale((0,0,2000,1500), (n,n)) for n in (64,90,128,224,350,375,400,2000)], [8,8,4,2,2,2,1,1])
    s = JpegSource(photo(2000, 1500), (2000,1500), 3)   # the default: full size
    test_eq(s.scale((0,0,2000,1500), (64,64)), 1)
    for kw in {}, dict(subsampling=0), dict(subsampling=1), dict(progressive=True), dict(mode='L'):
        b = photo(333, 251, **kw)
        w,h,c = jpeg_header(b)
        im = Image.open(io.BytesIO(b))
        for f in Image.Resampling.BILINEAR,Image.Resampling.BICUBIC:
            x0,y0 = random.randrange(w-1),random.randrange(h-1)
            x1,y1 = random.randrange(x0+1, w+1),random.randrange(y0+1, h+1)
            box = x0,y0,x1,y1
            for to in None,(96,64),(32,300),(300,20):
                want = im.crop(box)
                want = np.asarray(want.resize(to, f) if to else want).reshape(-1, *(to or want.size)[:1], c)
                for src in JpegSource(b, (w,h), c),PixelSource(im),PixelSource(np.asarray(im)):
                    test_eq(read_pixels(src, box, to, f).transpose(1,2,0), want)
                    turned = read_pixels(src, box, to, f, orientation=(True,False,True))
                    test_eq(turned.transpose(2,1,0), want[:,::-1])

def test_codec_sequences():
    strokes = [np.array([[10,20,20],[0,0,5]], np.uint8), np.array([[7],[9]], np.uint8)]
    test_eq(StrokeSequence(3).create(strokes).tolist(), [[10,0,0], [10,0,0], [0,5,1], [-13,4,1]])
    steps = StrokeSequence().create(strokes)
    test_eq(steps.tolist(), [[10,0,1,0,0], [10,0,1,0,0], [0,5,0,1,0], [-13,4,0,1,0], [0,0,0,0,1]])
    points = np.array([[10,0,0,0], [20,0,16,0], [20,5,40,1]], np.float32)
    test_close(StrokeSequence(3, time=True).of_points(points), [[10,0,0,0], [10,0,.016,0], [0,5,.024,1]])

def test_codec_webdataset():
    test_eq(split_name('folder.v1/000012.left.JPG'), ('folder.v1/000012', 'left.jpg'))
    test_eq([split_name(name) for name in ('README', '.DS_Store', 'x/._0.jpg', '__meta__')], [(None,None)]*4)
    test_eq([parse_number('cls', text) for text in (b'7', b'7\n', b'007', b'cat\n')], [7, 7, '007', 'cat'])
    test_eq(parse_number('cls', b'cat\n', is_exact=True), 'cat\n')
    test_eq([parse_number('age.f4', b'1.5'), parse_number('txt', b'1.5')], [1.5, b'1.5'])
    test_eq([field_of(o) for o in ('cls.txt','age.f4.json','meta.json')], ['cls','age.f4','meta.json'])
    with expect_fail(ValueError, contains='WebDataset would read the members of both'):
        check_members('d', {'a.txt':{'dtype':None}, 'A.txt':{'dtype':None}})

def test_codec_numbers():
    test_eq(FixedCodec('u1', 'u1').to_array([0, 255]), np.array([0,255], np.uint8))
    with expect_fail(ValueError, contains='age: 256 does not fit uint8'): FixedCodec('age', 'u1').to_array([256])
    with expect_fail(ValueError, contains='age: 1.5 does not fit'): FixedCodec('age', 'i4').to_array([1.5])
    with expect_fail(ValueError, contains='age: 1e+300 does not fit float32, which would make inf of it'):
        FixedCodec('age', 'f4').to_num(1e300)
    with expect_fail(ValueError, contains='age: 9007199254740993 does not fit float64'):
        FixedCodec('age', 'f8').to_num(2**53+1)
    with expect_fail(ValueError, contains='would lose its imaginary part'): FixedCodec('age', 'f8').to_num(1+2j)
    with expect_fail(TypeError, contains="want a number, got 'x'"): FixedCodec('age', 'f4').to_num('x')
    FixedCodec('age', 'f4').to_array([.1, 3])
    codes = LabelCodes('cls', ['cat','dog'])
    test_eq([codes('dog'), codes(0)], [1,0])
    test_eq(LabelCodes('cls', [3,7])(7), 1)
    with expect_fail(ValueError, contains="label 2 is not in the vocab of 'cls', which has 2"): codes(2)

def test_codec_stats():
    rng = np.random.default_rng(0)
    arrs = [rng.integers(0, 200, (30+k,40,3), np.uint8) for k in range(6)]
    a,b = ImageStats(),ImageStats()
    for k,o in enumerate(arrs): (a if k%2 else b).add(Image.fromarray(o))
    a += ImageStats.from_text(b.to_text())
    s = a.summary()
    test_close(s['mean'], np.mean([o.mean((0,1)) for o in arrs], 0)/255, eps=1e-5)
    mean_square = np.mean([((o/255)**2).mean((0,1)) for o in arrs], 0)
    test_close(s['std'], np.sqrt(mean_square-np.array(s['mean'])**2), eps=1e-4)
    test_eq((s['n'], s['width'], s['height']), (6, [40,40.,40], [30,32.5,35]))

    grey = ImageStats()
    grey.add(Image.new('1', (5,5), 1))
    test_eq((grey.summary()['mean'], grey.summary()['grey']), ([1.], [1.,0.]))
    test_eq([sum(map(has_stats, range(n))) for n in (128,256,1024,50_000)], [128,192,320,674])
