"""Rows that an engine hands out by itself, written where they are: Spark's `mapPartitionsWithIndex`

Docs: page `ingest/partitions`"""

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

import operator, uuid
from contextlib import suppress
from functools import partial

import numpy as np
from fastcore.basics import chunked

from ..clock import monotonic
from ..core import StoreError
from .chunk import as_vocab, check_vocab, convert, plan_fields, stats_field, write_chunk
from .driver import commit_ingest
from .report import FailureLimit, IngestReport
from .run import IngestOptions
from ..source.base import unchanged
from ..store.address import concealed
from ..store.redis import RedisReader
from ..store.redis_link import as_link, RedisLink
from ..write.redis import RedisWriter

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
