"The package as a whole: names, floors, versions, notebooks"
import ast, configparser, importlib.util, json, os, pickle, re, subprocess, sys, types
from functools import cache, cached_property
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from fastai.data.core import DataLoaders

import fastai_remote
from fastai_remote import MemoryStore, RedisStore, RemoteDataset, TieredStore, to_redis, to_shards
from fastai_remote.store.redis import RedisReader

root = Path(__file__).parents[1]
NAMES = '''CorruptSample Fetch FieldSplitter KFoldSplitter IngestError MemoryStore MissingSample RandomStoreSplitter
    RedisBlock RedisStore RemoteDL Store
    MeanImage Rasterise drawing_samples hf_samples StoreBusy StoreError StoreExists StoreFull
    StoreNotFound StoreSplitter StoreUnavailable UnknownField UnsupportedFormat csv_samples get_remote_items
    image_samples redis_server shrink tar_samples to_redis
    RemoteDataset ShardBlock ShardStore TieredStore index_shards s3_options StrokeSequence array_samples
    img2dataset_samples mix table_samples to_shards CropAudio TextOptions tokenize_store Resume LoaderStats'''.split()
BY_NAME = 'DamagedTar IngestReport Permutation RedisWriter RemoteItems VerifyReport simplify'.split()
# a package imports from those before it
LAYERS = 'core clock parallel order codec store write source ingest load block view testing cli'.split()
LIGHT = LAYERS[:LAYERS.index('load')]   # without torch and fastai
MODULES = {'.'.join(f.relative_to(root/'fastai_remote').with_suffix('').parts):f
    for f in sorted((root/'fastai_remote').rglob('*.py')) if not f.name.startswith('_')}

@pytest.fixture(scope='module')
def new_python(interpreters):
    """A function that runs code in a new process, which has not imported us, and returns what it prints

    It has imported fastai if that is the first thing that the code does; else it has torch only."""
    def run(code):
        has_fastai = code.startswith(('from fastai.','import fastai.'))
        ours = ('fastai_remote',) if has_fastai else ('fastai','fastai_remote')
        check = f"import sys; assert not [m for m in sys.modules if m.split('.')[0] in {ours}]"
        process = interpreters.run(f'{check}\n{code}', fastai=has_fastai)
        return (process.stdout+process.stderr).strip()
    return run

@pytest.mark.slow
def test_names(new_python):
    "A star import gives these names and no others, is quiet and shadows nothing of fastai"
    code = '''from fastai.vision.all import *; import threading, os
before,t = dict(globals()),threading.active_count()
from fastai_remote import *
names = set(globals())-before.keys()-{'before','t'}
shadowed = [n for n in before if not n.startswith("__") and globals()[n] is not before[n]]
print(sorted(names), shadowed, threading.active_count()-t, DataLoaders.from_redis.__name__)'''
    assert new_python(code)==f'{sorted(NAMES)} [] 0 from_redis'
    assert set(NAMES+BY_NAME)==set(fastai_remote._module_of)<=set(dir(fastai_remote))
    for name in BY_NAME: assert getattr(fastai_remote, name).__name__==name

IMPORTS = ['from fastai.vision.all import *; from fastai_remote import RedisStore',
           'import fastai.data.core, fastai_remote; fastai_remote.RedisStore',
           'from fastai_remote import *; from fastai.vision.all import *']

@pytest.mark.slow
@pytest.mark.parametrize('imports', IMPORTS)
def test_loaders_have_their_methods_whatever_is_imported_and_in_any_order(imports, new_python):
    code = f'''{imports}
import inspect
from fastai.data.core import DataLoaders
from fastai.vision.data import ImageDataLoaders
try: DataLoaders.from_redis('redis://127.0.0.1:1', 'pets', timeout=0)
except Exception as e: print(type(e).__name__)
parameters = inspect.signature(DataLoaders.from_redis).parameters
print(ImageDataLoaders.from_shards.__self__.__name__, hasattr(DataLoaders, 'from_redis'), 'normalize' in parameters,
    hasattr(DataLoaders, 'from_nowhere'))'''
    assert new_python(code).split() in (['TypeError','ImageDataLoaders','True','True','False'],
        ['StoreUnavailable','ImageDataLoaders','True','True','False'])

@pytest.mark.slow
def test_the_import_system_and_the_frameworks_are_left_as_they_are(new_python):
    "Nothing waits for an import, no function of accelerate is replaced, and users of torch load no fastai"
    code = """import sys
import accelerate.accelerator
stock = accelerate.accelerator.prepare_data_loader
from fastai_remote import RemoteDataset
print('fastai' in sys.modules)
from fastai_remote import *
import fastai_remote.load.distributed
finders = [finder for finder in sys.meta_path if 'fastai_remote' in type(finder).__module__]
print(finders==[], accelerate.accelerator.prepare_data_loader is stock)"""
    assert new_python(code).split()==['False','True','True']

# --- layers

@cache
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
    at_import = {n for s in tree.body if not isinstance(s, (ast.FunctionDef,ast.ClassDef)) for n in ast.walk(s)}
    every = [n for n in ast.walk(tree) if isinstance(n, (ast.Import,ast.ImportFrom))]
    at_once = {m for n in every if n in at_import for m in of(n)}
    return at_once,{m for n in every for m in of(n)}-at_once

def ours(names): return {n.removeprefix('fastai_remote.') for n in names}&MODULES.keys()

def test_the_layers_are_all_there(): assert {m.split('.')[0] for m in MODULES}==set(LAYERS)

@pytest.mark.slow
def test_a_module_imports_only_from_those_below_it():
    "torch and fastai come in with the loader, stores do not import each other, and nobody takes private names"
    places = {m:LAYERS.index(m.split('.')[0]) for m in MODULES}
    stores,wrong,n = {'store.redis','store.shards'},{},0
    for module,place in places.items():
        at_once,later = imports_of(module)
        below,called = ours(at_once),ours(later)-{module}
        found = {o for o in below|called if places[o]>place}
        if module in stores: found |= (below|called)&stores
        for name in at_once|later:
            package,last = name.split('.')[0],name.split('.')[-1]
            is_private = last.startswith('_') and last not in ('_jpeg','_pixels')
            is_heavy = package in ('torch','torchvision','fastai') and module.split('.')[0] in LIGHT
            if is_heavy or is_private and package=='fastai_remote': found.add(name)
        if found: wrong[module] = found
        n += len(below)
    assert not wrong and n>100

def test_no_modules_import_each_other():
    "Also in no circle of several, and not in functions either"
    known = {m:ours(set().union(*imports_of(m)))-{m} for m in MODULES}
    order = list(TopologicalSorter(known).static_order())   # raises `CycleError`, which names a circle
    assert order.index('store.redis')<order.index('write.redis')<order.index('ingest.stores') and len(order)>50

def test_a_class_has_at_most_30_methods_of_its_own():
    "With properties, and without those that it inherits"
    classes = {c for m in MODULES for c in vars(importlib.import_module(f'fastai_remote.{m}')).values()
               if isinstance(c, type) and c.__module__.startswith('fastai_remote.')}
    kinds = types.FunctionType,property,cached_property,classmethod,staticmethod
    def is_method(name, member):   # `patch` of fastcore keeps a method that it replaces as `_orig_NAME`
        return isinstance(member, kinds) and not name.startswith('_orig_')
    sizes = {c.__name__:sum(is_method(*item) for item in vars(c).items()) for c in classes}
    assert len(sizes)>200 and {name:n for name,n in sizes.items() if n>30}=={}

WORKER = """import pickle, sys
with open(sys.argv[1], 'rb') as f: *objects,openers = pickle.load(f)
for o in [*objects, *(opener() for opener in openers)]: print(type(o).__name__, len(o), o[1])
print([m for m in sys.modules if m.startswith(('fastai_remote.write','fastai_remote.ingest'))])"""

@pytest.mark.slow
def test_a_worker_imports_no_writers(server, interpreters, tmp_path):
    "Stores of all kinds, datasets of loaders, and what openers make, in a process that only unpickles and reads them"
    options = dict(num_workers=1, shuffle=False, progress=False)
    samples = {split:[{'txt':f'text {i}', 'cls':'ab'[i%2]} for i in range(2)] for split in ('train','valid')}
    redis = to_redis(samples, server.url, 'carried', **options).store
    shards = to_shards(samples, tmp_path/'carried', **options).store
    keys = RedisStore.from_keys(server.url, 'carried:txt:{}', n=2, codec='txt')
    stores = [redis, shards, TieredStore(server.url, shards), keys, MemoryStore({'txt':[b'text 0',b'text 1']})]
    datasets = [DataLoaders.from_store(redis, bs=2, num_workers=0).train.dataset, RemoteDataset(shards)]
    assert type(pickle.loads(pickle.dumps(redis))) is RedisReader
    (tmp_path/'carried.pkl').write_bytes(pickle.dumps([*stores, *datasets, [store.opener() for store in stores]]))
    *read,modules = interpreters.run(WORKER, tmp_path/'carried.pkl').stdout.splitlines()
    sizes = [line.split()[:2] for line in read]
    readers = [[f'{kind}Reader', n] for kind,n in zip('Redis Shard Tiered RedisKeys Memory'.split(), '44422')]
    assert sizes==[*readers, ['Datasets','2'], ['RemoteDataset','4'], *readers] and modules=='[]', read
    assert all('text 1' in line or 'TensorCategory(1)' in line for line in read), read

def test_one_version():
    ini = configparser.ConfigParser(delimiters=['='])
    ini.read(root/'settings.ini')
    changes = re.search(r'(?m)^## (.+)$', (root/'CHANGELOG.md').read_text(encoding='utf-8'))[1]
    assert ini['DEFAULT']['version']==fastai_remote.__version__ and changes.startswith(fastai_remote.__version__)

# Notebooks that do not tell their story in steps yet
LONG = 'load/10_loader','load/15_dataset','load/21_texts','load/26_resume'

def test_notebooks_are_small_and_unskipped():
    """No cell is skipped, no output is large, no definition is longer than a screen, and demonstrations are frequent

    A screen is 60 lines that are not blank. There is a demonstration for every two cells of definitions."""
    for f in (root/'nbs').rglob('*.ipynb'):
        nb = json.loads(f.read_text())
        cells = [''.join(c['source']) for c in nb['cells'] if c['cell_type']=='code']
        exported = [re.sub(r'(?m)^#\|.*\n|^\s*\n', '', cell) for cell in cells if re.match(r'#\| *export', cell)]
        shown = [cell for cell in cells if not re.match(r'#\| *(export|hide|default_exp)', cell)]
        if f.relative_to(root/'nbs').with_suffix('').as_posix() not in LONG:
            assert all(len(cell.splitlines())<=60 for cell in exported), f'{f.name}: a definition is too long'
            assert not exported or 2*len(shown)>=len(exported)-1, f'{f.name}: too few demonstrations'   # imports: none
        assert not re.search(r'#\|\s*(notest|eval:\s*false|slow)', f.read_text()), f'{f.name}: a cell is skipped'
        for c in nb['cells']: assert len(json.dumps(c.get('outputs', [])))<50_000, (f.name, c['source'])

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
    code = 'import fastai_remote, fastai_remote.ingest.run; from fastai_remote.ingest.stores import RedisStore'
    code += '; print(fastai_remote.__file__)'
    out = subprocess.run([sys.executable, '-c', code], cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH':str(tmp_path/'site')}, check=True, capture_output=True, text=True).stdout
    assert out.strip()==str(tmp_path/'site/fastai_remote/__init__.py')
    assert sorted(p.name for p in (tmp_path/'site').iterdir() if p.suffix!='.dist-info'
        and not p.name.startswith('.'))==['bin','fastai_remote']

def test_lines_have_at_most_120_characters():
    "Also lists of names, which `make export` wraps after nbdev has written them"
    modules = [f for f in (root/'fastai_remote').rglob('*.py') if f.name!='_modidx.py']
    c_sources = [f for f in (root/'fastai_remote/codec/c').iterdir() if f.suffix in ('.c','.h')]
    page = [f for f in (root/'fastai_remote/view/page').iterdir() if f.is_file()]
    lines = [(f,line) for f in modules+c_sources+page for line in f.read_text().splitlines()]
    for f in (root/'nbs').rglob('*.ipynb'):
        cells = [cell for cell in json.loads(f.read_text())['cells'] if cell['cell_type']=='code']
        lines += [(f,line.rstrip()) for cell in cells for line in cell['source']]
    assert len(modules)>50 and len(c_sources)==3 and not [(f,line) for f,line in lines if len(line)>120]
