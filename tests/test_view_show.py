"What a person sees of a dataset: pictures of every kind of value, overviews, notebooks, reports and the shell"
import base64, io, json, pickle, re, threading, tracemalloc, warnings

import matplotlib.pyplot as plt
import numpy as np
import pytest
from fastai.vision.all import DataLoaders, Flatten, Learner, nn
from PIL import Image

from fastai_remote import MemoryStore, RedisStore, to_redis
from fastai_remote.cli.main import main
from fastai_remote.cli.terminal import picture_codes
from fastai_remote.codec import pixels
from fastai_remote.ingest.stores import changeable
from fastai_remote.testing import ManualClock
from fastai_remote.view.overview import chosen_numbers, count_in_splits, items_of, overview, some_numbers, typed_label
from fastai_remote.view.html import MAX_HTML, MAX_REPORT, notebook_html, write_report
from fastai_remote.view.pictures import as_picture, drawn_text, read_samples, sheet, shown_kind, tile_fields
from in_memory import in_memory
from inputs import Computed, encoded, png_of, wav_file

QUIET = dict(num_workers=0, progress=False)

# --- Every kind

def recording(): return wav_file(20000*np.sin(np.arange(4000)/5))

def photo(i, size=(60,40)):
    rows,columns = np.mgrid[:size[1],:size[0]]
    return Image.fromarray(np.stack([columns*4, rows*6, rows+columns+i], 2).astype(np.uint8))

def mask():
    codes = np.zeros((40,60), np.uint8)
    codes[10:20,10:30],codes[25:35,30:50] = 1,2
    return Image.fromarray(codes)

def of_all_kinds(i):
    stroke = np.array([[0,255,100],[0,200,255]], np.uint8)
    return {'jpg':photo(i), 'mask.png':mask(), 'boxes.npy':np.array([[5,5,25,30],[30,10,58,38]], np.float32),
            'boxes.labels':['cat','a<b>'], 'points.npy':np.array([[6,8],[40,20.]]), 'strokes':[stroke],
            'wav':recording(), 'cls':'cat' if i%2 else 'dog', 'labels':['x','y'][:i%3], 'txt':f'text {i}', 'age.f4':i/3,
            'n.i4':i, 'vector.npy':np.arange(4.), 'picture.npy':np.full((9,9), 7, np.uint8), 'meta.json':{'a':[i]},
            'raw.bin':b'\0\1\2'}

@pytest.fixture(scope='module')
def all_kinds(): return in_memory([of_all_kinds(i) for i in range(20)], name='kinds')

KINDS = {'jpg':'image', 'mask.png':'mask', 'boxes.npy':'boxes', 'boxes.labels':'labels', 'points.npy':'points',
    'strokes':'drawing', 'wav':'audio', 'cls':'label', 'labels':'labels', 'txt':'text', 'age.f4':'number',
    'n.i4':'number', 'vector.npy':'array', 'picture.npy':'array', 'meta.json':'other', 'raw.bin':'bytes'}
TEXTS = {'jpg':'60 x 40', 'mask.png':'0, 1, 2', 'boxes.npy':'2 boxes', 'boxes.labels':'cat, a<b>',
    'points.npy':'2 points', 'strokes':'1 stroke', 'wav':'0.50 s, 8,000 values per second', 'cls':'cat', 'labels':'x',
    'txt':'text 1', 'age.f4':'0.33333', 'n.i4':'1', 'vector.npy':'float64 (4,): 0, 1, 2, 3',
    'picture.npy':'uint8 (9, 9)', 'meta.json':'{"a": [1]}', 'raw.bin':'3 B, begins with 00 01 02'}

def test_each_kind_has_a_text_and_those_that_can_be_seen_a_picture(all_kinds):
    assert {field:shown_kind(all_kinds, field) for field in all_kinds.fields}==KINDS
    sample, = read_samples(all_kinds, [1], 60, all_kinds.fields)
    assert {field:shown.text for field,shown in sample.values.items()}==TEXTS and not sample.errors
    seen = {field for field,shown in sample.values.items() if shown.image is not None}
    assert seen=={'jpg','mask.png','strokes','wav','picture.npy'}
    assert sample.title=='cat; labels: x' and 'txt' in sample.texts and sample.image.size==(60,40)
    assert sample.values['jpg'].nbytes>300 and sample.values['cls'].nbytes is None

def test_mask_boxes_and_points_are_drawn_over_the_image(all_kinds):
    bare, = read_samples(all_kinds, [1], 60, ['jpg'])
    difference = {}
    for field in 'mask.png','boxes.npy','points.npy':
        drawn, = read_samples(all_kinds, [1], 60, ['jpg', field])
        difference[field] = np.abs(np.asarray(drawn.image).astype(int)-np.asarray(bare.image)).max(2)>20
    assert difference['mask.png'][12,12] and not difference['mask.png'][2,2]
    assert difference['boxes.npy'][5,15] and not difference['boxes.npy'][20,15]
    assert difference['points.npy'][8,6] and not difference['points.npy'][30,5]

@pytest.mark.parametrize('mode,size', [('1',(9,9)), ('LA',(9,9)), ('P',(9,9)), ('RGBA',(9,9)), ('I;16',(9,9)),
                                       ('RGB',(1,3000)), ('L',(2000,3))])
def test_pictures_of_any_mode_and_shape_become_small_ones(mode, size):
    image = Image.new('L', size, 9).convert(mode) if mode!='I;16' else Image.fromarray(np.full(size, 40000, np.uint16))
    store = MemoryStore({'png':[encoded(image)]})
    picture = read_samples(store, [0], 100)[0].picture()
    assert max(Image.open(io.BytesIO(picture.content)).size)<=100 and picture.mime in ('image/png','image/jpeg')

def test_a_recording_is_a_connected_curve_and_a_mask_has_a_legend(all_kinds):
    shown, = read_samples(all_kinds, [1], 400, ['wav','mask.png'])
    curve = np.asarray(shown.values['wav'].image.convert('L'))<200
    top,end = curve.argmax(0),len(curve)-curve[::-1].argmax(0)
    assert (top[1:]<=end[:-1]).all() and (top[:-1]<=end[1:]).all()
    assert shown.values['mask.png'].legend==[('1','#e41a1c'), ('2','#377eb8')]

def test_pictures_with_few_colours_stay_sharp_and_photographs_small():
    "With at most as many bytes as were asked for"
    few,many = as_picture(Image.new('RGB', (160,160), 'red')),as_picture(photo(0, (160,120)))
    assert (few.mime,many.mime)==('image/png','image/jpeg') and len(few.content)<1000 and few.size==(160,160)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (160,160,3), np.uint8))
    assert len(as_picture(noise).content)>10_000>4000>=len(as_picture(noise, 4000).content)

def test_marks_without_an_image_and_masks_alone_are_drawn_too():
    store = in_memory([{'points.npy':np.array([[1e30,5],[3,-4]])}, {'points.npy':np.zeros((0,2))}])
    some,none = read_samples(store, [0,1])
    assert some.image is not None and none.image is None
    store = in_memory([{'mask.png':mask(), 'cls':'a'}])
    assert len(np.unique(np.asarray(read_samples(store, [0])[0].image)))>3

# --- Bad and hostile values

EVIL = '<script>alert(1)</script>'
SVG = f'<svg xmlns="http://www.w3.org/2000/svg">{EVIL}</svg>'.encode()
FIELD = 'a<img src=x onerror=alert(2)>.txt'

@pytest.fixture(scope='module')
def hostile():
    "Five samples: a good one with a damaged text, a truncated JPEG, a bomb, an SVG as a JPEG, and a long text"
    bomb = png_of(bytes(9), 30_000, 30_000)
    jpg = encoded(photo(0), 'JPEG')
    texts = [EVIL.encode(), b'ok', b'\xff', SVG, b'x'*100_000]
    store = MemoryStore({'jpg':[jpg, jpg[:300], bomb, SVG, jpg], FIELD:texts,
        'svg.bin':[SVG]*5, 'cls':np.array([0,1,2,3,0], 'u1')}, 'hostile<b>', splits={f'train{EVIL}':[0,5]},
        vocab={'cls':[f'</style>{EVIL}', '" onload="x', r'$\frac{$', '\u202eevil\x1b[2J']},
        failures=[(f'file{EVIL}', f'reason{EVIL}')])
    store.columns[FIELD][0] = b'other bytes'
    store.manifest.failed = 1
    return store

@pytest.mark.filterwarnings('ignore:Image size')
def test_damaged_values_and_bombs_are_shown_as_their_errors(hostile):
    samples = read_samples(hostile, range(5))
    wrong = [' '.join(sample.errors) for sample in samples]
    assert 'do not match their checksum' in wrong[0] and FIELD in wrong[0] and samples[0].image is not None
    assert 'sample 1' in wrong[1] and 'bomb' in wrong[2] and "can't decode byte 0xff" in wrong[2]
    assert 'not an image' in wrong[3] and not wrong[4]
    assert all(drawn_text(sample, 64).size==(64,64) for sample in samples)

@pytest.mark.filterwarnings('ignore:Image size')
def test_nothing_of_a_dataset_is_a_tag_or_a_script(hostile, tmp_path):
    page = write_report(hostile, tmp_path/'page.html').read_text()
    for html in notebook_html(hostile, 60),page:
        tags = set(re.findall(r'<\s*/?\s*([a-zA-Z!]+)', html))
        assert not tags-{'div','style','b','bdi','table','tr','td','th','span','figure','figcaption','img','br',
            '!DOCTYPE','html','head','meta','title','body','h','p'}, tags
        assert 'alert(1)' in html and not re.search(r'<[^>]*\son\w+=', html) and '\x1b' not in html
        assert set(re.findall(r'src="(\w+):', html))=={'data'} and 'http' not in html.replace('http-equiv', '')
    assert "default-src 'none'" in page and 'svg' in read_samples(hostile, [3], fields=['svg.bin'])[0].texts['svg.bin']

@pytest.mark.filterwarnings('ignore:Image size')
def test_titles_of_a_grid_are_errors_and_labels_and_no_formulas(hostile):
    _,damaged,formula,text,_ = [ax.title.get_text() for ax in hostile.show(range(5), ncols=5)]
    assert 'sample 1' in damaged and r'$\frac{$' in formula and 'not an image' in text.replace('\n', ' ')
    plt.gcf().canvas.draw()   # matplotlib would raise an error of a formula

# --- Which samples

def test_samples_are_chosen_by_split_label_and_values(all_kinds):
    columns = {'age.f4':np.arange(20, dtype='f4'), 'cls':np.arange(20, dtype='u1')%2}
    store = MemoryStore(columns, vocab={'cls':['a','b']}, splits={'train':[0,12], 'valid':[12,20]})
    assert chosen_numbers(store, n=100, split='valid', label='b').tolist()==[13,15,17,19]
    assert chosen_numbers(store, n=3, where={'age.f4':range(4, 7)}).tolist()==[4,5,6]
    assert chosen_numbers(store, [3,1]).tolist()==[3,1] and chosen_numbers(store, 7).tolist()==[7]
    some = chosen_numbers(store, n=5)
    assert len(some)==5 and (np.diff(some)>0).all() and (some==chosen_numbers(store, n=5)).all()
    assert len(items_of(store, ['valid','train']))==20 and list(items_of(store, ['valid']))==list(range(12, 20))
    with pytest.raises(ValueError, match="no split 'test'; there are train, valid"): chosen_numbers(store, split='test')
    with pytest.raises(ValueError, match="no label 'c'"): store.show(label='c')
    with pytest.raises(IndexError): store.show([20])
    with pytest.raises(TypeError, match='either numbers'): store.show([1], label='a')
    with pytest.raises(ValueError, match='no field has labels'):
        MemoryStore({'age.f4':np.ones(2, 'f4')}).show(label='a')

def test_a_label_is_written_as_text_whatever_its_type():
    store = MemoryStore({'cls':np.array([0,1], 'u1'), 'n.cls':np.array([0,1], 'u1'), 'labels':[b'[3,"x"]']*2,
                         'id.cls':np.array([7,8], 'i4'), 'txt':[b'a']*2},
                        vocab={'cls':['7','a'], 'n.cls':[7,9], 'labels':[3,'x']})
    right = ('cls','7','7'), ('n.cls','7',7), ('labels','3',3), ('labels','x','x'), ('id.cls','-5',-5)
    for field,text,label in right: assert typed_label(store, field, text)==label
    assert [typed_label(store, *o, may_be_new=True) for o in (('cls','8'), ('n.cls','8'), ('labels','8'))]==['8',8,'8']
    for field,text in ('cls','8'), ('n.cls','8'), ('labels','8'), ('id.cls','x'), ('cls',''):
        with pytest.raises(ValueError, match=f"no label {text!r} in field {field!r}"): typed_label(store, field, text)
    with pytest.raises(ValueError, match='whose labels are numbers'): typed_label(store, 'n.cls', 'x', may_be_new=True)
    with pytest.raises(ValueError, match="'txt' has no labels"): typed_label(store, 'txt', 'a')

# --- As fastai shows them

def test_a_grid_is_made_of_the_types_of_fastai(all_kinds):
    axes = all_kinds.show([1,2,3], ncols=2)
    assert len(axes)==3 and axes[0].title.get_text()=='cat\nlabels: x\ntext 1\n#1'
    assert len(axes[0].images)==2   # the image, and its mask
    assert axes[0].images[0].get_extent()==[-.5,59.5,39.5,-.5]
    assert {text.get_text() for text in axes[0].texts}=={'cat','a<b>'} and axes[0].collections   # boxes, points
    plt.close('all')

def test_titles_of_a_grid_are_not_drawn_over_the_row_above():
    "Square images leave no room at the sides; the titles have five lines"
    axes = in_memory([{'jpg':photo(i, (40,40)), 'cls':'a', 'txt':'some words '*20} for i in range(4)]).show(ncols=2)
    axes[0].figure.canvas.draw()
    assert axes[2].title.get_window_extent().y1<axes[0].get_window_extent().y0
    plt.close('all')

def test_recordings_are_curves_and_texts_and_numbers_a_table(capsys):
    (ax,) = in_memory([{'wav':recording(), 'cls':'a'}]).show()
    assert len(ax.lines)==1 and ax.get_xlabel()=='seconds' and ax.title.get_text()=='a\n#0'
    table = in_memory([{'txt':'some <b>text', 'age.f4':1.5}]*3).show(n=2)
    assert list(table.columns)==['txt','age.f4'] and len(table)==2 and table['txt'].iloc[0]=='some <b>text'

# --- Overviews

def test_an_overview_counts_labels_and_measures_a_sample():
    store = in_memory([{'jpg':photo(i, (60,40) if i<15 else (40,90)), 'cls':'ab'[i%4==0], 'n.i4':i} for i in range(20)])
    o = overview(store)
    assert o.samples==20 and o.labels['cls'].most==[('a',15),('b',5)] and o.labels['cls'].counted and o.sampled==20
    assert o.fields['n.i4'].nbytes==80 and o.fields['n.i4'].is_exact and not o.fields['jpg'].is_exact
    assert .95*store.manifest.nbytes<o.fields['jpg'].nbytes<store.manifest.nbytes
    assert o.sizes['jpg'].most==[((60,40),15),((40,90),5)] and o.sizes['jpg'].ratios==[5,0,0,15,0]
    assert overview(store, 0).sampled==0 and overview(store, 0).fields['jpg'].nbytes is None

def test_labels_that_are_not_counted_are_not_guessed():
    store = MemoryStore({'cls':np.array([0,1], 'u1')}, vocab={'cls':['a','b']})
    assert not overview(store).labels['cls'].counted and 'not known' in notebook_html(store, 60)

def test_names_of_the_codes_of_a_mask_are_not_counted():
    samples = {split:[{'mask.png':mask(), 'cls':'a', 'labels':['b']}]*n for split,n in (('train',2), ('valid',1))}
    store = in_memory(samples, vocab={'mask.png':['sky','sea','sand']})
    o = overview(store)
    count_in_splits(store, o, lambda done, of: None)
    assert o.labels['mask.png'].in_splits=={} and not o.labels['mask.png'].counted
    assert [o.labels[field].in_splits for field in ('cls','labels')]==[{'train':[2],'valid':[1]}]*2

def test_counts_of_labels_follow_each_change(put):
    def sample(i): return {'txt':str(i), 'cls':'ab'[i%2], 'labels':['x','y','x'][:i%4], 'tag.labels':[7,'7'][:1+i%2]}
    store,_ = put([sample(i) for i in range(6)], shuffle=False)
    def counts(store): return [dict(overview(store).labels[field].most) for field in ('cls','labels')]
    assert counts(store)==[{'a':3,'b':3}, {'x':4,'y':2}] and store.class_counts('tag.labels')=={7:6,'7':3}
    with pytest.raises(ValueError, match="several labels in 'labels'"): store.class_weights('labels')
    more = {'txt':'more', 'cls':'c', 'labels':{'z','x'}, 'tag.labels':[]}
    store = store.append([more], **QUIET)
    assert counts(store)==[{'a':3,'b':3,'c':1}, {'x':5,'y':2,'z':1}]
    store = store.edit(drop=[0,2], set={'cls':{1:'c'}, 'labels':{1:[], 3:['w','z']}})
    assert counts(store)==[{'a':1,'b':2,'c':2}, {'x':2,'y':0,'z':2,'w':1}] and store.manifest.nbytes>0
    assert store.class_counts('tag.labels')=={7:4,'7':3} and store.class_counts('labels')=={'x':2,'y':0,'z':2,'w':1}

def test_reasons_of_failures_are_counted():
    failures = [(f'file {k}', 'too small' if k<1500 else 'late') for k in range(3000)]
    store = MemoryStore({'txt':[b'a']}, failures=failures)
    store.manifest.failed = 3000
    o = overview(store)
    assert (o.failed, o.reasons, o.n_reasons)==(3000, [('too small', 1000)], 1000)
    assert 'reasons of 1,000' in notebook_html(store, 60)

def synthetic(n, labels=8, picture=None):
    "A store of one picture and of labels, which are computed"
    png = encoded(picture or photo(0))
    made = {'png':lambda numbers: [png]*len(numbers), 'cls':lambda numbers: (numbers%8).astype('u4')}
    vocab = {'cls':[f'label {k}' for k in range(labels)]}
    return Computed(n, made, vocab=vocab, counts={'cls':[n//labels]*labels}, nbytes=len(png)*n)

def test_fifty_million_samples_cost_what_a_few_cost():
    store = synthetic(50_000_000)
    notebook_html(store, 60)   # what is loaded once
    tracemalloc.start()
    html,o = notebook_html(store, 60),overview(store)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak<10_000_000 and sum(store.reads)==12+12+o.sampled and '50,000,000' in html and html.count('<img')==12
    assert some_numbers(store, 12).max()>25_000_000

def test_a_summary_stays_small_whatever_is_in_the_dataset():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300,300,3), np.uint8))
    store = synthetic(1000, 100_000, noise)
    for field in (f'{"x"*200}{k}.i4' for k in range(500)):
        store.manifest.fields[field] = {'codec':'i4','dtype':'i4'}
        store.made[field] = lambda numbers: np.zeros(len(numbers), 'i4')
    html = notebook_html(store, 60)
    assert len(html.encode())<MAX_HTML and html.count('<img')==12 and 'more labels' in html and 'more fields' in html

def test_a_report_is_one_small_file(all_kinds, tmp_path):
    path = all_kinds.report(tmp_path/'kinds.html', n=8)
    page = path.read_text()
    assert page.startswith('<!DOCTYPE html>') and page.count('<img')==8 and len(page)<MAX_REPORT
    picture = re.search('base64,([^"]+)"', page)[1]
    assert max(Image.open(io.BytesIO(base64.b64decode(picture))).size)<=160

# --- A server that is away

def test_without_an_answer_a_notebook_shows_the_table_of_before(fresh):
    to_redis([{'txt':'a', 'cls':'b'}]*3, fresh.url, 'd', **QUIET)
    store = RedisStore(fresh.url, 'd', timeout=1)
    unread = changeable(pickle.loads(pickle.dumps(store)))
    assert '<figure' in store._repr_html_()
    fresh.kill()
    with ManualClock():
        html = store._repr_html_()
        assert '<table><tr><th colspan=2>d' in html and '<figure' not in html and '3 samples' in repr(store)
        assert unread._repr_html_() is None and 'not read yet' in repr(unread)

def test_a_summary_does_not_wait_for_longer_than_it_may():
    store,answer = synthetic(100),threading.Event()
    read = store.read_values
    def slow(numbers, fields):
        answer.wait(60)
        return read(numbers, fields)
    store.read_values = slow
    assert notebook_html(store, .05) is None
    answer.set()

# --- Losses

def trained(store):
    dls = DataLoaders.from_store(store, bs=4, num_workers=0)
    return Learner(dls, nn.Sequential(Flatten(), nn.Linear(12, 2)))

@pytest.fixture
def two_classes(put):
    def sample(i): return {'png':Image.new('RGB', (2,2), (250*(i%2),0,0)), 'cls':'ab'[i%2]}
    return put({'train':[sample(i) for i in range(10)], 'valid':[sample(i) for i in range(9)]}, shuffle=False)[0]

def test_losses_are_those_of_get_preds_in_the_order_of_the_store(two_classes):
    learn = trained(two_classes)
    with learn.no_bar(): preds,targets,losses = learn.get_preds(with_loss=True)
    with learn.no_bar(): store = two_classes.add_losses(learn)
    values = store.get_many(range(19), ['loss.f4','pred.cls','confidence.f4'])
    assert store.fields==['png','cls','loss.f4','pred.cls','confidence.f4']
    np.testing.assert_allclose(values['loss.f4'][10:], losses, rtol=1e-5)
    np.testing.assert_allclose(values['confidence.f4'][10:], preds.max(1)[0], rtol=1e-5)
    assert values['pred.cls'][10:].tolist()==preds.argmax(1).tolist()
    assert np.isnan(values['loss.f4'][:10]).all() and store[0]['pred.cls']=='' and store[12]['pred.cls'] in 'ab'
    assert list(DataLoaders.from_store(store, bs=4, num_workers=0).vocab)==['a','b']   # the target is still `cls`
    with learn.no_bar(): again = store.add_losses(learn, ['train','valid'])
    assert again.fields==store.fields and not np.isnan(again.get_many(range(19), 'loss.f4')['loss.f4']).any()
    assert again.manifest.vocab['pred.cls']==['a','b'] and not again.verify(**QUIET).bad

def test_losses_of_another_kind_of_target_are_only_losses(server):
    to_redis([{'png':Image.new('RGB', (2,2)), 'age.f4':i/4} for i in range(8)], server.url, 'ages', **QUIET)
    store = RedisStore(server.url, 'ages')
    learn = Learner(DataLoaders.from_store(store, bs=4, num_workers=0), nn.Sequential(Flatten(), nn.Linear(12, 1)))
    with learn.no_bar(): store = store.add_losses(learn, None)
    losses = store.get_many(range(8), 'loss.f4')['loss.f4']
    assert store.fields==['png','age.f4','loss.f4'] and len(set(losses.tolist()))>1
    assert DataLoaders.from_store(store, bs=4, num_workers=0).one_batch()[1].shape==(4,)

def test_fields_are_replaced_only_if_that_was_asked_for_and_their_bytes_are_counted_once(put):
    store,_ = put([{'txt':str(i)} for i in range(4)], shuffle=False)
    n = store.manifest.nbytes
    for k in range(3):
        fields = {'a.i4':np.arange(k, k+4, dtype='i4'), 'pred.cls':['a']*4, 'b.txt':['text']*4}
        store = store.add_fields(fields, replace=True, vocab={'pred.cls':['a']}, **QUIET)
        assert store.manifest.nbytes==n+4*(4+1+4)
    with pytest.raises(ValueError, match="a field 'a.i4' already; replace=True"): store.add_fields({'a.i4':[0]*4})
    assert store[1]=={'txt':'1', 'a.i4':3, 'pred.cls':'a', 'b.txt':'text'} and not store.verify(**QUIET).bad
    columns = store.get_many(range(4), store.fields, decode=True)
    with pytest.raises(ValueError, match='all of its fields'): store.add_fields(columns, replace=True)
    store = store.drop_fields('a.i4', 'pred.cls')
    assert store.manifest.nbytes==n+4*4 and store.edit(drop=[0])[0]=={'txt':'1', 'b.txt':'text'}

# --- In a shell

def test_show_writes_a_picture_and_prints_values(put, tmp_path, capsys):
    source = {split:[of_all_kinds(i) for i in range(n)] for split,n in (('train',6), ('valid',4))}
    store,_ = put(source, shuffle=False)
    place = [store.link.url, store.name] if isinstance(store, RedisStore) else [store.storage.url]
    assert main(['show', *place, '--n', '4', '--out', str(tmp_path/'grid.png'), '--size', '64'])==0
    out = capsys.readouterr().out
    assert Image.open(tmp_path/'grid.png').size==(4*72+8,102+8) and out.count('txt: text')==4 and 'age.f4: ' in out
    assert main(['show', *place, '--label', 'cat', '--split', 'valid', '--json'])==0
    document = json.loads(capsys.readouterr().out)
    assert [sample['number'] for sample in document['samples']]==[7,9]
    assert main(['show', *place, '--label', 'bird'])==1 and "no label 'bird'" in capsys.readouterr().err
    assert main(['info', *place])==0 and 'cat (5), dog (5)' in capsys.readouterr().out

def test_terminals_that_draw_get_the_picture():
    png = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (60,60), np.uint8)))
    kitty,iterm = picture_codes(png, 'kitty'),picture_codes(png, 'iterm')
    pieces = re.findall('\x1b_G[^;]*m=([01]);([^\x1b]*)\x1b\\\\', kitty)
    assert [more for more,_ in pieces]==['1']*(len(pieces)-1)+['0'] and max(len(piece) for _,piece in pieces)<=4096
    assert base64.b64decode(''.join(piece for _,piece in pieces))==png
    assert base64.b64decode(iterm.split(':')[1].split('\a')[0])==png

def test_a_sheet_has_a_place_for_each_sample(all_kinds):
    samples = read_samples(all_kinds, range(5), 64)
    assert sheet(samples, 3).size==(3*72+8,2*102+8) and tile_fields(all_kinds)[0]=='jpg'

def test_the_first_loader_says_what_missing_c_modules_cost(monkeypatch):
    monkeypatch.setattr(pixels, '_told', [])
    monkeypatch.setattr(pixels, 'C_MODULES', (pixels.CModule('_nothing', 'all is slow', 'work'),))
    with pytest.warns(UserWarning, match='without the C module _nothing, all is slow'): pixels.warn_without_c_modules()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        pixels.warn_without_c_modules()
