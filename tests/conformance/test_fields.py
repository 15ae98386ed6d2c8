"""Header fields: all of them cross as they were written, but for those of one hop; nothing is invented."""

from __future__ import annotations

import pytest

from tests.support.raw_client import CHAT, ask, chat, grouped, raw_client
from tests.support.raw_http import Answer
from tests.support.scripted_upstream import Connection, Received, ok
from tests.support.sidecars import relayed

OK = ok()
SIDECARS_OWN = {b"via", b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"x-request-id"}
ANSWERS_OWN = {b"x-request-id", b"x-hermes-sidecar-session"}


def _crossed(request: Received) -> dict[bytes, list[tuple[bytes, bytes]]]:
    """The fields at the upstream by name, without Host and what the sidecar adds."""
    return {name: f for name, f in grouped(request.fields).items() if name not in SIDECARS_OWN | {b"host"}}


async def test_bare_request_gets_no_field_that_nobody_sent() -> None:
    async with relayed(OK) as (upstream, sidecar), raw_client(sidecar.url) as client:
        answer = await client.ask("POST", "/v1/chat/completions", body=CHAT)

        request = upstream.only_request
        assert answer.status == 200
        assert request.start_line == b"POST /v1/chat/completions HTTP/1.1"
        made = request.values("x-request-id")
        assert len(made) == 1
        assert made[0]
        assert dict(request.fields) == {
            b"Host": f"127.0.0.1:{upstream.port}".encode(),
            b"Content-Length": b"%d" % len(CHAT),
            b"X-Forwarded-For": b"127.0.0.1",
            b"X-Forwarded-Proto": b"http",
            b"X-Forwarded-Host": client.host.encode(),
            b"Via": b"1.1 hermes-sidecar",
            b"X-Request-Id": made[0],
        }
        assert len(request.fields) == 7


async def test_request_fields_cross_byte_for_byte() -> None:
    sent = [
        b"user-agent: OpenAI/JS 4.0  (x; y)",
        b"ACCEPT-Encoding:gzip,br",
        b"X-Latin: caf\xe9",
        b"X-Utf8: \xe4\xbc\x9a",
        b"X-Empty:",
        b"X-Blanks: \t a \t b \t ",
        b"X-Colon: a:b: c",
        b'X-Quoted: "a, b\\""',
        b"content-type: application/json; charset=UTF-8",
        b"X-Request-Id: mine-1",
    ]

    async with relayed(OK) as (upstream, sidecar):
        answer = await _chat_with(sidecar.url, *sent)

        assert answer.status == 200
        assert answer.values("x-request-id") == [b"mine-1"]
        request = upstream.only_request
        expected = {line.partition(b":")[0].lower(): [_field(line)] for line in sent}
        crossed = grouped([(name, value) for name, value in request.fields if name.lower() in expected])
        assert crossed == expected
        assert request.names == expected.keys() | SIDECARS_OWN | {b"host", b"content-length"}


async def test_answer_fields_cross_byte_for_byte_and_none_is_invented() -> None:
    lines = [
        b"server: uvicorn",
        b"DATE: Mon, 30 Nov 2026 10:00:00 GMT",
        b"X-Latin: caf\xe9 \xff",
        b"X-Empty:",
        b"x-lower: 1",
        b"Vary: Accept",
        b'ETag: W/"a,b"',
    ]
    head = b"HTTP/1.1 200 OK\r\n" + b"".join(line + b"\r\n" for line in lines)

    async with relayed(head + b"Content-Length: 2\r\n\r\nok") as (_, sidecar):
        answer = await chat(sidecar.url)

        expected = {line.partition(b":")[0].lower(): [_field(line)] for line in lines}
        expected[b"content-length"] = [(b"Content-Length", b"2")]
        crossed = grouped(answer.fields)
        assert {name: fields for name, fields in crossed.items() if name not in ANSWERS_OWN} == expected


async def test_answer_without_date_server_and_type_gets_none() -> None:
    async with relayed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") as (_, sidecar):
        answer = await chat(sidecar.url)

        assert {name.lower() for name, _ in answer.fields} == {b"content-length"} | ANSWERS_OWN


async def test_repeated_request_fields_all_reach_the_upstream_in_their_order() -> None:
    sent = [b"Cookie: a=1", b"X-A: 1", b"cookie: b=2", b"X-A: 3", b"x-a: 2", b"COOKIE: a=1", b"X-A: 1"]

    async with relayed(OK) as (upstream, sidecar):
        await ask(sidecar.url, "GET", "/v1/models", *sent)

        assert _crossed(upstream.only_request) == grouped([_field(line) for line in sent])


async def test_repeated_answer_fields_all_reach_the_client_in_their_order() -> None:
    lines = [
        b"Set-Cookie: a=1; Path=/",
        b"WWW-Authenticate: Bearer",
        b"set-cookie: b=2",
        b"Link: </a>; rel=x, </b>",
        b"Set-Cookie: a=1; Path=/",
        b'WWW-Authenticate: Basic realm="x"',
        b"Link: </c>",
    ]

    async with relayed(ok(b"{}", *lines)) as (_, sidecar):
        answer = await chat(sidecar.url)

        crossed = grouped([f for f in answer.fields if f[0].lower() in (b"set-cookie", b"www-authenticate", b"link")])
        assert crossed == grouped([_field(line) for line in lines])


async def test_hop_by_hop_fields_of_a_request_stay_here() -> None:
    sent = [
        b"TE: trailers, deflate",
        b"Keep-Alive: timeout=5",
        b"Proxy-Connection: keep-alive",
        b"Proxy-Authorization: Basic eDp5",
        b"Connection: keep-alive, X-Foo",
        b"connection: x-BAR",
        b"X-Foo: 1",
        b"X-Bar: 2",
        b"x-foo: 3",
        b"Trailer: X-T",
        b"X-Stays: 4",
        b"Upgrade: h2c",
        b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA",
    ]

    async with relayed(OK) as (upstream, sidecar):
        answer = await ask(sidecar.url, "GET", "/v1/models", *sent, b"Connection: Upgrade, HTTP2-Settings")

        assert answer.status == 200
        assert _crossed(upstream.only_request) == {b"x-stays": [(b"X-Stays", b"4")]}


async def test_hop_by_hop_fields_of_an_answer_stay_here() -> None:
    lines = [
        b"Keep-Alive: timeout=5",
        b"Connection: keep-alive, X-Foo",
        b"X-Foo: 1",
        b"Trailer: X-T",
        b"Proxy-Authenticate: Basic",
        b"Upgrade: h2c",
        b"Transfer-Encoding: chunked",
        b"Date: Mon, 30 Nov 2026 10:00:00 GMT",
        b"Server: theirs",
        b"X-Stays: 1",
    ]
    head = b"HTTP/1.1 200 OK\r\n" + b"".join(line + b"\r\n" for line in lines)

    async with relayed(head + b"\r\n2\r\nok\r\n0\r\nX-T: t\r\n\r\n") as (_, sidecar), raw_client(sidecar.url) as client:
        answer = await client.ask("GET", "/v1/models")
        again = await client.ask("GET", "/v1/models")

        assert (answer.body, answer.wire_body, again.body) == (b"ok", b"2\r\nok\r\n0\r\n\r\n", b"ok")
        crossed = {name: fields for name, fields in grouped(answer.fields).items() if name not in ANSWERS_OWN}
        assert crossed == {
            b"transfer-encoding": [(b"Transfer-Encoding", b"chunked")],
            b"date": [(b"Date", b"Mon, 30 Nov 2026 10:00:00 GMT")],
            b"server": [(b"Server", b"theirs")],
            b"x-stays": [(b"X-Stays", b"1")],
        }


@pytest.mark.parametrize(
    "nominated", [b"Content-Length", b"host", b"Transfer-Encoding", b"X-Hermes-Session-Id", b"X-Hermes-Session-Key"]
)
async def test_naming_a_vital_field_in_connection_does_not_break_the_request(nominated: bytes) -> None:
    """Whatever a client declares hop-by-hop, the upstream sees one Host, one framing, one session id."""
    fields = [b"Connection: close, " + nominated, b"X-Hermes-Session-Key: k1"]

    async with relayed(OK) as (upstream, sidecar):
        answer = await chat(sidecar.url, *fields)

        request = upstream.only_request
        assert (answer.status, request.body) == (200, CHAT)
        assert request.values("host") == [f"127.0.0.1:{upstream.port}".encode()]
        assert request.values("content-length") == [b"%d" % len(CHAT)]
        assert request.values("transfer-encoding") == []
        assert request.values("x-hermes-session-id") == [b"k1"]
        assert request.values("connection") == []


@pytest.mark.parametrize("nominated", [b"Cookie", b"cookie", b"X-Other, cOOKIE"])
async def test_named_cookie_stays_here(nominated: bytes) -> None:
    async with relayed(OK) as (upstream, sidecar):
        await chat(sidecar.url, b"Connection: " + nominated, b"Cookie: a=1", b"Cookie: b=2")

        assert upstream.only_request.values("cookie") == []


async def test_forwarding_fields_continue_what_proxies_before_wrote() -> None:
    sent = [
        b"X-Forwarded-For: 203.0.113.7",
        b"X-Forwarded-Proto: https",
        b"X-Forwarded-Host: chat.example",
        b"Via: 1.1 edge",
    ]

    async with relayed(OK) as (upstream, sidecar):
        await chat(sidecar.url, *sent)

        request = upstream.only_request
        assert request.values("x-forwarded-for") == [b"203.0.113.7, 127.0.0.1"]
        assert request.values("x-forwarded-proto") == [b"https"]
        assert request.values("x-forwarded-host") == [b"chat.example"]
        assert b", ".join(request.values("via")) == b"1.1 edge, 1.1 hermes-sidecar"


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param([b"Cookie: " + b"c" * 9_000], id="cookie-of-9-kb"),
        pytest.param([b"Cookie: " + b"c" * 20_000], id="cookie-of-20-kb"),
        pytest.param([b"Authorization: Bearer " + b"t" * 9_000], id="token-of-9-kb"),
        pytest.param([b"X-Number-%d: %d" % (number, number) for number in range(800)], id="800-fields"),
        pytest.param([b"Cookie: a=%d" % number for number in range(500)], id="500-cookie-lines"),
    ],
)
async def test_large_header_block_passes(fields: list[bytes]) -> None:
    async with relayed(OK) as (upstream, sidecar):
        answer = await _chat_with(sidecar.url, *fields)

        assert answer.status == 200
        crossed = _crossed(upstream.only_request)
        assert {name: crossed[name] for name in crossed if name != b"content-length"} == grouped(
            [_field(line) for line in fields]
        )


def _padded(head: bytes, size: int) -> bytes:
    """`head` with one long field more, so that the whole block has `size` bytes."""
    start = head + b"X-Secret: "
    return start + b"s" * (size - len(start) - 4) + b"\r\n\r\n"


async def test_request_head_of_64_kib_passes() -> None:
    async with relayed(OK) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(_padded(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n", 65536))
        answer = await client.answer()

        assert answer.status == 200
        assert len(upstream.only_request.values("x-secret")[0]) > 65_000


@pytest.mark.parametrize("size", [66_600, 100_000, 1_000_000])
@pytest.mark.parametrize("is_complete", [True, False], ids=["complete", "without-end"])
async def test_request_head_beyond_64_kib_is_refused_without_echo(size: int, is_complete: bool) -> None:
    async with relayed(OK) as (upstream, sidecar), raw_client(sidecar.url) as client:
        head = _padded(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n", size)
        client.write(head if is_complete else head[:-4])
        answer = await client.answer()

        assert (answer.status, answer.reason) == (431, b"Request Header Fields Too Large")
        assert answer.value("x-hermes-sidecar-error") == "header_too_large"
        assert answer.json()["error"]["code"] == "header_too_large"
        assert b"sss" not in answer.body
        assert answer.value("connection") == "close"
        assert await client.to_end() == b""
        assert upstream.connections == []


async def test_answer_head_of_64_kib_passes() -> None:
    head = _padded(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n", 65536)

    async with relayed(head + b"ok") as (_, sidecar):
        answer = await chat(sidecar.url)

        assert (answer.status, answer.body) == (200, b"ok")
        assert len(answer.values("x-secret")[0]) > 65_000


async def test_own_date_and_length_of_a_fault_stand_there_once() -> None:
    async def broken(connection: Connection) -> None:
        await connection.request()
        connection.close()

    async with relayed(broken) as (_, sidecar):
        answer = await chat(sidecar.url)

        assert answer.status == 502
        names = [name.lower() for name, _ in answer.fields]
        assert sorted(names) == sorted(set(names))
        assert {b"date", b"content-length", b"content-type"} <= set(names)


async def _chat_with(url: str, *fields: bytes) -> Answer:
    """A chat with no other fields than these."""
    return await ask(url, "POST", "/v1/chat/completions", *fields, body=CHAT)


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name, value.strip(b" \t")
