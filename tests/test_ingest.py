"Ingests of every kind of source: nothing is lost or written twice, gaps are closed, failures named, no key left over"
import pickle, re, zlib
from functools import partial

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, example, given, strategies as st
from PIL import Image

from conftest import examples
from fastai_remote import (image_samples, index_shards, IngestError, RedisStore, ShardStore, StoreError, StoreExists,
                           to_redis, to_shards, UnknownField)
from fastai_remote.ingest.run import ingest, split_ranges
from fastai_remote.source.base import IndexedSource, StreamedSource
from fastai_remote.store.redis_parts import KEY_BITS, key_layout, packed_reads, unpack_replies
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.write.base import ChunksLost, MemoryWriter
from fastai_remote.write.redis import RedisWriter
from fastai_remote.write.redis_place import packed_writes
from fastai_remote.write.revision import wider_dtype
from inputs import in_memory as write
from snapshots import client

ONE = dict(num_workers=1, progress=False)

@pytest.fixture
def put(server):
    "Write to an empty server: the store and the report"
    client(server).flushall()
    def put(source, name='d', **options):
        report = to_redis(source, server.url, name, **{**ONE, **options})
        return RedisStore(server.url, name),report
    return put

def keys(server): return sorted(k.decode() for k in client(server).keys())
def values(store, field): return [sample[field] for sample in store[:]]

def want_keys(var, fixed, numbers, failed=False):
    "All keys of a dataset `d` with samples at the places `numbers`"
    return sorted(['d:meta', 'd:register', 'fastai_remote:names', 'fastai_remote:used', *['d:~failures#0','d:~gaps#0']*failed,
                   *(f'd:{field}:{i}' for field in var for i in numbers),
                   *(f'd:{field}#0' for field in [*fixed, *(f'{v}.crc' for v in var)])])

# --- sources

def test_a_list_is_written_shuffled_with_each_sample_once_and_no_key_but_its_own(put, server):
    src = [{'txt':f'sample {i}', 'cls':'abc'[i%3], 'id':i} for i in range(100)]
    s,rep = put(src, progress=True)
    assert (len(s),rep.written,rep.failed,s.fields)==(100,100,0,['txt','cls','id'])
    assert (s.vocab,s.splits)==(list('abc'),{})
    assert sorted(values(s, 'id'))==list(range(100)) and values(s, 'id')!=list(range(100))
    assert all(s[i]==src[s[i]['id']] for i in range(100))
    assert keys(server)==want_keys(['txt'], ['cls','id'], range(100))
    assert rep.nbytes==s.manifest.nbytes>0

def test_the_order_depends_on_the_seed_only():
    src = [{'id':i} for i in range(200)]
    options = dict(shuffle=False),dict(shuffle=True),dict(shuffle=True, seed=1),dict(shuffle=True, chunk=np.int64(7))
    plain,shuffled,other,in_sevens = (values(write(src, **kw)[0], 'id') for kw in options)
    assert plain==list(range(200)) and shuffled==in_sevens!=other
    assert sorted(shuffled)==sorted(other)==plain!=shuffled

def test_images_of_all_kinds_below_a_folder(tmp_path):
    "Some capitalised, others hidden. Labels by a function, paths if asked for, bytes as in the files"
    for i,(folder,ext) in enumerate((f,e) for f in ('a','a/x','b/y/z','b') for e in ('jpg','JPEG','png','webp','bmp')):
        (tmp_path/folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((6,8,3), i, np.uint8)).save(tmp_path/folder/f'ü {i}.{ext}')
    (tmp_path/'.cache').mkdir()
    for other in 'a/notes.txt','.cache/x.jpg','a/._1.jpg': (tmp_path/other).write_text('no image, or hidden')
    s,rep = write(image_samples(tmp_path, label=lambda p: p.relative_to(tmp_path).parts[0], path=True))
    paths = values(s, 'path')
    assert (len(s),rep.failed,s.fields,s.vocab)==(20,0,['img','cls','path'],['a','b'])
    assert sorted(paths)==sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob('ü*'))
    assert s.get_many(range(20), 'img')['img']==[(tmp_path/p).read_bytes() for p in paths]
    assert values(s, 'cls')==[p[0] for p in paths]

def test_fn_returns_a_sample_in_any_of_its_shapes():
    s,_ = write(list(range(20)), lambda i: (f'{i%4}', np.full(3, i)))
    assert s.fields==['cls','npy'] and values(s, 'cls')==[f'{i%4}' for i in range(20)]
    assert values(s, 'npy')[7].tolist()==[7]*3

class Numbers(IndexedSource):
    "The numbers from 0; `by` more, or fewer, than it was asked for, in lists of type `kind`"
    def __init__(self, n, by=0, kind=list): self.n,self.by,self.kind = n,by,kind
    def __len__(self): return self.n
    def read(self, numbers):
        return self.kind((f'item {i}',i) for i in range(len(numbers)+self.by*(len(numbers)>1)))
    def load(self, i): return {'id':i}
    def fingerprint(self): return self.n

class Longer(list):
    "A part that has a sample more than it says"
    def __iter__(self): return iter([*super().__iter__(), ('more',1)])

class Parts(StreamedSource):
    "A stream in parts of these lengths, whatever is asked for"
    def __init__(self, *lengths): self.lengths = lengths
    def stream(self, size):
        for k,n in enumerate(self.lengths): yield [(f'{k} {i}',i) for i in range(n)]
    def load(self, i): return {'id':i}
    def fingerprint(self): return self.lengths

@pytest.mark.parametrize('source,match', [
    (Numbers(10, -1), 'gave 3 samples, where 4 were asked for'), (Numbers(10, 1), 'gave 5 samples, where 4'),
    (Parts(4,5), r'stream\(4\) of the source gave a part of 5'),
    (Numbers(8, kind=Longer), 'the source gave 5 samples in a part whose length is 4')])
def test_a_source_that_gives_other_numbers_of_samples_than_it_should(source, match):
    with pytest.raises(ValueError, match=match): write(source, chunk=4)

def test_a_stream_may_have_empty_parts(): assert values(write(Parts(2,0,1), chunk=4)[0], 'id')==[0,1,0]

def test_an_empty_source_is_an_error(put, server, tmp_path):
    for src in [], {'train':[], 'valid':[]}, {}, pd.DataFrame({'cls':[]}), np.zeros((0,3)):
        with pytest.raises(ValueError, match='d: the source is empty'): put(src)
    assert keys(server)==[]
    for folder in tmp_path,tmp_path/'none':
        with pytest.raises(FileNotFoundError, match=str(folder)): image_samples(folder)

# --- values and labels

def test_a_vocabulary_that_is_given_keeps_its_order(put):
    "Other labels are failures, and those that do not occur stay. Where classes have names, integers are codes"
    s,rep = put([{'cls':c} for c in 'cabcab?ba'], vocab=['c','b','a','z'], shuffle=False)
    assert values(s, 'cls')==list('cabcabba') and s.vocab==['c','b','a','z']
    assert s.get_many([0,1,2], 'cls')['cls'].tolist()==[0,2,1]
    assert rep.failed==1 and 'item 6' in repr(rep) and "label '?' is not in the vocab of 'cls'" in repr(rep)
    s,rep = put([{'cls':i} for i in (2,0,5,1)], 'codes', vocab=['x','y','z'], shuffle=False)
    assert (values(s, 'cls'),s.vocab,rep.failed)==(['z','x','y'],['x','y','z'],1)
    src = [{'id':0, 'labels':['b','ü']}, {'id':1, 'labels':[]}, {'id':2, 'labels':['a']}]
    s,_ = put(src, 'several', shuffle=False)
    assert (values(s, 'labels'),s.vocab)==([['b','ü'],[],['a']],['a','b','ü'])
    s,rep = put(src, 'given', vocab={'labels':['b','a']})
    assert (sorted(values(s, 'id')),s.vocab,rep.failed)==([1,2],['b','a'],1)

@pytest.mark.parametrize('labels', [(3,0,7,7), (100_000,100_001), (-3,40_000,5)], ids=str)
def test_integer_labels_are_categories(put, labels):
    "The vocabulary is the integers there are, sorted, as in stock fastai; codes number these, and the label comes back"
    s,_ = put([{'cls':label, 'id':k} for k,label in enumerate(labels)])
    want,ordered = sorted(set(labels)),[labels[k] for k in values(s, 'id')]
    assert s.vocab==want and s.manifest.counts['cls']==[labels.count(i) for i in want]
    assert values(s, 'cls')==ordered==s.get_many(range(len(s)), 'cls', decode=True)['cls']
    assert s.get_many(range(len(s)), 'cls')['cls'].tolist()==[want.index(label) for label in ordered]
    copy,_ = put(s, 'copy', shuffle=False)
    assert (copy.vocab,values(copy, 'cls'))==(want,ordered)

def test_too_many_integers_for_categories_are_numbers(put, monkeypatch):
    monkeypatch.setattr('fastai_remote.write.revision.MAX_CLASSES', 1000)
    for writes in put,write:
        for n,vocab in (1000,[5*i-9 for i in range(1000)]),(1001,[]):
            s,_ = writes([{'cls':5*i-9} for i in range(n)], shuffle=False, overwrite=True)
            assert s.vocab==vocab and values(s, 'cls')==[5*i-9 for i in range(n)]
    assert s.get_many([0,7,1000], 'cls', check=True)['cls'].tolist()==[-9,26,4991]

def test_types_that_no_integer_has():
    for types in ('f4','f8'),(None,'u1'),('i8','u8'):
        with pytest.raises(ValueError, match="d: 'x' has numbers of type .* no integer type has all"):
            wider_dtype('d', 'x', *types)
    assert (wider_dtype('d', 'x', 'u1', 'i2'),wider_dtype('d', 'x', None, None))==('i2',None)

# --- arguments

def test_what_fits_no_field_is_refused_before_anything_is_written(put, server):
    for bad in [object()]*3, [{'a:b':1}], [{'':1}]:
        with pytest.raises((IngestError,ValueError), match='object|a:b|name'): put(bad)
    with pytest.raises(IngestError, match='TypeError: 0 cannot name a field: a name is a text'): put([{0:'a'}])
    for name in '', 'a:b', 'a@2', 'a#', '*', 'a\n', None, 3:
        with pytest.raises(ValueError, match='name'): put([1], name)
    assert keys(server)==[]
    s,report = put([{'txt':'a'}, {0:'a'}], shuffle=False)
    assert report.failures==[('item 1', 'ValueError: fields 0; the first sample had txt')]
    with pytest.raises(UnknownField, match="no field 'nope'"): s.resize(8, name='f', field='nope')

@pytest.mark.parametrize('option,wrong,says', [
    ('chunk', (0,-1,2.5,'4',True), 'chunk is a number of samples, at least 1'),
    ('seed', (-1,1.5,'7'), 'seed is an integer of at least 0, not '),
    ('num_workers', (-1,1.5,float('nan'),'2'), 'num_workers=.*: want an integer'),
    *((limit, (float('inf'),float('nan'),0), 'maxsize and maxcount are numbers of at least 1')
      for limit in ('maxsize','maxcount'))])
def test_options_that_cannot_be_used_are_refused_before_anything_is_written(tmp_path, server, option, wrong, says):
    to_shards([{'txt':'a'}], tmp_path/'old', **ONE)
    store,new = ShardStore(tmp_path/'old'),tmp_path/'new'
    calls = [partial(to_shards, [{'txt':'a'}], new)]
    if 'max' not in option: calls.append(partial(to_redis, [{'txt':'a'}], server.url, 'new'))
    if option=='chunk': calls.append(partial(RedisStore.writer, server.url, 'new', {'txt':'a'}, [1]))
    if option=='num_workers':
        calls += store.verify,partial(store.map, dict, new),partial(index_shards, tmp_path/'old', new)
    for value in wrong:
        for call in calls:
            with pytest.raises(ValueError, match=says): call(**{option:value})
    with pytest.raises(ValueError, match='chunk is a number of samples'): store.verify(num_workers=1, chunk=0)
    assert not new.exists() and 'new' not in RedisStore.names(server.url)

@pytest.mark.parametrize('n,splits,sizes', [
    # what is too much is taken from the largest; no split has less than nothing
    (7, {'a':.5, 'b':.5, 'c':None}, [3,4,0]), (7, {f's{k}':.1 for k in range(10)}, [0,0,0,1,1,1,1,1,1,1]),
    (7, {'a':3, 'b':.5, 'c':None}, [3,4,0]), (10, {'a':.3, 'b':None}, [3,7]), (0, {'a':.5, 'b':.5}, [0,0]),
    # what rounding leaves goes to the largest fraction; a number of samples stays as it is
    (10, {'a':.25, 'b':.25, 'c':5}, [3,2,5]), (7, {f's{k}':1/7 for k in range(7)}, [1]*7),
    (9, {'a':1/6, 'b':1/6, 'c':1/6, 'd':1/2}, [2,2,2,3])])
def test_fractions_cover_all_samples(n, splits, sizes):
    assert [stop-start for start,stop in split_ranges(n, splits).values()]==sizes

@pytest.mark.parametrize('n,splits,match', [
    (7, {'a':.6, 'b':.6, 'c':None}, 'take 8 samples of 7'), (10**7, {'a':.5, 'b':4_999_995}, 'samples of 10,000,000'),
    (10**7, {'a':.5, 'b':5_000_005}, 'samples of 10,000,000')], ids=str)
def test_sizes_that_do_not_add_up_are_refused(n, splits, match):
    with pytest.raises(ValueError, match=match): split_ranges(n, splits)

# --- samples that fail

FIRST,HALF,ALL = {0,1,2,3},set(range(20, 40)),set(range(40))

@pytest.mark.slow
@examples(10)
@given(st.lists(st.sets(st.integers(0, 39)), min_size=1, max_size=3))
@example([set()]*3)
@example([FIRST, {39}, {5,39}])
@example([HALF, ALL, set()])
@example([set(range(0, 40, 2))]*3)
@example([ALL-{0}, ALL, ALL-{39}])
@example([set(), HALF, ALL])
def test_samples_that_fail_leave_no_gap(server, bads):
    "Each split is dense, with each good sample once; without a shuffle, in the order of the source; no key is left"
    n,bad = 40*len(bads),{40*k+i for k,part in enumerate(bads) for i in part}
    assume(len(bad)<n)
    def good(i): return {'txt':f'sample {i}', 'cls':f'c{i%7}', 'id':i, 'labels':[f'l{i%3}']}
    def fn(i):
        if i in bad: raise ValueError(f'no {i}')
        return good(i)
    client(server).flushall()
    src = {f's{k}':range(40*k, 40*k+40) for k in range(len(bads))}
    is_shuffled = len(bad)<7
    rep = to_redis(src, server.url, 'd', fn, chunk=16, shuffle=is_shuffled, max_failed=1., **ONE)
    s = RedisStore(server.url, 'd')
    samples,n_good,at = s[:],n-len(bad),0
    assert (rep.written,rep.failed,len(s))==(n_good,len(bad),n_good)
    for split,(start,stop) in s.splits.items():
        numbers = [o['id'] for o in samples[start:stop]]
        assert start==at and sorted(numbers)==[i for i in src[split] if i not in bad]
        assert is_shuffled or numbers==sorted(numbers)
        at = stop
    assert samples==[good(o['id']) for o in samples]
    (_,_,places), = s.groups(np.arange(n_good))
    assert keys(server)==want_keys(['txt','labels'], ['cls','id'], places.tolist(), failed=bool(bad))
    reasons = {i:f'ValueError: no {i} (fn was given: int)' for i in bad}
    assert sorted(s.failures())==sorted((f's{i//40}: item {i%40}', reasons[i]) for i in bad)
    assert len(rep.failures)==min(100, len(bad)) and {*rep.failures}<={*s.failures()}

def test_a_first_sample_that_fails_decides_nothing(put):
    "Nor has a label that only a failed sample had a place in the vocabulary"
    good = [{'txt':f'{i}', 'cls':'ab'[i%2]} for i in range(20)]
    for first in {'txt':'a', 'cls':float('nan')}, {'txt':'a', 'cls':None}, {'txt':3, 'cls':'a'}:
        s,rep = put([first, *good, {'cls':'zzz', 'txt':3}], overwrite=True)
        assert (rep.failed,len(s),s.vocab)==(2,20,['a','b']) and all(o in good for o in s)

def test_an_ingest_in_which_all_samples_fail_can_be_repeated_when_the_source_is_mended(put, server, tmp_path):
    "Each damaged file is named"
    def images(): return put(image_samples(tmp_path, path=True), max_failed=1.)
    for k in range(20): (tmp_path/f'{k}.jpg').write_text('no jpeg')
    with pytest.raises(IngestError, match='none of the (first )?20 samples could be converted; .*jpg'): images()
    with pytest.raises(IngestError, match='none of the first 20 .*ZeroDivisionError'): put(range(20), fn=lambda i: 1//0)
    assert keys(server)==[]
    for k in range(18): Image.new('L', (9,9), k).save(tmp_path/f'{k}.jpg')
    (tmp_path/'gone.jpg').symlink_to('nowhere')
    s,rep = images()
    assert sorted(values(s, 'path'))==sorted(f'{k}.jpg' for k in range(18))
    assert {name for name,_ in rep.failures}=={str(tmp_path/name) for name in ('18.jpg','19.jpg','gone.jpg')}

def test_an_empty_dict_is_no_sample():
    with pytest.raises(IngestError, match='none of the first 3 .*item 0: ValueError: a sample without fields: it, or '
                                          'what fn returns, is a dict'):
        write(list(range(3)), lambda i: {})
    store,report = write(list(range(3)), lambda i: {'txt':str(i)} if i else {})
    assert report.failures==[('item 0', 'ValueError: fields none; the first sample had txt')] and len(store)==2

# --- chunks that are written again

def test_a_label_of_a_late_attempt_is_written_again(fresh):
    "An engine runs a task twice, and `fn` answers otherwise: the attempt that recorded the chunk counts"
    leader = RedisWriter(RedisLink(fresh.url), 'd')
    fields = {'cls':{'codec':'cls', 'dtype':'i8', 'staged':True, 'text':True}}
    leader.begin(dict(signature='s', n=8, chunk=4, fields=fields, splits=None, vocab={}, stats=None))
    def write(chunk, label, records=True):
        writer,numbers = leader.opener()(),np.arange(4*chunk, 4*chunk+4)
        writer.put(numbers, {'cls':[label]*4})
        if records: writer.done(chunk, dict(ok=4, bytes=32, failed=0, gaps=[], counts={'cls':[[label,4]]}))
    write(0, 'a')
    write(1, 'b')
    write(1, 'late', records=False)
    with pytest.raises(ChunksLost, match="lost values of 1 chunks of 'd'"): leader.commit()
    assert [chunk for chunk,_ in leader.records()]==[0]
    write(1, 'b')
    leader.commit()
    leader.close()
    store = RedisStore(fresh.url, 'd')
    assert [o['cls'] for o in store[:]]==['a']*4+['b']*4 and store.class_counts()=={'a':4, 'b':4}

def test_failures_of_chunks_that_were_lost_count_once():
    "When they are written again: else there were too many"
    class Losing(MemoryWriter):
        lost = False
        def commit(self):
            if self.lost: return super().commit()
            self.lost = True
            del self.place.chunks[0]
            raise ChunksLost('lost')
    _,report = write(list(range(20)), lambda i: {'id':1//i}, Losing(), chunk=4, max_failed=1)
    assert (report.written,report.failed)==(19,1)

# --- partitions

def test_a_writer_of_partitions_works_from_its_with_block_to_its_commit(server):
    "What is called before or afterwards says so: nothing is busy, and nothing was lost"
    def check_refused(write, says):
        for use in lambda: list(write(0, [{'id':1}])), lambda: write.commit(), lambda: pickle.dumps(write):
            with pytest.raises(RuntimeError, match=f'use the writer in with{says}'): use()
    with pytest.raises(TypeError, match='fn must be a function'): RedisStore.writer(server.url, 'with', {'id':1}, [1], fn=5)
    write = RedisStore.writer(server.url, 'with', {'id':1}, [1])
    check_refused(write, '')
    with write:
        list(write(0, [{'id':1}]))
        assert write.commit().written==1
        check_refused(write, ': .* until commit has returned')
    with RedisStore.writer(server.url, 'ends', {'id':1}, [1]) as write: list(write(0, [{'id':1}]))
    check_refused(write, '')
    RedisStore.abandon(server.url, 'ends')

def test_partitions_have_no_negative_numbers_of_rows(server):
    with pytest.raises(ValueError, match=r'd: numbers of rows of partitions, not \[3, -1\]'):
        RedisStore.writer(server.url, 'd', {'id':0}, [3,-1])

def test_chunks_of_partitions_that_the_server_has_lost(server):
    "And those that nobody has written: they can be written then"
    rows = [{'id':i} for i in range(6)]
    with RedisStore.writer(server.url, 'lost', {'id':1}, [0,6,3], chunk=2) as write:
        list(write(1, rows))
        key, = (key for key in keys(server) if key.endswith(':record:1'))
        client(server).delete(key)
        with pytest.raises(StoreError, match="3 chunks of 'lost' are not written, or lost"): write.commit()
        assert 'lost' not in RedisStore.names(server.url)
        for partition,part in (1,rows),(2,rows[:3]),(0,[]): list(write(partition, part))
        assert write.commit().written==9
    assert values(RedisStore(server.url, 'lost'), 'id')==[0,1,2,3,4,5,0,1,2]

def test_a_partition_that_is_written_twice_counts_once_and_one_of_another_length_is_refused(server):
    "The first attempt counts, whatever fails in the second"
    fails = []
    def fn(row):
        if row['id'] in fails: raise ValueError('no')
        return row
    with RedisStore.writer(server.url, 'twice', {'id':1,'txt':'a'}, [5,4], fn, chunk=2, max_failed=9) as write:
        for fails[:] in [1],[3,6],[]:
            list(write(0, [{'id':i,'txt':f't{i}'} for i in range(5)]))
            list(write(1, [{'id':i,'txt':f't{i}'} for i in range(5, 9)]))
        for n in 3,5:
            with pytest.raises(ValueError, match=f'partition 1 has {n} rows, of which 4 were counted'):
                list(write(1, [{'id':i,'txt':f't{i}'} for i in range(5, 5+n)]))
        assert (report := write.commit()).failed==1 and report.written==8
    store = RedisStore(server.url, 'twice')
    assert values(store, 'txt')==[f't{i}' for i in range(9) if i!=1] and not store.verify(num_workers=1).bad
    assert not [key for key in keys(server) if key in ('twice:txt:1','twice:txt:5') or 'ingest' in key.removeprefix('fastai_remote:')]

def test_the_report_opens_the_dataset(server, tmp_path):
    rows = [{'id':1, 'txt':'a'}]
    reports = [to_redis(rows, server.url, 'r', **ONE), to_shards(rows, tmp_path/'d', **ONE)]
    for file in (tmp_path/'d/manifest.json', *(tmp_path/'d').glob('.fastai_remote/*.fastai_remote')): file.unlink()
    for to in None,tmp_path/'index': reports.append(index_shards(tmp_path/'d', to=to, **ONE))
    with RedisStore.writer(server.url, 'p', rows[0], [1]) as write:
        list(write(0, rows))
        reports.append(write.commit())
    for report in reports: assert report.store[0]['txt']=='a' and 'open' not in repr(report)
    with pytest.raises(ValueError, match='only its writer knows'): print(ingest(rows, MemoryWriter(), **ONE).store)

# --- again, and anew

def test_a_dataset_that_is_there_is_not_written_over_unasked(put):
    "An iterator that was refused is not consumed"
    put([1,2,3])
    source = ({'id':i} for i in range(200))
    with pytest.raises(StoreExists, match=r"'d' is there already \(3 samples.*overwrite=True"): put(source)
    s,_ = put(source, overwrite=True)
    assert values(s, 'id')==list(range(200)) and s.manifest.generation==2

def test_a_replacement_that_comes_to_nothing_leaves_the_old_dataset_as_it_was(put, server):
    s,_ = put([{'txt':'old'}]*20)
    before = {k:client(server).dump(k) for k in keys(server)}
    with pytest.raises(IngestError, match='none of the'): put([{'txt':3}]*20, overwrite=True)
    assert {k:client(server).dump(k) for k in keys(server)}==before
    def fn(i):
        if i==15: raise KeyboardInterrupt
        return {'txt':'new'}
    with pytest.raises(KeyboardInterrupt): put(list(range(20)), fn=fn, overwrite=True, shuffle=False, chunk=8)
    assert values(s, 'txt')==values(RedisStore(server.url, 'd'), 'txt')==['old']*20

def test_a_report_is_shown_as_text_and_in_a_notebook(put, server):
    def fn(o): return 1//0 if 5<=o['id']<12 else {'txt':'x'*50}
    _,rep = put([{'id':i} for i in range(50)], fn=fn, shuffle=False, max_failed=7)
    text,html = repr(rep),rep._repr_html_()
    first = r'd: 43 written, 7 failed, .*B in [\d.]+ s \([\d,]+ samples/s\)\n  item 5: ZeroDivisionError: '
    assert re.match(first, text) and text.endswith('… 2 more') and text.count('\n')==6 and 'resumed' not in html
    shown = f'd at {server.url}','<td>43</td>','<td>7</td>','item 11','ZeroDivisionError','a sample'
    assert all(part in html for part in shown)
    _,rep = put([{'id':i, 'txt':'<b>'} for i in range(20)]+[{'id':'<script>', 'txt':''}], 'e')
    assert '<script>' not in rep._repr_html_() and '&lt;script&gt;' in rep._repr_html_()

# --- packed keys

def test_numbers_of_every_type_near_and_far(put):
    "Positions close together come as one copy, others each by itself, with and without their checksums"
    rng,n = np.random.default_rng(0),3000
    columns = {f'x.{t}':rng.integers(-2**63, 2**63, n).view('u8').astype(t) for t in 'i1 u1 i2 u2 i4 u4 i8'.split()}
    columns |= {f'x.{t}':rng.normal(size=n).astype(t) for t in ('f2','f4','f8')}
    s,_ = put([{field:column[i] for field,column in columns.items()} for i in range(n)], shuffle=False)
    for pos in [5,3,3,30], range(399, 99, -1), [0,2999,17], [7]:
        for check in False,True:
            got = s.get_many(pos, s.fields, check=check)
            for field,column in columns.items():
                assert got[field].dtype==column.dtype and got[field].tobytes()==column[list(pos)].tobytes()

@pytest.mark.parametrize('dtype,check', [('u1',None), ('i2',None), ('u1','u4'), ('f8','u4')])
def test_packed_values_on_both_sides_of_a_boundary_go_into_two_keys(server, dtype, check):
    first,vals = 1<<KEY_BITS,np.array([1,2,3,100,5,6,7], dtype)
    pos,link,size = first+np.array([-3,-2,-1,0,1,2,5]),RedisLink(server.url),vals.itemsize+(4 if check else 0)
    def read(pos):
        "Values, and positions among `pos` that are beyond the end"
        commands,plan = packed_reads(key_layout('b'), 'f', dtype, pos, check)
        crcs = np.zeros(len(pos), 'u4') if check else None
        values,gone = unpack_replies(plan, iter(link.send(commands)), dtype, len(pos), crcs)
        if check and not gone:
            big = values.astype(values.dtype.newbyteorder('>'))[:,None]
            assert crcs.tolist()==[zlib.crc32(v.tobytes()+i.to_bytes(8, 'big')) for v,i in zip(big, pos.tolist())]
        return values.tolist(),gone
    client(server).delete('b:f#0', 'b:f#1')
    link.send(packed_writes(key_layout('b'), 'f', dtype, pos, vals, check))
    assert [client(server).strlen(key) for key in ('b:f#0','b:f#1')]==[size*first, 6*size]
    for order in np.arange(7),np.array([6,0,3,2,2,5]): assert read(pos[order])==(vals[order].tolist(), [])
    assert read(np.array([first+6, first-1, 2*first+1]))[1]==[0,2]
