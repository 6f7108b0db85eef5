"What threads and processes share is only touched under its lock"
import fcntl, os
from collections import OrderedDict

import numpy as np

from fastai_remote import ShardStore, to_shards
from fastai_remote.store.cache import FileCache

def guarded(entries, lock):
    "A copy of the dict `entries` whose use is an error while nobody holds `lock`"
    is_held = getattr(lock, '_is_owned', None) or lock.locked
    def checked(name):
        def method(self, *args, **kwargs):
            assert is_held(), name
            return getattr(OrderedDict, name)(self, *args, **kwargs)
        return method
    names = '__getitem__ __setitem__ __delitem__ __contains__ __iter__ pop popitem move_to_end'.split()
    with lock: return type('Guarded', (OrderedDict,), {name:checked(name) for name in names})(entries)

def test_indices_and_files_of_shards(tmp_path):
    "Threads read batches at the same time, and drop the least recently used indices and files"
    to_shards([{'txt':f'text {i}', 'n.i4':i} for i in range(60)], tmp_path/'d', maxcount=10, chunk=10, num_workers=0,
        progress=False)
    store = ShardStore(tmp_path/'d')
    indices,files = store.part(0).indices,store.part(0).whole_shards
    indices.kept = guarded(indices.kept, indices.lock)
    files.files = guarded(files.files, files.lock)
    for numbers in np.arange(60), [3, 4], np.arange(30, 50), [59]:
        texts = store.get_many(numbers, 'txt')['txt']
        assert len(texts)==len(numbers)
    for shard in range(6): assert files.get(shard) is not None
    with indices.lock: assert len(indices.kept)==6

def test_a_file_gets_its_name_in_the_cache_while_nobody_removes_files(tmp_path, monkeypatch):
    cache,seen = FileCache(tmp_path/'cache', 1000),[]
    def replace(source, target, stock=os.replace):
        with open(f'{cache.folder}/.lock') as file:   # another process could not lock the folder now
            try: fcntl.flock(file, fcntl.LOCK_EX|fcntl.LOCK_NB)
            except BlockingIOError: seen.append(os.path.basename(target))
        return stock(source, target)
    monkeypatch.setattr(os, 'replace', replace)
    os.close(cache.fetch('uid-a', 10, lambda file: file.write(b'x'*10)))
    assert seen==['uid-a']
