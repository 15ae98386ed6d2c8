"""A request as far as it is known: what admission finds out, and what the rest of the relay asks about it."""

from __future__ import annotations

import os
from typing import Final, Literal

from sidecar.relay.destinations import Destination
from sidecar.relay.wire import CHUNKED, UNTIL_CLOSE, Field, Fields

_ID_PREFIX: Final = os.urandom(6).hex().encode()
_TWO_DIGITS: Final = tuple(b"%02x" % number for number in range(256))

Listener = Literal["all", "relay", "admin"]
"""Where a client came in: own pages stand beside the relay, nowhere, or alone."""


class Request:
    """A request as far as it has been admitted."""

    __slots__ = (
        "answer_fields",
        "answer_lines",
        "body",
        "cors",
        "credentials",
        "dashboard_token",
        "destination",
        "expects_continue",
        "forwarded_keys",
        "has_own_id",
        "head",
        "head_start",
        "is_derived",
        "is_http_1_0",
        "is_preflight",
        "is_safe",
        "is_unread",
        "is_upgrade",
        "listener",
        "method",
        "new_body",
        "request_id",
        "route",
        "sent_id",
        "session_id",
        "source",
        "traceparent",
        "waits_for_probe",
        "wants_body",
        "wants_close",
    )

    def __init__(self, method: bytes, minor: int = 1, listener: Listener = "all") -> None:
        """`minor` is the 0 or 1 of its HTTP/1.0 or HTTP/1.1."""
        self.listener: Listener = listener
        self.method = method
        self.is_http_1_0 = minor == 0
        self.wants_close = self.is_http_1_0
        self.body = UNTIL_CLOSE
        """A length in bytes, or CHUNKED; UNTIL_CLOSE while it is not known."""
        self.destination: Destination = "gateway"
        self.waits_for_probe = False
        """It asks for a family, and nobody knows yet who serves it."""
        self.is_safe = False
        """It may be sent a second time (RFC 9110, 9.2.1) and has no body."""
        self.is_upgrade = False
        self.is_preflight = False
        self.expects_continue = False
        self.credentials: Fields = []
        """What the gateway is shown."""
        self.dashboard_token: bytes | None = None
        self.cors: tuple[Field, ...] = ()
        """What the answer tells a browser; empty for programs."""
        self.forwarded_keys: list[bytes] = []
        """The route key as the gateway got it, which may echo it."""
        self.answer_fields: Fields = []
        """What the answer gives back to the client."""
        self.answer_lines = b""
        """The same, as they stand in a head."""
        self.sent_id: bytes | None = None
        """The id that goes upstream, which is the session's newest."""
        self.is_derived = False
        self.wants_body = False
        """The session depends on the body, which has not been read."""
        self.is_unread = False
        """Its body might have named the session, but was too long or of another kind."""
        self.new_body: bytes | None = None
        """What takes the body's place."""
        self.source = "none"
        """Where the session id came from."""
        self.session_id: bytes | None = None
        self.route = "none"
        """What is asked for, from a closed list: logs and metrics never see a path."""
        self.request_id = b""
        self.has_own_id = False
        """Its id is the client's."""
        self.traceparent: bytes | None = None
        """The client's own, which passes on and stands in the log line. Source: W3C, Trace Context."""
        self.head = b""
        """The head as the upstream gets it."""
        self.head_start = b""
        """Of that, what does not differ between two requests that are alike: all but its length and its id."""

    def again(self, body: int) -> Request:
        """Another request like this one, which went to the gateway: its body may be of another length."""
        twin = Request(self.method, 0 if self.is_http_1_0 else 1, self.listener)
        twin.wants_close = self.wants_close
        twin.body = body
        twin.is_safe = self.is_safe
        twin.credentials = self.credentials
        twin.cors = self.cors
        twin.forwarded_keys = self.forwarded_keys
        twin.answer_fields = self.answer_fields
        twin.answer_lines = self.answer_lines
        twin.sent_id = self.sent_id
        twin.is_derived = self.is_derived
        twin.source = self.source
        twin.session_id = self.session_id
        twin.route = self.route
        twin.traceparent = self.traceparent
        twin.request_id = new_request_id()
        twin.head_start = self.head_start
        twin.head = self.head_start + head_end(twin, has_length=body > 0)
        return twin

    @property
    def may_rotate(self) -> bool:
        """Whether its answer can tell that its session goes on under another id: only the chat route's does."""
        return self.route == "chat_completions"

    @property
    def is_own(self) -> bool:
        return self.destination == "own"


def head_end(request: Request, *, has_length: bool) -> bytes:
    """The framing, written anew from what was understood, and the id where it is ours."""
    if request.new_body is not None:
        framing = b"Content-Length: %d\r\n" % len(request.new_body)
    elif request.body == CHUNKED:
        framing = b"Transfer-Encoding: chunked\r\n"
    else:
        framing = b"Content-Length: %d\r\n" % request.body if has_length else b""
    if request.has_own_id:
        return framing + b"\r\n"
    return b"%bX-Request-Id: %b\r\n\r\n" % (framing, request.request_id)


class _RequestIds:
    """Counts in hexadecimal, 256 at a time: writing each number out would cost more than the rest of an id."""

    __slots__ = ("_start", "_written")

    def __init__(self) -> None:
        self._written = 0
        self._start = b""

    def next(self) -> bytes:
        last = self._written & 0xFF
        if last == 0:
            self._start = b"%b%010x" % (_ID_PREFIX, self._written >> 8)
        self._written += 1
        return self._start + _TWO_DIGITS[last]


_ids: Final = _RequestIds()


def new_request_id() -> bytes:
    """Unique among all sidecars."""
    return _ids.next()
