"Editors and type checkers see the public names, and signatures show the arguments that are passed on"
import inspect, sys
from pathlib import Path

import jedi
from fastai.data.core import DataLoaders

import fastai_remote, fastai_remote.block

sys.path.append(str(Path(__file__).parents[2]/'tools'))
from stub import stub, STUB

def completed(code): return [name.name for name in jedi.Script(code).complete()]

def test_the_stub_has_all_names():
    assert STUB.read_text()==stub() and (STUB.parent/'py.typed').exists()

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
