"""A store over something slow that may fail: asked in rounds, with a limit, and skipped after a failure.

A round takes along all that is waiting, so that a hundred turns at once cost one transaction or one round trip. Callers
wait for their part of it, never do it themselves: cancelling one, or giving up on it, cuts nothing short.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, Protocol, TypeVar

import structlog

from sidecar.sessions.store.base import LIMIT_S, StoreUnavailable, Unusable, is_keepable
from sidecar.sessions.store.breaker import Breaker
from sidecar.sessions.store.memory import MemoryLineage

OPEN_LIMIT_S = 5.0
ROUND_AT_MOST = 1_000  # keeps a round far below the limit, so that nobody's part is late because of the others'

T = TypeVar("T")
Doing = Literal["reading", "writing"]


class Medium(Protocol):
    """Where lineages lie: a file, or a server. One call at a time; each raises StoreUnavailable where it fails."""

    @property
    def kind(self) -> str:
        """The word for it in logs."""

    @property
    def is_shared(self) -> bool: ...

    async def open(self) -> None:
        """Makes ready. Raises Unusable if there is no point in asking it again."""

    async def read(self, session_ids: Sequence[bytes]) -> Sequence[bytes | None]: ...

    async def write(self, successors: Mapping[bytes, bytes]) -> None: ...

    async def size(self) -> int: ...

    async def close(self) -> None: ...


class RoundsStore:
    """The store over a medium."""

    def __init__(
        self, medium: Medium, *, limit_s: float = LIMIT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._medium = medium
        self._limit_s = limit_s
        self._log = structlog.get_logger().bind(kind=medium.kind)
        self._instead: MemoryLineage | None = None
        self._reads: list[tuple[bytes, asyncio.Future[bytes | None]]] = []
        self._writes: list[tuple[bytes, bytes, asyncio.Future[None]]] = []
        self._sizes: list[asyncio.Future[int]] = []
        self._rounds: asyncio.Task[None] | None = None
        # Two, since a full disk can still be read.
        self._breakers: dict[Doing, Breaker] = {"reading": Breaker(limit_s, clock), "writing": Breaker(limit_s, clock)}

    @property
    def is_shared(self) -> bool:
        return self._instead is None and self._medium.is_shared

    async def open(self) -> None:
        try:
            async with asyncio.timeout(OPEN_LIMIT_S):
                await self._medium.open()
        except TimeoutError:
            self._serve_from_memory(f"it was not open after {OPEN_LIMIT_S:g} s")
        except (Unusable, StoreUnavailable) as exc:
            self._serve_from_memory(str(exc))

    async def successor(self, session_id: bytes) -> bytes | None:
        if self._instead is not None:
            return await self._instead.successor(session_id)
        return await self._ask("reading", lambda future: self._reads.append((session_id, future)))

    async def remember(self, session_id: bytes, successor: bytes) -> None:
        if self._instead is not None:
            await self._instead.remember(session_id, successor)
        elif is_keepable(session_id, successor):
            await self._ask("writing", lambda future: self._writes.append((session_id, successor, future)))

    async def size(self) -> int:
        if self._instead is not None:
            return await self._instead.size()
        return await self._ask("reading", self._sizes.append)

    async def close(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limit_s):
                if self._rounds is not None:
                    await asyncio.wait([self._rounds], timeout=self._limit_s / 2)
                await self._medium.close()
        if self._rounds is not None:
            self._rounds.cancel()

    # --- Asking, with patience for so long ----------------------------------------------------------------------------

    async def _ask(self, doing: Doing, enlist: Callable[[asyncio.Future[T]], object]) -> T:
        breaker = self._breakers[doing]
        attempt = breaker.enter()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        enlist(future)
        if self._rounds is None:
            self._rounds = asyncio.create_task(self._run_rounds())
        try:
            async with asyncio.timeout(self._limit_s):
                answer = await future
        except TimeoutError as exc:
            unavailable = StoreUnavailable(f"no answer within {self._limit_s * 1000:g} ms")
            self._failed(doing, attempt, unavailable)
            raise unavailable from exc
        except StoreUnavailable as exc:
            self._failed(doing, attempt, exc)
            raise
        if breaker.succeeded():
            self._log.info("store_recovered", doing=doing)
        return answer

    def _failed(self, doing: Doing, attempt: int, exc: StoreUnavailable) -> None:
        pause_s = self._breakers[doing].failed(attempt)
        if pause_s is not None:
            self._log.warning("store_unavailable", doing=doing, reason=str(exc), skipped_for_s=pause_s)

    def _serve_from_memory(self, reason: str) -> None:
        self._instead = MemoryLineage()
        self._log.warning("store_unusable", reason=reason, instead="memory, until the next start")

    # --- The rounds ---------------------------------------------------------------------------------------------------

    async def _run_rounds(self) -> None:
        """Round after round until nobody waits. No await after its last look: nobody must come unseen."""
        try:
            while self._writes or self._reads or self._sizes:
                # Writes first: who has seen a write end must find it.
                await self._write_round()
                await self._read_round()
                await self._size_round()
        finally:
            self._rounds = None

    async def _write_round(self) -> None:
        taken, self._writes = self._writes[:ROUND_AT_MOST], self._writes[ROUND_AT_MOST:]
        wanted = {session_id: successor for session_id, successor, future in taken if not future.done()}
        if wanted:
            answer = await self._outcome(self._medium.write(wanted))
            _settle([(future, answer) for _, _, future in taken])

    async def _read_round(self) -> None:
        taken, self._reads = self._reads[:ROUND_AT_MOST], self._reads[ROUND_AT_MOST:]
        wanted = [(session_id, future) for session_id, future in taken if not future.done()]
        if wanted:
            found = await self._outcome(self._medium.read([session_id for session_id, _ in wanted]))
            answers = [found] * len(wanted) if isinstance(found, StoreUnavailable) else found
            _settle([(future, answer) for (_, future), answer in zip(wanted, answers, strict=True)])

    async def _size_round(self) -> None:
        taken, self._sizes = self._sizes, []
        if any(not future.done() for future in taken):
            answer = await self._outcome(self._medium.size())
            _settle([(future, answer) for future in taken])

    async def _outcome(self, doing: Awaitable[T]) -> T | StoreUnavailable:
        try:
            return await doing
        except StoreUnavailable as exc:
            return exc
        except Exception as exc:
            # A mistake in a medium is no reason to fail a chat; the log has to say it.
            self._log.exception("store_broken")
            return StoreUnavailable(type(exc).__name__)


def _settle(answers: Sequence[tuple[asyncio.Future[T], T | StoreUnavailable]]) -> None:
    for future, answer in answers:
        if future.done():  # who asked has gone, or has given up
            continue
        if isinstance(answer, StoreUnavailable):
            # A copy for each: an exception carries the trace of the one place that raises it.
            future.set_exception(StoreUnavailable(str(answer)))
        else:
            future.set_result(answer)
