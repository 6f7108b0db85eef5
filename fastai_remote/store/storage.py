"""A folder on a disk, on S3, or on any other file system that fsspec supports

Docs: page `store/storage`"""
import errno, hashlib, os, re, shutil, stat, tempfile, time
from contextlib import contextmanager, suppress
from multiprocessing.context import get_spawning_popen
from urllib.parse import unquote

import fsspec
from fastcore.basics import chunked

from ..clock import monotonic
from ..core import StoreError, StoreFull, StoreNotFound, StoreUnavailable
from ..parallel import OwnedFolder
from .connection import (
    call_in_thread, chain_links, check_seconds, DeadlinePassed, hidden_names, Opener, public_options, public_url,
    Retries, Secret, secret_texts, SecretOptions)
from .bounded import (
    Deadline, is_http, is_limited, MAX_FILE, open_folder, opens_at_once, ShortAnswer, UnusableAnswer)

# --- Options and their secrets

# A URL may contain a password or a signature, and `storage_options` contain keys and tokens under many names. What is
# shown and saved is decided by a list of harmless options, see `public_options`.

class s3_options(SecretOptions):
    "Options of an S3 server for `storage_options=`; the access key and its secret are not shown or pickled"
    def __init__(self,
        url:str, # The server, `http://host:port` or `https://…`
        access_key:str=None, # Default: the usual chain (environment, `~/.aws`, instance)
        secret_key:str=None, # As `access_key`
        **kwargs # More options for `s3fs.S3FileSystem`
    ):
        options = {'endpoint_url':url, 'key':access_key, 'secret':secret_key, **kwargs}
        super().__init__({k:v for k,v in options.items() if v is not None})
    def __repr__(self): return f's3_options({super().__repr__()})'
    __str__ = __repr__
    def __reduce__(self): return dict,(public_options(self),)

# --- A folder

# `StorageLink` contains an address and options, so its pickle is small. Each process connects when it first needs to. A
# worker that `multiprocessing` spawns receives the secrets through the pipe that starts it. A saved pickle contains
# none: where it is loaded, the usual chain of credentials applies, or another URL in `FASTAI_REMOTE_URL`.

_least_part,_first_part,_largest_part = 1<<16,1<<19,1<<23   # bytes of a part of a file

class StorageLink:
    """The address of a folder on any file system that fsspec supports, and this process's client of it

    Connects when it is first used, in each process by itself. Neither `repr` nor a saved pickle contains secrets."""
    url = '' # Address without secrets; for `repr`, if `__init__` fails
    export_note = '' # After loading an export, for messages: that `FASTAI_REMOTE_URL` has named the folder
    def __init__(self,
        # A path, or any fsspec URL: `s3://bucket/folder`. A password or a signature in it is used and not shown
        url:str|os.PathLike,
        timeout:float=20., # Seconds for all attempts together, then `StoreUnavailable`; not for a local folder
        storage_options:dict=None, # For fsspec's file system: `endpoint_url`, `key`, `secret`, `profile`, `anon`, …
    ):
        url,storage_options = os.fspath(url),SecretOptions(storage_options or {})   # also in tracebacks
        if '://' in url: url = url.strip()   # with a blank before it, it would be a path, and its password shown
        url = Secret(url)
        if re.search(r'\.(tar|tar\.gz|tgz)/?$', _folder_link(url)[1]):
            raise ValueError(f'{public_url(url)}: give the folder that holds the tars')
        check_seconds(timeout=timeout)
        self.url,self._secret_url,login = _split_url(url)
        self.timeout = timeout
        self._options = SecretOptions({**login, **storage_options})
        self._not_kept = [] # Names of options that were not saved with the pickle from which this was loaded
        self._client = 0,None # The process, and its client
        self._root = None # Path of the folder, as the file system calls it
        self._subfolders = {} # Those that `subfolder` returned, by name: each has a client of its own
        self.has_answered = False # Has a call succeeded?
        self._part_bytes = _first_part # Of a file that is read in parts: grows and shrinks with the speed of the link
        self.is_relocatable = True # Does `FASTAI_REMOTE_URL` replace the folder, when this is loaded from a pickle?

    def reveal(self)->dict:
        "The arguments of this storage, secrets included: for sending it to a worker, never for saving"
        return SecretOptions(url=self._secret_url, timeout=self.timeout, storage_options=self._options)

    def opener(self)->Opener:
        "Recreates this storage in a worker, secrets included"
        return Opener(type(self), self.url, **self.reveal())

    @property
    def fs(self)->fsspec.AbstractFileSystem:
        """This process's client, an fsspec file system, which is made when it is first used

        Raises `ImportError` if a library is missing, and `ValueError` or `TypeError` for a wrong URL or option."""
        process,client = self._client
        if process==os.getpid(): return client
        try: client,root = open_folder(self._secret_url, self._options, self.timeout)
        except (ImportError,ValueError,TypeError) as e:
            hint = ''
            if 'Protocol not known' in str(e):
                hint = ': want a path, or a URL of a file system that fsspec has, such as s3://bucket/folder'
            raise type(e)(f'{self.url}: {e}{hint}') from e
        except LookupError as e:   # of some file systems whose URL lacks a part
            raise ValueError(f'{self.url}: {type(e).__name__} {e}: the URL lacks a part that {_scheme(self.url)}:// '
                             'needs, or it belongs into storage_options=') from e
        self._root,self._client = Secret(root),(os.getpid(), client)
        return client

    @property
    def address(self)->str:
        "Text that says which folder this is: its URL and, if they are given, server and account; without secrets"
        options = {**self._options, **self._options.get('client_kwargs', {})}
        if _scheme(self.url) in ('s3','s3a') and 'endpoint_url' not in options:
            options['endpoint_url'] = os.environ.get('AWS_ENDPOINT_URL_S3') or os.environ.get('AWS_ENDPOINT_URL')
        server = (options.get(name) for name in ('endpoint_url','host','port','account_name','project'))
        return ' '.join([self.url, *(public_url(str(value)) for value in server if value)])

    @property
    def local(self)->bool:
        "Is this a folder of this machine?"
        return '://' not in self.url

    @property
    def name(self)->str:
        "The last part of the path; for the root of an archive, that of its file"
        _,folder,others = _folder_link(self.url)
        if others and folder.endswith('://'): folder = others[-1]
        return folder.rstrip('/').rsplit('/', 1)[-1]   # in `url`, which is public, there is no query

    def __getstate__(self):
        is_saved = get_spawning_popen() is None   # else a worker is being spawned, over a pipe of its own
        state = {**self.__dict__, '_client':(0,None), '_subfolders':{}, 'is_saved':is_saved}
        if not is_saved: return state
        lost = hidden_names(self._options)
        if self._secret_url!=self.url: lost.append('the user or the signature in the URL')
        return {**state, '_options':public_options(self._options), '_secret_url':None, '_root':None,
                '_not_kept':sorted({*self._not_kept, *lost})}

    def __setstate__(self, state):
        is_saved = state.pop('is_saved')
        self.__dict__.update(state)
        if not is_saved: return
        self._options,self._secret_url = SecretOptions(self._options),Secret(self.url)
        url = os.environ.get('FASTAI_REMOTE_URL', '')   # it may be the URL of a Redis server
        if url and self.is_relocatable and not re.match('(rediss?([+]sentinel)?|unix)://', url):
            self.url,self._secret_url,login = _split_url(url)
            self.export_note = f'; after it was exported, FASTAI_REMOTE_URL names the folder {self.url}'
            self._options.update(login)

    def _secret_texts(self): return secret_texts(self._options, self._secret_url)

    def __copy__(self): return self
    def __deepcopy__(self, memo): return self
    def __repr__(self): return f'{type(self).__name__}({self.url!r})'

    def call(self,
        f, # Called with the file system; must be safe to repeat
        timeout:float=None, # Seconds for all attempts together; default: the storage's
        extra:float=0., # Seconds that an attempt may take in addition, once it has begun
    ):
        """The result of `f(fs)`, which is repeated with increasing pauses while the server is away or busy

        An attempt is cut off at the deadline, whatever the server does. Until the storage has answered for the first
        time, attempts start for at most 5 seconds. For a local folder, there is one attempt, without a deadline. Raises
        `StoreUnavailable`, `StoreFull`, `StoreNotFound` (no such bucket), and errors of paths, such as
        `FileNotFoundError`, as they are."""
        if timeout is None: timeout = self.timeout
        starting = timeout if self.has_answered else min(5., timeout)
        retries = Retries(self.url, starting, pause=.05, longest_pause=2.,
                          secrets=None if self.local else self._secret_texts, advice=self._advice())
        deadline = retries.began+timeout+extra
        client,renewed = None,False
        def attempt():
            nonlocal client
            client = self._client[1]   # `None` if it is made in this attempt
            result = self._call_until(deadline, f)
            self.has_answered = True
            return result
        def handle(error):
            nonlocal renewed
            if self.has_answered and not renewed and not self.local and _is_refusal(error):
                if client is not None: self._forget_client(client)
                renewed = True
                return False   # no pause
            return self._handle(error, retries)
        return retries.call(attempt, handle)

    def _call_until(self, deadline, f):
        """The result of `f(fs)`; raises `DeadlinePassed` at `deadline`, a time of `monotonic()`, and what `f` raises

        A local folder has no deadline."""
        if self.local: return f(self.fs)
        # some file systems connect when they are made
        if self._client[0]!=os.getpid() and not opens_at_once(self.url):
            call_in_thread(lambda: self.fs, deadline-monotonic())
        client = self.fs
        limited = Deadline(client, deadline)
        try: return f(limited)
        finally:
            if limited.is_abandoned: self._forget_client(client)   # its connection is in use

    def _advice(self):
        "What to do, for the end of a message, if this was loaded from a pickle that lacks secrets; else ''"
        if not self._not_kept: return ''
        return (f"; secrets are not kept in exports (here: {', '.join(self._not_kept)}): set the usual environment "
            '(AWS_ACCESS_KEY_ID, …) or FASTAI_REMOTE_URL, or open it again with these options')

    def _forget_client(self, client):
        """Connect anew when used next, unless `client` is no longer this storage's, as another thread has done so
        already

        The connections of `client` are closed when no call uses it any more: a call that still runs refers to it."""
        if self._client[1] is client: self._client = 0,None

    def _handle(self, error, retries):
        """True, to pause before another attempt, if one may succeed; as `handle` of `Retries.call`

        If not, raises `StoreFull`, `StoreNotFound`, `StoreUnavailable`, or `error` itself."""
        if isinstance(error, UnusableAnswer): raise retries.unavailable(str(error)) from error
        if _is_full(error): raise StoreFull(f'{self.url}: no room: {retries.hide(str(error))}') from error
        if isinstance(error, FileNotFoundError) and _error_code(error)=='NoSuchBucket':
            raise StoreNotFound(f'{self.url}: {retries.hide(str(error))}') from error
        if _is_refusal(error) and not self.local:
            lacks = re.search('locate credentials', str(error))
            hint = '' if not lacks else (
                '; keys are taken from storage_options=, such as s3_options(…), from the environment '
            "(AWS_ACCESS_KEY_ID, …) or ~/.aws; a public bucket needs storage_options={'anon':True}")
            raise StoreUnavailable(f"{retries.unavailable(f'refused: {error}')}{hint}{retries.advice}") from error
        if _is_temporary(error) and not self.local: return True
        is_of_system = isinstance(error, OSError) and not isinstance(error, _path_errors)
        is_known = isinstance(error, (StoreError,ImportError,ValueError,TypeError,MemoryError,*_path_errors))
        if is_of_system or not self.local and (_is_of_client(error) or not is_known):
            raise retries.give_up(error) from error
        raise error

def _scheme(url): return url.split('://')[0].split('::')[0] if '://' in url else ''

def _folder_link(url):
    """`(before, link, after)`: two lists, and the part of a chain between them that has the path of the folder

    It is the first with `://`: in `simplecache::s3://bucket/folder`, the second one. A path is a chain of one part."""
    links = chain_links(url)
    k = next((k for k,link in enumerate(links) if '://' in link), len(links)-1)
    return links[:k],links[k],links[k+1:]

def _hosts(url):
    """Where the parts of a chain lie: a list of `scheme://host:port`, of `scheme://` for buckets, and of '' for paths

    A bucket is no host, and lies where the options say. Of schemes that are not known here, a part before an `@` may
    name a host, too, and is kept."""
    hosts = []
    for link in chain_links(url):
        scheme,mark,rest = link.partition('://')
        host = re.split('[/?#]', rest)[0]
        if scheme in ('s3','s3a','gs','gcs'): host = ''
        elif scheme in ('http','https','ftp','sftp','ssh','smb'): host = host.rpartition('@')[2].lower()
        hosts.append(f'{scheme}://{host}' if mark else '')
    return hosts

def _is_address(url):
    """Are the ports in `url` numbers? They are not if a password contains a slash

    Nor is a URL valid whose password contains `::`, which ends a part of a chain."""
    if re.search(r'://[^/?#]*::[^/?#]*@', re.sub(r'\[.*?\]', '', url)): return False
    hosts = [re.search(r'://(?:[^/?#]*@)?([^/?#]*)', link) for link in chain_links(url)]
    return not any(host and re.search(r':(?!\d+$)', re.sub(r'\[.*?\]', '', host[1])) for host in hosts)

def _split_url(url):
    """`(shown, url, options)`: the URL that may be shown; the URL for fsspec, a `Secret`; what was taken out of it

    `options` are `SecretOptions` with `auth`, user and password, for HTTP, and with `password` otherwise; empty if
    there is none, and for a chain of URLs. A plain path becomes absolute. Raises `ValueError` for a malformed URL,
    without showing it, and for an empty one."""
    if not url: raise ValueError("'' is no folder; '.' is the current one")
    if not _is_address(url):
        raise ValueError('not a URL: the port must be a number, '
                         'and :, /, @, # and ? in a password must be quoted (urllib.parse.quote)')
    if _scheme(url) in ('','file','local'):
        url = os.path.abspath(os.path.expanduser(url.split('://', 1)[-1]))
        return url,Secret(url),SecretOptions()
    shown = public_url(url)
    if '::' in url or shown==url: return shown,Secret(url),SecretOptions()
    scheme,_,rest = url.partition('://')
    host = re.split('[/?#]', rest)[0]
    login = host.rpartition('@')[0]
    user,_,password = login.partition(':')
    if is_http(url):
        options = SecretOptions(auth=(unquote(user), unquote(password))) if login else SecretOptions()
        return shown,Secret(f"{scheme}://{rest[len(login)+1 if login else 0:]}"),options
    if not password: return shown,Secret(url),SecretOptions()
    return shown,Secret(shown),SecretOptions(password=unquote(password))

# --- Calls

# When a server refuses access, the error is raised at once. A client that has worked before may have credentials that
# have expired, so it connects anew once, with credentials from the same chain. A connection that breaks, and a reply of
# 500 or 503, are temporary: the call is repeated with increasing pauses until the deadline. An attempt that has not
# ended then is cut off, whatever the server does.

_temporary_errnos = {errno.EBUSY, errno.EIO, errno.EAGAIN, errno.EPIPE, errno.ECONNREFUSED, errno.ECONNRESET,
    errno.ECONNABORTED, errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH, getattr(errno, 'EREMOTEIO', errno.EIO),
    None}
_client_libraries = 'botocore','aiobotocore','aiohttp','urllib3','requests','http','httpx','httpcore','asyncio'
_credential_codes = 'InvalidToken','TokenRefreshRequired','AuthorizationHeaderMalformed','ExpiredTokenException'
_path_errors = FileNotFoundError,FileExistsError,NotADirectoryError,IsADirectoryError
_status_names = 'status','status_code','code'   # of aiohttp; of Azure's SDK, requests and httpx; of gcsfs

def _error_code(error):
    "The code of S3 in the cause of `error`, or in `error` if it has none, such as 'NoSuchBucket'; else ''"
    response = getattr(error.__cause__ or error, 'response', None)
    return response.get('Error', {}).get('Code', '') if isinstance(response, dict) else ''   # others have an object

def _status(error):
    "The status of HTTP that `error`, or its `response`, is about, 400 to 599; `None` if it does not tell"
    for holder in (error, getattr(error, 'response', None)):
        for name in _status_names:
            status = str(getattr(holder, name, ''))   # that of gcsfs may be a text
            if re.fullmatch('[45][0-9]{2}', status): return int(status)

def _is_refusal(error):
    "Does the server refuse access, because of missing permissions, or of missing or expired credentials?"
    if isinstance(error, PermissionError) or re.search('Credential|Profile|Token', type(error).__name__): return True
    return _error_code(error) in _credential_codes or _status(error) in (401,403,407)

def _is_temporary(error):
    "May another attempt succeed?"
    if isinstance(error, (TimeoutError,ConnectionError)): return True
    status = _status(error)
    if status is not None: return status in (408,425,429) or status>=500
    if _is_of_client(error): return not re.search('Validation|Parameter|Profile|Config', type(error).__name__)
    if isinstance(error, (FileNotFoundError,FileExistsError)): return False
    return isinstance(error, OSError) and error.errno in _temporary_errnos

def _is_of_client(error): return type(error).__module__.split('.')[0] in _client_libraries

def _is_full(error): return isinstance(error, OSError) and error.errno in (errno.ENOSPC,errno.EDQUOT)

# --- Reading files

# `Storage` is a `StorageLink` with the files of the folder.
#
# Many ranges are read at the same time. If an answer ends before its range, either the file ends there, or the
# connection was cut off; the latter counts as no answer, and the range is requested again, as long as the deadline
# allows. An answer is never judged by how often it came. An answer with other bytes than those that were asked for is
# an error, see `bounded`.
#
# The timeout is for one call, so a large file is read in `parts`. Each part has a deadline of its own, and the slower
# the link is, the smaller parts become. A file that comes steadily may take any time.

_ranges_at_once = 64   # enough requests to hide a server's latency, few enough for a server that is shared
_ranges_per_call,_bytes_per_call = 1024,1<<25   # a larger request is divided into calls with a deadline each
_slowest_upload = 100_000   # bytes per second

class Storage(StorageLink):
    "A folder on any file system that fsspec supports, with one deadline for each call"
    def path(self,
        name:str='' # A file of the folder; default: the folder itself
    )->str:
        "The path of `name`, as the file system calls it; may contain a signature"
        root = str(self.fs and self._root)   # known when connected
        if not name: return root
        folder,mark,query = root.partition('?') if is_http(root) else (root,'','')
        return f"{folder.rstrip('/')}/{name}{mark}{query}"

    def beside(self,
        url:str|os.PathLike # Another folder; or a `Storage`, which is returned as it is
    )->'Storage':
        """The storage of another folder that belongs to the same dataset

        It gets the options of this one, with their secrets, if this one is a folder of this machine, or on the same
        host; otherwise it gets none of them. For buckets of S3 and Google Cloud Storage, the same scheme counts as the
        same host; of other URLs, all that is between `://` and the path must be the same."""
        if isinstance(url, Storage): return url
        other = Storage(url, self.timeout)
        is_known = self.local or _hosts(other.url)==_hosts(self.url)
        if is_known: other._options = SecretOptions({**self._options, **other._options})
        other.is_relocatable = False
        return other

    def read(self,
        name:str, # A file of the folder
        limit:int=MAX_FILE # Bytes; more of them are an error
    )->bytes:
        "The content of a file; raises `FileNotFoundError`, and `StoreUnavailable`, also if it is larger than the limit"
        content, = self.ranges([name], [0], [limit+1], beyond=True)
        if content is None: raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f'{self.url}/{name}')
        if len(content)<=limit: return content
        raise StoreUnavailable(f'{self.url}: {name} has more than {limit:,} bytes, which is the limit')

    def ranges(self,
        names:list, # Files, one per range
        starts:list, # First byte of each range
        ends:list, # One past the last byte of each range
        beyond:bool=False, # May a range end beyond its file? If not, a short answer is looked into, see below
    )->list: # Of `bytes`, shorter than asked for where the file ends; `None` where there is no such file
        """Read ranges of files, many at the same time; raises `StoreUnavailable`

        An empty range is `b''`, and its file is not looked for; one that begins after the end of its file is `b''`,
        too. An answer that ends before its range is right where the file ends there. Otherwise, the connection has cut
        it off, and it is requested again, as if there had been no answer. HTTP and S3 say in each answer how long the
        file is; other file systems are asked for it, except with `beyond`.

        The timeout is for 32 MiB or 1024 ranges. More of them are read in several calls, with a deadline each."""
        # an empty range means the whole file to some clients, so it is not asked for
        result = [b'' if end<=start else None for start,end in zip(starts, ends)]
        is_believed = beyond or self.local or is_limited(self.url)
        group,size = [],0
        for k,content in enumerate(result):
            if content is not None: continue
            length = ends[k]-starts[k]
            if group and (len(group)==_ranges_per_call or size+length>_bytes_per_call):
                self._read_group(group, names, starts, ends, is_believed, result)
                group,size = [],0
            group.append(k)
            size += length
        if group: self._read_group(group, names, starts, ends, is_believed, result)
        return result

    def _read_group(self, todo, names, starts, ends, is_believed, result):
        """Put the ranges with the indices `todo` into `result`, a list; what is not there stays `None`

        The other arguments as in `ranges`; an answer that is too short is right if `is_believed`. Indices are removed
        from `todo` when they are complete, so that only the others are requested again. Raises `StoreUnavailable`."""
        def ask(fs):
            limit = {'batch_size':_ranges_at_once} if fs.async_impl else {}
            files = [self.path(names[k]) for k in todo]
            wanted = [int(starts[k]) for k in todo],[int(ends[k]) for k in todo]
            if self.local: answers = [_content_at(*place) for place in zip(files, *wanted)]
            else: answers = fs.cat_ranges(files, *wanted, on_error='return', **limit)
            failure = None
            for k,file,answer in zip(list(todo), files, answers):
                if isinstance(answer, Exception) and _is_beyond_end(answer): answer = b''
                if isinstance(answer, bytes) and not is_believed:
                    answer = _whole_answer(fs, file, answer, int(starts[k]), int(ends[k]), names[k])
                is_missing = isinstance(answer, FileNotFoundError) and _error_code(answer)!='NoSuchBucket'
                if isinstance(answer, Exception) and not is_missing:
                    failure = answer
                    continue
                todo.remove(k)
                if isinstance(answer, bytes): result[k] = answer
            if failure is not None: raise failure
        self.call(ask)

    def parts(self,
        name:str, # A file of the folder
        size:int, # Its bytes
        parallel:int=4, # Requests at the same time
        largest:int=_largest_part, # Bytes of a request
    ): # Iterator of `bytes`; it yields `None` and ends if there is no such file
        """Read a file in parts, to its end or to where it is cut off; raises `StoreUnavailable`

        `parallel` parts are a call, with a deadline of its own. The slower the link is, the smaller parts become, so
        that a file that comes steadily may take any time. A size that took too long is not tried again in this file."""
        start = 0
        while start<size:
            part = min(self._part_bytes, largest)
            starts = list(range(start, min(size, start+part*parallel), part))
            ends = [min(size, first+part) for first in starts]
            began = monotonic()
            try: contents = self.ranges([name]*len(starts), starts, ends)
            except StoreUnavailable as e:
                if part<=_least_part or not _is_timeout(e.__cause__): raise
                self._part_bytes,largest = _least_part,max(part//4, _least_part)
                continue
            seconds = monotonic()-began
            if seconds<self.timeout/8 and part==self._part_bytes: self._part_bytes = min(4*part, _largest_part)
            elif seconds>self.timeout/2: self._part_bytes = max(part//4, _least_part)
            for first,end,content in zip(starts, ends, contents):
                yield content
                if content is None or len(content)<end-first: return
            start = ends[-1]

    def size_and_stamp(self,
        name:str # A file of the folder
    )->tuple: # Bytes; a text that is another when the file was written again, `None` if the storage does not tell
        "The size of a file, and its ETag or time; raises `FileNotFoundError`, `StoreUnavailable`"
        if self.local:
            status = self.call(lambda fs: os.stat(self.path(name)))
            return status.st_size,f'mtime_ns {status.st_mtime_ns}'
        info = self.call(lambda fs: fs.info(self.path(name)))
        stamp = next((f'{key} {info[key]}' for key in _stamps if info.get(key) is not None), None)
        return info.get('size'),stamp

    def names(self,
        folder:str='', # A folder in this one; default: this one
        # Seconds that the listing may take in addition to the timeout, which is for its start; default: 10 timeouts,
        # since a folder with a million files takes a thousand requests
        extra:float=None,
    )->list:
        "Names of the files and folders in `folder`, sorted; empty if there is no such folder"
        if extra is None: extra = 10*self.timeout
        return sorted(path.rstrip('/').rsplit('/', 1)[-1] for path in self._list(folder, extra))

    def _list(self, folder, extra):
        "The paths of what is in `folder`, a list; those of folders on the web end in `/`"
        try: return self.call(lambda fs: fs.ls(self.path(folder), detail=False), extra=extra)
        except (FileNotFoundError,NotADirectoryError): return []

    def files(self)->list: # Paths relative to this folder, sorted
        """The files, hidden ones too, in this folder and in its subfolders at any depth, except for hidden subfolders

        Over HTTP, only those in this folder. Empty if there is no such folder."""
        if is_http(self.url):
            paths = self._list('', 10*self.timeout)
            return sorted(path.rsplit('/', 1)[-1] for path in paths if not path.endswith('/'))
        try: root,paths = self.call(lambda fs: (self.path().rstrip('/'), fs.find(self.path())), extra=10*self.timeout)
        except (FileNotFoundError,NotADirectoryError): return []
        # the root of an archive is '', and its paths have no slash in front
        names = [path[len(root):].lstrip('/') for path in paths if not root or path.startswith(f'{root}/')]
        return sorted(name for name in names if not re.search(r'(?:^|/)\.[^/]*/', name))

    def subfolder(self,
        name:str # Name of a folder in this one
    )->'Storage':
        """The storage of a folder in this one, with the same options: one object, and so one client, for each `name`

        Raises `StoreError` for a symbolic link: what is behind it belongs to somebody else."""
        if self.is_link(name):
            raise StoreError(f'{self.path(name)} is a symbolic link in place of a folder of the dataset: remove it')
        if name not in self._subfolders:
            self._subfolders[name] = Storage(self._subfolder_url(name), self.timeout, self._options)
        return self._subfolders[name]

    def _subfolder_url(self, name):
        before,link,after = _folder_link(self._secret_url)
        folder,mark,query = link.partition('?') if is_http(link) else (link,'','')
        if not folder.endswith('://'): folder = f"{folder.rstrip('/')}/"
        return '::'.join([*before, f'{folder}{name}{mark}{query}', *after])

    # --- Writing

    # A file appears when it is complete. On a disk, it is written under a temporary name and renamed. Elsewhere, it is
    # uploaded from a temporary file, in parts if it is large. An upload may take longer than the timeout, if at least
    # 100 KB per second are accepted.

    @contextmanager
    def create(self,
        name:str # A file of the folder
    ): # A binary file to write to
        """Context manager: a file to write, which appears, or replaces the one of this name, if the block raises no
        error

        An upload may take longer than the timeout: it may be as slow as 100 KB per second. Raises `StoreFull`,
        `StoreUnavailable`; in a local folder, an `OSError` of the block becomes one of these, too."""
        if not self.local:
            try:
                with OwnedFolder('upload') as folder, open(os.path.join(folder, 'file'), 'w+b') as file:
                    yield file
                    file.flush()
                    size = os.fstat(file.fileno()).st_size
                    self.call(lambda fs: fs.put_file(file.name, self.path(name)), extra=size/_slowest_upload)
            except OSError as e:
                if _is_full(e): raise StoreFull(f'{tempfile.gettempdir()}: no room for a temporary file: {e}') from e
                raise
            return
        path = self.path(name)
        # a name of its own, as an abandoned file may be removed at any time
        temporary = f'{path}.{os.getpid()}{time.monotonic_ns()}.part'
        try:
            self.call(lambda fs: fs.makedirs(os.path.dirname(path), exist_ok=True))
            with open(temporary, 'wb') as file: yield file
            os.replace(temporary, path)
        except OSError as e:
            if _is_full(e): raise StoreFull(f'{self.url}: no room: {e}') from e
            raise StoreUnavailable(f'{self.url}: {e}') from e
        finally:
            if os.path.exists(temporary): os.unlink(temporary)

    def write(self,
        name:str, # A file of the folder
        b:bytes # Its content
    ):
        "Create or replace a file at once; raises `StoreFull`, `StoreUnavailable`"
        if not self.local:
            return self.call(lambda fs: fs.pipe_file(self.path(name), b), extra=len(b)/_slowest_upload)
        with self.create(name) as f: f.write(b)

    def is_link(self,
        name:str # A file or a folder of this folder
    )->bool:
        "Is it a symbolic link on this machine?"
        return self.local and os.path.islink(self.path(name))

    def remove(self,
        names:list, # Files of the folder; those that do not exist are ignored
    ):
        """Remove files; raises `StoreUnavailable`

        Of a symbolic link, also of one in place of a folder on the way to a file, the link is removed, and nothing that
        is behind it."""
        names = [self._link_above(name) or name for name in names]
        for group in chunked(names, 1000):   # of a request
            if len(group)>1 and self.call(lambda fs: self._remove_together(fs, group)): continue
            for name in group:
                with suppress(FileNotFoundError):
                    if self.is_link(name): os.unlink(self.path(name))
                    else: self.call(lambda fs: fs.rm_file(self.path(name)))

    def _link_above(self, name):
        "The first folder on the way to file `name` that is a symbolic link; `None` if there is none"
        folders = name.split('/')[:-1]
        above = ('/'.join(folders[:k+1]) for k in range(len(folders)))
        return next((folder for folder in above if self.is_link(folder)), None)

    def _remove_together(self, fs, names):
        """Remove the files `names` with one request, if the file system has such a request. Returns whether it
        succeeded

        If not, some of them may be gone, and the caller removes them one by one."""
        paths = [self.path(name) for name in names]
        # `rm` takes a path with one of these characters as a pattern, and removes files of other folders
        if not hasattr(fs, '_bulk_delete') or re.search(r'[*?[]', ''.join(paths)): return False
        try: fs.rm(paths)
        except DeadlinePassed: raise
        except OSError: return False   # the server may not support it, or a file may not exist
        return True

    def free_space(self)->tuple: # Bytes free, bytes in all
        "Free space on the disk of the folder; `None, None` if it is not on this machine"
        if not self.local: return None,None
        folder = self.path()
        while not os.path.exists(folder): folder = os.path.dirname(folder)
        usage = shutil.disk_usage(folder)
        return usage.free,usage.total

def as_storage(
    url:str|Storage, # A path or URL, or a `Storage`
    timeout:float=20., # As in `Storage`
    storage_options:dict=None # As in `Storage`
)->Storage:
    "`url` if it is a `Storage`, else a new one; raises `TypeError` if a `Storage` gets another timeout, or options"
    if not isinstance(url, Storage): return Storage(url, timeout, storage_options)
    is_other = dict(timeout=timeout not in (20., url.timeout), storage_options=bool(storage_options))
    given = ', '.join(option for option,other in is_other.items() if other)
    if given: raise TypeError(f'{given}: a Storage has its own; give them to Storage(…)')
    return url

def open_regular(
    path:str # A file on this machine
)->int: # Its descriptor, for reading
    """Open a regular file, also through links; raises `FileNotFoundError`, and `StoreUnavailable` for anything else

    A pipe would be waited for without end, and a device may never end."""
    try: fd = os.open(path, os.O_RDONLY|os.O_CLOEXEC|os.O_NONBLOCK)   # without waiting for the writer of a pipe
    except FileNotFoundError: raise
    except OSError as e: raise StoreUnavailable(f'{path}: {e.strerror}') from e
    if stat.S_ISREG(os.fstat(fd).st_mode): return fd
    os.close(fd)
    raise StoreUnavailable(f'{path}: not a regular file')

def _whole_answer(fs, file, answer, start, end, name):
    "`answer`, the bytes of a range of the file `name`; a `ShortAnswer` if it ends before the range and the file do"
    if len(answer)==end-start: return answer
    try: size = fs.info(file).get('size')
    except FileNotFoundError: size = None
    if size is None or size<=start+len(answer): return answer
    return ShortAnswer(f'{name}: {len(answer):,} bytes came of {min(size, end)-start:,}')

def _content_at(path, start, end):
    "The bytes from `start` to `end`, or to the end of the file; the error, as from `cat_ranges`, if that fails"
    try:
        with open(open_regular(path), 'rb') as file:
            file.seek(start)
            return file.read(max(0, min(end, os.fstat(file.fileno()).st_size)-start))   # memory for what is there only
    except Exception as e: return e.with_traceback(None)   # which would keep the frames that keep the error

def _is_timeout(error):
    "Has the time of a call passed, or that of a wait in a client library?"
    return isinstance(error, TimeoutError) or 'Timeout' in type(error).__name__

def _is_beyond_end(error):
    "Is this the error of a range that starts beyond the end of its file?"
    if isinstance(error, FileNotFoundError): return False
    return _error_code(error) in ('InvalidRange','416') or _status(error)==416

# What tells, in the answers of fsspec's file systems, that a file was written again; the first that there is
_stamps = 'ETag','etag','LastModified','Last-Modified','last_modified','mtime','last_write_time','created'

def stamp_number(
    stamp:str # From `Storage.size_and_stamp`, or `None`
)->int: # 1 to 2**63-1, another one for another stamp; 0 for `None`
    "A number for a stamp, as a table of shards has it"
    if stamp is None: return 0
    return 1+int.from_bytes(hashlib.sha256(stamp.encode()).digest()[:8], 'big')//2%((1<<63)-1)
