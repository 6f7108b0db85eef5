"What tests of sources share: files of images, sound, tars and CSV, and what an ingest makes of a source, in memory"
import csv, io, struct, tarfile, wave, zlib

import numpy as np
from PIL import Image

from fastai_remote.codec.fields import infer_codec
from fastai_remote.core import Manifest
from fastai_remote.ingest.run import ingest
from fastai_remote.ingest.stores import changeable
from fastai_remote.source.base import IndexedSource
from fastai_remote.source.datasets import as_source
from fastai_remote.store.base import Store
from fastai_remote.write.base import MemoryWriter

def in_memory(source, fn=None, writer=None, **options):
    "Ingest a source into memory, in this process and in order, however many fail: the store and the report"
    writer = writer or MemoryWriter('d')
    options = {'num_workers':1, 'progress':False, 'shuffle':False, 'max_failed':1., **options}
    report = ingest(source, writer, fn, **options)
    return changeable(writer.store),report

def raw_samples(source):
    "`[(name, raw sample)]` of a source, in its order"
    source = as_source(source)
    parts = [source.read(np.arange(len(source)))] if isinstance(source, IndexedSource) else source.stream(9)
    return [pair for part in parts for pair in part]

def loaded(source):
    "The samples of a source, as its `load` makes them"
    source = as_source(source)
    return [source.load(raw) for _,raw in raw_samples(source)]

def column(store, field): return [store[i][field] for i in range(len(store))]
def stored(store, field):
    "The bytes of a field"
    return [bytes(b) for b in store.get_many(range(len(store)), field, check=True)[field]]

def put_texts(stores, numbers, queue):
    "Put the texts that each store reads into `queue`, and what the `TieredStore` asked for; for a process of its own"
    queue.put(([store.get_many(numbers, ['txt','cls'])['txt'] for store in stores.values()], stores['tiered'].hits))

class Computed(Store):
    "Makes its values from the numbers of the samples, by a function for each field; `reads` are how many were asked for"
    python = 'store'
    def __init__(self, n, made, **manifest):
        self.made,self.reads,fields = made,[],{}
        for field,make in made.items():
            values = make(np.arange(1))
            dtype = values.dtype.str[1:] if isinstance(values, np.ndarray) else None
            fields[field] = dict(codec=infer_codec(field, values[0]), dtype=dtype)
        self.manifest = Manifest('numbers', n, fields, **manifest)

    def read_values(self, numbers, fields):
        self.reads.append(len(numbers))
        return {field:self.made[field](numbers) for field in fields}

def scattered(dtype):
    "A function of the numbers of samples that is no longer in their order"
    return lambda numbers: (numbers*2654435761%(1<<32)).astype(dtype)

def encoded(image, fmt='PNG', **options):
    "The file of an image of Pillow or of an array of pixels"
    image = image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image, np.uint8))
    image.save(file := io.BytesIO(), fmt, **options)
    return file.getvalue()

def plain(i, fmt='JPEG'):
    "The file of an image of 6 x 5 pixels, all of which are `i`"
    return encoded(np.full((6,5,3), i%256), fmt)

def png_chunk(name, data): return struct.pack('>I', len(data))+name+data+struct.pack('>I', zlib.crc32(name+data))

def png_of(rows, width, height, colour=0, bits=8, interlaced=0, parts=1, more=b''):
    "A PNG of `rows`, bytes with the number of a filter before each row, whatever the other arguments say"
    data = zlib.compress(rows)
    header = struct.pack('>IIBBBBB', width, height, bits, colour, 0, 0, interlaced)
    step = -(-len(data)//parts)
    idat = b''.join(png_chunk(b'IDAT', data[k:k+step]) for k in range(0, len(data), step))
    return b'\x89PNG\r\n\x1a\n'+png_chunk(b'IHDR', header)+more+idat+png_chunk(b'IEND', b'')

def wav_file(values):
    "A wav file of 8000 values of 16 bits per second, in one channel"
    with wave.open(file := io.BytesIO(), 'wb') as w:
        w.setparams((1, 2, 8000, 0, 'NONE', ''))
        w.writeframes(values.astype('<i2').tobytes())
    return file.getvalue()

def npy(array):
    np.save(file := io.BytesIO(), array, allow_pickle=True)
    return file.getvalue()

def write_tar(path, members, mode='w', **options):
    "A tar of `(name, bytes)`, or of `TarInfo`"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, **options) as tar:
        for member in members:
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member[0])
            content = b'' if info is member else member[1]
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path

def tar_header(name, size=0, kind=tarfile.REGTYPE, fmt=tarfile.GNU_FORMAT, **attributes):
    "The header of a member of a tar"
    info = tarfile.TarInfo(name)
    info.size,info.type = size,kind
    for k,v in attributes.items(): setattr(info, k, v)
    return info.tobuf(fmt, 'utf-8', 'surrogateescape')

def tar_member(name, content, fmt=tarfile.GNU_FORMAT, **attributes):
    return tar_header(name, len(content), fmt=fmt, **attributes)+content+bytes(-len(content)%512)

def write_csv(path, lines, opener=open, **options):
    "A CSV file; the first of `lines` is its header"
    with opener(path, 'wt', newline='', **{'encoding':'utf-8', **options}) as file: csv.writer(file).writerows(lines)
    return path
