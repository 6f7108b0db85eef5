"The same table has the same labels and fields by every route, and those of stock fastai"
import io, sys, tracemalloc

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from fastai.data.core import DataLoaders
from fastai.vision.data import ImageDataLoaders
from PIL import Image

from fastai_remote import csv_samples, table_samples
from fastai_remote.source.columns import CellType
from inputs import column, in_memory, write_csv

def to_csv(path, table):
    pd.DataFrame(table).to_csv(path/'t.csv', index=False)
    return path/'t.csv'
def to_parquet(path, table):
    pq.write_table(pa.table(table), path/'t.parquet', row_group_size=3)
    return path/'t.parquet'

ROUTES = dict(csv=to_csv, tsv=lambda p, t: write_csv(p/'t.csv', zip(*([k,*v] for k,v in t.items()))),
    pandas=lambda p, t: pd.DataFrame(t), objects=lambda p, t: pd.DataFrame(t, dtype=object),
    arrow_frame=lambda p, t: pa.table(t).to_pandas(types_mapper=pd.ArrowDtype), nullable=lambda p, t:
        pd.DataFrame(t).convert_dtypes(), polars=lambda p, t: pl.DataFrame(t), arrow=lambda p, t: pa.table(t),
    parquet=to_parquet, reader=lambda p, t: pa.table(t).to_reader(), lazy=lambda p, t: pl.DataFrame(t).lazy(),
    hf=lambda p, t: Dataset.from_dict(t), hf_stream=lambda p, t: Dataset.from_dict(t).to_iterable_dataset())

def typed(vocab): return [(type(label),label) for label in vocab]

@pytest.fixture
def images(tmp_path):
    for i in range(6): Image.new('L', (4,4), i*9).save(tmp_path/f'{i}.png')
    return tmp_path

# `labels: (texts of the CSV file, how pandas reads them)`
LABELS = dict(ints=[1,10,5,1,10,5], negative=[-1,0,7,7,0,-1], bools=[True,False,True,True,False,True],
    texts=['b','a','c','a','b','c'], mixed=['1','x','10','1','x','10'], codes=['a1','10','2','10','2','a1'])

@pytest.mark.parametrize('labels', LABELS)
def test_the_vocabulary_is_that_of_stock_fastai(images, labels):
    "Of a CSV file and of a table; that other routes have the same one is tested below"
    table = {'name':[f'{i}.png' for i in range(6)], 'label':LABELS[labels]}
    path = to_csv(images, table)
    options = dict(bs=2, num_workers=0, item_tfms=None)
    for route,stock in (('csv', ImageDataLoaders.from_csv(images, path.name, **options)),
                        ('pandas', ImageDataLoaders.from_df(pd.DataFrame(table), images, **options))):
        source = table_samples(ROUTES[route](images, table), fn_col='name', label_col='label', folder=images)
        vocab = DataLoaders.from_store(in_memory(source)[0], bs=2, num_workers=0).vocab
        assert list(map(str, vocab))==list(map(str, stock.vocab)), route
        assert list(map(type, vocab))==[type(np.array([label]).tolist()[0]) for label in stock.vocab], route

@pytest.mark.parametrize('route', ROUTES)
def test_fields_and_labels_by_every_route(tmp_path, route):
    "Without names of columns: `text` is `txt`, `label` is `cls` if it has no fractions, other fields are called alike"
    for labels in LABELS.values():
        table = {'text':[f'text {i}' for i in range(6)], 'label':labels, 'age':range(6), 'size':np.arange(6)/4,
                 'good':[True,False]*3, 'caption':['a b']*6}
        store,report = in_memory(ROUTES[route](tmp_path, {k:list(v) for k,v in table.items()}))
        assert report.failed==0 and store.fields==['txt','cls','age.i8','size.f8','good.u1','caption.txt']
        assert typed(store.vocab)==typed(sorted(set(labels))) and column(store, 'cls')==labels
        assert column(store, 'age.i8')==list(range(6)) and column(store, 'good.u1')==[1,0]*3
    if route!='objects':
        store,report = in_memory(ROUTES[route](tmp_path, {'label':[1.,2.5,3.], 'txt':['a']*3}))
        assert report.failed==0 and store.fields==['label.f8','txt'] and column(store, 'label.f8')==[1.,2.5,3.]

@pytest.mark.parametrize('route', sorted(set(ROUTES)-{'hf_stream','reader','lazy'}))
def test_whole_numbers_of_which_some_are_missing(tmp_path, route):
    table = {'label':[3,None,1,10,1,3], 'x.f4':[.5]*6}
    store,report = in_memory(ROUTES[route](tmp_path, table))
    assert report.failed==1 and "column 'label'" in report.failures[0][1] and store.fields==['cls','x.f4']
    assert typed(store.vocab)==typed([1,3,10]) and sorted(column(store, 'cls'))==[1,1,3,3,10]

@pytest.mark.parametrize('route', sorted(set(ROUTES)-{'hf','hf_stream'}))
def test_floats_that_are_asked_for_as_labels(tmp_path, route):
    "Whole ones are whole numbers; others are failures that say where they belong"
    table = table_samples(ROUTES[route](tmp_path, {'y':[1.,2.5,3.,1.], 'txt':['a']*4}), fields={'y':'cls', 'txt':'txt'})
    store,report = in_memory(table)
    (_,why), = report.failures
    assert typed(store.vocab)==typed([1,3]) and all(part in why for part in ("column 'y'", 'is no whole', 'target.f4'))

def test_splits_of_csv_files_are_decided_together(tmp_path):
    "A text in one file makes texts of all, as in one table"
    a,b = write_csv(tmp_path/'a.csv', [['label'],[1],[2]]),write_csv(tmp_path/'b.csv', [['label'],[2],['x']])
    for source in {'train':a, 'valid':b}, {'train':b, 'valid':a}, [a,b], [b,a]:
        store,report = in_memory(source)
        assert report.failed==0 and store.vocab==['1','2','x']
    store,_ = in_memory({'train':csv_samples(a, label_col='label'), 'valid':csv_samples(a, label_col='label')})
    assert store.vocab==[1,2]

def test_the_last_row_decides(tmp_path):
    n = 3000
    for last,want in ('x',str), ('7',int):
        path = write_csv(tmp_path/'t.csv', [['label'], *([i%9] for i in range(n)), [last]])
        store,report = in_memory(csv_samples(path, label_col='label'))
        assert report.failed==0 and {type(label) for label in store.vocab}=={want}

CELLS = [['1','2'],['1',' 2 '],['+1','-3'],['007','8'],['1','','3'],['1','NA'],['1',' '],['2','-Infinity'],
    ['1','+.5E-3'],['1.0','2'],['1e3','.5'],['1.','inf'],
    ['nan','None'],['1_000','2'],['0x1F','1'],['True','FALSE'],['true',''],['True','1'],['yes','no'],['1','a'],
    ['18446744073709551615','1'],['-9223372036854775808','1'],['1','1,5'],['','']]

@pytest.mark.parametrize('cells', CELLS, ids=str)
def test_cells_are_what_pandas_reads(tmp_path, cells):
    found,path = CellType(),write_csv(tmp_path/'t.csv', [['a','b'], *([cell,0] for cell in cells)])
    for cell in cells: found.add(cell)
    values = pd.read_csv(path)['a']
    kind = pd.api.types.infer_dtype(values, skipna=True)
    want = {'integer':'int64', 'floating':'float64', 'boolean':'bool'}.get(kind)
    if values.isna().all(): want = None   # nothing to decide by
    assert found.column.dtype==want

HUGE = ['1'+'0'*k for k in (2,18,19,20,5000)]

def test_numbers_of_more_than_64_bits_are_texts(tmp_path):
    path = write_csv(tmp_path/'t.csv', [['label'], *([number] for number in HUGE)])
    store,report = in_memory(csv_samples(path))
    assert report.failed==0 and store.vocab==HUGE

def test_missing_labels_and_texts(tmp_path):
    "What pandas reads as missing is no label, and a text is any text"
    path = write_csv(tmp_path/'t.csv', [['txt','label'], ['NA','a'], ['','NA'], ['null','b']])
    store,report = in_memory(csv_samples(path))
    assert column(store, 'txt')==['NA','null'] and store.vocab==['a','b']
    assert "column 'label': nothing in this row ('NA')" in report.failures[0][1]

def test_names_of_files_and_texts_stay_as_they_are(tmp_path):
    "Numbers with zeros before them, too"
    Image.new('L', (4,4)).save(tmp_path/'007.png')
    path = write_csv(tmp_path/'t.csv', [['id','label'], ['007','1']])
    source = csv_samples(path, 'id', 'label', folder=tmp_path, suff='.png')
    assert in_memory(source)[0][0]['cls']==1
    assert in_memory(csv_samples(path, fields={'id':'txt', 'label':'cls'}))[0][0]=={'txt':'007', 'cls':1}
    assert in_memory(csv_samples(path), fn=lambda row: {'txt':row['id']})[0][0]=={'txt':'007'}

def test_categories_named_label_keep_their_order_without_fn():
    "With `fn`, whose labels are its own, they say nothing"
    table = pd.DataFrame({'label':pd.Categorical(['b','a'], ['b','a'])})
    assert in_memory(table)[0].vocab==['b','a']
    assert in_memory(table, fn=lambda row: {'cls':row['label'].upper()})[0].vocab==['A','B']

@pytest.mark.parametrize('columns', [dict(label=['a','b'], cls=['x','y']), dict(text=['a','b'], txt=['x','y'])])
def test_two_columns_for_one_field_get_different_names(tmp_path, columns):
    for route in set(ROUTES)-{'reader','hf_stream'}:
        store,_ = in_memory(ROUTES[route](tmp_path, columns))
        first,second = columns
        assert store.fields==[f'{first}.txt',second] and column(store, second)==['x','y']

@pytest.mark.slow
def test_deciding_takes_no_memory_for_each_row(tmp_path):
    n,path = 50_000,tmp_path/'t.csv'
    write_csv(path, [['label','x'], *([i%7,i/8] for i in range(n))])
    frame = pd.DataFrame({'label':np.arange(n)%7+0., 'o':np.array(['a','b'], object)[np.arange(n)%2]})
    for source in csv_samples(path), table_samples(frame):
        tracemalloc.start()
        try:
            fields = [c.field for c in source.plan.columns]
            most = tracemalloc.get_traced_memory()[1]
        finally: tracemalloc.stop()
        assert fields[0]=='cls' and most<4_000_000

def test_names_that_say_how_values_are_stored():
    "A file is stored as its format is, and not as its name"
    from datasets import Features, Image as Picture, Value
    features = Features({'a.png':Picture(), 'b.img':Picture(), 'age.f4':Value('float64'), 'kind.cls':Value('string'),
                         'id':Value('int32'), 'x.crc':Value('int64')})
    Image.new('L', (4,4)).save(file := io.BytesIO(), 'JPEG')
    row = {'a.png':{'bytes':file.getvalue()}, 'b.img':{'bytes':file.getvalue()}, 'age.f4':.5, 'kind.cls':'k', 'id':7,
           'x.crc':1}
    store,report = in_memory(Dataset.from_list([row], features=features))
    assert store.fields==['jpg','b.img','age.f4','kind.cls','id','x.crc.i8'] and report.failed==0
    assert in_memory(pd.DataFrame([{k:row[k] for k in list(row)[2:]}]))[0].fields==store.fields[2:]

def test_csv_files_need_no_library(tmp_path, monkeypatch):
    path = write_csv(tmp_path/'t.csv', [['label','text'], *([k,'a'] for k in (10,9,1))])
    for name in [name for name in sys.modules if name.split('.')[0] in ('pandas','pyarrow')]:
        monkeypatch.delitem(sys.modules, name)
    for name in 'pandas','pyarrow': monkeypatch.setitem(sys.modules, name, None)
    store,_ = in_memory(path)
    assert store.vocab==[1,9,10] and store.fields==['cls','txt']
