"""Web pages: allowed origins are served with CORS of the sidecar's own, foreign ones get nothing done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.raw_client import CHAT, JSON, ask, chat, raw_client
from tests.support.raw_http import Answer
from tests.support.scripted_upstream import Connection, ok
from tests.support.sidecars import relayed

ALLOWED = "http://localhost:3000"
LISTEN = {"allowed_origins": [ALLOWED]}
ORIGIN = f"Origin: {ALLOWED}".encode()
PREFLIGHT = (ORIGIN, b"Access-Control-Request-Method: POST")
OK = ok()


@pytest.mark.parametrize("method", ["POST", "PATCH", "DELETE"])
async def test_preflight_of_an_allowed_origin_is_answered_here(method: str) -> None:
    asked = "authorization,content-type,x-hermes-session-key,x-claude-session-key,idempotency-key"

    async with relayed(OK, listen=LISTEN) as (upstream, sidecar):
        answer = await ask(
            sidecar.url,
            "OPTIONS",
            "/v1/chat/completions",
            ORIGIN,
            b"Access-Control-Request-Method: " + method.encode(),
            b"Access-Control-Request-Headers: " + asked.encode(),
        )

        assert 200 <= answer.status < 300
        assert answer.values("access-control-allow-origin") == [ALLOWED.encode()]
        assert _members(answer, "access-control-allow-headers") >= set(asked.split(","))
        assert _members(answer, "access-control-allow-methods") >= {"get", "post", "put", "patch", "delete"}
        assert "origin" in _members(answer, "vary")
        assert upstream.connections == []


async def test_preflight_with_sdk_headers_and_private_network_needs_no_token(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("client-token\n")
    asked = ["x-stainless-os", "x-stainless-retry-count", "dangerously-allow-browser", "authorization"]
    listen = {**LISTEN, "tokens_file": str(tmp_path / "tokens")}

    async with relayed(OK, listen=listen) as (upstream, sidecar):
        answer = await ask(
            sidecar.url,
            "OPTIONS",
            "/v1/chat/completions",
            *PREFLIGHT,
            b"Access-Control-Request-Headers: " + ", ".join(asked).encode(),
            b"Access-Control-Request-Private-Network: true",
        )

        assert 200 <= answer.status < 300
        assert _members(answer, "access-control-allow-headers") >= set(asked)
        assert answer.values("access-control-allow-private-network") == [b"true"]
        assert upstream.connections == []


async def test_preflight_leaves_the_connection_usable() -> None:
    async with relayed(OK, listen=LISTEN) as (_, sidecar), raw_client(sidecar.url) as client:
        preflight = await client.ask("OPTIONS", "/v1/chat/completions", *PREFLIGHT)
        answer = await client.ask("POST", "/v1/chat/completions", ORIGIN, JSON, body=CHAT)

        assert (preflight.status // 100, answer.status) == (2, 200)


async def test_preflight_of_a_foreign_origin_is_allowed_nothing() -> None:
    async with relayed(OK, listen=LISTEN) as (upstream, sidecar):
        answer = await ask(
            sidecar.url,
            "OPTIONS",
            "/v1/chat/completions",
            b"Origin: http://evil.example",
            b"Access-Control-Request-Method: POST",
            b"Access-Control-Request-Headers: authorization",
        )

        assert answer.status == 403
        assert [name for name, _ in answer.fields if name.lower().startswith(b"access-control-")] == []
        assert upstream.connections == []


@pytest.mark.parametrize("fields", [[], [ORIGIN]], ids=["program", "allowed-page"])
async def test_options_without_a_requested_method_goes_upstream(fields: list[bytes]) -> None:
    async with relayed(ok(b"", b"Allow: GET, OPTIONS"), listen=LISTEN) as (upstream, sidecar):
        answer = await ask(sidecar.url, "OPTIONS", "/v1/models", *fields)

        assert (answer.status, answer.values("allow")) == (200, [b"GET, OPTIONS"])
        assert upstream.only_request.start_line == b"OPTIONS /v1/models HTTP/1.1"


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://localhost:30001",
        "http://localhost:3000.evil.example",
        "http://localhost:3000@evil.example",
        "https://localhost:3000",
        "http://localhost",
        "http://a.localhost:3000",
        "http://localhost:3000/",
        "http://localhost:3000, http://evil.example",
        "",
    ],
)
@pytest.mark.parametrize("content_type", ["text/plain", "multipart/form-data; boundary=x", None])
async def test_chat_from_a_foreign_page_is_refused(origin: str, content_type: str | None) -> None:
    """These are the requests that a page may send without a preflight."""
    fields = [f"Origin: {origin}".encode()]
    if content_type is not None:
        fields.append(f"Content-Type: {content_type}".encode())

    async with relayed(OK, listen=LISTEN) as (upstream, sidecar):
        answer = await ask(sidecar.url, "POST", "/v1/chat/completions", *fields, body=CHAT)

        assert answer.status == 403
        assert answer.value("x-hermes-sidecar-error") == "origin_not_allowed"
        assert answer.json()["error"]["code"] == "origin_not_allowed"
        assert answer.values("access-control-allow-origin") == []
        assert b"evil" not in answer.body
        assert upstream.connections == []


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        pytest.param("/v1/models", [b"Sec-Fetch-Site: cross-site"], id="image-tag"),
        pytest.param("/capabilities", [b"Sec-Fetch-Site: cross-site"], id="own-page"),
        pytest.param(
            "/v1/models",
            [b"Sec-Fetch-Site: cross-site", b"Sec-Fetch-Mode: navigate", b"Sec-Fetch-Dest: document"],
            id="navigation-elsewhere",
        ),
        pytest.param(
            "/sidecar/",
            [b"Sec-Fetch-Site: cross-site", b"Sec-Fetch-Mode: navigate", b"Sec-Fetch-Dest: iframe"],
            id="status-page-in-a-frame",
        ),
        pytest.param(
            "/v1/live",
            [
                b"Origin: http://evil.example",
                b"Connection: Upgrade",
                b"Upgrade: websocket",
                b"Sec-WebSocket-Version: 13",
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            ],
            id="websocket",
        ),
        pytest.param(
            "/v1/models", [b"Origin: http://localhost:3000", b"Origin: http://evil.example"], id="two-origins"
        ),
    ],
)
async def test_get_from_a_foreign_page_is_refused(path: str, fields: list[bytes]) -> None:
    async with relayed(OK, listen=LISTEN) as (upstream, sidecar):
        answer = await ask(sidecar.url, "GET", path, *fields)

        assert answer.status == 403
        assert answer.value("x-hermes-sidecar-error") == "origin_not_allowed"
        assert upstream.connections == []


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param([], id="program"),
        pytest.param([ORIGIN], id="allowed-origin"),
        pytest.param([ORIGIN, b"Sec-Fetch-Site: cross-site"], id="allowed-origin-cross-site"),
        pytest.param([b"Sec-Fetch-Site: same-origin"], id="same-origin"),
        pytest.param([b"Sec-Fetch-Site: none"], id="typed-address"),
    ],
)
async def test_programs_and_allowed_pages_are_served(fields: list[bytes]) -> None:
    async with relayed(OK, listen=LISTEN) as (_, sidecar):
        answer = await chat(sidecar.url, *fields)

        assert answer.status == 200


async def test_own_origin_is_served() -> None:
    async with relayed(OK) as (upstream, sidecar):
        answer = await chat(sidecar.url, f"Origin: {sidecar.url}".encode())

        assert answer.status == 200
        assert upstream.only_request.values("origin") == []


async def test_allowed_origin_stays_here_and_cors_headers_are_the_sidecars_own() -> None:
    """Many gateways answer 403 to any Origin, and browsers refuse an answer with two allow-origin lines."""

    async def origin_hater(connection: Connection) -> None:
        while True:
            request = await connection.request()
            status = b"403 Forbidden" if request.values("origin") else b"200 OK"
            connection.write(
                ok(
                    b"{}",
                    b"Access-Control-Allow-Origin: *",
                    b"access-control-allow-credentials: true",
                    b"Access-Control-Expose-Headers: X-Theirs",
                    b"Vary: Accept-Encoding",
                    status=status,
                )
            )

    async with relayed(origin_hater, listen=LISTEN) as (upstream, sidecar):
        answer = await chat(sidecar.url, ORIGIN)
        program = await chat(sidecar.url)

        assert answer.status == 200
        assert upstream.requests[0].values("origin") == []
        assert answer.values("access-control-allow-origin") == [ALLOWED.encode()]
        assert answer.values("access-control-allow-credentials") == []
        assert len(answer.values("access-control-expose-headers")) == 1
        exposed = _members(answer, "access-control-expose-headers")
        assert exposed >= {
            "x-hermes-session-id",
            "x-claude-session-id",
            "x-hermes-session-key",
            "x-request-id",
            "x-hermes-sidecar-session",
            "x-hermes-sidecar-error",
        }
        assert _members(answer, "vary") == {"accept-encoding", "origin"}
        assert [name for name, _ in program.fields if name.lower().startswith(b"access-control-")] == []


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        pytest.param([b"X-Hermes-Session-Key: a", b"X-Hermes-Session-Key: b"], "invalid_session_key", id="session-key"),
        pytest.param([b"Expect: miracles"], "expectation_failed", id="expectation"),
        pytest.param([b"Authorization: Bearer wrong"], "client_token_required", id="token"),
        pytest.param([b"Authorization: Bearer client-token"], "upstream_protocol_error", id="gateway"),
    ],
)
async def test_errors_can_be_read_by_an_allowed_page(fields: list[bytes], code: str, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("client-token\n")
    listen = {**LISTEN, "tokens_file": str(tmp_path / "tokens")}
    if code in ("invalid_session_key", "expectation_failed"):
        fields = [*fields, b"Authorization: Bearer client-token"]

    async with relayed(b"SSH-2.0-OpenSSH\r\n", listen=listen) as (_, sidecar):
        answer = await chat(sidecar.url, ORIGIN, *fields)

        assert answer.value("x-hermes-sidecar-error") == code
        assert answer.values("access-control-allow-origin") == [ALLOWED.encode()]
        assert "x-hermes-sidecar-error" in _members(answer, "access-control-expose-headers")
        assert "origin" in _members(answer, "vary")


def _members(answer: Answer, name: str) -> set[str]:
    return {member.strip().lower() for value in answer.values(name) for member in value.decode().split(",")}
