"""What do one server and a cluster deliver, and how much do shorter replies gain?

Purpose: batches of 64 random values, of 2 KB and 100 KB, are read with `get_many`, without checksums and decoding.
         First, one server with requests that are split into about 16, with replies of 32 to 400 KB, as the package reads; the same with
         one `MGET` for a batch, as it read before; and a cluster of three masters on the same machine. They take turns.
         Then 1 to 16 processes read from one server at the same time, with one thread of the server for its
         connections (`io-threads 1`) and with four.

Command: python tests/bench/servers.py [--rounds 7] [--seconds 2]

Result:  see results/servers.json, and the table of the documentation.
"""
import argparse, json, multiprocessing, statistics, sys, time
from pathlib import Path

import numpy as np
import redis

sys.path.insert(0, str(Path(__file__).parents[1]))
from clusters import LocalCluster
from fastai_remote import RedisStore, redis_server, to_redis
from fastai_remote.store import redis_link
from machine import about

SIZES = {2_000:40_000, 100_000:2000} # Bytes of a value, and number of values
BATCH = 64

def write(url, size, n):
    rng = np.random.default_rng(0)
    samples = ({'x.bin':rng.bytes(size)} for _ in range(n))
    to_redis(list(samples), url, f'd{size}', num_workers=1, progress=False, shuffle=False)

def batches(n, count, seed=0): return np.random.default_rng(seed).integers(0, n, (count, BATCH))

def read(store, rows):
    for row in rows: store.get_many(row, 'x.bin', check=False)

def server_seconds(clients):
    infos = [client.info('cpu') for client in clients]
    return sum(info['used_cpu_user']+info['used_cpu_sys'] for info in infos)

def timed(store, rows, clients, reply_bytes=None):
    "Samples per second, and per CPU second of client and servers"
    before,redis_link.REPLY_BYTES = redis_link.REPLY_BYTES,reply_bytes or redis_link.REPLY_BYTES
    try:
        wall,cpu,servers = time.perf_counter(),time.process_time(),server_seconds(clients)
        read(store, rows)
        wall,cpu,servers = time.perf_counter()-wall,time.process_time()-cpu,server_seconds(clients)-servers
    finally: redis_link.REPLY_BYTES = before
    return rows.size/wall, rows.size/(cpu+servers)

def layouts(rounds):
    "Median samples/s of each contender, and per CPU second, as multiples of one `MGET` a batch on one server"
    result = {}
    with redis_server(port=-1) as single, LocalCluster(3) as cluster:
        one = [redis.Redis.from_url(single.url)]
        three = [cluster.client(k) for k in range(3)]
        for size,n in SIZES.items():
            for url in (single.url, cluster.url): write(url, size, n)
            stores = RedisStore(single.url, f'd{size}'),RedisStore(cluster.url, f'd{size}')
            contenders = {'one MGET a batch':(stores[0], one, (1<<40,1<<40)), 'split requests':(stores[0], one, None),
                          'cluster of three':(stores[1], three, None)}
            rows = batches(n, 40 if size>10_000 else 200)
            assert all(stores[0].get_many(row, 'x.bin')==stores[1].get_many(row, 'x.bin') for row in rows[:5])
            speeds = {name:[] for name in contenders}
            for k in range(rounds+1):   # the first round warms up
                for name in list(contenders)[::1 if k%2 else -1]:
                    store,clients,reply_bytes = contenders[name]
                    measured = timed(store, rows, clients, reply_bytes)
                    if k: speeds[name].append(measured)
            medians = {name:[statistics.median(column) for column in zip(*s)] for name,s in speeds.items()}
            base = medians['one MGET a batch']
            result[str(size)] = {name:{'samples per second':round(m[0]), 'ratio':round(m[0]/base[0], 2),
                                       'ratio per CPU second':round(m[1]/base[1], 2)} for name,m in medians.items()}
    return result

def reader(url, size, n, seed, start, stop, counts):
    store,k = RedisStore(url, f'd{size}'),0
    rows = batches(n, 500, seed)
    store.get_many(rows[0], 'x.bin')
    start.wait()
    while not stop.is_set():
        store.get_many(rows[k%len(rows)], 'x.bin', check=False)
        k += 1
    counts.put(k*BATCH)

def many_readers(seconds):
    "MB/s and samples/s that 1 to 16 processes read from one server, and the CPU time of the server"
    result = []
    for threads in (1,4):
        with redis_server(port=-1, io_threads=threads) as server:
            client = redis.Redis.from_url(server.url)
            for size,n in SIZES.items():
                write(server.url, size, n)
                for processes in (1,2,4,8,16):
                    context = multiprocessing.get_context('fork')
                    start,stop,counts = context.Barrier(processes+1),context.Event(),context.Queue()
                    workers = [context.Process(target=reader, args=(server.url, size, n, seed, start, stop, counts))
                               for seed in range(processes)]
                    for worker in workers: worker.start()
                    start.wait()
                    began,cpu = time.perf_counter(),server_seconds([client])
                    time.sleep(seconds)
                    stop.set()
                    took,cpu = time.perf_counter()-began,server_seconds([client])-cpu
                    samples = sum(counts.get() for _ in workers)
                    for worker in workers: worker.join()
                    result.append({'value bytes':size, 'processes':processes, 'io-threads':threads,
                                   'MB/s':round(samples*size/took/1e6), 'samples/s':round(samples/took),
                                   'server CPU':round(cpu/took, 2)})
                client.flushall()
    return result

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--seconds', type=float, default=2.)
    parser.add_argument('--out', default=Path(__file__).parent/'results'/'servers.json')
    args = parser.parse_args()
    with redis_server() as server: found = about(server.url, 'redis hiredis numpy')
    found |= {'command':'python tests/bench/servers.py', 'layouts':layouts(args.rounds),
              'readers':many_readers(args.seconds)}
    Path(args.out).write_text(json.dumps(found, indent=1)+'\n')
    print(json.dumps(found, indent=1))
