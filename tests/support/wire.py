"""One end of a TCP connection, as tests hold it: bytes in, bytes out, and how the other side ended it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Literal, cast

Ending = Literal["FIN", "RST"]

LIMIT_S = 5.0
"""How long a test waits for anything before it fails."""
_UNRECORDED_UNREAD_BYTES = 1024 * 1024


class Gone(ConnectionError):
    """The other side ended the connection before it had sent what was waited for."""


class Wire(asyncio.Protocol):
    """Reads with limits, writes, and ends a connection in every way that TCP knows.

    `received` keeps every byte. A wire that does not record keeps only what nobody has read yet, and holds the sender
    back when that is much.
    """

    def __init__(self, *, records: bool = True, on_made: Callable[[Wire], None] | None = None) -> None:
        self.received = bytearray()
        self.ending: Ending | None = None
        self.ended_at: float | None = None
        self.transport: asyncio.Transport
        self._records = records
        self._on_made = on_made
        self._unread = bytearray()
        self._changed = asyncio.Event()
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._is_paused = False

    # Reading

    async def until(self, mark: bytes, *, limit_s: float = LIMIT_S) -> bytes:
        """The next bytes up to and including `mark`."""
        async with asyncio.timeout(limit_s):
            while (found := self._unread.find(mark)) < 0:
                await self._more()
        return self._take(found + len(mark))

    async def exactly(self, count: int, *, limit_s: float = LIMIT_S) -> bytes:
        async with asyncio.timeout(limit_s):
            while len(self._unread) < count:
                await self._more()
        return self._take(count)

    async def some(self, *, limit_s: float = LIMIT_S) -> bytes:
        """Whatever is there; waits for the first byte."""
        await self.some_is_there(limit_s=limit_s)
        return self._take(len(self._unread))

    async def some_is_there(self, *, limit_s: float = LIMIT_S) -> None:
        """Waits for the first byte, and leaves it where it is."""
        async with asyncio.timeout(limit_s):
            while not self._unread:
                await self._more()

    async def to_end(self, *, limit_s: float = LIMIT_S) -> bytes:
        """Everything up to the end, be it FIN or RST: `ending` tells."""
        await self.ended(limit_s=limit_s)
        return self._take(len(self._unread))

    async def ended(self, *, limit_s: float = LIMIT_S) -> Ending:
        """How the other side ended the connection, once it has."""
        async with asyncio.timeout(limit_s):
            while self.ending is None:
                await self.news()
        return self.ending

    async def has_received(self, data: bytes, *, limit_s: float = LIMIT_S) -> None:
        """Waits until `data` has arrived, read or not."""
        async with asyncio.timeout(limit_s):
            while data not in self.received:
                await self.news()

    async def held_back(self, *, limit_s: float = LIMIT_S) -> None:
        """Waits until the other side takes no more: nothing of what waits here has left for a tenth of a second."""
        async with asyncio.timeout(limit_s):
            waiting = -1
            while self.transport.get_write_buffer_size() != waiting or not waiting:
                waiting = self.transport.get_write_buffer_size()
                await asyncio.sleep(0.1)

    async def news(self) -> None:
        """Waits for anything to happen on this connection."""
        self._changed.clear()
        await self._changed.wait()

    def tell_news(self) -> None:
        self._changed.set()

    @property
    def unread(self) -> bytes:
        """What has arrived and was not read yet."""
        return bytes(self._unread)

    def stop_reading(self) -> None:
        self._is_paused = True
        self.transport.pause_reading()

    def go_on_reading(self) -> None:
        self._is_paused = False
        self.transport.resume_reading()

    # Writing

    async def send(self, data: bytes, *, limit_s: float = LIMIT_S) -> None:
        """Writes `data` and waits until most of it has left. Raises Gone if the other side ends it before."""
        self.write(data)
        async with asyncio.timeout(limit_s):
            await self._may_write.wait()
        if self.transport.is_closing():
            raise Gone

    def write(self, data: bytes) -> None:
        """Writes without waiting. Raises Gone if the connection has been lost."""
        if self.transport.is_closing():
            raise Gone
        self.transport.write(data)

    # Ending

    def finish(self) -> None:
        """FIN after what was written; the other direction stays open."""
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()

    def close(self) -> None:
        """FIN after what was written, and nothing is read any more."""
        self.transport.close()

    def reset(self) -> None:
        """RST, now; what was written may be lost."""
        if self.transport.is_closing():
            self.transport.abort()
            return
        sock: socket.socket = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.transport.abort()

    # What the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if self._on_made is not None:
            self._on_made(self)

    def data_received(self, data: bytes) -> None:
        if self._records:
            self.received += data
        self._unread += data
        if not self._records and len(self._unread) > _UNRECORDED_UNREAD_BYTES and not self._is_paused:
            self.stop_reading()
        self.tell_news()

    def eof_received(self) -> bool:
        self._ended("FIN")
        # The test closes this side when it wants to; TLS has no half-open connections.
        return self.transport.get_extra_info("sslcontext") is None

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended("FIN" if exc is None else "RST")
        self._may_write.set()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def _ended(self, how: Ending) -> None:
        if self.ending is None:
            self.ending = how
            self.ended_at = time.monotonic()
        self.tell_news()

    async def _more(self) -> None:
        if self.ending is not None:
            raise Gone(f"{self.ending} after {bytes(self._unread[:200])!r}")
        await self.news()

    def _take(self, count: int) -> bytes:
        taken = bytes(self._unread[:count])
        del self._unread[:count]
        if not self._records and self._is_paused and not self.transport.is_closing():
            self.go_on_reading()
        return taken


async def dechunked(wire: Wire, *, limit_s: float = LIMIT_S) -> tuple[bytes, bytes]:
    """The next chunked body: its bytes as they came, and its payload."""
    raw, payload = bytearray(), bytearray()
    while True:
        line = await wire.until(b"\r\n", limit_s=limit_s)
        raw += line
        size = int(line.split(b";")[0], 16)
        if size == 0:
            break
        chunk = await wire.exactly(size + 2, limit_s=limit_s)
        assert chunk.endswith(b"\r\n"), "a chunk is longer than it says"
        raw += chunk
        payload += chunk[:-2]
    while (line := await wire.until(b"\r\n", limit_s=limit_s)) != b"\r\n":
        raw += line
    raw += line
    return bytes(raw), bytes(payload)
