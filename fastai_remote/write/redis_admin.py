"""Manage datasets in Redis: rename them, and list unfinished ingests

Docs: page `write/redis_admin`"""

# These are the operations that a server with many datasets needs. None of them searches for keys. One that changes
# something holds the lock of the name, so it cannot meet a running ingest. `RedisStore` has them as methods,
# `unfinished` and `rename`; `delete` and `abandon` are `RedisPlace.remove`.

from dataclasses import replace

from ..core import CorruptSample, Manifest, seal, StoreBusy, StoreExists
from ..store.redis import NAMES_KEY, read_manifest, RedisReader
from ..store.redis_link import RedisLink
from .redis_place import entries_of_dataset, queue_forget, RedisPlace, RENAMED
from .redis_state import INGESTS_KEY, watched_transaction

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
    return [ingest for name in names if (ingest := _describe_ingest(link, name))]

def _describe_ingest(link, name):
    """Returns the dict of `unfinished_ingests` for one name; in a cluster, `None` if there is no plan

    There, the name is listed for a short time after the ingest has ended."""
    place = RedisPlace(link, name, tags=int(link.is_cluster))
    has_plan,is_locked = link.send([('EXISTS', place.keys.plan), ('EXISTS', place.keys.lock)])
    if not has_plan and link.is_cluster: return None
    try: plan = place.plan() or {}
    except CorruptSample: plan = {}   # `begin` and `abandon` say so
    return place.describe(plan, bool(is_locked))


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
    def appear(pipe):
        pipe.set(new.keys.manifest, replace(manifest, name=new.name).to_json())
        if register: pipe.hset(new.keys.register, mapping=register)
    if old.lock.tags: return _switch_in_cluster(link, old, new, manifest, appear, register)
    watched = old.keys.lock,new.keys.lock,new.keys.manifest,new.keys.plan
    def attempt(pipe):
        old_token,new_token,there,plan = pipe.mget(watched)
        if _is_renamed(link, new.name, manifest, there, plan): return   # the reply was lost
        if (old_token,new_token)!=(old.lock.token,new.lock.token):
            raise StoreBusy(f'{old.name}: the lock was lost; try again')
        pipe.multi()
        appear(pipe)
        queue_forget(pipe, old.keys, register)
        pipe.srem(NAMES_KEY, old.name)
        pipe.sadd(NAMES_KEY, new.name)
        pipe.execute()
    link.call(lambda client: watched_transaction(client, watched, attempt))

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
    def appear_noted(pipe):
        appear(pipe)
        pipe.hset(new.keys.register, RENAMED, note)
    if not _is_renamed(link, new.name, manifest, there, plan):
        old.lock.transaction(lambda pipe: pipe.hset(old.keys.register, RENAMED, note))
        new.lock.transaction(appear_noted, add=[NAMES_KEY])
    old.lock.transaction(lambda pipe: queue_forget(pipe, old.keys, [*register, RENAMED]), discard=[NAMES_KEY])
    new.lock.transaction(lambda pipe: pipe.hdel(new.keys.register, RENAMED))
