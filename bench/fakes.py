"""A relay with both its connections, but without a socket's cost: what is left is what the sidecar's own code takes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import shapes
from sidecar.app import App, build
from sidecar.config import Settings, from_mapping
from sidecar.relay import pool
from sidecar.relay.downstream import Downstream
from sidecar.relay.upstream import Upstream
from sidecar.telemetry import logs

SETTINGS = {"gateway": {"url": "http://127.0.0.1:9000"}, "listen": {"port": 0}, "store": {"url": "memory"}}
_LIMIT_S = 5.0
_MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT_BODY = json.dumps({"model": "bench", "messages": _MESSAGES}).encode()
CHAT = shapes.request_head("127.0.0.1:8080", len(CHAT_BODY), "bench") + CHAT_BODY
ANSWER_BODY = json.dumps(
    {
        "id": "chatcmpl-bench",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 60}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 60, "total_tokens": 69},
    }
).encode()
ANSWER_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\nX-Hermes-Session-Id: bench\r\n"
    b"Content-Length: %d\r\nDate: Mon, 30 Nov 2026 12:00:00 GMT\r\nServer: Python/3.11 aiohttp/3.14.5\r\n\r\n"
) % len(ANSWER_BODY)


class NoTransport:
    """Takes what is written and does nothing."""

    def __init__(self) -> None:
        self._pair = socket.socketpair()  # both ends, so that neither looks closed

    def get_extra_info(self, name: str) -> Any:
        return {"socket": self._pair[0], "peername": ("127.0.0.1", 1)}.get(name)

    def write(self, data: bytes) -> None:
        pass

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        for sock in self._pair:
            sock.close()

    close = write_eof = pause_reading = resume_reading = abort


class Bare:
    """A relay between a client and a gateway that nobody has to wait for."""

    def __init__(self, app: App, downstream: Downstream, upstream: Upstream) -> None:
        self._app = app
        self._downstream = downstream
        self._upstream = upstream
        self.flush: Callable[[], None] = app.relay.log.flush
        """Counts and writes what has ended since the last time."""

    @classmethod
    async def make(cls) -> Bare:
        settings: Settings = from_mapping(SETTINGS)
        null = Path("/dev/null").open("w")  # noqa: SIM115, ASYNC230  open until the process ends; never blocks
        sink = logs.configure("info", "json", null)
        app = await build(settings, sink, url="http://127.0.0.1:0", connections_at_most=100)
        gateway = app.relay.pools["gateway"]

        opened: list[Upstream] = []

        async def connect(factory: Callable[[], Upstream]) -> Upstream:
            opened.append(factory())
            opened[-1].connection_made(NoTransport())  # type: ignore[arg-type]
            return opened[-1]

        gateway._connector = connect
        gateway._answers_again = True
        pool._PROVEN_S = 1e9  # a loop that holds its breath would look like a connection that grows old
        downstream = Downstream(app.relay)
        downstream.connection_made(NoTransport())  # type: ignore[arg-type]
        downstream.data_received(CHAT)
        async with asyncio.timeout(_LIMIT_S):  # the first turn of a session is prepared in a task of its own
            while not opened or opened[0]._receiver is None:  # noqa: ASYNC110  nothing tells of it
                await asyncio.sleep(0)
        opened[0].data_received(ANSWER_HEAD + ANSWER_BODY)
        return cls(app, downstream, opened[0])

    def chat(self) -> None:
        """One exchange: a small chat and its JSON answer."""
        self._downstream.data_received(CHAT)
        self._upstream.data_received(ANSWER_HEAD + ANSWER_BODY)

    def begin_stream(self) -> None:
        self._downstream.data_received(CHAT)
        self._upstream.data_received(shapes.STREAM_HEAD + shapes.as_chunk(shapes.event(0)))

    def event(self) -> None:
        """One event of a stream, as it comes: a chunk of its own."""
        self._upstream.data_received(_EVENT_CHUNK)

    def event_unseen(self) -> None:
        """The same without the observer."""
        chunked = self._upstream._chunked
        assert chunked is not None
        observer, chunked._observer = chunked._observer, None
        self._upstream.data_received(_EVENT_CHUNK)
        chunked._observer = observer

    async def close(self) -> None:
        self._downstream.connection_lost(None)
        await self._app.close()


_EVENT_CHUNK = shapes.as_chunk(shapes.event(0))
