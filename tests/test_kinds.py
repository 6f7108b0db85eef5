"Every kind of sample with images: the block that its fields get, the same training as with stock fastai, pictures"
import importlib.util

import pytest
from conftest import fails
from fastai.vision.all import *
from in_memory import in_memory

from fastai_remote import *
from fastai_remote.codec.numbers import as_boxes, as_sized_boxes
from fastai_remote.load.kinds import choose_fields, FieldChoice, kind_of, KINDS
from fastai_remote.load.targets import ShownArray
from fastai_remote.ingest.stores import MemoryStore

N,CODES,SHAPES = 20,['ground','disc','square'],['disc','square']

def test_an_array_is_shown_as_a_curve_a_picture_or_a_title(capsys):
    assert ShownArray(torch.arange(4.)).show().lines[0].get_ydata().tolist()==[0,1,2,3]
    assert ShownArray(torch.zeros(2, 3)).show().images[0].get_array().shape==(2,3)
    ShownArray(torch.ones(1, 2, 3)).show()
    assert 'array of 1 x 2 x 3, mean 1' in capsys.readouterr().out

def sample(i):
    "A picture with up to three shapes on noise, and everything that is known of it"
    rng = np.random.default_rng(i)
    h,w = int(rng.integers(26, 36)),int(rng.integers(26, 36))
    pixels = rng.integers(0, 60, (h,w,3)).astype(np.uint8)
    codes,boxes,labels = np.zeros((h,w), np.uint8),[],[]
    for k in range(i%4):   # each fourth sample has no shape
        x,y,shape = 1+8*k,int(rng.integers(1, h-9)),SHAPES[int(rng.integers(2))]
        yy,xx = np.mgrid[:h,:w]
        inside = (yy>=y)&(yy<y+7)&(xx>=x)&(xx<x+7)
        if shape=='disc': inside = (yy-y-3)**2+(xx-x-3)**2<=9
        pixels[inside] = (230,90,40) if shape=='disc' else (40,90,230)
        codes[inside] = CODES.index(shape)
        boxes.append([x,y,x+7,y+7])
        labels.append(shape)
    brightest = np.argwhere(codes>0) if boxes else np.array([[h//2,w//2]])
    return {'png':Image.fromarray(pixels), 'mask.png':Image.fromarray(codes),
        'boxes.npy':np.float32(boxes).reshape(-1, 4), 'labels':labels,
        'points.npy':np.float32([brightest[0,::-1],brightest[-1,::-1]]), 'cls':CODES[len(boxes)%3],
        'age.f4':len(boxes)/2, 'xy.npy':np.float32([h,w,i])/36, 'other.png':Image.fromarray(np.roll(pixels, i, 1)),
        'same.cls':'yes' if i%2 else 'no', 'caption.txt':f'{len(boxes)} shapes'}

SAMPLES = [sample(i) for i in range(N)]

@pytest.fixture(scope='module')
def store(): return in_memory(SAMPLES, name='shapes', vocab={'mask.png':CODES})

@pytest.fixture(autouse=True)
def tidy():
    set_seed(0)
    yield
    plt.close('all')

class Small(nn.Module):
    "A model with `n` numbers per image, or per pair of images; of shape `shape`"
    def __init__(self, n, *shape):
        super().__init__()
        self.conv,self.lin,self.shape = nn.Conv2d(3, 4, 3, stride=2),nn.Linear(4, n),shape
    def forward(self, *xs):
        features = sum(k*F.relu(self.conv(x)).mean((2,3)) for k,x in enumerate(xs, 1) if isinstance(x, torch.Tensor))
        out = self.lin(features)
        return out.view(-1, *self.shape) if self.shape else out.squeeze(-1)

class Detector(nn.Module):
    "`n` boxes and their labels"
    def __init__(self, n=3, c=3):
        super().__init__()
        self.boxes,self.labels = Small(n*4, n, 4),Small(n*c, n, c)
    def forward(self, x): return self.boxes(x).tanh(),self.labels(x)

class DetectionLoss:
    "The first boxes of a batch beside those of the model"
    def __call__(self, pred, boxes, labels):
        n = min(boxes.shape[1], 3)
        of_labels = F.cross_entropy(pred[1][:,:n].flatten(0, 1), labels[:,:n].flatten().long())
        return F.mse_loss(pred[0][:,:n], boxes[:,:n])+of_labels
    def activation(self, pred): return pred
    def decodes(self, pred): return TensorBBox(pred[0]),TensorMultiCategory(pred[1].argmax(-1))

class BoxLoss(DetectionLoss):
    def __call__(self, pred, boxes): return F.mse_loss(pred[:,:boxes.shape[1]], boxes[:,:3])
    def decodes(self, pred): return TensorBBox(pred)

# `{kind: (target, model, loss or `None` for fastai's)}`; the notebooks of `nbs/tutorials` do the same with other kinds
CASES = {
    'mask':('mask.png', lambda: nn.Conv2d(3, 3, 3, padding=1), None),
    'points':('points.npy', lambda: Small(4, 2, 2), None),
    'boxes':(['boxes.npy','labels'], Detector, DetectionLoss()),
    'boxes without labels':('boxes.npy', lambda: Small(12, 3, 4), BoxLoss()),
    'one number':('age.f4', lambda: Small(1, 1), None)}

def tfms(): return dict(item_tfms=Resize(20), batch_tfms=aug_transforms(max_rotate=20., size=16))

KW = dict(bs=6, num_workers=0, device='cpu')

def from_store(store, x, y, **kwargs):
    return DataLoaders.from_store(store, x=x, y=y, seed=1, **{**tfms(), **KW, **kwargs})

@pytest.mark.parametrize('kind', [kind if kind in ('mask','boxes','points') else
    pytest.param(kind, marks=pytest.mark.slow) for kind in CASES])
def test_everything_that_a_user_does(store, kind, tmp_path):
    "Show a batch, train, show results, predict, export and load"
    y,make,loss = CASES[kind]
    dls = from_store(store, 'png', y)
    dls.show_batch()
    assert len(plt.gcf().axes)==6 and all(len(ax.images)==(2 if kind=='mask' else 1) for ax in plt.gcf().axes)
    learn = Learner(dls, make(), loss_func=loss, path=tmp_path)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        learn.show_results(max_n=2)
        assert all(ax.images for ax in plt.gcf().axes)
        learn.export(tmp_path/'learner.pkl')
        again = load_learner(tmp_path/'learner.pkl')
        a,b,c = learn.predict(2),again.predict(2),learn.predict({'png':SAMPLES[2]['png']})
    assert str(a)==str(b)==str(c)

def test_images_that_are_inputs_are_shown_beside_each_other_and_a_caption_above(store):
    for x,title in (['png','other.png'],'yes|no'), (['png','caption.txt'],'xxbos '), ({'png':PILImageBW},'yes|no'):
        from_store(store, x, 'same.cls').show_batch()
        axes = plt.gcf().axes
        assert len(axes)==6 and all(len(ax.images)==1 and re.match(title, ax.get_title()) for ax in axes)

def test_the_loss_is_that_of_the_table(store):
    targets = {'category':'cls', 'multi-category':'labels', 'mask':'mask.png', 'points':'points.npy',
               'one number':'age.f4', 'several numbers':'xy.npy'}
    losses = {kind.name:kind.loss for kind in KINDS if kind.loss}
    assert losses.keys()==targets.keys()
    for kind,y in targets.items():
        assert str(from_store(store, 'png', y).loss_func)==str(globals()[losses[kind]]()), kind

# --- targets and the transforms of their image

def bright(i):
    "A bright rectangle, its mask, its box and its centre"
    rng = np.random.default_rng(i)
    x,y,w,h = (int(o) for o in rng.integers((14,14,8,8), (20,20,14,14)))
    pixels,codes = rng.integers(0, 40, (48,48+i%3,3)).astype(np.uint8),np.zeros((48,48+i%3), np.uint8)
    pixels[y:y+h,x:x+w],codes[y:y+h,x:x+w] = 255,1
    return {'png':Image.fromarray(pixels), 'mask.png':Image.fromarray(codes), 'boxes.npy':[[x,y,x+w,y+h]],
        'points.npy':[[x+w/2,y+h/2]]}

TFMS = {'squish':dict(item_tfms=Resize(40, ResizeMethod.Squish)), 'flip':dict(batch_tfms=Flip(p=1)),
    'all':dict(item_tfms=RandomResizedCrop(44, min_scale=.8), batch_tfms=[Flip(p=1), Zoom(1.2, 1.2, p=1)])}

@pytest.mark.parametrize('tfms', TFMS)
def test_targets_follow_the_transforms_of_their_image(tfms):
    dls = DataLoaders.from_store(in_memory(range(12), bright), y=['mask.png', 'points.npy', 'boxes.npy'], valid_pct=0,
        **{**KW, 'bs':12, 'item_tfms':Resize(40), **TFMS[tfms]})
    seen = 0
    for images,masks,points,boxes in [dls.train.one_batch() for _ in range(2)]:
        size = images.shape[-1]
        for image,mask,point,box in zip(images, masks, points, boxes):
            lit = (image.mean(0)>.6).numpy()
            rows,columns = np.flatnonzero(lit.any(1)),np.flatnonzero(lit.any(0))
            is_cut = min(rows[0], columns[0])==0 or max(rows[-1], columns[-1])==size-1   # by the transform
            if is_cut: continue
            expected = np.array([columns[0], rows[0], columns[-1]+1, rows[-1]+1])
            found = (box.numpy()[0]+1)*size/2
            assert np.abs(found-expected).max()<=2, (found,expected)
            assert np.abs((point.numpy()[0]+1)*size/2-(expected[:2]+expected[2:])/2).max()<=2
            assert (lit!=(mask.numpy()>0)).mean()<.06
            seen += 1
    assert seen>=8

def test_boxes_that_leave_the_image_are_clipped_and_dropped():
    "As fastai's `bb_pad` does, and with their labels"
    store = in_memory(range(4), lambda i: {'png':Image.new('RGB', (40,20)), 'labels':['a','b','a'][:i],
        'boxes.npy':[[0,0,6,6],[16,4,24,12],[8,2,20,10]][:i]})
    dls = DataLoaders.from_store(store, valid_pct=0, item_tfms=Resize(20), **{**KW, 'bs':4})
    boxes,labels = dls.test_dl([0,1,2,3], with_labels=True).one_batch()[1:]   # cropped at the centre
    assert boxes.shape==(4,2,4) and labels.tolist()==[[0,0],[0,0],[2,0],[2,1]] and labels.dtype==torch.int64
    assert torch.allclose((boxes[3]+1)*10, tensor([[6.,4,14,12],[0,2,10,10]]))   # the image is cut from 10 to 30

# --- which block a field gets

FIELDS = {'strokes':'image', 'small.mask.npy':'mask', 'face.keypoints.npz':'points', 'landmarks.json':'points',
    'bboxes.json':'bounding boxes', 'bbox.xywh.npy':'bounding boxes', 'checkpoints.npy':'several numbers'}
TYPES = {PILImage:'image', PILImageBW:'grayscale image', PILMask:'mask', TensorPoint:'points',
    TensorBBox:'bounding boxes', LabeledBBox:'labels of boxes', Tensor:'several numbers'}

def test_a_name_a_type_or_how_it_is_drawn_says_what_a_field_holds():
    assert {field:kind_of(FieldChoice(field)).name for field in FIELDS}==FIELDS
    assert {cls:kind_of(FieldChoice('any', img_cls=cls)).name for cls in TYPES}==TYPES
    # drawings with times are points only if they are not to be sequences
    assert kind_of(FieldChoice('points.npy', draw=StrokeSequence())).name=='drawing as a sequence'
    assert kind_of(FieldChoice('points.npy', draw=Rasterise())).name=='points'
    for kind in [k for k in KINDS if k.example!='strokes']:
        chosen = PILImageBW if kind.name=='grayscale image' else None
        assert kind_of(FieldChoice(kind.example, img_cls=chosen)) is kind

def test_a_field_is_input_and_target_with_a_type_each():
    "A model that colours grey images has one field twice"
    for y,kind in ({'png':PILImage}, PILImage),('png', PILImage),({'png':PILImageBW}, PILImageBW):
        inputs,targets = choose_fields(MemoryStore({'png':[b'']}), {'png':PILImageBW}, y)
        assert [choice.img_cls for choice in inputs+targets]==[PILImageBW,kind]

@pytest.mark.parametrize('kind', [int, TensorCategory, 'PILMask'])
def test_other_types_are_refused(kind):
    error = r"RedisBlock\('any'\): img_cls takes a type of image, such as PILImageBW or PILMask, TensorPoint"
    with pytest.raises(TypeError, match=error):
        kind_of(FieldChoice('any', img_cls=kind))

def odd(i):
    "Arrays whose names say nothing, or the wrong thing"
    return {'png':Image.new('RGB', (30,20)), 'cls':'ab'[i%2], 'pts.npy':np.float32([[1,2],[3,4]]),
        'corners.npy':np.float32([[1,2,9,9]]), 'names.labels':['a'], 'points.npy':np.zeros((5,3), np.float32),
        'boxes.npy':np.float32([[10,10,5,5]]), 'bbox.xywh.npy':np.float32([10,8,5,6]),
        'keypoints.npy':np.float32([1,2,3]), 'landmarks.npy':np.float32([1,2,3,4]), 'few.labels':['a','b'],
        'boxes.json':[[1,2],[3]], 'caption.txt':'a text', 'bboxes.txt':'1 2 3 4', 'age.f4':1.5}

@pytest.fixture(scope='module')
def odd_store(): return in_memory(range(10), odd, 'odd')

def loaders(store, *blocks, **kwargs):
    block = DataBlock((RedisBlock, *blocks), n_inp=1, get_items=get_remote_items, splitter=RandomStoreSplitter())
    return block.dataloaders(store, **{**KW, 'bs':4, **kwargs})

def batch(store, *blocks): return loaders(store, *blocks).one_batch()

def test_types_that_a_user_chooses(odd_store):
    _,points = batch(odd_store, RedisBlock(odd_store, 'pts.npy', TensorPoint))
    assert type(points) is TensorPoint and torch.allclose(points[0], tensor([[1,2],[3,4]])*2/tensor([30.,20])-1)
    _,boxes,labels = batch(odd_store, RedisBlock(odd_store, 'corners.npy', TensorBBox),
        RedisBlock(odd_store, 'names.labels', LabeledBBox))
    assert type(boxes) is TensorBBox and boxes.shape==(4,1,4) and labels.tolist()==[[1]]*4
    dls = DataLoaders.from_store(odd_store, y={'corners.npy':TensorBBox, 'names.labels':None}, **{**KW, 'bs':4})
    assert dls.one_batch()[2].tolist()==[[1]]*4 and dls.vocab==['#na#','a']
    assert batch(odd_store, RedisBlock(odd_store, 'points.npy', Tensor))[1].shape==(4,5,3)
    grey,_ = DataLoaders.from_store(odd_store, x={'png':PILImageBW}, y='cls', bs=4, num_workers=0).one_batch()
    assert type(grey) is TensorImageBW and grey.shape==(4,1,20,30)

def test_corners_of_narrow_numbers_do_not_overflow():
    for dtype,x,width in ('u1',200,100), ('i1',100,100), ('u2',65_000,1000), ('i2',32_000,1000), ('f2',2048,3):
        assert as_sized_boxes(np.array([[x,10,width,50]], dtype)).tolist()==[[x,10,x+width,60]]

def test_boxes_with_sizes_become_corners(odd_store):
    _,boxes = batch(odd_store, RedisBlock(odd_store, 'bbox.xywh.npy'))
    assert torch.allclose(boxes[0,0], tensor([10.,8,15,14])*2/tensor([30.,20,30,20])-1)
    assert batch(odd_store, RedisBlock(odd_store, 'landmarks.npy'))[1].shape==(4,2,2)

WRONG = {
    'points.npy':r"an array of shape \(5, 3\), .*: points with times take draw=StrokeSequence\(…\), .* the type Tensor",
    'keypoints.npy':r"an array of shape \(3,\), while points",
    'boxes.json':r"boxes are numbers, not \[\[1, 2\], \[3\]\]",
    'boxes.npy':r"box 0 is \[10.0, 10.0, 5.0, 5.0\], which ends before it begins: .*needs a part xywh"}

@pytest.mark.parametrize('field', WRONG)
def test_arrays_of_another_shape_are_errors_that_name_the_sample(odd_store, field):
    for workers in (0,1) if field=='boxes.npy' else (0,):
        with fails(ValueError, match=rf"odd: sample \d+, field '{field}': {WRONG[field]}"):
            loaders(odd_store, RedisBlock(odd_store, field), num_workers=workers).one_batch()

def test_boxes_and_labels_of_different_numbers_are_an_error(odd_store):
    blocks = RedisBlock(odd_store, 'corners.npy', TensorBBox),RedisBlock(odd_store, 'few.labels', LabeledBBox)
    with fails(ValueError, 'item 0 of a batch has 1 boxes and 2 labels: each box needs one label, in the order of the'):
        batch(odd_store, *blocks)

def test_boxes_and_their_labels_are_the_default_target_if_there_is_no_category(store):
    kw = {**KW, 'bs':4}
    assert DataLoaders.from_store(store, item_tfms=Resize(16), **kw).vocab==['disc','ground','square']   # `cls`
    for labels in 'labels','boxes.labels':
        row = {'png':Image.new('RGB', (9,9)), labels:['b','a','b'], 'boxes.npy':[[0,0,5,5]]*3}
        s = in_memory([row]*8)
        dls = DataLoaders.from_store(s, **kw)
        assert dls.vocab==['#na#','a','b'] and dls.one_batch()[2].tolist()==[[2,1,2]]*4
        assert (DataLoaders.from_store(s, y=labels, **kw).vocab==['a','b'])==(labels=='labels')

def test_labels_of_boxes_keep_their_order_and_repetitions(put):
    rows = [{'cls':'a', 'labels':o['labels']} for o in SAMPLES]
    assert [o['labels'] for o in put(rows, shuffle=False)[0]]==[o['labels'] for o in rows]

# --- messages that say what to do

def test_a_value_that_is_no_image_is_shown(odd_store):
    for field,says in ('age.f4','the number .*1.5.* that'), ('caption.txt',"6 bytes that .*the codec 'txt' stores no"):
        with fails(CorruptSample, rf"sample \d+, field '{field}': {says}"): Fetch(field, odd_store, PILImage)(3)

def test_a_fetch_that_was_never_set_up_says_what_it_lacks():
    store = MemoryStore({'png':[b''], 'boxes.npy':[b'']}, 'd')
    for use in (lambda: Fetch('png')(3), lambda: Fetch(img_cls=PILImage)(3), lambda: Fetch()({'png':b''}),
                lambda: Fetch(store=store)({'png':b''}), lambda: Fetch(store=store)(0)):
        with fails(ValueError, r'Fetch\(.* knows no (store|field): use get_items=get_remote_items, or Fetch'): use()
    with fails(ValueError, match="a sample, field 'boxes.npy': box 0 is"):
        Fetch('boxes.npy', convert=as_boxes)({'boxes.npy':np.array([[5,5,0,0]])})
    for bad in ([0,0,np.nan,1], [0,-np.inf,1,1], [0,0,1,np.inf]):
        for convert in as_boxes,as_sized_boxes:
            with pytest.raises(ValueError, match='box 1 is .*(nan|inf).*, but numbers of a box are finite'):
                convert([[0,0,1,1],bad])

def test_arguments_of_a_data_block_are_named(odd_store):
    for argument in 'get_y','get_x','blocks','getters','get_items':
        error = f"knows no '{argument}', which is an argument of DataBlock: .*{argument}=….*x= and y= of from_store"
        with pytest.raises(TypeError, match=error): DataLoaders.from_store(odd_store, **{argument:[]})

def test_a_field_is_no_sample(store):
    with pytest.raises(TypeError, match=r"store\[i\] is sample number i, not field 'cls': get_many"): store['cls']
    with pytest.raises(TypeError, match='for a list of numbers: get_many'): store[[1,2]]
    for items in get_remote_items(store),RemoteDataset(store):
        with pytest.raises(TypeError, match="a position is an integer, not the str 'cls'"): items['cls']
    assert len(DataLoaders.from_store(store, bs=4, num_workers=0).train_ds[[1,2]])==2

def test_a_loader_of_integer_labels_has_as_many_classes():
    store = in_memory([{'x.npy':np.ones(3), 'cls':[3,7][i%2]} for i in range(12)])
    dls = DataLoaders.from_store(store, x='x.npy', **{**KW, 'bs':4})
    assert dls.c==2 and list(dls.vocab)==[3,7] and {int(y) for _,ys in dls.train for y in ys}=={0,1}

def test_the_table_of_the_guide_is_what_the_code_says():
    path = Path(__file__).parents[1]/'tools/kinds.py'
    spec = importlib.util.spec_from_file_location('kinds_tool', path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = tool.PAGE.read_text(encoding='utf-8')
    assert page.count('| **')==len(KINDS) and tool.text(page)==page, 'run `make kinds`'
    with pytest.raises(ValueError, match='no place for the table'): tool.text('a page')

def test_labels_come_right_after_their_boxes(store):
    error = r"shapes: y=\['labels', 'boxes.npy'\]: the labels of boxes come right after the boxes"
    with pytest.raises(ValueError, match=error): from_store(store, 'png', ['labels','boxes.npy'])
    # a multi-category after boxes is left alone in a DataBlock
    block = DataBlock((RedisBlock, RedisBlock(store, 'boxes.npy'), RedisBlock(store, 'labels')), n_inp=1,
        get_items=get_remote_items, splitter=RandomStoreSplitter(), item_tfms=Resize(16))
    _,boxes,labels = block.dataloaders(store, **{**KW, 'bs':8}).one_batch()
    assert boxes.shape[0]==8 and labels.shape==(8,2) and labels.dtype==torch.float32

def test_two_workers_give_the_same_boxes(store):
    alone,with_workers = [from_store(store, 'png', ['boxes.npy','labels'], num_workers=n).valid for n in (0,2)]
    for a,b in zip(alone, with_workers): assert all(torch.equal(p, q) and type(p) is type(q) for p,q in zip(a, b))
