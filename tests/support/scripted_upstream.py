"""An upstream scripted in bytes: the test decides what it says, when it is silent and how it ends.

Every connection runs the test's script. What arrived, and when and how the other side closed, is noted as the socket
shows it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.support.wire import LIMIT_S, Gone, Wire, dechunked


@dataclass(frozen=True)
class Received:
    """A request as it arrived, `head` and `wire_body` byte for byte."""

    head: bytes
    wire_body: bytes = b""
    body: bytes = b""

    @property
    def start_line(self) -> bytes:
        return self.head.split(b"\r\n", 1)[0]

    @property
    def method(self) -> bytes:
        return self.start_line.split(b" ")[0]

    @property
    def target(self) -> bytes:
        return self.start_line.split(b" ")[1]

    @property
    def fields(self) -> list[tuple[bytes, bytes]]:
        """(name, value) in wire order, the blank after the colon left out."""
        lines = (line.split(b":", 1) for line in self.head.split(b"\r\n")[1:-2])
        return [(name, value.removeprefix(b" ")) for name, value in lines]

    @property
    def is_probe(self) -> bool:
        """Whether the sidecar asked this on its own account."""
        return b"hermes-sidecar-probe" in b"".join(self.values("user-agent"))

    @property
    def names(self) -> set[bytes]:
        """The names of all fields, in lower case."""
        return {name.lower() for name, _ in self.fields}

    def values(self, name: str) -> list[bytes]:
        """All values under `name`, whatever its spelling, in wire order."""
        return [value for field, value in self.fields if field.lower() == name.lower().encode()]


class Connection(Wire):
    """The upstream's side of one connection."""

    def __init__(
        self, on_made: Callable[[Wire], None], on_request: Callable[[Received], None], *, records: bool
    ) -> None:
        super().__init__(on_made=on_made, records=records)
        self.requests: list[Received] = []
        """The requests that were read with `request`, complete ones only."""
        self._on_request = on_request
        self._told = asyncio.Event()

    def tell(self) -> None:
        """The test's sign that the script may go on."""
        self._told.set()

    async def told(self, *, limit_s: float = LIMIT_S) -> None:
        """Waits for the test's sign."""
        async with asyncio.timeout(limit_s):
            await self._told.wait()

    async def asked(self, *, limit_s: float = LIMIT_S) -> None:
        """Waits until the script has read a request."""
        async with asyncio.timeout(limit_s):
            while not self.requests:
                await self.news()

    async def head(self, *, limit_s: float = LIMIT_S) -> Received:
        """The next request's head."""
        return Received(await self.until(b"\r\n\r\n", limit_s=limit_s))

    async def request(self, *, limit_s: float = LIMIT_S) -> Received:
        """The next request, its body included."""
        head = await self.head(limit_s=limit_s)
        if head.values("transfer-encoding"):
            wire_body, body = await dechunked(self, limit_s=limit_s)
        else:
            (length,) = head.values("content-length") or [b"0"]
            body = wire_body = await self.exactly(int(length), limit_s=limit_s)
        request = Received(head.head, wire_body, body)
        self.requests.append(request)
        self._on_request(request)
        self.tell_news()
        return request


Script = Callable[[Connection], Awaitable[None]]


class ScriptedUpstream:
    """A server on a free loopback port; each connection is handed to the script."""

    def __init__(self, script: Script, *, records: bool, tls: ssl.SSLContext | None = None) -> None:
        self.connections: list[Connection] = []
        self.requests: list[Received] = []
        """All complete requests that the scripts have read, in the order in which they were complete."""
        self.url = ""
        self.port = 0
        self._script = script
        self._records = records
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._faults: list[BaseException] = []
        self._came = asyncio.Event()

    @property
    def only_request(self) -> Received:
        (request,) = self.requests
        return request

    async def connection(self, number: int = 0, *, limit_s: float = LIMIT_S) -> Connection:
        """The connection with this number, once it is there."""
        async with asyncio.timeout(limit_s):
            while len(self.connections) <= number:
                self._came.clear()
                await self._came.wait()
        return self.connections[number]

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._made, self.requests.append, records=self._records),
            "127.0.0.1",
            0,
            backlog=1024,
            ssl=self._tls,
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """Ends everything. Raises what went wrong in a script, such as a failed assertion."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self.connections:
            connection.transport.abort()
        if self._faults:
            raise self._faults[0]

    def _made(self, wire: Wire) -> None:
        assert isinstance(wire, Connection)
        self.connections.append(wire)
        self._came.set()
        task = asyncio.ensure_future(self._run(wire))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, connection: Connection) -> None:
        try:
            await self._script(connection)
        except Gone:
            connection.close()  # the other side left: that is for the test to judge
        except Exception as exc:
            self._faults.append(exc)
            connection.reset()


@asynccontextmanager
async def scripted_upstream(
    script: Script | bytes, *, records: bool = True, tls: ssl.SSLContext | None = None
) -> AsyncIterator[ScriptedUpstream]:
    """An upstream that runs `script` on each connection; bytes are what every request is answered with.

    A script that returns leaves its connection open. `records=False` for amounts that do not belong into memory.
    """
    upstream = ScriptedUpstream(answering(script) if isinstance(script, bytes) else script, records=records, tls=tls)
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.stop()


def answering(*answers: bytes) -> Script:
    """Reads requests and answers each with the next of `answers`; the last one goes on for ever."""

    async def script(connection: Connection) -> None:
        served = 0
        while True:
            await connection.request(limit_s=60)
            connection.write(answers[min(served, len(answers) - 1)])
            served += 1

    return script


async def clients_request(connection: Connection) -> Received:
    """The connection's first request that is not a probe; those are told that there is nothing of the kind here."""
    while (request := await connection.request(limit_s=60)).is_probe:
        connection.write(ok(b'{"error":{"message":"Not Found"}}', status=b"404 Not Found"))
    return request


async def left_to_the_test(connection: Connection) -> None:
    """A script that does nothing: the test holds the connection itself."""


def ok(body: bytes = b'{"ok":true}', *fields: bytes, status: bytes = b"200 OK") -> bytes:
    """A whole answer with a length, and `fields` as further lines."""
    lines = b"".join(field + b"\r\n" for field in (b"Content-Type: application/json", *fields))
    return b"HTTP/1.1 %b\r\n%bContent-Length: %d\r\n\r\n%b" % (status, lines, len(body), body)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)
