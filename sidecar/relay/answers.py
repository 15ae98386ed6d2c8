"""Answer heads, pure: what the client gets for an upstream's head, and the sidecar's own answers as bytes."""

from __future__ import annotations

import time
from email.utils import formatdate

from sidecar.faults import REASON_PHRASES, Fault, FaultCode
from sidecar.guard.hosts import vary_on_origin
from sidecar.relay import fields
from sidecar.relay.answer_heads import AnswerHead
from sidecar.relay.request import Request
from sidecar.relay.wire import CHUNKED, Field, Fields
from sidecar.sessions.mapping import SIDECAR_SESSION


def head_bytes(status: int, reason: bytes, lines: Fields) -> bytes:
    return b"HTTP/1.1 %d %b\r\n" % (status, reason) + fields.joined(lines) + b"\r\n"


def relayed_head(request: Request, head: AnswerHead, body: int, *, close: bool) -> bytes:
    """The upstream's head as the client gets it, with `body` as its framing."""
    if body == CHUNKED:
        own = b"" if request.is_http_1_0 else b"Transfer-Encoding: chunked\r\n"
    elif head.status != 204 and head.length >= 0:
        own = b"Content-Length: %d\r\n" % head.length
    else:
        own = b""
    if close:
        own += b"Connection: close\r\n"
    return _head_for(request, head, own)


def upgraded_head(request: Request, head: AnswerHead) -> bytes:
    """The upstream's 101 as the client gets it."""
    return _head_for(request, head, b"Connection: Upgrade\r\nUpgrade: websocket\r\n")


def _head_for(request: Request, head: AnswerHead, own: bytes) -> bytes:
    """The head with the lines that are this connection's `own`, and with what the request has coming."""
    if not head.says_ours and not request.cors:  # the usual answer
        return b"%b%b%bX-Request-Id: %b\r\n\r\n" % (head.start, own, request.answer_lines, request.request_id)
    start, watched = head.start, head.watched
    if request.forwarded_keys and fields.ROUTE_KEYS[0] in watched:
        start, watched = _without_echo(request, head)
    # What the gateway says itself stays as it says it.
    lines = [line for line in request.answer_fields if line[0].lower() not in watched]
    if b"x-request-id" not in watched:
        lines.append((b"X-Request-Id", request.request_id))
    if request.cors:
        lines += request.cors
        lines += vary_on_origin(fields.values(watched, b"vary"))
    return start + own + fields.joined(lines) + b"\r\n"


def _without_echo(request: Request, head: AnswerHead) -> tuple[bytes, fields.Watched]:
    """The gateway echoes the route key as it got it; where that is not how the client sent it, the client's counts."""
    named = head.watched[fields.ROUTE_KEYS[0]]
    echoed = [line for line in named if line[1] in request.forwarded_keys]
    own = [value for name, value in request.answer_fields if name.lower() == fields.ROUTE_KEYS[0]]
    if not echoed or [value for _, value in echoed] == own:
        return head.start, head.watched
    watched = head.watched
    if len(echoed) == len(named):
        watched = {name: lines for name, lines in watched.items() if name != fields.ROUTE_KEYS[0]}
    status_line = head.start[: head.start.index(b"\r\n") + 2]
    return status_line + fields.joined([line for line in head.lines if line not in echoed]), watched


def preflight(request: Request) -> bytes:
    lines = [*request.cors, *request.answer_fields, (b"Vary", b"Origin")]
    return head_bytes(204, b"No Content", lines)


def fault(fault: Fault, request: Request | None = None, *, close: bool) -> bytes:
    """A fault of ours as a whole answer. `request` is missing where the bytes were no request."""
    body = fault.envelope()
    lines: Fields = [
        (b"Content-Type", b"application/json; charset=utf-8"),
        (b"Content-Length", b"%d" % len(body)),
        (b"X-Hermes-Sidecar-Error", fault.code.code.encode()),
        (b"Cache-Control", b"no-store"),
        (b"Date", formatdate(time.time(), usegmt=True).encode()),
        *_extra_of(fault.code),
    ]
    if request is not None:
        # Not the client's own route fields: an error of ours repeats nothing that was sent.
        lines += [line for line in request.answer_fields if line[0] == SIDECAR_SESSION]
        if request.request_id:
            lines.append((b"X-Request-Id", request.request_id))
        if request.cors:
            lines += (*request.cors, (b"Vary", b"Origin"))
        if request.method == b"HEAD":
            body = b""
    if close:
        lines.append((b"Connection", b"close"))
    return head_bytes(fault.status, REASON_PHRASES[fault.status], lines) + body


def _extra_of(code: FaultCode) -> tuple[Field, ...]:
    if code in (FaultCode.DRAINING, FaultCode.TOO_MANY_CONNECTIONS):
        return ((b"Retry-After", b"1"),)
    if code is FaultCode.CLIENT_TOKEN_REQUIRED:
        return ((b"WWW-Authenticate", b'Bearer realm="hermes-sidecar"'),)
    return ()
