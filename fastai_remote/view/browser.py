"""A dataset in a browser: any of its samples at once, filters and sorts, and corrections

Docs: page `view/browser`"""

import hmac, json, secrets, threading, webbrowser
from dataclasses import asdict
from functools import partial
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from threading import Lock
from urllib.parse import parse_qsl, urlsplit

from ..core import StoreError, StoreUnavailable
from ..store.base import has_keys, Store
from .marks import found_again, identity, Marks, marks_file
from .overview import count_in_splits, overview, RATIOS, typed_label
from .pictures import cut_text, read_samples, read_values, Sample, shown_kind, shown_value
from .query import Answers, Job, Query, text_fields, Whole

# --- The server
#
# The page shows data that others may not see, and can change a dataset. Its address contains a random token, which no
# other page can guess. The headers `Host` and `Origin` are checked as well, so that pages of others, which a browser on
# this machine may show, cannot reach it by a name of their own. A Content-Security-Policy forbids scripts from anywhere
# but the page's file.

_MAX_BODY = 1<<20 # Bytes of a request
_IDLE = 60 # Seconds after which a connection without a request ends
LOOPBACK = frozenset(['127.0.0.1','localhost','::1'])

class PageError(Exception):
    "An error to be shown by the page, with the HTTP status, and what else the page needs to know"
    def __init__(self, status:int, message:str, **more):
        super().__init__(message)
        self.status,self.more = status,more

class PageServer:
    "Serves a page in a thread, until `close`, or until the process ends"
    def __init__(self,
        # `answer(method, name, args)` -> `(content type, bytes)`, or what JSON can represent; `method` is 'GET' or
        # 'POST', `name` the rest of the path, and `args` a dict
        answer,
        port:int=0, # TCP port; 0: a free one
        proxy:str=None # Address of a proxy that serves the page, which may be on another host
    ):
        self.answer,self.token = answer,secrets.token_urlsafe(24)
        self.proxy = urlsplit(proxy or '').netloc
        self.hosts = LOOPBACK|({_name_of(proxy)} if self.proxy else set())
        ancestors = ' '.join(f'http://{host}:*' for host in ('localhost','127.0.0.1'))
        if self.proxy: ancestors += f' https://{self.proxy} http://{self.proxy}'
        self.policy = ("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
                       "media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
                       f"frame-ancestors 'self' {ancestors}")
        self.httpd = _Server(('127.0.0.1', port), partial(_Handler, self))
        self.port = self.httpd.server_address[1]
        threading.Thread(target=self.httpd.serve_forever, args=(.1,), daemon=True).start()

    @property
    def url(self)->str:
        "The address of the page, with its token"
        return f'http://127.0.0.1:{self.port}/{self.token}/'

    def close(self):
        "Stop the server"
        self.httpd.shutdown()
        self.httpd.server_close()

class _Server(ThreadingHTTPServer):
    daemon_threads,request_queue_size = True,64
    def handle_error(self, request, client_address): pass   # a browser that has gone away

class _Handler(BaseHTTPRequestHandler):
    protocol_version,timeout,server_version,sys_version = 'HTTP/1.1',_IDLE,'fastai_remote',''
    disable_nagle_algorithm,wbufsize = True,-1   # head and body leave at once, and together

    def __init__(self, page, *args):
        self.page = page
        super().__init__(*args)

    def log_message(self, *args): pass   # the path contains the token

    def do_GET(self): self._respond('GET', self._query)
    def do_POST(self): self._respond('POST', self._body)

    def _query(self): return dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))

    def _body(self):
        "The arguments of a POST; raises `PageError`"
        n = self.headers.get('Content-Length', '')
        if self.headers.get_content_type()!='application/json' or not n.isdecimal() or int(n)>_MAX_BODY:
            raise PageError(400, 'want JSON of at most 1 MB')
        try: args = json.loads(self.rfile.read(int(n)))
        except ValueError: args = None
        if not isinstance(args, dict): raise PageError(400, 'want a JSON object')
        self.close_connection = False
        return args

    def _refused(self):
        "Why a request is refused: it has not the token, or does not come from this page; else ''"
        token = urlsplit(self.path).path.split('/')[1:2]
        host,origin = self.headers.get('Host', ''),self.headers.get('Origin')
        if not token or not hmac.compare_digest(token[0].encode(), self.page.token.encode()):
            return 'the address of this page has a token'
        if _name_of(f'//{host}') not in self.page.hosts:
            return 'this page is served to this machine only; proxy= names the address of a proxy'
        # a proxy may put the address of the page in place of its own
        if origin is None or urlsplit(origin).netloc in (host, self.page.proxy or host): return ''
        return 'another page has sent this request'

    def _respond(self, method, read_args):
        path,refused = urlsplit(self.path).path,self._refused()
        self.close_connection |= method=='POST' or bool(refused)   # unless the body was read, no request follows
        if refused: return self._send(403, 'text/plain', f'403: {refused}'.encode())
        if path.count('/')==1: return self._send(308, 'text/plain', b'', Location=f'{self.page.token}/')
        try: found = self.page.answer(method, path.split('/', 2)[2], read_args())
        except PageError as e: self._send_error(e.status, str(e), **e.more)
        except StoreUnavailable as e: self._send_error(503, str(e))
        except (StoreError,ValueError,TypeError,IndexError) as e: self._send_error(422, str(e))
        except Exception as e: self._send_error(500, f'{type(e).__name__}: {e}')
        else: self._send(200, *(found if isinstance(found, tuple) else _as_json(found)))

    def _send_error(self, status, message, **more): self._send(status, *_as_json(dict(error=message, **more)))

    def _send(self, status, kind, body, **headers):
        self.send_response(status)
        headers |= {'Content-Type':kind, 'Content-Length':len(body), 'Cache-Control':'no-store',
                    'Content-Security-Policy':self.page.policy, 'X-Content-Type-Options':'nosniff',
                    'Referrer-Policy':'no-referrer', 'Cross-Origin-Resource-Policy':'same-origin'}
        for name,value in headers.items(): self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

def _as_json(content): return 'application/json',json.dumps(content, default=str).encode()

def _name_of(url):
    try: return urlsplit(url).hostname
    except ValueError: return None

# --- The page
#
# The page asks for what is visible, and for nothing else. So a dataset of any size opens at once. `View` answers its
# requests: each is a method, in the tables `_reads` and `_writes`. What takes longer than a request is a `Job`.

_MOST_TILES = 400 # Samples of a request
_MOST_LABELS = 2000 # Labels that the page suggests
_MAX_TEXT = 100_000 # Characters of a text
_SOUNDS = dict(wav='audio/wav', flac='audio/flac', mp3='audio/mpeg', ogg='audio/ogg', opus='audio/ogg',
               m4a='audio/mp4')
_FILES = {'':('index.html','text/html'), 'page.css':('page.css','text/css'),
          **{file:(file,'text/javascript') for file in ('dom.js','grid.js','overview.js','page.js')}}

class View:
    """A page that shows a dataset in a browser; the address is its `url`

    The page is served by a thread of this process, and ends with it. Who has the address sees the dataset and, with
    `edit`, changes it: it contains a random token."""
    def __init__(self,
        store:Store, # The dataset
        edit:bool=False, # May samples be marked, and the dataset be changed?
        height:int=None, # Height in a notebook, in pixels; default: a notebook shows the address
        port:int=None, # TCP port of this machine; default: a free one
        proxy:str=None # The address under which Jupyter's proxy serves ports, such as https://hub.org/user/me/proxy
    ):
        if edit:
            try: store.reopened()
            except NotImplementedError: raise TypeError(f'{store.name}: a {type(store).__name__} cannot be changed, '
                                                        'so edit=True is not possible') from None
        self.edit,self.height,self.proxy = edit,height,proxy
        self._lock,self._change = Lock(),None
        self._open(store)
        self._server = PageServer(self._answer, port or 0, proxy)

    def _open(self, store):
        "Shows another version of the dataset"
        self.store,self.marks = store,Marks(marks_file(store))
        self._answers,self._shown,self._overview = Answers(store),'',None

    # --- In Python

    @property
    def url(self)->str:
        "The address of the page, with its token"
        if self.proxy: return f"{self.proxy.rstrip('/')}/{self._server.port}/{self._server.token}/"
        return self._server.url

    @property
    def selection(self): # A `range`, or an array of int64
        "The numbers of the samples that the page shows with its last filter, in its order, as far as they were found"
        try: samples = self._answers.of(self._shown).samples
        except KeyError: samples = self._answers.of('').samples
        return samples.among if isinstance(samples, Whole) else samples.numbers(0, len(samples))

    @property
    def marked(self)->dict: # `{'drop': [number, …], 'set': {field: {number: label}}}`
        "What was marked on the page and not applied yet: `store.edit(**view.marked)` would apply it"
        return self.marks.changes()

    def open(self):
        "Show the page in a browser of this machine"
        webbrowser.open(self.url)

    def close(self):
        "Stop serving the page"
        self._server.close()

    def __repr__(self): return f'{self.store.name}: {self.url}'

    def _repr_html_(self):
        url = escape(self.url)
        if not self.height: return f'<a href="{url}" target="_blank">{escape(self.store.name)}</a>'
        return f'<iframe src="{url}" width="100%" height="{int(self.height)}" style="border:0"></iframe>'

    # --- Requests

    def _answer(self, method, name, args):
        "The `answer` of the `PageServer`"
        if method=='GET' and name in _FILES:
            file,kind = _FILES[name]
            return f'{kind}; charset=utf-8',(files(__package__)/'page'/file).read_bytes()
        found = (_READS if method=='GET' else _WRITES if name in _ASKS or self.edit else {}).get(name)
        if found is None and method=='POST' and name in _WRITES: raise PageError(403, 'this page only reads')
        if found is None: raise PageError(404, f'there is no {name!r:.60}')
        if args.pop('uid', self.store.manifest.uid)!=self.store.manifest.uid:
            raise PageError(409, 'the page shows another version now', is_other=True)
        return found(self, **args)

    def dataset(self):
        "What the page must know before it shows samples"
        store,table = self.store,self.store.field_table
        kinds = {field:shown_kind(store, field) for field in store.fields}
        fields = [dict(name=field, kind=kind, codec=table.entry(field)['codec'], may_lack=store.may_lack(field),
                       is_number=kind=='number', can_correct=_can_correct(store, field))
                  for field,kind in kinds.items()]
        labels = {field:list(map(str, store.manifest.vocab.get(field, [])[:_MOST_LABELS])) for field in store.fields
                  if table.entry(field)['codec'] in ('cls','labels')}
        return dict(name=store.name, n=len(store), uid=store.manifest.uid, origin=store.origin, fields=fields,
                    labels=labels, splits=store.splits, edit=self.edit, has_keys=has_keys(store),
                    has_texts=bool(text_fields(store)), created=store.manifest.created,
                    generation=store.manifest.generation)

    def tiles(self, first, n, id='', size=160):
        "Samples of an answer, by position, as the grid shows them"
        first,n,size = int(first),min(int(n), _MOST_TILES),min(int(size), 640)
        answer = self._answer_of(id)
        numbers = answer.samples.numbers(max(first, 0), n)
        found = read_samples(self.store, numbers, size)
        keys = _keys(self.store, numbers)
        return [dict(_tile(sample), key=key, sorted=_sorted_by(sample, answer.query))
                for sample,key in zip(found, keys)]

    def sample(self, number):
        "All that is known of a sample"
        number, = self.store.check_numbers([int(number)]).tolist()
        values = read_values(self.store, [number], self.store.fields)
        shown = {field:shown_value(self.store, number, field, value, 64) for field,(value,) in values.items()}
        fields = [_field(self.store, number, shown[field], value) for field,(value,) in values.items()]
        split = next((split for split,(start,stop) in self.store.splits.items() if start<=number<stop), '')
        return dict(number=number, key=_keys(self.store, [number])[0], split=split, fields=fields,
                    has_picture=Sample(number, shown).image is not None, python=f'{self.store.python}[{number}]')

    def picture(self, number, size=1200, field=''):
        "A large picture of a sample, or of one of its fields, as a file"
        fields = [field] if field in self.store.fields else None
        sample, = read_samples(self.store, [int(number)], min(int(size), 2000), fields)
        picture = sample.picture()
        if picture is None: raise PageError(404, 'there is no picture')
        return picture.mime,picture.content

    def sound(self, number, field):
        "A recording, as it is stored"
        kind = _SOUNDS.get(field.rsplit('.', 1)[-1].lower())
        if kind is None or field not in self.store.fields: raise PageError(404, 'there is no recording')
        return kind,self.store.get_many([int(number)], field)[field][0]

    def overview(self):
        "Counts, sizes and versions, estimated from some samples; `None` until these were read"
        if self._overview is None or self._overview.state in ('cancelled','failed'): self._overview = Job(self._look)
        return {**self._overview.progress(), 'result':self._overview.result, 'ratios':RATIOS}

    def _look(self, job):
        o = overview(self.store)
        job.result,job.note = asdict(o),'counting the labels in each split'
        count_in_splits(self.store, o, job.step)
        return asdict(o)

    # --- Filters and sorts

    def query(self, query):
        "Begin to find the samples of a query; returns the `id` of its answer, with its progress"
        wanted = Query.of(query)
        id = self._answers.ask(wanted)
        if not wanted.key: self._shown = id
        return {'id':id, **self._answers.of(id).progress()}

    def _answer_of(self, id):
        try: return self._answers.of(id)
        except KeyError: raise PageError(410, 'ask again', is_gone=True) from None

    def progress(self, id): return self._answer_of(id).progress()

    def position(self, number, id=''):
        "Where a sample is in an answer; -1 if it is not there"
        return dict(position=self._answer_of(id).samples.position(int(number)))

    def cancel(self, id):
        "End the search for an answer; what was found stays"
        jobs = {'change':self._change, 'overview':self._overview}
        job = jobs[id] if id in jobs else self._answer_of(id).job
        if job: job.cancel()
        return {}

    # --- Corrections

    def changes(self):
        "The marks, the steps that can be undone, the call of `store.edit` that would be made, and its progress"
        found = self.marks.changes()
        progress = self._change.progress() if self._change else None
        return dict(found, steps=len(self.marks.steps()), call=_call(found), change=progress)

    def mark(self, number, value, field=''):
        "Mark a sample to be dropped, or to get the label `value`; `None` takes the mark back"
        number, = self.store.check_numbers([int(number)]).tolist()
        if self._is_changing(): raise PageError(409, 'the marks are being applied')
        if value is not None: value = _new_value(self.store, field, value) if field else True
        self.marks.add([dict(number=number, field=field, value=value, **identity(self.store, number))])
        return self.changes()

    def undo(self):
        "Take the last step back"
        if not self._is_changing(): self.marks.undo()
        return self.changes()

    def _is_changing(self): return self._change is not None and self._change.state=='running'

    def apply(self):
        "Change the dataset as it is marked, and show the new version"
        changes = self.marks.changes()
        with self._lock:
            if self._is_changing(): return self.changes()
            if self.store.reopened().manifest.uid!=self.store.manifest.uid:
                raise PageError(409, f'{self.store.name} has a newer version', is_newer=True)
            self._change = Job(lambda job: self._apply(job, changes))
        return self.changes()

    def _apply(self, job, changes):
        job.note = _call(changes)
        marks,store = self.marks,self.store.edit(**changes, progress=job.step)
        marks.clear()
        job.note = ''
        self._open(store)

    def reopen(self):
        "Show the version that is there now, and carry the marks over to it"
        with self._lock:
            if not self._is_changing(): self._change = Job(self._reopen)
        return self.changes()

    def _reopen(self, job):
        store,before = self.store.reopened(),self.marks
        if store.manifest.uid==self.store.manifest.uid: return
        steps = before.current()
        found = found_again(store, steps, job) if steps else []
        if found: Marks(marks_file(store)).add(found)
        lost = len(steps)-len(found)
        if lost: job.note = f'{lost:,} of {len(steps):,} marks could not be carried over: their samples are not found'
        else: before.clear()
        self._open(store)

_ASKS = 'query','cancel'   # requests that read, but have a body
_READS = dict(dataset=View.dataset, tiles=View.tiles, sample=View.sample, picture=View.picture, sound=View.sound,
              overview=View.overview, progress=View.progress, position=View.position, changes=View.changes)
_WRITES = dict(query=View.query, cancel=View.cancel, mark=View.mark, undo=View.undo, apply=View.apply,
               reopen=View.reopen)

# --- What the page shows

def _tile(sample):
    "A `Sample` as a dict"
    picture = sample.picture()
    texts = {} if picture else sample.texts
    is_plain = {field:len(texts)==1 or sample.values[field].kind=='text' for field in texts}
    text = '\n'.join(text if is_plain[field] else f'{field}: {text}' for field,text in texts.items())
    return dict(number=sample.number, picture=picture and picture.url, title=cut_text(sample.title, 60), text=text,
                errors=sample.errors)

def _field(store, number, shown, value):
    "What the page shows of a value: its kind, its text, its size, where it is, and whether its checksum matches"
    field,text = shown.field,shown.text
    entry = store.field_table.entry(field)
    labels = shown.marks if shown.kind=='labels' else None
    if shown.kind in ('text','other','bytes') and isinstance(value, bytes) and len(value)<=4*_MAX_TEXT:
        text = cut_text(value.decode(errors='replace') if shown.kind!='bytes' else text, _MAX_TEXT)
    has_checksum = field not in store.unchecked
    checksum = 'no checksum' if not has_checksum else 'checksum matches'
    if shown.kind=='error': checksum = 'damaged or missing' if isinstance(value, Exception) else checksum
    where = '' if shown.kind=='missing' else _where(store, number, field)
    is_sound = shown.kind=='audio' and field.rsplit('.', 1)[-1].lower() in _SOUNDS
    return dict(name=field, kind=shown.kind, codec=entry['codec'], dtype=entry['dtype'], text=text, labels=labels,
                legend=shown.legend, nbytes=shown.nbytes, where=where, checksum=checksum, is_sound=is_sound,
                has_picture=shown.image is not None)

def _sorted_by(sample, query):
    shown = sample.values.get(query.sort or query.range_field)
    return shown.text if shown else ''

def _keys(store, numbers):
    "The keys of samples, '' if there are none"
    if not has_keys(store): return ['']*len(numbers)
    try: return [cut_text(key, 80) for key in store.keys(numbers)]
    except StoreError: return ['']*len(numbers)

def _where(store, number, field):
    try: return store.location(number, field).strip().removeprefix('in ')
    except StoreError as e: return str(e)

def _can_correct(store, field):
    "Has a field labels that a person may correct? Those of boxes belong to their boxes"
    codec = store.field_table.entry(field)['codec']
    return codec=='cls' or codec=='labels' and 'boxes' not in field.split('.')

def _new_value(store, field, given):
    "The label, or the list of labels, that the texts `given` mean; raises `PageError`, `UnknownField`, `ValueError`"
    is_list = store.field_table.entry(field)['codec']=='labels'
    texts = given if is_list else [given]
    if not _can_correct(store, field) or not isinstance(texts, list) or not all(isinstance(o, str) for o in texts):
        raise PageError(422, f'{field!r} takes no label {given!r:.60}')
    labels = [typed_label(store, field, text, may_be_new=True) for text in texts]
    return labels if is_list else labels[0]

def _call(changes):
    "The call of `store.edit` as text"
    arguments = [f'{name}={value!r}' for name,value in changes.items() if value]
    return f"store.edit({', '.join(arguments)})"
