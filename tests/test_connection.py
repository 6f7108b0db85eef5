"Openers recreate objects in other processes; retries repeat a call until a deadline"
import math, os, pickle
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from types import SimpleNamespace

import pytest

from fastai_remote.core import StoreUnavailable
from fastai_remote.store import connection
from fastai_remote.store.connection import Opener, Retries
from fastai_remote.store.redis import RedisStore
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.store.storage import Storage
from fastai_remote.write.redis import RedisWriter
from fastai_remote.write.shards import ShardWriter

class Connection:
    "Counts how often it was made in this process"
    made = 0
    def __init__(self, url, password=None):
        self.url,self.password,self.process = url,password,os.getpid()
        Connection.made += 1

class Dataset:
    def __init__(self, link, name): self.link,self.name = link,name

def connection_opener(password='s3cret'): return Opener(Connection, 'server', url='server', password=password)
def dataset_opener(password='s3cret', name='pets'): return Opener(Dataset, name, link=connection_opener(password), name=name)

@pytest.fixture(autouse=True)
def nothing_opened(monkeypatch): monkeypatch.setattr(connection, '_opened', {})

def test_an_opener_returns_the_same_object_while_the_arguments_are_the_same():
    first = connection_opener()()
    assert connection_opener()() is first and pickle.loads(pickle.dumps(connection_opener()))() is first
    assert connection_opener('another')() is not first

def test_different_secrets_of_a_nested_opener_give_different_objects():
    one,other = dataset_opener('one')(),dataset_opener('other')()
    assert one is not other and (one.link.password,other.link.password)==('one','other')
    assert dataset_opener('other')() is other

def test_a_renewed_opener_makes_new_objects_once():
    "Nested ones, too; by `pickle` it is the same opener"
    first,opener = dataset_opener()(),dataset_opener().renewed()
    again = opener()
    assert again is not first and again.link is not first.link and again.name==first.name
    assert opener() is again and pickle.loads(pickle.dumps(opener))() is again and opener.renewed()() is not again

def test_two_datasets_share_the_connection():
    pets,cars = dataset_opener(name='pets')(),dataset_opener(name='cars')()
    assert pets is not cars and pets.link is cars.link

def test_one_object_is_kept_for_each_function():
    for k in range(5): dataset_opener(name=f'pets{k}')()
    assert set(connection._opened)=={Connection,Dataset}

def test_an_argument_may_have_any_name(): assert Opener(dict, 'any', function=1, name=2, self=3)()=={'function':1, 'name':2, 'self':3}

def test_repr_shows_the_name_and_no_secret():
    assert repr(dataset_opener())=="Opener(Dataset, 'pets')" and 's3cret' not in repr([dataset_opener(), partial(print, connection_opener())])

def test_nothing_is_kept_if_the_function_fails():
    def fails(): raise ValueError
    for _ in range(2):
        with pytest.raises(ValueError): Opener(fails, 'fails')()
    assert not connection._opened

def _open_twice(opener):
    one,two = opener(),opener()
    return one is two,one.link.process==os.getpid(),one.link.password

@pytest.mark.parametrize('method', ['fork','spawn'])
def test_a_worker_makes_its_own_object(method):
    opener = dataset_opener()
    if method=='spawn': opener()
    with ProcessPoolExecutor(1, get_context(method)) as workers: assert workers.submit(_open_twice, opener).result()==(True,True,'s3cret')

def test_a_connection_is_recreated_with_its_secret_and_its_options():
    link = pickle.loads(pickle.dumps(RedisLink('redis://:s3cret@localhost:1', timeout=3, db=2).opener()))()
    assert link.reveal()==RedisLink('redis://:s3cret@localhost:1', timeout=3, db=2).reveal()
    storage = Storage('s3://bucket/pets', 3, {'key':'me', 'secret':'hush-hush'})
    assert pickle.loads(pickle.dumps(storage.opener()))().reveal()==storage.reveal()
    assert not any(s in repr([storage.opener(), RedisLink('redis://:s3cret@localhost:1').opener()]) for s in ('s3cret','hush'))

@pytest.mark.parametrize('make', [lambda d: RedisWriter(RedisLink('redis://:s3cret@localhost:1'), 'pets'), lambda d: ShardWriter(Storage(d), 1000, 5)])
def test_each_chunk_has_a_writer_of_its_own_on_one_connection(make, tmp_path):
    writer = make(tmp_path)
    writer.plan,writer.lock.token = {'n':3},'token'
    opener = pickle.loads(pickle.dumps(writer.opener()))
    with ThreadPoolExecutor(4) as threads: one,*others = list(threads.map(lambda _: opener(), range(4)))
    assert len({id(w) for w in (writer,one,*others)})==5 and (one.plan,one.lock.token,one.name)==({'n':3},'token',writer.name)
    again = opener()
    assert getattr(again, 'link', None) is getattr(opener(), 'link', None) and getattr(again, 'storage', None) is getattr(opener(), 'storage', None)
    assert 's3cret' not in repr(opener)

class Clock:
    "Time that passes only when somebody sleeps, or says so"
    def __init__(self, monkeypatch):
        self.now,self.pauses = 0.,[]
        monkeypatch.setattr(connection, 'time', SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds

@pytest.fixture
def clock(monkeypatch): return Clock(monkeypatch)

def handle(error):
    "Connections that break are temporary; a `PermissionError` is repeated at once; everything else is not repeated"
    if isinstance(error, PermissionError): return False
    if not isinstance(error, ConnectionError): raise error
    return True

def failing(*errors, result='done', takes=0, clock=None):
    "A call that raises these errors, one after the other, and then returns"
    errors = list(errors)
    def attempt():
        if clock: clock.now += takes
        if errors: raise errors.pop(0)
        return result
    return attempt

def test_a_call_that_succeeds_is_made_once(clock):
    retries = Retries('server', 1)
    assert retries.call(failing(), handle)=='done' and retries.attempts==1 and not clock.pauses

def test_pauses_double_up_to_the_longest_and_are_shortened_at_random(clock, monkeypatch):
    monkeypatch.setattr(connection, 'random', SimpleNamespace(uniform=lambda a, b: {(.5, 1):1.}[a,b]))
    assert Retries('server', 100, pause=.5, longest_pause=3).call(failing(*[ConnectionError()]*5), handle)=='done'
    assert clock.pauses==[.5, 1, 2, 3, 3]
    clock.pauses.clear()
    monkeypatch.undo()
    clock.__init__(monkeypatch)
    Retries('server', 100, pause=1, longest_pause=1).call(failing(*[ConnectionError()]*50), handle)
    assert all(.5<=p<=1 for p in clock.pauses) and len(set(clock.pauses))>40

def test_an_error_that_is_handled_may_be_repeated_without_a_pause(clock):
    retries = Retries('server', 1)
    assert retries.call(failing(PermissionError(), clock=clock), handle)=='done' and retries.attempts==2 and not clock.pauses

def test_an_error_that_is_not_temporary_is_raised_at_once(clock):
    error,retries = ValueError('wrong'),Retries('server', 1)
    with pytest.raises(ValueError) as e: retries.call(failing(error), handle)
    assert e.value is error and retries.attempts==1 and not clock.pauses

def test_when_the_time_is_over_the_error_names_server_cause_attempts_and_time(clock):
    last = ConnectionError('reset by s3cret')
    with pytest.raises(StoreUnavailable) as e: Retries('redis://server', 3, pause=1, secrets=['s3cret'], advice='; set URL').call(failing(*[last]*99), handle)
    assert clock.now<=3 and type(e.value.__cause__) is ConnectionError and str(e.value.__cause__)=='reset by ***'
    n = len(clock.pauses)+1
    assert str(e.value)==f'redis://server: ConnectionError: reset by *** ({n} attempts in {clock.now:.1f} s); set URL'

def test_one_attempt_is_written_in_the_singular(clock):
    with pytest.raises(StoreUnavailable, match=r'server: ConnectionError: reset \(1 attempt in 0\.0 s\)'): Retries('server', 0).call(failing(ConnectionError('reset')), handle)

def test_attempts_are_made_as_long_as_there_is_time(clock):
    "An attempt may begin shortly before the deadline: the caller ends it when `remaining()` is 0"
    retries,seen = Retries('server', 7, pause=.1),[]
    def attempt():
        seen.append(retries.remaining())
        clock.now += min(4, seen[-1])
        raise ConnectionError
    with pytest.raises(StoreUnavailable, match=r'2 attempts in 7\.0 s'): retries.call(attempt, handle)
    assert seen[0]==7 and 2.9<=seen[1]<3 and retries.remaining()==pytest.approx(0)

def test_the_error_names_the_last_attempt_that_had_time_to_fail(clock):
    retries,errors = Retries('server', 1, pause=.1),[ConnectionError('the reason'),ConnectionError('cut off')]
    def attempt():
        clock.now += .1 if len(errors)==2 else max(0, retries.remaining())
        raise errors.pop(0)
    with pytest.raises(StoreUnavailable, match='the reason.*2 attempts'): retries.call(attempt, handle)
def test_another_attempt_starts_as_long_as_there_is_time(clock):
    "The first attempt took 4 of 7 seconds, and so does the second, if nobody cuts it off"
    retries = Retries('server', 7, pause=.1)
    with pytest.raises(StoreUnavailable, match=r'2 attempts in 8\.\d s'): retries.call(failing(ConnectionError(), ConnectionError(), takes=4, clock=clock), handle)
    assert retries.remaining()<0

@pytest.mark.parametrize('url', ['redis://localhost/pets', 'redis://me:secret@localhost/1/2', 'redis://h1,h2/pets', 'redis+sentinel://h1,h2/main/pets'])
def test_what_follows_the_host_is_the_number_of_a_database(url):
    "redis-py uses database 0, or 12, for these"
    with pytest.raises(ValueError, match='want the number of a database') as failed: RedisLink(url)
    assert 'secret' not in str(failed.value)

@pytest.mark.parametrize('url', ['redis://localhost', 'redis://localhost/', 'redis://localhost/3', 'unix:///tmp/a/socket?db=3', 'redis+sentinel://h1,h2/main', 'redis+sentinel://h1/main/3'])
def test_urls_with_and_without_a_database(url): assert RedisLink(url).url==url

def test_options_in_a_url_are_those_of_redis():
    with pytest.raises(TypeError, match="no argument is called 'tiemout'"): RedisLink('redis://localhost?tiemout=3&db=2')

def test_values_are_never_decoded():
    "They would be texts, and the errors would be those of a damaged answer"
    for args,kwargs in ((['redis://localhost?decode_responses=True'], {}), ([], {'decode_responses':True})):
        with pytest.raises(TypeError, match='decode_responses: leave it out'): RedisLink(*args, **kwargs)

def test_a_name_in_place_of_a_url_is_shown():
    with pytest.raises(ValueError, match="'pets': want a redis://"): RedisStore('pets', 'redis://localhost')
    for url in ('me:s3cret@localhost', 'http://localhost?password=s3cret'):
        with pytest.raises(ValueError, match='want a redis://|not a URL') as failed: RedisStore(url, 'pets')
        assert 's3cret' not in str(failed.value)

@pytest.mark.parametrize('seconds', [math.nan, math.inf, -1, '5', None])
@pytest.mark.parametrize('make,name', [
    (lambda seconds: RedisLink('redis://localhost:1', timeout=seconds), 'timeout'),
    (lambda seconds: RedisLink('redis://localhost:1', socket_timeout=seconds), 'socket_timeout'),
    (lambda seconds: Storage('s3://bucket/pets', timeout=seconds), 'timeout'),
    (lambda seconds: Storage('pets', timeout=seconds), 'timeout')])
def test_a_timeout_is_a_number_of_seconds(make, name, seconds):
    "With NaN, the only attempt would be the first one; a call without a deadline could wait for ever"
    with pytest.raises(ValueError, match=f'^{name}={seconds!r}: want a number of seconds'): make(seconds)
