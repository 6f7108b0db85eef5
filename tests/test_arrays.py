"Arrays as the world has them: NumPy, memory maps, HDF5, zarr, tensors; opened in the workers, or the error says what to do"
import io, pickle, re, zipfile

import h5py
import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
import zarr
from PIL import Image
from torch.utils.data import TensorDataset

from fastai_remote import array_samples, IngestError, RedisStore, to_redis
from fastai_remote.source.datasets import as_source

def samples(store): return [store[i] for i in range(len(store))]

N = 40
PIXELS = np.random.default_rng(0).integers(0, 255, (N,6,5,3)).astype(np.uint8)
LABELS = np.arange(N)%3
CLASSES = np.array(['cat','dog','bird'])[LABELS]
SCORES = np.linspace(0, 1, N).astype(np.float32)

def h5(path, **kw):
    with h5py.File(path, 'w') as f:
        f.create_dataset('npy', data=PIXELS, **kw)
        f['cls'] = [str(o) for o in CLASSES]
        f['score'] = SCORES
        f['big'] = np.arange(N)+2**60
    return path

def zarr_group(path):
    g = zarr.open_group(path, mode='w')
    g.create_array('npy', data=PIXELS, chunks=(7,6,5,3))
    g.create_array('score', data=SCORES)
    g.create_array('cls', data=CLASSES)
    g.create_array('big', data=np.arange(N)+2**60)
    return g

def in_files(tmp_path):
    np.save(tmp_path/'x.npy', PIXELS)
    m = np.memmap(tmp_path/'x.raw', np.uint8, 'w+', shape=(N+2, 6, 5, 3))
    m[2:] = PIXELS
    rest = dict(cls=CLASSES, score=SCORES, big=np.arange(N)+2**60)
    np.savez(tmp_path/'x.npz', npy=PIXELS, **rest)
    return dict(arrays={'npy':PIXELS, **rest}, mapped={'npy':np.load(tmp_path/'x.npy', mmap_mode='r'), **rest}, part_of_a_map={'npy':m[2:], **rest},
                npz=tmp_path/'x.npz', h5_path=h5(tmp_path/'x.h5'), h5_chunks=str(h5(tmp_path/'y.hdf5', chunks=(8,6,5,3), compression='gzip')),
                h5_file=h5py.File(tmp_path/'x.h5'), zarr_path=(zarr_group(tmp_path/'x.zarr'), tmp_path/'x.zarr')[1], zarr_group=zarr_group(tmp_path/'z.zarr'),
                zarr_memory=zarr_group({}), tensors={'npy':torch.tensor(PIXELS), **rest, 'score':torch.tensor(SCORES)})

KINDS = 'arrays mapped part_of_a_map npz h5_path h5_chunks h5_file zarr_path zarr_group zarr_memory tensors'.split()

def check(store):
    found = sorted(samples(store), key=lambda o: o['big'])
    assert len(found)==N and store.vocab==['bird','cat','dog']
    for i,o in enumerate(found):
        assert (o['npy']==PIXELS[i]).all() and o['npy'].dtype==np.uint8 and o['cls']==CLASSES[i] and o['score']==SCORES[i] and o['big']==2**60+i

@pytest.mark.parametrize('kind', KINDS)
def test_rows_of_arrays_in_one_line(put, tmp_path, kind):
    "Arrays of one length are samples by row, exact, with their types"
    store,report = put(in_files(tmp_path)[kind])
    assert report.failed==0 and store.manifest.fields['score']['codec']=='f4' and store.manifest.fields['big']['codec']=='i8'
    check(store)

@pytest.mark.parametrize('kind', ['part_of_a_map','h5_chunks','h5_file','zarr_group','zarr_memory'])
@pytest.mark.parametrize('start', ['loky','multiprocessing'])
def test_workers_open_the_files(server, tmp_path, kind, start):
    "Workers that were forked, and workers that are Pythons of their own"
    source = in_files(tmp_path)[kind]
    with joblib.parallel_config(start): report = to_redis(source, server.url, 'w', num_workers=2, chunk=4, progress=False, overwrite=True)
    assert report.failed==0
    check(RedisStore(server.url, 'w'))

@pytest.mark.parametrize('kind', ['mapped','part_of_a_map','h5_path','h5_chunks','h5_file','zarr_path'])
def test_what_is_sent_is_a_path(tmp_path, kind):
    "A part of the source that a worker gets is small, whatever the size of the arrays"
    arrays = in_files(tmp_path)[kind]
    source = array_samples({'npy':arrays['npy']}) if 'map' in kind else array_samples(arrays)
    assert source.in_files and len(pickle.dumps(source.read(np.arange(N))))<3000
    rows = list(pickle.loads(pickle.dumps(source.read(np.arange(N)[::-1]))))
    assert [name for name,_ in rows[:2]]==['row 39','row 38'] and (rows[5][1]['npy']==PIXELS[34]).all() and type(rows[5][1]['npy']) is np.ndarray

def test_one_array(put, tmp_path):
    "An array without a name; `fn` gets its rows"
    np.save(tmp_path/'a.npy', PIXELS)
    with h5py.File(h5(tmp_path/'a.h5')) as f:
        for o in (tmp_path/'a.npy', np.load(tmp_path/'a.npy', mmap_mode='r'), f['npy'], zarr_group(tmp_path/'a.zarr')['npy']):
            store,_ = put(o, shuffle=False)
            assert store.fields==['npy'] and all((store[i]['npy']==PIXELS[i]).all() for i in range(N))
        store,_ = put(f['npy'], fn=lambda row: {'raw':row}, shuffle=False)
        assert (np.asarray(store[3]['raw'])==PIXELS[3]).all()
        store,_ = put(f['cls'], shuffle=False)
        assert [o['cls'] for o in samples(store)]==CLASSES.tolist()

def test_fields_labels_and_splits(put, tmp_path):
    "Arrays that are chosen; pixels as images; a column of splits"
    data = {'images':PIXELS, 'y':LABELS, 'valid':np.arange(N)%4==0}
    store,report = put(array_samples(data, fields={'images':'img.npyimg', 'y':'cls'}, valid_col='valid'))
    assert store.fields==['img.npyimg','cls'] and store.splits=={'train':[0,30],'valid':[30,40]} and store.vocab==[0,1,2]
    store,report = put(array_samples({'images':PIXELS, 'y':LABELS}))
    assert store.fields==['images','y'] and "fields={'images': 'images.npyimg', …} makes them images" in str(report)
    store,_ = put({'png':PIXELS, 'cls':CLASSES}, shuffle=False)
    assert store.manifest.fields['png']['codec']=='png' and (np.asarray(store[7]['png'])==PIXELS[7]).all()

def test_enumerations_compounds_and_files_in_hdf5(put, tmp_path):
    "Names of an enumeration are classes, members of a compound are fields, variable-length bytes of images are images"
    def jpg(i):
        Image.fromarray(PIXELS[i]).save(b:=io.BytesIO(), 'JPEG')
        return b.getvalue()
    with h5py.File(tmp_path/'a.h5', 'w') as f:
        f.create_dataset('kind', data=LABELS, dtype=h5py.enum_dtype({'dog':0,'cat':1,'bird':2}, 'u1'))
        d = f.create_dataset('picture', (N,), h5py.vlen_dtype(np.uint8))
        for i in range(N): d[i] = np.frombuffer(jpg(i), np.uint8)
        f['points'] = np.array([(i, i/4) for i in range(N)], [('id','i4'),('angle','f8')])
    store,_ = put(tmp_path/'a.h5', shuffle=False)
    assert store.fields==['kind','picture.jpg','id','angle'] and store.manifest.vocab['kind']==['dog','cat','bird']
    assert all(store[i]['kind']==['dog','cat','bird'][LABELS[i]] and store[i]['id']==i and store[i]['angle']==i/4 for i in range(N))
    assert [bytes(o) for o in store.get_many(range(N), ['picture.jpg'])['picture.jpg']]==[jpg(i) for i in range(N)]

def test_times_and_ragged_arrays(put):
    t = np.array(['2020-01-01T00:00:00.000000001']*2, 'datetime64[ns]')
    ragged = np.empty(2, object)
    ragged[:] = [np.arange(3.), np.arange(5.)]
    store,_ = put({'npy':ragged, 't':t}, shuffle=False)
    assert store[1]['npy'].tolist()==[0,1,2,3,4] and store[0]['t']=='2020-01-01T00:00:00.000000001'

def test_torch(put):
    store,_ = put(TensorDataset(torch.tensor(PIXELS), torch.tensor(LABELS)), shuffle=False)
    assert store.fields==['npy','cls'] and (store[4]['npy']==PIXELS[4]).all() and store[4]['cls']==LABELS[4]
    with pytest.raises(TypeError, match=r'a tensor of torch.bfloat16.*give \.float\(\)'): as_source({'npy':torch.zeros(3, 2, dtype=torch.bfloat16)})

def test_clear_refusals(put, tmp_path):
    "What cannot be opened in a worker, or cannot be stored, says what to do"
    with h5py.File(tmp_path/'w.h5', 'w') as f:
        f['npy'] = PIXELS
        with pytest.raises(ValueError, match=r"w.h5: open for writing.*close it and give its path"): as_source(f)
    with pytest.raises(ValueError, match='the file of h5py is closed: give its path'): as_source(f)
    with h5py.File('memory', 'w', driver='core', backing_store=False) as f:
        f['npy'] = PIXELS
        with pytest.raises(ValueError, match='a file of h5py that is in memory.*save it and give its path'): as_source(f)
    with h5py.File(tmp_path/'two.h5', 'w') as f: f['train_x'],f['test_x'] = PIXELS,PIXELS[:7]
    with pytest.raises(ValueError, match=r'arrays of different lengths: test_x 7, train_x 40: fields='): as_source(tmp_path/'two.h5')
    store,_ = put(array_samples(tmp_path/'two.h5', fields={'test_x':'npy'}))
    assert len(store)==7
    np.save(tmp_path/'o.npy', np.array([{}, None], object), allow_pickle=True)
    np.savez(tmp_path/'o.npz', npy=np.array([{}, None], object), allow_pickle=True)
    for name in 'o.npy','o.npz':
        with pytest.raises(ValueError, match=rf'{name}.*it is a pickle: load it yourself, if you trust it'): as_source(tmp_path/name)
    with pytest.raises(IngestError, match='dtype object'): put({'npy':np.array([[None,1],[2,3]], object)})
    with pytest.raises(FileNotFoundError, match='none.npy: no such file'): as_source(tmp_path/'none.npy')
    with pytest.raises(ValueError, match="no column 'x'; there are npy, cls"): put(array_samples({'npy':PIXELS, 'cls':LABELS}, fields={'x':'npy'}))

def test_dicts_of_splits_stay_splits(put):
    store,_ = put({'train':PIXELS[:30], 'valid':PIXELS[30:]})
    assert store.splits=={'train':[0,30],'valid':[30,40]}

@pytest.mark.parametrize('source', [{'txt':['a b','c d'], 'cls':['x','y']}, {'txt':('a b','c d'), 'cls':np.array(['x','y'])}, {'id':range(2), 'v.f4':torch.tensor([1.,2.])},
    {'bin':[b'ab',b'\xff'], 'cls':['x','y']}, {'npy':[[1,2],[3,4]], 'cls':[0,1]}, {'json':[{'a':1},{'b':2}], 'cls':['x','y']},
    {'txt':pd.Series(['a b','c d'], index=[1,0]), 'cls':pd.Categorical(['x','y'])}, {'cls':['x','y']}], ids=lambda o: ' '.join(o))
def test_a_dict_of_lists_is_one_of_columns(put, source):
    "Lists under the names of codecs are columns, and not splits: the same samples as a list of dicts gives"
    store,_ = put(source, shuffle=False)
    columns = {field:list(values) for field,values in source.items()}
    rows,_ = put([{field:values[i] for field,values in columns.items()} for i in range(2)], 'rows', shuffle=False)
    assert not store.splits and len(store)==2 and store.manifest.fields==rows.manifest.fields
    for got,want in zip(samples(store), samples(rows)):
        for field in want: np.testing.assert_array_equal(got[field], want[field])

@pytest.mark.parametrize('source,why', [({'txt':['a','b'], 'cls':['x']}, "there are 2 in 'txt', 1 in 'cls'"), ({'txt':['a'], 'label':['x']}, "'label' names none"),
    ({'train':range(2), 'raw':range(3)}, "'train' names none"), ({'txt':{0:'a'}, 'cls':{0:'x'}}, "'txt' is of type dict"), ({'txt':'ab', 'cls':['x','y']}, "'txt' is of type str"),
    ({'txt':(o for o in 'ab'), 'cls':['x','y']}, "'txt' is of type generator"), ({'cls':5}, "'cls' is of type int"), ({'raw':[{'txt':'a'}], 'cls':['x']}, "'raw' is of type list")])
def test_what_could_be_columns_or_splits_is_an_error(source, why):
    with pytest.raises(ValueError, match=rf'{why}.*array_samples.*\{{split: source\}} with names of splits that are not those of codecs'): as_source(source)

def test_splits_that_are_called_like_codecs(put):
    "Sources of samples are no columns, whatever they are called"
    for name in 'txt','img':
        for make in (lambda o: [{'txt':o}]), (lambda o: pd.DataFrame({'txt':[o]})), (lambda o: TensorDataset(torch.tensor([ord(o)]))):
            store,_ = put({'raw':make('a'), name:make('b')})
            assert store.splits=={'raw':[0,1], name:[1,2]}
    assert put({'raw':[{'txt':'a'}], 'train':[{'txt':'b'}]})[0].splits=={'raw':[0,1], 'train':[1,2]}
    assert put({'train':['a','b'], 'valid':['c']})[0].splits=={'train':[0,2], 'valid':[2,3]}

@pytest.mark.parametrize('field,values', [('v.f4',np.ma.array([1.,999.,3.], mask=[0,1,0])), ('cls',np.ma.array([1,0,3], mask=[0,1,0])), ('v.f4',[1.,np.ma.masked,3.]),
    ('cls',np.ma.array(['a','b','c'], mask=[0,1,0])), ('npy',np.ma.array(np.ones((3,4,4), np.uint8), mask=np.arange(48).reshape(3, 4, 4)==20)),
    ('v.f4',pd.Series([1,None,3], dtype='Int64')), ('v.f4',pl.Series([1,None,3]))], ids='float int list text pixels pandas polars'.split())
def test_a_masked_value_is_a_failed_sample(put, field, values):
    "A value that is not there, in arrays that say so, is not replaced by another one"
    for source in {field:values, 'id':[0,1,2]},array_samples({'x':values}),array_samples({'x':values}, fields={'x':field}):
        store,report = put(source, shuffle=False, max_failed=1)
        (name,reason), = report.failures
        assert len(store)==2 and name=='row 1' and re.search('column .*(nothing in this row|whose mask would be lost)', reason), reason

def test_masked_labels_and_pixels(put):
    "Also one by one, where the label is a number of the vocabulary, and where an array becomes an image"
    store,report = put([{'cls':o} for o in np.ma.array([0,1,0], mask=[0,0,1])], vocab=[0,1], shuffle=False)
    assert [o['cls'] for o in samples(store)]==[0,1] and 'cls: a masked array' in report.failures[0][1]
    pixels = np.ma.array(np.ones((4,4), np.uint8), mask=np.eye(4))
    for field in 'png','jpg','raw','bits':
        with pytest.raises(IngestError, match='a masked array, whose mask would be lost'): put([{field:pixels}])
        put([{field:np.ma.array(np.ones((4,4), np.uint8))}], field)

def test_fingerprints(tmp_path):
    "The same for the same data, and another one for other data"
    for kind,arrays in in_files(tmp_path).items(): assert repr(as_source(arrays).fingerprint())==repr(as_source(arrays).fingerprint()), kind
    assert repr(as_source({'npy':PIXELS}).fingerprint())!=repr(as_source({'npy':PIXELS[::-1]}).fingerprint())

def test_zarr_that_changed_in_place_is_read_anew(tmp_path):
    "Only files of data change, and not the one that describes the array: neither its blocks nor its fingerprint stay"
    array = zarr.create_array(tmp_path/'a.zarr', shape=(N,), chunks=(10,), dtype='i4')
    fingerprints = []
    for value in 1,2:
        array[:] = value
        source = array_samples(tmp_path/'a.zarr')
        assert [row['cls'] for _,row in source.read(np.arange(N))]==[value]*N and source.is_identified
        fingerprints += [repr(source.fingerprint())]
    assert len(set(fingerprints))==2 and repr(array_samples(tmp_path/'a.zarr').fingerprint())==fingerprints[1]
    array[N-1] = 3   # one block of several
    assert repr(array_samples(tmp_path/'a.zarr').fingerprint()) not in fingerprints

def test_zarr_in_a_store_that_is_no_folder_is_read_anew(tmp_path):
    "Nothing says whether its data changed: nothing is kept for another source, and `append` does not refuse it"
    values,fingerprints = [],[]
    for value in 1,2:
        with zarr.storage.ZipStore(tmp_path/'a.zip', mode='w') as store: zarr.create_array(store, data=np.full(N,
            value))
        with zarr.storage.ZipStore(tmp_path/'a.zip', mode='r') as store:
            source = array_samples(zarr.open_array(store, mode='r'))
            values += [{row['cls'] for _,row in source.read(np.arange(N))}]
            fingerprints += [repr(source.fingerprint())]
            assert not source.is_identified and repr(array_samples(zarr.open_array(store,
                mode='r')).fingerprint())==fingerprints[-1]
            assert pickle.loads(pickle.dumps(source.columns['cls'].args))==source.columns['cls'].args
    assert values==[{1},{2}] and len(set(fingerprints))==2

def test_the_file_can_be_written_again_afterwards(put, tmp_path):
    put(h5(tmp_path/'a.h5'))
    h5(tmp_path/'a.h5')

def test_one_value_has_no_rows():
    with pytest.raises(ValueError, match="array 'a' is one value, and has no rows"): array_samples({'a':np.array(3)})

@pytest.mark.parametrize('kind', ['npz','h5','zarr','zarr in memory'])
def test_two_arrays_with_one_name_are_refused(tmp_path, kind):
    "Members of compound dtypes are columns by their own names: the last one would replace the others"
    parts = {'train':np.zeros(3, [('x','f4'),('y','i8')]), 'valid':np.zeros(2, [('x','f4'),('y','i8')])}
    if kind=='npz': np.savez(path := tmp_path/'t.npz', **parts)
    elif kind=='h5':
        with h5py.File(path := tmp_path/'t.h5', 'w') as f:
            for name,values in parts.items(): f[name] = values
    else:
        path = zarr.open_group({} if 'memory' in kind else tmp_path/'t.zarr', mode='w')
        for name,values in parts.items(): path.create_array(name, data=values)
    with pytest.raises(ValueError, match="two arrays are called 'x'; one of them is 'valid'"): array_samples(path)

def test_what_is_no_array_in_a_file_is_left_out(tmp_path):
    np.savez(tmp_path/'x.npz', cls=np.arange(3), n=np.array(5))
    with zipfile.ZipFile(tmp_path/'x.npz', 'a') as z: z.writestr('README', 'text')
    with h5py.File(tmp_path/'x.h5', 'w') as f:
        f['cls'],f['n'],f['dtype'] = np.arange(3),5,np.dtype('f4')
        f['group/loop'] = h5py.SoftLink('/')
        f['group/again'] = h5py.SoftLink('/group')
    for name in 'x.npz','x.h5':
        source = array_samples(tmp_path/name)
        assert list(source.types)==['cls'] and len(source)==3

def test_damaged_files_are_named(tmp_path):
    np.savez_compressed(tmp_path/'a.npz', x=np.random.default_rng(0).random((300,2)))
    np.save(tmp_path/'b.npy', np.array(3))
    whole = (tmp_path/'a.npz').read_bytes()
    files = {'empty.npy':b'', 'empty.npz':b'', 'cut.npz':whole[:200], 'changed.npz':whole[:300]+b'!'*100+whole[400:],
             'other.npz':b'text', 'zip.npy':whole, 'array.npz':(tmp_path/'b.npy').read_bytes()}
    for name,content in files.items():
        (tmp_path/name).write_bytes(content)
        with pytest.raises(ValueError, match=rf'{name}.*damaged, or another kind of file'): array_samples(tmp_path/name)
    with pytest.raises(ValueError, match='b.npy: one value, and no rows'): array_samples(tmp_path/'b.npy')
    (tmp_path/'c.h5').write_bytes(b'text')
    with pytest.raises(OSError, match='c.h5: '): array_samples(tmp_path/'c.h5')
    with h5py.File(tmp_path/'d.h5', 'w') as f: f['a/link'] = h5py.SoftLink('/nowhere')
    with pytest.raises(ValueError, match="d.h5: 'a/link' is a link to something that is not there"):
        array_samples(tmp_path/'d.h5')

def test_records_alone(tmp_path):
    records = np.array([(1,2.),(3,4.)], [('cls','i4'),('age','f4')])
    with h5py.File(tmp_path/'r.h5', 'w') as f: f['r'] = records
    with h5py.File(tmp_path/'r.h5') as f:
        for source in array_samples(records), array_samples(f['r']):
            assert [source.load(raw) for _,raw in source.read(np.arange(2))]==[{'cls':1,'age':2.},{'cls':3,'age':4.}]

def test_texts_in_bytes_name_splits(tmp_path):
    names = [b'train',b'valid',b'train']
    with h5py.File(tmp_path/'s.h5', 'w') as f: f['cls'],f['a'],f['b'] = np.arange(3),names,[o.decode() for o in names]
    for arrays,column in (tmp_path/'s.h5','a'),(tmp_path/'s.h5','b'),({'cls':np.arange(3), 'a':np.array(names)},'a'):
        source = array_samples(arrays, fields={'cls':'cls'}, valid_col=column)
        assert source.splits=={'train':[0,2], 'valid':[2,3]}

def test_text_that_is_not_utf8_is_one_failed_sample(put):
    for field in 'cls','txt':
        with pytest.raises(IngestError, match=r"row 1.*'b\\udcff' cannot be stored as UTF-8"):
            put({field:np.array([b'a',b'b\xff',b'c'])}, max_failed=0)

def test_only_bytes_become_bytes(put):
    "`bytes(5)` would be five zeros"
    png = io.BytesIO()
    Image.fromarray(PIXELS[0]).save(png, 'PNG')
    source = array_samples({'x':[png.getvalue()]*30+[5]}, fields={'x':'bin'})
    with pytest.raises(IngestError, match='row 30'): put(source, max_failed=0)

def test_single_values_in_memory_maps_are_refused_like_others(tmp_path):
    for array in np.memmap(tmp_path/'x.raw', np.float32, 'w+', shape=()),np.float32(1),torch.tensor(1.),np.array(1.):
        with pytest.raises(ValueError, match="array 'x' is one value, and has no rows"): array_samples({'x':array})
        with pytest.raises(ValueError, match="is one value, and has no rows"): array_samples(array)
