"""Manage datasets: rename and delete them, list and abandon unfinished ingests, and find what is left over

Docs: page `write/admin`"""

import re
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

from ..core import (
    CorruptSample, Manifest, MAX_MANIFEST, seal, StoreBusy, StoreError, StoreExists, StoreNotFound, UnsupportedFormat)
from ..store.redis import NAMES_KEY, read_manifest, RedisReader, USED_KEY
from ..store.redis_link import RedisLink
from ..store.redis_parts import parts_of
from ..store.shard_index import INDEX_FOLDER, ShardManifest
from ..store.storage import Storage
from .folder_place import FolderPlace, LOCK_FILE, owns_labels, PLAN_FILE, remove_link
from .redis_place import (
    entries_of_dataset, forget_commands, IngestKeys, INGESTS_KEY, RedisPlace, RENAMED)

# --- Redis
#
# These are the operations that a server with many datasets needs. None of them searches for keys. One that changes
# something holds the lock of the name, so it cannot meet a running ingest. `RedisStore` has them as methods,
# `unfinished` and `rename`; `delete` and `abandon` are `RedisPlace.remove`.

# --- Unfinished ingests

# An ingest that was begun and not committed is invisible to readers, but its values take memory. Run the same call
# again to continue it, or drop it with `abandon`.

def unfinished_ingests(
    link:RedisLink, # The server
)->list: # Of dicts: `name`; `chunks` done; `of` how many, `None` for a stream; `began` (ISO 8601, UTC); `running`
    """Returns the ingests that were begun and not committed; the same call continues one, `abandon` drops it

    If the plan of one is damaged or gone, `of` is 0, and `began` is ''. `running` says whether somebody has the lock of
    the name, which a process that was killed has for up to 30 s."""
    link.find_cluster()
    names = sorted(name.decode() for name in link.call(lambda c: c.smembers(INGESTS_KEY)))
    result = []
    for place in (RedisPlace(link, name, tags=int(link.is_cluster)) for name in names):
        has_plan,is_locked = link.send([('EXISTS', place.keys.plan), ('EXISTS', place.keys.lock)])
        # in a cluster, a name is listed for a short time after the ingest has ended
        if not has_plan and link.is_cluster: continue
        try: plan = place.plan() or {}
        except CorruptSample: plan = {}   # `begin` and `abandon` say so
        result.append(place.describe(plan, bool(is_locked)))
    return result

# --- Rename

# The keys of the samples begin with a prefix that is stored in the manifest. So a new name only needs a new manifest,
# and fifty million samples are renamed in a millisecond. If a dataset is written under the old name later, it gets
# another prefix.

def rename_dataset(
    store:RedisReader, # The dataset
    name:str, # The new name
)->RedisReader: # The dataset under its new name
    """Renames a dataset, without moving its samples, in one step; in a cluster, it has both names for a moment

    If `store` has this name already, it is returned. Raises `StoreExists` if the new name is in use by another dataset
    or an unfinished ingest, or as `check_home` of `RedisPlace`, `StoreNotFound` if the dataset was replaced or
    deleted, and `StoreBusy`."""
    old,new = RedisPlace(store.link, store.name),RedisPlace(store.link, name)
    if name==store.name: return store
    old.manifest_key = store.manifest_key
    with old.locked(), new.locked():
        old.check_home()
        new.check_home()
        old.clean_up()
        new.clean_up()
        # the same call may have been killed, and is finished now
        is_done = not old.committed() and getattr(new.committed(), 'uid', None)==store.manifest.uid
        if is_done: return type(store)(store.link, name)
        manifest = read_manifest(store.link, store.name)
        if manifest.uid!=store.manifest.uid: raise store.replaced_error()
        _switch_name(store.link, old, new, manifest)
    return type(store)(store.link, name)

def _switch_name(link, old, new, manifest):
    """Stores `manifest`, and what it needs of the register of place `old`, in place `new`; removes both from `old`

    Both places hold their locks. An unfinished ingest of the old name stays there, with its entries of the register. It
    is one transaction, except in a cluster. Raises `StoreBusy`, `StoreExists`, `CorruptSample`."""
    register = entries_of_dataset(old)
    appear = [('SET', new.keys.manifest, replace(manifest, name=new.name).to_json())]
    if register: appear.append(('HSET', new.keys.register, *chain.from_iterable(register.items())))
    if old.tags: return _switch_in_cluster(link, old, new, manifest, appear, register)
    watched = old.keys.lock,new.keys.lock,new.keys.manifest,new.keys.plan
    names = ('SREM', NAMES_KEY, old.name),('SADD', NAMES_KEY, new.name)
    def choose(replies):
        old_token,new_token,there,plan = replies
        if _is_renamed(link, new.name, manifest, there, plan): return None   # the reply was lost
        if (old_token,new_token)!=(old.token,new.token):
            raise StoreBusy(f'{old.name}: the lock was lost; try again')
        return [*appear, *forget_commands(old.keys, register), *names]
    link.transact(watched, [('MGET', *watched)], choose)

def _is_renamed(link, name, manifest, there, plan):
    """Returns whether `manifest` is under its new name `name`; raises `StoreExists` if something else is there

    `there` and `plan` are what the keys of the manifest and of the plan hold under that name: bytes or `None`."""
    if there and Manifest.from_json(there).uid==manifest.uid: return True
    if not there and not plan: return False
    what = '' if there else ', an unfinished ingest'
    raise StoreExists(f'{link.url}: {name!r} is there already{what}')

def _switch_in_cluster(link, old, new, manifest, appear, register):
    """Does what `_switch_name` does in two steps, as the names are on different nodes

    For a moment the dataset has both names. If it is interrupted, the next change of either finishes it."""
    there,plan = link.send([('GET', new.keys.manifest), ('GET', new.keys.plan)])
    note = seal(dict(ranges=[], old=old.name, new=new.name, uid=manifest.uid))
    if not _is_renamed(link, new.name, manifest, there, plan):
        old.transaction([('HSET', old.keys.register, RENAMED, note)])
        new.transaction([*appear, ('HSET', new.keys.register, RENAMED, note)], add=[NAMES_KEY])
    old.transaction(forget_commands(old.keys, [*register, RENAMED]), discard=[NAMES_KEY])
    new.transaction([('HDEL', new.keys.register, RENAMED)])

# --- Delete

# The manifest is removed first, so that no reader opens a dataset that is partly deleted. A plan that names the files
# is written before that. If the process is killed, the same call continues with it. Of shards that others wrote, only
# the manifest and the files of the index are removed.

def leftover_files(
    storage:Storage # The folder
)->list:
    "Names of files of ours that nothing needs, as a call was killed: the next change removes them"
    place = _place(storage)
    _,shards,files = place.unneeded(*place.listed())
    return [*shards, *(f'{INDEX_FOLDER}/{name}' for name in files)]

def delete_shards(
    storage:Storage # The folder
):
    """Removes a dataset, and what an unfinished ingest left; of shards that others wrote, only the index

    Raises `StoreNotFound` if there is neither, and `StoreBusy` if another process is writing or changing it."""
    if storage.is_link(INDEX_FOLDER) and _has_own_manifest(storage): remove_link(storage)
    place = _place(storage)
    if not place.committed() and not _has_state(place):   # where there is nothing, no lock is written
        raise StoreNotFound(f'{place.url}: no dataset here, and no unfinished ingest')
    with _alone(place):
        manifest = place.committed()   # others may have written until now
        plan = None if manifest else place.plan()
        prefix = manifest.prefix if manifest else plan['prefix'] if plan else 'shard'
        generation = manifest.generation if manifest else plan['generation'] if plan else 1
        # for the next call, if this process is killed
        place.store_plan(dict(signature='', n=0, chunk=1, generation=generation, prefix=prefix))
        place.foreign = not prefix
        if prefix and owns_labels(place.storage, manifest): place.storage.remove(['labels.json'])
        place.remove_all()

@contextmanager
def _alone(place):
    "A context that takes the lock; at the end, removes folders that are empty"
    try:
        with place.locked(): yield
    finally: place.remove_empty_folders()

def _has_state(place):
    "Has an ingest left anything in `.ingest` besides its lock?"
    return bool(set(place.hidden.names('.ingest'))-{LOCK_FILE.split('/')[1]})

def _has_own_manifest(storage):
    "Is there the manifest of a dataset of `to_shards`, or of an index with `to=`? One of another tool is not ours"
    try: return ShardManifest.from_json(storage.read('manifest.json', MAX_MANIFEST), storage.url) is not None
    except (FileNotFoundError,StoreError): return False

def _place(storage):
    """Returns the `FolderPlace` of a folder; if shards of others are, or were to be, indexed there, that of our own one

    Raises `UnsupportedFormat` for a `manifest.json` of another tool if nothing of ours is there."""
    place = FolderPlace(storage)
    inner = FolderPlace(place.hidden, name=place.name, foreign=True)
    try:
        if place.committed(): return place
        error = None
    except UnsupportedFormat as e: error = e   # `manifest.json` of another tool
    if inner.committed(): return inner
    try: plan = inner.hidden.read(PLAN_FILE)
    except FileNotFoundError: plan = b''
    if plan and (b'"prefix":""' in plan or error and b'"prefix":"' not in plan): return inner   # or it is damaged
    if error: raise error
    return place

# --- Unfinished ingests

# An ingest that was begun and not committed is invisible to readers, but its shards take space. Run the same call again
# to continue it, or drop it with `abandon`.

def unfinished_shards(
    storage:Storage # The folder
)->list: # Of at most one dict: `name`; `chunks` done; `of` how many, `None` for a stream; `began` (UTC); `running`
    """Returns the ingest that was begun here and not committed; the same call continues it, `abandon` drops it

    May wait for some seconds, to see whether a process of another machine is running. Raises `StoreError` if the plan
    is damaged."""
    place = _place(storage)
    plan = place.plan()
    if not plan: return []
    holder = place.lock.holder()
    return [place.describe(plan, bool(holder) and place.lock.is_running(holder))]

def abandon_shards(
    storage:Storage # The folder
):
    """Removes what an unfinished ingest has written, and keeps the dataset; raises `StoreNotFound`, `StoreBusy`

    If its plan is damaged, so that nobody knows which shards are its own, these stay, and it warns of them."""
    place = _place(storage)
    nothing = StoreNotFound(f'{place.url}: no unfinished ingest here')
    if not _has_state(place): raise nothing   # then no lock is written
    with _alone(place):
        try: has_plan = bool(place.plan())   # the ingest may have been committed until now
        except CorruptSample: has_plan = True
        if has_plan: place.drop_plan()
        elif not place.clean_up(): raise nothing   # else another process was killed while it abandoned the ingest

# --- Leftovers
#
# A clean-up removes what the register names, and never searches for keys. So a server that came back with older data,
# or a register that somebody has removed, can leave keys that nobody knows of. Their names have the ID of a part or of
# an ingest, and that ID is nowhere. Finding them takes a look at the name of each key of a server.

# `NAME@ID:…`, in a cluster `{NAME@ID.3}:…` and `{NAME}@ID:…`; and `NAME:ingest:ID:…`
_WITH_ID = re.compile(r'\{?(?P<name>[^{}:@]+)\}?(?:@|:ingest:)(?P<id>[0-9a-f]{16})(?:\.\d+\})?:')

def leftover_keys(
    link:RedisLink, # The server
): # Iterator of `str`
    """Finds keys with an ID that no register, manifest or plan has; those of other programs are left out

    Raises `CorruptSample` or `UnsupportedFormat` if a manifest is damaged: nobody knows then what its dataset needs."""
    names,known = _known_ids(link)
    for master in link.call(lambda _: link.servers.masters()):
        cursor = None
        while cursor!=0:
            cursor,keys = link.call(lambda _: master.scan(cursor or 0, count=1000))
            found = [match for match in (_WITH_ID.match(key.decode(errors='replace')) for key in keys) if match]
            # what is written is registered before, so an ID that is new is known if all are read once more
            if any(match['id'] not in known for match in found): names,known = _known_ids(link)
            for match in found:
                if match['name'] in names and match['id'] not in known: yield match.string

def _known_ids(link):
    "Returns two sets: all names of datasets that are or were there; IDs of parts and ingests, registered or needed"
    names,known = set(),set()
    for key in NAMES_KEY,INGESTS_KEY,USED_KEY:
        names |= {name.decode() for name in link.call(lambda c: c.smembers(key))}
    for name in names:
        register = IngestKeys(name, int(link.is_cluster)).register
        known |= {entry.decode(errors='replace').rpartition('@')[2] for entry in link.call(lambda c: c.hkeys(register))}
        try: parts = parts_of(read_manifest(link, name))
        except StoreNotFound: continue
        known |= {part.layout.prefix.rpartition('@')[2] for part in parts}
    return names,known
