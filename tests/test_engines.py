"""Each engine writes the same dataset: joblib's processes and threads, Dask, Ray, Spark; and partitions of Spark do

Each engine has two workers, and is started once."""
import io, os, pickle, re, shutil, signal, subprocess, sys, time
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import cloudpickle
import joblib
import pytest
import numpy as np
from PIL import Image

from clusters import one_ray_at_a_time, wait_for
from conftest import class_of
from fastai_remote import image_samples, RedisStore, StoreBusy, StoreFull, StoreNotFound
from fastai_remote.parallel import effective_workers, parallel_map
from in_memory import encoded
from snapshots import client, FolderPlace, RedisPlace

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('processes'),
              pytest.mark.filterwarnings('ignore:.*stage-level scheduling'),
              pytest.mark.filterwarnings('ignore:Spark session is not provided')]
cloudpickle.register_pickle_by_value(sys.modules[__name__])   # no engine's workers can import this file

# Engines

@contextmanager
def loky():
    yield
    joblib.externals.loky.get_reusable_executor().shutdown(wait=True, kill_workers=True)

@contextmanager
def dask():
    distributed = pytest.importorskip('distributed')
    with distributed.LocalCluster(2, threads_per_worker=1, dashboard_address=None) as cluster:
        with distributed.Client(cluster): yield

@contextmanager
def ray():
    ray = pytest.importorskip('ray')
    from ray.util.joblib import register_ray
    with one_ray_at_a_time():
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
        register_ray()
        yield
        ray.shutdown()

@pytest.fixture(scope='module')
def session():
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

IN_RAY = 'FASTAI_REMOTE_RAY' in os.environ # Is this the process of the tests of Ray?
OF_PROCESSES = ['ray'] if IN_RAY else ['loky','dask','spark']

@pytest.fixture(scope='module', params=OF_PROCESSES+([] if IN_RAY else ['threading']))
def engine(request):
    "Name of the joblib backend of a running engine of two workers"
    if request.param=='spark':
        pytest.importorskip('joblibspark').register_spark()
        request.getfixturevalue('session')
        yield 'spark'
    else:
        starts = dict(loky=loky, threading=nullcontext, dask=dask, ray=ray)
        with starts[request.param](): yield request.param

def on(engine):
    "With the engine, once it has two workers: one that was killed may still be replaced"
    config = joblib.parallel_config(engine, n_jobs=2)
    wait_for(lambda: effective_workers()==2)
    return config

ROOT = Path(__file__).parents[1]

# What they write

N = 40

def picture(i): return encoded(Image.new('RGB', (10,12), (i,0,0)))

@pytest.fixture(scope='module')
def files(tmp_path_factory):
    "40 small images, one of them damaged"
    folder = tmp_path_factory.mktemp('images')
    for i in range(N):
        (folder/f'{i%3}').mkdir(exist_ok=True)
        (folder/f'{i%3}/{i:03}.png').write_bytes(picture(i)[:40 if i==30 else None])
    return folder

def shrink(sample):
    "What a user would write; it refuses one image"
    if sample['path']=='1/010.png': raise LookupError('I do not like it')
    return {**sample, 'png':sample['png'].convert('RGB').resize((5,6))}

@pytest.fixture(params=['redis','folder'])
def place(request, server, tmp_path):
    place = RedisPlace(server) if request.param=='redis' else FolderPlace(tmp_path)
    place.clear()
    return place

def write(place, files, fn, num_workers=None):
    return place.write(image_samples(files, label=class_of, path=True), fn=fn, chunk=4, num_workers=num_workers)

def of_one_process(place, files, fn):
    "What is in a place when one process has written; then it is empty again"
    write(place, files, fn, num_workers=1)
    everything = place.everything()
    place.clear()
    return everything

@pytest.mark.parametrize('engine', ['ray'])
def test_all_of_them_pass_with(engine, tmp_path):
    "In a process of its own, which Ray sometimes crashes as it shuts down, when the tests are over"
    pytest.importorskip('ray')
    command = [sys.executable, '-m', 'pytest', '-vv', '-p', 'no:cacheprovider', '-k', 'ray and not pass_with', __file__]
    log = tmp_path/'log'
    with open(log, 'w') as out:
        subprocess.run(command, env={**os.environ, 'FASTAI_REMOTE_RAY':'1'}, stdout=out, stderr=out, cwd=ROOT)
    said = log.read_text()
    found = re.search(r'(\d+) selected', said) or re.search(r'collected (\d+) items', said)
    n_passed = len(re.findall(r'^\S+ PASSED', said, re.M))
    assert n_passed==int(found[1])>=8 and not re.search(r' (FAILED|ERROR|SKIPPED)', said), said[-5000:]

def test_an_engine_writes_what_one_process_writes_and_reports_the_same_failures(engine, place, files):
    expected = of_one_process(place, files, shrink)
    with on(engine): report = write(place, files, shrink)
    assert (report.written,report.failed)==(N-2,2) and place.everything()==expected
    reasons = {name[-9:]:why for name,why in report.failures}
    assert reasons['1/010.png'].startswith('LookupError: I do not like it (fn was given: dict of png')
    assert 'png: not an image, or only its first bytes' in reasons['0/030.png']

class Bomb:
    "Kills the worker that is the first to meet image 20"
    def __init__(self, flag): self.flag,self.leader = flag,os.getpid()
    def __call__(self, sample):
        if '/020' in sample['path'] and os.getpid()!=self.leader and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

# joblib's own thread, which manages the workers, may meet one that is gone
missed = 'ignore:(?s)Exception in thread.*KeyError:pytest.PytestUnhandledThreadExceptionWarning'

@pytest.mark.filterwarnings(missed)
@pytest.mark.parametrize('engine', OF_PROCESSES, indirect=True)   # a thread cannot be killed
def test_after_the_death_of_a_worker_each_sample_is_there_once(engine, place, files, tmp_path):
    "Processes on one machine say that one died, and the same call goes on; an engine repeats what was lost"
    bomb = Bomb(tmp_path/'flag')
    expected = of_one_process(place, files, bomb)
    def act():
        with on(engine): return write(place, files, bomb)
    if engine=='loky':
        with pytest.raises(joblib.externals.loky.process_executor.TerminatedWorkerError): act()
        with pytest.raises(StoreNotFound): place.open()
    report = act()
    assert bomb.flag.exists() and (report.written,report.failed)==(N-1,1) and place.everything()==expected

# What they run

def test_work_is_done_by_the_workers_of_the_engine_or_without_any_in_this_process(engine):
    n = joblib.cpu_count() if engine in ('loky','threading') else 2
    with joblib.parallel_config(engine):
        wait_for(lambda: effective_workers()==n)   # one that was killed may still be replaced
        assert effective_workers(0)==0
    def pids(**options): return set(parallel_map(lambda _: os.getpid(), range(8), **options))
    with on(engine):
        assert pids()=={os.getpid()} if engine=='threading' else os.getpid() not in pids()
        assert pids(num_workers=0)=={os.getpid()}

class Odd(Exception):
    "An error that takes more than one argument, and that no engine has seen"
    def __init__(self, a, b): super().__init__(a, b)
class Rude(Exception):
    def __reduce__(self): raise TypeError('I do not travel')

def fail(error):
    if error=='full': raise StoreFull('no room')
    if error=='odd': raise Odd(1, 2)
    if error=='rude': raise Rude('anyway')
    return error

def test_errors_of_workers_and_of_the_source_are_raised_here(engine):
    "They have the worker's traceback; of one that cannot be pickled, the message is sent"
    fine,is_process = ['ok']*10,engine!='threading'
    def source():
        yield from fine
        raise KeyError('the source')
    with on(engine):
        for name,error,text in [('full',StoreFull,'no room'), ('odd',Odd,'2'),
                                ('rude',RuntimeError if is_process else Rude,'anyway')]:
            with pytest.raises(error, match=text) as info: list(parallel_map(fail, [*fine, name, *fine]))
            if is_process: assert 'in fail' in info.value.__notes__[0]
        with pytest.raises(KeyError, match='the source'): list(parallel_map(fail, source()))
        assert list(parallel_map(fail, fine))==fine

def test_nothing_more_is_made_for_a_reader_that_stops(engine):
    made = []
    def inputs():
        for i in range(10_000):
            made.append(i)
            yield i
    with on(engine):
        with closing(parallel_map(lambda i: time.sleep(.01), inputs())) as results: next(results)
        n = len(made)
        assert n<10_000 and sorted(parallel_map(abs, range(20)))==list(range(20)) and len(made)==n

def test_large_arrays_are_writable_in_workers(engine):
    "joblib and Ray would share those above 1 MB, read-only"
    def f(a):
        a += 1
        return float(a[-1])
    with on(engine): assert sorted(parallel_map(f, (np.full(300_000, i, float) for i in range(4))))==[1,2,3,4]

# Partitions of a Spark DataFrame write themselves, each row exactly once whatever is tried again

@pytest.fixture(scope='module')
def dataframe(session):
    "Pictures in four partitions"
    rows = [(i, picture(i), f'c{i%3}') for i in range(N)]
    return session.createDataFrame(rows, 'id int, png binary, cls string').repartition(4)

def dicts(dataframe): return dataframe.rdd.map(lambda row: row.asDict())

def counts(rdd): return rdd.mapPartitions(lambda rows: [sum(1 for _ in rows)]).collect()

def writer(server, rdd, **options):
    return RedisStore.writer(server.url, 'pics', dict(id=0, png=picture(0), cls='c0'), counts(rdd), **options)

def assert_each_row_is_there_once(server):
    store = RedisStore(server.url, 'pics')
    got = store.get_many(range(N), ['id','png','cls'], check=True)
    assert len(store)==N and sorted(got['id'])==list(range(N)) and store.vocab==['c0','c1','c2']
    assert [bytes(png) for png in got['png']]==[picture(i) for i in got['id']]
    assert [store.vocab[code] for code in got['cls']]==[f'c{i%3}' for i in got['id']]
    keys = [key.decode() for key in client(server).keys()]
    assert not [key for key in keys if ':ingest' in key or '~' in key and not re.search(':~(failures|gaps)#0$', key)]
    assert sum(':png:' in key for key in keys)==N

def test_partitions_are_a_dataset_once_they_are_committed_and_a_late_task_writes_nothing(dataframe, fresh):
    rdd = dicts(dataframe).cache()
    with writer(fresh, rdd) as w:
        late,n = pickle.loads(pickle.dumps(w)),w.counts[0]
        rdd.mapPartitionsWithIndex(w).count()
        with pytest.raises(StoreNotFound): RedisStore(fresh.url, 'pics')
        w.commit()
    with pytest.raises(StoreBusy): list(late(0, [dict(id=5, png=picture(5), cls='c9')]*n))
    assert_each_row_is_there_once(fresh)

def test_tasks_that_fail_or_are_killed_midway_are_tried_again_and_each_row_is_written_once(session, fresh, tmp_path):
    "The rows name files, which `fn` reads in the tasks; one is missing, and reported once"
    for i in range(N): (tmp_path/f'{i}.png').write_bytes(picture(i))
    rows = [(i, str(tmp_path/f'{i}.png'), f'c{i%3}') for i in range(N+1)]
    dataframe = session.createDataFrame(rows, 'id int, path string, cls string').repartition(4)
    def flaky(rows):
        from pyspark import TaskContext
        task = TaskContext.get()
        number,attempt = task.partitionId(),task.attemptNumber()
        (tmp_path/f'tried.{number}.{attempt}').touch()
        for k,row in enumerate(rows):
            if number==1 and attempt<2 and k==4+2*attempt: raise OSError('a disk that is not there')
            if number==2 and attempt<1 and k==5: os.kill(os.getpid(), signal.SIGKILL)
            yield row
    def read(row): return {'png':Path(row['path']).read_bytes(), 'cls':row['cls'], 'id':row['id']}
    sample = dict(id=0, path=rows[0][1], cls='c0')
    rdd = dicts(dataframe)
    with RedisStore.writer(fresh.url, 'pics', sample, counts(rdd), fn=read, chunk=2) as w:
        rdd.mapPartitions(flaky).mapPartitionsWithIndex(w).count()
        w.commit()
    tried = {file.name for file in tmp_path.glob('tried.*')}
    assert tried>={'tried.1.0','tried.1.1','tried.1.2','tried.2.0','tried.2.1'}
    assert RedisStore(fresh.url, 'pics').manifest.failed==1
    assert_each_row_is_there_once(fresh)

def test_a_job_that_fails_for_good_leaves_no_dataset_and_no_lock(dataframe, fresh):
    from pyspark.errors import PythonException
    def never(rows):
        yield next(rows)
        raise OSError('never')
    rdd = dicts(dataframe)
    with pytest.raises(PythonException, match='never'), writer(fresh, rdd, chunk=1) as w:
        rdd.mapPartitions(never).mapPartitionsWithIndex(w).count()
    with pytest.raises(StoreNotFound): RedisStore(fresh.url, 'pics')
    with writer(fresh, rdd, overwrite=True) as w:
        rdd.mapPartitionsWithIndex(w).count()
        w.commit()
    assert_each_row_is_there_once(fresh)
