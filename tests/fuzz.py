"""Read damaged and hostile bytes: manifests, indices, packed fields, records of ingests, and values of all codecs

Each file of `tests/data/fuzz` is changed at random and then read. Only documented errors may come, within seconds and
without much memory, and a value that is not the one that was written must not match its checksum.

    python tests/fuzz.py [seconds, 60 unless given] [seed]      or: make fuzz
    python tests/fuzz.py corpus                                 makes the files of `tests/data/fuzz` anew
"""
import io, json, os, random, resource, signal, struct, sys, tempfile, time, traceback, warnings, zlib
from pathlib import Path

import numpy as np
from PIL import Image

from fastai_remote.codec.fields import get_codec
from fastai_remote.core import CorruptSample, Manifest, packed_crcs, seal, StoreError, sum_content
from fastai_remote.ingest.shards import to_shards
from fastai_remote.store.base import MemoryStore
from fastai_remote.store.redis import parse_failures
from fastai_remote.store.redis_layout import element_dtype, unpack_replies
from fastai_remote.store.shard_index import ShardIndex, ShardManifest
from fastai_remote.store.shards import ShardStore
from fastai_remote.write.redis_state import generation_in, parse_lock, parse_record, unseal
from fastai_remote.write.shard_files import unseal_json

FOLDER = Path(__file__).parent/'data/fuzz'
SECONDS,MEGABYTES = 2.,300   # What reading one input may cost: CPU time, memory

# The corpus

def _images():
    rng = np.random.default_rng(0)
    pixels = Image.fromarray(rng.integers(0, 256, (6,8,3), np.uint8)).resize((40,30), Image.Resampling.BICUBIC)
    for name,fmt,im,kw in [('rgb.jpg','JPEG',pixels,{}), ('progressive.jpg','JPEG',pixels,{'progressive':True}), ('grey.jpg','JPEG',pixels.convert('L'),{}), ('cmyk.jpg','JPEG',pixels.convert('CMYK'),{}),
        ('rgb.png','PNG',pixels,{}), ('palette.png','PNG',pixels.quantize(9),{}), ('bits.png','PNG',pixels.convert('1'),{}), ('alpha.webp','WEBP',pixels.convert('RGBA'),{'lossless':True}), ('rgb.webp','WEBP',pixels,{}),
        ('gif.img','GIF',pixels.quantize(16),{}), ('bmp.img','BMP',pixels,{}), ('rle.img','TGA',pixels,{'rle':True}), ('ppm.img','PPM',pixels,{}), ('ico.img','ICO',pixels,{}), ('jp2.img','JPEG2000',pixels,{}),
        *((f'{c}.img','TIFF',pixels,{'compression':c}) for c in ('raw','tiff_lzw','tiff_deflate','jpeg')), ('tile.img','TIFF',pixels,{'compression':'tiff_lzw', 'tiffinfo':{322:16, 323:16}})]:
        exif = Image.Exif()
        exif[0x0112] = 6
        im.save(f:=io.BytesIO(), fmt, **({'exif':exif.tobytes()} if fmt in ('JPEG','PNG','WEBP') else {}), **kw)
        yield name,f.getvalue()

def make_corpus():
    "Writes the files of `tests/data/fuzz`; the same each time, apart from times and IDs"
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.iterdir(): old.unlink()
    rng = np.random.default_rng(0)
    grey = rng.integers(0, 256, (9,7), np.uint8)
    values = {'grey.raw':grey, 'rgb.raw':np.stack([grey]*3, 2), 'mask.bits':grey>99, 'line.strokes':[[[1,2,3],[4,5,6]], [[7]*200,[8]*200]], 'a.txt':'text, äöü', 'a.json':{'a':[1,2.5,None,{'b':'c'}]}, 'a.labels':['x','y',3],
        'a.npy':np.arange(12.).reshape(3,4), 'records.npy':np.zeros(2, [('x','f4'),('y','i2')]), 'a.npz':{'a':np.arange(9), 'b':np.zeros(2000)}, 'a.npyimg':grey, 'a.npzimg':grey, 'a.bin':b'bytes'}
    for name,value in values.items(): (FOLDER/name).write_bytes(get_codec(name).to_bytes(value))
    for name,b in _images(): (FOLDER/name).write_bytes(b)
    samples = [{'jpg':(FOLDER/'rgb.jpg').read_bytes(), 'cls':'abc'[i%3], 'labels':['x','yz'][:1+i%2], 'v.f4':i/7, 'id':10**9*i} for i in range(12)]
    with tempfile.TemporaryDirectory() as folder:
        to_shards([*samples, {'jpg':b'damaged'}], f'{folder}/d', chunk=6, maxcount=6, max_failed=1., shuffle=False, num_workers=1, progress=False)
        for f in Path(folder, 'd').iterdir(): (FOLDER/f'shards-{f.name}').write_bytes(f.read_bytes())
    manifest = json.loads((FOLDER/'shards-manifest.json').read_text())
    plain = Manifest('d', 12, {k:dict(v, check='u4') if v['dtype'] else v for k,v in manifest['fields'].items()}, {'train':[0,9], 'valid':[9,12]}, manifest['vocab'], stats=manifest['stats'], uid='u').stamp()
    (FOLDER/'redis.manifest').write_text(plain.to_json())
    (FOLDER/'pretty.manifest').write_text(json.dumps(json.loads(plain.to_json()), indent=2))
    (FOLDER/'chunk.record').write_text(seal({'ok':5, 'failed':1, 'gaps':[3], 'bytes':99, 'chunk':4, 'failures':[['a.jpg','ValueError: damaged']]}))
    for dtype in 'u1','u2','i4','f4','i8','f8':
        column = np.arange(40).astype(dtype)
        packed = np.zeros(40, element_dtype({'f':'u4', 'd':'u8'}.get(np.dtype(dtype).char, dtype)))
        packed['value'],packed['crc'] = column.view(packed.dtype['value'].newbyteorder('=')),packed_crcs(column, np.arange(40))
        (FOLDER/f'{dtype}.packed').write_bytes(packed.tobytes())

# What is done to a file

_INTS = 0, 1, 2, 127, 128, 255, 256, 1000, 32767, 32768, 65535, 65536, 2**31-1, 2**31, 2**32-1, 2**40, 2**63-1, 2**64-1

def mutated(r, b, others):
    "`b` with some changes"
    b = bytearray(b)
    for _ in range(r.choice([1, 1, 1, 2, 3, 8])):
        n = len(b)
        at = r.randrange(min(n, r.choice([16, 64, 300, n or 1]))) if n else 0
        how = r.randrange(8)
        if how==0 and n: b[at] ^= 1<<r.randrange(8)
        elif how==1 and n: b[at] = r.randrange(256)
        elif how==2: del b[r.randrange(n+1):]
        elif how==3: del b[at:at+r.choice([1, 2, 4, r.randrange(n+1)])]
        elif how==4: b[at:at] = b[at:at+r.randrange(1+min(n, 500))]*r.choice([1, 1, 2, 50])
        elif how==5:
            other = r.choice(others)
            start = r.randrange(len(other)+1)
            b[at:at+r.choice([0, 8, n])] = other[start:start+r.randrange(2000)]
        elif how==6:
            size,order = r.choice([1, 2, 4, 8]),r.choice(['big','little'])
            b[at:at+size] = (r.choice(_INTS)%2**(8*size)).to_bytes(size, order)
        else: _change_number(r, b)
        if len(b)>100_000: del b[100_000:]
    return bytes(b)

def _change_number(r, b):
    "A number in text becomes another one, or something else"
    digits = [i for i in range(len(b)) if 48<=b[i]<58]
    if not digits: return
    at = r.choice(digits)
    end = at
    while end<len(b) and 48<=b[end]<58: end += 1
    b[at:end] = r.choice([b'-1', b'0', b'1e400', b'9'*30, b'9'*5000, b'null', b'[]', b'{}', b'"a"', b'["a"]', b'true', b'NaN', b'1.5', b'['*3000, str(r.choice(_INTS)).encode()])

# How a file is read. Each raises only documented errors

def _resealed(b, r):
    "Half of the time with the right checksum, as a hostile author would write it"
    try: d = json.loads(b)
    except (ValueError,RecursionError): return b
    if not isinstance(d, dict) or r.random()<.5: return b
    try: return json.dumps({**d, 'crc':sum_content(d)}).encode()
    except (ValueError,RecursionError,UnicodeEncodeError): return b

def read_manifest(b, original, r):
    try: manifest = Manifest.from_json(_resealed(b, r), 'manifest')
    except StoreError: return
    manifest.altered(b if b[:1]==b'{' else original)
    assert manifest.head and Manifest.from_json(manifest.to_json())==manifest
    generation_in(b)

def read_record(b, original, r):
    for f in (lambda: parse_failures(4, b, 'd'), lambda: unseal(b, 'plan'), lambda: parse_record(4, b)):
        try: f()
        except StoreError: pass
    for f in unseal_json,parse_lock:
        try: f(b)
        except (ValueError,RecursionError): pass

def read_index(b, original, r):
    vocab = {'a':0, 'b':1, 'c':2}
    try:
        index = ShardIndex(b, 'x.idx')
        index.check('x.idx')
    except StoreError:
        if r.random()<.5: return   # else as if an author had sealed it
        try: index = ShardIndex(b, 'x.idx')
        except StoreError: return
    numbers = np.arange(6)
    for read in [*(lambda f=f: index.spans(f, numbers) for f in ('jpg','labels','no')), *(lambda f=f: index.values(f, numbers, dtype, vocab if f=='cls' else None) for f,dtype in (('cls','u1'), ('v.f4','f4'), ('id','i8'), ('jpg@','i8')))]:
        try: read()
        except StoreError: pass

def read_values(b, original, r):
    "A packed field: whatever does not match its checksum is found, and nothing else is read"
    dtype = np.dtype(r.choice(['u1','u2','i4','f4','i8','f8']))
    numbers,crcs = np.sort(np.array(r.sample(range(40), 20))),np.zeros(20, np.uint32)
    reads = [(np.arange(20), numbers, 0, 'key')]
    values,missing = unpack_replies(reads, iter([b]), dtype, 20, crcs)
    there = np.setdiff1d(np.arange(20), missing)
    good = packed_crcs(values, numbers)[there]==crcs[there]
    if len(original)==40*(dtype.itemsize+4):   # of the type that was written
        want = np.zeros(20, np.uint32)
        right,_ = unpack_replies(reads, iter([original]), dtype, 20, want)
        assert (values[there][good]==right[there][good]).all(), 'a value that changed without notice'

def reader_of(name):
    codec = get_codec(name)
    def read(b, original, r):
        for f in codec.from_bytes,codec.to_bytes,codec.image,codec.array:
            try: f(b)
            except ValueError: pass
            except TypeError:   # `to_bytes` may also get bytes from the user
                if f!=codec.to_bytes: raise
        store = MemoryStore({name:[original]})
        if b==original: return
        store.columns[name] = [b]
        try: store.get_many([0], name)
        except CorruptSample: return
        raise AssertionError('a value that changed without notice')
    return read

_folders = {}

def read_shards(name):
    def read(b, original, r):
        if os.getpid() not in _folders:
            folder = _folders[os.getpid()] = Path(tempfile.mkdtemp())
            for f in FOLDER.glob('shards-*'): (folder/f.name.removeprefix('shards-')).write_bytes(f.read_bytes())
        folder = _folders[os.getpid()]
        content = _resealed(b, r) if name=='manifest.json' else b
        (folder/name).write_bytes(content)
        try:
            store = ShardStore(folder, cache=None)
            store[0], store[len(store)-1], list(store.failures()), repr(store), store._repr_html_()
            store.get_many(range(min(len(store), 12)), store.fields)
            if r.random()<.1: store.verify(num_workers=1)
        except (StoreError,IndexError): pass
        finally: (folder/name).write_bytes(original)
    return read

def reader(path):
    if path.name.startswith('shards-') and not path.name.endswith('.idx'): return read_shards(path.name.removeprefix('shards-'))
    return {'.idx':read_index, '.manifest':read_manifest, '.record':read_record, '.packed':read_values}.get(path.suffix) or reader_of(path.name)

def rss(): return int(open('/proc/self/statm').read().split()[1])*resource.getpagesize()/1e6

def fuzz(path, seed, tries, deadline=None):
    """Reads `tries` changed versions of a file in a process of its own; returns what is wrong, as text

    The process may not use much more memory and time than it should, and a crash of it is noticed."""
    r,w = os.pipe()
    if (pid := os.fork())==0:
        try:
            os.close(r)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            out = os.fdopen(w, 'w')
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)   # some libraries print what is wrong
            warnings.simplefilter('ignore')
            Image.MAX_IMAGE_PIXELS = 1_000_000
            size = int(open('/proc/self/statm').read().split()[0])*resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size+(2<<30),)*2)
            others,read,original = [f.read_bytes() for f in sorted(FOLDER.iterdir())],reader(path),path.read_bytes()
            read(original, original, random.Random(0))
            for k in range(tries):
                if deadline and time.monotonic()>deadline: break
                random_ = random.Random(f'{path.name} {seed} {k}')
                b = mutated(random_, original, others)
                resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()+30),)*2)
                before,memory = time.process_time(),rss()
                try: read(b, original, random_)
                except BaseException: print(f'{path.name}, seed {seed}, {k}: {traceback.format_exc()}', file=out, flush=True)
                seconds,megabytes = time.process_time()-before,rss()-memory
                if seconds>SECONDS or megabytes>MEGABYTES: print(f'{path.name}, seed {seed}, {k}: {seconds:.1f} s, {megabytes:.0f} MB', file=out, flush=True)
        except BaseException: print(f'{path.name}: {traceback.format_exc()}', file=out, flush=True)
        finally: os._exit(0)
    os.close(w)
    with open(r) as f: wrong = f.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return wrong+(f'{path.name}, seed {seed}: the process ended with {status}\n' if status else '')

def main(seconds=60, seed=None):
    seed = random.randrange(10**6) if seed is None else seed
    files,started,found = sorted(FOLDER.iterdir()),time.monotonic(),0
    deadline,k = started+seconds,0
    while time.monotonic()<deadline and not found:
        for path in files:
            wrong = fuzz(path, seed+k, 200, deadline)
            found += bool(wrong)
            print(wrong, end='')
        k += 1
    print(f'{k} rounds of {len(files)} files with 200 changes each, seeds from {seed}: {found} files with errors')
    return bool(found)

if __name__=='__main__':
    if sys.argv[1:]==['corpus']: make_corpus()
    else: sys.exit(main(*map(int, sys.argv[1:])))
