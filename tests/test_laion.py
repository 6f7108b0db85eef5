"What img2dataset writes: tars, Parquet files with one row per address, and statistics"
import io, json, tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fastai_remote import img2dataset_samples, IngestError, RedisStore, to_redis

def jpg(i):
    Image.fromarray(np.full((8,9,3), i*3%256, np.uint8)).save(b:=io.BytesIO(), 'JPEG')
    return b.getvalue()

def failed(i): return i%5==3

def download(folder, shards=3, rows=20, stats=True):
    "A folder as img2dataset leaves it: of each shard, rows that failed have no members"
    folder.mkdir(parents=True)
    for s in range(shards):
        table = dict(url=[], caption=[], key=[], status=[], similarity=[], width=[], hash=[])
        with tarfile.open(folder/f'{s:05}.tar', 'w') as tar:
            for j in range(rows):
                i = s*rows+j
                key = f'{s:05}{j:04}'
                row = dict(url=f'http://x/{i}.jpg', caption=f'a picture of {i} é', key=key, status='failed_to_download' if failed(i) else 'success',
                           similarity=i/7, width=None if failed(i) else 9, hash=2**60+i)
                for k,v in row.items(): table[k].append(v)
                if failed(i): continue
                for ext,content in (('jpg',jpg(i)), ('json',json.dumps(row).encode()), ('txt',row['caption'].encode())):
                    info = tarfile.TarInfo(f'{key}.{ext}')
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        pq.write_table(pa.table(table), folder/f'{s:05}.parquet')
        n = sum(failed(s*rows+j) for j in range(rows))
        if stats: (folder/f'{s:05}_stats.json').write_text(json.dumps(dict(count=rows, successes=rows-n, failed_to_download=n, failed_to_resize=0, status_dict={'404':n})))
    return folder

GOOD = [i for i in range(60) if not failed(i)]

@pytest.mark.parametrize('stats', [True,False])
def test_images_captions_and_columns(put, tmp_path, stats):
    "One line: bytes, captions, metadata, and columns of the rows beside the tar; downloads that failed are counted"
    store,report = put(img2dataset_samples(download(tmp_path/'a', stats=stats), columns=['similarity','url','hash']))
    assert (len(store),report.failed)==(48,0) and '12 of 60 rows have no image: failed_to_download 12' in str(report)
    assert store.fields==['jpg','json','txt','similarity','url','hash']
    assert [store.manifest.fields[f]['codec'] for f in ('similarity','url','hash')]==['f8','txt','i8']
    for o,raw,i in zip([store[k] for k in range(48)], store.get_many(range(48), ['jpg'])['jpg'], GOOD):
        assert bytes(raw)==jpg(i) and o['txt']==f'a picture of {i} é' and o['similarity']==i/7 and o['url']==f'http://x/{i}.jpg' and o['hash']==2**60+i
        assert o['json']['key']==f'{i//20:05}{i%20:04}'

def test_without_columns_and_with_splits(put, tmp_path):
    folder = download(tmp_path/'a')
    tars = sorted(folder.glob('*.tar'))
    store,_ = put({'train':img2dataset_samples(tars[:2]), 'valid':img2dataset_samples(tars[2:])})
    assert store.fields==['jpg','json','txt'] and store.splits=={'train':[0,32],'valid':[32,48]}

def test_fields_of_other_names_and_workers(put, tmp_path):
    store,report = put(img2dataset_samples(download(tmp_path/'a'), columns={'similarity':'score.f4', 'caption':'caption.txt'}), num_workers=2)
    assert report.failed==0 and store.fields==['jpg','json','txt','score.f4','caption.txt'] and store[5]['caption.txt']==store[5]['txt']

def test_what_does_not_fit_is_named(put, tmp_path):
    folder = download(tmp_path/'a')
    with pytest.raises(ValueError, match="00000.parquet: no column 'nope'; there are url, caption"): img2dataset_samples(folder, columns=['nope'])
    table = pq.read_table(folder/'00001.parquet')
    pq.write_table(table.slice(1), folder/'00001.parquet')
    store,report = put(img2dataset_samples(folder, columns=['url']))
    assert report.failed==1 and "00001.parquet has no row with the key '000010000'" in report.failures[0][1]
    one = [folder/'00001.tar']   # its table is read again in this process
    assert put(img2dataset_samples(one, columns=['url']))[1].failed==1
    pq.write_table(pa.concat_tables([table, table.slice(1, 1)]), folder/'00001.parquet')
    store,report = put(img2dataset_samples(one, columns=['url']))
    assert report.failed==1 and "00001.parquet has several rows with the key '000010001'" in report.failures[0][1]
    (folder/'00002.parquet').unlink()
    with pytest.raises(FileNotFoundError, match='00002.parquet: no such file, from which columns= would be read'): img2dataset_samples(folder, columns=['url'])
    store,_ = put(img2dataset_samples(folder))
    assert len(store)==48

def test_resumed(server, tmp_path):
    folder,calls = download(tmp_path/'a'),[]
    def fn(o):
        calls.append(1)
        if len(calls)==20: raise KeyboardInterrupt
        return o
    def write(): return to_redis(img2dataset_samples(folder, columns=['url']), server.url, 'stop', fn=fn, num_workers=1, chunk=8, progress=False)
    with pytest.raises(KeyboardInterrupt): write()
    report = write()
    assert report.resumed>=8 and report.written==48 and RedisStore(server.url, 'stop')[47]['url']=='http://x/59.jpg'

def test_columns_replace_no_field_of_the_tar(put, tmp_path):
    folder = download(tmp_path/'a')
    with pytest.raises(IngestError, match="column 'caption' and the tar both have the field 'txt'"):
        put(img2dataset_samples(folder, columns={'caption':'txt'}), max_failed=0)
