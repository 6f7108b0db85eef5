"""The lock of a dataset in Redis, and transactions that check it

Docs: page `write/redis_lock`"""

# Only the process that holds the lock leads an ingest, and on a single server every write of a worker checks in the
# same transaction that the lock still holds the leader's token. So a worker that outlived its ingest cannot write into
# a later one. A lock is taken over if its owner is dead on this machine, or if its lease of 30 s has run out.

import json, os, threading, uuid

from ..clock import wait
from ..core import StoreBusy
from ..store.redis_link import RedisLink
from .base import held_locks, host_id, is_alive, LEASE_SECONDS, ServerRestarted
from .redis_state import IngestKeys, parse_lock, watched_transaction
from ..store.redis import home_of

def _is_held(token, pid):
    "Returns whether process `pid` of this machine holds `token`: if it is another one than this, whether it is alive"
    return token in held_locks if pid==os.getpid() else is_alive(pid)

class RedisLock:
    "The right to write a dataset; the process that holds it leads, and its workers write under copies of this object"
    def __init__(self,
        link:RedisLink, # The server
        name:str, # Name of the dataset
        token:bytes=None, # What the lock holds while it is this one's; default: `take` chooses it
        tags:int=None # Hash tags of a new layout, 0 on a single server; default: `take` finds out
    ):
        self.link,self.name = link,name
        self.token,self.tags = token,tags
        self.keys = IngestKeys(name, tags or 0)

    def take(self,
        progress=None # Called without arguments, for the message: returns how far the holder is, as `progress_text`
    ):
        "Takes the lock, and renews its lease in a thread until `close`; sets `token` and `tags`; raises `StoreBusy`"
        self.tags = self._choose_tags()
        self.keys = IngestKeys(self.name, self.tags)
        self.token = json.dumps({'host':host_id(), 'pid':os.getpid(), 'id':uuid.uuid4().hex}).encode()
        held_locks.add(self.token)
        try: self._acquire(progress)
        except BaseException:   # if the server has the token after all, the next one who comes removes it
            held_locks.discard(self.token)
            raise
        self.stop = threading.Event()
        threading.Thread(target=self._renew, args=(self.stop,), daemon=True).start()

    def _acquire(self, progress):
        """Stores the token in the lock; raises `StoreBusy` if it is held, also if another writer of this process has it

        A lock that was left by a process of this machine that has ended is replaced. `progress` is as in `take`."""
        key = self.keys.lock
        def acquire(client):
            is_new = client.set(key, self.token, nx=True, ex=LEASE_SECONDS)
            return is_new or client.get(key)==self.token   # a reply may have been lost
        for _ in range(3):
            if self.link.call(acquire): break
            other_token = self.link.call(lambda c: c.get(key))
            if other_token is None: continue   # just released
            holder = parse_lock(other_token)   # a damaged one is waited for, until its lease ends
            if holder['host']!=host_id() or _is_held(other_token, holder['pid']): raise self._busy(holder, progress)
            self._transaction_if(other_token, lambda p: p.delete(key))
        else: raise StoreBusy(f'{self.link.url}: the lock on {self.name!r} keeps changing hands; try again')

    def _busy(self, holder, progress):
        return StoreBusy(f"{self.link.url}: process {holder['pid']} on {holder['host'].split()[0]} is writing "
                         f"{self.name!r} now{progress() if progress else ''}; if it is dead, its lease ends within "
                         f"{LEASE_SECONDS} s")

    def _choose_tags(self):
        "Returns the number of hash tags of a new dataset: 0, or in a cluster a multiple of the masters, at least 12"
        self.link.find_cluster()
        if not self.link.is_cluster: return 0
        masters = self.link.call(lambda _: len(self.link.servers.masters()))
        return masters*max(2, -(-12//masters))

    def _renew(self, stop):
        "Runs in a thread: renews the lease regularly until the event `stop` is set"
        key = self.keys.lock
        while not wait(stop, LEASE_SECONDS/3):
            try: self._transaction_if(self.token, lambda p: p.expire(key, LEASE_SECONDS))
            except Exception: pass   # the next turn tries again; writes notice a lock that is lost

    def close(self):
        """Releases the lock if it is still this one's

        Does not wait long for a server that is away. Raises `StoreUnavailable` then; the lease will end by itself."""
        self.stop.set()
        held_locks.discard(self.token)
        def release(_): self._transaction_if(self.token, lambda p: p.delete(self.keys.lock))
        self.link.call(release, timeout=min(self.link.timeout, 5.))

    def server_run(self)->str:
        "Returns the server's `run_id`, which changes when it restarts; in a cluster, those of all masters, with commas"
        def read(_): return ','.join(master.info('server').get('run_id', '') for master in self.link.servers.masters())
        return self.link.call(read)

    def lost(self)->StoreBusy:
        "Returns the error for a write without the lock"
        return StoreBusy(f'{self.name}: the lock was lost (this process slept, another took over, or the server forgot '
                         'it); repeat the same call to finish')

    # --- Transactions

    # A transaction reads a key and then queues commands, which the server runs only if the key has not changed
    # meanwhile.

    def _transaction_if(self, token, queue, run=None, watch=(), when=None):
        """Does what `transaction` does, only if the lock holds `token`; returns `False` if it does not

        In a cluster, the sets of names are left to `transaction`."""
        key = self.keys.lock
        restarted = ServerRestarted(f'{self.link.url}: the server restarted while {self.name!r} was written; '
                                'repeat the same call to go on')
        if run is not None and self.tags and self.server_run()!=run: raise restarted
        def attempt(p):
            if p.get(key)!=token: return False
            if run is not None and p.info('server').get('run_id') not in run.split(','): raise restarted
            if when is not None and not when(p): return True
            p.multi()
            queue(p)
            return p.execute() or True
        return self.link.call(lambda client: watched_transaction(client, [key, *watch], attempt), key=key)

    def transaction(self,
        queue, # `queue(pipeline)` queues the commands; may be called again
        run:str=None, # The `server_run` that must still be the current one; default: any
        add=(), # Keys of sets of names that hold the name of the dataset afterwards
        discard=(), # Keys of sets of names that do not hold it afterwards
        watch=(), # More keys on the same server, whose changes by others repeat the call
        when=None # `when(pipeline)`: returns whether to run the commands, by what it reads of `watch`; default: always
    ): # The list of replies; `True` if it is empty, or `when` returned a false value
        """Runs commands in one transaction while the lock is held

        Raises `StoreBusy` if it is not, and `ServerRestarted` if `run` has ended.

        In a cluster, the sets of names are on other nodes: the name is added before, and discarded after the
        transaction."""
        def queue_all(p):
            queue(p)
            if self.tags: return
            for key in add: p.sadd(key, self.name)
            for key in discard: p.srem(key, self.name)
        if self.tags:
            for key in add: self.link.call(lambda c: c.sadd(key, self.name))
        replies = self._transaction_if(self.token, queue_all, run, watch, when)
        if not replies: raise self.lost()
        if self.tags:
            for key in discard: self.link.call(lambda c: c.srem(key, self.name))
        return replies

    # --- Writes

    # In a cluster, a transaction can only check a key of the slot that it writes to. So it checks the lock only for
    # what describes the ingest: records, plan, and manifest. A value needs no check, since a number is a place in one
    # plan: whoever writes it late writes the same sample. (Decision note 0038.)

    def write(self,
        commands:list, # Tuples: the name of a command, its key, and further arguments
        run:str=None # As in `transaction`
    ):
        """Runs commands while the lock is held; raises as `transaction`

        On a single server this is one transaction. In a cluster, only commands for the keys that describe the ingest
        are one, after all others: values of nobody else have these keys, and whoever is late writes the same samples
        there."""
        home,others = [],[]
        for command in commands: (home if not self.tags or self.is_home(command[1]) else others).append(command)
        self.link.send(others)
        def queue(p):
            for command in home: p.execute_command(*command)
        if home: self.transaction(queue, run)

    def unlink(self,
        keys:list, # Names that begin alike, up to a number
        run:str=None # As in `transaction`
    ):
        """Removes keys while the lock is held; raises `StoreBusy` if it is not, and `ServerRestarted`

        In a cluster, the lock is checked before."""
        if not self.tags: return self.write([('UNLINK', *keys)], run)
        self.transaction(lambda p: p.exists(self.keys.lock), run)
        # keys without a hash tag are of a dataset that was written before the cluster was
        self.link.send([('UNLINK', *keys)] if keys[0][0]=='{' else [('UNLINK', key) for key in keys])

    def is_home(self,
        key:str # A key of the dataset
    )->bool:
        "In a cluster, is `key` on the node of the lock, as what describes the dataset and the ingest is?"
        return key.startswith(home_of(self.name, self.tags))
