"""What a dataset in a folder consists of besides its shards: lock, plan, manifest, and files for other tools

Docs: page `write/folder_place`"""

# A dataset appears when its manifest is written, and disappears when the manifest is removed or replaced. So nothing
# but the manifest and the plan says which files are needed, and their names say whose they are:
# `shard2-train-000012.tar` belongs to the second dataset, or version, that was written here. Cleaning up is one rule:
# whatever is ours, and needed neither by the manifest nor by an unfinished ingest, is removed. Overwriting, deleting,
# abandoning and editing all end with it, and so does the next call after a kill. Shards of others are never removed: a
# tar is ours if it has an index in our own folder, and if it is not one that was only indexed.

import os, uuid, warnings
from contextlib import suppress
from datetime import datetime, timezone

from ..core import CorruptSample, MAX_MANIFEST, seal, StoreBusy, StoreError, StoreExists, unseal, UnsupportedFormat
from ..store.shard_index import INDEX_FOLDER, index_name, pack_labels, ShardIndex, ShardManifest
from ..store.storage import Storage
from .base import check_name, Place
from .folder_lock import FolderLock, LOCK_FILE
from .shard_files import added_prefix, CARD, CARD_FILE, files_of, generation_of, is_added_file, is_own_file, MAX_STATE
from .shard_files import needs_card, own_shards, owns_card, owns_labels
from .shard_files import PART_FILE, PLAN_FILE, RECORD_FILE, SHARD_FILE, STATE_FILE

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

    @property
    def how_to_abandon(self)->str: return f'ShardStore.abandon({self.url!r})'

    def count_done(self, plan): return sum(bool(RECORD_FILE.match(name)) for name in self.hidden.names('.ingest'))
    def take(self):
        _ = self.storage.fs   # so that the error of an address that cannot be opened names this folder
        self.lock.take(self.progress)

    def close(self):
        "Releases the lock; errors of the storage are ignored"
        self.lock.close()
        if self.storage.local:
            with suppress(OSError): os.rmdir(self.hidden.path())   # raised if it is not there, or not empty

    def committed(self, accept_damage=False)->ShardManifest:
        content = 'manifest.json',MAX_MANIFEST
        try: return ShardManifest.from_json(self.storage.read(*content), f'{self.url}/manifest.json')
        except FileNotFoundError: return None
        except UnsupportedFormat as e:
            raise UnsupportedFormat(f'{e}; if another tool wrote it, choose another folder') from None

    def plan(self): return self._plan(self.committed())
    def _plan(self, dataset):
        """Returns the plan of the unfinished ingest, or `None`; raises `CorruptSample` if it is damaged

        `dataset` is what `committed` returned; its own plan, which may still be there, does not count."""
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
        with suppress(CorruptSample): plan = self._plan(dataset)
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
        dataset,needed = self.committed(),set(keep)
        plan = None if drop else self._plan(dataset)
        if plan and self.foreign: return plan,[],[]   # indices are named as the shards of others
        if dataset: needed |= files_of(dataset)|set(dataset.before if keep_before else ())
        def is_unneeded(name): return name not in needed and not (plan and generation_of(name)==plan['generation'])
        shards = [] if self.foreign else list(filter(is_unneeded, own_shards(names, hidden)))
        own = [name for name in hidden if '/' not in name]   # subfolders have the indices of shards of others
        return plan,shards,[name for name in own if is_own_file(name) and is_unneeded(name)]

    def drop_plan(self):
        dataset = self.committed()
        try: plan = self._plan(dataset)
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
