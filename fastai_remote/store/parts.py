"""A dataset that is stored as a manifest, parts and run tables: how samples are found and read, in Redis and in shards

Docs: page `store/parts`"""

# Values are never changed once their dataset is visible. To append samples, to change some, or to add a field, what is
# new is written as a *part*. Then a new manifest is stored, which names all parts, and the tables that say where each
# sample is (runs). The values that have not changed are shared with the version before. (Decision note 0027.)
#
# This module contains everything that does not depend on the place: reading the tables, grouping the samples of a
# batch by their parts, reading damaged values once more, and noticing that there is another version now.

from typing import NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32

from ..core import CorruptSample, GapTable, Manifest, MAX_MANIFEST, StoreError, StoreNotFound, unpack_tables
from .base import mismatches, raise_missing, Store

# --- What is read of a part

class Part:
    """Samples of a dataset, or some of their fields, that were written at the same time; a base class

    Inside a part, samples have *places*. Those that no sample has are in its gap table."""
    n:int # Samples in it, also those that no run has any more
    gaps:dict # `places`, `runs` and `crc` of its gap table, as in the manifest; empty if it has none
    gaps_key:str # Key or file of the gap table

    def location(self,
        place:int, # Of a sample in the part
        field:str
    )->str:
        "Where a value is stored, as `Store.location` returns it"
        raise NotImplementedError

    def has(self,
        field:str,
        places:np.ndarray # Of samples in the part, shape (k,)
    )->np.ndarray: # bool, shape (k,)
        "Which of the samples have a field?"
        return np.ones(len(places), bool)

class PartRequest(NamedTuple):
    "Fields that are read of some samples, which are in the same part"
    part:Part
    fields:list # Names of fields; `f.crc` means the checksums of field `f`
    places:np.ndarray # Of the samples in the part, int64, shape (k,); `numbers` itself if they are the same
    numbers:np.ndarray # Their numbers in the dataset, int64, shape (k,)
    positions:object # Where the samples are in the batch: an int array, or `slice(None)` for all of it

def _put(values, positions, new):
    "Put `new` at `positions`, an int array, of `values`, a list or an array; returns it, a list if some are `None`"
    if isinstance(values, np.ndarray) and isinstance(new, np.ndarray):
        values[positions] = new
        return values
    values = list(values)
    for position,value in zip(positions.tolist(), new): values[position] = value
    return values

def _check_runs(manifest, tables):
    "Raises `ValueError` unless `tables`, the run tables of a dataset, refer to samples and fields that its parts have"
    parts = manifest.part_entries()
    sizes,used = np.array([part['n'] for part in parts]),[np.unique(table.parts).tolist() for table in tables]
    for table,numbers in zip(tables, used):
        if numbers and numbers[-1]>=len(parts): raise ValueError('a part that does not exist')
        if (table.firsts+table.lengths>sizes[table.parts]).any(): raise ValueError('samples that a part does not have')
    def layout(entry): return entry['dtype'] is None,entry.get('check')
    for field,entry in manifest.fields.items():
        for number in used[manifest.runs['columns'][field]]:
            other = parts[number]['fields'].get(field)
            if not other or layout(other)!=layout(entry): raise ValueError(f'part {number} has no such field {field!r}')

# --- StoredDataset

# A reader sees one version of the dataset, the one that was there when it was opened. Versions that `append`, `edit`
# and the like have made of it do not disturb the reader: values never change, and what is not used any more stays until
# the version after the next, or is missing. A reader that misses anything looks at the manifest before it answers, and
# raises `StoreNotFound` if there is another version now. The manifest lists the identifiers of the versions that it was
# made from (`earlier`), so a dataset that was written anew under the same name is not taken for one of them.

class StoredDataset(Store):
    "A store whose manifest names parts and tables; a subclass says where the manifest is, and how parts are read"
    _manifest = _run_tables = None # Read when they are needed
    _gap_tables = {} # By their keys
    later_head = b'' # The first bytes of the manifest of a later version, made from this one, once it was seen
    manifest_key = '' # Key or file of the manifest

    def read_manifest(self)->Manifest:
        "Read the manifest; raises `StoreNotFound`, also if the dataset was replaced since it was opened"
        raise NotImplementedError

    def stored_bytes(self,
        key:str, # Key or file of the manifest or of a table
        n:int # Number of bytes
    )->bytes: # `None` if it does not exist
        "The first `n` bytes of what is stored"
        raise NotImplementedError

    def place_of(self, key:str)->str:
        "Key or file of a table, for error messages"
        raise NotImplementedError

    def part(self, number:int)->Part:
        "The part with this number in run tables; 0 if there are none"
        raise NotImplementedError

    def read_parts(self,
        requests:list, # Of `PartRequest`
        again:bool=False # Read where the values are stored, over a new connection, and no copies of them?
    )->list: # `{field: list of bytes, or array for a fixed-width field}` for each request; `None` where one is missing
        "Read values of several parts, in one round trip if possible"
        raise NotImplementedError

    def replaced_error(self,
        exists:bool=True # Is there a dataset now?
    )->StoreNotFound:
        "The error to raise when this is no longer the dataset that was opened"
        raise NotImplementedError

    @property
    def manifest(self)->Manifest:
        """The manifest; it is read when it is first needed, and kept

        Raises `StoreNotFound`, also if the dataset was replaced since it was opened, `UnsupportedFormat`,
        `CorruptSample`, `StoreUnavailable`."""
        if self._manifest is None: self._manifest = self.read_manifest()
        return self._manifest

    def manifest_bytes(self)->bytes: # Of a longer value, only one byte more than a manifest may have
        "The manifest as it is stored now; `None` if there is none"
        return self.stored_bytes(self.manifest_key, MAX_MANIFEST+1)

    def check_version(self,
        is_missing:bool=False # Is something missing, or damaged? Then a later version will not do
    ):
        """Raise `StoreNotFound` unless the version that was opened is still there, or a later one made from it

        Raises `CorruptSample` or `UnsupportedFormat` if the manifest is damaged now."""
        manifest = self.manifest
        head = self.stored_bytes(self.manifest_key, len(manifest.head))
        if head==manifest.head or head==self.later_head and not is_missing: return
        stored = self.manifest_bytes()
        if not stored: raise self.replaced_error(exists=False)
        later = type(manifest).from_json(stored, f'{self.place_of(self.manifest_key)}')
        if later.uid==manifest.uid: return
        if is_missing or manifest.uid not in later.earlier: raise self.replaced_error()
        self.later_head = later.head

    # Where the samples are

    def read_table(self,
        key:str, # Key or file of the table
        n_bytes:int, # Its length
        crc:int, # Its checksum
        unpack # `unpack(bytes)` -> the table; raises `ValueError` for damage
    ):
        "A table that says where samples are; raises `CorruptSample`, and `StoreNotFound` if the dataset was replaced"
        stored = self.stored_bytes(key, n_bytes+1)   # one byte more shows that it is longer
        reason = 'it is gone' if stored is None else f'damaged: its {len(stored):,} bytes do not match their checksum'
        if stored is not None and len(stored)==n_bytes and crc32(stored)==crc:
            try: return unpack(stored)
            except ValueError as e: reason = f'damaged: {e}'
        self.check_version(is_missing=True)
        raise CorruptSample(f'{self.name}: {self.place_of(key)}, which says where the samples are: {reason}; put back '
                            'a copy of it, or ingest again')

    def read_run_tables(self)->list: # Of `RunTable`; empty if the dataset was never changed
        "As `run_tables`, but reads them anew"
        runs,n = self.manifest.runs,self.manifest.n
        if not runs: return []
        def unpack(stored):
            tables = unpack_tables(stored, runs['lengths'], n)
            _check_runs(self.manifest, tables)
            return tables
        return self.read_table(runs['key'], 24*sum(runs['lengths']), runs['crc'], unpack)

    @property
    def run_tables(self)->list: # Of `RunTable`
        """The parts that the samples are in; `manifest.runs['columns']` has the index of the table of each field

        The first one has the order of the samples. The list is empty if the dataset was never changed. Raises what
        `read_table` raises."""
        if self._run_tables is None: self._run_tables = self.read_run_tables()
        return self._run_tables

    def read_gap_table(self, part:Part)->GapTable:
        "The places of a part that have no sample; reads them anew, and raises what `read_table` raises"
        def unpack(stored):
            table = GapTable.from_bytes(stored, part.gaps['places'])
            if table.n==part.n: return table
            raise ValueError(f'{table.n:,} samples, where the manifest has {part.n:,}')
        return self.read_table(part.gaps_key, 16*part.gaps['runs'], part.gaps['crc'], unpack)

    def groups(self,
        numbers:np.ndarray, # Sample numbers, int64, shape (n,)
        field:str=None # Name of a field; default: the part with which the samples came
    )->list: # Of `(part, positions in numbers, their places in the part)`; the positions may be `slice(None)`
        "The samples by the part that has `field` of them; raises what `read_table` raises"
        runs = self.manifest.runs
        table = self.run_tables[runs['columns'][field] if field else 0] if runs else None
        if table is None or table.is_whole: groups = [(0 if table is None else int(table.parts[0]), None, numbers)]
        else: groups = list(table.groups(numbers))
        if len(groups)==1: groups = [(groups[0][0], slice(None), groups[0][2])]
        found = []
        for number,positions,places in groups:
            part = self.part(number)
            if part.gaps:
                if part.gaps_key not in self._gap_tables:
                    self._gap_tables = {**self._gap_tables, part.gaps_key:self.read_gap_table(part)}
                places = self._gap_tables[part.gaps_key].places(places)
            found.append((part, positions, places))
        return found

    # Reading

    def read_values(self, numbers, fields, again=False):
        "As in `Store`; `again` as in `read_parts`"
        manifest,columns,result = self.manifest,{},{}
        for field in fields:
            name = field if field in manifest.fields else field.removesuffix('.crc')   # checksums beside the values
            column = manifest.runs['columns'][name] if manifest.runs else 0
            columns.setdefault(column, (name, []))[1].append(field)
        if not len(numbers): return {field:self._empty(field, 0) for field in fields}
        requests = []
        for name,names in columns.values():
            for part,positions,places in self.groups(numbers, name):
                some = numbers if isinstance(positions, slice) else numbers[positions]
                requests.append(PartRequest(part, names, places, some, positions))
        for request,values in zip(requests, self.read_parts(requests, again)):
            for field in request.fields:
                if isinstance(request.positions, slice): result[field] = values[field]
                else:
                    before = result[field] if field in result else self._empty(field, len(numbers))
                    result[field] = _put(before, request.positions, values[field])
        return result

    def _empty(self, field, n):
        "A list or an array for `n` values of a field, or for its checksums"
        entry = self.manifest.fields.get(field, {'dtype':'u4'})
        return [None]*n if entry['dtype'] is None else np.zeros(n, entry['dtype'])

    def compare_checksums(self, numbers, field, values, checksums):
        """As in `Store`; values that do not match are read once more, where they are stored

        Changes `values[field]` and `checksums`. Raises `StoreNotFound` if the dataset was replaced."""
        damaged = mismatches(numbers, values[field], checksums)
        if not len(damaged): return
        # not what a subclass makes of it: a cache, for example
        again = StoredDataset.read_values(self, numbers[damaged], [field, f'{field}.crc'], again=True)
        if isinstance(again[field], list) and None in again[field]:
            raise_missing(self, numbers[damaged], field, again[field])
        checksums[damaged] = again[f'{field}.crc']
        values[field] = _put(values[field], damaged, again[field])
        super().compare_checksums(numbers, field, values, checksums)

    def location(self, number, field):
        (part,_,places), = self.groups(np.array([number]), field)
        return part.location(int(places[0]), field)

    def has(self,
        field:str, # Name of a field
        numbers:np.ndarray # Sample numbers, shape (n,)
    )->np.ndarray: # bool, shape (n,)
        "Which of the samples have a field?"
        if not self.may_lack(field): return np.ones(len(numbers), bool)
        result = np.zeros(len(numbers), bool)
        for part,positions,places in self.groups(numbers, field): result[positions] = part.has(field, places)
        return result

    def presence(self, field, start=0, stop=None):
        names,_ = self.field_table.choice(field)
        if not all(map(self.may_lack, names)):
            yield from super().presence(field, start, stop)
            return
        stop = len(self) if stop is None else stop
        for first in range(start, stop, 1<<16):
            numbers = np.arange(first, min(first+(1<<16), stop))
            yield np.logical_or.reduce([self.has(name, numbers) for name in names])

    def check_rest(self):
        """Yields `(what, reason)`, two texts, for each thing that is damaged or missing besides the samples' values

        Here, these are the manifest and the run tables. Raises `StoreNotFound` if the dataset was replaced."""
        stored = self.manifest_bytes()
        if not stored: yield self.manifest_key,str(self.replaced_error(exists=False))
        else:
            try: uid = type(self.manifest).from_json(stored, f'{self.name}').uid
            except StoreError as e: yield 'manifest',str(e)
            else:
                if uid!=self.manifest.uid: raise self.replaced_error()
        try: self.read_run_tables()
        except CorruptSample as e: yield self.manifest.runs['key'],str(e)

    def __copy__(self): return self
    def __deepcopy__(self, memo): return self
