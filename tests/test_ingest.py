"`to_redis`, from every kind of source: nothing lost, nothing twice, gaps closed, failures named, no key left over"
import pickle, random, re, threading, time, zlib

import numpy as np
import pandas as pd
import pytest
import redis
import torch
from fastai.data.core import Datasets
from fastai.data.transforms import Categorize
from fastai.vision.core import PILImage
from hypothesis import given, strategies as st
from PIL import Image

from conftest import CLASSES, N, class_of, examples, wait_for
from fastai_remote.source.base import IndexedSource, StreamedSource
from fastai_remote import (IngestError, RedisStore, ShardStore, StoreError, StoreExists, StoreNotFound, UnknownField, image_samples,
    index_shards, redis_server, shrink, to_redis, to_shards)
from fastai_remote.ingest.run import ingest, split_ranges
from fastai_remote.store.storage import Storage
from fastai_remote.write.base import ChunksLost, fill_gaps, MemoryWriter
from fastai_remote.write.redis import RedisWriter
from fastai_remote.write.revision import wider_dtype
from fastai_remote.write.shards import ShardWriter
from fastai_remote.write.redis_state import packed_writes, split_runs
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.store.redis_layout import key_layout, KEY_BITS, packed_reads, unpack_replies

@pytest.fixture
def put(server):
    "Write to a clean server: the store and the report"
    client(server).flushall()
    yield lambda src, name='d', **kw: (lambda rep: (RedisStore(server.url, name), rep))(to_redis(src, server.url, name, **{'num_workers':1, 'progress':False, **kw}))
    client(server).flushall()

@pytest.fixture(scope='module')
def server():
    "A server for this module, for others' data would be in the way"
    with redis_server() as s: yield s

def client(server): return redis.Redis.from_url(server.url)
def keys(server): return sorted(k.decode() for k in client(server).keys())
def values(store, f): return [store.decode(i, f, b) for i,b in enumerate(store.get_many(range(len(store)), f, check=True)[f])]

def want_keys(name, var, fixed, n, prefix=None, failed=False):
    "All keys of a dataset of `n` samples"
    p = prefix or name
    return sorted([f'{name}:meta','fastai_remote:names', *([f'{p}:~failures#0'] if failed else []), *(f'{p}:{f}:{i}' for f in var for i in range(n)), *(f'{p}:{f}#0' for f in [*fixed, *(f'{v}.crc' for v in var)])])

# --- kinds of sources

def test_list(put, server):
    "A list of dicts: each sample once, and no key but its own"
    src = [{'txt':f'sample {i}', 'cls':'abc'[i%3], 'id':i} for i in range(100)]
    s,rep = put(src)
    assert (len(s),rep.written,rep.failed,s.fields,s.vocab,s.splits)==(100,100,0,['txt','cls','id'],list('abc'),{})
    assert sorted(values(s, 'id'))==list(range(100)) and values(s, 'id')!=list(range(100))
    assert all(s[i]==src[s[i]['id']] for i in range(100))
    assert keys(server)==want_keys('d', ['txt'], ['cls','id'], 100)
    assert rep.nbytes==s.manifest.nbytes>0

def test_splits(put, server):
    "A dict of splits: each is a range, shuffled in itself"
    parts = dict(train=range(50), valid=range(50,70), test=range(70,71), none=range(0))
    s,_ = put({k:[{'id':i, 'cls':i%2} for i in v] for k,v in parts.items()})
    assert s.splits=={'train':[0,50], 'valid':[50,70], 'test':[70,71], 'none':[71,71]}
    for k,(a,b) in s.splits.items(): assert sorted(values(s, 'id')[a:b])==list(parts[k])

def test_dataframe(put):
    "The rows of a DataFrame, whatever its index"
    df = pd.DataFrame({'txt':[f'w{i}' for i in range(40)], 'cls':['x','y']*20, 'target.f4':np.linspace(0, 1, 40), 'id':range(40)}, index=[7]*40)
    s,_ = put(df)
    assert all(s[i]['txt']==f"w{s[i]['id']}" and s[i]['cls']=='xy'[s[i]['id']%2] for i in range(40))
    assert np.allclose(values(s, 'target.f4'), df['target.f4'].to_numpy(np.float32)[values(s, 'id')])

class Tensors(torch.utils.data.Dataset):
    "As `TensorDataset`: tuples of tensors"
    def __init__(self, n=40): self.x,self.y = torch.arange(4*n).reshape(n, 2, 2).float(),torch.arange(n)%5
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i],self.y[i]

def test_torch_dataset(put):
    "Tensors become arrays, int labels codes"
    for ds in (Tensors(), torch.utils.data.TensorDataset(Tensors().x, Tensors().y)):
        s,_ = put(ds, overwrite=True)
        assert s.fields==['npy','cls'] and s.vocab==list(range(5))
        assert all(np.array_equal(x, ds[int(x[0,0])//4][0]) and y==int(x[0,0])//4%5 for x,y in zip(values(s, 'npy'), values(s, 'cls')))

class Named(Tensors):
    classes = ['ant','bee','cow','dog','eel']
    def __getitem__(self, i): return Image.fromarray(np.full((5,6,3), i, np.uint8)),int(self.y[i])

def test_dataset_with_classes(put):
    "The names of a dataset's classes are the vocabulary, in their order"
    s,_ = put(Named())
    assert s.fields==['png','cls'] and s.vocab==Named.classes
    assert all(y==Named.classes[np.asarray(x)[0,0,0]%5] for x,y in zip(values(s, 'png'), values(s, 'cls')))

def test_fastai_datasets(put, images):
    "fastai's `Datasets`: images, and labels under their names"
    files = sorted(images.glob('*/*.jpg'))
    dsets = Datasets(files, [[PILImage.create],[class_of, Categorize()]])
    s,_ = put(dsets, shuffle=False)
    assert s.vocab==list(CLASSES) and values(s, 'cls')==[class_of(o) for o in files]
    assert np.array_equal(np.asarray(s[3]['jpg']), np.asarray(PILImage.create(files[3])))
    assert [bytes(b) for b in s.get_many(range(len(s)), 'jpg', check=True)['jpg']]==[f.read_bytes() for f in files]

def test_paths(put, images):
    "A list of paths is a list of images, as they are"
    files = sorted(images.glob('*/*.jpg'))[:20]
    s,_ = put(files, shuffle=False)
    assert s.fields==['jpg'] and s.get_many(range(20), 'jpg')['jpg']==[o.read_bytes() for o in files]

@pytest.fixture(scope='module')
def mixed(tmp_path_factory):
    "Folders in folders, with four kinds of images, some of them capitalised or hidden, and other files"
    d = tmp_path_factory.mktemp('mixed')
    for i,(folder,ext) in enumerate((f,e) for f in ('a','a/x','b/y/z','b') for e in ('jpg','JPEG','png','webp','bmp')):
        (d/folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((6,8,3), i, np.uint8)).save(d/folder/f'ü {i}.{ext}')
    (d/'a'/'notes.txt').write_text('no image')
    (d/'.cache').mkdir(); (d/'.cache'/'x.jpg').write_text('hidden')
    (d/'a'/'._1.jpg').write_text('hidden')
    return d

def test_image_folder(put, mixed):
    "Images of all kinds below a folder: labels by a function, paths if asked for, bytes as in the files"
    src = image_samples(mixed, label=lambda p: p.relative_to(mixed).parts[0], path=True)
    s,rep = put(src)
    assert (len(s),rep.failed,s.fields,s.vocab)==(20,0,['img','cls','path'],['a','b'])
    assert sorted(values(s, 'path'))==sorted(str(p.relative_to(mixed)) for p in mixed.rglob('ü*'))
    for i in range(20): assert s.get_many([i], 'img')['img'][0]==(mixed/(p:=s[i]['path'])).read_bytes() and s[i]['cls']==p[0]

def test_shrink(put, mixed, images):
    "`fn=shrink(…)`: all become JPEGs of that size; those that are small enough stay as they are"
    s,_ = put(image_samples(images, label=class_of), fn=shrink(24))
    assert s.fields==['jpg','cls'] and {min(o.size) for o in values(s, 'jpg')}=={24}
    s,rep = put(image_samples(mixed, path=True), 'm', fn=shrink(6))
    assert (s.fields,rep.failed)==(['jpg','path'],0)
    assert all(s.get_many([i], 'jpg')['jpg'][0]==(mixed/p).read_bytes() for i in range(20) if (p:=s[i]['path']).lower().endswith(('jpg','jpeg')))

def test_fn(put):
    "`fn` makes of an item what is stored; what it returns is a sample in any of its shapes"
    s,_ = put(list(range(20)), fn=lambda i: (f'{i%4}', np.full(3, i)), shuffle=False)
    assert s.fields==['cls','npy'] and values(s, 'cls')==[f'{i%4}' for i in range(20)] and values(s, 'npy')[7].tolist()==[7]*3

# --- kinds of values

def test_vocab_given(put):
    "A vocabulary keeps its order, also for labels that do not occur; a label not in it is a failure"
    s,rep = put([{'cls':c} for c in 'cabcab?ba'], vocab=['c','b','a','z'], shuffle=False)
    assert values(s, 'cls')==list('cabcabab') and s.vocab==['c','b','a','z'] and s.get_many([0,1,2], 'cls')['cls'].tolist()==[0,2,1]
    assert rep.failed==1 and 'item 6' in repr(rep) and "label '?' is not in the vocab of 'cls'" in repr(rep)
    s,rep = put([{'cls':i} for i in (0,1,2,5)], 'codes', vocab=['x','y','z'], shuffle=False)
    assert (values(s, 'cls'),rep.failed)==(['x','y','z'],1)

@pytest.mark.parametrize('labels', [(3,0,7,7),(3,7,3),(100_000,100_001),(-3,40_000,5),(-1,-2),tuple(range(10))], ids=str)
def test_integer_labels_are_categories(put, labels):
    "The vocabulary is the integers there are, sorted, as in stock fastai; codes number these, and the label comes back"
    s,_ = put([{'cls':i, 'id':k} for k,i in enumerate(labels)])
    want = sorted(set(labels))
    assert s.vocab==want and s.manifest.counts['cls']==[labels.count(i) for i in want]
    assert values(s, 'cls')==[labels[k] for k in values(s, 'id')] and [s[i]['cls'] for i in range(len(s))]==values(s, 'cls')
    assert s.get_many(range(len(s)), 'cls')['cls'].tolist()==[want.index(labels[k]) for k in values(s, 'id')]
    c,_ = put(s, 'copy', shuffle=False)
    assert (c.vocab,values(c, 'cls'))==(want,values(s, 'cls'))

def test_integers_are_codes_where_classes_have_names(put):
    "`vocab=`, or the source, names the classes: then a whole number is a code"
    s,rep = put([{'cls':i} for i in (2,0,2)], vocab=['x','y','z'], shuffle=False)
    assert (values(s, 'cls'),s.vocab,rep.failed)==(['z','x','z'],['x','y','z'],0)

def test_too_many_integers_for_categories(put):
    "More than a million different ones are numbers: no vocabulary, and they stay as they are"
    n,at = (1<<20)+1,[0,7,1<<20]
    s,_ = put(Integers(n), shuffle=False, chunk=1<<17)
    assert s.vocab==[] and s.get_many(at, 'cls', check=True)['cls'].tolist()==[5*i-9 for i in at] and s[7]['cls']==26

class Integers(IndexedSource):
    "A source of one label a sample, all different"
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def read(self, idxs): return [(f'item {i}',i) for i in idxs.tolist()]
    def load(self, i): return {'cls':5*i-9}
    def fingerprint(self): return self.n

class Parts(StreamedSource):
    "A stream in parts of these lengths, whatever is asked for"
    def __init__(self, *lengths): self.lengths = lengths
    def stream(self, size):
        for k,n in enumerate(self.lengths): yield [(f'{k} {i}',i) for i in range(n)]
    def load(self, i): return {'id':i}
    def fingerprint(self): return self.lengths

class Short(Integers):
    "It reads one sample less, or one more, than it was asked for"
    def __init__(self, by): self.n,self.by = 10,by
    def read(self, numbers): return [(f'item {i}',i) for i in range(len(numbers)+self.by*(len(numbers)>1))]

@pytest.mark.parametrize('source,match', [(Short(-1), 'gave 3 samples, where 4 were asked for'), (Short(1), 'gave 5 samples, where 4'),
    (Parts(4,5), r'stream\(4\) of the source gave a part of 5')])
def test_a_source_that_gives_other_numbers_of_samples_than_asked_for(put, source, match):
    with pytest.raises(ValueError, match=match): put(source, chunk=4, shuffle=False)

def test_a_part_of_another_length_than_it_says(put):
    class Source(Integers):
        def read(self, numbers): return Longer([(f'item {i}',i) for i in numbers.tolist()])
    class Longer(list):
        def __iter__(self): return iter([*super().__iter__(), ('more',1)])
    with pytest.raises(ValueError, match='the source gave 5 samples in a part whose length is 4'): put(Source(8), chunk=4, shuffle=False)

def test_a_stream_may_have_empty_parts(put):
    s,_ = put(Parts(2,0,1), chunk=4)
    assert [o['id'] for o in s[:]]==[0,1,0]

@pytest.fixture(params=['memory','redis','shards'])
def new_writer(request, tmp_path):
    "A function that returns a writer for one place, and what opens the dataset there"
    if request.param=='memory':
        writer = MemoryWriter()
        return lambda: writer, lambda: writer.store
    if request.param=='shards': return lambda: ShardWriter(Storage(tmp_path/'d')), lambda: ShardStore(tmp_path/'d')
    url = request.getfixturevalue('server').url
    RedisStore.delete(url, 'again') if 'again' in RedisStore.names(url) else None
    return lambda: RedisWriter(RedisLink(url), 'again'), lambda: RedisStore(url, 'again')

def plan_of_ids(n, chunk): return dict(signature='s', n=n, chunk=chunk, fields={'id':{'codec':'id', 'dtype':'i8'}}, splits=None, vocab={}, stats=None)

@pytest.mark.parametrize('failing', [(False,True), (True,False), (True,True)], ids=str)
def test_a_chunk_that_is_written_again_replaces_the_first(new_writer, failing):
    "Its samples and its failures: a sample that failed before may not fail now, and another one may"
    make,opened = new_writer
    leader = make()
    leader.begin(plan_of_ids(4, 4))
    for k,fails in enumerate(failing):
        writer,kept = leader.opener()(),np.arange(3 if fails else 4)
        writer.put(kept, {'id':kept})
        failures = [(f'sample 3 of {k}', 'fails')] if fails else []
        writer.done(0, dict(ok=len(kept), bytes=8, failed=len(failures), gaps=[3] if fails else []), failures)
    leader.commit()
    leader.close()
    assert [o['id'] for o in opened()[:]]==list(kept) and list(opened().failures())==failures
    assert opened().manifest.failed==len(failures)

def test_failures_of_chunks_that_were_lost_count_once():
    "When they are written again: else there were too many"
    class Losing(MemoryWriter):
        lost = False
        def commit(self):
            if self.lost: return super().commit()
            self.lost = True
            del self.chunks[0]
            raise ChunksLost('lost')
    def fn(i): return {'id':1//i}
    report = ingest(list(range(20)), Losing(), fn, chunk=4, shuffle=False, max_failed=1, num_workers=0, progress=False)
    assert (report.written,report.failed)==(19,1)

@pytest.mark.parametrize('chunk', [0, -1, 2.5, '4', True])
def test_chunks_of_no_size(put, server, chunk):
    with pytest.raises(ValueError, match='chunk is a number of samples, at least 1'): put([{'id':1}], chunk=chunk)
    with pytest.raises(ValueError, match='chunk is a number of samples, at least 1'): RedisStore.writer(server.url, 'd', {'id':1}, chunk=chunk)
    if isinstance(chunk, int) and chunk<1:
        with pytest.raises(ValueError, match='chunk is a number of samples'): put([{'id':1}])[0].verify(num_workers=1, chunk=chunk)

@pytest.mark.parametrize('num_workers', [-1, 1.5, float('nan'), '2'])
def test_a_number_of_workers_is_checked_before_anything_is_written(tmp_path, server, num_workers):
    "-1 was one process per core"
    to_shards([{'txt':'a'}], tmp_path/'old', num_workers=1, progress=False)
    store = ShardStore(tmp_path/'old')
    wrong = dict(num_workers=num_workers, progress=False)
    for call in (lambda: to_shards([{'txt':'a'}], tmp_path/'new', **wrong), lambda: to_redis([{'txt':'a'}], server.url, 'new', **wrong),
                 lambda: store.verify(**wrong), lambda: store.map(dict, tmp_path/'new', **wrong), lambda: index_shards(tmp_path/'old', to=tmp_path/'new', **wrong)):
        with pytest.raises(ValueError, match=f'num_workers={num_workers!r}: want an integer'): call()
    assert not (tmp_path/'new').exists() and not RedisStore.names(server.url)

def test_a_chunk_of_numpy(put):
    assert len(put([{'id':i} for i in range(9)], chunk=np.int64(4))[0])==9

@pytest.mark.parametrize('size', [float('inf'), float('nan'), 0])
def test_shards_of_no_size(tmp_path, size):
    for limits in (dict(maxsize=size), dict(maxcount=size)):
        with pytest.raises(ValueError, match='maxsize and maxcount are numbers of at least 1'): ShardWriter(Storage(tmp_path), **limits)

def test_partitions_are_written_in_a_with_block(server):
    write = RedisStore.writer(server.url, 'with', {'id':1})
    for use in (lambda: list(write([{'id':1}])), lambda: write.commit([]), lambda: pickle.dumps(write)):
        with pytest.raises(RuntimeError, match='with: use the writer in with'): use()
    with pytest.raises(TypeError, match='fn must be a function'): RedisStore.writer(server.url, 'with', {'id':1}, fn=5)

def test_a_writer_of_partitions_ends_with_its_commit_and_with_its_block(server):
    "What is called then says so: nothing is busy, and nothing was lost"
    def uses(records):
        return lambda: list(write([{'id':1}])), lambda: write.commit(records), lambda: pickle.dumps(write)
    with RedisStore.writer(server.url, 'ends', {'id':1}) as write:
        records = list(write([{'id':1}]))
        assert write.commit(records).written==1
        for use in uses(records):
            with pytest.raises(RuntimeError, match='ends: use the writer in with: .* until commit has returned'): use()
    with RedisStore.writer(server.url, 'ends2', {'id':1}) as write: records = list(write([{'id':1}]))
    for use in uses(records):
        with pytest.raises(RuntimeError, match='ends2: use the writer in with'): use()
    RedisStore.abandon(server.url, 'ends2')

def test_chunks_of_partitions_that_the_server_has_lost(server):
    "Also those that it does not know any more"
    with RedisStore.writer(server.url, 'lost', {'id':1}, chunk=2) as write:
        records = list(write([{'id':i} for i in range(6)]))
        client(server).delete('lost:ingest:next', 'lost:ingest:claims')
        with pytest.raises(StoreError, match="'lost' has no chunk 0: the server restarted and lost it"): write.commit(records)
    assert 'lost' not in RedisStore.names(server.url)
    RedisStore.abandon(server.url, 'lost')

def test_names_of_fields_are_texts(put):
    with pytest.raises(IngestError, match='TypeError: 0 cannot name a field: a name is a text'): put([{0:'a'}])
    s,report = put([{'txt':'a'}, {0:'a'}], shuffle=False)
    assert len(s)==1 and report.failures==[('item 1', 'ValueError: fields 0; the first sample had txt')]

def test_a_copy_with_smaller_images_of_an_unknown_field(put, server):
    with pytest.raises(UnknownField, match="no field 'nope'"): put([{'txt':'a'}])[0].resize(8, name='small', field='nope')

def test_types_that_no_integer_has(server):
    for types in (('f4','f8'), (None,'u1'), ('i8','u8')):
        with pytest.raises(ValueError, match="d: 'x' has numbers of type .* no integer type has all"): wider_dtype('d', 'x', *types)
    assert (wider_dtype('d', 'x', 'u1', 'i2'),wider_dtype('d', 'x', None, None))==('i2',None)

def test_numbers_that_are_no_labels_in_memory(monkeypatch):
    monkeypatch.setattr('fastai_remote.write.base.MAX_CLASSES', 3)
    ingest([{'cls':i} for i in (7,-1,300,9)], writer := MemoryWriter(), shuffle=False, num_workers=0, progress=False)
    assert [o['cls'] for o in writer.store[:]]==[7,-1,300,9] and not writer.store.vocab

def test_labels(put):
    "Any number of labels a sample; the vocabulary is all there are, or the one given"
    src = [{'id':0, 'labels':['b','ü']}, {'id':1, 'labels':[]}, {'id':2, 'labels':['a']}]
    s,_ = put(src, shuffle=False)
    assert (values(s, 'labels'),s.vocab)==([['b','ü'],[],['a']],['a','b','ü'])
    s,rep = put(src, 'given', vocab={'labels':['b','a']})
    assert (sorted(values(s, 'id')),s.vocab,rep.failed)==([1,2],['b','a'],1)

def test_values(put):
    "Strings, numbers of every width, arrays, JSON and bytes come back the same"
    src = [{'title':f'Ünï {i}\n', 'x.f4':i/8, 'y.f8':i/7, 'z.u1':i, 'w.i2':-i, 'id':10**18+i, 'npy':np.arange(i), 'json':{'k':[i,None]}, 'bin':bytes(range(i)), 'm.npz':{'a':np.ones(i)}} for i in range(30)]
    s,rep = put(src, shuffle=False)
    assert rep.failed==0
    for f in src[0]:
        for i,v in enumerate(values(s, f)):
            if f=='npy': assert np.array_equal(v, src[i][f]) and v.dtype==src[i][f].dtype
            elif f=='m.npz': assert np.array_equal(v['a'], src[i][f]['a'])
            else: assert v==src[i][f]

def test_not_a_sample(put, server):
    "What fits no field is refused before anything is written"
    for bad in ([object()]*3, [{'a:b':1}], [{'':1}]):
        with pytest.raises((IngestError,ValueError)): put(bad)
    assert keys(server)==[]

# --- samples that fail

def holey(n, bad, shuffle, splits=1, **kw):
    "Arguments of an ingest of `n` samples a split, of which the numbers in `bad` fail"
    def fn(i):
        if i in bad: raise ValueError(f'no {i}')
        return {'txt':f'sample {i}', 'cls':f'c{i%7}', 'id':i, 'labels':[f'l{i%3}']}
    return dict(fn=fn, shuffle=shuffle, max_failed=1., **kw),{f's{k}':list(range(k*n, (k+1)*n)) for k in range(splits)}

@pytest.mark.parametrize('shuffle', [True,False])
@pytest.mark.parametrize('bad', [{0},{99},{0,1,2,3},set(range(60,100)),set(range(0,300,2)),set(range(100,200)),set(range(150,300)),set(range(1,299)),{5,105,205}],
                         ids=['first','last of a split','first four','most of the end','every other','a whole split','from a middle on','all but two','one a split'])
def test_holes(put, server, bad, shuffle):
    "Each split is dense again, with each good sample once; failures are counted and named; no key is left"
    kw,src = holey(100, bad, shuffle, 3, chunk=16)
    s,rep = put(src, **kw)
    good = [i for i in range(300) if i not in bad]
    assert (rep.written,rep.failed,len(s))==(len(good),len(bad),len(good))
    at = 0
    for k,(a,b) in s.splits.items():
        ids = values(s, 'id')[a:b]
        assert a==at and sorted(ids)==[i for i in src[k] if i not in bad]
        at = b
    assert all(s[i]=={'txt':f'sample {j}', 'cls':f'c{j%7}', 'id':j, 'labels':[f'l{j%3}']} for i in range(len(s)) for j in [s[i]['id']])
    assert keys(server)==want_keys('d', ['txt','labels'], ['cls','id'], len(good), failed=len(bad)>0)
    assert len(rep.failures)==min(100, len(bad)) and {r for _,r in rep.failures}<={f'ValueError: no {i}' for i in bad}
    if len(bad)<100: assert {n for n,_ in rep.failures}=={f's{i//100}: item {i%100}' for i in bad}

def test_damaged_files(put, tmp_path, images):
    "Files that are no image, or only half of one, or unreadable: named, and the rest is written"
    files = sorted(images.glob('*/*.jpg'))[:30]
    for f in files: (tmp_path/f.name).write_bytes(f.read_bytes())
    def spoil(k, b): (p:=tmp_path/files[k].name).write_bytes(b); return str(p)
    b = files[2].read_bytes()
    bad = [spoil(0, b'no jpeg'), spoil(1, b''), spoil(2, b[:len(b)//2])]
    (tmp_path/'gone.jpg').symlink_to('nowhere'); bad.append(str(tmp_path/'gone.jpg'))
    for name,fn in (('as they are',None),('shrunk',shrink(20))):
        s,rep = put(image_samples(tmp_path, path=True), name, fn=fn)
        assert (rep.written,rep.failed)==(27,4) and {n for n,_ in rep.failures}==set(bad)
        assert sorted(values(s, 'path'))==sorted(f.name for f in files[3:]) and len(values(s, 'jpg'))==27

def test_label_fails(put, images):
    "A label function that fails, fails for its file"
    def label(p):
        if p.stem=='007': raise KeyError('no label')
        return p.parent.name
    s,rep = put(image_samples(images, label=label))
    assert (len(s),rep.failed)==(N-1,1) and '007.jpg: KeyError' in repr(rep)

@pytest.mark.parametrize('first', [{'txt':'a', 'cls':float('nan')},{'txt':'a', 'cls':None},{'txt':3, 'cls':'a'}], ids=['nan','None','no str'])
def test_first_is_bad(put, first):
    "What the others are is not judged by a first sample that fails itself"
    s,rep = put([first]+[{'txt':f'{i}', 'cls':'ab'[i%2]} for i in range(20)], shuffle=False)
    assert rep.failed==1 and len(s)==20 and s.vocab==['a','b']

def test_labels_of_failed(put):
    "A label that only a failed sample had is not in the vocabulary"
    s,rep = put([{'cls':'ab'[i%2], 'txt':f'{i}'} for i in range(20)]+[{'cls':'zzz', 'txt':3}], shuffle=False)
    assert (rep.failed,s.vocab)==(1,['a','b'])

def test_all_fail(put, server, tmp_path):
    "Nothing could be written: said, with the first reason; nothing is left, and the same call can be repeated when it is mended"
    for k in range(20): (tmp_path/f'{k}.jpg').write_text('no jpeg')
    with pytest.raises(IngestError, match='none of the (first )?20 samples could be converted; .*jpg'): put(image_samples(tmp_path))
    with pytest.raises(IngestError, match='none of the first 20 .*ZeroDivisionError'): put(list(range(20)), 'z', fn=lambda i: 1//0)
    assert keys(server)==[]
    for k in range(20): Image.new('L', (9,9), k).save(tmp_path/f'{k}.jpg')
    assert len(put(image_samples(tmp_path))[0])==20

def test_samples_without_fields(put):
    "An empty dict is no sample: said if there are only such ones, and otherwise a failure"
    with pytest.raises(IngestError, match='none of the first 3 .*item 0: ValueError: a sample without fields: it, or what fn returns, is a dict'):
        put(list(range(3)), fn=lambda i: {}, shuffle=False)
    store,report = put(list(range(3)), 'some', fn=lambda i: {'txt':str(i)} if i else {}, shuffle=False)
    assert report.failures==[('item 0','ValueError: fields none; the first sample had txt')] and len(store)==2

@pytest.mark.parametrize('src', [[],{'train':[], 'valid':[]},{},pd.DataFrame({'cls':[]}),np.zeros((0,3))], ids=['list','splits','no splits','rows','array'])
def test_empty(put, server, src):
    "An empty source is one, and nothing is written"
    with pytest.raises(ValueError, match='d: the source is empty'): put(src)
    assert keys(server)==[]

def test_no_images(tmp_path):
    "No such folder, or none in it"
    for p in (tmp_path,tmp_path/'none'):
        with pytest.raises(FileNotFoundError, match=str(p)): image_samples(p)

@given(st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=5))
def test_fill_moves(parts):
    "Whatever fails: splits become dense, in their order, with all that was there; a split's moves may be done twice"
    n = sum(map(len, parts))
    ends = np.cumsum([0,*map(len, parts)]).tolist()
    ok = np.array([o for p in parts for o in p], bool)
    splits,moves = fill_gaps({k:[a,b] for k,(a,b) in enumerate(zip(ends, ends[1:]))}, np.flatnonzero(~ok))
    a,at = np.where(ok, np.arange(n), -1),0
    for (src,dst),twice in zip(moves, (True,False)*5):
        assert len(src)==len(dst)==len({*dst.tolist()}) and not {*src.tolist()}&{*dst.tolist()}
        for _ in range(1+twice): a[dst] = a[src]
    for k,p in enumerate(parts):
        s,e = splits[k]
        assert s==at and sorted(a[s:e].tolist())==[ends[k]+i for i,o in enumerate(p) if o]
        at = e

@examples(15)
@given(st.lists(st.sets(st.integers(0, 19)), min_size=1, max_size=3))
def test_holes_at_random(server, bads):
    "The same, through a server"
    client(server).flushall()
    bad = {k*20+i for k,b in enumerate(bads) for i in b}
    n = 20*len(bads)
    if len(bad)==n: return
    kw,src = holey(20, bad, True, len(bads), chunk=8)
    rep = to_redis(src, server.url, 'd', num_workers=1, progress=False, **kw)
    s = RedisStore(server.url, 'd')
    assert sorted(values(s, 'id'))==[i for i in range(n) if i not in bad] and rep.failed==len(bad)
    assert [values(s, f)[k] for k in range(len(s)) for f in ('txt','cls')]==[o for i in values(s, 'id') for o in (f'sample {i}',f'c{i%7}')]
    assert keys(server)==want_keys('d', ['txt','labels'], ['cls','id'], len(s), failed=len(bad)>0)

# --- again, anew, in another order

def test_second_run(put):
    "A dataset that is there is not written over unasked"
    put([1,2,3])
    with pytest.raises(StoreExists, match="'d' is there already \\(3 samples.*overwrite=True"): put([1,2,3])
    s,_ = put([4,5], overwrite=True)
    assert len(s)==2 and s.manifest.generation==2

def test_overwrite_under_readers(put, server):
    "Who reads while a dataset is replaced gets the old one or the new one or a clear error, and never some of both; no key is left"
    def src(w, n): return [{'txt':f'{w} {i}', 'cls':f'{w}{i%3}', 'w.i4':ord(w)} for i in range(n)]
    put(src('a', 500))
    stop,seen,errs = threading.Event(),set(),[]
    def read(held):
        rng = random.Random(0)
        while not stop.is_set():
            try:
                s = RedisStore(server.url, 'd') if held is None else held
                i = rng.sample(range(len(s)), 20)
                d = s.get_many(i, ['txt','cls','w.i4'], check=True)
                ws = {b.decode()[0] for b in d['txt']} | {s.vocab[c][0] for c in d['cls']} | {chr(w) for w in d['w.i4']}
                if len(ws)!=1: errs.append(ws)
                seen.add((held is not None, *ws))
            except StoreError as e:
                if not re.search('replaced|deleted', str(e)): errs.append(e)
                seen.add('error')
            except Exception as e: errs.append(e)
    ts = [threading.Thread(target=read, args=(h,), daemon=True) for h in (None,RedisStore(server.url, 'd'))]
    for t in ts: t.start()
    def wait(o): wait_for(lambda: o in seen or errs)
    wait((True,'a'))
    for w,n in (('b',300),('c',700),('d',400)): s,_ = put(src(w, n), overwrite=True)
    wait((False,'d'))
    wait('error')
    stop.set()
    for t in ts: t.join()
    assert not errs and {(True,'a'),(False,'d'),'error'}<=seen and {o for o in seen if o[0] is True}=={(True,'a')}
    assert keys(server)==want_keys('d', ['txt'], ['cls','w.i4'], 400, s.manifest.prefix)

def test_overwrite_fails(put, server):
    "A replacement that comes to nothing leaves the old dataset as it was"
    s,_ = put([{'txt':'old'}]*20)
    before = {k:client(server).dump(k) for k in keys(server)}
    with pytest.raises(IngestError): put([{'txt':3}]*20, overwrite=True)
    with pytest.raises(IngestError): put([3]*20, fn=lambda i: 1//0, overwrite=True)
    assert {k:client(server).dump(k) for k in keys(server)}==before
    def fn(i):
        if i==15: raise KeyboardInterrupt
        return {'txt':'new'}
    with pytest.raises(KeyboardInterrupt): put(list(range(20)), fn=fn, overwrite=True, shuffle=False, chunk=8)
    assert values(s, 'txt')==['old']*20 and values(RedisStore(server.url, 'd'), 'txt')==['old']*20

def test_order(put):
    "`shuffle=False` keeps the order; the same seed makes the same, another one another"
    src = [{'id':i} for i in range(200)]
    ids = [values(put(src, f'd{k}', **kw)[0], 'id') for k,kw in enumerate([dict(shuffle=False),{},{},dict(seed=1),dict(chunk=7)])]
    assert ids[0]==list(range(200)) and ids[1]==ids[2]==ids[4] and ids[1]!=ids[3] and all(sorted(o)==ids[0] for o in ids)

def test_two_workers(put, images):
    "Two processes write what one does, failures included"
    def fn(o):
        if o['path'].endswith(('3.jpg','4.jpg')): raise ValueError('not this one')
        return shrink(32)(o)
    src = image_samples(images, label=lambda p: p.parent.name, path=True)
    (a,ra),(b,rb) = (put(src, f'd{k}', fn=fn, num_workers=k, chunk=8, max_failed=1.) for k in (1,2))
    for f in ('jpg','cls','path'): assert values(a, f)==values(b, f)
    assert (ra.written,ra.failed,sorted(ra.failures))==(rb.written,rb.failed,sorted(rb.failures))==(48,12,sorted(rb.failures))
    assert [getattr(a.manifest, k)==getattr(b.manifest, k) for k in ('n','fields','splits','vocab','nbytes')]

def test_dataset_in_two_workers(put):
    "Workers read a dataset themselves"
    s,_ = put(torch.utils.data.TensorDataset(Tensors().x, Tensors().y), num_workers=2)
    assert sorted(int(x[0,0])//4 for x in values(s, 'npy'))==list(range(40))

# --- reports, deletion

def test_report(put, server, images):
    "What the report shows, as text and in a notebook, escaped"
    def fn(o): return 1//0 if 5<=o['id']<12 else {'txt':'x'*50}
    _,rep = put([{'id':i} for i in range(50)], fn=fn, shuffle=False)
    r,h = repr(rep),rep._repr_html_()
    assert re.match(r'd: 43 written, 7 failed, .*B in [\d.]+ s \([\d,]+ samples/s\)\n  item 5: ZeroDivisionError: ', r) and r.endswith('… 2 more') and r.count('\n')==6
    assert all(o in h for o in (f'd at {server.url}','<td>43</td>','<td>7</td>','item 11','ZeroDivisionError','a sample')) and 'resumed' not in h
    _,rep = put([{'id':i, 'txt':'<b>'} for i in range(20)]+[{'id':'<script>', 'txt':''}], 'e')
    assert '<script>' not in rep._repr_html_() and '&lt;script&gt;' in rep._repr_html_()

def test_resumed_report(put):
    "A second run counts what the first one had done"
    left = [40]
    def fn(o):
        left[0] -= 1
        if left[0]==0: raise KeyboardInterrupt
        return o
    src = [{'id':i} for i in range(100)]
    with pytest.raises(KeyboardInterrupt): put(src, fn=fn, chunk=10)
    s,rep = put(src, fn=fn, chunk=10)
    assert (rep.written,rep.resumed,sorted(values(s, 'id')))==(100,30,list(range(100)))
    assert '30 of them by an earlier run' in repr(rep) and 'resumed' in rep._repr_html_()

def test_progress(put):
    "The bar changes nothing"
    assert len(put(list(range(40)), progress=True)[0])==40

def test_delete(put, server):
    "Everything of a dataset goes, and of an unfinished one; nothing of its neighbours"
    for name in ('a','a/b','ab'): put([{'txt':f'{i}', 'cls':'xy'[i%2]} for i in range(30)], name)
    put([{'txt':f'{i}', 'cls':'xy'[i%2]} for i in range(1500)], 'a', overwrite=True)
    RedisStore.delete(server.url, 'a')
    assert sorted({k.split(':')[0] for k in keys(server)})==['a/b','ab','fastai_remote'] and RedisStore.names(server.url)==['a/b','ab']
    with pytest.raises(StoreNotFound): RedisStore.delete(server.url, 'a')
    def stop(o):
        if o['txt']=='20': raise KeyboardInterrupt
        return o
    with pytest.raises(KeyboardInterrupt): put([{'txt':f'{i}', 'cls':'x', 'labels':['y']} for i in range(30)], 'c', fn=stop, shuffle=False, chunk=8)
    assert [k for k in keys(server) if k.startswith('c:')]
    for name in ('c','ab','a/b'): RedisStore.delete(server.url, name)
    assert keys(server)==[]

def test_names(put, server):
    "Names that could run into other keys are refused"
    for bad in ('','a:b','a@2','a#','*','a\n',None,3):
        with pytest.raises(ValueError, match='name'): put([1], bad)
    assert keys(server)==[]

# --- packed keys

def crcs_of(vals, pos): return [zlib.crc32(v.tobytes()+int(i).to_bytes(8, 'big')) for v,i in zip(vals.astype(vals.dtype.newbyteorder('>'))[:,None], pos)]

@pytest.mark.parametrize('check', [None,'u4'])
@pytest.mark.parametrize('dtype', ['i1','u1','f2','i2','u4','i4','i8','f4','f8'])
def test_packed_near_and_far(server, dtype, check):
    "Positions close together come as one copy, others each by itself; both the same, and both know where the string ends"
    pos,link = np.arange(3000),RedisLink(server.url)
    c = link.client
    vals = np.random.default_rng(0).integers(-2**63, 2**63, 3000, dtype='i8').view('u8').astype(dtype) if dtype[0]!='f' else np.random.default_rng(0).normal(size=3000).astype(dtype)
    link.send(packed_writes(key_layout('b'), 'f', dtype, pos, vals, check))
    for o,cmd in ((np.array([5,3,3,30]),'GETRANGE'), (np.arange(100, 400)[::-1],'GETRANGE'), (np.array([0,2999,17]),'BITFIELD_RO'), (np.array([7]),'GETRANGE')):
        (commands,plan),crcs = packed_reads(key_layout('b'), 'f', dtype, o, check),np.zeros(len(o), 'u4') if check else None
        assert commands[0][0]==cmd
        got,gone = unpack_replies(plan, iter(link.send(commands)), dtype, len(o), crcs)
        assert got.dtype==np.dtype(dtype) and got.tobytes()==vals[o].tobytes() and gone==[]
        if check: assert crcs.tolist()==crcs_of(vals[o], o)
    for o,want in ((np.array([2998,3001,2999,3000]),[1,3]), (np.array([3005,3006]),[0,1]), (np.array([3,9000]),[1])):
        commands,plan = packed_reads(key_layout('b'), 'f', dtype, o, check)
        assert unpack_replies(plan, iter(link.send(commands)), dtype, len(o), np.zeros(len(o), 'u4') if check else None)[1]==want
    c.delete('b:f#0')

@pytest.mark.parametrize('dtype,check', [('u1',None),('i2',None),('u1','u4'),('f8','u4')])
def test_packed_boundary(server, dtype, check):
    "Positions on both sides of 2**24 go into two keys and come back, in any order"
    pos = (1<<KEY_BITS)+np.array([-3,-2,-1,0,1,2,5])
    vals = np.array([1,2,3,100,5,6,7], dtype)
    link = RedisLink(server.url)
    c = link.client
    p = packed_writes(key_layout('b'), 'f', dtype, pos, vals, check)
    size = vals.itemsize+(4 if check else 0)
    def crcs(n): return np.zeros(n, 'u4') if check else None
    assert len(p)==3 and [len(r) for r in split_runs(pos)]==[3,3,1]
    link.send(p)
    assert {k:c.strlen(k) for k in ('b:f#0','b:f#1')}=={'b:f#0':size<<KEY_BITS, 'b:f#1':6*size}
    for o in (np.arange(7),np.array([6,0,3,2,2,5])):
        (commands,plan),seen = packed_reads(key_layout('b'), 'f', dtype, pos[o], check),crcs(len(o))
        got,gone = unpack_replies(plan, iter(link.send(commands)), dtype, len(o), seen)
        assert got.tolist()==vals[o].tolist() and gone==[]
        if check: assert seen.tolist()==crcs_of(vals[o], pos[o])
    commands,plan = packed_reads(key_layout('b'), 'f', dtype, np.array([(1<<KEY_BITS)+6,(1<<KEY_BITS)-1,(2<<KEY_BITS)+1]), check)
    assert unpack_replies(plan, iter(link.send(commands)), dtype, 3, crcs(3))[1]==[0,2]
    c.delete('b:f#0', 'b:f#1')

@pytest.mark.parametrize('n,splits,sizes', [
    (7, {'a':.5, 'b':.5, 'c':None}, [3,4,0]), (7, {f's{k}':.1 for k in range(10)}, [0,0,0,1,1,1,1,1,1,1]),
    (7, {'a':3, 'b':.5, 'c':None}, [3,4,0]), (7, {'a':.5, 'b':.5}, [3,4]), (10, {'a':.3, 'b':None}, [3,7])])
def test_fractions_that_are_rounded_up_fit(n, splits, sizes):
    "What is too much is taken from the largest; no split has less than nothing"
    assert [stop-start for start,stop in split_ranges(n, splits).values()]==sizes

@pytest.mark.parametrize('n,splits,sizes', [
    (10, {'a':.25, 'b':.25, 'c':5}, [3,2,5]), (6, {'a':.25, 'b':.25, 'c':3}, [1,2,3]),
    (10, {'c':5, 'a':.05, 'b':.45}, [5,0,5]), (0, {'a':.5, 'b':.5}, [0,0]),
    (7, {f's{k}':1/7 for k in range(7)}, [1]*7), (9, {'a':1/6, 'b':1/6, 'c':1/6, 'd':1/2}, [2,2,2,3]),
    (10, {'a':.25, 'b':.25, 'c':.25, 'd':.25}, [4,2,2,2]), (10, {'a':.25, 'b':.25, 'c':None}, [2,2,6])])
def test_fractions_cover_all_samples_also_beside_counts(n, splits, sizes):
    "What rounding leaves goes to the largest fraction; a number of samples stays as it is"
    assert [stop-start for start,stop in split_ranges(n, splits).values()]==sizes

def test_fractions_that_are_too_large_are_refused():
    with pytest.raises(ValueError, match='take 8 samples of 7'): split_ranges(7, {'a':.6, 'b':.6, 'c':None})

@pytest.mark.parametrize('seed', [-1, 1.5, '7'])
def test_a_wrong_seed_is_refused_before_anything_is_written(seed, put):
    with pytest.raises(ValueError, match='seed is an integer of at least 0, not '): put([{'x.i4':i} for i in range(9)], seed=seed)
    store,_ = put([{'x.i4':i} for i in range(9)])   # nothing is unfinished
    assert sorted(store[i]['x.i4'] for i in range(9))==list(range(9))

@pytest.mark.parametrize('splits', [{'a':.5, 'b':4_999_995}, {'a':.5, 'b':5_000_005},
                                    {'a':.25, 'b':.25, 'c':4_999_998}], ids=str)
def test_sizes_that_do_not_add_up_are_refused(splits):
    "Also if it is only a few samples of many"
    with pytest.raises(ValueError, match='samples of 10,000,000'): split_ranges(10_000_000, splits)
