"""The manifest of a dataset: from the records of all chunks, or from the version before and what changes

Docs: page `write/revision`"""

from array import array
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32

from ..codec.fields import integer_of
from ..codec.numbers import code_dtype, LabelCodes, narrow
from ..codec.stats import ImageStats, joined_summary
from ..core import (
    CorruptSample, GapTable, Manifest, MissingSample, pack_tables, RunTable, StoreError, StoreExists, TooManyRuns)
from ..store.base import Store

# --- Records of chunks
#
# The commit reads the records one after the other. It keeps totals, and some numbers for each shard and each gap, but
# nothing for each sample. A split begins at its first place, less the gaps before it. Vocabularies are all labels that
# occur, sorted. More than 2²⁰ distinct integers are not classes: of these, only the smallest and the largest are kept.

MAX_CLASSES = 1<<20 # More distinct integers than this are numbers, not labels

def sorted_labels(
    labels # `str` or `int`, each of them once
)->list: # Numbers first, ascending, then `str`, in alphabetical order
    "Returns the vocabulary of a field with several labels for each sample"
    return sorted(labels, key=lambda label: (isinstance(label, str), label))

def joined_vocab(
    known:list, # Labels in the order of their codes
    labels # Further labels, some of which may be known
)->list:
    "Returns a new list of the labels of both; those that are known keep their codes"
    there = set(known)
    return [*known, *(label for label in labels if label not in there)]

class Totals:
    "Adds up the records of all chunks, in their order, and describes the dataset in its manifest"
    def __init__(self,
        plan:dict # The `Plan` of the ingest
    ):
        self.plan = plan
        self.fields = dict(plan['fields']) # Of the plan, and those that occurred later
        self.chunks,self.ok,self.nbytes,self.failed = 0,0,0,0
        self.with_field = {} # `{field: number of samples that have it}`, if samples may have different fields
        self.ends = array('q') # Starts and stops of the gaps
        self.counts = {} # As in `Writer.done`
        self.stats = ImageStats()

    def add(self,
        record:dict, # Of the next chunk, as in `Writer.done`
    ):
        "Adds a record to the totals"
        self.chunks += 1
        self.ok += record['ok']
        self.nbytes += record['bytes']
        self.failed += record['failed']
        for field,(n,spec) in record.get('fields', {}).items():
            self.with_field[field] = self.with_field.get(field, 0)+n
            if self.fields.setdefault(field, spec).get('late') and not spec.get('late'):
                self.fields[field] = spec   # here its labels are known to be text
            if spec['dtype'] is None: self.fields.setdefault(f'{field}.crc', {'codec':'crc', 'dtype':'u4'})
        for start,stop in record['gaps']:
            if len(self.ends) and self.ends[-1]==start: self.ends[-1] = stop
            else: self.ends.extend((start, stop))
        if record.get('stats'): self.stats += ImageStats(record['stats'])
        for field,pairs in record.get('counts', {}).items():   # of a label and its number of samples
            counts = self.counts.setdefault(field, {})
            if isinstance(counts, _IntegerRange): counts.extend(label for label,_ in pairs)
            else:
                for label,samples in pairs: counts[label] = counts.get(label, 0)+samples
                spec = self.fields[field]   # of more integers than classes may be, only the range is kept from now on
                if len(counts)>MAX_CLASSES and spec.get('staged') and not spec['text']:
                    self.counts[field] = _IntegerRange(counts)

    def gaps(self)->GapTable: # Of the places of the plan
        "The places that have no sample; raises `StoreError` if they are too scattered"
        starts,stops = np.array(self.ends, np.int64).reshape(-1, 2).clip(max=self.plan['n']).T
        is_inside = stops>starts   # a stream may end within its last chunk
        try: return GapTable(starts[is_inside], (stops-starts)[is_inside], self.plan['n'])
        except TooManyRuns as e: raise StoreError(str(e)) from None

    def describe(self,
        manifest:Manifest, # Is changed
        known=lambda field: [], # `known(field)`: its labels that have codes already; `None`: integers get no codes
    )->Manifest:
        """Completes `manifest`: size, failures, statistics, fields, vocabularies, counts and splits

        The splits of the plan are ranges of places; if these are shards of others, `manifest` gets them from these."""
        plan = self.plan
        manifest.n,manifest.nbytes,manifest.failed = self.ok,self.nbytes,self.failed
        manifest.vocab,manifest.stats = dict(plan['vocab']),plan.get('kept_stats') or {}
        if len(self.stats): manifest.stats = {plan['stats']:self.stats.summary()}
        manifest.fields = self._fields()
        for field in manifest.fields: self._describe_labels(manifest, field, known(field))
        if plan['splits'] and 'base' not in plan:
            gaps = self.gaps()
            manifest.splits = {split:gaps.samples_before(span).tolist() for split,span in plan['splits'].items()}
        return manifest

    def _fields(self):
        """Returns the fields as a manifest has them, `{field: {'codec', 'dtype'}}`, and `check` if the plan has that

        If samples may have different fields, those that no sample has are left out, and entries, except of checksums,
        also have `n`, the number of samples that have the field."""
        result,counts = {},self.with_field
        for field,spec in self.fields.items():
            if counts and field.removesuffix('.crc') not in counts: continue   # only in samples that failed
            result[field] = {key:value for key,value in spec.items() if key in ('codec','dtype','check')}
            if field in counts: result[field]['n'] = counts[field]
        return result

    def _describe_labels(self, manifest, field, known):
        """Adds vocabulary and counts of a field to `manifest`, and the narrowest dtype of labels that were not known

        Integers that are too many to be classes get neither, but a dtype for the integers themselves."""
        spec,counts = self.fields[field],self.counts.get(field, {})
        if spec.get('late'): counts = _as_integers(counts)
        if spec.get('staged') and known is None and counts and not isinstance(counts, _IntegerRange):
            counts = _IntegerRange(counts)
        if spec.get('staged') and isinstance(counts, _IntegerRange):
            manifest.fields[field]['dtype'] = narrow(min(counts.lowest, 0), counts.highest)
        elif spec.get('staged'):
            vocab = manifest.vocab[field] = joined_vocab(known or [], sorted(counts))
            manifest.fields[field]['dtype'] = code_dtype(len(vocab))
            manifest.counts[field] = [counts.get(label, 0) for label in vocab]
        elif spec['codec']=='cls' and field in manifest.vocab:
            manifest.counts[field] = [counts.get(code, 0) for code in range(len(manifest.vocab[field]))]
        elif spec['codec']=='labels':
            vocab = manifest.vocab.setdefault(field, sorted_labels(counts))
            manifest.counts[field] = [counts.get(label, 0) for label in vocab]

class _IntegerRange:
    "The smallest and the largest of integers that are too many to be classes"
    def __init__(self, integers): self.lowest,self.highest = min(integers),max(integers)
    def extend(self, integers):
        for i in integers: self.lowest,self.highest = min(self.lowest, i),max(self.highest, i)

def _as_integers(counts):
    """Returns `{int: samples}` if all labels in `counts`, `{text: samples}`, are integers; else `counts` itself

    Different texts of the same integer are counted together."""
    result = {}
    for label,n in counts.items():
        number = integer_of(label)
        if number is None: return counts
        result[number] = result.get(number, 0)+n
    return result

# --- A version after another
#
# A new version of a dataset shares what has not changed with the version before. How it is stored differs between Redis
# and shards; what is common to both is here.

class Change:
    "What is to become of a dataset: the base class"
    needs_all = True # Must each sample have a value, so that none may fail?
    has_samples,has_fields = False,False # Are there more samples, or more fields?
    def check(self,
        store:Store, # The version that is there
        plan:dict # The plan of what is to be written
    ):
        """Raises `ValueError` or `StoreExists` if what is to be written does not fit the dataset

        In the base class, everything fits."""

    def apply(self,
        version, # A `NewVersion`, which is changed
        parts:list # Of `NewPart`: what was written for this change
    ):
        "Makes this change of a version"
        raise NotImplementedError

    def stats_field(self,
        store:Store, # The version that is there
        plan:dict # The plan of what is to be written
    )->str:
        "Returns the field of which statistics of the new images are gathered, `None` for none; here that of the plan"
        return plan['stats']

class Append(Change):
    "More samples, at the end of their splits"
    needs_all,has_samples = False,True
    def __init__(self,
        again:bool=False # May they come from a source that was appended before?
    ): self.again,self.signature = again,''

    def check(self, store, plan):
        check_fields(store, plan['fields'], store.fields)
        self.signature = plan['signature']
        if not self.again and self.signature in store.manifest.appended:
            raise StoreExists(f'{store.name}: these samples were appended before, with the same fn; again=True appends '
                              'them once more')

    def stats_field(self, store, plan): return next(iter(store.manifest.stats), None)

    def apply(self, version, parts):
        (part,_),store,manifest,shift = parts[0],version.store,version.manifest,0
        number,n = version.add_part(part),len(store)
        # without splits, the only split is ''
        new,spans = part.splits or {'':[0,part.n]},dict(store.splits or {'':[0,n]})
        for split in new: spans.setdefault(split, [n,n])
        for split,(start,stop) in spans.items():
            first,last = new.get(split, (0,0))
            samples = stop+shift,number,first,last-first
            if last>first: version.change_columns(('', *version.fields), lambda table: table.insert(*samples))
            spans[split] = [start+shift,stop+shift+last-first]
            shift += last-first
        manifest.splits = {split:span for split,span in spans.items() if split}
        manifest.appended = [*manifest.appended, self.signature]
        manifest.stats = {field:joined_summary(known, n, part.stats[field], part.n)
                          for field,known in manifest.stats.items() if field in part.stats}

class AddFields(Change):
    "More fields of all samples"
    has_fields = True
    def __init__(self,
        replace:bool=False # May they replace fields of the same names?
    ): self.replace = replace

    def check(self, store, plan):
        there = [field for field in plan['fields'] if field in store.fields]
        if there and not self.replace:
            raise ValueError(f'{store.name}: there is a field {there[0]!r} already; replace=True replaces it, and '
                             'drop_fields drops it')
        if set(there)==set(store.fields): raise ValueError(f'{store.name}: all of its fields would be replaced')

    def apply(self, version, parts):
        (part,_), = parts
        version.drop_fields([field for field in part.fields if field in version.fields])
        for field,spec in part.fields.items(): version.fields[field] = dict(spec)
        version.manifest.vocab |= {field:[] for field in part.vocab}
        table = RunTable.whole(part.n, version.add_part(part))
        version.columns |= dict.fromkeys(part.fields, table)
        version.manifest.stats = {**version.manifest.stats, **part.stats}

class Edit(Change):
    "New values of some samples, samples to drop, and fields to drop"
    def __init__(self,
        drop:np.ndarray, # Samples to drop, ascending
        drop_fields=() # Fields to drop
    ): self.dropped,self.drop_fields = drop,drop_fields

    def apply(self, version, parts):
        store,manifest,changed = version.store,version.manifest,set()
        for part,numbers in parts:
            fields = [field for field in part.fields if field in store.fields]
            changed.update(fields)
            version.free(numbers, fields)
            _subtract_counts(manifest, store, numbers, fields)
            number = version.add_part(part)
            version.change_columns(part.fields, lambda table: table.replace(numbers, number))
        if len(self.dropped):
            version.free(self.dropped, store.fields)
            _subtract_counts(manifest, store, self.dropped, store.fields)
            version.change_columns(('', *version.fields), lambda table: table.drop(self.dropped))
            manifest.splits = {split:[int(i-np.searchsorted(self.dropped, i)) for i in span]
                               for split,span in store.splits.items()}   # the others move up
        if self.drop_fields: version.drop_fields(self.drop_fields)
        # statistics are sums over some of the images, so those that are replaced cannot be subtracted
        kept = {} if len(self.dropped) else manifest.stats
        manifest.stats = {field:stats for field,stats in kept.items() if field not in changed}

class NewPart(NamedTuple):
    "Samples, or fields of some samples, that were written"
    manifest:Manifest # What was written
    numbers:np.ndarray=None # Of an edit: the samples of the version before that get these values, ascending

class NewValues(NamedTuple):
    "Encoded values of one field that an edit changes: sample k of the part that they become is sample `numbers[k]` now"
    part:Manifest # What is known of the part: number of samples, fields, bytes, labels and their counts
    numbers:np.ndarray # As in `NewPart`
    columns:dict # As `Writer.put` takes them
    step:object # `step(n)` is called when `n` more values were written

    def pieces(self,
        nbytes:int=4_000_000 # Bytes of a piece, more only if a single value has more
    ): # Yields `(numbers, columns)`, as `Writer.put` takes them
        "The values in pieces of limited size"
        blobs = next((column for column in self.columns.values() if isinstance(column, list)), [b'']*len(self.numbers))
        ends = np.cumsum([len(value)+100 for value in blobs])   # 100: about what a key takes
        for some in np.split(np.arange(len(ends)), np.flatnonzero(np.diff(ends//nbytes))+1):
            yield some,{field:column[some[0]:some[-1]+1] for field,column in self.columns.items()}
            self.step(len(some))

MAX_EARLIER = 100   # versions that a manifest names: readers of those before are told that they were replaced

class NewVersion:
    "The next version of a dataset, while it is put together from parts"
    def __init__(self,
        store:Store # The version that is there, a `StoredDataset`
    ):
        before = store.manifest
        self.store,self.fields = store,dict(before.fields)
        self.manifest = replace(before, vocab=dict(before.vocab), counts=dict(before.counts), stats=dict(before.stats),
                                earlier=[*before.earlier, before.uid][-MAX_EARLIER:])
        self.parts = [dict(part) for part in before.part_entries()] # As `Manifest.parts`
        tables = store.run_tables or [RunTable.whole(len(store))]
        number = before.runs.get('columns') or dict.fromkeys(self.fields, 0)
        # `{field: RunTable}`; that of '' has the order of the samples
        self.columns = {'':tables[0], **{field:tables[number[field]] for field in self.fields}}

    def add_part(self,
        part:Manifest # What was written
    )->int: # Its number in tables of runs
        """Adds a part: its bytes, failures, and labels; types of fields become such that they have its values

        Samples belong to it when tables say so: `columns` are not changed here."""
        manifest = self.manifest
        manifest.nbytes += part.nbytes
        manifest.failed += part.failed
        for field,spec in part.fields.items():
            before = self.fields[field]
            self.fields[field] = {**before, 'dtype':wider_dtype(manifest.name, field, before['dtype'], spec['dtype'])}
        _add_labels(manifest, part)
        self.parts += [dict(entry) for entry in part.part_entries()]
        return len(self.parts)-1

    def free(self,
        numbers:np.ndarray, # Sample numbers of the version before, ascending
        fields # Fields whose values are not needed any more
    ):
        "Notes that values are not needed any more, and subtracts about their bytes from `manifest.nbytes`"
        raise NotImplementedError

    def subtract_bytes(self,
        n:int # About how many bytes less the dataset has
    ):
        "Subtracts from `manifest.nbytes`, which no estimate makes negative"
        self.manifest.nbytes = max(self.manifest.nbytes-n, 0)

    def change_columns(self,
        fields, # Names of fields
        change # `change(RunTable)` -> RunTable
    ):
        "Replaces the tables of `fields` by what `change` returns for them; fields that share a table share the new one"
        changed = {}   # columns share tables
        for field in fields:
            table = self.columns[field]
            if id(table) not in changed: changed[id(table)] = table,change(table)
            self.columns[field] = changed[id(table)][1]

    def drop_fields(self,
        names # Names of fields
    ):
        "Removes fields, with their checksums, and with what is known of their labels and images"
        fields = {name for field in names for name in (field,f'{field}.crc') if name in self.fields}
        self.forget(fields)
        for part in self.parts: part['fields'] = {f:spec for f,spec in part['fields'].items() if f not in fields}
        self.fields = {f:spec for f,spec in self.fields.items() if f not in fields}
        for name in 'vocab','counts','stats':
            setattr(self.manifest, name, {f:o for f,o in getattr(self.manifest, name).items() if f not in fields})

    def forget(self,
        fields:set # Names of fields and of their checksums
    ):
        "As `free`, for all samples"
        raise NotImplementedError

    @property
    def tables_key(self)->str:
        "Key or file of the tables that say where the samples are"
        raise NotImplementedError

    def finish(self)->tuple: # The manifest; `{key or file: bytes}` to store with it
        "Completes `manifest`, with the tables that say where the samples are"
        manifest,tables,columns = self.manifest,[self.columns['']],{}
        for field in self.fields:
            table = self.columns[field]
            columns[field] = next((k for k,other in enumerate(tables) if other is table), len(tables))
            if columns[field]==len(tables): tables.append(table)
        stored = pack_tables(tables)
        manifest.runs = {'key':self.tables_key, 'lengths':list(map(len, tables)), 'crc':crc32(stored),
                         'columns':columns}
        manifest.fields,manifest.n,manifest.parts,manifest.gaps = self.fields,tables[0].n,self.parts,{}
        return manifest,{self.tables_key:stored}

def check_fields(
    store:Store, # The version that is there
    fields:dict, # `fields` of the plan
    wanted # Names of the fields that it must have
):
    """Raises `ValueError` unless the plan has just the fields `wanted`, stored as in the dataset

    Their codecs must be the same, and labels of the same kind, text or numbers. Checksum fields do not count."""
    known,planned = store.manifest.fields,[field for field in fields if not field.endswith('.crc')]
    missing,more = set(wanted)-set(planned),set(planned)-set(wanted)
    if missing or more:
        named = (('without',missing), ('also',more))
        what = [f"{how} {', '.join(map(repr, sorted(names)))}" for how,names in named if names]
        raise ValueError(f"{store.name}: the new samples have other fields: {'; '.join(what)}. fn= can leave out, "
                         'rename or add fields')
    for field in planned:
        before,spec = known[field],fields[field]
        if spec['codec']!=before['codec']:
            raise ValueError(f"{store.name}: {field!r} is stored as {before['codec']}, and the new samples have "
                             f"{spec['codec']}")
        labels = store.manifest.vocab.get(field)
        if spec.get('staged') and labels and isinstance(labels[0], str)!=spec['text']:
            raise ValueError(f'{store.name}: labels of {field!r} are such as {labels[0]!r}, and the new samples have '
                             f"{'text' if spec['text'] else 'numbers'}")
        if spec.get('staged') and not labels and spec['text']:
            raise ValueError(f'{store.name}: {field!r} has numbers, and the new samples have text')

# --- Splits, vocabularies and counts

def _subtract_counts(manifest, store, numbers, fields, step=1<<16):
    """Reduces `manifest.counts` of `fields` by the labels that the samples `numbers` have in `store`, if they have any

    `manifest` is that of the new version, and `store` the version before; `step` samples are read at a time. Where
    labels are damaged or lost, the counts of the field are removed: nobody knows them any more."""
    for field in fields:
        if field not in manifest.counts: continue
        counts = np.array(manifest.counts[field], np.int64)
        try:
            for k in range(0, len(numbers), step):
                counts -= np.bincount(codes_of_labels(store, field, numbers[k:k+step]), minlength=len(counts))
            manifest.counts = {**manifest.counts, field:counts.tolist()}
        except (CorruptSample,MissingSample,ValueError):
            manifest.counts = {other:o for other,o in manifest.counts.items() if other!=field}

def codes_of_labels(
    store:Store,
    field:str, # A field with a vocabulary
    numbers:np.ndarray # Sample numbers
)->np.ndarray: # Integers, in any number
    "The codes of all labels that samples have in a field, each label once for each sample; raises also `ValueError`"
    wanted,is_list = f'{field}?' if store.may_lack(field) else field,store.manifest.fields[field]['codec']=='labels'
    found = store.get_many(numbers, wanted, decode=is_list)[wanted]
    if isinstance(found, np.ndarray): return found
    if not is_list: return np.array([code for code in found if code is not None], np.int64)
    codes = LabelCodes(field, store.manifest.vocab[field]).codes
    try: return np.array([codes[label] for labels in found for label in set(labels or ())], np.int64)
    except KeyError as e: raise ValueError(f'{field!r} has no label {e}') from None

def _add_labels(manifest, part):
    """Adds the vocabularies and counts of the manifest of a part to `manifest`; labels that are new get the next codes

    Counts of a field are removed if `part` does not have them, or if the version before has labels without counts.
    A field of `manifest` whose integers are stored as values, without a vocabulary, does not get one. Raises
    `ValueError` if `manifest` has a vocabulary of a field, and `part` has none, because its integers are too many: they
    would be taken for codes."""
    vocab,counts = dict(manifest.vocab),dict(manifest.counts)
    labelled = [field for field,spec in part.fields.items() if spec['codec']=='cls']
    for field in labelled:
        if field in vocab and field not in part.vocab:
            raise ValueError(f'{manifest.name}: {field!r} has {len(vocab[field]):,} labels, and the new samples have '
                             'more different integers than can be labels: store them in another field, such as id.i8')
    values = [field for field in labelled if field not in vocab]
    for field,labels in part.vocab.items():
        if field in values: continue
        known = vocab.get(field, [])
        vocab[field] = joined_vocab(known, labels)
        if field in counts and field in part.counts:
            total = dict.fromkeys(vocab[field], 0)
            for some,numbers in ((known,counts[field]), (labels,part.counts[field])):
                for label,n in zip(some, numbers): total[label] += n
            counts[field] = list(total.values())
        elif not known and field in part.counts: counts[field] = part.counts[field]
        else: counts.pop(field, None)
    manifest.vocab,manifest.counts = vocab,counts

def wider_dtype(
    name:str, # Name of the dataset
    field:str, # A field
    dtype:str, # Its type so far; `None` if its values differ in length
    new_dtype:str # The type of what is new
)->str: # numpy dtype; `None` if both are
    """Returns `dtype` if both are the same, else an integer type that has the values of both

    Raises `ValueError` if there is none, as for two types of floats."""
    if dtype==new_dtype: return dtype
    wider = None if None in (dtype, new_dtype) else np.promote_types(dtype, new_dtype)
    if wider is None or wider.kind not in 'iu':
        raise ValueError(f'{name}: {field!r} has numbers of type {dtype}, and the new ones need {new_dtype}: no '
                         'integer type has all of them')
    return wider.str[1:]
