"""Sources of the rows of arrays: NumPy, memory maps, HDF5, zarr

Docs: page `source/arrays`"""
import hashlib, os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from uuid import uuid4

import numpy as np

from ..codec.fields import get_codec
from .base import LazyPart, named_rows, Recent, require, storable
from .columns import ColumnOptions, ColumnType, image_format
from .frames import Table

# --- Columns

# Objects of h5py cannot be pickled, and a memory map that is pickled becomes a copy of the whole file. So what is sent
# to a worker is a path. `ArrayColumn` opens the array once per process. Chunks that are compressed are read as a whole,
# and the last ones are kept.

class ArrayColumn:
    "An array whose rows are values of a column; in memory, or in a file that each process opens for itself"
    def __init__(self,
        opener, # Function of `args` that returns the array, called for each read; `None`: the array is in memory
        args:tuple=(), # Arguments of `opener`, which can be hashed; or `(array,)`
        member:str=None, # Name of a member of the array's compound dtype
        block:int=None, # Rows that are read together; default: one
    ): self.opener,self.args,self.member,self.block = opener,args,member,block

    @contextmanager
    def opened(self):
        "Context manager: the array. A file of HDF5 is closed afterwards, so that it can be written again"
        array = self.args[0] if self.opener is None else self.opener(*self.args)
        try: yield array
        finally:
            if self.opener is _open_h5: array.file.close()

    def rows(self,
        numbers:np.ndarray # Shape (n,)
    )->list:
        "The value in each of the rows `numbers`, in this order"
        if not self.block:
            with self.opened() as array: return [self._value(array[i]) for i in numbers.tolist()]
        blocks = self._blocks(np.unique(numbers//self.block).tolist())
        return [self._value(blocks[i//self.block][i%self.block]) for i in numbers.tolist()]

    def _blocks(self, numbers):
        """`{number: array of its rows}` for a list `numbers` of blocks, of `block` rows each

        If there is an opener, the last blocks are kept, and are not read again."""
        if self.opener is None: return {k:self._block(k) for k in numbers}
        return {k:_last_blocks.get((self.opener, self.args, k), partial(self._block, k)) for k in numbers}

    def _block(self, k):
        with self.opened() as array: return np.asarray(array[k*self.block:(k+1)*self.block])

    def length(self)->int:
        "The number of rows"
        with self.opened() as array: return array.shape[0]

    def dtype(self)->tuple:
        "`(dtype, shape)` of one value, a dtype of NumPy and a tuple"
        with self.opened() as array:
            dtype = array.dtype if self.member is None else array.dtype[self.member]
            return dtype.base,(*array.shape[1:], *dtype.shape)

    def _value(self, value):
        """The value of the column in `value`, a row of the array: its `member`, if there is one

        `None` if it is masked, a copy if it is in a memory map, and `bytes` if it is void."""
        if self.member is not None: value = value[self.member]
        if value is np.ma.masked: return None
        if isinstance(value, np.memmap): value = np.array(value)   # without the file
        if isinstance(value, bytes): return value
        return value.tobytes() if isinstance(value, np.void) else value

class _ListColumn(ArrayColumn):
    "A list whose entries are values of a column"
    def __init__(self, values:list): super().__init__(None, (values,))
    def length(self): return len(self.args[0])
    def dtype(self): return np.dtype(object),()

_last_blocks = Recent(lambda block: block.nbytes, 64_000_000, 2)   # by opener, its arguments, number of the block

def _open_npy(path, stamp): return np.load(path, mmap_mode='r', allow_pickle=False)
def _open_memmap(path, dtype, shape, offset, stamp): return np.memmap(path, dtype, 'r', offset, shape)
def _open_h5(path, name, stamp):
    import h5py
    return h5py.File(path, 'r')[name]
def _open_zarr(root, path, stamp):
    import zarr
    return zarr.open_array(root, path=path, mode='r')

def _stamp(path):
    status = os.stat(path)
    return status.st_size,status.st_mtime_ns

@contextmanager
def _reading(what):
    """Context manager: errors become a `ValueError` that names `what`, a path or an array, and says what may be wrong

    `OSError` and `MemoryError` stay as they are."""
    try: yield
    except (OSError,MemoryError): raise
    except Exception as e:   # NumPy raises many kinds of errors for damaged bytes
        raise ValueError(f'{what}: damaged, or another kind of file: {e or type(e).__name__}. If it holds Python '
                         'objects, it is a pickle: load it yourself, if you trust it, and give a list, or a dict of '
                         'arrays') from None

def _npy(path):
    """`{name: ArrayColumn}` of an npy file, one for each member of a compound dtype; raises `OSError`

    Raises `ValueError` if it has objects or a single value, or is damaged."""
    with _reading(path):
        array = _open_npy(str(path), None)
        shape = array.shape   # which a zip file does not have
    if not shape: raise ValueError(f'{path}: one value, and no rows')
    return _expanded(_default_name(array.dtype, array.ndim), array, ArrayColumn(_open_npy, (str(path), _stamp(path))))

def _npz(path):
    """`{name: ArrayColumn}` of an npz file, read into memory; single values are left out

    Raises `ValueError` if it has objects, is damaged, or has two columns of one name."""
    arrays = {}
    with _reading(path), np.load(path, allow_pickle=False) as file:
        for name in file.files:
            with _reading(f'array {name!r}'): arrays[name] = file[name]   # bytes, if it is no npy file
    return _merged((name, _in_memory(name, array)) for name,array in arrays.items() if getattr(array, 'shape', None))

def _memmap(name, array):
    """`{name: ArrayColumn}` of a memory map, which workers open by its file

    It counts as an array in memory if they cannot, because it is not contiguous, a copy-on-write map, has a compound
    dtype, or its file is gone."""
    root = array
    while isinstance(root.base, np.memmap): root = root.base
    in_file = array.filename is not None and array.flags.c_contiguous and root.mode!='c' and array.dtype.names is None
    if not in_file or not os.path.exists(array.filename): return _in_memory(name, array)
    if root.mode!='r': root.flush()
    offset = root.offset+array.__array_interface__['data'][0]-root.__array_interface__['data'][0]
    path = str(array.filename)
    return {name:ArrayColumn(_open_memmap, (path, array.dtype, array.shape, offset, _stamp(path)))}

def _h5(dataset, prefix='', above=()):
    """`{name: ArrayColumn}` of a dataset of h5py, or of all datasets in a file or group of h5py and its subgroups

    Names are paths such as `train/x`, after `prefix`, which is empty or ends in `/`; of a dataset, `prefix` is its name
    and a `/`. A compound dtype gives a column for each member, by the member's name alone. Single values are left out,
    and links to one of the groups `above`. Raises `ValueError` for two columns of one name, for links to what is not
    there, and if workers cannot open the file: it is closed, in memory, or open for writing."""
    if not dataset: raise ValueError('the file of h5py is closed: give its path')
    path = dataset.file.filename
    if not isinstance(path, str) or not os.path.exists(path):
        raise ValueError(f'{path}: a file of h5py that is in memory, which workers cannot open: save it and give its '
                         'path, or read its arrays and give {field: array}')
    if dataset.file.mode!='r':
        raise ValueError(f'{path}: open for writing, so that workers cannot open it: close it and give its path, or '
                         "open it with mode 'r'")
    if hasattr(dataset, 'items'):
        parts = {f'{prefix}{name}':part for name,part in dataset.items()}
        lost = next((name for name,part in parts.items() if part is None), None)
        if lost is not None:
            raise ValueError(f'{path}: {lost!r} is a link to something that is not there: give {{name: file[name]}}')
        above = *above,dataset
        return _merged((name, _h5(part, f'{name}/', above)) for name,part in parts.items() if part not in above)
    if not getattr(dataset, 'shape', None): return {}   # one value, such as an attribute, or a type without values
    block = dataset.chunks[0] if dataset.chunks else _rows_per_mb(dataset)
    return _expanded(prefix.strip('/') or _default_name(dataset.dtype, dataset.ndim), dataset,
                     ArrayColumn(_open_h5, (path, dataset.name, _stamp(path)), block=block))

def _zarr(array, prefix=''):
    "`{name: ArrayColumn}` of a group or an array of zarr, as `_h5` names them; raises `ValueError` for equal names"
    if not hasattr(array, 'dtype'):
        members = sorted(array.members(), key=lambda member: member[0])   # their order is another one each time
        return _merged((f'{prefix}{name}', _zarr(part, f'{prefix}{name}/')) for name,part in members)
    if not array.shape: return {}
    name = prefix.strip('/') or _default_name(array.dtype, array.ndim)
    block = (getattr(array, 'shards', None) or array.chunks)[0]
    root = getattr(array.store, 'root', None) or getattr(array.store, 'path', None)
    if 'Memory' in type(array.store).__name__: column = ArrayColumn(None, (array,), block=block)
    elif root is not None and os.path.isdir(root):
        stamp = _folder_stamp(os.path.join(root, array.path))
        column = ArrayColumn(_open_zarr, (str(root), array.path, stamp), block=block)
    else: column = ArrayColumn(_array_in, (_Remote(array),), block=block)
    return _expanded(name, array, column)

def _folder_stamp(folder):
    "A hash of names, sizes and times of modification of all files below `folder`: data may change in any of them"
    hashed = hashlib.sha256()
    for where,folders,names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(where, name)
            hashed.update(storable(f'{os.path.relpath(path, folder)} {_stamp(path)}\n').encode())
    return hashed.hexdigest()

class _Remote:
    """An array of zarr in a store that is not a folder; equal only to its own copies, as in other processes

    Another source may read other data from the same place, which has nothing that says when it changed."""
    def __init__(self, array): self.array,self.place,self.token = array,f'{array.store} {array.path}',uuid4().hex
    def __hash__(self): return hash(self.token)
    def __eq__(self, other): return isinstance(other, _Remote) and self.token==other.token
    def __repr__(self): return self.place

def _array_in(remote): return remote.array

def _rows_per_mb(o): return min(1024, max(1, 2**20//max(1, o.dtype.itemsize*int(np.prod(o.shape[1:])))))

def _in_memory(name, array): return _expanded(name, array, ArrayColumn(None, (array,)))

def _expanded(name, array, column):
    "`{member: ArrayColumn}` for each member of the compound dtype of `array`; `{name: column}` for any other dtype"
    if array.dtype.names is None: return {name:column}
    return {member:ArrayColumn(column.opener, column.args, member, column.block) for member in array.dtype.names}

def _default_name(dtype, ndim):
    "The field of an array that has no name: `npy` if `ndim` is above 1, else `target.f8` and the like, or `cls`"
    if ndim>1: return 'npy'
    return f'target.f{dtype.itemsize}' if dtype.kind=='f' else 'cls'

# --- Rows

# The arrays are the columns of a table, so that fields, vocabulary and splits are chosen as those of other tables are.

class _ArrayTable(Table):
    """A source of the rows of arrays of one length; raises `ValueError` for different lengths, and without arrays

    If all arrays are in files, the workers read the rows."""
    keeps_names = True   # which the user, or the file, gave for the fields
    def __init__(self,
        columns:dict, # `{name: ArrayColumn}`
        options:ColumnOptions,
        is_alone:bool=False, # One array without a name: `fn` gets its rows
    ):
        wanted = _wanted(columns, options)
        lengths = {name:columns[name].length() for name in wanted}
        if not lengths: raise ValueError('no arrays')
        if len(set(lengths.values()))>1:
            raise ValueError(f"arrays of different lengths: {', '.join(f'{k} {n:,}' for k,n in lengths.items())}: "
                             "fields={name: field} chooses those of one length")
        self.columns,self.n,self.is_alone = {name:columns[name] for name in wanted},max(lengths.values()),is_alone
        self.block = max((c.block or 0 for c in self.columns.values())) or None
        if self.block: self.interleave = max(1, min(16, 2048//self.block))
        self.in_files = all(c.opener is not None for c in self.columns.values())
        if self.in_files: self.looks = 3   # each may be in another block, which is fetched
        super().__init__(None, options)

    @cached_property
    def plan(self):
        plan = super().plan
        pixels = [name for name,t in self.types.items() if not self.options.asked and _could_be_pixels(name, t)]
        plan.notes += [f"column {name!r} holds arrays that could be pixels: fields={{{name!r}: '{name}.npyimg', …}} "
                       'makes them images' for name in pixels]
        return plan

    def __len__(self): return self.n
    def _types(self): return {name:_array_type(c, self.n) for name,c in self.columns.items()}
    def _rows(self, numbers, names): return array_rows(self.columns, self.types, np.asarray(numbers), names)

    def _part(self, numbers, names):
        if not self.in_files: return super()._part(numbers, names)
        columns = {name:self.columns[name] for name in names or self.columns}
        return LazyPart(partial(named_rows, partial(array_rows, columns, self.types)), numbers, numbers)

    @property
    def load(self): return itemgetter(*self.types) if self.is_alone and not self.options.asked else super().load
    @property
    def is_identified(self): return all(c.opener not in (None, _array_in) for c in self.columns.values())
    def _stamp(self):
        places = [repr(c.args) for c in self.columns.values()] if self.in_files else []
        return places if self.is_identified else (*places, super()._stamp())
    def __repr__(self): return f"array_samples({self.n:,} rows of {', '.join(self.columns)})"

def _could_be_pixels(name, t):
    return t.kind=='array' and t.dtype=='uint8' and get_codec(name) is None and (
        len(t.shape)==2 or len(t.shape)==3 and t.shape[-1] in (1,3,4))

def _wanted(columns, options):
    "List of the names of the `columns` that `options` ask for; of all if they ask for none, or if one is missing"
    if not options.asked: return list(columns)
    asked = [*(options.fields or {}), options.fn_col, options.label_col, options.valid_col]
    names = [name for o in asked if o is not None for name in (o if isinstance(o, tuple) else (o,))]
    found = [name for name in columns if name in names]
    return found if all(name in columns for name in names) else list(columns)   # `TablePlan` names what is missing

def array_rows(columns, types, numbers, names=None)->list:
    """Rows `numbers`, an array of shape (n,), as a list of dicts of the columns `names`, default: all

    `columns` is `{name: ArrayColumn}`, `types` `{name: ColumnType}`. Text is decoded, with surrogates for what is not
    UTF-8, which no field stores. In columns of kind 'bytes', arrays of bytes become `bytes`."""
    values = {name:_values_of(columns[name], types[name], numbers) for name in names or columns}
    return [dict(zip(values, row)) for row in zip(*values.values())]

def _values_of(column, kind, numbers):
    "List of the values of rows `numbers` of an `ArrayColumn` of the `ColumnType` `kind`, as in `array_rows`"
    values = column.rows(numbers)
    if kind.kind=='text': return [o.decode(errors='surrogateescape') if isinstance(o, bytes) else o for o in values]
    if kind.kind=='bytes': return [o.tobytes() if _is_bytes_array(o) else o for o in values]
    return values

def _is_bytes_array(o): return isinstance(o, np.ndarray) and o.dtype==np.uint8 and o.ndim==1

def _array_type(column, n):
    "The `ColumnType` of an `ArrayColumn` of `n` rows; for a dtype of objects by the first 20 of them"
    dtype,shape = column.dtype()
    names = _enum_names(dtype)
    if names and not shape: return ColumnType('codes', vocab=names, is_label=True)
    if dtype.kind in 'biufc': return ColumnType('array' if shape else 'number', str(dtype), shape)
    if shape: return ColumnType('object')
    kind = {'U':'text', 'S':'text', 'T':'text', 'M':'time', 'm':'duration', 'V':'bytes'}.get(dtype.kind)
    if kind: return ColumnType(kind)
    first = column.rows(np.arange(min(n, 20)))
    if first and all(map(_is_image, first)): return ColumnType('bytes')
    texts = str if isinstance(column, _ListColumn) else (bytes,str)   # HDF5 has its texts as bytes
    is_text = first and all(isinstance(o, texts) for o in first) and not any(map(_is_image, first))
    return ColumnType('text' if is_text else 'object')

def _is_image(o):
    return (isinstance(o, bytes) or _is_bytes_array(o)) and image_format(bytes(o[:16])) is not None

def _enum_names(dtype):
    "List of the names of the codes 0, 1, … of an enumeration of HDF5; `None` for other codes, and another dtype"
    codes = (dtype.metadata or {}).get('enum')
    if codes and sorted(codes.values())==list(range(len(codes))): return sorted(codes, key=codes.get)

# --- array_samples

_ARRAY_FILES = '.npy','.npz','.h5','.hdf5','.hdf','.zarr'

def is_array_path(path)->bool:
    "Is `path` a file or folder that `array_samples` can read, by its name?"
    return str(path).lower().rstrip('/').endswith(_ARRAY_FILES)

def _library(o): return type(o).__module__.split('.')[0]

def is_array_file(o)->bool:
    "Is `o` an object of h5py or zarr, or a memory map?"
    return _library(o) in ('h5py','zarr') and (hasattr(o, 'shape') or hasattr(o, 'keys')) or isinstance(o, np.memmap)

def _is_array(o): return hasattr(o, 'shape') and hasattr(o, 'dtype') and len(o.shape)>0

def _named_codec(name): return get_codec(name) if isinstance(name, str) else None

def _is_list(o):
    return isinstance(o, Sequence) and not isinstance(o, (str,bytes,bytearray)) or type(o).__name__=='L'

def _is_list_of_dicts(o): return _is_list(o) and len(o)>0 and isinstance(o[0], Mapping)

def _length(o): return o.shape[0] if _is_array(o) else len(o)

def _is_column(name, o):
    """Can `o` be a column of field `name`, with a value for each row: is it an array or a list?

    A list of dicts only if the field stores dicts. `name` must be that of a field with a codec."""
    if _is_array(o): return True
    if _is_list_of_dicts(o): return _named_codec(name).name in ('json','npz','npzimg')
    return _is_list(o)

def _has_samples(name, o):
    """Is `o` a source of samples and no column of field `name`, which has a codec?

    That is a list of dicts, or any object that is no iterator, mapping or path, nor of a type that Python has built in:
    a table, a dataset, a store."""
    if _is_column(name, o): return False
    is_plain = isinstance(o, (Iterator,Mapping,Path)) or type(o).__module__=='builtins'
    return _is_list_of_dicts(o) or not is_plain

def _check_splits(o):
    """Raise `ValueError` if dict `o`, without names of codecs, has lists or arrays that are no splits of one dataset

    One is called as columns are, or rows of arrays differ in shape."""
    def may_be_column(values): return type(values) in (list,tuple) and not _is_list_of_dicts(values)   # no dataset
    if not all(_is_array(values) or may_be_column(values) for values in o.values()): return
    shapes = {tuple(values.shape[1:]) if _is_array(values) else None for values in o.values()}
    names = ', '.join(map(repr, o))
    if len(shapes)>1 or 'label' in o or 'text' in o:
        raise ValueError(f'a dict with the names {names}: these are columns, and no splits of one dataset. Use '
                         'array_samples({name: list}, fields={name: field}), or pd.DataFrame({name: list})')

def is_dict_of_arrays(o)->bool:
    """Is `o` a dict of arrays or lists by field, and not of sources by split?

    False if no name is that of a codec, or if all values under such names are sources of samples. Otherwise true if all
    values are arrays, or if all names are those of codecs, and the values lists or arrays of one length. Raises
    `ValueError` for any other dict, and for what can only be columns, whose names do not say how to store them."""
    if not isinstance(o, dict): return False
    named = [name for name in o if _named_codec(name) is not None]
    if not named:
        _check_splits(o)
        return False
    if all(map(_is_array, o.values())): return True
    if all(_has_samples(name, o[name]) for name in named): return False
    others = [name for name in o if name not in named]
    no_columns = [f'{name!r} is of type {type(o[name]).__name__}' for name in named if not _is_column(name, o[name])]
    if not others and not no_columns and len({_length(values) for values in o.values()})==1: return True
    if others: why = f'{others[0]!r} names none'
    elif no_columns: why = f'{no_columns[0]}, which is no column'
    else: why = f"there are {', '.join(f'{_length(values):,} in {name!r}' for name,values in o.items())}"
    raise ValueError(f"a dict with the name {named[0]!r}, which is that of a codec, is one of columns: lists or arrays "
                     f"of one length; but {why}. Use array_samples({{name: list}}, fields={{name: field}}) for columns "
                     'of any names, or {split: source} with names of splits that are not those of codecs')

def array_samples(
    # `{name: array or list}`; or a file, group or array of h5py or zarr; or a path: `.npy`, `.npz`, `.h5`, `.zarr`
    arrays,
    label_col:str|list=None, # Array of labels; several: an array of numbers, `target.npy`, or a list, `labels`
    fields:dict=None, # `{name: field}`, such as `{'images':'npyimg', 'labels':'cls'}`; other arrays are left out
    valid_col:str=None, # Array that is true for the validation set, or names the split of each row
): # An `IndexedSource`
    """A source of the rows of arrays of one length; without `fields` and `label_col` each array is a field

    Arrays in files (h5py, zarr, memory maps, `.npy`) are opened by the workers, by their paths. The arrays of an `.npz`
    file are read into memory. The `fn` of an ingest gets each row as a dict, but of one array that is given without a
    name and without options, the row itself. Raises `ValueError` for arrays that workers cannot open, and for different
    lengths."""
    options = ColumnOptions(fields, label_col=label_col, valid_col=valid_col)
    columns = _columns(arrays)
    is_alone = not isinstance(arrays, dict) and _is_array(arrays) and getattr(arrays.dtype, 'names', None) is None
    return _ArrayTable(columns, options, is_alone)

def _columns(o, name=''):
    "`{name: ArrayColumn}` of whatever `array_samples` takes; `name`: that of an array in a dict; raises what it raises"
    if isinstance(o, dict): return _merged((key, _columns(array, key)) for key,array in o.items())
    if isinstance(o, (str,Path)): return _file_columns(Path(o))
    if _library(o)=='h5py': return _named(_h5(o), name)
    if _library(o)=='zarr': return _named(_zarr(o), name)
    if hasattr(o, 'detach'): o = _of_tensor(o)
    if getattr(o, 'shape', None)==(): raise ValueError(f'array {name!r} is one value, and has no rows')
    if isinstance(o, np.memmap): return _memmap(name or _default_name(o.dtype, o.ndim), o)
    if not _is_array(o) or _has_missing(o): return {name or 'cls':_ListColumn(by_position(name, o))}
    array = o if isinstance(o, np.ma.MaskedArray) and np.ma.is_masked(o) else np.asarray(o)
    return _in_memory(name or _default_name(array.dtype, array.ndim), array)

def _merged(parts):
    """`{name: ArrayColumn}` of all `parts`, each the name of an array and such a dict

    Raises `ValueError` if two columns have one name."""
    columns = {}
    for name,more in parts:
        twice = next((k for k in more if k in columns), None)
        if twice is not None:
            raise ValueError(f'two arrays are called {twice!r}; one of them is {name!r}, or a member of it')
        columns |= more
    return columns

def _named(columns, name):
    "`columns`, `{name: ArrayColumn}`, as they are; a single one under `name` instead, unless this is empty"
    return dict(zip([name], columns.values())) if name and len(columns)==1 else columns

def _has_missing(o):
    "Has `o`, an array with a dtype of pandas or polars, missing values? False for one with a dtype of NumPy"
    if isinstance(o.dtype, np.dtype): return False
    is_missing = getattr(o, 'isna', None) or getattr(o, 'is_null', None)
    return is_missing is not None and bool(is_missing().any())

def by_position(
    name:str, # Of the column, for messages
    values # A list, an array, a Series
): # `values`, or a list of them
    """`values`, so that `[i]` is the value of row i: of a Series of pandas, which has an index, a list

    Raises `TypeError` if they are no column, such as a text, a mapping or a table."""
    is_other = isinstance(values, (str,bytes,bytearray,Mapping)) or hasattr(values, 'columns')
    if is_other or not (hasattr(values, '__len__') and hasattr(values, '__getitem__')):
        kind = type(values).__name__
        raise TypeError(f'{name!r}: want a list or an array with a value for each sample, not of type {kind}')
    return list(values) if hasattr(values, 'iloc') else values   # `[]` of a Series of pandas looks up its index

def _of_tensor(o):
    try: return o.detach().cpu().numpy()
    except TypeError as e:
        raise TypeError(f'a tensor of {o.dtype}, which NumPy does not have ({e}): give .float()') from None

def _file_columns(path):
    "`{name: ArrayColumn}` of a file or folder of arrays; raises `OSError`, `ValueError`, `ImportError`"
    require(path, path.exists())
    name = path.name.lower()
    if name.endswith('.npy'): return _npy(path)
    if name.endswith('.npz'): return _npz(path)
    library = 'zarr' if name.endswith('.zarr') or path.is_dir() else 'h5py'
    try: module = __import__(library)
    except ImportError as e: raise ImportError(f'{path}: {library} reads such files: pip install {library}') from e
    if library=='zarr': return _zarr(module.open(str(path), mode='r'))
    try: file = module.File(path, 'r')
    except OSError as e: raise OSError(f'{path}: {e}') from None
    with file: return _h5(file)
