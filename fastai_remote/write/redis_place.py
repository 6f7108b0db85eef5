"""What a dataset in Redis consists of besides its samples: lock, plan, manifest, and the register of its keys

Docs: page `write/redis_place`"""

# A dataset appears when its manifest is stored, and disappears when the manifest is removed or replaced. So nothing but
# the manifest and the plan says which keys are needed. Whatever writes keys names them first in the *register*, under
# the ID of what needs them: the prefix of a part, the `uid` of a version, or the `id` of a plan. Cleaning up is one
# rule: keys whose ID neither the manifest nor the plan has are removed, and then their entry. Overwriting, deleting,
# abandoning, dropping fields and editing all end with it, and so does the next call after a kill. (Decision note 0041.)

import uuid, warnings
from contextlib import nullcontext
from datetime import datetime, timezone

import redis

from ..clock import monotonic
from ..core import CorruptSample, Manifest, NewerFormat, seal, StoreError, StoreExists, StoreNotFound
from ..core import StoreUnavailable, unseal, UnsupportedFormat
from ..store.redis import find_manifest, NAMES_KEY, USED_KEY
from ..store.redis_layout import key_layout
from ..store.redis_link import RedisLink
from ..store.redis_parts import parts_of
from .base import check_name, chunk_count, Place, ServerRestarted
from .redis_lock import RedisLock
from .redis_state import IngestKeys, INGESTS_KEY, state_keys, value_keys, with_checks

# --- Lock, plan and manifest

RENAMED = 'renamed' # An entry of the register in a cluster, while a dataset has two names

class RedisPlace(Place):
    "Where a dataset in Redis appears, and where an ingest keeps what it must remember"
    def __init__(self,
        link:RedisLink, # The server
        name:str, # Name of the dataset
        token:bytes=None, # Of the lock, as in `RedisLock`
        tags:int=None # As in `RedisLock`
    ):
        self.link,self.name,self.url = link,check_name(name),link.url
        self.lock = RedisLock(link, name, token, tags)
        self.manifest_key = None # Where a dataset that was opened has its manifest

    @property
    def keys(self)->IngestKeys: return self.lock.keys
    @property
    def how_to_abandon(self)->str: return f'RedisStore.abandon(url, {self.name!r})'

    def take(self): self.lock.take(self.progress)
    def count_done(self, plan):
        keys = [self.keys.record(plan, chunk) for chunk in range(chunk_count(plan))]
        return sum(self.link.send([('EXISTS', *keys[k:k+1000]) for k in range(0, len(keys), 1000)]))

    def close(self): self.lock.close()
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
        key,stored = find_manifest(self.link, self.name, may_be_moved or bool(self.lock.tags))
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
        self._check_eviction()
        self.check_home()

    def _check_eviction(self):
        "Raises `StoreError` if a server may drop keys when it is full: it has a limit, and a policy `allkeys-…`"
        for memory in self.link.memory():
            policy = memory.get('maxmemory_policy', '')
            if not memory.get('maxmemory') or not policy.startswith('allkeys'): continue
            raise StoreError(f'{self.url}: the server drops keys when it is full (maxmemory-policy {policy}): '
                         'set noeviction before an ingest')

    def check_home(self):
        """Raises `StoreExists` if the dataset was moved from a single server to a cluster, or the other way round

        This place would have the manifest under another key, and the earlier one would stay. On a single server, whose
        users need no rights to the key that it has in a cluster, that is looked for if the name is listed."""
        key = self.manifest_key
        if key is None:
            may_be_moved = self.lock.tags or self.link.call(lambda c: c.sismember(NAMES_KEY, self.name))
            key,_ = find_manifest(self.link, self.name) if may_be_moved else (None,None)
        if key in (None, self.keys.manifest): return
        origin,here = ('a single server','a cluster') if self.lock.tags else ('a cluster','a single server')
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
        plan = {**plan, 'fields':with_checks(plan['fields']), 'id':ingest, 'tags':self.lock.tags,
                'prefix':f'{self.name}@{ingest}' if is_used else self.name,
                'began':datetime.now(timezone.utc).isoformat(timespec='seconds')}
        self.store_plan(plan, add=[INGESTS_KEY,USED_KEY])
        return plan

    def new_part(self,
        fields:dict, # `{field: {'codec', 'dtype'}}`
        n:int # Number of samples
    )->dict: # `n`; `prefix` and `tags` of its keys; `fields`, with checksums for fixed-width values
        "Registers the keys of a part before it is written, without a plan; raises `StoreBusy`"
        part = dict(n=n, prefix=f'{self.name}@{uuid.uuid4().hex[:16]}', tags=self.lock.tags, fields=with_checks(fields))
        keys = value_keys(key_layout(part['prefix'], part['tags']), part['fields'], n)
        self.lock.transaction(lambda p: _register(p, self.keys, {part['prefix']:keys}))
        return part

    def store_plan(self,
        plan:dict, # The plan of the ingest
        add=() # As in `RedisLock.transaction`
    ):
        "Stores a plan, and registers the keys of its samples and of its state; raises `StoreBusy`"
        layout = key_layout(plan['prefix'], plan['tags'])
        written = {plan['prefix']:value_keys(layout, plan['fields'], plan['n']),
                   plan['id']:state_keys(self.keys, layout, plan)}
        def queue(p):
            p.set(self.keys.plan, seal(plan))
            _register(p, self.keys, written)
        self.lock.transaction(queue, add=add)

    def drop_plan(self):
        """Makes an unfinished ingest impossible to continue and to publish, and removes what it wrote; raises
        `StoreBusy`"""
        try: plan = self.plan()
        except CorruptSample: plan = None
        self.lock.transaction(lambda p: p.delete(self.keys.plan), discard=[INGESTS_KEY])
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
        self.finish_rename()
        run = self.lock.server_run()
        register = self.link.call(lambda c: c.hgetall(self.keys.register))   # before what is needed is read
        if not (register or self.lock.tags): return False
        try: manifest,plan = self.committed(),self.plan()
        except (CorruptSample,UnsupportedFormat): needed = {entry.decode(errors='replace') for entry in register}
        else:
            if self.lock.tags: _leave_lists(self.lock, manifest, plan, run)
            needed = _needed_by(manifest, plan, keep_before)
        needed -= set(dropped)
        unneeded = {entry:self._ranges(entry, stored) for entry,stored in register.items()
                    if entry.decode(errors='replace') not in needed}
        unneeded = {entry:ranges for entry,ranges in unneeded.items() if ranges is not None}
        for entry,ranges in unneeded.items():
            for start,first,stop,every in ranges:
                numbers = range(first, stop, every)
                for k in range(0, len(numbers), step):
                    self.lock.unlink([f'{start}{number}' for number in numbers[k:k+step]], run)
            self.lock.transaction(lambda p: p.hdel(self.keys.register, entry), run)
        return bool(unneeded)

    def finish_rename(self):
        """In a cluster, finishes a `rename` that was interrupted while the dataset had both names; the lock must be
        held

        Otherwise, who removes the dataset of one name would remove that of the other. Raises `StoreBusy`."""
        if not self.lock.tags: return
        stored = self.link.call(lambda c: c.hgetall(self.keys.register)).get(RENAMED.encode())
        try: names = [unseal(stored)[key] for key in ('old','new')] if stored else []
        except (ValueError,KeyError): return   # `clean_up` warns of it
        if not names: return
        old,new = (self if name==self.name else RedisPlace(self.link, name, tags=self.lock.tags) for name in names)
        uid = unseal(stored)['uid']
        if all(getattr(place.committed(True), 'uid', None)==uid for place in (old,new)):
            with nullcontext() if old is self else old.locked():
                entries = entries_of_dataset(old)
                old.lock.transaction(lambda p: queue_forget(p, old.keys, entries), discard=[NAMES_KEY])
        self.lock.transaction(lambda p: p.hdel(self.keys.register, RENAMED))

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
        last = self.committed(accept_damage=True)
        manifest.generation = 1+(last.generation if last else 0)
        before,dropped = ([*version.before, *_run_tables(last)],version.dropped) if version else ([],[])
        entries = {manifest.uid:_run_tables(manifest), _before(manifest):before, f'{manifest.uid}-dropped':dropped}
        entries = {entry:list(ranges) for entry,ranges in entries.items() if ranges}
        def queue(p):
            for key,content in tables.items(): p.set(key, content)
            p.set(self.keys.manifest, manifest.stamp().to_json())
            if before: p.hdel(self.keys.register, last.uid)   # the keys that it names are among those of `before`
            if entries: _register(p, self.keys, entries)
            p.delete(self.keys.plan)
        self.lock.transaction(queue, run, add=[NAMES_KEY], discard=[INGESTS_KEY])
        self._wait_for_replicas()
        if getattr(self.committed(), 'uid', None)!=manifest.uid:
            raise ServerRestarted(f'{self.url}: the server restarted and lost the commit of {self.name!r}; '
                              'repeat the same call')
        self.clean_up()
        return manifest

    def _wait_for_replicas(self, seconds=10):
        """With Sentinel, waits until the replicas have what was written, for about `seconds` at most; else does nothing

        It is no error if they do not have it then, or if this user may not wait for them. A master that the sentinels
        have just replaced accepts writes for a moment and forgets them. No replica receives these writes. The master is
        looked up each time, so this ends with the master that stays."""
        if not self.link.is_sentinel: return
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
            self.finish_rename()
            found = bool(self.link.call(lambda c: c.exists(self.keys.plan)))
            # in a cluster, the name stays listed for a short time after the end of an ingest
            if not self.lock.tags: found |= self.link.call(lambda c: bool(c.sismember(INGESTS_KEY, self.name)))
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
        def queue(p):
            p.delete(self.keys.manifest)
            if moved: _register(p, self.keys, {f'{manifest.uid}-moved':moved})
        self.lock.transaction(queue, discard=[NAMES_KEY])
        # these are in other slots in a cluster. If this is interrupted, `delete` can be repeated
        elsewhere = [] if is_here else [IngestKeys(self.name, 0 if self.lock.tags else 1).register, key]
        for other in elsewhere: self.link.call(lambda c: c.delete(other))
        return True

def _register(p, keys, entries):
    "Queues the command that stores `entries`, `{ID: ranges}`, in the register"
    p.hset(keys.register, mapping={entry:seal({'entry':entry, 'ranges':ranges}) for entry,ranges in entries.items()})

def _leave_lists(lock, manifest, plan, run):
    "In a cluster, removes the name from lists in which a process that was killed has left it"
    lists = [key for key,there in ((NAMES_KEY,manifest), (INGESTS_KEY,plan)) if not there]
    if lists: lock.transaction(lambda p: p.exists(lock.keys.lock), run, discard=lists)

def _needed_by(manifest, plan, keep_before):
    "A set of the IDs of what a dataset and an unfinished ingest need, each of which may be `None`, as in `clean_up`"
    needed = {plan['prefix'],plan['id']} if plan else set()
    if not manifest: return needed
    needed |= {manifest.uid, *(part.layout.prefix for part in parts_of(manifest))}
    return needed|{_before(manifest)} if keep_before else needed

def _before(manifest):
    "Returns the ID of what the version before `manifest` needs, and this version does not"
    return f'{manifest.uid}-before'

def entries_of_dataset(
    place:RedisPlace # Its lock must be held
)->dict: # `{ID: ranges}`, as stored
    "Returns the entries of the register that no unfinished ingest needs; raises `CorruptSample`"
    needed = _needed_by(None, place.plan(), False)
    register = place.link.call(lambda c: c.hgetall(place.keys.register))
    return {entry:ranges for entry,ranges in register.items() if entry.decode(errors='replace') not in needed}

def queue_forget(
    p, # A pipeline
    keys:IngestKeys, # Of the dataset
    entries # Of the register
):
    "Queues the commands that remove the manifest and these entries, which are under another name"
    p.delete(keys.manifest)
    if entries: p.hdel(keys.register, *entries)

def _run_tables(manifest):
    "Returns the range of keys, as `value_keys`, of the tables of runs of a version, in a list; empty if it has none"
    return [[manifest.runs['key'].removesuffix('0'), 0, 1, 1]] if manifest.runs else []
