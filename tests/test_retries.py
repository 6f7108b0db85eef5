"How long an operation is repeated while a server is away: until its `timeout` is over"
import pickle, random

import pytest
import redis

from fastai_remote import StoreUnavailable
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.store.storage import Storage
from fastai_remote.testing import ManualClock

PLACES = {'Redis':(lambda **kw: RedisLink('redis://127.0.0.1:1', **kw), redis.ConnectionError),
          'storage':(lambda **kw: Storage('memory://d', **kw), ConnectionError)}

@pytest.fixture(params=PLACES)
def place(request):
    "A function that makes something whose `call` repeats, and the error that it repeats after"
    return PLACES[request.param]

def seconds_until_it_gives_up(clock, link, error, each=0.):
    "Call `link` for an operation that always fails, after `each` seconds"
    def operation(_):
        clock.advance(each)
        raise error('nobody there')
    began = clock.now
    with pytest.raises(StoreUnavailable, match=r'nobody there.* \(\d+ attempts? in \d+\.\d s'): link.call(operation)
    return clock.now-began

def test_attempts_are_made_until_the_timeout_is_over(place):
    "However long each takes; a server that was never there is given up within 5 seconds"
    make,error = place
    for timeout,each in ((1.5,0.), (1.5,.3), (20,0.), (300,0.), (300,.3), (7,4.)):
        with ManualClock() as clock:
            link = make(timeout=timeout)
            assert link.call(lambda _: 7)==7   # the server was there once
            assert timeout-.1<=seconds_until_it_gives_up(clock, link, error, each)<=timeout+each
            assert clock.pauses[0]<=.05 and max(clock.pauses)<=2 and len(clock.pauses)<=2.5*timeout+10
            assert pickle.loads(pickle.dumps(link)).timeout==timeout
    with ManualClock() as clock: assert 1<=seconds_until_it_gives_up(clock, make(), error)<=5

def test_pauses_are_never_negative(place):
    "A busy machine may stop the process before a pause, for longer than is left"
    class Standing(ManualClock):
        def monotonic(self):
            self.now += .4
            return self.now
        def sleep(self, seconds):
            assert seconds>=0
            super().sleep(seconds)
    make,error = place
    with Standing() as clock: seconds_until_it_gives_up(clock, make(timeout=2), error)

def test_pauses_leave_the_random_numbers_of_a_training_alone(place):
    "A thread may repeat a call while transforms draw from `random`, after a seed"
    make,error = place
    random.seed(7)
    before = random.getstate()
    with ManualClock() as clock: seconds_until_it_gives_up(clock, make(), error)
    assert clock.pauses and random.getstate()==before
