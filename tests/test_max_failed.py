"An ingest that loses too much is not committed: what counts as too much, what is said, and how it goes on"
import re
from itertools import count

import numpy as np
import pytest
import redis

from fastai_remote import IngestError, RedisStore, ShardStore, StoreExists, StoreNotFound, index_shards, redis_server, to_redis, to_shards

@pytest.fixture(scope='module')
def server():
    with redis_server() as s: yield s

_names = count()

class Place:
    "One dataset, in Redis or in a folder"
    def __init__(self, where, server, tmp_path): self.where,self.url,self.name = where,server.url if where=='redis' else str(tmp_path/'d'),f'd{next(_names)}'
    def write(self, src, fn=None, **kw):
        kw = {'num_workers':1, 'progress':False, 'shuffle':False, **kw}
        return to_redis(src, self.url, self.name, fn, **kw) if self.where=='redis' else to_shards(src, self.url, fn, **kw)
    def open(self): return RedisStore(self.url, self.name) if self.where=='redis' else ShardStore(self.url)
    def unfinished(self): return RedisStore.unfinished(self.url) if self.where=='redis' else ShardStore.unfinished(self.url)
    def abandon(self): return RedisStore.abandon(self.url, self.name) if self.where=='redis' else ShardStore.abandon(self.url)

@pytest.fixture(params=['redis','shards'])
def place(request, server, tmp_path):
    if request.param=='redis': redis.Redis.from_url(server.url).flushall()
    return Place(request.param, server, tmp_path)

def ids(s): return sorted(s.get_many(range(len(s)), 'id')['id'].tolist())

class Fails:
    "A sample, or an error for each number in `bad`; counts its calls"
    def __init__(self, bad): self.bad,self.calls = set(bad),[]
    def __repr__(self): return f'Fails({sorted(self.bad)[:3]})'
    def __getstate__(self): return dict(bad=self.bad, calls=[])
    def __call__(self, i):
        self.calls.append(i)
        if i in self.bad: raise ValueError(f'no {i%3}')
        return {'id':i, 'txt':f'{i}'}
def fn_of(bad):
    f = Fails(bad)
    def fn(i): return f(i)
    fn.calls = f.calls
    return fn

@pytest.mark.parametrize('n, bad, max_failed, ok', [(100, 10, None, True), (100, 11, None, False), (2000, 20, None, True), (2000, 21, None, False), (100, 1, 0, False), (100, 0, 0, True), (100, 5, 5, True), (100, 6, 5, False),
    (100, 29, .29, True), (100, 30, .29, False), (100, 1, 1, True), (100, 2, 1, False), (100, 99, 1., True), (100, 1, 0., False), (100, 3, np.int64(3), True), (100, 7, np.float32(.07), True)])
@pytest.mark.parametrize('stream', [False,True], ids=['known','stream'])
def test_too_many_failures_are_not_committed(place, n, bad, max_failed, ok, stream):
    src = (i for i in range(n)) if stream else list(range(n))
    kw = {} if max_failed is None else dict(max_failed=max_failed)
    if ok:
        rep = place.write(src, fn_of(range(1, bad+1)), **kw)
        assert (rep.written,rep.failed)==(n-bad,bad) and ids(place.open())==[i for i in range(n) if not 1<=i<=bad]
    else:
        with pytest.raises(IngestError) as e: place.write(src, fn_of(range(1, bad+1)), **kw)
        assert 'max_failed' in str(e.value) and 'ValueError: no' in str(e.value) and 'item 1' in str(e.value)
        with pytest.raises(StoreNotFound): place.open()
        assert len(place.unfinished())==1

@pytest.mark.parametrize('num_workers', [1,2])
def test_same_call_with_a_higher_limit_continues(place, num_workers):
    "What is written is kept, failures that were counted stay counted, and nothing is visible before"
    src,bad = list(range(300)),range(0, 300, 3)
    fn = fn_of(bad)
    with pytest.raises(IngestError, match='max_failed'): place.write(src, fn, chunk=16, num_workers=num_workers)
    with pytest.raises(IngestError, match='max_failed'): place.write(src, fn, chunk=16, max_failed=.2, num_workers=num_workers)
    del fn.calls[:]
    rep = place.write(src, fn, chunk=16, max_failed=.4, num_workers=num_workers)
    assert (rep.written,rep.failed)==(200,100) and rep.resumed>0 and ids(place.open())==[i for i in src if i%3]
    if num_workers==1: assert len(fn.calls)<300
    assert len(list(place.open().failures()))==100

def test_limit_is_found_early(place):
    "Not after all samples, where their number is known; nor in the run after that"
    src,fn = list(range(4000)),fn_of(range(0, 4000, 2))
    with pytest.raises(IngestError, match='max_failed'): place.write(src, fn, chunk=100)
    assert len(fn.calls)<1000
    n = len(fn.calls)
    with pytest.raises(IngestError, match='max_failed'): place.write(src, fn, chunk=100)
    assert len(fn.calls)<=n+200

def test_stream_with_a_number_as_limit_stops_early(place):
    fn = fn_of(range(0, 4000, 2))
    with pytest.raises(IngestError, match='max_failed'): place.write((i for i in range(4000)), fn, chunk=100, max_failed=7)
    assert len(fn.calls)<1000

@pytest.mark.parametrize('first, resumed', [(None,200), (20,None)], ids=['at the end','early'])
def test_stream_continues_with_a_higher_limit(place, first, resumed):
    def src(): yield from range(300)
    fn = fn_of(range(0, 300, 3))
    with pytest.raises(IngestError, match='max_failed'): place.write(src(), fn, chunk=16, max_failed=first)
    rep = place.write(src(), fn, chunk=16, max_failed=100)
    assert (rep.written,rep.failed)==(200,100) and 0<rep.resumed==(resumed or rep.resumed) and ids(place.open())==[i for i in range(300) if i%3]

def test_message_says_what_and_how_to_go_on(place):
    with pytest.raises(IngestError) as e: place.write(list(range(100)), fn_of(range(20, 40)))
    s = str(e.value)
    failed,seen,n = map(int, re.search(r'(\d+) of (\d+) samples (?:\(of (\d+)\) )?could not', s).groups(default='100'))
    assert 10<failed<=20 and seen<=n==100 and '10 may' in s and 'higher max_failed' in s and 'abandon' in s and 'item 20: ValueError: no 2' in s
    place.abandon()
    assert place.unfinished()==[] and place.write(list(range(100)), fn_of([])).failed==0

def test_dataset_that_was_there_stays(place):
    place.write(list(range(50)), fn_of([]))
    with pytest.raises(IngestError, match='max_failed'): place.write(list(range(100)), fn_of(range(50)), overwrite=True)
    assert ids(place.open())==list(range(50))
    rep = place.write(list(range(100)), fn_of(range(50)), overwrite=True, max_failed=1.)
    assert (rep.written,rep.failed)==(50,50) and ids(place.open())==list(range(50,100))

def test_all_failed_is_said_as_before(place):
    with pytest.raises(IngestError, match='none of the 20 samples could be converted; item'): place.write(list(range(20)), _Spoiled(20 if place.where=='shards' else 1), chunk=20)
    with pytest.raises(StoreNotFound): place.open()
    assert place.unfinished()==[]

class _Spoiled:
    "Goes well when it is looked at beforehand, `n` times, and never again"
    def __init__(self, n): self.n,self.calls = n,0
    def __call__(self, i):
        self.calls += 1
        if self.calls>self.n: raise ValueError('later')
        return {'id':i}

@pytest.mark.parametrize('bad', [-1, 1.5, float('nan'), -.1, True, '5', [1]])
def test_limits_that_are_none(place, bad):
    with pytest.raises((ValueError,TypeError), match='max_failed'): place.write([{'id':1}], max_failed=bad)
    assert place.unfinished()==[]

def test_copies_have_a_limit(place, server, tmp_path):
    place.write(list(range(100)), fn_of([]))
    to = dict(url=str(tmp_path/'copy'), num_workers=1, progress=False)
    def fn(o):
        if o['id']<50: raise ValueError('no')
        return o
    with pytest.raises(IngestError, match=r'of 100\b.*max_failed'): place.open().map(fn, **to)
    assert place.open().map(fn, max_failed=50, **to).failed==50

def test_indexing_has_a_limit(tmp_path):
    import io, tarfile
    with tarfile.open(tmp_path/'a.tar', 'w') as t:
        for i in range(200):   # the first hundred decide that the field has numbers
            is_bad = i>=104 and i%4==0
            for ext,v in (('bin',b'abc'),('x.i4',b'none' if is_bad else b'%d' % i)):
                (m:=tarfile.TarInfo(f'{i:03}.{ext}')).size = len(v)
                t.addfile(m, io.BytesIO(v))
    kw = dict(num_workers=1, progress=False)
    with pytest.raises(IngestError, match='24 of 200 samples.*max_failed'): index_shards(tmp_path, **kw)
    with pytest.raises(StoreNotFound): ShardStore(tmp_path)
    rep = index_shards(tmp_path, max_failed=.125, **kw)
    assert (rep.written,rep.failed,len(ShardStore(tmp_path)))==(176,24,176)

def test_partitions_have_a_limit(server):
    name = f'd{next(_names)}'
    with RedisStore.writer(server.url, name, 0, fn_of(range(1, 100, 2)), chunk=16) as w:
        recs = list(w(range(100)))
        with pytest.raises(IngestError, match='50 of 100.*max_failed'): w.commit(recs)
        with pytest.raises(StoreNotFound): RedisStore(server.url, name)
        rep = w.commit(recs, max_failed=50)
    assert (rep.written,rep.failed)==(50,50) and ids(RedisStore(server.url, name))==list(range(0, 100, 2))
    with RedisStore.writer(server.url, f'{name}b', 0, fn_of(range(1, 100, 2)), chunk=16, max_failed=.5) as w: assert w.commit(list(w(range(100)))).failed==50
