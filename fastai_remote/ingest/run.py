"""Writes any source to a store: in parallel, resumable, with a progress bar and a report

Docs: page `ingest/run`"""

# `ingest(source, writer, fn)` writes a source with any writer; `to_redis` and `to_shards` call it. Sample numbers are
# divided into chunks. A worker takes a chunk, reads its samples, applies `fn`, encodes the fields and writes them
# itself; the leading process only gets counts.
#
# The source is shuffled on the way in, by a permutation that is computed and not stored. So the stored order is random
# already, and any range of numbers is a fair split.

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice

import numpy as np

from ..core import StoreError, StoreExists
from .chunk import Columns, as_vocab, check_vocab, convert, failure_reason, part_fingerprint
from .chunk import plan_fields
from .chunk import stats_field, stored_fields, write_chunk
from .driver import IngestJob, run_ingest
from .report import FailureLimit, IngestError, IngestReport
from ..order.permutation import BlockPermutation, Permutation
from ..parallel import effective_workers
from ..source.base import fn_fingerprint, mean_bytes, split_names, SplitChunk, storable, StreamedSource
from ..source.datasets import as_source
from ..write.base import ServerRestarted, Writer

# --- Numbers and positions

# Sample i of the dataset is some sample of the source. By default each split is shuffled by itself; with `splits=`, the
# whole is shuffled, and ranges of it become the splits. The position in the source is computed, chunk by chunk.

def split_ranges(
    n:int, # Samples
    splits:dict, # `{split: number of samples, or a fraction of them, or None for the rest}`
)->dict: # `{split: [start, stop]}`
    """Consecutive ranges of given sizes, in the order of `splits`, which cover all `n` samples

    Fractions are rounded, and the largest of them gets or gives what this changes in sum. Raises `TypeError` if
    `splits` is no dict, and `ValueError` for a wrong name or size, or if the sizes do not add up to `n`."""
    if not isinstance(splits, dict):
        raise TypeError(f"splits is a dict, such as {{'train':None, 'valid':.2}}, not {splits!r}")
    # numbers of NumPy are counts and fractions, too
    sizes = [size.item() if isinstance(size, np.generic) else size for size in splits.values()]
    splits = dict(zip(split_names(splits), sizes))
    for size in sizes:
        is_number = isinstance(size, (int,float)) and not isinstance(size, bool)
        if size is not None and not (is_number and 0<=size<=(1 if isinstance(size, float) else n)):
            raise ValueError(f'{splits}: a split has a number of samples, a fraction of them, or None for the rest, '
                             f'not {size}: there are {n:,}')
    if list(splits.values()).count(None)>1: raise ValueError(f'{splits}: only one split can have the rest')
    fractions = [size for size in splits.values() if isinstance(size, float)]
    sizes = {split:round(size*n) if isinstance(size, float) else size for split,size in splits.items()}
    rest = n-sum(size for size in sizes.values() if size is not None)
    counts = sum(size for size in splits.values() if isinstance(size, int))
    exact,slack = counts+sum(fractions)*n,1e-6 if counts else 1e-6*max(n, 1)   # fractions alone may be a little off
    if rest<0 and exact<=n+slack or rest>0 and None not in sizes.values() and abs(exact-n)<=slack:
        for split in sorted((s for s in splits if isinstance(splits[s], float)), key=sizes.get, reverse=True):
            change = max(rest, -sizes[split])
            sizes[split],rest = sizes[split]+change,rest-change
    if rest<0 or (rest and None not in sizes.values()):
        advice = '' if rest<0 else '; None for a split gives it the rest'
        raise ValueError(f'{splits} take {n-rest:,} samples of {n:,}{advice}')
    ends = np.cumsum([0]+[rest if size is None else size for size in sizes.values()]).tolist()
    return {split:[start,stop] for split,start,stop in zip(sizes, ends, ends[1:])}

class SourcePositions:
    "Which sample of the source is written under which number: the order of the source, or a shuffle of each range"
    def __init__(self,
        ranges:list, # `(start, stop)` of each range that is shuffled by itself
        shuffle:bool, # Else the order of the source
        seed:int, # Of the shuffles
        block:int=None, # Samples that lie next to each other in the source, and are best read together
        parts:list=None, # Sizes of the splits that the shuffled range is divided into
        interleave:int=16, # Blocks that are shuffled together
    ):
        def permutation(n):
            return BlockPermutation(n, block, seed, parts, interleave) if block else Permutation(n, seed)
        self.ranges = [(start, stop, permutation(stop-start) if shuffle else None) for start,stop in ranges]

    def __call__(self, numbers:np.ndarray)->np.ndarray:
        "Positions in the source of the samples `numbers`"
        positions = numbers.copy()
        for start,stop,permutation in self.ranges:
            inside = (numbers>=start)&(numbers<stop)
            if permutation is not None and inside.any():
                positions[inside] = start+permutation[numbers[inside]-start]
        return positions

# --- Jobs

# The chunks of a source that knows its length are numbered beforehand, and those without a record are written. A stream
# is read from its beginning each time. A chunk that has a record is passed over, if it is the same that was written
# then.

class SourceJob(IngestJob):
    "Writes the samples of a source; `options` are `IngestOptions`"
    splits:dict = None # `{split: [start, stop]}`; of a stream only known at its end
    is_stream:bool = False # Are numbers given as the samples come?
    def __init__(self, source, writer, options):
        self.source,self.writer,self.fn = source,writer,options.fn
        self.load = source.loader(options.fn is not None)
        self.codecs = source.codecs
        if options.fn is None and source.as_is is not None: self.codecs = {**source.codecs, **source.as_is.codecs}

    def write(self):
        return partial(write_chunk, self.writer.opener(), load=self.load, fn=self.fn, stream=self.is_stream)

    def first(self, k:int):
        """Returns an iterator of `(name, raw)` of the first `k` samples, or fewer, in the order of writing

        Some may turn out to be unreadable. `chunks` goes through them again, even if a stream can be read only once."""
        raise NotImplementedError

    def signature(self)->tuple:
        "Further values that must be the same for a later call to resume this ingest; their `repr` counts, see `_plan`"
        return ()

class IndexedJob(SourceJob):
    "Writes an `IndexedSource`: chunks are ranges of numbers, and each is read from wherever its samples are"
    def __init__(self, source, writer, options):
        super().__init__(source, writer, options)
        self.n,self.chunk_size = len(source),options.chunk
        if options.splits:
            self.splits = split_ranges(self.n, options.splits)
            ranges,parts = [(0,self.n)],[stop-start for start,stop in self.splits.values()]
        else:
            self.splits = source.splits
            ranges,parts = (source.splits or {'':[0,self.n]}).values(),None
        self.positions = SourcePositions(ranges, options.shuffle, options.seed, source.block, parts, source.interleave)

    def first(self, k):
        return chain.from_iterable(self.source.read(self.positions(np.array([i]))) for i in range(min(k, self.n)))

    def chunks(self, marks):
        size = self.writer.plan['chunk']
        for chunk in np.flatnonzero(marks==0).tolist():
            numbers = np.arange(chunk*size, min(self.n, (chunk+1)*size))
            part = self.source.read(self.positions(numbers))
            if len(part)!=len(numbers):
                raise ValueError(f'{self.writer.name}: read() of the source gave {len(part):,} samples, where '
                                 f'{len(numbers):,} were asked for; an exception stands for a sample that cannot be '
                                 'read')
            yield chunk, part

_KEPT_BYTES = 1<<26   # of a stream's first samples

class StreamJob(SourceJob):
    "Writes a `StreamedSource`: its parts are the chunks, and those that an earlier run has written are passed over"
    is_stream = True
    def __init__(self, source, writer, options):
        super().__init__(source, writer, options)
        if options.splits:
            raise ValueError(f'{writer.name}: a stream cannot be divided at random: give {{split: source}}, or split '
                             'when reading, by RandomStoreSplitter()')
        self.chunk_size = options.chunk or writer.stream_chunk_size(source)
        self.parts,self.seen = None,None   # the stream that was begun by `first`, and the parts it has taken from it

    def signature(self): return (self.chunk_size,)
    def n_chunks(self, marks): return None

    def first(self, k):
        self.parts,self.seen = iter(self.source.stream(self.chunk_size)),[]
        def samples(nbytes=0):
            for part in self.parts:
                nbytes += len(part)*mean_bytes(raw for _,raw in part)
                if self.seen is not None: self.seen.append(part)
                if nbytes>_KEPT_BYTES and not self.source.once: self.seen = None   # it is read again
                yield from part
        return islice(samples(), k)

    def _stream(self):
        "Iterator of the parts of the stream, from its beginning; raises `ServerRestarted` if it cannot be read again"
        if self.seen is not None:   # a stream that can be read only once must go on where `first` has stopped
            seen,self.seen = self.seen,None
            return chain(seen, self.parts)
        self.parts = None
        if self.source.once:
            raise ServerRestarted(f'{self.writer.name}: the server lost chunks, and the source cannot be read a second '
                                  'time; repeat the same call to go on')
        return self.source.stream(self.chunk_size)

    def chunks(self, marks):
        splits,size,end,chunk = {},self.chunk_size,0,-1
        for chunk,part in enumerate(self._stream()):
            if len(part)>size:
                raise ValueError(f'{self.writer.name}: stream({size}) of the source gave a part of {len(part):,} '
                                 'samples')
            end = chunk*size+len(part)
            if isinstance(part, SplitChunk): splits.setdefault(part.split, [chunk*size,0])[1] = (chunk+1)*size
            if chunk<len(marks) and marks[chunk]:
                if part_fingerprint(part)!=marks[chunk]: raise self._changed(f'chunk {chunk} is another')
                continue
            if end>self.writer.plan['n']: self.writer.extend(2*(chunk+32)*size)
            yield chunk, part
        if (marks[chunk+1:]!=0).any(): raise self._changed('it is shorter')
        if splits: splits[part.split][1] = end
        self.end = end,self._all_splits(splits)

    def _all_splits(self, splits):
        """Returns `splits`, `{split: [start, stop]}`, with all splits of the source in its order; `None` without splits

        Those without samples get an empty range. Changes `splits`."""
        start = 0
        for name in self.source.srcs:
            splits[name] = splits.pop(name, [start,start])
            start = splits[name][1]
        return splits or None

    def after_restart(self):
        self.writer.extend(self.writer.plan['n'])   # the server may have forgotten how far the numbers go

    def finish(self):
        n,splits = self.end
        self.writer.extend(n, open=False, splits=splits)

    def _changed(self, why):
        return StoreExists(f'{self.writer.name}: the source has changed since the ingest began ({why}); '
                           f'{self.writer.place.how_to_abandon} drops what is there')

# --- ingest

@dataclass
class IngestOptions:
    "Options of `to_redis` and `to_shards` that do not depend on the kind of store"
    fn:callable = None # `fn(sample)` -> sample, run in the workers
    num_workers:int = None # Processes; 0: this one; default: one a core, or as many as the joblib backend in force has
    vocab:list|dict = None # Labels in the order of their codes (of `cls`; else `{field: labels}`)
    overwrite:bool = False # Replace a dataset, or drop an unfinished ingest of another source?
    splits:dict = None # As `split_ranges` takes them
    shuffle:bool = True # Shuffle on the way in, each split by itself?
    seed:int = 0 # Of the shuffle
    chunk:int = None # Samples per chunk
    # Show a bar? Default: in a notebook or a terminal. Or a function that takes the place of `show_progress`
    progress:bool = None
    max_failed:int|float = None # As `FailureLimit` takes it

    def __post_init__(self):
        self.limit = FailureLimit(self.max_failed)
        if self.fn is not None and not callable(self.fn):
            raise TypeError(f'fn must be a function of a sample, not {self.fn!r}')
        is_number = isinstance(self.chunk, (int,np.integer)) and not isinstance(self.chunk, bool)
        if self.chunk is not None and not (is_number and self.chunk>=1):
            raise ValueError(f'chunk is a number of samples, at least 1, not {self.chunk!r}')
        if self.chunk is not None: self.chunk = int(self.chunk)
        self.num_workers = effective_workers(self.num_workers)

def ingest(
    source, # As `to_redis` takes it
    writer:Writer, # Where to
    fn=None, # `fn(sample)` -> sample, run in the workers
    **options # Other fields of `IngestOptions`
)->IngestReport:
    """Write `source` with `writer`, which may be your own; returns an `IngestReport`

    `to_redis` and `to_shards` call this, and take the same options. Raises what they raise."""
    options = IngestOptions(fn, **options)
    source = as_source(source, fn is not None)
    vocab = as_vocab(_known_vocab(source, options) if options.vocab is None else options.vocab)
    for splits in (source.splits or (), source.srcs): split_names(splits)
    job_class = StreamJob if isinstance(source, StreamedSource) else IndexedJob
    job = job_class(source, writer, options)
    writer.begin(partial(_plan, job, vocab, options), options.overwrite)
    remarks = source.as_is.notes if options.fn is None and source.as_is is not None else ()
    job.notes = list(dict.fromkeys([*_source_notes(source, writer.plan['fields'], options), *remarks]))
    try: return run_ingest(job, writer, options.num_workers, options.limit, options.progress)
    finally:
        with suppress(StoreError): writer.close()   # the lock ends by itself; what was written, or an error, counts

def _plan(job, vocab, options):
    """The `Plan` of a new ingest, for `Writer.begin`; converts the first samples to find its fields

    Sets `job.chunk_size` if `options` do not say it, unless it is a stream. Raises `ValueError`, `IngestError`."""
    fields,sample_bytes = _first_samples(job, vocab)
    if options.vocab is not None: check_vocab(vocab, fields)
    if options.chunk is None and job.n:
        job.chunk_size = job.writer.chunk_size(job.n, sample_bytes, max(1, options.num_workers))
    plan = dict(n=job.n, fields=fields, splits=job.splits, vocab=vocab)
    identity = (job.source.fingerprint(), fn_fingerprint(options.fn), options.seed, options.shuffle, *plan.items(),
                *job.signature())
    signature = hashlib.sha256(repr(identity).encode()).hexdigest()
    return dict(plan, signature=signature, chunk=job.chunk_size, stats=stats_field(fields, vocab), open=job.n==0)

def _known_vocab(source, options):
    "`{field: labels}` that the source knows, or `None`: of its samples, or if there is an `fn`, of what that gets"
    as_is = source.as_is if options.fn is None else None
    return source.vocab if as_is is None or as_is.vocab is None else as_is.vocab

def _source_notes(source, fields, options):
    "Remarks for the report, a list of `str`: those of the source, and without `vocab=` those on labels"
    notes = list(source.notes)
    if options.vocab is not None: return notes
    known_vocab = _known_vocab(source, options) or {}
    lacking = [field for field in known_vocab if field not in fields]
    if lacking: return [f'class names are left out: the samples have no field {lacking[0]!r}', *notes]
    if source.label_notes is None: return notes
    notes = [*source.label_notes, *notes]
    has_note = any(note.startswith('class names') for note in notes)   # that says why no names are known
    label = fields.get('cls', {})
    are_numbers = label.get('staged') and not label['text']
    if known_vocab or has_note or not are_numbers: return notes
    return [*notes, "labels of 'cls' are numbers, and the dataset names no classes; vocab= names them"]

def _first_samples(job, vocab, tries=100):
    """`(fields, cost)`: those of the first sample that can be encoded, as in a plan; and the mean of `Writer.cost`

    The mean is of the first `Writer.n_examples` samples that can be encoded. Raises `ValueError` if the source is
    empty, and `IngestError` if none of the first `tries` samples can be encoded."""
    writer,error,seen,fields,costs = job.writer,None,0,None,[]
    key_field = None if writer.takes_keys or job.source.implicit_keys else 'key.txt'
    for seen,(name,raw) in enumerate(job.first(tries), 1):
        try:
            sample = convert(job.load, job.fn, raw)
            sample = stored_fields(sample, key_field)
            sample_fields = fields or plan_fields(sample, vocab, job.codecs)
            columns = Columns(sample_fields, vocab)
            columns.add(0, sample)
            fields = sample_fields
            costs.append(writer.cost({field:values[0] for field,values in columns.values.items()}))
        except Exception as e: error = error or (name, e)
        if len(costs)>=writer.n_examples: break
    if fields: return fields,sum(costs)/len(costs)
    if not seen: raise ValueError(f'{writer.name}: the source is empty')
    name,e = error
    raise IngestError(f'none of the first {seen} samples could be converted; {storable(str(name))}: '
                      f'{failure_reason(e)}') from e
