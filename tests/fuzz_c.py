"""Call the C modules with hostile and random arguments and bytes: `make sanitize`

The modules are compiled with AddressSanitizer and UndefinedBehaviorSanitizer, which end the process at the first read
or write outside a buffer and at the first undefined operation. They are compiled twice, with vector instructions and
without. Both must accept the same arguments and give the same bytes, so a value that was never written is found too.

    python tests/fuzz_c.py [number of inputs, 100,000 unless given] [seed]
"""
import importlib.util, io, os, random, shutil, subprocess, sys, sysconfig, tempfile, time
from pathlib import Path

import numpy as np
from PIL import Image

SOURCES = Path(os.environ.get('C_SOURCES') or Path(__file__).parents[1]/'fastai_remote/codec/c')
# As in setup.py. GCC reports a float that does not fit the integer it is converted to only if asked to.
FLAGS = '-O1 -g -ffp-contract=off -fno-math-errno -fno-trapping-math -fno-omit-frame-pointer'.split()
SANITIZERS = ['-fsanitize=address,undefined,float-cast-overflow', '-fno-sanitize-recover=all']
# Leaks are Python's own. An allocation of more than 1 GB fails, as where memory is short.
OPTIONS = dict(ASAN_OPTIONS='detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=1024',
    UBSAN_OPTIONS='print_stacktrace=1', PYTHONMALLOC='malloc')   # `malloc`: the end of each bytes object is watched

def compiler(): return os.environ.get('CC') or shutil.which('gcc') or sys.exit('no gcc')

def build(folder):
    "Compile both modules, with vector instructions and without, into two folders under `folder`"
    jobs = []
    for kind,more in ('vectors',[]), ('plain',['-DNO_AVX2']):
        (folder/kind).mkdir(parents=True)
        for name,libraries in ('pixels',['-lm']), ('jpeg',['-ljpeg','-lm']):
            jobs.append(subprocess.Popen([compiler(), *FLAGS, *SANITIZERS, *more, '-fPIC', '-shared',
                '-I'+sysconfig.get_paths()['include'], str(SOURCES/f'{name}.c'), '-o', str(folder/kind/f'_{name}.so'),
                *libraries]))
    if any([j.wait() for j in jobs]): sys.exit('the C modules cannot be compiled')

def load(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

# What is given to them

INTS = -2**31, -1, 0, 1, 2, 7, 8, 255, 256, 4095, 4096, 65535, 65536, 2**31-1
FLOATS = float('nan'), float('inf'), -float('inf'), -1., -0., 0., 1e-45, 1e-30, .5, 1., 255., 65535., 1e9, 3e38

class Chance(random.Random):
    def one_in(self, n): return self.randrange(n)==0
    def bytes_array(self, n): return np.frombuffer(self.randbytes(n), np.uint8).copy()   # of exactly `n` bytes

def plan(r, width, height, full=False):
    """Valid arguments of `read` for a picture, and the size of the result

    They are: region, crop, size, bicubic, window, orientation, columns_first."""
    def span(n):
        a,b = sorted((r.randint(0, n), r.randint(0, n)))
        return (a,b) if a<b else (0,n)
    (x0,x1),(y0,y1) = ((0,width),(0,height)) if full else (span(width),span(height))
    w,h = x1-x0,y1-y0
    if r.one_in(3): box = 0., 0., float(w), float(h)
    else:
        (a,c),(b,d) = (sorted((r.uniform(0, n), r.uniform(0, n))) for n in (w,h))
        def end(start, stop, n):
            return min(float(max(stop, np.nextafter(np.float32(start), np.float32(n+1)))), float(n))
        box = a, b, end(a, c, w), end(b, d, h)
    size = (w,h) if r.one_in(4) else tuple(r.choice([1, r.randint(1, 8), r.randint(1, 80), r.randint(1, 3000)])
        for _ in 'xy')
    cuts = [span(n) for n in size]
    while True:   # the result need not be large
        (a,c),(b,d) = cuts
        if (c-a)*(d-b)<20_000: break
        cuts = [(p, p+max(1, (q-p)//2)) for p,q in cuts]
    flags = tuple(r.random()<.5 for _ in range(3))
    return [(x0,y0,x1,y1), box, size, r.random()<.5, (a,b,c,d), flags, r.random()<.5], (c-a)*(d-b)

def hostile(r, args):
    "Some of the numbers in `args`, which may be in tuples, replaced"
    args = list(args)
    for _ in range(r.choice([1, 1, 1, 2, 5])):
        k = r.randrange(len(args))
        o = args[k]
        if isinstance(o, tuple):
            at = r.randrange(len(o))
            args[k] = *o[:at], *hostile(r, [o[at]]), *o[at+1:]
        elif isinstance(o, bool): args[k] = not o
        elif isinstance(o, int): args[k] = r.choice([r.choice(INTS), o+r.randint(-2, 2), -o])
        elif isinstance(o, float): args[k] = r.choice([r.choice(FLOATS), o*r.uniform(0, 2), -o])
    return args

def of_pixels(r):
    "Arguments of `_pixels.read`"
    width,height,channels = r.randint(1, 60),r.randint(1, 60),r.choice([1,3])
    how,n = plan(r, width, height)
    data = r.bytes_array(max(0, width*height*channels-(r.randint(0, 5) if r.one_in(20) else 0)))
    args = [width, channels, *how]
    if r.one_in(2): args = hostile(r, args)
    return 'read',[data],n*channels+(r.randint(-2, 2) if r.one_in(20) else 0),args

def jpegs():
    "Some files: grey and in colour, progressive, with each subsampling, restart markers, of four colours"
    res = []
    pictures = [('RGB',(40,33)), ('L',(17,50)), ('RGB',(8,8)), ('RGB',(1,1)), ('L',(64,3)), ('CMYK',(20,20))]
    options = [dict(), dict(progressive=True), dict(subsampling=0), dict(subsampling=1), dict(restart_marker_rows=1),
               dict(quality=5), dict(keep_rgb=True)]
    for k,(mode,size) in enumerate(pictures):
        a = np.random.default_rng(k).integers(0, 256, (4,5,4), np.uint8)
        im = Image.fromarray(a[...,:3]).resize(size, Image.Resampling.BICUBIC).convert(mode)
        for kw in options:
            im.save(f:=io.BytesIO(), 'JPEG', **{'quality':80, **({} if mode=='CMYK' and 'keep_rgb' in kw else kw)})
            res.append((f.getvalue(), size, 1 if mode=='L' else 3))
    return res

def damaged(r, b):
    "Some bytes of `b` changed, cut off, inserted or repeated"
    b = bytearray(b)
    for _ in range(r.choice([1, 1, 2, 3, 10])):
        how,at = r.randrange(5),r.randrange(len(b)) if b else 0
        if not b: break
        if how==0: b[at] = r.choice([0, 1, 255, r.randrange(256)])
        elif how==1: b[at] ^= 1<<r.randrange(8)
        elif how==2: del b[at:]
        elif how==3: b[at:at] = r.randbytes(r.randint(1, 9))
        else: b[at:at] = b[max(0, at-r.randint(1, 40)):at]
    return bytes(b)

FILES = jpegs()

def of_jpeg(r):
    "Arguments of `_jpeg.read`"
    b,(width,height),channels = r.choice(FILES)
    denom = r.choice([1,1,2,4,8])
    how,n = plan(r, -(-width//denom), -(-height//denom))
    if r.one_in(2): b = damaged(r, b)
    elif r.one_in(50): b = r.randbytes(r.randint(0, 300))
    args = [denom, channels if not r.one_in(10) else 4-channels, *how]
    if r.one_in(4): args = hostile(r, args)
    return 'read',[np.frombuffer(b, np.uint8).copy()],n*args[1] if isinstance(args[1], int) and 0<args[1]<9 else n,args

def packed(r):
    "Strokes as `pack_strokes` writes them: the number of points in base 128, all x, all y"
    res = b''
    for _ in range(r.choice([1, 1, 2, 5])):
        m = r.choice([1, 2, 3, 9, 127, 128, 300])
        head = bytes([m&127|128, m>>7]) if m>127 else bytes([m])
        res += head+(r.randbytes(2*m) if r.one_in(2) else bytes([r.choice([0, 255, 128])])*(2*m))
    return damaged(r, res) if r.one_in(2) else res

def pen(size, width): return width*size/512, width*size/512+.5, (size-width*size/256)/255   # as in rasterise.py

def of_drawings(r):
    "Arguments of `_pixels.draw`"
    size = r.choice([8, 8, 9, 16, 28, 31, 64]) if not r.one_in(100) else r.choice([255,256,600])
    width = r.choice([.01, .5, 1., 3., 8., 32., r.uniform(.01, 32)])
    radius,reach,scale = pen(size, width)
    channels = r.choice([1,1,3])
    drawings = [packed(r) for _ in range(r.choice([0, 1, 1, 2]))]
    inks = None if r.one_in(2) else r.bytes_array(channels*r.choice([1, 2, 10, 40]))
    shift = int(np.log2(117/(reach+2)))
    n = len(drawings)*size*size*channels+(r.randint(-2, 2) if r.one_in(30) else 0)
    args = [size, radius, reach, scale, shift, r.random()<.5, channels]
    if r.one_in(2): args = hostile(r, args)
    return 'draw',[drawings],n,[*args, inks]

def of_floats(r):
    "Arguments of `_pixels.floats`"
    plane,k,channels,shared = r.randint(1, 80),r.randint(0, 4),r.choice([1, 1, 3, 2, 5]),r.one_in(2)
    data = r.bytes_array(plane*k*(1 if shared else channels))
    args = [plane, shared, r.choice([255., 1., .1, 0.])]
    n = plane*k*channels*4+(r.randint(-4, 4) if r.one_in(10) else 0)
    if r.one_in(2):
        args = hostile(r, args)
        if r.one_in(4): args[0] = r.choice([2**62, 2**63-1, 2**61, 2**32, -2**63])
    mean,std = (np.frombuffer(r.bytes_array(4*channels), np.float32) for _ in range(2))
    if r.one_in(10): std = std[:-1]
    return 'floats',[data],n,[*args, mean, std]

def of_rows(r):
    "Arguments of `_pixels.unfilter`"
    width,height,pixel = r.randint(1, 90),r.randint(0, 6),r.choice([1, 1, 3])
    width = max(width, pixel)
    rows = r.bytes_array(height*(width+1))
    for k in range(height): rows[k*(width+1)] = r.randrange(5) if not r.one_in(100) else r.randrange(256)
    n = width*height+(r.randint(-2, 2) if r.one_in(20) else 0)
    args = hostile(r, [width, pixel]) if r.one_in(3) else [width, pixel]
    if r.one_in(10): args[0] = r.choice([2**62, 2**63-1, -2**63, width+1])
    return 'unfilter',[rows],n,args

def outcome(module, name, sources, n, args):
    "What a call gives: its bytes, or the type of its error"
    out = np.full(max(n, 0), 0xAB, np.uint8)
    try: getattr(module, name)(*sources, out, *args)
    except (ValueError,OverflowError,TypeError,MemoryError) as e: return type(e).__name__,None
    return 'bytes',out.tobytes()

def fuzz(folder, inputs, seed):
    "Compare both builds on `inputs` inputs"
    modules = {kind:{name:load(f'_{name}', folder/kind/f'_{name}.so') for name in ('pixels','jpeg')}
        for kind in ('vectors','plain')}
    kinds = [('pixels',of_pixels), ('jpeg',of_jpeg), ('pixels',of_drawings), ('pixels',of_floats),
        ('pixels',of_rows)]
    tally,t = {},time.monotonic()
    # Written before each call: after a crash it says what was given.
    at = open(folder/'last', 'w')
    for i in range(inputs):
        r = Chance(seed<<32|i)
        name,make = kinds[i%len(kinds)]
        args = make(r)
        at.seek(0)
        at.write(f'input {i} of seed {seed}: {make.__name__}'.ljust(80))
        at.flush()
        a,b = (outcome(modules[kind][name], *args) for kind in modules)
        # Nothing is said of what a failed call leaves in its buffer.
        if a!=b:
            what = f'input {i} of seed {seed}, {make.__name__}'
            sys.exit(f'{what}: with vectors {a[0]}, without {b[0]}\n{args[0]} {args[3]}')
        tally[make.__name__, a[0]] = tally.get((make.__name__, a[0]), 0)+1
    print(f'{inputs:,} inputs in {time.monotonic()-t:.0f} s, seed {seed}')
    for (name,what),k in sorted(tally.items()): print(f'  {name[3:]}: {what} {k:,}')
    # A fuzzer whose inputs are all refused at the door finds nothing.
    for name in {n for n,_ in tally}:
        assert tally.get((name,'bytes'), 0)>inputs/20, f'{name}: hardly any input is accepted'

def main(inputs=100_000, seed=1):
    with tempfile.TemporaryDirectory() as d:
        build(Path(d))
        def library(name):
            command = [compiler(), f'-print-file-name={name}']
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        p = subprocess.run([sys.executable, __file__, 'inside', d, str(inputs), str(seed)],
            env={**os.environ, **OPTIONS, 'LD_PRELOAD':f"{library('libasan.so')} {library('libubsan.so')}"})
        if p.returncode:
            if (f:=Path(d)/'last').exists(): print(f.read_text())
            sys.exit('the sanitizers found something, or both builds differ')

if __name__=='__main__':
    if sys.argv[1:2]==['inside']: fuzz(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else: main(*map(int, sys.argv[1:]))
