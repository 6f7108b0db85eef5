"Folders of millions of files: in one order, in memory that depends on the names alone; splits by folders"
import os, random, tracemalloc

import numpy as np
import pytest
from PIL import Image

from fastai_remote import image_samples, redis_server, RedisStore, to_redis
from fastai_remote.source.files import SortedNames

def label(path): return path.parent.name

def test_names_are_sorted_and_packed():
    "In the order of `sorted`, whatever is in them, and no object is kept per name"
    n,rng = 150_000,random.Random(0)
    order = rng.sample(range(n), n)
    tracemalloc.start()
    names = SortedNames()
    for i in order: names.append(f'n{i:09}.jpg')
    kept,peak = tracemalloc.get_traced_memory()
    packed = sum(map(len, names.packed))
    assert packed<16*n and peak<packed+15_000_000   # fifty thousand at a time are objects
    before = None
    for name in names:
        assert before is None or before<name
        before = name
    assert tracemalloc.get_traced_memory()[1]<packed+25_000_000 and len(names)==n
    tracemalloc.stop()

def test_odd_names_are_in_the_order_of_sorted(monkeypatch):
    odd = ['b','B','ä','a b','a.b','a-b','a','\udcff','\U0001f431','漢','z'*255,'a\nb'] 
    names = SortedNames()
    for k in range(6_000):
        for name in odd: names.append(f'{name}{k}')
    assert list(names)==sorted(f'{name}{k}' for name in odd for k in range(6_000)) and len(names.packed)==1

def test_folders_and_files_are_in_one_order(tmp_path):
    "The order of earlier versions: names of folders and files are sorted together"
    for name in 'b/1.jpg','b.jpg','a/2/x.png','a/2.png','a-/3.jpg','B/4.jpg','.hidden/5.jpg','c.jpg/6.jpg','a.jpg','b/.h.jpg','b/n.txt':
        (tmp_path/name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path/name).write_bytes(b'')
    found = [str(image_samples(tmp_path).paths[i].relative_to(tmp_path)) for i in range(len(image_samples(tmp_path)))]
    assert found==['B/4.jpg','a/2/x.png','a/2.png','a-/3.jpg','a.jpg','b/1.jpg','b.jpg','c.jpg/6.jpg']

def test_a_flat_folder_takes_the_bytes_of_its_names(tmp_path):
    n = 5_000
    for i in range(n): os.close(os.open(tmp_path/f'{i:012}.jpg', os.O_CREAT|os.O_WRONLY))
    tracemalloc.start()
    source = image_samples(tmp_path)
    kept = sum(o.size for o in tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, '*source/files.py')]).traces)
    tracemalloc.stop()
    assert len(source)==n and kept<n*(16+8)*1.25+100_000 and source.paths[777].name==f'{777:012}.jpg'

def make(folder):
    for i in range(24):
        p = folder/('training','testing','other')[i%3]/'ab'[i//3%2]/f'{i}.png'
        p.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((3,3), i, np.uint8)).save(p)
    return folder

def test_splits_by_folders(tmp_path):
    "As fastai's GrandparentSplitter: the folders that are named are splits, and others are left out"
    folder = make(tmp_path)
    with redis_server() as server:
        to_redis(image_samples(folder, label=label, splits={'train':'training', 'valid':'testing'}), server.url, 'd', num_workers=1, progress=False)
        store = RedisStore(server.url, 'd')
        assert store.splits=={'train':[0,8],'valid':[8,16]} and store.vocab==['a','b']
        for k in range(16):
            i = int(np.asarray(store[k]['png'])[0,0])
            assert i%3==(k>=8) and store[k]['cls']=='ab'[i//3%2]
    assert image_samples(folder, splits=['testing','training']).splits=={'testing':[0,8],'training':[8,16]}
    with pytest.raises(FileNotFoundError, match='valid: no such folder'): image_samples(folder, splits=['valid'])
    (folder/'valid').mkdir()
    with pytest.raises(FileNotFoundError, match='valid: no image files'): image_samples(folder, splits=['training','valid'])
    with pytest.raises(TypeError, match='splits= names folders'): image_samples([folder/'training/a/0.png'], splits=['training'])
