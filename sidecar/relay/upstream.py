"""One connection to the upstream: sends a request, reads the answer, says what it meant.

Law: bytes reach the receiver only after the framing has accepted them, and each piece leaves in the same call that
brought it. A connection is offered for reuse only after a complete answer with nothing left over.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from time import monotonic
from typing import Final, cast

from sidecar.relay import wire
from sidecar.relay.answer_heads import AnswerHead, FamiliarAnswers
from sidecar.relay.chunked import ChunkedBody
from sidecar.relay.leaving import HANG_UP
from sidecar.relay.stream import PayloadObserver
from sidecar.relay.wire import CHUNKED, HEAD_LIMIT_BYTES, UNTIL_CLOSE, WireError

_NO_ANSWER: Final = "it closed the connection without an answer"


class Receiver:
    """Whoever asked. Each call happens at most once, in this order, but for `answer_piece`.

    A class to inherit from, not a Protocol: compiled, a Protocol's methods are looked up by name at each call.
    """

    __slots__ = ()

    def heard(self) -> None:
        """The upstream gave a sign of life that is no answer."""
        raise NotImplementedError

    def observer_of(self, head: AnswerHead) -> PayloadObserver | None:
        """Who wants to see this answer's payload as it passes, if anybody."""
        raise NotImplementedError

    def answer_head(self, head: AnswerHead, body: int, piece: bytes) -> None:
        """`body` is a length in bytes, CHUNKED or UNTIL_CLOSE; `piece` is what came of it with the head.

        Informational answers are not reported.
        """
        raise NotImplementedError

    def answer_upgrade(self, head: AnswerHead, rest: bytes) -> None:
        """The upstream switched protocols; `rest` already belongs to the new one."""
        raise NotImplementedError

    def answer_piece(self, piece: bytes) -> None:
        raise NotImplementedError

    def answer_end(self) -> None:
        raise NotImplementedError

    def upstream_lost(self, why: str, *, answered: bool) -> None:
        """No complete answer will come. `answered`: bytes of one had arrived."""
        raise NotImplementedError

    def pause_request(self) -> None:
        """The upstream takes no more for now."""
        raise NotImplementedError

    def resume_request(self) -> None:
        raise NotImplementedError


class Owner:
    """Whoever keeps the connections."""

    __slots__ = ("familiar",)

    def __init__(self) -> None:
        self.familiar = FamiliarAnswers()
        """The heads that this upstream answered with before."""

    def answers_again(self) -> None:
        """A connection that had served before has answered a safe request."""
        raise NotImplementedError

    def give_back(self, upstream: Upstream) -> None:
        """After a complete answer: it could carry another exchange."""
        raise NotImplementedError

    def forget(self, upstream: Upstream) -> None:
        """It is gone."""
        raise NotImplementedError


class Upstream(asyncio.Protocol):
    """A connection that carries one exchange at a time."""

    __slots__ = (
        "_bare",
        "_buffer",
        "_chunked",
        "_ended",
        "_error",
        "_framing",
        "_hang_up",
        "_has_said_all",
        "_in_body",
        "_is_safe",
        "_keeps_alive",
        "_left",
        "_method",
        "_observer",
        "_owner",
        "_receiver",
        "_rest",
        "_write",
        "idle_since",
        "is_open",
        "is_reading",
        "opened_at",
        "request_is_sent",
        "served",
        "takes_more",
        "transport",
    )

    transport: asyncio.Transport
    _write: Callable[[bytes], None]

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._receiver: Receiver | None = None
        self._buffer = b""
        self._in_body = False
        self._framing = 0
        self._left = 0
        self._chunked: ChunkedBody | None = None
        self._ended = False
        self._observer: PayloadObserver | None = None
        self._rest = b""
        self._error: str | None = None
        self._bare = False
        self._is_safe = False
        self._method = b""
        self._keeps_alive = True
        self.request_is_sent = False
        self._has_said_all = False
        self.is_open = False
        self.is_reading = True
        self.takes_more = True
        self.served = 0
        self.opened_at = self.idle_since = monotonic()

    # Asking

    def ask(self, receiver: Receiver, method: bytes, start: bytes, *, bare: bool, is_safe: bool) -> None:
        """Sends a request's head with what is there of its body; the rest follows by `send`.

        One write for both: the second would cost as much as all else that a small request costs. `bare`: the answer's
        chunk framing is taken off.
        """
        self._receiver = receiver
        self._method = method
        self._bare = bare
        self._is_safe = is_safe
        self._in_body = False
        self.request_is_sent = False
        self._write(start)

    def send(self, piece: bytes) -> None:
        self._write(piece)

    def leave(self) -> None:
        """Breaks the exchange off: the upstream sees the connection close at once."""
        self._detach()
        self.is_open = False
        self.transport.abort()

    def _detach(self) -> Receiver | None:
        receiver, self._receiver = self._receiver, None
        return receiver

    # Reading the answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop has a class of its own
        self._write = self.transport.write
        self.is_open = True
        self._hang_up = select.poll()
        self._hang_up.register(transport.get_extra_info("socket").fileno(), HANG_UP)

    def has_hung_up(self) -> bool:
        """Whether the upstream has closed, even if the event loop has not heard of it yet."""
        return bool(self._hang_up.poll(0))

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None:  # an idle connection has nothing to say: what comes now could answer the wrong turn
            self.leave()
            self._owner.forget(self)
        elif self._in_body:
            piece = self._accept(data)
            if piece:
                receiver.answer_piece(piece)
            if self._ended:
                self._settle()
        else:
            self._head(self._buffer + data if self._buffer else data)

    def _head(self, data: bytes) -> None:
        assert self._receiver is not None
        self._buffer = b""
        while True:
            latest, end = self._owner.familiar.latest(data)
            if latest is not None:
                head, data = latest, data[end:]
                break
            end = data.find(b"\r\n\r\n")
            is_unfinished = end < 0 and data[:5] == b"HTTP/"[: len(data)] and b"\n\n" not in data[:HEAD_LIMIT_BYTES]
            if is_unfinished and len(data) <= HEAD_LIMIT_BYTES:
                self._buffer = data
                return
            try:
                if is_unfinished or end > HEAD_LIMIT_BYTES:
                    raise WireError(f"its header block is larger than {HEAD_LIMIT_BYTES // 1024} KiB")
                head = self._owner.familiar.read(data[: end + 2])
            except WireError as error:
                self._break_off(str(error), answered=False)
                return
            data = data[end + 4 :]
            if head.status == 101:
                receiver = self._receiver
                self._detach()
                receiver.answer_upgrade(head, data)
                return
            if head.status < 200:
                # Not passed on: a gateway answers for itself (RFC 9110, 3.7), and clients built on Python's
                # http.client take a 103 for the answer.
                self._receiver.heard()
                if not data:
                    return
                continue
            break
        framing = self._framing = self._left = wire.response_body(self._method, head.status, head.length)
        self._keeps_alive = head.keeps_alive
        self._in_body = True
        self._ended = framing == 0
        self._rest = b""
        self._error = None
        observer = self._receiver.observer_of(head)
        if framing == CHUNKED:
            self._chunked = ChunkedBody(bare=self._bare, observer=observer)
            self._observer = None
        else:
            self._observer = observer
        piece = self._accept(data) if data else b""
        self._receiver.answer_head(head, framing, piece)
        if self._ended:
            self._settle()

    def _accept(self, data: bytes) -> bytes:
        """What of `data` is this answer's body. At its end `_ended` is set, with `_rest` or `_error`."""
        framing = self._framing
        if framing == CHUNKED:
            chunked = self._chunked
            assert chunked is not None
            piece = chunked.feed(data)
            if chunked.done or chunked.error is not None:
                self._ended = True
                self._rest, self._error = chunked.rest, chunked.error
            return piece
        if framing != UNTIL_CLOSE:
            left = self._left
            size = len(data)
            self._left = left - size
            if size >= left:
                self._ended = True
                if size > left:
                    self._rest = data[left:]
                    data = data[:left]
        if self._observer is not None:
            self._observer.saw(data)
        return data

    def _settle(self) -> None:
        """The answer is over, well or not; the receiver may have left while its last piece was written."""
        self._chunked = None
        if self._error is not None:
            self._break_off(self._error, answered=True)
            return
        receiver = self._detach()
        if receiver is None:
            return
        self._in_body = False
        if self.served and self._is_safe:
            self._owner.answers_again()
        self.served += 1
        if self._keeps_alive and not self._rest and self.request_is_sent and self.is_open:
            self.resume_reading()
            self._owner.give_back(self)
        else:
            self.is_open = False
            self.transport.abort()
        receiver.answer_end()

    def _break_off(self, why: str, *, answered: bool) -> None:
        receiver = self._receiver
        self.leave()
        if receiver is not None:
            receiver.upstream_lost(why, answered=answered)

    # Losing it

    def eof_received(self) -> bool:
        """The upstream said that it has said all: over TLS only a closure alert says so (RFC 9112, 9.8)."""
        self._has_said_all = True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._owner.forget(self)
        receiver = self._detach()
        if receiver is None:
            return
        if self._in_body:
            if self._framing == UNTIL_CLOSE and exc is None and self._has_said_all:
                receiver.answer_end()
            else:
                receiver.upstream_lost("it broke off in the middle of its answer", answered=True)
        elif self._buffer:
            receiver.upstream_lost("its answer broke off inside the header block", answered=True)
        else:
            why = _NO_ANSWER if exc is None else "it reset the connection before it answered"
            receiver.upstream_lost(why, answered=False)

    # Backpressure, from the upstream and towards it

    def pause_writing(self) -> None:
        self.takes_more = False
        if self._receiver is not None:
            self._receiver.pause_request()

    def resume_writing(self) -> None:
        self.takes_more = True
        if self._receiver is not None:
            self._receiver.resume_request()

    def pause_reading(self) -> None:
        if self.is_reading and not self.transport.is_closing():
            self.is_reading = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self.is_reading and not self.transport.is_closing():
            self.is_reading = True
            self.transport.resume_reading()
