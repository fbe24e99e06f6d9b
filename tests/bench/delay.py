"""A TCP forwarder on loopback that makes the way to a server as long as one to another city."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

_CHUNK = 1 << 16


class _Link:
    """One connection: what arrives is handed on half a round trip later, in order, however much is under way."""

    def __init__(self, port: int, half: float) -> None:
        self.port = port
        self.half = half

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The client's connect() returned at once: the handshake's round trip is made up for here.
        await asyncio.sleep(2 * self.half)
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.port)
            await asyncio.gather(self.forward(reader, up_writer), self.forward(up_reader, writer))
            up_writer.close()
        except OSError:
            pass
        finally:
            writer.close()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                if not data:
                    break
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

        task = asyncio.create_task(deliver())
        try:
            while data := await reader.read(_CHUNK):
                queue.put_nowait((loop.time() + self.half, data))
        except OSError:
            pass
        queue.put_nowait((loop.time() + self.half, b""))
        with contextlib.suppress(OSError):
            await task


@contextlib.contextmanager
def delayed(port: int, round_trip: float) -> Iterator[int]:
    """A port on 127.0.0.1 that leads to ``port`` there with ``round_trip`` seconds added to every round trip."""
    loop = asyncio.new_event_loop()
    started: list[int] = []
    ready = threading.Event()
    stop = asyncio.Event()

    async def main() -> None:
        link = _Link(port, round_trip / 2)
        server = await asyncio.start_server(link.serve, "127.0.0.1", 0)
        started.append(server.sockets[0].getsockname()[1])
        ready.set()
        await stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield started[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
