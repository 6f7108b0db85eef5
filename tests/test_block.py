"What a user says to loaders, blocks and `test_dl` means what it means in fastai, or is refused with advice"
import pytest
from fastai.vision.all import *
from in_memory import encoded, in_memory

from fastai_remote import *
from fastai_remote.codec.base import Codec
from fastai_remote.codec.fields import _codecs, get_codec, register_codec
from fastai_remote.load.targets import MaskCodes, StoreCategorize, StoreMultiCategorize
from fastai_remote.store.base import image_stats

CODES = ['sky', 'sea', 'land']

def sample(i):
    rng = np.random.default_rng(i)
    jpg = encoded(Image.fromarray(rng.integers(0, 256, (24,32,3), np.uint8)), 'JPEG')
    mask = rng.integers(0, 3, (24,32)).astype(np.uint8)
    picture = Image.fromarray(mask)
    return {'jpg':jpg, 'cls':'abc'[i%3], 'kind.cls':'xy'[i%2], 'labels':[['p'],['q','r']][i%2], 'age.f4':i/4, 'n.i4':i,
        'wave.npy':np.sin(np.arange(16)*i).astype(np.float32), 'grid.npy':np.full((4,5), i, np.float32),
        'mask.png':picture, 'mask':picture, 'regions.png':picture, 'small.mask.npy':mask, 'plain.png':picture,
        'caption':f'number {i}', 'about.json':{'i':i}}

VOCAB = {'mask.png':CODES, 'regions.png':CODES}

@pytest.fixture(scope='module')
def store(): return in_memory(range(30), sample, 'rich', vocab=VOCAB)

@pytest.fixture(scope='module')
def with_stats(server):
    "The same, with statistics of its images"
    to_redis(range(30), server.url, 'rich', sample, vocab=VOCAB, shuffle=False, num_workers=1, progress=False)
    return RedisStore(server.url, 'rich')

@pytest.fixture(autouse=True)
def same_seed(): set_seed(0)

KW = dict(bs=6, num_workers=0, device='cpu')
OF_STORE = dict(get_items=get_remote_items, splitter=RandomStoreSplitter(.2, seed=1))

def loaders(store, *blocks, **kwargs):
    "Loaders by a `DataBlock`"
    return DataBlock(blocks, **OF_STORE, **kwargs).dataloaders(store, **KW)

def from_store(store, **kwargs): return DataLoaders.from_store(store, **{**KW, 'seed':1, **kwargs})

def labels_of(dl): return [int(o) for b in dl for o in b[-1]]

# --- arguments

def test_what_is_no_store_and_no_field_is_refused(store):
    for wrong in 3,PILImage,['png']:
        with pytest.raises(TypeError, match='RedisBlock takes a store and a field, or a field: not '): RedisBlock(wrong)
    for wrong in 3,PILMask,b'png':
        for use in (lambda: RedisBlock(store, wrong), lambda: RedisBlock(field=wrong),
                lambda: from_store(store, x=wrong), lambda: from_store(store, y=[wrong])):
            with pytest.raises(TypeError, match=r'a field is a name such as .*, not '): use()
    with pytest.raises(TypeError, match="not the str 'a' and 'b'"): RedisBlock('a', 'b')

def test_a_pipeline_without_fetch_is_named(store):
    for tfm in StoreCategorize(),StoreMultiCategorize(),MaskCodes():
        with pytest.raises(ValueError, match=f'{type(tfm).__name__} needs a Fetch before it'):
            TfmdLists(get_remote_items(store), [tfm])
    assert TfmdLists(['b'], [StoreCategorize(vocab=['a', 'b'])])[0]==1

def test_misspelt_arguments_are_refused_where_they_are_typed(store):
    two = DataBlock((RedisBlock, RedisBlock('cls')), **OF_STORE)
    opened = DataBlock((ImageBlock, CategoryBlock(vocab=list('abc'))), getters=[Fetch('jpg'), Fetch('cls')],
        dl_type=RemoteDL, **OF_STORE)
    for make in (partial(from_store, store), partial(two.dataloaders, store), partial(opened.dataloaders, store),
            partial(two.datasets(store).dataloaders, after_item=ToTensor())):
        with pytest.raises(TypeError, match="knows no 'num_worker'; did you mean 'num_workers'"): make(num_worker=2)
        with pytest.raises(TypeError, match="knows no 'val_prefech'"): make(val_prefech=2)
        make(num_workers=0, val_prefetch=2, bs=4)

def test_arguments_of_a_loader_of_ones_own_are_known(store):
    class Mine(RemoteDL):
        def __init__(self, dataset, colour='red', **kwargs):
            super().__init__(dataset, **kwargs)
            self.colour = colour
    block = DataBlock((RedisBlock, RedisBlock('cls')), dl_type=Mine, **OF_STORE)
    dls = block.dataloaders(store, colour='blue', val_colour='green', **KW)
    assert [dl.colour for dl in dls]==['blue', 'green'] and type(dls.train.new()) is Mine

def test_loaders_are_renewed_with_whatever_fastai_says(store):
    "`tta` says `shuffled`, and `Interpretation` says `process`; what fastai does not say is an error"
    dls = from_store(store)
    assert len(dls.train.new(shuffled=False, process=True))==len(dls.train)
    assert len(dls.test_dl([1,2,3], process=True))==1
    with pytest.raises(TypeError, match="knows no 'whatever'"): dls.train.new(whatever=1)
    with pytest.raises(TypeError, match="knows no 'shufle'; did you mean 'shuffle'"): dls.test_dl([1,2,3], shufle=True)

def test_stock_loaders_are_left_alone():
    block = DataBlock((TransformBlock, TransformBlock), get_x=lambda i: i*2., get_y=lambda i: i*3.)
    dls = block.dataloaders(list(range(20)), bs=4, whatever=3, num_workers=0)
    assert dls.one_batch()[0].shape==(4,) and len(dls.test_dl([1,2], with_labels=True).one_batch())==2

# --- labels

@pytest.mark.parametrize('get_y,vocab', [(str.upper, ['A', 'B', 'C']), ({'a':'z', 'b':'y', 'c':'z'}.get, ['y', 'z'])])
def test_get_y_changes_labels_and_with_them_the_vocabulary(store, get_y, vocab):
    "As in stock fastai, which finds the labels by asking for all of them"
    dls = loaders(store, RedisBlock, RedisBlock('cls'), get_y=get_y)
    splits = [list(o.items) for o in (dls.train_ds, dls.valid_ds)]
    block = DataBlock((TransformBlock, CategoryBlock), get_y=lambda i: get_y('abc'[i%3]), splitter=lambda _: splits)
    stock = block.dataloaders(list(range(30)), bs=6, num_workers=0)
    assert (dls.vocab, dls.c)==(stock.vocab, stock.c)==(vocab, len(vocab))
    assert labels_of(dls.valid)==labels_of(stock.valid)
    dls.show_batch()
    learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(3*24*32, len(vocab))))
    with learn.no_bar(): assert learn.predict(3)[0] in vocab
    assert len(dls.test_dl([1,2], with_labels=True).one_batch())==2

def test_get_y_that_changes_nothing_keeps_the_order_of_the_vocabulary():
    s = in_memory(range(8), lambda i: {'png':Image.new('L', (4,4)), 'cls':'ba'[i%2]}, vocab=['b', 'a'])
    assert loaders(s, RedisBlock, RedisBlock('cls'), get_y=lambda label: label).vocab==['b', 'a']

def test_get_y_of_several_labels_of_numbers_and_get_x_of_pictures(store):
    dls = loaders(store, RedisBlock, RedisBlock(store, 'labels'), get_y=lambda ls: [label.upper() for label in ls])
    assert dls.vocab==['P', 'Q', 'R'] and dls.c==3
    for i,y in zip(dls.valid_ds.items, dls.valid.one_batch()[1]): assert y.tolist()==([1,0,0] if i%2==0 else [0,1,1])
    dls = loaders(store, RedisBlock, RedisBlock(store, 'age.f4'), get_x=lambda im: im.rotate(90, expand=True),
        get_y=lambda v: 2*v)
    x,y = dls.valid.one_batch()
    assert x.shape==(6,3,32,24) and y.tolist()==[i/2 for i in dls.valid_ds.items]

SEVERAL = [[1,2],[10],[],[2,10]]

@pytest.mark.parametrize('vocab', [None, [10,2,1]])
def test_several_labels_that_are_numbers_are_encoded_as_in_fastai(vocab):
    s = in_memory(range(12), lambda i: {'x.npy':np.full(3, i, np.float32), 'labels':SEVERAL[i%4]},
        vocab=vocab and {'labels':vocab})
    dls = loaders(s, RedisBlock('x.npy'), RedisBlock(s, 'labels'))
    block = DataBlock((TransformBlock, MultiCategoryBlock(vocab=vocab)), get_y=lambda i: SEVERAL[i%4])
    stock = block.datasets(range(12))
    assert dls.vocab==stock.vocab==(vocab or [1,2,10]) and all(type(label) is int for label in dls.vocab)
    for i in range(12): assert dls.valid_ds.tls[1].tfms(i).tolist()==stock.tls[1].tfms(i).tolist()

def test_labels_of_two_types_are_two_labels():
    s = in_memory(range(4), lambda i: {'x.u1':i, 'labels':[1,'1']})
    assert s.manifest.vocab=={'labels':[1,'1']}
    with pytest.raises(IngestError, match=r"label 1 is not in the vocab of 'labels'"):
        in_memory(range(4), lambda i: {'x.u1':i, 'labels':[1]}, vocab={'labels':['1']})

def test_get_y_that_wants_the_item_is_told_of_category_block(store):
    error = r"get_y failed for 'a' of field 'cls' .*with the label, not with the item.*CategoryBlock\(vocab="
    with pytest.raises(ValueError, match=error):
        loaders(store, RedisBlock, RedisBlock('cls'), get_y=lambda i: 'abc'[i%3])
    for get_y in lambda i: 'abc'[i%3],Fetch('cls'),Pipeline([Fetch('cls'), str.lower]):
        for vocab in None,list('abc'):
            dls = loaders(store, RedisBlock, CategoryBlock(vocab=vocab), get_y=get_y)
            assert dls.vocab==['a', 'b', 'c'] and labels_of(dls.valid)==[i%3 for i in dls.valid_ds.items]
    with pytest.raises(ValueError, match="RedisBlock\\('cls'\\)"):   # it would take sample numbers for labels
        loaders(store, RedisBlock, CategoryBlock)

def test_text_is_no_target_unless_the_user_says_how(store):
    "As the error recommends"
    for y in 'caption','about.json':
        error = f"field '{y}' .* is no target: it has no vocabulary.*CategoryBlock\\(vocab="
        with pytest.raises(ValueError, match=error): from_store(store, y=y)
        with pytest.raises(ValueError, match=error): loaders(store, RedisBlock, RedisBlock(store, y))
    dls = loaders(store, RedisBlock, CategoryBlock(vocab=[f'number {i}' for i in range(30)]), get_y=Fetch('caption'))
    assert [dls.vocab[k] for k in labels_of(dls.valid)]==[f'number {i}' for i in dls.valid_ds.items]
    dls = loaders(store, RedisBlock, RedisBlock(store, 'caption'), get_y=lambda s: float(s.split()[1]))
    assert dls.valid.one_batch()[1].tolist()==[float(i) for i in dls.valid_ds.items]

def test_labels_of_items_that_have_none_are_refused(store, tmp_path):
    dls,b = from_store(store, item_tfms=Resize(16)),store.get_many([3], 'jpg')['jpg'][0]
    (f:=tmp_path/'a.jpg').write_bytes(b)
    for o in f,str(f),b,PILImage.create(f):
        assert dls.test_dl([o]).one_batch()[0].shape==(1,3,16,16)
        with pytest.raises(TypeError, match=f"a {type(o).__name__} has no label.*'cls'.*image_samples"):
            dls.test_dl([o], with_labels=True)
    for items in [3],np.array([3]),[{'jpg':b, 'cls':'a'}],get_remote_items(store)[[3]]:
        assert int(dls.test_dl(items, with_labels=True).one_batch()[1])==0
    for items in tensor([3,4]),[tensor(3)]:
        for with_labels in True,False:
            with pytest.raises(TypeError, match=r'no sample number.*\.tolist\(\)'):
                dls.test_dl(items, with_labels=with_labels).one_batch()
    with pytest.raises(TypeError, match="has no label"):   # the picture would be taken for its own mask
        from_store(store, y='mask.png').test_dl([f], with_labels=True)

# --- masks

@pytest.mark.parametrize('y', ['mask.png', 'mask', 'regions.png', 'small.mask.npy'])
def test_masks_are_recognised_the_same_everywhere(store, y):
    "By `from_redis`, and by `RedisBlock` with its store and without"
    vocab = store.manifest.vocab.get(y)
    for block in None,RedisBlock(store, y),RedisBlock(store, y, PILMask),RedisBlock(y):
        dls = loaders(store, RedisBlock, block) if block else from_store(store, y=y)
        x,m = dls.valid.one_batch()
        assert type(m) is TensorMask and m.dtype==torch.int64 and m.shape==(6,24,32) and type(x) is TensorImage
        assert m[0].tolist()==np.array(sample(dls.valid_ds.items[0])['mask']).tolist()
        assert dls.train_ds.loss_func.axis==1 and getattr(dls, 'vocab', None)==vocab and (vocab is None or dls.c==3)
    dls.show_batch(max_n=2)

def test_pictures_are_no_masks(store):
    "A picture with another name and without a vocabulary; and one that the user says is none"
    for dls in from_store(store, y='plain.png'),*[loaders(store, RedisBlock, block) for block in (RedisBlock(store,
            'plain.png'), RedisBlock('plain.png'), RedisBlock('mask.png', img_cls=PILImage))]:
        assert type(dls.valid.one_batch()[1]) is TensorImage and getattr(dls.train_ds, 'loss_func', None) is None

def test_a_template_decides_for_each_store(store):
    "What are masks in one store may be pictures in another"
    im = Image.new('RGB', (8,8))
    other = in_memory(range(8), lambda i: {'jpg':im, 'regions.png':im}, 'nomask')
    block = DataBlock((RedisBlock('jpg'), RedisBlock('regions.png')), **OF_STORE)
    kinds = [type(block.dataloaders(s, **{**KW, 'bs':2}).one_batch()[1]) for s in (store, other, store)]
    assert kinds==[TensorMask, TensorImage, TensorMask]

def test_the_default_input_is_no_mask(put):
    grey = Image.new('L', (8,8))
    s,_ = put(range(8), fn=lambda i: {'mask.png':grey, 'mask':grey, 'png':Image.new('RGB', (8,8)), 'cls':i%2})
    assert type(from_store(s).one_batch()[0]) is TensorImage and list(s.manifest.stats)==['png']

def test_arrays_that_are_no_masks_are_refused():
    "When they are written; and when they are read, if another program has written them"
    says,arrays = 'mask.npy.*whole numbers from 0 to 255.*without `mask`',[np.full((4,4), i/2) for i in range(4)]
    images = [Image.new('RGB', (4,4)) for _ in arrays]
    with pytest.raises(IngestError, match=says): in_memory([{'png':im, 'mask.npy':a} for im,a in zip(images, arrays)])
    values = {'png':[get_codec('png').to_bytes(im) for im in images],
        'mask.npy':[get_codec('npy').to_bytes(a) for a in arrays]}
    with pytest.raises(CorruptSample, match=says): from_store(MemoryStore(values), y='mask.npy', bs=2).one_batch()

# --- arrays and numbers as inputs

class Joined(nn.Module):
    "Any inputs, one after the other, and three outputs"
    def __init__(self, n):
        super().__init__()
        self.lin = nn.Linear(n, 3)
    def forward(self, *xs): return self.lin(torch.cat([x.float().view(len(x), -1).as_subclass(Tensor) for x in xs], 1))

INPUTS = {'grid.npy':20, 'n.i4':1, ('jpg', 'wave.npy', 'n.i4'):8*8*3+17, ('age.f4', 'kind.cls', 'jpg'):8*8*3+2}

@pytest.mark.parametrize('x', INPUTS, ids=str)
def test_arrays_and_numbers_as_inputs(store, x, tmp_path):
    xs = list(L(x))
    blocks = [RedisBlock(store, f) for f in xs]
    by_block = loaders(store, *blocks, RedisBlock('cls'), n_inp=len(xs), item_tfms=Resize(8))
    for dls in by_block,from_store(store, x=xs, item_tfms=Resize(8)):
        assert dls.vocab==['a', 'b', 'c'] and dls.c==3 and get_c(dls)==3
        assert isinstance(dls.train_ds.loss_func, CrossEntropyLossFlat)
        for f,v in zip(xs, dls.valid.one_batch()):
            if f in ('jpg', 'kind.cls'): continue
            want = np.array([store[i][f] for i in dls.valid_ds.items], np.float32)
            assert v.dtype==torch.float32 and np.array_equal(v.numpy(), want)
    learn = Learner(dls, Joined(INPUTS[x]), metrics=accuracy, path=tmp_path)
    with learn.no_bar(), learn.no_logging():
        for show in dls.show_batch,learn.show_results: show(max_n=2)
        p,item = learn.get_preds()[0],dls.valid_ds.items[2]
        lbl,k,ps = learn.predict(item)
        learn.export()
        loaded = load_learner(tmp_path/'export.pkl')
        assert loaded.dls.vocab==['a', 'b', 'c'] and lbl=='abc'[int(k)]
        same = [p[2], learn.predict({f:store[item][f] for f in xs})[2], loaded.predict(item)[2]]
        if x=='grid.npy': same.append(learn.predict(store[item][x])[2])   # a number would be that of a sample
        for q in same: assert torch.allclose(q, ps, atol=1e-5)

def test_numbers_as_inputs_and_targets(store):
    dls = from_store(store, x='wave.npy', y=['age.f4'])
    assert dls.c==1 and isinstance(dls.loss_func.func, nn.MSELoss) and not hasattr(dls, 'vocab')

# --- normalising

def norms(dls): return [t for t in dls.after_batch.fs if isinstance(t, Normalize)]

def test_nothing_is_normalised_unless_asked(with_stats):
    for tfms in [],[Flip()]:
        assert not norms(from_store(with_stats, batch_tfms=tfms))
        assert not norms(loaders(with_stats, RedisBlock, RedisBlock('cls'), batch_tfms=tfms))
        assert len(norms(from_store(with_stats, batch_tfms=tfms, normalize=True)))==1

def test_what_cannot_be_normalised_is_refused(with_stats):
    with pytest.raises(ValueError, match='no statistics of .*wave.npy'):
        from_store(with_stats, x='wave.npy', normalize=True)
    both = dict(x=['jpg', 'plain.png'], normalize=True)
    with pytest.raises(ValueError, match="one image a sample, not for 'jpg', 'plain.png'"):
        from_store(with_stats, **both)
    own = Normalize.from_stats(*imagenet_stats, cuda=False)
    assert len(norms(from_store(with_stats, batch_tfms=own, **both)))==1

def test_statistics_are_those_of_what_the_model_sees(with_stats):
    "Of one channel for a grayscale image, however the type was chosen; and masks are not normalised"
    grey = image_stats(with_stats, 'jpg')['grey'][0]
    for kw in dict(img_cls=PILImageBW),dict(x={'jpg':PILImageBW}),dict(x={'jpg':PILImageBW, 'plain.png':PILMask}):
        norm, = norms(from_store(with_stats, item_tfms=Resize(32), normalize=True, **kw))
        assert torch.allclose(norm.mean.flatten(), tensor(grey))

def test_a_codec_that_is_not_registered_is_named(server):
    class Reversed(Codec):
        def pack(self, o): return o[::-1].encode()
        def unpack(self, b): return b.decode()[::-1]
    register_codec(Reversed('reversed'))
    samples = [{'word.reversed':f'{i}', 'cls':'ab'[i%2]} for i in range(8)]
    store = to_redis(samples, server.url, 'own codec', num_workers=1, progress=False, shuffle=False).store
    assert store[3]['word.reversed']=='3' and RemoteDataset(store).decode()[3]['word.reversed']=='3'
    del _codecs['reversed']
    error = r"own codec: field 'word.reversed' has the codec 'reversed', .*register_codec"
    for use in (lambda: store[0], lambda: RedisBlock(store, 'word.reversed'), lambda: RemoteDataset(store).decode()[0],
            lambda: Fetch('word.reversed', store)(0), lambda: store.verify(num_workers=1),
            lambda: store.edit(set={'word.reversed':{0:'x'}})):
        with pytest.raises(ValueError, match=error): use()
    assert RemoteDataset(store)[0]['word.reversed']==b'0' and store.get_many([0], 'cls', decode=True)=={'cls':['a']}
    assert RemoteDataset(store).decode(lambda key, data: key)[0]['word.reversed']=='.word.reversed'
