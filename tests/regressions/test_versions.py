"Sample numbers that know their version of a dataset are not applied to another version"
import pytest

from fastai_remote.load.cleaners import remote_images
from fastai_remote.load.items import get_remote_items

def source(images):
    return [{'jpg':path.read_bytes(), 'cls':path.parent.name} for path in sorted(images.rglob('*.jpg'))[:9]]

@pytest.fixture
def store(put, images): return put(source(images), shuffle=False)[0]

def test_a_cell_that_is_run_twice_drops_no_other_sample(store):
    fns = remote_images(get_remote_items(store))
    def clean(store): return store.edit(drop=[fns[i] for i in (2, 5)], set={'cls':{fns[7]:'other'}})
    cleaned = clean(store)
    assert len(cleaned)==7 and cleaned[5]['cls']=='other'
    with pytest.raises(ValueError, match="sample 2 of .* is a number of another version of the dataset"): clean(cleaned)
    assert len(cleaned)==7

CHANGES = [lambda store,items: store.edit(drop=items[[1, 2]]),
    lambda store,items: store.edit(drop=list(remote_images(items[[1]]))),
    lambda store,items: store.edit(set={'cls':{remote_images(items)[3]:'a'}})]

def test_items_and_images_of_an_earlier_version_are_refused(store):
    "Plain numbers are those of the store"
    store = store.edit(drop=range(1))
    for change in CHANGES:
        items,now = get_remote_items(store),store.edit(set={'cls':{0:'changed'}})
        with pytest.raises(ValueError, match='of another version of the dataset'): change(now, items)
        store = change(now, get_remote_items(now))
    assert len(store)==9-1-3 and len(store.edit(drop=[1, 2]))==3
