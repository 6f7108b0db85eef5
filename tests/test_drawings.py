"Drawings: the published recipe against a plain implementation, pixels against matplotlib's, files of all shapes"
import gzip, io, json, lzma, pickle, re

import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image

from fastai_remote.codec import raster
from fastai_remote.codec.fields import get_codec
from fastai_remote.codec.raster import Rasterise
from fastai_remote.codec.strokes import pack_strokes, simplify, simplify_batch, unpack_strokes
from fastai_remote.source.drawings import _index, drawing_samples
from inputs import raw_samples, write_csv

def doodle(seed, n=None):
    "A raw drawing: smooth walks with times, some in whole numbers, some with one point"
    rng = np.random.default_rng(seed)
    res = []
    for _ in range(rng.integers(1, 7)):
        k = n or int(rng.choice([1, 2, 5, 40, 120]))
        p = rng.uniform(0, 400, 2)[:,None]+np.cumsum(np.cumsum(rng.normal(0, .8, (2,k)), 1), 1)
        if seed%2: p = p.round()
        res.append([*p.tolist(), np.arange(k).tolist()])
    return res

DOODLES = [doodle(i) for i in range(150)]
BOX = [[[0,255],[0,9],[0,1]]]   # a drawing of one line

def same(a, b): return len(a)==len(b) and all(map(np.array_equal, a, b))

# --- strokes

def reference(drawing, eps=2.):
    "The recipe, step by step as the README gives it"
    x0,y0 = (min(v for s in drawing for v in s[k]) for k in (0,1))
    m = max(max(v-x0 for s in drawing for v in s[0]), max(v-y0 for s in drawing for v in s[1])) or 255
    res = []
    for s in drawing:
        x,y = (np.array(s[0], float)-x0)*(255/m),(np.array(s[1], float)-y0)*(255/m)
        t = np.concatenate([[0], np.cumsum(np.hypot(np.diff(x), np.diff(y)))])
        u = np.append(np.arange(0, t[-1], 1.), t[-1])
        p = np.stack([np.interp(u, t, x), np.interp(u, t, y)], 1)
        res.append(np.rint(rdp(p, eps)).T)
    return res

def rdp(p, eps):
    if len(p)<3: return p
    a,b = p[0],p[-1]
    d = b-a
    l = np.hypot(*d)
    dist = np.abs(d[0]*(p[:,1]-a[1])-d[1]*(p[:,0]-a[0]))/l if l else np.hypot(*(p-a).T)
    k = 1+dist[1:-1].argmax()
    return np.concatenate([rdp(p[:k+1], eps)[:-1], rdp(p[k:], eps)]) if dist[k]>eps else p[[0,-1]]

def test_simplify_is_the_recipe_for_one_drawing_and_for_many():
    together = simplify_batch(DOODLES)
    assert np.mean([same(s, reference(d)) for d,s in zip(DOODLES, together)])>.97   # the rest: ties, by the last bit
    assert all(same(simplify(d), s) for d,s in zip(DOODLES[:60], together)) and simplify_batch([])==[]

@pytest.mark.parametrize('drawing,want', [
    ([[[7.5],[3.2],[0]]], [[[0],[0]]]), ([[[5.,5.,5.],[1.,1.,1.],[0,1,2]]], [[[0],[0]]]),
    ([[[0,1000],[0,500],[0,1]]], [[[0,255],[0,128]]]), ([[[0,510],[0,20]]], [[[0,255],[0,10]]]),
    ([[[0,300,300,0,0],[0,0,300,300,0],[0,1,2,3,4]]], [[[0,255,255,0,0],[0,0,255,255,0]]]),
    ([[[0,255],[10,20]]], [[[0,255],[10,20]]])])   # which is simplified already
def test_simplify_of_single_lines(drawing, want): assert [s.tolist() for s in simplify(drawing)]==want

NO_DRAWING = 'a drawing is a list of strokes|points that are no numbers'
REFUSED = {'without strokes':[[]], 'without points':[[[[],[],[]]]], 'differ in length':[[[[1,2],[3],[0,1]]]],
    'no numbers':[[[[1,x],[3,4],[0,1]]] for x in (float('nan'),float('inf'))],
    NO_DRAWING:[5, [5], [[1,2],[3,4]], [[[1]]], [[]], [[None,None]], [{'x':[1], 'y':[2]}], [[['1','2'],['3','4']]],
                [['12','34']]]}

def test_simplify_refuses_what_is_no_drawing():
    for why,wrong in REFUSED.items():
        for o in wrong:
            for function,argument in (simplify,o), (simplify_batch,[o]):
                with pytest.raises(ValueError, match=why): function(argument)

def test_strokes_come_back_in_a_byte_per_number():
    rng = np.random.default_rng(0)
    for n in (1, 2, 127, 128, 300, 20000):
        s = [rng.integers(0, 256, (2,n)).astype(np.uint8), np.zeros((2,1), np.uint8)]
        b = pack_strokes(s)
        assert len(b)==sum(2*a.shape[1] for a in s)+1+(1 if n<128 else 2 if n<16384 else 3)
        assert same(s, unpack_strokes(b))
    assert pack_strokes([a.astype(float) for a in s])==pack_strokes([a.tolist() for a in s])==b

def test_damaged_strokes_are_refused_and_not_drawn_with_c_or_without(monkeypatch):
    good = pack_strokes([np.arange(600).reshape(2,300)%256, [[1],[2]]])
    damaged = [good[:i] for i in range(len(good)) if i!=602]   # there, a stroke ends
    damaged += [b'\x80\x00',b'\x80'*9,b'\xff'*5,b'\0',b'\x01ab\x03',b'\x81\x00ab',b'\x01ab\x80']
    said = []
    for _ in range(2):
        for bad in damaged:
            with pytest.raises(ValueError, match='strokes'): unpack_strokes(bad)
            with pytest.raises(ValueError) as e: Rasterise().arrays([good, bad])
            said.append(str(e.value))
        monkeypatch.setattr(raster, '_pixels', None)
    assert said[:len(damaged)]==said[len(damaged):]

def test_strokes_that_are_no_bytes_are_refused():
    for bad in ([[[256],[0]]], [[[-1],[0]]], [[[.5],[0]]], [[1,2]], 'ab', [[['a'],['b']]], [np.zeros((3,2))],
                [np.zeros((2,0), np.uint8)], [[[float('nan')],[0]]]):
        with pytest.raises(ValueError, match='want (whole )?numbers|want shape|a list of strokes'):
            get_codec('strokes').to_bytes(bad)

# --- pictures

def agg(strokes, size, width):
    "The same picture by matplotlib's canvas"
    fig = plt.figure(figsize=(1,1), dpi=size)
    ax = fig.add_axes((0,0,1,1), xlim=(0,size), ylim=(size,0))
    ax.axis('off')
    xy = np.concatenate(strokes, 1).astype(int)
    off = 127-(xy.min(1)+xy.max(1))//2
    for s in strokes:
        x,y = (s+off[:,None])*(size-width*size/256)/255+width*size/512
        ax.plot(x, y, color='k', lw=width*size/256*72/size, solid_capstyle='round', solid_joinstyle='round', snap=False,
                path_effects=[])
    with plt.rc_context({'path.simplify':False}): fig.canvas.draw()
    a = 255-np.asarray(fig.canvas.buffer_rgba())[...,0]
    plt.close(fig)
    return a

@pytest.mark.parametrize('size,width', [(256,3), (64,8), (200,2.5), (256,16), (48,16), (300,32)])
def test_pixels_are_matplotlibs(size, width):
    mad = []
    for d in DOODLES[:10]:   # matplotlib leaves out dots
        s = [t for t in simplify(d) if np.ptp(t, axis=1).any()] or [np.array([[0,255],[0,255]], np.uint8)]
        [a] = Rasterise(size, width).arrays([s])
        difference = np.abs(a.astype(int)-agg(s, size, width))
        mad.append(difference.sum()/(a>0).sum())
        assert difference.max()<=128   # where two segments each cover half a pixel
    assert np.mean(mad)<8   # of 255, over the pixels with ink

OPTIONS = [dict(), dict(size=28), dict(size=64, width=8.), dict(antialias=False), dict(time='grey'),
           dict(time='colour', size=100), dict(size=8, width=32.), dict(size=500, width=.3), dict(size=128, width=32),
           dict(antialias=False, width=5.5, size=99), dict(time='colour', width=20, antialias=False)]

@pytest.mark.parametrize('kw', OPTIONS, ids=str)
def test_c_and_numpy_draw_the_same_one_by_one_and_together(monkeypatch, kw):
    if raster._pixels is None: pytest.skip('the C module is not built: no compiler')
    rng = np.random.default_rng(0)
    def noise(): return [rng.integers(0, 256, (2,n), dtype=np.uint8) for n in rng.integers(1, 6, rng.integers(1, 4))]
    s = [*simplify_batch(DOODLES[:20]), *(noise() for _ in range(40)), [np.zeros((2,200), np.uint8)]]
    draw = Rasterise(**kw).arrays
    a = draw(s)
    np.testing.assert_array_equal(a[:20], np.concatenate([draw([d]) for d in s[:20]]))
    assert draw([]).shape==(0,*a.shape[1:])
    monkeypatch.setattr(raster, '_pixels', None)
    np.testing.assert_array_equal(a, draw([pack_strokes(d) for d in s]))
    assert draw([]).shape==(0,*a.shape[1:])

def test_pngs_have_the_pixels_of_arrays():
    s = simplify(DOODLES[5])
    for r in (Rasterise(antialias=False), Rasterise(64), Rasterise(64, time='colour'), Rasterise(50, antialias=False)):
        im = Image.open(io.BytesIO(b:=r(s)))
        np.testing.assert_array_equal(np.asarray(im.convert('RGB' if r.time else 'L')), r.arrays([s])[0])
        assert get_codec('png').to_bytes(b)==b and im.mode==('RGB' if r.time else 'L' if r.antialias else '1')
    assert r.create(pack_strokes(s)).size==(50,50)
    assert list(r({'sketch.strokes':s, 'cls':'x'}))==['sketch.png','cls']
    with pytest.raises(ValueError, match="two fields would be called 'png'"): r({'strokes':s, 'png':b'x'})

def test_sizes_and_widths_that_cannot_be_drawn_are_refused():
    for kw,why in ((dict(size=4),'size'), (dict(size=5000),'size'), (dict(width=0),'width'), (dict(width=33),'width'),
                   (dict(time='red'),'time')):
        with pytest.raises(ValueError, match=why): Rasterise(**kw)

# --- files

def line(i, compact=False, **kw):
    "Drawing `i` as a line of JSON; `kw` replaces its entries"
    drawing = dict(word='cat' if i%2 else 'dog', countrycode='US', timestamp='t', recognized=i%3>0, key_id=str(2**60+i),
                   drawing=DOODLES[i])
    return json.dumps({**drawing, **kw}, separators=(',',':') if compact else None).encode()

def simple_line(i): return line(i, drawing=[s.tolist() for s in simplify(DOODLES[i])])

COLUMNS = ['countrycode','drawing','key_id','recognized','timestamp','word']

def csv_file(path, ids, columns=COLUMNS):
    rows = [json.loads(simple_line(i)) for i in ids]
    return write_csv(path, [columns, *([row[c] for c in columns] for row in rows)])

COMPRESS = {'':bytes, '.gz':gzip.compress, '.xz':lzma.compress}

def source_of(folder, lines, pack='', field='strokes', **kw):
    "The source of a file with `lines`, which is compressed if `pack` is `.gz` or `.xz`"
    text = lines if isinstance(lines, bytes) else b'\n'.join(lines)
    (folder/f'a.ndjson{pack}').write_bytes(COMPRESS[pack](text))
    return drawing_samples(folder/f'a.ndjson{pack}', field, **kw)

def loaded(source):
    "Each sample of a source, or why it cannot be loaded"
    def load(raw):
        try: return source.load(raw)
        except ValueError as e: return str(e)
    return [load(raw) for _,raw in raw_samples(source)]

def number(sample): return sample if isinstance(sample, str) else sample['id']-2**60

def numbers_at(source, positions): return [number(source.load(raw)) for _,raw in source.read(np.array(positions))]

@pytest.fixture
def folder(tmp_path):
    (tmp_path/'raw').mkdir()
    (tmp_path/'raw/a.ndjson').write_bytes(b'\n'.join(line(i, compact=True) for i in range(150))+b'\n')
    (tmp_path/'b.ndjson').write_bytes(b'\n'.join(map(simple_line, range(64))))
    csv_file(tmp_path/'c.csv', range(70))
    return tmp_path

ALL = [*range(64),*range(70),*range(150)]   # numbers of the drawings in b.ndjson, c.csv and raw/a.ndjson

def test_drawings_are_read_by_number_from_all_files(folder):
    source = drawing_samples(folder)
    assert len(source)==284 and list(map(number, source))==ALL
    for positions in ([0], [283], [64,63,62], [200,5,6,7,*range(130, 136)], list(range(284)), [], [283]*3,
                      np.random.default_rng(0).permutation(284).tolist()):
        assert numbers_at(source, positions)==[ALL[i] for i in positions]
    for i,sample in zip(ALL, source):   # in raw files, numbers are whole, negative or fractions
        assert same(sample.pop('strokes'), simplify(DOODLES[i]))
        assert sample=={'cls':'cat' if i%2 else 'dog', 'id':2**60+i, 'recognized.u1':int(i%3>0)}
    assert [n for n,_ in source.read(np.array([64,0,134]))]==['c.csv:2','b.ndjson:1','a.ndjson:1']
    assert list(map(number, source[-2:]))==[148,149]
    assert '284 drawings in 3 files, labelled, as strokes' in repr(source)

def test_workers_get_places_and_load_pictures(folder):
    part = drawing_samples(folder).read(np.arange(64))
    assert len(pickle.dumps(part))<1200 and len(part)==64
    source = drawing_samples(folder, 'png', size=32)
    rows = pickle.loads(pickle.dumps([raw for _,raw in source.read(np.arange(10))]))
    assert pickle.loads(pickle.dumps(source.load))(rows[7])==source[7]

def test_the_fingerprint_is_that_of_files_and_options(folder):
    def fingerprint(*args, **kw): return repr(drawing_samples(folder, *args, **kw).fingerprint())
    first = fingerprint()
    assert len({first, fingerprint('png'), fingerprint(max_per_class=40), fingerprint(keep='countrycode')})==4
    (folder/'b.ndjson').write_bytes(simple_line(0))
    assert fingerprint()!=first

def test_any_end_of_a_line_or_file(tmp_path):
    for n in 1,63,64,65,128,129:
        for end,tail in (b'\n',b''),(b'\n',b'\n'),(b'\n',b'\n\n'),(b'\r\n',b'\r\n'),(b'\n',b'\n  \n\n'):
            source = source_of(tmp_path, end.join(line(0, key_id=2**60+i, drawing=BOX) for i in range(n))+tail)
            assert len(source)==n and numbers_at(source, range(n))==list(range(n))

def test_an_index_is_the_same_in_pieces_of_any_size(tmp_path):
    lines = [b'x'*(i%7+1) for i in range(150)]
    (tmp_path/'a').write_bytes(b'\n'.join(lines)+b'\n')
    starts = np.cumsum([0]+[len(o)+1 for o in lines])
    for piece in (1, 7, 100, 1<<20):
        offsets,n = _index(tmp_path/'a', 0, piece)
        assert n==150 and offsets.tolist()==[0, starts[64], starts[128], starts[150]-1]

def test_tables_with_other_columns(tmp_path):
    csv_file(tmp_path/'test.csv', range(5), ['key_id','countrycode','drawing'])
    assert list(drawing_samples(tmp_path/'test.csv')[0])==['strokes','id']
    csv_file(tmp_path/'order.csv', range(5), COLUMNS[::-1])
    assert drawing_samples(tmp_path/'order.csv')[4]['cls']=='dog'
    assert 'cls' not in drawing_samples(tmp_path/'order.csv', with_labels=False)[4]
    (tmp_path/'bad.csv').write_text('a,b\n1,2\n')
    with pytest.raises(ValueError, match='bad.csv: neither JSON lines nor a CSV'): drawing_samples(tmp_path/'bad.csv')

@pytest.mark.parametrize('strokes', ['[[[1, 2],[3, 4],[0, 5]]]', '[[[1e1,2],[3,4],[0,5]]]', '[[[1E1,2],[3,4e0],[0,5]]]',
    '[[[1234567890,2],[3,4],[0,5]]]', '[[[1,99999999999],[3,4],[0,5]]]', '[[[ 1,2 ],[3,4],[0,5]],[[7],[8],[9]]]',
    '[[[1.5, -2],[3,4],[0,5]]]', '[[[-5,7,300],[1,2,-300],[0,1,2]]]', '[[[1e-3,2.5,4e2],[0,1,2],[0,1,2]]]',
    '[[[0.12345678901234567890,2],[3,4],[0,5]]]', '[[[-0,0.0],[3,4],[0,5]]]'])
def test_numbers_are_read_however_json_writes_them(tmp_path, strokes):
    "Also beside drawings whose numbers are plain, and without a difference to what `json` reads"
    plain = [[[1,2],[3,4],[5,6]]]
    other = line(1, compact=True, drawing=0).replace(b'"drawing":0', b'"drawing":'+strokes.encode())
    lines = [line(1, compact=True, drawing=plain)]*2
    found = [o['strokes'] for o in loaded(source_of(tmp_path, [*lines, other, *lines]))]
    assert same(found[2], simplify(json.loads(strokes)))
    assert all(same(found[k], simplify(plain)) for k in (0,1,3,4))

def test_other_columns_are_read_as_json_reads_them(tmp_path):
    "orjson makes floats of large integers, also in lists, and refuses what is no Unicode"
    values = 2**70,[-2**70],{'a':2**64},'\ud800',None,True,1.5,2**63
    source = source_of(tmp_path, [line(k, compact=True, n=value) for k,value in enumerate(values)], keep=['n'])
    assert [repr(o['n']) for o in loaded(source)]==list(map(repr, values))

def test_blank_lines_are_the_same_in_plain_and_compressed_files(tmp_path):
    "Within a file each is a sample that fails; those at its end are none"
    for pack in '','.gz','.xz':
        source = source_of(tmp_path, [line(0), b'', line(1), b'  ', b'', line(2), b'', b' ', b''], pack)
        assert list(map(number, loaded(source)))==[0,'an empty line',1,'an empty line','an empty line',2]
        assert [name[-1] for name,_ in raw_samples(source)]==list('123456')

def test_nothing_is_evaluated(tmp_path):
    (tmp_path/'a.csv').write_text('key_id,drawing\n1,"__import__(\'os\').system(\'touch /tmp/evil\')"\n')
    with pytest.raises(ValueError, match='Expecting value'): drawing_samples(tmp_path/'a.csv')[0]

def pack(path, end):
    "Compress a file, and remove it"
    (packed:=path.with_name(path.name+end)).write_bytes(COMPRESS[end](path.read_bytes()))
    path.unlink()
    return packed

def test_compressed_files_are_a_stream_with_one_file_after_the_other(folder):
    paths = [pack(folder/'b.ndjson', '.gz'), pack(folder/'c.csv', '.xz'), folder/'raw/a.ndjson']
    source = drawing_samples(paths)
    assert not hasattr(source, '__len__') and 'a stream of drawings in 3 files' in repr(source)
    parts = list(source.stream(100))
    assert [len(p) for p in parts]==[100,100,84]
    found = [number(source.load(raw)) for part in pickle.loads(pickle.dumps(parts)) for _,raw in part]
    assert sorted(found)==sorted(ALL) and found[:6]==[0,0,0,1,1,1]

def test_without_drawings_there_is_an_error(tmp_path):
    for bad in (tmp_path, tmp_path/'nowhere', [tmp_path/'x.csv']):
        with pytest.raises(FileNotFoundError): drawing_samples(bad)
    (tmp_path/'empty.ndjson').write_bytes(b'\n')
    with pytest.raises(ValueError, match='no drawings'): drawing_samples(tmp_path)
    with pytest.raises(ValueError, match="'strokes' or 'png'"): drawing_samples(tmp_path, 'jpg')

# --- lines that are no drawings

def changed(old, new):
    "A line without spaces whose numbers would be read as text, with a part changed"
    good = line(1, compact=True, word='bird', drawing=[[[1,2],[3,4],[5,6]],[[7,8],[9,9],[9,10]]])
    assert old in good
    return good.replace(old, new)

BAD_LINES = {
    'line [12] column|recursion|utf':[
        b'{"drawing', b'['*100_000, b'\xff\xfe', changed(b'[3,4]', b'[3,x]'), changed(b']]]}', b']]'),
        *(changed(b'[[[1,2]', o) for o in (b'[[[1,,2]',b'[[[1,-]',b'[[1,2]',b'[[[1,99999999999x]',b'[[[1,2')),
        b'{"word":"cat","key_id":1,"drawing":[[[1,2],[3{"word":"dog","key_id":2,"drawing":[[[1,2],[3,4]]]}'],
    'an empty line':[b''],
    'no drawing or no key_id':[b'[1]', b'{}', b'[{"key_id":"1"}]', changed(b'"key_id"', b'"x"'),
                               b'{"other":{"drawing":[[[9],[9],[0]]]},"key_id":5}'],
    'each a list of x, y':[line(4, drawing='[[[1],[2]]]')], 'without strokes':[line(4, drawing=[])],
    'differ in length':[line(4, drawing=[[[1,2],[3],[4]]]), line(4, drawing=[[[1,2],[3]]]),
                        changed(b'[3,4]', b'[3]'), changed(b'[3,4]', b'[]')],
    'no numbers|inhomogeneous|infinity':[line(4, drawing=[[['a'],['b'],[0]]]), changed(b'[3,4]', b'[3,[4]]'),
                                changed(b'[[[1,2]', b'[[[1,1e999]')],
    'key_id .* is no whole number':[line(4, key_id=o) for o in ('5_1',True,5.)],
    'recognized is .*, neither true nor false':[line(4, recognized=o) for o in ('yes',None)]}

@pytest.mark.parametrize('field,pack,most',
    [('strokes','',None), ('png','.xz',None), ('strokes','',2), ('png','.gz',2)])
def test_a_line_that_is_no_drawing_is_one_failed_sample(tmp_path, field, pack, most):
    "Also where drawings are counted. The lines around it are there"
    for why,wrong in BAD_LINES.items():
        for bad in wrong:
            lines = [line(0), bad, line(1)]
            source = source_of(tmp_path, lines, pack, field, max_per_class=most)
            first,found,last = loaded(source)
            assert [number(first),number(last)]==[0,1] and isinstance(found, str) and re.search(why, found), (bad,found)
            assert raw_samples(source)[1][0]==f'a.ndjson{pack}:2'

def test_numbers_and_truth_have_several_forms(tmp_path):
    def load(field, value): return source_of(tmp_path, [line(0, drawing=BOX, **{field:value})])[0]
    found = [load('recognized', o)['recognized.u1'] for o in (True,'True','TRUE','1',1,False,'false','0',0)]
    assert found==[1,1,1,1,1,0,0,0,0]
    assert [load('key_id', o)['id'] for o in (5,'5',-7)]==[5,5,-7]

# --- what is kept of a drawing, and of how many

def test_countries_and_timestamps_are_kept_if_asked_for(folder):
    for o in drawing_samples(folder, keep=['countrycode','timestamp']):
        assert (o['countrycode.cls'],o['timestamp.txt'])==('US','t')
    names = list(drawing_samples(folder/'raw', keep='countrycode')[0])
    assert names==['strokes','cls','id','recognized.u1','countrycode.cls']
    with pytest.raises(ValueError, match="no 'nope' among word, countrycode"): drawing_samples(folder, keep=['nope'])[0]
    for keep in 'strokes','id','cls':   # it replaces no other field
        with pytest.raises(ValueError, match=f'keep=: {keep!r} is the name of a field'):
            drawing_samples(folder, keep=[keep])

def test_points_and_times_are_exact(folder):
    "Of raw drawings; the strokes are the same as without"
    plain = drawing_samples(folder/'raw')[:]
    for i,o in enumerate(drawing_samples(folder/'raw', times=True)):
        want = [[*point,k==len(stroke[0])-1] for stroke in DOODLES[i] for k,point in enumerate(zip(*stroke))]
        assert o['points.npy'].tolist()==want and o['points.npy'].dtype==(np.float32 if i%2 else np.float64)
        assert same(o['strokes'], plain[i]['strokes'])
    with pytest.raises(ValueError, match='no times of points, which only the raw files'):
        drawing_samples(folder/'b.ndjson', times=True)[0]

def test_a_limit_per_class_counts_over_all_files(folder):
    "It takes the first drawings of each word, in any order of reading; and from compressed files as many"
    source = drawing_samples(folder, max_per_class=40)
    assert [(o['cls'],number(o)) for o in source]==[(['dog','cat'][i%2],i) for i in [*range(64),*range(16)]]
    assert len(source)==80 and numbers_at(source, [79,64,63,0,70])==[15,0,63,0,6]
    assert list(map(number, drawing_samples(folder/'raw', max_per_class=1000)))==list(range(150))
    with pytest.raises(ValueError, match='max_per_class must be at least 1'): drawing_samples(folder, max_per_class=0)
    for name in ('b.ndjson','c.csv','raw/a.ndjson'): pack(folder/name, '.gz')
    found = [o['cls'] for o in drawing_samples(folder, max_per_class=40)]
    assert (found.count('cat'),found.count('dog'))==(40,40)

def test_a_limit_counts_any_word_and_needs_one(tmp_path):
    lines = [line(i, word='"q\\' if i<90 else 'z') for i in range(100)]
    source = source_of(tmp_path, [*lines, b'no json', line(0, word=[1]), line(0, word=[1]), b''], max_per_class=3)
    assert len(source)==9 and numbers_at(source, range(6))==[0,1,2,90,91,92]
    path = csv_file(tmp_path/'t.csv', range(5), ['key_id','countrycode','drawing'])
    with pytest.raises(ValueError, match='t.csv:2: max_per_class= needs the word of each drawing'):
        drawing_samples(path, max_per_class=3)

def test_a_line_that_is_too_long_for_csv_is_one_failed_sample(tmp_path):
    with open(csv_file(tmp_path/'a.csv', range(3)), 'a') as f: f.write('x'*200_000+'\n')
    source = drawing_samples(tmp_path/'a.csv', max_per_class=5)
    assert len(source)==4 and numbers_at(source, range(3))==[0,1,2]
    with pytest.raises(ValueError, match='field larger than field limit'): source[3]

@pytest.mark.parametrize('pack', ['','.gz'])
def test_the_word_of_the_drawing_itself_is_limited(tmp_path, pack):
    "Not that of another dict in the line, or of a text, or the first of two; spaces do not matter"
    drawing = '"key_id":1,"drawing":[[[1,2],[3,4]]]'
    lines = ['{"meta":{"word":"x"},"word":"cat",%s}', '{"other":{"drawing":[[[1]]]},%s,"word":"x"}',
             r'{"text":"\"word\":\"x\"","word":"cat",%s}', '{"word":"x","word":"cat",%s}',
             '{"word" : "cat" , "key_id" : 1 , "drawing" : [ [ [1, 2], [3, 4] ] ] }', r'{%s,"word":"\u0078"}',
             '{"drawing":[[[5]]],"word":"y",%s}', '{"word":"z",%s}']
    source = source_of(tmp_path, [o.replace('%s', drawing).encode() for o in lines], pack, max_per_class=1)
    assert [o['cls'] for o in source]==['cat','x','y','z']
