"""Every notebook is a test, run in a process of its own: `pytest tests/test_nbs.py -k core`

Most of a short notebook's time is the import of torch and fastai. One Python imports what is not ours, and is forked for
each notebook; `fastai_remote` is imported anew in each."""
import os, shutil, signal, subprocess, sys

import pytest
from nbdev.config import get_config
from nbdev.doclinks import nbglob

cfg = get_config()
ENGINES = {'dask':'distributed', 'ray':'ray', 'spark':'pyspark'}
_serve = '''
import atexit, gc, os, sys, threading, traceback
import IPython, matplotlib.pyplot, pandas, torch, torchvision, fastai.vision.all
from nbdev.config import get_config
from nbdev.test import test_nb
assert not [m for m in sys.modules if m.startswith('fastai_remote')]
c = get_config()
gc.freeze()   # else each fork copies what the garbage collector visits
for line in sys.stdin:
    fn,out = line.rstrip('\\n').split('\\t')
    if (pid:=os.fork())==0:
        with open(os.devnull) as nothing, open(out, 'w') as said:
            os.dup2(nothing.fileno(), 0)
            for k in 1,2: os.dup2(said.fileno(), k)
        sys.argv[1:],failed = [fn],True
        try: failed = not test_nb(fn, skip_flags=c.tst_flags, basepath=c.config_path)[0]
        except BaseException: traceback.print_exc()
        # What an interpreter does at its end, but for freeing every object of torch, which takes longer than most notebooks
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(failed)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
'''

class Kernels:
    "Runs notebooks one after another"
    proc = None
    def run(self, fn, out):
        "The exit code of notebook `fn`, what it says in the file `out`"
        if self.proc is None: self.proc = subprocess.Popen([sys.executable, '-W', 'ignore', '-c', _serve], cwd=cfg.config_path, stdin=subprocess.PIPE,
                                                           stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            print(fn, out, sep='\t', file=self.proc.stdin, flush=True)
            return int(self.proc.stdout.readline())
        except BaseException:   # the test's time is over, or somebody has pressed Ctrl-C
            self.end()
            raise

    def end(self):
        if self.proc is None: return
        try: os.killpg(self.proc.pid, signal.SIGKILL)
        except ProcessLookupError: pass
        with self.proc: self.proc = None

@pytest.fixture(scope='module')
def kernels():
    k = Kernels()
    yield k
    if k.proc: k.proc.communicate()   # so that it ends by itself
    k.end()

@pytest.mark.parametrize('fn', [pytest.param(f, id='/'.join(f.parts[f.parts.index('nbs')+1:]).removesuffix('.ipynb')) for f in sorted(nbglob(as_path=True))])
def test_notebook(fn, kernels, tmp_path):
    if fn.stem in ENGINES: pytest.importorskip(ENGINES[fn.stem], reason=f'the extra [{fn.stem}] is not installed')
    if fn.stem=='spark' and not (shutil.which('java') or 'JAVA_HOME' in os.environ): pytest.skip('no Java for Spark')
    code = kernels.run(fn, tmp_path/'said')
    assert code==0, f'{fn} failed\n{(tmp_path/"said").read_text()[-6000:]}'

def test_a_notebook_that_fails_is_noticed(kernels, tmp_path):
    for name in 'settings.ini','pyproject.toml': shutil.copy(cfg.config_path/name, tmp_path)
    cell = '{"cell_type":"code","id":"a","metadata":{},"execution_count":null,"outputs":[],"source":["assert 1==2, \\"as it should\\""]}'
    (f:=tmp_path/'fails.ipynb').write_text('{"cells":['+cell+'],"metadata":{},"nbformat":4,"nbformat_minor":5}')
    assert kernels.run(f, tmp_path/'said')==1 and 'as it should' in (tmp_path/'said').read_text()
