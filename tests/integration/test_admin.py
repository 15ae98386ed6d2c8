"""The sidecar's own pages: on their exact paths beside the relay, or on a listener of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.raw_client import ask, chat
from tests.support.scripted_upstream import Connection, ScriptedUpstream, ok
from tests.support.sidecars import Sidecar, relayed

OWN = ("/capabilities", "/metrics", "/healthz", "/readyz", "/sidecar/")
LOOK_LIKE_OWN = (
    "/metrics/x",
    "/metrics/",
    "/Metrics",
    "//metrics",
    "/health",
    "/healthz/",
    "/capabilities/other",
    "/v1/capabilities",
    "/%63apabilities",
    "/sidecar",
    "/x/../metrics",
    "/",
)
ADMIN = {"host": "127.0.0.1", "port": 0}


async def named(connection: Connection) -> None:
    """A gateway that has a page of its own at every path."""
    while True:
        request = await connection.request(limit_s=60)
        connection.write(ok(b"the gateway's " + request.target))


@asynccontextmanager
async def apart(**listen: object) -> AsyncIterator[tuple[ScriptedUpstream, Sidecar, str]]:
    """A sidecar whose own pages have their own port, and that port's URL."""
    async with relayed(named, listen={"port": 0, **listen}, admin=ADMIN) as (upstream, sidecar):
        assert sidecar.running.admin_url is not None
        yield upstream, sidecar, sidecar.running.admin_url


async def is_the_gateways(url: str, path: str) -> bool:
    answer = await ask(url, "GET", path)
    return (answer.status, answer.body) == (200, b"the gateway's " + path.encode())


@pytest.mark.parametrize("path", LOOK_LIKE_OWN)
async def test_only_exact_paths_are_the_sidecars_own(path: str) -> None:
    async with relayed(named) as (_, sidecar):
        assert await is_the_gateways(sidecar.url, path)


@pytest.mark.parametrize("path", OWN)
async def test_own_pages_stand_beside_the_relay(path: str) -> None:
    async with relayed(named) as (upstream, sidecar):
        answer = await ask(sidecar.url, "GET", path + "?query=none-of-its-business")

    assert answer.status == 200
    assert upstream.requests == []


async def test_with_an_admin_listener_every_path_of_the_relay_is_the_gateways() -> None:
    async with apart() as (_, sidecar, _admin_url):
        for path in (*OWN, "/capabilities/events", "/sidecar/style.css", *LOOK_LIKE_OWN):
            assert await is_the_gateways(sidecar.url, path), path
        refresh = await ask(sidecar.url, "POST", "/capabilities/refresh")

    assert refresh.body == b"the gateway's /capabilities/refresh"


async def test_admin_listener_has_the_own_pages_and_clear_words_for_everything_else() -> None:
    async with apart() as (upstream, _, admin_url):
        for path in OWN:
            assert (await ask(admin_url, "GET", path)).status == 200, path
        assert (await ask(admin_url, "POST", "/capabilities/refresh")).status == 200
        elsewhere = [await ask(admin_url, "GET", path) for path in (*LOOK_LIKE_OWN, "/v1/models")]
        elsewhere.append(await chat(admin_url))

    assert upstream.requests == []
    for answer in elsewhere:
        error = answer.json()["error"]
        assert (answer.status, error["code"]) == (404, "capability_unavailable")
        assert answer.value("X-Hermes-Sidecar-Error") == "capability_unavailable"
        assert error["hint"]


async def test_metrics_of_the_admin_listener_are_those_of_the_relay() -> None:
    async with apart() as (_, sidecar, admin_url):
        await chat(sidecar.url)
        text = (await ask(admin_url, "GET", "/metrics")).body.decode()

    assert 'hermes_sidecar_requests_total{code="200",method="POST",route="chat_completions"} 1.0' in text


async def test_guard_stands_before_the_admin_listener_too() -> None:
    async with apart() as (_, _sidecar, admin_url):
        foreign_name = await ask(admin_url, "GET", "/metrics", b"X-Pad: 1", b"Origin: http://evil.example")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(admin_url.rsplit(":", 1)[1]))
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
        async with asyncio.timeout(5):
            rebound = await reader.read()
        writer.close()

    assert (foreign_name.status, foreign_name.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert rebound.startswith(b"HTTP/1.1 421 ")
    assert b"hermes_sidecar_" not in rebound


async def test_tokens_are_asked_for_on_the_admin_listener_too(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("the-token\n")
    tokens.chmod(0o600)
    async with apart(tokens_file=str(tokens)) as (_, _sidecar, admin_url):
        without = {path: (await ask(admin_url, "GET", path)).status for path in OWN}
        shown = await ask(admin_url, "GET", "/metrics", b"Authorization: Bearer the-token")

    assert without == {path: 200 if path == "/healthz" else 401 for path in OWN}
    assert shown.status == 200


async def test_readiness_on_the_admin_listener_tells_of_the_drain() -> None:
    go_on = asyncio.Event()

    async def slow(connection: Connection) -> None:
        await connection.request()
        await go_on.wait()
        connection.write(ok())

    async with relayed(slow, admin=ADMIN) as (upstream, sidecar):
        admin_url = sidecar.running.admin_url
        assert admin_url is not None
        running = asyncio.ensure_future(chat(sidecar.url))
        await (await upstream.connection()).asked()
        before = await ask(admin_url, "GET", "/readyz")
        drain = asyncio.ensure_future(sidecar.running.drain(5))
        await asyncio.sleep(0)
        ready, health = await ask(admin_url, "GET", "/readyz"), await ask(admin_url, "GET", "/healthz")
        refused = await chat(sidecar.url)
        go_on.set()
        await drain
        answer = await running

    assert (before.status, ready.status, health.status) == (200, 503, 200)
    assert ready.json()["error"]["code"] == "draining"
    assert json.loads(refused.body)["error"]["code"] == "draining"
    assert answer.status == 200
