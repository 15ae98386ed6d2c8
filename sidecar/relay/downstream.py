"""One client's connection: reads requests one after the other, and notices when the client leaves.

Law: at most one exchange runs on a connection. Bytes of a later request wait in the buffer until the exchange before it
has ended, and after a refusal that leaves the framing in doubt nothing more is read as a request.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from time import monotonic
from typing import Final, cast

from sidecar.faults import Fault, header_too_large, invalid_request, request_timeout, too_many_connections
from sidecar.relay import answers
from sidecar.relay.chunked import ChunkedBody
from sidecar.relay.familiar import Admitted
from sidecar.relay.handler import Exchange
from sidecar.relay.leaving import LeaveWatch
from sidecar.relay.request import Listener
from sidecar.relay.shared import Relay
from sidecar.relay.wire import CHUNKED, HEAD_LIMIT_BYTES, WireError

_READ_AHEAD_BYTES: Final = 65536
"""What a client may send ahead of its running exchange before its reading stops."""
_LINGER_S = 30.0
"""How long a refused client may go on sending before the connection is cut. Closing earlier would reset it, and the
client might never read why it was refused (RFC 9112, 9.6)."""


class Downstream(asyncio.Protocol):
    """A client's connection."""

    __slots__ = (
        "_body_left",
        "_buffer",
        "_chunked",
        "_exchange",
        "_is_lingering",
        "_is_reading",
        "_latest",
        "_leave_watch",
        "_linger",
        "_listener",
        "_relay",
        "peer",
        "since",
        "transport",
        "write",
    )

    transport: asyncio.Transport
    write: Callable[[bytes], None]

    def __init__(self, relay: Relay, listener: Listener = "all") -> None:
        self._relay = relay
        self._listener = listener
        self._exchange: Exchange | None = None
        self._buffer = b""
        self._body_left = 0
        self._chunked: ChunkedBody | None = None
        self._is_reading = True
        self._is_lingering = False
        self._linger: asyncio.TimerHandle | None = None
        self._leave_watch: LeaveWatch | None = None
        self._latest: Admitted | None = None
        """The head of the request before."""
        self.peer = b"unknown"
        self.since = monotonic()
        """When the request began, its body last came on, or the last exchange ended."""

    # Coming and going

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop has a class of its own
        self.write = self.transport.write
        # Nothing waits here that the kernel would take: uvloop then writes at once, not at the end of its round.
        self.transport.set_write_buffer_limits(high=0)
        limit = self._relay.limits.connections
        if len(self._relay.clients) >= limit:
            fault = too_many_connections(limit)
            self.write(answers.fault(fault, close=True))
            self._relay.log.refused(fault)
            self._is_lingering = True
            self.transport.close()  # at once: lingering would hold the very file that is missing
            return
        self._relay.clients.add(self)
        address = transport.get_extra_info("peername")
        if isinstance(address, tuple):
            self.peer = address[0].encode()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relay.clients.discard(self)
        if self._linger is not None:
            self._linger.cancel()
        if self._leave_watch is not None:
            self._leave_watch.end()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_left()

    # Reading requests

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        if self._exchange is None:
            if self._buffer:
                self._head(self._buffer + data)
            else:
                self.since = monotonic()
                self._head(data)
        elif self._body_left:
            self.since = monotonic()
            self._body(data)
        else:
            self._buffer += data
            if len(self._buffer) > _READ_AHEAD_BYTES:
                self.pause_reading()

    def _head(self, data: bytes) -> None:
        self._buffer = b""
        latest = self._latest
        if latest is not None:
            end, length = latest.shape.begins(data)
            if end > 0:
                self._begin(data[: end - 2], data[end:], latest, length)
                return
        if data[:1] in (b"\r", b"\n"):
            # An empty line before a request is to be ignored (RFC 9112, 2.2). One byte stays: the clock goes on.
            data = data.lstrip(b"\r\n") or b"\n"
        end = data.find(b"\r\n\r\n")
        if end < 0 and len(data) <= HEAD_LIMIT_BYTES:
            self._buffer = data
            if b"\n\n" in data:
                self.refuse(invalid_request("its lines end with LF alone"))
            return
        if end < 0 or end > HEAD_LIMIT_BYTES:
            self.refuse(header_too_large(HEAD_LIMIT_BYTES))
            return
        block = data[: end + 2]
        latest, length = self._relay.familiar.find(block, self.peer, self._listener)
        self._begin(block, data[end + 4 :], latest, length)

    def _begin(self, block: bytes, data: bytes, latest: Admitted | None, length: int) -> None:
        exchange = Exchange(self._relay, self, block)
        self._exchange = exchange
        try:
            is_admitted = exchange.begin(self._listener, latest, length)
        except WireError as error:
            self.refuse(invalid_request(str(error)))
            return
        self._latest = exchange.familiar
        if not is_admitted:
            if data and not self._is_lingering:  # the connection goes on; what is there already waits for its turn
                self._buffer = data
                asyncio.get_running_loop().call_soon(self._go_on)
            return
        body = self._body_left = exchange.request.body
        if body == CHUNKED:
            self._chunked = ChunkedBody()
        if body == 0:
            self._buffer = data
        elif data:
            self._body(data)
        if not exchange.is_over:
            exchange.ask()

    def _body(self, data: bytes) -> None:
        exchange = self._exchange
        assert exchange is not None
        left = self._body_left
        if left == CHUNKED:
            chunked = self._chunked
            assert chunked is not None
            piece = chunked.feed(data)
            if piece:
                exchange.request_piece(piece)
            if chunked.error is not None:
                exchange.request_broke(invalid_request(chunked.error))
            elif chunked.done:
                self._body_left = 0
                self._chunked = None
                self._buffer = chunked.rest
                exchange.request_end()
            return
        size = len(data)
        if size < left:
            self._body_left = left - size
            exchange.request_piece(data)
            return
        self._body_left = 0
        if size > left:
            self._buffer = data[left:]
            data = data[:left]
        exchange.request_piece(data)
        exchange.request_end()

    def check_pace(self, now: float) -> None:
        """Ends a request that comes too slowly, and a connection that nobody uses."""
        limits, waited_s = self._relay.limits, now - self.since
        if self._is_lingering:
            return
        if self._exchange is None:
            if self._buffer and waited_s > limits.head_s:
                self.refuse(request_timeout("head", limits.head_s))
            elif waited_s > limits.idle_s:
                self.transport.close()
        elif self._body_left and self._is_reading and waited_s > limits.body_s:
            self._exchange.request_broke(request_timeout("body", limits.body_s))

    # What the exchange says

    def exchange_over(self, *, keep_alive: bool) -> None:
        """The exchange has written all of its answer. The next request may begin, or the connection ends."""
        self._exchange = None
        if not keep_alive or self._body_left:
            self.linger()
            return
        self.since = monotonic()
        self.resume_reading()
        if self._buffer:
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._exchange is None and self._buffer and not self.transport.is_closing():
            data, self._buffer = self._buffer, b""
            self._head(data)

    def refuse(self, fault: Fault) -> None:
        """Answers bytes that are no request, and reads nothing more from them."""
        self.write(answers.fault(fault, close=True))
        self._relay.log.refused(fault)
        self.linger()

    def linger(self) -> None:
        """Ends the connection so that the client can still read its answer: says the end, then drops what comes."""
        self._exchange = None
        self._is_lingering = True
        self._buffer = b""
        if self.transport.is_closing():
            return
        self.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger = asyncio.get_running_loop().call_later(_LINGER_S, self.transport.abort)

    def eof_received(self) -> bool:
        """The client has said its last, which is how leaving looks. What it was fully answered is still delivered."""
        if self._exchange is not None:
            self.transport.abort()
        return False

    def cut(self, *, reset: bool) -> None:
        """Breaks the connection off so that the client sees that its answer is incomplete.

        What the client was already sent still arrives, unless `reset`: then the framing could not show the loss, and
        only a reset can (RFC 9112, 8).
        """
        self._exchange = None
        self._is_lingering = True
        if reset:
            sock: socket.socket = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            self.transport.abort()
        else:
            self.transport.close()
            self._linger = asyncio.get_running_loop().call_later(_LINGER_S, self.transport.abort)

    def hand_over(self) -> bytes:
        """Gives the connection to a tunnel, with what the client had sent already. It still counts as a client."""
        self._exchange = None
        self._is_lingering = True
        self.resume_reading()
        early, self._buffer = self._buffer, b""
        return early

    def tunnel_over(self) -> None:
        self._relay.clients.discard(self)

    @property
    def unsent_bytes(self) -> int:
        """What was answered, but waits for the client to take it."""
        return 0 if self.transport.is_closing() else self.transport.get_write_buffer_size()

    def abort(self) -> None:
        self.transport.abort()

    # Backpressure

    def pause_reading(self) -> None:
        if self._is_reading and not self.transport.is_closing():
            self._is_reading = False
            self.transport.pause_reading()
            self._leave_watch = LeaveWatch(self.transport, self.transport.abort)

    def resume_reading(self) -> None:
        if not self._is_reading and not self.transport.is_closing():
            self._is_reading = True
            self.since = monotonic()
            if self._leave_watch is not None:
                self._leave_watch.end()
                self._leave_watch = None
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        if self._exchange is not None:
            self._exchange.pause_answer()

    def resume_writing(self) -> None:
        if self._exchange is not None:
            self._exchange.resume_answer()
