"A dataset of somebody else: its manifest decides neither where to read nor who gets the reader's credentials"
import pickle, re, shutil

import numpy as np
import pytest
from fastai.data.core import DataLoaders

import fastai_remote.block
from fastai_remote import index_shards, ShardStore, StoreNotFound, to_shards, UnsupportedFormat
from fastai_remote.store.shard_index import ShardTable
from fastai_remote.store.storage import Storage
from shard_helpers import change_manifest, ONE
from webserver import files_of, WebServer

MARKER = 'secret-8f2c'
N = 20

@pytest.fixture
def folder(tmp_path):
    "Shards of twenty samples"
    samples = [{'txt':f'number {i}', 'cls':'ab'[i%2]} for i in range(N)]
    to_shards(samples, tmp_path/'theirs', chunk=5, maxcount=5, shuffle=False, **ONE)
    return tmp_path/'theirs'

@pytest.fixture
def elsewhere(folder, tmp_path):
    "The folder of a manifest whose shards are in `folder`"
    for file in (folder/'manifest.json', *folder.glob('.fastai_remote/*.fastai_remote')): file.unlink()
    index_shards(folder, to=tmp_path/'ours', **ONE)
    return tmp_path/'ours'

def is_right(store):
    return store.get_many(range(N), 'txt', decode=True)['txt']==[f'number {i}' for i in range(N)]

def test_a_manifest_cannot_send_credentials_to_another_host(folder, tmp_path):
    public = tmp_path/'public'
    shutil.copytree(folder/'.fastai_remote', public/'.fastai_remote')
    shutil.copy(folder/'manifest.json', public)
    with WebServer(files_of(public)) as theirs, WebServer(files_of(folder)) as attacker:
        change_manifest(public, base=attacker.url)
        kwargs = dict(cache=None, timeout=3, storage_options={'headers':{'Authorization':MARKER}})
        with pytest.raises(StoreNotFound, match=f"{re.escape(attacker.url)}.*shards_url=") as e:
            ShardStore(theirs.url, **kwargs)
        assert MARKER not in str(e.value) and not attacker.seen
        assert any(MARKER in headers for _,headers in theirs.seen)   # the reader's options go where the reader said
        # nor where the reader did say so, but gave options for another host
        assert is_right(ShardStore(theirs.url, shards_url=attacker.url, **kwargs))
        assert attacker.seen and not any(MARKER in headers for _,headers in attacker.seen)

def test_shards_elsewhere_are_only_read_where_the_reader_says(folder):
    for base in '/etc','..','s3://bucket/x':
        change_manifest(folder, base=base)
        with pytest.raises(StoreNotFound, match='shards_url='): ShardStore(folder)

def test_a_reader_says_where_the_shards_are(folder, elsewhere, tmp_path, monkeypatch):
    with pytest.raises(StoreNotFound, match=re.escape(f"shards_url={str(folder)!r}")): ShardStore(elsewhere)
    for shards_url in (str(folder), folder, Storage(folder)):
        store = ShardStore(elsewhere, shards_url=shards_url)
        copies = pickle.loads(pickle.dumps(store)),pickle.loads(pickle.dumps(store.opener()))()
        assert all(map(is_right, (store, *copies))) and store.verify(num_workers=1).bad==0
    dls = DataLoaders.from_shards(elsewhere, x='cls', y='cls', shards_url=folder, bs=4, num_workers=0, valid_pct=.5)
    assert sum(len(x) for x,_ in dls.valid)==N//2
    # the manifest of an exported store may have moved since, to the place that the environment names
    saved = pickle.dumps(ShardStore(elsewhere, shards_url=folder))
    shutil.move(elsewhere, tmp_path/'moved')
    monkeypatch.setenv('FASTAI_REMOTE_URL', str(tmp_path/'moved'))
    assert is_right(pickle.loads(saved))

def test_names_of_shards_stay_in_the_folder(folder):
    table = ShardStore(folder).shards
    names = [table.name(k) for k in range(len(table))]
    for wrong in ('', '..', '../x.tar', '/etc/passwd', 'a/../../x.tar', 'a//b.tar', 'x\\..\\y.tar', 'x\0.tar'):
        for place in (0,1,-1):
            table.text = '\n'.join([wrong if name==names[place] else name for name in names]).encode()
            change_manifest(folder, shards=table.pack())
            with pytest.raises(UnsupportedFormat, match='leaves the folder|damaged table'): ShardStore(folder)

def test_usual_names_of_shards_are_accepted_and_what_is_no_text_is_refused():
    names = ['a.tar', '..a.tar', 'a..tar', '.hidden.tar', 'train/000.tar', 'a b/ü.tar', '...']
    def unpacked(names, n): return ShardTable.unpack(ShardTable(names, *[np.ones(n, 'i8')]*5).pack())
    assert [unpacked(names, 7).name(k) for k in range(7)]==names and len(unpacked([], 0))==0
    with pytest.raises(ValueError, match='utf-8'): unpacked(b'a\xff.tar', 1)

def test_the_file_of_failures_lies_in_the_folder(folder):
    (folder.parent/'x-failures.json').write_text(f'["{MARKER}","1"]\n')
    for prefix in ('../x', '/x', 'a/../../x'):
        change_manifest(folder, prefix=prefix, failed=1)
        with pytest.raises(UnsupportedFormat, match='prefix'): list(ShardStore(folder).failures())

def test_the_number_of_samples_that_have_a_field_is_a_number(folder):
    for n in ('many', -1, 1.5, True):
        change_manifest(folder, fields={'txt':{'codec':'txt', 'dtype':None, 'n':n}})
        with pytest.raises(UnsupportedFormat, match="invalid: fields 'txt'"): ShardStore(folder)
