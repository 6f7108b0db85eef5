"What each module of `core` does, in short: examples that were tried first"
import itertools, os, time, tracemalloc, warnings, zlib
import joblib
import pytest
from fastcore.test import expect_fail, test_eq
from fastai_remote.core import limited, parse_json, StoreFull, TooLarge, unzipped
from fastai_remote.parallel import _Task, effective_workers, parallel_map

def test_what_is_compressed_or_json_has_a_limit():
    test_eq((limited([b'ab',b'c'], 3), unzipped(zlib.compress(b'abc'), 3)), (b'abc',b'abc'))
    with expect_fail(TooLarge, contains='more than 999,999 bytes'): unzipped(zlib.compress(bytes(1_000_000)), 999_999)
    with expect_fail(TooLarge, contains='10,000,002 bytes'): parse_json('['+'[],'*3_333_333+'1]')
    test_eq(parse_json('{"a":[1,"b"]}'), {'a':[1,'b']})

@pytest.mark.slow
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
