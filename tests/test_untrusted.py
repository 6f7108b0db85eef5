"A dataset of somebody else: its manifest decides neither where to read nor who gets the reader's credentials"
import base64, contextlib, http.server, json, os, pickle, re, shutil, socket, threading, zlib

import numpy as np
import pytest

from fastai_remote.core import Manifest, StoreNotFound, sum_content, UnsupportedFormat
from fastai_remote.ingest.index import index_shards
from fastai_remote.ingest.run import ingest
from fastai_remote.ingest.shards import to_shards
from fastai_remote.source.files import image_samples
from fastai_remote.source.csv_files import csv_samples
from fastai_remote.store.shard_index import ShardTable
from fastai_remote.store.shards import ShardStore
from fastai_remote.store.storage import Storage
from fastai_remote.write.base import MemoryWriter

MARKER = 'secret-8f2c'

@pytest.fixture
def folder(tmp_path):
    "Shards of twenty samples"
    to_shards([{'txt':f'number {i}', 'cls':'ab'[i%2]} for i in range(20)], tmp_path/'theirs', num_workers=1, chunk=5, maxcount=5, shuffle=False, progress=False)
    return tmp_path/'theirs'

@pytest.fixture
def elsewhere(folder, tmp_path):
    "The folder of a manifest whose shards are in `folder`"
    for name in ('manifest.json', *(f.name for f in folder.glob('*.fastai_remote'))): (folder/name).unlink()
    index_shards(folder, to=tmp_path/'ours', num_workers=1, progress=False)
    return tmp_path/'ours'

def change(folder, **changes):
    "Write a manifest with `changes`, and with the right checksum, as its author would"
    manifest = {**json.loads((folder/'manifest.json').read_text()), **changes}
    manifest['crc'] = sum_content(manifest)
    (folder/'manifest.json').write_text(json.dumps(manifest))

def texts(store): return store.get_many(range(len(store)), 'txt', decode=True)['txt']

class Requests:
    "An HTTP server of a folder, which notes the requests"
    def __init__(self, folder):
        seen = self.seen = []
        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args): super().__init__(*args, directory=str(folder))
            def do_GET(self): seen.append((self.path, str(self.headers))); super().do_GET()
            def do_HEAD(self): seen.append((self.path, str(self.headers))); super().do_HEAD()
            def log_message(self, *args): pass
        self.server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f'http://127.0.0.1:{self.server.server_port}'
    def __enter__(self): return self
    def __exit__(self, *args):
        self.server.shutdown()
        self.server.server_close()

def test_a_manifest_cannot_send_credentials_to_another_host(folder, tmp_path):
    (tmp_path/'public').mkdir()
    with Requests(tmp_path/'public') as theirs, Requests(folder) as attacker:
        for f in (folder/'manifest.json', *folder.glob('*.fastai_remote')): shutil.copy(f, tmp_path/'public')
        change(tmp_path/'public', base=attacker.url)
        options = {'headers':{'Authorization':MARKER}}
        with pytest.raises(StoreNotFound, match=f"{re.escape(attacker.url)}.*shards_url=") as e:
            texts(ShardStore(theirs.url, cache=None, timeout=3, storage_options=options))
        assert MARKER not in str(e.value)
        assert any(MARKER in headers for _,headers in theirs.seen)   # the reader's options go where the reader said
        assert not attacker.seen
        # nor where the reader did say so, but gave options for another host
        store = ShardStore(theirs.url, cache=None, timeout=3, storage_options=options, shards_url=attacker.url)
        with contextlib.suppress(Exception): texts(store)
        assert attacker.seen
        assert not any(MARKER in headers for _,headers in attacker.seen)

@pytest.mark.parametrize('base', ['/etc', '..', 'file:///etc', 's3://bucket/x', 'memory://x'])
def test_shards_elsewhere_are_only_read_where_the_reader_says(folder, base):
    change(folder, base=base)
    with pytest.raises(StoreNotFound, match='shards_url='): ShardStore(folder)

def test_a_reader_says_where_the_shards_are(folder, elsewhere):
    with pytest.raises(StoreNotFound, match=re.escape(f"shards_url={str(folder)!r}")): ShardStore(elsewhere)
    want = [f'number {i}' for i in range(20)]
    for shards_url in (str(folder), folder, Storage(folder)):
        store = ShardStore(elsewhere, shards_url=shards_url)
        assert texts(store)==want
        assert texts(pickle.loads(pickle.dumps(store)))==texts(pickle.loads(pickle.dumps(store.opener()))())==want
        assert store.verify(num_workers=2).bad==0

def test_loaders_take_the_folder_of_the_shards(folder, elsewhere):
    from fastai.data.core import DataLoaders
    import fastai_remote.block
    folder = shutil.move(folder, folder.with_name('moved'))
    dls = DataLoaders.from_shards(elsewhere, x='cls', y='cls', shards_url=folder, bs=4, num_workers=0, valid_pct=.5)
    assert sum(len(x) for x,_ in dls.valid)==10

def test_an_exported_store_finds_its_shards_where_they_were(folder, elsewhere, tmp_path, monkeypatch):
    "The manifest may have moved since, to the place that the environment names"
    saved = pickle.dumps(ShardStore(elsewhere, shards_url=folder))
    shutil.move(elsewhere, tmp_path/'moved')
    monkeypatch.setenv('FASTAI_REMOTE_URL', str(tmp_path/'moved'))
    assert texts(pickle.loads(saved))[3]=='number 3'

NAMES = ['', '.', '..', '../x.tar', '/etc/passwd', 'a/../../x.tar', 'a/..', 'a//b.tar', 'a/', './x.tar', 'x\\..\\y.tar', 'x\0.tar']

@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('place', [0,1,-1])
def test_names_of_shards_stay_in_the_folder(folder, name, place):
    table = json.loads((folder/'manifest.json').read_text())['shards']
    names = zlib.decompress(base64.b64decode(table['text'])).decode().split('\n')
    assert len(names)==4
    names[place] = name
    table['text'] = base64.b64encode(zlib.compress('\n'.join(names).encode())).decode()
    change(folder, shards=table)
    with pytest.raises(UnsupportedFormat, match='leaves the folder|damaged table'): ShardStore(folder)

def test_usual_names_of_shards_are_accepted():
    names = ['a.tar', '..a.tar', 'a..tar', '.hidden.tar', 'train/000.tar', 'a b/ü.tar', '...']
    column = np.ones(len(names), np.int64)
    assert [ShardTable.unpack(ShardTable(names, column, column, column, column).pack()).name(k) for k in range(len(names))]==names
    assert len(ShardTable.unpack(ShardTable([], [], [], [], []).pack()))==0

def test_the_file_of_failures_lies_in_the_folder(folder):
    (folder.parent/'x-failures.json').write_text(f'["{MARKER}","1"]\n')
    for prefix in ('../x', '/x', 'a/../../x'):
        change(folder, prefix=prefix, failed=1, failures_crc=-1)
        with pytest.raises(UnsupportedFormat, match='prefix'): list(ShardStore(folder).failures())

@pytest.fixture
def strange(tmp_path):
    "A folder with one image, a pipe, a link to an endless device, a socket, links that lead nowhere or in a circle, and a folder with the name of an image"
    from PIL import Image
    folder = tmp_path/'strange'
    (folder/'sub').mkdir(parents=True)
    Image.new('RGB', (8,8)).save(folder/'sub'/'good.jpg')
    os.mkfifo(folder/'pipe.jpg')
    (folder/'endless.jpg').symlink_to('/dev/zero')
    socket.socket(socket.AF_UNIX).bind(str(folder/'socket.jpg'))
    (folder/'nowhere.jpg').symlink_to('nothing')
    (folder/'circle.jpg').symlink_to('circle.jpg')
    (folder/'sub'/'up').symlink_to('..')
    (folder/'again').symlink_to('sub')
    (folder/'folder.jpg').mkdir()
    return folder

FAIL = {'pipe.jpg':'a pipe, not a regular file', 'endless.jpg':'a device, not a regular file', 'socket.jpg':'', 'nowhere.jpg':'No such file', 'circle.jpg':'Too many levels'}

@pytest.mark.timeout(60)
def test_only_regular_files_are_read(strange):
    "The others are failed samples with a reason. A linked folder is searched, but not the folder that it lies in"
    writer = MemoryWriter()
    report = ingest(image_samples(strange), writer, max_failed=1., num_workers=1, progress=False)
    assert report.written==2 and report.failed==len(FAIL)
    reasons = {name.rsplit('/', 1)[1]:reason for name,reason in report.failures}
    assert reasons.keys()==FAIL.keys() and all(FAIL[name] in reasons[name] for name in FAIL)

@pytest.mark.timeout(60)
def test_columns_of_paths_name_regular_files(strange, tmp_path):
    (tmp_path/'t.csv').write_text('name\n'+''.join(f'{name}\n' for name in (*FAIL, 'folder.jpg', 'sub/good.jpg')))
    writer = MemoryWriter()
    report = ingest(csv_samples(tmp_path/'t.csv', 'name', folder=strange), writer, max_failed=1., num_workers=1, progress=False)
    assert report.written==1 and report.failed==len(FAIL)+1

def test_folders_that_link_to_each_other_are_searched_once_each_way(tmp_path):
    for name,other in (('a','b'), ('b','a')):
        (tmp_path/name).mkdir()
        (tmp_path/name/f'{name}.jpg').write_bytes(b'')
        (tmp_path/name/'other').symlink_to(f'../{other}')
    found = [str(p.relative_to(tmp_path)) for p in image_samples(tmp_path).paths]
    assert found==['a/a.jpg', 'a/other/b.jpg', 'b/b.jpg', 'b/other/a.jpg']

@pytest.mark.parametrize('n', ['many', -1, 1.5, None, True])
def test_the_number_of_samples_that_have_a_field(n):
    fields = {'txt':{'codec':'txt', 'dtype':None, 'n':n}}
    with pytest.raises(UnsupportedFormat, match="invalid: fields 'txt'"):
        Manifest.from_json(json.dumps({'format':1, 'name':'d', 'n':3, 'fields':fields}))

def test_names_that_are_no_text_are_refused():
    column = np.ones(1, 'u4')
    stored = ShardTable(b'a\xff.tar', column, column, column, column).pack()
    with pytest.raises(ValueError, match='utf-8'): ShardTable.unpack(stored)
