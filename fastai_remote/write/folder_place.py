"""What a dataset in a folder consists of besides its shards: lock, plan, manifest, and files for other tools

Docs: page `write/folder_place`"""

import fcntl, os, re, threading, uuid, warnings
from contextlib import contextmanager, ExitStack, suppress
from datetime import datetime, timezone

import numpy as np

from ..clock import monotonic, sleep, time, wait
from ..core import (
    CorruptSample, MAX_MANIFEST, parse_json, seal, StoreBusy, StoreError, StoreExists, unseal, UnsupportedFormat)
from ..store.shard_index import (
    ADDED, FAILURES_FILE, INDEX_FOLDER, index_name, INDEX_SUFFIX, LABELS_KIND, pack_labels, ShardIndex, ShardManifest,
    ShardTable, TABLE_FILE)
from ..store.storage import Storage
from .base import check_name, held_locks, host_id, is_alive, LEASE_SECONDS, Place, process_state

# --- Files of a writer
#
# Shards, `labels.json`, `README.md` and `manifest.json` are in the folder of the dataset, and all else is in the folder
# `.fastai_remote` there, where other tools do not look. The files in its subfolder `.ingest` are JSON with a checksum.
# Shards are called `shard-train-000012.tar` after their split and their chunk, or `shard-train-000012-1.tar` if a chunk
# needs several; without a split, `shard-000012.tar`. Those of a dataset that replaces another begin with `shard2`, and
# so on, so that the two never share a file. Shards with values that were added or changed are in `.fastai_remote`, and
# are called `.part-3-0123abcd-000012.tar`, with the generation and random digits, so that no two calls write one file.
# An index is called as its shard, with `.fastai_remote` at the end. `labels.json` has the labels for other tools;
# without splits, `README.md` tells Hugging Face to read the tars.
#
# Other tools may have files of similar names in the folder. So a shard is ours only if it has an index, which is
# written before it.

PLAN_FILE = '.ingest/plan.json'
# Names of our shards; group 1 is the generation. Others may have shards of such names: see `own_shards`
SHARD_FILE = re.compile(r'shard(\d*)-(?:[A-Za-z]\w*-)?\d{6,}(?:-\d+)?\.tar$', re.ASCII)
# Names of our shards in our own folder, with values that were added or changed; group 1 is the generation
_ADDED_FILE = re.compile(r'\.part-(\d+)-[0-9a-f]{8}-[\w-]*\.tar$', re.ASCII)
# Files that a process has not finished, whose names begin like those of our files
PART_FILE = re.compile(r'(?:shard\d*-[\w-]*\.tar|.*\.fastai_remote|(?:shard|index)\d*-failures\.json|'
                       r'manifest\.json|labels\.json|\.runs-\d+|\.part-[\w-]*\.tar)\.\d+\.part$', re.ASCII)
# The files in `.ingest` except the lock, and those of a process that has not finished them
STATE_FILE = re.compile(r'(?:plan|chunk-\d+)\.json(?:\.\d+\.part)?$|lock\.json\.\d+\.part$')
# The records of chunks
RECORD_FILE = re.compile(r'chunk-\d+\.json$')
MAX_STATE = 1<<33 # Bytes of memory that a plan or a record may take: it may list the labels of millions of samples

def record_number(
    name:str # Of a file that matches `RECORD_FILE`
)->int:
    "Returns the number of the chunk that a record is of"
    return int(name.removeprefix('chunk-').removesuffix('.json'))

def generation_of(
    name:str # Of a file
)->int:
    "Returns the generation in the name of a shard, its index, or a list of failures; `None` for other names"
    shard = name.removesuffix(INDEX_SUFFIX)
    found = SHARD_FILE.match(shard) or _ADDED_FILE.match(shard) or FAILURES_FILE.fullmatch(name)
    return int(found[1] or 1) if found else None

def added_prefix(
    generation:int # Of the version that adds or changes values
)->str:
    "How the names of shards with these values begin; no other call, or attempt, has the same"
    return f'{ADDED}{generation}-{uuid.uuid4().hex[:8]}'

def is_added_file(
    name:str # Of a file in our own folder
)->bool:
    "Is it a shard with values that were added or changed, or its index?"
    return bool(_ADDED_FILE.match(name.removesuffix(INDEX_SUFFIX)))

def own_shards(
    names:list, # Of the files in a folder
    hidden:list, # Of the files in our own folder in it
)->list:
    "Returns the names of the shards in a folder that we wrote: each has an index, which is written before it"
    indices = set(hidden)
    return [name for name in names if SHARD_FILE.match(name) and index_name(name) in indices]

def owns_labels(
    storage:Storage, # A folder
    manifest:ShardManifest=None # Of the dataset in it, or `None`
)->bool:
    """Returns whether `labels.json` is there, and we wrote it: its content says so

    If the dataset has such a file, one that is empty or damaged, and so no longer says whose it is, is also ours."""
    try: content = parse_json(storage.read('labels.json', MAX_MANIFEST))
    except FileNotFoundError: return False
    except ValueError: content = None
    if isinstance(content, dict) and content.get('__kind__')==LABELS_KIND: return True
    return not content and bool(manifest and manifest.prefix and manifest.vocab)

CARD_FILE = 'README.md'
# Hugging Face reads the kind of file of which there are most; where there are few tars, that would be JSON
CARD = b'''---
configs:
- config_name: default
  data_files: "*.tar"
---
Tar shards that fastai_remote wrote: `ShardStore(folder)`, WebDataset and `datasets.load_dataset(folder)` read them.
'''

# What Hugging Face takes for splits in the names of files. If there is one of them, it leaves out all other files
KNOWN_SPLITS = {'train','training','validation','valid','val','dev','test','testing','eval','evaluation'}

def needs_card(
    splits:dict # `{name: [start, stop]}` of a dataset
)->bool:
    "Returns whether Hugging Face must be told to read all tars, as one split"
    return not splits or not KNOWN_SPLITS.issuperset(splits)

def owns_card(
    storage:Storage # A folder
)->bool:
    "Returns whether `README.md` is there, as we wrote it"
    return storage.ranges([CARD_FILE], [0], [len(CARD)+1], beyond=True)[0]==CARD

def is_own_file(
    name:str # Of a file in our own folder
)->bool:
    "Is it an index of a shard, a shard of added values, a list of failures, or a table of runs?"
    if name.endswith(INDEX_SUFFIX) or is_added_file(name): return True
    return bool(FAILURES_FILE.fullmatch(name) or TABLE_FILE.fullmatch(name))

def files_of(
    manifest:ShardManifest # Of a dataset of `to_shards`, or of an index of others' shards
)->set:
    "Returns the names of everything that a dataset may need: shards, also of others, and what is in our own folder"
    parts = manifest.part_entries()
    tables = [ShardTable.unpack(part['shards']) for part in parts]
    shards = {name for table in tables for shard in np.flatnonzero(table.idx).tolist()
              for name in (table.name(shard), table.index_name(shard))}
    return shards|{part['failures'] for part in parts}|({manifest.runs['key']} if manifest.runs else set())

# --- The lock
#
# The lock is a file that names its holder: the machine, the process and when that process was started. The holder
# renews the lock by counting up a number in it. No clock is compared with that of another machine. What another process
# does that wants to write here depends on the holder:
#
# | The holder | What happens | After |
# |---|---|---|
# | is dead, and was on this machine | the lock is taken over | at once |
# | runs on this machine | `StoreBusy` | at once |
# | is stopped, or on another machine, and renews the lock | `StoreBusy` | about five seconds |
# | is stopped, or on another machine, and does not renew it | the lock is taken over | `LEASE_SECONDS`, on the clock of
# the process that watches |
#
# A process that was only stopped may go on later. It checks the lock before it publishes a file. On a disk, `flock`
# ensures that nobody takes over between this check and the file. Object stores have no such locks. So a process that
# takes over there gives its shards names that the other one does not use (`shard-000003-1000000.tar`), and removes the
# rest when it commits. One moment remains that nothing protects on an object store: a process that is stopped exactly
# between its last check and the request that writes the manifest, for longer than the lease.

LOCK_FILE = '.ingest/lock.json'

class FolderLock:
    """The right to write a dataset in a folder: a file there that the leading process renews, from `take` to `close`

    If it is not renewed for `LEASE_SECONDS`, or its process has ended, another process may take it; from then on,
    `check` and `publishing` raise `StoreBusy`. The locks of its workers have the same `token`, and only check it."""
    def __init__(self,
        storage:Storage, # The folder
        token:str=None, # ID of the lock; default: `take` chooses it
        url:str=None # What messages call the folder; default: its own URL
    ):
        self.storage,self.token,self.url = storage,token,url or storage.url
        self.stop = threading.Event() # Set by `close`: do not renew the lease any longer
        self.beats = 0 # How many times the lock was written
        self.is_fenced = True # Can no process of an earlier run publish a file any more?
        self.lost = False # Has another process taken the lock?

    @contextmanager
    def exclusive(self,
        create:bool=False # Make the folder `.ingest` if it does not exist?
    ):
        """A context in which no other process takes, renews or releases the lock, or publishes files

        Yields `True`, or `False` if others are not excluded. Between a check of the lock and what depends on it, this
        process may be stopped for a long time. So the folder `.ingest` is locked with `flock`. That is not possible on
        object stores and some file servers, nor if there is no such folder and `create` is false. Raises `StoreBusy` if
        another process keeps it locked for `LEASE_SECONDS`."""
        folder = self.storage.path('.ingest') if self.storage.local else None
        if folder is None:
            yield False
            return
        with ExitStack() as stack:
            yield _lock_folder(folder, stack, self.url, create)

    def take(self,
        progress=None # Called without arguments, for the message: returns how far the holder is, as `progress_text`
    ):
        """Takes the lock, and renews it in a thread until `close`; raises `StoreBusy` if another process has it

        Sets `token` and `is_fenced`. Waits for up to `LEASE_SECONDS` if it cannot know otherwise whether a holder is at
        work."""
        watched = self.holder()
        if watched and self.is_running(watched, LEASE_SECONDS): raise self._busy(watched, progress)
        me = dict(host=host_id(), pid=os.getpid(), start=process_state(os.getpid())[0], id=uuid.uuid4().hex)
        self.token,self.beats,self.lost = me['id'],0,False
        self.stop = threading.Event()
        held_locks.add(self.token)
        def write():
            self.beats += 1
            self.storage.write(LOCK_FILE, seal({**me, 'beat':self.beats, 'time':time()}))
        try:
            self._acquire(me, watched, write, progress)
            threading.Thread(target=self._renew, args=(write, self.stop), daemon=True).start()
        except BaseException:   # the file may be written: while this process lives, it would exclude all others
            self.close()
            raise

    def _acquire(self, me, watched, write, progress):
        """Writes the lock by `write()`; raises `StoreBusy` if another process has written it since `watched` was read

        `watched` is what `holder` returned, `me` has the entries `host`, `pid`, `start` and `id` of the new holder, and
        `progress` is as in `take`. Sets `is_fenced`. If another process has written the lock right after this one, it
        raises `StoreBusy` as well."""
        with self.exclusive(create=True) as is_exclusive:
            earlier = self.holder()
            if earlier not in (None, watched): raise self._busy(earlier, progress)   # it has come in the meantime
            # whoever had the lock may still be about to write a file, unless it is excluded here or dead
            is_here = earlier and earlier['host']==me['host']
            self.is_fenced = not earlier or is_here and (is_exclusive or _is_at_work(earlier) is False)
            write()
        if is_exclusive: return
        sleep(.2)   # a process that came at the same time has written by now; the last one has the lock
        if not self._is_holder():
            raise StoreBusy(f'{self.url}: another process has just begun to write here; try again when it is done')

    def _busy(self, holder, progress):
        return StoreBusy(f"{self.url}: process {holder['pid']} on {holder['host'].split()[0]} is writing here now"
                         f"{progress() if progress else ''}; try again when it is done")

    def is_running(self,
        holder:dict, # As from `holder`
        seconds:float=LEASE_SECONDS/3 # How long to watch the lock, at most
    )->bool:
        """Returns whether the process that has written `holder` is at work

        If that cannot be known here, as of a holder that is on another machine or stopped, the lock is watched: one
        that is not renewed for `seconds`, or is released, counts as not at work. No clock but that of this process is
        used."""
        running,started = _is_at_work(holder),monotonic()
        if running is not None: return running
        while monotonic()-started<seconds:
            sleep(LEASE_SECONDS/60)
            now = self.holder()
            if now!=holder: return now is not None
        return False

    def _renew(self, write, stop):
        """Runs in a thread: renews the lock by `write()` at regular times, until the event `stop` is set

        If the stored lock is another one, or is gone, it sets `lost` and ends. Errors are ignored."""
        while not wait(stop, LEASE_SECONDS/6):
            try:
                with self.exclusive():
                    if stop.is_set(): return   # released, and perhaps taken again
                    if not self._is_holder():
                        self.lost = True
                        return
                    write()
            except Exception: pass   # the next turn tries again

    def holder(self)->dict: # `host`, `pid`, `start` of the process, `id`, `beat` (counts renewals), `time`
        "Returns what the file of the lock says of its holder; `None` if there is no such file, or a damaged one"
        try: return unseal(self.storage.read(LOCK_FILE))
        except (FileNotFoundError,ValueError): return None

    def _is_holder(self): return (self.holder() or {}).get('id')==self.token

    def check(self):
        """Raises `StoreBusy` if the stored lock is gone or is not this one, or if `lost` is set

        A worker that outlived its ingest must not write into another."""
        if self.lost or not self._is_holder():
            raise StoreBusy(f'{self.url}: the lock was lost (this process slept, and another took over); '
                            'repeat the same call to finish')

    @contextmanager
    def publishing(self):
        """A context in which the holder of the lock publishes files; uses `exclusive`, and yields nothing

        Raises `StoreBusy` if the lock was lost: before the block, or in place of an error of the storage in it."""
        with self.exclusive():
            self.check()
            try: yield
            except (OSError,StoreError):   # whoever has taken over has perhaps removed what this process has begun
                self.check()
                raise

    def close(self):
        "Releases the lock; errors of the storage are ignored, since the lease will end"
        self.stop.set()
        held_locks.discard(self.token)
        try:
            with self.exclusive():
                if self._is_holder(): self.storage.remove([LOCK_FILE])
                if self.storage.local: os.rmdir(self.storage.path('.ingest'))
        except (OSError,StoreError): pass   # the folder is not empty, or the storage is away: the lease will end

def _is_at_work(holder):
    """Returns whether the process that has written `holder` is at work; `None` if that cannot be known here

    `holder` is a dict as from `FolderLock.holder`. It cannot be known of a process on another machine, of one that is
    stopped, of one that this user may not see, and of one that has not renewed the lock for `LEASE_SECONDS`: it may
    have released the lock, and not been able to remove its file. Of this process it is always known."""
    if holder['host']!=host_id(): return None
    if holder['pid']==os.getpid(): return holder['id'] in held_locks
    if not is_alive(holder['pid']): return False
    start,state = process_state(holder['pid'])
    if start is None: return None   # this user may not see it
    if start!=holder.get('start') or state in 'ZX': return False   # another process of this number, or it has ended
    is_renewed = 0<=time()-holder['time']<LEASE_SECONDS
    return True if is_renewed and state not in 'Tt' else None

def _lock_folder(folder, stack, url, create):
    """Locks `folder` with `flock` until `stack`, an `ExitStack`, is closed; returns whether that is possible

    It is not if the file system cannot do it, or if the folder cannot be opened. If it does not exist, it is made if
    `create` is true. Waits while another process has it locked, and raises `StoreBusy` after `LEASE_SECONDS`; `url` is
    for the message."""
    started = monotonic()
    while True:
        try:
            if create: os.makedirs(folder, exist_ok=True)
            fd = os.open(folder, os.O_RDONLY|os.O_CLOEXEC)
        except FileNotFoundError:
            if create: continue   # whoever had the lock has removed the folder
            return False
        except OSError: return False   # whoever writes here gets this error, too
        with ExitStack() as closing:
            closing.callback(os.close, fd)
            try: fcntl.flock(fd, fcntl.LOCK_EX|fcntl.LOCK_NB)
            except BlockingIOError:
                if monotonic()-started>LEASE_SECONDS:
                    raise StoreBusy(f'{url}: another process is publishing a file here, and does not go on; is it '
                                    'stopped?') from None
                sleep(.01)
                continue
            except OSError: return False
            # `close` is not enough: a process that was forked meanwhile has the descriptor, too
            closing.callback(fcntl.flock, fd, fcntl.LOCK_UN)
            if not _is_folder(fd, folder): continue
            stack.push(closing.pop_all())
            return True

def _is_folder(fd, folder):
    "Returns whether the descriptor `fd` is that of the folder which is at the path `folder` now"
    try: return os.path.samestat(os.fstat(fd), os.stat(folder))
    except FileNotFoundError: return False

# --- The folder
#
# A dataset appears when its manifest is written, and disappears when the manifest is removed or replaced. So nothing
# but the manifest and the plan says which files are needed, and their names say whose they are:
# `shard2-train-000012.tar` belongs to the second dataset, or version, that was written here. Cleaning up is one rule:
# whatever is ours, and needed neither by the manifest nor by an unfinished ingest, is removed. Overwriting, deleting,
# abandoning and editing all end with it, and so does the next call after a kill. Shards of others are never removed: a
# tar is ours if it has an index in our own folder, and if it is not one that was only indexed.

class FolderPlace(Place):
    "Where a dataset in shards appears, and where an ingest keeps what it must remember"
    def __init__(self,
        storage:Storage, # The folder
        name:str=None, # Name of the dataset; default: that of the folder
        foreign:bool=False # Were the shards written by others, and are they only to be indexed?
    ):
        self.storage,self.foreign = storage,foreign
        # for everything but shards, `labels.json` and manifest; an index of others' shards is written there as a whole
        self.hidden = storage if storage.name==INDEX_FOLDER else storage.subfolder(INDEX_FOLDER)
        self.name,self.url = check_name(name or storage.name),storage.url
        self.lock = FolderLock(self.hidden, url=storage.url)
        self.next_generation = 1 # The first one whose files no process that may still run can write
        self._read = None # While the lock is held: a list with what `committed` has read, if it has

    @property
    def how_to_abandon(self)->str: return f'ShardStore.abandon({self.url!r})'

    def count_done(self, plan): return sum(bool(RECORD_FILE.match(name)) for name in self.hidden.names('.ingest'))
    def take(self):
        _ = self.storage.fs   # so that the error of an address that cannot be opened names this folder
        self.lock.take(self.progress)
        self._read = []   # nobody else changes it until `close`, and all that writes checks the lock

    def close(self):
        "Releases the lock; errors of the storage are ignored"
        self._read = None
        self.lock.close()
        if self.storage.local:
            with suppress(OSError): os.rmdir(self.hidden.path())   # raised if it is not there, or not empty

    def committed(self, accept_damage=False)->ShardManifest:
        if self._read: return self._read[0]
        try:
            content = self.storage.read('manifest.json', MAX_MANIFEST)
            manifest = ShardManifest.from_json(content, f'{self.url}/manifest.json')
        except FileNotFoundError: manifest = None
        except UnsupportedFormat as e:
            raise UnsupportedFormat(f'{e}; if another tool wrote it, choose another folder') from None
        if self._read is not None: self._read.append(manifest)
        return manifest

    def plan(self):
        """Returns the plan of the unfinished ingest, or `None`; raises `CorruptSample` if it is damaged

        That of the dataset which is there does not count: it may not have been removed yet."""
        dataset = self.committed()
        try: plan = unseal(self.hidden.read(PLAN_FILE), MAX_STATE)
        except FileNotFoundError: return None
        except ValueError as e:
            raise CorruptSample(f'{self.url}: the plan of an unfinished ingest, {PLAN_FILE}, is damaged: it {e}; '
                                f'{self.how_to_abandon} drops that ingest, then begin again') from None
        is_finished = dataset and plan['generation']<=dataset.generation
        return plan if plan['signature'] and not is_finished else None   # without a signature, it is being dropped

    def check(self):
        """Raises `StoreExists` if the folder is not one for our shards

        It is none if shards of others are indexed here, if `labels.json` is of another tool, or if there are files with
        names of our shards, but neither a dataset nor an unfinished ingest."""
        if self.foreign: return
        dataset,plan = self.committed(),None
        with suppress(CorruptSample): plan = self.plan()
        is_index = any(prefix=='' for prefix in (dataset and dataset.prefix, plan and plan['prefix']))
        if is_index or 'manifest.json' in self.hidden.names():
            raise StoreExists(f'{self.url}: shards that others wrote are indexed here; choose another folder')
        names = self.storage.names()
        alike = [name for name in names if SHARD_FILE.match(name)]
        if alike and not (dataset or PLAN_FILE.split('/')[1] in self.hidden.names('.ingest')):
            raise StoreExists(f'{self.url}: {alike[0]} is there, and no manifest: shards that others wrote? '
                              'Choose another folder')
        if 'labels.json' in names and not owns_labels(self.storage, dataset):
            raise StoreExists(f'{self.url}: labels.json is there, which another tool wrote: choose another folder')

    def begin(self, plan):
        """Stores a copy of `plan` with `generation`, `prefix` (how its files begin) and `began` (now, UTC); returns it

        The prefix is '' if others wrote the shards, and they are only indexed. Shards of new fields begin with `part`,
        and are in our own folder."""
        dataset = self.committed()
        generation = max(self.next_generation, 1+dataset.generation if dataset else 1)
        if not self.foreign: self._check_names(generation)
        prefix = f"shard{generation if generation>1 else ''}"
        plan = {**plan, 'generation':generation, 'prefix':'' if self.foreign else prefix,
                'began':datetime.now(timezone.utc).isoformat(timespec='seconds')}
        if plan.get('has_fields'): plan['part'] = added_prefix(generation)
        self.store_plan(plan)
        return plan

    def _check_names(self, generation):
        "Raises `StoreExists` if another tool has files with names that shards of `generation` may get"
        names,hidden = self.listed()
        others = set(names)-set(own_shards(names, hidden))
        others = [name for name in others if generation_of(name)==generation and SHARD_FILE.match(name)]
        if others: raise StoreExists(f'{self.url}: {min(others)} is there, which others wrote: choose another folder')

    def store_plan(self, plan):
        with self.lock.publishing(): self.hidden.write(PLAN_FILE, seal(plan))

    def resumed(self, plan):
        """Returns the plan of an earlier run; if others may still write, with one more in `takeovers`

        Perhaps a process of that run was only stopped, and publishes a file later. So the new files get other names,
        where it cannot be prevented, and the changed plan is stored."""
        if self.lock.is_fenced: return plan
        plan = {**plan, 'takeovers':plan.get('takeovers', 0)+1}
        self.store_plan(plan)
        return plan

    # --- Cleaning up

    def listed(self)->tuple:
        "Lists the folder: the names of what is in it, and the paths of the files in our own folder"
        hidden = self.hidden.files()   # before: the index of a shard is written before the shard
        return self.storage.names(),hidden

    def clean_up(self,
        keep_before:bool=True, # Keep what only the version before uses?
        keep=(), # Names of files that stay, too
        drop:bool=False # Remove an unfinished ingest, too?
    )->bool: # Was there an ingest to remove?
        """Removes everything of ours that neither the dataset nor an unfinished ingest needs; the lock must be held

        Shards go before the indices that mark them as ours, and the plan goes last. If it is damaged, nobody knows what
        it needs, and nothing is removed, except with `drop`."""
        names,hidden = self.listed()
        try: plan,shards,files = self.unneeded(names, hidden, keep_before, keep, drop)
        except CorruptSample: return False
        for storage,there in ((self.storage, names), (self.hidden, hidden)):   # also what a process has only begun
            self._remove(storage, [name for name in there if PART_FILE.match(name)])
        self._remove(self.storage, shards)
        self._remove(self.hidden, files)
        if plan: return False
        state = sorted(filter(STATE_FILE.match, self.hidden.names('.ingest')))
        self._remove(self.hidden, [f'.ingest/{name}' for name in state])
        return bool(state)

    def _remove(self, storage, names, step=1000):
        """Removes files while the lock is held; raises `StoreBusy`

        What is needed by somebody who has taken over, nobody else knows: an edit has no plan."""
        for k in range(0, len(names), step):
            with self.lock.publishing(): storage.remove(names[k:k+step])

    def unneeded(self,
        names:list, # As from `listed`
        hidden:list, # As from `listed`
        keep_before:bool=True, # As in `clean_up`
        keep=(), # As in `clean_up`
        drop:bool=False # As in `clean_up`
    )->tuple: # The plan of the unfinished ingest, or `None`; names of shards; names of files in our own folder
        "What neither the dataset nor an unfinished ingest needs; raises `CorruptSample` if nobody knows"
        plan,needed = None if drop else self.plan(),set(keep)
        dataset = self.committed()   # after the plan: without the lock, an ingest may end meanwhile
        if plan and self.foreign: return plan,[],[]   # indices are named as the shards of others
        if dataset: needed |= files_of(dataset)|set(dataset.before if keep_before else ())
        def is_unneeded(name): return name not in needed and not (plan and generation_of(name)==plan['generation'])
        shards = [] if self.foreign else list(filter(is_unneeded, own_shards(names, hidden)))
        own = [name for name in hidden if '/' not in name]   # subfolders have the indices of shards of others
        return plan,shards,[name for name in own if is_own_file(name) and is_unneeded(name)]

    def drop_plan(self):
        dataset = self.committed()
        try: plan = self.plan()
        except CorruptSample: return self._drop_damaged_plan(dataset)
        if not plan: return
        self.foreign = not plan['prefix']
        # a worker of this ingest may still run: it must not know the names of later shards
        self.next_generation = max(self.next_generation, 1+plan['generation'])
        self.store_plan({**plan, 'signature':''})   # nobody can continue or publish it from now on
        if not self.foreign and dataset: self._write_for_others(dataset)   # a commit may have ended before its manifest
        elif not self.foreign: self._remove_for_others()
        self.clean_up()

    def _drop_damaged_plan(self, dataset):
        """Removes the state of an ingest whose plan is damaged, and index files without a shard beside them

        Nobody knows which shards are its own: they stay, with their index files, and this warns of them."""
        known = files_of(dataset) if dataset else ()
        rest = [name for name in own_shards(*self.listed())
                if name not in known and not _is_index_of_others(self.hidden, name)]
        foreign,self.foreign = self.foreign,True
        self.clean_up(keep=map(index_name, rest), drop=True)
        self.foreign,self.next_generation = foreign,1+max(map(generation_of, rest), default=0)
        if rest:
            warnings.warn(f'{self.url}: the plan of the unfinished ingest is damaged, so that nobody knows which files '
                          f'are its own; these stay: {", ".join(rest[:10])}', stacklevel=4)

    def remove_all(self):
        "Removes a dataset, the state of an ingest, its lock, and empty folders"
        self._remove(self.storage, ['manifest.json'])
        self._read = []
        if not self.foreign: self._remove_for_others()
        self.clean_up(drop=True)
        self._remove(self.hidden, [LOCK_FILE])
        self.remove_empty_folders()

    def remove_empty_folders(self):
        """Removes our own folder, folders in it, and the folder of the dataset if they are empty, on a disk of this
        machine"""
        if not self.storage.local: return
        inner = [path for path,_,_ in os.walk(self.hidden.path(), topdown=False)]
        for path in (*inner, self.storage.path()):
            with suppress(OSError): os.rmdir(path)   # raised if it is not there, or not empty

    # --- Publishing

    def publish(self,
        manifest:ShardManifest, # Of the new version; its shards and indices are written
        tables:dict, # `{name: bytes}` to write before
        run:str=None, # Not used: no server can lose files
        version=None # As in `Place.publish`
    )->ShardManifest:
        """Writes the manifest, then removes the files of the ingest and those that are not needed any more

        Sets `uid`, `created` and `before` of `manifest`. Raises `StoreBusy`."""
        manifest.uid,manifest.before = uuid.uuid4().hex,[]
        if version:
            names = files_of(self.committed())-files_of(manifest)
            # added values are only left out if their fields were dropped: they are removed at once
            manifest.before = sorted(name for name in names if not is_added_file(name))
        content = manifest.stamp().to_json()
        with self.lock.publishing():
            if manifest.prefix: self._write_for_others(manifest)
            for name,table in tables.items(): self.hidden.write(name, table)
            self._read = []
            self.storage.write('manifest.json', content)
        with suppress(StoreBusy): self.clean_up()   # who has taken over since removes what nobody needs
        return manifest

    def _write_for_others(self, manifest):
        """Writes `labels.json` and `README.md`, which other tools read

        The latter tells Hugging Face to read the tars, unless there is another one. If it knows the names of all
        splits, those in the names of the shards do that, and our own file is removed; so is `labels.json` without
        labels."""
        content = pack_labels(manifest.vocab)
        if content: self.storage.write('labels.json', content)
        elif owns_labels(self.storage, self.committed()): self.storage.remove(['labels.json'])
        is_there,is_needed = CARD_FILE in self.storage.names(),needs_card(manifest.splits)
        if is_needed and not is_there: self.storage.write(CARD_FILE, CARD)
        elif is_there and not is_needed and owns_card(self.storage): self.storage.remove([CARD_FILE])

    def _remove_for_others(self):
        "Removes `labels.json` and `README.md` if we wrote them"
        own = ('labels.json', owns_labels),(CARD_FILE, owns_card)
        self.storage.remove([name for name,is_own in own if is_own(self.storage)])

def _is_index_of_others(hidden, shard):
    "Returns whether `index_shards` wrote the index of a shard: it has a record; false if the index is damaged"
    try: return bool(ShardIndex(hidden.read(index_name(shard)), shard).record)
    except (FileNotFoundError,StoreError): return False

def remove_link(
    storage:Storage # A folder
):
    "Removes a symbolic link in place of our own folder: what is behind it belongs to somebody else"
    if storage.is_link(INDEX_FOLDER): storage.remove([INDEX_FOLDER])
