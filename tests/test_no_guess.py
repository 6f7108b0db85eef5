"What could be read in two ways, or would come back changed, is an error when it is written"
import datetime

import numpy as np
import pyarrow as pa
import pytest
import torch
from fastai.data.core import DataLoaders

from fastai_remote import *

polars = pytest.importorskip('polars')
OPTIONS = dict(num_workers=1, progress=False, shuffle=False)

class Birds:
    "Two classes have one name"
    classes = ['crane','owl','crane','gull']
    def __len__(self): return 40
    def __getitem__(self, i): return np.full(3, i), i%4

def test_a_label_that_is_there_twice(server, tmp_path):
    "Its codes could not be told apart. Classes of a dataset get their numbers, as ImageNet has two cranes"
    match = "vocab of 'cls': the label 'crane' is there twice, as codes 0 and 2: give vocab= with another name"
    for write in (lambda **kw: to_redis(Birds(), server.url, 'birds', **kw, **OPTIONS), lambda **kw: to_shards(Birds(), tmp_path/'d', **kw, **OPTIONS)):
        report = write()
        assert report.failed==0 and "classes that share a name are called 'crane (0)', 'crane (2)'; vocab= names them" in str(report)
        with pytest.raises(ValueError, match=match): write(vocab=Birds.classes, overwrite=True)
    for store in RedisStore(server.url, 'birds'),ShardStore(tmp_path/'d'):
        assert store.class_counts()=={'crane (0)':10, 'owl':10, 'crane (2)':10, 'gull':10}

class Digits:
    classes = [3,7]
    def __len__(self): return 4
    def __getitem__(self, i): return np.full(3, i), self.targets[i]

def test_classes_that_are_numbers(server):
    "A label may be a class or its position, unless these are the same; the kind of the vocabulary tells"
    for targets,vocab,want in (([3,7,7,3],[3,7],[3,7,7,3]), ([0,1,1,0],['3','7'],['3','7','7','3'])):
        digits = Digits()
        digits.targets = targets
        with pytest.raises(ValueError, match=r'classes of Digits are numbers, \[3, 7\], so that a label may be a class or its position'):
            to_redis(digits, server.url, 'digits', overwrite=True, **OPTIONS)
        to_redis(digits, server.url, 'digits', vocab=vocab, overwrite=True, **OPTIONS)
        assert [RedisStore(server.url, 'digits')[i]['cls'] for i in range(4)]==want

@pytest.mark.parametrize('vocab', [[('a',1),('b',2)], [.5,1.5], ['a',None], [['a'],['b']]], ids=str)
def test_labels_are_texts_and_integers(tmp_path, vocab):
    with pytest.raises(ValueError, match="vocab of 'cls': a label is a text or an integer, not"):
        to_shards([{'cls':label if isinstance(label, (str,int)) else 'a'} for label in vocab], tmp_path/'d', vocab=vocab, **OPTIONS)
    assert not (tmp_path/'d').exists() or not list((tmp_path/'d').glob('*.tar'))

@pytest.mark.parametrize('vocab', ['ab', {'a'}, {'cls':{0:'a', 1:'b'}}, {'cls':'ab'}, {'cls':5}, 5, b'ab'], ids=str)
def test_a_vocabulary_has_an_order(tmp_path, vocab):
    with pytest.raises(TypeError, match="vocab of 'cls': want a list of labels, in the order of their codes, not the"):
        to_shards([{'cls':'a'},{'cls':'b'}], tmp_path/'d', vocab=vocab, **OPTIONS)

@pytest.mark.parametrize('field,value', [('txt','a'), ('index',1), ('json',1)])
def test_a_vocabulary_of_a_field_without_labels(tmp_path, field, value):
    with pytest.raises(ValueError, match=f"names labels of '{field}', which has none: it is stored as {field}"):
        to_shards([{field:value, 'cls':'a'}], tmp_path/'d', vocab={field:['a','b']}, **OPTIONS)

@pytest.mark.parametrize('splits', [{1:.5, '1':.5}, {'':.5, 'valid':.5}, {'a\ud800':1.}], ids=ascii)
def test_names_of_splits_that_cannot_be_told_apart(tmp_path, splits):
    with pytest.raises(ValueError, match="two splits are called '1'|a split without a name|cannot be stored"):
        to_shards([{'txt':'a'}]*2, tmp_path/'d', splits=splits, **OPTIONS)

@pytest.mark.parametrize('value', [b'abc', bytearray(b'abc'), memoryview(b'abc'), np.array(3), np.float32(1)],
    ids=lambda value: type(value).__name__)
def test_one_value_is_no_source(tmp_path, value):
    for source in value, {'train':value}:
        with pytest.raises(TypeError, match='one value, and no samples'): to_shards(source, tmp_path/'d', **OPTIONS)

@pytest.mark.parametrize('names', [(1,'1'), ('','valid')], ids=str)
def test_names_of_splits_of_a_source(tmp_path, names):
    with pytest.raises(ValueError, match="two splits are called '1'|a split without a name"):
        to_shards({name:[{'txt':'a'}] for name in names}, tmp_path/'d', **OPTIONS)

@pytest.mark.parametrize('size,n', [(np.float32(.25), 2), (np.float64(.25), 2), (np.int64(3), 3)])
def test_sizes_of_splits_may_be_numbers_of_numpy(tmp_path, size, n):
    to_shards([{'txt':'a'}]*10, tmp_path/'d', splits={0:None, 'valid':size}, **OPTIONS)
    assert ShardStore(tmp_path/'d').splits=={'0':[0,10-n], 'valid':[10-n,10]}

@pytest.mark.parametrize('size', ['3', True, [1], 1.5, -1, float('nan')])
def test_sizes_of_splits_that_are_none(tmp_path, size):
    with pytest.raises(ValueError, match='a split has a number of samples, a fraction of them, or None for the rest, not'):
        to_shards([{'txt':'a'}]*10, tmp_path/'d', splits={'train':None, 'valid':size}, **OPTIONS)

@pytest.mark.parametrize('plan', ['{"a":1}', '{"n":1,"chunk":0,"generation":1,"prefix":"shard","signature":""}', '{"n":"1"}', '[]', '{}'])
@pytest.mark.parametrize('is_there', [False,True])
def test_a_plan_of_another_kind_is_damaged(tmp_path, plan, is_there):
    "It is said what drops it"
    if is_there: to_shards([{'txt':'a'}], tmp_path/'d', **OPTIONS)
    (tmp_path/'d'/'.ingest').mkdir(parents=True, exist_ok=True)
    (tmp_path/'d'/'.ingest'/'plan.json').write_text(plan)
    for call in (lambda: to_shards([{'txt':'a'}], tmp_path/'d', overwrite=True, **OPTIONS), lambda: ShardStore.unfinished(tmp_path/'d')):
        with pytest.raises(StoreError, match='plan of an unfinished ingest, .ingest/plan.json, is damaged: .*ShardStore.abandon'): call()
    ShardStore.abandon(tmp_path/'d')
    to_shards([{'txt':'a'}], tmp_path/'d', overwrite=True, **OPTIONS)

def test_a_label_that_is_a_list_is_named(tmp_path):
    with pytest.raises(IngestError, match=r"TypeError: cls: label \['a'\]: a label is a text or an integer"):
        to_shards([{'cls':['a']}], tmp_path/'d', vocab=['a','b'], **OPTIONS)

def put_texts(url):
    to_redis([{'txt':'a'},{'txt':'b'}], url, 'no labels', **OPTIONS)
    return RedisStore(url, 'no labels')

def test_labels_of_numpy(server):
    to_redis([{'cls':3},{'cls':5}], server.url, 'numpy', vocab=np.array([3,5]), **OPTIONS)
    to_redis([{'cls':'a'},{'cls':'b'}], server.url, 'texts', vocab=np.array(['a','b']), **OPTIONS)
    assert RedisStore(server.url, 'numpy').vocab==[3,5] and RedisStore(server.url, 'texts').vocab==['a','b']
    with RedisStore.writer(server.url, 'rows', {'cls':'b'}, vocab=np.array(['b','a'])) as write:
        write.commit(list(write([{'cls':'a'},{'cls':'b'}])))
    assert RedisStore(server.url, 'rows').vocab==['b','a']
    vocab = {'cls2.cls':np.array(['y','x'])}
    more = RedisStore(server.url, 'rows').add_fields({'cls2.cls':['y','x']}, vocab=vocab, num_workers=1)
    assert more.manifest.vocab['cls2.cls']==['y','x']
    store = put_texts(server.url).add_fields({'cls':['y','x']}, vocab=np.array(['y','x']), num_workers=1)
    assert store.vocab==['y','x']
    days = [np.datetime64('2020-01-01','ns'), np.datetime64('2021-01-01','D')]
    for samples in ([{'cls':day} for day in days], [{'labels':[day]} for day in days]):
        with pytest.raises(IngestError, match='a label is a (text or an integer|str or an int)'): to_redis(samples, server.url, 'days', **OPTIONS)

def test_labels_in_arrays_without_dimensions_are_labels(server, tmp_path):
    "A text, a number, and a time, which is none; in new samples, in new fields and in edits"
    labels = [np.array('a'), 'b', np.array('b'), 'a']
    to_redis([{'cls':label} for label in labels], server.url, 'scalars', **OPTIONS)
    to_shards([{'cls':label} for label in labels], tmp_path/'d', **OPTIONS)
    for store in (RedisStore(server.url, 'scalars'), ShardStore(tmp_path/'d')):
        store = store.add_fields(lambda o: {'new.cls':np.array('x')}, num_workers=1, progress=False)
        store = store.edit(set={'cls':{0:np.array('b'), 2:np.array('c')}})
        assert [store[i] for i in range(4)]==[{'cls':label, 'new.cls':'x'} for label in 'bbca']
        with pytest.raises(IngestError, match='a label is a text or an integer'):
            store.edit(set={'cls':{0:np.array('2020-01-01', 'M8[ns]')}})
    for time in (np.array('2020-01-01', 'M8[ns]'), np.array(3, 'm8[ns]')):
        with pytest.raises(IngestError, match='a label is a text or an integer'):
            to_redis([{'cls':time}], server.url, 'times', **OPTIONS)
        with pytest.raises(TypeError, match='a label is a text or an integer'):
            to_redis([{'cls':1}], server.url, 'times', vocab=[time], **OPTIONS)

def test_the_hint_shows_the_label(server):
    to_redis([{'cls':1},{'cls':2}], server.url, 'hint', **OPTIONS)
    with pytest.raises(ValueError, match="no label '1' in field 'cls': did you mean 1"): get_remote_items(RedisStore(server.url, 'hint')).where('cls', '1')

@pytest.mark.parametrize('kind', ['redis','shards'])
@pytest.mark.parametrize('split', ['splits','random'])
def test_balance_counts_the_samples_of_the_split(server, tmp_path, kind, split):
    "Training is balanced by its own labels, not by those of the validation set, too"
    rows = {'train':[{'n.i4':i, 'cls':'b' if i<30 else 'a'} for i in range(300)],
            'valid':[{'n.i4':i, 'cls':'b' if i<270 else 'a'} for i in range(300)]}
    if split=='random': rows = rows['train']
    name = f'balance {split}'
    if kind=='redis': to_redis(rows, server.url, name, **OPTIONS)
    else: to_shards(rows, tmp_path/'d', maxcount=50, **OPTIONS)
    store = RedisStore(server.url, name) if kind=='redis' else ShardStore(tmp_path/'d')
    splitter = None if split=='splits' else RandomStoreSplitter(.2, seed=1)
    dls = DataLoaders.from_store(store, x='n.i4', y='cls', bs=50, num_workers=0, balance='cls', device='cpu', splitter=splitter, seed=1)
    numbers = np.array([*dls.train.dataset.items])
    codes = store.get_many(numbers, 'cls')['cls']
    weights = dls.train.dataset.items.class_weights('cls')
    assert np.allclose(weights[codes].mean(), 1) and np.allclose(weights[0]*(codes==0).sum(), weights[1]*(codes==1).sum())
    drawn = torch.cat([y for _ in range(20) for _,y in dls.train]).bincount()
    assert drawn.min()>.45*drawn.sum()

@pytest.mark.parametrize('type', [pa.bool_(), pa.int32(), pa.float32()], ids=str)
def test_a_value_that_is_missing_in_an_array(server, type):
    "It is no False and no NaN"
    table = pa.table({'f':pa.array([[1,0],[1,None]], pa.list_(pa.int8(), 2)).cast(pa.list_(type, 2))})
    report = to_redis(table, server.url, f'missing {type}', max_failed=1, **OPTIONS)
    assert report.failed==1 and 'missing' in next(iter(RedisStore(server.url, f'missing {type}').failures()))[1]
    assert RedisStore(server.url, f'missing {type}')[0]['f'].tolist()==[1,0]

TIMES = [123456789, 123456000, 0, 3_600_000_000_000+5, None]
TEXTS = ['00:00:00.123456789','00:00:00.123456','00:00:00','01:00:00.000000005']

@pytest.mark.parametrize('library', ['arrow','polars'])
def test_nanoseconds_of_a_time_of_day(server, library):
    times = pa.array(TIMES, pa.time64('ns'))
    table = pa.table({'t':times, 'i':range(5)})
    if library=='polars': table = polars.from_arrow(table)
    report = to_redis(table, server.url, f'times {library}', max_failed=1, **OPTIONS)
    store = RedisStore(server.url, f'times {library}')
    assert report.failed==1 and [store[i]['t'] for i in range(4)]==TEXTS
    nested = pa.table({'t':pa.array([[123456789]], pa.list_(pa.time64('ns')))})
    if library=='polars': nested = polars.from_arrow(nested)
    with pytest.raises(TypeError, match="column 't' has the type .*: nanoseconds in lists and structs are not kept"):
        to_redis(nested, server.url, 'nested', **OPTIONS)

def test_nested_times_of_polars(server):
    "Microseconds are kept, nanoseconds are an error"
    whole = polars.DataFrame({'t':[[datetime.datetime(2020, 1, 2, 3, 4, 5, 6)]]})
    to_redis(whole, server.url, 'whole', **OPTIONS)
    assert RedisStore(server.url, 'whole')[0]['t']==['2020-01-02T03:04:05.000006']
    with pytest.raises(TypeError, match="column 't'.*nanoseconds"):
        to_redis(whole.with_columns(polars.col('t').cast(polars.List(polars.Datetime('ns')))), server.url, 'ns', **OPTIONS)

def test_a_tensor_with_permuted_dimensions(server):
    storage = pa.array([[1,2,3,4,5,6]], pa.list_(pa.int32(), 6))
    def table(**kw): return pa.table({'f':pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int32(), [2,3], **kw), storage)})
    with pytest.raises(TypeError, match="column 'f' is a tensor with permuted dimensions"): to_redis(table(permutation=[1,0]), server.url, 'permuted', **OPTIONS)
    for k,kw in enumerate([{}, {'permutation':[0,1]}]):
        to_redis(table(**kw), server.url, f'straight {k}', **OPTIONS)
        assert RedisStore(server.url, f'straight {k}')[0]['f'].tolist()==[[1,2,3],[4,5,6]]

def test_members_of_a_structured_array_replace_no_other_array(server):
    records = np.array([(1,2)], dtype=[('cls','i4'),('b','i4')])
    for arrays in ({'npy':records, 'cls':np.array([5])}, {'cls':np.array([5]), 'npy':records}):
        with pytest.raises(ValueError, match="two arrays are called 'cls'"): to_redis(arrays, server.url, 'records', **OPTIONS)
