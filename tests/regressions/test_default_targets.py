"The fields that a model is trained with if the user names none: what the guide promises"
import re
from pathlib import Path

import numpy as np
import pytest
from fastai.data.core import DataLoaders
from PIL import Image

import fastai_remote.block   # `from_store`
from fastai_remote import UnknownField
from fastai_remote.load.kinds import choose_fields
from inputs import in_memory

GUIDE = Path(__file__).parents[2]/'nbs'/'guide'/'kinds.md'
SECTION = GUIDE.read_text().split('## Default targets')[1].split('\n## ')[0]
ROWS = [[re.findall('`(.+?)`', cell) for cell in line.strip('| ').split(' | ')] for line in SECTION.splitlines()
        if line.startswith('| `')]
IMAGE = Image.new('L', (8,8))
VALUES = {'boxes.npy':np.float32([[0,0,4,4]]), 'boxes.labels':['a'], 'labels':['a'], 'tags.labels':['b'], 'cls':'c',
          'kind.cls':'k', 'points.npy':np.float32([[1,2]]), 'xy.npy':np.float32([1,2]), 'target.npy':np.float32([1,2]),
          'caption.txt':'words', 'txt':'words'}

def value(field, i):
    number = i if field=='id' else i/2 if field.endswith('f4') else i
    return VALUES.get(field, IMAGE if field.split('.')[-1] in ('jpg','png') else number)

def dataset(*fields): return [{field:value(field, i) for field in fields} for i in range(8)]
def default_target(store, x=None): return [choice.field for choice in choose_fields(store, x)[1]]

@pytest.mark.parametrize('fields,target', ROWS, ids=lambda o: ' '.join(o) or 'error')
def test_the_guide_says_which_field_is_the_target(fields, target):
    store,_ = in_memory(dataset(*fields))
    if target: assert default_target(store)==target
    else:
        with pytest.raises(UnknownField, match="no target.*y= takes one of '"): default_target(store)

def test_the_guide_has_every_kind_of_target(): assert len(ROWS)>=13 and [] in [target for _,target in ROWS]

@pytest.mark.parametrize('fields,x,want', [(('a.png','b.png','age.f4'),['a.png','b.png'],['age.f4']),
    (('png','age.f4','size.f4'),['png','age.f4'],['size.f4']), (('npy','target.npy'),None,['target.npy']),
    (('txt','mood.cls'),None,['mood.cls']), (('jpg','year.i4','index'),None,['year.i4'])])
def test_inputs_and_numbers_of_samples_are_no_targets(fields, x, want):
    assert default_target(in_memory(dataset(*fields))[0], x)==want

def test_a_field_that_some_samples_lack_is_no_target():
    store,_ = in_memory(dataset('png','age.f4','size.f4'))
    store.manifest.fields['size.f4']['n'] = 3
    assert default_target(store)==['age.f4']

@pytest.mark.parametrize('field,loss,shape', [('mask.png','CrossEntropyLoss',(4,8,8)), ('age.f4','MSELoss',(4,)),
    ('target.npy','MSELoss',(4,2))])
def test_loaders_have_a_target_and_its_loss(field, loss, shape):
    dls = DataLoaders.from_store(in_memory(dataset('png', field))[0], bs=4, num_workers=0)
    assert dls.one_batch()[1].shape==shape and str(dls.train_ds.loss_func)==f'FlattenedLoss of {loss}()'
