"Datasets of PyTorch that are written as its documentation shows: streams with a length, labels in a dict, tensors"
import pytest
import torch
from PIL import Image
from torch.utils.data import ChainDataset, IterableDataset

from fastai_remote import IngestError
from inputs import in_memory

def picture(i): return Image.new('RGB', (8, 8), (i, 0, 0))

# --- A dataset that can only be gone through may have a length. PyTorch gives it a `__getitem__`, too, which raises

class Stream(IterableDataset):
    "`(picture, label)` of numbers from `start` to `stop`"
    def __init__(self, start, stop): self.numbers = range(start, stop)
    def __iter__(self): return ((picture(i), i%2) for i in self.numbers)

class StreamWithLength(Stream):
    def __len__(self): return len(self.numbers)

@pytest.mark.parametrize('source,n', [(StreamWithLength(0, 6), 6), (ChainDataset([Stream(0, 4), Stream(4, 6)]), 6),
    ({'train':StreamWithLength(0, 4), 'valid':StreamWithLength(4, 6)}, 6)], ids=['length','chain','splits'])
def test_a_stream_with_a_length_is_a_stream(source, n):
    store,report = in_memory(source)
    assert (report.written,report.failed)==(n,0) and store.fields==['png','cls']
    assert [store[i]['png'].getpixel((0, 0))[0] for i in range(n)]==list(range(n))

class BothWays(StreamWithLength):
    "Has an index, too, as the streams of MosaicML and LitData"
    def __getitem__(self, i): return picture(self.numbers[i]),i%2

def test_a_stream_that_has_an_index_is_read_by_its_index(): assert in_memory(BothWays(0, 6))[1].written==6

# --- Values of a dict

class Items:
    "A dataset of `function(i)`"
    def __init__(self, function): self.function = function
    def __len__(self): return 6
    def __getitem__(self, i): return self.function(i)

@pytest.mark.parametrize('label', [lambda i: i%2, lambda i: 'ab'[i%2], lambda i: torch.tensor(i%2), lambda i: i%2==0],
                         ids=['number','text','tensor','bool'])
def test_one_label_under_the_key_labels_is_a_class(label):
    store,report = in_memory(Items(lambda i: {'image':picture(i), 'labels':label(i)}))
    assert store.fields==['image.png','cls'] and report.failed==0
    assert [store[i]['cls'] for i in range(6)]==[label(i) for i in range(6)]
    assert "item['labels'] -> cls" in str(report)

def test_keys_for_one_label_and_for_several():
    store,_ = in_memory(Items(lambda i: {'image':picture(i), 'label':i%2, 'labels':'ab'[i%2]}))
    assert store.fields==['image.png','cls','labels.cls'] and store[1]['labels.cls']=='b'
    store,_ = in_memory(Items(lambda i: {'image':picture(i), 'labels':['a','b'][:i%3]}))
    assert store.fields==['image.png','labels'] and store[2]['labels']==['a','b']

def test_a_tensor_that_requires_a_gradient_is_stored():
    store,_ = in_memory(Items(lambda i: (torch.full((3,), i, dtype=torch.float32, requires_grad=True), i%2)))
    assert store.fields==['npy','cls'] and store[2]['npy'].tolist()==[2, 2, 2]

def test_a_tensor_that_is_no_array_is_named():
    with pytest.raises(IngestError, match='BFloat16'):
        in_memory(Items(lambda i: (torch.zeros(3, dtype=torch.bfloat16), i%2)))
