"""Values that users give: paths, several labels in any collection, floats as labels, elements of lists for `fn`

What no kind of target can read is refused when it is written."""
from pathlib import Path, PurePosixPath

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from datasets import Dataset
from fastai.data.core import DataLoaders
from fastai.data.transforms import get_image_files
from fastcore.foundation import L
from PIL import Image

from fastai_remote import array_samples, get_remote_items, hf_samples, image_samples, table_samples, to_shards
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

# --- image fields: paths of files, and tensors with channels first

@pytest.mark.parametrize('field', ['png','img','photo.png','mask.png','raw'])
def test_a_path_is_read_as_that_file(files, field):
    file = files[0]
    content = file.read_bytes() if field!='raw' else Image.open(file)
    store,report = in_memory([{field:Path(file)}, {field:str(file)}, {field:content}])
    path,text,want = (np.asarray(sample[field]) for sample in store[:])
    assert report.failed==0 and np.array_equal(path, want) and np.array_equal(text, want)
    if field!='raw': assert stored(store, field)==[content]*3

def test_what_is_no_file_is_a_failed_sample(files):
    wrong = {'/no/such.png':'such.png', 'https://x/1.jpg':'address', Path('/'):'a folder',
             's3://bucket/1.jpg':'address'}
    _,report = in_memory([{'img':value} for value in (files[0], *wrong)])
    assert len(report.failures)==4
    assert all(says in why for says,(_,why) in zip(wrong.values(), report.failures))

@pytest.mark.parametrize('field', ['img','png','jpg','raw'])
def test_channels_first_are_an_error_that_says_what_to_give(field):
    one,three = (torch.zeros(channels, 8, 9, dtype=torch.uint8) for channels in (1,3))
    wrong = one,one.numpy(),three,three.numpy()
    _,report = in_memory([{field:pixels} for pixels in (np.zeros((8,9,3), 'u1'), *wrong)])
    assert report.failed==4 and all('permute(1, 2, 0)' in why for _,why in report.failures)
    for pixels in one,three: assert in_memory([{field:pixels.permute(1, 2, 0)}])[1].failed==0

# --- elements for `fn`: those of a list are the list's, whatever they are

def describe(o): return {'txt':f'{type(o).__name__} {o}', 'a.i8':len(str(o))}

def test_texts_that_name_files_are_texts():
    "Lists of each kind, and of each kind of name"
    def splits(paths): return {'train':paths, 'valid':paths}
    pictures = ['a/1.jpg','a/2.png']
    cases = [*((kind, pictures) for kind in (list, L, tuple, np.array, pd.Series, splits)),
             (L, ['x.csv','y.csv']), (list, ['x.csv','y.csv']), (np.array, ['x.parquet']), (list, ['no path','1.jpg'])]
    for k,(kind,names) in enumerate(cases):
        texts = column(in_memory(kind(names), describe)[0], 'txt')[:len(names)]
        assert [text.split(' ', 1)[1] for text in texts]==names and all(text.startswith('str') for text in texts), k

def test_paths_of_images_are_paths(files, tmp_path):
    "Without `fn`, they are images"
    def fn(path):
        assert isinstance(path, Path)
        return {'png':path.read_bytes(), 'cls':path.parent.name}
    options = dict(num_workers=0, progress=False)
    store = to_shards(files, tmp_path/'d', fn=fn, shuffle=False, **options).store
    assert stored(store, 'png')==[f.read_bytes() for f in files]
    assert len(store.append(files[:2], fn=fn, **options))==len(files)+2
    assert in_memory(files)[0].fields==['png']

# --- what is refused early

@pytest.mark.parametrize('field', ['mask.npy','mask.npz','depth.mask.npy'])
def test_arrays_that_are_no_masks(field):
    codes = np.array([[0,255]], 'u1')
    wrong = [np.full((2,2), 256), np.full((2,2), -1), np.ones((2,2), 'f4'), np.ones((2,2,3), 'u1'), np.array([['a']])]
    store,report = in_memory([{field:mask} for mask in (codes, *wrong, codes[...,None])])
    assert report.written==2 and [name for name,_ in report.failures]==[f'item {i}' for i in range(1, 6)]
    assert all(field in why for _,why in report.failures)
    assert in_memory([{'codes.npy':np.full((2,2), 256)}])[1].written==1   # others may hold anything

@pytest.mark.parametrize('prefix', ['boxes','person.boxes'])
def test_boxes_and_labels_of_different_number(prefix):
    def sample(n, m): return {f'{prefix}.npy':np.zeros((n,4), 'f4'), f'{prefix}.labels':['a']*m}
    wrong = [(2,1), (1,2), (0,1), (1,0)]
    _,report = in_memory([sample(*numbers) for numbers in ((2,2), *wrong, (0,0))])
    assert report.written==2 and len(report.failures)==4
    for (_,why),(n_boxes,n_labels) in zip(report.failures, wrong):
        assert f'{n_boxes} boxes' in why and f'{n_labels} labels' in why

# --- labels that are true and false stay so, in every place and through every change

ONE = dict(num_workers=1, progress=False, shuffle=False)
FLAGS = [True,False,True,True,False,True]
def flagged(labels=FLAGS): return [{'png':Image.new('L', (4,4), i), 'cls':label} for i,label in enumerate(labels)]

def kinds(vocab): return [(type(label),label) for label in vocab]
BOOLS = kinds([False,True])

def test_true_and_false_are_read_back_appended_edited_and_copied(put, tmp_path):
    store,_ = put(flagged(), shuffle=False)
    assert kinds(store.vocab)==BOOLS and column(store, 'cls')==FLAGS and store.class_counts()=={False:2, True:4}
    assert len(get_remote_items(store, where={'cls':[False]}))==2
    assert kinds(DataLoaders.from_store(store, bs=2, num_workers=0).vocab)==BOOLS
    store = store.append(flagged([False,False]), **ONE)
    store = store.edit(set={'cls':{0:False, 1:np.bool_(True)}})
    want = [False,True,*FLAGS[2:],False,False]
    assert kinds(store.vocab)==BOOLS and column(store, 'cls')==want
    assert kinds(store.copy(tmp_path/'copy', **ONE).vocab)==BOOLS
    store = store.add_fields(lambda s: {'other.cls':not s['cls']}, num_workers=1, progress=False)
    assert kinds(store.manifest.vocab['other.cls'])==BOOLS and column(store, 'other.cls')==[not o for o in want]

def test_every_kind_of_true_and_false():
    for make in bool, np.bool_, torch.tensor:
        store,_ = in_memory(flagged(map(make, FLAGS)))
        assert kinds(store.vocab)==BOOLS and column(store, 'cls')==FLAGS, make
    store,_ = in_memory(flagged(), vocab=['no','yes'])   # names that are given
    assert store.vocab==['no','yes'] and column(store, 'cls')==['yes' if label else 'no' for label in FLAGS]

def test_a_number_among_true_and_false_is_a_failure():
    store,report = in_memory(pd.DataFrame({'cls':pd.Series([True,False,7], dtype=object)}))
    assert kinds(store.vocab)==BOOLS and "label 7 is not in the vocab of 'cls'" in report.failures[0][1]
