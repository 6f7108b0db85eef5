"""Storage on servers that are silent, slow, endless or wrong: answers are bounded in time and memory, and are those
that were asked for"""
import base64, contextlib, gc, gzip, http.server, multiprocessing, re, socket, threading, weakref, zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
pytest.importorskip('s3fs')
from clusters import wait_for
from fsspec.asyn import get_loop

from fastai_remote.core import StoreUnavailable
from fastai_remote.store import bounded
from fastai_remote.store.connection import DeadlinePassed
from fastai_remote.store.storage import Storage
from fastai_remote.testing import ManualClock
from webserver import WebServer

CONTENT = bytes(range(256))*400
MARKER = 'secret-8f2c'

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

def silent(handler, first, last): handler.server.over.wait(600)

def dripping(handler, first, last):
    if first is None: head(handler, 200, 1_000_000)
    else:
        last = min(last, first+999_999)
        head(handler, 206, last+1-first, f'bytes {first}-{last}/{last+1}')
    while not handler.server.over.wait(.02): handler.wfile.write(b'x')

def dripping_head(handler, first, last):
    handler.wfile.write(b'HTTP/1.1 200 OK\r\n')
    while not handler.server.over.wait(.02): handler.wfile.write(b'X-More: 1\r\n')

def endless(handler, first, last):
    "Bytes without end, and without a length"
    content_range = None if first is None else f'bytes {first}-{last}/9999999999'
    head(handler, 206 if content_range else 200, None, content_range, Connection='close')
    while not handler.server.over.is_set():
        handler.wfile.write(bytes(1<<16))
        handler.server.sent += 1<<16

def server_of(answer):
    "A server that answers each GET with `answer(handler, first, last)`, `None` for a whole file"
    def answer_all(handler):
        asked = re.fullmatch(r'bytes=(\d+)-(\d+)', handler.headers.get('Range', ''))
        if handler.command=='HEAD': return head(handler, 200, len(CONTENT))
        with contextlib.suppress(OSError): answer(handler, *(map(int, asked.groups()) if asked else (None,None)))
    server = WebServer(answer_all)
    server.sent = 0
    return server

@contextlib.contextmanager
def opened(kind, answer, timeout=30., **options):
    "A storage on a server, and the server"
    with server_of(answer) as server:
        if kind=='http': yield Storage(f'{server.url}/folder', timeout, options or None),server
        else:
            options = dict(endpoint_url=server.url, key='me', secret=MARKER, **options)
            yield Storage('s3://bucket/folder', timeout, options),server

kinds = pytest.mark.parametrize('kind', ['http','s3'])

# --- deadlines

@kinds
def test_a_call_ends_at_its_deadline(kind):
    "Whether or not the server has answered before; all calls wait at the same time"
    def ends(answer, was_there, call):
        with opened(kind, answer, timeout=.4) as (storage,_):
            storage.has_answered = was_there
            assert storage.fs   # the first client of a process loads its library
            with pytest.raises(StoreUnavailable, match=r'no complete answer in time.*attempts? in \d'): call(storage)
    with ThreadPoolExecutor(12) as pool:
        for wait in [pool.submit(ends, answer, was_there, call) for answer in (silent,dripping,dripping_head)
                     for was_there in (False,True) for call in (
                         lambda storage: storage.read('manifest.json'),
                         lambda storage: storage.ranges(['a.tar']*3, [5]*3, [1_000_005]*3))]: wait.result()

def test_a_file_system_that_is_not_asynchronous_ends_at_its_deadline():
    "Connecting is included: this server accepts connections and says nothing"
    with socket.create_server(('127.0.0.1', 0)) as server:
        storage = Storage(f'ftp://127.0.0.1:{server.getsockname()[1]}/folder', .3)
        for call in (lambda: storage.read('manifest.json'), lambda: storage.ranges(['a'], [0], [9]))*2:
            with pytest.raises(StoreUnavailable, match=r'no complete answer in time.*attempts? in \d'): call()

def test_a_client_is_not_used_while_an_interrupted_call_still_uses_it(faults, monkeypatch):
    "After Ctrl-C in a notebook: the next call would read the rest of the answer"
    storage,done,asked = Storage('faulty://limits', 5),threading.Event(),threading.Event()
    faults.put('limits/a', b'content')
    client = storage.fs
    def wait(request):
        asked.set()
        done.wait(600)
    def interrupted(f, seconds):
        threading.Thread(target=f, daemon=True).start()
        asked.wait(600)
        faults.before = lambda request: None
        raise KeyboardInterrupt
    faults.before = wait
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(bounded, 'call_in_thread', interrupted)
        storage.read('a')
    assert storage.read('a')==b'content' and storage.fs is not client
    done.set()
    with pytest.raises(FileNotFoundError): storage.read('b')

def test_clients_that_are_refused_are_not_kept(faults):
    "A bucket that answers 403 for files that do not exist: after each refusal, a new client is made"
    faults.put('limits/a', b'content')
    storage,clients = Storage('faulty://limits', 5),[]
    faults.fail('AccessDenied', n=float('inf'), match='none')
    for k in range(5):
        assert storage.read('a')==b'content'
        clients.append(weakref.ref(storage.fs))
        with pytest.raises(StoreUnavailable, match='refused'): storage.read('none')
    def are_gone():
        gc.collect()
        return [client() for client in clients]==[None]*5
    wait_for(are_gone)   # a thread may still be at the end of the last call

def test_parts_are_as_large_as_the_link_is_fast(faults):
    """Each part has a deadline of its own, so that a steady download may take longer than the timeout; the next file
    begins with the size that was found"""
    for size,timeout,rate,is_found in ((4_200_000, 6., 300_000, lambda last: max(last)<=1<<17),   # 14 seconds
                                       (30<<20, 20., 1e9, lambda last: 8<<20 in last)):
        with ManualClock() as clock:
            def take_time(request):
                first,last = map(int, request.split(' ')[2].split('-'))
                clock.advance((last+1-first)/rate)
            storage = Storage('faulty://limits', timeout)
            faults.put('limits/a.tar', bytes(size))
            faults.before,began = take_time,clock.now
            one,two = ([len(content) for content in storage.parts('a.tar', size)] for _ in range(2))
            assert sum(one)==sum(two)==size and abs(clock.now-began-2*size/rate)<1
            assert one[0]==1<<19 and is_found(one[-4:]) and is_found(two[-4:]) and max(one+two)<=8<<20
            assert (two[0]==8<<20)==(rate==1e9)

@pytest.mark.slow
@kinds
def test_a_download_whose_connections_starve_goes_on_with_smaller_parts(kind):
    """On a slow link that is shared unfairly, the library's own limit of a wait passes, long before that of the part

    This server never sends the second half of a part above 64 KB. That costs a deadline for each size that is tried."""
    def starving(handler, first, last):
        length = last+1-first
        asked.append(length)
        head(handler, 206, length, f'bytes {first}-{last}/9999999999')
        handler.wfile.write(bytes(length if length<=1<<16 else length//2))
        if length>1<<16: handler.server.over.wait(600)
    asked = []
    with opened(kind, starving, timeout=1.5) as (storage,_):
        assert storage.fs   # the first client of a process loads its library
        sizes = [len(content) for content in storage.parts('a.tar', 2_400_000)]
        assert sum(sizes)==2_400_000 and max(sizes)==1<<16
        assert {length for length in asked if length>1<<16}=={1<<19, 1<<17}

def test_parts_that_do_not_come_are_an_error_however_small_they_are(faults):
    storage = Storage('faulty://limits', 3)
    for largest in (1000, 1<<20):
        with ManualClock(), pytest.raises(StoreUnavailable, match='no complete answer in time'):
            faults.clear().fail(DeadlinePassed(), n=float('inf'))
            list(storage.parts('a.tar', 10**6, largest=largest))

# --- bounded answers

@kinds
@pytest.mark.parametrize('answer', [part, partial(part, status=200)])
def test_ranges_are_right(kind, answer):
    "Some servers give the right range with status 200"
    with opened(kind, answer) as (storage,_):
        starts,ends = [0, 5, 1000, len(CONTENT)-3],[10, 1005, 1001, len(CONTENT)+50]
        assert storage.ranges(['a.tar']*4, starts, ends)==[CONTENT[a:b] for a,b in zip(starts, ends)]
        assert storage.read('manifest.json')==CONTENT

class LibraryError(Exception):
    def __init__(self, **attributes):
        super().__init__(f'error {attributes}')
        vars(self).update(attributes)

def web_error(status, **attributes):
    return LibraryError(response=SimpleNamespace(status_code=status, text='not this one'), **attributes)

@pytest.mark.parametrize('error', [
    lambda status: LibraryError(code=status), lambda status: LibraryError(code=str(status)), web_error,
    lambda status: web_error(status, status_code=status)], ids=['gcsfs','gcsfs text','httpx','azure'])
def test_errors_of_other_libraries_are_understood(faults, error):
    "A range beyond the end is empty, and a request is repeated if that may help"
    storage = Storage('faulty://limits', 1)
    faults.fail(error(416))
    assert storage.ranges(['x.tar'], [100], [200])==[b'']
    for status,again,what in ((400,False,''), (401,False,'refused'), (403,False,'refused'), (503,True,'')):
        storage = Storage('faulty://limits', 1)
        faults.clear().fail(error(status), n=float('inf'))
        with ManualClock(), pytest.raises(StoreUnavailable, match=f'{what}.*{status}'):
            storage.ranges(['x.tar'], [0], [9])
        assert (len(faults.requests)>1)==again

@kinds
def test_a_server_without_ranges_is_recognised(kind):
    with opened(kind, whole) as (storage,server):
        with pytest.raises(StoreUnavailable, match='(?s)ignores.*`Range`.*bytes 5 to 9.*whole file'):
            storage.ranges(['a.tar'], [5], [10])
        with pytest.raises(StoreUnavailable, match='ignores'): storage.ranges(['a.tar'], [0], [10])
        assert len(server.seen)==2   # another attempt would not help
        # the whole file is right where it is what was asked for
        assert storage.ranges(['a.tar']*2, [0,0], [len(CONTENT), len(CONTENT)+5])==[CONTENT]*2
        assert storage.read('a.tar')==CONTENT

@kinds
def test_an_answer_that_lacks_bytes_of_the_file_is_none_at_all(kind):
    "It says so itself: by the length of the file in its header. It is requested again, as often as it takes"
    def short(handler, first, last):
        asked.append(first)
        part(handler, first, last if len(asked)>5 else (first+last)//2)
    asked = []
    with opened(kind, short) as (storage,_), ManualClock():
        assert storage.ranges(['a.tar'], [5], [1005])==[CONTENT[5:1005]] and len(asked)==6
    asked = []
    with opened(kind, short) as (storage,_):   # the end of the file is no reason to ask again
        asked += [0]*5
        assert storage.ranges(['a.tar'], [len(CONTENT)-3], [len(CONTENT)+50])==[CONTENT[-3:]] and len(asked)==6

def nonsense(handler, first, last):
    head(handler, 206, 5, 'bytes */99')
    handler.wfile.write(CONTENT[:5])

@kinds
def test_other_bytes_than_those_asked_for_are_an_error(kind):
    "Others, more, those of an unknown range, and an answer without end"
    for wrong in (partial(part, shift=3), partial(part, longer=1), partial(part, with_range=False), nonsense):
        with opened(kind, wrong) as (storage,_):
            with pytest.raises(StoreUnavailable, match='bytes 5 to 9'): storage.ranges(['a.tar'], [5], [10])
    with opened(kind, endless) as (storage,server):
        with pytest.raises(StoreUnavailable, match='more than'): storage.ranges(['a.tar'], [5], [1005])
        assert server.sent<20<<20   # what fits into the buffers of both ends

@kinds
def test_whole_files_have_a_limit_and_a_call_may_have_a_smaller_one(kind):
    "As the one that reads a manifest; whether or not the server says how long the file is, and has ranges"
    for answer in whole,part:
        with opened(kind, answer) as (storage,_):
            assert storage.read('manifest.json')==storage.read('manifest.json', len(CONTENT))==CONTENT
            with pytest.raises(StoreUnavailable, match=f'more than {len(CONTENT)-1:,} bytes'):
                storage.read('manifest.json', len(CONTENT)-1)
    def longer(handler, first, last): head(handler, 200, 1_000_002)
    for answer,what in (longer,'ignores the header `Range`: .*, 1,000,002 bytes'),(endless,'more than 1,000,001 bytes'):
        with opened(kind, answer) as (storage,server):
            with pytest.raises(StoreUnavailable, match=what): storage.read('manifest.json', 1_000_000)
            assert server.sent<20<<20

def test_folders_and_other_file_systems_have_the_same_limits(tmp_path, faults):
    (tmp_path/'x').write_bytes(b'123')
    faults.put('limits/x', b'123')
    faults.put('limits/empty', b'')
    for storage in Storage(tmp_path),Storage('faulty://limits'):
        assert storage.read('x', 3)==b'123'
        with pytest.raises(StoreUnavailable, match='x has more than 2 bytes'): storage.read('x', 2)
    assert storage.read('empty')==b''

def test_compressed_answers_are_refused():
    bomb = gzip.compress(bytes(50<<20), 1)
    def answer(handler, first, last):
        head(handler, 200, len(bomb), Content_Encoding='gzip')
        handler.wfile.write(bomb)
    with opened('http', answer) as (storage,_):
        for ask in lambda: storage.read('manifest.json'),lambda: storage.ranges(['a.tar'], [0], [10]):
            with pytest.raises(StoreUnavailable, match='compress'): ask()

# --- where credentials go

def test_a_redirect_to_another_host_takes_no_credentials_along():
    marks = MARKER,base64.b64encode(f'me:{MARKER}'.encode()).decode()
    def has_marker(headers): return any(mark in headers for mark in marks)
    ways = dict(headers={'Authorization':MARKER, 'X-Api-Key':MARKER}),dict(cookies={'session':MARKER}),
    ways += dict(auth=('me', MARKER)),
    for options in (*ways, *(dict(client_kwargs=way) for way in ways)):
        def redirect(handler, first, last):
            if 'again' in handler.path: return part(handler, first, last)
            head(handler, 302, 0, Location=f'{other.url}/x' if 'away' in handler.path else f'{handler.path}?again')
        with server_of(part) as other, opened('http', redirect, **options) as (storage,server):
            assert storage.read('here')==CONTENT and storage.ranges(['here'], [5], [10])==[CONTENT[5:10]]
            assert len(server.seen)==4 and all(has_marker(headers) for _,headers in server.seen)
            assert storage.ranges(['away'], [5], [10])==[CONTENT[5:10]] and storage.read('away')==CONTENT
            assert len(other.seen)==2 and not any(has_marker(headers) for _,headers in other.seen)

# --- processes

def _collect_and_read(opener):
    "The first read of a worker, while its event loop collects the garbage that it inherited"
    get_loop().call_soon_threadsafe(gc.collect)
    return opener().read('a')

@pytest.mark.slow
@kinds
def test_clients_that_a_child_process_inherits_are_not_closed_there(kind):
    "The event loop that would have to close one has no thread there"
    with opened(kind, part) as (storage,_):
        gc.disable()
        try:
            for _ in range(10):   # garbage: a client in a cycle of references, with open connections
                client = Storage(**storage.reveal()).fs
                client.me = client
                assert client.cat_file(f"{storage.reveal()['url']}/a")==CONTENT
            assert storage.read('a')==CONTENT
            with multiprocessing.get_context('fork').Pool(1) as pool:
                assert pool.apply(_collect_and_read, [storage.opener()])==CONTENT
        finally: gc.enable()
        assert storage.read('a')==CONTENT

# --- addresses

def test_folders_on_the_web_have_names_and_are_no_files(tmp_path):
    (tmp_path/'sub').mkdir()
    for name in ('a.tar','sub/b.tar'): (tmp_path/name).write_bytes(b'')
    handler = type('Quiet', (http.server.SimpleHTTPRequestHandler,), {'log_message':lambda *args: None})
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), partial(handler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, args=(.01,), daemon=True).start()
        web = Storage(f'http://127.0.0.1:{server.server_port}')
        assert (web.names(),web.names('sub'),web.files())==(['a.tar','sub'],['b.tar'],['a.tar'])
        server.shutdown()
    assert Storage(tmp_path).names()==['a.tar','sub'] and Storage(tmp_path).files()==['a.tar','sub/b.tar']

def test_the_folder_of_a_chain_of_urls_is_that_of_its_first_url():
    for url,name,below in (
            ('zip://p::/tmp/x.zip', 'p', 'zip://p/sub::/tmp/x.zip'),
            ('zip://p/q/::s3://b/x.zip', 'q', 'zip://p/q/sub::s3://b/x.zip'),
            ('zip://::/tmp/x.zip', 'x.zip', 'zip://sub::/tmp/x.zip'),
            ('tar://p::/tmp/x.tar', 'p', 'tar://p/sub::/tmp/x.tar'),
            ('simplecache::zip://p::s3://b/x.zip', 'p', 'simplecache::zip://p/sub::s3://b/x.zip'),
            ('simplecache::https://h:1/f?sig=abc', 'f', 'simplecache::https://h:1/f/sub?sig=abc'),
            ('memory://', 'memory:', 'memory://sub'), ('/data/a::b', 'a::b', '/data/a::b/sub'),
            ('github://org:repo@main/dir', 'dir', 'github://org:repo@main/dir/sub')):
        storage = Storage(url)
        assert storage.name==name and storage.reveal()['url']==url and not storage.reveal()['storage_options'], url
        assert storage.subfolder('sub').reveal()['url']==below
    assert storage.url==url   # a repository is no secret

def test_urls_that_are_no_folders():
    "An empty path may come from a variable that is not set"
    assert Storage('.').url==Storage(Path()).url==str(Path.cwd())
    for match,*urls in (("'' is no folder", ''),
            ('the folder that holds the tars', 'simplecache::s3://b/x.tar', 'tar://a.tar::/tmp/x.tar', '/tmp/x.tgz'),
            ('port must be a number', 'zip://p::http://host:x/f', 'http://me:pass/word@host/f', 's3://me:?w@host/f')):
        for url in urls:
            with pytest.raises(ValueError, match=match): Storage(url)

def test_files_in_an_archive(tmp_path):
    with zipfile.ZipFile(tmp_path/'x.zip', 'w') as archive:
        for name in ('p/a.txt','p/q/b.txt'): archive.writestr(name, name)
    for folder,names in (('', ['p/a.txt','p/q/b.txt']), ('p', ['a.txt','q/b.txt']), ('p/', ['a.txt','q/b.txt'])):
        storage = Storage(f'zip://{folder}::{tmp_path}/x.zip')
        assert storage.files()==names and storage.read(names[1])==b'p/q/b.txt'
    assert Storage(f'zip://::{tmp_path}/x.zip').subfolder('p').subfolder('q').read('b.txt')==b'p/q/b.txt'
