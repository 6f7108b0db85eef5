"""How long does a page of fifty million samples take to open and to jump, and how much memory does it use?

Purpose: `store.view()` in Chromium, with a synthetic store of fifty million pictures and, with `--values N`, N small
         texts in a private Redis server. Measured are the time from the request for the page until its tiles are there,
         200 jumps to random samples until all visible tiles are there, the private memory of this process and of
         Chromium before and after these jumps, and, of the synthetic store, a filter by a label and a sort by a number.

Command: python tests/bench/viewer.py --values 50000000

Result:  the page is usable within two seconds, a jump takes 0.1 to 0.2 s, and memory does not grow
         (results/viewer.json).

Reason:  a jump asks for its position, and then for the tiles that are visible, in one request each. Most of the time
         goes into decoding and encoding about seventy pictures. A filter keeps a bit for each sample, and a sort eight
         bytes.
"""
import argparse, json, os, statistics, sys, time
from pathlib import Path

import numpy as np
import redis

here = Path(__file__).parent
sys.path.insert(0, str(here.parent))
from machine import about
from test_browser import chromium, family, memory, Numbers, Page

from fastai_remote import redis_server, RedisStore
from fastai_remote.view.browser import View
from fastai_remote.view.query import Answer, Query

N = 50_000_000
FILL = "for i=tonumber(ARGV[1]),tonumber(ARGV[2]) do redis.call('SET', 'text:'..i, 'text '..i) end"

def texts(url, n):
    "A dataset of `n` small texts, each under a key of its own"
    client = redis.from_url(url)
    for start in range(0, n, 100_000): client.eval(FILL, 0, start, min(start+100_000, n)-1)
    return RedisStore.from_keys(url, 'text:{}', n=n, codec='txt', image=False)

def measure(store):
    "Open the page of a store, and jump; a dict"
    view,driver = View(store),chromium()
    try:
        begun = time.perf_counter()
        page = Page(driver, view)
        usable = time.perf_counter()-begun
        places = np.random.default_rng(0).integers(0, len(store), 250).tolist()
        for place in places[:50]: page.jump(place)   # until buffers have their size
        driver.execute_cdp_cmd('HeapProfiler.collectGarbage', {})
        before = memory(os.getpid()),memory(*family(driver.service.process.pid))
        jumps = [page.jump(place) for place in places[50:]]
        driver.execute_cdp_cmd('HeapProfiler.collectGarbage', {})
        after = memory(os.getpid()),memory(*family(driver.service.process.pid))
    finally:
        driver.quit()
        view.close()
    chrome = [round(o[1]/1e6) for o in (before,after)]
    server = [round(o[0]/1e6) for o in (before,after)]
    times = dict(median=statistics.median(jumps), p90=float(np.quantile(jumps, .9)), largest=max(jumps))
    return dict(n=len(store), usable_s=round(usable, 2), jump_ms={k:round(v) for k,v in times.items()},
                server_mb=dict(before=server[0], after=server[1]), chromium_mb=dict(before=chrome[0], after=chrome[1]))

def seconds(store, **query):
    "How long a query takes"
    begun,answer = time.perf_counter(),Answer(store, Query(**query))
    answer.job.thread.join()
    return round(time.perf_counter()-begun, 1)

def run(values):
    "Run all measurements and write the result file"
    store = Numbers(N)
    rows = {'pictures that are computed':measure(store)}
    rows['queries of these'] = dict(n=N, filter_s=seconds(store, label_field='cls', label='c'),
                                    sort_s=seconds(store, sort='loss.f4'))
    print(json.dumps(rows))
    if values:
        with redis_server() as server:
            row = rows['texts in Redis'] = measure(texts(server.url, values))
            row['redis_bytes'] = redis.from_url(server.url).info('memory')['used_memory']
            print(json.dumps(row))
            machine = about(server.url, 'numpy pillow selenium')
    else: machine = about(None, 'numpy pillow selenium')
    command = 'python tests/bench/viewer.py'+(f' --values {values}' if values else '')
    result = dict(command=command, **machine)
    (here/'results/viewer.json').write_text(json.dumps({**result, 'rows':rows}, indent=1)+'\n')

if __name__=='__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--values', type=int, default=0, help='texts in Redis; 0: none')
    run(parser.parse_args().values)
