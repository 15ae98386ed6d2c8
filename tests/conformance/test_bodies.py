"""Request bodies: the same bytes in the same framing, sent on while they come, whatever their size."""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path

import psutil
import pytest

from tests.support.raw_client import JSON, ask, raw_client
from tests.support.scripted_upstream import Connection, Script, left_to_the_test, ok, scripted_upstream
from tests.support.sidecar_process import SidecarProcess
from tests.support.sidecars import relayed

OK = ok()
CHAT_PATH = "/v1/chat/completions"
MB = 1_000_000


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"a":1,"a":2}', id="duplicate-keys"),
        pytest.param(b'{ "a" :\t1 ,\r\n\r\n "b":[ ] }\n', id="odd-spacing"),
        pytest.param(b'{"id":12345678901234567890,"x":1.0,"y":1e5}', id="large-number"),
        pytest.param(rb'{"a":"\u0000\u00e9\/"}', id="escapes"),
        pytest.param(b'{"a":NaN,"b":Infinity}', id="nan"),
        pytest.param(b'\xef\xbb\xbf{"a":1}', id="byte-order-mark"),
        pytest.param(b"no JSON at all", id="no-json"),
        pytest.param(b"\xff\xfe\x00\r\n\r\n0\r\n\r\n", id="binary"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", id="a-request"),
    ],
)
async def test_body_is_never_edited(body: bytes) -> None:
    async with relayed(OK) as (upstream, sidecar):
        answer = await ask(sidecar.url, "POST", CHAT_PATH, JSON, b"X-Hermes-Session-Key: k1", body=body)

        assert answer.status == 200
        assert upstream.only_request.wire_body == body
        assert upstream.only_request.values("content-length") == [b"%d" % len(body)]


@pytest.mark.parametrize("size", [900_000, 1_100_000, 8 * MB])
@pytest.mark.parametrize("chunked", [False, True], ids=["with-length", "chunked"])
async def test_large_body_arrives_in_its_own_framing(size: int, chunked: bool) -> None:
    body = random.Random(size).randbytes(size)

    async with relayed(OK) as (upstream, sidecar), raw_client(sidecar.url) as client:
        if chunked:
            wire_body = _in_chunks(body, 65_000)
            await client.send(_chunked_head(client.host) + wire_body)
        else:
            wire_body = body
            await client.send(client.request("POST", CHAT_PATH, body=body))
        answer = await client.answer()

        request = upstream.only_request
        assert answer.status == 200
        assert request.wire_body == wire_body
        assert request.body == body
        assert bool(request.values("transfer-encoding")) == chunked
        assert bool(request.values("content-length")) != chunked


@pytest.mark.parametrize("chunked", [False, True], ids=["with-length", "chunked"])
async def test_body_is_sent_on_while_it_comes(chunked: bool) -> None:
    async with relayed(left_to_the_test) as (upstream, sidecar), raw_client(sidecar.url) as client:
        head = _chunked_head(client.host) if chunked else client.request("POST", CHAT_PATH, b"Content-Length: 8")
        pieces = [b"4\r\nhalf\r\n", b"4\r\nrest\r\n0\r\n\r\n"] if chunked else [b"half", b"rest"]
        client.write(head)
        connection = await upstream.connection()
        await connection.head()
        for piece in pieces:
            client.write(piece)
            assert await connection.exactly(len(piece), limit_s=1) == piece


@pytest.mark.parametrize(
    ("sent", "framing_upstream"),
    [
        pytest.param(b"Content-Length: 5\r\n\r\nhello", (b"content-length", b"5"), id="length"),
        pytest.param(b"Content-Length: 0\r\n\r\n", (b"content-length", b"0"), id="length-zero"),
        pytest.param(b"content-length: 005\r\n\r\nhello", (b"content-length", b"5"), id="length-with-zeros"),
        pytest.param(
            b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            (b"transfer-encoding", b"chunked"),
            id="chunked",
        ),
        pytest.param(
            b"transfer-encoding: Chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", (b"transfer-encoding", b"chunked"), id="case"
        ),
        pytest.param(b"\r\n", None, id="neither"),
    ],
)
@pytest.mark.parametrize("method", [b"POST", b"PUT", b"PATCH", b"DELETE", b"GET", b"PROPFIND"])
async def test_framing_is_kept(method: bytes, sent: bytes, framing_upstream: tuple[bytes, bytes] | None) -> None:
    async with relayed(OK) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(b"%b /x HTTP/1.1\r\nHost: localhost\r\n%b" % (method, sent))
        answer = await client.answer()

        request = upstream.only_request
        assert (answer.status, request.method) == (200, method)
        framing = [(n.lower(), v) for n, v in request.fields if n.lower() in (b"content-length", b"transfer-encoding")]
        assert framing == ([framing_upstream] if framing_upstream else [])
        assert request.body == (b"hello" if b"hello" in sent else b"")


@pytest.mark.parametrize("expect", [b"Expect: 100-continue", b"expect: 100-Continue", b"EXPECT:  100-CONTINUE "])
@pytest.mark.parametrize("chunked", [False, True], ids=["with-length", "chunked"])
async def test_expectation_is_met_here_and_the_upstream_does_not_see_it(expect: bytes, chunked: bool) -> None:
    async with relayed(OK) as (upstream, sidecar), raw_client(sidecar.url) as client:
        framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 5"
        client.write(client.request("POST", CHAT_PATH, expect, framing))
        interim = await client.head()
        client.write(b"5\r\nhello\r\n0\r\n\r\n" if chunked else b"hello")
        answer = await client.answer()
        again = await client.ask("POST", CHAT_PATH, body=b"again")

        assert (interim.status, interim.fields) == (100, ())
        assert (answer.status, again.status) == (200, 200)
        assert [(r.body, r.values("expect")) for r in upstream.requests] == [(b"hello", []), (b"again", [])]


@pytest.mark.parametrize(
    "request_end",
    [
        pytest.param(b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\nhello", id="body-is-there"),
        pytest.param(b"Expect: 100-continue\r\nContent-Length: 0\r\n\r\n", id="empty-body"),
        pytest.param(b"Expect: 100-continue\r\n\r\n", id="no-body"),
    ],
)
async def test_nobody_is_told_to_continue_who_does_not_wait(request_end: bytes) -> None:
    async with relayed(OK) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(b"POST /x HTTP/1.1\r\nHost: localhost\r\n" + request_end)
        answer = await client.answer()

        assert answer.status == 200
        assert upstream.only_request.values("expect") == []


async def test_http_1_0_client_is_not_told_to_continue() -> None:
    """It would take the interim answer for the answer (RFC 9110, 10.1.1)."""
    async with relayed(OK) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(b"POST /x HTTP/1.0\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
        await upstream.connection()
        client.write(b"hello")
        answer = await client.answer()

        assert answer.status == 200
        assert upstream.only_request.body == b"hello"


@pytest.mark.parametrize("expect", [b"Expect: 200-ok", b"Expect: 100-continue, more", b"Expect: x\r\nExpect: y"])
async def test_unknown_expectation_is_refused(expect: bytes) -> None:
    async with relayed(OK) as (upstream, sidecar):
        answer = await ask(sidecar.url, "POST", CHAT_PATH, expect, body=b"hello")

        assert (answer.status, answer.reason) == (417, b"Expectation Failed")
        assert answer.value("x-hermes-sidecar-error") == "expectation_failed"
        assert upstream.connections == []


async def test_64_megabytes_pass_through_flat_memory(tmp_path: Path) -> None:
    block = random.Random(64).randbytes(MB)
    received = hashlib.sha256()

    async def script(connection: Connection) -> None:
        await connection.head()
        left = 64 * MB
        while left:
            piece = await connection.some()
            received.update(piece)
            left -= len(piece)
        connection.write(OK)

    async with (
        scripted_upstream(script, records=False) as upstream,
        await SidecarProcess.start(tmp_path, upstream.url) as sidecar,
        raw_client(sidecar.url) as client,
    ):
        process = psutil.Process(sidecar.pid)
        before = process.memory_info().rss
        most = before
        client.write(client.request("POST", CHAT_PATH, b"Content-Length: %d" % (64 * MB)))
        for _ in range(64):
            await client.send(block, limit_s=20)
            most = max(most, process.memory_info().rss)
        answer = await client.answer(limit_s=20)

        assert answer.status == 200
        assert received.digest() == hashlib.sha256(block * 64).digest()
        assert most - before < 12 * MB


async def _answers_at_once_and_drains(connection: Connection) -> None:
    await connection.head()
    connection.write(ok(b'{"error":"too large"}', status=b"413 Payload Too Large"))
    while True:
        await connection.some()


async def _answers_and_closes_after_a_moment(connection: Connection) -> None:
    await connection.head()
    connection.stop_reading()
    connection.write(ok(b'{"error":"too large"}', b"Connection: close", status=b"413 Payload Too Large"))
    await asyncio.sleep(0.1)
    connection.close()


async def _answers_and_resets_after_a_moment(connection: Connection) -> None:
    await connection.head()
    connection.stop_reading()
    connection.write(ok(b'{"error":"too large"}', b"Connection: close", status=b"413 Payload Too Large"))
    await asyncio.sleep(0.1)
    connection.reset()


REFUSALS = [_answers_at_once_and_drains, _answers_and_closes_after_a_moment, _answers_and_resets_after_a_moment]


@pytest.mark.parametrize("script", REFUSALS)
@pytest.mark.parametrize("chunked", [False, True], ids=["with-length", "chunked"])
async def test_refusal_in_the_middle_of_an_upload_reaches_a_client_that_sends_all_before_it_reads(
    script: Script, chunked: bool
) -> None:
    body = b"x" * (12 * MB)

    async with (
        relayed(script, records=False) as (upstream, sidecar),
        raw_client(sidecar.url, receive_buffer=4096) as client,
    ):
        client.stop_reading()
        if chunked:
            await client.send(_chunked_head(client.host))
            await client.send(_in_chunks(body, 100_000), limit_s=10)
        else:
            await client.send(client.request("POST", CHAT_PATH, body=body), limit_s=10)
        client.go_on_reading()
        answer = await client.answer()

        assert (answer.status, answer.body) == (413, b'{"error":"too large"}')
        assert len(upstream.connections) == 1


@pytest.mark.parametrize("script", REFUSALS)
async def test_refusal_in_the_middle_of_an_upload_is_seen_at_once(script: Script) -> None:
    async with relayed(script, records=False) as (_, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("POST", CHAT_PATH, b"Content-Length: %d" % (12 * MB)) + b"x" * 1000)
        answer = await client.answer(limit_s=1)

        assert (answer.status, answer.body) == (413, b'{"error":"too large"}')


async def test_rest_of_a_refused_upload_is_never_a_request() -> None:
    """The client sends on after the early answer: those bytes are its body, whatever they look like."""
    smuggled = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async with relayed(_answers_at_once_and_drains) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("POST", CHAT_PATH, b"Content-Length: 1000") + b"x" * 10)
        await client.answer()
        client.write(smuggled * 3)
        await client.ended(limit_s=2)

        assert client.unread == b""
        assert not any(
            b"/smuggled HTTP" in connection.received.split(b"\r\n\r\n")[0] for connection in upstream.connections
        )
        assert len(upstream.connections) == 1


async def test_success_before_the_upload_is_over_reaches_the_client() -> None:
    async def eager(connection: Connection) -> None:
        await connection.head()
        connection.write(ok(b"done"))

    async with relayed(eager) as (_, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("POST", CHAT_PATH, b"Content-Length: 100000") + b"x" * 10)
        answer = await client.answer(limit_s=1)

        assert (answer.status, answer.body) == (200, b"done")


async def test_stream_that_begins_before_the_upload_is_over_goes_both_ways() -> None:
    """An echo: each piece is answered before the next is sent."""

    async def echo(connection: Connection) -> None:
        await connection.head()
        connection.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(5):
            piece = await connection.exactly(4)
            connection.write(b"4\r\n" + piece + b"\r\n")
        connection.write(b"0\r\n\r\n")

    async with relayed(echo) as (_, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("POST", CHAT_PATH, b"Content-Length: 20"))
        assert (await client.head(limit_s=1)).status == 200
        for number in range(5):
            client.write(b"pc%02d" % number)
            assert await client.exactly(9, limit_s=1) == b"4\r\npc%02d\r\n" % number
        assert await client.exactly(5, limit_s=1) == b"0\r\n\r\n"


def _chunked_head(host: str) -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: %b\r\nTransfer-Encoding: chunked\r\n\r\n" % (CHAT_PATH.encode(), host.encode())


def _in_chunks(body: bytes, size: int) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
