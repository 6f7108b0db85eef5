"A private server ends with its object, and a folder has one server, which is returned"
import gc

import pytest
import redis

from fastai_remote.core import StoreBusy
from fastai_remote.store.server import redis_server

def test_a_server_ends_when_its_object_is_replaced(tmp_path):
    "As when the cell `server = redis_server()` of a notebook is run again"
    server = redis_server()
    process = server.proc
    server = redis_server()
    assert process.poll() is not None and server.proc.poll() is None
    kept = redis_server(tmp_path)
    redis.Redis.from_url(kept.url).set('x', 1)
    process = kept.proc
    del kept
    gc.collect()
    assert process.poll() is not None   # its data was saved
    with redis_server(tmp_path) as kept: assert redis.Redis.from_url(kept.url).get('x')==b'1'
    server.close()

def test_a_server_is_closed_once():
    "At exit its object is closed and then dropped, when modules such as `pathlib` do not work any longer"
    server = redis_server()
    server.close()
    server.dir.mkdir()
    server.close()
    assert server.dir.exists() and server.proc.poll() is not None
    server.dir.rmdir()

def test_the_server_that_this_process_runs_for_a_folder_is_returned(tmp_path):
    with redis_server(tmp_path) as server:
        assert redis_server(tmp_path) is server is redis_server(str(tmp_path), port=0)
        for other in dict(port=-1), dict(maxmemory='100mb'):
            with pytest.raises(StoreBusy, match=f'{server.socket}.*other settings'): redis_server(tmp_path, **other)
    with redis_server(tmp_path) as other: assert other is not server and other.proc.poll() is None

def test_a_misspelt_setting_gets_the_nearest_name_and_a_wrong_value_the_servers_error():
    for setting,nearest in ('apend_only','appendonly'), ('pth','path'):
        with pytest.raises(TypeError, match=f"redis_server knows no '{setting}'; did you mean '{nearest}'"):
            redis_server(**{setting:'1'})
    with pytest.raises(RuntimeError, match='argument must be a memory value'): redis_server(maxmemory='much')
    with pytest.raises(RuntimeError, match='Bad directive'): redis_server(rename_command='only-one-word')
