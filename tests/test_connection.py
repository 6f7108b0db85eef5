"Openers recreate objects in other processes; retries repeat a call until a deadline; URLs and options are checked"
import math, os, pickle
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest

from fastai_remote.core import StoreUnavailable
from fastai_remote.store.connection import Opener, Retries
from fastai_remote.ingest.stores import RedisStore
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.store.storage import Storage
from fastai_remote.write.redis import RedisWriter
from fastai_remote.write.shards import ShardWriter

class Connection:
    def __init__(self, url, password=None): self.url,self.password,self.process = url,password,os.getpid()

class Dataset:
    def __init__(self, link, name): self.link,self.name = link,name

def connection_opener(password='s3cret'): return Opener(Connection, 'server', url='server', password=password)
def dataset_opener(password='s3cret', name='pets'):
    return Opener(Dataset, name, link=connection_opener(password), name=name)
def sent(o): return pickle.loads(pickle.dumps(o))

def test_an_opener_returns_the_same_object_while_the_arguments_are_the_same():
    "Also those of nested openers; one object is kept for each function"
    first = connection_opener()()
    assert connection_opener()() is first and sent(connection_opener())() is first
    one,other = dataset_opener('one')(),dataset_opener('other')()
    assert one is not other and (one.link.password,other.link.password)==('one','other')
    assert dataset_opener('other')() is other and dataset_opener('one')() is not one
    pets,cars = dataset_opener(name='pets')(),dataset_opener(name='cars')()
    assert pets is not cars and pets.link is cars.link
    assert Opener(dict, 'any', function=1, name=2, self=3)()=={'function':1, 'name':2, 'self':3}

def test_a_renewed_opener_makes_new_objects_once():
    "Nested ones, too; by `pickle` it is the same opener"
    first,opener = dataset_opener()(),dataset_opener().renewed()
    again = opener()
    assert again is not first and again.link is not first.link and again.name==first.name
    assert opener() is again and sent(opener)() is again and opener.renewed()() is not again

def test_nothing_is_kept_if_the_function_fails_and_repr_shows_no_secret():
    calls = []
    def fails_once(password):
        calls.append(password)
        if len(calls)==1: raise ValueError(password)
        return 'done'
    with pytest.raises(ValueError, match='hidden'): Opener(fails_once, 'fails', password='hidden')()
    assert Opener(fails_once, 'fails', password='hidden')()=='done'
    assert repr(dataset_opener())=="Opener(Dataset, 'pets')"
    assert 's3cret' not in repr([dataset_opener(), partial(print, connection_opener())])

def _open_twice(opener):
    one,two = opener(),opener()
    return one is two,one.link.process==os.getpid(),one.link.password

@pytest.mark.parametrize('method', ['fork', pytest.param('spawn', marks=pytest.mark.slow)])
def test_a_worker_makes_its_own_object(method):
    with ProcessPoolExecutor(1, get_context(method)) as workers:
        assert workers.submit(_open_twice, dataset_opener(method)).result()==(True,True,method)

@pytest.mark.parametrize('make', [lambda folder: RedisWriter(RedisLink('redis://:s3cret@localhost:1'), 'pets'),
                                  lambda folder: ShardWriter(Storage(folder), 1000, 5)])
def test_each_chunk_has_a_writer_of_its_own_on_one_connection(make, tmp_path):
    def lock_of(writer): return getattr(writer.place, 'lock', writer.place)
    writer = make(tmp_path)
    writer.plan,lock_of(writer).token = {'n':3},'token'
    opener = sent(writer.opener())
    others = [opener() for _ in range(4)]
    assert len(set(map(id, (writer, *others))))==5 and 's3cret' not in repr(opener)
    assert all((o.plan,lock_of(o).token,o.name)==({'n':3},'token',writer.name) for o in others)
    assert len({id(getattr(o, 'link', None) or o.storage) for o in others})==1

# --- retries

def handle(error):
    "Connections that break are temporary; a `PermissionError` is repeated at once; everything else is not repeated"
    if isinstance(error, PermissionError): return False
    if not isinstance(error, ConnectionError): raise error
    return True

def failing(*errors):
    "A call that raises these errors, one after the other, and then returns"
    errors = list(errors)
    def attempt():
        if errors: raise errors.pop(0)
        return 'done'
    return attempt

def test_a_call_is_repeated_while_its_errors_are_temporary(clock):
    for errors,attempts,n_pauses in (((),1,0), ((PermissionError(),),2,0), ((ConnectionError(),)*3,4,3)):
        clock.pauses.clear()
        retries = Retries('server', 100)
        assert retries.call(failing(*errors), handle)=='done'
        assert (retries.attempts,len(clock.pauses))==(attempts,n_pauses)
    error,retries = ValueError('wrong'),Retries('server', 1)
    with pytest.raises(ValueError) as e: retries.call(failing(error), handle)
    assert e.value is error and retries.attempts==1

def test_pauses_double_up_to_the_longest_and_are_shortened_at_random(clock):
    Retries('server', 100, pause=.5, longest_pause=3).call(failing(*[ConnectionError()]*5), handle)
    assert all(longest/2<=pause<=longest for pause,longest in zip(clock.pauses, [.5,1,2,3,3], strict=True))
    clock.pauses.clear()
    Retries('server', 100, pause=1, longest_pause=1).call(failing(*[ConnectionError()]*50), handle)
    assert all(.5<=pause<=1 for pause in clock.pauses) and len(set(clock.pauses))>40
    assert min(clock.pauses)<.6 and max(clock.pauses)>.9

def test_when_the_time_is_over_the_error_names_server_cause_attempts_and_time(clock):
    retries = Retries('redis://server', 3, pause=1, secrets=lambda: ['s3cret'], advice='; set URL')
    with pytest.raises(StoreUnavailable) as e: retries.call(failing(*[ConnectionError('reset by s3cret')]*99), handle)
    assert clock.now<=3 and type(e.value.__cause__) is ConnectionError and str(e.value.__cause__)=='reset by ***'
    attempts = f'{len(clock.pauses)+1} attempts in {clock.now:.1f} s'
    assert str(e.value)==f'redis://server: ConnectionError: reset by *** ({attempts}); set URL'

def test_the_error_names_the_last_attempt_that_had_time_to_fail(clock):
    retries,errors = Retries('server', 1, pause=.1),[ConnectionError('the reason'),ConnectionError('cut off')]
    def attempt():
        clock.advance(.1 if len(errors)==2 else max(0, retries.remaining()))
        raise errors.pop(0)
    with pytest.raises(StoreUnavailable, match='the reason.*2 attempts'): retries.call(attempt, handle)

# --- what is accepted

def test_what_follows_the_host_in_a_url_is_the_number_of_a_database():
    "redis-py uses database 0, or 12, for the wrong ones"
    for url in ('redis://localhost/pets', 'redis://me:secret@localhost/1/2', 'redis://h1,h2/pets',
                'redis+sentinel://h1,h2/main/pets'):
        with pytest.raises(ValueError, match='want the number of a database') as failed: RedisLink(url)
        assert 'secret' not in str(failed.value)
    for url in ('redis://localhost', 'redis://localhost/', 'redis://localhost/3', 'unix:///tmp/a/socket?db=3',
                'redis+sentinel://h1,h2/main', 'redis+sentinel://h1/main/3'): assert RedisLink(url).url==url

def test_options_are_those_of_redis_and_values_are_never_decoded():
    "They would be texts, and the errors would be those of a damaged answer"
    with pytest.raises(TypeError, match="RedisLink knows no 'tiemout'; did you mean 'timeout'"):
        RedisLink('redis://localhost?tiemout=3&db=2')
    for args,kwargs in ((['redis://localhost?decode_responses=True'], {}), ([], {'decode_responses':True})):
        with pytest.raises(TypeError, match='decode_responses: leave it out'): RedisLink(*args, **kwargs)

def test_a_name_in_place_of_a_url_is_shown():
    with pytest.raises(ValueError, match="'pets': want a redis://"): RedisStore('pets', 'redis://localhost')
    for url in ('me:s3cret@localhost', 'http://localhost?password=s3cret', 'localhost:6379', '', 'redis://localhost:port'):
        with pytest.raises(ValueError, match='want a redis://|URL') as failed: RedisStore(url, 'pets')
        assert 's3cret' not in str(failed.value)

def test_a_timeout_is_a_number_of_seconds():
    "With NaN, the only attempt would be the first one; a call without a deadline could wait for ever"
    link,storage = partial(RedisLink, 'redis://localhost:1'),partial(Storage, 'pets')
    for seconds in (math.nan, math.inf, -1, '5', None):
        for make,name in ((link,'timeout'), (link,'socket_timeout'), (storage,'timeout')):
            with pytest.raises(ValueError, match=f'^{name}={seconds!r}: want a number of seconds'):
                make(**{name:seconds})
