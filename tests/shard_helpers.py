"Helpers of tests of shards: tars, folders of shards, and what holds of each"
import json, os, tarfile, time, zlib
from itertools import islice
from pathlib import Path

import numpy as np

from fastai_remote.core import seal
from fastai_remote import index_shards, ShardStore, to_shards
from fastai_remote.store.shard_index import ShardIndex
from fastai_remote.write.folder_place import needs_card
from fastai_remote.write.base import host_id
from inputs import write_tar as tar

ONE = dict(num_workers=1, progress=False)

def damage(path, content):
    "Writes a file that keeps its time: it is damaged, and not replaced by another one"
    time = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(time,time))

def change_manifest(folder, **changes):
    "Writes a manifest with `changes`, and with the right checksum, as its author would"
    manifest = json.loads((folder/'manifest.json').read_text())
    del manifest['crc']
    (folder/'manifest.json').write_bytes(seal({**manifest, **changes}))

def members(path):
    "Name, offset and bytes of each member of a tar"
    with tarfile.open(path) as t: return [(m.name, m.offset_data, t.extractfile(m).read()) for m in t]

def put(folder, source, fn=None, **kwargs):
    "Writes `source` to `folder`: the store and the report"
    report = to_shards(source, folder, fn, **{**ONE, **kwargs})
    return ShardStore(folder),report

def index(folder, to=None, **kwargs):
    "Indexes the tars in `folder`: the store and the report"
    report = index_shards(folder, to, **{**ONE, **kwargs})
    cache = str(Path(folder).parent/'cache')
    return ShardStore(to or folder, shards_url=folder if to else None, cache=cache),report

def items(word, n=60):
    "Samples that name `word`"
    return [{'txt':f'{word} {i}', 'cls':f'{word}{i%3}', 'labels':[word], 'id':i} for i in range(n)]

def values(store, field):
    "All values of a field, decoded one by one"
    stored = store.get_many(range(len(store)), field, check=True)[field]
    return [store.decode(i, field, o) for i,o in enumerate(stored)]

def in_worker(opener):
    "The texts that a process reads, and what others see of it: its arguments, its environment, and its store's `repr`"
    store = opener()
    own = [Path(f'/proc/self/{name}').read_bytes() for name in ('cmdline','environ')]
    return values(store, 'txt'),*own,repr(vars(store))

def names(folder): return sorted(str(p.relative_to(folder)) for p in Path(folder).rglob('*'))
def files(folder): return {str(p.relative_to(folder)):p.read_bytes() for p in Path(folder).rglob('*') if p.is_file()}

def seen(folder):
    "All bytes of a folder, but for when and by whom the manifest was written"
    found = files(folder)
    manifest = json.loads(found.pop(next(name for name in found if name.endswith('manifest.json'))))
    return found | {'manifest':{k:v for k,v in manifest.items() if k not in ('uid','created','crc')}}

def lock(folder, **entries):
    "Writes the lock of another process, which lives"
    (Path(folder)/'.fastai_remote/.ingest').mkdir(parents=True, exist_ok=True)
    content = dict(host=host_id(), pid=os.getppid(), id='x', time=time.time()) | entries
    (Path(folder)/'.fastai_remote/.ingest/lock.json').write_bytes(seal(content))

def sound(folder, maxsize=1e8, maxcount=100_000):
    "Checks what holds of every folder that `to_shards` has written, file by file"
    store,folder = ShardStore(folder),Path(folder)
    table,manifest = store.shards,store.manifest
    want = {'manifest.json', *(['labels.json'] if manifest.vocab else []),
            *(['README.md'] if needs_card(manifest.splits) else []), '.fastai_remote',
            *([f'.fastai_remote/{manifest.failures}'] if manifest.failed else []),
            *(f for u in range(len(table)) for f in (table.name(u), store.part(0).indices.file(u)))}
    assert set(names(folder))==want and int(table.starts[-1])==manifest.n==len(store)
    assert {x for ab in store.splits.values() for x in ab}<={*table.starts.tolist()}   # no shard holds two splits
    for u in range(len(table)):
        content,n = (folder/table.name(u)).read_bytes(),int(table.n[u])
        index_path = folder/store.part(0).indices.file(u)
        assert len(content)==table.size[u]<=maxsize or n==1
        assert 1<=n<=maxcount and zlib.crc32(content)==table.crc[u] and index_path.stat().st_size==table.idx[u]
        shard,found = ShardIndex(index_path.read_bytes(), index_path),members(folder/table.name(u))
        assert len({name for name,*_ in found})==len(found)==n*len(store.fields)
        keys = list(dict.fromkeys(name.split('.')[0] for name,*_ in found))
        assert keys==sorted(keys) and len(keys)==n
        places = {tuple(name.split('.', 1)):(at,len(b)) for name,at,b in found}
        for field in store.fields:
            if manifest.fields[field]['dtype'] is not None: continue
            spans = zip(*(o.tolist() for o in shard.spans(field, np.arange(n))))
            assert [places[key,field] for key in keys]==list(spans)
    return store

def interrupted_after(n):
    "A `progress` that is interrupted when `n` chunks are written; before the commit, if there are no more"
    def progress(records, total, report):
        yield from islice(records, n)
        raise KeyboardInterrupt
    return progress
