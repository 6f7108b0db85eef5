"The package as a whole: names, floors, versions, notebooks"
import ast, configparser, json, os, re, subprocess, sys, zipfile
from pathlib import Path

import pytest

root = Path(__file__).parents[1]
NAMES = '''CorruptSample Fetch FieldSplitter KFoldSplitter IngestError IngestReport MemoryStore MissingSample
    Permutation RandomStoreSplitter
    RedisBlock RedisStore RedisWriter RemoteDL RemoteItems Store
    MeanImage Rasterise VerifyReport drawing_samples hf_samples simplify StoreBusy StoreError StoreExists StoreFull
    StoreNotFound StoreSplitter StoreUnavailable UnknownField UnsupportedFormat csv_samples get_remote_items
    image_samples redis_server shrink tar_samples to_redis
    RemoteDataset ShardBlock ShardStore TieredStore index_shards s3_options StrokeSequence array_samples
    img2dataset_samples mix table_samples to_shards CropAudio TextOptions tokenize_store'''.split()
# a package imports from those before it
LAYERS = 'core imported clock parallel order codec store write source ingest load block testing cli'.split()
LIGHT = LAYERS[:LAYERS.index('load')]   # without torch and fastai
MODULES = {re.search(r'#\| *default_exp ([\w.]+)', f.read_text())[1]:f
    for f in sorted((root/'nbs').rglob('[0-9]*.ipynb')) if 'tutorials' not in f.parts}

def python(code):
    return subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True,
        check=True).stdout.strip()

@pytest.fixture(scope='module')
def python_with_torch(interpreters):
    "A function that runs code in a new process, which has torch but neither fastai nor us, and returns what it prints"
    def run(code):
        check = "import sys; assert not [m for m in sys.modules if m.split('.')[0] in ('fastai','fastai_remote')]"
        process = interpreters.run(f'{check}\n{code}', fastai=False)
        return (process.stdout+process.stderr).strip()
    return run

def test_names(python_with_torch):
    "A star import gives these names and no others"
    code = 'from fastai_remote import *; print(sorted(n for n in globals() if not n.startswith("_") and n!="sys"))'
    assert python_with_torch(code)==str(sorted(NAMES))

def test_star_import_is_quiet_and_shadows_nothing(python_with_torch):
    code = '''from fastai.vision.all import *; import threading, os
before,t = dict(globals()),threading.active_count()
from fastai_remote import *
fastai_names = [n for n in before if not n.startswith("__")]
shadowed = [n for n in fastai_names if globals()[n] is not before[n]] if fastai_names else 0
print(shadowed, threading.active_count()-t, DataLoaders.from_redis.__name__)'''
    assert python_with_torch(code)=='[] 0 from_redis'

IMPORTS = ['from fastai.vision.all import *; from fastai_remote import RedisStore',
    'from fastai_remote import RedisStore; from fastai.vision.all import *',
    'import fastai_remote; import fastai.data.core',
           'import fastai.data.core; import fastai_remote',
           'from fastai_remote import *; from fastai.vision.all import *',
           'import fastai_remote.store.redis_keys; from fastai.data.all import *',
           'from fastai.vision.all import *; import fastai_remote.ingest.run']

@pytest.mark.parametrize('imports', IMPORTS)
def test_loaders_have_their_methods_whatever_is_imported_and_in_any_order(imports, python_with_torch):
    code = f'''{imports}
import inspect
from fastai.data.core import DataLoaders
from fastai.vision.data import ImageDataLoaders
try: DataLoaders.from_redis('redis://127.0.0.1:1', 'pets', timeout=0)
except Exception as e: print(type(e).__name__)
parameters = inspect.signature(DataLoaders.from_redis).parameters
print(ImageDataLoaders.from_shards.__self__.__name__, hasattr(DataLoaders, 'from_redis'), 'normalize' in parameters,
    hasattr(DataLoaders, 'from_nowhere'))'''
    assert python_with_torch(code).split() in (['TypeError','ImageDataLoaders','True','True','False'],
        ['StoreUnavailable','ImageDataLoaders','True','True','False'])

def test_methods_that_fastai_is_to_get_import_nothing_by_themselves(python_with_torch):
    "A process that has fastai, and writes, loads no more than it needs"
    code = '''import sys, fastai.data.core
from fastai_remote import to_redis, RedisStore
import fastai.vision.all
heavy = 'fastai_remote.block','fastai_remote.load.loader','fastai_remote.load.fetch_transform'
print([m for m in sys.modules if m in heavy])'''
    assert python_with_torch(code)=='[]'

def test_a_module_that_cannot_be_imported_fails_as_ever(tmp_path):
    "What waits for it is not called, and does not hide the error"
    (tmp_path/'broken_module.py').write_text('raise RuntimeError("its own")')
    code = f'''import sys; sys.path.insert(0, {str(tmp_path)!r})
from fastai_remote.imported import when_imported
for m in 'broken_module','absent_module':
    when_imported(m, lambda m: print('called'))
    try: __import__(m)
    except Exception as e: print(e)'''
    assert python(code)=="its own\nNo module named 'absent_module'"

def test_what_waits_for_a_module_gets_this_one_when_it_is_complete(tmp_path):
    "Whatever else its loader loads: modules of a zip share one, and so do built-in ones; loaders are as before then"
    with zipfile.ZipFile(tmp_path/'code.zip', 'w') as f:
        f.writestr('outer_module.py', 'import inner_module\nvalue = 3')
        f.writestr('inner_module.py', '')
    code = f'''import importlib.util, sys; sys.path.insert(0, {str(tmp_path/'code.zip')!r})
from importlib.machinery import BuiltinImporter
from zipimport import zipimporter
from fastai_remote.imported import when_imported
before,calls = dict(vars(BuiltinImporter)),[]
for name in 'outer_module','_ast':
    sys.modules.pop(name, None)
    when_imported(name, lambda m: calls.append((m.__name__, hasattr(m, 'value'))))
    assert importlib.util.find_spec(name).name==name and not calls
import outer_module, _ast
assert type(outer_module.__loader__) is type(outer_module.__spec__.loader) is zipimporter
assert 'exec_module' not in vars(outer_module.__loader__) and dict(vars(BuiltinImporter))==before
assert _ast.__loader__ is _ast.__spec__.loader is BuiltinImporter
print(calls)'''
    assert python(code)=="[('outer_module', True), ('_ast', False)]"

def test_an_override_may_be_the_first_that_calls_a_late_method(tmp_path):
    "It runs once, whatever the kind of the method"
    (tmp_path/'late_module.py').write_text("""from __main__ import A
A.made = classmethod(lambda cls, n: (cls.__name__,n))
A.go = lambda self, n: (type(self).__name__,n)
A.size = property(lambda self: 3)""")
    code = f'''import sys; sys.path.insert(0, {str(tmp_path)!r})
from fastai_remote.imported import add_late_methods
class A: pass
class B(A):
    @classmethod
    def made(cls, n): return super().made(2*n)
    def go(self, n): return super().go(2*n)
    size = property(lambda self: 2*super(B, self).size)
for call in lambda: B.made(1), lambda: B().go(1), lambda: B().size:
    for name in ('made','go','size'):
        if name in vars(A): delattr(A, name)
    sys.modules.pop('late_module', None)
    add_late_methods(A, ['made','go','size'], 'late_module')
    print(call())'''
    assert python(code).splitlines()==["('B', 2)","('B', 2)",'6']

def test_an_interrupted_import_can_be_repeated(tmp_path):
    "Ctrl-C while torch is imported: the method is still there"
    (tmp_path/'slow_module.py').write_text("""import sys
if not hasattr(sys, 'tried'):
    sys.tried = True
    raise KeyboardInterrupt
from __main__ import A
A.go = lambda self: 'gone'""")
    code = f'''import sys; sys.path.insert(0, {str(tmp_path)!r})
from fastai_remote.imported import add_late_methods
class A: pass
add_late_methods(A, ['go'], 'slow_module')
try: A().go()
except KeyboardInterrupt: print(A().go())'''
    assert python(code)=='gone'

def test_threads_wait_for_a_late_method(tmp_path):
    "The module takes a while, and looks for the method that it is about to replace, as fastcore's `patch` does"
    (tmp_path/'slow_module.py').write_text("""import time
from __main__ import A
time.sleep(.2)
before = getattr(A, 'go', None)
A.go = lambda self: 'gone'""")
    code = f'''import sys; sys.path.insert(0, {str(tmp_path)!r})
from concurrent.futures import ThreadPoolExecutor
from fastai_remote.imported import add_late_methods
class A: pass
add_late_methods(A, ['go'], 'slow_module')
with ThreadPoolExecutor(4) as threads: print(*threads.map(lambda k: A().go(), range(4)))
import slow_module; print(slow_module.before)'''
    assert python(code)=='gone gone gone gone\nNone'

def imports_of(module):
    "The modules that a module imports when it is imported, and those that its functions import when they are called"
    path = root/'fastai_remote'/f"{module.replace('.', '/')}.py"
    tree = ast.parse(path.read_text())
    package = f'fastai_remote.{module}'.split('.')[:-1]
    def of(node):
        if isinstance(node, ast.Import): return [a.name for a in node.names]
        base = package[:len(package)-node.level+1] if node.level else []
        full = '.'.join([*base, *([node.module] if node.module else [])])
        return [full, *(f'{full}.{a.name}' for a in node.names)]
    at_import = [n for s in tree.body for n in ast.walk(s) if not isinstance(s, (ast.FunctionDef,ast.ClassDef))]
    every = [n for n in ast.walk(tree) if isinstance(n, (ast.Import,ast.ImportFrom))]
    at_once = {m for n in every if n in at_import for m in of(n)}
    return at_once,{m for n in every for m in of(n)}-at_once

def ours(names): return {n.removeprefix('fastai_remote.') for n in names}&MODULES.keys()

# Methods of stores that start a job of a higher level, and import it when they are called
LATER = {('store.base','ingest.copy'), ('store.base','ingest.verify'), ('store.base','ingest.revise'),
    ('store.redis','write.redis_reviser'), ('store.redis','write.redis_admin'), ('store.redis','ingest.partitions'),
    ('store.redis','store.redis_keys'), ('store.shards','write.shards_admin'), ('store.shards','write.shards_reviser')}

def wrong_imports(module, at_once, later):
    "Those that go up, or sideways from store to store"
    order = list(MODULES)
    def is_up(other):
        return (LAYERS.index(other.split('.')[0]),order.index(other))>=(LAYERS.index(module.split('.')[0]),
            order.index(module))
    up = {o for o in ours(at_once) if is_up(o)}|{o for o in ours(later) if is_up(o) and (module,o) not in LATER}
    stores = {'store.redis','store.shards'}
    return up|({o for o in ours(at_once|later) if o in stores} if module in stores else set())

def test_the_layers_are_all_there(): assert {m.split('.')[0] for m in MODULES}==set(LAYERS)

def test_a_module_imports_only_from_those_below_it():
    "torch and fastai come in with the loader, and stores do not import each other"
    wrong = {}
    for module in MODULES:
        at_once,later = imports_of(module)
        heavy = {m for m in at_once|later if m.split('.')[0] in ('torch','torchvision','fastai')}
        is_light = module.split('.')[0] in LIGHT
        if found:=wrong_imports(module, at_once, later)|(heavy if is_light else set()): wrong[module] = found
    assert not wrong

@pytest.mark.parametrize('module,at_once,later',
    [('store.redis',['fastai_remote.write.base'],[]),
    ('store.redis',['fastai_remote.store.shards.ShardStore','fastai_remote.store.shards'],[]),
    ('order.base',['fastai_remote.order.shards'],[]), ('store.redis',[],['fastai_remote.ingest.run']),
    ('load.fetch_transform',['fastai_remote.load.loader'],[])])
def test_a_wrong_import_is_found(module, at_once, later): assert wrong_imports(module, set(at_once), set(later))

def test_relative_imports_are_seen():
    at_once,later = imports_of('store.redis')
    assert {'core','store.base','store.redis_link'}<=ours(at_once) and ours(later)=={'write.redis_admin',
        'write.redis_reviser','ingest.partitions','store.redis_keys'}
    assert sum(len(ours(imports_of(m)[0])) for m in MODULES)>100

def test_no_module_imports_private_names_of_another():
    private = set()
    for module in MODULES:
        tree = ast.parse((root/'fastai_remote'/f"{module.replace('.', '/')}.py").read_text())
        taken = [a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)
            and (n.level or (n.module or '').startswith('fastai_remote')) for a in n.names]
        private.update((module, n) for n in taken if n.startswith('_') and n not in ('_jpeg','_pixels'))
    assert not private

def test_light_modules_load_neither_torch_nor_fastai():
    "Each is imported in a process of its own: a fork of one that has loaded what is not ours"
    code = f'''import os, sys
import fsspec, joblib, numpy, PIL.Image, redis
assert not [m for m in sys.modules if m.split('.')[0] in ('torch','torchvision','fastai','fastai_remote')]
for module in {[m for m in MODULES if m.split('.')[0] in LIGHT]}:
    if os.fork()==0:
        try: __import__('fastai_remote.'+module)
        except BaseException as e: print(module, type(e).__name__)
        print(module, 'ok', *sorted({{'torch','torchvision','fastai'}}&sys.modules.keys()), flush=True)
        os._exit(0)
    os.wait()'''
    lines = python(code).splitlines()
    assert sorted(lines)==sorted(f'{module} ok' for module in MODULES if module.split('.')[0] in LIGHT)

def test_one_version():
    ini = configparser.ConfigParser(delimiters=['='])
    ini.read(root/'settings.ini')
    import fastai_remote
    assert ini['DEFAULT']['version']==fastai_remote.__version__

def test_notebooks_are_small_and_unskipped():
    for f in (root/'nbs').rglob('*.ipynb'):
        nb = json.loads(f.read_text())
        assert not re.search(r'#\|\s*(notest|eval:\s*false|slow)', f.read_text()), f'{f.name}: a cell is skipped'
        for c in nb['cells']:
            assert len(json.dumps(c.get('outputs',
                [])))<20_000, f"{f.name}: an output is too large: {''.join(c['source'])[:60]}"

def test_nothing_local_in_the_tree():
    "No machine's paths, no registry hosts, no workplace"
    files = subprocess.run(['git', 'ls-files'], cwd=root, capture_output=True, text=True).stdout.split()
    bad = re.compile('/wo'+'rk/|/ro'+'ot/|files.python'+'hosted|pypi'+r'\.org|download\.pyto'+'rch', re.I)
    for f in files:
        if (root/f).suffix in ('.py','.ipynb','.md','.toml','.ini','.json','.txt','') and (root/f).exists():
            assert not bad.search((root/f).read_text(errors='ignore')), f

@pytest.mark.slow
def test_wheel(tmp_path):
    "A wheel for all versions of Python builds, installs outside the tree, imports there, and carries no tests"
    subprocess.run([sys.executable, '-m', 'build', '--wheel', '--no-isolation', '--outdir', str(tmp_path), str(root)],
        check=True, capture_output=True)
    whl, = tmp_path.glob('*-cp311-abi3-*.whl')
    subprocess.run(['uv', 'pip', 'install', '-q', '--python', sys.executable, '--no-deps',
                    '--target', str(tmp_path/'site'), str(whl)], check=True, capture_output=True,
                   env={**os.environ, 'PATH':f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"})
    code = 'import fastai_remote, fastai_remote.ingest.run; from fastai_remote.store.redis import RedisStore'
    code += '; print(fastai_remote.__file__)'
    out = subprocess.run([sys.executable, '-c', code], cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH':str(tmp_path/'site')}, check=True, capture_output=True, text=True).stdout
    assert out.strip()==str(tmp_path/'site/fastai_remote/__init__.py')
    assert sorted(p.name for p in (tmp_path/'site').iterdir() if p.suffix!='.dist-info'
        and not p.name.startswith('.'))==['bin','fastai_remote']

def module_lines(file):
    "Numbered lines of a module, without the list `__all__`, which nbdev writes"
    is_list = False
    for number,line in enumerate(file.read_text().splitlines(), 1):
        if line.startswith('# %%'): is_list = line.startswith('# %% auto')
        if not is_list: yield number,line

def test_lines_have_at_most_120_characters():
    modules = [f for f in (root/'fastai_remote').rglob('*.py') if f.name!='_modidx.py']
    c_sources = [f for f in (root/'fastai_remote'/'codec'/'c').iterdir() if f.suffix in ('.c','.h')]
    long = [f'{f.relative_to(root)}:{k}' for f in modules+c_sources for k,line in module_lines(f) if len(line)>120]
    for f in (root/'nbs').rglob('*.ipynb'):
        for cell in json.loads(f.read_text())['cells']:
            if cell['cell_type']=='code':
                long += [f'{f.relative_to(root)}: {line.rstrip()}' for line in cell['source'] if len(line.rstrip())>120]
    assert len(modules)>50 and len(c_sources)==3 and not long
