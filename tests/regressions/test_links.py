"What removes files of a dataset removes symbolic links in its folder, and nothing that is behind them"
import shutil
from pathlib import Path

import pytest

from fastai_remote.core import StoreError
from fastai_remote.ingest.shards import to_shards
from fastai_remote.ingest.stores import ShardStore

def write(folder, **kwargs):
    to_shards([{'txt':f'text {i}', 'a.i8':i} for i in range(9)], folder, num_workers=0, progress=False, **kwargs)
    return ShardStore(folder)

def contents(folder):
    return {path.relative_to(folder):path.read_bytes() for path in folder.rglob('*') if path.is_file()}

@pytest.fixture
def victim(tmp_path):
    "The folder of another dataset, with an edit, and with a state of an ingest that nobody has finished"
    write(tmp_path/'victim').edit(set={'txt':{1:'changed'}})
    (tmp_path/'victim/.fastai_remote/.ingest').mkdir(exist_ok=True)
    (tmp_path/'victim/.fastai_remote/.ingest/chunk-000000.json').write_text('{}')
    return tmp_path/'victim'

CALLS = {
    'delete':ShardStore.delete,
    'overwrite':lambda folder: write(folder, overwrite=True),
    'drop_fields':lambda folder: ShardStore(folder).drop_fields(['a.i8']),
    'edit':lambda folder: ShardStore(folder).edit(drop=[0]),
    'append':lambda folder: ShardStore(folder).append([{'txt':'new', 'a.i8':1}], num_workers=0, progress=False),
}

@pytest.mark.parametrize('link,to', [
    *((f'.fastai_remote/.part-{k}-0123abcd-000000.tar{end}', 'shard-000000.tar')
      for k,end in ((1,''), (9,''), (9,'.fastai_remote'))),
    ('.fastai_remote/.ingest','.fastai_remote/.ingest'), ('.fastai_remote',''),
    ('shard-000000.tar','shard-000000.tar'), ('shard9-000000.tar','shard-000000.tar')])
def test_nothing_behind_a_link_is_removed(victim, tmp_path, link, to):
    before = contents(victim)
    for name,call in CALLS.items():
        write(folder := tmp_path/name)
        place = folder/link
        if place.is_dir(): shutil.rmtree(place)
        else: place.unlink(missing_ok=True)
        place.symlink_to(victim/to)
        try: call(folder)
        except StoreError: pass   # it may be refused
        after = contents(victim)
        assert before.keys()<=after.keys() and all(after[path]==before[path] for path in before), name
        if name=='delete' and link!='shard9-000000.tar':   # without an index, that one is a file of the user
            assert not folder.exists() or not any(path.is_symlink() for path in folder.iterdir())

def test_an_index_behind_a_link_is_refused_by_name(victim, tmp_path):
    folder = tmp_path/'tars'
    folder.mkdir()
    (folder/'.fastai_remote').symlink_to(victim)
    for call in ShardStore.delete, ShardStore.abandon:
        with pytest.raises(StoreError, match='.fastai_remote is a symbolic link .* remove it'): call(folder)

def test_files_of_others_in_our_own_folder_stay(tmp_path):
    write(tmp_path/'d')
    (tmp_path/'d/.fastai_remote/shard-000000.tar').mkdir()
    (tmp_path/'d/.fastai_remote/notes.txt').write_text('theirs')
    (tmp_path/'d/.fastai_remote/empty').mkdir()
    ShardStore.delete(tmp_path/'d')
    assert contents(tmp_path/'d').keys()=={Path('.fastai_remote/notes.txt')}
