"""Shards over S3, on real servers, also in several processes

What does not depend on S3, on the network or on processes is in test_shard_faults.py, on a storage in memory."""
import io, logging, pickle, random, tarfile, traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
pytest.importorskip('s3fs'); pytest.importorskip('moto'); pytest.importorskip('boto3')
import joblib
from fastai.data.core import DataLoaders

from conftest import HOLD, holding, wait_for
from fastai_remote import (index_shards, s3_options, ShardStore, StoreBusy, StoreError, StoreExists, StoreNotFound,
    StoreUnavailable, to_shards)
from fastai_remote.store.storage import Storage

from pets import alike, ALWAYS, EACH, epoch, ids, is_right, ITEMS, loaders, N, WRITING
from s3proxy import S3Proxy
from s3servers import moto_server

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('nobody')]
processes = pytest.mark.xdist_group('processes')
WRONG = 'n0t-the-one'

@pytest.fixture(scope='module')
def s3():
    "A server, with the dataset `pets`"
    with moto_server() as s:
        make(s, 'pets')
        yield s

@pytest.fixture
def proxy(s3):
    "A proxy before the server"
    with S3Proxy(s3.endpoint) as p: yield p

def url(s, folder='pets'): return f's3://{s.bucket}/{folder}'
def opts(s, at=None, **kw): return dict(endpoint_url=(at or s).endpoint, key=s.key, secret=s.secret, **kw)
def make(s, folder, items=ITEMS, at=None, **kw):
    return to_shards(items, url(s, folder), storage_options=opts(s, at), **{**WRITING, **kw})
def opened(s, at=None, folder='pets', cache=None, **kw):
    return ShardStore(url(s, folder), cache=cache, storage_options=opts(s, at), **kw)
def keys(s, folder):
    "The keys of what is in `folder`"
    pages = s.client().get_paginator('list_objects_v2').paginate(Bucket=s.bucket, Prefix=f'{folder}/')
    return [o['Key'] for page in pages for o in page.get('Contents', ())]
def objects(s, folder):
    "What is in `folder`, `{name: bytes}`"
    def content(key): return s.client().get_object(Bucket=s.bucket, Key=key)['Body'].read()
    return {key.removeprefix(f'{folder}/'):content(key) for key in keys(s, folder)}

# --- what is to be there

def test_what_two_processes_write_is_read_and_deleted(s3):
    "All samples, byte for byte as one process writes them, as tars; and nothing else is left"
    with joblib.parallel_config('multiprocessing'): assert make(s3, 'twice', num_workers=2).written==N
    there = objects(s3, 'twice')
    assert alike(objects(s3, 'pets'), there) and is_right(opened(s3, folder='twice'))
    assert set(there)=={'manifest.json', 'labels.json', 'README.md',
        *(f'shard-{k:06}.tar' for k in range(8)), *(f'.fastai_remote/shard-{k:06}.tar.fastai_remote' for k in range(8))}
    with tarfile.open(fileobj=io.BytesIO(there['shard-000003.tar'])) as t: assert len(t.getnames())==3*EACH
    ShardStore.delete(url(s3, 'twice'), storage_options=opts(s3))
    assert not keys(s3, 'twice')

def test_a_folder_whose_name_is_a_pattern_is_that_folder_alone(s3):
    "Files are read, listed and removed by their names; `run1` matches `run[1]`"
    storages = {folder:Storage(url(s3, folder), storage_options=opts(s3)) for folder in ('run1','run[1]','run*')}
    for folder,storage in storages.items():
        for name in 'ab': storage.write(name, folder.encode())
    for folder in 'run[1]','run*':
        storage = storages[folder]
        assert storage.names()==storage.files()==['a','b'] and storage.read('a')==folder.encode()
        assert storage.ranges(['a'], [0], [2])==[b'ru'] and storage.size_and_stamp('a')[0]==len(folder)
        storage.remove(['a','b'])
        assert not storage.names() and storages['run1'].names()==['a','b']

def test_what_botocore_knows_about_s3_is_read_once(s3, monkeypatch):
    "Of two stores, the second makes its client without the files that describe the services of AWS"
    from botocore.loaders import JSONFileLoader
    assert opened(s3)[0]
    storage = opened(s3).storage
    assert storage.subfolder('a') is storage.subfolder('a')   # each would make a client of its own
    def load_file(self, path): raise AssertionError(f'{path} is read again')
    monkeypatch.setattr(JSONFileLoader, 'load_file', load_file)
    assert opened(s3)[0]

def test_threads_share_a_store(s3, tmp_path):
    "The first requests of a process, and of a cache, come at the same time"
    for cache in (None, str(tmp_path/'c')):
        store = opened(s3, cache=cache)
        with ThreadPoolExecutor(8) as ex:
            got = list(ex.map(lambda i: store.get_many([i,(i+31)%N], ['jpg','id'], check=True), range(0, N, 8)))
        assert all(g['jpg'][j]==ITEMS[g['id'][j]]['jpg'] for g in got for j in (0,1))

# --- who may, and who may not

def how(s, tmp_path, monkeypatch, way):
    "Options that give the credentials in one of the usual ways"
    if way=='s3_options': return s3_options(s.endpoint, s.key, s.secret)
    if way=='profile':
        text = f'[someone]\naws_access_key_id = {s.key}\naws_secret_access_key = {s.secret}\n'
        (tmp_path/'credentials').write_text(text)
        return dict(profile='someone', endpoint_url=s.endpoint)
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', s.key)
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', s.secret)
    monkeypatch.setenv('AWS_ENDPOINT_URL', s.endpoint)
    return {}

@processes
@pytest.mark.parametrize('way,num_workers', [('s3_options',1), ('profile',2)])
def test_the_usual_ways_of_giving_credentials(s3, tmp_path, monkeypatch, way, num_workers):
    "For writing, reading, in workers, and deleting; the environment is in the tests of a killed ingest and of a pickle"
    kw,u = how(s3, tmp_path, monkeypatch, way),url(s3, f'w-{way}')
    with joblib.parallel_config('multiprocessing'):   # forks, which have this environment
        report = to_shards(ITEMS[:20], u, num_workers=num_workers, progress=False, storage_options=kw)
    dls = DataLoaders.from_shards(u, y='id', bs=4, num_workers=num_workers-1, device='cpu', cache=None, valid_pct=.5,
                                  storage_options=kw)
    assert report.written==20 and sum(len(y) for _,y in dls.valid)==10
    ShardStore.delete(u, storage_options=kw)
    with pytest.raises(StoreNotFound, match='no dataset here'): ShardStore(u, storage_options=kw)

def doors(s, at=None, **kw):
    "All that asks a server: `{name: function}`"
    kw = {**opts(s, at), **kw}
    write = dict(num_workers=1, progress=False, storage_options=kw)
    return dict(store=lambda: ShardStore(url(s), storage_options=kw),
        loaders=lambda: DataLoaders.from_shards(url(s), storage_options=kw),
        write=lambda: to_shards(ITEMS, url(s, 'w'), **write), index=lambda: index_shards(url(s), **write),
        delete=lambda: ShardStore.delete(url(s), storage_options=kw))

@pytest.mark.parametrize('wrong,match', [(dict(secret=WRONG), 's3://b-.*refused.*1 attempt'),
    (dict(key=None, secret=None), 'refused: Unable to locate credentials'),
    (dict(key=None, secret=None, profile='nobody'), 'nobody')], ids=['secret','none','profile'])
def test_wrong_and_missing_credentials_are_named_at_once_at_every_door(s3, proxy, wrong, match):
    "The server is asked hardly more than once, and a secret is not in the error"
    for name,door in doors(s3, proxy, **wrong).items():
        proxy.clear()
        with pytest.raises(StoreUnavailable, match=match) as e: door()
        assert WRONG not in ''.join(traceback.format_exception(e.value))
        assert len(proxy.log)<=4, (name, proxy.log)

def test_a_bucket_that_does_not_exist_is_named_at_every_door(s3):
    class Elsewhere: bucket,endpoint,key,secret = 'nowhere-at-all',s3.endpoint,s3.key,s3.secret
    for door in doors(Elsewhere).values():
        with pytest.raises((StoreError,FileNotFoundError), match='s3://nowhere-at-all/(pets|w).*'): door()

@pytest.mark.parametrize('endpoint', ['http://127.0.0.1:9','http://nowhere.invalid:9000'])
def test_a_server_or_host_that_is_not_there_is_named(s3, endpoint):
    with pytest.raises(StoreUnavailable, match=f's3://{s3.bucket}/pets.*attempt'):
        ShardStore(url(s3), timeout=.5, storage_options={**opts(s3), 'endpoint_url':endpoint})

@pytest.fixture
def tokens(s3, proxy, tmp_path, monkeypatch):
    "A function that puts a token into the file of credentials; the proxy takes only that one"
    monkeypatch.setattr('moto.settings.INITIAL_NO_AUTH_ACTION_COUNT', ALWAYS)   # only the proxy looks at tokens
    good = []
    def give(token):
        good[:] = [token]
        (tmp_path/'credentials').write_text(f'[default]\naws_access_key_id = {s3.key}\n'
            f'aws_secret_access_key = {s3.secret}\naws_session_token = {token}\n')
    give('one')
    proxy.fail(400, 'ExpiredToken', n=ALWAYS, match=lambda req: req.headers.get('x-amz-security-token')!=good[0])
    return give

@processes
def test_credentials_that_expire_in_an_epoch_are_read_again_in_workers(s3, proxy, tokens):
    store = ShardStore(url(s3), cache=None, storage_options=dict(endpoint_url=proxy.endpoint))
    # workers are at most 10 batches ahead, of more than 30
    dls,seen = loaders(store, num_workers=2, prefetch=2, bs=2),[]
    for k,(_,y) in enumerate(dls.train.new(drop_last=False)):
        seen += y.long().tolist()
        if k==1: tokens('two')
    assert sorted(seen+ids(dls.valid))==list(range(N))
    assert 0<sum(o[3]==400 for o in proxy.log)<=90   # one burst of ranges a process

def test_of_many_threads_that_are_refused_at_the_same_time_all_go_on(s3, proxy, tokens):
    store = ShardStore(url(s3), cache=None, storage_options=dict(endpoint_url=proxy.endpoint))
    store.get_many(range(N), 'id')
    for day in ('two','three'):
        tokens(day)
        with ThreadPoolExecutor(8) as ex:
            assert sum(len(o['jpg']) for o in ex.map(lambda i: store.get_many([i], 'jpg'), range(64)))==64

# --- ingests that meet, die, or find the server busy

def test_nothing_is_sent_that_servers_without_the_newer_checksums_do_not_know(s3, proxy):
    "Requests of an ingest fail now and then, and it writes the same"
    headers = []
    proxy.fail(0, '', n=ALWAYS, match=lambda request: request[:3]!='POS' and headers.extend(request.headers))
    for match in 'PUT ','DELETE ': proxy.fail(503, 'SlowDown', match=match)
    assert make(s3, 'busy', ITEMS[:20], proxy).written==20 and is_right(opened(s3, folder='busy'), range(20))
    assert not any(fault.n for fault in proxy.faults[1:])
    assert headers and not any('checksum' in name.lower() or 'trailer' in name.lower() for name in headers)

_ingest = HOLD + '''
import joblib, sys
from fastai_remote import to_shards
def fn(o):
    hold()
    if o['id']>40: open(sys.argv[2], 'w').close()
    return {'txt':f"sample {o['id']} "*30, 'cls':'abc'[o['id']%3], 'id':o['id']}
joblib.parallel_config('multiprocessing')   # forks, which need not import anything
to_shards([{'id':i} for i in range(240)], sys.argv[1], fn=fn, num_workers=2, maxcount=30, progress=False)
'''

@processes
def test_a_killed_ingest_is_finished_by_the_same_call(s3, tmp_path, monkeypatch, interpreters):
    "While it lives nobody else may write there; afterwards the bytes are those of an ingest that was not killed"
    (script:=tmp_path/'ingest.py').write_text(_ingest)
    how(s3, tmp_path, monkeypatch, 'environment')
    begun = tmp_path/'begun'   # until then, the server is not asked
    def ingest(hold=None):
        return interpreters.start(script, url(s3, 'killed'), begun, fastai=False, env=holding(hold, tmp_path/'never'))
    first = ingest(80)   # what the leading process has looked at, one or two chunks of each worker, and a part
    try:
        wait_for(lambda: begun.exists() and any('chunk-' in key for key in keys(s3, 'killed')))
        writing = rf'killed: process {first.pid} on .* is writing here now \(\d of 8 chunks done\)'
        with pytest.raises(StoreBusy, match=writing): make(s3, 'killed')
        with pytest.raises(StoreNotFound, match='not finished'): opened(s3, folder='killed')
    finally: first.kill()
    second = ingest()
    samples = [{'txt':f'sample {i} '*30, 'cls':'abc'[i%3], 'id':i} for i in range(240)]
    to_shards(samples, url(s3, 'whole'), num_workers=1, maxcount=30, progress=False)
    assert first.wait().returncode==-9 and second.wait().returncode==0
    assert alike(objects(s3, 'killed'), objects(s3, 'whole'))

def test_of_two_ingests_that_begin_at_the_same_moment_one_writes(s3):
    "The other is told to wait, or that the dataset is there"
    def go(_):
        try: return make(s3, 'both', ITEMS[:20]).written
        except (StoreBusy,StoreExists): return 0
    with ThreadPoolExecutor(2) as ex: written = list(ex.map(go, range(2)))
    assert sorted(written)==[0,20] and is_right(opened(s3, folder='both'), range(20))

def test_a_large_shard_is_uploaded_in_parts(s3, proxy, monkeypatch):
    "One that fails is sent again, and no part is left behind; parts of 5 MiB are the smallest there are"
    monkeypatch.setattr('s3fs.core.calculate_chunksize', lambda size, chunksize=None, max_parts=0: 5<<20)
    items = [{'bin':random.Random(i).randbytes(1<<20), 'id':i} for i in range(11)]
    fault = proxy.fail(503, 'SlowDown', n=1, match='partNumber=2')
    assert make(s3, 'parts', items, proxy, maxcount=11).written==11 and fault.n==0
    assert sum(o[0]=='PUT' and 'partNumber=' in o[1] for o in proxy.log)>=5
    got = opened(s3, folder='parts').get_many(range(11), ['bin','id'], check=True)
    assert got['bin']==[items[i]['bin'] for i in got['id'].tolist()]
    assert not s3.client().list_multipart_uploads(Bucket=s3.bucket).get('Uploads')

def test_more_files_than_a_page_of_a_list_has(s3, proxy, monkeypatch):
    "Written, resumed, read, deleted; a page of S3 has 1,000"
    monkeypatch.setenv('MOTO_S3_DEFAULT_MAX_KEYS', '5')
    n = 12   # shards; each has an index, too
    items,kw = [{'id':i} for i in range(n)],dict(maxcount=1, chunk=4, shuffle=False)
    fault = proxy.fail(403, 'AccessDenied', n=ALWAYS, match='shard-000002')
    with pytest.raises(StoreUnavailable, match='refused'): make(s3, 'many', items, proxy, **kw)
    fault.n = 0
    assert make(s3, 'many', items, proxy, **kw).resumed==8
    assert sum('continuation-token' in path for _,path,*_ in proxy.log)>0
    assert opened(s3, folder='many').get_many(range(n), 'id', check=True)['id'].tolist()==list(range(n))
    assert len(keys(s3, 'many'))==2*n+2
    ShardStore.delete(url(s3, 'many'), storage_options=opts(s3))
    assert not keys(s3, 'many')

# --- secrets

def says_none(s, *texts):
    "Assert that no secret is in `texts`, which may be bytes"
    for t in texts: assert s.secret.encode() not in (t if isinstance(t, bytes) else str(t).encode()), t

def test_secrets_are_in_nothing_that_is_kept(s3, proxy, tmp_path, caplog):
    "Not in what is shown, logged, pickled or stored, nor in what an ingest that is refused leaves, or says"
    caplog.set_level(logging.DEBUG, 'fastai_remote')
    options = s3_options(s3.endpoint, s3.key, s3.secret)
    store = ShardStore(url(s3), cache=str(tmp_path/'c'), storage_options=options)
    dls = loaders(store)
    assert epoch(dls)==list(range(N))
    shown = store,store.storage,store.cache,dls.train,dls.train_ds,store.opener(),store.manifest,options
    says_none(s3, *map(repr, shown), store._repr_html_(), store.manifest.to_json().decode(), caplog.text)
    says_none(s3, *map(pickle.dumps, (store, store.storage, dls, options)), *objects(s3, 'pets').values())
    says_none(s3, *(path.read_bytes() for path in (tmp_path/'c').rglob('*') if path.is_file()))
    proxy.fail(403, 'AccessDenied', n=ALWAYS, match='chunk-000003')
    with joblib.parallel_config('multiprocessing'), pytest.raises(StoreUnavailable, match='refused: Access') as e:
        make(s3, 'half', at=proxy, num_workers=2)
    left = objects(s3, 'half')
    assert any('.ingest/plan' in name for name in left)
    says_none(s3, repr(e.value), ''.join(traceback.format_exception(e.value)), *left.values())
    assert make(s3, 'half').written==N and alike(objects(s3, 'pets'), objects(s3, 'half'))

def test_a_store_from_a_pickle_takes_its_secrets_from_the_environment(s3, tmp_path, monkeypatch):
    "It says what to set, and then it works"
    saved = pickle.dumps(opened(s3))
    with pytest.raises(StoreUnavailable, match='secrets are not kept in exports.*AWS_ACCESS_KEY_ID'):
        pickle.loads(saved).get_many([0], 'jpg')
    how(s3, tmp_path, monkeypatch, 'environment')
    monkeypatch.delenv('AWS_ENDPOINT_URL')   # it is no secret, and in the pickle
    assert len(pickle.loads(saved).get_many([0], 'jpg')['jpg'])==1
    says_none(s3, pickle.dumps(pickle.loads(saved)))
