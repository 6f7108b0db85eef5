"The estimate of memory, compared with what a server says it uses; and how many samples a chunk of a stream has"
import re
from pathlib import Path

import numpy as np
import pytest
import redis

from fastai_remote import csv_samples, tar_samples, to_redis
from fastai_remote.core import size_str
from fastai_remote.source.datasets import as_source
from fastai_remote.store.redis_sizing import redis_memory, servers_needed
from fastai_remote.store.storage import Storage
from fastai_remote.write.shards import ShardWriter
from inputs import write_tar

@pytest.mark.parametrize('n,low,high', [(20_000,60,160), (6000,1500,2500), (400,15_000,25_000)])
def test_the_estimate_is_within_a_tenth_of_what_the_server_uses(fresh, n, low, high):
    sizes = np.random.default_rng(0).integers(low, high, n)
    samples = [{'x.bin':bytes(size), 'cls':k%7} for k,size in enumerate(sizes.tolist())]
    client = redis.Redis.from_url(fresh.url)
    client.set('warm', b'x')
    before = client.info('memory')['used_memory']
    report = to_redis(samples, fresh.url, 'measured', num_workers=1, progress=False, shuffle=False)
    used = client.info('memory')['used_memory']-before
    assert .9<used/redis_memory(n, float(sizes.mean()), 1, 'measured', 'x.bin')<1.1
    assert .8<used/report.needs<1.2

def test_estimates_of_several_fields_add_up():
    assert redis_memory(10, [100,200])==redis_memory(10, 100)+redis_memory(10, 200)
    assert redis_memory(10, 100, [1,4])-redis_memory(10, 100)==10*(1+4+4+4)
    assert redis_memory(10, np.float32(100), np.array([4]))==redis_memory(10, 100, 4)

def test_what_stays_free_on_servers_is_a_share():
    "In percent, it would give 0 servers"
    assert servers_needed(100, 100, spare=0)==1 and servers_needed(100, 100)==2 and servers_needed(750, 1000)==1
    for spare in 25,1,-.1:
        with pytest.raises(ValueError, match=f'spare={spare}.*0 to below 1'): servers_needed(10**9, 10**9, spare)

@pytest.mark.parametrize('n,text', [(0,'0 B'), (999.6,'1.0 KB'), (1000,'1.0 KB'), (99_949,'99.9 KB'),
    (99_960,'100 KB'), (999_499,'999 KB'), (999_600,'1.0 MB'), (999_600_000_000,'1.0 TB'), (1e15,'1000.0 TB')])
def test_sizes_are_rounded_to_the_next_unit(n, text): assert size_str(n)==text

def test_the_table_of_the_guide_is_what_the_function_says():
    page = (Path(__file__).parent.parent/'nbs/guide/sizing.md').read_text(encoding='utf-8')
    rows = re.findall(r'^\| [^|]+ \| ([\d,]+) \| ([\d,]+) bytes \| ([\d.]+ [kMGT]?B) \| (\d+) \|$', page, flags=re.M)
    assert len(rows)==3
    for n,value_bytes,memory,servers in rows:
        want = redis_memory(int(n.replace(',', '')), int(value_bytes.replace(',', '')), 2)
        assert size_str(want)==memory and servers_needed(want, 64e9)==int(servers)

# --- chunks of streams: a chunk waits in memory, so it has fewer samples if they are large

def tar(path, n, size, mode='w', **options):
    return write_tar(path, [(f'{i:06}.bin',bytes(size)) for i in range(n)], mode, **options)

def chunk(source, **kw): return ShardWriter(Storage('/nowhere'), **kw).stream_chunk_size(source)

def test_samples_that_are_sent_whole_make_smaller_chunks(tmp_path):
    places,contents = tar(tmp_path/'a.tar', 8, 100_000),tar(tmp_path/'a.tar.gz', 8, 100_000, 'w:gz', compresslevel=0)
    assert chunk(tar_samples(places))==16_384 and chunk(tar_samples(contents))==640
    assert chunk(tar_samples(contents), maxsize=1e6)==10 and chunk(tar_samples(places), maxcount=100)==100
    (tmp_path/'a.csv').write_text('text,cls\n'+f"{'x'*63_990},cat\n"*30)
    (tmp_path/'b.csv').write_text('text,cls\n'+'x,cat\n'*30)
    assert 900<chunk(csv_samples(tmp_path/'a.csv'))<1100 and chunk(csv_samples(tmp_path/'b.csv'))==16_384

def arrow_reader(values):
    pa = pytest.importorskip('pyarrow')
    return pa.RecordBatchReader.from_batches(pa.schema([('a',pa.binary())]), pa.table({'a':values}).to_batches())

def lazy_frame(values): return pytest.importorskip('polars').DataFrame({'a':values}).lazy()

@pytest.mark.parametrize('size,n,want,make', [
    (8_000_000, 3, 8, lambda values: (np.frombuffer(o, np.uint8) for o in values)),
    (4_000_000, 9, 8, lambda values: ({'a':o, 'b':[o]} for o in values)),
    (100_000, 50, 640, arrow_reader), (100_000, 50, 640, lazy_frame),
    (100_000, 50, 640, lambda values: {'train':iter(values), 'valid':[]})],
    ids=['arrays','dicts','arrow','polars','splits'])
def test_a_stream_is_asked_for_the_size_of_its_first_samples_once(size, n, want, make):
    source = as_source(make([bytes(size)]*n))
    assert chunk(source)==chunk(source)==want
    assert sum(len(part) for part in source.stream(7))==n
