"What each module of `core` does, in short: examples that were tried first"
import fcntl, itertools, os, threading, time, tracemalloc, warnings, zlib
import joblib
import numpy as np
import pytest
from fastcore.test import expect_fail, test_close, test_eq
from pathlib import Path
from fastai_remote.clock import Clock, monotonic, sleep, use_clock, wait
from fastai_remote.codec.base import Codec
from fastai_remote.codec.fields import register_codec
from fastai_remote.core import CorruptSample, int_index, limited, Manifest, packed_crcs, parse_json, seal, size_str
from fastai_remote.core import StoreFull, TooLarge, UnsupportedFormat, unzipped
from fastai_remote.ingest.stores import MemoryStore
from fastai_remote.parallel import _Task, effective_workers, parallel_map
from fastai_remote.processes import OwnedFolder, remove_leftovers, Worker
from fastai_remote.runs import GapTable, RunTable
from fastai_remote.testing import CodecTests, ManualClock

def test_clock():
    class Fast(Clock):
        "A day takes no time"
        days = 0
        def monotonic(self): return 86400.*self.days
        def sleep(self, seconds): self.days += seconds/86400

    with use_clock(Fast()):
        started = monotonic()
        sleep(2*86400)
        test_eq(monotonic()-started, 2*86400)
    done = threading.Event()
    test_eq(wait(done, .001), False)
    done.set()
    test_eq(wait(done, 60), True)

def test_core():
    test_eq(limited([b'ab',b'c'], 3), b'abc')
    test_eq(unzipped(zlib.compress(b'abc'), 3), b'abc')
    with expect_fail(TooLarge, contains='more than 999,999 bytes'): unzipped(zlib.compress(bytes(1_000_000)), 999_999)
    with expect_fail(TooLarge, contains='10,000,002 bytes'): parse_json('['+'[],'*3_333_333+'1]')
    test_eq(parse_json('{"a":[1,"b"]}'), {'a':[1,'b']})
    m = Manifest('pets', 3, {'jpg':{'codec':'jpg','dtype':None}, 'cls':{'codec':'cls','dtype':'u1'}},
        vocab={'cls':['cat','dog']})
    test_eq(Manifest.from_json(m.to_json()), m)
    m.to_json()
    with expect_fail(UnsupportedFormat, contains='pets: format 9; this version reads up to 1'):
        Manifest.from_json(seal({'format':9}), 'pets')
    with expect_fail(UnsupportedFormat, contains='not a manifest'): Manifest.from_json(b'\x80garbage')
    with expect_fail(CorruptSample, contains='pets: the manifest does not match its checksum'):
        Manifest.from_json(m.to_json().replace(b'cat', b'bat'), 'pets')
    labels = np.array([2,0,1], np.int16)
    message = (1).to_bytes(2, 'big')+(70_000).to_bytes(8, 'big')   # a value, then its sample number
    test_eq(packed_crcs(labels, np.array([7,8,70_000]))[2], zlib.crc32(message))
    test_eq([size_str(o) for o in (0, 999, 2200, 50_000_000, 12_300_000_000)], ['0 B','999 B','2.2 KB','50.0 MB','12.3 GB'])
    test_eq([int_index(o) for o in (3, np.int64(3), np.array(3), [3], slice(3))], [3,3,3,None,None])
    with expect_fail(TypeError, contains='not the bool True'): int_index(np.array(True))

def test_parallel():
    warnings.simplefilter('error', UserWarning)
    # joblib's thread may look up an input that the end of a call has just taken away
    warnings.simplefilter('ignore', pytest.PytestUnhandledThreadExceptionWarning)
    def f(x): return {}[x]
    e = _Task(f)('dog').error()
    test_eq((type(e), e.args), (KeyError, ('dog',)))
    test_eq(effective_workers(), joblib.cpu_count())
    test_eq(effective_workers(3), 3)
    with joblib.parallel_config('threading', n_jobs=5): test_eq(effective_workers(), 5)
    test_eq(sorted(parallel_map(pow, ((i,2) for i in range(10)), 2)), [i*i for i in range(10)])
    assert os.getpid() not in set(parallel_map(lambda _: os.getpid(), range(20), 2))
    class Odd(Exception): pass
    def even(i):
        if i%2: raise Odd(f'{i} is odd')
        return i
    def full(i): raise StoreFull('no room')

    with expect_fail(Odd, contains='1 is odd'): list(parallel_map(even, [0,1], 2))
    try: list(parallel_map(full, range(100), 2))
    except StoreFull as e: print(e.__notes__[0].splitlines()[-1])
    def slow(i): time.sleep(.001); return i
    with joblib.parallel_config('threading', n_jobs=2):
        assert next(parallel_map(slow, itertools.count()))<10
        tracemalloc.start()
        for i,_ in enumerate(parallel_map(abs, range(3000))):
            if i==1000: a = tracemalloc.get_traced_memory()[0]
        b = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    assert b-a<100_000

def test_processes():
    endless = Worker(target=threading.Event().wait)
    endless.start()
    endless.join()
    test_eq(endless.exitcode, 0)
    folder = OwnedFolder('example')
    remove_leftovers()
    assert Path(folder.name, 'owner').exists()
    fcntl.flock(folder.lock, fcntl.LOCK_UN)   # as the system does when a process is killed
    remove_leftovers()
    assert not Path(folder.name).exists()

def test_runs():
    table = RunTable.whole(100).drop(np.array([3,4,5,50,99]))
    test_eq(table.starts, [0,3,47])
    table = table.replace(np.array([0,60]), part=1).insert(95, part=2, first=0, n=10)
    parts,numbers = table.locate(np.arange(table.n))
    test_eq(numbers[parts==0], [i for i in range(100) if i not in (0,3,4,5,50,64,99)])
    test_eq(np.flatnonzero(parts==1), [0,60])
    test_eq(RunTable.from_bytes(table.to_bytes(), table.n).locate(np.arange(105)), (parts,numbers))
    gaps = GapTable.of(np.array([0,1,5,98]), 100)
    test_eq((gaps.n, len(gaps)), (96,3))
    numbers = np.arange(96)
    test_eq(gaps.places(numbers), np.setdiff1d(np.arange(100), [0,1,5,98]))
    test_eq(gaps.samples_before(gaps.places(numbers)), numbers)
    test_eq(gaps.samples_before([0,1,2,5,6,98,99,100]), [0,0,0,3,3,95,95,96])
    test_eq(GapTable.from_bytes(gaps.to_bytes(), 100).places(numbers), gaps.places(numbers))
    with expect_fail(ValueError, contains='beyond'): GapTable.from_bytes(gaps.to_bytes(), 98)

def test_testing():
    class Colour(Codec):
        "A colour, `(red, green, blue)`"
        def pack(self, o):
            if len(o)!=3: raise ValueError(f'{self.name}: a colour has three parts, not {len(o)}')
            return bytes(o)
        def unpack(self, b):
            if len(b)!=3: raise ValueError(f'{self.name}: a colour has three bytes, not {len(b)}')
            return tuple(b)

    class TestColour(CodecTests): codec,values,wrong = Colour('colour'),[(0,0,0),(255,1,2)],[(1,2),(1,2,300),'red']
    t = TestColour()
    for name in dir(t):
        if name.startswith('test_'): getattr(t, name)()
    register_codec(Colour('colour'))
    store = MemoryStore({'sky.colour':[bytes([0,100,255])]}, 'skies')
    test_eq(store[0], {'sky.colour':(0,100,255)})
    with ManualClock() as clock:
        started,stop,beats = monotonic(),threading.Event(),[]
        def renew():
            while not wait(stop, 10): beats.append(monotonic()-started)
        thread = threading.Thread(target=renew)
        thread.start()
        sleep(3600)
        test_close(monotonic()-started, 3600)
        stop.set()
        thread.join()
    test_eq(clock.pauses, [3600])
