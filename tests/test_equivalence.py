"""Batches are what stock fastai makes of the same files, bit for bit, whatever the user adds

Each test compares whole epochs (training, validation, training again) of a `Pipeline` with stock fastai's, from Redis
and from shards: types, shapes, values, attributes, the random numbers drawn between batches, and whether there is an error.
"""
import pytest
from pipelines import *

for _n in [n for n in globals() if n.startswith('test')]: del globals()[_n]   # fastai's helpers are not tests of ours

@pytest.fixture(scope='module')
def data(server, tmp_path_factory):
    "20 small images of each kind, with targets, as files, in Redis and in shards"
    return Data.make([sample(i) for i in range(N)], server.url, 'equivalence', tmp_path_factory.mktemp('equivalence'))

@pytest.fixture(scope='module')
def photographs(server, tmp_path_factory):
    "The same with a photograph each"
    rows = [{'rgb.jpg':photograph(i%PHOTOS), 'cls':TARGETS['cls'](i)} for i in range(N)]
    return Data.make(rows, server.url, 'photographs', tmp_path_factory.mktemp('photographs'))

def check(p, data):
    if d:=compared(p, data): pytest.fail(f'{p!r}\n{d}', pytrace=False)

CROPPED = T('RandomResizedCrop', dict(size=16)),T('FlipItem')
workers = pytest.mark.parametrize('workers', [0, 2])

# Labels

@workers
@pytest.mark.parametrize('shuffle', [True, False])
@pytest.mark.parametrize('target', ['own categorize', 'own regression', 'own regression of int', 'own multi'])
def test_subclass_of_a_target_transform_runs_its_own_encodes(data, target, shuffle, workers):
    check(Pipeline(target=target, shuffle=shuffle, workers=workers, item=CROPPED), data)

@pytest.mark.parametrize('target', ['cls', 'labels', 'age.f4', 'k.i8', 'txt', 'mask.png', 'two', 'picture', 'vocab', 'relabelled', 'length of text'])
def test_targets_are_as_in_stock(data, target):
    check(Pipeline(target=target, item=() if target in ('mask.png', 'picture') else CROPPED), data)

@pytest.mark.parametrize('change,target', [('Categorize on str', 'cls'), ('Categorize on str', 'vocab'), ('RegressionSetup on float', 'age.f4'),
    ('RegressionSetup on int', 'k.i8'), ('OneHotEncode on TensorMultiCategory', 'labels'), ('ToTensor on TensorCategory', 'cls'),
    ('FlipItem on TensorCategory', 'cls'), ('IntToFloatTensor on TensorCategory', 'cls'), ('IntToFloatTensor on TensorMask', 'mask.png'),
    ('category_map', 'vocab')])
def test_what_a_user_teaches_a_transform_of_targets_is_done(data, change, target):
    check(Pipeline(target=target, item=(T('FlipItem'),), changes=(change,)), data)

# Transforms with a memory

@workers
@pytest.mark.parametrize('item', [(T('Buffer'),), (*CROPPED, T('Buffer', dict(order=2))), (T('Buffer', dict(order=2)), T('Resize', dict(size=16)))], ids=str)
def test_transform_that_reuses_a_buffer(data, item, workers): check(Pipeline(item=item, workers=workers), data)

@workers
@pytest.mark.parametrize('item', [(T('Previous'),), (*CROPPED, T('Previous', dict(order=2))), (T('Previous'), T('Resize', dict(size=16)))], ids=str)
def test_transform_that_changes_the_previous_item(data, item, workers): check(Pipeline(item=item, workers=workers), data)

@pytest.mark.parametrize('tfm', [T('Delay', dict(order=2)), T('Counter', dict(order=2)), T('TensorBuffer'), T('Reseed'), T('InPlace'), T('written'), T('OnTensor'),
    *[T('Rng', dict(kind=k, order=2)) for k in ('own', 'own numpy', 'own torch', 'numpy', 'torch', 'python')], T('Rng', dict(kind='python'))], ids=str)
def test_transform_with_a_state(data, tfm):
    for workers in 0,2: check(Pipeline(item=(*CROPPED, tfm), workers=workers), data)

# Fastai extended, in the ways that its documentation shows

SIZERS = {'Resize':dict(size=16), 'RandomResizedCrop':dict(size=16), 'CropPad':dict(size=16), 'RandomCrop':dict(size=16), 'FlipItem':{}, 'DihedralItem':{}}
TAUGHT = [k for k in CHANGES if ' on PIL' in k or ' on Image' in k or ' on TensorImage' in k or ' on Plain' in k]

@pytest.mark.parametrize('change', TAUGHT)
def test_what_a_user_teaches_a_transform_of_images_is_done(data, change):
    name,typ = change.split(' on ')
    item = (T(name, SIZERS[name]),) if name in SIZERS else ()
    batch = (T('Normalize', dict(mean=.5, std=.2)),) if name=='Normalize' else ()
    cls = 'PILImageBW' if 'BW' in typ else 'Plain' if typ=='Plain' else 'PILImage'
    check(Pipeline(cls=cls, item=item, batch=batch, changes=(change,)), data)

@workers
@pytest.mark.parametrize('change', ['ToTensor on PILImage', 'IntToFloatTensor on TensorImage'])
def test_extended_to_tensor_and_int_to_float(data, change, workers): check(Pipeline(item=CROPPED, changes=(change,), workers=workers), data)

PATCHED = [k for k in CHANGES if '.' in k.split(' ')[0] or k.startswith('vision.core') or k.startswith('vision.augment') or k in ('array_interface', 'tensor_class', 'open_args', 'open_args_in_place')]

@pytest.mark.parametrize('change', [k for k in PATCHED if k.startswith(('Image.', 'PILBase.', 'PILImage', 'vision', 'array', 'tensor', 'open'))])
def test_what_a_user_patches_onto_images_is_done(data, change):
    cls = 'PILImageBW' if 'BW' in change else 'PILImage'
    for item in CROPPED,(T('Resize', dict(size=16, method='pad', pad_mode='zeros')), T('DihedralItem')),(T('CropPad', dict(size=(20, 50))),):
        check(Pipeline(cls=cls, image='grey.png' if 'convert' in change else 'camera.jpg', item=item, changes=(change,)), data)

@pytest.mark.parametrize('change', [k for k in CHANGES if k not in TAUGHT and not k.startswith(('Image.', 'PILBase.', 'PILImage', 'vision', 'array', 'tensor_class', 'open'))])
def test_what_a_user_patches_onto_fastai_is_done(data, change):
    check(Pipeline(target='vocab', item=CROPPED, changes=(change,)), data)

@pytest.mark.parametrize('own', OWN)
@pytest.mark.parametrize('name', ['Resize', 'RandomResizedCrop', 'CropPad', 'FlipItem', 'DihedralItem', 'ToTensor'])
def test_subclass_of_an_item_transform(data, name, own):
    sized = () if name not in ('FlipItem', 'DihedralItem') else (T('Resize', dict(size=16)),)
    check(Pipeline(item=(*sized, T(name, SIZERS.get(name, {}), own=own))), data)

@pytest.mark.parametrize('t', [T('FlipItem', dict(p=1.), put=dict(split_idx=None)), T('FlipItem', dict(p=1.), put=dict(split_idx=1)), T('Resize', dict(size=16), put=dict(order=7)),
    T('FlipItem', put=dict(encodes='<encodes>')), T('Resize', dict(size=16), put=dict(encodes='<encodes>')), T('FlipItem', put=dict(before_call='<before_call>')),
    T('RandomResizedCrop', dict(size=16), put=dict(before_call='<before_call>')), T('FlipItem', put=dict(_call='<call>')), T('ToTensor', put=dict(_call='<call>')),
    T('ToTensor', put=dict(split_idx=0)), T('FlipItem', put=dict(order=6)), T('Resize', dict(size=16), put=dict(split_idx=0)), T('RandomResizedCrop', dict(size=16), put=dict(p=.5)),
    T('Resize', dict(size=16), put=dict(mode=Image.Resampling.LANCZOS)), T('FlipItem', put=dict(do=False))], ids=str)
def test_attributes_that_a_user_sets_on_a_transform_count(data, t): check(Pipeline(item=(t,)), data)

# What code of a user is given

@pytest.mark.parametrize('image', IMAGES)
def test_an_unknown_transform_sees_what_stock_shows_it(data, image):
    check(Pipeline(image=image, item=(T('Facts', dict(order=-1)), T('Resize', dict(size=16)))), data)

KNOWN = [(), (T('Resize', dict(size=16)),), (T('Resize', dict(size=16, method='squish')),), (T('Resize', dict(size=16, method='pad')),), (T('RandomResizedCrop', dict(size=16)),),
    (T('CropPad', dict(size=16)),), (T('CropPad', dict(size=50)),), (T('CropPad', dict(size=(32, 40))),), (T('RandomCrop', dict(size=16)),), (T('FlipItem', dict(p=1.)),), (T('FlipItem'),),
    (T('DihedralItem'),), (T('Resize', dict(size=(32, 40))),), (T('RatioResize', dict(max_sz=20)),), (*CROPPED, T('DihedralItem', put=dict(order=4)))]

@pytest.mark.parametrize('cls', ['PILImage', 'PILImageBW', 'Plain', 'AsIs'])
@pytest.mark.parametrize('item', KNOWN, ids=str)
def test_after_known_transforms_an_image_is_what_stock_makes_of_it(data, item, cls):
    check(Pipeline(image='camera.jpg', cls=cls, item=(*item, T('Facts', dict(order=4)))), data)

@pytest.mark.parametrize('item', [(T('set_mine'), *CROPPED, T('ReadMine')), (T('set_mine'), T('FlipItem', put=dict(order=2)), T('ReadMine')), (T('ByExactType', dict(order=2)), *CROPPED),
    (T('Facts', dict(order=2)), T('Resize', dict(size=16)), T('FlipItem', put=dict(order=3)), T('Facts', dict(order=4))),
    (T('upright'), T('Resize', dict(size=16))), (T('set_info'), T('Resize', dict(size=16)), T('Facts', dict(order=4))), (T('pickled', dict(order=2)), *CROPPED),
    (T('deep_copied', dict(order=2)), *CROPPED, T('Facts', dict(order=4)))], ids=str)
def test_attributes_and_info_travel_as_in_stock(data, item): check(Pipeline(image='camera.jpg', item=item), data)

@pytest.mark.parametrize('order', [-2, 0, 2])
@pytest.mark.parametrize('name', ['same', 'same_image', 'copied', 'loaded', 'inverted', 'inverted_any', 'smaller', 'reduced', 'thumbnail', 'rotated', 'to_grey', 'to_alpha', 'to_hsv', 'to_array',
    'to_tensor_image', 'to_plain_tensor', 'to_bw', 'to_mask', 'to_plain_pil', 'twice', 'split_merge', 'mirrored', 'equalised', 'clear_info', 'drop_exif', 'none_at_all'])
def test_functions_of_a_user(data, name, order): check(Pipeline(item=(T(name, dict(order=order)), *CROPPED)), data)

@pytest.mark.parametrize('item', [(T('Skip'), *CROPPED), (*CROPPED, T('Skip', dict(order=2))), (T('Raise'),), (*CROPPED, T('OnPair', dict(order=2))), (T('OnPair'), *CROPPED), (T('NoRetain'), *CROPPED),
    (*CROPPED, T('NoRetain', dict(order=2))), (T('Relabel'), *CROPPED), (T('Sometimes', dict(p=.5)), *CROPPED), (T('Shown'), *CROPPED)], ids=str)
def test_transforms_of_a_user(data, item):
    for workers in 0,2: check(Pipeline(item=item, workers=workers), data)

@pytest.mark.parametrize('typed', [(T('Buffer'),), (T('Facts'),), (T('same_image'),), (T('Counter'),), (T('set_mine'),), (T('Previous'),)], ids=str)
def test_transforms_in_the_block_of_the_image(data, typed): check(Pipeline(image='camera.jpg', typed=typed, item=CROPPED), data)

@pytest.mark.parametrize('cls', CLASSES)
def test_image_classes(data, cls):
    for image in 'camera.jpg','alpha.png','cmyk.jpg': check(Pipeline(image=image, cls=cls, item=CROPPED), data)

@pytest.mark.parametrize('entry', ['factory', 'opened'])
@pytest.mark.parametrize('image', IMAGES)
def test_kinds_of_images(data, image, entry):
    for cls in 'PILImage','PILImageBW': check(Pipeline(image=image, cls=cls, entry=entry, item=CROPPED), data)
    check(Pipeline(image=image, entry=entry), data)

# Batches

@pytest.mark.parametrize('batch', [(T('WriteBatch'),), (T('WriteBatch', dict(order=20)),), (T('RandomBatch', dict(p=.5)),), (T('PreviousBatch'),), (T('PreviousBatch', dict(order=5)),), (T('BatchPair'),),
    (T('IntToFloatTensor', dict(div=1.)),), (T('IntToFloatTensor', own='nothing'),), (T('IntToFloatTensor', own='encodes'),), (T('IntToFloatTensor', put=dict(div=100.)),), (T('int_batch', dict(order=30)),),
    (T('RandomErasing', dict(p=.5)), T('Rotate'), T('Brightness')), (T('RandomResizedCropGPU', dict(size=12)),), (T('IntToFloatTensor', put=dict(split_idx=0)),)], ids=str)
def test_transforms_of_batches(data, batch):
    for image in 'rgb.jpg','grey.png':
        for consumer in 'draws','writes','arrays': check(Pipeline(image=image, item=CROPPED, batch=batch, consumer=consumer), data)

@pytest.mark.parametrize('kw', [dict(loader={'before_batch':'<reversed>'}), dict(loader={'create_batch':'<collate>'}), dict(loader={'create_batch':'<fa_collate>'}), dict(loader={'n':9}), dict(loader={'drop_last':False}),
    dict(loader={'drop_last':True}, shuffle=False), dict(loader={'wif':'<reseed>'}), dict(new={'bs':3}), dict(new={'shuffle':False}), dict(new={'num_workers':1}), dict(bs=1), dict(bs=30), dict(prelude='one_batch'),
    dict(split='random'), dict(split='lists'), *[dict(derived=k) for k in DERIVED]], ids=str)
def test_arguments_and_subclasses_of_the_loader(data, kw):
    for workers in 0,2: check(Pipeline(item=CROPPED, workers=workers, **kw), data)

# Pixels

@workers
@pytest.mark.parametrize('size', [32, 64, 128, 224])
@pytest.mark.parametrize('name', ['Resize', 'RandomResizedCrop'])
def test_photographs_have_the_pixels_of_stock_at_every_size(photographs, name, size, workers):
    check(Pipeline(item=(T(name, dict(size=size)), T('FlipItem')), workers=workers), photographs)
