"""Batches are what stock fastai makes of the same files, bit for bit, whatever the user adds

Each test compares whole epochs (training, validation, training again) of `Pipeline`s with stock fastai's, from Redis
and from shards: types, shapes, values, attributes, random numbers drawn between batches, and whether there is an error.

`test_any_pipeline` composes them. 2,000 of them, on two cores:

    PIPELINES=2000 python -m pytest tests/test_equivalence.py -k any_pipeline -n 2 --dist load
"""
import itertools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, seed, settings, strategies as st
from pipelines import *


@pytest.fixture(scope='module')
def data(server, tmp_path_factory):
    "20 small images of each kind, with targets, as files, in Redis and in shards"
    return Data.make([sample(i) for i in range(N)], server.url, 'equivalence', tmp_path_factory.mktemp('equivalence'))

STORES = 'redis','shards'

def check(data, ps, stock_works=True):
    "Fail if one of `ps` differs from stock fastai, over Redis and shards by turns"
    verdicts = compared([(p, STORES[k%2]) for k,p in enumerate(ps)], data)
    bad = [f'{v.pipeline!r} over {v.where}\n  {v.difference}' for v in verdicts if v.difference]
    if bad: pytest.fail('\n'.join([f'{len(bad)} of {len(ps)} differ from stock fastai:', *bad[:12]]), pytrace=False)
    failed = [f'{v.pipeline!r}\n{v.stock.error}' for v in verdicts if v.stock.error]
    if stock_works and failed:
        pytest.fail(f'{len(failed)} of {len(ps)} say nothing, since stock fastai fails: {failed[0]}', pytrace=False)

SIZE = dict(size=16)
SIZED = T('Resize', SIZE)
CROPPED = T('RandomResizedCrop', SIZE),T('FlipItem')
FASTAI = {'Resize':SIZE, 'RandomResizedCrop':SIZE, 'CropPad':SIZE, 'RandomCrop':SIZE, 'FlipItem':{}, 'DihedralItem':{}}

# Pipelines that once were wrong, or that have a part of the code to themselves

def placed(t):
    "Item transforms with `t` alone, after fastai's transforms, and before them"
    last,first = (replace(t, kw={**t.kw, 'order':k}) for k in (2, -1))
    return (t,),(*CROPPED, last),(last, SIZED),(first, SIZED)

def items(*tfms, **kwargs): return [Pipeline(item=i, **kwargs) for i in tfms]

def of_targets(*targets, **kwargs): return [Pipeline(target=t, item=CROPPED, **kwargs) for t in targets]

def each(name, values, **kwargs): return [Pipeline(**{name:v, 'item':CROPPED, **kwargs}) for v in values]

METHODS = [dict(method=m, pad_mode=pad) for m,pad in (('crop', 'zeros'), ('squish', 'zeros'), ('pad', 'zeros'),
    ('pad', 'border'), ('pad', 'reflection'))]
SIZES = 8,(12, 20),45
RESIZED = [(T('Resize', {'size':s, **m}),) for s in SIZES for m in METHODS]
RESIZED += [(T('Resize', dict(size=16, resamples=(r, 0))),) for r in range(6)]
RESIZED += [(T(name, dict(size=s)), T('DihedralItem', put=dict(order=2))) for s in SIZES
    for name in ('RandomResizedCrop', 'CropPad', 'RandomCrop', 'OldRandomCrop')]
KNOWN = [(), *[(T('Resize', {'size':16, **m}),) for m in METHODS[:3]], (T('Resize', dict(size=(32, 40))),),
    (T('RandomResizedCrop', SIZE),), *[(T('CropPad', dict(size=s)),) for s in (16, 50, (32, 40))],
    (T('RandomCrop', SIZE),), (T('FlipItem', dict(p=1.)),), (T('DihedralItem'),), (T('RatioResize', dict(max_sz=20)),)]
FACTS = T('Facts', dict(order=4))
WITH_MEMORY = T('Buffer'),T('Previous'),T('Counter'),T('InPlace'),T('Draws')
ALL = [k for k in IMAGES if k!='cut.jpg']
ONE_SIZE = [k for k in IMAGES if k.split('.')[0] not in ('sizes', 'thin', 'cut', 'large', 'mixed')]
BATCHES = [(T('WriteBatch'),), (T('WriteBatch', dict(order=20)),), (T('RandomBatch', dict(p=.5)),),
    (T('PreviousBatch'),), (T('PreviousBatch', dict(order=5)),), (T('BatchPair'),),
    *[(T('IntToFloatTensor', dict(div=d)),) for d in (100., np.float32(3), tensor(7.),
        tensor([58.4, 57.1, 57.4])[:, None, None])],
    (T('IntToFloatTensor', own='nothing'),), (T('IntToFloatTensor', put=dict(split_idx=0)),),
    (T('int_batch', dict(order=30)),), (T('RandomErasing', dict(p=.5)), T('Rotate'), T('Brightness')),
    (T('RandomResizedCropGPU', dict(size=12)),)]
def normalize(n=3, own='', **put):
    return T('Normalize', {k:tensor(v[:n])[None,:,None,None] for k,v in STATS.items()}, own=own, put=put)

STATS = dict(mean=[.4,.5,.6], std=[.2,.3,.1])
NORMALIZED = [(T('Normalize'),), (normalize(),), (normalize(1),), (normalize(mean=torch.rand(1, 3, 16, 16)),),
    (normalize(std=torch.rand(1, 3, 1, 1).double()),), (normalize(mean=TensorMask(torch.rand(1, 3, 1, 1))),),
    (normalize(mean=torch.rand(1, 3, 1, 1, requires_grad=True)),), (normalize(split_idx=1),), (normalize(order=5),),
    (normalize(), normalize()), (T('Brightness', dict(p=1, draw=.7)), normalize()), (normalize(own='nothing'),)]
DURINGS = [k for k in DURING if k not in OF_NORMALIZE]
PUT = [T('FlipItem', dict(p=1.), put=dict(split_idx=1)), T('FlipItem', put=dict(encodes='<encodes>')),
    T('FlipItem', put=dict(before_call='<before_call>')), T('FlipItem', put=dict(order=6)),
    T('ToTensor', put=dict(_call='<call>')),
    T('Resize', SIZE, put=dict(order=7)), T('Resize', SIZE, put=dict(split_idx=0)),
    T('Resize', SIZE, put=dict(mode=Image.Resampling.LANCZOS)), T('RandomResizedCrop', SIZE, put=dict(p=.5))]

OF_LOADER = [{'new':{'bs':3}}, {'new':{'shuffle':False}}, {'new':{'drop_last':False}}, {'new':{'num_workers':1}},
    *[{'derived':k} for k in DERIVED], *[{'prepared':k} for k in PREPARED],
    *[{'loader':o} for o in ({'n':9}, {'n':3}, {'drop_last':False}, {'drop_last':True}, {'before_batch':'<reversed>'},
    {'create_batch':'<collate>'}, {'wif':'<reseed>'})]]

LISTED = {
    'targets':of_targets(*[t for t in TARGET_BLOCKS if t not in ('mask.png', 'picture')]),
    'targets that are pictures':[Pipeline(target=t, item=()) for t in ('mask.png', 'picture')],
    'points and boxes with augmentations':[Pipeline(target=t, item=(item,), batch=(T('aug_transforms', dict(size=12)),))
        for t in ('points', 'boxes', 'mask.png') for item in (SIZED, CROPPED[0])],
    'transforms extended where the store has the vocabulary':of_targets('cls', 'two', changes=('Categorize on str',))
        +of_targets('labels', changes=('MultiCategorize on list',)),
    'numbers of other default types':of_targets('w.f8', 'k.i8', changes=('default torch.float16',))
        +of_targets('w.f8', 'k.i8', changes=('default torch.float64',)),
    'transforms with a memory':items(*[i for k,t in enumerate(WITH_MEMORY) for i in placed(t)[k%2::2]],
        (*CROPPED, T('OnTensor'))),
    'transforms with a memory in two workers':items(*[placed(T(name))[1] for name in ('Buffer', 'Draws')], workers=2),
    'attributes of transforms':items(*[(t,) for t in PUT]),
    'what an unknown transform sees':[Pipeline(image=k, item=(T('Facts', dict(order=-1)), SIZED)) for k in ALL],
    'what it sees after known ones':items(*[(*i, FACTS) for i in KNOWN], image='camera.jpg', bs=1),
    'what it sees of grey images':items(*[(*i, FACTS) for i in KNOWN[::2]], image='camera.jpg', cls='PILImageBW', bs=1),
    'attributes and info':items((T('set_mine'), *CROPPED, FACTS), (T('Facts', dict(order=2)), SIZED,
        T('FlipItem', put=dict(order=3)), FACTS), (T('pickled', dict(order=2)), *CROPPED, FACTS), image='camera.jpg'),
    'functions of a user':items(*[(T(f.__name__, dict(order=order)), *CROPPED) for f,order in zip(item_functions,
        itertools.cycle((-2, 2))) if f.__name__ not in NO_IMAGE]),
    'transforms of a user':items(*[i for name in ('Skip', 'OnPair') for i in ((T(name), *CROPPED), (*CROPPED, T(name,
        dict(order=2))))]),
    'transforms in the block':each('typed', [(T(k),) for k in ('Buffer', 'Facts', 'same', 'inverted')],
        image='camera.jpg'),
    'image classes':each('cls', CLASSES, image='camera.jpg')+each('cls', list(CLASSES)[::2], image='alpha.png'),
    'kinds of images':[p for entry,kinds in (('block', ALL), ('factory', ALL[::5]), ('opened', ALL[2:20:5]))
        for p in each('image', kinds, entry=entry)],
    'whole images':each('image', ONE_SIZE, item=())+each('image', ONE_SIZE[::2], cls='PILImageBW', item=()),
    'without C':[Pipeline(image=k, item=i, changes=('no_c_modules',)) for k in ('large.jpg', 'grey.png', 'rgb.png')
        for i in (*KNOWN[1:8:2], CROPPED)]+each('image', ['grey.png', 'rgb.jpg'], item=(), changes=('no_c_modules',)),
    'large images':[Pipeline(image='large.jpg', item=(T(name, dict(size=size)), T('FlipItem'))) for size in (16, 32, 64,
        128) for name in ('Resize', 'RandomResizedCrop')],
    'several sizes':items((T('DihedralItem'), SIZED), (T('RatioResize', dict(max_sz=20)), T('RandomResizedCrop', SIZE)),
        (*CROPPED, T('RandomCrop', dict(size=9), put=dict(order=3))), image='large.jpg'),
    'batch transforms':[Pipeline(image=image, item=CROPPED, batch=b, consumer=consumer)
        for b,consumer,image in zip(BATCHES, itertools.cycle(('draws', 'writes', 'arrays', 'holds')),
        itertools.cycle(('rgb.jpg', 'grey.png', 'rgb.jpg')))],
    'one channel':[Pipeline(image=image, batch=b, workers=w) for image in ('grey.png', 'drawn.strokes')
        for b,w in (((), 1), ((T('WriteBatch', dict(order=-5)),), 0))],
    'loaders':[Pipeline(item=CROPPED, **kw) for kw in (*OF_LOADER, dict(bs=1), dict(bs=30), dict(split='random'),
        dict(split='lists')) if 'prepared' not in kw],
    'loaders with workers':[Pipeline(**{'item':CROPPED, 'workers':2, **kw}) for kw in (
        dict(loader={'wif':'<reseed>'}), dict(loader={'n':9}, split='lists', workers=1),
        dict(new={'bs':3}, derived='create_batches'), dict(item=(*CROPPED, T('Skip', dict(order=2)))),
        dict(item=(T('Resize', dict(size=128)),), image='large.jpg', consumer='writes', workers=1))],
    'threads':[Pipeline(item=CROPPED, threads=t, workers=w, image=image) for t,w in ((1, 0), (3, 0), (2, 1))
        for image in ('rgb.jpg', 'grey.png')],
    'prepared loaders':[p for item in (CROPPED, (SIZED, T('same', dict(order=2)))) for p in each('prepared', PREPARED,
        target='vocab', item=item)],
    'normalised':[Pipeline(image=image, cls=cls, item=(SIZED,), batch=batch, changes=changes, shuffle=False)
        for image,cls,changes in (('rgb.jpg', 'PILImage', ()), ('grey.png', 'PILImage', ()),
            ('rgb.jpg', 'PILImageBW', ()), ('rgb.png', 'PILImage', ('no_c_modules',))) for batch in NORMALIZED[:3]]
        +[Pipeline(item=(SIZED,), batch=batch) for batch in NORMALIZED[3:]]
        +each('during', OF_NORMALIZE, batch=NORMALIZED[1]),
    'changed during an epoch':each('during', [k for k in DURINGS if k!='only ToTensor'])+each('during', DURINGS, bs=1)
        +each('during', DURINGS, item=(SIZED, T('same', dict(order=3))), bs=1)
        +each('during', [k for k in DURINGS if DURING[k][0]=='after_batch'], threads=2),
    'written to while a worker sends one channel':each('during', ['a transform is added'], image='grey.png', item=(),
        workers=1),
    'a crop at the border':[Pipeline(item=(T(name, SIZE, put=put),), changes=(f'vision.augment.{function}',),
        shuffle=False) for function in ('tvpad', '_get_sz') for name in ('Resize', 'CropPad', 'RandomCrop')
        for put in ({}, {'order':0})],
}
MAY_FAIL = {   # in stock, which then has to fail here, too
    'images of many sizes':[Pipeline(image=image, cls=cls, item=i) for i,(image,cls) in zip(RESIZED, itertools.cycle(
        [('large.jpg', 'PILImage'), ('sizes.jpg', 'PILImage'), ('large.jpg', 'PILImageBW')]))],
    'images that are left as they are':[Pipeline(image=image) for image in IMAGES if image not in ONE_SIZE],
    'functions that give no image':items(*[(T(name, dict(order=order)), *CROPPED) for name in NO_IMAGE
        for order in (-2, 2)]),
    'transforms that fail':items(*[i for t in (T('Raise'), T('NoRetain')) for i in placed(t)[::2]]),
    'transforms that fail in two workers':items((T('Raise'),), (T('NoRetain'), *CROPPED), workers=2),
    'attributes of ToTensor':items(*[(T('ToTensor', put=o),) for o in (dict(split_idx=0), dict(encodes='<encodes>'))]),
    # With plum 2.9, stock fastai fails with subclasses of `FlipItem` and `DihedralItem`
    'subclasses of item transforms':items(*[(T(name, FASTAI.get(name, {}), own=own),) for own in ('nothing', '__call__')
        for name in (*FASTAI, 'ToTensor')]),
}

QUICK = ('targets that are pictures', 'transforms extended where the store has the vocabulary', 'attributes and info',
    'several sizes', 'images that are left as they are', 'functions that give no image', 'transforms that fail',
    'transforms that fail in two workers', 'attributes of ToTensor')

def some_slow(names, quick): return [o if o in quick else pytest.param(o, marks=pytest.mark.slow) for o in names]

@pytest.mark.parametrize('what', some_slow([*LISTED, *MAY_FAIL], QUICK))
def test_listed_pipelines_are_as_in_stock_fastai(data, what):
    check(data, {**LISTED, **MAY_FAIL}[what], stock_works=what in LISTED)

# What a user does to fastai

def of_change(change):
    "Image class, image and target that `change` is about"
    cls = 'PILImageBW' if 'BW' in change else 'Plain' if 'Plain' in change else 'PILImage'
    target = next((t for part,t in ((' float', 'age.f4'), (' int', 'k.i8'), ('Multi', 'labels'), ('Mask', 'mask.png'))
        if part in change and ' on ' in change), 'w.f8' if 'default t' in change else 'vocab')
    image = 'grey.png' if 'convert' in change else 'cut.jpg' if change=='truncated' else 'camera.jpg'
    return dict(cls=cls, image=image, target=target, changes=(change,), shuffle=False)

def plain(change):
    "A pipeline of fastai's transforms and nothing else, but for `change`"
    name = change.split(' on ')[0]
    item = (T(name, FASTAI[name]),) if name in FASTAI else (T('CropPad', dict(size=(30, 50))),
        T('RandomResizedCrop', dict(size=14)), T('FlipItem', put=dict(order=3)))
    return Pipeline(item=item+(() if 'Mask' in change else (T('DihedralItem', put=dict(order=2)),)),
        **of_change(change))

def showing(change):
    """A pipeline in which `change` has an effect, with transforms of a user after those of fastai

    These come first, as images may stay undecoded up to the first one of a user."""
    item = [T('CropPad', dict(size=(30, 50))), SIZED, T('RandomResizedCrop', dict(size=14)),
        T('RandomCrop', dict(size=11), put=dict(order=2)), T('FlipItem'), FACTS, T('smaller', dict(order=4.5))]
    if 'Mask' not in change: item.append(T('DihedralItem', put=dict(order=3)))
    return Pipeline(item=tuple(item), batch=(T('Normalize', dict(mean=.5, std=.2)),), consumer='holds',
        **of_change(change))

@pytest.fixture(scope='module')
def unchanged(data):
    "What stock fastai makes of `showing` where nobody has changed anything"
    jobs = {c:replace(showing(c), changes=()) for c in CHANGES}
    different = {repr(p):p for p in jobs.values()}
    records = dict(zip(different, run([(p, 'files', None) for p in different.values()], data)))
    return {c:records[repr(p)] for c,p in jobs.items()}

# Methods that images inherit. Of each, the one of one class is changed here; that all are noticed is tested below.
INHERITED = 'convert crop resize copy transpose flip_lr crop_pad _do_crop_pad'.split()
OF_ONE_CLASS = {f'{cls}.{name}' for name,cls in zip(INHERITED, itertools.cycle(('Image', 'PILBase', 'PILImage')))}

@pytest.mark.slow
@pytest.mark.parametrize('change', [c for c in CHANGES if c!='no_c_modules'
    and (c in OF_ONE_CLASS or c.rpartition('.')[2] not in INHERITED)])
def test_what_a_user_does_to_fastai_is_done(data, unchanged, change):
    "That batches are not built as a whole then is what the last of these tests is about"
    p,where = showing(change),STORES[len(change)%2]
    stock,ours = run([(p, 'files', None), (p, where, None)], data)   # in one process: nothing is shuffled
    if found:=difference(ours, stock): pytest.fail(f'{p!r} over {where}\n{found}', pytrace=False)
    assert difference(stock, unchanged[change]), f'{change} does not show, so that this test says nothing'

# What building batches calls or reads itself
HARMLESS = {'default torch.float64', 'few_pixels', 'no_c_modules', 'truncated'}

@pytest.mark.slow
def test_changes_that_whole_batches_follow_are_done(data):
    check(data, [plain(change) for change in sorted(HARMLESS)], stock_works=False)   # of too few pixels, stock fails

@pytest.mark.slow
def test_whatever_a_user_does_to_fastai_is_noticed(data):
    "Whole batches are built at once, and floats in reused memory, only while nothing is changed"
    loaders = {repr(p):dls_of_store(p, data.stores['redis'], 'redis').train
        for p in (replace(plain(c), changes=()) for c in CHANGES)}
    def is_fast(change):
        if change: CHANGES[change]()
        dl = loaders[repr(replace(plain(change), changes=()))]
        return dl.explain().startswith('Whole batches are built at once') and len(dl.after_batch.known_tfms())>0
    assert is_fast('')
    assert {c for c in CHANGES if start_fork(is_fast, c)()}==HARMLESS

# Any pipeline

def of(*values): return st.sampled_from(values)

def rarely(n, *values): return of(*[values[0]]*n, *values[1:])

@st.composite
def transforms(draw, name, changes=True, **kwargs):
    "Transform `name` with arguments from `kwargs`, and maybe something that a user changes about it"
    kw = {k:v for k,s in kwargs.items() if (v:=draw(s)) is not None}
    if not changes or draw(st.integers(0, 3)): return T(name, kw)
    if draw(st.booleans()) and name not in ('FlipItem', 'DihedralItem'):
        return T(name, kw, own=draw(of('nothing', '__call__')))
    put = {'order':of(0, 1, 2, 3, 4, 6), 'split_idx':of(None, 0, 1), 'encodes':of('<encodes>'), '_call':of('<call>')}
    if name in ('RandomResizedCrop', 'RandomCrop', 'FlipItem', 'DihedralItem', 'Resize', 'RandomErasing'):
        put.update(p=of(0., .5, 1.), before_call=of('<before_call>'))
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
    names = [k for k in USERS if k not in ('OnTensor', 'WriteBatch', 'RandomBatch', 'PreviousBatch', 'BatchPair',
        'int_batch')]
    return st.one_of(*[transforms(k, changes=False, order=place) for k in names], of(T('OnTensor')))

# In a block, what comes before the getter is given the item itself, which is another one
users,later_users = users_at(place),users_at(of(0, 1, 2))
batched = st.one_of(
    transforms('IntToFloatTensor', div=of(None, 1., 100.), div_mask=of(None, 2)),
    transforms('Normalize', mean=of(.4), std=of(.2)), transforms('WriteBatch', changes=False, order=of(-5, 5, 20)),
    transforms('PreviousBatch', changes=False, order=of(5, 20)), transforms('RandomBatch', p=of(.5, 1.)),
    of(T('BatchPair')), transforms('int_batch', changes=False, order=of(-5, 15)),
    transforms('aug_transforms', changes=False, size=of(None, 12), flip_vert=of(None, True), max_warp=of(None, 0.),
    batch=of(None, True), do_flip=of(None, False)), transforms('RandomErasing', changes=False, p=of(.5)),
    transforms('RandomResizedCropGPU', changes=False, size=of(12)), transforms('Rotate', changes=False, p=of(.5)),
    transforms('Brightness', changes=False))
DRAWS = 'RandomBatch','aug_transforms','RandomErasing','RandomResizedCropGPU','Rotate','Brightness'

@st.composite
def any_pipelines(draw):
    "A pipeline: mostly of fastai's own transforms, with one or two things of a user"
    def chance(part, strategy, otherwise=()): return draw(strategy) if draw(st.integers(0, 9))>=10-part else otherwise
    entry = draw(rarely(3, 'block', 'factory', 'opened'))
    item = [*chance(8, st.tuples(sizing)), *chance(6, st.lists(turning, min_size=1, max_size=2)),
        *chance(6, st.lists(users, min_size=1, max_size=2))]
    batch = chance(3, st.lists(batched, min_size=1, max_size=2))
    ahead = not {t.name for t in batch} & set(DRAWS)   # threads draw for the next batch before this one is given out
    workers,threads = draw(rarely(7, 0, 2)),draw(rarely(6, 0, 2)) if ahead else 0
    own_process = not workers and not threads
    during = draw(rarely(12, '', *[k for k in DURINGS if own_process or DURING[k][0]=='after_batch']))
    images = [k for k in IMAGES if entry!='opened' or not k.endswith(('npyimg', 'npzimg', 'strokes'))]
    return Pipeline(
        image=draw(rarely(10, *images)), cls=draw(rarely(20, *CLASSES)), entry=entry,
        target=draw(rarely(12, *(FACTORY_TARGETS if entry=='factory' else TARGET_BLOCKS))),
        typed=chance(1, st.tuples(later_users)) if entry!='factory' else (), item=tuple(item), batch=tuple(batch),
        changes=tuple(chance(4, st.lists(of(*CHANGES), min_size=1, max_size=2, unique=True))),
        split=draw(rarely(2, 'store', 'random', 'lists')), bs=draw(of(4, 1, 3, 7, 30)), workers=workers, during=during,
        threads=threads, shuffle=draw(st.booleans()),
        consumer=draw(rarely(3, 'draws', 'holds', 'arrays', 'writes')),
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

@pytest.mark.parametrize('part', some_slow(range(PARTS), [0]))
def test_any_pipeline(data, part):
    def is_as_stock(p):
        verdict, = compared([(p, STORES[part%2])], data)
        assert verdict.difference is None, f'{verdict.where}: {verdict.difference}'
    each_pipeline(range(part, PIPELINES, PARTS), is_as_stock)
