"The private server: nobody else can read what it holds, its folder has one server at a time, and nothing is lost"
import os, re, signal, stat, subprocess, sys, tempfile
from pathlib import Path

import pytest
import redis

from conftest import private_server
from fastai_remote.core import StoreBusy
from fastai_remote.store import server as server_module
from fastai_remote.store.server import redis_server, RedisServer
from fastai_remote.testing import ManualClock

def mode(path): return stat.S_IMODE(os.stat(path).st_mode)
def modes(folder): return {f.name:mode(f) for f in folder.iterdir()}

def write(server):
    "Write a value and save it"
    client = redis.Redis.from_url(server.url)
    client.set('x', 1)
    client.save()

def values(folder):
    "What a server finds in `folder`"
    with redis_server(folder) as server:
        client = redis.Redis.from_url(server.url)
        return {key.decode():client.get(key).decode() for key in client.keys()}

PRIVATE = {'dump.rdb':0o600, 'server.log':0o600, 'socket':0o600}

# --- who can read

@pytest.mark.parametrize('umask', [0o022, 0o000, 0o077])
def test_only_the_owner_can_read_the_folder_and_the_files(tmp_path, umask):
    before = os.umask(umask)
    try:
        with private_server() as temporary, private_server(path=tmp_path/'some'/'new') as kept:
            for server in (temporary, kept):
                write(server)
                assert mode(server.dir)==mode(server.socket.parent)==0o700 and modes(server.dir)==PRIVATE
        with private_server(path=tmp_path/'appends', appendonly='yes') as server:
            write(server)
            files = [f for f in server.dir.rglob('*') if f.is_file()]
            assert len(files)>=4 and set(map(mode, files))=={0o600}
    finally: os.umask(before)

def test_a_folder_that_is_there_keeps_its_mode_if_it_has_other_files(tmp_path):
    "Files of an earlier version become private, and so does their folder"
    with private_server(path=tmp_path) as server: write(server)
    for other,folder_mode in ((), 0o700), (('other',), 0o755):
        for name in (*PRIVATE, *other):
            (tmp_path/name).touch()
            (tmp_path/name).chmod(0o644)
        tmp_path.chmod(0o755)
        with private_server(path=tmp_path) as server:
            assert mode(tmp_path)==folder_mode and modes(tmp_path).items()>=PRIVATE.items()
            assert redis.Redis.from_url(server.url).get('x')==b'1'

@pytest.mark.slow
def test_a_server_with_a_port_requires_a_password():
    with private_server(port=-1) as one, private_server(port=-1) as two:
        with pytest.raises(redis.AuthenticationError): redis.Redis(port=one.port).ping()
        assert redis.Redis.from_url(one.url).ping() and one.conf['requirepass']!=two.conf['requirepass']
        assert one.conf['requirepass'] not in repr(one)
        one.kill()
        one.start()   # the URL stays as it is
        assert redis.Redis.from_url(one.url).ping()
        shown = [Path(f'/proc/{one.proc.pid}/{name}').read_text() for name in ('cmdline','environ')]
        assert one.conf['requirepass'] not in ''.join(shown)
    for password in ('mine', ''):   # chosen, and left out
        with private_server(port=-1, requirepass=password) as server:
            assert redis.Redis(port=server.port, password=password or None).ping()
    with private_server() as server: assert redis.Redis.from_url(server.url).ping() and '@' not in server.url

# --- a start that fails

def test_a_program_that_is_not_there_or_ends_at_once_is_an_error_with_its_log(tmp_path, monkeypatch):
    "And nothing is left"
    program = tmp_path/'no-server'
    program.write_text('#!/bin/sh\necho a library is missing\n')
    program.chmod(0o700)
    def popen(*args, start=server_module._popen, **kwargs):
        process = start(*args, **kwargs)
        process.wait()   # it may end before it has been told the settings
        return process
    monkeypatch.setattr(server_module, '_popen', popen)
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    for path,error,match in (('/nowhere/redis-server', FileNotFoundError, 'REDIS_SERVER_BIN.*/nowhere/redis-server'),
                             (program, RuntimeError, 'no-server.* not start.*a library is missing')):
        monkeypatch.setenv('REDIS_SERVER_BIN', str(path))
        with pytest.raises(error, match=match): redis_server()
        assert list(tmp_path.iterdir())==[program]

def test_a_server_may_load_its_data_for_any_time_but_has_a_minute_to_answer(monkeypatch):
    "While it loads, it answers"
    class Client:
        def __init__(self, **options): pass
        def ping(self):
            clock.advance(100)
            for error in answers: raise error
    monkeypatch.setattr(server_module.redis, 'Redis', Client)
    with ManualClock() as clock:
        answers = iter([redis.BusyLoadingError('loading')]*3)
        with private_server(): assert next(answers, None) is None
        answers = iter([redis.ConnectionError('refused')]*3)
        with pytest.raises(RuntimeError, match='did not start'): redis_server()

def test_settings_that_would_not_work_are_refused():
    for setting in ('unixsocket', 'dir', 'Dir', 'daemonize', 'PORT'):
        with pytest.raises(ValueError, match=f'{setting.lower()}=.*path='): redis_server(**{setting:'yes'})

# --- one server, and nothing lost

def test_a_second_server_on_the_same_folder_is_an_error_and_nothing_is_lost(tmp_path):
    "The error has the address of the first, without its password"
    def is_busy():
        says = f'{re.escape(str(tmp_path))}: another server, unix://{server.socket}, uses this folder'
        with ManualClock() as clock, pytest.raises(StoreBusy, match=says) as error: RedisServer(tmp_path)
        assert 2<sum(clock.pauses)<2.1   # a child of a server that was killed may still be saving
        assert 'hidden' not in str(error.value)
    with redis_server(tmp_path, requirepass='hidden') as server:
        redis.Redis.from_url(server.url).set('x', 1)
        is_busy()
        server.kill(signal.SIGTERM)
        server.start()   # the same server has the folder again
        assert redis.Redis.from_url(server.url).get('x')==b'1'
        is_busy()
    assert values(tmp_path)=={'x':'1'}

@pytest.mark.slow
def test_a_folder_is_locked_until_its_server_has_saved_and_no_longer(tmp_path, monkeypatch):
    "Also if the process that started it was killed; a process that was forked from that one, and lives on, has no lock"
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
    with subprocess.Popen([sys.executable, '-c', code, tmp_path], stdout=subprocess.PIPE) as process:
        child,server = map(int, process.stdout.readline().split())
        try:
            process.wait()
            with ManualClock(), pytest.raises(StoreBusy): RedisServer(tmp_path)
            os.kill(server, signal.SIGTERM)   # also sent by the system, on Linux
            os.kill(server, signal.SIGCONT)
            monkeypatch.setattr(server_module, '_LOCK_SECONDS', 300)
            assert values(tmp_path)=={'x':'1'}
        finally: os.kill(child, signal.SIGKILL)

def test_saving_may_take_any_time(tmp_path, monkeypatch):
    "A server that saves before it ends does not answer; here it is stopped for a while"
    monkeypatch.setattr(server_module, '_SAVE_SECONDS', .05)
    answers = []
    def answer(self, ask=server_module.RedisServer._answers):
        answers.append(ask(self))
        if len(answers)==2:
            self.proc.send_signal(signal.SIGCONT)
            self.proc.wait()   # between continuing and ending it would answer once more
        return answers[-1]
    monkeypatch.setattr(server_module.RedisServer, '_answers', answer)
    with redis_server(tmp_path) as server:
        redis.Redis.from_url(server.url).set('x', 1)
        server.proc.send_signal(signal.SIGSTOP)
    assert answers[:2]==[False]*2 and server.proc.returncode==0 and not server.socket.parent.exists()
    monkeypatch.undo()
    assert values(tmp_path)=={'x':'1'}

def test_a_server_that_cannot_save_is_an_error_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, '_SAVE_SECONDS', .1)
    server = redis_server(tmp_path)
    redis.Redis.from_url(server.url).set('x', 1)
    (tmp_path/'dump.rdb').mkdir()   # in the place of the file
    with pytest.raises(RuntimeError, match='did not; its log ends with'): server.close()
    assert redis.Redis.from_url(server.url).get('x')==b'1'
    (tmp_path/'dump.rdb').rmdir()
    monkeypatch.undo()
    server.close()
    assert values(tmp_path)=={'x':'1'}
