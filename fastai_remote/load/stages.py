"""The stages that a batch passes, and how long each of them takes

Docs: page `load/stages`"""

# A function of a stage has the decorator `stage`. It measures nothing unless a `Stopwatch` runs, which only a loader
# starts whose batches are timed. A context variable has the stopwatch of the loader for which a thread works: threads
# get a copy of the context of the thread that starts their work, and loaders may take turns in one thread.

import threading
from contextvars import ContextVar
from functools import wraps

from ..clock import monotonic

_stopwatch = ContextVar('stopwatch', default=None)

def stage(
    name:str # `fetch`, `decode`, `transform` or `collate`
): # A decorator
    "The time of each call is added to stage `name`, but for that of stages within it; only if the batch is timed"
    def decorate(f):
        @wraps(f)
        def with_stopwatch(*args, **kwargs):
            watch = _stopwatch.get()
            return f(*args, **kwargs) if watch is None else watch.call(name, f, args, kwargs)
        return with_stopwatch
    return decorate

class Stopwatch:
    "Adds up the seconds of each stage, in all threads that work for a loader"
    def __init__(self): self.seconds,self.lock,self.local = {},threading.Lock(),threading.local()

    def call(self, name, f, args, kwargs):
        "`f(*args, **kwargs)`; its time is added to stage `name`, but for that of stages within it"
        outer = getattr(self.local, 'within', 0.)   # what the calls within the stage around this one took so far
        self.local.within,start = 0.,monotonic()
        try: return f(*args, **kwargs)
        finally:
            total = monotonic()-start
            own,self.local.within = total-self.local.within,outer+total
            with self.lock: self.seconds[name] = self.seconds.get(name, 0.)+own

    def take(self)->dict: # `{stage: seconds}`
        "The seconds since the last call"
        with self.lock: seconds,self.seconds = self.seconds,{}
        return seconds

    def next(self, iterator):
        "`next(iterator)`, of which the stages are measured, also those in threads that are started meanwhile"
        token = _stopwatch.set(self)
        try: return next(iterator)
        finally: _stopwatch.reset(token)
