"""Numbers that stand for labels mean the same wherever samples of two datasets meet

WebDataset reads `cls` as the number that is in the tar."""
import pytest
from in_memory import in_memory
from inputs import write_tar
from torch.utils.data import DataLoader

from fastai_remote import index_shards, mix, RemoteDataset, ShardStore, StoreExists, UnknownField
from fastai_remote.load.mix import RandomMix, RoundRobin

def written(name, labels, field='cls'):
    return in_memory([{'txt':f'{name}{i}', field:label} for i,label in enumerate(labels)], name=name)

def labels_of(dataset, field='cls'): return [sample[field] for sample in dataset]

@pytest.mark.parametrize('labels', [[5,-3,5,900], [2,0,2], [1<<40]])
def test_labels_that_are_whole_numbers_are_these_numbers(labels):
    dataset = RemoteDataset(written('d', labels))
    assert labels_of(dataset)==labels and dataset[-1]['cls']==labels[-1]
    assert labels_of(dataset.stream())==labels and type(dataset[0]['cls']) is int
    pairs = dataset.to_tuple('cls', 'txt')
    assert [n for numbers,_ in DataLoader(pairs, batch_size=2) for n in numbers.tolist()]==labels
    assert [n for numbers,_ in pairs.batched(2, shuffle=False) for n in numbers.tolist()]==labels

def test_a_sample_without_a_label_has_none(tmp_path):
    write_tar(tmp_path/'a.tar', [('1.txt',b'x'), ('1.cls',b'7'), ('2.txt',b'y'), ('3.txt',b'z'), ('3.cls',b'5')])
    index_shards(tmp_path, num_workers=0, progress=False)
    assert [sample.get('cls') for sample in RemoteDataset(ShardStore(tmp_path))]==[7,None,5]

@pytest.mark.parametrize('field', ['cls','kind.cls'])
def test_codes_of_a_named_vocabulary(field):
    store,vocab = written('d', ['ship','car','ship'], field),['bus','car','plane','ship']
    dataset = RemoteDataset(store, vocab=vocab if field=='cls' else {field:vocab})
    assert labels_of(dataset, field)==[3,1,3] and sorted(labels_of(dataset.shuffle(1), field))==[1,3,3]
    assert labels_of(dataset[1:], field)==[1,3] and labels_of(RemoteDataset(store), field)==[1,0,1]
    with pytest.raises(ValueError, match="d: label 'ship' is not in the vocab of"):
        RemoteDataset(store, vocab={field:['bus','car']})

def test_names_for_labels_that_are_numbers():
    dataset = RemoteDataset(written('d', [0,2,2]), vocab=['bus','car','plane'])
    assert labels_of(dataset)==[0,2,2]
    with pytest.raises(ValueError, match='label 2 is not in the vocab'):
        RemoteDataset(dataset.store, vocab=['bus','car'])

@pytest.mark.parametrize('wrong,message', [
    ({'txt':['a']}, "'txt', which has no codes"), ({'clss':['a']}, "no field 'clss'"), ('ab', 'a list of labels'),
    (['a','a'], 'there twice')])
def test_a_vocabulary_that_does_not_fit(wrong, message):
    with pytest.raises((ValueError,TypeError,UnknownField), match=message):
        RemoteDataset(written('d', ['a','b']), vocab=wrong)

joins = [mix, RandomMix, RoundRobin, lambda datasets: mix([datasets[0], mix(datasets[1:])]),
         lambda datasets: mix([dataset.shuffle(9).decode() for dataset in datasets]),
         lambda datasets: mix([dataset.batched(1) for dataset in datasets])]

LETTERS = ['a','b','c'],['a','c']

@pytest.mark.parametrize('join,labels', [
    *((join, LETTERS) for join in joins), (mix, (['x','y'],['y','z'])), (mix, ([0,1],['no','yes']))])
def test_datasets_with_other_codes_are_not_mixed(join, labels):
    stores = [written(f'd{k}', one) for k,one in enumerate(labels)]
    with pytest.raises(ValueError, match="'cls' have different codes.*vocab="):
        join([RemoteDataset(store) for store in stores])
    if isinstance(labels[0][0], str):
        vocab = sorted({*labels[0], *labels[1]})
        join([RemoteDataset(store, vocab=vocab) for store in stores])
    join([RemoteDataset(store).to_tuple('txt') for store in stores])   # no label is read

def test_mixed_samples_have_the_labels_of_one_vocabulary():
    a,b = written('a', ['a','b','c']),written('b', ['c','a'])
    vocab = ['c','b','a']
    mixed = mix([RemoteDataset(store, vocab=vocab) for store in (a,b)]).decode()
    expected = {'a0':'a', 'a1':'b', 'a2':'c', 'b0':'c', 'b1':'a'}
    assert {sample['txt']:vocab[sample['cls']] for sample in mixed}==expected
    numbers = written('c', [3,1]),written('d', [1,2,3])
    assert sorted(labels_of(mix([RemoteDataset(store) for store in numbers])))==[1,1,2,3,3]

# --- tars of others

def tars(folder, **labels):
    "Writes a tar for each keyword: its `cls` members, or `cls.txt` for texts"
    for name,values in labels.items():
        members = [[(f'{k:03}.txt',b'x'), (f'{k:03}.cls' if isinstance(value, int) else f'{k:03}.cls.txt',
                    f'{value}'.encode())] for k,value in enumerate(values)]
        write_tar(folder/f'{name}.tar', sum(members, []))
    return folder

def indexed(folder, **kwargs):
    report = index_shards(folder, num_workers=0, progress=False, **kwargs)
    return ShardStore(folder),report

@pytest.mark.parametrize('labels', [['dog','cat'], [2,1]])
def test_tars_are_indexed_with_a_named_vocabulary(tmp_path, labels):
    vocab = ['bird','cat','dog']
    store,_ = indexed(tars(tmp_path, a=labels), vocab=vocab)
    assert store.vocab==vocab and labels_of(RemoteDataset(store))==[2,1]
    assert store[0]['cls']=='dog' and store.manifest.counts['cls']==[0,1,1]
    tars(tmp_path, b=['bird'])
    store,_ = indexed(tmp_path)   # more tars have the codes of the first
    assert store.vocab==vocab and labels_of(RemoteDataset(store))==[2,1,0] and not store.verify(progress=False).bad

def test_a_label_outside_of_the_vocabulary_fails_its_sample(tmp_path):
    store,report = indexed(tars(tmp_path, a=['cat','dgo',*['dog']*30]), vocab=['cat','dog'])
    assert len(store)==31 and "label 'dgo' is not in the vocab of 'cls'" in str(report.failures)
    with pytest.raises(StoreExists, match='vocab'): indexed(tars(tmp_path, b=['cat']), vocab=['dog','cat'])
    with pytest.raises(ValueError, match="vocab= names labels of 'kind'"):
        indexed(tmp_path, vocab={'kind':['a']}, overwrite=True)

@pytest.mark.parametrize('other', [b'["z"]', b'[0]', b'["x",2]'])   # a number is no code of one of several labels
def test_several_labels_outside_of_the_vocabulary(tmp_path, other):
    write_tar(tmp_path/'a.tar', [(f'{k}.labels', b'["x","y"]' if k else other) for k in range(20)])
    store,report = indexed(tmp_path, vocab={'labels':['y','x','w']})
    assert len(store)==19 and store.manifest.vocab=={'labels':['y','x','w']}
