"A server that sends more than was asked for: memory does not grow with what it sends"
import os, platform, re, subprocess, sys, time
from pathlib import Path

import numpy as np
import pytest

from conftest import in_time
from fastai_remote import RedisStore, redis_server, StoreUnavailable, to_redis
from fastai_remote.store import redis_servers
from fastai_remote.store.redis_link import RedisLink
from fault_backends import NetworkFaults

class Endless(NetworkFaults):
    "Answers with `start`, when it is set, and then with `more` until the connection ends"
    start,more,sent = None,bytes(1<<18),0
    async def _pipe_answers(self, reader, writer, connection):
        try:
            while part:=await reader.read(65536):
                if self.start is not None:
                    writer.write(self.start)
                    while True:
                        writer.write(self.more)
                        self.sent += len(self.more)
                        await writer.drain()
                writer.write(self.damage(part) if self.damage else part)
                await writer.drain()
        except OSError: pass
        finally: writer.close()

@pytest.fixture(scope='module')
def proxied():
    with redis_server() as server, Endless(str(server.socket)) as proxy:
        to_redis([{'x.bin':bytes([i])*1000, 'id.i4':i} for i in range(64)], server.url, 'd', num_workers=1, progress=False)
        yield proxy,f'redis://127.0.0.1:{proxy.port}'

@pytest.fixture
def proxy(proxied, monkeypatch):
    monkeypatch.setitem(redis_servers._parsers, 'careful', False)
    yield proxied[0]
    proxied[0].start,proxied[0].more,proxied[0].sent = None,bytes(1<<18),0

@pytest.fixture
def url(proxied): return proxied[1]

def megabytes():
    "Memory of this process, also what it has only reserved"
    status = Path('/proc/self/status').read_text()
    return {name:int(re.search(rf'{name}:\s+(\d+)', status)[1])/1024 for name in ('VmRSS','VmHWM')}

ENDLESS = {'long value':(b'$1099511627776\r\n', bytes(1<<18)), 'long list':(b'*1073741824\r\n', b'$1\r\nx\r\n'*30_000),
           'list of lists':(b'', b'*1\r\n'*60_000), 'list of integers':(b'*8\r\n:1\r\n*3735928559\r\n', b':1\r\n'*30_000), 'long line':(b'+', b'x'*(1<<18)),
           'list of long values':(b'*64\r\n$536870912\r\n', bytes(1<<18))}

QUICK = [('long value','x.bin'), ('list of integers','id.i4'), ('long line','id.i4')]
EVERY = [(what, field) for what in ENDLESS for field in ('x.bin','id.i4')]

@pytest.mark.parametrize('what,field', [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
                                        for case in EVERY])
def test_a_batch_is_not_longer_than_its_dataset(proxy, url, what, field):
    store = RedisStore(url, 'd', timeout=1.5)
    store.get_many([0], 'x.bin')
    before = megabytes()['VmRSS']
    proxy.start,proxy.more = ENDLESS[what]
    with in_time(9), pytest.raises(StoreUnavailable, match='longer than what was asked for|does not speak|Protocol error|another reply|nesting|cannot understand'):
        store.get_many(np.arange(8), field)
    assert proxy.sent<80_000_000 and megabytes()['VmRSS']-before<120
    proxy.start = None
    assert bytes(store.get_many([5], 'x.bin')['x.bin'][0])==bytes([store[5]['id.i4']])*1000

def test_the_first_answer_is_not_longer_than_a_value_of_redis(proxy, url, monkeypatch):
    monkeypatch.setattr('fastai_remote.store.redis_link.LONGEST_VALUE', 1<<20)
    proxy.start,proxy.more = ENDLESS['long value']
    with pytest.raises(StoreUnavailable, match='longer than what was asked for'): RedisStore(url, 'd')
    assert proxy.sent<30_000_000

def test_repeated_samples_and_a_dataset_that_does_not_know_its_size(proxy, url):
    store = RedisStore(url, 'd')
    assert len(store.get_many([7]*5000, 'x.bin')['x.bin'])==5000
    store.manifest.nbytes = 0
    assert len(store.get_many(np.arange(64), 'x.bin')['x.bin'])==64

def test_a_value_is_read_that_is_longer_than_usual(url):
    to_redis([{'x.bin':bytes(20_000_000)}]+[{'x.bin':b''}]*9, url, 'long', num_workers=1, progress=False, shuffle=False)
    assert len(RedisStore(url, 'long').get_many(range(10), 'x.bin')['x.bin'][0])==20_000_000
    assert len(RedisLink(url).send([('GETRANGE', 'long:x.bin:0', 0, -1)])[0])==20_000_000

@pytest.mark.parametrize('sign', ['*','>','~','%','|'])
def test_one_flipped_bit_makes_a_list_of_an_integer(proxy, url, sign):
    """A checksum such as 3735928559; hiredis would reserve 30 GB and need a minute to free them

    A bit turns the colon of an integer into the sign of a list or of a pushed message; others are for sets and maps."""
    store = RedisStore(url, 'd', timeout=20, socket_timeout=.3)
    numbers = np.array([3,40,63])   # far apart: they are read by BITFIELD_RO
    want = store.get_many(numbers, ['x.bin','id.i4'])
    def flip(part):
        at = next((m.start() for m in re.finditer(rb':\d{9,10}\r\n', part)), None)
        if at is None: return part
        proxy.damage = None
        proxy.hits += 1
        return part[:at]+sign.encode()+part[at+1:]
    proxy.damage,proxy.hits = flip,0
    with in_time(5): got = store.get_many(numbers, ['x.bin','id.i4'])
    assert proxy.hits==1 and got['x.bin']==want['x.bin'] and (got['id.i4']==want['id.i4']).all()

DTYPES = ['i1','i2','i4','i8','u1','u2','u4','f2','f4','f8','bool']

@pytest.mark.parametrize('dtype', [*DTYPES,'bytes'])
def test_a_damaged_digit_is_noticed(proxy, url, dtype):
    "The first digit of each integer becomes another, or `-`: some no longer fit into the type that was asked for"
    field = 'x.bin' if dtype=='bytes' else f'x.{dtype}'
    def value(i):
        if dtype=='bytes': return bytes([i])*9
        return i%2==0 if dtype=='bool' else i if dtype[0]=='f' else np.iinfo(dtype).max-i
    values = [value(i) for i in range(64)]
    to_redis([{field:value} for value in values], url, 'digits', num_workers=1, progress=False, shuffle=False, overwrite=True)
    store = RedisStore(url, 'digits', timeout=20, socket_timeout=.3)
    numbers = np.array([3,40,63])   # far apart: they are read by BITFIELD_RO
    store.get_many(numbers, field)
    for digit in b'123456789-':
        def change(part):
            changed = re.sub(rb':\d(?=\d*\r\n)', b':'+bytes([digit]), part)
            if changed==part: return part
            proxy.damage = None
            proxy.hits += 1
            return changed
        proxy.damage,proxy.hits = change,0
        try: found = store.get_many(numbers, field)[field]
        finally: proxy.damage = None
        assert list(found)==[values[k] for k in numbers], chr(digit)

def test_a_range_of_another_length_is_asked_for_again(proxy, url):
    "A commit counts the codes of labels; the end of the range that it asks for is damaged on its way"
    def shorten(part):
        changed = re.sub(rb'(GETRANGE\r\n\$\d+\r\n[^\r]*cls~?#0\r\n\$1\r\n0\r\n\$3\r\n)3', rb'\g<1>1', part)
        if changed==part: return part
        proxy.damage_requests = None
        proxy.hits += 1
        return changed
    proxy.damage_requests,proxy.hits = shorten,0
    try: to_redis([{'cls':'ab'[i%2]} for i in range(64)], url, 'counted', vocab={'cls':['a','b']}, num_workers=1, progress=False)
    finally: proxy.damage_requests = None
    assert proxy.hits==1 and RedisStore(url, 'counted').manifest.counts['cls']==[32,32]

@pytest.mark.parametrize('careful', [False,True])
def test_values_that_look_like_lists_are_read(proxy, url, monkeypatch, careful):
    monkeypatch.setitem(redis_servers._parsers, 'careful', careful)
    texts = [f'*{10**12+i}\r\n>{10**12+i}\r\n'*i for i in range(20)]
    to_redis([{'txt':text} for text in texts], url, 'lists', num_workers=1, progress=False, shuffle=False, overwrite=True)
    store = RedisStore(url, 'lists')
    assert [bytes(text).decode() for text in store.get_many(range(20), 'txt')['txt']]==texts
    assert redis_servers._parsers['careful']

def test_numbers_after_signs_in_a_text_are_no_lists(proxy, url):
    "An HTML page, or a table with bars"
    texts = [f'<td>{10**12+i}</td> |{10**9}| %{10**8}~{10**8}' for i in range(20)]
    to_redis([{'txt':text} for text in texts], url, 'pages', num_workers=1, progress=False, shuffle=False, overwrite=True)
    assert [bytes(text).decode() for text in RedisStore(url, 'pages').get_many(range(20), 'txt')['txt']]==texts
    assert not redis_servers._parsers['careful']

PAGE_FAULTS = '''
import resource, sys
from fastai_remote import RedisStore
store = RedisStore(sys.argv[1], 'photos')
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for k in range(10): store.get_many(range(k, k+64), 'x.bin')
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt-before)/10
faults()
print(faults())
'''

@pytest.mark.skipif(platform.libc_ver()[0]!='glibc', reason='it is about the malloc of glibc')
@pytest.mark.parametrize('kilobytes', [100, 250])
def test_the_memory_of_a_batch_is_used_again(kilobytes):
    "A batch whose pages are new has a page fault for each 4 KB: 1,600 for values of 100 KB"
    env = {name:value for name,value in os.environ.items() if not name.startswith(('MALLOC_','GLIBC_TUNABLES'))}
    with redis_server() as server:
        to_redis([{'x.bin':bytes([i])*kilobytes*1000} for i in range(80)], server.url, 'photos', num_workers=1, progress=False)
        found = subprocess.run([sys.executable, '-c', PAGE_FAULTS, server.url], env=env, check=True, capture_output=True, text=True)
    assert float(found.stdout)<200
