"""A command, and its options, which are the parameters of a function

Docs: page `cli/command`"""

# A command has the options that the Python function has, with the same names, defaults and descriptions. So they are
# made from the function: its signature and its comments (docments). An option that is not given is not passed on, so a
# default is written in one place only.

import argparse, importlib.util, json, os, re, shutil, sys
from dataclasses import dataclass
from functools import partial
from inspect import getdoc, Parameter
from pathlib import Path
from textwrap import dedent, indent
from typing import get_args, get_origin, Literal

import cloudpickle
from fastcore.docments import docments

from .terminal import flag, UsageError
from .words import read_places
from ..core import printable
from ..store.connection import hidden_names
from ..store.shards import ShardReader

# --- Values

# The types of a parameter say how its text is read.

_METAVARS = {int:'N', float:'X', str:'TEXT', list:'TEXT,…', dict:'NAME=TEXT,…'}

def read_value(text:str, types:set):
    """`text` as a value of one of `types`, which are some of `int`, `float`, `str`, `list` and `dict`

    A list is written `a,b`, and a dict `a=b,c=d`. Raises `ValueError` and `UsageError`."""
    if dict in types and ('=' in text or list not in types): return _pairs(text)
    if list in types and (',' in text or str not in types):
        return [read_value(o, {str, *(types&{int})}) for o in text.split(',') if o]
    if int in types and re.fullmatch('-?[0-9]+', text): return int(text)
    return text if str in types else float(text) if float in types else int(text)

def _pairs(text, may_lack_values=False):
    """`a=b,c=d` as a dict; `c=` and `c` give `None` if they may lack values

    Raises `UsageError` for a name that is there twice or missing, or has no value."""
    found = {}
    for name,_,value in (o.partition('=') for o in text.split(',') if o):
        name = name.strip()
        if not name: raise UsageError(f'{text!r}: a name is missing before =')
        if name in found: raise UsageError(f'{text!r}: {name!r} is there twice')
        found[name] = value.strip() or None
        if found[name] is None and not may_lack_values:
            raise UsageError(f'{text!r}: there is no value for {name!r}: NAME=TEXT')
    return found

def read_splits(text:str)->dict:
    "`train,valid=0.2` as `{'train': None, 'valid': 0.2}`; raises `ValueError` for a size that is no number"
    sizes = _pairs(text, may_lack_values=True)
    return {split:None if size is None else read_value(size, {int,float}) for split,size in sizes.items()}

# Labels and functions are code in Python. In a shell, a label is the name of the folder of a file, or a part of its
# path, and `--fn` names a function in a file or a module. One in a file is sent to the workers with its code, so they
# need not find the file.

def folder_label(path):
    "The label of the file `path`: the name of the folder that it is in"
    return Path(os.path.abspath(path)).parent.name   # of `a.png` and `../a.png`, too

def pattern_label(pattern, path):
    """The label of the file `path`: the first group of a regular expression that is found in its name

    A pattern with a slash is looked for in the whole path. Raises `ValueError` if it is not found."""
    path = Path(path)
    text = path.as_posix() if '/' in pattern else path.name
    found = re.search(pattern, text)
    if not found: raise ValueError(f'{pattern!r} is not found in {text}')
    return found[1]

def read_label(text:str):
    """The function of a path that `--label` stands for; raises `UsageError`

    `text` is `folder`, also called `parent`, or a regular expression with a group."""
    if text in ('folder','parent'): return folder_label
    try: n = re.compile(text).groups
    except re.error as e: raise UsageError(f'--label {text!r} is no regular expression: {e}') from None
    if not n:
        raise UsageError(f"--label is 'folder', or a regular expression with a group in parentheses, not {text!r}")
    return partial(pattern_label, text)

def read_function(text:str):
    """The function that `--fn` names, as `file.py:name` or `module:name`

    Runs the file, or imports the module. Raises `UsageError`, also for errors in it."""
    where,_,name = text.rpartition(':')
    if not where: raise UsageError(f'--fn is FILE.py:FUNCTION or MODULE:FUNCTION, not {text!r}')
    try:
        if where.endswith('.py'):
            # another name than that of the file, which may be that of a package that is imported later
            spec = importlib.util.spec_from_file_location(f'_fn_{Path(where).stem}', where)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            cloudpickle.register_pickle_by_value(module)   # workers cannot import it
        else: module = importlib.import_module(where)
    except Exception as e: raise UsageError(f'--fn {text}: {type(e).__name__}: {e}') from e
    function = getattr(module, name, None)
    if not callable(function): raise UsageError(f'--fn {text}: there is no function {name!r} in {where}')
    return function

def read_storage_options(text:str)->dict:
    "Storage options of the command line; raises `UsageError` for a secret and for what is no JSON object"
    try: options = json.loads(text)
    except ValueError: options = None
    if not isinstance(options, dict):
        raise UsageError('--storage-options is a JSON object, such as \'{"endpoint_url": "http://localhost:9000"}\'')
    hidden = hidden_names(options)
    if hidden:
        raise UsageError(f"{', '.join(hidden)} may be secret, and everybody on this machine can read the command line; "
                         'AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws and the other usual ways are used')
    return options

# --- Options

# Parameters that are read in a way of their own: `{name: (function of the text, what -h shows)}`
_READERS = {'label':(read_label, 'folder|REGEX'), 'fn':(read_function, 'FILE.py:FUNCTION'),
            'vocab':(lambda text: read_value(text, {list}), 'LABEL,LABEL,…'),
            'splits':(read_splits, 'SPLIT,SPLIT=SIZE'), 'storage_options':(read_storage_options, 'JSON')}
# The texts of options whose values look different in Python
_TEXTS = {
    'label':'Label of an image: `folder` for the name of its folder, or a regular expression whose first group is '
            'found in its path; default: no labels',
    'fn':'A function of a sample that returns the sample to store; it runs in the workers',
    'vocab':'Labels of `cls` in the order of their codes; default: all there are, sorted',
    'splits':'Splits at random, with a number of samples or a fraction of them each; one without gets the rest; '
             "default: the source's splits",
    'storage_options':"For fsspec's file system: `endpoint_url`, `profile`, … Secrets belong in the environment, such "
                      'as AWS_SECRET_ACCESS_KEY',
    'fields':'The fields for columns, such as path=jpg,age=age.f4',
    'progress':'Show progress? Default: in a terminal'}
_OTHER_FLAGS = {'num_workers':['--workers'], 'yes':['-y']}

def given(options:dict, names)->dict:
    "Those of `options` whose names are among `names`"
    return {name:value for name,value in options.items() if name in names}

def without(options:dict, *names)->dict:
    "Those of `options` whose names are not among `names`"
    return {name:value for name,value in options.items() if name not in names}

# `parameters_of` lists what can be an option, and `add_options` adds it to a parser.

def parameters_of(functions)->dict:
    """The parameters of functions or classes that an option can express: those with a default

    They are `{name: parameter}`, with `anno`, `default` and `docment`; the first function that has a name describes
    it."""
    found = {}
    for function in functions:
        for name,parameter in docments(function, full=True, returns=False).items():
            if parameter.default is Parameter.empty or name in found: continue
            if _argument(name, parameter.anno, parameter.default): found[name] = parameter
    return found

def _argument(name, anno, default):
    "Arguments of `add_argument` for a parameter with annotation `anno`; `None` if no text expresses its values"
    if anno is bool and default is None: return dict(action=argparse.BooleanOptionalAction)
    if anno is bool: return dict(action='store_false' if default else 'store_true')
    if get_origin(anno) is Literal: return dict(choices=get_args(anno))
    if name in _READERS and anno is not str: return dict(zip(('type','metavar'), _READERS[name]))
    types = [o for o in _METAVARS if o in (get_args(anno) or [anno])]
    if not types: return None
    read = partial(read_value, types=set(types))
    read.__name__ = ' or '.join(o.__name__ for o in types)   # for the message of argparse
    return dict(type=read, metavar='|'.join(_METAVARS[o] for o in types))

def add_options(parser, parameters:dict):
    """Add an option to a parser, or a group of one, for each of `parameters`, as `parameters_of` returns them

    The namespace has only those that are given. For a `bool` that is `True` by default, the option is `--no-NAME`, and
    the namespace has `NAME=False`."""
    for name,parameter in parameters.items():
        docment,default = parameter.docment or '',parameter.default
        text = docment if default in (None,'',(),False) else f'{docment} (default: {default})'
        if default is True: text = f'Switch off: {docment}'
        if parameter.anno is not str: text = _TEXTS.get(name, text)
        text = text.replace('\n', ' ').replace('%', '%%')
        flags = ['--no-'+flag(name)[2:] if default is True else flag(name), *_OTHER_FLAGS.get(name, [])]
        argument = _argument(name, parameter.anno, default)
        parser.add_argument(*flags, dest=name, default=argparse.SUPPRESS, help=text, **argument)

class ArgumentParser(argparse.ArgumentParser):
    """A parser whose errors are `UsageError`s, so that there is one place that prints errors

    Descriptions and examples keep their lines; texts of options are wrapped."""
    def __init__(self, **kwargs):
        width = min(shutil.get_terminal_size().columns, 110)-1
        formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=width)
        super().__init__(allow_abbrev=False, formatter_class=formatter, **kwargs)
    def error(self, message): raise UsageError(message)

# --- Commands

# A command is a function of the parser's namespace `args`, which has the `words`, and of the options that are given.
# Its docstring is its description.

PLACE_OPTIONS = given(parameters_of([ShardReader]), ('timeout','storage_options'))   # commands with a URL have them
COMMANDS = {}   # `{name: Command}`

@dataclass
class Command:
    "A command of the program"
    function:object # `function(args, **options)`; its docstring describes the command
    usage:str # The words after its name
    options:dict # `{title of a group: parameters}`, as `parameters_of` returns them; the first group has no title
    examples:str # Shown by `-h`
    name:str # Of the command

    def parser(self)->ArgumentParser:
        "A new parser for this command"
        parser = ArgumentParser(prog=f'fastai_remote {self.name}', description=getdoc(self.function),
            usage=f'%(prog)s {self.usage} [options]',
            epilog='examples:\n'+indent(dedent(self.examples).strip('\n'), '  '))
        parser.add_argument('words', nargs='*', help=argparse.SUPPRESS)
        for title,parameters in self.options.items():
            add_options(parser.add_argument_group(title) if title else parser, parameters)
        parser.add_argument('--json', action='store_true', help='Print one JSON document')
        parser.add_argument('--traceback', action='store_true', help="Show Python's traceback of an error")
        return parser

def command(
    usage:str, # The words after the name of the command
    *functions, # Their parameters are options, and so are those of the decorated function that have a default
    examples:str, # Shown by `-h`
    name:str=None, # Of the command; default: that of the function
    **groups # Further options: parameters by the title of their group, with `_` for a space
):
    "A decorator that makes a command of a function"
    def register(function):
        options = parameters_of([function, *functions])
        if 'URL' in usage: options |= PLACE_OPTIONS
        titled = {title.replace('_', ' '):parameters for title,parameters in groups.items()}
        called = name or function.__name__
        COMMANDS[called] = Command(function, usage, {'':options, **titled}, examples, called)
        return function
    return register

def places_of(args, n=1, **options):
    "A list of the `n` places (`Place`) that `args.words` name; `options` as in `read_places`; raises `UsageError`"
    places = read_places(args.words, n, **options, **given(vars(args), PLACE_OPTIONS))
    args.place_words = places[-1].words   # for messages
    return places

def show(args, document, text):
    "Print the result of a command: `document` as JSON if `--json` was given, else `text`"
    if args.json: print(json.dumps(document, default=lambda o: o.item() if hasattr(o, 'item') else str(o)))
    else: print(printable(str(text)))
