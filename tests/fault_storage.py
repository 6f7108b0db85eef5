"""A file system in the memory of this process whose answers can be wrong, and a record of what was asked

A test takes the fixture `faults`, and gives `Storage`, `to_shards` and `ShardStore` URLs such as `faulty://pets`. The
errors are those of s3fs, so that shards see what they would see on S3, without a server. What only a real S3 server or
other processes can show is in test_s3.py."""
import re

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

TARS = r'^GET \S+\.tar( |$)' # Requests that read a shard, or a part of it

def s3_error(code, message=None):
    "What s3fs raises when a server answers with this code"
    from botocore.exceptions import ClientError
    from s3fs.errors import translate_boto_error
    answer = {'Error':{'Code':code, 'Message':message or f'{code}, as the test wants'}}
    return translate_boto_error(ClientError(answer, 'Request'))

def flipped(content, at=None):
    "`content` with another byte, by default the one in the middle"
    changed = bytearray(content)
    changed[len(content)//2 if at is None else at] ^= 0x55
    return bytes(changed)

class Fault:
    "`change(act)` takes the place of `act()`, which carries out a request, for the next `n` requests that match"
    def __init__(self, change, n, match): self.change,self.n,self.match = change,n,match

class Faults:
    """The faults of the requests to come, and a list of those that were made

    A request is a text: `GET`, `PUT`, `DELETE`, `HEAD`, `LS` or `FIND`, the path, and the range if there is one, as in
    'GET /pets/shard-000000.tar 0-99'. `match` is a regular expression that is searched in it."""
    def __init__(self):
        self.files = FaultyFileSystem.store
        self.options = [] # What each client was given
        self.token = self.valid_token = 'one' # What a new client is given, and what the server accepts
        self.clear()

    def clear(self):
        "Forget faults and requests"
        self.faults,self.requests,self.before = [],[],lambda request: None
        return self

    def add(self, change, n=1, match=TARS):
        self.faults.append(fault := Fault(change, n, match))
        return fault

    def fail(self, error, n=1, match=''):
        "Raise an exception, or the error of a code of S3"
        def refuse(act): raise error if isinstance(error, Exception) else s3_error(error)
        return self.add(refuse, n, match)

    def short(self, n_bytes, n=1, match=TARS):
        "Leave out the last bytes of an answer"
        return self.add(lambda act: act()[:-n_bytes], n, match)

    def flip(self, n=1, match=TARS): return self.add(lambda act: flipped(act()), n, match)

    def reads(self, match=TARS):
        "`(name, range)` of each request that matches"
        found = [request.split(' ') for request in self.requests if re.search(match, request)]
        return [(path.rsplit('/', 1)[-1], ''.join(limits)) for _,path,*limits in found]

    def answer(self, client, request, act):
        "Carry out a request of a client, or let it fail"
        self.requests.append(request)
        self.before(request)
        if client.token!=self.valid_token: raise s3_error('ExpiredToken')
        fault = next((fault for fault in self.faults if fault.n>0 and re.search(fault.match, request)), None)
        if fault is None: return act()
        fault.n -= 1
        return fault.change(act)

    def content(self, path): return self.files[f'/{path}'].getvalue()

    def put(self, path, content):
        "Replace a file, or remove it if `content` is `None`; this is no request"
        self.files.pop(f'/{path}', None)
        if content is not None: MemoryFileSystem.pipe_file(FaultyFileSystem(), f'/{path}', content)

    def names(self, folder):
        "What is in a folder, sorted"
        return sorted(path.removeprefix(f'/{folder}/') for path in self.files if path.startswith(f'/{folder}/'))

    def objects(self, folder): return {name:self.content(f'{folder}/{name}') for name in self.names(folder)}

class FaultyFileSystem(MemoryFileSystem):
    "The file system of `faulty://` URLs"
    protocol,cachable = 'faulty',False
    store,pseudo_dirs,faults = {},[''],None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.token = self.faults.token
        self.faults.options.append(kwargs)

    @classmethod
    def _strip_protocol(cls, path): return super()._strip_protocol(path.removeprefix('faulty://'))

    def _answer(self, method, path, *args, limits='', **kwargs):
        request = ' '.join(filter(None, (method.upper(), path, limits)))
        act = getattr(super(), {'get':'cat_file', 'put':'pipe_file', 'delete':'_rm', 'head':'info'}.get(method, method))
        return self.faults.answer(self, request, lambda: act(path, *args, **kwargs))

    def cat_file(self, path, start=None, end=None, **kwargs):
        return self._answer('get', path, start, end, limits='' if start is None else f'{start}-{end-1}')
    def pipe_file(self, path, value, **kwargs): self._answer('put', path, value)
    def put_file(self, local, path, **kwargs):
        with open(local, 'rb') as file: self.pipe_file(path, file.read())
    def _rm(self, path): self._answer('delete', path)
    def info(self, path, **kwargs): return self._answer('head', path)
    def ls(self, path, **kwargs): return self._answer('ls', path, **kwargs)
    def find(self, path, **kwargs): return self._answer('find', path, **kwargs)

fsspec.register_implementation('faulty', FaultyFileSystem, clobber=True)

@pytest.fixture
def faults():
    "An empty `faulty://`, without faults"
    FaultyFileSystem.store.clear()
    FaultyFileSystem.pseudo_dirs[:] = ['']
    FaultyFileSystem.faults = Faults()
    return FaultyFileSystem.faults
