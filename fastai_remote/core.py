"""What a dataset is, and what can go wrong: errors, run tables, gap tables, the manifest, checksums

Docs: page `core`"""

import io, json, re, zlib
from dataclasses import dataclass, field
from datetime import datetime, timezone
from difflib import get_close_matches
from functools import cache
from html import escape

import numpy as np
from zlib_ng.zlib_ng import crc32

# --- Run tables
#
# A dataset consists of *parts*, each of which was written at one time and never changes. A table of runs says where the
# samples of a version are, and a table of gaps which samples of a part have failed. Both are arrays, and looking up a
# batch takes one binary search, so that neither time nor memory grows much with the number of samples.

# --- Runs

# Samples that are in the same part, one after the other, are a run. Most tables have few runs: a dataset that was
# appended to twice has three for each split.

MAX_RUNS = 1<<20   # runs of a table, which take 24 bytes each in every process

class RunTable:
    """Where the samples of a dataset are, if it consists of several parts: runs of consecutive samples of a part

    A table is not changed: `drop`, `replace` and `insert` return new ones, and may raise `TooManyRuns`."""
    def __init__(self,
        starts, # The number of the first sample of each run, ascending from 0, shape (k,)
        parts, # The part that each run is in, shape (k,)
        firsts, # The number that the first sample of each run has in its part, shape (k,)
        n:int # Number of samples
    ):
        "Raises `ValueError` if these are no runs of `n` samples, and `TooManyRuns` if they are more than `MAX_RUNS`"
        self.starts,self.parts,self.firsts = (np.asarray(a, np.int64) for a in (starts,parts,firsts))
        self.n = n
        if not len(self.starts)==len(self.parts)==len(self.firsts): raise ValueError('columns of different lengths')
        if list(self.starts[:1])!=[0][:n]: raise ValueError(f'{n} samples, of which the first is in no run')
        if (self.lengths<1).any() or (self.parts<0).any() or (self.firsts<0).any(): raise ValueError('a run of nothing')
        if len(self.starts)>MAX_RUNS: raise TooManyRuns(len(self.starts), MAX_RUNS)

    @classmethod
    def whole(cls,
        n:int, # Number of samples
        part:int=0 # The part that they are in
    ):
        "The table of `n` samples that are all in one part, under the same numbers"
        return cls([0][:n], [part][:n], [0][:n], n)

    @property
    def lengths(self)->np.ndarray:
        "The number of samples of each run"
        return np.diff(self.starts, append=self.n)

    def __len__(self): return len(self.starts)

    @property
    def is_whole(self)->bool:
        "Are all samples in one part, under the same numbers?"
        return len(self.starts)==1 and not self.firsts[0]

    def locate(self,
        numbers:np.ndarray # Sample numbers, int64, shape (n,)
    )->tuple: # Two arrays of shape (n,)
        "The part that each sample is in, and its number there"
        runs = np.searchsorted(self.starts, numbers, 'right')-1
        return self.parts[runs],self.firsts[runs]+numbers-self.starts[runs]

    def groups(self,
        numbers:np.ndarray # Sample numbers, int64, shape (n,)
    ): # Yields `(part, places in numbers, their numbers in the part)`
        "The samples `numbers`, grouped by the part that they are in"
        parts,inside = self.locate(numbers)
        for part in np.unique(parts).tolist():
            places = np.flatnonzero(parts==part)
            yield part,places,inside[places]

    def _split(self, numbers):
        """Starts of runs such that each of `numbers`, and each run of this table, begins one; their parts and firsts

        Three int64 arrays of the same length. Numbers that are not in [0, n) are ignored."""
        starts = np.unique(np.concatenate([self.starts, numbers[(numbers>=0)&(numbers<self.n)]]))
        return starts,*self.locate(starts)

    @classmethod
    def _joined(cls, lengths, parts, firsts):
        """A table of runs with these lengths, parts and firsts, three int64 arrays, in the order of the samples

        Runs of length 0 are left out, and neighbours are made one where they continue each other."""
        kept = lengths>0
        lengths,parts,firsts = lengths[kept],parts[kept],firsts[kept]
        continues = (parts[1:]==parts[:-1])&(firsts[1:]==firsts[:-1]+lengths[:-1])
        begins = np.concatenate([np.ones(min(len(parts), 1), bool), ~continues])
        ends = np.cumsum(lengths)
        n = int(ends[-1]) if len(ends) else 0
        return cls((ends-lengths)[begins], parts[begins], firsts[begins], n)

    def drop(self,
        numbers:np.ndarray # Sample numbers, ascending, without repetitions
    ):
        "A new table without the samples `numbers`; those behind them move up"
        starts,parts,firsts = self._split(np.concatenate([numbers, numbers+1]))
        lengths = np.diff(starts, append=self.n)
        lengths[np.isin(starts, numbers, assume_unique=True)] = 0
        return self._joined(lengths, parts, firsts)

    def replace(self,
        numbers:np.ndarray, # Sample numbers, ascending, without repetitions
        part:int # The part that has them now, under the numbers 0, 1, 2, …
    ):
        "A new table in which the samples `numbers` are in another part"
        starts,parts,firsts = self._split(np.concatenate([numbers, numbers+1]))
        at = np.searchsorted(starts, numbers)
        parts[at],firsts[at] = part,np.arange(len(numbers))
        return self._joined(np.diff(starts, append=self.n), parts, firsts)

    def insert(self,
        at:int, # The number that the first new sample gets, 0 to the number of samples
        part:int, # The part that the new samples are in
        first:int, # Number of the first of them in the part
        n:int # How many they are
    ):
        "A new table with `n` more samples; those from `at` on move back. Raises `TooManyRuns`."
        starts,parts,firsts = self._split(np.array([at]))
        k = np.searchsorted(starts, at)
        lengths = np.insert(np.diff(starts, append=self.n), k, n)
        return self._joined(lengths, np.insert(parts, k, part), np.insert(firsts, k, first))

def pack_tables(
    tables:list # Of `RunTable`
)->bytes:
    "The tables as they are stored, one behind the other: starts, parts and firsts, each as int64, little-endian"
    return b''.join(np.stack([o.starts, o.parts, o.firsts]).astype('<i8').tobytes() for o in tables)

def unpack_tables(
    stored:bytes, # What `pack_tables` returned
    lengths:list, # Number of runs of each table
    n:int # Number of samples
)->list: # Of `RunTable`
    "The tables in `stored`; raises `ValueError` if these cannot be tables of `n` samples"
    ends = 24*np.cumsum([0,*lengths])
    if ends[-1]!=len(stored): raise ValueError('bytes of other tables')
    return [RunTable(*np.frombuffer(stored[start:end], '<i8').reshape(3, -1), n) for start,end in zip(ends, ends[1:])]

class TooManyRuns(ValueError):
    "A table would take too much memory, as the samples that are changed, or failed, are scattered over a large dataset"
    def __init__(self,
        n:int, # Runs that there would be
        most:int, # Runs that are supported
        # End of the message
        advice:str='dropped or changed: make a new dataset, by store.copy or store.map(fn, name=…)'
    ):
        super().__init__(f'{n:,} runs of consecutive samples, where {most:,} are supported, as so many samples are '
                         f'{advice}')

# Here five samples are dropped from one hundred, two are replaced, and ten more are inserted.

# --- Gaps

# An ingest writes each sample under its place in the plan, so that whatever is repeated writes the same samples under
# the same numbers. A sample that fails leaves a gap. Nothing moves when the ingest is committed: from outside, the
# samples of a part are numbered without gaps, and the table gives the place of a number.

MAX_GAPS = 1<<23 # Runs of places without a sample in a part

class GapTable:
    """The places of a part that have no sample, as theirs has failed: runs of consecutive places

    A place is a number in the plan of the ingest. The samples are numbered without gaps, in the order of their places.
    In memory, a run takes 8 bytes, or 16 where there are more than 2**32 places."""
    def __init__(self,
        starts, # The first place of each run, ascending, shape (k,)
        lengths, # Number of places of each run, shape (k,)
        n_places:int # Places of the part, with and without a sample
    ):
        "Raises `ValueError` if these are no separate runs of `n_places` places, and `TooManyRuns`"
        starts,lengths = (np.asarray(a, np.int64) for a in (starts,lengths))
        if len(starts)>MAX_GAPS:
            raise TooManyRuns(len(starts), MAX_GAPS, 'without a value: leave them out of the source')
        if len(starts)!=len(lengths): raise ValueError('columns of different lengths')
        if (starts<0).any() or (lengths<1).any() or (lengths>n_places-starts).any():
            raise ValueError(f'a run of nothing, or beyond {n_places} places')
        if (starts[1:]<=(starts+lengths)[:-1]).any(): raise ValueError('runs that are not separate')
        kind = np.uint32 if n_places<1<<32 else np.int64
        before = np.concatenate([[0], np.cumsum(lengths)])
        self.n_places,self.n = n_places,n_places-int(before[-1])
        self._firsts = (starts-before[:-1]).astype(kind) # The number of the first sample behind each run
        self._before = before.astype(kind) # Places without a sample before each run, and in all

    def __len__(self): return len(self._firsts)

    @property
    def starts(self)->np.ndarray:
        "The first place of each run, int64"
        return self._firsts.astype(np.int64)+self._before[:-1]

    def places(self,
        numbers:np.ndarray # Numbers of samples, int64, shape (n,)
    )->np.ndarray: # int64, shape (n,)
        "The places of samples"
        return numbers+self._before[np.searchsorted(self._firsts, numbers.astype(self._firsts.dtype), 'right')]

    def gaps(self)->np.ndarray: # int64
        "The places without a sample"
        lengths = np.diff(self._before.astype(np.int64))
        return np.repeat(self.starts-(np.cumsum(lengths)-lengths), lengths)+np.arange(lengths.sum())

    def samples_before(self,
        places # Places, 0 to `n_places`, shape (n,)
    )->np.ndarray: # int64, shape (n,)
        "How many samples there are before each of `places`"
        places = np.asarray(places, np.int64)
        if not len(self): return places
        runs = np.searchsorted(self.starts, places, 'right')
        # behind its run, a place has all the gaps of this run before it; within the run, all samples before the run
        return np.where(runs>0, np.maximum(places-self._before[runs], self._firsts[np.maximum(runs-1, 0)]), places)

    def to_bytes(self)->bytes:
        "The runs as they are stored: starts and lengths, each as int64, little-endian"
        return np.stack([self.starts, np.diff(self._before.astype(np.int64))]).astype('<i8').tobytes()

    @classmethod
    def from_bytes(cls,
        stored:bytes, # What `to_bytes` returned
        n_places:int # As in `GapTable`
    ):
        "The table; raises `ValueError` if `stored` cannot be one of `n_places` places"
        return cls(*np.frombuffer(stored, '<i8').reshape(2, -1), n_places)

# --- The dataset
#
# fastai holds a list of all items and copies it into every worker. For fifty million samples, that list takes
# gigabytes. Here, fastai's items are integers, which are computed when they are needed, and a *store* returns the bytes
# for an integer. This module defines what all stores have in common: their errors, the description of a dataset, and
# checksums.

# --- Errors

# All errors are subclasses of `StoreError`. Catch `StoreError`, or the subclass that you can handle.

def printable(text:str)->str:
    "`text` with control characters escaped as in `repr`, so that no terminal obeys them; line ends and tabs stay"
    return re.sub('[\x00-\x08\x0b-\x1f\x7f-\x9f]', lambda m: repr(m[0])[1:-1], text)

def unknown_arguments(
    where:str, # What was called
    names, # Arguments that it does not take
    known # Names of those that it takes
)->TypeError:
    "The error for misspelt arguments, with the nearest name"
    similar = get_close_matches(next(iter(names)), known, 1)
    hint = f'; did you mean {similar[0]!r}?' if similar else ''
    return TypeError(f"{where} knows no {', '.join(map(repr, names))}{hint}")

class StoreError(Exception):
    "Base class of all errors of stores, writers and ingests"
    def __str__(self): return printable(super().__str__())   # names in it may be those of others

class StoreUnavailable(StoreError): "The server cannot be reached, refuses the connection, or did not answer in time"
class StoreNotFound(StoreError): "There is no committed dataset of that name"
class StoreExists(StoreError): "There is already a dataset, or an unfinished ingest, of that name"
class StoreBusy(StoreError): "Another ingest is writing a dataset of that name right now"
class StoreFull(StoreError): "There is not enough space where the dataset is written"
class UnsupportedFormat(StoreError): "The format is newer than this version, or what is there is no manifest"
class NewerFormat(UnsupportedFormat): "The format is newer than this version"
class UnknownField(StoreError): "The dataset has no such field"
class MissingSample(StoreError): "A value that the dataset should have is not there"
class CorruptSample(StoreError): "Stored bytes are damaged: those of a sample, or those that describe the dataset"

# --- Limits

# What others have made may be small and unpack to gigabytes. Everything that comes from outside is read by `limited`,
# decompressed by `unzipped`, or in pieces for `limited`, and parsed by `parse_json`. All have a limit, and raise
# `TooLarge` before it is exceeded. A `MemoryError` is never taken for damage: the machine is too small, and the data
# may be intact.

class TooLarge(ValueError):
    "What is read from outside has more bytes, or would take more memory, than the limit"

class LimitedBytes(io.BytesIO):
    "Collects the pieces of something that others have made, up to a limit; the result takes hardly more memory"
    def __init__(self,
        limit:int, # Bytes that are accepted
        what:str='the file' # What they are, for the message
    ):
        super().__init__()
        self.limit,self.what = limit,what

    def write(self, piece):
        "Append `piece`; raises `TooLarge` if there are more bytes than `limit` then"
        if self.tell()+len(piece)>self.limit:
            raise TooLarge(f'{self.what} has more than {self.limit:,} bytes, which is the limit')
        return super().write(piece)

def limited(
    pieces, # Iterator of `bytes`: what comes from a file, a server, or a decompressor
    limit:int, # As in `LimitedBytes`
    what:str='the file', # As in `LimitedBytes`
)->bytes: # All pieces joined
    "Reads something that others have made; raises `TooLarge` as soon as there are more than `limit` bytes"
    joined = LimitedBytes(limit, what)
    for piece in pieces: joined.write(piece)
    return joined.getvalue()

def pieces_of(
    file, # A binary file, or anything with such a `read`
    step:int=1<<20 # Bytes of a piece at most
): # Iterator of `bytes`
    "The rest of a file, for `limited`"
    return iter(lambda: file.read(step), b'')

def unzipped(
    compressed:bytes, # What `zlib.compress` returned
    limit:int, # As in `limited`
    what:str='compressed data', # As in `limited`
)->bytes:
    "Decompresses with a limit; raises `TooLarge`, and `ValueError` for damaged data"
    decoder = zlib.decompressobj()
    try: content = decoder.decompress(compressed, limit+1)
    except zlib.error as e: raise ValueError(str(e)) from None
    if len(content)>limit: raise TooLarge(f'{what} has more than {limit:,} bytes, which is the limit')
    if not decoder.eof: raise ValueError('compressed data that is cut off')
    if decoder.unused_data: raise ValueError('more bytes after the compressed data')
    return content

MAX_MANIFEST = 1<<26 # Bytes of a manifest
MAX_PARSED = 1<<27 # Bytes of memory that reading a manifest, or another description of a dataset, may take

_MOST_PER_BYTE = 150 # No JSON takes more bytes of memory for each of its own

def _parsed_bytes(text):
    """Bytes of memory that `json.loads` of `text`, `bytes`, and the checksum of the result take at most

    It depends on what is in it: `[{},{},…]` takes 25 times its length."""
    codes = np.frombuffer(text, np.uint8)
    largest,n_chars = int(codes.max(initial=0)),len(text)
    if json.detect_encoding(text).startswith('utf-8'): n_chars = int(np.count_nonzero(codes&0xC0!=0x80))
    # CPython keeps a text in 1, 2 or 4 bytes a character, as its largest one needs
    width = 4 if largest>=0xF0 or re.search(rb'\\u[dD]', text) else 2 if largest>=0xC4 or b'\\u' in text else 1
    n_texts,n_commas = text.count(b'"')//2,text.count(b',')
    n_lists,n_dicts,n_entries = text.count(b'['),text.count(b'{'),text.count(b':')
    n_numbers = max(0, n_commas+n_lists+n_dicts-text.count(b'",')-text.count(b'"]')-text.count(b'"}'))
    objects = (64 if width==1 else 88)*n_texts+9*n_commas+32*n_numbers+96*n_lists+250*n_dicts+200*n_entries
    return len(text)+2*width*n_chars+objects

def parse_json(
    text:str|bytes, # What others have written
    limit:int=MAX_PARSED, # Bytes of memory that it may take
): # As `json.loads`
    """As `json.loads`, with a limit of the memory that it takes

    Raises `TooLarge`, before anything is parsed, and `ValueError` for what is no JSON, or nested too deeply."""
    text = text.encode('utf-8', 'surrogatepass') if isinstance(text, str) else bytes(text)
    needed = _parsed_bytes(text) if len(text)*_MOST_PER_BYTE>limit else 0   # short texts are not looked at
    if needed>limit:
        raise TooLarge(f'JSON of {len(text):,} bytes that takes up to {needed:,} bytes of memory; '
                       f'{limit:,} is the limit')
    try: return json.loads(text)
    except RecursionError: raise ValueError('JSON that is nested too deeply') from None

# --- Manifest

# The manifest is the description of a dataset, as one JSON text. It is written last. Without a manifest there is no
# dataset, so readers never see an interrupted ingest. Nothing in it grows with the number of samples: splits are
# ranges, and vocabularies contain one entry per class.

_seal_start = re.compile(rb'\{"crc":"([0-9a-f]{8})",')

def seal(
    content:dict # With values that JSON can represent, not empty
)->bytes:
    "`content` as JSON; its first entry, `crc`, is the checksum of all bytes that follow this entry"
    rest = json.dumps(content, ensure_ascii=False, separators=(',',':'))[1:].encode('utf-8', 'surrogatepass')
    return b'{"crc":"%08x",' % crc32(rest)+rest

def unseal(
    stored:bytes, # What `seal` returned
    limit:int=MAX_PARSED # As in `parse_json`
)->dict:
    "The content of which `seal` made `stored`; raises `TooLarge`, and `ValueError` if a byte is another one"
    start = _seal_start.match(stored)
    if not start or int(start[1], 16)!=crc32(memoryview(stored)[start.end():]):
        raise ValueError('does not match its checksum')
    content = parse_json(stored, limit)
    content.pop('crc')
    return content

# What JSON of others may hold: each function tells whether a value has the right types, and is in its limits.

_dtypes = 'i1','i2','i4','i8','u1','u2','u4','u8','f2','f4','f8'
_MAX_TAGS = 1<<14 # Hash tags: a cluster has no more slots
_uid = re.compile(r'[!-.0-[\]-~]{0,100}')   # it is a part of the names of files
_summary_lengths = dict(width=(3,), height=(3,), mean=(1,3), std=(1,3), grey=(2,))   # of lists of numbers

def _is_count(o, end=1<<62): return type(o) is int and 0<=o<end

def _is_text(o):
    try: return isinstance(o, str) and o.encode() is not None
    except UnicodeEncodeError: return False

def _is_list(o, *kinds): return isinstance(o, list) and all(type(value) in kinds for value in o)

def _is_field(o):
    if not isinstance(o, dict) or not isinstance(o.get('codec'), str) or not _is_count(o.get('n', 0)): return False
    if o.get('check') not in (None, 'u4') or o.get('check') and o.get('dtype') is None: return False
    return o.get('dtype', 0) in (None, *_dtypes)

def _is_summary(o):
    "Has `o` the types of `ImageStats.summary`?"
    if not isinstance(o, dict) or type(o.get('n')) is not int or not isinstance(o.get('image'), str): return False
    return all(_is_list(o.get(key), int, float) and len(o[key]) in lengths for key,lengths in _summary_lengths.items())

def _are_gaps(o, n):
    "Is `o` a valid `gaps` of a manifest, or of a part, with `n` samples?"
    if o=={}: return True
    if not isinstance(o, dict) or any(type(o.get(key)) is not int for key in ('places','runs','crc')): return False
    return n<o['places']<1<<62 and 0<o['runs']<=min(MAX_GAPS, o['places']-n)

def _are_runs(o, fields):
    "Is `o` a valid `runs` of a manifest, which gives each of `fields` the number of a table?"
    lengths,columns = o.get('lengths'),o.get('columns')
    if not isinstance(o.get('key'), str) or not isinstance(o.get('crc'), int): return False
    if not lengths or not _is_list(lengths, int) or any(not 0<=n<=MAX_RUNS for n in lengths): return False
    return isinstance(columns, dict) and all(_is_count(columns.get(field), len(lengths)) for field in fields)

_of_part = dict(prefix=_is_text, tags=lambda o: _is_count(o, _MAX_TAGS+1), n=_is_count, failed=_is_count)
_of_manifest = dict(_of_part, nbytes=_is_count, uid=_uid.fullmatch, appended=lambda o: _is_list(o, str),
                    earlier=lambda o: _is_list(o, str))
# Of the values of dicts
_of_entries = dict(fields=_is_field, stats=_is_summary, splits=lambda o: _is_list(o, int) and len(o)==2,
    vocab=lambda o: _is_list(o, str, int, bool), counts=lambda o: _is_list(o, int) and all(map(_is_count, o)))

def _is_part(o):
    if not isinstance(o, dict) or not isinstance(o.get('fields'), dict): return False
    if not all(name in o and is_valid(o[name]) for name,is_valid in _of_part.items()): return False
    return all(map(_is_field, o['fields'].values())) and _are_gaps(o.get('gaps', {}), o['n'])

_HEAD_BYTES = 64   # of a manifest: its checksum, and its uid

@dataclass
class Manifest:
    "The description of a dataset: everything that is known about it except its samples"
    newest_format = 1 # The newest format; the manifest of another kind of store can have a number of its own
    # Attributes that are only written if they are not empty
    _optional = 'tags','gaps','parts','runs','appended','earlier'
    _of_part = 'prefix','tags','n','fields','failed','gaps' # Attributes that an entry of `parts` has, too

    name:str # Name of the dataset
    n:int # Number of samples; they are numbered from 0 to n-1
    # `{field: {'codec': name of the codec, 'dtype': numpy dtype of a fixed-width field, else None,
    # 'check': 'u4' if a crc32 follows each value, 'n': number of samples that have the field, if not all do}}`
    fields:dict
    splits:dict = field(default_factory=dict) # `{split: [start, stop]}`: ranges of sample numbers
    vocab:dict = field(default_factory=dict) # `{field: list of labels}`; a stored code is an index into the list
    nbytes:int = 0 # Bytes of all encoded values together
    failed:int = 0 # Number of samples of the source that could not be converted
    counts:dict = field(default_factory=dict) # `{field: number of samples of each label}`, in the order of `vocab`
    stats:dict = field(default_factory=dict) # `{image field: summary of `ImageStats`}`
    prefix:str = '' # How the keys or files of this version of the dataset begin
    tags:int = 0 # Hash tags over which the keys of a dataset in a Redis Cluster are spread; 0 elsewhere
    # Of a dataset in Redis of which samples have failed: `{'places': with and without a sample, 'runs': of the table of
    # gaps, 'crc'}`
    gaps:dict = field(default_factory=dict)
    # Of a dataset that was appended to or edited: `{'prefix', 'tags', 'n', 'fields', 'failed', 'gaps'}` of each part
    parts:list = field(default_factory=list)
    # Where the samples of such a dataset are: `{'key', 'lengths': number of runs of each table, 'crc',
    # 'columns': {field: number of its table}}`. Table 0 has the order of the samples: it changes only if some are added
    # or dropped
    runs:dict = field(default_factory=dict)
    appended:list = field(default_factory=list) # Texts that identify the sources that were appended
    earlier:list = field(default_factory=list) # `uid` of the versions that this one was made from, the latest last
    generation:int = 1 # How many times a dataset of this name has been written
    uid:str = '' # Identifies this version of the dataset
    created:str = '' # Time of the commit, ISO 8601, UTC
    format:int = 1 # Version of the format
    # Not stored: the first bytes of the JSON that this manifest was read from, which no other version has; empty if it
    # was not read. Comparing them is enough to check that the dataset is still the one that was opened.
    head = b''

    def to_json(self)->bytes:
        "The manifest as JSON, with a checksum; raises `StoreError` if it is larger than readers accept"
        content = {name:getattr(self, name) for name in self.__dataclass_fields__}
        described = {key:value for key,value in content.items() if value or key not in self._optional}
        stored = seal({'uid':self.uid, **described})
        if len(stored)>MAX_MANIFEST or _parsed_bytes(stored)>MAX_PARSED:
            largest = max(self.vocab, key=lambda field: len(self.vocab[field]), default=None)
            what = '' if largest is None else f', {len(self.vocab[largest]):,} of them labels of {largest!r}'
            raise StoreError(f'{self.name}: a manifest of {len(stored):,} bytes{what}: more than any reader accepts; '
                             'texts that are different for nearly each sample belong into a field such as '
                             '`caption.txt`, and not among the labels')
        return stored

    @classmethod
    def from_json(cls,
        stored:bytes, # What `to_json` returned
        where:str='manifest', # Name for error messages
    ):
        "The manifest; raises `CorruptSample` if it is damaged, and `UnsupportedFormat` for a newer one, or none at all"
        if not _seal_start.match(stored): raise UnsupportedFormat(f'{where}: not a manifest: {stored[:40]!r}')
        try:
            if len(stored)>MAX_MANIFEST: raise TooLarge(f'more than {MAX_MANIFEST:,} bytes')
            content = unseal(stored)
        except TooLarge as e: raise UnsupportedFormat(f'{where}: a manifest with too much in it: {e}') from None
        except ValueError as e:
            raise CorruptSample(f'{where}: the manifest {e}: it was damaged or changed after it was written; restore '
                                'it from a copy, or ingest the dataset again') from None
        try: cls._check(content, where)
        except (RecursionError,OverflowError):
            raise UnsupportedFormat(f'{where}: not a manifest: {stored[:40]!r}') from None
        manifest = cls(**{k:v for k,v in content.items() if k in cls.__dataclass_fields__})
        manifest.head = stored[:_HEAD_BYTES]
        return manifest

    @classmethod
    def _check(cls, content, where):
        """Check that `content`, parsed JSON, is a manifest that this version reads, with the right types

        Raises `UnsupportedFormat`; messages begin with `where`."""
        version = content.get('format')
        if type(version) is not int or version<1:
            raise UnsupportedFormat(f'{where}: not a manifest: there is no format {version!r:.60}')
        if version>cls.newest_format:
            raise NewerFormat(f'{where}: format {version}; this version reads up to {cls.newest_format}: '
                              'upgrade fastai_remote')
        known,checks = cls.__dataclass_fields__,_of_manifest
        bad = [name for name in ('name','n','fields') if name not in content]
        bad += [name for name in content if name in known and type(content[name]) is not known[name].type]
        bad += [name for name in content if name in checks and name not in bad and not checks[name](content[name])]
        if not bad:
            bad = [f'{name} {key!r}' for name,is_valid in _of_entries.items()
                   for key,value in content.get(name, {}).items() if not _is_text(key) or not is_valid(value)]
        if not bad:
            n,fields,splits = content['n'],content['fields'],content.get('splits', {})
            bad += [f'fields {field!r}' for field,entry in fields.items()
                    if field.endswith('.crc') and field.removesuffix('.crc') in fields and entry.get('dtype')!='u4']
            bad += [f'counts {field!r}' for field in content.get('counts', {}) if field not in content.get('vocab', {})]
            bad += [f'split {name!r}' for name,(start,stop) in splits.items() if not 0<=start<=stop<=n]
            bad += [f'part {number}' for number,part in enumerate(content.get('parts', ())) if not _is_part(part)]
            runs = content.get('runs', {})
            if (content.get('parts') or runs) and not _are_runs(runs, fields): bad += ['runs']
            if not _are_gaps(content.get('gaps', {}), n): bad += ['gaps']
        if bad: raise UnsupportedFormat(f"{where}: damaged: missing or invalid: {', '.join(bad)}")

    def part_entries(self)->list: # Of dicts
        "The entry of each part, as in `parts`; of a dataset that was never changed, what describes its only part"
        return self.parts or [{name:getattr(self, name) for name in self._of_part}]

    def stamp(self):
        "Set `created` to the current time, and return the manifest"
        self.created = datetime.now(timezone.utc).isoformat(timespec='seconds')
        return self

# The checksum at its beginning covers all bytes behind it: without one, a class name with a flipped bit would be read
# as another name. A manifest that does not match its checksum raises `CorruptSample`, also if another program has only
# formatted it. One of a newer format raises an error that says what to do, and so does anything else that is not a
# manifest.

def crc32s(
    values:list # A list of `bytes`
)->np.ndarray: # `uint32`, shape (len(values),)
    "The crc32 of each value"
    return np.fromiter(map(crc32, values), np.uint32, len(values))

@cache
def _crc_tables():
    "What a byte adds (by xor) to a crc32 if `k` more bytes follow it, 0 to 15: element `256*k+byte` of a uint32 array"
    tables = [[crc32(bytes([byte])+bytes(following))^crc32(bytes(1+following)) for byte in range(256)]
        for following in range(16)]
    return np.array(tables, np.uint32).ravel()

@cache
def _crc_offsets(number_bytes, width):
    """Where the tables of `_crc_tables` start for each byte of a message, and the crc32 of a message of zeros

    The message is a value of `width` bytes and a sample number of 8, of which only the last `number_bytes` are looked
    up. Returns an int array of shape (number_bytes+width, 1), the number's bytes first, each from the least
    significant on; and a `np.uint32`."""
    following = [*range(number_bytes), *range(8, 8+width)]
    return 256*np.array(following)[:,None],np.uint32(crc32(bytes(width+8)))

def packed_crcs(
    values:np.ndarray, # Numbers of 1 to 8 bytes, shape (n,)
    numbers:np.ndarray, # Their sample numbers, `int64`, shape (n,)
    step:int=1<<15, # How many values to process at a time
)->np.ndarray: # `uint32`, shape (n,)
    """Checksums of fixed-width values: the crc32 of the value and then its sample number, 8 bytes, both big-endian

    Because the sample number is included, a correct value in the wrong place does not match. A crc32 is linear: the
    crc32 of a message is the exclusive or of what each of its bytes adds. These are looked up in tables, for all
    values at once."""
    if len(values)>step:
        return np.concatenate([packed_crcs(values[a:a+step], numbers[a:a+step]) for a in range(0, len(values), step)])
    n,width = len(values),values.dtype.itemsize
    if not n: return np.zeros(0, np.uint32)
    # In little-endian arrays, byte k of a number is the one that is followed by k bytes in the message.
    little = values.dtype.newbyteorder('<')
    value_bytes = np.ascontiguousarray(values, little).view(np.uint8).reshape(n, width)
    number_bytes = np.ascontiguousarray(numbers, '<i8').view(np.uint8).reshape(n, 8)
    used = (int(numbers.max()).bit_length()+7)//8   # the other bytes of numbers are zero, and add nothing
    at = np.empty((used+width, n), np.intp)
    at[:used] = number_bytes[:,:used].T
    at[used:] = value_bytes.T
    offsets,crc_of_zeros = _crc_offsets(used, width)
    at += offsets
    return np.bitwise_xor.reduce(_crc_tables().take(at), axis=0, initial=crc_of_zeros)

# The checksum of a label is an ordinary crc32. `packed_crcs` computes those of a whole batch at once: 7 µs for 64
# labels.

def size_str(n:int)->str:
    "A number of bytes for people: '2.2 KB'"
    for unit in ('B','KB','MB','GB'):
        if round(n)<1000: return f'{n:.1f} {unit}' if unit!='B' and round(n, 1)<100 else f'{n:.0f} {unit}'
        n /= 1000
    return f'{n:.1f} TB'

def image_sizes_str(
    stats:dict # The entry of an image field in `manifest.stats`
)->str:
    "Sizes, means and deviations of the images of a field, in words"
    width,height = (f'{low}' if low==high else f'{low} to {high}' for low,_,high in (stats['width'],stats['height']))
    mean,std = (', '.join(f'{o:.3f}' for o in stats[k]) for k in ('mean','std'))
    return f"{width} wide, {height} high (measured on {stats['n']:,} images); mean {mean}; deviation {std}"

def html_table(
    title:str,
    rows:dict # `{name: value}`; values that are '' or `None` are left out
)->str:
    "An HTML table of two columns"
    shown = {k:v for k,v in rows.items() if v not in ('', None)}
    tr = ''.join(f'<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>' for k,v in shown.items())
    return f'<table><tr><th colspan=2>{escape(title)}</th></tr>{tr}</table>'

# --- Positions

# fastai passes positions as `int`. Users pass whatever their code computes, such as `np.int64(3)` or `tensor(3)`.
# `int_index` accepts all of these without importing torch.

def int_index(
    i, # A position, or something else
)->int: # `None` for something else, such as a slice or a list of positions
    """One position as an `int`: from any integer, or an array or tensor with no dimensions

    Raises `TypeError` for a bool, a float, a complex number, a `str`, `bytes` or `None`."""
    if getattr(i, 'ndim', None)==0: i = i.item()
    if isinstance(i, (bool,float,complex,str,bytes)) or i is None:
        raise TypeError(f'a position is an integer, not the {type(i).__name__} {i!r}')
    return int(i) if isinstance(i, int) else None
