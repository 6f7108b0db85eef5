"A writer that dies at any of its calls: readers see what was there before or after, and the same call again finishes"
import os, random
from functools import cache

import pytest

from conftest import private_server
from crashes import crash, dies_at
from fastai_remote import index_shards, RedisStore, StoreExists, StoreNotFound
from fastai_remote.store.storage import Storage
from fastai_remote.write.shards import ShardWriter
from in_memory import in_memory
from shard_helpers import tar
from snapshots import FolderPlace, items, known, nothing, old, RedisPlace, replaced, stopped, streams

pytestmark = pytest.mark.slow

@pytest.fixture(scope='module')
def places(tmp_path_factory):
    folder = FolderPlace(tmp_path_factory.mktemp('folder'))
    with private_server() as server: yield dict(redis=RedisPlace(server), folder=folder)

def another_name(place):
    old(place)
    place.write(items('other', 0, 20), name='b')
    RedisStore(place.url, 'b').rename('c')
    RedisStore.delete(place.url, 'c')

def tars(place):
    "Tars of somebody else"
    for k in range(3):
        members = [(f'{k}-{i//2}.{("txt","cls")[i%2]}', b'%d %d' % (k, i//2)) for i in range(10)]
        os.utime(tar(place.folder/f'shard-{k}.tar', members), (0, 0))   # the index notes it

@cache
def numbers():
    source = {'train':list(range(30)), 'valid':list(range(30, 40))}
    return in_memory(source, lambda i: {'txt':f'{i}', 'cls':f'c{i%3}', 'id':i})

def mapped(place): place.map(numbers(), upper)

def upper(sample):
    if sample['id']%7==3: raise ValueError('no seven')
    return {**sample, 'txt':sample['txt']*2}

CALLS = { # What is there before, and what dies
    'ingest':(nothing, lambda place: place.write(known())), 'stream':(nothing, lambda place: place.write(streams())),
    'overwrite':(old, lambda place: place.write(known(), overwrite=True)),
    'overwrite by a stream':(old, lambda place: place.write(streams(), overwrite=True)),
    'overwrite and drop another':(replaced, lambda place: place.write(known(), overwrite=True)),
    'map':(nothing, mapped),
    'delete':(old, lambda place: place.delete()), 'delete an unfinished one':(stopped, lambda place: place.delete()),
    'delete both':(replaced, lambda place: place.delete()), 'abandon':(replaced, lambda place: place.abandon())}
OWN = { # Of one kind of place
    'redis':{'rename':(old, lambda place: place.open().rename('b')),
             'rename to a name that was used':(another_name, lambda place: place.open().rename('b'))},
    'folder':{'index':(tars, lambda place: index_shards(place.folder, num_workers=1, progress=False))}}

# Between two crashes; a map is an ingest for its place, and the others are made of steps that are tried elsewhere, too
STEPS = {'stream':3, 'overwrite':3, 'overwrite and drop another':4, 'overwrite by a stream':5, 'map':5}

def once(start):
    "What `start` does to an empty place; from the second time on, what it left there is put back, which is faster"
    copies = []
    def put(place):
        if copies: return place.put_back(copies[0])
        start(place)
        copies.append(place.copy())
    return put

def each_crash(place, start, act, step=1):
    "For k = 0, `step`, …: `start`, and then `act`, which dies at its `k`-th call. Yields k, until it does not die"
    for k in range(0, 400, step):
        place.clear()
        start(place)
        if not dies_at(k, lambda: act(place), place.folder): break
        yield k
    assert 3<k<399

def undisturbed(place, start, act):
    "What is there before and after `act`"
    place.clear()
    start(place)
    before = place.everything()
    act(place)
    return before,place.everything()

def again(place, act, after):
    "The same call once more, which may find that it is done"
    try: act(place)
    except (StoreExists,StoreNotFound): assert place.visible()==after[0]

@pytest.mark.parametrize('where,what', [(where,what) for where in OWN for what in {**CALLS, **OWN[where]}])
def test_the_same_call_again_finishes(places, where, what):
    "Nothing is lost or left over; readers saw one whole dataset, or none"
    place,(start,act) = places[where],{**CALLS, **OWN[where]}[what]
    start = once(start)
    before,after = undisturbed(place, start, act)
    names = place.names()
    for k in each_crash(place, start, act, STEPS.get(what, 1)):
        was = place.visible()
        assert was in (before[0],after[0]), k
        again(place, act, after)
        # files have other numbers in their names if the dataset, or an ingest that is dropped, is replaced once more
        if where=='redis' or was!=after[0] and 'drop' not in what: assert place.everything()==after, k
        else: assert place.visible()==after[0] and place.names()==names, k

@pytest.mark.parametrize('where', OWN)
@pytest.mark.parametrize('what', ['ingest','stream','overwrite','map','delete both'])
def test_a_writer_that_dies_again_and_again_finishes_in_the_end(places, where, what):
    place,(start,act) = places[where],CALLS[what]
    start = once(start)
    before,after = undisturbed(place, start, act)
    for seed in range(4):
        rng = random.Random(seed)
        place.clear()
        start(place)
        for _ in range(rng.randrange(2, 6)):
            dies_at(rng.randrange(50), lambda: again(place, act, after), place.folder)
            was = place.visible()
            assert was in (before[0],after[0]), seed
        again(place, act, after)
        if where=='redis' or was!=after[0]: assert place.everything()==after, seed
        else: assert place.visible()==after[0], seed

@pytest.mark.parametrize('where', OWN)
def test_what_died_can_be_abandoned_or_replaced_by_another(places, where):
    "Who read the dataset before gets its values, or is told that it was replaced"
    place,(_,act),reader,put = places[where],CALLS['overwrite'],None,once(old)
    def start(place):
        nonlocal reader
        put(place)
        reader = place.open()
    def other(place): place.write(streams('other'), overwrite=True)
    def check_reader(is_old):
        try: values = reader.get_many(range(32), 'txt', check=True)
        except StoreNotFound as error: assert 'replaced' in str(error) and not is_old
        else: assert values=={'txt':expected}
    (before,after),replaced = undisturbed(place, start, act),undisturbed(place, start, other)[1]
    place.clear()
    start(place)
    names = place.names()
    was_old = before[0]['d'] if where=='redis' else before[0]
    for k in each_crash(place, start, act, 5):
        was,abandons,expected = place.visible(),k%2==0,was_old[0]['txt']
        check_reader(is_old=was==before[0])
        if abandons:
            try: place.abandon()
            except StoreNotFound: abandons = False   # it had not begun
            assert place.visible()==was and (not abandons or was!=before[0] or place.names()==names), k
        else:
            other(place)
            assert place.visible()==replaced[0], k
        check_reader(is_old=False)
    assert was==after[0]   # the last ones died after the commit

# --- calls that are saved

def test_records_of_chunks_are_read_many_at_a_time():
    "Not one by one, each of which would take a round trip to object storage; also where one of them is long"
    writer = ShardWriter(Storage('memory://records/numbers'))
    writer.begin(dict(signature='one', n=200, chunk=1, fields={'id':{'codec':'i8', 'dtype':'i8'}}, splits=None, vocab={},
                      stats=None, open=False))
    failures = [(f'sample {k}', 'x'*(10 if k!=7 else 600_000)) for k in range(200)]
    for k,failure in enumerate(failures):
        writer.opener()().done(k, dict(ok=0, failed=1, bytes=0, gaps=[[k,k+1]]), [failure])
    with crash(1000) as coming: found = [tuple(*record['failures']) for _,record in writer.records()]
    assert found==failures and 1000-coming.left<10   # calls
    writer.abandon()
    writer.close()
