"""The chunked coding, pure: chunks to pieces.

Law: a piece goes on only after it was understood, and never later. Source: RFC 9112, 7.1.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from sidecar.relay.wire import FIELD_BLOCK

if TYPE_CHECKING:  # for the compiler alone: a machine's integer
    from mypy_extensions import i64

_SIZE_LINE: Final = re.compile(rb"([0-9a-fA-F]{1,16})([ \t]*+;[\t\x20-\x7e\x80-\xff]*+)?+\r\n")
_QUICK_DIGITS: Final = 15
"""A longer size may be more than a machine's integer holds, and is read with the pattern."""
_SIZE_LINE_LIMIT_BYTES: Final = 4096
_TRAILER_LIMIT_BYTES: Final = 16384
MANY_BYTES: Final = 8192
"""From here on a piece probably brings many chunks, and is worth a look at all of them at once."""
_AT_ONCE_BYTES: Final = 32768
"""So much of them is looked at together: what is copied for it stays in the processor's cache."""
_TRIES: Final = 4
"""So many chunks may be something else, as the first few of a stream are, before the rest is taken one by one."""
_SMALLEST_EVENT_BYTES: Final = 7
"""`data:` and the blank line. So more than half of such chunks is payload."""


class Observer:
    """Who sees a body's payload as it passes."""

    __slots__ = ()

    def takes_events(self) -> bool:
        """Whether whole events may be told by `saw_events` from here on."""
        return False

    def saw(self, payload: bytes) -> None:
        """Some of the payload passed; not empty."""
        raise NotImplementedError

    def saw_chunk(self, chunk: bytes, start: int, end: int) -> None:
        """One whole chunk passed by itself, with its payload from `start` to `end`."""
        self.saw(chunk[start:end])

    def saw_events(self, count: int, last: bytes) -> None:
        """`count` whole events passed, each with data and in a chunk of its own.

        `last` is the chunks that passed last, 8 KiB or more of them if there were as many.
        """
        raise NotImplementedError


class ChunkedBody:
    """Follows a chunked body as it passes, and hands on only what it has understood.

    `feed` returns the bytes to pass on: the sender's own chunks as they came, without chunk extensions and trailer
    fields, which belong to one hop (RFC 9112, 7.1.1 and 7.1.2). Only plain events that come many at once share a chunk:
    where one ends says nothing about what it holds (RFC 9112, 6.1), and each costs the client more than the sidecar.
    With `bare` it returns the payload alone, for readers that know no chunks. After the last chunk `done` is true and
    `rest` holds what follows the body. At the first byte that is not chunked coding `error` is set, and `feed` has
    returned what came before it.
    """

    __slots__ = ("_bare", "_held", "_in_trailers", "_left", "_observer", "done", "error", "rest")

    def __init__(self, *, bare: bool = False, observer: Observer | None = None) -> None:
        """`observer` is shown what a call of `feed` brings at its end, however many chunks that is."""
        self._bare = bare
        self._observer = observer
        self._left = 0  # bytes of the current chunk still to come, its closing CRLF included
        self._held = b""  # an incomplete size line or trailer section: nothing of the payload
        self._in_trailers = False
        self.done = False
        self.rest = b""
        self.error: str | None = None

    def feed(self, data: bytes) -> bytes:
        if self._held:
            data = self._held + data
            self._held = b""
        if self._in_trailers:
            return self._end(data, 0)
        end = len(data)
        size: int
        after_line: int
        if not self._left and not self._bare:
            size, after_line = _size_line(data, 0)
            if size > 0 and after_line + size + 2 == end and data[end - 2] == 13 and data[end - 1] == 10:
                if self._observer is not None:  # what a stream brings: one event, one chunk
                    self._observer.saw_chunk(data, after_line, end - 2)
                return data
        position = clean_from = 0
        kept: list[bytes] = []
        payload: list[bytes] = []
        takes_payload = self._bare or self._observer is not None
        tries = _TRIES if end >= MANY_BYTES and self._observer is not None and not self._bare else 0
        while position < end:
            left = self._left
            if left:
                step = left if left <= end - position else end - position
                after = left - step
                if after < 2:
                    seen = 2 - after
                    here = seen if seen <= step else step
                    if data[position + step - here : position + step] != b"\r\n"[seen - here : seen]:
                        self.error = "a chunk is longer than it says"
                        step, end = max(0, step - here), position + step - here
                if takes_payload:
                    payload.append(data[position : position + min(step, max(0, left - 2))])
                if self.error is not None:
                    break
                self._left = after
                position += step
                continue
            if tries and end - position >= MANY_BYTES:
                self._show(payload)
                payload = []
                after, merged = self._merge_events(data, position)
                if merged:
                    kept.append(data[clean_from:position])
                    kept += merged
                    position = clean_from = after
                    continue
                tries -= 1
            size, after_line = _size_line(data, position)
            digits = b""
            if size < 0:
                line = _SIZE_LINE.match(data, position)
                if line is None:
                    end = position
                    rest = data[position:]
                    if b"\n" in rest or len(rest) > _SIZE_LINE_LIMIT_BYTES or _cannot_become_size_line(rest):
                        self.error = "a chunk size is malformed"
                    else:
                        self._held = rest
                    break
                if line.end() - position > _SIZE_LINE_LIMIT_BYTES:  # whole or in pieces, the limit is the same
                    self.error, end = "a chunk size is malformed", position
                    break
                digits = line[1]
                size, after_line = int(digits, 16), line.end()
            if size == 0:
                self._show(payload)
                kept.append(data[clean_from:position] if not self._bare else b"".join(payload))
                kept.append(self._end(data, after_line))
                return b"".join(kept)
            if digits and not self._bare:  # an extension, which belongs to the other hop
                kept += (data[clean_from:position], digits, b"\r\n")
                clean_from = after_line
            position = after_line + size
            if position + 1 < end and data[position] == 13 and data[position + 1] == 10:  # the usual chunk, all of it
                if takes_payload:
                    payload.append(data[after_line:position])
                position += 2
            else:
                self._left, position = size + 2, after_line
        self._show(payload)
        if self._bare:
            return b"".join(payload)
        if kept:
            kept.append(data[clean_from:end])
            return b"".join(kept)
        return data if end == len(data) else data[:end]

    def _show(self, payload: list[bytes]) -> None:
        if payload and self._observer is not None:
            self._observer.saw(payload[0] if len(payload) == 1 else b"".join(payload))

    def _merge_events(self, data: bytes, start: i64) -> tuple[i64, list[bytes]]:
        """Shows the observer the whole chunks from `start` on, if each is one plain event.

        Answers where they end, and the parts of one chunk that brings them all: none if no event stands there. Line
        ends are looked for in text, since that needs no call of a method as C.
        """
        merged: list[bytes] = []
        observer = self._observer
        if observer is None or not observer.takes_events():
            return start, merged
        length: i64 = len(data)
        end: i64 = min(length, start + _AT_ONCE_BYTES)
        text = data[start:end].decode("latin-1")
        merged_size: i64 = 0
        position: i64 = start
        last: i64 = start
        while True:
            size, at = _size_line(data, position)
            after = at + size
            if size < 0 or after + 2 > end or data[after] != 13 or data[after + 1] != 10:
                break
            if not is_plain_event(data, at, after):
                break
            if text.find("\n", at - start) != after - 2 - start or text.find("\r", at - start) != after - start:
                break
            if position + 2 * MANY_BYTES <= end:
                last = position
            position = after + 2
            merged.append(data[at:after])
            merged_size += size
        if merged:
            observer.saw_events(len(merged), data[last if position - last >= MANY_BYTES else start : position])
            merged.insert(0, b"%x\r\n" % merged_size)
            merged.append(b"\r\n")
        return position, merged

    def _end(self, data: bytes, start: int) -> bytes:
        """Reads the trailer section that begins at `start`; its fields are dropped."""
        if data.startswith(b"\r\n", start):
            after = start + 2
        else:
            blank = data.find(b"\r\n\r\n", start)
            if blank < 0:
                rest = data[start:]
                if len(rest) > _TRAILER_LIMIT_BYTES:
                    self.error = "the trailer section is too long"
                self._in_trailers = True
                self._held = rest
                return b""
            after = blank + 4
            if blank - start > _TRAILER_LIMIT_BYTES:
                self.error = "the trailer section is too long"
                return b""
            if FIELD_BLOCK.fullmatch(data, start, blank + 2) is None:
                self.error = "a trailer field is malformed"
                return b""
        self.done = True
        self.rest = data[after:]
        return b"" if self._bare else b"0\r\n\r\n"


def is_plain_event(data: bytes, start: i64, end: i64) -> bool:
    """Whether what stands there begins with `data:` and ends with a blank line.

    Byte by byte, since cutting it out would cost as much as all else that is done with a chunk.
    """
    return (
        end - start >= _SMALLEST_EVENT_BYTES
        and data[start] == 100
        and data[start + 1] == 97
        and data[start + 2] == 116
        and data[start + 3] == 97
        and data[start + 4] == 58
        and data[end - 1] == 10
        and data[end - 2] == 10
    )


def chunk_of(payload: bytes) -> bytes:
    """A chunk with all of `payload`, which must not be empty."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def unframed(chunks: bytes) -> bytes:
    """The payload of whole chunks."""
    return ChunkedBody(bare=True).feed(chunks)


def _size_line(data: bytes, start: i64) -> tuple[i64, i64]:
    """The size in the plain size line at `start`, and the place after it; -1 and `start` where none stands there whole.

    Digit by digit: as C that is a tenth of what a pattern takes.
    """
    size: i64 = 0
    at: i64 = start
    length: i64 = len(data)
    most: i64 = min(length, start + _QUICK_DIGITS)
    while at < most:
        digit: i64 = _hex_digit(data[at])
        if digit < 0:
            break
        size = size * 16 + digit
        at += 1
    if at > start and at + 1 < length and data[at] == 13 and data[at + 1] == 10:
        return size, at + 2
    return -1, start


def _hex_digit(byte: i64) -> i64:
    """Its value; -1 where it is none."""
    if 48 <= byte <= 57:
        return byte - 48
    if 97 <= byte <= 102:
        return byte - 87
    if 65 <= byte <= 70:
        return byte - 55
    return -1


def _cannot_become_size_line(partial: bytes) -> bool:
    return re.fullmatch(rb"[0-9a-fA-F]{1,16}+(?:[ \t]*+(?:;[\t\x20-\x7e\x80-\xff]*+)?+)\r?", partial) is None
