"HuggingFace datasets: every kind of column, split and selection arrives as HuggingFace has it, in one line"
import datetime, decimal, os, subprocess, sys
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('HF_DATASETS_DISABLE_PROGRESS_BARS', '1')

import joblib
import numpy as np
import pyarrow as pa
import pytest
datasets = pytest.importorskip('datasets')
from datasets import (Array2D, Audio, ClassLabel, Dataset, DatasetDict, Features, Image, IterableDataset, Json, List,
    Translation, Value, load_from_disk)

from conftest import draw
from inputs import column, encoded, in_memory, stored
from fastai_remote import ShardStore, hf_samples, shrink, to_shards
from fastai_remote.source.datasets import as_source
from fastai_remote.testing import SourceTests

N,NAMES = 12,['bird','cat','dog']
LABEL,TEXT = ClassLabel(names=NAMES),Value('string')
FILE = {'bytes':Value('binary'), 'path':TEXT}

def picture(i, fmt='JPEG'): return encoded(draw(i).resize((12,10)), fmt)
FILES = [picture(i) for i in range(N)]

def make(features, **columns):
    "A dataset whose columns have these features; those that are not named are integers"
    return Dataset.from_dict(columns, features=Features({k:features.get(k, Value('int64')) for k in columns}))

def pets(n=N, start=0):
    numbers = range(start, start+n)
    return make({'image':Image(), 'label':LABEL}, image=[FILES[i%N] for i in numbers], label=[i%3 for i in numbers],
                number=list(numbers))

def both(dataset): return dataset,dataset.to_iterable_dataset()

def check_pets(store, numbers, in_order=False):
    "Are these pets there, with their bytes and names?"
    found = column(store, 'number.i8')
    assert (found if in_order else sorted(found))==(list(numbers) if in_order else sorted(numbers))
    assert store.vocab==NAMES and store.fields==['jpg','cls','number.i8']
    assert stored(store, 'jpg')==[FILES[i%N] for i in found] and column(store, 'cls')==[NAMES[i%3] for i in found]

@pytest.fixture(scope='module')
def on_disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp('hf')/'pets'
    pets(40).save_to_disk(folder, num_shards=3)
    return load_from_disk(folder)

# --- kinds of datasets

SELECTIONS = {'select':lambda o: o.select([7,3,5]), 'torch':lambda o: o.with_format('torch'),
    'filter':lambda o: o.filter(lambda n: n%2, input_columns='number'),
    'two':lambda o: datasets.concatenate_datasets([o.select(range(5)), o.select(range(6, 9))]),
    'shuffled twice':lambda o: o.shuffle(seed=1).select(range(4)).shuffle(seed=2),
    'not decoded':lambda o: o.cast_column('image', Image(decode=False))}

@pytest.mark.parametrize('name', SELECTIONS)
def test_selections_are_read_in_their_order(name, on_disk):
    for dataset in map(SELECTIONS[name], (pets(), on_disk)):
        store,report = in_memory(dataset)
        check_pets(store, [int(i) for i in dataset['number']], in_order=True)
        assert report.failed==0

@pytest.mark.slow
def test_workers_that_are_forked_or_spawned(tmp_path, on_disk):
    for k,(backend,dataset) in enumerate((('loky',on_disk), ('multiprocessing',pets().select(range(3, 11))))):
        with joblib.parallel_config(backend):
            report = to_shards(dataset, tmp_path/f'{k}', num_workers=2, progress=False)
        check_pets(ShardStore(tmp_path/f'{k}'), list(dataset['number']))
        assert 'image -> jpg' in repr(report)

def test_streams():
    check_pets(in_memory(pets().to_iterable_dataset())[0], range(N), in_order=True)
    check_pets(in_memory(pets().to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=5))[0], range(N))

def rows(n=5):
    for i in range(n):
        yield {'img':draw(i).resize((9,8)), 'text':f'number {i}', 'points':np.full((2,3), i/7, 'f4'), 'n':2**53+i}

def test_a_generator_without_features():
    for dataset in IterableDataset.from_generator(rows), Dataset.from_list(list(rows())):
        store,_ = in_memory(dataset)
        assert store.fields==['png','txt','points.json','n.i8']
        for sample,row in zip(store[:], rows(), strict=True):
            assert np.array_equal(np.asarray(sample['png']), np.asarray(row['img'])) and sample['n.i8']==row['n']
            assert sample['txt']==row['text'] and np.array_equal(np.float32(sample['points.json']), row['points'])

def test_a_transform_is_applied():
    "With `with_transform`, an item is what the function returns; names of classes are not known for it"
    def transform(rows): return {'npy':[np.asarray(o.convert('L')) for o in rows['image']], 'id':rows['number']}
    store,_ = in_memory(pets().with_transform(transform))
    assert store.fields==['npy','id'] and column(store, 'id')==list(range(N))
    for sample in store[:]: assert np.array_equal(sample['npy'], np.asarray(pets()[sample['id']]['image'].convert('L')))

# --- columns

TIME = datetime.datetime(2024, 1, 2, 3, 4, 5)
GRID = np.arange(6, dtype='i2').reshape(2, 3)
NUMBERS = dict(int8=('i1',-128), int16=('i2',-2**15), int32=('i4',-2**31), int64=('i8',2**62+1), uint8=('u1',255),
    uint16=('u2',2**16-1), uint32=('u4',2**32-1), uint64=('i8',2**63-1), float16=('f2',.5),
    float32=('f4',float(np.float32(.1))), float64=('f8',.1), bool=('u1',True))
TEXTS = dict(string=('txt','ü\n'), large_string=('txt','a'), binary=('bin',b'\0\1'))
# `name of a column: (feature, value, codec of its field, what comes back)`
COLUMNS = {**{dtype:(Value(dtype), value, codec, value) for dtype,(codec,value) in {**NUMBERS, **TEXTS}.items()},
    'timestamp':(Value('timestamp[us]'), TIME, 'txt', '2024-01-02T03:04:05'),
    'zone':(Value('timestamp[s, tz=UTC]'), TIME.replace(tzinfo=datetime.timezone.utc), 'txt',
            '2024-01-02T03:04:05+00:00'),
    'date':(Value('date32'), TIME.date(), 'txt', '2024-01-02'),
    'decimal':(Value('decimal128(20, 3)'), decimal.Decimal('12345678901234567.125'), 'txt', '12345678901234567.125'),
    'array':(Array2D((None,3), 'int16'), GRID, 'npy', GRID),
    'vector':(List(Value('float32'), length=2), [.1,.2], 'npy', np.float32([.1,.2])),
    'numbers':(List(Value('int64')), [2**60+1], 'json', [2**60+1]),
    'struct':({'a':Value('int8'), 'c':List(LABEL)}, {'a':1, 'c':[0,2]}, 'json', {'a':1, 'c':['bird','dog']}),
    'times':(List(Value('date32')), [TIME.date(),None], 'json', ['2024-01-02',None]),
    'duration':(Value('duration[s]'), datetime.timedelta(0, 9), 'txt', '0:00:09'),
    'durations':(List(Value('duration[us]')), [datetime.timedelta(1, 5)], 'json', ['1 day, 0:00:05']),
    'vectors':(List(List(Value('float32'), length=2), length=1), [[.1,.2]], 'npy', np.float32([[.1,.2]])),
    'translation':(Translation(['en','fr']), {'en':'a', 'fr':'b'}, 'json', {'en':'a', 'fr':'b'}),
    'json_values':(Json(), {'a':[1,None]}, 'json', {'a':[1,None]}),
    'label':(LABEL, 1, 'cls', 'cat'), 'classes':(List(LABEL), [2,0], 'labels', ['dog','bird']),
    'no_classes':(List(LABEL), [], 'labels', [])}

FIELDS = {name:{'label':'cls', 'classes':'labels'}.get(name, f'{name}.{codec}')
          for name,(_,_,codec,_) in COLUMNS.items()}

def test_columns_come_back_with_the_same_value_and_type():
    features = {name:feature for name,(feature,*_) in COLUMNS.items()}
    for dataset in both(make(features, **{name:[value]*3 for name,(_,value,*_) in COLUMNS.items()})):
        store,report = in_memory(dataset)
        assert store.fields==list(FIELDS.values()) and report.failed==0
        for name,(*_,expected) in COLUMNS.items():
            for found in column(store, FIELDS[name]):
                if not isinstance(expected, np.ndarray): assert found==expected, name
                else: assert found.dtype==expected.dtype and np.array_equal(found, expected), name

FILE_KINDS = [*((Image(mode='RGB'), picture(0, fmt), field) for fmt,field in
    (('JPEG','jpg'), ('PNG','png'), ('WEBP','webp'), ('BMP','img'))),
    *((Audio(), start+bytes(40), field) for start,field in
    ((b'RIFF\x24\0\0\0WAVEfmt ','wav'), (b'fLaC\0','flac'), (b'ID3\4','mp3'), (b'OggS\0','ogg')))]

@pytest.mark.parametrize('feature,content,field', FILE_KINDS, ids=[field for _,_,field in FILE_KINDS])
def test_images_and_sounds_are_their_bytes(feature, content, field, tmp_path):
    (tmp_path/'a.x').write_bytes(content)
    values = [{'bytes':content, 'path':None}, {'bytes':None, 'path':str(tmp_path/'a.x')}]
    for o in both(make({'x':FILE}, x=values).cast_column('x', feature)):
        store,report = in_memory(o)
        assert store.fields==[field] and stored(store, field)==[content]*2
        assert ("mode='RGB'" in repr(report))==isinstance(feature, Image)

def test_images_of_several_formats_share_a_field_and_so_do_splits():
    contents = [picture(i, ('JPEG','PNG')[i%2]) for i in range(4)]
    def of(values): return make({'image':Image()}, image=values)
    parts = dict(train=of(contents[::2]), valid=of(contents[1::2]))
    by_split = contents[::2]+contents[1::2]
    for source,want in (of(contents),contents), (parts,by_split), (DatasetDict(parts),by_split):
        assert stored(in_memory(source)[0], 'img')==want

def test_names_of_fields():
    letters = ClassLabel(names=['a','b'])
    features = Features({'fine_label':letters, 'coarse_label':letters, 'left':Image(), 'image':Image(),
        'a b':Value('int8'), 'f':Value('float32'), 'txt':TEXT, 'text':TEXT, 'jpg':Value('binary'), '__key__':TEXT,
        'index':Value('int64'), 'empty':Value('null'), 'tags':List(letters), 'more':List(letters)})
    row = dict(left=FILES[0], image=FILES[1], txt='1', text='2', jpg=b'1', empty=None, tags=[0], more=[1], __key__='k')
    store,report = in_memory(Dataset.from_list([{**dict.fromkeys(features, 1), **row}]*2, features=features))
    assert store.fields==['cls','coarse_label.cls','left.jpg','jpg','a_b.i1','f.f4','txt','text.txt','jpg.bin',
                          'key.txt','index','labels','more.labels']
    assert store[0]['txt']=='1' and store[0]['text.txt']=='2' and "'empty' is left out" in repr(report)
    assert store.manifest.vocab=={f:['a','b'] for f in ('cls','coarse_label.cls','labels','more.labels')}
    store,_ = in_memory(make({'fine':letters, 'label':letters}, fine=[0], label=[1]))
    assert store.fields==['fine.cls','cls']
    store,_ = in_memory(make({'label':TEXT, 'text':TEXT}, label=['cat','dog'], text=['a','b']))
    assert store.fields==['cls','txt'] and store.vocab==['cat','dog']

def test_fields_that_the_user_chooses():
    "With the methods of HuggingFace, or with `fields=`; `fn` gets these fields"
    assert in_memory(pets().with_format('torch', columns=['label','number']))[0].fields==['cls','number.i8']
    assert in_memory(pets().rename_column('number', 'id').remove_columns('label'))[0].fields==['jpg','id']
    store,_ = in_memory(hf_samples(pets(), fields={'label':'species.cls', 'number':None}))
    assert store.fields==['jpg','species.cls'] and store.manifest.vocab=={'species.cls':NAMES}
    store,_ = in_memory(hf_samples(DatasetDict(train=pets(), valid=pets()), {'label':'label.i2'}))
    assert store.fields==['jpg','label.i2','number.i8'] and store.splits=={'train':[0,12], 'valid':[12,24]}
    assert column(store, 'label.i2')[:4]==[0,1,2,0]
    store,_ = in_memory(hf_samples(pets(), fields={0:None, 'label':'species'}))   # by position, and any name
    assert store.fields==['species','number.i8'] and store.manifest.vocab=={'species':NAMES}
    dataset = Dataset.from_dict({'x':[[1,2],[3]], 'breed':['b','a']})
    store,_ = in_memory(hf_samples(dataset, {'x':'x.npy', 'breed':'cls'}))
    assert store[0]['x.npy'].dtype==np.int64 and store.vocab==['a','b'] and column(store, 'cls')==['b','a']
    store,report = in_memory(pets(), fn=shrink(6))
    assert 'image -> jpg' in repr(report)   # what `fn` gets
    assert store.fields==['jpg','cls','number.i8'] and min(store[0]['jpg'].size)==6 and store.vocab==NAMES

# --- values that are missing

@pytest.mark.parametrize('kind', ['table','stream'])
def test_null_names_the_column(kind):
    for feature,value in (Value('int64'),1), (Image(),FILES[0]), (LABEL,1), (Array2D((1,1), 'int8'),[[1]]):
        store,report = in_memory(both(make({'x':feature}, x=[value]*4+[None], id=range(5)))[kind=='stream'])
        (name,reason), = report.failures
        assert len(store)==4 and name=='row 4' and "column 'x': no value (null)" in reason
        assert "fields={'x': None}" in reason and "'x.json'" in reason

def test_a_struct_of_nulls_is_not_null_itself():
    "Also if its keys are those of a file, which is null without bytes and path; JSON stores what is null"
    rows = [{'bytes':'a', 'path':None}, {'bytes':None, 'path':None}]
    files = [{'bytes':FILES[0], 'path':None}, {'bytes':None, 'path':None}]
    features = {'x':{'bytes':TEXT, 'path':TEXT}, 'image':FILE}
    for dataset in both(make(features, x=rows, image=files, n=[1,None]).cast_column('image', Image())):
        store,_ = in_memory(hf_samples(dataset, {'x':'x.json', 'image':None, 'n':'n.json'}))
        assert store[:]==[{'x.json':row, 'n.json':n} for row,n in zip(rows, (1,None))]
        _,report = in_memory(hf_samples(dataset, {'n':None}), max_failed=2)
        assert report.failed==1 and "column 'image': no value (null) here" in report.failures[0][1]

def labelled(*labels): return make({'label':LABEL}, label=labels, id=range(len(labels)))

def test_unlabelled_samples_are_named():
    store,report = in_memory(labelled(0, 1, 2, -1, 1))
    (name,reason), = report.failures
    assert len(store)==4 and name=='row 3' and "column 'label': -1 marks a sample without a label" in reason
    splits = DatasetDict(train=labelled(0, 1), test=labelled(-1, -1))
    match = r"test: column 'label' has no labels, only -1: leave out a split.*fields=\{'label': None\}"
    with pytest.raises(ValueError, match=match): in_memory(splits)
    store,_ = in_memory(hf_samples(splits, {'label':None}))
    assert store.fields==['id'] and len(store)==4

def test_a_missing_file_is_a_failed_sample(tmp_path):
    (tmp_path/'a.jpg').write_bytes(FILES[0])
    store,report = in_memory(make({'image':Image()}, image=[str(tmp_path/'a.jpg'), str(tmp_path/'gone.jpg')]))
    assert len(store)==1 and 'gone.jpg' in report.failures[0][1]

@pytest.mark.parametrize('kind', ['table','stream'])
def test_times_with_nanoseconds_are_not_cut(kind):
    "Python's times have no nanoseconds, and Arrow drops them without a word"
    def of(array): return both(Dataset(pa.table({'x':array})))[kind=='stream']
    times = of(pa.array([1,1000], pa.time64('ns')))
    if kind=='table': assert column(in_memory(times)[0], 'x.txt')==['00:00:00.000000001','00:00:00.000001']
    else:
        match = "column 'x': a stream .* without their nanoseconds.*dataset.cast_column"
        with pytest.raises(TypeError, match=match): hf_samples(times)
    with pytest.raises(TypeError, match="column 'x': times with nanoseconds inside of a list or a dict"):
        hf_samples(of(pa.array([[1]], pa.list_(pa.time64('ns')))))

# --- errors

PAGES = make({'pages':List(Image())}, id=[1], pages=[[FILES[0]]])
UNTYPED = Dataset.from_dict({'image':[{'bytes':FILES[0], 'path':None}]})

@pytest.mark.parametrize('error,match,use', [
    (TypeError, r"column 'pages': Images inside of a list or a dict.*fields=\{'pages': None\}.*dataset.map",
        lambda: in_memory(PAGES)),
    (TypeError, "column 'image': bytes inside of a list or a dict.*dataset.cast_column", lambda: in_memory(UNTYPED)),
    (ValueError, "no column 'x'; there are image, label, number", lambda: hf_samples(pets(), {'x':'y'})),
    (ValueError, "would both be the field 'a.i8'", lambda: hf_samples(pets(), {'label':'a.i8', 'number':'a.i8'})),
    (TypeError, "fields=: 'label' is to be stored in 5, which is no name of a field",
        lambda: hf_samples(pets(), {'label':5})),
    (TypeError, 'hf_samples takes a dataset of HuggingFace.*not a list', lambda: hf_samples([1])),
    (TypeError, 'with_transform', lambda: hf_samples(pets().with_transform(lambda o: o))),
    (ValueError, 'splits with different columns: train: image, label, number; test: image, number',
        lambda: in_memory(DatasetDict(train=pets(), test=pets().remove_columns('label')))),
    (ValueError, "column 'number' differs between splits",
        lambda: in_memory(DatasetDict(train=pets(), test=pets().cast_column('number', Value('float32')))))])
def test_what_cannot_be_stored_is_named(error, match, use):
    with pytest.raises(error, match=match): use()

def test_what_the_errors_advise_works():
    assert in_memory(hf_samples(PAGES, {'pages':None}))[0].fields==['id']
    assert in_memory(UNTYPED.cast_column('image', Image()))[0].fields==['jpg']

@pytest.mark.slow
def test_a_module_called_datasets_is_not_huggingface(tmp_path):
    "Nothing imports HuggingFace for those who do not use it, and a module of this name may be the user's own"
    lines = 'class Dataset:', '    def __len__(self): return 3', '    def __getitem__(self, i): return {"id":i}'
    (tmp_path/'datasets.py').write_text('\n'.join(lines))
    code = '''import sys, datasets
from inputs import in_memory
store,_ = in_memory(datasets.Dataset())
print(len(store), [m for m in sys.modules if m.startswith(('datasets.','pyarrow'))])'''
    env = {**os.environ, 'PYTHONPATH':os.pathsep.join([str(tmp_path), *sys.path])}
    run = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], env=env, capture_output=True, text=True)
    assert run.stdout.strip()=='3 []', run.stderr

class TestTable(SourceTests):
    def make(self): return as_source(pets().shuffle(seed=3).select([5,3,8,1]))

class TestStream(SourceTests):
    def make(self): return as_source(pets().to_iterable_dataset())

# --- what reads our shards

@pytest.mark.parametrize('splits,maxcount', [(False,7), (True,7), (False,99)])
def test_folders_of_shards_are_read_as_they_are(tmp_path, splits, maxcount):
    "By `load_dataset` and WebDataset, which know nothing of manifests, indices and added parts; also after edits"
    import webdataset
    def row(i): return {'txt':f'text {i}', 'cls':i%3, 'tags.labels':['a'], 'x.f4':i/2}
    def rows(start, stop): return list(map(row, range(start, stop)))
    def named(rows): return {'train':rows} if splits else rows
    options = dict(num_workers=0, progress=False)
    def fn(row): return row if row['x.f4'] else None
    store = to_shards(named(rows(0, 30)), tmp_path/'d', maxcount=maxcount, fn=fn, max_failed=1, **options).store
    store = store.edit(set={'txt':{1:'other'}}, drop=[0]).append(named(rows(30, 33)), **options)
    store.add_fields(lambda row: {'more.u1':len(row['txt'])}, **options)
    want = sorted(f'text {i}' for i in range(1, 33))
    loaded = datasets.load_dataset(str(tmp_path/'d'), cache_dir=str(tmp_path/'cache'))
    assert sorted(loaded['train']['txt'])==want
    tars = sorted(map(str, (tmp_path/'d').glob('*.tar')))
    assert sorted(s['txt'] for s in webdataset.WebDataset(tars, shardshuffle=False).decode())==want
    assert {path.name for path in (tmp_path/'d').iterdir()}-{path.name for path in (tmp_path/'d').glob('*.tar')}=={
        '.fastai_remote','labels.json','manifest.json', *([] if splits else ['README.md'])}
    ShardStore.delete(tmp_path/'d')
    assert not (tmp_path/'d').exists()

@pytest.mark.parametrize('splits', [('a','b'), ('train','extra'), ('training set','dev'), ('test','valid')], ids=str)
def test_datasets_reads_all_splits_whatever_their_names(tmp_path, splits):
    "Names of splits that it does not know are no splits there, and no samples are left out; also when replaced"
    for there in splits,('train','valid'),splits:
        source = {split:[{'txt':f'{split} {i}', 'cls':'ab'[i%2]} for i in range(3)] for split in there}
        to_shards(source, tmp_path/'d', overwrite=True, num_workers=0, progress=False)
        loaded = datasets.load_dataset(str(tmp_path/'d'), cache_dir=str(tmp_path/'cache'))
        texts = sorted(text for rows in loaded.values() for text in rows['txt'])
        assert texts==sorted(f'{split} {i}' for split in there for i in range(3))
