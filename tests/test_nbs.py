"Every notebook is a test: `pytest tests/test_nbs.py -k core`"
import pytest
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.test import test_nb as run_nb

cfg = get_config()

@pytest.mark.parametrize('fn', [pytest.param(f, id=f.stem) for f in sorted(nbglob(as_path=True))])
def test_notebook(fn): assert run_nb(fn, skip_flags=cfg.tst_flags, basepath=cfg.config_path)[0], f'{fn} failed'
