"""An upstream that breaks off: the client sees a broken answer, never a short success; and it is asked only once."""

from __future__ import annotations

import pytest

from tests.support.raw_client import STREAMED_CHAT, raw_client
from tests.support.scripted_upstream import LAST_CHUNK, STREAM_HEAD, Connection, Script, chunk
from tests.support.sidecars import relayed

EVENT = chunk(b"data: one\n\n")
LENGTH_HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"
CLOSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def _script(said: bytes, how: str) -> Script:
    async def script(connection: Connection) -> None:
        await connection.request()
        connection.write(said)
        if how == "close":
            connection.close()
        elif how == "reset":
            await connection.told()  # an RST may overtake the bytes before it
            connection.reset()

    return script


BREAKS = [
    pytest.param(STREAM_HEAD + EVENT, "close", EVENT, id="fin-between-chunks"),
    pytest.param(STREAM_HEAD + EVENT, "reset", EVENT, id="rst-between-chunks"),
    pytest.param(STREAM_HEAD + EVENT + b"8\r\nhalf", "close", EVENT + b"8\r\nhalf", id="fin-inside-a-chunk"),
    pytest.param(STREAM_HEAD + EVENT + b"8\r\nhalf", "reset", EVENT + b"8\r\nhalf", id="rst-inside-a-chunk"),
    pytest.param(STREAM_HEAD + EVENT + b"0\r\n", "close", EVENT, id="fin-inside-the-last-chunk"),
    pytest.param(STREAM_HEAD + EVENT + b"0\r\nX-Trailer: t\r\n", "close", EVENT, id="fin-inside-the-trailers"),
    pytest.param(STREAM_HEAD, "close", b"", id="fin-after-the-head"),
    pytest.param(STREAM_HEAD, "reset", b"", id="rst-after-the-head"),
    pytest.param(STREAM_HEAD + EVENT + b"nonsense\r\n", "stay", EVENT, id="malformed-size"),
    pytest.param(STREAM_HEAD + EVENT + b"3\r\nabcX", "stay", EVENT + b"3\r\nabc", id="chunk-too-long"),
    pytest.param(STREAM_HEAD + EVENT + b"data: raw\n\n", "stay", EVENT, id="unframed-event"),
    pytest.param(STREAM_HEAD + EVENT + b"0\r\nno colon\r\n\r\n", "stay", EVENT, id="malformed-trailer"),
    pytest.param(STREAM_HEAD + EVENT + b"a" * 5000, "stay", EVENT, id="endless-size-line"),
    pytest.param(STREAM_HEAD + EVENT + b"0\r\nX: " + b"a" * 70_000, "stay", EVENT, id="endless-trailer"),
    pytest.param(LENGTH_HEAD + b"x" * 50, "close", b"x" * 50, id="fin-after-50-of-100-bytes"),
    pytest.param(LENGTH_HEAD + b"x" * 50, "reset", b"x" * 50, id="rst-after-50-of-100-bytes"),
]


@pytest.mark.parametrize(("said", "how", "arrives"), BREAKS)
async def test_broken_answer_breaks_the_clients_connection(said: bytes, how: str, arrives: bytes) -> None:
    """What came before the break arrives; no last chunk, no invented `[DONE]`, no second request behind the back."""
    async with relayed(_script(said, how)) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("POST", "/v1/chat/completions", body=STREAMED_CHAT))
        head = await client.head()
        connection = upstream.connections[0]
        if arrives:
            assert await client.exactly(len(arrives), limit_s=2) == arrives
        connection.tell()
        rest = await client.to_end(limit_s=2)

        assert head.status == 200
        assert arrives.startswith(rest) or rest == b""
        assert LAST_CHUNK not in rest
        (line,) = await sidecar.ended_exchanges()
        assert (line["outcome"], line["status"]) == ("upstream_broke", 200)
        assert len(upstream.connections) == 1
        await connection.ended(limit_s=1)


@pytest.mark.parametrize("size", [10, 1_000_000])
async def test_body_that_ends_with_the_connection_is_complete_with_a_fin(size: int) -> None:
    body = b"z" * size

    async with relayed(_script(CLOSE_HEAD + body, "close")) as (_, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("POST", "/v1/chat/completions", body=STREAMED_CHAT))
        head = await client.head()
        rest = await client.to_end()

        assert head.values("connection") == [b"close"]
        assert head.values("content-length") == head.values("transfer-encoding") == []
        assert (rest, client.ending) == (body, "FIN")
        (line,) = await sidecar.ended_exchanges()
        assert line["outcome"] == "complete"


async def test_body_that_ends_with_the_connection_and_breaks_is_a_reset() -> None:
    """The framing could not show the loss; only a reset can."""
    async with (
        relayed(_script(CLOSE_HEAD + b"data: one\n\n", "reset")) as (upstream, sidecar),
        raw_client(sidecar.url) as client,
    ):
        client.write(client.request("POST", "/v1/chat/completions", body=STREAMED_CHAT))
        await client.head()
        await client.exactly(11)
        upstream.connections[0].tell()
        rest = await client.to_end(limit_s=2)

        assert (rest, client.ending) == (b"", "RST")
        (line,) = await sidecar.ended_exchanges()
        assert line["outcome"] == "upstream_broke"


HTTP_1_0 = b"POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize("keep_alive", [False, True], ids=["plain", "asks-for-keep-alive"])
async def test_http_1_0_client_gets_events_without_chunk_framing_and_a_fin(keep_alive: bool) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        connection.write(STREAM_HEAD)

    async with relayed(script) as (upstream, sidecar), raw_client(sidecar.url) as client:
        request = HTTP_1_0.replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\n\r\n") if keep_alive else HTTP_1_0
        client.write(request)
        head = await client.head(limit_s=1)
        for number in range(3):
            event = b"data: %d\n\n" % number
            upstream.connections[0].write(b"%x;ext=1\r\n%b\r\n" % (len(event), event))
            assert await client.exactly(len(event), limit_s=1) == event
        upstream.connections[0].write(b"0\r\nX-Trailer: t\r\n\r\n")

        assert await client.to_end(limit_s=1) == b""
        assert client.ending == "FIN"
        assert head.values("transfer-encoding") == head.values("content-length") == []
        assert [value.lower() for value in head.values("connection")] in ([], [b"close"])
        assert upstream.only_request.start_line.endswith(b"HTTP/1.1")


async def test_http_1_0_client_gets_a_known_length_and_a_fin() -> None:
    async with (
        relayed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") as (_, sidecar),
        raw_client(sidecar.url) as client,
    ):
        client.write(HTTP_1_0)
        answer = await client.answer()

        assert (answer.body, answer.values("content-length")) == (b"ok", [b"2"])
        assert await client.to_end(limit_s=1) == b""
        assert client.ending == "FIN"


@pytest.mark.parametrize(
    ("said", "how"),
    [
        pytest.param(STREAM_HEAD + EVENT, "close", id="fin"),
        pytest.param(STREAM_HEAD + EVENT, "reset", id="rst"),
        pytest.param(STREAM_HEAD + EVENT + b"nonsense\r\n", "stay", id="malformed-chunk"),
    ],
)
async def test_http_1_0_client_sees_a_break_as_a_reset(said: bytes, how: str) -> None:
    async with relayed(_script(said, how)) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(HTTP_1_0)
        await client.until(b"data: one\n\n")
        upstream.connections[0].tell()
        rest = await client.to_end(limit_s=2)

        assert (rest, client.ending) == (b"", "RST")


async def test_broken_connection_is_not_used_for_the_next_request() -> None:
    async with relayed(_script(STREAM_HEAD + EVENT, "reset")) as (upstream, sidecar):
        for number in range(3):
            async with raw_client(sidecar.url) as client:
                client.write(client.request("GET", "/v1/models"))
                await client.until(EVENT)
                upstream.connections[number].tell()
                await client.ended(limit_s=2)

        assert [len(connection.requests) for connection in upstream.connections] == [1, 1, 1]
