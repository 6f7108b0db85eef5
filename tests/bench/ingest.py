"""How fast are drawings and photographs written to Redis, on how many cores, and how much memory do they take there?

Purpose: `to_redis` stores raw Quick, Draw! drawings (lines of ndjson) as strokes and as PNGs of 256x256. It is compared
         with the recipe of the forum post of 2018 that was the origin of this package: `eval` of the text, a matplotlib
         figure of 256x256, its pixels with `np.savez_compressed`, three keys per drawing. `to_redis(fn=shrink(256))`
         stores JPEGs, and is compared with a loop that only reads and shrinks the same files. Both run with one worker
         and with two. Then the bytes that 100,000 drawings take in the server are counted. The contenders take turns in
         one run, in an order that is reversed in every round, so that ratios are valid on a machine with other work.
         CPU seconds are those of this process and its workers; those of the server are given separately. Workers are
         started once, before the first round.

Command: python tests/bench/ingest.py [--drawings FOLDER] [--images FOLDER] [--rounds 5]
         Without folders it makes drawings and JPEGs.

Result:  4,700 raw drawings, used repeatedly, and 330 ImageNet photographs (results/ingest.json: two cores, Valkey 9.1,
         idle machine). Strokes: 11,500 per second and core, 110 times the forum's recipe. PNGs: 4,400 per second and
         core, 42 times. JPEGs: 0.93 of the speed of the bare work. Two workers are 1.89, 1.91 and 1.83 times as fast as
         one; a pure Python loop gains 1.79 times. A drawing takes 181 bytes in the server as strokes, 1,040 as PNG and
         7,364 with the forum's recipe.

Reason:  of the 9.8 ms that the recipe takes for a drawing, 6.0 are matplotlib's figure and axes, 1.1 zlib over 196,608
         bytes, 0.8 `eval`, and 0.8 the drawing itself. (The post reports 31 ms, on the machine of its time.) Strokes
         need no image: what remains is reading numbers from text, simplifying and packing. A PNG with one bit per pixel
         has 8 KB before zlib. The npz is larger than a black and white one would be, because matplotlib gives each
         stroke a colour, and there are three channels. Workers share only the server, which takes 2 microseconds per
         drawing.

Tried:   numbers with decimals through `json.loads`: 17 digits each, a fifth of the time; parsing the digits with NumPy
         takes a tenth. Decoding the new PNGs again as a check: a third of the time. Garbage collection off, groups of
         more than 256 drawings, thresholds of malloc: no gain.
"""
import argparse, gc, io, json, os, re, statistics, tempfile, time
from collections import Counter
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import matplotlib
matplotlib.use('agg')
import matplotlib.pyplot as plt
import numpy as np
import redis

from fastai_remote import drawing_samples, image_samples, redis_server, shrink, to_redis
from fastai_remote.core import size_str
from fastai_remote.parallel import parallel_map
from machine import about
from rounds import spread

FORUM,STROKES,PNG,JPEG = 'forum 2018','strokes','png','jpeg, shrink(256)'
BARE,SPIN = 'jpeg, bare work','pure Python loop'
GOALS = {   # ratios, at least
    'strokes / forum':100, 'png / forum':30, 'jpeg / bare work':.8,
    'strokes, 2 workers / 1':1.8, 'png, 2 workers / 1':1.8, 'jpeg, 2 workers / 1':1.8}
BYTES_GOALS = {'strokes':220, 'png':1300}   # bytes per drawing, at most
FULL_SIZE = 50_000_000   # drawings of the full dataset; keys are as long as they would be there

# Data

def make_drawings(
    folder, # Where to write `made.ndjson`
    n # Number of drawings
):
    "Write drawings that resemble raw ones, of eight words: curved strokes, in steps of some pixels, with times"
    rng = np.random.default_rng(0)
    with open(folder/'made.ndjson', 'w') as lines:
        for i in range(n):
            strokes,end = [],0
            for _ in range(rng.integers(1, 11)):
                n_points = int(rng.integers(5, 60))
                angles = rng.uniform(0, 6.3)+rng.normal(0, .25, n_points).cumsum()
                start = rng.uniform(50, 600, (2,1))
                steps = np.stack([np.cos(angles), np.sin(angles)])*rng.uniform(2, 18, n_points)
                points = start+steps.cumsum(1)
                times = end+rng.integers(8, 35, n_points).cumsum()
                end = int(times[-1])+300
                strokes.append([*points.clip(0).round().astype(int).tolist(), times.tolist()])
            drawing = dict(word=f'word{i%8}', countrycode='SE', timestamp='2017-03-01 00:00:00.00000 UTC',
                           recognized=bool(i%7), key_id=str(5*10**15+i), drawing=strokes)
            lines.write(json.dumps(drawing, separators=(',',':'))+'\n')

def repeat_drawings(
    folder, # Folder of ndjson files
    to, # Folder to write
    n, # Number of drawings to write
    per_file=1000
): # Number of drawings in `folder`
    "Write the drawings of `folder` in a random order, repeatedly, with a new key_id for each"
    found = [line for path in sorted(Path(folder).rglob('*.ndjson')) for line in path.read_bytes().splitlines()]
    found = [line for line in found if line.strip()]
    order = np.random.default_rng(0).permutation(len(found)).tolist()
    def with_id(i, line): return re.sub(rb'"key_id":"\d+"', b'"key_id":"%d"'%(6*10**15+i), line, count=1)
    lines = (with_id(i, found[j]) for i,j in enumerate(islice(cycle(order), n)))
    for k in range(-(-n//per_file)): (to/f'{k:04}.ndjson').write_bytes(b'\n'.join(islice(lines, per_file))+b'\n')
    return len(found)

# Measurement

class Cpu:
    "Measures wall time and CPU time since it was made: of this process and its children, the server, and all others"
    def __init__(self, server):
        self.server = server # Process id
        self.before,self.started = self.now(),time.perf_counter()

    def now(self):
        "CPU seconds of this process with its children, of the server, and of the whole machine"
        tick,children,server = os.sysconf('SC_CLK_TCK'),0,0
        for folder in Path('/proc').iterdir():
            if not folder.name.isdigit(): continue
            try: fields = (folder/'stat').read_text().rsplit(')', 1)[1].split()
            except OSError: continue
            is_server,is_child = int(folder.name)==self.server,int(fields[1])==os.getpid()
            seconds = sum(map(int, fields[11:13]))/tick
            if is_server: server = seconds
            elif is_child: children += seconds
        machine = Path('/proc/stat').read_text().split('\n', 1)[0].split()[1:9]
        busy = sum(int(ticks) for i,ticks in enumerate(machine) if i not in (3,4))/tick   # without idle and iowait
        return time.process_time()+children,server,busy

    def stop(self, n):
        "The measures of processing `n` samples; `others` is the number of cores that other jobs used"
        seconds = time.perf_counter()-self.started
        cpu,server,busy = (after-before for before,after in zip(self.before, self.now()))
        return dict(wall_us=seconds/n*1e6, cpu_us=cpu/n*1e6, server_us=server/n*1e6, per_s=n/seconds,
                    per_cpu_s=n/max(cpu, 1e-9), others=max(0., (busy-cpu-server)/seconds))

def wait_for_quiet(
    server, # Process id of the server
    left # Seconds to wait at most
): # Seconds that are left
    "Wait until other jobs use less than a quarter of a core"
    started = time.perf_counter()
    while time.perf_counter()-started<left:
        cpu = Cpu(server)
        time.sleep(.3)
        if cpu.stop(1)['others']<.25: break
    return left-(time.perf_counter()-started)

def spin(n):
    "Work that needs nothing but a core"
    total = 0
    for i in range(n): total += i*i

# The forum post's recipe

def split_line(line):
    "What the post read from a CSV file: the text of the drawing, the word, and the key_id"
    drawing = json.loads(line)
    return line[line.index('"drawing":')+10:line.rindex('}')],drawing['word'],drawing['key_id']

def forum(
    client, # Of the server
    i, # Number of the drawing
    text, # Its strokes, as Python code
    word, # Its label
    key_id, # Its id
    steps # A `Counter`; the seconds of each step are added to it
): # Bytes of the npz file
    "The recipe of the post for one drawing"
    last = time.perf_counter()
    def add_step(name):
        nonlocal last
        now = time.perf_counter()
        steps[name] += now-last
        last = now
    drawing = eval(text)   # as in the post; this text was written by this benchmark
    add_step('eval')
    figure = plt.figure(figsize=(2.56,2.56), dpi=100)
    for stroke in drawing: plt.plot(stroke[0], stroke[1])
    plt.axis('off')
    add_step('figure and plot')
    figure.canvas.draw()
    add_step('draw')
    pixels = np.asarray(figure.canvas.buffer_rgba())[...,:3].copy()
    plt.close(figure)
    add_step('pixels, close')
    file = io.BytesIO()
    np.savez_compressed(file, pixels)
    add_step('savez_compressed')
    client.set(f'train:orig:{i}', file.getvalue())
    client.set(f'train:label:{i}', word)
    client.set(f'train:key_id:{i}', key_id)
    add_step('three SET')
    return file.getvalue()

# Memory in the server

def used_memory(url): return redis.Redis.from_url(url).info('memory')['used_memory']

def measure_memory(
    server, # Of `redis_server`
    fill, # Called to write the drawings
    n # Number of drawings that it writes
): # A dict
    "Bytes per drawing in the server: `used_memory`, and `MEMORY USAGE` of all keys"
    client = redis.Redis.from_url(server.url)
    client.flushall()
    client.execute_command('MEMORY PURGE')
    time.sleep(.2)
    before = used_memory(server.url)
    fill()
    time.sleep(1.5)   # until the table of keys has grown and the buffers of clients are released
    try: client.execute_command('MEMORY PURGE')
    except redis.ResponseError: pass
    used = used_memory(server.url)-before
    keys,usage = list(client.scan_iter(count=10_000)),0
    for start in range(0, len(keys), 10_000):
        pipeline = client.pipeline(transaction=False)
        for key in keys[start:start+10_000]: pipeline.memory_usage(key, samples=0)
        usage += sum(pipeline.execute())
    return dict(n=n, keys=len(keys), used_memory=round(used/n, 1), memory_usage=round(usage/n, 1),
                fifty_million_gb=round(used/n*FULL_SIZE/1e9, 1))

def dataset_name(n):
    "A name that makes the keys of `n` samples as long as those of the full dataset"
    return 'quickdraw'+'0'*(len(str(FULL_SIZE-1))-len(str(n-1)))

def write_forum(
    server, # Of `redis_server`
    lines, # Of `split_line`
    blobs, # npz files
    n=10_000 # Number of drawings
):
    "Write drawings as the forum post does, with keys as long as those of the full dataset"
    client,first = redis.Redis.from_url(server.url),FULL_SIZE-n
    for start in range(0, n, 500):
        pipeline = client.pipeline(transaction=False)
        for i in range(start, start+500):
            _,word,key_id = lines[i%len(lines)]
            pipeline.set(f'train:orig:{first+i}', blobs[i%len(blobs)])
            pipeline.set(f'train:label:{first+i}', word)
            pipeline.set(f'train:key_id:{first+i}', key_id)
        pipeline.execute()

def memory_per_drawing(server, lines, files, blobs, n):
    "The memory of a drawing in the server, for each way of storing it"
    def ingest(codec):
        to_redis(drawing_samples(files, codec), server.url, dataset_name(n), num_workers=2, progress=False)
    found = {codec:measure_memory(server, partial(ingest, codec), n) for codec in (STROKES,PNG)}
    found[FORUM] = dict(measure_memory(server, lambda: write_forum(server, lines, blobs), 10_000),
                        npz=round(statistics.mean(map(len, blobs))))
    return found

# The run

def run(
    drawings=None, # Folder of ndjson files; default: make some
    images=None, # Folder of JPEGs; default: make some
    rounds:int=5, # Timed turns of each contender
    n:int=20_000, # Drawings per turn
    n_forum:int=200, # Drawings per turn of the forum's recipe
    n_images:int=1320, # JPEGs per turn
    n_room:int=100_000, # Drawings whose memory in the server is measured
    patience:float=90., # Seconds to wait, in total, for other jobs to end
)->dict: # Content of the result file
    "Measure the contenders in turns, then count bytes"
    with tempfile.TemporaryDirectory(prefix='fr-bench-') as temporary, redis_server() as server:
        temporary = Path(temporary)
        for name in ('made','drawings','jpegs'): (temporary/name).mkdir()
        if drawings is None: make_drawings(temporary/'made', 2000)
        n_drawings = repeat_drawings(drawings or temporary/'made', temporary/'drawings', n_room)
        files = sorted((temporary/'drawings').iterdir())
        if images is None:
            from loader import make_images   # imported here, because this process does not need PyTorch otherwise
            make_images(temporary/'photos', 100, 400)
        photos = sorted(path.resolve() for path in Path(images or temporary/'photos').rglob('*')
                        if path.suffix.lower() in ('.jpg','.jpeg'))
        for i,path in enumerate(islice(cycle(photos), n_images)):
            (temporary/'jpegs'/f'{i:05}.jpg').symlink_to(path)
        lines = [split_line(line) for path in files[:3] for line in path.read_text().splitlines()]
        data = dict(drawings=f"{Path(drawings).name if drawings else 'made'}, {n_drawings:,} drawings",
                    images=f"{Path(images).name if images else 'made'}, {len(photos)} JPEGs")
        steps,blobs = Counter(),[]
        jobs,start_seconds = make_jobs(server, lines, files, temporary/'jpegs', n, n_forum, n_images, steps, blobs)
        measured = take_turns(jobs, server, rounds, patience)
        return dict(data=data, **summarise(jobs, measured, rounds),
                    forum_steps_us={name:round(seconds/len(blobs)*1e6) for name,seconds in steps.items()},
                    start_of_workers_s=round(start_seconds, 2),
                    bytes_a_drawing=memory_per_drawing(server, lines, files, blobs, n_room), bytes_goals=BYTES_GOALS,
                    **about(server.url, 'matplotlib pillow redis numpy joblib'))

def make_jobs(server, lines, files, jpegs, n, n_forum, n_images, steps, blobs):
    """The contenders, after a first run of each, and the seconds that it takes to start workers

    Returns `{job: (number of samples, function)}`. A job is a name, or a name and a number of workers.
    """
    client,endless_lines = redis.Redis.from_url(server.url),cycle(lines)
    shrink_one,paths = shrink(256)._one,sorted(jpegs.iterdir())
    def ingest(source, workers, **kwargs):
        report = to_redis(source, server.url, 'drawings', num_workers=workers, overwrite=True, progress=False, **kwargs)
        if report.failed: raise ValueError(f'all samples of a benchmark must be converted: {report}')
    def run_forum():
        for i,line in enumerate(islice(endless_lines, n_forum)): blobs.append(forum(client, i, *line, steps))
    def run_bare():
        for path in paths: shrink_one(path.read_bytes())
    def ingest_drawings(codec, workers): ingest(drawing_samples(files[:-(-n//1000)], codec), workers)
    def ingest_images(workers): ingest(image_samples(jpegs), workers, fn=shrink(256))
    def run_spin(workers): list(parallel_map(spin, [2_000_000]*16, workers))
    started = time.perf_counter()
    ingest(drawing_samples(files[:1], 'png'), 2)
    start_seconds = time.perf_counter()-started
    ingest(drawing_samples(files[:1]), 1)
    ingest_images(2)
    run_forum()
    for collected in (steps, blobs): collected.clear()
    client.flushall()
    jobs = {FORUM:(n_forum, run_forum)}   # in this order, those that are compared follow each other
    for codec in (STROKES,PNG):
        for workers in (1,2): jobs[codec,workers] = n,partial(ingest_drawings, codec, workers)
    jobs[BARE] = n_images,run_bare
    for workers in (1,2): jobs[JPEG,workers] = n_images,partial(ingest_images, workers)
    for workers in (1,2): jobs[SPIN,workers] = 16,partial(run_spin, workers)
    return jobs,start_seconds

def take_turns(jobs, server, rounds, patience):
    "`{job: measures of each round}`"
    client,measured = redis.Redis.from_url(server.url),{job:[] for job in jobs}
    for i in range(rounds):
        for job in list(jobs)[::1 if i%2 else -1]:
            n,function = jobs[job]
            gc.collect()
            client.flushall()
            patience = wait_for_quiet(server.proc.pid, patience)
            cpu = Cpu(server.proc.pid)
            function()
            measured[job].append(cpu.stop(n))
    return measured

def job_name(job): return job if isinstance(job, str) else f"{job[0]}, {job[1]} worker{'s'*(job[1]>1)}"

def summarise(jobs, measured, rounds):
    "The measures of each contender, and their ratios"
    def ratio(a, b, unit): return spread([x[unit]/y[unit] for x,y in zip(measured[a], measured[b])])
    to_others = {'strokes / forum':((STROKES,1),FORUM), 'png / forum':((PNG,1),FORUM),
                 'jpeg / bare work':((JPEG,1),BARE)}
    to_one_worker = {f'{title}, 2 workers / 1':((name,2),(name,1))
                     for title,name in (('strokes',STROKES),('png',PNG),('jpeg',JPEG),(SPIN,SPIN))}
    ratios = {}
    for title,(a,b) in (to_others|to_one_worker).items():
        ratios[title] = dict(goal=GOALS.get(title), wall=ratio(a, b, 'per_s'), cpu=ratio(a, b, 'per_cpu_s'))
        if title in to_one_worker: ratios[title] |= quiet_ratio(measured[a], measured[b])
    contenders = {job_name(job):{unit:spread([row[unit] for row in rows]) for unit in rows[0]}
                  for job,rows in measured.items()}
    return dict(rounds=rounds, n={job_name(job):n for job,(n,_) in jobs.items()}, contenders=contenders, ratios=ratios)

def quiet_ratio(two, one):
    "The ratio of wall times in the rounds in which other jobs used less than a tenth of a core"
    quiet = [(a, b) for a,b in zip(two, one) if max(a['others'], b['others'])<.1]
    ratios = [a['per_s']/b['per_s'] for a,b in quiet]
    return dict(quiet_rounds=len(ratios), **({'quiet_wall':spread(ratios)} if ratios else {}))

# Output

def table(result):
    "The lines of readable tables"
    yield (f"{result['data']['drawings']}; {result['data']['images']}; {result['rounds']} rounds: medians; "
           'microseconds per sample')
    for name,measures in result['contenders'].items():
        median = {unit:measure['median'] for unit,measure in measures.items()}
        yield (f"  {name:28}{median['per_s']:9,.0f}/s  {median['per_cpu_s']:9,.0f} per CPU s  "
               f"wall {median['wall_us']:8,.0f}  CPU {median['cpu_us']:8,.0f}  server {median['server_us']:6,.1f}  "
               f"cores of other jobs {median['others']:.2f}")
    yield '\nRatios: the median over the rounds (min to max)'
    def text(ratio): return f"{ratio['median']:7.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
    for title,ratio in result['ratios'].items():
        quiet = ''
        if ratio.get('quiet_rounds'):
            quiet = f"   quiet rounds {ratio['quiet_rounds']}: {ratio['quiet_wall']['median']:.2f}"
        yield f"  {title:28}wall {text(ratio['wall'])}   CPU {text(ratio['cpu'])}   goal {ratio['goal'] or '-'}{quiet}"
    steps = ', '.join(f'{name} {microseconds:,}' for name,microseconds in result['forum_steps_us'].items())
    yield f"\nThe forum's recipe, microseconds: {steps}"
    yield f"Start of the workers, with a first ingest of 1,000 drawings: {result['start_of_workers_s']} s"
    yield '\nBytes per drawing in the server, including all keys'
    for name,size in result['bytes_a_drawing'].items():
        goal = f'  goal {BYTES_GOALS[name]}' if name in BYTES_GOALS else ''
        yield (f"  {name:12}used_memory {size['used_memory']:8,.1f}  MEMORY USAGE {size['memory_usage']:8,.1f}  "
               f"fifty million {size_str(size['used_memory']*FULL_SIZE)}{goal}")

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--drawings', help='folder of ndjson files of raw drawings; default: make some')
    parser.add_argument('--images', help='folder of JPEGs; default: make some')
    parser.add_argument('--rounds', type=int, default=5, help='timed turns of each contender')
    parser.add_argument('--n', type=int, default=20_000, help='drawings per turn')
    parser.add_argument('--n-images', type=int, default=1320, help='JPEGs per turn')
    parser.add_argument('--n-room', type=int, default=100_000, help='drawings whose memory in the server is measured')
    parser.add_argument('--out', default=Path(__file__).parent/'results'/'ingest.json',
                        help='result file; an empty text writes none')
    args = parser.parse_args()
    result = run(args.drawings, args.images, args.rounds, args.n, n_images=args.n_images, n_room=args.n_room)
    folders = f"{' --drawings FOLDER' if args.drawings else ''}{' --images FOLDER' if args.images else ''}"
    result['command'] = (f'python tests/bench/ingest.py{folders} --rounds {args.rounds} --n {args.n} '
                         f'--n-images {args.n_images} --n-room {args.n_room}')
    print('\n'.join(table(result)))
    if args.out: Path(args.out).write_text(json.dumps(result, indent=1)+'\n')
