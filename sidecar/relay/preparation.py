"""What a request may have to wait for before it is sent: the first probe, and its own body."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from sidecar.relay.chunked import ChunkedBody

_FIRST_PROBE_S = 5.0
"""How long a request to a family waits for the first probe after the start; then it goes to the gateway."""
_HELD_BYTES: Final = 65536
"""How much of a request's body waits here while the upstream's connection is being opened."""


async def first_probe(known: asyncio.Event) -> None:
    """Waits until it is known who serves which family, within a limit."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_PROBE_S):
            await known.wait()


class HeldBody:
    """A request's body, as far as it waits here; in the framing that goes upstream."""

    __slots__ = ("_bytes", "_more", "_pieces", "is_whole")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._more: asyncio.Event | None = None
        self.is_whole = False

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._bytes += len(piece)
        if self._more is not None:
            self._more.set()

    def end(self) -> None:
        """All of it has come."""
        self.is_whole = True
        if self._more is not None:
            self._more.set()

    def is_too_much(self, wanted_bytes: int) -> bool:
        """Whether the client has to wait: more is held than is `wanted_bytes`, and than is worth holding."""
        return self._bytes > max(_HELD_BYTES, wanted_bytes)

    def content(self) -> bytes:
        return b"".join(self._pieces)

    def clear(self) -> None:
        self._pieces.clear()

    def replace(self, body: bytes) -> None:
        self._pieces = [body]

    async def whole(self, limit_bytes: int, *, is_chunked: bool) -> bytes:
        """The payload, once all of it is here; b"" if it is longer than `limit_bytes`."""
        self._more = asyncio.Event()
        while not self.is_whole:
            if self._bytes > limit_bytes:
                return b""
            self._more.clear()
            await self._more.wait()
        held = self.content()
        payload = ChunkedBody(bare=True).feed(held) if is_chunked else held
        return payload if len(payload) <= limit_bytes else b""
