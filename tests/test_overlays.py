"Values that were added to shards, or changed: where they are, how they are read, and what happens if they are damaged"
import io, json, pickle, shutil, zipfile
from pathlib import Path

import numpy as np
import pytest
from fastai.vision.all import DataLoaders, Resize
from PIL import Image

from fastai_remote import (CorruptSample, index_shards, MissingSample, RemoteDataset, ShardStore, StoreNotFound,
    to_shards, UnsupportedFormat)
from fastai_remote.core import seal
from fastai_remote.store.cache import FileCache
from s3servers import moto_server

one = dict(num_workers=1, progress=False)
N = 24

def png(i, size=8):
    Image.fromarray(np.full((size,size,3), i, np.uint8)).save(b:=io.BytesIO(), 'PNG')
    return b.getvalue()

def small(sample):
    "The image in another size, an array, and a number"
    number = Image.open(io.BytesIO(sample['png'])).getpixel((0,0))[0]
    return {'small.png':png(number, 4), 'emb.npy':np.full(3, number, np.float32), 'more.u1':number, 'kind.cls':'xy'[number%2]}

def written(url, n=N, **kwargs):
    to_shards([{'png':png(i), 'cls':'ab'[i%2], 'txt':f'text {i}'} for i in range(n)], url, shuffle=False, maxcount=7, **one, **kwargs)
    return ShardStore(url, storage_options=kwargs.get('storage_options'))

def widened(store): return store.add_fields(small, ['png'], chunk=10, **one)

def test_fields_of_all_kinds(tmp_path):
    store = widened(written(tmp_path/'d'))
    assert [store[i]['emb.npy'].tolist() for i in (0,23)]==[[0]*3,[23]*3] and store.get_many([5,3], 'small.png')['small.png']==[png(5, 4),png(3, 4)]
    assert store.get_many(range(N), 'more.u1')['more.u1'].tolist()==list(range(N)) and store.class_counts('kind.cls')=={'x':12, 'y':12}
    assert store.manifest.format==4 and store.image_stats('png') and not store.verify(num_workers=1).bad
    assert pickle.loads(pickle.dumps(store))[9]['small.png'].size==(4,4)
    store = store.append([{'png':png(30), 'cls':'a', 'txt':'text 30', **small({'png':png(30)})}], **one).edit(drop=[0,1], set={'small.png':{6:png(99, 4)}})
    assert [store[i]['emb.npy'][0] for i in range(len(store))]==[*range(2, N), 30] and store.get_many([3,4,22], 'small.png', check=True)['small.png']==[png(5, 4),png(99, 4),png(30, 4)]
    assert RemoteDataset(store).to_tuple('more.u1', 'kind.cls').__getitems__([0,22])==[(2,0),(30,0)]
    assert [p.name for p in sorted((tmp_path/'d').glob('.overlay*'))]==['.overlay-2-0','.overlay-4-0']
    store = store.drop_fields(['small.png','emb.npy'])
    assert store.manifest.format==3 and store.manifest.overlays==[] and not list((tmp_path/'d').glob('.overlay*')) and store[0]['more.u1']==2

def test_a_source_with_splits_keeps_its_numbers(tmp_path):
    to_shards({'valid':[{'txt':f'v{i}'} for i in range(5)], 'train':[{'txt':f't{i}'} for i in range(20)]}, tmp_path/'d', maxcount=4, **one)
    store = ShardStore(tmp_path/'d')
    store = store.add_fields(lambda o: {'same.txt':o['txt']}, **one)
    assert all(row['txt']==row['same.txt'] for row in store[:]) and store.splits=={'valid':[0,5], 'train':[5,25]}

@pytest.mark.parametrize('num_workers', [0, pytest.param(2, marks=pytest.mark.slow)])
def test_loaders_read_overlays(tmp_path, num_workers):
    store = widened(written(tmp_path/'d'))
    dls = DataLoaders.from_store(store, x='small.png', y='cls', bs=5, num_workers=num_workers, item_tfms=Resize(4), device='cpu')
    for dl in dls:
        for x,y in dl.new(drop_last=False, shuffle=False):
            numbers = (x[:,0,0,0]*255).round().long()
            assert x.shape[2:]==(4,4) and (numbers%2).tolist()==y.tolist()
    assert len(dls.train_ds)+len(dls.valid_ds)==N

def test_shards_of_others(tmp_path):
    import webdataset
    (tmp_path/'d').mkdir()
    for k in range(2):
        with webdataset.TarWriter(str(tmp_path/'d'/f'{k}.tar')) as tar:
            for i in range(5): tar.write({'__key__':f'k{5*k+i}', 'txt':f't{5*k+i}'})
    content = {p.name:p.read_bytes() for p in (tmp_path/'d').glob('*.tar')}
    index_shards(tmp_path/'d', **one)
    store = ShardStore(tmp_path/'d').add_fields(lambda o: {'up.txt':o['txt'].upper()}, **one).edit(drop=[2], set={'txt':{7:'new'}})
    assert [store[i]['up.txt'] for i in range(9)]==[f'T{i}' for i in range(10) if i!=2] and [store[6]['txt'],store.key(6)]==['new','k7']
    assert {p.name:p.read_bytes() for p in (tmp_path/'d').glob('*.tar')}==content and {p.name for p in (tmp_path/'d').iterdir()}=={'0.tar','1.tar','.fastai_remote'}
    assert not store.verify(num_workers=1).bad
    ShardStore.delete(tmp_path/'d')
    assert {p.name for p in (tmp_path/'d').iterdir()}=={'0.tar','1.tar'}

def test_replaced_and_deleted_datasets_leave_no_overlay(tmp_path):
    for how in (lambda: written(tmp_path/'d', 5, overwrite=True), lambda: ShardStore.delete(tmp_path/'d')):
        before = widened(written(tmp_path/'d', overwrite=True))
        assert before[3] and (tmp_path/'d'/'.overlay-2-0').exists() or list((tmp_path/'d').glob('.overlay-*'))
        how()
        assert not list(tmp_path.glob('d/.overlay*'))
        with pytest.raises(StoreNotFound, match='replaced|no dataset'): ShardStore(tmp_path/'d', uid=before.manifest.uid)
    assert not (tmp_path/'d').exists()

def test_damage_is_found_and_named(tmp_path):
    store = widened(written(tmp_path/'d'))
    overlay = tmp_path/'d'/'.overlay-2-0'
    for file in [p for p in overlay.iterdir()]:
        content = file.read_bytes()
        changed = bytearray(content)
        changed[len(content)//2] ^= 1
        file.write_bytes(changed)
        assert ShardStore(tmp_path/'d').verify(num_workers=1).bad, file.name
        file.write_bytes(content)
        file.rename(tmp_path/'away')
        if file.suffix in ('.tar','.fastai_remote'):
            with pytest.raises((MissingSample,CorruptSample), match='^d: .*in an overlay'): [ShardStore(tmp_path/'d').get_many([i], 'emb.npy', check=True) for i in range(N)]
        assert ShardStore(tmp_path/'d').get_many([3], 'png', check=True)['png']==[png(3)]
        (tmp_path/'away').rename(file)
    assert not ShardStore(tmp_path/'d').verify(num_workers=1).bad
    tar, = overlay.glob('shard-000000.tar')
    content = bytearray(tar.read_bytes())
    place = content.index(png(3, 4))
    content[place+40] ^= 1
    tar.write_bytes(content)
    with pytest.raises(CorruptSample, match=r"^d: sample 3, in an overlay: d/.overlay-2-0: sample 3, field 'small.png' in shard-000000.tar"): ShardStore(tmp_path/'d').get_many([3], 'small.png', check=True)
    shutil.rmtree(overlay)
    with pytest.raises(MissingSample, match='d: an overlay is not there, with values that were added or changed'): ShardStore(tmp_path/'d')[3]
    assert store.get_many([3], 'png')['png']==[png(3)]

@pytest.mark.parametrize('folder', ['../other','/etc','.overlay-1-0/../..','overlay','', None, 3])
def test_an_overlay_is_beside_the_manifest(tmp_path, folder):
    "A manifest that was downloaded may name any folder"
    widened(written(tmp_path/'d'))
    file = tmp_path/'d'/'manifest.json'
    manifest = json.loads(file.read_text())
    manifest['overlays'][0]['folder'] = folder
    del manifest['crc']
    file.write_text(seal(manifest))
    with pytest.raises(UnsupportedFormat, match='damaged: overlay 0'): ShardStore(tmp_path/'d')

def test_on_an_object_store(tmp_path, monkeypatch):
    for name,value in dict(AWS_EC2_METADATA_DISABLED='true', AWS_CONFIG_FILE=tmp_path/'c', AWS_SHARED_CREDENTIALS_FILE=tmp_path/'k').items(): monkeypatch.setenv(name, str(value))
    with moto_server() as s3:
        url,options = f's3://{s3.bucket}/pets',dict(endpoint_url=s3.endpoint, key=s3.key, secret=s3.secret)
        widened(written(url, storage_options=options)).edit(drop=[0], set={'txt':{5:'new'}})
        def names(): return {o['Key'] for o in s3.client().list_objects_v2(Bucket=s3.bucket).get('Contents', ())}
        for cache in (None, FileCache(tmp_path/'cache')):
            store = ShardStore(url, storage_options=options, cache=cache)
            store.prefetch([0,1,2], wait=True)
            rows = store.get_many(range(N-1), ['small.png','txt','more.u1'], check=True)
            assert rows['small.png']==[png(i, 4) for i in range(1, N)] and rows['txt']==[b'new' if i==5 else f'text {i}'.encode() for i in range(1, N)]
            assert not store.verify(num_workers=1).bad and store.manifest.overlays[0]['folder'] in str(names())
        copies = [str(p) for p in (tmp_path/'cache').rglob('*') if p.is_file()]
        assert any(store.manifest.overlays[0]['uid'] in p and p.endswith('.tar') for p in copies)   # kept like other shards
        ShardStore.delete(url, options)
        assert not names()

@pytest.mark.parametrize('folder', ['', 'p/'])
def test_in_an_archive(tmp_path, folder):
    store = written(tmp_path/'d').edit(set={'txt':{3:'another'}})
    with zipfile.ZipFile(tmp_path/'x.zip', 'w') as archive:
        for file in sorted((tmp_path/'d').rglob('*')):
            if file.is_file(): archive.write(file, folder+str(file.relative_to(tmp_path/'d')))
    zipped = ShardStore(f'zip://{folder}::{tmp_path}/x.zip', cache=None)
    numbers = range(len(store))
    assert zipped.get_many(numbers, 'txt;png')==store.get_many(numbers, 'txt;png') and zipped[3]['txt']=='another'

def test_overlays_of_this_version_stay_readable(tmp_path):
    shutil.copytree(Path(__file__).parent/'data'/'shards-v4', tmp_path/'d')
    store = ShardStore(tmp_path/'d')
    numbers = [*range(1, 10), 20]
    assert [o['txt'] for o in store[:]]==['changed' if i==3 else f'text {i}' for i in numbers] and [o['up.txt'] for o in store[:]]==[f'TEXT {i}' for i in numbers]
    assert store.manifest.format==4 and [o['y.u1'] for o in store[:]]==numbers and not store.verify(num_workers=1).bad
    assert store.edit(set={'up.txt':{0:'X'}})[0]['up.txt']=='X'
