"""A private Redis server that keeps its data, for a person at a terminal

Docs: page `cli/serve`"""

# `redis_server` in Python ends with the notebook. `fastai_remote serve DIR` is the same server in a process of its own,
# with its data in a folder. Its port and its password are chosen when it is started for the first time, and kept in the
# file `url` of the folder, which only its owner can read. So the URL stays the same. That a folder has one server at a
# time, waiting for its data to be read, and stopping it are the work of `RedisServer`.

import os, re, signal
from contextlib import contextmanager
from pathlib import Path
from subprocess import TimeoutExpired
from urllib.parse import unquote, urlsplit

from ..core import StoreError
from ..store.server import redis_server, RedisServer

URL_FILE = 'url'

def memory_setting(text:str)->str:
    "A number of bytes, or one with a unit such as `8gb`, in small letters; raises `ValueError` for any other text"
    if not re.fullmatch(r'[0-9]+(k|kb|m|mb|g|gb)?', text.lower()):
        raise ValueError(f'--memory is a number of bytes such as 500mb or 8gb, not {text!r}')
    return text.lower()

def _saved_login(file):
    """Returns `(port, password)` of the URL in `file`; `(None, None)` if there is no such file, or it is empty

    Raises `StoreError`, which names `file`, unless it is a `redis://` URL with both: the file may be the user's."""
    try:
        url = file.read_text().strip() if file.exists() else ''
        if not url: return None,None
        parts = urlsplit(url)
        if parts.scheme=='redis' and parts.port and parts.password: return parts.port,unquote(parts.password)
    except ValueError: pass
    raise StoreError(f'{file} is not the URL of a server that was served here: choose another folder, or, if this '
                     'file is damaged, remove it: then port and password are chosen again')

def _open_private(path, flags): return os.open(path, flags|os.O_NOFOLLOW, 0o600)

# The data is written to an append-only file, to the disk once a second, so that even a server that is killed loses one
# second at most. A folder with an older snapshot and no such file is read and kept as a snapshot, because Redis would
# not read it otherwise.

def serving(
    folder:str|Path, # Folder that keeps the data
    port:int=None, # TCP port on this machine; default: as before, and a free one at first
    memory:str=None # Bytes that the data may take, such as `8gb`; default: no limit
)->RedisServer:
    """Start the server of a folder, a context manager; its URL is in `URL_FILE` of the folder

    Raises `StoreBusy` if the folder has a server already, `ValueError` for `memory`, and `StoreError` if the server
    does not start, such as for a port that is used, or if another file is where the URL is kept."""
    file,conf = Path(folder)/URL_FILE,{} if memory is None else {'maxmemory':memory_setting(memory)}
    saved_port,password = _saved_login(file)
    if password: conf['requirepass'] = password
    if not (Path(folder)/'dump.rdb').exists(): conf |= dict(appendonly='yes', save='')
    try: server = redis_server(folder, port or saved_port or -1, **conf)
    except RuntimeError as e: raise StoreError(f'the server did not start, --port chooses another port: {e}') from None
    with open(file, 'w', opener=_open_private) as f: f.write(server.url+'\n')
    return server

# --- Until Ctrl-C

# The process waits for the server, until a signal arrives. It then tells the server to stop, which may take a while, as
# the server writes its data first. A second signal ends the waiting, and the server goes on writing.

@contextmanager
def _signals_interrupt():
    "Within the block, SIGINT, SIGTERM and SIGHUP raise `KeyboardInterrupt`, except those that this process ignores"
    signals = [signum for signum in (signal.SIGINT,signal.SIGTERM,signal.SIGHUP)
               if signal.getsignal(signum)!=signal.SIG_IGN]   # nohup
    before = {signum:signal.signal(signum, signal.default_int_handler) for signum in signals}
    try: yield
    finally:
        for signum,handler in before.items(): signal.signal(signum, handler)

def _stop(server, say):
    "Stop a `RedisServer`, and wait until it has saved its data; raises `StoreError` if a signal ends the waiting"
    saves = (f'{server.dir}: the server is still saving its data, as process {server.proc.pid}; '
             f'see {server.dir}/server.log')
    try:
        server.proc.send_signal(signal.SIGTERM)
        try: server.proc.wait(3)
        except TimeoutExpired:
            say(saves)
            server.proc.wait()
    except KeyboardInterrupt: raise StoreError(saves) from None
    finally: server.close(wait=False)

def serve_folder(folder:str|Path, port:int=None, memory:str=None, ready=print, say=print):
    """Run a private Redis server that keeps its data, as `serving` starts it, until SIGINT, SIGTERM or SIGHUP

    `ready` is called with the server when it can be used, and `say` with a line of text.
    A signal that this process ignores, as with `nohup`, stays ignored. Raises what `serving` raises, and `StoreError`
    if the server ends by itself, or still saves its data when a second signal ends the waiting for it."""
    server = None
    with _signals_interrupt():
        try:
            server = serving(folder, port, memory)
            ready(server)
            server.proc.wait()
        except KeyboardInterrupt:
            if server is not None: _stop(server, say)   # else it was not yet ready, and has ended
            return
    log = (server.dir/'server.log').read_text(errors='replace')[-800:]
    server.close(wait=False)
    raise StoreError(f'{server.dir}: the server has ended: {log}')
