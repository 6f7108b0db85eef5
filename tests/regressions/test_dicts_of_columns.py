"A dict of lists or arrays by column, whose names name no codec, is not taken for one of splits"
import numpy as np
import pandas as pd
import pytest
import torch

from fastai_remote import array_samples
from inputs import in_memory

@pytest.mark.parametrize('columns', [{'text':['good','bad'], 'label':['a','b']}, {'x':[1.,2.], 'label':[0,1]},
    {'x':torch.rand(2, 3), 'label':torch.arange(2)}, {'x':np.zeros((2, 3)), 'y':np.zeros(2)},
    {'image':['a.png','b.png'], 'label':[0,1]}], ids=['texts','lists','tensors','shapes','paths'])
def test_columns_are_no_splits(columns):
    with pytest.raises(ValueError, match=r"names '\w+', '\w+': these are columns, .* array_samples"): in_memory(columns)

def test_what_the_error_advises():
    columns = {'text':['good','bad'], 'label':['a','b']}
    assert in_memory(array_samples(columns, fields={'text':'txt', 'label':'cls'}))[0].fields==['txt','cls']
    assert in_memory(pd.DataFrame(columns))[0].fields==['txt','cls']

def test_what_the_report_advises_keeps_the_other_columns():
    columns = {'x':np.zeros((2, 3)), 'label':np.arange(2)}
    _,report = in_memory(array_samples(columns))
    assert "label_col='label' makes it the label, and then fields={column: field} names the other" in str(report)
    assert in_memory(array_samples(columns, label_col='label', fields={'x':'x.npy'}))[0].fields==['x.npy','cls']

@pytest.mark.parametrize('splits', [{'train':np.zeros((4, 3)), 'valid':np.zeros((2, 3))}, {'a':['x','y'], 'b':['x']},
    {'train':torch.rand(4, 3), 'valid':torch.rand(2, 3)}, {'label':[{'txt':'a'}], 'train':[{'txt':'b'}]}])
def test_splits_are_splits(splits): assert list(in_memory(splits)[0].splits)==list(splits)
