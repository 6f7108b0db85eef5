"""What the words of a command line name: places of datasets, without a secret, and sources

Docs: page `cli/words`"""

# A dataset is named by the arguments of the Python functions: `redis://host NAME` in Redis, and a folder or a URL such
# as `s3://bucket/pets` for shards. All users of a machine can read the arguments of a program (`ps`), and a shell keeps
# them in a file. So a URL with a password is refused. `env:VARIABLE` stands for a URL in a variable of the environment.

import os, re
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

import redis

from ..core import StoreUnavailable
from ..ingest.stores import RedisStore, ShardStore
from ..source.arrays import array_samples
from ..source.base import refuse_address
from ..source.csv_files import CSV_EXTENSIONS, csv_samples
from ..source.drawings import drawing_samples
from ..source.files import image_extensions, image_samples
from ..source.frames import table_samples
from ..source.img2dataset import img2dataset_samples
from ..source.tars import TAR_EXTENSIONS, tar_samples
from ..store.connection import public_url, Secret
from ..store.redis_link import REDIS_SCHEMES, RedisLink, split_secret
from ..store.redis_servers import nodes_in
from ..store.shard_index import INDEX_FOLDER
from ..store.storage import as_storage
from .terminal import ask_password, flag, UsageError

# --- URLs without secrets

_url = re.compile(r'[a-z][a-z0-9+.-]*://[^\s"\']*', re.I)
URL_VARIABLES = 'FASTAI_REMOTE_URL','REDIS_URL'

def refuse_secret(word:str):
    "Raise `UsageError`, which does not show `word`, if it has a URL with a password, a signature or another secret"
    if any(map(_has_secret, _url.findall(word))):
        raise UsageError('a URL with a password or another secret is refused, since everybody on this machine can '
                         'read the command line. Put the URL into a variable and write env:VARIABLE, or leave the '
                         'password out and set FASTAI_REMOTE_PASSWORD')

def _has_secret(url):
    "Does the URL have a password, a signature or another secret?"
    url = _with_lower_scheme(url)
    if public_url(url)!=url: return True
    if not url.startswith(REDIS_SCHEMES) or '@' not in url: return False
    try: return split_secret(url)[1] is not None
    except ValueError: return True   # such as a password with a slash

def _with_lower_scheme(url):
    "`url` with its scheme in lower case, such as `redis://` for `REDIS://`; what is no URL is returned as it is"
    return re.sub('^[a-z][a-z0-9+.-]*://', lambda scheme: scheme[0].lower(), url, flags=re.I)

def url_of(word:str)->str:
    """The URL that a word of the command line stands for; raises `UsageError`

    The word is a URL, a path, `env:VARIABLE`, or `env:VARIABLE/folder` for shards; `env:` is FASTAI_REMOTE_URL, or else
    REDIS_URL. A URL of Redis gets the password that FASTAI_REMOTE_URL or REDIS_URL has for the same server. The error
    is for a secret in `word`, for a variable that is not set, and for a folder in Redis."""
    refuse_secret(word)
    word = _with_lower_scheme(word)
    if not word.startswith('env:'): return _with_known_password(word) if word.startswith(REDIS_SCHEMES) else word
    name,slash,folder = word.removeprefix('env:').partition('/')
    names = [name] if name else URL_VARIABLES
    found = [_with_lower_scheme(os.environ[name]) for name in names if os.environ.get(name)]
    if not found: raise UsageError(f"{word} is the URL in the variable {' or '.join(names)}, which is not set")
    if not slash: return Secret(found[0])
    if found[0].startswith(REDIS_SCHEMES): raise UsageError(f'{word}: datasets in Redis have no folders')
    return Secret(f"{found[0].rstrip('/')}/{folder}")

# A URL without a password gets the one of a variable, if both name the same server, and the same user or none.

def _with_known_password(url):
    """`url` with the user and the password of FASTAI_REMOTE_URL or REDIS_URL; `url` itself if neither fits

    A variable fits if it has a password for the same server, and for the same user if `url` names one. Without a name,
    a user is the one that Redis calls `default`."""
    for known in [os.environ.get(name, '') for name in URL_VARIABLES]:
        try: (server,host,user,password),(asked,_,wanted,_) = _login(known),_login(url)
        except ValueError: continue   # one of them is not a URL
        if password is None or server!=asked or wanted not in ('', user or 'default'): continue
        login = f"{quote(wanted or user, safe='')}:{quote(password, safe='')}"
        return Secret(urlunsplit(urlsplit(url)._replace(netloc=f'{login}@{host}')))
    return url

def _login(url):
    "`(server, host, user, password)` of a URL of Redis, with a server that can be compared; raises `ValueError`"
    url,password = split_secret(url)
    parts = urlsplit(url)
    has_sentinels,name = parts.scheme.endswith('+sentinel'),''
    if parts.scheme=='unix': name = parts.path
    elif has_sentinels: name = parts.path.strip('/').partition('/')[0]   # what sentinels call the server
    server = parts.scheme,nodes_in(url, 26379 if has_sentinels else 6379),name
    user = unquote(parts.username or '') or dict(parse_qsl(parts.query)).get('username', '')
    return server,parts.netloc.rpartition('@')[2],user,password

# --- Places

# A `Place` opens what it names when it is asked for it, so that a wrong command line is refused before a server is
# contacted.

@dataclass
class Place:
    "Where a dataset is, or will be"
    words:list # The words of the command line that name it
    url:str # May contain a password, which `repr` does not show
    name:str = None # Name of the dataset; `None` for shards, whose folder is their name
    timeout:float = 20. # Seconds for all attempts together, then `StoreUnavailable`
    storage_options:dict = None # For fsspec's file system

    @property
    def is_redis(self)->bool: return self.url.startswith(REDIS_SCHEMES)
    @property
    def store_class(self): return RedisStore if self.is_redis else ShardStore

    @cached_property
    def home(self):
        """A `RedisLink` to the server, or the `Storage` of the folder

        Asks for the password of a server if it needs one that is not known. Raises `StoreUnavailable`, `UsageError`."""
        return connect(self.url, self.timeout) if self.is_redis else \
            as_storage(self.url, self.timeout, self.storage_options)
    @property
    def address(self)->tuple:
        "The arguments that name the dataset, for the methods of `store_class`"
        return (self.home,self.name) if self.is_redis else (self.home,)
    def store(self):
        "The dataset, a `RedisStore` or `ShardStore`; raises `StoreNotFound` and other `StoreError`s"
        return self.store_class(*self.address)

    @property
    def has_dataset(self)->bool:
        "Is there a dataset in this folder of shards? Its manifest may be among tars of others, in a folder of our own"
        return any('manifest.json' in self.home.names(folder) for folder in ('', INDEX_FOLDER))

    def unfinished(self)->list:
        """Ingests that were not finished, as `RedisStore.unfinished` and `ShardStore.unfinished` list them

        On a server they are those of dataset `name`; all if that is `None`."""
        found = self.store_class.unfinished(self.home)
        return [o for o in found if not self.is_redis or self.name in (None, o['name'])]

    @property
    def shown(self)->str:
        """The place for a message: its URL without secrets, then the name of the dataset, if it has one

        For a server it opens `home`, so it may ask for a password, and raise what `home` raises."""
        return f'{self.home.url} {self.name}' if self.name else self.home.url

# A password may be missing in the URL. Whether the server needs one is known when it is asked.

def connect(url:str, timeout:float)->RedisLink:
    """A link to the Redis server at `url`; `timeout` is in seconds, for all attempts together

    Its password comes from `url`; then this does not contact the server. If the server asks for one and `url` has none,
    it is that of the variable FASTAI_REMOTE_PASSWORD, or the user is asked. Raises `StoreUnavailable`, and `UsageError`
    if nobody can be asked."""
    link = RedisLink(url, timeout=timeout)
    if split_secret(url)[1] is not None: return link
    try: link.call(lambda client: client.ping())
    except StoreUnavailable as e:
        if isinstance(e.__cause__, redis.exceptions.NoPermissionError): return link   # not for PING
        if not isinstance(e.__cause__, redis.exceptions.AuthenticationError): raise
        password = os.environ.get('FASTAI_REMOTE_PASSWORD') or ask_password(link.url)
        link = RedisLink(url, timeout=timeout, secret=password)
    return link

# `ls` looks at all that is on a server, or in the folders of a folder.

def places_in(place:Place)->list:
    """A `Place` for each dataset on a server, or for each direct subfolder of a folder, sorted

    A folder of our own among tars of others is left out. Raises `FileNotFoundError` if there is no such folder."""
    if place.is_redis:
        places = [replace(place, words=[*place.words, name], name=name) for name in RedisStore.names(place.home)]
        for one in places: one.home = place.home
        return places
    storage = place.home
    try: found = storage.call(lambda fs: fs.ls(storage.path(), detail=True), extra=10*place.timeout)
    except FileNotFoundError: raise FileNotFoundError(f'{place.shown}: no such folder') from None
    folders = [o for o in found if o['type']=='directory' or o.get('islink') and os.path.isdir(o['name'])]
    names = [path.rstrip('/').rpartition('/')[2] for path in sorted(o['name'] for o in folders)]
    def below(path, name): return f"{path.rstrip('/')}/{name}"
    return [replace(place, words=[below(place.words[0], name)], url=below(place.url, name))
            for name in names if name!=INDEX_FOLDER]

def read_places(
    words:list, # `URL NAME` for Redis, or the URL or path of a folder; several of them, one after the other
    n:int=1, # How many places there must be
    optional_name:bool=False, # May the last name in Redis be left out?
    **options # `timeout` and `storage_options` of each `Place`
)->list: # `n` places
    "The places that words of the command line name; raises `UsageError`"
    places,rest = [],list(words)
    while rest and len(places)<n:
        word = rest.pop(0)
        place = Place([word], url_of(word), **options)
        if place.is_redis and rest:
            place.name = rest.pop(0)
            place.words.append(place.name)
        elif place.is_redis and not (optional_name and len(places)==n-1): raise _no_name(word)
        places.append(place)
    if len(places)<n:
        what = 'a place is needed,' if n==1 else f'{n} places are needed, each of them'
        raise UsageError(f'{what} URL NAME in Redis or the folder of shards')
    if rest: raise UsageError(f"{' '.join(rest)!r} is too much after {' '.join(w for p in places for w in p.words)}")
    return places

def _no_name(word): return UsageError(f'{word}: the name of the dataset is missing: {word} NAME')

def split_sources(words:list)->tuple:
    "The words of `ingest` that name sources, and those that name the place of the dataset; raises `UsageError`"
    is_redis = [url_of(word).startswith(REDIS_SCHEMES) for word in words[-2:]]
    if is_redis and is_redis[-1]: raise _no_name(words[-1])
    n = 2 if any(is_redis) else 1
    if len(words)<=n: raise UsageError('a source and a place are needed: SOURCE URL NAME in Redis, or SOURCE FOLDER')
    return words[:-n],words[-n:]

# --- Sources

# In Python, the user chooses the source: `image_samples(folder)`, `csv_samples(file)`. In a shell, the files choose it.
# What they are is decided by their names, in one table. If two kinds fit, the error names both, and `--kind` chooses.

@dataclass
class SourceKind:
    "A kind of source"
    what:str # What it reads, for messages
    open:object # Function of a path or a list of paths; its other parameters are options of the command line
    suffixes:tuple # Of its files
    markers:tuple = () # Patterns of names of files that only a folder of this kind has

    def options(self)->list:
        "The names of what the function takes besides the path"
        return list(signature(self.open).parameters)[1:]

def saved_dataset(folder):
    "A dataset of HuggingFace that was saved to disk; raises `UsageError` without `datasets`, and for a list of folders"
    try: from datasets import load_from_disk   # an extra
    except ImportError: raise UsageError('a HuggingFace folder needs datasets: pip install datasets') from None
    if isinstance(folder, list): raise UsageError('give one HuggingFace folder, or SPLIT=FOLDER for each split')
    return load_from_disk(str(folder))

SOURCE_KINDS = { # a kind of source is one line here
    'images': SourceKind('image files', image_samples, tuple(sorted(image_extensions()))),
    'csv': SourceKind('CSV files', csv_samples, CSV_EXTENSIONS),
    'drawings': SourceKind('Quick, Draw! files', drawing_samples, ('.ndjson','.ndjson.gz','.ndjson.xz')),
    'tars': SourceKind('WebDataset tars', tar_samples, TAR_EXTENSIONS),
    'parquet': SourceKind('parquet files', table_samples, ('.parquet','.pq','.arrow','.feather','.ipc')),
    'arrays': SourceKind('files of arrays', array_samples, ('.npy','.npz','.h5','.hdf5','.hdf','.zarr'),
                         ('zarr.json','.zarray','.zgroup')),   # of zarr, whose files are folders
    'img2dataset': SourceKind('what img2dataset has downloaded', img2dataset_samples, (), ('*_stats.json',)),
    'huggingface': SourceKind('a folder that `save_to_disk` of HuggingFace datasets has written', saved_dataset, (),
                              ('dataset_info.json','dataset_dict.json')),
}

def _files_in(path):
    "Yields the paths of the files below a folder, except hidden ones and those in hidden folders"
    for folder,folders,files in os.walk(path, followlinks=True):
        folders[:] = [f for f in folders if not f.startswith('.')]
        for f in files:
            if not f.startswith('.'): yield os.path.join(folder, f)

def source_kind(path:str|Path)->str:
    """The kind of source that reads the file or folder `path`, by the names of files: a key of `SOURCE_KINDS`

    Of a folder, the first 10,000 files count. A file whose name says the kind need not be there. Raises `UsageError` if
    several kinds fit, which it names, or none, and `FileNotFoundError` for a URL, and if none fits since there is no
    such file."""
    refuse_address(path)
    path = Path(path)
    names = [path.name]
    if path.is_dir():
        for name,kind in SOURCE_KINDS.items():
            if any(next(path.glob(marker), None) for marker in kind.markers): return name
        names = list(islice(_files_in(path), 10_000))
    found = {name:file for name,kind in SOURCE_KINDS.items() for file in names
             if file.lower().endswith(kind.suffixes)}
    if 'tars' in found: found.pop('parquet', None)   # img2dataset writes a parquet file beside each tar
    if len(found)==1: return next(iter(found))
    if found:
        files = ', '.join(f'{name}: {os.path.relpath(file, path)}' for name,file in found.items())
        raise UsageError(f'{path} has files of several kinds ({files}); --kind says which to read')
    if not path.exists(): raise FileNotFoundError(f'{path}: no such file or folder')
    suffixes = ', '.join(s for kind in SOURCE_KINDS.values() for s in kind.suffixes)
    raise UsageError(f'{path}: what is this? Known are {suffixes}, and folders of them. --kind says how to read it, '
                     'and a source in Python reads anything')

# Options are passed on to the function that makes the source. One that it does not have is an error, which names those
# that it has.

def source_of(paths:list, kind:str=None, **options):
    """The source that reads `paths`, which are of one `kind`: a key of `SOURCE_KINDS`, by default by their names

    `options` are those of the function of the kind, such as `label=` of `image_samples`. Raises `UsageError` for an
    option that this kind of source does not have, for files of several kinds or an unknown one, and
    `FileNotFoundError`; and what the function of the kind raises."""
    if '' in paths: raise UsageError("'' is no source; '.' is the current folder")
    kinds = {kind or source_kind(path) for path in paths}
    if len(kinds)>1: raise UsageError(f"sources of one kind are needed, not {', '.join(sorted(kinds))}")
    kind = SOURCE_KINDS[kinds.pop()]
    wrong = [flag(name) for name in options if name not in kind.options()]
    if wrong:
        takes = ', '.join(map(flag, kind.options())) or 'none'
        raise UsageError(f"{', '.join(wrong)}: no option of {kind.what}, whose options are: {takes}")
    return kind.open(paths[0] if len(paths)==1 else paths, **options)

def sources_of(
    words:list, # Paths, or `SPLIT=PATH` for each split
    kind:Literal[*SOURCE_KINDS]=None, # What the source is; default: by the names of the files
    **options # As in `source_of`
): # What `to_redis` takes
    """The source that words of the command line name; a dict `{split: source}` if they name splits

    Raises what `source_of` raises, and `UsageError` if only some of the words name a split."""
    paths = {}
    for word in words:
        split,equals,path = word.partition('=')
        if equals and re.fullmatch(r'\w+', split) and not os.path.exists(word): paths.setdefault(split, []).append(path)
        else: paths.setdefault(None, []).append(word)
    if None in paths and len(paths)>1: raise UsageError('either all sources are SPLIT=PATH, or none of them is')
    sources = {split:source_of(paths[split], kind, **options) for split in paths}
    return sources[None] if None in sources else sources
