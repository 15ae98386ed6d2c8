"""A TCP relay with a gate: while it is shut, a connection through it is accepted and then nothing moves.

So a test decides when a TLS handshake may take place, and can show that something did not have to wait for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_READ_BYTES = 65536


class Gate:
    """Connections before `target_port`; those that came while it was shut go on when it opens."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.arrivals = 0
        """How many connections have come so far, let through or not."""
        self._target_port = target_port
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def shut(self) -> None:
        """Holds back the connections that come from now on; those that were let through are not touched."""
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.arrivals += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there: asyncio.StreamWriter | None = None
        try:
            await self._is_open.wait()
            answers, there = await asyncio.open_connection("127.0.0.1", self._target_port)
            async with asyncio.TaskGroup() as both:
                both.create_task(_pass_on(reader, there))
                both.create_task(_pass_on(answers, writer))
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            self._tasks.discard(task)
            for end in (writer, there):
                if end is not None:
                    end.transport.abort()

    async def end(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


@asynccontextmanager
async def gate_before(port: int) -> AsyncIterator[Gate]:
    gate = Gate(port)
    server = await asyncio.start_server(gate.handle, "127.0.0.1", 0)
    gate.port = server.sockets[0].getsockname()[1]
    try:
        yield gate
    finally:
        server.close()
        await gate.end()
