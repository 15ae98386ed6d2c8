"""What upstream and client agree on: how a stream is asked for, and what its events look like. Pure."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

CHAT_PATH = "/v1/chat/completions"

_SHAPE = re.compile(rb'"model": ?"stream-n(\d+)-gap(\d+)-b(\d+)"')
_EVENT = (
    b'data: {"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1700000000,"model":"bench",'
    b'"at":"%016d","choices":[{"index":0,"delta":{"content":"word "},"finish_reason":null}]}\n\n'
)
STAMP = re.compile(rb'"at":"(\d{16})"')
"""The clock at the upstream's write, in nanoseconds. The monotonic clock is one for all processes of a machine."""
LAST_CHUNK = b"0\r\n\r\n"
_END = (
    b'data: {"id":"chatcmpl-bench","object":"chat.completion.chunk","choices":[],'
    b'"usage":{"prompt_tokens":9,"completion_tokens":9,"total_tokens":18}}\n\ndata: [DONE]\n\n'
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


class Shape(NamedTuple):
    """Which stream a client wants."""

    events: int
    gap_ms: int
    """Between two events; 0 is as fast as the reader takes them."""
    batch: int = 1
    """Events in one write."""

    @property
    def model(self) -> str:
        return f"stream-n{self.events}-gap{self.gap_ms}-b{self.batch}"


def shape_in(body: bytes) -> Shape | None:
    """The stream that a request's body asks for, if it asks for one."""
    match = _SHAPE.search(body)
    return Shape(int(match[1]), int(match[2]), int(match[3])) if match else None


def stream_request(netloc: str, shape: Shape, session_key: str) -> bytes:
    body = json.dumps({"model": shape.model, "stream": True, "messages": [{"role": "user", "content": "Hello"}]})
    return request_head(netloc, len(body), session_key) + body.encode()


def request_head(netloc: str, body_bytes: int, session_key: str) -> bytes:
    """A chat request as a frontend's server sends it."""
    lines = [f"POST {CHAT_PATH} HTTP/1.1", f"Host: {netloc}", f"Content-Length: {body_bytes}"]
    lines += [f"{name}: {value}" for name, value in request_fields(session_key).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def request_fields(session_key: str) -> dict[str, str]:
    return {
        "Accept": "*/*",
        "User-Agent": "hermes-sidecar-bench",
        "Authorization": "Bearer sk-bench",
        "Content-Type": "application/json",
        "X-Hermes-Session-Key": session_key,
    }


def event(stamp_ns: int) -> bytes:
    return _EVENT % stamp_ns


def as_chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def stream_end() -> bytes:
    """The last events and the last chunk."""
    return as_chunk(_END) + LAST_CHUNK
