"Users of Redis with the rights that the guide documents, and nothing more: all works; a right that lacks is named"
import re
from pathlib import Path

import pytest
import redis
from clusters import several_servers
from conftest import class_of

from fastai_remote import (
    image_samples, MissingSample, RedisStore, redis_server, StoreNotFound, StoreUnavailable, to_redis)
from fastai_remote.store.redis_servers import missing_right

GUIDE = (Path(__file__).parents[1]/'nbs/guide/credentials.md').read_text(encoding='utf-8')
NAME,OTHER = 'pets','dogs'
one = dict(num_workers=1, progress=False)

def documented(user):
    "The rights of `user` in the guide, as arguments of `ACL SETUSER`, for a dataset called `NAME`"
    return re.search(rf'^ACL SETUSER {user} on >PASSWORD (.*)$', GUIDE, re.M)[1].split()

def commands(rights):
    "The commands that `rights` grant, without their subcommands"
    return {right[1:].split('|')[0] for right in rights if right[0]=='+'}

def for_two(rights):
    "The rights for datasets `NAME` and `OTHER`"
    return [*rights, *(right.replace(NAME, OTHER) for right in rights if NAME in right)]

READER,WRITER,CLUSTER_WRITER = map(documented, ('reader','writer','cluster_writer'))
# what the guide's table grants for one more purpose
VERIFY = re.findall(r'`([^`]+)`', re.search(r'^\| `verify.*?\|(.*)\|$', GUIDE, re.M)[1])

@pytest.fixture(scope='module')
def locked():
    "A server with a TCP port, whose default user is the administrator"
    with redis_server(port=-1) as server: yield server

@pytest.fixture
def admin(locked):
    client = redis.Redis.from_url(locked.url)
    client.acl_log_reset()
    yield client
    for user in set(client.acl_users())-{'default'}: client.acl_deluser(user)
    client.flushall()

@pytest.fixture
def url_of(locked, admin):
    "Makes a user with these rights; returns the URL with which it logs in"
    def make(user, *rights):
        admin.execute_command('ACL', 'SETUSER', user, 'reset', 'on', '>pw', *rights)
        return f'redis://{user}:pw@127.0.0.1:{locked.port}'
    return make

@pytest.fixture
def pets(locked, admin, images):
    "A dataset that the administrator has written"
    to_redis(image_samples(images, label=class_of, path=True), locked.url, NAME, **one)
    return RedisStore(locked.url, NAME)

def commands_seen(clients, act):
    "The commands that the servers ran for others while `act` ran"
    for client in clients: client.config_resetstat()
    act()
    names = {name for client in clients for name in client.info('commandstats')}
    # Redis 6.2 does not count subcommands
    return {name.removeprefix('cmdstat_').split('|')[0] for name in names}-{'acl','auth','config'}

def read_all(store):
    "Every field of every sample, in order, and of few samples far apart"
    everything = store.get_many(range(len(store)), store.fields)
    few = store.get_many([0, len(store)-1], store.fields)
    return everything,few,store[3]

def refused(right): return pytest.raises(StoreUnavailable, match=f'refused.*{re.escape(right)}')

# --- readers

def test_a_reader_needs_the_documented_rights_and_no_others(admin, pets, url_of):
    def act():
        store = RedisStore(url_of('reader', *READER), NAME)
        assert read_all(store)[0]['jpg']==read_all(pets)[0]['jpg']
    assert commands_seen([admin], act)==commands(READER)
    assert {right for right in READER if right[0]=='~'}=={f'~{NAME}:*', f'~{NAME}@*'}
    # nor does a reader of a dataset without checksums
    admin.mset({f'{NAME}:{i}':bytes([i]) for i in range(5)})
    store = RedisStore.from_keys(url_of('reader', *READER), f'{NAME}:{{}}', n=5, codec='bin', image=False)
    assert store.get_many(range(5), 'x')['x']==[bytes([i]) for i in range(5)]

def test_verify_needs_the_documented_rights_and_a_lacking_one_is_named(admin, pets, url_of):
    pets.rename(OTHER)   # its keys keep their name
    def verify(rights):
        store = RedisStore(url_of('checker', *for_two(READER), *rights), OTHER)
        assert not store.verify(num_workers=1).bad and list(store.failures())==[]
        assert RedisStore.names(store.link)==[OTHER]
    # INFO tells whether it is a cluster; without the right, it is none
    seen = commands_seen([admin], lambda: verify(VERIFY))-{'info'}
    assert commands(VERIFY)<=seen<=commands(VERIFY)|commands(READER)
    for right in VERIFY:
        with refused(right): verify([r for r in VERIFY if r!=right])

def test_what_a_reader_lacks_is_named(locked, pets, url_of):
    "A command, a key, the prefix of a dataset that replaced another; and everything that writes"
    for right in (right for right in READER if right[0]=='+'):
        url = url_of('reader', *(other for other in READER if other!=right))
        with refused(right): read_all(RedisStore(url, NAME))
    url = url_of('reader', *READER)
    for act in (lambda: to_redis([{'txt':'a'}], url, NAME, overwrite=True, **one), lambda: RedisStore.delete(url, NAME),
                lambda: RedisStore(url, NAME).rename('pets2')):
        with pytest.raises(StoreUnavailable, match=r'refused.*may not run SET.*\+set'): act()
    assert len(RedisStore(url, NAME))==60
    any_key = [right for right in READER if right[0]!='~']
    with pytest.raises(StoreUnavailable, match=r"refused.*GETRANGE.*'pets:meta'.*~pets:\*"):
        RedisStore(url_of('reader', '~other:*', *any_key), NAME)
    to_redis([{'txt':f'{i}'} for i in range(4)], locked.url, NAME, overwrite=True, **one)
    with pytest.raises(StoreUnavailable, match=r"refused.*MGET.*'pets@[0-9a-f]+:txt:0'.*~pets@\*"):
        RedisStore(url_of('reader', '~pets:*', *any_key), NAME).get_many([0], 'txt')

def test_what_is_not_there_is_said_even_if_the_reason_cannot_be_looked_up(admin, pets, url_of):
    url = url_of('reader', *READER, '~other:*')
    with pytest.raises(StoreNotFound, match=r"no dataset 'other'.*the names .* cannot be listed.*\+smembers"):
        RedisStore(url, 'other')
    store = RedisStore(url, NAME)
    admin.delete(f'{NAME}:jpg:7')
    with pytest.raises(MissingSample, match=r"sample 7 is missing.*\+info"): store[7]
    with pytest.raises(MissingSample, match=r"1 of 3 samples missing, first 7 .*deleted.*\+info"):
        store.get_many([1,7,9], 'jpg')

# --- writers

def items(n, bad=()):
    "Samples with every kind of field"
    return [{'txt':f't{i}', 'cls':'abc'[i%3], 'labels':[f'l{i%2}', 'all'], 'i4':i if i not in bad else 'bad'}
            for i in range(n)]

def interrupted(source, url):
    "Begin an ingest that is interrupted"
    def fn(sample):
        if sample['txt']=='t40': raise KeyboardInterrupt
        return sample
    with pytest.raises(KeyboardInterrupt):
        to_redis(source, url, NAME, fn=fn, chunk=8, shuffle=False, overwrite=True, **one)

def write_everything(url, images):
    "Ingests of all kinds, and everything that changes a dataset"
    source = {'train':items(60, bad=(5,6)), 'valid':items(40, bad=(7,))}
    report = to_redis(source, url, NAME, max_failed=1., chunk=16, **one)
    assert (report.written,report.failed)==(97,3)
    to_redis(image_samples(images, label=class_of, path=True), url, NAME, overwrite=True, **one)
    interrupted(iter(items(50)), url)
    assert to_redis(iter(items(50)), url, NAME, chunk=8, shuffle=False, overwrite=True, **one).written==50
    interrupted(items(50), url)
    assert to_redis(items(20), url, NAME, overwrite=True, **one).written==20
    interrupted(items(50), url)
    assert [ingest['name'] for ingest in RedisStore.unfinished(url)]==[NAME]
    RedisStore.abandon(url, NAME)
    store = RedisStore(url, NAME)
    store.copy(url, OTHER, progress=False, num_workers=1)
    store.map(lambda sample: sample, url, OTHER, overwrite=True, progress=False, num_workers=1)
    RedisStore.delete(url, OTHER)
    renamed = store.rename(OTHER)
    assert RedisStore.names(url)==[OTHER] and not renamed.verify(num_workers=1).bad
    read_all(renamed)
    RedisStore.delete(url, OTHER)
    assert RedisStore.names(url)==[]

def write_partitions(url):
    "Partitions of an engine, one of which is written twice"
    with RedisStore.writer(url, NAME, items(1)[0], [8,4], chunk=4, overwrite=True) as writer:
        for partition,n in (0,8),(1,4),(0,8): list(writer(partition, items(n)))
        writer.commit()
        link,lock = writer.writer.link,writer.writer.place.keys.lock
        held = writer.writer.place
        held._transaction_if(held.token, [('EXPIRE', lock, 30)])   # as each 10 s
        assert not held._transaction_if(b'another', [('DEL', lock)])
    assert len(RedisStore(link, NAME))==12
    RedisStore.delete(url, NAME)

def check_writer(url, clients, images, rights, own=frozenset()):
    "The commands that a writer uses, but for `own` ones, are those of `rights`, and nothing is left or refused"
    def act():
        write_everything(url, images)
        write_partitions(url)
    assert commands_seen(clients, act)-own==commands(rights)-own
    assert not any(client.acl_log() for client in clients)
    assert {key for client in clients for key in client.keys()}<={b'fastai_remote:used'}

def test_a_writer_needs_the_documented_rights_and_no_others(admin, url_of, images):
    check_writer(url_of('writer', *for_two(WRITER)), [admin], images, WRITER)

@pytest.mark.parametrize('right', ['~fastai_remote:*', *(right for right in WRITER if right[0]=='+')])
def test_a_right_that_a_writer_lacks_is_named(admin, url_of, right):
    def act():
        url = url_of('writer', *(r for r in for_two(WRITER) if r!=right))
        to_redis(items(30, bad=(2,3,25)), url, NAME, max_failed=1., chunk=8, **one)
        renamed = RedisStore(url, NAME).rename(OTHER)
        renamed.verify(num_workers=1)
        read_all(renamed)
        write_partitions(url)
        RedisStore.names(url)
        interrupted(items(50), url)
        RedisStore.unfinished(url)
    if right=='+memory|usage': return act()   # the need of memory is not estimated
    with refused(right): act()

REPLIES = {
    '~pets:*':('this user has no permissions to access one of the keys used as arguments',
               'No permissions to access a key', "User key has no permissions to access the 'pets:meta' key"),
    '+get':("this user has no permissions to run the 'get' command or its subcommand",
            "User key has no permissions to run the 'get' command", 'No permissions to access a channel')}

def test_the_right_is_that_of_the_replies_of_all_versions_whatever_the_name_of_the_user(url_of):
    for right,replies in REPLIES.items():
        for reply in replies: assert f'needs {right} (' in missing_right(reply, ('GET','pets:meta'))
    for user in 'monkey','access','keys','command':
        for rights,right in ((('~pets:*','+strlen'), '+getrange'), (('~a:*','+strlen','+getrange'), '~pets:*')):
            with refused(f'needs {right} ('): RedisStore(url_of(user, '+hello', '+client', *rights), NAME)

# --- a cluster

@pytest.fixture
def cluster_user(cluster):
    "Makes a user on each node; returns the URL with which it logs in"
    clients = [cluster.client(k) for k in range(3)]
    def make(user, *rights):
        for client in clients:
            client.acl_log_reset()
            client.execute_command('ACL', 'SETUSER', user, 'reset', 'on', '>pw', *rights)
        return cluster.urls.replace(':secret%20word@', f'{user}:pw@')
    make.clients = clients
    return make

@several_servers
def test_a_writer_of_a_cluster_needs_the_documented_rights_and_no_others(cluster_user, images):
    own = {'client','cluster','command','hello'}
    url,clients = cluster_user('writer', *for_two(CLUSTER_WRITER)),cluster_user.clients
    check_writer(url, clients, images, CLUSTER_WRITER, own)

@several_servers
def test_a_right_that_a_writer_of_a_cluster_lacks_is_named(cluster_user):
    for right in ('~fastai_remote:*', '~{pets}*', '~{pets.*', '+setrange', '+watch', '+cluster|slots'):
        for client in cluster_user.clients: client.flushall()
        url = cluster_user('short', *(r for r in CLUSTER_WRITER if r!=right))
        with refused(right.lstrip('+')): to_redis(items(30), url, NAME, chunk=8, overwrite=True, **one)

@several_servers
def test_a_reader_of_a_cluster_needs_the_documented_rights_and_no_others(cluster, cluster_user):
    rights = documented('cluster_reader')
    for _ in range(2): to_redis(items(60), cluster.url, NAME, overwrite=True, **one)   # keys with an ID
    store = RedisStore(cluster_user('reader', *rights), NAME)
    read_all(store)
    assert [client.acl_log() for client in cluster_user.clients]==[[]]*3
    with pytest.raises(StoreUnavailable, match='refused'): store.link.send([('SET', '{pets}:meta', b'')])
