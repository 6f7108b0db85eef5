"Each implementation of an interface passes the suite of that interface"
import numpy as np
import pytest

from fastai_remote import (MemoryStore, RedisStore, ShardStore, TieredStore, csv_samples, drawing_samples,
    image_samples, tar_samples, to_redis, to_shards)
from fastai_remote.codec.fields import get_codec
from fastai_remote.source.datasets import as_source
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.store.storage import Storage
from fastai_remote.testing import CodecTests, ManualClock, PlaceTests, SourceTests, StoreTests, WriterTests, example
from fastai_remote.write.base import MemoryPlace, MemoryWriter
from fastai_remote.write.folder_place import FolderPlace, LOCK_FILE
from fastai_remote.write.redis import RedisWriter
from fastai_remote.write.redis_place import RedisPlace
from fastai_remote.write.shards import ShardWriter
from in_memory import in_memory

KW = dict(shuffle=False, num_workers=1, progress=False)

@pytest.fixture
def empty(server):
    "The server of this file, without keys"
    RedisLink(server.url).call(lambda client: client.flushall())
    return server

class TestMemoryStore(StoreTests):
    def make(self): return in_memory(list(range(self.n)), example, 'numbers')

class TestStoreWithoutLabels(StoreTests):
    has_labels = False
    def make(self): return in_memory(list(range(self.n)), self.sample, 'numbers')

class TestRedisStore(StoreTests):
    @pytest.fixture(autouse=True)
    def place(self, server): self.server = server
    def make(self):
        to_redis(list(range(self.n)), self.server.url, 'numbers', example, overwrite=True, **KW)
        return RedisStore(self.server.url, 'numbers')

class TestShardStore(StoreTests):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path): self.folder = tmp_path/'numbers'
    def make(self):
        to_shards(list(range(self.n)), self.folder, example, maxcount=6, overwrite=True, **KW)
        return ShardStore(self.folder)

class TestTieredStore(TestShardStore):
    @pytest.fixture(autouse=True)
    def place(self, server, tmp_path): self.server,self.folder = server,tmp_path/'numbers'
    def make(self): return TieredStore(self.server.url, super().make())

class TestMemoryPlace(PlaceTests):
    @pytest.fixture(autouse=True)
    def place(self): self.memory = MemoryPlace('numbers')
    def make(self): return self.memory
    def is_empty(self): return self.memory.store is None

class TestRedisPlace(PlaceTests):
    @pytest.fixture(autouse=True)
    def place(self, empty): self.server = empty
    def make(self): return RedisPlace(RedisLink(self.server.url), 'numbers')
    def is_empty(self): return self.make().link.client.keys()==[b'fastai_remote:used']
    def lose(self, place): place.link.client.delete(place.keys.lock)

class TestFolderPlace(PlaceTests):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path): self.folder = f'{tmp_path}/numbers'
    def make(self): return FolderPlace(Storage(self.folder))
    def is_empty(self): return not Storage(self.folder).names()
    def lose(self, place): place.hidden.remove([LOCK_FILE])

class TestObjectPlace(TestFolderPlace):
    "On a storage that cannot lock a folder"
    @pytest.fixture(autouse=True)
    def place(self, request):
        self.folder = f'memory://places/{request.node.name}/numbers'
        with ManualClock(): yield

class TestMemoryWriter(WriterTests):
    @pytest.fixture(autouse=True)
    def place(self): self.writer = MemoryWriter('numbers')
    def make(self): return self.writer
    def open(self): return self.writer.store

class TestRedisWriter(WriterTests):
    @pytest.fixture(autouse=True)
    def place(self, empty): self.server = empty
    def make(self): return RedisWriter(RedisLink(self.server.url), 'numbers')
    def open(self): return RedisStore(self.server.url, 'numbers')

class TestShardWriter(WriterTests):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path): self.folder = tmp_path/'numbers'
    def make(self): return ShardWriter(Storage(self.folder))
    def open(self): return ShardStore(self.folder)

class TestImageSamples(SourceTests):
    @pytest.fixture(autouse=True)
    def place(self, images): self.images = images
    def make(self): return image_samples(self.images, label=lambda p: p.parent.name)

class FileTests(SourceTests):
    "Tests of `source(folder)`, once `write(folder)` has put files there"
    @pytest.fixture(autouse=True)
    def place(self, tmp_path):
        self.folder = tmp_path
        self.write(tmp_path)
    def make(self): return self.source(self.folder)

class TestCsvSamples(FileTests):
    source = staticmethod(csv_samples)
    def write(self, folder): (folder/'rows.csv').write_text('txt,cls\nred,a\ngreen,b\nblue,a\n')

class TestTarSamples(FileTests):
    source = staticmethod(tar_samples)
    def write(self, folder): to_shards([{'txt':f'{i}', 'cls':'ab'[i%2]} for i in range(5)], folder, **KW)

class TestDrawings(FileTests):
    source = staticmethod(drawing_samples)
    def write(self, folder):
        line = '{"word":"line","key_id":"%d","recognized":true,"drawing":[[[0,255],[%d,9]]]}\n'
        (folder/'line.ndjson').write_text(''.join(line%(i, i) for i in range(5)))

class TestList(SourceTests):
    def make(self): return as_source([{'txt':f'{i}', 'cls':i} for i in range(5)])

class TestSplits(SourceTests):
    def make(self): return as_source({'train':[{'id':i} for i in range(5)], 'valid':[{'id':9}]})

class TestStoreAsSource(SourceTests):
    store = MemoryStore({'txt':[b'a',b'b',b'c'], 'cls':np.array([0,1,0])}, vocab={'cls':['x','y']})
    def make(self): return as_source(self.store)

class TestStream(SourceTests):
    def make(self): return as_source(iter([{'id':i} for i in range(5)]))

class Codecs(CodecTests): pass
class TestText(Codecs): codec,values,wrong = get_codec('txt'),['','größe'],[3,None,'\ud800']
class TestJson(Codecs): codec,values,wrong = get_codec('json'),[None,[1,2.5,'x'],{'a':[True]}],[{1:2},{'a':{1}}]
class TestLabels(Codecs): codec,values,wrong = get_codec('labels'),[[],['a','b'],[1,2]],['a',3,[None],[1.5]]
class TestArrays(Codecs):
    codec,wrong = get_codec('npy'),['a',np.array([object()])]
    values = [np.arange(6).reshape(2,3),np.full(3, 2, np.float32)]
class TestNumbers(Codecs): codec,values,wrong = get_codec('i2'),[0,-5,32767],[40000,'a',1.5]
class TestPixels(Codecs):
    codec,wrong = get_codec('raw'),['a',np.zeros(3)]
    values = [np.arange(12, dtype=np.uint8).reshape(3,4),np.arange(36, dtype=np.uint8).reshape(3,4,3)]
    def same(self, a, b): return np.array_equal(np.asarray(a), b)
class TestPng(TestPixels): codec = get_codec('png')
class TestStrokes(Codecs):
    codec,wrong = get_codec('strokes'),[[[[0,300],[1,2]]],'a']
    values = [[np.array([[0,9],[200,255]], np.uint8)]]
    def same(self, a, b): return len(a)==len(b) and all(map(np.array_equal, a, b))
