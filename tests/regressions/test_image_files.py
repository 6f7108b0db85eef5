"`image_samples` of a folder selects the files that fastai's `get_image_files` selects, and says what it leaves out"
import subprocess, sys

import pytest
from fastai.data.transforms import get_image_files, image_extensions
from PIL import Image

from fastai_remote import image_samples, to_shards
from inputs import encoded

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
    report = to_shards(image_samples(tmp_path, splits=['train','valid']), tmp_path/'out', num_workers=0, progress=False)
    assert any('3 image files in other folders than those of splits= are left out' in note for note in report.notes)
    assert image_samples(tmp_path, splits={'all':'.', 'some':'test'}).notes==[]
    assert image_samples(tmp_path, splits=['test']).notes[0].startswith('3 image files in other folders')
