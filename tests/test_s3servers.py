"The S3 servers of the tests, and the proxy before them, do what the tests suppose"
import os, socket, subprocess, sys, time
from contextlib import ExitStack
from pathlib import Path

import pytest
pytest.importorskip('s3fs'); pytest.importorskip('moto'); pytest.importorskip('boto3')
from aiohttp import ClientPayloadError
from botocore.exceptions import ConnectionClosedError
from conftest import wait_for
from s3fs import S3FileSystem

import s3servers
from s3proxy import S3Proxy
from s3servers import moto_server, swift_server

DATA = bytes(range(250))*4

def open_server(name):
    "A context with server `name`; skips the test where it is not installed"
    stack = ExitStack()
    try: return stack, stack.enter_context(dict(moto=moto_server, swift=swift_server)[name]())
    except FileNotFoundError as e: pytest.skip(str(e))

@pytest.fixture(scope='module', params=['moto', 'swift'])
def s3(request):
    "Each server, with one object"
    stack,s = open_server(request.param)
    with stack:
        s.client().put_object(Bucket=s.bucket, Key='a', Body=DATA)
        yield s

def fs_of(s, retries=1, **kw):
    "A new file system that gives up after `retries` tries; s3fs on boto would make 25, over minutes"
    once = s3servers.WHEN_REQUIRED | dict(retries=dict(total_max_attempts=1))
    fs = S3FileSystem(**s.options | dict(config_kwargs=once) | kw, skip_instance_cache=True, use_listings_cache=False)
    fs.retries = retries
    return fs

@pytest.fixture
def proxy(s3):
    "A proxy before the server"
    with S3Proxy(s3.endpoint) as p: yield p

def via(p, s, **kw): return fs_of(s, endpoint_url=p.endpoint, **kw)
def part(fs, s, a=100, b=200): return fs.cat_file(f'{s.bucket}/a', start=a, end=b)

def test_objects_ranges_and_deletion(s3):
    fs,b = fs_of(s3),s3.bucket
    assert fs.cat_file(f'{b}/a')==DATA and part(fs, s3)==DATA[100:200]
    assert fs.cat_ranges([f'{b}/a']*3, [0,7,990], [5,9,2000])==[DATA[:5],DATA[7:9],DATA[990:]]
    fs.pipe_file(f'{b}/gone', b'x')
    fs.rm_file(f'{b}/gone')
    assert not fs.exists(f'{b}/gone')

def test_multipart(s3):
    fs,big = fs_of(s3),os.urandom(1<<20)*11
    with fs.open(f'{s3.bucket}/big', 'wb', block_size=5<<20) as f:
        for i in range(11): f.write(big[i<<20:(i+1)<<20])
    assert fs.info(f'{s3.bucket}/big')['ETag'].endswith(('-2"', '-3"')) and fs.cat_file(f'{s3.bucket}/big')==big

def test_lists_come_in_pages(s3):
    c,b = s3.client(),s3.make_bucket('pages')
    for i in range(7): c.put_object(Bucket=b, Key=f'd/{i}', Body=b'')
    pages = list(c.get_paginator('list_objects_v2').paginate(Bucket=b, Prefix='d/', PaginationConfig=dict(PageSize=3)))
    assert [[o['Key'][-1] for o in p['Contents']] for p in pages]==[['0','1','2'],['3','4','5'],['6']]

def test_who_asks(s3):
    fs = fs_of(s3, secret='not it')
    if not s3.strict: assert part(fs, s3)==DATA[100:200]
    else:
        with pytest.raises(PermissionError, match='signature'): part(fs, s3)
        with pytest.raises(PermissionError, match='Forbidden'): fs.info(f'{s3.bucket}/a')
    assert s3.secret not in repr(s3)

def test_what_is_missing(s3):
    fs = fs_of(s3)
    with pytest.raises(FileNotFoundError, match='bucket does not exist'): fs.cat_file('nowhere/a', start=0, end=1)
    with pytest.raises(FileNotFoundError, match='key does not exist'): fs.cat_file(f'{s3.bucket}/no', start=0, end=1)

@pytest.mark.skipif(sys.platform!='linux', reason='only Linux tells a child of its parent\'s death')
def test_swift_dies_with_its_owner():
    code = 'import s3servers, sys, time\nwith s3servers.swift_server() as s: print(s.endpoint, s.folder, flush=True); time.sleep(100)'
    p = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, cwd=Path(__file__).parent)
    if not (line:=p.stdout.readline().decode()): pytest.skip(s3servers.NO_SWIFT)
    port = int(line.split()[0].rsplit(':', 1)[1])
    p.kill()
    p.wait()
    def refused():
        try: socket.create_connection(('127.0.0.1', port)).close()
        except ConnectionError: return True
    wait_for(refused)
    assert not Path(line.split()[1]).exists()   # nor is anything left of it

def test_servers_go():
    for name in ('moto', 'swift'):
        stack,s = open_server(name)
        stack.close()
        with pytest.raises(ConnectionError): socket.create_connection(('127.0.0.1', int(s.endpoint.rsplit(':', 1)[1])))

@pytest.mark.parametrize('python', ['/nowhere/python3', sys.executable])
def test_no_swift_says_what_to_install(python, monkeypatch):
    monkeypatch.setattr(s3servers, 'PYTHON', python)
    with pytest.raises(FileNotFoundError, match='apt-get install .*python3-swift'), swift_server(): pass

def test_proxy_passes_all_on_and_counts(s3, proxy):
    fs = via(proxy, s3)
    fs.pipe_file(f'{s3.bucket}/p', DATA)
    assert part(fs, s3)==DATA[100:200] and fs.find(f'{s3.bucket}/p')==[f'{s3.bucket}/p']
    assert proxy.requests['PUT']==1 and ('GET', f'/{s3.bucket}/a', 'bytes=100-199', 206) in proxy.log
    n = proxy.bytes_out
    part(fs, s3)
    assert proxy.bytes_out==n+100

@pytest.mark.parametrize('status,code,exc', [
    (503,'SlowDown',OSError), (500,'InternalError',OSError), (400,'ExpiredToken',PermissionError), (403,'AccessDenied',PermissionError)])
def test_refused(s3, proxy, status, code, exc):
    fs = via(proxy, s3)
    proxy.fail(status, code, n=1)
    with pytest.raises(exc, match=code): part(fs, s3)
    assert proxy.log==[('GET', f'/{s3.bucket}/a', 'bytes=100-199', status)] and part(fs, s3)==DATA[100:200]

def test_refused_upload_leaves_the_connection_usable(s3, proxy):
    fs = via(proxy, s3)
    proxy.fail(500, 'InternalError', match='PUT ')
    with pytest.raises(OSError, match='InternalError'): fs.pipe_file(f'{s3.bucket}/q', bytes(1<<20))
    fs.pipe_file(f'{s3.bucket}/q', bytes(1<<20))
    assert fs.info(f'{s3.bucket}/q')['size']==1<<20

def test_hang_ups(s3, proxy):
    fs = via(proxy, s3)
    proxy.reset(n=2)   # aiohttp asks a second time itself
    with pytest.raises(ConnectionClosedError): part(fs, s3)
    proxy.cut(30)
    with pytest.raises(ClientPayloadError, match='received 30 of 100'): part(fs, s3)
    proxy.cut(30)
    assert part(via(proxy, s3, retries=2), s3)==DATA[100:200]

@pytest.mark.skipif(not hasattr(os, 'fork'), reason='no fork here')
def test_a_fork_keeps_no_connection_alive(s3, proxy):
    fs = via(proxy, s3)
    part(fs, s3)
    if (pid:=os.fork())==0:
        time.sleep(100)
        os._exit(0)
    try:
        proxy.cut(30)
        with pytest.raises(ClientPayloadError): part(fs, s3)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)

def test_wrong_answers_look_right(s3, proxy):
    fs = via(proxy, s3)
    proxy.short(7)
    assert part(fs, s3)==DATA[100:193]
    proxy.flip()
    assert sum(a!=b for a,b in zip(part(fs, s3), DATA[100:200], strict=True))==1
    proxy.short(1)
    assert fs.cat_file(f'{s3.bucket}/a')==DATA[:-1]   # its HEAD is left alone

def test_match_and_latency(s3, proxy):
    fs = via(proxy, s3)
    proxy.fail(403, 'AccessDenied', n=float('inf'), match=lambda o: o.endswith('/b'))
    assert part(fs, s3)==DATA[100:200]
    for _ in range(2):
        with pytest.raises(PermissionError): fs.cat_file(f'{s3.bucket}/b', start=0, end=1)
    proxy.clear().latency = .05
    t = time.monotonic()
    part(fs, s3)
    assert time.monotonic()-t>=.05 and proxy.requests.total()==1
