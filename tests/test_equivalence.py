"""Batches are what stock fastai makes of the same files, bit for bit, whatever the user adds

Each test compares whole epochs (training, validation, training again) of `Pipeline`s with stock fastai's, from Redis
and from shards: types, shapes, values, attributes, random numbers drawn between batches, and whether there is an error.

`test_any_pipeline` composes them. 2,000 of them, on two cores:

    PIPELINES=2000 python -m pytest tests/test_equivalence.py -k any_pipeline -n 2 --dist load
"""
import itertools, sys

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from pipelines import *


@pytest.fixture(scope='module')
def data(server, tmp_path_factory):
    "20 small images of each kind, with targets, as files, in Redis and in shards"
    return Data.make([sample(i) for i in range(N)], server.url, 'equivalence', tmp_path_factory.mktemp('equivalence'))

@pytest.fixture(scope='module')
def photographs(server, tmp_path_factory):
    "The same with a photograph each"
    rows = [{'rgb.jpg':photograph(i%PHOTOS), 'cls':TARGETS['cls'](i)} for i in range(N)]
    return Data.make(rows, server.url, 'photographs', tmp_path_factory.mktemp('photographs'))

STORES = 'redis','shards'

def check(data, *ps, stores=None, stock_works=True):
    "Fail if one of `ps` differs from stock fastai: over all of `stores`, or over one of the two by turns"
    jobs = [(p, where) for k,p in enumerate(ps) for where in stores or STORES[k%2:k%2+1]]
    verdicts = compared(jobs, data)
    bad = [f'{v.pipeline!r} over {v.where}\n  {v.difference}' for v in verdicts if v.difference]
    if bad: pytest.fail('\n'.join([f'{len(bad)} of {len(jobs)} differ from stock fastai:', *bad[:12]]), pytrace=False)
    failed = [f'{v.pipeline!r}\n{v.stock.error}' for v in verdicts if v.stock.error]
    if stock_works and failed:
        pytest.fail(f'{len(failed)} of {len(jobs)} say nothing, since stock fastai fails: {failed[0]}', pytrace=False)

CROPPED = T('RandomResizedCrop', dict(size=16)),T('FlipItem')
SIZED = T('Resize', dict(size=16))
SIZE = dict(size=16)
FASTAI = {'Resize':SIZE, 'RandomResizedCrop':SIZE, 'CropPad':SIZE, 'RandomCrop':SIZE, 'FlipItem':{}, 'DihedralItem':{}}
workers = pytest.mark.parametrize('workers', [0, 2])

# Labels

@workers
def test_subclass_of_categorize_runs_its_own_encodes(data, workers):
    check(data, Pipeline(target='own categorize', workers=workers, item=CROPPED), stores=STORES)

def test_subclasses_of_target_transforms_run_their_own_encodes(data):
    check(data, *[Pipeline(target=t, shuffle=shuffle, item=CROPPED) for t in TARGET_BLOCKS if t.startswith('own')
        for shuffle in (True, False)], stores=STORES)

def test_targets_are_as_in_stock(data):
    check(data, *[Pipeline(target=t, item=() if t in ('mask.png', 'picture') else CROPPED) for t in TARGET_BLOCKS
        if not t.startswith('own')])

@pytest.mark.parametrize('change,target', [('Categorize on str', 'cls'), ('Categorize on str', 'two'),
    ('MultiCategorize on list', 'labels')])
def test_extended_categorize_where_the_store_has_the_vocabulary(data, change, target):
    check(data, Pipeline(target=target, item=CROPPED, changes=(change,)), stores=STORES)

# Transforms with a memory

def placed(t):
    "Pipelines with `t` alone, after fastai's transforms, and before them"
    last,first = (replace(t, kw={**t.kw, 'order':k}) for k in (2, -1))
    return (t,),(*CROPPED, last),(last, SIZED),(first, SIZED)

@workers
def test_transform_that_reuses_a_buffer(data, workers):
    check(data, *[Pipeline(item=i, workers=workers) for i in placed(T('Buffer'))[::1+workers]])

@workers
def test_transform_that_changes_the_previous_item(data, workers):
    check(data, *[Pipeline(item=i, workers=workers) for i in placed(T('Previous'))[::1+workers]])

@workers
def test_transforms_with_a_state(data, workers):
    tfms = T('Delay'),T('Counter'),T('Reseed'),T('InPlace'),*[T('Rng', dict(kind=k)) for k in ('own', 'own numpy',
        'own torch', 'numpy', 'torch', 'python')]
    items = [placed(t)[1] for t in tfms]+[(*CROPPED, T(k)) for k in ('TensorBuffer', 'OnTensor',
        'written')]+[placed(T('Rng', dict(kind='python')))[3]]
    check(data, *[Pipeline(item=i, workers=workers) for i in items[::1+workers]])

# Fastai extended, in the way that its documentation shows

@workers
@pytest.mark.parametrize('change', ['ToTensor on PILImage', 'IntToFloatTensor on TensorImage'])
def test_extended_to_tensor_and_int_to_float(data, change, workers):
    check(data, Pipeline(item=CROPPED, changes=(change,), workers=workers), stores=STORES)

def test_functions_that_fastai_calls_for_a_crop_at_the_border_are_replaced(data):
    "Which a pipeline that crops inside the image does not call"
    check(data, *[Pipeline(item=(T(name, FASTAI[name], put=put),), changes=(f'vision.augment {function}',),
        shuffle=False)
        for function in ('tvpad', '_get_sz') for name in ('Resize', 'CropPad', 'RandomCrop')
        for put in ({}, {'order':0})], stores=STORES)

def of_change(change):
    "Image class, image and target that `change` is about"
    cls = 'PILImageBW' if 'BW' in change else 'Plain' if 'Plain' in change else 'PILImage'
    target = next((t for part,t in ((' float', 'age.f4'), (' int', 'k.i8'), ('Multi', 'multi'),
        ('Mask', 'mask.png')) if part in change and ' on ' in change), 'vocab')
    return dict(cls=cls, image='grey.png' if 'convert' in change else 'cut.jpg' if change=='truncated'
        else 'camera.jpg', target=target, changes=(change,), shuffle=False)

def plain(change):
    "A pipeline of fastai's transforms and nothing else, but for `change`"
    name = change.split(' on ')[0]
    item = (T(name, FASTAI[name]),) if name in FASTAI else (T('CropPad', dict(size=(30, 50))),
        T('RandomResizedCrop', dict(size=14)), T('FlipItem', put=dict(order=3)))
    return Pipeline(item=item+(() if 'Mask' in change else (T('DihedralItem', put=dict(order=2)),)),
        **of_change(change))

def showing(change):
    "A pipeline in which `change` has an effect, with transforms of a user, too"
    item = [T('CropPad', dict(size=(30, 50))), T('smaller'), SIZED, T('RandomResizedCrop', dict(size=14)),
        T('RandomCrop', dict(size=12), put=dict(order=2)), T('FlipItem'), T('Facts', dict(order=4))]
    if 'Mask' not in change: item.append(T('DihedralItem', put=dict(order=3)))
    if change=='ToTensor on TensorImage': item.append(T('to_tensor_image', dict(order=4)))
    return Pipeline(item=tuple(item), batch=(T('Normalize', dict(mean=.5, std=.2)),), consumer='holds',
        **of_change(change))

@pytest.fixture(scope='module')
def unchanged(data):
    "What stock fastai makes of `showing` where nobody has changed anything"
    jobs = {c:replace(showing(c), changes=()) for c in CHANGES}
    different = {repr(p):p for p in jobs.values()}
    records = dict(zip(different, run([(p, 'files', None) for p in different.values()], data)))
    return {c:records[repr(p)] for c,p in jobs.items()}

@pytest.mark.parametrize('change', CHANGES)
def test_what_a_user_does_to_fastai_is_done(data, unchanged, change):
    verdicts = compared([(plain(change), 'redis'), (showing(change), 'shards')], data)
    for v in verdicts:
        if v.difference: pytest.fail(f'{v.pipeline!r} over {v.where}\n{v.difference}', pytrace=False)
    assert difference(verdicts[1].stock, unchanged[change]), f'{change} does not show, so that this test says nothing'

def test_subclasses_of_item_transforms(data):
    # With plum 2.9, stock fastai fails with subclasses of `FlipItem` and `DihedralItem`
    ps = {(name, own):Pipeline(item=(T(name, FASTAI.get(name, {}), own=own),)) for own in OWN for name in [*FASTAI,
        'ToTensor'] if own!='before_call' or name not in ('ToTensor', 'CropPad')}
    check(data, *[p for (name,_),p in ps.items() if name not in ('FlipItem', 'DihedralItem')])
    check(data, *[p for (name,_),p in ps.items() if name in ('FlipItem', 'DihedralItem')], stock_works=False)

def test_attributes_that_a_user_sets_on_a_transform(data):
    tfms = [T('FlipItem', dict(p=1.), put=dict(split_idx=None)), T('FlipItem', dict(p=1.), put=dict(split_idx=1)),
        T('Resize', SIZE, put=dict(order=7)), T('FlipItem', put=dict(encodes='<encodes>')),
        T('Resize', SIZE, put=dict(encodes='<encodes>')), T('FlipItem', put=dict(before_call='<before_call>')),
        T('RandomResizedCrop', SIZE, put=dict(before_call='<before_call>')),
        T('FlipItem', put=dict(_call='<call>')), T('FlipItem', put=dict(order=6)),
        T('Resize', SIZE, put=dict(split_idx=0)), T('RandomResizedCrop', SIZE, put=dict(p=.5)),
        T('Resize', SIZE, put=dict(mode=Image.Resampling.LANCZOS)), T('FlipItem', put=dict(do=False))]
    check(data, *[Pipeline(item=(t,)) for t in tfms])
    # Images that stay images cannot be collated
    put = dict(_call='<call>'),dict(split_idx=0),dict(encodes='<encodes>')
    check(data, *[Pipeline(item=(T('ToTensor', put=o),)) for o in put], stock_works=False)

# What code of a user is given

def test_an_unknown_transform_sees_what_stock_shows_it(data):
    check(data, *[Pipeline(image=image, item=(T('Facts', dict(order=-1)),
        SIZED)) for image in IMAGES if image!='cut.jpg'])

KNOWN = [(), *[(T('Resize', dict(size=16, method=m)),) for m in ('crop', 'squish', 'pad')],
    (T('Resize', dict(size=(32, 40))),), (T('RandomResizedCrop', SIZE),), (T('CropPad', SIZE),),
    (T('CropPad', dict(size=50)),),
    (T('CropPad', dict(size=(32, 40))),), (T('RandomCrop', SIZE),), (T('FlipItem', dict(p=1.)),), (T('FlipItem'),),
    (T('DihedralItem'),), (T('RatioResize', dict(max_sz=20)),), (*CROPPED, T('DihedralItem', put=dict(order=4)))]

@pytest.mark.parametrize('cls,every', [('PILImage', 1), ('PILImageBW', 2), ('Plain', 3), ('AsIs', 3)])
def test_after_known_transforms_an_image_is_what_stock_makes_of_it(data, cls, every):
    check(data, *[Pipeline(image='camera.jpg', cls=cls, item=(*item, T('Facts', dict(order=4))),
        bs=1) for item in KNOWN[::every]])

def test_attributes_and_info_travel_as_in_stock(data):
    items = [(T('set_mine'), *CROPPED, T('ReadMine')), (T('set_mine'), T('FlipItem', put=dict(order=2)),
        T('ReadMine')), (T('ByExactType', dict(order=2)), *CROPPED),
        (T('Facts', dict(order=2)), SIZED, T('FlipItem', put=dict(order=3)), T('Facts', dict(order=4))),
        (T('upright'), SIZED), (*CROPPED, T('upright', dict(order=2))),
        (T('set_info'), SIZED, T('Facts', dict(order=4))), (T('pickled', dict(order=2)), *CROPPED),
        (T('deep_copied', dict(order=2)), *CROPPED, T('Facts', dict(order=4)))]
    check(data, *[Pipeline(image='camera.jpg', item=i) for i in items])

FUNCTIONS_OF_USERS = [f.__name__ for f in user_functions if 'batch' not in f.__name__ and f.__name__!='longest_first']

# Stock fastai may fail with these
NO_IMAGE = 'to_array','to_tensor_image','to_plain_tensor','twice','none_at_all','to_plain_pil'

@pytest.mark.parametrize('order', [-2, 2])
def test_functions_of_a_user(data, order):
    check(data, *[Pipeline(item=(T(name, dict(order=order)), *CROPPED)) for name in FUNCTIONS_OF_USERS
        if name not in NO_IMAGE])
    check(data, *[Pipeline(item=(T(name, dict(order=order)), *CROPPED)) for name in NO_IMAGE], stock_works=False)

@workers
def test_transforms_of_a_user(data, workers):
    items = [(T('Skip'), *CROPPED), (*CROPPED, T('Skip', dict(order=2))), (*CROPPED, T('OnPair', dict(order=2))),
        (T('OnPair'), *CROPPED),
        (T('Relabel'), *CROPPED), (T('Sometimes', dict(p=.5)), *CROPPED), (T('Shown'), *CROPPED)]
    check(data, *[Pipeline(item=i, workers=workers) for i in items[::1+workers]])
    check(data, *[Pipeline(item=i, workers=workers) for i in ((T('Raise'),), (T('NoRetain'), *CROPPED),
        (*CROPPED, T('NoRetain', dict(order=2))))], stock_works=False)

def test_transforms_in_the_block_of_the_image(data):
    check(data, *[Pipeline(image='camera.jpg', typed=(T(name),), item=CROPPED) for name in ('Buffer', 'Facts',
        'same_image', 'Counter', 'set_mine', 'Previous', 'inverted')])

def test_image_classes(data):
    check(data, *[Pipeline(image=image, cls=cls, item=CROPPED) for cls in CLASSES for image in ('camera.jpg',
        'alpha.png', 'cmyk.jpg')])

@pytest.mark.parametrize('entry', ['block', 'factory', 'opened'])
def test_kinds_of_images(data, entry):
    whole = [k for k in IMAGES if k not in ('sizes.jpg', 'sizes.png', 'thin.jpg', 'cut.jpg', 'mixed.img')]
    check(data, *[Pipeline(image=image, entry=entry, item=CROPPED) for image in IMAGES if image!='cut.jpg'])
    if entry=='block':
        check(data, *[Pipeline(image=image, cls=cls) for image in whole for cls in ('PILImage', 'PILImageBW')])
    check(data, *[Pipeline(image=image, entry=entry) for image in IMAGES if image not in whole], stock_works=False)

def test_item_transforms_of_fastai(data):
    sizes = 8,16,(12, 20),45
    items = [(T('Resize', dict(size=s, method=m, pad_mode=pad)),) for s in sizes for m in ('crop', 'squish',
        'pad') for pad in (('zeros', 'border', 'reflection') if m=='pad' else ('zeros',))]
    items += [(T(name, dict(size=s)), T('DihedralItem', put=dict(order=2))) for s in sizes
        for name in ('RandomResizedCrop', 'CropPad', 'RandomCrop', 'OldRandomCrop')]
    items += [(T('Resize', dict(size=16, resamples=(r, 0))),) for r in range(6)]+[(T('RatioResize', dict(max_sz=20)),
        T('RandomResizedCrop', SIZE)), (T('DihedralItem'), SIZED),
        (*CROPPED, T('RandomCrop', dict(size=9), put=dict(order=3)))]
    kinds = itertools.cycle([('large.jpg', 'PILImage'), ('sizes.jpg', 'PILImage'), ('large.jpg', 'PILImageBW')])
    ps = [Pipeline(image=image, cls=cls, item=i) for i,(image,cls) in zip(items, kinds)]
    check(data, *ps, stock_works=False)   # not with images that stay of different sizes

# Batches

def test_transforms_of_batches(data):
    batches = [(T('WriteBatch'),), (T('WriteBatch', dict(order=20)),), (T('RandomBatch', dict(p=.5)),),
        (T('PreviousBatch'),), (T('PreviousBatch', dict(order=5)),), (T('BatchPair'),),
        (T('IntToFloatTensor', dict(div=1.)),),
        (T('IntToFloatTensor', own='nothing'),), (T('IntToFloatTensor', own='encodes'),),
        (T('IntToFloatTensor', put=dict(div=100.)),), (T('int_batch', dict(order=30)),),
        (T('RandomErasing', dict(p=.5)), T('Rotate'), T('Brightness')),
        (T('RandomResizedCropGPU', dict(size=12)),), (T('IntToFloatTensor', put=dict(split_idx=0)),)]
    consumers = itertools.cycle(('draws', 'writes', 'arrays', 'holds'))
    check(data, *[Pipeline(image=image, item=CROPPED, batch=b,
        consumer=next(consumers)) for b in batches for image in ('rgb.jpg', 'grey.png')])

@workers
def test_arguments_and_subclasses_of_the_loader(data, workers):
    kws = [dict(loader={'before_batch':'<reversed>'}), dict(loader={'create_batch':'<collate>'}),
        dict(loader={'create_batch':'<fa_collate>'}), dict(loader={'n':9}), dict(loader={'drop_last':False}),
        dict(loader={'drop_last':True}, shuffle=False), dict(loader={'wif':'<reseed>'}), dict(new={'bs':3}),
        dict(new={'shuffle':False}), dict(new={'num_workers':1}), dict(bs=1), dict(bs=30), dict(prelude='one_batch'),
        dict(split='random'), dict(split='lists'), *[dict(derived=k) for k in DERIVED]]
    check(data, *[Pipeline(item=CROPPED, workers=workers, **kw) for kw in kws[::1+workers]])

def test_threads_that_make_batches_change_nothing(data):
    check(data, *[Pipeline(item=CROPPED, threads=threads, workers=workers, image=image) for threads,workers in ((1, 0),
        (3, 0), (2, 2)) for image in ('rgb.jpg', 'grey.png')])

# Pixels

@workers
@pytest.mark.parametrize('size', [32, 64, 128, 224])
def test_photographs_have_the_pixels_of_stock_at_every_size(photographs, size, workers):
    check(photographs, *[Pipeline(item=(T(name, dict(size=size)), T('FlipItem')),
        workers=workers) for name in ('Resize', 'RandomResizedCrop')])

# Any pipeline

def of(*values): return st.sampled_from(values)

def rarely(n, *values): return of(*[values[0]]*n, *values[1:])

@st.composite
def transforms(draw, name, changes=True, **kwargs):
    "Transform `name` with arguments from `kwargs`, and maybe something that a user changes about it"
    kw = {k:v for k,s in kwargs.items() if (v:=draw(s)) is not None}
    if not changes or draw(st.integers(0, 3)): return T(name, kw)
    random_one = name not in ('CropPad', 'RatioResize', 'OldRandomCrop', 'ToTensor', 'Normalize', 'IntToFloatTensor')
    if draw(st.booleans()) and name not in ('FlipItem', 'DihedralItem'):
        return T(name, kw, own=draw(of(*[k for k in OWN if k!='before_call' or random_one])))
    put = {'order':of(0, 1, 2, 3, 4, 6), 'split_idx':of(None, 0, 1), 'encodes':of('<encodes>'), '_call':of('<call>')}
    if random_one: put.update(p=of(0., .5, 1.), before_call=of('<before_call>'))
    key = draw(of(*put))
    return T(name, kw, put={key:draw(put[key])})

side = of(16, 8, 9, (12, 20), (21, 10), 45)
sizing = st.one_of(
    transforms('Resize', size=side, method=of(None, 'squish', 'pad', 'crop'),
    pad_mode=of(None, 'zeros', 'border', 'reflection'), resamples=rarely(4, None, (3, 0), (1, 0), (0, 0))),
    transforms('RandomResizedCrop', size=side, min_scale=of(None, .3, 1.), val_xtra=of(None, 0., .5),
    ratio=rarely(3, None, (1., 1.)), p=rarely(4, None, .5)),
    transforms('CropPad', size=side, pad_mode=of(None, 'border', 'reflection')), transforms('RandomCrop', size=side),
    transforms('OldRandomCrop', size=side), transforms('RatioResize', max_sz=of(20, 60)))
turning = st.one_of(transforms('FlipItem', p=of(None, 0., .3, 1.)), transforms('DihedralItem', p=of(None, .5)),
    transforms('ToTensor'))
place = of(-2, -1, 0, 1, 2, 3, 4)
def users_at(place):
    return st.one_of(
        *[transforms(k, changes=False, order=place) for k in ('Facts', 'Buffer', 'Previous', 'Delay', 'Counter',
        'Reseed', 'Skip', 'Raise', 'OnPair', 'NoRetain', 'InPlace', 'ByExactType', 'ReadMine', 'Relabel')],
        transforms('Rng', changes=False, order=place, kind=of('own', 'own numpy', 'own torch', 'numpy', 'torch',
        'python')), transforms('Sometimes', p=of(.5, 1.)), transforms('Shown'),
        of(T('TensorBuffer'), T('OnTensor')), *[transforms(k, changes=False, order=place) for k in FUNCTIONS_OF_USERS])

# In a block, what comes before the getter is given the item itself, which is another one
users,later_users = users_at(place),users_at(of(0, 1, 2))
batched = st.one_of(
    transforms('IntToFloatTensor', div=of(None, 1., 100.), div_mask=of(None, 2)),
    transforms('Normalize', mean=of(.4), std=of(.2)), transforms('WriteBatch', changes=False, order=of(-5, 5, 20)),
    transforms('PreviousBatch', changes=False, order=of(5, 20)), transforms('RandomBatch', p=of(.5, 1.)),
    of(T('BatchPair')), *[transforms(k, changes=False, order=of(-5, 15)) for k in ('noop_batch', 'doubled_batch',
    'int_batch', 'cloned_batch')],
    transforms('aug_transforms', changes=False, size=of(None, 12), flip_vert=of(None, True), max_warp=of(None, 0.),
    batch=of(None, True), do_flip=of(None, False)), transforms('RandomErasing', changes=False, p=of(.5)),
    transforms('RandomResizedCropGPU', changes=False, size=of(12)), transforms('Rotate', changes=False, p=of(.5)),
    transforms('Brightness', changes=False))
DRAWS = 'RandomBatch','aug_transforms','RandomErasing','RandomResizedCropGPU','Rotate','Brightness'

OF_LOADER = [{'new':{'bs':3}}, {'new':{'shuffle':False}}, {'new':{'drop_last':False}},
    *[{'derived':k} for k in DERIVED],
    *[{'loader':o} for o in ({'n':9}, {'n':3}, {'drop_last':False}, {'drop_last':True}, {'before_batch':'<reversed>'},
    {'create_batch':'<collate>'}, {'create_batch':'<fa_collate>'}, {'wif':'<reseed>'})]]

@st.composite
def any_pipelines(draw):
    "A pipeline: mostly of fastai's own transforms, with one or two things of a user"
    def chance(part, strategy, otherwise=()): return draw(strategy) if draw(st.integers(0, 9))>=10-part else otherwise
    entry = draw(rarely(3, 'block', 'factory', 'opened'))
    item = [*chance(8, st.tuples(sizing)), *chance(6, st.lists(turning, min_size=1, max_size=2)),
        *chance(6, st.lists(users, min_size=1, max_size=2))]
    batch = chance(3, st.lists(batched, min_size=1, max_size=2))
    ahead = not {t.name for t in batch} & set(DRAWS)   # threads draw for the next batch before this one is given out
    return Pipeline(
        image=draw(rarely(10, *IMAGES)), cls=draw(rarely(20, *CLASSES)), entry=entry,
        target=draw(rarely(12, *(FACTORY_TARGETS if entry=='factory' else TARGET_BLOCKS))),
        typed=chance(1, st.tuples(later_users)) if entry!='factory' else (), item=tuple(item), batch=tuple(batch),
        changes=tuple(chance(4, st.lists(of(*CHANGES), min_size=1, max_size=2, unique=True))),
        split=draw(rarely(2, 'store', 'random', 'lists')), bs=draw(of(4, 1, 3, 7, 30)), workers=draw(rarely(7, 0, 2)),
        shuffle=draw(st.booleans()), prelude=draw(rarely(4, '', 'one_batch')),
        consumer=draw(rarely(3, 'draws', 'holds', 'arrays', 'writes')), threads=draw(rarely(6, 0, 2)) if ahead else 0,
        **chance(3, of(*OF_LOADER), {}))

PIPELINES = int(os.environ.get('PIPELINES', 30))
PARTS = max(1, PIPELINES//5)   # for several processes, and of which `make test` runs the first
same_examples = settings(max_examples=2, deadline=None, database=None, suppress_health_check=list(HealthCheck))

def each_pipeline(seeds, f, **kwargs):
    """Call `f` with a pipeline for each seed, and with smaller ones if it fails

    Each seed is a search of its own, whose first example is the simplest: a long one mostly varies its last."""
    done = set()
    for k in seeds:
        @seed(k)
        @settings(same_examples, **kwargs)
        @given(any_pipelines())
        def once(p):
            if repr(p) not in done: f(p)
            done.add(repr(p))
        once()

@pytest.mark.parametrize('part', range(PARTS))
def test_any_pipeline(data, part):
    def is_as_stock(p):
        for v in compared([(p, where) for where in STORES], data):
            assert v.difference is None, f'{v.where}: {v.difference}'
    each_pipeline(range(part, PIPELINES, PARTS), is_as_stock)

# Broken on purpose

def everywhere(monkeypatch, old, new):
    "Put `new` wherever a module of the package has `old`, and in the module that it comes from"
    for name,m in list(sys.modules.items()):
        if not name.startswith('fastai_remote'): continue
        for k,v in list(vars(m).items()):
            if v is old: monkeypatch.setattr(m, k, new)

def spoils_reads(spoil):
    "Break the functions in C that decode and resize: `spoil(pixels, arguments)` afterwards"
    def do(monkeypatch):
        for name in '_jpeg','_pixels':
            m = sys.modules.get(f'fastai_remote.codec.{name}') or pytest.skip('the C modules are not built')
            def read(*args, was=m.read):
                res = was(*args)
                spoil([a for a in args if isinstance(a, np.ndarray)][-1], args)
                return res
            everywhere(monkeypatch, m.read, read)
    return do

def flipped_wrongly(out, args):
    turn = next((a for a in args if isinstance(a, tuple) and len(a)==3 and all(type(o) is bool for o in a)),
        (False, True, False))
    if turn[1]: out[:] = out[:, ::-1, ::-1].copy()

def shifted(out, args): out[:] = np.roll(out, 1, -1)

def one_value(out, args): out[0, 0, 0] ^= 1

def values_swapped(field):
    "Break the reading of batches: two values of one field change places"
    def do(monkeypatch):
        for cls in fastai_remote.RedisStore,fastai_remote.ShardStore:
            def get_many(self, *args, was=cls.get_many, **kwargs):
                res = dict(was(self, *args, **kwargs))
                if field in res and len(res[field])>1:
                    res[field] = type(res[field])(res[field]) if isinstance(res[field], list) else res[field].copy()
                if field in res and len(res[field])>1: res[field][0],res[field][1] = res[field][1],res[field][0]
                return res
            monkeypatch.setattr(cls, 'get_many', get_many)
    return do

BROKEN = {'a flip in the wrong direction':spoils_reads(flipped_wrongly),
    'a crop that is a pixel off':spoils_reads(shifted), 'one bit of one pixel':spoils_reads(one_value),
    'two labels swapped on the way':values_swapped('cls'), 'two pictures swapped on the way':values_swapped('rgb.jpg')}

class Detected(Exception): "A pipeline that is equivalent, and is not when the fast path is broken"

def detects(monkeypatch, data, break_it, broken_data=None):
    "Do the pipelines of `test_any_pipeline` find it?"
    def differs(p, data): return any(v.difference for v in compared([(p, where) for where in STORES], data))
    def search(p):
        with monkeypatch.context() as m:
            break_it(m)
            bad = differs(p, broken_data or data)
        if bad and not differs(p, data): raise Detected(repr(p))
    with pytest.raises(Detected): each_pipeline(range(PIPELINES), search, phases=[Phase.generate])

@pytest.mark.parametrize('how', BROKEN)
def test_a_broken_fast_path_is_detected(data, monkeypatch, how): detects(monkeypatch, data, BROKEN[how])

def test_two_labels_swapped_in_the_store_are_detected(data, server, monkeypatch, tmp_path):
    rows = [sample(i) for i in range(N)]
    i = next(i for i in range(N) if rows[i]['cls']!=rows[i+1]['cls'])
    rows[i]['cls'],rows[i+1]['cls'] = rows[i+1]['cls'],rows[i]['cls']
    swapped = Data.make(rows, server.url, 'swapped', tmp_path)
    detects(monkeypatch, data, lambda m: None, Data(data.files, swapped.stores))
