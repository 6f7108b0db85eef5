"""Stores that also copy, change and verify their dataset: the classes that a user opens

Docs: page `ingest/stores`"""

# A store is a class with two parts. A *reader*, of the package `store`, reads samples, and knows nothing of how they
# are written. `DatasetOps` has everything that copies, changes or verifies a dataset, once for all places: these are
# ingests, and so they need the writers and the sources. Only what differs between places is in the classes below, such
# as `reviser`, which writes a new version.
#
# | class | reader | where the samples are |
# |---|---|---|
# | `RedisStore` | `RedisReader` | in Redis |
# | `RedisKeys` | `RedisKeysReader` | in Redis, under the keys of another program |
# | `ShardStore` | `ShardReader` | in tar shards |
# | `TieredStore` | `TieredReader` | in tar shards, with Redis as a cache |
# | `MemoryStore` | `MemoryReader` | in memory |
#
# A worker only reads. So a pickle of a store names its reader, and the process that unpickles it imports no writer.
# `changeable` makes a store of a reader again.

from importlib import import_module
from typing import Self

from .copy import copy_store, map_store, resize_store
from .run import PartitionWriter
from .revise import RevisionOps
from .verify import verify_store
from ..store.connection import concealed
from ..store.base import MemoryReader, new_store, Store
from ..store.redis import RedisReader
from ..store.redis_keys import RedisKeysReader
from ..store.redis_link import as_link, RedisLink
from ..store.shard_index import INDEX_FOLDER
from ..store.shards import ShardReader
from ..store.storage import as_storage, Storage
from ..store.tiered import TieredReader
from ..write.admin import abandon_shards, delete_shards, rename_dataset, unfinished_ingests, unfinished_shards
from ..write.redis import RedisWriter
from ..write.redis_place import RedisPlace
from ..write.shards import ShardWriter

# --- DatasetOps

class DatasetOps(RevisionOps):
    """The methods of a store that copy, change and verify its dataset

    A store is a class of these methods and of a reader, `class RedisStore(DatasetOps, RedisReader)`. A dataset that can
    be changed also has `reviser`, which makes what writes a new version, and `reopened`, which opens it."""
    reader_class:type = None # The class that pickles name, and that workers read with; default: that of the store
    for_users = 'add_losses','copy','map','report','resize','show','verify','view'

    @property
    def python(self)->str:
        "Python that opens this dataset, for a user to copy, without secrets; `store` if that takes more than a line"
        return 'store'

    def worker_class(self): return vars(type(self)).get('reader_class') or type(self)   # a subclass may read otherwise
    def __reduce__(self): return new_store,(self.worker_class(),),self.__getstate__()

    # --- Copies

    # `map`, `resize` and `copy` make a dataset of this one, wherever it is to be, and return its store.

    def map(self,
        # `fn(sample)` -> sample. The values are those of `store[i]`; images are decoded when their pixels are needed
        fn,
        url:str=None, # Destination: a Redis server or, for shards, a folder; default: the server of a dataset in Redis
        # Name of the new dataset, required in Redis; `None` for shards, which are named after their folder
        name:str=None,
        **kwargs # `num_workers`, `overwrite`, `max_failed`, `progress` and others for `to_redis` or `to_shards`
    ): # The new dataset, a `Store`
        """Apply `fn` to each sample and write the results as a new dataset, in Redis or in shards

        Prints the report, with `progress=False` only if samples were left out or changed. Raises `TypeError` if `url`
        or `name` is missing, and what `to_redis` and `to_shards` raise."""
        url,kwargs = concealed(url),concealed(kwargs)
        return _opened(map_store(self, fn, url, name, **kwargs), kwargs.get('progress'))

    def resize(self,
        size:int, # Shorter side, pixels; smaller images stay as they are
        url:str=None, # As in `map`
        name:str=None, # As in `map`
        quality:int=90, # JPEG and WebP quality, 1 to 95
        field:str=None, # Field to resize; default: the first that holds images
        codec:str=None, # How to store: `jpg`, `png`, `webp` or `raw`; default: unchanged, `png` for other codecs
        **kwargs # As in `map`
    ): # The new dataset, as from `map`
        """Write a copy in which the images of one field have a shorter side of at most `size`; this dataset stays

        Raises `UnknownField`, `ValueError` if no field holds images, and what `map` raises."""
        url,kwargs = concealed(url),concealed(kwargs)
        report = resize_store(self, size, url, name, quality, field, codec, **kwargs)
        return _opened(report, kwargs.get('progress'))

    def copy(self,
        url:str, # Destination: a Redis server or, for shards, a folder
        name:str=None, # Name in Redis; default: the same; `None` for shards
        **kwargs # As in `map`
    ): # The new dataset, as from `map`
        "Copy the dataset byte for byte, and compare checksums on the way; raises what `map` raises"
        url,kwargs = concealed(url),concealed(kwargs)
        return _opened(copy_store(self, url, name, **kwargs), kwargs.get('progress'))

    def verify(self,
        num_workers:int=None, # Processes; 0: this one; default: one a core, or as many as the active joblib backend has
        chunk:int=2048, # Samples that a worker reads per call
        progress=None, # As in `verify_store`
    ): # A `VerifyReport`
        """Read everything that is stored, compare checksums, and decode the samples

        The report also names what has no checksums. Raises `StoreUnavailable`."""
        return verify_store(self, num_workers, chunk, progress)

    # --- Looking

    # The package `view` comes after this one, and some of it needs fastai. So it is imported when it is used.

    def show(self,
        numbers=None, # Sample numbers, a list or an array; default: some from all over the dataset
        n:int=12, # How many samples to show; all of `numbers` are shown
        split:str=None, # Only samples of this split
        where:dict=None, # Only samples with these values, `{field: values}`, as in `RemoteItems.where`
        label=None, # Only samples with this label, or one of a list of labels, of `cls` or else the first such field
        **kwargs # `figsize`, `ncols` and others, as for fastai's `get_grid`
    ): # A list of axes; of samples without pictures, the table (a pandas DataFrame), which is also displayed
        """Show samples with their labels, as fastai shows those of a batch

        A value that is missing or damaged is shown as its error. Raises `IndexError`, and `ValueError` for an unknown
        split or if there is no such sample, what `RemoteItems.where` raises, and `StoreUnavailable`."""
        return _view('show').show_samples(self, numbers, n, split, where, label, **kwargs)

    def view(self,
        edit:bool=False, # May samples be marked on the page, and the dataset be changed?
        height:int=None, # Height in a notebook, in pixels; default: a notebook shows the address
        port:int=None, # TCP port of this machine; default: a free one
        # The address under which Jupyter's proxy serves ports, such as https://hub.org/user/me/proxy
        proxy:str=None
    ): # A `View`, with `url`, `selection`, `marked`, `open()` and `close()`
        """Serve a page for a browser on this machine that shows any sample at once, and filters and sorts; returns it

        Prints the address, which contains a random token: who has it sees the dataset and, with `edit`, changes it. The
        page ends with this process. Raises `TypeError` with `edit` if this dataset cannot be changed, and `OSError` if
        the port is in use."""
        view = _view('browser').View(self, edit, height, port, proxy)
        print(view)
        return view

    def report(self,
        path, # The file to write, such as `pets.html`
        n:int=100, # Samples that are shown
        sample:int=1000 # Samples that are read for sizes of images and bytes of fields
    ): # The path, a `Path`
        """Write a page with an overview of the dataset and pictures of some samples, in one file of at most 5 MB

        It needs no network and no script. Raises `OSError`, `StoreUnavailable`."""
        return _view('html').write_report(self, path, n, sample)

    def add_losses(self,
        learn, # A `Learner` whose loaders read a dataset with the fields of this one
        split:str|list='valid', # The split, or several; `None`: all samples
        bs:int=None # Samples of a batch; default: that of the learner
    )->Self: # The new version
        """Store how wrong a model is about each sample of a split: the fields `loss.f4`, `pred.cls`, `confidence.f4`

        `loss.f4` is the loss, `pred.cls` the label that was predicted, and `confidence.f4` its probability. Other
        samples have `nan`, and the label '' (of numbers: -1). If the target is no single label, there is only
        `loss.f4`. A second call replaces all of these fields. Raises `ValueError` for an unknown split, and what
        `add_fields` raises."""
        return _view('show').add_losses(self, learn, split, bs)

    def _repr_html_(self):
        "What Jupyter shows: a table, and samples if they are read in a second; without a manifest `None`, so `repr`"
        return _view('html').notebook_html(self) or (None if self.not_read else super()._repr_html_())

def _view(name): return import_module(f'..view.{name}', __package__)

# --- RedisStore

class RedisStore(DatasetOps, RedisReader):
    "A dataset in Redis, one value per sample and field, read in one round trip per batch"
    reader_class = RedisReader
    for_users = 'abandon','delete','from_keys','rename','unfinished'

    def reviser(self, change): return RedisWriter(self.link, self.name, self, change)
    def reopened(self): return type(self)(self.link, self.name)
    @property
    def python(self): return f'RedisStore({str(self.link.url)!r}, {self.name!r})'

    def rename(self,
        name:str, # The new name
    )->'RedisStore':
        """Rename this dataset at once; its samples are not copied. Returns the dataset under its new name

        Stores that were opened before raise `StoreNotFound`. Raises `StoreExists`, `StoreBusy`, `StoreNotFound`."""
        return rename_dataset(self, name)

    @classmethod
    def delete(cls,
        url:str|RedisLink, # The server
        name:str, # Name of the dataset
    ):
        """Remove a dataset, and an unfinished ingest of its name

        Raises `StoreNotFound` if there is neither, and `StoreBusy` if another process is writing or changing it."""
        url = concealed(url)
        RedisPlace(as_link(url), name).remove()

    @classmethod
    def unfinished(cls,
        url:str|RedisLink, # The server
    )->list: # Of dicts: `name`, `chunks` done, `of` (their number, `None` for a stream), `began` (UTC), `running`
        "Ingests that have not been committed: run the same call again to finish one, or `abandon` it"
        url = concealed(url)
        return unfinished_ingests(as_link(url))

    @classmethod
    def abandon(cls,
        url:str|RedisLink, # The server
        name:str, # Name of the dataset
    ):
        """Remove what an unfinished ingest of `name` has written; a dataset of that name stays

        Raises `StoreNotFound`, `StoreBusy`."""
        url = concealed(url)
        RedisPlace(as_link(url), name).remove(dataset=False)

    @classmethod
    def from_keys(cls,
        url:str|RedisLink, # `redis://`, `rediss://` (TLS) or `unix://`
        # Pattern of the keys of values: `{}` stands for the number, `{:05}` for the number with zeros before it, and
        # `{split}` for the split
        x:str,
        y:str=None, # Pattern of the keys of labels, each an integer as text
        n:int|dict=None, # Number of samples, or `{split: number of samples}`; required
        codec:str='npz', # Codec of the values: `npz` or `npy` (arrays), `jpg`, `png`, …
        vocab:list=None, # Labels, in the order of the integers
        start:int=0, # The first number
        image:bool=True, # Are arrays images, of shape (h,w), (h,w,1) or (h,w,3)?
        **kwargs # `timeout`, `socket_timeout` and others for `RedisLink`
    )->Store: # A `RedisKeys`, with the fields `x`, and `cls` for labels
        """Use values as a dataset that another program has written to Redis, each value and each label under its own
        key

        Such a dataset has no checksums. Damage is noticed only if a value cannot be decoded, or a label is not the
        number of a class. `verify` says so. A copy, `store.copy(url, name)`, has checksums of what was read.
        Raises `ValueError` if the patterns, `n` or `vocab` do not fit."""
        url,kwargs = concealed(url),concealed(kwargs)
        if n is None: raise ValueError('n: the number of samples, or {split: samples}')
        return RedisKeys(url, x, y, n, codec, vocab, start, image, **kwargs)

    @classmethod
    def writer(cls,
        url, # As in `PartitionWriter`
        name, # As in `PartitionWriter`
        sample, # As in `PartitionWriter`
        counts, # As in `PartitionWriter`
        fn=None, # As in `PartitionWriter`
        **kwargs # As in `PartitionWriter`
    ):
        "A context manager that writes dataset `name` from the partitions of an engine such as Spark"
        url = concealed(url)
        return PartitionWriter(url, name, sample, counts, fn, store_class=cls, **kwargs)

class RedisKeys(DatasetOps, RedisKeysReader):
    "A dataset under keys that another program has written: field `x`, and `cls` for labels; it has no checksums"
    reader_class = RedisKeysReader
    def reopened(self): return self

# --- ShardStore

class ShardStore(DatasetOps, ShardReader):
    """A dataset in tar shards, in a folder on a disk or on object storage

    The manifest is read at once. Raises `StoreNotFound`, `StoreUnavailable`, `UnsupportedFormat` or `CorruptSample` if
    this fails, and `TypeError` for arguments that do not go together."""
    reader_class = ShardReader
    for_users = 'abandon','delete','unfinished'

    def reviser(self, change):
        storage = self.storage.subfolder(INDEX_FOLDER) if '/' in self.manifest_key else self.storage
        return ShardWriter(storage, name=self.name, foreign=not self.manifest.prefix, base=self, change=change)

    def reopened(self): return type(self)(self.storage, self._cache_setting or None, shards_url=self.tars)
    @property
    def python(self): return f'ShardStore({str(self.storage.url)!r})'

    @classmethod
    def delete(cls,
        url:str|Storage, # The folder
        storage_options:dict=None # As in `to_shards`
    ):
        """Remove a dataset, and what an unfinished ingest has written; of shards that others wrote, only the index

        Raises `StoreNotFound` if there is neither, and `StoreBusy`."""
        url,storage_options = concealed(url),concealed(storage_options)
        delete_shards(as_storage(url, storage_options=storage_options))

    @classmethod
    def abandon(cls,
        url:str|Storage, # The folder
        storage_options:dict=None # As in `to_shards`
    ):
        """Remove what an unfinished ingest has written; a dataset that is there stays

        Raises `StoreNotFound`, `StoreBusy`."""
        url,storage_options = concealed(url),concealed(storage_options)
        abandon_shards(as_storage(url, storage_options=storage_options))

    @classmethod
    def unfinished(cls,
        url:str|Storage, # The folder
        storage_options:dict=None # As in `to_shards`
    # At most one dict: `name`, `chunks` done, `of` (their number, `None` for a stream), `began` (UTC), `running`
    )->list:
        "List the ingest that has not been committed, if there is one: the same call finishes it, or `abandon` drops it"
        url,storage_options = concealed(url),concealed(storage_options)
        return unfinished_shards(as_storage(url, storage_options=storage_options))

# --- The other stores

class TieredStore(DatasetOps, TieredReader):
    """A dataset in shards, and a Redis server that keeps values that were read from them; Redis may lose any of them

    Raises `ValueError` if a `RedisStore` is not a copy of the dataset, and `TypeError` for wrong arguments."""
    reader_class = TieredReader

class MemoryStore(DatasetOps, MemoryReader):
    "Samples in memory: the reference implementation, used in tests instead of other stores"
    reader_class = MemoryReader

_STORE_OF = {cls.reader_class:cls for cls in (RedisStore, RedisKeys, ShardStore, TieredStore, MemoryStore)}

def changeable(
    reader:Store # A reader, such as the dataset of a learner that `load_learner` has loaded
)->Store: # `reader` itself if it has the methods already, or is of a class of your own
    "The same dataset as a store that has the methods of `DatasetOps`"
    cls = _STORE_OF.get(type(reader))
    if cls is None: return reader
    store = new_store(cls)
    vars(store).update(vars(reader))
    return store

def _opened(report, progress):
    "The new dataset; prints the `IngestReport`, with `progress=False` only if samples were left out or changed"
    if progress is not False or report.failed or report.notes: print(report)
    return changeable(report.store)
