"An HTTP proxy with faults, before a real S3 server: answers that are late, refused, broken off, too short or wrong, and a record of what was asked"
import re, select, socket, threading, time
from collections import Counter
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

BLOCK = 1<<18

@dataclass
class Fault:
    "What to do to the next `n` requests that match"
    kind:str; n:float; match:Any; status:int=0; code:str=''; nbytes:int=0
    def hits(self, req):
        if self.n<=0 or self.kind in ('cut','short','flip') and not req.startswith('GET '): return False
        return self.match is None or (self.match(req) if callable(self.match) else self.match in req)

class Request(str):
    "'GET /bucket/key?query', with its `headers`"
    headers = ()
    def header(self, name): return _get(self.headers, name)

class HungUp(Exception): "The other side is gone, or is to be"

def _shut(s):
    try: s.shutdown(socket.SHUT_RDWR)   # a fork may hold the socket too: closing ours would tell nobody
    except OSError: pass
    s.close()

class _Conn:
    "A socket, the messages read from it, and the bytes"
    def __init__(self, sock):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock,self.r,self.buf = sock,sock.makefile('rb', 1<<16),memoryview(bytearray(BLOCK))

    def head(self):
        "First line and headers of the next message, as lists of words and of (name, value)"
        first,hs = self.r.readline(),[]
        while (l:=self.r.readline()) not in (b'\r\n', b'\n', b''):
            hs.append([o.strip() for o in l.decode('latin1').split(':', 1)])
        if not l: raise HungUp
        return first.decode('latin1').strip().split(None, 2),hs

    def chunked(self):
        "A body in chunks, whole"
        res = b''
        while n:=int(self.r.readline().split(b';')[0] or b'0', 16):
            res += self.r.read(n)
            self.r.readline()
        while self.r.readline() not in (b'\r\n', b''): pass
        return res

    def blocks(self, n):
        "The next `n` bytes (to the end if None), in views of one buffer"
        while n is None or n>0:
            if not (k:=self.r.readinto1(self.buf if n is None else self.buf[:n])):
                if n is None: return
                raise HungUp
            if n is not None: n -= k
            yield self.buf[:k]

    def send_head(self, first, hs, body=b''):
        self.sock.sendall((' '.join(first) + '\r\n' + ''.join(f'{k}: {v}\r\n' for k,v in hs) + '\r\n').encode('latin1') + body)

def _get(hs, name, default=None): return next((v for k,v in hs if k.lower()==name), default)
def _without(hs, *names): return [o for o in hs if o[0].lower() not in names]

class S3Proxy:
    "Forwards to the server at `endpoint`, headers as they came, so that signatures hold; `match` is a part of 'GET /bucket/key?query', or a function of it, a `Request`. Left and entered again it is at the same port"
    def __init__(self, endpoint, latency=0.):
        u = urlsplit(endpoint)
        self.up,self.latency,self.lock,self.conns,self.port = (u.hostname, u.port),latency,threading.Lock(),set(),0
        self.clear()

    def clear(self):
        "Forget faults and counts"
        self.faults,self.requests,self.log,self.bytes_out = [],Counter(),[],0
        return self

    def _add(self, kind, n, match, **kw):
        with self.lock: self.faults.append(f:=Fault(kind, n, match, **kw))
        return f
    def fail(self, status, code, n=1, match=None): return self._add('fail', n, match, status=status, code=code)
    def reset(self, n=1, match=None): return self._add('reset', n, match)
    def cut(self, nbytes, n=1, match=None): return self._add('cut', n, match, nbytes=nbytes)
    def short(self, nbytes, n=1, match=None): return self._add('short', n, match, nbytes=nbytes)
    def flip(self, n=1, match=None): return self._add('flip', n, match)

    def _fault(self, req):
        with self.lock:
            for f in self.faults:
                if f.hits(req):
                    f.n -= 1
                    return f

    def _note(self, method, path, hs, status):
        with self.lock: self.log.append((method, path, _get(hs, 'range'), status))

    def _dial(self):
        with self.lock: self.conns.add(s:=socket.create_connection(self.up))
        return _Conn(s)

    def _serve(self, sock):
        c,up = _Conn(sock),None
        try:
            while True:
                (method,path,ver),hs = c.head()
                req = Request(f'{method} {path}')
                req.headers = hs
                f = self._fault(req)
                kind = f.kind if f else None
                with self.lock: self.requests[method] += 1
                if self.latency: time.sleep(self.latency)
                if kind=='reset':
                    self._note(method, path, hs, None)
                    return
                if _get(hs, 'expect'): c.sock.sendall(b'HTTP/1.1 100 Continue\r\n\r\n')
                chunks = c.chunked() if 'chunked' in _get(hs, 'transfer-encoding', '').lower() else b''
                n = int(_get(hs, 'content-length', 0))
                if kind=='fail':
                    for _ in c.blocks(n): pass
                    self._refuse(c, method, path, hs, f)
                    continue
                if up and select.select([up.sock], [], [], 0)[0]: up = self._hang(up)   # it closed while idle
                up = up or self._dial()
                hs2 = _without(hs, 'expect', 'transfer-encoding')
                up.send_head((method,path,ver), hs2 + [('Content-Length', len(chunks))]*bool(chunks), chunks)
                for b in c.blocks(n): up.sock.sendall(b)
                if not self._answer(c, up, method, path, hs, f): return
        except (OSError, HungUp, ValueError): pass
        finally:
            for o in (c, up): self._hang(o)

    def _hang(self, c):
        if c is None: return
        with self.lock: self.conns.discard(c.sock)
        c.r.close()
        _shut(c.sock)

    def _refuse(self, c, method, path, hs, f):
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{f.code}</Code><Message>{f.code}, as the test wants</Message></Error>'.encode()
        self._note(method, path, hs, f.status)
        if method=='HEAD': body = b''
        c.send_head(('HTTP/1.1', str(f.status), f.code), [('Content-Type', 'application/xml'), ('Content-Length', len(body))], body)

    def _answer(self, c, up, method, path, req, f):
        "Pass on one answer; is the connection good for another?"
        first,hs = up.head()
        status,kind = int(first[1]),f and f.kind
        self._note(method, path, req, status)
        n = _get(hs, 'content-length')
        n = 0 if method=='HEAD' or status in (204, 304) else None if n is None else int(n)
        if 'chunked' in _get(hs, 'transfer-encoding', '').lower() and n is None:
            blocks = [b] if (b:=up.chunked()) else []   # lists and the like: small
            n = len(b)
            hs = _without(hs, 'transfer-encoding') + [('Content-Length', n)]
        else: blocks = up.blocks(n)
        keep = n is not None and _get(hs, 'connection', '').lower()!='close' and first[0]!='HTTP/1.0'
        upto = n
        if kind=='short' and n:
            upto = max(0, n-f.nbytes)
            hs = _without(hs, 'content-length') + [('Content-Length', upto)]
            hs = [(k, re.sub(r'(\d+)-\d+', lambda m: f'{m[1]}-{int(m[1])+upto-1}', v, count=1) if k.lower()=='content-range' else v) for k,v in hs]
        elif kind=='cut' and n: upto = min(n, f.nbytes)
        c.send_head(first, hs)
        done,flip = 0,n//2 if kind=='flip' and n else -1
        for b in blocks:
            if done<=flip<done+len(b): (b:=memoryview(bytearray(b)))[flip-done] ^= 255
            out = b if upto is None else b[:max(0, upto-done)]
            with self.lock: self.bytes_out += len(out)
            c.sock.sendall(out)
            done += len(b)
            if kind=='cut' and done>=upto: return False
        return keep

    def __enter__(self):
        self.srv = socket.create_server(('127.0.0.1', self.port), backlog=256)
        self.port = self.srv.getsockname()[1]
        self.endpoint = f'http://127.0.0.1:{self.port}'
        def accept():
            while True:
                try: s,_ = self.srv.accept()
                except OSError: return
                with self.lock: self.conns.add(s)
                threading.Thread(target=self._serve, args=(s,), daemon=True).start()
        threading.Thread(target=accept, daemon=True).start()
        return self

    def __exit__(self, *a):
        _shut(self.srv)
        with self.lock: conns = list(self.conns)
        for s in conns: _shut(s)
