"Samples that lack fields in training, restricted epochs, and the keys of samples in what we write"
import io, json, pickle, subprocess, tarfile, tracemalloc

import numpy as np
import pytest
import torch
import webdataset as wds
from fastai.vision.all import DataBlock, DataLoaders
from PIL import Image

from fastai_remote import (
    IngestError, MissingSample, RedisBlock, RedisStore, RemoteDataset, ShardBlock, ShardStore, StoreExists, StoreSplitter,
    RandomStoreSplitter, UnknownField, get_remote_items, index_shards, tar_samples, to_redis, to_shards)
from fastai_remote.load.items import SampleSelection
from fastai_remote.testing import *

OPTIONS = dict(num_workers=1, progress=False)

def image(i, kind):
    out = io.BytesIO()
    Image.fromarray(np.full((8,8,3), i%256, np.uint8)).save(out, kind)
    return out.getvalue()

def tar(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, 'w') as out:
        for name,content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    return path

def members(path):
    with tarfile.open(path) as file: return {info.name:file.extractfile(info).read() for info in file}

@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    "60 images in three shards, one in three a PNG; the shard `test` has no labels, and one in four has a text"
    d = tmp_path_factory.mktemp('photos')
    for shard,split in enumerate(('train','valid','test')):
        content = []
        for i in range(20*shard, 20*shard+20):
            kind = 'png' if i%3==0 else 'jpg'
            content.append((f'{i:03}.{kind}', image(i, {'jpg':'JPEG'}.get(kind, kind))))
            if split!='test': content.append((f'{i:03}.cls', b'%d' % (i%2)))
            if i%4==0: content.append((f'{i:03}.txt', b'text %d' % i))
        tar(d/f'{split}.tar', content)
    index_shards(d, splits={s:f'{s}.tar' for s in ('train','valid','test')}, **OPTIONS)
    return ShardStore(d)

# --- training

def test_an_epoch_of_samples_that_have_a_field(photos):
    "Alternatives are one input, and splits are those of the samples that are left"
    assert photos.default_field=='png;jpg' and photos.field_counts=={'png':20, 'cls':40, 'txt':15, 'jpg':40}
    with pytest.raises(MissingSample, match="first .*having='cls' restricts"): list(DataLoaders.from_shards(photos.storage.url, bs=60, num_workers=0, valid_pct=.01, splitter=RandomStoreSplitter(.01)).train)
    dls = DataLoaders.from_store(photos, having='cls', bs=8, num_workers=0)
    assert (len(dls.train_ds),len(dls.valid_ds))==(20,20)
    xb,yb = zip(*[b for b in dls.valid])
    pixels,labels = torch.cat(xb).mean((1,2,3)).cpu(),torch.cat(yb).cpu()
    assert labels.tolist()==[i%2 for i in range(20, 40)] and all(abs(p*255-i)<3 for p,i in zip(pixels, range(20, 40)))
    dls = DataLoaders.from_store(photos, x='jpg;png', having=['txt','cls'], splitter=RandomStoreSplitter(.2), bs=3, num_workers=0)
    assert len(dls.train_ds)+len(dls.valid_ds)==10 and sum(len(y) for _,y in dls.train)+sum(len(y) for _,y in dls.valid)>=8
    assert sorted(photos.key(i) for dl in dls for i in dl.items)==[f'{i:03}' for i in range(0, 40, 4)]
    dblock = DataBlock((ShardBlock('jpg;png'), RedisBlock('cls')), get_items=lambda s: get_remote_items(s, having='cls'), splitter=StoreSplitter())
    assert len(dblock.dataloaders(photos, bs=4, num_workers=0).train)==5
    with pytest.raises(ValueError, match="leave out the .*having='txt'"): RedisBlock('txt?')
    with pytest.raises(UnknownField, match="no field 'x'"): get_remote_items(photos, having='x')
    with pytest.raises(ValueError, match='alternatives of different kinds .jpg, txt.'): RedisBlock(photos, 'jpg;txt')

def test_several_fields_are_combined_where_one_is_in_all_samples(photos, tmp_path):
    "The parts in which a store says which samples have a field may differ from field to field"
    def fields(i): return ['jpg', *(['txt'] if i%3 else []), *(['png'] if i<10 else [])]
    for shard in range(3):
        numbers = range(20*shard, min(20*shard+20, 50))
        tar(tmp_path/f'{shard}.tar', [(f'{i:03}.{field}', image(i, 'JPEG')) for i in numbers for field in fields(i)])
    index_shards(tmp_path, **OPTIONS)
    store = ShardStore(tmp_path)
    assert [*get_remote_items(store, having=['jpg;gif','txt'])]==[i for i in range(50) if i%3]
    assert [*get_remote_items(store, having=['jpg;png','txt','png'])]==[i for i in range(10) if i%3]

def test_items_of_a_selection(photos):
    items = get_remote_items(photos, having='txt')
    assert [*items]==list(range(0, 60, 4)) and items.shard_sizes.tolist()==[5,5,5] and items.is_complete and not items[2:].is_complete
    assert items[3:9].shard_sizes.tolist()==[2,4,0] and pickle.loads(pickle.dumps(items))[4]==16
    ds = RemoteDataset(photos).to_tuple('__key__')
    assert [k for k, in ds]==[f'{i:03}' for i in range(60)]

def test_a_selection_is_a_bit_per_sample():
    rng = np.random.default_rng(0)
    flags = rng.random(100_003)<.3
    selection = SampleSelection(np.split(flags, [1,9,5000,5000,70_000]))
    want = np.flatnonzero(flags)
    assert len(selection)==len(want) and selection.n==len(flags)
    positions = rng.integers(0, len(want), 500)
    assert (selection[positions]==want[positions]).all() and selection[0]==want[0] and selection[len(want)-1]==want[-1]
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
    path = tar(tmp_path/'w/a.tar', [o for i in range(40) for o in ((f'd/{i:03}x.txt', b'text %d' % i), (f'd/{i:03}x.cls', b'%d' % i), (f'd/{i:03}x.age.f4', b'%d.5' % i))])
    want = {f'd/{i:03}x':f'text {i}' for i in range(40)}
    to_shards(tar_samples(path), tmp_path/'a', **OPTIONS)
    ShardStore(tmp_path/'a').copy(tmp_path/'b', **OPTIONS)
    to_shards([{'__key__':key, '__url__':'x', '__local_path__':'y', 'txt':text} for key,text in want.items()], tmp_path/'c', **OPTIONS)
    for name in 'abc':
        store = ShardStore(tmp_path/name)
        assert dict(zip(store.keys(range(40)), store.get_many(range(40), 'txt', decode=True)['txt']))==want, name
        urls = [str(p) for p in sorted((tmp_path/name).glob('*.tar'))]
        read = list(wds.WebDataset(urls, shardshuffle=False).decode())
        assert {o['__key__']:o['txt'] for o in read}==want and len(read)==40
        assert all(o['age.f4.json']==int(o['txt'][5:])+.5 for o in read if name!='c')
        i = 7
        assert store.shard_url(i)==urls[0] and store.key(i) in {n.partition('.')[0] for n in members(urls[0])}

def test_keys_that_webdataset_would_not_read_are_failed_samples(tmp_path):
    bad = ['a.b','a/.b','__x__/a','../a','/a','a//b','a\nb','a\0b','','x'*1001,'a\\b',7,'\udcff']
    good = ['a','a.b/c','ü','a b']
    report = to_shards([{'__key__':key, 'txt':'x'} for key in bad+good+['same','same']], tmp_path/'a', shuffle=False, max_failed=99, **OPTIONS)
    store = ShardStore(tmp_path/'a')
    assert report.failed==len(bad)+1 and sorted(store.keys(range(len(store))))==sorted(good+['same'])
    assert 'two samples in a row have this key' in report.failures[-1][1] and all('__key__' in why or 'UTF-8' in why for _,why in report.failures)
    urls = [str(p) for p in (tmp_path/'a').glob('*.tar')]
    assert sorted(o['__key__'] for o in wds.WebDataset(urls, shardshuffle=False))==sorted(good+['same'])

def test_long_keys_and_names(tmp_path):
    "Beyond the 100 characters of a header"
    keys = ['folder/'*40+f'ü{i}'*10 for i in range(5)]
    to_shards([{'__key__':key, 'txt':key, 'json':[i]} for i,key in enumerate(keys)], tmp_path/'a', **OPTIONS)
    store = ShardStore(tmp_path/'a')
    assert store.keys(range(5))==store.get_many(range(5), 'txt', decode=True)['txt'] and sorted(store.keys(range(5)))==keys
    assert store.verify(num_workers=1).bad==0
    urls = [str(p) for p in (tmp_path/'a').glob('*.tar')]
    assert sorted(o['txt'].decode() for o in wds.WebDataset(urls, shardshuffle=False))==keys

def test_keys_in_redis(tmp_path, server):
    "The field `key.txt`, if it is asked for, or if samples have a `__key__` of their own"
    path = tar(tmp_path/'a.tar', [o for i in range(5) for o in ((f'k{i}.txt', b'%d' % i), (f'k{i}.cls', b'1'))])
    for name,source,fields in (('asked', tar_samples(path, key=True), ['txt','cls','key.txt']), ('default', tar_samples(path), ['txt','cls']),
                               ('own', [{'__key__':f'k{i}', 'txt':f'{i}', '__url__':''} for i in range(5)], ['txt','key.txt'])):
        to_redis(source, server.url, name, shuffle=False, overwrite=True, **OPTIONS)
        store = RedisStore(server.url, name)
        assert store.fields==fields
        if name!='default': assert store.keys([4,0])==['k4','k0'] and store.key(2)=='k2' and RemoteDataset(store)[3]['__key__']=='k3'
        else:
            with pytest.raises(UnknownField, match='default: the keys of samples are not stored.*tar_samples.files, key=True'): store.key(0)
            assert RemoteDataset(store)[3]['__key__']=='000000003'
        with pytest.raises(UnknownField, match='not in shards'): store.shard_url(0)
        RedisStore.delete(server.url, name)

# --- other tools read what we write

def test_other_tools_read_our_shards(tmp_path):
    "Names with splits, labels.json, numbers as JSON: WebDataset, `datasets` and `tar`"
    def part(a, b): return [{'jpg':image(i, 'JPEG'), 'cls':i%2, 'age.f4':i/8, 'n.u1':i, 'id':-i, 'caption.txt':f'text {i}'} for i in range(a, b)]
    to_shards({'train':part(0, 12), 'odd name!':part(12, 15), 'valid':part(15, 20)}, tmp_path/'d', vocab=['cat','dog'], maxcount=6, shuffle=False, **OPTIONS)
    names = sorted(p.name for p in (tmp_path/'d').glob('*.tar'))
    assert [n.rsplit('-', 1)[0] for n in names if 'train' in n]==['shard-train']*2 and any(n.startswith('shard-valid-') for n in names)
    assert json.loads((tmp_path/'d/labels.json').read_text())=={'__kind__':'fastai_remote labels', 'cls':['cat','dog']}
    urls = [str(p) for p in sorted((tmp_path/'d').glob('*-train-*.tar'))]
    read = list(wds.WebDataset(urls, shardshuffle=False).decode('pil'))
    assert [(o['cls'],o['age.f4.json'],o['n.u1.json'],o['id'],o['caption.txt'],o['jpg'].size) for o in read]==[(i%2, i/8, i, -i, f'text {i}', (8,8)) for i in range(12)]
    listed = subprocess.run(['tar','tf',urls[0]], capture_output=True, text=True, check=True).stdout.split()
    assert listed[:6]==[f'000000000.{f}' for f in ('jpg','cls','age.f4.json','n.u1.json','id','caption.txt')]
    store = ShardStore(tmp_path/'d')
    assert store.splits=={'train':[0,12], 'odd name!':[12,15], 'valid':[15,20]} and store[3]['age.f4']==.375 and store[13]['n.u1']==13
    back = tar_samples(urls)
    assert [back.load(raw)['age.f4'] for p in back.stream(64) for _,raw in p]==[i/8 for i in range(12)]

@pytest.mark.slow
def test_datasets_reads_our_shards(tmp_path):
    datasets = pytest.importorskip('datasets')
    to_shards({'train':[{'jpg':image(i, 'JPEG'), 'cls':i, 'age.f4':i/8, 'cap.txt':f'{i}'} for i in range(8)]}, tmp_path/'d', shuffle=False, **OPTIONS)
    got = datasets.load_dataset('webdataset', data_files=str(tmp_path/'d/*.tar'), split='train', cache_dir=str(tmp_path/'cache'))
    assert [(o['cls'],o['age.f4.json'],o['cap.txt'],o['__key__']) for o in got]==[(i, i/8, f'{i}', f'{i:09}') for i in range(8)]
    streamed = datasets.load_dataset('webdataset', data_files=str(tmp_path/'d/*.tar'), split='train', streaming=True)
    assert [o['jpg'].size for o in streamed]==[(8,8)]*8

def test_an_index_for_wids(tmp_path):
    "Counts of samples and bytes of each shard, split by split"
    to_shards({'train':[{'txt':f't{i}'} for i in range(20)], 'valid':[{'txt':f'v{i}'} for i in range(7)]}, tmp_path/'d', maxcount=6, shuffle=False, **OPTIONS)
    store = ShardStore(tmp_path/'d')
    for split,n in ((None,27), ('train',20), ('valid',7)):
        index = store.wids_index(split)
        assert (index['__kind__'],index['wids_version'])==('wids-shard-index-v1',1) and sum(s['nsamples'] for s in index['shardlist'])==n
        for shard in index['shardlist']:
            path = tmp_path/'d'/shard['url']
            assert path.stat().st_size==shard['filesize'] and len(list(wds.WebDataset(str(path), shardshuffle=False)))==shard['nsamples']
            assert split is None or f'-{split}-' in path.name

@pytest.mark.parametrize('change', [dict(drop=[1]), dict(set={'txt':{0:'other'}}), dict(set={'cls':{0:'b'}})])
def test_there_is_no_index_for_wids_of_shards_that_have_other_samples(tmp_path, change):
    "Other tools would read the samples of the tars: those that were dropped, and values from before the change"
    to_shards([{'txt':f't{i}', 'cls':'ab'[i%2]} for i in range(10)], tmp_path/'d', maxcount=5, **OPTIONS)
    with pytest.raises(ValueError, match='d: .* in the tars .* store.copy'): ShardStore(tmp_path/'d').edit(**change).wids_index()

def test_the_index_for_wids_of_a_split_has_only_its_samples(tmp_path):
    tar(tmp_path/'d/a.tar', [(f'{i}.txt', b'x') for i in range(4)])
    tar(tmp_path/'d/b.tar', [(f'{i}.txt', b'x') for i in range(4, 9)])
    index_shards(tmp_path/'d', splits={'train':'a.tar', 'valid':'b.tar'}, **OPTIONS)
    store = ShardStore(tmp_path/'d')
    with pytest.raises(KeyError, match="no split 'test'; there are 'train', 'valid'"): store.wids_index('test')
    store.manifest.splits['train'],store.manifest.splits['valid'] = [0,6],[6,9]
    for split in ('train','valid'):
        with pytest.raises(ValueError, match=f'd: shard b.tar has samples inside and outside of split .{split}.'): store.wids_index(split)
    store.manifest.splits['valid'] = [6,6]
    assert store.wids_index('valid')['shardlist']==[]

def test_streams_have_their_split_in_names(tmp_path):
    to_shards({split:({'txt':f'{split} {i}'} for i in range(9)) for split in ('train','valid')}, tmp_path/'d', **OPTIONS)
    assert [p.name for p in sorted((tmp_path/'d').glob('*.tar'))]==['shard-train-000000.tar','shard-valid-000001.tar']
    assert ShardStore(tmp_path/'d').splits=={'train':[0,9], 'valid':[9,18]}

def test_a_map_can_make_samples_alike(photos, tmp_path):
    "Samples come without the fields that they lack; keys and order are kept"
    photos.map(alike, tmp_path/'d', **OPTIONS)
    store = ShardStore(tmp_path/'d')
    assert store.fields==['img','kind.cls'] and store.keys(range(60))==photos.keys(range(60))
    assert store.get_many([0,1,59], 'kind.cls', decode=True)['kind.cls']==['0','1','none'] and store.splits==photos.splits
    with pytest.raises(IngestError, match='fields .*; the first sample had'): photos.copy(tmp_path/'e', **OPTIONS)

def alike(sample):
    return {'__key__':sample['__key__'], 'img':sample.get('jpg') or sample['png'], 'kind.cls':str(sample.get('cls', 'none'))}

def test_labels_for_other_tools_are_checked(tmp_path):
    to_shards([{'cls':'ab'[i%2]} for i in range(4)], tmp_path/'d', **OPTIONS)
    assert not list(ShardStore(tmp_path/'d').check_rest())
    for content in b'{}',None:
        (tmp_path/'d/labels.json').unlink()
        if content: (tmp_path/'d/labels.json').write_bytes(content)
        (what,why), = ShardStore(tmp_path/'d').check_rest()
        assert what=='labels.json' and 'only other tools read it' in why

@pytest.mark.parametrize('content', [b'', b'{', b'{}', b'[]', b'{"__kind__": "fastai_remote lab', b'\xff\x00'])
@pytest.mark.parametrize('change', ['append','overwrite','without labels','delete'])
def test_our_labels_are_ours_also_if_they_are_damaged(content, change, tmp_path):
    def source(labels): return [{'cls':label} if label else {'txt':'a'} for label in labels]
    to_shards(source('ab'), tmp_path/'d', **OPTIONS)
    (tmp_path/'d/labels.json').write_bytes(content)
    if change=='append': ShardStore(tmp_path/'d').append(source('c'), **OPTIONS)
    elif change=='delete': ShardStore.delete(tmp_path/'d')
    else: to_shards(source('abc' if change=='overwrite' else [None]), tmp_path/'d', overwrite=True, **OPTIONS)
    if change in ('append','overwrite'):
        labels = {'__kind__':'fastai_remote labels', 'cls':['a','b','c']}
        assert json.loads((tmp_path/'d/labels.json').read_text())==labels and ShardStore(tmp_path/'d').vocab==['a','b','c']
    else: assert not (tmp_path/'d/labels.json').exists()

@pytest.mark.parametrize('content,labels', [(b'["cat"]','ab'), (b'{"cat": 0}','ab'), (b'{}',None), (b'{"cat',None)])
def test_labels_of_another_tool_are_not_replaced(content, labels, tmp_path):
    "Also where our own would be; a dataset without labels has no such file, so that one which is there is not ours"
    samples = [{'cls':label} for label in labels or ()] or [{'txt':'a'}]
    to_shards(samples, tmp_path/'d', **OPTIONS)
    (tmp_path/'d/labels.json').write_bytes(content)
    refused = pytest.raises(StoreExists, match='labels.json.*another folder')
    with refused: ShardStore(tmp_path/'d').append(samples, **OPTIONS)
    with refused: to_shards(samples, tmp_path/'d', overwrite=True, **OPTIONS)
    ShardStore.delete(tmp_path/'d')
    assert (tmp_path/'d/labels.json').read_bytes()==content
