"""The steps that process one sample, with the names and arguments of WebDataset

Docs: page `load/steps`"""

# A `RemoteDataset` keeps what it does with a sample as a list of steps. This module defines them. A step is called
# with one sample at a time. Everything that needs several samples, such as `batched`, is in the next notebook.

import gzip, io, sys, warnings
from fnmatch import fnmatch
from types import FunctionType

import cloudpickle
import numpy as np
import torch

from ..codec.fields import get_codec, INTEGER_FIELDS, is_image
from ..core import limited, MissingSample, pieces_of, StoreError
from ..store.base import decode_value, field_codec, Store
from ..store.fields import parse_field

# --- Handlers

# Each step takes a `handler`, which is called when the step fails for a sample. A handler returns `True` to leave the
# sample out and go on, and `False` to end the epoch there. It raises an error to stop with that error. The functions of
# `webdataset` that have these names can be passed, too.

def reraise_exception(error):
    "The default handler: raise `error`"
    raise error

def ignore_and_continue(error):
    "A handler that leaves out the sample"
    return True

def ignore_and_stop(error):
    "A handler that ends the epoch at this sample"
    return False

def warn_and_continue(error):
    "A handler that warns and leaves out the sample"
    warnings.warn(repr(error), stacklevel=2)
    return True

def warn_and_stop(error):
    "A handler that warns and ends the epoch at this sample"
    warnings.warn(repr(error), stacklevel=2)
    return False

# Handlers often log `repr(error)`, so the dataset and the sample must be part of that text. A handler therefore gets an
# error of the same type as the one that was raised, with a text that names both. If it raises what it got, the original
# error is raised, with a note.

class _NamedError(Exception):
    "What a handler gets: its text is that of the original error, followed by the place"
    def __str__(self): return f'{self.text} ({self.place})'
    def __repr__(self): return f'{type(self).__name__}({str(self)!r})'

def _named_error(error, place):
    "A copy of `error` whose text also names `place`, of a subclass of its type; a `_NamedError` if there can be none"
    kind = type(error)
    try:
        subclass = type(kind.__name__, (_NamedError,kind), {})
        named = subclass.__new__(subclass, *error.args)
    except TypeError: named = _NamedError(*error.args)   # the type cannot be derived from
    named.__dict__.update(vars(error))
    named.args,named.__cause__ = error.args,error
    named.text,named.place = str(error),place
    return named

def ask_handler(
    handler, # `handler(error)` -> go on? `None` raises the error
    error:Exception, # What was raised
    place:str # Dataset, sample and step
)->bool: # Go on with the next sample? Otherwise the epoch ends
    "What `handler` decides about `error`; raises `error`, with a note that names `place`, or what the handler raises"
    is_named = isinstance(error, StoreError)   # these name the sample already
    if handler is not None:
        named = error if is_named else _named_error(error, place)
        try: answer = handler(named)
        except Exception as raised:
            if raised is not named: raise
        else:
            if not isinstance(answer, BaseException): return bool(answer)
    if not is_named: error.add_note(place)
    raise error

# --- Decode

# Images are decoded according to WebDataset's image specs: `pil`, `rgb` (floats in 0..1, height x width x 3), `rgb8`
# (bytes), `torchrgb` or `torch` (3 x height x width), and the same with `l` and `rgba`. All images are converted to the
# mode of the spec, whatever is stored.

# WebDataset's image specs: `{name: (kind of object, Pillow mode, '8' for bytes or '' for floats)}`
image_specs = {kind+mode+bits:(kind or 'numpy', mode.upper(), bits)
               for kind in ('','torch') for mode in ('l','rgb','rgba') for bits in ('','8')}
image_specs['torch'] = 'torch','RGB',''
image_specs |= {'pil'+mode:('pil', mode.upper() or 'RGB', '') for mode in ('','l','rgb','rgba')}

def _picture(image, kind, mode, bits):
    """Pillow image `image` as `image_specs` says: in `mode`, and of a `kind`

    'pil' is a Pillow image, 'numpy' an array of shape (h,w) or (h,w,channels), 'torch' a tensor of shape (h,w) or
    (channels,h,w). With `bits` '8' they are `uint8`, with '' float32 in 0..1."""
    if image.mode!=mode: image = image.convert(mode)
    if kind=='pil': return image
    array = np.array(image) if bits else np.asarray(image, np.float32)/255
    if kind=='numpy': return array
    return torch.from_numpy(array if array.ndim==2 else np.ascontiguousarray(array.transpose(2, 0, 1)))

# Own decoders are called as `decoder(key, data)`, where the key is the name of the field after a dot. The first result
# that is not `None` is the object. A decoder may return `Continue(key, data)`: the decoders after it then get this key
# and these bytes. In this way `txt.gz` is first decompressed and then decoded as `txt`. What no decoder knows is
# decoded by the codec of the field.

class Continue:
    "What a decoder returns to pass other bytes to the decoders after it"
    def __init__(self,
        key:str, # Name for the decoders after it, such as `.txt`
        data:bytes
    ):
        self.key,self.data = key,data

_MAX_GUNZIPPED = 1<<30   # bytes; a longer value in a `.gz` field is damaged or hostile

def _gunzip(key, data):
    "Decoder of `.gz` fields: a `Continue` with the content; `None` for another `key`. Raises `ValueError` above 1 GiB."
    if not key.endswith('.gz'): return None
    with gzip.open(io.BytesIO(data)) as f: content = limited(pieces_of(f), _MAX_GUNZIPPED, f'{key}, decompressed,')
    return Continue(key.removesuffix('.gz'), content)

_OTHER_NAMES = {'text':'txt', 'transcript':'txt', 'jsn':'json'}   # of WebDataset, for what a codec of ours reads
# What WebDataset's decoders read, and we do not
_UNREAD = 'ten','tb','mp','msg','msgpack','cbor','pyd','pickle','pkl','pth'

def _by_webdataset(key, data):
    """Decoder of names that WebDataset's decoders know, and no codec of ours: texts, integers and JSON

    `None` for any other `key`. Warns once for what needs a library, or might run code when it is read. Raises
    `ValueError`."""
    name = key.rsplit('.', 1)[-1].lower()
    if name in _OTHER_NAMES: return get_codec(_OTHER_NAMES[name]).from_bytes(data)
    if name in ('cls2','class','count','inx'): return int(data)
    if name in _UNREAD:
        warnings.warn(f'decode() leaves the bytes of {key[1:]!r} as they are: give a function that reads them, such '
                      f"as decode(lambda key, data: read(data) if key.endswith('.{name}') else None)", stacklevel=2)
    return None

def _is_continue(result):
    others = sys.modules.get('webdataset.autodecode')
    return isinstance(result, Continue) or (others is not None and isinstance(result, others.Continue))

def _object(store, number, field, value, decoders):
    """What the first of `decoders` that knows field `field` makes of the bytes `value`; `value` itself if none does

    A decoder is `decoder(key, data)`, an image spec, or '' for the codec of the field. After a `Continue`, the others
    get its key and data. `store` and `number` are `None` if they are not known."""
    key,data = f'.{field}',value
    for decoder in decoders:
        if isinstance(decoder, str):
            result = _by_codec(store, number, field, key, data, decoder or None)
            if result is not None: return result
            continue
        result = decoder(key, data)
        if result is None: continue
        if not _is_continue(result): return result
        key,data,field = result.key,result.data,None
    return data

def _by_codec(store, number, field, key, data, spec):
    """The object that the codec of a field makes of `data`, or the picture for `spec`, one of `image_specs`

    The codec is that of `field` in `store`, or else of `key`, such as `.jpg`. `None` if there is no codec for `data`,
    or no picture. Raises `CorruptSample` for a sample of a store, what `field_codec` raises if there is no `spec`, and
    otherwise what the codec raises."""
    entry = None if store is None else store.manifest.fields.get(field)
    codec = get_codec(entry['codec'] if entry else key)
    if codec is None and entry and spec is None: field_codec(store, field)   # raises `ValueError`
    if codec is None: return None
    if spec is None:
        # bytes of a field of numbers are what a function has made: such a field of a store has no bytes
        if entry and number is not None and codec.dtype is None: return store.decode(number, field, data)
        if not _makes_objects(codec): return None
        return codec.from_bytes(data) if codec.dtype is None else int(data)
    if not is_image(codec.name): return None
    if not entry or number is None: return _picture(codec.image(data), *image_specs[spec])
    return decode_value(store, number, field, data, lambda b: _picture(codec.image(b), *image_specs[spec]))

def _makes_objects(codec):
    """Can `codec` decode bytes of a sample that is in no store, such as what a function of the user has made?

    False for `None`, and for numbers of a fixed width, except `INTEGER_FIELDS`, which are text such as b'12'."""
    return codec is not None and (codec.dtype is None or codec.name in INTEGER_FIELDS)

def _decode(store, number, sample, *decoders, only=None):
    """Step `decode`: a copy of dict `sample`, in which values that are bytes are decoded by `_object`

    With `only`, a set of fields, those of other fields stay bytes."""
    return {field:_object(store, number, field, value, decoders)
            if isinstance(value, bytes) and field[:2]!='__' and (only is None or field in only) else value
            for field,value in sample.items()}

def _expect_dict(name, sample):
    if isinstance(sample, dict): return
    raise TypeError(f'{name} takes a sample that is a dict, not a {type(sample).__name__}: call it before to_tuple '
                    'and before batched')

# --- Fields

# `to_tuple('jpg;png')` takes the first of these fields that the sample has, and `to_tuple('txt?')` gives `None` if it
# has no `txt`. Shards that other tools wrote may contain either.

def _first(store, number, sample, group, missing_is_error=True):
    """The value of the first field of `group`, such as `jpg;png`, that the dict `sample` has

    If it has none, `None` for an optional group, such as `txt?`, or unless `missing_is_error`; else raises
    `MissingSample`."""
    names,is_optional = parse_field(group)
    field = next((f for f in names if f in sample), None)
    if field is not None or is_optional or not missing_is_error: return sample.get(field)
    present = ', '.join(map(repr, sample)) or 'no field'
    raise MissingSample(f'{_sample_name(store, number, sample)} has no {group!r}; it has {present}')

def _sample_name(store, number, sample):
    "The names of dataset and sample for messages, such as `pets: sample 7`; by its `__key__` if `number` is `None`"
    dataset = '' if store is None else f'{store.name}: '
    if number is not None: return f'{dataset}sample {number}'
    key = sample.get('__key__') if isinstance(sample, dict) else None
    return f'{dataset}a sample' if key is None else f'{dataset}sample with key {key!r}'

def _to_tuple(store, number, sample, *groups, missing_is_error=True, none_is_error=False):
    """Step `to_tuple`: a tuple of the value of the first field that `sample` has of each group, such as `jpg;png`

    Raises what `_first` raises, and with `none_is_error` `MissingSample` for a value that is `None`."""
    values = tuple(_first(store, number, sample, group, missing_is_error) for group in groups)
    if none_is_error:
        for group,value in zip(groups, values):
            if value is None: raise MissingSample(f'{_sample_name(store, number, sample)}: {group!r} is None')
    return values

def _rename(store, number, sample, keep, names):
    "Step `rename`: `names` is `{new name: group of fields}`; other fields are in the result only with `keep`"
    renamed = {new:_first(store, number, sample, group) for new,group in names.items()}
    if not keep: return renamed
    used = {field for group in names.values() for field in parse_field(group)[0]}
    return {field:value for field,value in sample.items() if field not in used} | renamed

def _map_dict(store, number, sample, functions):
    "Step `map_dict`: a copy of `sample` with the results of `functions`, `{field: function}`; raises `KeyError`"
    result = dict(sample)
    for field,f in functions.items():
        if field not in result:
            present = ', '.join(map(repr, sample))
            raise KeyError(f'{_sample_name(store, number, sample)} has no {field!r}; it has {present}')
        result[field] = f(result[field])
    return result

def _rename_keys(store, number, sample, patterns, keep_unselected, must_match, duplicate_is_error):
    """Step `rename_keys`: `patterns` is a list of `(new name, pattern)`; the last pattern that matches is used

    Returns a dict; of two fields of one name it has the first. Raises `ValueError` for patterns without fields, or two
    fields of one name, if these are errors."""
    result,matched = {},set()
    for field,value in sample.items():
        name = field.rsplit('/', 1)[-1].lower()
        new,pattern = next((pair for pair in reversed(patterns) if fnmatch(name, pair[1])), (field,None))
        if pattern is None and not keep_unselected: continue
        matched.add(pattern)
        if new not in result: result[new] = value
        elif duplicate_is_error: raise ValueError(f'two fields would be {new!r}, of {list(sample)}')
    lacking = [pattern for _,pattern in patterns if pattern not in matched]
    if must_match and lacking: raise ValueError(f'no field matches {lacking[0]!r}, of {list(sample)}')
    return result

def _extract_keys(store, number, sample, *patterns, duplicate_is_error=True, ignore_missing=False):
    """Step `extract_keys`: a tuple of the first value whose field matches, for each pattern, such as `*.jpg;*.png`

    Raises `ValueError` for a pattern that matches several fields, or none, if these are errors."""
    values = []
    for pattern in patterns:
        wanted = pattern.split(';') if isinstance(pattern, str) else pattern
        found = [field for field in sample if any(fnmatch(f'.{field}', p) or fnmatch(field, p) for p in wanted)]
        if len(found)>1 and duplicate_is_error: raise ValueError(f'several fields match {pattern!r}: {found}')
        if found: values.append(sample[found[0]])
        elif not ignore_missing: raise ValueError(f'no field matches {pattern!r}, of {list(sample)}')
    return tuple(values)

def _xdecode(store, number, sample, decoders, must_decode):
    """Step `xdecode`: a copy of dict `sample` with decoded values in place of bytes

    `decoders` is a list of `(pattern, function of a binary file)`, of which the last that matches is used; `False` as
    function leaves the bytes. Otherwise the codec is used. Raises `ValueError` if there is none and `must_decode`."""
    result = {}
    for field,value in sample.items():
        result[field] = value
        if not isinstance(value, bytes) or field.startswith('__'): continue
        name = field.rsplit('/', 1)[-1].lower()
        matching = [f for pattern,f in decoders if fnmatch(name, pattern) or fnmatch(f'.{name}', pattern)]
        if matching:
            if matching[-1] is not False: result[field] = matching[-1](io.BytesIO(value))
        elif _makes_objects(get_codec(field)): result[field] = _by_codec(store, number, field, f'.{field}', value, None)
        elif must_decode: raise ValueError(f'no decoder for {field!r}; must_decode=False leaves it as it is')
    return result

# --- Functions

# `map` drops a sample if its function returns `None`, as in WebDataset. A dict that it returns keeps the key of the
# sample.

_DROP = object()   # what a step returns to leave out the sample

def _map_tuple(store, number, values, *functions):
    "Step `map_tuple`: a tuple of what each function returns for its element; without one, or with `None`, the element"
    if not isinstance(values, (tuple,list)):
        raise TypeError(f'map_tuple takes a sample that is a tuple, not a {type(values).__name__}: call to_tuple '
                        'before')
    if len(functions)>len(values): raise ValueError(f'{len(functions)} functions for a tuple of {len(values)}')
    mapped = tuple(value if f is None else f(value) for f,value in zip(functions, values))
    return mapped+tuple(values[len(functions):])

def _map(store, number, sample, function):
    "Step `map`: `function(sample)`, with the `__key__` of `sample` if both are dicts; `_DROP` if that is `None`"
    key = sample.get('__key__') if isinstance(sample, dict) else None
    result = function(sample)
    if result is None: return _DROP
    if key is not None and isinstance(result, dict): result['__key__'] = key
    return result

def _select(store, number, sample, predicate):
    "Step `select`: the sample if `predicate(sample)`, else `_DROP`"
    return sample if predicate(sample) else _DROP

# Each step is called with the store, the number of the sample, what the step before it made, and its own arguments.
# After a step that makes other samples, such as `unbatched`, the number is `None`
_steps = dict(decode=_decode, to_tuple=_to_tuple, map_tuple=_map_tuple, map=_map, map_dict=_map_dict, rename=_rename,
              rename_keys=_rename_keys, extract_keys=_extract_keys, xdecode=_xdecode, select=_select)
_of_any_sample = 'map_tuple','map','select'   # the others take a sample that is a dict

# A step is kept as data. So a dataset can be pickled for workers that are started by `spawn`. Functions that pickle
# cannot find by their names, such as lambda functions, are pickled by cloudpickle.

class _ByValue:
    "A function that is pickled with its code, by cloudpickle; it is unpickled as the function itself"
    def __init__(self, f): self.f = f
    def __reduce__(self): return cloudpickle.loads,(cloudpickle.dumps(self.f),)

def _portable(value):
    """`value` with `_ByValue` in place of functions that pickle cannot find by name: lambdas, local ones, a notebook's

    They are replaced in copies of nested dicts, lists and tuples too, but not within a `partial`, for example."""
    if isinstance(value, dict): return {k:_portable(v) for k,v in value.items()}
    if type(value) in (list,tuple): return type(value)(map(_portable, value))
    if not isinstance(value, FunctionType): return value
    in_notebook = value.__module__=='__main__' and getattr(sys.modules['__main__'], '__file__', None) is None
    return _ByValue(value) if in_notebook or '<' in value.__qualname__ else value   # such as '<lambda>'

class Step:
    "A step of a dataset or stream: its name and arguments"
    def __init__(self,
        name:str, # Name of the method that added it
        *args, # Arguments
        handler=None, # `handler(error)` -> go on?, as of `ask_handler`; others than functions raise `TypeError`
        shown:list=None, # What `repr` shows as arguments, names of functions and texts; default: `args`
        label:str=None, # What `repr` shows as name; default: `name`
        **kwargs
    ):
        if handler is not None and not callable(handler):
            raise TypeError(f'{name}: handler is a function, such as warn_and_continue, not {handler!r}')
        self.name,self.args,self.kwargs,self.handler = name,args,kwargs,handler
        self.shown,self.label = shown,label or name

    def __getstate__(self): return _portable(vars(self))

    @property
    def is_for_samples(self)->bool:
        "Does it process one sample at a time?"
        return self.name in _steps

    @property
    def may_drop(self)->bool:
        "May it leave out samples?"
        handles = self.handler is not None and getattr(self.handler, '__name__', '')!='reraise_exception'
        return handles or self.name in ('map','select')

    def __repr__(self):
        shown = self.shown
        if shown is None: shown = [getattr(arg, '__name__', None) or repr(arg) for arg in self.args]
        return f".{self.label}({', '.join(map(str, shown))})"

def decode_step(
    decoders:tuple, # Image specs and functions; `None` for the codec of the field
    pre:list=None, # Functions that are called before them; default: one for `.gz`
    post:list=None, # Functions that are called after them; default: one for WebDataset's names, the codec of the field
    only=None, # Names of fields, a list or separated by spaces; default: all
    handler=None
)->Step:
    "The step `decode`; raises `ValueError` for an unknown spec"
    decoders = tuple(decoder for decoder in decoders if decoder is not None)
    for decoder in decoders:
        if not callable(decoder) and not (isinstance(decoder, str) and decoder in image_specs):
            raise ValueError(f"decode knows {', '.join(image_specs)} and functions, not {decoder!r}")
    options = {} if only is None else dict(only=frozenset(only.split() if isinstance(only, str) else only))
    every = *([_gunzip] if pre is None else pre),*decoders,*([_by_webdataset, ''] if post is None else post)
    shown = [getattr(decoder, '__name__', None) or repr(decoder) for decoder in decoders]
    return Step('decode', *every, handler=handler, shown=shown, **options)

class Dropped:
    "Stands for a sample that a step has left out"
    def __init__(self,
        place:str, # Dataset, sample and step
        error:Exception=None, # Why; `None` if it was not an error
        stops:bool=False # Does the epoch end here?
    ):
        self.place,self.error,self.stops = place,error,stops

def run_steps(
    store:Store, # Of the sample; `None` if it is not known
    number:int, # Of the sample; `None` if it is not known
    sample, # A dict, or what earlier steps made of it
    steps # `Step`s
):
    """The result of `steps` for one sample, or a `Dropped` if one leaves it out

    The handler of a step decides about its errors. Without one they are raised, with a note that names the sample."""
    for step in steps:
        try:
            if step.name not in _of_any_sample: _expect_dict(step.name, sample)
            result = _steps[step.name](store, number, sample, *step.args, **step.kwargs)
        except Exception as error:
            place = f'{_sample_name(store, number, sample)}, in .{step.name}'
            return Dropped(place, error, not ask_handler(step.handler, error, place))
        if result is _DROP: return Dropped(f'{_sample_name(store, number, sample)}, in .{step.name}')
        sample = result
    return sample

# --- What is read

# Only the fields that the first `to_tuple`, or `rename` with `keep=False`, names are read. A sample may lack a field if
# the tuple has a choice such as `jpg;png`, or if all fields of a store with shards are read. `get_many` would raise
# `MissingSample` then. So these values are read by `read_present`, still in one request, and the checksums of those
# that are present are compared.

METADATA = '__key__','__url__' # What a sample has besides its fields, as in WebDataset

def reading_plan(
    store:Store,
    steps # `Step`s of a dataset
)->dict:
    """What `steps` need: `{'fields': names, 'may_lack': may a value be missing?, 'metadata': those of METADATA}`

    Raises `UnknownField` for a field that a step names, and the store has not."""
    in_shards = store.shards is not None
    everything = dict(fields=store.fields, may_lack=in_shards, metadata=METADATA)
    step = next((step for step in steps if step.name!='decode'), None)   # the first step that sees the sample
    if step is None or step.name not in ('to_tuple','rename'): return everything
    groups = step.args if step.name=='to_tuple' else step.args[1].values()
    wanted = [group for group in groups if group not in METADATA]
    if not step.kwargs.get('missing_is_error', True):
        wanted = [group for group in wanted if {group,*parse_field(group)[0]}&set(store.fields)]
    choices = [store.field_table.choice(group) for group in wanted]   # raises `UnknownField`
    if step.name=='rename' and step.args[0]: return everything
    fields = list(dict.fromkeys(field for names,_ in choices for field in names))
    is_choice = any(len(names)>1 or is_optional for names,is_optional in choices)
    is_lenient = is_choice or not step.kwargs.get('missing_is_error', True)
    # Of a field that no sample lacks, a value that is not there was lost: that is an error, or leaves out this sample
    may_lack = step.may_drop or is_lenient and any(map(store.may_lack, fields))
    return dict(fields=fields, may_lack=may_lack, metadata=tuple(m for m in METADATA if m in groups))
