"""The promise: fifty million samples cost what one million cost

Measured from /proc/*/smaps_rollup, in a process of its own."""
import gc, io, json, os, pickle, subprocess, sys, tempfile, time, zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastai_remote.core import Manifest
from fastai_remote.store.base import Store

pytestmark = pytest.mark.skipif(sys.platform!='linux', reason='needs /proc')
MB,million = 1_000_000,1_000_000

class Numbers(Store):
    "Makes its bytes from the number: one picture, and a label"
    def __init__(self, n):
        Image.fromarray(np.zeros((16,16,3), np.uint8)).save(f:=io.BytesIO(), 'PNG')
        self.png = f.getvalue()
        self.manifest = Manifest('numbers', n,
            {'png':{'codec':'png','dtype':None}, 'cls':{'codec':'cls','dtype':'u1'}}, vocab={'cls':list('abcdefgh')})
    def read_values(self, idxs, fields):
        return {f:[self.png]*len(idxs) if f=='png' else (idxs%8).astype(np.uint8) for f in fields}

def smaps(pid, what):
    return 1024*sum(int(l.split()[1]) for l in Path(f'/proc/{pid}/smaps_rollup').read_text().splitlines()
        if l.startswith(what))
def private(pid):
    "Memory of a worker that it shares with nobody, bytes"
    return smaps(pid, 'Private_')
def own():
    "Memory of this process that is not a file's, bytes: its private memory, whether or not workers share it just now"
    return smaps('self', 'Anonymous')

def children():
    "Processes that this one has forked"
    res = []
    for t in os.listdir('/proc/self/task'):
        try: res += map(int, Path(f'/proc/self/task/{t}/children').read_text().split())
        except FileNotFoundError: pass   # a thread that has ended
    return res

def cpu_time():
    "Seconds of CPU time that this process and its living children have used, other than of those that end meanwhile"
    seconds = time.process_time()
    for p in children():
        try: seconds += int(Path(f'/proc/{p}/schedstat').read_text().split()[0])/1e9
        except FileNotFoundError: pass   # it has ended
    return seconds

class clock:
    "Measures the CPU time of a block, here and in the workers that it starts"
    def __enter__(self): self.t = cpu_time(); return self
    def __exit__(self, *a): self.t = cpu_time()-self.t

def ours(n):
    "`DataLoaders` of a store of `n` samples"
    from fastai.vision.all import DataBlock
    from fastai_remote import RandomStoreSplitter, RedisBlock, get_remote_items
    block = DataBlock((RedisBlock, RedisBlock('cls')), get_items=get_remote_items, splitter=RandomStoreSplitter(0.2))
    return block.dataloaders(Numbers(n), bs=64, num_workers=2), get_remote_items(Numbers(n))

def measure(n, batches=200, loaders=ours):
    "A working day of `n` samples in a `DataLoaders` with two workers: seconds and bytes"
    import fastai.vision.all as fv
    def day(n, batches):
        with clock() as setup: dls,items = loaders(n)
        with clock() as start: next(it:=iter(dls.train))
        seen = {}
        for k in range(batches):
            next(it)
            if k%10==0 or k==batches-1:   # the kernel takes 15 ms for the numbers of a process
                for p in children(): seen.setdefault(p, []).append(private(p))
        with clock() as valid: next(iter(dls.valid))
        next(iter(dls.test_dl(items)))
        learn = fv.Learner(dls, fv.nn.Sequential(fv.nn.Flatten(), fv.nn.Linear(3*16*16, 8)),
            loss_func=fv.CrossEntropyLossFlat(), path=tempfile.mkdtemp())
        learn.export()
        gc.collect()
        return dict(own=own(), setup=setup.t, start=start.t, valid=valid.t, workers=[max(o) for o in seen.values()],
            growth=[max(o)-o[0] for o in seen.values()],
                    pickle=len(pickle.dumps(dls)), export=(learn.path/'export.pkl').stat().st_size)
    day(20_000, batches)   # imports, thread pools and the allocator's reserve for batches are not the data's
    gc.collect()
    before = own()
    res = day(n, batches)
    return dict(n=n, parent=res.pop('own')-before, **res)   # taken while the loaders live

def measured_by(interpreters, n):
    return json.loads(interpreters.run(Path(__file__), n, check=True).stdout.splitlines()[-1])

@pytest.fixture(scope='module')
def figures(interpreters): return {n:measured_by(interpreters, n*million) for n in (1,50)}

def test_parent_grows_by_less_than_30_MB(figures): assert figures[50]['parent']<30*MB, figures
def test_workers_grow_by_less_than_20_MB(figures):
    assert len(figures[50]['growth'])==2 and max(figures[50]['growth'])<20*MB, figures
def test_set_up_and_epoch_start_take_less_than_2_s_of_cpu_time(figures):
    assert sum(figures[50][k] for k in ('setup','start','valid'))<2, figures
def test_pickles_are_under_1_MB(figures): assert max(figures[50]['pickle'], figures[50]['export'])<MB, figures
def test_a_million_costs_the_same(figures, interpreters):
    a,b = figures[1],figures[50]
    assert abs(b['parent']-a['parent'])<15*MB, figures
    # By chance, a worker copies memory that it shares with its parent, whatever the number of samples
    assert abs(min(b['workers'])-min(a['workers']))<8*MB, figures
    if max(b['workers'])-max(a['workers'])>=8*MB: b = measured_by(interpreters, 50*million)
    assert max(b['workers'])-max(a['workers'])<8*MB, (figures, b)
    assert b['pickle']-a['pickle']<1000, figures

def shard_numbers(n):
    "A `ShardStore` of `n` samples in shards of 1,000 that makes its bytes from the number; its table is a real one"
    from fastai_remote import ShardStore
    class ShardNumbers(ShardStore):
        def __init__(self, n): self.n = n; self._make()
        def _make(self):
            from fastai_remote.store.shard_index import ShardTable
            k = -(-self.n//1000)
            self._numbers,self._manifest,self._uid,self._cache,self._process_state = Numbers(self.n),Numbers(
                self.n).manifest,'',(None,),None
            self._manifest.fields['png.crc'],self._manifest.overlays = {'codec':'crc','dtype':'u4'},[]
            self._table = ShardTable([f'shard-{i:06}.tar' for i in range(k)],
                np.diff(np.minimum(np.arange(k+1)*1000, self.n)), np.full(k, 10**7), np.zeros(k), np.full(k, 20_000))
        manifest = property(lambda self: self._manifest)
        def read_values(self, idxs, fields):
            got = self._numbers.read_values(idxs, [f for f in fields if f!='png.crc'])
            return {f:got[f] if f in got else np.full(len(idxs), zlib.crc32(self._numbers.png), np.uint32)
                for f in fields}
        def __reduce__(self): return shard_numbers,(self.n,)
    return ShardNumbers(n)

def shards(n):
    "`DataLoaders` of shards of `n` samples"
    from fastai.vision.all import DataBlock
    from fastai_remote import RandomStoreSplitter, ShardBlock, get_remote_items
    block = DataBlock((ShardBlock, ShardBlock('cls')), get_items=get_remote_items, splitter=RandomStoreSplitter(0.2))
    store = shard_numbers(n)
    return block.dataloaders(store, bs=64, num_workers=2), get_remote_items(store)

_servers = []   # of this process

def tiered(n):
    "`DataLoaders` of a Redis before shards of `n` samples"
    from fastai.vision.all import DataBlock
    from fastai_remote import RandomStoreSplitter, ShardBlock, TieredStore, get_remote_items, redis_server
    if not _servers: _servers.append(redis_server())
    block = DataBlock((ShardBlock, ShardBlock('cls')), get_items=get_remote_items, splitter=RandomStoreSplitter(0.2))
    store = TieredStore(_servers[0].url, shard_numbers(n))
    return block.dataloaders(store, bs=64, num_workers=2), get_remote_items(store)

class Tokens(Numbers):
    "Texts as stored tokens, with their lengths"
    def __init__(self, n):
        np.save(f:=io.BytesIO(), np.arange(2, 42, dtype=np.uint16))
        self.npy = f.getvalue()
        self.manifest = Manifest('tokens', n, {'tokens.npy':{'codec':'npy','dtype':None},
            'tokens_length.i4':{'codec':'i4','dtype':'i4'}, 'cls':{'codec':'cls','dtype':'u1'}},
            vocab={'cls':list('abcdefgh'), 'tokens.npy':[f'w{k}' for k in range(42)]})
    def read_values(self, idxs, fields):
        made = {'cls':(idxs%8).astype(np.uint8), 'tokens_length.i4':np.full(len(idxs), 40, np.int32)}
        return {f:made[f] if f in made else [self.npy]*len(idxs) for f in fields}

def token_loaders(n, **options):
    from fastai.vision.all import DataLoaders
    from fastai_remote import TextOptions, get_remote_items
    import fastai_remote.block
    store = Tokens(n)
    return DataLoaders.from_store(store, x='tokens.npy', text=TextOptions(**options), bs=64, num_workers=2),get_remote_items(
        store)[:1000]

def tokens(n):
    "`DataLoaders` of a classifier of `n` texts"
    return token_loaders(n)

def language_model(n):
    "`DataLoaders` of a language model of `n` texts"
    return token_loaders(n, is_lm=True, seq_len=16)

@pytest.mark.parametrize('loaders,each', [('tokens',6), ('language_model',4)])
def test_texts_cost_their_lengths_and_the_order_of_the_validation_set(loaders, each, interpreters):
    "4 bytes a sample, and for a classifier, whose validation set is sorted, 4 a sample of that"
    f = json.loads(interpreters.run(Path(__file__), 50, loaders, check=True).stdout.splitlines()[-1])
    assert f['parent']<each*50*million+30*MB and max(f['growth'])<20*MB and f['export']<MB, f

@pytest.mark.parametrize('loaders', ['shards','tiered'])
def test_shards_cost_as_little(loaders, interpreters):
    f = json.loads(interpreters.run(Path(__file__), 50, loaders, check=True).stdout.splitlines()[-1])
    assert f['parent']<30*MB and len(f['growth'])==2+(loaders=='tiered') and max(f['growth'])<20*MB and f['setup']+f[
        'start']+f['valid']<4 and max(f['pickle'], f['export'])<MB, f

_open = '''
import json, os, sys, tempfile, time
import numpy as np
from fastai_remote import ShardStore, StoreError
from fastai_remote.store.shard_index import ShardManifest, ShardTable, pack_index
def rss(): return 1024*sum(int(l.split()[1]) for l in open('/proc/self/smaps_rollup') if l.startswith('Anonymous'))
k,n = int(sys.argv[1]),int(sys.argv[2])
d = tempfile.mkdtemp()+'/d'
os.mkdir(d)
if (pid:=os.fork())==0:   # what it takes to write it is not the reader's
    rng = np.random.default_rng(0)
    idx = pack_index({'png@':np.arange(n, dtype='u4'), 'png#':np.full(n, 7, 'u4'),
        'png.crc':np.zeros(n, 'u4'), 'cls':np.zeros(n, 'u1')})
    for u in range(0, k, k//100): open(f'{d}/shard-{u:06}.tar.fastai_remote', 'wb').write(idx)
    t = ShardTable([f'shard-{u:06}.tar' for u in range(k)], np.full(k, n), rng.integers(9e7, 1e8, k),
        rng.integers(0, 1<<32, k), np.full(k, len(idx)))
    m = ShardManifest('d', k*n, {'png':{'codec':'png','dtype':None}, 'png.crc':{'codec':'crc','dtype':'u4'},
        'cls':{'codec':'cls','dtype':'u1'}}, vocab={'cls':['a']}, prefix='shard', shards=t.pack(), uid='u')
    open(f'{d}/manifest.json', 'w').write(m.to_json())
    os._exit(0)
os.waitpid(pid, 0)
before,t = rss(),time.process_time()
s = ShardStore(d)
t,gone,rng = time.process_time()-t,0,np.random.default_rng(1)
for i in rng.integers(0, 100, 1000).tolist(): assert s.get_many([i*(k//100)*n+i], 'cls')['cls'][0]==0
for i in rng.integers(0, k*n, 50).tolist():
    try: s.get_many([i], 'cls')
    except StoreError: gone += 1
each = os.path.getsize(f'{d}/shard-000000.tar.fastai_remote')/n
print(json.dumps(dict(n=len(s), grew=rss()-before, open=t, each=each, gone=gone,
    pickle=len(__import__('pickle').dumps(s)), manifest=os.path.getsize(f'{d}/manifest.json'))))
__import__('shutil').rmtree(os.path.dirname(d))
'''

@pytest.mark.parametrize('k,n', [(1_000_000,1000),(10_000,100_000)])
def test_a_billion_samples_in_shards(k, n):
    """Opening a billion samples, and a thousand look-ups, take less than 100 MB

    An index 12 bytes a value that varies in width, and the width of each that does not."""
    r = json.loads(subprocess.run([sys.executable, '-W', 'ignore', '-c', _open, str(k), str(n)], check=True,
        capture_output=True, text=True).stdout.splitlines()[-1])
    print(r)
    assert r['n']==10**9 and r['grew']<100*MB and r['open']<10 and r['gone']>=40 and r['pickle']<1000, r
    assert 13<=r['each']<13+600/n, r

if __name__=='__main__':
    print(json.dumps(measure(int(sys.argv[1])*(million if len(sys.argv)>2 else 1),
        loaders=globals()[sys.argv[2]] if len(sys.argv)>2 else ours)))
