"What each module of `codec` does, in short: examples that were tried first"
import PIL.Image as Image
import numpy as np
from fastcore.test import test_close, test_eq
from fastai_remote.codec.fields import get_codec, infer_codec
from fastai_remote.codec.sequences import StrokeSequence
from fastai_remote.codec.stats import has_stats

def test_a_name_says_the_codec_and_so_does_a_value_without_one():
    names = 'jpg','mask.png','PNG','age.f4','pixels.raw','mask.bits'
    test_eq([get_codec(o).name for o in names], ['jpg','png','png','f4','raw','bits'])
    values = Image.new('L', (4,4)),b'','a',['a','b'],np.zeros(3),3,np.float32(2),{'k':1},[1.,2.]
    test_eq([infer_codec('x', o) for o in values], ['png','bin','txt','labels','npy','i8','f8','json','json'])

def test_times_of_points_are_seconds():
    points = np.array([[10,0,0,0], [20,0,16,0], [20,5,40,1]], np.float32)
    test_close(StrokeSequence(3, time=True).of_points(points), [[10,0,0,0], [10,0,.016,0], [0,5,.024,1]])

def test_of_many_images_some_are_counted():
    test_eq([sum(map(has_stats, range(n))) for n in (128,256,1024,50_000)], [128,192,320,674])
