"Spark's own way: partitions of a DataFrame that write themselves, each row exactly once whatever is tried again"
import io

import numpy as np
import pytest
from PIL import Image

from fastai_remote import RedisStore, StoreBusy, StoreNotFound
from test_engines import spark_session

pytestmark = pytest.mark.skipif(not hasattr(RedisStore, 'writer'), reason='RedisStore.writer is not there yet')

@pytest.fixture(scope='module')
def spark():
    with spark_session() as s: yield s

def picture(i):
    b = io.BytesIO()
    Image.new('RGB', (8,6), (i%256,0,i//256)).save(b, 'png')
    return b.getvalue()

N = 200

@pytest.fixture(scope='module')
def df(spark):
    "200 pictures in four partitions"
    return spark.createDataFrame([(i, picture(i), f'c{i%3}') for i in range(N)], 'id int, png binary, cls string').repartition(4)

def dicts(df): return df.rdd.map(lambda r: r.asDict())

def whole(server, name='pets'):
    "That each row is there once, as it was"
    s = RedisStore(server.url, name)
    d = s.get_many(range(len(s)), ['png','cls','id'], check=True)
    assert sorted(d['id'])==list(range(N)) and s.vocab==['c0','c1','c2']
    assert [bytes(o) for o in d['png']]==[picture(i) for i in d['id']]
    assert [s.vocab[c] for c in d['cls']]==[f'c{i%3}' for i in d['id']]

def leftovers(server):
    "Keys that belong to no sample: none, but what every dataset has"
    import redis
    keys = [k.decode() for k in redis.from_url(server.url).keys()]
    return [k for k in keys if ':ingest' in k or '~' in k or k.startswith('pets:png:') and int(k.rsplit(':', 1)[1])>=N]

def test_bytes(spark, df, fresh):
    "Rows that hold bytes, as they are"
    with RedisStore.writer(fresh.url, 'pets', sample=df.first().asDict()) as w:
        recs = dicts(df).mapPartitions(w).collect()
        with pytest.raises(StoreNotFound): RedisStore(fresh.url, 'pets')
        w.commit(recs)
    whole(fresh)
    assert not leftovers(fresh)

def test_paths(spark, fresh, tmp_path):
    "Rows that name files, which the tasks read; one is missing, and reported"
    for i in range(N): (tmp_path/f'{i}.png').write_bytes(picture(i))
    rows = [(i, str(tmp_path/f'{i}.png'), f'c{i%3}') for i in range(N)]+[(N, str(tmp_path/'gone.png'), 'c0')]
    df = spark.createDataFrame(rows, 'id int, path string, cls string').repartition(4)
    def read(r):
        with open(r['path'], 'rb') as f: return {'png':f.read(), 'cls':r['cls'], 'id':r['id']}
    with RedisStore.writer(fresh.url, 'pets', sample=rows and dict(zip(('id','path','cls'), rows[0])), fn=read) as w:
        w.commit(dicts(df).mapPartitions(w).collect())
    whole(fresh)
    assert RedisStore(fresh.url, 'pets').manifest.failed==1

def test_repeated_task(spark, df, fresh):
    "A task that fails midway, with some of its rows written, and is tried again"
    tried = spark.sparkContext.accumulator(0)
    def flaky(rows):
        from pyspark import TaskContext
        t = TaskContext.get()
        tried.add(1)
        for k,r in enumerate(rows):
            if t.partitionId()==1 and t.attemptNumber()<2 and k==20+10*t.attemptNumber(): raise OSError('a disk that is not there')
            yield r
    with RedisStore.writer(fresh.url, 'pets', sample=df.first().asDict(), chunk=8) as w:
        w.commit(dicts(df).mapPartitions(flaky).mapPartitions(w).collect())
    whole(fresh)
    assert not leftovers(fresh)

def test_killed_task(spark, df, fresh, tmp_path):
    "A task whose worker is killed"
    flag = tmp_path/'flag'
    def deadly(rows):
        import os
        for k,r in enumerate(rows):
            if k==20:
                try: os.close(os.open(flag, os.O_CREAT|os.O_EXCL))
                except FileExistsError: pass
                else: os.kill(os.getpid(), 9)
            yield r
    with RedisStore.writer(fresh.url, 'pets', sample=df.first().asDict(), chunk=8) as w:
        w.commit(dicts(df).mapPartitions(deadly).mapPartitions(w).collect())
    assert flag.exists()
    whole(fresh)

def test_never_committed(spark, df, fresh):
    "A job that fails for good leaves nothing that a reader sees, and no lock"
    def never(rows):
        yield next(rows)
        raise OSError('never')
    with pytest.raises(Exception, match='never'):
        with RedisStore.writer(fresh.url, 'pets', sample=df.first().asDict(), chunk=1) as w: dicts(df).mapPartitions(never).mapPartitions(w).collect()
    with pytest.raises(StoreNotFound): RedisStore(fresh.url, 'pets')
    with RedisStore.writer(fresh.url, 'pets', sample=df.first().asDict(), overwrite=True) as w: w.commit(dicts(df).mapPartitions(w).collect())
    whole(fresh)

def test_late_task(spark, df, fresh):
    "An attempt that lives on after the commit writes nothing"
    import pickle
    with RedisStore.writer(fresh.url, 'pets', sample=df.first().asDict()) as w:
        late = pickle.loads(pickle.dumps(w))
        w.commit(dicts(df).mapPartitions(w).collect())
    with pytest.raises(StoreBusy): list(late(iter([dict(id=5, png=picture(5), cls='c9')])))
    whole(fresh)
    assert not leftovers(fresh)
