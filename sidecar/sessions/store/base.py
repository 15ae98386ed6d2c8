"""The promise of a lineage store."""

from __future__ import annotations

from typing import Protocol


class StoreUnavailable(Exception):
    """The store cannot be used now. Never the client's problem: the turn goes on without it."""


class Store(Protocol):
    """Keeps under which id a session was continued. Every call ends within 250 ms or raises StoreUnavailable."""

    is_shared: bool
    """Others may write to it: another worker, or another machine."""

    async def open(self) -> None: ...
    async def successor(self, session_id: bytes) -> bytes | None: ...
    async def remember(self, session_id: bytes, successor: bytes) -> None: ...
    async def size(self) -> int: ...
    async def close(self) -> None: ...
