"An ingest that stops, or loses its server, its line or its lock, is continued by the same call, and by no other"
import io, os, pickle, random, re, signal, subprocess, sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import ConcatDataset

from clusters import wait_for
from conftest import private_server
from faultproxy import FaultProxy
from fastai_remote import (image_samples, RedisStore, StoreBusy, StoreError, StoreExists, StoreFull,
                           StoreNotFound, StoreUnavailable, to_redis)
from fastai_remote.ingest.run import ingest
from fastai_remote.store.redis_parts import key_layout
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.testing import ManualClock
from fastai_remote.write.base import ChunksLost, MemoryWriter
from fastai_remote.write.redis import lost_of_range, RedisWriter
from fastai_remote.write.redis_place import packed_writes
from shard_helpers import interrupted_after, items, ONE
from snapshots import client, FolderPlace, keys, RedisPlace, whole

@pytest.fixture
def two():
    "Two servers, to compare"
    with private_server() as a, private_server() as b: yield a,b

def ids(store): return store.get_many(range(len(store)), 'id', check=True)['id'].tolist()

# --- another source, or another call

class Place:
    "A place in memory; `write` is as `to_redis` there, in chunks of 16"
    def __init__(self): self.writer = MemoryWriter()
    def write(self, source, fn=None, **options):
        return ingest(source, self.writer, fn, **{'chunk':16, 'num_workers':0, 'progress':False, **options})
    def stop(self, source, at=50, **options):
        "An ingest that is interrupted at its sample number `at`"
        with pytest.raises(KeyboardInterrupt): self.write(source, stop_after(at), **options)

@pytest.fixture
def place(): return Place()

def stop_after(n, value=0):
    "An `fn` that interrupts the ingest at its `n`-th sample, never if `n` is 0"
    left = [n]
    def fn(sample):
        left[0] -= 1
        if not left[0]: raise KeyboardInterrupt
        return {**sample, 'i4':value}
    return fn

def dataset(samples): return ConcatDataset([samples])   # map-style, of torch
def as_split(samples): return {'train':samples}
def changed(at): return [{**o, 'txt':'changed'} if i==at else o for i,o in enumerate(BASE)]

BASE = items('a', 100)
OTHERS = [ # Another source, a list or a stream, and other arguments
    *((list, source, {}) for source in (changed(0), changed(50), changed(99), BASE[:-1], BASE+BASE[:1])),
    *((list, BASE, options) for options in ({'fn':stop_after(0, 1)}, {'seed':1}, {'shuffle':False},
                                            {'vocab':['a0','a1','a2']}, {'splits':{'t':.5, 'v':.5}})),
    (as_split, BASE, {}), *((dataset, changed(at), {}) for at in (0, 50, 99)),
    # of the 48 samples that are done: the first, those at the ends of a part, and the last
    *((iter, changed(at), {}) for at in (0, 15, 16, 47)),
    *((iter, source, {}) for source in (BASE[1:], BASE[:40], BASE[:16], BASE[:20]+BASE[21:], BASE[:20]+BASE[19:])),
    *((iter, BASE, options) for options in ({'chunk':8}, {'fn':stop_after(0, 1)}))]

@pytest.mark.parametrize('kind,source,options', OTHERS, ids=range(len(OTHERS)))
def test_another_source_or_call_is_refused_before_anything_of_it_is_visible(place, kind, source, options):
    "The old call still finishes, with the old samples"
    first = list if kind==as_split else kind
    place.stop(first(BASE))
    with pytest.raises(StoreExists, match='unfinished|source has changed'):
        place.write(kind(source), **{'fn':stop_after(0), **options})
    assert place.writer.store is None
    report = place.write(first(BASE), stop_after(0))
    assert (report.written,report.resumed)==(100,48)
    assert '48 of them by an earlier run' in repr(report) and 'resumed' in report._repr_html_()
    assert sorted((o['id'],o['txt']) for o in place.writer.store)==[(i,f'a {i}') for i in range(100)]

def test_a_label_function_that_was_mended_is_another(place, tmp_path):
    "There is no dataset with labels of both"
    for i in range(60): Image.new('L', (9,9), i).save(tmp_path/f'{i}.jpg')
    place.stop(image_samples(tmp_path, label=lambda p: 'wrong'), 30)
    with pytest.raises(StoreExists, match='unfinished ingest'):
        place.write(image_samples(tmp_path, label=lambda p: 'right'), stop_after(0))

@pytest.mark.parametrize('where', ['redis','folder'])
def test_a_refused_call_touches_nothing_and_another_size_of_chunks_is_no_other_call(fresh, tmp_path, where):
    place = RedisPlace(fresh) if where=='redis' else FolderPlace(tmp_path)
    place.clear()
    with pytest.raises(KeyboardInterrupt) as stopped: place.write(BASE, progress=interrupted_after(3))
    says = r'd: what is written is kept \(3 of 7 chunks done\): repeat the same call to go on, or \w+Store.abandon'
    assert re.match(says, stopped.value.__notes__[0]) and not place.unfinished()[0]['running']
    before = place.names()
    for source,options in (BASE,{'seed':1}),(changed(50),{}),(iter(BASE),{}):
        with pytest.raises(StoreExists, match='unfinished ingest.*another source or fn'): place.write(source, **options)
    assert place.names()==before
    assert place.write(BASE, chunk=7).resumed==48
    store = place.open()
    assert sorted(ids(store))==list(range(100)) and store.verify(num_workers=1).bad==0

def test_a_stream_that_breaks_off_ends_the_ingest_with_its_error_and_goes_on_when_it_is_mended(place):
    def stream(bad):
        for i in range(300):
            if i==bad: raise OSError(f'disk gone at {i}')
            yield {'id':i}
    with pytest.raises(OSError, match='disk gone at 200'): place.write(stream(200))
    assert place.writer.store is None
    assert place.write(stream(None)).written==300 and ids(place.writer.store)==list(range(300))

class Raw:
    "A raw sample that remembers what was made of it, and has no `repr` of its own"
    def __init__(self, n): self.n,self.made = n,None

def test_a_stream_whose_fn_changes_what_it_is_given_is_resumed(place):
    "The parts are recognised by what they were before `fn` got them, and are told apart"
    left = [50]
    def fn(raw):
        left[0] -= 1
        if not left[0]: raise KeyboardInterrupt
        raw.made = {'id':raw.n}
        return raw.made
    def write(first=0): return place.write(map(Raw, range(first, 100)), fn)
    with pytest.raises(KeyboardInterrupt): write()
    with pytest.raises(StoreExists, match='source has changed'): write(1)
    assert write().resumed==48

@pytest.mark.parametrize('n,more', [(96,1), (96,-16), (100,-20)])
def test_a_stream_of_another_length_after_an_ingest_that_knew_its_end(two, n, more, monkeypatch):
    "It stopped in its commit. A stream that is longer or shorter is refused, or becomes all of it: never some of both"
    a,b = two
    def fn(o): return {**o, 'cls':f"c{o['id']}", 'labels':[f"l{o['id']}"]}
    def write(server, n): return to_redis(iter(items('a', n)), server.url, 'd', fn, chunk=16, **ONE)
    def interrupt(self): raise KeyboardInterrupt
    with monkeypatch.context() as m:
        m.setattr(RedisWriter, 'commit', interrupt)
        with pytest.raises(KeyboardInterrupt): write(a, n)
    try: write(a, n+more)
    except StoreExists:
        write(a, n)
        more = 0
    write(b, n+more)
    assert whole(a)==whole(b)

def test_a_map_whose_source_is_replaced_stops_and_cannot_be_finished_with_the_new_one(two):
    a,b = two
    def make(word):
        to_redis(items(word, 100), a.url, 'src', overwrite=True, **ONE)
        return RedisStore(a.url, 'src')
    replaced = []
    def fn(sample):
        if len(replaced)==50: make('new')
        replaced.append(sample['id'])
        return {**sample, 'txt':sample['txt'].upper()}
    def copy(source): return source.map(fn, b.url, 'd', chunk=16, **ONE)
    with pytest.raises(StoreNotFound, match='src: replaced since it was opened'): copy(make('old'))
    with pytest.raises(StoreExists, match='unfinished ingest'): copy(RedisStore(a.url, 'src'))
    RedisStore.abandon(b.url, 'd')
    assert keys(b)==[]
    copy(RedisStore(a.url, 'src'))
    assert sorted(RedisStore(b.url, 'd').get_many(range(100), 'txt', decode=True)['txt'])==sorted(
        f'NEW {i}' for i in range(100))

# --- what an earlier run has left

@pytest.mark.parametrize('what', ['map','resize','copy'])
def test_a_copy_leaves_out_damaged_samples_and_names_them(two, what, capsys):
    a,b = two
    Image.new('L', (6,8), 9).save(image:=io.BytesIO(), 'PNG')
    sources = [{'png':image.getvalue(), 'txt':f'sample {i}', 'cls':f'c{i%7}', 'id':i, 'labels':[f'l{i%3}']}
               for i in range(60)]
    to_redis({'train':sources[:50], 'valid':sources[50:]}, a.url, 'src', shuffle=False, **ONE)
    for i in 17,49,50: client(a).set(f'src:png:{i}', b'damaged')
    client(a).delete('src:txt:5')
    src = RedisStore(a.url, 'src')
    if what=='map': copy = src.map(lambda o: {**o, 'id':o['id']+1}, b.url, 'd', **ONE)
    else: copy = src.resize(3, b.url, 'd', **ONE) if what=='resize' else src.copy(b.url, 'd', **ONE)
    assert 'd: 56 written, 4 failed' in capsys.readouterr().out
    assert sorted(n for n,_ in copy.failures())==['sample 17','sample 49','sample 5','sample 50']
    assert sorted(ids(copy))==[i+(what=='map') for i in range(60) if i not in (5,17,49,50)]
    assert copy.splits=={'train':[0,47], 'valid':[47,56]} and copy.vocab==src.vocab
    assert copy.verify(num_workers=1).bad==0

def test_a_sample_that_fails_in_the_second_run_leaves_no_key_of_the_first(fresh):
    state = SimpleNamespace(run=0)   # data that changes would make `fn` another function
    def fn(i):
        if state.run==1 and i==15: raise KeyboardInterrupt
        if state.run==2 and i>=14: raise ValueError('gone since')
        return {'bin':bytes([i])*(5_000_000 if i==14 else 9)}   # five million: written at once
    def write():
        state.run += 1
        return to_redis(list(range(16)), fresh.url, 'd', fn, shuffle=False, max_failed=2, **ONE)
    with pytest.raises(KeyboardInterrupt): write()
    assert client(fresh).exists('d:bin:14')
    assert (write().written,len(RedisStore(fresh.url, 'd')))==(14,14)
    assert keys(fresh)==sorted(['d:bin.crc#0', 'd:~failures#0', 'd:~gaps#0', 'd:meta', 'fastai_remote:names',
                                *(f'd:bin:{i}' for i in range(14))])

@pytest.mark.parametrize('num_workers,is_stream,says', [
    (1, False, r'150 samples take about 3\.\d MB \(20,\d+ bytes each\), .* left of'),
    pytest.param(2, True, 'no room: .* of maxmemory .*noeviction', marks=pytest.mark.slow)])
def test_an_ingest_without_room_says_so_and_goes_on_with_more_room(two, num_workers, is_stream, says):
    "Also with another number of workers. Of a stream it is known when it happens"
    a,b = two
    c,src = client(a),[{'bin':random.Random(i).randbytes(20_000), 'cls':i%5} for i in range(150)]
    c.config_set('maxmemory', c.info('memory')['used_memory']+1_500_000)
    def write(server, num_workers):
        source = iter(src) if is_stream else src
        return to_redis(source, server.url, 'd', chunk=16, num_workers=num_workers, progress=False)
    with pytest.raises(StoreFull, match=f'd: .*{says}.*repeat the same call'): write(a, num_workers)
    with pytest.raises(StoreNotFound, match="'d'"): RedisStore(a.url, 'd')
    c.config_set('maxmemory', 0)
    assert write(a, 3-num_workers).resumed>0
    write(b, 1)
    assert whole(a)==whole(b)

def test_values_that_a_server_has_lost_are_found(fresh):
    "Each value of its own, and each number with its checksum; not those of samples that have failed"
    link,layout = RedisLink(fresh.url),key_layout('tiny')
    fields = {'txt':{'codec':'txt', 'dtype':None}, 'age':{'codec':'u1', 'dtype':'u1', 'check':'u4'}}
    for k in (0,2,3): client(fresh).set(f'tiny:txt:{k}', b'text')
    for k in (0,1,3): link.send(packed_writes(layout, 'age', 'u1', np.array([k]), [7], 'u4'))
    assert [some.tolist() for some in lost_of_range(link, layout, fields, 4)]==[[1,2]]
    assert not list(lost_of_range(link, layout, fields, 4, gaps=np.array([1,2])))

@pytest.mark.slow
def test_an_ingest_on_a_server_that_was_set_back_is_abandoned_without_a_key_left(fresh):
    "It was set back to when less of a stream was planned; the ingest went on from there, and stopped"
    c,down = client(fresh),[]
    def fn(o):
        if o['id']==100: c.save()
        if o['id']==600 and not down:
            down.append(1)
            fresh.kill()
            fresh.start()
        if o['id']==700: raise KeyboardInterrupt
        return o
    stream = ({'txt':f'{i}', 'id':i} for i in range(2000))
    with pytest.raises(KeyboardInterrupt): to_redis(stream, fresh.url, 'd', fn, chunk=4, **ONE)
    RedisStore.abandon(fresh.url, 'd')
    assert down and keys(fresh)==[]

# --- a line that breaks, a server that is set back

def numbered(first, word='s'):
    "A source with two splits, a label, labels, and failures at the end of one split and the start of the other"
    bad = {first+k for k in (2,20,29,30,31)}
    def item(i):
        return {'txt':f'{word}{i}'*5, 'cls':f'{word}{i%3}', 'labels':[f'{word}{i%2}'], 'id':'bad' if i in bad else i}
    return {'train':[item(i) for i in range(first, first+30)], 'valid':[item(i) for i in range(first+30, first+40)]}

@pytest.mark.slow
def test_an_ingest_whose_line_breaks_anywhere_asks_again(two):
    "In a request, or before its answer: the dataset is as if nothing had been"
    a,b = two
    def act(server, url):
        client(server).flushall()
        to_redis(numbered(100, 'old'), server.url, 'd', chunk=16, max_failed=5, **ONE)
        to_redis(numbered(0), url, 'd', overwrite=True, chunk=16, max_failed=5, **ONE)
        return whole(server)
    expected = act(b, b.url)
    with FaultProxy(str(a.socket)) as proxy:
        url,proxy.cut = f'redis://127.0.0.1:{proxy.port}',1<<40
        assert act(a, url)==expected
        total = (1<<40)-proxy.cut
        for cut in range(0, total, total//9):
            proxy.cut = cut
            assert act(a, url)==expected, cut
            # the answers hold a time, whose digits vary: the last cut may come after the last byte
            assert proxy.cut is None or total-cut<64, cut
            proxy.cut = None

@pytest.mark.slow
def test_an_ingest_is_whole_wherever_its_server_is_set_back(two, monkeypatch):
    """It comes back as it was a request or two before; the same call is repeated until the dataset is there

    Of a stream it also says how much of it is planned."""
    a,b = two
    call,at,k = RedisLink.call,[0],0
    def counted(self, *args, **kwargs):
        if self.url==a.url:
            at[0] += 1
            if at[0]==k: client(a).save()
            if at[0]==k+2:
                a.kill()
                a.start()
        return call(self, *args, **kwargs)
    monkeypatch.setattr(RedisLink, 'call', counted)
    def act(server, is_stream):
        client(server).flushall()
        for _ in range(4):
            source = {split:iter(samples) if is_stream else samples for split,samples in numbered(0).items()}
            try: to_redis(source, server.url, 'd', shuffle=False, chunk=16, max_failed=5, **ONE)
            except StoreExists: return whole(server)
            except StoreError: pass
            client(server).delete('d:ingest:lock')   # it may have come back, too, and would end in 30 s
    expected = [act(b, is_stream) for is_stream in (False,True)]
    assert all(expected)
    while at[0]>=k:
        at[0],k = 0,k+5
        assert act(a, k%2)==expected[k%2], k
    assert k>20

# --- locks, and those who come too late

def test_an_ingest_whose_lock_another_took_over_does_not_commit(fresh):
    def fn(o):
        if o['id']==30: client(fresh).set('d:ingest:lock', '{"host":"elsewhere","pid":1}')
        return o
    write = partial(to_redis, [{'id':i} for i in range(32)], fresh.url, 'd', fn, shuffle=False, **ONE)
    with pytest.raises(StoreBusy, match='lock was lost'): write()
    with pytest.raises(StoreNotFound, match="'d'"): RedisStore(fresh.url, 'd')
    with pytest.raises(StoreBusy, match='process 1 on elsewhere'): write()

@pytest.mark.parametrize('error', [KeyboardInterrupt,StoreUnavailable])
def test_a_lock_whose_taking_was_interrupted_is_taken_at_once(fresh, error, monkeypatch):
    send = RedisLink.send
    def interrupted(self, commands, *args, **kwargs):
        replies = send(self, commands, *args, **kwargs)
        if not any('NX' in command for command in commands): return replies
        monkeypatch.setattr(RedisLink, 'send', send)
        raise error('no answer')
    monkeypatch.setattr(RedisLink, 'send', interrupted)
    with pytest.raises(error): to_redis([{'id':1}], fresh.url, 'd', **ONE)
    to_redis([{'id':1}], fresh.url, 'd', **ONE)

def test_an_interrupt_stays_one_while_the_server_is_away(fresh):
    "It says what to do"
    def fn(i):
        if i<40: return {'id':i}
        fresh.kill()
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt) as caught, ManualClock():
        to_redis(list(range(100)), fresh.url, 'd', fn, chunk=8, shuffle=False, **ONE)
    assert 'd: what is written is kept: repeat the same call to go on' in caught.value.__notes__[0]

@pytest.mark.parametrize('where', ['fresh', pytest.param('cluster', marks=pytest.mark.slow)])
def test_an_attempt_that_outlives_the_commit_of_partitions_records_nothing(where, request, monkeypatch):
    "A speculative attempt of Spark ends when the leader has published"
    url = request.getfixturevalue(where).url
    rows = [{'id':i, 'txt':f't{i}'} for i in range(8)]
    with RedisStore.writer(url, 'd', rows[0], [8], chunk=8) as w:
        late = pickle.loads(pickle.dumps(w))
        list(w(0, rows))
        publish = RedisWriter.publish
        def then_goes_on(self, *args):
            result = publish(self, *args)
            with pytest.raises(StoreBusy, match='lock was lost'): list(late(0, rows))
            return result
        monkeypatch.setattr(RedisWriter, 'publish', then_goes_on)
        w.commit()
        assert not [key for key in RedisLink(url).call(lambda c: c.keys()) if b':ingest:' in key and b'lock' not in key]
    store = RedisStore(url, 'd')
    assert sorted(ids(store))==list(range(8)) and not store.verify(num_workers=1).bad

def test_a_writer_that_slept_changes_nothing(fresh):
    "Meanwhile another one has finished the ingest, in which other samples failed"
    fields,link = {'id':{'codec':'i8', 'dtype':'i8'}},RedisLink(fresh.url)
    plan = dict(n=8, chunk=4, fields=fields, splits=None, vocab={}, signature='s', stats=None)
    first,second = RedisWriter(link, 'd'),RedisWriter(link, 'd')
    def put(writer, chunk, *fails):
        numbers = np.setdiff1d(np.arange(4*chunk, 4*chunk+4), fails)
        writer.put(numbers, {'id':numbers})
        writer.done(chunk, dict(ok=len(numbers), failed=len(fails), bytes=1, gaps=[[i,i+1] for i in fails]),
                    [(f'sample {i}', 'failed') for i in fails])
    first.begin(plan)
    put(first, 0)
    first.place.stop.set()   # it does not renew its lock, whose lease ends
    client(fresh).delete(first.place.keys.lock)
    second.begin(plan)
    put(second, 1, 5)
    def state(): return {key:client(fresh).dump(key) for key in client(fresh).keys()}
    for end in lambda: None,second.commit,second.close:
        end()
        before = state()
        for late in (partial(put, first, 1), partial(put, first, 1, 6), first.commit):
            with pytest.raises((StoreBusy,ChunksLost)): late()
        assert state()==before
    store = RedisStore(fresh.url, 'd')
    assert ids(store)==[0,1,2,3,4,6,7] and not store.verify(num_workers=0).bad

STOPPED = '''
import os, random, sys, time
from fastai_remote import to_redis
url,began,goes_on = sys.argv[1:]
def fn(i):
    if i==20 and not os.path.exists(began):
        open(began, 'w').close()
        while not os.path.exists(goes_on): time.sleep(.01)
    if random.random()<.2: raise ValueError('at random')
    return {'txt':f'text {i}', 'cls':'abc'[i%3], 'id':i}
print(to_redis(list(range(60)), url, 'd', fn, chunk=8, num_workers=0, shuffle=False, max_failed=1., progress=False))
'''

@pytest.mark.slow
def test_a_process_that_was_stopped_changes_nothing_when_it_goes_on(fresh, tmp_path):
    "In the middle of a chunk; meanwhile another one has finished the ingest, in which other samples fail"
    command = [sys.executable, '-W', 'ignore', '-c', STOPPED, fresh.url, str(tmp_path/'began'), str(tmp_path/'goes on')]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for((tmp_path/'began').exists)
    os.kill(first.pid, signal.SIGSTOP)
    client(fresh).delete('d:ingest:lock')   # its lease has ended
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    def state(): return {key:client(fresh).dump(key) for key in client(fresh).keys()}
    store,before = RedisStore(fresh.url, 'd'),state()
    samples = store[:]
    (tmp_path/'goes on').touch()
    os.kill(first.pid, signal.SIGCONT)
    assert 'StoreBusy' in first.communicate()[1] and first.returncode
    assert state()==before and store[:]==samples and not store.verify(num_workers=0).bad
    assert all(sample['txt']==f"text {sample['id']}" for sample in samples) and len(samples)+store.manifest.failed==60
