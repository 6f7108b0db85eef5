"Files of somebody else that are made to cost much more time or memory than they should, or that are no files at all"
import io, json, os, resource, signal, struct, tarfile, warnings, zipfile, zlib

import numpy as np
import pytest
from PIL import Image

from fastai.vision.core import PILImage, PILImageBW, PILMask
from fastai_remote.codec import images
from fastai_remote.codec.fields import get_codec
from fastai_remote.codec.images import ImageCodec
from fastai_remote.core import CorruptSample
from fastai_remote.ingest.index import index_shards
from fastai_remote.ingest.run import ingest
from fastai_remote.ingest.shards import to_shards
from fastai_remote.load.fetch_transform import Fetch
from fastai_remote.load.lazy_image import open_image
from fastai_remote.source.drawings import drawing_samples
from fastai_remote.source.files import image_samples
from fastai_remote.source.shrink import shrink
from fastai_remote.source.csv_files import csv_samples
from fastai_remote.source.tars import tar_samples
from fastai_remote.store.base import MemoryStore
from fastai_remote.store.cache import FileCache
from fastai_remote.store.shards import ShardStore
from fastai_remote.write.base import MemoryWriter

def jpeg_of_scans(n, size, mode='L'):
    "A progressive JPEG whose last scan is there `n` times more"
    Image.new(mode, size, 128 if mode=='L' else (100,150,200)).save(f:=io.BytesIO(), 'JPEG', progressive=True)
    b = f.getvalue()
    last = b.rindex(b'\xff\xda')
    return b[:-2]+b[last:-2]*n+b[-2:]

def tiff_of_tile(side, size=16):
    "A TIFF of `size` x `size` pixels in one tile of `side` x `side` pixels, compressed"
    packer = zlib.compressobj(1)
    row = bytes(side*3)
    tile = b''.join(packer.compress(row) for _ in range(side))+packer.flush()
    def file(offset):
        more = 8+2+12*10+4
        tags = [(256,4,1,size), (257,4,1,size), (258,3,3,more), (259,3,1,8), (262,3,1,2), (277,3,1,3), (322,4,1,side), (323,4,1,side), (324,4,1,offset), (325,4,1,len(tile))]
        return b'II*\0'+struct.pack('<IH', 8, len(tags))+b''.join(struct.pack('<HHII', *tag) for tag in tags)+bytes(4)+struct.pack('<3H', 8, 8, 8)
    return file(len(file(0)))+tile

def tiff_of_tags(n=20_000, size=900_000):
    "A TIFF with many tags, whose values are all the same bytes"
    tags = b''.join(struct.pack('<HHII', 300+k, 1, size, 8) for k in range(n))
    return b'II*\0'+struct.pack('<IH', 8, n)+tags+bytes(size)

def tiff_in_a_circle():
    "A TIFF whose list of pictures is a circle"
    Image.new('L', (8,8)).save(f:=io.BytesIO(), 'TIFF')
    b = bytearray(f.getvalue())
    first, = struct.unpack_from('<I', b, 4)
    n, = struct.unpack_from('<H', b, first)
    struct.pack_into('<I', b, first+2+12*n, first)
    return bytes(b)

def bmp(w, h): return b'BM'+struct.pack('<IHHI', 54, 0, 0, 54)+struct.pack('<IiiHHIIiiII', 40, w, h, 1, 24, 0, 0, 0, 0, 0, 0)

def png(w, h, chunks=(), rows=None):
    def chunk(name, b): return struct.pack('>I', len(b))+name+b+struct.pack('>I', zlib.crc32(name+b))
    data = zlib.compress(bytes((w+1)*h)) if rows is None else rows
    return b'\x89PNG\r\n\x1a\n'+b''.join(chunk(*o) for o in ((b'IHDR', struct.pack('>IIBBBBB', w, h, 8, 0, 0, 0, 0)), *chunks, (b'IDAT', data), (b'IEND', b'')))

def zeros(n):
    packer = zlib.compressobj(9)
    return b''.join(packer.compress(bytes(1<<20)) for _ in range(n>>20))+packer.flush()

def ico(b): return struct.pack('<HHHBBBBHHII', 0, 1, 1, 16, 16, 0, 0, 1, 32, len(b), 22)+b

def cut(b, i, new): return b[:i]+new+b[i+len(new):]

def file_of(fmt, size=(8,8), **kw):
    Image.new('RGB' if fmt!='GIF' else 'P', size).save(f:=io.BytesIO(), fmt, **kw)
    return f.getvalue()

def jpeg_header_of(size):
    b = file_of('JPEG')
    i = b.index(b'\xff\xc0')
    return cut(b, i+5, struct.pack('>HH', *size))

BOMBS = {
    'scans.jpg': lambda: jpeg_of_scans(5000, (3000,3000)),
    'coloured scans.jpg': lambda: jpeg_of_scans(1000, (3000,3000), 'RGB'),
    'large.jpg': lambda: jpeg_header_of((65500,65500)),
    'tile.tif': lambda: tiff_of_tile(9000),
    'tags.tif': tiff_of_tags,
    'large.bmp': lambda: bmp(30_000, 30_000),
    'negative.bmp': lambda: bmp(30_000, -30_000),
    'large.png': lambda: png(60_000, 60_000, rows=b''),
    'zTXt.png': lambda: png(8, 8, [(b'zTXt', b'a\0\0'+zeros(300<<20))]),
    'iTXt.png': lambda: png(8, 8, [(b'iTXt', b'a\0\1\0\0\0'+zeros(300<<20))]),
    'iCCP.png': lambda: png(8, 8, [(b'iCCP', b'a\0\0'+zeros(300<<20))]),
    'zTXts.png': lambda: png(8, 8, [(b'zTXt', b'a\0\0'+zeros(1<<20))]*80),
    'large.gif': lambda: cut(file_of('GIF'), 6, struct.pack('<HH', 65000, 65000)),
    'large.ico': lambda: ico(png(60_000, 60_000, rows=b'')),
    'large.ppm': lambda: b'P6 60000 60000 255\n',
    'program.eps': lambda: b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\n{} loop\n%%EOF\n',
    'within.blp': lambda: b'BLP1'+bytes(100)}

def cost(f):
    "As `cost_once`; if that takes long, because a neighbour uses the same core, the cheaper one of two measurements"
    first = cost_once(f)
    return first if first[1]<1 else min(first, cost_once(f), key=lambda measured: measured[1])

def cost_once(f, deadline=25):
    "What `f()` raises, its CPU time in seconds and the memory that it took in MB, measured in a process of its own, which is ended after 20 s of CPU time"
    read,write = os.pipe()
    if (pid := os.fork())==0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (20,20))
            signal.alarm(deadline)
            warnings.simplefilter('ignore')
            before = resource.getrusage(resource.RUSAGE_SELF)
            with open('/proc/self/clear_refs', 'w') as o: o.write('5')   # forget the peak of the memory
            rss = _status('VmRSS')
            try: f(); error = None
            except BaseException as e: error = type(e).__name__,str(e)
            after = resource.getrusage(resource.RUSAGE_SELF)
            os.write(write, json.dumps([error, after.ru_utime+after.ru_stime-before.ru_utime-before.ru_stime, (_status('VmHWM')-rss)/1000]).encode())
        finally: os._exit(0)
    os.close(write)
    with open(read, 'rb') as f: out = f.read()
    os.waitpid(pid, 0)
    assert out, 'the process was killed'
    return json.loads(out)

def _status(key): return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith(key+':'))

WAYS = {'check': lambda b: get_codec('img').to_bytes(b), 'decode': lambda b: get_codec('img').from_bytes(b), 'shrink': lambda b: shrink(4)({'img':b}),
        'lazy': lambda b: open_image(b, PILImage).load(), 'lazy grey': lambda b: open_image(b, PILImageBW).load(), 'mask': lambda b: open_image(b, PILMask)}

@pytest.mark.parametrize('name', BOMBS)
def test_bombs_are_refused_at_once(name):
    b = BOMBS[name]()
    assert len(b)<2e6
    def all_ways():
        errors = {}
        for way,f in WAYS.items():
            try: f(b)
            except Exception as e: errors[way] = type(e).__name__
        raise ValueError(json.dumps(errors))
    (kind,said),seconds,megabytes = cost(all_ways)
    assert kind=='ValueError' and json.loads(said).keys()==WAYS.keys()
    assert {k:v for k,v in json.loads(said).items() if k in ('check','decode','shrink')}==dict.fromkeys(['check','decode','shrink'], 'ValueError')
    assert seconds<len(WAYS) and megabytes<150, (seconds, megabytes)

def test_a_picture_in_a_circle_is_read_once():
    b = tiff_in_a_circle()
    error,seconds,megabytes = cost(lambda: [f(b) for f in WAYS.values()])
    assert error is None and seconds<1 and megabytes<50

def test_a_bomb_is_a_failed_sample_that_is_named(tmp_path):
    scans = jpeg_of_scans(200, (40,40))
    writer = MemoryWriter()
    report = ingest([{'jpg':scans}, {'jpg':file_of('JPEG')}], writer, max_failed=1., num_workers=1, progress=False)
    assert report.written==1 and report.failed==1 and 'a JPEG of more than 100 scans' in report.failures[0][1]
    store = MemoryStore({'jpg':[file_of('JPEG'), scans]}, 'theirs')
    with pytest.raises(CorruptSample, match=r"theirs: sample 1, field 'jpg'.*more than 100 scans.*MAX_SCANS"): store[1]
    for img_cls in (PILImage,PILImageBW,PILMask):
        with pytest.raises(CorruptSample, match=r"theirs: sample 1.*more than 100 scans"): Fetch('jpg', store, img_cls)(1).load()

def test_what_looks_like_scans_is_counted_exactly(monkeypatch):
    "A thumbnail, a comment, what follows the image and the maximum are accepted, with the pixels that Pillow gives"
    b = jpeg_of_scans(images.MAX_SCANS-6, (40,40))
    assert b.count(b'\xff\xda')==images.MAX_SCANS
    comment = b'\xff\xfe'+struct.pack('>H', 2+6000)+b'\xff\xda\0'*2000
    for o in (b, file_of('JPEG')[:2]+comment+file_of('JPEG')[2:], file_of('JPEG')+b'\xff\xda\0\2'*500):
        want = Image.open(io.BytesIO(o)).convert('RGB').tobytes()
        assert get_codec('jpg').from_bytes(o).convert('RGB').tobytes()==want
        assert open_image(o, PILImage).tobytes()==want and get_codec('jpg').to_bytes(o)==o
    more = jpeg_of_scans(images.MAX_SCANS-5, (40,40))
    with pytest.raises(ValueError, match='scans'): get_codec('jpg').from_bytes(more)
    monkeypatch.setattr(images, 'MAX_SCANS', 1000)
    assert get_codec('jpg').from_bytes(more).tobytes()==open_image(more, PILImageBW).tobytes()

@pytest.mark.parametrize('fmt', ['JPEG','PNG','BMP','TIFF','GIF','WEBP'])
def test_the_limit_of_pixels_is_that_of_pillows_error(fmt, monkeypatch):
    "Between Pillow's warning and its error, images are those of stock fastai"
    b = file_of(fmt, (30,40))
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 600)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        want = PILImage.create(io.BytesIO(b)).tobytes()
        assert get_codec('img').to_bytes(b)==b
        assert get_codec('img').from_bytes(b).convert('RGB').tobytes()==want==open_image(b, PILImage).tobytes()
        assert shrink(50)({'img':b})
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 599)
    for f in (get_codec('img').to_bytes, get_codec('img').from_bytes, lambda b: shrink(50)({'img':b})):
        with pytest.raises(ValueError, match='1200 pixels.*exceeds limit of 1198'): f(b)
    with pytest.raises(CorruptSample, match='mine: sample 0.*1200 pixels'): Fetch('img', MemoryStore({'img':[b]}, 'mine'), PILImage)(0)

@pytest.mark.parametrize('kw', [dict(), dict(compression='tiff_lzw'), dict(compression='tiff_deflate', tile=(256,256)), dict(compression='jpeg')], ids=str)
def test_usual_tiffs_are_accepted(kw):
    a = np.random.default_rng(0).integers(0, 255, (30,50,3), np.uint8)
    kw = dict(kw)
    if 'tile' in kw: kw['tiffinfo'] = dict(zip((322,323), kw.pop('tile')))
    Image.fromarray(a).save(f:=io.BytesIO(), 'TIFF', **kw)
    assert get_codec('img').to_bytes(f.getvalue())
    assert open_image(f.getvalue(), PILImage).tobytes()==PILImage.create(io.BytesIO(f.getvalue())).tobytes()

def npy(shape, size=0, dtype='<f8'):
    np.lib.format.write_array_header_1_0(f:=io.BytesIO(), dict(descr=dtype, fortran_order=False, shape=shape))
    return f.getvalue()+bytes(size)

def npz(content, name='arr_0.npy', declared=None, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(f:=io.BytesIO(), 'w', method) as z: z.writestr(name, content)
    b = f.getvalue()
    return b if declared is None else b.replace(struct.pack('<I', len(content)), struct.pack('<I', declared))

ARRAYS = {
    'long.npy': lambda: npy((1<<40,)),
    'longer.npy': lambda: npy((1<<62,1<<62)),
    'negative.npy': lambda: npy((-1,)),
    'long header.npy': lambda: b'\x93NUMPY\2\0'+struct.pack('<I', 1<<31),
    'deep header.npy': lambda: b'\x93NUMPY\2\0'+struct.pack('<I', 9000)+b'('*9000,
    'objects.npy': lambda: npy((1,), 8, '|O'),
    'zip.npy': lambda: npz(npy((1,), 8)),
    'pickle.npy': lambda: b'\x80\x04]\x94.',
    'long.npz': lambda: npz(npy((1<<40,))),
    'large.npz': lambda: npz(npy((1,), 8), declared=4_000_000_000),
    'larger than it says.npz': lambda: npz(npy((1<<28,), 1<<28, 'u1'), declared=1000),
    'array.npz': lambda: npy((1,), 8),
    'text.npz': lambda: npz(b'text', 'a.txt'),
    'deep.json': lambda: b'['*100_000,
    'long number.json': lambda: b'9'*100_000,
    'deep.labels': lambda: b'['*100_000+b']'*100_000,
    'x.raw': lambda: b'raw\1\3\0\xff\xff\xff\xff',
    'x.bits': lambda: b'bit\1\0\xff\x20\0\x20\0'+zeros(300<<20),
    'x.strokes': lambda: b'\xff\xff\xff\xff\x7f'}

@pytest.mark.parametrize('name', ARRAYS)
def test_other_values_are_refused_at_once(name):
    b,codec = ARRAYS[name](),get_codec(name.rsplit('.', 1)[1])
    for f in (codec.from_bytes, codec.to_bytes):
        (kind,said),seconds,megabytes = cost(lambda: f(b))
        assert kind in ('ValueError','JSONDecodeError') and said, said
        assert seconds<1 and megabytes<100, (seconds, megabytes)
    store = MemoryStore({name.replace(' ', '_'):[b]}, 'theirs')
    with pytest.raises(CorruptSample, match='theirs: sample 0'): store[0]

def test_arrays_are_limited_together(monkeypatch):
    from fastai_remote.codec import arrays
    b = get_codec('npz').to_bytes({'a':np.zeros(1000), 'b':np.zeros(1000)})
    assert get_codec('npz').from_bytes(b)['b'].shape==(1000,)
    monkeypatch.setattr(arrays, 'MAX_ARRAY_BYTES', 15_000)
    with pytest.raises(ValueError, match='when decompressed; codec.arrays.MAX_ARRAY_BYTES, 15,000, is the limit'): get_codec('npz').from_bytes(b)

@pytest.mark.parametrize('a', [np.arange(6).reshape(2,3), np.asfortranarray(np.arange(6.).reshape(2,3)), np.array(3), np.zeros((0,4)), np.array(['a','bc']), np.zeros(2, [('x','f4'),('ü','i2')]), np.zeros(3, 'S0'), np.arange(4, dtype='>i4')], ids=lambda a: a.dtype.str+str(a.shape))
def test_arrays_come_back_as_numpy_reads_them(a):
    for name in 'npy','npz':
        b = get_codec(name).to_bytes(a)
        got = get_codec(name).from_bytes(b)
        want = np.load(io.BytesIO(b))
        if name=='npz': want = want['arr_0']
        assert got.dtype==want.dtype and got.shape==want.shape and got.flags.f_contiguous==want.flags.f_contiguous and (got==want).all()

# What is no file

STRANGE = {'pipe': lambda p: os.mkfifo(p), 'endless': lambda p: p.symlink_to('/dev/zero'), 'circle': lambda p: p.symlink_to(p.name), 'nowhere': lambda p: p.symlink_to('nothing'), 'folder': lambda p: p.mkdir()}
OPTIONS = dict(num_workers=1, progress=False)

def replace_by(path, what):
    path.unlink(missing_ok=True)
    STRANGE[what](path)

@pytest.fixture
def shards(tmp_path):
    to_shards([{'txt':f'number {i}', 'bin':b'%d' % i} for i in range(9)], tmp_path/'shards', chunk=3, maxcount=3, shuffle=False, **OPTIONS)
    return tmp_path/'shards'

@pytest.mark.timeout(30)
@pytest.mark.parametrize('what', STRANGE)
@pytest.mark.parametrize('name', ['manifest.json','shard-000001.tar.fastai_remote','shard-000001.tar'])
def test_files_of_a_dataset_are_regular_files(shards, name, what):
    replace_by(shards/name, what)
    def read():
        store = ShardStore(shards)
        assert store[0]['txt']=='number 0'
        store[4]
    (kind,said),seconds,megabytes = cost(read)
    assert kind in ('StoreNotFound','StoreUnavailable','CorruptSample','MissingSample','UnsupportedFormat') and said, (kind, said)
    assert seconds<2 and megabytes<100

@pytest.mark.timeout(30)
@pytest.mark.parametrize('what', STRANGE)
def test_tars_of_others_are_regular_files(tmp_path, what):
    with tarfile.open(tmp_path/'a.tar', 'w') as tar:
        for i in range(3):
            (info := tarfile.TarInfo(f'{i}.txt')).size = 1
            tar.addfile(info, io.BytesIO(b'%d' % i))
    STRANGE[what](tmp_path/'b.tar')
    for f in (lambda: index_shards(tmp_path, **OPTIONS), lambda: ingest(tar_samples(tmp_path), MemoryWriter(), **OPTIONS)):
        error,seconds,megabytes = cost(f)
        if what=='folder' and error is None: continue   # it is searched for tars, as any other folder
        assert error and error[0] in ('FileNotFoundError','StoreUnavailable','IngestError') and 'b.tar' in error[1], error
        assert seconds<2 and megabytes<100

@pytest.mark.timeout(30)
@pytest.mark.parametrize('what', STRANGE)
@pytest.mark.parametrize('source,name', [(csv_samples,'b.csv'), (csv_samples,'b.csv.gz'), (drawing_samples,'b.ndjson'), (drawing_samples,'b.ndjson.gz'), (tar_samples,'b.tar.gz')], ids=lambda o: getattr(o, '__name__', o))
def test_tables_and_drawings_are_regular_files(tmp_path, source, name, what):
    STRANGE[what](tmp_path/name)
    for files in (tmp_path, tmp_path/name, [tmp_path/name]):
        error,seconds,megabytes = cost(lambda: ingest(source(files), MemoryWriter(), **OPTIONS))
        assert error and error[0]=='FileNotFoundError', error
        assert seconds<2 and megabytes<100

@pytest.mark.timeout(30)
@pytest.mark.parametrize('what', STRANGE)
def test_lists_of_paths_name_regular_files(tmp_path, what):
    STRANGE[what](tmp_path/'a.jpg')
    (tmp_path/'b.jpg').write_bytes(file_of('JPEG'))
    report = ingest(image_samples([tmp_path/'a.jpg', tmp_path/'b.jpg']), MemoryWriter(), max_failed=1., **OPTIONS)
    assert (report.written,report.failed)==(1,1) and 'a.jpg' in report.failures[0][0]

@pytest.mark.timeout(30)
@pytest.mark.parametrize('what', STRANGE)
def test_a_cache_holds_regular_files(tmp_path, what):
    "Nothing else is opened, followed or waited for. A pipe is removed"
    (tmp_path/'secret').write_bytes(b'x'*10)
    (tmp_path/'cache/uid').mkdir(parents=True)
    path = tmp_path/'cache/uid/a'
    STRANGE[what](path)
    (tmp_path/'cache/uid/link').symlink_to(tmp_path/'secret')
    cache = FileCache(tmp_path/'cache', 1000)
    def use():
        assert cache.open('uid/a') is None and cache.open('uid/link', 10) is None
        for k in range(110):   # more than it holds: others are removed
            fd = cache.fetch(f'uid/{k}', 10, lambda f: f.write(b'y'*10))
            os.close(fd)
        fd = cache.fetch('uid/link', 10, lambda f: f.write(b'z'*10))
        if fd is not None: assert os.pread(fd, 10, 0)==b'z'*10
        cache.clear()
        raise ValueError('done')
    (kind,said),seconds,megabytes = cost(use)
    assert said=='done' and seconds<5 and (tmp_path/'secret').read_bytes()==b'x'*10
