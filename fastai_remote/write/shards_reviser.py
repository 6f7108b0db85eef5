"""New versions of datasets in shards, which share the shards with the version before

Docs: page `write/shards_reviser`"""

# Neither a shard nor its index is ever changed: WebDataset, `tar` and copies in caches go on working. `append` writes
# more shards. What is dropped becomes a gap, as samples that fail are in Redis, and new values are in overlays. The
# tables that say so have the generation in their names, so the version before stays complete until the manifest is
# replaced. (Decision notes 0027 and 0038.)

import json, zlib
from contextlib import contextmanager
from functools import cached_property

import numpy as np

from ..codec.numbers import narrow
from ..core import CorruptSample, MissingSample
from ..runs import GapTable, MAX_RUNS, TooManyRuns
from ..store.shard_index import INDEX_FOLDER, is_overlay_folder, joined_tables, overlay_folder
from ..store.shard_index import ShardManifest, ShardTable
from ..store.shards import ShardReader
from ..store.storage import Storage
from .revision import Append, Change, check_fields, NewPart, NewVersion, wider_dtype
from .shard_files import files_of
from .shards import ShardWriter

class ShardVersion(NewVersion):
    """The next version of a dataset in shards

    Appended samples are more shards, dropped ones are gaps, and all other new values are in overlays."""
    def __init__(self,
        store:ShardReader, # The version that is there
        reader:ShardReader # The same; it reads the indices
    ):
        super().__init__(store)
        self.reader,self.counts = reader,dict(store.field_table.counts)
        self.manifest.overlays = [dict(overlay) for overlay in store.manifest.overlays]
        self.tables,self.rows = [store.table],[] # Tables of shards; for each run of new samples, where they go
        self.entries = [] # Of overlays that `add_part` adds
        self.gaps = np.zeros(0, np.int64) if store.gaps is None else store.gaps.gaps() # Places of dropped samples

    def add_part(self, part):
        super().add_part(part)
        if self.entries: self.manifest.overlays.append(self.entries.pop(0))
        for field in self.counts.keys()&part.fields.keys(): self.counts[field] += part.fields[field].get('n', part.n)
        for field,spec in part.fields.items():
            if spec['codec']=='cls': self._widen(field, part.vocab.get(field, ()))
        return len(self.manifest.overlays)

    def _widen(self, field, labels):
        "Widens the type of a field for all codes of its vocabulary; without one, for the integers `labels`"
        vocab,spec = self.manifest.vocab.get(field),self.fields[field]
        needed = narrow(min([0,*labels]), max([0,*labels])) if vocab is None else narrow(0, max(len(vocab)-1, 0))
        self.fields[field] = {**spec, 'dtype':wider_dtype(self.manifest.name, field, spec['dtype'], needed)}

    def add_shards(self,
        part:ShardManifest # Of the shards, which are in the same folder
    ):
        "Adds more shards, whose samples `insert` puts into their splits"
        self.tables.append(ShardTable.unpack(part.shards))
        self.manifest.prefix,self.manifest.failures_crc = part.prefix,part.failures_crc

    def insert(self, at, part, first, n):
        self.rows.append((at, first, n))
        super().insert(at, 0, first, n)

    def drop(self, numbers):
        super().drop(numbers)
        self.gaps = np.union1d(self.gaps, numbers if self.store.gaps is None else self.store.gaps.places(numbers))

    def free(self, numbers, fields):
        for field in fields:
            self.counts[field] -= int(self.reader.has(field, numbers).sum())
            if self.fields[field]['dtype'] is None: self.manifest.nbytes -= _value_bytes(self.reader, field, numbers)

    def forget(self, fields):
        for field in fields:
            if self.fields[field]['dtype'] is None: self.manifest.nbytes -= _field_bytes(self.reader, field)

    def finish(self,
        generation:int # Of the new version
    )->tuple: # The manifest; `{name: bytes}` to write before it
        "Completes `manifest`: fields, number of samples, shards, gaps, overlays and runs"
        manifest,files = self.manifest,{}
        table,gaps = self._shards()
        manifest.generation,manifest.fields,manifest.shards = generation,self.fields,table.pack()
        manifest.n,manifest.gaps = int(table.starts[-1]),{}
        if len(gaps):
            gaps = GapTable.of(gaps, manifest.n)
            if len(gaps)>MAX_RUNS: raise TooManyRuns(len(gaps), MAX_RUNS)
            key,stored = f'.gaps-{generation}',gaps.to_bytes()
            files[key] = stored
            manifest.gaps = dict(key=key, places=gaps.n_places, runs=len(gaps), crc=zlib.crc32(stored))
            manifest.n = gaps.n
        for field,n in self.counts.items():
            spec = manifest.fields.get(field)
            if spec is None: continue
            spec = manifest.fields[field] = {key:value for key,value in spec.items() if key!='n'}
            if n<manifest.n: spec['n'] = n
        for overlay in manifest.overlays:
            used = [field for field in overlay.get('fields', ()) if field in self.fields]
            if used: overlay['fields'] = used
            else: overlay.clear()
        manifest.runs = {}
        if any(manifest.overlays): manifest.runs,files[f'.runs-{generation}'] = self.pack_tables(f'.runs-{generation}')
        else: manifest.overlays = []
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

class ShardReviser(ShardWriter):
    """Makes a new version of a dataset in shards: with more shards, gaps, or overlays

    Shards are never changed. Nobody sees the new version before its manifest is written. As everywhere, its `nbytes`
    are those of the values that the version has: values that were replaced or dropped do not count, though they stay
    in the shards. Numbers and labels are not subtracted."""
    def __init__(self,
        store:ShardReader, # The version that is there
        change:Change # What becomes of it
    ):
        storage = store.storage.subfolder(INDEX_FOLDER) if '/' in store.manifest_key else store.storage
        super().__init__(storage, name=store.name, foreign=not store.manifest.prefix)
        self.store,self.change = store,change
        self.needs_all = change.needs_all
        self.generation = 0 # Of the new version; `revising` sets it

    @cached_property
    def reader(self)->ShardReader:
        """The version that is there, opened anew to read its indices

        `store` keeps none of them, and so notices later that it was replaced."""
        return self.store.opener().renewed()()

    def how_to_replace(self): return self.how_to_abandon()
    def check_dataset(self, dataset, overwrite):
        if dataset is None or dataset.uid!=self.store.manifest.uid: raise self.store.replaced_error()
        if isinstance(self.change, Append) and not dataset.prefix:
            raise TypeError(f'{self.name}: others wrote these shards: index_shards adds more of theirs')

    def checked_plan(self, plan):
        self.change.check(self.store, plan)
        return super().checked_plan({**plan, 'stats':self.change.stats_field(self.store, plan), 'is_appended':True,
                                     'signature':f"{self.store.manifest.uid} {plan['signature']}"})

    def earlier_failures(self):
        lines = (json.dumps(failure, ensure_ascii=False)+'\n' for failure in self.store.failures())
        return ''.join(lines).encode('utf-8', 'surrogatepass')

    def publish(self, manifest):
        version = ShardVersion(self.store, self.reader)
        version.add_shards(manifest)
        self.change.apply(version, [NewPart(manifest)])
        return self._publish(*version.finish(manifest.generation))

    def _publish(self, manifest, tables):
        names = files_of(self.place.committed())-files_of(manifest)
        # an overlay is only left out if its fields were dropped: these are removed at once
        manifest.before = sorted(name for name in names if not is_overlay_folder(name))
        return self.place.publish(manifest, tables)

    def clean(self):
        "Removes what only the version before uses; its open stores raise `StoreNotFound` then. Raises `StoreBusy`"
        with self.place.locked():
            self.check_dataset(self.place.committed(), False)
            self.place.clean_up(keep_before=False)

    def overlay_storage(self,
        k:int # Overlays of this version are counted from 0
    )->Storage:
        "Returns the folder of a new overlay; for use inside `revising`, which sets the generation"
        return self.hidden.subfolder(overlay_folder(self.generation, k))

    @contextmanager
    def revising(self):
        """A context that takes the lock, yields a list, and publishes the next version at the end

        In the block, overlays are written, and appended to the list as `(ShardStore, numbers)`, as in `NewPart`. If the
        block raises an error, nothing is published. Raises `StoreBusy`, `StoreNotFound`, and `StoreExists` if an ingest
        has been begun here."""
        with self.place.locked():
            dataset,overlays = self.place.committed(),[]
            self.check_dataset(dataset, False)
            if self.place.plan(): raise self._other_ingest()
            self.generation = dataset.generation+1
            yield overlays
            version,parts = ShardVersion(self.store, self.reader),[]
            for overlay,numbers in overlays:
                entry = dict(folder=overlay.storage.name, uid=overlay.manifest.uid, fields=list(overlay.fields))
                version.entries.append(entry)
                parts.append(NewPart(overlay.manifest, numbers))
            self.change.apply(version, parts)
            self._publish(*version.finish(self.generation))

    # --- New indices

    def check_edit(self):
        """Raises `TypeError` if new labels of a field are both text and numbers, `ValueError` if they are not of its
        kind

        Other values are not checked."""
        values = self.change.values
        planned = {field:_planned(self.store, field, new) for field,new in values.items()}
        check_fields(self.store, planned, self.change.fields)

def _value_bytes(store, field, numbers):
    """Returns how many bytes the values of a variable-width field of samples `numbers`, an array, have together

    0 if an index or an overlay is damaged or gone: values that are lost can be replaced or dropped."""
    try: return sum(part.value_bytes(field, places) for part,_,places in store.groups(numbers, field))
    except (CorruptSample,MissingSample): return 0

def _field_bytes(store, field, n=16):
    """Returns about how many bytes all values of a variable-width field have: those in `n` shards, times a factor

    It is exact if there are no more shards. Reading the indices of all of them might take long."""
    starts = store.shards.starts.tolist()
    shards = np.unique(np.linspace(0, len(starts)-2, n).astype(np.int64)).tolist() if len(store) else []
    measured = sum(_value_bytes(store, field, np.arange(*starts[shard:shard+2])) for shard in shards)
    return round(measured*len(store)/max(1, sum(starts[shard+1]-starts[shard] for shard in shards)))

def _planned(store, field, values):
    """Returns the entry that a plan would have for `values`, `{sample number: new value}` of a field

    Raises `TypeError` if they are labels of two kinds, text and numbers."""
    spec = store.manifest.fields[field]
    if spec['codec']!='cls': return dict(codec=spec['codec'], dtype=spec['dtype'])
    kinds = {isinstance(value, str) for value in values.values()}
    if len(kinds)>1: raise TypeError(f'{store.name}: new labels of {field!r} are text and numbers')
    return dict(codec='cls', dtype='i8', staged=True, text=kinds.pop())
