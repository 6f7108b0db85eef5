"Secrets are used, and nothing else: each option of each library gets a marker, which is searched wherever it could show"
import base64, copy, http.server, inspect, io, json, logging, os, pickle, socket, threading, traceback
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest
pytest.importorskip('s3fs')
import aiohttp
import redis
from aiobotocore.config import AioConfig
from fsspec.implementations.ftp import FTPFileSystem
from fsspec.implementations.http import HTTPFileSystem
from hypothesis import assume, example, given, strategies as st
from s3fs import S3FileSystem

import fastai_remote.block
from conftest import examples
from fastai_remote import (array_samples, csv_samples, drawing_samples, image_samples, img2dataset_samples, RedisStore, s3_options,
    ShardStore, StoreUnavailable, table_samples, tar_samples, to_redis, to_shards)
from fastai_remote.cli.places import read_options, UsageError
from fastai_remote.source.datasets import as_source
from fastai_remote.store.address import hidden_names, public_options, public_url, Secret, secret_texts, SecretOptions, without_secrets
from fastai_remote.store.redis_link import RedisLink, split_secret
from fastai_remote.store.server import redis_server
from fastai_remote.store.storage import Storage
from test_storage_limits import head, Server

MARKER = 'secret-8f2c'
FORMS = [form.encode() for form in (MARKER, base64.b64encode(f'me:{MARKER}'.encode()).decode(), base64.b64encode(f'{MARKER}:'.encode()).decode())]

class Holder:
    "An object whose state has the marker; its methods fail, as those of a wrong object would"
    def __init__(self): self.password = MARKER
    def __repr__(self): return f'Holder({self.password})'

VALUES = {'str':MARKER, 'bytes':MARKER.encode(), 'dict':{'name':MARKER, 'endpoint_url':f'https://me:{MARKER}@host'}, 'list':[MARKER], 'object':Holder()}

def names_of(*functions):
    names = {name for f in functions for name,p in inspect.signature(f).parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return sorted(names-{'self','method','url','str_or_url','new_option','kwargs'})

S3 = [*names_of(S3FileSystem.__init__), *(f'client_kwargs.{name}' for name in ('aws_access_key_id','aws_secret_access_key','aws_session_token','config','verify','endpoint_url','region_name')),
    *(f'config_kwargs.{name}' for name in (*names_of(AioConfig.__init__), *AioConfig.OPTION_DEFAULTS)), 'new_option']
HTTP = [*names_of(HTTPFileSystem.__init__, aiohttp.ClientSession._request), *(f'client_kwargs.{name}' for name in names_of(aiohttp.ClientSession.__init__)), 'new_option']
FTP = [*names_of(FTPFileSystem.__init__), 'new_option']
REDIS = names_of(redis.Redis.__init__, redis.Connection.__init__, redis.SSLConnection.__init__, redis.connection.AbstractConnection.__init__)

def option(name, value):
    "`{name: value}`; a name with a dot is that of a nested option"
    first,_,rest = name.partition('.')
    return {first:option(rest, value) if rest else value}

def is_allowed(name, value): return isinstance(value, str) and public_options(option(name, value)) and not secret_texts(option(name, value))

def has_marker(*texts): return [text for text in texts if any(form in (text if isinstance(text, bytes) else str(text).encode()) for form in FORMS)]

def shown_by(error):
    "All that a traceback with local variables shows, except for the variables of this file"
    texts,seen = [],[traceback.TracebackException.from_exception(error, capture_locals=True)]
    while seen:
        shown = seen.pop()
        texts += [*shown.format_exception_only(), *(str(frame.locals) for frame in shown.stack if frame.filename!=__file__)]
        seen += [e for e in (shown.__cause__, shown.__context__) if e]
    while error is not None: texts,error = [*texts, str(error), repr(error), repr(vars(error)), repr(error.args)],error.__cause__ or error.__context__
    return texts

def shown_when_failing(f):
    try: f()
    except Exception as e: return shown_by(e)
    return []

PLACES = {'s3':('s3://bucket/folder', S3), 'http':('http://127.0.0.1:9/folder', HTTP), 'ftp':('ftp://127.0.0.1/folder', FTP)}

@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    for k in [k for k in os.environ if k.startswith(('AWS_','FASTAI_REMOTE_','XDG_','REDIS_'))]: monkeypatch.delenv(k)
    for k,v in dict(AWS_EC2_METADATA_DISABLED='true', AWS_SHARED_CREDENTIALS_FILE=tmp_path/'credentials', AWS_CONFIG_FILE=tmp_path/'config', FASTAI_REMOTE_CACHE=tmp_path/'cache').items(): monkeypatch.setenv(k, str(v))

# --- what is shown and saved

@pytest.mark.parametrize('kind', VALUES)
@pytest.mark.parametrize('place', PLACES)
def test_no_option_of_a_file_system_is_shown_or_saved(place, kind):
    url,names = PLACES[place]
    assert len(names)>8
    for name in names:
        if is_allowed(name, VALUES[kind]): continue
        options = option(name, VALUES[kind])
        storage = Storage(url, storage_options=options)
        loaded = pickle.loads(pickle.dumps(storage))
        for one in (storage, loaded):
            assert not has_marker(repr(one), str(one), repr(vars(one)), repr(one.reveal()), repr(one.opener()), repr(vars(one.opener())), repr(one.opener().key()), pickle.dumps(one), repr(copy.deepcopy(one))), name
        assert not has_marker(repr(s3_options(url, **options)), str(s3_options(url, **options)), pickle.dumps(s3_options(url, **options))), name
        if kind!='object': assert pickle.loads(pickle.dumps(storage.opener()))().reveal()==storage.reveal()   # a worker gets all
        else: assert storage.reveal()['storage_options']==options
        lost = hidden_names(options)
        assert lost and loaded._not_kept==sorted(lost) and all(text in loaded._advice() for text in lost)

def is_no_option(name): return 'password' in name or name=='decode_responses'

@pytest.mark.parametrize('kind', VALUES)
def test_no_option_of_redis_is_shown_or_saved(kind):
    assert len(REDIS)>40
    for name in REDIS:
        if is_allowed(name, VALUES[kind]) or is_no_option(name) or name in ('retry','timeout','socket_timeout'): continue
        link = RedisLink('redis://localhost:1', **{name:VALUES[kind]})
        loaded = pickle.loads(pickle.dumps(link))
        for one in (link, loaded):
            assert not has_marker(repr(one), repr(vars(one)), repr(one.reveal()), repr(one.opener()), repr(vars(one.opener())), pickle.dumps(one)), name
        assert link.reveal()[name]==VALUES[kind] and loaded._not_kept==[name] and name in loaded._advice()

def test_passwords_of_redis_are_refused_as_options_and_not_shown():
    for name in REDIS:
        if 'password' not in name: continue
        assert (shown:=shown_when_failing(lambda: RedisLink('redis://localhost:1', **{name:MARKER}))) and not has_marker(*shown)

def test_harmless_options_are_kept():
    options = dict(endpoint_url='http://host:9000', anon=True, use_ssl=False, profile='someone', client_kwargs={'region_name':'eu', 'verify':False}, config_kwargs={'s3':{'addressing_style':'path'}, 'read_timeout':3})
    assert public_options(options)==options and not hidden_names(options)
    assert pickle.loads(pickle.dumps(Storage('s3://b/f', storage_options=options)))._options==options
    options = dict(db=3, socket_timeout=1.5, ssl_cert_reqs='none', ssl_ca_certs='/etc/ca.pem', health_check_interval=7)
    assert pickle.loads(pickle.dumps(RedisLink('rediss://host', **options))).reveal().items()>=options.items()

URLS = [f'https://me:{MARKER}@host/a', f'https://{MARKER}@host/a', f'http://host/a?sig={MARKER}', f'http://host/a#{MARKER}', f'sftp://me:{MARKER}@host/a', f'simplecache::https://me:{MARKER}@host/a', f'simplecache::https://host/a?sig={MARKER}&b=1',
    f'blockcache::simplecache::ftp://me:{MARKER}@host/a', f'HTTPS://me:{MARKER}@host/a', f'https://me:{MARKER}@host', f'webdav://host/a?{MARKER}', f'http://[::1]:80/host?sig={MARKER}', f'http://me:{MARKER}@[::1]/host', f'simplecache::http://[::1]/host?sig={MARKER}']

@pytest.mark.parametrize('url', URLS)
def test_urls_are_shown_and_saved_without_secrets(url):
    storage = Storage(url)
    assert not has_marker(public_url(url), repr(storage), repr(vars(storage)), storage.url, storage.name, pickle.dumps(storage), repr(storage.opener()), repr(s3_options(url)), repr(Storage('s3://b/f', storage_options={'endpoint_url':url})))
    assert has_marker(*storage._secret_texts()) and 'host' in storage.url
    assert pickle.loads(pickle.dumps(storage.opener()))().reveal()==storage.reveal()
    assert pickle.loads(pickle.dumps(storage))._not_kept

@pytest.mark.parametrize('url', [f'https://me:{MARKER}/x@host/a', f'ftp://me:{MARKER}#@host/a', f'redis://me:{MARKER}/x@host', f'redis://host?ssl_password={MARKER}', f'ftp://me:a::{MARKER}@host/a', f's3://me:{MARKER}::b@host/a'])
def test_malformed_urls_are_not_repeated(url):
    for f in (lambda: Storage(url), lambda: ShardStore(url), lambda: RedisStore(url, 'pets'), lambda: to_redis([], url, 'pets'), lambda: to_shards([], url)):
        assert not has_marker(*shown_when_failing(f))

PLACES_OF_PASSWORDS = ['redis://user:{}@host/0', 'redis://:{}@host:1,other:2', 'rediss://:{}@[::1]:3/0',
    'unix://user:{}@/tmp/s', 'redis+sentinel://:{}@host:1,other/pets/0', 'redis://host/0?password={}', 'unix:///tmp/s?db=0&password={}',
    'redis://user@host?password={}&db=1']
malformed = st.text(st.sampled_from([*':/?#@&=%[];,.+ 017x', '\udcff', '\u212a', '\n']), max_size=4)

@examples(400)
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
    assert not has_marker(shown.encode(errors='replace'), *shown_when_failing(lambda: RedisLink(url)))
    if shown: assert not has_marker(pickle.dumps(RedisLink(url)))

@pytest.mark.parametrize('url,what', [
    ('unix://user:12/ss@/tmp/s', 'unix:///'), ('unix://tmp/s', 'unix:///'), ('unix://:pw@', 'unix:///'),
    ('unix://:a@?x@/tmp/s', 'unix:///'), ('redis://host/0?client_name=\udcff', 'UTF-8'), ('redis://:%ff@host', 'UTF-8'),
    ('redis://host?password=%ff', 'UTF-8'), ('unix:///tmp/s#1', 'must be quoted'),
    ('redis://host?password=a#b', 'must be quoted'), ('redis://host?password=a&b', 'must be quoted')])
def test_a_url_that_would_be_guessed_is_refused(url, what):
    "Another password, socket or server would be used than the one that was meant"
    with pytest.raises(ValueError, match=what) as failed: RedisLink(url)
    assert type(failed.value) is ValueError

def test_a_login_is_hidden_however_it_is_encoded():
    "The header of HTTP has it as Latin-1"
    for encoding in ('utf-8','latin-1'):
        assert base64.b64encode('mé:pä'.encode(encoding)).decode() in secret_texts({'auth':('mé','pä')})
    assert 'a:\udcff' in secret_texts({'secret':'a:\udcff'})

# --- messages

@pytest.fixture
def quoting():
    "A server that repeats what it was asked, in its refusals"
    def answer(handler, first, last):
        said = f"{handler.path} {handler.headers.get('Authorization')} {handler.headers.get('Cookie')} {handler.headers.get('X-Key')}"
        handler.send_response(answer.status, f'no {said}')
        handler.send_header('Content-Length', '0')
        handler.end_headers()
    answer.status = 403
    with Server(answer) as server:
        server.answer = answer
        yield server

@pytest.mark.parametrize('status', [401,403,404,400,418,500,302])
def test_refusals_of_the_web_do_not_repeat_secrets(quoting, status, caplog):
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.INFO, 'botocore')   # it logs tokens at level DEBUG, as its documentation says
    caplog.set_level(logging.INFO, 'aiobotocore')
    quoting.answer.status = status
    host = quoting.url.removeprefix('http://')
    for url,options in ((f'http://me:{MARKER}@{host}/a', {}), (f'http://{MARKER}@{host}/a', {}), (f'http://{host}/a?sig={MARKER}', {}), (f'http://{host}/a', dict(headers={'X-Key':MARKER})), (f'http://{host}/a', dict(cookies={'k':MARKER})),
            (f'http://{host}/a', dict(client_kwargs={'auth':aiohttp.BasicAuth('me', MARKER)})), (f'simplecache::http://me:{MARKER}@{host}/a?sig={MARKER}', {}), ('s3://bucket/a', dict(endpoint_url=quoting.url, key='me', secret=MARKER, token=MARKER))):
        for f in (lambda: ShardStore(url, timeout=.05, storage_options=options), lambda: to_shards([{'txt':'a'}], url, timeout=.05, storage_options=options, num_workers=1, progress=False), lambda: Storage(url, .05, options).ranges(['a'], [5], [9])):
            assert not has_marker(*shown_when_failing(f)), url
    assert any(has_marker(path, headers) for path,headers in quoting.seen) and not has_marker(caplog.text)

def test_a_refusal_is_recognised(quoting):
    with pytest.raises(StoreUnavailable, match='refused.*1 attempt'): Storage(f'{quoting.url}/a', 5).read('x')

@pytest.mark.parametrize('place', PLACES)
def test_errors_of_unusual_options_do_not_repeat_them(place):
    "Libraries quote options of a wrong type, and options that do not exist"
    url,names = PLACES[place]
    if place=='s3': names = [name for name in names if not name.startswith('config_kwargs.') or 'prox' in name]   # each takes a tenth of a second
    failed = 0
    for name in names:
        value = VALUES['dict' if name.endswith(('kwargs','headers','cookies','proxies','cert')) else 'object' if name in ('session','get_client') else 'str']
        if is_allowed(name, value) or name in ('loop','asynchronous','client_kwargs.loop'): continue
        options = option(name, value)
        if place=='s3' and not name.endswith('endpoint_url'): options = {'key':'me', 'secret':'k', 'endpoint_url':'http://127.0.0.1:9', **options}
        shown = shown_when_failing(lambda: ShardStore(url, timeout=.01, storage_options=options))
        assert shown and not has_marker(*shown), name
        failed += 1
    assert failed>=(4 if place=='ftp' else 10)

@contextmanager
def rude_server(says):
    "Speaks Redis, and answers each command with an error that repeats it"
    server = socket.create_server(('127.0.0.1', 0))
    def serve():
        while True:
            try: connection,_ = server.accept()
            except OSError: return
            asked = connection.recv(10_000).replace(b'\r\n', b' ')
            connection.sendall(says+asked+b'\r\n')
            connection.close()
    threading.Thread(target=serve, daemon=True).start()
    with server: yield server.getsockname()[1]

@pytest.fixture
def rude():
    with rude_server(b'-WRONGPASS ') as port: yield port

class Provider(redis.CredentialProvider):
    def __init__(self, password=MARKER): self.password = password
    def get_credentials(self): return 'default',self.password
    def __repr__(self): return f'Provider({self.password})'

def test_errors_of_redis_do_not_repeat_secrets(rude):
    from fastai.data.core import DataLoaders
    for url,options in ((f'redis://me:{MARKER}@127.0.0.1:{rude}', {}), (f'redis://:{MARKER}@127.0.0.1:1', {}), (f'redis://127.0.0.1:{rude}', dict(secret=MARKER)), (f'redis://127.0.0.1:{rude}', dict(username=MARKER, secret=MARKER))):
        for f in (lambda: RedisStore(url, 'pets', timeout=.03, **options), lambda: RedisStore.names(url, timeout=.03, **options), lambda: to_redis([{'txt':'a'}], url, 'pets', timeout=.03, progress=False, **options),
                lambda: RedisStore.delete(RedisLink(url, .03, **options), 'pets'), lambda: RedisStore.from_keys(url, 'x:{}', n=3, timeout=.03, **options).get_many([0])):
            assert (shown:=shown_when_failing(f)) and not has_marker(*shown)
        if not options: assert not has_marker(*shown_when_failing(lambda: DataLoaders.from_redis(url, 'pets', timeout=.1)))

@pytest.mark.parametrize('says', ['ERR unknown command', 'OOM command not allowed', 'NOPERM no permissions', 'ERR',
                                  'MOVED 1 127.0.0.1:1', 'BUSY', 'NOAUTH', 'EXECABORT'])
def test_whatever_redis_refuses_secrets_are_not_repeated(says):
    with rude_server(b'-'+says.encode()+b', with args beginning with: ') as port:
        for options in dict(secret=MARKER), dict(username='me', secret=MARKER):
            for f in (lambda link: link.send([('GET','a')]), lambda link: link.call(lambda client: client.ping())):
                shown = shown_when_failing(lambda: f(RedisLink(f'redis://127.0.0.1:{port}', timeout=1, **options)))
                assert shown and not has_marker(*shown)

def test_a_server_that_does_not_know_auth_does_not_make_the_password_public():
    with redis_server(**{'rename-command AUTH':''}) as server:
        url = f"unix://:{MARKER}@{server.socket}"
        shown = shown_when_failing(lambda: RedisLink(url).send([('GET','a')]))
        assert shown and not has_marker(*shown)

def test_credentials_of_a_provider_are_not_repeated(rude):
    "The server answers with what it was sent"
    shown = shown_when_failing(lambda: RedisLink(f'redis://127.0.0.1:{rude}', timeout=1, credential_provider=Provider()).send([('GET','a')]))
    assert shown and not has_marker(*shown)

@pytest.mark.slow
def test_errors_of_unusual_options_of_redis_do_not_repeat_them(rude):
    for name in REDIS:
        value = Provider() if name=='credential_provider' else MARKER
        if 'password' in name or is_allowed(name, value) or name in ('retry','timeout','socket_timeout'): continue
        assert not has_marker(*shown_when_failing(lambda: RedisStore(f'redis://127.0.0.1:{rude}', 'pets', timeout=.02, **{name:value}))), name

def test_short_secrets_do_not_make_messages_unreadable():
    url = 'redis://:e@127.0.0.1:1'
    with pytest.raises(StoreUnavailable, match=r'redis://127.0.0.1:1: ConnectionError: .*refused.*\(\d+ attempts? in'): RedisStore(url, 'pets', timeout=.1)
    error = without_secrets(ValueError('the letter e of the password e'), secret_texts({'password':'e'}))
    assert str(error)=='the letter *** of the password ***'

def test_a_message_is_never_about_another_place():
    "A password that is part of the address does not change the address"
    with pytest.raises(StoreUnavailable, match=r'redis://localhost:1: '): RedisStore('redis://:localhost@localhost:1', 'pets', timeout=.1)

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
    class Silent(Exception):
        def __str__(self): raise RuntimeError(MARKER)
    for error in (Odd(f'password {MARKER}'), Silent(f'password {MARKER}')):
        safe = without_secrets(error, [MARKER])
        assert safe is not error and not has_marker(str(safe), repr(safe), repr(safe.args))
    assert str(without_secrets(Odd(f'password {MARKER}'), [MARKER]))=='password ***'

def test_causes_in_a_circle_are_an_end():
    first,second,third = ValueError('a'),KeyError(MARKER),OSError('b')
    first.__cause__,second.__cause__,third.__cause__ = second,third,second
    safe = without_secrets(first, [MARKER])
    assert safe is first and type(safe.__cause__) is KeyError and not has_marker(*shown_by(safe))
    assert safe.__cause__.__cause__ is third and third.__cause__ is None
    first.__cause__ = first
    assert without_secrets(first, [MARKER]).__cause__ is None

def test_errors_of_a_group_have_causes_of_their_own():
    member = ValueError('no connection')
    member.__cause__ = KeyError(MARKER)
    group = ExceptionGroup('tasks failed', [member, ExceptionGroup('more', [TypeError('odd')])])
    group.__cause__ = OSError('the network')
    member.__context__ = group   # a circle
    safe = without_secrets(group, [MARKER])
    text = ''.join(traceback.format_exception(safe))
    assert MARKER not in text and 'the network' in text
    for part in 'tasks failed','no connection','odd': assert part in str(safe), part
    assert '***' in str(without_secrets(ExceptionGroup('tasks failed', [ValueError(MARKER)]), [MARKER]))

# --- what is used, kept, and lost

@pytest.fixture
def signed(tmp_path):
    "A web server of shards that wants a signature in the query, or a password"
    to_shards([{'txt':f'number {i}', 'cls':'ab'[i%2]} for i in range(20)], tmp_path/'pets', num_workers=1, chunk=5, maxcount=5, shuffle=False, progress=False)
    password = 'Basic '+base64.b64encode(f'me:{MARKER}'.encode()).decode()
    def answer(handler, first, last):
        path,_,query = handler.path.partition('?')
        if query!=f'sig={MARKER}' and handler.headers.get('Authorization')!=password: return head(handler, 403, 0)
        file = tmp_path/path.strip('/')
        if not file.is_file(): return head(handler, 404, 0)
        content = file.read_bytes()
        part = content if first is None else content[first:last+1]
        head(handler, 200 if first is None else 206, len(part), None if first is None else f'bytes {first}-{first+len(part)-1}/{len(content)}')
        handler.wfile.write(part)
    with Server(answer) as server:
        server.secret_urls = [f'{server.url}/pets?sig={MARKER}', f'http://me:{MARKER}@{server.url[7:]}/pets']
        yield server

def numbers(store): return store.get_many(range(20), 'txt', decode=True)['txt']==[f'number {i}' for i in range(20)]

def _in_worker(opener):
    "Whether a worker can read; its arguments and its environment"
    store = opener()
    own = b''.join(open(f'/proc/self/{name}', 'rb').read() for name in ('cmdline','environ')) if os.path.exists('/proc/self') else b''
    return numbers(store),own,repr(vars(store))

@pytest.mark.parametrize('k', [0,1])
def test_signatures_and_passwords_in_urls_are_used_and_not_kept(signed, k, tmp_path, monkeypatch, caplog):
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.losses import MSELossFlat
    from torch import nn
    caplog.set_level(logging.DEBUG)
    url = signed.secret_urls[k]
    store = ShardStore(url, timeout=5)
    assert numbers(store)
    dls = DataLoaders.from_store(store, x='cls', y='cls', bs=4, num_workers=0, valid_pct=.5)
    learn = Learner(dls, nn.Linear(1, 1), MSELossFlat(), path=tmp_path)
    learn.export('e.pkl')
    kept = [pickle.dumps(store), pickle.dumps(dls), (tmp_path/'e.pkl').read_bytes(), store.manifest.to_json(), *((f.read_bytes() for f in (tmp_path/'cache').rglob('*') if f.is_file()))]
    assert not has_marker(*kept, repr(store), store._repr_html_(), repr(dls.train), repr(vars(store)), caplog.text)
    report = store.copy(tmp_path/'copied', num_workers=1, progress=False)
    assert not has_marker(*(f.read_bytes() for f in (tmp_path/'copied').rglob('*') if f.is_file()), repr(report))
    loaded = pickle.loads(pickle.dumps(ShardStore(url, timeout=5, cache=None)))
    with pytest.raises(StoreUnavailable, match='refused.*not kept in exports.*URL|refused.*not kept in exports.*auth'): numbers(loaded)
    monkeypatch.setenv('FASTAI_REMOTE_URL', url)
    assert numbers(pickle.loads(pickle.dumps(store))) and numbers(pickle.loads(pickle.dumps(loaded)))

@pytest.mark.parametrize('method', ['fork', pytest.param('spawn', marks=pytest.mark.slow)])
def test_workers_get_secrets_neither_as_arguments_nor_in_their_environment(signed, method):
    store = ShardStore(signed.secret_urls[0], timeout=5, cache=None)
    with ProcessPoolExecutor(1, get_context(method)) as workers: can_read,own,shown = workers.submit(_in_worker, store.opener()).result()
    assert can_read and not has_marker(own, shown)

@pytest.mark.parametrize('ending', [f'?sig={MARKER}', ''])
@pytest.mark.parametrize('as_path', [str, Path, lambda url: [url]])
def test_sources_of_files_do_not_repeat_secrets_of_urls(ending, as_path, tmp_path):
    "They read files of this computer, and say so"
    makers = {'tar':tar_samples, 'csv':csv_samples, 'jpg':image_samples, 'npy':array_samples, 'ndjson':drawing_samples,
              'zip':img2dataset_samples, 'feather':table_samples, 'parquet':table_samples, '':as_source, 'png':as_source}
    for suffix,make in makers.items():
        if as_path is not str and make in (array_samples,as_source): continue   # a list may be values
        for login in (f'me:{MARKER}@', f'{MARKER}@', f'me:a/{MARKER}@', ''):
            for scheme in ('https','s3','simplecache::https'):
                if not login and not ending: continue
                if scheme=='s3' and make is table_samples and not ending: continue   # pyarrow would look for the bucket
                url = f'{scheme}://{login}127.0.0.1:1/x.{suffix}{ending}'
                shown = []
                try: make(as_path(url))
                except Exception as e: shown = [str(e), repr(e), ''.join(traceback.format_exception(e))]
                shown = [text.replace(__file__, '') for text in shown]
                assert shown and not has_marker(*shown), (make, url)
    with pytest.raises(FileNotFoundError, match='^https://host/a.tar: an address: only files of this computer'):
        tar_samples(f'https://me:{MARKER}@host/a.tar?sig={MARKER}')
    (tmp_path/'https:').mkdir()
    (tmp_path/'https:'/'a.csv').write_text('a\n1\n')
    assert len(csv_samples(f'{tmp_path}/https://a.csv').files)==1

def test_indexing_and_another_folder_on_the_same_host(signed, tmp_path):
    "The manifest that is written has no secret; the password goes to the shards on the same host"
    from fastai_remote.ingest.index import index_shards
    with pytest.raises(Exception) as e: index_shards(signed.secret_urls[1], to=tmp_path/'index', num_workers=1, progress=False, timeout=1)
    assert not has_marker(*shown_by(e.value))
    storage = Storage(signed.secret_urls[1])
    assert storage.beside(f'{signed.url}/other')._options==storage._options and not storage.beside('http://elsewhere/x')._options

@pytest.mark.parametrize('url,other,is_same', [
    ('webhdfs://safe:1/x', 'webhdfs://evil:2/y', False), ('webdav://safe/x', 'webdav://evil/x', False),
    ('webhdfs://safe:1/x', 'webhdfs://safe:1/y', True), ('new_fs://safe/x', 'new_fs://evil/x', False),
    ('abfs://data@safe.net/x', 'abfs://data@evil.net/x', False), ('one://a@safe/x', 'one://b@safe/x', False),
    ('sftp://me@Host/x', 'sftp://host/y', True), ('sftp://host:22/x', 'sftp://host:23/x', False),
    ('s3://one/x', 's3://two/y', True), ('gs://one/x', 'gs://two/y', True), ('s3://one/x', 'https://one/x', False),
    ('simplecache::https://safe/x', 'simplecache::https://evil/x', False),
    ('simplecache::https://safe/x', 'filecache::https://safe/y', True),
    ('zip://a::https://safe/x.zip', 'zip://a::https://evil/x.zip', False),
    ('simplecache::s3://one/x', 'simplecache::s3://two/x', True), ('/data/x', 'webhdfs://there/x', True)])
def test_secrets_go_to_the_same_host_only(url, other, is_same):
    options = {'password':MARKER}
    assert Storage(url, storage_options=options).beside(other)._options==(options if is_same else {})

def test_a_credential_provider_is_used_and_not_kept(monkeypatch):
    with redis_server(requirepass=MARKER) as server:
        address = server.url.replace(f':{MARKER}@', '')
        if not has_marker(server.url) or server.url.startswith('unix'): address = server.url.split('?')[0]
        to_redis([{'txt':'a'}], server.url, 'pets', num_workers=1, progress=False)
        store = RedisStore(public_url(address), 'pets', credential_provider=Provider())
        assert store.get_many([0], 'txt', decode=True)['txt']==['a']
        saved = pickle.dumps(store)
        assert not has_marker(saved, repr(store), repr(vars(store.link)))
        with pytest.raises(StoreUnavailable, match='credential_provider'): pickle.loads(saved).get_many([0], 'txt')
        monkeypatch.setenv('REDIS_URL', server.url)
        assert pickle.loads(saved).get_many([0], 'txt', decode=True)['txt']==['a']

def test_secret_texts_and_dicts():
    assert repr(Secret(MARKER))=="'***'" and f'{Secret(MARKER)}'==MARKER and pickle.loads(pickle.dumps(Secret(MARKER)))==MARKER
    options = SecretOptions(key=MARKER, anon=True, client_kwargs={'region_name':'eu', 'new':MARKER})
    assert eval(repr(options))=={'key':'***', 'anon':True, 'client_kwargs':{'region_name':'eu'}} and pickle.loads(pickle.dumps(options))==options

def test_an_option_whose_url_is_kept_without_its_login_is_named():
    for url in (f'https://me:{MARKER}@host', f'https://{MARKER}@host', f'https://host/?sig={MARKER}'):
        options = dict(endpoint_url=url, client_kwargs={'endpoint_url':url, 'region_name':'eu'})
        assert hidden_names(options)==['endpoint_url','client_kwargs.endpoint_url']
        loaded = pickle.loads(pickle.dumps(Storage('s3://b/f', storage_options=options)))
        assert loaded._not_kept==sorted(hidden_names(options))
        assert not has_marker(repr(SecretOptions(options))) and 'host' in repr(SecretOptions(options))
        text = json.dumps({'endpoint_url':url})
        with pytest.raises(UsageError, match='endpoint_url may be secret'): read_options(text)

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
    assert there.url=='redis://there:1/2?socket_timeout=3' and there.reveal()['username']==MARKER and not has_marker(repr(there), repr(vars(there)))
    for url,saved in ((f'redis://me:{MARKER}/x@host', link), (f'https://me:{MARKER}/x@host', storage)):
        monkeypatch.setenv('FASTAI_REMOTE_URL', url)
        with pytest.raises(ValueError, match='must be quoted') as failed: pickle.loads(saved)
        assert not has_marker(str(failed.value))
