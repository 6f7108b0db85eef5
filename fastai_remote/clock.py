"""The time, as everything in this package that waits sees it

Docs: page `clock`"""

# Retries, leases, deadlines, time-outs and threads in the background wait. A test of them should not have to wait, too,
# and should not depend on how busy the machine is. So all of them ask the functions of this module for the time, and
# sleep by them. `ManualClock` replaces the clock behind these functions by one that stands still until somebody sleeps.

import time as _time
from contextlib import contextmanager

# --- Clock

class Clock:
    "The clock of this machine"
    monotonic,time,sleep = map(staticmethod, (_time.monotonic, _time.time, _time.sleep))
    def wait(self, event, seconds): return event.wait(seconds)

_clock = Clock()

@contextmanager
def use_clock(
    clock:Clock # Replaces the clock of this process
): # `clock`
    "Context manager: `monotonic`, `time`, `sleep` and `wait` are methods of `clock` until the block ends"
    global _clock
    before,_clock = _clock,clock
    try: yield clock
    finally: _clock = before

# --- The functions

def monotonic()->float:
    "Seconds since a point in the past; they never decrease"
    return _clock.monotonic()

def time()->float:
    "Seconds since 1970, to be compared with those of other processes"
    return _clock.time()

def sleep(
    seconds:float # How long
):
    "Return after so many seconds"
    _clock.sleep(seconds)

def wait(
    event, # A `threading.Event`, or a `threading.Condition` whose lock is held
    seconds:float # For how long at most
)->bool: # Was it set, or notified, in time?
    "Wait until `event` is set or notified"
    return _clock.wait(event, seconds)
