"A private Redis, a folder of images, and a store made of them, for all tests; and how the tests are run"
import os, signal, time, traceback, warnings
from contextlib import contextmanager
warnings.filterwarnings('ignore', category=FutureWarning)
os.environ.setdefault('MPLBACKEND', 'agg')

import numpy as np
import pytest
from hypothesis import settings
from PIL import Image

from fastai_remote.ingest.run import to_redis
from fastai_remote.store.redis import RedisStore
from fastai_remote.store.server import redis_server
from fastai_remote.source.files import image_samples
from fastai_remote.store.redis_link import RedisLink

# A process that a shell starts in the background ignores SIGINT, and so do its children: tests that interrupt them would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)

# The examples of Hypothesis are the same in every run, so that a failure is a change's. `make test-more` looks for new ones.
settings.register_profile('fixed', derandomize=True, database=None, deadline=None, print_blob=True)
settings.register_profile('more', derandomize=False, deadline=None, print_blob=True)
settings.load_profile('fixed')

def examples(n):
    "Settings of a Hypothesis test: `n` examples, and 20 times as many with `--hypothesis-profile=more`"
    return settings(max_examples=n*20 if settings.get_current_profile_name()=='more' else n)

def pytest_pycollect_makeitem(collector, name, obj):
    "fastai's star imports bring functions such as `test_eq`, which are not tests of ours"
    module = getattr(obj, '__module__', None) or ''
    if isinstance(collector, pytest.Module) and module.split('.')[0] in ('fastai','fastcore','nbdev'): return []

N,CLASSES = 60,('bird','cat','dog')

def class_of(path):
    "Label of an image file: its folder"
    return path.parent.name

def draw(i):
    "Picture i, of class i%3: a bar at an angle of its class on noise, in a size of its own"
    rng = np.random.default_rng(i)
    h,w = rng.integers(40, 64, 2)
    a = rng.integers(0, 80, (h,w,3)).astype(np.uint8)
    if i%3==0: a[h//3:h//2] = 230
    elif i%3==1: a[:,w//3:w//2] = 230
    else: a[h//4:h//2,w//4:w//2] = 230
    return Image.fromarray(a)

@pytest.fixture(scope='session')
def images(tmp_path_factory):
    "A folder of 60 JPEGs in three classes"
    d = tmp_path_factory.mktemp('images')
    for i in range(N):
        (f:=d/CLASSES[i%3]).mkdir(exist_ok=True)
        draw(i).save(f/f'{i:03}.jpg', quality=92)
    return d

@pytest.fixture(scope='module')
def server():
    "A private Redis server, one a file of tests: names of datasets never meet"
    with redis_server() as s: yield s

@pytest.fixture(scope='module')
def redis_pics(server, images):
    "The images as they are, with label and path, in Redis"
    to_redis(image_samples(images, label=class_of, path=True), server.url, 'pics', num_workers=1, progress=False)
    return RedisStore(server.url, 'pics')

@pytest.fixture
def store(redis_pics): return redis_pics

@pytest.fixture
def fresh():
    "A server of the test's own, to be broken"
    with redis_server() as s: yield s

def dies_at(k, f):
    "Run `f` in a fork that dies before its `k`-th request; did it die?"
    if (pid:=os.fork())==0:
        call,left = RedisLink.call,[k]
        def counted(self, *a, **kw):
            if not left[0]: os._exit(9)
            left[0] -= 1
            return call(self, *a, **kw)
        RedisLink.call = counted
        try: f()
        finally: os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])==9

@contextmanager
def fails(err, match):
    "Fail unless `err` is raised; torch's error would keep its workers, and 10 s, until the garbage collector comes"
    with pytest.raises(err, match=match) as e: yield
    traceback.clear_frames(e.value.__traceback__)

@contextmanager
def within(seconds):
    "Fail if it takes longer, on a machine with a core to spare: it was to give up, not to hang"
    t = time.monotonic()
    yield
    busy = os.getloadavg()[0]/os.cpu_count()   # where three processes share a core, it may take three times as long
    assert (took:=time.monotonic()-t)<seconds*max(1, busy), f'{took:.1f} s, not {seconds}, at a load of {busy:.1f} a core'

def wait_for(f, seconds=120):
    "Poll until `f()`"
    t = time.monotonic()
    while not (r:=f()):
        assert time.monotonic()-t<seconds
        time.sleep(.001)
    return r

def kill(p):
    "Kill a process and all that it started"
    try: os.killpg(p.pid, signal.SIGKILL)
    except ProcessLookupError: pass
    p.wait()
