"""Heads that come again: a client repeats its head with every turn, a server with every answer.

Law: two heads are alike if they are the same byte for byte, but for the digits of the one length that both have. What
was said of one may be said of the other only where that length is the only one that either has.
"""

from __future__ import annotations

from typing import Final

from sidecar.relay.wire import LENGTH_DIGITS, number_at

MOST: Final = 256
"""How many heads are remembered in one place."""
LONGEST_BYTES: Final = 4096
"""Longer heads are read anew each time: what is remembered must stay small."""
NO_LENGTH: Final = -3
"""A head has no plainly written length."""
_PLAIN: Final = b"\r\nContent-Length: "
_LOWER: Final = b"\r\ncontent-length: "
"""The two spellings that nearly all clients and servers use."""


class Shape:
    """What heads that are alike have in common."""

    __slots__ = ("after", "before", "has_length")

    def __init__(self, before: bytes, after: bytes) -> None:
        """`before` the length's digits, and `after` them; without a length all is `before`."""
        self.before = before
        self.after = after
        self.has_length = after != b""

    @property
    def whole(self) -> tuple[bytes, bytes]:
        return self.before, self.after

    def begins(self, data: bytes) -> tuple[int, int]:
        """Where a head of this shape ends in `data`, behind its blank line, and its length or NO_LENGTH.

        -1 where `data` does not begin with one.
        """
        at = len(self.before)
        if data[:at] != self.before:
            return -1, NO_LENGTH
        if not self.has_length:
            return (at + 2, NO_LENGTH) if data[at : at + 2] == b"\r\n" else (-1, NO_LENGTH)
        length, at = number_at(data, at, LENGTH_DIGITS)
        end = at + len(self.after)
        if length < 0 or data[at:end] != self.after or data[end : end + 2] != b"\r\n":
            return -1, NO_LENGTH
        return end + 2, length


def shape_of(block: bytes) -> tuple[Shape, int]:
    """The shape of the head in `block`, which ends with the CRLF of its last line, and its length or NO_LENGTH."""
    at = block.find(_PLAIN)
    if at < 0:
        at = block.find(_LOWER)
    if at >= 0:
        start = at + len(_PLAIN)
        length, end = number_at(block, start, LENGTH_DIGITS)
        if length >= 0 and block[end : end + 2] == b"\r\n":
            return Shape(block[:start], block[end:]), length
    return Shape(block, b""), NO_LENGTH
