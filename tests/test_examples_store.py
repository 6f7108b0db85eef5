"What each module of `store` does, in short: examples that were tried first"
import io, os, pickle, tarfile, tempfile, time, zlib
import fsspec
import numpy as np
import redis
from fastcore.test import expect_fail, test_eq
from types import SimpleNamespace
from fastai_remote.clock import monotonic
from fastai_remote.core import CorruptSample, crc32s, Manifest, StoreUnavailable, UnknownField
from fastai_remote.store.address import hidden_names, public_options, public_url, secret_texts, SecretOptions
from fastai_remote.store.address import without_secrets
from fastai_remote.store.bounded import bytes_to_read, Deadline, ShortAnswer, UnusableAnswer
from fastai_remote.store.cache import FileCache
from fastai_remote.store.connection import call_in_thread, DeadlinePassed, Opener, Retries
from fastai_remote.store.fields import FieldTable
from fastai_remote.store.redis_acl import missing_right
from fastai_remote.store.redis_link import RedisLink, split_secret
from fastai_remote.store.redis_servers import as_options, open_servers
from fastai_remote.store.server import redis_server
from fastai_remote.store.shard_check import moved
from fastai_remote.store.shard_index import pack_index, ShardFile, ShardIndex, ShardManifest, ShardTable, Unzip
from fastai_remote.store.storage import s3_options, Storage, StorageLink
from fastai_remote.store.whole_shards import WholeShards
from fastai_remote.core import MissingSample
from fastai_remote.ingest.stores import RedisStore

def test_store_address():
    options = SecretOptions(endpoint_url='https://me:hush@host', key='hush', headers={'X-New':'hush'}, anon=False,
                            client_kwargs={'region_name':'eu', 'cookies':'hush'})
    test_eq(public_options(options), {'endpoint_url':'https://host', 'anon':False, 'client_kwargs':{'region_name':'eu'}})
    test_eq(hidden_names(options), ['endpoint_url', 'key', 'headers', 'client_kwargs.cookies'])
    assert 'hush' not in f'{options} {options!r}'
    test_eq(public_url('simplecache::https://me:hush@host/pets?sig=hush'), 'simplecache::https://host/pets')
    secrets = secret_texts({'key':'hush-hush', 'auth':('me', 'pw')}, 'https://host/pets?sig=Hx%2Fz')
    error = without_secrets(ValueError('https://host/pets/a?sig=Hx%2Fz refuses hush-hush, pw, and spews'), secrets)
    test_eq(str(error), 'https://host/pets/a?*** refuses ***, ***, and spews')

def test_store_bounded():
    test_eq(bytes_to_read('bytes=10-19', 206, 'bytes 10-19/500', 10), 10)
    test_eq(bytes_to_read('bytes=10-19', 206, 'bytes 10-14/15', 5), 5)   # the file ends here
    with expect_fail(ShortAnswer, contains='5 bytes came'): bytes_to_read('bytes=10-19', 206, 'bytes 10-14/500', 5)
    test_eq(bytes_to_read('bytes=0-19', 200, None, 15), 15)              # the whole file is what was asked for
    with expect_fail(UnusableAnswer, contains='ignores the header `Range`'): bytes_to_read('bytes=10-19', 200, None, 500)
    with expect_fail(UnusableAnswer, contains="sent 'bytes 0-9/500'"):
        bytes_to_read('bytes=10-19', 206, 'bytes 0-9/500', 10)
    class SlowFileSystem(fsspec.AbstractFileSystem):
        def cat_file(self, path): time.sleep(1)

    fs = Deadline(SlowFileSystem(), monotonic()+.05)
    with expect_fail(DeadlinePassed): fs.cat_file('a')
    test_eq(fs.is_abandoned, True)

def connect(url, password): return [url, password]

def test_store_connection():
    opener = Opener(connect, 'localhost', url='redis://localhost', password='s3cret')
    test_eq(opener(), ['redis://localhost','s3cret'])
    assert opener() is pickle.loads(pickle.dumps(opener))() and 's3cret' not in repr(opener)

    def open_dataset(link, name): return link, name
    dataset = Opener(open_dataset, 'pets', link=opener, name='pets')
    changed = Opener(connect, 'localhost', url='redis://localhost', password='changed')
    other = Opener(open_dataset, 'pets', link=changed, name='pets')
    assert dataset()[0] is opener() and dataset() is dataset()
    test_eq(other(), (['redis://localhost','changed'], 'pets'))
    answers = [ConnectionError('reset'), ConnectionError('reset'), 'PONG']
    def attempt():
        answer = answers.pop(0)
        if isinstance(answer, Exception): raise answer
        return answer
    def handle(error):
        if not isinstance(error, ConnectionError): raise error
        return True

    retries = Retries('redis://localhost', timeout=5, pause=.01)
    test_eq((retries.call(attempt, handle), retries.attempts), ('PONG', 3))

    def refused(): raise ConnectionError('no s3cret here')
    with expect_fail(StoreUnavailable, contains='redis://localhost: ConnectionError: no *** here ('):
        Retries('redis://localhost', timeout=.1, secrets=['s3cret']).call(refused, handle)
    test_eq(call_in_thread(lambda: 'PONG', seconds=5), 'PONG')
    with expect_fail(DeadlinePassed): call_in_thread(lambda: time.sleep(1), seconds=.05)

def test_store_fields():
    codecs = dict(zip(['mask.png','txt','jpg','png','cls'], [{'n':1}, {'n':2}, {'n':3}, {'n':1}, {}]))
    entries = {field:{'codec':field.split('.')[-1], 'dtype':None, **more} for field,more in codecs.items()}
    table = FieldTable(Manifest('shown', 4, entries), 'shown')
    test_eq(([f for f in ('mask.png','jpg') if table.holds_masks(f)], table.default), (['mask.png'], 'jpg;png'))
    test_eq((table.choice('jpg;gif;png?'), table.entry('jpg;png')['codec']), ((['jpg','png'], True), 'img'))
    with expect_fail(UnknownField, contains="shown: no field 'gif'; there are 'mask.png', 'txt'"): table.choice('gif')

def test_store_redis_acl():
    reply = "User reader has no permissions to run the 'hscan' command"
    test_eq(missing_right(reply, ('HSCAN', 'pets:~failures#0', 0)),
            f'this user may not run HSCAN: its access list (ACL) needs +hscan ({reply})')

def test_store_redis_link():
    test_eq(split_secret('redis://localhost:6379/2'), ('redis://localhost:6379/2', None))
    test_eq(split_secret('rediss://me:s3%2Fcret@host?ssl_cert_reqs=none'),
            ('rediss://me@host?ssl_cert_reqs=none', 's3/cret'))
    test_eq(split_secret('unix://:pw@/tmp/s?db=1'), ('unix:///tmp/s?db=1', 'pw'))
    for bad in ('redis://:s3cret/x@host', 'redis://:s3cret@host:port'):
        with expect_fail(ValueError, contains='must be quoted'): split_secret(bad)
    with expect_fail(ValueError, contains='want a redis://'): split_secret('http://localhost')
    server = redis_server()
    link = RedisLink(server.url)
    test_eq(link.call(lambda c: c.ping()), True)
    with expect_fail(StoreUnavailable, contains='redis://localhost:1: ConnectionError'):
        RedisLink('redis://localhost:1').call(lambda c: c.ping())

    l = RedisLink('redis://:s3cret@localhost:6379')
    assert b's3cret' not in pickle.dumps(l) and 's3cret' not in repr(l)

def test_store_redis_servers():
    # All commands of a request are sent at once:
    server = redis_server()
    one = open_servers(server.url, as_options(None, 5.))
    test_eq(one.send([('SET', 'a', b'1'), ('INCR', 'a'), ('MGET', 'a', 'b')]), [b'OK', 2, [b'2', None]])
    test_eq([type(reply).__name__ for reply in one.send([('INCR', 'a'), ('LPUSH', 'a', 'x'), ('GET', 'a')])],
            ['int', 'ResponseError', 'bytes'])
    server.close()

def test_store_shard_check():
    a,b,rest = b'the value', b'tHe vaLue', bytes(range(200))*7
    test_eq(zlib.crc32(b'head'+a+rest)^zlib.crc32(b'head'+b+rest), moved(zlib.crc32(a)^zlib.crc32(b), len(rest)))

def test_store_shard_index():
    columns = {'jpg@':np.array([512,2048], 'u4'), 'jpg#':np.array([700,9], 'u4'), 'cls':np.array([1,0], 'u1')}
    idx = ShardIndex(pack_index(columns, {'cls':['dog','émeu']}))
    test_eq(idx.spans('jpg', np.array([1]))[0].tolist(), [2048])
    test_eq(idx.values('cls', np.array([0,1]), 'u1', {'dog':3, 'émeu':7}).tolist(), [7,3])
    with expect_fail(CorruptSample, contains='no index'): ShardIndex(b'fr.idx\r\n'+bytes(20))
    fields = {'jpg':{'codec':'jpg','dtype':None}, 'jpg.crc':{'codec':'crc','dtype':'u4'},
              'cls':{'codec':'cls','dtype':'i8'}, 'score.f4':{'codec':'f4','dtype':'f4'}}
    s = ShardFile(f:=io.BytesIO(), fields)
    for k,(b,label) in enumerate([(b'first','dog'), (b'second','cat'), (b'','dog')]):
        s.add(f'{k:09}', {'jpg':b, 'cls':label, 'score.f4':k/3}, {'jpg':int(crc32s([b])[0])})
    s.close()
    assert s.size==len(f.getvalue()) and s.crc==crc32s([f.getvalue()])[0]
    f.seek(0)
    with tarfile.open(fileobj=f) as t: members = [(m.name, t.extractfile(m).read()) for m in t]
    test_eq(members[3:5], [('000000001.jpg', b'second'), ('000000001.cls.txt', b'cat')])
    idx = ShardIndex(s.columns.pack())
    for at,n in zip(*idx.spans('jpg', np.arange(3))): print(f.getvalue()[at:at+n])
    test_eq(idx.values('cls', np.arange(3), 'u1', {'cat':0,'dog':1}).tolist(), [1,0,1])
    test_eq(members[2], ('000000000.score.f4.json', b'0.0'))
    test_eq(idx.keys(np.array([2,0])), ['000000002','000000000'])
    test_eq(idx.columns['score.f4'].tolist(), [0, np.float32(1/3), np.float32(2/3)])
    b,unzip = bytes(3_000_000)+np.random.bytes(50_000),Unzip()
    got = list(unzip(zlib.compress(b, wbits=31)+zlib.compress(b'more', wbits=31)+bytes(512)))
    test_eq((b''.join(got)==b+b'more', max(map(len, got)), unzip.bad), (True, 1<<20, None))
    test_eq((list(unzip(b'no gzip')), str(unzip.bad)[:10], list(unzip(b'more'))), ([], 'Error -3 w', []))
    names = [f'shard-{k:06}.tar' for k in range(5)]
    t = ShardTable(names, np.full(5, 10), np.full(5, 1<<33), np.arange(5), np.full(5, 99), np.arange(5))
    u = ShardTable.unpack(t.pack())
    test_eq((u.name(0), u.name(4), len(u)), ('shard-000000.tar', 'shard-000004.tar', 5))
    test_eq([o.tolist() for o in u.at(np.array([0,9,10,49]))], [[0,0,1,4],[0,9,0,9]])
    m = ShardManifest('pets', 50, {}, shards=t.pack(), uid='7')
    test_eq(ShardManifest.from_json(m.to_json()).shards, m.shards)
    # The memory that the table of a million shards takes:
    n = 1_000_000
    t = ShardTable('\n'.join(f'shard-{k:06}.tar' for k in range(n)).encode(), *(np.full(n, 1000) for _ in range(5)))
    held = sum(a.nbytes for a in (t.n,t.size,t.crc,t.idx,t.icrc,t.starts,t.cuts))+len(t.text)
    assert held<60*n

def test_store_storage():
    client = s3_options('http://localhost:9000', 'me', 'hush-hush')
    assert 'hush' not in repr(client) and b'hush' not in pickle.dumps(client) and client['secret']=='hush-hush'
    options = dict(key='me', secret='hush-hush', endpoint_url='http://localhost:1')
    st = StorageLink('s3://bucket/pets', storage_options=options)
    assert 'hush' not in repr(st) and b'hush' not in (d:=pickle.dumps(st)) and len(d)<600
    test_eq(pickle.loads(d)._options, {'endpoint_url':'http://localhost:1'})
    test_eq(StorageLink('sftp://me:secret@host/data').url, 'sftp://me@host/data')
    test_eq(StorageLink('https://host/pets?sig=hush').url, 'https://host/pets')
    test_eq((StorageLink('~/pets').local, st.name), (True, 'pets'))
    st = StorageLink('s3://bucket/pets', timeout=.3, storage_options=options)
    with expect_fail(StoreUnavailable, contains='s3://bucket/pets'):
        st.call(lambda fs: fs.cat_file('bucket/pets/manifest.json'))
    tmp = tempfile.TemporaryDirectory()
    st = Storage(f'{tmp.name}/pets')
    st.write('a.bin', bytes(range(10)))
    with st.create('sub/b.bin') as f: f.write(b'whole')
    test_eq(st.ranges(['a.bin','a.bin','a.bin','gone'], [0,4,8,0], [2,6,20,1]), [b'\0\1', b'\4\5', b'\x08\x09', None])
    try:
        with st.create('sub/c.bin') as f: f.write(b'half'); raise KeyError
    except KeyError: pass
    test_eq((st.names(), st.names('sub'), st.names('none')), (['a.bin','sub'], ['b.bin'], []))
    test_eq(st.read('sub/b.bin'), b'whole')
    st.remove(['a.bin','gone'])
    with expect_fail(FileNotFoundError): st.read('a.bin')
    st.names()

def test_store_whole_shards():
    tmp = tempfile.TemporaryDirectory()
    there = Storage(f'{tmp.name}/there')
    for k in range(3): there.write(f'{k}.tar', bytes([k])*1000)
    checksums = [zlib.crc32(bytes([min(k, 1)])*1000) for k in range(3)]
    table = ShardTable(['0.tar','1.tar','2.tar'], np.full(3, 10), np.full(3, 1000), checksums, np.zeros(3), np.zeros(3))
    cache = FileCache(f'{tmp.name}/cache', 5000)
    part = SimpleNamespace(name='numbers', table=table, file=table.name, tars=there, cache=cache,
                           in_place=lambda shard: False, shard_key=lambda shard: f'uid-{shard}.tar')
    w = WholeShards(part)
    test_eq(w.get(1), None)
    w.prefetch([0,1], wait=True)
    test_eq(os.pread(w.get(1).fd, 4, 0), b'\1\1\1\1')
    with expect_fail(CorruptSample, contains='numbers: shard 2.tar: not the bytes that were indexed (2 times)'): w.fetch(2)

def test_store_redis_keys():
    # The drawings as the post stores them:
    server = redis_server()
    r = redis.Redis.from_url(server.url)
    rng = np.random.default_rng(0)
    arrs = rng.integers(0, 255, (6,8,8,3), np.uint8)
    for k,n in (('train',4),('valid',2)):
        for i in range(n):
            np.savez_compressed(f:=io.BytesIO(), arrs[i+4*(k=='valid')])
            r.set(f'{k}:orig:{i}', f.getvalue())
            r.set(f'{k}:pred:{i}', i%2)
    store = RedisStore.from_keys(server.url, x='{split}:orig:{}', y='{split}:pred:{}', n={'train':4, 'valid':2},
                                 codec='npz', vocab=['cat','dog'])
    test_eq(store[5]['x'], arrs[5])
    test_eq((store[5]['cls'], store.splits), ('dog', {'train':[0,4], 'valid':[4,6]}))
    test_eq(store.get_many([4,1], ['cls'])['cls'], [0,1])
    test_eq('no checksums: x, cls' in repr(store.verify(num_workers=1)), True)
    r.set('train:pred:2', 'two')
    with expect_fail(CorruptSample, contains="sample 2: train:pred:2 holds b'two', not an int below 2"): store[2]
    r.delete('valid:orig:0')
    with expect_fail(MissingSample, contains='sample 4 is missing'): store[4]
    with expect_fail(ValueError, contains='labels need a vocab'): RedisStore.from_keys(server.url, 'x:{}', 'y:{}', 3)
    server.close()
