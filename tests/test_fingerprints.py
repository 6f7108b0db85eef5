"What an `fn` is recognised by when an ingest is continued: its code, and the data and functions that it holds on to"
import io, os, re, subprocess, sys
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, partialmethod

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from fastai_remote.source.base import fn_fingerprint

CLASS = '''
class Fn:
    def __call__(self, o): return self.one(o)
    one = {}
fn = Fn()'''
MEMBERS = ['lambda self, o: K', 'lambda self, o, n=K: n', 'staticmethod(lambda *args: K)',
           'classmethod(lambda *args: K)', 'staticmethod(partial(scaled, by=K))', 'property(lambda *args: K)',
           'property(None, lambda *args: K)', 'cached_property(lambda *args: K)', 'partialmethod(scaled, by=K)',
           'lru_cache(lambda *args: K)']
CODES = [ # Modules in which `fn` is another one if K is
    'def fn(o, *, n=K): return o*n', *map(CLASS.format, MEMBERS),
    'fn = partial(scaled, by=lru_cache(lambda *args: K))', '''
def made(held): return lambda o: held(o)
fn = made(lru_cache(lambda o: K))''', '''
def made(held):
    def fn(o):
        sample = dict(o)
        sample['id'] = held['a']
        sample.update(id=held['a'])
        return sample
    return fn
fn = made({'a':K})''', '''
class Base:
    def __call__(self, o): return self.one(o)
    one = staticmethod(lambda *args: K)
class Fn(Base): pass
fn = Fn()''', '''
names = dict(a=[K])
def fn(o): return dict(id=[names for _ in o])''', '''
def odd(o): return fn(o) if o else K
def fn(o): return odd(o-1)''']

def scaled(o, by): return {'id':by}

def fn_of(code, k):
    "The function `fn` of a module"
    table = np.arange(5000)
    table[2500] = k
    module = dict(__name__='of_a_user', np=np, pd=pd, torch=torch, scaled=scaled, table=table, partial=partial,
                  partialmethod=partialmethod, cached_property=cached_property, lru_cache=lru_cache)
    exec(code.replace('K', str(k)), module)
    return module['fn']

@pytest.mark.parametrize('code', CODES, ids=range(len(CODES)))
def test_an_fn_that_differs_in_what_it_holds_on_to_is_another(code):
    first,same,other = (fn_fingerprint(fn_of(code, k)) for k in (1,1,2))
    assert first==same!=other

class Table:
    "An object without a `repr` of its own"
    def __init__(self, values): self.values = values
    def __call__(self, o): return {'id':self.values[o['id']]}
    def run(self, o): return self(o)

@dataclass
class Size:
    values:object

def arguments(k):
    "Values of which a `repr` shows nothing or only a part; those for `k` 1 and 2 differ"
    table = np.arange(10_000)
    table[5000] = k
    return dict(array=table, tensor=torch.tensor(table), in_a_list=[{'a':table}], function=lambda o: table,
                object=Table(k), nested=Table([Table(table)]), dataclass=Size(table), image=Image.new('L', (4,4), k),
                series=pd.Series(['a','b',str(k)]), times=np.array([k], 'M8[ns]'),
                half=torch.tensor([float(k)], dtype=torch.bfloat16), sparse=torch.tensor([0,k]).to_sparse(),
                pattern=re.compile('x'*300+str(k)), partial=partial(scaled, by=table), method=Table(k).run,
                lookup={'a':k}.get)

@pytest.mark.parametrize('which', arguments(1))
def test_an_argument_that_changed_is_noticed_wherever_it_is(which):
    "In a `partial`, a default, an attribute, the object of a method, a function in a closure; also far inside"
    def made(k):
        value = arguments(k)[which]
        def default(o, x=value): return x
        made_of,methods = partial(scaled, by=value),[Table(value).run]
        return (made_of, partial(scaled, value), default, Table(value), Table(value).run, lambda o: made_of(o),
                lambda o: methods[0](o))
    for a,b,same in zip(made(1), made(2), made(1), strict=True):
        assert fn_fingerprint(b)!=fn_fingerprint(a)==fn_fingerprint(same)

def test_arguments_that_contain_themselves_are_identified():
    table,values = Table(None),[]
    table.values = table.run
    values.append(values)
    def default(o, x=None): return x
    default.__defaults__ = default,
    for fn in table, table.run, partial(scaled, by=values), default: assert fn_fingerprint(fn)==fn_fingerprint(fn)

def test_what_a_function_changes_does_not_make_it_another():
    "An interrupted ingest in this process is continued by the same call, in whatever way it counts"
    seen,totals,left,count = [],{},np.array([5]),0
    def append(o): seen.append(o)
    def store(o): totals[1] = o
    def subtract(o): left[0] -= 1
    def replace(o):
        nonlocal count
        count += 1
    def inner(o): return [seen.append(x) for x in o]
    def inside(o): totals.setdefault('b', [0,0])[:1] = o
    functions = append,store,subtract,replace,inner,inside
    before = [*map(fn_fingerprint, functions)]
    for f in functions: f([1])
    assert (seen,totals,left[0],count)==([[1],1],{1:[1], 'b':[1,0]},4,1) and [*map(fn_fingerprint, functions)]==before

def test_a_helper_counts_whose_result_is_changed():
    "Also beside changes of its own, and in one line with them"
    code = '''
seen,made = [],{}
def helper(o): return {'id':K}
def fn(o):
    helper(o)['id'] = made[o] = 1
    seen.append(helper(o).update(id=2))'''
    assert fn_fingerprint(fn_of(code, 1))==fn_fingerprint(fn_of(code, 1))!=fn_fingerprint(fn_of(code, 2))

def test_a_comment_and_the_place_of_a_function_do_not_count():
    code = 'def helper(o):\n    return K\ndef fn(o):\n    return dict(id=helper(o))'
    moved = code.replace('def', '\n# a comment\ndef').replace('    return', '    # another\n    return')
    assert fn_fingerprint(fn_of(moved, 1))==fn_fingerprint(fn_of(code, 1))!=fn_fingerprint(fn_of(moved, 2))

def test_an_fn_may_name_anything(tmp_path):
    "Classes, modules, open files and sets of classes are identified, and left as they are"
    kinds,names = {int,np.float32},{'image':Image.Image, 'lib':np}
    with open(tmp_path/'log', 'wb') as log:
        def fn(o): return kinds, names, io.BufferedWriter, Image, torch.nn, print, log, o
        before = fn_fingerprint(fn)
        assert fn_fingerprint(fn)==before
        log.write(b'still open')
        kinds.add(str)
        assert fn_fingerprint(fn)!=before
    assert (tmp_path/'log').read_bytes()==b'still open'

FUNCTIONS = '''
from functools import partial
import numpy as np, pandas as pd
from PIL import Image
from fastai_remote import table_samples
from fastai_remote.source.base import fn_fingerprint
from fastai_remote.source.datasets import as_source
def words(o): return {'txt':' '.join(w for w in o['txt'].split() if w not in {'a','b','the','of','in'})}
def scale(o, k): return {'f4':o['f4']*k}
class Scale:
    def __init__(self, k): self.k = k
    def __call__(self, o): return {'f4':o['f4']*self.k}
class Pictures:
    def __len__(self): return 3
    def __getitem__(self, i): return Image.new('L', (3,3), i),i
class Options: pass
options = Options()
options.keep = {'a','b','c'}
print(as_source(Pictures()).fingerprint(), as_source([(Image.new('L', (3,3)),0)]).fingerprint())
print([fn_fingerprint(f) for f in (words, lambda o: [x for x in o], partial(scale, k=2), Scale(2))])
for keep in {'a','b','c'}, [{'a':frozenset({'a','b','c'})}], ({'x','y'},{'z':{'a','b'}}), options:
    def kept(o, k=keep): return k
    print([fn_fingerprint(f) for f in (partial(scale, k=keep), Scale(keep), Scale(keep).__call__, kept)])
for value in Image.new('L', (3,3), 1), Options(), {'a','b','c'}, np.arange(9000), np.arange(9000)*2:
    print(table_samples(pd.DataFrame({'x':[value]*4, 'n':range(4)})).fingerprint())
'''

@pytest.mark.slow
def test_the_same_call_in_another_process_is_the_same():
    "No address and no order of hashes gets into what an ingest is known by; of arrays in tables all values count"
    first,second = (subprocess.run([sys.executable, '-c', FUNCTIONS], capture_output=True, text=True, check=True,
                                   env={**os.environ, 'PYTHONHASHSEED':seed}).stdout.splitlines() for seed in '12')
    assert first==second and len(first)==11 and first[-1]!=first[-2]
