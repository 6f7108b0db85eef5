"Users of Redis with the rights that the guide documents, and nothing more: all works; a right that lacks is named"
import re
from pathlib import Path

import pytest
import redis
from conftest import class_of

from fastai_remote import (
    image_samples, MissingSample, RedisStore, redis_server, StoreNotFound, StoreUnavailable, to_redis)
from fastai_remote.store.redis_acl import missing_right

GUIDE = Path(__file__).parents[1]/'nbs/guide/credentials.md'
NAME,OTHER = 'pets','dogs'
one = dict(num_workers=1, progress=False)

def documented(user):
    "The rights of `user` in the guide, as arguments of `ACL SETUSER`, for a dataset called `NAME`"
    found = re.search(rf'^ACL SETUSER {user} on >PASSWORD (.*)$', GUIDE.read_text(), re.M)
    return found[1].split()

def commands(rights):
    "The commands that `rights` grant, without their subcommands"
    return {right[1:].split('|')[0] for right in rights if right[0]=='+'}
def more_of(word):
    "The rights that the guide's table grants for one more purpose"
    found = re.search(rf'^\| {word}.*?\|(.*)\|$', GUIDE.read_text(), re.M)
    return re.findall(r'`([^`]+)`', found[1])

READER,WRITER = documented('reader'),documented('writer')
VERIFY = more_of('`verify')

@pytest.fixture(scope='module')
def locked():
    "A server with a TCP port, whose default user is the administrator"
    with redis_server(port=-1) as server: yield server

@pytest.fixture
def admin(locked):
    client = redis.Redis.from_url(locked.url)
    client.acl_log_reset()
    yield client
    for user in client.acl_users():
        if user!='default': client.acl_deluser(user)
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

def commands_seen(admin, act):
    "The commands that the server ran for others while `act` ran"
    admin.config_resetstat()
    act()
    stats = admin.info('commandstats')
    names = {name.removeprefix('cmdstat_').split('|')[0] for name in stats}   # Redis 6.2 does not count subcommands
    return names-{'acl','auth','config'}

def read_all(store):
    "Every field of every sample, in order, and of few samples far apart"
    everything = store.get_many(range(len(store)), store.fields)
    few = store.get_many([0, len(store)-1], store.fields)
    return everything,few,store[3]

def test_a_reader_needs_the_documented_rights_and_no_others(admin, pets, url_of):
    def act():
        store = RedisStore(url_of('reader', *READER), NAME)
        assert read_all(store)[0]['jpg']==read_all(pets)[0]['jpg']
    seen = commands_seen(admin, act)
    assert seen==commands(READER)
    assert {right for right in READER if right[0]=='~'}=={f'~{NAME}:*', f'~{NAME}@*'}

def test_a_reader_of_a_dataset_without_checksums_needs_no_others(locked, admin, url_of):
    values = {f'{NAME}:{i}':bytes([i]) for i in range(5)}
    admin.mset(values)
    store = RedisStore.from_keys(url_of('reader', *READER), f'{NAME}:{{}}', n=5, codec='bin', image=False)
    assert store.get_many(range(5), 'x')['x']==[*values.values()]

def test_verify_needs_the_documented_rights(admin, pets, url_of):
    pets.rename(OTHER)   # its keys keep their name
    def act():
        store = RedisStore(url_of('checker', *for_two(READER), *VERIFY), OTHER)
        assert not store.verify().bad and list(store.failures())==[] and RedisStore.names(store.link)==[OTHER]
    seen = commands_seen(admin, act)
    assert commands(VERIFY)<=seen<=commands(VERIFY)|commands(READER)

def test_every_right_of_verify_is_named_when_it_lacks(pets, url_of):
    pets.rename(OTHER)
    for right in VERIFY:
        store = RedisStore(url_of('checker', *for_two(READER), *(r for r in VERIFY if r!=right)), OTHER)
        with pytest.raises(StoreUnavailable, match=f'refused.*{re.escape(right)}'):
            store.verify()
            list(store.failures())
            RedisStore.names(store.link)

def test_a_name_that_is_not_there_is_said_even_if_names_cannot_be_listed(pets, url_of):
    url = url_of('reader', *READER, '~other:*')
    with pytest.raises(StoreNotFound, match=r"no dataset 'other'.*the names .* cannot be listed.*\+smembers"):
        RedisStore(url, 'other')

def test_a_missing_sample_is_named_even_if_the_policy_cannot_be_read(admin, pets, url_of):
    store = RedisStore(url_of('reader', *READER), NAME)
    admin.delete(f'{NAME}:jpg:7')
    with pytest.raises(MissingSample, match=r"sample 7 is missing.*\+info"): store[7]
    with pytest.raises(MissingSample, match=r"1 of 3 samples missing, first 7 .*deleted.*\+info"):
        store.get_many([1,7,9], 'jpg')

@pytest.mark.parametrize('command', sorted(commands(READER)))
def test_a_command_that_a_reader_may_not_run_is_named(pets, url_of, command):
    url = url_of('reader', *(right for right in READER if right!=f'+{command}'))
    with pytest.raises(StoreUnavailable, match=rf'refused.*{command.upper()}.*\+{command}'):
        read_all(RedisStore(url, NAME))

def test_a_key_that_a_reader_may_not_access_is_named(pets, url_of):
    url = url_of('reader', '~other:*', *(right for right in READER if right[0]!='~'))
    with pytest.raises(StoreUnavailable, match=r"refused.*GET.*'pets:meta'.*~pets:\*"): RedisStore(url, NAME)

def test_the_prefix_of_a_dataset_that_replaced_another_is_named(locked, pets, url_of):
    to_redis([{'txt':f'{i}'} for i in range(4)], locked.url, NAME, overwrite=True, **one)
    url = url_of('reader', '~pets:*', *(right for right in READER if right[0]!='~'))
    with pytest.raises(StoreUnavailable, match=r"refused.*MGET.*'pets@2:txt:0'.*~pets@\*"):
        RedisStore(url, NAME).get_many([0], 'txt')

# --- writers

def items(n, bad=()):
    "Samples with every kind of field"
    return [{'txt':f't{i}', 'cls':'abc'[i%3], 'labels':[f'l{i%2}', 'all'], 'i4':i if i not in bad else 'bad'}
            for i in range(n)]

def stop_at(number):
    "A function for `to_redis` that interrupts the ingest when a sample comes"
    def fn(sample):
        if sample['txt']==f't{number}': raise KeyboardInterrupt
        return sample
    return fn

def interrupted(source, url, name=NAME, **kwargs):
    "Begin an ingest that is interrupted"
    with pytest.raises(KeyboardInterrupt):
        to_redis(source, url, name, fn=stop_at(40), chunk=8, shuffle=False, overwrite=True, **one, **kwargs)

def write_everything(url, images):
    "Ingests of all kinds, and everything that changes a dataset"
    source = {'train':items(60, bad=(5,6)), 'valid':items(40, bad=(7,))}
    report = to_redis(source, url, NAME, max_failed=1., chunk=16, **one)
    assert (report.written,report.failed)==(97,3)
    to_redis(image_samples(images, label=class_of, path=True), url, NAME, overwrite=True, **one)
    interrupted(iter(items(50)), url)
    assert to_redis(iter(items(50)), url, NAME, fn=None, chunk=8, shuffle=False, overwrite=True, **one).written==50
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
    assert RedisStore.names(url)==[OTHER] and not renamed.verify().bad
    read_all(renamed)
    RedisStore.delete(url, OTHER)
    assert RedisStore.names(url)==[]

def for_two(rights):
    "The rights for datasets `NAME` and `OTHER`"
    return [*rights, *(right.replace(NAME, OTHER) for right in rights if NAME in right)]

def write_partitions(url):
    "Partitions of an engine, one of which is written and then not wanted"
    with RedisStore.writer(url, NAME, items(1)[0], chunk=4, overwrite=True) as writer:
        records = list(writer(items(12)))
        writer.commit(records[:2])
        link,lock = writer.writer.link,writer.writer.keys.lock
        writer.writer.lock.transaction_if(lock, writer.writer.lock.token, lambda p: p.expire(lock, 30))   # as each 10 s
        assert not writer.writer.lock.transaction_if(lock, b'another', lambda p: p.delete(lock))
    assert len(RedisStore(link, NAME))==8
    RedisStore.delete(url, NAME)

def test_a_writer_needs_the_documented_rights_and_no_others(admin, url_of, images):
    url = url_of('writer', *for_two(WRITER))
    def act():
        write_everything(url, images)
        write_partitions(url)
    seen = commands_seen(admin, act)
    assert admin.acl_log()==[]
    assert seen==commands(WRITER)
    assert set(admin.keys())<={b'fastai_remote:generations'}

@pytest.mark.parametrize('right', ['~fastai_remote:*', *(right for right in WRITER if right[0]=='+')])
def test_a_right_that_a_writer_lacks_is_named(admin, url_of, right):
    rights = [r for r in for_two(WRITER) if r!=right]
    def act():
        url = url_of('writer', *rights)
        to_redis(items(30, bad=(2,3,25)), url, NAME, max_failed=1., chunk=8, **one)
        renamed = RedisStore(url, NAME).rename(OTHER)
        renamed.verify()
        read_all(renamed)
        write_partitions(url)
        RedisStore.names(url)
        interrupted(items(50), url)
        RedisStore.unfinished(url)
    if right=='+memory|usage': return act()   # the need of memory is not estimated
    with pytest.raises(StoreUnavailable, match=f'refused.*{re.escape(right)}'): act()

@pytest.mark.parametrize('user', ['monkey','access','keys','a-key','command'])
def test_the_name_of_a_user_does_not_decide_which_right_lacks(pets, admin, url_of, user):
    for rights,right in ((('~pets:*','+mget'), r'\+get \('), (('~a:*','+get'), r'~pets:\* \(')):
        with redis.Redis.from_url(url_of(user, '+hello', '+client', *rights)) as client:
            with pytest.raises(redis.exceptions.NoPermissionError) as e: client.get('pets:meta')
        assert re.search(f'needs {right}', missing_right(str(e.value), ('GET','pets:meta')))

REPLIES = {'~pets:*':('this user has no permissions to access one of the keys used as arguments',
                      'No permissions to access a key', "User key has no permissions to access the 'pets:meta' key"),
           '+get':("this user has no permissions to run the 'get' command or its subcommand",
                   "User key has no permissions to run the 'get' command", 'No permissions to access a channel')}

@pytest.mark.parametrize('right', REPLIES)
def test_the_right_is_that_of_the_replies_of_all_versions(right):
    for reply in REPLIES[right]: assert f'needs {right} (' in missing_right(reply, ('GET','pets:meta'))

def test_a_reader_cannot_write(pets, url_of):
    url = url_of('reader', *READER)
    for act in (lambda: to_redis(items(3), url, NAME, overwrite=True, **one), lambda: RedisStore.delete(url, NAME),
                lambda: RedisStore(url, NAME).rename('pets2')):
        with pytest.raises(StoreUnavailable, match=r'refused.*may not run SET.*\+set'): act()
    assert len(RedisStore(url, NAME))==60
