"""What a dataset in Redis consists of besides its samples: lock, plan, manifest, and the register of its keys

Docs: page `write/redis_place`"""

import json, os, re, threading, uuid, warnings
from contextlib import nullcontext
from datetime import datetime, timezone
from itertools import chain

import numpy as np
import redis

from ..clock import monotonic, wait
from ..core import (
    CorruptSample, Manifest, NewerFormat, packed_crcs, parse_json, seal, StoreBusy, StoreError, StoreExists,
    StoreNotFound, StoreUnavailable, unseal, UnsupportedFormat)
from ..store.redis import find_manifest, home_of, NAMES_KEY, USED_KEY
from ..store.redis_link import RedisLink
from ..store.redis_parts import element_dtype, KEY_BITS, key_layout, parts_of
from .base import check_name, chunk_count, held_locks, host_id, is_alive, LEASE_SECONDS, Place, ServerRestarted

# --- What an ingest keeps in Redis
#
# An unfinished ingest must be able to continue after a kill, from any machine. So everything that is known about it is
# kept in the server, next to the values that are written already. `ID` is the `id` of its plan:
#
# | key | holds |
# |---|---|
# | `NAME:ingest` | the plan: signature, number of samples, chunk size, fields, splits, prefix of the keys |
# | `NAME:ingest:lock` | who is writing. The lock has a lease of 30 s that is renewed, and every write checks it |
# | `NAME:ingest:ID:record:CHUNK` | the record of a chunk that is done: counts, gaps, labels, statistics of images |
# | `NAME:~failures#0` | the samples that could not be converted, and why. This key stays with the dataset |
# | `NAME:register` | ranges of keys by what needs them, so that they can be removed when nothing does |
# | `fastai_remote:ingests` | the names of all unfinished ingests |
# | `fastai_remote:used` | the names under which something was ever written |
#
# All of it has checksums: JSON has the crc32 of its content under `crc`. A chunk whose record is damaged is written
# again. A damaged plan or value stops the commit, and the message says what to do.
#
# First come the names of these keys, and how their contents become bytes and are read back. Nothing in this part talks
# to a server.

# --- Names of keys

# The first dataset of a name has keys that begin with `NAME:`. Whatever is written under this name later has keys that
# begin with `NAME@ID:`, where `ID` is that of its ingest, so that no key is ever used for two things. (Decision note
# 0041.) The names above are the same for all of them, because only one ingest of a name runs at a time.

INGESTS_KEY = 'fastai_remote:ingests'

class IngestKeys:
    "The names of the keys that hold the state of an ingest"
    def __init__(self,
        name:str, # Name of the dataset
        tags:int=0 # Hash tags of its layout; 0 on a single server
    ):
        name = home_of(name, tags)
        self.manifest = f'{name}:meta' # JSON; a dataset is visible if it is there
        self.register = f'{name}:register' # Hash: `{ID: ranges of keys, as `value_keys` returns them, sealed}`
        self.plan = f'{name}:ingest' # JSON
        self.lock = f'{self.plan}:lock' # JSON: the process that leads; it expires

    def record(self,
        plan:dict, # The plan
        chunk:int # Number of a chunk
    )->str:
        "The key of the record of a chunk, which is there when the chunk is written"
        return f"{self.plan}:{plan['id']}:record:{chunk}"

# Keys are deleted by name and never searched for, because `KEYS` and `SCAN` would block or slow down a server with
# fifty million keys. A list of ranges is enough to name them all: each range is what precedes the number, and a range
# of numbers; in a cluster there is a range for each hash tag. Staged labels, which the commit replaces by codes, have
# keys of their own, with `~` after the name of the field.

def value_keys(
    layout, # `key_layout` of what is written
    fields:dict, # `fields` of a plan or manifest
    n:int, # Number of places
)->list: # Of `[start of the key, first, stop, step]`: the keys end with the numbers of this range
    "Returns the ranges of all keys with values of `fields`; the first two are the keys of failures and of gaps"
    ranges,step = [[key[:-1], 0, 1, 1] for key in (layout.failures, layout.gaps)],len(layout.starts)
    for field,spec in fields.items():
        if spec['dtype'] is None:
            ranges += [[f'{start}:{field}:', k, n, step] for k,start in enumerate(layout.starts)]
        else:
            starts = [layout.packed(field, chunk).removesuffix(str(chunk)) for chunk in range(1+(n>>KEY_BITS))]
            ranges += [[start, chunk, chunk+1, 1] for chunk,start in enumerate(starts)]
    return ranges

def _state_keys(keys, layout, plan):
    """Returns the ranges of all keys that only an ingest needs, records and staged labels, as `value_keys`

    `keys` are the `IngestKeys` of the dataset, and `layout` is the `key_layout` of what is written."""
    staged = {f'{field}~':spec for field,spec in plan['fields'].items() if spec.get('staged')}
    return [[keys.record(plan, 0)[:-1], 0, chunk_count(plan), 1], *value_keys(layout, staged, plan['n'])[2:]]

# --- Packed values

# The layout of fixed-width values is that of `store.redis_layout`: 2²⁴ values in one key, each followed by its
# checksum. `packed_reads` there reads them; `packed_writes` writes them. Consecutive numbers in the same key become one
# `SETRANGE`.

def _with_checks(fields):
    """Returns a copy of the `fields` of a plan, with `check` in the entry of each fixed-width field: a checksum follows
    each value

    A field `FIELD.crc`, which has the checksums of `FIELD`, gets none."""
    checksums = {f'{field}.crc' for field in fields}
    return {field:spec if spec['dtype'] is None or field in checksums else {**spec, 'check':'u4'}
            for field,spec in fields.items()}

def packed_writes(
    layout, # `key_layout` of what is written
    field:str, # A fixed-width field; with `~` for its staged values
    dtype, # numpy dtype of the stored values
    numbers:np.ndarray, # Sample numbers, ascending, shape (n,), not empty
    values, # Array or list, shape (n,)
    check:str=None, # Does a checksum follow each value? As `check` in the plan
)->list: # Of commands: `('SETRANGE', key, offset, bytes)`
    "Returns the commands that write `values` into packed keys"
    dtype = np.dtype(dtype)
    values = np.asarray(values, dtype)
    if check:
        elements = np.empty(len(numbers), element_dtype(dtype))
        elements['value'] = values
        elements['crc'] = packed_crcs(values, np.asarray(numbers, np.int64))
    else: elements = values.astype(dtype.newbyteorder('>'))
    commands,key_of = [],numbers>>KEY_BITS
    is_break = (np.diff(numbers)!=1)|(key_of[1:]!=key_of[:-1])
    for run in np.split(np.arange(len(numbers)), np.flatnonzero(is_break)+1):   # of consecutive numbers, in one key
        start = int(numbers[run[0]])
        offset = (start&((1<<KEY_BITS)-1))*elements.itemsize
        commands.append(('SETRANGE', layout.packed(field, start>>KEY_BITS), offset, elements[run].tobytes()))
    return commands

# --- Checksums of the state

def parse_record(
    chunk:int, # Number of the chunk
    stored:bytes # JSON, sealed
)->dict: # `None` if it is damaged, or belongs to another chunk
    "Returns the record of a chunk"
    try: record = unseal(stored)
    except ValueError: return None
    return record if record.get('chunk')==chunk else None

def parse_lock(
    token:bytes # What the lock holds
)->dict: # `host`, `pid`, `id`; `host` and `pid` are 'unknown' if it is damaged
    "Returns who holds a lock"
    unknown = {'host':'unknown', 'pid':'unknown'}
    try: holder = {**unknown, **parse_json(token)}
    except (ValueError,TypeError): return unknown
    is_whole = isinstance(holder['host'], str) and holder['host'].strip() and type(holder['pid']) is int
    return holder if is_whole else {**holder, **unknown}

# --- The lock
#
# Only the process that holds the lock leads an ingest, and on a single server every write of a worker checks in the
# same transaction that the lock still holds the leader's token. So a worker that outlived its ingest cannot write into
# a later one. A lock is taken over if its owner is dead on this machine, or if its lease of 30 s has run out.

def _is_held(token, pid):
    "Returns whether process `pid` of this machine holds `token`: if it is another one than this, whether it is alive"
    return token in held_locks if pid==os.getpid() else is_alive(pid)

class RedisLock(Place):
    "The right to write a dataset; the process that holds it leads, and its workers write under copies of this object"
    def __init__(self,
        link:RedisLink, # The server
        name:str, # Name of the dataset
        token:bytes=None, # What the lock holds while it is this one's; default: `take` chooses it
        tags:int=None # Hash tags of a new layout, 0 on a single server; default: `take` finds out
    ):
        self.link,self.name,self.url = link,check_name(name),link.url
        self.token,self.tags = token,tags
        self.keys = IngestKeys(name, tags or 0)
        self.manifest_key = None # Where a dataset that was opened has its manifest

    def take(self):
        "Takes the lock, and renews its lease in a thread until `close`; sets `token` and `tags`; raises `StoreBusy`"
        self.link.find_cluster()
        masters = self.link.call(lambda _: len(self.link.servers.masters())) if self.link.is_cluster else 0
        self.tags = masters and masters*max(2, -(-12//masters))   # in a cluster a multiple of the masters, at least 12
        self.keys = IngestKeys(self.name, self.tags)
        self.token = json.dumps({'host':host_id(), 'pid':os.getpid(), 'id':uuid.uuid4().hex}).encode()
        held_locks.add(self.token)
        try: self._acquire()
        except BaseException:   # if the server has the token after all, the next one who comes removes it
            held_locks.discard(self.token)
            raise
        self.stop = threading.Event()
        threading.Thread(target=self._renew, args=(self.stop,), daemon=True).start()

    def _acquire(self):
        """Stores the token in the lock; raises `StoreBusy` if it is held, also if another writer of this process has it

        A lock that was left by a process of this machine that has ended is replaced."""
        key = self.keys.lock
        for _ in range(3):
            _,token = self.link.send([('SET', key, self.token, 'NX', 'EX', LEASE_SECONDS), ('GET', key)])
            if token==self.token: break
            if token is None: continue   # just released
            holder = parse_lock(token)   # a damaged one is waited for, until its lease ends
            if holder['host']!=host_id() or _is_held(token, holder['pid']): raise self._busy(holder)
            self._transaction_if(token, [('DEL', key)])
        else: raise StoreBusy(f'{self.url}: the lock on {self.name!r} keeps changing hands; try again')

    def _busy(self, holder):
        return StoreBusy(f"{self.url}: process {holder['pid']} on {holder['host'].split()[0]} is writing "
                         f"{self.name!r} now{self.progress()}; if it is dead, its lease ends within {LEASE_SECONDS} s")

    def _renew(self, stop):
        "Runs in a thread: renews the lease regularly until the event `stop` is set"
        key = self.keys.lock
        while not wait(stop, LEASE_SECONDS/3):
            try: self._transaction_if(self.token, [('EXPIRE', key, LEASE_SECONDS)])
            except Exception: pass   # the next turn tries again; writes notice a lock that is lost

    def close(self):
        """Releases the lock if it is still this one's

        Does not wait long for a server that is away. Raises `StoreUnavailable` then; the lease will end by itself."""
        self.stop.set()
        held_locks.discard(self.token)
        self._transaction_if(self.token, [('DEL', self.keys.lock)], timeout=min(self.link.timeout, 5.))

    def server_run(self)->str:
        "Returns the server's `run_id`, which changes when it restarts; in a cluster, those of all masters, with commas"
        return ','.join(server.get('run_id', '') for server in self.link.info('server'))

    def lost(self)->StoreBusy:
        "Returns the error for a write without the lock"
        return StoreBusy(f'{self.name}: the lock was lost (this process slept, another took over, or the server forgot '
                         'it); repeat the same call to finish')

    # --- Transactions

    # A transaction reads keys, and then the server runs commands only if these keys have not changed meanwhile.

    def _transaction_if(self, token, commands, run=None, reads=(), when=None, timeout=None):
        """Does what `transaction` does, only if the lock holds `token`; returns whether it does

        In a cluster, the sets of names are left to `transaction`. `timeout` is as in `RedisLink.call`."""
        restarted = ServerRestarted(f'{self.url}: the server restarted while {self.name!r} was written; '
                                'repeat the same call to go on')
        if run is not None and self.tags and self.server_run()!=run: raise restarted
        asked = [('GET', self.keys.lock), ('INFO', 'server')] if run is not None else [('GET', self.keys.lock)]
        def choose(held, *replies):
            if held!=token: return None
            if run is not None:
                server,*replies = replies
                run_id = re.search(rb'^run_id:(\w*)', server, re.M)
                if not run_id or run_id[1].decode() not in run.split(','): raise restarted
            return commands if when is None or when(*replies) else []
        watch = [self.keys.lock, *(key for _,key in reads)]
        return self.link.transact(watch, [*asked, *reads], choose, timeout)

    def transaction(self,
        commands:list, # Tuples: the name of a command, its key, and further arguments; none: only checks the lock
        run:str=None, # The `server_run` that must still be the current one; default: any
        add=(), # Keys of sets of names that hold the name of the dataset afterwards
        discard=(), # Keys of sets of names that do not hold it afterwards
        reads=(), # Commands `(name, key)` for the same server; it reads again if others change these keys meanwhile
        when=None # `when(*replies to reads)`: returns whether to run the commands; default: always
    ):
        """Runs commands in one transaction while the lock is held

        Raises `StoreBusy` if it is not, and `ServerRestarted` if `run` has ended.

        In a cluster, the sets of names are on other nodes: the name is added before, and discarded after the
        transaction."""
        added,discarded = [('SADD', key, self.name) for key in add],[('SREM', key, self.name) for key in discard]
        if self.tags: self.link.send(added)
        else: commands = [*commands, *added, *discarded]
        if not self._transaction_if(self.token, commands, run, reads, when): raise self.lost()
        if self.tags: self.link.send(discarded)

    # --- Writes

    # In a cluster, a transaction can only check a key of the slot that it writes to. So it checks the lock only for
    # what describes the ingest: records, plan, and manifest. A value needs no check, since a number is a place in one
    # plan: whoever writes it late writes the same sample. (Decision note 0038.)

    def write(self,
        commands:list, # Tuples: the name of a command, its key, and further arguments
        run:str=None # As in `transaction`
    ):
        """Runs commands while the lock is held; raises as `transaction`

        On a single server this is one transaction. In a cluster, only commands for the keys that describe the ingest
        are one, after all others: values of nobody else have these keys, and whoever is late writes the same samples
        there."""
        home,others,start = [],[],home_of(self.name, self.tags) if self.tags else ''
        for command in commands: (home if command[1].startswith(start) else others).append(command)
        self.link.send(others)
        if home: self.transaction(home, run)

# --- The place
#
# A dataset appears when its manifest is stored, and disappears when the manifest is removed or replaced. So nothing but
# the manifest and the plan says which keys are needed. Whatever writes keys names them first in the *register*, under
# the ID of what needs them: the prefix of a part, the `uid` of a version, or the `id` of a plan. Cleaning up is one
# rule: keys whose ID neither the manifest nor the plan has are removed, and then their entry. Overwriting, deleting,
# abandoning, dropping fields and editing all end with it, and so does the next call after a kill. (Decision note 0041.)

# --- Plan and manifest

RENAMED = 'renamed' # An entry of the register in a cluster, while a dataset has two names

class RedisPlace(RedisLock):
    "Where a dataset in Redis appears, and where an ingest keeps what it must remember"
    @property
    def how_to_abandon(self)->str: return f'RedisStore.abandon(url, {self.name!r})'

    def count_done(self, plan):
        keys = [self.keys.record(plan, chunk) for chunk in range(chunk_count(plan))]
        return sum(self.link.send([('EXISTS', *keys[k:k+1000]) for k in range(0, len(keys), 1000)]))

    def plan(self):
        stored = self.link.call(lambda c: c.get(self.keys.plan))
        if not stored: return None
        try: return unseal(stored)
        except ValueError as e:
            raise CorruptSample(f'{self.url}: the plan of an unfinished ingest of {self.name!r}, {self.keys.plan}, '
                                f'({self.how_to_abandon} drops it) {e}: it is damaged') from None

    def committed(self,
        accept_damage:bool=False, # Is a damaged manifest as good as none?
        may_be_moved:bool=False # On a single server, look under the key that it has in a cluster, too?
    )->Manifest:
        """Returns the manifest of the dataset, or `None`; raises `CorruptSample`, `UnsupportedFormat`

        One of a newer format, and something else under a name that is not in the list of datasets, are errors also
        with `accept_damage`."""
        key,stored = find_manifest(self.link, self.name, may_be_moved or bool(self.tags))
        if stored is None: return None
        try: return Manifest.from_json(stored, f'{self.url}, {self.name}')
        except CorruptSample:
            if not accept_damage: raise
        except NewerFormat: raise
        except UnsupportedFormat as error:
            is_listed = self.link.call(lambda c: c.sismember(NAMES_KEY, self.name))
            if not is_listed:
                raise UnsupportedFormat(f'{error}; if another program wrote it, choose another name; else delete the '
                                        f'key {key}') from None
            if not accept_damage:
                raise UnsupportedFormat(f'{error}; it is damaged: overwrite=True replaces this dataset, and '
                                        f'RedisStore.delete(url, {self.name!r}) drops it') from None

    # Before a name is written, two things are looked for that would lose samples later.

    def check(self):
        "Raises `StoreError` if the server may drop keys, and `StoreExists` if the dataset was moved, as `check_home`"
        for memory in self.link.info('memory'):
            policy = memory.get('maxmemory_policy', '')
            if not memory.get('maxmemory') or not policy.startswith('allkeys'): continue
            raise StoreError(f'{self.url}: the server drops keys when it is full (maxmemory-policy {policy}): '
                         'set noeviction before an ingest')
        self.check_home()

    def check_home(self):
        """Raises `StoreExists` if the dataset was moved from a single server to a cluster, or the other way round

        This place would have the manifest under another key, and the earlier one would stay. On a single server, whose
        users need no rights to the key that it has in a cluster, that is looked for if the name is listed."""
        key = self.manifest_key
        if key is None:
            may_be_moved = self.tags or self.link.call(lambda c: c.sismember(NAMES_KEY, self.name))
            key,_ = find_manifest(self.link, self.name) if may_be_moved else (None,None)
        if key in (None, self.keys.manifest): return
        origin,here = ('a single server','a cluster') if self.tags else ('a cluster','a single server')
        raise StoreExists(f'{self.url}: {self.name!r} was moved from {origin} to {here} (its manifest is {key}), where '
                      'it can be read, but not changed, replaced or renamed: RedisStore(url, '
                      f"{self.name!r}).copy(url, 'another name') makes a dataset that can, and "
                      f'RedisStore.delete(url, {self.name!r}) removes it')

    # --- The register

    # A plan and what it is going to write are stored in one transaction. The first dataset of a name has keys without
    # an ID, so that sample 7 is under `NAME:FIELD:7`. That a name was used is noted in the same transaction, and never
    # forgotten.

    def begin(self,
        plan:dict # As `Writer.begin` got it
    )->dict: # A copy with `id`, `prefix`, `tags` and `began`, and with checksums for fixed-width values
        "Stores the plan of a new ingest, and registers what it writes; raises `StoreBusy`"
        ingest,is_used = uuid.uuid4().hex[:16],self.link.call(lambda c: c.sismember(USED_KEY, self.name))
        plan = {**plan, 'fields':_with_checks(plan['fields']), 'id':ingest, 'tags':self.tags,
                'prefix':f'{self.name}@{ingest}' if is_used else self.name,
                'began':datetime.now(timezone.utc).isoformat(timespec='seconds')}
        self.store_plan(plan, add=[INGESTS_KEY,USED_KEY])
        return plan

    def new_part(self,
        fields:dict, # `{field: {'codec', 'dtype'}}`
        n:int # Number of samples
    )->dict: # `n`; `prefix` and `tags` of its keys; `fields`, with checksums for fixed-width values
        "Registers the keys of a part before it is written, without a plan; raises `StoreBusy`"
        part = dict(n=n, prefix=f'{self.name}@{uuid.uuid4().hex[:16]}', tags=self.tags, fields=_with_checks(fields))
        keys = value_keys(key_layout(part['prefix'], part['tags']), part['fields'], n)
        self.transaction([_register(self.keys, {part['prefix']:keys})])
        return part

    def store_plan(self,
        plan:dict, # The plan of the ingest
        add=() # As in `RedisLock.transaction`
    ):
        "Stores a plan, and registers the keys of its samples and of its state; raises `StoreBusy`"
        layout = key_layout(plan['prefix'], plan['tags'])
        written = {plan['prefix']:value_keys(layout, plan['fields'], plan['n']),
                   plan['id']:_state_keys(self.keys, layout, plan)}
        self.transaction([('SET', self.keys.plan, seal(plan)), _register(self.keys, written)], add=add)

    def drop_plan(self):
        """Makes an unfinished ingest impossible to continue and to publish, and removes what it wrote; raises
        `StoreBusy`"""
        try: plan = self.plan()
        except CorruptSample: plan = None
        self.transaction([('DEL', self.keys.plan)], discard=[INGESTS_KEY])
        self.clean_up(dropped=(plan['id'],plan['prefix']) if plan else ())

    def clean_up(self,
        keep_before:bool=True, # Keep what only the version before uses?
        dropped=(), # IDs that only an ingest needed which was dropped
        step:int=1000 # Keys per command
    )->bool: # Was there anything to remove?
        """Removes what is registered and not needed by the dataset or an unfinished ingest; the lock must be held

        If the manifest or the plan is damaged, nobody knows what they need, and only `dropped` is removed. Raises
        `ServerRestarted` if the server restarts meanwhile: it may have come back with an older state, which may need
        these keys. Raises `StoreBusy`."""
        if self.tags: self.finish_rename()
        run = self.server_run()
        register = self.link.call(lambda c: c.hgetall(self.keys.register))   # before what is needed is read
        if not (register or self.tags): return False
        try: manifest,plan = self.committed(),self.plan()
        except (CorruptSample,UnsupportedFormat): needed = {entry.decode(errors='replace') for entry in register}
        else:
            lists = [key for key,there in ((NAMES_KEY,manifest), (INGESTS_KEY,plan)) if not there]
            # in a cluster, a process that was killed may have left the name in them
            if self.tags and lists: self.transaction([], run, discard=lists)
            needed = _needed_by(manifest, plan, keep_before)
        needed -= set(dropped)
        unneeded = {entry:self._ranges(entry, stored) for entry,stored in register.items()
                    if entry.decode(errors='replace') not in needed}
        unneeded = {entry:ranges for entry,ranges in unneeded.items() if ranges is not None}
        for entry,ranges in unneeded.items():
            for start,first,stop,every in ranges:
                numbers = range(first, stop, every)
                for k in range(0, len(numbers), step):
                    keys = [f'{start}{number}' for number in numbers[k:k+step]]
                    if self.tags: self.transaction([], run)   # as `write` does not check the lock for values there
                    # keys without a hash tag are of a dataset that was written before the cluster was
                    have_tag = not self.tags or start[0]=='{'
                    self.write([('UNLINK', *keys)] if have_tag else [('UNLINK', key) for key in keys], run)
            self.transaction([('HDEL', self.keys.register, entry)], run)
        return bool(unneeded)

    def finish_rename(self):
        """In a cluster, finishes a `rename` that was interrupted while the dataset had both names; the lock must be
        held

        Otherwise, who removes the dataset of one name would remove that of the other. Raises `StoreBusy`."""
        stored = self.link.call(lambda c: c.hgetall(self.keys.register)).get(RENAMED.encode())
        try: names = [unseal(stored)[key] for key in ('old','new')] if stored else []
        except (ValueError,KeyError): return   # `clean_up` warns of it
        if not names: return
        old,new = (self if name==self.name else RedisPlace(self.link, name, tags=self.tags) for name in names)
        uid = unseal(stored)['uid']
        if all(getattr(place.committed(True), 'uid', None)==uid for place in (old,new)):
            with nullcontext() if old is self else old.locked():
                entries = entries_of_dataset(old)
                old.transaction(forget_commands(old.keys, entries), discard=[NAMES_KEY])
        self.transaction([('HDEL', self.keys.register, RENAMED)])

    def _ranges(self, entry, stored):
        """Returns the ranges of keys in an entry of the register, as `value_keys` does; `None`, with a warning, if
        damaged

        They may be the keys of other datasets, or its name may be that of something else."""
        try:
            content = unseal(stored)
            ranges = content['ranges']
            if content['entry'].encode()!=entry: raise ValueError
            for start,*numbers in ranges:
                if not isinstance(start, str) or list(map(type, numbers))!=[int]*3 or numbers[2]<1: raise ValueError
            return ranges
        except (ValueError,KeyError,TypeError,AttributeError):
            warnings.warn(f'{self.url}: {self.keys.register} has a damaged entry {entry[:40]!r}: the keys of '
                          f'{self.name!r} that it names stay where they are', stacklevel=4)

    # --- Publishing and removing

    def publish(self,
        manifest:Manifest, # Of the new version, with a new `uid`
        tables:dict, # `{key: bytes}` to store with it
        run:str=None, # The server that must still run, as in `RedisLock.transaction`
        version=None # As in `Place.publish`
    )->Manifest:
        """Replaces the manifest in one transaction, ends the ingest, and removes the keys that are not needed any more

        Raises `StoreBusy`, and `ServerRestarted` if the server has lost the new version."""
        last = version.store.manifest if version else self.committed(accept_damage=True)
        manifest.generation = 1+(last.generation if last else 0)
        before,dropped = ([*version.before, *_run_tables(last)],version.dropped) if version else ([],[])
        entries = {manifest.uid:_run_tables(manifest), f'{manifest.uid}-before':before,
                   f'{manifest.uid}-dropped':dropped}
        entries = {entry:list(ranges) for entry,ranges in entries.items() if ranges}
        commands = [('SET', key, content) for key,content in tables.items()]
        commands += [('SET', self.keys.manifest, manifest.stamp().to_json()), ('DEL', self.keys.plan)]
        # the keys that the entry of the last version names are among those of `before`
        if before: commands.append(('HDEL', self.keys.register, last.uid))
        if entries: commands.append(_register(self.keys, entries))
        self.transaction(commands, run, add=[NAMES_KEY], discard=[INGESTS_KEY])
        if self.link.is_sentinel: self._wait_for_replicas()
        if getattr(self.committed(), 'uid', None)!=manifest.uid:
            raise ServerRestarted(f'{self.url}: the server restarted and lost the commit of {self.name!r}; '
                              'repeat the same call')
        self.clean_up()
        return manifest

    def _wait_for_replicas(self, seconds=10):
        """With Sentinel, waits until the replicas have what was written, for about `seconds` at most

        It is no error if they do not have it then, or if this user may not wait for them. A master that the sentinels
        have just replaced accepts writes for a moment and forgets them. No replica receives these writes. The master is
        looked up each time, so this ends with the master that stays."""
        deadline = monotonic()+seconds
        while monotonic()<deadline:
            self.link.reconnect()
            expected = self.link.call(lambda _: self.link.servers.count_replicas())
            try: received = self.link.call(lambda c: c.wait(expected, 200)) if expected else 0
            except StoreUnavailable as error:
                if isinstance(error.__cause__, redis.exceptions.NoPermissionError): return   # this user may not wait
                raise
            if received>=expected: return

    def remove(self,
        dataset:bool=True # Remove the dataset too? Else only the unfinished ingest
    ):
        """Removes an unfinished ingest and, with `dataset`, the dataset of this name; takes and releases the lock

        Raises `StoreNotFound` if there is nothing to remove, `StoreBusy`, and what `committed` raises."""
        with self.locked():
            if self.tags: self.finish_rename()
            found = bool(self.link.call(lambda c: c.exists(self.keys.plan)))
            # in a cluster, the name stays listed for a short time after the end of an ingest
            if not self.tags: found |= self.link.call(lambda c: bool(c.sismember(INGESTS_KEY, self.name)))
            if found: self.drop_plan()
            found |= self._remove_manifest() if dataset else False
            found |= self.clean_up()
            if not found:
                what = f'no dataset {self.name!r} to delete' if dataset else f'no unfinished ingest of {self.name!r}'
                raise StoreNotFound(f'{self.url}: {what}')

    def _remove_manifest(self):
        """Removes the manifest of the dataset; returns whether there was one; raises `UnsupportedFormat`, as
        `committed`

        One under a key that is not that of this place, as in `check_home`, has its register elsewhere."""
        key,_ = find_manifest(self.link, self.name)
        if key is None: return False
        manifest,is_here = self.committed(True, may_be_moved=True),key==self.keys.manifest
        moved = [] if is_here or not manifest else [
            span for part in parts_of(manifest) for span in value_keys(part.layout, part.fields, part.n_places)]
        if moved: moved += _run_tables(manifest)
        commands = [('DEL', self.keys.manifest)]
        if moved: commands.append(_register(self.keys, {f'{manifest.uid}-moved':moved}))
        self.transaction(commands, discard=[NAMES_KEY])
        # these are in other slots in a cluster. If this is interrupted, `delete` can be repeated
        elsewhere = [] if is_here else [IngestKeys(self.name, 0 if self.tags else 1).register, key]
        for other in elsewhere: self.link.call(lambda c: c.delete(other))
        return True

def _register(keys, entries):
    "Returns the command that stores `entries`, `{ID: ranges}`, in the register"
    pairs = [(entry, seal({'entry':entry, 'ranges':ranges})) for entry,ranges in entries.items()]
    return ('HSET', keys.register, *chain.from_iterable(pairs))

def _needed_by(manifest, plan, keep_before):
    "A set of the IDs of what a dataset and an unfinished ingest need, each of which may be `None`, as in `clean_up`"
    needed = {plan['prefix'],plan['id']} if plan else set()
    if not manifest: return needed
    needed |= {manifest.uid, *(part.layout.prefix for part in parts_of(manifest))}
    return needed|{f'{manifest.uid}-before'} if keep_before else needed   # as `publish` has registered it

def entries_of_dataset(
    place:RedisPlace # Its lock must be held
)->dict: # `{ID: ranges}`, as stored
    "Returns the entries of the register that no unfinished ingest needs; raises `CorruptSample`"
    needed = _needed_by(None, place.plan(), False)
    register = place.link.call(lambda c: c.hgetall(place.keys.register))
    return {entry:ranges for entry,ranges in register.items() if entry.decode(errors='replace') not in needed}

def forget_commands(
    keys:IngestKeys, # Of the dataset
    entries # Of the register
)->list:
    "Returns the commands that remove the manifest and these entries, which are under another name"
    return [('DEL', keys.manifest), *([('HDEL', keys.register, *entries)] if entries else [])]

def _run_tables(manifest):
    "Returns the range of keys, as `value_keys`, of the tables of runs of a version, in a list; empty if it has none"
    return [[manifest.runs['key'].removesuffix('0'), 0, 1, 1]] if manifest.runs else []
