"`raw` and `bits`: whatever pixels go in come out, hostile bytes are refused, and a dataset of them is one of pictures"
import io, struct, zlib

import numpy as np
import pytest
import torch
from fastai.data.core import DataLoaders
from fastai.vision.augment import Resize
from fastai.vision.core import PILImage, PILImageBW
from hypothesis import given, strategies as st
from PIL import Image

import fastai_remote.block   # gives `DataLoaders` its `from_store`
from conftest import class_of, examples
from fastai_remote import CorruptSample, MemoryStore, RemoteDataset, image_samples, shrink
from fastai_remote.codec.images import ImageCodec
from fastai_remote.codec.fields import get_codec, infer_codec, is_image
from fastai_remote.codec.raster import Rasterise
from fastai_remote.source.base import as_sample
from inputs import encoded
from shard_helpers import ONE, put
from test_values import mpo

raw,bits,png,webp,jpg,npyimg = map(get_codec, ('pixels.raw','mask.bits','png','webp','jpg','npyimg'))

def noise(*shape): return np.random.default_rng(0).integers(0, 256, shape, np.uint8)
def same(a, b): return np.array_equal(np.asarray(a), np.asarray(b))

# --- round trips

@examples(60)
@given(st.integers(1,40), st.integers(1,40), st.sampled_from([(),(1,),(3,)]), st.booleans(), st.integers(0,9))
def test_raw_pixels_come_back(h, w, c, turned, seed):
    "Arrays of any shape, in any order in memory, and images of them"
    a = np.random.default_rng(seed).integers(0, 256, (h,w,*c), np.uint8)
    if turned: a = a.swapaxes(0, 1)[::-1]
    want = a[...,0] if c==(1,) else a
    for o in (a, torch.from_numpy(a.copy()), Image.fromarray(want)):
        b = raw.to_bytes(o)
        assert type(b) is bytes and len(b)==10+a.size and raw.to_bytes(b) is b
        assert raw.array(b).shape==want.shape and same(raw.array(b), want) and same(raw.image(b), want)
    assert np.shares_memory(raw.array(b), np.frombuffer(b, np.uint8)) and not raw.array(b).flags.writeable

@examples(60)
@given(st.integers(1,40), st.integers(1,40), st.integers(0,255), st.integers(0,255), st.booleans(), st.integers(0,9))
def test_two_levels_of_grey_come_back(h, w, x, y, colour, seed):
    "Or one of them, as an array, a grey picture, or a grey one in colours"
    a = np.random.default_rng(seed).choice(np.array([x,y], np.uint8), (h,w))
    o = np.stack([a]*3, -1) if colour else a
    for x in (o, Image.fromarray(o)):
        b = bits.to_bytes(x)
        assert bits.to_bytes(b) is b and same(bits.array(b), a) and bits.array(b).dtype==np.uint8
        assert bits.image(b).mode=='L' and same(bits.image(b), a)

def test_truth_is_white_as_it_is_in_pillow():
    a = np.random.default_rng(0).random((9,13))<.5
    for codec in raw,bits:
        for o in (a, Image.fromarray(a)): assert same(codec.array(codec.to_bytes(o)), a*255)

@pytest.mark.parametrize('mode', ['1','L','LA','P','PA','RGB','RGBA','RGBX','CMYK','YCbCr','LAB','HSV'])
def test_raw_pictures_of_any_mode_are_grey_or_rgb(mode):
    im = Image.fromarray(noise(8, 9, 3)).convert({'LAB':'RGB', 'PA':'P'}.get(mode, mode))
    if mode=='PA': im = im.convert('PA')
    o = raw.from_bytes(raw.to_bytes(im))
    assert o.mode==('L' if mode in ('1','L','LA') else 'RGB') and same(o, im.convert(o.mode))

def test_a_picture_of_raw_pixels_can_be_changed_and_its_bytes_stay():
    for a in noise(6, 10),noise(6, 10, 3):
        b = raw.to_bytes(a)
        im = raw.image(b)
        im.putpixel((1,2), 7 if a.ndim==2 else (7,7,7))
        assert same(raw.array(b), a) and (np.asarray(im)[2,1]==7).all() and im.resize((5,3)).size==(5,3)
    assert all(map(is_image, ('x.raw','mask.bits','RAW')))

def test_version_1_stays_readable():
    assert raw.array(b'raw\x01\x01\0\0\x03\0\x02abcdef').tolist()==[[97,98,99],[100,101,102]]
    assert raw.array(b'raw\x01\x03\0\0\x01\0\x02abcdef').tolist()==[[[97,98,99]],[[100,101,102]]]
    b = b'bit\x01\x05\x09\0\x0a\0\x02'+bytes.fromhex('789c5376683c0000031201a5')   # 10 bits a row, in two bytes
    assert bits.array(b).tolist()==[[5,5,9,5,5,5,9,9,5,9],[9,5,5,5,5,5,5,9,9,9]]

# --- what is kept, changed or refused

def test_a_jpeg_with_further_pictures_is_a_jpeg():
    for field in 'jpg','img': assert get_codec(field).to_bytes(mpo())==mpo()

def test_transparency_is_kept_or_refused():
    "Whether it is in a palette, in `info`, or in a channel"
    im = Image.new('RGBA', (20,20), (255,0,0,0))
    im.paste((0,255,0,255), (0,0,10,20))
    in_info = Image.open(io.BytesIO(encoded(im.convert('RGB'), 'PNG', transparency=(255,0,0))))
    for image in im,im.quantize(8),in_info:
        for codec in raw,bits,jpg:
            with pytest.raises(ValueError, match=f'{codec.name}: a picture .* with transparency'): codec.to_bytes(image)
        for codec in png,webp:
            assert same(codec.from_bytes(codec.to_bytes(image)).convert('RGBA'), image.convert('RGBA'))
    opaque = Image.new('RGBA', (20,20), (255,0,0,255)).quantize(8)
    assert raw.from_bytes(raw.to_bytes(opaque)).getpixel((0,0))==(255,0,0)

def test_a_palette_that_became_transparent_is_no_longer_that_of_the_file(tmp_path):
    im = Image.new('P', (9,9))
    im.putpalette([255,0,0])
    im.save(tmp_path/'a.png')
    im = Image.open(tmp_path/'a.png')
    assert png.to_bytes(im)==(tmp_path/'a.png').read_bytes()
    im.putpalette([255,0,0,0], 'RGBA')
    assert png.from_bytes(png.to_bytes(im)).convert('RGBA').getpixel((0,0))==(255,0,0,0)

@pytest.mark.parametrize('mode', ['I;16','I;16B','I;16L','I;16N','I'])
def test_16_bits_fit_png_in_any_order_of_bytes(mode):
    a = np.array([[0,258],[260,65535]], {'I':'<i4', 'I;16B':'>u2'}.get(mode, '<u2'))
    assert same(png.from_bytes(png.to_bytes(Image.frombytes(mode, (2,2), a.tobytes()))), a)

def test_what_an_encoder_changes_is_said():
    "A picture in colour has 256 colours as GIF; what comes back the same is not mentioned"
    gif,bmp = (ImageCodec(fmt.lower(), fmt) for fmt in ('GIF','BMP'))
    colours = noise(30, 30, 3)
    assert gif.to_bytes(colours).note=='arrays of pixels were re-encoded as GIF, which changes pixels; png keeps them'
    assert 'as JPEG, quality 90, which changes pixels' in jpg.to_bytes(colours).note
    for codec,o in (gif,colours[...,0]), (gif,np.zeros((3,3,3), np.uint8)), (bmp,colours), (png,colours):
        b = codec.to_bytes(o)
        assert b.note is None and same(codec.from_bytes(b).convert('RGB'), Image.fromarray(o).convert('RGB'))
    exif = Image.Exif()
    exif[0x0112] = 6   # orientation
    turned = Image.open(io.BytesIO(encoded(noise(5, 9), 'PNG', exif=exif.tobytes())))
    assert 'which changes pixels' in bmp.to_bytes(turned).note
    assert 'pixel for pixel' in ImageCodec('tif', 'TIFF').to_bytes(turned).note

@pytest.mark.parametrize('fmt,mode,size,says', [
    ('BMP','HSV',(9,9),'cannot write a picture of mode HSV as BMP: '), ('PDF','RGB',(9,9),'not an image'),
    ('MPO','RGB',(9,9),'this is a JPEG file'), ('BMP','RGBA',(9,9),'with transparency, which BMP cannot keep'),
    ('GIF','L',(70_000,1),'cannot write a picture of mode L as GIF: ')])
def test_what_formats_of_others_cannot_keep_is_named(fmt, mode, size, says):
    with pytest.raises(ValueError, match=f'^x: .*{says}'): ImageCodec('x', fmt).to_bytes(Image.new(mode, size))

def test_a_view_of_bytes_is_bytes():
    for o in b'abc',bytearray(b'abc'),memoryview(b'abc'):
        assert infer_codec('data', o)=='bin' and get_codec('bin').to_bytes(o)==b'abc'
        assert list(as_sample((o, 1)))==['bin','cls']

# --- damaged bytes

B,Z = raw.to_bytes(np.zeros((4,5,3), np.uint8)),bits.to_bytes(np.eye(9, dtype=bool))
DAMAGED = [
    (raw, b'', r'not what raw stores \(0 bytes'), (raw, B[:9], 'not what raw stores'), (raw, B[:10], 'not 0'),
    (raw, b'RIFF'+B, 'not what raw stores .*RIFF'), (raw, Z, 'not what raw stores'), (bits, B, 'not what bits stores'),
    (raw, B[:-1], '5x4 pixels of 3 bytes should be 60 bytes, not 59'), (raw, B+b'x', 'not 61'),
    (raw, b'raw\x02'+B[4:], 'raw of version 2; this fastai_remote reads version 1'),
    (raw, B[:4]+b'\x02'+B[5:], 'pixels of 2 channels'), (raw, B[:6]+bytes(4), '0x0 pixels'),
    (bits, b'bit\0'+Z[4:], 'bits of version 0'), (bits, Z[:4]+b'\xff\0'+Z[6:], 'levels 255 and 0'),
    *((bits, b, 'damaged bits') for b in (Z[:-1], Z+b'x', Z[:10], Z[:12]+b'xyz'+Z[15:])),
    (bits, Z[:6]+b'\0\x09\0\x0a'+Z[10:], 'damaged bits: 9x10 bits should be 20 bytes'),
    (bits, Z[:10]+zlib.compress(bytes(50_000_000)), 'damaged bits: 9x9 bits should be 18 bytes')]

def test_damage_is_found_on_the_way_in_by_check_and_on_the_way_out():
    for codec,b,says in DAMAGED:
        for f in (codec.to_bytes, codec.check, codec.from_bytes, codec.array):
            with pytest.raises(ValueError, match=says): f(b)
    with pytest.raises(CorruptSample, match=r"tiny: sample 1, field 'raw' \(raw\): 5x4 pixels of 3 bytes .*, not 9"):
        MemoryStore({'raw':[B,B[:19]]}, 'tiny')[1]

def test_pillows_limit_of_pixels_holds_both_ways(monkeypatch):
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 49)
    for codec in (raw,bits):
        with pytest.raises(ValueError, match='10x10 pixels are more than twice Image.MAX_IMAGE_PIXELS, 98'):
            codec.to_bytes(np.zeros((10,10), np.uint8))
        assert codec.to_bytes(np.zeros((7,14), np.uint8))
    with pytest.raises(ValueError, match='more than'):
        bits.array(struct.pack('>3s3B2H', b'bit', 1, 0, 255, 60_000, 60_000)+zlib.compress(bytes(1000)))

# --- datasets of pixels

@pytest.mark.slow
def test_a_dataset_of_raw_pixels_is_one_of_pictures(images, tmp_path):
    "`shrink(…, codec='raw')` stores what PNGs have; statistics, batches and each operation are those of pictures"
    source = image_samples(sorted(images.glob('*/*.jpg'))[:24], label=class_of)
    pngs,_ = put(tmp_path/'as-png', source, shrink(32, codec='png'))
    store,report = put(tmp_path/'as-raw', source, shrink(32, codec='raw'))
    assert (store.fields,report.failed,len(store))==(['raw','cls'],0,24)
    for a,b in zip(store[:], pngs[:], strict=True): assert same(a['raw'], b['png']) and a['cls']==b['cls']
    assert store[0]['raw'].mode=='RGB' and min(store[0]['raw'].size)==32
    assert store.stats==pngs.stats and store.verify(num_workers=1).bad==0
    for num_workers,cls in (0,PILImage),(1,PILImageBW):
        options = dict(seed=0, bs=4, num_workers=num_workers, device='cpu', item_tfms=Resize(24), img_cls=cls)
        ours,theirs = (DataLoaders.from_store(o, shuffle=False, **options).valid for o in (store,pngs))
        for (x,y),(u,v) in zip(ours, theirs, strict=True): assert torch.equal(x, u) and torch.equal(y, v)
    assert torch.equal(*(o.show_batch(show=False)[0] for o in (ours,theirs)))
    assert RemoteDataset(store).decode('pil')[7]['raw'].tobytes()==np.asarray(pngs[7]['png']).tobytes()

    assert min(store.resize(16, tmp_path/'small', **ONE)[3]['raw'].size)==16
    assert min(store.resize(16, tmp_path/'smaller', codec='jpg', **ONE)[3]['jpg'].size)==16
    half = store.map(lambda o: {**o, 'raw':o['raw'].reduce(2)}, tmp_path/'half', **ONE)
    assert half[3]['raw'].size==store[3]['raw'].reduce(2).size and half.verify(num_workers=1).bad==0
    assert store.copy(tmp_path/'copied', **ONE).get_many(range(24), 'raw')==store.get_many(range(24), 'raw')

def test_a_dataset_of_bits_has_masks_and_drawings_of_two_levels(tmp_path):
    "A grey one among them is a line in the report"
    def fn(k):
        [im] = Rasterise(32, antialias=k==13).arrays([[np.array([[0,255],[0,k*4]], np.uint8)]])
        return {'bits':im, 'mask.bits':(im>127).astype(np.uint8), 'cls':k%2}
    store,report = put(tmp_path/'d', list(range(20)), fn, shuffle=False)
    assert (len(store),report.failed)==(19,1) and 'levels of grey, not two' in report.failures[0][1]
    assert list(store.manifest.stats)==['bits'] and set(np.unique(store[3]['mask.bits']))=={0,1}
    assert store.verify(num_workers=1).bad==0
    dls = DataLoaders.from_store(store, x='bits', y='mask.bits', bs=8, num_workers=0, device='cpu', img_cls=PILImageBW,
                                 normalize=False, splitter=lambda o: (range(12),range(12,19)))
    x,y = dls.valid.one_batch()
    assert x.shape==(7,1,32,32) and y.shape==(7,32,32) and set(y.unique().tolist())=={0,1}
    assert same(y, x[:,0]>.5)
    dls.valid.show_batch()
    small = store.resize(16, tmp_path/'grey', **ONE)   # smaller ones have greys
    assert small.fields==['png','mask.bits','cls'] and small[3]['png'].size==(16,16)
    assert small.get_many([3], 'mask.bits')==store.get_many([3], 'mask.bits')

# --- shrink

def test_arrays_and_bytes_of_every_kind_shrink_to_every_kind():
    "What is small stays as it is"
    a,nearest = noise(20, 30),Image.Resampling.NEAREST
    for field,value in (('x.raw',a), ('x.raw',raw.to_bytes(a)), ('x.jpg',Image.fromarray(a)), ('x.npyimg',a),
                        ('x.npyimg',a[...,None]), ('x.npyimg',npyimg.to_bytes(a[...,None]))):
        for codec in 'raw','png','jpg','webp':
            small = shrink(10, codec=codec, fields=[field])({field:value})[f'x.{codec}']
            assert get_codec(codec).image(small).size==(15,10)
    assert same(raw.array(shrink(20, codec='raw', fields=['x.npyimg'])({'x.npyimg':npyimg.to_bytes(a)})['x.raw']), a)
    b = raw.to_bytes(a)
    assert shrink(20, codec='raw')({'raw':b})['raw'] is b and shrink(99)({'raw':b})['jpg'][:2]==b'\xff\xd8'
    mask = {'mask.png':Image.fromarray((a>99).astype(np.uint8))}
    small = bits.array(shrink(10, codec='bits', fields=['mask.png'], resample=nearest)(mask)['mask.bits'])
    assert small.shape==(10,15) and set(np.unique(small))=={0,1}

def test_options_of_shrink_that_cannot_be_used_are_refused():
    with pytest.raises(ValueError, match='NEAREST'): shrink(10, codec='bits')
    for codec in 'npyimg','tiff':
        with pytest.raises(ValueError, match='codec must be jpg, png, webp, raw or bits'): shrink(10, codec=codec)
    with pytest.raises(ValueError, match="quality=50 is that of JPEGs: codec='png' stores all pixels"):
        shrink(10, quality=50, codec='png')
    assert shrink(10, quality=50).quality==50 and shrink(10, codec='png').quality==90

def test_shrink_loses_no_field():
    "A new name that is there already would replace another value; so would a field that is not there go unnoticed"
    im = Image.new('RGB', (40,40))
    for fields,sample in (None,{'png':im, 'jpg':b'x'}), (['png','webp'],{'png':im, 'webp':im}):
        with pytest.raises(ValueError, match="two fields would be called 'jpg'"): shrink(10, fields=fields)(sample)
    with pytest.raises(ValueError, match="no image among the fields png"): shrink(10, fields=['a.png'])({'png':im})
    assert list(shrink(10, fields='left.png')({'png':im, 'left.png':im}))==['png','left.jpg']

def test_shrink_leaves_small_jpegs_as_they_are():
    "In whatever kind of bytes, also those of phones; larger ones are reduced, and another codec gets its own format"
    for file in mpo((40,30)),encoded(noise(30, 40), 'JPEG'):
        for kind in bytes,bytearray,memoryview:
            assert shrink(30)({'jpg':kind(file)})['jpg']==file
            assert jpg.image(shrink(15)({'jpg':kind(file)})['jpg']).size==(20,15)
        assert Image.open(io.BytesIO(shrink(30, codec='png')({'jpg':file})['png'])).format=='PNG'
