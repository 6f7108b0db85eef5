"The page of a dataset: what it answers, to whom, and what becomes of marks"
import http.client, io, json, os, re, signal, threading, tracemalloc
from urllib.parse import quote, urlencode, urlsplit

import numpy as np
import pytest
import redis
from PIL import Image

from clusters import wait_for
from in_memory import Counted
from inputs import Computed, scattered, write_tar
from webserver import jupyter_proxy, WebServer
from fastai_remote import index_shards, MemoryStore, RedisStore, ShardStore, to_redis, to_shards
from fastai_remote.core import CorruptSample
from fastai_remote.view.browser import View
from fastai_remote.view.query import Answer, Query

OPTIONS = dict(num_workers=0, progress=False, shuffle=False)
SCRIPTS = 'page.js','grid.js','dom.js','overview.js'
N = 40

def sample(i):
    image = Image.fromarray(np.full((24, 36, 3), 5*i, np.uint8))
    return {'png':image, 'cls':['cat','dog','owl'][i%3], 'txt':f'Picture {i} <b>of</b> {"snow" if i%8==0 else "sun"}',
            'loss.f4':np.nan if i==5 else i*7%N/8, '__key__':f'pet-{i:03}'}

SAMPLES = {'train':[sample(i) for i in range(30)], 'valid':[sample(i) for i in range(30, N)]}

@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    "The folder of marks is the test's own"
    monkeypatch.setenv('XDG_STATE_HOME', str(tmp_path/'state'))
    return tmp_path/'state'

@pytest.fixture(scope='module')
def pets(server): return to_redis(SAMPLES, server.url, 'pets', **OPTIONS).store

@pytest.fixture
def view():
    "A function that serves the page of a store; all are closed at the end"
    views = []
    def of(store, **options):
        views.append(View(store, **options))
        return views[-1]
    yield of
    for o in views: o.close()

def request(view, name, body=None, method=None, path=None, **headers):
    "The response to a request, and its content"
    parts = urlsplit(view.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port)
    if body is not None: headers = {'Content-Type':'application/json', **headers}
    connection.request(method or ('GET' if body is None else 'POST'), (parts.path if path is None else path)+name,
                       None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response,content

def answer_of(view, name, body=None):
    response,content = request(view, name, body)
    assert response.status==200, content
    return json.loads(content)
def get(view, name, **args): return answer_of(view, f'{name}?{urlencode(args)}')
def post(view, name, **args): return answer_of(view, name, args)

def found(view, **query):
    "The numbers of the samples that a query finds, in their order"
    id = post(view, 'query', query=query)['id']
    wait_for(lambda: get(view, 'progress', id=id)['state']!='running')
    progress = get(view, 'progress', id=id)
    assert progress['state']=='done', progress
    return [tile['number'] for tile in get(view, 'tiles', first=0, n=progress['n'], id=id)]

def changed(view):
    "Waits for the end of a change; returns it"
    wait_for(lambda: get(view, 'changes')['change']['state']!='running')
    return get(view, 'changes')['change']

# --- Who is answered

def test_only_who_has_the_address_is_answered(pets, view):
    page = view(pets, edit=True)
    host = urlsplit(page.url).netloc
    status = lambda *args, **headers: request(page, *args, **headers)[0].status
    for path in '/', '/dataset', '/page.js', f"/{'x'*32}/dataset", urlsplit(page.url).path[:-2]+'/dataset':
        assert request(page, '', path=path)[0].status==403
    for bad in 'evil.example', f'evil.example:{page._server.port}', '169.254.1.1', '[':
        assert status('dataset', Host=bad)==403
    for good in host, 'localhost:9999', '[::1]:80', 'LOCALHOST': assert status('dataset', Host=good)==200
    mark = {'number':1, 'value':True}
    for bad in 'http://evil.example', 'null', 'http://localhost:1':
        assert status('dataset', Origin=bad)==403 and status('mark', mark, Origin=bad)==403
    assert status('mark', mark, **{'Content-Type':'text/plain'})==400 and not page.marked['drop']
    assert status('mark', mark, Origin=f'http://{host}')==200 and page.marked['drop']==[1]
    assert status('mark', mark, Host='localhost:9999', Origin='http://localhost:9999')==200   # a port that is forwarded
    assert status('mark', mark, Host='localhost:9999', Origin='http://localhost:9998')==403
    response,_ = request(page, '', path=urlsplit(page.url).path[:-1])
    assert response.status==308 and response.headers['Location']==f'{page._server.token}/'

def test_headers_forbid_scripts_of_others(pets, view):
    page = view(pets)
    for name in '', *SCRIPTS, 'page.css', 'dataset', 'tiles?first=0&n=3', 'picture?number=2', 'nothing':
        response,content = request(page, name)
        policy = response.headers['Content-Security-Policy']
        assert "default-src 'none'; script-src 'self';" in policy and 'unsafe' not in policy
        assert response.headers['X-Content-Type-Options']=='nosniff'
        assert response.headers['Referrer-Policy']=='no-referrer' and response.headers['Cache-Control']=='no-store'
        # nothing is loaded from elsewhere, and no HTML is made of data
        if name in ('','page.css',*SCRIPTS):
            assert not any(word in content for word in (b'http:', b'https:', b'innerHTML', b'<style', b' onclick='))

@pytest.mark.parametrize('keeps_host', [True,False], ids=['keeps the host','is the host'])
def test_a_proxy_serves_the_page_under_its_own_name(pets, view, keeps_host):
    "As Jupyter's proxy does, which keeps the header `Host`; others replace it"
    with WebServer(jupyter_proxy('/user/me/proxy', keeps_host)) as proxy:
        hub = f'hub.lab:{proxy.server_port}'
        page = view(pets, proxy=f'https://{hub}/user/me/proxy/', height=500, edit=True)
        assert page.url==f'https://{hub}/user/me/proxy/{page._server.port}/{page._server.token}/'
        assert f'<iframe src="{page.url}" width="100%" height="500"' in page._repr_html_()
        def status(name, body=None, o=page, host=hub, **headers):
            path = f'/user/me/proxy/{o._server.port}/{o._server.token}'
            return request(proxy, name, body, path=path, Host=host, **headers)
        for name in '/', '/page.js', '/dataset', '/tiles?first=0&n=3', '/picture?number=2':
            assert status(name)[0].status==200, name
        response,_ = status('')
        assert response.status==308 and response.headers['Location']==f'{page._server.token}/'   # relative
        assert f'https://{hub} ' in response.headers['Content-Security-Policy']
        mark = {'number':1, 'value':True}
        assert status('/mark', mark, Origin=f'https://{hub}')[0].status==200 and page.marked['drop']==[1]
        for origin in 'https://evil.example', 'https://hub.lab', f'https://hub.lab:{page._server.port}', 'null':
            assert status('/mark', mark, Origin=origin)[0].status==403, origin
        assert request(proxy, '/dataset', path=f'/user/me/proxy/{page._server.port}', Host=hub)[0].status==403
        if not keeps_host: return
        response,content = status('/dataset', o=view(pets))
        assert response.status==403 and b'proxy= names the address of a proxy' in content
        assert status('/dataset', host='evil.example')[0].status==403

def test_nothing_outside_the_dataset_is_read(pets, view):
    page = view(pets)
    paths = '../browser.py','..%2fbrowser.py','page/page.js','/etc/passwd','nothing','__init__','store','close'
    for name in paths: assert request(page, quote(name, safe='/%.'))[0].status==404
    wrong = ('picture?number=1e9','picture?number=-1','sample?number=40','sample?number=x','sample','tiles?first=0',
             'tiles?first=0&n=2&other=3','position?number=x','picture?number=1&size=x')
    for name in wrong:
        assert request(page, name)[0].status==422, name
    for name in 'sound?number=1&field=txt','sound?number=1&field=a.wav': assert request(page, name)[0].status==404
    queries = ({'split':'none'}, {'other':1}, {'text':3}, [], {'low':'1'}, {'label_field':'cls','label':'cow'},
               {'sort':'txt'}, {'has':'xyz'})
    for body in {}, *({'query':query} for query in queries): assert request(page, 'query', body)[0].status==422, body
    assert request(page, 'tiles?first=0&n=1&id=gone')[0].status==410
    assert request(page, 'dataset?uid=other')[0].status==409

# --- What is shown

def test_samples_are_shown_with_all_that_is_known_of_them(pets, view):
    page = view(pets)
    about = get(page, 'dataset')
    assert about['n']==N and about['labels']=={'cls':['cat','dog','owl']}
    assert about['splits']=={'train':[0,30],'valid':[30,40]}
    tiles = get(page, 'tiles', first=28, n=400)
    assert [tile['number'] for tile in tiles]==list(range(28, N)) and tiles[0]['key']=='pet-028'
    assert tiles[2]['title']=='cat' and tiles[2]['picture'].startswith('data:image/')
    one = get(page, 'sample', number=33)
    fields = {field['name']:field for field in one['fields']}
    assert one['split']=='valid' and one['key']=='pet-033' and one['has_picture']
    assert fields['txt']['text']=='Picture 33 <b>of</b> sun' and fields['txt']['checksum']=='checksum matches'
    assert fields['txt']['where']=='key pets:txt:33' and fields['txt']['nbytes']==24
    assert eval(one['python'], {'RedisStore':RedisStore})['txt']==SAMPLES['valid'][3]['txt']
    response,content = request(page, 'picture?number=33&size=64')
    assert response.headers['Content-Type'] in ('image/png','image/jpeg')
    assert Image.open(io.BytesIO(content)).size==(36,24)
    wait_for(lambda: get(page, 'overview')['state']=='done')
    assert get(page, 'overview')['result']['labels']['cls']['most']==[['cat',14],['dog',13],['owl',13]]

def test_numbers_in_tiles_have_names(view):
    page = view(MemoryStore({'txt':[b'some'], 'age.f4':np.ones(1, 'f4'), 'n.i4':np.ones(1, 'i4')}))
    assert get(page, 'tiles', first=0, n=1)[0]['text']=='some\nage.f4: 1\nn.i4: 1'

def test_filters_and_sorts(pets, view):
    page = view(pets)
    losses = np.array([i*7%N/8 for i in range(N)], np.float32)
    losses[5] = np.nan
    assert found(page)==list(range(N)) and found(page, split='valid')==list(range(30, N))
    assert page.selection==range(30, N)
    assert found(page, label_field='cls', label='dog')==list(range(1, N, 3))
    assert found(page, range_field='loss.f4', low=1, high=2)==np.flatnonzero((losses>=1)&(losses<=2)).tolist()
    assert found(page, range_field='loss.f4', high=1.)==np.flatnonzero(losses<=1).tolist()
    assert found(page, text='SNOW')==list(range(0, N, 8))
    assert found(page, key='pet-017')==[17] and found(page, key='x')==[]
    assert found(page, split='train', label_field='cls', label='cat', text='snow')==[0, 24]
    order = np.argsort(losses, kind='stable').tolist()   # what is no number is at the end
    assert found(page, sort='loss.f4')==order and page.selection.tolist()==order
    assert found(page, sort='loss.f4', descending=True)==[*order[-2::-1], 5]
    cats = [i for i in order if i>=30 and i%3==0]
    assert found(page, sort='loss.f4', split='valid', label_field='cls', label='cat')==cats
    id = post(page, 'query', query={'sort':'loss.f4'})['id']
    wait_for(lambda: get(page, 'progress', id=id)['state']!='running')
    assert get(page, 'position', number=order[7], id=id)=={'position':7}
    assert get(page, 'tiles', first=0, n=1, id=id)[0]['sorted']=='0'

@pytest.mark.parametrize('dtype', ['i1','i2','i8','u1','u4','u8','f2','f4','f8'])
def test_sorts_of_all_kinds_of_numbers(dtype):
    rng,kind = np.random.default_rng(0),np.dtype(dtype)
    if kind.kind=='f': values = rng.normal(size=500).astype(kind)
    else: values = rng.integers(np.iinfo(kind).min, np.iinfo(kind).max, 500, kind, endpoint=True)
    if kind.kind=='f': values[:6] = [0., -0., np.inf, -np.inf, 1, 1]
    store = MemoryStore({f'x.{dtype}':values})
    for descending in False,True:
        answer = Answer(store, Query(sort=f'x.{dtype}', descending=descending))
        answer.job.thread.join()
        order = answer.samples.numbers(0, 500)
        expected = np.argsort(values, kind='stable')
        if descending: expected = 499-np.argsort(values[::-1], kind='stable')[::-1]
        assert np.array_equal(order, expected) or np.array_equal(values[order], values[expected])

TAGS = {split:[{'txt':f'{i}', 'cls':'ab'[i%2], 'kind.cls':i%4, 'labels':['x','"y"'][:i%3]} for i in numbers]
        for split,numbers in (('train',range(12)), ('valid',range(12, 20)))}

def test_fields_with_several_labels_are_filtered_counted_and_corrected(put, view):
    page = view(put(TAGS, shuffle=False)[0], edit=True)
    assert get(page, 'dataset')['labels']=={'cls':['a','b'], 'kind.cls':['0','1','2','3'], 'labels':['"y"','x']}
    assert found(page, label_field='labels', label='x')==[i for i in range(20) if i%3]
    assert found(page, label_field='labels', label='"y"', split='valid')==[14,17]
    assert found(page, label_field='kind.cls', label='3')==[3,7,11,15,19]
    wait_for(lambda: get(page, 'overview')['state']=='done')
    assert get(page, 'tiles', first=3, n=1)[0]['text']=='3'
    one = get(page, 'sample', number=2)
    assert eval(one['python'], {'RedisStore':RedisStore, 'ShardStore':ShardStore})['txt']=='2'
    one = {field['name']:field for field in one['fields']}
    assert re.search(r'key .*txt:2|\.tar at byte', one['txt']['where'])
    labels = get(page, 'overview')['result']['labels']
    assert labels['labels']['most']==[['x',13],['"y"',6]]
    assert labels['labels']['in_splits']=={'train':[8,4],'valid':[5,2]}
    assert labels['kind.cls']['in_splits']=={'train':[3]*4,'valid':[2]*4}
    assert one['labels']['labels']==['x','"y"'] and one['cls']['labels'] is None
    post(page, 'mark', number=2, field='labels', value=['x','z'])
    post(page, 'mark', number=3, field='labels', value=[])
    post(page, 'mark', number=5, field='kind.cls', value='9')
    for field,value in ('labels','x'), ('labels',['']), ('labels',[1]), ('kind.cls','x'), ('cls',['a']), ('txt','a'):
        assert request(page, 'mark', {'number':1, 'field':field, 'value':value})[0].status==422
    post(page, 'apply')
    assert changed(page)['state']=='done'
    store = page.store.reopened()
    assert (store[2]['labels'], store[3]['labels'], store[5]['kind.cls'])==(['x','z'],[],9)
    assert store.class_counts('labels')=={'"y"':5,'x':13,'z':1} and store.class_counts('kind.cls')[9]==1

def test_samples_that_have_a_field_or_lack_its_numbers(tmp_path, view):
    members = [(f'{i:02}.{field}', b'%d' % i) for i in range(20) for field in ('txt','cls') if field=='txt' or i%3]
    page = view(index_shards([str(write_tar(tmp_path/'a.tar', members))], tmp_path/'index', progress=False).store)
    assert found(page, has='cls')==[i for i in range(20) if i%3]
    assert found(page, has='txt', text='1')[:3]==[1, 10, 11]
    assert found(page, range_field='cls', low=10)==[16, 17, 19]   # codes
    assert found(page, sort='cls', descending=True)==[i for i in range(19, 0, -1) if i%3]+list(range(0, 20, 3))

def test_a_search_shows_its_first_hits_while_it_goes_on_and_can_be_cancelled(view):
    reached,go_on = threading.Event(),threading.Event()
    class Slow(MemoryStore):
        def read_values(self, numbers, fields):
            if len(numbers) and numbers[0]>=4096 and len(numbers)>100:
                reached.set()
                go_on.wait()
            return super().read_values(numbers, fields)
    page = view(Slow({'txt':[b'yes' if i%1000==0 else b'no' for i in range(20_000)]}))
    id = post(page, 'query', query={'text':'yes'})['id']
    reached.wait()
    progress = get(page, 'progress', id=id)
    assert progress['state']=='running' and progress['n']==5 and (progress['done'],progress['of'])==(4096,20_000)
    assert [tile['number'] for tile in get(page, 'tiles', first=0, n=9, id=id)]==[0, 1000, 2000, 3000, 4000]
    post(page, 'cancel', id=id)
    go_on.set()
    wait_for(lambda: get(page, 'progress', id=id)['state']=='cancelled')
    assert len(page.selection)<20
    assert post(page, 'query', query={'text':'yes'})['state'] in ('running','done')   # asked again, it is found anew

def test_small_texts_beside_large_images_are_read_many_at_once():
    store = Counted({'labels':[b'["x"]']*20_000, 'txt':[b'text']*20_000}, vocab={'labels':['x']})
    store.manifest.nbytes = 20_000*1_000_000   # with images
    answer = Answer(store, Query(label_field='labels', label='x', text='e'))
    answer.job.thread.join()
    assert len(answer.samples)==20_000 and store.reads[0]==8 and len(store.reads)==2*6

@pytest.mark.slow
def test_a_sort_of_fifty_million_takes_at_most_600_mb():
    n = 50_000_000
    tracemalloc.start()
    answer = Answer(Computed(n, {'x.f4':scattered('f4')}), Query(sort='x.f4', descending=True))
    answer.job.thread.join()
    most = tracemalloc.get_traced_memory()[1]
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert answer.progress()['state']=='done' and len(answer.samples)==n and most<600e6 and kept<220e6
    some = answer.samples.numbers(1_000_000, 1000)
    assert (np.diff(scattered('f4')(some))<=0).all()
    answer = Answer(Computed(n, {'x.f8':scattered('f8')}), Query(sort='x.f8'))
    answer.job.thread.join()
    progress = answer.progress()
    assert progress['state']=='failed' and 'choose fewer samples with a filter first' in progress['error']

# --- What is damaged or away

def test_a_damaged_sample_shows_its_error_in_its_tile(fresh, view):
    store = to_redis(SAMPLES, fresh.url, 'pets', **OPTIONS).store
    redis.from_url(fresh.url).set('pets:png:3', b'damaged')
    redis.from_url(fresh.url).delete('pets:txt:4')
    page = view(store, edit=True)
    tiles = get(page, 'tiles', first=0, n=8)
    assert [bool(tile['errors']) for tile in tiles]==[i in (3,4) for i in range(8)]
    assert 'do not match' in tiles[3]['errors'][0]
    fields = {field['name']:field for field in get(page, 'sample', number=3)['fields']}
    assert fields['png']['kind']=='error' and fields['png']['checksum']=='damaged or missing' and fields['txt']['text']
    assert found(page, text='snow')==list(range(0, N, 8))
    id = post(page, 'query', query={'text':'snow'})['id']
    assert get(page, 'progress', id=id)['note']=='1 sample could not be read: 4'
    assert post(page, 'mark', number=3, value=True)['drop']==[3]   # what is damaged can be dropped

def test_numbers_that_are_damaged_are_named_and_left_out(fresh, view):
    store = to_redis(SAMPLES, fresh.url, 'pets', **OPTIONS).store
    for number in 7, 31: redis.from_url(fresh.url).setrange('pets:loss.f4#0', 8*number, b'\1\2\3')
    page = view(store)
    losses = [i*7%N/8 for i in range(N)]
    query = dict(range_field='loss.f4', low=1, high=3)
    assert found(page, **query)==[i for i,loss in enumerate(losses) if 1<=loss<=3 and i not in (5,7,31)]
    id = post(page, 'query', query=query)['id']
    assert get(page, 'progress', id=id)['note']=='2 samples could not be read: 7, 31'
    assert found(page, sort='loss.f4')[-3:]==[5,7,31]
    class Damaged(Computed):
        def read_values(self, numbers, fields): raise CorruptSample('damaged')
    answer = Answer(Damaged(3000, {'x.f4':scattered('f4')}), Query(range_field='x.f4', low=1))
    answer.job.thread.join()
    progress = answer.progress()
    assert progress['state']=='failed'
    assert progress['error'].startswith('1,000 samples could not be read: 0, 1, 2, 3, 4, …')
    assert '`store.verify()` says which others' in progress['error']

def test_a_server_that_is_away_is_an_error_until_it_is_back(fresh, view):
    to_redis(SAMPLES, fresh.url, 'pets', **OPTIONS)
    page = view(RedisStore(fresh.url, 'pets', timeout=.2, socket_timeout=.1))
    os.kill(fresh.proc.pid, signal.SIGSTOP)
    response,content = request(page, 'tiles?first=0&n=4')
    os.kill(fresh.proc.pid, signal.SIGCONT)
    assert response.status==503 and 'pets' in json.loads(content)['error'] or fresh.url in json.loads(content)['error']
    assert len(get(page, 'tiles', first=0, n=4))==4

# --- Corrections

def test_marks_survive_a_restart_and_are_applied_as_a_new_version(server, view, state):
    store = to_redis(SAMPLES, server.url, 'corrected', **OPTIONS).store
    first = view(store, edit=True)
    post(first, 'mark', number=2, value=True)
    post(first, 'mark', number=7, field='cls', value='owl')
    post(first, 'mark', number=8, field='cls', value='fox')
    post(first, 'mark', number=9, value=True)
    post(first, 'mark', number=9, value=None)
    call = post(first, 'mark', number=10, value=True)['call']
    assert call=="store.edit(drop=[2, 10], set={'cls': {7: 'owl', 8: 'fox'}})"
    post(first, 'undo')
    first.close()
    file, = (state/'fastai_remote'/'marks').iterdir()
    with open(file, 'ab') as f: f.write(b'{"number": 3')   # a process was killed
    page = view(RedisStore(server.url, 'corrected'), edit=True)
    assert page.marked=={'drop':[2], 'set':{'cls':{7:'owl', 8:'fox'}}} and file.stat().st_mode&0o77==0
    assert post(page, 'mark', number=7, field='cls', value='cat')['set']['cls']['7']=='cat'
    assert post(page, 'undo')['set']['cls']['7']=='owl' and store.class_counts()=={'cat':14,'dog':13,'owl':13}
    post(page, 'apply')
    assert changed(page)['state']=='done'
    new = RedisStore(server.url, 'corrected')
    assert len(new)==N-1 and new[6]['cls']=='owl' and new[7]['cls']=='fox' and page.store.manifest.uid==new.manifest.uid
    assert page.marked=={'drop':[], 'set':{}} and not file.exists() and get(page, 'dataset')['n']==N-1
    assert request(page, f'dataset?uid={store.manifest.uid}')[0].status==409   # a page of the version before opens anew

class SlowEdit(RedisStore):
    "Changes its dataset when it is told to"
    def edit(self, drop, set, progress):
        def wait(done, of):
            self.reached.set()
            self.go_on.wait()
            progress(done, of)
        return super().edit(drop, set, wait)

def slow_edit(url, name):
    store = SlowEdit(url, name)
    store.reached,store.go_on = threading.Event(),threading.Event()
    return store

def test_a_page_is_used_while_a_change_is_applied_and_can_cancel_it(server, view):
    to_redis(SAMPLES, server.url, 'slow', **OPTIONS)
    store = slow_edit(server.url, 'slow')
    page = view(store, edit=True)
    for number in range(5): post(page, 'mark', number=number, field='cls', value='owl')
    for end in 'cancelled','done':
        store.reached.clear()
        store.go_on.clear()
        assert post(page, 'apply')['change']['state']=='running'
        store.reached.wait()
        assert len(get(page, 'tiles', first=0, n=9))==9 and found(page, label_field='cls', label='owl')[0]==2
        assert request(page, 'mark', {'number':6, 'value':True})[0].status==409
        if end=='cancelled': post(page, 'cancel', id='change')
        store.go_on.set()
        change = changed(page)
        assert change['state']==end and len(page.marked['set'].get('cls', ()))==(5 if end=='cancelled' else 0)
        assert store.reopened().class_counts()['owl']==(13 if end=='cancelled' else 17)
    assert (change['done'],change['of'],change['note'])==(10,10,'')

@pytest.mark.parametrize('has_keys', [True,False])
def test_marks_are_carried_over_to_a_newer_version(server, view, has_keys):
    def of(o): return {field:value for field,value in o.items() if has_keys or field!='__key__'}
    samples = {split:list(map(of, some)) for split,some in SAMPLES.items()}
    samples['train'][20] = dict(samples['train'][21])   # the same twice: which of them was meant?
    name = f'carried-{has_keys}'
    store = to_redis(samples, server.url, name, **OPTIONS).store
    page = view(store, edit=True)
    for number in 3, 12, 20, 35: post(page, 'mark', number=number, value=True)
    post(page, 'mark', number=13, field='cls', value='owl')
    RedisStore(server.url, name).edit(drop=[0, 12], set={'cls':{13:'cat'}})
    response,content = request(page, 'apply', {})
    assert response.status==409 and json.loads(content)['is_newer'] and len(page.marked['drop'])==4
    post(page, 'reopen')
    note = changed(page)['note']
    assert page.marked=={'drop':[2, 33], 'set':{'cls':{11:'owl'}}}
    assert note.startswith('2 of 5 marks could not be carried')
    post(page, 'apply')
    assert changed(page)['state']=='done' and len(RedisStore(server.url, name))==N-4

def test_what_cannot_be_changed_is_not_changed(pets, view, tmp_path):
    page = view(pets)
    for name,body in ('mark',{'number':1,'value':True}), ('undo',{}), ('apply',{}), ('reopen',{}):
        assert request(page, name, body)[0].status==403
    with pytest.raises(TypeError, match='a MemoryStore cannot be changed'): View(MemoryStore({'txt':[b'a']}), edit=True)
    page = view(pets, edit=True)
    for body in ({'number':N,'value':True}, {'number':1,'field':'txt','value':'a'}, {'number':'x','value':True},
                 {'number':1,'field':'cls','value':''}, {'number':1,'field':'cls','value':3}):
        assert request(page, 'mark', body)[0].status==422, body
    assert page.marked=={'drop':[], 'set':{}}
