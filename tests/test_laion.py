"What img2dataset writes: tars, Parquet files with one row per address, and statistics"
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastai_remote import IngestError, img2dataset_samples
from fastai_remote.testing import SourceTests
from inputs import encoded, in_memory
from shard_helpers import tar

def jpg(i): return encoded(np.full((8,9,3), i*3%256), 'JPEG')
def failed(i): return i%5==3

def download(folder, stats=True):
    "A folder as img2dataset leaves it, with 60 rows in three shards: rows that failed have no members"
    for shard in range(3):
        rows = {i:dict(
            url=f'http://x/{i}.jpg', caption=f'a picture of {i} é', key=f'{shard:05}{i%20:04}', similarity=i/7,
            status='failed_to_download' if failed(i) else 'success', width=None if failed(i) else 9, hash=2**60+i)
            for i in range(20*shard, 20*shard+20)}
        tar(folder/f'{shard:05}.tar', [
            (f'{row["key"]}.{ext}', content) for i,row in rows.items() if not failed(i)
            for ext,content in (('jpg',jpg(i)), ('json',json.dumps(row).encode()), ('txt',row['caption'].encode()))])
        pq.write_table(pa.Table.from_pylist([*rows.values()]), folder/f'{shard:05}.parquet')
        counts = dict(count=20, successes=16, failed_to_download=4, failed_to_resize=0, status_dict={'404':4})
        if stats: (folder/f'{shard:05}_stats.json').write_text(json.dumps(counts))
    return folder

def test_images_captions_and_columns(tmp_path):
    "Bytes, captions, metadata, and columns of the rows beside the tar; downloads that failed are counted"
    columns = ['similarity','url','hash']
    store,report = in_memory(img2dataset_samples(download(tmp_path/'a'), columns=columns))
    counted = '12 of 60 rows have no image: failed_to_download 12'
    assert (len(store),report.failed)==(48,0) and counted in str(report)
    assert store.fields==['jpg','json','txt','similarity.f8','url.txt','hash.i8']
    stored = store.get_many(range(48), ['jpg'])['jpg']
    for o,image,i in zip(store[:], stored, [i for i in range(60) if not failed(i)], strict=True):
        assert bytes(image)==jpg(i) and o['txt']==f'a picture of {i} é' and o['json']['key']==f'{i//20:05}{i%20:04}'
        assert (o['similarity.f8'],o['url.txt'],o['hash.i8'])==(i/7,f'http://x/{i}.jpg',2**60+i)
    without = img2dataset_samples(download(tmp_path/'b', stats=False), columns=columns)
    assert counted in str(in_memory(without)[1])   # of the rows themselves

class TestColumns(SourceTests):
    "Read again, in parts of any size, and sent to workers"
    @pytest.fixture(autouse=True)
    def place(self, tmp_path): self.folder = download(tmp_path/'a')
    def make(self): return img2dataset_samples(self.folder, columns=['url'])

def test_columns_splits_and_names_of_fields(tmp_path):
    tars = sorted(download(tmp_path/'a').glob('*.tar'))
    columns = {'similarity':'score.f4', 'caption':'caption.txt'}
    parts = dict(train=tars[:2], valid=tars[2:])
    store,report = in_memory({split:img2dataset_samples(part, columns=columns) for split,part in parts.items()})
    assert report.failed==0 and store.splits=={'train':[0,32], 'valid':[32,48]}
    assert store.fields==['jpg','json','txt','score.f4','caption.txt'] and store[5]['caption.txt']==store[5]['txt']
    with pytest.raises(IngestError, match="column 'caption' and the tar both have the field 'txt'"):
        in_memory(img2dataset_samples(tmp_path/'a', columns={'caption':'txt'}), max_failed=0)

def test_what_does_not_fit_is_named(tmp_path):
    folder = download(tmp_path/'a')
    with pytest.raises(ValueError, match="00000.parquet: no column 'nope'; there are url, caption"):
        img2dataset_samples(folder, columns=['nope'])
    table = pq.read_table(folder/'00001.parquet')
    one = [folder/'00001.tar']   # its table is read again in this process
    for rows,message in (
        (table.slice(1), "00001.parquet has no row with the key '000010000'"),
        (pa.concat_tables([table, table.slice(1, 1)]), "00001.parquet has several rows with the key '000010001'")):
        pq.write_table(rows, folder/'00001.parquet')
        for source in folder,one:
            _,report = in_memory(img2dataset_samples(source, columns=['url']))
            assert report.failed==1 and message in report.failures[0][1]
    (folder/'00002.parquet').unlink()
    with pytest.raises(FileNotFoundError, match='00002.parquet: no such file, from which columns= would be read'):
        img2dataset_samples(folder, columns=['url'])
    assert len(in_memory(img2dataset_samples(folder))[0])==48

