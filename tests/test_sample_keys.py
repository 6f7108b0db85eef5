"Samples that lack fields in training, restricted epochs, and the keys of samples in what we write"
import json, os, pickle, subprocess, tracemalloc

import numpy as np
import pytest
import torch
import webdataset as wds
from fastai.vision.all import DataLoaders

from inputs import encoded, raw_samples, write_tar
from fastai_remote import (
    IngestError, MissingSample, RandomStoreSplitter, RedisBlock, RedisStore, RemoteDataset, ShardStore,
    StoreExists, UnknownField, get_remote_items, index_shards, tar_samples, to_redis, to_shards)
from fastai_remote.ingest.copy import copy_store
from fastai_remote.load.items import SampleSelection

OPTIONS = dict(num_workers=1, progress=False)
ORDERED = dict(OPTIONS, shuffle=False)

def image(i, kind='JPEG'): return encoded(np.full((8,8,3), i%256), kind)
def urls(folder): return [str(path) for path in sorted(folder.glob('*.tar'))]
def read(folder): return wds.WebDataset(urls(folder), shardshuffle=False)

@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    "60 images in three shards, one in three a PNG; the shard `test` has no labels, and one in four has a text"
    folder,splits = tmp_path_factory.mktemp('photos'),('train','valid','test')
    for shard,split in enumerate(splits):
        members = []
        for i in range(20*shard, 20*shard+20):
            members.append((f'{i:03}.{"jpg" if i%3 else "png"}', image(i, 'JPEG' if i%3 else 'PNG')))
            if split!='test': members.append((f'{i:03}.cls', b'%d'%(i%2)))
            if i%4==0: members.append((f'{i:03}.txt', b'text %d'%i))
        write_tar(folder/f'{split}.tar', members)
    index_shards(folder, splits={split:f'{split}.tar' for split in splits}, **OPTIONS)
    return ShardStore(folder)

# --- training

def test_an_epoch_of_samples_that_have_a_field(photos):
    "Alternatives are one input, and splits are those of the samples that are left"
    assert photos.field_table.default=='png;jpg' and photos.field_table.counts=={'png':20, 'cls':40, 'txt':15, 'jpg':40}
    with pytest.raises(MissingSample, match="first .*having='cls' restricts"):
        list(DataLoaders.from_store(photos, bs=60, num_workers=0, splitter=RandomStoreSplitter(.01)).train)
    dls = DataLoaders.from_store(photos, having='cls', bs=8, num_workers=0)
    assert (len(dls.train_ds),len(dls.valid_ds))==(20,20)
    xb,yb = map(torch.cat, zip(*dls.valid))
    pixels = xb.mean((1,2,3)).cpu()*255
    assert yb.tolist()==[i%2 for i in range(20, 40)] and all(abs(p-i)<3 for p,i in zip(pixels, range(20, 40)))
    options = dict(splitter=RandomStoreSplitter(.2), bs=3, num_workers=0)
    dls = DataLoaders.from_store(photos, x='jpg;png', having=['txt','cls'], **options)
    assert sorted(photos.key(i) for dl in dls for i in dl.items)==[f'{i:03}' for i in range(0, 40, 4)]
    assert sum(len(y) for dl in dls for _,y in dl)>=8
    with pytest.raises(ValueError, match="leave out the .*having='txt'"): RedisBlock('txt?')
    with pytest.raises(UnknownField, match="no field 'x'"): get_remote_items(photos, having='x')
    with pytest.raises(ValueError, match='alternatives of different kinds .jpg, txt.'): RedisBlock(photos, 'jpg;txt')

def test_several_fields_are_combined_where_one_is_in_all_samples(tmp_path):
    "The parts in which a store says which samples have a field may differ from field to field"
    def fields(i): return ['jpg', *(['txt'] if i%3 else []), *(['png'] if i<10 else [])]
    for shard in range(3):
        numbers = range(20*shard, min(20*shard+20, 50))
        write_tar(tmp_path/f'{shard}.tar', [(f'{i:03}.{field}', image(i)) for i in numbers for field in fields(i)])
    index_shards(tmp_path, **OPTIONS)
    store = ShardStore(tmp_path)
    assert [*get_remote_items(store, having=['jpg;gif','txt'])]==[i for i in range(50) if i%3]
    assert [*get_remote_items(store, having=['jpg;png','txt','png'])]==[i for i in range(10) if i%3]

def test_items_of_a_selection(photos):
    items = get_remote_items(photos, having='txt')
    assert [*items]==list(range(0, 60, 4)) and pickle.loads(pickle.dumps(items))[4]==16
    assert items.is_complete and not items[2:].is_complete
    assert items.shard_sizes.tolist()==[5,5,5] and items[3:9].shard_sizes.tolist()==[2,4,0]
    assert [key for key, in RemoteDataset(photos).to_tuple('__key__')]==[f'{i:03}' for i in range(60)]

def test_a_selection_is_a_bit_per_sample():
    flags = np.random.default_rng(0).random(100_003)<.3
    selection,want = SampleSelection(np.split(flags, [1,9,5000,5000,70_000])),np.flatnonzero(flags)
    assert len(selection)==len(want) and selection.n==len(flags)
    assert (selection[np.arange(len(want))]==want).all() and selection[0]==want[0]
    at = np.array([0,1,2047,2048,2049,70_000,100_003])
    assert selection.before(at).tolist()==[int(flags[:k].sum()) for k in at]
    tracemalloc.start()
    selection = SampleSelection(np.ones(1<<16, bool) for _ in range(160))   # ten million
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(selection)==160<<16 and size<(160<<16)/8*1.2

# --- keys of what we write

def test_samples_keep_their_key(tmp_path):
    "From tars to shards and to other shards; WebDataset reads the same samples from them"
    members = [(f'd/{i:03}x.{f}', value%i) for i in range(40) for f,value in (('txt',b'text %d'), ('age.f4',b'%d.5'))]
    want = {f'd/{i:03}x':f'text {i}' for i in range(40)}
    to_shards(tar_samples(write_tar(tmp_path/'w/a.tar', members)), tmp_path/'a', **OPTIONS)
    ShardStore(tmp_path/'a').copy(tmp_path/'b', **OPTIONS)
    dicts = [{'__key__':key, '__url__':'x', '__local_path__':'y', 'txt':text} for key,text in want.items()]
    to_shards(dicts, tmp_path/'c', **OPTIONS)
    for name in 'abc':
        store = ShardStore(tmp_path/name)
        assert {store.key(i):store[i]['txt'] for i in range(40)}==want and store.shard_url(7)==urls(tmp_path/name)[0]
        samples = list(read(tmp_path/name).decode())
        assert {o['__key__']:o['txt'] for o in samples}==want and len(samples)==40
        assert all(o['age.f4.json']==int(o['txt'][5:])+.5 for o in samples if name!='c')

def test_keys_that_webdataset_would_not_read_are_failed_samples_or_become_others(tmp_path):
    bad = ['a.b','a/.b','__x__/a',7]
    changed = {'../a':'a', '/b':'b', 'a//b':'a/b', 'a\nb':'a_b', 'a\0b':'a_b', 'x'*1001:'x'*1000,
        'a\\c':'a_c', '\udcff':'%FF', '../../b/c':'b/c'}
    good = ['a/d','a.b/c','ü','a b','folder/'*40+'ü'*10, 'same']   # also beyond the 100 characters of a header
    samples = [{'__key__':key, 'txt':'x', 'json':[1]} for key in [*bad, *changed, *good, 'same']]
    report = to_shards(samples, tmp_path/'a', max_failed=99, **ORDERED)
    store = ShardStore(tmp_path/'a')
    want = [*list(changed.values())[:4], list(changed.values())[4]+f'-{len(bad)+4}', *list(changed.values())[5:], *good]
    want.append(f'same-{len(samples)-1}')
    assert report.failed==len(bad) and store.keys(range(len(store)))==want
    assert all('__key__' in why for _,why in report.failures) and store.verify(num_workers=1).bad==0
    assert [o['__key__'] for o in read(tmp_path/'a')]==want and any('keys of samples' in note for note in report.notes)

NAMES = {
    'as `tar -cf x.tar .` makes them':'./{}.txt', 'no UTF-8':os.fsdecode(b'caf\xe9/\xff')+'{}.txt',
    'one directory after the other':'a//{}/./b.txt', 'line breaks and backslashes':'a\nb\\{}.txt',
    'absolute':'/data/{}.txt', 'long':'x'*3000+'{}.txt'}

def texts(store): return sorted(store.get_many(range(len(store)), 'txt', decode=True)['txt'])

def test_samples_of_tars_with_any_names_are_copied_and_written(tmp_path, server):
    members = [(name.format(i), f'{k} {i}'.encode()) for k,name in enumerate(NAMES.values()) for i in range(9)]
    tar = write_tar(tmp_path/'tars/a.tar', members)
    index_shards(tmp_path/'tars', **OPTIONS)
    source = ShardStore(tmp_path/'tars')
    reports = [copy_store(source, tmp_path/'copy', **OPTIONS), to_shards(tar_samples(tar), tmp_path/'d', **OPTIONS),
               to_redis(tar_samples(tar), server.url, 'd', **OPTIONS)]
    for report in reports: assert report.failed==0 and texts(report.store)==texts(source)
    assert any('54 keys of samples were changed' in remark for remark in repr(reports[0]).splitlines())
    assert len(raw_samples(tar_samples(urls(tmp_path/'copy'))))==54

def test_keys_that_start_again_in_each_tar_do_not_let_neighbours_fail(tmp_path):
    members = [(f'{i:04}.txt', b'text') for i in range(2)]
    tars = [write_tar(tmp_path/f'{k:03}.tar', members) for k in range(200)]
    report = to_shards(tar_samples(tars), tmp_path/'d', **OPTIONS)
    keys = report.store.keys(range(400))
    assert report.failed==0 and len(texts(report.store))==400 and all(a!=b for a,b in zip(keys, keys[1:]))
    assert sum(key in ('0000','0001') for key in keys)+sum('-' in key for key in keys)==400

def test_keys_in_redis(tmp_path, server):
    "The field `key.txt`, if it is asked for, or if samples have a `__key__` of their own"
    path = write_tar(tmp_path/'a.tar', [(f'k{i}.txt', b'%d'%i) for i in range(5)])
    own = [{'__key__':f'k{i}', 'txt':f'{i}', '__url__':''} for i in range(5)]
    for name,source in ('asked',tar_samples(path, key=True)), ('default',tar_samples(path)), ('own',own):
        to_redis(source, server.url, name, **ORDERED)
        store = RedisStore(server.url, name)
        with pytest.raises(UnknownField, match='not in shards'): store.shard_url(0)
        if name=='default':
            assert store.fields==['txt'] and RemoteDataset(store)[3]['__key__']=='000000003'
            match = 'default: the keys of samples are not stored.*tar_samples.files, key=True'
            with pytest.raises(UnknownField, match=match): store.key(0)
        else:
            assert store.fields==['txt','key.txt'] and store.keys([4,0])==['k4','k0'] and store.key(2)=='k2'
            assert RemoteDataset(store)[3]['__key__']=='k3'

# --- other tools read what we write

def test_other_tools_read_our_shards(tmp_path):
    """Names with splits, labels.json, numbers as JSON: WebDataset and `tar`

    Labels are numbers where the vocabulary was known, and text otherwise."""
    samples = [{'png':np.full((8,8,3), i, np.uint8), 'cls':i%2, 'kind.cls':'ab'[i%2], 'age.f4':i/8, 'n.u1':i, 'id':-i,
                'caption.txt':f'Ünï {i}\n', 'json':{'k':[i,None]}, 'bin':bytes(range(i))} for i in range(20)]
    splits = {'train':samples[:12], 'odd name!':samples[12:15], 'valid':samples[15:]}
    to_shards(splits, tmp_path/'d', vocab=['cat','dog'], maxcount=6, **ORDERED)
    names = [path.name.rsplit('-', 1)[0] for path in sorted((tmp_path/'d').glob('*.tar'))]
    assert names.count('shard-train')==2 and 'shard-valid' in names
    labels = json.loads((tmp_path/'d/labels.json').read_text())
    assert labels=={'__kind__':'fastai_remote labels', 'cls':['cat','dog'], 'kind.cls':['a','b']}
    store,train = ShardStore(tmp_path/'d'),[url for url in urls(tmp_path/'d') if '-train-' in url]
    for i,o in enumerate(wds.WebDataset(train, shardshuffle=False).decode('pil')):
        assert np.array_equal(o.pop('png'), samples[i]['png']) and {f:v for f,v in o.items() if f[0]!='_'}=={
            'cls':i%2, 'kind.cls.txt':'ab'[i%2], 'age.f4.json':i/8, 'n.u1.json':i, 'id':-i, 'caption.txt':f'Ünï {i}\n',
            'json':{'k':[i,None]}, 'bin':bytes(range(i))}
        assert store[i]['cls']==['cat','dog'][i%2]
    assert i==11
    listed = subprocess.run(['tar','tf',train[0]], capture_output=True, text=True, check=True).stdout.split()
    assert listed[:6]==[f'000000000.{f}' for f in ('png','cls','kind.cls.txt','age.f4.json','n.u1.json','id')]
    back = tar_samples(train)
    assert store.splits=={'train':[0,12], 'odd name!':[12,15], 'valid':[15,20]} and store[13]['n.u1']==13
    assert [back.load(raw)['age.f4'] for _,raw in raw_samples(back)]==[i/8 for i in range(12)]

def test_an_index_for_wids(tmp_path):
    "Counts of samples and bytes of each shard, split by split; the names of shards of a stream have their split, too"
    splits = {split:({'txt':f'{split} {i}'} for i in range(n)) for split,n in (('train',20), ('valid',7))}
    to_shards(splits, tmp_path/'d', maxcount=6, **ORDERED)
    for split,n in ((None,27), ('train',20), ('valid',7)):
        index = ShardStore(tmp_path/'d').wids_index(split)
        assert (index['__kind__'],index['wids_version'])==('wids-shard-index-v1',1)
        assert sum(shard['nsamples'] for shard in index['shardlist'])==n
        for shard in index['shardlist']:
            path = tmp_path/'d'/shard['url']
            assert path.stat().st_size==shard['filesize'] and (split is None or f'-{split}-' in path.name)
            assert len(list(wds.WebDataset(str(path), shardshuffle=False)))==shard['nsamples']

@pytest.mark.parametrize('change', [dict(drop=[1]), dict(set={'txt':{0:'other'}}), dict(set={'cls':{0:'b'}})], ids=str)
def test_there_is_no_index_for_wids_of_shards_that_have_other_samples(tmp_path, change):
    "Other tools would read the samples of the tars: those that were dropped, and values from before the change"
    to_shards([{'txt':f't{i}', 'cls':'ab'[i%2]} for i in range(10)], tmp_path/'d', maxcount=5, **OPTIONS)
    store = ShardStore(tmp_path/'d').edit(**change)
    with pytest.raises(ValueError, match='d: .* in the tars .* store.copy'): store.wids_index()

def test_the_index_for_wids_of_a_split_has_only_its_samples(photos):
    with pytest.raises(KeyError, match="no split 'x'; there are 'train', 'valid', 'test'"): photos.wids_index('x')
    store = pickle.loads(pickle.dumps(photos))
    store.manifest.splits.update(train=[0,22], valid=[22,40], test=[60,60])
    for split in 'train','valid':
        with pytest.raises(ValueError, match=f'shard valid.tar has samples inside and outside of split .{split}.'):
            store.wids_index(split)
    assert store.wids_index('test')['shardlist']==[]

def test_a_map_can_make_samples_alike(photos, tmp_path):
    "Samples come without the fields that they lack; keys and order are kept"
    photos.map(alike, tmp_path/'d', **OPTIONS)
    store = ShardStore(tmp_path/'d')
    assert store.fields==['img','kind.cls'] and store.keys(range(60))==photos.keys(range(60))
    assert [store[i]['kind.cls'] for i in (0,1,59)]==['0','1','none'] and store.splits==photos.splits
    with pytest.raises(IngestError, match='fields .*; the first sample had'): photos.copy(tmp_path/'e', **OPTIONS)

def alike(sample):
    image,label = sample.get('jpg') or sample['png'],str(sample.get('cls', 'none'))
    return {'__key__':sample['__key__'], 'img':image, 'kind.cls':label}

# --- labels.json

def labelled(labels): return [{'cls':label} for label in labels] or [{'txt':'a'}]

def test_labels_for_other_tools_are_checked(tmp_path):
    to_shards(labelled('abab'), tmp_path/'d', **OPTIONS)
    assert not list(ShardStore(tmp_path/'d').check_rest())
    for content in b'{}',None:
        (tmp_path/'d/labels.json').unlink()
        if content: (tmp_path/'d/labels.json').write_bytes(content)
        (what,why), = ShardStore(tmp_path/'d').check_rest()
        assert what=='labels.json' and 'only other tools read it' in why

@pytest.mark.parametrize('content', [b'[]', b'{"__kind__": "fastai_remote lab'])
def test_our_labels_are_ours_also_if_they_are_damaged(content, tmp_path):
    def damaged(name):
        to_shards(labelled('ab'), tmp_path/name, **OPTIONS)
        (tmp_path/name/'labels.json').write_bytes(content)
        return tmp_path/name
    ShardStore(damaged('append')).append(labelled('c'), **OPTIONS)
    to_shards(labelled('abc'), damaged('overwrite'), overwrite=True, **OPTIONS)
    for name in 'append','overwrite':
        labels = json.loads((tmp_path/name/'labels.json').read_text())
        assert labels=={'__kind__':'fastai_remote labels', 'cls':['a','b','c']}
    to_shards(labelled(''), damaged('none'), overwrite=True, **OPTIONS)
    ShardStore.delete(damaged('deleted'))
    assert not (tmp_path/'none/labels.json').exists() and not (tmp_path/'deleted').exists()

@pytest.mark.parametrize('content,labels', [(b'{"cat": 0}','ab'), (b'{"cat','')])
def test_labels_of_another_tool_are_not_replaced(content, labels, tmp_path):
    "Also where our own would be; a dataset without labels has no such file, so that one which is there is not ours"
    to_shards(labelled(labels), tmp_path/'d', **OPTIONS)
    (tmp_path/'d/labels.json').write_bytes(content)
    for change in (lambda: ShardStore(tmp_path/'d').append(labelled(labels), **OPTIONS),
                   lambda: to_shards(labelled(labels), tmp_path/'d', overwrite=True, **OPTIONS)):
        with pytest.raises(StoreExists, match='labels.json.*another folder'): change()
    ShardStore.delete(tmp_path/'d')
    assert (tmp_path/'d/labels.json').read_bytes()==content
