"""The server of a page: on this machine only, and only for who knows its address

Docs: page `view/server`"""

# The page shows data that others may not see, and can change a dataset. Its address contains a random token, which no
# other page can guess. The headers `Host` and `Origin` are checked as well, so that pages of others, which a browser on
# this machine may show, cannot reach it by a name of their own. A Content-Security-Policy forbids scripts from anywhere
# but the page's file.

import hmac, json, secrets, threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from ..core import StoreError, StoreUnavailable

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

    def do_GET(self): self._respond('GET', dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True)))

    def do_POST(self):
        n = self.headers.get('Content-Length', '')
        is_json = self.headers.get_content_type()=='application/json'
        self.close_connection = True   # unless the body was read, what follows is no request
        if self._refused(): return self._respond('POST', {})
        if not is_json or not n.isdecimal() or int(n)>_MAX_BODY:
            return self._send_error(400, 'want JSON of at most 1 MB')
        try: args = json.loads(self.rfile.read(int(n)))
        except ValueError: args = None
        if not isinstance(args, dict): return self._send_error(400, 'want a JSON object')
        self.close_connection = False
        self._respond('POST', args)

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

    def _respond(self, method, args):
        path = urlsplit(self.path).path
        if refused := self._refused():
            self.close_connection = True
            return self._send(403, 'text/plain', f'403: {refused}'.encode())
        if path.count('/')==1: return self._send(308, 'text/plain', b'', Location=f'{self.page.token}/')
        try: found = self.page.answer(method, path.split('/', 2)[2], args)
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
