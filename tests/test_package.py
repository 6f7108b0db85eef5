"The package as a whole: names, floors, versions, notebooks"
import ast, configparser, json, os, re, subprocess, sys
from pathlib import Path

import pytest

root = Path(__file__).parents[1]
NAMES = '''CorruptSample Fetch IngestError IngestReport MemoryStore MissingSample Permutation RandomStoreSplitter RedisBlock RedisStore RedisWriter RemoteDL RemoteItems Store
    MeanImage Rasterise VerifyReport drawing_samples simplify StoreBusy StoreError StoreExists StoreFull StoreNotFound StoreSplitter StoreUnavailable UnknownField UnsupportedFormat csv_samples get_remote_items image_samples redis_server shrink tar_samples to_redis
    RemoteDataset ShardBlock ShardStore TieredStore index_shards make_client to_shards'''.split()
LIGHT = '''imported core position codec strokes rasterise order commit stats shard_order store_redis server redis_writer redis_commit redis_admin redis_keys cache storage shard_index whole_shards store_shards
    sources streams parallel chunk datasets shard_writer shard_commit ingest shards foreign_shards ops partitions tiered drawings'''.split()   # floors below torch

def python(code): return subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, check=True).stdout.strip()

def test_names():
    "A star import gives these names and no others"
    assert python('import sys; from fastai_remote import *; print(sorted(n for n in globals() if not n.startswith("_") and n!="sys"))')==str(sorted(NAMES))

def test_star_import_is_quiet_and_shadows_nothing():
    code = '''from fastai.vision.all import *; import threading, os
before,t = dict(globals()),threading.active_count()
from fastai_remote import *
print([n for n in fastai_names if globals()[n] is not before[n]] if (fastai_names:=[n for n in before if not n.startswith("__")]) else 0, threading.active_count()-t, DataLoaders.from_redis.__name__)'''
    assert python(code)=='[] 0 from_redis'

IMPORTS = ['from fastai.vision.all import *; from fastai_remote import RedisStore', 'from fastai_remote import RedisStore; from fastai.vision.all import *', 'import fastai_remote; import fastai.data.core',
           'import fastai.data.core; import fastai_remote', 'from fastai_remote import *; from fastai.vision.all import *', 'import fastai_remote.redis_keys; from fastai.data.all import *', 'from fastai.vision.all import *; import fastai_remote.ingest']

@pytest.mark.parametrize('imports', IMPORTS)
def test_loaders_have_their_methods_whatever_is_imported_and_in_any_order(imports):
    code = f'''{imports}
import inspect
from fastai.data.core import DataLoaders
from fastai.vision.data import ImageDataLoaders
try: DataLoaders.from_redis('redis://127.0.0.1:1', 'pets', timeout=0)
except Exception as e: print(type(e).__name__)
print(ImageDataLoaders.from_shards.__self__.__name__, hasattr(DataLoaders, 'from_redis'), 'normalize' in inspect.signature(DataLoaders.from_redis).parameters, hasattr(DataLoaders, 'from_nowhere'))'''
    assert python(code).split() in (['TypeError','ImageDataLoaders','True','True','False'], ['StoreUnavailable','ImageDataLoaders','True','True','False'])

def test_methods_that_fastai_is_to_get_import_nothing_by_themselves():
    "A process that has fastai, and writes, loads no more than it needs"
    code = '''import sys, fastai.data.core
from fastai_remote import to_redis, RedisStore
import fastai.vision.all
print([m for m in sys.modules if m in ('fastai_remote.block','fastai_remote.loader','fastai_remote.fetch')])'''
    assert python(code)=='[]'

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

def test_floors():
    "A module imports only from the floors below it; torch and fastai come in with the loader; stores do not import each other"
    order = [re.search(r'default_exp (\w+)', f.read_text())[1] for f in sorted((root/'nbs').glob('[0-9]*.ipynb'))]
    for k,m in enumerate(order):
        for node in ast.walk(ast.parse((root/f'fastai_remote/{m}.py').read_text())):
            mod = getattr(node, 'module', None) or '' if isinstance(node, ast.ImportFrom) else ' '.join(a.name for a in node.names) if isinstance(node, ast.Import) else ''
            if mod.startswith('fastai_remote.') and not mod.startswith('fastai_remote._'): assert mod.split('.')[1] in order[:k], f'{m} imports {mod}'
            if m in LIGHT: assert not mod.startswith(('torch','fastai.')) and mod!='fastai', f'{m} imports {mod}'

@pytest.mark.parametrize('mod', LIGHT)
def test_light_modules_do_not_load_torch(mod): assert python(f'import sys, fastai_remote.{mod}; print("torch" in sys.modules or "fastai" in sys.modules)')=='False'

def test_one_version():
    ini = configparser.ConfigParser(delimiters=['='])
    ini.read(root/'settings.ini')
    import fastai_remote
    assert ini['DEFAULT']['version']==fastai_remote.__version__

def test_notebooks_are_small_and_unskipped():
    for f in (root/'nbs').rglob('*.ipynb'):
        nb = json.loads(f.read_text())
        assert not re.search(r'#\|\s*(notest|eval:\s*false|slow)', f.read_text()), f'{f.name}: a cell is skipped'
        for c in nb['cells']: assert len(json.dumps(c.get('outputs', [])))<20_000, f"{f.name}: an output is too large: {''.join(c['source'])[:60]}"

def test_nothing_local_in_the_tree():
    "No machine's paths, no registry hosts, no workplace"
    files = subprocess.run(['git', 'ls-files'], cwd=root, capture_output=True, text=True).stdout.split()
    bad = re.compile('/wo'+'rk/|/ro'+'ot/|files.python'+'hosted|pypi'+r'\.org|download\.pyto'+'rch', re.I)
    for f in files:
        if (root/f).suffix in ('.py','.ipynb','.md','.toml','.ini','.json','.txt','') and (root/f).exists(): assert not bad.search((root/f).read_text(errors='ignore')), f

def test_wheel(tmp_path):
    "A wheel builds, installs outside the tree, imports there, and carries no tests"
    subprocess.run([sys.executable, '-m', 'build', '--wheel', '--no-isolation', '--outdir', str(tmp_path), str(root)], check=True, capture_output=True)
    whl, = tmp_path.glob('*.whl')
    subprocess.run(['uv', 'pip', 'install', '-q', '--no-deps', '--target', str(tmp_path/'site'), str(whl)], check=True, capture_output=True,
                   env={**os.environ, 'PATH':f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"})
    code = 'import fastai_remote, fastai_remote.ingest; from fastai_remote.redis_commit import RedisStore; print(fastai_remote.__file__)'
    out = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, env={**os.environ, 'PYTHONPATH':str(tmp_path/'site')}, check=True, capture_output=True, text=True).stdout
    assert out.strip()==str(tmp_path/'site/fastai_remote/__init__.py')
    assert sorted(p.name for p in (tmp_path/'site').iterdir() if p.suffix!='.dist-info' and not p.name.startswith('.'))==['fastai_remote']
