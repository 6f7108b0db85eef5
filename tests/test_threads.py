"What threads and processes share is only touched under its lock"
import fcntl, os, shutil

import numpy as np
import pytest
import redis

from fastai_remote import index_shards, ShardStore, TieredStore, to_shards
from fastai_remote.load.batch import SharedBuffers
from fastai_remote.load.lazy_image import BatchMemory
from fastai_remote.load.timed import Stopwatch
from fastai_remote.store.cache import FileCache

def is_held(lock): return lock._is_owned() if hasattr(lock, '_is_owned') else lock.locked()

def guard(o, *names, reading=True):
    "`o`, whose attributes `names` are from now on set, and with `reading` read, only while somebody holds `o.lock`"
    def checked(name):
        def get(self):
            assert not reading or is_held(self.lock), name
            return vars(self)[name]
        def put(self, value):
            assert is_held(self.lock), name
            vars(self)[name] = value
        return property(get, put)
    o.__class__ = type(type(o).__name__, (type(o),), {name:checked(name) for name in names})
    return o

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "Six shards of ten texts"
    folder,samples = tmp_path_factory.mktemp('threads')/'d',[{'txt':f'text {i}', 'n.i4':i} for i in range(60)]
    to_shards(samples, folder, maxcount=10, chunk=10, num_workers=0, shuffle=False, progress=False)
    return folder

@pytest.fixture(scope='module')
def far(folder):
    "The same where whole shards have to be fetched"
    ShardStore(folder).copy(url := f'memory://threads{folder}', maxcount=10, num_workers=0, shuffle=False, progress=False)
    return url

def test_indices_and_files_of_shards(folder):
    "Threads read batches at the same time, and drop the least recently used indices and files"
    store = ShardStore(folder)
    indices,files = store.part(0).indices,guard(store.part(0).whole_shards, 'files')
    guard(indices, 'kept', 'nbytes')
    for numbers in np.arange(60), [3, 4], np.arange(30, 50), [59]:
        texts = store.get_many(numbers, 'txt')['txt']
        assert len(texts)==len(numbers)
    for shard in range(6): assert files.get(shard) is not None
    with indices.lock: assert len(indices.kept)==6
    store.new_epoch()
    with indices.lock: assert not indices.kept

def test_an_epoch_opens_the_tars_of_others_again(folder, tmp_path):
    shutil.copy(next(folder.glob('*.tar')), tmp_path/'a.tar')
    store = index_shards(tmp_path, num_workers=0, progress=False).store
    files = guard(store.part(0).whole_shards, 'files', 'wanted', 'failed')
    assert files.get(0) is not None
    store.new_epoch()
    with files.lock: assert not files.files

def test_whole_shards_in_a_cache(far, tmp_path):
    "They are fetched, opened, waited for, found damaged and fetched again"
    store = ShardStore(far, cache=tmp_path/'cache')
    files = guard(store.part(0).whole_shards, 'files', 'wanted', 'failed', 'dropped', 'thread')
    store.prefetch([0, 1], True)
    assert store.get_many([0], 'txt')['txt']==[b'text 0'] and files.get(1) is not None
    with pytest.warns(UserWarning, match='is damaged, and was removed'): files.drop(1)
    assert store.get_many([10], 'txt')['txt']==[b'text 10'] and files.get(5) is None
    store.prefetch([], False)
    with files.lock: assert not files.files and not files.wanted

def test_what_a_tiered_store_writes_and_fetches(far, fresh):
    store,seen = TieredStore(fresh.url, ShardStore(far), redis_timeout=20),[]
    state = guard(store._redis, 'size', reading=False)
    store.store.prefetch = lambda shards, wait: seen.append((shards, is_held(state.lock)))
    store.prefetch([0, 1], False)
    assert store.get_many(range(20), 'txt')['txt'][7]==b'text 7' and store.flush()
    with state.lock: assert state.size==0
    store.prefetch([0, 1, 2], True)
    with redis.Redis.from_url(fresh.url) as client: client.flushall()
    assert store.get_many([3], 'txt')['txt']==[b'text 3']
    assert seen==[([0,1], True), ([2], True), ([0,2], True)]
    state.executor.shutdown()
    store.get_many([4], 'txt')   # nothing can be queued: what was counted is forgotten
    with state.lock: assert state.size==0

def test_memory_of_batches():
    "Two threads never get the same memory, and a worker no buffer twice"
    memory = guard(BatchMemory(), 'blocks')
    assert memory((2, 3)).shape==(2, 3)
    buffers = guard(SharedBuffers(1), 'busy')
    first,second = (buffers.allocate(0, 10) for _ in range(2))
    assert first.ctypes.data!=second.ctypes.data

def test_times_of_stages():
    watch = guard(Stopwatch(), 'seconds')
    assert watch.call('fetch', str, (1,), {})=='1' and watch.take().keys()=={'fetch'} and watch.take()=={}

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
