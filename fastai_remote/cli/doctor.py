"""What is wrong with this installation, a server, or the rights on it, before it costs a night

Docs: page `cli/doctor`"""

# Most trouble with a new machine has a few causes: a C module that could not be compiled, a server that drops keys when
# it is full, one that loses everything in a restart, a user without a right, a container with 64 MB of shared memory.
# `fastai_remote doctor` looks for them. It changes nothing.

import os, platform, re, shutil
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import median

import redis

from .words import Place
from ..clock import monotonic
from ..codec.pixels import C_MODULES
from ..core import size_str, StoreError
from ..store.redis_servers import missing_rights, READ_COMMANDS, WRITE_COMMANDS
from ..store.server import find_server
from ..write.admin import leftover_files, leftover_keys

@dataclass
class Finding:
    "What `doctor` found about one thing, and how bad it is"
    what:str # Such as 'maxmemory-policy'
    level:str # 'ok'; 'note': it costs something, or may; 'problem': data may be lost or read by others, or it fails
    text:str # What was found, and what to do
    def __str__(self): return f"{dict(ok=' ', note='-', problem='!')[self.level]} {self.what}: {self.text}"

def ok(what, text): return Finding(what, 'ok', text)
def note(what, text): return Finding(what, 'note', text)
def problem(what, text): return Finding(what, 'problem', text)

# --- This machine

_PACKAGES = 'fastai_remote fastai torch fastcore numpy pillow redis hiredis fsspec s3fs joblib datasets pandas'.split()
def installed()->dict: # `{package: version}`; `None` for one that is not installed
    "The versions of the packages that matter"
    found = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with suppress(PackageNotFoundError): found[name] = version(name)
    return found

def _check_c_module(module):
    "The finding about a `CModule`: is it compiled?"
    if module.there: return ok(f'C module {module.name}', 'there')
    return note(f'C module {module.name}', f'not compiled, so {module.cost}, with the same pixels. It needs '
                f'{module.needs}; then install fastai_remote again')

def _check_shared_memory():
    "Yields a finding about `/dev/shm`, where there is one"
    try: shm = os.statvfs('/dev/shm')
    except OSError: return
    size = shm.f_frsize*shm.f_blocks
    text = f'{size_str(shm.f_frsize*shm.f_bavail)} free of {size_str(size)}'
    if size>=1<<30: yield ok('/dev/shm', text)
    else: yield note('/dev/shm', f'{text}: batches of worker processes are passed through it, and training '
                     'ends with a bus error when it is full. In Docker: --shm-size=8g, or --ipc=host')

def check_machine():
    "Yields a `Finding` for each thing to know about this machine"
    versions = installed()
    there = ', '.join(f'{name} {number}' for name,number in versions.items() if number)
    yield ok('versions', f'Python {platform.python_version()}, {there}')
    yield ok('machine', f'{platform.platform()}, {os.cpu_count()} cores')
    if not versions['hiredis']: yield note('hiredis', 'not installed: replies of Redis take 2.7 times as long to read')
    yield from map(_check_c_module, C_MODULES)
    yield from _check_shared_memory()
    try: yield ok('server program', find_server())
    except FileNotFoundError as e: yield note('server program', f'{e}; only `serve` and `redis_server` need it')

# --- A server

# A user may be without the right to ask a server about itself. What that concerns is then left out, or named.

def check_server(place:Place, leftovers:bool=False):
    """Yields a `Finding` for each thing to know about a Redis server; raises `StoreUnavailable`, `UsageError`

    If the place has a name, the rights on this dataset are checked, too. With `leftovers`, all keys are looked at."""
    link = place.home
    link.find_cluster()
    kind = ' (a cluster)' if link.is_cluster else ''
    yield ok('server', f"{link.url} answers in {_answer_ms(link, place.name or 'fastai_remote'):.1f} ms{kind}")
    masters = link.servers.masters()
    yield from _check_network(link, masters)
    for client in masters:
        for finding in _check_settings(client):
            node = client.get_connection_kwargs()
            if len(masters)>1: finding.what = f"{finding.what} of {node['host']}:{node['port']}"
            yield finding
    if place.name: yield from check_rights(link, place.name)
    if leftovers: yield _check_leftovers(leftover_keys(link), 'keys', 'no register and no dataset names them, so that '
                                         'nothing removes them; `UNLINK` of redis-cli does')

def _answer_ms(link, name):
    "Milliseconds until the server of a `RedisLink` answers: the median of five requests for the manifest of a dataset"
    def ask(client):
        with suppress(redis.exceptions.NoPermissionError): client.get(f'{name}:meta')   # a refusal is an answer, too
    seconds = []
    for _ in range(5):
        started = monotonic()
        link.call(ask)
        seconds.append(monotonic()-started)
    return 1000*median(seconds)

def _check_network(link, masters):
    """Yields findings about the password and TLS of a `RedisLink`

    `masters` are the clients of the servers that have the data, since sentinels may be elsewhere. One at a socket has
    no host."""
    hosts = {client.get_connection_kwargs().get('host', 'localhost') for client in masters}
    if hosts<={'localhost','127.0.0.1','::1'}: return
    if link.reveal()['secret'] is None:
        yield problem('password', 'the server has none, or needs none for this user: everybody who can reach it can '
                      'change and delete its data')
    elif not link.url.startswith('rediss'):
        yield note('TLS', 'the password and the data cross the network in clear: rediss:// encrypts them')

# What a server says about itself, in `INFO`, is enough for the rest.

def _check_settings(client):
    "Yields findings about the server of a `redis.Redis`: memory, saving and role; only a note if it does not tell"
    save = None   # not known
    try:
        info = client.info('everything')
        with suppress(redis.ResponseError): save = client.config_get('save')['save']
    except redis.RedisError as e:
        yield note('INFO', f'{e}: so the settings of the server are not known')
        return
    yield from _check_memory(info)
    yield from _check_saving(info, save)
    if info.get('role')!='slave': return
    yield note('role', 'a replica: datasets can be read, but not written')
    if info.get('master_link_status')!='up':
        yield problem('role', 'the replica has lost its master: its data may be old')

def _check_memory(info):
    "Yields findings about version and memory of a server; `info` is the dict of INFO"
    number,used,limit = info.get('redis_version', '?'),info.get('used_memory', 0),info.get('maxmemory', 0)
    name = f"Valkey {info['valkey_version']}" if 'valkey_version' in info else f'Redis {number}'
    is_old = [int(n) for n in re.findall(r'\d+', number)[:2]]<[6,2]
    yield problem('version', f'{name}: 6.2 or later is needed') if is_old else ok('version', name)
    policy = info.get('maxmemory_policy', 'noeviction')
    if policy=='noeviction': yield ok('maxmemory-policy', policy)
    else: yield problem('maxmemory-policy', f'{policy}: a full server drops samples. Set it to noeviction')
    if info.get('evicted_keys', 0):
        yield problem('evicted keys', f"{info['evicted_keys']:,} were dropped since the server started: `verify` "
                      'finds datasets that lack samples')
    machine = info.get('total_system_memory', 0)
    of = f' of {size_str(machine)} of the machine' if machine else ''
    if not limit:
        yield note('maxmemory', f'no limit, {size_str(used)} used{of}: the machine swaps, or ends the server, when its '
                   'memory is full. Set it to about three quarters of the memory')
    elif used>.9*limit: yield problem('maxmemory', f'{size_str(used)} used of {size_str(limit)}: almost full')
    else: yield ok('maxmemory', f'{size_str(used)} used of {size_str(limit)}')

def _check_saving(info, save):
    "Yields findings about how a server saves its data: `info` is the dict of INFO, `save` its setting, or `None`"
    if info.get('aof_enabled', 0): yield ok('saving', 'each write is appended to a file (appendonly)')
    elif save is None: yield note('saving', 'snapshots, or nothing: this user may not CONFIG GET save')
    elif save: yield ok('saving', f'snapshots ({save}); what was written since the last one is lost in a crash')
    else: yield note('saving', 'off: a restart of the server loses all datasets. For keeping them: appendonly yes')
    bad = [name for name in ('rdb_last_bgsave_status','aof_last_bgrewrite_status','aof_last_write_status')
           if info.get(name, 'ok')!='ok']
    if bad: yield problem('saving', f"{', '.join(bad)}: failed, and the server refuses writes. Is its disk full?")
    if info.get('loading'): yield note('loading', 'the server is still reading its data')

# --- Rights

def check_rights(link, name:str):
    """Yields three `Finding`s: may the user of a `RedisLink` train from dataset `name`, list and verify it, write it?

    It changes nothing on the server."""
    names = [name,f'{name}@9']   # before the keys of a first version, and of a later one
    keys = [f'{{{o}}}:doctor:0' if link.is_cluster else f'{o}:doctor:0' for o in names]
    ours = 'fastai_remote:doctor'
    def on_keys(commands): return [(command, key, *arguments) for key in keys for command,*arguments in commands]
    lists = [('EXISTS',keys[0]), ('HSCAN',keys[0],0), ('SMEMBERS',ours), ('SISMEMBER',ours,'a'), ('HGETALL',ours)]
    lists.append(('INFO',))
    writes = [('MEMORY','USAGE',keys[0]), ('SADD',ours,'a'), ('SREM',ours,'a'), ('HSET',ours,'a','b')]
    wanted = {'train from':on_keys(READ_COMMANDS), 'list and verify':lists, 'write':on_keys(WRITE_COMMANDS)+writes}
    for what,commands in wanted.items():
        missing = link.call(lambda client: missing_rights(client, commands, in_transaction=what=='write'), key=keys[0])
        if not missing: yield ok('rights', f'this user may {what} {name}')
        else: yield note('rights', f"this user may not {what} {name}: its access list (ACL) needs {' '.join(missing)}")

def _check_leftovers(names, what, then):
    "The finding about `names`, an iterator of keys or files that nothing needs"
    n,examples = 0,[]
    try:
        for n,name in enumerate(names, 1): examples += [name] if n<=5 else []
    except StoreError as e: return problem('leftovers', str(e))
    if not n: return ok('leftovers', f'all {what} of datasets are needed, or are those of an ingest')
    return note('leftovers', f"{n:,} {what} are not needed: {then}: {', '.join(examples)}{', …' if n>5 else ''}")

# --- A folder of shards

def check_folder(place:Place, leftovers:bool=False):
    """Yields a `Finding` for each thing to know about a folder of shards, which need not exist yet

    A dataset that cannot be opened is one. Raises `StoreUnavailable` if the folder cannot be listed, and
    `StoreNotFound` if its bucket does not exist."""
    storage = place.home
    has_dataset = ' and a dataset' if place.has_dataset else ', and no dataset'
    yield ok('folder', f'{storage.url} has {len(storage.names()):,} files{has_dataset}')
    if storage.local: yield from _check_disk(storage.path())
    if leftovers:
        yield _check_leftovers(leftover_files(storage), 'files', 'a call was killed, and the next change removes them')
    if not place.has_dataset: return
    try: yield ok('dataset', f'{len(place.store()):,} samples')
    except StoreError as e: yield problem('dataset', str(e))

def _check_disk(folder):
    "Yields findings about the rights on `folder`, or the first folder above it that exists, and the space on its disk"
    while not os.path.exists(folder): folder = os.path.dirname(os.path.abspath(folder))
    if not os.access(folder, os.R_OK|os.X_OK): yield problem('rights', f'{folder} cannot be read')
    elif os.access(folder, os.W_OK): yield ok('rights', f'{folder} can be read and written')
    else: yield note('rights', f'{folder} can be read, but not written')
    usage = shutil.disk_usage(folder)
    text = f'{size_str(usage.free)} free of {size_str(usage.total)}'
    yield note('disk', f'{text}: almost full') if usage.free<.05*usage.total else ok('disk', text)
