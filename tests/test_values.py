"What goes in comes back the same, or is a failed sample with a reason: numbers, JSON, arrays, text, labels, masks"
import decimal, fractions, gzip, io, json, math, os, shutil, tarfile
from datetime import datetime
from itertools import count
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import examples
import torch
from hypothesis import given, strategies as st
from PIL import Image

from fastai_remote import IngestError, RedisStore, ShardStore, csv_samples, image_samples, index_shards, redis_server, tar_samples, to_redis, to_shards
from fastai_remote import MemoryStore
from fastai_remote.codec.base import Encoded
from fastai_remote.codec.fields import get_codec
from fastai_remote.codec.numbers import narrow
from fastai_remote.source.columns import full_array
from fastai_remote.codec.webdataset import parse_number

@pytest.fixture(scope='module')
def server():
    "A server for this module, for others' data would be in the way"
    with redis_server() as s: yield s

_names = count()

@pytest.fixture(params=['redis','shards'])
def put(request, server, tmp_path):
    "Write to Redis or to shards: the store and the report"
    def put(src, **kw):
        name,kw = f'd{next(_names)}',{'num_workers':1, 'progress':False, 'shuffle':False, **kw}
        if request.param=='redis': return (rep:=to_redis(src, server.url, name, **kw)) and RedisStore(server.url, name),rep
        return (rep:=to_shards(src, tmp_path/name, **kw)) and ShardStore(tmp_path/name),rep
    return put

def values(s, f): return [s[i][f] for i in range(len(s))]

def fails(put, field, good, bad, says):
    "Of `good` and `bad` values of `field`, the good ones come back the same, and the bad one is a failure that says why"
    s,rep = put([{field:v} for v in good]+[{field:bad}])
    assert (rep.failed,len(s))==(1,len(good)) and says in rep.failures[0][1], rep.failures
    return s

# --- numbers

lossy = [('x.f4', 1e300, 'inf'), ('x.f4', -1e300, 'inf'), ('x.f2', 70000., 'inf'), ('x.f4', np.float64(1e39), 'inf'), ('x.f8', np.longdouble('1e400'), 'inf'), ('x.f8', 10**400, 'f8'),
    ('x.f8', decimal.Decimal('1e400'), 'inf'), ('x.f4', fractions.Fraction(10**50), 'f4'), ('x.f4', torch.tensor(1e300, dtype=torch.float64), 'inf'),
    ('x.f4', 1+2j, 'complex'), ('x.f8', np.complex64(1+0j), 'complex'), ('x.f8', torch.tensor(1j), 'complex'), ('x.f4', np.array(2j), 'complex'), ('x.i8', 3+0j, 'complex'),
    ('x.f8', 2**53+1, '9007199254740993'), ('x.f8', np.int64(-2**53-1), '-9007199254740993'), ('x.f8', torch.tensor(2**53+1), '9007199254740993'), ('x.f8', decimal.Decimal(2**53+1), '9007199254740993'),
    ('x.f4', 2**24+1, '16777217'), ('x.f2', 2049, '2049'), ('x.f2', 70000, '70000'), ('x.f4', np.uint64(2**64-1), '18446744073709551615'),
    ('x.i4', 2**31, '2147483648'), ('x.u1', -1, '-1'), ('x.u1', 256, '256'), ('x.i8', 2**63, '9223372036854775808'), ('x.i8', np.uint64(2**63), '9223372036854775808'), ('cls', 2**63, '9223372036854775808'),
    ('x.i4', 1.5, '1.5'), ('x.i4', 3., '3.0'), ('x.i4', np.float32(2), '2.0'), ('x.i4', torch.tensor(2.5), '2.5'), ('x.i4', math.nan, 'nan'), ('x.i4', decimal.Decimal('1.5'), '1.5'), ('id', 1.5, '1.5'),
    ('x.i4', '3', "'3'"), ('x.f4', '3.5', "'3.5'"), ('x.f4', np.str_('1'), "'1'"), ('x.f4', np.array('1'), "'1'"), ('x.f4', b'1', "b'1'"), ('x.f4', None, 'None'), ('x.f4', pd.NA, 'NA'), ('x.f8', pd.NaT, 'NaT'),
    ('x.f8', np.datetime64('2020-01-01T00:00:00', 'ns'), 'datetime64'), ('x.i8', np.datetime64('2020-01-01T00:00:00', 'ns'), 'datetime64'), ('x.i8', np.timedelta64(3, 'ns'), 'timedelta64'), ('x.f8', datetime(2020, 1, 1), 'datetime'), ('x.f8', pd.Timestamp(0), 'Timestamp'),
    ('x.f4', [1.], 'list'), ('x.f4', np.ones(1), 'shape (1,)'), ('x.f4', np.ones(2), 'shape (2,)'), ('x.i8', torch.ones(2, 2), 'shape (2, 2)'), ('x.f8', np.ma.masked, 'mask'), ('x.f8', object(), 'object')]

@pytest.mark.parametrize('field, bad, says', lossy, ids=[f'{f} {type(v).__name__}' if type(v) is object else f'{f} {v!r}'[:40] for f,v,_ in lossy])
def test_number_that_would_change_is_a_failed_sample(put, field, bad, says):
    fails(put, field, [0,1,2], bad, says)

@pytest.mark.parametrize('field, o, back', [('x.f4', .1, float(np.float32(.1))), ('x.f2', np.float64(.1), float(np.float16(.1))), ('x.f8', .1, .1), ('x.f4', math.inf, math.inf), ('x.f4', -math.inf, -math.inf),
    ('x.f4', np.float32(7.25), 7.25), ('x.f8', decimal.Decimal('.1'), .1), ('x.f8', fractions.Fraction(1, 4), .25), ('x.f4', torch.tensor(.5), .5), ('x.f8', 2**60, 2.**60), ('x.f4', True, 1.), ('x.f4', np.int8(-3), -3.), ('x.f8', -0., -0.),
    ('x.i8', True, 1), ('x.u1', np.bool_(True), 1), ('x.i2', torch.tensor(-5), -5), ('x.i8', -2**63, -2**63), ('x.f4', torch.tensor(.5, dtype=torch.bfloat16), .5), ('x.f4', 1e-300, 0.)], ids=str)
def test_number_that_fits_comes_back(put, field, o, back):
    "Rounding to the width that a field's name asks for is no loss, and neither are inf and nan that were given"
    s,rep = put([{field:o}]*2)
    assert rep.failed==0 and repr(values(s, field))==repr([back]*2)

def test_nan_comes_back(put):
    for o in (math.nan, np.float32('nan'), decimal.Decimal('nan'), torch.tensor(math.nan)):
        s,rep = put([{f'x.{k}':o for k in ('f2','f4','f8')}])
        assert rep.failed==0 and all(math.isnan(v) for v in s[0].values())

@examples(300)
@given(st.sampled_from('i1 i2 i4 i8 u1 u2 u4 f2 f4 f8'.split()), st.one_of(st.integers(), st.floats(), st.complex_numbers(), st.booleans(), st.decimals(allow_nan=False), st.text(max_size=3)), st.sampled_from([lambda o: o, np.asarray]))
def test_any_number_fits_or_is_refused(codec, o, made):
    c = get_codec(codec)
    try: back = c.from_bytes(c.to_array([made(o)])[0])
    except (ValueError,TypeError): return
    if isinstance(o, float) and o!=o: assert back!=back
    elif isinstance(o, (bool,int)) or isinstance(o, decimal.Decimal) and o.is_finite() and o==o.to_integral_value(): assert back==o
    else:
        assert math.isinf(back)==math.isinf(o)
        with np.errstate(over='ignore'): assert back==np.dtype(codec).type(float(o))

def test_numbers_of_others_are_checked_too(put, tmp_path):
    "Numbers in tars are text: a float that would be inf, an int that would change"
    with tarfile.open(tmp_path/'a.tar', 'w') as t:
        for i,(a,b) in enumerate([('1','.5'),('9007199254740993','.5'),('2','1e300'),('3','inf'),('4','1e999')]):
            for ext,v in (('x.f8',a),('y.f4',b)):
                (m:=tarfile.TarInfo(f'{i}.{ext}')).size = len(v)
                t.addfile(m, io.BytesIO(v.encode()))
    s,rep = put(tar_samples(tmp_path/'a.tar'))
    assert (rep.failed,values(s, 'x.f8'),values(s, 'y.f4'))==(3,[1.,3.],[.5,math.inf])
    rep = index_shards(tmp_path, num_workers=1, progress=False)
    assert (rep.failed,values(ShardStore(tmp_path), 'x.f8'))==(3,[1.,3.])

# --- JSON, labels, arrays, text

@pytest.mark.parametrize('bad, says', [({1:'a'}, 'key 1'), ({'a':[{None:1}]}, 'key None'), ({'a':{True:1}}, 'key True'), ({'a':np.float32(1)}, 'float32'), ({'a':{1,2}}, 'set'), (b'{"a":', 'JSON'), ({'a':datetime(2020,1,1)}, 'datetime'), ({'a':'caf\udce9'}, 'UTF-8'), ({'caf\udce9':1}, 'UTF-8')])
def test_json_that_would_change_is_a_failed_sample(put, bad, says):
    good = [{'a':[1,None,True,1.5,'ü']}, {'b':2**70}, [], 'text', 3]
    assert values(fails(put, 'json', good, bad, says), 'json')==good

def test_json_keeps_nan_and_makes_lists_of_tuples(put):
    s,rep = put([{'json':{'a':(1,(2,)), 'b':math.inf}}, {'json':math.nan}])
    assert rep.failed==0 and s[0]['json']=={'a':[1,[2]], 'b':math.inf} and math.isnan(s[1]['json'])

@pytest.mark.parametrize('bad, says', [(['a',None], 'None'), (['a',.5], '0.5'), (['a',['b']], "['b']"), ({'a':1}, 'dict'), ('ab', "str 'ab'"), (['a',True], 'True'), (['caf\udce9'], 'UTF-8'), (b'["a", 0.5]', '0.5'), (b'{"a":1}', 'list'), (rb'["\udce9"]', 'UTF-8'), (None, 'None')])
def test_labels_that_are_none_are_a_failed_sample(put, bad, says):
    s = fails(put, 'labels', [['a','b'],[],('c',),np.array(['a'])], bad, says)
    assert values(s, 'labels')==[['a','b'],[],['c'],['a']] and s.vocab==['a','b','c']

def test_bytes_that_another_codec_encoded_are_checked_as_labels():
    for encoded in (Encoded.of(b'{"a":1}', 'json'), Encoded.of(b'[1.5]', 'json')):
        with pytest.raises(TypeError, match='labels: '): get_codec('labels').to_bytes(encoded)
    assert get_codec('labels').to_bytes(Encoded.of(b'["a"]', 'json'))==b'["a"]'

def test_set_of_labels_is_stored_sorted(put):
    assert values(put([{'labels':{'b','c','a'}}])[0], 'labels')==[['a','b','c']]

@pytest.mark.parametrize('field', ['npy','npz'])
@pytest.mark.parametrize('bad, says', [([1,'a'], 'text'), ([2**53+1,.5], '9007199254740993'), ([2**63-1,-.5], '9223372036854775807'), ([1,None], 'object'), ('abc', 'str'), (np.ma.masked_equal([1,2], 2), 'mask'), ([{}], 'object'), ([[1],[1,2]], ''),
    (Image.new('P', (2,2)), 'mode P'), (Image.new('CMYK', (2,2)), 'mode CMYK')])
def test_array_that_would_change_is_a_failed_sample(put, field, bad, says):
    s = fails(put, field, [[1,2],np.float32([.1]),torch.arange(3),[[True],[False]],(1,2.5),np.array(['a','b']),Image.new('RGB', (2,3))], bad, says)
    assert [np.asarray(v).tolist() for v in values(s, field)][:5]==[[1,2],[np.float32(.1)],[0,1,2],[[True],[False]],[1.,2.5]]

@pytest.mark.parametrize('bad, says', [({'arr_0':np.ones(2)}, 'arr_0'), ({'a.npy':np.ones(2)}, 'a.npy'), ({1:np.ones(2)}, ''), ({'file':np.ones(2)}, 'file'), ({'a\0b':np.ones(2)}, ''), ({'a':[1,'b']}, 'text'), ({'a':np.array([None])}, 'object')])
def test_arrays_whose_names_would_change_are_a_failed_sample(put, bad, says):
    s = fails(put, 'npz', [{'a':np.ones(2), 'b':[1]}, {}], bad, says)
    assert list(s[0]['npz'])==['a','b'] and s[1]['npz']=={}

masked = np.ma.array([1,2], mask=[False,True])
compound = np.ma.array([(1,2)], dtype=[('a',int),('b',int)], mask=[(False,True)])

@pytest.mark.parametrize('field, bad, says', [('npy',[1,np.ma.masked],'mask would be lost'),
    ('npy',[masked,masked],'mask would be lost'), ('npy',[[masked]],'mask would be lost'),
        ('npy',compound,'mask would be lost'),
    ('npz',{'a':[1,np.ma.masked]},'mask would be lost'), ('f4',masked,r'want one number, got shape \(2,\)'),
        ('i4',compound,r'want one number, got shape \(1,\)'),
            ('i4',masked[1],'got a masked one, which has no value: give a number'),
    ('f4',np.ma.array(5, mask=True),'got a masked one'), ('i4',compound[0],'want a number, got')])
def test_masked_values_are_refused_wherever_they_are(field, bad, says):
    "Also in lists, of which NumPy would make numbers, and in arrays with members"
    codec = get_codec(field)
    with pytest.raises((ValueError,TypeError),
        match=f'{field}: .*{says}'): codec.to_num(bad) if field in ('f4','i4') else codec.to_bytes(bad)

def test_masks_of_arrays_are_not_dropped_silently(put):
    assert values(put([{'npy':np.ma.array([1,2], mask=[False,False])}])[0], 'npy')[0].tolist()==[1,2]

lone = 'caf\udce9'   # as `os.fsdecode(b'caf\xe9')`

@pytest.mark.parametrize('field, good', [('txt','a'), ('note','a'), ('path','a'), ('key.txt','a'), ('cls','a'), ('other.cls','a'), ('labels',['a'])])
@pytest.mark.parametrize('num_workers', [1,2])
def test_text_that_is_no_utf8_is_a_failed_sample(put, field, good, num_workers):
    src = [{field:good, 'id':i} for i in range(40)]
    src[7] = {field:[lone] if field=='labels' else lone, 'id':7}
    s,rep = put(src, num_workers=num_workers, chunk=8)
    assert rep.failed==1 and 'UTF-8' in rep.failures[0][1] and sorted(values(s, 'id'))==[i for i in range(40) if i!=7]
    assert rep.failures[0][0]=='item 7' and s.verify(num_workers=1).bad==0
    for o in (repr(rep), rep._repr_html_(), str(list(s.failures()))): o.encode()

@pytest.mark.parametrize('kw', [dict(path=True), dict(label=lambda p: p.parent.name), dict(label=lambda p: [p.parent.name, 'x'])], ids=['path','label','labels'])
def test_file_names_that_are_no_utf8(put, images, tmp_path, kw):
    "As `os.fsdecode` gives them: a failure where the name is stored, and else as good as any"
    b = next(images.glob('*/*.jpg')).read_bytes()
    for d in (b'a', b'caf\xe9'):
        os.mkdir(os.path.join(os.fsencode(tmp_path), d))
        with open(os.path.join(os.fsencode(tmp_path), d, b'1.jpg'), 'wb') as f: f.write(b)
    s,rep = put(image_samples(tmp_path, **kw))
    assert (rep.written,rep.failed)==(1,1) and 'UTF-8' in rep.failures[0][1]
    for o in (*rep.failures[0], *next(iter(s.failures())), repr(rep), rep._repr_html_()): o.encode()
    assert rep.failures[0][0].endswith(r'caf\udce9/1.jpg')
    assert put(image_samples(tmp_path))[1].failed==0

def test_reasons_that_are_no_utf8_are_stored(put):
    def fn(i):
        if i==3: raise ValueError(f'no {lone}')
        return {'id':i}
    s,rep = put(list(range(9)), fn=fn)
    assert rep.failures==[('item 3',r'ValueError: no caf\udce9')]==list(s.failures())

@pytest.mark.parametrize('kw, says', [(dict(vocab=['a',lone]), 'UTF-8'), (dict(vocab={'labels':[lone]}), 'UTF-8')])
def test_vocabulary_that_is_no_utf8_is_refused_at_once(put, kw, says):
    with pytest.raises(ValueError, match=says): put([{'cls':'a', 'labels':['a']}]*5, **kw)
    with pytest.raises(ValueError, match=says): put({'train':[{'cls':'a'}], lone:[{'cls':'a'}]})

def test_labels_of_others_that_are_no_utf8(tmp_path):
    "In tars that are indexed where they lie: names, labels as JSON, and labels as text"
    with tarfile.open(tmp_path/'a.tar', 'w', encoding='latin-1') as t:
        for i,(k,c,l) in enumerate([('0',b'a',b'["x"]'),('1',b'caf\xe9',b'["x"]'),('2',b'b',rb'["\udce9"]'),('café 3',b'\xe9',b'[]'),('4',b'a',b'[]')]):
            for ext,v in (('cls',c),('labels',l)):
                (m:=tarfile.TarInfo(f'{k}.{ext}')).size = len(v)
                t.addfile(m, io.BytesIO(v))
    rep = index_shards(tmp_path, num_workers=1, progress=False)
    s = ShardStore(tmp_path)
    assert (rep.failed,len(s),s.manifest.vocab)==(3,2,{'cls':['a'],'labels':['x']})
    for o in (repr(rep), str(list(s.failures()))): o.encode()

def test_text_labels_of_others_that_look_like_numbers(tmp_path):
    "Where labels are text, `007` stays `007`"
    with tarfile.open(tmp_path/'a.tar', 'w') as t:
        for i,c in enumerate([b'agent',b'007',b'7']):
            (m:=tarfile.TarInfo(f'{i}.cls')).size = len(c)
            t.addfile(m, io.BytesIO(c))
    index_shards(tmp_path, num_workers=1, progress=False)
    assert values(ShardStore(tmp_path), 'cls')==['agent','007','7']

def _tar_of_labels(path, labels, extension='cls'):
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, 'w') as t:
        for i,label in enumerate(labels):
            for ext,content in (('txt',b'%d' % i), (extension,label)):
                if content is None: continue
                (m:=tarfile.TarInfo(f'{path.stem}-{i:03}.{ext}')).size = len(content)
                t.addfile(m, io.BytesIO(content))
    return path

LABELS_OF_OTHERS = {
    'padded':([b'007',b'7',b'08'], ['007','7','08']),
    'lines':([b'7\n',b'7',b' 8\r\n'], [7,7,8]),
    'odd':(['007'.encode(),b' 7\n',b'1_0','٣'.encode()], ['007',' 7','1_0','٣']),
    'number first':([b'7',b'7\n',b'007'], ['7','7','007']),
    'spaces':([b' a',b'a',b'a ',b'a\n',b'a\r\n',b'b\n\n'], [' a','a','a ','a','a','b\n']),
    'zeros':([b'0',b'-0',b'-1'], ['0','-0','-1']),
    'large':([b'9223372036854775807',b'-9223372036854775808'], [2**63-1,-2**63]),
    'too large':([b'9223372036854775808',b'1'], ['9223372036854775808','1'])}

@pytest.mark.parametrize('what', LABELS_OF_OTHERS)
@pytest.mark.parametrize('mode', ['w','w:gz'])
def test_both_readers_of_tars_agree_on_labels(tmp_path, what, mode):
    "No two labels become one, except integers with white space around them, and a text with the end of its line"
    contents,want = LABELS_OF_OTHERS[what]
    path = _tar_of_labels(tmp_path/'w/a.tar', contents)
    if mode!='w': path.write_bytes(gzip.compress(path.read_bytes()))
    report = index_shards(tmp_path/'w', num_workers=1, progress=False)
    copied = to_shards(tar_samples(path), tmp_path/'d', num_workers=1, progress=False, shuffle=False)
    assert (report.failed,copied.failed)==(0,0)
    for store in ShardStore(tmp_path/'w'),ShardStore(tmp_path/'d'): assert values(store, 'cls')==want and store.vocab==sorted(set(want))

@pytest.mark.parametrize('labels', [['007','7','08'],['7','8','10'],[' a','a','a\n'],['7','7\n',' 7'],['']], ids=str)
def test_labels_in_our_own_shards_stay_as_they_are(tmp_path, labels):
    "Members `cls.txt` are text, whatever they look like; also where the first shard has none"
    to_shards([{'cls':label, 'txt':repr(label)} for label in labels], tmp_path/'d', num_workers=1, progress=False, shuffle=False)
    own = [ShardStore(tmp_path/'d')]
    tar, = (tmp_path/'d').glob('*.tar')
    for name,extra in (('alone',[]), ('late',['a.tar'])):
        for other in extra: _tar_of_labels(tmp_path/name/other, [None]*2)
        (tmp_path/name).mkdir(exist_ok=True)
        shutil.copy(tar, tmp_path/name)
        assert index_shards(tmp_path/name, num_workers=2, progress=False).failed==0
        own.append(ShardStore(tmp_path/name))
    assert to_shards(tar_samples(tar), tmp_path/'copy', num_workers=1, progress=False, shuffle=False).failed==0
    own.append(ShardStore(tmp_path/'copy'))
    for store in own:
        assert store.vocab==sorted(labels)
        numbers = [i for i in range(len(store)) if store.manifest.n==len(labels) or i>=2]
        assert store.get_many(numbers, 'cls', decode=True)['cls']==labels

def test_labels_that_occur_late(tmp_path):
    "Integers are integers if all of the field are, and none of them is text by name; with text among them, all are as they were"
    for k,(contents,extension,want) in enumerate([([b'7',b'7\n',b'-1'],'cls',[7,7,-1]), ([b'7',b'7\n',b'07'],'cls',['7','7','07']), ([b'7',b'8'],'cls.txt',['7','8'])]):
        _tar_of_labels(tmp_path/f'{k}/a.tar', [None]*2)
        _tar_of_labels(tmp_path/f'{k}/b.tar', contents, extension)
        _tar_of_labels(tmp_path/f'{k}/c.tar', [b'5'])
        index_shards(tmp_path/f'{k}', num_workers=1, progress=False)
        store,want = ShardStore(tmp_path/f'{k}'),[*want, 5 if want[0]==7 else '5']
        assert store.get_many(range(2, len(store)), 'cls', decode=True)['cls']==want and store.vocab==sorted(set(want))

def test_text_after_numbers_is_a_failed_sample_for_both_readers(tmp_path):
    path = _tar_of_labels(tmp_path/'w/a.tar', [b'%d' % (i%9) for i in range(120)]+[b'007'])
    rep = [index_shards(tmp_path/'w', num_workers=1, progress=False), to_shards(tar_samples(path), tmp_path/'d', num_workers=1, progress=False)]
    assert [(r.written,r.failed) for r in rep]==[(120,1)]*2 and all("'007'" in r.failures[0][1] for r in rep)

# --- labels

def test_labels_of_tensors_are_codes_of_a_vocabulary(put):
    "0-d tensors and arrays are the numbers in them, also where the vocabulary has numbers"
    s,rep = put([{'cls':torch.tensor(7)}, {'cls':np.array(3)}, {'cls':np.str_('x')}, {'cls':torch.tensor(0)}], vocab=[3,7,'x'])
    assert (values(s, 'cls'),rep.failed)==([7,3,'x'],1)

def test_label_function_that_returns_none_is_named(put, images):
    def breed(p): return None if p.stem in ('003','007') else p.parent.name
    s,rep = put(image_samples(images, label=breed))
    assert (rep.written,rep.failed)==(58,2)
    for name,why in rep.failures: assert 'breed' in why and 'None' in why and name in why
    with pytest.raises(IngestError, match='_none_breed.*None'): put(image_samples(images, label=_none_breed))

def _none_breed(p): return None

@pytest.mark.parametrize('made', [list, tuple, np.array, pd.Series], ids=['list','tuple','array','Series'])
def test_path_strings_are_files(put, images, made):
    files = sorted(str(p) for p in images.glob('*/*.jpg'))[:12]
    s,rep = put(made(files))
    assert s.fields==['jpg'] and rep.failed==0 and [bytes(b) for b in s.get_many(range(12), 'jpg')['jpg']]==[open(f, 'rb').read() for f in files]
    s,_ = put({'train':made(files[:8]), 'valid':made(files[8:])})
    assert s.splits=={'train':[0,8], 'valid':[8,12]} and s.fields==['jpg']

def test_path_strings_and_others_are_not_mixed(put):
    assert put(['cat','dog','cat'])[0].vocab==['cat','dog']
    with pytest.raises(TypeError, match='image_samples'): put(['a/1.jpg','cat'])
    with pytest.raises(TypeError, match="item 1 .*'a/1.jpg'"): put(['cat','a/1.jpg'])
    with pytest.raises(TypeError, match='https://x/1.jpg'): put(['https://x/1.jpg'])
    with pytest.raises(IngestError, match='gone.jpg'): put(['/no/gone.jpg'])

def test_path_that_no_file_can_have_is_a_failed_sample(put, images):
    files = sorted(str(p) for p in images.glob('*/*.jpg'))[:5]
    s,rep = put([*files, 'a\ud800.jpg', 'a\0b.jpg'])
    assert (rep.written,rep.failed)==(5,2)
    for o in (repr(rep), str(list(s.failures()))): o.encode()

# --- masks

def png(a, mode='L'):
    (Image.fromarray(np.asarray(a)) if mode is None else Image.fromarray(np.asarray(a, np.uint8), mode)).save(b:=io.BytesIO(), 'PNG')
    return b.getvalue()

def code(k): return np.array([[0,1],[2,k]], np.uint8)
def palette(k):
    im = Image.fromarray(code(k)).convert('P')
    im.putpalette([v for i in range(256) for v in (i,i,i)])
    return im

@pytest.mark.parametrize('field, mask', [('mask.png', lambda k: png(code(k))), ('mask', lambda k: Image.fromarray(code(k))), ('png', code), ('seg.jpg.png', lambda k: Image.fromarray(code(k))), ('mask.raw', code), ('mask.npyimg', code), ('mask.npzimg', lambda k: code(k).astype(np.int32)),
    ('mask.npy', code), ('mask.npz', code), ('mask.npy', lambda k: torch.from_numpy(code(k)).long()), ('mask.png', palette), ('mask.webp', lambda k: Image.fromarray(code(k))), ('mask.npyimg', lambda k: code(k).astype(np.uint16)), ('mask', code)])
def test_mask_codes_outside_the_vocabulary_are_failed_samples(put, field, mask):
    s,rep = put([{'id':i, field:mask(k)} for i,k in enumerate([0,1,2,3,0,200,3])], vocab={field:['sky','road','car','dog']})
    assert (rep.failed,sorted(values(s, 'id')))==(1,[0,1,2,3,4,6])
    assert rep.failures[0][0]=='item 5' and all(o in rep.failures[0][1] for o in ('200',field,'4')), rep.failures
    assert put([{'id':i, field:mask(200)} for i in range(3)])[1].failed==0

def test_mask_codes_that_are_no_codes(put):
    "Truth is 255 where it is opened as a mask; numbers below 0, or between codes, or above 255 in a picture of 16 bits"
    for f,bad in (('mask.png',Image.new('1', (2,2), 1)), ('mask.npy',np.array([[-1]])), ('mask.npy',np.array([[.5]])), ('mask.png',Image.fromarray(np.full((2,2), 300, np.uint16)))):
        good = np.zeros((2,2), np.uint8)
        s,rep = put([{f:good if f.endswith('npy') else png(good)}, {f:bad}], vocab={f:['a','b']})
        assert (rep.failed,len(s))==(1,1), f

def test_mask_codes_are_checked_on_the_way_to_another_store(put):
    a,_ = put([{'mask.png':png(code(k))} for k in (0,1,200)])
    s,rep = put(a, vocab={'mask.png':['x','y','z']})
    assert (rep.failed,len(s),s.manifest.vocab)==(1,2,{'mask.png':['x','y','z']})
    assert put(s)[1].failed==0

def test_vocabulary_of_no_field_is_an_error(put):
    with pytest.raises(ValueError, match="'mask'.*mask.png"): put([{'mask.png':png(code(0))}]*3, vocab={'mask':['a','b','c']})
    with pytest.raises(ValueError, match="'cls'.*labels"): put([{'labels':['a']}]*3, vocab=['a','b'])
    with pytest.raises(ValueError, match="'mask'.*bin"): put([{'mask':png(code(0))}]*3, vocab={'mask':['a','b','c']})

def test_masks_are_not_counted_as_pictures(put):
    s,_ = put([{'mask':Image.fromarray(code(0)), 'seg.png':Image.fromarray(code(1)), 'png':Image.new('RGB', (4,4))}]*20, vocab={'seg.png':list('abc')})
    assert list(s.manifest.stats)==['png']

def test_drawing_whose_number_would_change_is_a_failed_sample(put, tmp_path):
    from fastai_remote import drawing_samples
    lines = [dict(word='cat', key_id=k, drawing=[[[0,255],[0,9]]]) for k in ('5', 6, 7.5, str(2**64))]
    (tmp_path/'a.ndjson').write_text('\n'.join(map(json.dumps, lines))+'\n')
    s,rep = put(drawing_samples(tmp_path/'a.ndjson'))
    assert (values(s, 'id'),rep.failed)==([5,6],2)

def test_json_that_is_nested_too_deeply_is_refused():
    deep = []
    for _ in range(100_000): deep = [deep]
    with pytest.raises(ValueError, match='json: lists or objects that are nested too deeply'):
        get_codec('json').to_bytes(deep)

def test_numbers_with_underscores_are_text():
    "Python reads 1_000 as 1000; no table and no other tool does"
    for text in b'1_000', b'1_0.5', b'':
        with pytest.raises(ValueError, match='age.f4: .* is no number'): parse_number('age.f4', text)

def test_narrowest_dtypes():
    dtypes = [narrow(lo, hi) for lo,hi in ((0,255), (0,2**32-1), (0,2**32), (-1,127), (-1,128), (-2**63,2**63-1))]
    assert dtypes==['u1','u4','i8','i1','i2','i8']
    with pytest.raises(ValueError, match='do not fit 64 bits'): narrow(0, 2**63)

@pytest.mark.parametrize('field', ['npy','npz'])
def test_errors_of_arrays_name_the_field(field):
    class Odd:
        def __array__(self, dtype=None, copy=None): raise KeyError('no')
    for bad in ([[1,2],[3]], torch.ones(3, dtype=torch.bfloat16), torch.ones(3,3).to_sparse(),
                [torch.ones(2, requires_grad=True)]*2, torch.ones(2, dtype=torch.complex64).conj(), Odd()):
        with pytest.raises((TypeError,ValueError), match=f'^{field}: '): get_codec(field).to_bytes(bad)
    codec = get_codec(field)
    assert codec.from_bytes(codec.to_bytes(torch.ones(2, requires_grad=True))).tolist()==[1,1]

@pytest.mark.parametrize('numbers', [[2**53+1,.5], [torch.tensor(2**53+1),.5], [np.int64(2**53+1),torch.tensor(.5)]])
def test_integers_of_any_kind_in_a_list_are_not_rounded(numbers):
    with pytest.raises(ValueError, match='npy: 9007199254740993 would become 9007199254740992.0'):
        get_codec('npy').to_bytes(numbers)

no_pictures = [([[1,2],[3,4]], r'int64 of shape \(2, 2\)'), (np.zeros(3, np.uint8), r'uint8 of shape \(3,\)'),
    (np.zeros((4,5,3), np.float32), r'float32 of shape \(4, 5, 3\)'),
    (np.zeros((4,5,5), np.uint8), r'uint8 of shape \(4, 5, 5\)'), (np.array([['a']]), 'of <U1')]

@pytest.mark.parametrize('field', ['npyimg','npzimg'])
@pytest.mark.parametrize('bad, says', no_pictures)
def test_an_array_that_is_no_picture_is_refused(put, field, bad, says):
    "Bytes of others are arrays all the same"
    with pytest.raises(ValueError, match=f'{field}: want pixels.*{says}'): get_codec(field).to_bytes(bad)
    encoded = get_codec(field.removesuffix('img')).to_bytes(bad)
    assert get_codec(field).to_bytes(bytearray(encoded))==encoded
    with pytest.raises(ValueError, match=f'{field}: want pixels.*{says}'): get_codec(field).image(encoded)
    fails(put, field, [np.zeros((2,3), np.uint8)], bad, f'{field}: want pixels')

def test_several_arrays_are_no_picture():
    with pytest.raises(ValueError, match='npzimg: want pixels.*got the arrays a, b'):
        get_codec('npzimg').to_bytes({'a':np.zeros((2,2), np.uint8), 'b':np.ones(2)})

@pytest.mark.parametrize('field', ['npyimg','npzimg'])
@pytest.mark.parametrize('dtype, shapes', [('uint8',[(4,5),(4,5,1),(4,5,2),(4,5,3),(4,5,4)]), ('>u2',[(4,5),(4,5,1)]),
    *((dtype,[(4,5)]) for dtype in ('bool','int8','uint16','int16','uint32','int32','float32','float64'))])
def test_any_array_that_pillow_has_a_mode_for_is_a_picture(field, dtype, shapes):
    codec = get_codec(field)
    for shape in shapes:
        b = codec.to_bytes(np.ones(shape, dtype))
        assert codec.to_bytes(bytearray(b))==b and codec.image(b).size==(5,4)
        assert codec.from_bytes(b).shape==shape and codec.from_bytes(b).dtype==np.dtype(dtype)

@pytest.mark.parametrize('field, size', [('jpg',65_501), ('webp',16_384)])
def test_pictures_that_are_too_large_for_their_format_are_named(field, size):
    for im in Image.new('L', (size,1)), Image.new('RGB', (1,size)):
        with pytest.raises(ValueError, match=f'{field}: a picture of {im.width}x{im.height} pixels'):
            get_codec(field).to_bytes(im)
    assert get_codec(field).to_bytes(Image.new('L', (size-1,1)))

def test_lists_of_paths_contain_paths():
    for bad in None, 5, b'a.jpg':
        with pytest.raises(TypeError, match='item 1 is of type .*, and no path'): image_samples([Path('a.jpg'),bad])

def test_missing_values_in_arrays_of_objects_are_none():
    with pytest.raises(ValueError, match='a value is missing in the array'):
        full_array(np.array([1,None], object), 'f4')
