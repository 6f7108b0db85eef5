"The page of a dataset in Chromium: fifty million samples, corrections, and a dataset that attacks"
import os, shutil, signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clusters import wait_for
from fastai_remote import MemoryStore, RedisStore, to_redis
from fastai_remote.view.browser import View
from faultproxy import FaultProxy
from inputs import Computed, encoded, png_of, scattered
from test_view import slow_edit
from webserver import jupyter_proxy, WebServer

CHROMIUM,DRIVER = shutil.which('chromium'),shutil.which('chromedriver')
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('processes'),
              pytest.mark.skipif(not CHROMIUM or not DRIVER, reason='no chromium, or no chromedriver')]
OPTIONS = dict(num_workers=0, progress=False, shuffle=False)

def chromium(width=1280, height=800, dark=False):
    "A driver of Chromium without a window; it downloads nothing"
    from selenium import webdriver
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in 'headless=new', 'no-sandbox', 'disable-gpu', 'disable-dev-shm-usage', 'disable-background-networking': \
            options.add_argument(f'--{word}')
    options.set_capability('goog:loggingPrefs', {'browser':'ALL'})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    resize(driver, width, height)
    scheme = dict(name='prefers-color-scheme', value='dark' if dark else 'light')
    driver.execute_cdp_cmd('Emulation.setEmulatedMedia', dict(features=[scheme]))
    return driver

def resize(driver, width=1280, height=800):
    size = dict(width=width, height=height, deviceScaleFactor=1, mobile=width<500)
    driver.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', size)

def computed(n):
    "A store that makes its values from the number: one of 64 pictures, a label, and a loss"
    colours = [(k*37%255, k*91%255, k*13%255) for k in range(64)]
    pictures = [encoded(Image.new('RGB', (128,96), colour), 'JPEG') for colour in colours]
    made = {'jpg':lambda numbers: [pictures[i%64] for i in numbers.tolist()],
            'cls':lambda numbers: (numbers%8).astype(np.uint8), 'loss.f4':scattered('f4')}
    return Computed(n, made, splits=dict(train=[0,n-1000], valid=[n-1000,n]), vocab=dict(cls=list('abcdefgh')))

# Jumps to a sample by the field at the top; ends with the milliseconds until all tiles that are visible are there
JUMP = """const [n, done] = arguments, begun = performance.now(), field = document.getElementById('jump');
field.value = n;
field.dispatchEvent(new Event('change'));
(function look() {
  const tiles = [...document.querySelectorAll('.tile')];
  const isThere = tiles.some(tile => Number(tile.dataset.position)===n);
  if (isThere && tiles.every(tile => tile.querySelector('.shown').children.length)) done(performance.now()-begun);
  else requestAnimationFrame(look);
})();"""

class Page:
    "A page in Chromium"
    def __init__(self, driver, view, url=None):
        self.driver,self.view = driver,view
        driver.get('about:blank')
        driver.get(url or view.url)
        self.wait(lambda: self.all('.tile .shown > *'))

    def all(self, css): return self.driver.find_elements('css selector', css)
    def one(self, css): return self.driver.find_element('css selector', css)
    def text(self, css): return self.driver.execute_script("return document.querySelector(arguments[0]).innerText", css)
    def texts(self, css):
        script = 'return [...document.querySelectorAll(arguments[0])].map(o => o.innerText)'
        return self.driver.execute_script(script, css)
    def tiles(self): return self.driver.execute_script("""return [...document.querySelectorAll('.tile')]
        .map(o => [Number(o.dataset.position), o.innerText]).sort((a, b) => a[0]-b[0]).map(o => o[1])""")
    def keys(self, keys): self.one('body').send_keys(keys)
    def press(self, keys, text):
        "Press keys; then the page of the sample has the text"
        self.keys(keys)
        self.wait(lambda: text in self.text('#sample'))
    def go(self, hash): self.driver.execute_script("location.hash = arguments[0]", hash)
    def jump(self, n): return self.driver.execute_async_script(JUMP, n)
    def click(self, css): self.driver.execute_script("document.querySelector(arguments[0]).click()", css)
    def wait(self, condition):
        from selenium.common.exceptions import WebDriverException
        def holds():
            try: return condition()
            except (WebDriverException,IndexError): return False   # it is being drawn
        wait_for(holds, 30)

@pytest.fixture(scope='module')
def driver():
    driver = chromium()
    yield driver
    driver.quit()

@pytest.fixture
def page(driver, tmp_path, monkeypatch):
    "A function that shows a store in Chromium; the page has made no error when the test ends"
    monkeypatch.setenv('XDG_STATE_HOME', str(tmp_path/'state'))
    views = []
    def of(store, **options):
        views.append(View(store, **options))
        return Page(driver, views[-1])
    yield of
    driver.get('about:blank')
    resize(driver)
    for view in views: view.close()

def errors(driver):
    "What the page has complained about, without answers that are errors, which it shows"
    return [o['message'] for o in driver.get_log('browser') if 'Failed to load resource' not in o['message']]

def memory(*pids):
    "Private memory of processes, in bytes"
    def of(pid):
        try: lines = Path(f'/proc/{pid}/smaps_rollup').read_text().splitlines()
        except OSError: return 0   # it has ended
        return 1024*sum(int(line.split()[1]) for line in lines if line.startswith('Private'))
    return sum(map(of, pids))

def family(pid):
    "The process and all that it has started"
    try: tasks = list(Path(f'/proc/{pid}/task').iterdir())
    except OSError: return [pid]
    children = [int(child) for task in tasks for child in (task/'children').read_text().split()]
    return [pid, *(other for child in children for other in family(child))]

# --- Fifty million

def test_any_of_fifty_million_samples_is_shown_at_once(page, driver):
    "Memory stays flat over 40 jumps, and a jump is at most three requests"
    n,store = 50_000_000,computed(50_000_000)
    resize(driver, 700, 500)
    shown = page(store)
    assert shown.text('#count')=='50,000,000 samples'
    shown.jump(40_000_000)
    assert 'a\n40,000,000' in shown.tiles() and 'at=40000000' in driver.current_url
    places = np.random.default_rng(0).integers(0, n, 60).tolist()
    for place in places[:20]: shown.jump(place)
    driver.execute_cdp_cmd('HeapProfiler.collectGarbage', {})
    before,reads = memory(*family(os.getpid())),len(store.reads)
    for place in places[20:]: shown.jump(place)
    driver.execute_cdp_cmd('HeapProfiler.collectGarbage', {})
    assert len(store.reads)-reads<=40*3 and memory(*family(os.getpid()))-before<40e6
    assert len(shown.all('.tile'))<100
    # the scrollbar reaches both ends, and what moves less than a screen moves by pixels
    scroll = "document.getElementById('grid').scrollTop += arguments[0]"
    driver.execute_script(scroll, 1e9)
    shown.wait(lambda: '49,999,999' in shown.tiles()[-1])
    shown.jump(40_000_000)
    first = shown.tiles()[0]
    driver.execute_script(scroll, 250)
    shown.wait(lambda: '40,000,004' in shown.tiles()[0] and first!=shown.tiles()[0])
    assert not errors(driver)

def test_filters_sorts_and_addresses(page, driver):
    store = computed(1_000_000)
    shown = page(store)
    shown.click('#filters')
    shown.one('#label').send_keys('c')
    shown.one('#query button').click()
    shown.wait(lambda: shown.text('#count')=='125,000 of 1,000,000 samples')
    shown.wait(lambda: shown.tiles()[1]=='c\n10' and 'label=c' in driver.current_url)
    shown.go('split=valid&sort=-loss.f4')
    numbers = np.arange(999_000, 1_000_000)
    order = numbers[np.argsort(-scattered('f4')(numbers), kind='stable')]
    shown.wait(lambda: f'{order[0]:,}' in shown.tiles()[0] and shown.text('#count')=='1,000 of 1,000,000 samples')
    assert f'{order[1]:,}' in shown.tiles()[1]
    shown.go(f'split=valid&sort=-loss.f4&sample={order[3]}')   # the address of a colleague
    shown.wait(lambda: f'Sample {order[3]:,}' in shown.text('#sample'))
    shown.press('\ue014', f'Sample {order[4]:,}')   # right arrow
    assert f'sample={order[4]}' in driver.current_url and f'store[{order[4]}]' in shown.text('#sample code')
    shown.keys('\ue00c')
    shown.wait(lambda: shown.one('#grid').is_displayed())
    assert shown.view.selection.tolist()==order.tolist() and not errors(driver)

# --- Corrections

def test_marks_are_applied_and_the_new_version_is_shown(page, driver, server):
    samples = [{'png':Image.new('L', (20,20), 6*i), 'cls':['cat','dog'][i%2], '__key__':f'key {i}'} for i in range(40)]
    to_redis(samples, server.url, 'pets', **OPTIONS)
    shown = page(RedisStore(server.url, 'pets'), edit=True)
    shown.one('#jump').send_keys('key 5\n')
    shown.wait(lambda: shown.texts('.tile.at .number')==['key 5'])
    shown.click('[data-position="5"]')
    shown.wait(lambda: 'Sample 5' in shown.text('#sample'))
    shown.press('x', 'to be dropped')
    shown.press('\ue014', 'Sample 6')
    shown.press('2', 'becomes dog')
    shown.press('1', 'becomes cat')
    shown.press('u', 'becomes dog')
    driver.refresh()   # the address has the sample
    shown.wait(lambda: 'becomes dog' in shown.text('#sample') and 'Changes (2)' in shown.text('#bar'))
    shown.keys('\ue00c')
    shown.wait(lambda: shown.texts('.tile.bad .number')==['bad · key 5'] and shown.texts('.tile .set')==['dog'])
    shown.click('#show-changes')
    shown.wait(lambda: shown.text('#changes code')=="store.edit(drop=[5], set={'cls': {6: 'dog'}})")
    RedisStore(server.url, 'pets').edit(drop=[0])   # somebody else
    shown.click('#changes .main')
    shown.wait(lambda: 'newer version' in shown.text('#changes'))
    shown.click('#changes p button')
    shown.wait(lambda: '39 samples' in shown.text('#bar') and shown.one('#grid').is_displayed())
    shown.click('#show-changes')
    shown.wait(lambda: shown.text('#changes code')=="store.edit(drop=[4], set={'cls': {5: 'dog'}})")
    shown.click('#changes .main')
    shown.wait(lambda: '38 samples' in shown.text('#bar') and shown.one('#grid').is_displayed())
    shown.wait(lambda: 'dog\nkey 6' in shown.tiles() and not any('key 5' in tile for tile in shown.tiles()))
    new = RedisStore(server.url, 'pets')
    assert len(new)==38 and new[4]['cls']=='dog' and not errors(driver)

def test_labels_of_other_fields_are_corrected_and_the_page_stays_usable(page, driver, server):
    "A field that has several labels; while the change is applied, the page shows samples of the version before"
    samples = [{'txt':f'text {i}', 'cls':'ab'[i%2], 'labels':['in','out'][i%2:], 'boxes.labels':[]} for i in range(40)]
    to_redis(samples, server.url, 'several', **OPTIONS)
    store = slow_edit(server.url, 'several')
    shown = page(store, edit=True)
    shown.go('sample=3')
    shown.wait(lambda: shown.texts('#sample select option')==['cls','labels'])
    shown.driver.execute_script("""const field = document.querySelector('#sample select');
        field.value = 'labels'; field.dispatchEvent(new Event('change'))""")
    shown.wait(lambda: shown.texts('#sample .labels .main')==['2 out'])
    shown.press('1', 'becomes out, in')
    shown.keys('2')
    shown.wait(lambda: 'becomes in' in shown.text('#sample') and shown.texts('#sample .labels .main')==['1 in'])
    shown.one('#sample input').send_keys('new\n')
    shown.wait(lambda: 'becomes in, new' in shown.text('#sample'))
    shown.click('#show-changes')
    shown.wait(lambda: "set={'labels': {3: ['in', 'new']}}" in shown.text('#changes code'))
    shown.click('#changes .main')
    shown.wait(lambda: shown.one('#applying').is_displayed() and 'store.edit' in shown.text('#applying'))
    shown.keys('\ue00c')
    shown.jump(20)
    assert shown.one('#applying').is_displayed() and any('text 20' in tile for tile in shown.tiles())
    store.go_on.set()
    shown.wait(lambda: not shown.one('#applying').is_displayed() and shown.text('#show-changes')=='Changes')
    shown.go('label_field=labels&label=new')
    shown.wait(lambda: shown.text('#count')=='1 of 40 samples' and 'text 3' in shown.tiles()[0])
    assert RedisStore(server.url, 'several')[3]['labels']==['in','new'] and not errors(driver)

def test_a_server_that_comes_back_is_asked_again(page, driver, fresh):
    to_redis([{'txt':f'text {i}'} for i in range(5000)], fresh.url, 'texts', **OPTIONS)
    shown = page(RedisStore(fresh.url, 'texts', timeout=.3, socket_timeout=.2))
    os.kill(fresh.proc.pid, signal.SIGSTOP)
    shown.one('#jump').send_keys('4000\n')
    shown.wait(lambda: 'Trying again' in shown.text('#message'))
    os.kill(fresh.proc.pid, signal.SIGCONT)
    shown.wait(lambda: 'text 4000' in shown.text('#grid') and not shown.one('#message').is_displayed())

def test_a_proxy_and_a_forwarded_port_show_all_of_the_page(page, driver, server):
    "As Jupyter's proxy does, below a path of its own, and `ssh -L` at another port"
    to_redis([{'png':Image.new('L', (20,20), 6*i), 'cls':'ab'[i%2]} for i in range(30)], server.url, 'far', **OPTIONS)
    store = RedisStore(server.url, 'far')
    def use(shown, number):
        shown.jump(9)
        shown.click('[data-position="9"]')
        shown.wait(lambda: 'Sample 9' in shown.text('#sample') and shown.one('#sample .large img').is_displayed())
        shown.wait(lambda: driver.execute_script("return document.querySelector('.large img').naturalWidth>0"))
        shown.press('x', 'to be dropped')
        shown.click('#show-overview')
        shown.wait(lambda: 'Labels of cls' in shown.text('#overview'))
        shown.click('#show-changes')
        shown.click('#changes .main')
        shown.wait(lambda: f'{number} samples' in shown.text('#count') and shown.one('#grid').is_displayed())
        assert not errors(driver)
    with WebServer(jupyter_proxy('/user/me/proxy')) as proxy:
        use(page(store, edit=True, proxy=f'http://localhost:{proxy.server_port}/user/me/proxy'), 29)
    view = page(store.reopened(), edit=True).view
    with FaultProxy(('127.0.0.1', view._server.port)) as tunnel:
        use(Page(driver, view, f'http://localhost:{tunnel.port}/{view._server.token}/'), 28)

# --- Attacks

ATTACK = '<img src=x onerror="document.title=`attacked`"><script>document.title="attacked"</script>'
SVG = ('<svg xmlns="http://www.w3.org/2000/svg" onload="document.title=`attacked`"><script>document.title="attacked"'
       '</script></svg>')

def test_a_hostile_dataset_shows_text_and_errors_only(page, driver):
    html = f'{ATTACK}.txt'
    columns = {'png':[png_of(bytes(1<<20), 60_000, 60_000), encoded(Image.new('RGB', (9,9))), SVG.encode()],
               'txt':[ATTACK.encode(), SVG.encode(), b'"><script>1</script>'],
               'key.txt':[f'{ATTACK}{k}'.encode() for k in range(3)], html:[b'javascript:document.title="attacked"']*3,
               'x.svg':[SVG.encode()]*3, 'cls':np.arange(3, dtype=np.uint8),
               'json':[b'"</script><script>document.title=1"']*3}
    store = MemoryStore(columns, ATTACK, dict(cls=[ATTACK, SVG, "'\"><script>"]), {ATTACK:[0,3]}, {'x.svg':'bin'})
    shown = page(store)
    title = store.name
    shown.wait(lambda: len(shown.all('.tile .error'))==2 and len(shown.all('.tile img'))==1)
    assert ATTACK in shown.text('#name') and ATTACK[:50] in shown.tiles()[0]
    for number in range(3):
        shown.go(f'sample={number}')
        shown.wait(lambda: f'Sample {number}' in shown.text('#sample .title'))
        text = shown.text('#sample')
        assert SVG in text and columns['txt'][number].decode() in text and html in text
    shown.click('#filters')
    shown.click('#show-overview')
    shown.wait(lambda: 'Labels of cls' in shown.text('#overview') and ATTACK[:40] in shown.text('#overview'))
    for name in 'label_field=cls&label','text','sample','split','sort':
        shown.go(f'{name}={ATTACK}')
        shown.wait(lambda: shown.one('#grid').is_displayed())
    others = "return [document.scripts.length, document.querySelectorAll('svg, iframe, object').length]"
    assert driver.title==title and driver.execute_script(others)==[1, 0]
    assert not [o for o in errors(driver) if 'Content Security Policy' in o]
    fetched = driver.execute_script("return performance.getEntriesByType('resource').map(o => new URL(o.name).host)")
    assert set(fetched)=={driver.execute_script('return location.host')}
    # were there a way for a script into the page, the policy would stop it
    insert = "const o = document.createElement('div'); o.innerHTML = arguments[0]; document.body.append(o)"
    driver.execute_script(insert, ATTACK)
    shown.wait(lambda: any('Content Security Policy' in o for o in errors(driver)))
    assert driver.title==title
