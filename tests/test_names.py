"Names of datasets in Redis that change hands: each dataset keeps its samples, and nothing is left of what is removed"
import random

import pytest

from fastai_remote import RedisStore, StoreBusy, StoreExists, to_redis
from fastai_remote.store.redis_link import RedisLink
from fastai_remote.write.redis import RedisWriter
from shard_helpers import interrupted_after, items, ONE
from snapshots import client, keys

def words(server, name):
    store = RedisStore(server.url, name)
    values = store.get_many(range(len(store)), store.fields, check=True)
    return {text.decode().split()[0] for text in values['txt']}

def stop(server, name, word):
    "An ingest that is to replace what is there is interrupted"
    def fn(sample):
        if sample['id']==18: raise KeyboardInterrupt
        return sample
    with pytest.raises(KeyboardInterrupt):
        to_redis(items(word), server.url, name, fn, shuffle=False, chunk=16, overwrite=True, **ONE)

@pytest.mark.parametrize('which', ['a','b'])
def test_no_dataset_is_renamed_while_an_ingest_of_either_name_runs(fresh, which):
    "Nor is one dropped. Afterwards it is, unless the new name has an unfinished ingest"
    to_redis(items('a'), fresh.url, 'a', **ONE)
    store,writer = RedisStore(fresh.url, 'a'),RedisWriter(RedisLink(fresh.url), which)
    writer.place.take()
    changes = [store.clean, lambda: store.edit(drop=[0])] if which=='a' else []
    for act in (lambda: store.rename('b'), lambda: RedisStore.delete(fresh.url, which),
                lambda: RedisStore.abandon(fresh.url, which), *changes):
        with pytest.raises(StoreBusy, match=f"is writing '{which}' now"): act()
    writer.close()
    stop(fresh, which, 'z')
    if which=='b':
        with pytest.raises(StoreExists, match="'b' is there already, an unfinished ingest"): store.rename('b')
        RedisStore.abandon(fresh.url, 'b')
    assert store.rename('b').name=='b' and words(fresh, 'b')=={'a'} and RedisStore.names(fresh.url)==['b']
    if which=='a':
        to_redis(items('z'), fresh.url, 'a', overwrite=True, **ONE)
        assert (words(fresh, 'a'),words(fresh, 'b'))==({'z'},{'a'})

@pytest.mark.parametrize('seed', range(12))
def test_whatever_happens_to_names_each_holds_its_own_and_nothing_else_is_left(server, seed):
    "Datasets are written, stopped, renamed, deleted and abandoned under three names, which begin alike"
    rng,have,left = random.Random(seed),{},set()
    client(server).flushall()
    for k in range(14):
        name,other = rng.sample(['a','ab','a/b'], 2)
        act = rng.choice(['put','stop','rename','rename','delete','abandon'])
        if act=='put':
            to_redis(items(f'w{k}', 1500 if k==seed else 20+k), server.url, name, overwrite=True, **ONE)
            have[name] = f'w{k}'
            left.discard(name)
        elif act=='stop':
            stop(server, name, f'w{k}')
            left.add(name)
        elif act=='rename' and name in have:
            if other in have or other in left:
                with pytest.raises(StoreExists, match='there already'): RedisStore(server.url, name).rename(other)
            else:
                RedisStore(server.url, name).rename(other)
                have[other] = have.pop(name)
        elif act=='delete' and (name in have or name in left):
            RedisStore.delete(server.url, name)
            have.pop(name, None)
            left.discard(name)
        elif act=='abandon' and name in left:
            RedisStore.abandon(server.url, name)
            left.remove(name)
        assert RedisStore.names(server.url)==sorted(have)
        assert [ingest['name'] for ingest in RedisStore.unfinished(server.url)]==sorted(left)
        assert all(words(server, name)=={word} for name,word in have.items())
    for name in left: RedisStore.abandon(server.url, name)
    for name in have: RedisStore.delete(server.url, name)
    assert keys(server)==[]

def test_an_unfinished_ingest_stays_under_the_old_name_with_its_keys(fresh):
    "It is finished there, and a later change of the dataset that was renamed does not remove its samples"
    to_redis(items('a'), fresh.url, 'a', **ONE)
    def replace(progress=False):
        to_redis(items('z'), fresh.url, 'a', chunk=16, overwrite=True, **{**ONE, 'progress':progress})
    with pytest.raises(KeyboardInterrupt): replace(interrupted_after(1))
    RedisStore(fresh.url, 'a').rename('b')
    replace()
    RedisStore(fresh.url, 'b').edit(drop=[1])
    assert (words(fresh, 'a'),words(fresh, 'b'))==({'z'},{'a'})
    for name in 'ab': RedisStore.delete(fresh.url, name)
    assert keys(fresh)==[]
