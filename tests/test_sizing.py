"The estimate of memory, compared with what a server says it uses"
import re
from pathlib import Path

import numpy as np
import pytest
import redis

from fastai_remote import to_redis
from fastai_remote.core import size_str
from fastai_remote.store.redis_sizing import redis_memory, servers_needed
from fastai_remote.store.server import redis_server

@pytest.mark.parametrize('n,low,high', [(20_000,60,160), (6000,1500,2500), (1500,15_000,25_000)])
def test_the_estimate_is_within_a_tenth_of_what_the_server_uses(n, low, high):
    rng = np.random.default_rng(0)
    sizes = rng.integers(low, high, n)
    with redis_server() as server:
        client = redis.Redis.from_url(server.url)
        client.set('warm', b'x')
        before = client.info('memory')['used_memory']
        to_redis([{'x.bin':bytes(size), 'cls':k%7} for k,size in enumerate(sizes.tolist())], server.url, 'measured', num_workers=1, progress=False, shuffle=False)
        used = client.info('memory')['used_memory']-before
    want = redis_memory(n, float(sizes.mean()), 1, 'measured', 'x.bin')
    assert .9*want<used<1.1*want, (used/want)

def test_several_fields_add_up():
    assert redis_memory(10, [100,200])==redis_memory(10, 100)+redis_memory(10, 200)
    assert redis_memory(10, 100, [1,4])-redis_memory(10, 100)==10*(1+4+4+4)
    assert servers_needed(100, 100, spare=0)==1 and servers_needed(100, 100)==2 and servers_needed(750, 1000)==1

def test_numbers_may_be_those_of_numpy():
    assert redis_memory(10, np.float32(100), np.int64(4))==redis_memory(10, 100, 4)==redis_memory(10, np.array([100]), np.array([4]))

@pytest.mark.parametrize('spare', [25, 1, -.1])
def test_what_stays_free_is_a_share(spare):
    "In percent, it would give 0 servers"
    with pytest.raises(ValueError, match=f'spare={spare}.*0 to below 1'): servers_needed(10**9, 10**9, spare)

@pytest.mark.parametrize('n,text', [(0,'0 B'), (999,'999 B'), (999.6,'1.0 KB'), (1000,'1.0 KB'), (99_949,'99.9 KB'),
    (99_960,'100 KB'), (999_499,'999 KB'), (999_600,'1.0 MB'), (1e6,'1.0 MB'),
    (999_600_000,'1.0 GB'), (999_600_000_000,'1.0 TB'), (1e15,'1000.0 TB')])
def test_sizes_are_rounded_to_the_next_unit(n, text): assert size_str(n)==text

def test_the_table_of_the_guide_is_what_the_function_says():
    page = (Path(__file__).parent.parent/'nbs/guide/sizing.md').read_text(encoding='utf-8')
    rows = re.findall(r'^\| [^|]+ \| ([\d,]+) \| ([\d,]+) bytes \| ([\d.]+ [kMGT]?B) \| (\d+) \|$', page, flags=re.M)
    assert len(rows)==3
    for n,value_bytes,memory,servers in rows:
        want = redis_memory(int(n.replace(',', '')), int(value_bytes.replace(',', '')), 2)
        assert size_str(want)==memory and servers_needed(want, 64e9)==int(servers)
