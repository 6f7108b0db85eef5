"The command line: what it writes, shows, refuses and returns; as functions where a process is not the point"
import fcntl, io, json, os, pty, re, select, shutil, signal, subprocess, sys, tarfile, termios, threading, time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
import pytest
import redis
from PIL import Image

from clusters import LocalCluster
from conftest import class_of, HOLD, holding, in_time, kill, wait_for
from fastai_remote import RedisStore, ShardStore, StoreError, csv_samples, image_samples, index_shards, to_redis
from fastai_remote import to_shards
from fastai_remote.cli.doctor import check_server
from fastai_remote.cli.main import COMMANDS, main
from fastai_remote.cli.options import flag
from fastai_remote.cli.places import url_of
from fastai_remote.store.redis_link import RedisLink, split_secret
from fastai_remote.store.server import redis_server
from fastai_remote.write.redis import RedisWriter
from fastai_remote.write.shard_files import seal_json
from s3servers import moto_server

VARIABLES = 'FASTAI_REMOTE_URL','REDIS_URL','FASTAI_REMOTE_PASSWORD'
FAST = '--workers','1'

@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in VARIABLES: monkeypatch.delenv(name, raising=False)

@pytest.fixture
def cli(capsys):
    "Run a command in this process: its exit code, its output, and what it says"
    def run(*words):
        code = main(list(map(str, words)))
        return code,*capsys.readouterr()
    return run

@pytest.fixture
def result(cli):
    "The JSON document of a command that succeeds"
    def run(*words):
        code,out,err = cli(*words, '--json')
        assert code==0, err
        return json.loads(out)
    return run

@pytest.fixture
def strict():
    "A server with a port and a password"
    with redis_server(port=-1, requirepass='pass/w@rd') as s: yield s

def bare(server):
    "URL of a server, without its password"
    return f'redis://127.0.0.1:{server.port}'

def start(*words, env=None, **kwargs):
    "The program as a process of its own group"
    env = {**{k:v for k,v in os.environ.items() if k not in VARIABLES}, **(env or {})}
    return subprocess.Popen([sys.executable, '-m', 'fastai_remote', *map(str, words)], env=env,
        **{'start_new_session':True, 'stdout':subprocess.PIPE, 'stderr':subprocess.PIPE, 'stdin':subprocess.DEVNULL, 'text':True, **kwargs})

def ended(p, seconds=60):
    "Exit code, output and what was said"
    out,err = p.communicate(timeout=seconds)
    return p.returncode,out,err

# Writing

def test_images_to_redis_and_shards_are_those_of_the_python_call(images, server, tmp_path, result, cli):
    words = '--label','folder','--splits','train,valid=0.2','--path',*FAST
    report = result('ingest', images, server.url, 'byhand', *words)
    assert (report['written'], report['failed'], report['name'])==(60, 0, 'byhand')
    assert result('ingest', images, tmp_path/'shards', *words)['written']==60
    to_redis(image_samples(images, label=class_of, path=True), server.url, 'called', splits={'train':None, 'valid':.2},
             num_workers=1, progress=False)
    called = RedisStore(server.url, 'called')
    for store in RedisStore(server.url, 'byhand'), ShardStore(tmp_path/'shards'):
        assert store.splits==called.splits and store.vocab==called.vocab
        for field in called.fields:
            ours,theirs = (s.get_many(range(60), field)[field] for s in (store, called))
            assert list(ours)==list(theirs)
    code,out,err = cli('ingest', images, server.url, 'byhand', *words)
    assert code==1 and not out and 'is there already' in err and '--overwrite replaces it' in err and err.count('\n')==1
    assert cli('ingest', images, server.url, 'byhand', *words, '--overwrite')[0]==0

def test_resize_on_the_way_in(images, server, result):
    result('ingest', images, server.url, 'small', '--resize', 20, '--quality', 80, *FAST)
    assert min(RedisStore(server.url, 'small')[0]['jpg'].size)==20

def test_splits_by_sources(images, server, result):
    result('ingest', f'train={images}/cat', f'valid={images}/dog', server.url, 'two', '--label', 'folder', *FAST)
    store = RedisStore(server.url, 'two')
    assert store.splits=={'train':[0,20], 'valid':[20,40]} and store.vocab==['cat','dog']

def make_csv(folder, images):
    rows = [f'{f.name},{f.parent.name}' for f in sorted((images/'cat').iterdir())]
    (folder/'labels.csv').write_text('\n'.join(['name,label', *rows]))
    return folder/'labels.csv','--fn-col','name','--label-col','1','--folder',images/'cat'

def make_drawings(folder, images):
    lines = [dict(word='line', key_id=str(k), recognized=True, drawing=[[[0, k], [5, 60]]]) for k in range(20)]
    (folder/'line.ndjson').write_text('\n'.join(map(json.dumps, lines)))
    return folder,'--field','png','--size','32'

def make_tars(folder, images):
    with tarfile.open(folder/'a.tar', 'w') as tar:
        for k,file in enumerate(sorted((images/'cat').iterdir())):
            for suffix,data in (('jpg', file.read_bytes()), ('cls', b'7')):
                info = tarfile.TarInfo(f'{k:04}.{suffix}')
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    (folder/'a.parquet').write_bytes(b'of img2dataset')
    return folder,'--key'

FN = '''
def sample(row): return {'txt': row['text'], 'cls': row['kind'] if isinstance(row['kind'], str) else 'ab'[row['kind']]}
'''
def rows(): return dict(text=[f'text {k}' for k in range(20)], kind=['ab'[k%2] for k in range(20)])

def make_parquet(folder, images):
    pd = pytest.importorskip('pandas')
    pytest.importorskip('pyarrow')
    pd.DataFrame(rows()).to_parquet(folder/'texts.parquet')
    (folder/'ours.py').write_text(FN)
    return folder/'texts.parquet','--fn',f'{folder}/ours.py:sample'

def make_huggingface(folder, images):
    datasets = pytest.importorskip('datasets')
    datasets.Dataset.from_dict(rows()).save_to_disk(str(folder/'saved'))
    (folder/'ours.py').write_text("def sample(row): return {'txt':row['txt'], 'cls':row['kind.txt']}")
    return folder/'saved','--fn',f'{folder}/ours.py:sample'

def make_zarr(folder, images, version=3, name='data.zarr'):
    zarr = pytest.importorskip('zarr')
    group = zarr.open_group(folder/name, mode='w', zarr_format=version)
    group.create_array('npy', data=np.zeros((20,3), 'f4'), chunks=(7,3))
    group.create_array('cls', data=np.arange(20)%3)
    return folder/name,
def make_zarr_2(folder, images): return make_zarr(folder, images, 2)
def make_zarr_of_another_name(folder, images): return make_zarr(folder, images, name='arrays')

@pytest.mark.parametrize('make', [make_csv, make_drawings, make_tars, make_parquet, make_huggingface, make_zarr,
    make_zarr_2,
    make_zarr_of_another_name])
def test_each_kind_of_source_is_recognised_by_its_files(make, images, server, tmp_path, result):
    source,*words = make(tmp_path, images)
    assert result('ingest', source, server.url, make.__name__, *words, *FAST)['written']==20
    assert len(RedisStore(server.url, make.__name__).fields)>1

def test_a_file_of_the_user_works_in_workers(server, tmp_path, result):
    (tmp_path/'rows.csv').write_text('text,kind\n'+'\n'.join(f'text {k},a' for k in range(20)))
    (tmp_path/'ours.py').write_text(FN)
    report = result('ingest', tmp_path/'rows.csv', server.url, 'rows', '--fn', f'{tmp_path}/ours.py:sample', '--workers', 2)
    assert report['written']==20 and RedisStore(server.url, 'rows')[3]=={'txt':'text 3', 'cls':'a'}

@pytest.mark.parametrize('words,part', [
    (['ingest'], 'a source and a place are needed'), (['ingest', 'nowhere', 'redis://h'], 'name of the dataset is missing'),
    (['ingest', '{images}', '{out}', '--key'], '--key: no option of image files'),
    (['ingest', '{images}', 'redis://h', 'pets', '--maxsize', '5'], '--maxsize is an option of shards'),
    (['ingest', '{images}', '{out}', '--quality', '5'], '--quality needs --resize'),
    (['ingest', '{images}', '{out}', '--num-workers', 'many'], "invalid int value: 'many'"),
    (['ingest', '', '{out}'], "'' is no source"), (['ingest', 'train={images}', 'valid=', '{out}'], "'' is no source"),
    (['ingest', '{mixed}', '{out}'], '--kind says which to read'), (['ingest', '{empty}', '{out}'], 'what is this?'),
    (['ls', '{out}', 'too', 'much'], 'too much'), (['info', 'redis://h'], 'name of the dataset is missing'),
    (['ls'], 'FASTAI_REMOTE_URL or REDIS_URL'), (['info', 'env:NOWHERE', 'pets'], 'NOWHERE, which is not set'),
    (['igest'], 'did you mean ingest?'), (['copy', '{out}'], '2 places are needed'), (['resize', '{out}'], 'SIZE is missing'),
    (['resize', '²', '{out}', '{out}'], 'SIZE is missing'),
    (['ingest', '{images}', '{out}', '--splits', 'a=.5,b=.2,a=.3'], "'a' is there twice"),
    (['ingest', '{images}', '{out}', '--splits', '=.5,b'], "a name is missing"),
    (['ingest', 'a.csv', '{out}', '--fields', 'age,path=jpg'], "no value for 'age'"),
    (['ingest', 'a.csv', '{out}', '--fields', 'path='], "no value for 'path'"),
    (['ingest', '{images}', '{out}', '--fn', '{raises}:f'], 'ValueError: the reason'),
    (['ingest', '{images}', '{out}', '--fn', '{broken}:f'], 'SyntaxError'),
    (['ingest', '{images}', '{out}', '--fn', '{broken}.py:f'], 'FileNotFoundError'),
    (['ingest', '{images}', '{out}', '--fn', 'json:nothing'], "no function 'nothing'"),
    (['ingest', '{images}', '{out}', '--fn', 'json:codecs'], "no function 'codecs'"),
    (['info'], 'a place is needed'), (['serve'], 'one folder'), (['serve', '{out}', '--memory', 'lots'], 'such as 500mb'), (['rm', '{out}', '--nonsense'], 'nonsense'),
    (['ls', '{out}', '--storage-options', '{{"secret": "hidden"}}'], 'may be secret')])
def test_a_wrong_command_line_says_what_is_wrong(words, part, images, tmp_path, cli):
    for name in 'mixed','empty': (tmp_path/name).mkdir()
    shutil.copytree(images/'cat', tmp_path/'mixed/images')
    (tmp_path/'mixed/labels.csv').write_text('name,label\n')
    places = dict(images=images, out=tmp_path/'out', mixed=tmp_path/'mixed', empty=tmp_path/'empty')
    for name,code in dict(raises="raise ValueError('the reason')", broken='def f(x) return x').items():
        places[name] = tmp_path/f'{name}.py'
        places[name].write_text(code)
    code,out,err = cli(*(word.format(**places) for word in words))
    assert code==2 and not out and part in err and 'hidden' not in err and len(err.splitlines())==2, err
    assert not (tmp_path/'out').exists()

# Looking, copying, removing

def test_the_life_of_a_dataset(redis_pics, server, tmp_path, result, cli):
    url,folder = server.url,tmp_path/'pics'
    assert 'pics' in [o['name'] for o in result('ls', url)['datasets']]
    assert result('copy', url, 'pics', folder, *FAST)['written']==60
    assert [o['samples'] for o in result('ls', tmp_path)['datasets']]==[60]
    assert result('copy', folder, url, 'again', *FAST)['written']==60
    assert result('resize', 20, url, 'again', url, 'smaller', *FAST)['written']==60
    assert min(RedisStore(url, 'smaller')[0]['jpg'].size)==20
    info = result('info', folder)
    assert info['samples']==60 and info['vocab']['cls']==['bird','cat','dog'] and info['counts']['cls']['cat']==20
    assert result('verify', url, 'again', *FAST)['bad']==0
    code,out,_ = cli('info', url, 'again')
    assert code==0 and re.search(r'field cls +cls \(u1\), 3 labels: bird, cat, dog', out)
    code,out,_ = cli('ls', url)
    assert code==0 and re.search(r'^again +60 +', out, re.M)
    code,out,err = cli('rm', url, 'again')
    assert code==2 and '--yes' in err and 'again' in RedisStore.names(url)
    assert cli('rm', url, 'again', '--yes')[0]==0 and 'again' not in RedisStore.names(url)
    assert cli('rm', folder, '--yes')[0]==0 and not (folder/'manifest.json').exists()
    code,out,err = cli('info', url, 'again')
    assert code==1 and not out and re.fullmatch(r'fastai_remote info: .*no dataset .again.; there are: .*\n', err)

def test_damage_is_exit_code_3(images, tmp_path, cli):
    to_shards(image_samples(images), tmp_path/'d', num_workers=1, progress=False)
    shard, = (tmp_path/'d').glob('*.tar')
    with open(shard, 'r+b') as f:
        f.seek(2000)
        f.write(b'damaged')
    code,out,_ = cli('verify', tmp_path/'d', '--json', *FAST)
    assert code==3 and json.loads(out)['bad']>0
    code,out,_ = cli('verify', tmp_path/'d', *FAST)
    assert code==3 and 'damaged' in out

@pytest.fixture
def with_failures(server, tmp_path):
    "A source of 500 rows, of which 100 fail"
    (tmp_path/'rows.csv').write_text('name,label\n'+'\n'.join(f'{k if k%5 else "absent"}.jpg,{k}' for k in range(500)))
    photo = io.BytesIO()
    Image.new('RGB', (8, 8)).save(photo, 'JPEG')
    for k in range(500): (tmp_path/f'{k}.jpg').write_bytes(photo.getvalue())
    return tmp_path/'rows.csv','--fn-col','0','--folder',tmp_path,*FAST

def test_failures_of_a_dataset_and_of_an_unfinished_ingest(with_failures, server, tmp_path, result, cli):
    (tmp_path/'shards').mkdir()
    for place in ([server.url, 'failing'], [tmp_path/'shards']):
        code,out,err = cli('ingest', with_failures[0], *place, *with_failures[1:], '--max-failed', '5')
        assert code==1 and not out and err.count('\n')==1 and 'Traceback' not in err
        assert 'repeat the same command with a higher --max-failed to go on' in err
        assert f"`fastai_remote abandon {' '.join(map(str, place))}`" in err
        assert len(result('failures', *place)['failures'])>5
        assert cli('abandon', *place)[0]==0 and cli('abandon', *place)[0]==1
        assert cli('ingest', with_failures[0], *place, *with_failures[1:], '--max-failed', '0.5')[0]==0
        document = result('failures', *place)
        assert len(document['failures'])==100 and 'absent.jpg' in document['failures'][0][1]
        code,out,_ = cli('failures', *place)
        assert code==0 and len(out.splitlines())==100 and 'absent.jpg' in out.splitlines()[0]

def test_head_ends_a_listing_in_silence(with_failures, server, cli):
    assert cli('ingest', with_failures[0], server.url, 'many', *with_failures[1:], '--max-failed', '0.5')[0]==0
    command = f'{sys.executable} -m fastai_remote failures {server.url} many'
    script = f'{command} | head -n 1; echo ${{PIPESTATUS[0]}}'
    p = subprocess.run(['bash', '-c', script], capture_output=True, text=True, timeout=300)
    lines = p.stdout.splitlines()
    assert len(lines)==2 and lines[1] in ('0','141') and not p.stderr

def test_a_reader_that_is_gone_is_exit_code_141(redis_pics, server):
    reader,writer = os.pipe()
    os.close(reader)
    p = start('info', server.url, 'pics', stdout=writer)
    os.close(writer)
    code,_,err = ended(p)
    assert (code, err)==(141, '')

@pytest.mark.parametrize('is_redis', [True, False])
def test_append(is_redis, images, server, tmp_path, result):
    place = [server.url, 'growing'] if is_redis else [tmp_path/'growing']
    result('ingest', images/'cat', *place, '--label', 'folder', *FAST)
    report = result('append', images/'dog', *place, '--label', 'folder', *FAST)
    assert (report['added'], report['samples'])==(20, 40)
    assert result('info', *place)['samples']==40

# Options

ONLY_HERE = {'json','traceback','yes','kind','resize','help','port','memory','words'}

def functions_of(name):
    from fastai_remote.cli.doctor import check_machine
    from fastai_remote.cli.serve import serve
    from fastai_remote.cli.sources import SOURCE_KINDS
    from fastai_remote.ingest.copy import resize_store
    from fastai_remote.ingest.verify import verify_store
    from fastai_remote.source.shrink import shrink
    sources,write = [kind.open for kind in SOURCE_KINDS.values()],[to_redis, to_shards]
    append = [RedisStore.append]
    if name in ('ingest','append'): return [*sources, *write, *append, shrink]
    return {'copy':write, 'resize':[*write, resize_store], 'verify':[verify_store, ShardStore, to_redis],
            'serve':[serve]}.get(name, [ShardStore])

@pytest.mark.parametrize('name', COMMANDS)
def test_each_option_is_a_parameter_of_the_python_function(name):
    import inspect
    known = {p for f in functions_of(name) for p in inspect.signature(f).parameters}
    for action in COMMANDS[name].parser()._actions:
        assert action.dest in known|ONLY_HERE, action.dest
        if action.dest not in ONLY_HERE: assert {flag(action.dest), '--no'+flag(action.dest)[1:]}&set(action.option_strings)

def test_an_option_of_another_place_is_named_as_it_is_written(monkeypatch):
    from argparse import Namespace
    from fastai_remote.cli import writing
    from fastai_remote.cli.places import Place
    monkeypatch.setattr(writing, 'write_parameters', lambda: ['two_words'])
    for url,kind in ('redis://h','shards'), ('folder','Redis'):
        with pytest.raises(writing.UsageError, match=f'^--two-words is an option of {kind}'):
            writing.write_options(Namespace(two_words=1), Place([url], url))

def test_options_may_be_written_as_in_python(images, tmp_path, result):
    assert result('ingest', images, tmp_path/'d', '--num_workers=1', '--max_failed', '3')['written']==60

@pytest.mark.parametrize('name', COMMANDS)
def test_help_has_examples(name, capsys):
    with pytest.raises(SystemExit) as e: main([name, '-h'])
    out = capsys.readouterr().out
    assert e.value.code==0 and f'usage: fastai_remote {name}' in out and f'fastai_remote {name} ' in out.split('examples:')[1]

def test_help_names_all_commands_and_exit_codes(cli):
    code,out,_ = cli('-h')
    assert code==0 and all(f'\n  {name} ' in out for name in COMMANDS) and 'exit codes: 0 ' in out
    assert cli()[0]==2 and cli('--version')[1].startswith('fastai_remote ')

def test_light_commands_do_not_import_torch(redis_pics, images, server, tmp_path):
    to_redis([{'id':1}], server.url, 'doomed', num_workers=1, progress=False)
    commands = [['-h'], ['ls', server.url], ['info', server.url, 'pics'], ['verify', server.url, 'pics', *FAST],
                ['rm', server.url, 'doomed', '--yes'], ['ingest', str(images), str(tmp_path/'d'), *FAST], ['doctor', server.url]]
    code = f'''import sys
from fastai_remote.cli.main import main
def check(*names): assert not (found:=set(names)&sys.modules.keys()), found
main(['-h']); check('numpy','redis','fsspec','PIL')
for words in {commands!r}:
    assert main(words)==0, words
    check('torch','fastai','torchvision','matplotlib')'''
    p = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True)
    assert p.returncode==0, p.stderr

# Passwords

@pytest.mark.parametrize('words', [['ls', 'redis://:hunter2@localhost'], ['ls', 'redis://user:hunter2@localhost'],
    ['ls', 'redis://:hunter2/x@localhost'],
    ['ingest', 'a', 'https://host/x?signature=hunter2', 'b'], ['ingest', 'train=https://u:hunter2@host/x', 'b'],
    ['ls', 'a', '--storage-options', '{"endpoint_url": "http://u:hunter2@host"}'], ['copy', 'a', '--storage-options=https://u:hunter2@h'],
    ['hunter', 'redis://:hunter2@localhost']])
def test_a_password_in_the_command_line_is_refused_and_not_shown(words, cli):
    code,out,err = cli(*words)
    assert code==2 and 'everybody on this machine can read the command line' in err and 'hunter2' not in out+err

@pytest.mark.parametrize('known,asked,login', [
    ('unix:///run/s?password=p%26w&db=2', 'unix:///run/s?db=1', (None,'p&w')),
    ('redis://host?password=p%2Fw', 'redis://host:6379/3', (None,'p/w')),
    ('redis://host?password=pw&username=m%C3%A9', 'redis://host', ('mé','pw')),
    ('redis://host?password=pw&username=me', 'redis://me@host', ('me','pw')),
    ('redis://host?password=pw&username=me', 'redis://you@host', ('you',None)),
    ('redis://:pw@host', 'redis://default@host', ('default','pw')),
    ('redis://default:pw@host', 'redis://host', ('default','pw')), ('redis://m%65:pw@host', 'redis://me@host', ('me','pw')),
    ('redis://:pw@host', 'redis://me@host', ('me',None)), ('redis://me:pw@host', 'redis://default@host', ('default',None)),
    ('unix://:pw@/run/s', 'unix:///run/t', (None,None)), ('redis://host?password=', 'redis://host', (None,None))])
def test_the_password_of_a_variable_counts_wherever_it_is_in_the_url(known, asked, login, monkeypatch):
    monkeypatch.setenv('FASTAI_REMOTE_URL', known)
    url = str(url_of(asked))
    shown,password = split_secret(url)
    options = redis.connection.parse_url(url)
    assert password==login[1] and options.get('username')==login[0]
    assert urlsplit(shown).query==urlsplit(asked).query and urlsplit(shown).path==urlsplit(asked).path

@pytest.mark.parametrize('variable,word', [('FASTAI_REMOTE_URL','env:'), ('REDIS_URL','env:'), ('OURS','env:OURS'), ('REDIS_URL',None),
    ('FASTAI_REMOTE_PASSWORD',None)])
def test_passwords_from_the_environment(variable, word, strict, images, monkeypatch, result):
    monkeypatch.setenv(variable, 'pass/w@rd' if variable=='FASTAI_REMOTE_PASSWORD' else strict.url)
    word = word or bare(strict)
    document = result('ingest', images/'cat', word, 'cats', '--workers', 2 if variable=='OURS' else 1)
    assert document['written']==20 and 'w@rd' not in str(document) and 'w%40rd' not in str(document)
    assert [o['name'] for o in result('ls', word)['datasets']]==['cats']

@pytest.mark.parametrize('known, asked, found', [
    ('redis://:pw@[::1]:6379', 'redis://[::1]', 'redis://:pw@[::1]:6379'),
    ('redis://:pw@[::1]', 'redis://[::1]:6379/2', 'redis://:pw@[::1]/2'),
    ('redis://me:pw@Host', 'redis://host:6379', 'redis://me:pw@Host'),
    ('redis://:pw@[::1]:6380', 'redis://[::1]', None), ('redis://:pw@[::2]', 'redis://[::1]', None),
    ('redis+sentinel://:pw@host/one', 'redis+sentinel://host:26379/one', 'redis+sentinel://:pw@host/one'),
    ('redis+sentinel://:pw@host/one', 'redis+sentinel://host/two', None),
    ('redis://:pw@[::1', 'redis://[::1]', None), ('redis://:pw@host:x', 'redis://host', None)])
def test_a_password_is_known_for_the_same_server_only(known, asked, found, monkeypatch):
    from fastai_remote.cli.places import url_of
    monkeypatch.setenv('FASTAI_REMOTE_URL', known)
    assert url_of(asked)==(found or asked)

def test_the_scheme_of_a_url_may_be_in_capitals(server, monkeypatch, result, cli):
    url = server.url.replace('unix:', 'UNIX:')
    assert result('ls', url)['url']==server.url
    monkeypatch.setenv('OURS', url)
    assert result('ls', 'env:OURS')['url']==server.url
    code,_,err = cli('ingest', 'images', url)
    assert code==2 and 'the name of the dataset is missing' in err
    code,_,err = cli('ls', 'REDIS://:hunter2/x@localhost')
    assert code==2 and 'everybody on this machine can read the command line' in err and 'hunter2' not in err

def test_a_missing_password_is_no_question_without_a_terminal(strict, cli, monkeypatch):
    code,out,err = cli('ls', bare(strict))
    assert code==2 and 'set FASTAI_REMOTE_PASSWORD' in err
    monkeypatch.setenv('FASTAI_REMOTE_PASSWORD', 'wrong one')
    code,out,err = cli('ls', bare(strict))
    assert code==1 and 'wrong one' not in out+err and err.count('\n')==1

class Terminal:
    "The program in a terminal of its own"
    def __init__(self, *words, env=None):
        self.owner,theirs = pty.openpty()
        self.text = ''
        def control():
            os.setsid()
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)   # Ctrl-C is for this process
        self.process = start(*words, stdin=theirs, stdout=theirs, stderr=theirs, text=False, env=env,
                             start_new_session=False, preexec_fn=control)
        os.close(theirs)

    def read(self):
        "What is there to read; false at the end"
        try: piece = os.read(self.owner, 10000) if select.select([self.owner], [], [], .1)[0] else None
        except OSError: return False   # the other end is closed
        if piece: self.text += piece.decode()
        return piece!=b''

    def until(self, text, seconds=60):
        started = time.monotonic()
        while text not in self.text:
            assert self.read() and time.monotonic()-started<seconds, self.text
    def write(self, text): os.write(self.owner, text.encode())
    def end(self, seconds=60):
        started = time.monotonic()
        while self.read(): assert time.monotonic()-started<seconds, self.text
        os.close(self.owner)
        return self.process.wait(10)

def test_a_password_is_asked_for_in_a_terminal_and_not_shown(strict):
    to_redis([{'id':1}], strict.url, 'one', num_workers=1, progress=False)
    terminal = Terminal('rm', bare(strict), 'one')
    terminal.until('Password of redis://127.0.0.1')
    terminal.write('pass/w@rd\n')
    terminal.until('(1 samples)? [y/N]')
    terminal.write('n\n')
    assert terminal.end()==1 and 'w@rd' not in terminal.text and 'nothing was removed' in terminal.text
    assert RedisStore.names(strict.url)==['one']

# Progress and interruptions

SLOW = f'''{HOLD}
import time
def sample(row):
    hold()
    time.sleep(.002)
    return {{'txt': row['text'], 'cls': row['kind']}}
'''

@pytest.fixture
def slow(tmp_path):
    "Words of a source of 600 samples that takes a second, or waits"
    (tmp_path/'rows.csv').write_text('text,kind\n'+'\n'.join(f'text {k},{k%2}' for k in range(600)))
    (tmp_path/'ours.py').write_text(SLOW)
    return [tmp_path/'rows.csv'],['--fn', f'{tmp_path}/ours.py:sample', '--chunk', 20]

def test_progress_in_a_terminal_and_silence_in_a_pipe(slow, server, redis_pics, images):
    words = ['ingest', images, server.url, 'shown', '--chunk', 2, *FAST]
    terminal = Terminal(*words)
    assert terminal.end()==0
    assert re.search(r'\d+%, \d+ samples, [\d,]+ samples/s, \d:\d\d left', terminal.text)
    assert terminal.text.rstrip().splitlines()[-1].replace('\x1b[K', '').lstrip('\r').startswith('shown: 60 written')
    code,out,err = ended(start(*words, '--overwrite', '--json'))
    assert code==0 and err=='' and json.loads(out)['written']==60

def test_progress_of_verify_is_not_in_its_output(redis_pics, server, capsys):
    assert main(['verify', server.url, 'pics', '--progress', '--chunk', '10', *FAST])==0
    out,err = capsys.readouterr()
    assert '\r' not in out and '100%, 60 samples' in err

@pytest.mark.slow
@pytest.mark.parametrize('is_redis', [True, False])
def test_interrupted_ingest_says_how_to_go_on_and_goes_on(is_redis, slow, server, tmp_path, cli):
    place = [server.url, 'stopped'] if is_redis else [tmp_path/'stopped']
    words = ['ingest', *slow[0], *place, *slow[1]]
    p = start(*words, '--workers', 2, env=holding(100, tmp_path/'never'))
    def chunks(): return sum(o['chunks'] for o in (RedisStore if is_redis else ShardStore).unfinished(place[0]))
    try:
        # one worker writes five chunks, and waits: both have begun (one that imports joblib shows a traceback of its own)
        wait_for(lambda: p.poll() is not None or chunks()>5)
        os.killpg(p.pid, signal.SIGINT)   # as a terminal does
        code,out,err = ended(p)
    finally: kill(p)
    assert code==130 and not out and 'Traceback' not in err, err
    said = err.strip().splitlines()[-1]
    assert 'chunks done): repeat the same command to go on' in said and 'fastai_remote abandon' in said
    code,out,err = cli(*words, '--workers', 1, '--json')
    assert code==0 and json.loads(out)['written']==600 and json.loads(out)['resumed']>=40

@pytest.mark.slow
def test_a_worker_that_dies_is_an_error_that_says_how_to_go_on(tmp_path):
    (tmp_path/'rows.csv').write_text('text,kind\n'+'\n'.join(f'text {k},a' for k in range(600)))
    (tmp_path/'ours.py').write_text(FN.replace('sample(row):', "sample(row): return __import__('os')._exit(1) if row['text']=='text 500' else fine(row)\ndef fine(row):"))
    code,out,err = ended(start('ingest', tmp_path/'rows.csv', tmp_path/'d', '--fn', f'{tmp_path}/ours.py:sample', '--workers', 2))
    assert code==1 and not out and 'repeat the same command' in err.splitlines()[-1] and 'File "' not in err, err

# serve

@pytest.fixture
def serving(tmp_path):
    "A function that starts `serve` and waits until the server can be used; all are stopped at the end"
    started = []
    def run(*words):
        p = start('serve', tmp_path/'data', *words, '--json')
        started.append(p)
        line = p.stdout.readline()
        assert line, p.stderr.read()
        return p,json.loads(line)
    yield run
    for p in started: kill(p)

def url_in(folder): return (folder/'url').read_text().strip()

@pytest.mark.slow
def test_serve_keeps_data_url_and_secret(serving, tmp_path, images, result, cli):
    folder = tmp_path/'data'
    p,said = serving('--memory', '200mb')
    url = url_in(folder)
    assert said['url']==re.sub(':[^:@]*@', '', url) and url!=said['url'] and (folder/'url').samefile(said['url_file'])
    assert {oct(f.stat().st_mode&0o777) for f in folder.rglob('*') if f.is_file()}=={'0o600'} and folder.stat().st_mode&0o777==0o700
    to_redis(image_samples(images), url, 'pets', num_workers=1, progress=False)
    code,_,err = cli('serve', folder)
    assert code==1 and f"{folder} is served already, at {said['url']}" in err
    for stop,code in (signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGKILL, -9):
        time.sleep(1.1 if stop==signal.SIGKILL else 0)   # the file is written to the disk each second
        p.send_signal(stop)
        assert ended(p)[::2]==(code, '')
        pid = said['pid']
        wait_for(lambda: not Path(f'/proc/{pid}').exists() or 'Z' in Path(f'/proc/{pid}/stat').read_text().split()[2], 30)
        p,said = serving()
        assert url_in(folder)==url and len(RedisStore(url, 'pets'))==60
    assert RedisStore(url, 'pets').verify(num_workers=1).bad==0
    secret = url.split(':')[2].split('@')[0]
    assert secret not in Path(f"/proc/{p.pid}/cmdline").read_text()+Path(f"/proc/{said['pid']}/cmdline").read_text()

def test_a_second_signal_ends_the_waiting_for_a_server_that_saves(tmp_path):
    "The message names its process, which goes on saving; nobody waits for it, and it is told to stop only once"
    from fastai_remote.cli.serve import serve
    def ready(server):
        servers.append((server, server.proc.send_signal))
        server.proc.send_signal = sent.append   # it never ends: it saves
        signal.raise_signal(signal.SIGINT)
        threading.Timer(1, signal.raise_signal, [signal.SIGINT]).start()
    servers,sent = [],[]
    began = time.monotonic()
    with pytest.raises(StoreError, match='still saving its data, as process'): serve(tmp_path/'d', ready=ready,
        say=print)
    server,send = servers[0]
    assert time.monotonic()-began<20 and server.proc.poll() is None and sent==[signal.SIGTERM]
    send(signal.SIGTERM)
    assert server.proc.wait(30)==0

def test_serve_in_a_terminal_tells_how_to_use_it(tmp_path):
    terminal = Terminal('serve', tmp_path/'my data')
    terminal.until('Ctrl-C stops')
    url = url_in(tmp_path/'my data')
    assert url not in terminal.text and url.split(':')[2].split('@')[0] not in terminal.text
    export, = re.findall(r'export FASTAI_REMOTE_URL=.*', terminal.text)
    p = subprocess.run(['bash', '-c', f'{export.strip()}; {sys.executable} -m fastai_remote ls'], capture_output=True, text=True)
    assert p.returncode==0 and 'no datasets' in p.stdout, p.stderr
    terminal.write('\x03')
    assert terminal.end()==0

def test_serve_reads_the_snapshot_of_a_python_server(tmp_path, images):
    from fastai_remote.cli.serve import serving
    with redis_server(tmp_path/'d') as s: to_redis(image_samples(images), s.url, 'pets', num_workers=1, progress=False)
    with serving(tmp_path/'d') as s: assert len(RedisStore(s.url, 'pets'))==60
    with serving(tmp_path/'d') as s: assert len(RedisStore(s.url, 'pets'))==60

def test_a_python_server_reads_what_serve_has_kept(tmp_path, images):
    from fastai_remote.cli.serve import serving
    with serving(tmp_path/'d') as s: to_redis(image_samples(images), s.url, 'pets', num_workers=1, progress=False)
    with redis_server(tmp_path/'d') as s: assert len(RedisStore(s.url, 'pets'))==60

def test_a_port_that_is_used(tmp_path, strict, cli):
    code,_,err = cli('serve', tmp_path/'d', '--port', strict.port)
    assert code==1 and f'port {strict.port} cannot be used' in err

# doctor

def test_doctor_of_the_machine(result):
    document = result('doctor')
    assert document['versions']['fastai_remote'] and {'versions','C module _jpeg'}<={o['what'] for o in document['findings']}

def test_doctor_tells_what_a_missing_c_module_costs(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, 'fastai_remote.codec._jpeg', None)
    code,out,_ = cli('doctor')
    assert code==0 and re.search('- C module _jpeg: not compiled, so JPEG photographs load .* as fast', out) and 'jpeg' in out

def test_doctor_finds_dangerous_settings(cli):
    with redis_server(maxmemory='30mb', maxmemory_policy='allkeys-random') as s:
        code,out,_ = cli('doctor', s.url)
        assert code==3 and '! maxmemory-policy: allkeys-random' in out and '- saving: off' in out
        code,out,_ = cli('doctor', s.url, '--json')
        assert code==3 and [o['what'] for o in json.loads(out)['findings'] if o['level']=='problem']==['maxmemory-policy']

RULES = re.findall(r'ACL SETUSER (reader|writer) on >PASSWORD (.*)', (Path(__file__).parents[1]/'nbs/guide/credentials.md').read_text())

@pytest.mark.parametrize('kind,rule', RULES, ids=[kind for kind,_ in RULES])
def test_doctor_names_missing_rights_and_writes_nothing(kind, rule, fresh, monkeypatch, cli):
    client = redis.Redis.from_url(fresh.url)
    client.execute_command('ACL', 'SETUSER', kind, 'on', '>mine', *rule.split())
    monkeypatch.setenv('OURS', fresh.url.replace('unix://', f'unix://{kind}:mine@'))
    code,out,_ = cli('doctor', 'env:OURS', 'pets')
    assert code==0 and '  rights: this user may train from pets' in out and client.dbsize()==0
    assert ('  rights: this user may write pets' in out)==(kind=='writer')
    assert ('may not write pets: its access list (ACL) needs +watch' in out)==(kind=='reader')
    code,out,_ = cli('doctor', 'env:OURS', 'cats')
    assert 'may not train from cats: its access list (ACL) needs ~cats:* ~cats@*' in out and client.dbsize()==0

@pytest.mark.parametrize('right', ['exec','multi','watch','unwatch','expire'])
def test_doctor_tries_each_command_that_a_writer_sends(right, fresh, monkeypatch, cli):
    client,rule = redis.Redis.from_url(fresh.url),dict(RULES)['writer']
    client.execute_command('ACL', 'SETUSER', 'most', 'on', '>mine', *rule.split(), f'-{right}')
    monkeypatch.setenv('OURS', fresh.url.replace('unix://', 'unix://most:mine@'))
    code,out,_ = cli('doctor', 'env:OURS', 'pets')
    assert code==0 and f'may not write pets: its access list (ACL) needs +{right}' in out and client.dbsize()==0

@pytest.mark.slow
def test_doctor_looks_at_each_server_of_a_cluster(monkeypatch, cli):
    with LocalCluster() as cluster:
        cluster.client(1).config_set('maxmemory-policy', 'allkeys-lru')
        monkeypatch.setenv('FASTAI_REMOTE_PASSWORD', cluster.password)
        code,out,_ = cli('doctor', bare(cluster.servers[0]), 'pets')
        assert code==3 and '(a cluster)' in out and out.count('this user may write pets')==1
        assert re.findall('(?m)^!.*',
            out)==[f'! maxmemory-policy of 127.0.0.1:{cluster.servers[1].port}: allkeys-lru: a full server '
                                            'drops samples. Set it to noeviction']

def test_doctor_does_not_wait_long_for_a_server_that_never_answered(monkeypatch, cli):
    monkeypatch.setenv('OURS', 'redis://:pw@127.0.0.1:1')
    with in_time(6): code,_,err = cli('doctor', 'env:OURS')
    assert code==1 and '127.0.0.1:1' in err

@pytest.mark.parametrize('error,times', [
    (redis.ConnectionError('lost'),2), (redis.ResponseError('BUSY running a script'),2), (redis.exceptions.NoPermissionError('no'),1), (redis.ResponseError('unknown command INFO'),1)], ids=repr)
def test_doctor_asks_again_whether_this_is_a_cluster_if_the_connection_was_lost(error, times, fresh, monkeypatch, cli):
    asked,info = [],redis.Redis.info
    def failing_once(client, section=None):
        if section!='cluster': return info(client, section)
        asked.append(section)
        if len(asked)==1: raise error
        return info(client, section)
    monkeypatch.setattr(redis.Redis, 'info', failing_once)
    assert cli('doctor', fresh.url)[0]==0 and len(asked)==times

def test_doctor_says_that_a_connection_was_lost_and_not_that_a_right_is_missing(fresh, monkeypatch, cli):
    def config_get(*args): raise redis.ConnectionError('lost')
    monkeypatch.setattr(redis.Redis, 'config_get', config_get)
    _,out,_ = cli('doctor', fresh.url)
    assert 'lost: so the settings of the server are not known' in out and 'may not CONFIG GET' not in out

@pytest.mark.parametrize('url,masters,secret,found', [
    ('redis://localhost:7000,localhost:7001', ['127.0.0.1','::1'], None, []),
    ('redis://localhost:7000,far:7001', ['127.0.0.1','10.0.0.7'], None, ['password']),
    ('redis://localhost:7000,far:7001', ['127.0.0.1','10.0.0.7'], 'pw', ['TLS']),
    ('redis+sentinel://localhost:7000/pets', ['10.0.0.7'], None, ['password']),
    ('redis+sentinel://localhost:7000/pets', ['10.0.0.7'], 'pw', ['TLS']),
    ('rediss+sentinel://localhost:7000/pets', ['10.0.0.7'], 'pw', []),
    ('redis+sentinel://far:7000/pets', ['127.0.0.1'], None, []),
    ('unix:///run/redis.sock', [None], None, [])])
def test_doctor_looks_at_the_network_to_each_server(url, masters, secret, found):
    "Where the sentinels are does not matter: the data go to the master"
    def client_of(host):
        def info(section): raise redis.ResponseError('not known here')
        where = {'path':'/run/redis.sock'} if host is None else {'host':host, 'port':7000}
        return SimpleNamespace(get=lambda key: None, info=info, get_connection_kwargs=lambda: where)
    servers = SimpleNamespace(masters=lambda: list(map(client_of, masters)))
    link = SimpleNamespace(url=url, is_cluster=',' in url, is_sentinel='sentinel' in url, servers=servers,
                           call=lambda f: None, reveal=lambda: {'secret':secret})
    findings = check_server(SimpleNamespace(link=link, name=None))
    assert [finding.what for finding in findings if finding.what in ('password','TLS')]==found

def test_doctor_of_a_folder(tmp_path, images, cli):
    to_shards(image_samples(images), tmp_path/'d', num_workers=1, progress=False)
    code,out,_ = cli('doctor', tmp_path/'d')
    assert code==0 and 'dataset: 60 samples' in out
    assert cli('doctor', tmp_path/'nowhere')[0]==0

# Object storage, and errors

@pytest.mark.slow
def test_shards_on_s3(images, monkeypatch, result, cli):
    with moto_server() as s3:
        monkeypatch.setenv('AWS_ACCESS_KEY_ID', s3.key)
        monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', s3.secret)
        options = '--storage-options',json.dumps({'endpoint_url':s3.endpoint})
        url = f's3://{s3.bucket}/pets'
        assert result('ingest', images, url, *FAST, *options)['written']==60
        assert [o['samples'] for o in result('ls', f's3://{s3.bucket}', *options)['datasets']]==[60]
        assert result('info', url, *options)['fields']==['jpg']
        assert cli('doctor', url, *options)[0]==0
        assert cli('rm', url, '--yes', *options)[0]==0 and result('ls', f's3://{s3.bucket}', *options)['datasets']==[]

@pytest.mark.parametrize('words', [['ls', 'redis://127.0.0.1:1', '--timeout', '0.2'], ['info', '/nowhere/at/all'],
                                   ['ingest', '/nowhere', '{tmp}/d'], ['ls', '/nowhere/at/all'],
                                   ['ls', 'redis://127.0.0.1:1', '--timeout', 'nan']])
def test_errors_are_one_line_and_exit_code_1(words, tmp_path, cli):
    code,out,err = cli(*(word.format(tmp=tmp_path) for word in words))
    assert code==1 and not out and err.startswith(f'fastai_remote {words[0]}: ') and err.count('\n')==1

def test_a_traceback_can_be_asked_for():
    with pytest.raises(FileNotFoundError): main(['ingest', '/nowhere', 'folder', '--traceback'])

def test_the_console_script_is_the_module():
    import configparser
    ini = configparser.ConfigParser(delimiters=['='])
    ini.read(Path(__file__).parents[1]/'settings.ini')
    assert ini['DEFAULT']['console_scripts']=='fastai_remote=fastai_remote.cli.main:main'
    p = start('--version')
    assert ended(p)[0]==0

# The guide

@pytest.mark.slow
def test_the_examples_of_the_guide_run(images, tmp_path):
    page = (Path(__file__).parents[1]/'nbs/guide/command_line.md').read_text(encoding='utf-8')
    blocks = re.findall(r'(?ms)^```sh\n(.*?)^```', page)
    shutil.copytree(images, tmp_path/'images')
    for name,make in ('theirs',make_tars), ('quickdraw',make_drawings):
        (tmp_path/name).mkdir()
        make(tmp_path/name, images)
    script = 'set -euo pipefail\nfastai_remote() { %s -m fastai_remote "$@"; }\n%s' % (sys.executable, '\n'.join(blocks))
    with redis_server(port=-1) as s:
        env = {**os.environ, 'FASTAI_REMOTE_URL':s.url, 'PYTHONPATH':str(Path(__file__).parents[1])}
        p = subprocess.run(['bash', '-c', script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
        assert p.returncode==0, p.stdout[-2000:]+p.stderr[-2000:]
        assert RedisStore.names(s.url)==['pets','texts'] and "['pets', 'texts']" in p.stdout
    assert {f.name for f in (tmp_path/'shards').iterdir()}=={'two','tars','drawings','pets'}

def test_tars_of_others_are_found(tmp_path, result, cli):
    "Their dataset is in a folder of our own among them"
    (tmp_path/'theirs').mkdir()
    with tarfile.open(tmp_path/'theirs/a.tar', 'w') as tar:
        info = tarfile.TarInfo('1.txt')
        info.size = 4
        tar.addfile(info, io.BytesIO(b'text'))
    index_shards(tmp_path/'theirs', num_workers=1, progress=False)
    for folder in (tmp_path, tmp_path/'theirs'): assert [o['samples'] for o in result('ls', folder)['datasets']]==[1]
    assert '1 samples' in cli('doctor', tmp_path/'theirs')[1]

def test_the_label_is_the_name_of_the_folder_however_the_path_is_written(tmp_path, monkeypatch):
    from fastai_remote.cli.sources import FolderLabel
    (tmp_path/'cat/small').mkdir(parents=True)
    monkeypatch.chdir(tmp_path/'cat/small')
    assert [FolderLabel()(Path(o)) for o in ('a.png', './a.png', '../a.png', '../../dog/a.png')]==['small','small','cat','dog']

def test_a_file_of_the_user_may_have_the_name_of_a_package(tmp_path):
    from fastai_remote.cli.sources import read_function
    (tmp_path/'numpy.py').write_text('def f(x): return x+1')
    assert read_function(f'{tmp_path}/numpy.py:f')(1)==2 and sys.modules['numpy'] is np

def test_sources_that_cannot_be_chosen_are_usage_errors(tmp_path):
    from fastai_remote.cli.sources import source_of, sources_of
    from fastai_remote.cli.terminal import UsageError
    with pytest.raises(UsageError, match='no source'): sources_of([])
    for arguments,part in ((tmp_path,'foo'), 'no kind .foo.*images, csv'), (([],), 'no source'), (([],'csv'), 'no source'):
        with pytest.raises(UsageError, match=part): source_of(*arguments)

def test_ls_finds_datasets_behind_links_and_says_that_a_folder_is_not_there(tmp_path, result, cli):
    to_shards([{'txt':'a'}], tmp_path/'disk/pets', num_workers=1, progress=False)
    (tmp_path/'all').mkdir()
    (tmp_path/'all/cats').symlink_to(tmp_path/'disk/pets')
    (tmp_path/'all/gone').symlink_to(tmp_path/'nowhere')
    (tmp_path/'all/file').symlink_to(tmp_path/'disk/pets/manifest.json')
    assert [o['words'] for o in result('ls', tmp_path/'all')['datasets']]==[[str(tmp_path/'all/cats')]]
    assert cli('ls', tmp_path/'none')[2]==f"fastai_remote ls: {tmp_path/'none'}: no such folder\n"

def test_ls_names_a_folder_that_cannot_be_read(tmp_path, monkeypatch, result, cli):
    "Such as `lost+found`; the others are listed"
    from fsspec.implementations.local import LocalFileSystem
    for name in 'cats','dogs': to_shards([{'txt':'a'}], tmp_path/name, num_workers=1, progress=False)
    for name in 'lost+found','scans.tar': (tmp_path/name).mkdir()
    ls = LocalFileSystem.ls
    def refusing_ls(self, path, *args, **kwargs):
        if 'lost+found' in str(path): raise PermissionError(13, 'Permission denied', str(path))
        return ls(self, path, *args, **kwargs)
    monkeypatch.setattr(LocalFileSystem, 'ls', refusing_ls)
    cats,dogs,lost,_ = result('ls', tmp_path)['datasets']
    assert (cats['name'],dogs['name'])==('cats','dogs') and lost['name']==str(tmp_path/'lost+found')
    assert 'Permission denied' in lost['error'] and lost['words']==[lost['name']]
    code,out,_ = cli('ls', tmp_path)
    assert code==0 and re.search(r'(?m)^\S*/lost\+found +\? .*Permission denied', out) and 'scans.tar' in out

def test_ls_shows_unfinished_ingests_of_subfolders(with_failures, tmp_path, result, cli):
    parent = tmp_path/'all'
    to_shards([{'txt':'a'}], parent/'cats', num_workers=1, progress=False)
    assert cli('ingest', with_failures[0], parent/'begun', *with_failures[1:], '--max-failed', '5')[0]==1
    shutil.copytree(parent/'begun', parent/'damaged')
    (parent/'damaged/.ingest/plan.json').write_text('{')
    document = result('ls', parent)
    assert [o['name'] for o in document['unfinished']]==['begun'] and document['unfinished'][0]['running'] is False
    cats,damaged = document['datasets']
    assert cats['name']=='cats' and 'plan.json, is damaged' in damaged['error']
    assert re.search(r'(?m)^unfinished: begun, [0-9]+ chunks? of ', cli('ls', parent)[1])
    assert [o['name'] for o in result('ls', parent/'begun')['unfinished']]==['begun']
    assert not result('ls', tmp_path)['unfinished']   # only direct subfolders

@pytest.mark.parametrize('is_gone', [False,True])
def test_ls_says_that_an_ingest_with_a_damaged_plan_can_only_be_abandoned(is_gone, cli):
    with redis_server() as server:
        client = redis.Redis.from_url(server.url)
        writer = RedisWriter(RedisLink(server.url), 'begun')
        writer.begin(dict(n=3, chunk=1, fields={}, splits=None, vocab={}, signature='s', stats=None))
        assert 'running now' in cli('ls', server.url)[1]
        writer.close()
        assert 'begun, 0 chunks of 3 done' in cli('ls', server.url)[1]
        if is_gone: client.delete('begun:ingest')
        else: client.set('begun:ingest', '{"n":3}')
        assert re.search(r'(?m)^unfinished: begun: its plan is damaged or gone: `abandon` drops it$', cli('ls', server.url)[1])
        with pytest.warns(UserWarning, match="the plan of an unfinished ingest of 'begun' was damaged or gone"):
            assert cli('abandon', server.url, 'begun')[0]==0
        assert 'unfinished' not in cli('ls', server.url)[1] and cli('abandon', server.url, 'begun')[0]==1

def test_ls_shows_an_unfinished_index_once(tmp_path, result):
    "It is in a folder of our own among tars of others"
    (tmp_path/'theirs/.fastai_remote/.ingest').mkdir(parents=True)
    plan = dict(signature='', n=8, chunk=8, generation=1, prefix='', fields={})
    (tmp_path/'theirs/.fastai_remote/.ingest/plan.json').write_bytes(seal_json(plan))
    for folder in tmp_path,tmp_path/'theirs':
        document = result('ls', folder)
        assert [o['name'] for o in document['unfinished']]==['theirs'] and not document['datasets']

@pytest.mark.parametrize('text', ['my notes', 'https://user:hidden@host', 'redis://:a@127.0.0.1:abc', 'redis://:a@127.0.0.1:70000'])
def test_serve_does_not_overwrite_a_file_that_is_not_its_own(text, tmp_path, cli):
    (tmp_path/'url').write_text(text)
    code,_,err = cli('serve', tmp_path)
    assert code==1 and f"{tmp_path}/url is not the URL" in err and 'hidden' not in err and (tmp_path/'url').read_text()==text

def test_the_endings_of_files_are_those_that_the_sources_read():
    from fastai_remote.cli.sources import SOURCE_KINDS
    from fastai_remote.source import arrays, csv_files, frames, tars
    known = dict(csv=csv_files.CSV_EXTENSIONS, tars=tars.TAR_EXTENSIONS, parquet=frames._PARQUET+frames._ARROW,
                 arrays=arrays._ARRAY_FILES)
    assert {kind:SOURCE_KINDS[kind].suffixes for kind in known}==known
