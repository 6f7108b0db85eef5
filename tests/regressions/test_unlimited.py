"What others have made takes no more memory and time than it should, whatever it says; wrong types are errors of ours"
import base64, copy, gzip, json, os, random, shutil, subprocess, sys, zlib
from functools import partial

import numpy as np
import pytest, redis
from PIL import Image

from fastai_remote import (csv_samples, drawing_samples, img2dataset_samples, index_shards, RedisStore, ShardStore,
    tar_samples, to_redis, to_shards)
from fastai_remote.core import seal, StoreError
from fastai_remote.store.base import image_stats
from fastai_remote.source import tars
from fastai_remote.store.shard_index import INDEX_MAGIC, ShardManifest, ShardTable
from inputs import encoded, in_memory, tar_header as header, tar_member as member, write_tar
from limits import measured, STRANGE, zeros
from shard_helpers import ONE, put

def image(k): return encoded(Image.new('RGB', (8,8), (k,9,9)), 'JPEG')

def samples(n=6):
    return [{'jpg':image(k), 'cls':'ab'[k%2], 'labels':['x','y'][:k%3], 'id':k, 'txt':f'text {k}'} for k in range(n)]

splits = {'train':4, 'valid':2}

def resealed(content):
    return seal({key:value for key,value in content.items() if key!='crc'})

def nodes(o, path=()):
    "The path of each node of parsed JSON, leaves and containers"
    if path: yield path
    keys = o if isinstance(o, dict) else range(len(o)) if isinstance(o, list) else ()
    for key in keys: yield from nodes(o[key], (*path, key))

def replaced(content, path, value):
    content = copy.deepcopy(content)
    o = content
    for key in path[:-1]: o = o[key]
    o[path[-1]] = value
    return content

# Also of the threads that summarise a dataset
pytestmark = pytest.mark.filterwarnings('error::pytest.PytestUnhandledThreadExceptionWarning')

OTHERS = [None, True, -1, 0, 1, 1.5, 10**30, '', 'a/b', '\0', '..', '\ud800',
          [], [[]], [None], ['a','a'], {}, {'':[]}, {'a':{}}, [{}]*3]

def use(open_store):
    "Opens a store and looks at all of it; `StoreError` is the only error"
    try:
        store = open_store()
        store[0], store[len(store)-1], list(store.failures()), repr(store), store._repr_html_()
        repr(store.vocab), repr(store.splits)
        store.get_many(range(min(len(store), 6)), store.fields)
        for field in store.manifest.stats: store.mean_image(field), image_stats(store, field)
        for field in store.manifest.counts: store.class_counts(field)
    except (StoreError,IndexError): pass   # `IndexError`: there may be no sample now
    except ValueError as e: assert 'register_codec' in str(e)   # of a codec that only its author has

def all_others(stored, write, open_store, n=400):
    "Opens datasets in whose sealed manifest, `stored`, the bytes of JSON, a node is replaced; of many, `n` are tried"
    content,wrong = json.loads(stored),[]
    pairs = [(place, other) for place in nodes(content) for other in OTHERS]
    for place,other in random.Random(0).sample(pairs, min(n, len(pairs))):
        write(resealed(replaced(content, place, other)))
        try: use(open_store)
        except Exception as e: wrong.append(f'{place} = {other!r}: {type(e).__name__}: {e}')
    write(stored)
    assert not wrong, '\n'.join(wrong)

def change(store):
    "The dataset after an edit and an append: with added parts and runs"
    store = store.edit(set={'txt':{1:'changed'}}, drop=[2])
    return store.append({'train':samples(2)}, num_workers=0, progress=False) or store

@pytest.mark.parametrize('kind', ['written','changed','indexed'])
def test_other_types_in_the_manifest_of_shards(tmp_path, kind):
    store,_ = put(tmp_path/'d', samples(), splits=splits)
    path = tmp_path/'d/manifest.json'
    if kind=='changed': change(store)
    if kind=='indexed':
        for file in (path, *path.parent.glob('.fastai_remote/*.fastai_remote')): file.unlink()
        index_shards(path.parent, **ONE)
        path = path.parent/'.fastai_remote/manifest.json'
    all_others(path.read_bytes(), path.write_bytes, lambda: ShardStore(tmp_path/'d', cache=str(tmp_path/'cache')))

@pytest.mark.slow
@pytest.mark.parametrize('kind', ['written','changed'])
def test_other_types_in_the_manifest_in_redis(server, kind):
    to_redis(samples(), server.url, kind, splits=splits, num_workers=0, progress=False)
    if kind=='changed': change(RedisStore(server.url, kind))
    client = redis.Redis.from_url(server.url)
    all_others(client.get(f'{kind}:meta'), lambda stored: client.set(f'{kind}:meta', stored),
               lambda: RedisStore(server.url, kind), n=200)

# --- memory

# Run in a fresh interpreter: `call(argument)` for each of several, in a child process with a limit of memory

def base64_text(content): return base64.b64encode(content).decode()

def huge(value, n): return '['+','.join([value]*n)+']'

# A list of labels, as JSON: what is refused, and what is not far below the limit
LABELS = {'lists':huge('[]', 4_000_000), 'dicts':huge('{}', 4_000_000), 'nested':huge('{"":{"":{"":{}}}}', 1_000_000),
          'floats':huge('1e300', 4_000_000), 'texts':huge('"ab"', 4_000_000), 'wide':'["'+'x'*30_000_000+'😀"]',
          'keys':'{'+','.join(f'"{k:06x}":0' for k in range(900_000))+'}', 'blanks':'['+' '*60_000_000+']'}
MANY_LABELS = {'numbers':[123_456_789]*1_500_000, 'long':['x'*12_000_000+'😀'], 'short':['ab']*1_500_000}

@pytest.mark.slow
def test_opening_a_dataset_takes_little_memory_whatever_its_manifest_says(tmp_path):
    put(tmp_path/'d', samples(), splits=splits)
    content = json.loads((tmp_path/'d/manifest.json').read_text())
    million = {name:base64_text(zlib.compress(bytes(width<<20))) for name,width in
               dict(n=4, size=8, crc=4, idx=4, icrc=4, kind=1, raw=8, first=4).items()}
    folders = []
    def theirs(name, stored):
        (tmp_path/name).mkdir()
        (tmp_path/name/'manifest.json').write_bytes(stored)
        folders.append(tmp_path/name)
    for name,labels in LABELS.items():
        rest = f'"format":1,"vocab":{{"cls":{labels}}}}}'.encode()
        theirs(name, b'{"crc":"%08x",' % zlib.crc32(rest)+rest)
    names = base64_text(zlib.compress(b'\n'*((1<<20)-1)+b'x'*(31<<20)))
    for name,labels in MANY_LABELS.items():   # sealed, so that all of it is used
        theirs(name, resealed({**content, 'shards':{**million, 'text':names}, 'vocab':{'cls':labels}}))
    bomb = base64_text(zeros(4<<30))
    for column in 'n','text': theirs(column, resealed({**content, 'shards':{**content['shards'], column:bomb}}))
    for name,(error,used) in measured({folder.name:partial(ShardStore, folder) for folder in folders}).items():
        assert error[0] in ('UnsupportedFormat','CorruptSample') and used<256, (name, error, used)

STARVED = '''
import resource, sys
from fastai_remote import index_shards, ShardStore
from fastai_remote.source.tars import tar_members
uses = dict(open=ShardStore, read=lambda x: list(tar_members(open(x, 'rb'))),
            index=lambda x: index_shards([x], x+'-index', num_workers=0))
megabytes,use,path = sys.argv[1:]
size = int(open('/proc/self/statm').read().split()[0])*resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size+int(megabytes)*1_000_000,-1))
uses[use](path)
'''

@pytest.mark.slow
def test_too_little_memory_is_no_damage(tmp_path):
    "In a new process, which has no memory that it could use again"
    put(tmp_path/'d', [{'cls':f'label {k:0200d}'} for k in range(20_000)])
    write_tar(tmp_path/'a.tar', [('0.bin', bytes(50_000_000))])
    for words in ('6','open',tmp_path/'d'), ('30','read',tmp_path/'a.tar'), ('30','index',tmp_path/'a.tar'):
        run = subprocess.run([sys.executable, '-c', STARVED, *map(str, words)], capture_output=True, text=True)
        error = run.stderr.splitlines()[-1].split(':')[0]   # NumPy's has a class of its own
        assert error in ('MemoryError','numpy._core._exceptions._ArrayMemoryError'), (words, run.stderr)

# --- compressed tars

def gzipped(parts):
    "A gzip file of `parts`, bytes, or numbers of zeros in MiB, whose checksum is missing"
    packer = zlib.compressobj(9, wbits=31)
    result = []
    for part in parts:
        contents = [bytes(1<<20)]*min(part, 2) if isinstance(part, int) else [part]
        result += [packer.compress(content)+packer.flush(zlib.Z_FULL_FLUSH) for content in contents]
        if isinstance(part, int): result += result[-1:]*(part-2)
    return b''.join(result)

def index(path): index_shards([path], f'{path}-index', max_failed=1., **ONE)
def write(path): to_shards(tar_samples(path), f'{path}-shards', max_failed=1., **ONE)
def uses_of(folder):
    "Calls that index each file of a folder, and that write it"
    paths = sorted(folder.iterdir())
    return {f'{use.__name__} {path.name}':partial(use, str(path)) for path in paths for use in (index,write)}

@pytest.mark.slow
def test_a_member_is_in_memory_once_or_twice(tmp_path):
    "Bombs, and honest ones, of 64 MiB"
    content = b''.join([np.random.default_rng(0).bytes(1<<20)]*64)
    (tmp_path/'a.tar.gz').write_bytes(gzipped([header('0.bin', 64<<20), 64, member('1.txt', b'one')]))
    (tmp_path/'b.tar.gz').write_bytes(gzip.compress(member('0.bin', content)+member('1.txt', b'one'), 0))
    (tmp_path/'c.tar').write_bytes(member('0.bin', content)+member('1.txt', b'one'))
    for use,(error,used) in measured(uses_of(tmp_path)).items():
        assert not error and used<2*67+60, (use, error, used)

@pytest.mark.slow
def test_gigabytes_of_zeros_are_no_work(tmp_path):
    "At the start of a file, after its end, and between two archives"
    one,two = member('0.txt', b'zero'),member('1.txt', b'one')
    files = {'start':[8<<10, one], 'end':[one, 8<<10], 'between':[one, 8<<10, two]}
    for name,parts in files.items(): (tmp_path/f'{name}.tar.gz').write_bytes(gzipped(parts))
    for use,(error,used) in measured(uses_of(tmp_path), 5).items():
        assert 'of zeros' in error[1] and 'damaged' in error[1] and used<60, (use, error, used)

def test_a_few_zeros_are_no_damage(tmp_path):
    "Those of a tape's blocks, and of a file that was allocated before; in every compression"
    archive = member('0.txt', b'zero')+bytes(10<<20)+member('1.txt', b'one')+bytes(20<<20)
    for name,pack in ('a.tar',bytes),('b.tar.gz',gzip.compress):
        (tmp_path/name).write_bytes(pack(archive))
        store,report = in_memory(tar_samples(tmp_path/name))
        assert store.get_many([0,1], 'txt', decode=True)['txt']==['zero','one'] and not report.failed

def test_members_above_the_limit_are_failed_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(tars, 'MAX_MEMBER', 1000)
    archive = member('0.bin', bytes(1001))+member('1.bin', bytes(1000))+bytes(1024)
    (tmp_path/'a.tar.gz').write_bytes(gzip.compress(archive))
    for read in (lambda: in_memory(tar_samples(tmp_path/'a.tar.gz'), max_failed=1)[1],
                 lambda: index_shards(tmp_path, max_failed=1, num_workers=0, progress=False)):
        report = read()
        assert (report.written,report.failed)==(1,1) and 'MAX_MEMBER' in report.failures[0][1]

@pytest.mark.slow
def test_parts_of_a_stream_have_a_limit(tmp_path):
    members = [o for k in range(5) for o in (header(f'{k}.bin', 40<<20), 40)]
    (tmp_path/'a.tar.gz').write_bytes(gzipped([*members, bytes(1024)]))
    assert [len(part) for part in tar_samples(tmp_path/'a.tar.gz').stream(64)]==[2,2,1]

# --- what is no file

def read_all(folder, **options):
    store = ShardStore(folder, **options)
    list(store.failures())
    report = store.verify(num_workers=1)
    if report.bad or report.rest: raise ValueError(str(report))
    store.get_many([0,1,2], 'txt')

USES = dict(
    open=read_all, cached=lambda folder: read_all(folder, cache=f'{folder}/../cache', cache_size=1e8),
    overwrite=lambda folder: to_shards([{'txt':'new'}], folder, overwrite=True, **ONE), delete=ShardStore.delete,
    index=lambda folder: index_shards(folder, f'{folder}/../index', **ONE))

@pytest.mark.slow
def test_what_is_no_file_is_an_error_at_once(tmp_path):
    "Also the files of failures and of labels, where a cache is used, and where somebody writes or removes"
    texts = [{'txt':f'text {k}', 'cls':'ab'[k%2]} if k else {'txt':9} for k in range(40)]
    put(tmp_path/'d', texts, chunk=20, maxcount=20)
    calls = {}
    for name in sorted(str(p.relative_to(tmp_path/'d')) for p in (tmp_path/'d').rglob('*') if p.is_file()):
        for what,make in STRANGE.items():
            for use in USES if what=='pipe' else ('open','index'):
                folder = tmp_path/f"{name.replace('/', ' ')} {what} {use}"/'d'
                shutil.copytree(tmp_path/'d', folder)
                (folder/name).unlink()
                make(folder/name)
                calls[name,what,use] = partial(USES[use], folder)
    for (name,what,use),(error,used) in measured(calls).items():
        assert used<100, (name, what, use, error, used)
        if use in ('open','cached') and name not in ('labels.json','README.md'): assert error, (name, what, use)

def test_statistics_of_img2dataset_are_files(tmp_path):
    write_tar(tmp_path/'0.tar', [('0.txt', b'zero')])
    os.mkfifo(tmp_path/'0_stats.json')
    (error,_), = measured({'notes':lambda: img2dataset_samples(tmp_path).notes}).values()
    assert 'a pipe, not a regular file' in error[1]

@pytest.mark.slow
def test_lines_of_compressed_tables_have_a_limit(tmp_path):
    "One line of 2 GiB, and three million blank ones"
    (tmp_path/'a.csv.gz').write_bytes(gzipped([b'txt,cls\n', 2<<10]))
    (tmp_path/'b.ndjson.gz').write_bytes(gzipped([2<<10]))
    packer = zlib.compressobj(9, wbits=31)
    first,again = (packer.compress(b'\n'*(1<<20))+packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    (tmp_path/'c.ndjson.gz').write_bytes(first+again*2)
    def read(file):
        for part in (csv_samples if 'csv' in file.name else drawing_samples)(file).stream(64): pass
    for name,(error,used) in measured({file.name:partial(read, file) for file in tmp_path.iterdir()}).items():
        assert name in error[1] and used<100, (name, error, used)

# --- indices

@pytest.mark.slow
def test_other_types_in_an_index(tmp_path):
    "Whose checksums match, as its author would write it"
    store,_ = put(tmp_path/'d', [sample if k else {'txt':'no label'} for k,sample in enumerate(samples())])
    path = tmp_path/'d'/store.part(0).indices.file(0)
    stored = path.read_bytes()
    start = len(INDEX_MAGIC)+4
    length = int.from_bytes(stored[start-4:start], 'little')
    content,wrong = json.loads(stored[start:start+length]),[]
    pairs = [(place, other) for place in nodes(content) for other in OTHERS]
    for place,other in random.Random(0).sample(pairs, 400):
        header = json.dumps(replaced(content, place, other)).encode()
        header += b' '*(-(start+len(header))%8)
        changed = INDEX_MAGIC+len(header).to_bytes(4, 'little')+header+stored[start+length:]
        path.write_bytes(changed)
        manifest = ShardManifest.from_json((tmp_path/'d/manifest.json').read_bytes())
        table = ShardTable.unpack(manifest.shards)
        table.idx,table.icrc = np.array([len(changed)], 'u4'),np.array([zlib.crc32(changed)], 'u4')
        manifest.shards = table.pack()
        (tmp_path/'d/manifest.json').write_bytes(manifest.to_json())
        for use in (lambda store: store.get_many(range(6), [f'{f}?' if f!='txt' else f for f in store.fields]),
                    lambda store: store.keys(range(6)), lambda store: store.location(1, 'jpg'),
                    lambda store: list(store.presence('cls')), lambda store: store.part(0).indices.get([0])[0].record):
            try: use(ShardStore(tmp_path/'d'))
            except (StoreError,IndexError): pass
            except Exception as e: wrong.append(f'{place} = {other!r}: {type(e).__name__}: {e}')
    assert not wrong, '\n'.join(wrong)
