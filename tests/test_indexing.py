"One position is an int, a NumPy integer, or an array or tensor of no dimensions; wherever a position is taken"
import numpy as np
import pytest
import torch
from fastai.vision.all import DataLoaders, L

from fastai_remote import *
from fastai_remote.order.base import Order, WeightedOrder

ONE = {'int':3, 'int64':np.int64(3), 'uint8':np.uint8(3), 'array':np.array(3), 'tensor':torch.tensor(3), 'small tensor':torch.tensor(3, dtype=torch.uint8)}
NONE = {'bool':True, 'numpy bool':np.bool_(True), 'array of a bool':np.array(True), 'tensor of a bool':torch.tensor(True), 'float':3., 'float64':np.float64(3),
        'tensor of a float':torch.tensor(3.), 'str':'3', 'None':None}

@pytest.fixture(scope='module')
def taken(redis_pics):
    "Things that take a position, each with how to compare two of its answers"
    dls = DataLoaders.from_store(redis_pics, num_workers=0, bs=4)
    return {'store':redis_pics, 'items':dls.valid_ds.items, 'all items':get_remote_items(redis_pics), 'datasets':dls.valid_ds, 'RemoteDataset':RemoteDataset(redis_pics).to_tuple('jpg', 'cls'),
            'Order':Order(50), 'WeightedOrder':WeightedOrder(60, lambda i: i%2, [0,1])}

WHERE = 'store', 'items', 'all items', 'datasets', 'RemoteDataset', 'Order', 'WeightedOrder'

def plain(o):
    "Something that can be compared"
    if isinstance(o, dict): return {k:plain(v) for k,v in o.items()}
    if isinstance(o, (tuple,list)): return [plain(v) for v in o]
    return o.tobytes() if hasattr(o, 'tobytes') and hasattr(o, 'size') and hasattr(o, 'mode') else int(o) if isinstance(o, torch.Tensor) else o

@pytest.mark.parametrize('where', WHERE)
@pytest.mark.parametrize('i', ONE.values(), ids=ONE)
def test_one_position(taken, where, i):
    want,got = taken[where][3],taken[where][i]
    assert type(got) is type(want) and plain(got)==plain(want)

@pytest.mark.parametrize('where', WHERE)
def test_negative_positions_count_from_the_end(taken, where):
    for i in -2,np.int64(-2),torch.tensor(-2): assert plain(taken[where][i])==plain(taken[where][len(taken[where])-2])
    for i in len(taken[where]),torch.tensor(len(taken[where])),np.array(-len(taken[where])-1):
        with pytest.raises(IndexError): taken[where][i]

@pytest.mark.parametrize('where', WHERE)
@pytest.mark.parametrize('i', NONE.values(), ids=NONE)
def test_what_is_no_position_is_refused(taken, where, i):
    if where=='datasets' and isinstance(i, str): return   # fastcore makes numbers of its characters
    with pytest.raises(TypeError): taken[where][i]

MANY = {'list':[1,2], 'array':np.array([1,2]), 'tensor':torch.tensor([1,2]), 'L':L(1,2), 'tuple':(1,2), 'list of tensors':[torch.tensor(1),torch.tensor(2)], 'slice':slice(1,3), 'range':range(1,3)}

@pytest.mark.parametrize('i', MANY.values(), ids=MANY)
def test_several_positions(taken, i):
    items,dsets = taken['items'],taken['datasets']
    assert list(items[i])==[items[1],items[2]] and isinstance(items[i], RemoteItems)
    assert plain([*dsets[i]])==plain([dsets[1],dsets[2]])

def test_masks_and_nothing(taken):
    items = taken['items']
    mask = [k in (1,2) for k in range(len(items))]
    for m in mask,np.array(mask),torch.tensor(mask): assert list(items[m])==[items[1],items[2]]
    for i in [],np.array([], int),slice(0): assert list(items[i])==[]
    for m in mask[1:],[*mask,True],np.array([], bool),torch.ones(3, dtype=torch.bool):
        with pytest.raises(IndexError, match=f'a mask must have {len(items)} values'): items[m]
    for i in np.array([2**64-1], np.uint64),[2**63]:
        with pytest.raises(IndexError, match='out of range'): items[i]

@pytest.mark.parametrize('numbers', [0, np.array(0), [[0,1]], [[0],[1,2]], np.zeros((2,2), int), {1}, 'one', None], ids=str)
def test_what_are_no_sample_numbers_is_refused(redis_pics, numbers):
    with pytest.raises(TypeError, match=f'{redis_pics.name}: sample numbers must be a list or an array with one number'): redis_pics.get_many(numbers, 'cls')

@pytest.mark.parametrize('where', ['items','Order','WeightedOrder'])
@pytest.mark.parametrize('i', [[1.5,2.], np.array([1.,2.]), ['a']], ids=str)
def test_fractions_are_not_cut_off(taken, where, i):
    with pytest.raises(TypeError, match='positions must be integers'): taken[where][i]

def test_positions_of_an_order_with_weights_are_those_of_any_order(taken):
    order = taken['WeightedOrder']
    draws = list(order)
    assert len(draws)==60 and order[[0,-1,59]].tolist()==[draws[0],draws[59],draws[59]]
    assert order.numbers_at(np.arange(60)%7==3).tolist()==draws[3::7]
    for wrong in ([60], [-61], range(50, 61)):
        with pytest.raises(IndexError, match='out of range'): order[wrong]
    with pytest.raises(IndexError, match='a mask must have 60 values'): order[[True,False]]
    with pytest.raises(TypeError, match='sliced'): order[1:3]
    with pytest.raises(TypeError, match='sliced'): order[Order(3)]
    later = order.at(range(58, 70, 2))   # there is no last draw
    assert list(later[[0,-1]])==[draws[58],order.at(range(68, 69))[0]] and len(later)==6

@pytest.mark.parametrize('i', [[1,2], (1,2), np.array([1,2]), torch.tensor([1,2])], ids=str)
def test_one_at_a_time_where_only_one_can_be_had(taken, i):
    with pytest.raises(TypeError, match='one sample.*get_many'): taken['store'][i]
    with pytest.raises(TypeError, match='one sample.*__getitems__'): taken['RemoteDataset'][i]
