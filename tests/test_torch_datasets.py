"Every dataset of torchvision that can be built from files, and others of PyTorch and fastai: what they return is stored"
import bz2, json, os, pickle, random
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from fastai.data.all import DataLoaders, Datasets, MultiCategorize
from fastai.torch_core import TensorMultiCategory
from fastai.vision.augment import Resize
from fastai.vision.core import PILImage, TensorBBox, TensorPoint
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

from conftest import draw
from fastai_remote import IngestError, RedisStore, ShardStore, to_redis, to_shards
from fastai_remote.ingest.run import ingest
from fastai_remote.source.datasets import as_source
from fastai_remote.source.torch_items import _ItemSample, flat_items, ItemLayout
from fastai_remote.write.base import MemoryWriter

tv = pytest.importorskip('torchvision.datasets')
N,OPTIONS = 4,dict(num_workers=1, progress=False, shuffle=False)

def in_memory(source, **options):
    writer = MemoryWriter('d')
    report = ingest(source, writer, **{**OPTIONS, **options})
    return writer.store,report

def stored(store, field): return [bytes(b) for b in store.get_many(range(len(store)), field, check=True)[field]]

# --- tiny files

def picture(path, i=0, mode='RGB', size=(9,7)):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(i).resize(size).convert(mode).save(path)
    return path

def text(path, *lines):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('\n'.join(lines)+'\n')

def mat(path, **arrays):
    import scipy.io
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    scipy.io.savemat(path, arrays)

def idx(path, array, code=8):
    path.parent.mkdir(parents=True, exist_ok=True)
    head = bytes([0, 0, code, array.ndim])+b''.join(int(n).to_bytes(4, 'big') for n in array.shape)
    path.write_bytes(head+array.astype(array.dtype.newbyteorder('>')).tobytes())

def folders(root, names, ext='jpg', mode='RGB'):
    for i in range(N): picture(root/names[i%len(names)]/f'{i}.{ext}', i, mode)

DIGITS = np.random.default_rng(0).integers(0, 256, (N,28,28), dtype=np.uint8)
LABELS = np.array([3,1,0,2], np.uint8)

def mnist(cls):
    def build(root):
        raw = root/cls.__name__/'raw'
        for name in 'train','t10k':
            idx(raw/f'{name}-images-idx3-ubyte', DIGITS)
            idx(raw/f'{name}-labels-idx1-ubyte', LABELS)
        return cls(root)
    return build

def emnist(root):
    idx(root/'EMNIST/raw/emnist-letters-train-images-idx3-ubyte', DIGITS)
    idx(root/'EMNIST/raw/emnist-letters-train-labels-idx1-ubyte', LABELS+1)
    return tv.EMNIST(root, 'letters')

def qmnist(root, compat=True):
    idx(root/'QMNIST/raw/qmnist-train-images-idx3-ubyte', DIGITS)
    idx(root/'QMNIST/raw/qmnist-train-labels-idx2-int', np.tile(LABELS[:,None], 8).astype('i4'), 12)
    return tv.QMNIST(root, compat=compat)

def moving_mnist(root):
    (root/'MovingMNIST').mkdir()
    np.save(root/'MovingMNIST/mnist_test_seq.npy', np.zeros((20,N,8,8), np.uint8))
    return tv.MovingMNIST(root)

def cifar(cls, fine, meta):
    def build(root):
        folder = root/cls.base_folder
        folder.mkdir()
        for k,(name,_) in enumerate(cls.train_list+cls.test_list):
            rows = np.random.default_rng(k).integers(0, 256, (2,3072), dtype=np.uint8)
            (folder/name).write_bytes(pickle.dumps({'data':rows, fine:[k%3, 0]}))
        (folder/cls.meta['filename']).write_bytes(pickle.dumps({meta:['x','y','z']}))
        return cls(root)
    return build

def svhn(root):
    mat(root/'train_32x32.mat', X=np.zeros((32,32,3,N), np.uint8), y=LABELS[:,None])
    return tv.SVHN(root)

def stl10(root, split='train'):
    folder = root/'stl10_binary'
    folder.mkdir()
    images = np.random.default_rng(0).integers(0, 256, (N,3,96,96), dtype=np.uint8)
    for name in 'train','test','unlabeled': images.tofile(folder/f'{name}_X.bin')
    for name in 'train','test': (LABELS+1).tofile(folder/f'{name}_y.bin')
    text(folder/'class_names.txt', *'abcd')
    return tv.STL10(root, split)

def usps(root):
    lines = [f"{k+1} "+' '.join(f'{j}:{(j%7-3)/3}' for j in range(256)) for k in LABELS]
    (root/'usps.bz2').write_bytes(bz2.compress('\n'.join(lines).encode()))
    return tv.USPS(root)

def omniglot(root):
    folder = root/'omniglot-py'
    for k in range(N): picture(folder/'images_background'/'Greek'/f'character0{k%2}'/f'{k}.png', k, '1')
    (folder/'images_background.zip').touch()
    return tv.Omniglot(root)

def flowers(root):
    folder = root/'flowers-102'
    for i in range(1, N+1): picture(folder/f'jpg/image_{i:05d}.jpg', i)
    mat(folder/'setid.mat', trnid=np.arange(1, N+1), valid=[1], tstid=[1])
    mat(folder/'imagelabels.mat', labels=LABELS+1)
    return tv.Flowers102(root)

def food(root):
    meta = {name:[f'{name}/{i}' for i in range(2)] for name in ('pie','cake')}
    for name in meta:
        for i in range(2): picture(root/f'food-101/images/{name}/{i}.jpg', i)
    text(root/'food-101/meta/train.json', json.dumps(meta))
    return tv.Food101(root)

def pets(root, kinds='category'):
    folder = root/'oxford-iiit-pet'
    names = ['Abyssinian_1','Abyssinian_2','beagle_1','beagle_2']
    for i,name in enumerate(names):
        picture(folder/f'images/{name}.jpg', i)
        (folder/'annotations/trimaps').mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(i).integers(1, 4, (7,9), dtype=np.uint8)).save(folder/f'annotations/trimaps/{name}.png')
    text(folder/'annotations/trainval.txt', *(f'{name} {1+i//2} {1+i//2} 1' for i,name in enumerate(names)))
    return tv.OxfordIIITPet(root, target_types=kinds)

def dtd(root):
    folder = root/'dtd/dtd'
    names = ['dotted/a.jpg','dotted/b.jpg','woven/a.jpg','woven/b.jpg']
    for i,name in enumerate(names): picture(folder/'images'/name, i)
    text(folder/'labels/train1.txt', *names)
    return tv.DTD(root)

def aircraft(root, level='variant'):
    folder = root/'fgvc-aircraft-2013b/data'
    for i in range(N): picture(folder/f'images/{i:07d}.jpg', i)
    text(folder/'variants.txt', '707-320', 'A300')
    text(folder/'families.txt', 'Boeing 707', 'Airbus A300')
    text(folder/'images_variant_trainval.txt', *(f"{i:07d} {['707-320','A300'][i%2]}" for i in range(N)))
    text(folder/'images_family_trainval.txt', *(f"{i:07d} {['Boeing 707','Airbus A300'][i%2]}" for i in range(N)))
    return tv.FGVCAircraft(root, annotation_level=level)

def cars(root):
    folder = root/'stanford_cars'
    for i in range(N): picture(folder/f'cars_train/{i}.jpg', i)
    rows = np.array([(f'{i}.jpg', i%2+1) for i in range(N)], dtype=[('fname','O'), ('class','O')])
    mat(folder/'devkit/cars_train_annos.mat', annotations=rows)
    mat(folder/'devkit/cars_meta.mat', class_names=np.array(['Acura','BMW'], object))
    return tv.StanfordCars(root)

def eurosat(root):
    folders(root/'eurosat/2750', ['Forest','River'])
    return tv.EuroSAT(root)

def gtsrb(root):
    folders(root/'gtsrb/GTSRB/Training', ['00000','00001'], 'ppm')
    return tv.GTSRB(root)

def caltech101(root, kinds='category'):
    folder = root/'caltech101'
    for k,name in enumerate(('ant','bass')):
        for i in 1,2:
            picture(folder/f'101_ObjectCategories/{name}/image_{i:04d}.jpg', i+k)
            mat(folder/f'Annotations/{name}/annotation_{i:04d}.mat', obj_contour=np.random.default_rng(i).random((2,3+i)))
    picture(folder/'101_ObjectCategories/BACKGROUND_Google/image_0001.jpg')
    return tv.Caltech101(root, kinds)

def caltech256(root):
    for k,name in enumerate(('001.ak47','002.flag')):
        for i in 1,2: picture(root/f'caltech256/256_ObjectCategories/{name}/{k+1:03d}_{i:04d}.jpg', i+k)
    return tv.Caltech256(root)

def celeba(root, kinds='attr'):
    folder = root/'celeba'
    names = [f'{i:06d}.jpg' for i in range(N)]
    for i,name in enumerate(names): picture(folder/'img_align_celeba'/name, i)
    text(folder/'list_eval_partition.txt', *(f'{name} 0' for name in names))
    text(folder/'identity_CelebA.txt', *(f'{name} {i+7}' for i,name in enumerate(names)))
    text(folder/'list_bbox_celeba.txt', '4', 'image_id x y w h', *(f'{name} 1 2 3 {i}' for i,name in enumerate(names)))
    text(folder/'list_landmarks_align_celeba.txt', '4', 'x y', *(f'{name} 1 {i}' for i,name in enumerate(names)))
    text(folder/'list_attr_celeba.txt', '4', 'Bald Smiling', *(f'{name} -1 {2*(i%2)-1}' for i,name in enumerate(names)))
    return tv.CelebA(root, target_type=kinds)

def cityscapes(root, kinds='semantic'):
    for i in range(N):
        name = f'bonn_{i:06d}_000019'
        picture(root/f'leftImg8bit/train/bonn/{name}_leftImg8bit.png', i)
        folder = root/'gtFine/train/bonn'
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(i)
        Image.fromarray(rng.integers(0, 34, (7,9), dtype=np.uint8)).save(folder/f'{name}_gtFine_labelIds.png')
        Image.fromarray(rng.integers(0, 30_000, (7,9)).astype(np.uint16)).save(folder/f'{name}_gtFine_instanceIds.png')
        text(folder/f'{name}_gtFine_polygons.json', json.dumps({'objects':[{'label':'car', 'polygon':[[i,1],[2,3]]}]}))
    return tv.Cityscapes(root, target_type=kinds)

XML = '''<annotation><filename>{i}.jpg</filename>{objects}</annotation>'''
OBJECT = '<object><name>dog</name><bndbox><xmin>1</xmin><ymin>0</ymin><xmax>8</xmax><ymax>{k}</ymax></bndbox></object>'

def voc(cls):
    def build(root):
        folder = root/'VOCdevkit/VOC2012'
        for i in range(N):
            picture(folder/f'JPEGImages/{i}.jpg', i)
            text(folder/f'Annotations/{i}.xml', XML.format(i=i, objects=''.join(OBJECT.format(k=k) for k in range(i))))
            mask = Image.fromarray(np.random.default_rng(i).integers(0, 21, (7,9), dtype=np.uint8)).convert('P')
            mask.putpalette([(k*37)%256 for k in range(768)])
            (folder/'SegmentationClass').mkdir(exist_ok=True)
            mask.save(folder/f'SegmentationClass/{i}.png')
        for kind in 'Segmentation','Main': text(folder/f'ImageSets/{kind}/train.txt', *map(str, range(N)))
        return cls(root)
    return build

def coco(cls):
    def build(root):
        pytest.importorskip('pycocotools')
        for i in range(N): picture(root/f'{i}.jpg', i)
        boxes = [dict(id=10*i+k, image_id=i, category_id=7, bbox=[1,2,3.5,k], area=4., iscrowd=0, segmentation=[[1,2,3,4]], caption=f'a dog {k}')
                 for i in range(N) for k in range(i)]   # the first image has none
        content = dict(images=[dict(id=i, file_name=f'{i}.jpg', height=7, width=9) for i in range(N)], annotations=boxes,
                       categories=[dict(id=7, name='dog')])
        text(root/'ann.json', json.dumps(content))
        return cls(root, str(root/'ann.json'))
    return build

def sbd(root, mode='segmentation'):
    import scipy.sparse
    for i in range(N):
        picture(root/f'img/{i}.jpg', i)
        edges = np.empty((20,1), object)
        for k in range(20): edges[k,0] = scipy.sparse.csc_matrix(np.random.default_rng(k).integers(0, 2, (7,9)).astype(float))
        codes = np.random.default_rng(i).integers(0, 21, (7,9), dtype=np.uint8)
        mat(root/f'cls/{i}.mat', GTcls={'Segmentation':codes, 'Boundaries':edges})
    text(root/'train.txt', *map(str, range(N)))
    return tv.SBDataset(root, mode=mode)

def flickr8k(root):
    for i in range(N): picture(root/f'{i}_x.jpg', i)
    rows = ''.join(f'<tr><td><a href="f/{i}/">http://flickr.com/u/{i}/</a><ul><li>a dog {i}</li><li>a cat</li></ul></td></tr>' for i in range(N))
    text(root/'ann.html', f'<table>{rows}</table>')
    return tv.Flickr8k(str(root), str(root/'ann.html'))

def flickr30k(root):
    for i in range(N): picture(root/f'{i}.jpg', i)
    text(root/'ann.token', *(f'{i}.jpg#{k}\ta dog, {k}' for i in range(N) for k in range(i+1)))
    return tv.Flickr30k(str(root), str(root/'ann.token'))

def sbu(root):
    for i in range(N): picture(root/f'dataset/{i}.jpg', i)
    text(root/'dataset/SBU_captioned_photo_dataset_urls.txt', *(f'http://x/{i}.jpg' for i in range(N)))
    text(root/'dataset/SBU_captioned_photo_dataset_captions.txt', *(f'A dog, number {i}' for i in range(N)))
    (root/'SBUCaptionedPhotoDataset.tar.gz').touch()
    return tv.SBU(root, download=False)

def lfw(root):
    folder = root/'lfw-py'
    for k,name in enumerate(('Ann','Bob')):
        for i in 1,2: picture(folder/f'lfw_funneled/{name}/{name}_{i:04d}.jpg', k+i)
    text(folder/'peopleDevTrain.txt', '2', 'Ann\t2', 'Bob\t2')
    text(folder/'lfw-names.txt', 'Ann\t2', 'Bob\t2')
    text(folder/'pairsDevTrain.txt', '2', 'Ann\t1\t2', 'Bob\t1\t2', 'Ann\t1\tBob\t1', 'Ann\t2\tBob\t2')
    (folder/'lfw-funneled.tgz').touch()

def lfw_people(root):
    lfw(root)
    return tv.LFWPeople(root, 'train')

def lfw_pairs(root):
    lfw(root)
    return tv.LFWPairs(root, 'train')

def pcam(root):
    h5py = pytest.importorskip('h5py')
    (root/'pcam').mkdir()
    with h5py.File(root/'pcam/camelyonpatch_level_2_split_train_x.h5', 'w') as f: f['x'] = np.zeros((N,9,9,3), np.uint8)
    with h5py.File(root/'pcam/camelyonpatch_level_2_split_train_y.h5', 'w') as f: f['y'] = (LABELS%2)[:,None,None,None]
    return tv.PCAM(root)

def places(root):
    for i in range(N): picture(root/f'val_256/{i}.jpg', i)
    text(root/'categories_places365.txt', '/a/airfield 0', '/a/alley 1')
    text(root/'places365_val.txt', *(f'{i}.jpg {i%2}' for i in range(N)))
    return tv.Places365(root, 'val', small=True)

def imagenet(root):
    folders(root/'train', ['n01','n02'], 'JPEG')
    torch.save(({'n01':('tench','Tinca tinca'), 'n02':('goldfish',)}, []), root/'meta.bin')
    return tv.ImageNet(root)

def kitti(root, train=True):
    folder = root/'Kitti/raw/training'
    for i in range(N):
        picture(folder/f'image_2/{i}.png', i)
        picture(root/f'Kitti/raw/testing/image_2/{i}.png', i)
        text(folder/f'label_2/{i}.txt', *(['Car 0.5 1 .1 1 2 3 4 1 2 3 1 2 3 .5']*i or []))
    (folder/'label_2/0.txt').write_text('')
    return tv.Kitti(root, train=train)

def country(root):
    folders(root/'country211/train', ['AT','DE'])
    return tv.Country211(root)

def sst(root):
    folders(root/'rendered-sst2/train', ['negative','positive'], 'png')
    return tv.RenderedSST2(root)

def sun(root):
    for i in range(N): picture(root/f"SUN397/a/{['abbey','alley'][i%2]}/sun_{i}.jpg", i)
    text(root/'SUN397/ClassName.txt', '/a/abbey', '/a/alley')
    return tv.SUN397(root)

def semeion(root):
    rows = [' '.join(map(str, [*(np.arange(256)%(i+2)==0).astype(int), *np.eye(10, dtype=int)[LABELS[i]]])) for i in range(N)]
    text(root/'semeion.data', *rows)
    return tv.SEMEION(root, download=False)

def wider(root, split='train'):
    lines = []
    for i in range(N):
        picture(root/f'WIDER_{split}/images/{i}.jpg', i)
        lines += [f'{i}.jpg', str(i+1), *['1 2 3 4 0 0 1 0 0 0']*(i+1)] if split=='train' else [f'{i}.jpg']
    text(root/'wider_face_split'/('wider_face_train_bbx_gt.txt' if split=='train' else 'wider_face_test_filelist.txt'), *lines)
    for name in 'WIDER_train','WIDER_val','WIDER_test': (root/name).mkdir(exist_ok=True)
    return tv.WIDERFace(root.parent, split)

def wider_face(split):
    def build(root):
        (root/'widerface').mkdir()
        return wider(root/'widerface', split)
    return build

def imagenette(root):
    folders(root/'imagenette2/train', ['n01440764','n02102040'], 'JPEG')
    return tv.Imagenette(root)

def fer(root, split='train'):
    text(root/'fer2013/train.csv', 'emotion,pixels', *(f"{k},{' '.join(['7']*2304)}" for k in LABELS))
    text(root/'fer2013/test.csv', 'pixels', *[' '.join(['7']*2304)]*N)
    return tv.FER2013(root, split)

def clevr(root):
    for i in range(N): picture(root/f'clevr/CLEVR_v1.0/images/train/{i}.png', i)
    text(root/'clevr/CLEVR_v1.0/scenes/CLEVR_train_scenes.json',
         json.dumps({'scenes':[{'image_filename':f'{i}.png', 'objects':[0]*(i+3)} for i in range(N)]}))
    return tv.CLEVRClassification(root)

SPECIES = ['00000_Animalia_Chordata_Aves_O_F_Corvus_corax','00001_Animalia_Chordata_Aves_O_F_Pica_pica']
def inaturalist(root, kind='full'):
    for i in range(N): picture(root/'2021_train'/SPECIES[i%2]/f'{i}.jpg', i)
    return tv.INaturalist(root, target_type=kind)

def phototour(root):
    torch.save((torch.zeros(N, 8, 8, dtype=torch.uint8), torch.arange(N), torch.tensor([[0,1,1],[1,2,0]])), root/'liberty.pt')
    return tv.PhotoTour(str(root), 'liberty', train=False)

# --- optical flow and stereo

def flo(path, i):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b'PIEH'+np.array([9,7], '<i4').tobytes()+np.random.default_rng(i).random((7,9,2), np.float32).tobytes())

def pfm(path, i):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b'PF\n9 7\n-1.0\n'+np.random.default_rng(i).random((7,9,3), np.float32).astype('<f4').tobytes())

def grey_pfm(path, i):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b'Pf\n9 7\n-1.0\n'+np.random.default_rng(i).random((7,9), np.float32).astype('<f4').tobytes())

def flow_png(path, i):
    import torchvision.io
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(i).integers(0, 256, (7,9,3), dtype=np.uint8)).save(path)

def sintel(root):
    for i in range(N+1): picture(root/f'Sintel/training/clean/alley/{i:04d}.png', i)
    for i in range(N): flo(root/f'Sintel/training/flow/alley/{i:04d}.flo', i)
    return tv.Sintel(root)

def sintel_test(root):
    for i in range(N+1): picture(root/f'Sintel/test/clean/alley/{i:04d}.png', i)
    return tv.Sintel(root, 'test')

def kitti_flow(root):
    for i in range(N):
        for k in 10,11: picture(root/f'KittiFlow/training/image_2/{i:06d}_{k}.png', i+k)
        flow_png(root/f'KittiFlow/training/flow_occ/{i:06d}_10.png', i)
    return tv.KittiFlow(root)

def chairs(root):
    for i in range(N):
        for k in 1,2: picture(root/f'FlyingChairs/data/{i:05d}_img{k}.ppm', i+k)
        flo(root/f'FlyingChairs/data/{i:05d}_flow.flo', i)
    text(root/'FlyingChairs/FlyingChairs_train_val.txt', *['1']*N)
    return tv.FlyingChairs(root)

def things(root):
    for i in range(N+1):
        picture(root/f'FlyingThings3D/frames_cleanpass/TRAIN/A/0000/left/{i:04d}.png', i)
        for way in 'future','past': pfm(root/f'FlyingThings3D/optical_flow/TRAIN/A/0000/into_{way}/left/{i:04d}.pfm', i)
    return tv.FlyingThings3D(root)

def hd1k(root):
    for i in range(N+1):
        picture(root/f'hd1k/hd1k_input/image_2/000000_{i:04d}.png', i)
        flow_png(root/f'hd1k/hd1k_flow_gt/flow_occ/000000_{i:04d}.png', i)
    return tv.HD1K(root)

def depth(path, i, mode='I;16'):
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.random.default_rng(i).integers(1, 60_000, (7,9)).astype(np.uint16)
    Image.fromarray(array if mode=='I;16' else (array>>8).astype(np.uint8)).save(path)

def kitti_stereo(cls, year, left, right, disparities):
    def build(root):
        folder = root/f'Kitti{year}/training'
        for i in range(N):
            for name in left,right: picture(folder/f'{name}/{i:06d}_10.png', i)
            for name in disparities: depth(folder/f'{name}/{i:06d}_10.png', i)
        return cls(root)
    return build

def carla(root):
    for i in range(N):
        for k in 0,1:
            picture(root/f'carla-highres/trainingF/{i}/im{k}.png', i+k)
            grey_pfm(root/f'carla-highres/trainingF/{i}/disp{k}GT.pfm', i)
    return tv.CarlaStereo(root)

def crestereo(root):
    for name in 'shapenet','reflective','tree','hole':
        for side in 'left','right':
            picture(root/f'CREStereo/{name}/a_{side}.jpg')
            depth(root/f'CREStereo/{name}/a_{side}.disp.png', 0)
    return tv.CREStereo(root)

def falling(root):
    for i in range(N):
        folder = root/'FallingThings/single/box/kitchen'
        for side in 'left','right':
            picture(folder/f'{i:06d}.{side}.jpg', i)
            depth(folder/f'{i:06d}.{side}.depth.png', i)
        text(folder/'_camera_settings.json', json.dumps({'camera_settings':[{'intrinsic_settings':{'fx':700.}}]}))
    return tv.FallingThingsStereo(root)

def scene_flow(root):
    for i in range(N):
        for side in 'left','right':
            picture(root/f'SceneFlow/Monkaa/frames_cleanpass/a/{side}/{i:04d}.png', i)
            grey_pfm(root/f'SceneFlow/Monkaa/disparity/a/{side}/{i:04d}.pfm', i)
    return tv.SceneFlowStereo(root, 'Monkaa')

def sintel_stereo(root):
    folder = root/'Sintel/training'
    for i in range(N):
        for side in 'left','right': picture(folder/f'final_{side}/alley/{i:04d}.png', i)
        picture(folder/f'disparities/alley/{i:04d}.png', i)
        for name in 'occlusions','outofframe': depth(folder/f'{name}/alley/{i:04d}.png', i, 'L')
    return tv.SintelStereo(root)

def instereo(root):
    for i in range(N):
        for side in 'left','right':
            picture(root/f'InStereo2k/train/{i}/{side}.png', i)
            depth(root/f'InStereo2k/train/{i}/{side}_disp.png', i)
    return tv.InStereo2k(root)

def eth3d(root, split='train'):
    for i in range(N):
        for k in 0,1:
            for name in 'training','test': picture(root/f'ETH3D/two_view_{name}/{i}/im{k}.png', i+k)
        grey_pfm(root/f'ETH3D/two_view_training_gt/{i}/disp0GT.pfm', i)
        depth(root/f'ETH3D/two_view_training_gt/{i}/mask0nocc.png', i, 'L')
    return tv.ETH3DStereo(root, split)

def middlebury(root):
    for i in range(N):
        folder = root/f'Middlebury2014/train/{list(tv.Middlebury2014Stereo.splits["train"])[i]}-perfect'
        for k in 0,1:
            picture(folder/f'im{k}.png', i+k)
            grey_pfm(folder/f'disp{k}.pfm', i)
    return tv.Middlebury2014Stereo(root)

# name: builder, fields, class names (or None), fields that keep the bytes of files
IMAGE,FLOW,STEREO = ['jpg','cls'],['png','1.png','npy'],['png','1.png','npy']
BOXES = ['boxes.npy','boxes.labels']   # made of annotations

DATASETS = {
    'MNIST':(mnist(tv.MNIST), ['png','cls'], tv.MNIST.classes, []), 'FashionMNIST':(mnist(tv.FashionMNIST), ['png','cls'], tv.FashionMNIST.classes, []),
    'KMNIST':(mnist(tv.KMNIST), ['png','cls'], tv.KMNIST.classes, []), 'EMNIST':(emnist, ['png','cls'], tv.EMNIST.classes_split_dict['letters'], []),
    'QMNIST':(qmnist, ['png','cls'], tv.MNIST.classes, []), 'QMNIST all':(lambda root: qmnist(root, False), ['png','npy'], None, []),
    'MovingMNIST':(moving_mnist, ['npy'], None, []),
    'CIFAR10':(cifar(tv.CIFAR10, 'labels', 'label_names'), ['png','cls'], ['x','y','z'], []), 'CIFAR100':(cifar(tv.CIFAR100, 'fine_labels', 'fine_label_names'), ['png','cls'], ['x','y','z'], []),
    'SVHN':(svhn, ['png','cls'], None, []), 'STL10':(stl10, ['png','cls'], [*'abcd'], []), 'USPS':(usps, ['png','cls'], None, []),
    'Omniglot':(omniglot, ['png','cls'], ['Greek/character00','Greek/character01'], ['png']),
    'Flowers102':(flowers, IMAGE, getattr(tv.Flowers102, 'classes', None), ['jpg']), 'Food101':(food, IMAGE, ['cake','pie'], ['jpg']),
    'OxfordIIITPet':(pets, IMAGE, ['Abyssinian','Beagle'], ['jpg']),
    'OxfordIIITPet binary':(lambda root: pets(root, 'binary-category'), IMAGE, ['Cat','Dog'], ['jpg']),
    'OxfordIIITPet masks':(lambda root: pets(root, ['segmentation','category']), ['jpg','mask.png','cls'], ['Abyssinian','Beagle'], ['jpg','mask.png']),
    'DTD':(dtd, IMAGE, ['dotted','woven'], ['jpg']), 'FGVCAircraft':(aircraft, IMAGE, ['707-320','A300'], ['jpg']),
    'FGVCAircraft families':(lambda root: aircraft(root, 'family'), IMAGE, ['Boeing 707','Airbus A300'], ['jpg']),
    'StanfordCars':(cars, IMAGE, ['Acura','BMW'], ['jpg']), 'EuroSAT':(eurosat, IMAGE, ['Forest','River'], ['jpg']), 'GTSRB':(gtsrb, ['img','cls'], None, ['img']),
    'Caltech101':(caltech101, IMAGE, ['ant','bass'], ['jpg']),
    'Caltech101 contours':(lambda root: caltech101(root, ['category','annotation']), [*IMAGE,'npy'], ['ant','bass'], ['jpg']),
    'Caltech256':(caltech256, IMAGE, ['001.ak47','002.flag'], ['jpg']), 'CelebA':(celeba, ['jpg','npy'], None, ['jpg']),
    'CelebA all':(lambda root: celeba(root, ['attr','identity','bbox','landmarks']), ['jpg','npy','cls','bbox.xywh.npy','landmarks.npy'], None, ['jpg']),
    'Cityscapes':(cityscapes, ['png','mask.png'], None, ['png','mask.png']),
    'Cityscapes instances':(lambda root: cityscapes(root, ['instance','polygon']), ['png','mask.png','json'], None, ['png','mask.png']),
    'VOCSegmentation':(voc(tv.VOCSegmentation), ['jpg','mask.png'], None, ['jpg']), 'VOCDetection':(voc(tv.VOCDetection), ['jpg','json',*BOXES], None, ['jpg']),
    'CocoDetection':(coco(tv.CocoDetection), ['jpg','json',*BOXES], None, ['jpg']), 'CocoCaptions':(coco(tv.CocoCaptions), ['jpg','captions.json'], None, ['jpg']),
    'SBDataset':(sbd, ['jpg','mask.png'], None, ['jpg']), 'SBDataset boundaries':(lambda root: sbd(root, 'boundaries'), ['jpg','npy'], None, ['jpg']),
    'Flickr8k':(flickr8k, ['jpg','captions.json'], None, ['jpg']), 'Flickr30k':(flickr30k, ['jpg','captions.json'], None, ['jpg']), 'SBU':(sbu, ['jpg','caption.txt'], None, ['jpg']),
    'LFWPeople':(lfw_people, IMAGE, ['Ann','Bob'], ['jpg']), 'LFWPairs':(lfw_pairs, ['jpg','1.jpg','cls'], None, ['jpg','1.jpg']),
    'PCAM':(pcam, ['png','cls'], None, []), 'Places365':(places, IMAGE, ['/a/airfield','/a/alley'], ['jpg']),
    'ImageNet':(imagenet, IMAGE, ['tench, Tinca tinca','goldfish'], ['jpg']),
    'Kitti':(kitti, ['png','json',*BOXES], None, ['png']), 'Kitti test':(lambda root: kitti(root, False), ['png'], None, ['png']),
    'Country211':(country, IMAGE, ['AT','DE'], ['jpg']), 'RenderedSST2':(sst, ['png','cls'], ['negative','positive'], ['png']),
    'SUN397':(sun, IMAGE, ['abbey','alley'], ['jpg']), 'SEMEION':(semeion, ['png','cls'], None, []),
    'WIDERFace':(wider_face('train'), ['jpg','bbox.xywh.npy','blur','expression','illumination','occlusion','pose','invalid'], None, ['jpg']),
    'WIDERFace test':(wider_face('test'), ['jpg'], None, ['jpg']),
    'Imagenette':(imagenette, IMAGE, ['tench, Tinca tinca','English springer, English springer spaniel'], ['jpg']),
    'FER2013':(fer, ['png','cls'], None, []), 'FER2013 test':(lambda root: fer(root, 'test'), ['png'], None, []),
    'CLEVRClassification':(clevr, ['png','cls'], None, ['png']),
    'INaturalist':(inaturalist, IMAGE, SPECIES, ['jpg']), 'INaturalist genus':(lambda root: inaturalist(root, 'genus'), IMAGE, ['Corvus','Pica'], ['jpg']),
    'PhotoTour':(phototour, ['npy','1.npy','cls'], None, []), 'FakeData':(lambda root: tv.FakeData(N, (3,8,8)), ['png','cls'], None, []),
    'Sintel':(sintel, FLOW, None, ['png','1.png']), 'Sintel test':(sintel_test, ['png','1.png'], None, ['png','1.png']),
    'KittiFlow':(kitti_flow, [*FLOW,'3.npy'], None, ['png','1.png']), 'FlyingChairs':(chairs, ['img','1.img','npy'], None, ['img','1.img']),
    'FlyingThings3D':(things, FLOW, None, ['png','1.png']), 'HD1K':(hd1k, [*FLOW,'3.npy'], None, ['png','1.png']),
    'Kitti2012Stereo':(kitti_stereo(tv.Kitti2012Stereo, 2012, 'colored_0', 'colored_1', ['disp_noc']), STEREO, None, ['png','1.png']),
    'Kitti2015Stereo':(kitti_stereo(tv.Kitti2015Stereo, 2015, 'image_2', 'image_3', ['disp_occ_0','disp_occ_1']), STEREO, None, ['png','1.png']),
    'CarlaStereo':(carla, STEREO, None, ['png','1.png']), 'CREStereo':(crestereo, ['jpg','1.jpg','npy'], None, ['jpg','1.jpg']),
    'FallingThingsStereo':(falling, ['jpg','1.jpg','npy'], None, ['jpg','1.jpg']), 'SceneFlowStereo':(scene_flow, STEREO, None, ['png','1.png']),
    'SintelStereo':(sintel_stereo, [*STEREO,'3.npy'], None, ['png','1.png']), 'InStereo2k':(instereo, STEREO, None, ['png','1.png']),
    'ETH3DStereo':(eth3d, [*STEREO,'3.npy'], None, ['png','1.png']), 'ETH3DStereo test':(lambda root: eth3d(root, 'test'), ['png','1.png'], None, ['png','1.png']),
    'Middlebury2014Stereo':(middlebury, [*STEREO,'3.npy'], None, ['png','1.png']),
}
# Videos need a decoder (PyAV), LSUN needs `lmdb`. The others are base classes and a function, and folders, which have tests of their own.
NOT_HERE = {'Kinetics','HMDB51','UCF101','LSUN','LSUNClass', 'VisionDataset','wrap_dataset_for_transforms_v2', 'ImageFolder','DatasetFolder'}

def test_all_of_torchvision_is_here():
    "A class that torchvision adds is to be added here"
    assert {name.split()[0] for name in DATASETS}|NOT_HERE>=set(tv.__all__)

@pytest.fixture(autouse=True)
def no_checksums(monkeypatch):
    "torchvision compares files with the checksums of the originals; here they only have to be there"
    import torchvision.datasets as t
    for module in vars(t).values():
        if getattr(module, '__name__', '').startswith('torchvision.datasets.') and hasattr(module, 'check_integrity'):
            monkeypatch.setattr(module, 'check_integrity', lambda path, md5=None: os.path.exists(path))

def same(found, expected, names):
    "Is a value of a sample what the dataset returned?"
    if isinstance(expected, Image.Image):
        expected_pixels = np.asarray(expected)
        if found.mode!=expected.mode and expected.mode not in 'P1': found = found.convert(expected.mode)
        return np.array_equal(np.asarray(found), expected_pixels)
    if getattr(expected, 'shape', ())!=():
        expected = np.asarray(expected)
        return found.dtype==expected.dtype and np.array_equal(found, expected)
    if hasattr(expected, 'item'): expected = expected.item()
    if isinstance(expected, int) and names: expected = names[expected]
    return found==expected

@pytest.mark.parametrize('name', DATASETS)
def test_datasets_of_torchvision(name, tmp_path):
    "What a dataset returns is what is stored, with the names of its classes and the bytes of its files"
    build,fields,names,original = DATASETS[name]
    dataset = build(tmp_path)
    assert len(dataset)>=2
    store,report = in_memory(dataset)
    assert store.fields==fields and report.failed==0 and len(store)==len(dataset)
    if names: assert store.vocab==list(names)
    elif 'cls' in fields: assert all(isinstance(label, int) for label in store.vocab)
    for i in range(len(dataset)):
        values = [value for _,_,value in flat_items(dataset[i]) if value is not None]
        assert len(values)==len([field for field in fields if field not in BOXES])
        for field,value in zip(fields, values): assert same(store[i][field], value, names), (i,field)
    contents = {path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
    for field in fields:
        if field.split('.')[-1] in ('jpg','png','img'): assert (set(stored(store, field))<=contents)==(field in original), field

def test_labels_that_are_missing_are_named(tmp_path):
    "STL10 has -1 for images without a label"
    with pytest.raises(IngestError, match=r"item\[1\] is -1, which marks a sample without a label"): in_memory(stl10(tmp_path, 'unlabeled'))

# --- folders of images

@pytest.fixture
def folder(tmp_path):
    for i in range(12): picture(tmp_path/'photos'/('cat','dog')[i%2]/f'{i:02d}.jpg', i)
    return tv.ImageFolder(str(tmp_path/'photos'))

def test_image_folder_keeps_its_files(folder):
    for dataset in folder, tv.DatasetFolder(folder.root, tv.folder.default_loader, ('.jpg',)):
        store,report = in_memory(dataset)
        assert stored(store, 'jpg')==[Path(path).read_bytes() for path,_ in folder.samples] and store.vocab==['cat','dog']
        assert store.fields==['jpg','cls'] and not report.notes

def test_image_folder_in_redis_and_shards(folder, server, tmp_path):
    to_redis(folder, server.url, 'photos', **OPTIONS)
    to_shards(folder, tmp_path/'shards', **OPTIONS)
    for store in RedisStore(server.url, 'photos'), ShardStore(tmp_path/'shards'):
        assert stored(store, 'jpg')==[Path(path).read_bytes() for path,_ in folder.samples] and store.vocab==['cat','dog']

@pytest.mark.slow
def test_image_folder_in_two_workers(folder, tmp_path):
    to_shards(folder, tmp_path/'shards', **{**OPTIONS, 'num_workers':2}, chunk=3)
    assert stored(ShardStore(tmp_path/'shards'), 'jpg')==[Path(path).read_bytes() for path,_ in folder.samples]

def test_parts_of_an_image_folder(folder):
    "in any nesting keep names and files"
    first,second = random_split(folder, [8,4], torch.Generator().manual_seed(0))
    joined = ConcatDataset([Subset(ConcatDataset([first,second]), range(3, 11)), Subset(Subset(second, [2,1]), [1])])
    for dataset in first, joined, Subset(joined, [8,0,4]):
        store,_ = in_memory(dataset)
        assert store.vocab==['cat','dog'] and len(store)==len(dataset)
        for i in range(len(dataset)):
            assert np.array_equal(np.asarray(store[i]['jpg']), np.asarray(dataset[i][0])) and store[i]['cls']==store.vocab[dataset[i][1]]
    store,_ = in_memory({'train':first, 'valid':second})
    assert store.splits=={'train':[0,8], 'valid':[8,12]} and store.fields==['jpg','cls'] and store.vocab==['cat','dog']

def test_a_transform_is_what_the_user_sees(folder):
    "Images that a transform has changed are stored as the transform returns them"
    changed = tv.ImageFolder(folder.root, transform=lambda im: im.resize((5,5)))
    store,_ = in_memory(changed)
    assert store.fields==['png','cls'] and all(np.array_equal(np.asarray(store[i]['png']), np.asarray(changed[i][0])) for i in range(12))
    flipped = tv.ImageFolder(folder.root, transform=lambda im: im.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    store,_ = in_memory(flipped)
    assert store.fields==['png','cls'] and all(np.array_equal(np.asarray(store[i]['png']), np.asarray(flipped[i][0])) for i in range(12))
    arrays = tv.ImageFolder(folder.root, transform=np.asarray)
    assert in_memory(arrays)[0].fields==['npy','cls']
    grey = tv.ImageFolder(folder.root, transform=lambda im: im.convert('L'))
    store,_ = in_memory(grey)
    assert store.fields==['png','cls'] and store[0]['png'].mode=='L'

def test_an_image_that_is_changed_in_place(folder):
    "It is no longer what is in the file, though it was opened from there"
    def mark(im):
        im.putpixel((0,0), (1,2,3))
        return im
    loaded = tv.ImageFolder(folder.root, loader=lambda path: mark(Image.open(path)))
    store,_ = in_memory(loaded)
    assert store.fields==['png','cls'] and all(store[i]['png'].getpixel((0,0))==(1,2,3) for i in range(12))

def test_files_of_several_formats(folder):
    picture(Path(folder.root)/'cat'/'last.png', 3, 'P')
    picture(Path(folder.root)/'dog'/'last.jpg', 3, 'L')
    mixed = tv.ImageFolder(folder.root)
    store,report = in_memory(mixed)
    assert store.fields==['img','cls'] and report.failed==0
    assert stored(store, 'img')==[Path(path).read_bytes() for path,_ in mixed.samples]
    assert in_memory({'train':tv.ImageFolder(folder.root, is_valid_file=lambda p: p.endswith('jpg')), 'valid':mixed})[0].fields==['img','cls']

class Paths(Dataset):
    "A dataset as users write it"
    def __init__(self, paths, fn=lambda im, i: (im.convert('RGB'), i%2)): self.paths,self.fn = paths,fn
    def __len__(self): return len(self.paths)
    def __getitem__(self, i): return self.fn(Image.open(self.paths[i]), i)

def test_a_dataset_of_the_user_keeps_its_files(folder):
    paths = [path for path,_ in folder.samples]
    store,_ = in_memory(Paths(paths))
    assert stored(store, 'jpg')==[Path(path).read_bytes() for path in paths]
    store,_ = in_memory(Paths(paths, lambda im, i: {'image':im, 'mask':im.convert('L').point(lambda v: v>99 and 1), 'age':i/7, 'name':f'n{i}'}))
    assert store.fields==['image.jpg','mask.png','age','name'] and stored(store, 'image.jpg')==[Path(path).read_bytes() for path in paths]
    assert store[3]['age']==3/7 and store[3]['name']=='n3' and set(np.unique(store[3]['mask.png']))<={0,1}

def test_one_image_that_was_changed_is_a_failed_sample(folder):
    "where all that were looked at are JPEG files: it would lose quality"
    paths = [path for path,_ in folder.samples]*5
    store,report = in_memory(Paths(paths, lambda im, i: (im.rotate(90) if i==2 else im, i%2)))
    assert store.fields==['jpg','cls'] and report.failed==1 and len(store)==59
    assert "item[0] is not as it is in a file" in report.failures[0][1] and "fn=" in report.failures[0][1]

def test_pillow_is_as_before(folder):
    before = Image.open
    in_memory(folder)
    assert Image.open is before

# --- targets

class Items(Dataset):
    def __init__(self, items, **attributes):
        self.listed = items
        self.__dict__.update(attributes)
    def __len__(self): return len(self.listed)
    def __getitem__(self, i): return self.listed[i]

def photo(i): return draw(i).resize((9,7))
def boxes(n, dtype=torch.float32): return torch.arange(4*n).reshape(n, 4).to(dtype)
Pair = namedtuple('Pair', 'image target')

# item number i, and the fields that it is stored in
ITEMS = {
    'boxes of any length':(lambda i: (photo(i), boxes(i%3)), ['png','npy']),
    'a dict of tensors':(lambda i: (photo(i), {'boxes':boxes(i%3), 'labels':torch.arange(i%3), 'image_id':torch.tensor(i), 'area':torch.ones(i%3)}),
                         ['png','boxes','labels','image_id','area']),
    'only a dict':(lambda i: {'x':torch.ones(2, i), 'y':torch.tensor(i), 'z':{'a':torch.ones(i), 'b':i/7}}, ['x','y','z.a','z.b']),
    'tensors':(lambda i: (torch.ones(3), torch.ones(i), torch.tensor(i)), ['npy','1.npy','cls']),
    'nested':(lambda i: (photo(i), (i, (torch.ones(i), i/2))), ['png','cls','npy','target.f4']),
    'a list of dicts':(lambda i: (photo(i), [{'bbox':[1,2,k], 'type':'car'} for k in range(i)]), ['png','json']),
    'labels':(lambda i: (photo(i), ['a','b'][:i%3]), ['png','labels']), 'mixed':(lambda i: (photo(i), i if i%2 else 'text'), ['png','cls']),
    'numbers in a list':(lambda i: (photo(i), [i,.5]), ['png','json']), 'a list':(lambda i: [photo(i), i], ['png','cls']),
    'namedtuple':(lambda i: Pair(photo(i), i), ['image.png','target']), 'bytes':(lambda i: (bytes([i]), i), ['bin','cls']),
    'two images':(lambda i: (photo(i), photo(i+1), i%2), ['png','1.png','cls']), 'mask':(lambda i: (photo(i), photo(i).convert('L')), ['png','mask.png']),
    'mask of bits':(lambda i: (photo(i), photo(i).convert('1')), ['png','mask.png']),
    'several numbers':(lambda i: (photo(i), i, i+1, i/2, i/3), ['png','cls','2.cls','target.f4','4.f4']),
    'an array':(lambda i: np.full((2,i), i), ['npy']), 'numpy numbers':(lambda i: (np.ones(2), np.int64(i), np.float32(i)), ['npy','cls','target.f4']),
    'none':(lambda i: (photo(i), None), ['png']), 'an image':(photo, ['png']), 'a key that names a codec':(lambda i: {'txt':f'a {i}', 'cls':i, 'npy':torch.ones(2)}, ['txt','cls','npy']),
}

@pytest.mark.parametrize('name', ITEMS)
def test_items(name):
    make,fields = ITEMS[name]
    dataset = Items([make(i) for i in range(7)])
    if name=='mixed': return check_mixed(dataset)
    store,report = in_memory(dataset)
    assert store.fields==fields and report.failed==0 and len(store)==7
    for i in range(7):
        values = [value for _,_,value in flat_items(dataset[i]) if value is not None]
        for field,value in zip(fields, values):
            if isinstance(value, float): value = np.float32(value) if field.endswith('f4') else value
            if field=='labels' and isinstance(value, torch.Tensor): value = value.tolist()
            assert same(store[i][field], value, None), field

def check_mixed(dataset):
    "A value that is a number in some samples and a text in others: the others are failed samples"
    with pytest.raises(IngestError, match="the first sample had a str"): in_memory(dataset, max_failed=0)

def test_the_first_items_may_have_no_boxes():
    "The fields are not decided by the first item alone"
    dataset = Items([(photo(0), [])]*3+[(photo(i), [{'bbox':[i]}]) for i in range(20)])
    store,report = in_memory(dataset)
    assert store.fields==['png','json'] and report.failed==0 and store[0]['json']==[] and store[5]['json']==[{'bbox':[2]}]

def test_values_that_some_items_lack():
    dataset = Items([(photo(0), None)]+[(photo(i), i) for i in range(29)])
    store,report = in_memory(dataset)
    assert store.fields==['png','cls'] and len(store)==29 and 'item[1] is None' in report.failures[0][1]
    dataset = Items([{'a':1, 'b':2}]*29+[{'a':1}])
    store,report = in_memory(dataset)
    assert len(store)==29 and "item['b'] is missing" in report.failures[0][1]

def test_values_that_no_field_can_store():
    with pytest.raises(IngestError, match="no field for a object: write an fn that returns a dict"): in_memory(Items([(photo(0), object())]*3))

def test_fn_gets_the_item():
    "as the dataset returns it, and decides about the fields"
    def fn(item): return {'jpg':item[0], 'boxes.json':item[1]['boxes'].tolist(), 'x':'text'}
    store,_ = in_memory(Items([(photo(i), {'boxes':boxes(i), 'x':torch.ones(1)}) for i in range(5)]), fn=fn)
    assert store.fields==['jpg','boxes.json','x'] and store[2]['boxes.json']==boxes(2).tolist() and store[0]['x']=='text'

def test_tensor_dataset_and_stack():
    store,_ = in_memory(TensorDataset(torch.ones(5, 2), torch.arange(5), torch.zeros(5, 3)))
    assert store.fields==['npy','cls','2.npy']
    stack = torch.utils.data.StackDataset(image=torch.ones(5, 2), label=torch.arange(5))
    store,report = in_memory(stack)
    assert store.fields==['image','cls'] and "item['label'] -> cls" in repr(report)

def test_coco_in_parts(tmp_path):
    "Captions are captions in a part of the dataset, too; a line says where the names of the categories are"
    captions = Subset(coco(tv.CocoCaptions)(tmp_path), [1,3])
    assert in_memory(captions)[0].fields==['jpg','captions.json'] and in_memory(ConcatDataset([captions,captions]))[0].fields==['jpg','captions.json']
    dataset = coco(tv.CocoDetection)(tmp_path)
    assert 'boxes.labels' in repr(in_memory(dataset)[1])
    dataset = tv.CocoDetection(tmp_path, str(tmp_path/'ann.json'), transform=lambda image: image.resize((4,4)))
    store,report = in_memory(dataset)
    assert 'dataset.coco.cats' in repr(report) and store.fields==['png','json']

# `{name: (builder, boxes of sample 2, their labels)}`
ANNOTATED = {'CocoDetection':(coco(tv.CocoDetection), [[1,2,4.5,2],[1,2,4.5,3]], ['dog','dog']),
             'Kitti':(kitti, [[1,2,3,4]]*2, ['Car','Car']),
             'VOCDetection':(voc(tv.VOCDetection), [[1,0,8,0],[1,0,8,1]], ['dog','dog'])}

@pytest.mark.parametrize('name', ANNOTATED)
def test_annotated_boxes_are_corners_and_names(name, tmp_path):
    "In parts of a dataset, too; a sample may have none"
    build,boxes,labels = ANNOTATED[name]
    dataset = build(tmp_path)
    store,_ = in_memory(ConcatDataset([Subset(dataset, [0,2]), Subset(dataset, [1,3])]))
    by_number = {len(o['boxes.labels']):o for o in store[:]}   # some datasets list their files in any order
    none,two = by_number[0],by_number[2]
    assert none['boxes.npy'].shape==(0,4) and none['boxes.labels']==[]
    assert two['boxes.npy'].tolist()==boxes and two['boxes.labels']==labels and len(labels)==2
    assert store.manifest.vocab=={'boxes.labels':sorted(set(labels))}

def test_a_key_called_label():
    "is the class of the sample, with the names that the dataset has"
    dataset = Items([{'image':photo(i), 'label':i%2} for i in range(6)], classes=['cat','dog'])
    store,report = in_memory(dataset)
    assert store.fields==['image.png','cls'] and store.vocab==['cat','dog'] and store[1]['cls']=='dog' and "item['label'] -> cls" in repr(report)

# --- names of classes

def test_names_that_differ_are_an_error():
    a,b = Items([(np.ones(1), 0)]*3, classes=['cat','dog']),Items([(np.ones(1), 0)]*3, classes=['dog','cat'])
    with pytest.raises(ValueError, match=r"2 datasets with different classes, \['cat', 'dog'\], \['dog', 'cat'\].*vocab="):
        in_memory(Subset(ConcatDataset([Subset(a, [0,1]), b]), range(4)))
    assert in_memory(ConcatDataset([a,b]), vocab=['x','y'])[0].vocab==['x','y']
    assert in_memory(ConcatDataset([a,a]))[0].vocab==['cat','dog']

# --- fastai

def test_fastai_datasets(folder):
    from fastai.data.core import Datasets, TfmdLists
    from fastai.data.transforms import Categorize, MultiCategorize, OneHotEncode, parent_label
    from fastai.vision.core import AddMaskCodes, PILImage, PILMask
    files = [Path(path) for path,_ in folder.samples]
    parts = [list(range(8)),list(range(8, 12))]
    dsets = Datasets(files, [[PILImage.create],[parent_label, Categorize()]], splits=parts)
    for source in dsets, {'train':dsets.train, 'valid':dsets.valid}:
        store,_ = in_memory(source)
        assert store.splits=={'train':[0,8], 'valid':[8,12]} and store.vocab==['cat','dog']
        assert stored(store, 'jpg')==[f.read_bytes() for f in files]
        assert [store[i]['cls'] for i in range(12)]==[f.parent.name for f in files]
    store,_ = in_memory(TfmdLists(files, [PILImage.create]))
    assert store.fields==['jpg'] and store.splits=={}
    tags = [['a','b'][:i%3] for i in range(12)]
    for encode in [], [OneHotEncode()]:
        dsets = Datasets(list(range(12)), [[lambda i: PILImage.create(files[i])],[lambda i: tags[i], MultiCategorize(), *encode]])
        store,_ = in_memory(dsets)
        assert store.fields==['jpg','labels'] and store.manifest.vocab['labels']==['a','b'] and [o['labels'] for o in store[:]]==tags
    def mask(i): return PILMask.create(np.full((7,9), i%2, np.uint8))
    dsets = Datasets(list(range(12)), [[lambda i: PILImage.create(files[i])],[mask, AddMaskCodes(['sky','road'])]])
    store,_ = in_memory(dsets)
    assert store.fields==['jpg','mask.png'] and store.manifest.vocab['mask.png']==['sky','road']
    assert all(np.array_equal(np.asarray(store[i]['mask.png']), np.full((7,9), i%2)) for i in range(12))

# --- what is no dataset of samples

def test_loaders_name_what_to_give(folder):
    from fastai.data.core import Datasets
    from fastai.vision.all import ImageDataLoaders
    dls = ImageDataLoaders.from_folder(folder.root, valid_pct=.3, seed=0, bs=2, device='cpu', num_workers=0)
    with pytest.raises(TypeError, match=r"DataLoaders.*return batches.*\{'train': dls.train_ds, 'valid': dls.valid_ds\}"): in_memory(dls)
    for dl in dls.train, DataLoader(folder):
        with pytest.raises(TypeError, match=r"returns batches.*dl.dataset"): in_memory(dl)
        assert in_memory(dl.dataset)[0].fields==['jpg','cls']
    store,_ = in_memory({'train':dls.train_ds, 'valid':dls.valid_ds})
    assert store.vocab==['cat','dog'] and {split:b-a for split,(a,b) in store.splits.items()}=={'train':9, 'valid':3}

class Turning(Items):
    "Items with random changes, by the generator that `draw` asks"
    def __getitem__(self, i): return self.listed[i]+self.draw(), i

OWN = np.random.default_rng()
DRAWS = {'torch':lambda: torch.randn(3).numpy(), 'numpy':lambda: np.random.randn(3), 'python':lambda: random.random(),
    'own':lambda: OWN.random(3), 'system':lambda: os.urandom(1)[0]/3+OWN.random()}

@pytest.mark.parametrize('draw', DRAWS)
def test_a_dataset_with_random_transforms_is_recognised(draw):
    "By items that are the same each time, with generators that begin anew; the generators of the user are not changed"
    def source(change=0): return as_source(Turning([np.arange(3)+i+change for i in range(9)], draw=DRAWS[draw]))
    states = random.getstate()[1],np.random.get_state()[1].tolist(),torch.get_rng_state().tolist()
    first = source().fingerprint()
    assert states==(random.getstate()[1],np.random.get_state()[1].tolist(),torch.get_rng_state().tolist())
    torch.randn(3), np.random.randn(3), random.random()
    assert source().fingerprint()==first
    if draw in ('torch','numpy','python'): assert source(1).fingerprint()!=first

def test_an_interrupted_ingest_of_random_items_goes_on(fresh):
    left = [20]
    def fn(item):
        left[0] -= 1
        if not left[0]: raise KeyboardInterrupt
        return {'npy':item[0], 'id':item[1]}
    def write(): return to_redis(Turning([np.zeros(3)]*40, draw=DRAWS['torch']), fresh.url, 'd', fn=fn, chunk=4,
        num_workers=1, progress=False)
    with pytest.raises(KeyboardInterrupt): write()
    assert write().resumed>=12

def test_items_that_cannot_be_looked_at_are_failed_samples_with_their_reasons():
    class Damaged(Items):
        def __getitem__(self, i):
            if i in (0,4): raise OSError(f'item {i} is damaged')
            return self.listed[i]
    store,report = in_memory(Damaged([(photo(i), i) for i in range(9)]), max_failed=2)
    assert len(store)==7 and [reason for _,reason in report.failures]==[f'OSError: item {i} is damaged' for i in (0,4)]

def test_messages_name_the_field_and_what_to_do():
    "Some of the messages that did not: of NumPy on arrays of objects, and of a number that is None"
    ragged = np.empty(2, object)
    ragged[:] = [[1],[2,3]]
    for field in 'x.npy','x.npz':
        with pytest.raises(IngestError, match=r"want numbers, got an array of dtype object.*json"): in_memory([{field:ragged}])
    for field in 'age.f4','cls','id':
        store,report = in_memory([{field:1}]*20+[{field:None}])
        assert f"field {field!r} is None in this sample" in report.failures[0][1] and '.json' in report.failures[0][1]

# --- boxes and points train in one line

IN_ONE_LINE = {'CocoDetection':(coco(tv.CocoDetection), None, [TensorBBox,TensorMultiCategory]), 'VOCDetection':(voc(tv.VOCDetection), None, [TensorBBox,TensorMultiCategory]),
               'Kitti':(kitti, None, [TensorBBox,TensorMultiCategory]), 'WIDERFace':(wider_face('train'), 'bbox.xywh.npy', [TensorBBox]),
               'CelebA boxes':(lambda root: celeba(root, 'bbox'), 'bbox.xywh.npy', [TensorBBox]), 'CelebA landmarks':(lambda root: celeba(root, 'landmarks'), 'landmarks.npy', [TensorPoint])}

@pytest.mark.parametrize('name', IN_ONE_LINE)
def test_boxes_and_points_train_in_one_line(name, tmp_path):
    build,y,types = IN_ONE_LINE[name]
    store,_ = in_memory(build(tmp_path))
    targets = DataLoaders.from_store(store, y=y, bs=2, num_workers=0, device='cpu', valid_pct=0, item_tfms=Resize(8)).one_batch()[1:]
    assert [type(o) for o in targets]==types and all(torch.isfinite(o).all() for o in targets)

def test_boxes_and_points_of_fastai_keep_their_meaning():
    annotated = [([[1,1,5,5],[2,2,6,6]], ['b','b']), ([[0,0,4,4]], ['a'])]*3
    dsets = Datasets(list(range(6)), [[lambda i: PILImage.create(photo(i))],[lambda i: annotated[i][0], TensorBBox.create],[lambda i: annotated[i][1], MultiCategorize(add_na=True)],[lambda i: [[i,i]], TensorPoint.create]], n_inp=1)
    store,_ = in_memory(dsets)
    assert store.fields==['png','boxes.npy','labels','points.npy'] and [store[i]['labels'] for i in (0,1)]==[['b','b'],['a']]
    dls = DataLoaders.from_store(store, bs=2, num_workers=0, device='cpu', valid_pct=0, item_tfms=Resize(8))
    assert dls.vocab==['#na#','a','b'] and dls.test_dl([0,1], with_labels=True).one_batch()[2].tolist()==[[2,2],[1,0]]

@pytest.mark.parametrize('attributes', [dict(classes=2), dict(classes='ab'), dict(classes={'a','b'}),
    dict(vocab=object()), dict(classes=lambda: ['a','b']), dict(class_to_idx={'a':0, 'b':'x'}),
    dict(class_to_idx={'a':0, 'b':[]})])
def test_attributes_that_are_no_list_of_names_are_left_alone(attributes):
    "Such as the number of classes, or a set, whose order is another one in each process"
    class Numbers:
        def __len__(self): return 4
        def __getitem__(self, i): return np.zeros(2),i%2
    dataset = Numbers()
    dataset.__dict__.update(attributes)
    assert as_source(dataset).vocab is None

def test_an_error_in_a_split_names_it():
    "Whatever its class, as some take several arguments"
    class Broken(list):
        def __len__(self): return len(b'\xff'.decode())
    with pytest.raises(ValueError, match="valid: .*can't decode"): as_source({'train':[1], 'valid':Broken()})

def test_classes_that_have_no_name_are_named():
    "A number beyond the names of several labels"
    layout = ItemLayout([[(TensorMultiCategory([0,1]),)]])
    for labels in [0,2], [-1]:
        with pytest.raises(ValueError, match=r"item\[0\] has class (2|-1): there are 2 names of classes"):
            _ItemSample(layout, ['a','b'])((TensorMultiCategory(labels),), [])
    assert _ItemSample(layout, ['a','b'])((TensorMultiCategory([1.,0.]),), [])=={'labels':['a']}

class ImagesByKey(Dataset):
    "Dicts with an image under `key`, opened from files whose formats differ"
    def __init__(self, folder, key, formats): self.folder,self.key,self.formats = folder,key,formats
    def __len__(self): return len(self.formats)
    def __getitem__(self, i): return {self.key:Image.open(self.folder/f'{i}.{self.formats[i]}').convert('RGB')}

@pytest.mark.parametrize('key', ['jpg','jpeg','photo.jpeg'])
def test_files_of_jpeg_are_kept_whatever_the_field_is_called(tmp_path, key):
    files = [picture(tmp_path/f'{i}.jpg', i) for i in range(N)]
    store,_ = in_memory(ImagesByKey(tmp_path, key, ['jpg']*N))
    assert store.fields==[key] and stored(store, key)==[file.read_bytes() for file in files]

def test_a_key_that_ends_like_an_extension_is_no_choice_of_a_format(tmp_path):
    "The field of `my_jpg` is `my_jpg.jpg` because files are JPEGs: a PNG among them is not encoded with loss"
    formats = ['jpg','png']+['jpg']*38   # the second item is not among those that are looked at
    for i,extension in enumerate(formats): picture(tmp_path/f'{i}.{extension}', i%7, size=(3,2))
    _,report = in_memory(ImagesByKey(tmp_path, 'my_jpg', formats), max_failed=None)
    assert report.failed==1 and 'a file of another format (png)' in str(report.failures)

def test_a_vocabulary_that_is_given_hides_no_other_remark(tmp_path):
    class WithNotes(type(as_source([{'cls':'a'}]))): notes,label_notes = ['and another thing'],['class names are odd']
    report = in_memory(WithNotes([{'cls':'a'},{'cls':'b'}]), vocab=['a','b'])[1]
    assert 'and another thing' in report.notes and 'odd' not in str(report.notes)
