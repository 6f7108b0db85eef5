"Errors of values that users give say what was wrong, and what to give instead"
import numpy as np
import pytest
import torch

from fastai_remote.core import StoreError
from fastai_remote.ingest.report import IngestError
from fastai_remote.ingest.shards import to_shards
from fastai_remote.store.shards import ShardStore

def write(folder, source, **kwargs):
    to_shards(source, folder, num_workers=0, shuffle=False, progress=False, **kwargs)
    return ShardStore(folder)

def test_an_fn_without_return(tmp_path):
    with pytest.raises(IngestError, match='item 2: TypeError: fn returned None'):
        write(tmp_path/'a', list(range(9)), fn=lambda i: None if i==2 else {'a.i8':i}, max_failed=0)
    store = write(tmp_path/'b', [{'a.i8':0}])
    with pytest.raises(IngestError, match='fn returned None'): store.append([1], fn=lambda i: None, num_workers=0)

@pytest.mark.parametrize('values', [[1., 3., 2.], np.array([1, 3, 2], 'f4'), torch.tensor([1., 3., 2.]),
    [1, 3., np.float64(2)]])
def test_labels_of_whole_floats_are_whole_numbers(tmp_path, values):
    store = write(tmp_path, [{'cls':value} for value in values])
    assert store.manifest.vocab['cls']==[1, 2, 3] and [store[i]['cls'] for i in range(3)]==[1, 3, 2]

@pytest.mark.parametrize('value', [.5, np.float32(1.5), torch.tensor(2.25), float('nan')])
def test_other_floats_are_no_labels(tmp_path, value):
    with pytest.raises(IngestError, match='cls: label .* is no whole number: .* target.f4'):
        write(tmp_path, [{'cls':value}])

@pytest.mark.parametrize('url', [' s3://key:hidden@bucket/x', '\ts3://key:hidden@bucket/x ',
    ' redis://:hidden@localhost:1'])
def test_a_url_with_a_blank_before_it_is_no_path(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((StoreError,ValueError)) as error: ShardStore(url, timeout=.1)
    assert 'hidden' not in str(error.value) and not list(tmp_path.iterdir())
