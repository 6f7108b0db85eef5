"""WebDataset's methods on `RemoteDataset`: WebDataset's own tests of them, the same chains on both, and loaders

A tar is made here. Many tests run one chain on `webdataset.WebDataset` and on `RemoteDataset` and compare the samples."""
import copy, gzip, io, itertools, json, multiprocessing, os, pickle, random, shutil, sys, tarfile, threading, warnings
from collections import Counter
from multiprocessing import context
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from conftest import draw, fails
from torch.utils.data import DataLoader

from fastai_remote import CorruptSample, MemoryStore, MissingSample, RemoteDataset, ShardStore, StoreError, UnknownField, index_shards, mix
from fastai_remote.load import steps
from fastai_remote.load.mix import RandomMix, RoundRobin
from fastai_remote.load.stream import Consumer, RemoteStream
from fastai_remote.order.base import Order

wds = pytest.importorskip('webdataset')
n = 47

def add(tar, name, content):
    (member:=tarfile.TarInfo(name)).size = len(content)
    tar.addfile(member, io.BytesIO(content))

def png(i):
    draw(i).save(f:=io.BytesIO(), 'PNG')
    return f.getvalue()

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "Three tars of 47 samples, with the fields of WebDataset's own test data"
    folder = tmp_path_factory.mktemp('tars')
    for shard,numbers in enumerate((range(20), range(20,40), range(40,n))):
        with tarfile.open(folder/f'{shard}.tar', 'w') as tar:
            for i in numbers:
                for field,content in (('cls',b'%d'%(i%3)), ('png',png(i)), ('wnid',b'n%08d'%i), ('xml',b'<a>%d</a>'%i),
                        ('json',json.dumps([i]*(i%4)).encode()), ('txt',f'text {i}'.encode())):
                    add(tar, f'{i:04}.{field}', content)
    index_shards(str(folder), num_workers=1, progress=False)
    return folder

@pytest.fixture(scope='module')
def store(folder): return ShardStore(str(folder))

@pytest.fixture
def ds(store): return RemoteDataset(store)

@pytest.fixture
def ref(folder):
    def make(**kwargs):
        return wds.WebDataset(sorted(map(str, folder.glob('*.tar'))), shardshuffle=False, empty_check=False, **kwargs)
    return make

def count(source, n=10_000):
    "WebDataset's own: all samples are tuples, dicts or lists"
    k = 0
    for sample in itertools.islice(source, n):
        assert isinstance(sample, (tuple, dict, list)), type(sample)
        k += 1
    return k

def plain(o):
    "Comparable, without metadata other than the key"
    if isinstance(o, dict): return {k:plain(v) for k,v in o.items() if not k.startswith('__') or k=='__key__'}
    if isinstance(o, (tuple,list)): return [type(o).__name__ if len(o) and isinstance(o, tuple) else 'list', *map(plain, o)]
    if isinstance(o, (np.ndarray,torch.Tensor)): return [type(o).__name__, str(o.dtype), tuple(o.shape), np.asarray(o).tolist()]
    if isinstance(o, PIL.Image.Image): return ['image', o.mode, o.size, o.tobytes()]
    return o

def keys(samples): return [sample['__key__'] if isinstance(sample, dict) else sample[0] for sample in samples]
def identity(x): return x
def odd(sample): return sample['cls']%2==1
def drop_zero(sample): return sample if sample['cls'] else None
def shout(key, data): return data.decode().upper() if key.endswith('txt') else None
def small(data): return PIL.Image.open(io.BytesIO(data)).resize((8, 8))
def numbers_of(it): return (sample for sample in it if sample['cls'])
numpy_collate = wds.filters.default_collation_fn

# --- the same chain on both

CHAINS = {
    'decode': lambda ds: ds.decode('pil'),
    'rgb': lambda ds: ds.decode('rgb').to_tuple('png;jpg', 'cls'),
    'rgb8, two alternatives': lambda ds: ds.decode('rgb8').to_tuple('jpg;png cls'),
    'torchrgb': lambda ds: ds.decode('torchrgb').to_tuple('png', 'cls', '__key__'),
    'pil': lambda ds: ds.decode('pil').to_tuple('png', 'json', 'wnid', 'xml'),
    'only': lambda ds: ds.decode('l', only=['png','cls','json']),
    'only as text': lambda ds: ds.decode(only='cls txt').to_tuple('png', 'txt'),
    'decoder': lambda ds: ds.decode(shout).to_tuple('txt', 'json'),
    'several decoders': lambda ds: ds.decode(shout, wds.handle_extension('png', small), 'pil'),
    'handle_extension': lambda ds: ds.decode(wds.handle_extension('jpg png', small)).to_tuple('png', 'cls'),
    'post': lambda ds: ds.decode('l', post=[shout]).to_tuple('png', 'txt', 'json'),
    'partial': lambda ds: ds.decode(only='txt').decode('pil', partial=True).to_tuple('txt', 'png'),
    'to_tuple lenient': lambda ds: ds.decode('pil').to_tuple('nothing', 'txt', missing_is_error=False),
    'to_tuple of lists': lambda ds: ds.decode('pil').to_tuple(['jpg','txt'], 'cls'),
    'to_tuple drops': lambda ds: ds.decode('pil').select(odd).to_tuple('cls', handler=wds.ignore_and_continue),
    'map_tuple': lambda ds: ds.decode('pil').to_tuple('txt', 'cls').map_tuple(str.upper, None),
    'map_tuple of one': lambda ds: ds.decode('pil').to_tuple('txt', 'cls').map_tuple(len),
    'map': lambda ds: ds.decode('pil').map(lambda sample: dict(new=sample['txt'])),
    'map drops': lambda ds: ds.decode('pil').map(drop_zero).to_tuple('__key__', 'cls'),
    'map handler': lambda ds: ds.decode('pil').map(lambda sample: dict(x=1//sample['cls']), handler=lambda e: True),
    'map_dict': lambda ds: ds.decode('pil').map_dict(txt=str.upper, cls=lambda c: c+1),
    'map_dict handler': lambda ds: ds.decode('pil').map_dict(json=lambda o: o[0], handler=wds.ignore_and_continue),
    'map_dict stops': lambda ds: ds.decode('pil').map_dict(txt=lambda t: 1//(int(t[5:])-30), handler=wds.ignore_and_stop),
    'rename': lambda ds: ds.decode('pil').rename(image='jpg;png', label='cls'),
    'rename only': lambda ds: ds.decode('pil').rename(image='png', keep=False),
    'rename drops all': lambda ds: ds.decode('pil').map_dict(txt=len).rename(a='txt').rename(b='txt', handler=wds.ignore_and_continue),
    'rename_keys': lambda ds: ds.decode('pil').rename_keys(('image','p*'), label='cls', keep_unselected=True),
    'rename_keys alone': lambda ds: ds.decode('pil').rename_keys(image='png', nothing='zip', must_match=False),
    'extract_keys': lambda ds: ds.decode('pil').extract_keys('*.png;*.jpg', 'cl*', '.txt'),
    'extract_keys lenient': lambda ds: ds.decode('pil').extract_keys('cls', 'gif', ignore_missing=True),
    'select': lambda ds: ds.decode('pil').select(odd),
    'select then decode': lambda ds: ds.decode(only='cls').select(odd).decode('rgb8', partial=True).to_tuple('png', 'cls'),
    'slice': lambda ds: ds.decode('pil').slice(10),
    'slice of three': lambda ds: ds.decode('pil').slice(3, 30, 7).to_tuple('txt'),
    'slice of what is left': lambda ds: ds.decode('pil').select(odd).slice(5).to_tuple('txt'),
    'slice to the end': lambda ds: ds.decode('pil').slice(40, None).to_tuple('txt'),
    'repeat': lambda ds: ds.decode('pil').to_tuple('txt').repeat(nepochs=2),
    'repeat by number': lambda ds: ds.decode('pil').to_tuple('txt').repeat(nbatches=60),
    'with_epoch': lambda ds: ds.decode('pil').to_tuple('txt').with_epoch(103),
    'short with_epoch': lambda ds: ds.decode('pil').to_tuple('txt').with_epoch(2),
    'batches': lambda ds: ds.decode('rgb8').map_dict(png=lambda a: a[:8,:8]).to_tuple('png', 'cls', 'txt')
        .slice(0, None).compose(identity).batched(7, collation_fn=numpy_collate),
    'batches of dicts': lambda ds: ds.decode(only='cls txt').to_tuple('cls', 'txt').map(lambda o: dict(c=o[0], t=o[1]))
        .compose(identity).batched(7, collation_fn=numpy_collate, partial=False),
    'lists': lambda ds: ds.decode('pil').to_tuple('txt', 'cls').listed(10),
    'unlisted': lambda ds: ds.decode('pil').to_tuple('txt', 'cls').listed(10).unlisted(),
    'unbatched': lambda ds: ds.decode('pil').to_tuple('txt', 'cls').compose(identity)
        .batched(10, collation_fn=numpy_collate).unbatched(),
    'unbatched dicts': lambda ds: ds.decode('pil').map(lambda s: dict(c=s['cls'], t=s['txt'])).compose(identity)
        .batched(10, collation_fn=None).map(lambda l: {k:[s[k] for s in l] for k in l[0]}).unbatched(),
    'rsample of all': lambda ds: ds.decode('pil').to_tuple('txt').rsample(1.),
    'rsample of none': lambda ds: ds.decode('pil').to_tuple('txt').rsample(0.),
    'compose': lambda ds: ds.decode('pil').compose(numbers_of, wds.filters.slice(5)).to_tuple('cls', 'txt'),
    'stages of WebDataset': lambda ds: ds.compose(wds.decode(partial=True), wds.to_tuple('txt', 'cls'),
        wds.batched(5), wds.unbatched()),
    'Cached': lambda ds: ds.decode('pil').to_tuple('txt').compose(wds.Cached()),
    'map after batched': lambda ds: ds.decode('pil').to_tuple('cls').listed(10).map(len),
    'decode after compose': lambda ds: ds.compose(identity).decode('pil', partial=True).to_tuple('png', 'cls', 'json'),
    'xdecode': lambda ds: ds.xdecode(png=lambda f: len(f.read()), wnid=False, must_decode=False).to_tuple('png', 'wnid', 'txt'),
}
@pytest.mark.parametrize('chain', CHAINS)
@pytest.mark.filterwarnings('ignore')
def test_the_samples_of_webdataset(ds, ref, chain):
    ours,theirs = (plain(list(CHAINS[chain](source))) for source in (ds, ref()))
    assert len(ours)==len(theirs) and ours==theirs
    assert ours or chain in ('rsample of none','rename drops all')

@pytest.mark.parametrize('chain', ['map drops','select','slice','rename','to_tuple drops','unlisted','compose'])
def test_all_samples_once_in_two_workers(ds, ref, chain):
    "Stages of a process come out in another order, but with the same samples"
    if chain=='compose': make = lambda ds: ds.decode('pil').compose(numbers_of).to_tuple('__key__', 'cls')
    else: make = lambda ds: CHAINS[chain](ds).map(plain)
    loader = DataLoader(make(ds.stream()), batch_size=None, num_workers=2, collate_fn=identity)
    assert sorted(map(repr, loader))==sorted(map(repr, make(ref())))

DICT_STEPS = dict(select=lambda ds: ds.select(odd), drop=lambda ds: ds.map(drop_zero), rename=lambda ds: ds.rename(label='txt').rename(txt='label'),
    map_dict=lambda ds: ds.map_dict(txt=str.title), slice=lambda ds: ds.slice(30), third=lambda ds: ds.slice(2, 40, 3),
    compose=lambda ds: ds.compose(numbers_of), stop=lambda ds: ds.map_dict(txt=lambda t: t[1//(t.find('40')+2):], handler=wds.ignore_and_stop),
    fail=lambda ds: ds.map_dict(cls=lambda c: 2//c, handler=wds.ignore_and_continue), lists=lambda ds: ds.listed(5).unlisted())
TUPLE_STEPS = dict(batches=lambda ds: ds.batched(7, collation_fn=numpy_collate).unbatched(), upper=lambda ds: ds.map_tuple(str.upper),
    slice=lambda ds: ds.slice(1, 20), lists=lambda ds: ds.listed(3).unlisted(), drop=lambda ds: ds.map(lambda o: o if o[1] else None))
ENDS = lambda ds: ds, lambda ds: ds.repeat(2), lambda ds: ds.with_epoch(37)   # of the whole chain, as in WebDataset

@pytest.mark.parametrize('seed', range(20))
def test_random_chains(ds, ref, seed):
    "Methods in any order give what WebDataset gives"
    rng = random.Random(seed)
    dicts,tuples = (rng.sample(list(o.values()), rng.randint(0, 4)) for o in (DICT_STEPS,TUPLE_STEPS))
    end = rng.choice(ENDS)
    def results(source):
        source = source.decode(only=['cls','txt'])
        for step in dicts: source = step(source)
        source = source.to_tuple('txt', 'cls').compose(identity)
        for step in tuples: source = step(source)
        try: return [(text,int(label)) for text,label in end(source)]
        except ValueError as e:   # where WebDataset has an epoch without samples
            assert 'nothing to repeat' in str(e)
            return []
    assert results(ds)==results(ref())

# --- WebDataset's own tests, by their names there

def test_dataset(ds): assert count(ds)==n

def test_dataset_resampled(store):
    ds = RemoteDataset(store, resampled=True)
    assert isinstance(ds, RemoteStream) and count(ds, 100)==100
    drawn = Counter(keys(itertools.islice(ds, 2000)))
    assert len(drawn)==n and max(drawn.values())>1
    with pytest.raises(TypeError, match='not known'): len(ds)
    assert len(ds.with_epoch(5))==5

def test_length(ds):
    assert len(ds)==n and len(ds.with_length(1793))==1793 and count(ds.with_length(1793))==n
    assert len(ds.repeat(17).with_length(19))==19
    with pytest.raises(TypeError, match=r'select\(odd\) is not known.*with_length'): len(ds.select(odd))
    assert len(ds.with_length(5).to_tuple('cls'))==5
    with pytest.raises(TypeError, match='not known'): len(ds.with_length(5).select(odd))

def test_dataset_shuffle_extract(ds): assert count(ds.shuffle(5).to_tuple('png;jpg cls'))==n

def test_dataset_context(ds):
    with ds.shuffle(5).to_tuple('png;jpg cls') as stream: assert count(stream)==n
    with ds as same: assert same is ds

def test_slice(ds):
    assert count(ds.shuffle(100).slice(10))==10==count(ds.slice(10))==len(ds.slice(10))==len(ds.shuffle().slice(10))
    assert keys(ds.slice(3, None, 20))==keys([ds[3], ds[23], ds[43]]) and isinstance(ds.slice(3), RemoteDataset)
    for bad in ((), (-1,), (1,2,3,4)):
        with pytest.raises(ValueError, match='slice takes'): ds.slice(*bad)

def test_dataset_decode_nohandler(ds):
    def faulty(key, data): raise ValueError('nothing')
    with pytest.raises(ValueError, match='nothing') as e: count(ds.decode(faulty))
    assert 'sample 0, in .decode' in str(e.value.__notes__)

def test_dataset_missing_totuple_raises(ds):
    with pytest.raises(UnknownField): count(ds.to_tuple('foo', 'bar'))
    with pytest.raises(UnknownField): count(ds.rename(x='foo', y='bar'))
    with pytest.raises(MissingSample, match=r"sample 0 has no 'foo'; it has '__key__'"): count(ds.map(identity).rename(x='foo'))
    with pytest.raises(MissingSample, match="'json' is None"):
        count(ds.map(lambda sample: {**sample, 'json':None}).to_tuple('json', none_is_error=True))

def fields(sample): return {field for field in sample if not field.startswith('_')}

def test_dataset_rename_keep(ds):
    assert fields(next(iter(ds.rename(image='png', keep=False))))=={'image'}
    assert fields(next(iter(ds.rename(image='png'))))=={'cls','image','wnid','xml','json','txt'}
    assert fields(ds.rename_keys(image='png', keep_unselected=True)[0])=={'cls','image','wnid','xml','json','txt'}

def test_dataset_rsample(ds):
    assert count(ds.to_tuple('cls').rsample(1.))==n
    counts = [count(ds.to_tuple('cls').rsample(.5)) for _ in range(60)]
    assert .4*n<np.mean(counts)<.6*n and len(set(counts))>3
    with pytest.raises(ValueError, match='probability'): ds.rsample(1.5)

def test_dataset_decode_handler(ds):
    seen,good = [0],[0]
    def faulty(key, data):
        if 'png' not in key: return data
        seen[0] += 1
        if seen[0]%2==0: raise ValueError('nothing')
        good[0] += 1
        return data
    assert count(ds.decode(faulty, handler=wds.ignore_and_continue))==24 and (seen[0],good[0])==(47,24)

def test_dataset_rename_handler(ds):
    assert count(ds.rename(image='png;jpg', cls='cls'))==n
    with pytest.raises(UnknownField): count(ds.rename(image='missing', cls='cls'))

def test_dataset_map_handler(ds):
    def fail(sample): raise ValueError()
    assert count(ds.map(identity))==n
    with pytest.raises(ValueError): count(ds.map(fail))

def test_dataset_map_dict_handler(ds):
    def fail(value): raise ValueError()
    assert count(ds.map_dict(png=identity, cls=identity))==n
    with pytest.raises(KeyError, match="sample 0 has no 'cls2'"): count(ds.map_dict(png=identity, cls2=identity))
    with pytest.raises(ValueError): count(ds.map_dict(png=fail, cls=identity))
    with pytest.raises(ValueError, match='by name'): ds.map_dict()
    sample = {'txt':'a'}
    assert steps.run_steps(None, None, sample, ds.map_dict(txt=len).steps)=={'txt':1} and sample=={'txt':'a'}

def test_dataset_shuffle_decode_rename_extract(ds):
    stream = ds.shuffle(5).decode('rgb').rename(image='png;jpg', cls='cls').to_tuple('image', 'cls')
    assert count(stream)==n
    image,label = next(iter(stream))
    assert isinstance(image, np.ndarray) and isinstance(label, int)

def test_gz():
    "Chained decoding: decompressed first, then decoded by the rest of the name"
    ds = RemoteDataset(MemoryStore({'txt.gz':[gzip.compress(b'hello\n')], 'cls.gz':[gzip.compress(b'7')], 'odd.gz':[gzip.compress(b'x')]},
        codecs={'txt.gz':'bin', 'cls.gz':'bin', 'odd.gz':'bin'}))
    sample = ds.decode()[0]
    assert (sample['txt.gz'], sample['cls.gz'], sample['odd.gz'])==('hello\n', 7, b'x')
    assert ds.decode(pre=[])[0]['txt.gz']==gzip.compress(b'hello\n') or ds.decode(pre=[])[0]['txt.gz'][:2]==b'\x1f\x8b'
    def twice(key, data): return wds.Continue(key+'.txt', data+data) if key=='.odd' else None
    assert ds.decode(twice)[0]['odd.gz']=='xx'

def test_bytes_that_a_function_makes_for_a_field_of_numbers():
    store = MemoryStore({'id':np.arange(8), 'cls':np.arange(8)%2, 'txt':[b'x']*8}, vocab={'cls':['a','b']})
    def numbers(sample): return {'id':b'12', 'cls':b'1'}
    made = RemoteDataset(store).map(numbers)
    for sample in (made.decode()[3], made.xdecode()[3], next(iter(made.stream().decode()))):
        assert (sample['id'],sample['cls'])==(12,1)

def test_float_np_vs_torch(ds):
    a,b = (next(iter(ds.decode(spec).to_tuple('png;jpg', 'cls'))) for spec in ('rgb','torchrgb'))
    assert (a[0]==b[0].permute(1, 2, 0).numpy()).all() and a[1]==b[1]

@pytest.mark.parametrize('spec', sorted(wds.autodecode.imagespecs))
def test_decoders(ds, ref, spec):
    ours,theirs = (next(iter(source.decode(spec).to_tuple('png'))) for source in (ds, ref()))
    assert plain(ours)==plain(theirs)

def test_handlers(ds):
    def half(data): return PIL.Image.open(io.BytesIO(data)).resize((128, 128))
    chain = ds.decode(wds.handle_extension('jpg', half), wds.handle_extension('png', half)).to_tuple('jpg;png', 'json')
    assert next(iter(chain))[0].size==(128, 128)

def test_torchvision(ds):
    transforms = pytest.importorskip('torchvision').transforms
    preproc = transforms.Compose([transforms.RandomResizedCrop(24), transforms.ToTensor()])
    chain = ds.decode('pil').to_tuple('jpg;png', 'json').map_tuple(preproc, identity)
    assert chain[0][0].shape==(3,24,24) and chain[0][1]==[]
    batch = next(iter(chain.batched(7, collation_fn=numpy_collate)))
    assert batch[0].shape==(7,3,24,24) and isinstance(batch[1], list)
    sample = next(iter(chain.batched(7, collation_fn=numpy_collate).unbatched()))
    assert sample[0].shape==(3,24,24) and isinstance(sample[1], list)

def test_pickles(ds):
    chain = ds.decode('pil').to_tuple('png', 'cls').map_tuple(lambda image: np.array(image)[:8,:8], None)
    for o in (chain, chain.batched(7), chain.batched(7).unbatched(), chain.shuffle(3).map(lambda o: o[1])):
        assert len(list(pickle.loads(pickle.dumps(o))))==len(list(o))

def test_with_epoch(ds):
    for length in (193,2):
        epoch = ds.to_tuple('cls').with_epoch(length)
        for _ in range(3): assert count(epoch)==len(epoch)==length
    assert count(ds.to_tuple('cls').listed(10).with_epoch(nbatches=12))==12
    with pytest.raises(ValueError, match='at least 1'): ds.with_epoch(0)

def test_repeat(ds):
    assert count(ds.to_tuple('cls').repeat(nepochs=2))==2*n==len(ds.repeat(2))
    assert count(ds.to_tuple('wnid', 'cls').batched(2).repeat(nbatches=20))==20
    assert count(ds.to_tuple('cls').repeat(), 200)==200

@pytest.mark.parametrize('workers', [0,2])
def test_repeat_up_to_a_number_has_a_length_only_where_it_is_certain(workers):
    "Workers divide the limit evenly, but not the samples, which are read in blocks"
    dataset = RemoteDataset(MemoryStore({'x.f4':np.arange(1000, dtype='f4')}))
    for nepochs,limit in (1,1000),(2,2000),(2,5000):
        stream = dataset.repeat(nepochs, limit)
        assert len(list(DataLoader(stream, batch_size=None, num_workers=workers)))==len(stream)==1000*nepochs
        ranks = [stream._with(given_rank=(rank,3)) for rank in range(3)]
        results = [len(list(DataLoader(part, batch_size=None, num_workers=workers))) for part in ranks]
        assert results==[*map(len, ranks)] and sum(results)==1000*nepochs
    with pytest.raises(TypeError, match='not known'): len(dataset.repeat(1, 999))
    assert len(dataset.repeat(-1, 999))==999

def test_xdecode(ds):
    stream = ds.xdecode(png=lambda f: np.array(PIL.Image.open(f)), cls=lambda f: int(f.read()), must_decode=False)
    sample = next(iter(stream))
    assert isinstance(sample['cls'], int) and isinstance(sample['png'], np.ndarray) and sample['__key__']=='0000'
    with pytest.raises(ValueError, match="no decoder for 'wnid'"): count(ds.xdecode(png=identity))
    upper = ds.to_tuple('txt').map(lambda o: {'file.custom':o[0]}).xdecode(('*.custom', lambda f: f.read().upper()))
    assert upper[1]['file.custom']==b'TEXT 1'
    def numbers(samples): return ({'x.f4':b'1.5', 'no.json':b'null'} for _ in samples)
    with pytest.raises(ValueError, match="no decoder for 'x.f4'"): count(ds.compose(numbers).xdecode())
    assert next(iter(ds.compose(numbers).xdecode(must_decode=False)))=={'x.f4':b'1.5', 'no.json':None}

def test_extract_and_rename_errors(ds):
    with pytest.raises(ValueError, match='no field matches'): ds.extract_keys('gif')[0]
    with pytest.raises(ValueError, match='several fields'): ds.extract_keys('*l*')[0]
    with pytest.raises(ValueError, match='no field matches'): ds.rename_keys(new='gif')[0]
    with pytest.raises(ValueError, match='two fields'): ds.rename_keys(new='*l*')[0]
    two = RemoteDataset(MemoryStore({'txt':[b'a'], 'cls.txt':[b'b']}))
    for pair in ('txt','cls.txt'),('cls.txt','txt'):   # the new name is that of another field, before or after it
        for samples in two,two.map(lambda sample: dict(reversed(sample.items()))):
            with pytest.raises(ValueError, match=f"two fields would be '{pair[0]}'"):
                samples.rename_keys(pair, keep_unselected=True)[0]
    for method in ds.rename_keys,ds.xdecode:
        for wrong in 'png',('image','png','jpg'):
            with pytest.raises(TypeError, match='takes pairs such as'): method(wrong)

def test_columns_that_are_no_columns():
    "Characters of a text, bytes of a file and keys of a dict are no samples"
    ds = RemoteDataset(MemoryStore({'txt':[b'ab'], 'a.json':[b'{"b":1, "c":2}']}))
    for samples in ds.to_tuple('txt','txt'),ds.decode().to_tuple('txt'),ds.decode().to_tuple('a.json'):
        with pytest.raises(TypeError, match='unbatched takes batches; a (bytes|str|dict) is no column'):
            list(samples.unbatched())

def test_arguments_that_are_no_such_thing(ds):
    with pytest.raises(TypeError, match='map_tuple takes a sample that is a tuple, not a dict: call to_tuple before'):
        ds.map_tuple(len)[0]
    for wrong in ['pil'],3:
        with pytest.raises(ValueError, match=f'decode knows .* and functions, not {wrong!r}'.replace('[', r'\[')): ds.decode(wrong)
    for use in (lambda: ds.to_tuple('cls', 3), lambda: ds.to_tuple(['cls',None]), lambda: ds.rename(a=3)):
        with pytest.raises(TypeError, match='a field is a name such as .*, or a list of names, not '): use()
    for bounds in (0,5,0),(2.5,),(-1,):
        for samples in ds,ds.select(identity),ds.shuffle():
            with pytest.raises(ValueError, match='slice takes'): samples.slice(*bounds)

def test_log_keys(ds, tmp_path):
    log = tmp_path/'log'
    assert count(ds.to_tuple('cls').log_keys(log))==n and len(log.read_text().splitlines())==n
    list(ds.slice(2).log_keys(str(log)))
    assert log.read_text().splitlines()[-2:]==['0\t0\t0\t0000','1\t0\t0\t0001'] and ds.log_keys() is ds

def test_webloader(ds):
    loader = DataLoader(ds.to_tuple('cls').shuffle(), num_workers=4, batch_size=3)
    assert sum(len(batch) for batch, in loader)==n
    assert count(wds.WebLoader(ds.to_tuple('cls').shuffle(), num_workers=2, batch_size=3).unbatched())==n
    assert count(wds.DataPipeline(ds.to_tuple('cls').shuffle(), wds.filters.shuffle(10)))==n

def test_mix_of_webdataset(ds):
    for k in (2,3): assert count(RoundRobin([ds]*k))==n*k
    assert count(RoundRobin([ds]*3).shuffle(10))==count(RandomMix([ds]*3, longest=True))==3*n
    two,one,three = (ds.slice(k).map(lambda sample, k=k: (k,)) for k in (2,1,3))
    assert [k for k, in RoundRobin([two,one,three], longest=True)]==[2,1,3,2,3,3]
    assert [k for k, in RoundRobin([two,one,three])]==[2,1,3,2]
    assert count(wds.RandomMix([ds.to_tuple('cls'), ds.to_tuple('cls').shuffle()], longest=True))==2*n

# --- handlers

def bad_third(sample):
    if sample['__key__']=='0003': raise ZeroDivisionError('no such thing')
    return sample

@pytest.mark.parametrize('module', [wds, steps])
def test_each_handler(ds, module, monkeypatch):
    monkeypatch.setattr('time.sleep', lambda s: None)
    def chain(handler): return ds.map(bad_third, handler=handler).to_tuple('__key__')
    assert count(chain(module.ignore_and_continue))==n-1 and count(chain(module.ignore_and_stop))==3
    place = r"sample 3, in .map"
    for warn,expected in ((module.warn_and_continue,n-1), (module.warn_and_stop,3)):
        with pytest.warns(UserWarning, match=f'ZeroDivisionError.*no such thing.*{place}'): assert count(chain(warn))==expected
    for handler in (module.reraise_exception, None, lambda error: error):
        with pytest.raises(ZeroDivisionError) as e: count(chain(handler))
        assert type(e.value) is ZeroDivisionError and place.replace('\\', '') in e.value.__notes__[0]

@pytest.mark.parametrize('error', [KeyError('x'), OSError(2, 'no file'), UnicodeDecodeError('utf-8', b'x', 0, 1, 'bad'), AssertionError()])
def test_a_handler_gets_an_error_that_names_the_sample(ds, error):
    seen = []
    def fail(value): raise error
    def keep(e): return seen.append(e) or True
    assert not list(ds.slice(2).to_tuple('cls').map_tuple(fail, handler=keep)) and len(seen)==2
    assert isinstance(seen[1], type(error)) and 'sample 1, in .map_tuple' in repr(seen[1]) and str(error) in str(seen[1])
    assert type(error).__name__ in repr(seen[1]) and seen[1].__cause__ is error

def test_handlers_that_raise_their_own(ds):
    def handler(error): raise RuntimeError('mine') from error
    with pytest.raises(RuntimeError, match='mine'): list(ds.map(bad_third, handler=handler))
    with pytest.raises(TypeError, match='handler is a function'): ds.map(identity, handler='ignore')
    with pytest.raises(TypeError, match='handler is a function'): RemoteDataset(ds.store, handler=3)

@pytest.mark.parametrize('step', ['decode','to_tuple','map_tuple','map','map_dict','rename','rename_keys','extract_keys','xdecode','select'])
def test_every_step_has_a_handler(ds, step):
    def fail(*args): raise ValueError('no')
    def make(source, handler):
        if step=='map_tuple': return source.to_tuple('cls').map_tuple(fail, handler=handler)
        source = source.map(identity)   # from here fields are not checked beforehand
        return dict(decode=lambda: source.decode(fail, handler=handler), to_tuple=lambda: source.to_tuple('foo', handler=handler),
            map=lambda: source.map(fail, handler=handler), map_dict=lambda: source.map_dict(cls=fail, handler=handler),
            rename=lambda: source.rename(a='foo', handler=handler), rename_keys=lambda: source.rename_keys(a='foo', handler=handler),
            extract_keys=lambda: source.extract_keys('foo', handler=handler), xdecode=lambda: source.xdecode(png=fail, handler=handler),
            select=lambda: source.select(fail, handler=handler))[step]()
    for source in (ds, ds.shuffle(), ds.compose(identity)):
        assert list(make(source, steps.ignore_and_continue))==[]
        with pytest.raises((ValueError, StoreError)) as e: list(make(source, None))
        assert 'sample' in str(e.value)+str(getattr(e.value, '__notes__', ''))

def test_a_handler_for_damaged_samples(folder, tmp_path):
    shutil.copytree(folder, tmp_path/'tars')
    path = tmp_path/'tars'/'0.tar'
    content = path.read_bytes()
    for text in (b'text 5', b'text 9'): content = content.replace(text, b'TEXT'+text[4:])
    path.write_bytes(content)
    damaged,seen = ShardStore(str(tmp_path/'tars')),[]
    with pytest.raises(CorruptSample): list(RemoteDataset(damaged).to_tuple('txt'))
    def handler(error): return seen.append(error) or True
    ds = RemoteDataset(damaged, handler=handler).to_tuple('txt')
    for chain in (ds, ds.stream(), ds.batched(10, shuffle=False).unbatched()):
        seen.clear()
        assert len(list(chain))==n-2 and [type(e) for e in seen]==[CorruptSample]*2 and 'sample 5' in str(seen[0])
    with pytest.raises(ValueError, match='sample 5: left out'): ds[5]
    assert len(list(RemoteDataset(damaged, handler=steps.ignore_and_stop).to_tuple('txt')))==5
    assert len(list(DataLoader(ds, batch_size=10)))==5

def test_a_handler_for_bytes_that_cannot_be_decoded():
    ds = RemoteDataset(MemoryStore({'png':[png(0), b'damaged', png(2)]}, 'pics'))
    seen = []
    assert len(list(ds.decode('pil', handler=lambda e: seen.append(e) or True)))==2
    assert type(seen[0]) is CorruptSample and "pics: sample 1, field 'png'" in str(seen[0])
    with pytest.raises(CorruptSample, match="sample 1, field 'png'"): list(ds.decode('pil'))
    assert list(ds.to_tuple('nothing', missing_is_error=False))==[(None,)]*3

# --- samples that are left out

def test_an_index_of_a_sample_that_was_left_out(ds):
    some = ds.map(drop_zero)
    assert len(some)==n and some[1]['cls']==1 and len(some.__getitems__([0,1,2]))==2
    with pytest.raises(ValueError, match=r'sample 0, in \.map: left out'): some[0]
    with pytest.raises(ValueError, match='like all 2 samples of this batch.*batched'): some.__getitems__([0,3])
    with pytest.raises(ValueError, match='handler ends the epoch'): ds.map(bad_third, handler=steps.ignore_and_stop)[3]
    assert sum(len(b) for b, in DataLoader(some.to_tuple('cls'), batch_sampler=some.batches(16)))==31

def test_batches_are_filled_where_samples_are_left_out(ds):
    some = ds.map(drop_zero).to_tuple('cls')
    assert [len(b) for b, in some.batched(8)]==[8,8,8,7] and [len(b) for b, in some.batched(8, partial=False)]==[8,8,8]
    assert [len(b) for b, in DataLoader(some.batched(8), batch_size=None, num_workers=2)]!=[]
    stops = ds.map(bad_third, handler=steps.ignore_and_stop).to_tuple('cls')
    assert [len(b) for b, in stops.batched(2, shuffle=False)]==[2,1]

def test_arguments_of_batched_have_both_names(ds):
    cls = ds.to_tuple('cls')
    assert [len(b) for b in cls.batched(20, collation_fn=None)]==[20,20,7]==[len(b) for b in cls.batched(20, list)]
    assert len(cls.batched(batchsize=20, partial=False))==2 and len(list(cls.stream().listed(20, partial=False)))==2
    assert isinstance(next(iter(cls.batched(20)))[0], torch.Tensor)
    for source in (cls, cls.stream(), cls.compose(identity)):
        with pytest.raises(ValueError, match='want bs'): source.batched(0)
    assert repr(cls.batched(20).unbatched().with_epoch(3)).endswith(".to_tuple('cls').batched(20).unbatched().with_epoch(3)")

def test_wrong_chains(ds):
    for chain,message in ((lambda: ds.to_tuple('cls').decode(), 'decode takes a sample that is a dict, not a tuple'),
            (lambda: ds.stream().to_tuple('cls').unbatched(), 'a int is no column'), (lambda: ds.stream().select(odd).map(len).unbatched(), 'not a int'),
            (lambda: ds.stream().unlisted(), 'unlisted takes lists'), (lambda: ds.compose(3), 'functions of an iterator')):
        with pytest.raises(TypeError, match=message): list(chain())
    text = repr(ds.decode('pil', only='cls').select(odd).rename(a='txt').map_dict(a=len).listed(4))
    assert text.endswith(".decode('pil').select(odd).rename(a='txt').map_dict(a=len).listed(4)")

# --- loaders, workers, ranks

@pytest.fixture(scope='module')
def big(tmp_path_factory):
    "230 samples in 12 shards"
    from fastai_remote import to_shards
    to_shards(list(range(230)), d:=str(tmp_path_factory.mktemp('big')), lambda i: {'txt':f'{i}', 'cls':i%3}, num_workers=1, maxcount=20, progress=False)
    return RemoteDataset(ShardStore(d)).decode().to_tuple('txt', 'cls')

STREAMS = {
    'shuffle': (lambda ds: ds.shuffle(100), 230),
    'stream': (lambda ds: ds.stream(), 230),
    'all shards': (lambda ds: ds.shuffle(100, interleave=None), 230),
    'select': (lambda ds: ds.select(second_is_zero).shuffle(100), 77),
    'buffer': (lambda ds: ds.shuffle().listed(5).unlisted().shuffle(50), 230),
    'slice': (lambda ds: ds.shuffle().slice(100), 100),
    'batches': (lambda ds: ds.shuffle().select(bool).batched(16).unbatched(), 230),
    'mix': (lambda ds: mix([ds[:100].shuffle(), ds[100:].shuffle()]), 230),
    'parts in turn': (lambda ds: RoundRobin([ds[:100].shuffle(), ds[100:]], longest=True), 230)}
def second_is_zero(sample): return sample[1]==0
def texts(stream, workers=0, **kwargs):
    return [int(sample[0]) for sample in DataLoader(stream, batch_size=None, num_workers=workers, **kwargs)]

@pytest.mark.parametrize('workers', [0,2])
@pytest.mark.parametrize('kind', STREAMS)
def test_every_sample_once_on_two_ranks(big, kind, workers):
    make,size = STREAMS[kind]
    for world_size in (1,2) if not workers else (2,):
        ranks = [make(big)._with(given_rank=(rank, world_size), seed=3) for rank in range(world_size)]
        epochs = []
        for epoch in range(2):
            for rank in ranks: rank.set_epoch(epoch)
            shares = [texts(rank, workers) for rank in ranks]
            epochs.append(sum(shares, []))
            assert len(set(epochs[-1]))==len(epochs[-1])==size
            if kind not in ('select','slice'): assert max(map(len, shares))-min(map(len, shares))<=1+(kind=='mix')
        if kind=='slice': assert set(epochs[0])!=set(epochs[1])
        if kind!='stream': assert epochs[0]!=epochs[1]
        ranks[0].set_epoch(0)
        again = texts(ranks[0], workers)
        assert again==epochs[0][:len(again)]

@pytest.mark.parametrize('size', [0,1,5,50,230])
def test_shares_of_any_number_of_processes(big, size):
    "Together every sample once, and as many in each rank as `len` says"
    part = big[:size]
    kinds = {0:part.shuffle(), 1:part.stream(), 2:part.shuffle(interleave=None), 3:part.select(second_is_zero).shuffle(interleave=1),
        4:mix([part.shuffle(), big[size:]]), 5:part.shuffle().repeat(3), 6:part.shuffle().slice(1, 100, 2)}
    sizes = {3:sum(map(second_is_zero, part)), 4:230, 5:3*size, 6:len(range(size)[1:100:2])}
    for kind,stream in kinds.items():
        for world_size,workers in ((1,1), (1,3), (2,2), (3,4)):
            shares = [[[sample for _,sample in stream.start((3,1), Consumer(rank, world_size, worker, workers))]
                for worker in range(workers)] for rank in range(world_size)]
            times = Counter(sample for rank in shares for worker in rank for sample in worker)
            assert sum(times.values())==sizes.get(kind, size) and set(times.values())<={3 if kind==5 else 1}
            if kind==3: continue
            for rank,share in enumerate(shares): assert len(stream._with(given_rank=(rank, world_size)))==sum(map(len, share))

def test_new_orders_without_a_seed(big):
    "By torch's generator; also in persistent workers, and whatever was read before in other processes"
    for workers in (0,2):
        stream = big.shuffle()
        loader = DataLoader(stream, batch_size=None, num_workers=workers, persistent_workers=workers>0)
        orders = []
        for _ in range(3):
            next(iter(stream))
            orders.append(tuple(int(sample[0]) for sample in loader))
        assert len(set(orders))==3 and all(sorted(o)==list(range(230)) for o in orders)
    torch.manual_seed(1)
    first = texts(big.shuffle(), 2)
    torch.manual_seed(1)
    assert texts(big.shuffle(), 2)==first and texts(big.shuffle(), 2)!=first

@pytest.mark.parametrize('workers', [0,2])
def test_orders_of_a_seed(big, workers):
    "Of the seed and the epoch; a forgotten `set_epoch` is noticed, and all workers agree whatever was read before"
    stream = big.shuffle(seed=5)
    loader = DataLoader(stream, batch_size=None, num_workers=workers, persistent_workers=workers>0)
    orders = []
    for epoch in (0,1,0):
        stream.set_epoch(epoch)
        orders.append([int(sample[0]) for sample in loader])
    assert orders[0]==orders[2]!=orders[1] and sorted(orders[0])==sorted(orders[1])==list(range(230))
    if not workers:
        with pytest.warns(UserWarning, match=r"shuffle\(\): this epoch has the same random order.*set_epoch"): again = texts(stream)
        assert again==orders[0]
    peeked = big.shuffle(seed=5)
    next(iter(peeked))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        assert texts(peeked, workers)==orders[0]
    assert texts(big.shuffle(seed=2))!=orders[0]
    assert texts(big.shuffle(rng=random.Random(4)))==texts(big.shuffle(rng=random.Random(4)))

@pytest.mark.parametrize('workers', [0,2])
def test_several_ranks_need_set_epoch(big, workers):
    chains = lambda ds: ds.shuffle(), lambda ds: mix([ds,ds]), lambda ds: ds.compose(identity).shuffle(9), lambda ds: ds.rsample()
    for make in chains[:1] if workers else chains:
        rank = make(big)._with(given_rank=(0, 2))
        assert texts(rank, workers)
        with fails(ValueError, r'call set_epoch\(epoch\).*2 ranks'): texts(rank, workers)
        rank.set_epoch(1)
        assert texts(rank, workers)
    plain = big.stream(rank=0, world_size=2)
    assert texts(plain, workers)==texts(plain, workers)

def test_streams_of_one_stream_are_read_in_one_epoch(big):
    "They share the number of the epoch; each may be read once in it"
    rank = big.shuffle()._with(given_rank=(0, 2))
    both = rank.compose(identity),rank.compose(identity)
    for epoch in range(2):
        rank.set_epoch(epoch)
        for stream in both: assert texts(stream)
        with fails(ValueError, r'call set_epoch\(epoch\).*2 ranks'): texts(both[0])

def forked(f, *args):
    "What `f(*args)` returns in a process that is forked, and is no worker of a loader; or the `repr` of its error"
    fork = multiprocessing.get_context('fork')
    receiver,sender = fork.Pipe(False)
    def run():
        try: sender.send(f(*args))
        except Exception as e: sender.send(repr(e))
    (process:=fork.Process(target=run)).start()
    result = receiver.recv()
    process.join()
    return result

@pytest.mark.parametrize('kind', ['stream','batched'])
def test_ranks_that_are_forked_have_epochs_of_their_own(big, kind):
    "where the stream was made before; the workers of a rank have the epochs of the rank"
    made = big.shuffle() if kind=='stream' else big.batched(10)
    loader = DataLoader(made, batch_size=None, num_workers=1, persistent_workers=True)
    def epochs(rank):
        warnings.simplefilter('error')
        os.environ.update(RANK=str(rank), WORLD_SIZE='2')
        result = []
        for epoch in range(2):
            made.set_epoch(epoch)
            result.append(loader_texts(loader))
        return result
    ranks = [forked(epochs, rank) for rank in range(2)]
    for one,other in zip(*ranks): assert set(one)|set(other)==set(range(230)) and len(one+other)<=231
    assert ranks[0][0]!=ranks[0][1] and made.epoch==0

@pytest.mark.parametrize('kind', ['stream','batched'])
def test_workers_that_start_before_a_forked_rank_names_an_epoch(big, kind):
    made,want = (big.shuffle(seed=1) if kind=='stream' else big.batched(10, seed=1) for _ in range(2))
    def orders(made):
        loader = DataLoader(made, batch_size=None, num_workers=1, persistent_workers=True)
        first = loader_texts(loader)
        made.set_epoch(7)
        return first,loader_texts(loader)
    assert forked(orders, made)==orders(want)

def loader_texts(loader):
    "The numbers of the samples of an epoch; their texts come one by one or in tuples and lists"
    return [int(t) for text,_ in loader for t in ([text] if isinstance(text, str) else text)]

def pickled(o): return pickle.loads(pickle.dumps(o))

@pytest.mark.parametrize('copied', [copy.deepcopy, pickled])
def test_persistent_workers_of_a_copy_get_new_epochs(big, copied):
    for made in map(copied, (big.shuffle(seed=1), big.batched(16, seed=1))):
        loader,orders = DataLoader(made, batch_size=None, num_workers=1, persistent_workers=True),[]
        for epoch in range(2):
            made.set_epoch(epoch)
            orders.append(loader_texts(loader))
        assert orders[0]!=orders[1]

def test_batches_of_a_stream_are_read_in_its_epoch(big):
    stream = big.shuffle(seed=1)
    batched = stream.batched(16)
    family = stream,batched,batched.map(identity),batched.unbatched()
    for epoch,one in enumerate(family, 3):
        one.set_epoch(epoch)
        assert [other.epoch for other in family]==[epoch]*4

def test_ranks_of_the_environment(big, monkeypatch):
    "They are asked for when the epoch begins, not when the chain is written"
    stream = big.shuffle()
    monkeypatch.setenv('WORLD_SIZE', '2')
    shares = []
    for rank in range(2):
        monkeypatch.setenv('RANK', str(rank))
        stream.set_epoch(0)
        assert len(stream)==115
        shares.append(texts(stream, rank))
    assert sorted(sum(shares, []))==list(range(230))
    monkeypatch.delenv('RANK')
    with pytest.raises(ValueError, match='RANK is not'): list(stream)
    for wrong in (dict(rank=2, world_size=2), dict(world_size=2)):
        with pytest.raises(ValueError, match='rank below world_size'): big.stream(**wrong)

def test_a_rank_that_is_spawned_finds_out_which_one_it_is(big, monkeypatch):
    "As with `torch.multiprocessing.spawn`: the process that pickles a stream or batches is no rank itself"
    made = big.shuffle(),big.batched(16),big.batches(16)
    context.set_spawning_popen(object())
    try: pickled = pickle.dumps(made)
    finally: context.set_spawning_popen(None)
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setenv('RANK', '1')
    assert [epochs.ranks for epochs in pickle.loads(pickled)]==[(1,2)]*3

RANK = """
import sys, torch.distributed as dist
from torch.utils.data import DataLoader
from fastai_remote import RemoteDataset, ShardStore, mix
rank,folder,meet = int(sys.argv[1]),sys.argv[2],sys.argv[3]
ds = RemoteDataset(ShardStore(folder)).decode().to_tuple('txt', 'cls')
streams = [ds.shuffle(), ds.select(lambda sample: True).shuffle().batched(16).unbatched(), mix([ds[:99].shuffle(), ds[99:]])]
dist.init_process_group('gloo', init_method=meet, rank=rank, world_size=2)   # after the streams have been made
for stream in streams:
    for epoch in range(2):
        stream.set_epoch(epoch)
        print(*[text for text,_ in DataLoader(stream, batch_size=None, num_workers=2)])
dist.destroy_process_group()
"""
@pytest.mark.slow
def test_two_processes_with_gloo(big, tmp_path, interpreters):
    "Every sample of two epochs is counted, over two processes with two workers each"
    ranks = [interpreters.start(RANK, r, big.store.storage.url, f'file://{tmp_path}/meet', fastai=False) for r in range(2)]
    a,b = ([[int(t) for t in line.split()] for line in rank.wait().stdout.splitlines()] for rank in ranks)
    assert len(a)==len(b)==6
    for x,y in zip(a, b): assert sorted(x+y)==list(range(230)) and abs(len(x)-len(y))<=2
    assert a[0]!=a[1] and a[2]!=a[3] and a[4]!=a[5]

def test_workers_that_are_spawned(big):
    "Lambda functions are pickled; a worker gets the rank of the process that starts it"
    stream = big.shuffle(seed=1, interleave=2).map(lambda sample: (int(sample[0]), 0)).listed(4).unlisted()
    got = [i for i,_ in DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context='spawn')]
    assert sorted(got)==list(range(230))

def test_functions_that_are_pickled(ds):
    "By name if pickle can find them there, otherwise with their code"
    add = 7
    chain = ds.to_tuple('cls').map(lambda o: o[0]+add).shuffle().map_dict(x=lambda v: v).with_epoch(3)
    assert pickle.loads(pickle.dumps(chain.source.ds.steps[1])).args[0]((1,))==8
    assert b'identity' in pickle.dumps(ds.map(identity)) and len(pickle.dumps(ds.map(identity)))<len(pickle.dumps(ds.map(lambda o: o)))

@pytest.mark.parametrize('world_size,workers', [(1,3), (3,1), (4,2), (7,3)])
def test_a_shuffle_of_shards_is_divided_exactly(world_size, workers):
    from fastai_remote.order.ranks import worker_batches
    from fastai_remote.order.shards import ShardPermutation
    for sizes in ([20]*11+[10], [1,0,3], [100], [5,7,300,1]):
        shares = [ShardPermutation(sizes, 3, 2, 4, workers, rank, world_size, equal=False) for rank in range(world_size)]
        numbers = [np.concatenate([p[np.arange(0)], *worker_batches(Order(len(p), p), 4, w, workers)]) for p in shares for w in range(workers)]
        assert sorted(np.concatenate(numbers))==list(range(sum(sizes)))
        assert max(map(len, shares))-min(map(len, shares))<=1 and pickle.loads(pickle.dumps(shares[-1]))==shares[-1]

def test_lengths(big):
    assert [len(big.stream(rank=rank, world_size=3)) for rank in range(3)]==[77,77,76]
    assert [len(big.with_epoch(10)._with(given_rank=(rank, 3))) for rank in range(3)]==[4,3,3]
    assert len(big.batched(16).repeat(2))==30 and len(list(big.batched(16).repeat(2)))==30 and len(big.shuffle().batched(16))==15
    for unknown in (big.map(identity).shuffle(), big.shuffle().listed(4), big.select(bool), big.rsample(), big.repeat()):
        with pytest.raises(TypeError, match='not known'): len(unknown)
    assert len(DataLoader(big.shuffle(), batch_size=16))==15

@pytest.mark.parametrize('workers', [0,2,3])
def test_with_epoch_is_divided(big, workers):
    "So many results of all ranks and workers together, in passes with orders of their own"
    for size in (100,500):
        got = [texts(big.shuffle().with_epoch(size)._with(given_rank=(rank, 2)), workers) for rank in range(2)]
        assert [len(o) for o in got]==[size//2]*2
        times = Counter(sum(got, []))
        if size==100: assert max(times.values())==1
        else: assert len(times)==230 and max(times.values())<=4
    one = texts(big.shuffle().repeat(2), workers)
    assert Counter(one)==Counter([*range(230)]*2) and (workers or one[:230]!=one[230:])

def test_slice_of_what_is_left_needs_one_process(big):
    some = big.select(second_is_zero).slice(5)
    assert texts(some)==texts(some, 1)==[0,3,6,9,12] or len(texts(some))==5
    with fails(ValueError, 'call slice before that step'): texts(some, 2)
    with pytest.raises(TypeError, match='has no positions'): some[3]
    with pytest.raises(ValueError, match='call slice before'): list(some._with(given_rank=(0, 2)))

def test_fewer_samples_than_workers(big):
    assert texts(big[:1].stream(), 2)==texts(big[:1].batched(4).unbatched(), 2)!=[]
    assert texts(big[:0].shuffle(), 2)==[]==list(big[:0].stream())==list(big[:0].repeat(2))
    with fails(ValueError, 'nothing to repeat for worker 1'): texts(big[:1].with_epoch(10), 2)
    with pytest.raises(ValueError, match='nothing to repeat'): list(big[:0].with_epoch(3))
    with pytest.raises(ValueError, match='nothing to repeat'): list(big.select(lambda s: False).with_epoch(3))

def test_one_request_for_many_samples(monkeypatch):
    asked = []
    store = MemoryStore({'txt':[f'{i}'.encode() for i in range(2000)], 'cls':np.zeros(2000, np.uint8)}, 'mem')
    def read(self, numbers, fields, was=MemoryStore.read_values): return asked.append((len(numbers), fields)) or was(self, numbers, fields)
    monkeypatch.setattr(MemoryStore, 'read_values', read)
    chains = RemoteDataset(store).select(bool).shuffle().decode().to_tuple('txt'), RemoteDataset(store).shuffle().decode().to_tuple('txt')
    for chain,fields in zip(chains, (['txt','cls','txt.crc'], ['txt','txt.crc'])):
        asked.clear()
        assert len(set(chain))==2000 and [k for k,_ in asked]==[64]*31+[16] and all(f==fields for _,f in asked)
    asked.clear()
    list(RemoteDataset(store).rename(t='txt', keep=False))
    assert asked[0][1]==['txt','txt.crc']

def test_a_stream_reads_on_while_a_sample_is_processed(big, monkeypatch):
    "The second request is made before the first sample has been given"
    reads,second = [],threading.Event()
    def read(self, *args, was=RemoteDataset.read):
        reads.append(1)
        if len(reads)==2: second.set()
        return was(self, *args)
    monkeypatch.setattr(RemoteDataset, 'read', read)
    it = iter(big.shuffle())
    next(it)
    assert second.wait(10) and len(reads)==2
    it.close()

# --- mixing

@pytest.fixture(scope='module')
def letters():
    def make(name, n): return RemoteDataset(MemoryStore({'txt':[f'{name}{i}'.encode() for i in range(n)]}, name)).decode().to_tuple('txt')
    return make('a', 300),make('b', 100),make('c', 20)

def names(stream, workers=0): return [t for t, in DataLoader(stream, batch_size=None, num_workers=workers)]

@pytest.mark.parametrize('workers', [0,2])
def test_mix_until_all_have_run_out(letters, workers):
    for weights in (None, [1,1,5]):
        got = names(mix([o.shuffle() for o in letters], weights, seed=1), workers)
        assert len(got)==len(set(got))==420
    assert len(mix(letters))==420
    first = [t[0] for t in names(mix(letters, seed=2))[:210]]
    assert 120<first.count('a')<180 and 30<first.count('b')<70   # in proportion to their numbers

def test_mix_until_one_has_run_out(letters):
    got = Counter(t[0] for t in names(mix(letters[:2], [1,1], end='first', seed=1)))
    assert got['b']==100 and 60<got['a']<140
    with pytest.raises(TypeError, match='not known'): len(mix(letters, end='first'))

@pytest.mark.parametrize('workers', [0,2])
def test_mix_of_a_number_of_samples(letters, workers):
    mixed = mix([o.shuffle() for o in letters], [1,1,2], end=2000, seed=1)
    got = names(mixed, workers)
    kinds,times = Counter(t[0] for t in got),Counter(got)
    assert len(mixed)==len(got)==2000 and abs(kinds['c']-1000)<100 and abs(kinds['a']-500)<100
    # each pass takes every sample once: in every process, the times of its samples differ by one at most
    each = [times[f'c{i}'] for i in range(20)]
    assert max(each)-min(each)<=(1 if workers==0 else 12) and min(each)>30

def test_mix_depends_on_seed_and_epoch_only(letters):
    def epochs(mixed):
        result = []
        for epoch in (0,1,0):
            mixed.set_epoch(epoch)
            result.append(names(mixed, 2))
        return result
    a,b = (epochs(mix([o.shuffle() for o in letters], seed=7)) for _ in range(2))
    assert a==b and a[0]==a[2]!=a[1]
    assert names(mix([letters[0].shuffle(seed=1), letters[1]], seed=1))!=names(mix([letters[0].shuffle(seed=2), letters[1]], seed=1))

def test_mix_of_steps_and_streams(letters):
    a,b,c = letters
    mixed = mix([a.map(lambda o: o if o[0].endswith('0') else None), b.with_epoch(50), c.repeat(3)], [1,1,1])
    kinds = Counter(t[0] for t in names(mixed.map_tuple(str.upper)))
    assert kinds==dict(A=30, B=50, C=60)
    nested = mix([mix([a,b], end=40), c.batched(5).unbatched()], [2,1])
    assert len(names(nested))==60
    assert len(list(mix([a,b]).batched(16)))==25 and len(names(mix([a,b]).shuffle(20).slice(7)))==7

def test_decode_after_mixing(ds):
    "Each sample is decoded as its own store says"
    other = RemoteDataset(MemoryStore({'png':[png(1)], 'cls':np.array([5])}, 'other'))
    mixed = mix([ds.slice(3), other]).decode('rgb8').to_tuple('png', 'cls')
    assert sorted(label for _,label in mixed)==[0,1,2,5] and all(image.dtype==np.uint8 for image,_ in mixed)

def test_wrong_mixes(letters):
    a,b,_ = letters
    for args,kwargs,message in ((([],),{},'at least one'), (([a,b],[1]),{},'for each of 2'), (([a,b],[1,0]),{},'positive'),
            (([a,b],[1,float('nan')]),{},'positive'), (([a],),dict(end='longest'),"'all', 'first'"), (([a],),dict(end=0),'number of samples'),
            (([a,b.select(bool)],),{},'give weights'), (([a.stream(rank=1, world_size=2)],),{},'give rank='),
            (([a],),dict(rank=3, world_size=2),'rank below')):
        with pytest.raises(ValueError, match=message): mix(*args, **kwargs)
    with pytest.raises(TypeError, match='mix takes RemoteDatasets'): mix([a, [1,2]])
    assert names(mix([a.stream(rank=1, world_size=2)], rank=1, world_size=2))

def measure(million):
    "Growth of this process while 20 batches of streams of so many samples are read in a worker, and of the worker; bytes"
    import gc
    from test_memory import MB, Numbers, children, own, private
    def read(n):
        datasets = [RemoteDataset(Numbers(k)).to_tuple('png', 'cls') for k in (n, n//2)]
        streams = [mix([d.shuffle() for d in datasets]).batched(64), mix(datasets, [1,1], end=n).batched(64),
            datasets[0].select(bool).shuffle().repeat(2).batched(64)]
        grown = 0
        for stream in streams:
            it,seen = iter(DataLoader(stream, batch_size=None, num_workers=1)),{}
            for k in range(20):
                next(it)
                if k in (0,19):
                    for p in children(): seen.setdefault(p, []).append(private(p))
            grown = max([grown, *(max(o)-o[0] for o in seen.values())])
            del it
        return grown,len(pickle.dumps(streams[0]))
    read(100_000)
    gc.collect()
    before = own()
    worker,size = read(million*1_000_000)
    return dict(parent=own()-before, worker=worker, pickle=size, MB=MB)

@pytest.mark.slow
@pytest.mark.skipif(sys.platform!='linux', reason='needs /proc')
def test_fifty_million_samples_cost_nothing(interpreters):
    r = json.loads(interpreters.run(Path(__file__), 50, check=True).stdout.splitlines()[-1])
    assert r['parent']<15*r['MB'] and r['worker']<15*r['MB'] and r['pickle']<20_000, r

if __name__=='__main__': print(json.dumps(measure(int(sys.argv[1]))))
