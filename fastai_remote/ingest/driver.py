"""Runs any ingest with any writer: in parallel, resumable, with a progress bar

Docs: page `ingest/driver`"""

# Several things end in a dataset: a source is written to Redis or to shards, existing tar shards are indexed, the
# partitions of a Spark DataFrame are written. All of them are an `IngestJob` of numbered chunks, and `run_ingest` does
# the rest: it skips the chunks that an earlier run has written, writes the others in parallel, counts, stops when too
# many samples fail or the dataset will not fit, and commits.

import sys
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from itertools import islice

import numpy as np
from fastcore.imports import IN_NOTEBOOK

from ..clock import monotonic
from ..core import size_str, StoreFull
from .report import SHOWN_FAILURES, FailureLimit, IngestError, IngestReport, SamplesMissing
from ..parallel import parallel_map
from ..processes import remove_leftovers
from ..write.base import chunk_count, ChunksLost, ServerRestarted, Writer

# --- A job

class IngestJob:
    """What an ingest writes: a number of chunks, and the function that writes one of them

    `run_ingest` runs any job with any writer. `marks`, in the methods below, is an array with a number for each chunk:
    0 if the chunk has no record yet, and otherwise the `mark` of its record, or 1."""
    n:int = 0 # Samples of the source; 0 if nobody knows
    verb:str = 'converted' # What could not be done with samples that failed, for a message
    notes:list = () # What the report says of the dataset as a whole, `str`

    def write(self):
        "Returns the function `(chunk, part) -> record` that writes a chunk in a worker. It can be pickled."
        raise NotImplementedError

    def chunks(self, marks:np.ndarray):
        "Yields `(chunk, part)` for each chunk that has no record yet, the arguments of the function from `write`"
        raise NotImplementedError

    def n_chunks(self, marks:np.ndarray)->int:
        "How many chunks `chunks(marks)` yields, for the progress bar; None if nobody knows"
        return int((marks==0).sum())

    def after_restart(self): "Called when a record shows that the server was restarted since the one before"
    def finish(self): "Called when all chunks are written, before the commit"

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
        job.finish()
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

    `marks` is an array as in `IngestJob`, which is not updated; `limit` is a `FailureLimit`, and `progress` as in
    `_with_progress`. Raises what `_count_results`, `job.chunks` and the workers raise."""
    n_chunks = job.n_chunks(marks)
    # closing: when an error is raised, the workers stop at once, and not when the generator is collected
    with closing(parallel_map(job.write(), job.chunks(marks), num_workers)) as results:
        records = _count_results(results, job, writer, limit, report)
        for _ in _with_progress(records, progress, n_chunks, report): pass

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

def _with_progress(records, progress, total, report):
    """Return an iterable of `records` which shows progress if `progress` asks for it

    `progress` is as in `IngestOptions`, or a function with the parameters of `show_progress`, like `total`."""
    if progress is None: progress = IN_NOTEBOOK or sys.stdout.isatty()
    if not progress: return records
    return (progress if callable(progress) else show_progress)(records, total, report)

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
