"A call ends within `timeout`, whatever the server does; and what users see of a server that is busy or refuses"
import signal, socket, threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, ExitStack
from functools import partial
from types import SimpleNamespace

import pytest
import redis

from clusters import wait_for
from fault_backends import masterless, run_script, unsaved
from fastai_remote import RedisStore, StoreBusy, StoreError, StoreUnavailable, to_redis
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.store.server import redis_server
from fastai_remote.testing import ManualClock
from fastai_remote.write.redis import RedisWriter

TIMEOUT,LONG = .3,100_000. # Of calls that end; of calls that would go on until pytest ends the test

@contextmanager
def listening(talk):
    "A server that calls `talk(connection, over)` for each connection, in a thread; its port. `over` is set at the end"
    over = threading.Event()
    with socket.create_server(('127.0.0.1', 0)) as server:
        def accept():
            while True:
                try: connection,_ = server.accept()
                except OSError: return
                threading.Thread(target=guarded, args=(connection,), daemon=True).start()
        def guarded(connection):
            try: talk(connection, over)
            except OSError: pass
        threading.Thread(target=accept, daemon=True).start()
        try: yield server.getsockname()[1]
        finally: over.set()

def silent(connection, over):
    "Accepts a connection, and never says anything"
    while connection.recv(1<<16): pass

def deaf(connection, over):
    "Does not even read what is sent"
    over.wait(600)

def endless(beginning, piece, seconds):
    "Returns a function that answers with `beginning`, and then with `piece` again and again, after `seconds` each"
    def talk(connection, over):
        connection.recv(1<<16)
        connection.sendall(beginning)
        while not over.wait(seconds): connection.sendall(piece)
    return talk

TALKS = {'silent':silent, 'deaf':deaf,
    'value of 100,000 bytes at 50 bytes per second':endless(b'$100000\r\n', b'x', .02),
    'something else':endless(b'HTTP/1.1 400 Bad Request\r\n\r\n', b'x', .02),
    'list of many short values':endless(b'*1000000\r\n', b'$1\r\nx\r\n', .005),
    'handshake of TLS, a byte at a time':endless(b'\x16\x03\x03\x40', b'\0', .02)}

WAYS = {'call':lambda link: link.call(lambda client: client.get('a')),
    'send':lambda link: link.send([('GET', 'a'), ('GET', 'b')]),
    'write much':lambda link: link.call(lambda client: client.set('a', bytes(20_000_000))),
    'open a store':lambda link: RedisStore(link.url, 'd', timeout=TIMEOUT)}

@pytest.mark.parametrize('talk', TALKS)
def test_a_call_ends_within_its_timeout(talk):
    "Also the first, with the connection; with TLS the handshake does not end. All links wait at the same time"
    with listening(TALKS[talk]) as port, ThreadPoolExecutor(12) as pool:
        def ends(scheme, known, way):
            options = {'ssl_cert_reqs':'none'} if scheme=='rediss' else {}
            link = RedisLink(f'{scheme}://127.0.0.1:{port}', timeout=TIMEOUT, **options)
            link.has_answered = known
            with pytest.raises(StoreUnavailable, match=r'attempts? in \d+\.\d s'): WAYS[way](link)
        for wait in [pool.submit(ends, scheme, known, way) for scheme in ('redis','rediss') for known in (False,True)
                     for way in WAYS]: wait.result()

def test_names_of_hosts(monkeypatch):
    "`getaddrinfo` has no timeout: a name server that is silent may not be waited for"
    look_up,over = socket.getaddrinfo,threading.Event()
    def look_up_example(host, *args, **kwargs):
        if host=='slow.example': over.wait(600)
        return look_up('127.0.0.1' if host.endswith('.example') else host, *args, **kwargs)
    monkeypatch.setattr(socket, 'getaddrinfo', look_up_example)
    with redis_server(port=-1) as server:
        link = RedisLink(server.url.replace('127.0.0.1', 'redis.example'), timeout=5)
        assert 'redis.example' in link.url and link.call(lambda client: client.ping())
    for host in 'slow.example','no.such.host.invalid':
        for way in WAYS.values():
            with pytest.raises(StoreUnavailable, match=host): way(RedisLink(f'redis://{host}:1', timeout=TIMEOUT))
    over.set()

def test_a_value_that_is_sent_steadily_may_take_longer_than_socket_timeout():
    "`socket_timeout` limits the wait for the next bytes, `timeout` all of it"
    def talk(connection, over):
        connection.recv(1<<16)
        connection.sendall(b'$12\r\n')
        for _ in range(12):
            connection.sendall(b'x')
            over.wait(.05)
        connection.sendall(b'\r\n')
    with listening(talk) as port:
        link = RedisLink(f'redis://127.0.0.1:{port}', timeout=60, socket_timeout=.4)
        assert link.call(lambda client: client.get('a'), timeout=60)==b'x'*12

def test_a_call_within_a_call_ends_with_the_outer_one():
    with listening(silent) as port:
        inner,outer = (RedisLink(f'redis://127.0.0.1:{port}', timeout=LONG) for _ in range(2))
        def call(client): return inner.call(lambda other: other.get('a'), timeout=LONG)
        with pytest.raises(StoreUnavailable): outer.call(call, timeout=TIMEOUT)

# --- what a server says instead of doing what it was asked

@pytest.fixture
def link(fresh):
    link = RedisLink(fresh.url, timeout=30)
    link.call(lambda client: client.set('a', b'1'))
    return link

@contextmanager
def busy(backend):
    "BUSY"
    thread = threading.Thread(target=run_script, args=(backend, LONG))
    thread.start()
    wait_for(lambda: is_refused(lambda: redis.Redis.from_url(backend.server.url, socket_timeout=.5).ping(), 'BUSY'))
    yield
    redis.Redis.from_url(backend.server.url).script_kill()
    thread.join()

# Without its master: it does not read, MASTERDOWN, nor write, READONLY; after a failover it may become the master
replica = partial(masterless, answers='no')

def is_refused(act, word):
    try: act()
    except redis.TimeoutError: pass
    except redis.ResponseError as error: return word in str(error)
    return False

def get(client): return client.get('a')
def put(client): return client.set('b', b'private value')
def put_with_others(client): return client.pipeline().set('b', b'private value').execute()

@pytest.mark.parametrize('trouble,command,match,result', [
    (busy, get, 'BUSY', b'1'), (unsaved, put, 'MISCONF.*disk', True),
    (unsaved, put_with_others, 'MISCONF.*disk', [True]), (replica, get, 'MASTERDOWN|MASTER is down', b'1'),
    (replica, put, '(?i)read.?only', True)])
def test_what_a_server_says_that_cannot_serve_is_explained_and_the_call_is_repeated(fresh, link, trouble, command,
                                                                                   match, result):
    "When the time is over, the error says it. If the server works again after the first attempt, so does the call"
    errors = []
    with ExitStack() as repair:
        repair.enter_context(trouble(SimpleNamespace(client=redis.Redis.from_url(fresh.url), server=fresh)))
        with pytest.raises(StoreUnavailable, match=match) as e: link.call(command, timeout=TIMEOUT)
        assert 'private' not in str(e.value) and link.url in str(e.value)
        def repaired(client):
            try: return command(client)
            except redis.RedisError as error:
                if not errors: repair.close()
                errors.append(error)
                raise
        assert link.call(repaired, timeout=30)==result and errors

def test_a_call_whose_time_is_over_before_it_asks(fresh):
    "A connection of the pool is looked at, without waiting, before it is used: that is no mistake when no time is left"
    link = RedisLink(fresh.url, timeout=30)
    link.call(lambda client: client.set('a', 1))
    with ManualClock() as clock:
        def late(client):
            clock.advance(.3)
            return client.get('a')
        with pytest.raises(StoreUnavailable, match='TimeoutError'): link.call(late, timeout=.2)
    assert link.call(lambda client: client.get('a'))==b'1'

def test_other_errors_of_the_server_are_named(link):
    "Never an error of redis-py; and the values that were sent are not shown"
    def push(client): return client.lpush('a', 'private value')
    for act in (lambda: link.call(push), lambda: link.call(lambda c: push(c.pipeline()).execute()),
                lambda: link.call(lambda c: push(c.pipeline(transaction=False)).execute()),
                lambda: link.send([('GET', 'a'), ('LPUSH', 'a', 'private value'), ('GET', 'a')])):
        with pytest.raises(StoreError, match=f'{link.url}: the server refused a command: WRONGTYPE') as e: act()
        assert 'private' not in str(e.value) and not isinstance(e.value, redis.RedisError)
        assert link.send([('GET', 'a')])==[b'1']   # the connection is in order

def test_a_reply_that_is_interrupted_is_never_the_reply_to_another_call(link, monkeypatch):
    "An interrupt between two replies: the connection is not used again"
    link.send([('SET', 'x', 'first'), ('SET', 'y', 'second')])
    connection = link.client.connection_pool.get_connection()
    link.client.connection_pool.release(connection)
    read,calls = connection.read_response,[]
    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls)==2: raise KeyboardInterrupt
        return read(*args, **kwargs)
    monkeypatch.setattr(connection, 'read_response', interrupted)
    with pytest.raises(KeyboardInterrupt): link.send([('GET', 'x'), ('GET', 'y'), ('GET', 'y')])
    monkeypatch.undo()
    assert link.send([('GET', 'x')])==[b'first']

# --- values that the server does not accept, and locks

def test_a_value_that_is_too_large_for_the_server_is_a_failed_sample(fresh):
    "The server closes the connection, in the middle of a transaction; before, the ingest went on forever"
    redis.Redis.from_url(fresh.url).config_set('proto-max-bulk-len', 2_000_000)
    sizes = {3:2_000_001, 4:2_000_000, 17:5_000_000}
    source = [{'x.bin':bytes([i])*sizes.get(i, 100), 'id.i4':i} for i in range(30)]
    report = to_redis(source, fresh.url, 'big', num_workers=1, progress=False)
    store = RedisStore(fresh.url, 'big')
    reasons = sorted(dict(store.failures()).values())
    assert report.failed==len(reasons)==2 and len(store)==28
    assert all('2,000,000 (its setting proto-max-bulk-len)' in why and 'x.bin' in why for why in reasons)
    assert any('5,000,000 bytes' in why for why in reasons)
    assert sorted(store.get_many(range(28), 'id.i4')['id.i4'].tolist())==[i for i in range(30) if i not in (3,17)]

def test_a_connection_that_is_lost_in_every_transaction_ends_at_the_deadline(fresh):
    "The server's buffer for a query is smaller than what is written: each attempt loses its connection"
    admin = redis.Redis.from_url(fresh.url)
    admin.config_set('client-query-buffer-limit', '1mb')
    source = [{'x.bin':bytes([i])*900_000} for i in range(9)]
    with pytest.raises(StoreUnavailable):
        to_redis(source, RedisLink(fresh.url, timeout=1), 'big', num_workers=1, progress=False)
    admin.config_set('client-query-buffer-limit', '1gb')
    to_redis(source, fresh.url, 'big', num_workers=1, progress=False)
    assert len(RedisStore(fresh.url, 'big'))==9

def test_a_lock_that_could_not_be_released_does_not_block_the_next_call_of_this_process(fresh):
    "The server was away when the ingest ended; its lease of 30 s has not ended"
    first = RedisWriter(RedisLink(fresh.url, timeout=TIMEOUT), 'd')
    first.place.take()
    fresh.proc.send_signal(signal.SIGSTOP)
    with pytest.raises(StoreUnavailable): first.close()
    fresh.proc.send_signal(signal.SIGCONT)
    assert redis.Redis.from_url(fresh.url).exists('d:ingest:lock')
    to_redis([{'txt':'a'}], fresh.url, 'd', num_workers=1, progress=False)
    second,third = (RedisWriter(RedisLink(fresh.url), 'e') for _ in range(2))
    second.place.take()
    with pytest.raises(StoreBusy): third.place.take()   # one that is held blocks others in the same process
    second.close()
