"""`RemoteDataset`: any store for a plain torch `DataLoader`, in WebDataset's words

`test_epochs.py` tests its epochs, `test_webdataset_methods.py` its methods."""
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import draw, fails
from in_memory import Counted, in_memory
from inputs import encoded, write_tar
from shard_helpers import damage
from torch.utils.data import DataLoader, default_collate, Subset

from fastai_remote import CorruptSample, index_shards, MemoryStore, MissingSample, RemoteDataset, ShardStore, \
    UnknownField
from fastai_remote.load.steps import image_specs
from fastai_remote.store.shard_part import WholeShards

N = 60
def sample(i): return {'txt':f'{i}', 'cls':i%3, 'x.f4':i/8}

@pytest.fixture
def memory(): return in_memory({'train':range(50), 'valid':range(50, N)}, sample, 'mem')

@pytest.fixture
def remote(memory, tmp_path):
    "The samples in nine shards far away (in fsspec's memory, which forked workers share), with a cache"
    memory.copy(url:=f'memory://far/{tmp_path.name}', maxcount=7, shuffle=False, num_workers=1, progress=False)
    return ShardStore(url, cache=str(tmp_path/'cache'))

def chain(store): return RemoteDataset(store).decode().to_tuple('txt', 'cls').map_tuple(int)
def numbers(batches): return [int(i) for x,_ in batches for i in x]

def loader(kind, ds, workers=0, bs=8, **kwargs):
    if kind=='batched': return DataLoader(ds.batched(bs, **kwargs), batch_size=None, num_workers=workers)
    return DataLoader(ds, batch_sampler=ds.batches(bs, num_workers=workers, **kwargs), num_workers=workers)

# --- requests

def test_one_request_a_batch():
    "That of no field but those that are wanted is tested with streams, in `test_webdataset_methods.py`"
    store = Counted({'txt':[b'%d' % i for i in range(N)], 'cls':np.arange(N)%3})
    assert numbers(DataLoader(chain(store), batch_size=25))==list(range(N)) and store.reads==[25, 25, 10]
    numbers(DataLoader(Subset(chain(store), range(20)), batch_size=20))
    assert store.reads[3:]==[20]

@pytest.mark.parametrize('kind', ['batches', pytest.param('batched', marks=pytest.mark.slow)])
def test_whole_shards_are_fetched_once(remote, kind, tmp_path, monkeypatch):
    "A worker reads its shards through the cache; the last shards of an epoch were fetched ahead"
    fetched = tmp_path/'log'
    fetched.touch()
    def download(self, shard, file, was=WholeShards.download):
        with open(fetched, 'a') as log: log.write(f'{shard}\n')
        return was(self, shard, file)
    monkeypatch.setattr(WholeShards, 'download', download)
    assert sorted(numbers(loader(kind, chain(remote), 2, interleave=2)))==list(range(N))
    times = Counter(fetched.read_text().split())
    # those at work first may have been read by range
    assert max(times.values())==1 and len(times)>=len(remote.shards)-2
    fetched.write_text('')
    assert len(numbers(loader(kind, chain(remote), 2, interleave=2)))==N and len(fetched.read_text().split())<=2

def test_a_random_sampler_fetches_no_whole_shards(remote, monkeypatch):
    monkeypatch.setattr(WholeShards, 'download', lambda *args: pytest.fail('a whole shard'))
    assert sorted(numbers(DataLoader(chain(remote), batch_size=16, shuffle=True)))==list(range(N))

@pytest.mark.parametrize('failures', [1,2])
def test_a_batch_that_can_be_read_at_the_second_attempt_is_whole(failures):
    "A handler is asked about samples that cannot be read alone; meanwhile a server may have come back with all of them"
    class Recovering(MemoryStore):
        left = failures
        def read_values(self, numbers, fields):
            self.left -= 1
            if self.left>=0: raise MissingSample('not yet')
            return super().read_values(numbers, fields)
    store,asked = Recovering({'k.i4':np.arange(8, dtype='i4')}, 'recovering'),[]
    def handler(error):
        asked.append(error)
        return True
    dataset = RemoteDataset(store, handler=handler).to_tuple('k.i4')
    assert [k for k, in dataset.__getitems__(list(range(8)))]==list(range(8)) and not asked

# --- samples

def test_parts(memory):
    ds = chain(memory)
    assert [len(ds.split(split)) for split in ('train','valid')]==[50,10]
    assert sorted(numbers(loader('batched', ds.split('valid'))))==list(range(50, N))
    assert [x for x,_ in ds[:30]]==list(range(30))==sorted(numbers(loader('batches', ds[:30])))
    assert ds[-1]==ds[N-1]==(59,2) and ds[10:][np.int64(5)]==ds[15]
    with pytest.raises(IndexError): ds[N]
    with pytest.raises(TypeError, match='for a list of positions'): ds[[1,2]]
    with pytest.raises(KeyError, match="no split 'test'"): ds.split('test')
    for part in ds[:30], ds[::-1]:   # also all of it in another order
        with pytest.raises(ValueError, match='a part'): part.split('train')

def test_a_sample_without_steps(memory):
    ds = RemoteDataset(memory)
    s = ds[7]
    assert s['__key__']=='000000007' and type(s['txt']) is bytes and type(s['cls']) is int
    assert s['x.f4'].dtype==np.float32
    assert default_collate([s])['x.f4'].dtype==torch.float32 and default_collate([s])['cls'].dtype==torch.int64
    assert ds.decode().map(lambda d: d['txt'])[7]=='7'
    assert ds.map(lambda d: {**d, 'new':1}).to_tuple('new cls')[7]==(1,1)

@pytest.mark.parametrize('mode', ['RGB','L','RGBA'])
def test_pictures_are_those_of_webdataset(mode):
    "Whatever is stored: each spec gives what WebDataset gives"
    wds = pytest.importorskip('webdataset.autodecode')
    assert set(image_specs)=={*wds.imagespecs}
    content = encoded(draw(3).convert(mode))
    ds = RemoteDataset(MemoryStore({'png':[content]}))
    for spec in image_specs:
        a,b = ds.decode(spec)[0]['png'],wds.imagehandler(spec)('png', content)
        assert isinstance(a, type(b)) and getattr(a, 'dtype', 0)==getattr(b, 'dtype', 0), spec
        assert np.array_equal(np.asarray(a), np.asarray(b)), spec
    assert ds.decode()[0]['png'].mode==mode

@pytest.fixture
def mixed(tmp_path):
    "A tar of others: some samples are jpg, some png; some have a json too"
    members = []
    for i in range(9):
        kind = 'jpg' if i%3 else 'png'
        members.append((f'{i:04}.{kind}', encoded(draw(i), 'JPEG' if i%3 else 'PNG')))
        members.append((f'{i:04}.cls', b'%d'%(i%3)))
        if i%2: members.append((f'{i:04}.json', b'{}'))
    write_tar(tmp_path/'a.tar', members)
    return index_shards(str(tmp_path), num_workers=1, progress=False).store

def test_alternatives(mixed):
    ds = RemoteDataset(mixed).decode('pil')
    for k,(image,label) in enumerate(ds.to_tuple('jpg;png', 'cls')): assert (image.size,label)==(draw(k).size,k%3)
    assert [set(ds[k]) for k in (0,1)]==[{'__key__','__url__','png','cls'}, {'__key__','__url__','jpg','cls','json'}]
    with pytest.raises(MissingSample, match="field 'jpg'"): ds.to_tuple('jpg', 'cls').__getitems__([1,3])
    with pytest.raises(MissingSample, match="sample 2 has no 'png;json'"): ds.to_tuple('png;json')[2]
    with pytest.raises(UnknownField, match="no field 'webp;gif'"): ds.to_tuple('jpg;png', 'webp;gif')

# --- errors

@pytest.mark.parametrize('fields,options', [('txt?', {}), ('txt;other.txt', {}), ('txt', dict(missing_is_error=False))])
def test_a_value_that_was_lost_is_not_one_that_samples_may_lack(fields, options):
    "Every sample has a text, says the manifest: `txt?` is no leave to train without one that was evicted"
    store = MemoryStore({'txt':[b'a',b'b'], 'other.txt':[b'c',b'd'], 'cls':np.zeros(2, np.uint8)}, 'mem')
    ds = RemoteDataset(store).to_tuple(fields, **options)
    assert len(list(ds))==2
    store.columns['txt'][1] = None
    assert ds[0][-1]==b'a'
    with pytest.raises(MissingSample, match=r"sample 1 is missing \(field 'txt'\)"): ds[1]
    assert len(list(RemoteDataset(store).to_tuple('txt', handler=lambda e: True)))==1

@pytest.mark.parametrize('fields', ['jpg','jpg;png'])
def test_damage_names_the_sample(mixed, fields):
    content = bytes(mixed.get_many([5], 'jpg')['jpg'][0])
    path = Path(mixed.storage.path('a.tar'))
    damage(path, path.read_bytes().replace(content[40:], content[40:-9]+b'\0'*9))
    ds = RemoteDataset(ShardStore(mixed.storage.url))[5:6].decode('pil').to_tuple(fields)
    for dl in DataLoader(ds), loader('batched', ds, 1):
        with fails(CorruptSample, r"sample 5, field 'jpg' in a\.tar at byte"): list(dl)

@pytest.mark.parametrize('kind,workers', [('batches',0), ('batched',1)])
def test_a_function_that_fails_names_the_sample(memory, kind, workers):
    with fails(ZeroDivisionError) as e: list(loader(kind, chain(memory).map_tuple(lambda i: 1/(i-37)), workers))
    assert 'mem: sample 37, in .map_tuple' in str(e.value)+str(getattr(e.value, '__notes__', ''))

@pytest.mark.parametrize('use,message', [
    (lambda ds: ds.batched(bs=0), 'want bs of at least 1, not 0'),
    (lambda ds: ds.shuffle(interleave=0), 'want interleave of at least 1, not 0'),
    (lambda ds: ds.map_tuple(None, None, None)[0], '3 functions for a tuple of 2'),
    (lambda ds: RemoteDataset(ds.store).decode('jpeg'), "not 'jpeg'"),
    *((lambda ds, make=make, rank=rank: getattr(ds, make)(**rank), 'want a rank below world_size')
      for make in ('stream','batches','batched')
      for rank in (dict(rank=2, world_size=2), dict(rank=1))),
    *((lambda ds, make=make, seed=seed: iter(getattr(ds, make)(seed=seed)),
       f'seed is an integer of at least 0, not {seed!r}')
      for make in ('stream','batches','batched','shuffle') for seed in (-1,1.5))])
def test_wrong_arguments(memory, use, message):
    with pytest.raises(ValueError, match=message): use(chain(memory))

def test_what_is_no_store_is_refused_without_showing_it(memory):
    for args in (3,), ({'key':'very secret'},), (memory,'b','f'):
        with pytest.raises(TypeError) as e: RemoteDataset(*args)
        assert 'secret' not in str(e.value)
    assert repr(chain(memory))=="RemoteDataset('mem', 60 samples).decode().to_tuple('txt', 'cls').map_tuple(int)"

# --- the script that this package comes from

UPLOAD = '''
from PIL import Image
from fastai_remote import s3_options, to_shards
class Squares:
    classes = ['dark','bright']
    def __len__(self): return 70
    def __getitem__(self, i): return Image.new('RGB', (40+i%5,50), (3*i,)*3), int(i>=35)
if __name__ == '__main__':
    client = s3_options(URL, ACCESS_KEY, SECRET_KEY)
    bucket, folder = BUCKET, 'imagenet-val'
    to_shards(Squares(), f's3://{bucket}/{folder}', storage_options=client, maxsize=1e8, maxcount=100_000,
        num_workers=1)
'''
TRAIN = '''
import torch
from torchvision import transforms
from fastai_remote.load.dataset import RemoteDataset
from fastai_remote import s3_options, ShardStore

preproc = transforms.Compose([
    transforms.RandomResizedCrop(64),
    transforms.ToTensor(),
])
if __name__ == '__main__':
    client = s3_options(URL, ACCESS_KEY, SECRET_KEY)
    bucket, folder = BUCKET, 'imagenet-val'
    dataset = (RemoteDataset(ShardStore(f's3://{bucket}/{folder}', storage_options=client))
        .decode("pil")
        .to_tuple("jpg;png", "cls")
        .map_tuple(preproc, lambda x: x)
        .batched(64))
    dataloader = torch.utils.data.DataLoader(dataset, num_workers=3, batch_size=None)
    for image, label in dataloader:
        assert (image.mean((1,2,3))>.405).long().tolist()==label.tolist()
        print(tuple(image.shape), label.dtype, int(label.sum()))
'''
@pytest.mark.slow
@pytest.mark.xdist_group('processes')
def test_the_script_of_the_ancestor(tmp_path, interpreters):
    "Only its imports are others, the upload is `to_shards`, and a dataset is made of a store"
    pytest.importorskip('torchvision')
    pytest.importorskip('moto')
    from s3servers import moto_server
    env = {**os.environ, 'XDG_CACHE_HOME':str(tmp_path), 'FASTAI_REMOTE_CACHE':str(tmp_path)}
    with moto_server() as s3:
        head = f'URL,ACCESS_KEY,SECRET_KEY,BUCKET = {(s3.endpoint, s3.key, s3.secret, s3.bucket)!r}'
        for name,code in ('upload',UPLOAD), ('train',TRAIN):
            (script:=tmp_path/f'{name}.py').write_text(head+code)
            run = interpreters.run(script, fastai=False, env=env)
            assert run.returncode==0, run.stderr
    lines = run.stdout.splitlines()
    assert [line.split(') ')[0] for line in lines]==['(64, 3, 64, 64','(6, 3, 64, 64']
    assert all('torch.int64' in line for line in lines) and sum(int(line.split()[-1]) for line in lines)==35
