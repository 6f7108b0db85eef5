"""Every notebook is a test, run in a process of its own: `pytest tests/test_nbs.py -k core`

Most of a short notebook's time would be the import of torch, fastai and our modules, see `interpreters.py`."""
import os, shutil
from contextlib import nullcontext

import pytest
from fastcore.nbio import mk_cell, new_nb, write_nb
from nbdev.config import get_config
from nbdev.doclinks import nbglob

from clusters import one_ray_at_a_time

cfg = get_config()
ENGINES = {'dask':'distributed', 'ray':'ray', 'spark':'pyspark'}
RUN = '''
import sys
from nbdev.config import get_config
from nbdev.test import test_nb
config = get_config()
sys.exit(not test_nb(sys.argv[1], skip_flags=config.tst_flags, basepath=config.config_path)[0])
'''

# Run by one of the test processes, in forks of one process that has imported all that they need
TOGETHER = [pytest.mark.slow, pytest.mark.xdist_group('notebooks')]

@pytest.fixture
def run_notebook(interpreters):
    "A function that runs a notebook; what it returns has the exit code, and what was said"
    def run(file):
        has_ours = file.stem not in ('index', *ENGINES)
        return interpreters.run(RUN, file, cwd=cfg.config_path, ours=has_ours)
    return run

def notebooks():
    "A parameter for each; the first page is quick, and those of engines start several processes"
    for file in sorted(nbglob(as_path=True)):
        name = '/'.join(file.parts[file.parts.index('nbs')+1:]).removesuffix('.ipynb')
        marks = [] if name=='index' else TOGETHER
        if file.stem in ENGINES: marks = [pytest.mark.slow, pytest.mark.xdist_group('processes')]
        yield pytest.param(file, id=name, marks=marks)

@pytest.mark.parametrize('file', notebooks())
def test_notebook_runs(file, run_notebook):
    name = file.stem
    if name in ENGINES: pytest.importorskip(ENGINES[name], reason=f'the extra [{name}] is not installed')
    if name=='spark' and not (shutil.which('java') or 'JAVA_HOME' in os.environ): pytest.skip('no Java for Spark')
    with one_ray_at_a_time() if name=='ray' else nullcontext(): run = run_notebook(file)
    assert run.returncode==0, f'{file} failed\n{(run.stdout+run.stderr)[-6000:]}'

@pytest.mark.slow
@pytest.mark.xdist_group('notebooks')
def test_a_notebook_that_fails_is_noticed(run_notebook, tmp_path):
    for name in 'settings.ini','pyproject.toml': shutil.copy(cfg.config_path/name, tmp_path)
    write_nb(new_nb([mk_cell('assert 1==2, "as it should"')]), tmp_path/'fails.ipynb')
    run = run_notebook(tmp_path/'fails.ipynb')
    assert run.returncode==1 and 'as it should' in run.stdout+run.stderr
