"A server that sends more than was asked for: memory does not grow with what it sends; and a damaged reply is noticed"
import os, platform, re, subprocess, sys
from pathlib import Path

import numpy as np
import pytest
import redis

from fastai_remote import RedisStore, redis_server, StoreUnavailable, to_redis
from fastai_remote.store import redis_servers
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.testing import ManualClock
from fault_backends import NetworkFaults

FAR_APART = np.array([3,40,63]) # Numbers that are read by BITFIELD_RO
options = dict(num_workers=1, progress=False, shuffle=False, overwrite=True)

class Endless(NetworkFaults):
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
                writer.write(self.damage(part) if self.damage else part)
                await writer.drain()
        except OSError: pass
        finally: writer.close()

    def damage_once(self, change, what='damage'):
        "Change the first part of an answer, or of a request, that `change` does not leave as it is"
        def damage(part):
            changed = change(part)
            if changed!=part:
                setattr(self, what, None)
                self.hits += 1
            return changed
        self.hits = 0
        setattr(self, what, damage)

@pytest.fixture(scope='module')
def proxied():
    with redis_server() as server, Endless(str(server.socket)) as proxy:
        to_redis([{'x.bin':bytes([i])*1000, 'id.i4':i} for i in range(64)], server.url, 'd', **options)
        yield proxy,f'redis://127.0.0.1:{proxy.port}'

@pytest.fixture
def proxy(proxied, monkeypatch):
    monkeypatch.setitem(redis_servers._parsers, 'careful', False)
    proxied[0].start,proxied[0].more,proxied[0].sent = None,bytes(1<<18),0
    yield proxied[0]
    proxied[0].start = proxied[0].damage = proxied[0].damage_requests = None

@pytest.fixture
def url(proxied): return proxied[1]

def written(url, name, samples, **kwargs):
    to_redis(samples, url, name, **{**options, **kwargs})
    return RedisStore(url, name)

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

def test_what_was_asked_for_may_be_long(proxy, url):
    "Repeated samples, a dataset that does not know its size, and a value that is longer than the others"
    store = RedisStore(url, 'd')
    assert len(store.get_many([7]*5000, 'x.bin')['x.bin'])==5000
    store.manifest.nbytes = 0
    assert len(store.get_many(np.arange(64), 'x.bin')['x.bin'])==64
    store = written(url, 'long', [{'x.bin':bytes(20_000_000)}]+[{'x.bin':b''}]*9)
    assert len(store.get_many(range(10), 'x.bin')['x.bin'][0])==20_000_000
    assert len(RedisLink(url).send([('GETRANGE', 'long:x.bin:0', 0, -1)])[0])==20_000_000

def test_one_flipped_bit_makes_a_list_of_an_integer(proxy, url):
    """A checksum such as 3735928559; hiredis would reserve 30 GB and need a minute to free them

    A bit turns the colon of an integer into the sign of a list or of a pushed message; others are for sets and maps."""
    store = RedisStore(url, 'd', timeout=60, socket_timeout=.3)
    want = store.get_many(FAR_APART, ['x.bin','id.i4'])
    for sign in '*>~%|':
        proxy.damage_once(lambda part: re.sub(rb':(\d{9,10}\r\n)', sign.encode()+rb'\1', part, count=1))
        read = store.get_many(FAR_APART, ['x.bin','id.i4'])
        assert proxy.hits==1 and read['x.bin']==want['x.bin'] and (read['id.i4']==want['id.i4']).all(), sign

@pytest.mark.parametrize('dtype', ['i1','i2','i4','i8','u1','u2','u4','f2','f4','f8','bool','bytes'])
def test_a_damaged_digit_is_noticed(proxy, url, dtype):
    "The first digit of each integer becomes another, or `-`: some no longer fit into the type that was asked for"
    field = 'x.bin' if dtype=='bytes' else f'x.{dtype}'
    def value(i):
        if dtype=='bytes': return bytes([i])*9
        return i%2==0 if dtype=='bool' else i if dtype[0]=='f' else np.iinfo(dtype).max-i
    written(url, 'digits', [{field:value(i)} for i in range(64)])
    store = RedisStore(url, 'digits', timeout=60, socket_timeout=.3)
    store.get_many(FAR_APART, field)
    for digit in b'123456789-':
        proxy.damage_once(lambda part: re.sub(rb':\d(?=\d*\r\n)', b':'+bytes([digit]), part))
        assert list(store.get_many(FAR_APART, field)[field])==list(map(value, FAR_APART.tolist())), chr(digit)

def test_a_range_of_another_length_is_asked_for_again(proxy, url):
    "A commit counts the codes of labels; the end of the range that it asks for is damaged on its way"
    place = rb'(GETRANGE\r\n\$\d+\r\n[^\r]*cls~?#0\r\n\$1\r\n0\r\n\$3\r\n)3'
    proxy.damage_once(lambda part: re.sub(place, rb'\g<1>1', part), 'damage_requests')
    store = written(url, 'counted', [{'cls':'ab'[i%2]} for i in range(64)], vocab={'cls':['a','b']})
    assert proxy.hits==1 and store.manifest.counts['cls']==[32,32]

def test_values_that_look_like_lists_are_read(proxy, url, monkeypatch):
    "A careful parser is used then; not for numbers after signs in a text, such as an HTML page or a table with bars"
    pages = [f'<td>{10**12+i}</td> |{10**9}| %{10**8}~{10**8}' for i in range(20)]
    lists = [f'*{10**12+i}\r\n>{10**12+i}\r\n'*i for i in range(20)]
    for is_careful,texts in ((False,pages), (True,lists), (True,lists)):   # the second time from the beginning
        store = written(url, 'texts', [{'txt':text} for text in texts])
        assert store.get_many(range(20), 'txt', decode=True)['txt']==texts
        assert redis_servers._parsers['careful']==is_careful

# --- passwords

@pytest.fixture
def secured():
    "Client of a server with a password, a proxy before it, and a link through the proxy, which has been used"
    with redis_server(port=-1, requirepass='pw') as server, Endless(('127.0.0.1', server.port)) as proxy:
        link,admin = RedisLink(f'redis://:pw@127.0.0.1:{proxy.port}'),redis.Redis.from_url(server.url)
        assert link.call(lambda client: client.ping())
        yield admin,proxy,link

def hang_up(admin): admin.execute_command('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes')

def test_a_damaged_answer_to_the_password_is_not_a_refusal(secured):
    "The server has accepted it before: it is sent again; one that was changed is refused"
    admin,proxy,link = secured
    proxy.damage_once(lambda part: part.replace(b'K', b'J') if part.startswith(b'+OK') else part)
    hang_up(admin)
    assert link.call(lambda client: client.ping()) and proxy.hits==1
    proxy.damage_once(lambda part: part.replace(b'pw', b'pv') if b'AUTH' in part else part, 'damage_requests')
    hang_up(admin)
    assert link.call(lambda client: client.ping()) and proxy.hits==1
    admin.config_set('requirepass', 'other')
    hang_up(admin)
    with ManualClock(), pytest.raises(StoreUnavailable, match=r'refused.*[3-6] attempts in'):
        link.call(lambda client: client.ping())

# --- memory

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

@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0]!='glibc', reason='it is about the malloc of glibc')
def test_the_memory_of_a_batch_is_used_again(server):
    "A batch whose pages are new has a page fault for each 4 KB: 1,600 for values of 100 KB"
    env = {name:value for name,value in os.environ.items() if not name.startswith(('MALLOC_','GLIBC_TUNABLES'))}
    for kilobytes in (100,250):
        written(server.url, 'photos', [{'x.bin':bytes([i])*kilobytes*1000} for i in range(80)])
        command = [sys.executable, '-c', PAGE_FAULTS, server.url]
        assert float(subprocess.run(command, env=env, check=True, capture_output=True).stdout)<200
