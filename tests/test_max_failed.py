"An ingest in which too many samples fail is not committed: how many are too many, what is said, and how it goes on"
from functools import partial

import numpy as np
import pytest

from inputs import write_tar
from fastai_remote import (index_shards, IngestError, RedisStore, ShardStore, StoreNotFound, to_redis,
                           to_shards)
from fastai_remote.ingest.run import ingest
from fastai_remote.ingest.stores import changeable
from fastai_remote.write.base import MemoryWriter

OPTIONS = dict(num_workers=1, progress=False)

def fails_at(bad):
    "An `fn` that fails for the numbers in `bad`; the list `calls` has the numbers that it was called with"
    bad,calls = set(bad),[]
    def fn(i):
        calls.append(i)
        if i in bad: raise ValueError(f'no {i%3}')
        return {'id':i, 'txt':f'{i}'}
    fn.calls = calls
    return fn

def ids(store): return sorted(store.get_many(range(len(store)), 'id')['id'].tolist())

@pytest.fixture
def writer(): return MemoryWriter()

@pytest.fixture
def write(writer): return partial(ingest, writer=writer, shuffle=False, num_workers=0, progress=False)

LIMITS = [ # Samples, how many fail, `max_failed`, is it committed?
    (100, 10, None, True), (100, 11, None, False), (2000, 20, None, True), (2000, 21, None, False), (100, 1, 0, False),
    (100, 5, 5, True), (100, 6, 5, False), (100, 29, .29, True), (100, 30, .29, False), (100, 2, 1, False),
    (9, 1, None, True), (9, 2, None, False), (2, 1, None, True), (40, 4, None, True), (40, 5, None, False),
    (99, 10, None, False), (1000, 11, None, False), (1200, 12, None, True), (100, 99, 1., True), (100, 1, 0., False),
    (100, 3, np.int64(3), True), (100, 7, np.float32(.07), True)]

@pytest.mark.parametrize('n,n_bad,limit,is_committed', LIMITS)
@pytest.mark.parametrize('kind', [list,iter])
def test_too_many_failures_are_not_committed(write, writer, n, n_bad, limit, is_committed, kind):
    write = partial(write, kind(range(n)), fn=fails_at(range(1, n_bad+1)), max_failed=limit)
    if is_committed:
        report = write()
        assert (report.written,report.failed)==(n-n_bad,n_bad) and ids(writer.store)==[0, *range(n_bad+1, n)]
    else:
        with pytest.raises(IngestError, match='item 1: ValueError: no 1.*') as error: write()
        assert 'max_failed' in str(error.value) and writer.store is None and writer.plan

@pytest.mark.parametrize('place', ['redis','shards'])
def test_same_call_with_a_higher_limit_continues(fresh, tmp_path, place):
    "What is written is kept, failures that were counted stay counted, and nothing is visible before"
    target = (fresh.url,'d') if place=='redis' else (tmp_path/'d',)
    opened = partial(RedisStore if place=='redis' else ShardStore, *target)
    write = partial(to_redis if place=='redis' else to_shards, list(range(300)), *target, chunk=16, shuffle=False,
                    **OPTIONS)
    fn,good = fails_at(range(0, 300, 3)),[i for i in range(300) if i%3]
    for limit in (None, .2):
        with pytest.raises(IngestError, match='max_failed'): write(fn=fn, max_failed=limit)
        with pytest.raises(StoreNotFound): opened()
    fn.calls.clear()
    report = write(fn=fn, max_failed=.4)
    assert (report.written,report.failed)==(200,100) and report.resumed>0 and ids(opened())==good
    assert len(fn.calls)<300 and len(list(opened().failures()))==100
    with pytest.raises(IngestError, match='max_failed'): write(fn=fails_at(range(1, 200)), overwrite=True)
    assert ids(opened())==good

@pytest.mark.parametrize('kind,limit,calls', [(list,None,[1000,200]), (iter,None,[2000]), (iter,7,[1000])])
def test_the_limit_is_found_early(write, kind, limit, calls):
    "Not after all samples, where their number or the limit is known; nor in the run after that"
    fn = fails_at(range(0, 4000, 2))
    for most in calls:
        fn.calls.clear()
        with pytest.raises(IngestError, match='max_failed'):
            write(kind(range(4000)), fn=fn, chunk=100, max_failed=limit)
        assert len(fn.calls)<=most

@pytest.mark.parametrize('first,resumed', [(None,200), (20,range(1, 200))], ids=['at the end','early'])
def test_a_stream_continues_with_a_higher_limit(write, writer, first, resumed):
    fn = fails_at(range(0, 300, 3))
    with pytest.raises(IngestError, match='max_failed'): write(iter(range(300)), fn=fn, chunk=16, max_failed=first)
    report = write(iter(range(300)), fn=fn, chunk=16, max_failed=100)
    assert (report.written,report.failed)==(200,100) and ids(writer.store)==[i for i in range(300) if i%3]
    assert report.resumed in resumed if isinstance(resumed, range) else report.resumed==resumed

def test_the_message_says_what_failed_and_how_to_go_on(write):
    match = r'(?s)12 of 32 samples \(of 100\) could not.* 10 may.*higher max_failed.*abandon.*item 20: ValueError: no 2'
    with pytest.raises(IngestError, match=match): write(list(range(100)), fn=fails_at(range(20, 40)), chunk=16)

def test_an_ingest_in_which_all_samples_failed_is_dropped(write, writer):
    "The same call would fail again; that the first sample could be converted when it was looked at does not count"
    seen = []
    def fn(i):
        seen.append(i)
        if len(seen)>1: raise ValueError('later')
        return {'id':i}
    with pytest.raises(IngestError, match='none of the 20 samples could be converted; item'):
        write(list(range(20)), fn=fn, chunk=20)
    assert writer.store is None and writer.plan is None

@pytest.mark.parametrize('limit', [-1, 1.5, float('nan'), True, '5'], ids=str)
def test_a_limit_is_a_number_or_a_fraction(write, writer, limit):
    with pytest.raises((ValueError,TypeError), match='max_failed'): write([{'id':1}], max_failed=limit)
    assert writer.plan is None

def test_copies_have_a_limit(write, writer, tmp_path):
    write(list(range(100)), fn=fails_at([]))
    bad = fails_at(range(50))
    def fn(sample): return bad(sample['id'])
    store = changeable(writer.store)
    with pytest.raises(IngestError, match=r'of 100\b.*max_failed'): store.map(fn, tmp_path/'copy', **OPTIONS)
    assert len(store.map(fn, tmp_path/'copy', max_failed=50, **OPTIONS))==50

def test_indexing_has_a_limit(tmp_path):
    def number(i): return b'none' if i>=104 and i%4==0 else b'%d'%i   # the first hundred decide that it is a number
    members = [o for i in range(200) for o in ((f'{i:03}.bin', b'abc'), (f'{i:03}.x.i4', number(i)))]
    write_tar(tmp_path/'a.tar', members)
    with pytest.raises(IngestError, match='24 of 200 samples.*max_failed'): index_shards(tmp_path, **OPTIONS)
    with pytest.raises(StoreNotFound): ShardStore(tmp_path)
    report = index_shards(tmp_path, max_failed=.125, **OPTIONS)
    assert (report.written,report.failed,len(ShardStore(tmp_path)))==(176,24,176)

def test_partitions_have_a_limit(server):
    "That of the commit, or else that of the writer; a commit that was refused can be repeated"
    odd = fails_at(range(1, 100, 2))
    with RedisStore.writer(server.url, 'parts', 0, [100], odd, chunk=16) as w:
        list(w(0, range(100)))
        with pytest.raises(IngestError, match='50 of 100.*max_failed'): w.commit()
        with pytest.raises(StoreNotFound): RedisStore(server.url, 'parts')
        report = w.commit(max_failed=50)
    assert (report.written,report.failed)==(50,50) and ids(RedisStore(server.url, 'parts'))==list(range(0, 100, 2))
    with RedisStore.writer(server.url, 'more', 0, [100], odd, chunk=16, max_failed=.5) as w:
        list(w(0, range(100)))
        assert w.commit().failed==50
