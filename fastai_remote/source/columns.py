"""Which columns of a table become which fields of a sample

Docs: page `source/columns`"""
import os, re
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from uuid import UUID

import numpy as np

from ..codec.arrays import refuse_mask
from ..codec.fields import get_codec, is_image
from ..codec.text import are_several, whole_label
from .base import read_file, refuse_address, unchanged
from .files import image_field

# --- Types

# CSV files, DataFrames of pandas and polars, tables of Arrow and Parquet files describe their columns in different
# ways. A `ColumnType` says the same about each of them: the kind of its values, and the codec of a field whose name
# does not tell. So a column `age` of 8 bits stays 8 bits wide. Where the library does not say what a column holds, all
# of its values decide: `object_type` looks at a column of Python objects, and `CellType` at one of a CSV file, by the
# rules of pandas.

# The codec of a field of numbers, for each dtype of NumPy and Arrow. A `uint64` above 2**63-1 is a failed sample.
NUMBER_CODECS = {'bool':'u1', 'int8':'i1', 'int16':'i2', 'int32':'i4', 'int64':'i8', 'uint8':'u1', 'uint16':'u2',
                  'uint32':'u4', 'uint64':'i8', 'float16':'f2', 'float32':'f4', 'float64':'f8'}

@dataclass
class ColumnType:
    "What a column of a table holds, whatever library the table belongs to"
    # 'text', 'cell' (text of a CSV file, which may be a number), 'number', 'bytes', 'time', 'duration', 'list',
    # 'labels' (lists of texts), 'array', 'file' (dicts of `bytes` and `path`), 'codes' (numbers of labels in `vocab`),
    # 'code_lists' (lists of them), 'null' (nothing), or 'object': each value has its own type
    kind:str
    dtype:str = None # dtype of NumPy, of numbers and arrays
    shape:tuple = None # Shape of one value, of arrays; default: whatever the values have
    vocab:list = None # Labels in their order, if the table has them
    is_label:bool = False # Does the table say that this is a category?
    field:str = None # Field that the table asks for; default: the name of the column
    is_cell:bool = False # Are the values texts of a CSV file? Of kind 'number', these are read as numbers
    is_whole:bool = False # Are the floats of a column of labels whole numbers, all of them?

    @property
    def codec(self)->str:
        "The name of the codec for a field whose name does not say it; `None` if each value decides, or if none fits"
        if self.is_label: return 'labels' if self.kind=='code_lists' else 'cls'
        if self.kind=='number': return NUMBER_CODECS.get(self.dtype)
        return {'text':'txt', 'cell':'txt', 'time':'txt', 'bytes':'bin', 'list':'json', 'labels':'json', 'array':'npy',
                'file':'bin'}.get(self.kind)

    def fits(self,
        codec # Codec that the name of a field asks for
    )->bool:
        "Can a field of this codec hold the values of the column?"
        if self.kind in ('object','cell') or self.is_cell and codec.name=='txt': return True
        if codec.name in ('json','cls') or codec.name==self.codec: return True
        if codec.dtype is not None: return self.kind=='number' and not (self._is_float() and codec.dtype.kind in 'iu')
        if codec.name=='txt': return self.kind in ('text','time')
        if codec.name=='labels': return self.kind in ('list','labels','code_lists')
        if codec.name in ('npy','npz','npyimg','npzimg'): return self.kind in ('list','array','bytes','file','text')
        return self.kind in ('bytes','file','text','array')   # text is the path of a file

    def _is_float(self): return np.dtype(self.dtype).kind=='f'

    @property
    def can_be_label(self)->bool:
        "Are the values categories, texts, whole numbers, or true and false?"
        if self.kind in ('text','cell','codes') or self.is_label and self.codec=='cls': return True
        return self.kind=='number' and (self.is_whole or not self._is_float() and self.dtype in NUMBER_CODECS)

# The kinds of types other than numbers, by the words that their names begin with in Arrow, polars, pandas and NumPy
_KINDS = {word:kind for kind,words in {
    'text':'string large_string string_view utf str decimal',
    'bytes':'binary large_binary binary_view fixed_size_binary', 'time':'timestamp datetime date time', 'null':'null',
    'duration':'duration timedelta month_interval day_time_interval month_day_nano_interval'}.items()
    for word in words.split()}

def plain_type(
    name:str # Of a type of Arrow, polars, pandas or NumPy, such as `int8`, `Float32`, `double`, `timestamp[ns]`
)->ColumnType: # `None` for types of objects, and for those that consist of others
    "The `ColumnType` of a type, by its name"
    name = name.lower()
    dtype = {'boolean':'bool', 'halffloat':'float16', 'float':'float32', 'double':'float64'}.get(name, name)
    if re.fullmatch(r'bool|(u?int|float|complex)\d+', dtype): return ColumnType('number', dtype)
    kind = _KINDS.get(re.match('[a-z_]*', name)[0])
    return ColumnType(kind) if kind else None

_TYPES = ((bool,np.bool_),'bool'), ((int,np.integer),'int64'), ((float,np.floating),'float64'), \
    ((str,os.PathLike),'text'), ((bytes,bytearray,memoryview),'bytes'), ((list,tuple,dict),'list'), \
    ((datetime,date,time),'time'), ((Decimal,UUID),'text')

def object_type(
    pieces # Iterable of the values of a column, in lists
)->ColumnType:
    """What a column holds whose library does not say it, by all of its values; 'object' if they are of several kinds

    What is missing does not count, nor does `nan` beside what is no number. Whole numbers and floats are floats. No
    object is made for each value."""
    found = set()
    for piece in pieces:
        for cls in set(map(type, piece)):
            if cls.__name__ in ('NoneType','NAType','NaTType'): continue
            if issubclass(cls, (float,np.floating)) and all(v!=v for v in piece if type(v) is cls): cls = None
            found.add('nan' if cls is None else next((kind for types,kind in _TYPES if issubclass(cls, types)), None))
            if cls is dict and all(v.keys()=={'bytes','path'} for v in piece if type(v) is dict): found.add('file')
    if found=={'list','file'}: return ColumnType('file')
    if found and found<={'int64','float64','nan'}:
        return ColumnType('number', 'int64' if found=={'int64'} else 'float64')
    kind = found.pop() if len(found := found-{'nan'})==1 else None
    return ColumnType('number', kind) if kind=='bool' else ColumnType(kind or 'object')

def are_whole(
    pieces # Iterable of the values of a column, in lists
)->bool:
    "Are all of these floats whole numbers? `nan` and missing values do not count, but there is another one"
    found = False
    for piece in pieces:
        values = np.array([np.nan if is_missing(v) else v for v in piece], np.float64)
        values = values[~np.isnan(values)]
        if (values!=np.trunc(values)).any() or np.isinf(values).any(): return False
        found = found or len(values)>0
    return found

# Formats by the first bytes of a file, and those that are recognised by the extension of their path
_STARTS = ((b'\xff\xd8\xff','jpg'), (b'\x89PNG\r\n\x1a\n','png'), (b'GIF8','img'), (b'BM','img'), (b'II*\0','img'),
           (b'MM\0*','img'), (b'fLaC','flac'), (b'OggS','ogg'), (b'ID3','mp3'), (b'\xff\xfb','mp3'), (b'%PDF','pdf'),
           (b'\x1aE\xdf\xa3','webm'))
_EXTENSIONS = frozenset('wav flac mp3 ogg opus m4a mp4 webm avi mov mkv pdf'.split())

def file_format(
    start:bytes, # The first 16 bytes of a file, or more
    path:str=None, # Its path, if it has one
)->str: # An extension such as `jpg`, or `img` for GIF, BMP and TIFF; `None` if the format is unknown
    """The format of a file of an image, a sound or a video, by its first bytes

    If these are not recognised, it is the extension of the path, but only one of sounds, videos or PDF."""
    if start[:4]==b'RIFF': found = {b'WEBP':'webp', b'WAVE':'wav', b'AVI ':'avi'}.get(bytes(start[8:12]))
    elif start[4:8]==b'ftyp': found = 'mp4'
    else: found = next((name for magic,name in _STARTS if start.startswith(magic)), None)
    extension = os.path.splitext(path or '')[1][1:].lower()
    return found or (extension if extension in _EXTENSIONS else None)

def image_format(
    start:bytes # A file, or its first bytes
)->str: # Field for such a file: `jpg`, `png` or `webp`, or `img` for GIF, BMP and TIFF; `None` for any other file
    "The kind of an image file, by its first bytes"
    found = file_format(start)
    return found if found in ('jpg','png','webp','img') else None

def is_missing(value)->bool:
    "Is this the absence of a value: `None`, `NA` of pandas, `NaT` of pandas or NumPy? `nan` is a number, not missing"
    if isinstance(value, (np.datetime64,np.timedelta64)): return bool(np.isnat(value))
    return value is None or type(value).__name__ in ('NAType','NaTType')

def _is_nan(value): return isinstance(value, (float,np.floating)) and value!=value

# --- Rows

# A row is a dict of Python values. `LoadRow` makes a sample of it, in the worker. Text in a field of files, such as
# `jpg`, is the path of a file, which is read. Times become ISO 8601. A label that is missing is an error, and so is a
# whole number that would be rounded.

# Text in a field of these codecs, or in one of images, is the path of a file
_FILE_CODECS = 'bin','npy','npz','npyimg','npzimg','strokes','raw','bits'
_LISTS = 'labels','json' # Codecs of lists, which several columns become, whatever they hold

@dataclass
class Column:
    "One field of a sample, and the column that it is made of, or several columns"
    name:str # Of the column; a tuple of names if there are several
    field:str # Of the sample
    type:ColumnType # What the column holds; of several, its `dtype` is that of the array that they become, or `None`
    delim:str = None # Separator of several labels in a text
    format:str = None # Format of all its images, if the field is named after that of the first ones
    asked:bool = False # Has the user named this column?
    several:bool = False # Are several columns made an array of numbers, or a list of labels?
    cells:dict = None # `{column: dtype}` of columns whose values are texts of a CSV file that are numbers

    @property
    def names(self)->tuple:
        "The columns that are read"
        return self.name if self.several else (self.name,)

    def value(self, row, folder, suff):
        """The value of the field in `row`, `{column: cell}`; raises `ValueError`, `TypeError`, `OSError`

        `folder` and `suff`: what comes before and after a path in a cell; in a column of kind 'file', only `folder`."""
        codec = get_codec(self.field)
        if self.several: return self._several([self._present(row, name, codec) for name in self.names])
        value = self._present(row, self.name, codec)
        if self.type.kind=='file':
            value = _read(folder, value['path']) if value['bytes'] is None else value['bytes']
        if self.format and (found:=image_format(value))!=self.format:
            raise ValueError(f"{'no image' if found is None else found}, where the first rows have {self.format}: "
                             f"fields={{{self.name!r}: '{self.name}.img', …}} takes all formats")
        if isinstance(value, str): return self._text(value, codec, folder, suff)
        if self.type.kind in ('codes','code_lists'): return self._label(value)
        if self.type.kind=='array': return self._array(value)
        if isinstance(value, Decimal) and getattr(codec, 'dtype', None) is not None: return value
        if codec is not None and codec.name=='cls': return whole_label(self.field, as_stored(value))
        return as_stored(value)

    def _present(self, row, name, codec):
        """The cell of column `name` in `row`; raises `ValueError` if there is no such column, or nothing in the cell

        `codec`: that of the field, or `None`. `nan` is nothing, unless the field stores floats. Numbers of NumPy become
        those of Python. Raises `ValueError` for a masked array, too."""
        if name not in row: raise ValueError(f"no such column here; there are {', '.join(map(str, row))}")
        value = row[name]
        if isinstance(value, os.PathLike): value = os.fspath(value)
        if self.cells and name in self.cells: value = cell_value(value, self.cells[name])
        is_number = self.type.kind=='number' if codec is None else getattr(codec.dtype, 'kind', '')=='f'
        empty = is_missing(value) or _is_nan(value) and not is_number
        if self.type.kind=='cell' and isinstance(value, str) and is_blank(value):   # a text, but no number and no label
            empty = codec is not None and (codec.dtype is not None or self.several and codec.name=='labels')
        if isinstance(value, dict) and self.type.kind=='file': empty = value['bytes'] is None and value['path'] is None
        if empty: raise ValueError(f'nothing in this row ({value!r}): fill it in, or leave out the row or the column')
        refuse_mask(value, 'this row')
        return value.item() if isinstance(value, np.generic) and value.dtype.kind not in 'Mm' else value

    def _text(self, text, codec, folder, suff):
        """What a text stands for: itself, a number, a list of labels, or the bytes of the file that it names

        `codec`: that of the field, or `None`. Raises `ValueError`, `OSError`."""
        if self.delim: return [label for label in text.split(self.delim) if label]
        if codec is not None and codec.name=='labels' and self.asked:
            raise ValueError(f'{text[:40]!r} is one text, and not a list of labels: label_delim= separates several')
        if codec is None or codec.name in ('txt','cls','json','labels'): return text
        if codec.dtype is not None: return _number(text)
        if is_image(codec.name) or codec.name in _FILE_CODECS: return _read(folder, text+suff)
        return text

    def _label(self, code):
        "The label of a code, or a list of labels for a list of codes; raises `ValueError` if there is none"
        return [self._label(o) for o in code] if isinstance(code, list) else class_name(code, self.type.vocab)

    def _array(self, value):
        array = full_array(value, self.type.dtype)
        return array.reshape(self.type.shape) if self.type.shape else array

    def _several(self, values):
        """An array of `values`, the cells of several columns, if their type has a `dtype`; else `values`, a list

        Raises `ValueError` if a text is no number, or if a float cannot hold a number, as in one column of floats."""
        if self.type.dtype is None: return values
        if self.type.dtype!='float64': return np.array(values, self.type.dtype)   # the smallest that holds all of them
        return get_codec('f8').to_array([_number(value) if isinstance(value, str) else value for value in values])

def class_name(
    code:int, # Of a class
    names:list # Of all classes
)->str:
    "The name of a class; raises `ValueError` if there is no such class"
    if 0<=code<len(names): return names[code]
    if code!=-1: raise ValueError(f'{code} is no class: there are {len(names)}')
    raise ValueError('-1 marks a sample without a label: leave out such samples, or the split that has no labels')

def full_array(
    value, # A list, of lists if it has several dimensions; or an array
    dtype # As in NumPy
)->np.ndarray:
    """A new array of `value`, in which nothing is missing

    Raises `ValueError` for `None`, of which NumPy would make `False` or `nan`."""
    if _has_none(value): raise ValueError(f'a value is missing in the array {str(value)[:60]}')
    return np.array(value, dtype)

def _has_none(value):
    "Is `None` in a list, in lists in it, or in an array of objects?"
    if isinstance(value, np.ndarray) and value.dtype.hasobject: value = value.tolist()
    return isinstance(value, list) and any(o is None or _has_none(o) for o in value)

def _read(folder, path):
    "The bytes of file `path` in `folder`; raises `OSError`, with advice if it is not there and `folder` is empty"
    try: return read_file(os.path.join(folder, path))
    except FileNotFoundError as e:
        refuse_address(path)
        if folder: raise
        raise FileNotFoundError(e.errno, f'{e.strerror} (folder= says where the files are)', path) from None

# Cells of CSV files in which pandas reads that nothing is there
_BLANK = frozenset(('','#N/A','#N/A N/A','#NA','-1.#IND','-1.#QNAN','-NaN','-nan','1.#IND','1.#QNAN','<NA>','N/A','NA',
                    'NULL','NaN','None','n/a','nan','null'))
_BOOLS = {**dict.fromkeys(('True','TRUE','true'), True), **dict.fromkeys(('False','FALSE','false'), False)}
_INTEGER = re.compile(r'\s*[+-]?[0-9]+\s*')
_FLOAT = re.compile(r'\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?\s*|\s*[+-]?inf(inity)?\s*', re.I)

def is_blank(
    cell:str # Of a CSV file
)->bool:
    "Is nothing in this cell, or what pandas reads so, such as `NA`?"
    return not cell.strip() or cell in _BLANK

def cell_value(
    cell:str, # Of a CSV file
    dtype:str # Of its column, as `CellType` finds it
):
    "The number in a cell, or whether it says true; `None` for a blank cell, and `nan` in a column of floats"
    if is_blank(cell): return float('nan') if dtype=='float64' else None
    return _BOOLS[cell] if dtype=='bool' else _number(cell)

class CellType:
    """What all cells of a column of a CSV file are, by the rules of `pandas.read_csv`, seen one after the other

    They are `int64`, `float64` (also integers if some are missing), `bool`, or texts, also for numbers of more than 64
    bits. `is_whole` says whether all numbers are whole ones."""
    def __init__(self): self.kinds,self.is_whole = set(),True

    def add(self,
        cell:str
    ):
        "Look at one more cell"
        kind = _kind_of_cell(cell)
        self.kinds.add(kind)
        if kind=='float64' and self.is_whole: self.is_whole = float(cell).is_integer()

    @property
    def is_text(self)->bool:
        "Is it certain that the cells are texts?"
        return 'text' in self.kinds or 'bool' in self.kinds and not self.kinds<={'bool',None}

    @property
    def column(self)->ColumnType:
        "The `ColumnType` of such a column"
        if self.is_text or self.kinds<={None}: return ColumnType('cell', is_cell=True)
        dtype = 'bool' if 'bool' in self.kinds else 'int64' if self.kinds=={'int64'} else 'float64'
        return ColumnType('number', dtype, is_cell=True, is_whole=self.is_whole)

def _kind_of_cell(cell):
    "'bool', 'int64' (also above it, up to 64 bits), 'float64' or 'text'; `None` if nothing is in the cell"
    if cell in _BLANK: return None
    if cell in _BOOLS: return 'bool'
    if _INTEGER.fullmatch(cell) is None: return 'float64' if _FLOAT.fullmatch(cell) is not None else 'text'
    return 'int64' if len(cell)<19 or len(cell)<100 and -2**63<=int(cell)<2**64 else 'text'

def _number(text):
    "The number in `text`: an `int` if it has only digits, after a sign or none, else a `float`; raises `ValueError`"
    text = text.strip()
    try: return int(text) if re.fullmatch('[+-]?[0-9]+', text) else float(text.replace('_', '?'))   # not 1_000
    except ValueError: raise ValueError(f'{text[:40]!r} is no number') from None

def as_stored(
    value # Of a cell
):
    """`value` as a codec takes it: times become ISO 8601, decimal numbers and UUIDs text, also in lists and dicts

    These are copied, tuples become lists, and a `bytearray` becomes `bytes`. Other values are returned as they are.
    Raises `TypeError` for durations, bytes in a list or dict, complex numbers and objects of pandas."""
    if isinstance(value, (datetime,date,time)): return value.isoformat()
    if isinstance(value, np.datetime64): return str(value)
    if isinstance(value, (Decimal,UUID)): return str(value)
    if isinstance(value, (timedelta,np.timedelta64)):
        raise TypeError(f'a duration ({value}), which has no field: give a number, such as its seconds')
    if isinstance(value, dict): return {k:_in_json(o) for k,o in value.items()}
    if isinstance(value, (list,tuple)): return [_in_json(o) for o in value]
    if isinstance(value, (bytearray,memoryview)): return bytes(value)
    if isinstance(value, complex) or type(value).__module__.split('.')[0]=='pandas':
        raise TypeError(f'a {type(value).__name__} ({value}), which has no field: fn= can make a number or text of it')
    return value

def _in_json(value):
    if isinstance(value, bytes):
        raise TypeError('bytes in a list or a struct, which are no JSON: fn= can make fields of them')
    return as_stored(value)

class LoadRow:
    "Makes a sample, `{field: value}`, of a row, `{column: cell}`, by a list of `Column`; runs in the workers"
    def __init__(self,
        columns:list, # Of `Column`
        folder:str='', # Folder of the files that columns name
        suff:str='', # What to append to their names
        all_names:list=None, # Names of all columns of a row, if further ones are an error
    ): self.columns,self.folder,self.suff,self.all_names = columns,folder,suff,all_names

    def __call__(self, row):
        """The sample of `row`; raises `OSError` if a file cannot be read

        Other errors become a `ValueError` that names the column. Raises `ValueError` also if the row has more or fewer
        columns than `all_names`."""
        if self.all_names is not None and len(row)!=len(self.all_names):
            raise ValueError(f"columns {', '.join(map(str, row))}; the first row had "
                             f"{', '.join(map(str, self.all_names))}")
        sample = {}
        for column in self.columns:
            try: sample[column.field] = column.value(row, self.folder, self.suff)
            except OSError: raise   # which names the file
            except Exception as e: raise ValueError(f'column {_shown(column)}: {e}') from e
        return sample

def _shown(column): return ', '.join(map(repr, column.names))

# --- Fields

# Without further options, each column is a field. `field_name` says which, also for HuggingFace datasets: `label` is
# `cls`, `text` is `txt`, and `age` is `age.i8` if it holds integers of 64 bits. The report lists what is called
# differently from its column. `fields`, `fn_col` and `label_col` choose columns; the last two have the meaning that
# they have in fastai's `ImageDataLoaders.from_df`.

@dataclass
class ColumnOptions:
    "What a user says about the columns of a table"
    # `{column: field}`; a tuple of columns of numbers is an array. Other columns are left out.
    fields:dict = None
    fn_col:int|str = None # Column with names of image files
    label_col:int|str|list = None # Column with labels; several: an array of their numbers, or a list of their labels
    label_delim:str = None # Separator of several labels in one cell
    folder:str = '' # Folder of the files
    suff:str = '' # What to append to their names
    valid_col:int|str = None # Column that says which split a row belongs to

    def __post_init__(self):
        """Make texts of `folder` and `suff`, empty ones of `None`, and a tuple of a list `label_col`

        Raises `TypeError` if `fields` is not `None` or a dict of names of fields, and for a dict as `fn_col` or
        `label_col`."""
        self.folder,self.suff = ('' if o is None else str(o) for o in (self.folder, self.suff))
        if self.fields is not None and not (isinstance(self.fields, dict) and self.fields):
            raise TypeError(f"fields is a dict, such as {{'path':'jpg', 'label':'cls'}}, not {self.fields!r}")
        check_fields(self.fields or {})
        if isinstance(self.fn_col, dict) or isinstance(self.label_col, dict):
            raise TypeError('fn_col and label_col name columns; fields= takes a dict {column: field}')
        if isinstance(self.label_col, list): self.label_col = tuple(self.label_col)

    @property
    def asked(self)->bool:
        "Does the user name columns by `fields`, `fn_col` or `label_col`? If not, every column is a field"
        return not (self.fields is None and self.fn_col is None and self.label_col is None)

def check_fields(
    fields:dict, # `{column: field}`
    may_leave_out:bool=False, # May a field be `None`?
):
    "Raises `TypeError` for a field that is no name"
    for column,field in fields.items():
        if may_leave_out and field is None or isinstance(field, str) and field: continue
        raise TypeError(f'fields=: {column!r} is to be stored in {field!r}, which is no name of a field')

def column_name(
    column:int|str, # A name, or a position
    names:list # Names of all columns
):
    "The name of a column; raises `ValueError` if there is no such column"
    if isinstance(column, str) or column in names: found = column if column in names else None
    else: found = names[column] if isinstance(column, (int,np.integer)) and 0<=column<len(names) else None
    if found is None: raise ValueError(f"no column {column!r}; there are {', '.join(map(str, names))}")
    return found

# A column of such a name is the main one of its kind: the field of its values has no other name than its codec's
_MAIN_NAMES = {'cls':('cls','label'), 'image':('image','img'), 'audio':('audio',), 'video':('video',),
               'labels':('labels',)}

def main_columns(
    kinds:dict # `{column: kind}`: a key of `_MAIN_NAMES`, 'label' for what is a label if it is called so, or `None`
)->set:
    """Names of the columns whose fields are called `jpg`, `wav`, `cls`, `labels`, as `DataLoaders.from_store` expects

    Of images, sounds, videos, classes (`cls`) and lists of classes, it is the one with a usual name, else the first."""
    found = set()
    for kind,usual in _MAIN_NAMES.items():
        columns = [column for column in kinds if kinds[column]==kind]
        called = [name for name in usual if name in kinds and kinds[name] in (kind, 'label' if kind=='cls' else kind)]
        called += [column for column in columns if str(column).lower() in usual]
        found |= set((called or columns)[:1])
    return found

def field_name(
    column, # Name of a column: a text, or of pandas also a number or a tuple
    kind:ColumnType, # What it holds
    extension:str, # Name of the codec for it; `None` if each value decides
    is_main:bool, # Is it one of `main_columns`?
    taken # Fields of other columns
)->str:
    """The field that stores a column: its name, a dot and the extension; the same for every kind of table

    It is the extension alone for one of `main_columns`, `txt` for a column of texts called `text`, and the name of the
    column if this says how values are stored, as `age.f4`."""
    name = clean_name(column)
    codec = get_codec(name)
    if is_main: field = 'cls' if kind.can_be_label else extension
    elif name=='text' and extension=='txt': field = 'txt'
    elif extension is None or _says_how(name, codec, kind, extension): field = name
    else: field = f'{name}.{extension}'
    return f'{name}.{extension}' if field in taken and extension is not None else field

def _says_how(name, codec, kind, extension):
    "Does `name`, whose codec is `codec` or `None`, say how the values of a column are stored? The arguments as above"
    if name.split('.')[-1].lower()==extension: return True
    if codec is None or codec.name=='crc' or not kind.fits(codec): return False
    return kind.kind!='file' or not is_image(codec.name) or codec.name=='img'

def clean_name(column)->str:
    "The name of a column as a part of a field's name: with `_` for characters that it cannot have"
    text = '_'.join(map(str, column)) if isinstance(column, tuple) else str(column)
    return re.sub(r'[:#~@?;\s/\\]+', '_', text).strip('_.') or 'column'

class TablePlan:
    """Which fields the samples of a table have, by `options`, or if these name no columns by the types of all columns

    `columns` is a list of `Column`, `codecs` is `{field: name of a codec}` for names that do not say it, `vocab` is
    `{field: labels}`, `row_vocab` the same by the names of columns, and `notes` a list of remarks for the report.
    `split` is the name of the column that tells the split of a row, or `None`. Raises `ValueError` if a column that the
    options name is not there."""
    def __init__(self,
        types:dict, # `{name of a column: ColumnType}`
        rows:list, # The first rows, as dicts
        options:ColumnOptions,
        # Called with a name and its `ColumnType`, returns the one by all values, where that of the library does not
        # tell: of columns of objects, and of floats that are called `label`
        decide=lambda name, kind: kind,
        keeps_names:bool=False, # Are names of columns those of fields, if they can be? Else `field_name` chooses them
        chosen:dict=None, # `{column: field}` of columns whose field is known, or `None` to leave a column out
    ):
        self.keeps_names,self.chosen = keeps_names,chosen or {}
        check_fields(self.chosen, may_leave_out=True)
        self.types,self.rows,self.options = types,rows,options
        self.columns,self.codecs,self.vocab,self.row_vocab,self.notes = [],{},{},{},[]
        self.split = None if options.valid_col is None else column_name(options.valid_col, list(types))
        if options.asked: self._asked()
        else:
            self.types = {name:decide(name, kind) for name,kind in types.items()}
            self._unasked()
            self._advise()

    @property
    def names(self)->list:
        "The names of the columns that the fields are made of, without repeats"
        return list(dict.fromkeys(name for c in self.columns for name in c.names))

    def check(self):
        "Raises `ValueError` if there are no columns, or two for one field"
        fields = [c.field for c in self.columns]
        twice = [c for c in self.columns if fields.count(c.field)>1]
        if twice:
            raise ValueError(f'columns {_shown(twice[0])} and {_shown(twice[1])} would both be the field '
                             f'{twice[0].field!r}: fields= gives each a name of its own')
        if not fields: raise ValueError('no columns with values')

    @property
    def load(self)->LoadRow:
        "What makes a sample of a row; raises `ValueError` as `check` does"
        self.check()
        o = self.options
        return LoadRow(self.columns, o.folder, o.suff, None if o.asked else list(self.types))

    def _asked(self):
        "Add the columns that the options name; raises `ValueError` if one is not there, or if `fn_col` has no texts"
        options,names = self.options,list(self.types)
        def found(column):
            is_several = isinstance(column, tuple) and column not in self.types   # pandas has tuples as names, too
            return tuple(map(found, column)) if is_several else column_name(column, names)
        for column,field in (options.fields or {}).items(): self._add(found(column), field, asked=True)
        if options.fn_col is not None:
            name = found(options.fn_col)
            texts = [str(row[name]) for row in self.rows if isinstance(row[name], (str,os.PathLike))]
            if self.rows and not texts:
                raise ValueError(f'column {name!r} has no names of files; fields={{{name!r}: …}} stores its values')
            endings = {image_field(text+options.suff) or 'img' for text in texts}
            self._add(name, endings.pop() if len(endings)==1 else 'img', asked=True)
        if options.label_col is not None: self._label(found(options.label_col))

    def _label(self, name):
        """Add column `name` as field `cls`, or as `labels` if it has lists or `label_delim` is set

        A tuple of columns is added as field `target.npy` if all have numbers, else as `labels`; raises `ValueError` for
        these with `label_delim`. A tuple of one column counts as this column."""
        is_several = isinstance(name, tuple) and name not in self.types
        if is_several and len(name)==1: (name,),is_several = name,False
        if is_several and self.options.label_delim:
            raise ValueError('label_delim= separates the labels in one column, and label_col= names several')
        if is_several: return self._add(name, 'target.npy' if self._dtype(name) else 'labels', asked=True)
        several = self.options.label_delim or self.types[name].kind in ('list','labels')
        several = several or any(are_several(row[name]) for row in self.rows)
        self._add(name, 'labels' if several else 'cls', asked=True)

    def _dtype(self, names):
        "dtype, as text, of an array of the columns `names`; `None` if one does not hold numbers in the first rows"
        types = [self.types[name] for name in names]
        if all(o.kind=='number' for o in types): return str(np.result_type(*[o.dtype for o in types]))
        if not all(o.kind in ('object','number') for o in types): return None
        cells = (row[name] for row in self.rows for name in names)
        try: np.array([float(_number(cell) if isinstance(cell, str) else cell) for cell in cells])
        except (TypeError,ValueError): return None
        return 'float64'

    def _type_of_several(self, names, codec):
        "The `ColumnType` of a field of columns `names`; its `dtype` is that of an array, or `None` for a list of cells"
        dtype = None if codec is not None and codec.name in _LISTS else self._dtype(names)
        return ColumnType('cell' if self.types[names[0]].is_cell else 'object', dtype)

    def _unasked(self):
        """Add all columns as the fields that `field_name` says; `notes` say what they are called

        Columns of kind 'null' are left out, and those that `chosen` leaves out. `notes` say this, too."""
        rest = {name:kind for name,kind in self.types.items() if name!=self.split and name not in self.chosen}
        types = {name:kind for name,kind in rest.items() if kind.kind!='null'}
        self.notes += [f'column {name!r} is left out' for name,field in self.chosen.items() if field is None]
        self.notes += [f'column {name!r} is left out: it has no values' for name in rest if name not in types]
        formats = {name:self._format(name, kind) for name,kind in types.items()}
        kinds = {name:self._main_kind(name, kind, formats[name]) for name,kind in types.items()}
        main = set() if self.keeps_names else main_columns(kinds)
        taken = {name:field for name,field in self.chosen.items() if field is not None}
        for name in sorted(types, key=lambda name: (name not in main, name=='text')):
            taken[name] = self._unasked_name(name, types[name], formats[name], name in main, taken.values())
        names = [name for name in self.types if name in taken]
        renamed = [f'{name} -> {taken[name]}' for name in names if str(name)!=taken[name]]
        if renamed: self.notes.append(f"columns are stored as fields: {', '.join(renamed)}")
        for name in names:
            kind,format = self.types[name],formats.get(name)
            self._add(name, taken[name], format if format!='img' and format==taken[name].rsplit('.')[-1] else None)
            if kind.is_label and kind.vocab: self.row_vocab[kind.field or clean_name(name)] = list(kind.vocab)

    def _main_kind(self, name, kind, format):
        "What column `name` is to `main_columns`; `format`: from `_format`"
        if format: return 'image'
        return {'code_lists':'labels', 'codes':'cls'}.get(kind.kind) or ('label' if kind.can_be_label else None)

    def _unasked_name(self, name, kind, images, is_main, taken):
        "The name of the field of column `name`; `images`: from `_format`"
        named = clean_name(name)
        codec = get_codec(named)
        keeps = self.keeps_names and not images and (codec is None or codec.name!='crc' and kind.fits(codec))
        field = named if keeps else field_name(name, kind, images or kind.codec, is_main, taken)
        codec = get_codec(field)
        if codec is None or images==codec.name or self._holds(name, codec): return field
        return field+('.img' if images else '.bin')

    def _holds(self, name, codec):
        "Can `codec` read the bytes of the first row that has some? True if no row has, or for a codec of numbers"
        value = next((row[name] for row in self.rows if isinstance(row[name], bytes)), None)
        if value is None or codec.dtype is not None: return True
        try: codec.check(value)
        except Exception: return False
        return True

    def _format(self, name, kind):
        """`jpg`, `png` or `webp` if all values in the first rows of a column are images of this format, else `img`

        `None` if a value is no image, or if there are no values. If `kind.field` is set, all values are taken for
        images, and without values it is the result."""
        if kind.kind not in ('bytes','file','object'): return None
        found = {_format_of(row[name]) for row in self.rows if not is_missing(row[name])}
        if kind.field: found = {o or 'img' for o in found}
        if not found: return kind.field
        return None if None in found else found.pop() if len(found)==1 else 'img'

    def _add(self, name, field, format=None, asked=False):
        """Add a `Column` to `columns`, and what is known of its field to `codecs` and `vocab`

        `name` may be a tuple of columns. `format` and `asked` are attributes of `Column`."""
        o,several = self.options,isinstance(name, tuple) and name not in self.types
        codec = get_codec(field)
        kind = self._type_of_several(name, codec) if several else self.types[name]
        delim = o.label_delim if codec is not None and codec.name=='labels' else None
        names = name if several else (name,)
        # a field of texts or of files has the cells of a CSV file as they are, and that of a number reads the number
        is_typed = codec is None or codec.name in ('cls','labels','json','npy','npz') or not asked and codec.name!='txt'
        cells = {o:self.types[o].dtype for o in names if self.types[o].is_cell and self.types[o].kind=='number'}
        if delim or not is_typed: cells = None
        if kind.is_cell and not cells: kind = ColumnType('cell')
        self.columns.append(Column(name, field, kind, delim, format, asked, several, cells))
        if codec is None and kind.codec and not several: self.codecs[field] = kind.codec
        is_label = kind.codec in ('cls','labels') if codec is None else codec.name in ('cls','labels')
        if is_label and kind.vocab and not delim: self.vocab[field] = list(kind.vocab)

    def _advise(self):
        "Add notes on columns that seem to be names of image files or labels, and are stored as they are"
        has_label = any((self.codecs.get(column.field) or column.field.rsplit('.')[-1]) in ('cls','labels')
                        for column in self.columns)
        for column in self.columns:
            values = [row[column.name] for row in self.rows]
            paths = [v for v in values if isinstance(v, (str,os.PathLike)) and image_field(str(v)) is not None]
            if column.field.split('.')[-1]=='txt' and paths and len(paths)==len(values):
                self.notes.append(f'column {column.name!r} names image files and is stored as text: '
                                  f'fn_col={column.name!r}, with folder=, reads the files')
            if not has_label and str(column.name).lower() in _LABEL_NAMES and column.type.kind!='array':
                self.notes.append(f'column {column.name!r} is stored as it is: label_col={column.name!r} makes it the '
                                  'label, and then fields={column: field} names the other columns')

class Planned:
    "What a source takes from its `plan`, a `TablePlan`, and its `options`"
    @property
    def gives_fields(self)->bool:
        "Does `fn` get fields, and not rows?"
        return self.options.asked
    @property
    def load(self): return self.plan.load if self.gives_fields else unchanged
    @property
    def opens_images(self): return self.gives_fields
    @property
    def as_is(self): return self.plan
    @property
    def vocab(self): return (self.plan.vocab if self.gives_fields else self.plan.row_vocab) or None

def _format_of(value):
    """The field for an image file, as `image_format`: by its bytes, alone or in a dict of `bytes` and `path`

    Without bytes, by the ending of `path`. `None` if it is no image."""
    if isinstance(value, bytes): return image_format(value)
    if not isinstance(value, dict): return None
    if value.get('bytes') is not None: return image_format(value['bytes'])
    return image_field(value.get('path') or '')

_LABEL_NAMES = 'label','labels','class','target','category','y'

_SPLIT_NAMES = {**dict.fromkeys(('true','1','1.0','val','validation'), 'valid'),
                **dict.fromkeys(('false','0','0.0'), 'train')}

def split_of(
    value # Of a column that says which split a row belongs to
)->str: # `valid` for true values, `val` and `validation`, `train` for false values, and any other text is a name
    "The split that `value` means; raises `ValueError` if it is missing or blank, or neither a text nor 0 or 1"
    if isinstance(value, np.generic): value = value.item()
    if is_missing(value) or _is_nan(value) or isinstance(value, str) and not value.strip():
        raise ValueError(f'nothing there ({value!r})')
    if isinstance(value, str): return _SPLIT_NAMES.get(value.strip().lower(), value)
    if not isinstance(value, (int,float,Decimal)) or value not in (0, 1):
        raise ValueError(f'{value!r} is neither true nor false, nor the name of a split')
    return 'valid' if value else 'train'

class SplitNames:
    "Tells the split of each row by a column, and remembers which splits there are"
    def __init__(self,
        column:str # Name of the column, for messages
    ): self.column,self.split_of_value = column,{}

    def __call__(self,
        value, # Of the column, in one row
        row:str # The row, for messages
    )->str:
        "The split of a row; raises `ValueError` if it has none, or for more than 100 different values so far"
        try: return self.split_of_value[value]
        except (KeyError,TypeError): pass   # `TypeError`: a list, which names no split
        try: split = split_of(value)
        except ValueError as e: raise ValueError(f'{row}: column {self.column!r}: {e}') from None
        self.split_of_value[value] = split
        if len(self.split_of_value)>100:
            raise ValueError(f"column {self.column!r} has more than 100 values, such as "
                             f"{', '.join(map(repr, list(self.split_of_value)[:3]))}: does it name splits?")
        return split

    @property
    def names(self)->list:
        "The splits so far in their usual order: `train`, `valid`, `test`, then others, sorted"
        usual = {'train':0, 'valid':1, 'test':2}
        return sorted(set(self.split_of_value.values()), key=lambda name: (usual.get(name, 3), name))
