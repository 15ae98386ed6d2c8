"""A tunnel after 101 Switching Protocols: bytes both ways, untouched, until either side ends it.

Frames, sub-protocols, close codes and reasons belong to the two ends; the sidecar does not read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from sidecar.relay.leaving import LeaveWatch

_FLUSH_S = 30.0
"""How long a side may take for what it has not read yet when the other side has gone."""

TunnelEndReason = Literal["complete", "client_left", "upstream_broke"]


class Tunnel:
    """Joins the client's and the upstream's transport; says once how it ended."""

    def __init__(
        self,
        client: asyncio.Transport,
        upstream: asyncio.Transport,
        on_end: Callable[[TunnelEndReason], None],
    ) -> None:
        self._client = _Side(client, lambda exc: on_end("client_left" if exc else "complete"))
        self._upstream = _Side(upstream, lambda exc: on_end("upstream_broke" if exc else "complete"))
        self._client.other, self._upstream.other = self._upstream, self._client

    def begin(self, from_client: bytes, from_upstream: bytes) -> None:
        """Starts with what each side had sent already."""
        for side in (self._client, self._upstream):
            side.transport.set_protocol(side)
        self._client.received_bytes, self._upstream.received_bytes = len(from_client), len(from_upstream)
        if from_client:
            self._upstream.transport.write(from_client)
        if from_upstream:
            self._client.transport.write(from_upstream)

    @property
    def passed_bytes(self) -> tuple[int, int]:
        """What came from the client, and what came from the upstream."""
        return self._client.received_bytes, self._upstream.received_bytes

    def cut(self) -> None:
        """Breaks both sides off."""
        self._client.transport.abort()
        self._upstream.transport.abort()


class _Side(asyncio.Protocol):
    __slots__ = ("_leave_watch", "_limit", "_on_lost", "other", "received_bytes", "transport")

    def __init__(self, transport: asyncio.Transport, on_lost: Callable[[Exception | None], None]) -> None:
        self.transport = transport
        self.other: _Side
        self._on_lost = on_lost
        self.received_bytes = 0
        self._leave_watch: LeaveWatch | None = None
        self._limit: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        self.received_bytes += len(data)
        self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """No half-open tunnels: WebSocket ends both ways at once. What came before is delivered, within a limit."""
        self._end_watch()
        if self._limit is not None:
            self._limit.cancel()
        self._on_lost(exc)
        if exc is None:
            self.other.close()
        else:
            self.other.transport.abort()

    def close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
            self._limit = asyncio.get_running_loop().call_later(_FLUSH_S, self.transport.abort)

    # Backpressure

    def pause_writing(self) -> None:
        self.other.pause_reading()

    def resume_writing(self) -> None:
        self.other.resume_reading()

    def pause_reading(self) -> None:
        if not self.transport.is_closing() and self._leave_watch is None:
            self.transport.pause_reading()
            self._leave_watch = LeaveWatch(self.transport, self.transport.abort)

    def resume_reading(self) -> None:
        if not self.transport.is_closing() and self._leave_watch is not None:
            self._end_watch()
            self.transport.resume_reading()

    def _end_watch(self) -> None:
        if self._leave_watch is not None:
            self._leave_watch.end()
            self._leave_watch = None
