"""What every store of lineages promises, in words.

A lineage entry says under which id a session was continued. Session ids are bytes, any bytes, and both ids of an entry
are at most `LONGEST_ID_BYTES` long; longer ones are not kept. A store holds at most `MOST_LINEAGES` entries, each for
at most `LONGEST_S` seconds after it was last used, and lets go of the longest unused first. "Used" means written or
found; to spare writes, a store may take two uses on one day for one.

Law: a store is an aid. No chat waits for it longer than `LIMIT_S`, and none fails because of it.
"""

from __future__ import annotations

from typing import Protocol

LIMIT_S = 0.25
"""A turn takes seconds, so a person does not notice a quarter of one; a disk or a network that needs longer is ill."""
MOST_LINEAGES = 100_000
"""Thirty rotations a day for nine years. The figures of docs/reference/stores.md were measured with it."""
LONGEST_S = 90 * 86_400
"""A conversation that nobody has continued for a quarter of a year begins anew."""
LONGEST_ID_BYTES = 512
"""The gateway takes 256 characters; a client's name may stand before them where clients are kept apart."""


class StoreUnavailable(Exception):
    """The store did not do it. The text is a reason for the log: no id, no address and no password stands in it."""

    def __init__(self, reason: str, *, is_skipped: bool = False) -> None:
        super().__init__(reason)
        self.is_skipped = is_skipped
        """It was not even asked, since it failed a moment ago. That costs no time and is no further failure."""


class Unusable(Exception):
    """Nothing can be kept there, now or later, without a person's help. The text is a reason for the log."""


class Store(Protocol):
    """Remembers under which id a session was continued.

    Each method ends within `LIMIT_S` or raises StoreUnavailable, and raises nothing else. Cancelling is safe: a write
    that was cut short has happened or has not.
    """

    @property
    def is_shared(self) -> bool:
        """Whether somebody else may write to it: another worker, or another machine. Settled once it is open."""

    async def open(self) -> None:
        """Makes ready. What stands in the way is logged, never raised; then memory serves instead.

        The one method that may take longer, up to seconds: no client waits for it yet.
        """

    async def successor(self, session_id: bytes) -> bytes | None:
        """The id under which `session_id` was continued, or None if it was not, or that is too long ago."""

    async def remember(self, session_id: bytes, successor: bytes) -> None:
        """Keeps that `session_id` was continued as `successor`. The last write wins."""

    async def size(self) -> int:
        """How many entries there are."""

    async def close(self) -> None:
        """Lets go of files and connections, what was being written first. It is not used after that."""


def is_keepable(session_id: bytes, successor: bytes) -> bool:
    return len(session_id) <= LONGEST_ID_BYTES and len(successor) <= LONGEST_ID_BYTES
