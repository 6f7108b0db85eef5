"An ingest is small whatever its size: the process that leads it keeps neither samples, nor records, nor failures"
import subprocess, sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = '''
import json, threading
import redis
from fastai_remote import redis_server, RedisStore, to_redis
from fastai_remote.core import seal
from fastai_remote.source.base import IndexedSource

class Source(IndexedSource):
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def read(self, numbers): return [(f'item {i}',i) for i in numbers.tolist()]
    load = staticmethod(lambda o: o)
    def fingerprint(self): return self.n

class Watch:
    "Prints how many MB the process grows by, at most"
    def memory(self): return int(open('/proc/self/statm').read().split()[1])*4096/1e6
    def __enter__(self):
        self.first = self.top = self.memory()
        self.end = threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
    def look(self):
        while not self.end.wait(.005): self.top = max(self.top, self.memory())
    def __exit__(self, *error):
        self.end.set()
        self.thread.join()
        print('grew', round(self.top-self.first))

options = dict(num_workers=1, progress=False)
server = redis_server()
to_redis(({'x.u1':1} for i in range(5000)), server.url, 'warm', **options)
'''

def grown(code):
    "The numbers that `Watch` printed when `code` ran after `SCRIPT`, in a process of its own"
    run = subprocess.run([sys.executable, '-c', SCRIPT+code], capture_output=True, text=True, timeout=580)
    assert run.returncode==0, run.stdout+run.stderr
    return [int(line.split()[1]) for line in run.stdout.splitlines() if line.startswith('grew')]

def test_a_plan_of_ten_million_samples_and_the_records_of_their_chunks_cost_nothing():
    first,second = grown('''
n,left = 10_000_000,[20_000]
def fn(i):
    left[0] -= 1
    if not left[0]: raise KeyboardInterrupt
    return {'x.u1':1}
with Watch():
    try: to_redis(Source(n), server.url, 'd', fn, **options)
    except KeyboardInterrupt: pass
c = redis.Redis.from_url(server.url)
plan = json.loads(c.get('d:ingest'))
size,start = plan['chunk'],f"d:ingest:{plan['id']}:record:"
done = {int(k.split(b':')[-1]) for k in c.scan_iter(start+'*')}
def record(k): return seal(dict(ok=min(size, n-k*size), bytes=size, failed=0, gaps=[], chunk=k))
records = {f'{start}{k}':record(k) for k in range(-(-n//size)) if k not in done}
assert len(records)>9000
c.mset(records)
del records
with Watch(): report = to_redis(Source(n), server.url, 'd', fn, **options)
assert report.written==n==len(RedisStore(server.url, 'd')) and report.resumed>n-20_000
''')
    assert max(first, second)<20, (first, second)

def test_a_long_stream_costs_no_more_than_a_short_one():
    short,long = grown('''
for n in 10_000,40_000:
    with Watch(): report = to_redis(({'x.u1':i%7} for i in range(n)), server.url, f'd{n}', **options)
    assert report.written==n
''')
    assert max(short, long)<8, (short, long)

def test_failures_are_all_kept_on_the_server():
    writing,first,reading = grown('''
def fn(i):
    if i%1000: raise ValueError('a reason that is as long as reasons are, with the name of a file and what Pillow says')
    return {'x.u1':1}
n = 150_000
with Watch(): report = to_redis(Source(n), server.url, 'd', fn, shuffle=False, max_failed=1., **options)
assert (report.written,report.failed,len(report.failures))==(150,n-150,100)
with Watch(): next(RedisStore(server.url, 'd').failures())
with Watch(): assert sum(1 for _ in RedisStore(server.url, 'd').failures())==n-150
''')
    assert max(writing, first, reading)<20, (writing, first, reading)
