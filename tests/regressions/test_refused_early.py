"What no kind of target can read is refused when it is written, and names the sample"
import numpy as np
import pytest

from inputs import in_memory

@pytest.mark.parametrize('field', ['mask.npy','mask.npz','depth.mask.npy'])
@pytest.mark.parametrize('wrong', [np.full((2,2), 256), np.full((2,2), -1), np.ones((2,2), 'f4'),
    np.ones((2,2,3), 'u1'), np.array([['a']])], ids=lambda a: f'{a.dtype} {a.shape}')
def test_arrays_that_are_no_masks(field, wrong):
    codes = np.array([[0,255]], 'u1')
    def pack(a): return {'a':a} if field.endswith('npz') else a
    store,report = in_memory([{field:codes, 'n.i8':0}, {field:wrong, 'n.i8':1}, {field:codes[...,None], 'n.i8':2}])
    assert report.written==2 and [name for name,_ in report.failures]==['item 1'] and field in report.failures[0][1]

def test_arrays_that_are_not_called_masks_may_hold_anything():
    store,report = in_memory([{'codes.npy':np.full((2,2), 256)}])
    assert report.written==1

@pytest.mark.parametrize('prefix', ['boxes','person.boxes'])
@pytest.mark.parametrize('n_boxes,n_labels', [(2, 1), (1, 2), (0, 1), (1, 0)])
def test_boxes_and_labels_of_different_number(prefix, n_boxes, n_labels):
    def sample(n, m): return {f'{prefix}.npy':np.zeros((n,4), 'f4'), f'{prefix}.labels':['a']*m}
    store,report = in_memory([sample(2, 2), sample(n_boxes, n_labels), sample(0, 0)])
    (_,why), = report.failures
    assert report.written==2 and f'{n_boxes} boxes' in why and f'{n_labels} labels' in why
