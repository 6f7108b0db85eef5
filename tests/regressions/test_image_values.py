"What users give as the value of an image field: paths of files, and tensors with channels first"
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from inputs import in_memory, stored

@pytest.fixture
def file(tmp_path):
    path = tmp_path/'image.png'
    Image.effect_noise((12,10), 80).save(path)
    return path

@pytest.mark.parametrize('field', ['png','img','photo.png','mask.png','raw'])
def test_a_path_is_read_as_that_file(file, field):
    content = file.read_bytes() if field!='raw' else Image.open(file)
    store,report = in_memory([{field:Path(file)}, {field:str(file)}, {field:content}])
    path,text,want = (np.asarray(sample[field]) for sample in store[:])
    assert report.failed==0 and np.array_equal(path, want) and np.array_equal(text, want)
    if field!='raw': assert stored(store, field)==[content]*3

def test_what_is_no_file_is_a_failed_sample(file):
    wrong = {'/no/such.png':'such.png', 'https://x/1.jpg':'address', Path('/'):'a folder',
             's3://bucket/1.jpg':'address'}
    _,report = in_memory([{'img':value} for value in (file, *wrong)])
    assert len(report.failures)==4
    assert all(says in why for says,(_,why) in zip(wrong.values(), report.failures))

@pytest.mark.parametrize('field', ['img','png','jpg','raw'])
def test_channels_first_are_an_error_that_says_what_to_give(field):
    one,three = (torch.zeros(channels, 8, 9, dtype=torch.uint8) for channels in (1,3))
    wrong = one,one.numpy(),three,three.numpy()
    _,report = in_memory([{field:pixels} for pixels in (np.zeros((8,9,3), 'u1'), *wrong)])
    assert report.failed==4 and all('permute(1, 2, 0)' in why for _,why in report.failures)
    for pixels in one,three: assert in_memory([{field:pixels.permute(1, 2, 0)}])[1].failed==0
