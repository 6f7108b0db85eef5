"Values that users give: paths as objects, several labels in any collection, and labels that are floats"
from pathlib import PurePosixPath

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from datasets import Dataset
from fastai.data.core import DataLoaders
from fastai.data.transforms import get_image_files
from fastai.vision.data import ImageDataLoaders
from fastcore.foundation import L
from PIL import Image

from fastai_remote import array_samples, hf_samples, image_samples, table_samples
from inputs import column, in_memory, stored

# --- a column of `Path` objects, as `get_image_files` returns them

@pytest.fixture
def files(tmp_path):
    for i in range(6): Image.effect_noise((8,8), 50+i).save(tmp_path/f'{i}.png')
    return sorted(get_image_files(tmp_path))

def paths(table, **options):
    return lambda files: table_samples(table({'path':list(files), 'label':['a','b']*3}), **options)
def objects(data): return pl.DataFrame({'path':pl.Series(data['path'], dtype=pl.Object), 'label':data['label']})

@pytest.mark.parametrize('source', [paths(pd.DataFrame, fn_col='path', label_col='label'),
    paths(pd.DataFrame, fn_col=0, label_col=1), paths(objects, fn_col='path', label_col='label'),
    paths(pd.DataFrame, fields={'path':'png', 'label':'cls'}), lambda files: {'png':list(files), 'cls':['a','b']*3},
    lambda files: array_samples({'png':np.array(files, object), 'cls':np.array(['a','b']*3)})],
    ids=['fn_col','positions','polars','fields','lists','arrays'])
def test_a_column_of_paths_names_files(files, source):
    store,report = in_memory(source(files))
    assert report.failed==0 and store.fields==['png','cls'] and stored(store, 'png')==[f.read_bytes() for f in files]

def test_paths_in_a_folder_with_a_suffix(files):
    names = [PurePosixPath(file.stem) for file in files]
    source = table_samples(pd.DataFrame({'name':names}), fn_col='name', folder=files[0].parent, suff='.png')
    assert stored(in_memory(source)[0], 'png')==[f.read_bytes() for f in files]

def test_paths_that_are_not_asked_for_are_texts(files):
    "The report says how to read the files"
    store,report = in_memory(pd.DataFrame({'path':files, 'label':['a','b']*3}))
    assert store.fields==['path.txt','cls'] and column(store, 'path.txt')==list(map(str, files))
    assert "fn_col='path'" in str(report)

def test_a_table_of_paths_gives_the_batches_of_stock_fastai(files):
    table = pd.DataFrame({'path':files, 'label':[3,20,3,100,20,100], 'is_valid':[False]*4+[True]*2})
    stock = ImageDataLoaders.from_df(table, valid_col='is_valid', path='/', bs=2, num_workers=0, item_tfms=None)
    store,_ = in_memory(table_samples(table, fn_col='path', label_col='label', valid_col='is_valid'))
    dls = DataLoaders.from_store(store, bs=2, num_workers=0)
    for ours,theirs in zip(dls.valid, stock.valid, strict=True):
        assert all(torch.equal(a.cpu(), b.cpu()) for a,b in zip(ours, theirs, strict=True))
    assert list(dls.vocab)==list(stock.vocab)==[3,20,100]

# --- several labels

SEVERAL = dict(L=L('b','a'), set={'a','b'}, frozenset=frozenset('ab'), array=np.array(['a','b']), tuple=('b','a'),
    objects=np.array(['b','a'], object), list=['b','a'])

class Items:
    def __init__(self, labels): self.labels = labels
    def __len__(self): return 2
    def __getitem__(self, i): return np.zeros((2,2), 'u1'),self.labels

def frame(labels): return pd.DataFrame({'n.i8':[1,2], 'tags':pd.Series([labels, labels], dtype=object)})

@pytest.mark.parametrize('source', [lambda o: [{'labels':o}]*2, lambda o: [{'tags':o}]*2,
    lambda o: [(np.zeros(3), o)]*2,
    lambda o: Items(list(o) if isinstance(o, tuple) else o),
    lambda o: table_samples(frame(o), label_col='tags', fields={'n.i8':'n.i8'}),
    lambda o: table_samples(frame(o), fields={'tags':'labels'}), lambda o: {'labels':[o,o], 'n.i8':[1,2]}],
    ids=['labels','tags','tuple','dataset','label_col','fields','columns'])
def test_several_labels_in_any_collection(source):
    for name,several in SEVERAL.items():
        store,report = in_memory(source(several))
        field, = [field for field,spec in store.manifest.fields.items() if spec['codec']=='labels']
        assert report.failed==0 and store.manifest.vocab[field]==['a','b'], name
        assert sorted(store[1][field])==['a','b'], name

def test_a_function_of_a_file_returns_several_labels(files):
    for several in *SEVERAL.values(),{2,1},L(1,2),np.array([1,2]):
        store,report = in_memory(image_samples(files, label=lambda path: several))
        assert report.failed==0 and store.fields==['png','labels'] and sorted(store[0]['labels'])==sorted(several)

def test_a_collection_with_something_else_is_no_list_of_labels():
    for bad in {'a',None},L('a',2.5),np.array(['a',None], object),'ab':
        _,report = in_memory([{'labels':['a']}, {'labels':bad}])
        assert report.failed==1 and report.failures[0][0]=='item 1'

def test_labels_that_fn_returns_may_be_in_any_collection():
    store,_ = in_memory([{'labels':['a','b']}]*3)
    for several in SEVERAL.values():
        other,_ = in_memory(store, fn=lambda s, several=several: {'labels':several})
        assert [sorted(o['labels']) for o in other]==[['a','b']]*3

# --- labels that are floats

HALF,WHOLE = [1.,2.5,7.,1.],[1.,7.,2.,1.]
def of_items(labels): return [{'cls':label, 'txt':'a'} for label in labels]
FLOATS = dict(samples=of_items, scalars=lambda o: of_items(map(np.float32, o)),
    tensors=lambda o: of_items(map(torch.tensor, o)), arrays=lambda o: {'cls':np.array(o), 'txt':['a']*4},
    stream=lambda o: iter(of_items(o)), hf=lambda o: hf_samples(Dataset.from_dict({'y':o}), fields={'y':'cls'}))

@pytest.mark.parametrize('route', FLOATS.values(), ids=FLOATS)
def test_whole_floats_are_whole_numbers_and_others_name_a_field_of_numbers(route):
    "Those of tables are tested in `test_labels_of_tables.py`"
    store,report = in_memory(route(WHOLE))
    assert report.failed==0 and store.vocab==[1,2,7] and {type(label) for label in store.vocab}=={int}
    store,report = in_memory(route(HALF))
    (_,why), = report.failures
    assert 'is no whole number' in why and '2.5' in why and 'target.f4' in why and store.vocab==[1,7]

def test_several_labels_that_are_floats():
    store,report = in_memory([{'labels':[1.,2.]}, {'labels':np.array([7.])}, {'labels':[.5]}])
    assert store.vocab==[1,2,7] and 'target.f4' in report.failures[0][1]
