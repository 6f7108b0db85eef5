"Fields of unusual names, a manifest that another tool has formatted, files and keys that are empty or gone"
import json, os, pickle, tarfile
from contextlib import nullcontext

import fsspec
import numpy as np
import pytest
import redis

from inputs import in_memory, write_tar
from fastai_remote.core import CorruptSample, Manifest, StoreNotFound, UnsupportedFormat, seal
from fastai_remote.ingest.index import index_shards
from fastai_remote.ingest.report import IngestError
from fastai_remote.ingest.run import to_redis
from fastai_remote.ingest.shards import to_shards
from fastai_remote.store.base import MemoryStore
from fastai_remote.store.redis import RedisStore
from fastai_remote.store.shards import ShardStore

SAMPLES = [{'txt':f'number {i}', 'z.cls':'ba'[i%2], 'a.cls':i%3, 'value.f4':i/7} for i in range(20)]
OPTIONS = dict(num_workers=1, progress=False)

def values(store): return store.get_many(range(len(store)), store.fields, decode=True)
def client(server): return redis.Redis.from_url(server.url)

@pytest.fixture
def folder(tmp_path):
    to_shards(SAMPLES, tmp_path/'shards', chunk=5, maxcount=5, shuffle=False, **OPTIONS)
    return tmp_path/'shards'

@pytest.fixture
def elsewhere(folder):
    "The same folder in a file system that is no disk: files are fetched into a cache"
    files,url = fsspec.filesystem('memory'),f'/{folder.parent.name}'
    files.put(str(folder), url, recursive=True)
    yield f'memory:/{url}'
    files.rm(url, recursive=True)

# A user's field x.crc

@pytest.mark.parametrize('sample', [{'x.crc':7}, {'x':1., 'x.crc':b'1'}, {'x.crc':'text', 'x':'other'}], ids=str)
def test_a_field_that_would_hide_checksums_is_refused(sample, tmp_path, server):
    for write in (lambda: in_memory([sample]), lambda: to_shards([sample], tmp_path/'d', **OPTIONS),
                  lambda: to_redis([sample], server.url, 'crc', **OPTIONS),
                  lambda: MemoryStore({field:[b'1'] for field in sample})):
        with pytest.raises((ValueError,IngestError), match=r"'x\.crc'.*\.crc.*checksums"): write()
    assert not RedisStore.unfinished(server.url) and not ShardStore.unfinished(tmp_path/'d')

def test_a_field_of_this_name_is_left_out_or_stored_under_another(tmp_path, put):
    "In a tar that others wrote it cannot be renamed, and the report says so; the function of an ingest renames it"
    write_tar(tmp_path/'w/a.tar', [(f'{i}.{name}', b'%d'%i) for i in range(3) for name in ('x.txt','x.crc')])
    report = index_shards(tmp_path/'w', **OPTIONS)
    assert ShardStore(tmp_path/'w').fields==['x.txt']
    assert any("'x.crc'" in note and n==3 for note,n in report.notes.items())
    store,_ = put([{'x':b'1', 'x.crc':7}], fn=lambda sample: {'x':sample['x'], 'x_crc.i8':sample['x.crc']})
    assert values(store)=={'x':[b'1'], 'x_crc.i8':[7]}

# Fields whose members in a shard could not be told apart

ALIKE = [({'cls':'cat', 'cls.txt':'a caption'}, "'cls' and 'cls.txt' .* as 'cls.txt'"),
         ({'age.f4':3., 'age.f4.json':[1]}, "'age.f4' and 'age.f4.json'"),
         ({'X.txt':'a', 'x.txt':'b'}, "'X.txt' and 'x.txt'"),
         ({'c.txt':'y', 'a/b.txt':'x'}, "'a/b.txt' .* no / and no NUL"), ({'a\0b.txt':'x'}, r"'a\\x00b.txt' .* no NUL")]

@pytest.mark.parametrize('sample,reason', ALIKE)
def test_members_that_webdataset_would_mistake_are_refused(sample, reason, tmp_path, server):
    "Wherever shards are written; Redis has such names"
    to_redis([sample]*2, server.url, 'alike', overwrite=True, **OPTIONS)
    store = RedisStore(server.url, 'alike')
    assert store[1]==sample and store.verify(num_workers=1).bad==0
    writes = [lambda: to_shards([sample]*2, tmp_path/'d', **OPTIONS),
              lambda: to_shards(iter([sample]*2), tmp_path/'d', **OPTIONS),
              lambda: store.map(dict, tmp_path/'e', vocab={}, **OPTIONS)]
    if 'cls' in sample:   # a copy has codes, `cls`, beside the texts
        store.copy(tmp_path/'copy', **OPTIONS)
        names = tarfile.open(tmp_path/'copy/shard-000000.tar').getnames()
        assert ShardStore(tmp_path/'copy')[1]==sample and {name.partition('.')[2] for name in names}=={'cls','cls.txt'}
    else: writes.append(lambda: store.copy(tmp_path/'copy', **OPTIONS))
    if len(sample)>1 and 'cls' not in sample:
        (first,value),(second,more) = sample.items()
        to_shards([{first:value}]*2, tmp_path/'s', **OPTIONS)
        writes.append(lambda: ShardStore(tmp_path/'s').add_fields(lambda _: {second:more}, **OPTIONS))
    for write in writes:
        with pytest.raises(ValueError, match=reason): write()
    assert not (tmp_path/'d').exists() or not os.listdir(tmp_path/'d')

# Manifests that another tool has changed

def test_whole_numbers_are_the_same_with_and_without_a_point():
    stats = {'jpg':{'mean':[1.,.5,0.], 'std':[1e-5], 'width':[1,50.,100]}}
    manifest = Manifest('d', 3, {'a.f4':{'codec':'f4', 'dtype':'f4'}}, stats=stats, uid='u').stamp()
    text = manifest.to_json()
    assert Manifest.from_json(text)==manifest and not manifest.altered(text.encode())
    assert '1.0,' in text and Manifest.from_json(text.replace('1.0,', '1,').replace('50.0', '50'))==manifest
    with pytest.raises(CorruptSample, match='checksum'): Manifest.from_json(text.replace('50.0', '51'))
    changed = text.replace('1e-05', '1E-05').encode()
    assert 'means the same' in Manifest.from_json(changed).altered(changed)

RUNS = dict(key='k', crc=1, lengths=[1], columns={'cls':0.0})
PARTS = [dict(prefix='a', tags=0, n=3, fields={}, failed=0)]

@pytest.mark.parametrize('change', [dict(splits={'train':[5,-2]}), dict(splits={'train':[0,4]}),
    dict(splits={'train':[2,1]}), dict(format=4, parts=PARTS, runs=RUNS)])
def test_a_manifest_with_a_right_checksum_and_impossible_contents_is_refused(change):
    manifest = Manifest('d', 3, {'cls':{'codec':'cls', 'dtype':'u1'}}, {'train':[0,3]}, {'1':['a'], '0':['b']}, uid='u')
    content = json.loads(manifest.to_json())
    assert list(Manifest.from_json(seal({**content, 'order':{'vocab':[0,1]}})).vocab)==['0','1']
    with pytest.raises(UnsupportedFormat, match='damaged: .*(split .train.|runs)'):
        Manifest.from_json(seal({**content, **change}))

# Keys that are gone

def test_an_evicted_manifest_is_named(fresh):
    to_redis(SAMPLES, fresh.url, 'pets', **OPTIONS)
    c,store = client(fresh),RedisStore(fresh.url, 'pets')
    c.delete('pets:meta')   # as an eviction does
    evicted = r'pets.*pets:meta.*(evict|drop).*allkeys-lru'
    for policy,match in ('allkeys-lru',evicted), ('noeviction','pets:meta.*deleted'):
        c.config_set('maxmemory-policy', policy)
        for read in (lambda: store.get_many([1], 'txt'), lambda: store.get_many([1], 'value.f4'),
                     lambda: store.get_many([1], 'txt', check=False), lambda: store[3],
                     lambda: pickle.loads(pickle.dumps(store)).manifest, lambda: RedisStore(fresh.url, 'pets')):
            with pytest.raises(StoreNotFound, match=match): read()
        report = store.verify(num_workers=1)
        assert report.bad and any('pets:meta' in what for what,_ in report.rest)
        assert any(('allkeys-lru' in reason)==(policy=='allkeys-lru') for _,reason in report.rest)

def test_a_store_of_a_dataset_that_was_renamed_says_so(fresh):
    to_redis(SAMPLES, fresh.url, 'pets', **OPTIONS)
    store = RedisStore(fresh.url, 'pets')
    RedisStore(fresh.url, 'pets').rename('dogs')
    for read in (lambda: store.get_many([1], 'txt'), lambda: store[3], lambda: store.rename('cats')):
        with pytest.raises(StoreNotFound, match='renamed|there are: dogs'): read()
    match = 'is gone since it was opened: deleted, or lost .*; or it was renamed'
    with pytest.raises(StoreNotFound, match=match): store[3]

# Files that are empty or cut off

def cut(path, size): os.truncate(path, path.stat().st_size-1 if size<0 else size)
SIZES = pytest.mark.parametrize('size', [0, 1, 20, -1])

@SIZES
@pytest.mark.parametrize('kind', ['.fastai_remote','.tar'])
def test_a_cut_off_file_in_the_cache_is_fetched_again(elsewhere, tmp_path, kind, size):
    def open(): return ShardStore(elsewhere, cache=tmp_path/'cache')
    store = open()
    store.prefetch(range(4), wait=True)
    want = values(store)
    files = [path for path in (tmp_path/'cache').rglob('*') if path.name.endswith(kind)]
    assert len(files)==4
    for path in files: cut(path, size)
    store = open()
    warned = pytest.warns(UserWarning, match='fetched again') if kind=='.fastai_remote' else nullcontext()
    with warned: assert values(store)==want
    store.prefetch(range(4), wait=True)
    assert values(store)==want and store.verify(num_workers=1).bad==0

@SIZES
def test_a_cut_off_index_or_manifest_is_named(folder, size):
    store,manifest,index = ShardStore(folder),folder/'manifest.json',sorted(folder.glob('*.fastai_remote'))[1]
    whole = manifest.read_bytes()
    cut(manifest, size)
    with pytest.raises(UnsupportedFormat, match='manifest.json: not a manifest'): ShardStore(folder)
    report = store.verify(num_workers=1)
    assert report.bad and 'manifest' in report.rest[0][0]
    manifest.write_bytes(whole)
    cut(index, size)
    store = ShardStore(folder)
    assert store[0]['txt']=='number 0'
    with pytest.raises(CorruptSample, match=f'{index.name}.*samples 5 to 9.*do not match their checksum'): store[7]
    report = store.verify(num_workers=1)
    assert report.bad and report.rest[0][0]==index.name
