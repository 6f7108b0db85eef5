"""WebDataset's methods on `RemoteDataset`: the same chains on both, handlers, and mixing

Most tests run one chain on `webdataset.WebDataset` and on `RemoteDataset`, over the same tars, and compare the samples.
`test_epochs.py` tests how ranks and workers divide what these methods make."""
import gzip, io, itertools, json, pickle, shutil, threading
from collections import Counter

import numpy as np
import PIL.Image
import pytest
import torch
from conftest import draw, examples
from inputs import encoded, write_tar
from shard_helpers import damage
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader

from fastai_remote import CorruptSample, index_shards, MemoryStore, MissingSample, mix, RemoteDataset, ShardStore, \
    StoreError, UnknownField
from fastai_remote.load import steps
from fastai_remote.load.epochs import Consumer
from fastai_remote.load.mix import RandomMix, RoundRobin
from fastai_remote.load.stream import RemoteStream

wds = pytest.importorskip('webdataset')
n = 47

def png(i): return encoded(draw(i))

def content(i):
    "The fields of WebDataset's own test data"
    return {'cls':b'%d'%(i%3), 'png':png(i), 'wnid':b'n%08d'%i, 'xml':b'<a>%d</a>'%i,
            'json':json.dumps([i]*(i%4)).encode(), 'txt':f'text {i}'.encode()}

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "Three tars of 47 samples"
    folder = tmp_path_factory.mktemp('tars')
    for shard,numbers in enumerate((range(20), range(20,40), range(40,n))):
        write_tar(folder/f'{shard}.tar', [(f'{i:04}.{field}', o) for i in numbers for field,o in content(i).items()])
    index_shards(str(folder), num_workers=1, progress=False)
    return folder

@pytest.fixture(scope='module')
def ds(folder): return RemoteDataset(ShardStore(str(folder)))

@pytest.fixture(scope='module')
def ref(folder):
    tars = sorted(map(str, folder.glob('*.tar')))
    return lambda: wds.WebDataset(tars, shardshuffle=False, empty_check=False)

def count(source): return sum(1 for _ in source)

def plain(o):
    "Comparable, without metadata other than the key"
    if isinstance(o, dict): return {k:plain(v) for k,v in o.items() if not k.startswith('__') or k=='__key__'}
    if isinstance(o, (tuple,list)): return ['tuple' if len(o) and isinstance(o, tuple) else 'list', *map(plain, o)]
    if isinstance(o, (np.ndarray,torch.Tensor)):
        return [type(o).__name__, str(o.dtype), tuple(o.shape), np.asarray(o).tolist()]
    if isinstance(o, PIL.Image.Image): return ['image', o.mode, o.size, o.tobytes()]
    return o

def identity(x): return x
def odd(sample): return sample['cls']%2==1
def drop_zero(sample): return sample if sample['cls'] else None
def shout(key, data): return data.decode().upper() if key.endswith('txt') else None
def small(data): return PIL.Image.open(io.BytesIO(data)).resize((8, 8))
def numbers_of(it): return (sample for sample in it if sample['cls'])
numpy_collate = wds.filters.default_collation_fn

# --- the same chain on both

RAW = {
    'rgb8, two alternatives': lambda ds: ds.decode('rgb8').to_tuple('jpg;png cls __key__'),
    'only': lambda ds: ds.decode('l', only=['png','cls','json']),
    'only as text': lambda ds: ds.decode(only='cls txt').to_tuple('png', 'txt'),
    'several decoders': lambda ds: ds.decode(shout, wds.handle_extension('jpg png', small), 'pil'),
    'post': lambda ds: ds.decode('l', post=[shout]).to_tuple('png', 'txt', 'json'),
    'partial': lambda ds: ds.decode(only='txt').decode('pil', partial=True).to_tuple('txt', 'png'),
    'batches': lambda ds: ds.decode('rgb8').map_dict(png=lambda a: a[:8,:8]).to_tuple('png', 'cls', 'txt')
        .slice(0, None).compose(identity).batched(7, collation_fn=numpy_collate),
    'batches of dicts': lambda ds: ds.decode(only='cls txt').to_tuple('cls', 'txt').map(lambda o: dict(c=o[0], t=o[1]))
        .compose(identity).batched(7, collation_fn=numpy_collate, partial=False),
    'stages of WebDataset': lambda ds: ds.compose(wds.decode(partial=True), wds.to_tuple('txt', 'cls'),
        wds.batched(5), wds.unbatched()),
    'decode after compose': lambda ds: ds.compose(identity).decode('pil', partial=True).to_tuple('png', 'cls', 'json'),
    'xdecode': lambda ds: ds.xdecode(png=lambda f: len(f.read()), wnid=False, must_decode=False)
        .to_tuple('png', 'wnid', 'txt'),
}
PIL_DECODED = {
    'decode': identity,
    'to_tuple lenient': lambda ds: ds.to_tuple('nothing', 'txt', missing_is_error=False),
    'to_tuple of lists': lambda ds: ds.to_tuple(['jpg','txt'], 'cls'),
    'to_tuple drops': lambda ds: ds.select(odd).to_tuple('cls', handler=wds.ignore_and_continue),
    'map': lambda ds: ds.map(lambda sample: dict(new=sample['txt'])),
    'map handler': lambda ds: ds.map(lambda sample: dict(x=1//sample['cls']), handler=lambda e: True),
    'rename': lambda ds: ds.rename(image='jpg;png', label='cls'),
    'rename only': lambda ds: ds.rename(image='png', keep=False),
    'rename drops all': lambda ds: ds.rename(a='txt').rename(b='txt', handler=wds.ignore_and_continue),
    'rename_keys': lambda ds: ds.rename_keys(('image','p*'), label='cls', keep_unselected=True),
    'rename_keys alone': lambda ds: ds.rename_keys(image='png', nothing='zip', must_match=False),
    'extract_keys': lambda ds: ds.extract_keys('*.png;*.jpg', 'cl*', '.txt'),
    'extract_keys lenient': lambda ds: ds.extract_keys('cls', 'gif', ignore_missing=True),
    'unbatched dicts': lambda ds: ds.map(lambda s: dict(c=s['cls'], t=s['txt'])).compose(identity)
        .batched(10, collation_fn=None).map(lambda l: {k:[s[k] for s in l] for k in l[0]}).unbatched(),
}
OF_TUPLES = {
    'repeat': lambda ds: ds.repeat(nepochs=2, nbatches=60),
    'short with_epoch': lambda ds: ds.with_epoch(2),
    'with_epoch of batches': lambda ds: ds.listed(10).with_epoch(nbatches=12),
    'rsample of all': lambda ds: ds.rsample(1.),
    'rsample of none': lambda ds: ds.rsample(0.),
    'Cached': lambda ds: ds.compose(wds.Cached()),
    'map after batched': lambda ds: ds.listed(10).map(len),
}
def decoded(chain): return lambda ds: chain(ds.decode('pil'))
def tuples(chain): return lambda ds: chain(ds.decode('pil').to_tuple('txt', 'cls'))
CHAINS = {**RAW, **{name:decoded(chain) for name,chain in PIL_DECODED.items()},
          **{name:tuples(chain) for name,chain in OF_TUPLES.items()}}

@pytest.mark.parametrize('chain', CHAINS)
@pytest.mark.filterwarnings('ignore')
def test_the_samples_of_webdataset(ds, ref, chain):
    ours,theirs = (plain(list(CHAINS[chain](source))) for source in (ds, ref()))
    assert len(ours)==len(theirs) and ours==theirs
    assert ours or chain in ('rsample of none','rename drops all')

DICT_STEPS = dict(
    select=lambda ds: ds.select(odd), drop=lambda ds: ds.map(drop_zero), third=lambda ds: ds.slice(2, 40, 3),
    rename=lambda ds: ds.rename(label='txt').rename(txt='label'), map_dict=lambda ds: ds.map_dict(txt=str.title),
    slice=lambda ds: ds.slice(30), compose=lambda ds: ds.compose(numbers_of), lists=lambda ds: ds.listed(5).unlisted(),
    stop=lambda ds: ds.map_dict(txt=lambda t: t[1//(t.find('40')+2):], handler=wds.ignore_and_stop),
    fail=lambda ds: ds.map_dict(cls=lambda c: 2//c, handler=wds.ignore_and_continue))
TUPLE_STEPS = dict(
    batches=lambda ds: ds.batched(7, collation_fn=numpy_collate).unbatched(), slice=lambda ds: ds.slice(1, 20),
    upper=lambda ds: ds.map_tuple(str.upper), lists=lambda ds: ds.listed(3).unlisted(),
    drop=lambda ds: ds.map(lambda o: o if o[1] else None))
ENDS = dict(end=identity, repeat=lambda ds: ds.repeat(2), with_epoch=lambda ds: ds.with_epoch(37))   # as in WebDataset

def some(names): return st.lists(st.sampled_from(sorted(names)), max_size=4)

@pytest.mark.slow
@given(some(DICT_STEPS), some(TUPLE_STEPS), st.sampled_from(sorted(ENDS)))
@examples(25)
def test_methods_in_any_order_give_the_samples_of_webdataset(ds, ref, dicts, tuples, end):
    def results(source):
        source = source.decode(only=['cls','txt'])
        for step in dicts: source = DICT_STEPS[step](source)
        source = source.to_tuple('txt', 'cls').compose(identity)
        for step in tuples: source = TUPLE_STEPS[step](source)
        try: return [(text,int(label)) for text,label in ENDS[end](source)]
        except ValueError as e:   # where WebDataset has an epoch without samples
            assert 'nothing to repeat' in str(e)
            return []
    assert results(ds)==results(ref())

def test_classes_of_webdataset_take_our_streams(ds):
    for workers in 0,2:
        loader = wds.WebLoader(ds.to_tuple('cls').shuffle(), num_workers=workers, batch_size=3)
        assert count(loader.unbatched())==n
    assert count(wds.DataPipeline(ds.to_tuple('cls').shuffle(), wds.filters.shuffle(10)))==n
    assert count(wds.RandomMix([ds.to_tuple('cls'), ds.to_tuple('cls').shuffle()], longest=True))==2*n

# --- one method

def test_resampled_samples_are_drawn_with_repeats(ds):
    drawn = RemoteDataset(ds.store, resampled=True)
    keys = Counter(sample['__key__'] for sample in itertools.islice(drawn, 1000))
    assert isinstance(drawn, RemoteStream) and len(keys)==n and max(keys.values())>1
    with pytest.raises(TypeError, match='not known'): len(drawn)
    assert len(drawn.with_epoch(5))==5

def test_length(ds):
    assert len(ds)==n and len(ds.with_length(1793))==1793 and count(ds.with_length(1793))==n
    assert len(ds.repeat(17).with_length(19))==19 and len(ds.with_length(5).to_tuple('cls'))==5
    with pytest.raises(TypeError, match=r'select\(odd\) is not known.*with_length'): len(ds.select(odd))
    with pytest.raises(TypeError, match='not known'): len(ds.with_length(5).select(odd))
    assert 10==count(ds.shuffle(100).slice(10))==len(ds.slice(10))==len(ds.shuffle().slice(10))

def test_with_may_be_used(ds):
    with ds.shuffle(5).to_tuple('png;jpg cls') as stream: assert count(stream)==n
    with ds as same: assert same is ds
    assert ds.shuffle(0) is ds and isinstance(ds.slice(3), RemoteDataset)

def test_rsample_draws_another_part_each_time(ds):
    counts = [count(ds.to_tuple('cls').rsample(.5)) for _ in range(20)]
    assert .4*n<np.mean(counts)<.6*n and len(set(counts))>3

def test_gz():
    "Chained decoding: decompressed first, then decoded by the rest of the name"
    values = {'txt.gz':b'hello\n', 'cls.gz':b'7', 'odd.gz':b'x'}
    columns = {field:[gzip.compress(value)] for field,value in values.items()}
    ds = RemoteDataset(MemoryStore(columns, codecs=dict.fromkeys(values, 'bin')))
    sample = ds.decode()[0]
    assert (sample['txt.gz'], sample['cls.gz'], sample['odd.gz'])==('hello\n', 7, b'x')
    assert gzip.decompress(ds.decode(pre=[])[0]['txt.gz'])==b'hello\n'
    def twice(key, data): return wds.Continue(key+'.txt', data+data) if key=='.odd' else None
    assert ds.decode(twice)[0]['odd.gz']=='xx'

def test_bytes_that_a_function_makes_for_a_field_of_numbers():
    store = MemoryStore({'id':np.arange(8), 'cls':np.arange(8)%2, 'txt':[b'x']*8}, vocab={'cls':['a','b']})
    made = RemoteDataset(store).map(lambda sample: {'id':b'12', 'cls':b'1'})
    for sample in (made.decode()[3], made.xdecode()[3], next(iter(made.stream().decode()))):
        assert (sample['id'],sample['cls'])==(12,1)

def test_xdecode(ds):
    upper = ds.to_tuple('txt').map(lambda o: {'file.custom':o[0]}).xdecode(('*.custom', lambda f: f.read().upper()))
    assert upper[1]['file.custom']==b'TEXT 1'
    def numbers(samples): return ({'x.f4':b'1.5', 'no.json':b'null'} for _ in samples)
    with pytest.raises(ValueError, match="no decoder for 'x.f4'"): list(ds.compose(numbers).xdecode())
    assert next(iter(ds.compose(numbers).xdecode(must_decode=False)))=={'x.f4':b'1.5', 'no.json':None}

def test_a_function_does_not_change_the_sample_before(ds):
    kept = [{'txt':'a'}]
    assert list(ds.compose(lambda samples: kept).map_dict(txt=len))==[{'txt':1}] and kept==[{'txt':'a'}]

def test_log_keys(ds, tmp_path):
    log = tmp_path/'log'
    assert count(ds.to_tuple('cls').log_keys(log))==n and len(log.read_text().splitlines())==n
    list(ds.slice(2).log_keys(str(log)))
    assert log.read_text().splitlines()[-2:]==['0\t0\t0\t0000','1\t0\t0\t0001'] and ds.log_keys() is ds

def test_arguments_of_batched_have_both_names(ds):
    cls = ds.to_tuple('cls')
    assert [len(b) for b in cls.batched(20, collation_fn=None)]==[20,20,7]==[len(b) for b in cls.batched(20, list)]
    assert len(cls.batched(batchsize=20, partial=False))==2 and count(cls.stream().listed(20, partial=False))==2
    assert isinstance(next(iter(cls.batched(20)))[0], torch.Tensor)

def test_what_repr_shows(ds):
    batches = ds.to_tuple('cls').batched(20).unbatched().with_epoch(3)
    assert repr(batches).endswith(".to_tuple('cls').batched(20).unbatched().with_epoch(3)")
    text = repr(ds.decode('pil', only='cls').select(odd).rename(a='txt').map_dict(a=len).listed(4))
    assert text.endswith(".decode('pil').select(odd).rename(a='txt').map_dict(a=len).listed(4)")

def test_functions_are_pickled_by_name_or_with_their_code(ds):
    add = 7
    chain = ds.decode('pil').to_tuple('png', 'cls').map_tuple(lambda image: np.array(image)[:8,:8], lambda c: c+add)
    for o in chain, chain.batched(7), chain.batched(7).unbatched(), chain.shuffle(3).map(lambda o: o[1]).with_epoch(50):
        copied = pickle.loads(pickle.dumps(o))
        assert count(copied)==count(o)
    assert sorted({int(c) for c in copied})==[7,8,9]
    assert b'identity' in pickle.dumps(ds.map(identity))
    assert len(pickle.dumps(ds.map(identity)))<len(pickle.dumps(ds.map(lambda o: o)))

# --- wrong arguments, and samples that a method cannot process

@pytest.mark.parametrize('use,error,message', [
    *((lambda ds, bounds=bounds: ds.slice(*bounds), ValueError, 'slice takes')
      for bounds in ((), (-1,), (1,2,3,4), (0,5,0), (2.5,))),
    *((lambda ds, wrong=wrong: wrong(ds).slice(-1), ValueError, 'slice takes')
      for wrong in (lambda ds: ds.select(identity), lambda ds: ds.shuffle())),
    (lambda ds: ds.rsample(1.5), ValueError, 'probability'), (lambda ds: ds.with_epoch(0), ValueError, 'at least 1'),
    (lambda ds: ds.map_dict(), ValueError, 'by name'),
    *((lambda ds, made=made: made(ds).batched(0), ValueError, 'want bs')
      for made in (identity, lambda ds: ds.stream(), lambda ds: ds.compose(identity))),
    *((lambda ds, method=method: getattr(ds, method)('png'), TypeError, f'{method} takes pairs such as')
      for method in ('rename_keys','xdecode')),
    (lambda ds: ds.rename_keys(('a','b','c')), TypeError, 'rename_keys takes pairs such as'),
    (lambda ds: ds.decode(['pil']), ValueError, r"decode knows .* and functions, not \['pil'\]"),
    (lambda ds: ds.to_tuple('cls', 3), TypeError, 'a field is a name such as .*, or a list of names, not 3'),
    (lambda ds: ds.to_tuple(['cls',None]), TypeError, 'a field is a name such as .*, or a list of names, not '),
    (lambda ds: ds.compose(3), TypeError, 'functions of an iterator'),
    (lambda ds: ds.to_tuple('foo', 'bar'), UnknownField, 'foo'), (lambda ds: ds.rename(x='foo'), UnknownField, 'foo'),
    (lambda ds: ds.map(identity, handler='ignore'), TypeError, 'handler is a function'),
    (lambda ds: RemoteDataset(ds.store, handler=3), TypeError, 'handler is a function')])
def test_wrong_arguments_are_errors_at_once(ds, use, error, message):
    with pytest.raises(error, match=message): use(ds)

TWO = RemoteDataset(MemoryStore({'txt':[b'a'], 'cls.txt':[b'b'], 'a.json':[b'{"b":1, "c":2}']}))
def without_json(sample): return {**sample, 'json':None}
@pytest.mark.parametrize('use,error,message', [
    (lambda ds: ds.map(identity).rename(x='foo'), MissingSample, r"sample 0 has no 'foo'; it has '__key__'"),
    (lambda ds: ds.map(without_json).to_tuple('json', none_is_error=True), MissingSample, "'json' is None"),
    (lambda ds: ds.map_dict(png=identity, cls2=identity), KeyError, "sample 0 has no 'cls2'"),
    (lambda ds: ds.extract_keys('gif'), ValueError, 'no field matches'),
    (lambda ds: ds.extract_keys('*l*'), ValueError, 'several fields'),
    (lambda ds: ds.rename_keys(new='gif'), ValueError, 'no field matches'),
    (lambda ds: ds.rename_keys(new='*l*'), ValueError, 'two fields'),
    # the new name is that of another field, before or after it
    *((lambda ds, pair=pair: TWO.rename_keys(pair, keep_unselected=True), ValueError, f"would be '{pair[0]}'")
      for pair in (('txt','cls.txt'), ('cls.txt','txt'))),
    (lambda ds: ds.xdecode(png=identity), ValueError, "no decoder for 'wnid'"),
    (lambda ds: ds.map_tuple(len), TypeError, 'takes a sample that is a tuple, not a dict: call to_tuple before'),
    (lambda ds: ds.to_tuple('cls').decode(), TypeError, 'decode takes a sample that is a dict, not a tuple'),
    (lambda ds: ds.stream().select(odd).map(len).unbatched(), TypeError, 'not a int'),
    (lambda ds: ds.stream().unlisted(), TypeError, 'unlisted takes lists'),
    # characters of a text, bytes of a file and keys of a dict are no samples
    *((lambda ds, o=o: o.stream().unbatched(), TypeError, f'a {kind} is no column') for o,kind in (
        (TWO.to_tuple('txt', 'txt'),'bytes'), (TWO.decode().to_tuple('txt'),'str'),
        (TWO.decode().to_tuple('a.json'),'dict'), (TWO.to_tuple('txt').map_tuple(len),'int')))])
def test_samples_that_a_method_cannot_process_are_errors_when_they_come(ds, use, error, message):
    made = use(ds)
    with pytest.raises(error, match=message): list(made)

# --- handlers

def bad_third(sample):
    if sample['__key__']=='0003': raise ZeroDivisionError('no such thing')
    return sample

def test_each_handler(ds):
    def chain(handler): return ds.map(bad_third, handler=handler).to_tuple('__key__')
    assert count(chain(steps.ignore_and_continue))==n-1 and count(chain(steps.ignore_and_stop))==3
    place = "sample 3, in .map"
    for warn,expected in ((steps.warn_and_continue,n-1), (steps.warn_and_stop,3)):
        with pytest.warns(UserWarning, match=f'ZeroDivisionError.*no such thing.*{place}'):
            assert count(chain(warn))==expected
    for handler in steps.reraise_exception,wds.reraise_exception,None,lambda error: error:
        with pytest.raises(ZeroDivisionError) as e: count(chain(handler))
        assert type(e.value) is ZeroDivisionError and place in e.value.__notes__[0]
    def own(error): raise RuntimeError('mine') from error
    with pytest.raises(RuntimeError, match='mine'): count(chain(own))

@pytest.mark.parametrize('error', [KeyError('x'), OSError(2, 'no file'), UnicodeDecodeError('utf-8', b'x', 0, 1, 'bad'),
                                   AssertionError()])
def test_a_handler_gets_an_error_that_names_the_sample(ds, error):
    seen = []
    def fail(value): raise error
    def keep(e): return seen.append(e) or True
    assert not list(ds.slice(2).to_tuple('cls').map_tuple(fail, handler=keep)) and len(seen)==2
    assert isinstance(seen[1], type(error)) and str(error) in str(seen[1])
    assert 'sample 1, in .map_tuple' in repr(seen[1])
    assert type(error).__name__ in repr(seen[1]) and seen[1].__cause__ is error

def fail(*args): raise ValueError('no')
FAILING = dict(
    decode=lambda ds, **kw: ds.decode(fail, **kw), to_tuple=lambda ds, **kw: ds.to_tuple('foo', **kw),
    map_tuple=lambda ds, **kw: ds.to_tuple('cls').map_tuple(fail, **kw), map=lambda ds, **kw: ds.map(fail, **kw),
    map_dict=lambda ds, **kw: ds.map_dict(cls=fail, **kw), rename=lambda ds, **kw: ds.rename(a='foo', **kw),
    rename_keys=lambda ds, **kw: ds.rename_keys(a='foo', **kw), select=lambda ds, **kw: ds.select(fail, **kw),
    extract_keys=lambda ds, **kw: ds.extract_keys('foo', **kw), xdecode=lambda ds, **kw: ds.xdecode(png=fail, **kw))

@pytest.mark.parametrize('step', FAILING)
def test_every_step_has_a_handler(ds, step):
    for source in ds, ds.shuffle(), ds.compose(identity):
        source = source.map(identity)   # from here fields are not checked beforehand
        assert list(FAILING[step](source, handler=steps.ignore_and_continue))==[]
        with pytest.raises((ValueError, StoreError)) as e: list(FAILING[step](source))
        assert 'sample' in str(e.value)+str(getattr(e.value, '__notes__', ''))

def test_a_handler_for_damaged_samples(folder, tmp_path):
    shutil.copytree(folder, tmp_path/'tars')
    path = tmp_path/'tars'/'0.tar'
    content = path.read_bytes()
    for text in (b'text 5', b'text 9'): content = content.replace(text, b'TEXT'+text[4:])
    damage(path, content)
    damaged,seen = ShardStore(str(tmp_path/'tars')),[]
    with pytest.raises(CorruptSample): list(RemoteDataset(damaged).to_tuple('txt'))
    def handler(error): return seen.append(error) or True
    ds = RemoteDataset(damaged, handler=handler).to_tuple('txt')
    for chain in (ds, ds.stream(), ds.batched(10, shuffle=False).unbatched()):
        seen.clear()
        assert count(chain)==n-2 and [type(e) for e in seen]==[CorruptSample]*2 and 'sample 5' in str(seen[0])
    with pytest.raises(ValueError, match='sample 5: left out'): ds[5]
    assert count(RemoteDataset(damaged, handler=steps.ignore_and_stop).to_tuple('txt'))==5
    assert len(list(DataLoader(ds, batch_size=10)))==5

def test_a_handler_for_bytes_that_cannot_be_decoded():
    seen = []
    def keep(error): return seen.append(error) or True
    pics = RemoteDataset(MemoryStore({'png':[png(0), b'damaged', png(2)]}, 'pics'))
    assert count(pics.decode('pil', handler=keep))==2
    assert type(seen[0]) is CorruptSample and "pics: sample 1, field 'png'" in str(seen[0])
    with pytest.raises(CorruptSample, match="sample 1, field 'png'"): list(pics.decode('pil'))

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
    workers = [Consumer(worker=worker, num_workers=2) for worker in range(2)]
    two = [len(b) for worker in workers for b, in some.batched(8).results((1,), worker, 0)]
    assert sum(two)==31 and sum(size<8 for size in two)<=2
    stops = ds.map(bad_third, handler=steps.ignore_and_stop).to_tuple('cls')
    assert [len(b) for b, in stops.batched(2, shuffle=False)]==[2,1]

# --- requests

def test_one_request_for_many_samples_and_the_next_one_ahead(monkeypatch):
    "The second request is made before the first sample has been given"
    asked,second = [],threading.Event()
    def read(self, numbers, fields, was=MemoryStore.read_values):
        asked.append((len(numbers), fields))
        if len(asked)==2: second.set()
        return was(self, numbers, fields)
    monkeypatch.setattr(MemoryStore, 'read_values', read)
    ds = RemoteDataset(MemoryStore({'txt':[b'%d'%i for i in range(2000)], 'cls':np.zeros(2000, np.uint8)}, 'mem'))
    for chain,fields in (ds.select(bool).shuffle(), ['txt','cls','txt.crc']), (ds.shuffle(), ['txt','txt.crc']):
        asked.clear()
        assert len(set(chain.decode().to_tuple('txt')))==2000
        assert [k for k,_ in asked]==[64]*31+[16] and all(f==fields for _,f in asked)
    asked.clear()
    second.clear()
    it = iter(ds.rename(t='txt', keep=False).shuffle())
    next(it)
    assert second.wait() and asked==[(64, ['txt','txt.crc'])]*2
    it.close()

# --- mixing

def letter(name, n):
    store = MemoryStore({'txt':[f'{name}{i}'.encode() for i in range(n)]}, name)
    return RemoteDataset(store).decode().to_tuple('txt')
LETTERS = A,B,C = letter('a', 300),letter('b', 100),letter('c', 20)

def names(stream): return [name for name, in stream]
def kinds(names): return Counter(name[0] for name in names)

def test_mix_until_all_or_the_first_have_run_out():
    for weights in None,[1,1,5]:
        assert len(set(names(mix([o.shuffle() for o in LETTERS], weights, seed=1))))==420
    assert len(mix(LETTERS))==420
    first = kinds(names(mix(LETTERS, seed=2))[:210])
    assert 120<first['a']<180 and 30<first['b']<70   # in proportion to their numbers
    got = kinds(names(mix(LETTERS[:2], [1,1], end='first', seed=1)))
    assert got['b']==100 and 60<got['a']<140
    with pytest.raises(TypeError, match='not known'): len(mix(LETTERS, end='first'))

@pytest.mark.parametrize('workers', [1,2])
def test_mix_of_a_number_of_samples(workers):
    mixed = mix([o.shuffle() for o in LETTERS], [1,1,2], end=2000, seed=1)
    got = [name for k in range(workers) for _,(name,) in mixed.start((1,0), Consumer(0, 1, k, workers))]
    assert len(mixed)==len(got)==2000 and abs(kinds(got)['c']-1000)<100 and abs(kinds(got)['a']-500)<100
    # each pass takes every sample once: in every process, the times of its samples differ by one at most
    each = [Counter(got)[f'c{i}'] for i in range(20)]
    assert max(each)-min(each)<=(1 if workers==1 else 12) and min(each)>30
    one,other = (names(mix([A.shuffle(seed=seed), B], seed=1)) for seed in (1,2))
    assert one!=other   # the seed of a stream counts, too

def test_mix_of_steps_and_streams():
    mixed = mix([A.map(lambda o: o if o[0].endswith('0') else None), B.with_epoch(50), C.repeat(3)], [1,1,1])
    assert kinds(names(mixed.map_tuple(str.upper)))==dict(A=30, B=50, C=60)
    nested = mix([mix([A,B], end=40), C.batched(5).unbatched()], [2,1])
    assert len(names(nested))==60
    assert count(mix([A,B]).batched(16))==25 and len(names(mix([A,B]).shuffle(20).slice(7)))==7

def test_samples_of_a_mix_are_decoded_as_their_own_stores_say(ds):
    other = RemoteDataset(MemoryStore({'png':[png(1)], 'cls':np.array([5])}, 'other'))
    mixed = list(mix([ds.slice(3), other]).decode('rgb8').to_tuple('png', 'cls'))
    assert sorted(label for _,label in mixed)==[0,1,2,5] and all(image.dtype==np.uint8 for image,_ in mixed)

def test_names_of_webdataset_for_mixing(ds):
    for k in 2,3: assert count(RoundRobin([ds]*k))==n*k
    assert count(RoundRobin([ds]*3).shuffle(10))==count(RandomMix([ds]*3, longest=True))==3*n
    two,one,three,four = (ds.slice(k).map(lambda sample, k=k: (k,)) for k in (2,1,3,4))
    assert [k for k, in RoundRobin([two,one,three], longest=True)]==[2,1,3,2,3,3]
    assert [k for k, in RoundRobin([four,one,three], longest=True)]==[4,1,3,4,3,4,3,4]
    assert [k for k, in RoundRobin([two,one,three])]==[2,1,3,2]

@pytest.mark.parametrize('datasets,kwargs,message', [
    ([], {}, 'at least one'), ([A,B], dict(weights=[1]), 'for each of 2'), ([A,B], dict(weights=[1,0]), 'positive'),
    ([A,B], dict(weights=[1,float('nan')]), 'positive'), ([A], dict(end='longest'), "'all', 'first'"),
    ([A], dict(end=0), 'number of samples'), ([A,B.select(bool)], {}, 'give weights'),
    ([A.stream(rank=1, world_size=2)], {}, 'give rank='), ([A], dict(rank=3, world_size=2), 'rank below')])
def test_wrong_mixes_are_errors(datasets, kwargs, message):
    with pytest.raises(ValueError, match=message): mix(datasets, **kwargs)

def test_a_mix_takes_datasets_and_streams_of_its_own_rank():
    with pytest.raises(TypeError, match='mix takes RemoteDatasets'): mix([A, [1,2]])
    assert names(mix([A.stream(rank=1, world_size=2)], rank=1, world_size=2))
