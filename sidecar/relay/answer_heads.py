"""Answers' heads, pure: what one says of its body, and what of it may cross.

Law: an upstream repeats its heads, so one that was judged before is known again. Faults are never remembered.
"""

from __future__ import annotations

from sidecar.relay import fields, wire
from sidecar.relay.fields import Watched
from sidecar.relay.repeats import LONGEST_BYTES, MOST, NO_LENGTH, Shape, shape_of
from sidecar.relay.wire import UNTIL_CLOSE, Fields


class AnswerHead:
    """An answer's head as it was understood. Nobody changes one: it may be met again."""

    __slots__ = ("content_type", "keeps_alive", "length", "lines", "says_ours", "start", "status", "watched")

    def __init__(
        self,
        status: int,
        start: bytes,
        lines: Fields,
        watched: Watched,
        content_type: bytes,
        length: int,
        *,
        keeps_alive: bool,
    ) -> None:
        self.status = status
        self.start = start
        """The status line and `lines`, as the client gets them."""
        self.lines = lines
        """The fields that may cross. Framing is written anew, from the body's."""
        self.watched = watched
        """Those of them that mapping or CORS want to see, by lower-case name."""
        self.says_ours = any(name not in fields.SESSION_IDS for name in watched)
        """Whether it may already say what the sidecar would add."""
        self.content_type = content_type
        """In lower case."""
        self.length = length
        """What it says of its body: a length in bytes, CHUNKED or UNTIL_CLOSE."""
        self.keeps_alive = keeps_alive

    def again(self, length: int) -> AnswerHead:
        """The same with another length."""
        return AnswerHead(
            self.status,
            self.start,
            self.lines,
            self.watched,
            self.content_type,
            length,
            keeps_alive=self.keeps_alive,
        )

    @property
    def session_id(self) -> bytes | None:
        """The session that it names."""
        named = self.watched.get(fields.SESSION_IDS[0])
        return named[0][1] if named else None


def read_answer_head(block: bytes) -> AnswerHead:
    """The head in `block`, which ends with the CRLF of its last line. Raises WireError."""
    head = wire.parse_response_head(block)
    lengths: list[bytes] = []
    codings: list[bytes] = []
    content_type = b""
    keeps_alive = head.minor == 1
    for name, value in head.fields:
        lowered = name.lower()
        if lowered == b"content-length":
            lengths.append(value)
        elif lowered == b"transfer-encoding":
            codings.append(value)
        elif lowered == b"content-type" and not content_type:
            content_type = value.lower()
        elif lowered == b"connection" and b"close" in fields.list_members((value,)):
            keeps_alive = False
    length = wire.response_framing(lengths, codings) if head.status >= 200 else UNTIL_CLOSE
    lines, watched = fields.to_downstream(head.fields)
    watched.pop(b"content-length", None)
    start = b"HTTP/1.1 %d %b\r\n" % (head.status, head.reason) + fields.joined(lines)
    return AnswerHead(head.status, start, lines, watched, content_type, length, keeps_alive=keeps_alive)


class FamiliarAnswers:
    """The heads that one upstream answered with lately."""

    __slots__ = ("_known", "_latest", "_latest_shape")

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes], AnswerHead] = {}
        self._latest: AnswerHead | None = None
        self._latest_shape = Shape(b"\0", b"")

    def latest(self, data: bytes) -> tuple[AnswerHead | None, int]:
        """The head that `data` begins with, if it is alike the latest one, and where its body begins."""
        end, length = self._latest_shape.begins(data)
        latest = self._latest
        if end < 0 or latest is None:
            return None, -1
        return (latest if length == NO_LENGTH else latest.again(length)), end

    def read(self, block: bytes) -> AnswerHead:
        """The head in `block`, as `read_answer_head` would read it. Raises WireError."""
        shape, length = shape_of(block)
        known = self._known.get(shape.whole)
        if known is not None:
            self._latest, self._latest_shape = known, shape
            return known.again(length) if shape.has_length else known
        head = read_answer_head(block)
        # The length that was taken out has to be the only one: what is left must not hold another.
        rest = shape.before + shape.after
        is_plain = not shape.has_length or (head.length == length and rest.lower().count(b"\r\ncontent-length:") == 1)
        if is_plain and head.status >= 200 and len(block) <= LONGEST_BYTES:
            if len(self._known) >= MOST:
                del self._known[next(iter(self._known))]
            self._known[shape.whole] = self._latest = head
            self._latest_shape = shape
        return head
