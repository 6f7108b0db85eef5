"Tars that others wrote: which are found, samples as in WebDataset, fields that differ, and files of others"
import gzip, itertools, os, shutil, sys, tarfile
from itertools import chain
from pathlib import Path

import braceexpand
import pytest
import webdataset as wds
import zstandard
from fsspec.implementations.local import LocalFileSystem
from hypothesis import HealthCheck, given, settings, strategies as st

from crashes import dies_at
from fastai_remote import (
    CorruptSample, IngestError, MissingSample, RemoteDataset, ShardStore, StoreExists, StoreNotFound, StoreUnavailable,
    UnknownField, UnsupportedFormat, index_shards, tar_samples, to_shards)
from fastai_remote.codec.fields import field_of
from fastai_remote.source.tars import expand_braces
from fastai_remote.testing import ManualClock
from fastai_remote.write.shards import ShardWriter
from shard_helpers import ONE, files, index, interrupted_after, items, put, tar

def samples(start, stop, folder=''):
    return [(f'{folder}{i:04}.{ext}', value) for i in range(start, stop)
            for ext,value in (('txt', b'text %d' % i), ('cls', b'%d' % (i%3)))]

def tars(folder, n, name='{}.tar'):
    "Writes `n` tars of five samples each"
    for k in range(n): tar(folder/name.format(k), samples(5*k, 5*k+5))

def texts(store): return store.get_many(range(len(store)), 'txt', decode=True)['txt']
def is_whole(store): return store.verify(num_workers=1).bad==0
def see(folder, tars=None):
    "The samples of an index, their keys, and its failures"
    store = ShardStore(folder, shards_url=tars)
    return store[:],store.keys(range(len(store))),store.manifest.failed,sorted(store.failures())
def interrupt_index(folder, n=99, **kwargs):
    "Indexes `n` tars, or all, and is interrupted before the commit"
    with pytest.raises(KeyboardInterrupt): index(folder, progress=interrupted_after(n), **kwargs)

# --- files of others are not changed

def test_files_of_others_are_neither_changed_nor_deleted(tmp_path):
    "An index of DALI, a manifest and labels of another tool, and files that are named like ours"
    d = tmp_path/'w'
    for k,ext in enumerate(('tar','tgz','tar.gz')):
        tar(d/f'a.{ext}', samples(10*k, 10*k+5), 'w' if ext=='tar' else 'w:gz')
    theirs = {
        'a.idx':b'v1.2 10\n', 'manifest.json':b'{"files": ["a.tar"]}', 'labels.json':b'[]', 'plan.json':b'{}',
        'index-failures.json':b'{}', 'x.tar.123.part':b'half', 'b.tar.fastai_remote':b'not an index'}
    for name,content in theirs.items(): (d/name).write_bytes(content)
    before = files(d)
    store,_ = index(d)
    after = files(d)
    assert {name:after[name] for name in before}==before
    assert all(name.startswith('.fastai_remote/') for name in after.keys()-before.keys())
    assert sorted(texts(store))==sorted(f'text {i}' for k in (0,10,20) for i in range(k, k+5)) and is_whole(store)
    ShardStore.delete(d)
    assert files(d)==before and not (d/'.fastai_remote').exists()

def test_delete_leaves_files_of_others_in_our_folders(tmp_path):
    "In a folder of our own shards, and in one for an index, by their content"
    (tmp_path/'own').mkdir()
    tar(tmp_path/'own/train.tar', samples(0, 1))
    for overwrite in False,True: put(tmp_path/'own', items('a'), overwrite=overwrite)
    tar(tmp_path/'w/a.tar', samples(0, 3))
    index(tmp_path/'w', tmp_path/'index')
    theirs = {
        'shard-000007.tar':b'theirs', 'shard-000007.idx':b'theirs', 'shard7-000000.tar':b'x',
        'notes-failures.json':b'x', 'a.tar.1.part':b'x', 'train.tar':b'a tar'}
    for folder in 'own','index':
        for name,content in theirs.items(): (tmp_path/folder/name).write_bytes(content)
        ShardStore.delete(tmp_path/folder)
        assert files(tmp_path/folder)==theirs

def test_a_folder_with_files_of_others_is_refused_before_anything_is_written(tmp_path):
    theirs = {'manifest.json':b'{"files": []}', 'labels.json':b'["cat"]', 'shard-000000.tar':b'theirs'}
    for name,content in theirs.items():
        d = tmp_path/name.partition('.')[0]
        d.mkdir()
        (d/name).write_bytes(content)
        for overwrite in False,True:
            with pytest.raises((StoreExists,UnsupportedFormat), match=f'{name}.*another folder'):
                to_shards([{'txt':'a'}], d, overwrite=overwrite, **ONE)
        assert files(d)=={name:content}
    tar(tmp_path/'w/a.tar', samples(0, 3))
    with pytest.raises(UnsupportedFormat, match='manifest.json.*another folder'):
        index(tmp_path/'w', tmp_path/'manifest')

def abandon_with_a_damaged_plan(folder):
    (folder/'.fastai_remote/.ingest/plan.json').write_text('{"n": 4')
    ShardStore.abandon(folder)

@pytest.mark.parametrize('end', [ShardStore.abandon, ShardStore.delete, abandon_with_a_damaged_plan, index])
def test_where_tars_are_indexed_nothing_else_is_written(tmp_path, end):
    "Also if the index is not finished: it can be abandoned, deleted, and finished, and no tar goes with it"
    tars(tmp_path, 3, 'shard-{:06}.tar')   # named like ours
    before = files(tmp_path)
    interrupt_index(tmp_path, 2, to=tmp_path if end==ShardStore.delete else None)
    with pytest.raises(StoreNotFound, match='not finished'): ShardStore(tmp_path)
    for overwrite in False,True:
        with pytest.raises(StoreExists, match='shards that others wrote'):
            put(tmp_path, items('a'), overwrite=overwrite)
    if end!=index: end(tmp_path)
    else:
        store,report = index(tmp_path)
        assert (report.written,report.resumed)==(15,10) and texts(store)==[f'text {i}' for i in range(15)]
        ours = ['manifest.json', *(f'{name}.fastai_remote' for name in before)]
        assert sorted(files(tmp_path))==sorted([*before, *(f'.fastai_remote/{name}' for name in ours)])
        with pytest.raises(StoreExists, match='shards that others wrote are indexed here; choose another folder'):
            put(tmp_path, items('a'), overwrite=True)
        ShardStore.delete(tmp_path)
    assert files(tmp_path)==before and not (tmp_path/'.fastai_remote/.ingest').exists()

def test_our_own_shards_need_no_index(tmp_path):
    put(tmp_path/'own', [{'txt':'a'}])
    for overwrite in (False,True):
        with pytest.raises(StoreExists, match='own: to_shards has written'): index(tmp_path/'own', overwrite=overwrite)
    assert texts(ShardStore(tmp_path/'own'))==['a']

# --- grouping as in WebDataset

PARTS = ['a','b','A','a.b','.a','._a','.','__x__','__x','_','a b','ü','','000','a-b','__MACOSX','..']
EXTENSIONS = [
    'jpg','JPG','left.jpg','txt','cls','json','','_a','a b','c:d','tar.gz','age.f4','x.crc','cls.txt','age.f4.json',
    'u1.json']

@st.composite
def odd_names(draw):
    folder = '/'.join(draw(st.lists(st.sampled_from(PARTS), max_size=2)))
    base,ext = draw(st.sampled_from(PARTS)),draw(st.sampled_from(EXTENSIONS))
    name = (f'{folder}/' if folder else '')+base+(f'.{ext}' if draw(st.booleans()) or ext else '')
    return name.strip('/') or 'a.txt'

def by_webdataset(path):
    "Samples of WebDataset, with repeated members where it has an error"
    found = wds.tariterators.tar_file_iterator(path.open('rb'))
    groups = wds.tariterators.group_by_keys({**member, '__url__':''} for member in found)
    def is_extension(name): return not name.startswith('__') or not name.endswith('__')
    return [(group['__key__'], {ext:value for ext,value in group.items() if is_extension(ext)}) for group in groups]

def is_kept(ext): return bool(ext) and not any(c in ext for c in ':#~@ ?;') and not ext.endswith('.crc')
def field_of_sample(ext, sample):
    return ext if field_of(ext)!=ext and field_of(ext) in sample else field_of(ext)

def raw(store, i):
    "Stored values of sample `i`, as bytes; labels and numbers as they are in the tar"
    def stored(field, value):
        if not store.manifest.fields[field]['dtype']: return value
        number = store.decode(i, field, value)
        return str(int(number) if isinstance(number, float) else number).encode()
    values = {f:store.get_many([i], f'{f}?')[f'{f}?'][0] for f in store.fields}
    return {f:stored(f, value) for f,value in values.items() if value is not None}

_count = itertools.count()

@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(odd_names(), min_size=1, max_size=8), st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_samples_are_those_of_webdataset(tmp_path, names, format):
    "Keys, extensions and bytes; or the report names what is left out"
    folder = tmp_path/f'{next(_count)}'
    contents = [(name, b'%d' % k) for k,name in enumerate(names)]
    tar(folder/'a.tar', contents, format=format)
    # WebDataset makes samples of hidden files in folders; here they are left out, and the report says so
    hidden = {name for name in names if (wds.tariterators.base_plus_ext(name)[0] or '').endswith('/')}
    reference = tar(folder/'reference', [o for o in contents if o[0] not in hidden], format=format)
    try: want = by_webdataset(reference)
    except ValueError as e: want = str(e)
    try: store,report = index(folder, max_failed=100)
    except IngestError as e:
        if isinstance(want, str): assert 'twice in one sample' in str(e), (names, want)
        else: assert not any(map(is_kept, chain(*(sample for _,sample in want)))), (names, want, e)
        return
    assert not hidden or any('hidden files' in note for note in report.notes) or all(n.startswith('__') for n in hidden)
    if isinstance(want, str):
        assert 'twice in one sample' in str(report.failures), (names, want, report)
        return
    left_out = [ext for _,sample in want for ext in sample if not is_kept(ext)]
    assert all(any(repr(ext) in note for note in report.notes) for ext in left_out), (names, report)
    named = [(key, {field_of_sample(ext, sample):value for ext,value in sample.items() if is_kept(ext)})
             for key,sample in want]
    assert named==[(store.key(i), raw(store, i)) for i in range(len(store))] and not report.failures, names

# --- samples with different fields

@pytest.fixture(scope='module')
def mixed(tmp_path_factory):
    "300 samples in two shards: each third has a `png` in place of its `jpg`, and some fields begin late"
    d = tmp_path_factory.mktemp('mixed')/'mixed'
    for shard in range(2):
        members = []
        for i in range(150):
            members.append((f'{shard}-{i:03}.{"png" if i%3==2 else "jpg"}', b'image %d %d' % (shard, i)))
            if i>=120:
                members += [(f'{shard}-{i:03}.late.txt', b'late %d' % i), (f'{shard}-{i:03}.late.f4', b'%d' % i)]
            if shard and i%2: members.append((f'{shard}-{i:03}.cls', b'%d' % (i%4)))
            if shard and i==149: members.append((f'{shard}-{i:03}.rare.json', b'{}'))
        tar(d/f'{shard}.tar', members)
    return index(d)

def test_every_field_that_occurs_is_recorded(mixed):
    "Also after the 100th sample of the first shard; labels that are integers are integers"
    store,report = mixed
    assert store.field_table.counts=={'jpg':200, 'png':100, 'late.txt':60, 'late.f4':60, 'cls':75, 'rare.json':1}
    assert store.vocab==[1,3] and store.class_counts()=={1:38, 3:37} and 'in 60 samples' in store._repr_html_()
    assert {"299 of 300 samples have no 'rare.json'", "100 of 300 samples have no 'jpg'"}<=report.notes.keys()
    assert [store.get_many([i], 'late.f4')['late.f4'].tolist() for i in (120,149,270)]==[[120.],[149.],[120.]]
    assert store.get_many([151,153], 'cls', decode=True)['cls']==[1,3]
    assert store.get_many([151,153], 'cls')['cls'].tolist()==[0,1]
    assert not is_whole(store)   # these images are none

def test_absent_fields(mixed):
    "An error, unless they are asked for with `?`; alternatives take the first field that a sample has"
    store,_ = mixed
    url = str(Path(store.shard_url(2)))
    for numbers,field,says in (
        ([0],'late.txt',"sample 0 is missing .field 'late.txt'"), ([0],'late.f4',"is missing .field 'late.f4'"),
        ([0,1,151],'cls',"2 of 3 samples missing, first 0 .field 'cls'. in 0.tar"),
        ([0,2],'png;late.txt',"first 0 .field 'png;late.txt'")):
        with pytest.raises(MissingSample, match=f'mixed: .*{says}'): store.get_many(numbers, field)
    got = store.get_many([0,2,151,149], ['jpg;png','late.txt?','late.f4?','cls?'])
    assert got=={'jpg;png':[b'image 0 0',b'image 0 2',b'image 1 1',b'image 0 149'], 'cls?':[None,None,0,None],
                 'late.txt?':[None,None,None,b'late 149'], 'late.f4?':[None,None,None,149.]}
    assert store.get_many([0,151], 'cls?', decode=True)=={'cls?':[None,1]}
    with pytest.raises(UnknownField, match="no field 'nothing.'; there are 'jpg', 'png'"):
        store.get_many([0], 'nothing?')
    tuples = RemoteDataset(store).to_tuple('__key__','jpg;png','cls?')
    assert tuples[151]==('1-001',b'image 1 1',1) and tuples[2]==('0-002',b'image 0 2',None)
    assert RemoteDataset(store)[2]=={'__key__':'0-002', '__url__':url, 'png':b'image 0 2'} and url.endswith('/0.tar')
    with pytest.raises(MissingSample, match="sample 2 has no 'late.txt;cls'"):
        RemoteDataset(store).to_tuple('late.txt;cls')[2]

def test_too_many_fields_are_an_error_that_explains(tmp_path):
    "As where the names of samples contain dots"
    photos = [(f'photo.{i}.txt', b'a') for i in range(300)]
    for first in [],samples(0, 101):
        tar(tmp_path/'a.tar', first+photos)
        message = "a.tar: more than 256 different fields, such as .*'.*txt'.*first dot"
        with pytest.raises(IngestError, match=message): index(tmp_path)

def test_fields_that_are_named_as_if_they_held_numbers_may_hold_text(tmp_path):
    "Only numbers that we write as JSON are numbers"
    for folder,found,want in (
        ('a', {'id':b'img', 'u1':b'\xff\xfe', 'index':b'7'}, {'id':'img', 'u1':b'\xff\xfe', 'index':7}),
        ('b', {'cls.json':b'{"a": 1}', 'id.json':b'[1]', 'y.f4.json':b'.5'},
              {'cls.json':{'a':1}, 'id.json':[1], 'y.f4':.5})):
        tar(tmp_path/folder/'a.tar', [(f'{i}.{ext}', content) for i in range(3) for ext,content in found.items()])
        store,report = index(tmp_path/folder)
        assert report.failed==0 and store[:]==[want]*3

def test_lists_of_labels_that_are_none_are_failed_samples(tmp_path):
    for bad in b'{',b'5',b'\xff',b'"abc"':
        tar(tmp_path/'a.tar', [('0.labels', b'["a"]'),('1.labels', bad),('2.labels', b'["b","c"]')])
        store,report = index(tmp_path, overwrite=True)
        assert (report.written,report.failed,store.manifest.vocab['labels'])==(2,1,['a','b','c'])
        assert store[:]==[{'labels':['a']},{'labels':['b','c']}]
        assert store.class_counts('labels')=={'a':1,'b':1,'c':1}

def test_failed_samples_do_not_make_labels_text(tmp_path):
    "A sample that fails, with a text for a label, where the field begins late or among the first samples"
    for broken in [('a.cls.txt', b'\xff')],[('a.cls.txt', b'x'), ('a.age.f4', b'x')]:
        tar(tmp_path/'late/a.tar', [(f'{i:03}.age.f4', b'1') for i in range(101)])
        tar(tmp_path/'late/b.tar', [*broken, ('b.cls', b'7')])
        tar(tmp_path/'late/c.tar', [('c.cls', b'8')])
        store,report = index(tmp_path/'late', overwrite=True)
        assert report.failed==1 and store.vocab==[7,8] and [store[i]['cls'] for i in (101,102)]==[7,8]
    for (field,bad),at in itertools.product((('cls', b'\xff'), ('labels', b'no list')), (0,2)):
        labels = [(f'{i}.kind.cls', b'%d' % (7+i)) for i in range(4)]
        labels[at] = (f'{at}.kind.cls.txt', b'x')
        others = [(f'{i}.{field}', bad if i==at else b'["3"]') for i in range(4)]
        tar(tmp_path/'first/a.tar', chain(*zip(labels, others)))
        store,report = index(tmp_path/'first', overwrite=True)
        assert report.failed==1 and [o['kind.cls'] for o in store[:]]==[7+i for i in range(4) if i!=at]

# --- keys

def test_keys_and_urls(tmp_path):
    "In any order, with repeats, of compressed shards, and of names that are long, or not UTF-8"
    long = 'x'*180
    tar(tmp_path/'a/b.tar', samples(0, 300, 'q/'))
    tar(tmp_path/'a.tgz', [(f'{long}/ü{i}.txt', b'a') for i in range(3)]+[('z\udcff.txt', b'b')], 'w:gz')
    store,_ = index(tmp_path)
    assert store.keys([303,4,303,0,17])==['q/0299','q/0000','q/0299',f'{long}/ü0','q/0013'] and store.key(3)=='z\udcff'
    assert store.shard_url(3)==str(tmp_path/'a.tgz') and store.shard_url(4)==str(tmp_path/'a/b.tar')
    with pytest.raises(IndexError): store.key(304)

def test_keys_take_little_space(tmp_path):
    tar(tmp_path/'a.tar', [(f'{i:09}.txt', b'a') for i in range(4000)])
    index(tmp_path)
    size = (tmp_path/'.fastai_remote/a.tar.fastai_remote').stat().st_size
    assert size<4000*(12+2.2)+1500   # offset, length and checksum take 12 bytes

# --- which tars, and again with more

def test_braces(tmp_path):
    "Not those of a name that is there; braces in braces are refused: some of their names would be there twice"
    (path := tmp_path/'a{0,1}.tar').touch()
    assert expand_braces(path)==path and expand_braces(str(path))==str(path)
    assert expand_braces('a-{08..11}.tar')==['a-08.tar','a-09.tar','a-10.tar','a-11.tar']
    assert expand_braces('a.tar')=='a.tar' and expand_braces(['{a,b}.tar','c.tar'])==['a.tar','b.tar','c.tar']
    assert expand_braces(Path('{a,b}'))==[Path('a'),Path('b')] and expand_braces('{{x}}')=='{{x}}'
    for text in '{000..099}','{0..12}','{9..11}','{1,2,3}x{5..7}','{3..1}','{a,b}/{0..1}.tar':
        assert expand_braces(text)==list(braceexpand.braceexpand(text))
    with pytest.raises(ValueError, match='more than a million'): expand_braces('{0..9999999}')
    for text in 'x{a,b{1,2}}.tar','{{a,b},c}','{x{y{a,b}z}}','{{0..1}}':
        for wrong in text,Path(text),['a.tar',text],f's3://user:secret@bucket/{text}':
            with pytest.raises(ValueError, match='braces in braces') as e: expand_braces(wrong)
            assert 'secret' not in str(e.value)
        with pytest.raises(ValueError, match='braces in braces'): index_shards(str(tmp_path/text))

def test_nested_folders_lists_and_braces(tmp_path):
    d = tmp_path/'w'
    for k in range(4): tar(d/f'train/{k:03}.tar', samples(10*k, 10*k+5))
    tar(d/'val/000.tar', samples(90, 93))
    store,_ = index(d, splits={'valid':'val/*', 'train':'train/*'})
    assert store.splits=={'valid':[0,3], 'train':[3,23]} and texts(store)[:4]==['text 90','text 91','text 92','text 0']
    two = [d/'train/001.tar',d/'train/002.tar']
    for k,(what,folder,starts) in enumerate((
        (str(d/'train/{001..002}.tar'),'train',(10,20)), (two,'train',(10,20)),
        (f'file://{d}/train/{{001,002}}.tar','train',(10,20)), (two[0],'train',(10,)),
        ([d/'train/003.tar',d/'val/000.tar'],'',(30,90)))):
        index_shards(what, tmp_path/f'{k}', **ONE)
        found = texts(ShardStore(tmp_path/f'{k}', shards_url=d/folder))
        assert found==[f'text {i}' for start in starts for i in range(start, min(start+5, 93))]
    with pytest.raises(FileNotFoundError, match='008.tar'): index_shards(d/'train/{008,009}.tar', tmp_path/'x', **ONE)
    with pytest.raises(ValueError, match='not in one place'):
        index_shards(['s3://a/b.tar','s3://c/d.tar'], tmp_path/'x', **ONE)
    assert sum(len(part) for part in tar_samples(str(d/'train/{000..003}.tar')).stream(64))==20

def test_splits_are_patterns(tmp_path):
    "One that fits nothing, or two that fit the same, are refused; the report counts tars that are in no split"
    d = tmp_path/'w'
    for name,n in (('train-0',3),('train-1',4),('val-0',2)):
        tar(d/f'{name}.tar', [(f'{name}{i}.txt', f'{name} {i}'.encode()) for i in range(n)])
    store,report = index(d, splits={'valid':'val-*', 'train':'train-*'})
    assert store.splits=={'valid':[0,2], 'train':[2,9]} and texts(store)[:3]==['val-0 0','val-0 1','train-0 0']
    assert not report.notes
    store,report = index(d, overwrite=True, splits={'train':'train-0*'})
    assert len(store)==3 and '2 tars match no pattern of splits=, and are left out' in report.notes
    with pytest.raises(FileNotFoundError, match=r"no tar is called 'x-\*'; there are train-0.tar"):
        index(d, overwrite=True, splits={'x':'x-*'})
    with pytest.raises(ValueError, match='a shard is in two splits'):
        index(d, overwrite=True, splits={'a':'train-*', 'b':'*-1*'})
    for splits in 'train',{'train':5},{'train':['a.tar']},['a*']:
        with pytest.raises(TypeError, match=r'splits is \{split: pattern of paths\}'): index(d, splits=splits)
    (tmp_path/'empty').mkdir()
    with pytest.raises(FileNotFoundError, match='no tars here'): index(tmp_path/'empty')

def test_tars_are_found_by_their_names_and_decompressed_by_their_content(tmp_path):
    "Also empty ones, and some with a label only; others' junk is no shard"
    d,data = tmp_path/'w',tar(tmp_path/'plain', samples(0, 40)).read_bytes()
    compressed = {'plain.tar':bytes, 'gz.tar':gzip.compress, 'zst.tgz':zstandard.compress,
                  'p.tar.gz':gzip.compress, 'p.tar.zst':zstandard.compress}
    tar(d/'c.tar', [])
    tar(d/'d.tar', [('20.cls', b'1')])
    for name,content in {'f.tar':b'', '._a.tar':b'\0\5\x16\7 what a Mac leaves', 'a.txt':b'no shard'}.items():
        (d/name).write_bytes(content)
    for name,compress in compressed.items(): (d/name).write_bytes(compress(data))
    store,report = index(d)
    table = store.shards
    found = [table.name(shard) for shard in range(len(table))]
    assert found==sorted(found) and report.failed==1   # the empty file
    assert dict(zip(found, table.n))=={**dict.fromkeys(compressed, 40), 'c.tar':0, 'd.tar':1, 'f.tar':0}
    want = [f'text {i}' for i in range(40)]*5
    assert store.get_many(range(1, len(store)), 'txt', decode=True, check=True)['txt']==want
    source = tar_samples([d/name for name in compressed])
    assert [source.load(raw)['txt'].decode() for part in source.stream(64) for _,raw in part]==want

def test_indexing_again_reads_new_shards_only(tmp_path):
    "What was read before is not read again, and counts as before: it could not be read any more"
    d = tmp_path/'w'
    def members(start, stop): return [
        (f'{i}.{ext}', content) for i in range(start, stop)
        for ext,content in (('txt',b'text %d' % i), ('cls',b'%d' % (i%5)), ('labels',b'["x%d"]' % (i%2)))]
    tar(d/'a.tar', members(0, 9)+[('9.cls', b'no')])
    tar(d/'c.tar', members(20, 23)+[('23.extra.txt', b'x')])
    first,_ = index(d)
    tar(d/'b.tar', members(10, 14))
    tar(d/'d/e.tar', members(40, 42)+[('42.cls', b'7'), ('42.new.txt', b'y')])
    kept = {name:(d/name).read_bytes() for name in ('a.tar','c.tar')}
    for name,content in kept.items():   # as long, of the same time, and nothing is there to read
        time = (d/name).stat().st_mtime_ns
        (d/name).write_bytes(bytes(len(content)))
        os.utime(d/name, ns=(time,time))
    store,_ = index(d)
    for name,content in kept.items(): (d/name).write_bytes(content)
    whole,_ = index(d, tmp_path/'anew')
    assert see(d)==see(tmp_path/'anew', d) and is_whole(store)
    for attribute in 'fields','vocab','counts','nbytes':
        assert getattr(store.manifest, attribute)==getattr(whole.manifest, attribute)
    with pytest.raises(StoreNotFound, match='replaced'): first.check_version()
    with pytest.raises(StoreExists, match='none is new.*overwrite=True'): index(d)
    (d/'a.tar').write_bytes(kept['a.tar']+bytes(1024))
    tar(d/'f.tar', members(60, 62))
    with pytest.raises(StoreExists, match='a.tar has .* bytes, and had'): index(d)
    (d/'a.tar').unlink()
    with pytest.raises(StoreExists, match='a.tar is indexed, and not among'): index(d)
    assert len(index(d, overwrite=True)[0])==len(store)-10+2

def test_a_tar_that_changes_before_an_interrupted_index_goes_on_is_noticed(tmp_path):
    "Whichever it is; `abandon` makes the index begin anew"
    for i in range(130): tar(tmp_path/f'w/{i:03}.tar', [('0.txt', b'a'*5)])
    interrupt_index(tmp_path/'w', 125)
    for changed,size in (1,5), (120,5), (120,20_000):
        d = shutil.copytree(tmp_path/'w', tmp_path/f'{changed} {size}')   # with its times
        os.utime(tar(d/f'{changed:03}.tar', [('0.txt', b'n'*size)]), (1,1))
        message = f'{changed:03}.tar has changed' if size==5 else 'unfinished ingest from another source'
        with pytest.raises(StoreExists, match=message): index(d)
    ShardStore.abandon(d)
    assert texts(index(d)[0])[changed]=='n'*size

def test_a_tar_that_has_changed_and_kept_its_time_is_found_by_its_checksums(tmp_path):
    "Labels are those of the index; `regressions/test_stale_tars.py` has tars with another time, or size"
    def members(word, label):
        return [o for i in range(9) for o in ((f'{i}.txt', b'%s %d' % (word,i)), (f'{i}.cls', label))]
    path = tar(tmp_path/'w/a.tar', members(b'number', b'1'))
    index(tmp_path/'w')
    time = path.stat().st_mtime_ns
    os.utime(tar(path, members(b'number', b'2')), ns=(time,time))
    report = ShardStore(tmp_path/'w').verify(num_workers=1)
    message = 'labels and numbers of the index, which may be others than in the shard'
    assert report.bad==1 and message in report.rest[0][1]
    os.utime(tar(path, members(b'member', b'1')), ns=(time,time))
    with pytest.raises(CorruptSample, match='sample 0'): ShardStore(tmp_path/'w').get_many(range(9), 'txt', check=True)
    path.unlink()
    with pytest.raises(MissingSample, match='shard a.tar is not there, with samples 0 to 8'):
        ShardStore(tmp_path/'w').get_many([8], 'txt')

def test_an_index_that_is_gone_or_damaged_is_named_when_tars_are_added(tmp_path):
    path = tmp_path/'.fastai_remote/1.tar.fastai_remote'
    tars(tmp_path, 2)
    index(tmp_path)
    tars(tmp_path, 3)
    for content in path.read_bytes()[:20],b'',None:
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(CorruptSample, match='1.tar.fastai_remote.*overwrite=True indexes all shards anew'):
            index(tmp_path)
    assert len(index(tmp_path, overwrite=True)[0])==15

def test_storages_that_tell_no_time_are_compared_by_size(tmp_path, monkeypatch):
    info = LocalFileSystem.info
    def without_time(self, path, **kwargs):
        return {key:value for key,value in info(self, path, **kwargs).items() if key not in ('mtime','created')}
    monkeypatch.setattr(LocalFileSystem, 'info', without_time)
    for k in 1,2:
        tars(tmp_path, k)
        assert len(index(tmp_path)[0])==5*k

def test_an_index_that_another_call_has_extended_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    begin = ShardWriter.begin
    tars(tmp_path, 2)
    index(tmp_path)
    tars(tmp_path, 3)
    def extend_first(self, *args, **kwargs):
        monkeypatch.undo()
        tars(tmp_path, 4)
        index(tmp_path)
        return begin(self, *args, **kwargs)
    monkeypatch.setattr(ShardWriter, 'begin', extend_first)
    with pytest.raises(StoreExists, match='another process has just changed this index; repeat the same call'):
        index(tmp_path)
    assert len(ShardStore(tmp_path))==20

@pytest.mark.slow
@pytest.mark.parametrize('overwrite', [True,False])
def test_an_interrupted_new_or_longer_index_leaves_the_dataset_as_it_was(tmp_path, overwrite):
    "Wherever the call dies: the whole old index is seen, or the new one, also by who opened it before"
    old = tmp_path/'old'
    tars(old, 2)
    index(old)
    tar(old/'2.tar', [*samples(5, 10), ('9x.txt', b'x'), ('9x.cls', b'\xff')])
    os.utime(old/'0.tar', (1,1))   # another time, which is a part of an index
    before,want = see(old),shutil.copytree(old, tmp_path/'want')
    index(want, overwrite=overwrite)
    after = see(want)
    for k in range(overwrite, 100, 2):
        d = shutil.copytree(old, tmp_path/f'{k}')
        store = ShardStore(d)
        died = dies_at(k, lambda: index(d, overwrite=overwrite), d)
        now = see(d)
        assert now in (before,after), k
        if now==before: assert texts(store)==[o['txt'] for o in before[0]]
        if now==before and k%4>1 and ShardStore.unfinished(d):
            ShardStore.abandon(d)
            left = set(files(d))-set(files(old))
            assert see(d)==before and all('/.ingest/' in name for name in left), k
        index(d, overwrite=overwrite or now==after)
        assert see(d)==after and len(files(d))==len(files(want)), k
        shutil.rmtree(d)
        if not died: break
    assert k>10

def test_an_index_leaves_those_of_datasets_in_subfolders(tmp_path):
    tar(tmp_path/'w/a.tar', samples(0, 5))
    for folder in 'index','index/second': index(tmp_path/'w', tmp_path/folder)
    put(tmp_path/'index/third', [{'txt':'x'}])
    index(tmp_path/'w', tmp_path/'index', overwrite=True)
    ShardStore.delete(tmp_path/'index')
    assert texts(ShardStore(tmp_path/'index/second', shards_url=tmp_path/'w'))[4]=='text 4'
    assert texts(ShardStore(tmp_path/'index/third'))==['x']

# --- what cannot be opened

@pytest.mark.parametrize('url,kind,text', [
    ('foo://bar/x', ValueError, 'foo://bar/x: Protocol not known: foo: want a path, or a URL'),
    ('github://a@/x', ValueError, "github://.*/x: KeyError 'password': the URL lacks a part"),
    ('http://127.0.0.1:1/x', StoreUnavailable, 'http://127.0.0.1:1/x: .*attempt'),
    ('ftp://127.0.0.1:1/x', StoreUnavailable, 'ftp://127.0.0.1:1/x: ConnectionRefusedError'),
    ('s3://bucket/x', StoreUnavailable, r"x: refused: .*credentials.*s3_options.*AWS_ACCESS_KEY_ID.*'anon'")])
def test_an_address_that_cannot_be_opened_is_named_with_the_cause(nobody, tmp_path, url, kind, text):
    calls = (
        lambda: ShardStore(url, timeout=5), lambda: index_shards(url, to=tmp_path/'to', timeout=5, **ONE),
        lambda: to_shards([{'txt':'a'}], url, timeout=5, **ONE))
    for call in calls[:3 if kind is ValueError else 2]:
        with ManualClock(), pytest.raises(kind, match=text): call()

def test_zstd_without_its_package_is_explained(tmp_path, monkeypatch):
    data = tar(tmp_path/'x', samples(0, 3)).read_bytes()
    (tmp_path/'a.tar.zst').write_bytes(zstandard.compress(data))
    index(tmp_path)
    monkeypatch.setitem(sys.modules, 'zstandard', None)
    message = r'zstd need the package zstandard: pip install fastai_remote\[zstd\]'
    for call in (lambda: index(tmp_path, overwrite=True), lambda: list(tar_samples(tmp_path/'a.tar.zst').stream(9)),
                 lambda: texts(ShardStore(tmp_path, cache=str(tmp_path/'cache')))):
        with pytest.raises(ImportError, match=message): call()
