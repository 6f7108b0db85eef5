"`raw` and `bits`: whatever pixels go in come out, hostile bytes are refused, and a dataset of them is one of pictures"
import io, re, zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from fastai.data.core import DataLoaders
from fastai.vision.augment import Resize
from fastai.vision.core import PILImage, PILImageBW, PILMask
from hypothesis import given, strategies as st
from PIL import Image

import fastai_remote.block
from conftest import class_of, examples
from fastai_remote import CorruptSample, MemoryStore, Rasterise, RedisStore, RemoteDataset, ShardStore, image_samples, shrink, to_redis, to_shards
from fastai_remote.codec.images import _head, ImageCodec
from fastai_remote.codec.fields import get_codec, infer_codec, is_image
from fastai_remote.codec.raster import rasterise
from fastai_remote.source.base import as_sample

raw,bits = get_codec('pixels.raw'),get_codec('mask.bits')

# --- round trips

@examples(60)
@given(st.integers(1,40), st.integers(1,40), st.sampled_from([(),(1,),(3,)]), st.booleans(), st.integers(0,9))
def test_raw_round_trip(h, w, c, turned, seed):
    "Arrays of any shape, in any order in memory, and images of them"
    a = np.random.default_rng(seed).integers(0, 256, (h,w,*c), np.uint8)
    if turned: a = a.swapaxes(0, 1)[::-1]
    want = a[...,0] if c==(1,) else a
    for o in (a, torch.from_numpy(a.copy()), Image.fromarray(want)):
        b = raw.to_bytes(o)
        assert type(b) is bytes and len(b)==10+a.size and raw.to_bytes(b) is b
        assert raw.array(b).shape==want.shape and (raw.array(b)==want).all() and (np.asarray(raw.image(b))==want).all()
    assert np.shares_memory(raw.array(b), np.frombuffer(b, np.uint8)) and not raw.array(b).flags.writeable

@examples(60)
@given(st.integers(1,40), st.integers(1,40), st.integers(0,255), st.integers(0,255), st.booleans(), st.integers(0,9))
def test_bits_round_trip(h, w, x, y, colour, seed):
    "Any two levels, or one of them, as an array, a grey picture, or a grey one in colours"
    a = np.random.default_rng(seed).choice(np.array([x,y], np.uint8), (h,w))
    o = np.stack([a]*3, -1) if colour else a
    for x in (o, Image.fromarray(o)):
        b = bits.to_bytes(x)
        assert bits.to_bytes(b) is b and (bits.array(b)==a).all() and bits.array(b).dtype==np.uint8
        assert bits.image(b).mode=='L' and (np.asarray(bits.image(b))==a).all()

@pytest.mark.parametrize('codec', [raw,bits])
def test_of_bits(codec):
    "Truth is white, as it is in Pillow"
    a = np.random.default_rng(0).random((9,13))<.5
    for o in (a, Image.fromarray(a)): assert (codec.array(codec.to_bytes(o))==a*255).all()

@pytest.mark.parametrize('mode', ['1','L','LA','P','PA','RGB','RGBA','RGBX','CMYK','YCbCr','LAB','HSV'])
def test_raw_of_any_mode(mode):
    "As `convert` makes it: grey stays grey, all else is RGB"
    im = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8,9,3), np.uint8)).convert({'LAB':'RGB', 'PA':'P'}.get(mode, mode))
    if mode=='PA': im = im.convert('PA')
    o = raw.from_bytes(raw.to_bytes(im))
    assert o.mode==('L' if mode in ('1','L','LA') else 'RGB') and (np.asarray(o)==np.asarray(im.convert(o.mode))).all()

def test_images_are_images():
    "A picture made of the bytes can be used and changed like any, and the bytes stay as they were"
    for a in (np.arange(60, dtype=np.uint8).reshape(6,10), np.arange(180, dtype=np.uint8).reshape(6,10,3)):
        b = raw.to_bytes(a)
        im = raw.image(b)
        im.putpixel((1,2), 7 if a.ndim==2 else (7,7,7))
        assert (raw.array(b)==a).all() and (np.asarray(im)[2,1]==7).all()
        del b
        assert raw.image(raw.to_bytes(a)).resize((5,3)).size==(5,3)
    assert is_image('x.raw') and is_image('mask.bits') and is_image('RAW')

def test_golden():
    "Version 1 stays readable"
    assert raw.array(b'raw\x01\x01\0\0\x03\0\x02abcdef').tolist()==[[97,98,99],[100,101,102]]
    assert raw.array(b'raw\x01\x03\0\0\x01\0\x02abcdef').tolist()==[[[97,98,99]],[[100,101,102]]]
    b = b'bit\x01\x05\x09\0\x0a\0\x02'+bytes.fromhex('789c5376683c0000031201a5')   # 10 bits a row, in two bytes
    assert bits.array(b).tolist()==[[5,5,9,5,5,5,9,9,5,9],[9,5,5,5,5,5,5,9,9,9]]

# --- what is refused

@pytest.mark.parametrize('o, err, says', [
    (np.zeros((4,5), np.uint16), TypeError, 'raw: want an image or uint8 pixels, got uint16'), (np.zeros((4,5), float), TypeError, 'got float64'), ('text', TypeError, 'got str'), (None, TypeError, 'got NoneType'),
    (np.zeros((3,4,5), np.uint8), ValueError, r'want pixels of shape .* got \(3, 4, 5\)'), (np.zeros(4, np.uint8), ValueError, r'got \(4,\)'), (np.zeros((1,2,2,3), np.uint8), ValueError, 'got'),
    (np.zeros((0,5), np.uint8), ValueError, '5x0 pixels'), (np.zeros((1<<16,1), np.uint8), ValueError, '1x65536 pixels'),
    (Image.fromarray(np.zeros((4,5), np.uint16)), ValueError, 'mode I;16 has more than 8 bits'), (Image.fromarray(np.zeros((4,5), np.int32)), ValueError, 'mode I has'), (Image.fromarray(np.zeros((4,5), np.float32)), ValueError, 'mode F has')])
def test_what_does_not_fit(o, err, says):
    with pytest.raises(err, match=says): raw.to_bytes(o)
    with pytest.raises(err, match=says.replace('raw', 'bits')): bits.to_bytes(o)

def test_a_jpeg_with_further_pictures_fits_jpg_only():
    "MPO, as phones write it, is a JPEG; it is no PNG and no WebP"
    Image.new('RGB', (9,9)).save(b:=io.BytesIO(), 'MPO', save_all=True, append_images=[Image.new('RGB', (9,9))])
    for field in 'jpg','img': assert get_codec(field).to_bytes(b.getvalue())==b.getvalue()
    for field in 'png','webp':
        with pytest.raises(ValueError, match=f'{field}: this is a MPO file'): get_codec(field).to_bytes(b.getvalue())

def with_transparency(kind):
    "A picture that is half transparent, with the transparency in its palette, in `info`, or in a channel"
    im = Image.new('RGBA', (20,20), (255,0,0,0))
    im.paste((0,255,0,255), (0,0,10,20))
    if kind=='RGBA': return im
    if kind=='palette': return im.quantize(8)
    im.convert('RGB').save(b:=io.BytesIO(), 'PNG', transparency=(255,0,0))
    return Image.open(b)

@pytest.mark.parametrize('kind', ['palette','info','RGBA'])
def test_transparency_is_kept_or_refused(kind):
    im = with_transparency(kind)
    for codec in raw,bits,get_codec('jpg'):
        with pytest.raises(ValueError, match=f'{codec.name}: a picture .* with transparency'): codec.to_bytes(im)
    for field in 'png','webp':
        back = get_codec(field).from_bytes(get_codec(field).to_bytes(im))
        assert (np.asarray(back.convert('RGBA'))==np.asarray(im.convert('RGBA'))).all(), field
    opaque = Image.new('RGBA', (20,20), (255,0,0,255)).quantize(8)
    assert raw.from_bytes(raw.to_bytes(opaque)).getpixel((0,0))==(255,0,0)

def test_a_palette_that_became_transparent_is_no_longer_that_of_the_file(tmp_path):
    im = Image.new('P', (9,9))
    im.putpalette([255,0,0])
    im.save(tmp_path/'a.png')
    im = Image.open(tmp_path/'a.png')
    assert get_codec('png').to_bytes(im)==(tmp_path/'a.png').read_bytes()
    im.putpalette([255,0,0,0], 'RGBA')
    assert get_codec('png').from_bytes(get_codec('png').to_bytes(im)).convert('RGBA').getpixel((0,0))==(255,0,0,0)

@pytest.mark.parametrize('mode', ['I;16','I;16B','I;16L','I;16N','I'])
def test_16_bits_fit_png_in_any_order_of_bytes(mode):
    a = np.array([[0,258],[260,65535]], {'I':'<i4', 'I;16B':'>u2'}.get(mode, '<u2'))
    b = get_codec('png').to_bytes(Image.frombytes(mode, (2,2), a.tobytes()))
    assert (np.asarray(get_codec('png').from_bytes(b))==a).all()

@pytest.mark.parametrize('field, mode, says', [
    ('png','F','PNG cannot keep a picture of mode F: store an array of it as npyimg'),
    ('jpg','F','a picture of mode F has more than 8 bits .*, which JPEG cannot keep: store an array of it as npyimg'),
    ('webp','I','a picture .*, which WEBP cannot keep: store it as png, or an array of it as npyimg'),
    ('png','CMYK','PNG cannot keep a picture of mode CMYK: convert it to RGB first'),
    ('png','PA','PNG cannot keep a picture of mode PA: convert it to RGBA first'),
    ('webp','La','WEBP cannot keep a picture of mode La: convert it to LA first')])
def test_the_advice_for_a_mode_loses_nothing(field, mode, says):
    with pytest.raises(ValueError, match=f'^{field}: {says}'): get_codec(field).to_bytes(Image.new(mode, (2,2)))

def test_formats_of_others_say_what_they_change():
    "A picture in colour has 256 colours as GIF; what comes back the same is not mentioned"
    gif,bmp = (ImageCodec(fmt.lower(), fmt) for fmt in ('GIF','BMP'))
    colours = np.random.default_rng(0).integers(0, 256, (30,30,3), np.uint8)
    assert gif.to_bytes(colours).note=='arrays of pixels were re-encoded as GIF, which changes pixels; png keeps them'
    assert 'as JPEG, quality 90, which changes pixels' in get_codec('jpg').to_bytes(colours).note
    for codec,o in (gif,colours[...,0]), (gif,np.zeros((3,3,3), np.uint8)), (bmp,colours), (get_codec('png'),colours):
        b = codec.to_bytes(o)
        pixels = np.asarray(codec.from_bytes(b).convert('RGB'))
        assert b.note is None and (pixels==np.asarray(Image.fromarray(o).convert('RGB'))).all()

@pytest.mark.parametrize('fmt, im, says', [
    ('BMP',Image.new('HSV', (9,9)),'cannot write a picture of mode HSV as BMP: '),
    ('PDF',Image.new('RGB', (9,9)),'not an image'), ('MPO',Image.new('RGB', (9,9)),'this is a JPEG file'),
    ('PSD',Image.new('RGB', (9,9)),'cannot write a picture of mode RGB as PSD: '),
    ('BMP',Image.new('RGBA', (9,9)),'with transparency, which BMP cannot keep'),
    ('GIF',Image.new('CMYK', (9,9)),'cannot write a picture of mode CMYK as GIF: .*wrong mode'),
    ('GIF',Image.new('L', (70_000,1)),'cannot write a picture of mode L as GIF: ')])
def test_what_formats_of_others_cannot_keep_is_named(fmt, im, says):
    with pytest.raises(ValueError, match=f'^x: .*{says}'): ImageCodec('x', fmt).to_bytes(im)

def test_an_orientation_that_a_format_of_others_loses_is_a_change():
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.effect_noise((9,5), 50).save(b:=io.BytesIO(), 'PNG', exif=exif.tobytes())
    assert 'which changes pixels' in ImageCodec('bmp', 'BMP').to_bytes(Image.open(b)).note
    assert 'pixel for pixel' in ImageCodec('tif', 'TIFF').to_bytes(Image.open(b)).note

def test_a_view_of_bytes_is_bytes():
    for o in b'abc',bytearray(b'abc'),memoryview(b'abc'):
        assert infer_codec('data', o)=='bin' and list(as_sample((o,
            1)))==['bin','cls'] and get_codec('bin').to_bytes(o)==b'abc'

def test_what_is_not_black_and_white():
    a = np.array([[0,1],[2,1]], np.uint8)
    with pytest.raises(ValueError, match='bits: a picture of 3 levels of grey, not two'): bits.to_bytes(a)
    with pytest.raises(ValueError, match='bits: a picture in colour'): bits.to_bytes(np.stack([a>0,a>1,a>0], -1).astype(np.uint8))

B,Z = raw.to_bytes(np.zeros((4,5,3), np.uint8)),bits.to_bytes(np.eye(9, dtype=bool))
@pytest.mark.parametrize('codec, b, says', [
    (raw, b'', r'not what raw stores \(0 bytes'), (raw, B[:9], 'not what raw stores'), (raw, b'RIFF'+B, 'not what raw stores .*RIFF'), (raw, Z, 'not what raw stores'), (bits, B, 'not what bits stores'),
    (raw, B[:-1], '5x4 pixels of 3 bytes should be 60 bytes, not 59'), (raw, B+b'x', 'not 61'), (raw, B[:10], 'not 0'),
    (raw, b'raw\x02'+B[4:], 'raw of version 2; this fastai_remote reads version 1'), (bits, b'bit\0'+Z[4:], 'bits of version 0'),
    (raw, B[:4]+b'\x02'+B[5:], 'pixels of 2 channels'), (raw, B[:6]+bytes(4), '0x0 pixels'),
    (bits, Z[:-1], 'damaged bits'), (bits, Z+b'x', 'damaged bits'), (bits, Z[:10], 'damaged bits'), (bits, Z[:12]+b'xyz'+Z[15:], 'damaged bits'), (bits, Z[:4]+b'\xff\0'+Z[6:], 'levels 255 and 0'),
    (bits, Z[:6]+b'\0\x09\0\x0a'+Z[10:], 'damaged bits: 9x10 bits should be 20 bytes'),
    (bits, Z[:10]+zlib.compress(bytes(50_000_000)), 'damaged bits: 9x9 bits should be 18 bytes')])
def test_damaged(codec, b, says):
    "By `check`, on the way in, and on the way out"
    for f in (codec.to_bytes, codec.check, codec.from_bytes, codec.array):
        with pytest.raises(ValueError, match=says): f(b)

@examples(200)
@given(st.sampled_from([(raw,B),(bits,Z)]), st.integers(0,70), st.integers(0,255), st.integers(0,70))
def test_hostile(what, at, x, end):
    "Any other byte, any other length: pixels, or `ValueError`"
    codec,b = what
    b = bytearray(b); b[at%len(b)] = x
    try: a = codec.array(bytes(b[:end or None]))
    except ValueError: return
    assert a.dtype==np.uint8 and a.ndim in (2,3)

def test_bombs(monkeypatch):
    "Pillow's limit holds for pixels, too: both ways"
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 49)
    for c in (raw,bits):
        with pytest.raises(ValueError, match='10x10 pixels are more than twice Image.MAX_IMAGE_PIXELS, 98'): c.to_bytes(np.zeros((10,10), np.uint8))
    with pytest.raises(ValueError, match='more than'): bits.array(_head.pack(b'bit', 1, 0, 255, 60_000, 60_000)+zlib.compress(bytes(1000)))

def test_damage_is_named():
    with pytest.raises(CorruptSample, match=r"tiny: sample 1, field 'raw' \(raw\): 5x4 pixels of 3 bytes should be 60 bytes, not 9"): MemoryStore({'raw':[B,B[:19]]}, 'tiny')[1]

# --- datasets of pixels

def put(src, where, server, tmp_path, name, fn=None, **kw):
    "Into Redis, or shards: the store and the report"
    kw = {'num_workers':1, 'progress':False, **kw}
    if where=='redis': return (rep:=to_redis(src, server.url, name, fn, **kw)) and RedisStore(server.url, name),rep
    return (rep:=to_shards(src, tmp_path/name, fn, **kw)) and ShardStore(tmp_path/name),rep

def again(store, how, *args, to, name, **kw):
    "`store.how(…)` beside it: in Redis, or in a folder of `to`"
    if isinstance(store, RedisStore): rep = getattr(store, how)(*args, name=name, url=store.link, num_workers=1, progress=False, **kw)
    else: rep = getattr(store, how)(*args, url=to/name, num_workers=1, progress=False, **kw)
    assert not rep.failed
    return RedisStore(store.link.url, name) if isinstance(store, RedisStore) else ShardStore(to/name)

def halved(o): return {**o, 'raw':o['raw'].reduce(2)}

@pytest.mark.parametrize('where', ['redis','shards'])
def test_dataset_of_raw(where, server, images, tmp_path):
    "`shrink(…, codec='raw')` stores the pixels that PNGs of them have; statistics, batches and every operation are those of pictures"
    src = image_samples(images, label=class_of)
    png,_ = put(src, where, server, tmp_path, 'as-png', shrink(32, codec='png'))
    s,rep = put(src, where, server, tmp_path, 'as-raw', shrink(32, codec='raw'), num_workers=2)
    assert (s.fields,rep.failed,len(s))==(['raw','cls'],0,60)
    same = [(np.asarray(s[i]['raw'])==np.asarray(png[i]['png'])).all() and s[i]['cls']==png[i]['cls'] for i in range(60)]
    assert all(same) and s[0]['raw'].mode=='RGB' and min(s[0]['raw'].size)==32
    assert s.stats==png.stats and s.verify(num_workers=1).bad==0
    make = DataLoaders.from_store
    x,y = ([make(o, seed=0, bs=16, num_workers=n, device='cpu', item_tfms=Resize(24), img_cls=c, shuffle=False) for n,c in ((0,PILImage),(1,PILImageBW))] for o in (s,png))
    for a,b in zip(x, y):
        for (i,j),(k,l) in zip(a.valid, b.valid): assert torch.equal(i, k) and torch.equal(j, l)
    shown = [o.valid.show_batch(show=False) for o in (x[0],y[0])]
    assert torch.equal(shown[0][0], shown[1][0])
    assert (RemoteDataset(s).decode('pil')[7]['raw'].tobytes())==np.asarray(png[7]['png']).tobytes()

    small = again(s, 'resize', 16, to=tmp_path, name='small')
    assert small.fields==['raw','cls'] and min(small[3]['raw'].size)==16 and small.manifest.fields['raw']['codec']=='raw'
    assert min(again(s, 'resize', 16, to=tmp_path, name='smaller', codec='jpg')[3]['jpg'].size)==16
    half = again(s, 'map', halved, to=tmp_path, name='half')
    assert half[3]['raw'].size==s[3]['raw'].reduce(2).size and half.verify(num_workers=1).bad==0
    assert again(s, 'copy', to=tmp_path, name='copied').get_many(range(60), 'raw')['raw']==s.get_many(range(60), 'raw')['raw']

@pytest.mark.parametrize('where', ['redis','shards'])
def test_dataset_of_bits(where, server, tmp_path):
    "Masks and drawings of two levels; a grey one among them is a line in the report"
    strokes = [[[0,255],[0,k*4]] for k in range(40)]
    def fn(k):
        im = rasterise([np.array(strokes[k], np.uint8)], 32, antialias=k==13)
        return {'bits':im, 'mask.bits':(im>127).astype(np.uint8), 'cls':k%2}
    s,rep = put(list(range(40)), where, server, tmp_path, 'as-bits', fn, shuffle=False)
    assert (len(s),rep.failed)==(39,1) and 'levels of grey, not two' in rep.failures[0][1]
    assert list(s.manifest.stats)==['bits'] and set(np.unique(s[3]['mask.bits']))=={0,1} and s.verify(num_workers=1).bad==0
    make = DataLoaders.from_store
    dls = make(s, x='bits', y='mask.bits', bs=8, num_workers=0, device='cpu', img_cls=PILImageBW, normalize=False, splitter=lambda o: (range(32),range(32,39)))
    x,y = dls.valid.one_batch()
    assert x.shape==(7,1,32,32) and y.shape==(7,32,32) and set(y.unique().tolist())=={0,1} and (y.numpy()==(x.numpy()[:,0]>.5)).all()
    dls.valid.show_batch()
    png = again(s, 'resize', 16, to=tmp_path, name='grey')   # smaller ones have greys
    assert png.fields==['png','mask.bits','cls'] and png[3]['png'].size==(16,16) and png.get_many([3], 'mask.bits')==s.get_many([3], 'mask.bits')

def test_shrink_of_arrays(server):
    "Arrays and bytes of every kind shrink to every kind; what is small stays as it is"
    a = np.random.default_rng(0).integers(0, 256, (20,30), np.uint8)
    for o in ({'x.raw':a}, {'x.raw':raw.to_bytes(a)}, {'x.jpg':Image.fromarray(a)}):
        for c in ('raw','png','jpg','webp'): assert get_codec(c).image(shrink(10, codec=c)(o)[f'x.{c}']).size==(15,10)
    for v in (a, a[...,None], get_codec('npyimg').to_bytes(a[...,None])):
        for c in ('raw','png'): assert get_codec(c).image(shrink(10, codec=c, fields=['x.npyimg'])({'x.npyimg':v})[f'x.{c}']).size==(15,10)
    assert (raw.array(shrink(20, codec='raw', fields=['x.npyimg'])({'x.npyimg':get_codec('npyimg').to_bytes(a)})['x.raw'])==a).all()
    b = raw.to_bytes(a)
    assert shrink(20, codec='raw')({'raw':b})['raw'] is b and shrink(99)({'raw':b})['jpg'][:2]==b'\xff\xd8'
    mask = {'mask.png':Image.fromarray((a>99).astype(np.uint8))}
    m = bits.array(shrink(10, codec='bits', fields=['mask.png'], resample=Image.Resampling.NEAREST)(mask)['mask.bits'])
    assert m.shape==(10,15) and set(np.unique(m))=={0,1}
    with pytest.raises(ValueError, match='NEAREST'): shrink(10, codec='bits')
    for c in ('npyimg','strokes','cls','tiff'):
        with pytest.raises(ValueError, match='codec must be jpg, png, webp, raw or bits'): shrink(10, codec=c)

def test_shrink_loses_no_field():
    "A new name that is there already would replace another value; so would a field that is not there go unnoticed"
    im = Image.new('RGB', (40,40))
    for fields,sample in (None,{'png':im, 'jpg':b'x'}), (['png','webp'],{'png':im, 'webp':im}):
        with pytest.raises(ValueError, match="two fields would be called 'jpg'"): shrink(10, fields=fields)(sample)
    with pytest.raises(ValueError, match="no image among the fields png"): shrink(10, fields=['a.png'])({'png':im})
    assert list(shrink(10, fields='left.png')({'png':im, 'left.png':im}))==['png','left.jpg']

@pytest.mark.parametrize('codec', ['png','webp','raw','bits'])
def test_a_quality_that_has_no_effect_is_refused(codec):
    nearest = Image.Resampling.NEAREST
    with pytest.raises(ValueError, match=f"quality=50 is that of JPEGs: codec={codec!r} stores all pixels"):
        shrink(10, quality=50, codec=codec, resample=nearest)
    assert shrink(10, codec=codec, resample=nearest).quality==90 and shrink(10, quality=50).quality==50

def test_shrink_leaves_small_pictures_of_phones_as_they_are():
    "MPO is a JPEG; larger ones are reduced, and another codec gets its own format"
    Image.new('RGB', (40,30)).save(b:=io.BytesIO(), 'MPO', save_all=True, append_images=[Image.new('RGB', (40,30))])
    mpo = b.getvalue()
    assert Image.open(io.BytesIO(mpo)).format=='MPO' and shrink(30)({'jpg':mpo})['jpg']==mpo
    assert get_codec('jpg').image(shrink(15)({'jpg':mpo})['jpg']).size==(20,15)
    assert Image.open(io.BytesIO(shrink(30, codec='png')({'jpg':mpo})['png'])).format=='PNG'

def test_shrink_of_views_of_bytes():
    "What is small enough stays the file that it is, whatever kind of bytes it comes in"
    Image.effect_noise((40,30), 50).save(b:=io.BytesIO(), 'JPEG')
    for kind in bytes,bytearray,memoryview:
        assert shrink(30)({'jpg':kind(b.getvalue())})['jpg']==b.getvalue()
        assert get_codec('jpg').image(shrink(15)({'jpg':kind(b.getvalue())})['jpg']).size==(20,15)

@pytest.mark.parametrize('codec', ['jpg','png','webp','img'])
@pytest.mark.parametrize('shape', [(), (784,), (1,2,2,3)])
def test_pixels_of_other_shapes_are_no_picture(codec, shape):
    "Pillow would make a picture one pixel wide of 784 numbers"
    with pytest.raises(ValueError, match=rf"want pixels of shape \(h,w\).*got {re.escape(str(shape))}"):
        get_codec(codec).to_bytes(np.zeros(shape, np.uint8))
