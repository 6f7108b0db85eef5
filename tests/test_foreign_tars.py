"Tars that others wrote: grouping as in WebDataset, fields that differ, keys, and files that are not ours"
import bz2, gzip, io, itertools, lzma, os, shutil, sys, tarfile
from itertools import chain
from pathlib import Path

import pytest
import webdataset as wds
from hypothesis import HealthCheck, given, settings, strategies as st

from fastai_remote import (
    CorruptSample, IngestError, MissingSample, RemoteDataset, ShardStore, StoreExists, StoreNotFound, StoreUnavailable, UnknownField,
    UnsupportedFormat, index_shards, tar_samples, to_shards)
from fastai_remote.codec.webdataset import field_of, split_name
from fastai_remote.source.tars import expand_braces
from fastai_remote.store.shard_index import ShardManifest
from test_shard_kills import dies_at as dies_at_change

OPTIONS = dict(num_workers=1, progress=False)

def tar(path, members, mode='w', **kwargs):
    "Writes `(name, bytes)` pairs as a tar"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, **kwargs) as out:
        for name,content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    return path

def samples(start, stop, folder=''):
    return [(f'{folder}{i:04}.{ext}', value) for i in range(start, stop)
            for ext,value in (('txt', b'text %d' % i), ('cls', b'%d' % (i%3)))]

def index(folder, **kwargs):
    report = index_shards(folder, **{**OPTIONS, **kwargs})
    return ShardStore(kwargs.get('to') or folder, shards_url=folder if kwargs.get('to') else None),report

def files(folder): return {str(p.relative_to(folder)):p.read_bytes() for p in Path(folder).rglob('*') if p.is_file()}
def texts(store): return store.get_many(range(len(store)), 'txt', decode=True)['txt']

# --- files of others are not changed

def test_files_of_others_are_neither_changed_nor_deleted(tmp_path):
    "An index of DALI, a manifest and labels of another tool, and files that are named like ours"
    d = tmp_path/'w'
    for k,ext in enumerate(('tar','tgz','tar.gz')):
        tar(d/f'a.{ext}', samples(10*k, 10*k+5), 'w' if ext=='tar' else 'w:gz')
    theirs = {'a.idx':b'v1.2 10\n', 'manifest.json':b'{"files": ["a.tar"]}', 'labels.json':b'[]', 'index-failures.json':b'{}',
              'x.tar.123.part':b'half', 'b.tar.fastai_remote':b'not an index', 'plan.json':b'{}'}
    for name,content in theirs.items(): (d/name).write_bytes(content)
    before = files(d)
    store,_ = index(d)
    after = files(d)
    assert {name:after[name] for name in before}==before and all(name.startswith('.fastai_remote/') for name in after.keys()-before.keys())
    assert sorted(texts(store))==sorted(f'text {i}' for k in (0,10,20) for i in range(k, k+5)) and store.verify(num_workers=1).bad==0
    ShardStore.delete(d)
    assert files(d)==before and not (d/'.fastai_remote').exists()

def test_delete_leaves_files_of_others_in_our_folders(tmp_path):
    "In a folder of our own shards, and in one for an index, by their content"
    to_shards([{'txt':f'{i}', 'cls':'ab'[i%2]} for i in range(9)], tmp_path/'own', **OPTIONS)
    tar(tmp_path/'w/a.tar', samples(0, 3))
    index(tmp_path/'w', to=tmp_path/'index')
    theirs = {'shard-000007.tar':b'theirs', 'shard-000007.idx':b'theirs', 'shard7-000000.tar':b'x', 'notes-failures.json':b'x', 'a.tar.1.part':b'x'}
    for folder in ('own','index'):
        for name,content in theirs.items(): (tmp_path/folder/name).write_bytes(content)
        ShardStore.delete(tmp_path/folder)
        assert files(tmp_path/folder)==theirs

def test_a_folder_with_files_of_others_is_refused_before_anything_is_written(tmp_path):
    for name,content in (('manifest.json',b'{"files": []}'), ('labels.json',b'["cat"]'), ('shard-000000.tar',b'theirs')):
        d = tmp_path/name.partition('.')[0]
        d.mkdir()
        (d/name).write_bytes(content)
        with pytest.raises((StoreExists,UnsupportedFormat), match=f'{name}.*another folder'):
            to_shards([{'txt':'a'}], d, overwrite=True, **OPTIONS)
        assert files(d)=={name:content}
    tar(tmp_path/'w/a.tar', samples(0, 3))
    with pytest.raises(UnsupportedFormat, match='manifest.json.*another folder'): index(tmp_path/'w', to=tmp_path/'manifest')

def test_our_own_shards_need_no_index(tmp_path):
    to_shards([{'txt':'a'}], tmp_path/'own', **OPTIONS)
    for overwrite in (False,True):
        with pytest.raises(StoreExists, match='own: to_shards has written'): index(tmp_path/'own', overwrite=overwrite)
    assert texts(ShardStore(tmp_path/'own'))==['a']

# --- grouping as in WebDataset

PARTS = ['a','b','A','a.b','.a','._a','.','__x__','__x','_','a b','ü','','000','a-b','__MACOSX','..']
EXTENSIONS = ['jpg','JPG','left.jpg','txt','cls','json','','_a','a b','c:d','tar.gz','age.f4','x.crc','cls.txt','age.f4.json','u1.json']

@st.composite
def odd_names(draw):
    folder = '/'.join(draw(st.lists(st.sampled_from(PARTS), max_size=2)))
    base,ext = draw(st.sampled_from(PARTS)),draw(st.sampled_from(EXTENSIONS))
    name = (f'{folder}/' if folder else '')+base+(f'.{ext}' if draw(st.booleans()) or ext else '')
    return name.strip('/') or 'a.txt'

def by_webdataset(path):
    "Samples of WebDataset, with repeated members where it has an error"
    result = []
    for group in wds.tariterators.group_by_keys(({**member, '__url__':''} for member in wds.tariterators.tar_file_iterator(path.open('rb')))):
        result.append((group['__key__'], {ext:value for ext,value in group.items() if not ext.startswith('__') or not ext.endswith('__')}))
    return result

_count = itertools.count()

@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(odd_names(), min_size=1, max_size=8), st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_samples_are_those_of_webdataset(tmp_path, names, format):
    "Keys, extensions and bytes; or the report names what is left out"
    folder = tmp_path/f'{next(_count)}'
    contents = [(name, b'%d' % k) for k,name in enumerate(names)]
    tar(folder/'a.tar', contents, format=format)
    # of hidden files in folders, WebDataset makes samples of their own; here they are left out, and the report says so
    hidden = {name for name in names if (wds.tariterators.base_plus_ext(name)[0] or '').endswith('/')}
    try: want = by_webdataset(tar(folder/'reference', [o for o in contents if o[0] not in hidden], format=format))
    except ValueError as e: want = str(e)
    try: store,report = index(folder, max_failed=100)
    except IngestError as e:
        assert 'twice in one sample' in str(e) if isinstance(want, str) else not any(map(is_kept, chain(*(sample for _,sample in want)))), (names, want, e)
        return
    assert not hidden or any('hidden files' in note for note in report.notes) or all(name.startswith('__') for name in hidden)
    if isinstance(want, str):
        assert 'twice in one sample' in str(report.failures), (names, want, report)
        return
    left_out = [ext for _,sample in want for ext in sample if not is_kept(ext)]
    assert all(any(repr(ext) in note for note in report.notes) for ext in left_out), (names, report)
    got = [(store.key(i), {field:value if isinstance(value, bytes) else str(value).encode() for field,value in raw(store, i).items()}) for i in range(len(store))]
    named = [(key, {field_of_sample(ext, sample):value for ext,value in sample.items() if is_kept(ext)}) for key,sample in want]
    assert named==got and not report.failures, (names, report.failures)

def is_kept(ext): return bool(ext) and not any(c in ext for c in ':#~@ ?;') and not ext.endswith('.crc')
def field_of_sample(ext, sample):
    return ext if field_of(ext)!=ext and field_of(ext) in sample else field_of(ext)

def raw(store, i):
    "Stored values of sample `i`; labels and numbers as they are in the tar"
    values = store.get_many([i], [f'{f}?' for f in store.fields])
    decoded = {f:store.decode(i, f, values[f'{f}?'][0]) for f in store.fields if values[f'{f}?'][0] is not None and store.manifest.fields[f]['dtype']}
    result = {f:decoded.get(f, values[f'{f}?'][0]) for f in store.fields if values[f'{f}?'][0] is not None}
    return {f:int(v) if isinstance(v, float) else v for f,v in result.items()}

def test_names_by_webdatasets_rule():
    for folder in ('','a/','a.b/','./','/','__x__/'):
        for base in PARTS:
            for ext in EXTENSIONS:
                name = f'{folder}{base}.{ext}'
                key,extension = wds.tariterators.base_plus_ext(name)
                if key is not None and key.endswith('/'): key = extension = None
                got = split_name(name)
                assert got in ((key, extension and extension.lower()), (None,None)), name
                if got!=(key, extension and extension.lower()): assert name.startswith('__'), name

def test_macos_and_metadata_are_left_out_and_the_report_says_so(tmp_path):
    members = [o for i in range(4) for o in ((f'd/._{i}.txt', b'junk'), (f'd/{i}.txt', b'%d' % i), (f'd/{i}.cls', b'1'))]
    tar(tmp_path/'a.tar', [('._d', b'x'), ('__MACOSX/d/._0.txt', b'x'), ('__meta__', b'{}'), ('README', b'x'), ('.DS_Store', b'x'), *members])
    store,report = index(tmp_path)
    assert texts(store)==['0','1','2','3'] and store.fields==['txt','cls']
    assert sorted(report.notes.values())==[2,7] and store.keys(range(4))==['d/0','d/1','d/2','d/3']

def test_links_do_not_split_samples(tmp_path):
    "WebDataset passes over links; here the sample of a link has failed, and the others are whole"
    with tarfile.open(tmp_path/'a.tar', 'w') as out:
        for name in ('0.txt','x.lnk','0.cls','y.txt','1.txt','y.cls','1.cls'):
            info = tarfile.TarInfo(name)
            if name in ('x.lnk','y.txt'): info.type,info.linkname = tarfile.SYMTYPE,'/etc/passwd'
            else: info.size = 1
            out.addfile(info, io.BytesIO(b'1') if info.size else None)
    store,report = index(tmp_path)
    assert [(store.key(i), list(store[i])) for i in range(len(store))]==[('0',['txt','cls']), ('1',['txt']), ('y',['cls']), ('1',['cls'])]
    assert [name for name,_ in report.failures]==['a.tar: x','a.tar: y']

# --- samples with different fields

@pytest.fixture
def mixed(tmp_path):
    "300 samples in two shards: each third has a `png` in place of its `jpg`, and some fields begin late"
    d = tmp_path/'mixed'
    for shard in range(2):
        members = []
        for i in range(150):
            members.append((f'{shard}-{i:03}.{"png" if i%3==2 else "jpg"}', b'image %d %d' % (shard, i)))
            if i>=120: members += [(f'{shard}-{i:03}.late.txt', b'late %d' % i), (f'{shard}-{i:03}.late.f4', b'%d' % i)]
            if shard and i%2: members.append((f'{shard}-{i:03}.cls', b'%d' % (i%4)))
            if shard and i==149: members.append((f'{shard}-{i:03}.rare.json', b'{}'))
        tar(d/f'{shard}.tar', members)
    return d

def test_every_field_that_occurs_is_recorded(mixed):
    "Also after the 100th sample of the first shard; labels that are integers are integers"
    store,report = index(mixed)
    assert store.field_counts=={'jpg':200, 'png':100, 'late.txt':60, 'late.f4':60, 'cls':75, 'rare.json':1}
    assert store.vocab==[1,3] and store.class_counts()=={1:38, 3:37} and "299 of 300 samples have no 'rare.json'" in report.notes
    assert [store.get_many([i], 'late.f4')['late.f4'].tolist() for i in (120,149,270)]==[[120.],[149.],[120.]]
    assert store.get_many([151,153], 'cls', decode=True)['cls']==[1,3] and store.get_many([151,153], 'cls')['cls'].tolist()==[0,1]
    assert store.verify(num_workers=1).bad>0   # these images are none
    assert 'in 60 samples' in store._repr_html_()

def test_absent_fields(mixed):
    "An error, unless they are asked for with `?`; alternatives take the first field that a sample has"
    store,_ = index(mixed)
    for field in ('late.txt','late.f4','cls','png'):
        with pytest.raises(MissingSample, match=f"mixed: sample 0 is missing .field '{field}'"): store.get_many([0], field)
    with pytest.raises(MissingSample, match="mixed: 2 of 3 samples missing, first 0 .field 'cls'. in 0.tar"): store.get_many([0,1,151], 'cls')
    got = store.get_many([0,2,151,149], ['jpg;png','late.txt?','late.f4?','cls?'])
    assert got['jpg;png']==[b'image 0 0',b'image 0 2',b'image 1 1',b'image 0 149'] and got['late.txt?']==[None,None,None,b'late 149']
    assert got['late.f4?']==[None,None,None,149.] and got['cls?']==[None,None,0,None]
    assert store.get_many([0,151], 'cls?', decode=True)=={'cls?':[None,1]}
    with pytest.raises(MissingSample, match="first 0 .field 'png;late.txt'"): store.get_many([0,2], 'png;late.txt')
    with pytest.raises(UnknownField, match="no field 'nothing.'; there are 'jpg', 'png'"): store.get_many([0], 'nothing?')
    ds = RemoteDataset(store).to_tuple('__key__','jpg;png','cls?')
    assert ds[151]==('1-001',b'image 1 1',0) and ds[2]==('0-002',b'image 0 2',None)
    assert RemoteDataset(store)[2]=={'__key__':'0-002', '__url__':str(mixed/'0.tar'), 'png':b'image 0 2'}
    with pytest.raises(MissingSample, match="sample 2 has no 'late.txt;cls'"): RemoteDataset(store).to_tuple('late.txt;cls')[2]

def test_too_many_fields_are_an_error_that_explains(tmp_path):
    "As where the names of samples contain dots"
    tar(tmp_path/'a.tar', [(f'photo.{i}.txt', b'a') for i in range(300)])
    with pytest.raises(IngestError, match="a.tar: more than 256 different fields, such as .*'.*txt'.*first dot"): index(tmp_path)
    tar(tmp_path/'a.tar', samples(0, 101)+[(f'photo.{i}.txt', b'a') for i in range(300)])
    with pytest.raises(IngestError, match='a.tar: more than 256 different fields'): index(tmp_path)

def test_numbers_that_are_none_are_text(tmp_path):
    "Fields that are named as if they held numbers"
    tar(tmp_path/'a.tar', [o for i in range(3) for o in ((f'{i}.id', b'img-%d' % i), (f'{i}.u1', b'\xff\xfe%d' % i), (f'{i}.index', b'%d' % i))])
    store,report = index(tmp_path)
    assert report.failed==0 and [store[i] for i in range(3)]==[{'id':f'img-{i}', 'u1':b'\xff\xfe%d' % i, 'index':i} for i in range(3)]

@pytest.mark.parametrize('broken', [[('a.cls.txt', b'\xff')], [('a.cls.txt', b'x'), ('a.age.f4', b'x')]],
                         ids=['label','number'])
def test_failed_samples_do_not_make_labels_text(tmp_path, broken):
    "Labels of a field that begins late are integers, although a sample that failed has a text for a label"
    tar(tmp_path/'a.tar', [(f'{i:03}.age.f4', b'1') for i in range(101)])
    tar(tmp_path/'b.tar', [*broken, ('b.cls', b'7')])
    tar(tmp_path/'c.tar', [('c.cls', b'8')])
    store,report = index(tmp_path)
    assert report.failed==1 and store.vocab==[7,8] and [store[i]['cls'] for i in (101,102)]==[7,8]

@pytest.mark.parametrize('broken', [('cls', b'\xff'), ('labels', b'no list')], ids=['label','labels'])
@pytest.mark.parametrize('at', [0, 2])
def test_failed_samples_at_the_beginning_do_not_make_labels_text(tmp_path, broken, at):
    "A sample that fails, with a text for a label, is among the first ones, which decide what fields are"
    labels = [(f'{i}.kind.cls', b'%d' % (7+i)) for i in range(4)]
    labels[at] = (f'{at}.kind.cls.txt', b'x')
    tar(tmp_path/'a.tar', [o for i in range(4) for o in (labels[i], (f'{i}.{broken[0]}', broken[1] if i==at else b'["3"]'))])
    store,report = index(tmp_path)
    expected = [7+i for i in range(4) if i!=at]
    assert report.failed==1 and [store[i]['kind.cls'] for i in range(3)]==expected

# --- keys

def test_keys_and_urls(tmp_path):
    "In any order, with repeats, of compressed shards, and of names that are long, or not UTF-8"
    long = 'x'*180
    tar(tmp_path/'a/b.tar', samples(0, 300, 'q/'))
    tar(tmp_path/'a.tgz', [(f'{long}/ü{i}.txt', b'a') for i in range(3)]+[('z\udcff.txt', b'b')], 'w:gz')
    store,_ = index(tmp_path)
    assert store.keys([303,4,303,0,17])==['q/0299','q/0000','q/0299',f'{long}/ü0','q/0013']
    assert store.key(3)=='z\udcff' and store.shard_url(3)==str(tmp_path/'a.tgz') and store.shard_url(4)==str(tmp_path/'a/b.tar')
    with pytest.raises(IndexError): store.key(304)

def test_keys_take_little_space(tmp_path):
    tar(tmp_path/'a.tar', [(f'{i:09}.txt', b'a') for i in range(4000)])
    index(tmp_path)
    size = (tmp_path/'.fastai_remote/a.tar.fastai_remote').stat().st_size
    assert size<4000*(12+2.2)+1500   # offset, length and checksum take 12 bytes

# --- which shards

def test_braces():
    assert expand_braces('a-{08..11}.tar')==['a-08.tar','a-09.tar','a-10.tar','a-11.tar']
    assert expand_braces('{a,b}/{0..1}.tar')==['a/0.tar','a/1.tar','b/0.tar','b/1.tar'] and expand_braces('a.tar')=='a.tar'
    assert expand_braces(['{a,b}.tar','c.tar'])==['a.tar','b.tar','c.tar'] and expand_braces(Path('{a,b}'))==[Path('a'),Path('b')]
    import braceexpand
    for text in ('{000..099}','{0..12}','{9..11}','{1,2,3}x{5..7}','{3..1}'): assert expand_braces(text)==list(braceexpand.braceexpand(text))
    with pytest.raises(ValueError, match='more than a million'): expand_braces('{0..9999999}')

def test_nested_folders_lists_and_braces(tmp_path):
    d = tmp_path/'w'
    for k in range(4): tar(d/f'train/{k:03}.tar', samples(10*k, 10*k+5))
    tar(d/'val/000.tar', samples(90, 93))
    store,_ = index(d, splits={'valid':'val/*', 'train':'train/*'})
    assert store.splits=={'valid':[0,3], 'train':[3,23]} and texts(store)[:4]==['text 90','text 91','text 92','text 0']
    for what in (str(d/'train/{001..002}.tar'), [d/'train/001.tar',d/'train/002.tar'], f'file://{d}/train/{{001,002}}.tar'):
        index_shards(what, to=tmp_path/'index', overwrite=True, **OPTIONS)
        assert texts(ShardStore(tmp_path/'index', shards_url=d/'train'))==[f'text {i}' for k in (10,20) for i in range(k, k+5)]
    index_shards(d/'val/000.tar', to=tmp_path/'one', **OPTIONS)
    assert len(ShardStore(tmp_path/'one', shards_url=d/'val'))==3
    index_shards([d/'val/000.tar',d/'train/003.tar'], to=tmp_path/'two', **OPTIONS)
    assert len(ShardStore(tmp_path/'two', shards_url=d))==8
    with pytest.raises(FileNotFoundError, match='008.tar'): index_shards(d/'train/{008,009}.tar', to=tmp_path/'three', **OPTIONS)
    with pytest.raises(ValueError, match='not in one place'): index_shards(['s3://a/b.tar','s3://c/d.tar'], to=tmp_path/'x', **OPTIONS)
    assert sum(len(part) for part in tar_samples(str(d/'train/{000..003}.tar')).stream(64))==20

def zstd(data):
    zstandard = pytest.importorskip('zstandard')
    return zstandard.ZstdCompressor().compress(data)

COMPRESS = {'gz':gzip.compress, 'xz':lzma.compress, 'bz2':bz2.compress, 'zst':zstd, 'plain':bytes}

@pytest.mark.parametrize('kind', COMPRESS)
def test_compression_is_recognised_by_content(tmp_path, kind):
    "In any name; from two files, one after the other, as well"
    d = tmp_path/'w'
    data = tar(tmp_path/'plain', samples(0, 40)).read_bytes()
    d.mkdir()
    names = {f'a.tar.{kind}':COMPRESS[kind](data), 'b.tar':COMPRESS[kind](data[:5000])+COMPRESS[kind](data[5000:]), 'c.tgz':COMPRESS[kind](data)}
    for name,content in names.items(): (d/(name if kind!='plain' else name.replace('.plain',''))).write_bytes(content)
    report = index_shards(d, **OPTIONS)
    store = ShardStore(d, cache=str(tmp_path/'cache'))
    assert report.failed==0 and texts(store)==[f'text {i}' for i in range(40)]*3 and store.verify(num_workers=1).bad==0
    assert [store.shards.compression(u) for u in range(3)]==[{'gz':'gzip', 'bz2':'bzip2', 'zst':'zstd', 'plain':''}.get(kind, kind)]*3
    source = tar_samples(d)
    assert [source.load(raw)['txt'] for part in source.stream(64) for _,raw in part]==[b'text %d' % i for i in range(40)]*3

@pytest.mark.parametrize('kind', ['zst','xz'])
def test_damaged_compressed_data_is_left_out(tmp_path, kind):
    data = tar(tmp_path/'plain', samples(0, 40)).read_bytes()
    whole = COMPRESS[kind](data)
    (tmp_path/'w').mkdir()
    tar(tmp_path/'w/b.tar', samples(50, 53))
    for at in (len(whole)//2, len(whole)-20):
        content = bytearray(whole)
        content[at] ^= 0x55
        (tmp_path/f'w/a.tar.{kind}').write_bytes(content)
        store,report = index(tmp_path/'w', overwrite=True)
        assert len(store)==3 and 'a.tar' in report.failures[0][0] or len(store)==43

# --- again, with more shards

def test_indexing_again_reads_new_shards_only(tmp_path):
    "What was read before is not read again, and counts as before: it could not be read any more"
    d = tmp_path/'w'
    def members(a, b): return [o for i in range(a, b) for o in ((f'{i}.txt', b'text %d' % i), (f'{i}.cls', b'%d' % (i%5)), (f'{i}.labels', b'["x%d"]' % (i%2)))]
    tar(d/'a.tar', members(0, 9)+[('9.cls', b'no')])
    tar(d/'c.tar', members(20, 23)+[('23.extra.txt', b'x')])
    first,report = index(d)
    assert report.failed==0 or first.failures
    tar(d/'b.tar', members(10, 14))
    tar(d/'d/e.tar', members(40, 42)+[('42.cls', b'7'), ('42.new.txt', b'y')])
    kept = {name:(d/name).read_bytes() for name in ('a.tar','c.tar')}
    for name,content in kept.items():   # as long, of the same time, and nothing is there to read
        time = (d/name).stat().st_mtime_ns
        (d/name).write_bytes(bytes(len(content)))
        os.utime(d/name, ns=(time,time))
    store,report = index(d)
    for name,content in kept.items(): (d/name).write_bytes(content)
    whole,_ = index(d, to=tmp_path/'anew')
    assert len(store)==len(whole) and [store[i] for i in range(len(store))]==[whole[i] for i in range(len(whole))]
    a,b = store.manifest,whole.manifest
    assert (a.fields,a.vocab,a.counts,a.nbytes,a.failed,list(store.failures()))==(b.fields,b.vocab,b.counts,b.nbytes,b.failed,list(whole.failures()))
    assert store.verify(num_workers=1).bad==0 and store.keys(range(len(store)))==whole.keys(range(len(whole)))
    with pytest.raises(StoreNotFound, match='replaced'): first.check_not_replaced()
    with pytest.raises(StoreExists, match='none is new'): index(d)
    (d/'a.tar').write_bytes(kept['a.tar']+bytes(1024))
    tar(d/'f.tar', members(60, 62))
    with pytest.raises(StoreExists, match='a.tar has .* bytes, and had'): index(d)
    (d/'a.tar').unlink()
    with pytest.raises(StoreExists, match='a.tar is indexed, and not among'): index(d)
    assert len(index(d, overwrite=True)[0])==len(store)-10+2

@pytest.mark.parametrize('num_workers', [1,2])
@pytest.mark.parametrize('mode', ['w','w:gz'])
def test_a_label_that_has_changed_is_noticed_when_tars_are_added(tmp_path, num_workers, mode):
    "though the tar is as long as it was; a copy, whose time is another, is none"
    d,name = tmp_path/'w',f"a.tar{mode[2:] and '.gz'}"
    def write(labels):
        path = tar(d/name, [(f'{i}.cls', label) for i,label in enumerate(labels)], mode)
        size = path.stat().st_size
        with open(path, 'ab') as file: file.write(bytes(4096-size%4096))   # zeros are padding
    write([b'1',b'2'])
    index(d)
    first = tmp_path/'copy'
    shutil.copytree(d, first, copy_function=shutil.copyfile)
    for folder in d,first: tar(folder/'b.tar', [('5.cls', b'5')])
    store,_ = index(first, num_workers=num_workers)
    assert store.vocab==[1,2,5] and store.verify(num_workers=1).bad==0
    write([b'1',b'3'])
    for _ in range(2):
        with pytest.raises(StoreExists, match=f'{name} has changed since it was indexed: .* overwrite=True'): index(d, num_workers=num_workers)
    assert ShardStore(d).vocab==[1,2]
    assert index(d, overwrite=True, num_workers=num_workers)[0].vocab==[1,3,5]

@pytest.mark.parametrize('which', 'ab')
@pytest.mark.parametrize('damage', [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:20]), lambda p: p.write_bytes(b'')])
def test_an_index_that_is_gone_or_damaged_is_named_when_tars_are_added(tmp_path, which, damage):
    d = tmp_path/'w'
    for k,name in enumerate('ab'): tar(d/f'{name}.tar', samples(3*k, 3*k+3))
    index(d)
    damage(d/f'.fastai_remote/{which}.tar.fastai_remote')
    tar(d/'c.tar', samples(6, 9))
    with pytest.raises(CorruptSample, match=f'w.*{which}.tar.fastai_remote.*overwrite=True indexes all shards anew'): index(d)
    assert len(index(d, overwrite=True)[0])==9

@pytest.mark.parametrize('splits', ['train', {'train':5}, {'train':['a.tar']}, ['a*']], ids=str)
def test_splits_of_another_form_are_refused(tmp_path, splits):
    tar(tmp_path/'a.tar', samples(0, 3))
    with pytest.raises(TypeError, match=r'splits is \{split: pattern of paths\}'): index(tmp_path, splits=splits)

def test_the_report_counts_tars_that_are_in_no_split(tmp_path):
    for name in 'abc': tar(tmp_path/f'{name}.tar', samples(0, 3))
    assert '2 tars match no pattern of splits=, and are left out' in index(tmp_path, splits={'train':'a*'})[1].notes
    assert not index(tmp_path, splits={'train':'a*', 'valid':'[bc]*'}, overwrite=True)[1].notes

def test_storages_that_tell_no_time_are_compared_by_size(tmp_path, monkeypatch):
    from fsspec.implementations.local import LocalFileSystem
    info = LocalFileSystem.info
    monkeypatch.setattr(LocalFileSystem, 'info', lambda self, path, **kwargs: {key:value for key,value in info(self, path, **kwargs).items() if key not in ('mtime','created')})
    tar(tmp_path/'w/a.tar', samples(0, 5))
    index(tmp_path/'w')
    tar(tmp_path/'w/b.tar', samples(5, 9))
    assert len(index(tmp_path/'w')[0])==9

def test_verify_says_that_labels_are_those_of_the_index(tmp_path):
    tar(tmp_path/'a.tar', [('0.cls', b'1'),('1.cls', b'2')])
    index(tmp_path)
    tar(tmp_path/'a.tar', [('0.cls', b'1'),('1.cls', b'3')])
    report = ShardStore(tmp_path).verify(num_workers=1)
    assert report.bad==1 and 'labels and numbers of the index, which may be others than in the shard' in report.rest[0][1]

def test_an_interrupted_addition_leaves_the_index_as_it_was(tmp_path, monkeypatch):
    from fastai_remote.write.shards import ShardWriter
    tar(tmp_path/'w/a.tar', samples(0, 5))
    index(tmp_path/'w')
    tar(tmp_path/'w/b.tar', samples(5, 9))
    def stop(*args): raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(ShardWriter, 'commit', stop)
        index(tmp_path/'w')
    assert len(ShardStore(tmp_path/'w'))==5
    ShardStore.abandon(tmp_path/'w')
    assert sorted(files(tmp_path/'w'))==['.fastai_remote/a.tar.fastai_remote','.fastai_remote/manifest.json','a.tar','b.tar']
    assert len(index(tmp_path/'w')[0])==9

def see(folder):
    store = ShardStore(folder)
    return [store[i] for i in range(len(store))],store.manifest.failed,sorted(store.failures())

@pytest.mark.parametrize('to_abandon', [True,False])
def test_an_interrupted_new_index_leaves_the_dataset_as_it_was(tmp_path, to_abandon):
    "Wherever `overwrite=True` dies: the whole old index is to be seen, or the new one, also by who has opened it before"
    old = tmp_path/'old'
    for k in range(2): tar(old/f'{k}.tar', samples(5*k, 5*k+5))
    index(old)
    tar(old/'1.tar', [*samples(5, 10), ('9x.txt', b'x'), ('9x.cls', b'\xff')])   # and another time, which is a part of an index
    os.utime(old/'0.tar', (1,1))
    before,d = see(old),tmp_path/'want'
    shutil.copytree(old, d)
    index(d, overwrite=True)
    after,want = see(d),set(files(d))
    for k in range(100):
        d = tmp_path/f'{k}'
        shutil.copytree(old, d)
        store = ShardStore(d)
        died = dies_at_change(k, lambda: index(d, overwrite=True), str(d))
        now = see(d)
        assert now in (before,after), k
        if now==before: assert texts(store)==[o['txt'] for o in before[0]]
        if now==before and to_abandon:
            try: ShardStore.abandon(d)
            except StoreNotFound: pass
            new = set(files(d))-set(files(old))
            assert see(d)==before and all('/.ingest/' in name for name in new), k
        index(d, overwrite=True)
        assert see(d)==after and len(files(d))==len(want), k
        shutil.rmtree(d)
        if not died: break
    assert k>10

def test_a_new_index_is_extended_and_edited_like_the_first(tmp_path):
    for k in range(2): tar(tmp_path/f'{k}.tar', samples(5*k, 5*k+5))
    for overwrite in (False,True,True): index(tmp_path, overwrite=overwrite)
    assert ShardStore(tmp_path).wids_index()['shardlist'][1]['nsamples']==5
    tar(tmp_path/'2.tar', samples(10, 13))
    store,_ = index(tmp_path)
    assert texts(store)==[f'text {i}' for i in range(13)] and store.verify(num_workers=1).bad==0
    store = store.edit(drop=[0]).edit(drop=[11])
    assert texts(store)==[f'text {i}' for i in range(1, 12)] and store.verify(num_workers=1).bad==0
    tar(tmp_path/'3.tar', samples(13, 15))
    with pytest.raises(StoreExists, match='the dataset was edited'): index(tmp_path)
    store,_ = index(tmp_path, overwrite=True)
    assert texts(store)==[f'text {i}' for i in range(15)]
    assert len(files(tmp_path/'.fastai_remote'))==5   # one index a tar, and the manifest
    ShardStore.delete(tmp_path)
    assert sorted(files(tmp_path))==[f'{k}.tar' for k in range(4)] and not (tmp_path/'.fastai_remote').exists()

def test_failures_of_a_replaced_index_are_forgotten(tmp_path):
    tar(tmp_path/'a.tar', [*samples(0, 5), ('9.id', b'x')])
    tar(tmp_path/'b.tar', [('10.id', b'1')])
    store,_ = index(tmp_path, max_failed=9, splits={'b':'b*', 'a':'a*'})
    assert len(list(store.failures()))==1
    tar(tmp_path/'a.tar', samples(0, 5))
    assert list(index(tmp_path, overwrite=True)[0].failures())==[] and not list(tmp_path.glob('.fastai_remote/*failures*'))

def test_delete_removes_what_an_unfinished_addition_has_written(tmp_path, monkeypatch):
    from fastai_remote.write.shards import ShardWriter
    tar(tmp_path/'a.tar', samples(0, 5))
    index(tmp_path)
    tar(tmp_path/'b.tar', samples(5, 9))
    def stop(*args): raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(ShardWriter, 'commit', stop)
        index(tmp_path)
    ShardStore.delete(tmp_path)
    assert sorted(files(tmp_path))==['a.tar','b.tar'] and not (tmp_path/'.fastai_remote').exists()

def test_an_index_that_an_earlier_version_has_begun_is_finished(tmp_path, monkeypatch):
    "Its records do not tell which version has written an index"
    from fastai_remote.write.shard_files import seal_json, unseal_json
    from fastai_remote.write.shards import ShardWriter
    for k in range(2): tar(tmp_path/f'{k}.tar', samples(5*k, 5*k+5))
    def stop(*args): raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(ShardWriter, 'commit', stop)
        index(tmp_path)
    for path in tmp_path.glob('.fastai_remote/.ingest/chunk-*.json'):
        record = unseal_json(path.read_bytes())
        for row in record['shards']: del row[8:]
        path.write_bytes(seal_json(record))
    store,report = index(tmp_path)
    assert report.written==10 and texts(store)==[f'text {i}' for i in range(10)] and store.verify(num_workers=1).bad==0

@pytest.mark.parametrize('is_finished', [True,False])
def test_delete_leaves_tars_that_are_named_like_ours_beside_their_index(tmp_path, monkeypatch, is_finished):
    from fastai_remote.write.shards import ShardWriter
    tar(tmp_path/'shard-000000.tar', samples(0, 5))
    before = files(tmp_path)
    def stop(*args): raise KeyboardInterrupt
    with monkeypatch.context() as m:
        if not is_finished: m.setattr(ShardWriter, 'commit', stop)
        try: index(tmp_path, to=tmp_path)
        except KeyboardInterrupt: assert not is_finished
    ShardStore.delete(tmp_path)
    assert files(tmp_path)==before

def test_an_index_leaves_those_of_datasets_in_subfolders(tmp_path):
    tar(tmp_path/'w/a.tar', samples(0, 5))
    index(tmp_path/'w', to=tmp_path/'index')
    index(tmp_path/'w', to=tmp_path/'index/second')
    to_shards([{'txt':'x'}], tmp_path/'index/third', **OPTIONS)
    index(tmp_path/'w', to=tmp_path/'index', overwrite=True)
    ShardStore.delete(tmp_path/'index')
    assert texts(ShardStore(tmp_path/'index/second', shards_url=tmp_path/'w'))[4]=='text 4' and texts(ShardStore(tmp_path/'index/third'))==['x']

def test_an_index_of_an_earlier_version_can_be_read_and_replaced(tmp_path):
    "Beside the tars, under the name that DALI uses"
    data = Path(__file__).parent/'data/shards-v2-index'
    shutil.copytree(data, tmp_path/'w')
    store = ShardStore(tmp_path/'w')
    assert [store[i] for i in range(len(store))]==[{'txt':f'text {i}', 'cls':f'{i%3}' and i%3} for i in range(6)]
    with pytest.raises(UnknownField, match='keys of samples are not stored'): store.keys([0])
    tars = {name:content for name,content in files(tmp_path/'w').items() if name.endswith('.tar')}
    with pytest.raises(StoreExists, match='an index of an earlier version is there; overwrite=True'): index(tmp_path/'w')
    store,_ = index(tmp_path/'w', overwrite=True)
    assert store.key(5)=='0005' and sorted(files(tmp_path/'w'))==['.fastai_remote/a.tar.fastai_remote','.fastai_remote/b.tar.fastai_remote','.fastai_remote/manifest.json',*sorted(tars)]

# --- addresses that cannot be opened

@pytest.mark.parametrize('url,kind,text', [
    ('foo://bar/x', ValueError, 'foo://bar/x: Protocol not known: foo: want a path, or a URL'),
    ('github://a@/x', ValueError, "github://.*/x: KeyError 'password': the URL lacks a part"),
    ('http://127.0.0.1:1/x', StoreUnavailable, 'http://127.0.0.1:1/x: .*attempt'),
    ('ftp://127.0.0.1:1/x', StoreUnavailable, 'ftp://127.0.0.1:1/x: ConnectionRefusedError')])
def test_an_address_that_cannot_be_opened_is_named_with_the_cause(tmp_path, url, kind, text):
    calls = (lambda: ShardStore(url, timeout=.3), lambda: index_shards(url, to=tmp_path/'to', timeout=.3, **OPTIONS),
             lambda: to_shards([{'txt':'a'}], url, timeout=.3, **OPTIONS))
    for call in calls[:3 if kind is ValueError else 2]:
        with pytest.raises(kind, match=text): call()

def test_missing_credentials_are_explained(tmp_path, monkeypatch):
    pytest.importorskip('s3fs')
    for name in list(os.environ):
        if name.startswith('AWS_'): monkeypatch.delenv(name)
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setenv('AWS_EC2_METADATA_DISABLED', 'true')
    with pytest.raises(StoreUnavailable, match=r"s3://bucket/x: refused: .*credentials.*s3_options.*AWS_ACCESS_KEY_ID.*'anon'"):
        ShardStore('s3://bucket/x', timeout=5)

def test_zstd_without_its_package_is_explained(tmp_path, monkeypatch):
    (tmp_path/'a.tar.zst').write_bytes(zstd(tar(tmp_path/'x', samples(0, 3)).read_bytes()))
    index(tmp_path)
    monkeypatch.setitem(sys.modules, 'zstandard', None)
    message = r'zstd need the package zstandard: pip install fastai_remote\[zstd\]'
    with pytest.raises(ImportError, match=message): index(tmp_path, overwrite=True)
    with pytest.raises(ImportError, match=message): list(tar_samples(tmp_path/'a.tar.zst').stream(9))
    with pytest.raises(ImportError, match=message): texts(ShardStore(tmp_path, cache=str(tmp_path/'cache')))

def test_json_of_others_stays_json(tmp_path):
    "Only numbers that we write as JSON are numbers"
    tar(tmp_path/'a.tar', [o for i in range(3) for o in ((f'{i}.cls.json', b'{"a": 1}'), (f'{i}.id.json', b'[1]'), (f'{i}.y.f4.json', b'.5'))])
    store,_ = index(tmp_path)
    assert store[1]=={'cls.json':{'a':1}, 'id.json':[1], 'y.f4':.5}

@pytest.mark.parametrize('text', ['x{a,b{1,2}}.tar', '{a,{0..3}}', '{{a,b},c}', '{x{y{a,b}z}}', '{{0..1}}'])
def test_braces_in_braces_are_refused(tmp_path, text):
    "Some of their names would be there twice"
    for names in text,Path(text),['a.tar',text]:
        with pytest.raises(ValueError, match=r'braces in braces'): expand_braces(names)
    with pytest.raises(ValueError, match=r'braces in braces'): index_shards(str(tmp_path/text))
    with pytest.raises(ValueError) as e: expand_braces(f's3://user:secret@bucket/{text}')
    assert 'secret' not in str(e.value)
    assert expand_braces('{{x}}')=='{{x}}' and expand_braces('a{b}{0..1}')==['a{b}0','a{b}1']
