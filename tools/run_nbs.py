"""Run notebooks and keep their outputs

python tools/run_nbs.py                  runs all notebooks in `nbs`, each in a Python process of its own
python tools/run_nbs.py NOTEBOOK ...     runs these

A notebook runs in its own folder. The first notebook that fails stops the run.
"""
import os, subprocess, sys
from pathlib import Path

from execnb.shell import CaptureShell
from fastcore.nbio import read_nb, write_nb

root = Path(__file__).parents[1]/'nbs'

def run(
    file:Path # Absolute path of a notebook
):
    "Run a notebook in this process and save it with its outputs"
    print(file.relative_to(root), flush=True)
    os.chdir(file.parent)
    notebook = read_nb(file)
    CaptureShell(mpl_format='png').run_all(notebook, exc_stop=True)
    write_nb(notebook, file)

if __name__=='__main__':
    files = [Path(name).resolve() for name in sys.argv[1:]] or sorted(root.rglob('*.ipynb'))
    if len(files)==1: run(files[0])
    else:
        for file in files: subprocess.run([sys.executable, '-W', 'ignore', __file__, file], check=True)
