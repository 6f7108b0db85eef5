"`RemoteDataset`: any store for a plain torch `DataLoader`, in WebDataset's words"
import gc, io, json, os, pickle, subprocess, sys, tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import draw, fails
from fastcore.test import expect_fail
from torch.utils.data import DataLoader, Subset, default_collate

from fastai_remote.core import CorruptSample, MissingSample, UnknownField
from fastai_remote.store.base import MemoryStore
from fastai_remote.ingest.index import index_shards
from fastai_remote.ingest.run import to_redis
from fastai_remote.store.redis import RedisStore
from fastai_remote.load.dataset import RemoteDataset
from fastai_remote.load.steps import image_specs as _specs
from fastai_remote.store.shards import ShardStore
from fastai_remote.ingest.shards import to_shards
from fastai_remote.store.whole_shards import WholeShards

n,folder = 230,Path(__file__).parent
def jpg(i):
    draw(i).save(f:=io.BytesIO(), 'JPEG')
    return f.getvalue()
def sample(i): return {'txt':f'{i}', 'cls':i%3, 'x.f4':i/8}
def number(t): return int(t)

@pytest.fixture(scope='module')
def local(tmp_path_factory):
    "230 samples in shards of 20"
    to_shards({'train':list(range(200)), 'valid':list(range(200,n))}, d:=str(tmp_path_factory.mktemp('shards')),
        sample, num_workers=1, maxcount=20, progress=False)
    return ShardStore(d)

@pytest.fixture(scope='module')
def s3():
    pytest.importorskip('moto')
    from s3servers import moto_server
    with moto_server() as s: yield s

@pytest.fixture(scope='module')
def remote(s3, local, tmp_path_factory):
    "The same on S3, with a cache"
    to_shards(local, url:=f's3://{s3.bucket}/ds', num_workers=1, maxcount=20, progress=False, shuffle=False,
        storage_options=s3.options)
    return ShardStore(url, cache=str(tmp_path_factory.mktemp('cache')), storage_options=s3.options)

@pytest.fixture(scope='module')
def memory():
    return MemoryStore({'txt':[f'{i}'.encode() for i in range(n)], 'cls':np.arange(n, dtype=np.uint8)%3,
        'x.f4':np.arange(n, dtype='f4')/8}, 'mem', splits={'train':[0,200], 'valid':[200,n]})

@pytest.fixture(scope='module')
def redis(server):
    to_redis({'train':list(range(200)), 'valid':list(range(200,n))}, server.url, 'torch', sample, num_workers=1,
        progress=False)
    return RedisStore(server.url, 'torch')

@pytest.fixture(params=['memory','local','remote','redis'])
def store(request): return request.getfixturevalue(request.param)

def chain(store): return RemoteDataset(store).decode().to_tuple('txt', 'cls').map_tuple(number)
def nums(batches):
    "Numbers of an epoch in turn; their labels must be theirs"
    res = [(int(i), int(c)) for x,y in batches for i,c in zip(x, y)]
    assert all(c==i%3 for i,c in res)
    return [i for i,_ in res]
def map_style(ds, workers, bs=16, **kw):
    return DataLoader(ds, batch_sampler=ds.batches(bs, num_workers=workers, **kw), num_workers=workers)
def iterable(ds, workers, bs=16, persistent=False, **kw):
    return DataLoader(ds.batched(bs, **kw), batch_size=None, num_workers=workers, persistent_workers=persistent)

@pytest.mark.filterwarnings('error::UserWarning', 'ignore:This DataLoader will create')
@pytest.mark.parametrize('workers', [0,1,3])
@pytest.mark.parametrize('make', [map_style, iterable])
def test_once_an_epoch(store, make, workers):
    "Each sample exactly once, in as many batches as the loader says; all but the last whole, or gone"
    ds = chain(store)
    for kw in (dict(), dict(drop_last=True), dict(interleave=None), dict(shuffle=False), dict(bs=100, interleave=2)):
        got = list(dl:=make(ds, workers, **kw))
        bs = kw.get('bs', 16)
        assert len(got)==len(dl)==(n//bs if kw.get('drop_last') else -(-n//bs)) and all(len(x)==bs for x,_ in got[:-1])
        assert len(set(nums(got)))==len(nums(got))==(n//bs*bs if kw.get('drop_last') else n)
        if not kw.get('shuffle', True) and store.name=='mem': assert nums(got)==list(range(n))

@pytest.mark.parametrize('make', [map_style, iterable])
def test_a_new_order_each_epoch_and_the_same_again(local, make):
    "torch's generator decides; or `seed` and `set_epoch`"
    for workers,kw in ((0,{}), (2,{}), (2,dict(seed=1))):
        dl = make(chain(local), workers, **kw)
        src = dl.batch_sampler if make is map_style else dl.dataset
        def epochs():
            res = []
            for e in range(3):
                if kw: src.set_epoch(e)
                res.append(tuple(nums(dl)))
            return res
        torch.manual_seed(3)
        first = epochs()
        if not kw: torch.manual_seed(3)
        assert first==epochs() and len(set(first))==3 and first[0]!=tuple(sorted(first[0]))

def test_persistent_workers_get_new_orders(local):
    for kw in ({}, dict(seed=1)):
        dl = iterable(chain(local), 2, persistent=True, **kw)
        got = []
        for e in range(3):
            dl.dataset.set_epoch(e)
            got.append(tuple(nums(dl)))
        assert len(set(got))==3 and all(sorted(o)==list(range(n)) for o in got)

def test_ranks_have_the_same_number_of_batches_and_all_samples(store):
    for make in (map_style, iterable):
        for kw in ({}, dict(shuffle=False)):
            got = [nums(dl:=make(chain(store), 2, rank=r, world_size=3, seed=5, **kw)) for r in range(3)]
            assert len(dl)==5 and [len(o) for o in got]==[77]*3 and len(set(sum(got, [])))==n

RANK = '''
import sys, torch.distributed as dist
rank,path,url = int(sys.argv[1]),sys.argv[2],sys.argv[3]
dist.init_process_group('gloo', init_method=url, rank=rank, world_size=2)
from torch.utils.data import DataLoader
from fastai_remote import ShardStore
from fastai_remote.load.dataset import RemoteDataset
ds = RemoteDataset(ShardStore(path)).decode().to_tuple('txt', 'cls')
it,mp = ds.batched(16),ds.batches(16, num_workers=2)
for b,dl in ((it, DataLoader(it, batch_size=None, num_workers=2)),
        (mp, DataLoader(ds, batch_sampler=mp, num_workers=2))):
    for e in range(2):
        b.set_epoch(e)
        print(*[t for x,_ in dl for t in x])
dist.destroy_process_group()
'''
@pytest.mark.parametrize('make', ['batches','batched'])
def test_ranks_of_torchrun(local, monkeypatch, make):
    "Also before, or without, `init_process_group`: each rank gets its share, and not the whole dataset"
    ds = chain(local)[:200]
    monkeypatch.setenv('WORLD_SIZE', '4')
    def numbers(rank):
        monkeypatch.setenv('RANK', str(rank))
        source = getattr(ds, make)(16, seed=1)
        return nums(DataLoader(ds, batch_sampler=source) if make=='batches' else DataLoader(source, batch_size=None))
    assert sorted(i for rank in range(4) for i in numbers(rank))==sorted(nums(DataLoader(ds, batch_size=50)))
    for rank,world_size in ('4','4'),('-1','4'),('0','0'),('first','4'),('0','many'):
        monkeypatch.setenv('RANK', rank)
        monkeypatch.setenv('WORLD_SIZE', world_size)
        with pytest.raises(ValueError, match=f'RANK={rank} and WORLD_SIZE={world_size} .*give rank='):
            len(getattr(ds, make)(16))
    monkeypatch.setenv('WORLD_SIZE', '4')
    monkeypatch.delenv('RANK')
    with pytest.raises(ValueError, match='WORLD_SIZE=4 .*RANK is not'): len(getattr(ds, make)(16))
    assert len(getattr(ds, make)(16, rank=0, world_size=1))==13
    monkeypatch.setenv('WORLD_SIZE', '1')
    assert len(getattr(ds, make)(16))==13

def test_two_processes_with_gloo(local, tmp_path, interpreters):
    "The ranks are torch.distributed's, and share each epoch"
    ranks = [interpreters.start(RANK, r, local.storage.url, f'file://{tmp_path}/meet', fastai=False) for r in range(2)]
    a,b = ([[int(t) for t in l.split()] for l in rank.wait().stdout.splitlines()] for rank in ranks)
    assert len(a)==len(b)==4 and all(len(x)==len(y)==n//2 and sorted(x+y)==list(range(n)) for x,y in zip(a, b))
    assert a[0]!=a[1] and a[2]!=a[3]

@pytest.mark.parametrize('method', ['fork','spawn','forkserver'])
def test_start_methods(remote, method):
    "Workers however started read the remote store, whose secret no pickle holds"
    ds = chain(remote)
    assert b'anything' not in (d:=pickle.dumps(ds)) and len(d)<2000 and 'anything' not in repr(ds)
    for dl in (DataLoader(ds, batch_sampler=ds.batches(32), num_workers=1, multiprocessing_context=method),
            DataLoader(ds.batched(32), batch_size=None, num_workers=1, multiprocessing_context=method)):
        assert sorted(nums(dl))==list(range(n))

@pytest.mark.parametrize('make', [map_style, iterable])
def test_whole_shards_are_fetched_once(remote, make, tmp_path, monkeypatch):
    "A worker reads its shards through the cache; the last shards of an epoch were fetched ahead"
    fetched = tmp_path/'log'
    def download(self, u, f, was=WholeShards.download):
        with open(fetched, 'a') as o: o.write(f'{u}\n')
        return was(self, u, f)
    monkeypatch.setattr(WholeShards, 'download', download)
    store = ShardStore(remote.storage, cache=str(tmp_path/'cache'))
    assert sorted(nums(make(chain(store), 2, interleave=2)))==list(range(n))
    got = Counter(fetched.read_text().split())
    assert max(got.values())==1 and len(got)>=len(store.shards)-2   # those at work first may have been read by range
    fetched.unlink()
    assert len(nums(make(chain(store), 2, interleave=2)))==n and not (fetched.exists()
        and len(fetched.read_text().split())>2)

def test_a_random_sampler_fetches_no_whole_shards(remote, tmp_path, monkeypatch):
    monkeypatch.setattr(WholeShards, 'download', lambda *a: pytest.fail('a whole shard'))
    ds = chain(ShardStore(remote.storage, cache=str(tmp_path)))
    assert sorted(nums(DataLoader(ds, batch_size=16, shuffle=True)))==list(range(n))

def test_one_request_a_batch(memory, monkeypatch):
    asked = []
    monkeypatch.setattr(MemoryStore, 'read_values',
        lambda self, idxs, fields, was=MemoryStore.read_values: asked.append((len(idxs), fields))
        or was(self, idxs, fields))
    ds = chain(memory)
    nums(DataLoader(ds, batch_size=100))
    assert asked==[(100, ['txt','cls','txt.crc']), (100, ['txt','cls','txt.crc']), (30, ['txt','cls','txt.crc'])]
    nums(DataLoader(Subset(ds, range(50)), batch_size=50))
    assert asked[-1][0]==50 and len(asked)==4

def test_parts(store):
    ds = chain(store)
    assert [len(ds.split(s)) for s in ('train','valid')]==[200,
        30] and sorted(nums(iterable(ds.split('valid'), 2)))==list(range(200,n))
    assert sorted(x for x,_ in ds[:50])==sorted(nums(map_style(ds[:50], 2)))==sorted(x
        for x,_ in map(ds.__getitem__, range(50)))
    assert ds[-1]==ds[n-1] and ds[10:][np.int64(5)]==ds[15] and len(ds[:0])==0==len(list(iterable(ds[:0], 0)))==len(
        list(map_style(ds[:0], 0)))
    with expect_fail(IndexError): ds[n]
    for part in ds[:50],ds[::-1]:   # also all of it in another order
        with expect_fail(ValueError, contains='a part'): part.split('train')

def test_a_sample_without_steps(store):
    s = RemoteDataset(store)[7]
    assert s['__key__']=='000000007' and type(s['txt']) is bytes and type(s['cls']) is int and s[
        'x.f4'].dtype==np.float32
    assert default_collate([s])['x.f4'].dtype==torch.float32 and default_collate([s])['cls'].dtype==torch.int64
    assert RemoteDataset(store).decode().map(lambda d: d['txt'])[7]==s['txt'].decode()
    assert RemoteDataset(store).map(lambda d: {**d, 'new':1}).to_tuple('new cls')[7]==(1,s['cls'])

@pytest.mark.parametrize('mode', ['RGB','L','RGBA','P'])
def test_pictures_are_webdatasets(mode):
    "Whatever is stored: each spec gives what WebDataset gives"
    wds = pytest.importorskip('webdataset.autodecode')
    assert set(_specs)=={*wds.imagespecs}
    draw(3).convert(mode).save(f:=io.BytesIO(), 'PNG')
    ds = RemoteDataset(MemoryStore({'png':[f.getvalue()]}))
    for spec in _specs:
        a,b = ds.decode(spec)[0]['png'],wds.imagehandler(spec)('png', f.getvalue())
        assert isinstance(a, type(b)) and getattr(a, 'dtype', 0)==getattr(b, 'dtype',
            0) and np.array_equal(np.asarray(a), np.asarray(b)), spec
    assert ds.decode()[0]['png'].mode==mode

@pytest.fixture
def mixed(tmp_path):
    "Shards that others wrote: some samples are jpg, some png; some have a json too"
    with tarfile.open(tmp_path/'a.tar', 'w') as t:
        for i in range(24):
            f = io.BytesIO()
            draw(i).save(f, 'PNG' if i%3==0 else 'JPEG')
            for ext,b in (('png' if i%3==0 else 'jpg', f.getvalue()), ('cls', b'%d'%(i%3)),
                    *([('json', b'{}')] if i%2 else [])):
                (m:=tarfile.TarInfo(f'{i:04}.{ext}')).size = len(b)
                t.addfile(m, io.BytesIO(b))
    index_shards(str(tmp_path), num_workers=1, progress=False)
    return ShardStore(str(tmp_path))

def test_alternatives(mixed):
    ds = RemoteDataset(mixed).decode('pil')
    got = ds.to_tuple('jpg;png', 'cls')
    for k,(im,c) in enumerate(got): assert (im.size,c)==(draw(k).size,k%3)
    assert [set(ds[k]) for k in (0,1)]==[{'__key__','__url__','png','cls'}, {'__key__','__url__','jpg','cls','json'}]
    with expect_fail(MissingSample, contains="field 'jpg'"): ds.to_tuple('jpg', 'cls').__getitems__([1,3])
    with expect_fail(MissingSample, contains="sample 2 has no 'png;json'"): ds.to_tuple('png;json')[2]
    with expect_fail(UnknownField, contains="no field 'webp;gif'"): ds.to_tuple('jpg;png', 'webp;gif')

@pytest.mark.parametrize('fields,options', [('txt', {}), ('txt?', {}), ('txt;other.txt', {}), ('cls txt?', {}),
                                            ('txt', dict(missing_is_error=False))])
def test_a_value_that_was_lost_is_not_one_that_samples_may_lack(fields, options):
    "Every sample has a text, says the manifest: `txt?` is no leave to train without one that was evicted"
    store = MemoryStore({'txt':[b'a',b'b'], 'other.txt':[b'c',b'd'], 'cls':np.zeros(2, np.uint8)}, 'mem')
    ds = RemoteDataset(store).to_tuple(fields, **options)
    assert len(list(ds))==2
    store.columns['txt'][1] = None
    assert ds[0][-1]==b'a'
    with expect_fail(MissingSample, contains="sample 1 is missing (field 'txt')"): ds[1]
    assert len(list(RemoteDataset(store).to_tuple('txt', handler=lambda e: True)))==1

@pytest.mark.parametrize('fields', ['jpg', 'jpg;png'])
def test_damage_names_the_sample(mixed, fields):
    b = mixed.get_many([5], 'jpg')['jpg'][0]
    path = Path(mixed.storage.path('a.tar'))
    path.write_bytes(path.read_bytes().replace(b[40:], b[40:-9]+b'\0'*9))
    ds = RemoteDataset(ShardStore(mixed.storage.url))[5:6].decode('pil').to_tuple(fields)
    for dl in (DataLoader(ds), iterable(ds, 1)):
        with fails(CorruptSample, r"sample 5, field 'jpg' in a\.tar at byte"): list(dl)

def test_a_function_that_fails_names_the_sample(memory):
    def bad(i): return 1/(i-77)
    for dl in (map_style(chain(memory).map_tuple(bad), 0), iterable(chain(memory).map_tuple(bad), 2)):
        with fails(ZeroDivisionError) as e: list(dl)
        assert 'mem: sample 77, in .map_tuple' in str(e.value)+str(getattr(e.value, '__notes__', ''))
    with expect_fail(ValueError, contains='3 functions for a tuple of 2'): chain(memory).map_tuple(None, None, None)[0]

def test_wrong_arguments(memory):
    for args in ((3,), ({'key':'very secret'},), (memory,'b','f')):
        with pytest.raises(TypeError) as e: RemoteDataset(*args)
        assert 'secret' not in str(e.value)
    rank = 'want a rank below world_size'
    for kw,wanted in ((dict(bs=0), 'want bs of at least 1, not 0'), (dict(rank=2, world_size=2), rank),
                      (dict(interleave=0), 'want interleave of at least 1, not 0'), (dict(world_size=2), rank),
                      (dict(rank=1), rank)):
        with expect_fail(ValueError, contains=wanted): chain(memory).batched(**kw)
    with expect_fail(ValueError, contains='want interleave of at least 1, not 0'): chain(memory).shuffle(interleave=0)
    for seed in -1,1.5,'7':
        for make in chain(memory).batches,chain(memory).batched,chain(memory).stream,chain(memory).shuffle:
            with expect_fail(ValueError, contains=f'seed is an integer of at least 0, not {seed!r}'):
                iter(make(seed=seed))
    for method in chain(memory).stream,chain(memory).batches:
        with expect_fail(ValueError, contains=rank): method(rank=1)
    with expect_fail(ValueError, contains="not 'jpeg'"): RemoteDataset(memory).decode('jpeg')
    assert repr(RemoteDataset(memory).to_tuple('txt').map_tuple(
        number))=="RemoteDataset('mem', 230 samples).to_tuple('txt').map_tuple(number)"

UPLOAD = '''
from PIL import Image
from fastai_remote import s3_options, to_shards
class Squares:
    classes = ['dark','bright']
    def __len__(self): return 130
    def __getitem__(self, i): return Image.new('RGB', (40+i%5,50), (2*i,)*3), int(i>=65)
if __name__ == '__main__':
    client = s3_options(URL, ACCESS_KEY, SECRET_KEY)
    bucket, folder = BUCKET, 'imagenet-val'
    to_shards(Squares(), f's3://{bucket}/{folder}', storage_options=client, maxsize=1e8, maxcount=100_000,
        num_workers=1)
'''
TRAIN = '''
import torch
from torchvision import transforms
from tqdm import tqdm
from fastai_remote.load.dataset import RemoteDataset
from fastai_remote import s3_options, ShardStore

preproc = transforms.Compose([
    transforms.RandomResizedCrop(224),
    transforms.RandomHorizontalFlip(),
    transforms.ToTensor(),
])

if __name__ == '__main__':
    client = s3_options(URL, ACCESS_KEY, SECRET_KEY)
    bucket, folder = BUCKET, 'imagenet-val'
    dataset = (RemoteDataset(ShardStore(f's3://{bucket}/{folder}', storage_options=client))
        .decode("pil")                    # Decode the data as PIL images
        .to_tuple("jpg;png", "cls")       # Extract images and labels from the dataset
        .map_tuple(preproc, lambda x: x)  # Apply data augmentations
        .batched(64)                      # Make batches of 64 images
    )
    dataloader = torch.utils.data.DataLoader(dataset, num_workers=3, batch_size=None)
    for image, label in tqdm((x for x in dataloader), total=100000/60):
        assert (image.mean((1,2,3))>.505).long().tolist()==label.tolist()
        print(tuple(image.shape), label.dtype, int(label.sum()))
'''
def test_the_script_of_the_ancestor(s3, tmp_path):
    "Only its imports are others, the upload is `to_shards`, and a dataset is made of a store"
    pytest.importorskip('torchvision')
    head = f'URL,ACCESS_KEY,SECRET_KEY,BUCKET = {(s3.endpoint, s3.key, s3.secret, s3.bucket)!r}'
    env = {**os.environ, 'XDG_CACHE_HOME':str(tmp_path), 'FASTAI_REMOTE_CACHE':str(tmp_path)}
    def run(name, code):
        (f:=tmp_path/name).write_text(head+code)
        r = subprocess.run([sys.executable, '-W', 'ignore', f], capture_output=True, text=True, env=env)
        assert r.returncode==0, r.stderr
        return r.stdout.splitlines()
    run('upload.py', UPLOAD)
    out = run('train.py', TRAIN)
    assert [l.split(') ')[0] for l in out]==['(64, 3, 224, 224','(64, 3, 224, 224',
        '(2, 3, 224, 224'] and all('torch.int64' in l for l in out) and sum(int(l.split()[-1]) for l in out)==65

def measure(million):
    """A start and some batches of so many samples: growth of this process and of its workers, and the size of the
    pickle, bytes"""
    from fastai_remote.store.shard_index import ShardTable
    from test_memory import MB, Numbers, children, own, private
    def day(n):
        store = Numbers(n)
        k = n//10_000
        store.shards = ShardTable([str(i) for i in range(k)], np.full(k, 10_000), np.full(k, 10**8), np.zeros(k),
            np.zeros(k))
        store.check_cache = store.prefetch = lambda *a, **k: None
        res = []
        for ds in (RemoteDataset(store).decode('torch').to_tuple('png', 'cls'),
                RemoteDataset(Numbers(n)).decode('torch').to_tuple('png', 'cls')):
            for dl in (map_style(ds, 2, 64), iterable(ds, 2, 64)):
                it,seen = iter(dl),{}
                for k in range(40):
                    next(it)
                    if k%10==0 or k==39:   # the kernel takes 15 ms for the numbers of a process
                        for p in children(): seen.setdefault(p, []).append(private(p))
                res.append((own(), [max(o)-o[0] for o in seen.values()]))
                del it   # and with it its workers
        return max(o for o,_ in res),max(g for _,gs in res
            for g in gs),len(pickle.dumps(RemoteDataset(Numbers(n)).batched(64)))
    day(1_000_000)
    gc.collect()
    before = own()
    parent,worker,size = day(million*1_000_000)
    return dict(parent=parent-before, worker=worker, pickle=size, MB=MB)

@pytest.mark.skipif(sys.platform!='linux', reason='needs /proc')
def test_fifty_million_samples_cost_nothing(interpreters):
    r = json.loads(interpreters.run(Path(__file__), 50, check=True).stdout.splitlines()[-1])
    assert r['parent']<15*r['MB'] and r['worker']<15*r['MB'] and r['pickle']<3000, r

if __name__=='__main__': print(json.dumps(measure(int(sys.argv[1]))))
