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
