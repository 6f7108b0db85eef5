"""New versions of datasets in shards, which share the shards with the version before

Docs: page `write/shard_version`"""

# Neither a shard nor its index is ever changed: WebDataset, `tar` and copies in caches go on working. `append` writes
# more shards. What is dropped becomes a gap, as samples that fail are in Redis, and new values are parts of their own.
# The tables that say so have the generation in their names, so the version before stays complete until the manifest is
# replaced. (Decision notes 0027 and 0038.)

import numpy as np
from zlib_ng.zlib_ng import crc32

from ..codec.numbers import code_dtype, narrow
from ..core import CorruptSample, MissingSample
from ..runs import GapTable, MAX_RUNS, TooManyRuns
from ..store.shard_index import joined_tables, ShardTable
from ..store.shards import ShardReader
from .revision import NewVersion, wider_dtype

class ShardVersion(NewVersion):
    """The next version of a dataset in shards

    Shards are never changed. Appended samples are more shards, dropped ones are gaps, and all other new values are in
    added parts. As everywhere, its `nbytes` are those of the values that the version has: values that were replaced or
    dropped do not count, though they stay in the shards. Numbers and labels are only subtracted with their field."""
    def __init__(self,
        store:ShardReader, # The version that is there
        generation:int # Of the new version
    ):
        super().__init__(store)
        # reads the indices: `store` keeps none of them, and so notices later that it was replaced
        self.reader,self.counts = store.opener().renewed()(),dict(store.field_table.counts)
        self.manifest.generation,self.manifest.added = generation,[dict(entry) for entry in store.manifest.added]
        self.tables,self.rows = [store.table],[] # Tables of shards; for each run of new samples, where they go
        self.gaps = np.zeros(0, np.int64) if store.gaps is None else store.gaps.gaps() # Places of dropped samples

    def add_part(self, part, has_samples=False):
        super().add_part(part)
        for field in self.counts.keys()&part.fields.keys(): self.counts[field] += part.fields[field].get('n', part.n)
        for field,spec in part.fields.items():
            if spec['codec']=='cls': self._widen(field, part.vocab.get(field, ()))
        if has_samples:
            self.tables.append(ShardTable.unpack(part.shards))
            self.manifest.prefix,self.manifest.failures_crc = part.prefix,part.failures_crc
            return 0
        fields = [field for field in part.fields if not field.endswith('.crc')]
        self.manifest.added.append(dict(fields=fields, shards=part.shards))
        return len(self.manifest.added)

    def _widen(self, field, labels):
        "Widens the type of a field for all codes of its vocabulary; without one, for the integers `labels`"
        vocab,spec = self.manifest.vocab.get(field),self.fields[field]
        needed = narrow(min([0,*labels]), max([0,*labels])) if vocab is None else code_dtype(len(vocab))
        self.fields[field] = {**spec, 'dtype':wider_dtype(self.manifest.name, field, spec['dtype'], needed)}

    def insert(self, at, part, first, n):
        self.rows.append((at, first, n))
        super().insert(at, 0, first, n)

    def drop(self, numbers):
        super().drop(numbers)
        self.gaps = np.union1d(self.gaps, numbers if self.store.gaps is None else self.store.gaps.places(numbers))

    def free(self, numbers, fields):
        for field in fields:
            self.counts[field] -= int(self.reader.has(field, numbers).sum())
            if self.fields[field]['dtype'] is None: self.subtract_bytes(_value_bytes(self.reader, field, numbers))

    def forget(self, fields):
        for field in fields:
            n,dtype = self.counts.pop(field, 0),self.fields[field]['dtype']
            self.subtract_bytes(_field_bytes(self.reader, field) if dtype is None else n*np.dtype(dtype).itemsize)
        for entry in self.manifest.added: entry['fields'] = [f for f in entry.get('fields', ()) if f not in fields]

    def finish(self):
        manifest,files = self.manifest,{}
        table,gaps = self._shards()
        manifest.fields,manifest.shards = self.fields,table.pack()
        manifest.n,manifest.gaps = int(table.starts[-1]),{}
        if len(gaps):
            gaps = GapTable.of(gaps, manifest.n)
            if len(gaps)>MAX_RUNS: raise TooManyRuns(len(gaps), MAX_RUNS)
            key,stored = f'.gaps-{manifest.generation}',gaps.to_bytes()
            files[key] = stored
            manifest.gaps = dict(key=key, places=gaps.n_places, runs=len(gaps), crc=crc32(stored))
            manifest.n = gaps.n
        for field,n in self.counts.items():
            spec = manifest.fields.get(field)
            if spec is None: continue
            spec = manifest.fields[field] = {key:value for key,value in spec.items() if key!='n'}
            if n<manifest.n: spec['n'] = n
        for entry in manifest.added:
            used = [field for field in entry.get('fields', ()) if field in self.fields]
            if used: entry['fields'] = used
            else: entry.clear()
        manifest.runs = {}
        if any(manifest.added):
            key = f'.runs-{manifest.generation}'
            manifest.runs,files[key] = self.pack_tables(key)
        else: manifest.added = []
        return manifest,files

    def _shards(self):
        """Returns `(table, gaps)`: the new `ShardTable`, and the places of dropped samples in it, ascending

        In each split, new shards come after those that were there. Shards without a sample are left out."""
        before,starts = self.tables[0],self.store.shards.starts
        order,done = [],0
        for at,first,n in self.rows:   # `at` counts the new samples before
            there = int(np.searchsorted(starts[:-1], at-sum(row[2] for row in self.rows if row[0]<at)))
            order += range(done, there)
            low,high = np.searchsorted(self.tables[1].starts[:-1], [first,first+n]).tolist()
            order += range(len(before)+low, len(before)+high)
            done = there
        order += range(done, len(before))
        joined = joined_tables(self.tables, order)
        shard_of,position = before.at(self.gaps)
        new_number = np.argsort(np.array(order, np.int64)) if len(order) else np.zeros(0, np.int64)
        places = np.sort(joined.starts[new_number[shard_of]]+position)
        left = np.diff(np.searchsorted(places, joined.starts))<joined.n
        if left.all(): return joined,places
        shard_of,position = joined.at(places)
        kept = np.flatnonzero(left).tolist()
        table = joined_tables([joined], kept)
        number = np.cumsum(left)-1
        inside = left[shard_of]
        return table,table.starts[number[shard_of[inside]]]+position[inside]

def _value_bytes(store, field, numbers):
    """Returns how many bytes the values of a variable-width field of samples `numbers`, an array, have together

    0 if an index is damaged or gone: values that are lost can be replaced or dropped."""
    try: return sum(part.value_bytes(field, places) for part,_,places in store.groups(numbers, field))
    except (CorruptSample,MissingSample): return 0

def _field_bytes(store, field, n=16):
    """Returns about how many bytes all values of a variable-width field have: those in `n` shards, times a factor

    It is exact if there are no more shards. Reading the indices of all of them might take long."""
    starts = store.shards.starts.tolist()
    shards = np.unique(np.linspace(0, len(starts)-2, n).astype(np.int64)).tolist() if len(store) else []
    measured = sum(_value_bytes(store, field, np.arange(*starts[shard:shard+2])) for shard in shards)
    return round(measured*len(store)/max(1, sum(starts[shard+1]-starts[shard] for shard in shards)))
