"""Heads that were admitted before: a client repeats its head with every turn, only the body's length differs.

Law: what is remembered is what `admit` would say again. A familiar head is alike one that was admitted. All else that
could change the verdict is part of the key (who asks, and where) or compared at each recall (the rules, the session's
newest id). Faults are never remembered.
"""

from __future__ import annotations

from collections.abc import Callable

from sidecar.relay.admission import Rules
from sidecar.relay.repeats import LONGEST_BYTES, MOST, NO_LENGTH, Shape, shape_of
from sidecar.relay.request import Listener, Request
from sidecar.relay.wire import CHUNKED

_Key = tuple[tuple[bytes, bytes], bytes, Listener]
"""The head without its length, the peer, and the listener."""


class Admitted:
    """A head that was admitted, with the verdict."""

    __slots__ = ("_request", "_rules", "shape")

    def __init__(self, shape: Shape, request: Request, rules: Rules) -> None:
        self.shape = shape
        self._request = request
        self._rules = rules

    def again(self, length: int, rules: Rules, newest: Callable[[bytes], bytes]) -> Request | None:
        """The request of a head alike, from the same client; None where it has to be judged."""
        request = self._request
        if rules is not self._rules or length == 0:
            return None
        session_id = request.session_id
        if session_id is not None and newest(session_id) != request.sent_id:
            return None  # it has rotated since
        return request.again(request.body if length == NO_LENGTH else length)


class FamiliarHeads:
    """The heads that were admitted lately, by peer and listener."""

    __slots__ = ("_known", "_rules")

    def __init__(self) -> None:
        self._known: dict[_Key, Admitted] = {}
        self._rules: Rules | None = None

    def find(self, block: bytes, peer: bytes, listener: Listener) -> tuple[Admitted | None, int]:
        """What was admitted before of the shape that `block` has, and the block's length.

        `block` may be anything: what was never admitted is not familiar.
        """
        shape, length = shape_of(block)
        return self._known.get((shape.whole, peer, listener)), length

    def learn(self, block: bytes, peer: bytes, listener: Listener, rules: Rules, request: Request) -> Admitted | None:
        """Remembers `request`, which `block` heads and which was just admitted by `rules`, if it would be again."""
        if len(block) > LONGEST_BYTES or not _lasts(request, rules):
            return None
        shape, length = shape_of(block)
        # The length that was taken out has to be the one that counted: then there is no other in what is left.
        if length != (request.body if request.body > 0 else NO_LENGTH):
            return None
        twin = request.again(request.body)
        if len(twin.head) != len(request.head):  # an oddly spelled length of 0, which `again` would not write
            return None
        if rules is not self._rules:
            self._known.clear()
            self._rules = rules
        if len(self._known) >= MOST:
            del self._known[next(iter(self._known))]
        admitted = self._known[(shape.whole, peer, listener)] = Admitted(shape, twin, rules)
        return admitted


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
