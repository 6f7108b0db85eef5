"""Manage datasets in shards: delete, list and abandon unfinished ingests

Docs: page `write/shards_admin`"""
from contextlib import contextmanager

from ..core import CorruptSample, MAX_MANIFEST, StoreError, StoreNotFound, UnsupportedFormat
from ..store.shard_index import INDEX_FOLDER, ShardManifest
from ..store.storage import Storage
from .folder_lock import LOCK_FILE
from .folder_place import FolderPlace, remove_link
from .shard_files import owns_labels, PLAN_FILE

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
