"""A client in bytes on one TCP connection: it sends what the test says, and may leave in every way there is."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from tests.support.raw_http import Answer
from tests.support.wire import LIMIT_S, Wire, dechunked


class RawClient(Wire):
    """The client's side of one connection."""

    def __init__(self, host: str, *, records: bool = True) -> None:
        super().__init__(records=records)
        self.host = host
        """What a Host header says for this sidecar."""

    async def ask(
        self, method: str, target: str | bytes, *fields: bytes, body: bytes = b"", limit_s: float = LIMIT_S
    ) -> Answer:
        """Sends a request and reads its whole answer. Content-Length is put in for a body."""
        self.write(self.request(method, target, *fields, body=body))
        return await self.answer(is_head=method == "HEAD", limit_s=limit_s)

    def request(self, method: str, target: str | bytes, *fields: bytes, body: bytes = b"") -> bytes:
        """The bytes of a request with Host, then `fields`, then Content-Length where there is a body."""
        target = target.encode() if isinstance(target, str) else target
        lines = [b"Host: " + self.host.encode(), *fields]
        if body:
            lines.append(b"Content-Length: %d" % len(body))
        return b"%b %b HTTP/1.1\r\n%b\r\n\r\n%b" % (method.encode(), target, b"\r\n".join(lines), body)

    async def head(self, *, limit_s: float = LIMIT_S) -> Answer:
        """The next answer's head; its bodies are empty."""
        lines = (await self.until(b"\r\n\r\n", limit_s=limit_s)).split(b"\r\n")[:-2]
        _, status, reason = (lines[0] + b" ").split(b" ", 2)
        pairs = (line.split(b":", 1) for line in lines[1:])
        return Answer(int(status), reason.removesuffix(b" "), tuple((name, value.strip()) for name, value in pairs))

    async def answer(self, *, is_head: bool = False, limit_s: float = LIMIT_S) -> Answer:
        """The next answer, to its end."""
        head = await self.head(limit_s=limit_s)
        return await self.rest_of(head, is_head=is_head, limit_s=limit_s)

    async def rest_of(self, head: Answer, *, is_head: bool = False, limit_s: float = LIMIT_S) -> Answer:
        """The answer that begins with `head`, to its end."""
        if is_head or head.status in (204, 304):
            wire_body = body = b""
        elif head.value("Transfer-Encoding") == "chunked":
            wire_body, body = await dechunked(self, limit_s=limit_s)
        elif (length := head.value("Content-Length")) is not None:
            wire_body = body = await self.exactly(int(length), limit_s=limit_s)
        else:
            wire_body = body = await self.to_end(limit_s=limit_s)
        return Answer(head.status, head.reason, head.fields, wire_body, body)


@asynccontextmanager
async def raw_client(url: str, *, records: bool = True, receive_buffer: int | None = None) -> AsyncIterator[RawClient]:
    """A connected client. `receive_buffer` bounds what the kernel takes in for a client that does not read."""
    address = urlsplit(url)
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(LIMIT_S):
            await loop.sock_connect(sock, (str(address.hostname), int(address.port or 80)))
    except BaseException:
        sock.close()
        raise
    _, client = await loop.create_connection(lambda: RawClient(address.netloc, records=records), sock=sock)
    try:
        yield client
    finally:
        client.transport.abort()
        for _ in range(3):
            await asyncio.sleep(
                0
            )  # the other side hears of it before the test stops the sidecar: a stop waits for clients


async def ask(
    url: str, method: str, target: str | bytes, *fields: bytes, body: bytes = b"", limit_s: float = LIMIT_S
) -> Answer:
    """The whole answer to one request on a connection of its own."""
    async with raw_client(url) as client:
        return await client.ask(method, target, *fields, body=body, limit_s=limit_s)


CHAT = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
STREAMED_CHAT = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}'
JSON = b"Content-Type: application/json"


async def chat(url: str, *fields: bytes, body: bytes = CHAT, limit_s: float = LIMIT_S) -> Answer:
    """The whole answer to one chat turn on a connection of its own."""
    return await ask(url, "POST", "/v1/chat/completions", JSON, *fields, body=body, limit_s=limit_s)


def grouped(fields: Sequence[tuple[bytes, bytes]]) -> dict[bytes, list[tuple[bytes, bytes]]]:
    """Fields by lower-case name: what must stay the same is the order within a name, and the spelling."""
    groups: dict[bytes, list[tuple[bytes, bytes]]] = {}
    for name, value in fields:
        groups.setdefault(name.lower(), []).append((name, value))
    return groups
