"Folders of millions of files: in one order, in memory that depends on the names alone; splits by folders"
import random, tracemalloc

import pytest
from PIL import Image

from conftest import class_of
from fastai_remote import image_samples
from fastai_remote.source.files import SortedNames
from in_memory import in_memory

def test_names_are_sorted_and_packed():
    "In the order of `sorted`, whatever is in them, and no object is kept per name"
    odd = ['b','B','ä','a b','a.b','a-b','a','\udcff','\U0001f431','漢','z'*255,'a\nb']
    every = [f'{name}{k}' for k in range(4_500) for name in odd]+[f'n{i:09}.jpg' for i in range(60_000)]
    random.Random(0).shuffle(every)
    tracemalloc.start()
    names = SortedNames()
    for name in every: names.append(name)
    _,peak = tracemalloc.get_traced_memory()
    packed = sum(map(len, names.packed))
    assert packed<sum(len(name.encode(errors='surrogateescape'))+6 for name in every)
    assert peak<packed+15_000_000   # fifty thousand at a time are objects
    tracemalloc.stop()
    assert list(names)==sorted(every)

def test_folders_and_files_are_in_one_order(tmp_path):
    "The order of earlier versions: names of folders and files are sorted together"
    for name in ('b/1.jpg','b.jpg','a/2/x.png','a/2.png','a-/3.jpg','B/4.jpg','.hidden/5.jpg','c.jpg/6.jpg','a.jpg',
                 'b/.h.jpg','b/n.txt'):
        (tmp_path/name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path/name).touch()
    found = [str(path.relative_to(tmp_path)) for path in image_samples(tmp_path).paths]
    assert found==['B/4.jpg','a/2/x.png','a/2.png','a-/3.jpg','a.jpg','b/1.jpg','b.jpg','c.jpg/6.jpg']

def test_a_flat_folder_takes_the_bytes_of_its_names(tmp_path):
    n = 2_000
    for i in range(n): (tmp_path/f'{i:012}.jpg').touch()
    tracemalloc.start()
    source = image_samples(tmp_path)
    traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, '*source/files.py')]).traces
    tracemalloc.stop()
    assert len(source)==n and source.paths[777].name==f'{777:012}.jpg'
    assert sum(trace.size for trace in traces)<n*(16+8)*1.25+100_000

def test_splits_by_folders(tmp_path):
    "As fastai's GrandparentSplitter: the folders that are named are splits, and others are left out"
    for i in range(24):
        path = tmp_path/('training','testing','other')[i%3]/'ab'[i//3%2]/f'{i}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new('L', (3,3), i).save(path)
    store = in_memory(image_samples(tmp_path, label=class_of, splits={'train':'training', 'valid':'testing'}))
    assert store.splits=={'train':[0,8], 'valid':[8,16]} and store.vocab==['a','b']
    for k in range(16):
        i = store[k]['png'].getpixel((0,0))
        assert i%3==(k>=8) and store[k]['cls']=='ab'[i//3%2]
    assert image_samples(tmp_path, splits=['testing','training']).splits=={'testing':[0,8], 'training':[8,16]}
    with pytest.raises(FileNotFoundError, match='valid: no such folder'): image_samples(tmp_path, splits=['valid'])
    (tmp_path/'valid').mkdir()
    with pytest.raises(FileNotFoundError, match='valid: no image files'):
        image_samples(tmp_path, splits=['training','valid'])
    with pytest.raises(TypeError, match='splits= names folders'):
        image_samples([tmp_path/'training/a/0.png'], splits=['training'])
    for splits in 'train', [], {}:
        with pytest.raises((TypeError,ValueError), match='splits= '): image_samples(tmp_path, splits=splits)
