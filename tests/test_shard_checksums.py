"Every stored byte of shards has a checksum: a flipped bit is found by `verify` and by training, and repaired where there is another copy"
import gc, gzip, io, os, random, re, shutil, tarfile, time, warnings, zlib
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from conftest import draw, fails
from fastai.data.block import DataBlock
from fastai.data.core import DataLoaders
from fastai.vision.augment import Resize
from PIL import Image
from torch.utils.data import DataLoader

import fastai_remote.block, fastai_remote.load.loader
from fastai_remote import (CorruptSample, RandomStoreSplitter, RemoteDataset, ShardBlock, ShardStore, StoreError, TieredStore, UnsupportedFormat,
    get_remote_items, index_shards, redis_server, to_shards)
from fastai_remote.write import folder_lock, shard_totals

DATA = Path(__file__).parent/'data'
mended = pytest.mark.filterwarnings('ignore:.*fetched again')   # said to whoever has a failing disk
workers = pytest.mark.parametrize('num_workers', [0,2])

# --- every bit

TINY = [{'bin':bytes([i])*5, 'cls':'ab'[i%2], 'code.cls':[-7,300][i//2%2], 'id':i<<40, 'target.f4':i/2} for i in range(4)]

def left_out(o):
    if o['id']==-1: raise ValueError('left out')
    return o

@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
    "Two shards of two samples, and one that was left out"
    d = tmp_path_factory.mktemp('tiny')/'tiny'
    to_shards([*TINY, {**TINY[0], 'id':-1}], d, left_out, num_workers=1, maxcount=2, chunk=2, shuffle=False, progress=False)
    return d

def flips(b, bits=range(8), step=1):
    "`b` with one bit flipped, of each `step`-th byte those of `bits`, or one at random"
    rng = random.Random(len(b))
    for k in range(rng.randrange(step), len(b), step):
        for bit in bits or [rng.randrange(8)]: yield k,b[:k]+bytes([b[k]^1<<bit])+b[k+1:]

def values_or_error(store):
    "All samples as they should be, or the error that says that they are not"
    try: got = [store[i] for i in range(len(store))]
    except StoreError as e: return e
    assert got==TINY

def finds(d):
    "Does opening or `verify` say that something is damaged?"
    try: s = ShardStore(d)
    except (CorruptSample,UnsupportedFormat): return True
    rest = list(s.check_rest())
    assert all(isinstance(what, str) and isinstance(why, str) for what,why in rest)
    return bool(rest) or s.verify(num_workers=1).bad>0

@pytest.mark.parametrize('name,bits,step', [('shard-000000.tar.fastai_remote',range(8),1), ('shard-000001.tar.fastai_remote',None,1), ('shard-failures.json',range(8),1), ('shard-000000.tar',None,3), ('shard-000001.tar',None,9), ('manifest.json',range(8),1)])
def test_each_flipped_bit_is_found(tiny, tmp_path, name, bits, step):
    "Wherever it is, one bit at a time; and no sample is read with another value"
    d = Path(shutil.copytree(tiny, tmp_path/'tiny'))
    assert not finds(d) and not ShardStore(d).unchecked
    b = (d/name).read_bytes()
    for k,x in flips(b, bits, step):
        (d/name).write_bytes(x)
        assert finds(d), f'bit {zlib.crc32(b)^zlib.crc32(x)} of byte {k} of {name}'
        if name.endswith('.tar'): values_or_error(ShardStore(d))
        else:
            try: values_or_error(ShardStore(d))
            except StoreError: pass
    (d/name).write_bytes(b)
    assert not finds(d)

def test_each_flipped_bit_of_a_value_is_found_by_reading(tiny, tmp_path):
    "All bits of all values, without `verify`"
    d = Path(shutil.copytree(tiny, tmp_path/'tiny'))
    b = (d/'shard-000001.tar').read_bytes()
    for i in (2,3):
        at = b.index(TINY[i]['bin'])
        for k in range(at, at+5):
            for bit in range(8):
                (d/'shard-000001.tar').write_bytes(b[:k]+bytes([b[k]^1<<bit])+b[k+1:])
                with pytest.raises(CorruptSample, match=f"tiny: sample {i}, field 'bin' in shard-000001.tar at byte {at:,}"): ShardStore(d)[i]

def test_damage_in_a_value_and_beside_it_are_told_apart(tiny, tmp_path):
    "`check_rest` leaves values to `verify`, which names their samples; of a tar it says when something else is damaged, whether a value is damaged as well or not"
    d = Path(shutil.copytree(tiny, tmp_path/'tiny'))
    b = (d/'shard-000000.tar').read_bytes()
    value,header = b.index(TINY[1]['bin']),20
    def flip(*at):
        x = bytearray(b)
        for k in at: x[k] ^= 4
        (d/'shard-000000.tar').write_bytes(x)
        return list(ShardStore(d).check_rest())
    assert flip(value)==flip(value, value+3)==[]
    for at in ((header,), (header,value), (value,len(b)-1)):
        (what,why), = flip(*at)
        assert what=='shard-000000.tar' and re.search('tiny: shard shard-000000.tar, with samples 0 to 1: .*outside the samples', why)
    (d/'shard-000000.tar').write_bytes(b[:-700])
    (what,why), = ShardStore(d).check_rest()
    assert what=='shard-000000.tar' and 'cut off' in why

@pytest.mark.parametrize('num_workers', [0,1,2])
def test_verify_reads_a_shard_that_replaced_another_one_since_an_earlier_verify(tiny, tmp_path, num_workers):
    "Also with the same store: neither this process nor a worker reads files that it has opened before"
    d = Path(shutil.copytree(tiny, tmp_path/'tiny'))
    store = ShardStore(d)
    assert store.verify(num_workers, chunk=1).bad==0
    whole = (d/'shard-000001.tar').read_bytes()
    at = whole.index(TINY[3]['bin'])
    (d/'new').write_bytes(whole[:at]+b'x'+whole[at+1:])
    os.replace(d/'new', d/'shard-000001.tar')
    for again in (store, ShardStore(d)):
        report = again.verify(num_workers, chunk=1)
        assert [number for number,_ in report.failures]==[3] and report.bad==1
    (d/'new').write_bytes(whole)
    os.replace(d/'new', d/'shard-000001.tar')
    assert store.verify(num_workers, chunk=1).bad==0

def test_damage_in_a_shard_and_in_its_index_is_not_explained(tiny, tmp_path):
    "Where the values are is not known then, so nobody can say what else is damaged"
    d = Path(shutil.copytree(tiny, tmp_path/'tiny'))
    for name in ('shard-000000.tar','shard-000000.tar.fastai_remote'):
        content = bytearray((d/name).read_bytes())
        content[content.index(TINY[1]['bin']) if name.endswith('.tar') else 20] ^= 4
        (d/name).write_bytes(content)
    reasons = dict(ShardStore(d).check_rest())
    assert sorted(reasons)==['shard-000000.tar','shard-000000.tar.fastai_remote']
    why = reasons['shard-000000.tar']
    assert re.search('with samples 0 to 1: .*its index is damaged, too.*all of it is suspect', why) and 'outside' not in why

@pytest.mark.parametrize('damage', [lambda b: b'\0'+b[1:], lambda b: b'', lambda b: b.replace(b'"uid":"', b'"uid":"x', 1), lambda b: b[:40]])
def test_a_damaged_manifest_is_not_said_to_be_replaced(tiny, tmp_path, damage):
    "By a reader that has opened the dataset before: what is wrong with the samples may come from another dataset, or not"
    d = Path(shutil.copytree(tiny, tmp_path/'tiny'))
    store,missing = ShardStore(d),ShardStore(d)
    gc.collect()   # what other tests have left, which may hold files
    fds = len(os.listdir('/proc/self/fd'))
    (d/'shard-000001.tar').unlink()
    (d/'manifest.json').write_bytes(damage((d/'manifest.json').read_bytes()))
    for read in (lambda: store[0], lambda: missing[3]):
        with pytest.raises((CorruptSample,UnsupportedFormat), match=f'{d}/manifest.json: '): read()
    assert len(os.listdir('/proc/self/fd'))<=fds

def test_what_is_missing_is_found(tiny, tmp_path):
    "An index, a shard, the file of failures"
    for name in ('shard-000001.tar.fastai_remote','shard-000001.tar','shard-failures.json'):
        d = Path(shutil.copytree(tiny, tmp_path/name/'tiny'))
        (d/name).unlink()
        assert any(name.split('.')[0] in what+why for what,why in ShardStore(d).check_rest())

def test_damaged_failures_are_not_shown(tiny, tmp_path):
    d = Path(shutil.copytree(tiny, tmp_path/'tiny'))
    assert len(list(ShardStore(d).failures()))==1
    b = (d/'shard-failures.json').read_bytes()
    (d/'shard-failures.json').write_bytes(b.replace(b'left', b'lefT'))
    with pytest.raises(CorruptSample, match='tiny: shard-failures.json.*samples are not affected'): list(ShardStore(d).failures())

def test_a_dataset_of_the_first_version_has_the_checks_it_had(tmp_path):
    "A value in a tar, and a value in an index, of golden shards"
    assert not list(ShardStore(DATA/'shards-v1').check_rest()) and ShardStore(DATA/'shards-v1').unchecked==['manifest','headers of indices','failures']
    d = Path(shutil.copytree(DATA/'shards-v1', tmp_path/'d'))
    b = (d/'shard-000000.idx').read_bytes()
    (d/'shard-000000.idx').write_bytes(b[:-3]+bytes([b[-3]^1])+b[-2:])
    with pytest.raises(CorruptSample, match='shards-v1: shard-000000.idx'): ShardStore(d)[0]
    assert [what for what,_ in ShardStore(d).check_rest()]==['shard-000000.idx']

# --- far away, with a cache

@pytest.fixture
def far(tiny):
    "The same far away (in fsspec's memory, which forked workers share)"
    return away(tiny)

def away(d, name='tiny'):
    fs = fsspec.filesystem('memory')
    if fs.exists(f'/far/{name}'): fs.rm(f'/far/{name}', recursive=True)
    for p in Path(d).rglob('*'):
        if p.is_file(): fs.pipe_file(f'/far/{name}/{p.relative_to(d)}', p.read_bytes())
    return f'memory://far/{name}'

def cached(url, cache, shards=2):
    "A store whose shards and indices are in the cache"
    s = ShardStore(url, cache=str(cache))
    s.prefetch(list(range(shards)), wait=True)
    s.get_many(range(len(s)), s.fields, check=True)
    return s

def in_cache(cache, end): return sorted(p for p in Path(cache).rglob('*') if p.name.endswith(end))

@mended
@pytest.mark.parametrize('end,bits,step', [('shard-000000.tar.fastai_remote',range(8),2), ('shard-000001.tar',None,7)])
def test_each_flipped_bit_in_the_cache_is_repaired(far, tmp_path, end, bits, step):
    "Values are right, never others; what `verify` finds is fetched again"
    cached(far, tmp_path/'c')
    p, = in_cache(tmp_path/'c', end)
    b = p.read_bytes()
    for n,(k,x) in enumerate(flips(b, bits, step)):
        p.write_bytes(x)
        if n%2:   # `verify` first, or reading
            assert [what for what,_ in ShardStore(far, cache=str(tmp_path/'c')).check_rest()]==[end]
            assert not p.exists() or p.read_bytes()==b
        s = ShardStore(far, cache=str(tmp_path/'c'))
        assert values_or_error(s) is None
        if end.endswith(".fastai_remote"): assert p.read_bytes()==b
        assert not n%2 or not list(s.check_rest())
        if p.exists() and p.read_bytes()!=b: p.unlink()

@mended
@pytest.mark.parametrize('end', ['shard-000000.tar.fastai_remote','shard-000000.tar'])
@pytest.mark.parametrize('damage', [lambda b: b'', lambda b: b[:len(b)//2], lambda b: b[:-1], lambda b: b+b'x', lambda b: bytes(len(b)), lambda b: b[::-1]], ids=['empty','half','short','long','zeros','backwards'])
def test_a_file_half_written_in_the_cache_is_fetched_again(far, tmp_path, end, damage):
    cached(far, tmp_path/'c')
    p, = in_cache(tmp_path/'c', end)
    b = p.read_bytes()
    p.write_bytes(damage(b))
    s = ShardStore(far, cache=str(tmp_path/'c'))
    s.prefetch([0], wait=True)
    assert values_or_error(s) is None
    assert values_or_error(cached(far, tmp_path/'c')) is None and p.read_bytes()==b

@mended
def test_a_copy_is_said_to_be_damaged(far, tmp_path):
    "A repair is not silent: the disk may be failing"
    cached(far, tmp_path/'c')
    for end in ('shard-000000.tar.fastai_remote','shard-000000.tar'):
        p, = in_cache(tmp_path/'c', end)
        b = p.read_bytes()
        at = b.index(TINY[1]['bin']) if end.endswith('tar') else len(b)-3
        p.write_bytes(b[:at]+bytes([b[at]^1])+b[at+1:])
        with pytest.warns(UserWarning, match=f'tiny: .*{end}.* cache {tmp_path}.*damaged|tiny: {end} in the cache {tmp_path}.*checksum'): assert values_or_error(ShardStore(far, cache=str(tmp_path/'c'))) is None

@mended
@pytest.mark.parametrize('name', ['shard-000001.tar.fastai_remote','shard-000001.tar'])
def test_damaged_in_the_cache_and_where_it_is_stored(far, tmp_path, name):
    "Without another copy: dataset, shard, sample, place and advice are named; other shards are read"
    cached(far, tmp_path/'c')
    p, = in_cache(tmp_path/'c', name)
    b = p.read_bytes()
    at = b.index(TINY[2]['bin']) if name.endswith('tar') else len(b)-3
    x = b[:at]+bytes([b[at]^1])+b[at+1:]
    p.write_bytes(x)
    fsspec.filesystem('memory').pipe_file(f'/far/tiny/{name}', x)
    s = ShardStore(far, cache=str(tmp_path/'c'))
    want = f"tiny: sample 2, field 'bin' in shard-000001.tar at byte {at:,}: .*ingest it again" if name.endswith('tar') else 'tiny: shard-000001.tar.fastai_remote: the index of shard shard-000001.tar, .*samples 2 to 3: .*memory://far/tiny; put back a copy .*ingest again'
    with pytest.raises(CorruptSample, match=want): s[2]
    assert s[0]==TINY[0] and s[1]==TINY[1]

@mended
def test_a_cache_that_cannot_be_repaired_is_read_around(far, tmp_path, monkeypatch):
    "A disk that damages all that is written to it: values are right all the same"
    from fastai_remote.store.cache import FileCache
    class Failing(FileCache):
        def fetch(self, key, size, write):
            fd = super().fetch(key, size, write)
            p = Path(self.folder)/key
            p.write_bytes(p.read_bytes().replace(TINY[0]['bin'], b'wrong').replace(TINY[2]['bin'], b'wrong'))
            return fd
    s = ShardStore(far, cache=Failing(str(tmp_path/'c')))
    for _ in range(5):
        s.prefetch([0,1], wait=True)
        assert values_or_error(s) is None
        s.prefetch([], wait=True)

@mended
def test_compressed_shards_in_the_cache(tmp_path):
    "What a compressed tar holds is in the cache uncompressed: damaged or cut off, it is made again; `verify` compares it with the tar"
    (tmp_path/'w').mkdir()
    for k in range(2):
        f = io.BytesIO()
        with tarfile.open(fileobj=f, mode='w') as t:
            for i in range(2*k, 2*k+2):
                for ext,v in (('bin',TINY[i]['bin']), ('cls',b'%d' % i)):
                    m = tarfile.TarInfo(f'{i}.{ext}')
                    m.size = len(v)
                    t.addfile(m, io.BytesIO(v))
        (tmp_path/f'w/{k}.tar.gz').write_bytes(gzip.compress(f.getvalue()))
    index_shards(tmp_path/'w', num_workers=1, progress=False)
    def opened(): return ShardStore(tmp_path/'w', cache=str(tmp_path/'c'))
    def right(s): return s.get_many(range(4), 'bin', check=True)['bin']==[o['bin'] for o in TINY]
    assert right(opened())
    p = in_cache(tmp_path/'c', '0.tar.gz')[0]
    b = p.read_bytes()
    at = b.index(TINY[1]['bin'])
    for x in (b[:at]+b'wrong'+b[at+5:], b[:at], b'', b[:100]+bytes([b[100]^1])+b[101:]):
        p.write_bytes(x)
        assert [what for what,_ in opened().check_rest()]==['0.tar.gz'] and not p.exists()
        assert right(opened()) and p.read_bytes()==b
        p.write_bytes(x)
        assert right(opened())
        assert p.read_bytes()==b or x[:at]==b[:at] or len(x)==len(b)   # headers are of no use to us
        p.write_bytes(b)
    (tmp_path/'w/0.tar.gz').write_bytes((tmp_path/'w/0.tar.gz').read_bytes()[:-1]+b'\xff')
    assert [what for what,_ in opened().check_rest()]==['0.tar.gz']

@mended
def test_missing_fields_do_not_hide_damage(tmp_path):
    "A dataset whose samples lack fields: what is repaired is what `RemoteDataset` gives"
    (tmp_path/'w').mkdir()
    with tarfile.open(tmp_path/'w/a.tar', 'w') as t:
        for i in range(6):
            for ext,v in (('txt',b'number %d' % i), *([('bin',b'bytes %d' % i)] if i%2 else [])):
                m = tarfile.TarInfo(f'{i}.{ext}')
                m.size = len(v)
                t.addfile(m, io.BytesIO(v))
    index_shards(tmp_path/'w', num_workers=1, progress=False)
    s = cached_parts(away(tmp_path/'w', 'w'), tmp_path/'c')
    p, = in_cache(tmp_path/'c', 'a.tar')
    p.write_bytes(p.read_bytes().replace(b'bytes 3', b'BYTES 3'))
    s = ShardStore('memory://far/w', cache=str(tmp_path/'c'))
    assert RemoteDataset(s)[3]['bin']==b'bytes 3'

def cached_parts(url, cache):
    s = ShardStore(url, cache=str(cache))
    s.prefetch([0], wait=True)
    s.get_many(range(len(s)), 'txt')
    return s

# --- found by training

N = 60

@pytest.fixture(scope='module')
def pictures(tmp_path_factory):
    "60 pictures in shards of 10; number i is as grey as 4i"
    d = tmp_path_factory.mktemp('pictures')/'pictures'
    to_shards(list(range(N)), d, lambda i: {'png':Image.new('RGB', (16,16), (4*i,)*3), 'cls':f'{i%3}', 'id':i}, num_workers=1, maxcount=10, chunk=10, shuffle=False, progress=False)
    return d

def dls_of(store, num_workers):
    block = DataBlock((ShardBlock,ShardBlock('id')), get_items=get_remote_items, splitter=RandomStoreSplitter(0.))
    return block.dataloaders(store, bs=8, num_workers=num_workers, interleave=2)

def numbers(dl):
    "Numbers of an epoch, each of which must be that of its picture"
    res = []
    for xs,ys in dl:
        assert (255*xs.mean((1,2,3))/4).round().tolist()==ys.tolist()
        res += ys.long().tolist()
    return sorted(res)

def right(dl): return numbers(dl)==list(range(N))

def flip_id(p):
    "Change a number in an index: sample 7's to 5"
    b = bytearray(p.read_bytes())
    at = bytes(b).index((7).to_bytes(8, 'little'))
    b[at] ^= 2
    with open(p, 'r+b') as f: f.write(b)

@workers
def test_a_label_flipped_between_epochs_is_found_by_the_next(pictures, tmp_path, num_workers):
    "In the index of a folder of this machine, where there is no other copy: dataset, index and advice are named"
    d = Path(shutil.copytree(pictures, tmp_path/'pictures'))
    dls = dls_of(ShardStore(d), num_workers)
    dl = dls.train.new(drop_last=False)
    assert numbers(dl)==list(range(N))
    flip_id(d/'shard-000000.tar.fastai_remote')
    with fails(CorruptSample, 'pictures: shard-000000.tar.fastai_remote.*samples 0 to 9.*do not match their checksum.*put back a copy'): numbers(dl)

def test_a_label_flipped_between_epochs_is_found_by_workers_that_stay(pictures, tmp_path):
    d = Path(shutil.copytree(pictures, tmp_path/'pictures'))
    dl = dls_of(ShardStore(d), 2).train.new(drop_last=False, persistent_workers=True)
    assert numbers(dl)==numbers(dl)==list(range(N))
    flip_id(d/'shard-000000.tar.fastai_remote')
    with fails(CorruptSample, 'pictures: shard-000000.tar.fastai_remote'): numbers(dl)
    del dl
    gc.collect()   # and its workers

@pytest.mark.parametrize('num_workers,persistent', [(0,False),(2,False),(2,True)])
@pytest.mark.parametrize('style', ['map','batched'])
def test_the_same_in_a_torch_loader(pictures, tmp_path, style, num_workers, persistent):
    d = Path(shutil.copytree(pictures, tmp_path/'pictures'))
    ds = RemoteDataset(ShardStore(d)).to_tuple('id', 'cls')
    kw = dict(num_workers=num_workers, persistent_workers=persistent)
    dl = DataLoader(ds.batched(8), batch_size=None, **kw) if style=='batched' else DataLoader(ds, batch_sampler=ds.batches(8, num_workers=num_workers), **kw)
    def ids(dl): return sorted(int(i) for b,_ in dl for i in b)
    assert ids(dl)==ids(dl)==list(range(N))
    flip_id(d/'shard-000000.tar.fastai_remote')
    with fails(CorruptSample, 'pictures: shard-000000.tar.fastai_remote'): ids(dl)
    del dl
    gc.collect()

@mended
@workers
def test_a_label_flipped_while_an_epoch_runs_is_never_used(pictures, tmp_path, num_workers):
    "What was compared is what is used: either it is found, or the numbers are right"
    d = Path(shutil.copytree(pictures, tmp_path/'pictures'))
    dl = dls_of(ShardStore(d), num_workers).train.new(drop_last=False)
    got = []
    try:
        for k,(_,ys) in enumerate(dl):
            got += ys.tolist()
            if k==1: flip_id(d/'shard-000000.tar.fastai_remote')
    except CorruptSample: return
    assert sorted(got)==list(range(N))

@mended
@workers
@pytest.mark.parametrize('what', ['label in an index','half of an index','index of nothing','value in a shard','half of a shard'])
def test_damage_in_the_cache_is_repaired_by_training(pictures, tmp_path, num_workers, what):
    "Between two epochs: the second one is right, and so is the cache then"
    url = away(pictures, 'pictures')
    dl = dls_of(ShardStore(url, cache=str(tmp_path/'c')), num_workers).train.new(drop_last=False)
    assert right(dl)
    p = in_cache(tmp_path/'c', 'shard-000000.tar' if 'shard' in what else 'shard-000000.tar.fastai_remote')[0]
    b = p.read_bytes()
    if what=='label in an index': flip_id(p)
    elif what=='value in a shard': p.write_bytes(b[:560]+bytes([b[560]^16])+b[561:])
    else: p.write_bytes(b[:len(b)//2] if 'half' in what else b'')
    assert right(dl)
    if 'index' in what: assert p.read_bytes()==b
    assert right(dl)
    assert not list(ShardStore(url, cache=str(tmp_path/'c')).check_rest()) and [q.read_bytes()==b for q in [p] if q.exists()] in ([],[True])

# --- Redis before shards

@mended
def test_redis_before_damaged_copies(far, tmp_path):
    "A damaged copy of a shard in the cache is repaired on the way to Redis; a damaged value in Redis is found by `check_rest`, and replaced"
    with redis_server() as server:
        cached(far, tmp_path/'c')
        p, = in_cache(tmp_path/'c', 'shard-000000.tar')
        p.write_bytes(p.read_bytes().replace(TINY[1]['bin'], b'wrong'))
        s = TieredStore(server.url, ShardStore(far, cache=str(tmp_path/'c')))
        assert values_or_error(s) is None and s.flush() and not list(s.check_rest())
        key = f'{s.prefix}:bin:1'
        s.link.client.set(key, b'wrong')
        (what,why), = s.check_rest()
        assert what==key and 'read from the shards again' in why and s.flush() and s.link.client.get(key)==TINY[1]['bin'] and not list(s.check_rest())

# --- an ingest that is not finished

def stops(o):
    "Is interrupted at sample 2, if the environment says so, and the plan is laid"
    if o['id']==2<<40 and (d:=os.environ.get('STOP')) and (Path(d)/'.ingest/plan.json').exists(): raise KeyboardInterrupt
    return o

def write(d): return to_shards(TINY, d, stops, num_workers=1, chunk=1, shuffle=False, progress=False)

@pytest.mark.parametrize('name', ['chunk-000001.json','plan.json'])
def test_flipped_bits_in_an_unfinished_ingest(tmp_path, monkeypatch, name):
    "A damaged record has its chunk written again; a damaged plan is refused, and can be abandoned. Nothing is lost, nothing changed"
    monkeypatch.setattr(folder_lock, 'time', SimpleNamespace(time=time.time, sleep=lambda s: None))   # nobody else comes for the lock
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setenv('STOP', str(tmp_path/'one'/'d'))
        write(tmp_path/'one'/'d')
    b = (tmp_path/'one'/'d/.ingest'/name).read_bytes()
    refused = 0
    for n,(k,x) in enumerate(flips(b, None, 6)):
        d = Path(shutil.copytree(tmp_path/'one'/'d', tmp_path/f'{n}'/'d'))
        (d/'.ingest'/name).write_bytes(x)
        try: write(d)
        except StoreError as e:
            refused += 1
            assert name=='plan.json' and re.search('d: the plan of an unfinished ingest, .ingest/plan.json, is damaged: .*abandon', str(e)), e
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')
                ShardStore.abandon(d)
            for p in d.glob('shard-*'): p.unlink()   # those that nobody can know to be its own
            write(d)
        s = ShardStore(d)
        assert values_or_error(s) is None and not list(s.check_rest())
        assert sorted(p.name for p in d.iterdir())==sorted(['labels.json', 'manifest.json', *(f'shard-{u:06}.{e}' for u in range(4) for e in ('tar.fastai_remote','tar'))])
        shutil.rmtree(d.parent)
    assert refused or name!='plan.json'

# --- integers are categories

LABELS = {'few':[3,7,3,7,7], 'large':[100_000,100_001,100_000], 'negative':[-5,2,-5,1<<40], 'dense':[i%10 for i in range(30)], 'one':[4,4], 'numpy':list(np.array([9,1,9], np.int16)), 'bool':[True,False,True]}

@pytest.mark.parametrize('what', LABELS)
@pytest.mark.parametrize('num_workers', [1,2])
def test_integer_labels_are_categories(tmp_path, what, num_workers):
    "Vocabulary, counts, codes and labels; also where shards have other labels each; the tar has the number as text"
    ys = LABELS[what]
    to_shards([{'txt':f'{i}', 'cls':y} for i,y in enumerate(ys)], tmp_path/'d', num_workers=num_workers, chunk=2, shuffle=False, progress=False)
    s = ShardStore(tmp_path/'d')
    want = sorted({int(y) for y in ys})
    assert s.vocab==want and all(type(v) is int for v in s.vocab) and s.class_counts()=={v:ys.count(v) for v in want}
    assert [s[i]['cls'] for i in range(len(ys))]==[int(y) for y in ys] and s.get_many(range(len(ys)), 'cls')['cls'].tolist()==[want.index(y) for y in ys]
    with tarfile.open(tmp_path/'d/shard-000000.tar') as t: assert t.extractfile('000000000.cls').read()==b'%d' % ys[0]
    copy = tmp_path/'copy'
    s.copy(copy, num_workers=1, progress=False)
    c = ShardStore(copy)
    assert (c.vocab,[c[i] for i in range(len(ys))])==(want,[s[i] for i in range(len(ys))])

def test_codes_stay_codes_where_classes_are_named(tmp_path):
    to_shards([{'txt':'a', 'cls':1}, {'txt':'b', 'cls':0}], tmp_path/'d', vocab=['x','y','z'], num_workers=1, shuffle=False, progress=False)
    s = ShardStore(tmp_path/'d')
    assert s.vocab==['x','y','z'] and [o['cls'] for o in s]==['y','x'] and s.class_counts()=={'x':1, 'y':1, 'z':0}

def test_too_many_integers_are_values(tmp_path, monkeypatch):
    "Beyond 2**20 there is no vocabulary"
    assert shard_totals.MAX_CLASSES==1<<20
    monkeypatch.setattr(shard_totals, 'MAX_CLASSES', 5)
    for n in (5,6):
        to_shards([{'txt':'a', 'cls':10*i-20} for i in range(n)], tmp_path/f'{n}', num_workers=1, chunk=2, shuffle=False, progress=False)
        s = ShardStore(tmp_path/f'{n}')
        assert [o['cls'] for o in s]==[10*i-20 for i in range(n)] and s.vocab==([10*i-20 for i in range(n)] if n==5 else [])
        assert s.get_many(range(n), 'cls')['cls'].tolist()==([*range(5)] if n==5 else [10*i-20 for i in range(n)])

def test_integers_in_tars_of_others_are_categories(tmp_path):
    (tmp_path/'w').mkdir()
    ys = [[3,-7],[7,3,3]]
    for k,ls in enumerate(ys):
        with tarfile.open(tmp_path/f'w/{k}.tar', 'w') as t:
            for i,y in enumerate(ls):
                for ext,v in (('txt',b'%d' % i), ('cls',b'%d' % y)):
                    m = tarfile.TarInfo(f'{i}.{ext}')
                    m.size = len(v)
                    t.addfile(m, io.BytesIO(v))
    index_shards(tmp_path/'w', num_workers=1, progress=False)
    s = ShardStore(tmp_path/'w')
    assert s.vocab==[-7,3,7] and [o['cls'] for o in s]==[3,-7,7,3,3] and s.class_counts()=={-7:1, 3:3, 7:1} and not list(s.check_rest())

def test_a_loader_of_integer_labels(tmp_path):
    "As many classes as there are labels"
    to_shards([{'png':draw(i), 'cls':[3,7][i%2]} for i in range(12)], tmp_path/'d', num_workers=1, chunk=5, shuffle=False, progress=False)
    dls = DataLoaders.from_shards(str(tmp_path/'d'), bs=4, num_workers=0, device='cpu', valid_pct=.25, seed=1, item_tfms=Resize(32))
    assert dls.c==2 and list(dls.vocab)==[3,7]
    for _,y in dls.train: assert set(y.tolist())<={0,1}

def test_a_compressed_shard_that_became_longer_is_not_the_one_that_was_indexed(tmp_path):
    "It is as long as before, compressed; what it holds is more than the place that the cache has for it"
    folder = tmp_path/'w'
    folder.mkdir()
    def write(contents, size=0):
        with tarfile.open(fileobj=(file:=io.BytesIO()), mode='w') as tar:
            for i,content in enumerate(contents):
                info = tarfile.TarInfo(f'{i}.bin')
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        (folder/'a.tar.gz').write_bytes(gzip.compress(file.getvalue()).ljust(size, b'\0'))
    write([random.Random(i).randbytes(1000) for i in range(3)])
    index_shards(folder, num_workers=0, progress=False)
    store = ShardStore(folder, cache=str(tmp_path/'c'))
    write([bytes(1000)]*60, (folder/'a.tar.gz').stat().st_size)
    with pytest.raises(CorruptSample, match='w: shard a.tar.gz: not the bytes that were indexed'): store.get_many([0], 'bin')

def test_a_list_of_failures_that_is_gone_is_not_an_empty_one(tiny, tmp_path):
    "Also if the manifest has no checksum of it, as an earlier version wrote it"
    shutil.copytree(tiny, tmp_path/'d')
    store = ShardStore(tmp_path/'d')
    assert store.manifest.failed
    (tmp_path/'d/shard-failures.json').unlink()
    store.manifest.failures_crc = -1
    with pytest.raises(CorruptSample, match='shard-failures.json.*is not there'): list(store.failures())
    store.manifest.failed = 0
    assert list(store.failures())==[]
