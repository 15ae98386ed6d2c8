"""The longest silence that an upstream is allowed inside one exchange."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class SilenceWatch:
    """Calls `on_silence` once nothing was heard for `limit_s` while it was the upstream's turn.

    One timer for each limit's length, not one for each piece: `heard` only notes the time.
    """

    __slots__ = ("_is_its_turn", "_limit_s", "_on_silence", "_timer", "heard_at")

    def __init__(self, limit_s: float, is_its_turn: Callable[[], bool], on_silence: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._is_its_turn = is_its_turn
        self._on_silence = on_silence
        self._timer: asyncio.TimerHandle | None = None
        self.heard_at = 0.0
        """When there last was a sign of life, on the monotonic clock."""

    def begin(self) -> None:
        self.heard_at = time.monotonic()
        self._wait(self._limit_s)

    def _wait(self, after_s: float) -> None:
        self.end()
        self._timer = asyncio.get_running_loop().call_later(after_s, self._look)

    def _look(self) -> None:
        silent_s = time.monotonic() - self.heard_at
        if not self._is_its_turn():
            self._wait(self._limit_s)
        elif silent_s < self._limit_s:
            self._wait(self._limit_s - silent_s)
        else:
            self._on_silence()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
