"The command line: what it writes, shows, refuses and returns; in this process or a fork where that tests the same"
import configparser, inspect, json, os, pty, re, shlex, shutil, signal, subprocess, sys
from glob import glob
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import redis
from fsspec.implementations.local import LocalFileSystem
from PIL import Image

from clusters import LocalCluster
from conftest import class_of, kill, private_server, wait_for
from fastai_remote import image_samples, index_shards, RedisStore, ShardStore, StoreError, to_redis, to_shards
from fastai_remote.cli.command import (
    add_options, ArgumentParser, parameters_of, read_function, read_label, read_value, UsageError)
from fastai_remote.cli.commands import COMMANDS, serve_folder, serving
from fastai_remote.cli.doctor import check_server
from fastai_remote.cli.main import main
from fastai_remote.cli.terminal import flag, in_shell
from fastai_remote.cli.words import read_places, source_kind, SOURCE_KINDS, split_sources, url_of
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.store.server import redis_server
from fastai_remote.testing import ManualClock
from fastai_remote.write.redis import RedisWriter
from fastai_remote.core import seal
from inputs import column, write_csv, write_tar

VARIABLES = 'FASTAI_REMOTE_URL','REDIS_URL','FASTAI_REMOTE_PASSWORD'
FAST = '--workers','1'
QUIET = dict(num_workers=1, progress=False)
GUIDE = Path(__file__).parents[1]/'nbs/guide'

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
    with private_server(port=-1, requirepass='pass/w@rd') as s: yield s

def bare(server):
    "URL of a server, without its password"
    return f'redis://127.0.0.1:{server.port}'

def start(*words, stdout=subprocess.PIPE):
    "The program as a process of its own group"
    command = [sys.executable, '-m', 'fastai_remote', *map(str, words)]
    return subprocess.Popen(command, text=True, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE,
                            start_new_session=True)

def ended(p):
    "Exit code, output and what was said"
    out,err = p.communicate()
    return p.returncode,out,err

class Terminal:
    "The program in a fork, with a terminal of its own"
    def __init__(self, *words):
        self.text = ''
        self.pid,self.owner = pty.fork()
        if self.pid: return
        code = 99
        try:
            sys.stdin,sys.stdout,sys.stderr = open(0),open(1, 'w'),open(2, 'w')
            code = main(list(map(str, words)))
        finally: os._exit(code)

    def read(self):
        "Read what is there; false at the end"
        try: piece = os.read(self.owner, 10000)
        except OSError: return False   # the other end is closed
        self.text += piece.decode()
        return piece!=b''
    def until(self, text):
        while text not in self.text: assert self.read(), self.text
    def write(self, text): os.write(self.owner, text.encode())
    def end(self):
        while self.read(): pass
        os.close(self.owner)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

# Writing

@pytest.mark.slow
def test_images_to_redis_and_shards_are_those_of_the_python_call(images, server, tmp_path, result, cli):
    words = '--label','folder','--splits','train,valid=0.2','--path',*FAST
    report = result('ingest', images, server.url, 'byhand', *words)
    assert (report['written'], report['failed'], report['name'])==(60, 0, 'byhand')
    in_python = *words[:-2],'--num_workers=1','--max_failed','3'   # names of options as in Python
    assert result('ingest', images, tmp_path/'shards', *in_python)['written']==60
    source = image_samples(images, label=class_of, path=True)
    called = to_redis(source, server.url, 'called', splits={'train':None, 'valid':.2}, **QUIET).store
    for store in RedisStore(server.url, 'byhand'), ShardStore(tmp_path/'shards'):
        assert store.splits==called.splits and store.vocab==called.vocab
        for field in called.fields: assert column(store, field)==column(called, field)
    code,out,err = cli('ingest', images, server.url, 'byhand', *words)
    assert code==1 and not out and err.count('\n')==1
    assert 'is there already' in err and '--overwrite replaces it' in err
    assert cli('ingest', images, server.url, 'byhand', *words, '--overwrite')[0]==0

def test_sources_may_name_their_splits_and_images_are_made_smaller(images, server, result):
    words = '--label','folder','--resize',20,'--quality',80,*FAST
    result('ingest', f'train={images}/cat', f'valid={images}/dog', server.url, 'two', *words)
    store = RedisStore(server.url, 'two')
    assert store.splits=={'train':[0,20], 'valid':[20,40]} and store.vocab==['cat','dog']
    assert min(store[0]['jpg'].size)==20

def test_samples_are_added_to_a_dataset(images, server, tmp_path, result):
    words = '--label','folder',*FAST
    for place in [server.url, 'growing'], [tmp_path/'growing']:
        result('ingest', images/'cat', *place, *words)
        report = result('append', images/'dog', *place, *words)
        assert (report['added'], report['samples'])==(20, 40) and result('info', *place)['samples']==40
        assert result('append', images/'dog', *place, *words, '--again')['samples']==60

def make_drawings(folder, images):
    lines = [dict(word='line', key_id=str(k), recognized=True, drawing=[[[0, k], [5, 60]]]) for k in range(20)]
    (folder/'line.ndjson').write_text('\n'.join(map(json.dumps, lines)))
    return folder,'--field','png','--size','32'

def make_tars(folder, images):
    jpgs = enumerate(sorted((images/'cat').iterdir()))
    pairs = [((f'{k:04}.jpg', file.read_bytes()), (f'{k:04}.cls', b'7')) for k,file in jpgs]
    write_tar(folder/'a.tar', sum(pairs, ()))
    (folder/'a.parquet').write_bytes(b'of img2dataset')
    return folder,'--key'

# What files of each kind of source are called
FILES = {'images':['cat/1.JPG', '.hidden/labels.csv'], 'csv':['labels.csv'], 'drawings':['line.ndjson', 'b.ndjson.gz'],
         'tars':['a.tar', 'b.tar.zst', 'a.parquet'], 'parquet':['a.parquet', 'more/b.feather'],
         'arrays':['zarr.json', 'png/c/0'], 'img2dataset':['00000.tar', '00000_stats.json'],
         'huggingface':['data.arrow', 'dataset_info.json']}

def test_each_kind_of_source_is_recognised_by_its_files(tmp_path):
    assert FILES.keys()==SOURCE_KINDS.keys()
    for kind,names in FILES.items():
        for file in [tmp_path/kind/name for name in names]:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        assert source_kind(tmp_path/kind)==kind

def test_a_dataset_that_huggingface_has_saved_is_a_source(tmp_path, result):
    datasets = pytest.importorskip('datasets')
    datasets.Dataset.from_dict({'txt':['a','b'], 'n.i4':[1,2]}).save_to_disk(str(tmp_path/'saved'))
    assert result('ingest', tmp_path/'saved', tmp_path/'shards', *FAST)['written']==2
    assert ShardStore(tmp_path/'shards').fields==['txt','n.i4']

def test_the_label_is_the_name_of_the_folder_however_the_path_is_written(tmp_path, monkeypatch):
    (tmp_path/'cat/small').mkdir(parents=True)
    monkeypatch.chdir(tmp_path/'cat/small')
    paths = 'a.png','./a.png','../a.png','../../dog/a.png'
    assert [read_label('folder')(Path(path)) for path in paths]==['small','small','cat','dog']

def test_a_file_of_the_user_may_have_the_name_of_a_package(tmp_path):
    (tmp_path/'numpy.py').write_text('def f(x): return x+1')
    assert read_function(f'{tmp_path}/numpy.py:f')(1)==2 and sys.modules['numpy'] is np
    with pytest.raises(UsageError, match='FILE.py:FUNCTION'): read_function('double')
    with pytest.raises(UsageError, match='in parentheses'): read_label('cat')

# Each line: a command line, and a part of the answer
WRONG = r"""
ingest                                              | a source and a place are needed
ingest nowhere redis://h                            | name of the dataset is missing
ingest {images} {out} --key                         | --key: no option of image files
ingest {images} {out} --kind foo                    | invalid choice: 'foo'
ingest {images} redis://h pets --maxsize 5          | --maxsize is an option of shards
ingest {images} {out} --quality 5                   | --quality needs --resize
ingest {images} {out} --num-workers many            | invalid int value: 'many'
ingest train={images} valid= {out}                  | '' is no source
ingest {mixed} {out}                                | --kind says which to read
ingest {empty} {out}                                | what is this?
ingest {images} {out} --splits a=.5,b=.2,a=.3       | 'a' is there twice
ingest {images} {out} --splits =.5,b                | a name is missing
ingest a.csv {out} --fields age,path=jpg            | no value for 'age'
ingest {images} {out} --fn {raises}.py:f            | ValueError: the reason
ingest {images} {out} --fn {broken}.py:f            | SyntaxError
ingest {images} {out} --fn {broken}.py.py:f         | FileNotFoundError
ingest {images} {out} --fn json:nothing             | no function 'nothing'
ls {out} too much                                   | too much
ls {out} --storage-options '{{"secret": "hidden"}}' | may be secret
ls                                                  | FASTAI_REMOTE_URL or REDIS_URL
info                                                | a place is needed
info env:NOWHERE pets                               | NOWHERE, which is not set
copy {out}                                          | 2 places are needed
resize {out}                                        | SIZE is missing
resize ² {out} {out}                                | SIZE is missing
serve                                               | one folder
serve {out} --memory lots                           | such as 500mb
rm {out} --nonsense                                 | nonsense
igest                                               | did you mean ingest?
""".strip().splitlines()

def test_a_wrong_command_line_says_what_is_wrong(images, tmp_path, cli):
    names = 'out','mixed','empty','raises','broken'
    places = dict({name:tmp_path/name for name in names}, images=images)
    shutil.copytree(images/'cat', tmp_path/'mixed/images')
    (tmp_path/'mixed/labels.csv').write_text('name,label\n')
    (tmp_path/'empty').mkdir()
    (tmp_path/'raises.py').write_text("raise ValueError('the reason')")
    (tmp_path/'broken.py').write_text('def f(x) return x')
    for line in WRONG:
        words,part = line.split(' | ')
        code,out,err = cli(*shlex.split(words.format(**places)))
        assert code==2 and not out and part in err and 'hidden' not in err and len(err.splitlines())==2, (line, err)
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
    assert code==0 and re.search(r'field cls +cls \(u1\), 3 labels: bird \(20\), cat \(20\), dog \(20\)', out)
    code,out,_ = cli('ls', url)
    assert code==0 and re.search(r'^again +60 +', out, re.M)
    code,out,err = cli('rm', url, 'again')
    assert code==2 and '--yes' in err and 'again' in RedisStore.names(url)
    assert cli('rm', url, 'again', '--yes')[0]==0 and 'again' not in RedisStore.names(url)
    assert cli('rm', folder, '--yes')[0]==0 and not (folder/'manifest.json').exists()
    code,out,err = cli('info', url, 'again')
    assert code==1 and not out and re.fullmatch(r'fastai_remote info: .*no dataset .again.; there are: .*\n', err)

def test_verify_finds_damage_and_shows_its_progress_apart_from_its_output(images, tmp_path, cli):
    to_shards(image_samples(images), tmp_path/'d', **QUIET)
    words = 'verify',tmp_path/'d','--chunk',10,*FAST
    code,out,err = cli(*words, '--progress')
    assert code==0 and '\r' not in out and '100%, 60 samples' in err
    shard, = (tmp_path/'d').glob('*.tar')
    with open(shard, 'r+b') as f:
        f.seek(2000)
        f.write(b'damaged')
    code,out,_ = cli(*words, '--json')
    assert code==3 and json.loads(out)['bad']>0
    code,out,_ = cli(*words)
    assert code==3 and 'damaged' in out

@pytest.fixture
def with_failures(tmp_path):
    "A source of 100 rows, of which 20 fail"
    write_csv(tmp_path/'rows.csv', [('name',), *((f'{k if k%5 else "absent"}.jpg',) for k in range(100))])
    for k in range(100): Image.new('RGB', (8, 8)).save(tmp_path/f'{k}.jpg')
    return tmp_path/'rows.csv','--fn-col','0','--folder',tmp_path,'--chunk',10,*FAST

def test_failures_of_a_dataset_and_of_an_unfinished_ingest(with_failures, server, tmp_path, result, cli):
    (tmp_path/'shards').mkdir()
    source,*words = with_failures
    for place in [server.url, 'failing'], [tmp_path/'shards']:
        code,out,err = cli('ingest', source, *place, *words, '--max-failed', '5')
        assert code==1 and not out and err.count('\n')==1 and 'Traceback' not in err
        assert 'repeat the same command with a higher --max-failed to go on' in err
        assert f"`fastai_remote abandon {' '.join(map(str, place))}`" in err
        assert len(result('failures', *place)['failures'])>5
        assert cli('abandon', *place)[0]==0 and cli('abandon', *place)[0]==1
        assert cli('ingest', source, *place, *words, '--max-failed', '0.5')[0]==0
        document = result('failures', *place)
        assert len(document['failures'])==20 and 'absent.jpg' in document['failures'][0][1]
        code,out,_ = cli('failures', *place)
        assert code==0 and len(out.splitlines())==20 and 'absent.jpg' in out.splitlines()[0]

@pytest.mark.slow
def test_a_reader_that_is_gone_is_exit_code_141_and_silence(with_failures, tmp_path, cli):
    assert cli('ingest', with_failures[0], tmp_path/'d', *with_failures[1:], '--max-failed', '0.5')[0]==0
    reader,writer = os.pipe()
    os.close(reader)
    p = start('failures', tmp_path/'d', stdout=writer)
    os.close(writer)
    assert ended(p)==(141, None, '')

def test_ls_follows_links_and_names_a_folder_that_cannot_be_read(tmp_path, monkeypatch, result, cli):
    "Such as `lost+found`; the others are listed"
    folder = tmp_path/'all'
    for place in folder/'cats',tmp_path/'disk': to_shards([{'txt':'a'}], place, **QUIET)
    for name in 'lost+found','scans.tar': (folder/name).mkdir()
    for name,target in dict(dogs='disk', gone='nowhere', file='disk/manifest.json').items():
        (folder/name).symlink_to(tmp_path/target)
    ls = LocalFileSystem.ls
    def refusing_ls(self, path, *args, **kwargs):
        if 'lost+found' in str(path): raise PermissionError(13, 'Permission denied', str(path))
        return ls(self, path, *args, **kwargs)
    monkeypatch.setattr(LocalFileSystem, 'ls', refusing_ls)
    cats,dogs,lost,_ = result('ls', folder)['datasets']
    assert [cats['words'],dogs['words'],lost['words']]==[[str(folder/name)] for name in ('cats','dogs','lost+found')]
    assert 'Permission denied' in lost['error']
    code,out,_ = cli('ls', folder)
    assert code==0 and re.search(r'(?m)^\S*/lost\+found +\? .*Permission denied', out) and 'scans.tar' in out
    assert cli('ls', tmp_path/'none')[2]==f"fastai_remote ls: {tmp_path/'none'}: no such folder\n"

def test_ls_shows_unfinished_ingests_of_subfolders(with_failures, tmp_path, result, cli):
    parent = tmp_path/'all'
    assert cli('ingest', with_failures[0], parent/'begun', *with_failures[1:], '--max-failed', '5')[0]==1
    shutil.copytree(parent/'begun', parent/'damaged')
    (parent/'damaged/.fastai_remote/.ingest/plan.json').write_text('{')
    document = result('ls', parent)
    assert [o['name'] for o in document['unfinished']]==['begun'] and document['unfinished'][0]['running'] is False
    assert ['plan.json, is damaged' in o['error'] for o in document['datasets']]==[True]
    assert re.search(r'(?m)^unfinished: begun, [0-9]+ chunks? of ', cli('ls', parent)[1])
    assert [o['name'] for o in result('ls', parent/'begun')['unfinished']]==['begun']

@pytest.mark.parametrize('is_gone', [False,True])
def test_ls_says_that_an_ingest_with_a_damaged_plan_can_only_be_abandoned(is_gone, fresh, cli):
    client,url = redis.Redis.from_url(fresh.url),fresh.url
    writer = RedisWriter(RedisLink(url), 'begun')
    writer.begin(dict(n=3, chunk=1, fields={}, splits=None, vocab={}, signature='s', stats=None))
    assert 'running now' in cli('ls', url)[1]
    writer.close()
    assert 'begun, 0 chunks of 3 done' in cli('ls', url)[1]
    if is_gone: client.delete('begun:ingest')
    else: client.set('begun:ingest', '{"n":3}')
    said = r'(?m)^unfinished: begun: its plan is damaged or gone: `abandon` drops it$'
    assert re.search(said, cli('ls', url)[1])
    assert cli('abandon', url, 'begun')[0]==0
    assert 'unfinished' not in cli('ls', url)[1] and cli('abandon', url, 'begun')[0]==1

def test_tars_of_others_are_found(tmp_path, result, cli):
    "Their dataset is in a folder of our own among them, and so is an index that is not finished"
    theirs,begun = tmp_path/'all/theirs',tmp_path/'begun/scans'
    write_tar(theirs/'a.tar', [('1.txt', b'text')])
    index_shards(theirs, **QUIET)
    for folder in theirs.parent,theirs: assert [o['samples'] for o in result('ls', folder)['datasets']]==[1]
    assert '1 samples' in cli('doctor', theirs)[1]
    (begun/'.fastai_remote/.ingest').mkdir(parents=True)
    plan = dict(signature='x', n=8, chunk=8, generation=1, prefix='', fields={})
    (begun/'.fastai_remote/.ingest/plan.json').write_bytes(seal(plan))
    for folder in begun.parent,begun:
        document = result('ls', folder)
        assert [o['name'] for o in document['unfinished']]==['scans'] and not document['datasets']

def test_shards_on_object_storage(images, faults, result, cli):
    "With options of the storage, which it gets for each command"
    url,options = 'faulty://bucket/pets',('--storage-options', json.dumps({'endpoint_url':'http://nowhere'}))
    faults.put('bucket/notes', b'')   # a folder without files would not be there
    faults.options.clear()   # of this client
    assert result('ingest', images/'cat', url, *FAST, *options)['written']==20
    assert [o['samples'] for o in result('ls', 'faulty://bucket', *options)['datasets']]==[20]
    assert result('info', url, *options)['fields']==['jpg'] and cli('doctor', url, *options)[0]==0
    assert cli('rm', url, '--yes', *options)[0]==0
    assert result('ls', 'faulty://bucket', *options)['datasets']==[]
    assert {storage_options['endpoint_url'] for storage_options in faults.options}=={'http://nowhere'}

@pytest.mark.parametrize('words', ['ls redis://127.0.0.1:1 --timeout 0.2', 'info /nowhere/at/all', 'ls /nowhere/at/all',
                                   'ingest /nowhere {tmp}/d', 'ls redis://127.0.0.1:1 --timeout nan'])
def test_errors_are_one_line_and_exit_code_1(words, tmp_path, cli):
    words = words.format(tmp=tmp_path).split()
    code,out,err = cli(*words)
    assert code==1 and not out and err.startswith(f'fastai_remote {words[0]}: ') and err.count('\n')==1

def test_a_traceback_can_be_asked_for():
    with pytest.raises(FileNotFoundError): main(['ingest', '/nowhere', 'folder', '--traceback'])

# Options

ONLY_HERE = {'json','leftovers','traceback','yes','kind','resize','help','port','memory','words','out','open'}

def parameters():
    "The parameters of the functions of the package that commands call"
    from fastai_remote.ingest.copy import resize_store
    from fastai_remote.ingest.verify import verify_store
    from fastai_remote.source.shrink import shrink
    from fastai_remote.view.pictures import read_samples
    functions = (to_redis,to_shards,RedisStore.append,ShardStore,resize_store,verify_store,shrink,serving,
                 RedisStore.show,RedisStore.view,read_samples)
    sources = [kind.open for kind in SOURCE_KINDS.values()]
    return {p for f in (*functions, *sources) for p in inspect.signature(f).parameters}

def test_values_of_options_have_the_types_of_the_parameters():
    assert read_value('a=cls,b=txt', {list,dict})=={'a':'cls', 'b':'txt'}
    assert read_value('0,b', {int,str,list})==[0,'b'] and read_value('.5', {int,float})==.5
    def example(size:int, num_workers:int=None, shuffle:bool=True, max_failed:int|float=None, splits:dict=None,
                fn_col:int|str=None, label_col:int|str|list=None, fields:dict=None, key:bool=None): pass
    parser = ArgumentParser(prog='example')
    add_options(parser, parameters_of([example]))
    words = ('--workers 2 --max-failed .5 --splits train,valid=20 --fn-col 0 --no-shuffle --label-col a,b --fields a=cls '
             '--key')
    assert vars(parser.parse_args(words.split()))==dict(
        num_workers=2, max_failed=.5, splits={'train':None, 'valid':20}, fn_col=0, shuffle=False, label_col=['a','b'],
        fields={'a':'cls'}, key=True)   # `size` is no option: it has no default

def test_words_of_places_and_sources(monkeypatch):
    monkeypatch.setenv('OTHER', 's3://bucket/pets')
    assert url_of('env:OTHER')=='s3://bucket/pets' and url_of('env:OTHER/small')=='s3://bucket/pets/small'
    one,two = read_places(['redis://localhost', 'pets', 's3://bucket/pets'], 2)
    assert (one.name, one.is_redis, two.words, two.is_redis)==('pets', True, ['s3://bucket/pets'], False)
    words = ['a.csv','b.csv'],['redis://localhost','pets']
    assert split_sources(sum(words, []))==words

def test_messages_of_python_become_those_of_a_shell():
    message = "pets: repeat the same call to go on, or RedisStore.abandon(url, 'pets')\n  a: b"
    expected = "pets: repeat the same command to go on, or `fastai_remote abandon redis://h 'my pets'`; a: b"
    assert in_shell(message, ['redis://h','my pets'])==expected

def test_each_option_is_a_parameter_of_the_python_function_and_help_has_examples(capsys):
    known = parameters()
    for name in COMMANDS:
        for action in COMMANDS[name].parser()._actions:
            if action.dest in ONLY_HERE: continue
            assert action.dest in known, (name, action.dest)
            assert {flag(action.dest), '--no'+flag(action.dest)[1:]}&set(action.option_strings)
        with pytest.raises(SystemExit) as e: main([name, '-h'])
        out = capsys.readouterr().out
        assert e.value.code==0 and f'usage: fastai_remote {name}' in out
        assert f'fastai_remote {name} ' in out.split('examples:')[1]

def test_help_names_all_commands_and_exit_codes(cli):
    code,out,_ = cli('-h')
    summaries = [(o.name, o.function.__doc__.splitlines()[0]) for o in COMMANDS.values()]
    assert code==0 and re.findall(r'(?m)^  ([a-z]+)  +([A-Z].*)', out)==summaries and 'exit codes: 0 ' in out
    page = (GUIDE/'command_line.md').read_text().partition('## Sources')[0]
    assert re.findall(r'(?m)^\| `([a-z]+)', page)==list(COMMANDS)
    assert cli()[0]==2 and cli('--version')[1].startswith('fastai_remote ')
    ini = configparser.ConfigParser(delimiters=['='])
    ini.read(Path(__file__).parents[1]/'settings.ini')
    assert ini['DEFAULT']['console_scripts']=='fastai_remote=fastai_remote.cli.main:main'

@pytest.mark.slow
def test_light_commands_do_not_import_torch(redis_pics, images, server, tmp_path):
    to_redis([{'id':1}], server.url, 'doomed', **QUIET)
    url = server.url
    commands = [['-h'], ['ls', url], ['info', url, 'pics'], ['verify', url, 'pics', *FAST], ['doctor', url],
                ['show', url, 'pics', '--out', str(tmp_path/'grid.png')],
                ['rm', url, 'doomed', '--yes'], ['ingest', str(images), str(tmp_path/'d'), *FAST]]
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

@pytest.mark.parametrize('words', [
    'ls redis://:hunter2@localhost', 'ls REDIS://:hunter2/x@localhost', 'ingest a https://host/x?signature=hunter2 b',
    'ingest train=https://u:hunter2@host/x b',
    """ls a --storage-options '{"endpoint_url": "http://u:hunter2@host"}'""", 'hunter redis://:hunter2@localhost'])
def test_a_password_in_the_command_line_is_refused_and_not_shown(words, cli):
    code,out,err = cli(*shlex.split(words))
    assert code==2 and 'everybody on this machine can read the command line' in err and 'hunter2' not in out+err

# The URL of a variable, one in the command line, and with the password that is used; without any if they do not fit
KNOWN = [
    ('unix:///run/s?password=p%26w&db=2', 'unix:///run/s?db=1', 'unix://:p%26w@/run/s?db=1'),
    ('redis://host?password=p%2Fw', 'redis://host:6379/3', 'redis://:p%2Fw@host/3'),
    ('redis://host?password=pw&username=m%C3%A9', 'redis://host', 'redis://m%C3%A9:pw@host'),
    ('redis://host?password=pw&username=me', 'redis://me@host', 'redis://me:pw@host'),
    ('redis://:pw@host', 'redis://default@host', 'redis://default:pw@host'),
    ('redis://m%65:pw@host', 'redis://me@host', 'redis://me:pw@host'),
    ('redis://:pw@host', 'redis://me@host', None),
    ('unix://:pw@/run/s', 'unix:///run/t', None),
    ('redis://host?password=', 'redis://host', None),
    ('redis://:pw@[::1]', 'redis://[::1]:6379/2', 'redis://:pw@[::1]/2'),
    ('redis://me:pw@Host', 'redis://host:6379', 'redis://me:pw@Host'),
    ('redis://:pw@[::1]:6380', 'redis://[::1]', None),
    ('redis+sentinel://:pw@host/one', 'redis+sentinel://host:26379/one', 'redis+sentinel://:pw@host/one'),
    ('redis+sentinel://:pw@host/one', 'redis+sentinel://host/two', None),
    ('redis://:pw@host:x', 'redis://host', None)]

def test_the_password_of_a_variable_counts_for_the_same_server_wherever_it_is_in_the_url(monkeypatch):
    for known,asked,found in KNOWN:
        monkeypatch.setenv('FASTAI_REMOTE_URL', known)
        assert url_of(asked)==(found or asked), known

def test_passwords_from_the_environment(strict, monkeypatch, result):
    to_redis([{'id':1}], strict.url, 'one', **QUIET)
    url,upper = bare(strict),bare(strict).replace('redis:', 'REDIS:')
    for variable,value,word in [
            ('FASTAI_REMOTE_URL',strict.url,'env:'), ('REDIS_URL',strict.url,'env:'), ('OURS',strict.url,'env:OURS'),
            ('REDIS_URL',strict.url,url), ('REDIS_URL',strict.url,upper), ('FASTAI_REMOTE_PASSWORD','pass/w@rd',upper)]:
        with monkeypatch.context() as m:
            m.setenv(variable, value)
            assert [o['name'] for o in result('ls', word)['datasets']]==['one']

@pytest.mark.slow
def test_a_password_and_a_file_of_the_user_reach_the_workers(strict, write_rows, monkeypatch, result):
    monkeypatch.setenv('OURS', strict.url)
    source,words = write_rows('def sample(row):')
    document = result('ingest', *source, 'env:OURS', 'rows', *words, '--no-shuffle', '--workers', 2)
    assert document['written']==600 and 'w@rd' not in str(document) and 'w%40rd' not in str(document)
    assert RedisStore(strict.url, 'rows')[3]=={'txt':'text 3'}

def test_a_missing_password_is_no_question_without_a_terminal(strict, cli, monkeypatch):
    code,out,err = cli('ls', bare(strict))
    assert code==2 and 'set FASTAI_REMOTE_PASSWORD' in err
    monkeypatch.setenv('FASTAI_REMOTE_PASSWORD', 'wrong one')
    code,out,err = cli('ls', bare(strict))
    assert code==1 and 'wrong one' not in out+err and err.count('\n')==1

def test_a_password_is_asked_for_in_a_terminal_and_not_shown(strict):
    to_redis([{'id':1}], strict.url, 'one', **QUIET)
    terminal = Terminal('rm', bare(strict), 'one')
    terminal.until('Password of redis://127.0.0.1')
    terminal.write('pass/w@rd\n')
    terminal.until('(1 samples)? [y/N]')
    terminal.write('n\n')
    assert terminal.end()==1 and 'w@rd' not in terminal.text and 'nothing was removed' in terminal.text
    assert RedisStore.names(strict.url)==['one']

# Progress and interruptions

def test_progress_in_a_terminal_and_silence_without_one(server, images, cli):
    words = ['ingest', images, server.url, 'shown', '--chunk', 2, *FAST]
    terminal = Terminal(*words)
    assert terminal.end()==0
    assert re.search(r'\d+%, \d+ samples, [\d,]+ samples/s, \d:\d\d:\d\d left', terminal.text)
    last = terminal.text.rstrip().splitlines()[-1].replace('\x1b[K', '').lstrip('\r')
    assert last.startswith('shown: 60 written')
    code,out,err = cli(*words, '--overwrite', '--json')
    assert code==0 and err=='' and json.loads(out)['written']==60

@pytest.fixture
def write_rows(tmp_path):
    "A function that returns words: a source of 600 rows, and `fn`, for which it takes the code"
    def words(code):
        write_csv(tmp_path/'rows.csv', [('text',), *((f'text {k}',) for k in range(600))])
        (tmp_path/'ours.py').write_text(code+"\n    return {'txt': row['text']}\n")
        return [tmp_path/'rows.csv'],['--fn', f'{tmp_path}/ours.py:sample', '--chunk', 20]
    return words

def test_interrupted_ingest_says_how_to_go_on_and_goes_on(write_rows, server, tmp_path, cli):
    source,words = write_rows(f'''import os
def sample(row):
    if row['text']=='text 100' and not os.path.exists('{tmp_path}/go'): raise KeyboardInterrupt()''')
    for place in [server.url, 'stopped'], [tmp_path/'stopped']:
        command = ['ingest', *source, *place, *words, '--no-shuffle', *FAST]
        (tmp_path/'go').unlink(missing_ok=True)
        code,out,err = cli(*command)
        assert code==130 and not out and 'Traceback' not in err
        assert 'chunks done): repeat the same command to go on' in err and 'fastai_remote abandon' in err
        (tmp_path/'go').touch()
        code,out,err = cli(*command, '--json')
        assert code==0 and json.loads(out)['written']==600 and json.loads(out)['resumed']==100

@pytest.mark.slow
@pytest.mark.xdist_group('processes')
def test_a_worker_that_dies_is_an_error_that_says_how_to_go_on(write_rows, tmp_path):
    source,words = write_rows("import os\ndef sample(row):\n    if row['text']=='text 150': os._exit(1)")
    code,out,err = ended(start('ingest', *source, tmp_path/'d', *words, '--workers', 2))
    assert code==1 and not out and 'repeat the same command' in err.splitlines()[-1] and 'File "' not in err, err

# serve

def url_in(folder): return (folder/'url').read_text().strip()
def secret_of(url): return url.split(':')[2].split('@')[0]

@pytest.fixture
def serve_there(tmp_path):
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

@pytest.mark.slow
@pytest.mark.xdist_group('processes')
def test_serve_keeps_data_url_and_secret(serve_there, tmp_path, cli):
    folder = tmp_path/'data'
    p,said = serve_there('--memory', '200mb')
    url = url_in(folder)
    assert said['url']==re.sub(':[^:@]*@', '', url) and url!=said['url'] and (folder/'url').samefile(said['url_file'])
    assert {oct(f.stat().st_mode&0o777) for f in folder.rglob('*') if f.is_file()}=={'0o600'}
    assert folder.stat().st_mode&0o777==0o700
    to_redis([{'id':k} for k in range(60)], url, 'numbers', **QUIET)
    code,_,err = cli('serve', folder)
    assert code==1 and f'{folder}: another server, unix:///' in err and 'uses this folder' in err
    for stop,code in (signal.SIGTERM, 0), (signal.SIGKILL, -9):
        p.send_signal(stop)
        assert ended(p)[::2]==(code, '')
        status = Path(f"/proc/{said['pid']}/stat")   # of the server, which saves its data
        wait_for(lambda: not status.exists() or 'Z' in status.read_text().split()[2])
        p,said = serve_there()
        assert url_in(folder)==url and len(RedisStore(url, 'numbers'))==60
    assert RedisStore(url, 'numbers').verify(num_workers=1).bad==0
    for pid in p.pid,said['pid']: assert secret_of(url) not in Path(f'/proc/{pid}/cmdline').read_text()

def test_a_second_signal_ends_the_waiting_for_a_server_that_saves(tmp_path):
    "The message names its process, which goes on saving; it is told to stop only once"
    servers,sent = [],[]
    def never_ends(signum):   # it saves
        sent.append(signum)
        signal.raise_signal(signal.SIGINT)
    def ready(server):
        servers.append((server, server.proc.send_signal))
        server.proc.send_signal = never_ends
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(StoreError, match='still saving its data, as process'): serve_folder(tmp_path/'d', ready=ready)
    (server,send), = servers
    assert server.proc.poll() is None and sent==[signal.SIGTERM]
    send(signal.SIGTERM)
    assert server.proc.wait()==0

def test_serve_in_a_terminal_tells_how_to_use_it(tmp_path, monkeypatch, cli):
    terminal = Terminal('serve', tmp_path/'my data')
    terminal.until('Ctrl-C stops')
    url = url_in(tmp_path/'my data')
    assert url not in terminal.text and secret_of(url) not in terminal.text
    export, = re.findall(r'export FASTAI_REMOTE_URL=.*', terminal.text)
    exported = subprocess.check_output(['bash', '-c', f'{export.strip()}; env'], text=True).splitlines()
    monkeypatch.setenv('FASTAI_REMOTE_URL', dict(line.split('=', 1) for line in exported)['FASTAI_REMOTE_URL'])
    code,out,_ = cli('ls')
    assert code==0 and 'no datasets' in out
    terminal.write('\x03')
    assert terminal.end()==0

def test_what_serve_keeps_and_what_a_server_of_python_keeps_are_read_by_both(tmp_path):
    with redis_server(tmp_path/'d') as s: to_redis([{'id':1}, {'id':2}], s.url, 'numbers', **QUIET)
    with serving(tmp_path/'d') as s: RedisStore(s.url, 'numbers').append([{'id':3}], **QUIET)
    for server in redis_server,serving:
        with server(tmp_path/'d') as s: assert len(RedisStore(s.url, 'numbers'))==3

def test_a_port_that_is_used(tmp_path, strict, cli):
    code,_,err = cli('serve', tmp_path/'d', '--port', strict.port)
    assert code==1 and '--port chooses another port' in err and f'port {strict.port}' in err and err.count('\n')==1

def test_serve_does_not_overwrite_a_file_that_is_not_its_own(tmp_path, cli):
    for content in b'my notes', b'https://user:hidden@host', b'redis://:a@127.0.0.1:70000', b'\xff':
        (tmp_path/'url').write_bytes(content)
        code,_,err = cli('serve', tmp_path)
        assert code==1 and f'{tmp_path}/url is not the URL' in err and 'hidden' not in err
        assert (tmp_path/'url').read_bytes()==content

# doctor

def test_doctor_of_the_machine(result, cli, monkeypatch):
    assert result('doctor')['versions']['fastai_remote']
    monkeypatch.setitem(sys.modules, 'fastai_remote.codec._jpeg', None)
    code,out,_ = cli('doctor')
    assert code==0 and re.search('- C module _jpeg: not compiled, so JPEG photographs load .* as fast', out)

def test_doctor_of_a_folder(tmp_path, result, cli):
    to_shards([{'id':1}], tmp_path/'d', **QUIET)
    code,out,_ = cli('doctor', tmp_path/'d')
    assert code==0 and 'dataset: 1 samples' in out
    assert cli('doctor', tmp_path/'nowhere')[0]==0
    (tmp_path/'empty').mkdir()
    findings = result('doctor', tmp_path/'empty')['findings']
    assert {'folder','rights','disk'}<={o['what'] for o in findings} and 'problem' not in {o['level'] for o in findings}
    assert cli('ls', tmp_path/'empty')[1]==f"no datasets at {tmp_path/'empty'}\n"

def test_doctor_finds_dangerous_settings(cli):
    with redis_server(maxmemory='30mb', maxmemory_policy='allkeys-random') as s:
        code,out,_ = cli('doctor', s.url)
        assert code==3 and '! maxmemory-policy: allkeys-random' in out and '- saving: off' in out
        code,out,_ = cli('doctor', s.url, '--json')
    problems = [o['what'] for o in json.loads(out)['findings'] if o['level']=='problem']
    assert code==3 and problems==['maxmemory-policy']

def test_doctor_names_missing_rights_and_writes_nothing(fresh, monkeypatch, cli):
    client = redis.Redis.from_url(fresh.url)
    page = (GUIDE/'credentials.md').read_text()
    rules = dict(re.findall(r'ACL SETUSER (reader|writer) on >PASSWORD (.*)', page))
    def doctor(name, user, *rights):
        client.execute_command('ACL', 'SETUSER', user, 'on', '>mine', *rights)
        monkeypatch.setenv('OURS', fresh.url.replace('unix://', f'unix://{user}:mine@'))
        code,out,_ = cli('doctor', 'env:OURS', name)
        assert code==0 and client.dbsize()==0
        return out
    for kind,rule in rules.items():
        out = doctor('pets', kind, *rule.split())
        assert '  rights: this user may train from pets' in out
        assert ('  rights: this user may write pets' in out)==(kind=='writer')
        assert ('may not write pets: its access list (ACL) needs +watch' in out)==(kind=='reader')
        assert 'may not train from cats: its access list (ACL) needs ~cats:* ~cats@*' in doctor('cats', kind)
    for right in 'exec','multi','watch','unwatch','expire':   # each command that a writer sends is tried
        out = doctor('pets', f'without-{right}', *rules['writer'].split(), f'-{right}')
        assert f'may not write pets: its access list (ACL) needs +{right}' in out

def test_doctor_lists_keys_and_files_that_nothing_needs(fresh, tmp_path, cli):
    "Those of a part that no register has, and of an edit that was killed; not those of others, nor of an ingest"
    client = redis.Redis.from_url(fresh.url)
    to_redis([{'txt':f'{i}'} for i in range(5)], fresh.url, 'd', **QUIET)
    RedisStore(fresh.url, 'd').edit(drop=[0], set={'txt':{1:'new'}})
    client.set('other@0123456789abcdef:txt:0', 'theirs')
    def out(*words): return cli('doctor', *words, '--leftovers')[1]
    assert '  leftovers: all keys of datasets are needed' in out(fresh.url)
    for key in 'd@0123456789abcdef:txt:3','d:ingest:0123456789abcdef:record:0': client.set(key, 'x')
    found = re.search(r'- leftovers: 2 keys are not needed: .*', out(fresh.url))[0]
    assert 'd@0123456789abcdef:txt:3' in found and 'record:0' in found and client.exists('d@0123456789abcdef:txt:3')
    folder = tmp_path/'d'
    to_shards([{'txt':f'{i}'} for i in range(5)], folder, **QUIET)
    assert '  leftovers: all files of datasets are needed' in out(folder)
    (folder/'.fastai_remote/.part-2-0123abcd-000000.tar').write_bytes(b'')
    assert re.search(r'- leftovers: 1 files are not needed: .*\.part-2-0123abcd-000000.tar', out(folder))

@pytest.mark.slow
def test_doctor_looks_at_each_server_of_a_cluster(monkeypatch, cli):
    with LocalCluster() as cluster:
        cluster.client(1).config_set('maxmemory-policy', 'allkeys-lru')
        monkeypatch.setenv('FASTAI_REMOTE_PASSWORD', cluster.password)
        code,out,_ = cli('doctor', bare(cluster.servers[0]), 'pets')
        assert code==3 and '(a cluster)' in out and out.count('this user may write pets')==1
        found = f'! maxmemory-policy of 127.0.0.1:{cluster.servers[1].port}: allkeys-lru: a full server drops samples. '
        assert re.findall('(?m)^!.*', out)==[found+'Set it to noeviction']

def test_doctor_does_not_wait_long_for_a_server_that_never_answered(monkeypatch, cli):
    monkeypatch.setenv('OURS', 'redis://:pw@127.0.0.1:1')
    with ManualClock() as clock: code,_,err = cli('doctor', 'env:OURS')
    assert code==1 and '127.0.0.1:1' in err and sum(clock.pauses)<6

def test_doctor_says_that_a_connection_was_lost_and_not_that_a_right_is_missing(server, monkeypatch, cli):
    def config_get(*args): raise redis.ConnectionError('lost')
    monkeypatch.setattr(redis.Redis, 'config_get', config_get)
    _,out,_ = cli('doctor', server.url)
    assert 'lost: so the settings of the server are not known' in out and 'may not CONFIG GET' not in out

@pytest.mark.parametrize('url,masters,secret,found', [
    ('redis://127.0.0.2:7000', ['127.0.0.2'], None, ['password']),
    ('redis://127.0.0.2:7000', ['127.0.0.2'], 'pw', ['TLS']),
    ('redis://localhost:7000,localhost:7001', ['127.0.0.1','::1'], None, []),
    ('redis://localhost:7000,far:7001', ['127.0.0.1','10.0.0.7'], None, ['password']),
    ('redis://localhost:7000,far:7001', ['127.0.0.1','10.0.0.7'], 'pw', ['TLS']),
    ('redis+sentinel://localhost:7000/pets', ['10.0.0.7'], None, ['password']),
    ('redis+sentinel://localhost:7000/pets', ['10.0.0.7'], 'pw', ['TLS']),
    ('rediss+sentinel://localhost:7000/pets', ['10.0.0.7'], 'pw', []),
    ('redis+sentinel://far:7000/pets', ['127.0.0.1'], None, []),
    ('unix:///run/redis.sock', [None], None, [])])
def test_doctor_looks_at_the_network_to_each_server(url, masters, secret, found):
    """One at 127.0.0.1 or at a socket is on this machine; any other address may be elsewhere

    Where the sentinels are does not matter: the data go to the master."""
    def client_of(host):
        def info(section): raise redis.ResponseError('not known here')
        where = {'path':'/run/redis.sock'} if host is None else {'host':host, 'port':7000}
        return SimpleNamespace(get=lambda key: None, info=info, get_connection_kwargs=lambda: where)
    servers = SimpleNamespace(masters=lambda: list(map(client_of, masters)))
    link = SimpleNamespace(url=url, is_cluster=',' in url, servers=servers, call=lambda f: None,
                           find_cluster=lambda: None, reveal=lambda: {'secret':secret})
    findings = check_server(SimpleNamespace(home=link, name=None))
    assert [finding.what for finding in findings if finding.what in ('password','TLS')]==found

# The guide

SIMPLE = re.compile(r'fastai_remote [^|>&]*')   # A line that needs no shell: it runs in this process

@pytest.mark.slow
@pytest.mark.xdist_group('processes')
def test_the_examples_of_the_guide_run(images, tmp_path, monkeypatch, cli):
    page = (GUIDE/'command_line.md').read_text(encoding='utf-8')
    lines = '\n'.join(re.findall(r'(?ms)^```sh\n(.*?)^```', page)).splitlines()
    shutil.copytree(images, tmp_path/'images')
    for name,make in ('theirs',make_tars), ('quickdraw',make_drawings):
        (tmp_path/name).mkdir()
        make(tmp_path/name, images)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('PYTHONPATH', str(Path(__file__).parents[1]))
    program = 'set -euo pipefail\nfastai_remote() { %s -m fastai_remote "$@"; }\n' % sys.executable
    printed = ''
    with redis_server(port=-1) as s:
        monkeypatch.setenv('FASTAI_REMOTE_URL', s.url)
        for is_simple,some in groupby(lines, lambda line: SIMPLE.fullmatch(line) is not None):
            if is_simple:
                for words in map(shlex.split, some):
                    code,_,err = cli(*(file for word in words[1:] for file in sorted(glob(word)) or [word]))
                    assert code==0, err
            else: printed += subprocess.check_output(['bash', '-c', program+'\n'.join(some)], text=True)
        assert RedisStore.names(s.url)==['pets','texts'] and "['pets', 'texts']" in printed
    assert {f.name for f in (tmp_path/'shards').iterdir()}=={'two','tars','drawings','pets'}
