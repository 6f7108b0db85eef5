"""What connections have in common: repeated calls, and objects that are recreated in another process

Docs: page `store/connection`"""
import math, random, threading, uuid
from numbers import Real

from ..clock import monotonic, sleep, wait
from ..core import StoreUnavailable
from .address import hide, Secret, SecretOptions, without_secrets

# --- Recreating an object in another process

# A worker of `parallel_map`, Dask, Ray or Spark needs the store or the connection of the process that started it. A
# pickled store contains no secrets, so that it can be saved. An `Opener` is pickled only to be sent to a worker: it
# contains a function and its arguments, secrets included. Calling it returns the object. One object per function is
# kept in each process, so that all chunks of a worker share one connection.
#
# An argument that is an `Opener` itself is called first. `RedisStore.opener()` uses this: one of its arguments is the
# opener of its connection.

_opened = {}   # `{function: (Opener, object)}`: what openers have made in this process

class Opener:
    """Recreates an object in any process: pickle it, send it to a worker, and call it there

    It contains everything that the object needs, secrets included, so it is sent to workers and never saved.
    Its `repr` shows only the name of the function, and `name`."""
    def __init__(self,
        function, # Makes the object; a class, or a function of a module, so that it can be pickled
        name:str, # What `repr` shows; must not contain a secret
        /,
        **state # Arguments of `function`; an argument that is an `Opener` is called in the worker
    ): self.function,self.name,self.state,self.mark = function,name,SecretOptions(state),''

    def __eq__(self, other):
        if not isinstance(other, Opener): return NotImplemented
        return (self.function,self.state,self.mark)==(other.function,other.state,other.mark)

    def renewed(self)->'Opener':
        """An opener of the same object that returns none of those that were made before: each process makes a new one

        So do the openers among its arguments. A kept object has files open, which others may have replaced."""
        state = {k:v.renewed() if isinstance(v, Opener) else v for k,v in self.state.items()}
        opener = Opener(self.function, self.name, **state)
        opener.mark = uuid.uuid4().hex
        return opener

    def __call__(self):
        """`function(**state)`, or the object made last in this process, if the arguments were the same

        For each function, one object is kept."""
        made_by,obj = _opened.get(self.function, (None,None))
        if made_by!=self:
            obj = self.function(**{k:v() if isinstance(v, Opener) else v for k,v in self.state.items()})
            _opened[self.function] = self,obj
        return obj

    def __repr__(self): return f'Opener({self.function.__name__}, {self.name!r})'

# --- Repeating a call until a deadline

# A server may be busy, restarting or failing over. Each library has retries of its own, but they multiply with each
# other and have no overall deadline, so they are switched off. `Retries` has one deadline for all attempts. The pauses
# double from one attempt to the next. Each pause is shortened by a random amount, so that many workers do not return at
# the same moment. Another attempt starts as long as there is time. The attempt itself has to end when `remaining()`
# seconds are over.

def check_seconds(
    **seconds # Arguments of a user, by their names
):
    "Raises `ValueError`, with the name, unless all are finite numbers, 0 or more"
    for name,value in seconds.items():
        if not (isinstance(value, Real) and 0<=value<math.inf):
            raise ValueError(f'{name}={value!r}: want a number of seconds, 0 or more, and not infinite')

# Draws random numbers without a state, so that the numbers that `random` draws after a seed stay the same, whether or
# not a thread has repeated a call meanwhile
unseeded = random.SystemRandom()

class Retries:
    "Repeats one call until it succeeds, fails for good, or a deadline has passed"
    def __init__(self,
        server:str, # Address for error messages, without secrets
        timeout:float, # Seconds for all attempts together, from now on
        pause:float=.05, # Seconds before the second attempt, times a random 0.5 to 1; doubles with each pause
        longest_pause:float=2., # Upper limit of a pause, in seconds
        # Returns the texts that error messages show as `***`, longest first, or a list of them. `None`: there are no
        # secrets, and errors keep their traceback
        secrets=None,
        advice:str='', # End of the message when the time is over
    ):
        self.server,self.timeout,self.pause,self.longest_pause = server,timeout,pause,longest_pause
        self.advice,self.attempts,self.began = advice,0,monotonic()
        self._secrets,self._earlier = secrets,None

    @property
    def secrets(self)->list:
        "Texts that error messages show as `***`"
        texts = self._secrets() if callable(self._secrets) else self._secrets or ()
        return [Secret(text) for text in texts]

    def call(self,
        attempt, # Called without arguments; must be safe to repeat, and must end when no time is left
        handle, # Called with each error: raises if another attempt cannot help; else returns whether to pause first
    ):
        """The result of `attempt()`; raises `StoreUnavailable` when the time is over, and what `handle` raises

        Another attempt starts as long as there is time; it is for `attempt` to end when `remaining` seconds are over.
        Before the end, pauses become shorter, so that the last attempt comes late."""
        pause = self.pause
        while True:
            self.attempts += 1
            try: return attempt()
            except Exception as error: failure,pauses = self._judge(error, handle)
            if failure is not None:
                try: raise failure   # here, where nothing refers to the error of the library
                finally: del failure   # its traceback refers to this frame
            if not pauses: continue
            sleep(max(0, min(pause, .75*self.remaining()))*unseeded.uniform(.5, 1))
            pause = min(2*pause, self.longest_pause)

    def _judge(self, error, handle):
        """A pair: the error to raise, or None if another attempt is due; whether there is a pause before it, a bool

        `error` is what the attempt raised, and `handle` as in `call`."""
        try:
            pauses = handle(error)
            # an attempt that was cut off by the deadline tells less than the one before it
            cause = error if self._earlier is None or self.remaining()>0 else self._earlier
            self._earlier = error
            if self.remaining()>(min(self.pause, .05) if pauses else 0): return None,pauses
            failure = self.give_up(cause)
            failure.__cause__ = cause
        except Exception as e: failure = e
        return failure if self._secrets is None else without_secrets(failure, self.secrets),True

    def remaining(self)->float:
        "Seconds left until the deadline; may be negative"
        return self.began+self.timeout-monotonic()

    def unavailable(self, why:str)->StoreUnavailable:
        "The error with the server, `why` without secrets, the number of attempts and the time they took"
        seconds = monotonic()-self.began
        attempts = f"{self.attempts} attempt{'s'*(self.attempts>1)} in {seconds:.1f} s"
        return StoreUnavailable(f'{self.server}: {self.hide(why)} ({attempts})')

    def hide(self, text:str)->str:
        "`text` with `***` in place of secrets"
        return hide(text, self.secrets)

    def give_up(self, error:Exception)->StoreUnavailable:
        "The error to raise when no attempt is left: `error` was the last one"
        unavailable = self.unavailable(f'{type(error).__name__}: {error}')
        return StoreUnavailable(f'{unavailable}{self.advice}')

# --- A call that may never return

# Some calls cannot be told how long they may take: the look-up of a host's name, and some file systems.

class DeadlinePassed(TimeoutError):
    "A call did not return in time"
    def __init__(self, *args): super().__init__(*(args or ('no complete answer in time',)))

def call_in_thread(
    f, # Called without arguments, in a thread
    seconds:float # Time for the call; if it is not above 0, `f` is not called
):
    """The result of `f()`; raises what `f` raises, and `DeadlinePassed` if it does not return in time

    The thread is not stopped: `f` goes on in it after the time is over."""
    if seconds<=0: raise DeadlinePassed
    outcome,is_done = [],threading.Event()
    def run():
        try: outcome.append((f(), None))
        except BaseException as e: outcome.append((None, e))
        is_done.set()
    threading.Thread(target=run, daemon=True, name='fastai_remote call').start()
    if not wait(is_done, seconds): raise DeadlinePassed
    result,error = outcome.pop()
    try:
        if error is not None: raise error
    finally: del error   # it refers to this frame
    return result
