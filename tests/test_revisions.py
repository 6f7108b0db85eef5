"Datasets that are appended to and edited: what they contain, who sees it and when, and what is shared and removed"
import pickle, random, sys, tracemalloc

import numpy as np
import pandas as pd
import polars as pl
import pytest
import redis
import webdataset
from fastai.vision.all import DataLoaders
from hypothesis import given, strategies as st
from PIL import Image

from crashes import dies_at
from fastai_remote import (
    CorruptSample, IngestError, RedisStore, ShardStore, StoreExists, StoreNotFound, StoreUnavailable,
    TieredStore, UnknownField, image_samples, to_redis, to_shards)
from fastai_remote.core import GapTable, RunTable, TooManyRuns
from fastai_remote.write.redis_place import RedisLock
from fastai_remote.write.revision import joined_vocab
from fastai_remote.store.base import image_stats
from inputs import encoded
from shard_helpers import ONE, files, index, interrupted_after, names
from snapshots import client

def sample(i, label=None):
    return {'txt':f'sample {i}', 'cls':label or 'abc'[i%3], 'id.i4':i, 'x.npy':np.full(3, i), 'tags.labels':[f't{i%2}']}
def samples(start, stop): return [sample(i) for i in range(start, stop)]
def plain(o): return o.tolist() if isinstance(o, np.ndarray) else list(o) if isinstance(o, (list,tuple)) else o
def plain_rows(rows): return [{f:plain(o) for f,o in row.items()} for row in rows]
def rows(store): return plain_rows(store[:])
def ids(store): return [row['id.i4'] for row in store[:]]
OF_THE_SERVER = {'fastai_remote:used','fastai_remote:locks'}
def keys(*clients): return {key.decode() for client in clients for key in client.keys()}-OF_THE_SERVER
def verified(store):
    report = store.verify(num_workers=1)
    return report.samples==len(store) and not report.bad

class Place:
    "Where the datasets of a test are: Redis or folders; `address` returns the first arguments of a store of a name"
    def __init__(self, kind, address, contents): self.kind,self.address,self.contents = kind,address,contents

    def write(self, source=None, name='d', fn=None, **kwargs):
        "Writes 30 samples, or others, in their order"
        call = to_redis if self.kind is RedisStore else to_shards
        options = dict(shuffle=False, overwrite=True, chunk=7, **ONE)|kwargs
        call(samples(0, 30) if source is None else source, *self.address(name), fn, **options)
        return self.open(name)
    def open(self, name='d'): return self.kind(*self.address(name))
    def abandon(self, name='d'): self.kind.abandon(*self.address(name))
    def delete(self, name='d'): self.kind.delete(*self.address(name))

@pytest.fixture
def redis_place(server):
    client(server).flushall()
    return Place(RedisStore, lambda name: (server.url,name), lambda: keys(client(server)))

@pytest.fixture
def cluster_place(cluster):
    return Place(RedisStore, lambda name: (cluster.url,name), lambda: keys(*map(cluster.client, range(3))))

@pytest.fixture
def folders(tmp_path):
    path = tmp_path/'datasets'
    return Place(ShardStore, lambda name: (path/name,), lambda: names(path))

@pytest.fixture(params=['redis_place','folders'])
def place(request): return request.getfixturevalue(request.param)

def test_changes_of_fifty_million_samples_take_little_memory(monkeypatch):
    "A few runs for each sample that was dropped or changed"
    tracemalloc.start()
    numbers = np.arange(0, 50_000_000, 50_000)
    table = RunTable.whole(50_000_000).drop(numbers).replace(numbers[:-1], 1).insert(7_000_000, 2, 0, 1_000_000)
    assert table.n==51_000_000-1000 and len(table)<4100 and tracemalloc.get_traced_memory()[1]<2_000_000
    tracemalloc.stop()
    assert len(RunTable.whole(9000).replace(np.arange(1000, 2000), 1))==3   # those that continue each other are one
    monkeypatch.setattr('fastai_remote.core.MAX_RUNS', 1000)
    with pytest.raises(TooManyRuns, match=r'1,001 runs.*where 1,000.*store\.map'):
        RunTable.whole(50_000_000).drop(np.arange(1, 2001, 2))

def gap_table(places, n):
    "The table of `places` without a sample, ascending, of `n`"
    starts = np.flatnonzero(np.diff(places, prepend=-2)!=1)
    return GapTable(places[starts], np.diff(starts, append=len(places)), n)

@pytest.mark.parametrize('n,share,most', [(3_000_000,.1,2_400_000), (3_000_000,.01,480_000), (50_000_000,0,100)])
def test_gaps_take_little_memory(n, share, most):
    "8 to 16 bytes for each sample that fails, at random; a batch is looked up by a binary search"
    failed = np.flatnonzero(np.random.default_rng(0).random(n)<share) if share else np.array([], np.int64)
    gaps = GapTable.from_bytes(gap_table(failed, n).to_bytes(), n)
    assert gaps.n==n-len(failed) and gaps._firsts.nbytes+gaps._before.nbytes<most
    numbers = np.random.default_rng(1).integers(0, gaps.n, 64)
    places = gaps.places(numbers)
    assert (gaps.samples_before(places)==numbers).all() and not np.isin(places, failed).any()
    if share==.1:
        tracemalloc.start()
        gaps.places(numbers)
        assert tracemalloc.get_traced_memory()[1]<20_000
        tracemalloc.stop()

def test_gaps_beyond_the_end_are_refused():
    gaps = gap_table(np.array([0,1,5,98]), 100)
    with pytest.raises(ValueError, match='beyond'): GapTable.from_bytes(gaps.to_bytes(), 98)

@given(st.lists(st.booleans(), max_size=60))
def test_gaps_are_those_that_were_given(ok):
    "Whatever fails, and also if all or none do"
    ok = np.array(ok, bool)
    gaps = gap_table(np.flatnonzero(~ok), len(ok))
    assert gaps.places(np.arange(ok.sum())).tolist()==np.flatnonzero(ok).tolist()
    borders = range(len(ok)+1)
    assert gaps.samples_before(borders).tolist()==[int(ok[:place].sum()) for place in borders]

# --- against a list of samples

class Model:
    "A dataset, and what it should contain"
    added = {
        'more0.u1':lambda i: i%100, 'kind0.cls':lambda i: f'k{i%3}', 'text0.txt':lambda i: f'text {i}',
        'text1.txt':lambda i: f'other {i}', 'x0.npy':lambda i: np.full(i%4, i),
        'tags0.labels':lambda i: [f'l{i%3}', 'm'][:1+i%2]}

    def __init__(self, place, seed):
        self.store,self.rows,self.next = place.write(),samples(0, 30),30
        self.rng = random.Random(seed)

    def append(self):
        numbers = range(self.next, self.next+self.rng.randint(1, 9))
        new = [sample(i, self.rng.choice(['a','b',f'new {i%4}'])) for i in numbers]
        for row in new: row.update({f:value(row['id.i4']) for f,value in self.added.items() if f in self.store.fields})
        self.next += len(new)
        self.rows += new
        return self.store.append(new, shuffle=False, **ONE)

    def edit(self):
        numbers = self.rng.sample(range(len(self.rows)), min(len(self.rows)-1, 8))
        drop,change = numbers[:self.rng.randint(0, 4)],numbers[4:]
        values = {
            'cls':{i:f'changed {i%3}' for i in change[:2]}, 'txt':{i:f'changed {i}' for i in change[1:]},
            'id.i4':{i:-i for i in change[:3]}, 'tags.labels':{i:[f'tag {i%2}','t1'][:1+i%3] for i in change[2:]}}
        for field,changed in values.items():
            for i,value in changed.items(): self.rows[i] = {**self.rows[i], field:value}
        self.rows = [row for i,row in enumerate(self.rows) if i not in drop]
        return self.store.edit(drop, values)

    def change_fields(self):
        fields = self.rng.sample(list(self.added), self.rng.choice([1,1,2,3]))
        there = [field for field in fields if field in self.store.fields]
        if there:
            self.rows = [{f:o for f,o in row.items() if f!=there[0]} for row in self.rows]
            return self.store.drop_fields(there[0])
        def new(row): return {field:self.added[field](row['id.i4']) for field in fields}
        self.rows = [{**row, **new(row)} for row in self.rows]
        if self.rng.random()<.5: return self.store.add_fields(new, ['id.i4'], **ONE)
        return self.store.add_fields({field:[row[field] for row in self.rows] for field in fields}, **ONE)

    def step(self):
        before,texts = self.store,[row['txt'] for row in self.rows]
        readers = before.reopened(),before.reopened()
        readers[0].get_many(range(len(texts)), 'txt')   # knows where the samples are
        change = self.rng.choice([self.append,self.edit,self.change_fields])
        self.store = change()
        if self.store is before: return
        for reader in readers:   # each goes on with its version, or is told that there is another one
            try: assert reader.get_many(range(len(texts)), 'txt', decode=True)['txt']==texts
            except StoreNotFound as error:
                assert 'replaced since it was opened' in str(error) and (reader is readers[1] or change!=self.append)

    def check(self):
        store,labels = self.store,[row['cls'] for row in self.rows]
        assert rows(store)==plain_rows(self.rows) and len(store)==len(self.rows) and verified(store)
        assert store.class_counts()=={label:labels.count(label) for label in store.vocab}
        assert {tag for row in self.rows for tag in row['tags.labels']}<=set(store.manifest.vocab['tags.labels'])
        some = np.random.default_rng(len(self.rows)).permutation(len(self.rows))[:7]
        got = store.get_many(some, ['txt','id.i4'], check=True)
        assert [t.decode() for t in got['txt']]==[self.rows[i]['txt'] for i in some]
        assert got['id.i4'].tolist()==[self.rows[i]['id.i4'] for i in some]

IN_CLUSTER = [pytest.mark.slow, pytest.mark.xdist_group('processes')]
@pytest.mark.parametrize('where,seed,steps', [
    *((where,seed,8) for where in ('redis_place','folders') for seed in (0,1)),
    *(pytest.param(where, seed, 14, marks=pytest.mark.slow)
      for where in ('redis_place','folders') for seed in (2,3)),
    pytest.param('cluster_place', 0, 8, marks=IN_CLUSTER)])
def test_any_changes(request, where, seed, steps):
    place = request.getfixturevalue(where)
    model = Model(place, seed)
    for k in range(steps):
        model.step()
        if steps>8 and k%2: model.check()
    model.check()
    store,in_shards = model.store,where=='folders'
    store.copy(*place.address('copy'), **ONE)
    copy = place.open('copy')
    assert rows(copy)==rows(store) and not getattr(copy.manifest, 'parts', None)
    if in_shards:
        folder, = place.address('d')
        assert len(store.shards)==len(list(folder.glob('*.tar')))   # a shard without samples is removed
        assert len(set(store.keys(range(len(store)))))==len(store)
    else: model.store = store.rename('renamed')
    assert len(place.write(samples(0, 5), chunk=5))==5
    if in_shards: assert len(list(folder.glob('.fastai_remote/*.fastai_remote')))==1
    else: model.check()
    for name in 'd','copy',*([] if in_shards else ['renamed']): place.delete(name)
    assert not set(place.contents())

# --- killed, refused, in the way of others

CHANGES = {
    'edit':lambda store: store.edit(drop=[1,5], set={'cls':{3:'z'}, 'txt':{4:'new'}}),
    'relabel':lambda store: store.edit(drop=[1], set={'cls':{3:'z'}}),
    'append':lambda store: store.append(samples(30, 40), shuffle=False, chunk=5, **ONE),
    'add':lambda store: store.add_fields(lambda o: {'up.txt':o['txt'].upper()}, chunk=8, **ONE)}

@pytest.mark.parametrize(
    'name,step', [('edit',23), *(pytest.param(name, 9, marks=pytest.mark.slow) for name in CHANGES)])
def test_a_killed_change_changes_all_or_nothing(place, name, step):
    "Wherever the process dies, readers see the old or the new version, and the same call continues"
    change,is_redis = CHANGES[name],place.kind is RedisStore
    before = rows(place.write())
    after = rows(change(place.open()))
    there = len(place.contents())
    for k in range(0, 600, step):
        place.write()
        died = dies_at(k, lambda: change(place.open()), None if is_redis else place.address('d')[0])
        seen = rows(place.open())
        assert seen in (before,after), k
        if seen==before: change(place.open())
        store = place.open()
        assert rows(store)==after and verified(store), k
        if seen==before and name!='append': assert len(place.contents())==there, k
        place.delete()
        assert not set(place.contents()), k
        if not died: break
    assert k>20 and seen==after

def test_a_change_that_was_killed_is_in_the_way_of_others(place):
    "The message names the call that drops it: an edit has no overwrite="
    store = place.write(samples(0, 9))
    def append(): store.append(samples(30, 80), shuffle=False, chunk=9, **{**ONE, 'progress':interrupted_after(3)})
    with pytest.raises(KeyboardInterrupt): append()
    for change in (lambda: store.edit(set={'txt':{0:'new'}}), lambda: store.add_fields({'y.txt':['a']*9}),
                   lambda: store.append([sample(1)], **ONE)):
        with pytest.raises(StoreExists, match=r'unfinished ingest.*Store\.abandon\(') as e: change()
        assert 'overwrite' not in str(e.value)
    place.abandon()
    assert store.edit(set={'txt':{0:'new'}})[0]['txt']=='new'

def test_an_interrupted_change_continues_with_the_same_values_only(redis_place):
    "Arrays are told apart by their type and shape, too, and objects not by their addresses"
    store = redis_place.write(samples(0, 3))
    def texts(last): return np.array([f'a{i}' for i in range(2)]+[last], object)
    for field,one,again,other in (
        ('a.npy', np.zeros((3,4), 'i4'), np.zeros((3,4), 'i4'), np.zeros((3,4), 'f4')),
        ('b.npy', np.zeros((3,4)), np.zeros((3,4)), np.zeros((3,2,2))), ('c.txt', texts('b'), texts('b'), texts('c'))):
        with pytest.raises(KeyboardInterrupt):
            store.add_fields({field:one}, num_workers=1, progress=interrupted_after(1))
        with pytest.raises(StoreExists, match='unfinished ingest'): store.add_fields({field:other}, **ONE)
        store = store.add_fields({field:again}, **ONE)
        assert plain(store[2][field])==plain(one[2]) and verified(store)

def fails(o): return {'y.i4':1 if o['txt']!='sample 5' else 1/0}
NUMBERS = "labels of 'cls' are such as 'a', and the new samples have numbers"
NEEDS = r'^d: each sample needs a value, so nothing has changed:\n  '

REFUSED = [
    (lambda s: s.edit(drop=[30]), IndexError, 'no sample 30'),
    (lambda s: s.edit(set={'cls':{-1:'a'}}), IndexError, 'no sample -1'),
    (lambda s: s.edit(set={'klass':{1:'a'}}), UnknownField, "no field 'klass'"),
    (lambda s: s.edit(drop=[2], set={'cls':{2:'a'}}), ValueError, 'sample 2 is to be removed and changed'),
    (lambda s: s.edit(drop=range(30)), ValueError, 'no sample would be left'),
    (lambda s: s.edit(drop=5), TypeError, 'd: sample numbers must'),
    (lambda s: s.edit(set=['txt']), TypeError, 'd: set= is'),
    (lambda s: s.edit(set={'txt':['a']*30}), TypeError, 'd: set= is'),
    (lambda s: s.edit(set={'cls':{1:'a', 2:3}}), (TypeError,IngestError), 'text and numbers|had a str'),
    (lambda s: s.edit(set={'cls':{1:3}}), ValueError, NUMBERS),
    *((lambda s, values=values: s.edit(set=values), IngestError, 'sample 1: (TypeError|ValueError): ') for values in (
        {'txt':{0:'ok', 1:5}}, {'id.i4':{1:None}}, {'id.i4':{0:1, 1:2**40}}, {'cls':{1:'a\ud800'}},
        {'n.cls':{1:2.5}}, {'n.cls':{1:2**63}})),
    (lambda s: s.edit(set={'id.i4':{1:3, 2:10**12}}), IngestError, NEEDS+'sample 2: '),
    (lambda s: s.drop_fields(*s.fields), ValueError, 'no field would be left'),
    (lambda s: s.drop_fields('nothing'), UnknownField, "no field 'nothing'"),
    (lambda s: s.add_fields({}), ValueError, 'there is no field to add'),
    (lambda s: s.add_fields('y'), TypeError, 'want a function'),
    (lambda s: s.add_fields(lambda o: {'cls':1}, **ONE), ValueError, "there is a field 'cls' already"),
    (lambda s: s.add_fields({'y.f4':np.zeros(3)}), ValueError, "'y.f4' has 3 values, for 30 samples"),
    (lambda s: s.add_fields({'y.f4':np.array(5.)}), TypeError, "'y.f4' is one value, for 30 samples"),
    (lambda s: s.add_fields(lambda o: {'y.txt':'a'}, fields=['nope'], **ONE), UnknownField, "no field 'nope'"),
    (lambda s: s.add_fields({'y.i4':[1]*30}, fields=['txt'], **ONE), TypeError, 'fields= names what a function gets'),
    (lambda s: s.add_fields({'y.cls':[0]*30}, vocab={'z.cls':['a','b']}, **ONE), ValueError, "vocab= names .*'z.cls'"),
    (lambda s: s.add_fields(lambda o: {}, **ONE), IngestError, 'a sample without fields'),
    (lambda s: s.add_fields(fails, **ONE), IngestError, NEEDS+'sample 5: ZeroDivisionError'),
    (lambda s: s.add_fields(lambda o: {'y.npy':np.array(1//(o['id.i4']-3))}, **ONE), IngestError,
     NEEDS+'sample 3: ZeroDivisionError'),
    (lambda s: s.add_fields({'y.i4':[*range(29), None]}, **ONE), IngestError,
     NEEDS+"sample 29: TypeError: field 'y.i4' is None"),
    (lambda s: s.append([sample(1)], overwrite=True), TypeError, 'd: append takes no overwrite'),
    (lambda s: s.append([{'txt':'a'}], **ONE), ValueError, r"without 'cls', .*'x.npy'\. fn= can leave out"),
    (lambda s: s.append([{**sample(1), 'n.cls':1, 'more':1}], **ONE), ValueError, "also 'more'"),
    (lambda s: s.append([{**sample(1), 'n.cls':1, 'cls':3}], **ONE), ValueError, NUMBERS),
    (lambda s: s.append({'train':[sample(1)]}, **ONE), ValueError, 'has no splits, and the new samples have some')]

def test_a_change_that_makes_no_sense_is_refused_and_leaves_nothing(place):
    store = place.write([{**sample(i), 'n.cls':i%3} for i in range(30)])
    there,content = place.contents(),rows(store)
    for k,(change,error,message) in enumerate(REFUSED):
        with pytest.raises(error, match=message): change(store)
        if place.kind is RedisStore: assert place.contents()==there, (k,message)
    assert rows(place.open())==content==rows(store) and not place.open().unfinished(place.address('d')[0])
    assert store.edit() is store is store.drop_fields()
    assert store.edit(set={'txt':{0:'new'}})[0]['txt']=='new'   # nothing is in the way
    assert len(set(place.contents())-set(there))<=6   # what is new is of this edit

def test_of_two_who_edit_the_second_learns_that_the_dataset_is_another_one_now(place):
    store = place.write()
    other = store.edit(drop=[1])
    for again in (lambda: store.edit(drop=[2]), lambda: store.append(samples(30, 31), **ONE),
                  lambda: store.drop_fields('txt')):
        with pytest.raises(StoreNotFound, match='replaced since it was opened'): again()
    assert rows(place.open())==rows(other) and len(other)==29

# --- appending

def test_each_sample_goes_to_its_split(place):
    store = place.write({'train':samples(0, 10), 'valid':samples(10, 14)})
    store = store.append({'valid':samples(20, 23), 'train':samples(30, 35)}, **ONE)
    store = store.append({'test':samples(40, 42), 'train':samples(50, 51)}, **ONE)
    found = {split:sorted(ids(store)[slice(*span)]) for split,span in store.splits.items()}
    assert found=={'train':[*range(10), *range(30, 35), 50], 'valid':[*range(10, 14), 20,21,22], 'test':[40,41]}
    assert store.splits=={'train':[0,16], 'valid':[16,23], 'test':[23,25]} and verified(store)
    with pytest.raises(ValueError, match="has the splits train, valid, test.*{'train': source} names one"):
        store.append(samples(60, 62), **ONE)

def test_shards_are_not_written_again(folders):
    "Other tools see all samples of the shards"
    folder, = folders.address('d')
    def tars(): return {p.name:(p.stat().st_mtime_ns,p.stat().st_ino) for p in folder.glob('*.tar')}
    store,before = folders.write(),tars()
    store = store.append(samples(30, 37), **ONE).edit(drop=[2], set={'cls':{7:'b'}})
    store = store.add_fields({'y.f4':[.5]*36}).drop_fields('txt')
    assert before.items()<=tars().items() and len(store)==36 and verified(store)
    found = webdataset.WebDataset([str(folder/name) for name in sorted(tars())], shardshuffle=False)
    assert len({sample['__key__'] for sample in found})==37

def test_a_source_is_appended_once(place, tmp_path):
    "Its call may have been repeated, because the process was killed just after the commit; lists are compared whole"
    new = samples(0, 200)
    store = place.write(samples(0, 1)).append(new, **ONE)
    for change in {'txt':'b'},{'cls':'c'},{'x.npy':np.zeros(3)},{'x.npy':np.full((1,3), 7)},{'id.i4':8}:
        changed = [{**row, **change} if i==7 else row for i,row in enumerate(new)]
        store = store.append(changed, **ONE)
        with pytest.raises(StoreExists, match='these samples were appended before.*again=True'):
            store.append([dict(row) for row in changed], **ONE)
    assert len(store)==1201 and len(store.append(new, again=True, **ONE))==1401

def test_other_samples_were_not_appended_before(redis_place, tmp_path):
    "Only a source whose data are known to be the same is refused"
    def read(day): yield from ({'png':Image.new('L', (2,2), day), 'txt':f'{day} {i}'} for i in range(5))
    store = redis_place.write(read(0))
    for kind in read,lambda day: list(read(day)):
        for day in 1,2,2: store = store.append(kind(day), **ONE)
    assert len(store)==35
    def named(o): return {**o, 'txt':'file'}
    for day in 'ab':
        (tmp_path/day).mkdir()
        Image.new('L', (2,2), ord(day)).save(tmp_path/day/'0.png')
        store = store.append(image_samples(tmp_path/day), named, **ONE)
        with pytest.raises(StoreExists, match='appended before'):
            store.append(image_samples(tmp_path/day), named, **ONE)
    assert [store[i]['png'].getpixel((0,0)) for i in (35,36)]==[97,98]

def test_codes_of_a_source_with_classes_are_translated(place):
    class Source:
        "A dataset with codes and names of classes, in an order of its own"
        classes = ['owl','b','a']
        def __len__(self): return 3
        def __getitem__(self, i): return f't{i}',i
    def fn(o): return {'txt':o[0], 'cls':o[1]}
    store = place.write([('x','a'),('y','b')], fn=fn).append(Source(), fn, shuffle=False, **ONE)
    assert [row['cls'] for row in store]==['a','b','owl','b','a'] and store.vocab==['a','b','owl']
    numbers = place.write(of_labels([3,7]), 'numbers')   # where labels are numbers, 1 is not 7, the second of them
    with pytest.raises(IngestError, match="label 1 is not in the vocab of 'cls'"):
        numbers.append(numbers, lambda o: {'cls':1}, **ONE)

def labels(store): return [row['cls'] for row in store[:]]
def of_labels(values): return [{'cls':value} for value in values]

def test_labels_that_are_appended(place):
    "More classes than fit a byte; and numbers, which are sorted only where they were written first"
    before,more = [f'c{i:03}' for i in range(200)],[f'd{i:03}' for i in range(200)]
    store = place.write(of_labels(before)).append(of_labels(more), shuffle=False, **ONE)
    assert labels(store)==before+more and verified(store) and store.manifest.fields['cls']['dtype']=='u2'
    assert store.get_many(range(400), 'cls', check=True)['cls'].tolist()==list(range(400))
    for before,more,vocab in (([3,1,2],[7,1],[1,2,3,7]), ([10**9,5],[-3],[5,10**9,-3])):
        store = place.write(of_labels(before)).append(of_labels(more), shuffle=False, **ONE)
        assert labels(store)==before+more and store.vocab==vocab

@pytest.fixture
def few_classes(monkeypatch):
    "At most 100 different integers can be classes"
    modules = [module for name,module in sys.modules.items() if name.startswith('fastai_remote')]
    for module in modules:
        if hasattr(module, 'MAX_CLASSES'): monkeypatch.setattr(module, 'MAX_CLASSES', 100)

def test_more_integers_than_can_be_classes_are_numbers(place, few_classes):
    "They are stored as they are, and those that are appended, edited and added, too"
    many = list(range(0, 700, 5))
    for more in [5,10**6],[-3],list(range(1000, 1200)):
        store = place.write(of_labels(many)).append(of_labels(more), shuffle=False, **ONE)
        assert labels(store)==many+more and not store.vocab and verified(store)
    store = place.write(of_labels(range(140))).edit(set={'cls':{3:10**6}})
    assert labels(store)[:5]==[0,1,2,10**6,4] and not store.vocab and verified(store)
    for last in -5,70_000:
        added = [*range(139), last]
        store = place.write(of_labels([1,2]*70)).add_fields({'n.cls':added}, num_workers=1)
        assert [row['n.cls'] for row in store[:]]==added and 'n.cls' not in store.manifest.vocab and verified(store)
    store = place.write(of_labels([10,20,30]))   # codes of which the numbers would be taken for
    with pytest.raises(ValueError, match="d: 'cls' has 3 labels, and the new samples have more different integers"):
        store.append(of_labels(range(101)), shuffle=False, **ONE)
    assert labels(store.reopened())==[10,20,30]

def test_failures_of_all_parts_are_named(place):
    def fn(o):
        if o['id.i4']%5==3: raise ValueError('three')
        return o
    store = place.write(samples(0, 20), fn=fn, max_failed=4).append(samples(20, 30), fn, max_failed=2, **ONE)
    assert len(store)==24 and store.manifest.failed==6==len(list(store.failures())) and verified(store)
    with pytest.raises(IngestError, match='three'): store.append(samples(30, 60), fn, max_failed=0, **ONE)
    assert len(place.open())==24 and verified(place.open())

# --- editing and fields

def test_columns_are_added_by_position(place):
    "Whatever labels a column has; what has no position is an error"
    store = place.write([{'txt':o} for o in 'abc'])
    columns = (pd.Series([1,2,3], index=[2,0,1]), pd.Index([1,2,3]), pd.Categorical([1,2,3]), range(1,4),
               pd.array([1,2,3], dtype='Int32'), pl.Series([1,2,3]), np.ma.array([1,2,3]))
    store = store.add_fields({f'n{k}.i4':values for k,values in enumerate(columns)}, **ONE)
    assert [set(row.values()) for row in store]==[{'a',1},{'b',2},{'c',3}]
    for values in 'abc',{0:1, 1:2, 2:3},{1,2,3},(o for o in 'abc'),pd.DataFrame({0:[1,2,3]}):
        with pytest.raises(TypeError, match="'x.json': want a list or an array with a value for each sample"):
            store.add_fields({'x.json':values}, **ONE)
    with pytest.raises(IngestError, match='sample 1.*masked'):
        store.add_fields({'x.i4':np.ma.array([1,2,3], mask=[0,1,0])}, **ONE)

def test_progress_of_new_numbers_is_shown(place):
    def show(records, total, report):
        yield from records
        shown.append((total>0,report.written))
    shown = []
    place.write().add_fields({'y.i4':list(range(30))}, num_workers=1, progress=show)
    assert shown==[(True,30)]

def test_values_that_an_edit_does_not_change_stay_byte_for_byte(place):
    "Also of a sample of which another field changes"
    def noise(i): return encoded(np.random.default_rng(i).integers(0, 255, (9,9,3)), 'JPEG', quality=60)
    def row(i): return {'jpg':noise(i), 'cls':'ab'[i%2], 'x.npy':np.full(3, i), 'tags.labels':['t'], 'f.f4':.1*i}
    before = place.write(map(row, range(6)))
    stored = before.get_many(range(6), before.fields)
    store = before.edit(set={
        'jpg':{2:noise(99)}, 'cls':{1:'b', 3:'c'}, 'x.npy':{5:np.zeros(2)}, 'f.f4':{4:.3}, 'tags.labels':{1:['t']}})
    changed = {'jpg':[2], 'cls':[3], 'x.npy':[5], 'f.f4':[4], 'tags.labels':[]}
    after = store.get_many(range(6), store.fields, check=True)
    for field,numbers in changed.items():
        assert [i for i in range(6) if after[field][i]!=stored[field][i]]==numbers, field
    assert after['jpg'][2]==noise(99)

def test_statistics_of_images_are_those_of_all(place):
    "Up to rounding, also where grey images are appended to coloured ones, and fields in another order"
    def row(i):
        pixels = np.random.default_rng(i).integers(0, 50+i*6, (6+i,9,3)).astype(np.uint8)
        return {'png':Image.fromarray(pixels if i<20 else pixels[...,0])}
    rows = [row(i) for i in range(30)]
    store,whole = place.write(rows[:12], 'grown').append(rows[12:], chunk=8, **ONE),place.write(rows, 'whole')
    want,found = image_stats(whole),image_stats(store)
    assert {k:want[k] for k in ('n','width','height')}=={k:found[k] for k in ('n','width','height')}
    for k in ('mean','std','grey'): assert np.abs(np.subtract(want[k], found[k])).max()<1e-4
    assert np.abs(np.asarray(store.mean_image(), int)-np.asarray(whole.mean_image(), int)).max()<=1
    def two(*names): return {name:Image.new('L', (4,4), 50 if name=='a.png' else 100) for name in names}
    store = place.write([two('a.png', 'b.png')]*4).append([two('b.png', 'a.png')]*4, **ONE)
    assert store.manifest.stats.keys()=={'a.png'} and store.stats[0]==[.19608] and image_stats(store)['n']==8

def test_there_are_no_statistics_of_images_that_an_edit_changed(place):
    "They would be those of the images before; an edit of labels, and an appended part, leave what is true"
    def row(value, label='a'): return {'png':Image.new('RGB', (8,8), (value,)*3), 'cls':label}
    store = place.write([row(10)]*6).edit(set={'cls':{1:'b'}})
    assert store.stats==([.03922]*3, [0.]*3)
    store = store.append([row(20, 'b')]*6, **ONE)
    assert np.allclose(store.stats[0], 15/255, atol=1e-4)
    for change in dict(drop=[3]),dict(set={'png':{0:Image.new('RGB', (8,8))}}):
        store = place.open().edit(**change)
        for wanted in (lambda: store.stats, store.mean_image,
                       lambda: DataLoaders.from_store(store, normalize=True, num_workers=0)):
            with pytest.raises(ValueError, match=r'no statistics.*an edit that changes or drops images.*store\.copy'):
                wanted()
    store = store.append([row(200)]*3, **ONE)
    assert not store.manifest.stats   # not those of the last three only
    store.copy(*place.address('copy'), **ONE)
    assert image_stats(place.open('copy'))['n']==len(store)==14

@pytest.mark.parametrize('num_workers', [0,1])
def test_loaders_of_an_edited_dataset(place, num_workers):
    def png(i, labels): return {'png':Image.fromarray(np.full((8,8,3), i, np.uint8)), 'cls':labels[i%2]}
    store = place.write({'train':[png(i, 'ab') for i in range(24)], 'valid':[png(i, 'ab') for i in range(24, 32)]})
    store = store.append({'train':[png(i, 'ac') for i in range(40, 48)]}, **ONE)
    store = store.edit(drop=[0,30], set={'cls':{5:'c'}, 'png':{7:png(99, 'ab')['png']}})
    dls = DataLoaders.from_store(store, bs=5, num_workers=num_workers, device='cpu')
    train = store[slice(*store.splits['train'])]
    want = sorted((row['png'].getpixel((0,0))[0], store.vocab.index(row['cls'])) for row in train)
    batches = [(x.clone(),y.clone()) for x,y in dls.train.new(drop_last=False)]
    got = sorted((round(float(x[0,0,0])*255),int(y)) for xs,ys in batches for x,y in zip(xs,ys))
    assert got==want and 99 in dict(want) and len(dls.vocab)==3 and sum(len(y) for _,y in dls.valid)==8

# --- in Redis

def test_a_sample_whose_value_is_missing_can_be_dropped_and_replaced(redis_place, server):
    for change,left in (dict(drop=[3]),0),(dict(set={'txt':{3:'new'}}),0),(dict(set={'cls':{3:'b'}}),1):
        store = redis_place.write(samples(0, 9))
        client(server).delete(next(key for key in keys(client(server)) if key.endswith(':txt:3')))
        assert store.verify(num_workers=1).bad==1
        edited = store.edit(**change)
        assert edited.verify(num_workers=1).bad==left and edited[2]['txt']=='sample 2'

def test_a_change_counts_although_its_lock_could_not_be_released(redis_place, server, monkeypatch):
    "The lock ends by itself; and an error of the change is not replaced by that of the lock"
    store,close = redis_place.write(samples(0, 9)),RedisLock.close
    def close_and_fail(self):
        close(self)
        raise StoreUnavailable('away')
    monkeypatch.setattr(RedisLock, 'close', close_and_fail)
    assert len(store.edit(drop=[1]))==8
    with pytest.raises(StoreExists, match='is there already'): redis_place.write(samples(0, 9), overwrite=False)
    redis_place.open().rename('e')
    redis_place.delete('e')
    assert 'e' not in RedisStore.names(server.url)

def test_what_is_there_is_not_written_again_and_what_is_dropped_is_freed(redis_place, server):
    def written(): return client(server).info('stats')['total_net_input_bytes']
    store = redis_place.write([{'x.bin':bytes([i])*10_000} for i in range(100)])
    there,before = len(keys(client(server))),written()
    store = store.edit(drop=range(10, 60)).append([{'x.bin':b'new'}], **ONE)
    assert written()-before<100_000 and len(store)==51 and verified(store)
    assert len(keys(client(server)))==there-50+4   # the new value, its checksum, and the tables of runs of this version and of the one before
    store = store.add_fields({'y.bin':[b'']*51}, **ONE).drop_fields('x.bin')
    assert not [key for key in keys(client(server)) if ':x.bin:' in key] and verified(store)

def test_what_a_version_does_not_need_stays_until_the_next_one_or_until_it_is_cleaned(redis_place, server):
    store,stored = redis_place.write(samples(0, 9)),lambda: keys(client(server))
    before = next(key.removesuffix('0') for key in stored() if key.endswith(':txt:0'))
    store = store.edit(set={'txt':{3:'new'}})
    assert f'{before}3' in stored()   # for stores that were opened before
    runs = store.manifest.runs['key']
    store = store.edit(drop=[0])
    assert f'{before}3' not in stored() and {f'{before}0', runs}<=stored()
    store.clean()
    assert not {f'{before}0', runs}&stored() and verified(store) and store[2]['txt']=='new'
    store = store.drop_fields('txt')
    assert not [key for key in stored() if ':txt:' in key and not key.startswith('x')] and verified(store)
    redis_place.delete()
    assert stored()==set()

def test_a_file_that_a_version_does_not_need_stays_until_the_next_one_or_until_it_is_cleaned(folders):
    store,stored = folders.write(),lambda: {name.rpartition('/')[2] for name in folders.contents()}
    tables = lambda: {name for name in stored() if '.runs-' in name}
    store = store.edit(drop=range(7))   # all samples of a shard
    assert 'shard-000000.tar' in stored() and 'shard-000000.tar.fastai_remote' in stored()
    store = store.edit(drop=[3])
    assert 'shard-000000.tar' not in stored() and len(tables())==2
    store = store.edit(drop=[4])
    assert len(tables())==2
    store.clean()
    assert len(tables())==1 and verified(store) and ids(store)==[7,8,9,11,*range(13, 30)]
    folders.delete()
    assert not stored()

def test_a_version_that_is_not_there_any_more_is_neither_cleaned_nor_changed(place):
    "Nothing is left where a dataset was deleted"
    store = place.write(samples(0, 9))
    edited = store.edit(drop=[0])
    with pytest.raises(StoreNotFound, match='replaced since it was opened'): store.clean()
    edited.clean()
    place.delete()
    before = place.contents()
    for change in (lambda: edited.edit(drop=[0]), lambda: edited.edit(set={'txt':{1:'new'}}), edited.clean,
                   lambda: edited.drop_fields('txt')):
        with pytest.raises(StoreNotFound): change()
        assert place.contents()==before and not (place.kind is ShardStore and place.address('d')[0].exists())

def test_a_field_that_is_named_twice_is_dropped_once(redis_place):
    other = redis_place.write(samples(0, 9), 'e').drop_fields('txt', 'txt')
    assert redis_place.write(samples(0, 9)).drop_fields('txt').manifest.nbytes==other.manifest.nbytes>0

def test_damage_of_runs_and_of_changed_values_is_noticed(redis_place, server):
    store = redis_place.write().edit(drop=[4]).append(samples(30, 34), **ONE)
    c,key,last = client(server),store.manifest.runs['key'],store.manifest.parts[-1]['prefix']
    stored = c.get(key)
    c.setrange(key, 9, b'\x01')
    with pytest.raises(CorruptSample, match=f'{key}.*damaged'): redis_place.open()[0]
    assert redis_place.open().verify(num_workers=1).bad
    c.delete(key)
    with pytest.raises(CorruptSample, match='is gone'): redis_place.open()[0]
    c.set(key, stored)
    assert verified(redis_place.open())
    c.setrange('d:id.i4#0', 8*10+3, b'\xff')   # sample 10, which is number 9 now
    with pytest.raises(CorruptSample, match=r'sample 9, field .id.i4.*key d:id.i4#0 at byte 80'):
        redis_place.open().get_many(range(20), 'id.i4', check=True)
    c.set(f'{last}:txt:0', b'other')
    with pytest.raises(CorruptSample, match=f'sample 29, field .txt.*key {last}:txt:0'):
        redis_place.open().get_many([29], 'txt', check=True)

def test_an_open_reader_goes_on_with_its_own_version(place):
    "Where it needs what is not stored any more, it says that there is another version, and not that it is damaged"
    place.write()
    used,fresh = place.open(),place.open()
    want = rows(used)
    store = place.open().append(samples(30, 35), **ONE)
    assert rows(used)==rows(fresh)==rows(place.open())[:30]==want
    before = store.add_fields(lambda o: {'more.txt':'more'}, **ONE)
    rows_before = rows(before)
    store = before.edit(drop=[0], set={'txt':{3:'new'}})
    assert rows(before)==rows_before   # what only the version before uses stays
    others = [i for i in range(30) if i not in (0,3)]
    for reader in used,fresh:
        assert [reader[i]['id.i4'] for i in others]==others and reader.fields==list(want[0])
        for i in 0,3:
            try: assert plain_rows([reader[i]])==[want[i]]
            except StoreNotFound as error: assert 'replaced since it was opened' in str(error)
    store.drop_fields('x.npy')
    assert used.get_many(others, 'txt')['txt']==[f'sample {i}'.encode() for i in others]
    place.delete()
    unread = pickle.loads(pickle.dumps(used))
    for read in (lambda: unread[9], lambda: place.open()):
        with pytest.raises(StoreNotFound): read()

def test_a_dataset_with_the_same_keys_is_not_taken_for_a_later_version(redis_place, server):
    """As after FLUSHALL; readers of many versions ago are told, too

    So is one that has not read where the samples are: the key of the runs is gone then, which is no damage."""
    reader = redis_place.write()
    client(server).flushall()
    store = redis_place.write(samples(100, 130))
    for _ in range(2):
        with pytest.raises(StoreNotFound, match='replaced since it was opened'): reader.get_many([3], 'txt')
        store = store.edit(drop=[0])
    before = redis_place.open()
    store.edit(drop=[1]).edit(drop=[1])
    with pytest.raises(StoreNotFound, match='d: replaced since it was opened'): before.get_many([0], 'txt')

def test_kinds_of_stores_that_cannot_be_changed(redis_place, server, tmp_path):
    store = redis_place.write()
    store.copy(tmp_path/'s', **ONE)
    with pytest.raises(ValueError, match='appended to or edited, or samples failed; copy it'):
        TieredStore(store.edit(drop=[1]), ShardStore(tmp_path/'s'))
    client(server).set('a:0', b'x')
    with pytest.raises(TypeError, match='a RedisKeys cannot be changed'):
        RedisStore.from_keys(server.url, 'a:{}', n=1, codec='txt').add_fields({'y.u1':[1]}, **ONE)

def test_vocabularies_are_joined_in_time_that_grows_with_their_length():
    "A set is made once, not once for each label: 50,000 labels would take minutes"
    assert joined_vocab(list(range(50_000)), list(range(49_990, 100_000)))==list(range(100_000))

# --- in shards

def webdataset_tars(folder, *tars):
    folder.mkdir(exist_ok=True)
    for k,found in enumerate(tars):
        with webdataset.TarWriter(str(folder/f'{k}.tar')) as out:
            for i,o in enumerate(found, sum(map(len, tars[:k]))): out.write({'__key__':f'k{i}', **o})

def test_shards_of_others_are_edited_and_not_changed(tmp_path):
    tars = [[{'txt':f't{i}', 'cls':i%2} for i in range(start, start+5)] for start in (0,5)]
    webdataset_tars(tmp_path, *tars)
    content = files(tmp_path)
    store = index(tmp_path)[0].edit(drop=[0], set={'cls':{3:7}, 'txt':{7:'new'}})
    store = store.add_fields({'y.f4':np.arange(9)/2}, **ONE).add_fields(lambda o: {'up.txt':o['txt'].upper()}, **ONE)
    assert store.keys(range(9))==[f'k{i}' for i in range(1, 10)] and store[2]['cls']==7 and store[4]['y.f4']==2.
    assert [store[i]['up.txt'] for i in (0,6,8)]==['T1','NEW','T9']
    assert verified(store) and content.items()<=files(tmp_path).items()
    assert {p.name for p in tmp_path.iterdir()}=={'0.tar','1.tar','.fastai_remote'}
    with pytest.raises(TypeError, match='others wrote these shards: index_shards adds more'):
        store.append(samples(0, 2), **ONE)
    webdataset_tars(tmp_path, *tars, [{'txt':'t', 'cls':1}])
    with pytest.raises(StoreExists, match='the dataset was edited; overwrite=True indexes all shards anew'):
        index(tmp_path)
    assert len(index(tmp_path, overwrite=True)[0])==11
    ShardStore.delete(tmp_path)
    assert names(tmp_path)==['0.tar','1.tar','2.tar']

def test_values_that_samples_lacked(tmp_path):
    "An edit may give them to samples of shards of others; it counts these, and what is dropped"
    def sample(i): return {'txt':'t', **({'v.f4':b'1', 'cls':i%4//2, 'a.txt':'a'*100} if i%2 else {})}
    webdataset_tars(tmp_path, [sample(i) for i in range(4)], [sample(i) for i in range(4, 8)])
    store = index(tmp_path)[0].edit(drop=[7], set={'v.f4':{0:2., 1:3., 2:2.}, 'a.txt':{4:'b', 5:'b'}})
    assert store.field_table.counts=={**store.field_table.counts, 'v.f4':5, 'a.txt':4, 'cls':3} and store.may_lack('v.f4')
    store = store.edit(set={'v.f4':{4:2., 6:2.}})
    assert store.get_many(range(7), 'v.f4')['v.f4'].tolist()==[2,3,2,1,2,1,2]
    assert store.field_table.counts['v.f4']==7 and not store.may_lack('v.f4')
    store = store.edit(drop=[4], set={'cls':{0:0, 1:1, 2:1}})
    assert store.get_many(range(6), 'cls?')['cls?']==[0,1,1,1,0,None] and verified(store)
    assert store.field_table.counts['cls']==5 and store.class_counts()=={0:2, 1:3}
    before = store.manifest.nbytes   # a value of 100 bytes is replaced by one of 10, and 10 bytes are new
    assert store.edit(set={'a.txt':{0:'c'*10, 1:'c'*10}}).manifest.nbytes==before-100+20

def test_the_bytes_of_a_version_are_those_of_the_values_that_it_has(folders):
    "Not those of values that were replaced or dropped, which stay in the shards or in an added part"
    store = folders.write([{'txt':'a'*1000, 'cls':'ab'[i%2]} for i in range(4)], chunk=2)
    labels = store.manifest.nbytes-4000
    for change,want in (
        (lambda: store.edit(set={'txt':{1:'b'*10, 2:'b'*20}}), 2030), (lambda: store.edit(set={'txt':{1:'b'*5}}), 2025),
        (lambda: store.add_fields(lambda o: {'more.txt':'c'*500}, **ONE), 4025),
        (lambda: store.drop_fields('more.txt'), 2025), (lambda: store.edit(drop=[2]), 2005),
        (lambda: store.edit(drop=[1], set={'txt':{0:'d'*100}}), 1100)):
        store = change()
        assert store.manifest.nbytes-labels==want
    assert verified(store) and store.drop_fields('txt').manifest.nbytes==labels
