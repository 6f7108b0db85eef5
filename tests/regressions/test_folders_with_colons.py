"Folders whose path has two colons, which fsspec takes for the end of a part of a chain of URLs"
from fastai_remote import ShardStore, to_shards

def test_a_dataset_is_in_the_folder_that_was_named(tmp_path):
    beside = tmp_path/'runs'/'kept.txt'
    beside.parent.mkdir()
    beside.write_text('mine')
    folder = tmp_path/'runs::2026'/'numbers'
    to_shards([{'x.f4':i, 'txt':'a'} for i in range(6)], folder, maxcount=2, num_workers=1, progress=False)
    assert (folder/'manifest.json').exists() and [o.name for o in beside.parent.iterdir()]==['kept.txt']
    store = ShardStore(folder)
    assert sorted(store[i]['x.f4'] for i in range(6))==list(range(6))
    assert len(store.append([{'x.f4':6, 'txt':'b'}], num_workers=1, progress=False).edit(drop=[0]))==6
