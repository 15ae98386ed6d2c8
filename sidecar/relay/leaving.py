"""Noticing that a peer closed while its transport is not being read.

A paused transport reports nothing, not even that the connection is gone. The socket does, when it is asked.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

LOOK_S = 0.2
HANG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
"""What a socket shows when its peer has closed, unread data or not."""


class LeaveWatch:
    """Looks at a transport's socket now and then; calls `on_left` once if its peer has closed."""

    __slots__ = ("_on_left", "_poll", "_timer")

    def __init__(self, transport: asyncio.Transport, on_left: Callable[[], None]) -> None:
        self._on_left = on_left
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), HANG_UP)
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def _look(self) -> None:
        if self._poll.poll(0):
            self._on_left()
        else:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
