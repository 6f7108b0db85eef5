"`to_shards` from every kind of source, locks and places, hostile files, and what a loader gets of shards"
import base64, json, os, pickle, random, re, shutil, subprocess, threading, time, zlib
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pandas as pd
import pytest
import torch
import webdataset
from fastai.data.block import DataBlock
from fastai.data.core import Datasets
from fastai.data.transforms import Categorize
from fastai.torch_core import set_seed
from fastai.vision.core import PILImage
from hypothesis import example, given, strategies as st
from PIL import Image

from conftest import class_of, examples, wait_for
from fastai_remote import (
    CorruptSample, IngestError, MemoryStore, MissingSample, RandomStoreSplitter, RedisStore, ShardBlock, ShardStore,
    StoreBusy, StoreError, StoreExists, StoreFull, StoreNotFound, StoreSplitter, StoreUnavailable, UnsupportedFormat,
    csv_samples, drawing_samples, get_remote_items, image_samples, index_shards, shrink, tar_samples, to_redis,
    to_shards)
from fastai_remote.store.cache import FileCache
from fastai_remote.store.shard_index import ShardManifest
from fastai_remote.store.storage import Storage
from fastai_remote.write import folder_lock
from fastai_remote.write.base import process_state
from fastai_remote.write.folder_lock import FolderLock
from fastai_remote.write.shard_files import seal_json
from fastai_remote.write.shards import ShardWriter
from shard_helpers import (
    ONE, dead, files, index, interrupted_after, items, lock, members, names, put, seen, sound, tar, values)

DATA = Path(__file__).parent/'data'

# --- sources and labels

class Vision(torch.utils.data.Dataset):
    "As torchvision's: pictures and int labels, classes by name"
    classes = ['ant','bee','cow','dog','eel']
    def __len__(self): return 40
    def __getitem__(self, i): return Image.fromarray(np.full((5,6,3), i, np.uint8)),i%5

def fastai_datasets(images, path):
    paths = sorted(images.glob('*/*.jpg'))
    tfms = [[PILImage.create],[class_of, Categorize()]]
    return Datasets(paths, tfms, splits=(range(0, 60, 2),range(1, 60, 2)))

def csv(images, path):
    lines = [f'{p.relative_to(images)},{class_of(p)}\n' for p in sorted(images.glob('*/*.jpg'))]
    (path/'t.csv').write_text('file,kind\n'+''.join(lines)+'gone.jpg,cat\n')
    return csv_samples(path/'t.csv', 'file', 'kind', folder=images)

def drawings(images, path):
    line = '{"word":"%s","key_id":"%d","drawing":[[[0,%d,255],[0,9,255]]]}\n'
    (path/'cat.ndjson').write_text(''.join(line % ('cat' if i%2 else 'dog', i, i) for i in range(30)))
    return drawing_samples(path/'cat.ndjson')

ROWS = [{'txt':f't{i}', 'cls':'abc'[i%3], 'id':i, 'x.f4':i/8, 'labels':['x','y'][:i%3]} for i in range(48)]

def in_memory(images, path):
    columns = {'txt':[o['txt'].encode() for o in ROWS], 'cls':np.arange(48)%3, 'id':np.arange(48)}
    return MemoryStore(columns, 'm', vocab={'cls':['a','b','c']}, splits={'train':[0,40], 'valid':[40,48]})

def written(folder, source):
    put(folder, source, shuffle=False, overwrite=True)
    return folder

SOURCES = {   # a function that makes the source, how many samples it has
    'images':(lambda images, path: image_samples(images, label=class_of, path=True), 60),
    'rows':(lambda images, path: pd.DataFrame(ROWS, index=[7]*48), 48), 'torch':(lambda images, path: Vision(), 40),
    'fastai':(fastai_datasets, 60), 'csv':(csv, 60), 'drawings':(drawings, 30), 'memory':(in_memory, 48),
    'tars':(lambda images, path: tar_samples(written(path/'tars', ROWS)), 48),
    'shards':(lambda images, path: ShardStore(written(path/'shards', {'train':ROWS[:40], 'valid':ROWS[40:]})), 48),
    'streams':(lambda images, path: {'train':iter(ROWS[:25]), 'none':iter(()), 'valid':iter(ROWS[25:32])}, 32)}

def of(*labels): return [{'cls':label} for label in labels]

LABELS = {
    'names':(of(*'cabcab'),None), 'given':(of(*'cab?ca'),['c','b','a','z']), 'codes':(of(3,0,7,7),None),
    'wide':(of(-3,40_000,5),None), 'named codes':(of(0,1,2,5),['x','y','z']), 'big':(of(0,1<<21),None),
    'several':([{'cls':'ab'[i%2], 'coarse.cls':i%4, 'fine.cls':f'f{i}'} for i in range(9)],
               {'fine.cls':[f'f{i}' for i in range(9)]}),
    'lists':([{'id':0, 'labels':['b','ü']}, {'id':1, 'labels':[]}, {'id':2, 'labels':['a']}],None),
    'given lists':([{'labels':['b']}, {'labels':['q']}, {'labels':['a','b']}],{'labels':['b','a']}),
    'unicode':(of('straße','日本','a b/c.d','x'*700,''),None), 'numbers as text':(of('7','007','-1'),None)}

def check_as_in_redis(folder, source, server, **options):
    "What `to_shards` has written of a source is what `to_redis` writes, and its files are sound"
    options = dict(shuffle=False, chunk=16)|options
    store,report = put(folder, source(), **options)
    sound(folder)
    report_2 = to_redis(source(), server.url, 'd', overwrite=True, **ONE|options)
    redis = RedisStore(server.url, 'd')
    for k in 'written','failed','nbytes': assert getattr(report, k)==getattr(report_2, k), k
    for k in 'n','vocab','counts','splits','nbytes','failed','stats':
        assert getattr(store.manifest, k)==getattr(redis.manifest, k), k
    # the index of a shard has a checksum of all of it, so that its numbers have none of their own
    fields = {f:{k:v for k,v in spec.items() if k!='check'} for f,spec in redis.manifest.fields.items()}
    assert store.manifest.fields==fields and list(store.failures())==list(redis.failures())
    def stored(store): return [store.get_many([i], store.fields, check=True) for i in range(len(store))]
    assert sorted(map(repr, stored(store)))==sorted(map(repr, stored(redis)))   # Redis fills gaps from the end
    return store,report

@pytest.mark.parametrize('what', SOURCES)
def test_each_source_is_written_as_to_redis(tmp_path, images, server, what):
    make,n = SOURCES[what]
    store,report = check_as_in_redis(tmp_path/'d', lambda: make(images, tmp_path), server)
    assert len(store)==report.written==n and report.failed==(what=='csv')
    if what in ('rows','tars','shards'): assert {o['id']:o for o in store[:]}=={o['id']:o for o in ROWS}
    if what=='images':
        for i,o in enumerate(store[:]):
            assert store.get_many([i], 'jpg')['jpg']==[(images/o['path']).read_bytes()]
            assert o['cls']==o['path'].split('/')[0]

@pytest.mark.parametrize('what', LABELS)
def test_labels_are_those_that_redis_has(tmp_path, server, what):
    "Labels of all kinds: vocabulary, codes, counts, widths and failures"
    source,vocab = LABELS[what]
    check_as_in_redis(tmp_path/'d', lambda: source, server, vocab=vocab, chunk=2, max_failed=9)

def test_splits_by_sizes(tmp_path):
    store,_ = put(tmp_path/'d', [{'id':i} for i in range(57)], splits={'train':None, 'valid':.2})
    assert store.splits=={'train':[0,46], 'valid':[46,57]} and sorted(values(store, 'id'))==list(range(57))
    sound(tmp_path/'d')
    with pytest.raises(ValueError, match='e: the source is empty'): put(tmp_path/'e', iter(()))

def test_values_lie_in_the_tar_as_what_they_are(tmp_path):
    "Strings, numbers of every width, arrays, JSON and bytes, which come back the same"
    source = [{
        'title':f'Ünï {i}\n', 'x.f4':i/8, 'y.f8':i/7, 'z.u1':i, 'w.i2':-i, 'id':10**18+i, 'npy':np.arange(i),
        'json':{'k':[i,None]}, 'bin':bytes(range(i)), 'm.npz':{'a':np.ones(i)}, 'cls':'ab'[i%2]} for i in range(9)]
    store,report = put(tmp_path/'d', source, shuffle=False, vocab=['b','a'])
    sound(tmp_path/'d')
    assert report.failed==0
    for got,want in zip(store[:], source, strict=True):
        assert np.array_equal(got['npy'], want['npy']) and got['npy'].dtype==want['npy'].dtype
        assert np.array_equal(got['m.npz']['a'], want['m.npz']['a'])
        for field in want.keys()-{'npy','m.npz'}: assert got[field]==want[field], field
    contents = {name:o for name,_,o in members(tmp_path/'d/shard-000000.tar')}
    found = {name.partition('.')[2]:o for name,o in contents.items() if name.startswith('000000003.')}
    assert found['title'].decode()=='Ünï 3\n' and found['w.i2.json']==b'-3' and found['bin']==b'\0\1\2'
    assert json.loads(found['json'])=={'k':[3,None]} and found['cls']==b'0'   # its code: the labels were given

# --- sizes of shards

@examples(25)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=60), st.integers(3000, 30_000), st.integers(1, 20),
       st.sampled_from([None,1,7,64]), st.booleans(), st.integers(0, 60))
def test_limits_of_shards_hold(tmp_path_factory, sizes, maxsize, maxcount, chunk, stream, cut):
    "Whatever the sizes of samples, splits and chunks"
    d = tmp_path_factory.mktemp('limits')/'d'
    source = [{'bin':bytes(size), 'cls':i%3, 'id':i} for i,size in enumerate(sizes)]
    parts = {'a':source[:cut], 'b':source[cut:]}
    if stream: parts = {k:iter(v) for k,v in parts.items()}
    store,_ = put(d, parts, maxsize=maxsize, maxcount=maxcount, chunk=chunk, shuffle=False)
    sound(d, maxsize, maxcount)
    assert values(store, 'id')==list(range(len(sizes)))
    assert [len(o) for o in store.get_many(range(len(store)), 'bin')['bin']]==sizes
    shutil.rmtree(d.parent)

@pytest.mark.parametrize('n,size,maxsize', [(1000,300,100_000), (300,3000,200_000), (600,10,1e8)])
def test_shards_are_alike_in_size(tmp_path, n, size, maxsize):
    source = [{'bin':random.Random(i).randbytes(size)} for i in range(n)]
    put(tmp_path/'d', iter(source), maxsize=maxsize, chunk=n//2)
    table = sound(tmp_path/'d', maxsize).shards
    for start in 0,n//2:
        sizes = [int(table.size[u]) for u in range(len(table)) if start<=table.starts[u]<start+n//2]
        assert min(sizes)>.7*max(sizes), sizes
    put(tmp_path/'e', source, maxsize=maxsize)
    table = sound(tmp_path/'e', maxsize).shards
    assert len(table)>=min(8, n//64) and table.size[:-1].min()>.7*table.size.max()
    put(tmp_path/'f', [{'cls':f'{i%4}'*3000} for i in range(60)], maxsize=20_000)
    sound(tmp_path/'f', 20_000)   # labels take the bytes that they take

@examples(30)
@given(st.lists(st.lists(st.booleans(), max_size=25), min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 9),
       st.booleans(), st.booleans())
def test_samples_that_fail_leave_no_gaps(tmp_path_factory, parts, chunk, maxcount, shuffle, stream):
    "Whatever fails, of a chunk, of a split: numbers are dense, splits right, failures named"
    d = tmp_path_factory.mktemp('gaps')/'d'
    ok = [o for part in parts for o in part]
    def row(i): return {'txt':f'sample {i}', 'id':i, 'cls':f'c{i%3}', 'labels':[f'l{i%2}']}
    def fn(i):
        if not ok[i]: raise ValueError(f'no {i}')
        return row(i)
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    ranges = {f's{k}':range(start, stop) for k,(start,stop) in enumerate(zip(ends, ends[1:]))}
    source = {split:iter(o) if stream else list(o) for split,o in ranges.items()}
    if not any(ok):
        with pytest.raises((IngestError,ValueError), match='none of the|is empty'): put(d, source, fn, chunk=chunk)
        assert not d.exists() or names(d)==[]
    else:
        store,report = put(d, source, fn, chunk=chunk, shuffle=shuffle, maxcount=maxcount, max_failed=1.)
        sound(d, maxcount=maxcount)
        found,end = values(store, 'id'),0
        good = [i for i,o in enumerate(ok) if o]
        for split,(start,stop) in store.splits.items():
            got = found[start:stop]
            assert start==end and (sorted(got) if shuffle else got)==[i for i in ranges[split] if ok[i]]
            end = stop
        assert list(store.splits)==list(ranges) and len(found)==len(good)==report.written
        assert store[:]==[row(i) for i in found] and report.failed==len(ok)-len(good)
        assert store.class_counts()=={c:sum(f'c{i%3}'==c for i in good) for c in sorted({f'c{i%3}' for i in good})}
        assert store.manifest.vocab['labels']==sorted({f'l{i%2}' for i in good})
        failed = sorted(f'ValueError: no {i}' for i,o in enumerate(ok) if not o)
        assert sorted(why for _,why in store.failures())==failed
    shutil.rmtree(d.parent)

# --- the same again, and in place of another

def test_another_run_writes_the_same_bytes(tmp_path, images):
    "With another number of workers, too"
    def fn(o):
        if o['path'].endswith('7.jpg'): raise ValueError('not this one')
        return shrink(20)(o)
    for num_workers in 1,2:
        source = image_samples(images, label=lambda p: p.parent.name, path=True)
        options = dict(chunk=8, maxsize=12_000, splits={'train':None, 'valid':.2})
        put(tmp_path/f'{num_workers}'/'d', source, fn, num_workers=num_workers, **options)
    first = seen(tmp_path/'1'/'d')
    assert len(first)>20 and seen(tmp_path/'2'/'d')==first

def stops_at_60(i):
    if i==60: raise KeyboardInterrupt
    return {'txt':f'{i}'}

def interrupt(folder, **kwargs):
    "An ingest of 100 samples, in chunks of 8, that is interrupted at sample 60"
    with pytest.raises(KeyboardInterrupt): put(folder, list(range(100)), stops_at_60, shuffle=False, chunk=8, **kwargs)

def test_a_dataset_is_replaced_only_if_asked_and_as_a_whole(tmp_path):
    d = tmp_path/'d'
    put(d, items('a'), chunk=16)
    before = files(d)
    with pytest.raises(StoreExists, match=r'd: a dataset is there already \(60 samples.*overwrite=True'):
        put(d, items('b'))
    with pytest.raises(IngestError): put(d, [{'txt':3}]*20, overwrite=True)
    with pytest.raises(IngestError): put(d, list(range(20)), lambda i: 1//0, overwrite=True)
    interrupt(d, overwrite=True)
    assert len(values(ShardStore(d), 'txt'))==60
    ShardStore.abandon(d)
    assert files(d)==before
    for generation,word in enumerate('bcd', 2):
        store,_ = put(d, items(word, 48+generation), overwrite=True)
        sound(d)
        assert store.manifest.generation==generation and {o.split()[0] for o in values(store, 'txt')}=={word}
        assert store.shards.name(0)==f'shard{generation}-000000.tar'

@pytest.mark.parametrize('end', [ShardStore.abandon,ShardStore.delete])
def test_an_ingest_that_ends_while_it_is_abandoned_keeps_its_dataset(tmp_path, end, monkeypatch):
    "What is to be removed is read when nobody else can write any more; a dataset is deleted whole"
    d,take = tmp_path/'d',FolderLock.take
    interrupt(d)
    def commit_first(self, *args):
        monkeypatch.undo()
        ShardStore.abandon(d)
        put(d, items('a'))
        take(self, *args)
    monkeypatch.setattr(FolderLock, 'take', commit_first)
    if end==ShardStore.abandon:
        with pytest.raises(StoreNotFound, match='no unfinished ingest'): end(d)
        sound(d)
    else:
        end(d)
        assert not d.exists()

@pytest.mark.parametrize('old', [False,True])
def test_shards_of_a_damaged_plan_stay_whole(tmp_path, old):
    "`abandon` warns of them, and they keep the indices by which they are known as ours; a dataset stays as it is"
    for k,plan in enumerate(('{"n": 4', '', '{"generation": 1, "prefix": "shard2", ')):
        d = tmp_path/f'{k}'
        if old: put(d, items('a'))
        interrupt(d, overwrite=old)
        before = names(d)
        (d/'.ingest/plan.json').write_text(plan)
        with pytest.warns(UserWarning, match='these stay: shard'): ShardStore.abandon(d)
        assert names(d)==[name for name in before if not name.startswith('.ingest')]
        if old: assert len(ShardStore(d))==60

def test_records_that_do_not_count_are_left_out(tmp_path):
    "One half written, those beyond the 13 chunks of the plan, and one that is damaged, in the name of its checksum"
    d,ingest = tmp_path/'d',SimpleNamespace(is_interrupted=True)   # only its type belongs to the fingerprint of fn
    def fn(i):
        if i==60 and ingest.is_interrupted: raise KeyboardInterrupt
        return {'txt':f'{i}'}
    def write(): return put(d, list(range(100)), fn, shuffle=False, chunk=8)
    with pytest.raises(KeyboardInterrupt): write()
    n = ShardStore.unfinished(d)[0]['chunks']
    (d/'.ingest/chunk-000090.json.123.part').write_text('{')
    assert ShardStore.unfinished(d)[0]['chunks']==n>0
    for number in 13,999: shutil.copy(d/'.ingest/chunk-000001.json', d/f'.ingest/chunk-{number:06}.json')
    record = d/'.ingest/chunk-000000.json'
    record.write_bytes(re.sub(rb'"ok": \d+', b'"ok": 5', record.read_bytes()).replace(b',"crc":', b',"crb":'))
    assert b'"ok": 5' in record.read_bytes()
    ingest.is_interrupted = False
    store,report = write()
    assert report.written==len(store)==100 and values(store, 'txt')==[f'{i}' for i in range(100)]
    assert not store.verify(num_workers=1).bad

def test_a_commit_without_all_chunks_leaves_no_failures_behind(tmp_path):
    "It can be repeated when they are written"
    fields = {'txt':{'codec':'txt', 'dtype':None}, 'txt.crc':{'codec':'crc', 'dtype':'u4'}}
    writer = ShardWriter(Storage(tmp_path/'d'))
    writer.begin(dict(n=4, chunk=2, fields=fields, splits=None, vocab={}, signature='s', stats=None))
    def write(chunk):
        one,number = writer.opener()(),2*chunk
        one.put(np.array([number]), {'txt':[b'a'], 'txt.crc':np.array([zlib.crc32(b'a')], np.uint32)})
        one.done(chunk, dict(ok=1, bytes=1, failed=1, gaps=[number+1]), [(f'sample {number+1}','bad')])
    write(0)
    with pytest.raises(StoreError, match='1 chunks are not written'): writer.commit()
    assert not [name for name in names(tmp_path/'d') if 'failures' in name]
    write(1)
    writer.commit()
    writer.close()
    store = ShardStore(tmp_path/'d')
    assert list(store.failures())==[('sample 1','bad'),('sample 3','bad')] and not store.verify(num_workers=1).bad

@pytest.mark.parametrize('what', ['abandon','delete','overwrite'])
def test_what_a_finished_ingest_has_left_is_no_unfinished_one(tmp_path, what):
    "It died when all was visible, and nothing of the dataset goes with its plan and records"
    d = tmp_path/'d'
    put(d, items('a'), chunk=16)
    (d/'.ingest').mkdir()
    plan = dict(signature='s', n=60, chunk=16, fields={}, splits=None, vocab={}, generation=1, prefix='shard')
    (d/'.ingest/plan.json').write_text(json.dumps(plan))
    (d/'.ingest/chunk-000003.json').write_text('{}')
    if what=='delete':
        ShardStore.delete(d)
        assert names(d)==[]
        return
    if what=='abandon':
        with pytest.raises(StoreNotFound, match='no unfinished ingest'): ShardStore.abandon(d)
    else:
        for word in 'bc':
            with pytest.raises(KeyboardInterrupt):
                put(d, items(word), overwrite=True, chunk=8, progress=interrupted_after(4))
    assert sorted(values(ShardStore(d), 'id'))==list(range(60))
    put(d, items('d'), overwrite=True)
    sound(d)

# --- readers, and others who write

@pytest.mark.parametrize('delete', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_readers_of_a_dataset_that_is_replaced_get_the_old_or_the_new_one(tmp_path, delete):
    "Also if it is deleted and written anew; or a clear error, and never some of both"
    d = tmp_path/'d'
    def write(word, n):
        if delete and d.exists(): ShardStore.delete(d)
        rows = [{'txt':f'{word} {i}', 'cls':f'{word}{i%3}', 'w.i4':ord(word)} for i in range(n)]
        put(d, rows, overwrite=not delete, chunk=32)
    write('a', 200)
    stop,got,errors = threading.Event(),set(),[]
    def read(held):
        rng = random.Random(0)
        while not stop.is_set():
            try:
                store = ShardStore(d) if held is None else held
                if rng.random()<.1: store = pickle.loads(pickle.dumps(store))   # has none of its shards open
                values = store.get_many(rng.sample(range(len(store)), 20), ['txt','cls','w.i4'], check=True)
                words = {o.decode()[0] for o in values['txt']} | {store.vocab[c][0] for c in values['cls']}
                words |= {chr(w) for w in values['w.i4']}
                if len(words)!=1: errors.append(words)
                got.add((held is not None, *words))
            except StoreNotFound as e:
                if not re.search('replaced|no dataset here', str(e)): errors.append(e)
                got.add('error')
            except Exception as e: errors.append(e)
    threads = [threading.Thread(target=read, args=(held,), daemon=True) for held in (None,ShardStore(d))]
    for thread in threads: thread.start()
    def wait(o): wait_for(lambda: o in got or errors)
    wait((True,'a'))
    for word,n in (('b',200),('c',300),('d',200)):
        write(word, n)
        wait((False,word))
    wait('error')
    stop.set()
    for thread in threads: thread.join()
    assert not errors, errors[:3]
    assert {(True,'a'),(False,'d'),'error'}<=got and {o for o in got if o[0] is True}=={(True,'a')}
    sound(d)

def test_a_reader_that_has_the_shards_open_reads_on_after_they_are_gone(tmp_path):
    old,_ = put(tmp_path/'d', items('a', 200), chunk=64)
    want = old[:]
    put(tmp_path/'d', items('b'), overwrite=True)
    assert old[:]==want
    with pytest.raises(StoreNotFound, match='d: replaced since it was opened'): pickle.loads(pickle.dumps(old))[0]
    ShardStore.delete(tmp_path/'d')
    assert old[:]==want

def test_locks_of_the_living_are_kept(tmp_path):
    "Also one of another machine within its lease; one of the dead, or run out, or torn, is not"
    now = time.time()
    for entries in {},dict(host='elsewhere'):
        lock(tmp_path/'d', **entries)
        with pytest.raises(StoreBusy, match=rf'd: process {os.getppid()} on .* is writing here now'):
            put(tmp_path/'d', items('a'))
        with pytest.raises((StoreBusy,StoreNotFound)): ShardStore.delete(tmp_path/'d')
    ended = dict(pid=dead()),dict(host='elsewhere', time=now-40),dict(time=now-40)   # the last number is another's now
    for k,entries in enumerate((*ended, {})):
        lock(tmp_path/f'{k}', **entries)
        if not entries: (tmp_path/f'{k}/.ingest/lock.json').write_text('{"host":')
        put(tmp_path/f'{k}', items('a'))
        sound(tmp_path/f'{k}')

def test_a_lock_that_is_taken_again_is_renewed(tmp_path, monkeypatch):
    "Also if it was lost the first time"
    monkeypatch.setattr(folder_lock, 'LEASE_SECONDS', .3)
    mine = FolderLock(Storage(tmp_path))
    mine.take()
    with mine.exclusive():
        mine.storage.write(folder_lock.LOCK_FILE, seal_json(dict(host='x', pid=1, id='other', time=0.)))
    wait_for(lambda: mine.lost)
    mine.close()
    for _ in range(2):
        mine.take()
        wait_for(lambda: (mine.holder() or {}).get('beat', 0)>2)
        mine.check()
        mine.close()
        assert mine.holder() is None

@pytest.mark.parametrize('error', [KeyboardInterrupt,StoreUnavailable])
def test_a_lock_that_could_not_be_taken_excludes_nobody(tmp_path, error, monkeypatch):
    "Whichever call to the storage has failed, also one after its file was written"
    call = Storage.call
    for k in range(1, 9):
        d,left = tmp_path/f'{k}',[k]
        def fail_once(self, *args, **kwargs):
            left[0] -= 1
            if not left[0]: raise error('no answer')
            return call(self, *args, **kwargs)
        with monkeypatch.context() as m:
            m.setattr(Storage, 'call', fail_once)
            try: put(d, items('a'))
            except error: assert left[0]<=0
            else: continue   # an error that does not matter
        assert not (d/'.ingest/lock.json').exists(), k
        put(d, items('a'), overwrite=True)
        sound(d)

def test_a_lock_that_its_process_released_and_could_not_remove_ends_with_its_lease(tmp_path, monkeypatch):
    "The process lives on; while it renews the lock, it is at work"
    monkeypatch.setattr(folder_lock, 'LEASE_SECONDS', .3)
    now,start = time.time(),process_state(os.getppid())[0]
    mine = FolderLock(Storage(tmp_path/'d'))
    lock(tmp_path/'d', beat=1, start=start, time=now-1)
    mine.take()
    mine.close()
    lock(tmp_path/'d', beat=1, start=start, time=now+60)   # before the clock was set
    assert not mine.is_running(mine.holder())
    other = FolderLock(mine.storage)
    other.take()
    monkeypatch.setattr(folder_lock, 'LEASE_SECONDS', 3)
    monkeypatch.setattr(folder_lock, 'host_id', lambda: 'elsewhere')
    with pytest.raises(StoreBusy, match='is writing here now'): mine.take()
    other.close()

def test_a_process_forked_while_a_file_is_published_does_not_keep_the_folder_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, 'LEASE_SECONDS', .2)
    mine = FolderLock(Storage(tmp_path))
    read,write = os.pipe()
    with mine.exclusive(create=True):
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

def test_of_two_that_come_at_the_same_moment_one_has_the_lock(tmp_path, monkeypatch):
    "Whenever the other one comes while the first takes that of a dead process"
    monkeypatch.setattr(folder_lock, 'LEASE_SECONDS', .2)
    call = Storage.call
    for k in range(1, 6):
        locks,left,held = [FolderLock(Storage(tmp_path/f'{k}')) for _ in range(2)],[k],[]
        lock(tmp_path/f'{k}', pid=dead())
        def take(one):
            try: one.take()
            except StoreBusy: return
            held.append(one)
        def other_comes(self, *args, **kwargs):
            try: return call(self, *args, **kwargs)
            finally:
                left[0] -= 1
                if not left[0]: take(locks[1])
        with monkeypatch.context() as m:
            m.setattr(Storage, 'call', other_comes)
            take(locks[0])
        assert len(held)==1, k
        held[0].check()
        for one in locks: one.close()

def test_a_process_that_slept_while_another_took_over_stops(tmp_path, monkeypatch):
    "and writes nothing into what the other has"
    lost = SimpleNamespace(at=34)   # only its type belongs to the fingerprint of fn
    def fn(o):
        if o['id']==lost.at: lock(tmp_path/'d', id='other')
        return o
    def write(): return put(tmp_path/'d', items('a'), fn, shuffle=False, chunk=16)
    with pytest.raises(StoreBusy, match='the lock was lost'): write()
    with pytest.raises(StoreNotFound): ShardStore(tmp_path/'d')
    assert 'shard-000002.tar' not in names(tmp_path/'d')
    lock(tmp_path/'d', pid=dead())
    lost.at = -1
    assert write()[1].resumed==32
    sound(tmp_path/'d')

# --- places

def test_names_of_folders(tmp_path):
    "Folders of all names, those in them too; also as a `Path`, with a slash at the end, as a file URL"
    for name in 'with space','ünï-日本','dots.in.name','a/b/c','[1] (x) {a,b}?*/in':
        put(str(tmp_path/name)+'/', items('a'), chunk=16)
        sound(tmp_path/name)
        urls = [f'file://{tmp_path/name}'] if '?' not in name else []
        for folder in (tmp_path/name, str(tmp_path/name)+'/', Storage(tmp_path/name), *urls):
            assert sorted(values(ShardStore(folder), 'id'))==list(range(60))

def test_the_name_of_a_dataset_is_that_of_its_folder(tmp_path):
    "A question mark is a letter, except in URLs of the web; no dataset may have such a name"
    for url,name in (
        ('/data/a?b','a?b'), ('/data/a#b/','a#b'), ('a?b','a?b'), ('/x?y/a','a'), ('file:///data/a?b','a?b'),
        ('s3://bucket/a?b','a?b'), ('memory://a#b','a#b'), ('https://host/d/a?signature=x','a'),
        ('https://host/a/?x=b/c#d','a'), ('simplecache::https://host/a?x=b','a')): assert Storage(url).name==name
    with pytest.raises(ValueError, match=r"'a\?b' cannot name a dataset"): put(tmp_path/'a?b', items('a'))
    tar(tmp_path/'c?d/0.tar', [('0.txt', b'a')])
    with pytest.raises(ValueError, match=r"'c\?d' cannot name a dataset"): index(tmp_path/'c?d')

def test_a_relative_path_is_that_of_the_caller_and_a_tilde_is_home(tmp_path, monkeypatch):
    "In workers with another working directory too"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HOME', str(tmp_path/'home'))
    leader = os.getpid()
    def fn(o):
        if os.getpid()!=leader: os.chdir('/')
        return o
    put('rel/d', items('a'), fn, num_workers=2, chunk=8)
    put('~/d', items('a'))
    store = ShardStore('rel/d')
    os.chdir('/')
    for o in sound(tmp_path/'rel/d'),sound(tmp_path/'home/d'),store: assert len(values(o, 'id'))==60

def test_a_timeout_beside_a_storage_is_refused(tmp_path):
    "It has its own, as it has its own options"
    storage = Storage(tar(tmp_path/'w/0.tar', [('0.txt', b'a')]).parent, timeout=7)
    for call in (lambda: to_shards([1], Storage(tmp_path/'d'), timeout=5), lambda: index_shards(storage, timeout=5),
                 lambda: ShardStore(storage, timeout=5)):
        with pytest.raises(TypeError, match='timeout: a Storage has its own'): call()
    with pytest.raises(TypeError, match='storage_options: a Storage has its own'):
        index_shards(storage, storage_options={'a':1})
    assert index_shards(storage, **ONE).written==1

@pytest.fixture
def mount(tmp_path):
    "Mounts a small tmpfs, or part of a folder read-only"
    done = []
    def call(d, *args):
        d.mkdir(exist_ok=True)
        if subprocess.run(['mount', *args, str(d)], capture_output=True).returncode: pytest.skip('may not mount')
        done.append(d)
        return d
    yield call
    for d in reversed(done): subprocess.run(['umount', '-l', str(d)])

@pytest.mark.parametrize('num_workers', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_full_disk_is_an_error_and_with_more_room_the_same_call_goes_on(tmp_path, mount, num_workers):
    "Told beforehand where that can be known, `StoreFull` if it happens; nothing is visible"
    d = mount(tmp_path/'small', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs')
    def rows(big):
        sizes = [20_000 if i>=big else 20 for i in range(100)]
        return [{'bin':random.Random(i).randbytes(size), 'cls':f'c{i%3}'} for i,size in enumerate(sizes)]
    message = r'd: 100 samples take about .* repeat the same call to go on, or ShardStore.abandon'
    with pytest.raises(StoreFull, match=message): put(d/'d', rows(0), chunk=10, num_workers=num_workers)
    ShardStore.abandon(d/'d')
    def write(folder): return put(folder/'d', rows(30), shuffle=False, chunk=10, num_workers=num_workers)
    # the leader may notice it before a worker does
    how = 'No space left on device' if num_workers==1 else '(No space left on device|has .* left of 1.0 MB)'
    with pytest.raises(StoreFull, match=f'd: .*{how}.*Nothing of it is visible; make room and repeat'): write(d)
    with pytest.raises(StoreNotFound): ShardStore(d/'d')
    assert not [name for name in names(d) if name.endswith('.part')]
    subprocess.run(['mount', '-o', 'remount,size=9m', str(d)], check=True)
    report = write(d)[1]
    assert report.resumed>=30 and report.written==100
    sound(d/'d')
    write(tmp_path/'plain')
    assert seen(tmp_path/'plain'/'d')==seen(d/'d')

def test_a_folder_that_cannot_be_written_to_says_so(tmp_path, mount):
    "One can read there, and index into another"
    d = tar(tmp_path/'ro/a.tar', [(f'{i}.txt', b'%d' % i) for i in range(9)]).parent
    mount(d, '--bind', str(d))
    subprocess.run(['mount', '-o', 'remount,bind,ro', str(d)], check=True)
    for call in lambda: put(d/'d', items('a')),lambda: index(d):
        with pytest.raises(StoreUnavailable, match='ro.*[Rr]ead-only'): call()
    store,_ = index(d, tmp_path/'beside')
    assert values(store, 'txt')==[f'{i}' for i in range(9)]
    assert names(tmp_path/'beside')==['a.tar.fastai_remote','manifest.json']

# --- others read ours

def test_the_tar_of_the_system_reads_ours(tmp_path):
    store,_ = put(tmp_path/'d', items('a', 30), chunk=16, shuffle=False)
    if not shutil.which('tar'): pytest.skip('no tar')
    def run(*args): return subprocess.run(['tar', *map(str, args)], capture_output=True, text=True, check=True)
    listed = run('tf', tmp_path/'d/shard-000001.tar')
    assert listed.stderr=='' and listed.stdout.split()[:4]==[
        '000000016.txt','000000016.cls.txt','000000016.labels','000000016.id']
    (tmp_path/'x').mkdir()
    for u in range(2): run('xf', tmp_path/f'd/shard-{u:06}.tar', '-C', tmp_path/'x')
    for field,ext in ('txt','txt'),('cls','cls.txt'):
        assert [(tmp_path/f'x/{i:09}.{ext}').read_text() for i in range(30)]==values(store, field)

def test_webdataset_reads_ours(tmp_path, images):
    "Labels are numbers where the vocabulary was known, and text otherwise; shards have names for its braces"
    for folder,vocab in (tmp_path/'a',None),(tmp_path/'b',['cat','bird','dog']):
        store,_ = put(folder, image_samples(images, label=class_of), vocab=vocab, chunk=8)
        last = len(store.shards)-1
        tars = webdataset.WebDataset(f'{folder}/shard-{{000000..{last:06}}}.tar', shardshuffle=False).decode('pil')
        got = list(tars.to_tuple('jpg', 'cls' if vocab else 'cls.txt', '__key__'))
        assert len(got)==60
        for i,(image,label,key) in enumerate(got):
            assert np.array_equal(np.asarray(image), np.asarray(store[i]['jpg'].convert('RGB')))
            assert (vocab[label] if vocab else label)==store[i]['cls'] and key==f'{i:09}'

# --- what is read, from where

@pytest.fixture(scope='module')
def partial(tmp_path_factory):
    "Four tars of ten samples, of which those of the first two have notes; two texts and a label were changed since"
    folder = tmp_path_factory.mktemp('partial')/'d'
    for shard in range(4):
        numbers = range(10*shard, 10*shard+10)
        found = [(i, 'txt', f'text {i}') for i in numbers]+[(i, 'cls', str(i%3)) for i in numbers]
        if shard<2: found += [(i, 'note.txt', f'note {i}') for i in numbers]
        tar(folder/f'{shard}.tar', [(f'{i:03}.{ext}', text.encode()) for i,ext,text in sorted(found)])
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
@examples(40)
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
    folder,memory = Path(shutil.copytree(partial.local, tmp_path/'d')),fsspec.filesystem('memory')
    name = ShardStore(folder).index_file(2)
    (folder/name).unlink()
    memory.put(str(folder), f'/{tmp_path.name}', recursive=True)
    message = rf'{re.escape(name)}, the index of shard 2.tar.*samples 20 to 29.*is not there'
    for url in folder,f'memory://{tmp_path.name}':
        with pytest.raises(MissingSample, match=message): ShardStore(url, cache=None).get_many([25], 'txt')
    memory.rm(f'/{tmp_path.name}', recursive=True)
    (folder/'1.tar').unlink()
    with pytest.raises(MissingSample, match='shard 1.tar is not there, with samples 10 to 19'):
        ShardStore(folder, cache=None).get_many([12], 'txt')

def test_an_unpickled_store_is_complete(partial):
    store = ShardStore(partial.local, cache=None)
    for call in (
        lambda s: s.in_place(0), lambda s: s.index_file(0), lambda s: s.check_cache(1, 1), lambda s: s.keys([0]),
        lambda s: s.indices([0])[0].n, lambda s: s.local_index(0).n, lambda s: s.manifest_crc, lambda s: s.tars.url,
        lambda s: len(s.table), lambda s: str(s.missing_shard_error(0)), lambda s: s.cache_key('a'),
        lambda s: s.location(0, 'txt'), lambda s: s.cache is None, lambda s: s.whole_shards.get(0) is None,
        lambda s: s.check_not_replaced(), lambda s: len(s.manifest_bytes()), lambda s: len(list(s.failures()))):
        assert call(pickle.loads(pickle.dumps(store)))==call(store)

def test_shuffle_quality_where_only_some_samples_have_labels(tmp_path):
    for shard in range(2):
        found = [(i, ext) for i in range(20*shard, 20*shard+20) for ext in ('cls','txt') if ext=='txt' or i%4]
        tar(tmp_path/f'{shard}.tar', [(f'{i:03}.{ext}', b'%d' % (i%3)) for i,ext in found])
    store,_ = index(tmp_path)
    assert store.may_lack('cls')
    for options in {},{'field':'cls'},{'field':'cls?'}:
        assert .5<store.shuffle_quality(bs=4, interleave=None, **options).labels<2

# --- files of earlier formats, for ever, and hostile ones

def golden(i, version):
    "Sample i of `tests/data/shards-v1` or `shards-v2`, which were written once and are never written again"
    pixels = (np.arange(48).reshape(4, 4, 3)*(i+1)%256).astype(np.uint8)
    row = {'png':pixels, 'cls':['ant','bee','cow'][i%3], 'kind.cls':['ä','b b','c'][i%3], 'txt':f'Nummer {i} ✓',
           'id':-i<<40}
    return row if version==1 else {**row, 'code.cls':[-7,300][i%2], 'target.f4':i/4}

@pytest.mark.parametrize('version', [1,2])
def test_shards_of_earlier_versions_are_read(version):
    "Every value of them; of the second version, checksums of all files and integer labels"
    folder = DATA/f'shards-v{version}'
    store = ShardStore(folder)
    vocab = {'cls':['ant','bee','cow'], 'kind.cls':['b b','ä'], **({'code.cls':[-7,300]} if version==2 else {})}
    assert (len(store),store.splits,store.manifest.vocab)==(4,{'train':[0,2], 'valid':[2,4]},vocab)
    assert (store.fields,store.manifest.format)==(list(golden(0, version)),version)
    assert list(store.failures())==[('train: item 2','ValueError: left out')] and store.shards.n.tolist()==[2,2]
    assert store.class_counts()=={'ant':2, 'bee':2, 'cow':0} and store.image_stats()['n']==4
    for o,i in zip(store[:], (0,1,3,4), strict=True):
        want = golden(i, version)
        assert np.array_equal(np.asarray(o.pop('png')), want.pop('png'))
        assert o==want and [type(v) for v in o.values()]==[type(v) for v in want.values()]
    for u in range(2):
        store.indices([u])[u].check('here')
        assert zlib.crc32((folder/store.shards.name(u)).read_bytes())==store.shards.crc[u]
    if version==2:
        assert store.manifest.counts['code.cls']==[2,2] and list(store.check_rest())==[]
        assert store.verify(num_workers=1).bad==0

@pytest.fixture
def gold(tmp_path):
    "A copy of the golden shards, to be spoilt"
    return Path(shutil.copytree(DATA/'shards-v1', tmp_path/'d'))

def reads(folder):
    "Reads all there is; only a `StoreError` may come of it"
    try:
        store = ShardStore(folder)
        if len(store)>100: store.get_many([0, len(store)-1], 'txt')
        else:
            for field in store.fields: store.get_many(range(len(store)), field)
            for i in range(len(store)): store[i]
            repr(store), store._repr_html_(), list(store.failures()), store.class_counts()
    except StoreError: pass

LIES = [
    b'', b'\0', b'{}', b'[]', b'null', b'0', b'"x"', b'['*100_000, b'{"a":'*100_000, b'fr.idx\r\n',
    b'fr.idx\r\n\xff\xff\xff\xff', b'\x80\x04\x95'+bytes(40), b'fr.idx\r\n\x10\0\0\0'+b'['*16,
    b'fr.idx\r\n'+(60_000).to_bytes(4, 'little')+b'['*60_000]

@pytest.mark.parametrize('name', ['manifest.json','shard-000000.idx'])
def test_what_is_no_manifest_and_what_is_no_index_is_refused(gold, name):
    class Evil:
        def __reduce__(self): return os.system,(f'touch {gold}/run',)
    errors = CorruptSample,UnsupportedFormat,StoreNotFound
    for content in (*LIES, pickle.dumps(Evil())):   # a pickle is bytes
        (gold/name).write_bytes(content)
        with pytest.raises(errors, match='d[:/]|shards-v1: '): ShardStore(gold).get_many([0], 'txt')
    assert not (gold/'run').exists()

def head(content):
    "The header of an index of version 1, and what follows it"
    n = 12+int.from_bytes(content[8:12], 'little')
    return json.loads(content[12:n]),content[n:]

def whole(header, body):
    text = json.dumps(header).encode()
    text += b' '*(-(12+len(text))%8)
    return b'fr.idx\r\n'+len(text).to_bytes(4, 'little')+text+body

CLAIMS = [
    *({'n':n} for n in (-1,1<<62,'x',7,5,None)), *({'format':o} for o in (3,'1',[])),
    *({'columns':o} for o in ([], 5, [['txt@','u4']], [['txt@','O',0]], [['txt@','V9999999',0]], [['txt@','u4',-8]],
                              [['txt@','u4',1<<60]], [['txt@','S8',0]], [['txt@','u4',0]])),
    *({'labels':o} for o in ([], {'cls':[]}, {'kind.cls':['?']*2}, {'kind.cls':[]}, {'kind.cls':5},
                             {'kind.cls':[[1],{},None]}, {'txt':['a']}))]

def test_headers_of_an_index_that_are_well_formed_and_lie(gold):
    header,body = head((gold/'shard-000000.idx').read_bytes())
    for claim in CLAIMS:
        (gold/'shard-000000.idx').write_bytes(whole(header|claim, body))
        reads(gold)
        if 'n' in claim or 'format' in claim:
            with pytest.raises((CorruptSample,UnsupportedFormat)): ShardStore(gold).get_many([0], 'txt')

def test_an_index_that_claims_gigabytes_takes_no_memory(gold):
    header,body = head((gold/'shard-000000.idx').read_bytes())
    n = next(at for name,_,at in header['columns'] if name=='txt#')
    body = body[:n]+b'\xfe\xff\xff\xff'*2+body[n+8:]
    (gold/'shard-000000.idx').write_bytes(whole({**header, 'crc':zlib.crc32(body)}, body))
    message = r"shards-v1: sample 1, field 'txt' in shard-000000.tar.*of 4,294,967,294 bytes"
    with pytest.raises(CorruptSample, match=message): ShardStore(gold).get_many([1], 'txt')

@pytest.fixture(scope='module')
def spoilt(tmp_path_factory): return Path(shutil.copytree(DATA/'shards-v1', tmp_path_factory.mktemp('spoilt')/'d'))

packed = st.binary(max_size=9).map(lambda o: base64.b64encode(zlib.compress(o)).decode())
some_names = st.sampled_from(['txt','cls','codec','dtype','train','n','size','crc','idx','raw','text','x'])
anything = st.recursive(
    st.none()|st.booleans()|st.integers()|st.floats()|st.text(max_size=5)|packed,
    lambda o: st.lists(o, max_size=3)|st.dictionaries(some_names, o, max_size=3), max_leaves=6)

@examples(80)
@given(st.sampled_from([f for f in ShardManifest.__dataclass_fields__ if f not in ('stats','counts')]), anything)
def test_manifests_of_anything_are_errors_or_values(spoilt, key, value):
    "Any JSON in the place of any value of a manifest"
    before = (spoilt/'manifest.json').read_bytes()
    manifest = json.loads(before)
    if key=='shards' and isinstance(value, dict): value = manifest['shards'] | value
    (spoilt/'manifest.json').write_text(json.dumps(manifest | {key:value}))
    try: reads(spoilt)
    finally: (spoilt/'manifest.json').write_bytes(before)

# --- what a loader gets

def dls_of(store, bs=8, splitter=None, **kwargs):
    block = DataBlock(
        (ShardBlock('id'),ShardBlock('cls')), get_items=get_remote_items, splitter=splitter or RandomStoreSplitter(.25))
    return block.dataloaders(store, bs=bs, **{'num_workers':0, **kwargs})

def epoch(dl): return [batch[0].long().tolist() for batch in dl]
def flat(batches): return [i for batch in batches for i in batch]

@pytest.fixture(scope='module')
def numbers(tmp_path_factory):
    "300 samples in shards of many sizes, in two splits; sample i has id i"
    rows = [{'id':i, 'cls':i%3, 'txt':f'{i}'} for i in range(300)]
    splits = {'train':rows[:240], 'valid':rows[240:]}
    return put(tmp_path_factory.mktemp('numbers')/'d', splits, shuffle=False, chunk=21, maxcount=11)[0]

@examples(8)
@given(bs=st.integers(1, 90), interleave=st.integers(1, 7), drop_last=st.booleans(), by_store=st.booleans())
@example(bs=6, interleave=1, drop_last=False, by_store=True)   # a shard lies in a batch as a whole
def test_an_epoch_gives_each_sample_of_its_split_once(numbers, bs, interleave, drop_last, by_store):
    "Whatever the batches; a batch reads only as many shards as are interleaved, and those before and after"
    splitter = StoreSplitter() if by_store else RandomStoreSplitter(.3, bs)
    dls = dls_of(numbers, bs, splitter, interleave=interleave, drop_last=drop_last)
    want = [sorted(dls.train_ds.items), sorted(dls.valid_ds.items)]
    assert sorted(sum(want, []))==list(range(300)) and (not by_store or want[0]==list(range(240)))
    got = epoch(dls.train)
    if drop_last: assert len(set(flat(got)))==len(flat(got))==len(want[0])//bs*bs
    else: assert sorted(flat(got))==want[0]
    assert flat(epoch(dls.valid))==list(dls.valid_ds.items)
    shards = [np.searchsorted(numbers.shards.starts, batch, 'right') for batch in got]
    groups = -(-len(np.unique(np.concatenate(shards)))//interleave)
    assert sum(len(set(o)) for o in shards)<=interleave*(len(got)+groups-1)   # each end of a group is in one batch

@pytest.mark.parametrize('num_workers', [2, pytest.param(3, marks=pytest.mark.slow)])
def test_workers_give_each_sample_once_in_the_order_of_the_seed(numbers, num_workers):
    runs = []
    for _ in range(2):
        set_seed(3)   # loaders take theirs from it when they are made
        dls = dls_of(numbers, 16, StoreSplitter(), num_workers=num_workers, interleave=2)
        runs.append(epoch(dls.train))
    assert sorted(flat(runs[0]))==list(range(240)) and runs[0]==runs[1]!=epoch(dls.train)
    assert flat(epoch(dls.valid))==list(range(240, 300))

def texts_in_a_thread(store, numbers):
    "Reads texts in a thread, which is given up if it waits for ever"
    texts = []
    def read(): texts.extend(store.get_many([i], 'txt')['txt'][0] for i in numbers)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    wait_for(lambda: not reader.is_alive())
    return texts

def test_a_wanted_shard_stays_open_however_many_others_are_read(tmp_path):
    "More than the 64 files that are kept open are read between; a wanted shard that was closed would be waited for"
    put(tmp_path/'d', [{'txt':str(i)} for i in range(70)], maxcount=1, shuffle=False)
    store = ShardStore(tmp_path/'d', cache=str(tmp_path/'cache'))
    for shards in (list(range(70)), [0,1]):
        store.prefetch(shards, wait=True)
        wait_for(lambda: store.whole_shards.thread is None)
    order = [*range(2, 70), 0, 1]
    assert texts_in_a_thread(store, order)==[str(i).encode() for i in order] and len(store.whole_shards.files)==64

def test_nobody_waits_for_shards_if_no_thread_can_be_started(tmp_path, monkeypatch):
    put(tmp_path/'d', [{'txt':'a'}])
    store = ShardStore(tmp_path/'d', cache=str(tmp_path/'cache'))
    def start(thread): raise RuntimeError("can't start new thread")
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, 'start', start)
        with pytest.raises(RuntimeError, match="can't start"): store.prefetch([0], wait=True)
    assert texts_in_a_thread(store, [0])==[b'a']
    store.prefetch([0], wait=True)
    wait_for(lambda: 0 in store.whole_shards.files)

def test_the_size_of_the_usual_cache_does_not_ask_for_one_of_a_local_folder(numbers, tmp_path):
    "The shards would be copied into the home of the user"
    url,cache = numbers.storage.url,FileCache(str(tmp_path))
    store = ShardStore(url, cache_size=10**6)
    assert store.cache is None and store.in_place(0) and ShardStore(url, cache=cache).cache is cache
    with pytest.raises(TypeError, match='cache_size: a FileCache has its own'):
        ShardStore(url, cache=cache, cache_size=10**6)

def test_of_a_local_folder_only_compressed_shards_are_copied(tmp_path, monkeypatch):
    "A damaged copy would spoil what is whole"
    monkeypatch.setenv('FASTAI_REMOTE_CACHE', str(tmp_path/'usual'))
    for name,mode in (('a.tar','w'), ('b.tar.gz','w:gz')): tar(tmp_path/'d'/name, [('0.txt', b'')], mode)
    index(tmp_path/'d')
    store = ShardStore(tmp_path/'d', cache=True)
    store.prefetch([0,1], wait=True)
    wait_for(lambda: store.whole_shards.thread is None)
    assert store.in_place(0) and sorted(store.whole_shards.files)==[1]
    assert store.get_many([0,1], 'txt', check=True)['txt']==[b'',b'']

def test_a_cache_that_is_asked_for_is_used_for_a_local_folder_too(numbers, tmp_path):
    "It may be a slow one: shards come ahead, whole, and stay"
    store = ShardStore(numbers.storage.url, cache=str(tmp_path/'c'))
    assert sorted(flat(epoch(dls_of(store, 16, StoreSplitter()).train)))==list(range(240))
    held = wait_for(lambda: [name for name in names(tmp_path/'c') if name.endswith('.tar')])
    for name in held: assert (tmp_path/'c'/name).read_bytes()==(Path(numbers.storage.url)/Path(name).name).read_bytes()
