"""A TCP relay that adds latency: what `netem` would do, in user space.

Everything that arrives is passed on as it was, `delay` seconds later, in each direction.
"""

import asyncio
import threading
from collections.abc import Awaitable


class Relay:
    """Listens on a port of 127.0.0.1, and passes connections on to an address, in a thread."""

    def __init__(self, address: str, port: int, delay: float):
        """Starts.

        Args:
          address: HOST:PORT where connections go.
          port: where it listens; 0 for a free one, see `self.port`.
          delay: seconds that it adds in each direction.
        """
        self._host, _, target = address.rpartition(":")
        self._target, self._delay, self.port = int(target), delay, port
        ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True).start()
        ready.wait()

    async def _serve(self, ready: threading.Event) -> None:
        server = await asyncio.start_server(self._connect, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await server.serve_forever()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(self._host, self._target)
        except OSError:
            writer.close()
            return
        ways: list[Awaitable[None]] = [self._pass(reader, back), self._pass(there, writer)]
        await asyncio.gather(*ways)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes on one direction."""
        loop, waiting = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

        async def send() -> None:
            while True:
                due, data = await waiting.get()
                await asyncio.sleep(due - loop.time())
                if not data:
                    break
                writer.write(data)
                await writer.drain()
            writer.close()

        sender = asyncio.create_task(send())
        try:
            while data := await reader.read(1 << 16):
                waiting.put_nowait((loop.time() + self._delay, data))
        except OSError:
            pass
        waiting.put_nowait((loop.time() + self._delay, b""))
        await asyncio.gather(sender, return_exceptions=True)
