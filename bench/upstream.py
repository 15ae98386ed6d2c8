"""A fake gateway that costs as little as Python can: raw asyncio protocols on uvloop, answers made ahead.

Run as `python -m bench.upstream PORT`; it serves on loopback until it is terminated.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
import time
from typing import cast

import uvloop

from bench import shapes
from bench.shapes import Shape

_BACKLOG = 4096
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_COMPLETION = json.dumps(
    {
        "id": "chatcmpl-bench",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "bench",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "word " * 60}, "finish_reason": "stop"},
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 60, "total_tokens": 69},
    }
).encode()


def _answer(status: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (status, len(body)) + body


_JSON = _answer(b"200 OK", _COMPLETION)
_MODELS = _answer(b"200 OK", b'{"object":"list","data":[{"id":"bench","object":"model"}]}')
_NOT_FOUND = _answer(b"404 Not Found", b'{"error":{"message":"not here"}}')


class Connection(asyncio.Protocol):
    """Answers one request after the other; a stream ends when its reader leaves."""

    def __init__(self) -> None:
        self._buffer = b""
        self._left = 0
        """Bytes of a long body that are still to come; they are dropped."""
        self._is_gone = False
        self._is_full = False
        self._shape = Shape(0, 0)
        self._sent = 0
        self._due_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_gone = True
        if self._timer is not None:
            self._timer.cancel()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._shape.events and not self._shape.gap_ms:
            self._pour()

    def data_received(self, data: bytes) -> None:
        if self._left:
            self._left -= len(data)
            if not self._left:
                self._transport.write(_JSON)
            return
        if self._buffer:
            data = self._buffer + data
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            self._buffer = data
            return
        length = _LENGTH.search(data, 0, end)
        if length is not None:
            missing = end + int(length[1]) - len(data)
            if missing > 65536:  # a long one: nobody looks into it
                self._left, self._buffer = missing, b""
                return
            is_whole = missing <= 0
        else:
            is_whole = _CHUNKED.search(data, 0, end) is None or data.endswith(shapes.LAST_CHUNK)
        self._buffer = b"" if is_whole else data
        if is_whole:
            self._respond(data)

    def _respond(self, data: bytes) -> None:
        if not data.startswith(b"POST"):
            self._transport.write(_MODELS if data.startswith(b"GET /v1/models ") else _NOT_FOUND)
            return
        shape = shapes.shape_in(data)
        if shape is None:
            self._transport.write(_JSON)
            return
        self._shape, self._sent = shape, 0
        if not shape.gap_ms:
            self._transport.write(shapes.STREAM_HEAD)
            self._pour()
            return
        self._due_at = asyncio.get_running_loop().time()
        self._transport.write(shapes.STREAM_HEAD + shapes.as_chunk(shapes.event(time.monotonic_ns())))
        self._sent = 1
        self._wait()

    def _wait(self) -> None:
        self._due_at += self._shape.gap_ms / 1000
        self._timer = asyncio.get_running_loop().call_at(self._due_at, self._tick)

    def _tick(self) -> None:
        if self._sent == self._shape.events:
            self._transport.write(shapes.stream_end())
            return
        self._sent += 1
        self._transport.write(shapes.as_chunk(shapes.event(time.monotonic_ns())))
        self._wait()

    def _pour(self) -> None:
        """As fast as it is read."""
        shape = self._shape
        block = shapes.as_chunk(shapes.event(0)) * shape.batch
        while not self._is_full and not self._is_gone and self._sent < shape.events:
            self._transport.write(block)
            self._sent += shape.batch
        if self._sent >= shape.events:
            self._shape = Shape(0, 0)
            self._transport.write(shapes.stream_end())


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port, backlog=_BACKLOG)
    gc.freeze()
    gc.disable()  # its pauses would look like the proxy's
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
