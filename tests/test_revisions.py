"Datasets that are appended to and edited: what they contain, who sees it and when, and what is shared and removed"
import base64, io, json, os, random, re, shutil, tracemalloc, zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
import redis
from fastai.vision.all import DataLoaders
from hypothesis import given, strategies as st
from PIL import Image

from clusters import LocalCluster
from conftest import dies_at, examples
from fastai_remote import (IngestError, MissingSample, RedisStore, ShardStore, StoreExists, StoreNotFound, StoreUnavailable,
    TieredStore, UnknownField, UnsupportedFormat, image_samples, index_shards, to_redis, to_shards)
from fastai_remote.core import CorruptSample, Manifest, seal
from fastai_remote.ingest.revise import _Columns, drop_fields
from fastai_remote.store.redis_parts import read_run_tables, RunTable, TooManyRuns
from fastai_remote.write import redis_lost
from fastai_remote.write.redis_lock import RedisLock
from fastai_remote.write.revision import Edit

one = dict(num_workers=1, progress=False)

def sample(i, label=None):
    return {'txt':f'sample {i}', 'cls':label or 'abc'[i%3], 'id.i4':i, 'x.npy':np.full(3, i), 'tags.labels':[f't{i%2}']}
def samples(start, stop): return [sample(i) for i in range(start, stop)]
def put(url, n=30, name='d', **kw): return to_redis(samples(0, n), url, name, **{'shuffle':False, **one, **kw}) and RedisStore(url, name)
def plain(o): return o.tolist() if isinstance(o, np.ndarray) else list(o) if isinstance(o, (list,tuple)) else o
def rows(store): return [{f:plain(o) for f,o in row.items()} for row in store[:]]
def expected(values): return [{f:plain(o) for f,o in row.items()} for row in values]
def client(server): return redis.Redis.from_url(server.url)
def keys(server): return {k.decode() for k in client(server).keys()}-{'fastai_remote:generations'}
def verified(store):
    report = store.verify(num_workers=1)
    return report.samples==len(store) and not report.bad

# --- tables of runs, against lists

@examples(60)
@given(st.integers(1, 40), st.lists(st.tuples(st.sampled_from(['drop','replace','insert']), st.integers(0, 10**6), st.integers(1, 9)), max_size=8))
def test_a_table_of_runs_is_a_list_of_places(n, changes):
    table,places = RunTable.whole(n),[(0,i) for i in range(n)]
    for part,(what,seed,k) in enumerate(changes, 1):
        rng = random.Random(seed)
        if what=='insert':
            at = rng.randint(0, len(places))
            table = table.insert(at, part, 5, k)
            places[at:at] = [(part,5+i) for i in range(k)]
        else:
            numbers = sorted(rng.sample(range(len(places)), min(k, len(places))))
            if what=='replace':
                table = table.replace(np.array(numbers, np.int64), part)
                for j,i in enumerate(numbers): places[i] = part,j
            else:
                table = table.drop(np.array(numbers, np.int64))
                places = [place for i,place in enumerate(places) if i not in numbers]
        assert table.n==len(places)
        found = table.locate(np.arange(table.n))
        assert list(zip(*(a.tolist() for a in found)))==places
        neighbours = sum(a!=(b[0],b[1]-1) for a,b in zip(places, places[1:]))
        assert len(table)==(neighbours+1 if places else 0)   # no more runs than there must be
        again = RunTable.from_bytes(table.to_bytes(), table.n)
        assert again.to_bytes()==table.to_bytes()

def test_a_damaged_table_is_refused():
    good = RunTable.whole(10).drop(np.array([3]))
    for starts,parts,firsts,n in (([0,3],[0],[0,4],9), ([1,3],[0,0],[0,4],9), ([0,9],[0,0],[0,4],9), ([0,3],[0,-1],[0,4],9), ([],[],[],9), ([0],[0],[0],0)):
        with pytest.raises(ValueError): RunTable(starts, parts, firsts, n)
    with pytest.raises(ValueError): RunTable.from_bytes(good.to_bytes()[:-3], 9)

def test_fifty_million_samples_take_no_memory(monkeypatch):
    "Only the runs do: a few for each sample that was dropped or changed"
    tracemalloc.start()
    numbers = np.arange(0, 50_000_000, 50_000)
    table = RunTable.whole(50_000_000).drop(numbers).replace(numbers[:-1], 1).insert(7_000_000, 2, 0, 1_000_000)
    assert table.n==51_000_000-1000 and len(table)<4100 and tracemalloc.get_traced_memory()[1]<2_000_000
    tracemalloc.stop()
    monkeypatch.setattr('fastai_remote.store.redis_parts.MAX_RUNS', 1000)
    with pytest.raises(TooManyRuns, match=r'1,001 runs.*where 1,000.*store\.map'): RunTable.whole(50_000_000).drop(np.arange(1, 2001, 2))

# --- against a list of samples

class Model:
    "A dataset, and what it should contain"
    def __init__(self, url, n=30, **kw):
        self.store,self.rows,self.next = put(url, n, **kw),samples(0, n),n

    def append(self, rng):
        new = [{**sample(i, rng.choice(['a','b',f'new {i%4}'])), **self.more(i)} for i in range(self.next, self.next+rng.randint(1, 9))]
        self.next += len(new)
        self.rows += new
        return self.store.append(new, shuffle=False, **one)

    def more(self, i): return {f:f'{f} of {i}' for f in self.store.fields if f.startswith('more')}

    def edit(self, rng):
        numbers = rng.sample(range(len(self.rows)), min(len(self.rows)-1, 8))
        drop,change = numbers[:rng.randint(0, 4)],numbers[4:]
        values = {'cls':{i:f'changed {i%3}' for i in change[:2]}, 'txt':{i:f'changed {i}' for i in change[1:]}, 'id.i4':{i:-i for i in change[:3]},
            'tags.labels':{i:[f'tag {i%2}','t1'][:1+i%3] for i in change[2:]}}
        for field,changed in values.items():
            for i,value in changed.items(): self.rows[i] = {**self.rows[i], field:value}
        self.rows = [row for i,row in enumerate(self.rows) if i not in drop]
        return self.store.edit(drop, values)

    def add(self, rng):
        field = f'more{rng.randint(0, 2)}.txt'
        if field in self.store.fields: return self.drop_field(field)
        self.rows = [{**row, field:f"{field} of {row['id.i4']}"} for row in self.rows]
        if rng.random()<.5: return self.store.add_fields({field:[row[field] for row in self.rows]}, **one)
        return self.store.add_fields(lambda o: {field:f"{field} of {o['id.i4']}"}, ['id.i4'], **one)

    def drop_field(self, field):
        self.rows = [{f:o for f,o in row.items() if f!=field} for row in self.rows]
        return self.store.drop_fields(field)

    def step(self, rng):
        before = self.store
        self.store = rng.choice([self.append,self.edit,self.add])(rng)
        if self.store is before: return
        with pytest.raises(StoreNotFound, match='replaced since it was opened'): before.get_many([0], 'txt')

    def check(self):
        store = self.store
        assert rows(store)==expected(self.rows) and len(store)==len(self.rows)
        assert verified(store)
        labels = [row['cls'] for row in self.rows]
        assert store.class_counts()=={label:labels.count(label) for label in store.vocab}
        assert {tag for row in self.rows for tag in row['tags.labels']}<=set(store.manifest.vocab['tags.labels'])
        some = np.random.default_rng(len(self.rows)).permutation(len(self.rows))[:7]
        got = store.get_many(some, ['txt','id.i4'], check=True)
        assert [t.decode() for t in got['txt']]==[self.rows[i]['txt'] for i in some] and got['id.i4'].tolist()==[self.rows[i]['id.i4'] for i in some]

@pytest.mark.parametrize('seed', range(4))
def test_any_changes(server, seed):
    rng = random.Random(seed)
    model = Model(server.url, name=f'd{seed}')
    for _ in range(8): model.step(rng)
    model.check()
    RedisStore.delete(server.url, f'd{seed}')
    assert not keys(server)

@pytest.mark.slow
@pytest.mark.parametrize('seed', range(4, 24))
def test_many_changes(server, seed):
    rng = random.Random(seed)
    model = Model(server.url, name=f'd{seed}')
    for _ in range(16):
        model.step(rng)
        model.check()
    model.store.copy(server.url, f'copy {seed}', **one)
    copy = RedisStore(server.url, f'copy {seed}')
    assert rows(copy)==rows(model.store) and not copy.manifest.parts
    to_redis(samples(0, 5), server.url, f'd{seed}', overwrite=True, **one)
    for name in (f'd{seed}',f'copy {seed}'): RedisStore.delete(server.url, name)
    assert not keys(server)

@pytest.mark.slow
def test_changes_in_a_cluster():
    with LocalCluster(3) as c:
        for seed in range(3):
            rng = random.Random(seed)
            model = Model(c.url, name='d')
            for _ in range(8): model.step(rng)
            model.check()
            model.store = model.store.rename('e')
            model.check()
            RedisStore.delete(c.url, 'e')
            left = {k.decode() for k_ in range(3) for k in c.client(k_).keys()}
            assert left<={'fastai_remote:locks','fastai_remote:generations'}

# --- shards

class ShardModel(Model):
    "The same in shards, which are not changed: numbers and labels go into indices, other values into overlays"
    def __init__(self, folder, n=30, **kw):
        to_shards(samples(0, n), folder, shuffle=False, maxcount=7, **one)
        self.store,self.rows,self.next = ShardStore(folder),samples(0, n),n

    values = {'more0.u1':lambda i: i%100, 'kind0.cls':lambda i: f'k{i%3}', 'text0.txt':lambda i: f'text {i}', 'text1.txt':lambda i: f'other {i}',
        'x0.npy':lambda i: np.full(i%4, i), 'tags0.labels':lambda i: [f'l{i%3}', 'm'][:1+i%2]}

    def more(self, i): return {f:value(i) for f,value in self.values.items() if f in self.store.fields}

    def add(self, rng):
        fields = rng.sample(list(self.values), rng.choice([1,1,2,3]))
        if there := [field for field in fields if field in self.store.fields]: return self.drop_field(there[0])
        values = {field:self.values[field] for field in fields}
        def new(row): return {field:value(row['id.i4']) for field,value in values.items()}
        self.rows = [{**row, **new(row)} for row in self.rows]
        if rng.random()<.5: return self.store.add_fields({field:[row[field] for row in self.rows] for field in fields}, **one)
        return self.store.add_fields(new, ['id.i4'], **one)

@pytest.mark.parametrize('seed', [0,1,*(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 16))])
def test_any_changes_of_shards(tmp_path, seed):
    rng = random.Random(seed)
    model = ShardModel(tmp_path/'d')
    for _ in range(8): model.step(rng)
    model.check()
    tars = {p.name:p.read_bytes() for p in (tmp_path/'d').glob('*.tar')}
    assert len(model.store.shards)==len(tars)   # a shard without samples is removed
    assert len(set(model.store.keys(range(len(model.store)))))==len(model.store)
    model.store.copy(tmp_path/'copy', **one)
    assert rows(ShardStore(tmp_path/'copy'))==rows(model.store)
    to_shards(samples(0, 5), tmp_path/'d', overwrite=True, **one)
    assert len(ShardStore(tmp_path/'d'))==5 and len(list((tmp_path/'d').glob('*.fastai_remote')))==1
    ShardStore.delete(tmp_path/'d')
    assert not (tmp_path/'d').exists()

def test_shards_are_not_written_again(tmp_path):
    to_shards({'train':samples(0, 20), 'valid':samples(20, 30)}, tmp_path/'d', maxcount=6, **one)
    before = {p.name:(p.stat().st_mtime_ns,p.stat().st_ino) for p in (tmp_path/'d').glob('*.tar')}
    store = ShardStore(tmp_path/'d').append({'valid':samples(30, 35), 'test':samples(35, 37)}, **one)
    store = store.edit(drop=[2], set={'cls':{7:'b'}}).add_fields({'y.f4':[.5]*36}).drop_fields('txt')
    after = {p.name:(p.stat().st_mtime_ns,p.stat().st_ino) for p in (tmp_path/'d').glob('*.tar')}
    assert before.items()<=after.items() and store.splits=={'train':[0,19], 'valid':[19,34], 'test':[34,36]} and verified(store)
    ids = {split:sorted(store.get_many(range(*span), 'id.i4')['id.i4'].tolist()) for split,span in store.splits.items()}
    assert len(ids['train'])==19 and ids['valid']==list(range(20, 35)) and ids['test']==[35,36]
    import webdataset
    keys = [sample['__key__'] for sample in webdataset.WebDataset(sorted(map(str, (tmp_path/'d').glob('*.tar'))), shardshuffle=False)]
    assert len(keys)==37==len(set(keys))   # other tools see all samples of the shards

def test_changes_of_shards_that_make_no_sense(tmp_path):
    to_shards(samples(0, 20), tmp_path/'d', **one)
    store = ShardStore(tmp_path/'d')
    with pytest.raises(IngestError, match=r'sample \d+.*ZeroDivisionError'): store.add_fields(lambda o: {'y.npy':np.array(1//(o['id.i4']-3))}, **one)
    with pytest.raises(TypeError, match='text and numbers'): store.edit(set={'cls':{1:'a', 2:3}})
    with pytest.raises(ValueError, match="labels of 'cls' are such as 'a', and the new samples have numbers"): store.edit(set={'cls':{1:3}})
    with pytest.raises(IngestError, match=r'sample \d+: ZeroDivisionError'): store.add_fields(lambda o: {'y.i4':1//(o['id.i4']-3)}, num_workers=1)
    with pytest.raises(ValueError, match="there is a field 'cls' already"): store.add_fields({'cls':[1]*20}, num_workers=1)
    with pytest.raises(ValueError, match="without 'cls'"): store.append([{'txt':'a'}], **one)
    store = store.append(samples(20, 22), **one)
    with pytest.raises(StoreExists, match='appended before'): store.append(samples(20, 22), **one)
    other = ShardStore(tmp_path/'d').edit(drop=[1])
    for again in (lambda: store.edit(drop=[2]), lambda: store.append(samples(30, 31), **one), lambda: store.drop_fields('txt')):
        with pytest.raises(StoreNotFound, match='replaced since it was opened'): again()
    assert rows(ShardStore(tmp_path/'d'))==rows(other) and verified(other) and not ShardStore.unfinished(tmp_path/'d')

def test_shards_of_others_are_edited(tmp_path):
    import webdataset
    (tmp_path/'d').mkdir()
    for k in range(2):
        with webdataset.TarWriter(str(tmp_path/'d'/f'{k}.tar')) as tar:
            for i in range(5): tar.write({'__key__':f'k{5*k+i}', 'txt':f't{5*k+i}', 'cls':i%2})
    content = {p.name:p.read_bytes() for p in (tmp_path/'d').glob('*.tar')}
    index_shards(tmp_path/'d', num_workers=1, progress=False)
    store = ShardStore(tmp_path/'d').edit(drop=[0], set={'cls':{3:7}}).add_fields({'y.f4':np.arange(9)/2}, **one)
    assert [store.key(i) for i in range(9)]==[f'k{i}' for i in range(1, 10)] and store[2]['cls']==7 and store[4]['y.f4']==2. and verified(store)
    assert {p.name:p.read_bytes() for p in (tmp_path/'d').glob('*.tar')}==content and {p.name for p in (tmp_path/'d').iterdir()}=={'0.tar','1.tar','.fastai_remote'}
    with pytest.raises(TypeError, match='others wrote these shards: index_shards adds more'): store.append(samples(0, 2), **one)
    with webdataset.TarWriter(str(tmp_path/'d'/'2.tar')) as tar: tar.write({'__key__':'k10', 'txt':'t', 'cls':1})
    with pytest.raises(StoreExists, match='the dataset was edited; overwrite=True indexes all shards anew'): index_shards(tmp_path/'d', num_workers=1, progress=False)
    index_shards(tmp_path/'d', overwrite=True, num_workers=1, progress=False)
    assert len(ShardStore(tmp_path/'d'))==11
    ShardStore.delete(tmp_path/'d')
    assert {p.name for p in (tmp_path/'d').iterdir()}=={'0.tar','1.tar','2.tar'}

def test_values_that_samples_lacked(tmp_path):
    "An edit may give them to samples of shards of others; it counts these, and what is dropped"
    import webdataset
    (tmp_path/'d').mkdir()
    for k in range(2):
        with webdataset.TarWriter(str(tmp_path/'d'/f'{k}.tar')) as tar:
            for i in range(4): tar.write({'__key__':f'k{4*k+i}', 'txt':'t', **({'v.f4':b'1', 'cls':i//2, 'a.txt':'a'} if i%2 else {})})
    index_shards(tmp_path/'d', num_workers=1, progress=False)
    store = ShardStore(tmp_path/'d').edit(drop=[7], set={'v.f4':{0:2., 1:3., 2:2.}, 'a.txt':{4:'b', 5:'b'}})
    assert store.field_counts=={**store.field_counts, 'v.f4':5, 'a.txt':4, 'cls':3} and store.may_lack('v.f4')
    store = store.edit(set={'v.f4':{4:2., 6:2.}})
    assert store.field_counts['v.f4']==7 and not store.may_lack('v.f4') and store.get_many(range(7), 'v.f4')['v.f4'].tolist()==[2,3,2,1,2,1,2]
    counts = store.class_counts() if 'cls' in store.manifest.counts else None
    store = store.edit(drop=[4], set={'cls':{0:0, 1:1, 2:1}})
    assert store.get_many(range(6), 'cls?')['cls?']==[0,1,1,1,0,None] and store.field_counts['cls']==5 and verified(store)
    if counts is not None: assert store.class_counts()=={0:2, 1:3}

def test_a_killed_change_of_shards(tmp_path):
    "At each moment, readers see the version before or the one after, and the same call finishes it"
    def edited(folder): return ShardStore(folder).edit(drop=[1,5], set={'cls':{3:'z'}})
    def appended(folder): return ShardStore(folder).append(samples(30, 40), shuffle=False, chunk=5, **one)
    def rewritten(folder): return ShardStore(folder).edit(drop=[1], set={'txt':{3:'z'}})
    def widened(folder): return ShardStore(folder).add_fields(lambda o: {'up.txt':o['txt'].upper()}, chunk=8, **one)
    for do in (edited,appended,rewritten,widened):
        shutil.rmtree(tmp_path/'want', ignore_errors=True)
        to_shards(samples(0, 30), tmp_path/'want', shuffle=False, maxcount=7, **one)
        before,after = rows(ShardStore(tmp_path/'want')),rows(do(tmp_path/'want'))
        files = sorted(p.name for p in (tmp_path/'want').iterdir())
        for k in range(0, 400, 6):
            shutil.rmtree(tmp_path/'d', ignore_errors=True)
            to_shards(samples(0, 30), tmp_path/'d', shuffle=False, maxcount=7, **one)
            died = dies_at_write(k, lambda: do(tmp_path/'d'))
            seen = rows(ShardStore(tmp_path/'d'))
            assert seen in (before,after), k
            if not died: break
            if seen==before: do(tmp_path/'d')
            assert rows(ShardStore(tmp_path/'d'))==after and verified(ShardStore(tmp_path/'d')), k
            if seen==before: assert [f for f in sorted(p.name for p in (tmp_path/'d').iterdir()) if not re.search(r'-\d{7}\.tar', f)]==files or do is appended, k
        assert k>5 and seen==after

def dies_at_write(k, f):
    "Run `f` in a fork that dies before it writes its `k`-th file; did it die?"
    if (pid:=os.fork())==0:
        from fastai_remote.store.storage import Storage
        left = [k]
        def counted(method):
            def call(self, *args, **kwargs):
                if not left[0]: os._exit(9)
                left[0] -= 1
                return method(self, *args, **kwargs)
            return call
        for name in ('write','create','remove'): setattr(Storage, name, counted(getattr(Storage, name)))
        try: f()
        finally: os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])==9

def test_loaders_of_edited_shards(tmp_path):
    to_shards({'train':[{'png':png(i), 'cls':'ab'[i%2]} for i in range(24)], 'valid':[{'png':png(i), 'cls':'ab'[i%2]} for i in range(24, 32)]}, tmp_path/'d', maxcount=5, **one)
    store = ShardStore(tmp_path/'d').append({'train':[{'png':png(i), 'cls':'ac'[i%2]} for i in range(40, 48)]}, **one).edit(drop=[0,30], set={'cls':{5:'c'}})
    dls = DataLoaders.from_store(store, bs=5, num_workers=0)
    want = sorted((row['png'].getpixel((0,0))[0], store.vocab.index(row['cls'])) for row in store[slice(*store.splits['train'])])
    got = sorted((round(float(x[0,0,0])*255),int(y)) for xb,yb in dls.train.new(drop_last=False) for x,y in zip(xb,yb))
    assert got==want and len(dls.vocab)==3

# --- appending

def test_each_sample_goes_to_its_split(server):
    to_redis({'train':samples(0, 10), 'valid':samples(10, 14)}, server.url, 's', **one)
    store = RedisStore(server.url, 's')
    store = store.append({'valid':samples(20, 23), 'train':samples(30, 35)}, **one)
    store = store.append({'test':samples(40, 42), 'train':samples(50, 51)}, **one)
    ids = {split:sorted(store.get_many(range(*span), 'id.i4')['id.i4'].tolist()) for split,span in store.splits.items()}
    assert ids=={'train':[*range(10), *range(30, 35), 50], 'valid':[*range(10, 14), 20,21,22], 'test':[40,41]}
    assert store.splits=={'train':[0,16], 'valid':[16,23], 'test':[23,25]} and verified(store)
    with pytest.raises(ValueError, match="has the splits train, valid, test.*{'train': source} names one"): store.append(samples(60, 62), **one)
    plain = put(server.url, name='p')
    with pytest.raises(ValueError, match='has no splits, and the new samples have some'): plain.append({'train':samples(1, 2)}, **one)

def test_what_is_there_is_not_written_again(server):
    store = put(server.url, 200, name='big')
    before = client(server).info('stats')['total_net_input_bytes']
    store.append(samples(200, 201), **one)
    RedisStore(server.url, 'big').edit(drop=[3], set={'cls':{5:'z'}})
    took = client(server).info('stats')['total_net_input_bytes']-before
    client(server).flushdb()
    before = client(server).info('stats')['total_net_input_bytes']
    put(server.url, 200, name='big')
    assert took<.7*(client(server).info('stats')['total_net_input_bytes']-before)

@pytest.mark.parametrize('source,match', [([{'txt':'a'}], r"without 'cls', 'id.i4', 'tags.labels', 'x.npy'\. fn= can leave out"),
    ([{**sample(1), 'more':1}], "also 'more'"), ([{**sample(1), 'cls':3}], "labels of 'cls' are such as 'a', and the new samples have numbers")])
def test_samples_that_do_not_fit(server, source, match):
    store = put(server.url, name='f', overwrite=True)
    with pytest.raises(ValueError, match=match): store.append(source, **one)
    assert RedisStore(server.url, 'f').manifest.uid==store.manifest.uid and not RedisStore.unfinished(server.url)

def test_a_source_is_appended_once(server):
    "Its call may have been repeated, because the process was killed just after the commit"
    store = put(server.url, name='o').append(samples(30, 34), **one)
    with pytest.raises(StoreExists, match='these samples were appended before.*again=True'): store.append(samples(30, 34), **one)
    assert len(store.append(samples(30, 34), again=True, **one))==38

def test_other_samples_were_not_appended_before(server, tmp_path):
    "Only a source whose data are known to be the same is refused"
    def read(day): yield from ({'png':Image.new('L', (2,2), day), 'txt':f'{day} {i}'} for i in range(5))
    class Dataset:
        def __init__(self, day): self.rows = list(read(day))
        def __len__(self): return 5
        def __getitem__(self, i): return self.rows[i]
    to_redis(read(0), server.url, 'days', **one)
    store = RedisStore(server.url, 'days')
    for kind in (read, lambda day: list(read(day)), Dataset):
        for day in (1,2,2): store = store.append(kind(day), **one)
    assert len(store)==50
    for day in 'ab':
        (tmp_path/day).mkdir()
        Image.new('L', (2,2), ord(day)).save(tmp_path/day/'0.png')
        store = store.append(image_samples(tmp_path/day), lambda o: {**o, 'txt':'file'}, **one)
        with pytest.raises(StoreExists, match='appended before'): store.append(image_samples(tmp_path/day), lambda o: {**o, 'txt':'file'}, **one)
    assert [png[-1] for png in np.array(store.get_many([50,51], 'png', decode=True)['png'])[:,0]]==[97,98]

@pytest.mark.parametrize('change', [{'txt':'b'}, {'cls':'c'}, {'x.npy':np.zeros(3)}, {'x.npy':np.full((1,3), 7)}, {'id.i4':8}])
def test_lists_are_recognised_by_all_of_their_items(server, change):
    rows = samples(0, 300)
    store = put(server.url, 1, name='all', overwrite=True).append(rows, **one)
    rows[7] = {**rows[7], **change}
    store = store.append(rows, **one)
    with pytest.raises(StoreExists, match='appended before'): store.append([dict(row) for row in rows], **one)
    assert len(store)==601

def test_codes_of_a_source_with_classes_are_translated(server):
    store = to_redis([('x','a'),('y','b')], server.url, 'c', lambda o: {'txt':o[0], 'cls':o[1]}, shuffle=False, **one) and RedisStore(server.url, 'c')
    class Source:
        "A dataset with codes and names of classes, in an order of its own"
        classes = ['owl','b','a']
        def __len__(self): return 3
        def __getitem__(self, i): return f't{i}',i
    store = store.append(Source(), lambda o: {'txt':o[0], 'cls':o[1]}, shuffle=False, **one)
    assert [row['cls'] for row in store]==['a','b','owl','b','a'] and store.vocab==['a','b','owl']

@pytest.mark.parametrize('place', ['redis','shards'])
def test_more_classes_than_fit_a_byte(server, tmp_path, place):
    before,more = [{'cls':f'c{i:03}'} for i in range(200)],[{'cls':f'd{i:03}'} for i in range(200)]
    store = put_in(place, before, server, tmp_path).append(more, shuffle=False, **one)
    assert [row['cls'] for row in store]==[row['cls'] for row in before+more] and verified(store)
    assert store.manifest.fields['cls']['dtype']=='u2' and store.get_many(range(400), 'cls', check=True)['cls'].tolist()==list(range(400))

@pytest.mark.parametrize('labels,more', [([3,1,2],[7,1]), ([10**9,5],[-3])])
def test_labels_that_are_numbers(server, labels, more):
    to_redis([{'cls':label} for label in labels], server.url, 'n', overwrite=True, shuffle=False, **one)
    store = RedisStore(server.url, 'n').append([{'cls':label} for label in more], shuffle=False, **one)
    assert [row['cls'] for row in store]==labels+more and store.vocab==sorted(labels)+[label for label in more if label not in labels]

def put_in(place, source, server, tmp_path, name='in'):
    "A new dataset in Redis or in shards"
    if place=='redis': return to_redis(source, server.url, name, overwrite=True, shuffle=False, **one) and RedisStore(server.url, name)
    return to_shards(source, tmp_path/name, shuffle=False, **one) and ShardStore(tmp_path/name)

@pytest.fixture(params=['redis','shards'])
def integers(request, server, tmp_path, monkeypatch):
    "A function that writes integer labels, of which at most 100 can be classes"
    for module in ('write.redis','write.shard_totals','ingest.revise'): monkeypatch.setattr(f'fastai_remote.{module}.MAX_CLASSES', 100)
    yield lambda labels: put_in(request.param, [{'cls':i} for i in labels], server, tmp_path, 'many')
    client(server).flushdb()

@pytest.mark.parametrize('more', [[5,10**6], [70_000], [-3], range(1000, 1200)])
def test_numbers_that_are_no_labels(integers, more):
    "More than can be classes: they are stored as they are, and those that are appended, too"
    store = integers(range(0, 700, 5)).append([{'cls':i} for i in more], shuffle=False, **one)
    assert [row['cls'] for row in store[:]]==[*range(0, 700, 5), *more] and not store.vocab and verified(store)

def test_a_number_that_is_no_label_is_edited(integers):
    store = integers(range(140)).edit(set={'cls':{3:10**6}})
    assert [row['cls'] for row in store[:5]]==[0,1,2,10**6,4] and not store.vocab and verified(store)

@pytest.mark.parametrize('last', [139, -5, 70_000])
def test_numbers_that_are_no_labels_are_added(integers, last):
    added = [*range(139), last]
    store = integers([1,2]*70).add_fields({'n.cls':added}, num_workers=1)
    assert [row['n.cls'] for row in store[:]]==added and 'n.cls' not in store.manifest.vocab and verified(store)

def test_more_numbers_than_can_be_labels_are_not_appended_to_labels(integers):
    "They would be taken for codes of the labels that are there"
    store = integers([10,20,30])
    with pytest.raises(ValueError, match="many: 'cls' has 3 labels, and the new samples have more different integers"):
        store.append([{'cls':i} for i in range(101)], shuffle=False, **one)
    assert [row['cls'] for row in store.reopened()[:]]==[10,20,30]

def test_failures_of_all_parts_are_named(server):
    def fn(o):
        if o['id.i4']%5==3: raise ValueError('three')
        return o
    store = to_redis(samples(0, 20), server.url, 'fail', fn, **one) and RedisStore(server.url, 'fail')
    store = store.append(samples(20, 30), fn, **one)
    assert len(store)==24 and store.manifest.failed==6==len(list(store.failures())) and verified(store)
    with pytest.raises(IngestError): store.append(samples(30, 60), fn, max_failed=0, **one)
    assert len(RedisStore(server.url, 'fail'))==24
    RedisStore.abandon(server.url, 'fail')
    assert verified(RedisStore(server.url, 'fail'))

# --- editing and fields

def test_an_edit_that_makes_no_sense(server):
    store = put(server.url, name='e')
    with pytest.raises(IndexError, match='no sample 30'): store.edit(drop=[30])
    with pytest.raises(IndexError, match='no sample -1'): store.edit(set={'cls':{-1:'a'}})
    with pytest.raises(UnknownField, match="no field 'klass'"): store.edit(set={'klass':{1:'a'}})
    with pytest.raises(ValueError, match='sample 2 is to be removed and changed'): store.edit(drop=[2], set={'cls':{2:'a'}})
    with pytest.raises(ValueError, match='no sample would be left'): store.edit(drop=range(30))
    with pytest.raises(ValueError, match='no field would be left'): store.drop_fields(*store.fields)
    with pytest.raises(UnknownField, match="no field 'nothing'"): store.drop_fields('nothing')
    with pytest.raises(ValueError, match="there is a field 'cls' already"): store.add_fields(lambda o: {'cls':1}, **one)
    with pytest.raises(ValueError, match="'y.f4' has 3 values, for 30 samples"): store.add_fields({'y.f4':np.zeros(3)})
    with pytest.raises(TypeError, match='want a function'): store.add_fields('y')
    with pytest.raises(IngestError, match='zero'): store.add_fields(lambda o: 1/0, **one)
    with pytest.raises(Exception, match='bool|number|label'): store.edit(set={'id.i4':{1:'text'}})
    assert store.edit() is store is store.drop_fields() is drop_fields(store, [])
    assert verified(RedisStore(server.url, 'e')) and store[0]

@pytest.mark.parametrize('change', [dict(drop=[3]), dict(set={'txt':{3:'new'}}), dict(set={'cls':{3:'b'}})], ids=str)
def test_a_sample_whose_value_is_missing_can_be_dropped_and_replaced(server, change):
    name = f'lost {len(str(change))}'
    store = put(server.url, 9, name=name)
    client(server).delete(f'{name}:txt:3')
    assert store.verify(num_workers=1).bad==1
    edited = store.edit(**change)
    assert edited.verify(num_workers=1).bad==(1 if 'cls' in change.get('set', {}) else 0) and edited[2]['txt']=='sample 2'

def test_a_change_counts_although_its_lock_could_not_be_released(server, monkeypatch):
    "The lock ends by itself; and an error of the change is not replaced by that of the lock"
    def away(self): raise StoreUnavailable('away')
    store = put(server.url, 9, name='away')
    close = RedisLock.close
    monkeypatch.setattr(RedisLock, 'close', lambda self: (close(self), away(self)))
    assert len(store.edit(drop=[1]))==8
    with pytest.raises(StoreExists, match='is there already'): put(server.url, 9, name='away')
    with pytest.raises(StoreNotFound, match='no unfinished ingest'): RedisStore.abandon(server.url, 'away')
    RedisStore(server.url, 'away').rename('away 2')
    RedisStore.delete(server.url, 'away 2')
    assert 'away 2' not in RedisStore.names(server.url)

def test_a_change_that_failed_leaves_nothing(server):
    "Each sample needs a value, so the same call could not go on; another one is not in the way of it"
    store = put(server.url, 100, name='left')
    there = keys(server)
    def fails(o): return {'y.i4':1 if o['txt']!='sample 5' else 1/0}
    with pytest.raises(IngestError, match=r'left: each sample needs a value, so nothing has changed:\n  sample 5: ZeroDivisionError'): store.add_fields(fails, **one)
    with pytest.raises(IngestError, match='each sample needs a value'): store.edit(set={'id.i4':{1:3, 2:10**12}})
    assert keys(server)==there and not RedisStore.unfinished(server.url)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_failed'"): store.add_fields(fails, max_failed=3, **one)
    assert store.edit(set={'txt':{0:'new'}})[0]['txt']=='new'

@pytest.mark.parametrize('in_shards', [False,True])
def test_a_change_that_was_killed_is_in_the_way_of_others(server, tmp_path, in_shards):
    "The message names the call that drops it: an edit has no overwrite="
    def killed(o): raise KeyboardInterrupt
    if in_shards: to_shards(samples(0, 9), tmp_path/'d', **one)
    store = ShardStore(tmp_path/'d') if in_shards else put(server.url, name='way')
    with pytest.raises(KeyboardInterrupt): store.append(samples(30, 200), fn=lambda o: o if o['id.i4']<190 else killed(o), shuffle=False, chunk=50, **one)
    for change in (lambda: store.edit(set={'txt':{0:'new'}}), lambda: store.add_fields({'y.txt':['a']*len(store)}), lambda: store.append([sample(1)], **one)):
        with pytest.raises(StoreExists, match=r'unfinished ingest.*Store\.abandon\(') as e: change()
        assert 'overwrite' not in str(e.value)
    (ShardStore.abandon(tmp_path/'d') if in_shards else RedisStore.abandon(server.url, 'way'))
    assert store.edit(set={'txt':{0:'new'}})[0]['txt']=='new'

@pytest.mark.parametrize('in_shards', [False,True])
def test_columns_are_added_by_position(server, tmp_path, in_shards):
    "Whatever labels a column has; what has no position, and options that a column does not have, are errors"
    rows = [{'txt':o} for o in 'abc']
    if in_shards: to_shards(rows, tmp_path/'d', shuffle=False, **one)
    else: to_redis(rows, server.url, 'pos', shuffle=False, overwrite=True, **one)
    def opened(): return ShardStore(tmp_path/'d') if in_shards else RedisStore(server.url, 'pos')
    columns = (pd.Series([1,2,3], index=[2,0,1]), pd.Series([1,2,3], index=list('cab')), pd.Index([1,2,3]), pd.Categorical([1,2,3]), pd.array([1,2,3], dtype='Int32'), pl.Series([1,2,3]),
               (1,2,3), range(1,4), np.ma.array([1,2,3]))
    store = opened().add_fields({f'n{k}.i4':values for k,values in enumerate(columns)} | {'up.txt':pd.Series(list('ABC'), index=[2,1,0])}, **one)
    for i in range(3): assert {v for f,v in store[i].items() if f[0]=='n'}=={i+1} and store[i]['up.txt']=='ABC'[i]
    for values in 'abc',{0:1, 1:2, 2:3},{1,2,3},5,(o for o in 'abc'),pd.DataFrame({0:[1,2,3]}):
        with pytest.raises(TypeError, match="'x.json': want a list or an array with a value for each sample, not of type"): store.add_fields({'x.json':values}, **one)
    with pytest.raises(TypeError, match='fields= names what a function gets of each sample'): store.add_fields({'x.i4':[1,2,3]}, fields=['txt'], **one)
    with pytest.raises(IngestError, match='a sample without fields'): store.add_fields(lambda o: {}, **one)
    with pytest.raises(IngestError, match='sample 1.*masked'): store.add_fields({'x.i4':np.ma.array([1,2,3], mask=[0,1,0])}, **one)

def test_memory_of_what_is_dropped_is_freed(server):
    to_redis([{'x.bin':bytes([i])*10_000} for i in range(100)], server.url, 'free', shuffle=False, **one)
    store = RedisStore(server.url, 'free')
    there = len(keys(server))
    store = store.edit(drop=range(10, 60))
    assert len(keys(server))==there-50+1 and len(store)==50 and verified(store)   # one more: the table of runs
    store = store.add_fields({'y.bin':[b'']*50}, **one)
    store = store.drop_fields('x.bin')
    assert not [key for key in keys(server) if ':x.bin:' in key] and verified(store)

def test_a_killed_edit_changes_all_or_nothing(fresh):
    "Wherever the process dies, readers see the old or the new version, and the same call continues"
    def edited():
        store = RedisStore(fresh.url, 'd')
        return store.edit(drop=[1,5], set={'cls':{3:'z'}, 'txt':{4:'new'}})
    def appended(): return RedisStore(fresh.url, 'd').append(samples(30, 40), shuffle=False, chunk=5, **one)
    for do in (edited,appended):
        client(fresh).flushall()
        before = rows(put(fresh.url))
        after = rows(do())
        for k in range(0, 300, 7):
            client(fresh).flushall()
            put(fresh.url)
            died = dies_at(k, do)
            seen = rows(RedisStore(fresh.url, 'd'))
            assert seen in (before,after), k
            if not died: break
            if seen==before: do()
            store = RedisStore(fresh.url, 'd')
            assert rows(store)==after and verified(store), k
            RedisStore.delete(fresh.url, 'd')
            assert not keys(fresh), k
        assert k>20 and seen==after

def test_values_that_an_edit_does_not_change_stay_byte_for_byte(server):
    "Also of a sample of which another field changes"
    def noise(i):
        Image.fromarray(np.random.default_rng(i).integers(0, 255, (9,9,3)).astype(np.uint8)).save(b:=io.BytesIO(), 'JPEG', quality=60)
        return b.getvalue()
    def row(i): return {'jpg':noise(i), 'cls':'ab'[i%2], 'x.npy':np.full(3, i), 'tags.labels':['t'], 'meta.json':{'i':i}, 'f.f4':.1*i}
    to_redis([row(i) for i in range(6)], server.url, 'bytes', shuffle=False, **one)
    before = RedisStore(server.url, 'bytes')
    stored = before.get_many(range(6), before.fields)
    store = before.edit(set={'jpg':{2:noise(99)}, 'cls':{1:'b', 3:'c'}, 'x.npy':{5:np.zeros(2)}, 'f.f4':{4:.3}, 'meta.json':{0:[]}, 'tags.labels':{1:['t']}})
    changed = dict(jpg=[2], cls=[3], **{'x.npy':[5], 'f.f4':[4], 'meta.json':[0]})
    after = store.get_many(range(6), store.fields, check=True)
    for field in store.fields:
        assert [i for i in range(6) if after[field][i]!=stored[field][i]]==changed.get(field, []), field
    assert after['jpg'][2]==noise(99)

@pytest.mark.parametrize('in_shards', [False,True])
def test_statistics_of_images_are_those_of_all(server, tmp_path, in_shards):
    "Up to rounding, also where grey images are appended to coloured ones"
    def row(i):
        pixels = np.random.default_rng(i).integers(0, 50+i*6, (6+i,9,3)).astype(np.uint8)
        return {'png':Image.fromarray(pixels if i<20 else pixels[...,0])}
    def written(rows, name):
        if in_shards: to_shards(rows, tmp_path/name, shuffle=False, chunk=8, **one)
        else: to_redis(rows, server.url, name, shuffle=False, overwrite=True, chunk=8, **one)
        return ShardStore(tmp_path/name) if in_shards else RedisStore(server.url, name)
    rows = [row(i) for i in range(30)]
    store = written(rows[:12], 'grown').append(rows[12:], chunk=8, **one)
    want,found = written(rows, 'whole').image_stats(),store.image_stats()
    assert {k:want[k] for k in ('n','width','height')}=={k:found[k] for k in ('n','width','height')}
    for k in ('mean','std','grey'): assert np.abs(np.subtract(want[k], found[k])).max()<1e-4
    difference = np.asarray(store.mean_image(), int)-np.asarray(written(rows, 'again').mean_image(), int)
    assert np.abs(difference).max()<=1

@pytest.mark.parametrize('in_shards', [False,True])
def test_statistics_of_images_that_an_edit_changed(server, tmp_path, in_shards):
    "They would be those of the images before; an edit of labels, and an appended part, leave what is true"
    def row(value, label='a'): return {'png':Image.new('RGB', (8,8), (value,)*3), 'cls':label}
    if in_shards: to_shards([row(10)]*6, tmp_path/'d', **one)
    else: to_redis([row(10)]*6, server.url, 'st', **one)
    def opened(): return ShardStore(tmp_path/'d') if in_shards else RedisStore(server.url, 'st')
    store = opened().edit(set={'cls':{1:'b'}})
    assert store.stats==([.03922]*3, [0.]*3)
    store = store.append([{'cls':'b', 'png':Image.new('RGB', (8,8), (20,)*3)}]*6, **one)
    assert np.allclose(store.stats[0], 15/255, atol=1e-4)
    for change in (dict(drop=[3]), dict(set={'png':{0:Image.new('RGB', (8,8))}})):
        store = opened().edit(**change)
        assert not store.manifest.stats
        for wanted in (lambda: store.stats, store.mean_image, lambda: DataLoaders.from_store(store, normalize=True, num_workers=0)):
            with pytest.raises(ValueError, match=r'no statistics.*an edit that changes or drops images.*store\.copy'): wanted()
    store = store.append([row(200)]*3, **one)
    assert not store.manifest.stats   # not those of the last three only
    if in_shards: store.copy(tmp_path/'copy', **one)
    else: store.copy(server.url, 'copy', **one)
    assert (ShardStore(tmp_path/'copy') if in_shards else RedisStore(server.url, 'copy')).image_stats()['n']==len(store)==14

def test_statistics_of_a_part_are_those_of_the_same_field(server):
    def row(*names): return {name:Image.new('L', (4,4), 50 if name=='a.png' else 100) for name in names}
    to_redis([row('a.png', 'b.png')]*4, server.url, 'of_two', **one)
    store = RedisStore(server.url, 'of_two').append([row('b.png', 'a.png')]*4, **one)
    assert store.manifest.stats.keys()=={'a.png'} and store.stats[0]==[.19608] and store.image_stats()['n']==8

def test_rename_and_overwrite(server):
    store = put(server.url, name='first').append(samples(30, 34), **one).edit(drop=[0])
    want = rows(store)
    store = store.rename('second')
    put(server.url, 5, name='first')   # a new dataset of the old name
    assert rows(RedisStore(server.url, 'second'))==want and verified(RedisStore(server.url, 'second'))
    put(server.url, 3, name='second', overwrite=True)
    assert len(RedisStore(server.url, 'second'))==3
    for name in ('first','second'): RedisStore.delete(server.url, name)
    assert not [key for key in keys(server) if key.startswith(('first','second'))]

def test_two_who_edit(server):
    "The second one learns that the dataset is another one now"
    store = put(server.url, name='two')
    store.edit(drop=[1])
    for again in (lambda: store.edit(drop=[2]), lambda: store.append(samples(30, 31), **one), lambda: store.drop_fields('txt')):
        with pytest.raises(StoreNotFound, match='replaced since it was opened'): again()
    assert len(RedisStore(server.url, 'two'))==29

def test_damage_is_noticed(server):
    store = put(server.url, name='dam').edit(drop=[4]).append(samples(30, 34), **one)
    c,key = client(server),store.manifest.runs['key']
    stored = c.get(key)
    c.setrange(key, 9, b'\x01')
    with pytest.raises(CorruptSample, match=f'{key}.*damaged'): RedisStore(server.url, 'dam')[0]
    assert RedisStore(server.url, 'dam').verify(num_workers=1).bad
    c.delete(key)
    with pytest.raises(CorruptSample, match='is gone'): RedisStore(server.url, 'dam')[0]
    manifest = store.manifest
    for place,value in ((0, 1), (8*manifest.runs['lengths'][0], 9)):   # other runs, with the right checksum: where one begins; a part
        wrong = bytearray(stored)
        wrong[place] = value
        c.set(key, bytes(wrong))
        other = replace(manifest, runs={**manifest.runs, 'crc':zlib.crc32(wrong)})
        with pytest.raises(CorruptSample, match=f'{key}.*damaged'): read_run_tables(store.link, other)
    c.set(key, stored)
    assert verified(RedisStore(server.url, 'dam'))
    numbers = c.get('dam:id.i4#0')
    c.setrange('dam:id.i4#0', 8*10+3, b'\xff')   # sample 10, which is number 9 now
    with pytest.raises(CorruptSample, match=r'sample 9, field .id.i4.*key dam:id.i4#0 at byte 80'): RedisStore(server.url, 'dam').get_many(range(20), 'id.i4', check=True)
    c.set('dam:id.i4#0', numbers)
    last = store.manifest.parts[-1]['prefix']
    c.set(f'{last}:txt:0', b'other')
    with pytest.raises(CorruptSample, match=f'sample 29, field .txt.*key {last}:txt:0'): RedisStore(server.url, 'dam').get_many([29], 'txt', check=True)

def test_an_earlier_version_refuses_it(server):
    store = put(server.url, name='fmt').edit(drop=[4])
    assert store.manifest.format==4
    class Earlier(Manifest): newest_format = 3
    with pytest.raises(UnsupportedFormat, match='format 4; this version reads up to 3'): Earlier.from_json(client(server).get('fmt:meta'))
    for entry in ({'parts':[{'prefix':'x'}]}, {'runs':{}}, {'runs':{'key':'k', 'lengths':[1], 'crc':1, 'columns':{}}}):
        content = {**json.loads(client(server).get('fmt:meta')), **entry}
        content.pop('crc')
        with pytest.raises(UnsupportedFormat, match='part|runs'): Manifest.from_json(seal(content))

def test_kinds_of_stores_that_cannot_be_changed(server, tmp_path):
    store = put(server.url, name='k')
    to_shards(store, tmp_path/'s', **one)
    shards = ShardStore(tmp_path/'s')
    changed = store.edit(drop=[1])
    with pytest.raises(ValueError, match='appended to or edited; copy it'): TieredStore(changed, shards)
    client(server).set('a:0', b'x')
    keys_store = RedisStore.from_keys(server.url, 'a:{}', n=1, codec='txt')
    with pytest.raises(TypeError, match='a RedisKeys cannot be changed'): keys_store.add_fields({'y.u1':[1]}, **one)

# --- training

def png(i):
    Image.fromarray(np.full((8,8,3), i, np.uint8)).save(b:=io.BytesIO(), 'PNG')
    return b.getvalue()

@pytest.mark.parametrize('num_workers', [0,2])
def test_loaders_of_an_edited_dataset(server, num_workers):
    name = f'dls{num_workers}'
    to_redis({'train':[{'png':png(i), 'cls':'ab'[i%2]} for i in range(24)], 'valid':[{'png':png(i), 'cls':'ab'[i%2]} for i in range(24, 32)]}, server.url, name, **one)
    store = RedisStore(server.url, name).append({'train':[{'png':png(i), 'cls':'ac'[i%2]} for i in range(40, 48)]}, **one)
    store = store.edit(drop=[0,30], set={'cls':{5:'c'}})
    dls = DataLoaders.from_store(store, bs=5, num_workers=num_workers)
    train = store[slice(*store.splits['train'])]
    want = sorted((row['png'].getpixel((0,0))[0], store.vocab.index(row['cls'])) for row in train)
    xs,ys = zip(*((x.cpu(),y.cpu()) for x,y in dls.train.new(shuffle=False, drop_last=False)))
    got = sorted((round(float(x[0,0,0])*255),int(y)) for xb,yb in zip(xs,ys) for x,y in zip(xb,yb))
    assert got==want and len(dls.vocab)==3
    assert sum(len(y) for _,y in dls.valid)==8

# --- files that were written once, and must stay readable

DATA = Path(__file__).parent/'data'

def golden_rows():
    "What is in `redis-v4.json` and `shards-v3`, before the changes: 18 samples, 4 appended, without 1 and 17 of these"
    rows = [{**sample(i, 'new' if i>=18 else None), 'y.f4':k/2} for k,i in enumerate([0, *range(2, 12), *range(18, 22), 12, *range(14, 18)])]
    for row in rows: del row['x.npy']
    return rows

def loaded(server, file):
    "Puts the keys in a file of `tests/data` into a server"
    decode = base64.b64decode
    for key,(kind,value) in json.loads((DATA/file).read_text()).items():
        if kind=='string': client(server).set(key, decode(value))
        elif kind=='set': client(server).sadd(key, *map(decode, value))
        else: client(server).hset(key, mapping={decode(name):decode(o) for name,o in value.items()})

def test_an_edited_dataset_of_this_version_stays_readable(fresh):
    loaded(fresh, 'redis-v4.json')
    store = RedisStore(fresh.url, 'd')
    rows = expected(store[:])
    assert store.manifest.format==4 and store.splits=={'train':[0,15], 'valid':[15,20]} and verified(store)
    want = golden_rows()
    want[2]['cls'],want[3]['txt'] = 'z','changed'
    assert rows==want and store.vocab==['a','b','c','new','z']
    assert len(store.append({'train':[{**row, 'y.f4':0.} for row in want[:2]]}, **one))==22

def test_edited_shards_of_this_version_stay_readable(tmp_path):
    shutil.copytree(DATA/'shards-v3', tmp_path/'d')
    store = ShardStore(tmp_path/'d')
    want = golden_rows()
    want[2]['cls'],want[3]['id.i4'] = 'z',400
    assert expected(store[:])==want and store.splits=={'train':[0,15], 'valid':[15,20]} and verified(store)
    assert len(store.append({'train':want[:2]}, **one))==22

def test_vocabularies_are_joined_in_time_that_grows_with_their_length():
    "A set is made once, not once for each label: 50,000 labels would take minutes"
    from fastai_remote.write.revision import joined_vocab
    known,labels = list(range(0, 50_000)),list(range(49_990, 100_000))
    assert joined_vocab(known, labels)==list(range(100_000))

@pytest.fixture(params=['redis','shards'])
def opened_30(request, tmp_path):
    "A dataset of 30 samples, in Redis or in several shards"
    if request.param=='redis': return put(request.getfixturevalue('server').url, name='thirty', overwrite=True)
    to_shards(samples(0, 30), tmp_path/'d', shuffle=False, chunk=5, **one)
    return ShardStore(tmp_path/'d')

@pytest.mark.parametrize('values', [{1:5}, {0:'ok', 1:5}])
def test_a_new_value_that_cannot_be_stored_is_named(opened_30, values):
    "Also if it is not the first one"
    with pytest.raises(IngestError, match='sample 1: .*TypeError|sample 1: .*int'): opened_30.edit(set={'txt':values})

@pytest.mark.parametrize('values', [{'id.i4':{1:'x'}}, {'id.i4':{1:None}}, {'id.i4':{0:1, 1:2**40}}, {'cls':{1:'a\ud800'}},
    {'n.cls':{1:None}}, {'n.cls':{1:2.5}}, {'n.cls':{1:2**63}}, {'n.cls':{1:[1]}}], ids=str)
def test_a_number_that_cannot_be_stored_is_named(opened_30, values):
    store = opened_30.add_fields({'n.cls':[i%3 for i in range(30)]}, num_workers=1)
    with pytest.raises(IngestError, match='sample 1: (TypeError|ValueError): ') as e: store.edit(set=values)
    if isinstance(store, ShardStore): assert str(e.value).startswith('d: each sample needs a value, so nothing has changed')
    assert rows(store.reopened())==rows(store)

def test_labels_of_numpy_are_labels_in_an_edit(opened_30):
    store = opened_30.add_fields({'n.cls':[i%3 for i in range(30)]}, num_workers=1)
    store = store.edit(set={'n.cls':{0:np.array(7), 1:np.int64(2)}, 'cls':{0:np.str_('new')}})
    assert store[0]['n.cls']==7 and store[1]['n.cls']==2 and store[0]['cls']=='new' and verified(store)
    assert store.manifest.vocab['n.cls']==[0,1,2,7] and store.manifest.counts['n.cls']==[9,9,11,1]

@pytest.mark.parametrize('change', [lambda s: s.edit(drop=5), lambda s: s.edit(drop=None), lambda s: s.edit(set=['txt']),
    lambda s: s.edit(set={'txt':['a']*30}), lambda s: s.append([sample(1)], vocab=['a']), lambda s: s.append([sample(1)], splits={'a':1}),
    lambda s: s.append([sample(1)], overwrite=True)])
def test_arguments_of_another_form_are_refused(opened_30, change):
    with pytest.raises(TypeError, match='^(d|thirty): (sample numbers must|set= is|append takes no)'): change(opened_30)
    assert len(opened_30.reopened())==30

@pytest.mark.parametrize('one,other', [(np.zeros((3,4), 'i4'), np.zeros((3,4), 'f4')), (np.zeros((3,4)), np.zeros((3,2,2))),
    (np.array(['a','b','c'], object), np.array(['a','b','d'], object))], ids=['dtype','shape','objects'])
def test_arrays_are_told_apart_by_what_they_hold(one, other):
    "Where a call is resumed: by type and shape, too, and not by addresses"
    def fingerprint(values): return _Columns({'x':values}, 3).fingerprint()
    assert fingerprint(one)==fingerprint(one.copy())!=fingerprint(other)
    assert fingerprint(np.array([1,2,3], 'M8[s]')) and fingerprint(np.array(['x'+c for c in 'abc'], object))==fingerprint(np.array(['x'+c for c in 'abc'], object))

def test_one_value_is_no_column(opened_30):
    with pytest.raises(TypeError, match="'y.f4' is one value, for 30 samples"): opened_30.add_fields({'y.f4':np.array(5.)})

@pytest.mark.parametrize('last', [29, 0])
def test_a_failure_of_new_numbers_names_the_dataset(tmp_path, last):
    to_shards(samples(0, 30), tmp_path/'d', shuffle=False, chunk=5, **one)
    values = [None if i==last else i for i in range(30)]
    with pytest.raises(IngestError, match=f"^d: each sample needs a value, so nothing has changed:\n  sample {last}: TypeError: field 'y.i4' is None"):
        ShardStore(tmp_path/'d').add_fields({'y.i4':values}, num_workers=1)

def test_a_field_that_is_named_twice_is_dropped_once(server):
    store = put(server.url, 9, name='twice')
    other = put(server.url, 9, name='twice 2').drop_fields('txt', 'txt')
    assert store.drop_fields('txt').manifest.nbytes==other.manifest.nbytes>0

def test_no_field_to_add(opened_30):
    with pytest.raises(ValueError, match='there is no field to add'): opened_30.add_fields({})
    with pytest.raises(UnknownField, match="no field 'nope'"): opened_30.add_fields(lambda o: {'y.txt':'a'}, fields=['nope'], **one)

def test_a_number_is_no_code_where_labels_are_numbers(opened_30, tmp_path):
    "Not of the source either: 1 is not 7, the second of its labels"
    to_shards([{**sample(1), 'n.cls':label} for label in (3,7)], tmp_path/'more', **one)
    store = opened_30.add_fields({'n.cls':[3]*30}, num_workers=1)
    with pytest.raises(IngestError, match="label 1 is not in the vocab of 'n.cls'"):
        store.append(ShardStore(tmp_path/'more'), lambda o: {**o, 'n.cls':1}, **one)

def test_a_vocabulary_of_no_new_field_is_refused(opened_30):
    with pytest.raises(ValueError, match="vocab= names labels of 'z.cls', but the samples have no such field"):
        opened_30.add_fields({'y.cls':[0]*30}, vocab={'z.cls':['a','b']}, **one)
    assert opened_30.reopened().fields==opened_30.fields

def test_progress_of_new_numbers_is_shown(opened_30):
    totals = []
    def show(records, total, report):
        totals.append(total)
        yield from records
        assert report.written==30
    opened_30.add_fields({'y.i4':list(range(30))}, num_workers=1, progress=show)
    assert len(totals)==1 and totals[0]>0

def test_each_edited_sample_is_looked_at_once(tmp_path):
    "Not once for each shard"
    to_shards(samples(0, 30), tmp_path/'d', shuffle=False, chunk=1, **one)
    class Counted(int):
        compared = 0
        def __le__(self, other): Counted.compared += 1; return int(self)<=other
        def __ge__(self, other): Counted.compared += 1; return int(self)>=other
        def __sub__(self, other): Counted.compared += 1; return int(self)-other
    store = ShardStore(tmp_path/'d')
    reviser = store.reviser(Edit({'id.i4':{Counted(i):i+100 for i in range(30)}}, np.zeros(0, np.int64)))
    with reviser.revising() as manifest: reviser.edit(manifest)
    assert Counted.compared<=30
    assert [row['id.i4'] for row in rows(store.reopened())]==list(range(100, 130))

def test_lost_values_are_looked_for_among_the_gaps_nearby(monkeypatch):
    n,compared = 100_000,[]
    original = np.setdiff1d
    def setdiff1d(numbers, gaps, **kw):
        compared.append(len(gaps))
        return original(numbers, gaps, **kw)
    monkeypatch.setattr(np, 'setdiff1d', setdiff1d)
    monkeypatch.setattr(redis_lost, 'lost_samples', lambda link, layout, fields, numbers: numbers)
    gaps = np.arange(0, n, 3)
    lost = np.concatenate(list(redis_lost.lost_of_range(None, None, {}, n, gaps, step=1000)))
    assert lost.tolist()==[i for i in range(n) if i%3] and sum(compared)==len(gaps)

def test_a_store_that_has_not_read_where_samples_are_says_that_it_was_replaced(server):
    "The key of the runs is gone then, which is no damage: damaged samples could be replaced by others, `on_bad='replace'`"
    edited = put(server.url, name='not read').edit(drop=[1])
    before = RedisStore(server.url, 'not read')
    edited.edit(drop=[1])
    with pytest.raises(StoreNotFound, match='not read: replaced since it was opened'): before.get_many([0], 'txt')
    now = RedisStore(server.url, 'not read')
    now.link.client.delete(now.manifest.runs['key'])
    with pytest.raises(CorruptSample, match='runs#.* is gone'): now.get_many([0], 'txt')
    RedisStore.delete(server.url, 'not read')

def test_the_bytes_of_a_version_are_those_of_the_values_that_it_has(tmp_path):
    "Not those of values that were replaced or dropped, which stay in the shards or in an overlay"
    to_shards([{'txt':'a'*1000, 'cls':'ab'[i%2]} for i in range(4)], tmp_path/'d', maxcount=2, **one)
    store = ShardStore(tmp_path/'d')
    labels = store.manifest.nbytes-4000
    def text_bytes(): return store.manifest.nbytes-labels
    store = store.edit(set={'txt':{1:'b'*10, 2:'b'*20}})
    assert text_bytes()==2030
    store = store.edit(set={'txt':{1:'b'*5}})
    assert text_bytes()==2025
    store = store.add_fields(lambda o: {'more.txt':'c'*500}, **one)
    assert text_bytes()==4025
    store = store.drop_fields('more.txt')
    assert text_bytes()==2025
    store = store.edit(drop=[2])
    assert text_bytes()==2005
    store = store.edit(drop=[1], set={'txt':{0:'d'*100}})
    assert text_bytes()==1100 and verified(store)
    assert store.drop_fields('txt').manifest.nbytes==labels

def test_values_that_samples_lack_have_no_bytes(tmp_path):
    import webdataset
    (tmp_path/'d').mkdir()
    with webdataset.TarWriter(str(tmp_path/'d/a.tar')) as tar:
        for i in range(4): tar.write({'__key__':f'{i}', 'cls':0, **({'txt':'a'*100} if i%2 else {})})
    index_shards(tmp_path/'d', num_workers=1, progress=False)
    store = ShardStore(tmp_path/'d')
    labels = store.manifest.nbytes-200
    store = store.edit(set={'txt':{0:'b'*10, 1:'b'*10}})
    assert store.manifest.nbytes==labels+120
    store = store.edit(drop=[2,3])
    assert store.manifest.nbytes==labels+20

def test_a_field_of_a_lost_overlay_is_dropped(tmp_path):
    to_shards(samples(0, 6), tmp_path/'d', **one)
    store = ShardStore(tmp_path/'d').add_fields(lambda o: {'more.txt':'c'*500}, **one)
    folder, = (tmp_path/'d').glob('.overlay-*')
    shutil.rmtree(folder)
    store = ShardStore(tmp_path/'d')
    with pytest.raises(MissingSample): store[0]
    assert verified(store.edit(drop=[0]).drop_fields('more.txt'))
