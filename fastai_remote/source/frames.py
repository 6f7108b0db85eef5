"""Sources of the rows of tables: pandas, polars, Arrow and Parquet

Docs: page `source/frames`"""
import hashlib, json, os, re
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from uuid import uuid4

import numpy as np
from fastcore.foundation import L

from .base import evenly_spaced, IndexedSource, LazyPart, named_rows, Recent, require, SampleStream, shown_path
from .base import stable_repr
from .columns import are_whole, ColumnOptions, ColumnType, object_type, plain_type, Planned, SplitNames, TablePlan
from .csv_files import CSV_EXTENSIONS, csv_samples
from .files import list_files
from ..store.connection import secret_texts, without_secrets

# --- Tables in memory

# A table has rows by number, a `ColumnType` for each column, and something that identifies its data. From these,
# `Table` derives what a source has: fields, vocabulary, splits. The leading process sends rows to the workers, and
# files that columns name are read there.

_PIECE,_BLOCK = 1<<16,256   # rows that are looked at together; rows among which one of a split is searched

class Table(Planned, IndexedSource):
    "A source of the rows of a table, read by number. A subclass defines `_types` and `_rows`"
    keeps_names = False # As of `TablePlan`
    looks = 100 # Rows by which tables without a `_digest` are told apart
    _digest = None # A hash of all rows, as text
    def __init__(self,
        table, # As the library has it
        options:ColumnOptions
    ):
        self.table,self.options = table,options
        self.types = self._types()

    def _types(self)->dict: raise NotImplementedError   # `{name of a column: ColumnType}`
    def _rows(self, numbers, names)->list: raise NotImplementedError   # rows as dicts; `names`: `None` for all columns
    def _values(self, name, start, stop)->list:   # of a column, of rows `start` to `stop`
        return [row[name] for row in self._rows(np.arange(start, stop), [name])]
    def __len__(self): return len(self.table)

    @cached_property
    def plan(self)->TablePlan:
        "Which fields the samples have"
        rows = self._rows(np.arange(min(20, len(self))), None)
        if self.keeps_names: return TablePlan(self.types, rows, self.options, keeps_names=True)
        return TablePlan(self.types, rows, self.options, self._decide)

    def _decide(self, name, kind):
        "The `ColumnType` of column `name` by all of its values, where `kind`, that of the library, does not tell"
        if kind.kind=='object': return object_type(self._pieces(name))
        if name in ('label','cls') and kind.kind=='number' and not kind.can_be_label and kind.dtype.startswith('float'):
            return replace(kind, is_whole=are_whole(self._pieces(name)))
        return kind

    def _pieces(self, name):
        "Yields the values of a column in lists, so that there is never a Python object for each row"
        for start in range(0, len(self), _PIECE): yield self._values(name, start, min(start+_PIECE, len(self)))

    def _coded_pieces(self, name):
        "Yields `(different, codes)` for each of `_pieces`: its different values; for each value its position in them"
        for values in self._pieces(name):
            try: positions = {value:k for k,value in enumerate(dict.fromkeys(values))}
            except TypeError: yield values,np.arange(len(values))   # there is a list among them, which names no split
            else: yield list(positions),np.fromiter(map(positions.__getitem__, values), np.intp, len(values))

    @cached_property
    def _split_codes(self):
        """Returns `(names, codes)`: names of the splits; for each row the position of its split in them

        `codes` is `uint8`, of shape (blocks, 256), and ends with 255 after the last row."""
        splits,found,parts,n = SplitNames(self.plan.split),{},[],0
        for different,codes in self._coded_pieces(splits.column):
            split_of_code = []
            for k,value in enumerate(different):
                [(row,_)] = self._part(np.array([n+(codes==k).argmax()]), [splits.column])
                split_of_code.append(found.setdefault(splits(value, row), len(found)))
            parts.append(np.array(split_of_code, np.uint8)[codes])
            n += len(codes)
        codes = np.concatenate([*parts, np.full(-n%_BLOCK, 255, np.uint8)]).reshape(-1, _BLOCK)
        order = np.array([*map(splits.names.index, found), *[255]*(256-len(found))], np.uint8)
        return splits.names,order[codes]

    @cached_property
    def _before(self):
        "How many rows of each split come before each block of rows, and before the end: shape (splits, blocks+1)"
        names,codes = self._split_codes
        counts = np.array([(codes==s).sum(1) for s in range(len(names))], np.int64).reshape(len(names), -1)
        return np.pad(counts.cumsum(1), ((0,0),(1,0)))

    def _numbers_of(self, numbers):
        "The row of each of the samples `numbers`, which are rows sorted by split; in memory there is a byte for a row"
        if self.options.valid_col is None: return numbers
        starts = np.array([start for start,_ in self.splits.values()])
        split = starts.searchsorted(numbers, side='right')-1
        ranks,block = numbers-starts[split],np.zeros(len(numbers), np.int64)
        for s in np.unique(split).tolist():
            block[split==s] = self._before[s,1:].searchsorted(ranks[split==s], side='right')
        counts = (self._split_codes[1][block]==split[:,None]).cumsum(1, np.uint16)   # within a block
        return block*_BLOCK+(counts>(ranks-self._before[split,block])[:,None]).argmax(1)

    @cached_property
    def splits(self):
        if self.options.valid_col is None: return None
        ends = [0,*self._before[:,-1].cumsum().tolist()]
        return {name:[start,stop] for name,start,stop in zip(self._split_codes[0], ends, ends[1:])}

    def read(self, numbers):
        names = self.plan.names if self.options.asked else None
        return self._part(self._numbers_of(np.asarray(numbers, np.int64)), names)

    def _part(self, numbers, names):
        "Iterable of `(name, row)` of the rows with these numbers, and the columns `names`, as of `_rows`"
        return named_rows(partial(self._rows, names=names), numbers, numbers)

    @property
    def is_identified(self): return self._digest is not None
    def _stamp(self):
        "Something whose `repr` identifies the data: `_digest`, or a hash of some rows"
        if self.is_identified: return self._digest
        return stable_repr(self._rows(evenly_spaced(len(self), self.looks), None))   # of a list, it is a hash
    def fingerprint(self): return len(self),list(map(str, self.types)),self._stamp(),self.options
    def __getitem__(self, i): return self._rows(np.array([range(len(self))[i]]), None)[0]
    def __repr__(self): return f"table_samples({len(self):,} rows of {', '.join(map(str, self.types))})"

class _PandasTable(Table):
    "A source of the rows of a DataFrame of pandas"
    def _types(self):
        names = list(self.table.columns)
        twice = [name for name in set(names) if names.count(name)>1]
        if twice: raise ValueError(f'two columns are called {twice[0]!r}')
        return {name:_pandas_type(dtype) for name,dtype in zip(names, self.table.dtypes)}
    def _rows(self, numbers, names):
        table = self.table.iloc[numbers]
        if names is not None: table = table[names]
        rows = table.to_dict('records')
        for name,dtype in table.dtypes.items():
            arrow = getattr(dtype, 'pyarrow_dtype', None)
            if arrow is None or 'time64[ns]' not in str(arrow): continue   # of which pandas drops the nanoseconds
            import pyarrow as pa
            values = pa.table({str(name):pa.array(table[name].array, arrow)})
            for row,value in zip(rows, arrow_rows(values, np.arange(len(table)))): row[name] = value[str(name)]
        return rows
    def _values(self, name, start, stop): return self.table[name].iloc[start:stop].tolist()

    @cached_property
    def _digest(self):
        "A hash of all rows, as text; `None` if there are objects that are not plain data, such as lists and images"
        from pandas.api.types import infer_dtype
        from pandas.util import hash_pandas_object
        kinds = {infer_dtype(self.table[name]) for name,dtype in self.table.dtypes.items() if dtype==object}
        if kinds-_PLAIN_KINDS: return None
        hashed,part = hashlib.sha256(),1<<18
        for k in range(0, len(self), part):
            hashed.update(hash_pandas_object(self.table.iloc[k:k+part], index=False).to_numpy().tobytes())
        return hashed.hexdigest()

# Of columns of objects, as pandas calls them; of others it would hash the `repr`, with memory addresses
_PLAIN_KINDS = {'string','bytes','floating','integer','mixed-integer-float','decimal','boolean','date','datetime',
                'datetime64','time','timedelta','timedelta64','empty'}

def _pandas_type(dtype):
    "The `ColumnType` of a column of pandas, by its dtype"
    if type(dtype).__name__=='CategoricalDtype':
        labels = dtype.categories.tolist()
        kind = 'text' if all(isinstance(o, str) for o in labels) else 'number'
        if kind=='number' and not all(isinstance(o, int) for o in labels): return ColumnType('object')
        return ColumnType(kind, 'int64', vocab=labels, is_label=True)
    if hasattr(dtype, 'pyarrow_dtype'): return arrow_type(dtype.pyarrow_dtype)
    if type(dtype).__name__=='SparseDtype': dtype = dtype.subtype
    return plain_type(str(dtype)) or ColumnType('object')   # of numbers that may be missing, it is such as `Int64`

class _PolarsTable(Table):
    "A source of the rows of a DataFrame of polars"
    def _types(self): return {name:_polars_type(dtype) for name,dtype in self.table.schema.items()}
    def _rows(self, numbers, names):
        table = self.table[numbers] if names is None else self.table.select(names)[numbers]
        return polars_rows(table)
    def _values(self, name, start, stop): return self.table[name][start:stop].to_list()
    @cached_property
    def _digest(self):
        "A hash of all rows, as text; `None` if polars has no hash of their types, such as objects"
        if 'Object' in map(str, self.table.dtypes): return None   # polars 1.0 would wait for itself
        try: hashes = self.table.hash_rows(seed=0).to_numpy()
        except Exception: return None
        hashed = hashlib.sha256(repr(self.table.schema).encode())   # of an `Enum`, polars hashes the codes
        hashed.update(hashes.tobytes())
        return hashed.hexdigest()

def polars_rows(table)->list:
    """The rows of a DataFrame of polars as dicts; times in nanoseconds, which Python does not have, as text

    These are all values of `Time`, and of `Datetime` whose unit is nanoseconds. Raises `TypeError` for columns of lists
    or structs with these types."""
    for name,dtype in table.schema.items():
        text = str(dtype)
        if text=='Time' or text.startswith('Datetime') and "time_unit='ns'" in text:
            texts = table[name].dt.to_string('%H:%M:%S%.9f' if text=='Time' else 'iso:strict').to_list()
            table = table.with_columns(type(table[name])(name, [o and time_text(o) for o in texts]))
        elif re.search(r"\bTime\b|Datetime\(time_unit='ns'", text): raise TypeError(_inner_nanoseconds(name, text))
    return table.rows(named=True)

def time_text(
    text:str # A time with nine digits of nanoseconds, maybe with a date and a zone, as Arrow or polars writes it
)->str:
    "`text` as Python and pandas write it: with six digits of a second or none, and with nanoseconds all nine"
    text = re.sub(r'[.]0{9}|(?<=[.]\d{6})000', '', text.replace(' ', 'T', 1).replace('Z', '+00:00'))
    return re.sub(r'([+-]\d\d)(\d\d)$', r'\1:\2', text)

def _inner_nanoseconds(name, type):
    return (f'column {name!r} has the type {type}: nanoseconds in lists and structs are not kept: make texts or '
            'microseconds of them')

def _polars_type(dtype):
    "The `ColumnType` of a column of polars, by its dtype"
    name = str(dtype).split('(')[0]
    if name=='Enum': return ColumnType('text', vocab=list(dtype.categories), is_label=True)
    if name=='Categorical': return ColumnType('text', is_label=True)   # its list has the labels of other tables, too
    if name in ('Int128','UInt128'): return ColumnType('object')   # NumPy has no such type; each value decides
    if name=='Array':
        inner,shape = dtype,()
        while str(inner).startswith('Array'): inner,shape = inner.inner,(*shape, inner.size)
        number = _polars_type(inner)
        return ColumnType('array', number.dtype, tuple(dtype.shape)) if number.kind=='number' else ColumnType('list')
    if name=='List': return ColumnType('labels' if _polars_type(dtype.inner).kind=='text' else 'list')
    if name=='Struct': return ColumnType('file' if {f.name for f in dtype.fields}=={'bytes','path'} else 'list')
    return plain_type(name) or ColumnType('object')

def _n_bytes(table):
    "Bytes of a table of Arrow; before version 26, Arrow cannot tell those of a slice with texts as views"
    try: return table.nbytes
    except TypeError: return table.get_total_buffer_size()

class _ArrowTable(Table):
    "A source of the rows of a table of Arrow in memory"
    @property
    def schema(self): return self.table.schema
    def _columns(self, name): return [self.table[name]]   # the parts of a column, `ChunkedArray`s
    def _types(self): return arrow_types(self.schema, self._columns)
    def _rows(self, numbers, names):
        return arrow_rows(self.table if names is None else self.table.select(names), numbers)
    def _stamp(self): return _n_bytes(self.table),self.schema.to_string(),super()._stamp()

    def _slices(self, name):
        for column in self._columns(name):
            for start in range(0, len(column), _PIECE): yield column.slice(start, _PIECE)
    def _pieces(self, name): return (values.to_pylist() for values in self._slices(name))
    def _coded_pieces(self, name):
        if not _has_codes(self.schema.field(name).type): return super()._coded_pieces(name)
        encoded = (o.combine_chunks().dictionary_encode(null_encoding='encode') for o in self._slices(name))
        return ((o.dictionary.to_pylist(), o.indices.to_numpy()) for o in encoded)

def _has_codes(t):
    "Does Arrow encode columns of type `t` as a dictionary, with what is missing? Not so texts as views"
    import pyarrow as pa
    return any(is_type(t) for is_type in (pa.types.is_boolean, pa.types.is_integer, pa.types.is_string,
                                          pa.types.is_large_string))

def arrow_rows(table, numbers)->list:
    """Rows `numbers` of a table or `RecordBatch` of Arrow as dicts

    Times of the day and timestamps in nanoseconds, which Python does not have, become text. In lists, structs and
    dictionaries of Arrow, such timestamps are those of pandas, and such times of the day raise `TypeError`."""
    import pyarrow as pa
    if isinstance(table, pa.RecordBatch): table = pa.Table.from_batches([table])
    if not table.num_columns: return [{} for _ in numbers]
    values = [_arrow_values(field, column, np.asarray(numbers)) for field,column in zip(table.schema, table.columns)]
    return [dict(zip(table.column_names, row)) for row in zip(*values)]

def _arrow_values(field, column, numbers):
    "List of the values of a column of Arrow in the rows `numbers`; raises `TypeError` as `arrow_rows` does"
    import pyarrow as pa
    is_time = pa.types.is_time64(field.type)
    if not is_time and 'time64[ns]' in str(field.type): raise TypeError(_inner_nanoseconds(field.name, field.type))
    try: column = column.take(pa.array(numbers, pa.int64()))
    except pa.ArrowNotImplementedError:   # of views, and of what is encoded by runs
        return [column[i].as_py() for i in numbers.tolist()]
    if not (is_time or pa.types.is_timestamp(field.type)) or field.type.unit!='ns': return column.to_pylist()
    texts = column.cast(pa.string()).to_pylist()
    return [text and time_text(text) for text in texts]

def arrow_types(
    schema, # Of Arrow
    # Called with the name of a column of categories, returns its parts, `ChunkedArray`s; default: labels are not known
    columns=lambda name: (),
)->dict: # `{column: ColumnType}`
    """The `ColumnType` of each column; class names and images of HuggingFace datasets by their metadata

    Raises `ValueError` if two columns have one name, and `TypeError` for permuted tensors."""
    twice = [name for name in schema.names if schema.names.count(name)>1]
    if twice: raise ValueError(f'two columns are called {twice[0]!r}')
    features,types = _features(schema),{}
    for field in schema:
        permutation = list(getattr(field.type, 'permutation', None) or ())
        if permutation!=sorted(permutation):
            raise TypeError(f'column {field.name!r} is a tensor with permuted dimensions ({field.type}): give its rows '
                            'as arrays')
        kind = _feature_type(features.get(field.name)) or arrow_type(field.type)
        if kind.is_label and kind.vocab is None:
            dictionaries = (chunk.dictionary.to_pylist() for part in columns(field.name) for chunk in part.chunks)
            kind.vocab = [label for label in dict.fromkeys(chain.from_iterable(dictionaries)) if label is not None]
        types[field.name] = kind
    for feature,name in (('ClassLabel','cls'), ('Image','img')):   # the only one of its kind has the usual name
        found = [column for column,o in features.items() if isinstance(o, dict) and o.get('_type')==feature]
        if len(found)==1 and found[0] in types and name not in types: types[found[0]].field = name
    return types

def _features(schema):
    "`{column: feature}` of a HuggingFace dataset, from the metadata of Parquet and Arrow files; empty if there is none"
    try: return json.loads((schema.metadata or {})[b'huggingface'])['info']['features'] or {}
    except (KeyError,ValueError,TypeError): return {}

def _feature_type(feature)->ColumnType:
    "The `ColumnType` of a feature, a dict from `_features`, that Arrow's type does not express; otherwise `None`"
    if not isinstance(feature, dict): return None
    kind,names = feature.get('_type'),feature.get('names')
    if kind=='ClassLabel' and names: return ColumnType('codes', vocab=list(names), is_label=True)
    inner = feature.get('feature')
    is_list = kind in ('Sequence','List') and isinstance(inner, dict)
    if is_list and inner.get('_type')=='ClassLabel' and inner.get('names'):
        return ColumnType('code_lists', vocab=list(inner['names']), is_label=True)
    if kind in ('Array2D','Array3D','Array4D','Array5D') and None not in feature['shape']:
        return ColumnType('array', feature['dtype'], tuple(feature['shape']))

def arrow_type(t)->ColumnType:
    "The `ColumnType` of a type of Arrow"
    import pyarrow as pa
    is_ = pa.types
    if isinstance(t, pa.FixedShapeTensorType): return ColumnType('array', str(t.value_type), tuple(t.shape))
    if isinstance(t, pa.BaseExtensionType):
        return ColumnType('text') if t.extension_name=='arrow.uuid' else arrow_type(t.storage_type)
    if is_.is_run_end_encoded(t):
        kind = arrow_type(t.value_type)
        return ColumnType('text') if kind.is_label else kind   # its labels are in no list
    if is_.is_dictionary(t):
        if _is_text(t.value_type) or is_.is_integer(t.value_type): return ColumnType('text', is_label=True)
        return ColumnType('object')
    if is_.is_struct(t) and {t.field(k).name for k in range(t.num_fields)}=={'bytes','path'}: return ColumnType('file')
    if is_.is_fixed_size_list(t):
        inner = arrow_type(t.value_type)
        if inner.kind=='number': return ColumnType('array', inner.dtype, (t.list_size,))
        if inner.kind=='array': return ColumnType('array', inner.dtype, (t.list_size, *inner.shape))
    if is_.is_list(t) or is_.is_large_list(t) or is_.is_list_view(t) or is_.is_large_list_view(t):
        return ColumnType('labels' if _is_text(t.value_type) else 'list', arrow_type(t.value_type).dtype)
    return plain_type(str(t)) or ColumnType('list')

def _is_text(t): return str(t) in ('string','large_string','string_view')

# --- Parquet

# A Parquet file consists of row groups, and its footer says how many rows each of them has. So samples have numbers
# without anything being read. The order of the row groups is shuffled, and the rows of a row group, or of a few small
# ones, are shuffled together. A worker reads the row groups of its samples and keeps the last ones.

# A footer holds the smallest and the largest value of each column in each row group, which may be whole images
_footers = Recent(lambda fragment: fragment.metadata.serialized_size, 4_000_000, 1)
_row_groups = Recent(_n_bytes, 64_000_000, 2)

@dataclass(repr=False, eq=False)
class _ParquetFile:
    "A file of a source, which is opened when it is read"
    source:str # Names the source in this process and in its workers
    format:object # Of `pyarrow.dataset`
    filesystem:object # Of Arrow
    path:str # In `filesystem`
    partition:object # The values of columns that its folder names, an expression of Arrow
    schema:object # Of all files of the source

    def row_group(self, index, names):
        """Row group `index` as a table of Arrow with the columns `names`, a list

        Raises `ValueError` if the file is replaced meanwhile."""
        key = self.source,self.path,self._stamp()
        read = partial(self._read, key, index, names)
        return _row_groups.get((*key, index, *names), read)

    def _read(self, key, index, names):
        fragment = _footers.get(key, self._fragment).subset(row_group_ids=[index])
        table = fragment.to_table(schema=self.schema, columns=names, use_threads=False)
        if self._stamp()==key[-1]: return table
        raise ValueError(f'{self.path} was replaced while it was read')

    def _fragment(self):
        fragment = self.format.make_fragment(self.path, self.filesystem, self.partition)
        fragment.ensure_complete_metadata()
        return fragment

    def _stamp(self):
        info = self.filesystem.get_file_info(self.path)
        return info.size,info.mtime_ns

def _rows_of_groups(groups, names, which, ranks):
    """A list of `(name, row)` of some samples in row groups of Parquet files, for a `LazyPart`

    `groups` is a list of `(_ParquetFile, number of a row group in it, number of the row group's first row in it)`, and
    `names` a list of columns. `which` is the position in `groups` of each sample, and `ranks` its number in the row
    group, both of shape (n,)."""
    rows = [None]*len(which)
    for k in np.unique(which).tolist():
        file,group,first = groups[k]
        here = np.flatnonzero(which==k)   # positions in `which` and in the result
        found = arrow_rows(file.row_group(group, names), ranks[here])
        for i,number,row in zip(here.tolist(), ranks[here].tolist(), found):
            rows[i] = f'{os.path.basename(file.path)}: row {first+number}',row
    return rows

def _common_schema(dataset, fragments):
    "The schema of Arrow that all files, `fragments`, fit; raises `ValueError` if there is none"
    import pyarrow as pa
    schemas = [dataset.schema]
    for fragment in fragments:
        if not fragment.physical_schema.equals(schemas[-1]): schemas.append(fragment.physical_schema)
    try: return pa.unify_schemas(schemas, promote_options='permissive').with_metadata(dataset.schema.metadata)
    except (pa.ArrowInvalid,pa.ArrowTypeError) as e:
        raise ValueError(f'{fragments[0].path} and other files have columns that differ: {e}') from None

class _ParquetTable(_ArrowTable):
    """The rows of Parquet files, of which a worker reads the row groups that its samples are in

    The leading process reads the footers, the first rows, for `plan`, columns of categories, for their labels, and a
    split column."""
    def __init__(self,
        dataset, # Of `pyarrow.dataset`, with the format Parquet
        options:ColumnOptions
    ):
        self.filesystem = dataset.filesystem
        fragments = sorted(dataset.get_fragments(), key=lambda o: o.path)
        schema = _common_schema(dataset, fragments)
        source,self.files,self.groups,sizes = uuid4().hex,[],[],[]   # groups: as `_rows_of_groups` takes them
        for fragment in fragments:
            file = _ParquetFile(source, dataset.format, dataset.filesystem, fragment.path,
                                fragment.partition_expression, schema)
            first = 0
            for k in range(fragment.num_row_groups):
                self.groups.append((file, k, first))
                sizes.append(fragment.metadata.row_group(k).num_rows)
                first += sizes[-1]
            self.files.append(file)
        self.ends = np.array(sizes, np.int64).cumsum()
        self.block = max(1, int(np.median(sizes))) if sizes else 1
        self.interleave = max(1, min(16, 2048//self.block))   # so that a chunk reads few row groups
        super().__init__(schema.empty_table(), options)

    def __len__(self): return int(self.ends[-1]) if len(self.ends) else 0
    def _columns(self, name): return (file.row_group(k, [name]).column(0) for file,k,_ in self.groups)

    def _part(self, rows, names):
        group = self.ends.searchsorted(rows, side='right')
        ranks = rows-np.append(0, self.ends)[group]
        used,which = np.unique(group, return_inverse=True)
        groups = [self.groups[k] for k in used.tolist()]
        read = partial(_rows_of_groups, groups, names or self.schema.names)
        return LazyPart(read, which.astype(np.int32), ranks)

    def _rows(self, numbers, names):
        return [row for _,row in self._part(np.asarray(numbers, np.int64), names)]

    is_identified = True
    def _stamp(self):
        infos = self.filesystem.get_file_info([file.path for file in self.files])
        return [(o.base_name, o.size, o.mtime_ns) for o in infos]
    def __repr__(self): return f'table_samples({len(self):,} rows in {len(self.files):,} Parquet files)'

# --- Streams

# A reader of Arrow or a lazy frame of polars has no rows by number. It is read in its order, batch by batch.

class _RowStream(Planned, SampleStream):
    """Rows that arrive in batches: a reader of Arrow, a lazy frame of polars, files that are read from front to back

    Raises `ValueError` if the options have a `valid_col`."""
    chunk_size = 256
    def __init__(self,
        batches, # Called without arguments, returns an iterator over parts of the table
        schema_types, # Called with a part, returns `{column: ColumnType}`
        rows, # Called with a part, returns its rows as dicts
        options:ColumnOptions,
        stamp, # Whose `repr` identifies the data
        once:bool=False, # Can it be read only once?
    ):
        if options.valid_col is not None:
            raise ValueError('valid_col= needs a table that can be read by number: write the rows to a Parquet file '
                             'and give its path')
        self.batches,self.schema_types,self.rows,self.options,self.once = batches,schema_types,rows,options,once
        self.stamp = stamp

    @cached_property
    def plan(self)->TablePlan:
        "Which fields the samples have, by the first batch with rows; raises `ValueError` if there is none"
        first,_ = self._opened
        return TablePlan(self.schema_types(first), self.rows(first[:20]), self.options)

    @cached_property
    def _opened(self):
        "`(first, rest)`: the first batch with rows, an iterator over the others; raises `ValueError` if it is empty"
        batches = iter(self.batches())
        for first in batches:
            if len(first): return first,batches
        raise ValueError('the source is empty')

    def _raw_samples(self):
        "Yields `(name, row)` for all rows; rows are dicts of the columns that are asked for, or of all columns"
        names,i = self.plan.names,0
        first,rest = self._opened
        del self._opened   # the next reading begins anew
        for batch in chain([first], rest):
            for row in self.rows(batch):
                yield f'row {i}',{name:row[name] for name in names} if self.options.asked else row
                i += 1

    is_identified = False
    def fingerprint(self): return self.stamp,self.options
    def __repr__(self): return 'table_samples(a stream of rows)'

# --- table_samples

def _is_of(o, library, *names):
    "Is `o` an object of one of these classes of a library? The library is not imported"
    return any(cls.__module__.split('.')[0]==library and cls.__name__ in names for cls in type(o).__mro__)

def is_table(o)->bool:
    """Is `o` a DataFrame of pandas, a DataFrame or LazyFrame of polars, or a table or the like of Arrow?

    Of Arrow it may be a table, a batch, a reader of batches, a dataset, an array, or a `ParquetFile`. `table_samples`
    refuses the last two with a `TypeError` that says what to give."""
    return (hasattr(o, 'iloc') and hasattr(o, 'columns') or _is_of(o, 'polars', 'DataFrame', 'LazyFrame') or
            _is_of(o, 'pyarrow', 'Table', 'RecordBatch', 'RecordBatchReader', 'Dataset', 'ParquetFile', 'Array',
                   'ChunkedArray'))

_PARQUET = '.parquet','.pq'
_ARROW = '.arrow','.feather','.ipc'

def is_table_path(path)->bool:
    "Is `path` a file that `table_samples` can read, by its name?"
    return str(path).lower().endswith(_PARQUET+CSV_EXTENSIONS+_ARROW)

def table_samples(
    # A DataFrame of pandas or polars, or a LazyFrame; a table, reader or dataset of Arrow; Parquet, Arrow or CSV files:
    # a path, a list of paths, or a folder of Parquet files
    table,
    fn_col:int|str=None, # Column with names of image files
    # Column with labels; several columns: an array of their numbers, `target.npy`, or a list of labels, `labels`
    label_col:int|str|list=None,
    label_delim:str=None, # Separator of several labels in one cell
    folder:str|Path='', # Folder of the files that columns name
    suff:str='', # What to append to their names, such as '.jpg'
    fields:dict=None, # `{column: field}`, such as `{'path':'jpg', 'age':'age.f4'}`; other columns are left out
    valid_col:int|str=None, # Column that is true for the validation set, or names the split of each row
): # An `IndexedSource`; a `StreamedSource` for a reader, a LazyFrame, and files and datasets other than Parquet
    """A source of the rows of a table; without `fields`, `fn_col` and `label_col` each column is a field

    Then `valid_col`, and columns of type null, are left out. Text in a field of files, such as `jpg` or `npy`, is the
    path of a file, which is read. Categories bring their labels as vocabulary. A row in which a value is missing is a
    failed sample. Parquet files are read by the workers, one row group at a time. Raises `TypeError`, `ValueError`,
    also for `valid_col` with a stream that is not of CSV files, `FileNotFoundError`, and `ImportError` for files that
    need pyarrow."""
    options = ColumnOptions(fields, fn_col, label_col, label_delim, folder, suff, valid_col)
    if isinstance(table, (str,Path)) or _is_list_of_paths(table): return _from_files(table, options)
    if _is_of(table, 'polars', 'DataFrame'): return _PolarsTable(table, options)
    if _is_of(table, 'polars', 'LazyFrame'): return _from_lazy_frame(table, options)
    if _is_of(table, 'pyarrow', 'Array', 'ChunkedArray'):
        raise TypeError(f"{type(table).__name__}: a column without a name: give pyarrow.table({{'cls': column}}), or "
                        'another field')
    if hasattr(table, 'iloc') and hasattr(table, 'columns'): return _PandasTable(table, options)
    if not is_table(table): raise TypeError(f'{type(table).__name__}: not a table, a path or a list of paths')
    return _from_arrow(table, options)

def _is_list_of_paths(o): return isinstance(o, (list,tuple,L)) and len(o) and all(isinstance(p, (str,Path)) for p in o)

def _from_arrow(table, options):
    "The source of a table, batch, reader or dataset of Arrow; raises `TypeError` for a `ParquetFile`"
    import pyarrow as pa
    if isinstance(table, pa.RecordBatch): table = pa.Table.from_batches([table])
    if isinstance(table, pa.Table): return _ArrowTable(table, options)
    if isinstance(table, pa.RecordBatchReader):
        return _arrow_stream(lambda: table, options, table.schema.to_string(), once=True)
    if _is_of(table, 'pyarrow', 'ParquetFile'):
        raise TypeError('a ParquetFile is open in this process, and not in the workers: give the path of the file')
    if getattr(getattr(table, 'format', None), 'default_extname', '')=='parquet': return _ParquetTable(table, options)
    stamp = getattr(table, 'files', None),table.schema.to_string()
    return _arrow_stream(table.to_batches, options, stamp)

def _arrow_stream(batches, options, stamp, once=False):
    def types(batch): return arrow_types(batch.schema)   # other batches have other labels
    def rows(batch): return arrow_rows(batch, np.arange(len(batch)))
    return _RowStream(batches, types, rows, options, stamp, once)

def _from_lazy_frame(table, options):
    """The `_RowStream` of a LazyFrame; `options` is a `ColumnOptions`

    Raises `TypeError` if this version of polars cannot read it in parts, and `ValueError` if there is a `valid_col`."""
    if not hasattr(table, 'collect_batches'):
        raise TypeError('a LazyFrame of this version of polars cannot be read in parts: give .collect(), or the path '
                        'of .sink_parquet(path)')
    def types(batch): return {name:_polars_type(dtype) for name,dtype in batch.schema.items()}
    batches = partial(table.collect_batches, maintain_order=True, chunk_size=10_000)
    return _RowStream(batches, types, polars_rows, options, table.explain())

def _from_files(files, options):
    """The source of CSV, Parquet or Arrow files: a path, a URL, or a list of them, or a folder of Parquet files

    Raises `FileNotFoundError`, `ValueError`, `ImportError`, and for URLs what Arrow raises, without secrets."""
    first = str(files if isinstance(files, (str,Path)) else files[0])
    _check_one_kind([first] if isinstance(files, (str,Path)) else list(map(str, files)))
    if first.lower().endswith(CSV_EXTENSIONS):
        o = options
        return csv_samples(files, o.fn_col, o.label_col, o.label_delim, o.folder, o.suff, o.fields, o.valid_col)
    is_url = '://' in first
    if not is_url: require(first, Path(first).exists())
    if not is_url and not Path(first).is_dir() and not is_table_path(first):
        raise ValueError(f"{first}: not a table by its name: {', '.join(_PARQUET+CSV_EXTENSIONS+_ARROW)}")
    import_arrow(first)
    from pyarrow.dataset import dataset
    paths = list(map(str, list_files(files, _PARQUET))) if not is_url else files
    kind = 'feather' if first.lower().endswith(_ARROW) else 'parquet'
    try: return _from_arrow(dataset(paths, format=kind, partitioning='hive'), options)
    except Exception as e:
        if not is_url: raise
        urls = list(map(str, L(files)))
        secrets = [secret for url in urls for secret in secret_texts({}, url)]
        failure = without_secrets(e, [url for url in urls if shown_path(url)!=url]+secrets)
    raise failure

def _check_one_kind(paths):
    "Raise `ValueError` if some of `paths`, texts, are files of another kind than the first, by their names"
    def kind_of(path): return [path.lower().endswith(extensions) for extensions in (CSV_EXTENSIONS,_ARROW)]
    kind = kind_of(paths[0])
    other = next((path for path in paths if kind_of(path)!=kind), None)
    if other is not None:
        raise ValueError(f'{shown_path(paths[0])} and {shown_path(other)} are files of different kinds: give a list of '
                         'files of one kind')

def import_arrow(
    path # Of a file
):
    "Raises `ImportError`, which names `path`, if pyarrow is not installed"
    try: import pyarrow.dataset  # noqa: F401
    except ImportError as e:
        raise ImportError(f'{shown_path(path)}: pyarrow reads such files: pip install fastai_remote[tables]') from e
