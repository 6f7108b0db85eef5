"A flipped bit in any stored byte of shards is found by `verify` and by training, and repaired where there is a copy"
import gc, gzip, os, re, shutil, warnings
from pathlib import Path

import fsspec
import pytest
from conftest import fails
from PIL import Image
from torch.utils.data import DataLoader

from fastai_remote import (CorruptSample, MissingSample, RemoteDataset, ShardStore, StoreError, UnsupportedFormat,
    index_shards, to_shards)
from fastai_remote.store.cache import FileCache
from pets import loaders
from shard_helpers import tar
from test_checksums import changed, facts, flipped

mended = pytest.mark.filterwarnings('ignore:.*fetched again')   # said to whoever has a failing disk
options = dict(num_workers=1, shuffle=False, progress=False)
FAILURES = '.fastai_remote/shard-failures.json'
INDEX,TAR = '.fastai_remote/shard-000000.tar.fastai_remote','shard-000000.tar'
TINY = [{'bin':bytes([i])*5, 'cls':'ab'[i%2], 'code.cls':[-7,300][i//2%2], 'id':i<<40, 'target.f4':i/2}
        for i in range(4)]

def left_out(o):
    if o['id']==-1: raise ValueError('left out')
    return o

@pytest.fixture(scope='module')
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tiny')/'tiny'
    to_shards([*TINY, {**TINY[0], 'id':-1}], folder, left_out, maxcount=2, chunk=2, **options)
    return folder

@pytest.fixture
def tiny(written, tmp_path):
    "A folder with two shards of two samples; another sample was left out"
    return Path(shutil.copytree(written, tmp_path/'tiny'))

@pytest.fixture
def far(written):
    "The same far away, in fsspec's memory"
    return away(written)

def away(folder):
    fs,name = fsspec.filesystem('memory'),folder.name
    if fs.exists(f'/far/{name}'): fs.rm(f'/far/{name}', recursive=True)
    for p in folder.rglob('*'):
        if p.is_file(): fs.pipe_file(f'/far/{name}/{p.relative_to(folder)}', p.read_bytes())
    return f'memory://far/{name}'

def flip_in(path, bit): path.write_bytes(flipped(path.read_bytes(), bit))

def is_right(store):
    "Are all samples as they should be? Other values than those that were written never come"
    try: samples = [store[i] for i in range(len(store))]
    except StoreError: return False
    assert samples==TINY
    return True

def is_damaged(folder):
    "Does opening or `verify` say that something is damaged?"
    try: store = ShardStore(folder)
    except (CorruptSample,UnsupportedFormat): return True
    return bool(list(store.check_rest())) or store.verify(num_workers=1).bad>0

# --- bits of every byte of an index, and some of other files

@pytest.mark.parametrize('name,step', [(INDEX,7), (FAILURES,31), (TAR,1801), ('manifest.json',97)])
def test_flipped_bits_are_found(tiny, name, step):
    "Wherever they are; and no sample is read with another value"
    assert not is_damaged(tiny) and not ShardStore(tiny).unchecked
    b = (tiny/name).read_bytes()
    for bit in range(0, 8*len(b), step):
        (tiny/name).write_bytes(flipped(b, bit))
        assert is_damaged(tiny), f'bit {bit} of {name}'
        try: is_right(ShardStore(tiny))
        except (CorruptSample,UnsupportedFormat): assert name=='manifest.json'
    (tiny/name).write_bytes(b)
    assert not is_damaged(tiny)

def test_flipped_bits_of_a_changed_dataset_are_errors_or_change_nothing(tmp_path):
    "In tars, indices, tables, lists of failures and added parts; some bits of each file"
    folder = tmp_path/'d'
    store = changed(lambda source, fn, **options: to_shards(source, folder, fn, maxcount=3, **options))
    want,found = facts(store),set()
    for path in sorted(path for path in folder.rglob('*') if path.is_file()):
        whole = path.read_bytes()
        for bit in range(5, 8*len(whole), max(len(whole)*8//3, 13)):
            path.write_bytes(flipped(whole, bit))
            try: assert facts(ShardStore(folder))==want, f'{path} bit {bit}'
            except (CorruptSample,UnsupportedFormat) as error:
                assert re.search('d: |/d/', str(error))
                found.add(path.name)
            path.write_bytes(whole)
    assert {'manifest.json','.runs-4','shard2-failures.json'}<=found and not is_damaged(folder)

def test_damage_in_a_value_and_beside_it_are_told_apart(tiny):
    "`check_rest` leaves values to `verify`, which names their samples; where the values are, only an index tells"
    b = (tiny/TAR).read_bytes()
    value,header = b.index(TINY[1]['bin']),20
    def reasons(*places):
        changed = b
        for place in places: changed = flipped(changed, 8*place)
        (tiny/TAR).write_bytes(changed)
        return dict(ShardStore(tiny).check_rest())
    assert reasons(value, value+3)=={}
    for places in ((header,), (value,len(b)-1)):
        assert re.search(f'tiny: shard {TAR}, with samples 0 to 1: .*outside the samples', reasons(*places)[TAR])
    flip_in(tiny/INDEX, 160)
    found = reasons(value)
    assert found.keys()=={TAR,INDEX} and 'outside' not in found[TAR]
    assert re.search('with samples 0 to 1: .*its index is damaged, too.*all of it is suspect', found[TAR])
    (tiny/TAR).write_bytes(b[:-700])
    assert 'cut off' in dict(ShardStore(tiny).check_rest())[TAR]

@pytest.mark.parametrize('num_workers', [0, pytest.param(2, marks=pytest.mark.slow)])
def test_verify_reads_a_shard_that_replaced_another_one_since_an_earlier_verify(tiny, num_workers):
    "Also with the same store: neither this process nor a worker reads files that it has opened before"
    store,tar = ShardStore(tiny),tiny/'shard-000001.tar'
    assert store.verify(num_workers, chunk=1).bad==0
    whole = tar.read_bytes()
    def replace(content):
        (tiny/'new').write_bytes(content)
        os.replace(tiny/'new', tar)
    replace(flipped(whole, 8*whole.index(TINY[3]['bin'])))
    report = store.verify(num_workers, chunk=1)
    assert [number for number,_ in report.failures]==[3] and report.bad==1
    replace(whole)
    assert store.verify(num_workers, chunk=1).bad==0

@pytest.mark.parametrize('damage', [lambda b: b[:40], lambda b: b.replace(b'"uid":"', b'"uid":"x', 1)])
def test_a_damaged_manifest_is_not_said_to_be_replaced(tiny, damage):
    "By a reader that has opened the dataset before"
    store,missing,verified = (ShardStore(tiny) for _ in range(3))
    (tiny/'manifest.json').write_bytes(damage((tiny/'manifest.json').read_bytes()))
    assert 'manifest' in verified.verify(num_workers=1).rest[0][0]
    (tiny/'shard-000001.tar').unlink()
    for read in (lambda: store[0], lambda: missing[3]):
        with pytest.raises((CorruptSample,UnsupportedFormat), match=f'{tiny}/manifest.json: '): read()

def test_what_is_missing_is_found_and_named(tiny):
    for name,message in ((INDEX,f'{INDEX}, the index of shard {TAR}.*samples 0 to 1.*is not there'),
                         (TAR,f'shard {TAR} is not there, with samples 0 to 1')):
        (tiny/name).rename(tiny/'elsewhere')
        assert any(Path(name).name.split('.')[0] in what+why for what,why in ShardStore(tiny).check_rest()), name
        with pytest.raises(MissingSample, match=message): ShardStore(tiny)[1]
        (tiny/'elsewhere').rename(tiny/name)

def test_failures_that_are_damaged_or_gone_are_not_shown(tiny):
    store,file = ShardStore(tiny),tiny/FAILURES
    assert len(list(store.failures()))==store.manifest.failed==1
    file.write_bytes(file.read_bytes().replace(b'left', b'lefT'))
    with pytest.raises(CorruptSample, match='tiny: shard-failures.json.*samples are not affected'):
        list(store.failures())
    file.unlink()
    with pytest.raises(CorruptSample, match='shard-failures.json.*is not there'): list(store.failures())
    assert list(store.check_rest())

# --- far away, with a cache

def cached(url, cache, shards=(0,1), fields=None):
    "A store whose shards and indices are in the cache"
    store = ShardStore(url, cache=str(cache))
    store.prefetch(list(shards), wait=True)
    store.get_many(range(len(store)), fields or store.fields, check=True)
    return store

def in_cache(cache, name):
    "The path of a file in the cache"
    # names begin with a checksum; behind `@` is a time that is another than when it was indexed
    path, = (p for p in cache.rglob('*') if p.name.partition('-')[2].split('@')[0]==Path(name).name)
    return path

def place_in(content, name):
    "Where a value of sample 1 is, in a shard or in its index"
    return content.index(TINY[1]['bin']) if name.endswith('tar') else len(content)-3

@pytest.mark.parametrize('name', [INDEX,TAR])
@mended
def test_a_repair_is_not_silent_and_damage_without_another_copy_is_an_error(far, tmp_path, name):
    "The disk may be failing; the error names dataset, shard, sample, place and advice, and other shards are read"
    cached(far, tmp_path/'c')
    path = in_cache(tmp_path/'c', name)
    b = path.read_bytes()
    at = place_in(b, name)
    path.write_bytes(flipped(b, 8*at))
    assert [what for what,_ in ShardStore(far, cache=str(tmp_path/'c')).check_rest()]==[name]
    assert not path.exists() or path.read_bytes()==b   # fetched again, or to be fetched
    path.write_bytes(flipped(b, 8*at))
    message = f'tiny: .*{name}.* cache {tmp_path}.*damaged|tiny: {name} in the cache {tmp_path}.*checksum'
    with pytest.warns(UserWarning, match=message): assert is_right(ShardStore(far, cache=str(tmp_path/'c')))
    path.write_bytes(flipped(b, 8*at))
    fsspec.filesystem('memory').pipe_file(f'/far/tiny/{name}', flipped(b, 8*at))
    store = ShardStore(far, cache=str(tmp_path/'c'))
    message = f"tiny: sample 1, field 'bin' in {TAR} at byte {at:,}: .*ingest it again"
    if name==INDEX: message = f'tiny: {INDEX}: the index of shard {TAR}, .*samples 0 to 1: .*memory://far/tiny; ' \
                              'put back a copy .*ingest again'
    with pytest.raises(CorruptSample, match=message), warnings.catch_warnings(action='ignore'): store[1]
    assert store[2:4]==TINY[2:]

@mended
def test_a_cache_that_cannot_be_repaired_is_read_around(far, tmp_path):
    "A disk that damages all that is written to it: values are right all the same"
    class Failing(FileCache):
        def fetch(self, key, size, write):
            descriptor,path = super().fetch(key, size, write),Path(self.folder)/key
            path.write_bytes(path.read_bytes().replace(TINY[0]['bin'], b'wrong').replace(TINY[2]['bin'], b'wrong'))
            return descriptor
    store = ShardStore(far, cache=Failing(str(tmp_path/'c')))
    for _ in range(5):
        store.prefetch([0,1], wait=True)
        assert is_right(store)
        store.prefetch([], wait=True)

@mended
def test_compressed_shards_in_the_cache(tmp_path):
    "They are there uncompressed: damaged or cut off, they are made again; `verify` compares them with the tar"
    values,folder = [o['bin'] for o in TINY],tmp_path/'w'
    for k in (0,1): tar(folder/f'{k}.tar.gz', [(f'{i}.bin', values[i]) for i in (2*k,2*k+1)], 'w:gz')
    index_shards(folder, num_workers=1, progress=False)
    def opened(): return ShardStore(folder, cache=str(tmp_path/'c'))
    def is_right(store): return store.get_many(range(4), 'bin', check=True)['bin']==values
    assert is_right(opened())
    path,whole = in_cache(tmp_path/'c', '0.tar.gz'),(folder/'0.tar.gz').read_bytes()
    b = path.read_bytes()
    at = b.index(values[1])
    for damaged in (flipped(b, 8*at), b[:at], b'', flipped(b, 800)):
        path.write_bytes(damaged)
        assert [what for what,_ in opened().check_rest()]==['0.tar.gz'] and not path.exists()
        assert is_right(opened()) and path.read_bytes()==b
        path.write_bytes(damaged)
        assert is_right(opened())
        assert path.read_bytes()==b or damaged==flipped(b, 800)   # headers are of no use to us
    (folder/'0.tar.gz').write_bytes(whole[:-1]+b'\xff')
    assert [what for what,_ in opened().check_rest()]==['0.tar.gz']
    # as long as before, compressed; what it holds is more than the place that the cache has for it
    shutil.rmtree(tmp_path/'c')
    longer = tar(tmp_path/'longer.tar', [(f'{i}.bin', bytes(5)) for i in range(30)]).read_bytes()
    size = (folder/'1.tar.gz').stat().st_size
    (folder/'1.tar.gz').write_bytes(gzip.compress(longer).ljust(size, b'\0'))
    with pytest.raises(CorruptSample, match='w: shard 1.tar.gz has changed since it was indexed'):
        opened().get_many([2], 'bin')

@mended
def test_missing_fields_do_not_hide_damage(tmp_path):
    "A dataset whose samples lack fields: what is repaired is what `RemoteDataset` gives"
    members = [(f'{i}.txt', b'number %d'%i) for i in range(6)]+[(f'{i}.bin', b'bytes %d'%i) for i in (1,3,5)]
    tar(tmp_path/'w/a.tar', sorted(members))
    index_shards(tmp_path/'w', num_workers=1, progress=False)
    url = away(tmp_path/'w')
    cached(url, tmp_path/'c', [0], ['txt'])
    path = in_cache(tmp_path/'c', 'a.tar')
    path.write_bytes(path.read_bytes().replace(b'bytes 3', b'BYTES 3'))
    assert RemoteDataset(ShardStore(url, cache=str(tmp_path/'c')))[3]['bin']==b'bytes 3'

# --- found by training

N = 24

@pytest.fixture(scope='module')
def all_pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp('pictures')/'pictures'
    def fn(i): return {'png':Image.new('RGB', (8,8), (4*i,)*3), 'cls':f'{i%3}', 'id':i}
    to_shards(list(range(N)), folder, fn, maxcount=8, chunk=8, **options)
    return folder

@pytest.fixture
def pictures(all_pictures, tmp_path):
    "A folder with pictures in shards of 8; number i is as grey as 4i"
    return Path(shutil.copytree(all_pictures, tmp_path/'pictures'))

def loader(store, num_workers, **kwargs):
    return loaders(store, bs=4, num_workers=num_workers, valid_pct=0.).train.new(drop_last=False, **kwargs)

def torch_loader(store, num_workers, batched=False, **kwargs):
    dataset = RemoteDataset(store).to_tuple('id', 'cls')
    if batched: return DataLoader(dataset.batched(4), batch_size=None, num_workers=num_workers, **kwargs)
    batches = dataset.batches(4, num_workers=num_workers)
    return DataLoader(dataset, batch_sampler=batches, num_workers=num_workers, **kwargs)

def numbers(dl):
    "Numbers of an epoch, each of which must be that of its picture, if there are pictures"
    res = []
    for batch in dl:
        is_pictures = hasattr(batch[0], 'mean') and batch[0].ndim==4
        if is_pictures: assert (255*batch[0].mean((1,2,3))/4).round().tolist()==batch[1].tolist()
        res += [int(i) for i in batch[is_pictures]]
    return sorted(res)

def flip_id(path):
    "Change a number in an index, in place: sample 7's to 5"
    content = path.read_bytes()
    with open(path, 'r+b') as file: file.write(flipped(content, 8*content.index((7).to_bytes(8, 'little'))+1))

in_workers = pytest.mark.slow
@pytest.mark.parametrize('make,num_workers,kwargs', [
    (loader,0,{}), (torch_loader,0,{}), (torch_loader,0,dict(batched=True)),
    pytest.param(loader, 2, dict(persistent_workers=True), marks=in_workers),
    pytest.param(torch_loader, 2, dict(persistent_workers=True), marks=in_workers)])
def test_a_label_flipped_between_epochs_is_found_by_the_next(pictures, make, num_workers, kwargs):
    "In the index of a folder of this machine, where there is no other copy: dataset, index and advice are named"
    dl = make(ShardStore(pictures), num_workers, **kwargs)
    assert numbers(dl)==numbers(dl)==list(range(N))
    flip_id(pictures/INDEX)
    message = f'pictures: {INDEX}.*samples 0 to 7.*do not match their checksum.*put back a copy'
    with fails(CorruptSample, message): numbers(dl)
    del dl
    gc.collect()   # and its workers

@mended
def test_a_label_flipped_while_an_epoch_runs_is_never_used(pictures):
    "What was compared is what is used: either it is found, or the numbers are right"
    def batches():
        for k,batch in enumerate(loader(ShardStore(pictures), 0)):
            yield batch
            if k==1: flip_id(pictures/INDEX)
    try: read = numbers(batches())
    except CorruptSample: return
    assert read==list(range(N))

@mended
def test_damage_in_the_cache_is_repaired_by_training(all_pictures, tmp_path):
    "Between two epochs: the second one is right, and so is the cache then"
    url = away(all_pictures)
    dl = loader(ShardStore(url, cache=str(tmp_path/'c')), 0)
    assert numbers(dl)==list(range(N))
    for name in (INDEX,TAR):
        path = in_cache(tmp_path/'c', name)
        b = path.read_bytes()
        value = flipped(b, 8*(b.index((7).to_bytes(8, 'little')) if name==INDEX else 560)+1)
        for damaged in (value, b[:len(b)//2]):
            path.write_bytes(damaged)
            assert numbers(dl)==list(range(N)) and (name==TAR or path.read_bytes()==b)
            assert numbers(dl)==list(range(N))
            assert not list(ShardStore(url, cache=str(tmp_path/'c')).check_rest())
