"What `to_shards` writes, sizes of shards, locks and places, readers, hostile files, and what a loader gets of shards"
import json, os, pickle, random, re, shutil, subprocess, threading, warnings, zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from conftest import examples, wait_for
from fastai_remote import (CorruptSample, get_remote_items, image_samples, index_shards, IngestError, ShardStore,
    shrink, StoreBusy, StoreError, StoreExists, StoreFull, StoreNotFound, StoreSplitter, StoreUnavailable, to_shards,
    UnsupportedFormat)
from fastai_remote.store.cache import FileCache
from fastai_remote.store.storage import Storage
from fastai_remote.testing import ManualClock
from fastai_remote.write.base import process_state
from fastai_remote.write.folder_place import FolderLock
from pets import ids, loaders
from shard_helpers import (
    change_manifest, files, index, interrupted_after, items, lock, names, put, seen, sound, tar, values)

# --- sizes of shards

@pytest.mark.slow
@examples(35)
@given(parts=st.lists(st.lists(st.integers(-2000, 5000), max_size=25), min_size=1, max_size=4),
       maxsize=st.integers(3000, 30_000), maxcount=st.integers(1, 20), chunk=st.sampled_from([None,1,7,64]),
       shuffle=st.booleans(), stream=st.booleans())
def test_limits_hold_and_samples_that_fail_leave_no_gaps(
        tmp_path_factory, parts, maxsize, maxcount, chunk, shuffle, stream):
    "Whatever the sizes of samples (negative: they fail), of splits and chunks: splits are right, failures named"
    d,sizes = tmp_path_factory.mktemp('limits')/'d',sum(parts, [])
    def fn(i):
        if sizes[i]<0: raise ValueError(f'no {i}')
        return {'bin':bytes(sizes[i]), 'id':i, 'cls':f'c{i%3}', 'labels':[f'l{i%2}']}
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    ranges = {f's{k}':range(start, stop) for k,(start,stop) in enumerate(zip(ends, ends[1:]))}
    source = {split:iter(o) if stream else list(o) for split,o in ranges.items()}
    options = dict(maxsize=maxsize, maxcount=maxcount, chunk=chunk, shuffle=shuffle, max_failed=1.)
    good = [i for i,size in enumerate(sizes) if size>=0]
    if good:
        store,report = put(d, source, fn, **options)
        sound(d, maxsize, maxcount)
        found = values(store, 'id')
        assert list(store.splits)==list(ranges) and len(found)==len(good)==report.written
        for split,(start,stop) in store.splits.items():
            got = found[start:stop]
            assert (sorted(got) if shuffle else got)==[i for i in ranges[split] if i in good]
        assert store[:]==[fn(i) for i in found] and report.failed==len(sizes)-len(good)
        assert store.class_counts()=={c:sum(f'c{i%3}'==c for i in good) for c in sorted({f'c{i%3}' for i in good})}
        assert store.manifest.vocab['labels']==sorted({f'l{i%2}' for i in good})
        failed = sorted(f'ValueError: no {i} (fn was given: int)' for i,size in enumerate(sizes) if size<0)
        assert sorted(why for _,why in store.failures())==failed
    else:
        with pytest.raises((IngestError,ValueError), match='none of the|is empty'): put(d, source, fn, **options)
        assert not d.exists() or names(d)==[]
    shutil.rmtree(d.parent)

@pytest.mark.parametrize('n,size,maxsize', [(1000,300,100_000), (300,3000,200_000), (600,10,1e8)])
def test_shards_are_alike_in_size(tmp_path, n, size, maxsize):
    source = [{'bin':random.Random(i).randbytes(size)} for i in range(n)]
    put(tmp_path/'stream', iter(source), maxsize=maxsize, chunk=n//2)
    table = sound(tmp_path/'stream', maxsize).shards
    for start in 0,n//2:
        sizes = table.size[(start<=table.starts[:-1]) & (table.starts[:-1]<start+n//2)]
        assert sizes.min()>.7*sizes.max()
    put(tmp_path/'list', source, maxsize=maxsize)
    table = sound(tmp_path/'list', maxsize).shards
    assert len(table)>=min(8, n//64) and table.size[:-1].min()>.7*table.size.max()

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

def interrupt(folder, **kwargs):
    "An ingest of 100 samples, in chunks of 8, which is interrupted after seven chunks"
    with pytest.raises(KeyboardInterrupt):
        put(folder, items('z', 100), chunk=8, shuffle=False, progress=interrupted_after(7), **kwargs)

def test_an_ingest_that_ends_while_it_is_abandoned_keeps_its_dataset(tmp_path, monkeypatch):
    "What is to be removed is read when nobody else can write any more"
    interrupt(tmp_path/'d')
    take = FolderLock.take
    def commit_first(self, *args):
        monkeypatch.undo()
        put(tmp_path/'d', items('z', 100), chunk=8, shuffle=False)
        take(self, *args)
    monkeypatch.setattr(FolderLock, 'take', commit_first)
    with pytest.raises(StoreNotFound, match='no unfinished ingest'): ShardStore.abandon(tmp_path/'d')
    assert len(sound(tmp_path/'d'))==100

@pytest.mark.parametrize('old', [False,True])
def test_shards_of_a_damaged_plan_stay_whole(tmp_path, old):
    "`abandon` warns of them, and they keep the indices by which they are known as ours; a dataset stays as it is"
    if old: put(tmp_path/'d', items('a'))
    interrupt(tmp_path/'d', overwrite=old)
    before = names(tmp_path/'d')
    for plan in '{"n":"1"}','{"n":1,"chunk":0,"generation":1,"prefix":"shard"}','{"generation":1, "prefix":"shard2", ':
        (tmp_path/'d/.fastai_remote/.ingest/plan.json').write_text(plan)
        for call in lambda: ShardStore.unfinished(tmp_path/'d'),lambda: put(tmp_path/'d', items('a')):
            with pytest.raises(StoreError, match='plan.json, is damaged: .*ShardStore.abandon'): call()
    with pytest.warns(UserWarning, match='these stay: shard'): ShardStore.abandon(tmp_path/'d')
    assert names(tmp_path/'d')==[name for name in before if '/.ingest' not in name]
    if old: assert len(ShardStore(tmp_path/'d'))==60

def test_a_dataset_replaces_another_one_and_an_ingest_with_a_damaged_plan(tmp_path):
    "Without a dataset, nobody knows whose the shards are"
    def damage():
        interrupt(tmp_path/'d', overwrite=True)
        (tmp_path/'d/.fastai_remote/.ingest/plan.json').write_text('{')
    put(tmp_path/'d', items('a'))
    damage()
    with pytest.warns(UserWarning, match='these stay: shard2-'): put(tmp_path/'d', items('b', 20), overwrite=True)
    assert len(sound(tmp_path/'d'))==20
    ShardStore.delete(tmp_path/'d')
    damage()
    before = {name:content for name,content in files(tmp_path/'d').items() if name.endswith('.tar')}
    with pytest.raises(StoreExists, match='choose another folder|Choose another folder'), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        put(tmp_path/'d', items('b', 20), overwrite=True)
    assert before and before.items()<=files(tmp_path/'d').items()

def test_records_that_do_not_count_are_left_out(tmp_path):
    "One half written, those beyond the 13 chunks of the plan, and one that is damaged, in the name of its checksum"
    interrupt(tmp_path/'d')
    ingest = tmp_path/'d/.fastai_remote/.ingest'
    n = ShardStore.unfinished(tmp_path/'d')[0]['chunks']
    (ingest/'chunk-000090.json.123.part').write_text('{')
    assert ShardStore.unfinished(tmp_path/'d')[0]['chunks']==n>0
    for number in 13,999: shutil.copy(ingest/'chunk-000001.json', ingest/f'chunk-{number:06}.json')
    record = (ingest/'chunk-000000.json').read_text()
    (ingest/'chunk-000000.json').write_text(re.sub(r'"ok":\d+', '"ok":5', record).replace('"crc":', '"crb":'))
    store,report = put(tmp_path/'d', items('z', 100), chunk=8, shuffle=False)
    assert report.resumed==8*(n-1) and values(store, 'id')==list(range(100))
    sound(tmp_path/'d')

# --- readers, and others who write

def test_a_reader_that_has_the_shards_open_reads_on_after_they_are_gone(tmp_path):
    old,_ = put(tmp_path/'d', items('a', 200), chunk=64)
    want = old[:]
    put(tmp_path/'d', items('b'), overwrite=True)
    assert old[:]==want
    with pytest.raises(StoreNotFound, match='d: replaced since it was opened'): pickle.loads(pickle.dumps(old))[0]
    ShardStore.delete(tmp_path/'d')
    assert old[:]==want

def test_the_lock_of_the_living_is_kept_and_a_torn_one_is_not(tmp_path):
    "`test_folder_locks.py` has those of the dead"
    put(tmp_path/'d', items('a'))
    lock(tmp_path/'d', beat=1, start=process_state(os.getppid())[0])
    for call in lambda: put(tmp_path/'d', items('b'), overwrite=True),lambda: ShardStore.delete(tmp_path/'d'):
        with pytest.raises(StoreBusy, match=rf'd: process {os.getppid()} on .* is writing here now'): call()
    (tmp_path/'d/.fastai_remote/.ingest/lock.json').write_text('{"host":')
    assert len(put(tmp_path/'d', items('c', 40), overwrite=True)[0])==40
    sound(tmp_path/'d')

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
        assert not (d/'.fastai_remote/.ingest/lock.json').exists(), k
        put(d, items('a'), overwrite=True)
        sound(d)

def test_a_process_forked_while_a_file_is_published_does_not_keep_the_folder_locked(tmp_path):
    mine,(read,write) = FolderLock(Storage(tmp_path)),os.pipe()
    with mine.exclusive(create=True):
        child = os.fork()
        if not child:
            os.close(write)
            os.read(read, 1)   # until the parent has tried
            os._exit(0)
    try:
        with ManualClock(), mine.exclusive() as is_exclusive: assert is_exclusive
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)

def test_of_two_that_come_at_the_same_moment_one_has_the_lock(tmp_path, monkeypatch):
    "Whenever the other one comes while the first takes that of a dead process"
    call = Storage.call
    for k in range(1, 6):
        locks,left,held = [FolderLock(Storage(tmp_path/f'{k}')) for _ in range(2)],[k],[]
        lock(tmp_path/f'{k}', beat=1, start=1)   # our parent lives, but was not started at tick 1
        def take(one):
            try: one.take()
            except StoreBusy: return
            held.append(one)
        def other_comes(self, *args, **kwargs):
            try: return call(self, *args, **kwargs)
            finally:
                left[0] -= 1
                if not left[0]: take(locks[1])
        with monkeypatch.context() as m, ManualClock():
            m.setattr(Storage, 'call', other_comes)
            take(locks[0])
        assert len(held)==1, k
        held[0].check()
        for one in locks: one.close()

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
    for call in partial(to_shards, [1], storage),partial(index_shards, storage),partial(ShardStore, storage):
        with pytest.raises(TypeError, match='timeout: a Storage has its own'): call(timeout=5)
        with pytest.raises(TypeError, match='storage_options: a Storage has its own'): call(storage_options={'a':1})

def test_a_full_disk_is_an_error_and_with_more_room_the_same_call_goes_on(tmp_path, mount):
    "Told beforehand where that can be known, `StoreFull` if it happens; nothing is visible"
    d = mount(tmp_path/'small', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs')
    def rows(big):
        sizes = [20_000 if i>=big else 20 for i in range(100)]
        return [{'bin':random.Random(i).randbytes(size), 'cls':f'c{i%3}'} for i,size in enumerate(sizes)]
    message = r'd: 100 samples take about .* repeat the same call to go on, or ShardStore.abandon'
    with pytest.raises(StoreFull, match=message): put(d/'d', rows(0), chunk=10)
    ShardStore.abandon(d/'d')
    def write(folder): return put(folder/'d', rows(30), shuffle=False, chunk=10)
    message = 'd: .*No space left on device.*Nothing of it is visible; make room and repeat'
    with pytest.raises(StoreFull, match=message): write(d)
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
    assert names(tmp_path/'beside')==['.fastai_remote','.fastai_remote/a.tar.fastai_remote','manifest.json']

# --- what is read, from where

@pytest.fixture(scope='module')
def partial_tars(tmp_path_factory):
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
def test_what_is_read_does_not_depend_on_what_was_read_before(partial_tars, tmp_path_factory, kind, reads):
    "An index is in memory, in the cache or on the server; results come in the order of the samples all the same"
    folder = partial_tars.local if kind=='local' else partial_tars.remote
    cache = str(tmp_path_factory.mktemp('cache')) if kind=='cached' else None
    store = ShardStore(folder, cache=cache)
    for name,numbers in reads:
        assert READS[name](store, numbers)==READS[name](ShardStore(folder, cache=None), numbers), name
    assert list(get_remote_items(store, having='note.txt'))==list(range(20))

def test_shuffle_quality_where_only_some_samples_have_labels(tmp_path):
    for shard in range(2):
        found = [(i, ext) for i in range(20*shard, 20*shard+20) for ext in ('cls','txt') if ext=='txt' or i%4]
        tar(tmp_path/f'{shard}.tar', [(f'{i:03}.{ext}', b'%d' % (i%3)) for i,ext in found])
    store,_ = index(tmp_path)
    assert store.may_lack('cls')
    for options in {},{'field':'cls'},{'field':'cls?'}:
        assert .5<store.shuffle_quality(bs=4, interleave=None, **options).labels<2

# --- hostile files

INDEX = '.fastai_remote/shard-000000.tar.fastai_remote'

@pytest.fixture(scope='module')
def theirs(tmp_path_factory):
    "Two shards of two samples; another one could not be stored"
    rows = [{'png':np.full((4,4,3), i, np.uint8), 'cls':'ab'[i%2], 'kind.cls':f'{i}', 'txt':f'text {i}', 'id':-i<<40,
             'code.cls':[-7,300][i%2]} for i in range(4)]
    put(folder := tmp_path_factory.mktemp('theirs')/'theirs', [*rows, {**rows[0], 'id':'bad'}], shuffle=False, chunk=2,
        maxcount=2)
    return folder

@pytest.fixture
def spoilt(theirs, tmp_path):
    "A copy, to be spoilt"
    return Path(shutil.copytree(theirs, tmp_path/'theirs'))

def test_an_index_that_is_well_formed_and_lies(spoilt):
    """A value of gigabytes takes no memory, and another format is named; all checksums match

    `regressions/test_unlimited.py` has other types in each place, and `fuzz.py` changes any bytes."""
    content = (spoilt/INDEX).read_bytes()
    end = 12+int.from_bytes(content[8:12], 'little')
    header,body = json.loads(content[12:end]),content[end:]
    n = next(at for name,_,at in header['columns'] if name=='txt#')
    body = body[:n]+b'\xfe\xff\xff\xff'*2+body[n+8:]
    message = "theirs: sample 1, field 'txt' in shard-000000.tar.*of 4,294,967,294 bytes"
    for claim,error,says in ({}, CorruptSample, message), ({'format':9}, UnsupportedFormat, '9'):
        text = json.dumps({**header, **claim, 'crc':zlib.crc32(body)}).encode()
        text += b' '*(-(12+len(text))%8)
        index = b'fr.idx\r\n'+len(text).to_bytes(4, 'little')+text+body
        (spoilt/INDEX).write_bytes(index)
        table = ShardStore(spoilt).shards
        table.idx,table.icrc = table.idx.copy(),table.icrc.copy()
        table.idx[0],table.icrc[0] = len(index),zlib.crc32(index)
        change_manifest(spoilt, shards=table.pack())
        with pytest.raises(error, match=says): ShardStore(spoilt).get_many([1], 'txt')

def test_a_manifest_that_counts_other_samples_than_its_table_is_refused(spoilt):
    change_manifest(spoilt, n=5)
    with pytest.raises(UnsupportedFormat, match='theirs/manifest.json'): ShardStore(spoilt)

# --- what a loader gets

@pytest.fixture(scope='module')
def numbers(tmp_path_factory):
    "300 samples in shards of many sizes, in two splits; sample i has id i"
    rows = [{'id':i, 'cls':i%3, 'txt':f'{i}'} for i in range(300)]
    splits = {'train':rows[:240], 'valid':rows[240:]}
    return put(tmp_path_factory.mktemp('numbers')/'d', splits, shuffle=False, chunk=21, maxcount=11)[0]

@pytest.mark.timeout(60)   # a wanted shard that was closed would be waited for
def test_a_wanted_shard_stays_open_however_many_others_are_read(tmp_path):
    "More than the 64 files that are kept open are read between"
    put(tmp_path/'d', [{'txt':str(i)} for i in range(70)], maxcount=1, shuffle=False)
    store = ShardStore(tmp_path/'d', cache=str(tmp_path/'cache'))
    for shards in (list(range(70)), [0,1]):
        store.prefetch(shards, wait=True)
        wait_for(lambda: store.part(0).whole_shards.thread is None)
    for i in (*range(2, 70), 0, 1): assert store.get_many([i], 'txt')['txt']==[str(i).encode()]
    assert len(store.part(0).whole_shards.files)==64

@pytest.mark.timeout(60)
def test_nobody_waits_for_shards_if_no_thread_can_be_started(tmp_path, monkeypatch):
    put(tmp_path/'d', [{'txt':'a'}])
    store = ShardStore(tmp_path/'d', cache=str(tmp_path/'cache'))
    def start(thread): raise RuntimeError("can't start new thread")
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, 'start', start)
        with pytest.raises(RuntimeError, match="can't start"): store.prefetch([0], wait=True)
    assert store.get_many([0], 'txt')['txt']==[b'a']
    store.prefetch([0], wait=True)
    wait_for(lambda: 0 in store.part(0).whole_shards.files)

def test_the_size_of_the_usual_cache_does_not_ask_for_one_of_a_local_folder(numbers, tmp_path):
    "The shards would be copied into the home of the user"
    url,cache = numbers.storage.url,FileCache(str(tmp_path))
    store = ShardStore(url, cache_size=10**6)
    assert store.cache is None and store.part(0).in_place(0) and ShardStore(url, cache=cache).cache is cache
    with pytest.raises(TypeError, match='cache_size: a FileCache has its own'):
        ShardStore(url, cache=cache, cache_size=10**6)

def test_of_a_local_folder_only_compressed_shards_are_copied(tmp_path, monkeypatch):
    "A damaged copy would spoil what is whole"
    monkeypatch.setenv('FASTAI_REMOTE_CACHE', str(tmp_path/'usual'))
    for name,mode in (('a.tar','w'), ('b.tar.gz','w:gz')): tar(tmp_path/'d'/name, [('0.txt', b'')], mode)
    index(tmp_path/'d')
    store = ShardStore(tmp_path/'d', cache=True)
    store.prefetch([0,1], wait=True)
    wait_for(lambda: store.part(0).whole_shards.thread is None)
    assert store.part(0).in_place(0) and sorted(store.part(0).whole_shards.files)==[1]
    assert store.get_many([0,1], 'txt', check=True)['txt']==[b'',b'']

def test_a_cache_that_is_asked_for_is_used_for_a_local_folder_too(numbers, tmp_path):
    "It may be a slow one: shards come ahead, whole, and stay"
    folder = Path(numbers.storage.url)
    dls = loaders(ShardStore(folder, cache=str(tmp_path/'c')), x='id', bs=16, splitter=StoreSplitter())
    assert sorted(ids(dls.train))==list(range(240))
    held = wait_for(lambda: [path for path in (tmp_path/'c').rglob('*') if path.suffix=='.tar'])
    for path in held: assert path.read_bytes()==(folder/path.name.partition('-')[2]).read_bytes()
