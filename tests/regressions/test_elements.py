"`fn` gets the elements of what is written: those of a list are the list's, whatever they are"
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fastcore.foundation import L

from fastai_remote.ingest.shards import to_shards
from fastai_remote.ingest.stores import ShardStore

def written(source, folder, fn, **kwargs):
    return to_shards(source, folder, fn=fn, num_workers=0, shuffle=False, progress=False, **kwargs).store

def describe(o): return {'txt':f'{type(o).__name__} {o}', 'a.i8':len(str(o))}

def test_texts_that_name_files_are_texts(tmp_path):
    "Lists of each kind, and of each kind of name"
    def splits(paths): return {'train':paths, 'valid':paths}
    pictures = ['a/1.jpg','a/2.png']
    cases = [*((kind, pictures) for kind in (list, L, tuple, np.array, pd.Series, splits)),
             (L, ['x.csv','y.csv']), (list, ['x.csv','y.csv']), (np.array, ['x.parquet']), (list, ['no path','1.jpg'])]
    for k,(kind,names) in enumerate(cases):
        store = written(kind(names), tmp_path/f'{k}', describe)
        texts = store.get_many(range(len(names)), 'txt', decode=True)['txt']
        assert [text.split(' ', 1)[1] for text in texts]==names and all(text.startswith('str') for text in texts), k

def test_paths_of_images_are_paths(images, tmp_path):
    from fastai.data.transforms import get_image_files
    files = get_image_files(images)
    def fn(path):
        assert isinstance(path, Path)
        return {'jpg':path.read_bytes(), 'cls':path.parent.name}
    store = written(files, tmp_path/'d', fn)
    assert len(store)==len(files) and store.get_many([3], 'jpg')['jpg']==[files[3].read_bytes()]
    more = store.append(files[:2], fn=fn, num_workers=0, progress=False)
    assert len(more)==len(files)+2

def test_paths_of_images_without_fn_are_images(images, tmp_path):
    to_shards(sorted(images.rglob('*.jpg')), tmp_path/'d', num_workers=0, progress=False)
    assert ShardStore(tmp_path/'d').fields==['jpg']
