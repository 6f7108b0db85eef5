"What each module of `source` does, in short: examples that were tried first"
import tempfile
import PIL.Image as Image
import numpy as np
import pandas as pd
import tempfile as tmp
import csv, gzip, json, lzma, pickle
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
from fastai_remote.codec.strokes import simplify
from fastai_remote.source.csv_files import csv_samples
from fastai_remote.source.drawings import _grouped, _LoadDrawing, drawing_samples
from fastai_remote.source.frames import table_samples

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

def test_source_csv_files():
    d = Path(tempfile.mkdtemp())
    for i in range(3): Image.new('L', (4,4), i).save(d/f'{i}.png')
    (d/'labels.csv').write_text('name,label\n0,cat sat\n1,dog\n2\n')
    src = csv_samples(d/'labels.csv', 'name', 'label', label_delim=' ', folder=d, suff='.png')
    part, = src.stream(10)
    labels = [(name,src.load(raw)['labels']) for name,raw in part[:2]]
    test_eq(labels, [('labels.csv:2',['cat','sat']), ('labels.csv:3',['dog'])])
    test_eq(str(part[2]), "('labels.csv:4', ValueError('1 columns where the header has 2'))")
    test_eq(next(csv_samples(d/'labels.csv').stream(1)), [('labels.csv:2',{'name':'0','label':'cat sat'})])
    with expect_fail(ValueError, contains="labels.csv: no column 'kind'; there are name, label"):
        list(csv_samples(d/'labels.csv', 'kind').stream(1))

def test_source_drawings():
    a = np.linspace(0, 2*np.pi, 200)
    circle = [(300+80*np.cos(a)).tolist(), (200+50*np.sin(a)).tolist(), list(range(200))]
    def line(**changes):
        entry = {'word':'cat', 'key_id':'5152802093400064', 'recognized':True, 'drawing':[circle], **changes}
        return json.dumps(entry).encode()
    load = _LoadDrawing(True, None)
    (_,good),(_,bad) = _grouped([('a:1', None, line()), ('a:2', None, line(drawing=[[[1,2],[3]]]))])
    o = load(good)
    test_eq((o['cls'], o['id'], o['recognized.u1']), ('cat', 5152802093400064, 1))
    test_eq(o['strokes'], simplify([circle]))
    with expect_fail(ValueError, contains='differ in length'): load(bad)
    d = Path(tempfile.mkdtemp())
    spiral = [np.array([[60,120,200],[20,60,30]], np.uint8)]
    (d/'cat.ndjson').write_bytes(b'\n'.join([*[line(key_id=str(i)) for i in range(100)], b'{"damaged', b'']))
    drawing = json.dumps([s.tolist() for s in spiral])
    rows = [['US', drawing, str(1000+i), 'False', '2017-03-08', 'spiral'] for i in range(70)]
    with open(d/'spiral.csv', 'w', newline='') as f:
        header = ['countrycode','drawing','key_id','recognized','timestamp','word']
        csv.writer(f, lineterminator='\n').writerows([header, *rows])
    src = drawing_samples(d)
    test_eq([src[i]['id'] for i in (0,99,101,170)], [0,99,1000,1069])
    test_eq(src[150]['strokes'], spiral)
    part = pickle.loads(pickle.dumps(src.read(np.array([150,98,99,100]))))
    (a,_),*_,(b,bad) = part
    test_eq((len(part), a, b), (4, 'spiral.csv:51', 'cat.ndjson:101'))
    with expect_fail(ValueError, contains='Unterminated string'): src.load(bad)
    some = drawing_samples(d/'cat.ndjson', times=True, max_per_class=3)   # and the damaged line, which has no word
    o = some[0]
    test_eq((len(some), o['points.npy'].shape, o['points.npy'][[0,-1],2:].tolist()), (4, (200,4), [[0,0],[199,1]]))
    test_eq(drawing_samples(d/'spiral.csv', keep=['countrycode'])[0]['countrycode.cls'], 'US')
    for f,op in (('cat.ndjson',gzip.open), ('spiral.csv',lzma.open)):
        with op(d/f'z{f}{".gz" if op is gzip.open else ".xz"}', 'wb') as h: h.write((d/f).read_bytes())
    zs = [d/'zcat.ndjson.gz',d/'zspiral.csv.xz']
    src = drawing_samples(zs, 'png', size=64)
    parts = list(src.stream(50))
    test_eq([len(p) for p in parts], [50,50,50,21])
    test_eq([src.load(r)['cls'] for _,r in parts[0][:4]], ['cat','spiral']*2)
    zs[0].write_bytes(zs[0].read_bytes()[:-50])
    with expect_fail(OSError, contains='zcat.ndjson.gz: truncated or damaged'): list(src.stream(50))

def test_source_frames():
    folder = Path(tempfile.mkdtemp())
    table = pd.DataFrame({'name':['a.jpg','b.jpg','c.jpg'], 'label':pd.Categorical(['cat','dog','cat'], ['dog','cat'])})
    table['is_valid'] = [False,True,False]
    src = table_samples(table)
    test_eq([c.field for c in src.plan.columns], ['name.txt','cls','is_valid.u1'])
    test_eq(src.as_is_vocab, {'cls':['dog','cat']})
    src = table_samples(table, fn_col='name', label_col='label', folder=folder, valid_col='is_valid')
    test_eq((src.vocab, src.splits), ({'cls':['dog','cat']}, {'train':[0,2],'valid':[2,3]}))
    for name in table['name']: (folder/name).write_bytes(b'the file '+name.encode())
