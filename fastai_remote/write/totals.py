"""What the records of all chunks say about the dataset: its manifest

Docs: page `write/totals`"""

# The commit reads the records one after the other. It keeps totals, and some numbers for each shard and each gap, but
# nothing for each sample. A split begins at its first place, less the gaps before it. Vocabularies are all labels that
# occur, sorted. More than 2²⁰ distinct integers are not classes: of these, only the smallest and the largest are kept.

from array import array

import numpy as np

from ..codec.numbers import code_dtype, narrow
from ..codec.stats import ImageStats
from ..codec.webdataset import integer_of
from ..core import Manifest, StoreError
from ..runs import GapTable, TooManyRuns

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
        for field,counts in record.get('counts', {}).items(): self._add_counts(field, counts)
        if record.get('stats'): self.stats += ImageStats.from_text(record['stats'])

    def _add_counts(self, field, pairs):
        """Adds `(label, number of samples)` pairs to the counts of the labels of `field`

        When there are more than `MAX_CLASSES` integers, only their range is kept from then on."""
        counts = self.counts.setdefault(field, {})
        if isinstance(counts, _IntegerRange):
            counts.extend(label for label,_ in pairs)
            return
        for label,samples in pairs: counts[label] = counts.get(label, 0)+samples
        spec = self.fields[field]
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
