"Unusual tars: `tar_samples` and `index_shards` read the same samples from them"
import bz2, gzip, io, lzma, re, shutil, subprocess, tarfile, tracemalloc, zlib

import pytest
import zstandard

from fastai_remote import DamagedTar, index_shards, IngestError, ShardStore, tar_samples
from fastai_remote.ingest.run import ingest
from fastai_remote.source.tars import tar_members
from fastai_remote.write.base import MemoryWriter
from fault_storage import flipped
from inputs import tar_header as header, tar_member as member
from shard_helpers import tar

BLOCK = 512
END = bytes(2*BLOCK)

def raw_header(name, size_field, kind=b'0'):
    "A header with the 12 bytes `size_field` in place of its size, and the checksum that belongs to them"
    head = bytearray(header(name))
    head[124:136],head[156:157],head[148:156] = size_field,kind,b' '*8
    head[148:156] = b'%06o\0 ' % sum(head)
    return bytes(head)

def pax(records, kind=tarfile.XHDTYPE):
    def line(k, v):
        rest = f' {k}={v}\n'.encode()
        n = len(rest)
        while n!=len(str(n))+len(rest): n = len(str(n))+len(rest)
        return b'%d%s' % (n, rest)
    body = b''.join(line(k, v) for k,v in records.items())
    return header('././@PaxHeader', len(body), kind, tarfile.USTAR_FORMAT)+body+bytes(-len(body)%BLOCK)

def sample(i, fmt=tarfile.GNU_FORMAT, key=None):
    key = key or f'{i:03}'
    return member(f'{key}.bin', content(i), fmt)+member(f'{key}.cls', b'%d' % (i%3), fmt)

def content(i): return b'content %d ' % i * (i+1)*20
def expected(*numbers): return [(content(i), i%3) for i in numbers]

LONG = 'folder/'*30+'x'*120
NEGATIVE = b'\xff'*12   # -1 in base 256
HUGE = b'\x80\0\0\0\0\x7f'+b'\xff'*6
THREE = sample(0)+sample(1)+sample(2)
FOLDER = header('d/', kind=tarfile.DIRTYPE)
TO_PASSWORDS = dict(kind=tarfile.SYMTYPE, linkname='/etc/passwd')

# name: (tar, numbers of the samples that are read, is there a failure?)
UNUSUAL = {
    'GNU long names': (b''.join(sample(i, key=f'{LONG}{i}') for i in range(3))+END, (0,1,2), False),
    'pax long names': (b''.join(sample(i, tarfile.PAX_FORMAT, f'{LONG}ü{i}') for i in range(3))+END, (0,1,2), False),
    'dots in folders, capitals': (
        sample(0, key='v1.0/b')+sample(1, key='./c')+member('ü 日/x.BIN', content(2))+member('ü 日/x.Cls', b'2')+END,
        (0,1,2), False),
    'pax global header': (pax({'comment':'by git'}, tarfile.XGLTYPE)+THREE+END, (0,1,2), False),
    'pax size': (
        pax({'size':len(content(0))})+header('000.bin')+member('000.bin', content(0))[BLOCK:]+member('000.cls', b'0')
        +sample(1)+END, (0,1), False),
    'names that are not UTF-8': (sample(0, key='a\udcff')+sample(1)+END, (0,1), False),
    'folders': (FOLDER+sample(0)+FOLDER+sample(1)+END, (0,1), False),
    'unknown type': (THREE+header('003.bin', kind=b'Z')+END, (0,1,2), True),
    'symbolic link': (sample(0)+header('001.bin', **TO_PASSWORDS)+member('001.cls', b'1')+sample(2)+END, (0,2), True),
    'a link within another sample': (
        member('000.bin', content(0))+header('x.bin', **TO_PASSWORDS)+member('000.cls', b'0')+sample(1)+END,
        (0,1), True),
    'a link after the file it replaces': (sample(0)+sample(1)+header('001.bin', **TO_PASSWORDS)+END, (0,), True),
    'a device': (sample(0)+header('001.bin', kind=tarfile.CHRTYPE)+member('001.cls', b'1')+END, (0,), True),
    'a field twice': (member('000.bin', b'old')+sample(0)+sample(1)+END, (1,), True),
    'two archives': (sample(0)+END+sample(1)+sample(2)+END, (0,1,2), False),
    'two archives with the same key': (sample(0, key='a')+END+sample(1, key='a')+END, (0,1), False),
    'zeros before the first member': (END+sample(0)+END, (0,), False),
    'a block of zeros between members': (sample(0)+bytes(BLOCK)+sample(1)+END, (0,1), False),
    'one block of zeros at the end': (THREE+bytes(BLOCK), (0,1,2), False),
    'no end': (THREE, (0,1,2), True),
    'junk after the end': (THREE+END+b'junk'*200, (0,1,2), True),
    'damaged header': (sample(0)+sample(1).replace(b'001.bin', b'001.bim', 1)+sample(2)+END, (0,), True),
    'cut in a content': ((sample(0)+sample(9))[:-BLOCK*4], (0,), True),
    'cut between the members of a sample': (sample(0)+sample(1)+member('002.bin', content(2)), (0,1), True),
    'cut after a long name': (sample(0)+sample(1)+member(LONG*2, b'')[:-BLOCK], (0,1), True),
    'a long name, then zeros': (sample(0)+member(LONG*2, b'')[:-BLOCK]+bytes(BLOCK)+sample(1)+END, (0,), True),
    'pax headers, then zeros': (sample(0)+pax({'path':'evil.bin'})+bytes(BLOCK)+sample(1)+END, (0,), True),
    'negative size': (sample(0)+raw_header('001.bin', NEGATIVE)+sample(1)+END, (0,), True),
    'negative pax size': (sample(0)+pax({'size':-2048})+header('001.bin')+sample(1)+END, (0,), True),
    'a size of exabytes': (sample(0)+raw_header('001.bin', HUGE)+sample(1)+END, (0,), True),
    'a size that is no number': (sample(0)+pax({'size':'many'})+header('001.bin')+bytes(BLOCK)+END, (0,), True),
    'a long name of exabytes': (sample(0)+raw_header('././@LongLink', HUGE, b'L')+sample(1)+END, (0,), True),
    'a long name of negative size': (sample(0)+raw_header('././@LongLink', NEGATIVE, b'L')+sample(1)+END, (0,), True),
    'pax headers of 2 MB': (
        sample(0)+header('././@PaxHeader', 1<<21, tarfile.XHDTYPE)+bytes(1<<21)+sample(1)+END, (0,), True),
    '5,000 pax headers': (sample(0)+pax({'a':'b'})*5000+sample(1)+END, (0,), True),
}
def gzip_in_parts(data): return b''.join(gzip.compress(data[k:k+1000]) for k in range(0, len(data), 1000))
def zstd(data): return zstandard.ZstdCompressor(write_checksum=True).compress(data)

EXTENSIONS = {'tar':bytes, 'tar.gz':gzip.compress, 'tgz':gzip_in_parts}
COMPRESSIONS = {'gzip':gzip.compress, 'zstd':zstd}
each_compression = pytest.mark.parametrize('kind', COMPRESSIONS)

def read_as_stream(path):
    "What `tar_samples` reads: samples, and failures"
    source,samples,failures = tar_samples(path),[],[]
    for part in source.stream(3):
        for name,raw in part:
            try:
                if isinstance(raw, Exception): raise raw
                loaded = source.load(raw)
                samples.append((loaded['bin'],loaded['cls']))
            except (OSError,ValueError,KeyError) as e: failures.append((name, str(e)))
    return samples,failures

def read_by_index(folder):
    "What `index_shards` reads: samples, and failures; another tar in the folder shows which fields there are"
    (folder/'z.tar').write_bytes(sample(5)+END)
    report = index_shards(folder, num_workers=1, progress=False, overwrite=True)
    store = ShardStore(folder, cache=str(folder/'../cache'))
    assert store.verify(num_workers=1).bad==0
    samples,lacking = store[:],[(store.key(i), 'no label') for i in range(len(store)) if 'cls' not in store[i]]
    got = [(bytes(o['bin']),o['cls']) for o in samples if 'cls' in o]
    assert got.pop()==expected(5)[0]
    return got,report.failures+[(f'a.tar: {key}', why) for key,why in lacking]

def write(folder, extension, data):
    "Writes a tar into a folder, compressed as its extension says"
    folder.mkdir(exist_ok=True)
    (folder/f'a.{extension}').write_bytes(EXTENSIONS[extension](data))
    return folder/f'a.{extension}'

def both(path): return read_as_stream(path),read_by_index(path.parent)

@pytest.mark.parametrize('name', UNUSUAL)
def test_both_readers_agree_on_unusual_tars(tmp_path, name):
    data,numbers,fails = UNUSUAL[name]
    for extension in 'tar',('tar.gz','tgz')[list(UNUSUAL).index(name)%2]:
        for samples,failures in both(write(tmp_path/extension, extension, data)):
            assert samples==expected(*numbers)
            assert bool(failures)==fails, failures
            assert all('a.' in where for where,_ in failures)
    if name=='a field twice':
        assert re.search('000.bin: this member is there twice.* at bytes 512 and 1,536 of the tar', str(failures))

def members_or_damage(file, contents):
    found = []
    try:
        for m in tar_members(file, contents): found.append((m.name, m.start, m.size, str(m.error), m.is_first))
    except DamagedTar: found.append('damaged')
    return found

def test_headers_alone_give_the_same_members(tmp_path):
    for name,(data,*_) in UNUSUAL.items():
        (tmp_path/'a.tar').write_bytes(data)
        with open(tmp_path/'a.tar', 'rb') as file: headers = members_or_damage(file, contents=False)
        assert headers==members_or_damage(io.BytesIO(data), contents=True), name

def test_a_sample_that_lacks_members_before_a_cut_is_not_indexed(tmp_path):
    path = write(tmp_path/'d', 'tar', UNUSUAL['cut between the members of a sample'][0])
    index_shards(path.parent, num_workers=1, progress=False)
    assert ShardStore(path.parent).keys(range(2))==['000','001'] and len(ShardStore(path.parent))==2

@pytest.mark.parametrize('kind', ['tar','tar.gz','cut.tar.gz'])
def test_of_a_tar_that_is_cut_off_both_read_what_is_complete(tmp_path, kind):
    "At any block, and within blocks; and where compressed data are cut off"
    ends = [len(b''.join(map(sample, range(k))))-BLOCK+1 for k in (1,2,3)]   # a label is one byte
    is_cut = kind=='cut.tar.gz'
    whole = gzip.compress(THREE+END, 1) if is_cut else THREE+END
    first,step = (20,len(whole)//8) if is_cut else (len(sample(0)),BLOCK)
    for k,cut in enumerate(range(first, len(whole), step)):
        data = whole[:cut+k%3]
        there = len(zlib.decompressobj(31).decompress(data) if is_cut else data)
        path = write(tmp_path/f'{cut}', 'tar.gz' if kind=='tar.gz' else 'tar', data)
        if is_cut: path = path.rename(path.with_suffix('.tar.gz'))
        for samples,failures in both(path):
            assert samples==expected(*range(sum(end<=there for end in ends)))
            assert bool(failures)==(there<=len(THREE) or there%BLOCK>0 or is_cut), cut

def test_of_a_damaged_tar_both_read_what_comes_before(tmp_path):
    "Tars have checksums of headers only, so contents are as they are there"
    ends = [len(b''.join(map(sample, range(k)))) for k in (1,2,3)]
    for at in range(3, len(THREE), 409):
        path = write(tmp_path/f'{at}', 'tar', flipped(THREE+END, at))
        before = sum(end<=at for end in ends)
        for samples,failures in both(path):
            assert samples[:before]==expected(*range(before)), at
            if not failures: assert len(samples)==3 and [label for _,label in samples]==[0,1,2], at
            else: assert samples==expected(*range(before)), at

@each_compression
def test_compression_is_recognised_by_content_and_parts_may_follow_each_other(tmp_path, kind):
    compress,data = COMPRESSIONS[kind],THREE+END
    (tmp_path/'a.tgz').write_bytes(compress(data[:700])+compress(data[700:])+(b'' if kind=='zstd' else bytes(100)))
    assert both(tmp_path/'a.tgz')==((expected(0,1,2),[]),(expected(0,1,2),[]))
    assert ShardStore(tmp_path).shards.compression(0)==kind

@pytest.mark.parametrize('kind,compress', [('xz',lzma.compress), ('bzip2',bz2.compress)])
def test_tars_that_are_slow_to_decompress_are_refused(tmp_path, kind, compress):
    (tmp_path/'a.tar').write_bytes(compress(THREE+END))
    message = f'a.tar: compressed with {kind}, .*: compress the tar with zstd'
    with pytest.raises(ValueError, match=message): read_as_stream(tmp_path/'a.tar')
    with pytest.raises(ValueError, match=message): index_shards(tmp_path, num_workers=1, progress=False)

@each_compression
def test_damaged_compressed_data_are_never_written(tmp_path, kind):
    "With flipped bits, the samples are right, or the whole tar is refused"
    path,whole = write(tmp_path/'d', 'tar.gz', b''),COMPRESSIONS[kind](THREE+END)
    for k,at in enumerate(range(0, len(whole), 7)):
        path.write_bytes(flipped(whole, at))
        try: samples,failures = read_as_stream(path)
        except DamagedTar as e: assert 'a.tar.gz: damaged compressed data' in str(e)
        else: assert failures or samples==expected(0,1,2)
        if k%20==3:
            samples,failures = read_by_index(path.parent)
            assert samples==expected(0,1,2) or (samples==[] and failures), at

def test_damage_in_the_checksum_of_compressed_data_is_named_and_nothing_is_committed(tmp_path):
    path,writer = write(tmp_path/'d', 'tar.gz', THREE+END),MemoryWriter()
    path.write_bytes(flipped(path.read_bytes(), -6))
    samples,failures = read_by_index(path.parent)
    assert samples==[] and 'damaged compressed data' in failures[0][1]
    with pytest.raises(DamagedTar, match='a.tar.gz: damaged compressed data.*incorrect data check'):
        ingest(tar_samples(path), writer, num_workers=1, progress=False)
    assert writer.store is None

@pytest.mark.parametrize('flags', [
    '--format=gnu','--format=pax --sparse-version=0.1','--format=pax --sparse-version=1.0'])
def test_sparse_files_are_failed_samples(tmp_path, flags):
    "As GNU tar writes them; their bytes are not stored in one place"
    if not shutil.which('tar'): pytest.skip('no tar')
    (tmp_path/'d').mkdir()
    for i in range(3):
        (tmp_path/f'00{i}.bin').write_bytes(content(i))
        (tmp_path/f'00{i}.cls').write_bytes(b'%d' % i)
    with (tmp_path/'001.bin').open('ab') as file: file.truncate(1<<20)
    files = [f'00{i}.{field}' for i in range(3) for field in ('bin','cls')]
    made = subprocess.run(['tar','cf','d/a.tar','--sparse',*flags.split(),*files], cwd=tmp_path, capture_output=True)
    if made.returncode: pytest.skip('no GNU tar')
    for samples,failures in both(tmp_path/'d/a.tar'):
        assert samples==expected(0,2) and len(failures)==1 and 'sparse' in failures[0][1]

def test_what_a_tar_claims_costs_no_memory(tmp_path):
    "Neither huge sizes, nor megabytes of zeros that are a few bytes"
    for k,name in enumerate(('a size of exabytes','a long name of exabytes','pax headers of 2 MB')):
        write(tmp_path/f'{k}', 'tar', UNUSUAL[name][0])
    write(tmp_path/'zeros', 'tar.gz', b''.join(member(f'{i}.bin', bytes(1<<20)) for i in range(30))+END)
    tracemalloc.start()
    for path in sorted(tmp_path.rglob('*.tar')):
        for contents in True,False:
            with open(path, 'rb') as file, pytest.raises(DamagedTar): list(tar_members(file, contents))
    assert tracemalloc.get_traced_memory()[1]<3_000_000
    report = index_shards(tmp_path, num_workers=1, progress=False)
    assert report.written==33 and tracemalloc.get_traced_memory()[1]<20_000_000
    tracemalloc.stop()

def test_a_tar_that_becomes_shorter_is_a_failed_sample(tmp_path):
    (tmp_path/'a.tar').write_bytes(THREE+END)
    source = tar_samples(tmp_path/'a.tar')
    part, = source.stream(10)
    (tmp_path/'a.tar').write_bytes(THREE[:len(sample(0))+BLOCK+10])
    assert source.load(part[0][1])['bin']==content(0)
    with pytest.raises(DamagedTar, match='a.tar: only 10 of .* bytes'): source.load(part[1][1])

def test_an_extension_that_cannot_name_a_field(tmp_path):
    "`index_shards` leaves it out, and says so; in `tar_samples` the sample fails, unless `fn` renames the field"
    options = dict(num_workers=1, progress=False)
    for k,extension in enumerate(('left image.png','a;b.txt','x.crc')):
        folder = tar(tmp_path/f'{k}/a.tar', [('0.txt', b'text'), (f'0.{extension}', b'text')]).parent
        report = index_shards(folder, **options)
        assert report.written==1 and any(repr(extension) in note and 'left out' in note for note in report.notes)
        assert ShardStore(folder).fields==['txt']
        with pytest.raises(IngestError, match='cannot name a field'):
            ingest(tar_samples(folder), MemoryWriter(), **options)
        def fn(o): return {'txt':o['txt'], 'b.txt':str(o[extension])}
        ingest(tar_samples(folder), writer:=MemoryWriter(), fn, **options)
        assert writer.store.fields==['txt','b.txt']

NO_SAMPLES = {
    'folder':FOLDER, 'folders':FOLDER*2, 'hidden':member('d/._0.bin', b'x'), 'no extension':member('README', b'x'),
    'all':FOLDER+member('README', b'x')+FOLDER, 'nothing':b''}

@pytest.mark.parametrize('kind', NO_SAMPLES)
def test_samples_of_joined_archives_stay_apart(tmp_path, kind):
    "Also if an archive begins with what belongs to no sample; a link at its end belongs to no sample of the next"
    def archive(i): return NO_SAMPLES[kind]+member('d/0.bin', content(i))+member('d/0.cls', b'%d' % (i%3))+END
    for extension in 'tar','tar.gz':
        for samples,failures in both(write(tmp_path/extension, extension, archive(0)+archive(1)+archive(2))):
            assert (samples,failures)==(expected(0,1,2),[])
    link = header('d/0.png', **TO_PASSWORDS)
    for samples,failures in both(write(tmp_path/'link', 'tar', sample(0)+link+END+archive(1))):
        assert samples==expected(0,1) and len(failures)==1 and 'a link' in failures[0][1]
