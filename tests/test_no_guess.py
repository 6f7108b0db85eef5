"What could be read in two ways, or would come back changed, is an error when it is written"
import numpy as np
import pytest

from inputs import column, in_memory
from fastai_remote import *

ALONE = dict(num_workers=1, progress=False)

class Classes:
    "Two values each: an array, and a class"
    def __init__(self, classes, targets): self.classes,self.targets = classes,targets
    def __len__(self): return len(self.targets)
    def __getitem__(self, i): return np.full(3, i), self.targets[i]

BIRDS = Classes(['crane','owl','crane','gull'], [0,1,2,3]*2)

def test_a_label_that_is_there_twice():
    "Its codes could not be told apart. Classes of a dataset get their numbers, as ImageNet has two cranes"
    store,report = in_memory(BIRDS)
    assert "classes that share a name are called 'crane (0)', 'crane (2)'; vocab= names them" in str(report)
    assert column(store, 'cls')==['crane (0)','owl','crane (2)','gull']*2
    match = "vocab of 'cls': the label 'crane' is there twice, as codes 0 and 2: give vocab= with another name"
    with pytest.raises(ValueError, match=match): in_memory(BIRDS, vocab=BIRDS.classes)

def test_classes_that_are_numbers():
    "A label may be a class or its position, unless these are the same; the kind of the vocabulary tells"
    for targets,vocab,want in ([3,7,7,3],[3,7],[3,7,7,3]), ([0,1,1,0],['3','7'],['3','7','7','3']):
        digits = Classes([3,7], targets)
        match = r'classes of Classes are numbers, \[3, 7\], so that a label may be a class or its position'
        with pytest.raises(ValueError, match=match): in_memory(digits)
        assert column(in_memory(digits, vocab=vocab)[0], 'cls')==want

TWO,TEN = [{'cls':'a'},{'cls':'b'}],[{'txt':'a'}]*10
REFUSED = [
    *((ValueError, "vocab of 'cls': a label is a text or an integer, not", TWO, dict(vocab=vocab))
        for vocab in ([('a',1),('b',2)], ['a',None], [['a'],['b']])),
    *((ValueError, 'UTF-8', source, dict(vocab=vocab)) for source,vocab in
        ((TWO,['a','caf\udce9']), ([{'labels':['a']}],{'labels':['caf\udce9']}))),
    (TypeError, 'a label is a text or an integer', TWO, dict(vocab=[np.array('2020-01-01', 'M8[ns]')])),
    *((TypeError, "vocab of 'cls': want a list of labels, in the order of their codes, not the", TWO, dict(vocab=vocab))
        for vocab in ('ab', {'a'}, {'cls':{0:'a', 1:'b'}}, {'cls':'ab'}, 5, b'ab')),
    *((ValueError, f"names labels of '{field}', which has none: it is stored as {field}", [{field:value, 'cls':'a'}],
        dict(vocab={field:['a','b']})) for field,value in (('txt','a'), ('index',1))),
    *((ValueError, "two splits are called '1'|a split without a name|cannot be stored", TEN, dict(splits=splits))
        for splits in ({1:.5, '1':.5}, {'':.5, 'valid':.5}, {'a\ud800':1.})),
    *((ValueError, "two splits are called '1'|a split without a name", {name:TEN for name in names}, {})
        for names in ((1,'1'), ('','valid'))),
    *((ValueError, 'a split has a number of samples, a fraction of them, or None for the rest, not', TEN,
        dict(splits={'train':None, 'valid':size})) for size in ('3', True, [1], 1.5, -1, float('nan'))),
    *((TypeError, 'one value, and no samples', source, {})
        for value in (b'abc', memoryview(b'abc'), np.array(3)) for source in (value, {'train':value})),
    (IngestError, r"TypeError: cls: label \['a'\]: a label is a text or an integer", [{'cls':['a']}],
        dict(vocab=['a','b'])),
    *((IngestError, 'a label is a (text or an integer|str or an int)', [{field:value}], {})
        for time in (np.datetime64('2020-01-01','ns'), np.array(3, 'm8[ns]'))
        for field,value in (('cls',time), ('labels',[time]))),
    *((ValueError, 'split|samples of|take', TEN, dict(splits=splits)) for splits in
        ({'t':.5, 'v':.4}, {'t':5, 'v':4}, {'t':None, 'v':None}, {'t':None, 'v':11}))]

@pytest.mark.parametrize('error,match,source,options', REFUSED)
def test_what_has_two_meanings_or_none_is_refused(tmp_path, error, match, source, options):
    "Before anything is there"
    with pytest.raises(error, match=match): to_shards(source, tmp_path/'d', **ALONE, **options)
    assert not [*tmp_path.rglob('*.tar')]

def test_sizes_of_splits_may_be_numbers_of_numpy():
    for size,n in (np.float32(.25),2), (np.float64(.25),2), (np.int64(3),3):
        assert in_memory(TEN, splits={0:None, 'valid':size})[0].splits=={'0':[0,10-n], 'valid':[10-n,10]}

def test_labels_of_numpy(put):
    "As a vocabulary, and as labels in arrays without dimensions; in new samples, in new fields and in edits"
    assert in_memory([{'cls':3},{'cls':5}], vocab=np.array([3,5]))[0].vocab==[3,5]
    labels = [np.array('a'), 'b', np.array('b'), 'a']
    store,_ = put([{'cls':label} for label in labels], shuffle=False, vocab=np.array(['b','a']))
    assert store.vocab==['b','a']
    store = store.add_fields({'new.cls':list('yxxx')}, vocab={'new.cls':np.array(['y','x'])}, **ALONE)
    store = store.add_fields(lambda o: {'third.cls':np.array('z')}, **ALONE)
    store = store.edit(set={'cls':{0:np.array('b'), 2:np.array('c')}})
    assert store.manifest.vocab['new.cls']==['y','x']
    assert store[:]==[{'cls':c, 'new.cls':new, 'third.cls':'z'} for c,new in zip('bbca', 'yxxx')]
    with pytest.raises(IngestError, match='a label is a text or an integer'):
        store.edit(set={'cls':{0:np.array('2020-01-01', 'M8[ns]')}})

def test_a_vocabulary_of_numpy_for_partitions_and_for_the_first_labels(server):
    with RedisStore.writer(server.url, 'rows', {'cls':'b'}, [len(TWO)], vocab=np.array(['b','a'])) as write:
        list(write(0, TWO))
        write.commit()
    assert RedisStore(server.url, 'rows').vocab==['b','a']
    to_redis(TEN[:2], server.url, 'no labels', **ALONE)
    store = RedisStore(server.url, 'no labels')
    assert store.add_fields({'cls':['y','x']}, vocab=np.array(['y','x']), num_workers=1).vocab==['y','x']

def test_the_hint_shows_the_label():
    items = get_remote_items(in_memory([{'cls':1},{'cls':2}])[0])
    with pytest.raises(ValueError, match="no label '1' in field 'cls': did you mean 1"): items.where('cls', '1')
