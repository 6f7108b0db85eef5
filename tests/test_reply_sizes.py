"A server that sends more than was asked for is an error, and memory does not grow with what it sends"
import re
from pathlib import Path

import numpy as np
import pytest

from conftest import private_server
from fastai_remote import RedisStore, StoreUnavailable, to_redis
from fastai_remote.store import redis_servers
from fastai_remote.testing import ManualClock
from faultproxy import FaultProxy

class Endless(FaultProxy):
    "Answers with `start`, when it is set, and then with `more` until the connection ends"
    start,more,sent = None,bytes(1<<18),0
    async def _pipe_answers(self, reader, writer, connection):
        try:
            while part:=await reader.read(65536):
                if self.start is not None:
                    writer.write(self.start)
                    while self.start is not None:
                        writer.write(self.more)
                        self.sent += len(self.more)
                        await writer.drain()
                writer.write(part)
                await writer.drain()
        except OSError: pass
        finally: writer.close()

@pytest.fixture(scope='module')
def proxied():
    with private_server() as server, Endless(str(server.socket)) as proxy:
        samples = [{'x.bin':bytes([i])*1000, 'id.i4':i} for i in range(64)]
        to_redis(samples, server.url, 'd', num_workers=1, progress=False, shuffle=False)
        yield proxy

@pytest.fixture
def proxy(proxied, monkeypatch):
    monkeypatch.setitem(redis_servers._parsers, 'careful', False)
    proxied.start,proxied.more,proxied.sent = None,bytes(1<<18),0
    yield proxied
    proxied.start = None

@pytest.fixture
def url(proxy): return f'redis://127.0.0.1:{proxy.port}'

def megabytes():
    "Memory of this process"
    return int(re.search(r'VmRSS:\s+(\d+)', Path('/proc/self/status').read_text())[1])/1024

ENDLESS = {
    'long value':('x.bin', b'$1099511627776\r\n', bytes(1<<18)),
    'long list':('x.bin', b'*1073741824\r\n', b'$1\r\nx\r\n'*30_000),
    'list of lists':('id.i4', b'', b'*1\r\n'*60_000),
    'list of integers':('id.i4', b'*8\r\n:1\r\n*3735928559\r\n', b':1\r\n'*30_000),
    'long line':('id.i4', b'+', b'x'*(1<<18)),
    'list of long values':('x.bin', b'*64\r\n$536870912\r\n', bytes(1<<18))}

@pytest.mark.parametrize('what', ENDLESS)
def test_a_batch_is_not_longer_than_its_dataset(proxy, url, what):
    store = RedisStore(url, 'd')
    store.get_many([0], 'x.bin')
    before = megabytes()
    field,proxy.start,proxy.more = ENDLESS[what]
    message = 'longer than what was asked for|does not speak|Protocol error|another reply|nesting|cannot understand'
    with ManualClock(), pytest.raises(StoreUnavailable, match=message) as e: store.get_many(np.arange(8), field)
    n_attempts = int(re.search(r'\((\d+) attempts', str(e.value))[1])
    assert proxy.sent<20_000_000*n_attempts and megabytes()-before<120
    proxy.start = None
    assert bytes(store.get_many([5], 'x.bin')['x.bin'][0])==bytes([store[5]['id.i4']])*1000

def test_the_first_answer_is_not_longer_than_a_value_of_redis(proxy, url, monkeypatch):
    monkeypatch.setattr('fastai_remote.store.redis_link.LONGEST_VALUE', 1<<20)
    _,proxy.start,proxy.more = ENDLESS['long value']
    with pytest.raises(StoreUnavailable, match='longer than what was asked for'): RedisStore(url, 'd')
    assert proxy.sent<30_000_000
