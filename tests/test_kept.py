"Pictures keep what they had: pixels, transparency, 16 bits, profile, orientation; what they lose is said. Class names"
import io

import numpy as np
import pytest
from fastai.vision.core import PILImage
from PIL import Image, ImageCms, ImageOps
from torch.utils.data import Dataset, Subset

from inputs import column, encoded, in_memory, stored
from fastai_remote import image_samples, shrink
from fastai_remote.write.base import MemoryWriter

SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile('sRGB')).tobytes()
ORIENTATION,DESCRIPTION = 0x0112,0x010e

def photo(w=60, h=40, seed=0):
    "A smooth picture, all four corners of which differ"
    y,x = np.mgrid[:h,:w]
    return Image.fromarray(np.stack([x*255//w, y*255//h, (x+y+seed)%256], -1).astype(np.uint8))

def exif(k, description='a description'):
    res = Image.Exif()
    res[ORIENTATION],res[DESCRIPTION] = k,description
    return res.tobytes()

def turned(k, fmt='JPEG'): return encoded(photo(), fmt, exif=exif(k))
def opened(b): return Image.open(io.BytesIO(b))
def kept(store, i, field): return opened(stored(store, field)[i])
def pixels(im, size=None):
    im = im.convert('RGB')
    return np.asarray(im.resize(size, Image.Resampling.BILINEAR) if size else im).astype(int)
def upright(im): return pixels(ImageOps.exif_transpose(im), (16,16))

# --- shrink

@pytest.mark.parametrize('fmt,codec', [('JPEG','jpg'), ('JPEG','webp'), ('PNG','png'), ('PNG','jpg'), ('WEBP','webp'),
                                       ('WEBP','png')])
def test_shrink_keeps_orientation_and_profile(fmt, codec):
    "The pixels stay as they lie, as stock fastai shows them, and the tag says how to turn them"
    for k in range(1, 9):
        b = turned(k, fmt)
        for size,w,h in (20,30,20),(100,60,40):
            sample = {'img':b} if k%2 else {'jpg' if fmt=='JPEG' else fmt.lower():opened(b)}
            res = opened(shrink(size, codec=codec)(sample)[codec])
            assert res.size==(w,h) and res.getexif().get(ORIENTATION, 1)==k
            assert np.abs(pixels(PILImage.create(encoded(res.convert('RGB'))))-pixels(opened(b), (w,h))).mean()<6
            assert np.abs(upright(res)-upright(opened(b))).mean()<8
    b = encoded(photo(), fmt, icc_profile=SRGB)
    assert opened(shrink(20, codec=codec)({'img':b})[codec]).info['icc_profile']==SRGB

@pytest.mark.parametrize('codec', ['jpg','png','webp'])
def test_shrink_drops_the_profile_of_colours_that_it_converts(codec):
    b = encoded(photo().convert('CMYK'), 'JPEG', icc_profile=SRGB[:16]+b'CMYK'+SRGB[20:])
    res = opened(shrink(20, codec=codec)({'img':b})[codec])
    assert 'icc_profile' not in res.info and res.mode=='RGB'
    assert np.abs(pixels(res)-pixels(photo(), (30,20))).mean()<8

@pytest.mark.parametrize('codec', ['raw','bits'])
def test_pixels_alone_cannot_keep_an_orientation(codec):
    "A failed sample that says what to do, and none for those that are upright"
    white = Image.new('L', (60,40), 255)
    source = [{'png':encoded(white)}]*3+[{'png':encoded(white, exif=exif(6))}]
    _,report = in_memory(source, shrink(20, codec=codec, resample=Image.Resampling.NEAREST))
    (_,reason), = report.failures
    assert report.written==3 and 'orientation 6' in reason and 'turn=True' in reason
    _,report = in_memory([1,2,3], lambda i: {'raw':opened(turned(3 if i==2 else 1))})
    assert report.failed==1 and 'orientation 3' in report.failures[0][1]

def clear(mode):
    "A picture through which one can see in places"
    if mode=='P': return opened(encoded(photo().quantize(16), transparency=3))
    a = np.asarray(photo())
    return Image.fromarray(np.dstack([a, np.where(a[...,0]>128, 255, 60).astype(np.uint8)])).convert(mode)

@pytest.mark.parametrize('mode', ['RGBA','LA','P'])
def test_lost_transparency_is_reported_or_refused(mode):
    "As JPEG, the colours are those that fastai shows, and the report counts them; PNG and WebP keep it"
    im,solid = clear(mode),photo().convert('RGBA')
    b = encoded(im)
    store,report = in_memory([{'png':encoded(photo())}]*3+[{'png':b}]*2, shrink(20))
    assert report.failed==0 and "2 images lost their transparency (field 'jpg')" in repr(report)
    assert 'lost their transparency' in report._repr_html_()
    assert np.abs(pixels(kept(store, 4, 'jpg'))-pixels(opened(b), (30,20))).mean()<6
    for codec in 'png','webp':
        store,report = in_memory([{'png':b}], shrink(20, codec=codec))
        assert report.failed==0 and 'lost' not in repr(report)
        assert kept(store, 0, codec).convert('RGBA').getchannel('A').getextrema()[0]<255
    for field in 'jpg','raw':   # without `shrink`, it is a failed sample; opaque ones fit
        _,report = in_memory([1,2,3,4], lambda i: {field:im if i==3 else solid})
        (_,reason), = report.failures
        assert 'transparency' in reason and 'png' in reason
    for field in 'png','webp','img':
        store,_ = in_memory([1,2], lambda i: {field:im})
        assert np.array_equal(np.asarray(kept(store, 0, field).convert('RGBA')), np.asarray(im.convert('RGBA')))

def test_sixteen_bits_are_not_cut():
    a = (np.arange(60*40).reshape(40, 60)*20).astype(np.uint16)
    source = [{'png':encoded(photo())}, {'png':encoded(Image.fromarray(a))}]
    for codec in 'jpg','webp','raw':
        for array in a,a.astype(np.int32),np.array([[.5,2]], np.float32):
            _,report = in_memory([1,2,3], lambda i: {codec:Image.fromarray(array) if i==2 else photo()})
            assert report.failed==1 and '8 bits' in report.failures[0][1]
        _,report = in_memory(source, shrink(40, codec=codec))
        assert report.failed==1 and '8 bits' in report.failures[0][1]
    assert np.array_equal(np.asarray(kept(in_memory(source, shrink(40, codec='png'))[0], 1, 'png')), a)
    a = np.array([[300,65535,0]], np.int32)
    store,report = in_memory([a.astype(np.uint16), a, a+1, -a], lambda a: {'png':Image.fromarray(a)})
    assert report.failed==2 and all('16 bits' in reason for _,reason in report.failures)
    assert [np.asarray(kept(store, i, 'png')).tolist() for i in range(2)]==[a.tolist()]*2

def test_notes_survive_an_interruption():
    left,small,writer = [60],shrink(20),MemoryWriter()
    def fn(o):
        left[0] -= 1
        if left[0]==0: raise KeyboardInterrupt
        return small(o)
    source = [{'png':encoded(clear('RGBA'))}]*100
    with pytest.raises(KeyboardInterrupt): in_memory(source, fn, writer, chunk=8)
    _,report = in_memory(source, fn, writer, chunk=8)
    assert report.resumed>0 and '100 images lost their transparency' in repr(report)

def test_shrink_leaves_the_image_it_is_given():
    b = encoded(photo(480, 320), 'JPEG')
    def fn(_): return shrink(20, fields=['jpg'])({'jpg':(im := opened(b)), 'png':im})
    store,_ = in_memory([1,2], fn)
    assert kept(store, 0, 'jpg').size==(30,20) and np.array_equal(pixels(kept(store, 0, 'png')), pixels(opened(b)))

# --- opened images

FILES = [*((turned(k, fmt), field) for k,fmt,field in
           ((1,'JPEG','jpg'), (6,'JPEG','jpg'), (1,'PNG','png'), (6,'JPEG','img'), (6,'WEBP','webp'))),
         (encoded(photo().quantize(16), 'GIF'), 'img'), (encoded(photo(), 'TIFF'), 'img')]

@pytest.mark.parametrize('content,field', FILES)
def test_opened_file_is_stored_as_it_is(tmp_path, content, field):
    "Where the file is still there, and has the very same picture"
    (path := tmp_path/f'a.{field}').write_bytes(content)
    store,report = in_memory([1,2,3], lambda _: {field:Image.open(path)})
    assert stored(store, field)==[content]*3 and 're-encoded' not in repr(report)

def with_pixel(im):
    im.putpixel((0,0), (1,2,3))
    return im
def with_exif(im):
    im.getexif()[ORIENTATION] = 8
    return im

@pytest.mark.parametrize('change', [with_pixel, with_exif, lambda im: im.convert('L'), lambda im: im.rotate(90),
                                    lambda im: im.resize((9,9)), Image.Image.copy])
def test_changed_image_is_not_taken_for_its_file(tmp_path, change):
    (path := tmp_path/'a.jpg').write_bytes(turned(6))
    want = change(Image.open(path))
    store,report = in_memory([1,2,3], lambda _: {f:change(Image.open(path)) for f in ('jpg','png')})
    assert stored(store, 'jpg')[0]!=path.read_bytes()
    assert "3 opened images were re-encoded as JPEG, quality 90" in repr(report)
    for field in 'jpg','png':
        im = kept(store, 0, field)
        assert (im.size,im.mode)==(want.size,want.mode)
        for tag in ORIENTATION,DESCRIPTION: assert im.getexif().get(tag)==want.getexif().get(tag)
    assert np.array_equal(np.asarray(kept(store, 0, 'png')), np.asarray(want))

def test_file_that_is_gone_or_another_is_encoded(tmp_path):
    def fn(i):
        (path := tmp_path/f'{i}.jpg').write_bytes(encoded(photo(seed=i), 'JPEG'))
        (im := Image.open(path)).load()
        if i==0: path.unlink()
        else: path.write_bytes(encoded(photo(seed=99), 'JPEG') if i==1 else b'no jpeg')
        return {'png':im}
    store,report = in_memory([0,1,2], fn)
    for i in range(3):
        assert np.array_equal(pixels(kept(store, i, 'png')), pixels(opened(encoded(photo(seed=i), 'JPEG'))))
    assert "3 opened images were re-encoded as PNG" in repr(report)

def test_report_counts_what_was_encoded_again(images):
    "One line a field and reason; none for what is as it was"
    files = sorted(images.glob('*/*.jpg'))
    def fn(i): return {'jpg':PILImage.create(files[i]), 'raw':np.asarray(Image.open(files[0])),
                       'png':Image.new('L', (3,3)), 'a.jpg':np.zeros((4,4,3), np.uint8)}
    _,report = in_memory(list(range(10)), fn)
    assert "10 opened images were re-encoded as JPEG, quality 90, which changes pixels (field 'jpg'); give bytes to " \
        "keep them as they are" in repr(report) and "10 arrays of pixels were re-encoded as JPEG" in repr(report)
    assert [*report.notes.values()]==[10,10]
    assert "1 opened image was" in repr(in_memory([1], lambda i: {'jpg':PILImage.create(files[0])})[1])
    for shrunk in None,shrink(20): assert in_memory(image_samples(images), shrunk)[1].notes=={}

def test_profile_and_exif_of_encoded_images():
    im = opened(encoded(photo(), 'JPEG', icc_profile=SRGB, exif=exif(6)))
    store,_ = in_memory([1], lambda i: {f:im for f in ('jpg','png','webp')})
    for field in store.fields:
        found = kept(store, 0, field)
        assert found.info['icc_profile']==SRGB and found.getexif()[ORIENTATION]==6
        assert found.getexif()[DESCRIPTION]=='a description'
    im = opened(encoded(photo(), exif=exif(6, 'x'*70_000)))   # more than a JPEG takes
    assert kept(in_memory([1], lambda i: {'jpg':im})[0], 0, 'jpg').getexif()[ORIENTATION]==6

# --- names of classes

class Codes(Dataset):
    def __init__(self, *classes, **attributes):
        if classes: self.classes = list(classes)
        self.__dict__.update(attributes)
    def __len__(self): return 12
    def __getitem__(self, i): return np.full(3, i),i%2

def test_splits_whose_names_differ_are_not_mixed_up():
    a,b = Codes('cat', 'dog'),Codes('dog', 'emu')
    with pytest.raises(ValueError, match=r'(?s)cat.*emu.*vocab='): in_memory({'train':a, 'valid':b})
    for first,vocab in (b,['first','second']), (Codes('cat', 'dog', 'emu'),None), (Subset(a, range(12)),None):
        store,_ = in_memory({'train':first, 'valid':Subset(a, range(12))}, vocab=vocab)
        assert column(store, 'cls')==(vocab or ['cat','dog'])*12

def test_names_that_are_dropped_are_reported():
    _,report = in_memory(Codes())
    assert 'names no classes' in repr(report) and 'vocab=' in repr(report)
    assert 'names no classes' not in repr(in_memory(Codes(), vocab=['a','b'])[1])
    store,report = in_memory(Codes('a', 'b', 'c', target_transform=lambda y: y+1))
    assert store.vocab!=['a','b','c'] and 'target_transform' in repr(report)

def test_names_of_other_kinds():
    assert in_memory(Codes(('tench','Tinca tinca'), ('emu',)))[0].vocab==['tench, Tinca tinca','emu']
    assert in_memory(Codes(class_to_idx={'dog':1, 'cat':0}))[0].vocab==['cat','dog']
