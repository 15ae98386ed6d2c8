"""DNS rebinding: a name that is not the sidecar's is refused on every path, before anything goes upstream."""

from __future__ import annotations

import pytest

from tests.support.raw_client import CHAT, ask, raw_client
from tests.support.scripted_upstream import ok
from tests.support.sidecars import relayed

OK = ok()
PATHS = ["/v1/models", "/capabilities", "/metrics", "/healthz", "/readyz", "/sidecar/", "/api/sessions", "/health", "/"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("with_origin", [False, True], ids=["host-alone", "with-equal-origin"])
async def test_foreign_host_is_refused_on_every_path(path: str, with_origin: bool) -> None:
    async with relayed(OK) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.host = f"evil.example:{sidecar.port}"
        fields = [f"Origin: http://{client.host}".encode()] if with_origin else []

        answer = await client.ask("GET", path, *fields)

        assert (answer.status, answer.reason) == (421, b"Misdirected Request")
        assert answer.value("x-hermes-sidecar-error") == "host_not_allowed"
        assert answer.json()["error"]["code"] == "host_not_allowed"
        assert b"evil" not in answer.body
        assert answer.values("access-control-allow-origin") == []
        assert upstream.connections == []


async def test_foreign_host_is_refused_for_a_chat() -> None:
    async with relayed(OK) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.host = f"evil.example:{sidecar.port}"

        answer = await client.ask("POST", "/v1/chat/completions", body=CHAT)

        assert answer.status == 421
        assert upstream.connections == []


@pytest.mark.parametrize(
    "host",
    [
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example#localhost",
        "evil.example@127.0.0.1",
        "127.0.0.1@evil.example",
        "localhost,evil.example",
        "localhost evil.example",
        "127.0.0.1:1:2",
        "127.0.0.1:port",
        "[::1",
        "[::1].evil.example",
        "[::2]",
        "0.0.0.0",
        "127.0.0.2",
        "127.1",
        "2130706433",
        "",
    ],
)
async def test_name_that_only_resembles_an_own_one_is_refused(host: str) -> None:
    async with relayed(OK) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.host = host

        answer = await client.ask("GET", "/v1/models")

        assert answer.status in (400, 421)
        assert answer.value("x-hermes-sidecar-error") in ("host_not_allowed", "invalid_request")
        assert upstream.connections == []


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost",
        "localhost:1",
        "127.0.0.1",
        "127.0.0.1:65535",
        "[::1]",
        "[::1]:99",
        "sidecar.example",
        "SIDECAR.example:443",
    ],
)
async def test_own_name_passes_in_any_case_and_with_any_port(host: str) -> None:
    """The gateway, which trusts loopback names only, is told its own name; the client's goes into X-Forwarded-Host."""
    async with (
        relayed(OK, listen={"allowed_hosts": ["sidecar.example"]}) as (upstream, sidecar),
        raw_client(sidecar.url) as client,
    ):
        client.host = host

        answer = await client.ask("GET", "/v1/models")

        assert answer.status == 200
        assert upstream.only_request.values("host") == [f"127.0.0.1:{upstream.port}".encode()]
        assert upstream.only_request.values("x-forwarded-host") == [host.encode()]


async def test_refused_host_leaves_the_connection_usable() -> None:
    async with relayed(OK) as (upstream, sidecar), raw_client(sidecar.url) as client:
        own, client.host = client.host, "evil.example"
        refused = await client.ask("GET", "/v1/models")
        client.host = own
        served = await client.ask("GET", "/v1/models")

        assert (refused.status, served.status) == (421, 200)
        assert len(upstream.requests) == 1


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"GET /v1/models HTTP/1.1\r\n\r\n", id="no-host"),
        pytest.param(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", id="twice"),
        pytest.param(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nhost: evil.example\r\n\r\n", id="two-names"),
        pytest.param(b"GET /v1/models HTTP/1.0\r\n\r\n", id="http-1.0-without-host"),
        pytest.param(b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n", id="foreign-absolute-target"),
        pytest.param(b"GET http://localhost/ HTTP/1.1\r\nHost: evil.example\r\n\r\n", id="foreign-host-beside-it"),
        pytest.param(b"GET http://localhost@evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n", id="user-in-target"),
        pytest.param(b"CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\n\r\n", id="connect"),
    ],
)
async def test_missing_or_ambiguous_host_is_refused(head: bytes) -> None:
    async with relayed(OK) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(head)
        answer = await client.answer()

        assert answer.status in (400, 421)
        assert upstream.connections == []


async def test_allowed_host_is_no_pattern() -> None:
    async with relayed(OK, listen={"allowed_hosts": ["sidecar.example"]}) as (_, sidecar):
        statuses = []
        for host in ("sidecarxexample", "a.sidecar.example", "sidecar.example.org"):
            async with raw_client(sidecar.url) as client:
                client.host = host
                statuses.append((await client.ask("GET", "/v1/models")).status)

        assert statuses == [421, 421, 421]
        assert (await ask(sidecar.url, "GET", "/v1/models")).status == 200
