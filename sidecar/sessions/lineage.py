"""Follows sessions that the gateway continued under another id.

Law: a chat never waits long for it. What is known is in memory; a store is asked for as long as its limit at most, a
check of the gateway's record is waited for a second; then the turn goes on with what is known.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from urllib.parse import quote_from_bytes

from sidecar.capabilities.asking import Place, ask
from sidecar.relay.wire import Fields
from sidecar.sessions.mapping import is_legal
from sidecar.sessions.store.base import LIMIT_S, Store, StoreUnavailable

_MOST_KNOWN = 100_000
_MOST_UNWRITTEN = 10_000
_WRITTEN_AT_ONCE = 500
_WRITE_AGAIN_S = 1.0
"""How often a store that was away is offered what was learned meanwhile."""
_LONGEST_CHAIN = 1_000
"""Rotations in a row that are followed. A long conversation rotates every few dozen turns; walking costs 0.1 ms."""
_SETTLE_S = 1.0
"""How long a turn waits for the check of the turn before it."""
_INVENTED = b"api-"
"""How ids begin that hermes-agent makes up when it ignored the one it was sent."""
_TIP = re.compile(rb'"session_id"\s*:\s*"([^"\\]{1,256})"')


class Lineage:
    """Who continued whom."""

    def __init__(
        self,
        store: Store,
        *,
        is_on: bool,
        on_rotation: Callable[[], None],
        on_store_error: Callable[[str], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`is_on`: rotations are followed at all. `on_store_error` gets what the store said."""
        self._store = store
        self.is_on = is_on
        self._on_rotation = on_rotation
        self._on_store_error = on_store_error
        self._on_failure = on_failure
        self._known: OrderedDict[bytes, bytes | None] = OrderedDict()
        self._checks: dict[bytes, asyncio.Task[None]] = {}
        self._unwritten: OrderedDict[bytes, bytes] = OrderedDict()
        """What was learned and has not reached the store."""
        self._writing: asyncio.Task[None] | None = None

    # For the turn that begins

    def newest(self, session_id: bytes) -> bytes:
        """The id under which `session_id` goes on, from memory. A circle ends where it began."""
        if not self.is_on:
            return session_id
        newest = self._known.get(session_id)
        if newest is None:  # nearly always
            return session_id
        seen = {session_id, newest}
        while (successor := self._known.get(newest)) is not None and len(seen) < _LONGEST_CHAIN:
            if successor in seen:
                return session_id
            seen.add(successor)
            newest = successor
        return newest

    def is_settled(self, session_id: bytes) -> bool:
        """Whether `newest` knows all there is to know, without asking anybody."""
        if not self.is_on:
            return True
        newest = self.newest(session_id)
        return newest not in self._checks and newest in self._known and not self._store.is_shared

    async def settle(self, session_id: bytes) -> None:
        """Finds out what there is to know about `session_id`, within the limits."""
        check = self._checks.get(self.newest(session_id))
        if check is not None:
            await asyncio.wait([check], timeout=_SETTLE_S)
        try:
            await self._ask_store(session_id)
        except StoreUnavailable as exc:
            self._count(exc)
        except TimeoutError:
            self._on_store_error("a chain of rotations took too long to read")
        except Exception as exc:  # a fault of ours: no chat may hang on it
            self._on_failure(exc)

    async def _ask_store(self, session_id: bytes) -> None:
        """Reads the chain to its end. A question has its own limit; a second one shares what the first has left."""
        deadline = asyncio.get_running_loop().time() + LIMIT_S
        seen: set[bytes] = set()
        newest = self.newest(session_id)
        while newest not in seen and len(seen) < _LONGEST_CHAIN:
            async with asyncio.timeout_at(deadline if seen else None):
                successor = await self._store.successor(newest)
            seen.add(newest)
            if successor is not None or self._known.get(newest) is None:  # an answer may have told it meanwhile
                self._know(newest, successor)
            newest = self.newest(session_id)

    # For the turn that has its answer

    def learn(self, sent_id: bytes, answered_id: bytes) -> asyncio.Task[None] | None:
        """A 2xx answer of the chat route named a session.

        Where others share the store, the answer is the task that tells them: whoever reads the new id before it has
        ended may ask one of them that does not know it yet.
        """
        if (
            not self.is_on
            or answered_id == sent_id
            or answered_id.startswith(_INVENTED)
            or not is_legal(answered_id)
            or self._known.get(sent_id) == answered_id
        ):
            return None
        self._know(sent_id, answered_id)
        if answered_id not in self._known:
            self._know(answered_id, None)
        self._on_rotation()
        self._unwritten[sent_id] = answered_id
        if len(self._unwritten) > _MOST_UNWRITTEN:
            self._unwritten.popitem(last=False)
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_learned())
        return self._writing if self._store.is_shared else None

    def check(self, sent_id: bytes, place: Place, credentials: Fields) -> None:
        """After a streamed turn: its head left before a rotation could be told, so the session's record is asked."""
        if not self.is_on:
            return
        earlier = self._checks.get(sent_id)
        if earlier is not None:
            earlier.cancel()  # what it would find may be older than this turn
        asking = Place(place.pool, place.netloc, place.prefix, place.timeout_s, credentials)
        check = self._checks[sent_id] = asyncio.get_running_loop().create_task(self._check(sent_id, asking))

        def end(_: asyncio.Task[None]) -> None:
            if self._checks.get(sent_id) is check:
                del self._checks[sent_id]

        check.add_done_callback(end)

    async def _check(self, sent_id: bytes, place: Place) -> None:
        try:
            path = "/api/sessions/" + quote_from_bytes(sent_id, safe="")
            record = await ask(place, path)
            if record.is_success and _end_reason(record.body) == "compression":
                messages = await ask(place, path + "/messages")
                tip = _TIP.search(messages.body) if messages.is_success else None
                if tip is not None:
                    self.learn(sent_id, tip[1])
        except Exception as exc:  # the next turn goes on with what is known
            self._on_failure(exc)

    async def _write_learned(self) -> None:
        """Writes all that was learned. What a store does not take is written when it is back, for the others' sake."""
        try:
            while self._unwritten:
                if not await self._write_some():
                    await asyncio.sleep(_WRITE_AGAIN_S)
        finally:
            self._writing = None

    async def _write_some(self) -> bool:
        """Writes some of it; whether the store took that."""
        some = dict(islice(self._unwritten.items(), _WRITTEN_AT_ONCE))
        writes = (self._store.remember(session_id, successor) for session_id, successor in some.items())
        answers = await asyncio.gather(*writes, return_exceptions=True)
        unavailable = [answer for answer in answers if isinstance(answer, StoreUnavailable)]
        for (session_id, successor), answer in zip(some.items(), answers, strict=True):
            if isinstance(answer, StoreUnavailable):
                continue
            if self._unwritten.get(session_id) == successor:
                del self._unwritten[session_id]
            if isinstance(answer, Exception):
                self._on_failure(answer)
        if unavailable:
            self._count(unavailable[0])
        return not unavailable

    def _count(self, unavailable: StoreUnavailable) -> None:
        if not unavailable.is_skipped:
            self._on_store_error(str(unavailable))

    def _know(self, session_id: bytes, successor: bytes | None) -> None:
        self._known[session_id] = successor
        self._known.move_to_end(session_id)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    async def close(self) -> None:
        """Ends the checks, and lets what was learned reach the store if that takes it now."""
        tasks = [*self._checks.values(), *filter(None, [self._writing])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._unwritten and await self._write_some():
            pass
        await self._store.close()


def _end_reason(body: bytes) -> str | None:
    try:
        document = json.loads(body)
    except ValueError:
        return None
    session = document.get("session", document) if isinstance(document, dict) else None
    reason = session.get("end_reason") if isinstance(session, dict) else None
    return reason if isinstance(reason, str) else None
