"""A store in this process's memory: gone with it."""

from __future__ import annotations

from collections import OrderedDict

_MOST = 100_000


class MemoryLineage:
    is_shared = False

    def __init__(self) -> None:
        self._successors: OrderedDict[bytes, bytes] = OrderedDict()

    async def open(self) -> None:
        """Nothing to open."""

    async def successor(self, session_id: bytes) -> bytes | None:
        return self._successors.get(session_id)

    async def remember(self, session_id: bytes, successor: bytes) -> None:
        self._successors[session_id] = successor
        if len(self._successors) > _MOST:
            self._successors.popitem(last=False)

    async def size(self) -> int:
        return len(self._successors)

    async def close(self) -> None:
        """Nothing to close."""
