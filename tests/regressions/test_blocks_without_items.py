"A `DataBlock` without `get_items=get_remote_items`, to which a store is one item"
import pytest
from fastai.data.block import DataBlock
from fastai.data.core import Datasets
from fastai.data.transforms import RandomSplitter
from inputs import in_memory

from fastai_remote import RandomStoreSplitter, RedisBlock

@pytest.fixture(scope='module')
def store(): return in_memory([{'x.f4':i, 'cls':'ab'[i%2]} for i in range(8)])[0]

@pytest.mark.parametrize('splitter', [None, RandomSplitter(.5), RandomStoreSplitter(.25)])
def test_the_error_says_what_is_missing(store, splitter):
    dblock = DataBlock((RedisBlock('x.f4'), RedisBlock('cls')), splitter=splitter)
    with pytest.raises(TypeError, match=r'is no item: give DataBlock\(get_items=get_remote_items\)'):
        dblock.dataloaders(store)

def test_items_that_are_a_store(store):
    with pytest.raises(TypeError, match='is no item'): Datasets(store, [RedisBlock(store, 'cls').type_tfms])
