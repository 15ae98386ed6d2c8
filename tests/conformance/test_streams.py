"""Streams: the client gets the upstream's bytes, each piece as it comes, and nothing in between."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.raw_client import STREAMED_CHAT, RawClient, raw_client
from tests.support.scripted_upstream import LAST_CHUNK, STREAM_HEAD, Connection, chunk, left_to_the_test, ok
from tests.support.sidecars import relayed

CHAT_PATH = "/v1/chat/completions"

NAMED = b'event: hermes.tool.progress\ndata: {"tool":"todo"}\n\n'
STREAMS = [
    pytest.param([b'data: {"a":1}\n\n', NAMED, b"id: 7\nretry: 3000\ndata: x\n\n", b"data: [DONE]\n\n"], id="named"),
    pytest.param([b": keep-alive\n\n", b"data: x\n\n", b"\n", b":\n\n"], id="comments"),
    pytest.param([b"data: a\r", b"\n\r\n", b'data:{"b":1}\r\n\r', b"\n"], id="cut-crlf"),
    pytest.param([b"data: a\rdata: b\r\r", b'data:{"no":"blank"}\n\n'], id="cr-alone"),
    pytest.param([bytes([byte]) for byte in "data: 会议 🦦 é\n\n".encode()], id="one-byte-a-chunk"),
    pytest.param([b"data: \xff\xfe", b"\xc3", b"\x28\n\n", b"\x00\x01"], id="invalid-utf-8"),
    pytest.param([b"\xef\xbb\xbfdata: bom\n\n"], id="byte-order-mark"),
    pytest.param([b"0\r\n\r\n", b"5\r\nhello\r\n", b"HTTP/1.1 200 OK\r\n\r\n"], id="looks-like-framing"),
    pytest.param([b"data: x\n\n"], id="no-done"),
    pytest.param([b'{"x":1}\n', b'{"y":2}\n'], id="ndjson"),
]


async def _begun(client: RawClient) -> None:
    client.write(client.request("POST", CHAT_PATH, body=STREAMED_CHAT))


@pytest.mark.parametrize("pieces", STREAMS)
async def test_stream_arrives_byte_for_byte_in_the_upstreams_chunks(pieces: list[bytes]) -> None:
    """One piece is written only when the one before it has arrived: nothing waits for company."""
    async with relayed(left_to_the_test) as (upstream, sidecar), raw_client(sidecar.url) as client:
        await _begun(client)
        connection = await upstream.connection()
        await connection.request()
        connection.write(STREAM_HEAD)
        head = await client.head(limit_s=1)
        for piece in pieces:
            connection.write(chunk(piece))
            assert await client.exactly(len(chunk(piece)), limit_s=1) == chunk(piece)
        connection.write(LAST_CHUNK)
        assert await client.exactly(len(LAST_CHUNK), limit_s=1) == LAST_CHUNK

        assert head.values("content-type") == [b"text/event-stream"]
        assert head.values("transfer-encoding") == [b"chunked"]
        assert head.values("content-encoding") == head.values("content-length") == []
        (line,) = await sidecar.ended_exchanges()
        assert line["outcome"] == "complete"


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(STREAM_HEAD, id="event-stream"),
        pytest.param(STREAM_HEAD.replace(b"text/event-stream", b"application/x-ndjson"), id="ndjson"),
        pytest.param(STREAM_HEAD.replace(b"text/event-stream", b"x/unknown"), id="unknown-type"),
        pytest.param(STREAM_HEAD.replace(b"Content-Type: text/event-stream\r\n", b""), id="no-type"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 1200\r\n\r\n", id="known-length"),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n", id="until-close"),
        pytest.param(b"HTTP/1.0 200 OK\r\n\r\n", id="http-1.0-upstream"),
    ],
)
async def test_small_events_arrive_one_by_one(head: bytes) -> None:
    events = [b"data: event number %05d......\n\n" % number for number in range(20)]
    is_chunked = b"chunked" in head

    async with relayed(left_to_the_test) as (upstream, sidecar), raw_client(sidecar.url) as client:
        await _begun(client)
        connection = await upstream.connection()
        await connection.request()
        connection.write(head)
        await client.head(limit_s=1)
        for event in events:
            piece = chunk(event) if is_chunked else event
            connection.write(piece)
            assert await client.exactly(len(piece), limit_s=0.5) == piece
            assert client.unread == b""


async def test_head_arrives_before_any_event() -> None:
    async def head_only(connection: Connection) -> None:
        await connection.request()
        connection.write(STREAM_HEAD)

    async with relayed(head_only) as (_, sidecar), raw_client(sidecar.url) as client:
        await _begun(client)
        head = await client.head(limit_s=1)

        assert (head.status, head.values("content-type")) == (200, [b"text/event-stream"])


@pytest.mark.parametrize("idle_timeout_s", [0, 0.6])
async def test_silence_is_not_filled(idle_timeout_s: float) -> None:
    """No ping of the sidecar's own, before the first event, between two, and before the end."""
    event = b"data: x\n\n"

    async def slow(connection: Connection) -> None:
        await connection.request()
        connection.write(STREAM_HEAD)
        for piece in (chunk(event), chunk(event), LAST_CHUNK):
            await asyncio.sleep(0.3)
            connection.write(piece)

    async with (
        relayed(slow, gateway={"idle_timeout_s": idle_timeout_s}) as (_, sidecar),
        raw_client(sidecar.url) as client,
    ):
        await _begun(client)
        answer = await client.answer()

        assert answer.wire_body == chunk(event) * 2 + LAST_CHUNK


async def test_stream_may_last_longer_than_any_limit_as_long_as_it_speaks() -> None:
    events = 10

    async def long(connection: Connection) -> None:
        await connection.request()
        connection.write(STREAM_HEAD)
        for number in range(events):
            await asyncio.sleep(0.1)
            connection.write(chunk(b"data: %d\n\n" % number))
        connection.write(LAST_CHUNK)

    async with (
        relayed(long, gateway={"idle_timeout_s": 0.4, "connect_timeout_s": 0.2}) as (_, sidecar),
        raw_client(sidecar.url) as client,
    ):
        await _begun(client)
        answer = await client.answer()

        assert answer.body == b"".join(b"data: %d\n\n" % number for number in range(events))


async def test_long_silence_is_survived_where_no_limit_is_set() -> None:
    """In an answer and before it, far beyond the connect timeout."""

    async def thinks(connection: Connection) -> None:
        await connection.request()
        await asyncio.sleep(0.8)
        connection.write(STREAM_HEAD + chunk(b"one"))
        await asyncio.sleep(0.8)
        connection.write(chunk(b"two") + LAST_CHUNK)

    async with relayed(thinks, gateway={"connect_timeout_s": 0.2}) as (_, sidecar), raw_client(sidecar.url) as client:
        await _begun(client)
        answer = await client.answer()

        assert (answer.status, answer.body) == (200, b"onetwo")


@pytest.mark.parametrize("in_one_chunk", [True, False], ids=["one-chunk", "chunks-of-8-kb"])
async def test_line_of_five_megabytes_arrives_between_ordinary_events(in_one_chunk: bool) -> None:
    line = b"data: " + bytes(range(33, 123)) * 55_000 + b"\n\n"
    before, after = chunk(b"data: before\n\n"), chunk(b"data: after\n\n")
    size = len(line) if in_one_chunk else 8192
    large = b"".join(chunk(line[start : start + size]) for start in range(0, len(line), size))

    async with relayed(STREAM_HEAD + before + large + after + LAST_CHUNK) as (_, sidecar):
        async with raw_client(sidecar.url) as client:
            await _begun(client)
            answer = await client.answer(limit_s=10)

        assert answer.wire_body == before + large + after + LAST_CHUNK


@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/x-ndjson"])
async def test_only_events_that_come_at_once_share_chunks(kind: bytes) -> None:
    """A chunk's end says nothing about what it holds (RFC 9112, 6.1), and fewer are less work for the client."""
    event = b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n'
    head = STREAM_HEAD.replace(b"text/event-stream", kind)

    async with relayed(head + chunk(event) * 4000 + LAST_CHUNK) as (_, sidecar), raw_client(sidecar.url) as client:
        await _begun(client)
        answer = await client.answer()

        assert answer.body == event * 4000
        if kind == b"text/event-stream":
            assert len(answer.wire_body) < 1.01 * len(answer.body)
        else:
            assert answer.wire_body == chunk(event) * 4000 + LAST_CHUNK


async def test_half_of_a_known_length_arrives_before_the_rest() -> None:
    async with relayed(left_to_the_test) as (upstream, sidecar), raw_client(sidecar.url) as client:
        await _begun(client)
        connection = await upstream.connection()
        await connection.request()
        whole = ok(b"x" * 50 + b"y" * 50)
        connection.write(whole[:-50])
        head = await client.head(limit_s=1)
        first = await client.exactly(50, limit_s=1)
        connection.write(whole[-50:])
        second = await client.exactly(50, limit_s=1)

        assert head.values("content-length") == [b"100"]
        assert first + second == b"x" * 50 + b"y" * 50


async def test_chunk_extensions_and_trailers_stay_behind_and_the_chunks_remain() -> None:
    body = b'3;a=1\r\nabc\r\n4 ; b="x;y"\r\ndefg\r\n2\r\nhi\r\n0;last\r\nX-Trailer: t\r\nX-Other: u\r\n\r\n'

    async with relayed(STREAM_HEAD + body) as (_, sidecar), raw_client(sidecar.url) as client:
        await _begun(client)
        answer = await client.answer()
        again = await client.ask("POST", CHAT_PATH, body=STREAMED_CHAT)

        assert answer.wire_body == b"3\r\nabc\r\n4\r\ndefg\r\n2\r\nhi\r\n0\r\n\r\n"
        assert again.body == b"abcdefghi"
