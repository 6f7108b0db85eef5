"What others have made takes no more memory and time than it should, whatever it says; wrong types are errors of ours"
import base64, copy, io, json, os, random, subprocess, sys, zlib
from pathlib import Path

import pytest, redis
from hypothesis import given, strategies as st
from PIL import Image

from fastai_remote import index_shards, RedisStore, ShardStore, to_redis
from fastai_remote.core import seal, StoreError
from conftest import examples
from shard_helpers import ONE, put

def image(k):
    Image.new('RGB', (8,8), (k,9,9)).save(file:=io.BytesIO(), 'JPEG')
    return file.getvalue()

def samples(n=6):
    return [{'jpg':image(k), 'cls':'ab'[k%2], 'labels':['x','y'][:k%3], 'id':k, 'txt':f'text {k}'} for k in range(n)]

splits = {'train':4, 'valid':2}

def resealed(content):
    return seal({key:value for key,value in content.items() if key!='crc'})

def nodes(o, path=()):
    "The path of each node of parsed JSON, leaves and containers"
    if path: yield path
    for key in o if isinstance(o, dict) else range(len(o)) if isinstance(o, list) else (): yield from nodes(o[key], (*path, key))

def replaced(content, path, value):
    content = copy.deepcopy(content)
    o = content
    for key in path[:-1]: o = o[key]
    o[path[-1]] = value
    return content

OTHERS = [None, True, -1, 0, 1, 1.5, 10**30, '', 'a/b', '\0', '..', '\ud800', [], [[]], [None], ['a','a'], {}, {'':[]}, {'a':{}}, [{}]*3]

def use(open_store):
    "Opens a store and looks at all of it; `StoreError` is the only error"
    try:
        store = open_store()
        store[0], store[len(store)-1], list(store.failures()), repr(store), store._repr_html_(), store.vocab, store.splits
        store.get_many(range(min(len(store), 6)), store.fields)
    except (StoreError,IndexError): pass   # `IndexError`: there may be no sample now
    except ValueError as e: assert 'register_codec' in str(e)   # of a codec that only its author has

def all_others(stored, write, open_store, n=1500):
    "Opens datasets in whose sealed manifest, `stored`, the bytes of JSON, a node is replaced; of many, `n` are tried"
    content,wrong = json.loads(stored),[]
    pairs = [(place, other) for place in nodes(content) for other in OTHERS]
    for place,other in random.Random(0).sample(pairs, min(n, len(pairs))):
        write(resealed(replaced(content, place, other)).encode('utf-8', 'surrogatepass'))
        try: use(open_store)
        except Exception as e: wrong.append(f'{place} = {other!r}: {type(e).__name__}: {e}')
    write(stored)
    assert not wrong, '\n'.join(wrong)

def change(store):
    "The dataset after an edit and an append: with overlays, parts and runs"
    store = store.edit(set={'txt':{1:'changed'}}, drop=[2])
    return store.append({'train':samples(2)}, num_workers=0, progress=False) or store

@pytest.mark.parametrize('kind', ['written','changed','indexed'])
def test_other_types_in_the_manifest_of_shards(tmp_path, kind):
    store,_ = put(tmp_path/'d', samples(), splits=splits)
    path = tmp_path/'d/manifest.json'
    if kind=='changed': change(store)
    if kind=='indexed':
        for file in (path, *path.parent.glob('*.fastai_remote')): file.unlink()
        index_shards(path.parent, **ONE)
        path = path.parent/'.fastai_remote/manifest.json'
    all_others(path.read_bytes(), path.write_bytes, lambda: ShardStore(tmp_path/'d', cache=str(tmp_path/'cache')))

@pytest.mark.parametrize('kind', ['written','changed'])
def test_other_types_in_the_manifest_in_redis(server, kind):
    to_redis(samples(), server.url, kind, splits=splits, num_workers=0, progress=False)
    if kind=='changed': change(RedisStore(server.url, kind))
    client = redis.Redis.from_url(server.url)
    all_others(client.get(f'{kind}:meta'), lambda stored: client.set(f'{kind}:meta', stored),
               lambda: RedisStore(server.url, kind))

# --- memory

# Run in a fresh interpreter: `call(argument)` for each of several, in a child process with a limit of memory
MEASURE = '''
import json, os, re, resource, sys, warnings
warnings.simplefilter('ignore')
{code}
def megabytes(key): return int(re.search(key+r':\\s+(\\d+)', open('/proc/self/status').read())[1])/1000
for argument in {arguments!r}:
    read,write = os.pipe()
    if (pid:=os.fork())==0:
        error = ''
        try:
            open('/proc/self/clear_refs', 'w').write('5')   # forget the peak of the memory
            before = megabytes('VmRSS')
            resource.setrlimit(resource.RLIMIT_CPU, ({seconds},-1))
            call(argument)
        except BaseException as e: error = type(e).__name__+': '+str(e)[:200]
        os.write(write, json.dumps([error, megabytes('VmHWM')-before]).encode())
        os._exit(0)
    os.close(write)
    print(os.read(read, 9999).decode() or '["killed", 0]', flush=True)
    os.waitpid(pid, 0)
'''

def measured(code, arguments, seconds=30):
    "`[(error, megabytes)]` of `call`, which `code` defines, for each of `arguments`; ended after `seconds` of CPU time"
    script = MEASURE.format(code=code, arguments=list(map(str, arguments)), seconds=seconds)
    done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, check=True)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]

def zeros(n):
    "`n` zeros, compressed: a stream of which only the checksum at its end is missing"
    packer = zlib.compressobj(9)
    first,again = (packer.compress(bytes(1<<20))+packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return first+again*((n>>20)-1)

def base64_text(content): return base64.b64encode(content).decode()

def huge(value, n): return '['+','.join([value]*n)+']'

# A list of labels, as JSON: what is refused, and what is not far below the limit
LABELS = {'lists':huge('[]', 4_000_000), 'dicts':huge('{}', 4_000_000), 'nested':huge('{"":{"":{"":{}}}}', 1_000_000),
          'floats':huge('1e300', 4_000_000), 'texts':huge('"ab"', 4_000_000), 'wide':'["'+'x'*30_000_000+'😀"]',
          'keys':'{'+','.join(f'"{k:06x}":0' for k in range(900_000))+'}', 'blanks':'['+' '*60_000_000+']'}
MANY_LABELS = {'numbers':[123_456_789]*1_500_000, 'long':['x'*12_000_000+'😀'], 'short':['ab']*1_500_000}

def test_opening_a_dataset_takes_little_memory_whatever_its_manifest_says(tmp_path):
    put(tmp_path/'d', samples(), splits=splits)
    content = json.loads((tmp_path/'d/manifest.json').read_text())
    million = {name:base64_text(zlib.compress(bytes(width<<20))) for name,width in
               dict(n=4, size=8, crc=4, idx=4, icrc=4, kind=1, raw=8, version=4, first=4).items()}
    folders = []
    def theirs(name, text):
        (tmp_path/name).mkdir()
        (tmp_path/name/'manifest.json').write_text(text)
        folders.append(tmp_path/name)
    for name,labels in LABELS.items(): theirs(name, '{"format":3,"crc":1,"vocab":{"cls":'+labels+'}}')
    names = base64_text(zlib.compress(b'\n'*((1<<20)-1)+b'x'*(31<<20)))
    for name,labels in MANY_LABELS.items():   # sealed, so that all of it is used
        theirs(name, resealed({**content, 'shards':{**million, 'text':names}, 'vocab':{'cls':labels}}))
    bomb = base64_text(zeros(4<<30))
    for column in 'n','text': theirs(column, resealed({**content, 'shards':{**content['shards'], column:bomb}}))
    code = 'from fastai_remote.store.shards import ShardStore as call'
    for folder,(error,used) in zip(folders, measured(code, folders)):
        assert error.startswith(('UnsupportedFormat','CorruptSample')) and used<256, (folder.name, error, used)
