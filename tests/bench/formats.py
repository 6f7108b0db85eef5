"The same samples in every contender's format, for peers.py"
import io, json, sys, tarfile

import numpy as np
import redis
from PIL import Image

from fastai_remote import Rasterise, drawing_samples, image_samples, shrink, to_redis, to_shards
from loader import link_images, make_images
from shards import in_child, write_litdata, write_mosaicml

def small_pixels(path):
    "What `shrink(256, codec='raw')` does, as an array: for FFCV"
    im = Image.open(path)
    if (s:=256/min(im.size))<1:
        im.draft(None, size:=tuple(round(v*s) for v in im.size))
        im = im.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.)
    return np.asarray(im.convert('RGB'))

def _npz(a): np.savez_compressed(f:=io.BytesIO(), a); return f.getvalue()

def write_forum(at, ds, arrays, labels):
    "`arrays` as the forum post stores them"
    c,size = redis.Redis.from_url(at.url),0
    for i,a in enumerate(arrays): c.set(f'{ds}:{i}', b:=_npz(a)); size += len(b)
    (at/f'{ds}.json').write_text(json.dumps(labels))
    at.nbytes[ds] = size/len(labels)

def _ingest(at, src, ds, fn=None, **kw):
    rep = to_redis(src, at.url, ds, fn=fn, num_workers=1, progress=False, **kw)
    if rep.failed: raise ValueError(f'these should all do: {rep}')
    at.nbytes[ds] = rep.nbytes/len(src)

class _Pixels(np.ndarray): "Pixels, with the JPEG they came from"; jpg = None

def _ffcv_encode(image, quality): return np.frombuffer(image.jpg, np.uint8)

def write_ffcv(samples, to, raw):
    "FFCV's file of `samples`, (path, class); JPEGs stay the very bytes"
    import ffcv.fields.rgb_image as rgb
    from ffcv.fields import IntField
    from ffcv.writer import DatasetWriter
    rgb.encode_jpeg = _ffcv_encode
    class Pictures:
        def __len__(self): return len(samples)
        def __getitem__(self, i):
            p,c = samples[i]
            if raw: return small_pixels(p),c
            im = Image.open(p)
            if im.format!='JPEG' or im.mode not in ('RGB','L'): im.convert('RGB').save(b:=io.BytesIO(), 'JPEG', quality=90); b = b.getvalue()
            else: b = p.read_bytes()
            a = np.asarray(im.convert('RGB')).view(_Pixels)
            a.jpg = b
            return a,c
    DatasetWriter(str(to), dict(image=rgb.RGBImageField(write_mode='raw' if raw else 'jpg'), label=IntField()), num_workers=1).from_indexed_dataset(Pictures())

def write_arrow(samples, to):
    from datasets import Dataset, Features, Image, Value, disable_progress_bars
    disable_progress_bars()
    bs,cs = zip(*samples)
    Dataset.from_dict(dict(jpg=[dict(bytes=b, path=None) for b in bs], cls=cs), features=Features(jpg=Image(decode=False), cls=Value('int64'))).save_to_disk(to)

def write_photos(at, folder, n, size, have):
    "`n` photographs in the formats of all who are in `have`; how many there were"
    if folder is None: make_images(at/'made', n, size)
    found = link_images(folder or at/'made', at/'images', n)
    paths = sorted((at/'images').rglob('*.*'))
    at.vocab = sorted({p.parent.name for p in paths})
    at.nbytes['files'] = sum(p.stat().st_size for p in paths)/n
    def source(): return image_samples(at/'images', label=lambda p: p.parent.name)
    shards = to_shards(source(), str(at/'tars'), maxsize=32e6, num_workers=1, vocab=at.vocab, progress=False)
    if shards.failed: raise ValueError(f'these should all do: {shards}')
    def count(f):
        with tarfile.open(f) as t: return sum(o.endswith('.cls') for o in t.getnames())
    (at/'wids.json').write_text(json.dumps([dict(name=f.name, n=count(f)) for f in sorted((at/'tars').glob('*.tar'))]))
    for ds,fn in (('photos',None),('photos-small',shrink(256)),('photos-pixels',shrink(256, codec='raw'))): _ingest(at, source(), ds, fn)
    write_forum(at, 'photos-npz', (np.asarray(Image.open(p).convert('RGB')) for p in paths), [p.parent.name for p in paths])
    order = [paths[i] for i in np.random.default_rng(0).permutation(len(paths))]
    def files(): return [(p,at.vocab.index(p.parent.name)) for p in order]
    def samples(): return ((p.read_bytes(),c) for p,c in files())
    for m,to,f in (('litdata','chunks',lambda to: write_litdata(samples(), to, 32e6)), ('streaming','mds',lambda to: write_mosaicml(samples(), to, 32e6)),
                   ('datasets','arrow',lambda to: write_arrow(samples(), to)),
                   ('ffcv','jpg.beton',lambda to: write_ffcv(files(), to, False)), ('ffcv','raw.beton',lambda to: write_ffcv(files(), to, True))):
        if m not in have: continue
        try: in_child(f, at/to)
        except RuntimeError as e: print(f'{m}: cannot write {to}: {e}', file=sys.stderr)   # it will say so itself when its turn comes
        else: at.nbytes[to] = sum(p.stat().st_size for p in [at/to, *(at/to).rglob('*')] if p.is_file())/n
    return found

def make_drawings(file, n):
    "`n` drawings of four words: a few wandering strokes each, in Quick, Draw!'s simplified form"
    rng = np.random.default_rng(0)
    with open(file, 'w') as f:
        for i in range(n):
            ss = [(rng.integers(20, 236, (2,1))+rng.normal(0, 14, (2,rng.integers(4, 20))).cumsum(1)).clip(0, 255).astype(int).tolist() for _ in range(rng.integers(2, 7))]
            f.write(json.dumps(dict(word=f'word{i%4}', countrycode='XX', recognized=True, key_id=str(i), drawing=ss))+'\n')

def _write_png(folder, i, label, b): (d:=folder/str(label)).mkdir(parents=True, exist_ok=True); (d/f'{i:06}.png').write_bytes(b)
def _label(p): return p.parent.name

def write_drawings(at, file, n):
    "`n` drawings as strokes, as PNG of 256 x 256 in files and in Redis, as the forum's arrays"
    if file is None: make_drawings(file:=at/'made.ndjson', n)
    src = drawing_samples(file)
    ss,r = [src[i%len(src)] for i in range(n)],Rasterise()
    _ingest(at, ss, 'strokes')
    for k in range(0, n, 256):
        for i,b in enumerate(r.pngs([s['strokes'] for s in ss[k:k+256]]), k): _write_png(at/'drawings', i, ss[i]['cls'], b)
    _ingest(at, image_samples(at/'drawings', label=_label), 'drawings')
    write_forum(at, 'drawings-npz', (np.asarray(r.create(s['strokes']).convert('RGB')) for s in ss), [s['cls'] for s in ss])

def write_digits(at, n):
    "`n` pictures of 28 x 28, blots of ten classes, as PNG in files and in Redis, as arrays, as the forum's arrays"
    rng = np.random.default_rng(0)
    a = rng.integers(0, 256, (n,7,7), np.uint8)
    ims = [np.asarray(Image.fromarray(o).resize((28,28), Image.Resampling.BICUBIC)) for o in a*(a>128)]
    for i,o in enumerate(ims): Image.fromarray(o).save(f:=io.BytesIO(), 'PNG'); _write_png(at/'digits', i, i%10, f.getvalue())
    _ingest(at, image_samples(at/'digits', label=_label), 'digits')
    _ingest(at, [{'npyimg':o, 'cls':str(i%10)} for i,o in enumerate(ims)], 'digits-arrays')
    write_forum(at, 'digits-npz', (np.repeat(o[...,None], 3, 2) for o in ims), [str(i%10) for i in range(n)])

def write_raw(at, n, width=2048):
    "`n` values of `width` bytes; again under keys that redis-benchmark can name"
    rng,c = np.random.default_rng(0),redis.Redis.from_url(at.url)
    vs = [rng.bytes(width) for _ in range(n)]
    _ingest(at, [{'bin':v} for v in vs], 'raw')
    with c.pipeline(transaction=False) as p:
        for i,v in enumerate(vs): p.set(f'bench:{i:012}', v)
        p.execute()
