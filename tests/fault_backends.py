"The stores that faults are tried on, behind one interface: write a dataset, open it, read all of it, break it"
import asyncio, io, os, shutil, signal, socket, tempfile, time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import redis
from PIL import Image

from fastai_remote import RedisStore, redis_server, ShardStore, StoreError, StoreNotFound, to_redis, to_shards
from faultproxy import FaultProxy

class NetworkFaults(FaultProxy):
    "A proxy that can also refuse connections, slow answers down, end them early, flip bits and lose bytes"
    def __init__(self, up):
        super().__init__(up)
        self.hits = 0 # Faults that have happened
        self.rate = None # Bytes per second of answers
        self.damage = None # `damage(bytes) -> bytes`, applied to each part of an answer
        self.damage_requests = None # The same for requests
        self.end_after = None # Bytes of answers after which connections end properly, with the answer incomplete
        self.writers = set()

    async def _conn(self, reader, writer):
        self.writers.add(writer)
        try: await super()._conn(reader, writer)
        except OSError: writer.close()
        finally: self.writers.discard(writer)

    async def _pipe(self, reader, writer, answer=False):
        if not answer: return await self._pipe_requests(reader, writer)
        try:
            while part:=await reader.read(65536):
                while self.stall: await asyncio.sleep(.01)
                if self.cut is not None or self.end_after is not None:
                    left = self.end_after if self.cut is None else self.cut
                    if len(part)>=left:
                        is_reset,self.cut,self.end_after,self.hits = self.cut is not None,None,None,self.hits+1
                        writer.write(part[:left])
                        await writer.drain()
                        return writer.transport.abort() if is_reset else None
                    if self.cut is None: self.end_after -= len(part)
                    else: self.cut -= len(part)
                if self.rate:
                    for start in range(0, len(part), 512):
                        writer.write(part[start:start+512])
                        await writer.drain()
                        await asyncio.sleep(512/self.rate if self.rate else 0)
                    self.hits += 1
                    continue
                if self.damage: part = self.damage(part)
                writer.write(part)
                await writer.drain()
        except OSError: pass
        finally: writer.close()

    async def _pipe_requests(self, reader, writer):
        try:
            while part:=await reader.read(65536):
                while self.stall: await asyncio.sleep(.01)
                writer.write(self.damage_requests(part) if self.damage_requests else part)
                await writer.drain()
        except OSError: pass
        finally: writer.close()

    def _do(self, act): return asyncio.run_coroutine_threadsafe(act(), self.loop).result(10)

    def refuse(self):
        "Close the port and all connections; forked processes have copies of the sockets, so these are shut down"
        async def act():
            for sock in self.srv.sockets: sock.shutdown(socket.SHUT_RDWR)
            self.srv.close()
            for writer in list(self.writers):
                try: writer.get_extra_info('socket').shutdown(socket.SHUT_RDWR)
                except OSError: pass
                writer.transport.abort()
        self._do(act)
        self.hits += 1

    def accept(self):
        "Open the same port again"
        async def act(): self.srv = await asyncio.start_server(self._conn, '127.0.0.1', self.port)
        self._do(act)

class Backend:
    """A place for datasets, with a connection that can be disturbed; a context manager

    `kind` says which faults can be tried on it. Each object is new and empty, and is used for one fault only."""
    name = kind = ''

    def __init__(self): self.stack,self.folder = ExitStack(),Path(tempfile.mkdtemp(prefix='fr-faults-'))
    def __enter__(self): return self
    def __exit__(self, *args):
        self.stack.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, source, name, fn=None, direct=False, **options):
        "Write dataset `name`; around the disturbances if `direct`"
        raise NotImplementedError
    def open(self, name, direct=False, **options):
        "The store of dataset `name`"
        raise NotImplementedError
    def address(self, name):
        "Where a script writes dataset `name`: the arguments of `to_redis` or `to_shards` after the source"
        raise NotImplementedError
    def abandon(self, name):
        "Drop what an unfinished ingest has written"
        raise NotImplementedError

class OneServer(Backend):
    "A single Redis server behind a proxy"
    name,kind = 'Redis','redis'
    def __init__(self):
        super().__init__()
        self.server = self.stack.enter_context(redis_server())
        self.proxy = self.stack.enter_context(NetworkFaults(str(self.server.socket)))
        self.client = redis.Redis.from_url(self.server.url)

    def url(self, direct=False): return self.server.url if direct else f'redis://127.0.0.1:{self.proxy.port}'
    def write(self, source, name, fn=None, direct=False, **options):
        return to_redis(source, self.url(direct), name, fn, progress=False, **options)
    def open(self, name, direct=False, **options): return RedisStore(self.url(direct), name, **options)
    def address(self, name): return self.url(),name
    def abandon(self, name): RedisStore.abandon(self.url(True), name)

    def restart(self, seconds=.5):
        "Kill the server as a crash would, and start it again after `seconds`"
        self.server.kill()
        time.sleep(seconds)
        self.server.start()

class Disk(Backend):
    "Shards in a folder"
    name,kind = 'shards on disk','disk'
    def url(self, name): return str(self.folder/name)
    def write(self, source, name, fn=None, direct=False, **options):
        return to_shards(source, self.url(name), fn, **{'progress':False, 'maxcount':40, **options})
    def open(self, name, direct=False, **options):
        options.pop('timeout', None)
        return ShardStore(self.url(name), **options)
    def address(self, name): return (self.url(name),)
    def abandon(self, name): ShardStore.abandon(self.url(name))
    def file(self, name, pattern): return sorted((self.folder/name).glob(pattern))[0]

class S3(Backend):
    "Shards on an S3 server behind a proxy, read through a cache"
    name,kind = 'shards on S3','s3'
    def __init__(self):
        from s3proxy import S3Proxy
        from s3servers import moto_server
        super().__init__()
        self.server = self.stack.enter_context(moto_server())
        self.proxy = self.stack.enter_context(S3Proxy(self.server.endpoint))
        self.cache = self.folder/'cache'

    def url(self, name): return f's3://{self.server.bucket}/{name}'
    def options(self, direct):
        endpoint = (self.server if direct else self.proxy).endpoint
        return dict(endpoint_url=endpoint, key=self.server.key, secret=self.server.secret)
    def write(self, source, name, fn=None, direct=False, **options):
        return to_shards(source, self.url(name), fn, storage_options=self.options(direct),
                         **{'progress':False, 'maxcount':40, **options})
    def open(self, name, direct=False, **options):
        cache = None if direct else options.pop('cache', self.cache)
        return ShardStore(self.url(name), storage_options=self.options(direct), cache=cache, **options)
    def abandon(self, name): ShardStore.abandon(self.url(name), storage_options=self.options(True))

BACKENDS = {cls.kind:cls for cls in (OneServer,Disk,S3)}

# The samples that are written, and a function that is called for each of them

N_TRAIN,N_VALID = 320,80
N = N_TRAIN+N_VALID

def picture(number):
    "The pixels of sample `number`, which no other sample has"
    return np.random.default_rng(number).integers(0, 255, (8,8,3)).astype(np.uint8)

def png_of(number):
    Image.fromarray(picture(number)).save(buffer:=io.BytesIO(), 'PNG')
    return buffer.getvalue()

def samples():
    "`{split: list of samples}`"
    every = [{'png':png_of(i), 'id':i, 'cls':'abc'[i%3], 'txt':f'number {i}'} for i in range(N)]
    return {'train':every[:N_TRAIN], 'valid':every[N_TRAIN:]}

class Slow:
    "Takes some time for a sample; at sample `number` it makes the file `flag`, and the first time kills its process"
    def __init__(self, flag, number=150, seconds=.001, kill=False):
        self.flag,self.number,self.seconds,self.kill = str(flag),number,seconds,kill
    def __call__(self, sample):
        time.sleep(self.seconds)
        if sample['id']==self.number and not os.path.exists(self.flag):
            open(self.flag, 'w').close()
            if self.kill: os.kill(os.getpid(), signal.SIGKILL)
        return sample

def write_script(address, flag, num_workers=2, **options):
    "What a script of its own runs: writes the samples to `address`, which `Backend.address` returned"
    options = {'progress':False, 'chunk':16, 'num_workers':num_workers, **options}
    if len(address)==2: return to_redis(samples(), *address, Slow(flag), **options)
    return to_shards(samples(), address[0], Slow(flag), maxcount=40, **options)
