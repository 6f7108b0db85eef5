"Users of a Redis Cluster with the rights that the guide documents for a writer, and nothing more"
import re

import pytest

from clusters import LocalCluster
from fastai_remote import StoreUnavailable, to_redis
from test_acl import commands, documented, for_two, items, NAME, one, write_everything, write_partitions

WRITER = documented('cluster_writer')

@pytest.fixture(scope='module')
def cluster():
    with LocalCluster(3) as c: yield c

def user(cluster, name, *rights):
    "Makes a user on each node; returns the URL with which it logs in"
    for k in range(3):
        cluster.client(k).acl_log_reset()
        cluster.client(k).execute_command('ACL', 'SETUSER', name, 'reset', 'on', '>pw', *rights)
    return cluster.urls.replace(':secret%20word@', f'{name}:pw@')

def seen(cluster):
    "The commands that the nodes ran for others"
    stats = [cluster.client(k).info('commandstats') for k in range(3)]
    own = {'acl','auth','client','cluster','command','config','hello'}
    return {name.removeprefix('cmdstat_').split('|')[0] for found in stats for name in found}-own

@pytest.mark.slow
def test_a_writer_needs_the_documented_rights_and_no_others(cluster, images):
    url = user(cluster, 'writer', *for_two(WRITER))
    for k in range(3): cluster.client(k).config_resetstat()
    write_everything(url, images)
    write_partitions(url)
    assert [cluster.client(k).acl_log() for k in range(3)]==[[]]*3
    assert seen(cluster)==commands(WRITER)-{'command','cluster'}
    left = {key for k in range(3) for key in cluster.client(k).keys()}
    assert left<={b'fastai_remote:generations',b'fastai_remote:locks'}

@pytest.mark.parametrize('right', ['~fastai_remote:*', '~{pets}*', '~{pets.*', '+incrby', '+mset', '+setrange', '+watch', '+hset',
                                   '+info'])
def test_a_right_that_a_writer_lacks_is_named(cluster, right):
    for k in range(3): cluster.client(k).flushall()
    url = user(cluster, 'short', *(r for r in WRITER if r!=right))
    with pytest.raises(StoreUnavailable, match='refused.*'+re.escape(right)):
        to_redis(items(30), url, NAME, chunk=8, overwrite=True, timeout=5, **one)

def test_a_user_who_may_not_ask_for_the_nodes_is_told(cluster):
    url = user(cluster, 'short', *(r for r in WRITER if r!='+cluster|slots'))
    with pytest.raises(StoreUnavailable, match=r'refused.*cluster\|slots'): to_redis(items(30), url, NAME, **one)
