"""HTTP/1.1 on the wire, pure: bytes to heads, heads to framing, chunks to pieces.

Law: nothing here does I/O, and nothing is repaired. A message that two readers could understand in two ways is
refused, since behind the sidecar stands a reader that might take the other one. Source: RFC 9112.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

Field = tuple[bytes, bytes]
"""A field line as (name as spelled, value without the white space around it)."""
Fields = list[Field]
"""Field lines in wire order, repeats included."""

HEAD_LIMIT_BYTES: Final = 65536
"""Longest header block, each way. Frontends behind single sign-on send cookies of 20 kB and more."""

CHUNKED: Final = -1
UNTIL_CLOSE: Final = -2
NO_LENGTH: Final = -3
"""A head has no length that `split_length` could take out."""

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_VISIBLE: Final = rb"[\x21-\x7e\x80-\xff]++"
_FIELD_LINE: Final = rb"(%b):[ \t]*+((?:%b(?:[ \t]++%b)*+)?+)[ \t]*+\r\n" % (_TOKEN, _VISIBLE, _VISIBLE)
_FIELD: Final = re.compile(rb"(?<=\r\n)" + _FIELD_LINE)
"""One whole line: it begins after a CRLF, ends with the next one, and has none inside."""
_FIELD_BLOCK: Final = re.compile(
    rb"(?:%b)*+" % _FIELD_LINE.replace(b"(" + _TOKEN + b")", _TOKEN).replace(b"((?:", b"(?:(?:")
)
_REQUEST_LINE: Final = re.compile(rb"(%b) (%b) HTTP/1\.([01])\r\n" % (_TOKEN, _VISIBLE))
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: ([\t\x20-\x7e\x80-\xff]*+))?+\r\n")
_CHUNK_SIZE: Final = re.compile(rb"([0-9a-fA-F]{1,16})([ \t]*+;[\t\x20-\x7e\x80-\xff]*+)?+\r\n")
_SIZE_DIGITS: Final = 16
_CHUNK_SIZE_LIMIT_BYTES: Final = 4096
_TRAILER_LIMIT_BYTES: Final = 16384
_LENGTH_DIGITS: Final = 18
_PLAIN_LENGTH: Final = b"\r\nContent-Length: "
_LOWER_LENGTH: Final = b"\r\ncontent-length: "
"""The two spellings that nearly all clients and servers use."""


class WireError(ValueError):
    """The bytes are not the HTTP/1.1 that the sidecar passes on; the text says which rule they break."""


class RequestHead(NamedTuple):
    method: bytes
    target: bytes
    minor: int
    """The 0 or 1 of HTTP/1.0 or HTTP/1.1."""
    fields: Fields


class ResponseHead(NamedTuple):
    minor: int
    status: int
    reason: bytes
    fields: Fields


def parse_request_head(block: bytes) -> RequestHead:
    """The request line and fields of `block`, which ends with the CRLF of its last line.

    Raises WireError for whatever RFC 9112, 3 and 5 do not allow: folded lines, blanks before a colon, bare CR or LF,
    control characters. The target is kept byte for byte.
    """
    line = _REQUEST_LINE.match(block)
    if line is None:
        raise WireError("the request line is malformed")
    method, target, minor = line.groups()
    return RequestHead(method, target, minor[0] - 48, _fields(block, line.end()))


def parse_response_head(block: bytes) -> ResponseHead:
    """The status line and fields of `block`, which ends with the CRLF of its last line. Raises WireError."""
    line = _STATUS_LINE.match(block)
    if line is None:
        raise WireError("its first line is not an HTTP/1.1 status line")
    minor, status, reason = line.groups()
    return ResponseHead(minor[0] - 48, int(status), reason or b"", _fields(block, line.end()))


def _fields(block: bytes, start: int) -> Fields:
    found = _FIELD.findall(block, start)
    # Each match is one whole line, so as many matches as line ends are the whole block: one pass instead of two.
    if len(found) != block.count(b"\r\n", start) or not block.endswith(b"\r\n"):
        whole = _FIELD_BLOCK.match(block, start)
        raise WireError(_why_malformed(block[whole.end() if whole else start :]))
    return found


def _why_malformed(rest: bytes) -> str:
    line = rest.split(b"\r\n", 1)[0]
    name, colon, _ = line.partition(b":")
    if line[:1] in (b" ", b"\t"):
        return "a header field is folded over two lines"
    if not colon:
        return "a header line has no colon"
    if name.rstrip(b" \t") != name:
        return "a blank stands before a header's colon"
    if re.fullmatch(_TOKEN, name) is None:
        return "a header name has a forbidden character"
    return "a header value has a control character"


def request_body(minor: int, lengths: list[bytes], codings: list[bytes]) -> int:
    """The body's length in bytes, or CHUNKED.

    Takes the values of all Content-Length and Transfer-Encoding lines. Anything but one plain reading is a WireError:
    RFC 9112, 6.3 lets a server pick a reading, and picking is what request smuggling lives on.
    """
    if codings:
        if lengths:
            raise WireError("it has both Content-Length and Transfer-Encoding")
        if minor == 0:
            raise WireError("an HTTP/1.0 request cannot have Transfer-Encoding")
        if len(codings) != 1 or codings[0].lower() != b"chunked":
            raise WireError("its Transfer-Encoding is something other than chunked")
        return CHUNKED
    if not lengths:
        return 0
    if len(lengths) != 1:
        raise WireError("it has more than one Content-Length")
    return _length(lengths[0])


def response_body(method: bytes, status: int, framing: int) -> int:
    """The body's length in bytes, CHUNKED, or UNTIL_CLOSE, where the head says `framing`. Source: RFC 9112, 6.3."""
    return 0 if method == b"HEAD" or status in (204, 304) else framing


def response_framing(lengths: list[bytes], codings: list[bytes]) -> int:
    """What a head says of its body: a length in bytes, CHUNKED, or UNTIL_CLOSE. Raises WireError.

    It is judged for answers without a body as well: it goes on to the client. Source: RFC 9112, 6.3.
    """
    if codings:
        if lengths:
            raise WireError("it has both Content-Length and Transfer-Encoding")
        if len(codings) != 1 or codings[0].lower() != b"chunked":
            raise WireError("its Transfer-Encoding is something other than chunked")
        return CHUNKED
    if not lengths:
        return UNTIL_CLOSE
    if any(length != lengths[0] for length in lengths):
        raise WireError("it has two different Content-Lengths")
    return _length(lengths[0])


def _length(value: bytes) -> int:
    if not value.isdigit() or len(value) > _LENGTH_DIGITS:
        raise WireError("its Content-Length is not a number")
    return int(value)


def split_length(block: bytes) -> tuple[bytes, int]:
    """A head without the digits of its first plainly written Content-Length, and that length; or all, and NO_LENGTH.

    Two heads that leave the same differ in those digits alone, if both have a length: compare that as well.
    """
    at = block.find(_PLAIN_LENGTH)
    if at < 0:
        at = block.find(_LOWER_LENGTH)
        if at < 0:
            return block, NO_LENGTH
    start = at + len(_PLAIN_LENGTH)
    end = block.find(b"\r\n", start)
    digits = block[start:end]
    if end < 0 or len(digits) > _LENGTH_DIGITS or not digits.isdigit():
        return block, NO_LENGTH
    return block[:start] + block[end:], int(digits)


class ChunkedBody:
    """Follows a chunked body as it passes, and hands on only what it has understood.

    `feed` returns the bytes to pass on: the sender's own chunks as they came, without chunk extensions and trailer
    fields, which belong to one hop (RFC 9112, 7.1.1 and 7.1.2). With `bare` it returns the payload alone, for readers
    that know no chunks. After the last chunk `done` is true and `rest` holds what follows the body. At the first byte
    that is not chunked coding `error` is set, and `feed` has returned what came before it.
    """

    __slots__ = ("_bare", "_held", "_in_trailers", "_left", "_saw", "done", "error", "rest")

    def __init__(self, *, bare: bool = False, saw: Callable[[bytes], None] | None = None) -> None:
        """`saw` is shown the payload as it passes: once for each call of `feed`, however many chunks that brings."""
        self._bare = bare
        self._saw = saw
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
        if not self._left and not self._bare:
            size, after_line = _size_line(data, 0)
            if size > 0 and after_line + size + 2 == end and data[end - 2 :] == b"\r\n":
                if self._saw is not None:  # what a stream brings: one event, one chunk
                    self._saw(data[after_line : end - 2])
                return data
        position = clean_from = 0
        kept: list[bytes] = []
        payload: list[bytes] = []
        takes_payload = self._bare or self._saw is not None
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
            size, after_line = _size_line(data, position)
            digits = b""
            if size < 0:
                line = _CHUNK_SIZE.match(data, position)
                if line is None:
                    end = position
                    rest = data[position:]
                    if b"\n" in rest or len(rest) > _CHUNK_SIZE_LIMIT_BYTES or _cannot_become_size_line(rest):
                        self.error = "a chunk size is malformed"
                    else:
                        self._held = rest
                    break
                if line.end() - position > _CHUNK_SIZE_LIMIT_BYTES:  # whole or in pieces, the limit is the same
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
            if data[position : position + 2] == b"\r\n":  # the usual chunk: all of it is here
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
        if payload and self._saw is not None:
            self._saw(payload[0] if len(payload) == 1 else b"".join(payload))

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
            if _FIELD_BLOCK.fullmatch(data, start, blank + 2) is None:
                self.error = "a trailer field is malformed"
                return b""
        self.done = True
        self.rest = data[after:]
        return b"" if self._bare else b"0\r\n\r\n"


def _size_line(data: bytes, start: int) -> tuple[int, int]:
    """The size in the plain size line at `start`, and the place after it; -1 and `start` where none stands there whole.

    Digit by digit: as C that is a tenth of what a pattern takes.
    """
    size, at = 0, start
    most = min(len(data), start + _SIZE_DIGITS)
    while at < most and (digit := _hex_digit(data[at])) >= 0:
        size = size * 16 + digit
        at += 1
    return (size, at + 2) if at > start and data[at : at + 2] == b"\r\n" else (-1, start)


def _hex_digit(byte: int) -> int:
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
