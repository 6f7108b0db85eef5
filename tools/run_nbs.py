"Run notebooks, each in a Python of its own and in its folder, and keep their outputs"
import os, subprocess, sys
from pathlib import Path

from execnb.shell import CaptureShell
from fastcore.nbio import read_nb, write_nb

root = Path(__file__).parents[1]/'nbs'

def run(f):
    "Run notebook `f` here"
    print(f.relative_to(root), flush=True)
    os.chdir(f.parent)
    nb = read_nb(f)
    CaptureShell(mpl_format='png').run_all(nb, exc_stop=True)
    write_nb(nb, f)

if __name__=='__main__':
    fs = [Path(o).resolve() for o in sys.argv[1:]] or sorted(root.rglob('*.ipynb'))
    if len(fs)==1: run(fs[0])
    else:
        for f in fs: subprocess.run([sys.executable, '-W', 'ignore', __file__, f], check=True)
