"""The last conversations, and how turns found theirs: a small table in memory, for the status page.

Law: the number of conversations is bounded, and session ids leave only as the short hashes that the log has as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sidecar.telemetry.lines import short_hash
from sidecar.telemetry.record import ExchangeRecord

AT_MOST: Final = 20
_TURN_ROUTES: Final = frozenset(("chat_completions", "responses", "runs"))


@dataclass(slots=True)
class Conversation:
    """One session as the sidecar has seen it since its start."""

    source: str
    """Where its id came from in the latest turn."""
    turns: int = 0
    is_followed: bool = False
    """The gateway had continued it under another id by the latest turn."""
    last_turn_at: float = 0.0
    """Seconds since the epoch."""


class Recent:
    """Fed with the record of every ended exchange."""

    def __init__(self, at_most: int = AT_MOST) -> None:
        self._at_most = at_most
        self._by_session: OrderedDict[bytes, Conversation] = OrderedDict()
        self.turns_by_source: dict[str, int] = {}
        """All turns since the start, those without a conversation included."""

    def exchange_ended(self, record: ExchangeRecord) -> None:
        """Counts a turn that the gateway took; everything else is none."""
        if record.method != b"POST" or record.route not in _TURN_ROUTES or not 200 <= record.status <= 299:
            return
        self.turns_by_source[record.source] = self.turns_by_source.get(record.source, 0) + 1
        if record.session_id is None:
            return
        conversation = self._by_session.get(record.session_id)
        if conversation is None:
            conversation = self._by_session[record.session_id] = Conversation(record.source)
        else:
            self._by_session.move_to_end(record.session_id)
        conversation.source = record.source
        conversation.turns += 1
        conversation.is_followed = record.is_followed
        conversation.last_turn_at = record.ended_at
        if len(self._by_session) > self._at_most:
            self._by_session.popitem(last=False)

    def newest_first(self) -> Iterator[tuple[str, Conversation]]:
        """Short hash and conversation."""
        for session_id in reversed(self._by_session):
            yield short_hash(session_id), self._by_session[session_id]
