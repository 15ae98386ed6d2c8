"""Both wires of one exchange: a relay to put before a server, whose bytes a test wants to see."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

_PIECE_BYTES = 64 * 1024


@dataclass
class Recorded:
    """One exchange in bytes, heads and framing included."""

    request: bytearray = field(default_factory=bytearray)
    response: bytearray = field(default_factory=bytearray)


class RecordingRelay:
    """A TCP relay that changes nothing and keeps the bytes of both directions, exchange by exchange."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.exchanges: list[Recorded] = []
        self.url = ""

    @classmethod
    async def start(cls, target_url: str) -> RecordingRelay:
        """A relay before the server of `target_url`, on a free loopback port."""
        address = urlsplit(target_url)
        relay = cls(str(address.hostname), int(address.port or 80))
        relay._server = await asyncio.start_server(relay._connected, "127.0.0.1", 0)
        relay.url = f"http://127.0.0.1:{relay._server.sockets[0].getsockname()[1]}"
        return relay

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def about(self, word: bytes) -> Recorded:
        """The one POST whose request contains `word`; the sidecar's own look at the session's record is a GET."""
        posts = [exchange for exchange in self.exchanges if exchange.request.startswith(b"POST ")]
        (found,) = [exchange for exchange in posts if word in exchange.request]
        return found

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._relay(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target_reader, target_writer = await asyncio.open_connection(*self._target)
        exchange: Recorded | None = None

        async def up() -> None:
            nonlocal exchange
            while data := await reader.read(_PIECE_BYTES):
                # HTTP/1.1 without pipelining: what follows an answer belongs to the next exchange.
                if exchange is None or exchange.response:
                    exchange = Recorded()
                    self.exchanges.append(exchange)
                exchange.request += data
                target_writer.write(data)
                await target_writer.drain()

        async def down() -> None:
            while data := await target_reader.read(_PIECE_BYTES):
                if exchange is not None:
                    exchange.response += data
                writer.write(data)
                await writer.drain()

        pumps = [asyncio.ensure_future(up()), asyncio.ensure_future(down())]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            target_writer.close()
