"""The address of a Redis server, and calls to it with one deadline

Docs: page `store/redis_link`"""
import inspect, os, re, ssl
from contextlib import suppress
from functools import lru_cache
from multiprocessing.context import get_spawning_popen
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import numpy as np
import redis

from ..clock import monotonic
from ..core import StoreError, StoreFull, unknown_arguments
from .connection import (
    check_seconds, concealed, hidden_names, Opener, public_options, public_url, Retries, secret_texts, SecretOptions)
from .redis_servers import (
    as_options, ClusterServers, explain_missing_right, nodes_in, redirections, refusals, SentinelServers, SingleServer,
    this_call)

# --- The URL and its password

# A URL says where the server is, and often contains its password. The two are separated at once, because the address
# may be printed, logged and pickled, and the password may not.

REDIS_SCHEMES = 'redis://','rediss://','unix://','redis+sentinel://','rediss+sentinel://'
_connection_classes = redis.Redis, redis.Connection, redis.SSLConnection, redis.connection.AbstractConnection
_known_arguments = {k for c in _connection_classes for k in inspect.signature(c.__init__).parameters}

def split_secret(
    url:str, # `redis://`, `rediss://` (TLS), `unix://`, `redis+sentinel://` or `rediss+sentinel://`
)->tuple: # The URL without its password; the password or None
    "Separate the password from `url`; raises `ValueError` for a malformed URL, without showing the password"
    result = _split_secret(url)
    if isinstance(result, ValueError):
        url = None   # a traceback may show it
        raise result
    return result

def _split_secret(url):
    "As `split_secret`, but the `ValueError` for a URL that it refuses is returned, and not raised"
    try:
        str(url).encode()   # raises for what cannot be UTF-8, as decoding does below
        parts = urlsplit(url)
        login,_,host = parts.netloc.rpartition('@')
        user,_,secret = login.partition(':')
        secret,query = unquote(secret, errors='strict'),parse_qsl(parts.query, keep_blank_values=True, errors='strict')
        # `port` raises if it is not a number
        valid = all(urlsplit(f'//{node}').port!=-1 for node in host.split(','))
    except ValueError: valid = False
    if valid and f'{parts.scheme}://' not in REDIS_SCHEMES:
        shown = 'the url' if '@' in url or '?' in url else repr(str(url))   # it has no place for a secret
        return ValueError(f'{shown}: want a redis://, rediss:// or unix:// URL')
    query = dict(query) if valid else {}
    if not valid or _is_divided(parts, host, query):
        return ValueError('not a URL: the port must be a number, a socket unix:///path, all of it UTF-8, '
                          'and :, /, @, #, ? and & in a password must be quoted (urllib.parse.quote)')
    secret = query.pop('password', None) or secret or None
    passwords = [k for k in query if 'password' in k]
    if passwords: return ValueError(f'{passwords[0]} cannot be given: only the password of the server is kept secret')
    netloc = f'{user}@{host}' if user else host
    path = parts.path.strip('/')
    database = path.partition('/')[2] if parts.scheme.endswith('+sentinel') else path
    if database and not database.isdecimal() and parts.scheme!='unix':   # redis-py uses another one then
        return ValueError(f'{parts.scheme}://{netloc}{parts.path}: want the number of a database, not {database!r}; '
                          'the name of a dataset is an argument of its own')
    return f"{parts.scheme}://{netloc}{parts.path}{'?' if query else ''}{urlencode(query, safe='/')}", concealed(secret)

def _is_divided(parts, host, query):
    """Was a URL divided at a character of its password, or of its path, that is not quoted?

    `parts` are those of `urlsplit`, `host` is without the login, and `query` a dict. Then a part of the password is in
    what is taken for something else, and may be shown."""
    if parts.fragment or 'password' in query and not _known_arguments.issuperset(query): return True
    if parts.scheme=='unix': return bool(host) or not parts.path
    return '@' in parts.path+parts.query

# --- RedisLink

# A connection must not be shared with a forked process, so each process makes its own client when it first needs one.
# The retries of redis-py are switched off in favour of `Retries`. The first call of all gives up after two seconds: a
# wrong URL should not take twenty.
#
# Three settings are for speed. Reads of 256 KB instead of 64 KB halve the CPU time for a batch of photographs. A
# handshake without the client's name and version saves each worker three round trips. The two commands that read a
# batch are packed directly, because redis-py's check of each argument takes longer than packing.
#
# A saved pickle contains no password. A pickle that `multiprocessing` makes while it spawns a worker does contain it,
# as that goes through a pipe which nobody else reads; `multiprocessing` treats its own `AuthenticationString` in the
# same way. A link that was loaded from a saved pickle takes its URL from the environment: `FASTAI_REMOTE_URL` if it is
# set, else `REDIS_URL` if the password is missing.
#
# `timeout` limits the time from a call to its answer or to `StoreUnavailable`. The timeouts of sockets are not enough
# for this, because they start again with each byte that arrives. So the sockets of this package know how much time the
# call has left.
#
# A server that belongs to a cluster says so in an answer (`MOVED`). From then on, the link sends each command to the
# node that has its key. It asks the nodes for their new places when a key has moved, or when a connection is lost.
# redis-py knows the nodes; `send` writes to all of them before it reads the first answer. (Decision note 0025.)

def check_link_arguments(
    function, # What was called; it passes arguments on to `RedisLink`
    names, # Names of these arguments
    others=() # Names of further arguments of the function, which its signature does not tell
):
    "Raises `TypeError` for arguments that neither `RedisLink` nor redis-py has"
    if 'decode_responses' in names:
        raise TypeError('decode_responses: leave it out, as values are read as the bytes that they are')
    own = inspect.signature(RedisLink).parameters
    unknown = [name for name in names if name not in _known_arguments and name not in own]
    known = {*_known_arguments, *own, *inspect.signature(function).parameters, *others}
    if unknown: raise unknown_arguments(function.__qualname__, unknown, known)

class RedisLink:
    """The address of a Redis server, a cluster, or a group of sentinels, with one deadline for each call

    Connects when it is first used, in each process by itself. Neither `repr` nor a saved pickle contains the
    password. Several hosts are those of a cluster, unless they are sentinels. Whether a single one belongs to a cluster
    is known after its first answer that says so."""
    url = '' # Address without password; for `repr`, if `__init__` fails
    export_note = '' # After loading an export, for messages: which variable has named the server
    def __init__(self,
        # `redis://`, `rediss://` (TLS) or `unix://`, with or without password; a cluster by one or several of its
        # nodes: `redis://host1:6379,host2:6379`; Sentinel: `redis+sentinel://host1:26379,host2:26379/NAME`
        url:str='redis://localhost:6379',
        timeout:float=20., # Seconds for all attempts together, then `StoreUnavailable`
        socket_timeout:float=5., # Seconds to wait for one reply
        secret:str=None, # Password, if it is not in `url`
        sentinel_secret:str=None, # Password of the sentinels, if they have one
        # 'replica': read values from replicas, where there are any; they may be old, but not wrong, and what a replica
        # does not have yet is read from the master
        read_from:str='master',
        **kwargs # More arguments for `redis.Redis.from_url`
    ):
        url,secret,kwargs = concealed(url),concealed(secret),concealed(kwargs)
        if any('password' in k for k in kwargs): raise TypeError('a password goes into the URL, or into `secret`')
        if read_from not in ('master','replica'):
            raise ValueError(f"read_from={read_from!r}: want 'master' or 'replica'")
        check_link_arguments(RedisLink, kwargs)
        check_seconds(timeout=timeout, socket_timeout=socket_timeout)
        secret_in_url,hidden = self._use_url(url) # Sets `url`, `is_sentinel`, `is_cluster` and `_nodes`
        self.timeout,self.socket_timeout = timeout,socket_timeout
        self.kwargs = SecretOptions({**hidden, **kwargs}) # More arguments for redis-py
        self._secret = secret or secret_in_url
        self._needs_secret = False # Did a pickle that was saved without the password have one?
        self._not_kept = [] # Names of options that were not saved with the pickle from which this was loaded
        self._sentinel_secret,self.read_from = concealed(sentinel_secret),read_from
        self._servers = 0,None # The process, and its connections
        self.has_answered = False # Has a call succeeded?
        self.advice = '' # After loading an export, for the end of messages: what to do

    def _use_url(self, url):
        """Set what `url` tells, without its secrets; returns the password or None, and a dict of the secret options

        Raises `ValueError` for a malformed URL, and `TypeError` for an option that cannot be given."""
        url,secret = split_secret(url)
        options = dict(parse_qsl(urlsplit(url).query))
        check_link_arguments(RedisLink, options)
        self.url = public_url(url)
        self._nodes = nodes_in(self.url) # Nodes of the cluster that are known, `(host, port)`
        self.is_sentinel = '+sentinel' in urlsplit(self.url).scheme
        self.is_cluster = len(self._nodes)>1 and not self.is_sentinel # Is this known to be a cluster?
        shown = dict(parse_qsl(urlsplit(self.url).query))
        return secret,{name:value for name,value in options.items() if name not in shown}

    def reveal(self)->dict:
        "The arguments of this link, password included: for sending it to a worker, never for saving"
        return SecretOptions(url=self.url, timeout=self.timeout, socket_timeout=self.socket_timeout,
                             secret=self._secret, sentinel_secret=self._sentinel_secret, read_from=self.read_from,
                             **self.kwargs)

    def opener(self)->Opener:
        "An `Opener` that recreates this link in a worker, password included"
        return Opener(RedisLink, self.url, **self.reveal())

    @property
    def servers(self)->SingleServer:
        """This process's connections, made when first used; of a cluster or of sentinels, a subclass of `SingleServer`

        For use inside `call`: to find the nodes or the master it connects at once, and raises errors of redis-py."""
        process,servers = self._servers
        if process==os.getpid(): return servers
        options = SecretOptions({**as_options(self._secret, self.socket_timeout), **self.kwargs})
        if self.is_sentinel: servers = SentinelServers(self.url, options, self._sentinel_secret)
        elif self.is_cluster:
            servers = ClusterServers(self.url, options, self._nodes)
            self._nodes = servers.nodes
        else: servers = SingleServer(self.url, options)
        self._servers = os.getpid(),servers
        return servers

    @property
    def client(self)->redis.Redis|redis.RedisCluster:
        "This process's client, of redis-py"
        return self.servers.client

    def use_cluster(self):
        "From now on, this is known to be a cluster: forgets the connections, to connect as to a cluster when used next"
        self.is_cluster = True
        self.reconnect()

    def find_cluster(self):
        "Ask the server whether it is a node of a cluster, as far as this user may ask; then `use_cluster`"
        def is_node(client):
            try: return client.info('cluster').get('cluster_enabled')
            except redis.exceptions.NoPermissionError: return False   # if it is one, it will say so
            except redis.ResponseError as error:
                if 'unknown command' in str(error).lower(): return False   # nobody may ask
                raise
        if not self.is_cluster and not self.is_sentinel and self.call(is_node): self.use_cluster()

    def reconnect(self):
        "Connect anew when used next; the sentinels are asked for the master then, or a cluster for its nodes"
        self._servers = 0,None

    def __getstate__(self):
        is_saved = get_spawning_popen() is None   # else a worker is being spawned, over a pipe of its own
        state = {**self.__dict__, '_servers':(0,None), 'is_saved':is_saved}
        if not is_saved: return state
        lost = [*hidden_names(self.kwargs), *(['sentinel_secret'] if self._sentinel_secret else [])]
        needs_secret = bool(self._secret) or self._needs_secret or 'credential_provider' in lost
        return {**state, '_secret':None, '_sentinel_secret':None, '_needs_secret':needs_secret,
                'kwargs':public_options(self.kwargs), '_not_kept':sorted({*self._not_kept, *lost})}

    def __setstate__(self, state):
        is_saved = state.pop('is_saved')
        self.__dict__.update(state)
        if not is_saved: return
        self.has_answered,self.kwargs = False,SecretOptions(self.kwargs)
        lost = f"; not kept in the export: {', '.join(self._not_kept)}" if self._not_kept else ''
        self.advice = f'{lost}; an export finds another server by FASTAI_REMOTE_URL'
        variable,url = 'FASTAI_REMOTE_URL',os.environ.get('FASTAI_REMOTE_URL', '')   # it may be the URL of shards
        if not url.startswith(REDIS_SCHEMES):
            variable,url = 'REDIS_URL',self._needs_secret and os.environ.get('REDIS_URL')
        if url and self._secret is None:
            self.export_note = f'; after it was exported, {variable} names the server {public_url(url)}'
            self._secret,hidden = self._use_url(concealed(url))
            self.kwargs.update(hidden)
            self._needs_secret = False

    def __copy__(self): return self
    def __deepcopy__(self, memo): return self
    def __repr__(self): return f'RedisLink({self.url!r})'

    def info(self,
        section:str # 'memory', 'server', …
    )->list: # Of dicts: one for each master of a cluster, or for the single server
        "What `INFO` says; raises as `call`"
        return self.call(lambda _: self.servers.info(section))

    def call(self,
        f, # Called with a `redis.Redis` or, for a cluster, a `redis.RedisCluster`; must be safe to repeat
        timeout:float=None, # Seconds for all attempts together; default: the link's
        key:str=None # Call `f` with a `redis.Redis` in any case: one for the server that has this key
    ):
        """The result of `f(client)`, which is repeated with increasing pauses while the server is away or busy

        Without `timeout`, and until the server has answered once, attempts start for at most 2 seconds: a wrong URL
        should not take twenty. It ends within `timeout`, whatever the server does: an attempt that still waits for the
        server then is cut off. Raises `StoreUnavailable` when the time is over or the server refuses access,
        `StoreFull`, and `StoreError` with the reply of the server if it refuses the command. What is no error of Redis
        is raised as it is."""
        seconds = self.timeout if timeout is None else timeout
        outer = getattr(this_call, 'remaining', None)   # of a call that makes this one
        if outer is not None: seconds = min(seconds, outer())
        deadline = monotonic()+seconds
        if timeout is None and not self.has_answered: seconds = min(2., seconds)
        retries = Retries(self.url, seconds, pause=.02, longest_pause=1.,
            secrets=self._secret_texts, advice=self.advice)
        def attempt():
            servers = self.servers
            result = f(servers.client if key is None else servers.node_client(key))
            self.has_answered = True
            return result
        this_call.remaining = lambda: deadline-monotonic()
        try: return retries.call(attempt, lambda error: self._handle(error, retries))
        finally: this_call.remaining = outer

    def send(self,
        commands:list, # Of tuples: the name of a command, its key, and further arguments
        strict:bool=True, # Raise an error that is among the replies? Else it is returned among them
        from_replica:bool=False, # May a replica answer, if `read_from` is 'replica'?
        timeout:float=None # Seconds for all attempts together; default: the link's
    )->list: # The reply to each
        """Sends all commands before it reads the first reply, and repeats them as `call` does; they must be safe to
        repeat

        Many commands with short replies take less time than one with a long reply, because the server writes one reply
        while the client reads another. Raises as `call`."""
        from_replica = from_replica and self.read_from=='replica'
        def exchange(_):
            replies = self.servers.send(commands, from_replica)
            for command,reply in zip(commands, replies):
                if isinstance(reply, redis.exceptions.NoPermissionError): explain_missing_right(reply, command)
                if isinstance(reply, redis.ResponseError) and (strict or isinstance(reply, redirections)): raise reply
            return replies
        return self.call(exchange, timeout) if commands else []

    def transact(self,
        watch:list, # Keys, all on one server
        reads:list, # Commands that read
        choose, # `choose(*replies)`, the replies to `reads`, returns the commands to run; may be called again
        timeout:float=None # As in `call`
    )->bool: # Has `choose` returned commands, or an empty list?
        """Runs commands in one transaction that depends on what it reads before; again if others change `watch`

        If `choose` returns `None` or an empty list, nothing is run. The whole is repeated as by `call`, if a connection
        fails, and then the transaction may have been run already. Raises as `call`, and what `choose` raises."""
        return self.call(lambda _: self.servers.transact(watch, reads, choose), timeout)

    def value_reads(self,
        keys:list, # Keys of values
        mean_bytes:float # Bytes of a value, roughly
    )->tuple: # Commands for `send`; for each, the places in `keys` of the values in its reply, a `range` or a list
        """The `MGET` commands that read values: about 16, or so many that each reply has a size within `REPLY_BYTES`

        In a cluster there may be more, as each command reads keys of one hash tag only."""
        mean_bytes,(least,most) = max(mean_bytes, 1),REPLY_BYTES
        if mean_bytes*len(keys)>1<<20: keep_freed_memory()
        step = max(1, int(min(max(mean_bytes*len(keys)/16, least), most)/mean_bytes))
        if not self.is_cluster:
            places = [range(k, min(k+step, len(keys))) for k in range(0, len(keys), step)]
            return [('MGET', *keys[place.start:place.stop]) for place in places],places
        by_tag = {}   # one command can only read keys of one slot, which the text in the first braces decides, if any
        for k,key in enumerate(keys):
            tag,end,_ = key.partition('{')[2].partition('}')
            by_tag.setdefault(tag if tag and end else key, []).append(k)
        places = [at[k:k+step] for at in by_tag.values() for k in range(0, len(at), step)]
        return [('MGET', *(keys[k] for k in place)) for place in places],places

    def _secret_texts(self):
        """What messages must not show: passwords, also the one that a `credential_provider` returns now, and other
        secrets; `None` if there are none"""
        if not (self._secret or self._sentinel_secret or hidden_names(self.kwargs)): return None
        provider,password = self.kwargs.get('credential_provider'),None
        if provider is not None:
            with suppress(Exception): *_,password = provider.get_credentials()   # without them, none were sent
        return secret_texts({'secret':self._secret, 'sentinel_secret':self._sentinel_secret, **self.kwargs,
                             'password':password})

    def _handle(self, error, retries):
        """Whether to pause before another attempt, if one may succeed; as `handle` of `Retries.call`

        If not, raises `StoreFull`, `StoreUnavailable`, `StoreError`, or `error` itself. After a redirection, or a
        temporary error of a cluster or of Sentinel, this link connects anew."""
        if isinstance(error, redis.RedisError): _drop_command(error)
        if isinstance(error, redis.OutOfMemoryError):
            raise StoreFull(f'{self.url}: {retries.hide(self._why_full(error))}') from error
        if isinstance(error, refusals):
            is_login = isinstance(error, redis.AuthenticationError)
            hint = ': user and password are those of the URL, redis://USER:PASSWORD@host' if is_login else ''
            if self._needs_secret: hint = '; passwords are not kept in exports: set FASTAI_REMOTE_URL or REDIS_URL'
            if self._not_kept: hint += f" (also not kept: {', '.join(self._not_kept)})"
            raise retries.unavailable(f"refused: {str(error).rstrip('.')}{hint}") from error
        if isinstance(error, redis.InvalidResponse):
            raise retries.unavailable(f'does not speak Redis: {error}') from error
        if isinstance(error.__cause__ or error.__context__, ssl.SSLCertVerificationError):
            raise retries.give_up(error) from error
        if isinstance(error, redirections) and not self.is_cluster:
            self.use_cluster()   # the server has just said so
            return False
        if _is_temporary(error) or isinstance(error, redirections):
            if self.is_cluster or self.is_sentinel: self.reconnect()
            return True
        if isinstance(error, redis.RedisError):
            raise StoreError(f'{self.url}: the server refused a command: {retries.hide(str(error))}') from error
        raise error

    def _why_full(self, error):
        "A text about a full server: used memory and policy of the master that is most nearly full, and `error`"
        try: nodes = self.servers.info('memory')
        except redis.RedisError: nodes = [{}]
        def used_part(memory): return memory.get('used_memory', 0)/memory['maxmemory'] if memory.get('maxmemory') else 0
        memory = max(nodes, key=used_part)   # of a cluster's nodes, the one that is full
        used,limit,policy = (memory.get(k) for k in ('used_memory_human','maxmemory_human','maxmemory_policy'))
        return f'the server has no room: {used} of maxmemory {limit} used, policy {policy} ({error})'

def as_link(
    url:str|RedisLink, # A URL, or a link
    **kwargs # Arguments for a new `RedisLink`
)->RedisLink:
    "`url` if it is a `RedisLink`, else a new link to this URL; raises `TypeError` if a link gets arguments"
    url,kwargs = concealed(url),concealed(kwargs)
    if isinstance(url, RedisLink) and kwargs:
        raise TypeError(f"{', '.join(kwargs)}: a RedisLink has its own; give them to RedisLink(…)")
    return url if isinstance(url, RedisLink) else RedisLink(url, **kwargs)

# --- Calls

# A call is repeated, with growing pauses, while the server does not answer, or answers that it is not ready now: it is
# loading, busy, failing over, or moving keys. Any other answer is believed.

_temporary_errors = redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError
# Beginnings of error replies after which the same command may succeed a little later: a script runs for too long, the
# disk of the server is full, a replica has lost its master, a cluster moves keys or elects a master.
_temporary_replies = ('BUSY ','MISCONF ','NOREPLICAS ','LOADING ','READONLY ','MASTERDOWN ','TRYAGAIN ','CLUSTERDOWN ',
                      'UNBLOCKED ','FAILOVER ')
_temporary_classes = (redis.exceptions.MasterDownError, redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError, redis.exceptions.ClusterError, redis.exceptions.RedisClusterException)

def _drop_command(error):
    "Remove from `error.args` the command that redis-py quotes before the reply: it may contain values of the user"
    if not error.args or not isinstance(error.args[0], str): return
    error.args = re.sub(r'Command # .*? of pipeline caused error: ', '', error.args[0], count=1, flags=re.S),

def _is_temporary(error):
    "May the same call succeed a little later?"
    if isinstance(error, (*_temporary_errors, *_temporary_classes)): return True
    return isinstance(error, redis.ResponseError) and str(error).startswith(_temporary_replies)

@lru_cache(None)
def keep_freed_memory():
    """Let glibc's malloc keep up to 64 MB of freed memory in this process, for the next batch

    By default, glibc returns the memory of a large batch to the system when it is freed. The system then clears each
    page again for the next batch, which takes longer than reading values of 100 KB. The larger a block is that a
    process has freed, the more memory glibc keeps; 32 MB is the largest that counts. So this allocates and frees such
    a block, and never touches its pages. Settings of the user, such as `MALLOC_TRIM_THRESHOLD_`, still apply. Forked
    processes inherit the effect. Other memory allocators are not affected."""
    np.empty((32<<20)-(8<<10), np.uint8)   # freed at once

REPLY_BYTES = 32_000,400_000   # least and most bytes of a reply: enough to cost little, short enough to overlap

def fill_places(
    n:int, # Number of values
    places, # As `RedisLink.value_reads` returned them
    replies # Iterator of the replies to its commands
)->list: # Of `bytes`; None for each value that is not there
    "The values in the order of their keys"
    values = [None]*n
    for at in places:
        if isinstance(at, range): values[at.start:at.stop] = next(replies)
        else:
            for k,value in zip(at, next(replies)): values[k] = value
    return values
