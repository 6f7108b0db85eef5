"What each module of `ingest` does, in short: examples that were tried first"
import numpy as np
from PIL import Image
from fastcore.test import expect_fail, test_eq
from functools import partial
from fastai_remote.ingest.chunk import check_vocab, Columns, plan_fields, stats_field
from fastai_remote.ingest.driver import IngestJob, run_ingest
from fastai_remote.ingest.report import FailureLimit
from fastai_remote.ingest.run import ingest, SourcePositions, split_ranges
from fastai_remote.write.base import MemoryWriter

def test_ingest_chunk():
    # Two samples, one of which is not an image:
    fields = plan_fields({'png':Image.new('L', (4,4)), 'cls':'cat'}, {})
    columns = Columns(fields, {}, stats_field(fields))
    columns.add(0, {'png':Image.new('L', (4,4), 51), 'cls':'cat'})
    with expect_fail(ValueError, contains='not an image'):
        columns.add(1, {'png':b'no', 'cls':'dog'})
    test_eq((columns.numbers, columns.counts, len(columns.stats)), ([0], {'cls':{'cat':1}}, 1))
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
    run_ingest(Squares(writer), writer, num_workers=1, limit=FailureLimit(), progress=False)
    test_eq((len(writer.store), writer.store[4]['txt']), (15, '16'))

def test_ingest_run():
    test_eq(split_ranges(10, {'train':.8, 'valid':.2}), {'train':[0,8], 'valid':[8,10]})
    test_eq(split_ranges(101, {'train':None, 'valid':20, 'test':.1}), {'train':[0,71], 'valid':[71,91], 'test':[91,101]})
    with expect_fail(ValueError, contains='take 15 samples of 10'):
        split_ranges(10, {'train':10, 'valid':5})
    test_eq(np.sort(SourcePositions([(0,50),(50,60)], True, 0, None)(np.arange(60))[50:]), range(50,60))
    writer = MemoryWriter('squares')
    ingest(range(40), writer, lambda i: {'x.i8':i*i}, shuffle=False, num_workers=1, progress=False)
    test_eq(writer.store.get_many([3,5], 'x.i8')['x.i8'], [9,25])
