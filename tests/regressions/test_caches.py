"Caches keep what comes from different places apart, and for their owner only"
import stat

import fsspec
import pytest

from fastai_remote import index_shards, ShardStore, StoreError, TieredStore, to_shards
from fastai_remote.store.storage import Storage
from shard_helpers import tar

def texts(who): return [{'txt':f'{who} {i}'} for i in range(20)]

@pytest.fixture
def copies(tmp_path):
    "Two datasets on a remote storage with the same manifest, as anyone can copy one"
    to_shards(texts('ours'), tmp_path/'d', num_workers=0, progress=False)
    remote = fsspec.filesystem('memory')
    for name in 'genuine','copied': remote.put(str(tmp_path/'d'), f'/{name}', recursive=True)
    yield remote,'memory://genuine','memory://copied'
    for name in 'genuine','copied': remote.rm(f'/{name}', recursive=True)

def test_shards_of_a_copied_manifest_are_not_those_of_the_genuine_dataset(copies, tmp_path):
    remote,genuine,copied = copies
    cache = tmp_path/'cache'
    other = ShardStore(copied, cache=cache)
    other.prefetch([0], wait=True)
    assert other[3]['txt'].startswith('ours')
    store = ShardStore(genuine, cache=cache)
    assert store.manifest.uid==other.manifest.uid and [path for path in cache.rglob('*.tar')]
    remote.rm('/genuine/shard-000000.tar')
    with pytest.raises(StoreError): store.get_many([3], 'txt')

def test_values_of_a_copied_manifest_have_other_keys_in_redis(copies, server):
    keys = {TieredStore(server.url, ShardStore(url, cache=False)).prefix for url in copies[1:]}
    assert len(keys)==2

def test_a_folder_of_another_server_is_another_one_and_keys_are_not_part_of_its_address():
    addresses = {Storage('s3://bucket/d', storage_options={'endpoint_url':url, 'key':key, 'secret':'hidden'}).address
                 for url in ('http://a:1','http://b:1') for key in ('one','two')}
    assert addresses=={'s3://bucket/d http://a:1', 's3://bucket/d http://b:1'}

@pytest.mark.parametrize('mode', [None, 0o775])
def test_files_of_a_cache_have_the_permissions_of_its_folder(copies, tmp_path, mode):
    cache = tmp_path/'cache'
    if mode is not None:
        cache.mkdir()
        cache.chmod(mode)
    store = ShardStore(copies[1], cache=cache)
    store.prefetch([0], wait=True)
    store.get_many([3], 'txt')
    modes = {stat.S_IMODE(path.stat().st_mode) for path in [cache, *cache.rglob('*')]}
    if mode is None: assert modes=={0o700, 0o600}
    else: assert mode in modes and all(m&0o444==0o444 for m in modes)

def test_a_shard_with_a_long_name_is_kept(tmp_path):
    "Together with the folder that it is in, it is longer than the name of a file may be"
    name = '/'.join('é'*60 for _ in range(3))+'/a.tar.gz'
    tar(tmp_path/'d'/name, [('0.txt', b'one'), ('0.cls', b'1')], 'w:gz')
    index_shards(tmp_path/'d', to=tmp_path/'index', num_workers=0, progress=False)
    assert ShardStore(tmp_path/'index', shards_url=tmp_path/'d', cache=tmp_path/'cache')[0]['txt']=='one'
    kept, = (tmp_path/'cache').glob('*.tar.gz')
    assert len(kept.name.encode())<255
