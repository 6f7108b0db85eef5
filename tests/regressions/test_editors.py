"Editors and type checkers see the public names, and signatures show the arguments that are passed on"
import inspect, sys
from pathlib import Path

import jedi
import pytest
from fastai.data.core import DataLoaders

import fastai_remote, fastai_remote.block

sys.path.append(str(Path(__file__).parents[2]/'tools'))
from stub import stub, STUB

def completed(code): return [name.name for name in jedi.Script(code).complete()]

def test_the_stub_has_all_names():
    assert STUB.read_text()==stub() and (STUB.parent/'py.typed').exists()

@pytest.mark.slow
def test_names_are_completed():
    for start in 'import fastai_remote\nfastai_remote.', 'from fastai_remote import *\n':
        assert completed(f'{start}to_')==['to_redis','to_shards'] and completed(f'{start}StoreN')==['StoreNotFound']
        signature, = jedi.Script(f'{start}index_shards(').get_signatures()
        assert {'url','to','splits'}<={o.name for o in signature.params}

def test_signatures_show_the_arguments_of_the_loader():
    for name in 'from_store','from_redis','from_shards':
        shown = inspect.signature(getattr(DataLoaders, name)).parameters
        assert {'bs','num_workers','shuffle','interleave','on_bad','prefetch','x','y','item_tfms'}<=shown.keys()
        assert not any(o.kind is o.VAR_KEYWORD for o in shown.values())

def test_tab_on_a_store_shows_what_users_call():
    from fastai_remote import MemoryStore, RedisStore, ShardStore, TieredStore
    def shown(cls): return {name for name in dir(object.__new__(cls)) if name[0]!='_'}
    for cls in MemoryStore, RedisStore, ShardStore, TieredStore:
        assert {'append','copy','edit','fields','splits','verify','vocab'}<=shown(cls) and len(shown(cls))<34
        assert all(hasattr(cls, name) or name in ('manifest','cache') for name in shown(cls))
        assert not shown(cls)&{'read_values','raise_missing','compare_checksums','opener','reopened'}
    class Mine(ShardStore):
        def draw(self): pass
    assert {'draw','delete'}<=shown(Mine) and '__len__' in dir(object.__new__(Mine))
