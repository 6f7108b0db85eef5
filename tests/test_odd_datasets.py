"Fields of unusual names, an impossible manifest, keys that are gone"
import os, pickle, tarfile

import pytest

from fastai_remote import (IngestError, MemoryStore, RedisStore, ShardStore, StoreNotFound, to_redis, to_shards,
    UnsupportedFormat)
from fastai_remote.core import Manifest, seal, unseal
from snapshots import client

SAMPLES = [{'txt':f'number {i}', 'z.cls':'ba'[i%2], 'a.cls':i%3, 'value.f4':i/7} for i in range(20)]
OPTIONS = dict(num_workers=1, progress=False)

# A user's field x.crc

@pytest.mark.parametrize('sample', [{'x.crc':7}, {'x':1., 'x.crc':b'1'}], ids=str)
def test_a_field_that_would_hide_checksums_is_refused(sample, tmp_path, server):
    for write in (lambda: to_shards([sample], tmp_path/'d', **OPTIONS),
                  lambda: to_redis([sample], server.url, 'crc', **OPTIONS),
                  lambda: MemoryStore({field:[b'1'] for field in sample})):
        with pytest.raises((ValueError,IngestError), match=r"'x\.crc'.*\.crc.*checksums"): write()
    assert not RedisStore.unfinished(server.url) and not ShardStore.unfinished(tmp_path/'d')

# Fields whose members in a shard could not be told apart

ALIKE = [({'cls':'cat', 'cls.txt':'a caption'}, "'cls' and 'cls.txt' .* as 'cls.txt'"),
         ({'X.txt':'a', 'x.txt':'b'}, "'X.txt' and 'x.txt'"),
         ({'c.txt':'y', 'a/b.txt':'x'}, "'a/b.txt' .* no / and no NUL"), ({'a\0b.txt':'x'}, r"'a\\x00b.txt' .* no NUL")]

@pytest.mark.parametrize('sample,reason', ALIKE)
def test_members_that_webdataset_would_mistake_are_refused(sample, reason, tmp_path, server):
    "Wherever shards are written; Redis has such names"
    to_redis([sample]*2, server.url, 'alike', overwrite=True, **OPTIONS)
    store = RedisStore(server.url, 'alike')
    assert store[1]==sample and store.verify(num_workers=1).bad==0
    writes = [lambda: to_shards([sample]*2, tmp_path/'d', **OPTIONS),
              lambda: to_shards(iter([sample]*2), tmp_path/'d', **OPTIONS)]
    if 'cls' in sample:   # a copy has codes, `cls`, beside the texts
        store.copy(tmp_path/'copy', **OPTIONS)
        names = tarfile.open(tmp_path/'copy/shard-000000.tar').getnames()
        assert ShardStore(tmp_path/'copy')[1]==sample and {name.partition('.')[2] for name in names}=={'cls','cls.txt'}
    else: writes.append(lambda: store.copy(tmp_path/'copy', **OPTIONS))
    if 'X.txt' in sample:
        to_shards([{'X.txt':'a'}]*2, tmp_path/'s', **OPTIONS)
        writes.append(lambda: ShardStore(tmp_path/'s').add_fields(lambda _: {'x.txt':'b'}, **OPTIONS))
    for write in writes:
        with pytest.raises(ValueError, match=reason): write()
    assert not (tmp_path/'d').exists() or not os.listdir(tmp_path/'d')

# Manifests

@pytest.mark.parametrize('split', [[5,-2],[0,4],[2,1]])
def test_a_manifest_with_impossible_splits_is_refused(split):
    content = unseal(Manifest('d', 3, {}, {'train':[0,3]}, uid='u').to_json())
    with pytest.raises(UnsupportedFormat, match='damaged: .*split .train.'):
        Manifest.from_json(seal({**content, 'splits':{'train':split}}))

# Keys that are gone

def test_an_evicted_manifest_is_named(fresh):
    to_redis(SAMPLES, fresh.url, 'pets', **OPTIONS)
    c,store = client(fresh),RedisStore(fresh.url, 'pets')
    c.delete('pets:meta')   # as an eviction does
    evicted = r'pets.*pets:meta.*(evict|drop).*allkeys-lru'
    for policy,match in ('allkeys-lru',evicted), ('noeviction','pets:meta.*deleted'):
        c.config_set('maxmemory-policy', policy)
        for read in (lambda: store.get_many([1], 'txt'), lambda: store.get_many([1], 'value.f4', check=False),
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
