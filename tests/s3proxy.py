"""An HTTP proxy before a real S3 server: answers that are late, refused, broken off, too short or wrong, and a record
of what was asked"""
import http.client, re, socket, threading, time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

@dataclass
class Fault:
    "What to do to the next `n` requests that match"
    kind:str
    n:float
    match:Any
    status:int = 0
    code:str = ''
    n_bytes:int = 0
    def hits(self, request):
        if self.n<=0 or self.kind in ('cut','short','flip') and not request.startswith('GET '): return False
        return self.match is None or (self.match(request) if callable(self.match) else self.match in request)

class Request(str): "'GET /bucket/key?query', with its `headers`"

def _hang_up(sock):
    try: sock.shutdown(socket.SHUT_RDWR)   # a fork may hold the socket too: closing ours would tell nobody
    except OSError: pass
    sock.close()

class _Handler(BaseHTTPRequestHandler):
    protocol_version,disable_nagle_algorithm = 'HTTP/1.1',True

    def setup(self):
        super().setup()
        self.server.connections.add(self.connection)

    def handle(self):
        try: super().handle()
        except (OSError,http.client.HTTPException): pass
        finally: self.leave()

    def leave(self):
        self.close_connection = True
        self.server.connections.discard(self.connection)
        _hang_up(self.connection)

    def forward(self):
        proxy,request = self.server.proxy,Request(f'{self.command} {self.path}')
        request.headers = self.headers
        fault = proxy.fault_of(request)
        time.sleep(proxy.latency)
        kind = fault.kind if fault else None
        if kind=='reset':
            self.note(None)
            return self.leave()
        body = self.rfile.read(int(self.headers.get('Content-Length', 0)))
        if kind=='fail':
            text = f'<Error><Code>{fault.code}</Code><Message>{fault.code}, as the test wants</Message></Error>'
            return self.answer(fault.status, [('Content-Type', 'application/xml')], text.encode())
        status,headers,content = self.ask(proxy.up, body)
        if kind=='short':
            content = content[:max(0, len(content)-fault.n_bytes)]
            def shorter(found): return f'{found[1]}-{int(found[1])+len(content)-1}'
            headers = [(name, re.sub(r'(\d+)-\d+', shorter, value) if name.lower()=='content-range' else value)
                       for name,value in headers]
        if kind=='flip' and content:
            content = bytearray(content)
            content[len(content)//2] ^= 255
        self.answer(status, headers, content, fault.n_bytes if kind=='cut' else None)
    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward

    def ask(self, up, body):
        "Repeat the request to the server, with the headers as they came, so that the signature holds"
        server = http.client.HTTPConnection(*up)
        server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name,value in self.headers.items():
            if name.lower() not in ('connection','expect'): server.putheader(name, value)
        server.putheader('Connection', 'close')
        server.endheaders(body)
        answer = server.getresponse()
        content = answer.read()
        server.close()
        return answer.status,answer.getheaders(),content

    def answer(self, status, headers, content, n_bytes=None):
        "Send an answer; if `n_bytes` is given, only so many bytes of the content, and hang up"
        self.note(status)
        kept = 'content-length' if self.command=='HEAD' and status<400 else None
        self.send_response_only(status)
        for name,value in headers:
            if name.lower()==kept or name.lower() not in ('content-length','transfer-encoding','connection'):
                self.send_header(name, value)
        if kept is None: self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        if self.command!='HEAD': self.wfile.write(content[:n_bytes])
        if n_bytes is not None and len(content)>n_bytes: self.leave()

    def note(self, status):
        self.server.proxy.log.append((self.command, self.path, self.headers.get('Range'), status))

    def log_message(self, *args): pass


class _Server(ThreadingHTTPServer):
    request_queue_size = 256
    def handle_error(self, *args): pass

class S3Proxy:
    """Forwards to the server at `endpoint`; left and entered again, it is at the same port

    `match` of a fault is a part of 'GET /bucket/key?query', or a function of it, a `Request`."""
    def __init__(self, endpoint, latency=0.):
        url = urlsplit(endpoint)
        self.up,self.latency,self.lock,self.port = (url.hostname, url.port),latency,threading.Lock(),0
        self.clear()

    def clear(self):
        "Forget faults and requests"
        self.faults,self.log = [],[]
        return self

    def _add(self, kind, n, match, **kw):
        fault = Fault(kind, n, match, **kw)
        self.faults.append(fault)
        return fault
    def fail(self, status, code, n=1, match=None): return self._add('fail', n, match, status=status, code=code)
    def reset(self, n=1, match=None): return self._add('reset', n, match)
    def cut(self, n_bytes, n=1, match=None): return self._add('cut', n, match, n_bytes=n_bytes)
    def short(self, n_bytes, n=1, match=None): return self._add('short', n, match, n_bytes=n_bytes)
    def flip(self, n=1, match=None): return self._add('flip', n, match)

    def fault_of(self, request):
        with self.lock:
            fault = next((fault for fault in self.faults if fault.hits(request)), None)
            if fault: fault.n -= 1
            return fault

    def __enter__(self):
        self.server = _Server(('127.0.0.1', self.port), _Handler)
        self.server.proxy,self.server.connections,self.port = self,set(),self.server.server_port
        self.endpoint = f'http://127.0.0.1:{self.port}'
        threading.Thread(target=self.server.serve_forever, args=(.01,), daemon=True).start()
        return self

    def __exit__(self, *args):
        self.server.shutdown()
        _hang_up(self.server.socket)
        for connection in list(self.server.connections): _hang_up(connection)

    refuse,accept = __exit__,__enter__
