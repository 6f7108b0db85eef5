"""The program `fastai_remote`: its overview, its exit codes, and its errors

Docs: page `cli/main`"""

# The commands import NumPy, redis-py and fsspec, which takes most of a second; none of them imports torch.
# `fastai_remote -h` needs none of this, so this module imports the commands when there is one.
#
# The docstring of `main` is what `fastai_remote -h` shows. `main` raises `SystemExit` only for `COMMAND -h`, and errors
# only with `--traceback`.

import os, sys
from importlib import import_module
from inspect import getdoc

import fastai_remote
from .terminal import BROKEN_PIPE, OK, USAGE

def main(
    argv:list=None # Arguments; default: those of the program
)->int: # The exit code
    """usage: fastai_remote COMMAND ... [options]

    Datasets for fastai in Redis or in tar shards.

    commands:
      ingest    Write images, tables, drawings, tars or a HuggingFace folder to Redis or to shards.
      append    Add samples to a dataset, as a new version that becomes visible at once.
      copy      Copy a dataset to another server, or between Redis and shards, and compare its checksums on the way.
      resize    Make a dataset with smaller images.
      ls        List the datasets on a Redis server or below a folder, and the ingests that were not finished.
      info      Show what a dataset consists of: samples, fields, splits, labels, statistics.
      show      Draw some samples in one picture, and print their other values.
      view      Serve a page that shows any sample in a browser, and filters and sorts, until Ctrl-C.
      verify    Read a whole dataset, compare its checksums and decode its samples.
      failures  List the samples that could not be converted when a dataset was written, and why.
      abandon   Remove what an unfinished ingest has written. A dataset of the same name stays.
      rm        Remove a dataset, and what an unfinished ingest of its name has written.
      serve     Run a private Redis server that keeps its data in DIR, until Ctrl-C.
      doctor    Look for what is wrong or slow: with the installation, a server, a folder, the rights.

    A dataset is named `URL NAME` in Redis (redis://host), and by its folder for shards (a path, s3://bucket/pets).
    `env:VARIABLE` is the URL in a variable, `env:` that of FASTAI_REMOTE_URL or REDIS_URL. Passwords belong there, in
    FASTAI_REMOTE_PASSWORD, or are asked for; a URL with a password in the command line is refused.

    exit codes: 0 done; 1 an error; 2 a wrong command line; 3 `verify` or `doctor` found something; 130 Ctrl-C

    examples:
      fastai_remote serve data/
      fastai_remote ingest images/ redis://localhost pets --label folder --resize 256
      fastai_remote ls redis://localhost
      fastai_remote COMMAND -h"""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        if not argv or argv[0] in ('-h','--help','help'):
            print(getdoc(main))
            code = OK if argv else USAGE
        elif argv[0]=='--version':
            print(f'fastai_remote {fastai_remote.__version__}')
            code = OK
        else: code = import_module('fastai_remote.cli.commands').run(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:   # such as `| head`: nobody reads the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
