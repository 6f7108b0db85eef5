"Values that were added to shards, or changed: where they are, how they are read, and what happens if they are damaged"
import io, json, pickle, zipfile, zlib
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from fastai_remote import CorruptSample, MissingSample, RemoteDataset, ShardStore, StoreNotFound, UnsupportedFormat
from fastai_remote.core import pack_tables, seal
from fastai_remote.store.base import image_stats
from fastai_remote.store.cache import FileCache
from fastai_remote.store.shard_index import ShardTable
from fault_storage import flipped
from in_memory import encoded
from shard_helpers import files, ONE, put

N = 24

def png(i, size=8): return encoded(Image.new('RGB', (size,size), (i,i,i)))

def small(sample):
    "The image in another size, an array, and a number"
    number = sample['png'].getpixel((0,0))[0]
    return {'small.png':png(number, 4), 'emb.npy':np.full(3, number, np.float32), 'more.u1':number,
            'kind.cls':'xy'[number%2]}

def written(folder, n=N, **kwargs):
    samples = [{'png':png(i), 'cls':'ab'[i%2], 'txt':f'text {i}'} for i in range(n)]
    return put(folder, samples, shuffle=False, maxcount=7, **kwargs)[0]

def widened(store): return store.add_fields(small, ['png'], chunk=10, **ONE)
def added(folder, generation='*'):
    "The files of parts that a version, or any, has added"
    return sorted(folder.glob(f'.fastai_remote/.part-{generation}-*'))
def versions(folder): return sorted({int(path.name.split('-')[1]) for path in added(folder)})

def test_fields_of_all_kinds_are_added_edited_and_dropped(tmp_path):
    store = widened(written(tmp_path/'d'))
    assert store.get_many([5,3], 'small.png')['small.png']==[png(5, 4),png(3, 4)]
    assert store.get_many(range(N), 'more.u1')['more.u1'].tolist()==list(range(N))
    assert store.class_counts('kind.cls')=={'x':12, 'y':12} and image_stats(store, 'png')
    assert pickle.loads(pickle.dumps(store))[9]['small.png'].size==(4,4)
    more = {'png':png(30), 'cls':'a', 'txt':'text 30', **small({'png':Image.open(io.BytesIO(png(30)))})}
    store = store.append([more], **ONE).edit(drop=[0,1], set={'small.png':{6:png(99, 4)}})
    assert [store[i]['emb.npy'].tolist() for i in range(len(store))]==[[i]*3 for i in (*range(2, N), 30)]
    assert store.get_many([3,4,22], 'small.png', check=True)['small.png']==[png(5, 4),png(99, 4),png(30, 4)]
    assert RemoteDataset(store).to_tuple('more.u1', 'kind.cls').__getitems__([0,22])==[(2,0),(30,0)]
    assert versions(tmp_path/'d')==[2,4]
    store = store.drop_fields(['small.png','emb.npy'])
    assert store[0]['more.u1']==2 and versions(tmp_path/'d')==[2]
    assert store.drop_fields('more.u1', 'kind.cls').fields==['png','cls','txt'] and not added(tmp_path/'d')

def test_a_source_with_splits_keeps_its_numbers(tmp_path):
    source = {'valid':[{'txt':f'v{i}'} for i in range(5)], 'train':[{'txt':f't{i}'} for i in range(20)]}
    store = put(tmp_path/'d', source, maxcount=4)[0].add_fields(lambda o: {'same.txt':o['txt']}, **ONE)
    assert all(row['txt']==row['same.txt'] for row in store[:]) and store.splits=={'valid':[0,5], 'train':[5,25]}

def test_replaced_and_deleted_datasets_leave_no_added_part(tmp_path):
    for act in (lambda: written(tmp_path/'d', 5, overwrite=True), lambda: ShardStore.delete(tmp_path/'d')):
        before = widened(written(tmp_path/'d', overwrite=True))
        assert before[3] and added(tmp_path/'d')
        act()
        assert not added(tmp_path/'d')
        with pytest.raises(StoreNotFound, match='replaced|no dataset'):
            ShardStore(tmp_path/'d', uid=before.manifest.uid)
    assert not (tmp_path/'d').exists()

def test_damage_is_found_and_named(tmp_path):
    "What is not in the added part is still read"
    store = widened(written(tmp_path/'d'))
    def opened(): return ShardStore(tmp_path/'d')
    shard = added(tmp_path/'d', 2)[0]
    content = shard.read_bytes()
    shard.write_bytes(flipped(content, content.index(png(3, 4))+40))
    message = r"^d: sample 3, field 'small.png' in .fastai_remote/.part-2-\w{8}-000000.tar at byte"
    with pytest.raises(CorruptSample, match=message): opened().get_many([3], 'small.png', check=True)
    assert opened().get_many([3], 'png', check=True)['png']==[png(3)] and opened().verify(num_workers=1).bad
    for file in added(tmp_path/'d'): file.unlink()
    message = r'part-2-\w{8}-000000.tar.fastai_remote, the index of shard .* is not there'
    with pytest.raises(MissingSample, match=message): opened()[3]
    assert store.get_many([3], 'png')['png']==[png(3)]
    # fields of a lost part can be dropped
    edited = opened().edit(drop=[0]).drop_fields('small.png', 'emb.npy', 'more.u1', 'kind.cls')
    assert not edited.verify(num_workers=1).bad

def opened_with(folder):
    "A function that changes entries of the manifest of a dataset, with the right checksum, and opens it"
    file = folder/'manifest.json'
    manifest = json.loads(file.read_text())
    del manifest['crc']
    def change(**entries):
        file.write_bytes(seal({**manifest, **entries}))
        return ShardStore(folder)
    return manifest,change

def test_a_damaged_table_of_runs_is_named(tmp_path):
    "By a store that is opened, and by `verify` of one that has read them"
    store = written(tmp_path/'d').edit(drop=[0,3], set={'txt':{5:'new'}})
    want = store[:]
    path = tmp_path/'d/.fastai_remote/.runs-2'
    stored = path.read_bytes()
    for wrong in flipped(stored),stored[:-1],stored+b'x',b'',None:
        if wrong is None: path.unlink()
        else: path.write_bytes(wrong)
        with pytest.raises(CorruptSample, match='d: .*.runs-2, which says where the samples are'):
            ShardStore(tmp_path/'d')[:]
        assert '.runs-2' in dict(store.check_rest()) and store[:]==want
    path.write_bytes(stored)
    assert ShardStore(tmp_path/'d')[:]==want and not store.verify(num_workers=0).bad

def test_a_manifest_with_damaged_entries_of_tables_is_refused(tmp_path):
    "Also if it has no added parts. `regressions/test_unlimited.py` has other types in each place"
    written(tmp_path/'d').edit(drop=[0,3])
    manifest,opened = opened_with(tmp_path/'d')
    runs = manifest['runs']
    for entry in ({'key':'.runs-2'}, {'lengths':[1]}, {**runs, 'columns':{}}, {**runs, 'lengths':[]},
                  {**runs, 'key':'../x'}, {**runs, 'key':''}):
        with pytest.raises(UnsupportedFormat, match='damaged: .*runs'): opened(runs=entry)

def test_a_table_of_runs_has_only_samples_that_its_parts_have(tmp_path):
    "A table of another version, with a checksum that was made anew"
    written(tmp_path/'d').edit(drop=[0,3])
    path,(manifest,opened) = tmp_path/'d/.fastai_remote/.runs-2',opened_with(tmp_path/'d')
    for runs,why in (([0,2], [0,0], [1,5]), 'samples that a part does not have'), \
                    (([0,2], [0,1], [1,4]), 'a part that does not exist'), \
                    (([1,2], [0,0], [1,4]), 'the first is in no run'):
        other = pack_tables([SimpleNamespace(**dict(zip(('starts','parts','firsts'), map(np.array, runs))))])
        assert len(other)==len(path.read_bytes())
        path.write_bytes(other)
        with pytest.raises(CorruptSample, match=f'runs-2, which says .*{why}'):
            opened(runs={**manifest['runs'], 'crc':zlib.crc32(other)})[:]

def test_an_added_part_is_in_our_own_folder(tmp_path):
    "A manifest that was downloaded may name any files; also more shards than a dataset can have"
    widened(written(tmp_path/'d'))
    manifest,opened = opened_with(tmp_path/'d')
    first,entry,*others = manifest['parts']
    def changed(**entries): return opened(parts=[first, {**entry, **entries}, *others])
    for wrong in dict(fields='txt'),dict(shards=[]),dict(shards=None):
        with pytest.raises(UnsupportedFormat, match='damaged: .*part 1'): changed(**wrong)
    table = ShardTable.unpack(entry['shards'])
    names = [table.name(k) for k in range(1, len(table))]
    for name in '../other.tar','/etc/passwd','a/../../b.tar':
        table.text = '\n'.join([name, *names]).encode()
        message = 'table of shards of part 1: the name of shard 0, .* leaves the folder'
        with pytest.raises(UnsupportedFormat, match=message): changed(shards=table.pack())
    for wrong in dict(shards={**entry['shards'], 'n':'x'}),dict(n=entry['n']+1):
        with pytest.raises(UnsupportedFormat, match='damaged table of shards of part 1'): changed(**wrong)

def test_an_edit_leaves_the_copies_in_the_cache_in_use(tmp_path, faults):
    cache = FileCache(tmp_path/'cache')
    written('faulty://pets')
    def read(n):
        store = ShardStore('faulty://pets', cache=cache)
        store.prefetch(list(range(len(store.shards))), wait=True)
        assert len(store.get_many(range(n), ['png','txt'], check=True)['png'])==n
        return store,{path:path.stat().st_ino for path in (tmp_path/'cache').rglob('*') if path.is_file()}
    store,before = read(N)
    assert sum(path.suffix=='.tar' for path in before)==4
    store.edit(drop=[0], set={'txt':{5:'new'}})
    edited,after = read(N-1)
    assert before.items()<=after.items() and not edited.verify(num_workers=1).bad

def test_added_parts_on_a_remote_storage_are_kept_in_the_cache(tmp_path, faults):
    widened(written('faulty://pets')).edit(drop=[0], set={'txt':{5:'new'}})
    for cache in (None, FileCache(tmp_path/'cache')):
        store = ShardStore('faulty://pets', cache=cache)
        store.prefetch([0,1,2], wait=True)
        rows = store.get_many(range(N-1), ['small.png','txt','more.u1'], check=True)
        assert rows['small.png']==[png(i, 4) for i in range(1, N)]
        assert rows['txt']==[b'new' if i==5 else f'text {i}'.encode() for i in range(1, N)]
        assert not store.verify(num_workers=1).bad
    assert '.part-2-' in str(faults.names('pets')) and '.part-3-' in str(files(tmp_path/'cache'))
    ShardStore.delete('faulty://pets')
    assert not faults.names('pets')

def test_added_parts_in_an_archive(tmp_path):
    store = written(tmp_path/'d').edit(set={'txt':{3:'another'}})
    for folder in '','p/':
        with zipfile.ZipFile(tmp_path/'x.zip', 'w') as archive:
            for name,content in files(tmp_path/'d').items(): archive.writestr(folder+name, content)
        zipped = ShardStore(f'zip://{folder}::{tmp_path}/x.zip', cache=None)
        numbers = range(len(store))
        assert zipped.get_many(numbers, 'txt;png')==store.get_many(numbers, 'txt;png')
        assert zipped[3]['txt']=='another'
