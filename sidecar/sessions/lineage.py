"""Follows sessions that the gateway continued under another id.

Law: a chat never waits long for it. What is known is in memory; a store is asked within its own limit, a check of the
gateway's record within a second; then the turn goes on with what is known.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import quote_from_bytes

from sidecar.capabilities.asking import Place, ask
from sidecar.relay.wire import Fields
from sidecar.sessions.store.base import Store, StoreUnavailable

_MOST_KNOWN = 100_000
_LONGEST_CHAIN = 64
"""Rotations in a row that are followed; a conversation of years has fewer."""
_SETTLE_S = 1.0
"""How long a turn waits for the check of the turn before it."""
_LEGAL_ID = re.compile(rb"[\x21-\x7e]{1,256}")
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
        self._writes: set[asyncio.Task[None]] = set()

    # For the turn that begins

    def newest(self, session_id: bytes) -> bytes:
        """The id under which `session_id` goes on, from memory. A circle ends where it began."""
        if not self.is_on:
            return session_id
        seen = {session_id}
        newest = session_id
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
        seen: set[bytes] = set()
        newest = self.newest(session_id)
        while newest not in seen and len(seen) < _LONGEST_CHAIN:
            seen.add(newest)
            try:
                successor = await self._store.successor(newest)
            except StoreUnavailable as exc:
                self._on_store_error(str(exc))
                self._know(newest, self._known.get(newest))
                return
            self._know(newest, successor)
            newest = self.newest(session_id)

    # For the turn that has its answer

    def learn(self, sent_id: bytes, answered_id: bytes) -> None:
        """A 2xx answer of the chat route named a session."""
        if (
            not self.is_on
            or answered_id == sent_id
            or answered_id.startswith(_INVENTED)
            or _LEGAL_ID.fullmatch(answered_id) is None
            or self._known.get(sent_id) == answered_id
        ):
            return
        self._know(sent_id, answered_id)
        if answered_id not in self._known:
            self._know(answered_id, None)
        self._on_rotation()
        self._keep(asyncio.get_running_loop().create_task(self._remember(sent_id, answered_id)))

    def check(self, sent_id: bytes, place: Place, credentials: Fields) -> None:
        """After a streamed turn: its head left before a rotation could be told, so the session's record is asked."""
        if self.is_on and sent_id not in self._checks:
            asking = Place(place.pool, place.netloc, place.prefix, place.timeout_s, credentials)
            self._checks[sent_id] = asyncio.get_running_loop().create_task(self._check(sent_id, asking))

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
        finally:
            del self._checks[sent_id]

    async def _remember(self, session_id: bytes, successor: bytes) -> None:
        try:
            await self._store.remember(session_id, successor)
        except StoreUnavailable as exc:
            self._on_store_error(str(exc))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    def _know(self, session_id: bytes, successor: bytes | None) -> None:
        self._known[session_id] = successor
        self._known.move_to_end(session_id)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    async def close(self) -> None:
        """Ends the checks, and lets what was learned reach the store."""
        checks = list(self._checks.values())
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, *self._writes, return_exceptions=True)
        await self._store.close()


def _end_reason(body: bytes) -> str | None:
    try:
        document = json.loads(body)
    except ValueError:
        return None
    session = document.get("session", document) if isinstance(document, dict) else None
    reason = session.get("end_reason") if isinstance(session, dict) else None
    return reason if isinstance(reason, str) else None
