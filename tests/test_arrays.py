"Arrays as the world has them: NumPy, memory maps, HDF5, zarr, tensors; opened in the workers, or refused with advice"
import pickle, re, zipfile

import h5py
import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
import zarr
from torch.utils.data import TensorDataset

from fastai_remote import array_samples, IngestError, RedisStore, to_redis
from fastai_remote.codec.fields import get_codec
from fastai_remote.source.datasets import as_source
from in_memory import values, written

N = 40
PIXELS = np.random.default_rng(0).integers(0, 255, (N,6,5,3)).astype(np.uint8)
LABELS = np.arange(N)%3
CLASSES = np.array(['cat','dog','bird'])[LABELS]
REST = dict(cls=CLASSES, score=np.linspace(0, 1, N).astype(np.float32), big=np.arange(N)+2**60)
COMPOUND = [('x','f4'),('y','i8')]

def h5(path, arrays={'npy':PIXELS, **REST}, **kw):  # noqa: B006
    with h5py.File(path, 'w') as f:
        for name,values in arrays.items():
            if values.dtype.kind=='U': f[name] = [str(o) for o in values]
            else: f.create_dataset(name, data=values, **(kw if values.ndim>1 else {}))
    return path

def zarr_group(path, arrays={'npy':PIXELS, **REST}):  # noqa: B006
    group = zarr.open_group(path, mode='w')
    for name,array in arrays.items():
        group.create_array(name, data=array, **({'chunks':(7,6,5,3)} if array.ndim>1 else {}))
    return group

def npy(path, array):
    np.save(path, array)
    return path

def npz(path, **arrays):
    np.savez(path, **arrays)
    return path

def part_of_a_map(folder):
    m = np.memmap(folder/'x.raw', np.uint8, 'w+', shape=(N+2, 6, 5, 3))
    m[2:] = PIXELS
    return m[2:]

def zarr_folder(path, *arrays): return zarr_group(path, *arrays) and path

KINDS = dict(
    arrays=lambda d: {'npy':PIXELS, **REST},
    mapped=lambda d: {'npy':np.load(npy(d/'x.npy', PIXELS), mmap_mode='r'), **REST},
    part_of_a_map=lambda d: {'npy':part_of_a_map(d), **REST}, npz=lambda d: npz(d/'x.npz', npy=PIXELS, **REST),
    h5_path=lambda d: h5(d/'x.h5'), h5_file=lambda d: h5py.File(h5(d/'z.h5')),
    h5_chunks=lambda d: str(h5(d/'y.hdf5', chunks=(8,6,5,3), compression='gzip')),
    zarr_path=lambda d: zarr_folder(d/'x.zarr'), zarr_group=lambda d: zarr_group(d/'z.zarr'),
    zarr_memory=lambda d: zarr_group({}))

def check(store):
    found = sorted((store[i] for i in range(len(store))), key=lambda o: o['big'])
    assert len(found)==N and store.vocab==['bird','cat','dog']
    for i,o in enumerate(found):
        assert (o['npy']==PIXELS[i]).all() and o['npy'].dtype==np.uint8
        assert (o['cls'],o['score'],o['big'])==(CLASSES[i],REST['score'][i],2**60+i)

@pytest.mark.parametrize('kind', KINDS)
def test_arrays_of_one_length_are_samples_by_row(tmp_path, kind):
    "Exact, with their types; what a worker is sent of a file is small, whatever the size of the arrays"
    arrays = KINDS[kind](tmp_path)
    store,report = written(arrays)
    assert report.failed==0 and [store.manifest.fields[f]['codec'] for f in ('score','big')]==['f4','i8']
    check(store)
    source = as_source(arrays)
    assert repr(source.fingerprint())==repr(as_source(arrays).fingerprint())
    rows = source.read(np.arange(N)[::-1])
    sent = pickle.dumps(rows)
    names,samples = zip(*pickle.loads(sent))
    assert names[:2]==('row 39','row 38')
    assert type(samples[5]['npy']) is np.ndarray and (samples[5]['npy']==PIXELS[34]).all()
    if kind in ('h5_path','h5_chunks','h5_file','zarr_path','zarr_group'): assert source.in_files and len(sent)<3000
    if kind=='h5_path': h5(arrays)   # the file is closed, and can be written again
    if kind in ('mapped','part_of_a_map'):
        assert array_samples({'npy':arrays['npy']}).in_files
        assert len(pickle.dumps(array_samples({'npy':arrays['npy']}).read(np.arange(N))))<3000

@pytest.mark.slow
@pytest.mark.xdist_group('processes')
@pytest.mark.parametrize('kind,start', [('h5_file','multiprocessing'), ('zarr_group','loky')])
def test_workers_open_the_files(server, tmp_path, kind, start):
    "Workers that were forked, and workers that are Pythons of their own"
    with joblib.parallel_config(start):
        report = to_redis(KINDS[kind](tmp_path), server.url, kind, num_workers=2, chunk=8, progress=False)
    assert report.failed==0
    check(RedisStore(server.url, kind))

def test_an_array_without_a_name_is_a_field_by_its_type(tmp_path):
    with h5py.File(h5(tmp_path/'a.h5')) as f:
        path = npy(tmp_path/'a.npy', PIXELS)
        for o in path,np.load(path, mmap_mode='r'),f['npy'],zarr_group(tmp_path/'a.zarr')['npy']:
            assert np.array_equal(values(written(o)[0], 'npy'), PIXELS)
        assert np.array_equal(values(written(f['npy'], fn=lambda row: {'raw':row})[0], 'raw'), PIXELS)
        assert values(written(f['cls'])[0], 'cls')==CLASSES.tolist()

def test_fields_labels_and_splits():
    "Arrays that are chosen; pixels as images; a column of splits"
    data = {'images':PIXELS, 'y':LABELS, 'valid':np.arange(N)%4==0}
    store,_ = written(array_samples(data, fields={'images':'img.npyimg', 'y':'cls'}, valid_col='valid'))
    assert store.fields==['img.npyimg','cls'] and store.vocab==[0,1,2]
    assert store.splits=={'train':[0,30],'valid':[30,40]}
    store,report = written(array_samples({'images':PIXELS, 'y':LABELS}))
    assert store.fields==['images','y'] and "fields={'images': 'images.npyimg', …} makes them images" in str(report)
    store,_ = written({'png':PIXELS, 'cls':CLASSES})
    assert store.manifest.fields['png']['codec']=='png' and np.array_equal(values(store, 'png'), PIXELS)

def test_enumerations_compounds_and_files_in_hdf5(tmp_path):
    "Names of an enumeration are classes, members of a compound are fields, variable-length bytes of images are images"
    jpgs = [get_codec('jpg').to_bytes(o) for o in PIXELS]
    with h5py.File(tmp_path/'a.h5', 'w') as f:
        f.create_dataset('kind', data=LABELS, dtype=h5py.enum_dtype({'dog':0,'cat':1,'bird':2}, 'u1'))
        pictures = f.create_dataset('picture', (N,), h5py.vlen_dtype(np.uint8))
        for i,jpg in enumerate(jpgs): pictures[i] = np.frombuffer(jpg, np.uint8)
        f['points'] = np.array([(i, i/4) for i in range(N)], [('id','i4'),('angle','f8')])
    store,_ = written(tmp_path/'a.h5')
    assert store.fields==['kind','picture.jpg','id','angle'] and store.manifest.vocab['kind']==['dog','cat','bird']
    rows = list(zip(*(values(store, field) for field in ('kind','id','angle'))))
    assert rows==[(['dog','cat','bird'][LABELS[i]],i,i/4) for i in range(N)]
    assert [bytes(o) for o in store.get_many(range(N), ['picture.jpg'])['picture.jpg']]==jpgs

def test_times_and_ragged_arrays():
    ragged = np.empty(2, object)
    ragged[:] = [np.arange(3.), np.arange(5.)]
    store,_ = written({'npy':ragged, 't':np.array(['2020-01-01T00:00:00.000000001']*2, 'datetime64[ns]')})
    assert store[1]['npy'].tolist()==[0,1,2,3,4] and store[0]['t']=='2020-01-01T00:00:00.000000001'

def test_tensors_are_arrays():
    "In a dict, and in a dataset of torch"
    pixels,labels = torch.tensor(PIXELS),torch.tensor(LABELS)
    for source in {'npy':pixels, 'cls':labels},TensorDataset(pixels, labels):
        store,_ = written(source)
        assert np.array_equal(values(store, 'npy'), PIXELS) and values(store, 'cls')==LABELS.tolist()
    with pytest.raises(TypeError, match=r'a tensor of torch.bfloat16.*give \.float\(\)'):
        as_source({'npy':torch.zeros(3, 2, dtype=torch.bfloat16)})

# --- what is refused

def test_what_cannot_be_opened_or_stored_is_refused_with_advice(tmp_path):
    def refused(says, o, error=ValueError):
        with pytest.raises(error, match=says): as_source(o)
    with h5py.File(tmp_path/'w.h5', 'w') as f:
        f['npy'] = PIXELS
        refused(r'w.h5: open for writing.*close it and give its path', f)
    refused('the file of h5py is closed: give its path', f)
    with h5py.File('memory', 'w', driver='core', backing_store=False) as f:
        f['npy'] = PIXELS
        refused('a file of h5py that is in memory.*save it and give its path', f)
    two = h5(tmp_path/'two.h5', {'train_x':PIXELS, 'test_x':PIXELS[:7]})
    refused('arrays of different lengths: test_x 7, train_x 40: fields=', two)
    assert len(array_samples(two, fields={'test_x':'npy'}))==7
    objects = np.array([{}, None], object)
    for path in npy(tmp_path/'o.npy', objects),npz(tmp_path/'o.npz', npy=objects):
        refused(rf'{path.name}.*it is a pickle: load it yourself, if you trust it', path)
    refused('none.npy: no such file', tmp_path/'none.npy', FileNotFoundError)
    with pytest.raises(IngestError, match='dtype object'): written({'npy':np.array([[None,1],[2,3]], object)})
    with pytest.raises(ValueError, match="no column 'x'; there are npy, cls"):
        written(array_samples({'npy':PIXELS, 'cls':LABELS}, fields={'x':'npy'}))
    for array in np.memmap(tmp_path/'x.raw', np.float32, 'w+', shape=()),np.float32(1),torch.tensor(1.),np.array(1.):
        for o,name in ({'x':array},"array 'x' "), (array,''):
            with pytest.raises(ValueError, match=f'{name}is one value, and has no rows'): array_samples(o)

def test_damaged_files_are_named(tmp_path):
    whole = npz(tmp_path/'a.npz', x=np.random.default_rng(0).random((300,2))).read_bytes()
    single = npy(tmp_path/'b.npy', np.array(3))
    files = {'empty.npy':b'', 'empty.npz':b'', 'cut.npz':whole[:200], 'changed.npz':whole[:300]+b'!'*100+whole[400:],
             'zip.npy':whole, 'array.npz':single.read_bytes()}
    for name,content in files.items():
        (tmp_path/name).write_bytes(content)
        with pytest.raises(ValueError, match=rf'{name}.*damaged, or another kind of file'): array_samples(tmp_path/name)
    with pytest.raises(ValueError, match='b.npy: one value, and no rows'): array_samples(single)
    (tmp_path/'c.h5').write_bytes(b'text')
    with pytest.raises(OSError, match='c.h5: '): array_samples(tmp_path/'c.h5')
    with h5py.File(tmp_path/'d.h5', 'w') as f: f['a/link'] = h5py.SoftLink('/nowhere')
    with pytest.raises(ValueError, match="d.h5: 'a/link' is a link to something that is not there"):
        array_samples(tmp_path/'d.h5')

def test_what_is_no_array_in_a_file_is_left_out(tmp_path):
    with zipfile.ZipFile(npz(tmp_path/'x.npz', cls=np.arange(3), n=np.array(5)), 'a') as z: z.writestr('README', 'text')
    with h5py.File(tmp_path/'x.h5', 'w') as f:
        f['cls'],f['n'],f['dtype'] = np.arange(3),5,np.dtype('f4')
        f['group/loop'] = h5py.SoftLink('/')
        f['group/again'] = h5py.SoftLink('/group')
    for name in 'x.npz','x.h5':
        source = array_samples(tmp_path/name)
        assert list(source.types)==['cls'] and len(source)==3

def test_two_arrays_with_one_name_are_refused(tmp_path):
    "Members of compound dtypes are columns by their own names: the last one would replace the others"
    parts = {'train':np.zeros(3, COMPOUND), 'valid':np.zeros(2, COMPOUND)}
    for place in (parts, npz(tmp_path/'t.npz', **parts), h5(tmp_path/'t.h5', parts),
                  zarr_folder(tmp_path/'t.zarr', parts), zarr_group({}, parts)):
        with pytest.raises(ValueError, match="two arrays are called 'x'; one of them is 'valid'"): array_samples(place)

# --- columns or splits

def test_dicts_of_splits_stay_splits():
    "Sources of samples are no columns, whatever they are called"
    assert written({'train':PIXELS[:30], 'valid':PIXELS[30:]})[0].splits=={'train':[0,30],'valid':[30,40]}
    def numbers(o): return TensorDataset(torch.tensor([ord(o)]))
    for name in 'txt','train':
        for make in (lambda o: [{'txt':o}]),(lambda o: pd.DataFrame({'txt':[o]})),numbers:
            assert written({'raw':make('a'), name:make('b')})[0].splits=={'raw':[0,1], name:[1,2]}
    for source in ({'train':['a','b'], 'valid':['c']}, {'train':torch.rand(4, 3), 'valid':torch.rand(2, 3)},
                   {'a':['x','y'], 'b':['x']}, {'label':[{'txt':'a'}], 'train':[{'txt':'b'}]}):
        assert list(written(source)[0].splits)==list(source)

@pytest.mark.parametrize('source', [
    {'txt':('a b','c d'), 'cls':np.array(['x','y'])}, {'id':range(2), 'v.f4':torch.tensor([1.,2.])},
    {'bin':[b'ab',b'\xff'], 'npy':[[1,2],[3,4]]}, {'json':[{'a':1},{'b':2}], 'cls':['x','y']},
    {'txt':pd.Series(['a b','c d'], index=[1,0]), 'cls':pd.Categorical(['x','y'])}], ids=lambda o: ' '.join(o))
def test_a_dict_of_lists_is_one_of_columns(source):
    "Lists under the names of codecs are columns, and not splits: the same samples as a list of dicts gives"
    store,_ = written(source)
    columns = {field:list(values) for field,values in source.items()}
    rows,_ = written([{field:values[i] for field,values in columns.items()} for i in range(2)])
    assert not store.splits and len(store)==2 and store.manifest.fields==rows.manifest.fields
    for field in source: np.testing.assert_array_equal(values(store, field), values(rows, field))

@pytest.mark.parametrize('columns', [{'text':['good','bad'], 'label':['a','b']}, {'x':[1.,2.], 'label':[0,1]},
    {'x':torch.rand(2, 3), 'label':torch.arange(2)}, {'x':np.zeros((2, 3)), 'y':np.zeros(2)},
    {'image':['a.png','b.png'], 'label':[0,1]}], ids=['texts','lists','tensors','shapes','paths'])
def test_columns_whose_names_name_no_codec_are_no_splits(columns):
    "What the error advises works"
    with pytest.raises(ValueError, match=r"names '\w+', '\w+': these are columns, .* array_samples"): written(columns)
    fields = {name:{'label':'cls', 'text':'txt', 'image':'txt'}.get(name, f'{name}.npy') for name in columns}
    assert written(array_samples(columns, fields=fields))[0].fields==list(fields.values())

def test_what_the_report_advises_keeps_the_other_columns():
    columns = {'x':np.zeros((2, 3)), 'label':np.arange(2)}
    _,report = written(array_samples(columns))
    assert "label_col='label' makes it the label, and then fields={column: field} names the other" in str(report)
    assert written(array_samples(columns, label_col='label', fields={'x':'x.npy'}))[0].fields==['x.npy','cls']

@pytest.mark.parametrize('source,why', [
    ({'txt':['a','b'], 'cls':['x']}, "there are 2 in 'txt', 1 in 'cls'"), ({'cls':5}, "'cls' is of type int"),
    ({'txt':['a'], 'label':['x']}, "'label' names none"), ({'txt':{0:'a'}, 'cls':{0:'x'}}, "'txt' is of type dict"),
    ({'txt':(o for o in 'ab'), 'cls':['x','y']}, "'txt' is of type generator"),
    ({'raw':[{'txt':'a'}], 'cls':['x']}, "'raw' is of type list")])
def test_what_could_be_columns_or_splits_is_an_error(source, why):
    advice = r'array_samples.*\{split: source\} with names of splits that are not those of codecs'
    with pytest.raises(ValueError, match=f'{why}.*{advice}'): as_source(source)

def test_texts_in_bytes_name_splits(tmp_path):
    names = np.array([b'train',b'valid',b'train'])
    path = h5(tmp_path/'s.h5', {'cls':np.arange(3), 'a':names, 'b':names.astype(str)})
    for arrays,column in (path,'a'),(path,'b'),({'cls':np.arange(3), 'a':names},'a'):
        source = array_samples(arrays, fields={'cls':'cls'}, valid_col=column)
        assert source.splits=={'train':[0,2], 'valid':[2,3]}

def test_records_alone_are_rows(tmp_path):
    records = np.array([(1,2.),(3,4.)], [('cls','i4'),('age','f4')])
    with h5py.File(h5(tmp_path/'r.h5', {'r':records})) as f:
        for source in array_samples(records), array_samples(f['r']):
            assert [source.load(raw) for _,raw in source.read(np.arange(2))]==[{'cls':1,'age':2.},{'cls':3,'age':4.}]

# --- values that are not there, or no values

PIXEL_MASK = np.arange(48).reshape(3, 4, 4)==20

@pytest.mark.parametrize('field,column', [
    ('v.f4',np.ma.array([1.,999.,3.], mask=[0,1,0])), ('v.f4',[1.,np.ma.masked,3.]),
    ('cls',np.ma.array(['a','b','c'], mask=[0,1,0])),
    ('npy',np.ma.array(np.ones((3,4,4), np.uint8), mask=PIXEL_MASK)), ('v.f4',pd.Series([1,None,3], dtype='Int64')),
    ('v.f4',pl.Series([1,None,3]))], ids='float list text pixels pandas polars'.split())
def test_a_masked_value_is_a_failed_sample(field, column):
    "A value that is not there, in arrays that say so, is not replaced by another one"
    for options in {},{'fields':{'x':field}},None:
        source = {field:column, 'id':[0,1,2]} if options is None else array_samples({'x':column}, **options)
        store,report = written(source, max_failed=1)
        (name,reason), = report.failures
        assert len(store)==2 and name=='row 1'
        assert re.search('column .*(nothing in this row|whose mask would be lost)', reason), reason

def test_masked_labels_and_pixels_are_refused_one_by_one():
    "Where the label is a number of the vocabulary, and where an array becomes an image"
    store,report = written([{'cls':o} for o in np.ma.array([0,1,0], mask=[0,0,1])], vocab=[0,1])
    assert values(store, 'cls')==[0,1] and 'cls: a masked array' in report.failures[0][1]
    pixels = np.ones((4,4), np.uint8)
    for field in 'png','jpg','raw','bits':
        with pytest.raises(ValueError, match='a masked array, whose mask would be lost'):
            get_codec(field).to_bytes(np.ma.array(pixels, mask=np.eye(4)))
        assert get_codec(field).to_bytes(np.ma.array(pixels))

def test_text_that_is_not_utf8_is_one_failed_sample():
    for field in 'cls','txt':
        with pytest.raises(IngestError, match=r"row 1.*'b\\udcff' cannot be stored as UTF-8"):
            written({field:np.array([b'a',b'b\xff',b'c'])}, max_failed=0)

def test_only_bytes_become_bytes():
    "`bytes(5)` would be five zeros"
    source = array_samples({'x':[get_codec('png').to_bytes(PIXELS[0])]*30+[5]}, fields={'x':'bin'})
    with pytest.raises(IngestError, match='row 30'): written(source, max_failed=0)

# --- files that change

def test_another_array_has_another_fingerprint():
    assert repr(as_source({'npy':PIXELS}).fingerprint())!=repr(as_source({'npy':PIXELS[::-1]}).fingerprint())

def test_zarr_that_changed_in_place_is_read_anew(tmp_path):
    "Only files of data change, and not the one that describes the array: neither its blocks nor its fingerprint stay"
    array = zarr.create_array(tmp_path/'a.zarr', shape=(N,), chunks=(10,), dtype='i4')
    def fingerprint(): return repr(array_samples(tmp_path/'a.zarr').fingerprint())
    fingerprints = set()
    for value in 1,2:
        array[:] = value
        source = array_samples(tmp_path/'a.zarr')
        assert [row['cls'] for _,row in source.read(np.arange(N))]==[value]*N and source.is_identified
        fingerprints.add(fingerprint())
    array[N-1] = 3   # one block of several
    assert len({*fingerprints, fingerprint()})==3

def test_zarr_in_a_store_that_is_no_folder_is_read_anew(tmp_path):
    "Nothing says whether its data changed: nothing is kept for another source, and `append` does not refuse it"
    fingerprints = []
    for value in 1,2:
        with zarr.storage.ZipStore(tmp_path/'a.zip', mode='w') as store:
            zarr.create_array(store, data=np.full(N, value))
        with zarr.storage.ZipStore(tmp_path/'a.zip', mode='r') as store:
            source,again = (array_samples(zarr.open_array(store, mode='r')) for _ in range(2))
            assert [row['cls'] for _,row in source.read(np.arange(N))]==[value]*N and not source.is_identified
            assert repr(source.fingerprint())==repr(again.fingerprint())
            fingerprints.append(repr(source.fingerprint()))
    assert len(set(fingerprints))==2
