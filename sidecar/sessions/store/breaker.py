"""When a store that failed is asked again."""

from __future__ import annotations

import time
from collections.abc import Callable

from sidecar.sessions.store.base import LIMIT_S, StoreUnavailable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class Breaker:
    """Skips a store after a failure: for a second, then for twice as long each time, up to half a minute.

    After a pause one attempt goes through, to find out; whoever comes while it runs is still skipped.
    """

    def __init__(self, limit_s: float = LIMIT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._failures = 0
        self._pause_s = 0.0  # 0: the store works
        self._asks_at = 0.0

    def enter(self) -> int:
        """Begins an attempt; what it returns is for `failed`. Raises StoreUnavailable where the store is skipped."""
        if self._pause_s:
            now = self._clock()
            if now < self._asks_at:
                raise StoreUnavailable("skipped after a failure", is_skipped=True)
            self._asks_at = now + self._limit_s  # by then this attempt has ended, even if it was cancelled
        return self._failures

    def failed(self, attempt: int) -> float | None:
        """Ends an attempt: the pause in seconds that begins.

        None if the store has failed since the attempt began: many that fail together are one failure.
        """
        if attempt != self._failures:
            return None
        self._failures += 1
        self._pause_s = min(self._pause_s * 2 or FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._asks_at = self._clock() + self._pause_s
        return self._pause_s

    def succeeded(self) -> bool:
        """Ends an attempt: whether the store had failed before."""
        had_failed = self._pause_s > 0
        self._pause_s = 0.0
        return had_failed
