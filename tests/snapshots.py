"What is in a place for datasets, and all that a reader sees of one, to compare with what ought to be there"
import json, re, shutil, tempfile

import pytest
import redis

from fastai_remote import RedisStore, ShardStore, StoreNotFound, to_redis, to_shards
from shard_helpers import interrupted_after

def client(server):
    "Of a server, or of an object with the `cluster` of which `url` is a node"
    return (redis.RedisCluster if getattr(server, 'cluster', None) else redis.Redis).from_url(server.url)

def needed(db, name):
    "The IDs in the register that the dataset of this name, the version before it, and an ingest need"
    manifest,plan = (json.loads(db.get(f'{name}:{key}') or b'{}') for key in ('meta','ingest'))
    parts = manifest.get('parts') or [manifest]
    ids = [plan.get('id'), plan.get('prefix'), manifest.get('uid'), *(part.get('prefix') for part in parts)]
    return {str(o).encode() for o in ids}|{f"{manifest.get('uid')}-before".encode()}

def keys(server):
    """All keys, without the IDs of ingests and the hash tags of a cluster, and without locks, which end by themselves

    In a cluster, an ID that was noted is not used again: the plan is on another node. A register must name only what
    the dataset or an ingest needs, and is left out."""
    db = client(server)
    found = set(db.scan_iter(count=1000))   # of all nodes: KEYS of a cluster's client asks one of them only
    for key in found:
        name,_,kind = key.decode().rpartition(':')
        unneeded = set(db.hkeys(key))-needed(db, name) if kind=='register' else None
        assert not unneeded, (key, unneeded)
    def plain(key): return re.sub(r'^{([^@.}]+)[^}]*}@?', r'{\1}', re.sub(r'@[0-9a-f]{16,32}', '@', key.decode()))
    names = sorted(map(plain, found))
    return [name for name in names if name!='fastai_remote:used' and not name.endswith((':lock',':register'))]

def seen(store):
    "Everything of a dataset, but for the time of its making and its place"
    m = store.manifest
    values = store.get_many(range(len(store)), store.fields, check=True)
    values = {field:v if isinstance(v, list) else v.tolist() for field,v in values.items()}
    return (values, m.n, m.fields, m.splits, m.vocab, m.nbytes, m.failed, m.counts, m.stats,
            sorted(store.failures()))

def whole(server, name='d'):
    "What is `seen` of a dataset, `None` if there is none, and all keys of its server"
    try: return seen(RedisStore(server.url, name)),keys(server)
    except StoreNotFound: return None,keys(server)

OPTIONS = dict(chunk=16, max_failed=1., num_workers=1, progress=False)

class RedisPlace:
    "An empty server"
    folder = None # Changes there count for `dies_at`; `None`: requests do
    def __init__(self, server): self.server,self.url = server,server.url
    def clear(self): client(self.server).flushall()
    def copy(self):
        db = client(self.server)
        return {key:(max(db.pttl(key), 0), db.dump(key)) for key in db.scan_iter(count=1000)}
    def put_back(self, copy):
        db = client(self.server).pipeline()
        for key,(milliseconds,value) in copy.items(): db.restore(key, milliseconds, value)
        db.execute()
    def write(self, source, name='d', **options):
        return to_redis(source, self.url, name, **{**OPTIONS, **options})
    def map(self, store, fn): return store.map(fn, self.url, 'd', **OPTIONS)
    def open(self): return RedisStore(self.url, 'd')
    def unfinished(self): return RedisStore.unfinished(self.url)
    def delete(self): RedisStore.delete(self.url, 'd')
    def abandon(self): RedisStore.abandon(self.url, 'd')
    def visible(self): return {name:seen(RedisStore(self.url, name)) for name in RedisStore.names(self.url)}
    def names(self): return keys(self.server)
    def everything(self): return self.visible(),keys(self.server),self.unfinished()

class FolderPlace:
    "A folder, in which somebody has a file, and another one beside it with three tars"
    def __init__(self, tmp_path): self.folder = self.url = tmp_path/'d'
    def clear(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        (self.folder/'notes.txt').write_text('mine')
    def copy(self): return shutil.copytree(self.folder, tempfile.mkdtemp(dir=self.folder.parent), dirs_exist_ok=True)
    def put_back(self, copy): shutil.copytree(copy, self.folder, dirs_exist_ok=True)
    def write(self, source, **options):
        return to_shards(source, self.folder, **{**OPTIONS, 'maxsize':30_000, **options})
    def map(self, store, fn): return store.map(fn, self.folder, maxsize=30_000, **OPTIONS)
    def open(self): return ShardStore(self.folder)
    def unfinished(self): return ShardStore.unfinished(self.folder)
    def delete(self): ShardStore.delete(self.folder)
    def abandon(self): ShardStore.abandon(self.folder)
    def visible(self):
        try: return seen(self.open())
        except StoreNotFound: return None
    def files(self):
        "Names of all files and folders, but for the lock of the dead"
        names = sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob('*'))
        lock = '.fastai_remote/.ingest/lock.json'
        return [name for name in names if not f'{lock}/'.startswith(f'{name}/')]
    def names(self):
        def plain(name): return re.sub(r'(^|/)(shard\d*|[.]part-\d+-\w{8})-', lambda m: f'{m[1]}{m[2][:5]}-', name)
        return sorted(map(plain, self.files()))
    def everything(self):
        "All files, but for when and by whom the manifest was written"
        files = {name:self.folder/name for name in self.files()}
        content = {name:path.read_bytes() if path.is_file() else None for name,path in files.items()}
        for name in content:
            if not name.endswith('manifest.json'): continue
            manifest = json.loads(content[name])
            content[name] = {k:v for k,v in manifest.items() if k not in ('uid','created','crc')}
        return self.visible(),content

# --- what is written to a place

def items(word, start, stop):
    "Samples, of which the first, two in the middle and the last cannot be stored"
    bad = start,(start+stop)//2,(start+stop)//2+1,stop-1
    return [{'txt':f'{word} {i}'*5, 'cls':f'{word}{i%3}', 'labels':[f'{word}{i%2}'], 'id':'bad' if i in bad else i}
            for i in range(start, stop)]

def known(word='new'): return {'train':items(word, 0, 30), 'valid':items(word, 30, 40)}
def streams(word='new'): return {split:iter(source) for split,source in known(word).items()}

def old(place): place.write(known('old'))
def stopped(place):
    "An ingest that is to replace what is there was stopped"
    with pytest.raises(KeyboardInterrupt):
        place.write(known('stopped'), overwrite=True, progress=interrupted_after(1))
def replaced(place):
    old(place)
    stopped(place)
def nothing(place): pass
