"What goes in comes back the same, or is a failed sample with a reason: numbers, JSON, arrays, text, labels, masks"
import gzip, io, math, os, re, shutil, tarfile
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, strategies as st
from joblib import parallel_config
from PIL import Image

from conftest import examples
from fastai_remote import ShardStore, image_samples, index_shards, tar_samples, to_shards
from fastai_remote.codec.base import Encoded
from fastai_remote.codec.fields import get_codec
from fastai_remote.codec.numbers import narrow
from fastai_remote.ingest.report import IngestError
from fastai_remote.source.columns import full_array
from in_memory import values, written
from inputs import encoded, write_tar

QUIET = dict(num_workers=1, progress=False)
LONE = 'caf\udce9'   # as `os.fsdecode(b'caf\xe9')`
NS = np.datetime64('2020-01-01T00:00:00', 'ns')
MASKED = np.ma.array([1,2], mask=[False,True])
COMPOUND = np.ma.array([(1,2)], dtype=[('a',int),('b',int)], mask=[(False,True)])
FLAGS = np.zeros((2,2), np.uint8)

def new(mode, width=2, height=2): return Image.new(mode, (width,height))

# --- what is refused, and what comes back

def encode(field, o):
    "What is stored for `o` in `field`: bytes, or a number"
    codec = get_codec(field)
    return codec.to_bytes(o) if codec.dtype is None else codec.to_array([o])[0]

ARRAYS = {
    'text':[[1,'a']], '9007199254740993 would become':[[2**53+1,.5], [torch.tensor(2**53+1),.5]],
    'object':[[1,None]], 'str':['abc'], 'mask would be lost':[MASKED, [1,np.ma.masked], [[MASKED]], COMPOUND],
    'mode P':[new('P')],
    '':[[[1],[1,2]], torch.ones(3, dtype=torch.bfloat16), torch.ones(3,3).to_sparse(),
        [torch.ones(2, requires_grad=True)]*2]}
NO_PICTURES = {
    r'int64 of shape \(2, 2\)':[[1,2],[3,4]], r'uint8 of shape \(3,\)':np.zeros(3, np.uint8),
    r'uint8 of shape \(4, 5, 5\)':np.zeros((4,5,5), np.uint8), 'of <U1':np.array([['a']])}
def mpo(size=(9,9)):
    "A file with two pictures, as phones write it: a JPEG to all who want one"
    Image.new('RGB', size).save(b:=io.BytesIO(), 'MPO', save_all=True, append_images=[Image.new('RGB', size)])
    return b.getvalue()

MPO = mpo()
OTHER_SHAPES = {rf'want pixels of shape \(h,w\).*got {re.escape(str(shape))}':[np.zeros(shape, np.uint8)]
                for shape in ((),(784,),(1,2,2,3))}   # Pillow would make a picture one pixel wide of 784 numbers
PIXELS = {
    '(raw|bits): want an image or uint8 pixels, got an array of uint16':[np.zeros((4,5), np.uint16)],
    'got the str':['text'],
    r'want pixels of shape .* got \(3, 4, 5\)':[np.zeros((3,4,5), np.uint8)], r'got \(4,\)':[np.zeros(4, np.uint8)],
    '5x0 pixels':[np.zeros((0,5), np.uint8)], '1x65536 pixels':[np.zeros((1<<16,1), np.uint8)],
    '65536x1 pixels':[np.zeros((1,1<<16), np.uint8)], 'mode I;16 has more than 8 bits':[new('I;16')],
    'mode F has':[new('F')]}
REFUSED = {
    'f4':{'would make -?inf':[-1e300, np.float64(1e39), Fraction(10**50), torch.tensor(1e300, dtype=torch.float64)],
          '16777217 does not fit':[2**24+1], "'1'":['1', np.array('1')], 'NA':[pd.NA], 'list':[[1.]],
          r'want one number, got shape \(2,\)':[np.ones(2), MASKED], 'got a masked one':[np.ma.array(5, mask=True)]},
    'f8':{'would make inf':[10**400, np.longdouble('1e400'), Decimal('1e400')], 'mask':[np.ma.masked],
          '9007199254740993 does not fit':[torch.tensor(2**53+1), Decimal(2**53+1)], 'complex':[torch.tensor(1j)],
          'datetime64':[NS], 'Timestamp':[pd.Timestamp(0)]},
    'i4':{'2147483648 does not fit':[2**31], '1.5 does not fit':[Decimal('1.5')], '3.0':[3.],
          '2.5':[torch.tensor(2.5)], 'want a number, got':[COMPOUND[0]],
          'got a masked one, which has no value: give a number':[MASKED[1]]},
    'i8':{'9223372036854775808 does not fit':[np.uint64(2**63)], 'timedelta64':[np.timedelta64(3, 'ns')]},
    'u1':{'-1 does not fit':[-1], '256 does not fit':[256]}, 'id':{'1.5 does not fit':[1.5]},
    'json':{'key 1 ':[{1:'a'}], 'key None':[{'a':[{None:1}]}], 'set':[{'a':{1,2}}], 'no JSON':[b'{"a":'],
            'UTF-8':[{'a':LONE}, {LONE:1}]},
    'labels':{'None':[['a',None], None], '0.5':[b'["a", 0.5]'], 'dict':[{'a':1}, b'{"a":1}'], "str 'ab'":['ab'],
              'True':[['a',True]], 'UTF-8':[[LONE], rb'["\udce9"]'], 'datetime64':[[NS]],
              'labels: .*1.5':[Encoded.of(b'[1.5]', 'json')]},
    'npy':{f'^npy: .*{says}':bad for says,bad in ARRAYS.items()},
    'npz':{**{f'^npz: .*{says}':bad for says,bad in ARRAYS.items()},
           'arr_0':[{'arr_0':np.ones(2)}], 'a.npy':[{'a.npy':np.ones(2)}], 'file':[{'file':np.ones(2)}],
           'npz: ':[{1:np.ones(2)}, {'a\0b':np.ones(2)}], 'text':[{'a':[1,'b']}]},
    **{field:{f'{field}: want pixels.*{says}':[bad] for says,bad in NO_PICTURES.items()}
       for field in ('npyimg','npzimg')},
    'x.npzimg':{'npzimg: want pixels.*got the arrays a, b':[{'a':FLAGS, 'b':np.ones(2)}]},
    **{field:PIXELS for field in ('raw','bits')},
    **{field:OTHER_SHAPES for field in ('webp','img')},
    'png':{**OTHER_SHAPES, 'png: PNG cannot keep a picture of mode F: store an array of it as npyimg':[new('F')],
           'png: PNG cannot keep a picture of mode CMYK: convert it to RGB first':[new('CMYK')],
           'png: PNG cannot keep a picture of mode PA: convert it to RGBA first':[new('PA')], 'a MPO file':[MPO],
           'pixels from (-1|65536) to .* do not fit the 16 bits':[Image.new('I', (2,2), n) for n in (-1,65536)]},
    'jpg':{**OTHER_SHAPES, 'a picture of 65501x1 pixels':[new('L', 65_501, 1)], '1x65501':[new('RGB', 1, 65_501)],
           'mode F has more than 8 bits .*, which JPEG cannot keep: store an array of it as npyimg':[new('F')]},
    'webp':{**OTHER_SHAPES, 'a picture of 16384x1 pixels':[new('L', 16_384, 1)], '1x16384':[new('RGB', 1, 16_384)],
            'which WEBP cannot keep: store it as png, or an array of it as npyimg':[new('I')],
            'WEBP cannot keep a picture of mode La: convert it to LA first':[new('La')], 'a MPO file':[MPO]},
    'mask.bits':{'bits: a picture of 3 levels of grey, not two':[np.array([[0,1],[2,1]], np.uint8)],
                 'bits: a picture in colour':[np.array([[[0,1,0]]], np.uint8)]}}

@pytest.mark.parametrize('field', REFUSED)
def test_a_value_that_would_change_is_refused_with_the_reason(field):
    for says,wrong in REFUSED[field].items():
        for o in wrong:
            with pytest.raises((TypeError,ValueError), match=says): encode(field, o)

KEPT = {
    'f2':[(np.float64(.1), float(np.float16(.1)))],
    'f4':[(.1, float(np.float32(.1))), (np.int8(-3), -3.), (1e-300, 0.),
          (torch.tensor(.5, dtype=torch.bfloat16), .5), (torch.tensor(math.nan), math.nan), (Decimal('nan'), math.nan)],
    'f8':[(Fraction(1, 4), .25), (2**60, 2.**60), (-0., -0.)],
    'u1':[(np.bool_(True), 1), (255, 255), (0, 0)], 'i2':[(torch.tensor(-5), -5)], 'i8':[(-2**63, -2**63)],
    'json':[*((o, o) for o in ({'a':[1,None,True,1.5,'ü']}, {'b':2**70}, 'text', math.nan)),
            ({'a':(1,(2,)), 'b':math.inf}, {'a':[1,[2]], 'b':math.inf})],
    'labels':[([], []), (('c',), ['c']), (np.array([1,2]), [1,2]), ({'b','c','a'}, ['a','b','c']),
              (Encoded.of(b'["a"]', 'json'), ['a'])],
    'npy':[(np.float32([.1]), [float(np.float32(.1))]), (torch.arange(3), [0,1,2]), ((1,2.5), [1.,2.5]),
           ([[True],[False]], [[True],[False]]), (np.array(['a','b']), ['a','b']), (np.ma.array([1,2]), [1,2]),
           (torch.ones(2, requires_grad=True), [1.,1.]), (Image.new('RGB', (1,2)), [[[0]*3]]*2)]}
KEPT['npz'] = [*KEPT['npy'], *((o, o) for o in ({'a':np.ones(2), 'b':np.array([1])},{}))]

@pytest.mark.parametrize('field', KEPT)
def test_a_value_that_fits_comes_back(field):
    "Rounding to the width that a field's name asks for is no loss, and neither are inf and nan that were given"
    for o,back in KEPT[field]:
        found = get_codec(field).from_bytes(encode(field, o))
        assert repr(found.tolist() if isinstance(found, np.ndarray) else found)==repr(back)

NUMBERS = st.one_of(st.integers(), st.floats(), st.complex_numbers(), st.booleans(), st.decimals(allow_nan=False),
                    st.text(max_size=3))

@examples(200)
@given(st.sampled_from('i1 i2 i4 i8 u1 u2 u4 f2 f4 f8'.split()), NUMBERS, st.sampled_from([lambda o: o, np.asarray]))
def test_any_number_fits_or_is_refused(codec, o, made):
    try: back = get_codec(codec).from_bytes(encode(codec, made(o)))
    except (ValueError,TypeError): return
    is_whole = isinstance(o, Decimal) and o.is_finite() and o==o.to_integral_value()
    if isinstance(o, float) and o!=o: assert back!=back
    elif isinstance(o, (bool,int)) or is_whole: assert back==o
    else:
        assert math.isinf(back)==math.isinf(o)
        with np.errstate(over='ignore'): assert back==np.dtype(codec).type(float(o))

GOOD = {'x.f4':.5, 'y.i8':-2**63, 'json':[1,None], 'labels':['a'], 'npy':np.arange(3), 'npz':{'a':np.ones(2)},
        'txt':'ü', 'note':'a', 'key.txt':'k', 'path':'p', 'cls':'cat', 'other.cls':'o', 'mask.png':FLAGS,
        'npyimg':FLAGS}
BAD = [('x.f4',1e300,'inf'), ('y.i8',2**63,'9223372036854775808'), ('json',{1:2},'key 1'), ('labels',[LONE],'UTF-8'),
       ('npy',[1,'a'],'text'), ('npz',{'file':FLAGS},'file'), ('npyimg',np.zeros(3, np.uint8),'want pixels'),
       ('x.f4',None,"field 'x.f4' is None in this sample"), ('mask.png',FLAGS+200,'code 200'),
       *((field,LONE,'UTF-8') for field in ('txt','note','key.txt','path','cls','other.cls'))]

@pytest.mark.slow
def test_bad_values_are_failed_samples_with_a_reason_in_any_store(put):
    "Also those that are found by workers, and text that is no UTF-8"
    source = [{**GOOD, 'id':i} for i in range(40)]
    for i,(field,bad,_) in enumerate(BAD): source[i+10][field] = bad
    with parallel_config('multiprocessing'):
        store,report = put(source, num_workers=2, chunk=8, max_failed=.5, shuffle=False, vocab={'mask.png':['a','b']})
    assert sorted(values(store, 'id'))==[*range(10), *range(10+len(BAD), 40)]
    failures = dict(store.failures())
    assert len(BAD)==report.failed==len(failures)
    for i,(_,_,says) in enumerate(BAD): assert says in failures[f'item {i+10}']
    for sample in store[0],store[-1]:
        for field,o in GOOD.items():
            assert repr(np.asarray(sample[field]) if field=='mask.png' else sample[field])==repr(o)
    assert store.verify(num_workers=1).bad==0
    for o in (repr(report), report._repr_html_(), str(failures)): o.encode()

def test_numbers_of_others_are_checked_too(tmp_path):
    "Numbers in tars are text: a float that would be inf, an int that would change, what only Python reads"
    rows = [('1','.5'),('9007199254740993','.5'),('2','1e300'),('3','inf'),('4','1e999'),('5','1_000'),('6','')]
    tar_of(tmp_path/'a.tar', [{'x.f8':x.encode(), 'y.f4':y.encode()} for x,y in rows])
    copied,report = written(tar_samples(tmp_path/'a.tar'))
    assert (report.failed,values(copied, 'y.f4'))==(5,[.5,math.inf])
    assert index_shards(tmp_path, max_failed=5, **QUIET).failed==5
    for store in copied,ShardStore(tmp_path): assert values(store, 'x.f8')==[1.,3.]

# --- text that is no UTF-8

def test_file_names_that_are_no_utf8(put, images, tmp_path):
    "As `os.fsdecode` gives them: a failure where the name is stored, as a path or label, and else as good as any"
    content = next(images.glob('*/*.jpg')).read_bytes()
    for name in b'a',b'caf\xe9':
        os.mkdir(os.path.join(os.fsencode(tmp_path), name))
        with open(os.path.join(os.fsencode(tmp_path), name, b'1.jpg'), 'wb') as f: f.write(content)
    labels = dict(label=lambda p: p.parent.name),dict(label=lambda p: [p.parent.name, 'x'])
    for write,options in (put,dict(path=True)),*((written,kw) for kw in labels):
        store,report = write(image_samples(tmp_path, **options))
        assert (report.written,report.failed)==(1,1) and 'UTF-8' in report.failures[0][1]
        assert report.failures[0][0].endswith(r'caf\udce9/1.jpg')
        for o in (*report.failures[0], *next(iter(store.failures())), repr(report), report._repr_html_()): o.encode()
    assert written(image_samples(tmp_path))[1].failed==0

def test_reasons_that_are_no_utf8_are_stored(put):
    def fn(i):
        if i==3: raise ValueError(f'no {LONE}')
        return {'id':i}
    store,report = put(list(range(9)), fn=fn, shuffle=False)
    assert report.failures==[('item 3',r'ValueError: no caf\udce9 (fn was given: int)')]==list(store.failures())

# --- labels of tars

def tar_of(path, samples, **options):
    "A tar of `{extension: content}` per sample; in place of `samples` it may have `(key, {extension: content})`"
    samples = [o if isinstance(o, tuple) else (f'{path.stem}-{i:03}',o) for i,o in enumerate(samples)]
    return write_tar(path, [(f'{key}.{ext}',o) for key,members in samples for ext,o in members.items()], **options)

def labelled(labels, extension='cls'):
    "Samples of a tar with a text, and with a label unless that is `None`"
    return [{'txt':b'%d' % i, **({} if label is None else {extension:label})} for i,label in enumerate(labels)]

def test_labels_of_others_that_are_no_utf8(tmp_path):
    "In tars that are indexed where they lie: names, labels as JSON, and labels as text"
    rows = [('0',b'a',b'["x"]'), ('1',b'caf\xe9',b'["x"]'), ('2',b'b',rb'["\udce9"]'), ('café 3',b'a',b'[]')]
    tar_of(tmp_path/'a.tar', [(key,{'cls':label, 'labels':labels}) for key,label,labels in rows], encoding='latin-1')
    report = index_shards(tmp_path, max_failed=2, **QUIET)
    store = ShardStore(tmp_path)
    assert (report.failed,len(store),store.manifest.vocab)==(2,2,{'cls':['a'],'labels':['x']})
    for o in (repr(report), str(list(store.failures()))): o.encode()

LABELS_OF_OTHERS = [
    ([b'agent',b'007',b'7'], ['agent','007','7']), ([b'7\n',b'7',b' 8\r\n'], [7,7,8]),
    (['007'.encode(),b' 7\n',b'1_0','٣'.encode()], ['007',' 7','1_0','٣']), ([b'7',b'7\n',b'007'], ['7','7','007']),
    ([b' a',b'a',b'a ',b'a\n',b'a\r\n',b'b\n\n'], [' a','a','a ','a','a','b\n']),
    ([b'0',b'-0',b'-1'], ['0','-0','-1']), ([b'9223372036854775807',b'-9223372036854775808'], [2**63-1,-2**63]),
    ([b'9223372036854775808',b'1'], ['9223372036854775808','1'])]

@pytest.mark.parametrize('contents,want', LABELS_OF_OTHERS, ids=lambda o: str(o[0]))
def test_both_readers_of_tars_agree_on_labels(tmp_path, contents, want):
    "No two labels become one, except integers with white space around them, and a text with the end of its line"
    for pack in bytes,gzip.compress:
        path = tar_of(tmp_path/pack.__name__/'a.tar', labelled(contents))
        path.write_bytes(pack(path.read_bytes()))
        assert index_shards(path.parent, **QUIET).failed==0
        copied,report = written(tar_samples(path))
        assert report.failed==0
        for store in ShardStore(path.parent),copied:
            assert values(store, 'cls')==want and store.vocab==sorted(set(want))

@pytest.mark.parametrize('labels', [['7','8','10'],[' a','a','a\n','007'],['7','7\n',' 7'],['']], ids=str)
def test_labels_in_our_own_shards_stay_as_they_are(tmp_path, labels):
    "Members `cls.txt` are text, whatever they look like; also where the first shard has none"
    samples = [{'cls':label, 'txt':repr(label)} for label in labels]
    to_shards(samples, tmp_path/'d', shuffle=False, **QUIET)
    tar, = (tmp_path/'d').glob('*.tar')
    tar_of(tmp_path/'late/a.tar', labelled([None]*2))
    shutil.copy(tar, tmp_path/'late')
    assert index_shards(tmp_path/'late', **QUIET).failed==0
    copied,report = written(tar_samples(tar))
    assert report.failed==0
    for store in (*(ShardStore(tmp_path/name) for name in ('d','late')), copied):
        assert store.vocab==sorted(labels)
        numbers = range(len(store)-len(labels), len(store))
        assert store.get_many(numbers, 'cls', decode=True)['cls']==labels

@pytest.mark.parametrize('contents,extension,want', [([b'7',b'7\n',b'-1'],'cls',[7,7,-1,5]),
    ([b'7',b'7\n',b'07'],'cls',['7','7','07','5']), ([b'7',b'8'],'cls.txt',['7','8','5'])])
def test_labels_that_occur_late(tmp_path, contents, extension, want):
    "Integers are integers if all of the field are, and none is text by name; with text among them, all stay text"
    for name,samples in dict(a=labelled([None]*2), b=labelled(contents, extension), c=labelled([b'5'])).items():
        tar_of(tmp_path/f'{name}.tar', samples)
    store = index_shards(tmp_path, **QUIET).store
    assert store.get_many(range(2, len(store)), 'cls', decode=True)['cls']==want and store.vocab==sorted(set(want))

def test_text_after_numbers_is_a_failed_sample_for_both_readers(tmp_path):
    path = tar_of(tmp_path/'a.tar', labelled([b'%d' % (i%9) for i in range(120)]+[b'007']))
    for report in index_shards(tmp_path, max_failed=1., **QUIET),written(tar_samples(path))[1]:
        assert (report.written,report.failed)==(120,1) and "'007'" in report.failures[0][1]

@pytest.mark.parametrize('labels', [[-5,2,-5,1<<40], list(np.array([9,1,9], np.int16)), [True,False,True]], ids=str)
def test_integer_labels_are_categories_where_shards_have_other_labels_each(tmp_path, labels):
    "The tar has the number as text; tars that are indexed, and copies, have the same labels"
    samples = [{'txt':f'{i}', 'cls':label} for i,label in enumerate(labels)]
    own = to_shards(samples, tmp_path/'d', chunk=2, maxcount=2, shuffle=False, num_workers=2, progress=False).store
    own.copy(tmp_path/'copy', **QUIET)
    with tarfile.open(tmp_path/'d/shard-000000.tar') as tar:
        assert tar.extractfile('000000000.cls').read()==b'%d'%labels[0]
    index_shards(sorted((tmp_path/'d').glob('*.tar')), to=tmp_path/'index', **QUIET)
    want = sorted(set(map(int, labels)))
    kind = bool if labels[0] is True else int   # in a tar, they are integers
    for store,type_of_label in ((own,kind), (ShardStore(tmp_path/'copy'),kind),
                                (ShardStore(tmp_path/'index', shards_url=tmp_path/'d'),int)):
        assert store.vocab==want and all(type(label) is type_of_label for label in store.vocab)
        assert store.class_counts()=={label:labels.count(label) for label in want}
        assert values(store, 'cls')==labels and not list(store.check_rest())
        assert store.get_many(range(len(labels)), 'cls')['cls'].tolist()==[want.index(label) for label in labels]

# --- labels and paths

def test_labels_of_tensors_are_codes_of_a_vocabulary():
    "0-d tensors and arrays are the numbers in them, also where the vocabulary has numbers"
    labels = torch.tensor(7),np.array(3),np.str_('x'),torch.tensor(0)
    store,report = written([{'cls':label} for label in labels], vocab=[3,7,'x'])
    assert (values(store, 'cls'),report.failed)==([7,3,'x'],1)

def no_breed(p): return None

def test_a_label_function_that_returns_none_is_named(images):
    def breed(p): return None if p.stem in ('003','007') else p.parent.name
    _,report = written(image_samples(images, label=breed))
    assert (report.written,report.failed)==(58,2)
    for name,why in report.failures: assert 'breed' in why and 'None' in why and name in why
    with pytest.raises(IngestError, match='no_breed.*None'): written(image_samples(images, label=no_breed))

@pytest.mark.parametrize('made', [list, tuple, np.array, pd.Series], ids=['list','tuple','array','Series'])
def test_path_strings_are_files(images, made):
    "A path that no file can have is a failed sample"
    files = sorted(str(p) for p in images.glob('*/*.jpg'))[:12]
    store,report = written(made(files))
    assert store.fields==['jpg'] and report.failed==0
    assert [bytes(o) for o in store.get_many(range(12), 'jpg')['jpg']]==[Path(f).read_bytes() for f in files]
    _,report = written([*made(files), 'a\ud800.jpg', 'a\0b.jpg'])
    assert (report.written,report.failed)==(12,2) and repr(report).encode()
    store,_ = written({'train':made(files[:8]), 'valid':made(files[8:])})
    assert store.splits=={'train':[0,8], 'valid':[8,12]} and store.fields==['jpg']

def test_path_strings_and_others_are_not_mixed():
    assert written(['cat','dog','cat'])[0].vocab==['cat','dog']
    for source,says in ((['a/1.jpg','cat'],'image_samples'), (['cat','a/1.jpg'],"item 1 .*'a/1.jpg'"),
                        (['https://x/1.jpg'],'https://x/1.jpg')):
        with pytest.raises(TypeError, match=says): written(source)
    with pytest.raises(IngestError, match='gone.jpg'): written(['/no/gone.jpg'])
    for bad in None,5,b'a.jpg':
        with pytest.raises(TypeError, match='item 1 is of type .*, and no path'): image_samples([Path('a.jpg'),bad])

# --- masks

def code(k): return np.array([[0,1],[2,k]], np.uint8)
def picture(k): return Image.fromarray(code(k))
def png(k): return encoded(code(k))
def palette(k):
    im = picture(k).convert('P')
    im.putpalette([v for i in range(256) for v in (i,i,i)])
    return im

MASKS = {'mask.png':[png, palette], 'mask':[picture, code], 'png':[code], 'seg.jpg.png':[picture], 'mask.raw':[code],
         'mask.npyimg':[code, lambda k: code(k).astype(np.uint16)], 'mask.npzimg':[lambda k: code(k).astype(np.int32)],
         'mask.npy':[code, lambda k: torch.from_numpy(code(k)).long()], 'mask.npz':[code], 'mask.webp':[picture]}

@pytest.mark.parametrize('field', MASKS)
def test_mask_codes_outside_the_vocabulary_are_failed_samples(field):
    for mask in MASKS[field]:
        samples = [{'id':i, field:mask(k)} for i,k in enumerate([0,1,2,3,0,200,3])]
        store,report = written(samples, vocab={field:['sky','road','car','dog']})
        (name,reason), = report.failures
        assert sorted(values(store, 'id'))==[0,1,2,3,4,6] and name=='item 5'
        assert '200' in reason and field in reason and '4' in reason
        assert written(samples)[1].failed==0

def test_values_of_masks_that_are_no_codes_are_failed_samples():
    "Truth is 255 where it is opened as a mask; numbers below 0, or between codes, or above 255 in a picture of 16 bits"
    pixels = [Image.new('1', (2,2), 1), Image.fromarray(np.full((2,2), 300, np.uint16))]
    for field,wrong in ('mask.png',pixels), ('mask.npy',[np.array([[-1]]), np.array([[.5]])]):
        for bad in wrong:
            store,report = written([{field:FLAGS}, {field:bad}], vocab={field:['a','b']})
            assert (report.failed,len(store))==(1,1), field

def test_mask_codes_are_checked_on_the_way_to_another_store():
    first,_ = written([{'mask.png':png(k)} for k in (0,1,200)])
    store,report = written(first, vocab={'mask.png':['x','y','z']})
    assert (report.failed,len(store),store.manifest.vocab)==(1,2,{'mask.png':['x','y','z']})
    assert written(store)[1].failed==0

def test_a_vocabulary_of_no_field_is_an_error():
    for field,value,vocab,says in (
            ('mask.png',png(0),{'mask':['a']},"'mask'.*mask.png"), ('labels',['a'],['a','b'],"'cls'.*labels"),
            ('mask',png(0),{'mask':['a']},"'mask'.*bin")):
        with pytest.raises(ValueError, match=says): written([{field:value}]*3, vocab=vocab)

def test_masks_are_not_counted_as_pictures(put):
    sample = {'mask':picture(0), 'seg.png':picture(1), 'png':Image.new('RGB', (4,4))}
    assert list(put([sample]*3, vocab={'seg.png':list('abc')})[0].manifest.stats)==['png']

# --- single codecs and functions

def test_json_that_is_nested_too_deeply_is_refused():
    deep = []
    for _ in range(100_000): deep = [deep]
    with pytest.raises(ValueError, match='json: lists or objects that are nested too deeply'): encode('json', deep)

def test_narrowest_dtypes():
    ranges = (0,255), (0,2**32-1), (0,2**32), (-1,127), (-1,128), (-2**63,2**63-1)
    assert [narrow(low, high) for low,high in ranges]==['u1','u4','i8','i1','i2','i8']
    with pytest.raises(ValueError, match='do not fit 64 bits'): narrow(0, 2**63)

@pytest.mark.parametrize('field', ['npyimg','npzimg'])
def test_any_array_that_pillow_has_a_mode_for_is_a_picture(field):
    "Bytes of others are kept, and not opened"
    codec = get_codec(field)
    for says,bad in NO_PICTURES.items():
        content = encode(field.removesuffix('img'), bad)
        assert codec.to_bytes(bytearray(content))==content
        with pytest.raises(ValueError, match=f'{field}: want pixels.*{says}'): codec.image(content)
    dtypes = 'bool int8 uint16 int16 uint32 int32 float32 float64'.split()
    shapes = {'uint8':[(4,5),(4,5,1),(4,5,2),(4,5,3),(4,5,4)], '>u2':[(4,5),(4,5,1)], **dict.fromkeys(dtypes, [(4,5)])}
    for dtype,shape in ((name, shape) for name in shapes for shape in shapes[name]):
        b = codec.to_bytes(np.ones(shape, dtype))
        assert codec.to_bytes(bytearray(b))==b and codec.image(b).size==(5,4)
        assert codec.from_bytes(b).shape==shape and codec.from_bytes(b).dtype==np.dtype(dtype)

def test_the_largest_pictures_of_a_format_are_stored():
    for field,size in ('jpg',65_500),('webp',16_383): assert encode(field, Image.new('L', (size,1)))

def test_a_missing_value_in_an_array_of_objects_is_refused():
    with pytest.raises(ValueError, match='a value is missing in the array'):
        full_array(np.array([1,None], object), 'f4')
