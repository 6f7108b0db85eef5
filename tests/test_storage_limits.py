"""Storage on servers that are silent, slow, endless or wrong: answers are bounded in time and memory, and are those
that were asked for"""
import contextlib, gc, http.server, re, socket, threading, time, weakref, zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
pytest.importorskip('s3fs')
from fsspec.implementations.memory import MemoryFileSystem

from conftest import in_time
from fastai_remote.core import StoreUnavailable
from fastai_remote.store import bounded
from fastai_remote.store.connection import DeadlinePassed, Retries
from fastai_remote.store.storage import Storage

CONTENT = bytes(range(256))*400
MARKER = 'secret-8f2c'

class Server(http.server.ThreadingHTTPServer):
    "Answers each GET with `answer(handler, first, last)`: the bytes that were asked for, `None` for a whole file"
    daemon_threads,request_queue_size = True,64
    def __init__(self, answer):
        self.seen,self.sent,self.done = [],0,threading.Event()
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = 'HTTP/1.1'
            def do_HEAD(handler): head(handler, 200, len(CONTENT))
            def do_GET(handler):
                self.seen.append((handler.path, dict(handler.headers)))
                asked = re.fullmatch(r'bytes=(\d+)-(\d+)', handler.headers.get('Range', ''))
                with contextlib.suppress(OSError):
                    answer(handler, *(map(int, asked.groups()) if asked else (None,None)))
            def log_message(self, *args): pass
        super().__init__(('127.0.0.1', 0), Handler)
        self.url = f'http://127.0.0.1:{self.server_port}'
    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(.01,), daemon=True).start()
        return self
    def __exit__(self, *args):
        self.done.set()
        self.shutdown()
        self.server_close()
    def handle_error(self, *args): pass

def head(handler, status, length=None, content_range=None, **headers):
    handler.send_response(status)
    if length is not None: headers['Content-Length'] = length
    if content_range: headers['Content-Range'] = content_range
    for name,value in headers.items(): handler.send_header(name.replace('_', '-'), str(value))
    handler.end_headers()

def part(handler, first, last, status=206, shift=0, with_range=True, longer=0):
    "A range; wrong on request"
    if first is None: first,last,status,with_range = 0,len(CONTENT)-1,200,False
    last = min(last, len(CONTENT)-1)
    content = CONTENT[first+shift:last+1+shift+longer]
    content_range = f'bytes {first+shift}-{last+shift+longer}/{len(CONTENT)}' if with_range else None
    head(handler, status, len(content), content_range)
    handler.wfile.write(content)

def whole(handler, first, last):
    "The whole file, whatever was asked for"
    head(handler, 200, len(CONTENT))
    handler.wfile.write(CONTENT)

def silent(handler, first, last): handler.server.done.wait(30)

def dripping(handler, first, last):
    head(handler, 206 if first is not None else 200, 1_000_000,
        None if first is None else f'bytes {first}-{last}/9999999999')
    while not handler.server.done.wait(.02): handler.wfile.write(b'x')

def dripping_head(handler, first, last):
    handler.wfile.write(b'HTTP/1.1 200 OK\r\n')
    while not handler.server.done.wait(.02): handler.wfile.write(b'X-More: 1\r\n')

def endless(handler, first, last, content_range=True, status=206):
    "Bytes without end, and without a length"
    if first is None: status,content_range = 200,False
    head(handler, status, None, f'bytes {first}-{last}/9999999999' if content_range else None, Connection='close')
    while not handler.server.done.is_set():
        handler.wfile.write(bytes(1<<16))
        handler.server.sent += 1<<16

def slow(handler, first, last):
    """The right bytes, at a steady rate for all connections together: `server.rate`, in bytes per second

    Each piece has its time, so that a busy machine, where a thread wakes late, does not make the link slower."""
    server = handler.server
    head(handler, 206, last+1-first, f'bytes {first}-{last}/9999999999')
    for at in range(first, last+1, 16_384):
        piece = bytes(min(last+1, at+16_384)-at)
        with server.link: due = server.is_free_at = max(server.is_free_at, time.monotonic())+len(piece)/server.rate
        time.sleep(max(0, due-time.monotonic()))
        handler.wfile.write(piece)

@contextlib.contextmanager
def opened(kind, answer, timeout=10., **options):
    "A storage on a server, and the server"
    with Server(answer) as server:
        if kind=='http': yield Storage(f'{server.url}/folder', timeout, options or None),server
        else:
            yield Storage('s3://bucket/folder', timeout,
                dict(endpoint_url=server.url, key='me', secret=MARKER, **options)),server

kinds = pytest.mark.parametrize('kind', ['http','s3'])

# --- deadlines

@pytest.mark.timeout(60)
@kinds
@pytest.mark.parametrize('answer', [silent, dripping, dripping_head])
def test_a_call_ends_at_its_deadline(kind, answer):
    "Whether or not the server has answered before; the four calls wait at the same time"
    calls = {'read':lambda storage: storage.read('manifest.json'),
        'ranges':lambda storage: storage.ranges(['a.tar']*3, [5]*3, [1_000_005]*3)}
    def ends(was_there, call):
        with opened(kind, answer, timeout=.5) as (storage,_):
            storage.has_answered = was_there
            assert storage.fs   # the first client of a process loads its library
            with in_time(2.5), pytest.raises(StoreUnavailable, match=r'no complete answer in time.*attempts? in \d'):
                calls[call](storage)
    with ThreadPoolExecutor(4) as pool:
        ending = {(was_there, call):pool.submit(ends, was_there, call) for was_there in (False, True) for call in calls}
    failed = {case:error for case,future in ending.items() if (error:=future.exception())}
    assert not failed

@pytest.mark.timeout(60)
def test_a_file_system_that_is_not_asynchronous_ends_at_its_deadline():
    "Connecting is included: this server accepts connections and says nothing"
    with socket.create_server(('127.0.0.1', 0)) as server:
        storage = Storage(f'ftp://127.0.0.1:{server.getsockname()[1]}/folder', .5)
        for _ in range(2):
            with in_time(2.5), pytest.raises(StoreUnavailable, match=r'no complete answer in time.*attempts? in \d'):
                storage.read('manifest.json')
            with in_time(2.5), pytest.raises(StoreUnavailable): storage.ranges(['a'], [0], [9])

def test_a_thread_that_is_waited_for_returns_values_and_errors():
    storage = Storage('memory://limits', 5)
    storage.write('a', b'content')
    assert storage.read('a')==b'content' and storage.names()==['a']
    with pytest.raises(FileNotFoundError): storage.read('b')

def test_a_client_is_not_used_while_an_interrupted_call_still_uses_it(monkeypatch):
    "After Ctrl-C in a notebook: the next call would read the rest of the answer"
    storage,done = Storage('memory://limits', 5),threading.Event()
    storage.write('a', b'content')
    client = storage.fs
    monkeypatch.setattr(client, 'cat_file', lambda path: done.wait(5))
    def interrupted(f, seconds):
        threading.Thread(target=f, daemon=True).start()
        raise KeyboardInterrupt
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(bounded, 'call_in_thread', interrupted)
        storage.read('a')
    assert storage.read('a')==b'content' and storage.fs is not client
    done.set()

def test_clients_that_are_refused_are_not_kept(monkeypatch):
    "A bucket that answers 403 for files that do not exist: after each refusal, a new client is made"
    clients,storage = [],Storage('memory://limits', 5)
    def read(client, path):
        if id(client) not in (id(known()) for known in clients): clients.append(weakref.ref(client))
        if path.endswith('none'): raise PermissionError('403')
        return b'content'
    monkeypatch.setattr(MemoryFileSystem, 'cat_file', read)
    for k in range(5):
        assert storage.read('a')==b'content'
        with pytest.raises(StoreUnavailable, match='refused'): storage.read('none')
    gc.collect()
    assert len(clients)==6 and sum(client() is not None for client in clients)==1

@pytest.mark.timeout(120)
def test_a_steady_download_may_take_longer_than_the_timeout():
    "Each part has a deadline of its own, and parts become as small as the link is slow"
    with opened('http', slow, timeout=6.) as (storage,server):
        assert storage.fs   # the first client of a process loads its library
        server.link,server.rate,server.is_free_at = threading.Lock(),300_000,0.
        began = time.monotonic()
        sizes = [len(content) for content in storage.parts('a.tar', 4_200_000)]
        assert sum(sizes)==4_200_000 and time.monotonic()-began>2*storage.timeout
        assert max(sizes[-4:])<=1<<17

@pytest.mark.timeout(60)
@kinds
def test_a_download_whose_connections_starve_goes_on_with_smaller_parts(kind):
    """On a slow link that is shared unfairly, the library's own limit of a wait passes, long before that of the part

    This server never sends the second half of a part above 64 KB. That costs a deadline for each size that is tried."""
    def starving(handler, first, last):
        length = last+1-first
        asked.append(length)
        head(handler, 206, length, f'bytes {first}-{last}/9999999999')
        handler.wfile.write(bytes(length if length<=1<<16 else length//2))
        if length>1<<16: handler.server.done.wait(30)
    asked = []
    with opened(kind, starving, timeout=4.) as (storage,_):
        assert storage.fs   # the first client of a process loads its library
        sizes = [len(content) for content in storage.parts('a.tar', 2_400_000)]
        assert sum(sizes)==2_400_000 and max(sizes)==1<<16
        assert {length for length in asked if length>1<<16}=={1<<19, 1<<17}

def test_parts_grow_on_a_fast_link():
    with opened('http', lambda handler, first, last: (head(handler, 206, last+1-first, f'bytes {first}-{last}/*'),
            handler.wfile.write(bytes(last+1-first))), timeout=20) as (storage,_):
        sizes = [len(content) for content in storage.parts('a.tar', 60<<20)]
        assert sum(sizes)==60<<20 and max(sizes)==8<<20
        assert len(next(iter(storage.parts('b.tar', 60<<20))))==8<<20   # the next file begins with what was found

def test_retries_use_the_time_they_have(monkeypatch):
    "Also if an attempt takes long: another one may start as long as there is time"
    from test_connection import Clock, handle
    clock = Clock(monkeypatch)
    for timeout,takes in ((20, 5.), (20, 0.), (2, .7), (7, 4.)):
        clock.now = 0.
        retries = Retries('server', timeout)
        def attempt():
            assert retries.remaining()>0
            clock.now += min(takes, retries.remaining())
            raise ConnectionError('away')
        with pytest.raises(StoreUnavailable): retries.call(attempt, handle)
        assert timeout-.05<=clock.now<=timeout and retries.attempts>=timeout/max(takes, 2)

# --- bounded answers

@kinds
@pytest.mark.parametrize('answer', [part, partial(part, status=200)])
def test_ranges_are_right(kind, answer):
    "Some servers give the right range with status 200"
    with opened(kind, answer) as (storage,_):
        assert storage.ranges(['a.tar']*4, [0, 5, 1000, len(CONTENT)-3],
            [10, 1005, 1001, len(CONTENT)+50])==[CONTENT[:10], CONTENT[5:1005], CONTENT[1000:1001], CONTENT[-3:]]
        assert storage.read('manifest.json')==CONTENT

class GoogleError(Exception):
    "As `gcsfs.retry.HttpError`, which has the status of the answer as `code`, a number or a text, and no `response`"
    def __init__(self, status):
        self.code,self.message = status,f'Request range not satisfiable, {status}'
        super().__init__(self.message)

class WebError(Exception):
    "As `httpx.HTTPStatusError` and `requests.HTTPError`: the `response` is an object that has the status"
    def __init__(self, status):
        self.response = SimpleNamespace(status_code=status, text='not this one')
        super().__init__(f'error {status}')

class AzureError(WebError):
    "As `azure.core.exceptions.HttpResponseError`, which adlfs passes on: it has the status itself, too"
    def __init__(self, status):
        super().__init__(status)
        self.status_code = status

def answers_with(error, monkeypatch):
    "A storage whose requests for ranges are answered with `error`; the list of its requests"
    storage,asked = Storage('memory://answers', .6),[]
    def cat_ranges(paths, *args, **kwargs):
        asked.append(paths)
        return [error]*len(paths)
    monkeypatch.setattr(storage.fs, 'cat_ranges', cat_ranges)
    return storage,asked

@pytest.mark.parametrize('error', [GoogleError(416), GoogleError('416'), AzureError(416), WebError(416)], ids=repr)
def test_a_range_beyond_the_end_is_empty_however_a_library_says_so(error, monkeypatch):
    assert answers_with(error, monkeypatch)[0].ranges(['x.tar'], [100], [200])==[b'']

@pytest.mark.parametrize('kind', [GoogleError, AzureError, WebError])
@pytest.mark.parametrize('status,again,what', [
    (400,False,''), (401,False,'refused'), (403,False,'refused'), (429,True,''), (503,True,'')])
def test_an_error_of_the_server_is_repeated_if_that_may_help(kind, status, again, what, monkeypatch):
    storage,asked = answers_with(kind(status), monkeypatch)
    with pytest.raises(StoreUnavailable, match=f'{what}.*{status}'): storage.ranges(['x.tar'], [0], [9])
    assert (len(asked)>1)==again

@kinds
def test_a_server_without_ranges_is_recognised(kind):
    with opened(kind, whole, timeout=30) as (storage,server):
        with in_time(20), pytest.raises(StoreUnavailable, match='(?s)ignores.*`Range`.*bytes 5 to 9.*whole file'):
            storage.ranges(['a.tar'], [5], [10])
        with pytest.raises(StoreUnavailable, match='ignores'): storage.ranges(['a.tar'], [0], [10])
        assert len(server.seen)==2   # another attempt would not help
        # the whole file is right where it is what was asked for
        assert storage.ranges(['a.tar']*2, [0,0], [len(CONTENT), len(CONTENT)+5])==[CONTENT]*2
        assert storage.read('a.tar')==CONTENT

WRONG = {'other bytes':partial(part, shift=3), 'more bytes':partial(part, longer=1),
    'no range':partial(part, with_range=False),
    'nonsense':lambda handler, first, last: (head(handler, 206, 5, 'bytes */99'), handler.wfile.write(CONTENT[:5]))}

@kinds
@pytest.mark.parametrize('wrong', WRONG)
def test_other_bytes_than_those_asked_for_are_an_error(kind, wrong):
    with opened(kind, WRONG[wrong], timeout=30) as (storage,_):
        with in_time(20), pytest.raises(StoreUnavailable, match='bytes 5 to 9'): storage.ranges(['a.tar'], [5], [10])

@kinds
def test_an_endless_answer_is_not_read(kind):
    with opened(kind, endless, timeout=30) as (storage,server):
        with in_time(20), pytest.raises(StoreUnavailable, match='more than'): storage.ranges(['a.tar'], [5], [1005])
        assert server.sent<20<<20   # what fits into the buffers of both ends

@kinds
def test_whole_files_have_a_limit(kind, monkeypatch):
    monkeypatch.setattr(bounded, 'MAX_FILE', 1_000_000)
    with opened(kind, endless, timeout=30) as (storage,server):
        with in_time(20), pytest.raises(StoreUnavailable, match='more than 1,000,000 bytes'):
            storage.read('manifest.json')
        assert server.sent<20<<20
    with opened(kind, lambda handler, first, last: head(handler, 200, 1_000_001), timeout=30) as (storage,_):
        with in_time(20), pytest.raises(StoreUnavailable, match='1,000,001 bytes, more than 1,000,000'):
            storage.read('manifest.json')

def test_compressed_answers_are_limited_too(monkeypatch):
    import gzip
    monkeypatch.setattr(bounded, 'MAX_FILE', 1_000_000)
    bomb = gzip.compress(bytes(300<<20), 9)
    def answer(handler, first, last):
        head(handler, 200, len(bomb), Content_Encoding='gzip')
        handler.wfile.write(bomb)
    with opened('http', answer, timeout=30) as (storage,_):
        with in_time(20), pytest.raises(StoreUnavailable, match='more than 1,000,000'): storage.read('manifest.json')
        with pytest.raises(StoreUnavailable, match='compress'): storage.ranges(['a.tar'], [0], [10])

# --- where credentials go

CREDENTIALS = {'header':dict(headers={'Authorization':MARKER, 'X-Api-Key':MARKER}),
    'cookies':dict(cookies={'session':MARKER}), 'auth':dict(auth=('me', MARKER)),
    'session headers':dict(client_kwargs={'headers':{'X-Api-Key':MARKER}}),
    'session cookies':dict(client_kwargs={'cookies':{'session':MARKER}}),
    'session auth':dict(client_kwargs={'auth':('me', MARKER)})}

@pytest.mark.parametrize('how', CREDENTIALS)
def test_a_redirect_to_another_host_takes_no_credentials_along(how):
    import base64
    marks = MARKER,base64.b64encode(f'me:{MARKER}'.encode()).decode()
    def has_marker(headers): return any(mark in str(headers) for mark in marks)
    with Server(part) as other:
        def redirect(handler, first, last):
            if 'again' in handler.path: return part(handler, first, last)
            head(handler, 302, 0, Location=f'{other.url}/x' if 'away' in handler.path else f'{handler.path}?again')
        with opened('http', redirect, **CREDENTIALS[how]) as (storage,server):
            assert storage.read('here')==CONTENT and storage.ranges(['here'], [5], [10])==[CONTENT[5:10]]
            assert len(server.seen)==4 and all(has_marker(headers) for _,headers in server.seen)
            assert storage.ranges(['away'], [5], [10])==[CONTENT[5:10]] and storage.read('away')==CONTENT
            assert len(other.seen)==2 and not any(has_marker(headers) for _,headers in other.seen)

# --- processes

def _collect_and_read(opener):
    "The first read of a worker, while its event loop collects the garbage that it inherited"
    import gc
    from fsspec.asyn import get_loop
    loop = get_loop()
    loop.call_soon_threadsafe(gc.collect)
    return opener().read('a')

@kinds
def test_clients_that_a_child_process_inherits_are_not_closed_there(kind):
    "Closing one takes a second, since the thread of its event loop is not there"
    import gc, multiprocessing
    def garbage(server):
        "A client in a cycle of references, with open connections"
        storage = Storage(**server.arguments)
        assert storage.read('a')==CONTENT
        storage.fs.me = storage.fs
    with opened(kind, part, timeout=30) as (storage,server):
        server.arguments = storage.reveal()
        gc.disable()
        try:
            for _ in range(40): garbage(server)
            assert storage.read('a')==CONTENT
            with multiprocessing.get_context('fork').Pool(1) as pool:
                assert pool.apply(_collect_and_read, [storage.opener()])==CONTENT
        finally: gc.enable()
        assert storage.read('a')==CONTENT

def test_parts_that_do_not_come_are_an_error_however_small_they_are(tmp_path, monkeypatch):
    storage = Storage(tmp_path)
    def ranges(*args): raise StoreUnavailable('too late') from DeadlinePassed()
    monkeypatch.setattr(storage, 'ranges', ranges)
    for largest in (1000, 1<<20):
        with pytest.raises(StoreUnavailable): list(storage.parts('a.tar', 10**6, largest=largest))

def test_an_empty_path_is_not_the_current_folder():
    "It may come from a variable that is not set"
    with pytest.raises(ValueError, match="'' is no folder"): Storage('')
    assert Storage('.').url==Storage(Path()).url==str(Path.cwd())

def test_folders_on_the_web_have_names_and_are_no_files(tmp_path):
    (tmp_path/'sub').mkdir()
    for name in ('a.tar','sub/b.tar'): (tmp_path/name).write_bytes(b'')
    handler = type('Quiet', (http.server.SimpleHTTPRequestHandler,), {'log_message':lambda *args: None})
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), partial(handler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        web = Storage(f'http://127.0.0.1:{server.server_port}')
        assert (web.names(),web.names('sub'),web.files())==(['a.tar','sub'],['b.tar'],['a.tar'])
        server.shutdown()
    assert Storage(tmp_path).names()==['a.tar','sub'] and Storage(tmp_path).files()==['a.tar','sub/b.tar']

@pytest.mark.parametrize('url,name,below', [
    ('zip://p::/tmp/x.zip', 'p', 'zip://p/sub::/tmp/x.zip'), ('zip://p/q/::s3://b/x.zip', 'q', 'zip://p/q/sub::s3://b/x.zip'),
    ('zip://::/tmp/x.zip', 'x.zip', 'zip://sub::/tmp/x.zip'), ('tar://p::/tmp/x.tar', 'p', 'tar://p/sub::/tmp/x.tar'),
    ('simplecache::s3://b/f', 'f', 'simplecache::s3://b/f/sub'),
    ('simplecache::zip://p::s3://b/x.zip', 'p', 'simplecache::zip://p/sub::s3://b/x.zip'),
    ('simplecache::https://h:1/f?sig=abc', 'f', 'simplecache::https://h:1/f/sub?sig=abc'),
    ('memory://', 'memory:', 'memory://sub'), ('/data/a::b', 'a::b', '/data/a::b/sub'),
    ('github://org:repo@main/dir', 'dir', 'github://org:repo@main/dir/sub')])
def test_the_folder_of_a_chain_of_urls_is_that_of_its_first_url(url, name, below):
    storage = Storage(url)
    assert storage.name==name and storage.reveal()['url']==url and not storage.reveal()['storage_options']
    assert storage.subfolder('sub').reveal()['url']==below

def test_a_repository_in_a_url_is_no_secret():
    storage = Storage('github://org:repo@main/dir')
    assert storage.url=='github://org:repo@main/dir' and Storage('zip://::github://org:repo@main/a.zip').url.count('repo')

@pytest.mark.parametrize('url', ['simplecache::s3://b/x.tar', 'tar://a.tar::/tmp/x.tar', '/tmp/x.tgz'])
def test_a_tar_is_no_folder(url):
    with pytest.raises(ValueError, match='give the folder that holds the tars'): Storage(url)

@pytest.mark.parametrize('url', ['zip://p::http://host:x/f', 'http://me:pass/word@host/f',
    'simplecache::ftp://host:1x/f', 'ftp://me:/word@host/f', 's3://me:?word@host/f', 's3://me:#word@host/f'])
def test_a_port_that_is_no_number_is_an_error_in_a_chain_too(url):
    with pytest.raises(ValueError, match='the port must be a number'): Storage(url)

@pytest.mark.parametrize('folder', ['', 'p', 'p/'])
def test_files_in_an_archive(tmp_path, folder):
    with zipfile.ZipFile(tmp_path/'x.zip', 'w') as archive:
        for name in ('p/a.txt','p/q/b.txt'): archive.writestr(name, name)
    storage = Storage(f'zip://{folder}::{tmp_path}/x.zip')
    names = ['a.txt','q/b.txt'] if folder else ['p/a.txt','p/q/b.txt']
    assert storage.files()==names and storage.read(names[1])==b'p/q/b.txt'
    assert Storage(f'zip://::{tmp_path}/x.zip').subfolder('p').subfolder('q').read('b.txt')==b'p/q/b.txt'
