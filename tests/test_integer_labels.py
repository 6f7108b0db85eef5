"Integers as labels are categories, whatever their type and wherever they come from"
import tarfile

import numpy as np
import pytest
from conftest import draw
from fastai.data.core import DataLoaders
from fastai.vision.augment import Resize

import fastai_remote.block
from fastai_remote import index_shards, ShardStore, to_shards
from fastai_remote.write import shard_totals

options = dict(num_workers=1, shuffle=False, progress=False)

@pytest.mark.parametrize('labels', [[3,7,3,7,7], [-5,2,-5,1<<40], [4,4], list(np.array([9,1,9], np.int16)),
                                    [True,False,True]], ids=str)
def test_integer_labels_are_categories_where_shards_have_other_labels_each(tmp_path, labels):
    "The tar has the number as text; tars that are indexed, and copies, have the same labels"
    samples = [{'txt':f'{i}', 'cls':label} for i,label in enumerate(labels)]
    to_shards(samples, tmp_path/'d', chunk=2, maxcount=2, **{**options, 'num_workers':2})
    ShardStore(tmp_path/'d').copy(tmp_path/'copy', num_workers=1, progress=False)
    with tarfile.open(tmp_path/'d/shard-000000.tar') as tar:
        assert tar.extractfile('000000000.cls').read()==b'%d'%labels[0]
    index_shards(sorted((tmp_path/'d').glob('*.tar')), to=tmp_path/'index', num_workers=1, progress=False)
    want = sorted(set(map(int, labels)))
    indexed = ShardStore(tmp_path/'index', shards_url=tmp_path/'d')
    for store in (ShardStore(tmp_path/'d'), ShardStore(tmp_path/'copy'), indexed):
        assert store.vocab==want and all(type(label) is int for label in store.vocab)
        assert store.class_counts()=={label:labels.count(label) for label in want}
        assert [o['cls'] for o in store]==labels and not list(store.check_rest())
        assert store.get_many(range(len(labels)), 'cls')['cls'].tolist()==[want.index(label) for label in labels]

def test_too_many_integers_are_values(tmp_path, monkeypatch):
    "Beyond 2**20 there is no vocabulary"
    assert shard_totals.MAX_CLASSES==1<<20
    monkeypatch.setattr(shard_totals, 'MAX_CLASSES', 5)
    labels = [10*i-20 for i in range(6)]
    for n,vocab,codes in ((5,labels[:5],[*range(5)]), (6,[],labels)):
        to_shards([{'cls':label} for label in labels[:n]], tmp_path/f'{n}', chunk=2, **options)
        store = ShardStore(tmp_path/f'{n}')
        assert [o['cls'] for o in store]==labels[:n] and store.vocab==vocab
        assert store.get_many(range(n), 'cls')['cls'].tolist()==codes

def test_a_loader_of_integer_labels_has_as_many_classes(tmp_path):
    to_shards([{'png':draw(i), 'cls':[3,7][i%2]} for i in range(12)], tmp_path/'d', chunk=5, **options)
    dls = DataLoaders.from_shards(tmp_path/'d', bs=4, num_workers=0, valid_pct=.25, seed=1, item_tfms=Resize(32))
    assert dls.c==2 and list(dls.vocab)==[3,7] and {int(y) for _,ys in dls.train for y in ys}=={0,1}
