"""What the records of all chunks say about the dataset: its manifest

Docs: page `write/shard_totals`"""

# The commit reads the records one after the other. It keeps totals, and some numbers for each shard and each gap, but
# nothing for each sample. Shards follow each other in the order of the chunks. A split begins at its first number, less
# the gaps before it. Vocabularies are all labels that occur, sorted. More than 2²⁰ distinct integers are not classes:
# of these, only the smallest and the largest are kept.

from array import array

import numpy as np

from ..codec.numbers import narrow
from ..codec.stats import ImageStats
from ..codec.webdataset import integer_of
from ..store.shard_index import ShardManifest, ShardTable
from .base import labels_of_texts, MAX_CLASSES

class ShardTotals:
    "Adds up the records of all chunks, in their order, and describes the dataset in its manifest"
    def __init__(self,
        fields:dict, # Of the plan: `{field: {'codec', 'dtype', …}}`
    ):
        self.fields = dict(fields) # Of the plan, and those that occurred later
        self.chunks,self.ok,self.nbytes,self.failed = 0,0,0,0
        self.names,self.columns = [],[array('q') for _ in range(9)] # Of the shards
        self.with_field = {} # `{field: number of samples that have it}`, if samples may have different fields
        self.gaps = array('q') # Starts and stops of the gaps
        self.labels,self.counts = {},{} # As `seen` and `counts` of the writer
        self.stats = ImageStats()

    def add(self,
        record:dict, # Of the next chunk, as `ShardWriter.records` returns it
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
        for name,*numbers in record['shards']:
            self.names.append(name)
            # the last numbers are only in rows of `index_shards`
            for column,number in zip(self.columns, [*numbers, 0, 0]): column.append(number)
        for start_stop in record['gaps']: self.gaps.extend(start_stop)
        for field,texts in record['labels'].items(): self.labels.setdefault(field, set()).update(texts)
        for field,counts in record['counts'].items(): self._add_counts(field, counts)
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

    def describe(self,
        manifest:ShardManifest, # Is changed
        plan:dict, # The plan of the ingest
    ):
        "Completes `manifest`: size, failures, statistics, fields, vocabularies, counts, table of shards, and splits"
        manifest.n,manifest.nbytes,manifest.failed = self.ok,self.nbytes,self.failed
        manifest.stats = plan.get('kept_stats') or {}
        if len(self.stats): manifest.stats = {plan['stats']:self.stats.summary()}
        manifest.fields = _manifest_fields(self)
        _add_labels(manifest, self)
        _add_shards(manifest, plan, self)

class _IntegerRange:
    "The smallest and the largest of integers that are too many to be classes"
    def __init__(self, integers): self.lowest,self.highest = min(integers),max(integers)
    def extend(self, integers):
        for i in integers: self.lowest,self.highest = min(self.lowest, i),max(self.highest, i)

def _manifest_fields(totals):
    """Returns the fields as a manifest has them, `{field: {'codec', 'dtype'}}`

    If samples may have different fields, those that no sample has are left out, and entries, except of checksums, also
    have `n`, the number of samples that have the field."""
    result,counts = {},totals.with_field
    for field,spec in totals.fields.items():
        if counts and field.removesuffix('.crc') not in counts: continue   # only in samples that failed
        result[field] = {key:value for key,value in spec.items() if key in ('codec','dtype')}
        if field in counts: result[field]['n'] = counts[field]
    return result

def _add_labels(manifest, totals):
    """Adds vocabularies and counts to `manifest`, and the narrowest dtype of labels whose vocabulary was not known

    Integers that are too many to be classes get neither, but a dtype for the integers themselves."""
    for field,spec in totals.fields.items():
        if field not in manifest.fields: continue
        counts = totals.counts.get(field, {})
        if spec.get('late'): counts = _as_integers(counts)
        is_range,is_staged = isinstance(counts, _IntegerRange),spec.get('staged')
        if is_staged and is_range:
            manifest.fields[field]['dtype'] = narrow(min(counts.lowest, 0), counts.highest)
        elif is_staged:
            vocab = manifest.vocab[field] = sorted(counts)
            manifest.fields[field]['dtype'] = narrow(0, max(len(vocab)-1, 0))
            manifest.counts[field] = [counts[label] for label in vocab]
        elif spec['codec']=='cls' and field in manifest.vocab:
            manifest.counts[field] = [counts.get(code, 0) for code in range(len(manifest.vocab[field]))]
        elif spec['codec']=='labels' and field not in manifest.vocab:
            manifest.vocab[field] = labels_of_texts(totals.labels.get(field, ()))

def _as_integers(counts):
    """Returns `{int: samples}` if all labels in `counts`, `{text: samples}`, are integers; else `counts` itself

    Different texts of the same integer are counted together."""
    result = {}
    for label,n in counts.items():
        number = integer_of(label)
        if number is None: return counts
        result[number] = result.get(number, 0)+n
    return result

def _add_shards(manifest, plan, totals):
    """Adds the table of shards, of `totals`, a `ShardTotals`, and the splits to `manifest`, which has its `prefix`

    The splits of `plan` are ranges of numbers before gaps are closed. Without a prefix, it is an index of others'
    shards: then they are ranges of shards, and `base`, the folder of these, is added too."""
    n,size,crc,index_size,raw_size,index_crc,kind,first,stamp = (np.array(column) for column in totals.columns)
    is_compressed = kind.any()
    table = ShardTable(totals.names, n, size, crc, index_size, index_crc, raw_size if is_compressed else None, kind,
                       first=first if first.any() else None, stamp=stamp if stamp.any() else None)
    manifest.shards = table.pack()
    splits = plan['splits'] or {}
    if manifest.prefix:
        manifest.splits = _without_gaps(splits, np.array(totals.gaps, np.int64).reshape(-1, 2))
        return
    manifest.base = plan['base']
    ends = np.cumsum([0,*n]).tolist()   # an index of others' shards has splits that are ranges of shards
    manifest.splits = {split:[ends[start],ends[stop]] for split,(start,stop) in splits.items()}

def _without_gaps(
    splits:dict, # `{split: [start, stop]}`
    gaps:np.ndarray, # Ranges without samples, ascending, shape (n, 2)
)->dict:
    "Returns the splits as they are once all gaps are closed, ranges of the numbers that samples have then"
    ends = np.concatenate([[0], np.cumsum(gaps[:,1]-gaps[:,0])])
    def missing_before(number):
        k = np.searchsorted(gaps[:,0], number)
        after = max(0, gaps[k-1,1]-number) if k else 0   # the part of a gap that lies behind `number`
        return int(ends[k]-after)
    return {split:[number-missing_before(number) for number in span] for split,span in splits.items()}
