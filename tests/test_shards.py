"`to_shards` from every kind of source, read by others and reading theirs, hostile files, and what a loader gets of shards"
import base64, csv, gzip, io, json, multiprocessing, os, pickle, random, re, shutil, signal, subprocess, sys, tarfile, threading, time, zlib
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pandas as pd
import pytest
import torch
from fastai.data.core import Datasets
from fastai.data.transforms import Categorize
from fastai.torch_core import set_seed
from fastai.vision.core import PILImage
from hypothesis import example, given, strategies as st
from PIL import Image

from conftest import CLASSES, N, class_of, examples, wait_for
from fastai_remote import (CorruptSample, IngestError, MemoryStore, MissingSample, RandomStoreSplitter, RedisStore, ShardStore, StoreBusy, StoreError, StoreExists, StoreFull, StoreNotFound,
    StoreSplitter, StoreUnavailable, UnsupportedFormat, csv_samples, drawing_samples, get_remote_items, image_samples, index_shards, shrink, tar_samples, to_redis, to_shards)
from fastai_remote.write import shards as shard_writer
from fastai_remote.write import folder_lock
from fastai_remote.write.base import host_id, process_state
from fastai_remote.write.folder_lock import FolderLock
from fastai_remote.write.shard_files import seal_json
from fastai_remote.store.shard_index import IndexColumns, ShardIndex, ShardManifest, ShardTable, pack_index
from fastai_remote.order.shards import ShardPermutation
from fastai_remote.store.cache import FileCache
from fastai_remote.store.storage import Storage

DATA = Path(__file__).parent/'data'

def put(folder, src, fn=None, **kw):
    "Write `src` to `folder`: the store and the report"
    rep = to_shards(src, folder, fn, **{'num_workers':1, 'progress':False, **kw})
    return ShardStore(folder),rep

def index(folder, to=None, **kw):
    rep = index_shards(folder, to, **{'num_workers':1, 'progress':False, **kw})
    return ShardStore(to or folder, cache=str(Path(str(folder)).parent/'cache')),rep

def values(store, f): return [store.decode(i, f, b) for i,b in enumerate(store.get_many(range(len(store)), f, check=True)[f])]
def names(folder): return sorted(str(p.relative_to(folder)) for p in Path(folder).rglob('*'))

def seen(folder):
    "All bytes of a folder, but for when and by whom the manifest was written"
    res = {n:(Path(folder)/n).read_bytes() for n in names(folder) if (Path(folder)/n).is_file()}
    m = json.loads(res.pop(next(n for n in res if n.endswith('manifest.json'))))
    return res | {'manifest':{k:v for k,v in m.items() if k not in ('uid','created','crc')}}

def members(path):
    with tarfile.open(path) as t: return [(m.name, m.offset_data, t.extractfile(m).read()) for m in t]

def sound(folder, maxsize=1e8, maxcount=100_000):
    "What holds of every folder that `to_shards` has written, file by file"
    s = ShardStore(folder)
    t,m,p = s.shards,s.manifest,Path(folder)
    want = {'manifest.json', *(['labels.json'] if m.vocab else []), *([m.failures] if m.failed else []), *(f for u in range(len(t)) for f in (t.name(u), s.index_file(u)))}
    assert set(names(folder))==want and int(t.starts[-1])==m.n==len(s)
    assert {x for ab in s.splits.values() for x in ab}<={*t.starts.tolist()}   # no shard holds two splits
    for u in range(len(t)):
        b,n = (p/t.name(u)).read_bytes(),int(t.n[u])
        assert len(b)==t.size[u]<=maxsize or n==1
        assert 1<=n<=maxcount and zlib.crc32(b)==t.crc[u] and (p/s.index_file(u)).stat().st_size==t.idx[u]
        ix,ms = ShardIndex.map(p/s.index_file(u)),members(p/t.name(u))
        ix.check('here')
        assert len({k for k,*_ in ms})==len(ms)==n*len([f for f in s.fields])
        keys = list(dict.fromkeys(k.split('.')[0] for k,*_ in ms))
        assert keys==sorted(keys) and len(keys)==n
        by = {(k.split('.')[0], k.split('.', 1)[1]):(at,len(v)) for k,at,v in ms}
        for f in s.fields:
            if m.fields[f]['dtype'] is None: assert [by[k,f] for k in keys]==list(zip(*(o.tolist() for o in ix.spans(f, np.arange(n)))))
    return s

# --- kinds of sources

def files_of(store, f): return sorted(store.get_many(range(len(store)), f, check=True)[f])

def test_image_folder(tmp_path, images):
    "Files as they are, byte for byte, with label and path"
    s,rep = put(tmp_path/'d', image_samples(images, label=class_of, path=True))
    sound(tmp_path/'d')
    assert (rep.written,rep.failed,s.vocab)==(N,0,list(CLASSES))
    assert all(s.get_many([i], 'jpg')['jpg'][0]==(images/(o:=s[i])['path']).read_bytes() and o['cls']==o['path'].split('/')[0] for i in range(N))

def test_list_and_frame(tmp_path):
    "A list of dicts, and the rows of a DataFrame"
    src = [{'txt':f'sample {i}', 'cls':'abc'[i%3], 'id':i, 'x.f4':i/8} for i in range(100)]
    for k,o in enumerate((src, pd.DataFrame(src, index=[7]*100))):
        s,_ = put(tmp_path/f'{k}', o)
        sound(tmp_path/f'{k}')
        assert sorted(values(s, 'id'))==list(range(100))!=values(s, 'id') and all(s[i]==src[s[i]['id']] for i in range(100))
    assert {n:b for n,b in seen(tmp_path/'0').items() if n!='manifest'}=={n:b for n,b in seen(tmp_path/'1').items() if n!='manifest'}

class Vision(torch.utils.data.Dataset):
    "As torchvision's: pictures and int labels, classes by name"
    classes = ['ant','bee','cow','dog','eel']
    def __len__(self): return 40
    def __getitem__(self, i): return Image.fromarray(np.full((5,6,3), i, np.uint8)),i%5

@pytest.mark.parametrize('num_workers', [1,2])
def test_torch_dataset(tmp_path, num_workers):
    "Pictures become PNGs; class names are the vocabulary, so labels are numbers in the tar"
    s,_ = put(tmp_path/'d', Vision(), num_workers=num_workers)
    sound(tmp_path/'d')
    assert s.vocab==Vision.classes and all(y==Vision.classes[np.asarray(x)[0,0,0]%5] for x,y in zip(values(s, 'png'), values(s, 'cls')))
    assert {n.split('.')[1]:b for n,_,b in members(tmp_path/'d'/'shard-000000.tar')}.keys()=={'png','cls'}

def test_fastai_datasets(tmp_path, images):
    "fastai's `Datasets` with its splits"
    files = sorted(images.glob('*/*.jpg'))
    s,_ = put(tmp_path/'d', Datasets(files, [[PILImage.create],[class_of, Categorize()]], splits=(range(0, N, 2),range(1, N, 2))), shuffle=False)
    sound(tmp_path/'d')
    assert s.splits=={'train':[0,30], 'valid':[30,60]} and values(s, 'cls')==[class_of(files[i]) for i in [*range(0, N, 2), *range(1, N, 2)]]
    assert np.array_equal(np.asarray(s[33]['jpg']), np.asarray(PILImage.create(files[7])))

def test_csv(tmp_path, images):
    "The images that a table names"
    files = sorted(images.glob('*/*.jpg'))
    (tmp_path/'t.csv').write_text('file,kind\n'+''.join(f'{p.relative_to(images)},{class_of(p)}\n' for p in files)+'gone.jpg,cat\n')
    s,rep = put(tmp_path/'d', csv_samples(tmp_path/'t.csv', 'file', 'kind', folder=images))
    sound(tmp_path/'d')
    assert s.get_many(range(N), 'jpg')['jpg']==[p.read_bytes() for p in files] and rep.failed==1 and 'gone.jpg' in repr(rep)

def test_tars_and_back(tmp_path):
    "`tar_samples` of our own shards gives the same shards"
    src = [{'txt':f't{i}', 'cls':'ab'[i%2], 'id':i, 'y.f4':i/4} for i in range(50)]
    put(tmp_path/'a', src, shuffle=False)
    s,_ = put(tmp_path/'b', tar_samples(tmp_path/'a'))
    sound(tmp_path/'b')
    assert [s[i] for i in range(50)]==src

def test_drawings(tmp_path):
    "Strokes of drawings"
    with (tmp_path/'cat.ndjson').open('w') as f:
        for i in range(30): print(json.dumps(dict(word='cat' if i%2 else 'dog', key_id=str(i), drawing=[[[0,i,255],[0,9,255]]])), file=f)
    s,_ = put(tmp_path/'d', drawing_samples(tmp_path/'cat.ndjson'))
    sound(tmp_path/'d')
    assert len(s)==30 and 'strokes' in s.fields and sorted(set(values(s, 'cls')))==['cat','dog']

@pytest.mark.parametrize('n', [0,1,5,1023,1024,1025,3000])
def test_stream(tmp_path, n):
    "A generator, of any length"
    def act(): return put(tmp_path/'d', ({'id':i, 'txt':f'{i}'} for i in range(n)))
    if not n:
        with pytest.raises(ValueError, match='d: the source is empty'): act()
        return
    s,_ = act()
    sound(tmp_path/'d')
    assert values(s, 'id')==list(range(n))

def test_stores(tmp_path, server):
    "From Redis, from memory, from shards: the same samples, labels and splits, numbers where the vocabulary is known"
    src = {'train':[{'txt':f't{i}', 'cls':'abc'[i%3], 'id':i, 'labels':['x','y'][:i%3]} for i in range(40)], 'valid':[{'txt':f'v{i}', 'cls':'b', 'id':-i, 'labels':[]} for i in range(1, 9)]}
    to_redis(src, server.url, 'of-shards', num_workers=1, progress=False, overwrite=True)
    r = RedisStore(server.url, 'of-shards')
    cols = r.get_many(range(48), r.fields)
    mem = MemoryStore(cols, 'm', vocab=r.manifest.vocab, splits=r.splits)
    put(tmp_path/'s', src)
    for k,o in enumerate((r, mem, ShardStore(tmp_path/'s'))):
        s,_ = put(tmp_path/f'{k}', o, shuffle=False)
        sound(tmp_path/f'{k}')
        assert [s[i] for i in range(48)]==[o[i] for i in range(48)] and s.splits==o.splits=={'train':[0,40], 'valid':[40,48]} and s.manifest.vocab==o.manifest.vocab
        assert {n for n,*_ in members(tmp_path/f'{k}'/'shard-train-000000.tar')}>={'000000000.cls'}
    RedisStore.delete(server.url, 'of-shards')

def test_splits_of_kinds(tmp_path):
    "Splits of a dict, sizes of a whole, streams; one of them may be empty"
    s,_ = put(tmp_path/'a', {'train':[{'id':i} for i in range(50)], 'none':[], 'valid':[{'id':i} for i in range(50, 57)]})
    assert s.splits=={'train':[0,50], 'none':[50,50], 'valid':[50,57]} and sorted(values(s, 'id')[50:])==list(range(50, 57))
    s,_ = put(tmp_path/'b', [{'id':i} for i in range(57)], splits={'train':None, 'valid':.2})
    assert s.splits=={'train':[0,46], 'valid':[46,57]} and sorted(values(s, 'id'))==list(range(57))
    s,_ = put(tmp_path/'c', {'train':({'id':i} for i in range(2500)), 'none':iter(()), 'valid':({'id':i} for i in range(2500, 2507))})
    assert s.splits=={'train':[0,2500], 'none':[2500,2500], 'valid':[2500,2507]} and values(s, 'id')==list(range(2507))
    for k in 'abc': sound(tmp_path/k)

def test_values(tmp_path):
    "Strings, numbers of every width, arrays, JSON and bytes come back the same, and lie in the tar as what they are"
    src = [{'title':f'Ünï {i}\n', 'x.f4':i/8, 'y.f8':i/7, 'z.u1':i, 'w.i2':-i, 'id':10**18+i, 'npy':np.arange(i), 'json':{'k':[i,None]}, 'bin':bytes(range(i)), 'm.npz':{'a':np.ones(i)}} for i in range(30)]
    s,rep = put(tmp_path/'d', src, shuffle=False)
    sound(tmp_path/'d')
    assert rep.failed==0
    for f in src[0]:
        for i,v in enumerate(values(s, f)):
            if f=='npy': assert np.array_equal(v, src[i][f]) and v.dtype==src[i][f].dtype
            elif f=='m.npz': assert np.array_equal(v['a'], src[i][f]['a'])
            else: assert v==src[i][f]
    got = {n:b for n,_,b in members(tmp_path/'d'/'shard-000000.tar')}
    assert got['000000003.title'].decode()=='Ünï 3\n' and got['000000003.w.i2.json']==b'-3' and got['000000003.bin']==b'\0\1\2' and json.loads(got['000000003.json'])=={'k':[3,None]}

# --- labels

LABELS = dict(names=([{'cls':c} for c in 'cabcab'],None), given=([{'cls':c} for c in 'cab?ca'],['c','b','a','z']), codes=([{'cls':i} for i in (3,0,7,7)],None),
    wide=([{'cls':i} for i in (-3,40_000,5)],None), named_codes=([{'cls':i} for i in (0,1,2,5)],['x','y','z']), big=([{'cls':i} for i in (0,1<<21)],None),
    several=([{'cls':'ab'[i%2], 'coarse.cls':i%4, 'fine.cls':f'f{i}'} for i in range(9)],{'fine.cls':[f'f{i}' for i in range(9)]}),
    labels=([{'id':0, 'labels':['b','ü']}, {'id':1, 'labels':[]}, {'id':2, 'labels':['a']}],None), labels_given=([{'labels':['b']}, {'labels':['q']}, {'labels':['a','b']}],{'labels':['b','a']}),
    unicode=([{'cls':c} for c in ('straße','日本','a b/c.d','x'*700,'')],None), numbers_as_text=([{'cls':c} for c in ('7','007','-1')],None))

@pytest.mark.parametrize('what', LABELS)
@pytest.mark.parametrize('num_workers', [1,2])
def test_labels_as_in_redis(tmp_path, server, what, num_workers):
    "Labels of all kinds: vocabulary, codes, counts, widths and failures are those that Redis has"
    src,vocab = LABELS[what]
    kw = dict(vocab=vocab, shuffle=False, chunk=2, overwrite=True, num_workers=num_workers)
    s,rep = put(tmp_path/'d', src, **kw)
    sound(tmp_path/'d')
    rep2 = to_redis(src, server.url, 'labels-of-shards', progress=False, **kw)
    r = RedisStore(server.url, 'labels-of-shards')
    assert (rep.written,rep.failed,rep.nbytes,sorted(rep.failures))==(rep2.written,rep2.failed,rep2.nbytes,sorted(rep2.failures))
    for k in ('n','vocab','counts','splits','nbytes','failed'): assert getattr(s.manifest, k)==getattr(r.manifest, k), k
    assert s.manifest.fields=={f:{k:v for k,v in d.items() if k!='check'} for f,d in r.manifest.fields.items()}   # a shard's index has a checksum of all of it
    assert sorted(repr(sorted(o.items())) for o in s)==sorted(repr(sorted(o.items())) for o in r) and list(s.failures())==list(r.failures())   # Redis fills gaps from the end

def test_stats_as_in_redis(tmp_path, images, server):
    "Statistics of the images"
    src = image_samples(images, label=class_of)
    s,_ = put(tmp_path/'d', src, chunk=16)
    to_redis(src, server.url, 'stats-of-shards', num_workers=1, progress=False, chunk=16, overwrite=True)
    r = RedisStore(server.url, 'stats-of-shards')
    assert s.manifest.stats==r.manifest.stats and s.class_counts()==r.class_counts() and s.stats==r.stats

def test_label_longer_than_a_block(tmp_path):
    "A label takes the room that it takes"
    src = [{'cls':f'{i%4}'*3000} for i in range(60)]
    put(tmp_path/'d', src, maxsize=20_000)
    sound(tmp_path/'d', 20_000)

# --- sizes

@examples(40)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=60), st.integers(3000, 30_000), st.integers(1, 20), st.sampled_from([None,1,7,64]), st.booleans(), st.integers(0, 60))
def test_limits(tmp_path_factory, sizes, maxsize, maxcount, chunk, stream, cut):
    "`maxsize` and `maxcount` hold, whatever the sizes, splits and chunks"
    d = tmp_path_factory.mktemp('limits')/'d'
    src = [{'bin':bytes(k), 'cls':i%3, 'id':i} for i,k in enumerate(sizes)]
    parts = {'a':src[:cut], 'b':src[cut:]}
    if stream: parts = {k:iter(v) for k,v in parts.items()}
    s,_ = put(d, parts, maxsize=maxsize, maxcount=maxcount, chunk=chunk, shuffle=False)
    sound(d, maxsize, maxcount)
    assert values(s, 'id')==list(range(len(sizes))) and [len(b) for b in s.get_many(range(len(s)), 'bin')['bin']]==sizes
    shutil.rmtree(d.parent)

@pytest.mark.parametrize('n,size,maxsize', [(1000,300,100_000),(1000,3000,500_000),(300,20_000,1_000_000),(2000,10,1e8)])
def test_alike(tmp_path, n, size, maxsize):
    "Shards are alike in size, and there are some"
    s,_ = put(tmp_path/'d', ({'bin':random.Random(i).randbytes(size)} for i in range(n)), maxsize=maxsize, chunk=min(n, 500))
    t = sound(tmp_path/'d', maxsize).shards
    for k in range(0, n, 500):
        sizes = [int(t.size[u]) for u in range(len(t)) if k<=t.starts[u]<k+500]
        assert min(sizes)>.7*max(sizes), sizes
    s,_ = put(tmp_path/'e', [{'bin':random.Random(i).randbytes(size)} for i in range(n)], maxsize=maxsize)
    t = sound(tmp_path/'e', maxsize).shards
    assert len(t)>=min(8, n//64) and t.size[:-1].min()>.7*t.size.max()

# --- samples that fail

@examples(60)
@given(st.lists(st.lists(st.booleans(), max_size=25), min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 9), st.booleans(), st.booleans())
def test_holes(tmp_path_factory, parts, chunk, maxcount, shuffle, stream):
    "Whatever fails, of a chunk, of a split: numbers are dense, splits right, failures named; a plain list says what is there"
    d = tmp_path_factory.mktemp('gaps')/'d'
    ok = [o for p in parts for o in p]
    def fn(i):
        if not ok[i]: raise ValueError(f'no {i}')
        return {'txt':f'sample {i}', 'id':i, 'cls':f'c{i%3}', 'labels':[f'l{i%2}']}
    at,src = 0,{}
    for k,p in enumerate(parts): src[f's{k}'] = list(range(at, at:=at+len(p)))
    args = {k:iter(v) for k,v in src.items()} if stream else src
    if not any(ok):
        with pytest.raises((IngestError,ValueError), match='none of the|is empty'): put(d, args, fn, chunk=chunk)
        assert not d.exists() or names(d)==[]
    else:
        s,rep = put(d, args, fn, chunk=chunk, shuffle=shuffle, maxcount=maxcount, max_failed=1.)
        sound(d, maxcount=maxcount)
        want = [[i for i in p if ok[i]] for p in src.values()]
        ids,e = values(s, 'id'),0
        for (k,(a,b)),w in zip(s.splits.items(), want, strict=True):
            assert a==e and (sorted(ids[a:b]) if shuffle else ids[a:b])==w
            e = b
        good = sum(want, [])
        assert len(ids)==len(good)==rep.written and s.vocab==sorted({f'c{i%3}' for i in good}) and s.manifest.vocab['labels']==sorted({f'l{i%2}' for i in good})
        assert all(s[j]=={'txt':f'sample {i}', 'id':i, 'cls':f'c{i%3}', 'labels':[f'l{i%2}']} for j,i in enumerate(ids))
        assert sorted(w for _,w in s.failures())==sorted(f'ValueError: no {i}' for i,o in enumerate(ok) if not o) and rep.failed==len(ok)-len(good)
        assert s.class_counts()=={c:sum(f'c{i%3}'==c for i in good) for c in s.vocab}
    shutil.rmtree(d.parent)

# --- the same again

def items(w, n=60): return [{'txt':f'{w} {i}', 'cls':f'{w}{i%3}', 'labels':[w], 'id':i} for i in range(n)]

def test_deterministic(tmp_path, images):
    "Another run, other workers: the same bytes of every file"
    def fn(o):
        if o['path'].endswith('7.jpg'): raise ValueError('not this one')
        return shrink(20)(o)
    def act(k, n): put(tmp_path/f'{k}'/'d', image_samples(images, label=lambda p: p.parent.name, path=True), fn, num_workers=n, chunk=8, maxsize=12_000, splits={'train':None, 'valid':.2})
    for k,n in enumerate((1,1,2,3)): act(k, n)
    a = seen(tmp_path/'0'/'d')
    assert len(a)>20 and all(seen(tmp_path/f'{k}'/'d')==a for k in (1,2,3))

def test_order(tmp_path):
    "`shuffle=False` keeps the order; the same seed makes the same, whatever the chunks; another one another"
    ids = [values(put(tmp_path/f'{k}', [{'id':i} for i in range(200)], **kw)[0], 'id') for k,kw in enumerate([dict(shuffle=False),{},{},dict(seed=1),dict(chunk=7)])]
    assert ids[0]==list(range(200)) and ids[1]==ids[2]==ids[4]!=ids[3] and all(sorted(o)==ids[0] for o in ids)

def test_second_run(tmp_path):
    "A dataset that is there is not written over unasked, and not touched"
    put(tmp_path/'d', items('a'))
    before = {n:(tmp_path/'d'/n).read_bytes() for n in names(tmp_path/'d')}
    with pytest.raises(StoreExists, match=r'd: a dataset is there already \(60 samples.*overwrite=True'): put(tmp_path/'d', items('b'))
    assert {n:(tmp_path/'d'/n).read_bytes() for n in names(tmp_path/'d')}==before

def test_overwrite(tmp_path):
    "A replacement takes the place of all there was; one that comes to nothing leaves the old as it was"
    put(tmp_path/'d', items('a', 300), chunk=16)
    before = {n:(tmp_path/'d'/n).read_bytes() for n in names(tmp_path/'d')}
    with pytest.raises(IngestError): put(tmp_path/'d', [{'txt':3}]*20, overwrite=True)
    with pytest.raises(IngestError): put(tmp_path/'d', list(range(20)), lambda i: 1//0, overwrite=True)
    def fn(i):
        if i==60: raise KeyboardInterrupt
        return {'txt':'new'}
    with pytest.raises(KeyboardInterrupt): put(tmp_path/'d', list(range(100)), fn, overwrite=True, shuffle=False, chunk=8)
    assert len(values(ShardStore(tmp_path/'d'), 'txt'))==300
    ShardStore.abandon(tmp_path/'d')
    assert {n:(tmp_path/'d'/n).read_bytes() for n in names(tmp_path/'d')}==before
    for k,w in enumerate('bcd', 2):
        s,_ = put(tmp_path/'d', items(w, 50+k), overwrite=True)
        sound(tmp_path/'d')
        assert (s.manifest.generation,{o.split()[0] for o in values(s, 'txt')},s.shards.name(0))==(k,{w},f'shard{k}-000000.tar')

def stops_at_60(i):
    if i==60: raise KeyboardInterrupt
    return {'txt':f'{i}'}

def interrupted(folder, **kw):
    "An ingest of 100 samples, in chunks of 8, that is interrupted at sample 60"
    with pytest.raises(KeyboardInterrupt): put(folder, list(range(100)), stops_at_60, shuffle=False, chunk=8, **kw)

@pytest.mark.parametrize('act', [ShardStore.abandon,ShardStore.delete])
def test_an_ingest_that_ends_while_it_is_abandoned_keeps_its_dataset(tmp_path, act, monkeypatch):
    "What is to be removed is read when nobody else can write any more; a dataset is deleted whole"
    d,original = tmp_path/'d',shard_writer.ShardWriter.take_lock
    interrupted(d)
    def commit_first(self):
        monkeypatch.setattr(shard_writer.ShardWriter, 'take_lock', original)
        ShardStore.abandon(d)
        put(d, items('a'))
        original(self)
    monkeypatch.setattr(shard_writer.ShardWriter, 'take_lock', commit_first)
    if act==ShardStore.abandon:
        with pytest.raises(StoreNotFound, match='no unfinished ingest'): act(d)
        sound(d)
    else:
        act(d)
        assert not d.exists()

@pytest.mark.parametrize('plan', ['{"n": 4', '', '{"generation": 1, "prefix": "shard2", '])
@pytest.mark.parametrize('old', [False,True])
def test_shards_of_a_damaged_plan_stay_whole(tmp_path, plan, old):
    "`abandon` warns of them, and they keep the indices by which they are known as ours; a dataset stays as it is"
    d = tmp_path/'d'
    if old: put(d, items('a'))
    interrupted(d, overwrite=old)
    before = names(d)
    (d/'.ingest/plan.json').write_text(plan)
    with pytest.warns(UserWarning, match='these stay: shard'): ShardStore.abandon(d)
    assert names(d)==[name for name in before if not name.startswith('.ingest')]
    if old: assert len(ShardStore(d))==60

def test_indices_of_a_damaged_plan_are_removed(tmp_path):
    "Those of tars of others, which are in a folder of their own"
    d = tmp_path/'d'
    d.mkdir()
    for k in range(3): tar(d/f'shard-{k:06}.tar', [(f'{k}-{i}.txt', f'{k} {i}'.encode()) for i in range(5)])
    before = names(d)
    def stop(self, *a, **kw): raise KeyboardInterrupt
    with pytest.MonkeyPatch.context() as m:
        m.setattr(shard_writer.ShardWriter, 'commit', stop)
        with pytest.raises(KeyboardInterrupt): index(d)
    (d/'.fastai_remote/.ingest/plan.json').write_text('{"n": 4')
    ShardStore.abandon(d)
    assert names(d)==before

def test_a_lock_that_is_taken_again_is_renewed(tmp_path, monkeypatch):
    "Also if it was lost the first time"
    monkeypatch.setattr(folder_lock, 'LEASE_SECONDS', .3)
    lock = FolderLock(Storage(tmp_path))
    lock.take()
    other = seal_json(dict(host='x', pid=1, id='other', time=0.))
    with lock.exclusive(): lock.storage.write(folder_lock.LOCK_FILE, other)
    wait_for(lambda: lock.lost, 20)
    lock.close()
    for _ in range(2):
        lock.take()
        wait_for(lambda: (lock.holder() or {}).get('beat', 0)>2, 20)
        lock.check()
        lock.close()
        assert lock.holder() is None

@pytest.mark.parametrize('error', [KeyboardInterrupt,StoreUnavailable])
def test_a_lock_that_could_not_be_taken_excludes_nobody(tmp_path, error, monkeypatch):
    "Also if the error came after its file was written"
    d = tmp_path/'d'
    original = FolderLock._is_holder
    def fail(self):
        monkeypatch.setattr(FolderLock, '_is_holder', original)
        raise error('no answer')
    monkeypatch.setattr(FolderLock, '_is_holder', fail)
    with pytest.raises(error): put(d, items('a'))
    assert not (d/'.ingest').exists()
    put(d, items('a'))
    sound(d)

@pytest.mark.parametrize('delete', [False,True])
def test_overwrite_under_readers(tmp_path, delete):
    "Who reads while a dataset is replaced, or deleted and written anew, gets the old one or the new one or a clear error, and never some of both"
    def src(w, n): return [{'txt':f'{w} {i}', 'cls':f'{w}{i%3}', 'w.i4':ord(w)} for i in range(n)]
    def write(w, n):
        if delete and (tmp_path/'d').exists(): ShardStore.delete(tmp_path/'d')
        put(tmp_path/'d', src(w, n), overwrite=not delete, chunk=32)
    write('a', 500)
    stop,got,errs = threading.Event(),set(),[]
    def read(held):
        rng = random.Random(0)
        while not stop.is_set():
            try:
                s = ShardStore(tmp_path/'d') if held is None else held
                if rng.random()<.1: s._process_state = None   # as one that has had more of its shards open since
                i = rng.sample(range(len(s)), 20)
                d = s.get_many(i, ['txt','cls','w.i4'], check=True)
                ws = {b.decode()[0] for b in d['txt']} | {s.vocab[c][0] for c in d['cls']} | {chr(w) for w in d['w.i4']}
                if len(ws)!=1: errs.append(ws)
                got.add((held is not None, *ws))
            except StoreNotFound as e:
                if not re.search('replaced|no dataset here', str(e)): errs.append(e)
                got.add('error')
            except Exception as e: errs.append(e)
    ts = [threading.Thread(target=read, args=(h,), daemon=True) for h in (None,ShardStore(tmp_path/'d'))]
    for t in ts: t.start()
    def wait(o): wait_for(lambda: o in got or errs)
    wait((True,'a'))
    for w,n in (('b',500),('c',700),('d',500)): write(w, n); wait((False,w))
    wait('error')
    stop.set()
    for t in ts: t.join()
    assert not errs, errs[:3]
    assert {(True,'a'),(False,'d'),'error'}<=got and {o for o in got if o[0] is True}=={(True,'a')}
    sound(tmp_path/'d')

def test_held_store_goes_on(tmp_path):
    "A reader that has the shards open reads on after they are gone"
    old,_ = put(tmp_path/'d', items('a', 200), chunk=64)
    want = [old[i] for i in range(200)]
    put(tmp_path/'d', items('b', 300), overwrite=True)
    assert [old[i] for i in range(200)]==want
    with pytest.raises(StoreNotFound, match='d: replaced since it was opened'): pickle.loads(pickle.dumps(old))[0]
    ShardStore.delete(tmp_path/'d')
    assert [old[i] for i in range(200)]==want

@pytest.mark.parametrize('what', ['abandon','delete','overwrite'])
def test_left_by_a_finished_ingest(tmp_path, what):
    "An ingest that died when all was visible has left its plan and records: they are no unfinished ingest, and nothing of the dataset goes with them"
    put(tmp_path/'d', items('a'), chunk=16)
    (tmp_path/'d/.ingest').mkdir()
    (tmp_path/'d/.ingest/plan.json').write_text(json.dumps(dict(signature='s', n=60, chunk=16, fields={}, splits=None, vocab={}, generation=1, prefix='shard')))
    (tmp_path/'d/.ingest/chunk-000003.json').write_text('{}')
    if what=='delete': ShardStore.delete(tmp_path/'d'); assert names(tmp_path/'d')==[]; return
    if what=='abandon':
        with pytest.raises(StoreNotFound, match='no unfinished ingest'): ShardStore.abandon(tmp_path/'d')
    else:
        def fn(o):
            if o['id']==45: raise KeyboardInterrupt
            return o
        for w in 'bc':
            with pytest.raises(KeyboardInterrupt): put(tmp_path/'d', items(w), fn, overwrite=True, shuffle=False, chunk=8)
    assert sorted(values(ShardStore(tmp_path/'d'), 'id'))==list(range(60))
    put(tmp_path/'d', items('d'), overwrite=True)
    sound(tmp_path/'d')

# --- whoever else writes

def lock(d, **kw):
    (Path(d)/'.ingest').mkdir(parents=True, exist_ok=True)
    (Path(d)/'.ingest/lock.json').write_text(json.dumps(dict(host=host_id(), pid=os.getppid(), id='x', time=time.time()) | kw))   # of another process, which lives

def dead():
    p = subprocess.Popen(['true'])
    p.wait()
    return p.pid

def test_locks(tmp_path):
    "A lock of a process that lives, or of another machine within its lease, is kept; one of the dead, or run out, or torn, is not"
    for kw in ({}, dict(host='elsewhere')):
        lock(tmp_path/'d', **kw)
        with pytest.raises(StoreBusy, match=rf'd: process {os.getppid()} on .* is writing here now'): put(tmp_path/'d', items('a'))
        with pytest.raises((StoreBusy,StoreNotFound)): ShardStore.delete(tmp_path/'d')
    for k,kw in enumerate((dict(pid=dead()), dict(host='elsewhere', time=time.time()-40), dict(time=time.time()-40))):   # the last: its number is another's now
        lock(tmp_path/f'{k}', **kw)
        put(tmp_path/f'{k}', items('a'))
        sound(tmp_path/f'{k}')
    lock(tmp_path/'e')
    (tmp_path/'e/.ingest/lock.json').write_text('{"host":')
    put(tmp_path/'e', items('a'))
    sound(tmp_path/'e')

def test_a_lock_that_its_process_released_and_could_not_remove_ends_with_its_lease(tmp_path, monkeypatch):
    "The process lives on; while it renews the lock, it is at work"
    monkeypatch.setattr(folder_lock, 'LEASE_SECONDS', .6)
    mine = FolderLock(Storage(tmp_path/'d'))
    lock(tmp_path/'d', beat=1, start=process_state(os.getppid())[0], time=time.time()-1)
    mine.take()
    mine.close()
    lock(tmp_path/'d', beat=1, start=process_state(os.getppid())[0], time=time.time()+60)   # before the clock was set
    assert not mine.is_running(mine.holder())
    other = FolderLock(mine.storage)
    other.take()
    monkeypatch.setattr(folder_lock, '_held_locks', set())
    monkeypatch.setattr(folder_lock, 'host_id', lambda: 'elsewhere')
    with pytest.raises(StoreBusy, match='is writing here now'): mine.take()
    other.close()

def test_a_process_forked_while_a_file_is_published_does_not_keep_the_folder_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, 'LEASE_SECONDS', .2)
    mine = FolderLock(Storage(tmp_path))
    read,write = os.pipe()
    with mine.exclusive(create=True) as is_exclusive:
        child = os.fork()
        if not child:
            os.close(write)
            os.read(read, 1)   # until the parent has tried
            os._exit(0)
    try:
        with mine.exclusive() as is_exclusive: assert is_exclusive
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)

def test_two_at_once(tmp_path):
    "Of two that come at the same moment one writes, and the other is told"
    code = f"from fastai_remote import to_shards\nto_shards([{{'id':i}} for i in range(3000)], {str(tmp_path/'d')!r}, lambda o: __import__('time').sleep(.0005) or o, num_workers=1, progress=False)"
    ps = [subprocess.Popen([sys.executable, '-c', code], stderr=subprocess.PIPE, text=True) for _ in range(3)]
    errs = [p.communicate()[1] for p in ps]
    assert sorted(p.returncode for p in ps)==[0,1,1] and sum('StoreBusy' in e or 'StoreExists' in e for e in errs)==2, errs
    assert sorted(values(sound(tmp_path/'d'), 'id'))==list(range(3000))

def test_lost_lock(tmp_path, monkeypatch):
    "A process that slept while another took over stops, and writes nothing into what the other has"
    lost = SimpleNamespace(at=34)   # only its type belongs to the fingerprint of fn
    def fn(o):
        if o['id']==lost.at: lock(tmp_path/'d', id='other')
        return o
    with pytest.raises(StoreBusy, match='the lock was lost'): put(tmp_path/'d', items('a'), fn, shuffle=False, chunk=16)
    with pytest.raises(StoreNotFound): ShardStore(tmp_path/'d')
    assert 'shard-000002.tar' not in names(tmp_path/'d')
    lock(tmp_path/'d', pid=dead())
    monkeypatch.setattr(lost, 'at', -1)
    assert put(tmp_path/'d', items('a'), fn, shuffle=False, chunk=16)[1].resumed==32
    sound(tmp_path/'d')

# --- places

def test_foreign_tars_are_not_touched(tmp_path):
    "A folder with tars that others wrote is no place to write to, whatever their names"
    d = tmp_path/'d'
    d.mkdir()
    tar(d/'shard-000000.tar', [('a.txt', b'a')])
    with pytest.raises(StoreExists, match='shard-000000.tar is there, and no manifest: shards that others wrote'): put(d, items('a'))
    index(d)
    before = {p:p.read_bytes() for p in d.rglob('*') if p.is_file()}
    with pytest.raises(StoreExists, match='shards that others wrote are indexed here; choose another folder'): put(d, items('a'), overwrite=True)
    assert {p:p.read_bytes() for p in d.rglob('*') if p.is_file()}==before
    ShardStore.delete(d)
    assert names(d)==['shard-000000.tar']
    e = tmp_path/'e'
    e.mkdir()
    (e/'notes.txt').write_text('mine')
    tar(e/'train.tar', [('a.txt', b'a')])
    put(e, items('a'))
    put(e, items('b'), overwrite=True)
    ShardStore.delete(e)
    assert names(e)==['notes.txt','train.tar']

@pytest.mark.parametrize('name', ['with space','ünï-日本','dots.in.name','a/b/c','[1] (x) {a,b}?*/in'])
def test_names_of_folders(tmp_path, name):
    "Folders of all names, those in them too; also as a `Path`, with a slash at the end, as a file URL"
    s,_ = put(str(tmp_path/name)+'/', items('a', 150), chunk=16, num_workers=2)
    sound(tmp_path/name)
    for o in (tmp_path/name, str(tmp_path/name)+'/', Storage(tmp_path/name), *([f'file://{tmp_path/name}'] if '?' not in name else [])): assert sorted(values(ShardStore(o), 'id'))==list(range(150))

@pytest.mark.parametrize('url,name', [('/data/a?b','a?b'), ('/data/a#b/','a#b'), ('a?b','a?b'), ('/x?y/a','a'),
    ('file:///data/a?b','a?b'), ('s3://bucket/a?b','a?b'), ('memory://a#b','a#b'), ('https://host/d/a?signature=x','a'),
    ('https://host/a/?x=b/c#d','a'), ('simplecache::https://host/a?x=b','a')])
def test_the_name_of_a_dataset_is_that_of_its_folder(url, name):
    "A question mark is a letter, except in URLs of the web"
    assert Storage(url).name==name

def test_a_folder_whose_name_no_dataset_may_have_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'a\?b' cannot name a dataset"): put(tmp_path/'a?b', items('a'))
    tar(tmp_path/'0.tar', [('0.txt', b'a')])
    (tmp_path/'c?d').mkdir()
    shutil.move(tmp_path/'0.tar', tmp_path/'c?d/0.tar')
    with pytest.raises(ValueError, match=r"'c\?d' cannot name a dataset"): index(tmp_path/'c?d')

def test_relative_and_home(tmp_path, monkeypatch):
    "A relative path is that of the caller, in workers with another working directory too; `~` is home"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HOME', str(tmp_path/'home'))
    leader = os.getpid()
    def fn(o):
        if os.getpid()!=leader: os.chdir('/')
        return o
    s,_ = put('rel/d', items('a'), fn, num_workers=2, chunk=8)
    sound(tmp_path/'rel/d')
    s,_ = put('~/d', items('a'))
    sound(tmp_path/'home/d')
    s = ShardStore('rel/d')
    os.chdir('/')
    assert len(values(s, 'id'))==len(values(ShardStore(tmp_path/'home/d'), 'id'))==60

@pytest.fixture
def mount(tmp_path):
    "Mounts a small tmpfs, or part of a folder read-only"
    done = []
    def go(d, *args):
        d.mkdir(exist_ok=True)
        if subprocess.run(['mount', *args, str(d)], capture_output=True).returncode: pytest.skip('may not mount')
        done.append(d)
        return d
    yield go
    for d in reversed(done): subprocess.run(['umount', '-l', str(d)])

@pytest.mark.parametrize('num_workers', [1,2])
def test_full_disk(tmp_path, mount, num_workers):
    "No room: told beforehand where that can be known, StoreFull if it happens; nothing is visible, and with more room the same call goes on"
    d = mount(tmp_path/'small', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs')
    def src(big): return [{'bin':random.Random(i).randbytes(20_000 if i>=big else 20), 'cls':f'c{i%3}'} for i in range(100)]
    with pytest.raises(StoreFull, match=r'd: 100 samples take about .* repeat the same call to go on, or ShardStore.abandon'): put(d/'d', src(0), chunk=10, num_workers=num_workers)
    ShardStore.abandon(d/'d')
    def act(): return put(d/'d', src(30), shuffle=False, chunk=10, num_workers=num_workers)
    with pytest.raises(StoreFull, match='d: .*No space left on device.*Nothing of it is visible; make room and repeat'): act()
    with pytest.raises(StoreNotFound): ShardStore(d/'d')
    assert not [n for n in names(d) if n.endswith('.part')]
    subprocess.run(['mount', '-o', 'remount,size=9m', str(d)], check=True)
    s,rep = act()
    assert rep.resumed>=30 and rep.written==100
    sound(d/'d')
    put(tmp_path/'plain'/'d', src(30), shuffle=False, chunk=10)
    assert seen(tmp_path/'plain'/'d')==seen(d/'d')

def test_read_only(tmp_path, mount):
    "A folder that cannot be written to says so; one can read there, and index into another"
    d = tmp_path/'ro'
    d.mkdir()
    tar(d/'a.tar', [(f'{i}.txt', b'%d' % i) for i in range(9)])
    mount(d, '--bind', str(d))
    subprocess.run(['mount', '-o', 'remount,bind,ro', str(d)], check=True)
    with pytest.raises(StoreUnavailable, match='ro.*[Rr]ead-only'): put(d/'d', items('a'))
    with pytest.raises(StoreUnavailable, match='ro.*[Rr]ead-only'): index(d)
    index_shards(d, tmp_path/'beside', num_workers=1, progress=False)
    s = ShardStore(tmp_path/'beside', shards_url=d)
    assert values(s, 'txt')==[f'{i}' for i in range(9)] and names(tmp_path/'beside')==['a.tar.fastai_remote','manifest.json']
    assert values(ShardStore(tmp_path/'beside', shards_url=d), 'txt')==[f'{i}' for i in range(9)]

# --- others read ours

def test_tar_reads_ours(tmp_path):
    "The system's tar lists and extracts what is there"
    s,_ = put(tmp_path/'d', items('a', 30), chunk=16, shuffle=False)
    if not shutil.which('tar'): pytest.skip('no tar')
    out = subprocess.run(['tar','tf',str(tmp_path/'d/shard-000001.tar')], capture_output=True, text=True, check=True)
    assert out.stderr=='' and out.stdout.split()[:4]==['000000016.txt','000000016.cls.txt','000000016.labels','000000016.id']
    (tmp_path/'x').mkdir()
    for u in range(2): subprocess.run(['tar','xf',str(tmp_path/f'd/shard-{u:06}.tar'),'-C',str(tmp_path/'x')], check=True)
    assert [(tmp_path/f'x/{i:09}.txt').read_text() for i in range(30)]==values(s, 'txt') and [(tmp_path/f'x/{i:09}.cls.txt').read_text() for i in range(30)]==values(s, 'cls')

@pytest.mark.parametrize('vocab', [None,['cat','bird','dog']])
def test_webdataset_reads_ours(tmp_path, images, vocab):
    "WebDataset gives the same pictures; labels are numbers where the vocabulary was known, and text otherwise; shards have names for its braces"
    wds = pytest.importorskip('webdataset')
    s,_ = put(tmp_path/'d', image_samples(images, label=class_of), vocab=vocab, chunk=8)
    t = s.shards
    urls = f"{tmp_path/'d'}/shard-{{000000..{len(t)-1:06}}}.tar"
    assert [t.name(u) for u in range(len(t))]==[f'shard-{u:06}.tar' for u in range(len(t))]
    got = list(wds.WebDataset(urls, shardshuffle=False).decode('pil').to_tuple('jpg', 'cls' if vocab else 'cls.txt', '__key__'))
    assert len(got)==N
    for i,(im,y,k) in enumerate(got):
        assert np.array_equal(np.asarray(im), np.asarray(s[i]['jpg'].convert('RGB'))) and (vocab[y] if vocab else y)==s[i]['cls'] and k==f'{i:09}'

# --- we read theirs

def tar(path, ms, mode='w', **kw):
    "A tar of `(name, bytes)`"
    with tarfile.open(path, mode, **kw) as t:
        for n,b in ms:
            m = tarfile.TarInfo(n); m.size = len(b)
            t.addfile(m, io.BytesIO(b))
    return path

def test_of_webdataset(tmp_path, images):
    "Tars of WebDataset's own writers: ints, JSON, arrays, text, unknown extensions"
    wds = pytest.importorskip('webdataset')
    files = sorted(images.glob('*/*.jpg'))
    (tmp_path/'w').mkdir()
    def sample(i): return {'__key__':f'dir/s{i:03}', 'jpg':files[i].read_bytes(), 'cls':i%3, 'json':{'i':[i]}, 'npy':np.arange(i), 'txt':f'text {i}', 'score.f4':str(i/8).encode(), 'left.seg.xyz':bytes([i])*i}
    with wds.ShardWriter(f"{tmp_path/'w'}/part-%03d.tar", maxcount=25, verbose=0) as w:
        for i in range(N): w.write(sample(i))
    s,rep = index(tmp_path/'w')
    assert (rep.written,rep.failed,len(s.shards),s.vocab)==(N,0,3,[0,1,2])
    for i in range(N):
        o = s[i]
        assert s.get_many([i], 'jpg')['jpg'][0]==files[i].read_bytes() and (o['cls'],o['json'],o['txt'],o['score.f4'],o['left.seg.xyz'])==(i%3,{'i':[i]},f'text {i}',i/8,bytes([i])*i) and np.array_equal(o['npy'], np.arange(i))

@pytest.mark.parametrize('fmt', ['ustar','gnu','pax'])
def test_names_of_members(tmp_path, fmt):
    "Long names, folders, dots in folders, extensions in capitals, in every format; and offsets that are right"
    fmt = dict(ustar=tarfile.USTAR_FORMAT, gnu=tarfile.GNU_FORMAT, pax=tarfile.PAX_FORMAT)[fmt]
    long = 'd'*60 if fmt==tarfile.USTAR_FORMAT else 'd'*300
    keys = ['a','v1.0/b','./c',f'{long}/{"e"*80}','ü 日/x y','deep/er/1']
    (tmp_path/'w').mkdir()
    tar(tmp_path/'w/a.tar', [(f'{k}{e}', f'{k}{e}'.encode()) for k in keys for e in ('.TXT','.Left.Bin')], format=fmt)
    s,rep = index(tmp_path/'w')
    assert (rep.failed,s.fields)==(0,['txt','left.bin']) and values(s, 'txt')==[f'{k}.TXT' for k in keys] and values(s, 'left.bin')==[f'{k}.Left.Bin'.encode() for k in keys]

def test_missing_fields(tmp_path):
    "A sample may lack any field, and says so when that is read; the report tells how many do"
    (tmp_path/'w').mkdir()
    tar(tmp_path/'w/a.tar', [('0.txt', b'a'),('0.cls', b'0'),('1.cls', b'1'),('2.txt', b'c'),('3.cls', b'2'),('3.txt', b'd'),('3.extra.json', b'{}'),('4.txt', b'e'),('4.cls', b'no')])
    s,rep = index(tmp_path/'w')
    assert (rep.written,rep.failed,s.vocab,s.get_many([0,1,3,4], 'cls')['cls'].tolist())==(5,0,['0','1','2','no'],[0,1,2,3])
    with pytest.raises(MissingSample, match="w: .*1 .*field 'txt'.*a.tar"): s.get_many([0,1], 'txt')
    with pytest.raises(MissingSample, match="w: .*1 .*field 'cls'.*a.tar"): s.get_many([0,2], 'cls')
    assert s.get_many([0], 'txt')['txt']==[b'a'] and s.field_counts=={'txt':4, 'cls':4, 'extra.json':1}
    assert {"1 of 5 samples have no 'txt'", "4 of 5 samples have no 'extra.json'"}<=rep.notes.keys()

@pytest.mark.parametrize('bad', [b'--5','²'.encode(),b'\xff\xfe',b'99999999999999999999',b''])
@pytest.mark.parametrize('first', [True,False])
def test_odd_labels(tmp_path, bad, first):
    "A label that is no number where the others are is left out and named, or makes text of all; the field is there in any case"
    (tmp_path/'w').mkdir()
    ys = [b'%d' % (i%3) for i in range(12)]
    ys[0 if first else 11] = bad
    tar(tmp_path/'w/a.tar', [o for i,y in enumerate(ys) for o in ((f'{i:02}.cls', y),(f'{i:02}.txt', b'%d' % i))])
    s,rep = index(tmp_path/'w')
    assert {'txt','cls'}==set(s.fields) and rep.written>=11
    for i in range(len(s)):
        if (k:=int(s[i]['txt']))!=(0 if first else 11): assert str(s[i]['cls'])==str(k%3)

@pytest.mark.parametrize('bad', [b'{',b'5',b'\xff',b'"abc"'])
def test_odd_lists_of_labels(tmp_path, bad):
    "Labels that are no list are left out and named"
    (tmp_path/'w').mkdir()
    tar(tmp_path/'w/a.tar', [('0.labels', b'["a"]'),('1.labels', bad),('2.labels', b'["b","c"]')])
    s,rep = index(tmp_path/'w')
    assert (rep.written,rep.failed,s.manifest.vocab['labels'],[s[i]['labels'] for i in range(2)])==(2,1,['a','b','c'],[['a'],['b','c']])

def test_odd_members(tmp_path):
    "Links, devices and sparse files are no bytes at a place: their samples are left out and named; folders are nothing"
    (tmp_path/'w').mkdir()
    with tarfile.open(tmp_path/'w/a.tar', 'w') as t:
        def add(n, b=b'', **kw):
            m = tarfile.TarInfo(n); m.size = len(b)
            for k,v in kw.items(): setattr(m, k, v)
            t.addfile(m, io.BytesIO(b))
        add('x', type=tarfile.DIRTYPE)
        for i in range(6):
            add(f'x/{i}.txt', b'%d' % i)
            if i==1: add('x/1.bin', type=tarfile.LNKTYPE, linkname='x/0.bin')
            elif i==2: add('x/2.bin', type=tarfile.SYMTYPE, linkname='0.bin')
            elif i==3: add('x/3.bin', type=tarfile.FIFOTYPE)
            else: add(f'x/{i}.bin', bytes([i])*100)
    s,rep = index(tmp_path/'w')
    assert values(s, 'txt')==['0','4','5'] and [n for n,_ in s.failures()]==[f'a.tar: x/{i}' for i in (1,2,3)] and 'link' in rep.failures[0][1]

def test_sparse(tmp_path):
    "A sparse file in GNU's ways to write one"
    if not shutil.which('tar'): pytest.skip('no tar')
    (tmp_path/'w').mkdir()
    with (tmp_path/'1.bin').open('wb') as f: f.seek(1<<20); f.write(b'end')
    (tmp_path/'0.bin').write_bytes(b'zero')
    (tmp_path/'2.bin').write_bytes(b'two')
    for k,args in enumerate((['--format=gnu'],['--format=pax','--sparse-version=0.1'],['--format=pax','--sparse-version=1.0'])):
        subprocess.run(['tar','cf',str(tmp_path/f'w/{k}.tar'),'--sparse',*args,'0.bin','1.bin','2.bin'], cwd=tmp_path, check=True)
    s,rep = index(tmp_path/'w')
    got = [bytes(o) for o in s.get_many(range(len(s)), 'bin')['bin']]
    assert got==[b'zero',b'two']*3 and rep.failed==3

@pytest.fixture(scope='module')
def partial(tmp_path_factory):
    "Four tars of ten samples, of which those of the first two have notes; two texts and a label were changed since"
    folder = tmp_path_factory.mktemp('partial')/'d'
    folder.mkdir()
    for shard in range(4):
        numbers = range(10*shard, 10*shard+10)
        members = [(i, 'txt', f'text {i}') for i in numbers]+[(i, 'cls', str(i%3)) for i in numbers]
        if shard<2: members += [(i, 'note.txt', f'note {i}') for i in numbers]
        tar(folder/f'{shard}.tar', [(f'{i:03}.{ext}', text.encode()) for i,ext,text in sorted(members)])
    index(folder)
    ShardStore(folder).edit(set={'txt':{5:'changed', 31:'changed too'}, 'cls':{12:0}})
    memory = fsspec.filesystem('memory')
    memory.put(str(folder), f'/{folder.parent.name}', recursive=True)
    yield SimpleNamespace(local=str(folder), remote=f'memory://{folder.parent.name}')
    memory.rm(f'/{folder.parent.name}', recursive=True)

FIELDS = ['txt','cls','note.txt?','note.txt;txt']
READS = {
    'values': lambda store, numbers: {f:list(o) for f,o in store.get_many(numbers, FIELDS).items()},
    'numbers': lambda store, numbers: store.get_many(numbers, 'cls')['cls'].tolist(),
    'keys': lambda store, numbers: store.keys(numbers),
    'sample': lambda store, numbers: store[numbers[0]],
    'presence': lambda store, numbers: np.concatenate(list(store.presence('note.txt'))).tolist(),
    'having': lambda store, numbers: list(get_remote_items(store, having='note.txt')),
    'where': lambda store, numbers: list(get_remote_items(store).where('cls', store.vocab[:1])),
    'prefetch': lambda store, numbers: store.prefetch(np.unique(np.array(numbers)//10).tolist()),
    'epoch': lambda store, numbers: store.new_epoch()}
some_numbers = st.lists(st.integers(0, 39), min_size=1, max_size=5)

some_reads = st.lists(st.tuples(st.sampled_from(sorted(READS)), some_numbers), min_size=1, max_size=4)

@given(kind=st.sampled_from(['local','remote','cached']), reads=some_reads)
@examples(60)
@example(kind='local', reads=[('sample', [35]), ('having', [0])])
@example(kind='remote', reads=[('values', [35, 12]), ('presence', [0]), ('values', [35, 5, 12, 0])])
@example(kind='cached', reads=[('values', [35]), ('epoch', [0]), ('presence', [0])])
def test_what_is_read_does_not_depend_on_what_was_read_before(partial, tmp_path_factory, kind, reads):
    "An index is in memory, in the cache or on the server; results come in the order of the samples all the same"
    folder = partial.local if kind=='local' else partial.remote
    cache = str(tmp_path_factory.mktemp('cache')) if kind=='cached' else None
    store = ShardStore(folder, cache=cache)
    for name,numbers in reads:
        assert READS[name](store, numbers)==READS[name](ShardStore(folder, cache=None), numbers), name
    assert list(get_remote_items(store, having='note.txt'))==list(range(20))

def test_a_missing_index_is_named_and_not_its_shard(partial, tmp_path):
    folder = tmp_path/'d'
    shutil.copytree(partial.local, folder)
    memory = fsspec.filesystem('memory')
    name = ShardStore(folder).index_file(2)
    (folder/name).unlink()
    memory.put(str(folder), f'/{tmp_path.name}', recursive=True)
    for url in (folder, f'memory://{tmp_path.name}'):
        message = rf'{re.escape(name)}, the index of shard 2.tar.*samples 20 to 29.*is not there'
        with pytest.raises(MissingSample, match=message): ShardStore(url, cache=None).get_many([25], 'txt')
    memory.rm(f'/{tmp_path.name}', recursive=True)
    (folder/'1.tar').unlink()
    with pytest.raises(MissingSample, match='shard 1.tar is not there, with samples 10 to 19'):
        ShardStore(folder, cache=None).get_many([12], 'txt')

@pytest.mark.parametrize('call', [
    lambda s: s.in_place(0), lambda s: s.index_file(0), lambda s: s.check_cache(1, 1), lambda s: s.keys([0]),
    lambda s: s.indices([0])[0].n, lambda s: s.local_index(0).n, lambda s: s.manifest_crc, lambda s: s.tars.url,
    lambda s: len(s.table), lambda s: str(s.missing_shard_error(0)), lambda s: s.cache_key('a'),
    lambda s: s.location(0, 'txt'), lambda s: s.cache is None, lambda s: s.whole_shards.get(0) is None,
    lambda s: s.check_not_replaced(), lambda s: len(s.manifest_bytes()), lambda s: len(list(s.failures()))])
def test_an_unpickled_store_is_complete(partial, call):
    store = ShardStore(partial.local, cache=None)
    assert call(pickle.loads(pickle.dumps(store)))==call(store)

def test_shuffle_quality_where_only_some_samples_have_labels(tmp_path):
    for shard in range(2):
        numbers = range(20*shard, 20*shard+20)
        members = [(f'{i:03}.{ext}', b'%d' % (i%3)) for i in numbers for ext in ('cls','txt') if ext=='txt' or i%4]
        tar(tmp_path/f'{shard}.tar', members)
    store,_ = index(tmp_path)
    assert store.may_lack('cls')
    for options in {}, {'field':'cls'}, {'field':'cls?'}:
        assert .5<store.shuffle_quality(bs=4, interleave=None, **options).labels<2

def test_twice_in_a_sample(tmp_path):
    "A name that is there twice makes a failed sample, which names both places; WebDataset raises an error, too"
    (tmp_path/'w').mkdir()
    tar(tmp_path/'w/a.tar', [('0.txt', b'old'),('0.cls', b'1'),('0.txt', b'new'),('1.txt', b'b'),('1.cls', b'2')])
    s,rep = index(tmp_path/'w')
    assert values(s, 'txt')==['b'] and rep.failed==1 and re.search('a.tar: 0.*0.txt.*twice.*bytes 512 and 2,560', str(rep.failures))

def test_kinds_of_archives(tmp_path):
    "Plain, compressed in one piece or several, empty, with a label only; others' junk is no shard"
    d = tmp_path/'w'
    d.mkdir()
    def ms(a, b): return [o for i in range(a, b) for o in ((f'{i}.txt', b'n%d' % i),(f'{i}.cls', b'%d' % (i%3)))]
    tar(d/'a.tar', ms(0, 9)); tar(d/'b.tgz', ms(9, 14), 'w:gz'); tar(d/'c.tar', []); tar(d/'d.tar', [('20.cls', b'1')])
    tar(tmp_path/'e.tar', ms(14, 40))
    b = (tmp_path/'e.tar').read_bytes()
    (d/'e.tar.gz').write_bytes(gzip.compress(b[:5000])+gzip.compress(b[5000:]))
    (d/'f.tar').write_bytes(b'')
    (d/'._a.tar').write_bytes(b'\0\5\x16\7 what a Mac leaves')
    (d/'a.txt').write_text('no shard')
    s,rep = index(d)
    t = s.shards
    assert [t.name(u) for u in range(len(t))]==['a.tar','b.tgz','c.tar','d.tar','e.tar.gz','f.tar'] and t.n.tolist()==[9,5,0,1,26,0] and rep.failed<=1
    i = [k for k in range(len(s)) if k!=14]
    assert s.get_many(i, 'txt', check=True)['txt']==[b'n%d' % k for k in range(40)] and s.get_many(range(41), 'cls')['cls'].tolist()==[k%3 for k in range(14)]+[1]+[k%3 for k in range(14, 40)]

def one(path): return [(n,b) for n,_,b in members(path)]

def damaged(d, name, b, want):
    "Index `b` as tar `name` beside a good one: every sample that comes back is one of `want`; how many?"
    d.mkdir()
    (d/name).write_bytes(b)
    tar(d/'z.tar', [('z.cls', b'0'),('z.bin', b'zz')])
    s,rep = index(d)
    got = []
    for i in range(len(s)-1):
        try: o = s.get_many([i], ['bin','cls','bin.crc'], check=True)
        except MissingSample: continue
        got.append((o['cls'][0],o['bin'][0]))
    assert s.get_many([len(s)-1], 'bin', check=True)['bin']==[b'zz']
    assert set(got)<=set(want), 'what was not there came back'
    return got,rep

WANT = [(i%3, random.Random(i).randbytes(300+150*i)) for i in range(8)]
def theirs(): return [o for i,(y,b) in enumerate(WANT) for o in ((f'{i}.cls', b'%d' % y),(f'{i}.bin', b))]

@examples(60)
@given(st.integers(0, 20_000), st.booleans(), st.sampled_from([tarfile.USTAR_FORMAT,tarfile.PAX_FORMAT]))
def test_cut_anywhere(tmp_path_factory, at, gz, fmt):
    "What is whole before the cut is there; nothing else; the cut is reported unless it is between samples"
    d = tmp_path_factory.mktemp('cut')
    tar(d/'a.tar', theirs(), format=fmt)
    b = (d/'a.tar').read_bytes()
    ends = [o+len(v) for n,o,v in members(d/'a.tar') if n.endswith('bin')]
    if gz:
        z = gzip.compress(b)
        at %= len(z)
        b = z[:at]
        whole = len(zlib.decompressobj(31).decompress(b)) if at else 0
    else:
        at %= len(b)
        b,whole = b[:at],at
    got,rep = damaged(d/'w', 'a.tar'+'.gz'*gz, b, WANT)
    assert got==WANT[:sum(e<=whole for e in ends)]
    shutil.rmtree(d)

@examples(60)
@given(st.integers(0, 1<<20), st.integers(1, 255), st.booleans())
def test_flipped_anywhere(tmp_path_factory, at, x, gz):
    "A byte of a header is changed: what came before is there, and nothing wrong after; of content, the changed bytes are what is there; of a compressed tar, whose bytes are all suspect then, nothing"
    d = tmp_path_factory.mktemp('flip')
    tar(d/'a.tar', theirs(), format=tarfile.USTAR_FORMAT)
    ms = members(d/'a.tar')
    b = (d/'a.tar').read_bytes()
    if gz: b = gzip.compress(b)
    at %= len(b) if gz else ms[-1][1]+len(ms[-1][2])
    b = b[:at]+bytes([b[at]^x])+b[at+1:]
    if gz:
        z = zlib.decompressobj(31)
        try:
            z.decompress(b)
            if not z.eof: return   # looks like one that was cut off, whose beginning is taken
        except zlib.error: pass
        got,rep = damaged(d/'w', 'a.tar.gz', b, WANT)
        assert got in ([],WANT) and (got or rep.failed==1)
    else:
        inside = next((k for k,(n,o,v) in enumerate(ms) if o<=at<o+len(v)), None)
        if inside is not None:
            if not ms[inside][0].endswith('bin'): return
            want = [(y, b[ms[2*i+1][1]:ms[2*i+1][1]+len(v)]) for i,(y,v) in enumerate(WANT)]
            assert damaged(d/'w', 'a.tar', b, want)[0]==want
        else:
            got,rep = damaged(d/'w', 'a.tar', b, WANT)
            assert got[:sum(o+len(v)<=at-512 for n,o,v in ms if n.endswith('bin'))]==WANT[:sum(o+len(v)<=at-512 for n,o,v in ms if n.endswith('bin'))]
    shutil.rmtree(d)

def test_claims(tmp_path):
    "A header that claims a terabyte, or a compressed tar of nothing but zeros, costs no memory"
    d = tmp_path/'w'
    d.mkdir()
    m = tarfile.TarInfo('1.bin'); m.size = 1<<40
    (d/'a.tar').write_bytes(tar(tmp_path/'t', [('0.bin', b'a')]).read_bytes()[:1024]+m.tobuf(tarfile.GNU_FORMAT)+bytes(2000))
    zeros = zlib.compressobj(9, zlib.DEFLATED, 31)
    z,b = b'',tarfile.TarInfo('2.bin')
    b.size = 1<<20
    for k in range(150): b.name = f'{k+2}.bin'; z += zeros.compress(b.tobuf()+bytes(1<<20))
    (d/'b.tar.gz').write_bytes(z+zeros.flush())
    code = f'''
import resource
from fastai_remote import ShardStore, index_shards
import fastai_remote.ingest.index
resource.setrlimit(resource.RLIMIT_AS, (int(open('/proc/self/statm').read().split()[0])*4096+200_000_000,)*2)
r = index_shards({str(d)!r}, num_workers=1, progress=False)
s = ShardStore({str(d)!r}, cache={str(tmp_path/'cache')!r})
print(r.written, len(s[150]['bin']), r.failures)'''
    p = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert p.returncode==0 and p.stdout.startswith('151 1048576 ['), p.stdout+p.stderr[-1500:]

def test_their_splits(tmp_path):
    "Patterns make splits; one that fits nothing, or two that fit the same, are refused"
    d = tmp_path/'w'
    d.mkdir()
    for n,k in (('train-0',3),('train-1',4),('val-0',2)): tar(d/f'{n}.tar', [(f'{n}{i}.txt', f'{n} {i}'.encode()) for i in range(k)])
    s,_ = index(d, splits={'valid':'val-*', 'train':'train-*'})
    assert s.splits=={'valid':[0,2], 'train':[2,9]} and values(s, 'txt')[:3]==['val-0 0','val-0 1','train-0 0']
    with pytest.raises(StoreExists, match='overwrite=True'): index(d)
    s,_ = index(d, overwrite=True, splits={'train':'train-0*'})
    assert len(s)==3
    with pytest.raises(FileNotFoundError, match="no tar is called 'x-\\*'; there are train-0.tar"): index(d, overwrite=True, splits={'x':'x-*'})
    with pytest.raises(ValueError, match='a shard is in two splits'): index(d, overwrite=True, splits={'a':'train-*', 'b':'*-1*'})
    (tmp_path/'empty').mkdir()
    with pytest.raises(FileNotFoundError, match='no tars here'): index(tmp_path/'empty')

def test_their_tar_changed(tmp_path):
    "A tar that is another than was indexed is told from it, by its checksums, or because it is shorter"
    d = tmp_path/'w'
    d.mkdir()
    tar(d/'a.tar', [(f'{i}.txt', b'number %d' % i) for i in range(9)])
    s,_ = index(d)
    tar(d/'a.tar', [(f'{i}.txt', b'another %d' % i) for i in range(9)])
    with pytest.raises(CorruptSample): ShardStore(d).get_many(range(9), 'txt', check=True)
    (d/'a.tar').write_bytes((d/'a.tar').read_bytes()[:1024])
    with pytest.raises(CorruptSample, match='cut off, or not the one that was indexed'): ShardStore(d).get_many([8], 'txt')
    (d/'a.tar').unlink()
    with pytest.raises(MissingSample, match='shard a.tar is not there, with samples 0 to 8'): ShardStore(d).get_many([8], 'txt')

def test_unfinished_index_takes_no_tar_along(tmp_path):
    "An index that was not finished can be abandoned, deleted, and refuses to be written over; the tars of others stay, whatever they are called"
    d = tmp_path/'d'
    d.mkdir()
    for k in range(3): tar(d/f'shard-{k:06}.tar', [(f'{k}-{i}.txt', f'{k} {i}'.encode()) for i in range(5)])
    before = {n:(d/n).read_bytes() for n in names(d)}
    def stop(self, *a, **kw): raise KeyboardInterrupt
    for act in (lambda: ShardStore.delete(d), lambda: ShardStore.abandon(d)):
        with pytest.MonkeyPatch.context() as m:
            m.setattr(shard_writer.ShardWriter, 'commit', stop)
            with pytest.raises(KeyboardInterrupt): index(d)
        for kw in ({}, dict(overwrite=True)):
            with pytest.raises(StoreExists, match='shards that others wrote'): put(d, items('a'), **kw)
        act()
        assert {n:b for n,b in before.items() if n in names(d)}==before and not (d/'.ingest').exists() and not (d/'manifest.json').exists()
        assert names(d)==sorted(before)

def test_indexing_goes_on(tmp_path):
    "Interrupted and repeated: only what is missing is read; another set of tars is refused"
    d = tmp_path/'w'
    d.mkdir()
    for k in range(6): tar(d/f'{k}.tar', [(f'{k}-{i}.txt', f'{k} {i}'.encode()) for i in range(5)])
    from fastai_remote.ingest import index as foreign_shards
    done = []
    def stop(self, k, *a, real=shard_writer.ShardWriter.done, **kw):
        if k==3 and not done: done.append(1); raise KeyboardInterrupt
        return real(self, k, *a, **kw)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(shard_writer.ShardWriter, 'done', stop)
        with pytest.raises(KeyboardInterrupt): index(d)
        with pytest.raises(StoreNotFound, match='not finished'): ShardStore(d)
        s,rep = index(d)
    assert (rep.written,rep.resumed)==(30,15) and values(s, 'txt')==[f'{k} {i}' for k in range(6) for i in range(5)]
    assert names(d)==sorted(['.fastai_remote', '.fastai_remote/manifest.json', *(f'{k}.tar' for k in range(6)),
                             *(f'.fastai_remote/{k}.tar.fastai_remote' for k in range(6))])

@pytest.mark.parametrize('k', [1,120])
@pytest.mark.parametrize('size', ['same','other'])
def test_a_tar_that_changes_before_an_interrupted_index_goes_on_is_noticed(tmp_path, k, size):
    "Whichever it is; `abandon` makes the index begin anew"
    d = tmp_path/'w'
    d.mkdir()
    for i in range(130): tar(d/f'{i:03}.tar', [('0.txt', b'old')])
    written = []
    def stop(self, *a, **kw):
        if len(written)==125: raise KeyboardInterrupt
        written.append(original(self, *a, **kw))
    with pytest.MonkeyPatch.context() as m:
        original = shard_writer.ShardWriter.done
        m.setattr(shard_writer.ShardWriter, 'done', stop)
        with pytest.raises(KeyboardInterrupt): index(d)
    tar(d/f'{k:03}.tar', [('0.txt', b'new' if size=='same' else b'n'*20_000)])
    os.utime(d/f'{k:03}.tar', (1,1))
    message = f'{k:03}.tar has changed' if size=='same' else 'unfinished ingest from another source'
    with pytest.raises(StoreExists, match=message): index(d)
    ShardStore.abandon(d)
    assert values(index(d)[0], 'txt')[k][:1]=='n'

def test_an_index_that_another_call_has_extended_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    d,original = tmp_path/'w',shard_writer.ShardWriter.take_lock
    d.mkdir()
    for k in range(2): tar(d/f'{k}.tar', [('0.txt', b'a')])
    index(d)
    tar(d/'2.tar', [('0.txt', b'a')])
    def extend_first(self):
        monkeypatch.setattr(shard_writer.ShardWriter, 'take_lock', original)
        tar(d/'3.tar', [('0.txt', b'a')])
        index(d)
        original(self)
    monkeypatch.setattr(shard_writer.ShardWriter, 'take_lock', extend_first)
    with pytest.raises(StoreExists, match='another process has just changed this index; repeat the same call'): index(d)
    assert len(ShardStore(d))==4

def test_only_finished_records_are_counted(tmp_path):
    interrupted(tmp_path/'d')
    n = ShardStore.unfinished(tmp_path/'d')[0]['chunks']
    (tmp_path/'d/.ingest/chunk-000090.json.123.part').write_text('{')
    assert ShardStore.unfinished(tmp_path/'d')[0]['chunks']==n>0

def test_a_timeout_beside_a_storage_is_refused(tmp_path):
    "It has its own, as it has its own options"
    (d:=tmp_path/'w').mkdir()
    tar(d/'0.tar', [('0.txt', b'a')])
    for call in (lambda: to_shards([1], Storage(tmp_path/'d'), timeout=5), lambda: index_shards(Storage(d), timeout=5),
                 lambda: ShardStore(Storage(d), timeout=5)):
        with pytest.raises(TypeError, match='timeout: a Storage has its own'): call()
    with pytest.raises(TypeError, match='storage_options: a Storage has its own'):
        index_shards(Storage(d), storage_options={'a':1})
    assert index_shards(Storage(d, timeout=7), num_workers=1, progress=False).written==1

class Stopping:
    "For a time not of 60"
    on = False
    def __call__(self, i):
        if i==60 and Stopping.on: raise KeyboardInterrupt
        return {'txt':f'{i}'}

@pytest.mark.parametrize('number', [13,999])
def test_a_record_beyond_the_plan_is_left_out(tmp_path, number, monkeypatch):
    "As in Redis; the plan has 13 chunks"
    def go(): return put(tmp_path/'d', list(range(100)), Stopping(), shuffle=False, chunk=8)
    monkeypatch.setattr(Stopping, 'on', True)
    with pytest.raises(KeyboardInterrupt): go()
    monkeypatch.setattr(Stopping, 'on', False)
    records = tmp_path/'d/.ingest'
    shutil.copy(records/'chunk-000000.json', records/f'chunk-{number:06}.json')
    store,report = go()
    assert report.written==len(store)==100 and values(store, 'txt')==[f'{i}' for i in range(100)]
    assert not store.verify(num_workers=1).bad

def test_a_record_whose_checksum_has_lost_its_name_is_written_again(tmp_path, monkeypatch):
    def go(): return put(tmp_path/'d', list(range(100)), Stopping(), shuffle=False, chunk=8)
    monkeypatch.setattr(Stopping, 'on', True)
    with pytest.raises(KeyboardInterrupt): go()
    monkeypatch.setattr(Stopping, 'on', False)
    record = tmp_path/'d/.ingest/chunk-000000.json'
    record.write_bytes(re.sub(rb'"ok": \d+', b'"ok": 5', record.read_bytes()).replace(b',"crc":', b',"crb":'))
    assert b'"ok": 5' in record.read_bytes()
    store,report = go()
    assert report.written==len(store)==100 and not store.verify(num_workers=1).bad

def test_a_commit_without_all_chunks_leaves_no_failures_behind(tmp_path):
    "It can be repeated when they are written"
    writer = shard_writer.ShardWriter(Storage(tmp_path/'d'))
    writer.begin(dict(n=4, chunk=2, fields={'txt':{'codec':'txt', 'dtype':None}, 'txt.crc':{'codec':'crc', 'dtype':'u4'}},
        splits=None, vocab={}, signature='s', stats=None))
    def write(chunk):
        one = writer.opener()()
        one.put(np.array([2*chunk]), {'txt':[b'a'], 'txt.crc':np.array([zlib.crc32(b'a')], np.uint32)})
        one.done(chunk, dict(ok=1, bytes=1, failed=1, gaps=[2*chunk+1]), [(f'sample {2*chunk+1}','bad')])
    write(0)
    with pytest.raises(StoreError, match='1 chunks are not written'): writer.commit()
    assert not [name for name in names(tmp_path/'d') if 'failures' in name]
    write(1)
    writer.commit()
    writer.close()
    store = ShardStore(tmp_path/'d')
    assert list(store.failures())==[('sample 1','bad'),('sample 3','bad')] and not store.verify(num_workers=1).bad

# --- files of format 1, for ever

def golden(i):
    "Sample i of tests/data/shards-v1, which was written once and is never written again"
    return {'png':(np.arange(48).reshape(4, 4, 3)*(i+1)%256).astype(np.uint8), 'cls':['ant','bee','cow'][i%3], 'kind.cls':['ä','b b','c'][i%3], 'txt':f'Nummer {i} ✓', 'id':-i<<40}

def test_golden():
    "Every value of shards that the first version wrote"
    s = ShardStore(DATA/'shards-v1')
    assert (len(s),s.splits,s.vocab,s.manifest.vocab['kind.cls'])==(4,{'train':[0,2], 'valid':[2,4]},['ant','bee','cow'],['b b','ä'])
    assert (s.fields,s.manifest.format,s.shards.n.tolist())==(list(golden(0)),1,[2,2]) and list(s.failures())==[('train: item 2','ValueError: left out')]
    assert s.class_counts()=={'ant':2, 'bee':2, 'cow':0} and s.image_stats()['n']==4
    for k,i in enumerate((0,1,3,4)):
        for f,v in golden(i).items(): assert np.array_equal(np.asarray(s[k][f]), v) if f=='png' else s[k][f]==v and type(s[k][f]) is type(v)
    for u in range(2):
        s.indices([u])[u].check('here')
        assert zlib.crc32((DATA/'shards-v1'/s.shards.name(u)).read_bytes())==s.shards.crc[u]

def golden_2(i):
    "Sample i of tests/data/shards-v2: integer labels, and checksums of all files"
    return {**golden(i), 'code.cls':[-7,300][i%2], 'target.f4':i/4}

def write_golden_2(folder):
    "How shards-v2 was written, once; not to be written again"
    def fn(i):
        if i==2: raise ValueError('left out')
        return golden_2(i)
    to_shards({'train':[0,1,2], 'valid':[3,4]}, folder, fn, vocab=['ant','bee','cow'], shuffle=False, chunk=3, num_workers=1, progress=False)

def test_golden_2():
    "Every value of shards of the second version, and nothing in them is damaged"
    s = ShardStore(DATA/'shards-v2')
    assert (len(s),s.splits,s.manifest.format,s.shards.n.tolist())==(4,{'train':[0,2], 'valid':[2,4]},2,[2,2])
    assert s.manifest.vocab=={'cls':['ant','bee','cow'], 'kind.cls':['b b','ä'], 'code.cls':[-7,300]} and s.manifest.counts['code.cls']==[2,2]
    assert list(s.failures())==[('train: item 2','ValueError: left out')] and list(s.check_rest())==[] and s.verify(num_workers=1).bad==0
    for k,i in enumerate((0,1,3,4)):
        for f,v in golden_2(i).items(): assert np.array_equal(np.asarray(s[k][f]), v) if f=='png' else s[k][f]==v and type(s[k][f]) is type(v)

# --- hostile files

@pytest.fixture
def gold(tmp_path):
    "A copy of the golden shards, to be spoilt"
    return Path(shutil.copytree(DATA/'shards-v1', tmp_path/'d'))

def reads(d):
    "Read all there is; only a `StoreError` may come of it"
    try:
        s = ShardStore(d)
        if len(s)>100: s.get_many([0, len(s)-1], 'txt'); return
        for f in s.fields: s.get_many(range(len(s)), f)
        for i in range(len(s)): s[i]
        repr(s), s._repr_html_(), list(s.failures()), s.class_counts()
    except StoreError: pass

LIES = [b'', b'\0', b'{}', b'[]', b'null', b'0', b'"x"', b'['*100_000, b'{"a":'*100_000, b'fr.idx\r\n', b'fr.idx\r\n\xff\xff\xff\xff', b'\x80\x04\x95'+bytes(40), b'fr.idx\r\n\x10\0\0\0'+b'['*16, b'fr.idx\r\n'+(60_000).to_bytes(4, 'little')+b'['*60_000]

@pytest.mark.parametrize('name', ['manifest.json','shard-000000.idx'])
@pytest.mark.parametrize('b', LIES, ids=range(len(LIES)))
def test_lies(gold, name, b):
    "What is no manifest, and what is no index"
    (gold/name).write_bytes(b)
    with pytest.raises((CorruptSample,UnsupportedFormat,StoreNotFound), match='d[:/]|shards-v1: '): ShardStore(gold).get_many([0], 'txt')

def head(b): return json.loads(b[12:12+int.from_bytes(b[8:12], 'little')]),b[12+int.from_bytes(b[8:12], 'little'):]
def whole(h, body):
    j = json.dumps(h).encode()
    j += b' '*(-(12+len(j))%8)
    return b'fr.idx\r\n'+len(j).to_bytes(4, 'little')+j+body

CLAIMS = [dict(n=-1), dict(n=1<<62), dict(n='x'), dict(n=7), dict(n=5), dict(n=None), dict(format=3), dict(format='1'), dict(format=[]), dict(columns=[]), dict(columns=5), dict(columns=[['txt@','u4']]), dict(columns=[['txt@','O',0]]),
    dict(columns=[['txt@','V9999999',0]]), dict(columns=[['txt@','u4',-8]]), dict(columns=[['txt@','u4',1<<60]]), dict(columns=[['txt@','S8',0]]), dict(columns=[['txt@','u4',0]]), dict(labels=[]), dict(labels={'cls':[]}),
    dict(labels={'kind.cls':['?']*2}), dict(labels={'kind.cls':[]}), dict(labels={'kind.cls':5}), dict(labels={'kind.cls':[[1],{},None]}), dict(labels={'txt':['a']})]

@pytest.mark.parametrize('claim', CLAIMS, ids=range(len(CLAIMS)))
def test_claims_of_an_index(gold, claim):
    "A header that is well formed and lies"
    h,body = head((gold/'shard-000000.idx').read_bytes())
    (gold/'shard-000000.idx').write_bytes(whole(h|claim, body))
    reads(gold)
    if 'n' in claim or 'format' in claim:
        with pytest.raises((CorruptSample,UnsupportedFormat)): ShardStore(gold).get_many([0], 'txt')

@examples(100)
@given(st.data())
def test_spoilt_anywhere(tmp_path_factory, data):
    "Bytes of an index, a manifest, a tar changed, cut off, put in: an error that a store may raise, or values"
    d = Path(shutil.copytree(DATA/'shards-v1', tmp_path_factory.mktemp('spoilt')/'d'))
    p = d/data.draw(st.sampled_from(['manifest.json','shard-000000.idx','shard-000000.idx','shard-000000.tar','shard-failures.json']))
    b = p.read_bytes()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(b)))
        b = b[:at]+data.draw(st.binary(max_size=4))+b[at+data.draw(st.integers(0, 4)):]
    if data.draw(st.booleans()): b = b[:data.draw(st.integers(0, len(b)))]
    p.write_bytes(b)
    reads(d)
    shutil.rmtree(d.parent)

@examples(150)
@given(st.sampled_from([f for f in ShardManifest.__dataclass_fields__ if f not in ('stats','counts')]), st.recursive(st.none()|st.booleans()|st.integers()|st.floats()|st.text(max_size=5)|st.binary(max_size=9).map(lambda b: base64.b64encode(zlib.compress(b)).decode()),
    lambda o: st.lists(o, max_size=3)|st.dictionaries(st.sampled_from(['txt','cls','codec','dtype','train','n','size','crc','idx','raw','text','x']), o, max_size=3), max_leaves=6))
def test_manifests_of_anything(tmp_path_factory, key, value):
    "Any JSON in the place of any value of a manifest"
    d = Path(shutil.copytree(DATA/'shards-v1', tmp_path_factory.mktemp('any')/'d'))
    m = json.loads((d/'manifest.json').read_bytes())
    if key=='shards' and isinstance(value, dict): value = m['shards'] | value
    (d/'manifest.json').write_text(json.dumps(m | {key:value}))
    reads(d)
    shutil.rmtree(d.parent)

def test_huge_claims(gold):
    "An index that claims gigabytes of a small file gets an error and no memory; a table that unpacks to gigabytes is refused"
    h,body = head((gold/'shard-000000.idx').read_bytes())
    n = next(a for c,d,a in h['columns'] if c=='txt#')
    body = body[:n]+b'\xfe\xff\xff\xff'*2+body[n+8:]
    (gold/'shard-000000.idx').write_bytes(whole({**h, 'crc':zlib.crc32(body)}, body))
    with pytest.raises(CorruptSample, match=r"shards-v1: sample 1, field 'txt' in shard-000000.tar.*of 4,294,967,294 bytes"): ShardStore(gold).get_many([1], 'txt')

def test_nothing_is_run(gold):
    "A pickle in the place of anything is bytes"
    class Evil:
        def __reduce__(self): return os.system,(f'touch {gold}/run',)
    for n in ('manifest.json','shard-000000.idx'):
        b = (gold/n).read_bytes()
        (gold/n).write_bytes(pickle.dumps(Evil())); reads(gold)
        (gold/n).write_bytes(b)
    assert not (gold/'run').exists()

# --- what a loader gets

def dls_of(store, bs=8, splitter=None, **kw):
    from fastai.data.block import DataBlock
    from fastai_remote import ShardBlock, get_remote_items
    return DataBlock((ShardBlock('id'),ShardBlock('cls')), get_items=get_remote_items, splitter=splitter or RandomStoreSplitter(.25)).dataloaders(store, bs=bs, **{'num_workers':0, **kw})

def epoch(dl): return [b[0].long().tolist() for b in dl]
def flat(o): return [i for b in o for i in b]

@pytest.fixture(scope='module')
def numbers(tmp_path_factory):
    "300 samples in shards of many sizes, in two splits; sample i has id i"
    d = tmp_path_factory.mktemp('numbers')/'d'
    put(d, {'train':[{'id':i, 'cls':i%3, 'txt':f'{i}'} for i in range(240)], 'valid':[{'id':i, 'cls':i%3, 'txt':f'{i}'} for i in range(240, 300)]}, shuffle=False, chunk=21, maxcount=11)
    return ShardStore(d)

def groups_within(sizes, bs, mix):
    """At most how many groups of `interleave` shards a batch draws from, and all batches of an epoch together, in one process

    A worker visits the shards one group after another, so a batch is `bs` consecutive samples of a line of groups. A
    group that is neither the batch's first nor its last lies in it as a whole. It is not the last group of the line,
    so it has `interleave` shards, and at least as many samples as the `interleave` smallest; `bs-2` samples are left for such groups.
    Each end of a group lies within at most one batch, and makes it draw from one group more."""
    smallest = int(np.sort(sizes)[:mix].sum())
    batches,groups = -(-int(sizes.sum())//bs),-(-len(sizes)//mix)
    return 1 if bs==1 else min(2+(bs-2)//smallest, groups),batches+groups-1

@examples(8)
@example(bs=6, interleave=1, drop_last=False, split='all in train', seed=0)   # three shards: one of four samples lies in a batch as a whole
@given(bs=st.integers(1, 90), interleave=st.integers(1, 7), drop_last=st.booleans(), split=st.sampled_from(['store','random','all in train']), seed=st.integers(0, 1<<40))
def test_each_once(numbers, bs, interleave, drop_last, split, seed):
    "An epoch gives each sample of its split once, whatever the batches; a batch draws from no more shards than it has to"
    splitter = StoreSplitter() if split=='store' else RandomStoreSplitter(0. if split=='all in train' else .3, seed)
    dls = dls_of(numbers, bs, splitter, interleave=interleave, drop_last=drop_last)
    want = [sorted(dls.train_ds.items), sorted(dls.valid_ds.items)]
    assert sorted(sum(want, []))==list(range(300)) and (split!='store' or want[0]==list(range(240)))
    got = epoch(dls.train)
    assert len(set(flat(got)))==len(flat(got))==len(want[0])//bs*bs if drop_last else sorted(flat(got))==want[0]
    assert flat(epoch(dls.valid))==list(dls.valid_ds.items)
    drawn_from = [len(set(np.searchsorted(numbers.shards.starts, b, 'right'))) for b in got]
    sizes = np.unique(np.searchsorted(numbers.shards.starts, want[0], 'right'), return_counts=True)[1]
    in_batch,in_epoch = groups_within(sizes, bs, interleave)
    assert max(drawn_from)<=interleave*in_batch and sum(drawn_from)<=interleave*in_epoch

@pytest.mark.parametrize('num_workers,method', [(1,'fork'),(2,'fork'),(3,'fork'),(2,'spawn')])
def test_each_once_in_workers(numbers, num_workers, method, monkeypatch):
    "In workers, forked and spawned: each once, in the order that the seed says"
    ctx = multiprocessing.get_context(method)
    runs = []
    for _ in range(2):
        set_seed(3)   # loaders take theirs from it when they are made
        dls = dls_of(numbers, 16, StoreSplitter(), num_workers=num_workers, interleave=2)
        monkeypatch.setattr(type(dls.train.fake_l), 'multiprocessing_context', ctx)
        runs.append(epoch(dls.train))
        if method=='spawn': break   # seconds each: a worker imports fastai
    assert sorted(flat(runs[0]))==list(range(240)) and (method=='spawn' or runs[0]==runs[1]!=epoch(dls.train))
    assert flat(epoch(dls.valid))==list(range(240, 300))

@examples(50)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any), st.integers(1, 5), st.integers(1, 20), st.integers(1, 4), st.integers(1, 5), st.integers(0, 99))
def test_ranks(sizes, mix, bs, workers, world, seed):
    "The ranks together give each sample, and what pads them is fewer than there are ranks"
    n = sum(sizes)
    ps = [ShardPermutation(sizes, seed, mix, bs, workers, r, world) for r in range(world)]
    got = np.concatenate([p[np.arange(len(p))] for p in ps])
    assert {len(p) for p in ps}=={-(-n//world)} and set(got.tolist())==set(range(n)) and len(got)-n<world

def test_a_wanted_shard_stays_open_however_many_others_are_read(tmp_path):
    "More than the 64 files that are kept open are read between; a wanted shard that was closed would be waited for"
    to_shards([{'txt':str(i)} for i in range(70)], tmp_path/'d', maxcount=1, shuffle=False, num_workers=0, progress=False)
    store = ShardStore(tmp_path/'d', cache=str(tmp_path/'cache'))
    for shards in (list(range(70)), [0,1]):
        store.prefetch(shards, wait=True)
        wait_for(lambda: store.whole_shards.thread is None)
    texts = []
    def read(): texts.extend(store.get_many([i], 'txt')['txt'][0] for i in (*range(2, 70), 0, 1))
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(5)
    assert texts==[str(i).encode() for i in (*range(2, 70), 0, 1)] and len(store.whole_shards.files)==64

def test_the_size_of_the_usual_cache_does_not_ask_for_one_of_a_local_folder(numbers, tmp_path):
    "The shards would be copied into the home of the user"
    store = ShardStore(numbers.storage.url, cache_size=10**6)
    assert store.cache is None and store.in_place(0)
    cache = FileCache(str(tmp_path))
    assert ShardStore(numbers.storage.url, cache=cache).cache is cache
    with pytest.raises(TypeError, match='cache_size: a FileCache has its own'): ShardStore(numbers.storage.url, cache=cache, cache_size=10**6)

def test_of_a_local_folder_only_compressed_shards_are_copied(tmp_path, monkeypatch):
    "A damaged copy would spoil what is whole"
    monkeypatch.setenv('FASTAI_REMOTE_CACHE', str(tmp_path/'usual'))
    for name,mode in (('a.tar','w'), ('b.tar.gz','w:gz')):
        (tmp_path/'d').mkdir(exist_ok=True)
        with tarfile.open(tmp_path/'d'/name, mode) as tar:
            tar.addfile(tarfile.TarInfo('0.txt'), io.BytesIO(b''))
    index_shards(tmp_path/'d', num_workers=0, progress=False)
    store = ShardStore(tmp_path/'d', cache=True)
    store.prefetch([0,1], wait=True)
    wait_for(lambda: store.whole_shards.thread is None)
    assert store.in_place(0) and sorted(store.whole_shards.files)==[1]
    assert store.get_many([0,1], 'txt', check=True)['txt']==[b'',b'']

def test_nobody_waits_for_shards_if_no_thread_can_be_started(tmp_path, monkeypatch):
    to_shards([{'txt':'a'}], tmp_path/'d', num_workers=0, progress=False)
    store = ShardStore(tmp_path/'d', cache=str(tmp_path/'cache'))
    def start(thread): raise RuntimeError("can't start new thread")
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, 'start', start)
        with pytest.raises(RuntimeError, match="can't start"): store.prefetch([0], wait=True)
    texts = []
    reader = threading.Thread(target=lambda: texts.append(store.get_many([0], 'txt')['txt']), daemon=True)
    reader.start()
    reader.join(5)
    store.prefetch([0], wait=True)
    wait_for(lambda: 0 in store.whole_shards.files)
    assert texts==[[b'a']]

def test_cache_asked_for(numbers, tmp_path):
    "A cache that is given is used for a folder of this machine too (it may be a slow one): shards come ahead, whole, and stay"
    s = ShardStore(numbers.storage.url, cache=str(tmp_path/'c'))
    assert sorted(flat(epoch(dls_of(s, 16, StoreSplitter()).train)))==list(range(240))
    held = wait_for(lambda: [n for n in names(tmp_path/'c') if n.endswith('.tar')])
    for n in held: assert (tmp_path/'c'/n).read_bytes()==(Path(numbers.storage.url)/Path(n).name).read_bytes()

_dying = """
import multiprocessing, os, signal, sys
sys.path.insert(0, {tests!r})
from test_shards import *
s = ShardStore({url!r}, cache={cache!r})
dls = dls_of(s, 16, StoreSplitter(), num_workers=2)
it = iter(dls.train)
next(it)
os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
for _ in it: pass
"""

def test_worker_dies_with_a_cache(numbers, tmp_path):
    "A worker is killed in the middle of an epoch: it ends with an error; the cache is good, who comes next starts at once, and its part of a file goes when room is made"
    code = _dying.format(tests=str(Path(__file__).parent), url=numbers.storage.url, cache=str(tmp_path/'c'))
    p = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, timeout=300)   # torch's signal handler is not for this process
    assert p.returncode==1 and re.search('killed by signal|EOFError|ConnectionResetError|answer_challenge', p.stderr), p.stderr[-1000:]   # as torch meets it
    s = ShardStore(numbers.storage.url, cache=str(tmp_path/'c'))
    assert sorted(flat(epoch(dls_of(s, 16, StoreSplitter(), num_workers=1).train)))==list(range(240))
    s.cache.clear()   # as whoever needs room does
    assert not [n for n in names(tmp_path/'c') if n.endswith('.part')]
