"""The interface of sources, what a sample is, and how a later run recognises a source and a function

Docs: page `source/base`"""

# The data for a store comes from somewhere: a folder, a list, a table, a dataset. A *source* gives *raw* samples, which
# are small: the path of a file, the number of a row. The leading process reads them and sends them to the workers.
# There `load` makes a *sample* of each raw one, which is the expensive part. A sample is a dict, `{field: value}`.

import dis, errno, hashlib, os, re, stat, sys
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property, lru_cache, partial, partialmethod
from itertools import chain, islice
from pathlib import Path, PurePath
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType

import cloudpickle
import numpy as np
from fastcore.basics import chunked
from fastcore.foundation import L
from PIL import Image, ImageFile

from ..codec.base import utf8
from ..codec.fields import get_codec, value_kind
from ..codec.images import ImageCodec
from ..parallel import OwnedFolder
from ..store.connection import public_url

# --- Samples

# Datasets return tuples of values, and fastai's values have types. A store needs fields with names. `as_sample` chooses
# a field by the type of each value. If types are not enough, because there are two images for example, write an `fn`
# that returns a dict.

def _field_of(value):
    "Returns the field that a value without a name is stored in; raises `TypeError` if no field fits"
    kind = value_kind(value)
    if kind in (None,'json'):
        raise TypeError(f'no field for a {type(value).__name__}: write an fn that returns a dict of fields')
    if kind=='image': return 'mask.png' if type(value).__name__=='PILMask' else 'png'
    return {'f4':'target.f4', 'empty':'labels'}.get(kind, kind)

def as_sample(
    values # A dict; or what a dataset returns: one value, or a tuple of values
)->dict: # `{field: value}`
    """The sample that consists of `values`; a dict is returned as it is, and otherwise a new one

    Raises `TypeError` if the type of a value fits no field, or if two values would have the same."""
    if isinstance(values, dict): return values
    if not isinstance(values, tuple): return {_field_of(values):values}
    sample = {_field_of(value):value for value in values}
    if len(sample)<len(values):
        raise TypeError(f"two values of one kind ({', '.join(type(value).__name__ for value in values)}): "
                        'write an fn that returns a dict')
    return sample

_MAX_BYTES = (1<<32)-2   # of a value: an index has 32 bits for a length

def read_file(path)->bytes:
    """The bytes of a regular file, also through links

    Raises `OSError` for a file of 4 GiB, and for anything else: a pipe would be waited for without end, and a device
    may never end."""
    fd = os.open(path, os.O_RDONLY|os.O_CLOEXEC|os.O_NONBLOCK)   # without waiting for the writer of a pipe
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            kind = 'a folder' if stat.S_ISDIR(mode) else 'a pipe' if stat.S_ISFIFO(mode) else 'a device'
            raise OSError(errno.EINVAL, f'{kind}, not a regular file', str(path))
        with open(fd, 'rb', closefd=False) as f: content = f.read(_MAX_BYTES+1)
        if len(content)>_MAX_BYTES: raise OSError(errno.EFBIG, f'more than {_MAX_BYTES:,} bytes', str(path))
        return content
    finally: os.close(fd)

_address = re.compile(r'([a-z0-9+.-]+::)*[a-z][a-z0-9+.-]+:/', re.I)   # of a URL; a `Path` has one slash of two
_one_slash = re.compile(r'(?:^|(?<=::))([a-z][a-z0-9+.-]+):/(?!/)', re.I)

def shown_path(
    path # A path, or a URL in its place
)->str:
    "`path` as text for messages; a URL without its user, its password, and what follows `?` or `#`"
    text = str(path)
    if not _address.match(text): return text
    shown = re.split('[?#]', public_url(_one_slash.sub(r'\1://', text)))[0]
    shown = re.sub('://[^/@]*@', '://', shown)
    return shown if '@' not in shown else shown.partition('://')[0]+'://…'   # a password may contain a slash

def refuse_address(
    path # A path
):
    "Raises `FileNotFoundError` if `path` is no path of a file or folder, but a URL"
    if not _address.match(str(path)) or os.path.exists(path): return
    raise FileNotFoundError(f'{shown_path(path)}: an address: only files of this computer are read here: download it '
                            'first, or give samples that an fn downloads')

def require(
    path:Path, # A file or folder
    exists:bool, # Is it there?
    kind:str='file', # What it should be
):
    "Raises `FileNotFoundError` unless `exists`; the message names `path`, without secrets if it is a URL"
    if exists: return
    refuse_address(path)
    raise FileNotFoundError(f'{path}: no such {kind}')

def storable(text:str)->str:
    "Returns `text` with escapes for what UTF-8 cannot encode, such as parts of some file names"
    return text.encode('utf-8', 'backslashreplace').decode()

def split_names(
    splits # Names of splits
)->list: # Of `str`
    "The names as texts; raises `ValueError` if one is empty or cannot be stored, or if two have the same text"
    names = [str(split) for split in splits]
    for name in names:
        utf8(name)
        if not name: raise ValueError('a split without a name: give it one that is not empty')
        if names.count(name)>1: raise ValueError(f'two splits are called {name!r}: rename one')
    return names

def no_address(text:str)->str:
    "Returns `text` without memory addresses, which differ from run to run"
    return re.sub(r' at 0x[0-9a-fA-F]+', '', text)

def as_json(value):
    """A copy of `value` for JSON: lists and numbers replace arrays, tensors and NumPy's numbers, also inside

    Tuples become lists, and mappings dicts. Other values are returned as they are."""
    if hasattr(value, 'tolist'): return value.tolist()
    if isinstance(value, (list,tuple)): return [as_json(o) for o in value]
    return {k:as_json(o) for k,o in value.items()} if isinstance(value, Mapping) else value

def unchanged(raw):
    "Returns `raw` itself: the `load` of a source whose raw samples are samples"
    return raw

# --- Fingerprints

# An interrupted ingest is resumed only with the same source and the same `fn`, and any process must come to the same
# result. So a function is identified by its code and by the values that it holds, if they cannot change while it runs.
# Memory addresses and the order of sets differ between processes, so they are not part of the fingerprint.

def fn_fingerprint(
    fn # A function, a method, a `partial`, an object that can be called, or `None`
)->str: # The same in every process, and another one if the function is changed; empty for `None`
    """Identifies `fn` by its name, its code, its defaults, and the data and functions that its code names

    These may be in its closure, or global variables of its module; functions of other modules count by their names.
    Data are numbers, texts, patterns, paths, arrays, tensors, images, pandas' tables, and lists, tuples, dicts and sets
    of these. What the code itself may change, such as a counter, is left out, and of other objects only the type
    counts.

    Defaults, arguments of a `partial`, attributes of an object that is called, and the object of a method count by
    their values: functions by their code, and objects by their `repr`, or by their attributes if they have no `repr` of
    their own, are dataclasses or can be called. Of an object that is called, the methods and properties of its
    classes count, too."""
    return '' if fn is None else _text(fn)

def stable_repr(o)->str:
    """Text that identifies `o`, the same in every process: data by all values, other objects by `repr` or attributes

    What is data, and how objects and functions are identified, is said in `fn_fingerprint`, about arguments."""
    return _text(o)

_CachedFunction = type(lru_cache(no_address))
_FUNCTIONS = FunctionType,partial,MethodType,_CachedFunction
_LEAVES = int,float,complex,str,bytes,bytearray,range,slice,type(None),PurePath,np.generic   # data without parts

def _text(o, outer=(), module=None):
    """Text that identifies `o`, see `fn_fingerprint`

    `outer`: what `o` is part of, a tuple; if it is itself part of it, the text is `...`. `module`: the module of the
    function that names `o`, if one does: other objects then count by their type, and its functions alone by code."""
    if isinstance(o, np.void): o = np.asarray(o)   # a record, of which `repr` shows only a part
    if isinstance(o, _LEAVES): return _short_repr(o)
    if isinstance(o, ModuleType): return o.__name__
    if isinstance(o, type): return f'{o.__module__}.{o.__qualname__}'
    if isinstance(o, np.ndarray) and not o.dtype.hasobject: return f'{o.dtype} {o.shape} {_hash(o.tobytes())}'
    if any(o is x for x in outer): return '...'
    inside = *outer,o
    data = _as_data(o)
    if data is not None: return _container_text(data, inside, module)
    is_other = isinstance(o, (FunctionType,_CachedFunction)) and module not in (None,o.__module__)
    if is_other: return f'{o.__module__}.{o.__qualname__}'
    if isinstance(o, _FUNCTIONS): return _function_text(o, inside)
    if module is not None: return f'{type(o).__module__}.{type(o).__qualname__}'
    return _object_text(o, inside)

def _hash(content): return hashlib.sha256(content).hexdigest()

def _short_repr(o):
    "`repr` without addresses; a hash for many bytes, whose `repr` would take four times their memory"
    is_long = isinstance(o, (bytes,bytearray)) and len(o)>1<<16
    return f'{type(o).__name__} {len(o)} {_hash(o)}' if is_long else no_address(storable(repr(o)))

def _as_data(o):
    """A list, tuple, dict or set with all data in `o`: `o` itself, or what an object of data consists of

    `None` for other objects. An image that is read from a file counts by its `repr`: it may have to be decoded, or be
    damaged."""
    if isinstance(o, (list,tuple,dict,set,frozenset)): return o
    if isinstance(o, np.ndarray): return o.tolist()   # of objects
    if isinstance(o, re.Pattern): return o.pattern,o.flags
    if isinstance(o, CodeType): return o.co_code,o.co_names,o.co_consts   # without numbers of lines
    if isinstance(o, ImageFile.ImageFile): return [_short_repr(o)]
    if isinstance(o, Image.Image): return o.mode,o.size,o.getpalette(),o.tobytes()
    torch = sys.modules.get('torch')   # a tensor exists only where torch is imported
    if torch and isinstance(o, torch.Tensor):
        dense = o.detach().cpu().to_dense()
        return str(dense.dtype),tuple(dense.shape),dense.flatten().view(torch.uint8).numpy()
    if type(o).__module__.partition('.')[0]=='pandas' and hasattr(o, 'to_numpy'):
        return o.to_numpy(),*(getattr(o, axis).to_numpy() for axis in ('index','columns') if hasattr(o, axis))

def _container_text(o, outer, module):
    "Text that identifies a list, tuple, dict or set; the order of dicts and sets does not matter, as it may change"
    texts = (_text(x, outer, module).encode() for x in (o.items() if isinstance(o, dict) else o))
    if isinstance(o, (list,tuple)):
        together = hashlib.sha256()
        for text in texts: together.update(text+b',')
        return f'{type(o).__qualname__} {len(o)} {together.hexdigest()}'
    total = sum(int.from_bytes(hashlib.sha256(text).digest()[:16], 'big') for text in texts)
    return f'{type(o).__qualname__} {len(o)} {total}'

def _function_text(fn, outer):
    "Text that identifies what `fn` does, one of `_FUNCTIONS`; `outer` as in `_text`, with `fn`"
    if isinstance(fn, partial): return _text((fn.func, fn.args, fn.keywords), outer)
    if isinstance(fn, _CachedFunction): return _text(fn.__wrapped__, outer)
    if isinstance(fn, MethodType): return _text((fn.__func__, fn.__self__), outer)
    held = _text(_held_values(fn), outer, fn.__module__)
    return f'{fn.__qualname__} {held} {_text((fn.__defaults__, fn.__kwdefaults__, fn.__code__), outer)}'

def _object_text(o, outer):
    "Text that identifies an object by its `repr` or attributes, and if it can be called by its methods"
    if isinstance(o, BuiltinMethodType): return f'{o.__qualname__} {_text(o.__self__, outer)}'
    has_repr = type(o).__repr__ is not object.__repr__ and not is_dataclass(o) and not callable(o)
    slots = [name for cls in type(o).__mro__ for name in L(vars(cls).get('__slots__')) if hasattr(o, name)]
    attributes = {**{name:getattr(o, name) for name in slots}, **getattr(o, '__dict__', {})}
    text = _short_repr(o) if has_repr or not attributes else _text(attributes, outer)
    if not callable(o): return f'{type(o).__qualname__} {text}'
    return f'{type(o).__qualname__} {text} {_text([_class_text(cls, outer) for cls in type(o).__mro__])}'

def _class_text(cls, outer):
    "Text that identifies the methods and properties that a class defines"
    functions = {name:_functions_of(x) for name,x in vars(cls).items()}
    return _text({name:found for name,found in functions.items() if found}, outer, cls.__module__)

def _functions_of(o):
    "The functions that an attribute of a class consists of, a tuple; empty for a variable, which may be a counter"
    if isinstance(o, (staticmethod,classmethod)): return (o.__func__,)
    if isinstance(o, property): return o.fget,o.fset,o.fdel
    if isinstance(o, cached_property): return (o.func,)
    if isinstance(o, partialmethod): return o.func,o.args,o.keywords
    return (o,) if isinstance(o, _FUNCTIONS) else ()

def _held_values(fn):
    "`{name: value}` of the closure and global variables that the code of function `fn` names and does not change"
    values = {}
    for name,cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
        try: values[name] = cell.cell_contents
        except ValueError: pass   # the name has no value yet
    used,changed = _names_in(fn.__code__)
    values |= {name:fn.__globals__[name] for name in used if name in fn.__globals__ and name not in values}
    return {name:o for name,o in values.items() if name not in changed or isinstance(o, _FUNCTIONS)}

_CHANGING = set('add append clear discard extend fill insert intersection_update pop popitem remove reverse '
                'setdefault sort symmetric_difference_update update difference_update __setitem__'.split())

@lru_cache(1024)
def _names_in(code):
    """`(used, changed)`, two sets of names: globals that `code` and its inner functions read, and what they may change

    The latter are globals and closure variables that they assign or change in place. In `name[0] = 1` and
    `name.append(1)`, the instruction that changes something has the position in the text that `name` has."""
    used,changed,loaded,places = set(),set(),[],set()
    for step in dis.get_instructions(code):
        place,what = (step.positions.lineno, step.positions.col_offset),step.opname
        if what in ('LOAD_GLOBAL','LOAD_NAME'): used.add(step.argval)
        if what in ('LOAD_GLOBAL','LOAD_NAME','LOAD_DEREF'): loaded.append((place, step.argval))
        elif what in ('STORE_GLOBAL','DELETE_GLOBAL','STORE_DEREF','STORE_NAME'): changed.add(step.argval)
        elif what in ('STORE_SUBSCR','DELETE_SUBSCR','STORE_SLICE','STORE_ATTR','DELETE_ATTR'): places.add(place)
        elif what in ('LOAD_METHOD','LOAD_ATTR') and step.argval in _CHANGING: places.add(place)
    changed |= {name for place,name in loaded if place in places}
    for inner in code.co_consts:
        if not isinstance(inner, CodeType): continue
        more_used,more_changed = _names_in(inner)
        used,changed = used|more_used,changed|more_changed
    return used,changed

# --- The interface

# An ingest divides the sample numbers into chunks. It reads the raw samples of a chunk and sends them to a worker,
# which loads, converts, encodes and writes them.
#
# `IndexedSource` and `StreamedSource` differ in one thing: whether the number of samples is known. The samples of an
# indexed source can be shuffled and divided into splits when they are written. A stream, such as a CSV file or a
# generator, is written in its own order.

def mean_bytes(
    samples # Iterable of raw samples
)->int:
    "Returns about how many bytes a sample has on average, at least 1; the same in every process"
    sizes = [_size(sample) for sample in samples]
    return max(1, sum(sizes)//max(len(sizes), 1))

def _size(o):
    "About how many bytes `o` has when it is pickled"
    if isinstance(o, (str,bytes,bytearray,memoryview)): return len(o)
    if isinstance(o, Mapping): return sum(_size(value) for value in o.values())
    if isinstance(o, (list,tuple)): return sum(map(_size, o))
    if isinstance(o, Image.Image): return o.width*o.height*len(o.getbands())
    nbytes = getattr(o, 'nbytes', None)   # of arrays and tensors
    return nbytes if isinstance(nbytes, int) else 100

@dataclass
class AsIs:
    "How samples that no `fn` changes are made of raw ones, where an `fn` would get something else; as a `TablePlan`"
    load:object # raw -> sample whose values are encoded
    vocab:dict = None # `{field: list of labels}`; default: that of the source
    codecs:dict = field(default_factory=dict) # `{field: name of a codec}`, besides those of the source
    notes:list = () # Remarks for the report, besides those of the source

class Source:
    """Where samples come from: the base class of `IndexedSource` and `StreamedSource`

    A source gives *raw* samples, and `load` makes a sample of each. Raw samples are pickled and sent to the workers, so
    they should be small: the name of a file, not its bytes. `load` runs in the workers, and is pickled too."""
    vocab:dict = None # `{field: list of labels}`, if the source knows them
    splits:dict = None # `{split: [start, stop]}`, if the source has splits
    codecs:dict = {} # `{field: name of a codec}`, for fields whose name does not say it
    # Have samples a `__key__` that is only kept where it takes no space, in the names of members of shards?
    implicit_keys:bool = False
    notes:list = () # Remarks for the report on anything but labels
    # Remarks for the report on labels, looked at without `vocab=`; `None`: nothing is said of labels that are numbers
    label_notes:list = None
    chunk_size:int = None # Samples per chunk of a stream; default: chosen by the writer
    # About how many bytes a raw sample of a stream has; default: unknown. A chunk of larger ones has fewer samples
    raw_bytes:int = None
    # raw -> sample: `{field: value}`, or values that `fn` or `as_sample` makes a sample of
    load = staticmethod(unchanged)
    srcs:dict = {} # `{split: source}`, if this source consists of one source per split
    as_is:AsIs = None # Used in place of `load` if there is no `fn`; default: `load`
    # Does `load` make samples with image files of which `fn` gets the images? Not if samples are the user's own
    opens_images:bool = False
    # Do other data always have another fingerprint? Else it only tells whether a later call can be the same one, and
    # `append` does not refuse a source that may have been appended before.
    is_identified:bool = True
    def loader(self,
        has_fn:bool # Does an `fn` get the samples?
    ): # raw -> sample
        "What makes samples: `load`, with opened images if there is an `fn` and `opens_images`; else that of `as_is`"
        if not has_fn: return self.load if self.as_is is None else self.as_is.load
        return partial(_with_images, self.load, self.codecs) if self.opens_images else self.load

    def fingerprint(self):
        """Something whose `repr` identifies the data, and is the same in every process

        An interrupted ingest is resumed only if the fingerprint is the same."""
        raise NotImplementedError

def _with_images(load, codecs, raw):
    """The sample for `fn`: what `load` returns for `raw`, with image files as images of Pillow, as `store[i]` has them

    They are decoded when their pixels are needed. One that `fn` returns unchanged is stored as the file that it was.
    `codecs` is that of `Source`."""
    return {field:_open_image(get_codec(codecs.get(field, field)), v) for field,v in load(raw).items()}

def _open_image(codec, value):
    "The image in `value` if that is an image file, not decoded yet; of one that cannot be opened, a `_NoImage`"
    if not isinstance(codec, ImageCodec) or not isinstance(value, bytes): return value
    try: return codec.opened(value)
    except ValueError as e:
        result = _NoImage(value)
        result.reason = f'{codec.name}: {e}'
        return result

class _NoImage(bytes):
    "An image file that cannot be opened: `fn` may leave it out or rename it; what is asked of it as an image says why"
    def __getattr__(self, name): raise AttributeError(name if name.startswith('__') else self.reason)

class IndexedSource(Source):
    "A source that knows how many samples it has, and can read any of them"
    block:int = None # Samples that are faster to read together, such as the lines of one block of a file
    interleave:int = 16 # Blocks that are shuffled together
    def __len__(self)->int: raise NotImplementedError
    def read(self,
        numbers:np.ndarray # Sample numbers in `range(len(self))`, in the order wanted, shape (n,)
    ): # Iterable of `(name, raw)` with a length; an exception in place of `raw` makes the sample a failed one
        """The raw samples `numbers`, each with a name for messages

        The iterable may read when it is iterated over, which happens in a worker, as with a `LazyPart`."""
        raise NotImplementedError

class Samples:
    "The samples of an `IndexedSource` by their numbers, as those of a list"
    def __getitem__(self, i):
        "Sample `i`; a list of samples for a slice or several numbers"
        is_one = isinstance(i, (int,np.integer))
        wanted = [i] if is_one else range(len(self))[i] if isinstance(i, slice) else i
        samples = list(self._samples(np.array([range(len(self))[k] for k in wanted], np.int64)))
        return samples[0] if is_one else samples
    def __iter__(self):
        for k in range(0, len(self), 1024): yield from self._samples(np.arange(k, min(k+1024, len(self))))
    def _samples(self, numbers):
        for _,raw in self.read(numbers):
            if isinstance(raw, Exception): raise raw
            yield self.load(raw)

class StreamedSource(Source):
    "A source that is read from front to back, and whose length is not known before its end"
    once:bool = False # Can it be read only once, as a generator?
    def stream(self,
        size:int # Samples per part, at most
    ): # Yields parts: iterables of `(name, raw)` with a length
        "The raw samples in parts, in the same order each time"
        raise NotImplementedError

class SampleStream(StreamedSource):
    "A stream that is read sample by sample. A subclass defines `_raw_samples`, which yields `(name, raw)`"
    _started = None # The samples of a reading that `raw_bytes` has begun
    _was_read:bool = False
    def _raw_samples(self): raise NotImplementedError

    @cached_property
    def raw_bytes(self)->int:
        samples = iter(self._raw_samples())
        first = list(islice(samples, 8))
        self._started = chain(first, samples)   # `stream` continues here
        return mean_bytes(raw for _,raw in first)

    def _begin(self):
        """Iterator over all samples; raises `ValueError` if `once`, and this was called before

        What is left would be taken for all of it."""
        if self.once and self._was_read:
            raise ValueError('this source can be read only once, and was read before: make a new one')
        samples,self._started,self._was_read = self._started or self._raw_samples(),None,True
        return samples

    def stream(self, size): return chunked(self._begin(), size)

class Sent:
    """Something large that load functions need: when this is pickled, it is written to a temporary file

    A worker reads the file once, and keeps what it has read last. Only our own workers read it."""
    def __init__(self,
        value, # What is sent
        prepare=None, # `prepare(value, folder)` -> what is pickled in its place, such as a memory map of a file there
    ): self.value,self.prepare,self.file,self.folder = value,prepare,None,None

    def get(self):
        "The value; raises `FileNotFoundError` on a machine that does not see the file"
        return _received(self.file) if self.value is None else self.value

    def __getstate__(self):
        if self.file is None:
            self.folder = OwnedFolder('dataset')
            value = self.value if self.prepare is None else self.prepare(self.value, self.folder.name)
            file = os.path.join(self.folder.name, 'value')
            with open(file, 'wb') as f: cloudpickle.dump(value, f)
            self.file = file
        return dict(value=None, prepare=None, file=self.file, folder=None)

@lru_cache(4)   # for several splits
def _received(file):
    if not os.path.exists(file):
        raise FileNotFoundError(f'{file}: the dataset lies in the temporary folder of the process that leads, which '
                                'this machine does not see: set TMPDIR there to a shared folder')
    with open(file, 'rb') as f: return cloudpickle.load(f)

class Recent:
    "What this process has used last, by key, at most 64 values; the oldest is dropped first. Threads may share it"
    def __init__(self,
        size, # Called with a value, returns its bytes
        most:int, # Bytes of all values that may stay here
        least:int, # So many values stay in any case
    ): self.size,self.most,self.least,self.values = size,most,least,{}

    def get(self, key, make):
        "The value of `key`, which is made by `make()` if it is not here"
        value = self.values.pop(key, None)
        if value is None:
            value = make()
            nbytes,others = self.size(value),list(self.values.items())   # a copy: other threads may change it
            for k,(other,o) in enumerate(reversed(others), 1):   # the newest first
                nbytes += self.size(o)
                if k>=self.least and (k>=64 or nbytes>self.most): self.values.pop(other, None)
        self.values[key] = value   # at the end
        return value

def evenly_spaced(
    n:int, # Samples that there are
    most:int, # Positions at most
)->np.ndarray:
    "Positions in `range(n)`, of shape (k,), the first and the last among them"
    return np.unique(np.linspace(0, max(0, n-1), most).round()).astype(int)[:n]

class LazyPart:
    "An iterable of `(name, raw)` with a length, whose samples are read when it is iterated over: in a worker"
    def __init__(self,
        read, # `read(*pieces)` -> iterable of `(name, raw)` for the samples in a piece of each of `arrays`; is pickled
        *arrays, # Of each sample they have an entry, such as its number
        size:int=256, # Samples that are read at a time
    ): self.read,self.arrays,self.size = read,arrays,size
    def __len__(self): return len(self.arrays[0])
    def __iter__(self):
        for k in range(0, len(self), self.size): yield from self.read(*(o[k:k+self.size] for o in self.arrays))

def named_rows(
    read, # `read(places)` -> the rows, as dicts
    numbers:np.ndarray, # Numbers of the rows, for messages, shape (n,)
    places:np.ndarray, # What `read` gets, shape (n,)
)->list:
    "`('row i', row)` of some rows"
    return [(f'row {i}', row) for i,row in zip(numbers.tolist(), read(places))]

class SplitChunk:
    """A part of a source with splits: an iterable with a length, as `IndexedSource.read` returns one

    It yields `('split: name', (split, raw))`; an exception in place of `raw` stays as it is."""
    def __init__(self,
        parts, # Iterable of `(split, samples of it)`; the samples are `(name, raw)`
        keeps_raw:bool=False, # Does `raw` stay as it is, because samples of all splits are loaded in one way?
    ): self.parts,self.keeps_raw = list(parts),keeps_raw
    def __len__(self): return sum(len(samples) for _,samples in self.parts)
    def __iter__(self):
        for split,samples in self.parts:
            for name,raw in samples:
                yield f'{split}: {name}', raw if self.keeps_raw or isinstance(raw, Exception) else (split,raw)
    @property
    def split(self)->str:
        "The split of the first part"
        return self.parts[0][0]
