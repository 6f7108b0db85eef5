"A call ends within `timeout`, whatever the server does; and what users see of a server that is busy or refuses"
import signal, socket, threading, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import redis

from conftest import busy, wait_for
from fastai_remote import RedisStore, StoreBusy, StoreError, StoreUnavailable, to_redis
from fastai_remote.store import redis_servers
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.store.server import redis_server

TIMEOUT = 1.   # of the calls

def longest():
    "How long a call may take: much longer than its timeout only if the machine is busy"
    return 4*TIMEOUT*busy()

@contextmanager
def listening(talk):
    "A server that calls `talk(connection)` for each connection, in a thread; its port"
    with socket.create_server(('127.0.0.1', 0)) as server:
        def accept():
            while True:
                try: connection,_ = server.accept()
                except OSError: return
                threading.Thread(target=guarded, args=(connection,), daemon=True).start()
        def guarded(connection):
            try: talk(connection)
            except OSError: pass
        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]

def silent(connection):
    "Accepts a connection, and never says anything"
    while connection.recv(1<<16): pass

def endless(beginning, piece, seconds):
    "Returns a function that answers with `beginning`, and then with `piece` again and again, after `seconds` each"
    def talk(connection):
        connection.recv(1<<16)
        connection.sendall(beginning)
        while True:
            connection.sendall(piece)
            time.sleep(seconds)
    return talk

drip = endless(b'$100000\r\n', b'x', .02)   # a value of 100,000 bytes, at 50 bytes per second
flood = endless(b'$500000000000\r\n', b'x', .001)   # a value that never ends
many = endless(b'*1000000\r\n', b'$1\r\nx\r\n', .005)   # a list of many short values, slowly

def deaf(connection):
    "Never reads"
    time.sleep(30)

def seconds_until_unavailable(call):
    started = time.monotonic()
    with pytest.raises(StoreUnavailable): call()
    return time.monotonic()-started

WAYS = {'call':lambda link: link.call(lambda client: client.get('a')),
    'send':lambda link: link.send([('GET', 'a'), ('GET', 'b')])}

@pytest.mark.parametrize('talk', [silent,drip,flood,many], ids=['silent','drip','flood','many'])
@pytest.mark.parametrize('scheme', ['redis','rediss'])
def test_a_call_ends_within_its_timeout(talk, scheme):
    "Also the first, with the connection; with TLS the handshake does not end. Four links wait at the same time"
    with listening(talk) as port, ThreadPoolExecutor(4) as pool:
        def seconds(known, way):
            link = RedisLink(f'{scheme}://127.0.0.1:{port}', timeout=TIMEOUT)
            link.has_answered = known
            return seconds_until_unavailable(lambda: WAYS[way](link))
        waits = {(known, way):pool.submit(seconds, known, way) for known in (False, True) for way in WAYS}
        for case,wait in waits.items(): assert .5*TIMEOUT<=wait.result()<longest(), case

def test_a_name_server_that_is_silent(monkeypatch):
    "`getaddrinfo` has no timeout, and waits for each name server several times"
    look_up = socket.getaddrinfo
    def slow(host, *args, **kwargs):
        if host=='redis.example': time.sleep(10)
        return look_up('127.0.0.1' if host=='redis.example' else host, *args, **kwargs)
    monkeypatch.setattr(socket, 'getaddrinfo', slow)
    for way in WAYS.values():
        link = RedisLink('redis://redis.example:6379', timeout=TIMEOUT)
        assert .5*TIMEOUT<=seconds_until_unavailable(lambda: way(link))<longest()

def test_a_host_that_has_a_name(monkeypatch):
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, 'getaddrinfo', lambda host, *args, **kwargs: look_up(
        '127.0.0.1' if host=='redis.example' else host, *args, **kwargs))
    with redis_server(port=-1) as server:
        link = RedisLink(server.url.replace('127.0.0.1', 'redis.example'), timeout=5)
        assert 'redis.example' in link.url and link.call(lambda client: client.ping())
    missing = RedisLink('redis://no.such.host.invalid:1', timeout=TIMEOUT)
    with pytest.raises(StoreUnavailable, match='no.such.host.invalid'): missing.call(lambda client: client.ping())

def test_a_store_is_opened_within_its_timeout():
    with listening(drip) as port:
        assert seconds_until_unavailable(lambda: RedisStore(f'redis://127.0.0.1:{port}', 'd',
            timeout=TIMEOUT))<longest()

def test_a_server_that_does_not_read_what_is_sent():
    with listening(deaf) as port:
        link = RedisLink(f'redis://127.0.0.1:{port}', timeout=TIMEOUT)
        assert seconds_until_unavailable(lambda: link.call(lambda client: client.set('a', bytes(50_000_000))))<longest()

def test_a_slow_tls_handshake_ends_within_the_timeout():
    "The server sends a valid beginning of a handshake record, a byte at a time"
    def talk(connection):
        connection.recv(1<<16)
        for byte in b'\x16\x03\x03\x40\x00'+bytes(1000):
            connection.sendall(bytes([byte]))
            time.sleep(.02)
    with listening(talk) as port:
        link = RedisLink(f'rediss://127.0.0.1:{port}', timeout=TIMEOUT, ssl_cert_reqs='none')
        assert seconds_until_unavailable(lambda: link.call(lambda client: client.get('a')))<longest()

def test_a_value_that_is_sent_steadily_may_take_longer_than_socket_timeout(fresh):
    "`socket_timeout` limits the wait for the next bytes, `timeout` all of it"
    def talk(connection):
        connection.recv(1<<16)
        connection.sendall(b'$20\r\n')
        for _ in range(20):
            connection.sendall(b'x')
            time.sleep(.05)
        connection.sendall(b'\r\n')
    with listening(talk) as port:
        assert RedisLink(f'redis://127.0.0.1:{port}', timeout=60, socket_timeout=.6).call(
            lambda client: client.get('a'), timeout=60)==b'x'*20

def test_a_call_within_a_call_ends_with_the_outer_one():
    with listening(silent) as port:
        inner,outer = (RedisLink(f'redis://127.0.0.1:{port}', timeout=60) for _ in range(2))
        def call(client): return inner.call(lambda other: other.get('a'), timeout=60)
        assert seconds_until_unavailable(lambda: outer.call(call, timeout=TIMEOUT))<longest()

# --- what a server says instead of doing what it was asked

@pytest.fixture
def link(fresh):
    link = RedisLink(fresh.url, timeout=30)
    link.call(lambda client: client.set('a', b'1'))
    return link

def run_script(server, milliseconds):
    "Let the server run a script for this long, in a thread; returns when it is busy"
    script = "local t = redis.call('TIME'); repeat local u = redis.call('TIME') until "
    script += f"(u[1]-t[1])*1e3+(u[2]-t[2])/1e3>{milliseconds}"
    other = redis.Redis.from_url(server.url)
    other.config_set('lua-time-limit', 20)
    def run():
        try: other.eval(script, 0)
        except redis.RedisError: pass
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    def busy():
        try: return not redis.Redis.from_url(server.url, socket_timeout=.05).ping()
        except redis.TimeoutError: return False
        except redis.ResponseError as e: return 'BUSY' in str(e)
    wait_for(busy)
    return thread

def test_a_server_that_runs_a_script_is_asked_again(fresh, link):
    thread = run_script(fresh, 1500)
    assert link.call(lambda client: client.get('a'))==b'1'==link.send([('GET', 'a')])[0]
    thread.join(30)

def test_a_server_that_runs_a_script_for_too_long_is_explained(fresh, link):
    thread = run_script(fresh, 3000)
    with pytest.raises(StoreUnavailable, match=f'{link.url}: .*BUSY'):
        link.call(lambda client: client.get('a'), timeout=.5)
    thread.join(30)

def test_a_server_that_cannot_save_refuses_writes_until_it_can():
    "MISCONF: its disk is full, say"
    with redis_server(dbfilename='no.rdb', save='1 1') as server:
        (server.dir/'no.rdb').mkdir()   # the server cannot replace a folder by its dump
        client,link = redis.Redis.from_url(server.url),RedisLink(server.url, timeout=30)
        client.bgsave()
        def refuses():
            try: return not client.set('b', 1)
            except redis.ResponseError as e: return 'MISCONF' in str(e)
        wait_for(refuses)
        def queue(c): return c.pipeline().set('b', b'private value').execute()
        for write in (lambda c: c.set('b', b'private value'), queue):
            with pytest.raises(StoreUnavailable, match='MISCONF.*disk') as e: link.call(write, timeout=.5)
            assert 'private' not in str(e.value)
        threading.Timer(.5, lambda: client.config_set('stop-writes-on-bgsave-error', 'no')).start()
        assert link.call(queue, timeout=30)
        client.config_set('save', '')   # else it refuses to end

def test_a_replica_without_its_master_is_explained(fresh):
    "MASTERDOWN"
    with redis_server() as other:
        client = redis.Redis.from_url(other.url)
        client.config_set('replica-serve-stale-data', 'no')
        client.replicaof('127.0.0.1', 1)
        link = RedisLink(other.url, timeout=30)
        with pytest.raises(StoreUnavailable, match='MASTERDOWN|MASTER is down'):
            link.call(lambda c: c.get('a'), timeout=.5)
        threading.Timer(.5, lambda: redis.Redis.from_url(other.url).replicaof('NO', 'ONE')).start()
        assert link.call(lambda c: c.get('a'), timeout=30) is None

def test_a_replica_refuses_to_be_written_to():
    "READONLY: after a failover it may become the master"
    with redis_server() as other:
        client = redis.Redis.from_url(other.url)
        client.replicaof('127.0.0.1', 1)
        link = RedisLink(other.url, timeout=30)
        with pytest.raises(StoreUnavailable, match='(?i)read.?only'): link.call(lambda c: c.set('a', 1), timeout=.5)
        threading.Timer(.5, lambda: redis.Redis.from_url(other.url).replicaof('NO', 'ONE')).start()
        assert link.call(lambda c: c.set('a', 1), timeout=30)

@pytest.mark.parametrize('parser', ['hiredis','redis-py'])
def test_a_call_whose_time_is_over_before_it_asks(fresh, parser, monkeypatch):
    "A connection of the pool is looked at, without waiting, before it is used: that is no mistake when no time is left"
    monkeypatch.setitem(redis_servers._parsers, 'careful', parser=='redis-py')
    link = RedisLink(fresh.url, timeout=30)
    link.call(lambda client: client.set('a', 1))
    def late(client):
        time.sleep(.3)
        return client.get('a')
    with pytest.raises(StoreUnavailable, match='TimeoutError'): link.call(late, timeout=.2)
    assert link.call(lambda client: client.get('a'))==b'1'

@pytest.mark.parametrize('how', ['call','pipeline','transaction','send'])
def test_other_errors_of_the_server_are_named(link, how):
    "Never an error of redis-py; and the values that were sent are not shown"
    def wrong(client):
        if how=='call': return client.lpush('a', 'private value')
        return client.pipeline(transaction=how=='transaction').lpush('a', 'private value').execute()
    with pytest.raises(StoreError, match=f'{link.url}: the server refused a command: WRONGTYPE') as e:
        if how=='send': link.send([('GET', 'a'), ('LPUSH', 'a', 'private value'), ('GET', 'a')])
        else: link.call(wrong)
    assert 'private' not in str(e.value) and not isinstance(e.value, redis.RedisError)
    assert link.send([('GET', 'a')])==[b'1']   # the connection is in order

def test_a_reply_that_is_interrupted_is_never_the_reply_to_another_call(link, monkeypatch):
    "An interrupt between two replies: the connection is not used again"
    link.send([('SET', 'x', 'first'), ('SET', 'y', 'second')])
    client = link.client
    connection = client.connection_pool.get_connection()
    client.connection_pool.release(connection)
    read,calls = connection.read_response,[]
    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls)==2: raise KeyboardInterrupt
        return read(*args, **kwargs)
    monkeypatch.setattr(connection, 'read_response', interrupted)
    with pytest.raises(KeyboardInterrupt): link.send([('GET', 'x'), ('GET', 'y'), ('GET', 'y')])
    monkeypatch.undo()
    assert link.send([('GET', 'x')])==[b'first']

# --- values that the server does not accept

@pytest.mark.parametrize('num_workers', [1,2])
def test_a_value_that_is_too_large_for_the_server_is_a_failed_sample(fresh, num_workers):
    "The server closes the connection, in the middle of a transaction; before, the ingest went on forever"
    redis.Redis.from_url(fresh.url).config_set('proto-max-bulk-len', 2_000_000)
    sizes = {3:2_000_001, 4:2_000_000, 17:5_000_000}
    source = [{'x.bin':bytes([i])*sizes.get(i, 100), 'id.i4':i} for i in range(30)]
    report = to_redis(source, fresh.url, 'big', num_workers=num_workers, progress=False)
    store = RedisStore(fresh.url, 'big')
    assert report.failed==2 and len(store)==28
    reasons = dict(store.failures())
    assert len(reasons)==2 and all('2,000,000 (its setting proto-max-bulk-len)' in why for why in reasons.values())
    assert any('5,000,000 bytes' in why and 'x.bin' in why for why in reasons.values())
    assert sorted(store.get_many(range(28), 'id.i4')['id.i4'].tolist())==[i for i in range(30) if i not in (3,17)]

def test_a_connection_that_is_lost_in_every_transaction_ends_at_the_deadline(fresh):
    "The server's buffer for a query is smaller than what is written: each attempt loses its connection"
    redis.Redis.from_url(fresh.url).config_set('client-query-buffer-limit', '1mb')
    before = redis.Redis.from_url(fresh.url).info('stats')['total_connections_received']
    with pytest.raises(StoreUnavailable):
        to_redis([{'x.bin':bytes([i])*900_000} for i in range(9)], RedisLink(fresh.url, timeout=3), 'big',
            num_workers=1, progress=False)
    assert redis.Redis.from_url(fresh.url).info('stats')['total_connections_received']-before<200
    redis.Redis.from_url(fresh.url).config_set('client-query-buffer-limit', '1gb')
    to_redis([{'x.bin':bytes([i])*900_000} for i in range(9)], fresh.url, 'big', num_workers=1, progress=False)
    assert len(RedisStore(fresh.url, 'big'))==9

# --- locks, and requests that are damaged

def test_a_lock_that_could_not_be_released_does_not_block_the_next_call_of_this_process(fresh):
    "The server was away when the ingest ended; its lease of 30 s has not ended"
    from fastai_remote.write.redis import RedisWriter
    first = RedisWriter(RedisLink(fresh.url, timeout=1), 'd')
    first.take_lock()
    fresh.proc.send_signal(signal.SIGSTOP)
    with pytest.raises(StoreUnavailable): first.close()
    fresh.proc.send_signal(signal.SIGCONT)
    client = redis.Redis.from_url(fresh.url)
    assert client.exists('d:ingest:lock')
    to_redis([{'txt':'a'}], fresh.url, 'd', num_workers=1, progress=False)
    second,third = (RedisWriter(RedisLink(fresh.url), 'e') for _ in range(2))
    second.take_lock()
    with pytest.raises(StoreBusy): third.take_lock()   # one that is held blocks others in the same process
    second.close()

def test_a_command_that_was_damaged_on_its_way_is_repeated(link):
    calls = []
    def damaged(client):
        calls.append(1)
        return client.execute_command('GE\x01', 'a') if len(calls)==1 else client.get('a')
    assert link.call(damaged)==b'1' and len(calls)==2
