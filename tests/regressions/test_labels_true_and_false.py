"Labels that are true and false stay so, in every place and through every change"
import numpy as np
import pandas as pd
import torch
from fastai.data.core import DataLoaders
from PIL import Image

from fastai_remote import get_remote_items
from inputs import column, in_memory

ONE = dict(num_workers=1, progress=False, shuffle=False)
LABELS = [True,False,True,True,False,True]
def samples(labels=LABELS): return [{'png':Image.new('L', (4,4), i), 'cls':label} for i,label in enumerate(labels)]

def kinds(vocab): return [(type(label),label) for label in vocab]
BOOLS = kinds([False,True])

def test_they_are_read_back_appended_edited_and_copied(put, tmp_path):
    store,_ = put(samples(), shuffle=False)
    assert kinds(store.vocab)==BOOLS and column(store, 'cls')==LABELS and store.class_counts()=={False:2, True:4}
    assert len(get_remote_items(store, where={'cls':[False]}))==2
    assert kinds(DataLoaders.from_store(store, bs=2, num_workers=0).vocab)==BOOLS
    store = store.append(samples([False,False]), **ONE)
    store = store.edit(set={'cls':{0:False, 1:np.bool_(True)}})
    want = [False,True,*LABELS[2:],False,False]
    assert kinds(store.vocab)==BOOLS and column(store, 'cls')==want
    assert kinds(store.copy(tmp_path/'copy', **ONE).vocab)==BOOLS
    store = store.add_fields(lambda s: {'other.cls':not s['cls']}, num_workers=1, progress=False)
    assert kinds(store.manifest.vocab['other.cls'])==BOOLS and column(store, 'other.cls')==[not o for o in want]

def test_every_kind_of_true_and_false():
    for make in bool, np.bool_, torch.tensor:
        store,_ = in_memory(samples(map(make, LABELS)))
        assert kinds(store.vocab)==BOOLS and column(store, 'cls')==LABELS, make
    store,_ = in_memory(samples(), vocab=['no','yes'])   # names that are given
    assert store.vocab==['no','yes'] and column(store, 'cls')==['yes' if label else 'no' for label in LABELS]

def test_a_number_among_them_is_a_failure():
    store,report = in_memory(pd.DataFrame({'cls':pd.Series([True,False,7], dtype=object)}))
    assert kinds(store.vocab)==BOOLS and "label 7 is not in the vocab of 'cls'" in report.failures[0][1]
