"""Pipelines as data, run with stock fastai and with `fastai_remote`, and compared bit for bit

A `Pipeline` says what a user would write: the kind of image, transforms, subclasses, patches, arguments of the loader.
`run` builds it over files with stock fastai (`where='files'`), or over a store (`'redis'`, `'shards'`), always in a
process of its own, so that no patch, no method taught to a transform and no random state outlives it. What a training
loop would see comes back as a `Record`; `difference` compares two of them.
"""
import pickle, random, sys, traceback, types, zlib
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import ExifTags, Image, ImageCms, ImageFile, ImageOps, JpegImagePlugin
from fastai.data import load as fastai_load
from fastai.vision import augment as fastai_augment, core as fastai_core
from fastai.vision.all import *
from fasttransform import DisplayedTransform, InplaceTransform, ItemTransform, Pipeline as TfmPipeline, Transform
from plum import Function
from torch.utils.data._utils.collate import default_collate_fn_map
from in_memory import encoded
from interpreters import start_fork

import fastai_remote
from fastai_remote import Fetch, RandomStoreSplitter, Rasterise, RedisBlock, ShardBlock, StoreSplitter, get_remote_items
import fastai_remote.block   # gives `DataLoaders` its `from_redis` and `from_shards`

# ---------------------------------------------------------------------------------------------------------------------
# Data: 20 samples, each with an image of every kind

N,N_TRAIN = 20,14
LABELS = 'cat dog bird'.split()

def noise(i, w=40, h=32, channels=3, coarse=7):
    "Smooth noise with fine grain, which is about what a photograph is to a decoder; shape (h, w, channels)"
    rng = np.random.default_rng([i, w, h])
    small = rng.integers(0, 256, (h//coarse+2, w//coarse+2, channels), dtype=np.uint8)
    planes = [Image.fromarray(small[..., c]).resize((w, h), Image.Resampling.BICUBIC) for c in range(channels)]
    grain = rng.integers(-12, 13, (h, w, channels))
    return (np.stack([np.asarray(o) for o in planes], -1)+grain).clip(0, 255).astype(np.uint8)

def picture(i, mode='RGB', **kwargs):
    "Picture `i` in `mode`"
    im = Image.fromarray(noise(i, **kwargs))
    if mode=='P': return im.quantize(64)
    if mode=='I;16': return Image.fromarray(np.asarray(im.convert('L')).astype(np.uint16)*257)
    if mode in ('RGBA', 'LA'): im.putalpha(Image.fromarray(noise(i+100, **kwargs)[..., 0]))
    return im.convert(mode)

def jpeg(i, mode='RGB', size=(40, 32), **kwargs):
    return encoded(picture(i, mode, w=size[0], h=size[1]), 'JPEG', **{'quality':90, **kwargs})

def exif(i):
    "EXIF with an orientation of 1 to 8 and a text"
    e = Image.Exif()
    e[ExifTags.Base.Orientation] = i%8+1
    e[ExifTags.Base.ImageDescription] = f'picture {i}'
    return e.tobytes()

_icc = ImageCms.ImageCmsProfile(ImageCms.createProfile('sRGB')).tobytes()

def camera(i, **kwargs):
    "A JPEG as a camera writes it: EXIF with an orientation, a colour profile, a resolution, a comment"
    return jpeg(i, **{'exif':exif(i), 'icc_profile':_icc, 'dpi':(300, 200), 'comment':b'seen', **kwargs})

def sizes(i): return [(40, 32), (31, 47), (64, 20), (33, 33), (90, 70)][i%5]
def various(i):
    "A JPEG of one of six kinds and five sizes"
    kind = [{}, {'mode':'L'}, {'mode':'CMYK'}, {'progressive':True}, {'subsampling':0}, {'exif':exif(i)}][i%6]
    return jpeg(i, size=sizes(i), **kind)

def thin(i): return [(1, 30), (30, 1), (1, 1), (2, 9), (25, 3)][i%5]

def cut(i):
    "A JPEG that may end too early, which Pillow reads only with `LOAD_TRUNCATED_IMAGES`"
    b = jpeg(i, size=(64, 48))
    return b[:len(b)*2//3] if i%7==3 else b

def incomplete(i):
    "A progressive JPEG that lacks scans: Pillow opens it without an error, libjpeg smooths it in its own way"
    b = jpeg(i, 'L' if i%3==0 else 'RGB', size=(80, 60), progressive=True, quality=85)
    scans = [k for k in range(len(b)-1) if b[k:k+2]==b'\xff\xda']
    return b[:scans[-1] if i%2 else scans[1]]+b'\xff\xd9'

def photograph(i):
    "A JPEG of 240 x 180 or 180 x 240 pixels, sampled in one of three ways"
    return jpeg(i, size=(240, 180) if i%2 else (180, 240), subsampling=i%3)

def strokes(i):
    "A drawing of three strokes"
    steps = np.random.default_rng(i).integers(-20, 21, (3, 2, 9))
    return list(np.clip(np.cumsum(steps, 2)+127, 0, 255).astype(np.uint8))

IMAGES = {   # field: bytes of image i. All of one size but for those that say otherwise
    'rgb.jpg': jpeg,
    'grey.jpg': lambda i: jpeg(i, 'L'),
    'cmyk.jpg': lambda i: jpeg(i, 'CMYK'),
    'camera.jpg': camera,
    'large.jpg': photograph,
    'sizes.jpg': various,
    'thin.jpg': lambda i: jpeg(i, size=thin(i)),
    'cut.jpg': cut,
    'incomplete.jpg': incomplete,
    'rgb.png': lambda i: encoded(picture(i), 'PNG'),
    'grey.png': lambda i: encoded(picture(i, 'L'), 'PNG'),
    'palette.png': lambda i: encoded(picture(i, 'P'), 'PNG', transparency=3),
    'alpha.png': lambda i: encoded(picture(i, 'RGBA'), 'PNG'),
    'deep.png': lambda i: encoded(picture(i, 'I;16'), 'PNG'),
    'text.png': lambda i: encoded(picture(i), 'PNG', dpi=(72, 72), exif=exif(i)),
    'sizes.png': lambda i: encoded(picture(i, w=sizes(i)[0], h=sizes(i)[1]), 'PNG'),
    'rgb.webp': lambda i: encoded(picture(i), 'WEBP', quality=80, exif=exif(i)),
    'tiff.img': lambda i: encoded(picture(i), 'TIFF', dpi=(90, 90)),
    'rgb.npyimg': noise,   # of these, stock has PNG files
    'grey.npyimg': lambda i: noise(i, channels=1)[..., 0],
    'both.npzimg': lambda i: noise(i) if i%3 else noise(i)[..., 0],
    'drawn.strokes': strokes,
}
_mixed = [k for k in IMAGES if k.split('.')[0] not in ('sizes', 'thin', 'cut', 'incomplete', 'large', 'drawn',
    'both') and not k.endswith('npyimg')]
IMAGES['mixed.img'] = lambda i: IMAGES[_mixed[i%len(_mixed)]](i)

TARGETS = {   # field: value of sample i
    'cls': lambda i: LABELS[zlib.crc32(b'%d' % i)%3],
    'labels': lambda i: [o for k,o in enumerate(LABELS) if (i+1)>>k&1],
    'age.f4': lambda i: i*.375-2,
    'k.i8': lambda i: (i*i-50)<<24|i,   # more digits than a float has
    'w.f8': lambda i: i/7+.1,
    'xy.npy': lambda i: np.float32([i, 1/(i+1)]),
    'points.npy': lambda i: np.float32([[i, 30-i], [39, i]]),
    'boxes.npy': lambda i: np.float32([[2+k, i, 20+5*k, i+9] for k in range(1+i%3)]),
    'boxes.labels': lambda i: LABELS[:1+i%3],   # without any, stock gives floats, and ours integers
    'mask.png': lambda i: encoded(Image.fromarray(noise(i+50)[..., 0]//64), 'PNG'),
}

def sample(i): return {**{k:f(i) for k,f in IMAGES.items()}, **{k:f(i) for k,f in TARGETS.items()}}

def file_of(field, value):
    "What stock fastai has in a file of it; `None` of other targets than masks"
    if isinstance(value, bytes): return value
    if field.endswith('npyimg') or field.endswith('npzimg'): return encoded(Image.fromarray(value), 'PNG')
    return encoded(Rasterise().create(value), 'PNG') if field.endswith('strokes') else None

@dataclass
class Data:
    "The same samples as files, in Redis and in shards"
    files:Path
    stores:dict # `{'redis': RedisStore, 'shards': ShardStore}`

    @classmethod
    def make(cls, rows, url, name, folder, **options):
        "Write `rows` everywhere"
        how = dict(num_workers=1, shuffle=False, progress=False, splits={'train':N_TRAIN, 'valid':None}, **options)
        was,ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES,True
        try:
            reports = [fastai_remote.to_redis(rows, url, name, **how),
                fastai_remote.to_shards(rows, folder/'shards', chunk=6, **how)]
        finally: ImageFile.LOAD_TRUNCATED_IMAGES = was
        assert not any(report.failed for report in reports), f'not all samples are there: {reports}'
        for i,row in enumerate(rows):
            for k,v in row.items():
                if (content:=file_of(k, v)) is None: continue
                (folder/'files'/k).mkdir(parents=True, exist_ok=True)
                (folder/'files'/k/f'{i}{Path(k).suffix}').write_bytes(content)
        return cls(folder/'files', {'redis':fastai_remote.RedisStore(url, name),
            'shards':fastai_remote.ShardStore(folder/'shards')})

    def path(self, kind, i): return self.files/kind/f'{i}{Path(kind).suffix}'

# ---------------------------------------------------------------------------------------------------------------------
# What a pipeline is

@dataclass(frozen=True)
class T:
    "A transform: one of fastai's or of `USERS`, its arguments, and what a user changes about it"
    name:str
    kw:dict = field(default_factory=dict)
    own:str = '' # What a subclass of it has of its own: a method, or `nothing`
    put:dict = field(default_factory=dict) # Attributes set on the instance; a key of `PUT` for functions

    def make(self):
        "A new instance"
        cls = USERS.get(self.name) or globals()[self.name]
        if self.own: cls = derived(self.own.removeprefix('nothing'), cls)
        t = cls(**self.kw)
        for k,v in self.put.items(): setattr(t, k, PUT[v](t) if isinstance(v, str) and v in PUT else v)
        return t

def made(ts):
    "New instances of transforms; `aug_transforms` makes several"
    return [t for o in ts for t in L(o.make())]

@dataclass(frozen=True)
class Pipeline:
    "All that a user says of a pipeline"
    image:str = 'rgb.jpg' # A key of `IMAGES`
    cls:str = 'PILImage' # A key of `CLASSES`
    target:str = 'cls' # A key of `TARGET_BLOCKS`
    entry:str = 'block' # `block`; `factory`: `from_redis`, `from_shards`; `opened`: fastai opens what `Fetch` gives
    typed:tuple = () # Transforms in the block of the image
    item:tuple = () # `item_tfms`
    batch:tuple = () # `batch_tfms`
    changes:tuple = () # Keys of `CHANGES`: what a user does to fastai or Pillow beforehand
    split:str = 'store' # `store`, `random`, `lists`
    bs:int = 4
    workers:int = 0
    shuffle:bool = True
    loader:dict = field(default_factory=dict) # Other arguments of the loader
    new:dict = field(default_factory=dict) # Arguments of `dls.train.new`
    derived:str = '' # A key of `DERIVED`: a subclass of the loader's class
    prepared:str = '' # A key of `PREPARED`: what a user does to the loaders once they are made
    during:str = '' # A key of `DURING`: what a user changes after the second batch of each epoch
    consumer:str = 'draws' # What the training loop does with batches: see `_consume`
    threads:int = 0 # Of a loader over a store

# ---------------------------------------------------------------------------------------------------------------------
# Image classes

class Negative(PILImage):
    "Has a `create` of its own"
    @classmethod
    def create(cls, fn, **kwargs): return cls(negative(PILImage.create(fn, **kwargs)))

class AsIs(PILImage): _open_args = {'mode':None}
class Plain(PILImage): "A subclass of a user, with nothing of its own"
CLASSES = dict(PILImage=PILImage, PILImageBW=PILImageBW, PILMask=PILMask, Negative=Negative, AsIs=AsIs, Plain=Plain)

# ---------------------------------------------------------------------------------------------------------------------
# What code of users does to pictures. Mostly it shows in about two of three images:
# a fast way that looks at the first sample only must not get away with it

_new_image = Image.Image._new   # as Pillow has it, whatever is patched

def some(a):
    "Is this one of the images that are changed?"
    return zlib.crc32(np.ascontiguousarray(a).tobytes())%3>0

def negative(im):
    "`im` with all values inverted, or as it is, of the same type and `info`"
    a = np.array(im)
    res = Image.fromarray(255-a if some(a) else a)
    res.info = dict(im.info)
    return type(im)(res) if isinstance(im, PILBase) else res

def marked(im, k=0):
    "A copy of `im` with its first pixel changed to `k`"
    a = np.array(im)
    a.reshape(a.shape[0], a.shape[1], -1)[0, 0] = k%256
    res = Image.fromarray(a)
    res.info = dict(im.info)
    return type(im)(res) if isinstance(im, PILBase) else res

seen = []   # what transforms with `facts` have been given, in this process

def facts(x):
    "All that code could find out about an image"
    try: e = sorted((k, repr(v)) for k,v in x.getexif().items())
    except Exception as err: e = type(err).__name__
    return dict(type=type(x).__qualname__, mode=x.mode, size=tuple(x.size), shape=tuple(x.shape), repr=repr(x),
        format=getattr(x, 'format', 'no'), info=sorted((k, repr(v)) for k,v in x.info.items()), exif=e,
        palette=getattr(x.palette, 'mode', None), readonly=x.readonly, mine=getattr(x, 'mine', None),
        attributes=sorted(k for k in vars(x) if not k.startswith('_')), pixels=zlib.crc32(np.asarray(x).tobytes()))

class Facts(Transform):
    "Marks an image with a checksum of its `facts`"
    def encodes(self, x:Image.Image):
        seen.append(facts(x))
        return marked(x, zlib.crc32(repr(sorted(seen[-1].items())).encode()))

class Buffer(Transform):
    "Gives the same image each time, with other pixels"
    buffer = None
    def encodes(self, x:PILImage):
        if self.buffer is None or self.buffer.size!=x.size: self.buffer = PILImage(Image.new(x.mode, x.size))
        self.buffer.paste(x)
        return self.buffer

class Previous(Transform):
    "Paints over the image it has given out before"
    last = None
    def encodes(self, x:PILImage):
        if self.last is not None: self.last.paste(7, (0, 0, *self.last.size))
        self.last = x
        return x

class Counter(DisplayedTransform):
    "Marks images with their number"
    n = 0
    def encodes(self, x:PILImage):
        self.n += 1
        return marked(x, self.n*17)

class Draws(Transform):
    "Marks images with random numbers of all global generators"
    def encodes(self, x:Image.Image):
        return marked(x, int(random.random()*99)+int(np.random.rand()*99)+int(torch.rand(1)*57))

class Skip(Transform):
    "Leaves out some samples"
    def encodes(self, x:PILImage):
        if zlib.crc32(np.asarray(x).tobytes())%5==1: raise SkipItemException()
        return x

class Raise(Transform):
    "Fails for some samples"
    def encodes(self, x:PILImage):
        if zlib.crc32(np.asarray(x).tobytes())%11==1: raise ValueError('a transform of a user fails')
        return x

class OnPair(ItemTransform):
    "Sees image and label together"
    def encodes(self, o):
        x,*ys = o
        return (negative(x) if isinstance(x, Image.Image) and int(torch.as_tensor(ys[-1]).sum())%2 else x, *ys)

class NoRetain(ItemTransform):
    "Gives a plain image, which nobody casts back"
    _retain = False
    def encodes(self, o): return tuple(_new_image(x, x.im.copy()) if isinstance(x, Image.Image) else x for x in o)

class InPlace(InplaceTransform):
    "Writes to the image, gives back nothing"
    def encodes(self, x:PILImage): x.putpixel((0, 0), 9 if x.mode=='L' else (9,)*len(x.mode))

class OnTensor(Transform):
    "Works on the item's tensor, after `ToTensor`"
    order = 6
    def encodes(self, x:TensorImage): return 255-x

class WriteBatch(Transform):
    "Writes to a batch of images in place"
    order = 5
    def encodes(self, x:TensorImage):
        x[:, 0] = x[:, 0]*0+1
        return x

class RandomBatch(RandTransform):
    "Draws for a batch, from all global generators"
    def encodes(self, x:TensorImage): return x+int(random.random()*50)+int(np.random.rand()*50)+int(torch.rand(1)*50)

class PreviousBatch(Transform):
    "Writes to the batch before"
    order,last = 20,None
    def encodes(self, x:TensorImage):
        if self.last is not None: self.last.add_(1)
        self.last = x
        return x

class BatchPair(ItemTransform):
    "Sees inputs and targets of a batch"
    order = 30
    def encodes(self, b): return (b[0]+float(b[-1].reshape(-1)[0]), *b[1:])

def same(x): return x
def inverted(x:PILImage): return negative(x)
def smaller(x:PILImage): return x.resize((12, 14))
def to_alpha(x:PILImage): return x.convert('RGBA')
def to_tensor_image(x:PILImage): return TensorImage(image2tensor(x))
def to_bw(x:PILImage): return PILImageBW(x.convert('L'))
def twice(x:PILImage): return x,negative(x)
def pickled(x:PILImage): return pickle.loads(pickle.dumps(x))
def set_mine(x:PILImage):
    x.mine = 5
    return x
def written(x:PILImage):
    x.paste(200, (0, 0, 3, 3))
    return x
def none_at_all(x:PILImage): return None
item_functions = (same, inverted, smaller, to_alpha, to_tensor_image, to_bw, twice, pickled, set_mine, written,
    none_at_all)
NO_IMAGE = 'to_tensor_image','twice','none_at_all'   # stock may fail

def int_batch(x:TensorImage): return (x*255).long()

USERS = {o.__name__:o for o in (Facts, Buffer, Previous, Counter, Draws, Skip, Raise, OnPair, NoRetain, InPlace,
    OnTensor, WriteBatch, RandomBatch, PreviousBatch, BatchPair)}
USERS.update({f.__name__:partial(Transform, f) for f in (*item_functions, int_batch)})

def changed(o):
    "Data with changes: images and labels of an item or a batch"
    if isinstance(o, tuple): return retain_type(tuple(map(changed, o)), o)
    if isinstance(o, Image.Image): return negative(o)
    if isinstance(o, TensorCategory): return TensorCategory(2-o)
    return 255-o if isinstance(o, torch.Tensor) and o.ndim>2 and some(o.numpy()) else o

def derived(name, cls):
    "A subclass of `cls` with nothing of its own, or whose method `name` changes what it returns"
    if not name: return type('Own', (cls,), {})
    was = getattr(cls, name)
    def method(self, *args, **kwargs):
        res = was(self, *args, **kwargs)
        return map(changed, res) if isinstance(res, types.GeneratorType) else changed(res)
    return type('Own', (cls,), {name:method})

# Attributes of an instance

def _put_encodes(t):
    def encodes(x:PILBase): return negative(x)
    res = Function(encodes)
    res.dispatch(encodes)
    return res

def _put_before_call(t):
    was = t.before_call
    def before_call(b, split_idx):
        random.random()
        was(b, split_idx)
    return before_call

def _put_call(t):
    was = t._call
    def _call(*args, **kwargs): return changed(was(*args, **kwargs))
    return _call

PUT = {'<encodes>':_put_encodes, '<before_call>':_put_before_call, '<call>':_put_call}

# ---------------------------------------------------------------------------------------------------------------------
# What users do to fastai and Pillow before they build a pipeline

CHANGES = {}
def change(f): CHANGES[f.__name__] = f

def _teaches(cls, typ, result):
    "`@cls def encodes(self, o:typ)`, the documented way to extend a transform of fastai"
    def do():
        def encodes(self, o): return result(self, o)
        encodes.__annotations__['o'] = typ
        cls(encodes)
    CHANGES[f'{cls.__name__} on {typ.__name__}'] = do

for _typ in PILImage,PILBase,PILImageBW,Plain:
    _teaches(ToTensor, _typ, lambda self, o: o._tensor_cls(changed(image2tensor(o))))
for _typ in TensorImage,TensorImageBW: _teaches(IntToFloatTensor, _typ, lambda self, o: o.float().div_(self.div)*2-1)
_teaches(IntToFloatTensor, TensorMask, lambda self, o: (o.long()+1)%4)
for _cls in Resize,RandomResizedCrop,CropPad,RandomCrop:
    for _typ in PILImage,PILBase: _teaches(_cls, _typ, lambda self, o: negative(o.resize(tuple(self.size))))
for _typ in PILImage,PILBase,Image.Image: _teaches(FlipItem, _typ, lambda self, o: negative(o))
_teaches(DihedralItem, PILImage, lambda self, o: o.transpose(self.k%7))
for _cls in ToTensor,FlipItem: _teaches(_cls, TensorCategory, lambda self, o: changed(o))
_teaches(Categorize, str, lambda self, o: TensorCategory(self.vocab.o2i['cat' if o=='dog' else o]))
_teaches(MultiCategorize, list, lambda self, o: TensorMultiCategory([2-self.vocab.o2i[k] for k in o]))
for _typ in float,int: _teaches(RegressionSetup, _typ, lambda self, o: tensor(abs(o)).float())

def _replaces(owner, name, f):
    "`f(original, *args)` instead of function `name` of a class, as `@patch` does it, or of a module"
    def do():
        was = getattr(owner, name)
        is_classmethod,was = isinstance(was, types.MethodType),getattr(was, '__func__', was)
        def replaced(*args, **kwargs): return f(was, *args, **kwargs)
        setattr(owner, name, classmethod(replaced) if is_classmethod else replaced)
    CHANGES[f"{owner.__name__.removeprefix('fastai.')}.{name}"] = do

def _result_changed(was, *args, **kwargs): return changed(was(*args, **kwargs))

_functions = {Image.Image:'crop resize transpose copy flip_lr crop_pad _do_crop_pad convert',
    PILBase:'crop resize transpose copy flip_lr crop_pad _do_crop_pad create',
    PILImage:'crop resize transpose copy flip_lr crop_pad _do_crop_pad dihedral create', PILImageBW:'create',
    TensorImage:'float div_', RandTransform:'__call__', TfmPipeline:'__call__', Datasets:'__getitem__',
    TfmdLists:'_after_item', DataLoader:'do_item create_item create_batch do_batch retain',
    TfmdDL:'do_item create_batch', fastai_core:'image2tensor load_image', fastai_augment:'tvpad',
    fastai_load:'fa_collate default_collate retain_types'}
for _owner,_names in _functions.items():
    for _name in _names.split(): _replaces(_owner, _name, _result_changed)
_replaces(fastai_augment, '_get_sz', lambda was, x: fastuple(max(1, o-1) for o in was(x)))
_replaces(DataLoader, 'chunkify', lambda was, self, b: (list(o)[::-1] for o in was(self, b)))

def _call_changes(was, self, nm, x, *args, **kwargs):
    "Changes what transforms make of images, but not functions, such as getters: some of them are others here and there"
    res = was(self, nm, x, *args, **kwargs)
    return changed(res) if isinstance(x, (tuple, Image.Image)) and type(self) is not Transform else res
_replaces(Transform, '_do_call', _call_changes)

def _draws_before(was, self, b, split_idx):
    random.random()
    was(self, b, split_idx)
for _cls in RandTransform,RandomResizedCrop,DihedralItem: _replaces(_cls, 'before_call', _draws_before)

for _name,_of,_attribute,_value in (('tensor_class', PILImage, '_tensor_cls', TensorImageBW),
        ('open_args', PILImage, '_open_args', {'mode':'L'}), ('few_pixels', Image, 'MAX_IMAGE_PIXELS', 500),
        ('truncated', ImageFile, 'LOAD_TRUNCATED_IMAGES', True), ('flip_order', FlipItem, 'order', 4),
        ('flip_in_validation', FlipItem, 'split_idx', 1), ('to_tensor_first', ToTensor, 'order', -1),
        ('to_tensor_in_training', ToTensor, 'split_idx', 0)):
    CHANGES[_name] = partial(setattr, _of, _attribute, _value)
CHANGES['open_args_in_place'] = lambda: PILBase._open_args.update(mode='L')

@change
def collate_function():
    default_collate_fn_map[TensorCategory] = lambda batch, *, collate_fn_map=None: torch.stack(batch)+100
@change
def no_c_modules():   # changes nothing, but how it is done
    for m in [m for name,m in sys.modules.items() if name.startswith('fastai_remote')]:
        for name,v in list(vars(m).items()):
            if isinstance(v, types.ModuleType) and name in ('_jpeg', '_pixels'): setattr(m, name, None)

def _opens(name):
    def negative_opener(fp, filename):
        return ImageOps.invert(JpegImagePlugin.jpeg_factory(fp, filename).convert('RGB'))
    def do():
        Image.OPEN[name] = negative_opener,lambda prefix: prefix[:2]==b'\xff\xd8'
        if name not in Image.ID: Image.ID.insert(0, name)
    CHANGES[f'opener of {name}'] = do
for _name in 'JPEG','MINE': _opens(_name)

for _dtype in torch.float16,torch.float64: CHANGES[f'default {_dtype}'] = partial(torch.set_default_dtype, _dtype)

# ---------------------------------------------------------------------------------------------------------------------
# What a user does to a loader: subclasses of its class, functions given to it, other classes of what it has

DERIVED = {name or 'nothing':partial(derived, name) for name in ('create_item', 'do_item', 'create_batch', 'do_batch',
    'create_batches', '')}

def _reseed(): set_seed(7)
def _reversed_batch(b): return b[::-1]
def _collate_reversed(b): return fastai_load.fa_collate(b[::-1])
FUNCTIONS = {'<collate>':_collate_reversed, '<reseed>':_reseed, '<reversed>':[_reversed_batch]}
def _resolved(kw): return {k:FUNCTIONS[v] if isinstance(v, str) and v in FUNCTIONS else v for k,v in kw.items()}

class Repeated:
    "A dataset twice, which passes on the attributes of the dataset"
    def __init__(self, dataset): self.dataset = dataset
    def __len__(self): return 2*len(self.dataset)
    def __getitem__(self, i): return self.dataset[i%len(self.dataset)]
    def __getattr__(self, name):
        if name=='dataset': raise AttributeError(name)
        return getattr(self.dataset, name)

def _with_class(o, name): o.__class__ = derived(name, type(o))

def _after_item_replaced(tl):
    was = tl._after_item
    tl._after_item = lambda o: changed(was(o))

PREPARED = {   # what is done to the dataset of the training loader
    'subclass of Datasets': lambda dataset: _with_class(dataset, '__getitem__'),
    'subclass of TfmdLists': lambda dataset: _with_class(dataset.tls[0], '__getitem__'),
    'pipeline of images': lambda dataset: _with_class(dataset.tls[0].tfms, '__call__'),
    'pipeline of labels': lambda dataset: _with_class(dataset.tls[1].tfms, '__call__'),
    '_after_item of images': lambda dataset: _after_item_replaced(dataset.tls[0]),
    '_after_item of labels': lambda dataset: _after_item_replaced(dataset.tls[1]),
    'repeated': Repeated,
}

class Signed(IntToFloatTensor):
    def encodes(self, x:TensorImage): return x.float().div(127.5)-1

def _set(*ts): return lambda pipeline: setattr(pipeline, 'fs', L(*[t() for t in ts]))
def _add(t): return lambda pipeline: pipeline.add(t())

DURING = {   # what is done: (pipeline, what is done to it)
    'a transform is added': ('after_batch', _add(WriteBatch)),
    'a subclass': ('after_batch', _set(Signed)),
    'no transform': ('after_batch', _set()),
    'statistics in place': ('after_batch', lambda pipeline: pipeline.fs[-1].mean.add_(.25)),
    'other statistics': ('after_batch', lambda pipeline: setattr(pipeline.fs[-1], 'mean', pipeline.fs[-1].mean/2)),
    'an item transform is added': ('after_item', _add(partial(Transform, inverted, order=2))),
    'one before the others': ('after_item', _add(partial(Transform, inverted, order=-5))),
    'only ToTensor': ('after_item', _set(ToTensor)),
}
OF_NORMALIZE = 'statistics in place','other statistics'   # which comes last

# ---------------------------------------------------------------------------------------------------------------------
# Targets

class OwnCategorize(Categorize):
    "Counts dogs as cats"
    def encodes(self, o:str): return TensorCategory(self.vocab.o2i['cat' if o=='dog' else o])

def lower(o:str): return 'dog' if o=='cat' else o

def _categorize(cls, *before): return lambda: [*before, cls(vocab=LABELS[::-1], sort=False)]

def _both(make, field):
    "A target whose transforms a user lists: after a getter, or after `Fetch`"
    def ours(block): return TransformBlock(type_tfms=[Fetch(field), *make()], dl_type=block(field).dl_type)
    return [(field, lambda: TransformBlock(type_tfms=make()), ours)]

_category = [('cls', CategoryBlock, lambda block: block('cls'))]
_age = [('age.f4', RegressionBlock, lambda block: block('age.f4'))]
TARGET_BLOCKS = {   # what it is called: [(field, stock's block, ours)]
    'cls': _category,
    'labels': [('labels', MultiCategoryBlock, lambda block: block('labels'))],
    'age.f4': _age,
    'k.i8': [('k.i8', RegressionBlock, lambda block: block('k.i8'))],
    'w.f8': [('w.f8', RegressionBlock, lambda block: block('w.f8'))],
    'mask.png': [('mask.png', MaskBlock, lambda block: block('mask.png', img_cls=PILMask))],
    'two': _category+_age,
    'xy.npy': [('xy.npy', RegressionBlock, lambda block: block('xy.npy'))],
    'points': [('points.npy', lambda: PointBlock, lambda block: block('points.npy'))],
    'boxes': [('boxes.npy', lambda: BBoxBlock, lambda block: block('boxes.npy')),
        ('boxes.labels', partial(BBoxLblBlock, vocab=sorted(LABELS)), lambda block: block('boxes.labels'))],
    'picture': [('rgb.png', ImageBlock, lambda block: block('rgb.png', img_cls=PILImage))],
    'vocab': _both(_categorize(Categorize), 'cls'),
    'own categorize': _both(_categorize(OwnCategorize), 'cls'),
    'relabelled': _both(_categorize(Categorize, lower), 'cls'),
}
FACTORY_TARGETS = {k:[f for f,*_ in v] for k,v in TARGET_BLOCKS.items() if k in ('cls', 'labels', 'age.f4', 'k.i8',
    'w.f8', 'two', 'mask.png')}

# ---------------------------------------------------------------------------------------------------------------------
# Running a pipeline

def _image_block(p, where):
    "The block of the image: stock's, ours, or ours that leaves opening to fastai; with the user's own transforms"
    cls = CLASSES[p.cls]
    if where=='files' or p.entry=='opened': block = ImageBlock(cls)
    else: block = _block(where)(p.image, img_cls=cls)
    if not p.typed: return block
    return TransformBlock(type_tfms=[*block.type_tfms, *made(p.typed)], batch_tfms=block.batch_tfms,
        dl_type=block.dl_type)

def _block(where): return ShardBlock if where=='shards' else RedisBlock

def _splitter(p):
    if p.split=='lists': return lambda items: [list(range(N-1, N-1-N_TRAIN, -1)), list(range(N-N_TRAIN))]
    return StoreSplitter() if p.split=='store' else RandomStoreSplitter(seed=3)

def _loader_arguments(p):
    return dict(bs=p.bs, shuffle=p.shuffle, num_workers=p.workers, device='cpu', **_resolved(p.loader))

def _dls_of_files(p, data, splits):
    "What stock fastai makes of files, `splits` as given"
    targets = TARGET_BLOCKS[p.target]
    getters = [partial(data.path, p.image)]
    getters += [partial(data.path, f) if f in IMAGES or f=='mask.png' else TARGETS[f] for f,*_ in targets]
    block = DataBlock(blocks=[_image_block(p, 'files'), *[b() for _,b,_ in targets]],
        getters=[Transform(_getter(g)) for g in getters], n_inp=1,
        get_items=lambda _: list(range(N)), splitter=lambda _: splits, item_tfms=made(p.item), batch_tfms=made(p.batch))
    return block.dataloaders(None, **_loader_arguments(p))

def _getter(g):
    def get(i): return g(i)
    return get

def dls_of_store(p, store, where):
    "What `fastai_remote` makes of a store"
    tfms = dict(item_tfms=made(p.item), batch_tfms=made(p.batch))
    kwargs = dict(_loader_arguments(p), threads=p.threads)
    if p.entry=='factory':
        return DataLoaders.from_store(store, x=p.image, y=FACTORY_TARGETS[p.target], splitter=_splitter(p),
            img_cls=CLASSES[p.cls], normalize=False, **tfms, **kwargs)
    targets = TARGET_BLOCKS[p.target]
    getters = [Fetch(p.image), *[noop for _ in targets]] if p.entry=='opened' else None
    block = DataBlock(blocks=[_image_block(p, where), *[b(_block(where)) for *_,b in targets]], getters=getters,
        n_inp=1, get_items=get_remote_items, splitter=_splitter(p), **tfms)
    return block.dataloaders(store, **kwargs)

@dataclass
class Record:
    "What a run gave, in plain Python and NumPy"
    batches:list = field(default_factory=list) # Of each pass over a loader: (its name, its batches)
    splits:list = None # Sample numbers of training and validation set
    orders:list = field(default_factory=list) # Of each pass over the training set: positions in their order
    seen:list = field(default_factory=list) # `facts`, where the process itself has made the items
    error:str = None # The traceback, if there was one

def _seed():
    random.seed(11)
    np.random.seed(12)
    torch.manual_seed(13)

def _next_order(dl):
    "Positions in the order of the next epoch of `dl`, which is left as it was"
    rng,state = dl.rng,dl.rng.getstate()
    dl.randomize()
    order = [int(i) for i in dl.get_idxs()]
    dl.rng = rng
    rng.setstate(state)
    return order

def _values(o, at=''):
    "`(where it is and what it is, value)` of each value in the nested tuples and lists of a batch"
    if isinstance(o, (tuple, list)):
        return [pair for k,v in enumerate(o) for pair in _values(v, f'{at}{type(o).__name__}[{k}] ')]
    if not isinstance(o, torch.Tensor): return [(f'{at}{type(o).__qualname__}', np.array(repr(o)))]
    kind = type(o).__qualname__,o.dtype,tuple(o.shape),o.stride(),sorted((k, repr(v)) for k,v in vars(o).items())
    plain = o.as_subclass(torch.Tensor).detach()
    return [(f'{at}{kind}', plain.double() if o.dtype==torch.bfloat16 else plain)]   # NumPy has no bfloat16

def _kept(values): return [(kind, np.array(v)) for kind,v in values]

def _consume(p, dl, res):
    """Put what `dl` gives into `res`, and treat it as a training loop of a user may

    `draws`: draws random numbers in between, as dropout does. `holds`: keeps all until the end.
    `arrays`: keeps only NumPy views of them. `writes`: writes to each in place, and keeps it."""
    held = []
    try:
        for k,b in enumerate(dl):
            values = _values(b)
            if p.consumer=='arrays': values = [(kind, np.asarray(v)) for kind,v in values]
            if p.consumer in ('draws', 'writes'): values = _kept(values)
            if p.consumer=='writes':
                held.append(b)
                for _,v in _values(b): v.add_(1)
            if not p.threads:   # which draw for the next batch before this one is given out
                drawn = random.random(),np.random.rand(),torch.rand(1).item()
                values.append(('drawn', np.array(drawn)))
            res.append(values)
            del b,values
            if k==1 and p.during: _change_during(dl, *DURING[p.during])
    finally: res[:] = map(_kept, res)

def _change_during(dl, pipeline, f): f(getattr(dl, pipeline))

def _run(p, where, data, like):
    "Build `p`, and go over training set, validation set, training set"
    res = Record()
    seen.clear()
    stock,orders = where=='files',list(like.orders) if like else []
    try:
        _seed()
        if not stock: res.splits = [[int(i) for i in s] for s in _splitter(p)(get_remote_items(data.stores[where]))]
        splits = like.splits if like else [list(range(N_TRAIN)), list(range(N_TRAIN, N))]
        dls = _dls_of_files(p, data, splits) if stock else dls_of_store(p, data.stores[where], where)
        if not stock and (items:=[[int(i) for i in dl.dataset.items] for dl in dls])!=res.splits:
            raise ValueError(f'items are {items}, but splits {res.splits}')
        train = dls.train
        if p.derived or p.new:
            train = train.new(cls=DERIVED[p.derived](type(train)) if p.derived else None, **_resolved(p.new))
        if p.prepared and (dataset:=PREPARED[p.prepared](train.dataset)): train = train.new(dataset=dataset)
        if stock and train.shuffle and orders: train.get_idxs = lambda: orders.pop(0)
        _seed()
        seen.clear()
        for name,dl in ('train', train),('valid', dls.valid),('train again', train):
            if not stock and dl is train: res.orders.append(_next_order(train))
            res.batches.append((name, got:=[]))
            _consume(p, dl, got)
    except Exception as e:
        res.error = traceback.format_exc()
        traceback.clear_frames(e.__traceback__)   # which hold torch's workers
    res.seen = list(seen) if not p.workers and not p.threads else []
    return res

def _run_all(jobs, data):
    "In a process of its own: the records of `(p, where, like)`, of pipelines with the same `changes`"
    torch.set_num_threads(1)
    for c in jobs[0][0].changes: CHANGES[c]()
    return [_run(p, where, data, like) for p,where,like in jobs]

def run(jobs, data):
    "Records of `(p, where, like)`: over a store, or over `'files'` with splits and orders of the record `like`"
    return start_fork(_run_all, jobs, data)()

# ---------------------------------------------------------------------------------------------------------------------
# Comparing

def difference(ours, stock):
    "How two records differ, in a sentence; `None` if they do not"
    if ours.error and stock.error: return None
    if ours.error: return f'stock fastai works, ours fails:\n{ours.error}'
    for k,(a,b) in enumerate(zip(ours.seen, stock.seen)):
        if a!=b: return f'image {k} that a transform was given is {a}, stock has {b}'
    for (name,a),(_,b) in zip(ours.batches, stock.batches):
        for k,(x,y) in enumerate(zip(a, b)):
            if d:=_differ(x, y): return f'{name}, batch {k}{d}'
        if stock.error: return f'stock fastai fails, ours does not:\n{stock.error}'
        if len(a)!=len(b): return f'{name}: {len(a)} batches, stock has {len(b)}'
    if len(ours.seen)!=len(stock.seen):
        return f'a transform was given {len(ours.seen)} images, in stock {len(stock.seen)}'

def _differ(ours, stock):
    if len(ours)!=len(stock): return f': {len(ours)} values, stock has {len(stock)}'
    for (what,a),(wanted,b) in zip(ours, stock):
        if what!=wanted: return f': {what}, stock has {wanted}'
        if np.array_equal(a, b, equal_nan=b.dtype.kind=='f'): continue
        bad = np.argwhere(a!=b)
        at = tuple(bad[0].tolist())
        return f': {len(bad)} of {a.size} values of {what} differ, at {at} it is {a[at]}, stock has {b[at]}'

def wrong_order(p, ours):
    "What is wrong with the orders of the epochs, which stock is made to follow"
    n = p.loader.get('n', len(ours.splits[0]) if ours.splits else 0)*(2 if p.prepared=='repeated' else 1)
    for o in ours.orders:
        if not p.new.get('shuffle', p.shuffle) and o!=list(range(n)): return f'not in order: {o}'
        if sorted(o)!=list(range(n)): return f'not each sample once: {o}'
    if p.new.get('shuffle', p.shuffle) and n>5 and len(ours.orders)>1 and ours.orders[0]==ours.orders[1]:
        return 'the same order twice'

@dataclass
class Verdict:
    "Of one pipeline over one store"
    pipeline:Pipeline
    where:str
    difference:str # `None`: as stock
    stock:Record

def compared(jobs, data):
    "A `Verdict` for each `(pipeline, store)`. Two processes do all; two more each that changes fastai"
    res = {}
    changed = {p.changes:None for p,_ in jobs}
    for changes in changed:
        group = [(k, p, where) for k,(p,where) in enumerate(jobs) if p.changes==changes]
        ours = run([(p, where, None) for _,p,where in group], data)
        stock = run([(p, 'files', o) for (_,p,_),o in zip(group, ours)], data)
        for (k,p,where),a,b in zip(group, ours, stock):
            res[k] = Verdict(p, where, wrong_order(p, a) or difference(a, b), b)
    return [res[k] for k in range(len(jobs))]
