"""The state of a training as plain data, and the files that keep it

Docs: page `load/checkpoint`"""

# `torch.load(weights_only=True)` reads such a file: it runs no code of whoever wrote it. The file before the latest one
# is kept, because a disk or an upload can damage the latest. The members of a zip file, which torch writes, have
# checksums.

import inspect, io, os, re, warnings, zipfile, zlib

import numpy as np
import torch
from fastcore.foundation import L

from ..core import StoreError
from ..store.storage import Storage

# Plain data

def encode(
    o # None, numbers, texts, tensors, arrays, and lists, tuples, `L`s and dicts of these
):
    """A copy of `o` as plain data; raises `TypeError` for anything else

    Tensors are copied to the CPU; those that were on a GPU are marked."""
    if o is None or type(o) in (bool,int,float,str): return o
    if isinstance(o, np.generic): return o.item()
    if isinstance(o, torch.Tensor): return copied(o) if o.device.type=='cpu' else {'~device':copied(o)}
    if isinstance(o, np.ndarray) and o.dtype.kind in 'biufc': return {'~array':torch.from_numpy(o.copy())}
    if isinstance(o, dict):
        if not all(type(k) in (str,int,float,bool) and k not in _kinds for k in o): raise TypeError('keys of a dict')
        return {k:encode(v) for k,v in o.items()}
    name = next((name for name,kind in _kinds.items() if kind is type(o)), None)
    if name is None: raise TypeError(type(o).__name__)
    if len(o)>8 and all(map(_is_scalar, o)) and len({(x.dtype,x.device) for x in o})==1:
        return {name:encode(torch.stack(list(o)))}
    values = [encode(v) for v in o]
    return values if name=='~list' else {name:values}

def copied(tensor)->torch.Tensor:
    "A copy of a tensor on the CPU, without a subclass and gradients"
    return tensor.detach().to('cpu', copy=True).as_subclass(torch.Tensor)

# A list is its own encoding, unless it has a tensor for each batch so far, which would be as many records of a file
_kinds = {'~list':list, '~tuple':tuple, '~L':L, '~array':np.ndarray, '~device':torch.Tensor}

def _is_scalar(o): return type(o) is torch.Tensor and o.ndim==0

def decode(
    o, # What `encode` returned
    device='cpu' # Of the tensors that were on a GPU: that of the model
):
    "What was encoded, with plain tensors"
    if isinstance(o, list): return [decode(v, device) for v in o]
    if not isinstance(o, dict): return o
    name = next(iter(o), None)
    if name not in _kinds: return {k:decode(v, device) for k,v in o.items()}
    if name=='~array': return o[name].numpy()
    if name=='~device': return o[name].to(device)
    values = decode(o[name], device)
    return _kinds[name](values.unbind() if isinstance(values, torch.Tensor) else values)

# Callbacks and metrics

def _arguments(o):
    "Names of the parameters of all constructors of `o`"
    inits = (vars(c)['__init__'] for c in type(o).__mro__[:-1] if '__init__' in vars(c))
    return {name for init in inits for name in inspect.signature(init).parameters}

def state_of(
    o, # A callback or a metric
    at_first:dict # The attributes that it had when the training began
)->tuple: # (plain data, names of attributes that are none)
    """The state of `o`: its `state_dict` if its type has one, else its attributes that are plain data

    Arguments of constructors are left out while they are as at first, so that the script can change them."""
    # of the type, because fastai's callbacks pass unknown attributes on to the learner, and so to the model
    if hasattr(type(o), 'state_dict'): return encode(o.state_dict()),[]
    arguments,state,others = _arguments(o),{},[]
    for name,value in vars(o).items():
        if name in ('learn','start_epoch'): continue   # the start of an epoch is a time of day
        if name in arguments and (value is at_first.get(name) or type(value) not in (bool,int,float,str)): continue
        try: state[name] = encode(value)
        except TypeError: others.append(name)
    return state,others

def restore(
    o, # A callback or a metric
    state, # The plain data of `state_of`
    device='cpu' # Of the model
):
    "Give `o` the state"
    if hasattr(type(o), 'load_state_dict'): return o.load_state_dict(decode(state, device))
    for name,value in state.items(): object.__setattr__(o, name, decode(value, device))

# Files

class CheckpointFile:
    "The latest state and the one before, at a path or any URL of fsspec"
    def __init__(self,
        url, # A path or URL; the state before is in the file of this name with `.before`
        storage_options:dict=None # Options of fsspec's file system
    ):
        folder,slash,self.name = os.fspath(url).rpartition('/')
        if not self.name: raise ValueError(f'{url}: a checkpoint is a file, and this is a folder')
        self.storage = Storage(folder+(slash if not folder else '') or '.', storage_options=storage_options)
        self.is_damaged = False # Is the latest state, so that the one before must stay?

    def write(self,
        state:dict # Plain data
    ):
        "Replace the latest state, which becomes the one before; a reader sees the old or the new one"
        storage,before = self.storage,f'{self.name}.before'
        self._remove_abandoned()
        try:
            if self.is_damaged: pass
            elif storage.local: os.replace(storage.path(self.name), storage.path(before))
            else: storage.call(lambda fs: fs.copy(storage.path(self.name), storage.path(before)))
        except FileNotFoundError: pass
        with storage.create(self.name) as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        self.is_damaged = False

    def _remove_abandoned(self):
        "Remove what a process left that was killed while it saved; on a disk, it may be as large as a model"
        if not self.storage.local: return
        pattern = re.compile(re.escape(self.name)+r'\.\d+\.part')
        self.storage.remove([name for name in self.storage.names() if pattern.fullmatch(name)])

    def read(self)->dict:
        """The latest state; `None` if there is none. If it is damaged: the one before, with a warning

        Raises `StoreError` if both are damaged."""
        damaged = []
        for name in self.name,f'{self.name}.before':
            try: content = self.storage.read(name, limit=1<<50)
            except FileNotFoundError: continue
            try: state = _checked(content)
            except (zipfile.BadZipFile, zlib.error, RuntimeError, ValueError, EOFError, OSError) as e:
                damaged.append(f'{name} ({e})')
                continue
            self.is_damaged = bool(damaged)
            if damaged: warnings.warn(f'{damaged[0]} is damaged: the training goes on from {name}, which was saved '
                                      'before', stacklevel=2)
            return state
        if damaged: raise StoreError(f'{" and ".join(damaged)}: damaged; remove what is there to begin a new training')

def _checked(content):
    "The state in a file with this content; raises various errors if it is damaged"
    with zipfile.ZipFile(io.BytesIO(content)) as members: bad = members.testzip()
    if bad: raise ValueError(f'{bad} does not match its checksum')
    return torch.load(io.BytesIO(content), weights_only=True)
