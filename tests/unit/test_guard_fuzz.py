"""Whatever the bytes, either a fault answers, or the head for the upstream has exactly one Host (the gateway's), no
Origin, no client token, no hop-by-hop field of the client's, and at most one session id.

Heads are built from the lines that rules look at, in good and bad spellings; some are then torn and glued at random.
"""

from __future__ import annotations

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from sidecar.faults import Fault
from sidecar.guard.credentials import CredentialPolicy
from sidecar.guard.hosts import DoorPolicy
from sidecar.relay import wire
from sidecar.relay.admission import Rules, admit
from sidecar.relay.fields import HOP_BY_HOP
from sidecar.relay.request import Request
from sidecar.relay.wire import CHUNKED, UNTIL_CLOSE, RequestHead, WireError
from sidecar.sessions.mapping import MappingPolicy
from sidecar.sessions.sources import HeaderSource

GATEWAY, KEY, TOKEN, NAME = b"gateway.example:8642", b"gateway-key", b"client-token", b"ann"
ORIGINS = ["http://localhost:3000"]
SOURCES = (HeaderSource(b"x-hermes-session-key"), HeaderSource(b"x-openwebui-chat-id", b"openwebui-"))


def rules(*, tokens: bool, isolated: bool, forwards_key: bool) -> Rules:
    return Rules(
        gateway_netloc=GATEWAY,
        gateway_prefix=b"/api" if forwards_key else b"",
        door=DoorPolicy.of("127.0.0.1", ["sidecar.example"], ORIGINS),
        mapping=MappingPolicy(SOURCES, (b"x-openwebui-task",), "always" if forwards_key else "never"),
        credentials=CredentialPolicy.of(KEY, [(NAME.decode(), TOKEN)] if tokens else None, isolate=isolated),
    )


# Request heads: good ones with a few lines out of place


def spelled(name: bytes) -> st.SearchStrategy[bytes]:
    return st.sampled_from([name, name.lower(), name.upper(), name.replace(b"-", b"_")])


NAMES = st.one_of(
    st.sampled_from(
        [
            *(b"Connection", b"Expect", b"Upgrade", b"TE", b"Trailer", b"Keep-Alive", b"Proxy-Connection"),
            *(b"Proxy-Authorization", b"Cookie", b"Sec-Fetch-Site", b"Sec-Fetch-Mode", b"Sec-Fetch-Dest", b"Via"),
            *(b"X-Hermes-Session-Id", b"X-Claude-Session-Id", b"X-Hermes-Session-Key", b"X-Claude-Session-Key"),
            *(b"X-OpenWebUI-Chat-Id", b"X-OpenWebUI-Task", b"X-Hermes-Friendly-Id", b"X-Request-Id"),
            *(b"X-Forwarded-For", b"X-Forwarded-Host", b"X-Forwarded-Proto", b"Content-Type", b"X-Other"),
        ]
    ).flatmap(spelled),
    st.text("abcXYZ019-_!#", min_size=1, max_size=8).map(str.encode),
)
VALUES = st.one_of(
    st.sampled_from(
        [
            *(b"localhost", b"evil.example", b"", b"null", b"close", b"keep-alive, Upgrade", b"0", b"chunked"),
            *(b"host, origin, authorization, content-length, x-hermes-session-id", b"x-forwarded-for, via, cookie"),
            *(b"websocket", b"h2c", b"h2c, websocket", b"100-continue", b"trailers", b"Bearer " + TOKEN),
            *(b"same-origin", b"navigate", b"document", b"chat-1", b"new", b"{{CHAT_ID}}", b"../etc", b"hs-1"),
            *(b"ann-1", b"C:x", b"a" * 300, b"\xe9\xff", b"a b\tc"),
        ]
    ),
    st.binary(min_size=1, max_size=12).map(lambda value: value.translate(None, bytes(range(32)) + b"\x7f").strip()),
)
HOSTS = st.sampled_from([b"localhost:8650"] * 6 + [b"127.0.0.1", b"SIDECAR.example", b"[::1]:1", b"evil.example", b""])
ORIGIN_LINES = st.sampled_from(
    [b""] * 4 + [b"http://localhost:3000", b"http://localhost:8650", b"http://evil.example", b"null"]
)
AUTHORIZATIONS = st.sampled_from(
    [b"Bearer " + TOKEN] * 5 + [b"bearer  " + TOKEN, b"Bearer ", b"Basic x", b"Bearer mine"]
)
FRAMINGS = st.sampled_from(
    [[]] * 4
    + [[b"Content-Length: 0"], [b"content-length: 5"], [b"Transfer-Encoding: Chunked"]] * 2
    + [
        [b"Content-Length: 5", b"Transfer-Encoding: chunked"],
        [b"Content-Length: 5", b"Content-Length: 5"],
        [b"Content-Length: +5"],
        [b"Transfer-Encoding: gzip, chunked"],
    ]
)
WEBSOCKETS = st.sampled_from(
    [[]] * 6 + [[b"Connection: Upgrade", b"Upgrade: websocket"], [b"Connection: upgrade, close", b"Upgrade: h2c"]]
)
TARGETS = st.one_of(
    st.sampled_from(
        [
            *(b"/v1/chat/completions", b"/v1/models?a=b", b"/healthz", b"/sidecar/", b"/metrics", b"*", b"/"),
            *(b"/api/sessions/ann-1/messages", b"/api/sessions/bob-1", b"/v1/runs", b"//x", b"/%2e%2e/x"),
            *(b"http://localhost/x", b"http://evil.example/x", b"http://localhost@evil.example/x", b"evil.example:443"),
        ]
    ),
    st.binary(max_size=20).map(lambda path: b"/" + path.translate(None, bytes(range(33)) + b"\x7f")),
)
METHODS = st.sampled_from([b"GET", b"POST"] * 4 + [b"HEAD", b"OPTIONS", b"CONNECT", b"DELETE", b"PRI", b"M-SEARCH"])
VERSIONS = st.sampled_from([b"HTTP/1.1"] * 8 + [b"HTTP/1.0", b"HTTP/2.0"])


@st.composite
def blocks(draw: st.DrawFn) -> bytes:
    """A request head, most often one that a careless server would accept."""
    lines = [b"Host: " + draw(HOSTS), *draw(FRAMINGS), *draw(WEBSOCKETS)]
    if origin := draw(ORIGIN_LINES):
        lines.append(b"Origin: " + origin)
        if draw(st.booleans()):
            lines.append(b"Access-Control-Request-Method: POST")
    lines += [b"Authorization: " + value for value in draw(st.lists(AUTHORIZATIONS, max_size=2))]
    lines += [name + b": " + value for name, value in draw(st.lists(st.tuples(NAMES, VALUES), max_size=5))]
    lines = draw(st.permutations(lines))
    start = draw(METHODS) + b" " + draw(TARGETS) + b" " + draw(VERSIONS)
    block = b"".join(line + b"\r\n" for line in [start, *lines])
    if draw(st.integers(0, 9)) == 9:  # torn, and glued with something else
        at = draw(st.integers(0, len(block)))
        block = block[:at] + draw(st.binary(max_size=4)) + block[at + draw(st.integers(0, 3)) :]
    return block


@given(blocks(), st.booleans(), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=1000, deadline=None)
@example(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: host, x-forwarded-host\r\n", True, True, True, False)
@example(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTE: trailers\r\n", False, False, True, False)
def test_either_a_fault_answers_or_the_head_is_clean(
    block: bytes, tokens: bool, isolated: bool, forwards_key: bool, is_draining: bool
) -> None:
    policy = rules(tokens=tokens, isolated=tokens and isolated, forwards_key=forwards_key)
    try:
        head = wire.parse_request_head(block)
    except WireError:
        event("not HTTP")
        return
    request = Request(head.method, head.minor)
    try:
        admit(request, head, policy, peer=b"127.0.0.1", is_draining=is_draining)
    except Fault as fault:
        event(f"refused: {fault.code.code}")
        assert request.head == b""
        _assert_says_nothing(fault, block)
        return
    if request.is_preflight:
        event("preflight")
        assert request.head == b""
        return

    event("own page" if request.is_own else "upstream")
    sent = wire.parse_request_head(request.head[:-2])  # what we send is what we ourselves would take
    assert request.head.endswith(b"\r\n\r\n")
    assert request.head.count(b"\r\n\r\n") == 1
    if request.is_own:
        assert {b"cookie", b"authorization", b"origin", *HOP_BY_HOP}.isdisjoint(_names(sent))
        assert len(_values(sent, b"host")) == 1
        return
    _assert_clean(request, sent)
    _assert_credentials(sent, tokens=tokens)
    _assert_session(request, sent, namespace=NAME + b"-" if tokens and isolated else b"", forwards_key=forwards_key)


def _assert_clean(request: Request, sent: RequestHead) -> None:
    assert _values(sent, b"host") == [GATEWAY]
    assert not {b"origin", b"expect", b"access-control-request-method"} & _names(sent)
    # The hop-by-hop fields are the sidecar's own: its framing, and the one upgrade that it understood.
    expected = {b"transfer-encoding"} if request.body == CHUNKED else set()
    if request.is_upgrade:
        expected |= {b"connection", b"upgrade"}
        assert (_values(sent, b"connection"), _values(sent, b"upgrade")) == ([b"Upgrade"], [b"websocket"])
    assert HOP_BY_HOP & _names(sent) == expected
    # One reading of the framing, and it is the one that was understood.
    assert request.body != UNTIL_CLOSE
    lengths, codings = _values(sent, b"content-length"), _values(sent, b"transfer-encoding")
    assert wire.request_body(sent.minor, lengths, codings) == request.body
    assert sent.method != b"CONNECT"


def _assert_credentials(sent: RequestHead, *, tokens: bool) -> None:
    shown = _values(sent, b"authorization")
    if tokens:
        assert shown == [b"Bearer " + KEY]
        assert not any(TOKEN in value for name, value in sent.fields if name.lower() == b"authorization")
    else:
        assert shown  # the client's own, or the key where it has none


def _assert_session(request: Request, sent: RequestHead, *, namespace: bytes, forwards_key: bool) -> None:
    ids = _values(sent, b"x-hermes-session-id")
    assert len(ids) <= 1
    assert ids == _values(sent, b"x-claude-session-id") == ([request.session_id] if request.session_id else [])
    assert all(value.startswith(namespace) for value in ids)
    keys = _values(sent, b"x-hermes-session-key")
    assert forwards_key or not keys
    assert all(value.startswith(namespace) for value in keys)
    assert not {b"x-claude-session-key", b"x-hermes-friendly-id", b"x-claude-friendly-id"} & _names(sent)


def _assert_says_nothing(fault: Fault, block: bytes) -> None:
    """No value that a client sent stands in what it is told: such values are long here, the fixed words are not."""
    said = fault.envelope()
    assert TOKEN not in said
    assert KEY not in said
    for line in block.split(b"\r\n"):
        value = line.partition(b":")[2].strip()
        assert len(value) < 20 or value not in said


def _names(head: RequestHead) -> set[bytes]:
    return {name.lower() for name, _ in head.fields}


def _values(head: RequestHead, name: bytes) -> list[bytes]:
    return [value for field, value in head.fields if field.lower() == name]
