"Every notebook is a test: `pytest tests/test_nbs.py -k core`"
import pytest
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.test import test_nb as run_nb

cfg = get_config()
ENGINES = {'dask':'distributed', 'ray':'ray', 'spark':'pyspark'}

@pytest.mark.parametrize('fn', [pytest.param(f, id=f.stem) for f in sorted(nbglob(as_path=True))])
def test_notebook(fn):
    if fn.stem in ENGINES: pytest.importorskip(ENGINES[fn.stem], reason=f'the extra [{fn.stem}] is not installed')
    assert run_nb(fn, skip_flags=cfg.tst_flags, basepath=cfg.config_path)[0], f'{fn} failed'
