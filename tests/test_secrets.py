"Secrets are only used: each option of each library gets a marker, which is searched wherever it could show"
import base64, copy, inspect, json, logging, pickle, random, socket, threading, traceback
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest
pytest.importorskip('s3fs')
import aiohttp
import redis
from aiobotocore.config import AioConfig
from fastai.data.core import DataLoaders
from fastai.learner import Learner, load_learner
from fastai.losses import MSELossFlat
from fsspec.implementations.ftp import FTPFileSystem
from fsspec.implementations.http import HTTPFileSystem
from hypothesis import assume, example, given, strategies as st
from s3fs import S3FileSystem
from torch import nn

import fastai_remote.block
from conftest import examples, private_server
from fastai_remote import (array_samples, csv_samples, drawing_samples, image_samples, img2dataset_samples,
    index_shards, RedisStore, s3_options, ShardStore, StoreFull, StoreUnavailable, table_samples, tar_samples, to_redis,
    to_shards)
from fastai_remote.cli.command import read_storage_options
from fastai_remote.cli.terminal import UsageError
from fastai_remote.ingest.copy import copy_store
from fastai_remote.source.datasets import as_source
from fastai_remote.store.connection import (
    hidden_names, public_options, public_url, Secret, secret_texts, SecretOptions, without_secrets)
from fastai_remote.store.redis_link import RedisLink, split_secret
from fastai_remote.store.storage import Storage
from shard_helpers import in_worker, ONE
from webserver import files_of, WebServer

pytestmark = pytest.mark.usefixtures('nobody')
MARKER = 'secret-8f2c'
LOGIN = base64.b64encode(f'me:{MARKER}'.encode())
FORMS = MARKER.encode(), LOGIN, base64.b64encode(f'{MARKER}:'.encode())

class Holder:
    "An object whose state has the marker; its methods fail, as those of a wrong object would"
    def __init__(self): self.password = MARKER
    def __repr__(self): return f'Holder({self.password})'

class Provider(redis.CredentialProvider):
    def get_credentials(self): return 'default',MARKER
    def __repr__(self): return f'Provider({MARKER})'

VALUES = {'str':MARKER, 'bytes':MARKER.encode(), 'dict':{'name':MARKER, 'endpoint_url':f'https://me:{MARKER}@host'},
          'list':[MARKER], 'object':Holder()}

def names_of(*functions, more=('new_option',), prefix=''):
    "The arguments of these functions"
    parameters = [p for f in functions for p in inspect.signature(f).parameters.values()]
    names = {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return [prefix+name for name in (*sorted(names-{'self','method','url','str_or_url','kwargs','new_option'}), *more)]

CLIENT = 'aws_access_key_id','aws_secret_access_key','aws_session_token','config','verify','endpoint_url','region_name'
S3 = [*names_of(S3FileSystem.__init__), *(f'client_kwargs.{name}' for name in CLIENT),
      *names_of(AioConfig.__init__, more=AioConfig.OPTION_DEFAULTS, prefix='config_kwargs.')]
HTTP = [*names_of(HTTPFileSystem.__init__, aiohttp.ClientSession._request),
        *names_of(aiohttp.ClientSession.__init__, more=(), prefix='client_kwargs.')]
PLACES = {'s3':('s3://bucket/folder', S3), 'http':('http://127.0.0.1:9/folder', HTTP),
          'ftp':('ftp://127.0.0.1/folder', names_of(FTPFileSystem.__init__))}
REDIS = names_of(redis.Redis.__init__, redis.Connection.__init__, redis.SSLConnection.__init__,
                 redis.connection.AbstractConnection.__init__, more=())

def option(name, value):
    "`{name: value}`; a name with a dot is that of a nested option"
    first,_,rest = name.partition('.')
    return {first:option(rest, value) if rest else value}

def is_allowed(name, value):
    options = option(name, value)
    return isinstance(value, str) and public_options(options) and not secret_texts(options)

def has_marker(*texts):
    encoded = [text if isinstance(text, bytes) else str(text).encode(errors='replace') for text in texts]
    return any(form in text for text in encoded for form in FORMS)

def shown_by(error):
    "All that a traceback with local variables shows, except for the variables of this file"
    texts,seen = [],[traceback.TracebackException.from_exception(error, capture_locals=True)]
    while seen:
        shown = seen.pop()
        texts += [*shown.format_exception_only(), *(str(o.locals) for o in shown.stack if o.filename!=__file__)]
        seen += [e for e in (shown.__cause__, shown.__context__) if e]
    while error is not None:
        texts += [str(error), repr(error), repr(vars(error)), repr(error.args)]
        error = error.__cause__ or error.__context__
    return texts

def shown_when_failing(f):
    try: f()
    except Exception as e: return shown_by(e)
    return []

def is_silent_failure(f):
    "Does `f` raise an error that does not show the marker?"
    shown = shown_when_failing(f)
    return shown and not has_marker(*shown)

# --- what is shown and saved

@pytest.mark.parametrize('place', PLACES)
def test_no_option_of_a_file_system_is_shown_or_saved(place):
    url,names = PLACES[place]
    assert len(names)>8
    for name,(kind,value) in ((name, o) for name in names for o in VALUES.items() if not is_allowed(name, o[1])):
        options = option(name, value)
        storage,given = Storage(url, storage_options=options),s3_options(url, **options)
        loaded = pickle.loads(pickle.dumps(storage))
        for one in (storage, loaded, copy.deepcopy(storage), storage.opener(), loaded.opener()):
            assert not has_marker(repr(one), repr(vars(one))), name
        for one in (storage, loaded): assert not has_marker(repr(one.reveal()), repr(one.opener().state)), name
        assert not has_marker(repr(given), *map(pickle.dumps, (storage, loaded, given))), name
        if kind!='object': assert pickle.loads(pickle.dumps(storage.opener()))().reveal()==storage.reveal()
        assert storage.reveal()['storage_options']==options   # a worker gets all
        lost = hidden_names(options)
        assert lost and loaded._not_kept==sorted(lost) and all(text in loaded._advice() for text in lost)

def test_no_option_of_redis_is_shown_or_saved():
    assert len(REDIS)>40
    for name in REDIS:
        if 'password' in name:
            assert is_silent_failure(lambda: RedisLink('redis://localhost:1', **{name:MARKER}))
            continue
        for value in VALUES.values():
            if is_allowed(name, value) or name in ('retry','timeout','socket_timeout','decode_responses'): continue
            link = RedisLink('redis://localhost:1', **{name:value})
            loaded = pickle.loads(pickle.dumps(link))
            for one in (link, loaded, link.opener()): assert not has_marker(repr(one), repr(vars(one))), name
            assert not has_marker(repr(link.reveal()), pickle.dumps(link), pickle.dumps(loaded)), name
            assert link.reveal()[name]==value and loaded._not_kept==[name] and name in loaded.advice

def test_harmless_options_are_kept():
    options = dict(endpoint_url='http://host:9000', anon=True, use_ssl=False, profile='someone',
                   client_kwargs={'region_name':'eu', 'verify':False},
                   config_kwargs={'s3':{'addressing_style':'path'}, 'read_timeout':3})
    assert public_options(options)==options and not hidden_names(options)
    storage = pickle.loads(pickle.dumps(Storage('s3://b/f', storage_options=options)))
    assert storage.reveal()['storage_options']==options
    options = dict(db=3, socket_timeout=1.5, ssl_cert_reqs='none', ssl_ca_certs='/etc/ca.pem', health_check_interval=7)
    assert pickle.loads(pickle.dumps(RedisLink('rediss://host', **options))).reveal().items()>=options.items()

URLS = ['https://{}@host/a', 'http://host/a?sig={}', 'http://host/a#{}', 'sftp://me:{}@host/a', 'HTTPS://me:{}@host',
        'simplecache::https://host/a?sig={}&b=1', 'blockcache::simplecache::ftp://me:{}@host/a', 'webdav://host/a?{}',
        'http://me:{}@[::1]/host', 'simplecache::http://[::1]/host?sig={}']

def test_urls_are_shown_and_saved_without_secrets():
    for url in (url.format(MARKER) for url in URLS):
        storage = Storage(url)
        nested = Storage('s3://b/f', storage_options={'endpoint_url':url})
        shown = [repr(o) for o in (storage, vars(storage), storage.opener(), s3_options(url), nested)]
        assert not has_marker(public_url(url), storage.url, storage.name, pickle.dumps(storage), *shown), url
        assert has_marker(*storage._secret_texts()) and 'host' in storage.url
        assert pickle.loads(pickle.dumps(storage.opener()))().reveal()==storage.reveal()
        assert pickle.loads(pickle.dumps(storage))._not_kept

def test_malformed_urls_are_not_repeated():
    for url in (f'https://me:{MARKER}/x@host/a', f'ftp://me:{MARKER}#@host/a', f'redis://me:{MARKER}/x@host',
                f'redis://host?ssl_password={MARKER}', f'ftp://me:a::{MARKER}@host/a', f's3://me:{MARKER}::b@host/a'):
        for f in (lambda: Storage(url), lambda: ShardStore(url), lambda: RedisStore(url, 'pets'),
                  lambda: to_redis([], url, 'pets'), lambda: to_shards([], url)):
            assert not has_marker(*shown_when_failing(f)), url

PLACES_OF_PASSWORDS = ['redis://user:{}@host/0', 'redis://:{}@host:1,other:2', 'rediss://:{}@[::1]:3/0',
    'unix://user:{}@/tmp/s', 'redis+sentinel://:{}@host:1,other/pets/0', 'redis://host/0?password={}',
    'unix:///tmp/s?db=0&password={}', 'redis://user@host?password={}&db=1']
malformed = st.text(st.sampled_from([*':/?#@&=%[];,.+ 017x', '\udcff', '\u212a', '\n']), max_size=4)

@examples(200)
@example('unix://user:{}@/tmp/s', '12/', '')
@example('unix://:{}@/tmp/s', 'a@?x', '')
@example('redis://host/0?password={}', 'a&', '')
@example('redis://user:{}@host/0', '', '\udcff')
@given(st.sampled_from(PLACES_OF_PASSWORDS), malformed, malformed)
def test_no_url_of_redis_shows_its_password_however_it_was_quoted(place, before, after):
    # the password ends before an @ and a slash, and all beyond is the path of a socket
    assume(not ('@/tmp' in place and '@/' in f'{before}{MARKER}{after}'))
    url = place.format(f'{before}{MARKER}{after}')
    try: shown,_ = split_secret(url)
    except ValueError as e:
        assert type(e) is ValueError and not has_marker(*shown_by(e))
        shown = ''
    assert not has_marker(shown, *shown_when_failing(lambda: RedisLink(url)))
    if shown: assert not has_marker(pickle.dumps(RedisLink(url)))

def test_a_url_that_would_be_guessed_is_refused():
    "Another password, socket or server would be used than the one that was meant"
    for what,urls in {
            'unix:///': ['unix://user:12/ss@/tmp/s', 'unix://tmp/s', 'unix://:pw@', 'unix://:a@?x@/tmp/s'],
            'UTF-8': ['redis://host/0?client_name=\udcff', 'redis://:%ff@host', 'redis://host?password=%ff'],
            'must be quoted': ['unix:///tmp/s#1', 'redis://host?password=a#b', 'redis://host?password=a&b']}.items():
        for url in urls:
            with pytest.raises(ValueError, match=what) as failed: RedisLink(url)
            assert type(failed.value) is ValueError

# --- messages

def test_refusals_of_the_web_do_not_repeat_secrets(caplog):
    "The server repeats what it was asked, in its refusals"
    for name in '','botocore','aiobotocore':   # the latter log tokens at level DEBUG, as their documentation says
        caplog.set_level(logging.INFO if name else logging.DEBUG, name or None)
    statuses = iter([401,403,404,400,418,500,302,403])
    def answer(handler):
        said = [handler.headers.get(name) for name in ('Authorization','Cookie','X-Key')]
        return answer.status,f'no {handler.path} {said}',b''
    with WebServer(answer) as server:
        host = server.url.removeprefix('http://')
        keys = dict(endpoint_url=server.url, key='me', secret=MARKER, token=MARKER)
        for url,options in (
                (f'http://me:{MARKER}@{host}/a', {}), (f'http://{MARKER}@{host}/a', {}),
                (f'http://{host}/a?sig={MARKER}', {}), (f'http://{host}/a', dict(headers={'X-Key':MARKER})),
                (f'http://{host}/a', dict(cookies={'k':MARKER})), ('s3://bucket/a', keys),
                (f'http://{host}/a', dict(client_kwargs={'auth':aiohttp.BasicAuth('me', MARKER)})),
                (f'simplecache::http://me:{MARKER}@{host}/a?sig={MARKER}', {})):
            kwargs,answer.status = dict(timeout=.05, storage_options=options),next(statuses)
            for f in (lambda: ShardStore(url, **kwargs), lambda: Storage(url, **kwargs).ranges(['a'], [5], [9]),
                      lambda: to_shards([{'txt':'a'}], url, **ONE, **kwargs),
                      lambda: index_shards(url, **ONE, **kwargs)):
                assert not has_marker(*shown_when_failing(f)), url
        assert any(has_marker(*seen) for seen in server.seen) and not has_marker(caplog.text)
        answer.status = 403
        with pytest.raises(StoreUnavailable, match='refused.*1 attempt'): Storage(f'{server.url}/a', 5).read('x')

@pytest.mark.parametrize('place', ['s3', 'http', 'ftp'])
def test_errors_of_unusual_options_do_not_repeat_them(place):
    "Libraries quote options of a wrong type, and options that do not exist"
    url,names = PLACES[place]
    # most of the configuration of S3 is left out: each takes a tenth of a second
    names = [name for name in names if not name.startswith('config_kwargs.') or 'prox' in name]
    n_failed = 0
    for name in names:
        is_dict = name.endswith(('kwargs','headers','cookies','proxies','cert'))
        value = VALUES['dict' if is_dict else 'object' if name in ('session','get_client') else 'str']
        if is_allowed(name, value) or name in ('loop','asynchronous','client_kwargs.loop'): continue
        options = option(name, value)
        if place=='s3' and not name.endswith('endpoint_url'):
            options = {'key':'me', 'secret':'k', 'endpoint_url':'http://127.0.0.1:9', **options}
        assert is_silent_failure(lambda: ShardStore(url, timeout=.01, storage_options=options)), name
        n_failed += 1
    assert n_failed>=(4 if place=='ftp' else 10)

@contextmanager
def rude_server(says):
    "Speaks Redis, and answers each command with an error that repeats it; yields the port"
    server = socket.create_server(('127.0.0.1', 0))
    def serve():
        while True:
            try: connection,_ = server.accept()
            except OSError: return
            asked = connection.recv(10_000).replace(b'\r\n', b' ')
            connection.sendall(f'-{says} '.encode()+asked+b'\r\n')
            connection.close()
    threading.Thread(target=serve, daemon=True).start()
    with server: yield server.getsockname()[1]

def test_errors_of_redis_do_not_repeat_secrets():
    with rude_server('WRONGPASS') as port:
        address = f'redis://127.0.0.1:{port}'
        for url,options in ((f'redis://me:{MARKER}@127.0.0.1:{port}', {}), (f'redis://:{MARKER}@127.0.0.1:1', {}),
                            (address, dict(username=MARKER, secret=MARKER)),
                            (address, dict(credential_provider=Provider()))):
            kwargs = dict(timeout=.03, **options)
            for f in (lambda: RedisStore(url, 'pets', **kwargs), lambda: RedisStore.names(url, **kwargs),
                      lambda: to_redis([{'txt':'a'}], url, 'pets', progress=False, **kwargs),
                      lambda: RedisStore.delete(RedisLink(url, **kwargs), 'pets'),
                      lambda: RedisStore.from_keys(url, 'x:{}', n=3, **kwargs).get_many([0]),
                      *([lambda: DataLoaders.from_redis(url, 'pets', timeout=.03)] if not options else [])):
                assert is_silent_failure(f)
    for says in ('ERR unknown command', 'OOM command not allowed', 'NOPERM no permissions', 'BUSY', 'NOAUTH',
                 'MOVED 1 127.0.0.1:1', 'EXECABORT'):
        with rude_server(f'{says}, with args beginning with:') as port:
            link = RedisLink(f'redis://127.0.0.1:{port}', timeout=.1, secret=MARKER)
            assert is_silent_failure(lambda: link.send([('GET','a')])), says
            assert is_silent_failure(lambda: link.call(lambda client: client.ping())), says

@pytest.mark.slow
def test_errors_of_unusual_options_of_redis_do_not_repeat_them():
    with rude_server('WRONGPASS') as port:
        for name in REDIS:
            value = Provider() if name=='credential_provider' else MARKER
            if 'password' in name or is_allowed(name, value) or name in ('retry','timeout','socket_timeout'): continue
            def fails(): return RedisStore(f'redis://127.0.0.1:{port}', 'pets', timeout=.02, **{name:value})
            assert not has_marker(*shown_when_failing(fails)), name

def test_hidden_secrets_do_not_make_messages_unreadable():
    "Neither short ones nor one that is part of the address, which stays as it is"
    for url,address in (('redis://:e@127.0.0.1:1','127.0.0.1:1'), ('redis://:localhost@localhost:1','localhost:1')):
        with pytest.raises(StoreUnavailable, match=rf'redis://{address}: ConnectionError: .*\(\d+ attempts? in'):
            RedisStore(url, 'pets', timeout=.1)
    error = without_secrets(ValueError('the letter e of the password e'), secret_texts({'password':'e'}))
    assert str(error)=='the letter *** of the password ***'

def test_errors_keep_their_type_and_cause():
    error = KeyError('a')
    assert without_secrets(error, [MARKER]) is error and error.__traceback__ is None
    error = FileNotFoundError(2, f'no {MARKER}')
    error.__cause__ = ValueError(MARKER)
    safe = without_secrets(error, [MARKER])
    assert type(safe) is FileNotFoundError and type(safe.__cause__) is ValueError and not has_marker(*shown_by(safe))

def test_errors_that_cannot_be_looked_at_are_replaced():
    "What they show is not known, so that it may be a secret"
    class Odd(Exception):
        def __repr__(self): raise RuntimeError(MARKER)
    class Silent(Odd):
        def __str__(self): raise RuntimeError(MARKER)
    for error in (Odd(f'password {MARKER}'), Silent(f'password {MARKER}')):
        safe = without_secrets(error, [MARKER])
        assert safe is not error and not has_marker(str(safe), repr(safe), repr(safe.args))

def test_causes_in_a_circle_are_an_end():
    first,second,third = ValueError('a'),KeyError(MARKER),OSError('b')
    first.__cause__,second.__cause__,third.__cause__ = second,third,second
    safe = without_secrets(first, [MARKER])
    assert safe is first and type(safe.__cause__) is KeyError and not has_marker(*shown_by(safe))
    assert safe.__cause__.__cause__ is third and third.__cause__ is None

def test_errors_of_a_group_have_causes_of_their_own():
    member = ValueError(f'no connection for {MARKER}')
    member.__cause__ = KeyError(MARKER)
    group = ExceptionGroup('tasks failed', [member, ExceptionGroup('more', [TypeError('odd')])])
    group.__cause__ = OSError('the network')
    text = ''.join(traceback.format_exception(without_secrets(group, [MARKER])))
    assert MARKER not in text
    for part in 'tasks failed','no connection for ***','odd','the network': assert part in text, part

# --- what is used, kept, and lost

N = 20

SAMPLES = [{'txt':f'number {i}', 'cls':'ab'[i%2]} for i in range(N)]

@pytest.fixture(params=['signature','login','redis'])
def url(request, tmp_path):
    "Of a dataset on a web server that wants a signature in the query, or a password, or in Redis"
    if request.param=='redis':
        with private_server(port=-1, requirepass=MARKER) as server:
            to_redis(SAMPLES, server.url, 'pets', shuffle=False, **ONE)
            yield server.url
        return
    to_shards(SAMPLES, tmp_path/'pets', chunk=5, maxcount=5, shuffle=False, **ONE)
    def answer(handler):
        query,login = handler.path.partition('?')[2],handler.headers.get('Authorization')
        is_right = query==f'sig={MARKER}' or login==f'Basic {LOGIN.decode()}'
        return files_of(tmp_path)(handler) if is_right else (403, None, b'')
    with WebServer(answer) as server:
        urls = dict(signature=f'{server.url}/pets?sig={MARKER}', login=f'http://me:{MARKER}@{server.url[7:]}/pets')
        yield urls[request.param]

def opened(url): return RedisStore(url, 'pets') if url[:5]=='redis' else ShardStore(url, timeout=5, cache=None)

def is_right(store):
    return store.get_many(range(N), 'txt', decode=True)['txt']==[f'number {i}' for i in range(N)]

def contents(url, *folders):
    "All that is in these folders, and in Redis"
    found = [f.read_bytes() for folder in folders for f in folder.rglob('*') if f.is_file()]
    if url[:5]!='redis': return found
    client = redis.Redis.from_url(url)
    return found+[client.dump(key) for key in client.keys()]

def test_secrets_of_urls_are_used_and_not_kept(url, tmp_path, monkeypatch, caplog):
    "What was pickled or exported asks the environment for them"
    caplog.set_level(logging.DEBUG)
    store = opened(url)
    assert is_right(store)
    dls = DataLoaders.from_store(store, x='cls', y='cls', bs=4, num_workers=0, valid_pct=.5)
    Learner(dls, nn.Linear(1, 1), MSELossFlat(), path=tmp_path).export('e.pkl')
    report = copy_store(store, tmp_path/'copied', **ONE)
    if url[:4]=='http': assert is_right(ShardStore(url, timeout=5))   # with a cache
    exported = (tmp_path/'e.pkl').read_bytes()
    saved = [*map(pickle.dumps, (store, dls.train_ds, dls)), store.manifest.to_json(), exported]
    assert not has_marker(*saved, *contents(url, tmp_path/'usual', tmp_path/'copied'))
    shown = store, vars(store), store.opener(), dls.train, dls.train_ds.items, report
    assert not has_marker(*map(repr, shown), store._repr_html_(), report._repr_html_(), caplog.text)
    assert is_silent_failure(lambda: store.get_many([0], 'nope'))
    loaded = pickle.loads(pickle.dumps(store))
    with pytest.raises(StoreUnavailable, match='not kept in exports.*(URL|auth)'): is_right(loaded)
    monkeypatch.setenv('FASTAI_REMOTE_URL', url)
    assert is_right(pickle.loads(pickle.dumps(store))) and is_right(pickle.loads(pickle.dumps(loaded)))
    assert load_learner(tmp_path/'e.pkl').dls.test_dl([3]).one_batch()[0].tolist()==[1]

@pytest.mark.parametrize('url,method', [
    ('redis','fork'), ('signature','fork'), pytest.param('redis', 'spawn', marks=pytest.mark.slow)], indirect=['url'])
def test_workers_get_secrets_neither_as_arguments_nor_in_their_environment(url, method, monkeypatch):
    "They read from the server of their parent: a URL in the environment is for exports that are loaded"
    monkeypatch.setenv('FASTAI_REMOTE_URL', 'redis://127.0.0.1:1')
    with ProcessPoolExecutor(1, get_context(method)) as workers:
        texts,*shown = workers.submit(in_worker, opened(url).opener()).result()
    assert texts==[o['txt'] for o in SAMPLES] and not has_marker(*shown)

def test_reports_and_failures_of_ingests_have_no_password():
    source = [{'bin':random.Random(i).randbytes(20_000)} for i in range(150)]
    with private_server(port=-1, requirepass=MARKER) as server:
        report = to_redis([*source, {'bin':3}], server.url, 'd', **ONE)
        assert (report.written,report.failed)==(150,1)
        assert not has_marker(repr(report), report._repr_html_(), vars(report))
        client = redis.Redis.from_url(server.url)
        client.config_set('maxmemory', client.info('memory')['used_memory']+900_000)
        with pytest.raises(StoreFull) as e: to_redis(source, server.url, 'e', **ONE)
        client.config_set('maxmemory', 0)
        assert not has_marker(*shown_by(e.value), client.get('e:ingest'))

def test_sources_of_files_do_not_repeat_secrets_of_urls(tmp_path):
    "They read files of this computer, and say so"
    makers = {'tar':tar_samples, 'csv':csv_samples, 'jpg':image_samples, 'npy':array_samples, 'zip':img2dataset_samples,
              'ndjson':drawing_samples, 'feather':table_samples, 'parquet':table_samples, '':as_source, 'png':as_source}
    for suffix,make in makers.items():
        for url in (f'https://me:a/{MARKER}@127.0.0.1:1/x.{suffix}', f's3://{MARKER}@127.0.0.1:1/x.{suffix}',
                    f'simplecache::https://127.0.0.1:1/x.{suffix}?sig={MARKER}'):
            if url[:2]=='s3' and make is table_samples: continue   # pyarrow would look for the bucket
            # a list may be values
            for place in (url,) if make in (array_samples,as_source) else (url, Path(url), [url]):
                with pytest.raises((ValueError,TypeError,OSError)) as e: make(place)
                shown = str(e.value),repr(e.value),''.join(traceback.format_exception(e.value))
                assert not has_marker(*shown), (make, place)
    with pytest.raises(FileNotFoundError, match='^https://host/a.tar: an address: only files of this computer'):
        tar_samples(f'https://me:{MARKER}@host/a.tar?sig={MARKER}')
    (tmp_path/'https:').mkdir()
    (tmp_path/'https:'/'a.csv').write_text('a\n1\n')
    assert len(csv_samples(f'{tmp_path}/https://a.csv').files)==1

@pytest.mark.parametrize('is_same,pairs', [
    (True, [('webhdfs://safe:1/x','webhdfs://safe:1/y'), ('sftp://me@Host/x','sftp://host/y'),
            ('s3://one/x','s3://two/y'), ('gs://one/x','gs://two/y'),
            ('simplecache::https://safe/x','filecache::https://safe/y'), ('/data/x','webhdfs://there/x'),
            ('http://me:pw@host:1/x','http://host:1/other')]),
    (False, [('webhdfs://safe:1/x','webhdfs://evil:2/y'), ('abfs://data@safe.net/x','abfs://data@evil.net/x'),
             ('one://a@safe/x','one://b@safe/x'), ('sftp://host:22/x','sftp://host:23/x'),
             ('s3://one/x','https://one/x'), ('simplecache::https://safe/x','simplecache::https://evil/x'),
             ('zip://a::https://safe/x.zip','zip://a::https://evil/x.zip'), ('http://me:pw@host/x','http://evil/x')])])
def test_secrets_go_to_the_same_host_only(is_same, pairs):
    for url,other in pairs:
        storage = Storage(url, storage_options={'password':MARKER})
        assert storage.beside(other).reveal()['storage_options']==(
            storage.reveal()['storage_options'] if is_same else {}), (url, other)

def test_a_credential_provider_is_used_and_not_kept(monkeypatch):
    with private_server(requirepass=MARKER) as server:
        to_redis([{'txt':'a'}], server.url, 'pets', **ONE)
        store = RedisStore(public_url(server.url), 'pets', credential_provider=Provider())
        assert store[0]=={'txt':'a'}
        saved = pickle.dumps(store)
        assert not has_marker(saved, repr(store), repr(vars(store.link)))
        with pytest.raises(StoreUnavailable, match='credential_provider'): pickle.loads(saved)[0]
        monkeypatch.setenv('REDIS_URL', server.url)
        assert pickle.loads(saved)[0]=={'txt':'a'}

def test_secret_texts_and_dicts():
    assert repr(Secret(MARKER))=="'***'" and f'{Secret(MARKER)}'==MARKER
    assert pickle.loads(pickle.dumps(Secret(MARKER)))==MARKER
    options = SecretOptions(key=MARKER, anon=True, client_kwargs={'region_name':'eu', 'new':MARKER})
    assert eval(repr(options))=={'key':'***', 'anon':True, 'client_kwargs':{'region_name':'eu'}}
    assert pickle.loads(pickle.dumps(options))==options
    for encoding in ('utf-8','latin-1'):   # the header of HTTP has a login as Latin-1
        assert base64.b64encode('mé:pä'.encode(encoding)).decode() in secret_texts({'auth':('mé','pä')})
    assert 'a:\udcff' in secret_texts({'secret':'a:\udcff'})

def test_an_option_whose_url_is_kept_without_its_login_is_named():
    for url in (f'https://me:{MARKER}@host', f'https://{MARKER}@host', f'https://host/?sig={MARKER}'):
        options = dict(endpoint_url=url, client_kwargs={'endpoint_url':url, 'region_name':'eu'})
        assert hidden_names(options)==['endpoint_url','client_kwargs.endpoint_url']
        loaded = pickle.loads(pickle.dumps(Storage('s3://b/f', storage_options=options)))
        assert loaded._not_kept==sorted(hidden_names(options))
        assert not has_marker(repr(SecretOptions(options))) and 'host' in repr(SecretOptions(options))
        with pytest.raises(UsageError, match='endpoint_url may be secret'):
            read_storage_options(json.dumps({'endpoint_url':url}))

def test_secrets_that_are_numbers_are_not_shown():
    assert secret_texts({'secret':123456, 'token':{'pin':9999}, 'a':[77777]})==['123456','77777','9999']
    assert not secret_texts({'secret':123, 'flag':True, 'other':None, 'half':1234.5, 'new':-12, 'tries':2.5})
    assert not secret_texts({'connect_timeout':123456})   # public
    safe = without_secrets(ValueError('no 123456 or 1234567'), secret_texts({'secret':123456}))
    assert str(safe)=='no *** or ***7'

def test_two_colons_in_a_password_or_an_address_do_not_end_a_url():
    for url in (f'redis://:a::{MARKER}@host', f'ftp://me:{MARKER}::b@host/a', f'redis://[::1]:6379/2?other={MARKER}'):
        assert not has_marker(public_url(url)) and has_marker(*secret_texts({}, url))
    assert public_url('zip://a.csv::simplecache::s3://bucket/b@c')=='zip://a.csv::simplecache::s3://bucket/b@c'
    assert not has_marker(repr(RedisLink(f'redis://:a::{MARKER}@[::1]:6379/2')))

def test_the_url_of_the_environment_is_as_secret_as_one_that_is_given(monkeypatch):
    link,storage = pickle.dumps(RedisLink('redis://host')),pickle.dumps(Storage('https://host/a'))
    monkeypatch.setenv('FASTAI_REMOTE_URL', f'redis://there:1/2?username={MARKER}&socket_timeout=3')
    there = pickle.loads(link)
    assert there.url=='redis://there:1/2?socket_timeout=3' and there.reveal()['username']==MARKER
    assert not has_marker(repr(there), repr(vars(there)))
    for url,saved in ((f'redis://me:{MARKER}/x@host', link), (f'https://me:{MARKER}/x@host', storage)):
        monkeypatch.setenv('FASTAI_REMOTE_URL', url)
        with pytest.raises(ValueError, match='must be quoted') as failed: pickle.loads(saved)
        assert not has_marker(str(failed.value))
