"""Writes any source to a store: in parallel, resumable, with a progress bar and a report

Docs: page `ingest/run`"""

import hashlib, operator, sys, uuid
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice

import numpy as np
from fastcore.basics import chunked
from fastcore.imports import IN_NOTEBOOK

from ..clock import monotonic
from ..core import size_str, StoreError, StoreExists, StoreFull
from ..order.permutation import BlockPermutation, Permutation
from ..parallel import effective_workers, parallel_map, remove_leftovers
from ..source.base import fn_fingerprint, mean_bytes, split_names, SplitChunk, storable, StreamedSource, unchanged
from ..source.datasets import as_source
from ..store.connection import concealed
from ..store.redis import RedisReader
from ..store.redis_link import as_link, RedisLink
from ..write.base import chunk_count, ChunksLost, ServerRestarted, Writer
from ..write.redis import RedisWriter
from .chunk import (
    as_vocab, check_vocab, Columns, convert, failure_reason, part_fingerprint, plan_fields, stats_field, stored_fields,
    write_chunk)
from .report import FailureLimit, IngestError, IngestReport, SamplesMissing, SHOWN_FAILURES

# --- Running a job
#
# Several things end in a dataset: a source is written to Redis or to shards, existing tar shards are indexed, the
# partitions of a Spark DataFrame are written. All of them are an `IngestJob` of numbered chunks, and `run_ingest` does
# the rest: it skips the chunks that an earlier run has written, writes the others in parallel, counts, stops when too
# many samples fail or the dataset will not fit, and commits.

# --- A job

class IngestJob:
    """What an ingest writes: a number of chunks, and the function that writes one of them

    `run_ingest` runs any job with any writer. `marks`, in the methods below, is an array with a number for each chunk:
    0 if the chunk has no record yet, and otherwise the `mark` of its record, or 1."""
    n:int = 0 # Samples of the source; 0 if nobody knows
    is_stream:bool = False # Are numbers given as the samples come, so that nobody knows how many chunks there are?
    verb:str = 'converted' # What could not be done with samples that failed, for a message
    notes:list = () # What the report says of the dataset as a whole, `str`

    def write(self):
        "Returns the function `(chunk, part) -> record` that writes a chunk in a worker. It can be pickled."
        raise NotImplementedError

    def chunks(self, marks:np.ndarray):
        "Yields `(chunk, part)` for each chunk that has no record yet, the arguments of the function from `write`"
        raise NotImplementedError

    def after_restart(self): "Called when a record shows that the server was restarted since the one before"

# --- Space

# After the first chunk it is known how many bytes a sample takes, with its keys. A dataset that cannot fit is refused
# then, and not hours later.

def check_space(
    writer:Writer, # Some of its chunks are written
    n:int, # Samples of the source
    written:int, # Samples written so far
    failed:int=0, # Samples that failed so far; the same share of the others is expected to fail
)->int: # Bytes that the whole dataset will take, estimated
    "Raise `StoreFull` if the rest of the samples will not fit; not if it is unknown how much space is left"
    chunk,_ = next(writer.records(), (0,None))
    size = writer.plan['chunk']
    each,free,limit = writer.space(range(chunk*size, min(n, chunk*size+64)))
    expected = n*written//max(1, written+failed)
    needed = int(each*(expected-written))
    if free is not None and needed>free:
        raise StoreFull(f'{expected:,} samples take about {size_str(each*expected)} ({each:,.0f} bytes each), '
                        f'{size_str(needed)} of it still to be written; '
                        f'{writer.url} has {size_str(max(free, 0))} left of {size_str(limit)}')
    return int(each*expected)

# --- Run a job

# A server that crashes may come back without the last chunks. So the records are counted again at the end, and what is
# missing is written again.
#
# `progress=` may be a function in place of `show_progress`: it gets the records, their number and the report, and
# passes the records on. The command line shows a line with the rate and the remaining time in this way.

def run_ingest(
    job:IngestJob, # What to write
    writer:Writer, # Where to; `begin` was called
    num_workers:int, # Processes
    limit:FailureLimit, # How many samples may fail
    progress:bool=None, # As in `IngestOptions`
    tries:int=3, # Rounds, if a server that crashed comes back without the last chunks
)->IngestReport:
    """Write the chunks of `job` that are not written yet, in parallel, and commit

    Raises `IngestError`, `StoreFull`, and `ServerRestarted` if the server loses chunks `tries` times. What is written
    is kept, unless the same call would fail in the same way."""
    try: return _run(job, writer, num_workers, limit, progress, tries)
    except (NothingWritten,SamplesMissing):   # the same call would fail in the same way
        writer.abandon()
        raise
    except StoreFull as e:
        raise StoreFull(f'{writer.name}: {e}. Nothing of it is visible; make room and repeat the same call to go on, '
                        f'or {writer.place.how_to_abandon}') from e
    except (KeyboardInterrupt,BrokenProcessPool) as e:   # or a worker was killed, for example for want of memory
        e.add_note(f'{writer.name}: what is written is kept{writer.place.progress()}: repeat the same call to go on, '
                   f'or {writer.place.how_to_abandon}')
        raise

def _run(job, writer, num_workers, limit, progress, tries):
    "Do what `run_ingest` does, without what it does about errors; returns the report"
    started = monotonic()
    remove_leftovers()
    report,marks = _counted(writer)
    limit.check(writer, report, job.n)
    for _ in range(tries):
        _write_chunks(job, writer, marks, num_workers, limit, progress, report)
        report,marks = _counted(writer, report)
        if (marks==0).any(): continue
        try: commit_ingest(writer, report, limit, job.verb)
        except ChunksLost:
            report,marks = _counted(writer, report)
            continue
        report.notes |= dict.fromkeys(job.notes, 0)
        report.seconds = monotonic()-started
        return report
    raise ServerRestarted(f'{writer.name}: the server lost {(marks==0).sum():,} chunks again and again '
                          '(does it crash?); repeat the same call to go on')

def commit_ingest(
    writer:Writer, # All of its chunks are written
    report:IngestReport, # Counts all of its records
    limit:FailureLimit, # How many samples may fail
    verb:str='converted', # What could not be done with samples that failed
):
    """Make the dataset visible, unless nothing was written or too many samples failed: then raise `IngestError`

    Sets `report.failures`."""
    report.failures = list(islice(writer.failures(), SHOWN_FAILURES))
    if report.failed and not report.written:
        sample,reason = report.failures[0]
        raise NothingWritten(f'{writer.name}: none of the {report.failed:,} samples could be {verb}; '
                             f'{sample}: {reason}')
    if not report.written: raise NothingWritten(f'{writer.name}: no samples')
    limit.check(writer, report, report.written+report.failed)
    writer.commit()

class NothingWritten(IngestError): "The source has no sample, or none that could be written"

def _counted(writer, before=None):
    """Returns `(report, marks)`, from the records that are there now: a new report, and an array as in `IngestJob`

    The new report keeps `resumed` and `needs` of the report `before`. Without one, an earlier run has written the
    records."""
    report = IngestReport(writer.name, writer.url)
    if before: report.resumed,report.needs = before.resumed,before.needs
    marks = np.zeros(chunk_count(writer.plan), np.int64)
    for chunk,record in writer.records():
        marks[chunk] = record.get('mark', 1)
        report.add(record, resumed=before is None)
    return report,marks

def _write_chunks(job, writer, marks, num_workers, limit, progress, report):
    """Write, in parallel, the chunks that have no record, and count them in `report`

    `marks` is an array as in `IngestJob`, which is not updated; `limit` is a `FailureLimit`; `progress` is as in
    `IngestOptions`, or a function with the parameters of `show_progress`. Raises what `_count_results`, `job.chunks`
    and the workers raise."""
    n_chunks = None if job.is_stream else int((marks==0).sum())
    # closing: when an error is raised, the workers stop at once, and not when the generator is collected
    with closing(parallel_map(job.write(), job.chunks(marks), num_workers)) as results:
        records = _count_results(results, job, writer, limit, report)
        if progress is None: progress = IN_NOTEBOOK or sys.stdout.isatty()
        if progress: records = (progress if callable(progress) else show_progress)(records, n_chunks, report)
        for _ in records: pass

def _count_results(results, job, writer, limit, report):
    """Yield the records from the iterator `results` as they come, and count them in `report`

    Calls `job.after_restart` if `run` of a record is not that of the one before. Raises `IngestError` if too many
    samples failed. After the first record, it sets `report.needs`, and raises `StoreFull` if there will not be enough
    space, both only if `job.n` is known."""
    run = None
    for k,record in enumerate(results):
        report.add(record)
        limit.check(writer, report, job.n)
        if k==0 and job.n: report.needs = check_space(writer, job.n, report.written, report.failed)
        if run is not None and record.get('run')!=run: job.after_restart()
        run = record.get('run')
        yield record

def show_progress(
    records, # Iterable of the records of chunks
    total:int, # How many there are; `None` if nobody knows
    report:IngestReport # Counts the samples
):
    "Yield `records`, with a progress bar that shows what `report` counts"
    from fastprogress.fastprogress import progress_bar   # takes 0.1 s and imports a web framework: not in every worker
    bar = progress_bar(records, total='noinfer' if total is None else total)
    for record in bar:
        yield record
        bar.comment = f'{report.written:,} written, {report.failed:,} failed'
        if report.needs: bar.comment += f', about {size_str(report.needs)} where it is stored'
    if not IN_NOTEBOOK: print()   # the bar of a terminal does not end its line

# --- The jobs of a source
#
# `ingest(source, writer, fn)` writes a source with any writer; `to_redis` and `to_shards` call it. Sample numbers are
# divided into chunks. A worker takes a chunk, reads its samples, applies `fn`, encodes the fields and writes them
# itself; the leading process only gets counts.
#
# The source is shuffled on the way in, by a permutation that is computed and not stored. So the stored order is random
# already, and any range of numbers is a fair split.

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
        self.ranges = []
        for start,stop in ranges:
            permutation = Permutation(stop-start, seed) if shuffle else None
            if shuffle and block: permutation = BlockPermutation(stop-start, block, seed, parts, interleave)
            self.ranges.append((start, stop, permutation))

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
    # Further values that must be the same for a later call to resume this ingest; their `repr` counts, see `_plan`
    signature:tuple = ()
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
        self.signature = self.chunk_size,
        self.parts,self.seen = None,None   # the stream that was begun by `first`, and the parts it has taken from it

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
        start = 0
        for name in self.source.srcs:   # all splits in the order of the source, also those without samples
            splits[name] = splits.pop(name, [start,start])
            start = splits[name][1]
        self.writer.extend(end, open=False, splits=splits or None)

    def after_restart(self):
        self.writer.place.store_plan(self.writer.plan)   # the server may have forgotten how far the numbers go

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
                *job.signature)
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

# --- Partitions of an engine
#
# `to_redis` deals out chunks itself, on whatever joblib runs on. Where the data is in Spark already, as a DataFrame of
# paths or bytes, it is the other way round: Spark hands partitions to its workers, as often as it likes, and runs a
# task again if it fails. So the rows of all partitions are counted first, as Spark's `zipWithIndex` does. Then each row
# has a number, whoever writes it and however often, and of each chunk the first record counts.
#
# ```python
# rows = df.rdd.map(lambda row: row.asDict())
# counts = rows.mapPartitions(lambda part: [sum(1 for _ in part)]).collect()
# with RedisStore.writer(url, 'pets', df.first().asDict(), counts) as w:
# rows.mapPartitionsWithIndex(w).count()
# w.commit()
# ```

class PartitionWriter:
    """Writes rows, one partition at a time, from any process

    Use it in `with`: that takes the lock and begins the ingest. There, call it with the number of a partition and its
    rows, as Spark's `mapPartitionsWithIndex` does, then call `commit`. A partition may be written several times, also
    at the same time: the first attempt that writes a chunk counts."""
    def __init__(self,
        url:str|RedisLink, # `redis://`, `rediss://` or `unix://`; the workers must reach it
        name:str, # Name of the dataset
        sample, # A row, which shows the fields
        counts:list, # The number of rows of each partition
        fn=None, # `fn(row)` -> sample, run in the workers; default: rows are samples
        # Labels in the order of their codes (of `cls`; else `{field: labels}`); default: all there are, sorted
        vocab:list|dict=None,
        overwrite:bool=False, # Replace a dataset, or drop an unfinished ingest, of this name?
        chunk:int=256, # Rows per chunk
        # Rows that may fail: a number, or a fraction (float) of all; default: 1%, or 10 if more, at most a tenth
        max_failed:int|float=None,
        store_class:type=RedisReader, # The class of the dataset that the report of `commit` opens
    ):
        url = concealed(url)
        self.store_class = store_class
        self.writer,self.fn,self.overwrite = RedisWriter(as_link(url), name),fn,overwrite
        self.open_writer = None # Set while the ingest runs
        options = IngestOptions(fn, num_workers=0, chunk=chunk, max_failed=max_failed)
        self.limit,vocab = options.limit,as_vocab(vocab)
        self.counts = [operator.index(count) for count in counts]
        if min(self.counts, default=0)<0: raise ValueError(f'{name}: numbers of rows of partitions, not {counts}')
        fields = plan_fields(convert(unchanged, fn, sample), vocab)
        check_vocab(vocab, fields)
        # each partition begins with a chunk
        self.first_chunks = np.cumsum([0, *(-(-count//options.chunk) for count in self.counts)]).tolist()
        self.plan = dict(n=self.first_chunks[-1]*options.chunk, chunk=options.chunk, fields=fields, splits=None,
                         vocab=vocab, signature=uuid.uuid4().hex, stats=stats_field(fields, vocab))

    def __enter__(self):
        self.writer.begin(self.plan, self.overwrite)
        self.open_writer,self.started = self.writer.opener(),monotonic()
        return self

    def __exit__(self, *args):
        self.open_writer = None
        with suppress(StoreError): self.writer.close()   # as in `ingest`
    def __getstate__(self):   # no connection, no lock
        self._check_begun()
        return dict(open_writer=self.open_writer, fn=self.fn, counts=self.counts, first_chunks=self.first_chunks)

    def _check_begun(self):
        "Raises `RuntimeError` before the block of `with` and after it, and when `commit` has returned"
        if self.open_writer is None:
            raise RuntimeError(f'{self.writer.name}: use the writer in with: … as write:, until commit has returned')

    def __call__(self,
        partition:int, # Number of the partition
        rows # Its rows, an iterable
    ):
        """Write a partition; yields `(chunk, written, failed)` for each chunk: its number, and counts of rows

        Raises `ValueError` if it has another number of rows than were counted, and `StoreBusy` after the end of the
        ingest."""
        self._check_begun()
        writer,n = self.open_writer(),0
        first,end = self.first_chunks[partition:partition+2]
        for chunk,part in enumerate(chunked(rows, writer.plan['chunk']), first):
            n += len(part)
            if chunk<end and n<=self.counts[partition]:
                named = [(f'row {i} of partition {partition}', row) for i,row in enumerate(part, n-len(part))]
                record = write_chunk(self.open_writer, chunk, named, unchanged, self.fn, stream=True)
                yield chunk,record['ok'],record['failed']
        if n!=self.counts[partition]:
            counted = f'{self.counts[partition]:,} were counted'
            raise ValueError(f'{writer.name}: partition {partition} has {n:,} rows, of which {counted}: is it computed '
                             'anew each time, with other results? Save it first')

    def commit(self,
        max_failed:int|float=None, # Default: as the writer was made with
    )->IngestReport:
        """Make a dataset of all partitions

        Attempts that are still running cannot write any more: they raise `StoreBusy`. Raises what `to_redis` raises.
        `ServerRestarted` means that chunks are not written, or lost: write all partitions again. After an
        `IngestError` it may be called again, with a higher `max_failed`."""
        self._check_begun()
        limit,writer = self.limit if max_failed is None else FailureLimit(max_failed),self.writer
        report = IngestReport(writer.name, writer.url)
        for _,record in writer.records(): report.add(record)
        commit_ingest(writer, report, limit)
        self.open_writer = None
        open_store = partial(self.store_class, writer.link, writer.name)
        report.seconds,report.open_store = monotonic()-self.started,open_store
        return report
