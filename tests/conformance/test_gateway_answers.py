"""What the gateway answers is what the client gets: statuses, reasons, errors, redirects, and no second opinion."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.support.raw_client import CHAT, STREAMED_CHAT, ask, chat, raw_client
from tests.support.scripted_upstream import (
    LAST_CHUNK,
    STREAM_HEAD,
    Connection,
    answering,
    chunk,
    ok,
    scripted_upstream,
)
from tests.support.sidecars import relayed, running_sidecar

ERROR = b'{"error":{"message":"no","type":"t","code":"c"}}'


@pytest.mark.parametrize("status", [b"500 Internal Server Error", b"401 Unauthorized", b"403 Forbidden"])
@pytest.mark.parametrize("extra", [(), (b"WWW-Authenticate: Bearer",)], ids=["plain", "challenge"])
async def test_failure_of_a_family_passes_as_it_is(status: bytes, extra: tuple[bytes, ...]) -> None:
    async with relayed(answering(ok(b"[]"), ok(ERROR, *extra, status=status))) as (_, sidecar):
        async with raw_client(sidecar.url) as client:
            present = await client.ask("GET", "/api/skills")
            failing = await client.ask("GET", "/api/skills")

        assert present.status == 200
        assert (b"%d %b" % (failing.status, failing.reason), failing.body) == (status, ERROR)
        assert failing.values("x-hermes-sidecar-error") == []


@pytest.mark.parametrize(
    "status",
    [
        b"429 Slow Down Please",
        b"299 ",
        b"405 Method Not Allowed",
        b"501 Not Implemented",
        b"529 Overloaded",
        b"599 X",
        b"418 I'm a teapot",
        b"200 Na\xefve",
        b"404 Not  Found\t!",
    ],
)
async def test_status_and_reason_pass(status: bytes) -> None:
    async with relayed(ok(ERROR, b"Allow: POST", status=status)) as (_, sidecar):
        answer = await ask(sidecar.url, "GET", "/v1/models")

        assert b"%d %b" % (answer.status, answer.reason) == status
        assert (answer.body, answer.values("allow")) == (ERROR, [b"POST"])


async def test_status_line_without_a_reason_and_blank_is_understood() -> None:
    async with relayed(b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok") as (_, sidecar):
        answer = await ask(sidecar.url, "GET", "/v1/models")

        assert (answer.status, answer.reason, answer.body) == (200, b"", b"ok")


@pytest.mark.parametrize("interim", [b"100 Continue", b"102 Processing", b"103 Early Hints"])
async def test_final_answer_after_an_interim_one_arrives(interim: bytes) -> None:
    """Clients built on Python's http.client take a 103 for the answer, so the sidecar keeps it."""
    early = b"HTTP/1.1 %b\r\nLink: </x>; rel=preload\r\n\r\n" % interim

    async with relayed(early + early + ok(b"final")) as (_, sidecar), raw_client(sidecar.url) as client:
        answers = [await client.ask("POST", "/v1/chat/completions", body=CHAT) for _ in range(2)]

        assert [(answer.status, answer.body) for answer in answers] == [(200, b"final")] * 2
        assert [answer.values("link") for answer in answers] == [[], []]


@pytest.mark.parametrize(
    "status", [b"401 Unauthorized", b"413 Payload Too Large", b"429 Too Many", b"500 Oops", b"529 Overloaded"]
)
async def test_error_on_a_streaming_call_keeps_status_type_and_bytes(status: bytes) -> None:
    async with relayed(ok(ERROR, status=status)) as (_, sidecar):
        answer = await chat(sidecar.url, b"Accept: text/event-stream", body=STREAMED_CHAT)

        assert b"%d %b" % (answer.status, answer.reason) == status
        assert (answer.values("content-type"), answer.body) == ([b"application/json"], ERROR)


async def test_rate_limit_headers_pass_once_under_their_names() -> None:
    lines = [
        b"Retry-After: 17",
        b"x-ratelimit-limit-requests: 60",
        b"X-RateLimit-Reset: 1s",
        b"anthropic-ratelimit-tokens-remaining: 0",
        b"x-request-id: req_123",
    ]

    async with relayed(ok(ERROR, *lines, status=b"429 Too Many Requests")) as (_, sidecar):
        answer = await chat(sidecar.url)

        for line in lines:
            name, _, value = line.partition(b": ")
            assert [field for field in answer.fields if field[0].lower() == name.lower()] == [(name, value)]


@pytest.mark.parametrize(
    "status", [b"301 Moved Permanently", b"302 Found", b"303 See Other", b"307 Temporary Redirect", b"308 Permanent"]
)
async def test_redirect_is_passed_on_and_nobody_follows(status: bytes) -> None:
    async with scripted_upstream(ok()) as elsewhere:
        location = f"Location: {elsewhere.url}/login?next=/v1".encode()
        async with relayed(
            ok(b"", location, status=status), environ={"HERMES_SIDECAR_GATEWAY__TOKEN": "gateway-token"}
        ) as (upstream, sidecar):
            answer = await chat(sidecar.url)

            assert b"%d %b" % (answer.status, answer.reason) == status
            assert answer.values("location") == [location.removeprefix(b"Location: ")]
            assert upstream.only_request.body == CHAT
            assert elsewhere.connections == []


async def test_cookies_of_one_client_are_never_sent_for_another() -> None:
    """Cookie jars keep cookies for names only, so the gateway is configured by name."""
    async with (
        scripted_upstream(ok(b"{}", b"Set-Cookie: sid=secret; Path=/", b"Set-Cookie: b=2")) as upstream,
        running_sidecar("", gateway={"url": f"http://localhost:{upstream.port}"}) as sidecar,
        raw_client(sidecar.url) as client_a,
        raw_client(sidecar.url) as client_b,
    ):
        first = await client_a.ask("GET", "/v1/models")
        await client_b.ask("GET", "/v1/models")
        await client_a.ask("POST", "/v1/chat/completions", b"Cookie: own=1", body=CHAT)
        await client_b.ask("POST", "/v1/chat/completions", body=CHAT)

        assert first.values("set-cookie") == [b"sid=secret; Path=/", b"b=2"]
        assert [r.values("cookie") for r in upstream.requests] == [[], [], [b"own=1"], []]
        assert {tuple(r.values("host")) for r in upstream.requests} == {(f"localhost:{upstream.port}".encode(),)}


async def test_proxy_variables_and_netrc_are_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login u password p\n")
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)

    async with scripted_upstream(ok(b"proxy")) as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        async with relayed(ok(b"gateway")) as (upstream, sidecar):
            answer = await chat(sidecar.url)

            assert answer.body == b"gateway"
            assert upstream.only_request.values("authorization") == []
            assert proxy.connections == []


EVENT_ONE, EVENT_TWO = gzip.compress(b"data: one\n\n"), gzip.compress(b"data: two\n\n")


@pytest.mark.parametrize("asked", [[b"Accept-Encoding: gzip, deflate, br, zstd"], []], ids=["asked", "not-asked"])
async def test_gzip_answer_stays_compressed_and_labelled(asked: list[bytes]) -> None:
    packed = gzip.compress(b'{"a":1}' * 100)

    async with relayed(ok(packed, b"Content-Encoding: gzip")) as (upstream, sidecar):
        answer = await chat(sidecar.url, *asked)

        assert answer.body == packed
        assert answer.values("content-encoding") == [b"gzip"]
        assert answer.values("content-length") == [b"%d" % len(packed)]
        expected = [line.removeprefix(b"Accept-Encoding: ") for line in asked]
        assert upstream.only_request.values("accept-encoding") == expected


@pytest.mark.parametrize("asked", [[b"Accept-Encoding: gzip"], []], ids=["asked", "not-asked"])
async def test_gzip_stream_is_passed_event_by_event(asked: list[bytes]) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        connection.write(STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n"))
        connection.write(chunk(EVENT_ONE))

    async with relayed(script) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("POST", "/v1/chat/completions", *asked, body=STREAMED_CHAT))
        head = await client.head()
        assert head.values("content-encoding") == [b"gzip"]
        assert await client.exactly(len(chunk(EVENT_ONE))) == chunk(EVENT_ONE)

        upstream.connections[0].write(chunk(EVENT_TWO) + LAST_CHUNK)

        assert await client.exactly(len(chunk(EVENT_TWO) + LAST_CHUNK)) == chunk(EVENT_TWO) + LAST_CHUNK


async def test_plain_answer_is_not_compressed_because_the_browser_would_take_it() -> None:
    body = b'{"text":"%b"}' % (b"hello " * 10000)

    async with relayed(ok(body)) as (_, sidecar):
        answer = await chat(sidecar.url, b"Accept-Encoding: gzip, deflate, br, zstd")

        assert answer.body == body
        assert answer.values("content-encoding") == []
