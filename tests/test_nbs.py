"Every notebook is a test, run in a Python of its own: `pytest tests/test_nbs.py -k core`"
import os, shutil, subprocess, sys

import pytest
from nbdev.config import get_config
from nbdev.doclinks import nbglob

cfg = get_config()
ENGINES = {'dask':'distributed', 'ray':'ray', 'spark':'pyspark'}
_run = 'import sys; from nbdev.config import get_config; from nbdev.test import test_nb; c = get_config(); sys.exit(not test_nb(sys.argv[1], skip_flags=c.tst_flags, basepath=c.config_path)[0])'

@pytest.mark.parametrize('fn', [pytest.param(f, id='/'.join(f.parts[f.parts.index('nbs')+1:]).removesuffix('.ipynb')) for f in sorted(nbglob(as_path=True))])
def test_notebook(fn):
    if fn.stem in ENGINES: pytest.importorskip(ENGINES[fn.stem], reason=f'the extra [{fn.stem}] is not installed')
    if fn.stem=='spark' and not (shutil.which('java') or 'JAVA_HOME' in os.environ): pytest.skip('no Java for Spark')
    r = subprocess.run([sys.executable, '-W', 'ignore', '-c', _run, fn], capture_output=True, text=True, cwd=cfg.config_path)
    assert r.returncode==0, f'{fn} failed\n{r.stdout[-3000:]}\n{r.stderr[-3000:]}'
