"""Which server answers (one, the master of Sentinel, a node of a cluster, a replica), and which rights a user has

Docs: page `store/redis_servers`"""

import ipaddress, re, socket, threading
from urllib.parse import urlsplit

import hiredis
import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException
from redis.retry import Retry
from redis.sentinel import Sentinel

from ..clock import monotonic
from .connection import call_in_thread, SecretOptions, unseeded

# --- Rights
#
# A server refuses a key with 'No permissions to access a key', and does not say which one. The guide on credentials
# lists the rights that a reader and a writer need. An error should name the one that is missing.

_ALL_KEYS = 'MGET','DEL','UNLINK','WATCH'   # commands whose arguments are all keys

def _key_pattern(key):
    """The pattern of an access list that allows `key`, and the keys of all versions of its dataset that begin alike

    It is `pets@*` for 'pets@7c1:jpg:7', `pets:*` for 'pets:meta', and `{pets.*` for '{pets.3}:jpg:7' in a cluster."""
    prefix = key.split(':')[0]
    if prefix[:1]=='{':   # in a cluster: `{NAME}`, `{NAME.3}` or `{NAME@7c1.3}`
        name,end = re.fullmatch(r'\{(.*?)(@\w+\.\d+|\.\d+)?(?:\}.*)?', prefix, re.S).groups()
        return f"{{{name}{end[0]}*" if end else f'{{{name}}}*'
    return re.sub(r'@\w+$', '@*', prefix) if re.search(r'@\w+$', prefix) else f'{prefix}:*'

def missing_right(
    reply:str, # What the server answered
    command:tuple # The command and its arguments
)->str:
    """A sentence that names the right which the user of a connection lacks

    It is the right to the keys in `command`, such as `~pets:*`, if there are arguments and the reply speaks of keys,
    and else the right to the command, such as `+get`."""
    name = str(command[0]).upper()
    # `reply` may also contain the name of the user, which has no spaces
    if len(command)==1 or not re.search(r' permissions to access .*\bkeys?\b', reply):
        right = name.lower().replace(' ', '|')
        return f'this user may not run {name}: its access list (ACL) needs +{right} ({reply})'
    keys = [key.decode(errors='replace') if isinstance(key, bytes) else str(key) for key in command[1:]]
    if name not in _ALL_KEYS: keys = keys[:1]
    patterns = ' '.join(dict.fromkeys(f'~{_key_pattern(key)}' for key in keys))
    return f'this user may not {name} {keys[0]!r}: its access list (ACL) needs {patterns} ({reply})'

# A key is on another node, or its slot is being moved.
redirections = (redis.exceptions.MovedError, redis.exceptions.AskError, redis.exceptions.ClusterCrossSlotError,
    redis.exceptions.TryAgainError)

# This sentence is added where a command fails, because only there the command is known.

def _check_replies(commands, replies, strict=True):
    """Raises the first error among `replies` to `commands`, tuples; without `strict` only one of `redirections`

    An error about a missing right names it."""
    for command,reply in zip(commands, replies):
        if not isinstance(reply, redis.ResponseError): continue
        if isinstance(reply, redis.exceptions.ExecAbortError) and 'NOPERM' in str(reply):
            reply = redis.exceptions.NoPermissionError(str(reply))   # the user may not run EXEC
        if isinstance(reply, redis.exceptions.NoPermissionError): reply.args = missing_right(str(reply), command),
        if strict or isinstance(reply, redirections): raise reply

class _Explaining:
    """Mixin for a client of redis-py: errors about missing rights name the command, or the pattern of keys

    It comes before the client among the base classes."""
    def execute_command(self, *args, **options):
        try: return super().execute_command(*args, **options)
        except redis.exceptions.NoPermissionError as error:
            error.args = missing_right(str(error), args),
            raise

class ExplainingClient(_Explaining, redis.Redis):
    "A client of Redis whose errors about missing rights name the command, or the pattern of keys; not in pipelines"

class ExplainingCluster(_Explaining, redis.RedisCluster):
    "A client of a cluster whose errors about missing rights name the command, or the pattern of keys; not in pipelines"

# --- Rights of a user

# A server checks the rights of a user on a command before it queues the command in a transaction. A transaction that is
# not executed has changed nothing. So the rights to write are tested without writing. Reading is tested by reading keys
# that do not exist.

# What is sent to train, and to write: the name of a command and the arguments after its key
READ_COMMANDS = ('MGET',),('GETRANGE',0,0),('BITFIELD_RO','GET','u1',0),('STRLEN',)
WRITE_COMMANDS = (('GET',), ('SET','a'), ('MSET','a'), ('SETRANGE',0,'a'), ('DEL',), ('UNLINK',), ('HSET','a','b'),
                  ('HDEL','a'), ('EXPIRE',1))

def missing_rights(
    client, # A `redis.Redis`
    commands, # Tuples of a name and arguments; in a transaction, the first argument of the first one is a key
    in_transaction # Only queue them after MULTI, and discard them? Commands that write must not be sent without
):
    """Returns the rights that the user lacks for `commands`, such as `+set` or `~pets:*`: a list of texts

    In a transaction, nothing is changed, and WATCH, UNWATCH, MULTI and EXEC are tried, too. Without the right to MULTI,
    `commands` are not tried."""
    refused,client = [],client.client()   # one connection
    def run(*command):
        client.connection.send_packed_command([hiredis.pack_command(command)])
        try: client.connection.read_response()
        except (redis.exceptions.NoPermissionError,redis.exceptions.ExecAbortError) as e:   # the latter of EXEC
            if command[0]=='MEMORY': command = 'MEMORY USAGE',command[2]
            refused.append(re.search(r' needs (.*?) \(', missing_right(str(e), command))[1])
        except redis.ResponseError: pass   # a command that the server does not know, or a key of another node
    try:
        if in_transaction:
            run('WATCH', commands[0][1])
            run('UNWATCH')
            run('MULTI')
            if '+multi' not in refused:
                run('EXEC')   # of nothing
                run('MULTI')
        if '+multi' not in refused:
            for command in commands: run(*command)
    finally:
        client.connection.disconnect()   # this discards a transaction
        client.close()
    return list(dict.fromkeys(refused))

# --- Connections with a deadline

# The timeouts of a socket start again with each byte that arrives, so they do not limit how long a call takes. A socket
# of this module knows how much time the call has left that uses it. Each thread makes one call at a time.

# `remaining()` is how many seconds the call of this thread has left
this_call = threading.local()

class _TimedSocket:
    "A socket that waits for at most `socket_timeout` at a time, and not beyond the deadline of the call that uses it"
    def __init__(self, sock):
        self._sock,self._timeout = sock,sock.gettimeout()
        self._limit = self._timeout   # what the socket has now
    def __getattr__(self, name): return getattr(self._sock, name)
    def settimeout(self, timeout): self._timeout = timeout

    def _set_limit(self):
        """Set the timeout of the socket for the next operation; raise `TimeoutError` if the call has no time left

        A timeout of 0, of a socket that does not wait, stays, and raises nothing."""
        waits = self._timeout!=0
        seconds = _limited(self._timeout) if waits else 0
        if waits and seconds is not None and seconds<=0: raise socket.timeout('the time is over')
        if seconds!=self._limit: self._sock.settimeout(seconds)   # a system call
        self._limit = seconds

    def recv_into(self, *args):
        self._set_limit()
        return self._sock.recv_into(*args)

    def recv(self, *args):
        self._set_limit()
        return self._sock.recv(*args)

    def sendall(self, *args):
        self._set_limit()
        return self._sock.sendall(*args)

def _limited(seconds):
    """`seconds`, or the time that the call of this thread has left, if that is less; `None` means no limit

    The time left is negative after the deadline."""
    remaining = getattr(this_call, 'remaining', None)
    if remaining is None: return seconds
    return remaining() if seconds is None else min(seconds, remaining())

def _is_address(host):
    "Is `host`, a `str`, an IP address or 'localhost', so that no name server is asked for it?"
    try: ipaddress.ip_address(host)
    except ValueError: return host=='localhost'
    return True

class _Timed:
    """Mixed into a connection of redis-py: connecting, sending and receiving end at the deadline of the call

    If there is a `socket_timeout`, and the name of the host has to be looked up, redis-py connects in a thread, since a
    look-up cannot be limited. Then `_connect` raises `DeadlinePassed` when the time is over."""
    def _connect(self):
        connect,limits = super()._connect,(self.socket_connect_timeout,self.socket_timeout)
        try:
            self.socket_connect_timeout = _limited(limits[0])
            self.socket_timeout = _limited(limits[1])   # of the TLS handshake
            if self.socket_timeout is not None and self.socket_timeout<=0: raise socket.timeout('the time is over')
            is_found = self.socket_timeout is None or self.host is None or _is_address(self.host)
            sock = _TimedSocket(connect() if is_found else call_in_thread(connect, self.socket_timeout))
        finally: self.socket_connect_timeout,self.socket_timeout = limits
        sock.settimeout(self.socket_timeout)
        return sock

class _Connection(_Timed, redis.Connection): pass
class _TLSConnection(_Timed, redis.SSLConnection): pass
class _UnixConnection(_Timed, redis.UnixDomainSocketConnection):
    host = port = None   # redis-py reads them when it records that it could not connect
_connections = {'redis':_Connection, 'rediss':_TLSConnection, 'unix':_UnixConnection}

# --- Packing commands

# The two commands that read a batch are packed directly, because redis-py's check of each argument takes longer than
# packing.

class _Packer(redis.connection.HiredisRespSerializer):
    """Packs the two commands that read a batch without redis-py's check of each argument

    These are `MGET`, and `BITFIELD_RO` with a key, a type and a list of positions. A type such as 'i64+u32' means that
    each element consists of two values, and both are read. Other commands are packed by redis-py. `pack` returns a list
    of `bytes`."""
    def pack(self, *args):
        if args[0]=='MGET': return [hiredis.pack_command(args)]
        if args[0]!='BITFIELD_RO': return super().pack(*args)
        _,key,kind,positions = args
        if '+' in kind: return [self._pack_pairs(key, *kind.split('+'), positions)]
        get = f'$3\r\nGET\r\n${len(kind)}\r\n{kind}\r\n$'
        gets = ''.join([f'{get}{len(i)+1}\r\n#{i}\r\n' for i in map(str, positions)])
        return [self._command(2+3*len(positions), key, gets)]

    def _pack_pairs(self, key, first, second, positions):
        "The command, `bytes`, for elements of two values of types `first` and `second`, read by their offsets in bits"
        width = int(first[1:])
        size = width+int(second[1:])
        get_first,get_second = (f'$3\r\nGET\r\n${len(kind)}\r\n{kind}\r\n$' for kind in (first,second))
        offsets = [(str(size*i), str(size*i+width)) for i in positions]
        gets = ''.join([f'{get_first}{len(a)}\r\n{a}\r\n{get_second}{len(b)}\r\n{b}\r\n' for a,b in offsets])
        return self._command(2+6*len(positions), key, gets)

    def _command(self, n_args, key, gets):
        return f'*{n_args}\r\n$11\r\nBITFIELD_RO\r\n${len(key.encode())}\r\n{key}\r\n{gets}'.encode()

_packer = _Packer()

# --- Sending many commands

# All commands are sent before the first reply is read. If a thread is interrupted, its connections are closed, because
# the next call must not read the rest of these replies.

def _exchange(requests):
    """Send the commands of all `requests`, a list of `(connection pool, commands)`, then read the replies

    Returns a list of replies for each request. A reply that is an error is a `redis.ResponseError` in the list. If a
    connection fails, all of them are closed, and its error is raised."""
    connections = []
    try:
        for pool,commands in requests:
            connection = pool.get_connection()
            connections.append((pool, connection))
            _send(connection, commands)
        return [[_read_reply(connection) for _ in commands]
                for (_,connection),(_,commands) in zip(connections, requests)]
    except BaseException:   # also if this thread is interrupted: the next call must not read the rest of these replies
        for _,connection in connections: connection.disconnect()
        raise
    finally:
        for pool,connection in connections: pool.release(connection)

def _send(connection, commands):
    connection.send_packed_command([b''.join([part for c in commands for part in _packer.pack(*c)])])

def _read_reply(connection):
    try: return connection.read_response()
    except redis.ResponseError as e: return e

# --- One server

# A replica may answer when values are read, if the user says so (`read_from='replica'`). The master names its replicas.
# One that does not answer is left alone for some seconds, and the master answers instead.

refusals = (redis.AuthenticationError, redis.exceptions.AuthorizationError, redis.exceptions.NoPermissionError,
             redis.exceptions.AuthenticationWrongNumberOfArgsError)

def _refusal_in(error):
    "`error`, or the first of its causes, that is one of `refusals`; None if there is none"
    while error is not None and not isinstance(error, refusals): error = error.__cause__ or error.__context__
    return error

def as_options(
    secret:str, # The password, or None
    socket_timeout:float # Seconds to wait for one reply
)->dict:
    "Options of redis-py for all connections to servers: no retries, and 2 seconds at most to connect"
    return SecretOptions(password=secret, socket_timeout=socket_timeout, socket_connect_timeout=min(2., socket_timeout),
        socket_read_size=1<<18, protocol=2, lib_name=None, lib_version=None, retry=Retry(NoBackoff(), 0))

def _client(url, options):
    own = {'command_packer':_packer, 'connection_class':_connections[urlsplit(url).scheme]}
    return ExplainingClient.from_url(url, **{**own, **options})

def _with_node(url, host, port):
    "`url` with another host and port; `unix://` becomes `redis://`"
    parts = urlsplit(url)
    if parts.scheme=='unix': parts = parts._replace(scheme='redis', path='')
    login,at,_ = parts.netloc.rpartition('@')
    return parts._replace(netloc=f"{login}{at}{f'[{host}]' if ':' in host else host}:{port}").geturl()

class SingleServer:
    """A server, and its replicas

    It is the base class of `SentinelServers` and `ClusterServers`, which have the same methods."""
    is_cluster = False
    pause = 5. # Seconds for which replicas are left alone if none was found, or one failed or replied with an error
    _replica = None # A client for the replica that is asked; `None` for a cluster, and while none is chosen
    _looks_again = 0. # When replicas may be asked, a time of `monotonic`

    def __init__(self,
        url:str, # `redis://`, `rediss://` or `unix://`, without the password
        options:dict # For redis-py, see `as_options`
    ):
        self.url,self.options = url,options
        self.client = _client(url, options)

    def node_client(self,
        key:str # A key
    )->redis.Redis:
        "A client for the server that has `key`"
        return self.client

    def masters(self)->list: # Of `redis.Redis`
        "A client for each server that accepts writes"
        return [self.client]

    def send(self,
        commands:list, # Of tuples: the name of a command, its key, and further arguments; `BITFIELD_RO`: see `_Packer`
        strict:bool=True, # Raise an error that is among the replies? Else only one of `redirections`
        from_replica:bool=False # May a replica answer?
    )->list: # The reply to each; an exception if it is an error
        """Send all commands, then read the replies; raises errors of redis-py if a connection fails

        With `from_replica`, the masters are asked if there is no replica, or it fails or replies with an error. In a
        cluster, a command whose keys have moved to another node is repeated there, and an error of that is raised."""
        if from_replica and monotonic()>=self._looks_again:
            try: replies = self._ask_replicas(commands)
            except (redis.RedisError,RedisClusterException): replies = None
            if replies is not None and not any(isinstance(reply, Exception) for reply in replies): return replies
            self._replica,self._looks_again = None,monotonic()+self.pause
        replies = self._ask_masters(commands)
        _check_replies(commands, replies, strict)
        return replies

    def transact(self,
        watch:list, # Keys, all on one server
        reads:list, # Commands that read, as those of `send`
        choose # `choose(*replies)`, the replies to `reads`, returns the commands to run; may be called again
    )->bool: # Has `choose` returned commands, or an empty list?
        """Runs commands in one transaction that depends on what it reads before; again if others change `watch`

        If `choose` returns `None` or an empty list, nothing is run. Raises errors of redis-py, also of a command."""
        pool = self.node_client(watch[0]).connection_pool
        connection = pool.get_connection()
        def ask(*commands):
            _send(connection, commands)
            replies = [_read_reply(connection) for _ in commands]
            _check_replies(commands, replies)
            return replies
        try:
            while True:
                commands = choose(*ask(('WATCH', *watch), *reads)[1:])
                if not commands:
                    ask(('UNWATCH',))
                    return commands is not None
                *_,replies = ask(('MULTI',), *commands, ('EXEC',))
                if replies is None: continue   # others have changed one of the keys
                _check_replies(commands, replies)
                return True
        except BaseException:   # as in `_exchange`
            connection.disconnect()
            raise
        finally: pool.release(connection)

    def _ask_masters(self, commands):
        "The replies of the masters, as those of `send`"
        return _exchange([(self.client.connection_pool, commands)])[0]

    def _ask_replicas(self, commands):
        "The replies of a replica, as those of `send`: the one asked before or a random one; None if there is none"
        if self._replica is None:
            nodes = self._replicas()
            if not nodes: return None
            self._replica = _client(_with_node(self.url, *unseeded.choice(nodes)), self.options)
        return _exchange([(self._replica.connection_pool, commands)])[0]

    def _replicas(self):
        "The addresses of the replicas that are online, a list of `(host, port)`"
        found = self.client.info('replication')
        replicas = [found[name] for name in found if re.fullmatch(r'slave\d+', name)]
        return [(replica['ip'], replica['port']) for replica in replicas if replica['state']=='online']

# --- Sentinel

# Sentinels know which server is the master. After a failover, writes to the old master fail, or it does not answer;
# then the sentinels are asked again.

class SentinelServers(SingleServer):
    """The master that a group of sentinels names, and its replicas

    The sentinels are asked for the master when this is made. Raises `ValueError` if `url` has no name, and errors of
    redis-py if no sentinel knows the master."""
    def __init__(self,
        url:str, # `redis+sentinel://host1:26379,host2:26379/NAME` or `…/NAME/DB`, `rediss+sentinel://` for TLS
        options:dict, # For redis-py; for the servers
        sentinel_secret:str=None # Password of the sentinels, if they have one
    ):
        parts = urlsplit(url)
        self.scheme = parts.scheme.partition('+')[0]
        name,_,self.db = parts.path.strip('/').partition('/')
        if not name: raise ValueError(f'{url}: want the name that the sentinels know the server by: {url}/NAME')
        nodes = nodes_in(url, 26379)
        seconds = options['socket_timeout']/len(nodes)   # one that is silent must not use up the time of the call
        kwargs = SecretOptions(password=sentinel_secret, socket_timeout=seconds, socket_connect_timeout=seconds,
                      retry=Retry(NoBackoff(), 0), ssl=self.scheme=='rediss')
        in_url = redis.connection.parse_url(self._url_of(url, *nodes[0]))
        kwargs |= {k:v for k,v in {**options, **in_url}.items() if k.startswith('ssl_')}
        self._sentinel,self._name = Sentinel(nodes, sentinel_kwargs=kwargs),name
        super().__init__(self._url_of(url, *self._sentinel.discover_master(name)), options)

    def _url_of(self, url, host, port):
        parts = urlsplit(_with_node(url, host, port))
        return parts._replace(scheme=self.scheme, path=f'/{self.db}' if self.db else '').geturl()

    def _replicas(self): return self._sentinel.discover_slaves(self._name)

    def count_replicas(self)->int:
        """How many replicas are not down, by the answer of the first sentinel that knows such a replica

        0 if the sentinels that answer know none, or this user may not ask. Raises `redis.ConnectionError` if no
        sentinel answers, or all reply with other errors."""
        is_known = False
        for sentinel in self._sentinel.sentinels:
            try: replicas = self._sentinel.filter_slaves(sentinel.sentinel_slaves(self._name))
            except redis.exceptions.NoPermissionError: replicas = []   # this user may not know
            except (redis.ConnectionError,redis.TimeoutError,redis.ResponseError): continue
            if replicas: return len(replicas)
            is_known = True
        if is_known: return 0
        raise redis.ConnectionError(f'no sentinel tells the replicas of {self._name!r}')

# --- Cluster

# redis-py knows which node has a key, and follows a command to another node. It gives up if the node in the URL is not
# there, so all nodes that are known are tried. Clients of single nodes are kept, as long as redis-py keeps their
# connections.

def nodes_in(
    url:str, # A URL that may have several hosts, separated by commas
    default_port:int=6379 # Port of a host without one
)->list: # Of `(host, port)`
    "The addresses in `url`; none for a unix socket"
    parts = urlsplit(url)
    if parts.scheme=='unix': return []
    nodes = [urlsplit(f'//{node}') for node in parts.netloc.rpartition('@')[2].split(',')]
    return [(node.hostname or 'localhost', node.port or default_port) for node in nodes]

class _ClusterPool(redis.ConnectionPool):
    """Connections to a node of a cluster, which end at the deadline of a call

    Their class is `_TLSConnection` if `connection_class`, which redis-py has chosen by the URL, is one for TLS, else
    `_Connection`."""
    def __init__(self, connection_class=redis.Connection, **kwargs):
        scheme = 'rediss' if issubclass(connection_class, redis.SSLConnection) else 'redis'
        super().__init__(connection_class=_connections[scheme], command_packer=_packer, **kwargs)

class ClusterServers(SingleServer):
    """The nodes of a Redis Cluster

    A node is asked at once for all nodes. Raises the error of redis-py if none of those in `nodes` answers."""
    is_cluster = True

    def __init__(self,
        url:str, # `redis://` or `rediss://`, of one or several nodes
        options:dict, # For redis-py, see `as_options`
        nodes:list # Nodes that are known, `(host, port)`, at least one; the first that answers tells the others
    ):
        for host,port in nodes:
            try:
                self.client = ExplainingCluster.from_url(_with_node(url, host, port),
                                                         connection_pool_class=_ClusterPool, **options)
            except (redis.RedisError,RedisClusterException) as e: error = e
            else: break
        else: raise _refusal_in(error) or error
        self.url,self.options,self._clients,self._replica_clients = url,options,{},{}
        self._choice = unseeded.randrange(1<<30)   # of replicas: this object asks one of each node
        found = [(node.host,node.port) for node in self.client.get_nodes()]
        self.nodes = [*dict.fromkeys([*nodes_in(url), *found])]

    def node_client(self, key): return self._client_of(self.client.get_node_from_key(key))
    def _client_of(self, node):
        "A client for `node`, a `ClusterNode` of redis-py; it is kept as long as the node has the same connections"
        pool = self.client.get_redis_connection(node).connection_pool
        client = self._clients.get(node.name)
        if client is None or client.connection_pool is not pool:
            client = self._clients[node.name] = ExplainingClient(connection_pool=pool)
        return client

    def masters(self):
        return [self._client_of(node) for node in sorted(self.client.get_primaries(), key=lambda node: node.name)]

    def _replica_of(self, key):
        "A client, which is kept, for a replica of the node that has `key`; None if there is none"
        replicas = self.client.nodes_manager.slots_cache.get(self.client.keyslot(key), [])[1:]
        if not replicas: return None
        node = replicas[self._choice%len(replicas)]
        if node.name not in self._replica_clients:
            url = _with_node(self.url, node.host, node.port)
            self._replica_clients[node.name] = _client(url, {**self.options, 'redis_connect_func':_connect_read_only})
        return self._replica_clients[node.name]

    def _ask_replicas(self, commands):
        return self._send_to_nodes(commands, lambda key: self._replica_of(key) or self.node_client(key))

    def _ask_masters(self, commands):
        replies = self._send_to_nodes(commands, self.node_client)
        return [self._redirected(command) if isinstance(reply, redirections) else reply
                for command,reply in zip(commands, replies)]

    def _send_to_nodes(self, commands, client_of):
        "Send each command to the server of `client_of(key)`, a `redis.Redis`; returns the replies, as those of `send`"
        by_pool = {}
        for k,command in enumerate(commands):
            by_pool.setdefault(client_of(command[1]).connection_pool, []).append(k)
        replies = [None]*len(commands)
        answers = _exchange([(pool, [commands[k] for k in at]) for pool,at in by_pool.items()])
        for at,answer in zip(by_pool.values(), answers):
            for k,reply in zip(at, answer): replies[k] = reply
        return replies

    def _redirected(self, command):
        """The reply to `command`, whose keys are on another node now, or are being moved; an error is raised

        The keys of `MGET` are read one by one, as they may be on different nodes."""
        if command[0]=='MGET': return [self.client.execute_command('GET', key) for key in command[1:]]
        return self.client.execute_command(*command)

def _connect_read_only(connection):
    "Called by redis-py for a new connection: a replica in a cluster answers only after the command READONLY"
    connection.on_connect()
    connection.send_command('READONLY')
    connection.read_response()
