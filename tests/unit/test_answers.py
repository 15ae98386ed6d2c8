"""Answers: the heads that clients get for an upstream's, preflights, and the sidecar's own errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from email.utils import parsedate_to_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar import faults
from sidecar.faults import Fault, FaultCode
from sidecar.relay import answers
from sidecar.relay.admission import admit
from sidecar.relay.answer_heads import read_answer_head
from sidecar.relay.request import Request
from sidecar.relay.wire import CHUNKED, UNTIL_CLOSE, Field, Fields, RequestHead, parse_response_head
from tests.unit.policies import rules_of

RULES = rules_of({"listen": {"allowed_origins": ["http://localhost:3000"]}})
ORIGIN: Field = (b"Origin", b"http://localhost:3000")
KEY: Field = (b"X-Hermes-Session-Key", b"caf\xe9")
SESSION: Field = (b"X-Hermes-Sidecar-Session", b"none")
REQUEST_ID: Field = (b"X-Request-Id", b"r1")
EXPOSED = (
    b"X-Hermes-Session-Id, X-Claude-Session-Id, X-Hermes-Session-Key, X-Hermes-Friendly-Id, "
    b"X-Claude-Session-Key, X-Claude-Friendly-Id, X-Request-Id, X-Hermes-Sidecar-Session, X-Hermes-Sidecar-Error, "
    b"Retry-After"
)
CORS: Fields = [
    (b"Access-Control-Allow-Origin", b"http://localhost:3000"),
    (b"Access-Control-Expose-Headers", EXPOSED),
    (b"Vary", b"Origin"),
]


def request(*lines: Field, method: bytes = b"GET", minor: int = 1, target: bytes = b"/v1/models") -> Request:
    """An admitted request from localhost with the id r1. Raises a Fault."""
    made, _ = attempt(RequestHead(method, target, minor, [(b"Host", b"localhost:8650"), REQUEST_ID, *lines]))
    if isinstance(made, Fault):
        raise made
    return made


def attempt(head: RequestHead, *, is_draining: bool = False) -> tuple[Request | Fault, Request]:
    made = Request(head.method, head.minor)
    try:
        admit(made, head, RULES, peer=b"127.0.0.1", is_draining=is_draining)
    except Fault as fault:
        return fault, made
    return made, made


def relayed(asked: Request, block: bytes, body: int, *, close: bool = False) -> tuple[bytes, Fields]:
    """The status line and the fields (sorted by name) of the client's head for the upstream's."""
    text = answers.relayed_head(asked, read_answer_head(block), body, close=close)
    return parted(text)


def parted(head: bytes) -> tuple[bytes, Fields]:
    assert head.endswith(b"\r\n\r\n")
    return head.split(b"\r\n")[0], in_order_of_names(parse_response_head(head[:-2]).fields)


def in_order_of_names(lines: Fields) -> Fields:
    return sorted(lines, key=lambda line: line[0].lower())


# --- An upstream's head ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "block", "body", "expected"),
    [
        pytest.param(
            request(),
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Type: text/plain\r\n",
            5,
            [(b"Content-Length", b"5"), (b"Content-Type", b"text/plain")],
            id="length",
        ),
        pytest.param(
            request(),
            b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nContent-Length: 5\r\n",
            5,
            [(b"Content-Length", b"5")],
            id="length-twice-is-said-once",
        ),
        pytest.param(
            request(),
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n",
            CHUNKED,
            [(b"Transfer-Encoding", b"chunked")],
            id="chunks",
        ),
        pytest.param(
            request(minor=0),
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n",
            CHUNKED,
            [],
            id="chunks-for-http-1.0",
        ),
        pytest.param(request(), b"HTTP/1.0 200 OK\r\n", UNTIL_CLOSE, [], id="until-the-end"),
        pytest.param(
            request(method=b"HEAD"),
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n",
            0,
            [(b"Content-Length", b"5")],
            id="head",
        ),
        pytest.param(
            request(method=b"HEAD"), b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n", 0, [], id="head-of-chunks"
        ),
        pytest.param(request(), b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n", 0, [], id="204-has-no-length"),
        pytest.param(
            request(),
            b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n",
            0,
            [(b"Content-Length", b"5")],
            id="304-keeps-its-length",
        ),
        pytest.param(
            request(),
            b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive, X-Hop\r\nKeep-Alive: 5\r\nx-hop: 1\r\n"
            b"Date: d\r\nServer: s\r\nSet-Cookie: a\r\nset-cookie: b\r\n",
            0,
            [
                (b"Content-Length", b"0"),
                (b"Date", b"d"),
                (b"Server", b"s"),
                (b"Set-Cookie", b"a"),
                (b"set-cookie", b"b"),
            ],
            id="hop-by-hop",
        ),
    ],
)
def test_framing_and_fields_of_an_answer(asked: Request, block: bytes, body: int, expected: Fields) -> None:
    status_line, lines = relayed(asked, block, body)

    assert lines == in_order_of_names([*expected, REQUEST_ID, SESSION])
    assert status_line == b"HTTP/1.1" + block.split(b"\r\n")[0][8:]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b"429 Slow Down Please", id="own-reason"),
        pytest.param(b"299 ", id="no-reason"),
        pytest.param(b"599 caf\xe9", id="reason-outside-ascii"),
    ],
)
def test_status_and_reason_pass(line: bytes) -> None:
    assert relayed(request(), b"HTTP/1.0 " + line + b"\r\n", UNTIL_CLOSE)[0] == b"HTTP/1.1 " + line


def test_connection_that_ends_is_said_to_end() -> None:
    _, lines = relayed(request(), b"HTTP/1.0 200 OK\r\n", UNTIL_CLOSE, close=True)

    assert lines == [(b"Connection", b"close"), SESSION, REQUEST_ID]


@pytest.mark.parametrize(
    ("sent", "answered", "expected"),
    [
        pytest.param(
            [KEY], b"", [KEY, (b"X-Hermes-Sidecar-Session", b"header:x-hermes-session-key; derived")], id="key"
        ),
        pytest.param(
            [(b"X-Hermes-Friendly-Id", b"f")], b"", [(b"X-Hermes-Friendly-Id", b"f"), SESSION], id="friendly-id"
        ),
        pytest.param(
            [(b"X-Hermes-Session-Id", b"s1")],
            b"X-Hermes-Session-Id: child-2\r\n",
            [(b"X-Hermes-Session-Id", b"child-2"), (b"X-Hermes-Sidecar-Session", b"client")],
            id="gateways-session-untouched",
        ),
        pytest.param(
            [],
            b"X-Hermes-Session-Id: api-1\r\nX-Claude-Session-Id: api-2\r\n",
            [(b"X-Hermes-Session-Id", b"api-1"), (b"X-Claude-Session-Id", b"api-2"), SESSION],
            id="gateways-made-up-session-untouched",
        ),
        pytest.param(
            [(b"X-Hermes-Session-Key", b"k")],
            b"x-hermes-session-key: theirs\r\n",
            [
                (b"x-hermes-session-key", b"theirs"),
                (b"X-Hermes-Sidecar-Session", b"header:x-hermes-session-key"),
            ],
            id="gateways-key-comes-first",
        ),
        pytest.param(
            [(b"X-Hermes-Friendly-Id", b"f")],
            b"X-Hermes-Friendly-Id: theirs\r\n",
            [(b"X-Hermes-Friendly-Id", b"theirs"), SESSION],
            id="gateways-friendly-id-comes-first",
        ),
        pytest.param(
            [],
            b"X-Hermes-Sidecar-Session: header:x\r\n",
            [SESSION],
            id="the-word-of-a-sidecar-behind-us-does-not-stand-beside-ours",
        ),
    ],
)
def test_what_the_answer_says_about_the_session(sent: list[Field], answered: bytes, expected: Fields) -> None:
    _, lines = relayed(request(*sent), b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + answered, 0)

    assert lines == in_order_of_names([(b"Content-Length", b"0"), *expected, REQUEST_ID])


@pytest.mark.parametrize(
    ("answered", "expected"),
    [
        pytest.param(b"", [REQUEST_ID], id="ours"),
        pytest.param(b"x-request-id: theirs\r\n", [(b"x-request-id", b"theirs")], id="theirs"),
        pytest.param(b"Connection: X-Request-Id\r\nX-Request-Id: theirs\r\n", [REQUEST_ID], id="theirs-nominated"),
    ],
)
def test_request_id_of_an_answer(answered: bytes, expected: Fields) -> None:
    _, lines = relayed(request(), b"HTTP/1.0 200 OK\r\n" + answered, UNTIL_CLOSE)

    assert lines == in_order_of_names([*expected, SESSION])


@pytest.mark.parametrize(
    ("sent", "answered", "expected"),
    [
        pytest.param([], b"Access-Control-Allow-Origin: *\r\n", [], id="program"),
        pytest.param([ORIGIN], b"", CORS, id="page"),
        pytest.param(
            [ORIGIN],
            b"Access-Control-Allow-Origin: *\r\naccess-control-allow-credentials: true\r\n",
            CORS,
            id="upstreams-own-fields-are-replaced",
        ),
        pytest.param([ORIGIN], b"Vary: Cookie\r\n", [*CORS[:2], (b"Vary", b"Cookie"), (b"Vary", b"Origin")], id="vary"),
        pytest.param([ORIGIN], b"vary: a, ORIGIN\r\n", [*CORS[:2], (b"vary", b"a, ORIGIN")], id="vary-already"),
        pytest.param([ORIGIN], b"Connection: vary\r\nVary: Origin\r\n", CORS, id="vary-nominated"),
    ],
)
def test_cors_of_an_answer(sent: list[Field], answered: bytes, expected: Fields) -> None:
    _, lines = relayed(request(*sent), b"HTTP/1.0 200 OK\r\n" + answered, UNTIL_CLOSE)

    assert lines == in_order_of_names([*expected, SESSION, REQUEST_ID])


def test_switch_to_websocket_byte_for_byte() -> None:
    asked = request((b"Connection", b"upgrade"), (b"Upgrade", b"websocket"))
    head = read_answer_head(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: a\r\nSec-WebSocket-Protocol: b\r\n"
    )

    assert answers.upgraded_head(asked, head) == (
        b"HTTP/1.1 101 Switching Protocols\r\nSec-WebSocket-Accept: a\r\nSec-WebSocket-Protocol: b\r\n"
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nX-Hermes-Sidecar-Session: none\r\nX-Request-Id: r1\r\n\r\n"
    )


# --- Preflights ------------------------------------------------------------------------------------------------------


def test_preflight_byte_for_byte() -> None:
    asked = request(
        ORIGIN,
        (b"Access-Control-Request-Method", b"POST"),
        (b"Access-Control-Request-Headers", b"authorization,x-hermes-session-id"),
        (b"Access-Control-Request-Private-Network", b"true"),
        method=b"OPTIONS",
    )

    assert answers.preflight(asked) == (
        b"HTTP/1.1 204 No Content\r\n"
        b"Access-Control-Allow-Origin: http://localhost:3000\r\n"
        b"Access-Control-Expose-Headers: " + EXPOSED + b"\r\n"
        b"Access-Control-Allow-Methods: GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS\r\n"
        b"Access-Control-Allow-Headers: authorization,x-hermes-session-id\r\n"
        b"Access-Control-Allow-Private-Network: true\r\n"
        b"Access-Control-Max-Age: 600\r\n"
        b"Vary: Origin\r\n\r\n"
    )


# --- Faults ----------------------------------------------------------------------------------------------------------

EVERY_FAULT: list[Callable[[], Fault]] = [
    lambda: faults.invalid_request("it has no Host"),
    lambda: faults.header_too_large(65536),
    faults.expectation_failed,
    faults.invalid_session_key,
    faults.host_not_allowed,
    faults.origin_not_allowed,
    faults.client_token_required,
    faults.draining,
    lambda: faults.request_timeout("head", 30.0),
    lambda: faults.too_many_connections(8192),
    lambda: faults.capability_unavailable("No memory.", "Start the dashboard."),
    lambda: faults.upstream_unreachable("http://127.0.0.1:8642", "connection refused", detail="errno 111"),
    lambda: faults.upstream_protocol_error("http://127.0.0.1:8642", "it closed the connection", detail="errno 104"),
    lambda: faults.upstream_timeout("http://127.0.0.1:8642", 45.0),
]


def answered_with(fault: Fault, asked: Request | None = None, *, close: bool = False) -> tuple[bytes, Fields, bytes]:
    head, _, body = answers.fault(fault, asked, close=close).partition(b"\r\n\r\n")
    status_line, lines = parted(head + b"\r\n\r\n")
    return status_line, lines, body


def test_every_code_has_a_fault_in_these_tests() -> None:
    # A page that failed is answered by the pages' own server.
    assert {make().code for make in EVERY_FAULT} == {*FaultCode} - {FaultCode.PAGE_FAILED}


@pytest.mark.parametrize("make", EVERY_FAULT, ids=lambda make: make().code.code)
def test_fault_is_an_answer_that_says_who_speaks(make: Callable[[], Fault]) -> None:
    fault = make()

    status_line, lines, body = answered_with(fault)
    fields = dict(lines)

    assert status_line.startswith(b"HTTP/1.1 %d " % fault.status)
    assert len(status_line) > len(b"HTTP/1.1 503 ")
    assert len(fields) == len(lines)
    assert fields[b"X-Hermes-Sidecar-Error"] == fault.code.code.encode()
    assert fields[b"Content-Type"] == b"application/json; charset=utf-8"
    assert fields[b"Content-Length"] == b"%d" % len(body)
    assert fields[b"Cache-Control"] == b"no-store"
    assert parsedate_to_datetime(fields[b"Date"].decode()).year >= 2026
    error = json.loads(body)["error"]
    assert list(error) == ["message", "type", "code", "param", "hint"]
    assert (error["code"], error["type"], error["param"]) == (fault.code.code, fault.code.error_type, None)
    assert error["message"].endswith(".")
    assert error["hint"].endswith(".")
    assert not fault.detail or fault.detail not in error["message"] + error["hint"]


@pytest.mark.parametrize(
    ("fault", "extra"),
    [
        pytest.param(faults.draining(), [(b"Retry-After", b"1")], id="draining"),
        pytest.param(faults.too_many_connections(8), [(b"Retry-After", b"1")], id="too-many-connections"),
        pytest.param(
            faults.client_token_required(),
            [(b"WWW-Authenticate", b'Bearer realm="hermes-sidecar"')],
            id="client-token-required",
        ),
        pytest.param(faults.host_not_allowed(), [], id="another"),
    ],
)
def test_faults_with_a_field_of_their_own(fault: Fault, extra: Fields) -> None:
    _, lines, _ = answered_with(fault)

    assert [line for line in lines if line[0] in (b"Retry-After", b"WWW-Authenticate")] == extra


@pytest.mark.parametrize(
    ("asked", "close", "extra"),
    [
        pytest.param(None, True, [(b"Connection", b"close")], id="no-request"),
        pytest.param(request(), False, [SESSION, REQUEST_ID], id="program"),
        pytest.param(request(), True, [SESSION, REQUEST_ID, (b"Connection", b"close")], id="program-to-close"),
        pytest.param(request(ORIGIN), False, [SESSION, REQUEST_ID, *CORS], id="page"),
    ],
)
def test_fault_carries_what_the_request_is_owed(asked: Request | None, close: bool, extra: Fields) -> None:
    fault = faults.upstream_unreachable("http://127.0.0.1:8642", "connection refused")
    _, bare, _ = answered_with(fault)

    _, lines, _ = answered_with(fault, asked, close=close)

    assert lines == in_order_of_names([*bare, *extra])


@pytest.mark.parametrize(
    ("lines", "is_draining", "code"),
    [
        pytest.param([(b"X-Hermes-Session-Key", b"a"), (b"X-Hermes-Session-Key", b"b")], False, 400, id="two-keys"),
        pytest.param([(b"Expect", b"x")], False, 417, id="expectation"),
        pytest.param([], True, 503, id="draining"),
    ],
)
def test_page_can_read_why_it_was_refused(lines: list[Field], is_draining: bool, code: int) -> None:
    head = RequestHead(b"POST", b"/v1/chat/completions", 1, [(b"Host", b"localhost:8650"), ORIGIN, *lines])
    fault, asked = attempt(head, is_draining=is_draining)

    assert isinstance(fault, Fault)
    assert fault.status == code
    _, answer, _ = answered_with(fault, asked)
    assert [line for line in answer if line in CORS] == in_order_of_names(CORS)


def test_foreign_page_cannot_read_why_it_was_refused() -> None:
    head = RequestHead(b"GET", b"/", 1, [(b"Host", b"localhost:8650"), (b"Origin", b"http://evil.example")])
    fault, asked = attempt(head)

    assert isinstance(fault, Fault)
    assert not [name for name, _ in answered_with(fault, asked)[1] if name.lower().startswith(b"access-control")]


def test_fault_for_head_has_no_body_but_its_length() -> None:
    fault = faults.draining()

    _, lines, body = answered_with(fault, request(method=b"HEAD"))

    assert body == b""
    assert dict(lines)[b"Content-Length"] == b"%d" % len(fault.envelope())


MARKER = b"s3cr3t-Marker"
# Exempt is X-Request-Id, which is given back so that the client's log and ours can be laid side by side, and the Origin
# of an allowed page, which its browser wants to read in the answer.
MARKED_NAMES = (
    *("host", "connection", "expect", "origin", "authorization", "content-length", "transfer-encoding", "cookie"),
    *("upgrade", "te", "x-hermes-session-id", "x-claude-session-id", "x-hermes-session-key", "x-claude-session-key"),
    *("x-hermes-friendly-id", "x-claude-friendly-id", "x-openwebui-chat-id", "x-openwebui-task", "sec-fetch-site"),
    *("access-control-request-method", "access-control-request-headers", "x-forwarded-for", "via", "x-other"),
)


@pytest.mark.parametrize("name", MARKED_NAMES)
def test_fault_repeats_nothing_of_the_request(name: str) -> None:
    """A marker in this header, alone and twice in different lines: neither the refusal nor any later fault has it."""
    for lines in ([(name.encode(), MARKER)], [(name.encode(), MARKER), (name.encode(), b"other")]):
        host = [] if name == "host" else [(b"Host", b"localhost")]
        outcome, asked = attempt(RequestHead(b"POST", b"/v1/chat/completions", 1, [*host, *lines]))
        for fault in [outcome] if isinstance(outcome, Fault) else [make() for make in EVERY_FAULT]:
            assert MARKER not in answers.fault(fault, asked, close=True), fault.code


@given(
    st.lists(st.tuples(st.sampled_from(MARKED_NAMES), st.sampled_from((MARKER, b"a, " + MARKER, b"x"))), max_size=4),
    st.sampled_from((b"/v1/runs?key=", b"/healthz?", b"/api/memory/", b"", b"*", b"http://", b"http://localhost/")),
    st.sampled_from((b"GET", b"POST", b"OPTIONS", b"CONNECT", b"HEAD", MARKER)),
    st.booleans(),
    st.sampled_from(EVERY_FAULT),
)
def test_no_refusal_repeats_what_the_client_sent(
    lines: list[tuple[str, bytes]], start: bytes, method: bytes, is_draining: bool, later: Callable[[], Fault]
) -> None:
    """For a marker in any headers, in the target and as the method, the answer's body never has it, and its head not
    where the request was refused."""
    named = [(name.encode(), value) for name, value in lines]
    head = RequestHead(method, start + MARKER, 1, [(b"Host", b"localhost"), REQUEST_ID, *named])
    outcome, asked = attempt(head, is_draining=is_draining)

    if isinstance(outcome, Fault) and outcome.code is not FaultCode.EXPECTATION_FAILED:
        assert MARKER not in answers.fault(outcome, asked, close=True)
    else:
        assert MARKER not in answers.fault(later(), asked, close=True).partition(b"\r\n\r\n")[2]
