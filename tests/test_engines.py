"to_redis on every engine: the same dataset, the same failures, errors that come home, workers that die; on a cluster of two workers of the test's own"
import itertools, os, re, shutil, signal, sys, time
from contextlib import closing, contextmanager
from pathlib import Path

import cloudpickle
import joblib
import numpy as np
import pytest
from PIL import Image

from clusters import one_ray_at_a_time
from conftest import class_of, wait_for
from fastai_remote import RedisStore, StoreFull, StoreNotFound, image_samples, redis_server, to_redis
from fastai_remote.parallel import effective_workers, parallel_map
from fastai_remote.write.redis import RedisWriter

pytestmark = [pytest.mark.filterwarnings(f'ignore:{o}') for o in ('.*stage-level scheduling','Spark session is not provided')]
cloudpickle.register_pickle_by_value(sys.modules[__name__])   # no engine's workers can import this file

# --- engines

@contextmanager
def loky():
    from joblib.externals.loky import get_reusable_executor
    yield
    get_reusable_executor().shutdown(wait=True, kill_workers=True)

@contextmanager
def threading(): yield

@contextmanager
def dask():
    distributed = pytest.importorskip('distributed')
    with distributed.LocalCluster(2, threads_per_worker=1, dashboard_address=None) as cluster, distributed.Client(cluster): yield

@contextmanager
def ray():
    ray = pytest.importorskip('ray')
    from ray.util.joblib import register_ray
    with one_ray_at_a_time():
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
        register_ray()
        yield
        ray.shutdown()

@contextmanager
def spark_session():
    "A Spark of two workers that tries a task four times, as a cluster does"
    sql = pytest.importorskip('pyspark.sql')
    if not (shutil.which('java') or 'JAVA_HOME' in os.environ): pytest.skip('no Java for Spark')
    os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP='127.0.0.1')
    from pyspark import SparkContext
    # compiling more than a little takes longer than such short tests
    conf = {'spark.ui.enabled':'false', 'spark.ui.showConsoleProgress':'false', 'spark.driver.host':'127.0.0.1',
        'spark.driver.memory':'1g', 'spark.sql.shuffle.partitions':2,
        'spark.driver.extraJavaOptions':'-XX:TieredStopAtLevel=1 -XX:+UseSerialGC'}
    spark = sql.SparkSession.builder.master('local[2,4]').config(map=conf).getOrCreate()
    spark.sparkContext.setLogLevel('OFF')   # of errors that are meant to happen
    yield spark
    gateway = SparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()   # the JVM ends with it
    gateway.proc.wait(30)
    SparkContext._gateway = SparkContext._jvm = None

@contextmanager
def spark():
    joblibspark = pytest.importorskip('joblibspark')
    with spark_session():
        joblibspark.register_spark()
        yield

def children(pid=None):
    "Command lines of the processes below this one; not of those that Python keeps for itself, nor of Redis"
    res = {}
    for t in Path(f'/proc/{pid or os.getpid()}/task').glob('*/children'):
        for p in t.read_text().split():
            cmd = Path(f'/proc/{p}/cmdline')
            try: res[p] = cmd.read_text().replace('\0', ' ')
            except OSError: continue
            res |= children(p)
    return {p:c for p,c in res.items() if c and not any(o in c for o in ('resource_tracker', 'redis-server', 'valkey-server'))}

@pytest.fixture(scope='module', params=['loky','threading','dask','ray','spark'])
def engine(request):
    "Name of the joblib backend of a running engine of two workers"
    before = children()
    with globals()[request.param](): yield request.param
    wait_for(lambda: not children().keys()-before.keys())

def on(engine): return joblib.parallel_config(engine, n_jobs=2)

# --- what they ingest

@pytest.fixture(scope='module')
def files(tmp_path_factory):
    "300 small images, every hundredth of them damaged"
    d = tmp_path_factory.mktemp('engines')
    for i in range(300):
        (d/f'{i%3}').mkdir(exist_ok=True)
        f = d/f'{i%3}'/f'{i:03}.png'
        Image.fromarray(np.full((12,10,3), i%256, np.uint8)).save(f)
        if i%100==50: f.write_bytes(f.read_bytes()[:40])
    return d

class Shrink:
    "Decode, halve, and count nothing: what a user would write"
    def __call__(self, o):
        import io
        im = Image.open(io.BytesIO(o['png'])).convert('RGB')
        return {**o, 'png':im.resize((5,6))}

class Fussy:
    "Refuses what a set of paths names"
    def __init__(self, bad): self.bad = bad
    def __call__(self, o):
        if o['path'] in self.bad: raise LookupError(f"I do not like {o['path']}")
        return o

class Bomb:
    "Kills the worker that meets the hundredth image first"
    def __init__(self, flag): self.flag,self.leader = flag,os.getpid()
    def __call__(self, o):
        if '/100' in o['path'] and os.getpid()!=self.leader and not os.path.exists(self.flag):
            open(self.flag, 'w').close()
            os.kill(os.getpid(), signal.SIGKILL)
        return o

def ingest(url, files, engine, fn=None, name='pets', **kw):
    with on(engine): return to_redis(image_samples(files, label=class_of, path=True), url, name, fn=fn, progress=False, chunk=16, **kw)

def rows(url, name='pets'):
    "All that dataset `name` holds"
    s = RedisStore(url, name)
    return s.manifest.vocab,{f:list(v) for f,v in s.get_many(range(len(s)), list(s.manifest.fields), check=True).items()}

def reasons(rep):
    "What failed and why, without addresses in memory"
    return sorted((name,re.sub(' at 0x[0-9a-f]+', '', why)) for name,why in rep.failures)

@pytest.fixture(scope='module')
def expected(files):
    "What a plain ingest in this process makes of it"
    with redis_server() as s:
        rep = to_redis(image_samples(files, label=class_of, path=True), s.url, 'pets', fn=Shrink(), num_workers=1, progress=False, chunk=16)
        return rep,rows(s.url)

# --- the tests

def test_same_dataset(engine, files, expected, fresh, monkeypatch):
    "Every engine makes the same dataset, sample by sample, and reports the same failures; work is done elsewhere, and a record kept of each chunk"
    seen,records = [],RedisWriter.records
    def spy(self):
        for k,r in records(self): seen.append(k); yield k,r
    monkeypatch.setattr(RedisWriter, 'records', spy)
    rep = ingest(fresh.url, files, engine, Shrink())
    assert (rep.written,rep.failed)==(297,3)
    assert reasons(rep)==reasons(expected[0]) and len(reasons(rep))==3
    assert rows(fresh.url)==expected[1]
    assert sorted(set(seen))==list(range(19))

def test_workers(engine):
    "As many workers as the engine has, and not this process"
    with joblib.parallel_config(engine): n = effective_workers()
    assert n==(joblib.cpu_count() if engine in ('loky','threading') else 2)
    with on(engine): pids = set(parallel_map(lambda _: (time.sleep(.05), os.getpid())[1], range(12)))
    assert pids=={os.getpid()} if engine=='threading' else os.getpid() not in pids

def test_no_workers_are_this_process(engine):
    "as `num_workers=0` is for fastai and PyTorch"
    with joblib.parallel_config(engine): assert effective_workers(0)==0
    with on(engine): assert set(parallel_map(lambda _: os.getpid(), range(4), num_workers=0))=={os.getpid()}

def test_an_ingest_without_workers(files, fresh):
    pids = []
    def sample(i):
        pids.append(os.getpid())
        return {'txt':str(i)}
    rep = to_redis(range(50), fresh.url, 'numbers', fn=sample, num_workers=0, progress=False)
    assert rep.written==50 and set(pids)=={os.getpid()}
    assert RedisStore(fresh.url, 'numbers').verify(num_workers=0).bad==0

def test_fn_raises(engine, files, fresh):
    "What `fn` raises in a worker is a failure with its reason; if it raises always, an error that says so"
    rep = ingest(fresh.url, files, engine, Fussy({'0/003.png','1/097.png'}))
    assert rep.failed==2+3
    assert [why for _,why in reasons(rep) if 'like' in why]==['LookupError: I do not like 0/003.png','LookupError: I do not like 1/097.png']
    assert {'0/003.png','1/097.png'}.isdisjoint(o.decode() for o in rows(fresh.url)[1]['path'])

class Odd(Exception):
    "An error that takes more than one argument, and that no engine has seen"
    def __init__(self, a, b): super().__init__(a, b); self.b = b
class Rude(Exception):
    def __reduce__(self): raise TypeError('I do not travel')

def fail(kind):
    if kind=='full': raise StoreFull('no room')
    if kind=='odd': raise Odd(1, 2)
    if kind=='rude': raise Rude('anyway')
    return kind

def test_errors_come_home(engine):
    "An error is what it was, with the worker's traceback; one that cannot travel sends its message"
    with on(engine):
        for kind,e,text in ('full',StoreFull,'no room'), ('odd',Odd,'2'), ('rude',(RuntimeError,Rude),'anyway'):
            with pytest.raises(e, match=text) as info: list(parallel_map(fail, ['ok']*10+[kind]+['ok']*10))
            if engine!='threading': assert 'in fail' in info.value.__notes__[0]
        def xs():
            yield from ['ok']*10
            raise KeyError('the source')
        with pytest.raises(KeyError, match='the source'): list(parallel_map(fail, xs()))
        assert list(parallel_map(fail, ['ok']*10))==['ok']*10

def test_reader_that_stops(engine):
    "Nobody wants more results: nothing more is made, whatever the engine had planned"
    made = []
    def xs():
        for i in itertools.count(): made.append(i); yield i
    with on(engine), closing(parallel_map(lambda i: time.sleep(.02), xs())) as res: next(res)
    n = len(made)
    time.sleep(.3)
    assert len(made)==n<200

def test_large_arrays(engine):
    "Arrays above 1 MB come to `f` writable, on every engine"
    def f(a): a += 1; return float(a[-1])
    with on(engine): assert sorted(parallel_map(f, (np.full(300_000, i, float) for i in range(6))))==[1,2,3,4,5,6]

def test_full(engine, fresh):
    "A server without room: StoreFull, as in this process, and with more room the same call goes on"
    import redis
    c = redis.from_url(fresh.url)
    src = [{'bin':np.random.default_rng(i).bytes(20_000 if i>=80 else 20), 'cls':i%5} for i in range(230)]   # the first few tell nothing of the rest
    c.config_set('maxmemory', c.info('memory')['used_memory']+1_500_000)
    def act():
        with on(engine): return to_redis(src, fresh.url, 'd', shuffle=False, chunk=10, progress=False)
    with pytest.raises(StoreFull, match='d: .*no room: .* of maxmemory .*repeat the same call'): act()
    with pytest.raises(StoreNotFound): RedisStore(fresh.url, 'd')
    c.config_set('maxmemory', 0)
    rep = act()
    assert rep.resumed>0 and rep.written==230

# joblib's own thread, which manages the workers, may meet one that is gone
worker_is_missed = pytest.mark.filterwarnings('ignore:(?s)Exception in thread.*KeyError:pytest.PytestUnhandledThreadExceptionWarning')

@worker_is_missed
def test_killed_worker(engine, files, fresh, tmp_path):
    "A worker dies in the middle: processes on one machine say so, and the same call goes on; an engine repeats what was lost"
    if engine=='threading': pytest.skip('a thread cannot be killed')
    def act(): return ingest(fresh.url, files, engine, Bomb(str(tmp_path/'flag')))
    if engine=='loky':
        with pytest.raises(joblib.externals.loky.process_executor.TerminatedWorkerError): act()
        with pytest.raises(StoreNotFound): RedisStore(fresh.url, 'pets')
    rep = act()
    assert (tmp_path/'flag').exists() and rep.written+rep.failed==300
    paths = [o.decode() for o in rows(fresh.url)[1]['path']]
    assert len(paths)==len(set(paths))==rep.written

def test_same_shards(engine, files, tmp_path):
    "Every engine writes the same shards, byte for byte, and reports the same failures"
    import json
    from fastai_remote import ShardStore, to_shards
    def act(d, **kw): return to_shards(image_samples(files, label=class_of, path=True), d, fn=Shrink(), progress=False, chunk=16, maxsize=40_000, **kw)
    def seen(d): return {p.name:p.read_bytes() for p in d.iterdir() if p.name!='manifest.json'},{k:v for k,v in json.loads((d/'manifest.json').read_bytes()).items() if k not in ('uid','created','crc')}
    a = act(tmp_path/'plain'/'d', num_workers=1)
    with on(engine): b = act(tmp_path/'engine'/'d')
    assert (b.written,b.failed)==(297,3) and reasons(a)==reasons(b)
    assert seen(tmp_path/'engine'/'d')==seen(tmp_path/'plain'/'d') and len(ShardStore(tmp_path/'engine'/'d'))==297

@worker_is_missed
def test_killed_worker_of_shards(engine, files, tmp_path):
    "A worker dies in the middle of its shard: processes on one machine say so, and the same call goes on; an engine repeats what was lost; no part is left"
    from fastai_remote import ShardStore, to_shards
    if engine=='threading': pytest.skip('a thread cannot be killed')
    def act():
        with on(engine): return to_shards(image_samples(files, label=class_of, path=True), tmp_path/'d', fn=Bomb(str(tmp_path/'flag')), progress=False, chunk=16)
    if engine=='loky':
        with pytest.raises(joblib.externals.loky.process_executor.TerminatedWorkerError): act()
        with pytest.raises(StoreNotFound): ShardStore(tmp_path/'d')
    rep = act()
    s = ShardStore(tmp_path/'d')
    paths = [o.decode() for o in s.get_many(range(len(s)), 'path')['path']]
    assert (tmp_path/'flag').exists() and rep.written+rep.failed==300 and len(paths)==len(set(paths))==rep.written
    assert not [p for p in (tmp_path/'d').rglob('*') if p.name.endswith('.part')]
