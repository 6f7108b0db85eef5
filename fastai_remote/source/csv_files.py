"""A source of the rows of CSV files

Docs: page `source/csv_files`"""

# Nobody knows how many rows a CSV file has before its end is reached. So it is a stream: `stream(size)` gives the rows
# in parts, in their order. A compressed file is read in the same way. With `valid_col`, it is read once to find out
# which splits there are, and once more for each of them. Whether labels are numbers is also found out by reading all
# rows once, as one text among them makes texts of all.

import csv
from functools import cached_property
from itertools import islice
from pathlib import Path

from fastcore.basics import chunked

from .base import SampleStream, SplitChunk
from .columns import CellType, ColumnOptions, Planned, split_of, SplitNames, TablePlan
from .files import file_stamps, list_files, open_text

# --- CSV

# The arguments are those of fastai's `from_csv`: a column with the names of files, a column with labels. Without a
# column of names, each column is a field, and an `fn` gets the row itself, a dict of `str`.

CSV_EXTENSIONS = '.csv','.tsv','.csv.gz','.tsv.gz','.csv.xz','.tsv.xz'

class csv_samples(Planned, SampleStream):
    """A source of the rows of CSV files: the images that a column names, or the rows as dicts

    Without `fn_col`, `label_col` and `fields`, all columns but `valid_col` are fields, and `fn` gets `{column: text}`.
    Labels, and columns that become fields of their own type, are numbers, or true and false, if `pandas.read_csv` would
    read all cells of the column so: the files are read once to find out, in constant memory.
    `stream` raises `ValueError` for a file without a header, with two columns of one name, without a column that is
    asked for, or with a cell beyond the limit of Python's `csv`. A row that does not fit the header is a failed sample.
    With `valid_col`, the files are read once to find the splits, and then once per split. Raises
    `FileNotFoundError`."""
    chunk_size = 256
    vocab = None
    def __init__(self,
        files:str|Path|list, # A file, several, or a folder; with a header; plain, `.gz` or `.xz`
        fn_col:int|str=None, # Column with names of image files
        # Column with labels; several columns: an array of their numbers, `target.npy`, or a list of labels, `labels`
        label_col:int|str|list=None,
        label_delim:str=None, # Separator of several labels in one cell; default: a cell is one label
        folder:str|Path='', # Folder of the files that columns name
        suff:str='', # What to append to their names, such as '.jpg'
        fields:dict=None, # `{column: field}`, such as `{'path':'jpg', 'age':'age.f4'}`; other columns are left out
        valid_col:int|str=None, # Column that is true for the validation set, or names the split of each row
        delimiter:str=None, # Separator of columns; default: a tab in `.tsv` files, otherwise a comma
    ):
        self.files = list_files(files, CSV_EXTENSIONS)
        self.delimiter = delimiter
        self.siblings = [self]   # of all splits: the cells of all of them say what a column holds; the first knows
        self.options = ColumnOptions(fields, fn_col, label_col, label_delim, folder, suff, valid_col)

    def _lines(self, path):
        """Yields the `TablePlan` of a file by its header, and then `(line number, row)` for each row that is not empty

        The number is that of the row's last line, and `row` is `{column: text}`, or an exception if it cannot be read.
        Raises `ValueError`, `OSError`."""
        is_tsv = path.name.lower().endswith(('.tsv','.tsv.gz','.tsv.xz'))
        with _opened(path) as f:
            rows = csv.reader(f, delimiter=self.delimiter or ('\t' if is_tsv else ','))
            header = next(rows, None)
            _check_header(path, header)
            yield self._plan(path, header, {})
            for row in _sound_rows(rows, path):
                if not row: continue
                if not isinstance(row, Exception):
                    if len(row)==len(header): row = dict(zip(header, row))
                    else: row = ValueError(f'{len(row)} columns where the header has {len(header)}')
                yield rows.line_num,row

    def _rows(self, split=None):
        """Yields `(name, raw)` for each row, or for each row of `split`; exceptions belong to the first split

        `raw` is `{column: text}` of the columns that are read, or the exception for a row that cannot be read."""
        first = next(iter(self.srcs), None)
        for path in self.files:
            lines = self._lines(path)
            plan = next(lines)
            names = plan.names if self.options.asked else None
            for line,row in lines:
                is_row = isinstance(row, dict)
                if split is not None and split!=(split_of(row[plan.split]) if is_row else first): continue
                yield f'{path.name}:{line}',{name:row[name] for name in names} if names and is_row else row

    def _plan(self, path, header, types, rows=()):
        """The `TablePlan` for a file with these columns; raises `ValueError`, which names the file

        `types` is `{column: ColumnType}`, of which nothing is needed to know the columns that are read."""
        types = {name:types.get(name) or CellType().column for name in header}
        try: return TablePlan(types, rows, self.options)
        except ValueError as e:
            other = next((d for d in ';\t|' if len(header)==1 and d in header[0]), None)
            advice = f'; delimiter={other!r} separates columns' if other else ''
            raise ValueError(f'{path}: {e}{advice}') from None

    @cached_property
    def plan(self)->TablePlan:
        """Which fields the samples have, by the header and first rows of the first file with rows, and by all cells

        Raises `ValueError`, `OSError`."""
        for path in self.files:
            lines = self._lines(path)
            header = list(next(lines).types)
            rows = [row for _,row in islice(lines, 20) if isinstance(row, dict)]
            if rows: break
        return self._plan(path, header, self.siblings[0]._cell_types, rows)

    @cached_property
    def _cell_types(self):
        "`{column: ColumnType}` of the columns that are read, by all rows of all splits; raises `ValueError`, `OSError`"
        types = {}
        for source in self.siblings:
            for path in source.files:
                lines = source._lines(path)
                undecided = {name:types.setdefault(name, CellType()) for name in next(lines).names}
                for _,row in lines:
                    if isinstance(row, Exception): continue
                    for name,kind in list(undecided.items()):
                        kind.add(row[name])
                        if kind.is_text: undecided.pop(name)
                    if not undecided: break
        return {name:kind.column for name,kind in types.items()}

    @cached_property
    def srcs(self)->dict:
        "`{split: None}` for each split that `valid_col` names, by reading all rows; empty without `valid_col`"
        if self.options.valid_col is None: return {}
        splits = None
        for path in self.files:
            lines = self._lines(path)
            plan = next(lines)
            splits = splits or SplitNames(plan.split)
            for line,row in lines:
                if isinstance(row, dict): splits(row[plan.split], f'{path}:{line}')
        return dict.fromkeys(splits.names)

    def _raw_samples(self): return self._rows()
    def stream(self, size):
        if not self.srcs: return super().stream(size)
        parts = ((split, part) for split in self.srcs for part in chunked(self._rows(split), size))
        return (SplitChunk([part], keeps_raw=True) for part in parts)

    def fingerprint(self): return file_stamps(self.files),self.options,self.delimiter
    def __repr__(self):
        return f"csv_samples({', '.join(p.name for p in self.files[:3])}{', …' if len(self.files)>3 else ''})"

def _opened(path):
    "Context manager: CSV file `path`; bytes that are not UTF-8 become surrogates, which `_sound_rows` finds row by row"
    return open_text(path, mode='rt', newline='', encoding='utf-8-sig', errors='surrogateescape')

def _check_header(path, header):
    """Raise `ValueError` if there is no header, or one that is not UTF-8, or if two columns have one name

    `header`: a list of texts, which is empty for a blank line, or `None` for an empty file."""
    if not header: raise ValueError(f'{path}: empty: no header')
    if not all(map(_is_utf8, header)):
        raise ValueError(f'{path}: the header is not UTF-8: save the file as UTF-8')
    twice = [c for c in set(header) if header.count(c)>1]
    if twice: raise ValueError(f'{path}: two columns are called {twice[0]!r}')

def _sound_rows(rows, path):
    """Yields each row of the reader `rows` of CSV file `path`, or an exception in place of one that is not UTF-8

    Raises `ValueError` for what `csv` refuses, such as a cell beyond its limit: whether the next line begins a row is
    unknown then."""
    while True:
        try: row = next(rows)
        except StopIteration: return
        except csv.Error as e:
            raise ValueError(f'{path}:{rows.line_num}: {e}: a quotation mark is missing, or the cell is that long: '
                             'then csv.field_size_limit(bytes) permits it') from None
        yield row if all(map(_is_utf8, row)) else ValueError('not UTF-8')

def _is_utf8(cell): return cell.isascii() or not any('\udc80'<=c<='\udcff' for c in cell)
