"""Patches of fastai's classes: ours call what was there before, and what protects results does not depend on them

fastcore's `patch` keeps only what was there before the first patch of all, as `_orig_…`."""
import pytest

# What another extension does before this package is imported, and after it
FOREIGN = '''
from fastai.vision.all import *
from fastai.data.core import FilteredBase
from fastai.distributed import DistributedTrainer
import fastai.vision.widgets as widgets
from functools import partial, wraps
from types import SimpleNamespace
called = []
owners = [FilteredBase, TfmdLists, Datasets, DataLoaders, DataLoader, TfmdDL, DataBlock, TransformBlock, Learner,
          DistributedTrainer, widgets.ImagesCleaner, widgets.ImageClassifierCleaner, Transform, Pipeline, TensorBase]
def attributes(): return {(owner.__name__, name):id(value) for owner in owners for name,value in vars(owner).items()}
def patch_all(when):
    @patch
    def test_dl(self:DataLoaders, test_items, *args, **kwargs):
        called.append(when)
        return self._orig_test_dl(test_items, *args, **kwargs)
    @patch
    def setup(self:TfmdLists, train_setup=True):
        called.append(when)
        return self._orig_setup(train_setup)
    @patch
    def dataloaders(self:FilteredBase, *args, **kwargs):
        called.append(when)
        return self._orig_dataloaders(*args, **kwargs)
'''
CODE = FOREIGN+'''
when = sys.argv[1]
if when=='before':
    patch_all(when)
    widgets._get_iw_info = wraps(widgets._get_iw_info)(lambda learn, ds_idx=0: [('of another extension',)])
before = attributes()
from fastai_remote import *
import fastai_remote.block, fastai_remote.load.kinds
now = attributes()
changed = sorted('.'.join(key) for key in now if now[key]!=before.get(key))
assert changed==['DataLoaders.from_redis', 'DataLoaders.from_shards', 'DataLoaders.from_store', 'DataLoaders.test_dl',
                 'DataLoaders.tune', 'ImagesCleaner.set_fns', 'Learner.batch_at', 'Learner.fit', 'TfmdDL.__new__',
                 'TfmdLists.setup'], changed
if when=='after': patch_all(when)

store = MemoryStore({'x.f4':np.arange(16, dtype='f4'), 'cls':np.zeros(16, np.uint8)}, vocab={'cls':['a']})
stored = dict(x='x.f4', bs=4, num_workers=0, device='cpu')
dls = DataLoaders.from_store(store, on_bad='skip', **stored)
assert set(called)=={when}
called.clear()
assert dls.train.in_place is dls.valid.in_place is False and dls.test_dl([1, 2]).in_place and called==[when]
assert not dls.test_dl([1, 2], on_bad='skip').in_place
for make in dls.test_dl, partial(DataLoaders.from_store, store):
    try: make(**(dict(test_items=[1, 2]) if make==dls.test_dl else stored), shufle=True)
    except TypeError as e: assert "knows no 'shufle'; did you mean 'shuffle'" in str(e), e
    else: raise AssertionError(make)
stock = TfmdLists(range(4), [lambda x: x+1]).dataloaders(bs=2, num_workers=0)   # loaders that are not ours
assert stock.test_dl([5]).one_batch().tolist()==[6]
if when=='before':
    shown = widgets._get_iw_info(SimpleNamespace(dls=DataLoaders.from_store(store, **stored)))
    assert [list(o) for o in shown]==[['of another extension']], shown
'''

@pytest.mark.slow
def test_patches_of_other_extensions_are_called_before_and_after_us(interpreters):
    runs = [interpreters.start(CODE, when) for when in ('before','after')]
    for run in runs:
        ended = run.wait()
        assert ended.returncode==0, ended.stderr[-2000:]
