"""The client for streams and uploads: raw asyncio protocols on uvloop, so that what is measured is the proxy.

Every function opens its own connections to `port` on loopback, ends within its own limit, and closes them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from bench import shapes
from bench.shapes import Shape

_LIMIT_S = 30.0
_LAST_LINES = b"\r\n" + shapes.LAST_CHUNK
"""How a stream ends. The last chunk alone could be the end of a head whose last field ends with 0."""
_TAIL_BYTES = 160
"""More than a stamp and an end are long: none is lost where the bytes are cut."""
_UPLOAD_BYTES = 10 * 1024 * 1024

T = TypeVar("T")


class BenchFailure(Exception):
    """A measurement that says nothing; the text says why."""


@dataclass
class Delays:
    """What the events of many streams took from the upstream's write to the client's read."""

    events_ns: list[int] = field(default_factory=list)
    complete: int = 0


class Stream(asyncio.Protocol):
    """One request on a connection, and its streamed answer."""

    def __init__(self) -> None:
        self.delays: Delays | None = None
        self.received_bytes = 0
        self.began: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        """When the answer's first byte was there."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def ask(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.began, self.ended, self._tail = loop.create_future(), loop.create_future(), b""
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.received_bytes += len(data)
        if not self.began.done():
            self.began.set_result(time.perf_counter())
            if not data.startswith(b"HTTP/1.1 200"):
                self._fail(f"answered {data[:60]!r}")
                return
        delays = self.delays
        if delays is not None:
            now = time.monotonic_ns()
            text = self._tail + data
            end = 0
            for match in shapes.STAMP.finditer(text):
                delays.events_ns.append(now - int(match[1]))
                end = match.end()
            self._tail = text[max(end, len(text) - _TAIL_BYTES) :]
        else:
            self._tail = data if len(data) >= _TAIL_BYTES else (self._tail + data)[-_TAIL_BYTES:]
        if self._tail.endswith(_LAST_LINES) and not self.ended.done():
            if delays is not None:
                delays.complete += 1
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("closed a connection in the middle of a stream")

    def _fail(self, why: str) -> None:
        for future in (self.began, self.ended):
            if not future.done():
                future.set_exception(BenchFailure(why))
            if not future.cancelled():
                future.exception()  # read here, so that nobody complains about the one that was not waited for


async def paced(port: int, streams: int, shape: Shape, key: str) -> Delays:
    """Streams side by side, their beginnings spread over one gap; the delay of each event."""
    delays = Delays()
    opened = await _open(port, streams)
    try:
        for number, stream in enumerate(opened):
            stream.delays = delays
            stream.ask(shapes.stream_request(f"127.0.0.1:{port}", shape, f"{key}-{number}"))
            await asyncio.sleep(shape.gap_ms / 1000 / streams)
        await _within(asyncio.gather(*(stream.ended for stream in opened)))
    finally:
        await _close(opened)
    return delays


async def first_bytes(port: int, seconds: float, key: str) -> list[float]:
    """Seconds from a request's write to its answer's first byte: short streams, one by one on one connection."""
    shape = Shape(events=1, gap_ms=1)
    request = shapes.stream_request(f"127.0.0.1:{port}", shape, key)
    (stream,) = await _open(port, 1)
    took: list[float] = []
    try:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            asked_at = time.perf_counter()
            stream.ask(request)
            took.append(await _within(stream.began) - asked_at)
            await _within(stream.ended)
    finally:
        await _close([stream])
    return took


async def full_speed(port: int, streams: int, seconds: float, key: str) -> float:
    """Bytes per second that streams bring when nothing is paced."""
    request = shapes.stream_request(f"127.0.0.1:{port}", Shape(events=4096, gap_ms=0, batch=64), key)
    opened = await _open(port, streams)
    began_at = time.perf_counter()

    async def again_and_again(stream: Stream) -> None:
        while time.perf_counter() < began_at + seconds:
            stream.ask(request)
            await stream.ended

    try:
        await _within(asyncio.gather(*(again_and_again(stream) for stream in opened)))
        return sum(stream.received_bytes for stream in opened) / (time.perf_counter() - began_at)
    finally:
        await _close(opened)


async def uploads(port: int, count: int, key: str) -> float:
    """Bytes per second of 10 MB bodies, one after the other on one connection."""
    body = b'{"model":"upload","messages":[{"role":"user","content":"%b"}]}'
    body %= b"A" * (_UPLOAD_BYTES - len(body) + 2)
    request = shapes.request_head(f"127.0.0.1:{port}", len(body), key) + body
    (stream,) = await _open(port, 1)
    try:
        began_at = time.perf_counter()
        for _ in range(count):
            stream.ask(request)
            await _within(stream.began)
        return count * len(body) / (time.perf_counter() - began_at)
    finally:
        await _close([stream])


async def idle(port: int, streams: int, key: str, measure: Callable[[], int]) -> float:
    """What `measure` grows by for each stream that is open and silent."""
    shape = Shape(events=2, gap_ms=600_000)
    before = measure()
    opened = await _open(port, streams)
    try:
        for number, stream in enumerate(opened):
            stream.ask(shapes.stream_request(f"127.0.0.1:{port}", shape, f"{key}-{number}"))
        await _within(asyncio.gather(*(stream.began for stream in opened)))
        return (measure() - before) / streams
    finally:
        await _close(opened)


async def leave(port: int, shape: Shape, key: str, *, waits: bool) -> None:
    """Asks for a stream and leaves: after its first byte if it `waits`, else at once."""
    (stream,) = await _open(port, 1)
    try:
        stream.ask(shapes.stream_request(f"127.0.0.1:{port}", shape, key))
        if waits:
            await _within(stream.began)
    finally:
        await _close([stream])


async def is_ready(port: int) -> bool:
    """Whether a chat is answered there."""
    try:
        (stream,) = await _open(port, 1)
    except OSError:
        return False
    try:
        stream.ask(shapes.stream_request(f"127.0.0.1:{port}", Shape(1, 1), "bench-ready"))
        await _within(stream.ended)
    except BenchFailure:
        return False
    finally:
        await _close([stream])
    return True


async def _open(port: int, count: int) -> list[Stream]:
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Stream, "127.0.0.1", port))[1] for _ in range(count)]


async def _close(opened: list[Stream]) -> None:
    for stream in opened:
        stream.transport.abort()
    await asyncio.sleep(0)


async def _within(awaited: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(_LIMIT_S):
            return await awaited
    except TimeoutError as exc:
        raise BenchFailure(f"did not answer in full within {_LIMIT_S:g} s") from exc
