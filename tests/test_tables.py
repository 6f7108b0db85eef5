"Tables as the world has them: pandas, polars, Arrow, Parquet and CSV; what they mean is kept, or an error says what to do"
import gzip, io, lzma, math, os, pickle, re, subprocess, sys, tracemalloc, uuid
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as pds
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from PIL import Image

from fastai_remote.source import frames
from fastai_remote import array_samples, csv_samples, IngestError, RedisStore, table_samples, to_redis
from fastai_remote.source.datasets import as_source

def rows(store, fields=None): return [store[i] if fields is None else {f:store[i][f] for f in fields} for i in range(len(store))]

def jpg(i, fmt='JPEG'):
    Image.fromarray(np.full((6,5,3), i%256, np.uint8)).save(b:=io.BytesIO(), fmt)
    return b.getvalue()

N = 20
DATA = dict(u=np.arange(N, dtype=np.uint8), big=np.arange(N)+2**60+1, x=np.linspace(0, 1, N), f=np.linspace(0, 1, N).astype(np.float32),
            flag=np.arange(N)%2==0, text=[f'text {i} é' for i in range(N)], raw=[bytes([i,0,255]) for i in range(N)], tags=[['a']*(i%3) for i in range(N)],
            when=[datetime(2020, 1, 1, 12, 0, i) for i in range(N)], day=[date(2020, 1, i+1) for i in range(N)])
KIND = ['dog','cat','bird']
TYPES = dict(u='u1', big='i8', x='f8', f='f4', flag='u1', text='txt', tags='json', when='txt', day='txt', kind='cls')

def as_pandas(): return pd.DataFrame({**DATA, 'kind':pd.Categorical([KIND[i%2] for i in range(N)], KIND)}, index=[3]*N)
def as_arrow():
    kind = pa.DictionaryArray.from_arrays(pa.array([i%2 for i in range(N)], pa.int8()), KIND)
    return pa.table({k:pa.array(v) for k,v in DATA.items()}).append_column('kind', kind)
def as_polars(): return pl.DataFrame(DATA).with_columns(pl.Series('kind', [KIND[i%2] for i in range(N)], dtype=pl.Enum(KIND)))
def as_parquet(tmp_path):
    pq.write_table(as_arrow(), tmp_path/'t.parquet', row_group_size=7)
    return tmp_path/'t.parquet'
TABLES = dict(pandas=lambda p: as_pandas(), polars=lambda p: as_polars(), arrow=lambda p: as_arrow(), batch=lambda p: as_arrow().to_batches()[0],
              reader=lambda p: as_arrow().to_reader(), lazy=lambda p: as_polars().lazy(), parquet=as_parquet, text_path=lambda p: str(as_parquet(p)),
              paths=lambda p: [as_parquet(p)], dataset=lambda p: pds.dataset(as_parquet(p)), folder=lambda p: table_samples(as_parquet(p).parent))

@pytest.mark.parametrize('kind', TABLES)
def test_types_values_and_labels_are_kept(put, tmp_path, kind):
    "One line for each kind of table: the values are exact, categories have their labels in their order, and types their width"
    store,report = put(TABLES[kind](tmp_path))
    assert (len(store),report.failed)==(N,0)
    found = sorted(rows(store), key=lambda row: row['u'])
    for i,row in enumerate(found):
        assert row['text']==DATA['text'][i] and row['raw.bin']==DATA['raw'][i] and row['tags']==DATA['tags'][i] and row['kind']==KIND[i%2]
        assert all(row[k]==DATA[k][i] for k in ('u','big','x','f','flag'))
        assert row['when'] in (f'2020-01-01T12:00:{i:02}', f'2020-01-01T12:00:{i:02}.000000') and row['day']==f'2020-01-{i+1:02}'
    typed = {k:d['codec'] for k,d in store.manifest.fields.items() if not k.endswith('.crc')}
    if kind=='pandas': typed |= dict(text='txt')   # columns of objects: each value decides
    assert {k:typed[k] for k in TYPES if k not in ('tags','day')}=={k:c for k,c in TYPES.items() if k not in ('tags','day')}
    expected = sorted(KIND[:2]) if kind=='reader' else KIND   # a stream does not know all labels beforehand
    assert store.manifest.vocab['kind']==expected

# --- columns that are chosen

def image_table(folder, n=12, fmt='JPEG', ext='.jpg'):
    "Images in `folder`, and a table of them"
    folder.mkdir(exist_ok=True)
    for i in range(n): (folder/f'im{i}{ext}').write_bytes(jpg(i*9, fmt))
    return dict(name=[f'im{i}{ext}' for i in range(n)], label=[KIND[i%3] for i in range(n)], tags=[' '.join(KIND[:i%3]) for i in range(n)],
                x=[i/8 for i in range(n)], y=list(range(n)), is_valid=[i%4==0 for i in range(n)])

def every_kind(data, tmp_path):
    "The same table in each form"
    pq.write_table(pa.table(data), tmp_path/'table.parquet', row_group_size=5)
    pd.DataFrame(data).to_csv(tmp_path/'table.csv', index=False)
    pd.DataFrame(data).to_csv(tmp_path/'table.tsv', index=False, sep='\t')
    return dict(pandas=pd.DataFrame(data), polars=pl.DataFrame(data), arrow=pa.table(data), parquet=tmp_path/'table.parquet', csv=tmp_path/'table.csv',
                tsv=tmp_path/'table.tsv')

@pytest.mark.parametrize('kind', ['pandas','polars','arrow','parquet','csv','tsv'])
def test_images_labels_and_splits_by_columns(put, tmp_path, kind):
    "Files that a column names are stored with their bytes; labels, several labels, numbers of several columns, and splits are columns, too"
    data = image_table(tmp_path/'ims')
    table = every_kind(data, tmp_path)[kind]
    kw = dict(folder=tmp_path/'ims', valid_col='is_valid')
    store,_ = put(table_samples(table, fn_col=0, label_col='label', **kw))
    assert store.splits=={'train':[0,9],'valid':[9,12]} and store.fields==['jpg','cls'] and store.vocab==sorted(KIND)
    original = {(tmp_path/'ims'/name).read_bytes():i for i,name in enumerate(data['name'])}
    for k in range(12):
        i = original[bytes(store.get_many([k], ['jpg'])['jpg'][0])]
        assert data['is_valid'][i]==(k>=9) and store[k]['cls']==data['label'][i]
    store,_ = put(table_samples(table, fn_col='name', label_col='tags', label_delim=' ', **kw))
    assert store.fields==['jpg','labels'] and sum(len(o['labels']) for o in rows(store))==12 and store.manifest.vocab['labels']==['cat','dog']
    store,_ = put(table_samples(table, fn_col='name', label_col=['x','y'], **kw))
    assert sorted(o['target.npy'].tolist() for o in rows(store, ['target.npy']))==[[i/8,i] for i in range(12)]
    assert {o['target.npy'].dtype for o in rows(store, ['target.npy'])}=={np.dtype('float64')}
    store,_ = put(table_samples(table, fields={'name':'img', 'y':'y.u1', 'label':'kind.cls', ('x','y'):'point.npy'}, folder=tmp_path/'ims'))
    assert store.fields==['img','y.u1','kind.cls','point.npy'] and sorted(o['y.u1'] for o in rows(store))==list(range(12))

def test_suffix_and_mixed_formats(put, tmp_path):
    "`suff` is appended, as in fastai; files of several formats go to `img`"
    data = image_table(tmp_path/'ims')
    df = pd.DataFrame({'name':[o.removesuffix('.jpg') for o in data['name']], 'label':data['label']})
    store,_ = put(table_samples(df, fn_col='name', label_col='label', folder=tmp_path/'ims', suff='.jpg'))
    assert store.fields==['jpg','cls'] and len(store)==12
    (tmp_path/'ims/one.png').write_bytes(png:=jpg(3, 'PNG'))
    df = pd.DataFrame({'name':['im1.jpg','one.png'], 'label':['a','b']})
    store,_ = put(table_samples(df, fn_col='name', label_col='label', folder=tmp_path/'ims'))
    assert store.fields==['img','cls'] and png in [bytes(o) for o in store.get_many([0,1], ['img'])['img']]

def test_names_of_splits_in_their_order(put, tmp_path):
    "A column may name the splits; `val` and `validation` are `valid`"
    data = dict(txt=[f't{i}' for i in range(40)], part=[['test','validation','train','extra'][i%4] for i in range(40)])
    for table in every_kind(data, tmp_path).values():
        store,_ = put(table_samples(table, valid_col='part', fields={'txt':'txt'}))
        assert store.splits=={'train':[0,10],'valid':[10,20],'test':[20,30],'extra':[30,40]}
        assert [{int(store[i]['txt'][1:])%4 for i in range(*store.splits[s])} for s in store.splits]==[{2},{1},{0},{3}]

@pytest.mark.parametrize('kind', ['pandas','arrow','parquet','csv'])
def test_a_row_without_a_split_is_named(tmp_path, kind):
    data = dict(txt=['a','b','c'], part=['train',None,'valid'])
    table = every_kind(data, tmp_path)[kind]
    with pytest.raises(ValueError, match='(row 1|:3): column .part.: nothing there'): put_nowhere(table_samples(table, valid_col='part'))

def put_nowhere(source): return source.splits or source.srcs or source.plan

@pytest.mark.parametrize('kind', ['pandas','polars','arrow','parquet','csv'])
def test_missing_values_name_row_and_column(put, tmp_path, kind):
    "A label that is missing, and a value that is missing, are failures that name their row and column"
    data = dict(cls=['a','b',None,'a']*5, age=[1.5]*19+[None], n=[None]+[2]*19)
    table = every_kind(data, tmp_path)[kind]
    fields = {'cls':'cls', 'age':'age.f4', 'n':'n.f4'}
    store,report = put(table_samples(table, fields=fields), max_failed=20)
    reasons = [reason for _,reason in report.failures]
    first = sorted(name for name,_ in report.failures)
    if kind=='csv': assert report.failed==7 and sum('nothing in this row' in o for o in reasons)==7
    else:
        assert sum("column 'cls': nothing in this row" in o for o in reasons)==5 and any('row 2' in o for o in first)
        if kind!='pandas': assert any("column 'n': nothing in this row" in o for o in reasons)   # pandas has nan there, which is a number

def test_whole_numbers_with_gaps_are_no_labels(put):
    "pandas makes floats of whole numbers if one is missing"
    with pytest.raises(IngestError, match='row 0.*column .cls.: 1.0 is a float; labels are texts or whole numbers'):
        put(pd.DataFrame({'cls':[1,2,None]}), shuffle=False)

def test_several_columns_are_exact():
    with pytest.raises(ValueError, match='9007199254740993 does not fit float64, which would make 9007199254740992.0 '):
        s = table_samples(pd.DataFrame({'a':[2**53+1], 'b':[.5]}), fields={('a','b'):'v.npy'})
        s.load(s.read(np.array([0]))[0][1])

@pytest.mark.parametrize('make', [pd.DataFrame, pl.DataFrame, pa.table], ids=['pandas','polars','arrow'])
def test_types_that_need_care(put, make):
    "Times keep nanoseconds and zones, decimals their digits, and durations are refused"
    ns = np.array(['2020-01-01T00:00:00.123456789','2021-02-03T04:05:06.000000007'], 'datetime64[ns]')
    store,_ = put(make({'t':ns, 'd':[Decimal('1.10'),Decimal('2.25')]}), shuffle=False)
    assert [o['t'] for o in rows(store)]==['2020-01-01T00:00:00.123456789','2021-02-03T04:05:06.000000007'] and [o['d'] for o in rows(store)]==['1.10','2.25']
    with pytest.raises(IngestError, match='column .wait.: a duration'): put(make({'wait':[timedelta(1)]*2}))
    store,report = put(make({'u':np.array([1,2**64-1], np.uint64)}), shuffle=False)
    assert report.failed==1 and 'does not fit int64' in report.failures[0][1] and store[0]['u']==1

def test_names_that_no_field_can_have(put):
    "Names are changed so that they can be stored, and the report says so; two that become the same are refused"
    store,report = put(pd.DataFrame({'Image Path':['a','b'], 'id':['x','y'], 'text':[1,2], 'url:0':['u','v'], 7:[1.5,2.5]}))
    assert store.fields==['Image_Path','id.txt','text','url_0','7'] and "column 'id' is field 'id.txt'" in str(report)
    with pytest.raises(ValueError, match="'a b' and 'a_b' would both be the field 'a_b': fields="): put(pd.DataFrame({'a b':[1], 'a_b':[2]}))
    with pytest.raises(ValueError, match="two columns are called 'a'"): put(pd.DataFrame([[1,2]], columns=['a','a']))

def test_the_report_advises_on_files_and_labels(put):
    _,report = put(pd.DataFrame({'path':['a.jpg','b.jpg'], 'label':['x','y']}))
    assert "column 'path' names image files and is stored as text: fn_col='path'" in str(report) and "label_col='label' makes it the label" in str(report)

def test_images_in_cells(put):
    "Bytes of images are image fields, named after their format; another format later on is a failure that says what to do"
    cells = [jpg(i*9) for i in range(30)]
    for df in (pd.DataFrame({'picture':cells}), pa.table({'picture':cells}), pa.table({'picture':[{'bytes':o, 'path':None} for o in cells]})):
        store,_ = put(df)
        assert store.fields==['picture.jpg'] and sorted(map(bytes, store.get_many(range(30), ['picture.jpg'])['picture.jpg']))==sorted(cells)
    store,report = put(pa.table({'picture':cells+[jpg(7, 'PNG')]}), shuffle=False)
    assert report.failed==1 and "png, where the first rows have jpg: fields={'picture': 'picture.img', …}" in report.failures[0][1]
    store,report = put(table_samples(pa.table({'picture':cells+[jpg(7, 'PNG')]}), fields={'picture':'picture.img'}))
    assert report.failed==0 and len(store)==31

def test_vectors_of_a_fixed_length_are_arrays(put):
    a = np.arange(24, dtype=np.float32).reshape(4, 6)/7
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(a.ravel()), 6)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(a.reshape(4, 2, 3))
    store,_ = put(pa.table({'emb':fixed, 'grid':tensors}), shuffle=False)
    assert all((store[i]['emb']==a[i]).all() and (store[i]['grid']==a[i].reshape(2, 3)).all() and store[i]['emb'].dtype==np.float32 for i in range(4))
    store,_ = put(pl.DataFrame({'emb':pl.Series(a.tolist(), dtype=pl.Array(pl.Float32, 6))}), shuffle=False)
    assert all((store[i]['emb']==a[i]).all() and store[i]['emb'].dtype==np.float32 for i in range(4))

IDS = [uuid.UUID(int=i) for i in range(4)]
ARROW_TYPES = dict(view=(pa.array(['a','b',None,'d'], pa.string_view()), 'txt', ['a','b',None,'d']),
    bytes_view=(pa.array([b'a',b'b',b'c',b'd'], pa.binary_view()), 'bin', [b'a',b'b',b'c',b'd']),
    runs=(pa.RunEndEncodedArray.from_arrays([2,4], ['x','y']), 'txt', ['x','x','y','y']),
        number_runs=(pa.RunEndEncodedArray.from_arrays([3,4], pa.array([1,None], pa.int16())), 'i2', [1,1,1,None]),
    label_runs=(pa.RunEndEncodedArray.from_arrays([2,4], pa.array(['x','y']).dictionary_encode()), 'txt',
        ['x','x','y','y']),
    views_in_lists=(pa.array([['a'],['b','c'],[],['d']], pa.list_(pa.string_view())), 'json',
        [['a'],['b','c'],[],['d']]), list_view=(pa.array([['a'],['b','c'],[],['d']], pa.list_view(pa.string())),
            'json', [['a'],['b','c'],[],['d']]),
    categories=(pa.DictionaryArray.from_arrays(pa.array([0,1,1,0], pa.int8()), pa.array(['a','b'], pa.string_view())),
        'cls', ['a','b','b','a']),
    uuid=(pa.ExtensionArray.from_storage(pa.uuid(), pa.array([o.bytes for o in IDS], pa.binary(16))), 'txt',
        list(map(str, IDS))))

@pytest.mark.parametrize('name', ARROW_TYPES)
@pytest.mark.parametrize('kind', ['table','batch','reader','parquet'])
def test_types_of_arrow_that_have_no_kernel(put, tmp_path, name, kind):
    "Views, runs and UUIDs are read as what they stand for; a value that is missing is a failed sample"
    column,codec,values = ARROW_TYPES[name]
    table = pa.table({'x':column, 'n':range(4)})
    if kind=='parquet':
        if 'runs' in name or name=='categories': pytest.skip('Parquet does not have this type')
        pq.write_table(table, tmp_path/'a.parquet', row_group_size=3)
    source = dict(table=lambda: table, batch=lambda: table.to_batches()[0],
        reader=lambda: table_samples(table.to_reader()), parquet=lambda: tmp_path/'a.parquet')[kind]()
    store,report = put(source, max_failed=1)
    found = {o['n']:o['x'] for o in rows(store)}
    assert store.manifest.fields['x']['codec']==codec and found=={k:v for k,v in enumerate(values) if v is not None}
    assert len(report.failures)==values.count(None)
    for _,reason in report.failures: assert reason.startswith("ValueError: column 'x': nothing in this row (None)")

def test_files_of_several_kinds_are_refused(tmp_path):
    "The name of each file counts, and not only that of the first"
    made = every_kind(dict(id=[1,2], cls=['a','b']), tmp_path)
    for a,b in ((made['csv'],tmp_path/'table.parquet'), (tmp_path/'table.parquet',made['tsv'])):
        with pytest.raises(ValueError,
            match=f'{a.name} and .*{b.name} are files of different kinds'): table_samples([a,b])
    (tmp_path/'B.CSV').write_text('id,cls\n3,c\n')
    parts = table_samples([made['csv'],tmp_path/'B.CSV']).stream(9)
    assert [row['id'] for part in parts for _,row in part]==['1','2','3']

def test_splits_of_a_column_of_views(tmp_path):
    table = pa.table({'n':range(3), 'part':pa.array(['train','valid','train'], pa.string_view())})
    pq.write_table(table, tmp_path/'a.parquet')
    for o in table,tmp_path/'a.parquet': assert table_samples(o, valid_col='part').splits=={'train':[0,2],'valid':[2,3]}

def test_parquet_of_huggingface(put, tmp_path):
    "Class names and images by the metadata that the files of the Hub have"
    features = {'image':{'_type':'Image'}, 'label':{'_type':'ClassLabel', 'names':KIND}, 'many':{'_type':'List', 'feature':{'_type':'ClassLabel', 'names':['p','q']}},
                'grid':{'_type':'Array2D', 'shape':[2,2], 'dtype':'float32'}, 'note':{'_type':'Value', 'dtype':'string'}}
    import json
    t = pa.table({'image':[{'bytes':jpg(i*9), 'path':f'{i}.jpg'} for i in range(9)], 'label':[i%3 for i in range(9)], 'many':[[0,1][:i%3] for i in range(9)],
                  'grid':[[[i,1.],[2,3]] for i in range(9)], 'note':[f'n{i}' for i in range(9)]})
    pq.write_table(t.replace_schema_metadata({'huggingface':json.dumps({'info':{'features':features}})}), tmp_path/'a.parquet', row_group_size=4)
    store,_ = put(tmp_path/'a.parquet')
    assert set(store.fields)=={'jpg','cls','many','grid','note'} and store.manifest.vocab=={'cls':KIND, 'many':['p','q']}
    for o in rows(store):
        i = int(o['note'][1:])
        assert o['cls']==KIND[i%3] and o['many']==['p','q'][:i%3] and o['grid'].tolist()==[[i,1],[2,3]] and o['grid'].dtype==np.float32
        assert abs(np.asarray(o['jpg']).mean()-9*i)<2

def test_fn_gets_rows_as_they_are(put, tmp_path):
    "`fn` gets the row, or the chosen fields; what it returns has the types that it has"
    df = pd.DataFrame({'age':np.array([100,200], np.uint8), 'kind':pd.Categorical(['b','a'])})
    store,_ = put(df, fn=lambda row: {'age':row['age']/1000, 'cls':row['kind']}, shuffle=False)
    assert [store[i]['age'] for i in (0,1)]==[.1,.2] and store.vocab==['a','b']
    store,_ = put(table_samples(df, fields={'age':'age', 'kind':'cls'}), fn=lambda o: {**o, 'age':o['age']*300}, shuffle=False)
    assert [store[i]['age'] for i in (0,1)]==[30000,60000]

# --- Parquet: several files, memory, interruption

def test_several_files_and_partitions(put, tmp_path):
    "Files of one folder, hive partitions as columns, columns that only some files have; failures name file and row"
    for k,kind in enumerate(('cat','dog')):
        (tmp_path/f't/kind={kind}').mkdir(parents=True)
        for j in range(2): pq.write_table(pa.table({'n':[k*20+j*10+i for i in range(10)]}), tmp_path/f't/kind={kind}/{j}.parquet', row_group_size=3)
    store,_ = put(table_samples(tmp_path/'t', label_col='kind', fields={'n':'n.u1'}))
    assert store.fields==['n.u1','cls'] and sorted((o['n.u1'],o['cls']) for o in rows(store))==[(i,'cat' if i<20 else 'dog') for i in range(40)]
    pq.write_table(pa.table({'n':[100], 'extra':['e']}), tmp_path/'t/kind=dog/2.parquet')
    store,report = put(table_samples(tmp_path/'t'), max_failed=.99, chunk=64)
    assert len(store)==1 and report.failures[0][1].startswith("ValueError: column 'extra': nothing in this row") and re.match(r'\d.parquet: row \d', report.failures[0][0])
    pq.write_table(pa.table({'n':['text']}), tmp_path/'t/kind=dog/3.parquet')
    with pytest.raises(ValueError, match='have columns that differ.*n'): table_samples(tmp_path/'t')

class CountingFiles(LocalFileSystem):
    "Local files, and how many bytes of them were read"
    cachable,n = False,0
    def _open(self, path, *args, **kwargs):
        file,files = open(path, 'rb'),self
        class Counted(io.RawIOBase):
            def seekable(self): return True
            def readable(self): return True
            def seek(self, *args): return file.seek(*args)
            def tell(self): return file.tell()
            def read(self, size=-1):
                b = file.read(size)
                files.n += len(b)
                return b
        return Counted()

def test_the_footer_of_a_parquet_file_is_read_once_by_a_process(tmp_path):
    "It holds the smallest and the largest image of each row group, so it is a large part of the file"
    rows = {'jpg':[os.urandom(1000) for _ in range(400)], 'part':['train','valid']*200}
    for k in range(2): pq.write_table(pa.table(rows), tmp_path/f'{k}.parquet', row_group_size=4, compression='none')
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    files = CountingFiles()
    source = table_samples(pds.dataset(str(tmp_path), filesystem=files), valid_col='part')
    got = [row['jpg'] for _,row in source.read(np.arange(len(source)))]
    assert sorted(got)==sorted(rows['jpg']*2)
    assert files.n<4*size, files.n/size
    assert 2<=len(frames._row_groups.values)<=64   # of 200; each use goes through all of them

def test_a_parquet_file_that_is_replaced_is_read_anew(tmp_path):
    "Nothing of the file that was there before is kept, whatever of it was read"
    def write(add): pq.write_table(pa.table({'n':np.arange(20)+add}), tmp_path/'a.parquet', row_group_size=5)
    write(0)
    source = table_samples(tmp_path/'a.parquet')
    assert [row['n'] for _,row in source.read(np.arange(5))]==list(range(5))
    for add in 10**6,10**12:
        write(add)
        assert [row['n'] for _,row in source.read(np.arange(10))]==list(range(add, add+10))

def test_parquet_splits_without_reading_all(tmp_path):
    "Splits of Parquet files are counted per row group; each row is in exactly one, in any order of reading"
    n = 1000
    pq.write_table(pa.table({'id':range(n), 'part':[['train','valid','test'][i*7%11%3] for i in range(n)]}), tmp_path/'a.parquet', row_group_size=64)
    source = table_samples(tmp_path/'a.parquet', fields={'id':'id'}, valid_col='part')
    numbers = np.random.default_rng(0).permutation(n)
    found = {int(i):source.load(raw)['id'] for i,(_,raw) in zip(numbers, pickle.loads(pickle.dumps(source.read(numbers))))}
    assert sorted(found.values())==list(range(n)) and list(source.splits)==['train','valid','test']
    for name,(start,stop) in source.splits.items(): assert [found[i] for i in range(start, stop)]==[i for i in range(n) if ['train','valid','test'][i*7%11%3]==name]

def test_splits_of_large_row_groups_do_not_make_reading_slow(tmp_path):
    "A worker looks once for the rows of a split, whatever the size of the row group, and makes no object of each"
    n = 300_000
    table = pa.table({'id':range(n),
        'part':pa.array(['train','valid',None,'test']).take(pa.array(np.arange(n)%4//2*3))})
    pq.write_table(table, tmp_path/'a.parquet', row_group_size=n)
    source = table_samples(tmp_path/'a.parquet', fields={'id':'id'}, valid_col='part')
    tracemalloc.start()
    part = source.read(np.arange(0, n, 30))
    ids = [row['id'] for _,row in part]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert source.splits=={'train':[0,n//2],'test':[n//2,n]} and ids[:3]==[0,60,120] and peak<20_000_000
    calls = []
    part._of_split = lambda *a, f=part._of_split: calls.append(a) or f(*a)
    assert len(list(part))==n//30 and len(calls)==2

@pytest.mark.parametrize('kind', ['pandas','polars','arrow'])
def test_splits_of_a_table_in_memory_are_found_in_flat_memory(kind):
    "No list of the values of the whole split column"
    n = 399_999
    make = dict(pandas=pd.DataFrame, polars=pl.DataFrame, arrow=pa.table)[kind]
    source = table_samples(make({'part':np.array(['b','train','valid'])[np.arange(n)%3].tolist()}), valid_col='part')
    assert source.plan.split=='part'
    tracemalloc.start()
    assert source.splits=={'train':[0,n//3],'valid':[n//3,n//3*2],'b':[n//3*2,n]}
    assert tracemalloc.get_traced_memory()[1]<12_000_000
    tracemalloc.stop()
    assert list(source.splits)==['train','valid','b']
    assert [source._order[start] for start,_ in source.splits.values()]==[1,2,0]

def test_a_row_without_a_split_names_file_and_row(tmp_path):
    for k,part in enumerate((['train']*9, ['train']*8+[None])): pq.write_table(pa.table({'id':range(9), 'part':part}),
        tmp_path/f'{k}.parquet', row_group_size=5)
    with pytest.raises(ValueError,
        match="1.parquet: row 8: column 'part': nothing there"): print(table_samples(tmp_path, valid_col='part').splits)
    pq.write_table(pa.table({'id':[1], 'part':[[1]]}), tmp_path/'0.parquet')
    with pytest.raises(ValueError,
        match=r"0.parquet: column 'part' has the type list<.*, which cannot name splits"):
        print(table_samples(tmp_path/'0.parquet', valid_col='part').splits)

@pytest.mark.parametrize('kind', ['pandas','polars','arrow','parquet'])
def test_a_table_that_changed_is_not_resumed(tmp_path, kind):
    "The fingerprint of a table is the same in each process, and another one if a value changes"
    data = dict(id=list(range(300)), cls=['a','b']*150)
    first = table_samples(every_kind(data, tmp_path)[kind]).fingerprint()
    assert first==table_samples(every_kind(data, tmp_path)[kind] if kind!='parquet' else tmp_path/'table.parquet').fingerprint() or kind=='parquet'
    (tmp_path/'x').mkdir()
    other = table_samples(every_kind({**data, 'id':[*range(299),7]}, tmp_path/'x')[kind])
    assert repr(first)!=repr(other.fingerprint())

_objects = '''
import numpy as np, pandas as pd
from PIL import Image
from fastai_remote import table_samples
class Anything: pass
images = [Image.new('L', (3,3), i) for i in range(4)]
arrays = [np.arange(9000)+i for i in range(4)]
for column in images, arrays, [Anything() for _ in range(4)], [{'a','b','c'} for _ in range(4)]:
    print(table_samples(pd.DataFrame({'x':column, 'n':range(4)})).fingerprint())
'''

def test_objects_in_a_table_are_the_same_in_another_process():
    "No memory address and no order of a set gets into what an ingest is known by; of arrays all values count"
    found = [subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True,
        env={**os.environ, 'PYTHONHASHSEED':seed}).stdout
             for code,seed in ((_objects,'1'), (_objects,'2'), (_objects.replace('(9000)+i', '(9000)*(i+1)'),'1'))]
    assert found[0]==found[1] and [a==b for a,b in zip(found[0].split('\n'),
        found[2].split('\n'))]==[True,False,True,True,True]

def test_interrupted_and_repeated(server, tmp_path):
    "After an interruption the same call goes on; with another order of fields it does not"
    pq.write_table(pa.table({'id':range(400), 'cls':['a','b']*200}), tmp_path/'a.parquet', row_group_size=50)
    calls = []
    def fn(o):
        calls.append(o)
        if len(calls)==200: raise KeyboardInterrupt
        return o
    def write(): return to_redis(table_samples(tmp_path/'a.parquet', fields={'id':'id', 'cls':'cls'}), server.url, 'stop', fn=fn, num_workers=1, chunk=32, progress=False)
    with pytest.raises(KeyboardInterrupt): write()
    report = write()
    assert report.resumed>=96 and report.written==400
    store = RedisStore(server.url, 'stop')
    assert sorted((store[i]['id'],store[i]['cls']) for i in range(400))==[(i,'ab'[i%2]) for i in range(400)]

def test_row_groups_are_read_in_workers_in_constant_memory(tmp_path):
    "The leading process keeps nothing of the rows; a worker keeps few row groups"
    n,size = 200_000,10_000
    with pq.ParquetWriter(tmp_path/'a.parquet', pa.schema({'id':pa.int64(), 'txt':pa.string()})) as w:
        for k in range(0, n, size): w.write_table(pa.table({'id':range(k, k+size), 'txt':['some words']*size}))
    source = table_samples(tmp_path/'a.parquet')
    assert source.as_is
    tracemalloc.start()
    parts = [source.read(np.arange(k, k+100)) for k in range(0, n, 1000)]
    assert tracemalloc.get_traced_memory()[1]<3_000_000 and max(len(pickle.dumps(p)) for p in parts)<4000
    tracemalloc.stop()
    assert [source.load(raw)['id'] for _,raw in parts[150]]==list(range(150_000, 150_100))

def test_workers_of_their_own(put, tmp_path):
    "Two processes that know nothing but what they are sent"
    data = image_table(tmp_path/'ims', 60)
    table = every_kind(data, tmp_path)['parquet']
    store,report = put(table_samples(table, fn_col='name', label_col='label', folder=tmp_path/'ims'), num_workers=2, chunk=8)
    assert (len(store),report.failed)==(60,0) and store.class_counts()==dict.fromkeys(sorted(KIND), 20)

def test_splits_as_a_dict_of_tables(put, tmp_path):
    data = dict(cls=['b','a']*10, id=list(range(20)))
    for kind,table in every_kind(data, tmp_path).items():
        store,_ = put({'train':table, 'valid':table_samples(table) if kind!='tsv' else csv_samples(table)})
        assert store.splits=={'train':[0,20],'valid':[20,40]} and sorted(o['id'] for o in rows(store))==sorted([*range(20)]*2) and store.vocab==['a','b']

def test_one_random_division(put, tmp_path):
    path = as_parquet(tmp_path)
    store,_ = put(path, splits={'train':None, 'valid':.25})
    assert store.splits=={'train':[0,15],'valid':[15,20]} and sorted(o['u'] for o in rows(store))==list(range(20))

# --- what cannot be read says what to do

def test_clear_refusals(tmp_path):
    from fastai_remote.source.datasets import as_source
    path = as_parquet(tmp_path)
    for o,match in ((pa.chunked_array([[1,2]]), r"ChunkedArray: a column without a name: give pyarrow.table"), (pq.ParquetFile(path), 'give the path of the file'),
                    (tmp_path/'none.parquet', 'no such file'), (tmp_path, r'a path: say what it holds: .*table_samples\(…\)')):
        with pytest.raises((TypeError,ValueError,FileNotFoundError), match=match): as_source(o)
    with pytest.raises(ValueError, match="no column 'nope'; there are u, big"): put_nowhere(table_samples(path, fn_col='nope'))
    with pytest.raises(TypeError, match="fields is a dict, such as {'path':'jpg'"): table_samples(path, fields=['u'])
    with pytest.raises(TypeError, match=r'fields= takes a dict \{column: field\}'): table_samples(path, {'u':'u.i4'})
    with pytest.raises(ValueError, match='column .u. has no names of files'): put_nowhere(table_samples(path, fn_col='u'))
    with pytest.raises(ValueError, match='column .text. has more than 100 values'):
        put_nowhere(table_samples(pd.DataFrame({'text':[f't{i}' for i in range(200)], 'x':range(200)}), valid_col='text'))
    with pytest.raises(ValueError, match='valid_col= needs a table that can be read by number'): table_samples(as_arrow().to_reader(), valid_col='flag')
    (tmp_path/'a.csv').write_text('name;label\na;b\n')
    with pytest.raises(ValueError, match="delimiter=';' separates columns"): put_nowhere(csv_samples(tmp_path/'a.csv', label_col='label'))

def test_without_pyarrow(tmp_path, monkeypatch):
    "The error says what to install; pandas and polars need no pyarrow"
    path = as_parquet(tmp_path)
    import sys
    for name in [m for m in sys.modules if m.split('.')[0]=='pyarrow']: monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'pyarrow', None)
    with pytest.raises(ImportError, match=r't.parquet: pyarrow reads such files: pip install fastai_remote\[tables\]'): table_samples(path)
    for table in (as_pandas(), pl.DataFrame({'id':[1], 'txt':['x']})): assert table_samples(table).plan.columns

def test_csv_numbers_and_options(put, tmp_path):
    "Cells in fields of numbers are numbers; the delimiter is an option"
    (tmp_path/'a.csv').write_text('id;age.f4;txt\n7;1.5;x\n8;2;y\n9;old;z\n')
    store,report = put(csv_samples(tmp_path/'a.csv', delimiter=';'))
    assert rows(store)==[{'id':7,'age.f4':1.5,'txt':'x'},{'id':8,'age.f4':2.,'txt':'y'}] and report.failures==[('a.csv:4',"ValueError: column 'age.f4': 'old' is no number")]

@pytest.mark.parametrize('name,delimiter', [('a.TSV','\t'), ('a.tsv.GZ','\t'), ('a.Tsv.xz','\t'),
    ('a.tsv.old.csv',','), ('a.tsv.csv.gz',','), ('a.tsv.txt',','), ('a.CSV',',')])
def test_the_end_of_the_name_decides_what_separates_columns(tmp_path, name, delimiter):
    "In capitals, too, also in a file that has a header only; `.tsv` within the name means nothing"
    opener = {'.gz':gzip.open, '.xz':lzma.open}.get((tmp_path/name).suffix.lower(), open)
    for lines in [['a','b']], [['a','b'],['1','x'],['2','y']]:
        with opener(tmp_path/name, 'wt') as f: f.write(''.join(delimiter.join(line)+'\n' for line in lines))
        source = csv_samples(tmp_path/name)
        assert [row for part in source.stream(9) for _,row in part]==[dict(zip('ab', line)) for line in lines[1:]]
        assert [column.name for column in source.plan.columns]==['a','b']

def test_what_fn_replaces_is_not_advised_on(put):
    "With `fn`, columns need not be fields; the report has no remarks on them"
    store,report = put(pd.DataFrame({'a b':['x.jpg'], 'a_b':['y.jpg'], 'label':['l']}), fn=lambda row: {'txt':row['a b']+row['a_b'], 'cls':row['label']})
    assert store[0]=={'txt':'x.jpgy.jpg', 'cls':'l'} and 'column' not in str(report)

def test_files_that_are_elsewhere(put):
    with pytest.raises(IngestError, match=r"folder= says where the files are.*nowhere.jpg"):
        put(table_samples(pd.DataFrame({'name':['nowhere.jpg']}), fn_col='name'))

def test_bytes_of_another_format_than_the_name_says(put):
    store,report = put(pd.DataFrame({'jpg':[jpg(1, 'PNG')], 'cls':['a']}))
    assert store.fields==['jpg.img','cls']
    with pytest.raises(IngestError, match='is one text, and not a list of labels: label_delim= separates several'):
        put(table_samples(pd.DataFrame({'tags':['a b']}), fields={'tags':'labels'}))

def test_what_has_no_field_names_its_column(put):
    for table,match in ((pa.table({'s':[{'a':b'x'}]}), "column 's': bytes in a list or a struct"), (pd.DataFrame({'c':[1+2j]}), "column 'c': a complex"),
                        (pd.DataFrame({'p':pd.period_range('2020', periods=2, freq='M')}), "column 'p': a Period")):
        with pytest.raises(IngestError, match=match): put(table)
    store,_ = put(pd.DataFrame([[1,2]], columns=pd.MultiIndex.from_tuples([('a','x'),('a','y')])))
    assert store[0]=={'a_x':1, 'a_y':2}

@pytest.mark.parametrize('wrap', [lambda s: s, lambda s: s.reshape((-1,1)), lambda s: s.to_frame('k').to_struct('s')])
def test_categories_of_polars_count_by_their_names(wrap):
    "polars hashes their codes"
    def fingerprint(labels):
        return repr(table_samples(pl.DataFrame({'x':wrap(pl.Series(labels, dtype=pl.Enum(labels)))})).fingerprint())
    assert fingerprint(['a','b'])==fingerprint(['a','b'])!=fingerprint(['x','y'])

@pytest.mark.parametrize('options', [dict(fn_col=['path']), dict(fn_col='path', valid_col=['kind']), dict(fn_col=1.5)])
def test_what_names_no_column_is_refused(options):
    with pytest.raises(ValueError, match=r"no column .*; there are path, kind"):
        source = table_samples(pd.DataFrame({'path':['a.jpg'], 'kind':['x']}), **options)
        print(source.plan, source.splits)

@pytest.mark.parametrize('value', [['a'], np.arange(2), '  ', {}])
def test_values_that_name_no_split_are_refused(value):
    source = table_samples(pd.DataFrame({'path':['a.jpg']*2, 'kind':['train',value]}), fn_col='path', valid_col='kind')
    with pytest.raises(ValueError, match="row 1: column 'kind': "): print(source.splits)

def test_separators_for_labels_of_several_columns_are_refused():
    table = pd.DataFrame({'path':['a.jpg'], 'a':['x y'], 'b':['z']})
    with pytest.raises(ValueError, match='label_delim= separates the labels in one column'):
        print(table_samples(table, fn_col='path', label_col=['a','b'], label_delim=' ').plan)

def test_cells_with_underscores_are_no_numbers(tmp_path):
    (tmp_path/'a.csv').write_text('a,b\n1_000,2\n')
    source = csv_samples(tmp_path/'a.csv', fields={'a':'a.f4'})
    with pytest.raises(ValueError, match="column 'a': '1_000' is no number"): source.load({'a':'1_000'})
    assert csv_samples(tmp_path/'a.csv', label_col=['a','b']).plan.columns[0].field=='labels'

def test_times_of_pandas_with_nanoseconds_are_not_cut(put):
    table = pa.table({'t':pa.array([1,1000,None], pa.time64('ns')), 'l':pa.array([[1]]*3, pa.list_(pa.time64('ns')))})
    table = table.to_pandas(types_mapper=pd.ArrowDtype)
    store,report = put(table[['t']])
    assert {o['t'] for o in rows(store)}=={'00:00:00.000000001','00:00:00.000001'} and report.failed==1
    with pytest.raises(TypeError, match="column 'l' has the type list.*nanoseconds in lists and structs are not kept"):
        print(table_samples(table).plan)

@pytest.mark.parametrize('content, why', [(b'\na,b\n1,2\n', 'empty: no header'),
    (b'caf\xe9,b\n1,2\n', 'the header is not UTF-8'), ('a,b\n1,2\n'.encode('utf-16'), 'the header is not UTF-8')])
def test_headers_that_are_none_are_refused(tmp_path, content, why):
    (tmp_path/'a.csv').write_bytes(content)
    for use in lambda s: s.plan, lambda s: list(s.stream(2)):
        with pytest.raises(ValueError, match=f'a.csv: {why}'): use(csv_samples(tmp_path/'a.csv'))

def test_splits_whose_samples_differ_are_told_apart():
    "Both are tables, but an fn would get the fields of one, and the columns of the other"
    table = pd.DataFrame({'a':[1], 'b':['x']})
    splits = {'train':table_samples(table, fields={'a':'a.i4'}), 'valid':table}
    message = ('train: _PandasTable, whose samples LoadRow makes; valid: _PandasTable, whose samples stay as they are. '
               'An fn would get samples of several kinds: give all splits in the same way, with the same options such '
               'as fields=')
    with pytest.raises(TypeError, match=re.escape(f'splits of different kinds: {message}')): as_source(splits)
    with pytest.raises(TypeError, match='a: image_samples, whose samples _LoadFile makes; b: _Items, .* as they are'):
        as_source({'a':['x.jpg'], 'b':[{'txt':'a'}]})

@pytest.mark.parametrize('field', [5, None, '', ['x']])
def test_fields_have_names(field):
    with pytest.raises(TypeError, match=r"fields=: 'path' is to be stored in .*, which is no name of a field"):
        table_samples(pd.DataFrame({'path':['a.jpg']}), fields={'path':field})

def test_no_folder_is_none(tmp_path):
    (tmp_path/'a.jpg').write_bytes(jpg(1))
    source = table_samples(pd.DataFrame({'path':[str(tmp_path/'a.jpg')]}), fn_col='path', folder=None, suff=None)
    assert source.load(source.read(np.arange(1))[0][1])=={'jpg':jpg(1)}

@pytest.mark.parametrize('options, field', [
    (dict(label_col=['a','b']),'labels'), (dict(fields={('a','b'):'labels'}),'labels'),
    (dict(fields={('a','b'):'x.json'}),'x.json'), (dict(fields={('a','b'):'x'}),'x')])
def test_texts_of_several_columns_are_a_list_of_labels(tmp_path, options, field):
    "Of CSV files as of other tables"
    (tmp_path/'a.csv').write_text('a,b\ncat,dog\n7,cat\n')
    source = csv_samples(tmp_path/'a.csv', **options)
    samples = [source.load(raw) for part in source.stream(9) for _,raw in part]
    assert samples==[{field:['cat','dog']}, {field:['7','cat']}]
    table = table_samples(pd.read_csv(tmp_path/'a.csv'), **options)
    assert [table.load(raw) for _,raw in table.read(np.arange(2))]==samples

def test_numbers_of_several_columns_are_labels_where_labels_are_asked_for(tmp_path):
    "Cells of CSV files stay text, as they do in one column"
    (tmp_path/'a.csv').write_text('a,b\n1,2\n')
    table = pd.read_csv(tmp_path/'a.csv')
    for field in 'labels','x.json':
        options = dict(fields={('a','b'):field})
        assert csv_samples(tmp_path/'a.csv', **options).load({'a':'1', 'b':'2'})=={field:['1','2']}
        for source in table_samples(table, **options),array_samples({k:table[k].to_numpy() for k in 'ab'}, **options):
            (_,raw), = source.read(np.arange(1))
            assert source.load(raw)=={field:[1,2]} and all(type(o) is int for o in source.load(raw)[field])

@pytest.mark.parametrize('first, wanted', [
    (['1','0'], [[1.,.5],[0.,2.]]), ([1,'2'], [[1.,.5],[2.,2.]]), ([Decimal('0.1'),Fraction(1, 3)], [[.1,.5],[1/3,2.]]),
    (['0.10',Decimal('nan')], [[.1,.5],[math.nan,2.]]), ([Decimal(2**60),True], [[2.**60,.5],[1.,2.]])], ids=str)
def test_objects_of_several_columns_are_an_array_if_they_are_numbers(first, wanted):
    "Texts of numbers, too, and fractions that a float rounds, as they are in one column of floats"
    for second in [.5,2], ['0.5','2']:
        source = table_samples(pd.DataFrame({'a':first, 'b':second}, dtype=object), label_col=['a','b'])
        samples = [source.load(raw) for _,raw in source.read(np.arange(2))]
        assert np.array_equal([o['target.npy'] for o in samples], wanted, equal_nan=True)
        assert samples[0]['target.npy'].dtype==np.float64

@pytest.mark.parametrize('value', [2**53+1, str(2**53+1), Decimal(2**53+1), Fraction(2**53+1)], ids=repr)
def test_whole_numbers_of_several_columns_are_not_rounded(value):
    source = table_samples(pd.DataFrame({'a':[value], 'b':[1]}, dtype=object), label_col=['a','b'])
    (_,raw), = source.read(np.arange(1))
    with pytest.raises(ValueError, match="column 'a', 'b': .*9007199254740993 .*9007199254740992.0"): source.load(raw)

def test_numbers_beyond_a_float_are_refused_in_several_columns():
    source = table_samples(pd.DataFrame({'a':[Decimal('1e400')], 'b':[1]}, dtype=object), label_col=['a','b'])
    (_,raw), = source.read(np.arange(1))
    with pytest.raises(ValueError, match="column 'a', 'b': .*1E.400 .*inf"): source.load(raw)

def test_cells_that_are_no_numbers_make_no_array(tmp_path):
    (tmp_path/'a.csv').write_text('a,b\ncat,dog\n')
    source = csv_samples(tmp_path/'a.csv', fields={('a','b'):'target.npy'})
    with pytest.raises(ValueError, match="column 'a', 'b': 'cat' is no number"): source.load({'a':'cat', 'b':'dog'})
    assert source.load({'a':'1', 'b':'2'})['target.npy'].tolist()==[1.,2.]

def test_wide_integers_are_columns_like_others():
    "As fields that their names choose, alone and with others, and a value that is too large is a failed sample"
    table = pl.DataFrame({'id':pl.Series([1,2**70], dtype=pl.Int128), 'x.f4':pl.Series([3,4], dtype=pl.Int128)})
    source = table_samples(table)
    (_,first),(_,second) = source.read(np.arange(2))
    assert source.as_is(first)=={'id':1, 'x.f4':3} and source.as_is(second)['id']==2**70
    both = table_samples(table, fields={('id','x.f4'):'target.npy'})
    (_,first), = both.read(np.arange(1))
    assert both.load(first)['target.npy'].tolist()==[1,3]

def test_sparse_columns_of_pandas_are_columns_like_others():
    table = pd.DataFrame({'x.f4':pd.arrays.SparseArray([0.,1.5]), 'id':pd.arrays.SparseArray([0,7])})
    source = table_samples(table)
    assert [source.as_is(raw) for _,raw in source.read(np.arange(2))]==[{'x.f4':0., 'id':0}, {'x.f4':1.5, 'id':7}]

def test_blank_cells_among_several_labels_are_missing(tmp_path):
    "As a blank label is in one column"
    (tmp_path/'a.csv').write_text('a,b\ncat,dog\ncat, \n')
    for options in dict(label_col=['a','b']),dict(fields={('a','b'):'labels'}):
        source = csv_samples(tmp_path/'a.csv', **options)
        (_,first),(_,second) = next(source.stream(9))
        assert source.load(first)=={'labels':['cat','dog']}
        with pytest.raises(ValueError, match="column 'a', 'b': nothing in this row"): source.load(second)
