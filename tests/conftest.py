"A private Redis, a folder of images, and a store made of them, for all tests; and how the tests are run"
import gc, os, signal, subprocess, sys, traceback, warnings
gc.disable()   # until all tests are imported: a third of the time of the imports was the collector's
from contextlib import contextmanager
warnings.filterwarnings('ignore', category=FutureWarning)
os.environ.setdefault('MPLBACKEND', 'agg')
# Two test processes share two cores. Threads of torch that wait for each other take twenty times the CPU time of one.
os.environ.setdefault('OMP_NUM_THREADS', '1')
# A test that does not ask for workers has none: two interpreters would start, which takes seconds.
os.environ.setdefault('LOKY_MAX_CPU_COUNT', '1')
# A client of S3 reads all certificates of authorities when it is made, which takes 40 ms: here it reads one.
os.environ.setdefault('AWS_CA_BUNDLE', os.path.join(os.path.dirname(__file__), 'data', 'certificate.pem'))

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from PIL import Image
from fastai.torch_core import default_device

from fastai_remote.codec import fields
from fastai_remote.ingest.redis import to_redis
from fastai_remote.ingest.shards import to_shards
from fastai_remote.ingest.stores import RedisStore, ShardStore
from fastai_remote.store.server import redis_server
from fastai_remote.source.files import image_samples
from fastai_remote.testing import ManualClock
from clusters import LocalCluster, wait_for
from fault_storage import faults
from interpreters import Interpreters

default_device(False)   # the CPU, also on a machine with a GPU, but for the tests that ask for it

# A process that a shell starts in the background ignores SIGINT, and so do its children: tests that interrupt them
# would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)

# The examples of Hypothesis are the same in every run, so that a failure is a change's. `make test-more` looks for new
# ones.
# A busy machine may be slow to make them.
_common = dict(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile('fixed', derandomize=True, database=None, **_common)
settings.register_profile('more', derandomize=False, **_common)
settings.load_profile('fixed')

def examples(n):
    "Settings of a Hypothesis test: `n` examples, and 20 times as many with `--hypothesis-profile=more`"
    return settings(max_examples=n*20 if settings.get_current_profile_name()=='more' else n)

@pytest.hookimpl(tryfirst=True)   # xdist looks for groups in the same hook
def pytest_collection_modifyitems(config, items):
    """The tests that compete for both cores come first: they are one group, beside which the others run

    Tests that fork interpreters are in it, so that only one of the test processes has to start these."""
    for item in items:
        if 'interpreters' in item.fixturenames and not item.get_closest_marker('xdist_group'):
            item.add_marker(pytest.mark.xdist_group('processes'))
    def competes(item): return any('processes' in mark.args for mark in item.iter_markers('xdist_group'))
    items.sort(key=lambda item: not competes(item))

def pytest_configure(config):
    config.add_cleanup(gc.unfreeze)   # at the very end, after pytest has collected the garbage of the tests twice

def pytest_collection_finish(session):
    """Keep the garbage collector away from what is imported: in each forked process it would touch, and so copy, all
    of it"""
    gc.freeze()
    gc.enable()

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

@pytest.fixture(scope='module')
def running_cluster():
    with LocalCluster(3) as cluster: yield cluster

@pytest.fixture
def cluster(running_cluster):
    "A Redis Cluster of three masters, which is empty"
    for k in range(running_cluster.n_masters): running_cluster.client(k).flushall()
    return running_cluster

@pytest.fixture(scope='session')
def images(tmp_path_factory):
    "A folder of 60 JPEGs in three classes"
    d = tmp_path_factory.mktemp('images')
    for i in range(N):
        (f:=d/CLASSES[i%3]).mkdir(exist_ok=True)
        draw(i).save(f/f'{i:03}.jpg', quality=92)
    return d

@contextmanager
def private_server(**conf):
    "A server that is killed at the end: one that is asked to end takes a tenth of a second, or waits for its replicas"
    with redis_server(**conf) as s:
        try: yield s
        finally: s.kill()

@pytest.fixture(scope='module')
def server():
    "A private Redis server, one a file of tests: names of datasets never meet"
    with private_server() as s: yield s

@pytest.fixture(params=['redis','shards'])
def put(request, tmp_path):
    "A function that writes a source; it returns the store and the report"
    def to_either(source, name='d', **kwargs):
        kwargs = {'num_workers':1, 'progress':False, 'overwrite':True, **kwargs}
        if request.param=='shards':
            report = to_shards(source, tmp_path/f'shards-{name}', **kwargs)
            return ShardStore(tmp_path/f'shards-{name}'),report
        server = request.getfixturevalue('server')
        report = to_redis(source, server.url, name, **kwargs)
        return RedisStore(server.url, name),report
    return to_either

@pytest.fixture(scope='session')
def interpreters(tmp_path_factory):
    "Starts Python processes in which torch and fastai are there at once"
    python = Interpreters(tmp_path_factory.mktemp('interpreters'))
    yield python
    python.close()

@pytest.fixture(scope='module')
def redis_pics(server, images):
    "The images as they are, with label and path, in Redis"
    to_redis(image_samples(images, label=class_of, path=True), server.url, 'pics', num_workers=1, progress=False)
    return RedisStore(server.url, 'pics')

@pytest.fixture
def store(redis_pics): return redis_pics

@pytest.fixture
def nobody(monkeypatch, tmp_path):
    "No credentials and no settings are there; a cache and a file of credentials would be those of the test"
    settings = 'AWS_','FASTAI_REMOTE_','XDG_','REDIS_'
    for name in os.environ:
        if name.startswith(settings) and name!='AWS_CA_BUNDLE': monkeypatch.delenv(name)
    values = dict(AWS_EC2_METADATA_DISABLED='true', AWS_SHARED_CREDENTIALS_FILE=tmp_path/'credentials',
                  AWS_CONFIG_FILE=tmp_path/'config', FASTAI_REMOTE_CACHE=tmp_path/'usual')
    for name,value in values.items(): monkeypatch.setenv(name, str(value))

@pytest.fixture(autouse=True)
def only_codecs_of_the_package():
    "A codec that a test registers is gone after the test"
    known = dict(fields._codecs)
    yield
    if fields._codecs!=known:
        fields._codecs.clear()
        fields._codecs.update(known)

@pytest.fixture(autouse=True)
def no_figures_of_other_tests():
    "Figures of matplotlib are closed after each test, so that the first one of a test is its own"
    yield
    if 'matplotlib.pyplot' in sys.modules: sys.modules['matplotlib.pyplot'].close('all')

@pytest.fixture
def fresh():
    "A server of the test's own, to be broken"
    with private_server() as s: yield s

@pytest.fixture
def mount():
    "A function that mounts a small tmpfs, or a folder at itself"
    done = []
    def call(folder, *options):
        folder.mkdir(exist_ok=True)
        if subprocess.run(['mount', *options, folder], capture_output=True).returncode: pytest.skip('may not mount')
        done.append(folder)
        return folder
    yield call
    for folder in reversed(done): subprocess.run(['umount', '-l', folder])

@pytest.fixture
def clock():
    "A clock of the test's own, at 0: whoever waits sees the time pass at once"
    with ManualClock(0) as clock: yield clock

@contextmanager
def fails(err, match=None):
    "Fail unless `err` is raised; torch's error would keep its workers, and 10 s, until the garbage collector comes"
    with pytest.raises(err, match=match) as e: yield e
    error = e.value
    while error:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__

# For the scripts of tests that kill or double an ingest: put before the script, whose `fn` calls `hold()` for each
# sample.
HOLD = '''
import os as _os, sys as _sys, time as _time
def hold():
    "After `HOLD_AFTER` samples in this process, wait until the file `HOLD_UNTIL` exists"
    _sys.samples_seen = getattr(_sys, 'samples_seen', 0)+1   # of a module: globals of a script are pickled with `fn`
    if _sys.samples_seen>float(_os.environ.get('HOLD_AFTER', 'inf')):
        while not _os.path.exists(_os.environ['HOLD_UNTIL']): _time.sleep(.005)
'''

def holding(samples, until):
    "Environment in which each process of an ingest stops after `samples` samples, until the file `until` exists"
    return {**os.environ, **({} if samples is None else {'HOLD_AFTER':str(samples), 'HOLD_UNTIL':str(until)})}

def kill(p):
    "Kill a process and all that it started"
    try: os.killpg(p.pid, signal.SIGKILL)
    except ProcessLookupError: pass
    p.wait()
