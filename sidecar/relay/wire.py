"""HTTP/1.1 on the wire, pure: bytes to heads, heads to framing.

Law: nothing here does I/O, and nothing is repaired. A message that two readers could understand in two ways is
refused, since behind the sidecar stands a reader that might take the other one. Source: RFC 9112.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

Field = tuple[bytes, bytes]
"""A field line as (name as spelled, value without the white space around it)."""
Fields = list[Field]
"""Field lines in wire order, repeats included."""

HEAD_LIMIT_BYTES: Final = 65536
"""Longest header block, each way. Frontends behind single sign-on send cookies of 20 kB and more."""

CHUNKED: Final = -1
UNTIL_CLOSE: Final = -2

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_VISIBLE: Final = rb"[\x21-\x7e\x80-\xff]++"
_FIELD_LINE: Final = rb"(%b):[ \t]*+((?:%b(?:[ \t]++%b)*+)?+)[ \t]*+\r\n" % (_TOKEN, _VISIBLE, _VISIBLE)
_FIELD: Final = re.compile(rb"(?<=\r\n)" + _FIELD_LINE)
"""One whole line: it begins after a CRLF, ends with the next one, and has none inside."""
FIELD_BLOCK: Final = re.compile(
    rb"(?:%b)*+" % _FIELD_LINE.replace(b"(" + _TOKEN + b")", _TOKEN).replace(b"((?:", b"(?:(?:")
)
_REQUEST_LINE: Final = re.compile(rb"(%b) (%b) HTTP/1\.([01])\r\n" % (_TOKEN, _VISIBLE))
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: ([\t\x20-\x7e\x80-\xff]*+))?+\r\n")
LENGTH_DIGITS: Final = 18
"""Longest Content-Length that is taken for a number."""


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
        whole = FIELD_BLOCK.match(block, start)
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
    if not value.isdigit() or len(value) > LENGTH_DIGITS:
        raise WireError("its Content-Length is not a number")
    return int(value)


def number_at(data: bytes, start: int, digits: int) -> tuple[int, int]:
    """The number written at `start` in at most so many digits, and the place after it; -1 and `start` for none."""
    number, at = 0, start
    most = min(len(data), start + digits)
    while at < most and 48 <= data[at] <= 57:
        number = number * 10 + data[at] - 48
        at += 1
    return (number, at) if at > start else (-1, start)
