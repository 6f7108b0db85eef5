"How long an operation is repeated while a server is away: until its `timeout` is over, by a clock that counts only what the retry loop sleeps"
import pickle, time

import pytest
import redis

from fastai_remote import StoreUnavailable
from fastai_remote.store.connection import Retries
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.store.storage import Storage

class Clock:
    "A clock that only moves while somebody sleeps, or when it is told to"
    def __init__(self): self.now,self.pauses = 1000.,[]
    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds

@pytest.fixture
def clock(monkeypatch):
    "Replaces the clock of the `time` module"
    c = Clock()
    monkeypatch.setattr(time, 'monotonic', lambda: c.now)
    monkeypatch.setattr(time, 'sleep', c.sleep)
    return c

OPENERS = {'Redis':(lambda **kw: RedisLink('redis://127.0.0.1:1', **kw), redis.ConnectionError), 'storage':(lambda **kw: Storage('memory://d', **kw), ConnectionError)}
both = pytest.mark.parametrize('what', OPENERS)

def seconds_until_it_gives_up(clock, place, error, each=0.):
    "Call `place` for an operation that always fails, after `each` seconds"
    def operation(_):
        clock.now += each
        raise error('nobody there')
    started = clock.now
    with pytest.raises(StoreUnavailable, match=r'nobody there.* \(\d+ attempts? in \d+\.\d s'): place.call(operation)
    return clock.now-started

@both
@pytest.mark.parametrize('timeout', [1.5,20.,300.])
@pytest.mark.parametrize('each', [0.,.3])
def test_attempts_end_when_the_timeout_is_over(clock, what, timeout, each):
    make,error = OPENERS[what]
    place = make(timeout=timeout)
    assert place.call(lambda _: 7)==7   # the server was there once
    took = seconds_until_it_gives_up(clock, place, error, each)
    assert timeout-.1<=took<=timeout+each and took>0

@both
def test_a_server_that_was_never_there_is_given_up_within_5_seconds(clock, what):
    make,error = OPENERS[what]
    assert 1<=seconds_until_it_gives_up(clock, make(), error)<=5

@both
def test_pauses_grow_up_to_2_seconds(clock, what):
    "And shrink in the last seconds, which are used, too"
    make,error = OPENERS[what]
    place = make(timeout=60)
    place.call(lambda _: 7)
    seconds_until_it_gives_up(clock, place, error)
    pauses = clock.pauses
    assert pauses[0]<=.05 and max(pauses)<=2 and min(pauses[10:-10])>=.4 and max(pauses[-2:])<1 and 30<=len(pauses)<=150

@both
def test_an_operation_that_works_again_is_not_repeated(clock, what):
    make,error = OPENERS[what]
    calls = []
    def operation(_):
        calls.append(1)
        if len(calls)<4: raise error('nobody there')
        return 'here'
    assert make().call(operation)=='here' and len(calls)==4==len(clock.pauses)+1

@both
def test_a_pickle_keeps_the_timeout(what):
    place = OPENERS[what][0](timeout=1.5)
    assert pickle.loads(pickle.dumps(place)).timeout==1.5

def test_a_process_that_stands_still_before_a_pause(clock, monkeypatch):
    "A busy machine may stop it between the decision to pause and the pause, for longer than is left: pauses are never negative"
    def sleep(seconds):
        if seconds<0: raise ValueError('sleep length must be non-negative')
        Clock.sleep(clock, seconds)
    class Slow(Retries):
        def _judge(self, error, handle):
            result = super()._judge(error, handle)
            clock.now += .6
            return result
    monkeypatch.setattr(time, 'sleep', sleep)
    retries = Slow('redis://somewhere', 1., pause=.02, longest_pause=1.)
    def attempt(): raise ConnectionError('nobody there')
    with pytest.raises(StoreUnavailable, match='nobody there'): retries.call(attempt, lambda error: True)
