"A TCP proxy with faults, before a real server: connections that stall, break off in the middle of an answer, or speak TLS"
import asyncio, ssl, threading

class FaultProxy:
    "Forwards to the unix socket or `(host, port)` `up`; set `stall`, or `cut` to the number of answer bytes after which to hang up, once"
    def __init__(self, up, cert=None):
        self.up,self.stall,self.cut,self.tls = up,False,None,None
        if cert:
            self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls.load_cert_chain(*cert)

    async def _conn(self, r, w):
        r2,w2 = await (asyncio.open_connection(*self.up) if isinstance(self.up, tuple) else asyncio.open_unix_connection(self.up))
        try: await asyncio.gather(self._pipe(r, w2), self._pipe(r2, w, True))
        except asyncio.CancelledError: pass

    async def _pipe(self, r, w, answer=False):
        try:
            while b:=await r.read(65536):
                while self.stall: await asyncio.sleep(.01)
                if answer and self.cut is not None:
                    self.cut,b = self.cut-len(b),b[:self.cut]
                    if self.cut<=0:
                        self.cut = None
                        w.write(b); await w.drain()
                        return w.transport.abort()
                w.write(b); await w.drain()
        except OSError: pass
        finally: w.close()

    def __enter__(self):
        self.loop,up = asyncio.new_event_loop(),threading.Event()
        def run():
            self.loop.run_until_complete(self._listen())
            up.set()
            self.loop.run_forever()
        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        up.wait()
        return self

    async def _listen(self):
        self.srv = await asyncio.start_server(self._conn, '127.0.0.1', 0, ssl=self.tls)
        self.port = self.srv.sockets[0].getsockname()[1]

    def _close(self): self.srv.close()

    def __exit__(self, *a):
        async def hang_up():
            self._close()
            ts = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for t in ts: t.cancel()
            await asyncio.gather(*ts, return_exceptions=True)
            self.loop.stop()
        asyncio.run_coroutine_threadsafe(hang_up(), self.loop)
        self.thread.join(5)
