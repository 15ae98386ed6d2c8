"""HTTP/1.1 in bytes, for tests that send exactly what they say and judge exactly what came back.

Nothing here adds, renames or interprets a header, save for the framing of the answer's body.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Fields = Sequence[tuple[str | bytes, str | bytes]]


@dataclass(frozen=True)
class Answer:
    """One answer: `fields` in wire order, `wire_body` as it came with its framing, `body` without."""

    status: int
    reason: bytes
    fields: tuple[tuple[bytes, bytes], ...]
    wire_body: bytes = b""
    body: bytes = b""

    def values(self, name: str) -> list[bytes]:
        """All values under `name`, whatever its spelling."""
        return [value for field, value in self.fields if field.lower() == name.lower().encode()]

    def value(self, name: str) -> str | None:
        """The value under `name`, or None; that it stands there once is asserted."""
        values = self.values(name)
        assert len(values) <= 1, f"{name} stands there {len(values)} times: {values}"
        return values[0].decode("latin-1") if values else None

    def json(self) -> Any:
        return json.loads(self.body)


class Exchange:
    """A request that was sent on its own connection; its answer is read as far as the test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_head: bool) -> None:
        self._reader = reader
        self._writer = writer
        self._is_head = is_head
        self._ahead = b""

    async def head(self) -> Answer:
        """The answer's head; its bodies are empty."""
        lines = (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[:-2]
        _, status, reason = (lines[0] + b" ").split(b" ", 2)
        pairs = (line.split(b":", 1) for line in lines[1:])
        return Answer(int(status), reason.strip(), tuple((name, value.strip()) for name, value in pairs))

    async def read_until(self, mark: bytes) -> bytes:
        """The wire's next bytes, up to and including `mark`; `whole` still has them all."""
        piece = await self._reader.readuntil(mark)
        self._ahead += piece
        return piece

    async def whole(self, head: Answer) -> Answer:
        """The answer that begins with `head`, to its end."""
        reader = _Recorder(self._reader, self._ahead)
        if self._is_head or head.status in (204, 304):
            body = b""
        elif head.value("Transfer-Encoding") == "chunked":
            body = await _dechunked(reader)
        elif (length := head.value("Content-Length")) is not None:
            body = await reader.exactly(int(length))
        else:
            body = await reader.to_end()
        return Answer(head.status, head.reason, head.fields, bytes(reader.taken), body)

    def leave(self) -> None:
        """Close the connection as a client does that has lost interest, without a word."""
        self._writer.close()


@asynccontextmanager
async def sending(
    url: str, method: str, target: str, fields: Fields = (), body: bytes = b""
) -> AsyncIterator[Exchange]:
    """A request on a connection of its own, with `fields` as they are: Host and Content-Length are the caller's."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=8 * 1024 * 1024)
    try:
        head = b"".join(b"%s: %s\r\n" % (_octets(name), _octets(value)) for name, value in fields)
        writer.write(b"%s %s HTTP/1.1\r\n%s\r\n%s" % (_octets(method), _octets(target), head, body))
        await writer.drain()
        yield Exchange(reader, writer, is_head=method == "HEAD")
    finally:
        writer.close()
        with suppress(ConnectionError):  # the other side was quicker
            await writer.wait_closed()


async def ask(
    url: str, method: str, target: str, fields: Fields = (), body: bytes = b"", *, limit_s: float = 30.0
) -> Answer:
    """The whole answer to one request; Host and, for a body, Content-Length are put before `fields`."""
    async with asyncio.timeout(limit_s):
        async with sending(url, method, target, [*framing(url, body), *fields], body) as exchange:
            return await exchange.whole(await exchange.head())


def framing(url: str, body: bytes = b"") -> list[tuple[str | bytes, str | bytes]]:
    """The fields that every request needs."""
    host: list[tuple[str | bytes, str | bytes]] = [("Host", urlsplit(url).netloc)]
    return [*host, ("Content-Length", str(len(body)))] if body else host


class _Recorder:
    """Reads from what was read before and then from the stream, and keeps what it took."""

    def __init__(self, stream: asyncio.StreamReader, already_read: bytes) -> None:
        self._stream = stream
        self._ahead = already_read
        self.taken = bytearray()

    async def line(self) -> bytes:
        line, found, rest = self._ahead.partition(b"\r\n")
        if found:
            self._ahead = rest
            return self._took(line + found)
        return self._took(self._all_ahead() + await self._stream.readuntil(b"\r\n"))

    async def exactly(self, count: int) -> bytes:
        ahead, self._ahead = self._ahead[:count], self._ahead[count:]
        return self._took(ahead + await self._stream.readexactly(count - len(ahead)))

    async def to_end(self) -> bytes:
        return self._took(self._all_ahead() + await self._stream.read())

    def _all_ahead(self) -> bytes:
        ahead, self._ahead = self._ahead, b""
        return ahead

    def _took(self, data: bytes) -> bytes:
        self.taken += data
        return data


async def _dechunked(reader: _Recorder) -> bytes:
    body = bytearray()
    while size := int((await reader.line()).split(b";")[0], 16):
        body += await reader.exactly(size)
        assert await reader.line() == b"\r\n"
    while await reader.line() != b"\r\n":
        pass  # trailer fields
    return bytes(body)


def _octets(text: str | bytes) -> bytes:
    return text.encode("latin-1") if isinstance(text, str) else text
