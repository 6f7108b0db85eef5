"Errors of values that users give say what was wrong, and what to give instead"
import pickle
from datetime import date

import numpy as np
import pytest
from inputs import write_tar

from fastai_remote import (index_shards, IngestError, MemoryStore, RedisBlock, RedisStore, RemoteDataset,
    ShardStore, StoreError, TextOptions, to_redis, to_shards)
from fastai_remote.cli.main import main

def write(folder, source, **kwargs):
    return to_shards(source, folder, num_workers=0, shuffle=False, progress=False, **kwargs).store

def test_an_fn_without_return(tmp_path):
    with pytest.raises(IngestError, match='item 2: TypeError: fn returned None'):
        write(tmp_path/'a', list(range(9)), fn=lambda i: None if i==2 else {'a.i8':i}, max_failed=0)
    store = write(tmp_path/'b', [{'a.i8':0}])
    with pytest.raises(IngestError, match='fn returned None'): store.append([1], fn=lambda i: None, num_workers=0)

@pytest.mark.parametrize('url', [' s3://key:hidden@bucket/x', '\ts3://key:hidden@bucket/x ',
    ' redis://:hidden@localhost:1'])
def test_a_url_with_a_blank_before_it_is_no_path(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((StoreError,ValueError)) as error: ShardStore(url, timeout=.1)
    assert 'hidden' not in str(error.value) and not list(tmp_path.iterdir())

@pytest.mark.parametrize('value,says', [
    ({'png':np.array(['a','b'])}, r'an array of texts \(str\) of shape \(2,\): give'),
    ({'png':np.array([[object()]])}, 'an array of objects of shape'), ({'age.f4':np.array('ten')}, "'ten' .str."),
    ({'age.f4':np.datetime64('2026-01-01')}, 'the datetime64 2026-01-01'), ({'raw':3.5}, 'the float 3.5: give'),
    ({'npy':'abc'}, "the str 'abc'")])
def test_types_are_called_as_in_python(tmp_path, value, says):
    with pytest.raises(IngestError, match=f'got {says}') as error: write(tmp_path, [value])
    assert '<U' not in str(error.value) and 'dtype' not in str(error.value)

def test_what_json_has_not_is_to_be_made_a_text(tmp_path):
    message = 'json: Object of type date is not JSON serializable: make a text or numbers of it'
    with pytest.raises(IngestError, match=message): write(tmp_path, [{'when':date(2026, 1, 1)}])

@pytest.mark.parametrize('source,given', [([5], 'int'), ([(1,'x')], 'tuple'),
    ([{'jpg':b'x', 'cls':'a'}], r'dict of jpg \(bytes\), cls \(str\)')])
def test_an_error_of_fn_says_what_fn_was_given(tmp_path, source, given):
    def fn(o): return o['nothing']['at all'].size
    with pytest.raises(IngestError, match=f'fn was given: {given}'): write(tmp_path, source*20, fn=fn)

def test_a_block_of_texts_without_a_field():
    with pytest.raises(TypeError, match=r"needs the field with the texts: RedisBlock\('txt', text="):
        RedisBlock(text=TextOptions())

def test_decode_knows_webdatasets_names_or_names_them(tmp_path):
    members = {'transcript':'ä'.encode(), 'cls2':b'7', 'count':b'12', 'jsn':b'[1]', 'text':b'b', 'mp':b'\x01',
               'x.ten':b'\x02', 'pyd':b'N.'}
    write_tar(tmp_path/'a.tar', [(f'{k}.{name}', content) for k in '01' for name,content in members.items()])
    index_shards(tmp_path, num_workers=0, progress=False)
    with pytest.warns(UserWarning, match='decode.. leaves the bytes of') as warned:
        sample = RemoteDataset(ShardStore(tmp_path)).decode()[0]
    assert {str(w.message).split("'")[1] for w in warned}=={'mp','x.ten','pyd'}
    assert [sample[name] for name in ('transcript','cls2','count','jsn','text')]==['ä',7,12,[1],'b']
    assert (sample['mp'],sample['x.ten'],sample['pyd'])==(b'\x01',b'\x02',b'N.')
    own = RemoteDataset(ShardStore(tmp_path)).decode(lambda key, data: len(data) if key=='.mp' else None, only='mp')
    assert own[0]['mp']==1

def test_copies_are_the_new_store_and_the_report_is_printed(put, capsys):
    store,_ = put([{'txt':f'{i}', 'id':i} for i in range(9)], shuffle=False)
    make = dict(num_workers=0)
    def where(name): return (store.link, f'{name}2') if hasattr(store, 'link') else (f'{store.storage.url}-{name}',)
    copy = store.copy(*where('b'), **make)
    assert type(copy) is type(store) and len(copy)==9 and '9 written, 0 failed' in capsys.readouterr().out
    mapped = copy.map(lambda s: {'n.i8':len(s['txt'])}, *where('c'), progress=False, **make)
    assert mapped.fields==['n.i8'] and capsys.readouterr().out==''
    def fails(sample): return {'n.i8':1//sample['id']}
    some = copy.map(fails, *where('d'), progress=False, **make)
    assert len(some)==8 and 'ZeroDivisionError' in capsys.readouterr().out

@pytest.mark.parametrize('name', ['\x1b[31mred\x1b[0m', 'a\rb', '\x9b2J'])
def test_names_of_others_do_not_reach_the_terminal(tmp_path, name, capsys):
    (folder := tmp_path/f'x{name}').mkdir()
    codes = [main(['info', str(folder)])]
    folder.rmdir()
    write(tmp_path/'plain', [{'n.i8':1}])
    (tmp_path/'plain').rename(folder)
    codes += [main(['info', str(folder)]), main(['info', str(folder), '--json']), main(['failures', str(folder)])]
    out = ''.join(capsys.readouterr())
    assert codes==[1,0,0,0] and not set(out)&set('\x1b\r\x9b'), out
    with pytest.raises(StoreError) as error: ShardStore(folder).get_many([0], 'nope')
    assert not set(str(error.value))&set('\x1b\r\x9b')

def test_an_exported_learner_says_which_server_it_asks(server, fresh, tmp_path, monkeypatch):
    for k,one in enumerate((server,fresh)): to_redis([{'id':k}], one.url, 'asked', num_workers=0, progress=False)
    store = RedisStore(server.url, 'asked')
    assert store[0]['id']==0
    saved = pickle.dumps(store)
    monkeypatch.setenv('FASTAI_REMOTE_URL', fresh.url)
    with pytest.raises(StoreError, match=f'asked: replaced .*FASTAI_REMOTE_URL names the server {fresh.url}'):
        pickle.loads(saved)[0]
    fresh.kill()
    link = pickle.loads(saved).link
    assert not link.has_answered   # so that a server that is gone is asked for two seconds
    monkeypatch.setenv('FASTAI_REMOTE_URL', str(tmp_path/'b'))
    write(tmp_path/'a', [{'id':1}]), write(tmp_path/'b', [{'id':2}])
    (opened := ShardStore(tmp_path/'a'))[0]
    with pytest.raises(StoreError, match='replaced .*FASTAI_REMOTE_URL names the folder .*/b'):
        pickle.loads(pickle.dumps(opened))[0]

def test_a_copy_is_opened_with_the_options_that_it_was_written_with(server, tmp_path):
    store = MemoryStore({'txt':[b'a']}, 'one')
    options = dict(num_workers=0, progress=False, timeout=7.)
    link = store.copy(server.url, 'two', socket_timeout=3., client_name='me', **options).link
    assert (link.timeout,link.socket_timeout,link.kwargs['client_name'])==(7.,3.,'me')
    assert store.copy(tmp_path/'d', maxcount=1, **options).storage.timeout==7.
