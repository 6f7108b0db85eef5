"Workers of an ingest have the settings and the code of the process that started it, as if it worked alone"
import importlib, io, os, sys, tempfile, time

import pytest
from PIL import Image, ImageFile

from fastai_remote import ShardStore, to_shards
from fastai_remote.codec import images
from fastai_remote.codec.base import Codec
from fastai_remote.codec.fields import register_codec
from fastai_remote.parallel import parallel_map
from inputs import encoded
from interpreters import start_fork

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('processes')]

def write(folder, source, num_workers, **kwargs):
    "Write `source` to `folder`, two samples in a chunk; returns the store, or `None` if it was refused"
    to_shards(source, folder, num_workers=num_workers, chunk=2, shuffle=False, progress=False, overwrite=True,
        max_failed=1., **kwargs)
    return ShardStore(folder)

def pixels(sample):
    "An `fn` that decodes an image"
    return {'npy':__import__('numpy').asarray(Image.open(io.BytesIO(sample['img.bin'])))}

@pytest.mark.parametrize('module,name,value', [(ImageFile,'LOAD_TRUNCATED_IMAGES',True),
    (Image,'MAX_IMAGE_PIXELS',1000), (images,'MAX_SCANS',0)])
def test_what_is_stored_does_not_depend_on_the_number_of_workers(tmp_path, monkeypatch, module, name, value):
    whole,small = (encoded(Image.effect_noise((size,size), 90), 'JPEG') for size in (64,8))
    source = [{'img.bin':whole}, {'img.bin':whole[:len(whole)//2]}, {'img.bin':small}, {'jpg':whole}, {'jpg':small}]*2
    fn = lambda o: pixels(o) if 'img.bin' in o else {'npy':pixels({'img.bin':o['jpg']})['npy']}
    def stored(num_workers):
        written = [len(write(tmp_path/f'{num_workers}', source, num_workers, fn=fn))]
        jpegs = [o for o in source if 'jpg' in o]
        try: written.append(len(write(tmp_path/f'jpg{num_workers}', jpegs, num_workers)))
        except Exception as e: written.append(str(e).split(':')[0])
        return written
    before = stored(2)
    assert before==stored(0)
    monkeypatch.setattr(module, name, value)
    assert stored(2)==stored(0)!=before
    monkeypatch.undo()
    assert stored(2)==before

def pids():
    "The processes of the two workers: each of two calls waits until the other worker has the other call"
    with tempfile.TemporaryDirectory() as folder:
        def meet(_):
            open(f'{folder}/{os.getpid()}', 'w').close()
            while len(os.listdir(folder))<2: time.sleep(.005)
            return os.getpid()
        return {*parallel_map(meet, range(2), 2)}

MODULE = '''
def fn(i): return {{'txt':'{text}'}}
class Label:
    def __call__(self, i): return '{text}'
'''

def test_a_reloaded_module_is_what_workers_run(tmp_path, monkeypatch):
    "As `importlib.reload` and `%autoreload` do; also a function that the module did not have before"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv('PYTHONDONTWRITEBYTECODE', '1')
    monkeypatch.setattr(sys, 'dont_write_bytecode', True)
    file = tmp_path/'edited_module.py'
    file.write_text(MODULE.format(text='old'))
    module = importlib.import_module('edited_module')
    def texts(f): return set(write(tmp_path/'d', list(range(8)), 2, fn=f).get_many(range(8), 'txt', decode=True)['txt'])
    try:
        assert texts(module.fn)=={'old'}
        workers = pids()
        assert texts(module.fn)=={'old'} and pids()==workers   # they are kept
        file.write_text(MODULE.format(text='new')+"def added(i): return {'txt':'added'}\n")
        importlib.reload(module)
        assert texts(module.fn)=={'new'} and texts(module.added)=={'added'} and not pids()&workers
    finally: del sys.modules['edited_module']

@pytest.mark.timeout(100)
def test_a_forked_process_has_workers_of_its_own():
    "It inherits the executor of its parent, whose workers it can neither reach nor end"
    workers = pids()
    forked = start_fork(pids)()
    assert isinstance(forked, set), forked
    assert not forked&workers and pids()==workers   # those of the parent are still there

class Reversed(Codec):
    "A codec of texts that stores them reversed"
    def __init__(self): super().__init__('reversed')
    def pack(self, o): return o[::-1].encode()
    def unpack(self, b): return b.decode()[::-1]

def test_a_registered_codec_is_known_to_workers(tmp_path):
    register_codec(Reversed())
    store = write(tmp_path/'d', [{'a.reversed':f'text {i}'} for i in range(8)], 2)
    assert store.get_many([3], 'a.reversed')['a.reversed']==[b'3 txet'] and store[3]['a.reversed']=='text 3'
