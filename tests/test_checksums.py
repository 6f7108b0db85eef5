"A flipped bit in any stored byte of a dataset in Redis is found, by `verify` and by training, or it changes nothing"
import io, json, random

import numpy as np
import pytest
import redis

from fastai_remote import (
    CorruptSample, MissingSample, StoreBusy, StoreError, StoreNotFound, UnsupportedFormat, to_redis)
from fastai_remote.core import Manifest, seal, unseal
from fastai_remote.ingest.stores import RedisStore
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.write.redis import RedisWriter

IDS = [i*1_000_003-5 for i in (0,1,3,4,5)] # Of `tiny`, without the sample that has failed
PLAN = dict(n=1, chunk=1, fields={}, splits=None, vocab={}, signature='s', stats=None)

def sample(i):
    if i==2: raise ValueError('no sample two')
    return {'bin':bytes([i%251])*3, 'cls':['bird','cat','dog'][i%3], 'kind.cls':[3,7][i%2], 'id':i*1_000_003-5,
            'target.f4':i/8-.5, 'labels':[f'l{i%2}'], 'txt':f'ë{i}'}

def write(url, items=range(6), fn=sample, name='d', **kwargs):
    return to_redis(list(items), url, name, fn, **{'num_workers':1, 'shuffle':False, 'progress':False, **kwargs})

@pytest.fixture
def client(server):
    "A client of the server, which is empty"
    c = redis.Redis.from_url(server.url)
    c.flushall()
    return c

@pytest.fixture
def tiny(client, server):
    "Five samples, of six"
    write(server.url, chunk=4)
    return RedisStore(server.url, 'd')

def flipped(b, bit):
    "`b` with one bit flipped"
    changed = bytearray(b)
    changed[bit//8] ^= 1<<bit%8
    return bytes(changed)

def parts_of(c, key):
    "What `key` holds, names within a hash and members of a set, too: `(what, bytes, function that changes them)`"
    kind = c.type(key)
    if kind==b'string': return [('', c.get(key), lambda was, b: c.set(key, b))]
    if kind==b'set':
        def replace(was, b): return c.srem(key, was) and c.sadd(key, b)
        return [('member', member, replace) for member in sorted(c.smembers(key))]
    values = sorted(c.hgetall(key).items())
    def rename(was, b): return c.hdel(key, was) and c.hsetnx(key, b, dict(values)[was])
    return [('name', name, rename) for name,_ in values]+[
        (name, value, lambda was, b, name=name: c.hset(key, name, b)) for name,value in values]

def flip(c, key, bit): c.setbit(key, bit, 1-c.getbit(key, bit))

def is_damaged(url, name='d'):
    "Does opening or `verify` notice damage?"
    try: report = RedisStore(url, name).verify(num_workers=1)
    except (CorruptSample,UnsupportedFormat): return True
    return report.bad>0 and 'all good' not in repr(report)

# --- every bit

WIDTHS = {'cls':5, 'kind.cls':5, 'id':12, 'target.f4':8} # Of a value with its checksum

def is_trained_on(key, byte, gap):
    "Does an epoch over all fields read this byte of `key`? Not at place `gap`, whose sample has failed"
    _,field,*_ = key.decode().split(':')
    if '#' not in field: return True   # a value of its own
    field = field.split('#')[0]
    return field[0]!='~' and byte//WIDTHS.get(field, 4)!=gap

@pytest.mark.slow
def test_flipped_bits_are_found(client, server):
    """In each value, checksum, list of failures and name, and in the table of gaps; by training as well, where it reads them

    What is stored at the place of a sample that has failed is not a part of the dataset."""
    def fn(i): return {field:value for field,value in sample(i).items() if field in ('bin','cls','id')}
    write(server.url, range(1, 4), fn)
    store,n_trained = RedisStore(server.url, 'd'),0
    want = store[:]
    assert len(want)==2 and store.verify(num_workers=1).bad==0
    for key in sorted(set(client.keys())-{b'd:meta', b'd:register'}):
        whole = client.dump(key)
        for part,was,change in parts_of(client, key):
            for bit in range(0, 8*len(was), 7):
                change(was, flipped(was, bit))
                is_used = is_trained_on(key, bit//8, gap=1)
                if is_used or b'~' in key: assert store.verify(num_workers=1).bad, f'{key} {part} bit {bit}: not found'
                else: assert store[:]==want
                if not key.startswith(b'fastai_remote:') and is_used:
                    with pytest.raises(CorruptSample, match="^d: sample [01], field '.*key d:.*ingest it again"):
                        store.get_many(range(len(store)), store.fields, check=True)
                    n_trained += 1
                client.restore(key, 0, whole, replace=True)
    assert n_trained>40 and store.verify(num_workers=1).bad==0

def changed(write):
    "Writes samples of two splits with `write`, appends some, adds fields and edits them: `(the store, its facts)`"
    def fn(i):
        if i<0: raise ValueError(f'no {i}')
        return sample(i%2+3*i)
    options = dict(num_workers=0, progress=False)
    store = write({'train':[0,1,-1,2,3], 'valid':[4,5]}, fn, chunk=3, max_failed=1., **options).store
    store = store.append({'train':[6,-2,7]}, fn=fn, max_failed=1., **options)
    more = {'more.u2':range(8), 'kind.txt':['x','y']*4}
    store = store.add_fields({field:list(values) for field,values in more.items()}, **options)
    return store.edit(drop=[1], set={'cls':{3:'cow'}, 'txt':{4:'new'}})

def facts(store):
    "All that a dataset says of itself"
    manifest = store.manifest
    return repr((store[:], store.splits, manifest.vocab, manifest.counts, manifest.stats, list(store.failures())))

@pytest.mark.slow
def test_flipped_bits_of_a_changed_dataset_are_errors_or_change_nothing(client, server):
    "In values and tables of all parts, what the version before uses, and the register; some bits of each key"
    store = changed(lambda source, fn, **options: to_redis(source, server.url, 'd', fn, **options))
    want,found = facts(store),set()
    for key in sorted(client.keys()):
        whole = client.dump(key)
        for part,was,change in parts_of(client, key):
            for bit in range(5, 8*len(was), max(len(was)*8//3, 13)):
                change(was, flipped(was, bit))
                try: assert facts(RedisStore(server.url, 'd'))==want, f'{key} {part} bit {bit}'
                except (CorruptSample,UnsupportedFormat) as error:
                    assert 'd: ' in str(error)
                    found.add(key.split(b':')[0])
                client.restore(key, 0, whole, replace=True)
    assert len(found)==5 and not is_damaged(server.url)   # keys of five parts

def test_every_flipped_bit_of_the_manifest_is_found(client, tiny, server):
    "Also by a store that was opened before, and where the bit, as one of an escape, does not change what it says"
    stored = client.get('d:meta')
    for bit in range(3, 8*len(stored), 997):
        client.set('d:meta', flipped(stored, bit))
        with pytest.raises((CorruptSample,UnsupportedFormat), match='d'): RedisStore(server.url, 'd')
        report = tiny.verify(num_workers=1)
        assert report.bad and 'manifest' in dict(report.rest)
    vocab = {'cls':['\x1f\x0b','é','\\u00ff']}
    stats = dict(n=1, width=[1,1,1], height=[1,1,1], grey=[.5,.5], image='', mean=[1e-05,2.5e-07,0.30000000000000004],
                 std=[.5,.5,.5])
    odd = Manifest('d', 3, {}, stats={'jpg':stats}, vocab=vocab)
    b = odd.to_json()
    for bit in range(8*len(b)):
        with pytest.raises((CorruptSample,UnsupportedFormat)): Manifest.from_json(flipped(b, bit))
    assert Manifest.from_json(b)==odd

def test_a_changed_manifest_is_refused():
    "No change turns the check off; a number of a format that was changed is damage, and not a newer format"
    stored = Manifest('d', 3, {}).to_json()
    for old,new in ((b'"format":1', b'"format":9'), (b'"n":3', b'"n":4'), (b'}', b',"x":1}'), (b',', b', ')):
        with pytest.raises(CorruptSample, match='d: the manifest does not match its checksum'):
            Manifest.from_json(stored[:18]+stored[18:].replace(old, new), 'd')
    content = unseal(stored)
    for other in (json.dumps(content).encode(), json.dumps(json.loads(stored)).encode(), b'{"crc":null,'+stored[19:]):
        with pytest.raises(UnsupportedFormat, match='d: not a manifest'): Manifest.from_json(other, 'd')
    with pytest.raises(UnsupportedFormat, match='format 99.*upgrade'):
        Manifest.from_json(seal({**content, 'format':99}), 'd')

@pytest.mark.parametrize('change,error,message', [
    (lambda b: b.replace(b'"bird"', b'"bIrd"'), CorruptSample, 'd: the manifest .*ingest the dataset again'),
    (lambda b: b[5:], UnsupportedFormat, r"d: not a manifest.*overwrite=True.*RedisStore.delete\(url, 'd'\)")])
def test_a_dataset_with_a_damaged_manifest_is_replaced_or_deleted_if_asked_for(
        client, tiny, server, change, error, message):
    client.set('d:meta', change(client.get('d:meta')))
    with pytest.raises(error, match=message): write(server.url)
    write(server.url, overwrite=True)
    assert RedisStore(server.url, 'd').get_many(range(5), 'id')['id'].tolist()==IDS and not is_damaged(server.url)
    client.set('d:meta', change(client.get('d:meta')))
    RedisStore.delete(server.url, 'd')
    assert client.keys()==[b'fastai_remote:used']   # also the values of both datasets, whose manifests were damaged

# --- labels and numbers

def test_a_damaged_number_is_named_with_sample_field_and_place(client, tiny, server):
    "Also among samples far apart, each of which is asked for by itself"
    write(server.url, range(3, 130), name='far')
    far,numbers = RedisStore(server.url, 'far'),[126,0,60,7]
    for field,width in WIDTHS.items():
        assert list(far.get_many(numbers, field, check=True, decode=True)[field])==[sample(k+3)[field] for k in numbers]
        flip(client, f'far:{field}#0', 8*width*60+7)
        with pytest.raises(CorruptSample, match=f"sample 60, field '{field}'"): far.get_many(numbers, field, check=True)
        flip(client, f'd:{field}#0', bit:=4*8*width+5)   # sample 3 is at place 4, as that at place 2 has failed
        message = f"d: sample 3, field '{field}' in key d:{field}#0 at byte {4*width}: the value .* does not match its " \
                  'checksum.*ingest it again'
        for read in (lambda: tiny.get_many([0,3,4], field, check=True), lambda: tiny[3]):
            with pytest.raises(CorruptSample, match=message): read()
        report = tiny.verify(num_workers=1)
        assert (report.bad,[number for number,_ in report.failures])==(1,[3]) and 'all good' not in repr(report)
        assert len(tiny.get_many([3], field, check=False)[field])==1   # as it is, where nobody wants it compared
        flip(client, f'd:{field}#0', bit)
    # the checksum of a number is of its sample number, too
    client.setrange('d:cls#0', 20, client.getrange('d:cls#0', 0, 4))
    with pytest.raises(CorruptSample, match="sample 3, field 'cls'"): tiny.get_many([3], 'cls', check=True)

# --- what lies beside the samples

def test_a_lost_or_damaged_list_of_failures_is_found(client, tiny):
    assert list(tiny.failures())==[('item 2','ValueError: no sample two (fn was given: int)')]
    was = client.hget('d:~failures#0', 0)
    client.delete('d:~failures#0')
    report = tiny.verify(num_workers=1)
    assert report.bad==1 and 'd:~failures#0 has 0 failures, where the manifest counts 1' in repr(report)
    client.hset('d:~failures#0', 0, was.replace(b'two', b'tvo'))
    with pytest.raises(CorruptSample, match='d: d:~failures#0: the failures of chunk 0 are damaged'):
        list(tiny.failures())
    assert tiny.verify(num_workers=1).bad==1

def test_columns_that_are_cut_off_are_found(client, tiny):
    client.set('d:id#0', client.get('d:id#0')[:40])
    with pytest.raises(MissingSample, match="field 'id'"): tiny.get_many([3], 'id')
    assert tiny.verify(num_workers=1).bad==3   # from the one at place 3 on

def test_a_damaged_or_lost_table_of_gaps_is_found(client, tiny, server):
    "Each byte of it; a store that was opened before has it in memory"
    stored,ids = client.get('d:~gaps#0'),tiny.get_many(range(5), 'id')['id'].tolist()
    assert ids==IDS and len(stored)==16
    for bit in range(0, 8*len(stored), 5):
        client.set('d:~gaps#0', flipped(stored, bit))
        with pytest.raises(CorruptSample, match='the key d:~gaps#0, which says where the samples are: damaged: its 16 bytes'):
            RedisStore(server.url, 'd')[0]
    for wrong in stored[:-1],stored+b'x',b'':
        client.set('d:~gaps#0', wrong)
        with pytest.raises(CorruptSample, match='d:~gaps#0'): RedisStore(server.url, 'd')[0]
    assert 'd:~gaps#0' in dict(tiny.check_rest()) and tiny.get_many(range(5), 'id')['id'].tolist()==IDS
    client.set('d:~gaps#0', stored)
    write(server.url, overwrite=True)
    with pytest.raises(StoreNotFound, match='replaced since it was opened'): tiny[0]

def test_what_keeps_a_new_dataset_off_the_keys_of_a_renamed_one_is_verified(client, tiny):
    store = tiny.rename('new')
    assert store.verify(num_workers=1).bad==0
    client.srem('fastai_remote:used', 'd')
    assert store.verify(num_workers=1).bad==1

def test_verify_of_others_keys_says_that_there_are_no_checksums(client, server):
    for i in range(4):
        np.save(array:=io.BytesIO(), np.full((3,3), i, np.uint8))
        client.mset({f'x:{i}':array.getvalue(), f'y:{i}':i%2})
    report = RedisStore.from_keys(server.url, 'x:{}', 'y:{}', 4, codec='npy', vocab=['a','b']).verify(num_workers=1)
    assert report.bad==0 and 'all good' not in repr(report) and 'no checksums: x, cls' in repr(report)

# --- before the dataset is there

class Stopping:
    "`sample`, but for a time not of 0, nor of those from `fails_from` on"
    on,fails_from = False,1000
    def __call__(self, i):
        if i==0 and Stopping.on: raise KeyboardInterrupt
        if i>=Stopping.fails_from: raise ValueError('bad')
        return sample(i)

def record_key(client, chunk):
    "The key of the record of a chunk"
    key, = (key for key in client.keys() if key.endswith(b':record:%d' % chunk))
    return key

def interrupted(server, **kwargs):
    "An ingest that is all but done; call what comes back to go on with it"
    def go(): return write(server.url, [*range(1, 10), 0], Stopping(), chunk=3, **kwargs)
    Stopping.on = True
    with pytest.raises(KeyboardInterrupt): go()
    Stopping.on = False
    return go

def contents(url): return sorted(repr(o) for o in RedisStore(url, 'd'))

@pytest.mark.slow
def test_no_flipped_bit_of_an_unfinished_ingest_goes_unnoticed(client, server):
    "Whatever is flipped before the same call goes on: the result is right, or the damage is found, if only by `verify`"
    rng,go = random.Random(0),interrupted(server)
    keys = {key:client.dump(key) for key in client.keys() if not key.endswith(b':lock')}
    places = [(key,k,bit) for key in sorted(keys) for k,(_,was,_) in enumerate(parts_of(client, key))
              for bit in range(8*len(was))]
    labels = [place for place in places if any(part in place[0] for part in (b'~#0', b'vocab', b'chunks'))]
    go()
    want,n_right,n_refused = contents(server.url),0,0
    for key,k,bit in rng.sample(places, 25)+rng.sample(labels, 20):
        client.flushall()
        for name,stored in keys.items(): client.restore(name, 0, stored)
        _,was,change = parts_of(client, key)[k]
        change(was, flipped(was, bit))
        try: go()
        except (StoreError,redis.ResponseError):
            assert not client.exists('d:meta')
            n_refused += 1
        else:
            if is_damaged(server.url): continue
            assert contents(server.url)==want, f'{key} {k} {bit}'
            n_right += 1
    assert n_right and n_refused and n_right+n_refused<44

def test_a_flipped_bit_of_a_label_that_is_not_numbered_yet_is_named_with_what_to_do(client, server):
    go = interrupted(server)
    for key in ('d:cls~#0','d:kind.cls~#0'):   # hashes of labels
        flip(client, key, 3*12*8+3)
        advice = 'is damaged: RedisStore.abandon.*then ingest again'
        with pytest.raises(CorruptSample, match=f"d: the value of .*cls' for sample 3, in key {key}.*{advice}"): go()
        flip(client, key, 3*12*8+3)
    go()
    assert not is_damaged(server.url)

def test_a_damaged_plan_is_refused_and_can_be_dropped(client, server):
    go = interrupted(server)
    client.set('d:ingest', client.get('d:ingest').replace(b'"n":10', b'"n":11'))
    message = r"the plan of an unfinished ingest of 'd', d:ingest, \(RedisStore.abandon"
    with pytest.raises(CorruptSample, match=message): go()
    assert [(o['name'],o['of'],o['began']) for o in RedisStore.unfinished(server.url)]==[('d',0,'')]
    RedisStore.abandon(server.url, 'd')
    assert client.keys()==[b'fastai_remote:used']   # the register names the keys, too
    go()
    assert len(contents(server.url))==9 and not is_damaged(server.url)
    assert RedisStore(server.url, 'd').manifest.prefix!='d'   # a worker of the dropped ingest may still run

def test_an_ingest_is_abandoned_beside_a_damaged_manifest(client, server):
    "Its values and its plan go; nobody knows which others the dataset needs"
    write(server.url)
    want,before = contents(server.url),set(client.keys())
    interrupted(server, overwrite=True)
    assert len(client.keys())>len(before)
    flip(client, 'd:meta', 100)
    RedisStore.abandon(server.url, 'd')
    assert set(client.keys())==before
    flip(client, 'd:meta', 100)
    assert contents(server.url)==want

def test_an_ingest_never_gets_the_keys_of_one_that_was_dropped_with_its_damaged_plan(client, server):
    "Also if that one has itself replaced an unfinished ingest"
    write(server.url)
    writer,prefixes = RedisWriter(RedisLink(server.url), 'd'),{'d'}
    def begin(signature):
        prefixes.add(writer.begin({**PLAN, 'signature':signature}, overwrite=True)['prefix'])
        writer.close()
    begin('a')
    begin('b')
    for signature in 'cd':
        client.set('d:ingest', client.get('d:ingest')[:-5])
        begin(signature)
    assert len(prefixes)==5

def test_a_damaged_entry_of_the_register_keeps_its_keys_and_stops_nothing(client, server):
    write(server.url)
    ranges = [['d:txt:','5']],[['d:txt:',0,5,0]]
    for stored in '[[]]','{"ranges":[]}','['*100_000,*(seal({'entry':'other', 'ranges':some}) for some in ranges):
        client.hset('d:register', 'other', stored)
        with pytest.warns(UserWarning, match="d:register has a damaged entry b'other': the keys of 'd' that it names"):
            write(server.url, overwrite=True)
        assert not is_damaged(server.url) and client.hexists('d:register', 'other'), stored[:20]
    with pytest.warns(UserWarning, match='damaged entry'): RedisStore.delete(server.url, 'd')
    for act in RedisStore.delete,RedisStore.abandon:
        with pytest.warns(UserWarning, match='damaged entry'), pytest.raises(StoreNotFound): act(server.url, 'd')
    client.hdel('d:register', 'other')
    assert client.keys()==[b'fastai_remote:used']

@pytest.mark.slow
def test_a_flipped_bit_of_a_name_in_the_register_removes_nothing(client, server):
    "The entry seems to be that of another dataset, which nobody needs; its keys are those of this one"
    write(server.url)
    store = RedisStore(server.url, 'd').edit(set={'txt':{0:'new'}})
    want = store[:]
    for entry,stored in client.hgetall('d:register').items():
        for bit in range(0, 8*len(entry), 19):
            client.hdel('d:register', entry)
            client.hset('d:register', flipped(entry, bit), stored)
            with pytest.warns(UserWarning, match='d:register has a damaged entry'): store.clean()
            assert store[:]==want and not is_damaged(server.url)
            client.hdel('d:register', flipped(entry, bit))
            client.hset('d:register', entry, stored)

def test_who_comes_second_is_told_so_also_if_plan_or_lock_are_damaged(client, server):
    "A damaged lock is waited for until its lease ends, as that of another machine: nobody knows who has it"
    writer = RedisWriter(RedisLink(server.url), 'd')
    writer.begin(dict(PLAN))
    def second(): return RedisWriter(RedisLink(server.url), 'd').begin({})
    try:
        client.set('d:ingest', b'{"n":10}')
        with pytest.raises(StoreBusy, match="is writing 'd' now; if it is dead"): second()
        unfinished, = RedisStore.unfinished(server.url)
        assert (unfinished['name'],unfinished['of'],unfinished['began'])==('d',0,'') and unfinished['running']
        lock = json.loads(client.get('d:ingest:lock'))
        for content in ({**lock, 'pid':'x'}, {**lock, 'host':5}, {'host':lock['host']}, [1]):
            client.set('d:ingest:lock', json.dumps(content))
            with pytest.raises(StoreBusy, match="process unknown on unknown is writing 'd' now"): second()
    finally: writer.close()

@pytest.mark.parametrize('old,new', [(b'"gaps":[',b'"gaps":[4'), (b'{"',b'"')])
def test_chunks_whose_records_are_damaged_are_written_again(client, server, old, new):
    "Also without a checksum"
    for more in (b'"crc"',b'"crb"'),(b'',b''):
        go,key = interrupted(server),record_key(client, 1)
        client.set(key, client.get(key).replace(old, new).replace(*more))
        go()
        assert len(contents(server.url))==9 and not is_damaged(server.url)
        client.flushall()

@pytest.mark.parametrize('fails_from', [100,95])
def test_a_chunk_whose_record_is_damaged_in_a_commit_is_written_again(client, server, monkeypatch, fails_from):
    "Also if samples of it fail then: no code of the first commit stays behind the last sample"
    def go(): return write(server.url, range(3, 100), Stopping(), chunk=7)
    def interrupt(*args): raise KeyboardInterrupt
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(RedisWriter, 'publish', interrupt)
        go()
    client.set(record_key(client, 13), b'{"ok"')   # the last one
    monkeypatch.setattr(Stopping, 'fails_from', fails_from)
    go()
    assert len(contents(server.url))==fails_from-3 and not is_damaged(server.url)
