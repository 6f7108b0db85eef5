"""The interface of writers, and what all of them need to turn chunks into one dataset

Docs: page `write/base`"""

# Chunks are written by many processes that do not communicate with each other. Each sample is written under its place
# in the plan, so that whatever is repeated writes the same. When all chunks are written, places of samples that failed
# are empty, and the labels have no common codes yet. This module has the interface of writers, and what a commit
# needs. Nothing here depends on a server.

import os, re, socket, threading
from contextlib import contextmanager, suppress
from typing import TypedDict

import numpy as np

from ..core import CorruptSample, Manifest, StoreBusy, StoreError, StoreExists, StoreUnavailable
from ..store.base import MemoryReader, Store
from .revision import Change, NewPart, NewValues, NewVersion, Totals

# --- Names

# Names become parts of Redis keys, so characters with a meaning there, such as `:`, are not allowed.

def check_name(
    name:str # Name of a dataset
)->str: # `name`
    "Returns `name` if it is a valid name of a dataset; else raises `ValueError`"
    if not isinstance(name, str) or not re.fullmatch(r'[\w./ -]+', name):
        raise ValueError(f'{name!r} cannot name a dataset: use letters, digits, and any of . _ - / and space')
    return name

# --- Who is writing

# A lock names the host and the process that holds it. A process on the same machine can be checked for being alive, so
# its lock can be taken over at once if it is dead. A process on another machine cannot be checked; its lock ends after
# some time.
#
# `ServerRestarted` is raised when a server has restarted during an ingest, because it may come back as it was some
# seconds before.

class ServerRestarted(StoreUnavailable): "The server restarted during an ingest and may have lost recent samples"
class ChunksLost(ServerRestarted): "A commit found chunks to write again: they have no records now. It moved no sample."

LEASE_SECONDS = 30 # A lock that was not renewed for so long may be taken over
held_locks = set() # IDs of the locks that this process holds, or is taking

def host_id()->str:
    """Returns an ID of the machine and PID namespace in which process IDs are unique

    It consists of host name, boot ID and namespace, separated by spaces, because machines and containers may share a
    host name. Where `/proc` cannot be read, it is only the host name."""
    try:
        with open('/proc/sys/kernel/random/boot_id') as f: boot = f.read().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError: return socket.gethostname()

def is_alive(
    pid:int # Process ID
)->bool:
    "Returns whether a process `pid` exists on this machine; one of another user and a zombie count"
    try: os.kill(pid, 0)
    except (ProcessLookupError,OverflowError): return False
    except PermissionError: pass   # it runs, and belongs to another user
    return True

def process_state(
    pid:int # Process ID
)->tuple: # `(start, state)`: clock ticks since boot, `int`; the letter that `ps` shows; `(None, None)` if unknown
    "Returns when a process was started, which tells it from an earlier one with its ID, and its state"
    try:
        with open(f'/proc/{pid}/stat', 'rb') as f: fields = f.read().rpartition(b')')[2].split()
        return int(fields[19]),fields[0].decode()
    except (OSError,IndexError,ValueError): return None,None

# --- Progress

# An ingest counts its progress in chunks. The plan of a stream grows while samples come, so the number of its chunks is
# not known yet.

class Plan(TypedDict, total=False):
    """What an ingest is going to write: a dict that is stored as JSON until the dataset is committed

    A writer may add entries of its own."""
    n:int # Number of samples; of a stream that has not ended, what `extend` has set so far, or 0
    chunk:int # Samples per chunk
    fields:dict # `{field: {'codec', 'dtype', …}}`; labels of an entry with `staged` become codes in `commit`
    splits:dict # `{split: [start, stop]}`, with the places of samples that fail; `None`: none, or not known yet
    vocab:dict # `{field: list of labels}`, where labels are known beforehand
    stats:str # Field of which statistics of images are gathered, or `None`
    open:bool # Is it a stream, whose length is not known yet?
    signature:str # Identifies the call: a later call with the same signature continues the ingest

def chunk_count(
    plan:Plan # The plan of an ingest: `n` samples in chunks of `chunk`
)->int:
    "Returns how many chunks an ingest has; for a stream that has not ended, those of its `n` so far"
    return -(-plan['n']//plan['chunk'])

def progress_text(
    plan:Plan, # The plan of an unfinished ingest; empty or `None` if there is none
    done:int, # Chunks that are written
)->str:
    "Returns how far an ingest is: ' (3 of 10 chunks done)', ' (3 chunks done)' if `plan` is `open`, '' without a plan"
    if not plan: return ''
    of = '' if plan.get('open') else f' of {chunk_count(plan):,}'   # numbers of a stream are reserved in advance
    return f' ({done:,}{of} chunks done)'

# --- The interface

# An ingest uses a writer only through this interface. `RedisWriter`, `ShardWriter` and `MemoryWriter` implement it. The
# test suite `fastai_remote.testing.WriterTests` checks each of them, and can be inherited for a writer of your own.
#
# All labels are known only after the last sample was read, and workers should not have to agree on codes before that.
# So a worker stores the label, or in Redis a 64-bit hash of it, and the record of a chunk counts its labels. Such a
# field is called *staged*. The commit sorts the labels of all records, which are the vocabulary, and replaces each hash
# by the position of its label, in the narrowest integer type that holds all positions. The result does not depend on
# which worker was faster, and what only samples have that failed in the end is no label.

class Place:
    """Where a dataset appears, and where its ingest keeps what it must remember; one process at a time holds its lock

    All methods raise `StoreUnavailable` if the place cannot be reached; all that write raise `StoreBusy` without the
    lock."""
    name:str # Name of the dataset
    url:str # Where the dataset is written, without secrets

    @property
    def how_to_abandon(self)->str:
        "The call that drops an unfinished ingest, for a message"
        return 'abandon()'

    def take(self):
        "Takes the lock; raises `StoreBusy`"
        raise NotImplementedError

    def close(self): "Releases the lock; may raise a `StoreError`, after which the lock ends by itself"

    @contextmanager
    def locked(self):
        "A context that takes the lock, and releases it at the end; raises `StoreBusy`"
        self.take()
        try: yield
        finally:
            with suppress(StoreError): self.close()   # it ends by itself; what was done, or an error, counts

    def check(self): "Raises `StoreError` if a dataset that is written here would be lost or mixed up with another one"

    def committed(self,
        accept_damage:bool=False # Is a damaged manifest as good as none, where it can be replaced?
    )->Manifest|None:
        "Returns the manifest of the dataset, or `None`; raises `CorruptSample`, `UnsupportedFormat`"
        raise NotImplementedError

    def plan(self)->Plan|None:
        "Returns the plan of the unfinished ingest, or `None`; raises `CorruptSample` if it is damaged"
        raise NotImplementedError

    def count_done(self,
        plan:Plan # Of an unfinished ingest
    )->int: # `None` if that is not known, as here
        "Returns how many chunks of an unfinished ingest have a record"

    def progress(self)->str:
        "Returns how far an unfinished ingest is, as `progress_text`; '' if that is not known"
        try:
            plan = self.plan()
            done = self.count_done(plan) if plan else None
        except StoreError: return ''   # the place is away, or the plan is damaged
        return '' if done is None else progress_text(plan, done)

    def describe(self,
        plan:Plan, # Of an unfinished ingest; empty if it is damaged
        running:bool # Does somebody hold the lock?
    )->dict: # `name`; `chunks` done; `of` how many, `None` for a stream; `began` (UTC); `running`
        "Returns what a list of unfinished ingests has of one"
        of = 0 if not plan else None if plan.get('open') else chunk_count(plan)
        return dict(name=self.name, chunks=self.count_done(plan) if plan else 0, of=of, began=plan.get('began', ''),
                    running=running)

    def begin(self,
        plan:Plan # As `Writer.checked_plan` returned it
    )->Plan: # With entries of this place
        "Stores the plan of a new ingest"
        raise NotImplementedError

    def store_plan(self,
        plan:Plan # The plan of the ingest, with other entries
    ):
        "Changes the plan"
        raise NotImplementedError

    def resumed(self,
        plan:Plan # Of an earlier run
    )->Plan:
        "Returns the plan of an earlier run, which is to be continued; by default `plan` itself"
        return plan

    def drop_plan(self):
        "Makes an unfinished ingest impossible to continue and to publish, and removes what it wrote"
        raise NotImplementedError

    def clean_up(self,
        keep_before:bool=True # Keep what only the version before uses?
    )->bool: # Was there anything to remove?
        "Removes what neither the dataset nor an unfinished ingest needs; by default, nothing is left over"
        return False

    def publish(self,
        manifest:Manifest, # Of the new version
        tables:dict, # `{key or file: bytes}` to store with it
        run:str=None, # The `Writer.server_run` that must still be the current one; default: any
        version:NewVersion=None # What the manifest was made with; `None`: nothing of the version before stays
    )->Manifest:
        """Replaces the manifest, the one step that makes a version visible; then removes what is not needed any more

        Raises `ServerRestarted` if the server has lost what was written, or the new version."""
        raise NotImplementedError

class Writer:
    """The interface of writers. A writer writes one dataset, which becomes visible completely or not at all.

    One process leads: it calls `begin`, and at the end `commit` and `close`. What describes the dataset and the ingest
    is in a `Place`, so that beginning, continuing and abandoning are the same for all writers. Any process may call
    `put` and `done`, on a writer that the callable from `opener` has made there. Samples are written under their
    numbers, in chunks of `plan['chunk']` numbers. A chunk counts as written once `done` has been called for it.

    After a kill at any point, the same calls continue: `begin` returns the plan of the earlier run, and `records` the
    chunks that are done. All methods raise `StoreUnavailable` if the place cannot be reached."""
    place:Place = None # Where the dataset appears
    plan:Plan = None # Set by `begin`
    chunk_split:str = None # Split of the chunk that is being written, where `plan['splits']` is not known yet
    takes_keys:bool = False # Does `put` take the keys of samples, as column `__key__`?
    base:Store = None # The version that is there, if this writes a new version of it
    change:Change = None # What becomes of `base`
    n_examples:int = 1 # Number of samples to convert before `begin`; their size is an argument of `chunk_size`

    @property
    def name(self)->str:
        "Name of the dataset"
        return self.place.name
    @property
    def url(self)->str:
        "Where the dataset is written, without secrets"
        return self.place.url
    @property
    def needs_all(self)->bool:
        "Must each sample be written, so that nothing is kept if one fails?"
        return self.change is not None and self.change.needs_all

    def begin(self,
        plan, # A `Plan`, or a function that returns it, which is called while the lock is held
        overwrite:bool=False, # Replace a dataset of this name, or drop an unfinished ingest of another source?
    )->Plan: # The plan in force: that of an earlier run with the same `signature` if there is one, else `plan`
        """Takes the lock, and continues an earlier ingest or stores the plan of a new one

        Raises `StoreBusy`, `StoreExists`, and what the methods raise that it calls. After an error, the lock is
        released."""
        self.place.take()
        try:
            dataset,earlier = self.found(overwrite)
            self.check_dataset(dataset, overwrite)
            plan = self.checked_plan(plan() if callable(plan) else plan)
            if earlier and earlier['signature']!=plan['signature']:
                if not overwrite: raise self.other_ingest()
                self.abandon()
                earlier = None
            self.plan = self.place.resumed(earlier) if earlier else self.place.begin(plan)
        except BaseException:
            with suppress(StoreError): self.close()   # the lock ends by itself; the error counts
            raise
        return self.plan

    def other_ingest(self)->StoreExists:
        "The error if there is an unfinished ingest of something else"
        how = 'overwrite=True' if self.change is None else self.place.how_to_abandon
        return StoreExists(f'{self.url}: {self.name!r} has an unfinished ingest from another source or fn, or with '
                           'other values of variables that fn uses, other splits, seed, vocab or sizes of shards; '
                           f'repeat that one to finish it, or {how} drops it')

    def found(self,
        overwrite:bool=False # Do a damaged manifest and a damaged plan count as none, where they can be replaced?
    )->tuple: # The manifest of the dataset that is there, and the plan of an ingest; either may be `None`
        "Removes what nobody needs, and returns what is there; the lock must be held"
        place = self.place
        place.check()
        place.clean_up()
        dataset = place.committed(overwrite)
        try: return dataset,place.plan()
        except CorruptSample:
            if not overwrite: raise
            place.drop_plan()
            place.check()   # nobody knows whether files that stay are those of the ingest that was dropped
            return dataset,None

    def check_dataset(self,
        dataset:Manifest, # Of the dataset that is there, or `None`
        overwrite:bool # As in `begin`
    ):
        """Raises `StoreExists` if there is a dataset and `overwrite` is false

        A writer of a new version raises `StoreNotFound` if it is not the version that is to be changed."""
        if self.change is not None:
            if dataset is None or dataset.uid!=self.base.manifest.uid:
                raise self.base.replaced_error(dataset is not None)
        elif dataset and not overwrite:
            raise StoreExists(f'{self.url}: {self.name!r} is there already ({dataset.n:,} samples, {dataset.created}); '
                              'overwrite=True replaces it')

    def checked_plan(self,
        plan:Plan # As `begin` got it
    )->Plan:
        """Returns the plan to be stored; by default `plan` itself

        A writer of a new version returns a changed copy, and raises `ValueError` or `StoreExists` if it does not fit
        the dataset."""
        if self.change is None: return plan
        self.change.check(self.base, plan)
        return {**plan, 'stats':self.change.stats_field(self.base, plan),
                'signature':f"{self.base.manifest.uid} {plan['signature']}"}

    def put(self,
        numbers:np.ndarray, # Sample numbers, ascending, shape (n,)
        columns:dict, # `{field: list of bytes or labels, or array}`, each of length n
    ):
        """Writes samples; it is safe to repeat the call

        `columns` also has a column `FIELD.crc` of checksums for each field of bytes, and `__key__` if `takes_keys`."""
        raise NotImplementedError

    def done(self,
        chunk:int, # Number of the chunk
        # `ok` and `failed` (counts of samples), `bytes`, `gaps` (a list of ranges `[start, stop]` of numbers without a
        # sample), and if there are any `counts` (`{field: list of [label or code, number of samples]}` of the codecs
        # `cls` and `labels`), `stats` (text from `ImageStats`)
        record:dict,
        failures:list=(), # `(sample, reason)` of each sample that failed, both `str`
        run:str=None, # What `server_run` returned when the chunk began
    ):
        """Records that a chunk is written; raises `ServerRestarted` if the server may have lost part of it

        The first record of a chunk counts: if there is one already, nothing changes."""
        raise NotImplementedError

    def records(self):
        "Returns an iterator of `(chunk, record)` for the chunks that are done, in any order; see `done`"
        raise NotImplementedError

    def failures(self):
        "Returns an iterator of `(sample, reason)`, both `str`, for the samples that could not be converted"
        raise NotImplementedError

    def totals(self,
        *others # Functions that get each record, too
    )->Totals:
        "Adds up the records, in the order of the chunks; raises `ChunksLost` if chunks have none"
        totals = Totals(self.plan)
        for _,record in self.records():
            for add in (totals.add, *others): add(record)
        missing = chunk_count(self.plan)-totals.chunks
        if not missing: return totals
        raise ChunksLost(f'{self.url}: {missing:,} chunks of {self.name!r} are not written, or lost; repeat the same '
                         'call to go on')

    def commit(self):
        "Encodes labels, and makes the dataset visible in one step; returns its `Manifest`"
        raise NotImplementedError

    def new_version(self)->NewVersion:
        "The next version of `base`, still without any change"
        raise NotImplementedError

    def publish(self,
        parts:list, # Of `NewPart`: what was written
        tables:dict, # As in `Place.publish`
        run:str=None # As in `Place.publish`
    )->Manifest: # Of the new version
        """Makes the dataset that was written visible, or the version that `change` makes of `base`

        What is not needed any more is removed. The lock has been held since `check_dataset` found that `base` is the
        version that is there. Raises what `Place.publish` raises."""
        if self.change is None: return self.place.publish(parts[0].manifest, tables, run)
        version = self.new_version()
        self.change.apply(version, parts)
        manifest,more = version.finish()
        return self.place.publish(manifest, {**tables, **more}, run, version)

    def write_part(self,
        new:NewValues, # What to write
        run:str # As in `Place.publish`
    )->NewPart:
        "Writes the new values of one field as a part, for the function `revise`"
        raise NotImplementedError

    def abandon(self):
        "Removes everything that an unfinished ingest has written; the lock must be held. May raise `StoreBusy`"
        self.place.drop_plan()
        self.plan = None

    def close(self):
        "Releases the lock; may raise a `StoreError`, after which the lock ends by itself"
        self.place.close()

    def opener(self):
        "Returns a callable that can be pickled; called in a worker, it returns a writer of the same ingest"
        raise NotImplementedError

    # The methods below have defaults

    def extend(self,
        n:int, # Samples with numbers below `n` may be written from now on
        **changes # Further entries of the plan to replace
    ):
        "Changes the plan of a stream, whose length was not known when it began"
        self.plan = {**self.plan, 'n':n, **changes}
        self.place.store_plan(self.plan)

    def server_run(self)->str:
        """Returns an ID of the current run of the server; if it changes, samples that were not saved may be lost

        By default '', where no server can lose samples."""
        return ''

    def chunk_size(self,
        n:int, # Samples in the source
        each:float, # Bytes per sample, estimated by `cost`
        num_workers:int, # Processes that will write
    )->int:
        "Returns how many samples a chunk should have; by default 16 to 1024, whatever their size"
        return max(16, min(1024, n//(num_workers*8)))

    def stream_chunk_size(self,
        source # A `StreamedSource`
    )->int:
        """Returns how many samples a chunk of a stream should have; by default `source.chunk_size`, or 64 without it

        A subclass may also look at `source.raw_bytes`, which tells how large they are."""
        return source.chunk_size or 64

    def cost(self,
        sample:dict # `{field: encoded value}`
    )->int:
        "Returns the bytes that an encoded sample takes, for `chunk_size`; by default 0"
        return 0

    def space(self,
        numbers, # Sample numbers that are written
    )->tuple: # Bytes per sample, free bytes, total bytes; the last two are `None` if they are not known
        """Returns how much space a sample takes, measured on the samples `numbers`, and how much is left

        By default `0, None, None`: not known."""
        return 0,None,None

    def check_value(self,
        field:str, # Name of a field whose values differ in length
        value:bytes # An encoded value of a sample
    ):
        """Raises `ValueError` if the place cannot hold `value`, so that its sample fails; the message names the limit

        By default, no value is refused."""

# --- New versions

# A change for which no source has to be read needs no plan. It is not continued after a kill: the same call begins
# anew, and removes what was written.

def revise(
    writer:Writer, # With a `change`
    values=() # `NewValues` of each field that it changes
):
    """Makes the new version of a change for which no source has to be read; takes and releases the lock

    Raises `StoreBusy`, `StoreNotFound` if `writer.base` is not the version that is there, and `StoreExists` if there is
    an unfinished ingest, or as `Place.check`."""
    writer.base.check_version(is_missing=True)   # where there is no dataset any more, no lock is made either
    with writer.place.locked():
        dataset,plan = writer.found()
        writer.check_dataset(dataset, False)
        if plan: raise writer.other_ingest()
        run = writer.server_run()
        try: writer.publish([writer.write_part(new, run) for new in values], {}, run)
        except Exception:
            with suppress(StoreError): writer.place.clean_up()   # else the next one who comes removes it
            raise

def drop_before(
    writer:Writer # With a `base`
):
    "Removes what only the version before `base` uses; its open stores raise `StoreNotFound` then. Raises as `revise`"
    writer.base.check_version(is_missing=True)
    with writer.place.locked():
        writer.check_dataset(writer.place.committed(), False)
        writer.place.clean_up(keep_before=False)

# --- MemoryWriter

# The reference implementation. Like the other writers, it has a lock, chunks, samples that are numbered without gaps,
# and labels that become codes. It works in one process only.

def finish_samples(
    totals:Totals, # Of all records
    samples:dict, # `{number: {field: value}}` of the samples that were written, as `put` got them
    name:str # Name of the dataset
)->tuple: # `{field: list of bytes, or array}` without checksums; the `Manifest`
    "Closes the gaps of a dataset in memory, and replaces labels by codes; returns columns and the manifest"
    manifest,columns = totals.describe(Manifest(name, 0, {})),{}
    places = totals.gaps().places(np.arange(manifest.n)).tolist()
    for field,spec in manifest.fields.items():
        if spec['codec']=='crc': continue
        values = [samples[place][field] for place in places]
        if totals.plan['fields'][field].get('staged') and field in manifest.vocab:
            codes = {label:code for code,label in enumerate(manifest.vocab[field])}
            values = [codes[label] for label in values]
        columns[field] = values if spec['dtype'] is None else np.array(values, spec['dtype'])
    return columns,manifest

class MemoryPlace(Place):
    "The memory of this process"
    def __init__(self,
        name:str='memory' # Name of the dataset
    ):
        self.name,self.url = check_name(name),f'memory:{name}'
        self.lock,self.store,self.ingest = threading.Lock(),None,None

    def take(self):
        if not self.lock.acquire(blocking=False): raise StoreBusy(f'{self.url}: another ingest is writing here now')

    def close(self):
        if self.lock.locked(): self.lock.release()

    def committed(self, accept_damage=False): return None if self.store is None else self.store.manifest
    def plan(self): return self.ingest
    def begin(self, plan):
        self.ingest,self.samples,self.chunks,self.failed = plan,{},{},{}
        return plan

    def store_plan(self, plan): self.ingest = plan
    def drop_plan(self): self.ingest = None
    def publish(self, manifest, tables, run=None, version=None):
        self.store,self.ingest = tables['store'],None
        return manifest

class MemoryWriter(Writer):
    """The reference implementation: writes a dataset into memory, in one process

    After `commit`, `store` is the dataset, a `MemoryReader`; before, it is `None`, or the dataset that was there."""
    def __init__(self,
        name:str='memory' # Name of the dataset
    ):
        self.place = MemoryPlace(name)

    @property
    def store(self)->MemoryReader: return self.place.store

    def put(self, numbers, columns):
        columns = {field:v if isinstance(v, list) else v.tolist() for field,v in columns.items()}
        for k,number in enumerate(np.asarray(numbers).tolist()):
            self.place.samples[number] = {field:values[k] for field,values in columns.items()}

    def done(self, chunk, record, failures=(), run=None):
        if chunk in self.place.chunks: return
        self.place.chunks[chunk],self.place.failed[chunk] = record,list(failures)

    def records(self): return iter(sorted(self.place.chunks.items()))
    def failures(self):
        failed = self.place.failed
        return (failure for chunk in sorted(failed) for failure in failed[chunk])

    def opener(self): return lambda: self

    def commit(self):
        columns,manifest = finish_samples(self.totals(), self.place.samples, self.name)
        codecs,failures = {field:spec['codec'] for field,spec in manifest.fields.items()},list(self.failures())
        store = MemoryReader(columns, self.name, manifest.vocab, manifest.splits, codecs, failures)
        store.manifest.failed,store.manifest.counts = manifest.failed,manifest.counts
        return self.publish([NewPart(store.manifest)], {'store':store})
