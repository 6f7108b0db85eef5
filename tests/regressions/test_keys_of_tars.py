"A sample of a tar that can be read can be written, whatever its name is, and whatever that of its neighbour is"
import os

from fastai_remote.ingest.copy import copy_store
from fastai_remote import index_shards, RedisStore, ShardStore, tar_samples, to_redis, to_shards
from inputs import write_tar

NAMES = {
    'as `tar -cf x.tar .` makes them':[f'./{i}.txt' for i in range(9)],
    'no UTF-8':[os.fsdecode(b'caf\xe9/\xff')+f'{i}.txt' for i in range(9)],
    'one directory after the other':[f'a//{i}/./b.txt' for i in range(9)],
    'line breaks and backslashes':[f'a\nb\\{i}.txt' for i in range(9)],
    'absolute':[f'/data/{i}.txt' for i in range(9)],
    'long':['x'*3000+f'{i}.txt' for i in range(9)],
}

def write_tars(folder, names, n_tars=1):
    return [write_tar(folder/f'{k:03}.tar', [(name, f'{k} {i}'.encode()) for i,name in enumerate(names)])
            for k in range(n_tars)]

def texts(store): return sorted(store.get_many(range(len(store)), 'txt', decode=True)['txt'])

def test_samples_with_any_names_are_copied_and_written(tmp_path, server):
    tars = write_tars(tmp_path/'tars', [name for names in NAMES.values() for name in names])
    index_shards(tmp_path/'tars', progress=False)
    options = dict(num_workers=0, progress=False)
    source = ShardStore(tmp_path/'tars')
    reports = [copy_store(source, tmp_path/'copy', **options),
        to_shards(tar_samples(tars), tmp_path/'written', **options),
        to_redis(tar_samples(tars), server.url, 'd', overwrite=True, **options)]
    stores = ShardStore(tmp_path/'copy'),ShardStore(tmp_path/'written'),RedisStore(server.url, 'd')
    for report,store in zip(reports, stores):
        assert report.failed==0 and texts(store)==texts(source)
    assert any('54 keys of samples were changed' in remark for remark in repr(reports[0]).splitlines())
    assert len(list(tar_samples(sorted((tmp_path/'copy').glob('*.tar'))).stream(100)))>0

def test_keys_that_start_again_in_each_tar_do_not_let_neighbours_fail(tmp_path):
    tars = write_tars(tmp_path/'tars', [f'{i:04}.txt' for i in range(2)], 200)
    report = to_shards(tar_samples(tars), tmp_path/'d', num_workers=0, progress=False)
    store = ShardStore(tmp_path/'d')
    keys = store.keys(range(400))
    assert report.failed==0 and len(texts(store))==400 and all(a!=b for a,b in zip(keys, keys[1:]))
    assert sum(key in ('0000','0001') for key in keys)+sum('-' in key for key in keys)==400

