"Parts of a dataset that are chosen by the values of a field: `where`, `FieldSplitter` and `KFoldSplitter`"
import pickle, tracemalloc, warnings
from functools import partial

import numpy as np
import pandas as pd
import pytest
from fastai.data.block import DataBlock
from fastai.data.core import DataLoaders
from fastai.data.transforms import ColSplitter, RandomSplitter
from fastcore.foundation import L

from inputs import Computed, in_memory, write_tar
from fastai_remote import (CorruptSample, FieldSplitter, get_remote_items, index_shards, KFoldSplitter, MemoryStore,
    MissingSample, Permutation, RandomStoreSplitter, RemoteItems, ShardStore, to_shards, UnknownField)
from fastai_remote.load.prefetch import reads_whole_shards
from fastai_remote.load.splitters import default_splitter
from fastai_remote.order.base import Order, SplitOrder
from fastai_remote.order.shards import ShardFolds

N,labels = 230,['cat','cow','dog']
rng = np.random.default_rng(0)
frame = pd.DataFrame({'x.f4':np.arange(N)/8, 'cls':rng.choice(labels, N, p=[.5,.2,.3]), 'is_valid':rng.random(N)<.3,
                      'age':rng.integers(0, 90, N)})
tags = [sorted(set(rng.choice(['big','small','red'], 2))) for _ in range(N)]
samples = [{**row, 'labels':some, 'txt':str(i)} for i,(row,some) in enumerate(zip(frame.to_dict('records'), tags))]
SPLITS = {'train':samples[:200], 'valid':samples[200:]}
OPTIONS = dict(num_workers=1, progress=False, shuffle=False)

@pytest.fixture(scope='module', params=['memory','shards'])
def data(request, tmp_path_factory):
    if request.param=='memory': return in_memory(SPLITS)[0]
    to_shards(SPLITS, folder := tmp_path_factory.mktemp('d'), maxcount=20, **OPTIONS)
    return ShardStore(folder)

def numbers(mask): return np.flatnonzero(np.asarray(mask)).tolist()

CHOSEN = [
    ('cls', 'cat', frame.cls=='cat'), ('cls', {'cat','dog'}, frame.cls!='cow'),
    ('cls', lambda names: np.char.startswith(names, 'c'), frame.cls!='dog'),
    ('is_valid', True, frame.is_valid), ('is_valid', 0, ~frame.is_valid),
    ('age', [3,50,70], frame.age.isin([3,50,70])), ('age', np.array([5,6]), frame.age.isin([5,6])),
    ('age', range(40, 9, -3), frame.age.isin(range(40, 9, -3))),
    ('age', lambda ages: (ages>20)&(ages%2==0), (frame.age>20)&(frame.age%2==0)),
    ('x.f4', [.125, 3], frame['x.f4'].isin([.125, 3])), ('labels', 'red', ['red' in o for o in tags]),
    ('labels', ['red','big'], [bool({'red','big'}&{*o}) for o in tags]),
    ('cls;nothing', 'cow', frame.cls=='cow'), ('labels;nothing?', 'red', ['red' in o for o in tags])]

def test_items_with_these_values(data):
    for field,values,want in CHOSEN:
        items = get_remote_items(data).where(field, values)
        assert [*items]==numbers(want) and items.is_complete and isinstance(items, RemoteItems), (field, values)
        assert [*get_remote_items(data, where={field:values})]==numbers(want)
    assert data.vocab==labels

def test_the_order_of_the_items_is_kept(data):
    items = get_remote_items(data)
    for part in items[Order(range(10, N), Permutation(N, 3))], items[[5,3,5,3,0,9,8,7]], items[7:100]:
        assert [*part.where('cls', 'dog')]==[i for i in part if frame.cls[i]=='dog']
    both = items.where('cls', 'dog').where('is_valid', True)
    assert [*both]==numbers((frame.cls=='dog')&frame.is_valid) and both.is_complete and not both[1:].is_complete
    assert [*pickle.loads(pickle.dumps(both))]==[*both]

@pytest.mark.parametrize('error,match,field,values', [
    (ValueError, "no label 'cta' in field 'cls': did you mean 'cat'", 'cls', ['dog','cta']),
    (ValueError, "no label 'x' in field 'labels': there are 3, such as 'big', 'red', 'small'", 'labels', 'x'),
    (ValueError, 'no label .pig. in field', 'cls;nothing?', 'pig'), (UnknownField, "no field 'clss'", 'clss', 'cat'),
    (TypeError, "chosen by labels or numbers, and 'txt' holds txt; .*'cls', 'is_valid'", 'txt', '3'),
    (TypeError, "field 'age' holds numbers .*, not 'cat'", 'age', 'cat'),
    (ValueError, r"none of 230 items has \[200, 300\] in 'age'", 'age', [200,300]),
    (ValueError, 'must return a bool for each value, not int64', 'age', lambda ages: ages*2),
    (TypeError, "field 'cls' has labels, which are texts or integers, not ", 'cls', {'cat':1}),
    (TypeError, "field 'labels' has labels, which are texts or integers, not ", 'labels', [['red']])])
def test_values_that_cannot_be_are_named(data, error, match, field, values):
    with pytest.raises(error, match=match): get_remote_items(data).where(field, values)
    with pytest.raises(TypeError, match=r'where= takes a dict, \{field: values\}, not '):
        get_remote_items(data, where=[field])

def test_a_function_gets_labels_as_they_are():
    "Texts and integers of one vocabulary stay what they are"
    store = MemoryStore({'cls':np.array([0,1,2,1], 'u1')}, vocab={'cls':[1,'1',2]})
    assert [*get_remote_items(store).where('cls', lambda labels: labels==1)]==[0]
    assert [*get_remote_items(store).where('cls', lambda labels: labels=='1')]==[1,3]

def test_a_function_is_not_blamed_where_there_are_no_labels():
    items = get_remote_items(in_memory([{'tags.labels':[], 'txt':'a'}]*3)[0])
    def function(labels): return [o.startswith('a') for o in labels]
    with pytest.raises(ValueError, match="d: none of 3 items has values that .* chooses in 'tags.labels'"):
        items.where('tags.labels', function)
    assert not FieldSplitter('tags.labels', function)(items)[1]
    with pytest.raises(ValueError, match="no label 'a' in field 'tags.labels': there are none$"):
        items.where('tags.labels', 'a')

def test_a_code_outside_of_the_vocabulary_is_an_error_that_names_the_sample():
    "Whatever reads the labels; counted, it would give more weights than labels"
    store = MemoryStore({'cls':np.array([0,1,1,7], 'u1')}, 'd', vocab={'cls':['a','b']})
    store.manifest.counts = {'cls':[1,2]}
    items = get_remote_items(store)
    for read in (lambda: items.where('cls', 'a'), items[1:].class_weights, lambda: FieldSplitter('cls', 'a')(items),
                 lambda: KFoldSplitter(2, stratify='cls')(items)):
        with pytest.raises(CorruptSample, match="d: sample 3, field 'cls': code 7, but there are 2 labels"): read()
    assert items[:3].class_weights().tolist()==[1.5,.75]

whole = np.array([0, 1, 7, 127, 2**24+1, 2**53, 2**53+1, 2**63-1])
odd_values = [*whole.tolist(), -128, -2**63, 2**63, 2**64-1, 2**64, 10**400, .1, 7., 2.**53, 2.**63, float('inf'),
              float('nan'), True, np.float32(.1), np.uint64(2**63), np.int64(2**53+1)]
odd_ranges = [range(7, -9, -2), range(2**53+1, 2**70, 2), range(2**63, 2**64), range(0, 10**30, 10**29), range(0)]

@pytest.mark.parametrize('dtype', ['i1','i8','u1','u4','u8','f2','f4','f8','bool'])
def test_numbers_are_compared_exactly(dtype):
    "As Python compares them, not as 64-bit floats; a fraction is rounded to the width of the field, as the stored one"
    kind = np.dtype(dtype).kind
    limits = [0, 2**70] if kind in 'fb' else [np.iinfo(dtype).min, np.iinfo(dtype).max]
    extra = {'f':[.1, .5, np.inf, -np.inf, np.nan, 2.**63, -2.**63], 'b':[]}.get(kind, limits)
    some = [v for v in whole.tolist() if v<=limits[1]]
    with np.errstate(over='ignore'): stored = np.array([*some, *extra], object).astype(dtype)
    items = get_remote_items(MemoryStore({f'x.{dtype}':stored}, 'd'))
    def found(values):
        try: return [*items.where(f'x.{dtype}', values)]
        except ValueError as e:
            assert 'none of' in str(e)
            return []
    for value in odd_values:
        want = value.item() if hasattr(value, 'item') else value
        if kind=='f' and type(want) is float:
            with np.errstate(over='ignore'): rounded = stored.dtype.type(want).item()
            want = None if np.isinf(rounded) and not np.isinf(want) else rounded
        assert found(value)==[k for k,v in enumerate(stored.tolist()) if v==want], value
        assert found([value, 1])==[k for k,v in enumerate(stored.tolist()) if v in (want, 1)], value
    # A float is looked up as the integer that it equals: Python would go through the whole range
    whole_values = [(k, int(v)) for k,v in enumerate(stored.tolist()) if np.isfinite(v) and v==int(v)]
    for values in odd_ranges: assert found(values)==[k for k,v in whole_values if v in values], values

# --- loaders and splitters

def test_loaders_of_a_part(data):
    "Splits of the store are those of the samples that are left; the vocabulary stays that of the store"
    where = {'cls':['cat','dog'], 'age':range(20, 90)}
    dls = DataLoaders.from_store(data, 'x.f4', 'cls', where=where, bs=8, num_workers=0)
    want = (frame.cls!='cow')&(frame.age>=20)
    assert [*dls.train_ds.items]==numbers(want[:200]) and [*dls.valid_ds.items]==[200+i for i in numbers(want[200:])]
    assert dls.vocab==labels
    assert [float(x) for xb,_ in dls.valid for x in xb]==(frame['x.f4'][200:][want[200:]]).tolist()
    assert sorted(int(x*8) for xb,_ in dls.train.new(drop_last=False) for x in xb)==numbers(want[:200])
    if data.shards is None: return
    sizes = get_remote_items(data, where={'cls':['cat','dog']}).shard_sizes
    assert sizes.tolist()==[int((frame.cls[k:k+20]!='cow').sum()) for k in range(0, N, 20)]

def test_a_field_divides_as_the_splitter_of_fastai(data):
    "`ColSplitter` on a table gives the same items in the same order"
    items,table = get_remote_items(data),frame.assign(tag=frame.cls)
    for field,column,values in ('is_valid','is_valid',(None,True,1,[True])), ('cls','tag',('cat',['cat','cow'])):
        for on in values:
            parts = FieldSplitter(field, on=on)(items)
            assert [[*items[part]] for part in parts]==[[*part] for part in ColSplitter(column, on=on)(table)]
            if data.shards is not None and field!='cls': assert reads_whole_shards(items[parts[0]])

def test_a_field_divides_a_part_of_the_items(data):
    items = get_remote_items(data)
    shuffled = items[Order(N, Permutation(N, 3))]
    train,valid = FieldSplitter()(shuffled)
    assert [*shuffled[valid]]==[i for i in shuffled if frame.is_valid[i]] and len(train)+len(valid)==N
    dogs = items.where('cls', 'dog')
    train,_ = FieldSplitter()(dogs)
    assert [*dogs[train]]==numbers((frame.cls=='dog')&~frame.is_valid)
    if data.shards is not None: assert dogs[train].shard_sizes.sum()==len(train)
    with pytest.raises(ValueError, match="'cls' has labels: FieldSplitter"): FieldSplitter('cls')(items)
    with pytest.raises(ValueError, match="did you mean 'cow'"): FieldSplitter('cls', on='coww')(items)
    with pytest.raises(TypeError, match='get_items=get_remote_items'): FieldSplitter()(list(range(4)))

def uneven(counts): return max(counts)-min(counts)

@pytest.mark.parametrize('n_folds,stratify', [(7,None), (3,'cls')])
def test_each_sample_is_in_one_validation_fold(data, n_folds, stratify):
    for make in (lambda o: o), (lambda o: o.where('age', range(80))), (lambda o: o[[3,1,2,9,8,7,6,5]]):
        items = make(get_remote_items(data))
        def fold(k, seed=1): return [items[part] for part in KFoldSplitter(n_folds, k, seed, stratify)(items)]
        folds = [[[*part] for part in fold(k)] for k in range(n_folds)]
        assert folds==[[[*part] for part in fold(k)] for k in range(n_folds)]
        assert all(sorted(train+valid)==sorted(items) for train,valid in folds)
        assert sorted(i for _,valid in folds for i in valid)==sorted(items)
        assert uneven([len(valid) for _,valid in folds])<=1
        if stratify:
            assert all(uneven([sum(frame.cls[i]==label for i in valid) for _,valid in folds])<=1 for label in labels)
        if len(items)<9: continue
        assert [*fold(0, seed=2)[1]]!=folds[0][1]
        for part in fold(1) if data.shards is not None else ():   # each item lies in the shard that `shard_sizes` says
            shards = data.shards.at(np.array([*part]))[0]
            assert (np.bincount(shards, minlength=len(data.shards))==part.shard_sizes).all()

def test_arguments_of_folds(data):
    items = get_remote_items(data)
    for bad in ((1,0),(5,5),(5,.5),(2.5,0)):
        with pytest.raises(ValueError, match='n_folds'): KFoldSplitter(*bad)
    with pytest.raises(ValueError, match='3 items cannot be divided into 5'): KFoldSplitter()(items[:3])
    with pytest.raises(TypeError, match="one label for each sample, and 'age' holds"):
        KFoldSplitter(stratify='age')(items)
    dls = DataLoaders.from_store(data, 'x.f4', 'cls', splitter=KFoldSplitter(5, 2), bs=8, num_workers=0)
    seen = [float(x)*8 for xb,_ in dls.valid for x in xb]
    assert seen==[*dls.valid_ds.items] and len(seen)==46
    assert {*map(int, seen)}.isdisjoint(int(x*8) for xb,_ in dls.train for x in xb)
    assert [*pickle.loads(pickle.dumps(dls.train_ds.items))]==[*dls.train_ds.items]

def test_folds_of_shards_of_any_size_differ_by_one():
    for n_folds in 2,5:
        folds = [ShardFolds([7,0,3,20,1], n_folds, k, 4) for k in range(n_folds)]
        parts = [[o[np.arange(len(o))] for o in (fold.valid, fold.train)] for fold in folds]
        assert all(sorted([*valid, *train])==list(range(31)) for valid,train in parts)
        assert sorted(np.concatenate([valid for valid,_ in parts]))==list(range(31))
        assert uneven([len(valid) for valid,_ in parts])<=1 and folds[0]==pickle.loads(pickle.dumps(folds[0]))!=folds[1]

def test_samples_without_the_field(tmp_path):
    fields = [(i, (('txt','t'), ('age.u1',i), ('cls',i%3))[:3 if i%2 else 1]) for i in range(20)]
    write_tar(tmp_path/'a.tar', [(f'{i:03}.{f}', str(value).encode()) for i,some in fields for f,value in some])
    index_shards(tmp_path, num_workers=1, progress=False)
    items = get_remote_items(ShardStore(tmp_path))
    assert [*items.where('age.u1', lambda ages: ages>10)]==[11,13,15,17,19] and [*items.where('cls', 1)]==[1,7,13,19]
    with pytest.raises(MissingSample, match='not every sample has this field'): FieldSplitter('age.u1')(items)

MADE = {'is_valid':lambda numbers: (numbers%5==0).astype('i8'), 'cls':lambda numbers: (numbers%8).astype('u1')}

@pytest.mark.parametrize('make', [
    lambda items: [items.where('cls', ['a','c'])], lambda items: [items.where('is_valid', True).where('cls', 'a')],
    FieldSplitter(), KFoldSplitter(5, 1), KFoldSplitter(5, 1, stratify='cls')])
def test_a_sample_more_takes_less_than_five_bits(make):
    peaks = []
    for n in 400_000,1_200_000:
        tracemalloc.start()
        parts = make(get_remote_items(Computed(n, MADE, vocab={'cls':list('abcdefgh')})))
        peaks.append(tracemalloc.get_traced_memory()[1])
        for part in parts:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            part.numbers_at(np.random.default_rng(0).integers(0, len(part), 64))
            assert tracemalloc.get_traced_memory()[1]-before<2e6
        tracemalloc.stop()
    assert peaks[1]-peaks[0]<5*800_000/8

def test_labels_of_a_part_are_drawn_equally_often():
    "The weights of `balance=` are those of the samples that are left, and not of all samples"
    n = 2000
    cls,age = np.arange(n, dtype='u1')%2,np.arange(n)%20
    columns = {'x.f4':np.arange(n, dtype='f4'), 'cls':cls, 'age':np.where(cls==0, age, 0)}
    store = MemoryStore(columns, 'uneven', vocab={'cls':['a','b']})
    store.manifest.counts = {'cls':[n//2, n//2]}
    dls = DataLoaders.from_store(store, 'x.f4', 'cls', where={'age':0}, balance='cls', bs=50, num_workers=0,
                                 splitter=RandomStoreSplitter(0., 0))
    drawn = np.concatenate([y.numpy() for _,y in dls.train])
    assert np.bincount(cls[[*dls.train_ds.items]]).tolist()==[100,1000] and .4<drawn.mean()<.6
    with pytest.raises(ValueError, match="labels of 'age' are not counted"): dls.train_ds.items.class_weights('age')

@pytest.mark.parametrize('items', [pd.DataFrame({'n':range(40)}, index=range(100, 140)), np.arange(40), L(range(40))],
                         ids=lambda items: type(items).__name__)
def test_random_splits_of_items_that_are_not_of_a_store(items):
    "As fastai's `RandomSplitter` divides them: no item is in both parts"
    for splitter in (RandomSplitter(.2, seed=1), RandomStoreSplitter(.2, 1), KFoldSplitter(5, 3, 1)):
        dsets = DataBlock(splitter=splitter).datasets(items)
        assert [len(dsets.train),len(dsets.valid)]==[32,8] and {*splitter(items)[0]}.isdisjoint(splitter(items)[1])
    want = RandomStoreSplitter(.2, 1)(Order(40))   # the same samples, which are computed for a store
    assert isinstance(want[0], SplitOrder) and [[*part] for part in want]==RandomStoreSplitter(.2, 1)(items)
    if isinstance(items, pd.DataFrame):   # which would take it for a slice of everything
        with pytest.raises(TypeError, match='only items of a store'): items.iloc[want[0]]

def test_wrong_arguments_of_splitters_are_refused_at_once():
    store = MemoryStore({'x.f4':np.zeros(10)}, 'd', splits={'train':[0,5], 'valid':[5,10]})
    for valid_pct in -.1, 20, float('nan'):
        with pytest.raises(ValueError, match='valid_pct must lie in 0..1'): RandomStoreSplitter(valid_pct)
    with pytest.raises(ValueError, match='valid_pct must lie in 0..1'):
        DataLoaders.from_store(store, 'x.f4', 'x.f4', valid_pct=20)
    for make in partial(RandomStoreSplitter, .2), KFoldSplitter:
        with pytest.raises(ValueError, match='seed is an integer of at least 0, not '): make(seed=1.5)

@pytest.mark.parametrize('splits,want', [
    ('train valid', 'train valid'), ('TRAIN Test', 'TRAIN Test'), ('train val Validation', 'train val'),
    ('Training Train train dev test', 'train test'), ('train test validation', 'train validation'),
    ('', None), ('train', None), ('all', None),
    ('train dev', "splits are 'train', 'dev', and none is called 'valid' or"),
    ('training valid', "none is called 'train': they are ignored"), ('valid', "none is called 'train'"),
    ('training test', "train on samples of 'test'"), ('Test', "train on samples of 'Test'")])
def test_the_default_splitter_never_ignores_splits_silently(splits, want):
    ranges = {name:[10*k,10*k+10] for k,name in enumerate(splits.split())}
    store = MemoryStore({'x.f4':np.zeros(60)}, 'd', splits=ranges)
    def found(make=lambda: default_splitter(store)): return [[*part] for part in make()(get_remote_items(store))]
    at_random = found(RandomStoreSplitter)
    if want and 'train on' in want:
        with pytest.raises(ValueError, match=want): found()
    elif want and 'none is called' in want:
        with pytest.warns(UserWarning, match=rf'^d: the .*{want}.*StoreSplitter\('): assert found()==at_random
    else:
        with warnings.catch_warnings(action='error'): got = found()
        assert got==([[*range(*ranges[name])] for name in want.split()] if want else at_random)
