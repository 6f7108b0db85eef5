"""Datasets of torchvision, one for each kind of item: their files, how they are opened, and what is stored of them

The files are tiny. A path may contain `{i}`, a number from 0 on, `{k}`, the same from 1 on, and `(a|b)`, whose names
take turns: then there are `N` files."""
import io, json, os, re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import draw

tv = pytest.importorskip('torchvision.datasets')
N = 4

@dataclass
class Case:
    "A dataset of torchvision"
    make:object # Its class, or another function of the folder
    fields:str # That store an item
    names:list = None # Of the classes
    pictures:str = '' # Paths of images, separated by spaces
    files:dict = field(default_factory=dict) # `{path: content}`, which may be a function of the number of the file
    kept:str = None # Fields with the bytes of files; default: all images but masks, if there are `pictures`

    def build(self, root):
        "The dataset, of files in the folder `root`"
        for path in self.pictures.split(): write(root, path, partial(picture, Path(path).suffix))
        for path,content in self.files.items(): write(root, path, content)
        return self.make(root)

    def has_bytes_of_files(self, name):
        "Are the values of field `name` files?"
        if self.kept is not None: return name in self.kept.split()
        return bool(self.pictures) and name.split('.')[-1] in ('jpg','png','img') and 'mask' not in name

def write(root, path, content):
    for i in range(N if '{' in path or '(' in path else 1):
        name = re.sub(r'\((.*?)\)', lambda names: names[1].split('|')[i%(names[1].count('|')+1)], path)
        file = Path(root)/name.format(i=i, k=i+1)
        file.parent.mkdir(parents=True, exist_ok=True)
        made = content(i) if callable(content) else content
        if isinstance(made, list): made = ''.join(f'{line}\n' for line in made)
        file.write_bytes(made.encode() if isinstance(made, str) else made)

def in_format(image, suffix):
    image.save(f:=io.BytesIO(), Image.registered_extensions()[suffix.lower()])
    return f.getvalue()

def picture(suffix, i, mode='RGB', size=(9,7)): return in_format(draw(i).resize(size).convert(mode), suffix)

def random(i, *args):
    "Numbers below `args[0]`, one for each pixel of picture `i`"
    return np.random.default_rng(i).integers(0, args[0], args[1:] or (7,9)).astype(np.uint8)

def saved(o):
    torch.save(o, f:=io.BytesIO())
    return f.getvalue()

def each(line): return [line(i) for i in range(N)]
def opens(cls, *args, **kwargs): return lambda root: cls(root, *args, **kwargs)
def opens_text(cls, *args): return lambda root: cls(str(root), *(str(root/arg) for arg in args))

LABELS = np.array([3,1,0,2], np.uint8)

def stl10(split):
    files = {'(train|test|unlabeled)_X.bin':random(0, 256, N, 3, 96, 96).tobytes(),
             '(train|test)_y.bin':(LABELS+1).tobytes(), 'class_names.txt':[*'abcd']}
    return Case(opens(tv.STL10, split), 'png cls', [*'abcd'],
                files={f'stl10_binary/{name}':content for name,content in files.items()})

def pets(kinds, fields, names, kept=None):
    folder,pet = 'oxford-iiit-pet','(Abyssinian|beagle)_(1|1|2|2)'
    def masks(i): return in_format(Image.fromarray(random(i, 4)), '.png')
    annotations = {f'{folder}/annotations/trimaps/{pet}.png':masks, f'{folder}/annotations/trainval.txt':
                   ['Abyssinian_1 1 1 1', 'Abyssinian_2 1 1 1', 'beagle_1 2 2 1', 'beagle_2 2 2 1']}
    return Case(opens(tv.OxfordIIITPet, target_types=kinds), fields, names, f'{folder}/images/{pet}.jpg', annotations,
                kept)

def celeba(kinds, fields):
    columns = {'list_eval_partition':([], lambda i: '0'), 'identity_CelebA':([], lambda i: i+7),
               'list_bbox_celeba':(['4', 'image_id x y w h'], lambda i: f'1 2 3 {i}'),
               'list_landmarks_align_celeba':(['4', 'x y'], lambda i: f'1 {i}'),
               'list_attr_celeba':(['4', 'Bald Smiling'], lambda i: f'-1 {2*(i%2)-1}')}
    files = {f'celeba/{name}.txt':head+[f'{i:06d}.jpg {value(i)}' for i in range(N)]
             for name,(head,value) in columns.items()}
    return Case(opens(tv.CelebA, target_type=kinds), fields, None, 'celeba/img_align_celeba/{i:06d}.jpg', files)

BOX = '<object><name>dog</name><bndbox><xmin>1</xmin><ymin>0</ymin><xmax>8</xmax><ymax>{}</ymax></bndbox></object>'

def voc(cls, fields):
    "The first image has no objects"
    def objects(i): return f"<annotation><filename>{i}.jpg</filename>{''.join(map(BOX.format, range(i)))}</annotation>"
    def codes(i):
        image = Image.fromarray(random(i, 21)).convert('P')
        image.putpalette([k*37%256 for k in range(768)])
        return in_format(image, '.png')
    folder,numbers = 'VOCdevkit/VOC2012',each(str)
    files = {f'{folder}/ImageSets/(Segmentation|Main)/train.txt':numbers, folder+'/Annotations/{i}.xml':objects,
             folder+'/SegmentationClass/{i}.png':codes}
    return Case(cls, fields, None, folder+'/JPEGImages/{i}.jpg', files)

def coco(name, fields):
    "The first image has no boxes"
    boxes = [dict(id=10*i+k, image_id=i, category_id=7, bbox=[1,2,3.5,k], area=4., iscrowd=0,
                  segmentation=[[1,2,3,4]], caption=f'a dog {k}') for i in range(N) for k in range(i)]
    content = dict(images=each(lambda i: dict(id=i, file_name=f'{i}.jpg', height=7, width=9)), annotations=boxes,
                   categories=[dict(id=7, name='dog')])
    def make(root, **kwargs):
        pytest.importorskip('pycocotools')
        return getattr(tv, name)(root, str(root/'ann.json'), **kwargs)
    return Case(make, fields, None, '{i}.jpg', {'ann.json':json.dumps(content)})

FLICKR = ('<tr><td><a href="f/{0}/">http://flickr.com/u/{0}/</a>'
          '<ul><li>a dog {0}</li><li>a cat</li></ul></td></tr>')

def kitti(train, fields):
    def boxes(i): return ['Car 0.5 1 .1 1 2 3 4 1 2 3 1 2 3 .5']*i
    return Case(opens(tv.Kitti, train=train), fields, None,
                'Kitti/raw/training/image_2/{i}.png Kitti/raw/testing/image_2/{i}.png',
                {'Kitti/raw/training/label_2/{i}.txt':boxes})

def wider():
    boxes = [line for i in range(N) for line in [f'{i}.jpg', str(i+1), *['1 2 3 4 0 0 1 0 0 0']*(i+1)]]
    files = {'widerface/wider_face_split/wider_face_train_bbx_gt.txt':boxes}
    files |= {f'widerface/WIDER_{name}/empty':'' for name in ('train','val','test')}
    return Case(opens(tv.WIDERFace, 'train'), 'jpg bbox.xywh.npy blur expression illumination occlusion pose invalid',
                None, 'widerface/WIDER_train/images/{i}.jpg', files)

SPECIES = ['00000_Animalia_Chordata_Aves_O_F_Corvus_corax','00001_Animalia_Chordata_Aves_O_F_Pica_pica']

def inaturalist(kind, names):
    pictures = f"2021_train/({'|'.join(SPECIES)})/{{i}}.jpg"
    return Case(opens(tv.INaturalist, target_type=kind), 'jpg cls', names, pictures)

DATASETS = {
    'STL10':stl10('train'),
    'Omniglot':Case(tv.Omniglot, 'png cls', ['Greek/character00','Greek/character01'], kept='png', files={
        'omniglot-py/images_background/Greek/character0(0|1)/{i}.png':lambda i: picture('.png', i, '1'),
        'omniglot-py/images_background.zip':''}),
    'OxfordIIITPet':pets(['segmentation','category'], 'jpg mask.png cls', ['Abyssinian','Beagle'], 'jpg mask.png'),
    'OxfordIIITPet binary':pets('binary-category', 'jpg cls', ['Cat','Dog']),
    'CelebA':celeba(['attr','identity','bbox','landmarks'], 'jpg npy cls bbox.xywh.npy landmarks.npy'),
    'CelebA boxes':celeba('bbox', 'jpg bbox.xywh.npy'),
    'VOCSegmentation':voc(tv.VOCSegmentation, 'jpg mask.png'),
    'VOCDetection':voc(tv.VOCDetection, 'jpg json boxes.npy boxes.labels'),
    'CocoDetection':coco('CocoDetection', 'jpg json boxes.npy boxes.labels'),
    'CocoCaptions':coco('CocoCaptions', 'jpg captions.json'),
    'Flickr8k':Case(opens_text(tv.Flickr8k, 'ann.html'), 'jpg captions.json', None, '{i}_x.jpg', {
        'ann.html':f"<table>{''.join(each(FLICKR.format))}</table>"}),
    'Flickr30k':Case(opens_text(tv.Flickr30k, 'ann.token'), 'jpg captions.json', None, '{i}.jpg', {
        'ann.token':[f'{i}.jpg#{k}\ta dog, {k}' for i in range(N) for k in range(i+1)]}),
    'SBU':Case(opens(tv.SBU, download=False), 'jpg caption.txt', None, 'dataset/{i}.jpg', {
        'dataset/SBU_captioned_photo_dataset_urls.txt':each(lambda i: f'http://x/{i}.jpg'),
        'dataset/SBU_captioned_photo_dataset_captions.txt':each(lambda i: f'A dog, number {i}'),
        'SBUCaptionedPhotoDataset.tar.gz':''}),
    'GTSRB':Case(tv.GTSRB, 'img cls', None, 'gtsrb/GTSRB/Training/(00000|00001)/{i}.ppm'),
    'ImageNet':Case(tv.ImageNet, 'jpg cls', ['tench, Tinca tinca','goldfish'], 'train/(n01|n02)/{i}.JPEG', {
        'meta.bin':saved(({'n01':('tench','Tinca tinca'), 'n02':('goldfish',)}, []))}),
    'Kitti':kitti(True, 'png json boxes.npy boxes.labels'), 'Kitti test':kitti(False, 'png'),
    'WIDERFace':wider(),
    'INaturalist':inaturalist('full', SPECIES), 'INaturalist genus':inaturalist('genus', ['Corvus','Pica']),
    'Sintel test':Case(opens(tv.Sintel, 'test'), 'png 1.png', None, 'Sintel/test/clean/alley/{i:04d}.png')}
# Videos need a decoder (PyAV), LSUN needs `lmdb`. The others are base classes and a function, and folders, which have
# tests of their own.
NOT_HERE = {'Kinetics','HMDB51','UCF101','LSUN','LSUNClass','VisionDataset','wrap_dataset_for_transforms_v2',
            'ImageFolder','DatasetFolder'}
# Their items are made as those of a dataset above are, and have values of the same types
LIKE_OTHERS = {
    'STL10':{'CIFAR10','CIFAR100','MNIST','QMNIST','FashionMNIST','KMNIST','EMNIST','SVHN','USPS','SEMEION','PCAM',
             'FER2013','FakeData'},
    'ImageNet':{'Imagenette','EuroSAT','Flowers102','Food101','DTD','FGVCAircraft','StanfordCars','Caltech256',
                'LFWPeople','Places365','Country211','RenderedSST2','SUN397','CLEVRClassification'},
    'VOCSegmentation':{'SBDataset','Cityscapes'},
    'CelebA':{'Caltech101','PhotoTour','MovingMNIST'},   # arrays, and integers
    'Sintel test':{'FlyingChairs','FlyingThings3D','KittiFlow','HD1K','LFWPairs','Kitti2012Stereo','Kitti2015Stereo',
                   'CarlaStereo','CREStereo','FallingThingsStereo','SceneFlowStereo','InStereo2k','SintelStereo',
                   'Middlebury2014Stereo','ETH3DStereo'}}

@pytest.fixture
def no_checksums(monkeypatch):
    "torchvision compares files with the checksums of the originals; here they only have to be there"
    for module in vars(tv).values():
        if getattr(module, '__name__', '').startswith('torchvision.datasets.') and hasattr(module, 'check_integrity'):
            monkeypatch.setattr(module, 'check_integrity', lambda path, md5=None: os.path.exists(path))
