"The same thing has the same name, default and place in all public signatures; a `repr` never waits for a server"
import inspect, itertools, pickle, shutil

import pytest
from fastai.data.core import DataLoaders

import fastai_remote
from fastai_remote import *
from fastai_remote import IngestReport, VerifyReport
from fastai_remote.ingest.stores import DatasetOps

METHODS_OF = {Store:'get_many mean_image class_counts class_weights', DatasetOps:'map resize copy verify',
    RedisStore:'delete abandon unfinished rename from_keys names failures',
    ShardStore:'delete abandon unfinished failures shuffle_quality',
    RemoteDataset:'batches batched stream shuffle decode to_tuple map select with_epoch'}
METHODS = [DataLoaders.from_store, DataLoaders.from_redis, DataLoaders.from_shards,
    *(getattr(owner, name) for owner,names in METHODS_OF.items() for name in names.split())]
NAMES = {name:getattr(fastai_remote, name) for name in dir(fastai_remote) if name in fastai_remote._module_of}
PUBLIC = [o for o in NAMES.values() if callable(o) and not (isinstance(o, type) and issubclass(o, Exception))]+METHODS

def parameters(o):
    "Of a function or class, and where `**kwargs` are another's, those too"
    try: return {n:p for n,p in inspect.signature(o).parameters.items() if n not in ('self','args','kwargs')}
    except ValueError: return {}

def named(name): return {getattr(o, '__qualname__', repr(o)):p[name] for o in PUBLIC if name in (p:=parameters(o))}

GIVEN_UP = {'n_workers':'num_workers', 'workers':'num_workers', 'mix':'interleave', 'stand_in':'on_bad',
    'cls':'img_cls', 'make_client':'s3_options', 'idxs':'numbers',
    **dict.fromkeys(['server','address','host','path_or_url'], 'url')}

def test_a_name_that_was_given_up_is_not_used():
    for old,new in GIVEN_UP.items(): assert not named(old), f'say {new}'

DEFAULTS = {'timeout':20., 'storage_options':None, 'num_workers':None, 'overwrite':False, 'progress':None,
    'max_failed':None, 'check':True, 'interleave':4, 'cache':True, 'cache_size':None, 'draw':None, 'splits':None,
    'vocab':None, 'codec':None}

def test_one_default_everywhere():
    for name,default in DEFAULTS.items():
        different = {k:p.default for k,p in named(name).items() if p.default!=default and p.default is not p.empty}
        assert not {k:d for k,d in different.items() if (name,k) not in EXCEPTIONS}, name

EXCEPTIONS = {('codec','RedisStore.from_keys'), ('codec','shrink'), ('num_workers','RemoteDataset.batches'),
    ('num_workers','ShardReader.shuffle_quality')} # Where there is no default to share

def test_a_place_comes_before_a_name():
    for o in PUBLIC:
        if o in (IngestReport,VerifyReport): continue   # they hold results
        names = list(parameters(o))
        if {'url','name'}<=set(names): assert names.index('url')<names.index('name'), o

# Pairs of arguments that a function has in another order than all others, with the reason
OTHER_ORDERS = {
    ('fn','url'):'DatasetOps.map, like map, begins with the function',
    ('fn','name'):'DatasetOps.map, like map, begins with the function',
    ('splits','num_workers'):'index_shards: splits choose the shards',
    ('splits','overwrite'):'index_shards: splits choose the shards',
    ('splits','vocab'):'index_shards: splits choose the shards',
    ('shuffle','num_workers'):'RemoteDL has the order of DataLoader'}

def test_one_order_of_arguments():
    "What two functions take by position, they take in the same order"
    others = IngestReport,VerifyReport,Fetch,MeanImage,ShardStore.shuffle_quality,DatasetOps.resize
    functions = [o for o in PUBLIC if o not in others]
    found = {}
    for o in functions:
        names = [n for n,p in parameters(o).items() if p.kind is not p.KEYWORD_ONLY]
        for pair in itertools.combinations(names, 2): found.setdefault(pair, []).append(o.__qualname__)
    known = {*OTHER_ORDERS, *(pair[::-1] for pair in OTHER_ORDERS)}
    both = {pair:found[pair] for pair in found if pair[::-1] in found and pair not in known}
    assert not both and all(pair in found and pair[::-1] in found for pair in OTHER_ORDERS)

def test_each_public_name_has_documentation():
    assert not [name for name,o in NAMES.items() if not inspect.getdoc(o)]

def test_repr_of_a_store_that_was_unpickled_asks_nobody(fresh, tmp_path):
    to_redis([{'id':1}], fresh.url, 'one', num_workers=1, progress=False)
    to_shards([{'id':1}], d:=tmp_path/'one', num_workers=1, progress=False)
    stores = pickle.dumps([RedisStore(fresh.url, 'one'), ShardStore(d)])
    fresh.kill()
    shutil.rmtree(d)
    redis,shards = map(repr, pickle.loads(stores))
    assert redis==f"RedisReader({fresh.url!r}, 'one', not read yet)" and shards==f"ShardReader({str(d)!r}, not read yet)"

def test_options_beside_a_link_are_refused(tmp_path):
    "A link and a storage have their own, which are not changed: they may be shared"
    from fastai_remote.store.redis_link import RedisLink
    from fastai_remote.store.storage import Storage
    link = RedisLink('redis://127.0.0.1:1', timeout=.1)
    calls = (lambda **kw: RedisStore(link, 'd', **kw), lambda **kw: DataLoaders.from_redis(link, 'd', **kw),
             lambda **kw: to_redis([{'id':1}], link, 'd', **kw), lambda **kw: RedisStore.names(link, **kw))
    for call in calls:
        with pytest.raises(TypeError, match='timeout: a RedisLink has its own'): call(timeout=3)
        with pytest.raises(StoreUnavailable): call()
    with pytest.raises(TypeError, match='storage_options'): ShardStore(Storage(tmp_path), storage_options={'key':'a'})

def test_all_errors_have_one_base():
    assert issubclass(IngestError, StoreError)
