"What each module of `source` does, in short: examples that were tried first"
import tempfile
import PIL.Image as Image
import numpy as np
import pandas as pd
import tempfile as tmp
from datetime import date
from decimal import Decimal
from fastcore.test import expect_fail, test_eq
from functools import partial
from pathlib import Path
from torch.utils.data import ConcatDataset, Subset
from fastai_remote.ingest.stores import MemoryStore
from fastai_remote.source.arrays import array_samples
from fastai_remote.source.base import as_sample, fn_fingerprint
from fastai_remote.source.columns import Column, ColumnOptions, ColumnType, file_format, image_format, LoadRow
from fastai_remote.source.columns import TablePlan
from fastai_remote.source.datasets import as_source
from fastai_remote.source.torch_items import class_names, DatasetSource, flat_items, opened_files, original_file

def test_source_arrays():
    folder = Path(tempfile.mkdtemp())
    images,labels = np.arange(60, dtype=np.uint8).reshape(5, 3, 4),np.array(['b','a','b','a','b'])
    np.save(folder/'images.npy', images)
    src = array_samples({'npy':np.load(folder/'images.npy', mmap_mode='r'), 'cls':labels})
    (name,raw), = src.read(np.array([3]))
    test_eq((name, raw['cls'], raw['npy']), ('row 3', 'a', images[3]))
    with expect_fail(ValueError, contains='arrays of different lengths: npy 5, cls 4'):
        array_samples({'npy':images, 'cls':labels[:4]})

def test_source_base():
    im = Image.new('RGB', (4,3))
    test_eq(as_sample((im, 3)), {'png':im, 'cls':3})
    test_eq(as_sample((b'x', ['a','b'], 1.5)), {'bin':b'x', 'labels':['a','b'], 'target.f4':1.5})
    with expect_fail(TypeError, contains='two values of one kind (Image, Image)'): as_sample((im, im))
    class Times:
        def __init__(self, k): self.k = k
        def __call__(self, o): return o*self.k
    def f(o): return o+1
    def g(o): return o+2
    test_eq(fn_fingerprint(f), fn_fingerprint(f))
    assert fn_fingerprint(f).split()[1:]!=fn_fingerprint(g).split()[1:]
    assert fn_fingerprint(Times(2))!=fn_fingerprint(Times(3))
    assert fn_fingerprint(partial(f, k=2))!=fn_fingerprint(partial(f, k=3))

def test_source_columns():
    test_eq(file_format(b'\xff\xd8\xff\xe0'), 'jpg')
    test_eq(file_format(b'RIFF\0\0\0\0WAVEfmt '), 'wav')
    test_eq(file_format(b'', 'a/b.MP3'), 'mp3')
    test_eq(file_format(b'no file', 'a/b.bmp'), None)
    test_eq(image_format(b'BM'), 'img')
    row = {'age':7, 'price':Decimal('1.10'), 'when':date(2026, 1, 2), 'kind':None}
    columns = Column('age', 'age.u1', 'number', 'uint8'), Column('price', 'price', 'text'), Column('when', 'when', 'time')
    load = LoadRow(columns)
    test_eq(load(row), {'age.u1':7, 'price':'1.10', 'when':'2026-01-02'})
    with expect_fail(ValueError, contains="column 'kind': nothing in this row (None)"):
        LoadRow([Column('kind', 'cls', 'object')])(row)
    types = {'Image Path':ColumnType('text'), 'label':ColumnType('text', vocab=['dog','cat'], is_label=True)}
    rows = [{'Image Path':'a.jpg', 'label':'dog'}]
    plan = TablePlan(types, rows, ColumnOptions())
    test_eq([c.field for c in plan.columns], ['Image_Path.txt','cls'])
    test_eq((plan.vocab, plan.row_vocab), ({'cls':['dog','cat']}, {'label':['dog','cat']}))
    plan = TablePlan(types, rows, ColumnOptions(fn_col='Image Path', label_col=1))
    test_eq(([c.field for c in plan.columns], plan.vocab), (['jpg','cls'], {'cls':['dog','cat']}))
    with expect_fail(ValueError, contains="no column 'kind'; there are Image Path, label"):
        TablePlan(types, rows, ColumnOptions(label_col='kind'))

def test_source_datasets():
    src = as_source(pd.DataFrame({'txt':['a','b','c'], 'cls':['x','y','x']}))
    test_eq(src.read(np.array([2,0])), [('row 2',{'txt':'c','cls':'x'}), ('row 0',{'txt':'a','cls':'x'})])

    class Squares:
        classes = ['even','odd']
        def __len__(self): return 5
        def __getitem__(self, i): return np.full(2, i*i), i%2
    src = as_source(Squares())
    (name,raw), = src.read(np.array([3]))
    o = as_sample(src.load(raw))
    test_eq((o['npy'], o['cls']), ([9,9], 1))
    test_eq(src.vocab, {'cls':['even','odd']})
    test_eq(as_source(Subset(Squares(), [1,3])).vocab, {'cls':['even','odd']})

    src = as_source({'train':[1,2,3], 'valid':[4,5]})
    test_eq([src.load(r) for _,r in src.read(np.array([0,2,4]))], [1,3,5])
    with expect_fail(TypeError, contains='paths of images and other things'): as_source(['a/1.jpg','cat'])
    with expect_fail(TypeError, contains='object: can be neither indexed nor gone through'): as_source(object())
    src = as_source({'train':(i*i for i in range(5)), 'valid':[7]})
    test_eq([(p.split,list(p)) for p in src.stream(4)],
            [('train',[(f'train: item {i}',('train',i*i)) for i in range(4)]), ('train',[('train: item 4',('train',16))]),
            ('valid',[('valid: item 0',('valid',7))])])

    store = MemoryStore({'txt':[b'a',b'b',b'c'], 'cls':np.array([0,1,0])}, vocab={'cls':['x','y']})
    src = as_source(store)
    part = src.read(np.array([2,1]))
    test_eq(list(part), [('sample 2',{'txt':b'c','cls':'x'}), ('sample 1',{'txt':b'b','cls':'y'})])
    src.load(list(part)[0][1])

def test_source_torch_items():
    class Squares:
        classes = ['even','odd']
        def __len__(self): return 5
        def __getitem__(self, i): return np.full(2, i*i), i%2

    test_eq(class_names(ConcatDataset([Squares(), Subset(Squares(), [1,3])])), (['even','odd'], None))
    others = Squares()
    others.classes = ['odd','even']
    folder = Path(tmp.mkdtemp())
    Image.fromarray(np.arange(64, dtype='u1').reshape(8, 8)).save(folder/'a.jpg')
    with opened_files() as files: image = Image.open(folder/'a.jpg').convert('RGB')
    test_eq(original_file(image, files)[0], (folder/'a.jpg').read_bytes())
    test_eq(original_file(image.rotate(90), files), None)
    target = {'boxes':np.zeros((0,4)), 'labels':np.array([], int)}
    list(flat_items((image, target)))
    class Boxes:
        def __len__(self): return 5
        def __getitem__(self, i):
            return Image.open(folder/'a.jpg').convert('RGB'), {'boxes':np.zeros((i,4)), 'labels':np.zeros(i, int)}

    source = DatasetSource(Boxes())
    (name,raw), = source.read(np.array([2]))
    sample = source.as_is(raw)
    test_eq(bytes(sample['jpg']), (folder/'a.jpg').read_bytes())
