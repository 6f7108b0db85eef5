"A call ends within `timeout`, whatever the server does; and what users see of a server that is busy or refuses"
import signal, socket, threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import redis

from clusters import wait_for
from fastai_remote import RedisStore, StoreBusy, StoreError, StoreUnavailable, to_redis
from fastai_remote.store import redis_servers
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

def deaf(connection, over): over.wait(600)

def endless(beginning, piece, seconds):
    "Returns a function that answers with `beginning`, and then with `piece` again and again, after `seconds` each"
    def talk(connection, over):
        connection.recv(1<<16)
        connection.sendall(beginning)
        while not over.wait(seconds): connection.sendall(piece)
    return talk

TALKS = {'silent':silent,
    'value of 100,000 bytes at 50 bytes per second':endless(b'$100000\r\n', b'x', .02),
    'value without end':endless(b'$500000000000\r\n', b'x', .001),
    'list of many short values':endless(b'*1000000\r\n', b'$1\r\nx\r\n', .005),
    'handshake of TLS, a byte at a time':endless(b'\x16\x03\x03\x40', b'\0', .02)}

WAYS = {'call':lambda link: link.call(lambda client: client.get('a')),
    'send':lambda link: link.send([('GET', 'a'), ('GET', 'b')]),
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

def test_a_server_that_does_not_read_what_is_sent():
    with listening(deaf) as port:
        link = RedisLink(f'redis://127.0.0.1:{port}', timeout=TIMEOUT)
        with pytest.raises(StoreUnavailable): link.call(lambda client: client.set('a', bytes(20_000_000)))

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

def explained_and_repeated(link, command, match, repair):
    """`command(client)` fails until `repair()` is called: that it does is explained when the time is over

    If the server is repaired after the first attempt, the call returns what the second one does."""
    with pytest.raises(StoreUnavailable, match=match) as e: link.call(command, timeout=TIMEOUT)
    assert 'private' not in str(e.value) and link.url in str(e.value)
    errors = []
    def repaired(client):
        try: return command(client)
        except redis.RedisError as error:
            errors.append(error)
            if len(errors)==1: repair()
            raise
    result = link.call(repaired, timeout=30)
    assert errors
    return result

def test_a_server_that_runs_a_script(fresh, link):
    "BUSY"
    admin = redis.Redis.from_url(fresh.url)
    admin.config_set('busy-reply-threshold', 20)
    def run():
        try: redis.Redis.from_url(fresh.url).eval('while true do end', 0)
        except redis.RedisError: pass
    threading.Thread(target=run, daemon=True).start()
    def is_busy():
        try: return not redis.Redis.from_url(fresh.url, socket_timeout=.5).ping()
        except redis.TimeoutError: return False
        except redis.ResponseError as e: return 'BUSY' in str(e)
    wait_for(is_busy)
    assert explained_and_repeated(link, lambda client: client.get('a'), 'BUSY', admin.script_kill)==b'1'

def test_a_server_that_cannot_save():
    "MISCONF: its disk is full, say"
    with redis_server(dbfilename='no.rdb', save='1 1') as server:
        (server.dir/'no.rdb').mkdir()   # the server cannot replace a folder by its dump
        admin,link = redis.Redis.from_url(server.url),RedisLink(server.url, timeout=30)
        admin.bgsave()
        def refuses():
            try: return not admin.set('b', 1)
            except redis.ResponseError as e: return 'MISCONF' in str(e)
        wait_for(refuses)
        def allow(yes): admin.config_set('stop-writes-on-bgsave-error', 'no' if yes else 'yes')
        for write in (lambda c: c.set('b', b'private value'),
                      lambda c: c.pipeline().set('b', b'private value').execute()):
            allow(False)
            assert explained_and_repeated(link, write, 'MISCONF.*disk', lambda: allow(True))
        admin.config_set('save', '')   # else it refuses to end

def test_a_replica_without_its_master():
    "It does not read, MASTERDOWN, nor write, READONLY; after a failover it may become the master"
    with redis_server() as other:
        admin,link = redis.Redis.from_url(other.url),RedisLink(other.url, timeout=30)
        admin.config_set('replica-serve-stale-data', 'no')
        for command,match,result in ((lambda c: c.get('a'), 'MASTERDOWN|MASTER is down', None),
                                     (lambda c: c.set('a', 1), '(?i)read.?only', True)):
            admin.replicaof('127.0.0.1', 1)
            assert explained_and_repeated(link, command, match, lambda: admin.replicaof('NO', 'ONE')) is result

@pytest.mark.parametrize('parser', ['hiredis','redis-py'])
def test_a_call_whose_time_is_over_before_it_asks(fresh, parser, monkeypatch):
    "A connection of the pool is looked at, without waiting, before it is used: that is no mistake when no time is left"
    monkeypatch.setitem(redis_servers._parsers, 'careful', parser=='redis-py')
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

def test_a_command_that_was_damaged_on_its_way_is_repeated(link):
    calls = []
    def damaged(client):
        calls.append(1)
        return client.execute_command('GE\x01', 'a') if len(calls)==1 else client.get('a')
    assert link.call(damaged)==b'1' and len(calls)==2

# --- values that the server does not accept, and locks

def test_a_value_that_is_too_large_for_the_server_is_a_failed_sample(fresh):
    "The server closes the connection, in the middle of a transaction; before, the ingest went on forever"
    redis.Redis.from_url(fresh.url).config_set('proto-max-bulk-len', 2_000_000)
    sizes = {3:2_000_001, 4:2_000_000, 17:5_000_000}
    source = [{'x.bin':bytes([i])*sizes.get(i, 100), 'id.i4':i} for i in range(30)]
    report = to_redis(source, fresh.url, 'big', num_workers=1, progress=False)
    store = RedisStore(fresh.url, 'big')
    reasons = dict(store.failures()).values()
    assert report.failed==len(reasons)==2 and len(store)==28
    assert all('2,000,000 (its setting proto-max-bulk-len)' in why for why in reasons)
    assert any('5,000,000 bytes' in why and 'x.bin' in why for why in reasons)
    assert sorted(store.get_many(range(28), 'id.i4')['id.i4'].tolist())==[i for i in range(30) if i not in (3,17)]

def test_a_connection_that_is_lost_in_every_transaction_ends_at_the_deadline(fresh):
    "The server's buffer for a query is smaller than what is written: each attempt loses its connection"
    admin = redis.Redis.from_url(fresh.url)
    admin.config_set('client-query-buffer-limit', '1mb')
    before = admin.info('stats')['total_connections_received']
    source = [{'x.bin':bytes([i])*900_000} for i in range(9)]
    with pytest.raises(StoreUnavailable):
        to_redis(source, RedisLink(fresh.url, timeout=1), 'big', num_workers=1, progress=False)
    assert admin.info('stats')['total_connections_received']-before<200
    admin.config_set('client-query-buffer-limit', '1gb')
    to_redis(source, fresh.url, 'big', num_workers=1, progress=False)
    assert len(RedisStore(fresh.url, 'big'))==9

def test_a_lock_that_could_not_be_released_does_not_block_the_next_call_of_this_process(fresh):
    "The server was away when the ingest ended; its lease of 30 s has not ended"
    first = RedisWriter(RedisLink(fresh.url, timeout=TIMEOUT), 'd')
    first.take_lock()
    fresh.proc.send_signal(signal.SIGSTOP)
    with pytest.raises(StoreUnavailable): first.close()
    fresh.proc.send_signal(signal.SIGCONT)
    assert redis.Redis.from_url(fresh.url).exists('d:ingest:lock')
    to_redis([{'txt':'a'}], fresh.url, 'd', num_workers=1, progress=False)
    second,third = (RedisWriter(RedisLink(fresh.url), 'e') for _ in range(2))
    second.take_lock()
    with pytest.raises(StoreBusy): third.take_lock()   # one that is held blocks others in the same process
    second.close()
