"What a user gets when an address, a name, a sample or a server is wrong: the error that is promised for it"
import random, signal, struct, subprocess, threading, zlib
from functools import partial

import pytest
from fastai.data.block import DataBlock
from fastai.data.core import DataLoaders
from fastai.vision.augment import Resize

import fastai_remote.block
from conftest import class_of, fails, wait_for
from fastai_remote import (CorruptSample, get_remote_items, image_samples, MissingSample, RedisBlock, RedisStore,
                           StoreNotFound, StoreUnavailable, to_redis, UnknownField)
from snapshots import client

ONE = dict(num_workers=1, progress=False)

@pytest.fixture
def pics(fresh, images):
    "The images in a server of the test's own"
    to_redis(image_samples(images, label=class_of), fresh.url, 'pics', **ONE)
    return RedisStore(fresh.url, 'pics')

def loaders(store, **options):
    return DataLoaders.from_store(store, item_tfms=Resize(32), **{'bs':8, 'num_workers':0, 'device':'cpu', **options})
def run_through(dls): return [batch for dl in (dls.train.new(drop_last=False), dls.valid) for batch in dl]

# --- wrong address, name, field

def test_a_server_that_is_not_there_is_named():
    for ask in RedisStore, DataLoaders.from_redis, lambda url, name, **kw: to_redis([1,2], url, name, **ONE, **kw):
        with pytest.raises(StoreUnavailable, match='127.0.0.1:1.*attempt'):
            ask('redis://127.0.0.1:1', 'pics', timeout=.3)

def test_names_and_fields_that_there_are_not_are_told_with_those_that_there_are(server, store):
    for ask in RedisStore,DataLoaders.from_redis,RedisStore.delete:
        with pytest.raises(StoreNotFound, match="'pcis'"): ask(server.url, 'pcis')
    with pytest.raises(StoreNotFound, match='there are:.*pics'): RedisStore(server.url, 'pcis')
    block = DataBlock((RedisBlock, RedisBlock('mask.png')), get_items=get_remote_items)
    for ask in (partial(store.get_many, [0], 'png'), partial(RedisBlock, store, 'png'), partial(block.datasets, store),
                partial(loaders, store, x='png'), partial(loaders, store, y='png')):
        with pytest.raises(UnknownField, match="pics: no field '(mask.)?png'; there are 'jpg', 'cls', 'path'"): ask()

# --- missing and damaged samples

def test_missing_values_are_named_with_the_likely_cause(fresh, pics):
    c = client(fresh)
    c.delete('pics:jpg:7', 'pics:cls#0')
    with pytest.raises(MissingSample, match=r"pics: 2 of 2 samples missing, first 4 \(field 'cls'\) in key pics:cls#0 at"):
        pics.get_many([4,5], 'cls')
    c.config_set('maxmemory-policy', 'allkeys-lru')
    with pytest.raises(MissingSample, match='sample 7 is missing .*maxmemory-policy allkeys-lru.*set noeviction'):
        pics.get_many([7], 'jpg')

WILD_CODE = struct.pack('>BI', 238, zlib.crc32(struct.pack('>BQ', 238, 5)))   # its checksum is right
DAMAGE = { # What happens to a client's data, the error, and options of the loaders
    'deleted':(lambda c: c.delete('pics:jpg:7'), MissingSample,
               r"pics: 1 of 8 samples missing, first 7 \(field 'jpg'\) in key pics:jpg:7: deleted", {}),
    'a bit flipped':(lambda c: c.setbit('pics:jpg:11', 1600, 1-c.getbit('pics:jpg:11', 1600)), CorruptSample,
                     "pics: sample 11, field 'jpg' in key pics:jpg:11: the .* bytes do not match their checksum", {}),
    'a code without a label':(lambda c: c.setrange('pics:cls#0', 5*5, WILD_CODE), CorruptSample,
                              "pics: sample 5, field 'cls': code 238, but there are 3 labels", {}),
    'half':(lambda c: c.set('pics:jpg:12', c.get('pics:jpg:12')[:500]), CorruptSample, "pics: sample 12, field 'jpg'",
            {'check':False})}

@pytest.mark.parametrize('num_workers,what', [*((0,what) for what in DAMAGE), (2,'deleted'), (2,'a bit flipped'),
                                              (2,'half')])
def test_a_damaged_sample_in_an_epoch_is_named(fresh, pics, num_workers, what):
    "The class of the error and its words come through out of a worker, too"
    damage,error,says,options = DAMAGE[what]
    damage(client(fresh))
    with fails(error, match=says): run_through(loaders(pics, num_workers=num_workers, **options))

def test_verify_finds_exactly_the_damaged_samples(server):
    "Missing, changed, cut off; whichever worker reads them, in chunks of any size"
    source = [{'txt':f'sample {i}', 'bin':bytes([i%256])*20, 'cls':'ab'[i%2]} for i in range(300)]
    to_redis(source, server.url, 'v', **ONE)
    c,bad = client(server),sorted(random.Random(0).sample(range(300), 37))
    for k,i in enumerate(bad):
        if k%3==0: c.delete(f'v:txt:{i}')
        elif k%3==1: c.setbit(f'v:bin:{i}', 8*(i%20), 1-c.getbit(f'v:bin:{i}', 8*(i%20)))
        else: c.set(f'v:txt:{i}', c.get(f'v:txt:{i}')[:-1])
    for num_workers,chunk in (1,2048),(2,100):
        report = RedisStore(server.url, 'v').verify(num_workers=num_workers, chunk=chunk)
        assert (report.samples,report.bad,[i for i,_ in report.failures])==(300,37,bad)

# --- a server that goes away, or does not answer

def test_a_server_lives_as_long_as_the_process_that_started_it(fresh):
    "Whichever thread did"
    fresh.kill()
    thread = threading.Thread(target=fresh.start)
    thread.start()
    thread.join()
    with pytest.raises(subprocess.TimeoutExpired): fresh.proc.wait(.3)
    assert client(fresh).ping()

def answer(f):
    "`f()`, or `None` while the server is away: a busy machine may take longer than the short time-outs of these tests"
    try: return f()
    except StoreUnavailable: return None

def test_a_server_that_never_answers_is_an_error_when_the_time_is_over_and_then_works_again(fresh, pics):
    opened = partial(RedisStore, fresh.url, 'pics', timeout=1, socket_timeout=.4)
    dls = wait_for(lambda: answer(lambda: loaders(opened())))
    fresh.proc.send_signal(signal.SIGSTOP)
    try:
        with fails(StoreUnavailable, match=r'attempts? in \d+\.\d s'): dls.one_batch()
        with pytest.raises(StoreUnavailable, match='attempt'): opened()
    finally: fresh.proc.send_signal(signal.SIGCONT)
    assert wait_for(lambda: answer(lambda: len(dls.one_batch()[0])))==8
