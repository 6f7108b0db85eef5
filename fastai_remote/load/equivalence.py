"""Single checks that fastai's own code would run unchanged, which every fast path requires

Docs: page `load/equivalence`"""

# A batch must be what stock fastai would have made from the same files, whatever a user adds to fastai: a subclass of
# `Categorize`, an implementation registered with `@ToTensor`, a method patched onto `PILImage`. The fast paths of this
# package do some of fastai's work themselves: images stay undecoded through crops and flips, and batches are built at
# once. They are correct only where fastai's own code would have run.
#
# Building one sample both ways and comparing is not enough, because a transform can behave differently from the second
# sample on. So the question is decided by identity, once per epoch: the exact types of the transforms, the
# implementations that would run for them, and the attributes of every class involved. Anything unknown runs through
# stock fastai code, and the answer names the reason.

import hashlib, inspect, os, sys, warnings
from functools import cache
from importlib import import_module
from types import CodeType, FunctionType

import PIL
import fastai
import fastcore
import fasttransform
import plum
import torch
import torchvision
from fastai.data.core import Datasets, TfmdLists
from fastai.data.transforms import Categorize, IntToFloatTensor, Normalize, RegressionSetup, ToTensor
from fastai.imports import noop
from fastai.torch_core import TensorCategory, TensorImage, TensorImageBW, TensorMask
from fastai.vision.augment import CropPad, DihedralItem, FlipItem, RandomCrop, RandomResizedCrop, Resize
from fastai.vision.core import AddMaskCodes, PILBase, PILImage, PILImageBW, PILMask
from fasttransform import Pipeline, Transform
from plum import Function, NotFoundLookupError

import fastai_remote

# --- Classes

# The fast paths rely on attributes of fastai's and Pillow's classes, such as `PILImage.crop`, `Resize.before_call` and
# `Pipeline.__call__`. `watch` remembers the attributes of a class and its bases when this package is imported, and
# `why_changed` reports which of them has changed since. Whatever was changed before the import is found by the file
# that its code comes from, and counts as replaced.

_packages = fastai, fastai_remote, fastcore, fasttransform, PIL, plum, torch, torchvision
_package_folders = tuple(os.path.dirname(package.__file__)+os.sep for package in _packages)
_fastai_folder = _package_folders[0]
_python_folder = os.path.dirname(os.__file__)+os.sep
# Attributes that Python adds to classes, which say nothing about what a class does
_bookkeeping = set('''__dict__ __weakref__ __doc__ __module__ __annotations__ __signature__ __abstractmethods__
    _abc_impl __slotnames__ __static_attributes__ __firstlineno__ __annotate__ __annotate_func__
    __annotations_cache__'''.split())

def _files_of(value):
    """Paths of the files with the code of `value`, a function, method or property, and of the functions that it wraps

    An empty list for anything else, such as a class, or a function that is not Python code."""
    if isinstance(value, property): value = value.fget
    value = getattr(value, '__func__', value)   # of a classmethod or staticmethod
    layers = []
    if callable(value): layers.append(inspect.unwrap(value, stop=layers.append))   # `append` returns None: go on
    return [f.__code__.co_filename for f in layers if hasattr(f, '__code__')]

def is_shipped(value)->bool:
    """Does the code of `value` come from fastai, a package that it uses, this package, or Python itself?

    True also if it is no Python function, method or property. Of the packages, those in `_packages` count; NumPy is
    none of them. Of a function that wraps another one, the code of both counts."""
    return all(file.startswith(_package_folders) or file.startswith(_python_folder) and '-packages' not in file
               for file in _files_of(value))

def _shipped(value):
    "`value` if `is_shipped`; else an object that nothing is or equals, so that `value` counts as replaced"
    return value if is_shipped(value) else object()

_watched = {}   # `{class: (names of the attributes that matter, or all if empty; {name: what is shipped})}`

def _attributes(cls, names):
    "`{name: attribute}` of a class and its bases, as they are now; `names` as in `_watched`"
    now = {}
    for base in cls.__mro__[-2::-1]: now.update(vars(base))   # all but `object`, the class itself last
    return {name:now[name] for name in names or now.keys()-_bookkeeping if name in now}

def why_changed(*classes)->str:
    "What in `classes` is not as fastai ships it, such as 'TfmdLists.show was replaced'; empty if nothing"
    for cls in classes:
        names,shipped = _watched[cls]
        now = _attributes(cls, names)
        for name,value in now.items():
            if name not in shipped:
                if name.startswith('__') or not is_shipped(value): return f'{cls.__name__}.{name} was added'
            elif value is not shipped[name]: return f'{cls.__name__}.{name} was replaced'
        gone = shipped.keys()-now.keys()
        if gone: return f'{cls.__name__}.{min(gone)} was removed'
    return ''

# A class also counts as changed if a user has only added a method, because fastai and Pillow look for some methods by
# name. Then stock code builds the batches, which is always correct.

# --- Functions

# The fast paths also do the work of some functions of modules. A user can replace such a function, and another version
# of fastai may contain other code. So the source text of each of these functions is compared with those of the versions
# that the fast paths were written for. A function that is not known turns off what depends on it, and nothing else:
# another `load_image` that of images, another `Categorize` that of labels. A warning says once which function it is,
# and of which version.

# `fasttransform` exports functions of the same names as these modules
_cast,_transform = map(import_module, ('fasttransform.cast','fasttransform.transform'))
_function_names = {
    fastai.vision.core:'load_image image2tensor tensor Image merge show_image',
    fastai.data.load:'fa_collate default_collate retain_types is_listy',
    fastai.torch_core:'tensor as_tensor',
    fastai.data.core:'is_indexer L',
    _transform:'compose_tfms retain_type _is_tuple',
    _cast:'cast retain_meta',
    PIL.Image:'open new fromarray frombytes frombuffer merge'}
# (variables of a module, name, what fastai ships under that name)
_functions = [(vars(module), name, _shipped(getattr(module, name)))
              for module,names in _function_names.items() for name in names.split() if hasattr(module, name)]

def _globals_of(functions):
    """The global variables that `functions` and the functions of fastai that they use read

    Returns `{(module, name): (dict of the module, value)}`."""
    found,todo,seen = {},list(functions),set()
    while todo:
        f = inspect.unwrap(todo.pop())
        if f in seen: continue
        seen.add(f)
        for name in _names_in(f.__code__):
            if name not in f.__globals__: continue
            value = f.__globals__[name]
            found[f.__globals__['__name__'], name] = f.__globals__,value
            if isinstance(value, FunctionType) and _files_of(value)[-1].startswith(_fastai_folder): todo.append(value)
    return found

def _names_in(code):
    "Yields the names of globals and attributes that `code` uses, also in functions defined in it"
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType): yield from _names_in(constant)

# Functions whose work the fast paths do themselves: for images, and for every batch
_loader_methods = 'create_batches do_item do_batch chunkify create_item create_batch retain __iter__'.split()
_image_sources = (
    fastai.vision.core.load_image, fastai.vision.core.image2tensor, PILBase.create.__func__,
    PIL.Image.Image._do_crop_pad, PIL.Image.Image.crop_pad, PIL.Image.Image.flip_lr, PILImage.dihedral)
_batch_sources = (
    fastai.data.load.fa_collate, *(vars(fastai.data.load.DataLoader)[name] for name in _loader_methods),
    Datasets.__getitem__, TfmdLists.__getitem__, TfmdLists._after_item,
    Pipeline.__call__, _transform.compose_tfms, _cast.retain_type,
    *(vars(Transform)[name] for name in ('__call__','_call','_do_call')))

# Hashes of their source texts in fastai 2.8.12 and fasttransform 0.0.5; several of one function have spaces between
_known_sources = {
    'fastai.vision.core.load_image': '7746d510bd3d',
    'fastai.vision.core.image2tensor': '321da9197fee',
    'fastai.vision.core.PILBase.create': 'b93543227b53',
    'fastai.vision.augment.Image._do_crop_pad': 'fe2959580c40',
    'fastai.vision.augment.Image.crop_pad': '37dea38c5915',
    'fastai.vision.augment.Image.flip_lr': 'aa1e27f3ce91',
    'fastai.vision.augment.PILImage.dihedral': 'e66cbb718d8d',
    'fastai.data.load.fa_collate': '411c74ebf177',
    'fastai.data.load.DataLoader.create_batches': 'a2178e96cd63',
    'fastai.data.load.DataLoader.do_item': 'fccac713e915',
    'fastai.data.load.DataLoader.do_batch': '57eefbebb550',
    'fastai.data.load.DataLoader.chunkify': 'bf09bfe0f5fd',
    'fastai.data.load.DataLoader.create_item': '2310c6fe8e82',
    'fastai.data.load.DataLoader.create_batch': 'cb36fa7456ae',
    'fastai.data.load.DataLoader.retain': 'b4ce93c448e6',
    'fastai.data.load.DataLoader.__iter__': 'd31a19eaa17e',
    'fastai.data.core.Datasets.__getitem__': 'b3cee9a5d3e8',
    'fastai.data.core.TfmdLists.__getitem__': '7278e76c658c',
    'fastai.data.core.TfmdLists._after_item': 'b5463abf0ceb',
    'fasttransform.transform.Pipeline.__call__': 'fca1e655fe3f',
    'fasttransform.transform.compose_tfms': '88f72c027892',
    'fasttransform.cast.retain_type': '985945300836',
    'fasttransform.transform.Transform.__call__': 'e8da3bcb23f0',
    'fasttransform.transform.Transform._call': '42d7b6a5a900',
    'fasttransform.transform.Transform._do_call': '232680d57776',
    'fastai.vision.core.encodes': 'e608848ee7d9 79766182a8bd',
    'fastai.data.transforms.RegressionSetup.encodes': '83f4bd9f77c6',
    'fastai.data.transforms.IntToFloatTensor.encodes': '8973a03d99dc',
    'fastai.data.transforms.Normalize.encodes': 'fa887bf385a1',
    'fastai.data.transforms.Categorize.encodes': 'f871387d19b5'}

@cache
def why_other_source(*functions)->str:
    """Which of `functions` is not one that fastai_remote knows by its source text; empty if all are

    Warns, once, if one is not."""
    for f in functions:
        module = sys.modules[f.__module__.split('.')[0]]
        name = f'{f.__module__}.{f.__qualname__}'
        try: digest = hashlib.sha256(inspect.getsource(f).encode()).hexdigest()[:12]
        except (OSError,TypeError): return f'the source text of {name} cannot be read'
        if digest in _known_sources.get(name, '').split(): continue
        why = f'{name} of {module.__name__} {module.__version__} is not one that fastai_remote knows'
        warnings.warn(f'{why}: batches that need it are built by stock code, which is slower. Use a version that is '
                      'known, or a newer fastai_remote', stacklevel=2)
        return why
    return ''

_collate = import_module('torch.utils.data._utils.collate')
_collated_types = TensorImage,TensorImageBW,TensorMask,TensorCategory,torch.Tensor
_starts = {'JPEG':b'\xff\xd8\xff'+bytes(13), 'PNG':b'\x89PNG\r\n\x1a\n\0\0\0\rIHDR'}   # of files, as Pillow reads them

def _registered():
    "`{what they do: functions}` that are registered with torch and Pillow, which fast paths do without"
    registry = _collate.default_collate_fn_map
    found = {f'collates a {cls.__name__}':[f for k,f in registry.items() if issubclass(cls, k)]
             for cls in _collated_types}
    found |= {f'decodes {name} data':[PIL.Image.DECODERS.get(name)] for name in ('jpeg','zip')}
    for name,start in _starts.items():
        for plugin in PIL.Image.ID:   # as `Image.open` looks for one
            opener,accepts = PIL.Image.OPEN.get(plugin, (None,None))
            is_accepted = accepts(start) if accepts else True
            if is_accepted and not isinstance(is_accepted, str): break   # a text says why it is not
        else: opener = None
        found[f'opens a {name} file'] = [opener]
    return found

PIL.Image.preinit()   # Pillow registers its openers when the first file is opened
_shipped_registered = {what:list(map(_shipped, functions)) for what,functions in _registered().items()}

def why_stock_changed()->str:
    """What in the code that applies transforms and builds batches is not as fastai ships it; empty if nothing

    Not empty either if a function that builds every batch is that of a version of fastai that is not known."""
    if why:=why_changed(Transform, Pipeline, TfmdLists, Datasets): return why
    for variables,name,value in _functions:
        if variables.get(name) is not value: return f"{variables['__name__']}.{name} was replaced"
    for what,functions in _registered().items():
        if functions!=_shipped_registered[what]: return f'what {what} was replaced'
    return why_other_source(*_batch_sources)

# --- Transforms

# A transform is known under three conditions. Its type is exactly one of fastai's. None of its methods was replaced on
# the class or on the object. And the implementation that [plum](https://github.com/beartype/plum) chooses for the value
# is the one that fastai registered. `@ToTensor def encodes(self, o:PILImage)` registers another one.

# These transforms use an image only through `crop_pad`, `flip_lr` and `dihedral`: it can pass them undecoded
IMAGE_TFMS = (RandomResizedCrop,Resize,CropPad,RandomCrop,FlipItem,DihedralItem)
CATEGORY_TFMS = []   # `Categorize` and this package's subclasses of it, which `watch` adds

class NotCertain(Exception): "Why it is not certain that a fast path gives what stock fastai gives"

@cache
def _example(cls):
    "A value of type `cls`, to ask plum which implementation would run"
    if issubclass(cls, PIL.Image.Image): return cls(PIL.Image.new(cls._open_args['mode'], (1,1)))
    return cls(0) if cls is not torch.Tensor else torch.zeros(())

def _implementation(t, x):
    """(function that `t` would call for value `x`, type that its result is cast to)

    (`None`, `None`) if it leaves `x` alone, and (exception, `None`) if plum cannot tell."""
    encodes = getattr(t, 'encodes', None)
    f = encodes if isinstance(encodes, Function) else getattr(encodes, '_f', encodes)   # of a method, its function
    if not isinstance(f, Function): return f,None
    try: return f._resolve_method_with_cache((x,) if encodes is f else (t, x))
    except NotFoundLookupError: return None,None
    except Exception as e: return e,None   # an ambiguity, for which stock code raises the same exception

_value_types = PILImage,PILImageBW,PILMask,TensorCategory,torch.Tensor,TensorImage,TensorImageBW,str,int,float
_known = {}   # `{(transform, type of a value): implementation that is shipped}`

def watch(
    cls:type, # A class of fastai, or a transform of this package
    names:str='' # Names of the attributes that matter, separated by spaces; default: all
):
    "Remember the attributes of `cls` as they are now, and what a transform does: `why_changed` compares them"
    names = names.split()
    _watched[cls] = names,{name:_shipped(value) for name,value in _attributes(cls, names).items()}
    if issubclass(cls, Categorize): CATEGORY_TFMS.append(cls)
    if not issubclass(cls, Transform): return
    for x in _value_types:
        f,result = _implementation(cls.__new__(cls), _example(x))
        _known[cls,x] = _shipped(f),result

for _cls in (*IMAGE_TFMS, ToTensor, Categorize, RegressionSetup, IntToFloatTensor, Normalize, AddMaskCodes, Transform,
             Pipeline, PILImage, PILImageBW, PILMask): watch(_cls)
for _cls in (TensorImage,TensorImageBW,TensorMask,TensorCategory):
    watch(_cls, '__new__ __init__ __torch_function__ _before_cast set_meta __reduce_ex__ as_subclass float div_ '
                '__sub__ __truediv__')
watch(TfmdLists, '__getitem__ _after_item __getattribute__')
watch(Datasets, '__getitem__ __getattribute__')

_encodes = {f for key in (
    (ToTensor,PILImage), (ToTensor,PILMask), (Categorize,str), (RegressionSetup,float), (IntToFloatTensor,TensorImage),
    (Normalize,TensorImage)) if isinstance(f:=_known[key][0], FunctionType)}
_sources = *_image_sources,*_batch_sources,*_encodes
_functions += [(variables, name, _shipped(value)) for (_,name),(variables,value) in _globals_of(_sources).items()]

def why_unknown(
    transform:Transform, # A transform
    types:tuple, # Its type must be exactly one of these
    *values:type # Types of the values that it will see
)->str: # Empty if it is certain
    "Why it is not certain that `transform` does with such values what fastai's code does"
    cls = type(transform)
    if cls not in types:
        name = _name_of(transform)
        if types is IMAGE_TFMS: return f'{name} is not a transform that images can pass undecoded'
        return f'{name} is not {" or ".join(c.__name__ for c in types)}'
    if why:=why_changed(cls): return why
    for attribute in vars(transform):
        shipped = _watched[cls][1].get(attribute)
        if callable(shipped) or isinstance(shipped, (property,Function)):
            return f'{_name_of(transform)}.{attribute} was replaced on the object'
    for x in values:
        f,result = _implementation(transform, _example(x))
        if isinstance(f, Exception):
            return f'plum cannot tell what {_name_of(transform)} does with a {x.__name__}: {type(f).__name__}'
        if (f,result)!=_known[cls,x]:
            module = getattr(f, '__module__', 'another module')
            return f'{_name_of(transform)} has an implementation of its own for {x.__name__}, registered in {module}'
        if f in _encodes and (why:=why_other_source(f)): return why
    return ''

def _name_of(t):
    "The name of a transform, as a user knows it"
    return getattr(t, '_name', None) or type(t).__name__

def is_idle(t:Transform)->bool:
    "Does `t` certainly leave every value as it is when it encodes?"
    if isinstance(t, AddMaskCodes):   # it only decodes
        return type(t) in _watched and not hasattr(t, 'encodes') and not why_changed(type(t))
    if type(t) is not Transform or 'encodes' not in vars(t): return False
    f = t.encodes
    is_noop = isinstance(f, Function) and all(method.implementation is noop for method in f.methods)
    return is_noop and not set(vars(t))&{'_call','_do_call'}

_open_args = {cls:dict(cls._open_args) for cls in (PILImage,PILImageBW,PILMask)}   # which may be changed in place
_open_mask = PILMask.create,PILMask.create.encodes,_implementation(PILMask.create, b'')

def why_image(cls:type)->str:
    "Why images of type `cls` are not as fastai ships them; empty if they are"
    if cls not in _open_args: return f'{cls.__name__} is an image class of your own'
    if why:=why_changed(cls): return why
    if cls._open_args!=_open_args[cls]: return f'{cls.__name__}._open_args was changed'
    why = why_other_source(*_image_sources)
    if why or cls is not PILMask: return why
    t,function,shipped = _open_mask
    is_same = type(t) is Transform and t.encodes is function
    is_same = is_same and all(_implementation(t, x)==shipped for x in (b'', _example(PILMask)))
    return '' if is_same else 'OpenMask was changed'
