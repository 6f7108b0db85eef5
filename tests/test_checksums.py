"A flipped bit in any stored byte of a dataset in Redis is found: by `verify`, and by whoever trains on it; or it was repaired"
import base64, io, json, random, struct, zlib
from pathlib import Path

import numpy as np
import pytest
import redis
from fastai.data.core import DataLoaders
from PIL import Image

import fastai_remote.block
from conftest import fails, in_time
from fastai_remote import CorruptSample, MissingSample, StoreBusy, StoreError, StoreNotFound, UnsupportedFormat, to_redis
from fastai_remote.core import Manifest, seal
from fastai_remote.store.base import MemoryStore
from fastai_remote.store.redis import RedisStore
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.write.base import is_alive
from fastai_remote.write.redis import RedisWriter
from fastai_remote.load.dataset import RemoteDataset
from faultproxy import FaultProxy

DATA = Path(__file__).parent/'data'

def sample(i):
    if i==2: raise ValueError('no sample two')
    return {'bin':bytes([i%251])*3, 'cls':['bird','cat','dog'][i%3], 'kind.cls':[3,7][i%2], 'id':i*1_000_003-5, 'target.f4':i/8-.5, 'labels':[f'l{i%2}'], 'txt':f'ë{i}'}

def put(server, name='d', items=range(6), fn=sample, **kw): return to_redis(list(items), server.url, name, fn, **{'num_workers':1, 'shuffle':False, 'progress':False, **kw})

@pytest.fixture
def tiny(fresh):
    "Five samples, of six"
    put(fresh, chunk=4)
    return RedisStore(fresh.url, 'd')

def client(server): return redis.Redis.from_url(server.url)

def flips(b, bits=range(8)):
    "`b` with one bit flipped, for each bit of each byte"
    for k in range(len(b)):
        for bit in bits: yield k,b[:k]+bytes([b[k]^1<<bit])+b[k+1:]

def each_flip(c, key, bits=range(8)):
    "Flip each bit of what `key` holds in turn, names within a hash and members of a set, too; then put it right"
    t = c.type(key).decode()
    if t=='string':
        was = c.get(key)
        for k,b in flips(was, bits): c.set(key, b); yield f'{key.decode()} byte {k}'
        c.set(key, was)
    elif t=='hash':
        for name,was in c.hgetall(key).items():
            for k,b in flips(was, bits): c.hset(key, name, b); yield f'{key.decode()} {name} byte {k}'
            c.hdel(key, name)
            for k,b in flips(name, bits):
                if c.hsetnx(key, b, was): yield f'{key.decode()} name {name} byte {k}'; c.hdel(key, b)
            c.hset(key, name, was)
    else:
        for was in c.smembers(key):
            c.srem(key, was)
            for k,b in flips(was, bits): c.sadd(key, b); yield f'{key.decode()} member {was} byte {k}'; c.srem(key, b)
            c.sadd(key, was)

def found(url, name='d'):
    "Does opening or `verify` notice damage?"
    try: rep = RedisStore(url, name).verify(num_workers=1)
    except (CorruptSample,UnsupportedFormat): return True
    return rep.bad>0 and 'all good' not in repr(rep)

# --- every bit

def size_of(field): return 4 if field.endswith('.crc') else 5 if field.endswith('cls') else {'id':12, 'target.f4':8}[field]

def is_trained_on(key, what, n):
    "Does an epoch over all fields read the byte that `what` names?"
    _,field,*_ = key.decode().split(':')
    if '#' not in field: return True   # a value of its own
    field = field.split('#')[0]
    return field!='~failures' and int(what.split()[-1])<n*size_of(field)   # behind that is what samples that were moved have left

def test_every_flipped_bit_is_found(fresh):
    "In each value, checksum, list of failures and name; by training as well, where it reads them"
    put(fresh, items=range(4))
    s,c,trained = RedisStore(fresh.url, 'd'),client(fresh),0
    assert s.verify(num_workers=1).bad==0
    for key in sorted(c.keys()):
        if key==b'd:meta': continue
        for what in each_flip(c, key):
            assert s.verify(num_workers=1).bad, f'{what}: not found'
            if key==b'fastai_remote:names' or not is_trained_on(key, what, len(s)): continue
            with pytest.raises(CorruptSample, match="^d: sample [0-2], field '.*key d:.*ingest it again"): s.get_many(range(len(s)), s.fields, check=True)
            trained += 1
    assert trained>1000 and s.verify(num_workers=1).bad==0

def test_every_flipped_bit_of_the_manifest_is_found(fresh, tiny):
    c,was = client(fresh),client(fresh).get('d:meta')
    for k,b in flips(was):
        try: m = Manifest.from_json(b, 'd')
        except (CorruptSample,UnsupportedFormat): continue
        c.set('d:meta', b)   # it means the same
        assert m==tiny.manifest and found(fresh.url), f'byte {k}: {b[max(0, k-20):k+20]}'
    for k,b in list(flips(was))[::997]:
        c.set('d:meta', b)
        with pytest.raises((CorruptSample,UnsupportedFormat), match='d'): RedisStore(fresh.url, 'd')
        rep = tiny.verify(num_workers=1)   # opened before
        assert rep.bad and 'manifest' in dict(rep.rest)

def test_flips_that_mean_the_same_are_found():
    "An exponent, an escape, a digit beyond the precision of a float"
    m = Manifest('d', 3, {}, stats={'jpg':{'mean':[1e-05,2.5e-07,0.30000000000000004]}}, vocab={'cls':['\x1f\x0b','é','\\u00ff']})
    b = m.to_json().encode()
    same = 0
    for _,o in flips(b):
        try: got = Manifest.from_json(o)
        except (CorruptSample,UnsupportedFormat): continue
        same += 1
        assert got.altered(o)
    assert same>2 and not Manifest.from_json(b).altered(b)

@pytest.mark.parametrize('change', [dict(format=1), dict(format=0), dict(format=-1), dict(format=True), dict(crc=None), dict(crc=0), dict(n=4), dict(uid='f'*32), dict(news=1)], ids=str)
def test_a_changed_manifest_is_refused(fresh, tiny, change):
    "No change turns the check off"
    c = client(fresh)
    c.set('d:meta', json.dumps({**json.loads(c.get('d:meta')), **change}))
    with pytest.raises((CorruptSample,UnsupportedFormat), match='d: '): RedisStore(fresh.url, 'd')

@pytest.mark.parametrize('number', [0, -1, 1, 3, 5, 6, 99])
def test_a_format_number_that_was_changed_is_damage(number):
    "The checksum shows that it is not a newer format"
    content = json.loads(Manifest('d', 3, {}).to_json())
    assert content['format']==2
    changed = json.dumps({**content, 'format':number}).encode()
    with pytest.raises(CorruptSample, match='d: .*does not match its checksum'): Manifest.from_json(changed, 'd')
    newer = seal({**content, 'format':99})
    with pytest.raises(UnsupportedFormat, match='format 99.*upgrade'): Manifest.from_json(newer.encode(), 'd')

def test_a_manifest_without_its_checksum_is_refused(fresh, tiny):
    c = client(fresh)
    d = json.loads(c.get('d:meta'))
    c.set('d:meta', json.dumps({k:v for k,v in d.items() if k!='crc'}))
    with pytest.raises(CorruptSample, match='d: the manifest does not match its checksum'): RedisStore(fresh.url, 'd')

def test_a_manifest_laid_out_anew_is_read(fresh, tiny):
    "The checksum is of the content"
    c,want = client(fresh),tiny.get_many(range(5), 'txt')
    d = json.loads(c.get('d:meta'))
    for s in (json.dumps(d, indent=2), json.dumps(dict(sorted(d.items()))), json.dumps(d, separators=(',',':'), sort_keys=True)):
        c.set('d:meta', s)
        s = RedisStore(fresh.url, 'd')
        assert s.get_many(range(5), 'txt', check=True)==want and s.verify(num_workers=1).bad==0

def test_a_dataset_with_a_damaged_manifest_can_be_replaced_and_deleted(fresh, tiny):
    c = client(fresh)
    def damage(name): c.set(f'{name}:meta', c.get(f'{name}:meta').replace(b'"bird"', b'"bIrd"'))
    damage('d')
    with pytest.raises(CorruptSample, match='d: the manifest .*ingest the dataset again'): put(fresh)
    with pytest.warns(UserWarning, match='the manifest of .d. is damaged'): put(fresh, overwrite=True)
    s = RedisStore(fresh.url, 'd')
    assert [o['id'] for o in s]==[sample(i)['id'] for i in (0,1,5,3,4)] and s.verify(num_workers=1).bad==0
    damage('d')
    with pytest.warns(UserWarning, match='the manifest of .d. is damaged'): RedisStore.delete(fresh.url, 'd')
    with pytest.raises(StoreNotFound): RedisStore(fresh.url, 'd')
    assert RedisStore.names(fresh.url)==[]

# --- labels and numbers

@pytest.mark.parametrize('field', ['cls','kind.cls','id','target.f4'])
def test_a_flipped_bit_of_a_number_names_sample_field_and_place(fresh, tiny, field):
    c,w = client(fresh),size_of(field)
    c.setbit(k:=f'd:{field}#0', bit:=3*8*w+5, 1-c.getbit(k, bit))
    for f in (lambda: tiny.get_many([0,3,4], field, check=True), lambda: tiny[3], lambda: tiny.get_many([3], tiny.fields, check=True)):
        with pytest.raises(CorruptSample, match=f"d: sample 3, field '{field}': the value .* does not match its checksum.*key d:{field}#0 at byte {3*w}.*ingest it again"): f()
    assert tiny[2]['id']==sample(5)['id']
    rep = tiny.verify(num_workers=1)
    assert (rep.bad,[i for i,_ in rep.failures])==(1,[3]) and 'all good' not in repr(rep)
    assert len(tiny.get_many([3], field, check=False)[field])==1   # as it is, where nobody wants it compared

def test_a_value_in_the_wrong_place_is_found(fresh, tiny):
    "The checksum of a number is of its sample number, too"
    c = client(fresh)
    c.setrange('d:cls#0', 15, c.getrange('d:cls#0', 0, 4))
    with pytest.raises(CorruptSample, match="sample 3, field 'cls'"): tiny.get_many([3], 'cls', check=True)
    b = c.get('d:id#0')
    c.set('d:id#0', b[12:]+b[:12])   # shifted
    assert [i for i,_ in tiny.verify(num_workers=1).failures]==[0,1,2,3,4]

def test_values_far_apart(fresh):
    "The same where each is asked for by itself"
    put(fresh, items=range(3000), fn=lambda i: sample(i+3), chunk=500)
    s,c,at = RedisStore(fresh.url, 'd'),client(fresh),[2999,0,1500,7]
    want = [sample(i+3) for i in at]
    got = s.get_many(at, ['cls','kind.cls','id','target.f4'], check=True)
    for f,vs in got.items(): assert [s.decode(0, f, v) for v in vs]==[o[f] for o in want]
    for f,w in (('cls',5),('id',12),('target.f4',8)):
        for bit in range(8*w):
            c.setbit(k:=f'd:{f}#0', a:=8*w*1500+bit, 1-c.getbit(k, a))
            with pytest.raises(CorruptSample, match=f"sample 1500, field '{f}'"): s.get_many(at, f, check=True)
            c.setbit(k, a, 1-c.getbit(k, a))
    assert s.get_many(at, ['id'], check=True)['id'].tolist()==[o['id'] for o in want]

@pytest.fixture
def pics(fresh):
    def jpg(i):
        Image.new('L', (8,8), 4*i).save(b:=io.BytesIO(), 'JPEG')
        return b.getvalue()
    put(fresh, 'pics', range(24), lambda i: {'jpg':jpg(i), 'cls':'abc'[i%3]}, splits={'train':None, 'valid':4})
    return RedisStore(fresh.url, 'pics')

@pytest.mark.parametrize('num_workers', [0,2])
def test_an_epoch_with_a_flipped_label_fails(fresh, pics, num_workers):
    "With fastai's loaders, balanced ones, and PyTorch's"
    c = client(fresh)
    c.setbit('pics:cls#0', bit:=8*5*11+6, 1-c.getbit('pics:cls#0', bit))   # 'c' is 'a'
    def dl(**kw): return DataLoaders.from_store(pics, bs=4, num_workers=num_workers, device='cpu', **kw).train.new(drop_last=False)
    message = "pics: sample 11, field 'cls': the value .* does not match its checksum"
    with in_time(), fails(CorruptSample, match=message): list(dl())
    with in_time(), fails(CorruptSample, match=message): list(dl(balance='cls'))
    from torch.utils.data import DataLoader
    with in_time(), fails(CorruptSample, match=message): list(DataLoader(RemoteDataset(pics).decode('pil').to_tuple('jpg', 'cls'), batch_size=4, num_workers=num_workers, collate_fn=list))

def test_verify_of_a_store_in_memory_says_that_numbers_have_no_checksums():
    s = MemoryStore({'cls':np.array([0,1,1], np.uint8), 'txt':[b'a',b'b',b'c']}, vocab={'cls':['x','y']})
    assert 'all good' not in repr(s.verify(num_workers=1)) and 'no checksums: cls' in repr(s.verify(num_workers=1))

@pytest.mark.parametrize('damage', [lambda b: b[:-5], lambda b: b[:30], lambda b: b'\xff'+b[1:], lambda b: b.replace(b'"format"', b'"fprmat"')])
def test_a_manifest_that_cannot_be_parsed_is_replaced_or_deleted_if_asked_for(fresh, tiny, damage):
    c = client(fresh)
    c.set('d:meta', damage(c.get('d:meta')))
    with pytest.raises(UnsupportedFormat, match=r"d: not a manifest.*overwrite=True.*RedisStore.delete\(url, 'd'\)"): put(fresh)
    with pytest.warns(UserWarning, match="the manifest of 'd' is damaged: the dataset is dropped"): put(fresh, overwrite=True)
    assert not found(fresh.url)
    c.set('d:meta', damage(c.get('d:meta')))
    with pytest.warns(UserWarning, match="the manifest of 'd' is damaged: the dataset is dropped"): RedisStore.delete(fresh.url, 'd')
    assert not c.exists('d:meta') and not c.sismember('fastai_remote:names', 'd')

@pytest.mark.parametrize('content', [b'hello', b'{"a":1}', b'[1]', b'{"format":99}'])
def test_a_manifest_of_another_program_or_a_newer_version_is_kept(fresh, tiny, content):
    c = client(fresh)
    name = 'd' if b'99' in content else 'other'   # the first is listed as one of ours
    c.set(f'{name}:meta', content)
    message = 'upgrade fastai_remote' if name=='d' else 'if another program wrote it, choose another name'
    for act in (lambda: put(fresh, name, overwrite=True), lambda: RedisStore.delete(fresh.url, name)):
        with pytest.raises(UnsupportedFormat, match=message): act()
    assert c.get(f'{name}:meta')==content

# --- what lies beside the samples

def test_a_lost_list_of_failures_is_found(fresh, tiny):
    c = client(fresh)
    assert list(tiny.failures())==[('item 2','ValueError: no sample two')]
    was = c.hgetall('d:~failures#0')
    c.delete('d:~failures#0')
    rep = tiny.verify(num_workers=1)
    assert rep.bad==1 and 'd:~failures#0 has 0 failures, where the manifest counts 1' in repr(rep)
    c.hset('d:~failures#0', 0, was[b'0'].replace(b'two', b'tvo'))
    with pytest.raises(CorruptSample, match='d: d:~failures#0: the failures of chunk 0 are damaged'): list(tiny.failures())
    assert tiny.verify(num_workers=1).bad==1

def test_bytes_behind_the_last_sample(fresh, tiny):
    "Samples that were moved leave zeros; anything else there is damage"
    c = client(fresh)
    for f,w in (('id',12),('target.f4',8),('bin.crc',4)): assert c.get(f'd:{f}#0')[5*w:].strip(b'\0')==b''
    c.append('d:cls#0', b'\0\1')
    c.setrange('d:id#0', 70, b'x')
    rep = tiny.verify(num_workers=1)
    assert rep.bad==2 and 'd:cls#0 has bytes that are not zero behind its last value, at byte 26' in repr(rep) and 'at byte 70' in repr(rep)

def test_a_column_cut_off(fresh, tiny):
    c = client(fresh)
    c.set('d:id#0', c.get('d:id#0')[:40])
    with pytest.raises(MissingSample, match="field 'id'"): tiny.get_many([3], 'id')
    assert tiny.verify(num_workers=1).bad==2

def test_a_renamed_dataset_is_not_overwritten_by_the_next_of_its_name(fresh, tiny):
    "What keeps a new dataset off the keys of a renamed one is verified with that"
    s,c = tiny.rename('new'),client(fresh)
    assert s.verify(num_workers=1).bad==0
    c.hset('fastai_remote:generations', 'd', 0)
    assert s.verify(num_workers=1).bad==1

# --- what has no checksums

@pytest.fixture
def golden(fresh):
    "tests/data/redis-v1.json, which was written once, by an earlier version, and is never written again"
    c = client(fresh)
    b = base64.b64decode
    for k,(t,v) in json.loads((DATA/'redis-v1.json').read_text()).items():
        if t=='string': c.set(k, b(v))
        elif t=='set': c.sadd(k, *map(b, v))
        else: c.hset(k, mapping={b(n):b(o) for n,o in v.items()})
    return fresh

def old_sample(i): return {'txt':f'sämple {i}', 'cls':['bird','cat','dog'][i%3], 'id':i*1_000_003-5, 'target.f4':i/8-.5, 'exact.f8':i/7, 'half.f2':i/2, 'small.i1':-i, 'labels':[f'l{i%2}','x']}

def test_format_1_is_read(golden):
    s = RedisStore(golden.url, 'old')
    assert (len(s),s.manifest.format,s.splits,s.vocab,s.manifest.failed)==(11,1,{'train':[0,8],'valid':[8,11]},['bird','cat','dog'],1)
    d = s.get_many(range(11), s.fields, check=True)
    ids = [(i+5)//1_000_003 for i in d['id'].tolist()]
    assert sorted(ids[:8])==[0,1,2,3,5,6,7,8] and sorted(ids[8:])==[9,10,11]
    for k,i in enumerate(ids):
        o = s[k]
        assert {f:o[f] for f in old_sample(i)}==old_sample(i) and o['npy'].tolist()==list(range(i)) and o['jpg'].size==(10,12)
    assert s.get_many([10,0], ['id','cls'], check=True)['id'].tolist()==[d['id'][10],d['id'][0]]
    assert list(s.failures())==[('train: item 4','ValueError: no sample four')]
    n = RedisStore(golden.url, 'numbers')
    assert n.vocab==list(range(8)) and [o['cls'] for o in n]==[3,7]*3 and [o['kind.cls'] for o in n]==[12,13]*3 and [o['sign.cls'] for o in n]==[-1,-2,-3,-4,-5,-6]

def test_verify_of_format_1_says_what_it_did_not_check(golden):
    s = RedisStore(golden.url, 'old')
    rep = s.verify(num_workers=1)
    assert rep.bad==0 and 'all good' not in repr(rep) and 'no checksums: cls, id, target.f4, exact.f8, half.f2, small.i1, manifest, failures' in repr(rep)
    assert 'no checksums' in rep._repr_html_()
    client(golden).setrange('old:jpg:3', 50, b'xx')
    assert s.verify(num_workers=1).bad==1

def test_format_1_is_copied_renamed_replaced_and_deleted(golden):
    s = RedisStore(golden.url, 'old')
    s.copy(golden.url, 'copy', num_workers=1, progress=False)
    c = RedisStore(golden.url, 'copy')
    assert 'all good' in repr(c.verify(num_workers=1)) and c.manifest.format==2
    assert all(a['txt']==b['txt'] and a['cls']==b['cls'] and a['id']==b['id'] and a['exact.f8']==b['exact.f8'] for a,b in zip(s, c))
    r = s.rename('renamed')
    assert r.verify(num_workers=1).bad==0 and [o['id'] for o in r]==[o['id'] for o in c]
    put(golden, 'numbers', overwrite=True)
    assert RedisStore(golden.url, 'numbers').verify(num_workers=1).bad==0
    for k in ('renamed','numbers','copy'): RedisStore.delete(golden.url, k)
    assert {k for k in client(golden).keys()}<={b'fastai_remote:generations'}

def test_verify_of_others_keys_says_that_there_are_no_checksums(fresh):
    c = client(fresh)
    for i in range(4): np.save(b:=io.BytesIO(), np.full((3,3), i, np.uint8)); c.set(f'x:{i}', b.getvalue()); c.set(f'y:{i}', i%2)
    s = RedisStore.from_keys(fresh.url, 'x:{}', 'y:{}', 4, codec='npy', vocab=['a','b'])
    rep = s.verify(num_workers=1)
    assert rep.bad==0 and 'all good' not in repr(rep) and 'no checksums: x, cls' in repr(rep)
    assert 'checksums' in RedisStore.from_keys.__doc__

# --- damaged on the way

class Spoiler(FaultProxy):
    "Flips a bit of answers that contain `spoil`, `times` times"
    spoil,times = None,0
    async def _pipe(self, r, w, answer=False):
        if answer:
            read = r.read
            async def spoilt(n):
                b = await read(n)
                if self.times and self.spoil and (k:=b.find(self.spoil))>=0:
                    self.times -= 1
                    k += len(self.spoil)-1
                    b = b[:k]+bytes([b[k]^1])+b[k+1:]
                return b
            r.read = spoilt
        await super()._pipe(r, w, answer)

@pytest.mark.parametrize('field,spoil', [('txt','ë3'.encode()), ('cls',struct.pack('>BI', 0, zlib.crc32(struct.pack('>BQ', 0, 3)))), ('id',(3*1_000_003-5).to_bytes(8, 'big')), ('cls',b'$25\r\n'), ('cls',b'"uid":"')])
def test_an_answer_damaged_on_its_way_is_asked_for_again(fresh, tiny, field, spoil):
    want = tiny.get_many(range(5), field)[field]
    with Spoiler(str(fresh.socket)) as p:
        s = RedisStore(f'redis://127.0.0.1:{p.port}', 'd', socket_timeout=1)
        for times in (1,2):
            p.spoil,p.times = spoil,times
            got = s.get_many(range(5), field, check=True)[field]
            assert list(got)==list(want) and p.times==0
    assert [o['id'] for o in tiny]==[sample(i)['id'] for i in (0,1,5,3,4)]

def test_an_answer_that_is_always_damaged_is_damage(fresh, tiny):
    with Spoiler(str(fresh.socket)) as p:
        s = RedisStore(f'redis://127.0.0.1:{p.port}', 'd')
        p.spoil,p.times = 'ë3'.encode(),1<<30
        with pytest.raises(CorruptSample, match="sample 3, field 'txt'.*key d:txt:3"): s.get_many(range(5), 'txt', check=True)

# --- before the dataset is there

def content(url): return sorted(json.dumps({**{k:v for k,v in o.items() if k!='bin'}, 'bin':list(o['bin'])}, sort_keys=True) for o in RedisStore(url, 'd'))

def interrupted(server):
    "An ingest that is all but done; call what comes back to go on with it"
    def go(): return to_redis([1,2,3,4,5,6,7,8,9,0], server.url, 'd', Stopping(), num_workers=1, shuffle=False, progress=False, chunk=3)
    Stopping.on = True
    with pytest.raises(KeyboardInterrupt): go()
    Stopping.on = False
    return go

class Stopping:
    "`sample`, but for a time not of 0"
    on = False
    def __call__(self, i):
        if i==0 and Stopping.on: raise KeyboardInterrupt
        return sample(i)

def test_no_flipped_bit_of_an_unfinished_ingest_goes_unnoticed(fresh):
    "Whatever is flipped before the same call goes on: what it makes is right, or the damage is found, then or by `verify`"
    c,rng = client(fresh),random.Random(0)
    go = interrupted(fresh)
    keys = {k:c.dump(k) for k in c.keys() if not k.endswith(b':lock')}
    places = [(k,j) for k in sorted(keys) for j,_ in enumerate(each_flip(c, k))]
    go()
    want,outcomes = content(fresh.url),{'right':0, 'refused':0, 'found':0}
    assert len(want)==9 and not found(fresh.url)
    labels = [o for o in places if b'~#0' in o[0] or b'vocab' in o[0] or b'chunks' in o[0]]
    for key,j in rng.sample(places, 90)+rng.sample(labels, 60):
        c.flushall()
        for k,v in keys.items(): c.restore(k, 0, v)
        for i,_ in enumerate(each_flip(c, key)):
            if i==j: break
        try: go()
        except (StoreError,redis.ResponseError):
            assert not c.exists('d:meta')
            outcomes['refused'] += 1
            continue
        if found(fresh.url): outcomes['found'] += 1
        else:
            assert content(fresh.url)==want, f'{key} {j}'
            outcomes['right'] += 1
    assert min(outcomes.values())>3, outcomes

def test_a_flipped_bit_of_a_label_that_is_not_numbered_yet(fresh):
    "A hash of a label, before the commit: said, with what to do"
    go,c,bit = interrupted(fresh),client(fresh),3*12*8+3
    for key in ('d:cls~#0','d:kind.cls~#0'):
        c.setbit(key, bit, 1-c.getbit(key, bit))
        with pytest.raises(CorruptSample, match=f"d: the value of .*cls' for sample 3, in key {key}.*is damaged: RedisStore.abandon.*then ingest again"): go()
        c.setbit(key, bit, 1-c.getbit(key, bit))
    go()
    assert not found(fresh.url)

def test_a_damaged_plan_is_refused_and_can_be_dropped(fresh):
    go,c = interrupted(fresh),client(fresh)
    c.set('d:ingest', c.get('d:ingest').replace(b'"n":10', b'"n":11'))
    with pytest.raises(CorruptSample, match=r"the plan of an unfinished ingest of 'd', d:ingest, \(RedisStore.abandon"): go()
    assert [(o['name'],o['of'],o['began']) for o in RedisStore.unfinished(fresh.url)]==[('d',0,'')]
    with pytest.warns(UserWarning, match='is dropped'): RedisStore.abandon(fresh.url, 'd')
    go()
    assert len(content(fresh.url))==9 and not found(fresh.url) and RedisStore(fresh.url, 'd').manifest.prefix!='d'

def test_an_ingest_never_gets_the_keys_of_one_that_was_dropped_with_its_damaged_plan(fresh):
    "Also if that one has itself replaced an unfinished ingest"
    put(fresh)
    c,writer = client(fresh),RedisWriter(RedisLink(fresh.url), 'd')
    def begin(signature):
        plan = dict(n=1, chunk=1, fields={}, splits=None, vocab={}, signature=signature, stats=None)
        try: return writer.begin(plan, overwrite=True)['generation']
        finally: writer.close()
    generations = [begin('a'),begin('b')]
    for signature in 'cd':
        c.set('d:ingest', c.get('d:ingest')[:-5])
        with pytest.warns(UserWarning, match='is dropped'): generations.append(begin(signature))
    assert generations==[2,3,4,5]

@pytest.mark.parametrize('listed', ['[1]', '[[]]', '[["d:txt:"]]', '[["d:txt:","5"]]', '[["d:txt:",0,5,0]]', '[[5,5]]', '[["d:txt:",0,5]]', '[null]',
    '{"ranges":[]}', '5', '[["d:txt:",2.5]]', pytest.param('['*100_000, id='deep')])
def test_a_damaged_list_of_garbage_keeps_its_keys_and_stops_nothing(fresh, tiny, listed):
    c = client(fresh)
    c.set('d:garbage', listed)
    with pytest.warns(UserWarning, match="the list of keys that 'd' no longer needs, is damaged"): put(fresh, overwrite=True)
    assert not found(fresh.url) and not c.exists('d:garbage')

def test_garbage_of_earlier_versions_is_removed(fresh):
    c = client(fresh)
    c.mset({'d@7:txt:0':'x', 'd@7:txt:1':'x', 'd@7:txt:2':'x'})
    c.set('d:garbage', '[["d@7:txt:", 2]]')
    put(fresh)
    assert [k for k in c.keys() if k.startswith(b'd@7')]==[b'd@7:txt:2']

@pytest.mark.parametrize('plan', [b'[1]', b'{"n":10}', b'5', b'{"open":false,"began":"x"}', b'\xff'])
def test_who_comes_second_is_told_so_also_if_the_plan_is_damaged(fresh, plan):
    "Without how far the first one is"
    writer = RedisWriter(RedisLink(fresh.url), 'd')
    writer.begin(dict(n=1, chunk=1, fields={}, splits=None, vocab={}, signature='s', stats=None))
    try:
        client(fresh).set('d:ingest', plan)
        with pytest.raises(StoreBusy, match="is writing 'd' now; if it is dead"): RedisWriter(RedisLink(fresh.url), 'd').begin({})
        unfinished, = RedisStore.unfinished(fresh.url)
        assert unfinished['name']=='d' and unfinished['of']==0 and unfinished['running'] and not unfinished['began']
    finally: writer.close()

@pytest.mark.parametrize('damage', [lambda d: {**d, 'pid':'x'}, lambda d: {**d, 'pid':None}, lambda d: {'host':d['host']}, lambda d: {**d, 'host':5},
    lambda d: {**d, 'host':''}, lambda d: [1], lambda d: {}])
def test_a_damaged_lock_is_waited_for(fresh, damage):
    "Until its lease ends, as that of another machine: nobody knows who has it"
    writer = RedisWriter(RedisLink(fresh.url), 'd')
    writer.begin(dict(n=1, chunk=1, fields={}, splits=None, vocab={}, signature='s', stats=None))
    try:
        client(fresh).set('d:ingest:lock', json.dumps(damage(json.loads(client(fresh).get('d:ingest:lock')))))
        with pytest.raises(StoreBusy, match="process unknown on unknown is writing 'd' now"): RedisWriter(RedisLink(fresh.url), 'd').begin({})
    finally: writer.close()

def test_a_number_that_no_process_has(): assert not is_alive(1<<70)

def test_damaged_records_of_chunks_are_written_again(fresh):
    go,c = interrupted(fresh),client(fresh)
    c.hset('d:ingest:chunks', 1, c.hget('d:ingest:chunks', 1).replace(b'"gaps":[', b'"gaps":[4'))
    c.hset('d:ingest:chunks', 0, b'{"ok"')
    go()
    assert len(content(fresh.url))==9 and not found(fresh.url)

def test_a_record_whose_checksum_has_lost_its_name_is_written_again(fresh):
    go,c = interrupted(fresh),client(fresh)
    c.hset('d:ingest:chunks', 1, c.hget('d:ingest:chunks', 1).replace(b'"gaps":[', b'"gaps":[4').replace(b'"crc"', b'"crb"'))
    go()
    assert len(content(fresh.url))==9 and not found(fresh.url)

class FailsFrom:
    "`sample`, but not of numbers from `at` on"
    at = 100
    def __call__(self, i):
        if i>=FailsFrom.at: raise ValueError('bad')
        return sample(i)

@pytest.mark.parametrize('at', [100,98,95])
def test_a_chunk_whose_record_is_damaged_in_a_commit_without_gaps_is_written_again(fresh, monkeypatch, at):
    "Also if a sample of it fails then: no code of the first commit stays behind the last sample"
    def go(): return to_redis(range(3, 100), fresh.url, 'd', FailsFrom(), num_workers=1, shuffle=False, progress=False, chunk=7)
    original,c = RedisWriter._encode_staged,client(fresh)
    def interrupted(self, *args):
        original(self, *args)
        raise KeyboardInterrupt
    with monkeypatch.context() as patched:
        patched.setattr(RedisWriter, '_encode_staged', interrupted)
        with pytest.raises(KeyboardInterrupt): go()
    c.hset('d:ingest:chunks', 13, b'{"ok"')   # the last one
    monkeypatch.setattr(FailsFrom, 'at', at)
    go()
    assert len(content(fresh.url))==at-3 and not found(fresh.url)

def test_a_damaged_counter_gives_no_chunk_twice(fresh):
    "Where chunks take their numbers as they are written"
    def row(i): return {'id':i, 'cls':'ab'[i%2]}
    with RedisStore.writer(fresh.url, 'd', row(0), chunk=4) as w:
        recs = list(w(map(row, range(10))))
        client(fresh).set('d:ingest:next', 1)
        recs += list(w(map(row, range(10, 20))))
        client(fresh).set('d:ingest:next', 2)
        w.commit(recs)
    s = RedisStore(fresh.url, 'd')
    assert sorted(o['id'] for o in s)==list(range(20)) and all(o['cls']=='ab'[o['id']%2] for o in s) and not found(fresh.url)
