"""However TCP cuts the bytes, at every position and into single ones, both sides see the same messages."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.raw_client import raw_client
from tests.support.scripted_upstream import Connection, Script, left_to_the_test, ok
from tests.support.sidecars import relayed
from tests.support.wire import Wire


async def _arrived(wire: Wire) -> None:
    """What was written has been read by the other side: on loopback, two turns of the event loop later."""
    for _ in range(3):
        await asyncio.sleep(0)


async def _write_cut(wire: Wire, data: bytes, *positions: int) -> None:
    start = 0
    for position in (*positions, len(data)):
        wire.write(data[start:position])
        await _arrived(wire)
        start = position


REQUESTS = [
    pytest.param(
        b"POST /v1/chat/completions?a=b HTTP/1.1\r\nHost: localhost\r\nX-Hermes-Session-Key: k1\r\n"
        b'Content-Length: 13\r\n\r\n\r\n{"a":\r\n1}\r\n',
        b'\r\n{"a":\r\n1}\r\n',
        id="length",
    ),
    pytest.param(
        b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5;e=1\r\nhel\r\n\r\n00a\r\n0123456789\r\n0\r\nX-Trailer: t\r\n\r\n",
        b"hel\r\n0123456789",
        id="chunked",
    ),
    pytest.param(b"\r\nGET /x HTTP/1.1\r\nhost:localhost\r\nx-empty:\r\n\r\n", b"", id="get"),
]


@pytest.mark.parametrize(("request_bytes", "body"), REQUESTS)
async def test_request_cut_at_every_position_arrives_the_same(request_bytes: bytes, body: bytes) -> None:
    async with relayed(ok()) as (upstream, sidecar), raw_client(sidecar.url) as client:
        for position in range(1, len(request_bytes)):
            await _write_cut(client, request_bytes, position)
            assert (await client.answer(limit_s=2)).status == 200
        await _write_cut(client, request_bytes, *range(1, len(request_bytes)))
        assert (await client.answer(limit_s=2)).status == 200

        assert len(upstream.requests) == len(request_bytes)
        assert {request.body for request in upstream.requests} == {body}
        assert len({_without_ids(request.head) for request in upstream.requests}) == 1


ANSWERS = [
    pytest.param(
        b"HTTP/1.1 200 OK\r\nX-A: 1\r\nContent-Length: 12\r\n\r\n\r\nhe\r\n\r\nllo!",
        b"\r\nhe\r\n\r\nllo!",
        id="length",
    ),
    pytest.param(
        b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'5;e="x"\r\nhel\r\n\r\n00A\r\n0123456789\r\n1\r\n0\r\n0;x\r\nX-Trailer: t\r\n\r\n',
        b"5\r\nhel\r\n\r\n00A\r\n0123456789\r\n1\r\n0\r\n0\r\n\r\n",
        id="chunked",
    ),
    pytest.param(b"HTTP/1.1 204 No Content\r\nX-A: 1\r\n\r\n", b"", id="no-body"),
]


def _cut_everywhere(answer: bytes) -> Script:
    """Cuts the n-th answer of all after n bytes; the one after these into single bytes."""
    served = 0

    async def script(connection: Connection) -> None:
        nonlocal served
        while True:
            await connection.request()
            served += 1
            cuts = (served,) if served < len(answer) else tuple(range(1, len(answer)))
            await _write_cut(connection, answer, *cuts)

    return script


@pytest.mark.parametrize(("answer", "wire_body"), ANSWERS)
async def test_answer_cut_at_every_position_arrives_the_same(answer: bytes, wire_body: bytes) -> None:
    async with relayed(_cut_everywhere(answer)) as (_, sidecar), raw_client(sidecar.url) as client:
        heads = set()
        for _ in range(len(answer)):
            whole = await client.ask("GET", "/v1/models", b"X-Request-Id: r", limit_s=2)
            heads.add((whole.status, whole.reason, whole.fields))
            assert whole.wire_body == wire_body

        assert len(heads) == 1


async def test_http_1_0_client_gets_the_payload_however_the_chunks_are_cut() -> None:
    answer = ANSWERS[1].values[0]
    assert isinstance(answer, bytes)

    async with relayed(_cut_everywhere(answer)) as (_, sidecar):
        for _ in range(len(answer)):
            async with raw_client(sidecar.url) as client:
                client.write(b"GET /x HTTP/1.0\r\nHost: localhost\r\n\r\n")
                whole = await client.answer(limit_s=2)
                assert (whole.body, client.ending) == (b"hel\r\n01234567890", "FIN")


async def test_chunks_of_a_request_are_sent_on_in_the_pieces_that_came() -> None:
    pieces = [b"5\r\nhel", b"lo\r\n", b"1\r", b"\n!\r\n0", b"\r\n\r\n"]

    async with relayed(left_to_the_test) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection = await upstream.connection()
        await connection.head()
        client.write(pieces[0])
        assert await connection.exactly(6, limit_s=1) == b"5\r\nhel"
        client.write(pieces[1])
        assert await connection.exactly(4, limit_s=1) == b"lo\r\n"
        for piece in pieces[2:]:
            client.write(piece)
        assert await connection.exactly(11, limit_s=1) == b"1\r\n!\r\n0\r\n\r\n"


def _without_ids(head: bytes) -> bytes:
    return b"\r\n".join(line for line in head.split(b"\r\n") if not line.lower().startswith(b"x-request-id"))
