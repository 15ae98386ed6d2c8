"""Lineages in the memory of this process: gone when it ends, and known to no other."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from sidecar.sessions.store.base import LONGEST_S, MOST_LINEAGES, is_keepable


class MemoryLineage:
    """A store that cannot fail. Also what serves where another store cannot be opened."""

    is_shared = False

    def __init__(
        self,
        *,
        most: int = MOST_LINEAGES,
        longest_s: float = LONGEST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._longest_s = longest_s
        self._clock = clock
        # Each use moves an entry to the end, so their order is the order of their last uses.
        self._entries: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()

    async def open(self) -> None:
        """There is nothing to make ready."""

    async def successor(self, session_id: bytes) -> bytes | None:
        self._let_go()
        if session_id not in self._entries:
            return None
        successor, _ = self._entries[session_id]
        self._use(session_id, successor)
        return successor

    async def remember(self, session_id: bytes, successor: bytes) -> None:
        if is_keepable(session_id, successor):
            self._use(session_id, successor)
            self._let_go()

    async def size(self) -> int:
        self._let_go()
        return len(self._entries)

    async def close(self) -> None:
        self._entries.clear()

    def _use(self, session_id: bytes, successor: bytes) -> None:
        self._entries[session_id] = (successor, self._clock())
        self._entries.move_to_end(session_id)

    def _let_go(self) -> None:
        too_old = self._clock() - self._longest_s
        while self._entries:
            oldest = next(iter(self._entries))
            if len(self._entries) <= self._most and self._entries[oldest][1] > too_old:
                return
            del self._entries[oldest]
