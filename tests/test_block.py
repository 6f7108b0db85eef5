"What a user says to `from_redis`, `RedisBlock`, `DataBlock` and `test_dl` means what it means in fastai, or is refused with advice"
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from fastai.vision.all import *

from fastai_remote import *
from fastai_remote.codec.base import Codec
from fastai_remote.codec.fields import _codecs, register_codec
from fastai_remote.load.targets import MaskCodes, StoreCategorize, StoreMultiCategorize


CODES = ['sky','sea','land']

def sample(i):
    rng = np.random.default_rng(i)
    im = Image.fromarray(rng.integers(0, 256, (24,32,3), np.uint8))
    mask = rng.integers(0, 3, (24,32)).astype(np.uint8)
    im.save(jpg:=io.BytesIO(), 'JPEG')
    return {'jpg':jpg.getvalue(), 'cls':'abc'[i%3], 'kind.cls':'xy'[i%2], 'labels':[['p'],['q','r']][i%2], 'age.f4':i/4, 'n.i4':i, 'wave.npy':np.sin(np.arange(16)*i).astype(np.float32),
            'grid.npy':np.full((4,5), i, np.float32), 'mask.png':Image.fromarray(mask), 'mask':Image.fromarray(mask), 'regions.png':Image.fromarray(mask), 'small.mask.npy':mask,
            'plain.png':Image.fromarray(mask), 'caption':f'number {i}', 'about.json':{'i':i}}

@pytest.fixture(scope='module')
def redis_rich(server):
    to_redis(list(range(30)), server.url, 'rich', sample, vocab={'mask.png':CODES, 'regions.png':CODES}, shuffle=False, num_workers=1, progress=False)
    return RedisStore(server.url, 'rich')

@pytest.fixture(scope='module')
def shard_rich(tmp_path_factory):
    to_shards(list(range(30)), d:=tmp_path_factory.mktemp('rich')/'rich', sample, vocab={'mask.png':CODES, 'regions.png':CODES}, shuffle=False, num_workers=1, chunk=10, progress=False)
    return ShardStore(d)

@pytest.fixture(params=['redis','shards'])
def store(request, redis_rich, shard_rich): return dict(redis=redis_rich, shards=shard_rich)[request.param]

@pytest.fixture(autouse=True)
def tidy():
    set_seed(0)
    yield
    plt.close('all')

KW = dict(bs=6, num_workers=0, device='cpu')

def loaders(store, *blocks, **kwargs):
    "Loaders by a `DataBlock`"
    return DataBlock(blocks, get_items=get_remote_items, splitter=RandomStoreSplitter(.2, seed=1), **kwargs).dataloaders(store, **KW)

def from_store(store, **kwargs): return DataLoaders.from_store(store, **{**KW, 'seed':1, **kwargs})

def labels_of(dl): return [int(o) for b in dl for o in b[-1]]

# --- arguments

def test_what_is_no_store_and_no_field_is_refused():
    store = MemoryStore({'png':[b''], 'cls':np.zeros(1, 'u1')}, 'd', vocab={'cls':['a']})
    for wrong in 3,PILImage,['png']:
        with pytest.raises(TypeError, match='RedisBlock takes a store and a field, or a field: not '): RedisBlock(wrong)
    for wrong in 3,PILMask,b'png':
        for use in (lambda: RedisBlock(store, wrong), lambda: RedisBlock(field=wrong), lambda: from_store(store, x=wrong),
                    lambda: from_store(store, y=[wrong])):
            with pytest.raises(TypeError, match=r'a field is a name such as .*, not '): use()

def test_a_pipeline_without_fetch_is_named():
    items = get_remote_items(MemoryStore({'cls':np.zeros(2, 'u1')}, 'd', vocab={'cls':['a']}))
    for tfm in StoreCategorize(),StoreMultiCategorize(),MaskCodes():
        with pytest.raises(ValueError, match=f'{type(tfm).__name__} needs a Fetch before it'): TfmdLists(items, [tfm])
    assert TfmdLists(['b'], [StoreCategorize(vocab=['a','b'])])[0]==1

@pytest.mark.parametrize('way', ['from_redis','DataBlock','Datasets','ImageBlock'])
def test_misspelt_argument_is_refused_where_it_is_typed(redis_rich, way):
    gi = dict(get_items=get_remote_items, splitter=RandomStoreSplitter())
    ways = {'from_redis':lambda **kw: from_store(redis_rich, **kw), 'DataBlock':lambda **kw: DataBlock((RedisBlock,RedisBlock('cls')), **gi).dataloaders(redis_rich, **kw),
            'Datasets':lambda **kw: DataBlock((RedisBlock,RedisBlock('cls')), **gi).datasets(redis_rich).dataloaders(**kw),
            'ImageBlock':lambda **kw: DataBlock((ImageBlock,CategoryBlock(vocab=list('abc'))), getters=[Fetch('jpg'),Fetch('cls')], dl_type=RemoteDL, **gi).dataloaders(redis_rich, **kw)}
    with pytest.raises(TypeError, match="knows no 'num_worker'; did you mean 'num_workers'"): ways[way](num_worker=2)
    with pytest.raises(TypeError, match="knows no 'val_prefech'"): ways[way](val_prefech=2)
    ways[way](num_workers=0, val_prefetch=2, bs=4, after_item=ToTensor() if way=='Datasets' else None) if way=='Datasets' else ways[way](num_workers=0, val_prefetch=2, bs=4)

def test_arguments_of_a_loader_of_ones_own_are_known(redis_rich):
    class Mine(RemoteDL):
        def __init__(self, dataset, colour='red', **kwargs): super().__init__(dataset, **kwargs); self.colour = colour
    dls = DataBlock((RedisBlock,RedisBlock('cls')), dl_type=Mine, get_items=get_remote_items, splitter=RandomStoreSplitter()).dataloaders(redis_rich, colour='blue', val_colour='green', **KW)
    assert [dl.colour for dl in dls]==['blue','green'] and type(dls.train.new()) is Mine

def test_loaders_are_renewed_with_whatever_fastai_says(redis_rich):
    "`tta` says `shuffled`, `Interpretation` says `process`, and test loaders are told more still"
    dls = from_store(redis_rich)
    assert len(dls.train.new(shuffled=False, process=True, whatever=1))==len(dls.train)
    assert len(dls.test_dl([1,2,3], process=True))==1

def test_stock_loaders_are_left_alone():
    dls = DataBlock((TransformBlock,TransformBlock), get_x=lambda i: i*2., get_y=lambda i: i*3.).dataloaders(list(range(20)), bs=4, whatever=3, num_workers=0)
    assert dls.one_batch()[0].shape==(4,) and len(dls.test_dl([1,2], with_labels=True).one_batch())==2

# --- labels

def mapped(l): return l.upper()

def test_get_y_changes_labels_and_with_them_the_vocabulary(store):
    dls = loaders(store, RedisBlock, RedisBlock('cls'), get_y=mapped)
    want = [store[i]['cls'].upper() for i in dls.valid_ds.items]
    assert dls.vocab==['A','B','C'] and dls.c==3 and [dls.vocab[k] for k in labels_of(dls.valid)]==want
    dls.show_batch()
    learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(3*24*32, 3)))
    with learn.no_bar(): assert learn.predict(3)[0] in 'ABC'
    assert len(dls.test_dl([1,2], with_labels=True).one_batch())==2

def test_get_y_that_merges_labels_gives_fewer_classes(store):
    "As in stock fastai, which finds the labels by asking for all of them"
    merge = {'a':'z', 'b':'y', 'c':'z'}
    dls = loaders(store, RedisBlock, RedisBlock('cls'), get_y=merge.get)
    stock = DataBlock((TransformBlock,CategoryBlock), get_y=lambda i: merge['abc'[i%3]], splitter=lambda _: [list(o.items) for o in (dls.train_ds,dls.valid_ds)]).dataloaders(list(range(30)), bs=6, num_workers=0)
    assert (dls.vocab,dls.c)==(stock.vocab,stock.c)==(['y','z'],2) and labels_of(dls.valid)==labels_of(stock.valid)

def test_get_y_that_changes_nothing_keeps_the_order_of_the_vocabulary(server):
    to_redis(list(range(8)), server.url, 'ordered', lambda i: {'png':Image.new('L', (4,4)), 'cls':'ba'[i%2]}, vocab=['b','a'], num_workers=1, progress=False, overwrite=True)
    s = RedisStore(server.url, 'ordered')
    assert loaders(s, RedisBlock, RedisBlock('cls'), get_y=lambda l: l).vocab==['b','a'] and loaders(s, RedisBlock, RedisBlock('cls'), get_y=str.upper).vocab==['A','B']

def test_get_y_of_several_labels(store):
    dls = loaders(store, RedisBlock, RedisBlock(store, 'labels'), get_y=lambda ls: [l.upper() for l in ls])
    assert dls.vocab==['P','Q','R'] and dls.c==3
    for i,y in zip(dls.valid_ds.items, dls.valid.one_batch()[1]): assert y.tolist()==([1,0,0] if i%2==0 else [0,1,1])

SEVERAL = [[1,2],[10],[],[2,10]]
def several(i): return {'x.npy':np.full(3, i, np.float32), 'labels':SEVERAL[i%4]}

@pytest.mark.parametrize('vocab', [None, [10,2,1]])
@pytest.mark.parametrize('where', ['redis','shards'])
def test_several_labels_that_are_numbers_are_encoded_as_in_fastai(server, tmp_path, where, vocab):
    name = f'several {len(vocab or [])}'
    kw = dict(fn=several, vocab=vocab and {'labels':vocab}, shuffle=False, num_workers=1, progress=False)
    if where=='redis': to_redis(range(12), server.url, name, **kw)
    else: to_shards(range(12), tmp_path/'several', **kw)
    s = RedisStore(server.url, name) if where=='redis' else ShardStore(tmp_path/'several')
    dls = loaders(s, RedisBlock('x.npy'), RedisBlock(s, 'labels'))
    stock = DataBlock((TransformBlock, MultiCategoryBlock(vocab=vocab)), get_y=lambda i: SEVERAL[i%4]).datasets(range(12))
    assert dls.vocab==stock.vocab==(vocab or [1,2,10]) and all(type(l) is int for l in dls.vocab)
    for i in range(12): assert dls.valid_ds.tls[1].tfms(i).tolist()==stock.tls[1].tfms(i).tolist()

def test_labels_of_two_types_are_two_labels(server):
    to_redis(range(4), server.url, 'two types', lambda i: {'x.u1':i, 'labels':[1,'1']}, num_workers=1, progress=False)
    assert RedisStore(server.url, 'two types').manifest.vocab=={'labels':[1,'1']}

def test_a_label_of_another_type_than_the_vocabulary_is_refused(server):
    with pytest.raises(IngestError, match=r"label 1 is not in the vocab of 'labels'"):
        to_redis(range(4), server.url, 'mixed', lambda i: {'x.u1':i, 'labels':[1]}, vocab={'labels':['1']}, num_workers=1, progress=False)

def test_get_y_of_numbers_and_get_x_of_pictures(store):
    dls = loaders(store, RedisBlock, RedisBlock(store, 'age.f4'), get_x=lambda im: im.rotate(90, expand=True), get_y=lambda v: 2*v)
    x,y = dls.valid.one_batch()
    assert x.shape==(6,3,32,24) and y.tolist()==[i/2 for i in dls.valid_ds.items]

def test_get_y_that_wants_the_item_is_told_of_category_block(store):
    with pytest.raises(ValueError, match=r"get_y failed for 'a' of field 'cls' .*with the label, not with the item.*CategoryBlock\(vocab="):
        loaders(store, RedisBlock, RedisBlock('cls'), get_y=lambda i: 'abc'[i%3])

def test_category_block_beside_redis_block(store):
    for get_y in lambda i: 'abc'[i%3],Fetch('cls'),Pipeline([Fetch('cls'),str.lower]):
        for vocab in None,list('abc'):
            dls = loaders(store, RedisBlock, CategoryBlock(vocab=vocab), get_y=get_y)
            assert dls.vocab==['a','b','c'] and labels_of(dls.valid)==[i%3 for i in dls.valid_ds.items]

def test_category_block_without_get_y_is_refused(store):
    "It would take sample numbers for labels"
    with pytest.raises(ValueError, match="RedisBlock\\('cls'\\)"): loaders(store, RedisBlock, CategoryBlock)

@pytest.mark.parametrize('y', ['caption','about.json'])
def test_text_is_no_target(store, y):
    with pytest.raises(ValueError, match=f"field '{y}' .* is no target: it has no vocabulary.*CategoryBlock\\(vocab="): from_store(store, y=y)
    with pytest.raises(ValueError, match=f"field '{y}' .* is no target"): loaders(store, RedisBlock, RedisBlock(store, y))

def test_text_becomes_a_category_where_the_user_says_so(store):
    "As the error recommends"
    dls = loaders(store, RedisBlock, CategoryBlock(vocab=[f'number {i}' for i in range(30)]), get_y=Fetch('caption'))
    assert [dls.vocab[k] for k in labels_of(dls.valid)]==[f'number {i}' for i in dls.valid_ds.items]
    dls = loaders(store, RedisBlock, RedisBlock(store, 'caption'), get_y=lambda s: float(s.split()[1]))
    assert dls.valid.one_batch()[1].tolist()==[float(i) for i in dls.valid_ds.items]

def test_labels_of_items_that_have_none(store, tmp_path):
    dls,b = from_store(store, item_tfms=Resize(16)),store.get_many([3], 'jpg')['jpg'][0]
    (f:=tmp_path/'a.jpg').write_bytes(b)
    for o in f,str(f),b,PILImage.create(f):
        assert dls.test_dl([o]).one_batch()[0].shape==(1,3,16,16)
        with pytest.raises(TypeError, match=f"a {type(o).__name__} has no label.*'cls'.*image_samples"): dls.test_dl([o], with_labels=True)
    for items in [3],np.array([3]),[{'jpg':b,'cls':'a'}],get_remote_items(store)[[3]]: assert int(dls.test_dl(items, with_labels=True).one_batch()[1])==0
    masks = from_store(store, y='mask.png')
    with pytest.raises(TypeError, match="has no label"): masks.test_dl([f], with_labels=True)   # the picture would be taken for its own mask

# --- masks

MASKS = ['mask.png','mask','regions.png','small.mask.npy']

@pytest.mark.parametrize('y', MASKS)
def test_masks_are_recognised_the_same_everywhere(store, y):
    "By `from_redis`, and by `RedisBlock` with its store and without"
    vocab = store.manifest.vocab.get(y)
    blocks = [lambda: RedisBlock(store, y), lambda: RedisBlock(store, y, PILMask)] + ([lambda: RedisBlock(y)] if not y.endswith('npy') or 'mask' in y else [])
    for dls in from_store(store, y=y),*(loaders(store, RedisBlock, b()) for b in blocks):
        x,m = dls.valid.one_batch()
        assert type(m) is TensorMask and m.dtype==torch.int64 and m.shape==(6,24,32) and type(x) is TensorImage
        assert m[0].tolist()==np.array(sample(dls.valid_ds.items[0])['mask']).tolist()
        assert dls.train_ds.loss_func.axis==1 and getattr(dls, 'vocab', None)==vocab and (vocab is None or dls.c==3)
        dls.show_batch(max_n=2)

def test_pictures_are_no_masks(store):
    "A picture with another name and without a vocabulary; and one that the user says is none"
    for dls in from_store(store, y='plain.png'),loaders(store, RedisBlock, RedisBlock(store, 'plain.png')),loaders(store, RedisBlock, RedisBlock('plain.png')),loaders(store, RedisBlock, RedisBlock('mask.png', img_cls=PILImage)):
        assert type(dls.valid.one_batch()[1]) is TensorImage and getattr(dls.train_ds, 'loss_func', None) is None

def test_a_template_decides_for_each_store(server, redis_rich):
    "What are masks in one store may be pictures in another"
    to_redis(list(range(8)), server.url, 'nomask', lambda i: {'jpg':Image.new('RGB', (8,8)), 'regions.png':Image.new('RGB', (8,8))}, num_workers=1, progress=False, overwrite=True)
    block = DataBlock((RedisBlock('jpg'),RedisBlock('regions.png')), get_items=get_remote_items, splitter=RandomStoreSplitter(.25))
    kinds = [type(block.dataloaders(s, **{**KW, 'bs':2}).one_batch()[1]) for s in (redis_rich,RedisStore(server.url, 'nomask'),redis_rich)]
    assert kinds==[TensorMask,TensorImage,TensorMask]

def test_the_default_input_is_no_mask(server):
    to_redis(list(range(8)), server.url, 'maskfirst', lambda i: {'mask.png':Image.new('L', (8,8)), 'mask':Image.new('L', (8,8)), 'png':Image.new('RGB', (8,8), (i,0,0)), 'cls':i%2}, num_workers=1, progress=False, overwrite=True)
    s = RedisStore(server.url, 'maskfirst')
    assert type(DataLoaders.from_store(s, **KW).one_batch()[0]) is TensorImage and list(s.manifest.stats)==['png']

def test_arrays_that_are_no_masks_are_refused(server):
    to_redis([{'png':Image.new('RGB', (4,4)), 'mask.npy':np.full((4,4), i/2)} for i in range(4)], server.url, 'halfmask', num_workers=1, progress=False, overwrite=True)
    with pytest.raises(CorruptSample, match='mask.npy.*whole numbers from 0 to 255.*without `mask`'): DataLoaders.from_redis(server.url, 'halfmask', y='mask.npy', **{**KW, 'bs':2}).one_batch()

# --- arrays and numbers as inputs

class Joined(nn.Module):
    "Any inputs, one after the other, and three outputs"
    def __init__(self, n, c=3): super().__init__(); self.lin = nn.Linear(n, c)
    def forward(self, *xs): return self.lin(torch.cat([x.float().view(len(x), -1).as_subclass(Tensor) for x in xs], 1))

INPUTS = {'wave.npy':16, 'grid.npy':20, 'age.f4':1, 'n.i4':1, 'kind.cls':1, ('wave.npy','age.f4'):17, ('jpg','wave.npy','n.i4'):8*8*3+17, ('age.f4','kind.cls','jpg'):8*8*3+2}

@pytest.mark.parametrize('how', ['from','DataBlock'])
@pytest.mark.parametrize('x', INPUTS, ids=str)
def test_arrays_and_numbers_as_inputs(store, x, how, tmp_path):
    xs = list(L(x))
    if how=='from': dls = from_store(store, x=xs, item_tfms=Resize(8))
    else: dls = loaders(store, *[RedisBlock(store, f) for f in xs], RedisBlock('cls'), n_inp=len(xs), item_tfms=Resize(8))
    assert dls.vocab==['a','b','c'] and dls.c==3 and get_c(dls)==3 and isinstance(dls.train_ds.loss_func, CrossEntropyLossFlat)
    *ins,y = dls.valid.one_batch()
    for f,v in zip(xs, ins):
        if f=='jpg' or f=='kind.cls': continue
        assert v.dtype==torch.float32 and np.array_equal(v.numpy(), np.array([store[i][f] for i in dls.valid_ds.items], np.float32))
    learn = Learner(dls, Joined(INPUTS[x]), metrics=accuracy, path=tmp_path)
    dls.show_batch(max_n=2)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, 1e-3)
        learn.show_results(max_n=2)
        p,_ = learn.get_preds()
        item = dls.valid_ds.items[2]
        lbl,k,ps = learn.predict(item)
        _,_,q = learn.predict({f:store[item][f] for f in xs})
        assert torch.allclose(ps, p[2], atol=1e-5) and torch.allclose(q, ps, atol=1e-5) and lbl=='abc'[int(k)]
        if len(xs)==1 and x not in ('n.i4','kind.cls'): assert torch.allclose(learn.predict(store[item][x])[2], ps, atol=1e-5)   # a whole number is a sample's
        interp = ClassificationInterpretation.from_learner(learn)
        assert interp.confusion_matrix().sum()==6
        learn.export()
        loaded = load_learner(tmp_path/'export.pkl')
        with loaded.no_bar(): assert torch.allclose(loaded.predict(item)[2], ps, atol=1e-5) and loaded.dls.vocab==['a','b','c']

def test_a_tensor_of_sample_numbers_is_refused_with_advice(store):
    dls = from_store(store, item_tfms=Resize(8))
    for items in tensor([3,4]),[tensor(3)]:
        for with_labels in True,False:
            with pytest.raises(TypeError, match=r'no sample number.*\.tolist\(\)'):
                dls.test_dl(items, with_labels=with_labels).one_batch()
    assert len(dls.test_dl(tensor([3,4]).tolist(), with_labels=True).one_batch()[1])==2

def test_numbers_as_inputs_and_targets(store):
    dls = from_store(store, x='wave.npy', y=['age.f4'])
    assert dls.c==1 and isinstance(dls.loss_func.func, nn.MSELoss) and not hasattr(dls, 'vocab')

# --- normalising

def norms(dls): return [t for t in dls.after_batch.fs if isinstance(t, Normalize)]

@pytest.mark.parametrize('tfms', [[], [Flip()]], ids=['no transforms','flips'])
def test_nothing_is_normalised_unless_asked(store, tfms):
    assert not norms(from_store(store, batch_tfms=tfms)) and not norms(loaders(store, RedisBlock, RedisBlock('cls'), batch_tfms=tfms))
    assert len(norms(from_store(store, batch_tfms=tfms, normalize=True)))==1

def test_a_pretrained_body_gets_its_own_statistics(store, images, monkeypatch):
    "As it does with stock fastai: ImageNet's, and the same batch of it"
    body = lambda weights=None, **kw: models.resnet18(weights=None)
    monkeypatch.setitem(vision_meta(), body, {**vision_meta()[models.resnet18], 'weights':None})
    ours = from_store(store, item_tfms=Resize(32))
    files = [PILImage.create(store.get_many([i], 'jpg')['jpg'][0]) for i in range(len(store))]
    stock = DataBlock((ImageBlock,CategoryBlock), get_items=lambda _: list(range(30)), get_x=lambda i: files[i], get_y=lambda i: 'abc'[i%3], item_tfms=Resize(32),
                      splitter=lambda _: [list(ds.items) for ds in (ours.train_ds,ours.valid_ds)]).dataloaders(None, **KW)
    for dls in ours,stock: vision_learner(dls, body, pretrained=True, n_out=3)
    (a,),(b,) = norms(ours),norms(stock)
    for t in a,b: assert torch.equal(t.mean.flatten(), tensor(imagenet_stats[0])) and torch.equal(t.std.flatten(), tensor(imagenet_stats[1]))
    for (x,y),(u,v) in zip(ours.valid, stock.valid): assert torch.equal(x, u) and torch.equal(y, v)
    scratch = from_store(store, item_tfms=Resize(32))
    vision_learner(scratch, models.resnet18, pretrained=False)
    assert not norms(scratch)
    own = from_store(store, item_tfms=Resize(32), normalize=True)
    vision_learner(own, body, pretrained=True, n_out=3)
    assert torch.allclose(norms(own)[0].mean.flatten(), tensor(store.stats[0]))

def vision_meta():
    from fastai.vision.learner import model_meta
    return model_meta

def test_what_cannot_be_normalised_is_refused(store):
    with pytest.raises(ValueError, match='no statistics of .*wave.npy'): from_store(store, x='wave.npy', normalize=True)
    with pytest.raises(ValueError, match="one image a sample, not for 'jpg', 'plain.png'"): from_store(store, x=['jpg','plain.png'], normalize=True)
    assert len(norms(from_store(store, x=['jpg','plain.png'], normalize=True, batch_tfms=Normalize.from_stats(*imagenet_stats, cuda=False))))==1

def test_statistics_are_those_of_what_the_model_sees(store):
    "Of one channel for a grayscale image, however the type was chosen; and masks are not normalised"
    grey = store.image_stats('jpg')['grey'][0]
    for kw in dict(img_cls=PILImageBW),dict(x={'jpg':PILImageBW}),dict(x={'jpg':PILImageBW, 'plain.png':PILMask}):
        norm, = norms(from_store(store, item_tfms=Resize(32), normalize=True, **kw))
        assert torch.allclose(norm.mean.flatten(), tensor(grey))

def test_a_codec_that_is_not_registered_is_named(server):
    class Reversed(Codec):
        def pack(self, o): return o[::-1].encode()
        def unpack(self, b): return b.decode()[::-1]
    register_codec(Reversed('reversed'))
    samples = [{'word.reversed':f'{i}', 'cls':'ab'[i%2]} for i in range(8)]
    to_redis(samples, server.url, 'own codec', num_workers=1, progress=False, shuffle=False, overwrite=True)
    store = RedisStore(server.url, 'own codec')
    assert store[3]['word.reversed']=='3' and RemoteDataset(store).decode()[3]['word.reversed']=='3'
    del _codecs['reversed']
    error = r"own codec: field 'word.reversed' has the codec 'reversed', .*register_codec"
    for use in (lambda: store[0], lambda: RedisBlock(store, 'word.reversed'),
                lambda: from_store(store, x='word.reversed', num_workers=0), lambda: RemoteDataset(store).decode()[0],
                lambda: Fetch('word.reversed', store)(0), lambda: store.verify(num_workers=1),
                lambda: store.edit(set={'word.reversed':{0:'x'}})):
        with pytest.raises(ValueError, match=error): use()
    assert RemoteDataset(store)[0]['word.reversed']==b'0' and store.get_many([0], 'cls', decode=True)=={'cls':['a']}
    assert RemoteDataset(store).decode(lambda key, data: key)[0]['word.reversed']=='.word.reversed'
