"""Folders of image files: which are read, and their order, in memory that depends on the names alone; splits by folders

The files are those that fastai's `get_image_files` selects, and the report says which are left out."""
import random, subprocess, sys, tracemalloc

import pytest
from fastai.data.transforms import get_image_files, image_extensions
from PIL import Image

from conftest import class_of
from fastai_remote import image_samples
from fastai_remote.source.files import SortedNames
from in_memory import in_memory, written
from inputs import encoded

def test_names_are_sorted_and_packed():
    "In the order of `sorted`, whatever is in them, and no object is kept per name"
    odd = ['b','B','ä','a b','a.b','a-b','a','\udcff','\U0001f431','漢','z'*255,'a\nb']
    every = [f'{name}{k}' for k in range(1_500) for name in odd]+[f'n{i:09}.jpg' for i in range(45_000)]
    random.Random(0).shuffle(every)
    tracemalloc.start()
    names = SortedNames()
    for name in every: names.append(name)
    kept,peak = tracemalloc.get_traced_memory()
    packed = sum(map(len, names.packed))
    assert packed<sum(len(name.encode(errors='surrogateescape'))+6 for name in every)
    assert kept<packed+200_000 and peak<packed+10_000_000   # fifty thousand at a time are objects
    tracemalloc.stop()
    assert list(names)==sorted(every)

def test_folders_and_files_are_in_one_order(tmp_path):
    "The order of earlier versions: names of folders and files are sorted together"
    for name in ('b/1.jpg','b.jpg','a/2/x.png','a/2.png','a-/3.jpg','B/4.jpg','.hidden/5.jpg','c.jpg/6.jpg','a.jpg',
                 'b/.h.jpg','b/n.txt'):
        (tmp_path/name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path/name).touch()
    found = [str(path.relative_to(tmp_path)) for path in image_samples(tmp_path).paths]
    assert found==['B/4.jpg','a/2/x.png','a/2.png','a-/3.jpg','a.jpg','b/1.jpg','b.jpg','c.jpg/6.jpg']

def test_a_flat_folder_takes_the_bytes_of_its_names(tmp_path):
    n = 2_000
    for i in range(n): (tmp_path/f'{i:012}.jpg').touch()
    tracemalloc.start()
    source = image_samples(tmp_path)
    traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, '*source/files.py')]).traces
    tracemalloc.stop()
    assert len(source)==n and source.paths[777].name==f'{777:012}.jpg'
    assert sum(trace.size for trace in traces)<n*(16+8)*1.25+100_000

def test_splits_by_folders(tmp_path):
    "As fastai's GrandparentSplitter: the folders that are named are splits, and others are left out"
    for i in range(24):
        path = tmp_path/('training','testing','other')[i%3]/'ab'[i//3%2]/f'{i}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new('L', (3,3), i).save(path)
    store = in_memory(image_samples(tmp_path, label=class_of, splits={'train':'training', 'valid':'testing'}))
    assert store.splits=={'train':[0,8], 'valid':[8,16]} and store.vocab==['a','b']
    for k in range(16):
        i = store[k]['png'].getpixel((0,0))
        assert i%3==(k>=8) and store[k]['cls']=='ab'[i//3%2]
    assert image_samples(tmp_path, splits=['testing','training']).splits=={'testing':[0,8], 'training':[8,16]}
    with pytest.raises(FileNotFoundError, match='valid: no such folder'): image_samples(tmp_path, splits=['valid'])
    (tmp_path/'valid').mkdir()
    with pytest.raises(FileNotFoundError, match='valid: no image files'):
        image_samples(tmp_path, splits=['training','valid'])
    with pytest.raises(TypeError, match='splits= names folders'):
        image_samples([tmp_path/'training/a/0.png'], splits=['training'])
    for splits in 'train', [], {}:
        with pytest.raises((TypeError,ValueError), match='splits= '): image_samples(tmp_path, splits=splits)

# --- which files are selected

@pytest.fixture
def folder(tmp_path):
    "A file of each extension that the system knows for images, and files with strange names"
    names = [f'a/image{extension}' for extension in image_extensions]
    names += ['b/UPPER.JFIF', 'b/two.tar.jpe', 'b/png', 'b/jpg', 'b/a.png.txt', 'b/noext', 'b/dot.', '.hidden.png',
              '.hidden', 'b/.jpg', '.folder/a.png', 'b/c.pjpeg', 'b/d.JPG', 'b/ä ö.Png']
    for name in names:
        path = tmp_path/'images'/name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(Image.new('RGB', (4,4))))
    (tmp_path/'images/linked').symlink_to(tmp_path/'images/b')
    return tmp_path/'images'

def test_the_files_are_those_of_get_image_files(folder):
    source = image_samples(folder)
    found = sorted(map(str, get_image_files(folder)))
    assert sorted(str(source.paths[i]) for i in range(len(source)))==found and len(found)>50
    assert source.notes==['3 hidden image files are left out']

def test_they_are_the_same_without_fastai(folder):
    code = ("import sys; from fastai_remote.source.files import image_samples; source = image_samples(sys.argv[1]); "
            "print(len(source), 'fastai.data.transforms' in sys.modules)")
    run = subprocess.run([sys.executable, '-c', code, str(folder)], capture_output=True, text=True, check=True)
    assert run.stdout.split()==[str(len(get_image_files(folder))), 'False']

def test_jpegs_have_the_field_of_jpegs_whatever_their_extension(tmp_path):
    for name,field in ('a.jfif','jpg'), ('a.jpe','jpg'), ('a.jpeg','jpg'), ('a.bmp','img'):
        Image.new('RGB', (8,8)).save(tmp_path/name, 'BMP' if name.endswith('bmp') else 'JPEG')
        assert list(image_samples([tmp_path/name])[0])==[field]

def test_the_report_counts_images_of_no_split(tmp_path):
    for name in 'train/a.png', 'valid/b.png', 'test/c.jfif', 'test/d.png', 'e.png':
        (tmp_path/name).parent.mkdir(exist_ok=True)
        (tmp_path/name).write_bytes(encoded(Image.new('RGB', (4,4))))
    _,report = written(image_samples(tmp_path, splits=['train','valid']))
    assert any('3 image files in other folders than those of splits= are left out' in note for note in report.notes)
    assert image_samples(tmp_path, splits={'all':'.', 'some':'test'}).notes==[]
    assert image_samples(tmp_path, splits=['test']).notes[0].startswith('3 image files in other folders')
