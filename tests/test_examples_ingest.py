"What each module of `ingest` does, in short: examples that were tried first"
import pickle
import numpy as np
from PIL import Image
from fastcore.test import expect_fail, test_eq
from functools import partial
from fastai_remote.core import StoreBusy
from fastai_remote.ingest.chunk import check_vocab, Columns, plan_fields, stats_field
from fastai_remote.ingest.driver import IngestJob, run_ingest
from fastai_remote.ingest.redis import to_redis
from fastai_remote.ingest.report import FailureLimit
from fastai_remote.ingest.run import ingest, SourcePositions, split_ranges
from fastai_remote.ingest.stores import changeable, MemoryStore, RedisStore
from fastai_remote.store.redis import RedisReader
from fastai_remote.store.server import redis_server
from fastai_remote.write.base import MemoryWriter

def test_ingest_chunk():
    # Two samples, one of which is not an image:
    fields = plan_fields({'png':Image.new('L', (4,4)), 'cls':'cat'}, {})
    columns = Columns(fields, {}, stats_field(fields))
    columns.add(0, {'png':Image.new('L', (4,4), 51), 'cls':'cat'})
    with expect_fail(ValueError, contains='not an image'):
        columns.add(1, {'png':b'no', 'cls':'dog'})
    test_eq((columns.numbers, columns.counts, len(columns.stats)), ([0], {'cls':{'cat':1}}, 1))
    repr({field:v if isinstance(v, np.ndarray) else v[0][:8] for field,v in columns.columns().items()})
    vocab = {'mask.png':['sky','road']}
    columns = Columns(plan_fields({'mask.png':Image.new('L', (4,4))}, vocab), vocab)
    columns.add(0, {'mask.png':Image.new('L', (4,4), 1)})
    with expect_fail(ValueError, contains="code 2 is not in the vocab of 'mask.png', which has 2 labels"):
        columns.add(1, {'mask.png':Image.new('L', (4,4), 2)})
    with expect_fail(ValueError, contains='the samples have no such field; there are png'):
        check_vocab({'mask.png':['a']}, fields)

def test_ingest_driver():
    def write_squares(writer, chunk, part):
        numbers = range(5*chunk, 5*chunk+5)
        writer.put(np.array(numbers), {'txt':[str(i*i).encode() for i in numbers]})
        record = dict(ok=5, failed=0, bytes=10, gaps=[])
        writer.done(chunk, record)
        return record

    class Squares(IngestJob):
        n = 15
        def __init__(self, writer): self.writer = writer
        def write(self): return partial(write_squares, self.writer)
        def chunks(self, marks): return ((k, None) for k in np.flatnonzero(marks==0).tolist())

    writer = MemoryWriter('squares')
    fields = {'txt':{'codec':'txt', 'dtype':None}}
    writer.begin(dict(n=15, chunk=5, fields=fields, splits=None, vocab={}, signature='', stats=None))
    report = run_ingest(Squares(writer), writer, num_workers=1, limit=FailureLimit(), progress=False)
    test_eq((len(writer.store), writer.store[4]['txt']), (15, '16'))
    repr(report)

def test_ingest_partitions():
    server = redis_server()
    parts = [[{'txt':f'row {10*p+i}', 'cls':'ab'[i%2]} for i in range(10)] for p in range(3)]
    with RedisStore.writer(server.url, 'rows', parts[0][0], [10,10,10], chunk=4) as w:
        there = pickle.loads(pickle.dumps(w))
        next(there(1, iter(parts[1])))   # an attempt that dies
        for p,rows in enumerate(parts): print(list(there(p, iter(rows))))
        with expect_fail(ValueError, contains='partition 2 has 4 rows, of which 10'): list(there(2, parts[2][:4]))
        rep = w.commit()
    store = RedisStore(server.url, 'rows')
    test_eq(store.get_many(range(30), 'txt', decode=True)['txt'], [row['txt'] for rows in parts for row in rows])
    test_eq(len([k for k in store.link.client.keys() if b':txt:' in k]), 30)
    with expect_fail(StoreBusy, contains='lock was lost'): list(there(0, iter(parts[0])))
    server.close()
    repr(rep)

def test_ingest_revise():
    server = redis_server()
    def animals(*labels): return [{'txt':f'a {label}', 'cls':label} for label in labels]
    to_redis(animals('cat','dog','cat','owl'), server.url, 'animals', shuffle=False, num_workers=1, progress=False)
    first = RedisStore(server.url, 'animals')
    store = first.append(animals('dog','ant'), shuffle=False, num_workers=1, progress=False)
    test_eq([sample['cls'] for sample in store], ['cat','dog','cat','owl','dog','ant'])
    test_eq(store.vocab, ['cat','dog','owl','ant'])   # the codes that a model was trained with stay the same
    test_eq((len(first), first[3]['cls']), (4, 'owl'))   # a store that was opened before goes on
    store = store.edit(drop=[3], set={'cls':{0:'dog'}})
    store = store.add_fields(lambda sample: {'length.u2':len(sample['txt'])}, num_workers=1, progress=False)
    test_eq(store[0], {'txt':'a cat', 'cls':'dog', 'length.u2':5})
    test_eq(store.class_counts(), {'cat':1, 'dog':3, 'owl':0, 'ant':1})
    store.verify(num_workers=1)
    server.close()

def test_ingest_run():
    test_eq(split_ranges(10, {'train':.8, 'valid':.2}), {'train':[0,8], 'valid':[8,10]})
    test_eq(split_ranges(101, {'train':None, 'valid':20, 'test':.1}), {'train':[0,71], 'valid':[71,91], 'test':[91,101]})
    with expect_fail(ValueError, contains='take 15 samples of 10'):
        split_ranges(10, {'train':10, 'valid':5})
    test_eq(np.sort(SourcePositions([(0,50),(50,60)], True, 0, None)(np.arange(60))[50:]), range(50,60))
    writer = MemoryWriter('squares')
    report = ingest(range(40), writer, lambda i: {'x.i8':i*i}, shuffle=False, num_workers=1, progress=False)
    test_eq(writer.store.get_many([3,5], 'x.i8')['x.i8'], [9,25])
    repr(report)

def test_ingest_stores():
    server = redis_server()
    small = MemoryStore({'txt':[b'one',b'two',b'three'], 'cls':np.array([0,1,1], np.uint8)}, 'small', {'cls':['a','b']})
    store = small.copy(server.url, num_workers=1, progress=False)
    store = store.edit(drop=[0], set={'txt':{1:'zwei'}})
    test_eq(store[:], [{'txt':'zwei', 'cls':'b'}, {'txt':'three', 'cls':'b'}])
    test_eq(store.verify(num_workers=1).bad, 0)
    read = pickle.loads(pickle.dumps(store))
    test_eq((type(read), read[0]), (RedisReader, store[0]))
    test_eq(changeable(read).drop_fields('txt').fields, ['cls'])
    with expect_fail(TypeError, contains='small: a MemoryStore cannot be changed'): small.edit(drop=[0])
    repr(store)
    RedisStore(server.url, 'small').rename('tiny')
    test_eq((RedisStore.names(server.url), RedisStore.unfinished(server.url)), (['tiny'], []))
    RedisStore.delete(server.url, 'tiny')
    test_eq(RedisStore.names(server.url), [])
    server.close()
