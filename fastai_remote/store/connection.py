"""What connections have in common: addresses, repeated calls, and objects that are recreated in another process

Docs: page `store/connection`"""

import base64, math, random, re, threading, uuid
from numbers import Real
from urllib.parse import unquote

from ..clock import monotonic, sleep, wait
from ..core import StoreError, StoreUnavailable

# --- Addresses
#
# An address may contain a password, and options contain keys, tokens and cookies under many names. New libraries bring
# new names, so a list of secret names is never complete. There is a list of harmless options instead. Only these are
# shown and saved, and everything else is treated as a secret.
#
# - `public_options` returns the harmless options, and `public_url` an address without its password and its signature.
#   All stores use these two functions.
# - `SecretOptions` and `Secret` are a dict and a text whose `repr` shows nothing secret. Debuggers and tracebacks print
#   the local variables of a function with `repr`.
# - `without_secrets` removes from an error what the library that raised it says: it may quote a URL or a header, and
#   the local variables of its functions contain passwords.

# Options that are shown and saved. Add one only if no value of it can be a secret.
_s3_names = '''
    anon cache_regions default_block_size default_cache_type default_fill_cache endpoint_url fixed_upload_size
    local_expiry_check max_concurrency profile region region_name requester_pays use_ssl version_aware
    addressing_style api_version connect_timeout max_attempts max_pool_connections mode payload_signing_enabled
    read_timeout request_checksum_calculation response_checksum_validation signature_version tcp_keepalive
    total_max_attempts use_accelerate_endpoint use_dualstack_endpoint verify'''
_web_and_ftp_names = '''
    block_size cache_type encoded encoding host port same_scheme simple_links size_policy ssl timeout tls trust_env'''
_redis_names = '''
    client_name db decode_responses encoding_errors health_check_interval lib_name lib_version max_connections path
    protocol retry_on_error retry_on_timeout single_connection_client socket_connect_timeout socket_keepalive
    socket_read_size socket_timeout ssl_ca_certs ssl_ca_path ssl_cert_reqs ssl_certfile ssl_check_hostname ssl_keyfile
    ssl_min_version'''
_public_names = frozenset(f'{_s3_names} {_web_and_ftp_names} {_redis_names}'.split())
_containers = frozenset(('client_kwargs','config_kwargs','retries','s3'))   # options whose value is a dict of options

def public_options(
    options:dict # Options of a connection to any kind of server
)->dict: # Only numbers, texts, booleans, `None`, and dicts of them
    """A new dict with those of `options` that may be shown and saved: the ones on a list of harmless ones

    URLs among the values are returned without their secrets. A dict of which nothing remains is left out."""
    result = {}
    for name,value in options.items():
        if name in _containers and isinstance(value, dict):
            value = public_options(value)
            if value: result[name] = value
        elif name in _public_names and isinstance(value, str): result[name] = public_url(value)
        elif name in _public_names and isinstance(value, (int,float,type(None))): result[name] = value
    return result

def hidden_names(
    options:dict # Options of a connection
)->list:
    """Names of the `options` that `public_options` leaves out or changes, such as 'client_kwargs.headers'

    The latter are those whose URL is shown without its secrets. An option whose value is `None` is not among them."""
    result = []
    for name,value in options.items():
        if name in _containers and isinstance(value, dict): result += [f'{name}.{k}' for k in hidden_names(value)]
        elif public_options({name:value})!={name:value} and value is not None: result.append(name)
    return result

_link = re.compile(r'(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<login>[^/?#]*@)?(?P<host>[^/?#]*)(?P<rest>.*)',
                   re.I|re.S)
# Ends a part of a chain: `::`, but not in a password, or in the address of a host, such as `[::1]`
_chain_link = re.compile(r'::(?![^/?#]*[]@])')
_without_login = 'github','git'   # before an @ there is the repository, or a branch
_without_query = 's3','s3a','gs','gcs','memory'   # in names of their files, a question mark is a letter
_redis = 'redis','rediss','unix','redis+sentinel','rediss+sentinel'

def chain_links(
    url:str # A path, a URL, or a chain of URLs, such as `zip://folder::s3://bucket/file.zip`
)->list: # Of `str`
    "The parts of a chain, which `::` separates; a path is one part, whatever it contains"
    return _chain_link.split(url) if '://' in url else [url]

def public_url(
    url:str # A URL; parts of a chain are separated by `::`
)->str:
    """`url` without passwords and signatures; a text that is no URL is returned as it is

    The user remains, except in URLs of the web, where it may be a token. Of the part after a question mark, where a
    signature may be, only the harmless options of Redis remain. In URLs of S3, Google Cloud Storage and `memory://`,
    a question mark belongs to the name of a file, and remains."""
    return '::'.join(_public_link(link) for link in chain_links(url))

def _public_link(url):
    "`url`, one URL of a chain, as `public_url` returns it"
    link = _link.fullmatch(url)
    if not link: return url
    scheme,login,host,rest = link['scheme'],link['login'] or '',link['host'],link['rest']
    user = '' if scheme.lower() in ('http','https') else login.rstrip('@')
    if scheme.lower() not in _without_login: user = user.partition(':')[0]
    if scheme.lower() in _redis:
        rest,_,query = rest.partition('?')
        options = '&'.join(option for option in query.split('&') if option.partition('=')[0] in _public_names)
        rest += f'?{options}' if options else ''
    elif scheme.lower() not in _without_query: rest = re.split('[?#]', rest)[0]
    return f"{scheme}://{user}{'@' if user else ''}{host}{rest}"

class Secret(str):
    "A `str` whose `repr` is `'***'`; used in any other way, it is the text"
    def __repr__(self): return "'***'"

class SecretOptions(dict):
    "Options of a connection; `repr` and `str` show only the values that are public; a pickle contains all"
    def __repr__(self):
        hidden = {name:Secret(name) for name in self if hidden_names({name:self[name]})}
        return repr({**hidden, **public_options(self)})
    __str__ = __repr__

def concealed(
    value # An argument: a URL, or options
): # The same value as a `Secret` or `SecretOptions`; a value of another type is returned as it is
    """`value` with a `repr` that shows no secrets

    For the first line of a function that gets a URL or options from a user: a traceback may show its variables."""
    if type(value) is str: return Secret(value)
    return SecretOptions(value) if type(value) is dict else value

# Texts of secrets are replaced in messages. A secret of up to three letters is only replaced where it stands alone: to
# replace each `a` would make the message unreadable, and would tell the secret, too.

def secret_texts(
    options, # Options of a connection, or a value of one
    url:str='', # The address, with its secrets
)->list: # Of `Secret`, longest first
    """The texts that messages must not show: all in `options` and `url` that are not public, but none of up to 3 digits

    Each is also returned with its percent codes decoded and, if it contains a colon, as base64 of UTF-8 and of Latin-1.
    Of a part of `url` that `public_url` changes, all values in its query are returned. Values that are no texts,
    `bytes` or integers are left out."""
    found = list(_texts(options))
    for link in map(_link.fullmatch, chain_links(url)):
        if not link or _public_link(link[0])==link[0]: continue
        login,query = (link['login'] or '').rstrip('@'),''.join(re.split('[?#]', link['rest'], maxsplit=1)[1:])
        user,_,password = login.partition(':')
        found += [password, query, *(value.partition('=')[2] for value in re.split('[&;#]', query))]
        if link['scheme'].lower() in ('http','https'): found += [user, login]
    found += [unquote(text) for text in found]
    logins = [text for text in found if ':' in text]
    for encoding in ('utf-8','latin-1'):
        found += [base64.b64encode(login.encode(encoding, errors='replace')).decode() for login in logins]
    found = {text for text in found if text and not (len(text)<4 and text.isdigit())}
    return [Secret(text) for text in sorted(found, key=len, reverse=True)]

def _texts(value):
    """Yields all texts in `value`, a dict of options, or a value of an option that is not public

    Of a dict, those in public options are left out, except for secrets in their URLs. A list that begins with two texts
    also gives `first:second`, as they may be user and password. `bytes` are decoded, and of numbers, only integers
    above 999 count."""
    if isinstance(value, str): yield value
    elif isinstance(value, bytes): yield value.decode(errors='replace')
    elif isinstance(value, int) and value>999: yield str(value)   # lower ones, and fractions, are rather settings
    elif isinstance(value, dict):
        for name,item in value.items():
            if not public_options({name:item}) or isinstance(item, dict): yield from _texts(item)
            elif isinstance(item, str) and public_url(item)!=item: yield from secret_texts({}, item)
    elif isinstance(value, (list,tuple,set)):
        for item in value: yield from _texts(item)
        login = list(value)[:2]
        if len(login)==2 and all(isinstance(item, str) for item in login): yield ':'.join(login)   # user and password

def hide(
    text:str, # A message
    secrets # Texts, longest first
)->str:
    "`text` with `***` in place of `secrets`; one of up to 3 characters is replaced only where it is a whole word"
    for secret in secrets:
        if len(secret)>3: text = text.replace(secret, '***')
        else: text = re.sub(rf'(?<!\w){re.escape(secret)}(?!\w)', '***', text)
    return text

def without_secrets(
    error:Exception, # An error of ours, or of a library
    secrets # Texts, longest first
)->Exception:
    """`error`, or a copy of it if it contains secrets, without the traceback of the library that raised it

    The traceback contains the local variables of the library. The same applies to the causes of the error; where they
    are a circle, it is cut. An error that cannot be looked at, because its methods fail, is copied, and so is a group
    of errors, as each of them may have causes. A copy shows `***` in place of secrets, may be of a base class, and has
    no other attributes. An error that is not copied is changed: its traceback and context become `None`, and its cause
    the one without secrets. A `StoreError` is never copied: its message has no secrets."""
    causes = [error]   # each is the cause of the one before
    while not any(causes[-1].__cause__ is known for known in (None,*causes)): causes.append(causes[-1].__cause__)
    safe = None
    for error in reversed(causes):
        if not isinstance(error, StoreError) and _may_show(error, secrets):
            error = _copied(error, hide(_message(error), secrets))
        error.__traceback__,error.__context__,error.__cause__ = None,None,safe
        safe = error
    return safe

def _may_show(error, secrets):
    "Does `error` show one of `secrets`, in its message, `repr` or attributes? Also true if these fail, and for a group"
    if isinstance(error, BaseExceptionGroup): return True
    try: text = f'{error}\n{error!r}\n{vars(error)!r}'
    except Exception: return True
    return hide(text, secrets)!=text

def _message(error):
    "The message of `error`, for a group with its errors; or only its type if the message raises an error"
    try: return repr(error) if isinstance(error, BaseExceptionGroup) else str(error)
    except Exception: return f'{type(error).__name__} without a readable message'

def _copied(error, text):
    """A new error with the message `text`, of the type of `error` or of its nearest base class that fits

    A class fits if it can be made from only a text, and then shows just this. Other attributes of `error` are lost."""
    for kind in type(error).__mro__:
        try:
            copy = kind(text)
            if repr(copy) and str(copy) in (text, repr(text)): return copy
        except Exception: continue
    return Exception(text)

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
        # Returns the texts that error messages show as `***`, longest first, or a list of them. `None`, or a function
        # that returns it: there are no secrets, and errors keep their traceback
        secrets=None,
        advice:str='', # End of the message when the time is over
    ):
        self.server,self.timeout,self.pause,self.longest_pause = server,timeout,pause,longest_pause
        self.advice,self.attempts,self.began = advice,0,monotonic()
        self._secrets,self._earlier = secrets,None

    @property
    def secrets(self)->list:
        "Texts that error messages show as `***`; `None` if there are no secrets"
        texts = self._secrets() if callable(self._secrets) else self._secrets
        return None if texts is None else [Secret(text) for text in texts]

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
        secrets = self.secrets
        return failure if secrets is None else without_secrets(failure, secrets),True

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
        return hide(text, self.secrets or ())

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
