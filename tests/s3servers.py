"""Two S3 servers of one's own: moto in this process, which takes any signature, and OpenStack Swift in a process that
dies with its owner, which does not"""
import logging, os, shutil, subprocess, sys, tempfile, uuid
from contextlib import contextmanager
from functools import lru_cache

import boto3
from botocore.config import Config

from fastai_remote.store.server import _die_with_parent, _popen

PYTHON = '/usr/bin/python3'   # swift comes with the system's Python, not with ours
NO_SWIFT = 'no swift here: apt-get install --no-install-recommends python3-swift'

# Swift's four servers in one process: they choose free ports themselves, find each other by a ring of one disk, and
# share a dict where memcached would be
SWIFT = r'''
import json, logging, os, shutil, signal, sys
from array import array
d,key,secret = sys.argv[1], *sys.stdin.readline().split()
try: from swift.common import utils
except ImportError: sys.exit(print('absent'))
utils.eventlet_monkey_patch()
import eventlet, eventlet.wsgi
from swift.common import wsgi
from swift.common.ring import RingData

def leave(*a):
    shutil.rmtree(d, ignore_errors=True)
    os._exit(0)
signal.signal(signal.SIGTERM, leave)   # it comes when the owner dies, too
disk = os.path.join(d, 'disk', 'd')
os.makedirs(disk)
probe = os.path.join(disk, 'probe')
open(probe, 'w').close()
try: os.setxattr(probe, 'user.swift', b'1')
except OSError: sys.exit(f'{d}: swift needs a file system with extended attributes; set TMPDIR to one')

def write(name, text):
    with open(os.path.join(d, name), 'w') as f: f.write(text)

write('swift.conf', '[swift-hash]\nswift_hash_path_suffix = s\n[storage-policy:0]\nname = p\ndefault = yes\n')
utils.set_swift_dir(d)
common = f'[DEFAULT]\nswift_dir = {d}\nrecon_cache_path = {d}\nlog_level = ERROR\n'
common += 'log_custom_handlers = __main__.to_stderr\n'
def to_stderr(conf, name, to_console, route, fmt, logger, adapted): logger.addHandler(logging.StreamHandler())
socks = {o: eventlet.listen(('127.0.0.1', 0)) for o in ('account','container','object','proxy')}
for o in ('account','container','object'):
    write(f'{o}.conf', common + f'devices = {d}/disk\nmount_check = false\n[app:main]\nuse = egg:swift#{o}\n')
    dev = dict(id=0, region=1, zone=1, ip='127.0.0.1', port=socks[o].getsockname()[1], device='d', weight=1.)
    dev.update(replication_ip=dev['ip'], replication_port=dev['port'])
    RingData([array('H', [0, 0])], [dev], 31).save(os.path.join(d, f'{o}.ring.gz'))
user = 'user_' + '_'.join(key.split(':'))
write('proxy.conf', common + f"""[pipeline:main]
pipeline = proxy-logging s3api tempauth slo proxy-server
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
{user} = {secret} .admin
[filter:proxy-logging]
use = egg:swift#proxy_logging
[filter:slo]
use = egg:swift#slo
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
""")

class Cache:
    d = {}
    def get(self, k, *a, **kw): return json.loads(self.d.get(k, 'null'))
    def set(self, k, v, *a, **kw): self.d[k] = json.dumps(v)
    def delete(self, k, *a, **kw): self.d.pop(k, None)
cache = Cache()

def cached(app):
    def call(env, start):
        env['swift.cache'] = cache
        return app(env, start)
    return call

utils.disable_fallocate()
for o,s in socks.items():
    app = wsgi.loadapp(os.path.join(d, f'{o}.conf'))
    eventlet.spawn(eventlet.wsgi.server, s, cached(app) if o=='proxy' else app, wsgi.NullLogger(),
                   protocol=wsgi.SwiftHttpProtocol, socket_timeout=600, capitalize_response_headers=False)
print(socks['proxy'].getsockname()[1], flush=True)
while True: eventlet.sleep(3600)
'''

# What boto3 and s3fs must be told for servers that do not know the newer checksums
WHEN_REQUIRED = dict(request_checksum_calculation='when_required', response_checksum_validation='when_required')

@lru_cache(maxsize=8)
def _client(process, arguments): return boto3.client('s3', config=Config(**WHEN_REQUIRED), **dict(arguments))

class S3Server:
    "A server that runs: where, as whom, and a bucket in it"
    def __init__(self, endpoint, key, secret, strict, folder=None):
        self.endpoint,self.key,self.secret,self.strict,self.folder = endpoint,key,secret,strict,folder
        # moto's buckets are the process's, whatever the server
        self.bucket = self.make_bucket('b-'+uuid.uuid4().hex[:8])

    @property
    def options(self):
        "Storage options for `s3fs`"
        return dict(endpoint_url=self.endpoint, key=self.key, secret=self.secret, config_kwargs=WHEN_REQUIRED)

    def client(self, **kw):
        """A boto3 client; `kw` over its key, secret and endpoint

        It is made once, as that takes longer than most requests."""
        names = {'endpoint_url':self.endpoint, 'aws_access_key_id':self.key, 'aws_secret_access_key':self.secret}
        return _client(os.getpid(), tuple(sorted((names|{'region_name':'us-east-1'}|kw).items())))

    def make_bucket(self, name):
        "Make bucket `name`, return the name"
        self.client().create_bucket(Bucket=name)
        return name

    def __repr__(self): return f"S3Server({self.endpoint!r}, {'strict' if self.strict else 'any signature will do'})"

@contextmanager
def moto_server():
    "An S3 server in threads of this process, in half a second"
    from moto import backends
    from moto.moto_api._internal.models import moto_api_backend
    from moto.server import ThreadedMotoServer
    logging.getLogger('werkzeug').setLevel('ERROR')   # a line a request
    names = list(backends.list_of_moto_modules())
    backends.list_of_moto_modules = lambda: names   # it lists a folder for each request, in almost half of moto's time
    srv = ThreadedMotoServer('127.0.0.1', 0, verbose=False)
    srv.start()
    try: yield S3Server('http://{}:{}'.format(*srv.get_host_and_port()), 'anyone', 'anything', False)
    finally:
        srv.stop()
        moto_api_backend.reset()

@contextmanager
def swift_server(key='test:tester', secret='testing'):
    """A Swift server with S3's signatures, ranges and multipart uploads, in two seconds

    Raises `FileNotFoundError` where swift is not installed."""
    if not shutil.which(PYTHON): raise FileNotFoundError(NO_SWIFT)
    d = tempfile.mkdtemp(prefix='fr-swift-')
    err = open(f'{d}/server.log', 'w+')
    p = _popen([PYTHON, '-c', SWIFT, d], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err,
        start_new_session=True,
               preexec_fn=_die_with_parent if sys.platform=='linux' else None, cwd=d)
    try:
        p.stdin.write(f'{key} {secret}\n'.encode())   # not argv: `ps` shows that
        p.stdin.close()
        port = p.stdout.readline().decode().strip()
        if port=='absent': raise FileNotFoundError(NO_SWIFT)
        if not port: raise RuntimeError(open(err.name).read()[-800:])
        yield S3Server(f'http://127.0.0.1:{port}', key, secret, True, d)
    finally:
        p.terminate()
        p.wait(60)
        err.close()
        shutil.rmtree(d, ignore_errors=True)
