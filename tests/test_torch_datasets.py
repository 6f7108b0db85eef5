"Datasets of torchvision, PyTorch and fastai: what they return is stored"
import random, re
from collections import namedtuple
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from fastai.vision.all import AddMaskCodes, Categorize, DataLoaders, Datasets, ImageDataLoaders, MultiCategorize, \
    OneHotEncode, parent_label, PILImage, PILMask, Resize, TensorBBox, TensorMultiCategory, TensorPoint, TfmdLists
from PIL import Image
from torch.utils.data import ChainDataset, ConcatDataset, DataLoader, Dataset, IterableDataset, StackDataset, Subset, \
    random_split

from conftest import draw
from inputs import in_memory, stored
from fastai_remote import IngestError
from fastai_remote.source.datasets import as_source
from fastai_remote.source.torch_items import flat_items
from shard_helpers import put
from torchvision_table import DATASETS, LIKE_OTHERS, NOT_HERE, no_checksums, picture, stl10, tv, write

pytestmark = pytest.mark.usefixtures('no_checksums')

def same(found, expected, names=None):
    "Is a value of a sample what the dataset returned?"
    if isinstance(expected, Image.Image):
        if found.mode!=expected.mode and expected.mode not in 'P1': found = found.convert(expected.mode)
        return np.array_equal(np.asarray(found), np.asarray(expected))
    if getattr(expected, 'shape', ())!=():
        expected = np.asarray(expected)
        return found.dtype==expected.dtype and np.array_equal(found, expected)
    if hasattr(expected, 'item'): expected = expected.item()
    if isinstance(expected, int) and names: expected = names[expected]
    return found==expected

def values(item): return [value for _,_,value in flat_items(item) if value is not None]

def test_all_of_torchvision_is_here():
    "A class that torchvision adds is to be added to the table, unless it is like another one"
    here = {name.split()[0] for name in DATASETS}
    assert set(LIKE_OTHERS)<=set(DATASETS) and here|NOT_HERE|set.union(*LIKE_OTHERS.values())>=set(tv.__all__)

@pytest.mark.parametrize('name', DATASETS)
def test_what_a_dataset_of_torchvision_returns_is_stored(name, tmp_path):
    "With the names of its classes and the bytes of its files"
    case = DATASETS[name]
    dataset,fields = case.build(tmp_path),case.fields.split()
    assert len(dataset)>=2
    store,report = in_memory(dataset)
    assert store.fields==fields and report.failed==0 and len(store)==len(dataset)
    if case.names: assert store.vocab==list(case.names)
    elif 'cls' in fields: assert all(isinstance(label, int) for label in store.vocab)
    for i in range(len(dataset)):
        expected = values(dataset[i])
        assert len(expected)==len([field for field in fields if not field.startswith('boxes.')])   # made of annotations
        for field,value in zip(fields, expected): assert same(store[i][field], value, case.names), (i,field)
    contents = {path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
    for field in fields:
        if field.split('.')[-1] in ('jpg','png','img'):
            assert (set(stored(store, field))<=contents)==case.has_bytes_of_files(field), field

def test_an_image_without_a_label_is_a_failed_sample(tmp_path):
    "STL10 has -1 there"
    with pytest.raises(IngestError, match=r"item\[1\] is -1, which marks a sample without a label"):
        in_memory(stl10('unlabeled').build(tmp_path))

# --- folders of images

@pytest.fixture
def folder(tmp_path):
    for i in range(12): write(tmp_path, f'photos/{("cat","dog")[i%2]}/{i:02d}.jpg', picture('.jpg', i))
    return tv.ImageFolder(str(tmp_path/'photos'))

def contents(folder): return [Path(path).read_bytes() for path,_ in folder.samples]

@pytest.mark.parametrize('num_workers', [1,2])
def test_an_image_folder_keeps_its_files(folder, tmp_path, num_workers):
    "In workers, too; and Pillow is as before"
    before = Image.open
    for source in folder, tv.DatasetFolder(folder.root, tv.folder.default_loader, ('.jpg',)):
        with joblib.parallel_config('multiprocessing'):
            store,report = put(tmp_path/'d', source, shuffle=False, num_workers=num_workers, chunk=3, overwrite=True)
        assert stored(store, 'jpg')==contents(folder) and store.vocab==['cat','dog']
        assert store.fields==['jpg','cls'] and not report.notes
    assert Image.open is before

def test_parts_of_an_image_folder_keep_names_and_files(folder):
    "In any nesting"
    first,second = random_split(folder, [8,4], torch.Generator().manual_seed(0))
    joined = ConcatDataset([Subset(ConcatDataset([first,second]), range(3, 11)), Subset(Subset(second, [2,1]), [1])])
    for dataset in first, joined, Subset(joined, [8,0,4]):
        store,_ = in_memory(dataset)
        assert store.vocab==['cat','dog'] and store.fields==['jpg','cls'] and len(store)==len(dataset)
        for sample,(image,code) in zip(store[:], dataset):
            assert same(sample['jpg'], image) and sample['cls']==('cat','dog')[code]
    store,_ = in_memory({'train':first, 'valid':second})
    assert store.splits=={'train':[0,8], 'valid':[8,12]} and store.fields==['jpg','cls'] and store.vocab==['cat','dog']

def mark(image):
    "Change an image in place: it is no longer what is in the file, though it was opened from there"
    image.putpixel((0,0), (1,2,3))
    return image

@pytest.mark.parametrize('options,field', [
    (dict(transform=lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)), 'png'),
    (dict(transform=lambda image: image.convert('L')), 'png'), (dict(transform=np.asarray), 'npy'),
    (dict(loader=lambda path: mark(Image.open(path))), 'png')], ids=['flipped','grey','array','in place'])
def test_images_that_were_changed_are_stored_as_the_user_sees_them(folder, options, field):
    changed = tv.ImageFolder(folder.root, **options)
    store,_ = in_memory(changed)
    assert store.fields==[field,'cls']
    for sample,(image,_) in zip(store[:], changed):
        assert same(sample[field], image) and getattr(sample[field], 'mode', None)==getattr(image, 'mode', None)

def test_files_of_several_formats_are_kept(folder):
    write(folder.root, 'cat/last.png', picture('.png', 3, 'P'))
    write(folder.root, 'dog/last.jpg', picture('.jpg', 3, 'L'))
    mixed = tv.ImageFolder(folder.root)
    store,report = in_memory(mixed)
    assert store.fields==['img','cls'] and report.failed==0 and stored(store, 'img')==contents(mixed)
    only_jpg = tv.ImageFolder(folder.root, is_valid_file=lambda path: path.endswith('jpg'))
    assert in_memory({'train':only_jpg, 'valid':mixed})[0].fields==['img','cls']

class Paths(Dataset):
    "A dataset as users write it"
    def __init__(self, paths, fn=lambda image, i: (image.convert('RGB'), i%2)): self.paths,self.fn = paths,fn
    def __len__(self): return len(self.paths)
    def __getitem__(self, i): return self.fn(Image.open(self.paths[i]), i)

def dict_of_image(image, i):
    mask = image.convert('L').point(lambda v: v>99 and 1)
    return {'image':image, 'mask':mask, 'age':i/7, 'name':f'n{i}'}

def test_a_dataset_of_the_user_keeps_its_files(folder):
    "Whatever the field is called"
    paths = [path for path,_ in folder.samples]
    assert stored(in_memory(Paths(paths))[0], 'jpg')==contents(folder)
    store,_ = in_memory(Paths(paths, dict_of_image))
    assert store.fields==['image.jpg','mask.png','age','name'] and stored(store, 'image.jpg')==contents(folder)
    assert store[3]['age']==3/7 and store[3]['name']=='n3' and set(np.unique(store[3]['mask.png']))<={0,1}
    for key in 'jpg','photo.jpeg':
        store,_ = in_memory(Paths(paths, lambda image, i: {key:image.convert('RGB')}))
        assert store.fields==[key] and stored(store, key)==contents(folder)

def test_one_image_that_was_changed_is_a_failed_sample(folder):
    "Where all that were looked at are JPEG files: it would lose quality"
    paths = [path for path,_ in folder.samples]*5
    store,report = in_memory(Paths(paths, lambda image, i: (image.rotate(90) if i==2 else image, i%2)))
    assert store.fields==['jpg','cls'] and report.failed==1 and len(store)==59
    assert "item[0] is not as it is in a file" in report.failures[0][1] and "fn=" in report.failures[0][1]

def test_a_key_that_ends_like_an_extension_is_no_choice_of_a_format(folder):
    "The field of `my_jpg` is `my_jpg.jpg` because files are JPEGs: a PNG among them is not encoded with loss"
    write(folder.root, 'a.png', picture('.png', 1))
    paths = [path for path,_ in folder.samples]*3
    paths[1] = f'{folder.root}/a.png'   # the second item is not among those that are looked at
    _,report = in_memory(Paths(paths, lambda image, i: {'my_jpg':image.convert('RGB')}))
    assert report.failed==1 and 'a file of another format (png)' in str(report.failures)

# --- targets

class Items(Dataset):
    def __init__(self, items, **attributes):
        self.listed = items
        self.__dict__.update(attributes)
    def __len__(self): return len(self.listed)
    def __getitem__(self, i):
        if isinstance(self.listed[i], Exception): raise self.listed[i]
        return self.listed[i]

def photo(i): return draw(i).resize((9,7))
def boxes(n): return torch.arange(4*n).reshape(n, 4).to(torch.float32)
def cars(i): return [{'bbox':[1,2,k], 'type':'car'} for k in range(i)]
def detection(i):
    n = i%3
    return {'boxes':boxes(n), 'labels':torch.arange(n), 'image_id':torch.tensor(i), 'area':torch.ones(n)}
Pair = namedtuple('Pair', 'image target')

# item number i, and the fields that it is stored in
ITEMS = {
    'boxes of any length':(lambda i: (photo(i), boxes(i%3)), 'png npy'),
    'a dict of tensors':(lambda i: (photo(i), detection(i)), 'png boxes labels image_id area'),
    'only a dict':(lambda i: {'x':torch.ones(2, i), 'y':torch.tensor(i), 'z':{'a':torch.ones(i), 'b':i/7}},
                   'x y z.a z.b'),
    'tensors':(lambda i: (torch.ones(3), torch.ones(i), torch.tensor(i)), 'npy 1.npy cls'),
    'nested':(lambda i: (photo(i), (i, (torch.ones(i), i/2))), 'png cls npy target.f4'),
    'first items without dicts':(lambda i: (photo(i), cars(max(0, i-3))), 'png json'),
    'labels':(lambda i: (photo(i), ['a','b'][:i%3]), 'png labels'),
    'numbers in a list':(lambda i: (photo(i), [i,.5]), 'png json'),
    'a list':(lambda i: [photo(i), i], 'png cls'),
    'namedtuple':(lambda i: Pair(photo(i), i), 'image.png target'),
    'two images':(lambda i: (photo(i), photo(i+1), i%2), 'png 1.png cls'),
    'mask':(lambda i: (photo(i), photo(i).convert('L'), bytes([i])), 'png mask.png bin'),
    'several numbers':(lambda i: (photo(i), i, i+1, np.float32(i), i/3), 'png cls 2.cls target.f4 4.f4'),
    'whole numbers and others':(lambda i: (photo(i), i if i%2 else i/4), 'png target.f4'),
    'numbers of instances':(lambda i: (photo(i), Image.fromarray(np.full((7,9), 999*i, 'u2')), cars(i)),
                            'png mask.png json'),
    'an array':(lambda i: np.full((2,i), i), 'npy'),
    'none':(lambda i: (photo(i), None), 'png'),
    'a key that names a codec':(lambda i: {'txt':f'a {i}', 'cls':i, 'npy':torch.ones(2)}, 'txt cls npy'),
    'one label':(lambda i: {'image':photo(i), 'labels':i%2}, 'image.png cls'),
    'one text':(lambda i: {'image':photo(i), 'labels':'ab'[i%2]}, 'image.png cls'),
    'a label in a tensor':(lambda i: {'image':photo(i), 'labels':torch.tensor(i%2)}, 'image.png cls'),
    'truth':(lambda i: {'image':photo(i), 'labels':i%2==0}, 'image.png cls'),
    'label and labels':(lambda i: {'image':photo(i), 'label':i%2, 'labels':'ab'[i%2]}, 'image.png cls labels.cls'),
    'several labels':(lambda i: {'image':photo(i), 'labels':['a','b'][:i%3]}, 'image.png labels'),
    'a tensor that requires a gradient':(lambda i: (torch.ones(3, requires_grad=True)*i, i%2), 'npy cls'),
    'a stack':(StackDataset(image=torch.ones(7, 2), label=torch.arange(7)), 'image cls'),
}

@pytest.mark.parametrize('name', ITEMS)
def test_items_are_taken_apart(name):
    make,fields = ITEMS[name]
    dataset = Items([make(i) for i in range(7)]) if callable(make) else make
    store,report = in_memory(dataset)
    assert store.fields==fields.split() and report.failed==0 and len(store)==7
    found = re.search(r"item\['(\w+)'\] -> cls", repr(report))
    renamed = {'a stack':'label', 'label and labels':'label', 'a key that names a codec':'cls',
               **dict.fromkeys(('one label','one text','a label in a tensor','truth'), 'labels')}
    assert (found and found[1])==renamed.get(name)
    for i in range(7):
        for field,value in zip(fields.split(), values(dataset[i])):
            if isinstance(value, float) and field.endswith('f4'): value = np.float32(value)
            if isinstance(value, torch.Tensor): value = value.tolist() if field=='labels' else value.detach()
            assert same(store[i][field], value), field

@pytest.mark.parametrize('items,message', [
    ([(photo(i), i if i%2 else 'text') for i in range(7)], 'the first sample had a str'),
    ([(torch.zeros(3, dtype=torch.bfloat16), i%2) for i in range(7)], 'BFloat16'),
    ([(photo(0), object())]*3, 'no field for a object: write an fn that returns a dict of fields'),
    ([{'x.npz':np.array([[1], [2,3]], dtype=object)}], 'want numbers, got an array of dtype object.*json')])
def test_values_that_no_field_can_store_are_errors(items, message):
    with pytest.raises(IngestError, match=message): in_memory(Items(items), max_failed=0)

@pytest.mark.parametrize('items,message', [
    ([(photo(0), None)]+[(photo(i), i) for i in range(19)], r'item\[1\] is None'),
    ([{'a':1, 'b':2}]*19+[{'a':1}], r"item\['b'\] is missing"),
    ([OSError('is damaged')]+[(photo(i), i) for i in range(19)], '^OSError: is damaged$'),
    ([{'age.f4':1}]*19+[{'age.f4':None}], r"item\['age.f4'\] is None")])
def test_an_item_that_lacks_a_value_is_a_failed_sample_with_its_reason(items, message):
    store,report = in_memory(Items(items))
    assert len(store)==19 and report.failed==1
    assert re.search(message, report.failures[0][1])

def test_fn_gets_the_item_as_the_dataset_returns_it_and_decides_about_the_fields():
    def fn(item): return {'jpg':item[0], 'boxes.json':item[1]['boxes'].tolist(), 'x':'text'}
    store,_ = in_memory(Items([(photo(i), {'boxes':boxes(i), 'x':torch.ones(1)}) for i in range(5)]), fn=fn)
    assert store.fields==['jpg','boxes.json','x']
    assert store[2]['boxes.json']==boxes(2).tolist() and store[0]['x']=='text'

# --- A dataset that can only be gone through may have a length. PyTorch gives it a `__getitem__`, too, which raises

class Stream(IterableDataset):
    "`(number, label)` of numbers from `start` to `stop`"
    def __init__(self, start, stop): self.numbers = range(start, stop)
    def __iter__(self): return ((i/2, i%2) for i in self.numbers)

class StreamWithLength(Stream):
    def __len__(self): return len(self.numbers)

class BothWays(StreamWithLength):
    "Has an index, too, as the streams of MosaicML and LitData"
    def __getitem__(self, i): return self.numbers[i]/2,i%2

@pytest.mark.parametrize('source', [
    StreamWithLength(0, 6), ChainDataset([Stream(0, 4), Stream(4, 6)]), BothWays(0, 6),
    {'train':StreamWithLength(0, 4), 'valid':StreamWithLength(4, 6)}], ids=['length','chain','index','splits'])
def test_a_stream_with_a_length_is_a_stream(source):
    store,report = in_memory(source)
    assert (report.written,report.failed)==(6,0) and store.fields[1]=='cls'
    assert [store[i][store.fields[0]] for i in range(6)]==[i/2 for i in range(6)]

# --- annotations

def test_captions_and_names_of_categories_of_coco(tmp_path):
    "Captions are captions in a part of the dataset, too; a line says where the names of the categories are"
    captions = Subset(DATASETS['CocoCaptions'].build(tmp_path), [1,3])
    for dataset in captions, ConcatDataset([captions,captions]):
        assert in_memory(dataset)[0].fields==['jpg','captions.json']
    case = DATASETS['CocoDetection']
    assert 'boxes.labels' in repr(in_memory(case.build(tmp_path))[1])
    store,report = in_memory(case.make(tmp_path, transform=lambda image: image.resize((4,4))))
    assert 'dataset.coco.cats' in repr(report) and store.fields==['png','json']

@pytest.mark.parametrize('name,boxes,label', [
    ('CocoDetection', [[1,2,4.5,2],[1,2,4.5,3]], 'dog'), ('VOCDetection', [[1,0,8,0],[1,0,8,1]], 'dog'),
    ('Kitti', [[1,2,3,4]]*2, 'Car')])
def test_annotated_boxes_are_corners_and_names(name, boxes, label, tmp_path):
    "In parts of a dataset, too; a sample may have none"
    dataset = DATASETS[name].build(tmp_path)
    store,_ = in_memory(ConcatDataset([Subset(dataset, [0,2]), Subset(dataset, [1,3])]))
    by_number = {len(o['boxes.labels']):o for o in store[:]}   # some datasets list their files in any order
    none,two = by_number[0],by_number[2]
    assert none['boxes.npy'].shape==(0,4) and none['boxes.labels']==[]
    assert two['boxes.npy'].tolist()==boxes and two['boxes.labels']==[label]*2
    assert store.manifest.vocab=={'boxes.labels':[label]}

# --- names of classes

def test_a_key_called_label_is_the_class_of_the_sample():
    "With the names that the dataset has"
    dataset = Items([{'image':photo(i), 'label':i%2} for i in range(6)], classes=['cat','dog'])
    store,report = in_memory(dataset)
    assert store.fields==['image.png','cls'] and store.vocab==['cat','dog'] and store[1]['cls']=='dog'
    assert "item['label'] -> cls" in repr(report)

def test_names_that_differ_are_an_error():
    a,b = (Items([(np.ones(1), 0)]*3, classes=names) for names in (['cat','dog'], ['dog','cat']))
    message = r"2 datasets with different classes, \['cat', 'dog'\], \['dog', 'cat'\].*vocab="
    with pytest.raises(ValueError, match=message):
        in_memory(Subset(ConcatDataset([Subset(a, [0,1]), b]), range(4)))
    assert in_memory(ConcatDataset([a,b]), vocab=['x','y'])[0].vocab==['x','y']
    assert in_memory(ConcatDataset([a,a]))[0].vocab==['cat','dog']

@pytest.mark.parametrize('attributes', [
    dict(classes=2), dict(classes='ab'), dict(classes={'a','b'}), dict(class_to_idx={'a':0, 'b':'x'})])
def test_attributes_that_are_no_list_of_names_are_left_alone(attributes):
    "Such as the number of classes, or a set, whose order is another one in each process"
    assert as_source(Items([(np.zeros(2), i%2) for i in range(4)], **attributes)).vocab is None

@pytest.mark.parametrize('code', [2,-1])
def test_a_class_beyond_the_names_is_a_failed_sample(code):
    items = [(torch.zeros(2), TensorMultiCategory(codes)) for codes in [[0,1]]*19+[[0,code]]]
    store,report = in_memory(Items(items, vocab=['a','b']))
    assert report.failures[0][1].endswith(f"item[1] has class {code}: there are 2 names of classes")
    assert report.failed==1 and store[0]['labels']==['a','b']

# --- fastai

def test_datasets_of_fastai_are_stored(folder):
    files,tags = [Path(path) for path,_ in folder.samples],[['a','b'][:i%3] for i in range(12)]
    splits = [list(range(8)),list(range(8, 12))]
    dsets = Datasets(files, [[PILImage.create],[parent_label, Categorize()]], splits=splits)
    for source in dsets, {'train':dsets.train, 'valid':dsets.valid}:
        store,_ = in_memory(source)
        assert store.splits=={'train':[0,8], 'valid':[8,12]} and store.vocab==['cat','dog']
        assert stored(store, 'jpg')==contents(folder) and [o['cls'] for o in store[:]]==[f.parent.name for f in files]
    store,_ = in_memory(TfmdLists(files, [PILImage.create]))
    assert store.fields==['jpg'] and store.splits=={}
    for encode in [], [OneHotEncode()]:
        labels = [lambda o: tags[files.index(o)], MultiCategorize(), *encode]
        store,_ = in_memory(Datasets(files, [[PILImage.create], labels]))
        assert store.fields==['jpg','labels'] and store.manifest.vocab['labels']==['a','b']
        assert [o['labels'] for o in store[:]]==tags
    masks = [np.full((7,9), i%2, np.uint8) for i in range(12)]
    mask = [lambda o: PILMask.create(masks[files.index(o)]), AddMaskCodes(['sky','road'])]
    store,_ = in_memory(Datasets(files, [[PILImage.create], mask]))
    assert store.fields==['jpg','mask.png'] and store.manifest.vocab['mask.png']==['sky','road']
    assert np.array_equal([np.asarray(o['mask.png']) for o in store[:]], masks)

def test_boxes_and_points_of_fastai_keep_their_meaning():
    annotated = [([[1,1,5,5],[2,2,6,6]], ['b','b']), ([[0,0,4,4]], ['a'])]*3
    dsets = Datasets(list(range(6)), [
        [lambda i: PILImage.create(photo(i))], [lambda i: annotated[i][0], TensorBBox.create],
        [lambda i: annotated[i][1], MultiCategorize(add_na=True)], [lambda i: [[i,i]], TensorPoint.create]], n_inp=1)
    store,_ = in_memory(dsets)
    assert store.fields==['png','boxes.npy','labels','points.npy']
    assert [store[i]['labels'] for i in (0,1)]==[['b','b'],['a']]
    dls = DataLoaders.from_store(store, bs=2, num_workers=0, device='cpu', valid_pct=0, item_tfms=Resize(8))
    assert dls.vocab==['#na#','a','b']
    assert dls.test_dl([0,1], with_labels=True).one_batch()[2].tolist()==[[2,2],[1,0]]

def test_loaders_are_refused_and_name_what_to_give(folder):
    dls = ImageDataLoaders.from_folder(folder.root, valid_pct=.3, seed=0, bs=2, device='cpu', num_workers=0)
    message = r"DataLoaders.*return batches.*\{'train': dls.train_ds, 'valid': dls.valid_ds\}"
    with pytest.raises(TypeError, match=message): in_memory(dls)
    for dl in dls.train, DataLoader(folder):
        with pytest.raises(TypeError, match=r"returns batches.*dl.dataset"): in_memory(dl)
        assert in_memory(dl.dataset)[0].fields==['jpg','cls']
    store,_ = in_memory({'train':dls.train_ds, 'valid':dls.valid_ds})
    assert store.vocab==['cat','dog'] and store.splits=={'train':[0,9], 'valid':[9,12]}

def test_an_error_in_a_split_names_it():
    "Whatever its class, as some take several arguments"
    class Broken(list):
        def __len__(self): return len(b'\xff'.decode())
    with pytest.raises(ValueError, match="valid: .*can't decode"): as_source({'train':[1], 'valid':Broken()})

# --- datasets with random transforms

class Turning(Items):
    "Items with random changes, by the generator that `draw` asks"
    def __getitem__(self, i): return self.listed[i]+self.draw(), i

OWN = np.random.default_rng()
DRAWS = {'torch':lambda: torch.randn(3).numpy(), 'numpy':lambda: np.random.randn(3), 'python':lambda: random.random(),
         'own':lambda: OWN.random(3)}

@pytest.mark.parametrize('draw', DRAWS)
def test_a_dataset_with_random_transforms_is_recognised(draw):
    "By items that are the same each time, with generators that begin anew; the generators of the user are not changed"
    def fingerprint(change=0):
        return as_source(Turning([np.arange(3)+i+change for i in range(9)], draw=DRAWS[draw])).fingerprint()
    def states(): return random.getstate()[1],np.random.get_state()[1].tolist(),torch.get_rng_state().tolist()
    before = states()
    first = fingerprint()
    assert states()==before
    for move in DRAWS.values(): move()
    assert fingerprint()==first and (draw=='own' or fingerprint(1)!=first)
