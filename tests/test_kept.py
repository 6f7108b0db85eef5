"Pictures keep on the way in what they had: pixels, transparency, 16 bits, colour profile, orientation; what they lose is said"
import io
from itertools import count

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, ImageOps

from fastai.vision.core import PILImage
from fastai_remote import IngestError, RedisStore, ShardStore, image_samples, redis_server, shrink, to_redis, to_shards

@pytest.fixture(scope='module')
def server():
    with redis_server() as s: yield s

_names = count()

@pytest.fixture(params=['redis','shards'])
def put(request, server, tmp_path):
    "Write to Redis or to shards: the store and the report"
    def put(src, fn=None, name=None, **kw):
        name,kw = name or f'd{next(_names)}',{'num_workers':1, 'progress':False, 'shuffle':False, **kw}
        if request.param=='redis': return (rep:=to_redis(src, server.url, name, fn, **kw)) and RedisStore(server.url, name),rep
        return (rep:=to_shards(src, tmp_path/name, fn, **kw)) and ShardStore(tmp_path/name),rep
    return put

SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile('sRGB')).tobytes()

def photo(w=60, h=40, seed=0):
    "A smooth picture, all four corners of which differ"
    y,x = np.mgrid[:h,:w]
    return Image.fromarray(np.stack([x*255//w, y*255//h, (x+y+seed)%256], -1).astype(np.uint8))

def encoded(im, fmt='JPEG', **kw):
    im.save(b:=io.BytesIO(), fmt, **kw)
    return b.getvalue()

def turned(k, fmt='JPEG', **kw):
    "A file with EXIF orientation `k`, and more EXIF besides"
    e = Image.Exif()
    e[0x0112],e[0x010e] = k,'a description'
    return encoded(photo(), fmt, exif=e.tobytes(), **kw)

def opened(b): return Image.open(io.BytesIO(b))
def upright(im): return np.asarray(ImageOps.exif_transpose(im).convert('RGB').resize((16,16), Image.Resampling.BILINEAR)).astype(int)
def alike(a, b): return ImageOps.exif_transpose(a).size==ImageOps.exif_transpose(b).size and np.abs(upright(a)-upright(b)).mean()<8
def kept(s, i, f): return opened(s.get_many([i], f)[f][0])

# --- shrink

@pytest.mark.parametrize('k', range(1,9))
@pytest.mark.parametrize('fmt', ['JPEG','PNG','WEBP'])
@pytest.mark.parametrize('codec', ['jpg','png','webp'])
@pytest.mark.parametrize('size', [20,100])
def test_shrink_keeps_the_orientation(k, fmt, codec, size):
    "The pixels stay as they lie, as stock fastai shows them, and the tag says how to turn them"
    b = turned(k, fmt)
    for v in (b, opened(b)):
        res = opened(shrink(size, codec=codec)({'img':v} if codec=='png' else {'jpg' if fmt=='JPEG' else fmt.lower():v})[codec])
        w,h = ((30,20) if size==20 else (60,40))
        assert res.size==(w,h) and res.getexif().get(0x0112, 1)==k
        want = opened(b).resize((w,h), Image.Resampling.BILINEAR)
        assert np.abs(np.asarray(PILImage.create(encoded(res.convert('RGB'), 'PNG'))).astype(int)-np.asarray(want.convert('RGB'))).mean()<6
        assert ImageOps.exif_transpose(res).size==ImageOps.exif_transpose(opened(b).resize((w,h))).size or k<5
        assert ImageOps.exif_transpose(res).size==((h,w) if k>=5 else (w,h))
        assert np.abs(upright(res)-upright(opened(b))).mean()<8

@pytest.mark.parametrize('codec', ['raw','bits'])
def test_pixels_alone_cannot_keep_an_orientation(put, codec):
    "A failed sample that says what to do, and none for those that are upright"
    kw = dict(codec=codec, resample=Image.Resampling.NEAREST)
    white = encoded(Image.new('L', (60,40), 255), 'PNG')
    e = Image.Exif(); e[0x0112] = 6
    bad = encoded(Image.new('L', (60,40), 255), 'PNG', exif=e.tobytes())
    s,rep = put([{'png':white}]*3+[{'png':bad}], shrink(20, **kw))
    assert (rep.written,rep.failed)==(3,1) and 'orientation 6' in rep.failures[0][1] and 'exif_transpose' in rep.failures[0][1]

def test_resize_keeps_the_orientation(put):
    s,_ = put([{'jpg':turned(k)} for k in range(1,9)])
    path = dict(name=f'd{next(_names)}') if isinstance(s, RedisStore) else dict(url=str(s.storage.url)+'-small')
    s.resize(20, num_workers=1, progress=False, **path)
    small = RedisStore(s.link.url, path['name']) if isinstance(s, RedisStore) else ShardStore(path['url'])
    for i in range(8):
        im = kept(small, i, 'jpg')
        assert im.size==(30,20) and im.getexif().get(0x0112, 1)==i+1 and np.abs(upright(im)-upright(kept(s, i, 'jpg'))).mean()<8

@pytest.mark.parametrize('codec', ['jpg','png','webp'])
def test_shrink_keeps_the_colour_profile(codec):
    for fmt in ('JPEG','PNG'): assert opened(shrink(20, codec=codec)({'img':encoded(photo(), fmt, icc_profile=SRGB)})[codec]).info['icc_profile']==SRGB
    cmyk = bytearray(SRGB); cmyk[16:20] = b'CMYK'
    res = opened(shrink(20, codec=codec)({'img':encoded(photo().convert('CMYK'), 'JPEG', icc_profile=bytes(cmyk))})[codec])
    assert 'icc_profile' not in res.info and res.mode=='RGB' and np.abs(np.asarray(res).astype(int)-np.asarray(photo().resize((30,20), Image.Resampling.BILINEAR))).mean()<8

def clear(mode):
    "A picture through which one can see in places"
    a = np.asarray(photo())
    im = Image.fromarray(np.dstack([a, np.where(a[...,0]>128, 255, 60).astype(np.uint8)]))
    if mode=='P':
        im = photo().quantize(16)
        im.info['transparency'] = 3
        return opened(encoded(im, 'PNG', transparency=3))
    return im.convert(mode)

@pytest.mark.parametrize('mode', ['RGBA','LA','P'])
def test_shrink_tells_of_lost_transparency(put, mode):
    "As JPEG: the colours are those that fastai shows, and the report counts them; PNG and WebP keep it"
    b = encoded(clear(mode), 'PNG')
    s,rep = put([{'png':encoded(photo(), 'PNG')}]*3+[{'png':b}]*2, shrink(20))
    assert rep.failed==0 and "2 images lost their transparency (field 'jpg')" in repr(rep) and 'lost their transparency' in rep._repr_html_()
    assert np.abs(np.asarray(kept(s, 4, 'jpg').convert('RGB')).astype(int)-np.asarray(opened(b).convert('RGB').resize((30,20), Image.Resampling.BILINEAR))).mean()<6
    for c in ('png','webp'):
        s,rep = put([{'png':b}], shrink(20, codec=c))
        assert rep.failed==0 and 'lost' not in repr(rep) and kept(s, 0, c).convert('RGBA').getchannel('A').getextrema()[0]<255

def test_shrink_of_sixteen_bits(put):
    a = Image.fromarray((np.arange(60*40).reshape(40,60)*20).astype(np.uint16))
    for c,ok in (('jpg',0),('webp',0),('raw',0),('png',1)):
        s,rep = put([{'png':encoded(photo(), 'PNG')},{'png':encoded(a, 'PNG')}], shrink(40, codec=c))
        assert rep.failed==1-ok and (ok or '8 bits' in rep.failures[0][1])
        if ok: assert np.array_equal(np.asarray(kept(s, 1, 'png')), np.asarray(a))

def test_notes_survive_an_interruption(put):
    b,left = encoded(clear('RGBA'), 'PNG'),[60]
    small = shrink(20)
    def fn(o):
        left[0] -= 1
        if left[0]==0: raise KeyboardInterrupt
        return small(o)
    src = [{'png':b}]*100
    with pytest.raises(KeyboardInterrupt): put(src, fn, chunk=8, name='same')
    s,rep = put(src, fn, chunk=8, name='same')
    assert rep.resumed>0 and '100 images lost their transparency' in repr(rep)

def test_shrink_leaves_the_image_it_is_given(put):
    b = encoded(photo(480, 320))
    def fn(_):
        im = opened(b)
        return shrink(20, fields=['jpg'])({'jpg':im, 'png':im})
    s,_ = put([1,2], fn)
    assert kept(s, 0, 'jpg').size==(30,20) and np.array_equal(np.asarray(kept(s, 0, 'png')), np.asarray(opened(b)))

# --- opened images

@pytest.mark.parametrize('k', [1,6])
@pytest.mark.parametrize('fmt, field', [('JPEG','jpg'),('PNG','png'),('JPEG','img'),('WEBP','webp'),('GIF','img'),('TIFF','img')])
def test_opened_file_is_stored_as_it_is(put, tmp_path, k, fmt, field):
    "Where the file is still there, and has the very same picture"
    p = tmp_path/f'a.{field}'
    p.write_bytes(turned(k, fmt) if fmt not in ('GIF','TIFF') else encoded(photo().quantize(16) if fmt=='GIF' else photo(), fmt))
    s,rep = put([1,2,3], lambda _: {field:Image.open(p)})
    assert s.get_many([0], field)[field][0]==p.read_bytes() and 're-encoded' not in repr(rep)

def change(im): im.putpixel((0,0), (1,2,3)); return im
def exif(im): im.getexif()[0x0112] = 8; return im

@pytest.mark.parametrize('what', [change, lambda im: im.convert('L'), lambda im: im.rotate(90), lambda im: im.resize((9,9)), exif, lambda im: Image.Image.copy(im)], ids=['pixel','grey','rotated','resized','exif','copied'])
def test_changed_image_is_not_taken_for_its_file(put, tmp_path, what):
    (p:=tmp_path/'a.jpg').write_bytes(turned(6))
    want = what(Image.open(p))
    s,rep = put([1,2,3], lambda _: {'jpg':what(Image.open(p)), 'png':what(Image.open(p))})
    assert s.get_many([0], 'jpg')['jpg'][0]!=p.read_bytes()
    assert "3 opened images were re-encoded as JPEG, quality 90" in repr(rep) and "(field 'jpg'); give bytes" in repr(rep)
    for f in ('jpg','png'):
        im = kept(s, 0, f)
        assert im.size==want.size and im.mode==want.mode and im.getexif().get(0x0112)==want.getexif().get(0x0112) and im.getexif().get(0x010e)==want.getexif().get(0x010e)
    assert np.array_equal(np.asarray(kept(s, 0, 'png')), np.asarray(want))

def test_file_that_is_gone_or_another_is_encoded(put, tmp_path):
    def fn(i):
        (p:=tmp_path/f'{i}.jpg').write_bytes(encoded(photo(seed=i)))
        im = Image.open(p); im.load()
        if i==0: p.unlink()
        if i==1: p.write_bytes(encoded(photo(seed=99)))
        if i==2: p.write_bytes(b'no jpeg')
        return {'png':im}
    s,rep = put([0,1,2], fn)
    for i in range(3): assert np.array_equal(np.asarray(kept(s, i, 'png')), np.asarray(opened(encoded(photo(seed=i)))))
    assert "3 opened images were re-encoded as PNG" in repr(rep)

def test_report_counts_what_was_encoded_again(put, images):
    "One line a field and reason; none for what is as it was"
    files = sorted(images.glob('*/*.jpg'))
    s,rep = put(list(range(10)), lambda i: {'jpg':PILImage.create(files[i]), 'raw':np.asarray(Image.open(files[0])), 'png':Image.new('L', (3,3)), 'a.jpg':np.zeros((4,4,3), np.uint8)})
    r = repr(rep)
    assert "10 opened images were re-encoded as JPEG, quality 90, which changes pixels (field 'jpg'); give bytes to keep them as they are" in r and "10 arrays of pixels were re-encoded as JPEG" in r
    assert len(rep.notes)==2 and rep.notes and all(n==10 for n in rep.notes.values())
    assert "1 opened image was" in repr(put([1], lambda i: {'jpg':PILImage.create(files[0])})[1])
    assert put(image_samples(images))[1].notes=={} and put(image_samples(images), shrink(20))[1].notes=={}

@pytest.mark.parametrize('mode', ['RGBA','LA','P'])
def test_transparent_picture_is_no_jpeg(put, mode):
    "And none of raw pixels; PNG and WebP keep it, and opaque ones fit"
    im,solid = clear(mode),photo().convert('RGBA')
    for f in ('jpg','raw'):
        s,rep = put([1,2,3,4], lambda i: {f:im if i==3 else solid})
        assert rep.failed==1 and 'transparency' in rep.failures[0][1] and 'png' in rep.failures[0][1]
    for f in ('png','webp','img'):
        s,rep = put([1,2], lambda i: {f:im})
        assert rep.failed==0 and np.array_equal(np.asarray(kept(s, 0, f).convert('RGBA')), np.asarray(im.convert('RGBA')))

@pytest.mark.parametrize('field', ['jpg','webp','raw'])
def test_sixteen_bits_are_not_cut(put, field):
    for a in (np.array([[300,2]], np.uint16), np.array([[300,2]], np.int32), np.array([[.5,2]], np.float32)):
        s,rep = put([1,2,3], lambda i: {field:Image.fromarray(a) if i==2 else photo()})
        assert rep.failed==1 and '8 bits' in rep.failures[0][1]

def test_sixteen_bits_as_png(put):
    a = np.array([[300,65535,0]])
    s,rep = put([a.astype(np.uint16), a.astype(np.int32), a+1, -a], lambda a: {'png':Image.fromarray(a.astype(np.int32) if a.dtype==np.int64 else a)})
    assert rep.failed==2 and all('16 bits' in w for _,w in rep.failures)
    assert [np.asarray(kept(s, i, 'png')).tolist() for i in range(2)]==[a.tolist()]*2

def test_profile_and_exif_of_encoded_images(put):
    im = opened(encoded(photo(), 'JPEG', icc_profile=SRGB, exif=opened(turned(6)).getexif()))
    s,_ = put([1], lambda i: {f:im for f in ('jpg','png','webp')})
    for f in ('jpg','png','webp'): assert kept(s, 0, f).info['icc_profile']==SRGB and kept(s, 0, f).getexif()[0x0112]==6 and kept(s, 0, f).getexif()[0x010e]=='a description'

def test_exif_longer_than_a_jpeg_takes(put):
    e = Image.Exif(); e[0x0112],e[0x010e] = 6,'x'*70_000
    im = opened(encoded(photo(), 'PNG', exif=e.tobytes()))
    s,rep = put([1], lambda i: {'jpg':im})
    assert kept(s, 0, 'jpg').getexif()[0x0112]==6

def test_picture_in_raw_with_orientation(put):
    s,rep = put([1,2,3], lambda i: {'raw':opened(turned(3 if i==2 else 1))})
    assert rep.failed==1 and 'orientation 3' in rep.failures[0][1]

# --- names of classes

tv = pytest.importorskip('torchvision.datasets')

@pytest.fixture(scope='module')
def folder(images): return tv.ImageFolder(images, transform=lambda im: im.resize((8,8)))

def labels(s): return [s[i]['cls'] for i in range(len(s))]

def test_names_of_classes_through_subsets(put, folder):
    names = folder.classes
    for ds in (folder, torch.utils.data.Subset(folder, range(20, 50)), torch.utils.data.random_split(folder, [50,10], torch.Generator().manual_seed(0))[0],
        torch.utils.data.Subset(torch.utils.data.Subset(folder, range(0, 60, 2)), range(10,30)), torch.utils.data.ConcatDataset([folder,torch.utils.data.Subset(folder, range(5))])):
        s,rep = put(ds)
        assert s.vocab==names and labels(s)==[names[ds[i][1]] for i in range(len(ds))]
    a,b = torch.utils.data.random_split(folder, [50,10])
    s,_ = put({'train':a, 'valid':b})
    assert s.vocab==names and labels(s)==[names[d[i][1]] for d in (a,b) for i in range(len(d))]

class Codes(torch.utils.data.Dataset):
    def __init__(self, classes=None, n=12, **kw):
        self.n = n
        if classes: self.classes = classes
        self.__dict__.update(kw)
    def __len__(self): return self.n
    def __getitem__(self, i): return np.full(3, i),i%2

def test_names_that_differ_are_not_mixed_up(put):
    "Two datasets whose codes mean different things: an error for splits, and for a concatenation"
    a,b = Codes(['cat','dog']),Codes(['dog','emu'])
    with pytest.raises(ValueError, match=r"(?s)cat.*emu.*vocab="): put({'train':a, 'valid':b})
    assert put({'train':a, 'valid':b}, vocab=['cat','dog'])[0].vocab==['cat','dog']
    assert labels(put({'train':Codes(['cat','dog','emu']), 'valid':a})[0])==['cat','dog']*12
    both = torch.utils.data.ConcatDataset([a,b])
    with pytest.raises(ValueError, match=r"2 datasets with different classes.*cat.*emu.*vocab="): put(both)
    assert set(labels(put(both, vocab=['first','second'])[0]))=={'first','second'}
    nested = torch.utils.data.ConcatDataset([torch.utils.data.Subset(torch.utils.data.ConcatDataset([a,a]), range(20)),a])
    assert put(nested)[0].vocab==['cat','dog']

def test_names_that_are_dropped_are_reported(put):
    s,rep = put(Codes())
    assert 'names no classes' in repr(rep) and 'vocab=' in repr(rep)
    assert 'names no classes' not in repr(put(Codes(), vocab=['a','b'])[1])
    s,rep = put(Codes(['a','b','c'], target_transform=lambda y: y+1))
    assert s.vocab!=['a','b','c'] and 'target_transform' in repr(rep)

def test_names_of_other_kinds(put):
    assert put(Codes([('tench','Tinca tinca'),('emu',)]))[0].vocab==['tench, Tinca tinca','emu']
    assert put(Codes(class_to_idx={'dog':1, 'cat':0}))[0].vocab==['cat','dog']
    assert put(Codes(np.array(['a','b']).tolist()))[0].vocab==['a','b']
