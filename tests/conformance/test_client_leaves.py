"""The client leaves: the upstream's connection is closed within a second, in every phase, with nothing to write."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.support.kernel import fill_until_unread
from tests.support.raw_client import STREAMED_CHAT, RawClient, raw_client
from tests.support.scripted_upstream import STREAM_HEAD, Connection, Script, chunk
from tests.support.sidecars import relayed
from tests.support.wire import Wire

CHAT_PATH = "/v1/chat/completions"
EVENT = chunk(b"data: one\n\n")
LIMIT_S = 1.0

Leave = Callable[[Wire], None]
LEAVES = [
    pytest.param(Wire.close, id="close"),
    pytest.param(Wire.finish, id="fin-only"),
    pytest.param(Wire.reset, id="rst"),
]


def _silent_after(said: bytes) -> Script:
    async def script(connection: Connection) -> None:
        await connection.request()
        connection.write(said)

    return script


PHASES = [
    pytest.param(b"", b"", id="before-the-head"),
    pytest.param(b"HTTP/1.1 103 Early Hints\r\n\r\n", b"", id="after-an-interim-answer"),
    pytest.param(STREAM_HEAD[:30], b"", id="inside-the-head"),
    pytest.param(STREAM_HEAD, STREAM_HEAD[-2:], id="head-only"),
    pytest.param(STREAM_HEAD + EVENT, EVENT, id="after-one-event"),
    pytest.param(STREAM_HEAD + EVENT + EVENT, EVENT + EVENT, id="after-two-events"),
    pytest.param(STREAM_HEAD + EVENT + b"9\r\nhal", b"9\r\nhal", id="inside-a-chunk"),
    pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", b"half", id="inside-a-known-length"),
    pytest.param(b"HTTP/1.1 200 OK\r\n\r\nhalf", b"half", id="until-close"),
]


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize(("said", "seen"), PHASES)
@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_upstream_sees_the_client_leave(method: str, said: bytes, seen: bytes, leave: Leave) -> None:
    async with relayed(_silent_after(said)) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request(method, CHAT_PATH, body=STREAMED_CHAT if method == "POST" else b""))
        connection = await upstream.connection()
        if seen:
            await client.until(seen)
        else:
            await connection.asked()
        left_at = time.monotonic()
        leave(client)

        await connection.ended(limit_s=LIMIT_S)
        assert connection.ended_at is not None
        assert connection.ended_at - left_at < LIMIT_S
        (line,) = await sidecar.ended_exchanges()
        assert line["outcome"] == "client_left"
        assert len(upstream.connections) == 1


@pytest.mark.parametrize("leave", LEAVES)
async def test_upstream_sees_the_client_leave_while_answers_are_on_their_way(leave: Leave) -> None:
    """The client has stopped reading, so that the sidecar holds the upstream back."""

    async def endless(connection: Connection) -> None:
        await connection.request()
        connection.write(STREAM_HEAD)
        while True:
            await connection.send(chunk(b"x" * 60_000), limit_s=30)

    async with relayed(endless) as (upstream, sidecar), raw_client(sidecar.url, receive_buffer=4096) as client:
        client.write(client.request("POST", CHAT_PATH, body=STREAMED_CHAT))
        await client.until(STREAM_HEAD[-4:])
        client.stop_reading()
        connection = await upstream.connection()
        await connection.held_back()

        leave(client)

        await connection.ended(limit_s=LIMIT_S)
        (line,) = await sidecar.ended_exchanges()
        assert line["outcome"] == "client_left"


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("phase", ["nothing-read", "head-read", "answering"])
async def test_client_that_leaves_while_its_upload_is_held_back_is_noticed(phase: str, leave: Leave) -> None:
    """The upstream does not read, so the sidecar does not, and sees the client's end only if it looks for it."""

    async def not_reading(connection: Connection) -> None:
        if phase != "nothing-read":
            await connection.head()
        connection.stop_reading()
        if phase == "answering":
            connection.write(STREAM_HEAD)

    async with relayed(not_reading, records=False) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("POST", CHAT_PATH, b"Content-Length: 1000000000"))
        await fill_until_unread(client, b"x" * 60_000)
        left_at = time.monotonic()
        leave(client)

        (line,) = await sidecar.ended_exchanges(limit_s=LIMIT_S)
        assert time.monotonic() - left_at < LIMIT_S
        assert line["outcome"] == "client_left"
        connection = upstream.connections[0]
        connection.go_on_reading()
        await _read_all(connection)
        assert connection.requests == []


async def _read_all(connection: Connection) -> None:
    while connection.ending is None:
        try:
            await connection.some(limit_s=LIMIT_S)
        except ConnectionError:
            return


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("chunked", [False, True], ids=["with-length", "chunked"])
@pytest.mark.parametrize("size", [0, 10, 1_000_000])
async def test_upload_that_is_left_never_becomes_a_complete_request(size: int, chunked: bool, leave: Leave) -> None:
    async def reads_all(connection: Connection) -> None:
        await connection.request(limit_s=30)

    async with relayed(reads_all) as (upstream, sidecar), raw_client(sidecar.url) as client:
        if chunked:
            client.write(client.request("POST", CHAT_PATH, b"Transfer-Encoding: chunked"))
            part = b"%x\r\n%b\r\n" % (size, b"x" * size) if size else b"5\r\nhel"
        else:
            client.write(client.request("POST", CHAT_PATH, b"Content-Length: 5000000"))
            part = b"x" * size
        await client.send(part)
        connection = await upstream.connection()
        await connection.has_received(part)
        leave(client)

        await connection.ended(limit_s=LIMIT_S)
        assert upstream.requests == []
        assert not connection.received.endswith(b"\r\n0\r\n\r\n")  # an id may end with 0, and the head with it
        (line,) = await sidecar.ended_exchanges()
        assert line["outcome"] == "client_left"
        assert {level for level, _ in sidecar.log} == {"info"}


async def test_leaving_one_stream_does_not_touch_its_neighbours() -> None:
    async with (
        relayed(_silent_after(STREAM_HEAD + EVENT)) as (upstream, sidecar),
        raw_client(sidecar.url) as staying,
        raw_client(sidecar.url) as leaving,
    ):
        for client in (staying, leaving):
            await _begin(client)
        leaving.close()
        await upstream.connections[1].ended(limit_s=LIMIT_S)
        upstream.connections[0].write(EVENT)

        assert await staying.exactly(len(EVENT), limit_s=LIMIT_S) == EVENT


async def test_idle_client_that_leaves_costs_nothing() -> None:
    """Between two requests nothing of its is upstream; another client's stream goes on."""
    async with relayed(_silent_after(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")) as (upstream, sidecar):
        async with raw_client(sidecar.url) as client:
            assert (await client.ask("GET", "/v1/models")).body == b"ok"

        (line,) = await sidecar.ended_exchanges()
        assert line["outcome"] == "complete"
        assert upstream.connections[0].ending is None


async def _begin(client: RawClient) -> None:
    client.write(client.request("POST", CHAT_PATH, body=STREAMED_CHAT))
    await client.until(EVENT)
