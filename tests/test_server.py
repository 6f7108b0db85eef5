"The private server: nobody else can read what it holds"
import os, stat
from types import SimpleNamespace

import pytest
import redis

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
