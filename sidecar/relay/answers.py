"""Answer heads, pure: what the client gets for an upstream's head, and the sidecar's own answers as bytes."""

from __future__ import annotations

import time
from email.utils import formatdate

from sidecar.faults import REASON_PHRASES, Fault, FaultCode
from sidecar.guard.hosts import vary_on_origin
from sidecar.relay import fields
from sidecar.relay.admission import Request
from sidecar.relay.wire import CHUNKED, Field, Fields, ResponseHead
from sidecar.sessions.mapping import SIDECAR_SESSION


def head_bytes(status: int, reason: bytes, lines: Fields) -> bytes:
    return b"HTTP/1.1 %d %b\r\n" % (status, reason) + b"".join([b"%b: %b\r\n" % line for line in lines]) + b"\r\n"


def relayed_head(request: Request, head: ResponseHead, body: int, *, close: bool) -> tuple[bytes, bytes | None]:
    """The upstream's head as the client gets it, with `body` as its framing; and the session id that it names."""
    lines, watched = fields.to_downstream(head.fields)
    if body == CHUNKED:
        if not request.is_http_1_0:
            lines.append((b"Transfer-Encoding", b"chunked"))
    elif head.status != 204 and b"content-length" in watched:
        lines.append(watched[b"content-length"][0])
    if close:
        lines.append((b"Connection", b"close"))
    named = watched.get(fields.SESSION_IDS[0])
    text = head_bytes(head.status, head.reason, _finish(request, lines, watched))
    return text, named[0][1] if named else None


def upgraded_head(request: Request, head: ResponseHead) -> bytes:
    """The upstream's 101 as the client gets it."""
    lines, watched = fields.to_downstream(head.fields)
    lines += ((b"Connection", b"Upgrade"), (b"Upgrade", b"websocket"))
    return head_bytes(head.status, head.reason, _finish(request, lines, watched))


def _finish(request: Request, lines: Fields, watched: fields.Watched) -> Fields:
    if request.forwarded_keys and fields.ROUTE_KEYS[0] in watched:
        lines = _without_echo(request, lines, watched)
    for line in request.answer_fields:
        if line[0].lower() not in watched:  # what the gateway says itself stays as it says it
            lines.append(line)
    if b"x-request-id" not in watched:
        lines.append((b"X-Request-Id", request.request_id))
    if request.cors:
        lines += request.cors
        lines += vary_on_origin(fields.values(watched, b"vary"))
    return lines


def _without_echo(request: Request, lines: Fields, watched: fields.Watched) -> Fields:
    """The gateway echoes the route key as it got it; where that is not how the client sent it, the client's counts."""
    echoed = [line for line in watched[fields.ROUTE_KEYS[0]] if line[1] in request.forwarded_keys]
    own = [value for name, value in request.answer_fields if name.lower() == fields.ROUTE_KEYS[0]]
    if not echoed or [value for _, value in echoed] == own:
        return lines
    if len(echoed) == len(watched[fields.ROUTE_KEYS[0]]):
        del watched[fields.ROUTE_KEYS[0]]
    return [line for line in lines if line not in echoed]


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
