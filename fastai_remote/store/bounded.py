"""File systems whose answers are limited: in time, in bytes, and to the bytes that were asked for

Docs: page `store/bounded`"""

# A server may be slow, broken or somebody else's. What it sends must not cost unlimited time or memory, and must be
# what was asked for. fsspec's file systems read an answer to its end, whatever it is. This module opens file systems
# whose answers are limited.
#
# - **HTTP and S3.** At most the requested bytes are read. An answer to a request for a range must say in
#   `Content-Range` which bytes it has, and these must be the requested ones. Some servers ignore the header `Range` and
#   send the whole file: this is right only if the whole file is what was asked for. A file that is read as a whole, and
#   a listing, have at most `MAX_FILE` bytes, 1 GiB.
# - **Redirects over HTTP.** A server may send the client to another host. Headers, cookies and passwords do not go
#   there.
# - **Every file system.** A call ends at its deadline. Calls of asynchronous file systems, such as HTTP and S3, are
#   cancelled. Other calls, such as those over FTP, continue in a thread that nobody waits for.
#
# Chained URLs such as `simplecache::https://…` have a deadline, and no limit of bytes.

import functools, inspect, logging, os, re, weakref

import fsspec

from ..clock import monotonic
from ..core import LimitedBytes, TooLarge
from .connection import call_in_thread, DeadlinePassed, public_url, SecretOptions

# --- Bytes

# `bytes_to_read` compares the header of an answer with the request.

MAX_FILE = 1<<30   # bytes of a file that is read at once, such as an index, unless a smaller limit is given

class UnusableAnswer(Exception):
    "The answer of a server has too many bytes, or others than were asked for, or does not say which it has"

class ShortAnswer(ConnectionError):
    "An answer ends before the bytes that were asked for, and before the end of the file: another attempt may succeed"

def bytes_to_read(
    asked:str|None, # The header `Range` of the request, as 'bytes=0-99', with both ends; `None` for a whole file
    status:int, # Status of the answer, below 400
    content_range:str|None, # Its header `Content-Range`
    length:int|None, # Its header `Content-Length`
)->int:
    """The most bytes that the body of an answer may have; for a whole file, or a listing, this is always `MAX_FILE`

    Raises `UnusableAnswer` unless the headers show that the answer has only bytes that were asked for, and if a whole
    file has more than the limit; `ShortAnswer` if it lacks bytes that the file has."""
    if not asked:
        if length is None or length<=MAX_FILE: return MAX_FILE
        raise UnusableAnswer(f'an answer of {length:,} bytes, more than {MAX_FILE:,} bytes')
    first,last = map(int, re.fullmatch(r'bytes=(\d+)-(\d+)', asked).groups())
    what = f'asked for bytes {first} to {last}'
    if content_range:
        found = re.fullmatch(r'bytes (\d+)-(\d+)/(\d+|\*)', content_range.strip())
        start,end = map(int, found.groups()[:2]) if found else (-1,-1)
        if start==first and first<=end<=last and length in (None, end-start+1):
            if end<last and found[3]!='*' and end+1<int(found[3]):
                raise ShortAnswer(f'{what}, {end-start+1:,} bytes came: {content_range}')
            return end-start+1
        raise UnusableAnswer(f'{what}, but the server sent {content_range!r}, {_bytes(length)}')
    if status!=200: raise UnusableAnswer(f'{what}, but the server sent a part of the file without saying which')
    if first==0 and length is not None and length<=last+1: return length
    raise UnusableAnswer(f'the server ignores the header `Range`: {what}, it sent the whole file, {_bytes(length)}. '
                         'Shards can be read from a server that supports this header, or from a copy on this machine')

def _bytes(length): return 'of unknown length' if length is None else f'{length:,} bytes'

async def read_limited(
    read, # Awaited with a number of bytes, of which it returns at most so many, and none at the end
    limit:int # Bytes that are expected at most
)->bytes:
    "The rest of a stream; raises `UnusableAnswer` if it has more than `limit` bytes"
    content = LimitedBytes(limit, 'the answer')
    try:
        while part := await read(min(1<<20, limit+1-content.tell())): content.write(part)
    except TooLarge: raise UnusableAnswer(f'the server sent more than {limit:,} bytes') from None
    return content.getvalue()

# --- HTTP

# aiohttp, which fsspec uses, accepts a class for its answers and functions that are called before a redirect is
# followed. So no method of fsspec has to be replaced. Passwords and cookies are sent as headers, since only headers can
# be removed before a redirect.

@functools.cache
def _limited_response():
    "A subclass of `aiohttp.ClientResponse` that limits its body by `bytes_to_read`; aiohttp is only imported for HTTP"
    import aiohttp
    class LimitedResponse(aiohttp.ClientResponse):
        limited_body = None
        async def read(self):
            "The body; empty for an error, since nobody reads it"
            if self.status>=400: return b''
            if self.limited_body is None:
                try: self.limited_body = await self._read_limited()
                except BaseException:
                    self.close()
                    raise
            return self.limited_body

        async def _read_limited(self):
            asked,encoding = self.request_info.headers.get('Range'),self.headers.get('Content-Encoding', 'identity')
            if asked and encoding in ('gzip','deflate','br','zstd'):
                raise UnusableAnswer(f'asked for a range of bytes, the server sent them compressed ({encoding})')
            limit = bytes_to_read(asked, self.status, self.headers.get('Content-Range'), self.content_length)
            return await read_limited(self.content.read, limit)

        async def text(self, encoding=None, errors='strict'):
            return (await self.read()).decode(encoding or self.charset or 'utf-8', errors)
    return LimitedResponse

_harmless_headers = 'accept','accept-encoding','range','user-agent'

async def _remove_credentials(session, context, redirect):
    "Called before a redirect is followed: another host gets no headers that could be secret"
    from yarl import URL
    target = redirect.response.headers.get('Location') or redirect.response.headers.get('URI') or ''
    try: is_same = redirect.url.join(URL(target)).origin()==redirect.url.origin()
    except ValueError: is_same = False
    if is_same: return
    for name in {name for name in redirect.headers if name.lower() not in _harmless_headers}:
        redirect.headers.popall(name)

def _with_headers(options):
    "A copy of `options` of a session or a request, in which `auth` and `cookies` are put into the dict `headers`"
    import aiohttp
    options = dict(options)
    headers,auth = dict(options.pop('headers', None) or {}),options.pop('auth', None)
    cookies = dict(options.pop('cookies', None) or {})
    if auth is not None: headers['Authorization'] = aiohttp.BasicAuth(*auth).encode()
    if cookies:
        texts = {name:getattr(value, 'value', value) for name,value in cookies.items()}
        headers['Cookie'] = '; '.join(f'{name}={value}' for name,value in texts.items())
    return {**options, 'headers':headers}

def _hide_in_log(record):
    "Filter of the log of fsspec, which has URLs with the signature: makes them public in `record`; returns `True`"
    record.msg,record.args = re.sub(r'\w[\w+.-]*://\S+', lambda url: public_url(url[0]), record.getMessage()),()
    return True

def _http_options(options, timeout):
    """A copy of `options` for fsspec's HTTP file system, with limits of bodies, headers after a redirect, and times

    The times are `_waits(timeout)`. A `timeout` or `response_class` in its `client_kwargs` takes precedence."""
    import aiohttp
    options,client = _with_headers(options),_with_headers(options.get('client_kwargs') or {})
    options['headers'].setdefault('Accept-Encoding', 'identity')
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_remove_credentials)
    client['trace_configs'] = [*(client.get('trace_configs') or ()), trace]
    connect,read = _waits(timeout)
    limits = aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=read)
    return {**options, 'client_kwargs':{'timeout':limits, 'response_class':_limited_response(), **client}}

def _waits(timeout):
    """Returns for how many seconds to wait for a connection, and for the next bytes, in a call by HTTP or to S3

    It is half of `timeout`, the seconds that the call may take, so that there can be a second attempt. But it is at
    least 1, and at most 5 for a connection and 20 for bytes."""
    wait = max(1., timeout/2)
    return min(5., wait),min(20., wait)

# --- S3

_s3_config = dict(request_checksum_calculation='when_required', response_checksum_validation='when_required',
                  retries={'total_max_attempts':1})

@functools.cache
def _loader(data_path):
    """botocore's loader of its descriptions of services, which remembers them; one loader for each `data_path`

    `data_path` is the setting of botocore: a `str`, or `None`, the default, for the usual folders."""
    from botocore.loaders import create_loader
    return create_loader(data_path)

def _new_session(options):
    """A session of aiobotocore with `options`, a dict

    All sessions of this process, and those of processes that are forked from it, read the descriptions of S3 only once.
    That takes longer than most requests."""
    from aiobotocore.session import AioSession
    session = AioSession(**options)
    session.register_component('data_loader', _loader(session.get_config_variable('data_path')))
    return session

@functools.cache
def _limited_s3():
    """A subclass of `S3FileSystem` that limits answers by `bytes_to_read`, and makes its session by `_new_session`

    Raises `ImportError` without s3fs."""
    from s3fs import S3FileSystem
    class LimitedS3FileSystem(S3FileSystem):
        async def set_session(self, *args, **kwargs):
            if self._s3 is None and self.session is None:
                self.session = _new_session(self.kwargs)
            return await super().set_session(*args, **kwargs)

        async def _cat_file(self, path, version_id=None, start=None, end=None, **kwargs):
            bucket,key,version = self.split_path(path)
            request = {'Bucket':bucket, 'Key':key}
            if version_id or version: request['VersionId'] = version_id or version
            if start is not None or end is not None: request['Range'] = await self._process_limits(path, start, end)
            answer = await self._call_s3('get_object', **request)
            status,body = answer['ResponseMetadata']['HTTPStatusCode'],answer['Body']
            try:
                limit = bytes_to_read(request.get('Range'), status, answer.get('ContentRange'),
                                      answer.get('ContentLength'))
                return await read_limited(body.read, limit)
            finally: body.close()
    return LimitedS3FileSystem

def _s3_options(options, timeout):
    connect,read = _waits(timeout)
    config = {**_s3_config, 'connect_timeout':connect, 'read_timeout':read, **(options.get('config_kwargs') or {})}
    return {**options, 'config_kwargs':config}

# --- Opening a file system

is_http = re.compile('https?://').match   # Is this the URL of a folder on the web?
_is_s3 = re.compile('s3a?://').match

# The open clients of this process by `id`, and those that it inherited from its parent. The latter are kept: an event
# loop of the parent would have to close them, whose thread does not run here, and whose selector the parent still uses.
_clients,_inherited_clients = weakref.WeakValueDictionary(),[]

def _keep_inherited_clients():
    _inherited_clients.extend(_clients.values())
    _clients.clear()

os.register_at_fork(after_in_child=_keep_inherited_clients)

def is_limited(
    url:str # The URL of a folder
)->bool:
    "Does `open_folder` return a file system whose answers are limited, as `bytes_to_read` says?"
    return bool(is_http(url) or _is_s3(url))

def opens_at_once(
    url:str # The URL of a folder
)->bool:
    """Is it known, by the scheme of `url`, that `open_folder` returns without waiting for a server?

    `False` also for `file://`, though it does not wait."""
    return bool(is_limited(url) or '://' not in url or url.startswith('memory://'))

def open_folder(
    url:str, # A path, or any fsspec URL
    options:dict, # For fsspec's file system
    timeout:float, # Seconds for a later call with all its attempts: over HTTP and to S3, limits the time of a wait
)->tuple: # An fsspec file system; the path of the folder in it, `str`
    """The file system of `url`, and what it calls this folder

    Raises `ImportError` if a library is missing, `ValueError` or `TypeError` for options that do not exist."""
    options = SecretOptions({**options, 'skip_instance_cache':True, 'use_listings_cache':False})
    if 'http' in url: logging.getLogger('fsspec.http').addFilter(_hide_in_log)
    try:
        if is_http(url): options = _http_options(options, timeout)
        if _is_s3(url):
            kind = _limited_s3()
            client = kind(**{**kind._get_kwargs_from_urls(url), **_s3_options(options, timeout)})
            client.retries = 1   # the caller repeats, with one deadline for all attempts
            root = kind._strip_protocol(url)
        elif '://' not in url:   # `url_to_fs` would take a path with `::` for a chain
            client = fsspec.filesystem('file', **options)
            root = client._strip_protocol(url)
        else: client,root = fsspec.core.url_to_fs(url, **options)
    except ImportError as e: raise ImportError(f"{e}{'; pip install s3fs' if _is_s3(url) else ''}") from e
    _clients[id(client)] = client
    return client,root

# --- Deadlines

# `Deadline(fs, …)` has the methods of `fs`. The library raises no error at the deadline by itself: a silent server is
# waited for, and one that sends a byte per second is read for ever.

class Deadline:
    """Wraps a file system: a call raises `DeadlinePassed` if it has not returned at the deadline

    `is_abandoned` is true while a call runs in a thread, also after the deadline, or after Ctrl-C."""
    def __init__(self,
        fs:fsspec.AbstractFileSystem, # A file system
        deadline:float, # As `monotonic()` will be then
    ): self._fs,self._deadline,self.is_abandoned = fs,deadline,False

    def __getattr__(self, name):
        value = getattr(self._fs, name)
        if not callable(value): return value
        # fsspec makes these methods out of coroutines: with `timeout`, it cancels the coroutine when the time is over
        takes_timeout = inspect.iscoroutinefunction(getattr(value, '__wrapped__', None))
        def call(*args, **kwargs):
            seconds = self._deadline-monotonic()
            if seconds<=0: raise DeadlinePassed
            if not takes_timeout: return self._call_in_thread(lambda: value(*args, **kwargs), seconds)
            try: return value(*args, timeout=seconds, **kwargs)
            except fsspec.exceptions.FSTimeoutError: raise DeadlinePassed from None
        return call

    def _call_in_thread(self, f, seconds):
        """As `call_in_thread`; `is_abandoned` is true until `f` has ended

        This may be later, if the call does not return in time, or the user interrupts it."""
        def run():
            try: return f()
            finally: self.is_abandoned = False
        self.is_abandoned = True
        return call_in_thread(run, seconds)
