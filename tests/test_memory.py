"""The promise: fifty million samples cost what one million cost

Memory is measured from /proc/*/smaps_rollup, in a process of its own for each kind of loader."""
import gc, json, os, pickle, shutil, sys, tempfile, zlib
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from fastai_remote import ShardStore, Store, StoreError
from fastai_remote.core import Manifest
from fastai_remote.store.shard_index import pack_index, ShardManifest, ShardTable
from inputs import encoded, npy

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('processes'),
              pytest.mark.skipif(sys.platform!='linux', reason='needs /proc')]
MB,million = 1_000_000,1_000_000

class Numbers(Store):
    "Makes its bytes from the number: one picture, and a label"
    def __init__(self, n):
        self.png = encoded(np.zeros((16,16,3)))
        self.manifest = Manifest('numbers', n, {'png':{'codec':'png','dtype':None}, 'cls':{'codec':'cls','dtype':'u1'}},
                                 vocab={'cls':list('abcdefgh')})
    def read_values(self, numbers, fields):
        return {f:[self.png]*len(numbers) if f=='png' else (numbers%8).astype(np.uint8) for f in fields}

class Tokens(Numbers):
    "Texts as stored tokens, with their lengths"
    def __init__(self, n):
        self.npy = npy(np.arange(2, 42, dtype=np.uint16))
        self.manifest = Manifest('tokens', n, {'tokens.npy':{'codec':'npy','dtype':None},
            'tokens_length.i4':{'codec':'i4','dtype':'i4'}, 'cls':{'codec':'cls','dtype':'u1'}},
            vocab={'cls':list('abcdefgh'), 'tokens.npy':[f'w{k}' for k in range(42)]})
    def read_values(self, numbers, fields):
        made = {'cls':(numbers%8).astype(np.uint8), 'tokens_length.i4':np.full(len(numbers), 40, np.int32)}
        return {f:made[f] if f in made else [self.npy]*len(numbers) for f in fields}

def shard_table(n, each):
    k = -(-n//each)
    sizes = np.diff(np.minimum(np.arange(k+1)*each, n))
    names = [f'shard-{i:06}.tar' for i in range(k)]
    return ShardTable(names, sizes, np.full(k, 10**7), np.zeros(k), np.full(k, 20_000), np.zeros(k))

class ShardNumbers(ShardStore):
    "The samples of `Numbers` in shards of 1,000, of which only the table exists"
    def __init__(self, n):
        self._numbers = Numbers(n)
        self._manifest,self._uid,self._cache,self._process_state = self._numbers.manifest,'',(None,),None
        self._manifest.fields['png.crc'] = {'codec':'crc','dtype':'u4'}
        self._tables = [shard_table(n, 1000)]
    manifest = property(lambda self: self._manifest)
    origin = ''
    def read_values(self, numbers, fields):
        got = self._numbers.read_values(numbers, [f for f in fields if f!='png.crc'])
        crc = zlib.crc32(self._numbers.png)
        return {f:got[f] if f in got else np.full(len(numbers), crc, np.uint32) for f in fields}
    def __reduce__(self): return ShardNumbers,(len(self),)

# --- loaders of `n` samples: `DataLoaders`, and items for a test loader

def of_store(store, block='ShardBlock', **kwargs):
    import fastai_remote as fr
    from fastai.vision.all import DataBlock
    blocks = getattr(fr, block),getattr(fr, block)('cls')
    dblock = DataBlock(blocks, get_items=fr.get_remote_items, splitter=fr.RandomStoreSplitter(0.2))
    return dblock.dataloaders(store, bs=64, num_workers=2, **kwargs),fr.get_remote_items(store)

def ours(n): return of_store(Numbers(n), 'RedisBlock')

_servers = []   # of this process
def tiered(n):
    "A Redis before shards"
    from fastai_remote import redis_server, TieredStore
    if not _servers: _servers.append(redis_server())
    return of_store(TieredStore(_servers[0].url, ShardNumbers(n)))

def tokens(n, **options):
    "A classifier of texts, or a language model"
    from fastai.vision.all import DataLoaders
    from fastai_remote import get_remote_items, TextOptions
    store = Tokens(n)
    dls = DataLoaders.from_store(store, x='tokens.npy', text=TextOptions(**options), bs=16, num_workers=2)
    return dls,get_remote_items(store)[:1000]

def language_model(n): return tokens(n, is_lm=True, seq_len=16)

# --- loaders of torch: a list of them, and an object to be pickled

def batches(n):
    from fastai_remote import RemoteDataset
    from torch.utils.data import DataLoader
    loaders = []
    for store in ShardNumbers(n), Numbers(n):
        ds = RemoteDataset(store).decode('torch').to_tuple('png', 'cls')
        loaders += [DataLoader(ds, batch_sampler=ds.batches(64, num_workers=2), num_workers=2),
                    DataLoader(ds.batched(64), batch_size=None, num_workers=2)]
    return loaders,RemoteDataset(Numbers(n)).batched(64)

def streams(n):
    from fastai_remote import mix, RemoteDataset
    from torch.utils.data import DataLoader
    one,half = (RemoteDataset(Numbers(k)).to_tuple('png', 'cls') for k in (n, n//2))
    made = [mix([one.shuffle(), half.shuffle()]).batched(64), mix([one,half], [1,1], end=n).batched(64),
            one.select(bool).shuffle().repeat(2).batched(64)]
    return [DataLoader(stream, batch_size=None, num_workers=1) for stream in made],made[0]

def ranks(n):
    "The loaders of four ranks, with a seed"
    from fastai_remote.load.distributed import RemoteDistributedDL
    train = of_store(ShardNumbers(max(n, 80_000)), seed=0)[0].train   # of a quarter, 200 batches are read
    return [RemoteDistributedDL(train.new(), rank=rank, world_size=4) for rank in range(4)],train

# --- measuring

def private(pid, what='Private_'):
    "Memory of a worker that it shares with nobody, bytes"
    lines = Path(f'/proc/{pid}/smaps_rollup').read_text().splitlines()
    return 1024*sum(int(line.split()[1]) for line in lines if line.startswith(what))
def own():
    "Memory of this process that is not a file's, bytes: its private memory, whether or not workers share it just now"
    return private('self', 'Anonymous')

def children():
    "Processes that this one has forked"
    found = []
    for thread in os.listdir('/proc/self/task'):
        try: found += map(int, Path(f'/proc/self/task/{thread}/children').read_text().split())
        except FileNotFoundError: pass   # a thread that has ended
    return found

def memory_of_workers(iterator, n_batches):
    "The memory of each worker of a loader of which one batch has been read, then, in between and at the end"
    seen = {pid:[private(pid)] for pid in children()}
    for k in range(1, n_batches):
        next(iterator)
        if k%10==0 or k==n_batches-1:   # the kernel takes 15 ms for the numbers of a process
            for pid in children(): seen.setdefault(pid, []).append(private(pid))
    return list(seen.values())

def day_of_fastai(n, n_batches, loaders):
    import fastai.vision.all as fv
    dls,items = loaders(n)
    next(it:=iter(dls.train))
    seen = memory_of_workers(it, n_batches)
    for dl in dls.valid, dls.test_dl(items): next(iter(dl))
    model = fv.nn.Sequential(fv.nn.Flatten(), fv.nn.Linear(3*16*16, 8))
    learn = fv.Learner(dls, model, loss_func=fv.CrossEntropyLossFlat(), path=tempfile.mkdtemp())
    learn.export()
    gc.collect()
    pickled,export = len(pickle.dumps(dls)),(learn.path/'export.pkl').stat().st_size
    shutil.rmtree(learn.path)
    return dict(own=own(), seen=seen, pickle=pickled, export=export)

def day_of_torch(n, n_batches, loaders):
    made,pickled = loaders(n)
    figures = dict(own=0, seen=[], pickle=len(pickle.dumps(pickled)))
    for loader in made:
        next(it:=iter(loader))
        figures['seen'] += memory_of_workers(it, n_batches)
        figures['own'] = max(figures['own'], own())
        del it   # and with it its workers
    return figures

def measure(n, n_batches=200, loaders=ours):
    "A working day of `n` samples, the same `loaders`: bytes. Its memory is taken while the loaders live"
    day = day_of_torch if loaders in (batches,ranks,streams) else day_of_fastai
    day(20_000, 10, loaders)   # imports, thread pools and the allocator's reserve for batches are not the data's
    gc.collect()
    before = own()
    figures = day(n, n_batches, loaders)
    seen = figures.pop('seen')
    return dict(figures, n=n, parent=figures.pop('own')-before, workers=[max(o) for o in seen],
                growth=[max(o)-o[0] for o in seen])

# Of texts, four million are enough: they cost 4 bytes a sample, and a classifier, whose validation set is sorted, 4 a
# sample of that. To sort fifty million takes a minute.
MILLIONS = {'tokens':4, 'language_model':4}
TEXTS = 6*4*million
# bytes of the parent, of the growth of a worker, and of a pickle; workers
LIMITS = {'ours':(30*MB, 20*MB, MB, 2), 'tiered':(30*MB, 20*MB, MB, 3),
          'tokens':(TEXTS+12*MB, 20*MB, TEXTS, 2), 'language_model':(TEXTS*4//6+12*MB, 20*MB, TEXTS, 2),
          'ranks':(30*MB, 20*MB, MB, 8), 'batches':(15*MB, 15*MB, 3000, 8), 'streams':(15*MB, 15*MB, 20_000, 3)}

@pytest.mark.parametrize('loaders', LIMITS)
def test_fifty_million_samples_cost_little_memory(interpreters, loaders):
    "And so as much as one million"
    run = interpreters.run(Path(__file__), loaders, MILLIONS.get(loaders, 50), check=True)
    figures,(parent,growth,pickled,n_workers) = json.loads(run.stdout.splitlines()[-1]),LIMITS[loaders]
    assert figures['parent']<parent and figures['pickle']<pickled and figures.get('export', 0)<MB, figures
    assert len(figures['growth'])==n_workers and max(figures['growth'])<growth, figures
    # by chance, a worker copies memory that it shares with its parent, whatever the number of samples
    assert min(figures['workers'])<40*MB, figures

# --- a billion samples

def write_billion(folder, k, n):
    "A manifest of `k` shards of `n` samples, and every hundredth part of their indices"
    rng = np.random.default_rng(0)
    index = pack_index({'png@':np.arange(n, dtype='u4'), 'png#':np.full(n, 7, 'u4'), 'png.crc':np.zeros(n, 'u4'),
                        'cls':np.zeros(n, 'u1')})
    (folder/'.fastai_remote').mkdir()
    for shard in range(0, k, k//100): (folder/f'.fastai_remote/shard-{shard:06}.tar.fastai_remote').write_bytes(index)
    table = ShardTable([f'shard-{shard:06}.tar' for shard in range(k)], np.full(k, n), rng.integers(9e7, 1e8, k),
                       rng.integers(0, 1<<32, k), np.full(k, len(index)), np.full(k, zlib.crc32(index)))
    codecs = {'png':('png',None), 'png.crc':('crc','u4'), 'cls':('cls','u1')}
    fields = {field:dict(codec=codec, dtype=dtype) for field,(codec,dtype) in codecs.items()}
    manifest = ShardManifest('d', k*n, fields, vocab={'cls':['a']}, prefix='shard', shards=table.pack(), uid='u')
    (folder/'manifest.json').write_bytes(manifest.to_json())
    return len(index)/n

def read_billion(folder, k, n):
    "Open it, and read a thousand labels"
    before,store = own(),ShardStore(str(folder))
    rng,gone = np.random.default_rng(1),0
    for i in rng.integers(0, 100, 1000).tolist(): assert store.get_many([i*(k//100)*n+i], 'cls')['cls'][0]==0
    for i in rng.integers(0, k*n, 50).tolist():
        try: store.get_many([i], 'cls')
        except StoreError: gone += 1
    return dict(n=len(store), grew=own()-before, gone=gone, pickle=len(pickle.dumps(store)))

@pytest.mark.parametrize('k,n', [(1_000_000,1000),(10_000,100_000)])
def test_a_billion_samples_in_shards(tmp_path, k, n):
    """Opening a billion samples, and a thousand look-ups, take less than 100 MB

    An index 12 bytes a value that varies in width, and the width of each that does not."""
    results = []
    for f in write_billion, read_billion:
        # Each in a new interpreter: neither what it takes to write nor the heap of the tests before is the reader's
        with get_context('spawn').Pool(1) as pool: results.append(pool.apply(f, (tmp_path, k, n)))
    each,read = results
    assert read['n']==10**9 and read['grew']<100*MB and read['gone']>=40 and read['pickle']<1000, read
    assert 13<=each<13+600/n

if __name__=='__main__':
    print(json.dumps(measure(int(sys.argv[2])*million, 60, globals()[sys.argv[1]])))
