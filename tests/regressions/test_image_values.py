"What users give as the value of an image field: paths of files, and tensors with channels first"
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from inputs import in_memory

@pytest.fixture
def file(tmp_path):
    path = tmp_path/'image.png'
    Image.effect_noise((12,10), 80).save(path)
    return path

@pytest.mark.parametrize('field', ['png','img','photo.png','mask.png','raw'])
@pytest.mark.parametrize('kind', [Path, str])
def test_a_path_is_read_as_that_file(file, field, kind):
    store,report = in_memory([{field:kind(file)}, {field:file.read_bytes() if field!='raw' else Image.open(file)}])
    assert report.failed==0 and np.array_equal(*(np.asarray(store[i][field]) for i in range(2)))
    if field!='raw': assert store.get_many([0], field)[field][0]==file.read_bytes()

@pytest.mark.parametrize('value,says', [('/no/such.png','such.png'), ('https://x/1.jpg','address'),
    (Path('/'),'a folder'), ('s3://bucket/1.jpg','address')])
def test_what_is_no_file_is_a_failed_sample(file, value, says):
    _,report = in_memory([{'img':file}, {'img':value}])
    assert report.failed==1 and says in report.failures[0][1]

@pytest.mark.parametrize('field', ['img','png','jpg','raw'])
@pytest.mark.parametrize('channels', [1, 3])
def test_channels_first_are_an_error_that_says_what_to_give(field, channels):
    pixels = torch.zeros(channels, 8, 9, dtype=torch.uint8)
    _,report = in_memory([{field:np.zeros((8,9,3), 'u1')}, {field:pixels}, {field:pixels.numpy()}])
    assert report.failed==2 and all('permute(1, 2, 0)' in why for _,why in report.failures)
    _,report = in_memory([{field:pixels.permute(1, 2, 0)}])
    assert report.failed==0
