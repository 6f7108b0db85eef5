"Run every notebook from a clean kernel, in its folder, and keep its outputs"
import os, sys
from pathlib import Path

from execnb.shell import CaptureShell
from fastcore.nbio import read_nb, write_nb

root = Path(__file__).parents[1]/'nbs'

if __name__=='__main__':
    for f in [Path(o).resolve() for o in sys.argv[1:]] or sorted(root.rglob('*.ipynb')):
        print(f.relative_to(root))
        os.chdir(f.parent)
        nb = read_nb(f)
        CaptureShell(mpl_format='png').run_all(nb, exc_stop=True)
        write_nb(nb, f)
