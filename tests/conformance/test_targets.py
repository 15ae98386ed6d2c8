"""Request targets: the client's bytes, behind the prefix of gateway.url; and the few paths that are own ones."""

from __future__ import annotations

import pytest

from sidecar.config import ConfigFaults, from_mapping
from tests.support.raw_client import CHAT, ask, raw_client
from tests.support.scripted_upstream import Connection, ok, scripted_upstream
from tests.support.sidecars import relayed, running_sidecar

OK = ok()

TARGETS = [
    b"/v1/x/a%2Fb%3Ac%27d?x=%41&y=a+b&z=%2F&e=&e",
    b"/v1/models?q=100%&r=%zz",
    b"/v1/models?",
    b"/v1/models??a=?b",
    b"/a//b",
    b"//a/b",
    b"/a;p=1",
    b"/%E4%BC%9A",
    b"/%e4%bc%9a",
    b"/a/../b/./c",
    b"/a/%2e%2e/b",
    b"/caf\xe9?\xff",
    b"/v1/v1/models",
    b"/?",
    b"/",
    b'/a|b^c`d{e}"<>\\',
    b"/a#fragment",
    b"/" + b"x" * 20_000,
]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target[:24].decode("latin-1"))
async def test_target_arrives_byte_for_byte(target: bytes) -> None:
    async with relayed(OK) as (upstream, sidecar):
        answer = await ask(sidecar.url, "GET", target)

        assert answer.status == 200
        assert upstream.only_request.start_line == b"GET " + target + b" HTTP/1.1"


@pytest.mark.parametrize(
    ("suffix", "prefix"),
    [
        pytest.param("", b"", id="plain"),
        pytest.param("/", b"", id="slash"),
        pytest.param("/v1", b"", id="v1"),
        pytest.param("/v1/", b"", id="v1-slash"),
        pytest.param("/api/v1", b"/api", id="prefix"),
        pytest.param("/api/v1/", b"/api", id="prefix-slash"),
    ],
)
async def test_every_spelling_of_the_base_url_leads_to_the_same_place(suffix: str, prefix: bytes) -> None:
    async with scripted_upstream(OK) as upstream, running_sidecar(upstream.url + suffix) as sidecar:
        await ask(sidecar.url, "POST", "/v1/chat/completions?a=%2F", body=CHAT)
        await ask(sidecar.url, "GET", "/v1/models")

        targets = [request.target for request in upstream.requests]
        assert targets == [prefix + b"/v1/chat/completions?a=%2F", prefix + b"/v1/models"]


@pytest.mark.parametrize("suffix", ["?a=b", "/v1?a=b", "#part", "/v1#part"])
def test_query_and_fragment_in_the_base_url_are_configuration_faults(suffix: str) -> None:
    with pytest.raises(ConfigFaults, match=r"gateway\.url"):
        from_mapping({"gateway": {"url": "http://127.0.0.1:8642" + suffix}})


@pytest.mark.parametrize(
    ("target", "arrives"),
    [
        pytest.param(b"http://localhost/v1/models?a=%41", b"/v1/models?a=%41", id="path-and-query"),
        pytest.param(b"HTTP://127.0.0.1:8650/v1/models", b"/v1/models", id="port-and-case"),
        pytest.param(b"https://localhost/x", b"/x", id="https"),
        pytest.param(b"http://localhost", b"/", id="no-path"),
        pytest.param(b"http://localhost?a", b"/?a", id="query-only"),
    ],
)
async def test_absolute_target_goes_upstream_in_origin_form(target: bytes, arrives: bytes) -> None:
    async with relayed(OK) as (upstream, sidecar):
        answer = await ask(sidecar.url, "GET", target)

        assert answer.status == 200
        assert upstream.only_request.target == arrives
        assert upstream.only_request.values("host") == [f"127.0.0.1:{upstream.port}".encode()]


@pytest.mark.parametrize("suffix", ["", "/api"])
async def test_options_asterisk_stays_an_asterisk(suffix: str) -> None:
    async with scripted_upstream(OK) as upstream, running_sidecar(upstream.url + suffix) as sidecar:
        answer = await ask(sidecar.url, "OPTIONS", "*")

        assert answer.status == 200
        assert upstream.only_request.start_line == b"OPTIONS * HTTP/1.1"


@pytest.mark.parametrize("method", ["PATCH", "PURGE", "M-SEARCH", "get", "BREW", "QUERY"])
async def test_method_arrives_as_it_was_spelled(method: str) -> None:
    async with relayed(OK) as (upstream, sidecar):
        answer = await ask(sidecar.url, method, "/v1/models")

        assert answer.status == 200
        assert upstream.only_request.method == method.encode()


@pytest.mark.parametrize(
    "path",
    [
        "/health",
        "/metrics/x",
        "/metrics/",
        "/capabilities/other",
        "/capabilities/",
        "/v1/capabilities",
        "/%63apabilities",
        "/Capabilities",
        "/capabilities;x",
        "//capabilities",
        "/./capabilities",
        "/sidecar",
        "/sidecars/",
        "/healthz/",
        "/",
        "/index.html",
        "/favicon.ico",
    ],
)
async def test_path_that_only_resembles_an_own_one_is_the_gateways(path: str) -> None:
    async def tells_its_target(connection: Connection) -> None:
        while True:
            connection.write(ok((await connection.request()).target))

    async with relayed(tells_its_target) as (_, sidecar):
        answer = await ask(sidecar.url, "GET", path + "?a=b")

        assert (answer.status, answer.body) == (200, f"{path}?a=b".encode())


@pytest.mark.parametrize("path", ["/healthz", "/healthz?x=1", "/readyz", "/sidecar/", "http://localhost/healthz"])
async def test_own_path_is_never_the_gateways(path: str) -> None:
    async with relayed(ok(b"gateway")) as (upstream, sidecar):
        answer = await ask(sidecar.url, "GET", path)

        assert answer.body != b"gateway"
        assert upstream.requests == []


async def test_health_is_answered_while_the_gateway_is_silent() -> None:
    async def silent(connection: Connection) -> None:
        await connection.request()

    async with relayed(silent) as (_, sidecar), raw_client(sidecar.url) as waiting:
        waiting.write(waiting.request("POST", "/v1/chat/completions", body=CHAT))

        assert (await ask(sidecar.url, "GET", "/healthz", limit_s=1)).status == 200
