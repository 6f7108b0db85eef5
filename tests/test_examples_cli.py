"What each module of `cli` does, in short: examples that were tried first"
import io, json, os, tempfile
import redis
from PIL import Image
from contextlib import redirect_stderr, redirect_stdout
from fastcore.test import expect_fail, test_eq
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch
from fastai_remote.cli.command import add_options, ArgumentParser, command, COMMANDS, parameters_of, read_function
from fastai_remote.cli.command import read_label, read_splits, read_storage_options, read_value, show
from fastai_remote.cli.commands import run
from fastai_remote.cli.doctor import check_folder, check_machine, check_server, installed
from fastai_remote.cli.main import main
from fastai_remote.cli.serve import serving
from fastai_remote.cli.terminal import in_shell, Progress, USAGE, UsageError
from fastai_remote.cli.words import Place, read_places, source_of, sources_of, split_sources, url_of
from fastai_remote.ingest.shards import to_shards
from fastai_remote.store.server import redis_server

def test_cli_command():
    test_eq(read_value('a=cls,b=txt', {list,dict}), {'a':'cls', 'b':'txt'})
    test_eq(read_value('0,b', {int,str,list}), [0,'b'])
    test_eq(read_value('.5', {int,float}), .5)
    read_splits('train,valid=20')
    test_eq(read_label('folder')('images/cat/1.jpg'), 'cat')
    test_eq(read_label(r'([^/]+)_\d+\.jpg$')('images/great_pyrenees_173.jpg'), 'great_pyrenees')
    with expect_fail(UsageError, contains='in parentheses'): read_label('cat')
    with expect_fail(UsageError, contains='may be secret'): read_storage_options('{"secret": "x"}')
    with expect_fail(UsageError, contains='FILE.py:FUNCTION'): read_function('double')
    with tempfile.TemporaryDirectory() as d:
        (Path(d)/'ours.py').write_text('def double(i): return {"id": 2*i}')
        test_eq(read_function(f'{d}/ours.py:double')(4), {'id':8})
    def example(
        size:int, # Not an option: it has no default
        num_workers:int=None, # Processes
        shuffle:bool=True, # Shuffle?
        max_failed:int|float=None, # A number, or a fraction; 1%
        splits:dict=None, # Sizes
        fn_col:int|str=None, # A column
        label_col:int|str|list=None, # Columns
        fields:dict=None, # `{column: field}`
        key:bool=None, # Keep the key?
    ): pass

    parser = ArgumentParser(prog='example')
    add_options(parser, parameters_of([example]))
    words = ("--workers 2 --max-failed .5 --splits train,valid=20 --fn-col 0 --no-shuffle "
             "--label-col a,b --fields a=cls --key")
    test_eq(vars(parser.parse_args(words.split())),
            dict(num_workers=2, max_failed=.5, splits={'train':None, 'valid':20}, fn_col=0, shuffle=False,
                 label_col=['a','b'], fields={'a':'cls'}, key=True))
    with expect_fail(UsageError, contains='invalid int value'): parser.parse_args(['--num-workers', 'x'])
    parser.print_help()
    @command('NAME', examples='fastai_remote greet you')
    def greet(args,
        politely:bool=False # With a title?
    ):
        "Greet somebody."
        title = 'Dr ' if politely else ''
        show(args, dict(hello=title+args.words[0]), f'hello {title}{args.words[0]}')

    greeting = COMMANDS.pop('greet')
    for words in ['you', '--json'],['you', '--politely']: greeting.run(greeting.parser().parse_args(words))
    greeting.parser().print_help()

def test_cli_commands():
    def output(name, *words):
        "What a command prints"
        args = COMMANDS[name].parser().parse_intermixed_args(words)
        with redirect_stdout(StringIO()) as out: COMMANDS[name].run(args)
        return out.getvalue()

    with tempfile.TemporaryDirectory() as d:
        for k in range(6):
            os.makedirs(f'{d}/images/{"ab"[k%2]}', exist_ok=True)
            Image.new('RGB', (40, 30), (40*k, 0, 0)).save(f'{d}/images/{"ab"[k%2]}/{k}.jpg')
        words = f'{d}/images',f'{d}/shards','--label','folder','--resize','20','--workers','1','--json'
        report = json.loads(output('ingest', *words))
        test_eq((report['written'], report['failed']), (6, 0))
        test_eq(json.loads(output('append', *words, '--again'))['added'], 6)
        print(output('resize', '10', f'{d}/shards', f'{d}/small', '--workers', '1'))
    with tempfile.TemporaryDirectory() as d:
        to_shards([{'txt':'a', 'cls':'x'}, {'txt':'b', 'cls':'y'}], f'{d}/texts', num_workers=1, progress=False)
        for name,where in ('ls', d),('info', f'{d}/texts'),('verify', f'{d}/texts'):
            print(f'$ fastai_remote {name}\n{output(name, where)}')
    with tempfile.TemporaryDirectory() as d:
        to_shards([{'txt':'a'}], f'{d}/texts', num_workers=1, progress=False)
        output('rm', f'{d}/texts', '--yes')
        test_eq(output('ls', d), f'no datasets at {d}\n')
    with redirect_stderr(StringIO()) as said: test_eq(run(['igest']), USAGE)
    said.getvalue()

def test_cli_doctor():
    findings = list(check_machine())
    test_eq(findings[0].what, 'versions')
    test_eq({'torch','fastai_remote'}<=installed().keys(), True)
    for finding in findings[2:]: print(finding)
    with redis_server(maxmemory='50mb', maxmemory_policy='allkeys-lru') as s:
        findings = list(check_server(Place(['env:'], s.url, 'pets')))
        test_eq([o.what for o in findings if o.level=='problem'], ['maxmemory-policy'])
        test_eq([o.text for o in findings if o.what=='rights'][-1], 'this user may write pets')
        test_eq(redis.Redis.from_url(s.url).dbsize(), 0)
    for finding in findings[2:5]: print(finding)
    with tempfile.TemporaryDirectory() as d:
        test_eq([o.what for o in check_folder(Place([d], d))], ['folder','rights','disk'])

def test_cli_main():
    main(['-h'])

def test_cli_serve():
    with tempfile.TemporaryDirectory() as d:
        with serving(d, memory='50mb') as s:
            redis.Redis.from_url(s.url).set('a', 1)
            url = s.url
            test_eq(Path(d, 'url').read_text().strip(), url)
        with serving(d) as s:
            test_eq(redis.Redis.from_url(s.url).get('a'), b'1')
            test_eq(s.url, url)

def test_cli_terminal():
    terminal,report = io.StringIO(),SimpleNamespace(written=0)
    def chunks():
        for _ in range(4):
            report.written += 100
            yield report.written
    test_eq(list(Progress(lambda r: (r.written, 2), file=terminal, pause=0)(chunks(), 4, report)), [100,200,300,400])
    lines = terminal.getvalue().split('\r\x1b[K')
    test_eq((lines[1], lines[-1]), ('starting',''))
    message = "pets: repeat the same call to go on, or RedisStore.abandon(url, 'pets')\n  a: b"
    test_eq(in_shell(message, ['redis://h','my pets']),
            "pets: repeat the same command to go on, or `fastai_remote abandon redis://h 'my pets'`; a: b")
    test_eq(in_shell('overwrite=True replaces it; with a higher max_failed= to go on'),
            '--overwrite replaces it; with a higher --max-failed to go on')

def test_cli_words():
    with patch.dict(os.environ, {'FASTAI_REMOTE_URL':'redis://:secret@localhost:6379', 'OTHER':'s3://bucket/pets'}):
        test_eq(str(url_of('redis://localhost')), 'redis://:secret@localhost:6379')
        test_eq(str(url_of('env:')), 'redis://:secret@localhost:6379')
        test_eq(str(url_of('env:OTHER')), 's3://bucket/pets')
        test_eq(str(url_of('env:OTHER/small')), 's3://bucket/pets/small')
        test_eq(url_of('redis://elsewhere'), 'redis://elsewhere')
    with expect_fail(UsageError, contains='everybody on this machine'): url_of('redis://:secret@localhost')
    a,b = read_places(['redis://localhost', 'pets', 's3://bucket/pets'], 2)
    test_eq((a.name, a.is_redis, b.words, b.is_redis), ('pets', True, ['s3://bucket/pets'], False))
    test_eq(split_sources(['a.csv', 'b.csv', 'redis://localhost', 'pets']),
            (['a.csv','b.csv'], ['redis://localhost','pets']))
    with expect_fail(UsageError, contains='the name of the dataset is missing'): read_places(['redis://localhost'])
    with tempfile.TemporaryDirectory() as d:
        folder = Path(d)/'images'/'cat'
        folder.mkdir(parents=True)
        Image.new('L', (4, 4)).save(folder/'1.png')
        source = source_of([f'{d}/images'], label=lambda path: path.parent.name)
        test_eq(source[0]['cls'], 'cat')
        test_eq(list(sources_of([f'train={d}/images', f'valid={d}/images'])), ['train','valid'])
        with expect_fail(UsageError, contains='--key: no option of image files'): source_of([f'{d}/images'], key=True)
        (Path(d)/'images'/'labels.csv').write_text('name,label\n')
        with expect_fail(UsageError, contains='--kind says which'): source_of([f'{d}/images'])
