"Sources as the world has them: CSV files, tars, streams, stores, keys of others; what they hold is there, or a failure says so"
import csv, gzip, io, json, lzma, os, pickle, random, re, tarfile, tracemalloc
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
from fastai.data.core import DataLoaders
from PIL import Image

import fastai_remote.block
from fastai_remote.source.datasets import as_source, stored_samples
from fastai_remote.source.base import stable_repr, StreamedSource
from fastai_remote.source.files import image_samples, list_files
from fastai_remote.source.tars import expand_braces
from fastai_remote.codec.base import Encoded
from fastai_remote import (CorruptSample, IngestError, MissingSample, RedisStore, StoreError, StoreFull, StoreNotFound, csv_samples, drawing_samples, redis_server, tar_samples,
    table_samples, to_redis)

@pytest.fixture(scope='module')
def server():
    "A server for this module, for others' data would be in the way"
    with redis_server() as s: yield s

@pytest.fixture
def put(server):
    "Write to a clean server: the store and the report"
    client(server).flushall()
    return lambda src, name='d', **kw: add(server, src, name, **kw)

def add(server, src, name='d', **kw):
    rep = to_redis(src, server.url, name, **{'num_workers':1, 'progress':False, **kw})
    return RedisStore(server.url, name),rep

def client(server): return redis.Redis.from_url(server.url)
def values(s, f): return [s.decode(i, f, v) for i,v in enumerate(s.get_many(range(len(s)), f, check=True)[f])]
def rows(s): return [s[i] for i in range(len(s))]

def png(a, mode=None):
    im = Image.fromarray(np.asarray(a, np.uint8))
    (im.convert(mode) if mode else im).save(b:=io.BytesIO(), 'PNG')
    return b.getvalue()

# --- CSV

def write_csv(p, head, data, opened=open, **kw):
    with opened(p, 'wt', newline='', **{'encoding':'utf-8', **kw}) as f: csv.writer(f).writerows([head,*data])
    return p

wild = [['plain','1'], ['with, comma','2'], ['two\nlines','3'], ['a "quoted" word','4'], ['crlf\r\nin it','5'], ['ünïcödé 漢字 🐱','6'],
        ['','7'], [' spaces ','8']]

@pytest.mark.parametrize('ext,opened', [('csv',open), ('csv.gz',gzip.open), ('csv.xz',lzma.open)])
@pytest.mark.parametrize('encoding', ['utf-8','utf-8-sig'], ids=['plain','BOM'])
def test_csv_rows(put, tmp_path, ext, opened, encoding):
    "Rows come back as they were written, in their order, whatever is in them"
    p = write_csv(tmp_path/f'a.{ext}', ['txt','labels.txt'], wild, opened, encoding=encoding)
    s,rep = put(csv_samples(p))
    assert (rep.failed,s.fields)==(0,['txt','labels.txt']) and [[o['txt'],o['labels.txt']] for o in rows(s)]==wild

def test_csv_bad_rows(put, tmp_path):
    "Rows too short or too long, or without a label, are failures with their line; blank lines are none"
    (tmp_path/'a.csv').write_text('txt,cls\na,x\nb\n\nc,y,z\n"d\nd",x\n,\n"e",y\n,x\n')
    s,rep = put(csv_samples(tmp_path/'a.csv'))
    assert [o['txt'] for o in rows(s)]==[['a',0,0,'d\nd',0,'e',''][i] for i in dense(7, (1,2,4))] and s.vocab==['x','y']
    assert rep.failures==[('a.csv:3','ValueError: 1 columns where the header has 2'), ('a.csv:5','ValueError: 3 columns where the header has 2'),
                          ('a.csv:8',"ValueError: column 'cls': nothing in this row (''): fill it in, or leave out the row or the column")]
    for source in csv_samples(tmp_path/'a.csv', label_col='cls'),csv_samples(tmp_path/'a.csv', fields={'txt':'txt', 'cls':'cls'}):
        assert put(source, overwrite=True)[1].failures==rep.failures
    assert put(pd.DataFrame({'cls':['','x']}), overwrite=True)[0].vocab==['','x']   # here the table says that it is a label

def test_csv_images(put, tmp_path):
    "Images that a column names: labels, several labels, a suffix, columns by number; files that are gone are failures"
    for i in range(30): (tmp_path/f'ü{i}.png').write_bytes(png(np.full((4,5), i)))
    (tmp_path/'ü7.png').unlink()
    (tmp_path/'ü8.png').write_bytes(b'no picture')
    p = write_csv(tmp_path/'a.csv', ['n','name','tags'], [[i, f'ü{i}', f'{"ab"[i%2]};c' if i%3 else ''] for i in range(30)])
    for cols in (dict(fn_col='name', label_col='tags'), dict(fn_col=1, label_col=2)):
        s,rep = put(csv_samples(p, label_delim=';', folder=tmp_path, suff='.png', **cols), overwrite=True)
        assert s.fields==['png','labels'] and s.manifest.vocab=={'labels':['a','b','c']} and (len(s),rep.failed)==(28,2)
        assert [(np.asarray(o['png'])[0,0],o['labels']) for o in rows(s)]==[(i, ['ab'[i%2],'c'] if i%3 else []) for i in dense(30, (7,8))]
        assert [n for n,_ in rep.failures]==['a.csv:9','a.csv:10'] and 'ü7.png' in rep.failures[0][1]

def dense(n, bad):
    "Where the samples of a stream without splits end up: the last fill the gaps"
    res,tail = [i if i not in bad else None for i in range(n)],[i for i in range(n-len(bad), n) if i not in bad]
    gaps = [k for k in range(n-len(bad)) if res[k] is None]
    for k,i in zip(gaps, tail): res[k] = i
    return res[:n-len(bad)]

@pytest.mark.parametrize('kw,what', [(dict(fn_col='nope'),"no column 'nope'; there are txt, cls"), (dict(label_col='nope'),"no column 'nope'"),
                                     (dict(fn_col=5),'no column 5')])
def test_csv_no_column(put, server, tmp_path, kw, what):
    "A column that is not there, in the first file or the second"
    p = write_csv(tmp_path/'b.csv', ['txt','cls'], [['a','b']])
    with pytest.raises(ValueError, match=f'b.csv: {what}'): put(csv_samples(p, **kw))
    if isinstance(c:=next(iter(kw.values())), str):
        write_csv(tmp_path/'a.csv', ['x',c], [[i,i] for i in range(1000)])
        with pytest.raises(ValueError, match=f'b.csv: {what}'): put(csv_samples(tmp_path, label_col=c), 'e', num_workers=2)
        with pytest.raises(StoreNotFound): RedisStore(server.url, 'e')

def test_csv_empty(put, tmp_path):
    "No file, no header, no rows"
    with pytest.raises(FileNotFoundError, match='no files'): csv_samples(tmp_path)
    with pytest.raises(FileNotFoundError, match='no such file'): csv_samples(tmp_path/'a.csv')
    (tmp_path/'a.csv').write_text('')
    with pytest.raises(ValueError, match='a.csv: empty'): put(csv_samples(tmp_path))
    (tmp_path/'a.csv').write_text('txt,cls\n')
    with pytest.raises(ValueError, match='the source is empty'): put(csv_samples(tmp_path))

def test_csv_twin_columns(put, tmp_path):
    "Two columns of one name cannot both be kept, and that is said"
    p = write_csv(tmp_path/'a.csv', ['txt','txt','cls'], [['a','b','c']]*5)
    with pytest.raises(ValueError, match='txt'): put(csv_samples(p))

@pytest.mark.parametrize('bad', [b'caf\xe9,x\n', b'nul\x00,x\n', b'%b,x\n' % (b'y'*200_000)], ids=['no UTF-8','NUL','long'])
def test_csv_damaged_row(put, tmp_path, bad):
    "A row that cannot be read does not cost the others: it comes through, or is a failure, or the error says where"
    good = b''.join(b'row %d,x\n'%i for i in range(500))
    (tmp_path/'a.csv').write_bytes(b'txt,cls\n'+good+bad+good)
    try: s,rep = put(csv_samples(tmp_path/'a.csv'))
    except Exception as e: assert re.search(r'a\.csv.*50[12]', str(e)), repr(e)
    else: assert len(s)+rep.failed==1001 and len(s)>=1000

def test_csv_cut_gz(put, tmp_path):
    "A file that is cut off is not taken for a whole one"
    write_csv(p:=tmp_path/'a.csv.gz', ['txt','n'], [[f'row {i} {random.Random(i).random()}',i] for i in range(2000)], gzip.open)
    p.write_bytes(p.read_bytes()[:-3000])
    try: _,rep = put(csv_samples(p))
    except (EOFError,OSError,ValueError): pass
    else: assert rep.failed and rep.written

def test_csv_many_labels(put, tmp_path):
    "More labels than two bytes hold"
    n = 70_000
    p = write_csv(tmp_path/'a.csv', ['cls','id.txt'], [[f'l{i*7919%n}',i] for i in range(n)])
    s,rep = put(csv_samples(p), chunk=4096)
    v = s.manifest.vocab['cls']
    assert len(v)==n and s.manifest.fields['cls']['dtype']=='u4' and [v[c] for c in s.get_many(range(n), 'cls')['cls']]==[f'l{i*7919%n}' for i in range(n)]
    assert set(s.class_counts().values())=={1}

# --- tars

def tar(p, members, mode='w', **kw):
    "A tar of `(name, bytes)`, or of ready `TarInfo`"
    with tarfile.open(p, mode, **kw) as t:
        for m in members:
            if isinstance(m, tarfile.TarInfo): t.addfile(m)
            else:
                (i:=tarfile.TarInfo(m[0])).size = len(m[1])
                t.addfile(i, io.BytesIO(m[1]))
    return p

def wds(n=6, size=700): return [o for i in range(n) for o in ((f'{i:04}.bin', random.Random(i).randbytes(size)), (f'{i:04}.cls', b'%d' % (i%3)))]

@pytest.mark.parametrize('ext,mode', [('tar','w'), ('tar.gz','w:gz'), ('tgz','w:gz'), ('tar.xz','w:xz')])
@pytest.mark.parametrize('fmt', [tarfile.USTAR_FORMAT,tarfile.GNU_FORMAT,tarfile.PAX_FORMAT], ids=['ustar','gnu','pax'])
def test_tar_webdataset(put, tmp_path, ext, mode, fmt):
    "Several fields, folders, dots and long names, capitals, numbers and text, JSON; nothing depends on how it is packed"
    def one(i):
        k = f'dir.v1/{"x"*(i%3*30)}/s.{i:03}' if fmt!=tarfile.USTAR_FORMAT else f'dir.v1/{i:03}'
        k = k.replace('s.', 's')
        return k,[(f'{k}.PNG', png(np.full((3,4), i))), (f'{k}.cls', f'class {i%4}'.encode()), (f'{k}.json', json.dumps({'i':i}).encode()),
                  (f'{k}.left.npy', npy(i)),
                  (f'{k}.id', f'-{i}\n'.encode()), (f'{k}.target.f4', b' 0.5'), (f'{k}.txt', f'ü {i}'.encode())]
    src = [one(i) for i in range(100)]
    p = tar(tmp_path/f'a.{ext}', chain.from_iterable(m for _,m in src), mode, format=fmt)
    s,rep = put(tar_samples(p, key=True))
    assert rep.failed==0 and s.fields==['png','cls','json','left.npy','id','target.f4','txt','key.txt'] and s.vocab==[f'class {i}' for i in range(4)]
    for i,o in enumerate(rows(s)):
        assert np.asarray(o['png'])[0,0]==i and (o['left.npy']==i).all() and o['key.txt']==src[i][0]
        assert (o['cls'],o['json'],o['id'],o['target.f4'],o['txt'])==(f'class {i%4}', {'i':i}, -i, .5, f'ü {i}')

def npy(i):
    np.save(b:=io.BytesIO(), np.full(3, i))
    return b.getvalue()

def test_tar_int_classes(put, tmp_path):
    "Classes as WebDataset writes them, as numbers"
    s,rep = put(tar_samples(tar(tmp_path/'a.tar', wds(30))))
    assert (len(s),rep.failed,s.vocab)==(30,0,[0,1,2]) and values(s, 'cls')==[i%3 for i in range(30)]

def test_tar_several(put, tmp_path):
    "A folder of tars, in their order; the same key in two of them is two samples"
    for k in range(3): tar(tmp_path/f'{k}.tar', wds(5))
    s,rep = put(tar_samples(tmp_path))
    assert len(s)==15 and values(s, 'bin')==[random.Random(i).randbytes(700) for i in range(5)]*3

def outcome(put, p):
    "Which samples of `wds()` came through, and how many failures said that some did not"
    try: s,rep = put(tar_samples(p), overwrite=True)
    except (IngestError,ValueError,OSError): return [],1
    return [o['bin'] for o in rows(s)],rep.failed

whole_bins = [random.Random(i).randbytes(700) for i in range(6)]

@pytest.mark.parametrize('ext', ['tar','tar.gz'])
def test_tar_cut(put, tmp_path, ext):
    "Cut off at any block: each whole sample is there, and a failure says that others are not"
    p,silent = tar(tmp_path/'a.tar', wds(), format=tarfile.USTAR_FORMAT),[]
    b = p.read_bytes()
    q = tmp_path/f'cut.{ext}'
    end = 6*(512+1024+512+512)
    for cut in range(0, end+1, 512):
        q.write_bytes(b[:cut] if ext=='tar' else gzip.compress(b[:cut]))
        got,failed = outcome(put, q)
        assert set(got)<=set(whole_bins), cut
        assert len(got)>=cut//2560, cut
        if len(got)<6 and not failed: silent.append(cut)
    assert silent==[]

@pytest.mark.parametrize('ext', ['tar.gz','tar.xz'])
def test_tar_cut_compressed(put, tmp_path, ext):
    "The compressed file cut off anywhere: the same"
    p = tar(tmp_path/f'a.{ext}', wds(), 'w:'+ext[4:])
    b = p.read_bytes()
    for cut in random.Random(0).sample(range(len(b)-10), 40):
        p.write_bytes(b[:cut])
        got,failed = outcome(put, p)
        assert set(got)<=set(whole_bins) and (failed or len(got)==6), cut

@pytest.mark.parametrize('ext', ['tar','tar.gz'])
def test_tar_damaged_header(put, tmp_path, ext):
    "One byte of a header flipped: what comes after it is not lost in silence"
    p = tar(tmp_path/'a.tar', wds(), format=tarfile.USTAR_FORMAT)
    b = p.read_bytes()
    for at in range(2560, 6*2560, 2560):
        c = bytearray(b); c[at+3] ^= 0x55
        (q:=tmp_path/f'bad.{ext}').write_bytes(bytes(c) if ext=='tar' else gzip.compress(c))
        got,failed = outcome(put, q)
        assert set(got)<=set(whole_bins) and (failed or len(got)==6), at

def info(name, kind, link=''):
    (i:=tarfile.TarInfo(name)).type,i.linkname = kind,link
    return i

def test_tar_hostile(put, tmp_path):
    "Names that climb, links, devices, pickles: nothing is written anywhere, opened, or unpickled; keys stay text"
    class Bomb:
        def __reduce__(self): return (Path(tmp_path/'exploded').touch, ())
    bad = pickle.dumps(Bomb())
    (tmp_path/'secret').write_text('secret')
    names = ['../../up', '/etc/abs', 'a/../../b', '..', 'c\nd', 'é'*60, 'x'*300, '{}', '%s', '$(id)']
    members = [o for n in names for o in ((f'{n}.pyd', bad), (f'{n}.pickle', bad), (f'{n}.txt', b'text'))]
    others = [info('l.txt', tarfile.SYMTYPE, str(tmp_path/'secret')), info('h.txt', tarfile.LNKTYPE, '/etc/passwd'),
              info('d.txt', tarfile.CHRTYPE), info('f.txt', tarfile.FIFOTYPE), info('dir', tarfile.DIRTYPE)]
    p = tar(tmp_path/'a.tar', [*others,*members,*others])
    before = sorted(tmp_path.rglob('*'))
    s,rep = put(tar_samples(p, key=True))
    assert sorted(tmp_path.rglob('*'))==before
    assert all(o['pyd']==o['pickle']==bad and o['txt']=='text' for o in rows(s)) and b'secret' not in s.get_many(range(len(s)), 'txt')['txt']
    assert len(s)+rep.failed==len(names)-1+8 and len(s)>=len(names)-2   # the links and devices, twice; `...pyd` is hidden

def test_tar_npy_pickle(put, tmp_path):
    "An array of objects is a pickle: a failure"
    np.save(b:=io.BytesIO(), np.array([{}], object), allow_pickle=True)
    s,rep = put(tar_samples(tar(tmp_path/'a.tar', [*((f'{i}.npy', npy(i)) for i in range(9)), ('9.npy', b.getvalue())])))
    assert (len(s),rep.failed)==(9,1)

def test_tar_link_of_a_sample(put, tmp_path):
    "A sample that is a hard link to another, as tar packs files of one inode, is not lost in silence"
    i = info('0009.bin', tarfile.LNKTYPE, '0001.bin')
    s,rep = put(tar_samples(tar(tmp_path/'a.tar', [('0001.bin',b'abc'), i, ('0010.bin',b'def')])))
    assert len(s)+rep.failed==3

def test_tar_memory(tmp_path):
    "What is read of a packed tar is not kept"
    for ext in ('tar','tar.gz'):
        how = dict(mode='w:gz', compresslevel=1) if ext=='tar.gz' else {}
        p = tar(tmp_path/f'a.{ext}', ((f'{i:06}.cls', b'1') for i in range(20_000)), **how)
        tracemalloc.start()
        n = sum(len(o) for o in tar_samples(p).stream(64))
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert n==20_000 and top<3_000_000, (ext, top)

# --- streams

def gen(a, b, word='s'): yield from ({'txt':f'{word} {i}', 'cls':f'c{i%5}', 'id':i} for i in range(a, b))

@pytest.mark.parametrize('n', [1,63,64,65,128,1000])
@pytest.mark.parametrize('num_workers', [1,2])
def test_generator(put, server, n, num_workers):
    "A generator of any length: as it comes, and no key but its own"
    s,rep = put(gen(0, n), num_workers=num_workers)
    assert rows(s)==list(gen(0, n)) and (rep.written,s.splits)==(n,{})
    assert len(client(server).keys())==n+1+1+3

@pytest.mark.parametrize('sizes', [(100,40),(64,64),(1,1),(65,1,200)])
def test_split_streams(put, sizes):
    "Streams as splits: one after the other, each whole"
    ends = np.cumsum([0,*sizes]).tolist()
    s,_ = put({f's{k}':gen(a, b) for k,(a,b) in enumerate(zip(ends, ends[1:]))})
    assert s.splits=={f's{k}':[a,b] for k,(a,b) in enumerate(zip(ends, ends[1:]))}
    ids = values(s, 'id')
    for k,(a,b) in s.splits.items(): assert sorted(ids[a:b])==list(range(a, b))

def test_empty_split_stream(put):
    "A split without samples is there as one of a list would be"
    s,_ = put({'train':gen(0, 70), 'none':iter(()), 'valid':gen(70, 80)})
    assert s.splits=={'train':[0,70], 'none':[70,70], 'valid':[70,80]}

def test_stream_first_bad(put):
    "Bad ones at the front of a stream do not decide for the rest"
    s,rep = put(chain(({'txt':None} for _ in range(70)), ({'txt':f'{i}'} for i in range(200))), max_failed=70)
    assert (len(s),rep.failed)==(200,70)

@pytest.mark.parametrize('n,splits,want', [(100,{'t':.8, 'v':.2},[80,20]), (7,{'t':.8, 'v':.2},[6,1]), (10,{'t':7, 'v':3},[7,3]), (10,{'t':None, 'v':3},[7,3]),
                                          (3,{'t':1., 'v':0.},[3,0]),
                                          (10,{'a':1/3, 'b':1/3, 'c':1/3},[4,3,3]), (1000,{'t':None, 'v':.1, 'w':50},[850,100,50])])
def test_cut(put, n, splits, want):
    "Fractions and counts: sizes as asked for, each sample in one, at random"
    s,_ = put(list(gen(0, n)), splits=splits)
    assert [b-a for a,b in s.splits.values()]==want and list(s.splits)==list(splits) and sorted(values(s, 'id'))==list(range(n))
    if n==1000: assert 1<sum(i<200 for i in values(s, 'id')[850:950])<50   # at random

@pytest.mark.parametrize('n,splits', [(10,{'t':.5, 'v':.4}), (2,{'t':.1, 'v':.1}), (10,{'t':5, 'v':4}), (10,{'t':8, 'v':4}),
                                     (10,{'t':None, 'v':None}), (10,{'t':None, 'v':11}), (10,{'t':.9, 'v':.2}),
                                     (10,{'t':-2, 'v':12}), (10,{'t':None, 'v':-2})])
def test_cut_wrong(put, server, n, splits):
    "Splits that do not add up are refused before anything is written"
    with pytest.raises(ValueError): put(list(gen(0, n)), splits=splits)
    assert client(server).keys()==[]

def test_cut_stream(put):
    "A stream has no fractions, and the way out is named"
    with pytest.raises(ValueError, match='a stream cannot be divided.*{split: source}'): put(gen(0, 9), splits={'t':.5, 'v':.5})

def test_any_field_name(put):
    "A field of any name is kept apart from what the store itself keeps"
    names = ['failures','meta','ingest','garbage','chunks','lock','vocab','crc','stats']
    s,rep = put([{'txt':f'{i}' if i!=5 else None, **{f:i for f in names}} for i in range(30)], shuffle=False)
    assert rep.failed==1 and list(s.failures())==[('item 5', 'TypeError: txt: want str, got NoneType')]
    assert all(o[f]==int(o['txt']) for o in rows(s) for f in names)

# --- stores

def rich(i): return {'png':Image.fromarray(np.full((4,5,3), i%256, np.uint8)), 'jpg':png2jpg(i), 'mask.png':png(np.full((4,5), i%2)), 'txt':f'ü {i}',
    'json':{'i':[i,None]}, 'labels':[f'l{i%3}',f'm{i%2}'],
    'cls':f'c{i%7}', 'other.cls':i%4, 'neg.cls':-i, 'id':i-5, 'target.f4':i/7, 'e.f8':i/7, 'h.f2':i/8, 'w.i2':-i,
    'npy':np.arange(i%5), 'm.npz':{'a':np.ones(i%3)}, 'bin':bytes([i%256])*i, 'x.npyimg':np.full((3,4), i%256, np.uint8)}
def png2jpg(i):
    Image.new('L', (9,9), i%256).save(b:=io.BytesIO(), 'JPEG')
    return b.getvalue()

def raw(s):
    d = s.get_many(range(len(s)), s.fields, check=True)
    return {f:d[f] if isinstance(d[f], list) else [s.decode(0, f, v) for v in d[f]] for f in d}

def test_store_to_store(put):
    "Every codec, label and split, byte for byte; once more with an `fn`, which gets what is no image as what it is"
    a,_ = put({'train':[rich(i) for i in range(60)], 'valid':[rich(i) for i in range(60,90)]}, shuffle=False)
    b,rep = put(a, 'b', shuffle=False)
    assert rep.failed==0 and raw(a)==raw(b)
    for f in ('fields','splits','vocab','counts','stats','n'): assert getattr(a.manifest, f)==getattr(b.manifest, f), f
    def fn(o):
        assert [type(o[f]) for f in ('png','npy','json','cls','labels')]==[Encoded,np.ndarray,dict,str,list]
        return o
    c,rep = put(a, 'c', fn=fn, shuffle=False)
    x,y = ({f:v for f,v in raw(s).items() if f not in ('npy','m.npz')} for s in (a,c))
    assert rep.failed==0 and x==y and c.splits==a.splits and c.vocab==a.vocab

def test_store_int_labels(put):
    "Labels that are numbers survive a copy"
    a,_ = put([{'labels':[i%3,i%2+5], 'txt':f'{i}'} for i in range(30)], shuffle=False)
    b,rep = put(a, 'b', shuffle=False)
    assert rep.failed==0 and raw(a)==raw(b)

def test_store_custom_names(put):
    "A field whose name says nothing of its codec keeps it, alone or beside another store's"
    a,_ = put([{'x':Image.new('L', (3,3), i), 'y':f'{i}'} for i in range(30)], shuffle=False)
    for name,src in (('b',a), ('c',{'train':a, 'valid':a})):
        s,_ = put(src, name, shuffle=False)
        assert [s.manifest.fields[f]['codec'] for f in 'xy']==['png','txt'] and raw(s)=={f:v*(1+(name=='c')) for f,v in raw(a).items()}

def test_stores_as_splits(put):
    "Two stores with labels of their own become one with all of them"
    a,_ = put([{'txt':f'{i}', 'cls':'ab'[i%2]} for i in range(20)], 'a')
    b,_ = put([{'txt':f'{i}', 'cls':'bc'[i%2]} for i in range(20)], 'b')
    s,rep = put({'train':a, 'valid':b}, 'c')
    assert rep.failed==0 and s.vocab==['a','b','c'] and s.splits=={'train':[0,20], 'valid':[20,40]}
    assert sorted(values(s, 'cls')[20:])==['b']*10+['c']*10

@pytest.mark.parametrize('num_workers', [1,2])
def test_store_damaged(put, server, num_workers):
    "Samples damaged or missing in the source are failures, by number; the others come"
    a,_ = put([{'txt':f'sample {i}', 'id':i} for i in range(500)], 'a', shuffle=False)
    c = client(server)
    c.set('a:txt:7', 'x'); c.delete('a:txt:300'); c.set('a:txt:499', 'sample 498')
    b,rep = put(a, 'b', num_workers=num_workers)
    assert sorted(values(b, 'id'))==[i for i in range(500) if i not in (7,300,499)] and all(o['txt']==f"sample {o['id']}" for o in rows(b))
    assert sorted((n,w.split(':')[0]) for n,w in rep.failures)==[('sample 300','MissingSample'),('sample 499','CorruptSample'),('sample 7','CorruptSample')]

def test_int_vocab(put):
    "A number that is not in a vocabulary of numbers is no code for one that is"
    s,rep = put([{'txt':'a', 'cls':20}]*10+[{'txt':'b', 'cls':1}]*10, vocab=[10,20,30])
    assert set(values(s, 'cls'))=={20} and rep.failed==10

# --- parts

def test_drawings_cut_at_random(put, tmp_path):
    "Files sorted by class are cut at random: each class has its share of each split"
    import json
    for k in range(12): (tmp_path/f'{k:02}.ndjson').write_text(''.join(json.dumps(dict(word=f'w{k:02}', key_id=str(1000*k+i), drawing=[[[0,i%200],[5,255]]]))+'\n' for i in range(250)))
    s,rep = put(drawing_samples(tmp_path), splits={'train':None, 'valid':.2, 'test':100})
    ids,cls = (s.get_many(range(3000), f)[f] for f in ('id','cls'))
    assert sorted(ids)==[1000*k+i for k in range(12) for i in range(250)] and s.splits=={'train':[0,2300], 'valid':[2300,2900], 'test':[2900,3000]}
    assert (cls==ids//1000).all()
    n = np.bincount(cls[2300:2900], minlength=12)
    assert n.min()>25 and n.max()<80 and (np.bincount(cls[2900:], minlength=12)>0).all()

def test_fastai_datasets_keep_their_splits(put):
    "A fastai `Datasets` of two subsets has two splits"
    from fastai.data.core import Datasets
    s,_ = put(Datasets(list(range(30)), [[lambda i: float(i)],[lambda i: str(i%3)]], splits=[list(range(20)),list(range(20,30))]))
    assert s.splits=={'train':[0,20], 'valid':[20,30]} and sorted(s.get_many(range(20,30), 'target.f4')['target.f4'])==list(range(20,30))

# --- keys of others

def forum(c, start=1, sizes=(('train',24),('valid',8))):
    "Arrays as npz, labels as text, numbered from `start`"
    for split,n in sizes:
        for i in range(n):
            np.savez_compressed(b:=io.BytesIO(), np.full((28,28), 8*(i%2)+i, np.uint8))
            c.set(f'{split}:x:{i+start}', b.getvalue()); c.set(f'{split}:y:{i+start}', str(i%2))

def test_from_keys(put, server):
    "Read, loaded, ingested, verified, as they stand"
    forum(client(server))
    s = RedisStore.from_keys(server.url, '{split}:x:{}', '{split}:y:{}', {'train':24, 'valid':8}, vocab=['cat','dog'], start=1)
    assert (len(s),s.splits,s.vocab)==(32,{'train':[0,24], 'valid':[24,32]},['cat','dog']) and s.verify(num_workers=1).bad==0
    assert (s[25]['x']==9).all() and s[25]['cls']=='dog'
    dls = DataLoaders.from_store(s, bs=8, num_workers=0, device='cpu')
    assert [len(dls.train_ds),len(dls.valid_ds)]==[24,8] and sorted(int(y) for _,ys in dls.valid for y in ys)==[0]*4+[1]*4
    b,rep = put(s, 'own', shuffle=False)
    assert rep.failed==0 and b.splits==s.splits and [(int(o['x'][0,0]),o['cls']) for o in rows(b)]==[(int(o['x'][0,0]),o['cls']) for o in rows(s)]
    assert b.class_counts()=={'cat':16, 'dog':16}

@pytest.mark.parametrize('shape,dtype', [((28,28,1),np.uint8), ((3,28,28),np.uint8), ((28,28,3),np.float32), ((28,28),np.float64), ((28,28),np.int64)])
def test_from_keys_other_arrays(put, server, shape, dtype):
    "Arrays that are no picture Pillow knows are arrays all the same, and none is lost for it"
    for i in range(40):
        np.savez_compressed(b:=io.BytesIO(), np.full(shape if i%4 else (28,28), i, dtype if i%4 else np.uint8))
        client(server).set(f'x:{i}', b.getvalue())
    s = RedisStore.from_keys(server.url, 'x:{}', n=40)
    assert s.verify(num_workers=1).bad==0
    b,rep = put(s, 'own', shuffle=False)
    assert (rep.written,rep.failed)==(40,0)

def test_from_keys_wrong(put, server):
    "Missing keys, keys of other types, labels that are none, damaged arrays: each named, verify counts them, a copy reports them"
    forum(c:=client(server), 1, [('train',32)])
    s = RedisStore.from_keys(server.url, 'train:x:{}', 'train:y:{}', 32, vocab=['cat','dog'], start=1)
    c.delete('train:x:3'); c.delete('train:y:5'); c.delete('train:x:7'); c.lpush('train:x:7', 'a')
    c.set('train:y:9', 'dog'); c.set('train:y:11', '2'); c.set('train:y:13', '-1'); c.set('train:x:15', b'PK no zip')
    for i,e,what in ((2,MissingSample,'sample 2 is'), (4,MissingSample,'sample 4 is'), (6,MissingSample,'sample 6 is'),
                     (8,CorruptSample,'train:y:9.*dog'), (10,CorruptSample,'train:y:11'),
                     (12,CorruptSample,'train:y:13'), (14,CorruptSample,'sample 14')):
        with pytest.raises(e, match=what): s[i]
    rep = s.verify(num_workers=1)
    assert (rep.bad,[i for i,_ in rep.failures])==(7,[2,4,6,8,10,12,14])
    b,rep = put(s, 'own', shuffle=False)
    assert (rep.written,rep.failed)==(25,7) and sorted(n for n,_ in rep.failures)==sorted(f'sample {i}' for i in (2,4,6,8,10,12,14))
    with pytest.raises(IndexError): s[32]
    for kw in (dict(x='train:x', y=None, n=3), dict(x='{split}:{}', n={'a':1, 'b':2}, y='y:{}', vocab=['a']), dict(x='x:{}')):
        with pytest.raises(ValueError): RedisStore.from_keys(server.url, **kw)

@pytest.mark.parametrize('given', [dict(x='x:{{}}'), dict(x='x:{}:{split}'), dict(x='x:{}:{other}'), dict(x='x:{}{}'), dict(x='x:{'), dict(n=-1), dict(n=2.5),
    dict(n={'a':2, 'b':-1}, x='{split}{}'), dict(vocab=['a'])], ids=str)
def test_from_keys_that_cannot_be_those_of_samples(server, given):
    "Doubled braces are no place for a number: all samples would have one key"
    with pytest.raises(ValueError, match='pattern|number of samples|vocab'): RedisStore.from_keys(server.url, **{'x':'x:{}', 'n':3, **given})

def test_keys_of_others_are_named_as_they_are(server):
    c = client(server)
    c.set('{x}:07', b'seven')
    c.set('y:7', b'9'*5000)   # more digits than Python converts
    s = RedisStore.from_keys(server.url, '{{x}}:{:02}', 'y:{}', n={'all':9}, codec='bin', vocab=['a'], image=False)
    assert s.get_many([7], 'x')['x']==[b'seven'] and s.key_location(7, 'x')==', in key {x}:07' and s.reopened() is s
    with pytest.raises(CorruptSample, match='sample 7: y:7 holds'): s.get_many([7], 'cls')

# --- statistics

rng = np.random.default_rng(0)
def grey(i): return Image.fromarray(rng.integers(0, 256, (64,64), np.uint8))
def colour(i): return Image.fromarray(rng.integers(0, 256, (64,64,3), np.uint8))
kinds = {'grey':grey, 'colour':colour, 'palette':lambda i: colour(i).quantize(16),
         'alpha':lambda i: Image.fromarray(rng.integers(0, 256, (64,64,4), np.uint8)),
         'grey alpha':lambda i: Image.fromarray(rng.integers(0, 256, (64,64,2), np.uint8), 'LA'), 'one bit':lambda i: grey(i).convert('1'),
         'mixed':lambda i: (grey,colour)[i%2](i), 'all':lambda i: [*kinds.values()][i%6](i)}

def encoded(im):
    im.save(b:=io.BytesIO(), 'PNG')
    return b.getvalue()

@pytest.mark.parametrize('kind', kinds)
@pytest.mark.parametrize('resumed', [False,True], ids=['at once','resumed'])
def test_statistics(put, kind, resumed):
    "Means, deviations, the mean image, counts and weights as numpy has them; the same after an ingest that stopped and went on"
    ims = [kinds[kind](i) for i in range(60)]
    src = [{'png':encoded(im), 'cls':'abc'[min(i%4, 2)]} for i,im in enumerate(ims)]
    left = [30*resumed]
    def fn(o):
        left[0] -= 1
        if not left[0]: raise KeyboardInterrupt
        return o
    if resumed:
        with pytest.raises(KeyboardInterrupt): put(src, fn=fn, chunk=8)
    s,rep = put(src, fn=fn, chunk=8)
    assert bool(rep.resumed)==resumed
    ims = [Image.open(io.BytesIO(o['png'])) for o in src]
    is_grey = [im.mode in ('L','1','LA') for im in ims]
    mode = 'L' if all(is_grey) else 'RGB'
    a = np.stack([np.asarray(im.convert('L' if g else 'RGB').convert(mode)) for im,g in zip(ims, is_grey)]).reshape(60, 64, 64, -1)
    mean,std = s.stats
    assert np.allclose(mean, (a/255).mean((0,1,2)), atol=1e-5) and np.allclose(std, (a/255).std((0,1,2)), atol=1e-5) and len(mean)==(1 if mode=='L' else 3)
    assert s.mean_image().mode==mode and np.abs(np.asarray(s.mean_image()).reshape(64, 64, -1)-a.mean(0)).max()<=.5
    st = s.image_stats('png')
    assert (st['n'],st['width'],st['height'])==(60,[64,64.,64],[64,64.,64])
    counts = np.bincount([min(i%4, 2) for i in range(60)])
    assert s.class_counts()==dict(zip('abc', counts.tolist())) and np.allclose(s.class_weights(), 60/(3*counts))
    assert np.isclose((s.class_weights()*counts).sum()/60, 1)

def test_statistics_of_what_is_there(put):
    "What failed is not counted, and neither is a mask; sizes are those of the images as stored"
    def fn(i):
        if i%5==0: raise ValueError('no')
        return {'mask.png':png(np.full((4,4), 255)), 'png':png(np.full((10+i%3,20), i)), 'cls':i%3}
    s,rep = put(list(range(1,200)), fn=fn, chunk=8, max_failed=1.)
    good = [i for i in range(1,200) if i%5]
    st = s.image_stats()
    assert np.isclose(s.stats[0][0], np.mean(good)/255, atol=1e-5) and (st['n'],st['width'],st['height'][::2])==(len(good),[20,20.,20],[10,12])
    assert s.class_counts()=={k:sum(i%3==k for i in good) for k in range(3)} and list(s.manifest.stats)==['png']

def test_statistics_never_lose_a_sample(put):
    "A picture that cannot be counted is stored all the same"
    s,rep = put([{'x.npyimg':np.full((8,8,1) if i%3 else (8,8), i, np.uint8)} for i in range(60)])
    assert (len(s),rep.failed)==(60,0)

# --- room

shapes = {'small':lambda i: {'txt':f's{i}', 'cls':i%5}, 'fixed':lambda i: {'id':i, 'target.f4':i/3, 'cls':f'c{i%9}'},
          'large':lambda i: {'bin':random.Random(i).randbytes(9000)},
          'uneven':lambda i: {'bin':random.Random(i).randbytes(random.Random(i).randrange(8000)), 'txt':'x'*(i%50)},
          'labels':lambda i: {'labels':[f'l{i%50}'], 'cls':f'label {i%90}', 'bin':b'x'*100}}

@pytest.mark.parametrize('fails', [0,2], ids=['all good','half fail'])
@pytest.mark.parametrize('kind', shapes)
def test_room(kind, fails):
    "What fits is let in, and what does not is refused when the first chunk is written"
    def fn(i):
        if fails and i%fails: raise ValueError('no')
        return shapes[kind](i)
    def act(s): return to_redis(list(range(n)), s.url, 'd', fn, num_workers=1, progress=False, chunk=64, max_failed=1.)
    n = 3000 if kind in ('large','uneven') else 12_000
    with redis_server() as a, redis_server() as b, redis_server() as d:
        used = lambda s: client(s).info('memory')['used_memory']
        u = used(a)
        rep = act(a)
        took = used(a)-u
        c = client(b)
        c.config_set('maxmemory', used(b)+int(took*1.35)+300_000)
        assert act(b).written==rep.written   # fits
        if fails or kind=='fixed': return   # reasons for failures take room too; so few bytes are noise
        assert took*.7-300_000<rep.needs<took*1.3+300_000
        c = client(d)
        c.config_set('maxmemory', used(d)+took//2)
        with pytest.raises(StoreFull, match='samples take about'): act(d)
        c.config_set('maxmemory', 0)
        assert c.hlen('d:ingest:chunks')<=2 and act(d).resumed>0

@pytest.mark.parametrize('policy', ['allkeys-lru','allkeys-random','allkeys-lfu'])
@pytest.mark.parametrize('num_workers', [1,2])
def test_evicting_server(policy, num_workers):
    "A server that drops keys when it is full: an error, and no dataset with most of its samples gone"
    with redis_server() as s:
        c = client(s)
        c.config_set('maxmemory', c.info('memory')['used_memory']+2_500_000)
        c.config_set('maxmemory-policy', policy)
        def src(): yield from ({'bin':random.Random(i).randbytes(3000), 'id':i} for i in range(3000))
        with pytest.raises(StoreError): to_redis(src(), s.url, 'd', num_workers=num_workers, progress=False)
        with pytest.raises(StoreNotFound): RedisStore(s.url, 'd')

def test_records_of_numpy_count_with_all_their_values():
    "Their `repr` shows only the first and last elements of a long array"
    def fingerprint(value):
        rows = np.zeros(2, [('a','f4',(2000,))])
        rows['a'][1,1000] = value
        return as_source(list(rows)).fingerprint()
    assert fingerprint(1)!=fingerprint(2) and fingerprint(1)==fingerprint(1)

def test_records_as_arguments_count_with_all_their_values():
    rows = np.zeros(2, [('a','f4',(2000,))])
    rows['a'][1,1000] = 1
    assert stable_repr(rows[0])!=stable_repr(rows[1]) and stable_repr(rows[0])==stable_repr(rows[0].copy())

def test_a_long_cell_of_several_lines_makes_no_rows_of_its_own(tmp_path):
    "After the limit of csv, its further lines would be taken for rows"
    (tmp_path/'a.csv').write_text('txt\nshort\n"'+'\n'.join('x'*50_000 for _ in range(5))+'"\nlast\n')
    with pytest.raises(ValueError, match=r'a.csv:5: .*csv.field_size_limit'):
        list(csv_samples(tmp_path/'a.csv').stream(10))
    before = csv.field_size_limit(1_000_000)
    try: assert len(next(csv_samples(tmp_path/'a.csv').stream(10)))==3
    finally: csv.field_size_limit(before)

def test_columns_that_only_a_later_file_has_are_failed_samples(tmp_path):
    "Also beside a column of splits, which is no field"
    write_csv(tmp_path/'a.csv', ['txt','split'], [['a','train'],['b','valid']])
    write_csv(tmp_path/'b.csv', ['txt','split','more'], [['c','train','d']])
    for kw in {}, {'valid_col':'split'}:
        source = csv_samples([tmp_path/'a.csv',tmp_path/'b.csv'], **kw)
        loaded = 0
        for _,raw in (row for part in source.stream(9) for row in part):
            try: loaded += bool(source.as_is(raw))
            except ValueError as e: assert "columns txt, split, more; the first row had txt, split" in str(e)
        assert loaded==2

def test_a_source_that_can_be_read_once_is_not_read_twice():
    "What is left of it would be taken for all of it"
    table = pa.table({'txt':[f'{i}' for i in range(10)]})
    reader = pa.RecordBatchReader.from_batches(table.schema, table.to_batches(3))
    for source in as_source(reader), as_source(i for i in range(10)), as_source(iter(range(10))):
        assert source.raw_bytes and sum(map(len, source.stream(4)))==10
        with pytest.raises(ValueError, match='can be read only once'): list(source.stream(4))

def test_samples_of_several_splits_are_read_in_the_order_wanted():
    source = as_source({split:[{'id':k+i} for i in range(3)] for split,k in (('train',0),('valid',3))})
    part = source.read(np.array([4,0,5,1,2]))
    assert len(part)==5 and [source.load(raw)['id'] for _,raw in part]==[4,0,5,1,2]
    assert [name for name,_ in part][:2]==['valid: item 1','train: item 0']

def test_splits_of_streams_keep_what_their_sources_say(tmp_path):
    "Codecs of their fields, and remarks for the report"
    class Stream(StreamedSource):
        codecs = {'x':'json'}
        def stream(self, size): yield [('0', {'x':'text'})]
        def fingerprint(self): return 0
    assert as_source({'train':Stream(), 'valid':Stream()}).codecs=={'x':'json'}
    write_csv(tmp_path/'a.csv', ['label'], [['a']])
    source = as_source({split:csv_samples(tmp_path/'a.csv') for split in ('train','valid')})
    assert source.as_is_notes==["column 'label' is stored as it is: label_col='label' makes it the label"]

def test_names_with_braces_that_are_there_are_not_expanded(tmp_path):
    assert expand_braces(tmp_path/'a{0,1}.tar')==[tmp_path/'a0.tar',tmp_path/'a1.tar']
    (tmp_path/'a{0,1}.tar').touch()
    for path in tmp_path/'a{0,1}.tar', str(tmp_path/'a{0,1}.tar'): assert expand_braces(path)==path

def test_splits_of_folders_are_a_list_or_a_dict(tmp_path):
    for splits in 'train', [], {}:
        with pytest.raises((TypeError,ValueError), match='splits= '): image_samples(tmp_path, splits=splits)

def test_fields_of_a_store_count(put):
    "A source of other fields of the same store is another source"
    store,_ = put([{'txt':'a', 'id':i} for i in range(3)])
    texts = [repr(stored_samples(store, fields).fingerprint()) for fields in (None, ['txt','id'], ['txt'], ['id'])]
    assert len(set(texts))==3 and texts[0]==texts[1]

def test_fields_that_a_store_does_not_have_are_named(put):
    store,_ = put([{'txt':'a', 'id':i} for i in range(3)])
    with pytest.raises(ValueError, match="no field 'nope'; there are txt, id"): stored_samples(store, ['txt','nope'])

@pytest.mark.parametrize('options', [{'fn_col':'fn'}, {'valid_col':'fn'}, {'fields':{'fn':'txt'}}])
def test_a_column_that_only_the_first_file_has_names_the_other(tmp_path, options):
    "Also if the first file has less than twenty rows; all that reads the files says the same"
    write_csv(tmp_path/'a.csv', ['fn','label'], [['train','x']])
    write_csv(tmp_path/'b.csv', ['path','label'], [['valid','y']])
    files = [tmp_path/'a.csv',tmp_path/'b.csv']
    assert csv_samples(files, **options).raw_bytes>0
    with pytest.raises(ValueError, match="b.csv: no column 'fn'; there are path, label"):
        list(csv_samples(files, **options).stream(9))

def test_columns_by_position_may_have_other_names_in_another_file(tmp_path):
    write_csv(tmp_path/'a.csv', ['split','txt'], [['train','x']])
    write_csv(tmp_path/'b.csv', ['part','txt'], [['valid','y']])
    source = csv_samples([tmp_path/'a.csv',tmp_path/'b.csv'], fields={'txt':'txt'}, valid_col=0)
    assert [raw for part in source.stream(9) for _,raw in part]==[('train',{'txt':'x'}), ('valid',{'txt':'y'})]

def test_what_a_later_file_lacks_fails_its_rows(tmp_path):
    "Without names of columns, the first file says which there are"
    write_csv(tmp_path/'a.csv', ['fn','label'], [['1','x']])
    write_csv(tmp_path/'b.csv', ['path','label'], [['2','y']])
    source = csv_samples([tmp_path/'a.csv',tmp_path/'b.csv'])
    (_,first),(_,second) = next(source.stream(9))
    assert source.raw_bytes==2 and source.as_is(first)=={'fn':'1', 'label':'x'}
    with pytest.raises(ValueError, match="column 'fn': no such column here; there are path, label"):
        source.as_is(second)

DAMAGE = {'truncated':lambda b: b[:-30], 'changed':lambda b: b[:40]+bytes(8)+b[48:], 'other':lambda b: b'no archive',
          'short':lambda b: b[:5]}

@pytest.mark.parametrize('damage', DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize('compress, end', [(gzip.compress,'.gz'), (lzma.compress,'.xz')])
@pytest.mark.parametrize('source, name, line', [(csv_samples,'a.csv','label,text,{}'),
                                                (drawing_samples,'a.ndjson','{{"word":{}}}')])
def test_damaged_compressed_files_are_named(tmp_path, source, name, line, compress, end, damage):
    text = '\n'.join(line.format(random.Random(i).random()) for i in range(2000))
    (tmp_path/(name+end)).write_bytes(damage(compress(text.encode())))
    with pytest.raises(OSError, match=f'{name}{end}: truncated or damaged: '):
        list(source(tmp_path/(name+end)).stream(50))

def test_a_compressed_file_that_is_gone_is_not_called_damaged(tmp_path):
    for source,name in (csv_samples,'a.csv.gz'),(drawing_samples,'a.ndjson.gz'):
        (tmp_path/name).write_bytes(gzip.compress(b''))
        opened = source(tmp_path/name)
        (tmp_path/name).unlink()
        with pytest.raises(FileNotFoundError, match=f'No such file.*{name}'): list(opened.stream(9))

SEARCHED = {'csv':(csv_samples, 'part.csv', b'txt\na\n'),
            'csv.gz':(csv_samples, 'part.csv.gz', gzip.compress(b'txt\na\n')),
            'drawings':(drawing_samples, 'part.ndjson', b'{"key_id":1,"drawing":[[[1,2],[3,4]]]}\n'),
            'tars':(tar_samples, 'part.tar', bytes(10240)), 'parquet':(table_samples, 'part.parquet', None)}

@pytest.mark.parametrize('kind', SEARCHED)
def test_folders_are_searched_for_files_that_are_not_hidden(tmp_path, kind):
    "Spark calls folders as files, and folders of checkpoints hold copies. The folder itself may be in a hidden one"
    source,name,content = SEARCHED[kind]
    if content is None: pq.write_table(pa.table({'txt':['a']}), tmp_path/name)
    else: (tmp_path/name).write_bytes(content)
    content = (tmp_path/name).read_bytes()
    root = tmp_path/'.hidden/data'
    for where in 'x/'+name, f'.ipynb_checkpoints/{name}', f'{name}/.git/{name}', f'{name}/{name}', f'.{name}':
        (root/where).parent.mkdir(parents=True, exist_ok=True)
        (root/where).write_bytes(content)
    found = source(root)
    files = list_files(root, ('.parquet',)) if kind=='parquet' else found.files
    assert [str(Path(p).relative_to(root)) for p in files]==[f'{name}/{name}',f'x/{name}']
    if kind=='parquet': assert len(found)==2
    os.symlink('nowhere', root/f'z{name}')
    with pytest.raises(FileNotFoundError, match=f'z{name}'): source(root)

def test_a_label_function_may_be_false(tmp_path):
    "As one with a length is, whose length is 0"
    class Labels(dict):
        def __call__(self, path): return path.stem
    Image.new('L', (2,2)).save(tmp_path/'a.png')
    assert image_samples(tmp_path, label=Labels())[0]['cls']=='a'
