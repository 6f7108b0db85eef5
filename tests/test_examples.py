"What some modules do, in short: names and kinds of values, samples without names"
import numpy as np
import pytest
from PIL import Image

from fastai_remote.codec.fields import get_codec, infer_codec
from fastai_remote.codec.numbers import StrokeSequence
from fastai_remote.codec.stats import has_stats
from fastai_remote.source.base import as_sample
from fastai_remote.source.columns import file_format
from fastai_remote.source.datasets import as_source

def test_a_name_says_the_codec_and_so_does_a_value_without_one():
    names = 'jpg','mask.png','PNG','age.f4','pixels.raw','mask.bits'
    assert [get_codec(name).name for name in names]==['jpg','png','png','f4','raw','bits']
    values = Image.new('L', (4,4)),b'','a',['a','b'],np.zeros(3),3,np.float32(2),{'k':1},[1.,2.]
    assert [infer_codec('x', o) for o in values]==['png','bin','txt','labels','npy','i8','f8','json','json']
    files = (b'\xff\xd8\xff\xe0',), (b'RIFF\0\0\0\0WAVEfmt ',), (b'','a/b.MP3'), (b'no file','a/b.bmp')
    assert [file_format(*file) for file in files]==['jpg','wav','mp3',None]

def test_times_of_points_are_seconds():
    points = np.array([[10,0,0,0], [20,0,16,0], [20,5,40,1]], np.float32)
    found = StrokeSequence(3, time=True).of_points(points)
    np.testing.assert_allclose(found, [[10,0,0,0], [10,0,.016,0], [0,5,.024,1]], rtol=1e-5)

def test_of_many_images_some_are_counted():
    assert [sum(map(has_stats, range(n))) for n in (128,256,1024,50_000)]==[128,192,320,674]

def test_items_without_names_are_fields_by_their_types():
    im = Image.new('RGB', (4,3))
    assert as_sample((im, 3))=={'png':im, 'cls':3}
    assert as_sample((b'x', ['a','b'], 1.5))=={'bin':b'x', 'labels':['a','b'], 'target.f4':1.5}
    with pytest.raises(TypeError, match=r'two values of one kind \(Image, Image\)'): as_sample((im, im))

def test_splits_of_a_stream_and_a_list():
    parts = as_source({'train':(i*i for i in range(5)), 'valid':[7]}).stream(4)
    assert [(part.split,list(part)) for part in parts]==[
        ('train',[(f'train: item {i}',('train',i*i)) for i in range(4)]),
        ('train',[('train: item 4',('train',16))]), ('valid',[('valid: item 0',('valid',7))])]
    with pytest.raises(TypeError, match='object: can be neither indexed nor gone through'): as_source(object())
