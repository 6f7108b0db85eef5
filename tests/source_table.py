"""The table of sources in the guide: each kind of source is written to Redis and to shards, and what arrives is checked

python tests/source_table.py           all sources; writes tests/bench/results/sources.json
python tests/source_table.py tar CSV   those whose name contains one of the words; writes nothing

Each source has two splits. Every case counts the samples that arrive, and compares each with what the source was made
of: the names of the classes, and the bytes of the files. Then it writes 1,000 and 5,000 samples, in a process of its
own, and measures by how much the memory of the process grows.

A row of the table is a dict: `source`, the kind of source, and `call`, what a user writes; `store`, `Redis` or
`shards`; `written`, samples that arrived, of both splits, `lost`, samples that did not, and `wrong`, samples with
another class than the one of their image; `names`, `files` and `splits`, `yes` if labels have their names, image files
are stored as they are, and each split has its samples, or else `no`, and `-` if there are no files; `small` and
`large`, MB that the process grew by for 1,000 and 5,000 samples; `flat`, `yes` if memory is constant.

To add a row, decorate a function with `source`. The function, `make(folder, numbers)`, writes files of the samples
`numbers` into `folder`, and `open(folder, numbers)` returns the source that a user would pass.
"""
import json, multiprocessing, os, sys, tempfile, threading
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('HF_DATASETS_DISABLE_PROGRESS_BARS', '1')
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent/'bench')]
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from inputs import column, encoded, stored, write_tar
from fastai_remote import (RedisStore, ShardStore, csv_samples, drawing_samples, image_samples, img2dataset_samples,
    redis_server, table_samples, tar_samples, to_redis, to_shards)

RESULT = Path(__file__).parent/'bench'/'results'/'sources.json'
NAMES = ['bird','cat','dog']
CONTENTS = 51   # different images; sample i has image i%51 and class i%3
SMALL,LARGE = 1000,5000   # samples, for the memory
CHUNK,PADDING = 256,0   # samples that are written at once; bytes behind each image, a file of 4 KB

@lru_cache(None)
def noise(i, padding):
    "A JPEG of 48 x 48 pixels, and bytes that no decoder reads"
    rng = np.random.default_rng(i)
    return encoded(rng.integers(0, 256, (48,48,3), dtype=np.uint8), 'JPEG', quality=90)+rng.bytes(padding)

def name_of(i): return NAMES[i%3]
def content(i): return noise(i%CONTENTS, PADDING)

@dataclass
class Kind:
    "A kind of source"
    name:str
    call:str # What a user writes
    make:object # `make(folder, numbers)` writes the files of these samples
    open:object # `open(folder, numbers)` returns the source
    field:str = 'jpg' # Field of the files; `None` if there are none
    join:type = dict # Makes one source of `{split: source}`
    options:dict = None # Of `to_redis` and `to_shards`
    def __str__(self): return self.name

KINDS = []

def source(name, call, open, **options):
    "Decorator: `make(folder, numbers)` makes the files of a row of the table"
    def add(make):
        KINDS.append(Kind(name, call, make, open, **options))
        return make
    return add

def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)

# --- the sources

def parent(path): return path.parent.name

@source('folder of images', 'image_samples(folder, label=parent_label)',
        lambda folder, _: image_samples(folder, label=parent))
def image_folder(folder, numbers):
    for i in numbers: write(folder/name_of(i)/f'{i:06}.jpg', content(i))

def photos(folder, numbers):
    for i in numbers: write(folder/f'{i:06}.jpg', content(i))

@source('CSV with names of images', "csv_samples('labels.csv', 'name', 'label', folder=folder)",
        lambda folder, _: csv_samples(folder/'labels.csv', 'name', 'label', folder=folder))
def csv_file(folder, numbers):
    photos(folder, numbers)
    rows = ''.join(f'{i:06}.jpg,{name_of(i)}\n' for i in numbers)
    write(folder/'labels.csv', f'name,label\n{rows}'.encode())

@source('Quick, Draw! drawings', 'drawing_samples(folder)', lambda folder, _: drawing_samples(folder), field=None)
def drawings(folder, numbers):
    for k,name in enumerate(NAMES):
        lines = [dict(word=name, key_id=str(i), drawing=[[[i%200,200],[5,100]]]) for i in numbers if i%3==k]
        write(folder/f'{name}.ndjson', '\n'.join(map(json.dumps, lines)).encode())

@source('WebDataset tars', 'tar_samples(folder)', lambda folder, _: tar_samples(folder))
def tars(folder, numbers):
    for k in range(0, len(numbers), 100):
        files = [((f'{i:06}.jpg',content(i)), (f'{i:06}.cls',name_of(i).encode())) for i in numbers[k:k+100]]
        write_tar(folder/f'{k:06}.tar', chain(*files))

class Photos:
    "A dataset as users of PyTorch write it"
    classes = NAMES
    def __init__(self, folder): self.folder,self.files = folder,np.array(sorted(os.listdir(folder)))
    def __len__(self): return len(self.files)
    def __getitem__(self, i): return Image.open(self.folder/self.files[i]).convert('RGB'),int(self.files[i][:6])%3

source('PyTorch `Dataset`', 'dataset', lambda folder, _: Photos(folder))(photos)

def open_image_folder(folder, numbers):
    from torchvision.datasets import ImageFolder
    return ImageFolder(str(folder))

source('torchvision `ImageFolder`', 'ImageFolder(folder)', open_image_folder)(image_folder)

def samples(numbers): return ({'jpg':content(i), 'cls':name_of(i)} for i in numbers)

@source('generator of dicts', '(sample for sample in …)', lambda _, numbers: samples(numbers))
def nothing(folder, numbers): pass

@source('another store', 'RedisStore(url, name)', lambda folder, _: ShardStore(folder))
def another_store(folder, numbers): to_shards(samples(numbers), folder, num_workers=1, progress=False, chunk=CHUNK)

def open_saved(folder, numbers):
    from datasets import load_from_disk
    return load_from_disk(str(folder/'data'))

@source('HuggingFace `Dataset`', 'load_from_disk(folder)', open_saved)
def huggingface(folder, numbers):
    from datasets import ClassLabel, Dataset, Features, Image, Value
    features = Features({'image':Image(), 'label':ClassLabel(names=NAMES), 'number':Value('int64')})
    def rows():
        for i in numbers: yield {'image':content(i), 'label':i%3, 'number':i}
    options = dict(features=features, cache_dir=str(folder/'cache'))
    Dataset.from_generator(rows, **options).save_to_disk(str(folder/'data'))

def joined_by(name):
    "Joins splits in a dict of HuggingFace's"
    def join(splits):
        import datasets
        return getattr(datasets, name)(splits)
    return join

def open_shuffled(folder, numbers): return open_saved(folder, numbers).shuffle(seed=1)

source('HuggingFace `DatasetDict`, shuffled', 'load_from_disk(folder).shuffle()', open_shuffled,
       join=joined_by('DatasetDict'))(huggingface)

def open_stream(folder, numbers):
    from datasets import load_dataset
    files = str(folder/'*.parquet')
    return load_dataset('parquet', data_files=files, streaming=True, split='train', cache_dir=str(folder))

@source('HuggingFace `IterableDatasetDict`', "load_dataset('parquet', data_files=files, streaming=True)", open_stream,
        join=joined_by('IterableDatasetDict'))
def parquet(folder, numbers):
    huggingface(folder, numbers)
    saved = open_saved(folder, numbers)
    for k in range(0, len(saved), 20):   # HuggingFace reads whole files
        saved.select(range(k, min(k+20, len(saved)))).to_parquet(str(folder/f'{k:06}.parquet'))

def columns(numbers): return {'name':[f'{i:06}.jpg' for i in numbers], 'label':[name_of(i) for i in numbers]}

def of_table(folder, table): return table_samples(table, fn_col='name', label_col='label', folder=folder)

def open_pandas(folder, numbers):
    import pandas as pd
    return of_table(folder, pd.DataFrame(columns(numbers)))

_by_columns = "fn_col='name', label_col='label', folder=folder)"
source('pandas DataFrame with names of images', f'table_samples(df, {_by_columns}', open_pandas)(photos)

@source('Parquet file with names of images', f"table_samples('labels.parquet', {_by_columns}",
        lambda folder, _: of_table(folder, folder/'labels.parquet'))
def parquet_of_names(folder, numbers):
    photos(folder, numbers)
    pq.write_table(pa.table(columns(numbers)), folder/'labels.parquet', row_group_size=100)

def open_parquet(folder, numbers):
    from fastai_remote.source import frames
    frames._row_groups.most = 1_000_000   # instead of 64 MB of row groups, which would be all of them
    return sorted(folder.glob('*.parquet'))

@source('Parquet files of HuggingFace, with images', 'folder/*.parquet', open_parquet)
def parquet_of_images(folder, numbers):
    huggingface(folder, numbers)
    open_saved(folder, numbers).to_parquet(str(folder/'rows.parquet'), batch_size=25)

def numbers_of(i): return np.full((4,4), i%256, np.float32)
def arrays(numbers): return np.stack([numbers_of(i) for i in numbers]),np.array([name_of(i) for i in numbers])

def open_arrays(folder, numbers): return {'npy':np.load(folder/'x.npy', mmap_mode='r'), 'cls':np.load(folder/'y.npy')}

@source('dict of arrays, and memory maps', "{'npy':np.load('x.npy', mmap_mode='r'), 'cls':y}", open_arrays, field=None)
def arrays_in_files(folder, numbers):
    folder.mkdir(parents=True)
    for name,array in zip('xy', arrays(numbers)): np.save(folder/f'{name}.npy', array)

@source('HDF5 file', "'data.h5'", lambda folder, _: folder/'data.h5', field=None)
def hdf5(folder, numbers):
    import h5py
    folder.mkdir(parents=True)
    x,y = arrays(numbers)
    with h5py.File(folder/'data.h5', 'w') as file:
        file['npy'] = x
        file.create_dataset('cls', data=[label.encode() for label in y.tolist()], dtype=h5py.string_dtype())

def with_caption_as_class(sample): return {'jpg':sample['jpg'], 'cls':sample['txt'].decode()}

@source('folder of img2dataset', 'img2dataset_samples(folder)', lambda folder, _: img2dataset_samples(folder),
        options={'fn':with_caption_as_class})
def img2dataset(folder, numbers):
    for shard,k in enumerate(range(0, len(numbers), 100)):
        keys = {f'{shard:05}{j:04}':i for j,i in enumerate(numbers[k:k+100])}
        write_tar(folder/f'{shard:05}.tar', [(f'{key}.{ext}', data) for key,i in keys.items()
            for ext,data in (('jpg',content(i)), ('txt',name_of(i).encode()), ('json',b'{}'))])
        table = dict(key=[*keys], url=[f'http://x/{key}' for key in keys], status=['success']*len(keys))
        pq.write_table(pa.table(table), folder/f'{shard:05}.parquet')

# --- checking a source

def put(kind, splits, server, folder):
    "Write a source to Redis or, without a server, to shards; returns the store"
    options = {'num_workers':1, 'progress':False, 'chunk':CHUNK, 'overwrite':True, **(kind.options or {})}
    if server is None:
        to_shards(splits, folder, maxcount=CHUNK, **options)
        return ShardStore(folder)
    to_redis(splits, server.url, 'table', **options)
    return RedisStore(server.url, 'table')

def yes(is_right): return 'yes' if is_right else 'no'
def check(kind, server, folder, n=60):
    "Write `n` samples of a kind of source in two splits, and compare what arrives: a row without the memory"
    parts = {'train':range(n-n//4), 'valid':range(n-n//4, n)}
    for split,numbers in parts.items(): kind.make(folder/split, numbers)
    opened = {split:kind.open(folder/split, numbers) for split,numbers in parts.items()}
    store = put(kind, kind.join(opened), server, folder/'shards')
    labels,is_there,wrong = column(store, 'cls'),[],0
    if kind.field:
        found = stored(store, kind.field) if kind.field in store.fields else []
        for split,numbers in parts.items():
            is_there.append(Counter(found[slice(*store.splits.get(split, (0,0)))])==Counter(map(content, numbers)))
        class_of = {content(i):name_of(i) for i in range(CONTENTS)}
        wrong = sum(class_of.get(b, label)!=label for b,label in zip(found, labels))
    names_are_right = set(store.vocab)==set(NAMES) and Counter(labels)==Counter(name_of(i) for i in range(n))
    splits_are_right = store.splits=={'train':[0,n-n//4], 'valid':[n-n//4,n]} and all(is_there)
    return dict(source=kind.name, call=kind.call, store='Redis' if server else 'shards', written=len(store),
                lost=n-len(store), wrong=wrong, names=yes(names_are_right),
                files=yes(all(is_there)) if kind.field else '-', splits=yes(splits_are_right))

# --- memory

def own_memory():
    return 1024*int(Path('/proc/self/status').read_text().partition('RssAnon:')[2].split()[0])

def growth(kind, server, folder, *sizes):
    "MB by which a process grows at most, for each of `sizes`, while it opens a source of so many samples and writes it"
    folder.mkdir(parents=True)
    def make():
        for n in 30,*sizes: kind.make(folder/f'{n}', range(n))
    in_child(make)
    return [round(most/1e6, 1) for most in in_child(lambda: peaks(kind, server, folder, sizes))]

def in_child(f):
    "Run `f` in a process of its own; returns what it returns"
    context = multiprocessing.get_context('fork')
    reading,writing = context.Pipe(duplex=False)
    child = context.Process(target=lambda: writing.send(f()))
    child.start()
    child.join()
    assert child.exitcode==0
    return reading.recv()

def peaks(kind, server, folder, sizes):
    "Bytes by which this process grows at most, for each of `sizes`"
    pa.set_memory_pool(pa.system_memory_pool())   # Arrow's own pool reserves memory in large steps
    def write(n): put(kind, kind.open(folder/f'{n}', range(n)), server, folder/'shards')
    write(30)   # imports what it needs
    before,most,is_over = own_memory(),[0],threading.Event()
    def watch():
        while not is_over.wait(.01): most[-1] = max(most[-1], own_memory()-before)
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for n in sizes:
            write(n)
            most.append(0)
    finally: is_over.set()   # else the process would not end
    thread.join()
    return most[:-1]

def run(kind, server, folder):
    "The whole row of a kind of source"
    row = check(kind, server, folder/'check')
    small,large = growth(kind, server, folder/'memory', SMALL, LARGE)
    return row | dict(small=small, large=large, flat=yes(large-small<4))   # 4,000 samples more are 11 MB of images

def main(words):
    rows = []
    with redis_server() as server:
        for kind in KINDS:
            if words and not any(word.lower() in kind.name.lower() for word in words): continue
            for place in server,None:
                with tempfile.TemporaryDirectory() as folder: rows.append(run(kind, place, Path(folder)))
                print(rows[-1], flush=True)
    if words: return
    from machine import about
    RESULT.write_text(json.dumps(dict(command='python tests/source_table.py', small=SMALL, large=LARGE, rows=rows,
                                      **about(None, 'torch torchvision datasets redis')), indent=1)+'\n')

if __name__=='__main__': main(sys.argv[1:])
