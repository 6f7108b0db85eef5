"What no kind of target can read is refused when it is written, and names the sample"
import numpy as np
import pytest

from inputs import in_memory

@pytest.mark.parametrize('field', ['mask.npy','mask.npz','depth.mask.npy'])
def test_arrays_that_are_no_masks(field):
    codes = np.array([[0,255]], 'u1')
    wrong = [np.full((2,2), 256), np.full((2,2), -1), np.ones((2,2), 'f4'), np.ones((2,2,3), 'u1'), np.array([['a']])]
    store,report = in_memory([{field:mask} for mask in (codes, *wrong, codes[...,None])])
    assert report.written==2 and [name for name,_ in report.failures]==[f'item {i}' for i in range(1, 6)]
    assert all(field in why for _,why in report.failures)

def test_arrays_that_are_not_called_masks_may_hold_anything():
    store,report = in_memory([{'codes.npy':np.full((2,2), 256)}])
    assert report.written==1

@pytest.mark.parametrize('prefix', ['boxes','person.boxes'])
def test_boxes_and_labels_of_different_number(prefix):
    def sample(n, m): return {f'{prefix}.npy':np.zeros((n,4), 'f4'), f'{prefix}.labels':['a']*m}
    wrong = [(2,1), (1,2), (0,1), (1,0)]
    _,report = in_memory([sample(*numbers) for numbers in ((2,2), *wrong, (0,0))])
    assert report.written==2 and len(report.failures)==4
    for (_,why),(n_boxes,n_labels) in zip(report.failures, wrong):
        assert f'{n_boxes} boxes' in why and f'{n_labels} labels' in why
