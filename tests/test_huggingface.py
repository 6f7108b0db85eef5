"HuggingFace datasets: every kind of column, split and selection arrives as HuggingFace has it, in one line"
import datetime, decimal, io, json, os, subprocess, sys, tarfile
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('HF_DATASETS_DISABLE_PROGRESS_BARS', '1')

import joblib
import numpy as np
import pyarrow as pa
import pytest
datasets = pytest.importorskip('datasets')
from datasets import (Array2D, Audio, ClassLabel, Dataset, DatasetDict, Features, Image, IterableDataset,
    IterableDatasetDict, Json, List, Sequence, Translation, Value, load_dataset, load_from_disk)
from fastai.data.core import DataLoaders
from PIL import Image as Pictures

import fastai_remote.block
from conftest import draw
from fastai_remote import IngestError, RedisStore, ShardStore, hf_samples, shrink, to_redis, to_shards
from fastai_remote.ingest.run import ingest
from fastai_remote.source.datasets import as_source
from fastai_remote.testing import SourceTests
from fastai_remote.write.base import MemoryWriter

N,NAMES = 12,['bird','cat','dog']
OPTIONS = dict(num_workers=1, progress=False)

def picture(i, fmt='JPEG'):
    draw(i).resize((12,10)).save(f := io.BytesIO(), fmt)
    return f.getvalue()

FILES = [picture(i) for i in range(N)]

def pets(n=N, start=0):
    numbers = range(start, start+n)
    features = Features({'image':Image(), 'label':ClassLabel(names=NAMES), 'number':Value('int64')})
    return Dataset.from_dict({'image':[FILES[i%N] for i in numbers], 'label':[i%3 for i in numbers],
                              'number':list(numbers)}, features=features)

@pytest.fixture(params=['redis','shards'])
def put(request, tmp_path):
    "Write a source to a store: the store and the report"
    if request.param=='redis': server = request.getfixturevalue('server')
    def write(source, **options):
        options = {**OPTIONS, 'overwrite':True, **options}
        if request.param=='shards':
            report = to_shards(source, tmp_path/'shards', **options)
            return ShardStore(tmp_path/'shards'),report
        report = to_redis(source, server.url, 'd', **options)
        return RedisStore(server.url, 'd'),report
    return write

def in_memory(source, **options):
    writer = MemoryWriter('d')
    report = ingest(source, writer, **{**OPTIONS, **options})
    return writer.store,report

def stored(store, field='jpg'): return [bytes(b) for b in store.get_many(range(len(store)), field, check=True)[field]]
def column(store, field): return [store[i][field] for i in range(len(store))]
def check_pets(store, numbers):
    "Are these pets there, with their bytes and names, in any order?"
    found = column(store, 'number.i8')
    assert sorted(found)==sorted(numbers) and store.vocab==NAMES and store.fields==['jpg','cls','number.i8']
    assert stored(store)==[FILES[i%N] for i in found] and column(store, 'cls')==[NAMES[i%3] for i in found]

@pytest.fixture(scope='module')
def on_disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp('hf')/'pets'
    pets(100).save_to_disk(folder, num_shards=3)
    return load_from_disk(folder)

# --- kinds of datasets

SELECTIONS = {'all':lambda o: o, 'select':lambda o: o.select([7,3,5]), 'shuffle':lambda o: o.shuffle(seed=1),
    'filter':lambda o: o.filter(lambda n: n%2, input_columns='number'), 'torch':lambda o: o.with_format('torch'),
    'numpy':lambda o: o.with_format('numpy'), 'sorted':lambda o: o.sort('number', reverse=True),
    'shard':lambda o: o.shard(3, 1), 'two':lambda o: datasets.concatenate_datasets([o.select(range(5)), o.select(range(6, 9))]),
    'shuffled twice':lambda o: o.shuffle(seed=1).select(range(4)).shuffle(seed=2),
    'not decoded':lambda o: o.cast_column('image', Image(decode=False))}

@pytest.mark.parametrize('name', SELECTIONS)
@pytest.mark.parametrize('kind', ['memory','disk'])
def test_selections(name, kind, on_disk):
    dataset = SELECTIONS[name](on_disk if kind=='disk' else pets())
    store,report = in_memory(dataset)
    check_pets(store, [int(i) for i in dataset['number']])
    assert report.failed==0
    store,_ = in_memory(dataset, shuffle=False)
    assert column(store, 'number.i8')==[int(i) for i in dataset['number']]

def test_columns_that_a_format_leaves_out():
    store,_ = in_memory(pets().with_format('torch', columns=['label','number']))
    assert store.fields==['cls','number.i8']
    store,_ = in_memory(pets().rename_column('number', 'id').remove_columns('label'))
    assert store.fields==['jpg','id']

@pytest.mark.parametrize('backend', ['leader', 'multiprocessing', pytest.param('loky', marks=pytest.mark.slow)])
def test_one_line(put, on_disk, backend):
    "In the leading process, and in workers that are forked or spawned; and a selection of what is in memory"
    for dataset in on_disk, pets().select(range(3, 11)):
        with joblib.parallel_config('loky' if backend=='leader' else backend):
            store,report = put(dataset, num_workers=1 if backend=='leader' else 2)
        check_pets(store, list(dataset['number']))
        assert 'image -> jpg' in repr(report)

def test_splits(put):
    store,_ = put(DatasetDict(train=pets(8), validation=pets(4, 8)))
    assert store.splits=={'train':[0,8], 'validation':[8,12]}
    check_pets(store, range(12))
    assert sorted(column(store, 'number.i8')[8:])==[8,9,10,11]

def test_random_splits():
    store,_ = in_memory(pets(), splits={'train':None, 'valid':.25})
    assert store.splits=={'train':[0,9], 'valid':[9,12]}
    check_pets(store, range(N))

def test_streams(put):
    streams = pets().to_iterable_dataset(), pets().to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=5)
    for stream in streams: check_pets(put(stream)[0], range(N))
    store,_ = put(IterableDatasetDict(train=pets(8).to_iterable_dataset(), test=pets(4, 8).to_iterable_dataset()))
    assert store.splits=={'train':[0,8], 'test':[8,12]}
    check_pets(store, range(12))

def rows(n=5):
    for i in range(n):
        yield {'img':draw(i).resize((9,8)), 'text':f'number {i}', 'points':np.full((2,3), i/7, 'f4'), 'n':2**53+i}

def test_a_generator_without_features():
    for dataset in IterableDataset.from_generator(rows), Dataset.from_list(list(rows())):
        store,_ = in_memory(dataset, shuffle=False)
        assert store.fields==['png','txt','points.json','n.i8']
        for sample,row in zip(store[:], rows()):
            assert np.array_equal(np.asarray(sample['png']), np.asarray(row['img'])) and sample['n.i8']==row['n']
            assert sample['txt']==row['text'] and np.array_equal(np.float32(sample['points.json']), row['points'])

def test_a_transform_is_applied():
    "With `with_transform`, an item is what the function returns; names of classes are not known for it"
    def transform(rows): return {'npy':[np.asarray(o.convert('L')) for o in rows['image']], 'id':rows['number']}
    store,_ = in_memory(pets().with_transform(transform))
    assert store.fields==['npy','id']
    for sample in store[:]: assert np.array_equal(sample['npy'], np.asarray(pets()[sample['id']]['image'].convert('L')))

# --- builders of HuggingFace, from local files

@pytest.fixture(scope='module')
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp('files')
    for i in range(N):
        place = folder/'images'/('train' if i<9 else 'test')/NAMES[i%3]
        place.mkdir(parents=True, exist_ok=True)
        (place/f'{i}.jpg').write_bytes(FILES[i])
    pets().to_parquet(folder/'pets.parquet')
    (folder/'rows.csv').write_text('text,label,age\n'+''.join(f'a {i},{NAMES[i%3]},{i}\n' for i in range(N)))
    (folder/'rows.jsonl').write_text(''.join(json.dumps({'text':f'a {i}', 'tags':['x']*(i%3), 'age':i/2})+'\n' for i in range(N)))
    with tarfile.open(folder/'a.tar', 'w') as tar:
        for i in range(N):
            for name,content in (f'{i:03}.jpg',FILES[i]), (f'{i:03}.cls',b'%d'%(i%3)), (f'{i:03}.json',b'{"n":%d}'%i):
                (info := tarfile.TarInfo(name)).size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return folder

@pytest.fixture
def load(files, tmp_path):
    def load(builder, **options):
        for name in 'data_dir','data_files':
            if name in options: options[name] = str(files/options[name])
        return load_dataset(builder, cache_dir=str(tmp_path/'cache'), **options)
    return load

@pytest.mark.parametrize('streaming', [False,True])
def test_imagefolder(load, streaming):
    store,_ = in_memory(load('imagefolder', data_dir='images', streaming=streaming))
    assert store.splits=={'train':[0,9], 'test':[9,12]} and store.vocab==NAMES and store.fields==['jpg','cls']
    assert sorted(stored(store))==sorted(FILES)
    assert all(NAMES[FILES.index(b)%3]==name for b,name in zip(stored(store), column(store, 'cls')))

@pytest.mark.parametrize('streaming', [False,True])
def test_parquet(load, streaming):
    check_pets(in_memory(load('parquet', data_files='pets.parquet', streaming=streaming, split='train'))[0], range(N))

@pytest.mark.parametrize('streaming', [False,True])
def test_csv_and_json(load, streaming):
    store,_ = in_memory(load('csv', data_files='rows.csv', streaming=streaming, split='train'))
    assert store.fields==['txt','cls','age.i8'] and store.vocab==NAMES
    assert sorted((o['txt'],o['cls'],o['age.i8']) for o in store[:])==sorted((f'a {i}',NAMES[i%3],i) for i in range(N))
    store,_ = in_memory(load('json', data_files='rows.jsonl', streaming=streaming, split='train'))
    assert store.fields==['txt','tags.json','age.f8'] and all(o['tags.json']==['x']*(int(o['txt'][2:])%3) for o in store[:])

@pytest.mark.parametrize('streaming', [False,True])
def test_webdataset(load, streaming):
    store,_ = in_memory(load('webdataset', data_files='a.tar', streaming=streaming, split='train'))
    assert sorted(store.fields)==['cls','jpg','json','key.txt','url.txt'] and sorted(stored(store))==sorted(FILES)
    for o in store[:]: assert o['json']=={'n':int(o['key.txt'])} and o['cls']==o['json']['n']%3

# --- columns

TIME = datetime.datetime(2024, 1, 2, 3, 4, 5)
# feature, value, field, what comes back
COLUMNS = {
    'class':(ClassLabel(names=NAMES), 1, 'cls', 'cat'), 'classes':(List(ClassLabel(names=NAMES)), [2,0], 'labels', ['dog','bird']),
    'no classes':(List(ClassLabel(names=NAMES)), [], 'labels', []),
    **{dtype:(Value(dtype), value, f'x.{ext}', value) for dtype,ext,value in (('int8','i1',-128), ('int16','i2',-2**15),
        ('int32','i4',-2**31), ('int64','i8',2**62+1), ('uint8','u1',255), ('uint16','u2',2**16-1), ('uint32','u4',2**32-1),
        ('uint64','i8',2**63-1), ('float16','f2',.5), ('float32','f4',float(np.float32(.1))), ('float64','f8',.1), ('bool','u1',True),
        ('string','txt','ü\n'), ('large_string','txt','a'), ('binary','bin',b'\0\1'))},
    'timestamp':(Value('timestamp[us]'), TIME, 'x.txt', '2024-01-02T03:04:05'), 'date':(Value('date32'), TIME.date(), 'x.txt', '2024-01-02'),
    'nanoseconds':(Value('timestamp[ns]'), TIME, 'x.txt', '2024-01-02T03:04:05'),
    'zone':(Value('timestamp[s, tz=UTC]'), TIME.replace(tzinfo=datetime.timezone.utc), 'x.txt', '2024-01-02T03:04:05+00:00'),
    'decimal':(Value('decimal128(20, 3)'), decimal.Decimal('12345678901234567.125'), 'x.txt', '12345678901234567.125'),
    'array':(Array2D((2,3), 'int16'), np.arange(6, dtype='i2').reshape(2, 3), 'x.npy', np.arange(6, dtype='i2').reshape(2, 3)),
    'array of any length':(Array2D((None,2), 'float32'), np.ones((3,2), 'f4'), 'x.npy', np.ones((3,2), 'f4')),
    'vector':(List(Value('float32'), length=2), [.1,.2], 'x.npy', np.float32([.1,.2])),
    'numbers':(List(Value('int64')), [2**60+1], 'x.json', [2**60+1]), 'texts':(List(Value('string')), ['a',None], 'x.json', ['a',None]),
    'struct':({'a':Value('int8'), 'c':List(ClassLabel(names=NAMES))}, {'a':1, 'c':[0,2]}, 'x.json', {'a':1, 'c':['bird','dog']}),
    'boxes':(List(List(Value('float32'), length=4)), [], 'x.json', []), 'times':(List(Value('date32')), [TIME.date()], 'x.json', ['2024-01-02']),
    'translation':(Translation(['en','fr']), {'en':'a', 'fr':'b'}, 'x.json', {'en':'a', 'fr':'b'}),
    'json':(Json(), {'a':[1,None]}, 'x.json', {'a':[1,None]})}

@pytest.mark.parametrize('kind', ['table','stream'])
@pytest.mark.parametrize('name', COLUMNS)
def test_columns(name, kind):
    "Each type of column comes back with the same value, as the same type of number"
    feature,value,field,expected = COLUMNS[name]
    dataset = Dataset.from_dict({'x':[value]*3, 'id':[0,1,2]}, features=Features({'x':feature, 'id':Value('int32')}))
    store,report = in_memory(dataset if kind=='table' else dataset.to_iterable_dataset())
    assert store.fields==[field,'id'] and report.failed==0
    for sample in store[:]:
        found = sample[field]
        if not isinstance(expected, np.ndarray): assert found==expected
        else: assert found.dtype==expected.dtype and np.array_equal(found, expected)

SOUNDS = {'wav':b'RIFF\x24\0\0\0WAVEfmt ', 'flac':b'fLaC\0', 'ogg':b'OggS\0', 'mp3':b'ID3\4'}

@pytest.mark.parametrize('extension', SOUNDS)
def test_sounds_are_their_bytes(extension):
    file = {'bytes':Value('binary'), 'path':Value('string')}
    content = SOUNDS[extension]+bytes(40)
    dataset = Dataset.from_dict({'audio':[{'bytes':content, 'path':None}]*2}, features=Features({'audio':file})).cast_column('audio', Audio())
    for o in dataset, dataset.to_iterable_dataset():
        store,_ = in_memory(o)
        assert store.fields==[extension] and stored(store, extension)==[content]*2

@pytest.mark.parametrize('fmt,field', [('JPEG','jpg'), ('PNG','png'), ('WEBP','webp'), ('BMP','img'), ('TIFF','img')])
@pytest.mark.parametrize('by', ['bytes','path'])
def test_images_are_their_bytes(fmt, field, by, tmp_path):
    contents = [picture(i, fmt) for i in range(3)]
    for i,content in enumerate(contents): (tmp_path/f'{i}.x').write_bytes(content)
    values = contents if by=='bytes' else [str(tmp_path/f'{i}.x') for i in range(3)]
    dataset = Dataset.from_dict({'image':values}, features=Features({'image':Image(mode='RGB')}))
    for o in dataset, dataset.to_iterable_dataset():
        store,report = in_memory(o, shuffle=False)
        assert store.fields==[field] and stored(store, field)==contents and "mode='RGB'" in repr(report)

def test_images_of_several_formats():
    "share a field; so do the splits"
    contents = [picture(i, ('JPEG','PNG')[i%2]) for i in range(4)]
    def of(values): return Dataset.from_dict({'image':values}, features=Features({'image':Image()}))
    store,_ = in_memory(of(contents), shuffle=False)
    assert store.fields==['img'] and stored(store, 'img')==contents
    for splits in (dict(train=of(contents[::2]), valid=of(contents[1::2])), DatasetDict(train=of(contents[::2]), valid=of(contents[1::2]))):
        store,_ = in_memory(splits, shuffle=False)
        assert store.fields==['img'] and stored(store, 'img')==contents[::2]+contents[1::2]

def test_names_of_fields():
    class_label = ClassLabel(names=['a','b'])
    features = Features({'fine_label':class_label, 'coarse_label':class_label, 'left':Image(), 'image':Image(), 'a b':Value('int8'), 'f':Value('float32'),
        'txt':Value('string'), 'text':Value('string'), 'jpg':Value('binary'), 'index':Value('int64'), 'empty':Value('null'), 'tags':List(class_label), 'more':List(class_label)})
    row = dict.fromkeys(features, 1)|{'left':FILES[0], 'image':FILES[1], 'txt':'1', 'text':'2', 'jpg':b'1', 'empty':None, 'tags':[0], 'more':[1]}
    store,report = in_memory(Dataset.from_list([row]*2, features=features))
    assert store.fields==['cls','coarse_label.cls','left.jpg','jpg','a_b.i1','f.f4','txt','text.txt','jpg.bin','index','labels','more.labels']
    assert store[0]['txt']=='1' and store[0]['text.txt']=='2' and 'left out: empty' in repr(report)
    assert store.manifest.vocab=={f:['a','b'] for f in ('cls','coarse_label.cls','labels','more.labels')}
    features = Features({'fine':class_label, 'label':class_label})
    assert in_memory(Dataset.from_list([{'fine':0, 'label':1}], features=features))[0].fields==['fine.cls','cls']

def test_fields_that_the_user_chooses():
    store,_ = in_memory(hf_samples(pets(), fields={'label':'species.cls', 'number':None}))
    assert store.fields==['jpg','species.cls'] and store.manifest.vocab=={'species.cls':NAMES}
    store,_ = in_memory(hf_samples(DatasetDict(train=pets(), valid=pets()), {'label':'label.i2'}), shuffle=False)
    assert store.fields==['jpg','label.i2','number.i8'] and store.splits and column(store, 'label.i2')[:4]==[0,1,2,0]
    dataset = Dataset.from_dict({'x':[[1,2],[3]], 'breed':['b','a']})
    store,_ = in_memory(hf_samples(dataset, {'x':'x.npy', 'breed':'cls'}), shuffle=False)
    assert store[0]['x.npy'].dtype==np.int64 and store.vocab==['a','b'] and column(store, 'cls')==['b','a']

def test_fn_gets_fields():
    store,_ = in_memory(pets(), fn=shrink(6))
    assert store.fields==['jpg','cls','number.i8'] and min(store[0]['jpg'].size)==6 and store.vocab==NAMES

# --- values that are missing

def test_null_names_the_column():
    for feature,value in (Value('int64'),1), (Value('string'),'a'), (Image(),FILES[0]), (ClassLabel(names=NAMES),1), (Array2D((1,1), 'int8'),[[1]]):
        dataset = Dataset.from_dict({'x':[value]*4+[None], 'id':range(5)}, features=Features({'x':feature, 'id':Value('int64')}))
        for o in dataset, dataset.to_iterable_dataset():
            store,report = in_memory(o)
            assert len(store)==4 and report.failed==1
            name,reason = report.failures[0]
            assert name=='row 4' and "column 'x' has no value (null)" in reason and "fields={'x': None}" in reason and "'x.json'" in reason
    dataset = Dataset.from_dict({'x':['a',None], 'y':[1,None]})
    store,_ = in_memory(hf_samples(dataset, {'x':'x.json', 'y':'y.json'}), shuffle=False)
    assert store[:]==[{'x.json':'a', 'y.json':1}, {'x.json':None, 'y.json':None}]

@pytest.mark.parametrize('stream', [False,True])
def test_a_struct_of_nulls_is_not_null_itself(stream):
    "Also if its keys are those of a file, which is null without bytes and path"
    text,rows = Value('string'),[{'bytes':'a', 'path':None}, {'bytes':None, 'path':None}]
    features = Features({'x':{'bytes':text, 'path':text}, 'image':{'bytes':Value('binary'), 'path':text}})
    files = [{'bytes':FILES[0], 'path':None}, {'bytes':None, 'path':None}]
    dataset = Dataset.from_dict({'x':rows, 'image':files}, features=features).cast_column('image', Image())
    source = hf_samples(dataset.to_iterable_dataset() if stream else dataset, {'x':'x.json', 'image':None})
    assert in_memory(source, shuffle=False)[0][:]==[{'x.json':row} for row in rows]
    _,report = in_memory(dataset.to_iterable_dataset() if stream else dataset, max_failed=2)
    assert report.failed==1 and "column 'image' has no value (null) here" in report.failures[0][1]

def labelled(labels): return Dataset.from_dict({'label':labels, 'id':range(len(labels))}, features=Features({'label':ClassLabel(names=NAMES), 'id':Value('int64')}))

def test_unlabelled_samples_are_named():
    store,report = in_memory(labelled([0,1,2,-1,1]))
    assert len(store)==4 and report.failures[0][0]=='row 3' and "column 'label': -1 marks a sample without a label" in report.failures[0][1]
    with pytest.raises(ValueError, match=r"test: column 'label' has no labels, only -1: leave out a split.*fields=\{'label': None\}"):
        in_memory(DatasetDict(train=labelled([0,1]), test=labelled([-1,-1])))
    store,_ = in_memory(hf_samples(DatasetDict(train=labelled([0,1]), test=labelled([-1,-1])), {'label':None}))
    assert store.fields==['id'] and len(store)==4

# --- errors

def test_columns_without_a_field_are_named():
    images = Dataset.from_dict({'id':[1], 'pages':[[FILES[0]]]}, features=Features({'id':Value('int64'), 'pages':List(Image())}))
    with pytest.raises(TypeError, match=r"column 'pages': Images inside of a list or a dict.*fields=\{'pages': None\}.*dataset.map"): in_memory(images)
    assert in_memory(hf_samples(images, {'pages':None}))[0].fields==['id']
    file = Dataset.from_dict({'image':[{'bytes':FILES[0], 'path':None}]})
    with pytest.raises(TypeError, match=r"column 'image': bytes inside of a list or a dict.*dataset.cast_column"): in_memory(file)
    assert in_memory(file.cast_column('image', Image()))[0].fields==['jpg']
    with pytest.raises(ValueError, match="no column 'x'; there are image, label, number"): hf_samples(pets(), {'x':'y'})
    with pytest.raises(ValueError, match="two columns have the field 'a.i8'"): hf_samples(pets(), {'label':'a.i8', 'number':'a.i8'})
    with pytest.raises(TypeError, match="hf_samples takes a dataset of HuggingFace.*not a list"): hf_samples([1])
    with pytest.raises(TypeError, match="with_transform"): hf_samples(pets().with_transform(lambda o: o))

def test_splits_that_differ():
    with pytest.raises(ValueError, match="splits with different columns: train: image, label, number; test: image, number"):
        in_memory(DatasetDict(train=pets(), test=pets().remove_columns('label')))
    with pytest.raises(ValueError, match="column 'number' differs between splits"):
        in_memory(DatasetDict(train=pets(), test=pets().cast_column('number', Value('float32'))))

def test_a_missing_file_is_a_failed_sample(tmp_path):
    (tmp_path/'a.jpg').write_bytes(FILES[0])
    dataset = Dataset.from_dict({'image':[str(tmp_path/'a.jpg'), str(tmp_path/'gone.jpg')]}, features=Features({'image':Image()}))
    store,report = in_memory(dataset)
    assert len(store)==1 and 'gone.jpg' in report.failures[0][1]

def test_a_module_called_datasets_is_not_huggingface(tmp_path):
    "Nothing imports HuggingFace for those who do not use it, and a module of this name may be the user's own"
    (tmp_path/'datasets.py').write_text('class Dataset:\n    def __len__(self): return 3\n    def __getitem__(self, i): return {"id":i}\n')
    code = '''import sys, datasets
from fastai_remote import MemoryStore
from fastai_remote.ingest.run import ingest
from fastai_remote.write.base import MemoryWriter
ingest(datasets.Dataset(), writer := MemoryWriter(), num_workers=1, progress=False)
print(len(writer.store), [m for m in sys.modules if m.startswith(('datasets.','pyarrow'))])'''
    env = {**os.environ, 'PYTHONPATH':os.pathsep.join([str(tmp_path), *sys.path])}
    run = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], env=env, capture_output=True, text=True)
    assert run.stdout.strip()=='3 []', run.stderr

# --- what the store is used for

def test_from_redis_needs_no_y(server, tmp_path):
    to_redis(DatasetDict(train=pets(40), validation=pets(9, 40)), server.url, 'pets', **OPTIONS)
    dls = DataLoaders.from_redis(server.url, 'pets', bs=4, device='cpu')
    x,y = dls.one_batch()
    assert list(dls.vocab)==NAMES and x.shape==(4,3,10,12) and (len(dls.train_ds),len(dls.valid_ds))==(40,9)

@pytest.mark.parametrize('splits,sizes', [(('train','test'),(20,9)), (('train','valid','test'),(20,9)), (('train','test','validation'),(20,7))])
def test_names_of_splits_that_others_use(splits, sizes, server):
    "A test split is used for validation if there is no other, and never for training"
    parts = dict(zip(splits, (pets(20), pets(9, 20), pets(7, 29))))
    to_redis(DatasetDict(parts), server.url, 'split', overwrite=True, **OPTIONS)
    dls = DataLoaders.from_redis(server.url, 'split', bs=4, device='cpu')
    assert (len(dls.train_ds),len(dls.valid_ds))==sizes

def test_an_interrupted_ingest_is_resumed(on_disk, tmp_path):
    calls = []
    def stops_once(sample):
        calls.append(sample['number.i8'])
        if len(calls)==60: raise KeyboardInterrupt
        return sample
    def write(): return to_shards(on_disk.shuffle(seed=3), tmp_path/'d', fn=stops_once, chunk=16, **OPTIONS)
    with pytest.raises(KeyboardInterrupt): write()
    assert write().resumed>=16
    check_pets(ShardStore(tmp_path/'d'), range(100))

class TestTable(SourceTests):
    def make(self): return as_source(pets().select([5,3,8,1]))

class TestStream(SourceTests):
    def make(self): return as_source(pets().to_iterable_dataset())

@pytest.mark.parametrize('kind', ['table','stream'])
def test_times_with_nanoseconds_are_not_cut(kind):
    "Python's times have no nanoseconds, and Arrow drops them without a word"
    dataset = Dataset(pa.table({'x':pa.array([1,1000], pa.time64('ns')), 'id':[0,1]}))
    if kind=='table': assert [o['x.txt'] for o in in_memory(dataset)[0][:]]==['00:00:00.000000001','00:00:00.000001']
    else:
        with pytest.raises(TypeError, match="column 'x': a stream .* without their nanoseconds.*dataset.cast_column"):
            hf_samples(dataset.to_iterable_dataset())
    nested = Dataset(pa.table({'x':pa.array([[1]], pa.list_(pa.time64('ns')))}))
    with pytest.raises(TypeError, match="column 'x': times with nanoseconds inside of a list or a dict"):
        hf_samples(nested if kind=='table' else nested.to_iterable_dataset())

def test_chosen_fields_that_cannot_be_are_named():
    "Also if the user has chosen the field"
    binary = Dataset.from_dict({'b':[[b'x']]}, features=Features({'b':List(Value('binary'))}))
    with pytest.raises(TypeError, match="column 'b': bytes inside of a list or a dict"):
        hf_samples(binary, {'b':'b.json'})
    with pytest.raises(TypeError, match=r"fields=: 'label' is to be stored in 5, which is no name of a field"):
        hf_samples(pets(), {'label':5})
