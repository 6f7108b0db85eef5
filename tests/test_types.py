"The examples of the guide, written with explicit imports, have no errors of types that are ours: mypy and pyright"
import json, os, re, subprocess, sys
from pathlib import Path

import pytest

import fastai_remote

root = Path(__file__).parents[1]
sys.path.insert(0, str(root/'tools'))
import guide, stub

# fastai has no types: names that it exports, and methods that we add to its classes, are unknown to both programs
FASTAI = 'from fastai.vision.all import *','from fastai.text.all import *'
# What a page has from the prelude of `tools/guide.py`
PRELUDE = 'from pathlib import Path\nimport numpy as np\nfrom PIL import Image\nfolder = Path()\n'
# Mistakes that have to be found, or nothing else would be
WRONG = """from fastai_remote import RedisStore, to_redis
store = RedisStore('redis://localhost', 'pets')
to_redis([1, 2], 'redis://localhost', 'pets', num_workers='two')
store.get_manny([0])
"""

# mypy would read all of torch, pandas and IPython for half a minute, and find the same errors in the examples
MYPY = """[mypy]
ignore_missing_imports = True
follow_imports = silent
[mypy-torch.*,torchvision.*,fastai.*,fastcore.*,fasttransform.*,plum.*,IPython.*,pandas.*,matplotlib.*,pyarrow.*]
follow_imports = skip
follow_imports_for_stubs = True
"""

@pytest.fixture(scope='module')
def programs(tmp_path_factory):
    "A folder with a file for each page of the guide, and `wrong.py`"
    folder = tmp_path_factory.mktemp('types')
    for page in guide.pages():
        code = '\n'.join(guide.examples(page))
        for line in 'from fastai_remote import *',*FASTAI: code = code.replace(line, '')
        used = [name for name in fastai_remote.__all__ if re.search(rf'\b{name}\b', code)]
        imports = f"from fastai_remote import {', '.join(used)}\n" if used else ''
        (folder/f'{page.stem}.py').write_text(imports+PRELUDE+code)
    (folder/'wrong.py').write_text(WRONG)
    # Without the code of libraries that have no types, such as fastai, it takes 60% of the time, and finds the same
    options = dict(typeCheckingMode='standard', reportMissingImports=False, extraPaths=[str(root)],
                   useLibraryCodeForTypes=False)
    (folder/'mypy.ini').write_text(MYPY)
    (folder/'pyrightconfig.json').write_text(json.dumps(options))
    return folder

def errors(folder, *command):
    "Errors that a program finds, as `{name of a file: ['line: message']}`"
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, 'MYPYPATH':str(root)})
    found = {}
    for line in run.stdout.splitlines():
        m = re.match(r'\s*(?:\S*/)?(\w+)\.pyi?:(\d+)(?::\d+)?(?: -|:) error: (.*)', line)
        if m: found.setdefault(m[1], []).append(f'{m[2]}: {m[3]}')
    return found

def mypy(folder):
    files = sorted(f.name for f in folder.glob('*.py'))
    return errors(folder, sys.executable, '-m', 'mypy', *files)

def pyright(folder):
    "By basedpyright, a copy of pyright that needs no download when it runs"
    program = str(Path(sys.executable).with_name('basedpyright'))
    return errors(folder, program, '--pythonpath', sys.executable, '--level', 'error', '.')

@pytest.mark.slow
@pytest.mark.parametrize('check', [mypy, pyright])
def test_no_error_names_our_package(check, programs):
    "What is left is about fastai, which has no types, NumPy, or the library redis"
    found = check(programs)
    assert [line.partition(':')[0] for line in found.pop('wrong')]==['3','4']
    pages = {file:lines for file,lines in found.items() if (programs/f'{file}.py').exists()}
    ours = re.compile(rf"\b({'|'.join(['fastai_remote', *fastai_remote._module_of, 'Manifest', 'Place', 'Writer'])})\b")
    assert len(pages)>5 and not {file:[o for o in lines if ours.search(o)] for file,lines in pages.items()
                                 if any(map(ours.search, lines))}

def test_stubs_are_up_to_date():
    "`make export` writes them; those of the package are the examples of what it writes"
    stubs = stub.stubs()
    assert set(stubs)==set((root/'fastai_remote').rglob('*.pyi'))
    for file,text in stubs.items(): assert file.read_text(encoding='utf-8')==text, file
