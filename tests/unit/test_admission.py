"""Admission: the head that the upstream gets for a request, byte for byte, or the fault that comes first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.faults import Fault
from sidecar.relay.admission import Rules, admit
from sidecar.relay.destinations import DashboardRules, Families
from sidecar.relay.request import Request
from sidecar.relay.routes import route_of
from sidecar.relay.wire import CHUNKED, Field, Fields, RequestHead, parse_request_head
from tests.unit.grammar import TARGETS, TOKENS, VALUES, VISIBLE, bytes_of, nominated
from tests.unit.policies import rules_of

PLAIN = rules_of()
PREFIXED = rules_of({"gateway": {"url": "http://gateway.example:9000/api/"}})
WITH_KEY = rules_of({}, {"HERMES_SIDECAR_GATEWAY__TOKEN": "gateway-key"})
FRONTEND = rules_of({"listen": {"allowed_origins": ["http://localhost:3000"]}})
DASHBOARD = DashboardRules(netloc=b"127.0.0.1:9119", prefix=b"/d", mount=b"/dashboard", token=b"dashboard-token")

HOST = b"Host: 127.0.0.1:8650\r\n"
ADDED = (
    b"X-Forwarded-For: 127.0.0.1\r\nX-Forwarded-Proto: http\r\nX-Forwarded-Host: 127.0.0.1:8650\r\n"
    b"Via: 1.1 hermes-sidecar\r\n"
)
ROUTE_NAMES = {
    *("chat_completions", "responses", "runs", "models", "capabilities", "health"),
    *("sessions", "skills", "memory", "config", "jobs", "other"),
}


def admitted(block: bytes, by: Rules = PLAIN, *, is_draining: bool = False) -> Request:
    """The request of this head (without its empty line), as far as it goes. Raises a Fault."""
    head = parse_request_head(block)
    request = Request(head.method, head.minor)
    admit(request, head, by, peer=b"127.0.0.1", is_draining=is_draining)
    return request


def get(target: bytes, *lines: bytes, method: bytes = b"GET") -> bytes:
    """A head with an X-Request-Id, so that nothing in the upstream's head is new."""
    return b"%b %b HTTP/1.1\r\n" % (method, target) + HOST + b"X-Request-Id: r1\r\n" + b"".join(lines)


def fault_code(block: bytes, by: Rules = PLAIN, *, is_draining: bool = False) -> str | None:
    try:
        admitted(block, by, is_draining=is_draining)
    except Fault as fault:
        return fault.code.code
    return None


def sorted_head(block: bytes) -> tuple[bytes, bytes, int, Fields]:
    """A head for comparing: order between different names means nothing, but Host comes first."""
    assert block.endswith(b"\r\n\r\n")
    method, target, minor, lines = parse_request_head(block[:-2])
    return method, target, minor, [lines[0], *sorted(lines[1:], key=lambda line: line[0].lower())]


def target_of(request: Request) -> bytes:
    return parse_request_head(request.head[:-2]).target


def lines_of(request: Request, name: bytes) -> list[bytes]:
    return [value for known, value in parse_request_head(request.head[:-2]).fields if known.lower() == name]


# --- Heads -----------------------------------------------------------------------------------------------------------

WORKSPACE_TURN = (
    b"POST /v1/chat/completions HTTP/1.1\r\n"
    b"host: 127.0.0.1:8650\r\n"
    b"connection: keep-alive\r\n"
    b"Content-Type: application/json\r\n"
    b"Authorization: Bearer workspace-key\r\n"
    b"X-Hermes-Session-Id: ws-route-1\r\n"
    b"X-Claude-Session-Id: ws-route-1\r\n"
    b"accept: */*\r\n"
    b"accept-language: *\r\n"
    b"sec-fetch-mode: cors\r\n"
    b"user-agent: node\r\n"
    b"accept-encoding: gzip, deflate\r\n"
    b"content-length: 94\r\n"
)
"""What Hermes Workspace's server sends for a chat turn."""


def test_a_chat_turn_of_hermes_workspace_byte_for_byte() -> None:
    request = admitted(WORKSPACE_TURN)

    assert request.head == (
        b"POST /v1/chat/completions HTTP/1.1\r\n"
        b"Host: 127.0.0.1:8642\r\n"
        b"Content-Type: application/json\r\n"
        b"accept: */*\r\n"
        b"accept-language: *\r\n"
        b"user-agent: node\r\n"
        b"accept-encoding: gzip, deflate\r\n"
        b"sec-fetch-mode: cors\r\n" + ADDED + b"X-Hermes-Session-Id: ws-route-1\r\n"
        b"X-Claude-Session-Id: ws-route-1\r\n"
        b"Authorization: Bearer workspace-key\r\n"
        b"Content-Length: 94\r\n"
        b"X-Request-Id: %b\r\n\r\n" % request.request_id
    )
    assert request.answer_fields == [(b"X-Hermes-Sidecar-Session", b"client")]
    assert (request.session_id, request.source, request.route) == (b"ws-route-1", "client", "chat_completions")
    assert (request.body, request.wants_close, request.is_safe, request.cors) == (94, False, False, ())


@pytest.mark.parametrize(
    ("block", "by", "expected"),
    [
        pytest.param(
            get(b"/v1/models"),
            PLAIN,
            b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:8642\r\nX-Request-Id: r1\r\n" + ADDED,
            id="nothing-but-host",
        ),
        pytest.param(
            get(b"/v1/models?x=%41&y"),
            PREFIXED,
            b"GET /api/v1/models?x=%41&y HTTP/1.1\r\nHost: gateway.example:9000\r\nX-Request-Id: r1\r\n" + ADDED,
            id="prefix-of-the-gateway",
        ),
        pytest.param(
            get(b"/v1/models"),
            WITH_KEY,
            b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:8642\r\nX-Request-Id: r1\r\n"
            b"Authorization: Bearer gateway-key\r\n" + ADDED,
            id="gateways-key",
        ),
        pytest.param(
            get(b"/v1/models", b"Authorization: Bearer other\r\n"),
            WITH_KEY,
            b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:8642\r\nX-Request-Id: r1\r\n"
            b"Authorization: Bearer other\r\n" + ADDED,
            id="clients-own-key",
        ),
        pytest.param(
            get(b"/v1/chat/completions", b"X-Hermes-Session-Key: k1\r\nContent-Length: 0005\r\n", method=b"POST"),
            PLAIN,
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8642\r\nX-Request-Id: r1\r\nContent-Length: 5\r\n"
            b"X-Hermes-Session-Id: k1\r\nX-Claude-Session-Id: k1\r\n" + ADDED,
            id="route-key-becomes-the-session",
        ),
        pytest.param(
            get(b"/v1/runs", b"Transfer-Encoding: Chunked\r\nTE: trailers\r\nTrailer: X\r\n", method=b"POST"),
            PLAIN,
            b"POST /v1/runs HTTP/1.1\r\nHost: 127.0.0.1:8642\r\nX-Request-Id: r1\r\n"
            b"Transfer-Encoding: chunked\r\n" + ADDED,
            id="chunks",
        ),
        pytest.param(
            get(b"/v1/runs", b"Content-Length: 0\r\n", method=b"POST"),
            PLAIN,
            b"POST /v1/runs HTTP/1.1\r\nHost: 127.0.0.1:8642\r\nX-Request-Id: r1\r\nContent-Length: 0\r\n" + ADDED,
            id="length-zero",
        ),
        pytest.param(
            get(b"/v1/runs", method=b"POST"),
            PLAIN,
            b"POST /v1/runs HTTP/1.1\r\nHost: 127.0.0.1:8642\r\nX-Request-Id: r1\r\n" + ADDED,
            id="no-length-stays-no-length",
        ),
        pytest.param(
            get(b"/v1/models", b"Expect: 100-continue\r\n"),
            PLAIN,
            b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:8642\r\nX-Request-Id: r1\r\n" + ADDED,
            id="expect-stays-here",
        ),
        pytest.param(
            get(b"/v1/models", b"Origin: http://localhost:3000\r\nX-Claude-Friendly-Id: f\r\nIdempotency-Key: i\r\n"),
            FRONTEND,
            b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:8642\r\nX-Request-Id: r1\r\nIdempotency-Key: i\r\n" + ADDED,
            id="origin-stays-here",
        ),
        pytest.param(
            get(
                b"/api/ws?token=t",
                b"Connection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Key: k==\r\n",
                b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: a, b\r\n",
            ),
            PLAIN,
            b"GET /api/ws?token=t HTTP/1.1\r\nHost: 127.0.0.1:8642\r\nX-Request-Id: r1\r\nConnection: Upgrade\r\n"
            b"Upgrade: websocket\r\nSec-WebSocket-Key: k==\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Protocol: a, b\r\n" + ADDED,
            id="websocket",
        ),
        pytest.param(
            get(b"/", b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"),
            PLAIN,
            b"GET / HTTP/1.1\r\nHost: 127.0.0.1:8642\r\nX-Request-Id: r1\r\n" + ADDED,
            id="http-2-upgrade-does-not-cross",
        ),
        pytest.param(
            get(b"/", b"Cookie: caf\xe9\r\ncookie: \xff\r\nX-Empty:\r\nX-Blanks:  a  b \r\n"),
            PLAIN,
            b"GET / HTTP/1.1\r\nHost: 127.0.0.1:8642\r\nX-Request-Id: r1\r\nCookie: caf\xe9\r\ncookie: \xff\r\n"
            b"X-Empty: \r\nX-Blanks: a  b\r\n" + ADDED,
            id="bytes-as-they-are",
        ),
        pytest.param(
            b"GET http://LOCALHOST:8650/v1/models?x HTTP/1.1\r\n" + HOST + b"X-Request-Id: r1\r\n",
            PREFIXED,
            b"GET /api/v1/models?x HTTP/1.1\r\nHost: gateway.example:9000\r\nX-Request-Id: r1\r\n" + ADDED,
            id="absolute-target",
        ),
        pytest.param(
            b"OPTIONS * HTTP/1.1\r\n" + HOST + b"X-Request-Id: r1\r\n",
            PREFIXED,
            b"OPTIONS * HTTP/1.1\r\nHost: gateway.example:9000\r\nX-Request-Id: r1\r\n" + ADDED,
            id="asterisk-has-no-prefix",
        ),
        pytest.param(
            b"GET /v1/models HTTP/1.0\r\n" + HOST + b"X-Request-Id: r1\r\nExpect: 100-continue\r\n",
            PLAIN,
            b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:8642\r\nX-Request-Id: r1\r\n" + ADDED,
            id="http-1.0-client",
        ),
    ],
)
def test_head_for_the_upstream(block: bytes, by: Rules, expected: bytes) -> None:
    assert sorted_head(admitted(block, by).head) == sorted_head(expected + b"\r\n")


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(b"/a%2Fb%3Ac%27d?x=%41&y=a+b&z=%2F&e=&e", id="escapes"),
        pytest.param(b"/?q=100%&r=%zz", id="per-cent-that-escapes-nothing"),
        pytest.param(b"/v1/models?", id="empty-query"),
        pytest.param(b"//a//b/./../c", id="segments"),
        pytest.param(b"/a;p=1", id="parameters"),
        pytest.param(b"/%E4%BC%9A\xe4\xbc\x9a", id="outside-ascii"),
        pytest.param(b"/p#f?q", id="fragment"),
        pytest.param(b"/http://evil.example/", id="url-in-a-path"),
    ],
)
def test_target_passes_byte_for_byte(target: bytes) -> None:
    assert target_of(admitted(get(target))) == target
    assert target_of(admitted(get(target), PREFIXED)) == b"/api" + target


@given(bytes_of(VISIBLE).map(lambda rest: b"/x" + rest))
def test_any_path_passes_byte_for_byte(target: bytes) -> None:
    """For any target in origin form, the upstream gets the same bytes behind the gateway's prefix."""
    assert target_of(admitted(get(target), PREFIXED)) == b"/api" + target


@pytest.mark.parametrize(
    ("target", "sent"),
    [
        pytest.param(b"http://localhost", b"/", id="no-path"),
        pytest.param(b"http://localhost?x", b"/?x", id="query-alone"),
        pytest.param(b"HTTP://localhost:8650/a", b"/a", id="scheme-in-capitals"),
        pytest.param(b"https://localhost/a//b", b"/a//b", id="https"),
        pytest.param(b"http://[::1]:8650/a", b"/a", id="ipv6"),
    ],
)
def test_absolute_target_becomes_a_path(target: bytes, sent: bytes) -> None:
    assert target_of(admitted(get(target))) == sent


# --- The request's id ------------------------------------------------------------------------------------------------


def test_request_id_is_made_where_missing_and_never_twice() -> None:
    requests = [admitted(b"GET /v1/models HTTP/1.1\r\n" + HOST) for _ in range(100)]

    assert len({request.request_id for request in requests}) == 100
    for request in requests:
        assert lines_of(request, b"x-request-id") == [request.request_id]
        assert request.request_id.isalnum()


def test_clients_own_request_id_is_kept() -> None:
    request = admitted(b"GET /v1/models HTTP/1.1\r\n" + HOST + b"x-request-id: mine/1 \xff\r\n")

    assert request.request_id == b"mine/1 \xff"
    assert lines_of(request, b"x-request-id") == [b"mine/1 \xff"]


def test_nominated_request_id_is_made_anew() -> None:
    request = admitted(get(b"/v1/models", b"Connection: X-Request-Id\r\n"))

    assert request.request_id != b"r1"
    assert lines_of(request, b"x-request-id") == [request.request_id]


# --- What is whose ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(b"/capabilities", id="capabilities"),
        pytest.param(b"/capabilities?x=1", id="with-a-query"),
        pytest.param(b"/capabilities?", id="with-an-empty-query"),
        pytest.param(b"/capabilities/events", id="events"),
        pytest.param(b"/capabilities/refresh", id="refresh"),
        pytest.param(b"/metrics", id="metrics"),
        pytest.param(b"/healthz", id="healthz"),
        pytest.param(b"/readyz", id="readyz"),
        pytest.param(b"/sidecar/", id="status-page"),
        pytest.param(b"/sidecar/app.js?v=1", id="its-files"),
        pytest.param(b"http://localhost/metrics", id="absolute"),
    ],
)
def test_own_paths_are_the_sidecars(target: bytes) -> None:
    request = admitted(get(target), PREFIXED)

    assert (request.destination, request.is_own, request.route) == ("own", True, "own")
    assert (request.session_id, request.source, request.answer_fields) == (None, "none", [])


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(b"/metrics/x", id="below-metrics"),
        pytest.param(b"/metrics/", id="metrics-with-a-slash"),
        pytest.param(b"/Metrics", id="other-case"),
        pytest.param(b"//metrics", id="two-slashes"),
        pytest.param(b"/%63apabilities", id="escaped-letter"),
        pytest.param(b"/capabilities%3Fx", id="escaped-query"),
        pytest.param(b"/capabilities;x", id="parameter"),
        pytest.param(b"/capabilities#x", id="fragment"),
        pytest.param(b"/capabilities/", id="capabilities-with-a-slash"),
        pytest.param(b"/capabilities/other", id="below-capabilities"),
        pytest.param(b"/v1/capabilities", id="the-gateways-capabilities"),
        pytest.param(b"/sidecar", id="no-slash"),
        pytest.param(b"/sidecars/", id="begins-like-ours"),
        pytest.param(b"/%73idecar/", id="escaped-tree"),
        pytest.param(b"/x/../metrics", id="dot-segments"),
        pytest.param(b"/health", id="the-gateways-health"),
        pytest.param(b"/readyz2", id="longer-name"),
        pytest.param(b"/?/metrics", id="in-the-query"),
        pytest.param(b"/", id="root"),
    ],
)
def test_everything_else_is_the_gateways(target: bytes) -> None:
    request = admitted(get(target), PREFIXED)

    assert (request.destination, request.is_own) == ("gateway", False)
    assert target_of(request) == b"/api" + target


def test_own_page_sees_nothing_that_it_does_not_need() -> None:
    """Cookies of every program on this host come along with a browser's request, and so may keys."""
    lines = b"Cookie: c\r\nAuthorization: Bearer x\r\nX-Hermes-Session-Key: k\r\nReferer: r\r\nAccept: text/html\r\n"

    head = admitted(get(b"/capabilities?token=t", lines), WITH_KEY).head

    assert sorted_head(head) == sorted_head(
        b"GET /capabilities HTTP/1.1\r\nHost: sidecar\r\nX-Request-Id: r1\r\nAccept: text/html\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("path", "route"),
    [
        pytest.param(b"/v1/chat/completions", "chat_completions", id="chat"),
        pytest.param(b"/v1/chat/completions/", "other", id="chat-with-a-slash"),
        pytest.param(b"/v1/responses", "responses", id="responses"),
        pytest.param(b"/v1/runs", "runs", id="runs"),
        pytest.param(b"/v1/models", "models", id="models"),
        pytest.param(b"/v1/capabilities", "capabilities", id="capabilities"),
        pytest.param(b"/health", "health", id="health"),
        pytest.param(b"/health/detailed", "other", id="below-health"),
        pytest.param(b"/api/sessions", "sessions", id="sessions"),
        pytest.param(b"/api/sessions/abc/messages", "sessions", id="below-sessions"),
        pytest.param(b"/api/sessionsX", "other", id="begins-like-sessions"),
        pytest.param(b"/v1/skills", "skills", id="skills-of-the-gateway"),
        pytest.param(b"/api/memory", "memory", id="memory"),
        pytest.param(b"/api/config/x", "config", id="config"),
        pytest.param(b"/api/jobs", "jobs", id="jobs"),
        pytest.param(b"/x/api/jobs", "other", id="family-later-in-the-path"),
        pytest.param(b"", "other", id="empty"),
    ],
)
def test_route_names(path: bytes, route: str) -> None:
    assert route_of(path) == route


@given(
    st.binary(max_size=40)
    | st.builds(b"/%b/%b/%b".__mod__, st.tuples(st.sampled_from((b"api", b"v1")), TOKENS, TOKENS))
)
def test_route_names_come_from_a_closed_list(path: bytes) -> None:
    """For any path, the name for logs and metrics is one of a dozen words."""
    assert route_of(path) in ROUTE_NAMES


# --- Faults, and which comes first -----------------------------------------------------------------------------------

EVIL = b"Host: evil.example\r\n"
FOREIGN = b"Origin: http://evil.example\r\n"
TWO_KEYS = b"X-Hermes-Session-Key: a\r\nX-Hermes-Session-Key: b\r\n"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Rules:
    """Rules with client tokens."""
    tokens = Path(tmp_path_factory.mktemp("tokens"), "tokens")
    tokens.write_text("alice:tok-alice\n")
    return rules_of({"listen": {"tokens_file": str(tokens), "allowed_origins": ["http://localhost:3000"]}})


@pytest.mark.parametrize(
    ("block", "code"),
    [
        pytest.param(
            get(b"/", b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"), "invalid_request", id="framing"
        ),
        pytest.param(get(b"/", b"Transfer-Encoding: gzip\r\n"), "invalid_request", id="coding"),
        pytest.param(get(b"a/b"), "invalid_request", id="target-without-slash"),
        pytest.param(get(b"*"), "invalid_request", id="asterisk-of-a-get"),
        pytest.param(get(b"ftp://localhost/"), "invalid_request", id="target-of-another-scheme"),
        pytest.param(get(b"localhost:8650", method=b"CONNECT"), "invalid_request", id="connect"),
        pytest.param(get(b"/v1/models", method=b"CONNECT"), "invalid_request", id="connect-with-a-path"),
        pytest.param(get(b"http://localhost/", method=b"CONNECT"), "invalid_request", id="connect-with-a-url"),
        pytest.param(b"GET / HTTP/1.1\r\n", "invalid_request", id="no-host"),
        pytest.param(get(b"/", HOST), "invalid_request", id="two-hosts"),
        pytest.param(b"GET / HTTP/1.1\r\n" + EVIL, "host_not_allowed", id="host"),
        pytest.param(get(b"http://evil.example/"), "host_not_allowed", id="target-elsewhere"),
        pytest.param(get(b"http://localhost@evil.example/"), "host_not_allowed", id="target-with-a-user"),
        pytest.param(get(b"/", FOREIGN), "origin_not_allowed", id="origin"),
        pytest.param(get(b"/", b"Sec-Fetch-Site: cross-site\r\n"), "origin_not_allowed", id="fetch-metadata"),
        pytest.param(get(b"/", TWO_KEYS), "invalid_session_key", id="two-keys"),
        pytest.param(get(b"/", b"Expect: 200-ok\r\n"), "expectation_failed", id="expectation"),
        pytest.param(get(b"/", b"Expect:\r\n"), "expectation_failed", id="empty-expectation"),
        pytest.param(
            get(b"/", b"Expect: 100-continue\r\nExpect: x\r\n"), "expectation_failed", id="second-expectation"
        ),
        pytest.param(get(b"/healthz", b"Expect: x\r\n"), "expectation_failed", id="expectation-of-an-own-page"),
        pytest.param(get(b"/"), None, id="none"),
    ],
)
def test_faults(block: bytes, code: str | None) -> None:
    assert fault_code(block) == code


@pytest.mark.parametrize(
    "target",
    [
        b"/v1/chat/completions",
        b"/v1/models",
        b"/capabilities",
        b"/metrics",
        b"/healthz",
        b"/sidecar/",
        b"/api/sessions",
    ],
)
def test_host_is_judged_first_and_on_every_path(target: bytes, guarded: Rules) -> None:
    """Also for what looks like a preflight, without a token, with an Origin of the same name, and while draining."""
    lines = EVIL + FOREIGN + TWO_KEYS + b"Expect: x\r\nAccess-Control-Request-Method: POST\r\n"
    for method in (b"GET", b"POST", b"OPTIONS"):
        block = b"%b %b HTTP/1.1\r\n" % (method, target) + lines

        assert fault_code(block, guarded, is_draining=True) == "host_not_allowed"


@pytest.mark.parametrize(
    ("block", "is_draining", "code"),
    [
        pytest.param(get(b"/v1/models", FOREIGN), True, "origin_not_allowed", id="origin-before-token-and-drain"),
        pytest.param(get(b"/v1/models"), True, "client_token_required", id="token-before-drain"),
        pytest.param(get(b"/v1/models", b"Authorization: Bearer tok-alice\r\n"), True, "draining", id="drain"),
        pytest.param(get(b"/v1/models", b"Authorization: Bearer tok-alice\r\n"), False, None, id="token"),
        pytest.param(
            get(b"/v1/models", b"Authorization: Bearer tok-bob\r\n"), False, "client_token_required", id="wrong"
        ),
        pytest.param(get(b"/capabilities"), False, "client_token_required", id="own-page"),
        pytest.param(get(b"/metrics"), False, "client_token_required", id="metrics"),
        pytest.param(get(b"/readyz"), False, "client_token_required", id="readyz"),
        pytest.param(get(b"/sidecar/"), False, "client_token_required", id="status-page"),
        pytest.param(get(b"/healthz"), False, None, id="healthz-is-open"),
        pytest.param(get(b"/healthz?x"), False, None, id="healthz-with-a-query-is-open"),
        pytest.param(get(b"/healthz/x"), False, "client_token_required", id="below-healthz-is-not"),
        pytest.param(get(b"/healthz", FOREIGN), False, "origin_not_allowed", id="healthz-not-for-foreign-pages"),
        pytest.param(get(b"/healthz"), True, None, id="healthz-while-draining"),
        pytest.param(get(b"/readyz", b"Authorization: Bearer tok-alice\r\n"), True, None, id="own-page-while-draining"),
    ],
)
def test_order_of_faults(block: bytes, is_draining: bool, code: str | None, guarded: Rules) -> None:
    assert fault_code(block, guarded, is_draining=is_draining) == code


def test_client_token_stays_here(guarded: Rules) -> None:
    request = admitted(get(b"/v1/models", b"Authorization: Bearer tok-alice\r\n"), guarded)

    assert lines_of(request, b"authorization") == []


def test_preflight_needs_no_token_and_sends_nothing(guarded: Rules) -> None:
    preflight = (
        b"Origin: http://localhost:3000\r\nAccess-Control-Request-Method: POST\r\n"
        b"Access-Control-Request-Headers: authorization,x-hermes-session-id\r\n"
    )

    request = admitted(get(b"/v1/chat/completions", preflight, method=b"OPTIONS"), guarded, is_draining=True)

    assert (request.is_preflight, request.head) == (True, b"")
    assert request.cors[0] == (b"Access-Control-Allow-Origin", b"http://localhost:3000")
    assert (b"Access-Control-Allow-Headers", b"authorization,x-hermes-session-id") in request.answer_fields


# --- What the connection has to know ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        pytest.param(get(b"/"), {"body": 0, "is_safe": True, "wants_close": False}, id="get"),
        pytest.param(get(b"/", method=b"HEAD"), {"is_safe": True}, id="head"),
        pytest.param(get(b"/", method=b"OPTIONS"), {"is_safe": True}, id="options"),
        pytest.param(get(b"/", method=b"POST"), {"body": 0, "is_safe": False}, id="post-without-body"),
        pytest.param(get(b"/", method=b"DELETE"), {"is_safe": False}, id="delete"),
        pytest.param(get(b"/", b"Content-Length: 0\r\n"), {"body": 0, "is_safe": True}, id="get-with-length-zero"),
        pytest.param(get(b"/", b"Content-Length: 1\r\n"), {"body": 1, "is_safe": False}, id="get-with-a-body"),
        pytest.param(
            get(b"/", b"Transfer-Encoding: chunked\r\n"), {"body": CHUNKED, "is_safe": False}, id="get-with-chunks"
        ),
        pytest.param(get(b"/", b"Connection: Close\r\n"), {"wants_close": True}, id="close"),
        pytest.param(get(b"/", b"Connection: x, close\r\n"), {"wants_close": True}, id="close-in-a-list"),
        pytest.param(get(b"/", b"Connection: closed\r\n"), {"wants_close": False}, id="another-word"),
        pytest.param(
            b"GET / HTTP/1.0\r\n" + HOST, {"is_http_1_0": True, "wants_close": True, "is_safe": True}, id="http-1.0"
        ),
        pytest.param(
            get(b"/", b"Expect: 100-Continue\r\nContent-Length: 5\r\n", method=b"POST"),
            {"expects_continue": True},
            id="expect-in-any-case",
        ),
        pytest.param(
            get(b"/", b"Expect: 100-continue\r\n", method=b"POST"),
            {"expects_continue": False},
            id="expect-without-body",
        ),
        pytest.param(
            b"POST / HTTP/1.0\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 5\r\n",
            {"expects_continue": False, "body": 5},
            id="expect-of-http-1.0",
        ),
        pytest.param(
            get(b"/", b"Connection: upgrade\r\nUpgrade: websocket\r\n"),
            {"is_upgrade": True, "is_safe": False},
            id="websocket",
        ),
        pytest.param(get(b"/", b"Upgrade: websocket\r\n"), {"is_upgrade": False}, id="upgrade-not-named-by-connection"),
        pytest.param(get(b"/", b"Connection: upgrade\r\n"), {"is_upgrade": False}, id="upgrade-to-nothing"),
        pytest.param(
            get(b"/", b"Connection: upgrade\r\nUpgrade: websocket, h2c\r\n"),
            {"is_upgrade": False},
            id="upgrade-to-either",
        ),
        pytest.param(
            get(b"/", b"Connection: upgrade\r\nUpgrade: websocket\r\n", method=b"POST"),
            {"is_upgrade": False},
            id="upgrade-of-a-post",
        ),
        pytest.param(
            get(b"/", b"Connection: upgrade\r\nUpgrade: websocket\r\nContent-Length: 1\r\n"),
            {"is_upgrade": False},
            id="upgrade-with-a-body",
        ),
        pytest.param(
            b"GET / HTTP/1.0\r\n" + HOST + b"Connection: upgrade\r\nUpgrade: websocket\r\n",
            {"is_upgrade": False},
            id="upgrade-of-http-1.0",
        ),
    ],
)
def test_what_the_connection_has_to_know(block: bytes, expected: dict[str, object]) -> None:
    request = admitted(block)

    assert {name: getattr(request, name) for name in expected} == expected


# --- Dashboard and families ------------------------------------------------------------------------------------------

FILLED = replace(PREFIXED, dashboard=DASHBOARD, families=Families(True, frozenset(("config", "jobs"))))
LACKING = replace(PREFIXED, families=Families(True, frozenset(), {"memory": ("No memory.", "Start the dashboard.")}))


@pytest.mark.parametrize(
    ("target", "destination", "sent"),
    [
        pytest.param(b"/dashboard", "dashboard", b"/d/", id="mount"),
        pytest.param(b"/dashboard/", "dashboard", b"/d/", id="mount-with-a-slash"),
        pytest.param(b"/dashboard?x", "dashboard", b"/d/?x", id="mount-with-a-query"),
        pytest.param(b"/dashboard/api/ws?token=%41", "dashboard", b"/d/api/ws?token=%41", id="below-the-mount"),
        pytest.param(b"/dashboardx", "gateway", b"/api/dashboardx", id="begins-like-the-mount"),
        pytest.param(b"/api/config", "dashboard", b"/d/api/config", id="filled-family"),
        pytest.param(b"/api/config/x?y=%zz", "dashboard", b"/d/api/config/x?y=%zz", id="below-a-filled-family"),
        pytest.param(b"/api/configs", "gateway", b"/api/api/configs", id="begins-like-a-filled-family"),
        pytest.param(b"/v1/config", "gateway", b"/api/v1/config", id="the-gateways-name-of-a-family"),
        pytest.param(b"/api/jobs/1?x", "dashboard", b"/d/api/cron/jobs/1?x", id="jobs-have-another-name-there"),
        pytest.param(b"/api/sessions", "gateway", b"/api/api/sessions", id="family-of-the-gateway"),
    ],
)
def test_who_serves_what_with_a_dashboard(target: bytes, destination: str, sent: bytes) -> None:
    request = admitted(get(target), FILLED)

    assert (request.destination, target_of(request)) == (destination, sent)
    assert request.waits_for_probe is False


def test_family_at_the_dashboard_gets_its_token_and_none_of_the_clients_credentials() -> None:
    by = replace(FILLED, credentials=WITH_KEY.credentials)
    secrets = b"Cookie: c\r\nAuthorization: Bearer x\r\nX-Hermes-Session-Token: y\r\nX-Hermes-Session-Key: k\r\n"

    head = admitted(get(b"/api/config", secrets, b"Accept: */*\r\n"), by).head

    assert sorted_head(head) == sorted_head(
        b"GET /d/api/config HTTP/1.1\r\nHost: 127.0.0.1:9119\r\nX-Request-Id: r1\r\nAccept: */*\r\n"
        b"X-Hermes-Session-Token: dashboard-token\r\n" + ADDED + b"\r\n"
    )


def test_mounted_dashboard_gets_neither_its_token_nor_the_gateways_key() -> None:
    by = replace(FILLED, credentials=WITH_KEY.credentials)
    lines = b"Cookie: c\r\nAuthorization: Bearer gateway-key\r\nX-Hermes-Session-Token: own\r\n"

    head = admitted(get(b"/dashboard/api/config", lines), by).head

    assert sorted_head(head) == sorted_head(
        b"GET /d/api/config HTTP/1.1\r\nHost: 127.0.0.1:9119\r\nX-Request-Id: r1\r\nCookie: c\r\n"
        b"X-Hermes-Session-Token: own\r\nX-Forwarded-Prefix: /dashboard\r\n" + ADDED + b"\r\n"
    )


@pytest.mark.parametrize(
    ("target", "code"),
    [
        pytest.param(b"/api/memory", "capability_unavailable", id="family"),
        pytest.param(b"/api/memory/x?y", "capability_unavailable", id="below-a-family"),
        pytest.param(b"/api/memories", None, id="begins-like-a-family"),
        pytest.param(b"/v1/memory", None, id="the-gateways-own-path"),
        pytest.param(b"/api/skills", None, id="family-that-is-there"),
        pytest.param(b"/v1/chat/completions", None, id="chat"),
    ],
)
def test_family_that_nobody_serves_is_a_fault(target: bytes, code: str | None) -> None:
    assert fault_code(get(target), LACKING) == code


def test_request_for_a_family_waits_for_the_first_probe() -> None:
    assert admitted(get(b"/api/memory"), PLAIN).waits_for_probe
    assert not admitted(get(b"/v1/chat/completions"), PLAIN).waits_for_probe
    assert not admitted(get(b"/v1/skills"), PLAIN).waits_for_probe


# --- For any request -------------------------------------------------------------------------------------------------

NAMES = TOKENS | st.sampled_from(
    (
        *(b"Host", b"Connection", b"Upgrade", b"Expect", b"Origin", b"Authorization", b"Content-Length", b"Cookie"),
        *(b"Transfer-Encoding", b"X-Request-Id", b"X-Forwarded-For", b"X-Hermes-Session-Id", b"X-Hermes-Session-Key"),
        *(b"Sec-Fetch-Site", b"Access-Control-Request-Method"),
    )
)
FIELDS = st.lists(st.tuples(NAMES, VALUES | st.sampled_from((b"close", b"chunked", b"upgrade", b"5"))), max_size=6)


@given(nominated(st.lists(st.tuples(TOKENS, VALUES), max_size=3)))
def test_nothing_nominated_reaches_the_upstream(case: tuple[Fields, frozenset[bytes]]) -> None:
    """For any fields, what Connection names might as well not have been sent, whatever its spelling."""
    lines, names = case
    heads = []
    for sent in (lines, [line for line in lines if line[0].lower() not in names]):
        head = RequestHead(b"GET", b"/v1/models", 1, [(b"Host", b"localhost"), *sent])
        request = Request(head.method, head.minor)
        admit(request, head, PLAIN, peer=b"127.0.0.1", is_draining=False)
        # An id that is made is another one each time.
        heads.append([line for line in sorted_head(request.head)[3] if line != (b"X-Request-Id", request.request_id)])

    assert heads[0] == heads[1]


@given(
    st.sampled_from((b"GET", b"POST", b"OPTIONS", b"CONNECT")),
    st.sampled_from((b"/v1/chat/completions", b"/metrics", b"/api/jobs/1", b"*", b"http://localhost/x")) | TARGETS,
    st.sampled_from((0, 1)),
    FIELDS,
)
def test_head_is_one_that_its_reader_understands(method: bytes, target: bytes, minor: int, lines: list[Field]) -> None:
    """For any request: a fault, a preflight, or a head that reads back as one request with one Host and one framing."""
    head = RequestHead(method, target, minor, [(b"Host", b"localhost"), *lines])
    request = Request(head.method, head.minor)
    try:
        admit(request, head, WITH_KEY, peer=b"127.0.0.1", is_draining=False)
    except Fault:
        assert request.head == b""
        return
    if request.is_preflight:
        assert request.head == b""
        return
    sent = parse_request_head(request.head[:-2])
    names = [name.lower() for name, _ in sent.fields]

    assert (sent.method, sent.minor) == (method, 1) or request.is_own
    assert names.count(b"host") == 1
    assert names.count(b"content-length") + names.count(b"transfer-encoding") <= 1
    assert names.count(b"x-hermes-session-id") == names.count(b"x-claude-session-id") <= 1
    assert request.route in ROUTE_NAMES | {"own"}
