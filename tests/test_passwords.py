"Redis with a password and with TLS: every process is let in, and nothing shows or keeps the password"
import os, pickle, random, shutil, subprocess, sys, traceback, zipfile
from functools import partial
from urllib.parse import quote

import pytest
import redis
from fastai.data.core import DataLoaders
from fastai.learner import Learner, load_learner
from fastai.losses import CrossEntropyLossFlat
from fastai.vision.augment import Resize
from torch import nn

import fastai_remote.block
from conftest import class_of, N
from faultproxy import FaultProxy
from fastai_remote import (image_samples, IngestError, redis_server, RedisStore, StoreFull, StoreNotFound,
                           StoreUnavailable, to_redis, UnknownField)
from fastai_remote.write.redis import RedisWriter

PASSWORD,WRONG = 's3cr%t/p@ss','wr0ng%/p@ss'
QUOTED = quote(PASSWORD, safe='')
FORMS = [form for p in (PASSWORD,WRONG) for form in (p, quote(p), quote(p, safe=''))]
ONE = dict(num_workers=1, progress=False)

def check_secret(*texts):
    "Assert that no password is in `texts`, which may be bytes"
    for text in texts:
        text = text if isinstance(text, bytes) else str(text).encode()
        assert not [form for form in FORMS if form.encode() in text], text

def said(f, error):
    "What `f` says when it fails with `error`, the traceback included, in which no password is"
    with pytest.raises(error) as e: f()
    texts = str(e.value),repr(e.value),''.join(traceback.format_exception(e.value))
    check_secret(*texts)
    return texts[0]

@pytest.fixture(scope='module')
def locked(images):
    "A server with a password, on a port, and the images in it"
    with redis_server(port=-1, requirepass=PASSWORD) as server:
        to_redis(image_samples(images, label=class_of), server.url, 'pics', **ONE)
        yield server

def loaders(store, **options):
    return DataLoaders.from_store(store, item_tfms=Resize(32), **{'bs':8, 'num_workers':0, 'device':'cpu', **options})

@pytest.fixture
def learner(locked, tmp_path):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3*32*32, 3))
    return Learner(loaders(RedisStore(locked.url, 'pics')), model, CrossEntropyLossFlat(), path=tmp_path)

def test_no_error_shows_a_password(locked):
    "Wrong, unreachable, malformed: neither in its text nor in its traceback"
    at = f'@127.0.0.1:{locked.port}'
    for url in (f'redis://:{quote(WRONG, safe="")}{at}', f'redis://127.0.0.1:{locked.port}',
                f'redis://:{QUOTED}@127.0.0.1:1', f'redis://:{QUOTED}@nowhere.invalid'):
        said(partial(RedisStore, url, 'pics', timeout=.5), StoreUnavailable)
    for url in (f'redis://:{PASSWORD}{at}', f'redis://:{PASSWORD}@[::1', f'redis://u:{PASSWORD}@h:x',
                f'http://:{QUOTED}{at}', f'{PASSWORD}{at}', f'redis:/:{PASSWORD}{at}', f'{QUOTED}{at}'):
        said(partial(RedisStore, url, 'pics'), ValueError)
    said(partial(RedisStore, locked.url, 'nope'), StoreNotFound)
    said(partial(RedisStore(locked.url, 'pics').get_many, [0], 'nope'), UnknownField)

def test_nothing_that_is_shown_pickled_exported_or_stored_has_the_password(locked, learner, tmp_path):
    dls,store = learner.dls,RedisStore(locked.url, 'pics')
    learner.export('e.pkl')
    shown = store,store.link,locked,dls.train,dls.train_ds,dls.train_ds.items,store.manifest,store.opener()
    check_secret(*map(repr, shown), repr(RedisWriter(store.link, 'd').opener()), store._repr_html_(),
                 store.manifest.to_json(), *map(pickle.dumps, (store, dls.train_ds, dls)),
                 (tmp_path/'e.pkl').read_bytes())
    with zipfile.ZipFile(tmp_path/'e.pkl') as z: check_secret(*map(z.read, z.namelist()))
    c = redis.Redis.from_url(locked.url)
    check_secret(*map(c.get, c.keys('*meta')))

@pytest.mark.parametrize('num_workers', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_neither_the_report_of_an_ingest_nor_what_it_leaves_nor_its_failure_has_the_password(locked, num_workers):
    options = dict(num_workers=num_workers, progress=False)
    src = [{'bin':random.Random(i).randbytes(20_000)} for i in range(150)]
    report = to_redis([*src, {'bin':3}], locked.url, 'd', **options)
    assert (report.written,report.failed)==(150,1)
    check_secret(repr(report), report._repr_html_(), vars(report))
    c = redis.Redis.from_url(locked.url)
    c.config_set('maxmemory', c.info('memory')['used_memory']+900_000)
    said(lambda: to_redis(src, locked.url, 'e', **options), StoreFull)
    c.config_set('maxmemory', 0)
    check_secret(c.get('e:ingest'))
    for name in 'de': RedisStore.delete(locked.url, name)
    said(lambda: to_redis([{'bin':3}]*20, locked.url, 'f', **options), IngestError)

READS = '''
import multiprocessing, sys
from fastai_remote import RedisStore
def read(store, queue): queue.put(store.get_many([0], 'txt')['txt'][0])
if __name__=='__main__':
    for how in sys.argv[2:]:
        ctx,store = multiprocessing.get_context(how),RedisStore(sys.argv[1], 'd')
        process = ctx.Process(target=read, args=(store, queue:=ctx.Queue()))
        process.start()
        print(how, queue.get(timeout=250).decode())
        process.join()
'''

@pytest.mark.slow
def test_workers_are_let_in_and_read_from_the_server_of_their_parent_however_they_are_started(locked, fresh, tmp_path):
    "A URL in the environment is for exports that are loaded"
    for server,word in (locked,'mine'),(fresh,'other'): to_redis([{'txt':word}], server.url, 'd', **ONE, overwrite=True)
    (script:=tmp_path/'reads.py').write_text(READS)
    run = subprocess.run([sys.executable, script, locked.url, 'fork', 'spawn', 'forkserver'], capture_output=True,
                         text=True, timeout=500, env={**os.environ, 'FASTAI_REMOTE_URL':fresh.url})
    assert run.stdout=='fork mine\nspawn mine\nforkserver mine\n', run.stdout+run.stderr

@pytest.mark.parametrize('variable', ['FASTAI_REMOTE_URL','REDIS_URL'])
def test_what_was_pickled_or_exported_asks_the_environment_for_its_password(locked, learner, monkeypatch, variable):
    for name in 'FASTAI_REMOTE_URL','REDIS_URL': monkeypatch.delenv(name, raising=False)
    store = RedisStore(locked.url, 'pics')
    learner.export('e.pkl')
    pickled,expected = pickle.dumps(store),store[3]['cls']
    assert 'set FASTAI_REMOTE_URL or REDIS_URL' in said(lambda: pickle.loads(pickled)[0], StoreUnavailable)
    monkeypatch.setenv(variable, locked.url)
    assert pickle.loads(pickled)[3]['cls']==expected
    assert load_learner(learner.path/'e.pkl').predict(3)[0] in store.vocab
    again = pickle.dumps(pickle.loads(pickled))
    check_secret(again)
    assert len(pickle.loads(again))==N

@pytest.fixture(scope='module')
def certificate(tmp_path_factory):
    "A self-signed certificate for 127.0.0.1, and its key"
    if not shutil.which('openssl'): pytest.skip('no openssl to make a certificate with')
    d = tmp_path_factory.mktemp('certificate')
    options = '-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost -addext'
    subprocess.run(['openssl', 'req', *options.split(), 'subjectAltName=IP:127.0.0.1,DNS:localhost', '-keyout', d/'key',
                    '-out', d/'crt'], check=True, capture_output=True)
    return d/'crt',d/'key'

def test_tls(locked, certificate):
    "Through a proxy that ends it, for many servers are built without. A certificate that is not trusted is named"
    trusted = dict(ssl_ca_certs=str(certificate[0]))
    with FaultProxy(str(locked.socket), cert=certificate) as proxy:
        url = f'rediss://:{QUOTED}@127.0.0.1:{proxy.port}'
        dls = loaders(RedisStore(url, 'pics', **trusted), num_workers=1)
        assert sum(len(y) for _,y in dls.valid)==12
        assert to_redis([{'id':i} for i in range(40)], url, 'tls', **ONE, **trusted).written==40
        text = said(lambda: RedisStore(url, 'pics'), StoreUnavailable)
        assert 'certificate verify failed' in text and '(1 attempt ' in text
