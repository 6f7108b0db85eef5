"What each module of `source` does, in short: examples that were tried first"
import PIL.Image as Image
from datetime import date
from decimal import Decimal
from fastcore.test import expect_fail, test_eq
from fastai_remote.source.base import as_sample
from fastai_remote.source.columns import Column, file_format, LoadRow
from fastai_remote.source.datasets import as_source

def test_items_without_names_are_fields_by_their_types():
    im = Image.new('RGB', (4,3))
    test_eq(as_sample((im, 3)), {'png':im, 'cls':3})
    test_eq(as_sample((b'x', ['a','b'], 1.5)), {'bin':b'x', 'labels':['a','b'], 'target.f4':1.5})
    with expect_fail(TypeError, contains='two values of one kind (Image, Image)'): as_sample((im, im))

def test_first_bytes_and_types_of_columns():
    files = (b'\xff\xd8\xff\xe0',), (b'RIFF\0\0\0\0WAVEfmt ',), (b'','a/b.MP3'), (b'no file','a/b.bmp')
    test_eq([file_format(*file) for file in files], ['jpg','wav','mp3',None])
    row = {'age':7, 'price':Decimal('1.10'), 'when':date(2026, 1, 2)}
    columns = Column('age', 'age.u1', 'number', 'uint8'),Column('price', 'price', 'text'),Column('when', 'when', 'time')
    test_eq(LoadRow(columns)(row), {'age.u1':7, 'price':'1.10', 'when':'2026-01-02'})

def test_splits_of_a_stream_and_a_list():
    src = as_source({'train':(i*i for i in range(5)), 'valid':[7]})
    test_eq([(p.split,list(p)) for p in src.stream(4)],
            [('train',[(f'train: item {i}',('train',i*i)) for i in range(4)]),
             ('train',[('train: item 4',('train',16))]), ('valid',[('valid: item 0',('valid',7))])])
    with expect_fail(TypeError, contains='object: can be neither indexed nor gone through'): as_source(object())
