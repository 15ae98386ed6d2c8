"""Which connection an exchange gets: a fresh one, a spare, or one that has served before.

Law: a request that must not be sent twice never meets a connection that may have gone stale. There is no retry for it,
since nobody can tell whether a silent upstream has begun to work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from time import monotonic

from sidecar.faults import Fault, upstream_unreachable
from sidecar.relay.connecting import Connector, in_words
from sidecar.relay.upstream import Owner, Upstream

_PROVEN_S = 0.002
"""A connection that ended an answer this short a time ago, and shows no hang-up, is proven alive: servers close idle
ones after seconds."""
_PROVEN_WHILE_BUSY_S = 0.25
_BUSY_REQUESTS, _BUSY_S = 16, 0.02
"""At this rate requests come in waves that need more connections than the wave before, whose spare ones are older than
the shorter limit; and opening connections would slow the upstream down when it can least afford it."""
_IDLE_LIMIT_S = 60.0
"""Longest a connection waits for a safe request. Most servers close after 5 to 75 s; a stale one costs a safe
request only a second try."""
_IDLE_MOST = 256
_SPARE_LIMITS_S = (3.0, 15.0)
"""How long an unused spare is trusted at first, and at most. Servers give a new connection 5 to 60 s to send its first
request; the trust doubles each time a spare has reached its age unharmed."""
_BUSY_WINDOW_S = 120.0
"""Spares are renewed for this long after the last request; a quiet sidecar opens nothing."""
_SWEEP_S = 1.0


class Pool(Owner):
    """The connections to one upstream."""

    def __init__(
        self, name: str, connector: Connector, *, connect_timeout_s: float, keeps_spares: bool, who: str = "gateway"
    ) -> None:
        """`name` is the address that faults show. `keeps_spares`: opening is dear (TLS), so one is opened ahead.
        `who` it is: `gateway` or `dashboard`.
        """
        super().__init__()
        self.name = name
        self._who = who
        self._connector = connector
        self._connect_timeout_s = connect_timeout_s
        self._keeps_spares = keeps_spares
        self._idle: list[Upstream] = []
        self._spares: list[Upstream] = []
        self._spare_limit_s, self._spare_most_s = _SPARE_LIMITS_S
        self._answers_again = False
        self._is_distrusted = False
        self._asked_at = 0.0
        self._taken_at: deque[float] = deque(maxlen=_BUSY_REQUESTS)
        self._opening: asyncio.Task[None] | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._is_closed = False

    # Taking and giving back

    def take(self, *, is_safe: bool) -> Upstream | None:
        """An open connection that suits the request, or None: then `connect` makes one.

        `is_safe`: the request has no body and a safe method, so it may be sent again (RFC 9110, 9.2.1). Any other takes
        a connection that ended an answer a moment ago, if safe requests have shown that this upstream answers more than
        once on a connection; or else an unused spare.
        """
        self._asked_at = now = monotonic()
        self._taken_at.append(now)
        while self._idle:
            newest = self._idle.pop()
            if not newest.is_open:
                continue
            if is_safe or self._is_proven(newest, now):
                return newest
            self._idle.append(newest)
            break
        while self._spares:
            spare = self._spares.pop()
            self._renew_spare()
            if spare.is_open and not spare.has_hung_up() and now - spare.opened_at <= self._spare_limit_s:
                return spare
            spare.leave()
        return None

    def _is_proven(self, upstream: Upstream, now: float) -> bool:
        """Whether `upstream` is alive beyond doubt, so that even a request that must not be repeated may take it."""
        if not self._answers_again:
            return False
        idle_s = now - upstream.idle_since
        is_busy = len(self._taken_at) == _BUSY_REQUESTS and now - self._taken_at[0] <= _BUSY_S
        if idle_s <= _PROVEN_S and is_busy:
            return True
        return idle_s <= (_PROVEN_WHILE_BUSY_S if is_busy else _PROVEN_S) and not upstream.has_hung_up()

    @property
    def is_known_to_answer_again(self) -> bool:
        return self._answers_again

    def drop_idle(self) -> None:
        """Leaves the connections that wait."""
        for upstream in self._idle:
            upstream.leave()
        self._idle.clear()

    def answers_again(self) -> None:
        """A connection that had served before has answered a safe request, here or in another pool to this upstream."""
        self._answers_again = not self._is_distrusted

    def give_back(self, upstream: Upstream) -> None:
        """Called by a connection after a complete answer, when it could carry another exchange."""
        if self._is_closed:
            upstream.leave()
            return
        if len(self._idle) >= _IDLE_MOST:
            self._idle.pop(0).leave()  # the oldest: only the newest ones are ever proven
        upstream.idle_since = monotonic()
        self._idle.append(upstream)
        self._watch()

    def forget(self, upstream: Upstream) -> None:
        """Called by a connection that is gone."""
        if upstream in self._idle:
            self._idle.remove(upstream)
        elif upstream in self._spares:
            self._spares.remove(upstream)
            # It was closed under our hands: trust the next ones for less than that, and never again for longer.
            self._spare_most_s = min(self._spare_most_s, (monotonic() - upstream.opened_at) / 2)
            self._spare_limit_s = min(self._spare_limit_s, self._spare_most_s)

    def distrust(self) -> None:
        """A reused connection died under a request: this upstream closes them when it likes.

        From now on only safe requests take connections that have served before.
        """
        self._is_distrusted = True
        self._answers_again = False

    # Opening

    async def connect(self) -> Upstream:
        """A fresh connection. Raises the fault `upstream_unreachable`, in words, within the connect timeout."""
        upstream = await self._open()
        self._renew_spare()
        return upstream

    async def _open(self) -> Upstream:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await self._connector(lambda: Upstream(self))
        except TimeoutError as exc:
            why = f"it did not answer within {self._connect_timeout_s:g} s"
            raise upstream_unreachable(self.name, why, detail=repr(exc), who=self._who) from exc
        except OSError as exc:
            raise upstream_unreachable(self.name, in_words(exc), detail=repr(exc), who=self._who) from exc

    def _renew_spare(self) -> None:
        if self._keeps_spares and not self._is_closed and self._opening is None and not self._spares:
            self._opening = asyncio.get_running_loop().create_task(self._open_spare())

    async def _open_spare(self) -> None:
        try:
            with contextlib.suppress(Fault):  # the next request finds out, and says it to somebody
                spare = await self._open()
                if self._is_closed:
                    spare.leave()
                else:
                    self._spares.append(spare)
                    self._watch()
        finally:
            self._opening = None

    # Housekeeping

    def _watch(self) -> None:
        if self._sweep is None and not self._is_closed:
            self._sweep = asyncio.get_running_loop().call_later(_SWEEP_S, self._drop_old)

    def _drop_old(self) -> None:
        self._sweep = None
        now = monotonic()
        for upstream in [u for u in self._idle if now - u.idle_since > _IDLE_LIMIT_S]:
            self._idle.remove(upstream)
            upstream.leave()
        for spare in [s for s in self._spares if now - s.opened_at > self._spare_limit_s]:
            self._spares.remove(spare)
            spare.leave()
            self._spare_limit_s = min(2 * self._spare_limit_s, self._spare_most_s)
            if now - self._asked_at < _BUSY_WINDOW_S and self._spare_limit_s > _SWEEP_S:
                self._renew_spare()
        if self._idle or self._spares:
            self._watch()

    async def close(self) -> None:
        """Leaves every idle connection; exchanges that run keep theirs."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        self.drop_idle()
        for spare in self._spares:
            spare.leave()
        self._spares.clear()
