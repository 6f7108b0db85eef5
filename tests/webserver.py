"A web server of this process, for tests"
import http.client, http.server, re, threading

class WebServer(http.server.ThreadingHTTPServer):
    """Answers each request with what `answer(handler)` returns: status, reason (or `None`), content; a context manager

    A dict of headers may follow.
    Of a content of status 200, it sends the range that was asked for. `None` says that `answer` has sent all itself.
    `seen` are path and headers of each GET; `over` is set at the end."""
    daemon_threads,request_queue_size = True,64
    def __init__(self, answer):
        self.seen,self.over = [],threading.Event()
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = 'HTTP/1.1'
            def do_GET(handler):
                if handler.command=='GET': self.seen.append((handler.path, str(handler.headers)))
                answered = answer(handler)
                if answered is None: return
                status,reason,content,*headers = answered
                asked = re.fullmatch(r'bytes=(\d+)-(\d+)', handler.headers.get('Range', ''))
                size = len(content)
                if asked and status==200:
                    first,last = map(int, asked.groups())
                    status,content = 206,content[first:last+1]
                handler.send_response(status, reason)
                if status==206: handler.send_header('Content-Range', f'bytes {first}-{first+len(content)-1}/{size}')
                handler.send_header('Content-Length', str(len(content)))
                for name,value in headers[0].items() if headers else (): handler.send_header(name, value)
                handler.end_headers()
                if handler.command!='HEAD': handler.wfile.write(content)
            do_HEAD = do_POST = do_GET
            def log_message(self, *args): pass
        super().__init__(('127.0.0.1', 0), Handler)
        self.url = f'http://127.0.0.1:{self.server_port}'

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(.01,), daemon=True).start()
        return self

    def __exit__(self, *args):
        self.over.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *args): "A client that hung up is none"

def jupyter_proxy(prefix, keeps_host=True):
    "Answers of a proxy such as Jupyter's: PREFIX/PORT/PATH is PATH of the server at this port of this machine"
    def forwarded(headers, *others):
        left_out = 'connection','date','server',*others
        return {name:value for name,value in headers.items() if name.lower() not in left_out}
    def answer(handler):
        if not handler.path.startswith(f'{prefix}/'): return 404, None, b''
        port,_,path = handler.path.removeprefix(f'{prefix}/').partition('/')
        body = handler.rfile.read(int(handler.headers.get('Content-Length', 0)))
        headers = forwarded(handler.headers, *([] if keeps_host else ['host']))
        connection = http.client.HTTPConnection('127.0.0.1', int(port))
        connection.request(handler.command, f'/{path}', body or None, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, response.reason, content, forwarded(response.headers, 'content-length')
    return answer

def files_of(folder):
    "Answers of a server of the files in a folder"
    def answer(handler):
        file = folder/handler.path.partition('?')[0].strip('/')
        return (200, None, file.read_bytes()) if file.is_file() else (404, None, b'')
    return answer
