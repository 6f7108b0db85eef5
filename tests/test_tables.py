"Tables of pandas, polars, Arrow, Parquet and CSV: what they mean is kept, or an error says what to do"
import gzip, json, lzma, pickle, re, sys, tracemalloc, uuid
from contextlib import contextmanager
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

from inputs import column, in_memory, loaded, plain, raw_samples, stored
from fastai_remote import IngestError, array_samples, csv_samples, table_samples
from fastai_remote.source.datasets import as_source
from fastai_remote.testing import SourceTests

def simple(v): return (str(v.dtype),v.tolist()) if isinstance(v, np.ndarray) else v
def samples(source, **options):
    "What an ingest stores of a source, without the samples that fail; an array is `(dtype, list)`"
    return [{f:simple(v) for f,v in o.items()} for o in in_memory(source, max_failed=.99, **options)[0]]

N,KIND = 20,['dog','cat','bird']
# `column: (values, codec)`
DATA = dict(u=(np.arange(N, dtype='u1'),'u1'), big=(np.arange(N)+2**60+1,'i8'), x=(np.linspace(0, 1, N),'f8'),
    f=(np.linspace(0, 1, N).astype('f4'),'f4'), flag=(np.arange(N)%2==0,'u1'),
    text=([f'text {i} é' for i in range(N)],'txt'), raw=([bytes([i,0,255]) for i in range(N)],'bin'),
    tags=([['a']*(i%3) for i in range(N)],'json'), when=([datetime(2020, 1, 1, 12, 0, i) for i in range(N)],'txt'),
    day=([date(2020, 1, i+1) for i in range(N)],'txt'))
VALUES = {name:values for name,(values,_) in DATA.items()}

def as_pandas():
    return pd.DataFrame({**VALUES, 'kind':pd.Categorical([KIND[i%2] for i in range(N)], KIND)}, index=[3]*N)
def as_arrow():
    kind = pa.DictionaryArray.from_arrays(pa.array([i%2 for i in range(N)], pa.int8()), KIND)
    return pa.table({k:pa.array(v) for k,v in VALUES.items()}).append_column('kind', kind)
def as_polars():
    kind = pl.Series('kind', [KIND[i%2] for i in range(N)], dtype=pl.Enum(KIND))
    return pl.DataFrame(VALUES).with_columns(kind)
def as_parquet(folder):
    pq.write_table(as_arrow(), folder/'t.parquet', row_group_size=7)
    return folder/'t.parquet'
TABLES = dict(pandas=lambda p: as_pandas(), polars=lambda p: as_polars(), lazy=lambda p: as_polars().lazy(),
    arrow=lambda p: as_arrow(), reader=lambda p: as_arrow().to_reader(), parquet=as_parquet,
    dataset=lambda p: pds.dataset(as_parquet(p)), folder=lambda p: table_samples(as_parquet(p).parent))

@pytest.mark.parametrize('kind', TABLES)
def test_types_values_and_labels_are_kept(tmp_path, kind):
    "Values are exact, categories have their labels in their order, and types their width, whatever the table is"
    store,report = in_memory(TABLES[kind](tmp_path))
    assert (len(store),report.failed)==(N,0)
    fields = {name:'txt' if name=='text' else f'{name}.{codec}' for name,(_,codec) in DATA.items()}
    assert sorted(store.fields)==sorted([*fields.values(),'kind.cls'])
    for i,row in enumerate(store):
        assert row.pop('kind.cls')==KIND[i%2] and row.pop('day.txt')==f'2020-01-{i+1:02}'
        assert row.pop('when.txt')==f'2020-01-01T12:00:{i:02}'
        assert row=={field:VALUES[name][i] for name,field in fields.items() if field in row} and len(row)==8
    assert all(store.manifest.fields[field]['codec']==DATA[name][1] for name,field in fields.items())
    # a stream does not know all labels beforehand
    assert store.manifest.vocab['kind.cls']==(['cat','dog'] if kind=='reader' else KIND)

# --- columns that are chosen

def every_kind(data, folder):
    "The same table in each form"
    pq.write_table(pa.table(data), folder/'table.parquet', row_group_size=5)
    pd.DataFrame(data).to_csv(folder/'table.csv', index=False)
    pd.DataFrame(data).to_csv(folder/'table.tsv', index=False, sep='\t')
    return dict(pandas=pd.DataFrame(data), polars=pl.DataFrame(data), arrow=pa.table(data), csv=folder/'table.csv',
                tsv=folder/'table.tsv', parquet=folder/'table.parquet')

def image_table(folder, n=12):
    "Images in `folder`, and a table of them"
    folder.mkdir()
    for i in range(n): (folder/f'im{i}.jpg').write_bytes(plain(i*9))
    return dict(name=[f'im{i}.jpg' for i in range(n)], label=[KIND[i%3] for i in range(n)], x=[i/8 for i in range(n)],
                tags=[' '.join(KIND[:i%3]) for i in range(n)], y=list(range(n)), is_valid=[i%4==0 for i in range(n)])

@pytest.mark.parametrize('kind', ['pandas','polars','arrow','parquet','csv','tsv'])
def test_images_labels_and_splits_by_columns(tmp_path, kind):
    "Bytes of files that a column names, labels, several labels, numbers of several columns, and splits"
    table = every_kind(image_table(tmp_path/'ims'), tmp_path)[kind]
    options = dict(folder=tmp_path/'ims', valid_col='is_valid')
    order = [i for i in range(12) if i%4]+[0,4,8]
    store,_ = in_memory(table_samples(table, fn_col=0, label_col='label', **options))
    assert store.splits=={'train':[0,9],'valid':[9,12]} and store.fields==['jpg','cls'] and store.vocab==sorted(KIND)
    assert stored(store, 'jpg')==[plain(i*9) for i in order] and column(store, 'cls')==[KIND[i%3] for i in order]
    store,_ = in_memory(table_samples(table, fn_col='name', label_col='tags', label_delim=' ', **options))
    assert store.fields==['jpg','labels'] and column(store, 'labels')==[KIND[:i%3] for i in order]
    store,_ = in_memory(table_samples(table, fn_col='name', label_col=['x','y'], **options))
    assert [simple(o['target.npy']) for o in store]==[('float64',[i/8,i]) for i in order]
    fields = {'name':'img', 'y':'y.u1', 'label':'kind.cls', ('x','y'):'point.npy'}
    store,_ = in_memory(table_samples(table, fields=fields, folder=tmp_path/'ims'))
    assert store.fields==['img','y.u1','kind.cls','point.npy'] and column(store, 'y.u1')==list(range(12))

def test_names_of_splits_in_their_order(tmp_path):
    "A column may name the splits; `val` and `validation` are `valid`"
    names = ['test','validation','train','extra']
    data = dict(txt=[f't{i}' for i in range(40)], part=[names[i%4] for i in range(40)])
    for table in every_kind(data, tmp_path).values():
        store,_ = in_memory(table_samples(table, valid_col='part', fields={'txt':'txt'}))
        assert store.splits=={'train':[0,10],'valid':[10,20],'test':[20,30],'extra':[30,40]}
        assert column(store, 'txt')==[f't{i}' for k in (2,1,0,3) for i in range(k, 40, 4)]

@pytest.mark.parametrize('kind', ['pandas','polars','arrow','parquet','csv'])
def test_missing_values_name_row_and_column(tmp_path, kind):
    "Of a label, of a number, and of the split of a row"
    data = dict(cls=['a','b',None,'a']*5, n=[None]+[2]*19, part=['train',None]*10)
    table = every_kind(data, tmp_path)[kind]
    failures = in_memory(table_samples(table, fields={'cls':'cls', 'n':'n.f4'}), max_failed=20)[1].failures
    assert len(failures)==(5 if kind=='pandas' else 6)   # pandas has nan there, which is a number
    assert all(re.search("column '(cls|n)': nothing in this row", reason) for _,reason in failures)
    assert kind=='csv' or any('row 2' in name for name,_ in failures)
    with pytest.raises(ValueError, match='(row 1|:3): column .part.: nothing there'):
        in_memory(table_samples(table, valid_col='part'))

@pytest.mark.parametrize('make', [pd.DataFrame, pl.DataFrame, pa.table], ids=['pandas','polars','arrow'])
def test_types_that_need_care(make):
    "Times keep nanoseconds and zones, decimals their digits, and durations are refused"
    times = ['2020-01-01T00:00:00.123456789','2021-02-03T04:05:06.000000007']
    table = make({'t':np.array(times, 'M8[ns]'), 'd':[Decimal('1.10'),Decimal('2.25')]})
    assert samples(table)==[{'t.txt':times[0], 'd.txt':'1.10'}, {'t.txt':times[1], 'd.txt':'2.25'}]
    with pytest.raises(IngestError, match='column .wait.: a duration'): in_memory(make({'wait':[timedelta(1)]*2}))
    store,report = in_memory(make({'u':np.array([1,2**64-1], np.uint64)}))
    assert 'does not fit int64' in report.failures[0][1] and column(store, 'u.i8')==[1]

@pytest.mark.parametrize('zone', [None,'UTC','America/New_York','Asia/Kolkata'])
def test_times_with_nanoseconds_are_the_same_texts_in_all_tables(zone, tmp_path):
    "As pandas writes them: without the digits of a second that are zero, and with a colon in the zone"
    texts = ['2020-07-01 10:00', '2020-01-01 10:00:00.5', '2020-01-01 10:00:00.12345678']
    times = pd.Series(pd.to_datetime(texts, format='ISO8601'))
    table = pd.DataFrame({'t':times.astype('M8[ns]').dt.tz_localize(zone), 'x':[1.,2.,3.]})
    arrow = pa.Table.from_pandas(table)
    pq.write_table(arrow, tmp_path/'t.parquet')
    wanted = [time.isoformat() for time in table.t]
    for source in table,arrow,pl.DataFrame(table),table_samples(tmp_path/'t.parquet'):
        assert [row['t.txt'] for row in samples(source)]==wanted

def test_names_that_no_field_can_have():
    "Names are changed so that they can be stored, and the report says so; two that become the same are refused"
    store,report = in_memory(pd.DataFrame({'Image Path':['a'], 'id':['x'], 'text':[1], 'url:0':['u'], 7:[1.5]}))
    assert store.fields==['Image_Path.txt','id.txt','text.i8','url_0.txt','7.f8']
    assert 'columns are stored as fields: Image Path -> Image_Path.txt, id -> id.txt, text -> text.i8' in str(report)
    store,report = in_memory(pd.DataFrame({'path':['a.jpg','b.jpg'], 'target':['x','y']}))
    assert "column 'path' names image files and is stored as text: fn_col='path'" in str(report)
    assert "label_col='target' makes it the label" in str(report)

def test_images_of_several_formats(tmp_path):
    "Bytes of images are image fields, named after their format; another format later on is a failure"
    cells,png = [plain(i*9) for i in range(21)],plain(7, 'PNG')
    for table in pd.DataFrame({'picture':cells}), pa.table({'picture':[{'bytes':o, 'path':None} for o in cells]}):
        assert stored(in_memory(table)[0], 'jpg')==cells
    table = pa.table({'picture':[*cells, png]})
    (_,reason), = in_memory(table)[1].failures
    assert "png, where the first rows have jpg: fields={'picture': 'picture.img', …}" in reason
    assert stored(in_memory(table_samples(table, fields={'picture':'picture.img'}))[0], 'picture.img')==[*cells, png]
    assert in_memory(pd.DataFrame({'jpg':[png], 'cls':['a']}))[0].fields==['png','cls']   # whatever the name says
    for name,content in ('a.jpg',cells[1]), ('b.png',png): (tmp_path/name).write_bytes(content)
    names = [str(tmp_path/name) for name in ('a.jpg','b.png')]
    files = table_samples(pd.DataFrame({'name':names}), fn_col='name', folder=None, suff=None)
    assert stored(in_memory(files)[0], 'img')==[cells[1],png]

def test_parquet_of_huggingface(tmp_path):
    "Class names and images by the metadata that the files of the Hub have"
    def labels(*names): return {'_type':'ClassLabel', 'names':names}
    features = {'image':{'_type':'Image'}, 'label':labels(*KIND), 'many':{'_type':'List', 'feature':labels('p', 'q')},
                'grid':{'_type':'Array2D', 'shape':[2,2], 'dtype':'float32'}}
    t = pa.table({'image':[{'bytes':plain(i*9), 'path':f'{i}.jpg'} for i in range(9)], 'label':[i%3 for i in range(9)],
                  'many':[[0,1][:i%3] for i in range(9)], 'grid':[[[i,1.],[2,3]] for i in range(9)]})
    t = t.replace_schema_metadata({'huggingface':json.dumps({'info':{'features':features}})})
    pq.write_table(t, tmp_path/'a.parquet', row_group_size=4)
    store,_ = in_memory(tmp_path/'a.parquet')
    assert store.fields==['jpg','cls','labels','grid.npy'] and store.manifest.vocab=={'cls':KIND, 'labels':['p','q']}
    assert stored(store, 'jpg')==[plain(i*9) for i in range(9)]
    for i,o in enumerate(store):
        assert (o['cls'],o['labels'],simple(o['grid.npy']))==(KIND[i%3],['p','q'][:i%3],('float32',[[i,1],[2,3]]))

def test_fn_gets_rows_as_they_are():
    "`fn` gets the row, or the chosen fields; what it returns has the types that it has, and needs no names of columns"
    df = pd.DataFrame({'a b':np.array([100,200], np.uint8), 'a_b':['x.jpg']*2, 'kind':pd.Categorical(['b','a'])})
    store,report = in_memory(df, fn=lambda row: {'age':row['a b']/1000, 'cls':row['kind']})
    assert column(store, 'age')==[.1,.2] and store.vocab==['a','b'] and 'column' not in str(report)
    chosen = table_samples(df, fields={'a b':'age', 'kind':'cls'})
    assert column(in_memory(chosen, fn=lambda o: {**o, 'age':o['age']*300})[0], 'age')==[30000,60000]

# --- Parquet: several files, memory, workers

def test_several_files_and_partitions(tmp_path):
    "Files of one folder, hive partitions as columns, columns that only some files have; failures name file and row"
    def write(path, **columns):
        (tmp_path/'t'/path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), tmp_path/'t'/path, row_group_size=3)
    for k in range(4): write(f'kind={["cat","dog"][k//2]}/{k%2}.parquet', n=range(10*k, 10*k+10))
    found = samples(table_samples(tmp_path/'t', label_col='kind', fields={'n':'n.u1'}))
    assert found==[{'n.u1':i, 'cls':'cat' if i<20 else 'dog'} for i in range(40)]
    write('kind=dog/2.parquet', n=[100], extra=['e'])
    store,report = in_memory(table_samples(tmp_path/'t'), max_failed=.99, chunk=64)
    name,reason = report.failures[0]
    assert len(store)==1 and "column 'extra': nothing in this row" in reason
    assert re.match(r'\d.parquet: row \d', name)
    write('kind=dog/3.parquet', n=['text'])
    with pytest.raises(ValueError, match='have columns that differ.*n'): table_samples(tmp_path/'t')

def test_a_parquet_file_that_is_replaced_is_read_anew(tmp_path):
    "Nothing of the file that was there before is kept, whatever of it was read"
    for k,add in enumerate((0, 10**6, 10**12)):
        pq.write_table(pa.table({'n':np.arange(20)+add}), tmp_path/'a.parquet', row_group_size=5)
        if not k: source = table_samples(tmp_path/'a.parquet')
        assert [row['n'] for _,row in source.read(np.arange(10))]==list(range(add, add+10))

@contextmanager
def at_most(nbytes):
    "Python's memory grows by less than `nbytes` here"
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1]<nbytes
    finally: tracemalloc.stop()

def test_splits_of_large_row_groups_take_little_memory(tmp_path):
    "No object is made of each row of a row group to find those of a split"
    n = 90_000
    part = pa.array(['train','valid',None,'test']).take(pa.array(np.arange(n)%4//2*3))
    pq.write_table(pa.table({'id':range(n), 'part':part}), tmp_path/'a.parquet', row_group_size=n)
    source = table_samples(tmp_path/'a.parquet', fields={'id':'id'}, valid_col='part')
    with at_most(6_000_000): ids = [row['id'] for _,row in source.read(np.arange(0, n, 30))]
    assert source.splits=={'train':[0,n//2],'test':[n//2,n]} and ids[:3]==[0,60,120]

@pytest.mark.parametrize('make', [pd.DataFrame, pytest.param(pl.DataFrame, marks=pytest.mark.slow), pa.table],
    ids=['pandas','polars','arrow'])
def test_splits_of_a_table_in_memory_are_found_in_flat_memory(make):
    "No list of the values of the whole split column"
    n = 199_998
    source = table_samples(make({'part':np.array(['b','train','valid'])[np.arange(n)%3].tolist()}), valid_col='part')
    assert source.plan.split=='part'
    with at_most(9_000_000): assert source.splits=={'train':[0,n//3],'valid':[n//3,n//3*2],'b':[n//3*2,n]}
    firsts = source.read(np.array([start for start,_ in source.splits.values()]))
    assert [name for name,_ in firsts]==['row 1','row 2','row 0']

def test_row_groups_are_read_in_workers_in_constant_memory(tmp_path):
    "The leading process keeps nothing of the rows; a worker keeps few row groups"
    n = 100_000
    table = pa.table({'id':range(n), 'txt':['some words']*n})
    pq.write_table(table, tmp_path/'a.parquet', row_group_size=10_000)
    source = table_samples(tmp_path/'a.parquet')
    assert source.as_is
    with at_most(1_500_000): parts = [source.read(np.arange(k, k+100)) for k in range(0, n, 1000)]
    assert max(len(pickle.dumps(p)) for p in parts)<4000
    assert [source.load(raw)['id'] for _,raw in parts[50]]==list(range(50_000, 50_100))

# --- fingerprints

class TestPandas(SourceTests):
    def make(self): return as_source(as_pandas())
class TestPolars(SourceTests):
    def make(self): return as_source(as_polars())
class TestArrow(SourceTests):
    def make(self): return table_samples(as_arrow(), valid_col='flag')
class TestParquet(SourceTests):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path): self.path = as_parquet(tmp_path)
    def make(self): return table_samples(self.path, fields={'u':'u', 'kind':'cls'}, valid_col='flag')

@pytest.mark.parametrize('kind', ['pandas','polars','arrow','parquet'])
def test_a_table_whose_values_changed_is_another_source(tmp_path, kind):
    data = dict(id=list(range(300)), cls=['a','b']*150)
    first = table_samples(every_kind(data, tmp_path)[kind]).fingerprint()
    other = table_samples(every_kind({**data, 'id':[*range(299),7]}, tmp_path)[kind]).fingerprint()
    assert repr(first)!=repr(other)

def test_categories_of_polars_count_by_their_names():
    "polars hashes their codes"
    for wrap in (lambda s: s), (lambda s: s.to_frame('k').to_struct('s')):
        def fingerprint(*labels):
            return repr(table_samples(pl.DataFrame({'x':wrap(pl.Series(labels, dtype=pl.Enum(labels)))})).fingerprint())
        assert fingerprint('a', 'b')==fingerprint('a', 'b')!=fingerprint('x', 'y')

# --- CSV

@pytest.mark.parametrize('name,opener,delimiter', [('a.TSV',open,'\t'), ('a.tsv.GZ',gzip.open,'\t'),
    ('a.Tsv.xz',lzma.open,'\t'), ('a.tsv.csv.gz',gzip.open,','), ('a.tsv.txt',open,',')])
def test_the_end_of_the_name_decides_what_separates_columns(tmp_path, name, opener, delimiter):
    "In capitals, too, also in a file that has a header only; `.tsv` within the name means nothing"
    for lines in [['a','b']], [['a','b'],['1','x'],['2','y']]:
        with opener(tmp_path/name, 'wt') as f: f.write(''.join(delimiter.join(line)+'\n' for line in lines))
        source = csv_samples(tmp_path/name)
        assert [row for _,row in raw_samples(source)]==[dict(zip('ab', line)) for line in lines[1:]]
        assert [column.name for column in source.plan.columns]==['a','b']

def test_csv_numbers_and_options(tmp_path):
    "Cells in fields of numbers are numbers; the delimiter is an option; underscores make no number"
    store,report = in_memory(of_csv(tmp_path, 'id;age.f4;txt\n7;1.5;x\n9;old;z\n9;1_000;z\n', delimiter=';'))
    assert store[:]==[{'id':7,'age.f4':1.5,'txt':'x'}]
    reason = "ValueError: column 'age.f4': {!r} is no number"
    assert report.failures==[('a.csv:3',reason.format('old')), ('a.csv:4',reason.format('1_000'))]

def test_files_of_several_kinds_are_refused(tmp_path):
    "The name of each file counts, and not only that of the first"
    made = every_kind(dict(id=[1,2], cls=['a','b']), tmp_path)
    for a,b in (made['csv'],made['parquet']), (made['parquet'],made['tsv']):
        match = f'{a.name} and .*{b.name} are files of different kinds'
        with pytest.raises(ValueError, match=match): table_samples([a,b])
    (tmp_path/'B.CSV').write_text('id,cls\n3,c\n')
    assert [row['id'] for _,row in raw_samples(table_samples([made['csv'], tmp_path/'B.CSV']))]==['1','2','3']

# --- several columns as one field

def of_csv(folder, text, **options):
    (folder/'a.csv').write_text(text)
    return csv_samples(folder/'a.csv', **options)

@pytest.mark.parametrize('options,field', [(dict(label_col=['a','b']),'labels'),
    (dict(fields={('a','b'):'x.json'}),'x.json'), (dict(fields={('a','b'):'x'}),'x')])
def test_texts_of_several_columns_are_a_list_of_labels(tmp_path, options, field):
    "Of CSV files as of other tables; a blank cell is missing, as it is in one column"
    store,report = in_memory(of_csv(tmp_path, 'a,b\ncat,dog\n7,cat\n', **options))
    want = [{field:['cat','dog']}, {field:['7','cat']}]
    assert store[:]==loaded(table_samples(pd.read_csv(tmp_path/'a.csv'), **options))==want
    if field!='labels': return
    store,report = in_memory(of_csv(tmp_path, 'a,b\ncat,dog\ncat, \n', **options))
    assert len(store)==1 and "column 'a', 'b': nothing in this row" in report.failures[0][1]

def test_numbers_of_several_columns_are_labels_where_labels_are_asked_for(tmp_path):
    fields = {('a','b'):'x.json'}
    table = pd.DataFrame({'a':[1], 'b':[2]})
    arrays = array_samples({k:table[k].to_numpy() for k in 'ab'}, fields=fields)
    for source in table_samples(table, fields=fields), arrays, of_csv(tmp_path, 'a,b\n1,2\n', fields=fields):
        assert repr(loaded(source))==repr([{'x.json':[1,2]}])

def test_objects_of_several_columns_are_an_array_if_they_are_numbers():
    "Texts of numbers, too, and fractions that a float rounds, as they are in one column of floats"
    table = pd.DataFrame({'a':['1',Fraction(1, 3),Decimal('0.1'),True], 'b':['.5',2,Decimal(2**60),2.]}, dtype=object)
    found = loaded(table_samples(table, label_col=['a','b']))
    want = [[1.,.5], [1/3,2.], [.1,2.**60], [1.,2.]]
    assert [simple(o['target.npy']) for o in found]==[('float64',row) for row in want]

def test_numbers_that_a_float_cannot_hold_are_refused_in_several_columns(tmp_path):
    for value,other,match in (str(2**53+1),1,'992.0'), (2**53+1,.5,'float64'), (Decimal('1e400'),1,'inf'):
        table = pd.DataFrame({'a':[value], 'b':[other]}, dtype=object)
        source = table_samples(table, fields={('a','b'):'v.npy'})
        with pytest.raises(ValueError, match=f"column 'a', 'b': .*{match}"): loaded(source)
    source = of_csv(tmp_path, 'a,b\n1,2\n', fields={('a','b'):'target.npy'})
    assert [simple(o['target.npy']) for o in loaded(source)]==[('int64',[1,2])]
    with pytest.raises(ValueError, match="column 'a', 'b': 'cat' is no number"): source.load({'a':'cat', 'b':'dog'})

WIDE = pl.DataFrame({'id':pl.Series([1,2**70], dtype=pl.Int128), 'x.f4':pl.Series([3,4], dtype=pl.Int128)})
SPARSE = pd.DataFrame({'x.f4':pd.arrays.SparseArray([0.,1.5]), 'id':pd.arrays.SparseArray([0,7])})
TIMES = pa.table({'t':pa.array([123456789,123456000,0,3_600_000_000_005,None], pa.time64('ns'))})
TIME_TEXTS = [{'t':t} for t in ('00:00:00.123456789','00:00:00.123456','00:00:00','01:00:00.000000005')]
NESTED = pa.table({'t':pa.array([[123456789]], pa.list_(pa.time64('ns')))})
def arrow_frame(table): return table.to_pandas(types_mapper=pd.ArrowDtype)
def with_gap(type): return pa.array([[1,0],[1,None]], pa.list_(pa.int8(), 2)).cast(pa.list_(type, 2))

def column_of(array): return pa.table({'f':array})
def grid(permutation):
    type = pa.fixed_shape_tensor(pa.int32(), [2,3], permutation=permutation)
    return column_of(pa.ExtensionArray.from_storage(type, pa.array([[1,2,3,4,5,6]], pa.list_(pa.int32(), 6))))

VIEWS = pa.array([['a'],[],['b','c']], pa.list_view(pa.string_view()))
LABEL_RUNS = pa.RunEndEncodedArray.from_arrays([1,3], pa.array(['x','y']).dictionary_encode())
ID = uuid.UUID(int=7)
VECTOR = [{'f':('float32', [.5,1.])}]

@pytest.mark.parametrize('source,want', [
    (WIDE, [{'id':1, 'x.f4':3}]), (SPARSE, [{'x.f4':0., 'id':0}, {'x.f4':1.5, 'id':7}]),
    (TIMES, TIME_TEXTS), (pl.from_arrow(TIMES), TIME_TEXTS), (arrow_frame(TIMES), TIME_TEXTS),
    (column_of(with_gap(pa.bool_())), [{'f':('bool', [1,0])}]),
    (column_of(with_gap(pa.float32())), [{'f':('float32', [1,0])}]),
    (column_of(pa.array([[.5,1.]], pa.list_(pa.float32(), 2))), VECTOR),
    (pl.DataFrame({'f':pl.Series([[.5,1.]], dtype=pl.Array(pl.Float32, 2))}), VECTOR),
    (grid([0,1]), [{'f':('int32', [[1,2,3],[4,5,6]])}]),
    (column_of(pa.array(['a',None,'d'], pa.string_view())).to_batches()[0], [{'f':'a'}, {'f':'d'}]),
    (column_of(VIEWS).to_reader(), [{'f':['a']}, {'f':[]}, {'f':['b','c']}]),
    (column_of(pa.RunEndEncodedArray.from_arrays([2,3], pa.array([1,None], pa.int16()))), [{'f':1}, {'f':1}]),
    (column_of(LABEL_RUNS), [{'f':'x'}, {'f':'y'}, {'f':'y'}]),
    (column_of(pa.ExtensionArray.from_storage(pa.uuid(), pa.array([ID.bytes], pa.binary(16)))), [{'f':str(ID)}]),
    (pd.DataFrame([[1,2]], columns=pd.MultiIndex.from_tuples([('a','x'),('a','y')])), [{'a_x':1, 'a_y':2}])])
def test_unusual_columns_are_columns_like_others(source, want):
    "A value that is too large or missing, also one in an array, is a failed sample; nanoseconds are kept"
    store,report = in_memory(source, max_failed=.99)
    def name_of(field): return field if field in ('id','x.f4') else field.rpartition('.')[0]
    assert [{name_of(f):simple(v) for f,v in o.items()} for o in store]==want
    reasons = ''.join(reason for _,reason in report.failures)
    assert not reasons or 'does not fit' in reasons or 'missing' in reasons or 'nothing in this row' in reasons

# --- what cannot be read says what to do

FILES = pd.DataFrame({'path':['a.jpg']*2, 'kind':['train','x']})
DF,PARQUET = pd.DataFrame,'t.parquet'   # which `refuse` puts there

def options(**kw): return lambda p: table_samples(FILES, **kw)
def of_parquet(**kw): return lambda p: table_samples(p/PARQUET, **kw)
def header(content): return lambda p: (p/'a.csv').write_bytes(content) and csv_samples(p/'a.csv')

REFUSED = [
    (TypeError, 'ChunkedArray: a column without a name: give pyarrow.table', lambda p: pa.chunked_array([[1,2]])),
    (TypeError, 'give the path of the file', lambda p: pq.ParquetFile(p/PARQUET)),
    (FileNotFoundError, 'no such file', lambda p: p/'none.parquet'),
    (TypeError, r'a path: say what it holds: .*table_samples\(…\)', lambda p: p),
    (ValueError, "no column 'nope'; there are u, big", of_parquet(fn_col='nope')),
    (TypeError, "fields is a dict, such as {'path':'jpg'", of_parquet(fields=['u'])),
    (ValueError, 'column .u. has no names of files', of_parquet(fn_col='u')),
    (ValueError, 'valid_col= needs a table that can be read by number',
        lambda p: table_samples(as_arrow().to_reader(), valid_col='flag')),
    (ValueError, 'column .text. has more than 100 values',
        lambda p: table_samples(DF({'text':[f't{i}' for i in range(200)], 'x':range(200)}), valid_col='text')),
    (ValueError, "delimiter=';' separates columns", lambda p: of_csv(p, 'name;label\na;b\n', label_col='label')),
    (ValueError, 'no column .*; there are path, kind', options(fn_col=['path'])),
    *((ValueError, "row 1: column 'kind': ", lambda p, value=value: table_samples(DF({'a':['b']*2,
        'kind':['train',value]}), valid_col='kind')) for value in (['a'], '  ')),
    (TypeError, "fields=: 'path' is to be stored in 5, which is no name of a field", options(fields={'path':5})),
    (ValueError, 'label_delim= separates the labels in one column',
        options(label_col=['path','kind'], label_delim=' ')),
    (ValueError, 'a.csv: empty: no header', header(b'\na,b\n1,2\n')),
    (ValueError, 'a.csv: the header is not UTF-8', header('a,b\n1,2\n'.encode('utf-16'))),
    (IngestError, "row 0.*column 'cls': cls: label 1.5 is no whole number: .*target.f4", lambda p: DF({'cls':[1.5]})),
    (ValueError, "'a b' and 'a_b' would both be the field 'a_b.i8': fields=", lambda p: DF({'a b':[1], 'a_b':[2]})),
    (ValueError, "two columns are called 'a'", lambda p: DF([[1,2]], columns=['a','a'])),
    (IngestError, 'folder= says where the files are.*nowhere.jpg',
        lambda p: table_samples(DF({'name':['nowhere.jpg']}), fn_col='name')),
    (IngestError, 'is one text, and not a list of labels: label_delim= separates several',
        lambda p: table_samples(DF({'tags':['a b']}), fields={'tags':'labels'})),
    (IngestError, "column 's': bytes in a list or a struct", lambda p: pa.table({'s':[{'a':b'x'}]})),
    (IngestError, "column 'p': a Period", lambda p: DF({'p':pd.period_range('2020', periods=2, freq='M')})),
    *((TypeError, "column 't' has the type .*nanoseconds in lists and structs are not kept", lambda p, o=o: o)
        for o in (NESTED, pl.from_arrow(NESTED), arrow_frame(NESTED))),
    (TypeError, "column 'f' is a tensor with permuted dimensions", lambda p: grid([1,0])),
    (TypeError, 'splits of different kinds: train: .* LoadRow makes; valid: .* stay as they are.*: give all splits',
        lambda p: {'train':table_samples(FILES, fields={'path':'a.txt'}), 'valid':FILES})]

@pytest.mark.parametrize('error,match,make', REFUSED)
def test_what_cannot_be_read_says_what_to_do(tmp_path, error, match, make):
    as_parquet(tmp_path)
    with pytest.raises(error, match=match): in_memory(make(tmp_path))

def test_a_table_beside_a_list_of_rows_is_stored_as_such_rows():
    "And the report does not name fields that are not there"
    rows = pd.DataFrame({'label':['b'], 'age':pd.array([1], 'int8')})
    store,report = in_memory({'train':[{'label':'a', 'age':300}], 'valid':rows})
    assert store[:]==[{'label':'a', 'age':300},{'label':'b', 'age':1}] and not report.notes

def test_a_row_without_a_split_names_file_and_row(tmp_path):
    for type in pa.string(),pa.large_string(),pa.string_view(),pa.dictionary(pa.int8(), pa.string()):
        for k,part in enumerate((['train']*9, ['train']*8+[None])):
            table = pa.table({'part':pa.array(part, type)})
            pq.write_table(table, tmp_path/f'{k}.parquet', row_group_size=5)
        with pytest.raises(ValueError, match="1.parquet: row 8: column 'part': nothing there"):
            in_memory(table_samples(tmp_path, valid_col='part'))
        with pytest.raises(ValueError, match="row 8: column 'part': nothing there"):
            in_memory(table_samples(table, valid_col='part'))
    pq.write_table(pa.table({'part':[[1]]}), tmp_path/'0.parquet')
    with pytest.raises(ValueError, match=r"0.parquet: row 0: column 'part': \[1\] is neither true nor false"):
        in_memory(table_samples(tmp_path/'0.parquet', valid_col='part'))

def test_without_pyarrow(tmp_path, monkeypatch):
    "The error says what to install; pandas and polars need no pyarrow"
    path = as_parquet(tmp_path)
    for name in [m for m in sys.modules if m.split('.')[0]=='pyarrow']: monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'pyarrow', None)
    match = r't.parquet: pyarrow reads such files: pip install fastai_remote\[tables\]'
    with pytest.raises(ImportError, match=match): table_samples(path)
    for table in (as_pandas(), pl.DataFrame({'id':[1], 'txt':['x']})): assert table_samples(table).plan.columns
