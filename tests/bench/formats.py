"""Write the same samples in the format of every contender, for peers.py

Purpose: peers.py compares loaders over the same photographs, drawings, digits and values. Each function here writes one
         of these kinds of data, as files, in Redis, as shards, and in the formats of the other loaders. This module
         measures nothing and has no command of its own.
"""
import io, json, sys, tarfile

import numpy as np
import redis
from PIL import Image

from fastai_remote import Rasterise, drawing_samples, image_samples, shrink, to_redis, to_shards
from loader import link_images, make_images
from shards import in_child, write_litdata, write_mosaicml

SHARD_BYTES = 32e6

def small_pixels(path):
    "The pixels that `shrink(256, codec='raw')` stores for an image file, for FFCV"
    image = Image.open(path)
    scale = 256/min(image.size)
    if scale<1:
        size = tuple(round(length*scale) for length in image.size)
        image.draft(None, size)
        image = image.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.)
    return np.asarray(image.convert('RGB'))

def npz_bytes(array):
    file = io.BytesIO()
    np.savez_compressed(file, array)
    return file.getvalue()

def png_bytes(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, 'PNG')
    return file.getvalue()

def write_forum(
    at, # An `At` of contenders.py
    dataset, # Prefix of the keys
    arrays, # Pixels of each sample
    labels # Label of each sample
):
    "Store arrays in Redis as the forum post does, and the labels in a JSON file"
    client,size = redis.Redis.from_url(at.url),0
    for i,array in enumerate(arrays):
        value = npz_bytes(array)
        client.set(f'{dataset}:{i}', value)
        size += len(value)
    (at/f'{dataset}.json').write_text(json.dumps(labels))
    at.nbytes[dataset] = size/len(labels)

def _ingest(at, source, dataset, fn=None, **kwargs):
    report = to_redis(source, at.url, dataset, fn=fn, num_workers=1, progress=False, **kwargs)
    if report.failed: raise ValueError(f'all samples of a benchmark must be converted: {report}')
    at.nbytes[dataset] = report.nbytes/len(source)

class _Pixels(np.ndarray):
    "The pixels of an image, with the JPEG that they came from"
    jpg = None

def _ffcv_encode(image, quality): return np.frombuffer(image.jpg, np.uint8)

def _jpeg_bytes(path, image):
    "The bytes of a JPEG file as they are; other files are encoded as a JPEG"
    if image.format=='JPEG' and image.mode in ('RGB','L'): return path.read_bytes()
    file = io.BytesIO()
    image.convert('RGB').save(file, 'JPEG', quality=90)
    return file.getvalue()

def write_ffcv(
    samples, # List of `(path, class)`
    to, # File to write
    raw # Pixels of 256 in place of JPEGs?
):
    "Write the file of FFCV; JPEGs are stored unchanged"
    import ffcv.fields.rgb_image as rgb
    from ffcv.fields import IntField
    from ffcv.writer import DatasetWriter
    rgb.encode_jpeg = _ffcv_encode
    class Pictures:
        def __len__(self): return len(samples)
        def __getitem__(self, i):
            path,label = samples[i]
            if raw: return small_pixels(path),label
            image = Image.open(path)
            pixels = np.asarray(image.convert('RGB')).view(_Pixels)
            pixels.jpg = _jpeg_bytes(path, image)
            return pixels,label
    fields = dict(image=rgb.RGBImageField(write_mode='raw' if raw else 'jpg'), label=IntField())
    DatasetWriter(str(to), fields, num_workers=1).from_indexed_dataset(Pictures())

def write_arrow(
    samples, # Of `(bytes of a JPEG, class)`
    to # Folder to write
):
    "Write the dataset of HuggingFace datasets"
    from datasets import Dataset, Features, Image, Value, disable_progress_bars
    disable_progress_bars()
    images,labels = zip(*samples)
    features = Features(jpg=Image(decode=False), cls=Value('int64'))
    columns = dict(jpg=[dict(bytes=b, path=None) for b in images], cls=labels)
    Dataset.from_dict(columns, features=features).save_to_disk(to)

def write_shards(at):
    "Write the photographs as tars, and the list of tars that wids needs"
    source = image_samples(at/'images', label=_label)
    report = to_shards(source, str(at/'tars'), maxsize=SHARD_BYTES, num_workers=1, vocab=at.vocab, progress=False)
    if report.failed: raise ValueError(f'all samples of a benchmark must be converted: {report}')
    def count(path):
        with tarfile.open(path) as tar: return sum(name.endswith('.cls') for name in tar.getnames())
    tars = [dict(name=path.name, n=count(path)) for path in sorted((at/'tars').glob('*.tar'))]
    (at/'wids.json').write_text(json.dumps(tars))

def write_other_formats(at, paths, n, installed):
    "Write the photographs in a random order for the loaders that are installed, each in a process of its own"
    order = [paths[i] for i in np.random.default_rng(0).permutation(len(paths))]
    def files(): return [(path, at.vocab.index(path.parent.name)) for path in order]
    def samples(): return ((path.read_bytes(), label) for path,label in files())
    writers = [('litdata', 'chunks', lambda to: write_litdata(samples(), to, SHARD_BYTES)),
               ('streaming', 'mds', lambda to: write_mosaicml(samples(), to, SHARD_BYTES)),
               ('datasets', 'arrow', lambda to: write_arrow(samples(), to)),
               ('ffcv', 'jpg.beton', lambda to: write_ffcv(files(), to, False)),
               ('ffcv', 'raw.beton', lambda to: write_ffcv(files(), to, True))]
    for module,name,write in writers:
        if module not in installed: continue
        try: in_child(write, at/name)
        except RuntimeError as error:   # the contender will report it again when it cannot read
            print(f'{module}: cannot write {name}: {error}', file=sys.stderr)
            continue
        written = [path for path in [at/name, *(at/name).rglob('*')] if path.is_file()]
        at.nbytes[name] = sum(path.stat().st_size for path in written)/n

def write_photos(
    at, # An `At` of contenders.py
    folder, # Folder of photographs; None: make some
    n, # Number of samples
    size, # Shorter side of photographs that are made, in pixels
    installed # Names of the modules that can be imported
): # Number of photographs in `folder`
    "Write `n` photographs in the formats of all installed contenders"
    if folder is None: make_images(at/'made', n, size)
    n_files = link_images(folder or at/'made', at/'images', n)
    paths = sorted((at/'images').rglob('*.*'))
    at.vocab = sorted({path.parent.name for path in paths})
    at.nbytes['files'] = sum(path.stat().st_size for path in paths)/n
    write_shards(at)
    for dataset,fn in (('photos',None),('photos-small',shrink(256)),('photos-pixels',shrink(256, codec='raw'))):
        _ingest(at, image_samples(at/'images', label=_label), dataset, fn)
    arrays = (np.asarray(Image.open(path).convert('RGB')) for path in paths)
    write_forum(at, 'photos-npz', arrays, [path.parent.name for path in paths])
    write_other_formats(at, paths, n, installed)
    return n_files

def make_drawings(
    file, # ndjson file to write
    n # Number of drawings
):
    "Write random drawings of four words in Quick, Draw!'s simplified form"
    rng = np.random.default_rng(0)
    def stroke():
        start = rng.integers(20, 236, (2,1))
        steps = rng.normal(0, 14, (2,rng.integers(4, 20)))
        return (start+steps.cumsum(1)).clip(0, 255).astype(int).tolist()
    with open(file, 'w') as lines:
        for i in range(n):
            strokes = [stroke() for _ in range(rng.integers(2, 7))]
            drawing = dict(word=f'word{i%4}', countrycode='XX', recognized=True, key_id=str(i), drawing=strokes)
            lines.write(json.dumps(drawing)+'\n')

def _write_png(folder, i, label, png):
    (folder/str(label)).mkdir(parents=True, exist_ok=True)
    (folder/str(label)/f'{i:06}.png').write_bytes(png)

def _label(path): return path.parent.name

def write_drawings(
    at, # An `At` of contenders.py
    file, # ndjson file; None: make one
    n # Number of samples
):
    "Write `n` drawings as strokes, as PNGs of 256 x 256 in files and in Redis, and as the forum post's arrays"
    if file is None:
        file = at/'made.ndjson'
        make_drawings(file, n)
    source,raster = drawing_samples(file),Rasterise()
    samples = [source[i%len(source)] for i in range(n)]
    _ingest(at, samples, 'strokes')
    for start in range(0, n, 256):
        strokes = [sample['strokes'] for sample in samples[start:start+256]]
        for i,png in enumerate(raster.pngs(strokes), start): _write_png(at/'drawings', i, samples[i]['cls'], png)
    _ingest(at, image_samples(at/'drawings', label=_label), 'drawings')
    arrays = (np.asarray(raster.create(sample['strokes']).convert('RGB')) for sample in samples)
    write_forum(at, 'drawings-npz', arrays, [sample['cls'] for sample in samples])

def write_digits(at, n):
    "Write `n` random grey images of 28 x 28 in ten classes, as PNGs in files and in Redis, and as arrays"
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (n,7,7), np.uint8)
    def enlarge(pixels): return np.asarray(Image.fromarray(pixels).resize((28,28), Image.Resampling.BICUBIC))
    images = [enlarge(pixels) for pixels in small*(small>128)]
    for i,pixels in enumerate(images): _write_png(at/'digits', i, i%10, png_bytes(pixels))
    _ingest(at, image_samples(at/'digits', label=_label), 'digits')
    _ingest(at, [{'npyimg':pixels, 'cls':str(i%10)} for i,pixels in enumerate(images)], 'digits-arrays')
    arrays = (np.repeat(pixels[...,None], 3, 2) for pixels in images)
    write_forum(at, 'digits-npz', arrays, [str(i%10) for i in range(n)])

def write_raw(at, n, width=2048):
    "Write `n` values of `width` bytes, as a dataset and under the keys that redis-benchmark reads"
    rng,client = np.random.default_rng(0),redis.Redis.from_url(at.url)
    values = [rng.bytes(width) for _ in range(n)]
    _ingest(at, [{'bin':value} for value in values], 'raw')
    with client.pipeline(transaction=False) as pipeline:
        for i,value in enumerate(values): pipeline.set(f'bench:{i:012}', value)
        pipeline.execute()
