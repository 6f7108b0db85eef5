"""How fast do drawings and photographs go into Redis, on how many cores, and how much room do they take there?

Purpose: raw Quick, Draw! drawings (ndjson lines) stored by `to_redis`, as strokes and as PNGs of 256x256, beside the recipe of the forum
post of 2018 that this package began from: the text through `eval`, a matplotlib figure of 256x256, its pixels as `np.savez_compressed`,
three keys a drawing. JPEGs stored by `to_redis(fn=shrink(256))` beside a loop that reads and shrinks the same files and does nothing else.
One worker and two. Then the bytes that 100,000 drawings take in the server. The contenders take turns in one run, in an order that is
reversed every round, so that ratios hold on a machine with other work. CPU seconds are those of this process and its workers, without the
server's, which are given beside them. Workers are warm: they start once, before the first round.

Command: python tests/bench/ingest.py [--drawings FOLDER] [--images FOLDER] [--rounds 5]
         without folders it makes drawings and JPEGs

Result:  on 4,700 raw drawings, repeated, and 330 ImageNet photographs (results/ingest.json: two cores, Valkey 9.1, nothing else at work): strokes
         11,500/s and core, 110 times the forum's recipe; PNG 4,400/s, 42 times; JPEGs at 0.93 of the bare work. Two workers: 1.89, 1.91 and 1.83
         times one, where a pure Python loop gains 1.79. A drawing takes 181 bytes in the server as strokes, 1,040 as PNG, 7,364 the forum's way.

Reason:  of the recipe's 9.8 ms a drawing, 6.0 are matplotlib's figure and axes, 1.1 zlib over 196,608 bytes, 0.8 `eval`, 0.8 the drawing itself.
         (The post itself counts 31 ms, on the machine of its time.) Strokes need no picture: what is left is reading numbers as text, simplifying,
         packing. A PNG of one bit a pixel is 8 KB before zlib. The npz is larger than a black and white one would be: matplotlib gives each
         stroke a colour, and there are three channels. Workers share nothing but the server, which takes 2 microseconds a drawing.

Tried:   numbers with decimals by `json.loads`: 17 digits each, a fifth of the time; digit by digit in NumPy it is a tenth. PNGs decoded again as a
         check, though just made: a third. Garbage collection off, larger groups than 256 drawings, malloc thresholds: nothing.
"""
import argparse, gc, io, json, os, re, statistics, tempfile, time
from collections import Counter
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

FORUM,STROKES,PNG,JPEG,BARE,SPIN = 'forum 2018','strokes','png','jpeg, shrink(256)','jpeg, bare work','pure Python loop'
_goals = {   # ratio: at least
    'strokes / forum':100, 'png / forum':30, 'jpeg / bare work':.8, 'strokes, 2 workers / 1':1.8, 'png, 2 workers / 1':1.8, 'jpeg, 2 workers / 1':1.8}
_bytes = {'strokes':220, 'png':1300}   # a drawing, at most

def make_drawings(folder, n):
    "Write `n` drawings like raw ones, of eight words: strokes that bend, in steps of some pixels, with times"
    rng = np.random.default_rng(0)
    with open(folder/'made.ndjson', 'w') as f:
        for i in range(n):
            strokes,t = [],0
            for _ in range(rng.integers(1, 11)):
                k = int(rng.integers(5, 60))
                a = rng.uniform(0, 6.3)+rng.normal(0, .25, k).cumsum()
                p = rng.uniform(50, 600, (2,1))+(np.stack([np.cos(a), np.sin(a)])*rng.uniform(2, 18, k)).cumsum(1)
                times = t+rng.integers(8, 35, k).cumsum()
                t = int(times[-1])+300
                strokes.append([*p.clip(0).round().astype(int).tolist(), times.tolist()])
            f.write(json.dumps(dict(word=f'word{i%8}', countrycode='SE', timestamp='2017-03-01 00:00:00.00000 UTC', recognized=bool(i%7),
                                    key_id=str(5*10**15+i), drawing=strokes), separators=(',',':'))+'\n')

def repeat_drawings(folder, to, n, per=1000):
    "Write `n` drawings to `to`, `per` a file: the lines of `folder`, shuffled, over again with key_ids of their own; how many lines there are"
    lines = [l for f in sorted(Path(folder).rglob('*.ndjson')) for l in f.read_bytes().splitlines() if l.strip()]
    order = np.random.default_rng(0).permutation(len(lines)).tolist()
    it = (re.sub(rb'"key_id":"\d+"', b'"key_id":"%d"'%(6*10**15+i), lines[j], count=1) for i,j in enumerate(islice(cycle(order), n)))
    for k in range(-(-n//per)): (to/f'{k:04}.ndjson').write_bytes(b'\n'.join(islice(it, per))+b'\n')
    return len(lines)

class Cpu:
    "Seconds of wall and CPU since it was made: of this process and its children, of the server, and of all others"
    def __init__(self, server):
        self.server = server
        self.was,self.t0 = self.now(),time.perf_counter()
    def now(self):
        tick,me,kids,server = os.sysconf('SC_CLK_TCK'),os.getpid(),0,0
        for p in Path('/proc').iterdir():
            if not p.name.isdigit(): continue
            try: v = (p/'stat').read_text().rsplit(')', 1)[1].split()
            except OSError: continue
            if int(v[1])==me or int(p.name)==self.server:
                s = sum(map(int, v[11:13]))/tick
                if int(p.name)==self.server: server = s
                else: kids += s
        busy = sum(int(v) for i,v in enumerate(Path('/proc/stat').read_text().split('\n', 1)[0].split()[1:9]) if i not in (3,4))/tick
        return time.process_time()+kids,server,busy
    def stop(self, n):
        wall = time.perf_counter()-self.t0
        cpu,server,busy = (b-a for a,b in zip(self.was, self.now()))
        return dict(wall_us=wall/n*1e6, cpu_us=cpu/n*1e6, server_us=server/n*1e6, per_s=n/wall, per_cpu_s=n/max(cpu, 1e-9), others=max(0., (busy-cpu-server)/wall))

def wait_for_quiet(server, left):
    "Wait until other jobs take less than a quarter of a core, `left` seconds at most; what is left of them"
    t0 = time.perf_counter()
    while time.perf_counter()-t0<left:
        t = Cpu(server); time.sleep(.3)
        if t.stop(1)['others']<.25: break
    return left-(time.perf_counter()-t0)

def spin(n):
    "Work that needs nothing but a core"
    x = 0
    for i in range(n): x += i*i

def split_line(l):
    "What the post had from a CSV: text of the drawing, word, key_id"
    d = json.loads(l)
    return l[l.index('"drawing":')+10:l.rindex('}')],d['word'],d['key_id']

def forum(c, i, text, word, key_id, steps):
    "The post's recipe for drawing `i`; adds the seconds of each step to `steps`"
    t = [time.perf_counter()]
    def did(k): t.append(time.perf_counter()); steps[k] += t[-1]-t[-2]
    drawing = eval(text)   # the post's way; this text is our own
    did('eval')
    fig = plt.figure(figsize=(2.56,2.56), dpi=100)
    for s in drawing: plt.plot(s[0], s[1])
    plt.axis('off')
    did('figure and plot')
    fig.canvas.draw()
    did('draw')
    a = np.asarray(fig.canvas.buffer_rgba())[...,:3].copy()
    plt.close(fig)
    did('pixels, close')
    np.savez_compressed(f:=io.BytesIO(), a)
    did('savez_compressed')
    c.set(f'train:orig:{i}', f.getvalue()); c.set(f'train:label:{i}', word); c.set(f'train:key_id:{i}', key_id)
    did('three SET')
    return f.getvalue()

def memory(url): return redis.Redis.from_url(url).info('memory')['used_memory']

def room(server, fill, n):
    "What `n` drawings that `fill` writes take in `server`: `used_memory`, and `MEMORY USAGE` of all keys"
    c = redis.Redis.from_url(server.url)
    c.flushall(); c.execute_command('MEMORY PURGE')
    time.sleep(.2); was = memory(server.url)
    fill()
    time.sleep(1.5)   # the table of keys ends its growth, clients' buffers go
    try: c.execute_command('MEMORY PURGE')
    except redis.ResponseError: pass
    used,keys,usage = memory(server.url)-was,list(c.scan_iter(count=10_000)),0
    for k in range(0, len(keys), 10_000):
        p = c.pipeline(transaction=False)
        for o in keys[k:k+10_000]: p.memory_usage(o, samples=0)
        usage += sum(p.execute())
    return dict(n=n, keys=len(keys), used_memory=round(used/n, 1), memory_usage=round(usage/n, 1), fifty_million_gb=round(used/n*50e6/1e9, 1))

def run(
    drawings=None, # Folder of ndjson files; default: make some
    images=None, # Folder of JPEGs; default: make some
    rounds:int=5, # Timed turns of each contender
    n:int=20_000, # Drawings a turn
    n_forum:int=200, # Drawings a turn, of the forum's recipe
    n_images:int=1320, # JPEGs a turn
    n_room:int=100_000, # Drawings to measure the room that they take
    patience:float=90., # Seconds to wait, in all, for other jobs to end
)->dict: # What goes into the results file
    "Time the contenders in turns, then count bytes"
    with tempfile.TemporaryDirectory(prefix='fr-bench-') as d, redis_server() as s:
        d = Path(d)
        for k in ('made','drawings','jpegs'): (d/k).mkdir()
        if drawings is None: make_drawings(d/'made', 2000)
        have = repeat_drawings(drawings or d/'made', d/'drawings', n_room)
        files = sorted((d/'drawings').iterdir())
        if images is None:
            from loader import make_images   # here: PyTorch need not be in this process
            make_images(d/'photos', 100, 400)
        photos = sorted(p.resolve() for p in Path(images or d/'photos').rglob('*') if p.suffix.lower() in ('.jpg','.jpeg'))
        for i,p in enumerate(islice(cycle(photos), n_images)): (d/'jpegs'/f'{i:05}.jpg').symlink_to(p)
        lines = [split_line(l) for f in files[:3] for l in f.read_text().splitlines()]
        return dict(data=dict(drawings=f"{Path(drawings).name if drawings else 'made'}, {have:,} drawings", images=f"{Path(images).name if images else 'made'}, {len(photos)} JPEGs"),
                    **_run(s, lines, files, d/'jpegs', rounds, n, n_forum, n_images, n_room, patience), **about(s.url, 'matplotlib pillow redis numpy joblib'))

def _run(s, lines, files, jpegs, rounds, n, n_forum, n_images, n_room, patience):
    c,steps,blobs,todo = redis.Redis.from_url(s.url),Counter(),[],cycle(lines)
    bare,paths = shrink(256)._one,sorted(jpegs.iterdir())
    def ingest(source, workers, **kw):
        rep = to_redis(source, s.url, 'drawings', num_workers=workers, overwrite=True, progress=False, **kw)
        if rep.failed: raise ValueError(f'these should all do: {rep}')
    def go_forum():
        for i,l in enumerate(islice(todo, n_forum)): blobs.append(forum(c, i, *l, steps))
    def go_bare():
        for p in paths: bare(p.read_bytes())
    some = files[:-(-n//1000)]
    jobs = {FORUM:(n_forum, go_forum), BARE:(n_images, go_bare)}
    for w in (1,2):
        jobs[STROKES,w] = n,lambda w=w: ingest(drawing_samples(some), w)
        jobs[PNG,w] = n,lambda w=w: ingest(drawing_samples(some, 'png'), w)
        jobs[SPIN,w] = 16,lambda w=w: list(parallel_map(spin, [2_000_000]*16, w))
        jobs[JPEG,w] = n_images,lambda w=w: ingest(image_samples(jpegs), w, fn=shrink(256))
    t0 = time.perf_counter()
    ingest(drawing_samples(files[:1], 'png'), 2)
    start = time.perf_counter()-t0
    ingest(drawing_samples(files[:1]), 1); ingest(image_samples(jpegs), 2, fn=shrink(256)); go_forum()
    steps.clear(); blobs.clear(); c.flushall()
    res = {k:[] for k in jobs}
    jobs = {k:jobs[k] for k in (FORUM, (STROKES,1), (STROKES,2), (PNG,1), (PNG,2), BARE, (JPEG,1), (JPEG,2), (SPIN,1), (SPIN,2))}   # those to be compared one after the other
    for r in range(rounds):
        for k in list(jobs)[::1 if r%2 else -1]:
            m,f = jobs[k]
            gc.collect(); c.flushall()
            patience = wait_for_quiet(s.proc.pid, patience)
            t = Cpu(s.proc.pid); f(); res[k].append(t.stop(m))
    name = lambda k: k if isinstance(k, str) else f"{k[0]}, {k[1]} worker{'s'*(k[1]>1)}"
    def ratio(a, b, u): return spread([x[u]/y[u] for x,y in zip(res[a], res[b])])
    one = {'strokes / forum':((STROKES,1),FORUM), 'png / forum':((PNG,1),FORUM), 'jpeg / bare work':((JPEG,1),BARE)}
    two = {f'{k}, 2 workers / 1':((o,2),(o,1)) for k,o in (('strokes',STROKES),('png',PNG),('jpeg',JPEG),(SPIN,SPIN))}
    ratios = {k:dict(goal=_goals.get(k), wall=ratio(*ab, 'per_s'), cpu=ratio(*ab, 'per_cpu_s'), **(quiet(*(res[o] for o in ab)) if k in two else {})) for k,ab in (one|two).items()}
    total = len(blobs)
    rooms = {STROKES:room(s, lambda: to_redis(drawing_samples(files), s.url, _name(n_room), num_workers=2, progress=False), n_room),
             PNG:room(s, lambda: to_redis(drawing_samples(files, 'png'), s.url, _name(n_room), num_workers=2, progress=False), n_room)}
    def npz():
        off = 50_000_000-10_000   # keys as long as those of fifty million
        for k in range(0, 10_000, 500):
            p = c.pipeline(transaction=False)
            for i in range(k, k+500):
                _,word,key_id = lines[i%len(lines)]
                p.set(f'train:orig:{off+i}', blobs[i%total]).set(f'train:label:{off+i}', word).set(f'train:key_id:{off+i}', key_id)
            p.execute()
    rooms[FORUM] = dict(room(s, npz, 10_000), npz=round(statistics.mean(map(len, blobs))))
    return dict(rounds=rounds, n={name(k):m for k,(m,_) in jobs.items()}, contenders={name(k):{u:spread([e[u] for e in es]) for u in es[0]} for k,es in res.items()}, ratios=ratios,
                forum_steps_us={k:round(v/total*1e6) for k,v in steps.items()}, start_of_workers_s=round(start, 2), bytes_a_drawing=rooms, bytes_goals=_bytes)

def quiet(two, one):
    "The wall ratio over the rounds in which other jobs took less than a tenth of a core"
    rs = [a['per_s']/b['per_s'] for a,b in zip(two, one) if max(a['others'], b['others'])<.1]
    return dict(quiet_rounds=len(rs), **({'quiet_wall':spread(rs)} if rs else {}))

def _name(n, of=50_000_000): return 'quickdraw'+'0'*(len(str(of-1))-len(str(n-1)))   # keys as long as those of fifty million

def spread(vs):
    def r(v): return round(v, 3) if v<100 else round(v, 1)
    return dict(median=r(statistics.median(vs)), min=r(min(vs)), max=r(max(vs)))

def table(res):
    "`res` for reading"
    yield f"{res['data']['drawings']}; {res['data']['images']}; {res['rounds']} rounds: medians over the rounds (min to max); microseconds a sample"
    for k,o in res['contenders'].items():
        yield f"  {k:28}{o['per_s']['median']:9,.0f}/s  {o['per_cpu_s']['median']:9,.0f} per CPU s  wall {o['wall_us']['median']:8,.0f}  CPU {o['cpu_us']['median']:8,.0f}  server {o['server_us']['median']:6,.1f}  others' cores {o['others']['median']:.2f}"
    yield '\nRatios, the median over the rounds (min to max)'
    for k,o in res['ratios'].items():
        yield f"  {k:28}wall {o['wall']['median']:7.2f} ({o['wall']['min']:.2f} to {o['wall']['max']:.2f})   CPU {o['cpu']['median']:7.2f} ({o['cpu']['min']:.2f} to {o['cpu']['max']:.2f})   goal {o['goal'] or '-'}" + (f"   quiet rounds {o['quiet_rounds']}: {o['quiet_wall']['median']:.2f}" if o.get('quiet_rounds') else '')
    yield f"\nThe forum's recipe, microseconds: {', '.join(f'{k} {v:,}' for k,v in res['forum_steps_us'].items())}"
    yield f"Workers start, with a first ingest of 1,000 drawings: {res['start_of_workers_s']} s"
    yield '\nBytes a drawing in the server, all keys counted'
    for k,o in res['bytes_a_drawing'].items():
        yield f"  {k:12}used_memory {o['used_memory']:8,.1f}  MEMORY USAGE {o['memory_usage']:8,.1f}  fifty million {size_str(o['used_memory']*50e6)}{'  goal '+str(_bytes[k]) if k in _bytes else ''}"

if __name__=='__main__':
    ap = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    ap.add_argument('--drawings', help='folder of ndjson files of raw drawings; default: make some')
    ap.add_argument('--images', help='folder of JPEGs; default: make some')
    ap.add_argument('--rounds', type=int, default=5, help='timed turns of each')
    ap.add_argument('--n', type=int, default=20_000, help='drawings a turn')
    ap.add_argument('--n-images', type=int, default=1320, help='JPEGs a turn')
    ap.add_argument('--n-room', type=int, default=100_000, help='drawings to count the bytes of')
    ap.add_argument('--out', default=Path(__file__).parent/'results'/'ingest.json', help='results file; an empty one writes none')
    a = ap.parse_args()
    res = run(a.drawings, a.images, a.rounds, a.n, n_images=a.n_images, n_room=a.n_room)
    res['command'] = f"python tests/bench/ingest.py{' --drawings FOLDER' if a.drawings else ''}{' --images FOLDER' if a.images else ''} --rounds {a.rounds} --n {a.n} --n-images {a.n_images} --n-room {a.n_room}"
    print('\n'.join(table(res)))
    if a.out: Path(a.out).write_text(json.dumps(res, indent=1)+'\n')
