"""Heads that were admitted before: a client repeats its head with every turn, only the body's length differs.

Law: what is remembered is what `admit` would say again. A familiar head is, byte for byte, one that was admitted,
but for the digits of the one length that both have. All else that could change the verdict is part of the key (who
asks, and where) or compared at each recall (the rules, the session's newest id). Faults are never remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sidecar.relay.admission import Rules
from sidecar.relay.request import Listener, Request
from sidecar.relay.wire import CHUNKED, NO_LENGTH, split_length

_MOST: Final = 256
_LONGEST_BYTES: Final = 4096
"""Longer heads are read anew each time: what is remembered must stay small."""
_Key = tuple[bytes, bool, bytes, Listener]
"""The head without its length, whether it has one, the peer, and the listener."""


class FamiliarHeads:
    """The requests that were admitted lately, by head, peer and listener."""

    __slots__ = ("_known", "_rules")

    def __init__(self) -> None:
        self._known: dict[_Key, Request] = {}
        self._rules: Rules | None = None

    def recall(
        self, block: bytes, peer: bytes, listener: Listener, rules: Rules, newest: Callable[[bytes], bytes]
    ) -> Request | None:
        """The request that `block` heads, admitted as it was before; None where it has to be judged.

        `block` may be anything: what was never admitted is not familiar.
        """
        if rules is not self._rules:
            self._known.clear()
            self._rules = rules
            return None
        rest, length = split_length(block)
        known = self._known.get((rest, length != NO_LENGTH, peer, listener))
        if known is None or length == 0:
            return None
        session_id = known.session_id
        if session_id is not None and newest(session_id) != known.sent_id:
            return None  # it has rotated since
        return known.again(known.body if length == NO_LENGTH else length)

    def learn(self, block: bytes, peer: bytes, listener: Listener, rules: Rules, request: Request) -> None:
        """Remembers `request`, which `block` heads and which was just admitted by `rules`, if it would be again."""
        rest, length = split_length(block)
        if rules is not self._rules or len(block) > _LONGEST_BYTES or not _lasts(request, rules):
            return
        # The length that was taken out has to be the one that counted: then there is no other in what is left.
        if length != (request.body if request.body > 0 else NO_LENGTH):
            return
        twin = request.again(request.body)
        if len(twin.head) != len(request.head):  # an oddly spelled length of 0, which `again` would not write
            return
        if len(self._known) >= _MOST:
            del self._known[next(iter(self._known))]
        self._known[(rest, length != NO_LENGTH, peer, listener)] = twin


def _lasts(request: Request, rules: Rules) -> bool:
    """Whether the verdict depends on nothing but the head."""
    return (
        request.destination == "gateway"
        and not rules.mapping.reads_bodies
        and not rules.mapping.inject_body
        and not request.is_preflight
        and not request.is_upgrade
        and not request.expects_continue
        and not request.waits_for_probe
        and not request.has_own_id  # it never comes again
        and request.body >= CHUNKED
    )
