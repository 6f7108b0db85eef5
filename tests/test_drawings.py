"Drawings: the published recipe against a plain implementation, pixels against matplotlib's, files of all shapes"
import csv, gzip, io, json, lzma, pickle, subprocess, sys
from itertools import chain

import numpy as np
import pytest
from PIL import Image

import fastai_remote.codec.raster
from fastai_remote.codec.fields import get_codec
from fastai_remote.source.drawings import drawing_samples
from fastai_remote.codec.raster import Rasterise, rasterise, rasterise_batch
from fastai_remote.codec.strokes import pack_strokes, simplify, simplify_batch, unpack_strokes

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

def test_simplify_is_the_recipe():
    drawings = [doodle(i) for i in range(150)]
    same = [all(np.array_equal(a, b) for a,b in zip(s, reference(d), strict=True)) for d,s in zip(drawings, simplify_batch(drawings))]
    assert np.mean(same)>.97   # the rest: ties, decided by the last bit

def test_simplify_alone_or_together():
    drawings = [doodle(i) for i in range(60)]
    for d,s in zip(drawings, simplify_batch(drawings)):
        for a,b in zip(simplify(d), s, strict=True): np.testing.assert_array_equal(a, b)

def test_simplify_edges():
    assert [s.tolist() for s in simplify([[[7.5],[3.2],[0]]])] == [[[0],[0]]]
    assert [s.tolist() for s in simplify([[[5.,5.,5.],[1.,1.,1.],[0,1,2]]])] == [[[0],[0]]]
    assert [s.tolist() for s in simplify([[[0,1000],[0,500],[0,1]]])] == [[[0,255],[0,128]]]
    square = [[[0,300,300,0,0],[0,0,300,300,0],[0,1,2,3,4]]]
    assert [s.tolist() for s in simplify(square)] == [s.tolist() for s in reference(square)]
    done = [[[0,255],[10,20]]]
    assert simplify(done)[0].tolist() == done[0]
    assert simplify([[[0,510],[0,20]]])[0].tolist() == [[0,255],[0,10]]

@pytest.mark.parametrize('bad,why', [([], 'without strokes'), ([[[],[],[]]], 'without points'), ([[[1,2],[3],[0,1]]], 'differ in length'),
    ([[[1,float('nan')],[3,4],[0,1]]], 'no numbers'), ([[[1,float('inf')],[3,4],[0,1]]], 'no numbers')])
def test_simplify_refuses(bad, why):
    with pytest.raises(ValueError, match=why): simplify(bad)

def test_strokes_round_trip():
    rng = np.random.default_rng(0)
    for n in (1, 2, 127, 128, 300, 20000):
        s = [rng.integers(0, 256, (2,n)).astype(np.uint8), np.zeros((2,1), np.uint8)]
        b = pack_strokes(s)
        assert len(b)==sum(2*a.shape[1] for a in s)+1+(1 if n<128 else 2 if n<16384 else 3)
        for x,y in zip(s, unpack_strokes(b), strict=True): np.testing.assert_array_equal(x, y)
    assert pack_strokes([a.astype(float) for a in s])==pack_strokes([a.tolist() for a in s])==b

def test_strokes_damaged():
    b = pack_strokes([np.arange(600).reshape(2,300)%256, [[1],[2]]])
    for i in range(len(b)):
        if i!=602:
            with pytest.raises(ValueError, match='strokes'): unpack_strokes(b[:i])
    for bad in (b'\x80\x00', b'\x80'*9, b'\xff'*5, b'\0', b''):
        with pytest.raises(ValueError, match='strokes'): unpack_strokes(bad)

def test_strokes_survive_any_bytes():
    rng = np.random.default_rng(0)
    for _ in range(500):
        b = rng.integers(0, 256, rng.integers(0, 40)).astype(np.uint8).tobytes()
        try: s = unpack_strokes(b)
        except ValueError: continue
        assert pack_strokes(s)==b

@pytest.mark.parametrize('bad', [[[[256],[0]]], [[[-1],[0]]], [[[.5],[0]]], [[1,2]], 'ab', [[['a'],['b']]], [np.zeros((3,2))], [np.zeros((2,0), np.uint8)], [[[float('nan')],[0]]]])
def test_strokes_refused(bad):
    with pytest.raises(ValueError): get_codec('strokes').to_bytes(bad)

def agg(strokes, size, width):
    "The same picture by matplotlib's canvas"
    import matplotlib.pyplot as plt
    fig = plt.figure(figsize=(1,1), dpi=size)
    ax = fig.add_axes((0,0,1,1)); ax.axis('off'); ax.set_xlim(0, size); ax.set_ylim(size, 0)
    xy = np.concatenate(strokes, 1).astype(int)
    off = 127-(xy.min(1)+xy.max(1))//2
    for s in strokes:
        x,y = (s+off[:,None])*(size-width*size/256)/255+width*size/512
        ax.plot(x, y, color='k', lw=width*size/256*72/size, solid_capstyle='round', solid_joinstyle='round', snap=False, path_effects=[])
    with plt.rc_context({'path.simplify':False}): fig.canvas.draw()
    a = 255-np.asarray(fig.canvas.buffer_rgba())[...,0]
    plt.close(fig)
    return a

@pytest.mark.parametrize('size,width', [(256,3), (64,8), (200,2.5), (256,16)])
def test_pixels_are_matplotlibs(size, width):
    mad = []
    for i in range(10):
        s = [t for t in simplify(doodle(i)) if np.ptp(t, axis=1).any()] or [np.array([[0,255],[0,255]], np.uint8)]   # matplotlib leaves out dots
        d = np.abs(rasterise(s, size, width).astype(int)-agg(s, size, width))
        ink = (rasterise(s, size, width)>0).sum()
        mad.append(d.sum()/ink)
        assert d.max()<=128   # where two segments each cover half a pixel
    assert np.mean(mad)<8   # of 255, over the pixels with ink

def test_batch_is_one_by_one():
    s = simplify_batch([doodle(i) for i in range(40)])
    for kw in ({}, dict(antialias=False), dict(time='grey'), dict(time='colour', size=64), dict(size=100, width=7.5)):
        np.testing.assert_array_equal(rasterise_batch([pack_strokes(d) for d in s], **kw), np.stack([rasterise(d, **kw) for d in s]))

@pytest.fixture
def raster():
    m = sys.modules['fastai_remote.codec.raster']
    if m._pixels is None: pytest.skip('the C module is not built: no compiler')
    return m

@pytest.mark.parametrize('kw', [dict(), dict(size=28), dict(size=64, width=8.), dict(antialias=False), dict(time='grey'), dict(time='colour', size=100), dict(size=8, width=32.),
                                dict(size=500, width=.3), dict(size=128, width=32), dict(antialias=False, width=5.5, size=99), dict(time='colour', width=20, antialias=False)], ids=str)
def test_c_draws_the_same(raster, monkeypatch, kw):
    "To the bit, as NumPy"
    rng = np.random.default_rng(0)
    s = [*simplify_batch([doodle(i) for i in range(40)]), *([rng.integers(0, 256, (2,n), dtype=np.uint8) for n in rng.integers(1, 6, rng.integers(1, 4))] for _ in range(60)), [np.zeros((2,200), np.uint8)]]
    a = rasterise_batch(s, **kw)
    monkeypatch.setattr(raster, '_pixels', None)
    np.testing.assert_array_equal(a, rasterise_batch([pack_strokes(d) for d in s], **kw))

@pytest.mark.parametrize('b', [b'', b'\x00', b'\x02abc', b'\x01ab\x03', b'\xff'*9, b'\x81\x00ab', b'\x01ab'+b'\x80'], ids=repr)
def test_damaged_strokes(b, monkeypatch):
    "Are refused alike, with C and without"
    said = []
    for _ in range(2):
        with pytest.raises(ValueError) as e: rasterise_batch([pack_strokes([[[1,2],[3,4]]]), b])
        said.append(str(e.value))
        monkeypatch.setattr(sys.modules['fastai_remote.codec.raster'], '_pixels', None)
    assert said[0]==said[1]

def test_c_draw_refuses(raster):
    b = pack_strokes([[[1,2],[3,4]]])
    def draw(bs=(b,), n=64*64, size=64, R=1., shift=4, channels=1, inks=None): raster._pixels.draw(list(bs), np.empty(n, np.uint8), size, .5, R, .2, shift, True, channels, inks)
    draw()
    for kw in (dict(n=64*64-1), dict(size=4, n=16), dict(size=5000, n=25_000_000), dict(R=0.), dict(R=1e3), dict(R=float('nan')), dict(shift=9), dict(channels=2), dict(channels=3, n=3*64*64, inks=np.zeros(2, np.uint8)), dict(bs=[b,b[:-1]], n=2*64*64)):
        with pytest.raises(ValueError): draw(**kw)
    with pytest.raises(TypeError): draw(['x'])

def test_same_look_at_each_size():
    s = simplify(doodle(3))
    big,small = rasterise(s, 512, 4).astype(float),rasterise(s, 128, 4)
    assert np.abs(big.reshape(128, 4, 128, 4).mean((1,3))-small).mean()<4

def test_ink_fits():
    "A frame along the border has its full width, and nothing wraps to the other side"
    for size,width in ((256,3), (256,16), (64,3), (300,32), (28,16)):
        a = rasterise([np.array([[0,255,255,0,0],[0,0,255,255,0]], np.uint8)], size, width)
        w = width*size/256
        assert abs(a[size//2].sum()/255-2*w)<.2*w+.3 and (a[size//2]==a[size//2][::-1]).mean()>.95
        bar = rasterise([np.array([[0,0],[0,255]], np.uint8), np.array([[40,40],[255,0]], np.uint8)], size, width)
        assert not bar[:,size*3//4:].any()

def test_pngs():
    s = simplify(doodle(5))
    for r in (Rasterise(antialias=False), Rasterise(64), Rasterise(64, time='colour'), Rasterise(50, antialias=False)):
        im = Image.open(io.BytesIO(b:=r(s)))
        np.testing.assert_array_equal(np.asarray(im.convert('RGB' if r.time else 'L')), r.arrays([s])[0])
        assert get_codec('png').to_bytes(b)==b
        assert im.mode==('RGB' if r.time else 'L' if r.antialias else '1')
    assert r.create(pack_strokes(s)).size==(50,50)
    assert list(r({'sketch.strokes':s, 'cls':'x'}))==['sketch.png','cls']

@pytest.mark.parametrize('kw', [dict(size=4), dict(size=5000), dict(width=0), dict(width=33), dict(time='red')])
def test_raster_refuses(kw):
    with pytest.raises(ValueError): Rasterise(**kw)

# files

def raw_line(i, **kw):
    return json.dumps(dict(dict(word='cat' if i%2 else 'dog', countrycode='US', timestamp='t', recognized=i%3>0, key_id=str(2**60+i), drawing=doodle(i)), **kw)).encode()

def simple_line(i): return raw_line(i, drawing=[s.tolist() for s in simplify(doodle(i))])

def write_csv(f, ids, test=False, order=None):
    cols = order or (['key_id','countrycode','drawing'] if test else ['countrycode','drawing','key_id','recognized','timestamp','word'])
    with open(f, 'w', newline='') as h:
        w = csv.DictWriter(h, cols, lineterminator='\n', extrasaction='ignore')
        w.writeheader()
        for i in ids: w.writerow({**(d:=json.loads(simple_line(i))), 'drawing':json.dumps(d['drawing'])})

@pytest.fixture
def folder(tmp_path):
    (tmp_path/'raw').mkdir()
    (tmp_path/'raw/a.ndjson').write_bytes(b'\n'.join(raw_line(i) for i in range(150))+b'\n')
    (tmp_path/'b.ndjson').write_bytes(b'\n'.join(simple_line(i) for i in range(64)))
    write_csv(tmp_path/'c.csv', range(70))
    return tmp_path

def ids(src, idxs): return [src.load(r)['id']-2**60 for _,r in src.read(np.array(idxs))]

def test_indexed(folder):
    src = drawing_samples(folder)   # b.ndjson, c.csv, raw/a.ndjson
    assert len(src)==64+70+150
    assert [o['id']-2**60 for o in src] == [*range(64),*range(70),*range(150)]
    for idxs in ([0], [283], [64,63,62], [200,5,6,7,130,131,132,133,134,135], list(range(284)), [], [283]*3, np.random.default_rng(0).permutation(284).tolist()): assert ids(src, idxs)==[[*range(64),*range(70),*range(150)][i] for i in idxs]
    for k,o in enumerate((src[3], src[64+3], src[134+3])):
        want = simplify(doodle(3))
        assert (o['cls'], o['recognized.u1'])==('cat', 0) and list(o)==['strokes','cls','id','recognized.u1'], k
        for a,b in zip(o['strokes'], want, strict=True): np.testing.assert_array_equal(a, b)
    assert [n for n,_ in src.read(np.array([64,0,134]))]==['c.csv:2','b.ndjson:1','a.ndjson:1']
    assert [o['id'] for o in src[-2:]]==[2**60+148,2**60+149]
    assert '284 drawings in 3 files, labelled, as strokes' in repr(src)

def test_take_is_light(folder):
    part = drawing_samples(folder).read(np.arange(64))
    assert len(pickle.dumps(part))<1200 and len(part)==64

def test_load_in_another_process(folder):
    src = drawing_samples(folder, 'png', size=32)
    b = pickle.dumps([r for _,r in src.read(np.arange(10))])
    assert pickle.loads(pickle.dumps(src.load))(pickle.loads(b)[7])==src[7]

def test_fingerprint(folder):
    code = f"from fastai_remote.source.drawings import *; print(drawing_samples({str(folder)!r}).fingerprint())"
    outs = {subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip() for _ in range(2)}
    assert outs=={repr(drawing_samples(folder).fingerprint())}
    assert repr(drawing_samples(folder, 'png').fingerprint()) not in outs
    (folder/'b.ndjson').write_bytes(simple_line(0))
    assert repr(drawing_samples(folder).fingerprint()) not in outs

@pytest.mark.parametrize('tail', [b'', b'\n', b'\n\n', b'\r\n', b'\n  \n\n'])
@pytest.mark.parametrize('n', [1, 63, 64, 65, 128, 129])
def test_line_ends(tmp_path, n, tail):
    sep = b'\r\n' if tail==b'\r\n' else b'\n'
    (tmp_path/'a.ndjson').write_bytes(sep.join(raw_line(i, drawing=[[[0,255],[0,9]]]) for i in range(n))+tail)
    src = drawing_samples(tmp_path/'a.ndjson')
    assert len(src)==n and ids(src, range(n))==list(range(n))

def test_index_in_pieces(folder):
    from fastai_remote.source.drawings import _index
    f = folder/'raw/a.ndjson'
    for piece in (1, 7, 1000, 1<<20):
        at,n = _index(f, 0, piece) if piece>7 else _index(folder/'raw/a.ndjson', 0, 1000)
        assert n==150 and at.tolist()==[0, *np.cumsum([len(raw_line(i))+1 for i in range(150)])[[63,127]].tolist(), f.stat().st_size-1]

def test_csv_kinds(tmp_path):
    write_csv(tmp_path/'test.csv', range(5), test=True)
    assert list(drawing_samples(tmp_path/'test.csv')[0])==['strokes','id']
    write_csv(tmp_path/'order.csv', range(5), order=['word','key_id','timestamp','drawing','recognized','countrycode'])
    assert drawing_samples(tmp_path/'order.csv')[4]['cls']=='dog'
    assert 'cls' not in drawing_samples(tmp_path/'order.csv', with_labels=False)[4]
    (tmp_path/'bad.csv').write_text('a,b\n1,2\n')
    with pytest.raises(ValueError, match='bad.csv: neither JSON lines nor a CSV'): drawing_samples(tmp_path/'bad.csv')

def test_damaged_lines_are_errors_of_their_own(tmp_path):
    lines = [raw_line(i) for i in range(10)]
    bad = {1:b'{"drawing', 2:b'', 3:b'[1]', 4:raw_line(4, drawing='[[[1],[2]]]'), 5:raw_line(5, drawing=[]), 6:raw_line(6, drawing=[[[1,2],[3],[4]]]), 7:b'\xff\xfe', 8:raw_line(8, drawing=[[['a'],['b'],[0]]])}
    (tmp_path/'a.ndjson').write_bytes(b'\n'.join(bad.get(i, l) for i,l in enumerate(lines)))
    for store in ('strokes','png'):
        src = drawing_samples(tmp_path/'a.ndjson', store)
        good = []
        for i,(_,raw) in enumerate(src.read(np.arange(10))):
            if i in bad:
                with pytest.raises(ValueError): src.load(raw)
            else: good.append(src.load(raw)['id']-2**60)
        assert good==[0,9]

def tight(i, **kw): return json.dumps(json.loads(raw_line(i, **kw)), separators=(',',':')).encode()

def test_short_cut_is_the_same(tmp_path):
    "Without spaces, numbers are read as text: whole, negative, fractions, in one file"
    drawings = [doodle(i) for i in range(60)]+[[[[-5,7,300],[1,2,-300],[0,1,2]]], [[[1e-3,2.5,4e2],[0,1,2],[0,1,2]]], [[[7],[8],[9]]]]
    for name,f in (('a',raw_line), ('b',tight)): (tmp_path/f'{name}.ndjson').write_bytes(b'\n'.join(f(i, drawing=d) for i,d in enumerate(drawings)))
    a,b = (drawing_samples(tmp_path/f'{n}.ndjson')[:] for n in 'ab')
    for i,(x,y,d) in enumerate(zip(a, b, drawings, strict=True)):
        assert (x['id'], x['cls'])==(y['id'], y['cls'])==(2**60+i, 'cat' if i%2 else 'dog')
        for s,t,u in zip(x['strokes'], y['strokes'], simplify(d), strict=True): assert np.array_equal(s, t) and np.array_equal(s, u)

@pytest.mark.parametrize('old,new', [(b'[[[1,2]', b'[[[1,,2]'), (b'[3,4]', b'[3]'), (b'[3,4]', b'[]'), (b'[3,4]', b'[3,x]'), (b'[3,4]', b'[3,[4]]'), (b'[[[1,2]', b'[[[1,-]'),
    (b'[[[1,2]', b'[[1,2]'), (b'[[[1,2]', b'[[[1,99999999999x]'), (b'[[[1,2]', b'[[[1,1e999]'), (b']]]}', b']]'),
        (b'[[[1,2]', b'[[[1,2'), (b'"key_id"', b'"key"')])
def test_short_cut_is_strict(tmp_path, old, new):
    good = tight(1, drawing=[[[1,2],[3,4],[5,6]],[[7,8],[9,9],[9,10]]])
    assert old in good
    (tmp_path/'a.ndjson').write_bytes(b'\n'.join([good]*9+[good.replace(old, new)]+[good]*9))
    src = drawing_samples(tmp_path)
    for i,(_,raw) in enumerate(src.read(np.arange(19))):
        if i!=9: assert len(src.load(raw)['strokes'])==2
        else:
            with pytest.raises(ValueError): src.load(raw)

@pytest.mark.parametrize('strokes', [b'[[[1, 2],[3, 4],[0, 5]]]', b'[[[1e1,2],[3,4],[0,5]]]',
    b'[[[1E1,2],[3,4e0],[0,5]]]', b'[[[1234567890,2],[3,4],[0,5]]]', b'[[[1,99999999999],[3,4],[0,5]]]',
        b'[[[ 1,2 ],[3,4],[0,5]],[[7],[8],[9]]]',
    b'[[[1.5, -2],[3,4],[0,5]]]', b'[[[0.12345678901234567890,2],[3,4],[0,5]]]', b'[[[-0,0.0],[3,4],[0,5]]]'])
def test_numbers_are_read_however_json_writes_them(tmp_path, strokes):
    "Also beside drawings whose numbers are plain, and without a difference to what `json` reads"
    good = tight(1, drawing=[[[1,2],[3,4],[5,6]]])
    other = json.dumps(dict(json.loads(good), drawing=0), separators=(',',':')).encode().replace(b'"drawing":0',
        b'"drawing":'+strokes)
    (tmp_path/'a.ndjson').write_bytes(b'\n'.join([good]*5+[other]+[good]*5))
    found = drawing_samples(tmp_path)[:]
    for a,b in zip(found[5]['strokes'], simplify(json.loads(strokes)), strict=True): assert np.array_equal(a, b)
    for k in {*range(11)}-{5}: assert all(np.array_equal(a, b) for a,b in zip(found[k]['strokes'],
        simplify([[[1,2],[3,4],[5,6]]]), strict=True))

def test_blank_lines_are_the_same_in_plain_and_compressed_files(tmp_path):
    "Within a file each is a sample that fails; those at its end are none"
    lines = b'\n'.join([raw_line(0), b'', raw_line(1), b'  ', b'', raw_line(2), b'', b' '])+b'\n'
    (tmp_path/'a.ndjson').write_bytes(lines)
    for name,op in (('b.ndjson.gz',gzip.open), ('b.ndjson.xz',lzma.open)):
        with op(tmp_path/name, 'wb') as f: f.write(lines)
    plain = drawing_samples(tmp_path/'a.ndjson')
    for rows in (plain.read(np.arange(len(plain))),
        *(chain.from_iterable(drawing_samples(tmp_path/name).stream(9)) for name in ('b.ndjson.gz','b.ndjson.xz'))):
        results = []
        for name,raw in rows:
            try: results.append((name[-1], drawing_samples(tmp_path/'a.ndjson').load(raw)['id']-2**60))
            except ValueError as e: results.append((name[-1], str(e)))
        assert results==[('1',0),('2','an empty line'),('3',1),('4','an empty line'),('5','an empty line'),('6',2)]

def test_nothing_is_evaluated(tmp_path):
    (tmp_path/'a.csv').write_text('key_id,drawing\n1,"__import__(\'os\').system(\'touch /tmp/evil\')"\n')
    with pytest.raises(ValueError, match='Expecting value'): drawing_samples(tmp_path/'a.csv')[0]

def pack(f, op, to):
    with op(to, 'wb') as h: h.write(f.read_bytes())

def test_stream(folder):
    pack(folder/'b.ndjson', gzip.open, folder/'b.ndjson.gz'); pack(folder/'c.csv', lzma.open, folder/'c.csv.xz')
    src = drawing_samples([folder/'b.ndjson.gz', folder/'c.csv.xz', folder/'raw/a.ndjson'])
    assert not hasattr(src, '__len__') and 'a stream of drawings in 3 files' in repr(src)
    parts = list(src.stream(100))
    assert [len(p) for p in parts]==[100,100,84]
    got = [src.load(r)['id']-2**60 for p in pickle.loads(pickle.dumps(parts)) for _,r in p]
    assert sorted(got)==sorted([*range(64),*range(70),*range(150)]) and got[:6]==[0,0,0,1,1,1]
    assert src[5]['id']==2**60+1

def test_stream_of_many_files(tmp_path):
    for k in range(40):
        with gzip.open(tmp_path/f'{k:02}.ndjson.gz', 'wb') as h: h.write(b'\n'.join(raw_line(k, drawing=[[[0,9],[0,255]]]) for _ in range(k%4)))
    src = drawing_samples(tmp_path)
    assert sorted(o['id']-2**60 for o in src)==sorted(k for k in range(40) for _ in range(k%4))

@pytest.mark.parametrize('op,end', [(gzip.open,'.gz'), (lzma.open,'.xz')])
def test_truncated_stream(folder, op, end):
    pack(folder/'b.ndjson', op, f:=folder/f'b.ndjson{end}')
    f.write_bytes(f.read_bytes()[:-30])
    with pytest.raises(OSError, match=f'b.ndjson{end}: truncated or damaged'): list(drawing_samples(f).stream(10))

def test_no_files(tmp_path):
    for bad in (tmp_path, tmp_path/'nowhere', [tmp_path/'x.csv']):
        with pytest.raises(FileNotFoundError): drawing_samples(bad)
    (tmp_path/'empty.ndjson').write_bytes(b'\n')
    with pytest.raises(ValueError, match='no drawings'): drawing_samples(tmp_path)
    with pytest.raises(ValueError, match="'strokes' or 'png'"): drawing_samples(tmp_path, 'jpg')

def test_no_heavy_imports():
    code = "import sys, fastai_remote.source.drawings; print([m for m in ('torch','fastai','matplotlib','scipy','pandas') if m in sys.modules])"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip()=='[]'

# --- what is kept of a drawing, and of how many

def test_countries_and_timestamps(folder):
    "Other columns are kept if they are asked for"
    for o in drawing_samples(folder, keep=['countrycode','timestamp']): assert (o['countrycode.cls'],o['timestamp.txt'])==('US','t')
    assert list(drawing_samples(folder/'raw', keep='countrycode')[0])==['strokes','cls','id','recognized.u1','countrycode.cls']
    with pytest.raises(ValueError, match="no 'nope' among word, countrycode"): drawing_samples(folder, keep=['nope'])[0]

def test_points_and_times(folder, tmp_path):
    "All points of raw drawings with their times, exact; the strokes are the same as without"
    plain = drawing_samples(folder/'raw')
    for i,o in enumerate(drawing_samples(folder/'raw', times=True)):
        points,drawing = o['points.npy'],doodle(i)
        assert points.shape==(sum(len(x) for x,_,_ in drawing),4) and points.dtype==(np.float32 if i%2 else np.float64)
        ends = np.flatnonzero(points[:,3])+1
        for k,(a,b) in enumerate(zip([0,*ends], ends)): assert points[a:b,:3].T.tolist()==[[float(v) for v in row] for row in drawing[k]]
        for a,b in zip(o['strokes'], plain[i]['strokes'], strict=True): np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match='no times of points, which only the raw files'): drawing_samples(folder/'b.ndjson', times=True)[0]

@pytest.mark.parametrize('packed', [False,True])
def test_a_limit_per_class(folder, packed):
    "The first drawings of each word, over all files; the same from compressed files and in any order of reading"
    if packed:
        for name in ('b.ndjson','c.csv','raw/a.ndjson'):
            with gzip.open(f'{folder/name}.gz', 'wb') as f: f.write((folder/name).read_bytes())
            (folder/name).unlink()
    src = drawing_samples(folder, max_per_class=40)
    found = [(o['cls'],o['id']-2**60) for o in src]
    assert len(found)==80 and sum(w=='cat' for w,_ in found)==40
    if not packed:
        assert found==[('dog cat'.split()[i%2],i) for i in [*range(64),*range(16)]] and len(src)==80
        assert ids(src, [79,64,63,0,70])==[15,0,63,0,6]
        assert [o['id']-2**60 for o in drawing_samples(folder/'raw', max_per_class=1000)]==list(range(150))
        assert src.fingerprint()!=drawing_samples(folder).fingerprint() and len(drawing_samples(folder))==284
    with pytest.raises(ValueError, match='max_per_class must be at least 1'): drawing_samples(folder, max_per_class=0)

def test_a_limit_needs_words_and_mixes_classes(tmp_path):
    (tmp_path/'a.ndjson').write_bytes(b'\n'.join(raw_line(i, word='"q\\' if i<90 else 'z') for i in range(100))+b'\nno json\n')
    src = drawing_samples(tmp_path, max_per_class=3)
    assert len(src)==7 and ids(src, range(6))==[0,1,2,90,91,92]
    write_csv(tmp_path/'t.csv', range(5), test=True)
    with pytest.raises(ValueError, match='t.csv:2: max_per_class= needs the word of each drawing'): drawing_samples(tmp_path/'t.csv', max_per_class=3)

@pytest.mark.parametrize('bad', [5, [5], [[1,2],[3,4]], [[[1]]], [[]], [[None,None]], [{'x':[1], 'y':[2]}],
                                 [[['1','2'],['3','4']]], [['12','34']]])
def test_what_is_no_drawing_is_refused(bad):
    "Also text that looks like numbers; and there may be no drawings at all"
    for function,o in (simplify,bad), (simplify_batch,[bad]):
        with pytest.raises(ValueError, match='a drawing is a list of strokes|points that are no numbers'): function(o)
    assert simplify_batch([])==[]

def test_pictures_replace_no_other_field():
    with pytest.raises(ValueError, match="two fields would be called 'png'"):
        Rasterise()({'strokes':simplify(doodle(5)), 'png':b'x'})

def test_no_batch_is_drawn_without_the_c_module(monkeypatch):
    for module in fastai_remote.codec.raster._pixels,None:
        monkeypatch.setattr(fastai_remote.codec.raster, '_pixels', module)
        assert rasterise_batch([], 16).shape==(0,16,16) and rasterise_batch([], 16, time='colour').shape==(0,16,16,3)

def test_what_recognized_means_is_not_guessed(tmp_path):
    def load(value):
        (tmp_path/'a.ndjson').write_text(json.dumps({'key_id':1, 'recognized':value, 'drawing':[[[1,2],[3,4]]]}))
        return drawing_samples(tmp_path/'a.ndjson')[0]['recognized.u1']
    assert [load(o) for o in (True,'True','TRUE','1',1,False,'false','0',0)]==[1,1,1,1,1,0,0,0,0]
    for o in 'yes',None,2:
        with pytest.raises(ValueError, match='recognized is .*, neither true nor false'): load(o)

def test_kept_columns_replace_no_other_field(folder):
    for keep in 'strokes','id','cls':
        with pytest.raises(ValueError, match=f'keep=: {keep!r} is the name of a field'):
            drawing_samples(folder, keep=[keep])

def test_a_line_that_is_too_long_for_csv_is_one_failed_sample(tmp_path):
    write_csv(tmp_path/'a.csv', range(3))
    with open(tmp_path/'a.csv', 'a') as f: f.write('x'*200_000+'\n')
    source = drawing_samples(tmp_path/'a.csv', max_per_class=5)
    assert len(source)==4 and ids(source, range(3))==[0,1,2]
    with pytest.raises(ValueError, match='field larger than field limit'): source[3]

def test_only_a_drawing_of_the_line_itself_counts(tmp_path):
    def load(text):
        (tmp_path/'a.ndjson').write_text(text)
        return drawing_samples(tmp_path/'a.ndjson')[0]
    with pytest.raises(ValueError, match='no drawing or no key_id'):
        load('{"other":{"drawing":[[[9,19],[9,9],[0,1]]]},"key_id":5}')
    for key in '"5_1"','true','null','5.0','"x"':
        with pytest.raises(ValueError, match='key_id .* is no whole number'):
            load('{"key_id":%s,"drawing":[[[1,2],[3,4]]]}' % key)
    assert [load('{"key_id":%s,"drawing":[[[1,2],[3,4]]]}' % key)['id'] for key in ('5','"5"','-7')]==[5,5,-7]

NO_DRAWINGS = [b'[1]', b'5', b'{}', b'{"word":[1]}', b'[{"key_id":"1"}]', b'['*100_000, b'', b'[1', b'null',
               b'{"key_id":1,"drawing":[[[1,2],[3,4]]],"word":[1]}', b'{"word":"cat"}',
               b'{"word": "cat", "drawing": [[[', b'{"key_id":1,"word":"dog","drawing":[[[1,2],[3,4',
               b'{"word":"cat","key_id":1,"drawing":[[[1,2],[3{"word":"dog","key_id":2,"drawing":[[[1,2],[3,4]]]}']

@pytest.mark.parametrize('line', NO_DRAWINGS, ids=lambda o: o[:20].decode() or 'empty')
@pytest.mark.parametrize('packed', [False,True])
def test_a_line_that_is_no_drawing_is_one_sample_with_a_limit_too(tmp_path, line, packed):
    "Which fails when it is loaded or stored. The lines around it are there"
    text = b'\n'.join([raw_line(0, word='cat'), line, raw_line(1, word='dog'), raw_line(2, word='cat')])
    path = tmp_path/('a.ndjson.gz' if packed else 'a.ndjson')
    path.write_bytes(gzip.compress(text) if packed else text)
    source = drawing_samples(path, max_per_class=1)
    first,(name,_),last = next(source.stream(9)) if packed else source.read(np.arange(3))
    assert name==f'{path.name}:2' and [source.load(raw)['cls'] for _,raw in (first,last)]==['cat','dog']

@pytest.mark.parametrize('packed', [False,True])
def test_the_word_of_the_drawing_itself_is_limited(tmp_path, packed):
    "Not that of another dict in the line, or of a text, or the first of two; spaces do not matter"
    drawing = '"key_id":1,"drawing":[[[1,2],[3,4]]]'
    lines = ['{"meta":{"word":"x"},"word":"cat",%s}' % drawing, '{"other":{"drawing":[[[1]]]},%s,"word":"x"}' % drawing,
             r'{"text":"\"word\":\"x\"","word":"cat",%s}' % drawing, '{"word":"x","word":"cat",%s}' % drawing,
             '{"word" : "cat" , "key_id" : 1 , "drawing" : [ [ [1, 2], [3, 4] ] ] }', r'{%s,"word":"\u0078"}' % drawing,
             '{"drawing":[[[5]]],"word":"y",%s}' % drawing, '{"word":"z",%s}' % drawing]
    text = '\n'.join(lines).encode()
    path = tmp_path/('a.ndjson.gz' if packed else 'a.ndjson')
    path.write_bytes(gzip.compress(text) if packed else text)
    assert [o['cls'] for o in drawing_samples(path, max_per_class=1)]==['cat','x','y','z']

def test_a_stream_has_no_samples_below_zero(folder):
    pack(folder/'b.ndjson', gzip.open, folder/'b.ndjson.gz')
    stream = drawing_samples(folder/'b.ndjson.gz')
    for i in -1,10**6:
        with pytest.raises(IndexError, match=f'{i}'): stream[i]
