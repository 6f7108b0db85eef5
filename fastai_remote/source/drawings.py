"""A source of Quick, Draw! files: drawings as strokes or as pictures

Docs: page `source/drawings`"""

# *Quick, Draw!* consists of fifty million drawings of 345 things. A drawing is a list of strokes: x and y of each
# point, and in the raw files also the time. As PNGs of 256x256 pixels with one bit per pixel they take 47 GB. As
# strokes they take 85 bytes each. This source reads the published files and makes samples of either kind, ten thousand
# per second and core. That is about ninety times as fast as drawing each with a matplotlib figure.

import csv, json, os, re
from array import array
from collections import Counter, deque
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from fastcore.basics import store_attr
try: from orjson import loads as _loads
except ImportError: from json import loads as _loads

from ..codec.raster import Rasterise
from ..codec.strokes import as_strokes, simplify_batch
from .base import IndexedSource, LazyPart, Samples, Source, StreamedSource
from .files import file_stamps, list_files, open_text

# --- Lines

# The drawings are published in three formats:
#
# - raw: a JSON object per line, with times, in the units of the device that was drawn on;
# - simplified: the same without times, with fewer points, in a range of 0 to 255;
# - Kaggle's CSV, in which the column `drawing` is JSON text. It is parsed, never evaluated.
#
# Each line is recognised by itself: strokes with times are raw and are simplified here, and other strokes stay as they
# are if they are simplified already.
#
# Up to 256 lines are decoded together, when the first of them is asked for. That is four times as fast as one by one. A
# line that cannot be decoded is a failed sample, and the others are not affected.

class _Lines:
    "Lines of files that are decoded together, when the first of their samples is loaded"
    def __init__(self,
        lines:list, # Lines, `bytes`
        headers:list, # For each, the columns of its CSV file; `None` for JSON
    ): self.lines,self.headers,self.samples = lines,headers,None
    def __reduce__(self): return _Lines,(self.lines, self.headers)
    def __repr__(self): return f'_Lines({self.lines!r})'   # which identifies them after an interruption

def _grouped(rows, size=256):
    "Yields `(name, raw)` for each `(name, header, line)`; `raw` is `(_Lines with the line, its position in them)`"
    rows = iter(rows)
    while part:=list(islice(rows, size)):
        lines = _Lines([line for _,_,line in part], [header for _,header,_ in part])
        for i,(name,_,_) in enumerate(part): yield name,(lines, i)

# --- Numbers

# Most of the time goes into reading numbers, which orjson does several times as fast as `json`.

def _parse(line):
    """The JSON value in `line`, bytes, as `json` reads it; raises `ValueError`, `RecursionError`

    orjson makes floats of integers of more than 64 bits. Points become floats anyway. If there may be one elsewhere,
    and where orjson refuses a line, `json` reads it."""
    try: found = _loads(line)
    except ValueError: return json.loads(line)
    others = [value for key,value in found.items() if key!='drawing'] if isinstance(found, dict) else [found]
    return found if all(value is None or isinstance(value, (str,int)) for value in others) else json.loads(line)

# --- Samples

# Lines become samples in stages: the fields of each line, simplified strokes, and pictures if they are asked for. A
# stage works on all samples at once. If it fails, it is tried again with each half, down to the sample that is at
# fault.

def _is_strokes(o): return isinstance(o, list) and all(map(_is_stroke, o))
def _is_stroke(o):
    return isinstance(o, list) and len(o) in (2,3) and isinstance(o[0], list) and isinstance(o[1], list)

class _LoadDrawing:
    "raw -> sample. Decodes all lines of its `_Lines` when the first is loaded; raises `ValueError` with the cause"
    def __init__(self,
        label:bool, # Keep the word, as field `cls`?
        raster, # `Rasterise` for the field `png`; `None` for `strokes`
        keep:tuple, # Other columns to keep
        times:bool, # Keep all points with their times, as field `points.npy`?
    ): store_attr()
    def __call__(self, raw):
        lines,i = raw
        if lines.samples is None: lines.samples = self.many(lines)
        if isinstance(lines.samples[i], Exception): raise lines.samples[i]
        return lines.samples[i]

    def many(self, lines):
        "List of the samples of a `_Lines`, stage by stage; a `ValueError` in place of each that cannot be decoded"
        samples = [self._tried(lambda one: [self._fields(*one[0])], [o])[0] for o in zip(lines.lines, lines.headers)]
        for stage in (self._simplified, *([self._drawn] if self.raster else [])):
            sound = [i for i,o in enumerate(samples) if not isinstance(o, Exception)]
            for i,o in zip(sound, self._tried(stage, [samples[i] for i in sound])): samples[i] = o
        return samples

    def _tried(self, stage, samples):
        "List `stage(samples)`. If it fails, tries each half, down to the one at fault, which becomes a `ValueError`"
        try: return stage(samples) if samples else []
        except Exception as e:
            if len(samples)==1: return [e if isinstance(e, ValueError) else ValueError(f'{type(e).__name__}: {e}')]
            half = len(samples)//2
            return self._tried(stage, samples[:half])+self._tried(stage, samples[half:])

    def _fields(self, line, header):
        "`{field: value}` of a line; field `strokes` has lists of numbers. Raises `ValueError`"
        drawing = _entries(line, header, _parse)
        if header is not None: drawing['drawing'] = json.loads(drawing['drawing'])
        if not _is_strokes(drawing['drawing']):
            raise ValueError('a drawing is a list of strokes, each a list of x, y and perhaps times')
        fields = {'strokes':drawing['drawing']}
        if self.label and 'word' in drawing: fields['cls'] = drawing['word']
        if not re.fullmatch(r'\s*-?[0-9]+\s*', str(drawing['key_id'])):
            raise ValueError(f"key_id {drawing['key_id']!r} is no whole number")
        fields['id'] = int(drawing['key_id'])
        if 'recognized' in drawing: fields['recognized.u1'] = _recognized(drawing['recognized'])
        for column in self.keep:
            if column not in drawing: raise ValueError(f"no {column!r} among {', '.join(drawing)}")
            fields[_KEPT_FIELDS.get(column, column)] = drawing[column]
        if self.times: fields['points.npy'] = _points(drawing['drawing'])
        return fields

    def _simplified(self, samples):
        """List of `samples`, dicts, with simplified `strokes`: lists of arrays

        Those that were simplified before become arrays in `samples` itself."""
        raw,res = [i for i,o in enumerate(samples) if not self._is_simplified(o)],list(samples)
        simple = simplify_batch([samples[i]['strokes'] for i in raw])
        for i,strokes in zip(raw, simple): res[i] = {**samples[i], 'strokes':strokes}
        return res

    def _is_simplified(self, sample):
        "Are the strokes without times, and do they fit the codec? Then they become arrays, in `sample`"
        if not all(len(stroke)==2 for stroke in sample['strokes']): return False
        try: sample['strokes'] = as_strokes(sample['strokes'])
        except ValueError: return False
        return True

    def _drawn(self, samples):
        "List of `samples`, dicts, with pictures, `png`, in place of `strokes`"
        pictures = self.raster.pngs([o['strokes'] for o in samples])
        return [{'png':png, **{k:v for k,v in o.items() if k!='strokes'}} for o,png in zip(samples, pictures)]

def _recognized(value):
    "1 for true and 0 for false, as JSON and CSV files may have them; raises `ValueError` for other values"
    number = {'true':1, '1':1, 'false':0, '0':0}.get(str(value).lower())
    if number is None: raise ValueError(f'recognized is {value!r:.40}, neither true nor false')
    return number

_KEPT_FIELDS = {'countrycode':'countrycode.cls', 'timestamp':'timestamp.txt'}   # other columns have their own names

_OWN_FIELDS = 'strokes','png','cls','id','recognized.u1','points.npy'

def _points(strokes):
    """All points of raw strokes, lists of x, y and times: shape (n,4), x, y, time in ms, 1 for the last of a stroke

    The array is float32, or float64 if float32 would round a number. Raises `ValueError` if there are no times."""
    if any(len(stroke)!=3 for stroke in strokes):
        raise ValueError('no times of points, which only the raw files of Quick, Draw! have')
    if any(not len(x)==len(y)==len(t)>0 for x,y,t in strokes):
        raise ValueError('a stroke whose x, y and times differ in length, or without points')
    points = np.concatenate([np.array([*stroke, [0.]*len(stroke[0])], float).T for stroke in strokes])
    points[np.cumsum([len(x) for x,_,_ in strokes])-1,3] = 1
    small = points.astype(np.float32)
    return small if (small==points).all() else points

def _entries(line, header, parse):
    """`{column or key: value}` of a line; raises `ValueError`, `csv.Error`, `RecursionError`

    `header`: the columns of a CSV file, `None` for JSON, which is read by `parse`."""
    if not line.strip(): raise ValueError('an empty line')
    if header is None: entries = parse(line)
    else:
        row = next(csv.reader([line.decode()]))
        if len(row)!=len(header):
            raise ValueError(f'{len(row)} columns, but the header has {len(header)}; records must be one line each: '
                             f'{line[:60]!r}')
        entries = dict(zip(header, row))
    if isinstance(entries, dict) and 'drawing' in entries and 'key_id' in entries: return entries
    raise ValueError(f'no drawing or no key_id in {line[:60]!r}')

# --- Files

# Files that are not compressed can be read from anywhere, so their drawings have numbers: number i is line i of all
# files, one after the other. The index contains the offset of each 64th line, and is made about as fast as the disk can
# be read. `read` only computes where lines are; a worker reads them. A block of 64 lines is always read as a whole. The
# attribute `block` tells this to the ingest, which then shuffles the blocks and a few blocks together, in place of all
# drawings.
#
# Compressed files can only be read from the beginning. They are a stream, which takes lines from several files in turn,
# so that classes are mixed.

_EXTENSIONS = tuple(kind+end for kind in ('.ndjson','.jsonl','.json','.csv') for end in ('','.gz','.xz'))
_BLOCK = 64   # lines between two entries of the index

def _is_plain(path): return path.suffix.lower() not in ('.gz','.xz')

def _header(path, line):
    "List of columns in `line`, the first of file `path`; `None` if it is JSON or blank; else raises `ValueError`"
    if line.lstrip()[:1] in (b'{',b''): return None
    try: header = next(csv.reader([line.decode('utf-8-sig').strip()]))
    except (UnicodeDecodeError,csv.Error,StopIteration): header = []
    if not {'drawing','key_id'}<=set(header):
        raise ValueError(f'{path}: neither JSON lines nor a CSV with columns drawing and key_id; it begins '
                         f'{line[:60]!r}')
    return header

def _index(path, start, piece=1<<24):
    """Returns `(offsets, number of lines)` of a file from byte `start` on, where its first line begins

    The offsets are an array: the starts of the first line and of each 64th after it, and the end of the last line,
    without white space at the end of the file. `piece`: bytes that are read at a time."""
    n_lines,n_newlines,pos,end,offsets = 0,0,start,start,[np.array([start])]
    with open(path, 'rb') as f:
        f.seek(start)
        while data := f.read(piece):
            newlines = (np.frombuffer(data, np.uint8)==10).nonzero()[0]
            offsets.append(newlines[(-n_newlines-1)%_BLOCK::_BLOCK]+(pos+1))
            length = len(data.rstrip())
            if length: end,n_lines = pos+length,n_newlines+int(newlines.searchsorted(length))+1
            n_newlines,pos = n_newlines+len(newlines),pos+len(data)
    n_blocks = -(-n_lines//_BLOCK)
    return np.append(np.concatenate(offsets)[:n_blocks], end),n_lines

def _parse_without_points(line):
    "The JSON value in `line`, bytes, with 0 for the drawing if that is nothing but numbers and brackets: quicker"
    start,end = line.find(b'"drawing":')+10,line.rfind(b']')+1
    is_plain = 10<=start<end and not line[start:end].translate(None, b' 0123456789.-+eE,[]')
    return json.loads(line[:start]+b'0'+line[end:] if is_plain else line)

def _word_in(line, header, name):
    """The word of the drawing in `line`, bytes; `None` for a line that cannot be read, or is no drawing

    `header`: the columns of a CSV file, `None` for JSON. Raises `ValueError`, with `name`, if there is no word."""
    try: word = _entries(line, header, _parse_without_points).get('word')
    except (ValueError,RecursionError,csv.Error): return None
    if isinstance(word, (list,dict)): return None   # which is no label
    if word is None: raise ValueError(f'{name}: max_per_class= needs the word of each drawing, and there is none')
    return word

def _counted(counts, word, most):
    """Is this one of the first `most` drawings of `word`? Adds it to `counts`, a `Counter` of words

    For the word `None`, of a line that cannot be read, it is always true, and nothing is counted."""
    if word is None: return True
    counts[word] += 1
    return counts[word]<=most

def _first_of_each(path, header, start, n, counts, most):
    """The numbers of the lines of a file that hold one of the first `most` drawings of a word, from 0 on, `int64`

    `start`: offset of the first line; `n`: number of lines; `counts`: of the words of the files before, is updated."""
    used = array('q')
    with open(path, 'rb') as f:
        f.seek(start)
        for k,line in enumerate(islice(f, n)):
            if _counted(counts, _word_in(line, header, f'{path}:{k+1+(header is not None)}'), most): used.append(k)
    return np.array(used, np.int64)

def _lines_at(blocks, which, line):
    """List of `(name, header, line)` of some samples, in their order; each block is read once

    `blocks` is a list of `(file, columns or None, number of its first line, from byte, to byte)`. `which` is the
    position in it of each sample, and `line` the number of its line in the block, both of shape (n,)."""
    rows,line = [None]*len(line),line.tolist()
    for k in np.unique(which).tolist():
        path,header,first,start,stop = blocks[k]
        with open(path, 'rb') as file:
            file.seek(start)
            lines = file.read(stop-start).split(b'\n')
        for i in np.flatnonzero(which==k).tolist():
            text = lines[line[i]] if line[i]<len(lines) else b''
            rows[i] = f'{os.path.basename(path)}:{first+line[i]}',header,text
    return rows

def _read_lines(blocks, which, line): return _grouped(_lines_at(blocks, which, line))

class _Drawings(Source):
    "What both kinds of sources of drawings have in common"
    def __init__(self,
        files:list, # Paths
        load:_LoadDrawing,
        max_per_class:int=None, # Drawings of each word, at most
    ): store_attr()
    def fingerprint(self):
        options = [o for o in (self.load.keep, self.load.times, self.max_per_class) if o]
        return file_stamps(self.files),self.load.label,repr(self.load.raster),*options
    def __repr__(self):
        n,label = len(self.files),'labelled, ' if self.load.label else ''
        return f"drawing_samples({self._what()} in {n:,} file{'s'*(n>1)}, {label}as {self.load.raster or 'strokes'})"

class _IndexedDrawings(Samples, _Drawings, IndexedSource):
    "Drawings by number, in files that are not compressed"
    block = _BLOCK
    def __init__(self, files, load, max_per_class):
        "Reads all files to find their lines; raises `ValueError` if there are none, or for other content"
        super().__init__(files, load, max_per_class)
        self.headers,self.offsets,lengths,counts = [],[],[],Counter()   # one entry per file, but the counts of words
        self.lines = []   # the lines that are used, of each file: an array, or `None` for all from the first one on
        for path in files:
            with open(path, 'rb') as f: line = f.readline()
            header = _header(path, line) if line else None
            start = 0 if header is None else len(line)
            offsets,n = _index(path, start)
            used = max_per_class and _first_of_each(path, header, start, n, counts, max_per_class)
            if used is not None: n = len(used)
            self.lines.append(None if used is None or (used==np.arange(n)).all() else used)
            self.headers.append(header)
            self.offsets.append(offsets)
            lengths.append(n)
        self.ends = np.cumsum(lengths)
        if not self.ends[-1]: raise ValueError(f"{', '.join(map(str, files[:3]))}: no drawings")

    def __len__(self): return int(self.ends[-1])
    def read(self, numbers)->LazyPart:
        numbers = np.asarray(numbers, np.int64)
        file = self.ends.searchsorted(numbers, side='right')
        starts = self.ends-np.diff(self.ends, prepend=0)
        rank = numbers-starts[file]
        for f in np.unique(file):
            if self.lines[f] is not None: rank[file==f] = self.lines[f][rank[file==f]]
        block,line = np.divmod(rank, _BLOCK)
        keys,which = np.unique(file<<40|block, return_inverse=True)
        blocks = [self._block(k>>40, k&(1<<40)-1) for k in keys.tolist()]
        return LazyPart(partial(_read_lines, blocks), which.astype(np.int32), line.astype(np.uint8), size=4096)
    def _block(self, file, block):
        "Where block `block` of file number `file` is, as `_lines_at` takes it"
        header,offsets = self.headers[file],self.offsets[file]
        first = block*_BLOCK+1+(header is not None)
        return str(self.files[file]),header,first,int(offsets[block]),int(offsets[block+1])
    def _what(self): return f'{len(self):,} drawings'

class _StreamedDrawings(_Drawings, StreamedSource):
    "Drawings as a stream, from up to 16 files in turn, so that their classes are mixed"
    chunk_size = 512
    raw_bytes = 2048   # a line with a drawing
    def _lines(self, path):
        """Yields `(name, header, line)`, without blank lines at the end; raises `OSError`, naming a damaged file

        As in a file that is not compressed, blank lines within it are samples, which fail."""
        header,n_blank = None,0
        with open_text(path) as f:
            for k,line in enumerate(f, 1):
                if k==1:
                    header = _header(path, line)
                    if header is not None: continue
                if not line.strip():
                    n_blank += 1
                    continue
                for number in range(k-n_blank, k): yield f'{path.name}:{number}',header,b'\n'
                yield f'{path.name}:{k}',header,line
                n_blank = 0

    def _rows(self, at_once=16):
        "Yields `(name, header, line)`, of 16 files in turn; when a file ends, another one is read"
        waiting = map(self._lines, self.files)
        turn = deque(islice(waiting, at_once))
        while turn:
            lines = turn.popleft()
            row = next(lines, None)
            if row is None: turn.extend(islice(waiting, 1))
            else:
                yield row
                turn.append(lines)

    def _used(self):
        "An iterator over what `_rows` yields, without drawings beyond `max_per_class`"
        if self.max_per_class is None: return self._rows()
        counts = Counter()
        return (row for row in self._rows() if _counted(counts, _word_in(row[2], row[1], row[0]), self.max_per_class))

    def stream(self, size):
        rows = self._used()
        while part:=list(_grouped(islice(rows, size))): yield part
    def __iter__(self): return (self.load(raw) for _,raw in _grouped(self._used()))
    def _what(self): return 'a stream of drawings'

def drawing_samples(
    files:str|Path|list, # A file, files, or a folder, searched with its subfolders: .ndjson or .csv, plain, .gz or .xz
    field:str='strokes', # 'strokes', 90 bytes per drawing, or 'png', pictures of 900 bytes
    size:int=256, # Width and height of a PNG, pixels
    width:float=3., # Width of the lines of a PNG, in pixels of a picture of 256
    antialias:bool=False, # Grey pixels at the edges of lines in a PNG? It takes four times as many bytes
    time:str=None, # How a PNG shows the order of strokes: 'grey' or 'colour'; default: it does not
    with_labels:bool=True, # Keep the word, as field `cls`, if there is one?
    # Other columns to keep: 'countrycode', as field `countrycode.cls`, 'timestamp', as `timestamp.txt`, or any other
    keep:list=(),
    times:bool=False, # Keep all points of raw drawings with their times, as field `points.npy`?
    max_per_class:int=None, # Use the first so many drawings of each word
): # An `IndexedSource`; a `StreamedSource` if a file is compressed
    """A source of Quick, Draw! files: fields `strokes` or `png`, `cls`, `id`, `recognized.u1`

    `points.npy` has shape (n,4): x, y, time in milliseconds, and 1 for the last point of a stroke, else 0; as float32,
    or as float64 if a number needs it. With `max_per_class`, the words of all lines are read beforehand; in a stream,
    as it is read. Raw drawings are simplified, as the published ones were, also for pictures of them.

    Raises `FileNotFoundError`, and `ValueError` for wrong arguments and for files that do not contain drawings."""
    if field not in ('strokes','png'): raise ValueError(f"field must be 'strokes' or 'png', not {field!r}")
    paths = list_files(files, _EXTENSIONS)
    raster = Rasterise(size, width, antialias, time) if field=='png' else None
    source = _IndexedDrawings if all(map(_is_plain, paths)) else _StreamedDrawings
    if isinstance(keep, str): keep = [keep]
    taken = next((name for name in keep if name in _OWN_FIELDS), None)
    if taken is not None: raise ValueError(f'keep=: {taken!r} is the name of a field that is made of other columns')
    if max_per_class is not None and max_per_class<1:
        raise ValueError(f'max_per_class must be at least 1, not {max_per_class}')
    return source(paths, _LoadDrawing(with_labels, raster, tuple(keep), bool(times)), max_per_class)
