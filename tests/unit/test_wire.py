"""Heads and framing: what the parser takes, byte for byte, and what it refuses, in which words."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.relay.chunked import ChunkedBody
from sidecar.relay.wire import (
    CHUNKED,
    HEAD_LIMIT_BYTES,
    UNTIL_CLOSE,
    Field,
    Fields,
    RequestHead,
    ResponseHead,
    WireError,
    parse_request_head,
    parse_response_head,
    request_body,
    response_body,
    response_framing,
)
from tests.unit.grammar import METHODS, REASONS, TARGETS, TOKENS, VALUES, field_lines

REQUEST_LINE = "the request line is malformed"
STATUS_LINE = "its first line is not an HTTP/1.1 status line"
FOLDED = "a header field is folded over two lines"
NO_COLON = "a header line has no colon"
BLANK_BEFORE_COLON = "a blank stands before a header's colon"
FORBIDDEN_IN_NAME = "a header name has a forbidden character"
CONTROL_IN_VALUE = "a header value has a control character"
ALL_TOKEN_CHARACTERS = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def why_refused(parse: Callable[[bytes], object], block: bytes) -> str:
    with pytest.raises(WireError) as caught:
        parse(block)
    return str(caught.value)


# --- First lines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(b"/", id="root"),
        pytest.param(b"/v1/models?", id="empty-query"),
        pytest.param(b"/a%2Fb%3Ac%27d?x=%41&y=a+b&z=%2F&e=&e", id="escapes-as-they-are"),
        pytest.param(b"/?q=100%&r=%zz", id="per-cent-that-escapes-nothing"),
        pytest.param(b"//a//b/", id="empty-segments"),
        pytest.param(b"/a/./../b", id="dot-segments"),
        pytest.param(b"/a;p=1", id="parameters"),
        pytest.param(b"/%E4%BC%9A", id="escaped-utf8"),
        pytest.param(b"/\xe4\xbc\x9a\xff", id="raw-bytes-over-0x7f"),
        pytest.param(b'/a"<>\\^`{|}#b#?c', id="characters-no-uri-has"),
        pytest.param(b"*", id="asterisk-form"),
        pytest.param(b"http://h:80/x", id="absolute-form"),
        pytest.param(b"h:443", id="authority-form"),
    ],
)
def test_target_is_kept_byte_for_byte(target: bytes) -> None:
    assert parse_request_head(b"GET %b HTTP/1.1\r\n" % target) == RequestHead(b"GET", target, 1, [])


@pytest.mark.parametrize(
    ("line", "head"),
    [
        pytest.param(b"GET / HTTP/1.0", RequestHead(b"GET", b"/", 0, []), id="http-1.0"),
        pytest.param(b"get / HTTP/1.1", RequestHead(b"get", b"/", 1, []), id="method-in-its-own-case"),
        pytest.param(b"BREW / HTTP/1.1", RequestHead(b"BREW", b"/", 1, []), id="unknown-method"),
        pytest.param(
            ALL_TOKEN_CHARACTERS + b" / HTTP/1.1",
            RequestHead(ALL_TOKEN_CHARACTERS, b"/", 1, []),
            id="method-of-every-token-character",
        ),
    ],
)
def test_request_line_is_understood(line: bytes, head: RequestHead) -> None:
    assert parse_request_head(line + b"\r\n") == head


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\r\n", id="empty-line"),
        pytest.param(b"GET /\r\n", id="http-0.9"),
        pytest.param(b"GET / HTTP/2.0\r\n", id="http-2"),
        pytest.param(b"GET / HTTP/1.2\r\n", id="http-1.2"),
        pytest.param(b"GET / HTTP/1.10\r\n", id="two-digit-minor"),
        pytest.param(b"GET / HTTP/01.1\r\n", id="two-digit-major"),
        pytest.param(b"GET / HTTP/1\r\n", id="no-minor"),
        pytest.param(b"GET / http/1.1\r\n", id="lower-case-version"),
        pytest.param(b"GET / RTSP/1.0\r\n", id="another-protocol"),
        pytest.param(b"PRI * HTTP/2.0\r\n", id="http-2-preface"),
        pytest.param(b" GET / HTTP/1.1\r\n", id="blank-in-front"),
        pytest.param(b"GET  / HTTP/1.1\r\n", id="two-blanks-before-target"),
        pytest.param(b"GET /  HTTP/1.1\r\n", id="two-blanks-after-target"),
        pytest.param(b"GET / HTTP/1.1 \r\n", id="blank-at-the-end"),
        pytest.param(b"GET\t/\tHTTP/1.1\r\n", id="tabs"),
        pytest.param(b"GET /a b HTTP/1.1\r\n", id="blank-in-target"),
        pytest.param(b"GET /a\tb HTTP/1.1\r\n", id="tab-in-target"),
        pytest.param(b"GET  HTTP/1.1\r\n", id="no-target"),
        pytest.param(b" / HTTP/1.1\r\n", id="no-method"),
        pytest.param(b"G(ET / HTTP/1.1\r\n", id="forbidden-in-method"),
        pytest.param(b"G\xc3\x84T / HTTP/1.1\r\n", id="method-outside-ascii"),
        pytest.param(b"GET:/ / HTTP/1.1\r\n", id="colon-in-method"),
        pytest.param(b"GET /\x00 HTTP/1.1\r\n", id="nul-in-target"),
        pytest.param(b"GET /\x1f HTTP/1.1\r\n", id="control-in-target"),
        pytest.param(b"GET /\x7f HTTP/1.1\r\n", id="delete-in-target"),
        pytest.param(b"GET /\rX HTTP/1.1\r\n", id="bare-cr-in-target"),
        pytest.param(b"GET / HTTP/1.1\n", id="lf-alone"),
        pytest.param(b"GET / HTTP/1.1\nA: b\r\n", id="lf-alone-then-crlf"),
        pytest.param(b"GET / HTTP/1.1\r\r\n", id="cr-twice"),
        pytest.param(b"GET / HTTP/1.1\r", id="cr-alone"),
        pytest.param(b"GET / HTTP/1.1", id="no-line-end"),
        pytest.param(b"\r\nGET / HTTP/1.1\r\n", id="empty-line-in-front"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\r\n", id="tls-hello"),
    ],
)
def test_malformed_request_line_is_refused(block: bytes) -> None:
    assert why_refused(parse_request_head, block) == REQUEST_LINE


@pytest.mark.parametrize(
    ("line", "head"),
    [
        pytest.param(b"HTTP/1.1 200 OK", ResponseHead(1, 200, b"OK", []), id="plain"),
        pytest.param(b"HTTP/1.0 200 OK", ResponseHead(0, 200, b"OK", []), id="http-1.0"),
        pytest.param(b"HTTP/1.1 429 Slow Down Please", ResponseHead(1, 429, b"Slow Down Please", []), id="own-reason"),
        pytest.param(b"HTTP/1.1 200 ", ResponseHead(1, 200, b"", []), id="empty-reason"),
        pytest.param(b"HTTP/1.1 200", ResponseHead(1, 200, b"", []), id="no-reason-and-no-blank"),
        pytest.param(b"HTTP/1.1 200  two\tparts ", ResponseHead(1, 200, b" two\tparts ", []), id="blanks-in-reason"),
        pytest.param(b"HTTP/1.1 200 caf\xe9", ResponseHead(1, 200, b"caf\xe9", []), id="reason-outside-ascii"),
        pytest.param(b"HTTP/1.1 103 Early Hints", ResponseHead(1, 103, b"Early Hints", []), id="informational"),
        pytest.param(b"HTTP/1.1 599 x", ResponseHead(1, 599, b"x", []), id="status-599"),
        pytest.param(b"HTTP/1.1 999 x", ResponseHead(1, 999, b"x", []), id="status-999"),
    ],
)
def test_status_line_is_understood(line: bytes, head: ResponseHead) -> None:
    assert parse_response_head(line + b"\r\n") == head


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\r\nHTTP/1.1 200 OK\r\n", id="empty-line-in-front"),
        pytest.param(b"HTTP/2 200 OK\r\n", id="http-2"),
        pytest.param(b"HTTP/1.2 200 OK\r\n", id="http-1.2"),
        pytest.param(b"http/1.1 200 OK\r\n", id="lower-case-version"),
        pytest.param(b"ICY 200 OK\r\n", id="another-protocol"),
        pytest.param(b"<!DOCTYPE html>\r\n", id="a-page"),
        pytest.param(b"HTTP/1.1 099 x\r\n", id="status-below-100"),
        pytest.param(b"HTTP/1.1 20 OK\r\n", id="two-digits"),
        pytest.param(b"HTTP/1.1 2000 OK\r\n", id="four-digits"),
        pytest.param(b"HTTP/1.1 2x0 OK\r\n", id="no-number"),
        pytest.param(b"HTTP/1.1 +20 OK\r\n", id="sign"),
        pytest.param(b"HTTP/1.1  200 OK\r\n", id="two-blanks"),
        pytest.param(b"HTTP/1.1\t200 OK\r\n", id="tab"),
        pytest.param(b"HTTP/1.1 200\tOK\r\n", id="tab-after-status"),
        pytest.param(b"HTTP/1.1 200OK\r\n", id="no-blank-after-status"),
        pytest.param(b"HTTP/1.1 200 O\x00K\r\n", id="nul-in-reason"),
        pytest.param(b"HTTP/1.1 200 O\x7fK\r\n", id="delete-in-reason"),
        pytest.param(b"HTTP/1.1 200 O\rK\r\n", id="bare-cr-in-reason"),
        pytest.param(b"HTTP/1.1 200 OK\nA: b\r\n", id="lf-alone"),
        pytest.param(b"HTTP/1.1 200 OK\r", id="cr-alone"),
    ],
)
def test_malformed_status_line_is_refused(block: bytes) -> None:
    assert why_refused(parse_response_head, block) == STATUS_LINE


# --- Field lines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "fields"),
    [
        pytest.param(b"A: b\r\n", [(b"A", b"b")], id="one"),
        pytest.param(b"A:b\r\n", [(b"A", b"b")], id="no-blank"),
        pytest.param(b"A: \t b c\t\td \t\r\n", [(b"A", b"b c\t\td")], id="blanks-around-go-inside-stay"),
        pytest.param(b"A:\r\n", [(b"A", b"")], id="empty"),
        pytest.param(b"A: \t \r\nB: c\r\n", [(b"A", b""), (b"B", b"c")], id="only-blanks"),
        pytest.param(b"A: b: c:\r\n", [(b"A", b"b: c:")], id="colons-in-value"),
        pytest.param(b"A: :\r\n", [(b"A", b":")], id="colon-as-value"),
        pytest.param(
            b"A: caf\xe9 \xe4\xbc\x9a\xff\r\n", [(b"A", b"caf\xe9 \xe4\xbc\x9a\xff")], id="bytes-over-0x7f-as-they-are"
        ),
        pytest.param(b"A: \x80\xa0\x85\r\n", [(b"A", b"\x80\xa0\x85")], id="unicode-blanks-are-no-blanks"),
        pytest.param(ALL_TOKEN_CHARACTERS + b": v\r\n", [(ALL_TOKEN_CHARACTERS, b"v")], id="every-token-character"),
        pytest.param(
            b"b: 1\r\nA: 2\r\nB: 3\r\na: 2\r\nb: 1\r\n",
            [(b"b", b"1"), (b"A", b"2"), (b"B", b"3"), (b"a", b"2"), (b"b", b"1")],
            id="order-repeats-and-spelling",
        ),
    ],
)
def test_fields_are_understood(lines: bytes, fields: Fields) -> None:
    assert parse_request_head(b"GET / HTTP/1.1\r\n" + lines).fields == fields
    assert parse_response_head(b"HTTP/1.1 200 OK\r\n" + lines).fields == fields


@pytest.mark.parametrize("before", [pytest.param(b"", id="first"), pytest.param(b"Host: h\r\nX:\r\n", id="later")])
@pytest.mark.parametrize(
    ("lines", "why"),
    [
        pytest.param(b" A: b\r\n", FOLDED, id="folded-with-blank"),
        pytest.param(b"\tA: b\r\n", FOLDED, id="folded-with-tab"),
        pytest.param(b" \r\n", FOLDED, id="line-of-a-blank"),
        pytest.param(b"A: b\r\n c\r\n", FOLDED, id="folded-value"),
        pytest.param(b"A\r\n", NO_COLON, id="name-alone"),
        pytest.param(b"\r\nA: b\r\n", NO_COLON, id="empty-line"),
        pytest.param(b"GET / HTTP/1.1\r\n", NO_COLON, id="second-request-line"),
        pytest.param(b"A : b\r\n", BLANK_BEFORE_COLON, id="blank-before-colon"),
        pytest.param(b"A\t: b\r\n", BLANK_BEFORE_COLON, id="tab-before-colon"),
        pytest.param(b"Content-Length : 5\r\n", BLANK_BEFORE_COLON, id="blank-before-colon-of-a-framing-field"),
        pytest.param(b": b\r\n", FORBIDDEN_IN_NAME, id="no-name"),
        pytest.param(b"A b: c\r\n", FORBIDDEN_IN_NAME, id="blank-in-name"),
        pytest.param(b"A(: b\r\n", FORBIDDEN_IN_NAME, id="delimiter-in-name"),
        pytest.param(b"A/B: c\r\n", FORBIDDEN_IN_NAME, id="slash-in-name"),
        pytest.param(b'"A": b\r\n', FORBIDDEN_IN_NAME, id="quotes-around-name"),
        pytest.param(b"A\x00: b\r\n", FORBIDDEN_IN_NAME, id="nul-in-name"),
        pytest.param(b"\xc3\x84: b\r\n", FORBIDDEN_IN_NAME, id="name-outside-ascii"),
        pytest.param(b"A\rB: c\r\n", FORBIDDEN_IN_NAME, id="bare-cr-in-name"),
        pytest.param(b"A\nB: c\r\n", FORBIDDEN_IN_NAME, id="bare-lf-in-name"),
        pytest.param(b"A: b\x00c\r\n", CONTROL_IN_VALUE, id="nul-in-value"),
        pytest.param(b"A: b\x00\r\n", CONTROL_IN_VALUE, id="nul-at-the-end"),
        pytest.param(b"A: \x0b\r\n", CONTROL_IN_VALUE, id="vertical-tab"),
        pytest.param(b"A: b\x1b[2J\r\n", CONTROL_IN_VALUE, id="escape-in-value"),
        pytest.param(b"A: b\x7f\r\n", CONTROL_IN_VALUE, id="delete-in-value"),
        pytest.param(b"A: b\rC: d\r\n", CONTROL_IN_VALUE, id="bare-cr-in-value"),
        pytest.param(b"A: b\nC: d\r\n", CONTROL_IN_VALUE, id="bare-lf-in-value"),
        pytest.param(b"A: b\r\r\n", CONTROL_IN_VALUE, id="cr-twice-at-the-end"),
        pytest.param(b"A: b\n\r\n", CONTROL_IN_VALUE, id="lf-before-the-line-end"),
    ],
)
def test_malformed_field_is_refused(before: bytes, lines: bytes, why: str) -> None:
    assert why_refused(parse_request_head, b"GET / HTTP/1.1\r\n" + before + lines) == why
    assert why_refused(parse_response_head, b"HTTP/1.1 200 OK\r\n" + before + lines) == why


@given(METHODS, TARGETS, st.sampled_from((0, 1)), field_lines())
def test_request_head_of_the_grammar_is_given_back(
    method: bytes, target: bytes, minor: int, lines: list[tuple[Field, bytes]]
) -> None:
    """For any head of the grammar, the parser gives its parts: same bytes, same order, blanks around values gone."""
    block = b"%b %b HTTP/1.%d\r\n" % (method, target, minor) + b"".join([line for _, line in lines])

    assert parse_request_head(block) == (method, target, minor, [field for field, _ in lines])


@given(st.integers(100, 999), REASONS, st.sampled_from((0, 1)), field_lines())
def test_response_head_of_the_grammar_is_given_back(
    status: int, reason: bytes, minor: int, lines: list[tuple[Field, bytes]]
) -> None:
    """For any head of the grammar, the parser gives its parts: same bytes, same order, blanks around values gone."""
    block = b"HTTP/1.%d %d %b\r\n" % (minor, status, reason) + b"".join([line for _, line in lines])

    assert parse_response_head(block) == (minor, status, reason, [field for field, _ in lines])


@given(st.lists(st.sampled_from((b"A", b":", b" ", b"\t", b"\r\n", b"\n", b"\r", b"\x00", b"\xff", b"A: b\r\n"))))
def test_each_accepted_line_is_one_field(pieces: list[bytes]) -> None:
    """For any bytes: refused, or as many fields as lines, and each is its line up to the first colon and after it."""
    block = b"".join(pieces) + b"\r\n"
    try:
        fields = parse_request_head(b"GET / HTTP/1.1\r\n" + block).fields
    except WireError:
        return

    read = [(name, value.strip(b" \t")) for name, _, value in (line.partition(b":") for line in block.splitlines())]
    assert fields == read


@given(TOKENS, VALUES, st.sampled_from((b"\x00", b"\r", b"\n", b"\x7f", b"\r\n ")))
def test_refusal_repeats_nothing_of_the_head(name: bytes, value: bytes, bad: bytes) -> None:
    """For any name and value, the sentence of a refusal is one of a closed list."""
    for lines in (b"%b: %b\r\n" % (name, value + bad + value), b"%b: %b\r\n" % (name + bad, value)):
        assert why_refused(parse_request_head, b"GET / HTTP/1.1\r\n" + lines) in (
            FOLDED,
            NO_COLON,
            BLANK_BEFORE_COLON,
            FORBIDDEN_IN_NAME,
            CONTROL_IN_VALUE,
        )


# --- Size and time ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "fields"),
    [
        pytest.param(b"Cookie: %b\r\n" % (b"c" * 65000), [(b"Cookie", b"c" * 65000)], id="one-long-value"),
        pytest.param(b"%b: v\r\n" % (b"n" * 65000), [(b"n" * 65000, b"v")], id="one-long-name"),
        pytest.param(b"A:\r\n" * 16000, [(b"A", b"")] * 16000, id="many-fields"),
    ],
)
def test_a_head_of_64_kib_is_understood(lines: bytes, fields: Fields) -> None:
    assert len(lines) < HEAD_LIMIT_BYTES == 65536

    assert parse_request_head(b"GET / HTTP/1.1\r\n" + lines).fields == fields


def head_after(line: bytes) -> Callable[[bytes], None]:
    def parse(lines: bytes) -> None:
        try:
            parse_request_head(line + lines)
        except WireError:
            return

    return parse


def chunked(lines: bytes) -> None:
    ChunkedBody().feed(lines)


def chunked_byte_by_byte(lines: bytes) -> None:
    body = ChunkedBody()
    for position in range(len(lines)):
        body.feed(lines[position : position + 1])
        if body.error is not None:
            return


def shortest_s(act: Callable[[bytes], None], data: bytes, *, tries: int = 7) -> float:
    def once() -> float:
        started = time.thread_time()
        act(data)
        return time.thread_time() - started

    return min(once() for _ in range(tries))


@pytest.mark.parametrize(
    ("act", "unit", "end"),
    [
        pytest.param(head_after(b"GET / HTTP/1.1\r\nA:"), b" ", b"\r\n", id="blanks-as-a-value"),
        pytest.param(head_after(b"GET / HTTP/1.1\r\nA:"), b" ", b"\x00\r\n", id="blanks-then-nul"),
        pytest.param(head_after(b"GET / HTTP/1.1\r\nA: b"), b" ", b"\x00\r\n", id="blanks-after-a-value"),
        pytest.param(head_after(b"GET / HTTP/1.1\r\nA:"), b"\t", b"\x00\r\n", id="tabs"),
        pytest.param(head_after(b"GET / HTTP/1.1\r\nA:"), b" \t", b"\x00\r\n", id="blanks-and-tabs"),
        pytest.param(head_after(b"GET / HTTP/1.1\r\nA:"), b"a ", b"\x00\r\n", id="tiny-words"),
        pytest.param(head_after(b"GET / HTTP/1.1\r\nA:"), b"a\t ", b"\x00\r\n", id="tiny-words-wide-blanks"),
        pytest.param(head_after(b"GET / HTTP/1.1\r\n"), b":", b"\r\n", id="colons"),
        pytest.param(head_after(b"GET / HTTP/1.1\r\nA"), b":", b"\x00\r\n", id="colons-as-a-value"),
        pytest.param(head_after(b"GET / HTTP/1.1\r\n"), b"a:\r\n", b"", id="tiny-fields"),
        pytest.param(head_after(b"GET / HTTP/1.1\r\n"), b"a:\r\n", b"\x00\r\n", id="tiny-fields-then-nul"),
        pytest.param(head_after(b"GET / HTTP/1.1\r\n"), b"a: b \r\n", b" \r\n", id="tiny-fields-then-folded"),
        pytest.param(head_after(b"GET / HTTP/1.1\r\n"), b"a", b"\r\n", id="name-without-end"),
        pytest.param(head_after(b"GET / HTTP/1.1\r\n"), b" ", b"\r\n", id="line-of-blanks"),
        pytest.param(head_after(b"GET / HTTP/1.1\r\nA"), b" ", b": b\r\n", id="blanks-before-the-colon"),
        pytest.param(head_after(b"GET / HTTP/1.1\r\nA: b"), b"\r", b"\r\n", id="carriage-returns"),
        pytest.param(head_after(b"GET / HTTP/1.1\r\n"), b"\r\n", b"", id="empty-lines"),
        pytest.param(head_after(b""), b"G", b"\r\n", id="method-without-end"),
        pytest.param(head_after(b"GET "), b"/", b"\r\n", id="target-without-end"),
        pytest.param(head_after(b"GET "), b" ", b"\r\n", id="blanks-instead-of-a-target"),
        pytest.param(chunked, b"1\r\na\r\n", b"", id="tiny-chunks"),
        pytest.param(chunked, b"1;x\r\na\r\n", b"", id="tiny-chunks-with-extensions"),
        pytest.param(chunked, b"0", b"", id="size-without-end"),
        pytest.param(chunked, b"1;" + b" " * 60, b"", id="extension-without-end"),
    ],
)
def test_time_grows_no_faster_than_the_input(act: Callable[[bytes], None], unit: bytes, end: bytes) -> None:
    """Twice the bytes take about twice the time (four times would be quadratic), and 64 KiB well under 50 ms."""
    short_s, long_s = (shortest_s(act, unit * (kib * 1024 // len(unit)) + end) for kib in (32, 64))

    assert long_s < max(3 * short_s, 0.001)
    assert long_s < 0.05


@pytest.mark.parametrize(
    "unit",
    [
        pytest.param(b"1\r\na\r\n", id="tiny-chunks"),
        pytest.param(b"1;x\r\na\r\n", id="tiny-chunks-with-extensions"),
        pytest.param(b"1;" + b"x" * 4000 + b"\r\na\r\n", id="long-extensions"),
    ],
)
def test_time_per_byte_does_not_grow_when_bytes_come_one_by_one(unit: bytes) -> None:
    short_s, long_s = (shortest_s(chunked_byte_by_byte, unit * (kib * 1024 // len(unit)), tries=3) for kib in (16, 32))

    assert long_s < 3 * short_s


# --- Framing ---------------------------------------------------------------------------------------------------------

BOTH = "it has both Content-Length and Transfer-Encoding"
NOT_CHUNKED = "its Transfer-Encoding is something other than chunked"
NO_NUMBER = "its Content-Length is not a number"

NO_LENGTHS = [
    pytest.param(b"", id="empty"),
    pytest.param(b"+2", id="plus"),
    pytest.param(b"-2", id="minus"),
    pytest.param(b"2.0", id="fraction"),
    pytest.param(b"0x2", id="hexadecimal"),
    pytest.param(b"2 ", id="blank-behind"),
    pytest.param(b"2, 2", id="list"),
    pytest.param(b"2,", id="comma"),
    pytest.param(b"2 2", id="two-numbers"),
    pytest.param(b"2_0", id="underscore"),
    pytest.param(b"two", id="word"),
    pytest.param("２".encode(), id="wide-digit"),
    pytest.param(b"\xb2", id="latin-1-digit"),
    pytest.param(b"1" * 19, id="19-digits"),
    pytest.param(b"1" * 5000, id="5000-digits"),
]

OTHER_CODINGS = [
    pytest.param([b""], id="empty"),
    pytest.param([b"identity"], id="identity"),
    pytest.param([b"gzip"], id="gzip"),
    pytest.param([b"gzip, chunked"], id="gzip-then-chunked"),
    pytest.param([b"chunked, chunked"], id="chunked-twice-in-a-line"),
    pytest.param([b"chunked", b"chunked"], id="chunked-twice"),
    pytest.param([b"chunked", b""], id="chunked-and-empty"),
    pytest.param([b"gzip", b"chunked"], id="gzip-and-chunked"),
    pytest.param([b"xchunked"], id="xchunked"),
    pytest.param([b"chunkedx"], id="chunkedx"),
    pytest.param([b"chunked;q=1"], id="parameter"),
    pytest.param([b",chunked"], id="empty-member"),
    pytest.param([b'"chunked"'], id="quoted"),
    pytest.param([b"chunked\x0b"], id="vertical-tab"),
    pytest.param([b"chun\xe9ked"], id="outside-ascii"),
]


@pytest.mark.parametrize(
    ("minor", "lengths", "codings", "body"),
    [
        pytest.param(1, [], [], 0, id="none"),
        pytest.param(0, [], [], 0, id="none-in-http-1.0"),
        pytest.param(1, [b"0"], [], 0, id="length-zero"),
        pytest.param(1, [b"94"], [], 94, id="length"),
        pytest.param(0, [b"94"], [], 94, id="length-in-http-1.0"),
        pytest.param(1, [b"0094"], [], 94, id="leading-zeros"),
        pytest.param(1, [b"9" * 18], [], 10**18 - 1, id="18-digits"),
        pytest.param(1, [], [b"chunked"], CHUNKED, id="chunked"),
        pytest.param(1, [], [b"ChunKED"], CHUNKED, id="chunked-in-any-case"),
    ],
)
def test_request_framing(minor: int, lengths: list[bytes], codings: list[bytes], body: int) -> None:
    assert request_body(minor, lengths, codings) == body


@pytest.mark.parametrize(
    ("minor", "lengths", "codings", "why"),
    [
        pytest.param(1, [b"5"], [b"chunked"], BOTH, id="length-and-chunked"),
        pytest.param(1, [b"0"], [b"chunked"], BOTH, id="length-zero-and-chunked"),
        pytest.param(1, [b""], [b""], BOTH, id="both-empty"),
        pytest.param(
            0, [], [b"chunked"], "an HTTP/1.0 request cannot have Transfer-Encoding", id="chunked-in-http-1.0"
        ),
        pytest.param(1, [b"5", b"5"], [], "it has more than one Content-Length", id="length-twice"),
        pytest.param(1, [b"5", b"6"], [], "it has more than one Content-Length", id="two-lengths"),
    ],
)
def test_ambiguous_request_framing_is_refused(minor: int, lengths: list[bytes], codings: list[bytes], why: str) -> None:
    with pytest.raises(WireError) as caught:
        request_body(minor, lengths, codings)

    assert str(caught.value) == why


def answer_body(method: bytes, status: int, lengths: list[bytes], codings: list[bytes]) -> int:
    return response_body(method, status, response_framing(lengths, codings))


@pytest.mark.parametrize("codings", OTHER_CODINGS)
def test_other_codings_are_refused(codings: list[bytes]) -> None:
    with pytest.raises(WireError, match=NOT_CHUNKED):
        request_body(1, [], codings)
    with pytest.raises(WireError, match=NOT_CHUNKED):
        answer_body(b"GET", 200, [], codings)


@pytest.mark.parametrize("value", NO_LENGTHS)
def test_lengths_that_are_no_numbers_are_refused(value: bytes) -> None:
    with pytest.raises(WireError, match=NO_NUMBER):
        request_body(1, [value], [])
    with pytest.raises(WireError, match=NO_NUMBER):
        answer_body(b"GET", 200, [value], [])


@pytest.mark.parametrize("value", NO_LENGTHS)
def test_length_without_a_body_is_a_number_as_well(value: bytes) -> None:
    """The answer to HEAD, and a 304, have no body but keep their length on the way to the client."""
    with pytest.raises(WireError, match=NO_NUMBER):
        answer_body(b"HEAD", 200, [value], [])
    with pytest.raises(WireError, match=NO_NUMBER):
        answer_body(b"GET", 304, [value], [])


@pytest.mark.parametrize(
    ("method", "status", "lengths", "codings", "body"),
    [
        pytest.param(b"GET", 200, [], [], UNTIL_CLOSE, id="none"),
        pytest.param(b"GET", 200, [b"0"], [], 0, id="length-zero"),
        pytest.param(b"POST", 502, [b"94"], [], 94, id="length"),
        pytest.param(b"GET", 200, [b"5", b"5"], [], 5, id="length-twice"),
        pytest.param(b"GET", 200, [], [b"Chunked"], CHUNKED, id="chunked"),
        pytest.param(b"HEAD", 200, [b"94"], [], 0, id="head-with-length"),
        pytest.param(b"HEAD", 200, [], [b"chunked"], 0, id="head-chunked"),
        pytest.param(b"HEAD", 404, [], [], 0, id="head-without-framing"),
        pytest.param(b"head", 200, [b"5"], [], 5, id="methods-have-a-case"),
        pytest.param(b"GET", 204, [b"5"], [], 0, id="204-with-length"),
        pytest.param(b"GET", 204, [], [b"chunked"], 0, id="204-chunked"),
        pytest.param(b"GET", 304, [b"94"], [], 0, id="304-with-length"),
        pytest.param(b"GET", 304, [], [], 0, id="304-without-framing"),
        pytest.param(b"POST", 205, [], [], UNTIL_CLOSE, id="205-has-no-rule-of-its-own"),
    ],
)
def test_response_framing(method: bytes, status: int, lengths: list[bytes], codings: list[bytes], body: int) -> None:
    assert answer_body(method, status, lengths, codings) == body


@pytest.mark.parametrize(
    ("lengths", "codings", "why"),
    [
        pytest.param([b"5"], [b"chunked"], BOTH, id="length-and-chunked"),
        pytest.param([b"5", b"6"], [], "it has two different Content-Lengths", id="two-lengths"),
        pytest.param([b"5", b"05"], [], "it has two different Content-Lengths", id="two-spellings-of-one-length"),
    ],
)
@pytest.mark.parametrize(
    ("method", "status"),
    [
        pytest.param(b"GET", 200, id="get"),
        pytest.param(b"HEAD", 200, id="head"),
        pytest.param(b"GET", 304, id="not-modified"),
    ],
)
def test_ambiguous_response_framing_is_refused(
    method: bytes, status: int, lengths: list[bytes], codings: list[bytes], why: str
) -> None:
    with pytest.raises(WireError) as caught:
        answer_body(method, status, lengths, codings)

    assert str(caught.value) == why
