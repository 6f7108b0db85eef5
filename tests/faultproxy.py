"A TCP proxy with faults, before real servers: connections that stall, end, are refused or slow"
import asyncio, socket, threading
from types import SimpleNamespace

class FaultProxy:
    """Forwards to the servers `ups`, each a Unix socket or `(host, port)`, from a port for each; `port` is the first

    Its attributes say which faults happen from now on. Connections of replicas and of sentinels are not disturbed,
    except that they are refused with the others. A context manager."""
    stall = False # Nothing is forwarded
    cut = None # Bytes of answers after which to reset the connection, once
    end_after = None # Bytes of answers after which to end the connection properly, with the answer incomplete, once
    rate = None # Bytes per second of answers
    port = None

    def __init__(self, *ups):
        self.ups,self.writers = ups,set()
        self.listeners = {} # `{port: (listener, up)}`

    async def _open(self, port, up):
        listener = await asyncio.start_server(self._connect, '127.0.0.1', port)
        port = listener.sockets[0].getsockname()[1]
        self.listeners[port] = listener,up
        self.port = self.port or port
        return port

    def add(self, up):
        "Listen for one more server; returns the port"
        return self._do(lambda: self._open(0, up))

    async def _connect(self, reader, writer):
        up = self.listeners[writer.get_extra_info('sockname')[1]][1]
        self.writers.add(writer)
        try:
            opened = asyncio.open_connection(*up) if isinstance(up, tuple) else asyncio.open_unix_connection(up)
            up_reader,up_writer = await opened
            # else the client is a replica or a sentinel
            writer.connection = up_writer.connection = SimpleNamespace(is_client=True)
            await asyncio.gather(self._pipe(reader, up_writer), self._pipe(up_reader, writer, True))
        except OSError: writer.close()
        except asyncio.CancelledError: pass
        finally: self.writers.discard(writer)

    async def _pipe(self, reader, writer, answer=False):
        await (self._pipe_answers if answer else self._pipe_requests)(reader, writer, writer.connection)

    async def _pipe_requests(self, reader, writer, connection):
        async def send(part):
            if b'REPLCONF' in part or b'sentinel-' in part: connection.is_client = False
            while self.stall and connection.is_client: await asyncio.sleep(.01)
            writer.write(part)
        await self._pipe_parts(reader, writer, send)

    async def _pipe_answers(self, reader, writer, connection):
        async def send(part):
            if not connection.is_client: return writer.write(part)
            while self.stall: await asyncio.sleep(.01)
            for what in 'cut','end_after':
                left = getattr(self, what)
                if left is None: continue
                setattr(self, what, None if len(part)>=left else left-len(part))
                if len(part)>=left: return await self._end(writer, part[:left], what=='cut')
            if self.rate: await self._write_slowly(writer, part)
            else: writer.write(part)
        await self._pipe_parts(reader, writer, send)

    async def _pipe_parts(self, reader, writer, send):
        "Sends what comes, until the connection ends, or `send` returns true: then it has ended it"
        try:
            while part:=await reader.read(65536):
                if await send(part): return
                await writer.drain()
        except OSError: pass
        finally: writer.close()

    async def _end(self, writer, part, is_reset):
        writer.write(part)
        await writer.drain()
        if is_reset: writer.transport.abort()
        return True

    async def _write_slowly(self, writer, part):
        for start in range(0, len(part), 512):
            writer.write(part[start:start+512])
            await writer.drain()
            await asyncio.sleep(512/self.rate if self.rate else 0)

    def _do(self, act): return asyncio.run_coroutine_threadsafe(act(), self.loop).result(10)

    def refuse(self):
        "Close the ports and all connections; forked processes have copies of the sockets, so these are shut down"
        async def act():
            for listener,_ in self.listeners.values():
                for sock in listener.sockets: sock.shutdown(socket.SHUT_RDWR)
                listener.close()
            for writer in list(self.writers):
                try: writer.get_extra_info('socket').shutdown(socket.SHUT_RDWR)
                except OSError: pass
                writer.transport.abort()
        self._do(act)

    def accept(self):
        "Open the same ports again"
        async def act():
            for port,(_,up) in list(self.listeners.items()): await self._open(port, up)
        self._do(act)

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        for up in self.ups: self.add(up)
        return self

    def __exit__(self, *args):
        async def hang_up():
            for listener,_ in self.listeners.values(): listener.close()
            tasks = asyncio.all_tasks()-{asyncio.current_task()}
            for task in tasks: task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.loop.stop()
        asyncio.run_coroutine_threadsafe(hang_up(), self.loop)
        self.thread.join(5)
