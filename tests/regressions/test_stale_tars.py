"""A tar of others that has changed since it was indexed is an error, wherever it is read; one that was copied is none

Samples of a file that is replaced by one of the same size would be read from a cache, or with the labels of an
index."""
import os, shutil

import pytest

from fastai_remote import CorruptSample, index_shards, RemoteDataset, ShardStore, StoreExists, TieredStore
from shard_helpers import ONE, tar
from webserver import WebServer

def samples(word):
    "Members of a tar of four samples"
    return [member for k in range(4) for member in ((f'{k}.txt', f'{word} {k}'.encode()), (f'{k}.cls', b'%d' % (k%2)))]

def texts_of(store, numbers): return store.get_many(numbers, 'txt', decode=True, check=True)['txt']
def texts(store): return texts_of(store, range(len(store)))

OLD,NEW = [f'old {k}' for k in range(4)]*2,[f'new {k}' for k in range(4)]+[f'old {k}' for k in range(4)]

class Disk:
    "Two tars in a folder; `options` of its stores"
    def __init__(self, tmp_path, cached=False):
        self.folder = tmp_path/'d'
        self.options = dict(cache=str(tmp_path/'cache') if cached else None)
    @property
    def url(self): return str(self.folder)
    def put(self, name, members): tar(self.folder/name, members)
    def touch(self, name): os.utime(self.folder/name, (1,1))
    def close(self): pass

class Web(Disk):
    "Read over HTTP, by a server that sends ETags; `bodies` are the names of tars that it has sent"
    def __init__(self, tmp_path, cached=False):
        super().__init__(tmp_path, cached)
        self.bodies = []
        self.server = WebServer(self.answer).__enter__()
    def answer(self, handler):
        file = self.folder/handler.path.strip('/')
        if not file.is_file(): return 404,None,b''
        if handler.command=='GET' and file.suffix=='.tar': self.bodies.append(file.name)
        return 200,None,file.read_bytes(),{'ETag':f'"{file.stat().st_mtime_ns}"'}
    url = property(lambda self: self.server.url)
    def close(self): self.server.__exit__()

@pytest.fixture(params=['Disk','Disk cached','Web','Web cached'])
def place(request, tmp_path):
    kind,*cached = request.param.split()
    place = globals()[kind](tmp_path, bool(cached))
    for name in 'a.tar','b.tar': place.put(name, samples('old'))
    place.index = lambda **kwargs: index_shards(f'{place.url}/{{a,b}}.tar', tmp_path/'index', **ONE, **kwargs)
    place.index()
    place.open = lambda: ShardStore(tmp_path/'index', shards_url=place.url, **place.options)
    yield place
    place.close()

def test_a_tar_that_was_replaced_is_an_error(place):
    "By one of the same size; also in a store that has read it, when the next epoch begins"
    store,again = place.open(),place.open()
    stream = RemoteDataset(place.open()).to_tuple('txt', 'cls').stream(shuffle=False)
    assert texts(store)==OLD and len(list(stream))==8
    place.put('a.tar', samples('new'))
    store.new_epoch()
    for other in store,again,place.open():
        with pytest.raises(CorruptSample, match='a.tar has changed since it was indexed.*overwrite=True'): texts(other)
        assert texts_of(other, range(4, 8))==OLD[4:]   # the other tar is the same
    with pytest.raises(CorruptSample, match='a.tar has changed'): list(stream)
    report = store.verify(num_workers=1)
    assert report.bad or report.rest

def test_labels_of_a_tar_that_was_replaced_are_not_those_of_the_index(place):
    "Until it is indexed anew, which has to be said"
    with pytest.raises(StoreExists, match='none is new'): place.index()
    members = samples('new')
    place.put('b.tar', [(name, b'1' if name=='2.cls' else value) for name,value in members])
    store = place.open()
    assert texts_of(store, range(4))==OLD[:4]
    with pytest.raises(CorruptSample, match='b.tar has changed'): store.get_many([7], ['txt','cls'])
    with pytest.raises(StoreExists, match='b.tar has changed since it was indexed.*overwrite=True'): place.index()
    place.index(overwrite=True)
    assert texts(place.open())==OLD[:4]+NEW[:4] and place.open()[6]['cls']==1

def test_a_sample_that_was_added_in_place_is_noticed(place):
    place.put('a.tar', [*samples('old'), ('9.txt', b'added'), ('9.cls', b'1')])
    with pytest.raises(CorruptSample, match=r'a.tar has changed since it was indexed: it has [\d,]+ bytes, and had'):
        texts(place.open())
    with pytest.raises(StoreExists, match=r'a.tar has changed since it was indexed: it has [\d,]+ bytes'):
        place.index()

def test_other_times_are_no_change(place):
    "As those of a dataset that was copied; what came into the cache by the new time is not compared again"
    for name in 'a.tar','b.tar': place.touch(name)
    assert texts(place.open())==OLD
    sends = place.bodies if type(place) is Web and place.options['cache'] else []
    sends.clear()
    assert texts(place.open())==OLD and not sends
    assert place.open().verify(num_workers=1).bad==0
    with pytest.raises(StoreExists, match='none is new'): place.index()
    place.put('a.tar', samples('new'))   # a second change
    with pytest.raises(CorruptSample, match='a.tar has changed'): texts(place.open())

def test_compressed_tars_are_not_read_from_old_copies(tmp_path):
    "Also if both have the same size, as files of random content"
    file = tar(tmp_path/'d/a.tar.gz', samples('old'), 'w:gz')
    index_shards(tmp_path/'d', **ONE)
    def open_store(): return ShardStore(tmp_path/'d', cache=str(tmp_path/'cache'))
    assert texts(open_store())==OLD[:4]
    size = file.stat().st_size
    tar(file, samples('new'), 'w:gz')
    with pytest.raises(CorruptSample, match='has changed'): texts(open_store())
    tar(file, samples('old'), 'w:gz')
    os.truncate(file, size)
    index_shards(tmp_path/'d', overwrite=True, **ONE)
    assert texts(open_store())==OLD[:4]

@pytest.fixture
def one(tmp_path):
    "A folder with one tar, which is indexed there"
    place = Disk(tmp_path)
    place.put('a.tar', samples('old'))
    index_shards(place.folder, **ONE)
    return place

def test_values_in_redis_are_not_those_of_an_old_tar(one, server):
    store = TieredStore(server.url, ShardStore(one.folder))
    assert texts(store)==OLD[:4] and store.flush()
    one.put('a.tar', samples('new'))
    store.new_epoch()
    with pytest.raises(CorruptSample, match='a.tar has changed'): texts(store)

def test_a_dataset_that_was_edited_or_got_more_tars_notices_it(one):
    one.put('b.tar', samples('old'))
    index_shards(one.folder, **ONE)
    ShardStore(one.folder).edit(set={'txt':{0:'edited'}}, drop=[1])
    assert texts(ShardStore(one.folder))==['edited','old 2','old 3',*OLD[:4]]
    one.put('b.tar', samples('new'))
    store = ShardStore(one.folder)
    assert texts_of(store, [1,2])==['old 2','old 3']
    with pytest.raises(CorruptSample, match='b.tar has changed'): texts(store)

def test_a_copy_with_the_same_times_is_not_read_to_compare_it(tmp_path):
    place = Web(tmp_path)
    place.put('a.tar', samples('old'))
    index_shards(place.folder, tmp_path/'index', **ONE)
    try:
        store = ShardStore(tmp_path/'index', shards_url=place.url, cache=None)   # a number for a time is no ETag
        assert texts(store)==OLD[:4] and len(place.bodies)>1
    finally: place.close()
    shutil.copytree(place.folder, tmp_path/'copy')   # with its times
    store = ShardStore(tmp_path/'index', shards_url=tmp_path/'copy')
    assert texts(store)==OLD[:4] and not store.part(0).whole_shards.compared

def test_adding_tars_to_a_copy_records_its_times(one):
    one.touch('a.tar')
    one.put('b.tar', samples('old'))
    store = index_shards(one.folder, **ONE).store
    assert texts(store)==OLD and not store.part(0).whole_shards.compared

@pytest.mark.slow
def test_tars_are_compared_with_their_own_sizes_however_many_there_are(tmp_path):
    "The sizes of a thousand files are asked for at once; the last one has another size"
    one = Disk(tmp_path)
    for i in range(1002): one.put(f'{i:04}.tar', [('0.txt', b'x'*(1+20_000*(i>1000)))])
    index_shards(one.folder, **ONE)
    one.put('1002.tar', [('0.txt', b'new')])
    assert texts_of(index_shards(one.folder, **ONE).store, [1001,1002])==['x'*20_001,'new']
