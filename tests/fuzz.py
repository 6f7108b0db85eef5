"""Read damaged and hostile bytes: manifests, indices, packed fields, records of ingests, and values of all codecs

Each file of `tests/data/fuzz` is changed at random and then read. Only documented errors may come, within seconds and
without much memory, and a value that is not the one that was written must not match its checksum.

    python tests/fuzz.py [seconds, 60 unless given] [seed]      or: make fuzz

The files are what codecs, `to_shards` and `to_redis` have written for small samples; `shards-*` are one folder.
"""
import json, os, random, resource, shutil, signal, sys, tempfile, time, traceback, warnings
from pathlib import Path

import numpy as np
from PIL import Image

from fastai_remote.codec.fields import get_codec
from fastai_remote.core import CorruptSample, Manifest, packed_crcs, seal, StoreError, unseal
from fastai_remote.ingest.stores import MemoryStore
from fastai_remote.store.redis import parse_failures
from fastai_remote.store.redis_parts import unpack_replies
from fastai_remote.store.shard_index import ShardIndex
from fastai_remote.ingest.stores import ShardStore
from fastai_remote.write.redis_place import parse_lock, parse_record

FOLDER = Path(__file__).parent/'data/fuzz'
SECONDS,MEGABYTES = 2.,300   # What reading one input may cost: CPU time, memory

# What is done to a file

_INTS = (0, 1, 2, 127, 128, 255, 256, 1000, 32767, 32768, 65535, 65536, 2**31-1, 2**31, 2**32-1, 2**40, 2**63-1,
         2**64-1)
_TEXTS = (b'-1', b'0', b'1e400', b'9'*30, b'9'*5000, b'null', b'[]', b'{}', b'"a"', b'["a"]', b'true', b'NaN', b'1.5',
          b'['*3000)

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
    b[at:end] = r.choice([*_TEXTS, str(r.choice(_INTS)).encode()])

# How a file is read. Each raises only documented errors

def _resealed(b, r):
    "Half of the time with the right checksum, as a hostile author would write it"
    try: d = json.loads(b)
    except (ValueError,RecursionError): return b
    if not isinstance(d, dict) or r.random()<.5: return b
    try: return seal(d)
    except (ValueError,RecursionError,UnicodeEncodeError): return b

def read_manifest(b, original, r):
    try: manifest = Manifest.from_json(_resealed(b, r), 'manifest')
    except StoreError: return
    assert manifest.head and Manifest.from_json(manifest.to_json())==manifest

def read_record(b, original, r):
    for f in (lambda: parse_failures(4, b, 'd'), lambda: parse_record(4, b)):
        try: f()
        except StoreError: pass
    for f in unseal,parse_lock:
        try: f(b)
        except (ValueError,RecursionError): pass

def read_index(b, original, r):
    vocab = {'a':0, 'b':1, 'c':2}
    try: index = ShardIndex(b, 'x')
    except StoreError: return
    numbers = np.arange(5)
    columns = ('cls','u1',vocab), ('v.f4','f4',None), ('id','i8',None), ('jpg@','i8',None)
    reads = [(index.spans, field, numbers) for field in ('jpg','labels','no')]
    reads += [(index.values, field, numbers, dtype, labels) for field,dtype,labels in columns]
    for read,*arguments in reads:
        try: read(*arguments)
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
            for f in FOLDER.glob('shards-*'): shutil.copy(f, folder/f.name.removeprefix('shards-'))
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
    readers = {'.fastai_remote':read_index, '.manifest':read_manifest, '.record':read_record, '.packed':read_values}
    if path.suffix in readers: return readers[path.suffix]
    name = path.name.removeprefix('shards-')
    return reader_of(name) if name==path.name else read_shards(name)

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
            others = [f.read_bytes() for f in sorted(FOLDER.iterdir())]
            read,original = reader(path),path.read_bytes()
            read(original, original, random.Random(0))
            for k in range(tries):
                if deadline and time.monotonic()>deadline: break
                random_ = random.Random(f'{path.name} {seed} {k}')
                b = mutated(random_, original, others)
                resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()+30),)*2)
                before,memory = time.process_time(),rss()
                def report(what): print(f'{path.name}, seed {seed}, {k}: {what}', file=out, flush=True)
                try: read(b, original, random_)
                except BaseException: report(traceback.format_exc())
                seconds,megabytes = time.process_time()-before,rss()-memory
                if seconds>SECONDS or megabytes>MEGABYTES: report(f'{seconds:.1f} s, {megabytes:.0f} MB')
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

if __name__=='__main__': sys.exit(main(*map(int, sys.argv[1:])))
