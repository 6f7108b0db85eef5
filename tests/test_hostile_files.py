"Files of somebody else that are made to cost much more time or memory than they should, or that are no files at all"
import functools, io, struct, warnings, zipfile
from pathlib import Path

import numpy as np
import pytest
from fastai.vision.core import PILImage, PILImageBW, PILMask
from PIL import Image

from fastai_remote import (CorruptSample, csv_samples, drawing_samples, Fetch, image_samples, index_shards,
    MemoryStore, shrink, tar_samples, UnsupportedFormat)
from fastai_remote.codec import arrays, images
from fastai_remote.codec.fields import get_codec
from fastai_remote.load.lazy_image import open_image
from inputs import encoded, in_memory, png_chunk, png_of, write_tar
from limits import errors_of, STRANGE, zeros
from shard_helpers import interrupted_after
from snapshots import FolderPlace

# --- pictures

def jpeg_of_scans(n, size, mode='L'):
    "A progressive JPEG whose last scan is there `n` times more"
    b = file_of('JPEG', size, mode, progressive=True)
    last = b.rindex(b'\xff\xda')
    return b[:-2]+b[last:-2]*n+b[-2:]

def tiff_of_tile(side, size=16):
    "A TIFF of `size` x `size` pixels in one tile of `side` x `side` pixels, compressed"
    tile = zeros(side*side*3)
    def file(offset):
        more = 8+2+12*10+4
        tags = [(256,4,1,size), (257,4,1,size), (258,3,3,more), (259,3,1,8), (262,3,1,2), (277,3,1,3), (322,4,1,side),
                (323,4,1,side), (324,4,1,offset), (325,4,1,len(tile))]
        entries = b''.join(struct.pack('<HHII', *tag) for tag in tags)
        return b'II*\0'+struct.pack('<IH', 8, len(tags))+entries+bytes(4)+struct.pack('<3H', 8, 8, 8)
    return file(len(file(0)))+tile

def tiff_of_tags(n=20_000, size=900_000):
    "A TIFF with many tags, whose values are all the same bytes"
    tags = b''.join(struct.pack('<HHII', 300+k, 1, size, 8) for k in range(n))
    return b'II*\0'+struct.pack('<IH', 8, n)+tags+bytes(size)

def bmp(w, h): return b'BM'+struct.pack('<IHHI', 54, 0, 0, 54)+struct.pack('<IiiHHIIiiII', 40, w, h, 1, 24, *[0]*6)

def png(w, h, *chunks):
    "A PNG with these chunks; without pixels if it is large"
    more = b''.join(png_chunk(*chunk) for chunk in chunks)
    return png_of(bytes((w+1)*h) if w<99 else b'', w, h, more=more)

def ico(b): return struct.pack('<HHHBBBBHHII', 0, 1, 1, 16, 16, 0, 0, 1, 32, len(b), 22)+b

def file_of(fmt, size=(8,8), mode='RGB', **kwargs): return encoded(Image.new(mode, size, 128), fmt, **kwargs)

BOMBS = {
    'scans.jpg': lambda: jpeg_of_scans(5000, (3000,3000)),
    'tile.tif': lambda: tiff_of_tile(9000),
    'tags.tif': tiff_of_tags,
    'large.bmp': lambda: bmp(30_000, 30_000),
    'negative.bmp': lambda: bmp(30_000, -30_000),
    'large.png': lambda: png(60_000, 60_000),
    'large.ico': lambda: ico(png(60_000, 60_000)),
    'zTXt.png': lambda: png(8, 8, (b'zTXt', b'a\0\0'+zeros(200<<20))),
    'iCCP.png': lambda: png(8, 8, (b'iCCP', b'a\0\0'+zeros(200<<20))),
    'zTXts.png': lambda: png(8, 8, *[(b'zTXt', b'a\0\0'+zeros(1<<20))]*80),
    'program.eps': lambda: b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\n{} loop\n%%EOF\n',
    'within.blp': lambda: b'BLP1'+bytes(100)}
WAYS = {
    'check': lambda b: get_codec('img').to_bytes(b), 'decode': lambda b: get_codec('img').from_bytes(b),
    'shrink': lambda b: shrink(4)({'img':b}), 'lazy': lambda b: open_image(b, PILImage).load(),
    'lazy grey': lambda b: open_image(b, PILImageBW).load(), 'mask': lambda b: open_image(b, PILMask)}

@pytest.mark.slow
def test_bombs_are_refused_at_once():
    bombs = {name:make() for name,make in BOMBS.items()}
    assert max(map(len, bombs.values()))<2e6
    calls = {f'{way} {name}':functools.partial(f, b) for name,b in bombs.items() for way,f in WAYS.items()}
    errors = errors_of(calls, 150)
    assert errors.keys()==calls.keys()
    assert {kind for call,(kind,_) in errors.items() if call.startswith(('check','decode','shrink'))}=={'ValueError'}
    for name,says in ('program.eps','PostScript, which is a program'),('within.blp','within a file of another format'):
        assert says in errors[f'check {name}'][1]

def test_a_picture_in_a_circle_is_read_once():
    "A TIFF whose list of pictures is a circle"
    b = bytearray(file_of('TIFF', mode='L'))
    first, = struct.unpack_from('<I', b, 4)
    n, = struct.unpack_from('<H', b, first)
    struct.pack_into('<I', b, first+2+12*n, first)
    assert not errors_of({way:functools.partial(f, bytes(b)) for way,f in WAYS.items()}, 50)

def test_a_bomb_is_a_failed_sample_that_is_named():
    scans,good = jpeg_of_scans(200, (40,40)),file_of('JPEG')
    _,report = in_memory([{'jpg':scans}, {'jpg':good}], max_failed=1.)
    assert (report.written,report.failed)==(1,1) and 'a JPEG of more than 100 scans' in report.failures[0][1]
    store = MemoryStore({'jpg':[good, scans]}, 'theirs')
    with pytest.raises(CorruptSample, match=r"theirs: sample 1, field 'jpg'.*more than 100 scans.*MAX_SCANS"): store[1]
    for cls in (PILImage,PILImageBW,PILMask):
        with pytest.raises(CorruptSample, match=r"theirs: sample 1.*more than 100 scans"):
            Fetch('jpg', store, cls)(1).load()

def test_what_looks_like_scans_is_counted_exactly(monkeypatch):
    "A thumbnail, a comment, what follows the image and the maximum are accepted, with the pixels that Pillow gives"
    codec,plain,most = get_codec('jpg'),file_of('JPEG'),jpeg_of_scans(images.MAX_SCANS-6, (40,40))
    assert most.count(b'\xff\xda')==images.MAX_SCANS
    comment = b'\xff\xfe'+struct.pack('>H', 2+6000)+b'\xff\xda\0'*2000
    for b in (most, plain[:2]+comment+plain[2:], plain+b'\xff\xda\0\2'*500):
        want = Image.open(io.BytesIO(b)).convert('RGB').tobytes()
        assert codec.from_bytes(b).convert('RGB').tobytes()==open_image(b, PILImage).tobytes()==want
        assert codec.to_bytes(b)==b
    more = jpeg_of_scans(images.MAX_SCANS-5, (40,40))
    with pytest.raises(ValueError, match='scans'): codec.from_bytes(more)
    monkeypatch.setattr(images, 'MAX_SCANS', 1000)
    assert codec.from_bytes(more).tobytes()==open_image(more, PILImageBW).tobytes()

def test_the_limit_of_pixels_is_that_of_pillows_error(monkeypatch):
    "Between Pillow's warning and its error, images are those of stock fastai"
    codec = get_codec('img')
    ways = codec.to_bytes,codec.from_bytes,lambda b: shrink(50)({'img':b})
    for fmt in 'JPEG','PNG','BMP','TIFF','GIF','WEBP':
        b = file_of(fmt, (30,40))
        monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 600)
        with warnings.catch_warnings(action='ignore'):
            want = PILImage.create(io.BytesIO(b)).tobytes()
            assert all(way(b) for way in ways)
            assert codec.from_bytes(b).convert('RGB').tobytes()==want==open_image(b, PILImage).tobytes()
        monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 599)
        for way in ways:
            with pytest.raises(ValueError, match='1200 pixels.*exceeds limit of 1198'): way(b)
        with pytest.raises(CorruptSample, match='mine: sample 0.*1200 pixels'):
            Fetch('img', MemoryStore({'img':[b]}, 'mine'), PILImage)(0)

def test_usual_tiffs_are_accepted():
    pixels = np.random.default_rng(0).integers(0, 255, (30,50,3))
    for kwargs in (dict(compression='tiff_lzw'), dict(compression='jpeg'),
                   dict(compression='tiff_deflate', tiffinfo={322:256, 323:256})):
        b = encoded(pixels, 'TIFF', **kwargs)
        assert get_codec('img').to_bytes(b)==b
        assert open_image(b, PILImage).tobytes()==PILImage.create(io.BytesIO(b)).tobytes()

# --- arrays and other values

def npy(shape, size=0, dtype='<f8'):
    np.lib.format.write_array_header_1_0(file:=io.BytesIO(), dict(descr=dtype, fortran_order=False, shape=shape))
    return file.getvalue()+bytes(size)

def npz(content, declared=None):
    "An npz file that says that its array has another number of bytes"
    with zipfile.ZipFile(file:=io.BytesIO(), 'w', zipfile.ZIP_DEFLATED) as z: z.writestr('arr_0.npy', content)
    b = file.getvalue()
    return b if declared is None else b.replace(struct.pack('<I', len(content)), struct.pack('<I', declared))

VALUES = {
    'long.npy': lambda: npy((1<<40,)),
    'negative.npy': lambda: npy((-1,)),
    'long_header.npy': lambda: b'\x93NUMPY\2\0'+struct.pack('<I', 1<<31),
    'deep_header.npy': lambda: b'\x93NUMPY\2\0'+struct.pack('<I', 9000)+b'('*9000,
    'objects.npy': lambda: npy((1,), 8, '|O'),
    'pickle.npy': lambda: b'\x80\x04]\x94.',
    'long.npz': lambda: npz(npy((1<<40,))),
    'large.npz': lambda: npz(npy((1,), 8), declared=4_000_000_000),
    'larger_than_it_says.npz': lambda: npz(npy((1<<28,), 1<<28, 'u1'), declared=1000),
    'deep.json': lambda: b'['*100_000,
    'long_number.json': lambda: b'9'*100_000,
    'deep.labels': lambda: b'['*100_000+b']'*100_000,
    'x.raw': lambda: b'raw\1\3\0\xff\xff\xff\xff',
    'x.bits': lambda: b'bit\1\0\xff\x20\0\x20\0'+zeros(200<<20),
    'x.strokes': lambda: b'\xff\xff\xff\xff\x7f'}

@pytest.mark.slow
def test_other_values_are_refused_at_once():
    values,calls = {name:make() for name,make in VALUES.items()},{}
    for name,b in values.items():
        codec = get_codec(name.rsplit('.', 1)[1])
        calls[f'read {name}'] = functools.partial(codec.from_bytes, b)
        calls[f'check {name}'] = functools.partial(codec.to_bytes, b)
    assert kinds_of(errors_of(calls, 100), calls)<={'ValueError','JSONDecodeError'}
    for name,b in values.items():
        with pytest.raises(CorruptSample, match='theirs: sample 0'): MemoryStore({name:[b]}, 'theirs')[0]

def test_arrays_are_limited_together(monkeypatch):
    codec = get_codec('npz')
    b = codec.to_bytes({'a':np.zeros(1000), 'b':np.zeros(1000)})
    assert codec.from_bytes(b)['b'].shape==(1000,)
    monkeypatch.setattr(arrays, 'MAX_ARRAY_BYTES', 15_000)
    with pytest.raises(ValueError, match='when decompressed; codec.arrays.MAX_ARRAY_BYTES, 15,000, is the limit'):
        codec.from_bytes(b)

def test_arrays_come_back_as_numpy_reads_them():
    for a in (np.asfortranarray(np.arange(6.).reshape(2,3)), np.array(3), np.zeros((0,4)),
              np.zeros(2, [('x','f4'),('ü','i2')]), np.zeros(3, 'S0'), np.arange(4, dtype='>i4')):
        for name in 'npy','npz':
            b = get_codec(name).to_bytes(a)
            read,want = get_codec(name).from_bytes(b),np.load(io.BytesIO(b))
            if name=='npz': want = want['arr_0']
            assert (read.dtype,read.shape)==(want.dtype,want.shape) and (read==want).all()
            assert read.flags.f_contiguous==want.flags.f_contiguous

# --- what is no file

CAUSES = {
    'pipe':'a pipe, not a regular file', 'endless':'a device, not a regular file', 'nowhere':'No such file',
    'circle':'Too many levels', 'socket':''}

def kinds_of(errors, calls):
    "The kinds of error of calls that all fail with a message"
    assert errors.keys()==calls.keys() and all(message for _,message in errors.values())
    return {kind for kind,_ in errors.values()}

def test_tars_tables_and_drawings_are_regular_files(tmp_path):
    sources,calls = {'b.csv.gz':csv_samples, 'b.ndjson':drawing_samples, 'b.tar.gz':tar_samples},{}
    def read(source, files): in_memory(source(files))
    for what,make in STRANGE.items():
        for name,source in sources.items():
            folder = tmp_path/f'{what}-{name}'
            folder.mkdir()
            make(folder/name)
            for files in folder,folder/name,[folder/name]:
                calls[f'{files}'] = functools.partial(read, source, files)
    assert kinds_of(errors_of(calls, 100), calls)=={'FileNotFoundError'}
    calls = {}
    for what in STRANGE.keys()-{'folder'}:   # that one is searched for tars, as any other folder
        write_tar(tmp_path/what/'a.tar', [('0.txt', b'')])
        STRANGE[what](tmp_path/what/'b.tar')
        calls |= {f'index {what}':functools.partial(index_shards, tmp_path/what, num_workers=1, progress=False),
                  f'read {what}':functools.partial(read, tar_samples, tmp_path/what)}
    errors = errors_of(calls, 100)
    assert kinds_of(errors, calls)<={'FileNotFoundError','StoreUnavailable','IngestError'}
    assert all('b.tar' in message for _,message in errors.values())

def test_only_regular_files_are_read_as_images(tmp_path):
    "The others are failed samples with a reason. A linked folder is searched, but not the folder that it lies in"
    folder = tmp_path/'strange'
    (folder/'sub').mkdir(parents=True)
    (folder/'sub/good.jpg').write_bytes(file_of('JPEG'))
    (folder/'sub/up').symlink_to('..')
    (folder/'again').symlink_to('sub')
    for what,make in STRANGE.items(): make(folder/f'{what}.jpg')
    names = [*(f'{what}.jpg' for what in STRANGE),'sub/good.jpg']
    (tmp_path/'t.csv').write_text('\n'.join(['name',*names]))
    _,report = in_memory(image_samples(folder), max_failed=1.)
    reasons = {Path(name).stem:reason for name,reason in report.failures}
    assert report.written==2 and reasons.keys()==CAUSES.keys()
    assert all(cause in reasons[what] for what,cause in CAUSES.items())
    for source in image_samples([folder/name for name in names]),csv_samples(tmp_path/'t.csv', 'name', folder=folder):
        _,report = in_memory(source, max_failed=1.)
        assert (report.written,report.failed)==(1,len(STRANGE))

def test_folders_that_link_to_each_other_are_searched_once_each_way(tmp_path):
    for name,other in (('a','b'), ('b','a')):
        (tmp_path/name).mkdir()
        (tmp_path/name/f'{name}.jpg').write_bytes(b'')
        (tmp_path/name/'other').symlink_to(f'../{other}')
    found = [str(p.relative_to(tmp_path)) for p in image_samples(tmp_path).paths]
    assert found==['a/a.jpg', 'a/other/b.jpg', 'b/b.jpg', 'b/other/a.jpg']

@pytest.mark.parametrize('act', ['delete','abandon'])
def test_nothing_is_removed_beside_a_manifest_that_is_damaged(tmp_path, act):
    "An unfinished ingest beside it does not make it an index of others' shards; it can be restored"
    place = FolderPlace(tmp_path)
    place.clear()
    samples = [{'txt':f'sample {i}'} for i in range(40)]
    place.write(samples)
    with pytest.raises(KeyboardInterrupt):
        place.write(samples[:30], overwrite=True, progress=interrupted_after(1))
    manifest,seen,files = place.folder/'manifest.json',place.visible(),place.files()
    content = manifest.read_bytes()
    manifest.write_bytes(b'')
    with pytest.raises(UnsupportedFormat, match='not a manifest'): getattr(place, act)()
    assert place.files()==files
    manifest.write_bytes(content)
    assert place.visible()==seen
