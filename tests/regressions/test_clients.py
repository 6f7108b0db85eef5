"Errors of the client library: what is a bug is raised at once, and a refused login says where the password comes from"
import re

import pytest

from fastai_remote.core import StoreUnavailable
from fastai_remote.ingest.stores import RedisStore
from fastai_remote.store.redis_link import RedisLink
from conftest import private_server

@pytest.mark.parametrize('error', [TypeError("unexpected keyword argument 'lib_name'"), AttributeError('no method')])
def test_a_bug_is_not_an_unavailable_server(server, error):
    "As with a version of redis-py that is too old; it is not tried again"
    link,calls = RedisLink(server.url),[]
    link.call(lambda client: client.ping())
    def f(client):
        calls.append(client)
        raise error
    with pytest.raises(type(error), match=str(error)): link.call(f)
    assert len(calls)==1

@pytest.mark.parametrize('login', ['', ':wrong@', 'nobody:secret@'])
def test_a_refused_login_names_where_the_password_is_taken_from(login):
    with private_server(requirepass='secret') as server:
        url = re.sub('//.*?@', f'//{login}', server.url)
        says = 'refused: .*: user and password are those of the URL, redis://USER'
        with pytest.raises(StoreUnavailable, match=says) as e: RedisStore(url, 'd')
        assert 'wrong' not in str(e.value) and 'secret' not in str(e.value)
