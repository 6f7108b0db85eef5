"CSV files, tars, streams, stores and keys of others: what they hold is there, or a failure says so"
import csv, gzip, io, lzma, os, random
from operator import attrgetter
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from fastai.data.core import DataLoaders
from PIL import Image

from inputs import column, encoded, in_memory, loaded, raw_samples, stored, write_csv
from snapshots import client
from fastai_remote import (CorruptSample, csv_samples, drawing_samples, MissingSample, RedisStore, ShardStore,
    tar_samples, to_shards)
from fastai_remote.source.datasets import as_source, stored_samples
from fastai_remote.store.base import image_stats

OPTIONS = dict(num_workers=1, progress=False)

def grey(i, shape=(4,5)): return encoded(np.full(shape, i%256))

# --- CSV

WILD = [['plain','1'], ['with, comma','2'], ['two\nlines','3'], ['a "quoted" word','4'], ['crlf\r\nin it','5'],
        ['ünïcödé 漢字 🐱','6'], ['','7'], [' spaces ','8']]

@pytest.mark.parametrize('extension,opener', [('csv',open), ('csv.gz',gzip.open), ('csv.xz',lzma.open)])
def test_rows_of_a_csv_file_come_back_as_they_were_written(tmp_path, extension, opener):
    for encoding in 'utf-8','utf-8-sig':
        path = write_csv(tmp_path/f'a.{extension}', [['txt','labels.txt'], *WILD], opener, encoding=encoding)
        store,report = in_memory(csv_samples(path))
        assert store.fields==['txt','labels.txt'] and [list(o.values()) for o in store]==WILD and not report.failed

def test_rows_that_are_no_samples_are_failures_with_their_line(tmp_path):
    "Too short, too long, or without a label; blank lines are none"
    path = tmp_path/'a.csv'
    path.write_text('txt,cls\na,x\nb\n\nc,y,z\n"d\nd",x\n,\n"e",y\n,x\n')
    reasons = {'a.csv:3':'1 columns where the header has 2', 'a.csv:5':'3 columns where the header has 2',
               'a.csv:8':"column 'cls': nothing in this row ('')"}
    for options in {}, {'label_col':'cls'}, {'fields':{'txt':'txt', 'cls':'cls'}}:
        store,report = in_memory(csv_samples(path, **options))
        assert [*dict(report.failures)]==[*reasons] and sorted(column(store, 'cls'))==['x','x','x','y']
        assert all(reasons[line] in reason for line,reason in report.failures)
    assert in_memory(pd.DataFrame({'cls':['','x']}))[0].vocab==['','x']   # here the table says that it is a label

def test_image_files_that_are_gone_or_damaged_are_failures(tmp_path):
    for i in range(4): (tmp_path/f'ü{i}.png').write_bytes(b'no picture' if i==2 else grey(i))
    (tmp_path/'ü1.png').unlink()
    path = write_csv(tmp_path/'a.csv', [['n','name','tags'], *([i, f'ü{i}', 'a;b' if i else ''] for i in range(4))])
    source = csv_samples(path, fn_col=1, label_col=2, label_delim=';', folder=tmp_path, suff='.png')
    store,report = in_memory(source)
    assert stored(store, 'png')==[grey(0),grey(3)] and column(store, 'labels')==[[],['a','b']]
    assert [name for name,_ in report.failures]==['a.csv:3','a.csv:4'] and 'ü1.png' in report.failures[0][1]

def test_csv_files_without_samples(tmp_path):
    with pytest.raises(FileNotFoundError, match='no files'): csv_samples(tmp_path)
    with pytest.raises(FileNotFoundError, match='no such file'): csv_samples(tmp_path/'a.csv')
    for text,match in ('','a.csv: empty'), ('txt,cls\n','the source is empty'), ('txt,txt,cls\na,b,c\n','txt'):
        (tmp_path/'a.csv').write_text(text)
        with pytest.raises(ValueError, match=match): in_memory(csv_samples(tmp_path))

def test_a_damaged_row_does_not_cost_the_others(tmp_path):
    good = b''.join(b'row %d,x\n'%i for i in range(100))
    (tmp_path/'a.csv').write_bytes(b'txt,cls\n'+good+b'caf\xe9,x\nnul\x00,x\n'+good)
    store,report = in_memory(csv_samples(tmp_path/'a.csv'))
    assert sorted(column(store, 'txt'))==sorted([f'row {i}' for i in range(100)]*2+['nul\x00'])
    assert report.failures==[('a.csv:102','ValueError: not UTF-8')]

def test_a_cell_beyond_the_limit_of_csv_is_an_error_with_its_line(tmp_path):
    "After the limit, its further lines would be taken for rows"
    (tmp_path/'a.csv').write_text('txt\nshort\n"'+'\n'.join('x'*50_000 for _ in range(5))+'"\nlast\n')
    with pytest.raises(ValueError, match=r'a.csv:5: .*csv.field_size_limit'): loaded(csv_samples(tmp_path/'a.csv'))
    before = csv.field_size_limit(1_000_000)
    try: assert len(loaded(csv_samples(tmp_path/'a.csv')))==3
    finally: csv.field_size_limit(before)

@pytest.mark.slow
def test_more_labels_than_two_bytes_hold():
    n = 66_000
    labels = [f'l{i*7919%n}' for i in range(n)]
    store,_ = in_memory(({'cls':label} for label in labels), chunk=4096)
    assert len(store.vocab)==n and store.manifest.fields['cls']['dtype']=='u4'
    assert [store.vocab[c] for c in store.get_many(range(n), 'cls')['cls']]==labels

@pytest.fixture
def two_files(tmp_path):
    return lambda *texts: [write_csv(tmp_path/f'{k}.csv', lines) for k,lines in enumerate(texts)]

def test_columns_that_only_a_later_file_has_are_failed_samples(two_files):
    "Also beside a column of splits, which is no field"
    files = two_files([['txt','split'], ['a','train'], ['b','valid']], [['txt','split','more'], ['c','train','d']])
    for options in {}, {'valid_col':'split'}:
        store,report = in_memory(csv_samples(files, **options))
        assert column(store, 'txt')==['a','b']
        assert 'columns txt, split, more; the first row had txt, split' in report.failures[0][1]

@pytest.mark.parametrize('options', [{'fn_col':'fn'}, {'valid_col':'fn'}])
def test_a_column_that_only_the_first_file_has_names_the_other(two_files, options):
    "Also if the first file has less than twenty rows; all that reads the files says the same"
    files = two_files([['fn','label'], ['train','x']], [['path','label'], ['valid','y']])
    for read in raw_samples,attrgetter('raw_bytes'):
        with pytest.raises(ValueError, match="1.csv: no column 'fn'; there are path, label"):
            read(csv_samples(files, **options))
    store,report = in_memory(csv_samples(files))   # without names of columns, the first file says which there are
    assert store[:]==[{'fn.txt':'train', 'cls':'x'}]
    assert "column 'fn': no such column here; there are path, label" in report.failures[0][1]

def test_columns_by_position_may_have_other_names_in_another_file(two_files):
    files = two_files([['split','txt'], ['train','x']], [['part','txt'], ['valid','y']])
    store,_ = in_memory(csv_samples(files, fields={'txt':'txt'}, valid_col=0))
    assert store[:]==[{'txt':'x'}, {'txt':'y'}] and store.splits=={'train':[0,1], 'valid':[1,2]}

DAMAGE = {'truncated':lambda b: b[:-30], 'changed':lambda b: b[:40]+bytes(8)+b[48:], 'other':lambda b: b'no archive'}

@pytest.mark.parametrize('damage', DAMAGE)
def test_damaged_compressed_files_are_named(tmp_path, damage):
    for source,name,line in (csv_samples,'a.csv','label,text,{}'), (drawing_samples,'a.ndjson','{{"word":{}}}'):
        text = '\n'.join(line.format(random.Random(i).random()) for i in range(2000)).encode()
        for compress,end in (gzip.compress,'.gz'), (lzma.compress,'.xz'):
            (path := tmp_path/(name+end)).write_bytes(DAMAGE[damage](compress(text)))
            with pytest.raises(OSError, match=f'{name}{end}: truncated or damaged: '): raw_samples(source(path))
        opened = source(path)
        path.unlink()   # a file that is gone is not called damaged
        with pytest.raises(FileNotFoundError, match=f'No such file.*{name}'): raw_samples(opened)

# --- tars

@pytest.mark.parametrize('name,source', [('part.csv',csv_samples), ('part.tar',tar_samples)])
def test_folders_are_searched_for_files_that_are_not_hidden(tmp_path, name, source):
    "Spark calls folders as files, and folders of checkpoints hold copies. The folder itself may be in a hidden one"
    root = tmp_path/'.hidden/data'
    for where in 'x/'+name, f'.ipynb_checkpoints/{name}', f'{name}/.git/{name}', f'{name}/{name}', f'.{name}':
        (root/where).parent.mkdir(parents=True, exist_ok=True)
        (root/where).write_bytes(b'text')
    assert [str(Path(p).relative_to(root)) for p in source(root).files]==[f'{name}/{name}',f'x/{name}']
    os.symlink('nowhere', root/f'z{name}')
    with pytest.raises(FileNotFoundError, match=f'z{name}'): source(root)

# --- streams and splits

def test_a_field_may_be_called_as_what_the_store_keeps(put):
    names = ['failures','meta','ingest','register','used','chunks','lock','vocab','crc','stats']
    source = [{'txt':f'{i}' if i!=5 else None, **{name:i for name in names}} for i in range(30)]
    store,report = put(source, shuffle=False)
    assert report.failed==1 and [*store.failures()]==[('item 5', 'TypeError: txt: want str, got NoneType')]
    assert all(o[name]==int(o['txt']) for o in store for name in names)

def test_a_source_that_can_be_read_once_is_not_read_twice():
    "What is left of it would be taken for all of it"
    table = pa.table({'txt':[f'{i}' for i in range(10)]})
    reader = pa.RecordBatchReader.from_batches(table.schema, table.to_batches(3))
    for source in as_source(reader), as_source(i for i in range(10)), as_source(iter(range(10))):
        assert source.raw_bytes and sum(map(len, source.stream(4)))==10
        with pytest.raises(ValueError, match='can be read only once'): list(source.stream(4))
    with pytest.raises(ValueError, match='a stream cannot be divided.*{split: source}'):
        in_memory(({'id':i} for i in range(9)), splits={'t':.5, 'v':.5})

def test_splits_of_streams_keep_what_their_sources_say(tmp_path):
    "Remarks for the report"
    path = write_csv(tmp_path/'a.csv', [['target'], ['a']])
    _,report = in_memory({split:csv_samples(path) for split in ('train','valid')})
    assert "label_col='target' makes it the label" in str(report)

def test_records_of_numpy_count_with_all_their_values():
    "Their `repr` shows only the first and last elements of a long array"
    def fingerprint(value):
        rows = np.zeros(2, [('a','f4',(2000,))])
        rows['a'][1,1000] = value
        return repr(as_source(list(rows)).fingerprint())
    assert fingerprint(1)!=fingerprint(2) and fingerprint(1)==fingerprint(1)

# --- stores

def rich(i): return {'png':Image.fromarray(np.full((4,5,3), i, np.uint8)), 'jpg':encoded(np.full((9,9), i), 'JPEG'),
    'mask.png':grey(i%2), 'txt':f'ü {i}', 'json':{'i':[i,None]}, 'labels':[f'l{i%3}',f'm{i%2}'], 'cls':f'c{i%7}',
    'other.cls':i%4, 'neg.cls':-i, 'more.labels':[i%3,i%2+5], 'id':i-5, 'target.f4':i/7, 'e.f8':i/7, 'h.f2':i/8,
    'w.i2':-i, 'npy':np.arange(i%5), 'm.npz':{'a':np.ones(i%3)}, 'bin':bytes([i])*i,
    'x.npyimg':np.full((3,4), i, np.uint8)}

def all_bytes(store): return {f:[*map(bytes, v)] if isinstance(v, list) else [store.decode(0, f, o) for o in v]
                              for f,v in store.get_many(range(len(store)), store.fields, check=True).items()}

def test_a_copy_of_a_store_has_the_same_bytes(put):
    "Every codec, label and split; once more with an `fn`, which gets what is no image as what it is"
    a,_ = put({'train':[rich(i) for i in range(20)], 'valid':[rich(i) for i in range(20,30)]}, shuffle=False)
    b,report = put(a, 'b', shuffle=False)
    assert report.failed==0 and all_bytes(a)==all_bytes(b)
    for what in 'fields','splits','vocab','counts','stats','n':
        assert getattr(a.manifest, what)==getattr(b.manifest, what)
    def fn(o):
        assert isinstance(o['png'], Image.Image) and [type(o[f]) for f in ('npy','json','cls')]==[np.ndarray,dict,str]
        return o
    c,report = put(a, 'c', fn=fn, shuffle=False)
    packed = dict.fromkeys(('npy','m.npz'))   # may be compressed anew
    assert report.failed==0 and all_bytes(a)|packed==all_bytes(c)|packed and (c.splits,c.vocab)==(a.splits,a.vocab)

def test_fields_keep_the_codec_that_their_names_do_not_say():
    "Alone, or beside another store's; two stores with labels of their own become one with all of them"
    def make(labels):
        return in_memory([{'x':Image.new('L', (3,3), i), 'y':f'{i}', 'cls':labels[i%2]} for i in range(8)])[0]
    a,b = make('ab'),make('bc')
    for source,times in (a,1), ({'train':a, 'valid':a},2):
        store,_ = in_memory(source)
        assert [store.manifest.fields[f]['codec'] for f in 'xy']==['png','txt']
        assert all_bytes(store)=={f:v*times for f,v in all_bytes(a).items()}
    store,_ = in_memory({'train':a, 'valid':b})
    assert store.vocab==['a','b','c'] and store.splits=={'train':[0,8], 'valid':[8,16]}
    assert column(store, 'cls')==['a','b']*4+['b','c']*4

def test_the_fields_of_a_store_that_are_read_count():
    "A source of other fields of the same store is another source"
    store,_ = in_memory([{'txt':'a', 'id':i} for i in range(3)])
    texts = [repr(stored_samples(store, fields).fingerprint()) for fields in (None, ['txt','id'], ['txt'], ['id'])]
    assert len({*texts})==3 and texts[0]==texts[1]
    with pytest.raises(ValueError, match="no field 'nope'; there are txt, id"): stored_samples(store, ['txt','nope'])

# --- keys of others

def npz(a):
    np.savez_compressed(f := io.BytesIO(), a)
    return f.getvalue()

def forum(c, **sizes):
    "Arrays as npz, labels as text, numbered from 1"
    for split,n in sizes.items():
        for i in range(n):
            c.set(f'{split}:x:{i+1}', npz(np.full((28,28), 8*(i%2)+i, np.uint8)))
            c.set(f'{split}:y:{i+1}', str(i%2))

def test_keys_of_others_are_read_loaded_and_ingested_as_they_stand(fresh):
    forum(client(fresh), train=24, valid=8)
    sizes = {'train':24, 'valid':8}
    s = RedisStore.from_keys(fresh.url, '{split}:x:{}', '{split}:y:{}', sizes, vocab=['cat','dog'], start=1)
    assert (len(s),s.splits,s.vocab)==(32,{'train':[0,24], 'valid':[24,32]},['cat','dog'])
    assert s.verify(num_workers=1).bad==0 and (s[25]['x']==9).all() and s[25]['cls']=='dog'
    dls = DataLoaders.from_store(s, bs=8, num_workers=0, device='cpu')
    assert [len(dls.train_ds),len(dls.valid_ds)]==[24,8]
    assert sorted(int(y) for _,ys in dls.valid for y in ys)==[0]*4+[1]*4
    copy,report = in_memory(s)
    assert report.failed==0 and copy.splits==s.splits and column(copy, 'cls')==['cat','dog']*16
    assert [int(o['x'][0,0]) for o in copy]==[int(o['x'][0,0]) for o in s]

@pytest.mark.parametrize('shape,dtype', [((9,9,1),'u1'), ((3,9,9),'u1'), ((9,9),'i8')])
def test_arrays_of_others_that_are_no_picture_are_arrays(server, shape, dtype):
    for i in range(8): client(server).set(f'x:{i}', npz(np.full(shape, i, dtype) if i%4 else np.full((9,9), i, 'u1')))
    store = RedisStore.from_keys(server.url, 'x:{}', n=8)
    report = in_memory(store)[1]
    assert store.verify(num_workers=1).bad==0 and (report.written,report.failed)==(8,0)

def test_keys_of_others_that_are_wrong_are_named(fresh):
    "Missing keys, keys of other types, labels that are none, damaged arrays; verify counts them, a copy reports them"
    forum(c := client(fresh), train=32)
    s = RedisStore.from_keys(fresh.url, 'train:x:{}', 'train:y:{}', 32, vocab=['cat','dog'], start=1)
    c.delete('train:y:5', 'train:x:7')
    c.lpush('train:x:7', 'a')
    c.mset({'train:y:9':'dog', 'train:y:11':'2', 'train:y:13':'-1', 'train:x:15':b'PK no zip'})
    wrong = {4:(MissingSample,'sample 4 is'), 6:(MissingSample,'sample 6 is'), 8:(CorruptSample,'train:y:9.*dog'),
             10:(CorruptSample,'train:y:11'), 12:(CorruptSample,'train:y:13'), 14:(CorruptSample,'sample 14')}
    for i,(error,match) in wrong.items():
        with pytest.raises(error, match=match): s[i]
    report = s.verify(num_workers=1)
    assert report.bad==6 and [i for i,_ in report.failures]==[*wrong]
    report = in_memory(s)[1]
    assert report.written==26 and [name for name,_ in report.failures]==[f'sample {i}' for i in wrong]

@pytest.mark.parametrize('given', [dict(x='x:{{}}'), dict(x='x:{}:{other}'), dict(x='x:{}{}'), dict(x='x:{'),
    dict(n=-1), dict(n=2.5), dict(n={'a':2, 'b':-1}, x='{split}{}'),
    dict(n={'a':1, 'b':2}, x='{split}:{}', y='y:{}', vocab=['a']), dict(vocab=['a'])], ids=str)
def test_patterns_that_cannot_be_those_of_samples(server, given):
    "Doubled braces are no place for a number: all samples would have one key"
    with pytest.raises(ValueError, match='pattern|number of samples|vocab|split'):
        RedisStore.from_keys(server.url, **{'x':'x:{}', 'n':3, **given})

def test_keys_of_others_are_named_as_they_are(server):
    client(server).mset({'{x}:07':b'seven', 'y:7':b'9'*5000})   # more digits than Python converts
    s = RedisStore.from_keys(server.url, '{{x}}:{:02}', 'y:{}', n={'all':9}, codec='bin', vocab=['a'], image=False)
    assert s.get_many([7], 'x')['x']==[b'seven'] and s.location(7, 'x')==' in key {x}:07' and s.reopened() is s
    with pytest.raises(CorruptSample, match='sample 7: y:7 holds'): s.get_many([7], 'cls')

# --- statistics

def noise(rng, *shape, mode=None): return Image.fromarray(rng.integers(0, 256, (64,64,*shape), np.uint8), mode)
PICTURES = {'grey':noise, 'palette':lambda rng: noise(rng, 3).quantize(16), 'alpha':lambda rng: noise(rng, 4),
    'grey alpha':lambda rng: noise(rng, 2, mode='LA'), 'one bit':lambda rng: noise(rng).convert('1'),
    'mixed':lambda rng: noise(rng, *([3] if rng.random()<.5 else []))}

@pytest.mark.parametrize('kind', PICTURES)
def test_statistics_are_those_of_numpy(tmp_path, kind):
    "Means, deviations, the mean image, counts and weights; the same after an ingest that stopped and went on"
    rng = np.random.default_rng(0)
    images = [PICTURES[kind](rng) for _ in range(60)]
    source = [{'png':encoded(im), 'cls':'abc'[min(i%4, 2)]} for i,im in enumerate(images)]
    left = [50]
    def fn(o):
        left[0] -= 1
        if not left[0]: raise KeyboardInterrupt
        return o
    def write(): return to_shards(source, tmp_path/'d', fn, chunk=8, **OPTIONS)
    with pytest.raises(KeyboardInterrupt): write()
    assert write().resumed
    store = ShardStore(tmp_path/'d')
    is_grey = [im.mode in ('L','1','LA') for im in images]
    mode = 'L' if all(is_grey) else 'RGB'
    a = [np.asarray(im.convert('L' if g else 'RGB').convert(mode)).reshape(64, 64, -1) for im,g in zip(images, is_grey)]
    mean,std = store.stats
    assert store.mean_image().mode==mode and len(mean)==len(mode)
    assert np.allclose(mean, np.mean(a, (0,1,2))/255, atol=1e-5)
    assert np.allclose(std, np.std(a, (0,1,2))/255, atol=1e-5)
    assert np.abs(np.asarray(store.mean_image()).reshape(64, 64, -1)-np.mean(a, 0)).max()<=.5
    assert store.class_counts()=={'a':15, 'b':15, 'c':30} and np.allclose(store.class_weights(), [4/3,4/3,2/3])

def test_statistics_are_of_what_is_there(put):
    "What failed is not counted, and neither is a mask; sizes are those of the images as stored"
    def fn(i):
        if i%5==0: raise ValueError('no')
        return {'mask.png':grey(255), 'png':grey(i, (10+i%3,20)), 'cls':i%3}
    store,_ = put(list(range(1,200)), fn=fn, chunk=8, max_failed=1.)
    good = [i for i in range(1,200) if i%5]
    stats = image_stats(store)
    assert np.isclose(store.stats[0][0], np.mean(good)/255, atol=1e-5) and list(store.manifest.stats)==['png']
    assert (stats['n'],stats['width'],stats['height'][::2])==(len(good),[20,20.,20],[10,12])
    assert store.class_counts()=={k:sum(i%3==k for i in good) for k in range(3)}
