"""A TCP relay that can stop forwarding: whoever speaks through it finds the connection alive and the other end mute."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_READ_BYTES = 65536


class Stall:
    def __init__(self, target_port: int) -> None:
        self.port = 0
        self._target_port = target_port
        self._forwards = asyncio.Event()
        self._forwards.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """From now on nothing gets through, on the connections that are there neither."""
        self._forwards.clear()

    def go_on(self) -> None:
        """What was held back arrives now, if its connection is still there."""
        self._forwards.set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with suppress(OSError, asyncio.CancelledError):
            answers, there = await asyncio.open_connection("127.0.0.1", self._target_port)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pass_on(reader, there))
                    both.create_task(self._pass_on(answers, writer))
            finally:
                there.transport.abort()
        writer.transport.abort()
        self._tasks.discard(task)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                await self._forwards.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()

    async def end(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def stall_before(port: int) -> AsyncIterator[Stall]:
    stall = Stall(port)
    server = await asyncio.start_server(stall.handle, "127.0.0.1", 0)
    stall.port = server.sockets[0].getsockname()[1]
    try:
        yield stall
    finally:
        server.close()
        await stall.end()
