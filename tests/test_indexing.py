"One position is an int, a NumPy integer, or an array or tensor of no dimensions; wherever a position is taken"
import copy, pickle

import numpy as np
import pytest
import torch
from fastai.vision.all import DataLoaders, L

from fastai_remote import RemoteDataset, RemoteItems, get_remote_items
from fastai_remote.order.base import Order, WeightedOrder

THREE = [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3, dtype=torch.uint8)]
NO_POSITIONS = [True, np.bool_(True), torch.tensor(True), 3., np.array(3.), torch.tensor(3.), None]

@pytest.fixture(scope='module')
def taken(redis_pics):
    "Objects that take a position"
    dls = DataLoaders.from_store(redis_pics, num_workers=0, bs=4)
    return {
        'store':redis_pics, 'items':dls.valid_ds.items, 'all items':get_remote_items(redis_pics),
        'datasets':dls.valid_ds, 'RemoteDataset':RemoteDataset(redis_pics).to_tuple('jpg', 'cls'),
        'Order':Order(50), 'WeightedOrder':WeightedOrder(60, lambda i: i%2, [0,1])}

def plain(o):
    "Something that can be compared"
    if isinstance(o, dict): return {k:plain(v) for k,v in o.items()}
    if isinstance(o, (tuple,list)): return [plain(v) for v in o]
    if hasattr(o, 'tobytes') and hasattr(o, 'mode'): return o.tobytes()
    return int(o) if isinstance(o, torch.Tensor) else o

@pytest.mark.parametrize('where', ['store','items','all items','datasets','RemoteDataset','Order','WeightedOrder'])
def test_one_position_may_be_an_integer_of_any_kind(taken, where):
    "Negative ones count from the end; what is no integer, or out of range, is refused"
    takes = taken[where]
    n,want = len(takes),takes[3]
    for i in THREE:
        assert type(takes[i]) is type(want) and plain(takes[i])==plain(want), i
    for i in -2,torch.tensor(-2): assert plain(takes[i])==plain(takes[n-2])
    assert plain(takes[-n])==plain(takes[0])
    for i in n,torch.tensor(n),np.array(-n-1):
        with pytest.raises(IndexError): takes[i]
    for i in NO_POSITIONS:
        with pytest.raises(TypeError): takes[i]
    if where!='datasets':   # fastcore makes numbers of the characters of a text
        with pytest.raises(TypeError): takes['3']

def test_several_positions(taken):
    items,dsets = taken['items'],taken['datasets']
    tensors = [torch.tensor(1),torch.tensor(2)]
    for i in [1,2],np.array([1,2]),torch.tensor([1,2]),L(1,2),(1,2),tensors,slice(1,3),range(1,3):
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

def test_what_are_no_sample_numbers_is_refused(redis_pics):
    message = f'{redis_pics.name}: sample numbers must be a list or an array with one number'
    for numbers in 0,np.array(0),[[0],[1,2]],np.zeros((2,2), int),{1},'one',None:
        with pytest.raises(TypeError, match=message): redis_pics.get_many(numbers, 'cls')

def test_fractions_are_not_cut_off(taken):
    for where in 'items','Order','WeightedOrder':
        for i in [1.5,2.],np.array([1.,2.]),['a']:
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

def test_one_at_a_time_where_only_one_can_be_had(taken):
    for where,instead in ('store','get_many'),('RemoteDataset','__getitems__'):
        for i in [1,2],(1,2),np.array([1,2]),torch.tensor([1,2]):
            with pytest.raises(TypeError, match=f'one sample.*{instead}'): taken[where][i]

def test_items_are_an_L(redis_pics):
    "As those of a folder are; they are not copied, and what only `L` has makes a list of numbers"
    items = get_remote_items(redis_pics)
    part = items[2:10:2]
    assert isinstance(part, L) and L(items) is items and L(part) is part and len(L(part))==4
    assert part.map(str)==['2','4','6','8'] and part.filter(lambda i: i>4)==[6,8]
    assert part.argwhere(lambda i: i>4)==[2,3]
    assert type(part.sorted(reverse=True)) is L and part.sorted(reverse=True)==[8,6,4,2] and part.enumerate()[1]==(1,4)
    for same in copy.copy(part), copy.deepcopy(part), part.copy(), pickle.loads(pickle.dumps(part)):
        assert type(same) is RemoteItems and same==part and list(same)==[2,4,6,8]
    assert 6 in part and 3 not in part and list(reversed(part))==[8,6,4,2] and f'{part}'==repr(part)
    with pytest.raises(TypeError): part[0] = 3
    with pytest.raises(AttributeError): _ = part.no_such_method
