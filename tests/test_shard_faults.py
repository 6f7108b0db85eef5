"""Shards on a storage that refuses, breaks off, damages or loses what it is asked for: each fault has the answer that
is promised for it

The storage is in the memory of this process. test_s3.py has what only a real S3 server shows."""
import io, pickle, re, tarfile
from collections import Counter

import pytest
pytest.importorskip('s3fs')

from conftest import fails
from fastai_remote import (CorruptSample, index_shards, MissingSample, ShardStore, StoreNotFound, StoreUnavailable,
    StoreExists, to_shards)
from fastai_remote.store.cache import FileCache
from fault_storage import flipped, s3_error, TARS
from pets import alike, ALWAYS, EACH, epoch, ids, is_right, ITEMS, loaders, N, noise, WRITING
from shard_helpers import files, tar

def make(folder, items=ITEMS, **kwargs): return to_shards(items, f'faulty://{folder}', **{**WRITING, **kwargs})
def opened(folder='pets', cache=None, **kwargs): return ShardStore(f'faulty://{folder}', cache=cache, **kwargs)
@pytest.fixture(scope='module')
def pets_files(tmp_path_factory):
    "The files of a dataset of eight shards"
    to_shards(ITEMS, folder := tmp_path_factory.mktemp('d')/'pets', **WRITING)
    return files(folder)

@pytest.fixture(autouse=True)
def pets(faults, pets_files, tmp_path, monkeypatch):
    "The same at `faulty://pets`; and a cache of the test's own"
    monkeypatch.setenv('FASTAI_REMOTE_CACHE', str(tmp_path/'usual'))
    for name,content in pets_files.items(): faults.put(f'pets/{name}', content)

@pytest.fixture
def cache(tmp_path): return str(tmp_path/'cache')

def place(faults, i, folder='pets'):
    "Name of the shard of sample `i`; offset and length of its image in it"
    name = f'shard-{i//EACH:06}.tar'
    with tarfile.open(fileobj=io.BytesIO(faults.content(f'{folder}/{name}'))) as tar:
        member = [member for member in tar if member.name.endswith('.jpg')][i%EACH]
    return name,member.offset_data,member.size

# --- what is there

def test_by_default_the_cache_is_where_the_environment_says(faults, tmp_path):
    "Each shard is fetched once; an epoch of what is there asks for nothing"
    store = ShardStore('faulty://pets')
    store.prefetch(list(range(8)), wait=True)
    assert is_right(store) and len(list((tmp_path/'usual').glob('*.tar')))==8
    size = {name:len(content) for name,content in faults.objects('pets').items()}
    assert sorted(faults.reads())==[(name, f'0-{size[name]-1}') for name in sorted(size) if name.endswith('.tar')]
    faults.clear()
    assert epoch(loaders(store))==list(range(N)) and not faults.requests

def test_without_a_cache_neighbours_are_read_together(faults):
    "One request for a shard, however many samples and fields there are"
    store = opened()
    dls = loaders(store, interleave=None, bs=40, valid_pct=0.)
    store.get_many(range(N), 'id')
    faults.clear()
    assert sorted(ids(dls.train))==list(range(N))
    assert len(faults.reads())<=2*8 and not faults.reads('fastai_remote')
    faults.clear()
    store.get_many(range(2*EACH), ['jpg','cls','id'], check=True)
    assert len(faults.reads())==2

def test_a_cache_that_cannot_hold_what_is_in_flight_is_refused(tmp_path):
    "One that holds a part of the whole will do"
    largest = int(opened().shards.size.max())
    with pytest.raises(ValueError, match='pets: 8 shards of up to .* the cache .* holds'):
        loaders(opened(cache=str(tmp_path/'a'), cache_size=2*largest), num_workers=4)
    dls = loaders(opened(cache=str(tmp_path/'b'), cache_size=3*largest), interleave=1, lanes=1)
    for _ in range(2): assert epoch(dls)==list(range(N))
    assert largest<=FileCache(tmp_path/'b').used()[0]<=3*largest

def test_folders_without_a_dataset_are_explained(faults):
    faults.put('other/a.txt', b'x')
    for folder,match in (('nope','no such folder, or an empty one'), ('','there are: .*pets'),
                         ('other','there are: a.txt')):
        with pytest.raises(StoreNotFound, match=match): opened(folder)
    faults.put('pets/manifest.json', None)
    with pytest.raises(StoreNotFound, match='index_shards'): opened()
    with pytest.raises(StoreExists, match='is there, and no manifest'): make('pets')

# --- refusals

def test_a_right_that_is_taken_away_ends_an_epoch_without_a_storm_of_requests(faults):
    dls = loaders(opened())
    dls.one_batch()
    faults.clear().fail('AccessDenied', n=ALWAYS)
    with fails(StoreUnavailable, 'refused: AccessDenied'): epoch(dls)
    assert len(faults.requests)<=2*64

def test_renewed_credentials_are_taken_and_no_sample_is_lost(faults):
    "Others are where they came from when those in use expire: in an epoch, and in an ingest"
    def renew(token): faults.token = faults.valid_token = token
    dls,seen = loaders(opened()),[]
    for k,(_,y) in enumerate(dls.train.new(drop_last=False)):
        seen += y.long().tolist()
        if k==1: renew('two')
    assert sorted(seen+ids(dls.valid))==list(range(N))
    def fn(sample):
        if sample['id']==40: renew('three')
        return sample
    assert make('renewed', fn=fn).written==N and alike(faults.objects('pets'), faults.objects('renewed'))

def test_credentials_that_nobody_renews_are_refused_after_two_attempts(faults):
    store = opened()
    store.get_many([0], 'jpg')
    faults.clear().valid_token = 'another'
    with pytest.raises(StoreUnavailable, match='refused: ExpiredToken.*2 attempts'): store.get_many([0], 'jpg')
    assert len(faults.requests)==2

# --- a server that is busy, breaks off, goes away

BREAKS = [ConnectionResetError('reset'), TimeoutError('late'), BrokenPipeError('broken'), s3_error('SlowDown'),
          s3_error('InternalError'), s3_error('ServiceUnavailable')]

@pytest.mark.parametrize('cached', [True,False])
def test_faults_that_pass_change_no_sample(faults, clock, cache, cached):
    "Each kind of fault, in the middle of an epoch, while shards and indices are read"
    dls = loaders(opened(cache=cache if cached else None))
    passing = [faults.fail(error, n=2, match=match) for match in (TARS, 'fastai_remote$|fastai_remote ')
               for error in BREAKS]
    assert epoch(dls)==list(range(N)) and is_right(opened()) and not any(fault.n for fault in passing)

def test_only_ranges_that_failed_are_asked_for_again(faults, clock):
    "With pauses that grow between the attempts"
    store = opened()
    store.get_many(range(N), 'id')
    faults.clear().fail('SlowDown', n=5, match='shard-000005.tar ')
    assert is_right(store, range(0, N, 4))
    asked = Counter(name for name,_ in faults.reads())
    assert asked.pop('shard-000005.tar')==6 and set(asked.values())=={1} and len(asked)==7
    assert len(clock.pauses)==5 and clock.pauses[0]<=.05 and clock.pauses[4]>=.4

def test_a_server_that_stays_busy_is_unavailable_when_the_timeout_is_over(faults, clock):
    "Address, cause, attempts and seconds are named; in an epoch, too"
    store = opened(timeout=60)
    dls = loaders(store)
    assert is_right(store)
    for error in BREAKS:
        faults.clear().fail(error, n=ALWAYS)
        began,attempts = clock.now,r'\d+ attempts in [56]\d\.\d s'
        with pytest.raises(StoreUnavailable, match=rf'faulty://pets: .*{re.escape(str(error))}.*\({attempts}\)'):
            store.get_many([0], 'jpg')
        assert 59<=clock.now-began<=60
    with fails(StoreUnavailable, attempts): epoch(dls)
    faults.clear()
    assert is_right(store)

# --- damage on the way

def test_what_comes_damaged_or_short_once_is_asked_for_again(faults):
    "Ranges of shards, and indices"
    for match in TARS,r'fastai_remote ':
        for fault in faults.flip,lambda **kw: faults.short(50, **kw):
            store = opened()
            damaged = fault(match=match)
            assert is_right(store) and damaged.n==0

def test_what_always_comes_damaged_is_named_after_a_few_requests(faults):
    name,offset,size = place(faults, 5)
    store = opened()
    store.get_many([5], 'id')
    faults.clear().flip(n=ALWAYS)
    message = f"pets: sample 5, field 'jpg' in {name} at byte {offset:,}: .*{size}"
    with pytest.raises(CorruptSample, match=message): store.get_many([5], 'jpg', check=True)
    assert len(faults.reads())==2

def test_a_server_that_cuts_off_all_answers_is_unavailable_and_no_sample_is_called_damaged(faults, clock):
    name,_,size = place(faults, 5)
    store = opened(timeout=60)
    store.get_many([5], 'id')
    faults.clear().short(50, n=ALWAYS)
    began = clock.now
    with pytest.raises(StoreUnavailable, match=f'{name}: {size-50} bytes came of {size} .*attempts'):
        store.get_many([5], 'jpg', check=True)
    assert 59<=clock.now-began<=60

def test_a_whole_shard_that_comes_damaged_is_fetched_again(faults, cache, tmp_path):
    "Once if the checksum is wrong, and as long as it is cut off; what is in the cache is right"
    for k,(fault,n) in enumerate(((faults.flip,1), (lambda **kw: faults.short(999, **kw),2))):
        store = opened(cache=FileCache(tmp_path/f'cache{k}'))
        store.get_many(range(N), 'id')
        faults.clear()
        fault(n=n)
        store.prefetch([3], wait=True)
        assert is_right(store, range(3*EACH, 4*EACH)) and len(faults.reads())==n+1
        copy, = (tmp_path/f'cache{k}').glob('*-shard-000003.tar')
        assert copy.read_bytes()==faults.content('pets/shard-000003.tar')

# --- damage at rest

def test_a_damaged_sample_is_named_or_replaced(faults, cache):
    name,offset,size = place(faults, 27)
    bad = int(opened().get_many([27], 'id')['id'][0])
    faults.put(f'pets/{name}', flipped(faults.content(f'pets/{name}'), offset+size//2))
    for where in None,cache:
        store = opened(cache=where)
        with fails(CorruptSample, f"pets: sample 27, field 'jpg' in {name} at byte {offset:,}"): epoch(loaders(store))
        dl = loaders(store, on_bad='replace', valid_pct=0.).train.new(drop_last=False)
        with pytest.warns(UserWarning, match='1 samples were missing or damaged.*27'): got = ids(dl)
        assert dl.replaced==[27] and len(got)==N and set(got)>=set(range(N))-{bad}

def test_samples_before_the_cut_of_a_truncated_shard_are_read(faults, cache, tmp_path):
    "The shard is fetched twice, and not kept; the samples after the cut are named, or replaced"
    name = 'shard-000004.tar'
    content = faults.content(f'pets/{name}')
    faults.put(f'pets/{name}', content[:len(content)//2])
    store = opened(cache=cache)
    store.prefetch([4], wait=True)
    assert is_right(store, [4*EACH, 4*EACH+1]) and not list((tmp_path/'cache').glob(f'*-{name}'))
    assert sum(limits.startswith('0-') for read,limits in faults.reads() if read==name)==2
    message = rf"pets: sample 49, field 'jpg' in {name} at byte .*: 0 of [\d,]+ bytes: the shard is cut off"
    with pytest.raises(CorruptSample, match=message): store.get_many([49], 'jpg')
    dl = loaders(store, on_bad='replace', valid_pct=0.).train.new(drop_last=False)
    with pytest.warns(UserWarning, match='samples were missing or damaged'): got = ids(dl)
    assert len(got)==N and set(dl.replaced)<=set(range(4*EACH+2, 5*EACH))
    assert 0<len(set(range(N))-set(got))<=len(dl.replaced)<EACH

@pytest.mark.parametrize('cached', [True,False])
def test_a_damaged_index_is_named_and_not_kept(faults, cache, tmp_path, cached):
    name = '.fastai_remote/shard-000002.tar.fastai_remote'
    content = faults.content(f'pets/{name}')
    for damaged in (b'', content[:-9], flipped(content, len(content)-99), flipped(content, 30), None):
        faults.put(f'pets/{name}', damaged)
        store = opened(cache=cache if cached else None)
        with pytest.raises((CorruptSample,MissingSample), match='pets: .*shard-000002'):
            store.get_many([2*EACH], 'jpg')
        assert not list((tmp_path/'cache').glob(f'*-{name}')) and is_right(store, [0])

def test_a_shard_that_is_deleted_in_an_epoch_is_named_with_its_samples(faults, cache):
    store = opened(cache=cache)
    store.get_many(range(N), 'id')
    faults.put('pets/shard-000006.tar', None)
    message = 'pets: shard shard-000006.tar is not there, with samples 60 to 69: .*/shard-000006.tar'
    with fails(MissingSample, message): epoch(loaders(store))
    dl = loaders(store, valid_pct=0., on_bad='replace').train.new(drop_last=False)
    with pytest.warns(UserWarning, match='10 samples were missing or damaged'): got = ids(dl)
    assert len(got)==N and dl.replaced==list(range(60, 70))

@pytest.mark.parametrize('cached,overwrite', [(True,True), (False,False)])
def test_a_dataset_that_is_replaced_while_it_is_read_is_not_taken_for_the_old_one(cache, cached, overwrite):
    "Nor is it called damaged"
    others = [{**item, 'jpg':noise(1000+item['id']), 'id':1000+item['id']} for item in ITEMS]
    where = cache if cached else None
    store,dls = opened(cache=where),loaders(opened(cache=where), lanes=1)   # most shards are not in the cache
    store.get_many(range(N), 'id')
    dls.one_batch()
    if not overwrite: ShardStore.delete('faulty://pets')
    make('pets', others, overwrite=overwrite)
    for _ in range(2):
        with pytest.raises(StoreNotFound, match='pets: replaced since it was opened: open it again'):
            store.get_many(range(N), 'jpg', check=True)
    if not cached:
        with fails(StoreNotFound, 'replaced since it was opened'): epoch(dls)
    got = opened(cache=where).get_many(range(N), ['jpg','id'], check=True)
    assert got['jpg'][9]==noise(int(got['id'][9])) and sorted(got['id'].tolist())==list(range(1000, 1000+N))

# --- ingests that find the server busy, or gone

@pytest.mark.parametrize('at', ['chunk-000003','manifest.json'])
def test_an_ingest_that_is_cut_off_is_resumed_to_the_same_bytes(faults, clock, at):
    "Until then, readers see nothing"
    faults.fail('SlowDown', n=ALWAYS, match=f'PUT .*{at}')
    with pytest.raises(StoreUnavailable, match='faulty://new.*: .*SlowDown.*attempts'): make('new', timeout=6)
    with pytest.raises(StoreNotFound, match='not finished'): opened('new')
    faults.clear()
    report = make('new')
    assert report.written==N and report.resumed>=(N if at=='manifest.json' else 2*EACH)
    assert alike(faults.objects('pets'), faults.objects('new'))

def test_an_ingest_whose_server_is_gone_ends_soon_after_its_timeout(faults, clock):
    "Locks included; and it can be abandoned"
    def fn(sample):
        if sample['id']==40: faults.fail('SlowDown', n=ALWAYS)
        return sample
    began = clock.now
    with pytest.raises(StoreUnavailable, match='attempt'): make('new', fn=fn, timeout=6, shuffle=False)
    assert clock.now-began<60
    faults.clear()
    with pytest.raises(StoreNotFound): opened('new')
    ShardStore.abandon('faulty://new')
    assert not faults.names('new')

# --- shards of others

@pytest.fixture
def foreign(faults, tmp_path):
    "Three tars as WebDataset writes them"
    for k in range(3):
        members = [(f'{i:05}.{field}', content) for i in range(k*EACH, (k+1)*EACH)
                   for field,content in (('jpg',ITEMS[i]['jpg']), ('cls',str(i%3).encode()))]
        faults.put(f'foreign/part-{k}.tar', tar(tmp_path/'foreign.tar', members).read_bytes())

def indexed(**kwargs): return index_shards('faulty://foreign', num_workers=1, progress=False, **kwargs)

def test_faults_while_tars_are_indexed_change_no_sample(faults, clock, foreign):
    passing = [faults.fail('SlowDown', n=5), faults.short(999, n=2, match='GET .*part-1.tar'),
               faults.short(2*EACH*512+512, match='GET .*part-2.tar'),
               faults.fail(ConnectionResetError('reset'), n=4, match=TARS)]
    report = indexed()
    assert (report.written,report.failed)==(3*EACH,0) and not any(fault.n for fault in passing)
    faults.short(99, n=9, match='GET .*part-0.tar')
    got = opened('foreign').get_many(range(3*EACH), ['jpg','cls'], check=True)
    assert got['jpg']==[item['jpg'] for item in ITEMS[:3*EACH]]
    assert got['cls'].tolist()==[i%3 for i in range(3*EACH)]

def test_answers_that_stay_short_are_not_taken_for_the_end_of_a_tar(faults, clock, foreign):
    faults.short(3000, n=ALWAYS, match='GET .*part-1.tar')
    with pytest.raises(StoreUnavailable, match='part-1.tar: .* bytes came of'): indexed(timeout=6)
    with pytest.raises(StoreNotFound): opened('foreign')
    faults.clear()
    assert indexed().written==3*EACH

def test_manifest_and_indices_may_be_elsewhere(faults, foreign, tmp_path):
    "Shards stay as they are, and deleting takes what is ours; secrets are not kept"
    tars,options = {f'part-{k}.tar' for k in range(3)},{'secret':'n0t-f0r-y0u'}
    indexed(to=tmp_path/'index', storage_options=options)
    assert set(faults.names('foreign'))==tars and b'n0t-f0r' not in b''.join(files(tmp_path/'index').values())
    store = ShardStore(tmp_path/'index', cache=None, storage_options=options, shards_url='faulty://foreign')
    assert b'n0t-f0r' not in pickle.dumps(store)
    assert len(ids(loaders(store, y='cls', valid_pct=0.).train.new(drop_last=False)))==3*EACH
    indexed()
    assert set(faults.names('foreign'))>tars
    ShardStore.delete('faulty://foreign')
    assert set(faults.names('foreign'))==tars
