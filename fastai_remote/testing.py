"""Tests that every store, writer, source and codec must pass, as base classes

Docs: page `testing`"""

# Each interface has one suite of tests. A test class for a new implementation inherits the suite and defines how an
# object is made; pytest finds the rest. `tests/test_interfaces.py` does this for the implementations in this package.

import pickle, threading
from itertools import islice

import numpy as np

from .clock import Clock, use_clock
from .codec.base import Codec
from .core import StoreBusy, StoreExists, UnknownField
from .ingest.run import ingest
from .ingest.verify import verify_store
from .source.base import IndexedSource, Source, StreamedSource
from .store.base import Store
from .write.base import MemoryWriter, Place, Writer

# --- Stores

def raises(
    error, # An exception class, or a tuple of them
    function, # Called with the arguments that follow
    *args, **kwargs
)->Exception: # The exception
    "Calls `function`, and fails unless it raises `error`"
    try: function(*args, **kwargs)
    except error as e: return e
    raise AssertionError(f'{function} did not raise {error}')

def example(i:int)->dict:
    "Sample `i` of the tests: a text, a label, a list of labels, a number"
    return {'txt':f'number {i}', 'cls':'abc'[i%3], 'labels':['x','y'][:i%3], 'x.f4':i/4}

class StoreTests:
    "Tests of a `Store`. A subclass defines `make`"
    n = 20 # Samples in the store that `make` returns, at least 8
    has_labels = True # Can the store have labels? If not, the samples have only the fields `txt` and `x.f4`
    def make(self)->Store:
        "A store of `self.sample(i)` for i in `range(self.n)`, in this order"
        raise NotImplementedError

    def sample(self, i:int)->dict:
        "Sample `i` of the store that `make` returns"
        return {field:value for field,value in example(i).items() if self.has_labels or field in ('txt','x.f4')}

    def test_it_has_a_length_fields_and_a_vocabulary(self):
        store = self.make()
        assert len(store)==self.n and store.fields==list(self.sample(0))
        assert store.manifest.vocab==({'cls':['a','b','c'], 'labels':['x','y']} if self.has_labels else {})
        assert store.vocab==store.manifest.vocab.get('cls', [])
        if 'labels' in store.manifest.counts:
            counted = [sum(label in self.sample(i)['labels'] for i in range(self.n)) for label in 'xy']
            assert store.manifest.counts['labels']==counted

    def test_values_are_returned_in_the_order_of_the_numbers_which_may_repeat(self):
        got = self.make().get_many([7,2,7], ['txt','x.f4'])
        assert got['txt']==[b'number 7',b'number 2',b'number 7'] and got['x.f4'].tolist()==[1.75,.5,1.75]

    def test_labels_are_returned_as_codes(self):
        if self.has_labels: assert self.make().get_many(range(5), 'cls')['cls'].tolist()==[0,1,2,0,1]

    def test_no_numbers_return_no_values(self):
        got = self.make().get_many([], ['txt','x.f4'])
        assert got['txt']==[] and len(got['x.f4'])==0

    def test_a_sample_equals_what_was_written(self):
        store = self.make()
        assert [store[i] for i in (0, -1)]==[self.sample(0), self.sample(self.n-1)]
        assert store[2:4]==[self.sample(2), self.sample(3)]

    def test_get_many_decodes_if_asked(self):
        samples = [self.sample(4), self.sample(1)]
        got = self.make().get_many([4,1], list(samples[0]), decode=True)
        assert got=={field:[sample[field] for sample in samples] for field in samples[0]}

    def test_unknown_fields_and_numbers_raise_errors_that_say_what_exists(self):
        store = self.make()
        message = str(raises(UnknownField, store.get_many, [0], 'jpg'))
        assert store.name in message and 'txt' in message
        for wrong in (self.n, -1): raises(IndexError, store.get_many, [wrong], 'txt')
        raises(IndexError, store.__getitem__, self.n)
        raises(TypeError, store.get_many, [.5], 'txt')

    def test_it_can_be_pickled_and_opened_in_a_worker(self):
        store = self.make()
        for other in (pickle.loads(pickle.dumps(store)), pickle.loads(pickle.dumps(store.opener()))()):
            assert repr(other) and other.get_many([3], 'txt')=={'txt':[b'number 3']} and len(other)==self.n

    def test_verify_finds_no_damage(self): assert verify_store(self.make(), num_workers=1).bad==0

# --- Writers

def _fails_if_odd(raw):
    if raw%2: raise ValueError(f'{raw} is odd')
    return example(raw)

def new_plan(**changes)->dict:
    "The plan of an ingest of four texts; `changes`: entries that replace others"
    fields = {'txt':{'codec':'txt', 'dtype':None}, 'txt.crc':{'codec':'crc', 'dtype':'u4'}}
    plan = dict(signature='one', n=4, chunk=4, fields=fields, splits=None, vocab={}, stats=None, open=False)
    return {**plan, **changes}

class PlaceTests:
    "Tests of a `Place`. A subclass defines `make`, `is_empty` and, unless only one process can write there, `lose`"
    def make(self)->Place:
        "All calls in one test return objects for the same place, which is empty when the test begins"
        raise NotImplementedError
    def is_empty(self)->bool:
        "Is nothing left there, but for a note that the place was used?"
        raise NotImplementedError
    lose = None # `lose(place)`: ends the lock that `place` holds, as if it had not been renewed for too long

    def test_one_process_at_a_time_has_the_lock(self):
        first = self.make()
        with first.locked(): raises(StoreBusy, self.make().take)
        with self.make().locked(): pass

    def test_an_empty_place_has_neither_dataset_nor_plan(self):
        place = self.make()
        with place.locked():
            place.check()
            assert place.committed() is None and place.plan() is None and not place.clean_up()

    def test_whoever_comes_next_finds_the_plan_as_it_was_changed_last(self):
        place = self.make()
        with place.locked():
            plan = place.begin(new_plan(open=True))
            assert plan.items()>=new_plan(open=True, fields=plan['fields']).items() and place.plan()==plan
            place.store_plan({**plan, 'n':12, 'open':False})
        other = self.make()
        with other.locked():
            other.check()
            other.clean_up()
            assert other.plan()=={**plan, 'n':12, 'open':False} and other.committed() is None

    def test_a_dropped_plan_leaves_nothing_behind(self):
        place = self.make()
        with place.locked():
            place.begin(new_plan(open=True))
            place.drop_plan()
            assert place.plan() is None and not place.clean_up()
        assert self.is_empty()

    def test_nobody_changes_a_place_after_losing_the_lock(self):
        if self.lose is None: return
        place = self.make()
        place.take()
        plan = place.begin(new_plan(open=True))
        self.lose(place)
        raises(StoreBusy, place.store_plan, {**plan, 'n':8})
        raises(StoreBusy, place.drop_plan)
        raises(StoreBusy, place.begin, new_plan(open=True))
        place.close()
        with self.make().locked(): assert self.make().plan()==plan

class WriterTests:
    "Tests of a `Writer`. A subclass defines `make` and `open`"
    def make(self)->Writer:
        "A writer. All calls in one test return writers for the same place, which is empty when the test begins"
        raise NotImplementedError
    def open(self)->Store:
        "Opens the dataset that was written"
        raise NotImplementedError

    def write(self, source, fn=example, **kwargs):
        "Write `source` with a new writer, in order and in this process; `kwargs`: as for `ingest`; returns the report"
        options = {'shuffle':False, 'num_workers':1, 'progress':False, **kwargs}
        return ingest(source, self.make(), fn, **options)

    def test_what_was_written_can_be_read(self):
        report = self.write(list(range(50)))
        store = self.open()
        assert report.written==len(store)==50 and [store[i] for i in (0,17,49)]==[example(i) for i in (0,17,49)]

    def test_samples_that_fail_leave_no_gaps_and_the_order_as_it_was(self):
        source = {'train':list(range(40)), 'valid':list(range(40, 60))}
        report = self.write(source, _fails_if_odd, max_failed=1.)
        store = self.open()
        assert (report.written,report.failed)==(30,30) and store.splits=={'train':[0,20], 'valid':[20,30]}
        assert [o['txt'] for o in store[:]]==[f'number {i}' for i in range(0, 60, 2)]
        assert len(list(store.failures()))==report.failed

    def test_a_dataset_is_replaced_only_if_asked(self):
        self.write(list(range(10)))
        raises(StoreExists, self.write, list(range(20)))
        assert len(self.open())==10
        self.write(list(range(20)), overwrite=True)
        assert len(self.open())==20

    def test_a_stream_is_written_in_its_order(self):
        self.write(iter(range(30)))
        store = self.open()
        assert [o['txt'] for o in store[:]]==[f'number {i}' for i in range(30)]

    def test_a_second_writer_is_refused(self):
        first = self.make()
        first.begin(new_plan())
        try: raises(StoreBusy, self.make().begin, new_plan())
        finally:
            first.abandon()
            first.close()

    def test_the_first_record_of_a_chunk_counts(self):
        "Of two attempts, each of which fails at another sample; also if the second one writes what had failed"
        leader = self.make()
        leader.begin(new_plan(fields={'id':{'codec':'i8', 'dtype':'i8'}}))
        for fails in 1,3:
            writer,numbers = leader.opener()(),np.array([i for i in range(4) if i!=fails])
            writer.put(numbers, {'id':numbers*10})
            writer.done(0, dict(ok=3, failed=1, bytes=24, gaps=[[fails,fails+1]]), [(f'sample {fails}', 'failed')])
        leader.commit()
        leader.close()
        store = self.open()
        assert [o['id'] for o in store[:]]==[0,20,30] and list(store.failures())==[('sample 1','failed')]

    def test_an_interrupted_ingest_is_resumed(self):
        calls = []
        def stops_once(raw):
            calls.append(raw)
            if raw==35 and calls.count(35)==1: raise KeyboardInterrupt
            return example(raw)
        raises(KeyboardInterrupt, self.write, list(range(48)), stops_once, chunk=16)
        report = self.write(list(range(48)), stops_once, chunk=16)
        assert report.resumed>=16 and [o['txt'] for o in self.open()[:]]==[f'number {i}' for i in range(48)]

# --- Sources

class SourceTests:
    "Tests of a `Source`. A subclass defines `make`"
    def make(self)->Source:
        "A new source, of the same samples in each call: at least three, all of which can be stored without `fn`"
        raise NotImplementedError

    def samples(self, source:Source)->list:
        "All samples of `source`, in its order, as `load` returns them"
        if isinstance(source, IndexedSource): parts = [source.read(np.arange(len(source)))]
        else: parts = source.stream(2)
        return [source.load(raw) for part in parts for _,raw in part]

    def test_the_fingerprint_is_that_of_the_data(self):
        assert repr(self.make().fingerprint())==repr(self.make().fingerprint())

    def test_raw_samples_and_load_can_be_sent_to_a_worker(self):
        source = self.make()
        part = source.read(np.array([1])) if isinstance(source, IndexedSource) else next(iter(source.stream(1)))
        _,raw = next(iter(part))
        load,sent = pickle.loads(pickle.dumps(source.load)),pickle.loads(pickle.dumps(raw))
        assert repr(load(sent))==repr(source.load(raw))

    def test_reading_again_returns_the_same(self):
        assert repr(self.samples(self.make()))==repr(self.samples(self.make()))

    def test_samples_have_names_and_can_be_read_in_any_order(self):
        source = self.make()
        if not isinstance(source, IndexedSource): return
        samples = self.samples(source)
        part = source.read(np.array([2,0]))
        assert len(part)==2 and all(str(name) for name,_ in part)
        assert repr([source.load(raw) for _,raw in part])==repr([samples[2], samples[0]])

    def test_parts_of_a_stream_are_no_larger_than_asked_for(self):
        source = self.make()
        if not isinstance(source, StreamedSource): return
        lengths = [len(part) for part in islice(source.stream(2), 100)]
        assert sum(lengths)>=3 and max(lengths)<=2

    def test_it_can_be_written(self):
        writer = MemoryWriter()
        report = ingest(self.make(), writer, num_workers=1, progress=False)
        assert report.written==len(writer.store)>=3 and not report.failed

# --- Codecs

class CodecTests:
    "Tests of a `Codec`. A subclass sets `codec` and `values`, and `wrong` if there are objects that it must refuse"
    codec:Codec = None
    values:list = [] # Objects that the codec stores, at least one
    wrong:list = [] # Objects that it refuses

    def same(self, read, written)->bool:
        "Are two objects equal? Compares their `repr`; a subclass may compare more"
        return repr(read)==repr(written)

    def test_values_come_back_identical(self):
        assert self.values, 'set `values` to objects that the codec stores'
        for o in self.values:
            if self.codec.dtype is None: assert self.same(self.codec.from_bytes(self.codec.to_bytes(o)), o)
            else: assert self.same(self.codec.from_bytes(self.codec.to_array([o])[0]), o)

    def test_encoded_values_are_stored_unchanged(self):
        for o in self.values if self.codec.dtype is None else ():
            encoded = bytes(self.codec.to_bytes(o))
            assert bytes(self.codec.to_bytes(encoded))==encoded

    def test_wrong_values_are_refused(self):
        encode = self.codec.to_bytes if self.codec.dtype is None else lambda o: self.codec.to_array([o])
        for o in self.wrong: raises((TypeError,ValueError), encode, o)

# For example, here is a codec that stores a colour in three bytes. The suite passes, so that it can be registered and
# used as a field.

# --- Time

# Retries, leases and deadlines ask the functions of `clock`. A test replaces the clock behind them, so that an hour
# takes no time and nothing depends on how busy the machine is.

class ManualClock(Clock):
    """A clock that moves only when somebody sleeps, or by `advance`: `with ManualClock() as clock:`

    A thread of the background that waits for an event, such as one that renews a lease, waits until the clock has
    moved that far. The thread that made the clock waits for the event in real time: another thread is at work on it."""
    def __init__(self,
        now:float=None # Seconds that `monotonic` and `time` return at first; default: since 1970
    ):
        self.now = super().time() if now is None else now
        self.pauses = [] # How long was slept, a list of seconds
        self._owner,self._moved = threading.get_ident(),threading.Condition()

    def __enter__(self):
        self._using = use_clock(self)
        return self._using.__enter__()
    def __exit__(self, *error):
        self._using.__exit__(*error)
        self._using = None
        self.advance(0)

    def monotonic(self): return self.now
    def time(self): return self.now

    def advance(self,
        seconds:float # How far to move the clock
    ):
        with self._moved:
            self.now += seconds
            self._moved.notify_all()

    def sleep(self, seconds):
        if seconds<0: raise ValueError(f'a pause of {seconds} s')
        self.pauses.append(seconds)
        self.advance(seconds)

    def wait(self, event, seconds):
        if threading.get_ident()==self._owner:
            is_set = event.wait(seconds)
            if not is_set: self.advance(seconds)
            return is_set
        end = self.now+seconds
        while self.now<end and self._using:
            if event.wait(.01): return True
        return event.wait(0 if self._using else seconds)
