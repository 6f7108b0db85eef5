"""`fn` gets images as `store[i]` has them: images of Pillow, decoded when needed, stored unchanged if not touched

In `datasets.Dataset.map`, an image is one of Pillow, too."""
import io, itertools

import datasets
import numpy as np
import pandas as pd
import pytest
from conftest import draw
from fastai.vision.core import PILImage
from inputs import encoded, write_tar
from PIL import Image, ImageOps

from fastai_remote.codec.fields import get_codec
from fastai_remote import image_samples, ShardStore, shrink, table_samples, tar_samples, to_shards

FORMATS = {'jpg':'JPEG', 'png':'PNG', 'webp':'WEBP', 'img':'GIF'}

def source_of(route, images, folder):
    "A source of image files, `{name: bytes}`"
    if route=='tar': return tar_samples([write_tar(folder/'a.tar', list(images.items()))])
    if route in ('hf','hf_stream'):
        rows = {'image':[{'bytes':content, 'path':None} for content in images.values()]}
        dataset = datasets.Dataset.from_dict(rows).cast_column('image', datasets.Image())
        return dataset if route=='hf' else dataset.to_iterable_dataset()
    (folder/'f').mkdir()
    names = [name.replace('.img', '.gif') for name in images]
    for name,content in zip(names, images.values()): (folder/'f'/name).write_bytes(content)
    if route=='files': return image_samples(folder/'f')
    table = pd.DataFrame({'name':names, 'label':'a'})
    table.to_csv(folder/'t.csv', index=False)
    return table_samples(table if route=='pandas' else folder/'t.csv', 'name', 'label', folder=folder/'f')

@pytest.fixture(params=['files','tar','store','added'])
def with_fn(request, tmp_path):
    "A function that gives image files, `{name: bytes}`, to `fn`, and returns the store of what it returns"
    def written(images, fn):
        options = dict(num_workers=0, progress=False)
        if request.param not in ('store','added'):
            source = source_of(request.param, images, tmp_path)
            return to_shards(source, tmp_path/'d', fn=fn, shuffle=False, **options).store
        samples = [{name.split('.')[1]:content} for name,content in images.items()]
        store = to_shards(samples, tmp_path/'s', shuffle=False, **options).store
        if request.param=='added':
            return store.add_fields(lambda sample: {f'new.{f}':v for f,v in fn(sample).items()}, **options)
        store.map(fn, tmp_path/'d', **options)
        return ShardStore(tmp_path/'d')
    return written

def values(store, field):
    if f'new.{field}' in store.fields: field = f'new.{field}'
    return [bytes(b) for b in store.get_many(range(len(store)), field, check=True)[field]]

def files(field, n=3, **options):
    return {f'{k}.{field}':encoded(draw(k), FORMATS[field], **options) for k in range(n)}

def look(sample):
    image, = [v for v in sample.values() if isinstance(v, Image.Image)]
    assert image.size[0]==image.width and image.mode
    return {'size.json':list(image.size), **{f:v for f,v in sample.items() if f[:2]!='__'}}

def decode(sample):
    image, = [v for v in sample.values() if isinstance(v, Image.Image)]
    return {**{f:v for f,v in sample.items() if f[:2]!='__'}, 'sum.i8':int(np.array(image.convert('L')).sum()),
            'fastai.json':list(PILImage.create(image).size)}

@pytest.mark.parametrize('with_fn,field,fn', [*((place, 'jpg', look) for place in ('files','tar','store','added')),
    ('files','png',decode), ('tar','img',decode), ('store','png',decode), ('added','webp',look), ('csv','png',look),
    ('pandas','png',decode), ('hf','png',decode), ('hf_stream','png',look)], indirect=['with_fn'])
def test_an_image_that_was_not_changed_is_stored_as_the_file_that_it_was(with_fn, field, fn):
    images = files(field)
    assert values(with_fn(images, fn), field)==list(images.values())

changes = {
    'a new image': lambda image: ImageOps.mirror(image),
    'pixels set in place': lambda image: (image.putpixel((0,0), (255,0,0)), image)[1],
    'pixels drawn in place': lambda image: (image.paste((9,9,9), (0,0,9,9)), image)[1],
    'a thumbnail in place': lambda image: (image.thumbnail((20,20)), image)[1],
    'a draft': lambda image: (image.draft('L', (20,20)), image.resize((9,9)))[1]}

def test_an_image_that_was_changed_is_stored_changed():
    codec,content = get_codec('png'),encoded(draw(0))
    for name,change in changes.items():
        stored = codec.to_bytes(change(codec.opened(content)))
        expected = change(Image.open(io.BytesIO(content)))
        assert np.array_equal(np.array(Image.open(io.BytesIO(stored))), np.array(expected)), name

def test_fn_may_change_an_image_in_place_or_give_another_one(with_fn):
    "The first one gets another orientation, the second one other pixels, and the third one becomes a smaller file"
    sizes = (90,70),(80,70),(70,70)
    options = dict(quality=95, exif=Image.Exif().tobytes())
    images = {f'{k}.jpg':encoded(draw(k).resize(size), 'JPEG', **options) for k,size in enumerate(sizes)}
    def fn(sample):
        if sample['jpg'].width==90: sample['jpg'].getexif()[274] = 6
        elif sample['jpg'].width==80: sample['jpg'].paste((255,0,0), (0,0,80,70))
        else: return {'jpg':shrink(32)(sample)['jpg']}
        return {'jpg':sample['jpg']}
    turned,red,small = values(with_fn(images, fn), 'jpg')
    assert Image.open(io.BytesIO(turned)).getexif().get(274)==6
    assert np.array(Image.open(io.BytesIO(red)))[0,0].tolist()==[254,0,0]
    assert small==bytes(shrink(32)({'jpg':images['2.jpg']})['jpg'])

def test_a_file_that_is_cut_off_fails_its_sample(tmp_path):
    (tmp_path/'f').mkdir()
    for name,content in files('jpg', 30).items():
        (tmp_path/'f'/name).write_bytes(content[:-300] if name=='7.jpg' else content)
    report = to_shards(image_samples(tmp_path/'f'), tmp_path/'d', fn=look, num_workers=0, progress=False)
    assert len(ShardStore(tmp_path/'d'))==29 and len(report.failures)==1 and '7.jpg' in report.failures[0][0]

@pytest.mark.parametrize('content', [b'', b'no image', encoded(draw(0), 'PNG')[:30]])
def test_what_is_no_image_says_so_when_it_is_used(tmp_path, content):
    tar = write_tar(tmp_path/'a.tar', [('0.png',content), *((f'{k}.png',encoded(draw(k))) for k in range(1, 30))])
    options = dict(num_workers=0, progress=False)
    used = to_shards(tar_samples([tar]), tmp_path/'a', fn=lambda o: {'png':o['png'].convert('L')}, **options)
    kept = to_shards(tar_samples([tar]), tmp_path/'b', fn=lambda o: {'png':o['png']}, **options)
    for report in used,kept:
        (_,reason), = report.failures
        assert 'not an image, or only its first bytes' in reason or 'truncated' in reason.lower()
    renamed = to_shards(tar_samples([tar]), tmp_path/'c', fn=lambda o: {'img.bin':o['png']}, max_failed=29, **options)
    assert renamed.written==1 and all('got' in reason or 'bytes' in reason for _,reason in renamed.failures)

@pytest.mark.parametrize('field', ['jpg','png'])
def test_what_is_not_looked_at_is_not_decoded(field):
    codec = get_codec(field)
    image = codec.opened(encoded(draw(0), FORMATS[field]))
    assert codec.file_of(image) is image.encoded and image.tile   # still to be decoded
    assert codec.to_bytes(image)==image.encoded and image.tile
    image.putpixel((0,0), (1,2,3))
    assert codec.file_of(image) is None and codec.to_bytes(image)!=image.encoded

def test_a_palette_that_was_changed_is_stored_changed():
    codec,image = get_codec('png'),draw(0).convert('P', palette=Image.Palette.ADAPTIVE)
    opened = codec.opened(encoded(image))
    opened.putpalette([*range(255, -1, -1)]*3)
    assert Image.open(io.BytesIO(codec.to_bytes(opened))).getpalette()==opened.getpalette()!=image.getpalette()

@pytest.mark.parametrize('opens', [False,True])
def test_a_source_of_ones_own_says_whether_fn_gets_images(tmp_path, opens):
    from fastai_remote.source.base import IndexedSource
    class Pictures(IndexedSource):
        opens_images = opens
        def __len__(self): return 3
        def read(self, numbers): return [(f'{i}', i) for i in numbers.tolist()]
        def load(self, i): return {'png':encoded(draw(i))}
        def fingerprint(self): return 'pictures'
    seen = []
    def fn(sample):
        seen.append(type(sample['png']))
        return sample
    to_shards(Pictures(), tmp_path/'d', fn=fn, num_workers=0, shuffle=False, progress=False)
    assert all(issubclass(kind, Image.Image if opens else bytes) for kind in seen)
    assert values(ShardStore(tmp_path/'d'), 'png')==[encoded(draw(i)) for i in range(3)]

def test_pixels_that_were_put_into_an_image_are_stored():
    codec,other = get_codec('png'),draw(1)
    image = codec.opened(encoded(draw(0).resize(other.size)))
    image.im = other.im
    assert codec.file_of(image) is None
    assert np.array_equal(np.array(Image.open(io.BytesIO(codec.to_bytes(image)))), np.array(other))

# --- photographs of phones, which have an EXIF orientation, are shrunk to pixels: upright, if the user says so

def photograph(orientation, size=(40,24), fmt='PNG'):
    "The file of a picture that a phone held in another way, whose pixels all differ"
    im = Image.fromarray(np.arange(size[0]*size[1]*3, dtype=np.uint16).reshape(size[1], size[0], 3).astype(np.uint8))
    exif = Image.Exif()
    exif[0x112] = orientation
    return encoded(im, fmt, exif=exif)

@pytest.mark.parametrize('orientation', range(2, 9))
def test_turned_pixels_are_those_of_exif_transpose(orientation):
    b = photograph(orientation)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(b)))
    for size,codec in itertools.product((24,100), ('raw','png')):
        sample = shrink(size, codec=codec, turn=True)({'img':b})
        shown = get_codec(codec).unpack(bytes(sample[codec]))
        assert np.array_equal(np.asarray(shown), np.asarray(upright)) and 0x112 not in shown.getexif()

def test_smaller_ones_are_upright_too():
    b = photograph(6, (400,240), 'JPEG')
    for codec,image in itertools.product(('raw','jpg'), (b, Image.open(io.BytesIO(b)))):
        sample = shrink(48, codec=codec, turn=True)({'img':image})
        assert get_codec(codec).unpack(bytes(sample[codec])).size==(48,80)

