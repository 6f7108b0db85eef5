"The chunks of streams: a chunk waits in memory, so it has fewer samples if they are large"
import io, subprocess, sys, tarfile

import numpy as np
import pytest

from fastai_remote import ShardStore, csv_samples, tar_samples
from fastai_remote.source.datasets import as_source
from fastai_remote.store.storage import Storage
from fastai_remote.write.shards import ShardWriter

def tar(path, n, size, mode='w'):
    with tarfile.open(path, mode, **({'compresslevel':0} if mode=='w:gz' else {})) as file:
        for i in range(n):
            info = tarfile.TarInfo(f'{i:06}.bin')
            info.size = size
            file.addfile(info, io.BytesIO(np.random.default_rng(i).bytes(size)))
    return path

def chunk(source, folder='/nowhere', **kw): return ShardWriter(Storage(folder), **kw).stream_chunk_size(source)

def test_samples_that_are_sent_whole_make_smaller_chunks(tmp_path):
    places,contents = tar(tmp_path/'a.tar', 8, 100_000),tar(tmp_path/'a.tar.gz', 8, 100_000, 'w:gz')
    assert chunk(tar_samples(places))==16_384 and chunk(tar_samples(contents))==640
    assert chunk(tar_samples(contents), maxsize=1e6)==10 and chunk(tar_samples(places), maxcount=100)==100
    (tmp_path/'a.csv').write_text('text,cls\n'+f"{'x'*63_990},cat\n"*30)
    (tmp_path/'b.csv').write_text('text,cls\n'+'x,cat\n'*30)
    assert 900<chunk(csv_samples(tmp_path/'a.csv'))<1100 and chunk(csv_samples(tmp_path/'b.csv'))==16_384

@pytest.mark.parametrize('rows', [lambda: iter([np.zeros(8_000_000, np.uint8)]*3), lambda: ({'a':b'x'*4_000_000, 'b':[b'y'*4_000_000]} for _ in range(9))])
def test_a_generator_is_asked_for_its_first_samples_once(rows):
    source,n = as_source(rows()),sum(1 for _ in rows())
    assert chunk(source)==8 and chunk(source)==8
    assert sum(len(part) for part in source.stream(4))==n

@pytest.mark.parametrize('make', ['reader','lazy','dict'])
def test_rows_tell_how_large_they_are(make):
    pa,pl = pytest.importorskip('pyarrow'),pytest.importorskip('polars')
    values = [bytes(100_000)]*50
    if make=='reader': source = as_source(pa.RecordBatchReader.from_batches(pa.schema([('a',pa.binary())]), pa.table({'a':values}).to_batches()))
    elif make=='lazy': source = as_source(pl.DataFrame({'a':values}).lazy())
    else: source = as_source({'train':iter(values), 'valid':[1,2]})
    assert chunk(source)==640
    assert sum(len(part) for part in source.stream(7))==50+2*(make=='dict')

SCRIPT = '''
import resource, sys
from fastai_remote import tar_samples, to_shards
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/1024
to_shards(tar_samples(sys.argv[1]), sys.argv[2]+'/small', num_workers=1, progress=False)
before = peak()
to_shards(tar_samples(sys.argv[3]), sys.argv[2]+'/large', num_workers=1, progress=False)
print(peak()-before)
'''

def test_an_ingest_of_a_compressed_tar_holds_only_a_part_of_it(tmp_path):
    small,large = tar(tmp_path/'s.tar.gz', 8, 50_000, 'w:gz'),tar(tmp_path/'l.tar.gz', 500, 1_000_000, 'w:gz')   # 500 MB
    run = subprocess.run([sys.executable, '-W', 'ignore', '-c', SCRIPT, small, tmp_path, large], capture_output=True, text=True)
    assert float(run.stdout)<300, run.stderr
    store = ShardStore(tmp_path/'large')
    assert len(store)==500 and len(store.shards)==8
