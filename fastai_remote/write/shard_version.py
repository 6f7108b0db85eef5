"""New versions of datasets in shards, which share the shards with the version before

Docs: page `write/shard_version`"""

# Neither a shard nor its index is ever changed: WebDataset, `tar` and copies in caches go on working. Appended samples
# and new values are parts of their own, as in Redis. The table that says where the samples are has the generation in
# its name, so the version before stays complete until the manifest is replaced. (Decision note 0027.)

import numpy as np

from ..codec.numbers import code_dtype, narrow
from ..core import CorruptSample, MissingSample
from ..store.shard_index import has_added_values, joined_tables, ordered_shards, ShardTable
from ..store.shards import ShardReader
from .revision import NewVersion, wider_dtype

class ShardVersion(NewVersion):
    """The next version of a dataset in shards

    Shards are never changed; those without a sample are left out. As everywhere, its `nbytes` are those of the values
    that the version has: values that were replaced or dropped do not count, though they stay in the shards. Numbers and
    labels are only subtracted with their field."""
    def __init__(self,
        store:ShardReader, # The version that is there
        generation:int # Of the new version
    ):
        super().__init__(store)
        # reads the indices: `store` keeps none of them, and so notices later that it was replaced
        self.reader,self.counts = store.opener().renewed()(),dict(store.field_table.counts)
        self.manifest.generation,self.tables = generation,list(store.tables) # Table of the shards of each part

    @property
    def tables_key(self): return f'.runs-{self.manifest.generation}'

    def add_part(self, part):
        number = super().add_part(part)
        self.tables.append(ShardTable.unpack(part.shards))
        for field in self.counts.keys()&part.fields.keys(): self.counts[field] += part.fields[field].get('n', part.n)
        for field,spec in part.fields.items():
            if spec['codec']=='cls': self._widen(field, part.vocab.get(field, ()))
        return number

    def _widen(self, field, labels):
        "Widens the type of a field for all codes of its vocabulary; without one, for the integers `labels`"
        vocab,spec = self.manifest.vocab.get(field),self.fields[field]
        needed = narrow(min([0,*labels]), max([0,*labels])) if vocab is None else code_dtype(len(vocab))
        self.fields[field] = {**spec, 'dtype':wider_dtype(self.manifest.name, field, spec['dtype'], needed)}

    def free(self, numbers, fields):
        for field in fields:
            self.counts[field] -= int(self.reader.has(field, numbers).sum())
            if self.fields[field]['dtype'] is None: self.subtract_bytes(_value_bytes(self.reader, field, numbers))

    def forget(self, fields):
        for field in fields:
            n,dtype = self.counts.pop(field, 0),self.fields[field]['dtype']
            self.subtract_bytes(_field_bytes(self.reader, field) if dtype is None else n*np.dtype(dtype).itemsize)

    def finish(self):
        manifest,files = super().finish()
        for field,n in self.counts.items():
            spec = manifest.fields.get(field)
            if spec is None: continue
            spec = manifest.fields[field] = {key:value for key,value in spec.items() if key!='n'}
            if n<manifest.n: spec['n'] = n
        self._pack_shards()
        return manifest,files

    def _pack_shards(self):
        "Puts the tables of shards into the entries of parts, without those whose samples or fields were dropped"
        joined = joined_tables(self.tables)
        used,_ = ordered_shards(self.columns[''], joined, [part['n'] for part in self.parts])
        is_unused = np.ones(len(joined), bool)
        is_unused[used] = False
        ends = np.cumsum(list(map(len, self.tables)))[:-1]
        for part,table,unused in zip(self.parts, self.tables, np.split(is_unused, ends)):
            is_added = has_added_values(part)
            if not is_added or not part['fields']: part['shards'] = table.freed(unused|is_added).pack()

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
