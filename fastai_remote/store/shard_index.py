"""The index of a shard, which says where in the tar each value is, and the table of all shards

Docs: page `store/shard_index`"""

import base64, codecs, dataclasses, json, os, re, tarfile, threading, warnings, zlib
from array import array
from collections import OrderedDict
from copy import copy
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from fastcore.basics import chunked
from zlib_ng.zlib_ng import crc32

from ..codec.fields import number_extension
from ..core import CorruptSample, Manifest, MissingSample, parse_json, RunTable, StoreError, UnsupportedFormat, unzipped
from .bounded import MAX_FILE

# --- The index of one shard

# An index consists of a JSON header and columns. The columns are little-endian, one after the other, each aligned to 8
# bytes, and the header names them: `jpg@` contains offsets, `jpg#` lengths, `jpg.crc` checksums, `cls` the values. A
# length of 2^32-1 means that a sample has no such field, as happens in shards that other tools have written. If samples
# lack a field of fixed width, a column such as `cls?` says which samples have it.
#
# The keys of the samples are compressed, 128 together. Consecutive numbers take about 2 bytes per key in this way,
# names with a class and a number 4 to 7, and random hexadecimal names half of their length. A key is looked up in 5 to
# 30 µs.
#
# Labels are numbered in each shard separately, so a shard can be written before all labels are known. When an index is
# opened, its codes are translated to those of the dataset. Integer labels whose vocabulary is not known yet are
# numbered in the same way.

INDEX_MAGIC = b'fr.idx\r\n' # The first bytes of each index file, by which our files are told from those of others
_FORMAT = 1
_NO_VALUE = 0xFFFFFFFF   # length that says: this sample has no such field
_KEYS_PER_BLOCK = 128   # keys that are compressed together; more take hardly less space, and longer to look up
_KEY_BYTES,_KEY_ENDS = '__key__','__key__ ends'   # entries of the header: the compressed keys, and where blocks end
_MAX_BLOCK = 1<<24   # bytes of the keys of one block
_MAX_RECORD = 1<<32   # bytes of memory for the record, which is only read when tars are indexed again

def pack_index(
    columns:dict, # `{column: array}`, all of the same length
    labels:dict=None, # `{field: list of labels, str or int}`, in the order of this shard's codes
    keys:list=None, # Keys of the samples, `str`; default: they are not stored
    n:int=None, # Number of samples; default: the length of the columns
    record:dict=None, # What `ShardIndex.record` returns; anything that JSON can represent
)->bytes: # The content of the index file
    "The index file with these columns"
    offset,parts,entries,key_entries = 0,[],[],{}
    def append(values):
        nonlocal offset
        content = np.ascontiguousarray(values, values.dtype.newbyteorder('<')).tobytes()
        parts.append(content+bytes(-len(content)%8))
        offset += len(parts[-1])
        return offset-len(parts[-1])
    for name,values in columns.items(): entries.append([name, values.dtype.str[1:], append(values)])
    if n is None: n = len(next(iter(columns.values())))
    if keys is not None:
        blocks = [zlib.compress('\0'.join(some).encode('utf-8', 'surrogateescape'))
                  for some in chunked(keys, _KEYS_PER_BLOCK)]
        content,ends = b''.join(blocks),np.cumsum([len(block) for block in blocks], dtype=np.uint32)
        key_entries = {_KEY_BYTES:[append(np.frombuffer(content, 'u1')), len(content)],
                       _KEY_ENDS:[append(ends), len(ends)]}
    body = b''.join(parts)
    header = dict(format=_FORMAT, n=n, columns=entries, labels=labels or {}, **key_entries)
    if record is not None: header['record'] = _pack(json.dumps(record).encode())
    header = json.dumps(header, ensure_ascii=False, separators=(',',':')).encode()
    header += b' '*(-(len(INDEX_MAGIC)+4+len(header))%8)
    return INDEX_MAGIC+len(header).to_bytes(4, 'little')+header+body

class ShardIndex:
    "The index of one shard: its columns, as views of the file's bytes"
    def __init__(self,
        buf, # Content of the index file: `bytes`, or a mapped file
        where:str='index' # Name of the file, for error messages
    ):
        """Raises `CorruptSample` if `buf` cannot be read as an index, and `UnsupportedFormat` if the format is newer

        The checksum of the file is in the table of shards, and compared by whoever reads it."""
        self.buf = buf
        try: self._read_header(where)
        except (ValueError,KeyError,TypeError,OverflowError,RecursionError) as e:
            raise CorruptSample(f'{where}: {len(buf):,} bytes that are no index, or a damaged one: {e}') from None
        self.codes,self.where = {},where

    def _read_header(self, where):
        """Set the attributes from the header of `buf`

        Raises `UnsupportedFormat`; for a damaged header, `ValueError` and other errors, which `__init__` translates."""
        buf,start = self.buf,len(INDEX_MAGIC)+4
        if buf[:len(INDEX_MAGIC)]!=INDEX_MAGIC: raise ValueError('not an index')
        length = int.from_bytes(buf[start-4:start], 'little')
        header = parse_json(buf[start:start+length])
        if not isinstance(header, dict) or not isinstance(header.get('labels'), dict) or header.get('n', -1)<0:
            raise ValueError('no header')
        if header['format']>_FORMAT:
            raise UnsupportedFormat(f"{where}: format {header['format']}; "
                                    f'this version reads up to {_FORMAT}: upgrade fastai_remote')
        self.n,self.labels = header['n'],header['labels']
        self.start = start+length
        self.columns = {name:np.frombuffer(buf, np.dtype('<'+dtype), self.n, self.start+offset)
                        for name,dtype,offset in header['columns']}
        if any(column.dtype.kind not in 'iuf' for column in self.columns.values()):
            raise ValueError('columns that are no numbers')
        self.key_bytes = self.key_ends = None
        if _KEY_BYTES in header:
            (offset,length),(ends_offset,blocks) = header[_KEY_BYTES],header[_KEY_ENDS]
            self.key_bytes = np.frombuffer(buf, 'u1', length, self.start+offset)
            self.key_ends = np.frombuffer(buf, '<u4', blocks, self.start+ends_offset)
        self.packed_record = header.get('record')
        self._key_block = None,()   # the block of keys that was used last: its number, and its keys

    def spans(self,
        f:str, # A variable-width field
        i:np.ndarray # Positions of samples in the shard, shape (k,)
    )->tuple: # Two int64 arrays of shape (k,); the length is -1 where a sample has no such field in the shard
        "Offsets in the shard, decompressed, and lengths, of values of field `f`; raises `CorruptSample`"
        if f'{f}@' not in self.columns: return np.zeros(len(i), np.int64),np.full(len(i), -1)
        if f'{f}#' not in self.columns: raise CorruptSample(f'{self.where}: a damaged index: no lengths of {f!r}')
        lengths = self.columns[f'{f}#'][i].astype(np.int64)
        return self.columns[f'{f}@'][i].astype(np.int64),np.where(lengths==_NO_VALUE, -1, lengths)

    def has(self,
        f:str, # A field
        i:np.ndarray=None # Positions of samples in the shard, shape (k,); default: all
    )->np.ndarray: # bool, shape (k,)
        "Which of samples `i` have field `f` in the shard?"
        i = np.arange(self.n) if i is None else i
        for column,is_present in ((f'{f}#', lambda lengths: lengths!=_NO_VALUE), (f'{f}?', lambda flags: flags!=0)):
            if column in self.columns: return is_present(self.columns[column][i])
        return np.full(len(i), f in self.columns)

    def keys(self,
        i:np.ndarray # Positions of samples in the shard, shape (k,)
    )->list: # Of `str`
        "Keys of samples `i`; raises `CorruptSample`, also for an index without keys"
        if self.key_bytes is None: raise CorruptSample(f'{self.where}: a damaged index: it has no keys of samples')
        try: return [self._keys_of(position//_KEYS_PER_BLOCK)[position%_KEYS_PER_BLOCK] for position in i.tolist()]
        except (IndexError,ValueError) as e:
            raise CorruptSample(f'{self.where}: a damaged index: the keys of samples: {e}') from None

    @property
    def record(self)->dict:
        """What an ingest has counted in the shard, so that it need not be read again

        Raises `CorruptSample`, also for an index without a record."""
        try: return parse_json(_unpack(self.packed_record, MAX_FILE), _MAX_RECORD)
        except (ValueError,TypeError) as e:
            raise CorruptSample(f'{self.where}: a damaged index, or one without a record: {e}') from None

    def _keys_of(self, block):
        "The keys of block number `block`, a list of `str`; raises `IndexError` or `ValueError` for damage"
        last,keys = self._key_block
        if last==block: return keys
        start = int(self.key_ends[block-1]) if block else 0
        text = unzipped(self.key_bytes[start:int(self.key_ends[block])].tobytes(), _MAX_BLOCK, 'a block')
        keys = text.decode('utf-8', 'surrogateescape').split('\0')
        self._key_block = block,keys
        return keys

    def values(self,
        f:str, # A fixed-width field
        i:np.ndarray, # Positions of samples in the shard that have the field, shape (k,)
        dtype, # Type of the result
        codes:dict=None # `{label: code}` of the dataset; `None` or empty: labels are integers, and are the values
    )->np.ndarray: # Shape (k,)
        "Values of field `f` of samples `i`, with this shard's codes translated; raises `CorruptSample`"
        try:
            values = self.columns[f][i]
            if f in self.labels:
                if f not in self.codes: self.codes[f] = self._translation(f, codes)
                values = self.codes[f][values]
            return values.astype(dtype)
        except (KeyError,IndexError,TypeError,ValueError,OverflowError) as e:
            raise CorruptSample(f'{self.where}: a damaged index: {f!r}: {type(e).__name__}: {e}') from None

    def _translation(self, f, codes):
        """int64 array that translates codes of `f` in this shard, its indices, into those of the dataset

        `codes` as in `values`; without them, it translates into the labels themselves. Raises `KeyError`, `ValueError`,
        `TypeError` for labels that are not among `codes`, or are no integers."""
        labels = self.labels[f]
        # Labels of a field that first occurs late are text in an index, also if all labels of the dataset are integers.
        if codes: return np.array([codes[label] if label in codes else codes[int(label)] for label in labels], np.int64)
        wrong = [label for label in labels if type(label) is not int]
        if wrong: raise TypeError(f'label {wrong[0]!r} without a vocabulary')
        return np.array(labels, np.int64)

# --- Writing a shard

# `ShardFile` appends samples to a tar, member by member, and keeps the columns of the index, which are some bytes per
# sample. Members have neither a time nor an owner, so the same samples give the same file. A number whose field other
# tools do not know is stored as JSON (`score.f4.json`), which WebDataset and `datasets` decode.

def _header(name, size):
    """The header, `bytes`, of a member of `size` bytes, in the ustar format

    Names that do not fit are written as GNU tar does, with more blocks before the header."""
    info = tarfile.TarInfo(name)
    info.size = size
    try: return info.tobuf(tarfile.USTAR_FORMAT, 'utf-8', 'surrogateescape')
    except ValueError: return info.tobuf(tarfile.GNU_FORMAT, 'utf-8', 'surrogateescape')

class SummingFile:
    "Writes to the binary file `f`, and keeps the size and the crc32 of what was written"
    def __init__(self, f): self.f,self.size,self.crc = f,0,0
    def write(self, b):
        self.f.write(b)
        self.size,self.crc = self.size+len(b),crc32(b, self.crc)

class IndexColumns:
    "The columns of an index while its shard is written, some bytes per sample, and the keys of the samples"
    def __init__(self,
        fields:dict # `{field: entry}`, as in the manifest
    ):
        self.fields,self.spans,self.values = {},{},{}
        self.n,self.labels,self.keys = 0,{},[]
        self.counts = {} # `{field: number of samples that have it}`
        self.absent = {} # `{fixed-width field: positions of the samples that lack it}`
        for f,entry in fields.items():   # but checksums, which belong to their fields
            if not (f.endswith('.crc') and f.removesuffix('.crc') in fields): self.add_field(f, entry)

    def add_field(self,
        f:str, # A field that the samples added so far do not have
        entry:dict # Its entry, as in the manifest
    ):
        "Make columns for a field"
        self.fields[f],self.counts[f] = entry,0
        if entry['dtype'] is None: # Offsets, lengths, checksums
            self.spans[f] = tuple(array(kind, [filler])*self.n for kind,filler in zip('QII', (0,_NO_VALUE,0)))
            return
        self.values[f] = array({'f':'d','u':'Q'}.get(np.dtype(entry['dtype']).kind, 'q'), [0])*self.n
        self.absent[f] = array('I', range(self.n))

    def add(self,
        spans:dict, # `{field: (offset, length, crc)}`
        values:dict, # `{field: number or label}`
        key:str # Key of the sample
    ):
        "Append a sample, which may lack fields"
        for field,columns in self.spans.items():
            for column,number in zip(columns, spans.get(field, (0,_NO_VALUE,0))): column.append(number)
        for field,column in self.values.items():
            value = values.get(field)
            if value is None:
                self.absent[field].append(self.n)
                value = 0
            elif isinstance(value, str) or self.fields[field].get('staged'):
                codes = self.labels.setdefault(field, {})
                value = codes.setdefault(value, len(codes))
            column.append(value)
        for field in (*spans, *values): self.counts[field] += 1
        self.keys.append(key)
        self.n += 1

    def pack(self,
        record:dict=None # As in `pack_index`
    )->bytes:
        "The content of the index file; fields that no sample has are left out"
        columns = {}
        for field,(offsets,lengths,checksums) in self.spans.items():
            if not self.counts[field] and self.n: continue
            offsets = _as_numpy(offsets)
            if not len(offsets) or offsets.max()<1<<32: offsets = offsets.astype('u4')
            columns |= {f'{field}@':offsets, f'{field}#':_as_numpy(lengths), f'{field}.crc':_as_numpy(checksums)}
        for field,values in self.values.items():
            if not self.counts[field] and self.n: continue
            columns[field] = _as_numpy(values).astype('u4' if field in self.labels else self.fields[field]['dtype'])
            if len(self.absent[field]):
                is_present = np.ones(self.n, np.uint8)
                is_present[_as_numpy(self.absent[field])] = 0
                columns[f'{field}?'] = is_present
        labels = {field:list(codes) for field,codes in self.labels.items()}
        return pack_index(columns, labels, self.keys, self.n, record)

def _as_numpy(values): return np.frombuffer(values, values.typecode) if len(values) else np.zeros(0, values.typecode)

class ShardFile:
    "A shard that is being written: appends samples to a tar, and keeps the columns of its index, an `IndexColumns`"
    def __init__(self,
        f, # A binary file
        fields:dict, # `{field: entry}`, as in the manifest
        has_numbers:bool=True # Are numbers and labels in the tar, too, for other tools?
    ): self.out,self.columns,self.has_numbers = SummingFile(f),IndexColumns(fields),has_numbers

    n = property(lambda self: self.columns.n, doc='Number of samples')
    size = property(lambda self: self.out.size, doc='Bytes written')
    crc = property(lambda self: self.out.crc, doc='Checksum of the bytes written')

    def add(self,
        key:str, # Name of the sample
        values:dict, # `{field: bytes, or number, or label}`; a label becomes a member `cls.txt`, a number `cls`
        crcs:dict, # `{field: checksum}` of the bytes
    ):
        "Append a sample"
        spans = {}
        for field,value in values.items():
            if not (self.has_numbers or isinstance(value, bytes)): continue
            content = value if isinstance(value, bytes) else str(value).encode()
            header = _header(f'{key}.{field}{number_extension(field, value)}', len(content))
            if isinstance(value, bytes): spans[field] = self.size+len(header),len(value),crcs[field]
            for part in (header, content, bytes(-len(content)%512)): self.out.write(part)
        self.columns.add(spans, {field:value for field,value in values.items() if field not in spans}, key)

    def close(self):
        "Write the end of the archive, as the tar format requires it; the file stays open"
        self.out.write(bytes(1024))

# --- Compressed shards

# A compressed shard is decompressed while it is read, in pieces of limited size: a few compressed bytes can stand for
# gigabytes.

class Decompressor:
    """Decompresses a file part by part: call it with the next part, and it yields pieces of limited size

    The file may consist of several gzip members or zstd frames, one after the other. `bad` is the error if the file is
    damaged, and nothing more comes then, also if the caller has set it; else it is `None`. A file that is cut off
    counts as undamaged."""
    def __init__(self,
        new, # Returns a decoder of one member or frame, as `zlib.decompressobj`
        error:type, # What it raises for damage
        step:int # Compressed bytes that are decoded at a time, so few that they cannot become too many
    ):
        self.new,self.error,self.step = new,error,step
        self.decoder,self.bad = new(),None

    def __call__(self,
        data:bytes # The next part of the file
    ): # Yields pieces of the content, some of them empty
        "Decompress `data`"
        try:
            for k in range(0, len(data), self.step):
                if not self.bad: yield from self._content(data[k:k+self.step])
        except self.error as e: self.bad = ValueError(str(e))

    def _content(self, compressed):
        while compressed and not self.bad:
            if self.decoder.eof:
                compressed = compressed.lstrip(b'\0')   # zeros at the end are padding
                if not compressed: return
                self.decoder = self.new()
            yield self.decoder.decompress(compressed)
            compressed = self.decoder.unused_data

COMPRESSIONS = '','gzip','zstd' # How a shard can be compressed; the table of shards has the positions

def compression_of(
    start:bytes, # The first 16 bytes of a file, or all if there are fewer
    name # Of the file, for messages
)->str: # One of `COMPRESSIONS`; '' if the file is not compressed
    """Recognise how a file is compressed by its first bytes, whatever its name is

    Raises `ValueError` for xz and bzip2, which are slow to read."""
    if start.startswith(b'\x1f\x8b\x08'): return 'gzip'
    if start.startswith(b'\x28\xb5\x2f\xfd') or start[1:4]==b'\x2a\x4d\x18' and start[0]>>4==5: return 'zstd'
    is_xz = start.startswith((b'\xfd7zXZ', b'\x5d\0\0\x80'))
    if is_xz or start[:3]==b'BZh' and start[4:10]==b'1AY&SY':
        kind = 'xz' if is_xz else 'bzip2'
        raise ValueError(f'{name}: compressed with {kind}, which is slow to read: compress the tar with zstd or gzip, '
                         'or not at all')
    return ''

def decompressor(
    compression:str # One of `COMPRESSIONS`
)->Decompressor: # `None` for ''
    """A new decompressor of one file, whose pieces have at most 32 MiB

    Raises `ImportError` for zstd without `zstandard`."""
    if not compression: return None
    if compression=='gzip': return Decompressor(partial(zlib.decompressobj, 31), zlib.error, 1<<12)
    try: import zstandard
    except ImportError:
        raise ImportError('tars that are compressed with zstd need the package zstandard: '
                          'pip install fastai_remote[zstd]') from None
    new = zstandard.ZstdDecompressor(max_window_size=1<<27).decompressobj
    return Decompressor(new, zstandard.ZstdError, 1<<10)

# --- The table of all shards

# The manifest contains the table of shards: name, number of samples, size and checksum of each, and the checksum of its
# index file. That checksum covers the whole file including its header. A dataset of a billion samples may have a
# million shards, so the table consists of packed columns. Once opened, it is arrays of 34 to 64 bytes per shard.

# Of a `ShardTable`
_COLUMNS = dict(n='<u4', size='<i8', crc='<u4', idx='<u4', raw='<i8', icrc='<u4', kind='u1', first='<u4',
                stamp='<u8')

_MAX_SHARDS,_MAX_NAMES = 1<<20,1<<25   # of a dataset; opening it takes up to 140 MB for them

def _pack(column):
    if not isinstance(column, bytes): column = column.astype(column.dtype.newbyteorder('<')).tobytes()
    return base64.b64encode(zlib.compress(column, 1)).decode()
def _unpack(packed, limit): return unzipped(base64.b64decode(packed), limit)

INDEX_SUFFIX = '.fastai_remote' # What the name of an index file ends in
# Folder beside the shards, in which no other tool looks: for index files, tables, parts with added or changed values,
# failures and the state of an ingest; beside shards of others also for the manifest
INDEX_FOLDER = '.fastai_remote'

TABLE_FILE = re.compile(r'\.runs-\d+') # Names of files that say where the samples of a changed dataset are
FAILURES_FILE = re.compile(r'(?:shard|index)(\d*)-failures\.json', re.ASCII) # Group 1 is the generation
ADDED = '.part-' # How the names of shards in this folder begin, and the `prefix` of their parts

def has_added_values(
    part:dict # Its entry in the manifest
)->bool:
    "Has a part values that were added to samples or changed, and not samples? Then its shards are in our own folder."
    return part['prefix'].startswith(ADDED)

def index_name(
    shard:str, # Name of a shard
    version:int=0 # The generation that has written it where another index was in use; 0 for the first of all
)->str:
    "Name of the index file of `shard`"
    return f'{shard}.{version}{INDEX_SUFFIX}' if version else shard+INDEX_SUFFIX

# A part of a path that is empty, '.' or '..' (also: an absolute path), a backslash or a zero byte
_UNSAFE_NAME = re.compile(rb'(?:\A|[\n/])\.{0,2}(?=[\n/]|\Z)|[\\\0]')

class ShardRow(NamedTuple):
    "What a `ShardTable` has of one shard"
    name:str # Its path in the folder
    n:int # Samples
    size:int # Bytes
    crc:int # Checksum
    idx:int # Bytes of its index
    raw:int # Bytes when decompressed
    icrc:int # Checksum of the index file
    kind:int=0 # How it is compressed, a position in `COMPRESSIONS`
    first:int=0 # `version` of `index_name`: `index_shards` does not write over the indices of an earlier dataset
    stamp:int=0 # `stamp_number` when it was indexed; 0 if it is not known

class ShardTable:
    "The table of the shards of a dataset, as arrays: names, numbers of samples, sizes and checksums"
    def __init__(self,
        names, # Names, a list of `str`; or `bytes`, the names in UTF-8 separated by newlines
        n:np.ndarray, # This, and what follows, as in `ShardRow`, of each shard
        size:np.ndarray,
        crc:np.ndarray,
        idx:np.ndarray,
        icrc:np.ndarray,
        raw:np.ndarray=None, # Default: `size`
        kind:np.ndarray=None,
        first:np.ndarray=None,
        stamp:np.ndarray=None
    ):
        self.text = names if isinstance(names, bytes) else '\n'.join(names).encode()
        newlines = np.flatnonzero(np.frombuffer(self.text, np.uint8)==10) if self.text else np.zeros(0, np.int64)
        begins = np.concatenate([[0], newlines+1])[:len(n)] # Where each name begins in `text`
        self.begins = begins.astype(np.uint32 if len(self.text)<1<<31 else np.int64)
        def as_array(column, dtype): return np.zeros(len(n), dtype) if column is None else np.asarray(column, dtype)
        self.n,self.size,self.crc,self.idx = (as_array(c, t) for c,t in ((n,'u4'),(size,'i8'),(crc,'u4'),(idx,'u4')))
        self.raw,self.icrc = as_array(size if raw is None else raw, 'i8'),as_array(icrc, 'u4')
        self.kind,self.first,self.stamp = as_array(kind, 'u1'),as_array(first, 'u4'),as_array(stamp, 'u8')
        self.starts = np.concatenate([[0], np.cumsum(self.n, dtype=np.int64)]) # First sample of each shard, and the end
        if len(newlines)!=max(0, len(n)-1): raise ValueError(f'{len(n)} shards with {len(newlines)+1} names')

    def __len__(self): return len(self.n)
    def name(self, s:int)->str:
        "Name of shard `s`"
        begin = int(self.begins[s])
        end = self.text.find(b'\n', begin)
        return self.text[begin:end if end>=0 else None].decode()
    def index_name(self, s:int)->str:
        "Name of the index file of shard `s`"
        return index_name(self.name(s), int(self.first[s]))

    def stamp_of(self, s:int)->int:
        "The `stamp_number` of shard `s` when it was indexed; 0 if it is not known"
        return int(self.stamp[s])

    def whole(self, s:int)->int:
        "Bytes of shard `s` when decompressed"
        return int(self.raw[s])
    def compression(self, s:int)->str:
        "How shard `s` is compressed, one of `COMPRESSIONS`"
        return COMPRESSIONS[self.kind[s]]
    def row(self, s:int)->ShardRow:
        "What the table has of shard `s`"
        return ShardRow(self.name(s), **{name:int(getattr(self, name)[s]) for name in _COLUMNS})

    def at(self,
        idxs:np.ndarray # Sample numbers, shape (k,)
    )->tuple: # Two arrays of shape (k,)
        "The shard of each sample, and its position there"
        shards = np.searchsorted(self.starts, idxs, 'right')-1
        return shards,idxs-self.starts[shards]

    def select(self,
        shards:np.ndarray, # Numbers of shards, in the order of the new table
        n:np.ndarray # How many samples each of them has there
    ):
        "A table of some of the shards, with other numbers of samples"
        table = copy(self)
        for name in ('begins',*_COLUMNS): setattr(table, name, getattr(self, name)[shards])
        table.n,table.starts = n.astype(np.uint32),np.concatenate([[0], np.cumsum(n, dtype=np.int64)])
        return table

    def freed(self,
        is_unused:np.ndarray # bool, shape (number of shards,)
    ):
        "The table without the files of some shards: they keep their numbers, but have no index any more"
        table = copy(self)
        table.idx = np.where(is_unused, 0, self.idx).astype(np.uint32)
        return table

    def pack(self)->dict:
        """`{column: text}` for JSON: the columns that have other values than by default, compressed and in base64

        Raises `StoreError` for more shards than readers accept, or for names that are too long together."""
        if len(self)>_MAX_SHARDS or len(self.text)>_MAX_NAMES:
            raise StoreError(f'{len(self):,} shards with names of {len(self.text):,} bytes: a dataset has up to '
                             f'{_MAX_SHARDS:,} shards, with names of {_MAX_NAMES:,} bytes in all: make them larger')
        columns = {k:getattr(self, k) for k in ('text',*_COLUMNS)}
        unused = {k for k in ('kind','first','stamp') if not columns[k].any()}
        if (self.raw==self.size).all(): unused.add('raw')
        return {k:_pack(column) for k,column in columns.items() if k not in unused}

    @classmethod
    def unpack(cls,
        d:dict, # What `pack` returned
        empties:bool=False # Take the columns out of `d`, so that their memory is free as soon as possible?
    ):
        "The table in `d`; raises `ValueError`, `KeyError`, `TypeError` if it is damaged, or larger than the limits"
        if sum(map(len, d.values()))<_SMALL_TABLE: return _small_table(*d.items())
        return cls._unpack(d, empties)

    @classmethod
    def _unpack(cls, d, empties):
        column = d.pop if empties else d.__getitem__
        columns = {k:np.frombuffer(_unpack(column(k), _MAX_SHARDS*np.dtype(dtype).itemsize), dtype)
                   for k,dtype in _COLUMNS.items() if k in d}
        if len({len(column) for column in columns.values()})>1: raise ValueError('columns of different lengths')
        if any((columns[k]<0).any() for k in ('size','raw') if k in columns): raise ValueError('a size below 0')
        if (columns['idx']>MAX_FILE).any(): raise ValueError(f'an index of more than {MAX_FILE:,} bytes')
        if 'kind' in columns and (columns['kind']>=len(COMPRESSIONS)).any(): raise ValueError('an unknown compression')
        text = _unpack(column('text'), _MAX_NAMES)
        if text.count(b'\n')!=max(0, len(columns['n'])-1): raise ValueError('another number of names than of shards')
        decoder = codecs.getincrementaldecoder('utf-8')()   # raises `UnicodeDecodeError`, a `ValueError`
        for k in range(0, len(text)+1, 1<<20): decoder.decode(text[k:k+(1<<20)], k+(1<<20)>len(text))
        table = cls(text, **columns)
        unsafe = len(table) and _UNSAFE_NAME.search(table.text)
        if unsafe:
            k = table.text.count(b'\n', 0, unsafe.start()+(unsafe[0][:1]==b'\n'))
            raise ValueError(f'the name of shard {k}, {table.name(k)!r:.200}, leaves the folder')
        return table

_SMALL_TABLE = 2048   # characters of all columns: a few shards

@lru_cache(1<<13)
def _small_table(*columns):
    "The table with these `(name, text)`: each change of a dataset, and each reader, needs those of all changes before"
    return ShardTable._unpack(dict(columns), False)

def joined_tables(
    tables:list # Of `ShardTable`
)->ShardTable:
    "The shards of several tables, one table after the other"
    columns = {name:np.concatenate([getattr(table, name) for table in tables]) for name in _COLUMNS}
    return ShardTable(b'\n'.join(table.text for table in tables if len(table)), **columns)

def ordered_shards(
    rows:RunTable, # The order of the samples
    table:ShardTable, # The shards of all parts, one part after the other
    sizes:list # Number of samples of each part
)->tuple: # Numbers of shards in `table`; how many samples of each there are; int64 arrays
    "The shards that have samples, in the order of the samples"
    firsts = np.cumsum([0, *sizes])[rows.parts]+rows.firsts   # among the samples of all parts
    stops = firsts+rows.lengths
    low,high = np.searchsorted(table.starts, firsts, 'right')-1,np.searchsorted(table.starts, stops)
    counts = high-low
    run = np.repeat(np.arange(len(counts)), counts)
    shards = low[run]+np.arange(len(run))-np.repeat(np.cumsum(counts)-counts, counts)
    n = np.minimum(table.starts[shards+1], stops[run])-np.maximum(table.starts[shards], firsts[run])
    begins = np.flatnonzero(np.diff(shards, prepend=-1))   # several runs of one shard, where samples were dropped
    return shards[begins],np.add.reduceat(n, begins) if len(n) else n

LABELS_KIND = 'fastai_remote labels' # Entry `__kind__` of `labels.json`, by which ours is told from that of other tools

def pack_labels(
    vocab:dict # `{field: list of labels}`
)->bytes: # Empty if `vocab` is
    "The content of `labels.json`, which has the labels of a dataset for other tools"
    if not vocab: return b''
    content = json.dumps({'__kind__':LABELS_KIND, **vocab}, ensure_ascii=False, indent=1)
    return content.encode('utf-8', 'surrogatepass')

@dataclasses.dataclass
class ShardManifest(Manifest):
    "A `Manifest` of a dataset in shards: with the table of shards, also in each entry of `parts`"
    _optional = *Manifest._optional,'before'
    _of_part = *Manifest._of_part,'shards','failures','failures_crc'

    shards:dict = dataclasses.field(default_factory=dict) # A packed `ShardTable`; empty if there are `parts`
    base:str = '' # Folder of the shards, if it is not that of the manifest
    failures:str = '' # Name of the file that lists what could not be converted; '' if there is none
    failures_crc:int = 0 # Its checksum
    # Names of shards and files that only the version before needs: they stay until the next one is published
    before:list = dataclasses.field(default_factory=list)

    @classmethod
    def _check(cls, d, where):
        super()._check(d, where)
        parts,kinds = d.get('parts', []),dict(shards=dict, failures=str, failures_crc=int)
        bad = [k for k,part in enumerate(parts) if any(type(part.get(name)) is not kinds[name] for name in kinds)]
        if bad: raise UnsupportedFormat(f'{where}: damaged: part {bad[0]}')
        bad = [name for part in (d, *parts) if (name := part.get('failures')) and not FAILURES_FILE.fullmatch(name)]
        if bad: raise UnsupportedFormat(f'{where}: damaged: failures {bad[0]!r:.60}')
        key = d['runs'].get('key') if d.get('runs') else '.runs-1'
        if not TABLE_FILE.fullmatch(key): raise UnsupportedFormat(f'{where}: damaged: runs {key!r:.60}')
        before = d.get('before', [])
        if not isinstance(before, list) or any(type(name) is not str for name in before):
            raise UnsupportedFormat(f'{where}: damaged: before {before!r:.60}')

# --- Indices of a dataset
#
# When a process needs an index, it reads the whole file, from the folder, the cache or the network, and compares it
# with its checksum in the manifest. The index that is used is this copy in memory, so later changes on the disk do not
# affect it. Up to 64 MB of indices are kept, and the least recently used are forgotten first. At the beginning of an
# epoch, `new_epoch` forgets all indices that came from a disk, so each epoch reads and compares them again.
#
# A damaged copy in the cache is removed and fetched again, with a warning. `CorruptSample` is raised only if the index
# is damaged where it is stored.

_MAX_BYTES = 1<<26   # bytes of indices that a process keeps
_OVERHEAD = 4096   # bytes of Python's objects for each index

class ShardIndices:
    "The indices of the shards of a part, of which one process keeps those that were used last"
    def __init__(self,
        part # A `ShardPart`
    ):
        self.part,self.lock = part,threading.Lock()
        self.kept,self.nbytes = OrderedDict(),0 # `{shard: ShardIndex}`, least recently used first, and their bytes

    def file(self,
        shard:int # Number of a shard
    )->str:
        "Path of the index file of a shard in the folder of the dataset"
        return f'{INDEX_FOLDER}/{self.part.table.index_name(shard)}'

    def get(self,
        shards:list # Numbers of shards
    )->dict: # `{shard: ShardIndex}`, in the order of `shards`
        """The indices of `shards`, from memory, from the cache, or from where they are stored

        Warns of damaged indices in the cache, and fetches them again. Raises `CorruptSample`, `MissingSample`,
        `StoreUnavailable`, and `StoreNotFound` if the dataset was replaced."""
        with self.lock:
            result = {shard:self.kept[shard] for shard in shards if shard in self.kept}
            for shard in result: self.kept.move_to_end(shard)
        missing,new = [shard for shard in shards if shard not in result],{}
        for shard in () if self.part.storage.local or self.part.cache is None else missing:
            try: index = self.cached(shard)
            except CorruptSample as e: warnings.warn(f'{e}; it is fetched again; is the disk failing?', stacklevel=2)
            else:
                if index is not None: new[shard] = index
        if missing: new |= self.stored([shard for shard in missing if shard not in new])
        if new: self._keep(new, len(shards))
        result |= new
        return {shard:result[shard] for shard in shards}

    def new_epoch(self):
        """Forgets indices that are in files on this machine, in the folder or in the cache

        Without a cache, indices that came over the network stay in memory."""
        if not self.part.storage.local and self.part.cache is None: return
        with self.lock:
            self.kept.clear()
            self.nbytes = 0

    def _keep(self, new, n):
        """Keep `new`, `{shard: ShardIndex}`, and forget the least recently used beyond `_MAX_BYTES`

        At least the `n` that were used last are kept, however large they are."""
        with self.lock:
            for shard,index in new.items():
                if shard in self.kept: continue   # another thread has read it, too
                self.kept[shard] = index
                self.nbytes += len(index.buf)+_OVERHEAD
            while self.nbytes>_MAX_BYTES and len(self.kept)>n:
                _,index = self.kept.popitem(last=False)
                self.nbytes -= len(index.buf)+_OVERHEAD

    def cached(self,
        shard:int # Number of a shard
    )->ShardIndex: # `None` if it is not in the cache
        "The index of a shard in the cache; if it is damaged, it is removed, and `CorruptSample` is raised"
        key,cache = self._key(shard),self.part.cache
        fd = cache.open(key)
        if fd is None: return
        with os.fdopen(fd, 'rb') as file:
            content = file.read(int(self.part.table.idx[shard])+1)
            try: return self._parse(shard, content, f' in the cache {cache.folder}')
            except CorruptSample:
                cache.drop(key, fd)
                raise

    def stored(self,
        shards:list, # Numbers of shards
        again:bool=True # Read those that come over the network damaged once more?
    )->dict: # `{shard: ShardIndex}`, in any order
        "The indices of `shards`, read from where they are stored, and put into the cache; raises what `get` raises"
        storage,cache,result,damaged = self.part.storage,self.part.cache,{},[]
        # on this machine, one byte more shows that a file is longer
        ends = (self.part.table.idx[shards].astype(np.int64)+storage.local).tolist()
        for shard,content in zip(shards, storage.ranges([self.file(shard) for shard in shards], [0]*len(shards), ends)):
            if content is None: raise self._missing_error(shard)
            try: result[shard] = self._parse(shard, content)
            except CorruptSample as e:
                damaged.append(shard)
                if again and not storage.local: continue
                self.part.store.check_version(is_missing=True)
                raise CorruptSample(f'{e}: damaged in {storage.url}; put back a copy of this file, or ingest '
                                    'again') from None
            if storage.local or cache is None: continue
            fd = cache.fetch(self._key(shard), len(content), lambda f, content=content: f.write(content))
            if fd is not None: os.close(fd)
        return result|self.stored(damaged, again=False) if damaged else result

    def _parse(self, shard, content, where=''):
        """The `ShardIndex` in `content`, the bytes of its file

        `content` is a copy in memory, so what is compared with the checksum is what is used. Raises `CorruptSample`,
        which names the file and `where` it was read, and `UnsupportedFormat` for a newer format."""
        part,table = self.part,self.part.table
        file = f'{part.name}: {self.file(shard)}{where}'
        if len(content)!=table.idx[shard] or crc32(content)!=table.icrc[shard]:
            about = f'the index of shard {table.name(shard)}, with labels and places of {part.samples(shard)}'
            size = f' (want {table.idx[shard]:,} bytes)' if len(content)!=table.idx[shard] else ''
            raise CorruptSample(f'{file}: {about}: {len(content):,} bytes that do not match their checksum{size}')
        index = ShardIndex(content, file)
        if index.n!=table.n[shard]:
            raise CorruptSample(f'{file}: {index.n:,} samples, where the manifest has {table.n[shard]:,}')
        return index

    def _missing_error(self, shard):
        "The error to raise when the file of an index does not exist: `MissingSample`; `StoreNotFound` if replaced"
        part,file = self.part,self.file(shard)
        part.store.check_version(is_missing=True)
        about = f'the index of shard {part.table.name(shard)}, with labels and places of {part.samples(shard)}'
        return MissingSample(f'{part.name}: {file}, {about}, is not there: {part.storage.url}/{file}; put back a copy '
                             'of this file, or ingest again')

    def _key(self, shard):
        table = self.part.table
        return self.part.cache_key(self.part.folder+table.index_name(shard), int(table.icrc[shard]))
