"The private server: nobody else can read what it holds"
import os, re, signal, stat, subprocess, sys, threading
from types import SimpleNamespace

import pytest
import redis

from fastai_remote.core import StoreBusy
from fastai_remote.store import server as server_module
from fastai_remote.store.server import find_server, redis_server

def mode(path): return stat.S_IMODE(os.stat(path).st_mode)

def saved(server):
    "Write a value, save, and return the modes of the files in the server's folder"
    client = redis.Redis.from_url(server.url)
    client.set('a', 1)
    client.save()
    return {f.name:mode(f) for f in server.dir.iterdir()}

@pytest.mark.parametrize('umask', [0o022, 0o000, 0o077])
def test_only_the_owner_can_read_the_folder_and_the_files(tmp_path, umask):
    before = os.umask(umask)
    try:
        with redis_server() as temporary, redis_server(tmp_path/'some'/'new') as kept:
            for server in (temporary, kept):
                assert mode(server.dir)==0o700 and mode(server.socket.parent)==0o700
                assert saved(server)=={'dump.rdb':0o600, 'server.log':0o600}
    finally: os.umask(before)

def test_an_append_only_file_is_private_too(tmp_path):
    with redis_server(tmp_path/'d', appendonly='yes') as server:
        saved(server)
        files = [f for f in server.dir.rglob('*') if f.is_file()]
        assert len(files)>=4 and {mode(f) for f in files}=={0o600}

def test_a_folder_of_somebody_with_other_files_keeps_its_mode(tmp_path):
    (tmp_path/'d').mkdir(mode=0o755)
    (tmp_path/'d'/'other').write_text('')
    (tmp_path/'d').chmod(0o755)
    with redis_server(tmp_path/'d') as server:
        assert mode(tmp_path/'d')==0o755 and saved(server)['dump.rdb']==0o600

def test_files_of_an_earlier_version_become_private(tmp_path):
    with redis_server(tmp_path/'d') as server: saved(server)
    for name in ('dump.rdb','server.log'): (tmp_path/'d'/name).chmod(0o644)
    (tmp_path/'d').chmod(0o755)
    with redis_server(tmp_path/'d') as server:
        assert mode(tmp_path/'d')==0o700
        assert {f.name:mode(f) for f in server.dir.iterdir()}=={'dump.rdb':0o600, 'server.log':0o600}
        assert redis.Redis.from_url(server.url).get('a')==b'1'

def test_a_server_with_a_port_requires_a_password():
    with redis_server(port=-1) as one, redis_server(port=-1) as two:
        with pytest.raises(redis.AuthenticationError): redis.Redis(port=one.port).ping()
        assert redis.Redis.from_url(one.url).ping() and one.conf['requirepass']!=two.conf['requirepass']
        assert one.conf['requirepass'] not in repr(one)
        one.kill()
        one.start()   # the URL stays as it is
        assert redis.Redis.from_url(one.url).ping()
        arguments = open(f'/proc/{one.proc.pid}/cmdline').read()+open(f'/proc/{one.proc.pid}/environ').read()
        assert one.conf['requirepass'] not in arguments

def test_the_password_can_be_chosen_or_left_out():
    with redis_server(port=-1, requirepass='mine') as server:
        assert redis.Redis(port=server.port, password='mine').ping()
    with redis_server(port=-1, requirepass='') as server: assert redis.Redis(port=server.port).ping()
    with redis_server() as server: assert redis.Redis.from_url(server.url).ping() and '@' not in server.url

def test_a_program_that_ends_at_once_is_an_error_with_its_log(tmp_path, monkeypatch):
    "It may end before it has been told the settings"
    program = tmp_path/'no-server'
    program.write_text('#!/bin/sh\necho a library is missing\n')
    program.chmod(0o700)
    monkeypatch.setenv('REDIS_SERVER_BIN', str(program))
    def popen(*args, start=server_module._popen, **kwargs):
        process = start(*args, **kwargs)
        process.wait()
        return process
    monkeypatch.setattr(server_module, '_popen', popen)
    with pytest.raises(RuntimeError, match='no-server.* not start.*a library is missing'): redis_server()

def test_a_program_that_was_chosen_and_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setenv('REDIS_SERVER_BIN', '/nowhere/redis-server')
    with pytest.raises(FileNotFoundError, match='REDIS_SERVER_BIN.*/nowhere/redis-server'): find_server()

def test_a_server_may_load_its_data_for_any_time(monkeypatch):
    "While it does, it answers"
    answers = iter([redis.BusyLoadingError('loading')]*3)
    class Client:
        def __init__(self, **options): pass
        def ping(self):
            for error in answers: raise error
    clock = iter(range(0, 10**6, 100))
    monkeypatch.setattr(server_module, 'time', SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None))
    monkeypatch.setattr(server_module.redis, 'Redis', Client)
    with redis_server(): assert next(answers, None) is None

def values(folder):
    "What a server finds in `folder`"
    with redis_server(folder) as server:
        client = redis.Redis.from_url(server.url)
        return {key.decode():client.get(key).decode() for key in client.keys()}

def test_a_second_server_on_the_same_folder_is_an_error_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, '_LOCK_SECONDS', .1, raising=False)
    with redis_server(tmp_path/'d') as server:
        redis.Redis.from_url(server.url).set('x', 1)
        with pytest.raises(StoreBusy, match=re.escape(str(tmp_path/'d'))): redis_server(tmp_path/'d')
        server.kill(signal.SIGTERM)
        server.start()   # the same server has the folder again
        assert redis.Redis.from_url(server.url).get('x')==b'1'
        with pytest.raises(StoreBusy): redis_server(tmp_path/'d')
    assert values(tmp_path/'d')=={'x':'1'}

def test_a_folder_is_locked_until_its_server_has_saved_and_no_longer(tmp_path, monkeypatch):
    "Also if the process that started it was killed; a process that was forked from that one, and lives on, has no lock"
    monkeypatch.setattr(server_module, '_LOCK_SECONDS', .1, raising=False)
    code = '''if True:
        import os, redis, sys, time
        from fastai_remote.store.server import redis_server
        server = redis_server(sys.argv[1])
        redis.Redis.from_url(server.url).set('x', 1)
        child = os.fork()
        if not child: time.sleep(600)
        os.kill(server.proc.pid, 19)   # stops it, as if it took its time to save
        print(child, server.proc.pid, flush=True)
        os.kill(os.getpid(), 9)'''
    process = subprocess.Popen([sys.executable, '-c', code, tmp_path/'d'], stdout=subprocess.PIPE)
    child,server = map(int, process.stdout.readline().split())
    try:
        process.wait()
        with pytest.raises(StoreBusy): redis_server(tmp_path/'d')
        os.kill(server, signal.SIGTERM)   # also sent by the system, on Linux
        os.kill(server, signal.SIGCONT)
        monkeypatch.undo()
        monkeypatch.setattr(server_module, '_LOCK_SECONDS', 60, raising=False)
        assert values(tmp_path/'d')=={'x':'1'}
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()

@pytest.mark.parametrize('program,error', [('/nowhere/redis-server', 'FileNotFoundError'), ('/bin/false', 'RuntimeError')])
def test_a_server_that_does_not_start_leaves_nothing(tmp_path, program, error):
    code = 'from fastai_remote.store.server import redis_server; redis_server()'
    environment = {**os.environ, 'REDIS_SERVER_BIN':program, 'TMPDIR':str(tmp_path)}
    shown = subprocess.run([sys.executable, '-c', code], env=environment, capture_output=True, text=True).stderr
    assert shown.count('Traceback')==1 and f'{error}:' in shown and not list(tmp_path.iterdir()), shown

def test_saving_may_take_any_time(tmp_path, monkeypatch):
    "A server that saves before it ends does not answer; here it is stopped for a while"
    monkeypatch.setattr(server_module, '_SAVE_SECONDS', .5)
    answers = []
    def answer(self, ask=server_module.RedisServer._answers):
        answers.append(ask(self))
        if len(answers)==2: self.proc.send_signal(signal.SIGCONT)
        return answers[-1]
    monkeypatch.setattr(server_module.RedisServer, '_answers', answer)
    server = redis_server(tmp_path/'d')
    redis.Redis.from_url(server.url).set('x', 1)
    server.proc.send_signal(signal.SIGSTOP)
    server.close()
    assert answers==[False]*2 and server.proc.returncode==0 and not server.socket.parent.exists()
    monkeypatch.undo()
    assert values(tmp_path/'d')=={'x':'1'}

def test_a_server_that_cannot_save_is_an_error_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, '_SAVE_SECONDS', 1, raising=False)
    server = redis_server(tmp_path/'d')
    redis.Redis.from_url(server.url).set('x', 1)
    (tmp_path/'d'/'dump.rdb').mkdir()   # in the place of the file
    with pytest.raises(RuntimeError, match='did not; its log ends with'): server.close()
    assert redis.Redis.from_url(server.url).get('x')==b'1'
    (tmp_path/'d'/'dump.rdb').rmdir()
    server.close()
    assert values(tmp_path/'d')=={'x':'1'}

@pytest.mark.parametrize('setting', ['unixsocket', 'dir', 'Dir', 'daemonize', 'PORT'])
def test_settings_that_would_not_work_are_refused(setting, tmp_path, monkeypatch):
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    monkeypatch.setattr('tempfile.tempdir', None)
    with pytest.raises(ValueError, match=f'{setting.lower()}=.*path='): redis_server(**{setting:'yes'})
    assert not list(tmp_path.iterdir())
