"`python -m fastai_remote`: the commands of `fastai_remote.cli`"
import sys

from .cli.main import main

if __name__=='__main__': sys.exit(main())
