"""When each piece arrives: at once while the sidecar is idle; and what silence means, with and without a limit."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tests.support.raw_client import CHAT, JSON, STREAMED_CHAT, RawClient, raw_client
from tests.support.scripted_upstream import (
    LAST_CHUNK,
    STREAM_HEAD,
    Connection,
    chunk,
    ok,
    scripted_upstream,
)
from tests.support.sidecars import Sidecar, running_sidecar

AT_ONCE_S = 0.05
EVENT = b'data: {"n": "thirty bytes."}\n\n'
assert len(EVENT) == 30

Ask = Callable[[RawClient], Awaitable[None]]


async def nothing(_: Connection) -> None:
    """The test itself speaks for the upstream."""


@asynccontextmanager
async def exchange(
    idle_timeout_s: float = 0, request: bytes | None = None, *, receive_buffer: int | None = None
) -> AsyncIterator[tuple[Sidecar, RawClient, Connection]]:
    """A streamed chat that has arrived at an upstream that has said nothing yet: sidecar, client, upstream."""
    async with (
        scripted_upstream(nothing) as upstream,
        running_sidecar(upstream.url, gateway={"idle_timeout_s": idle_timeout_s}) as sidecar,
        raw_client(sidecar.url, receive_buffer=receive_buffer) as client,
    ):
        client.write(request or client.request("POST", "/v1/chat/completions", JSON, body=STREAMED_CHAT))
        connection = await upstream.connection()
        await (connection.head() if request else connection.request())
        yield sidecar, client, connection


async def arrival_s(say: Callable[[], None], arrive: Callable[[], Awaitable[bytes]], expected: bytes) -> float:
    """How long `expected` takes from being written to being there."""
    said_at = time.monotonic()
    say()
    assert await arrive() == expected
    return time.monotonic() - said_at


# Each piece at once


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(b"Content-Type: text/event-stream\r\n", id="event-stream"),
        pytest.param(b"Content-Type: application/x-ndjson\r\n", id="ndjson"),
        pytest.param(b"Content-Type: application/x-unheard-of\r\n", id="unknown-type"),
        pytest.param(b"Content-Type: text/event-stream\r\nContent-Encoding: gzip\r\n", id="compressed"),
        pytest.param(b"", id="no-type"),
    ],
)
async def test_each_chunk_is_on_at_once(fields: bytes) -> None:
    async with exchange() as (_, client, connection):
        connection.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n" + fields + b"\r\n")
        await client.head()
        delays_s = []

        for _ in range(10):
            await asyncio.sleep(0.05)  # events with pauses between them: here small packets would be gathered
            delays_s.append(
                await arrival_s(lambda: connection.write(chunk(EVENT)), lambda: client.exactly(36), chunk(EVENT))
            )

        assert max(delays_s) < AT_ONCE_S, delays_s


@pytest.mark.parametrize(
    ("request_line_end", "head"),
    [
        pytest.param(b"HTTP/1.1", b"HTTP/1.1 200 OK\r\nContent-Length: 300\r\n\r\n", id="known-length"),
        pytest.param(b"HTTP/1.1", b"HTTP/1.1 200 OK\r\n\r\n", id="until-close"),
        pytest.param(b"HTTP/1.0", b"HTTP/1.1 200 OK\r\n\r\n", id="until-close-for-http-1.0"),
    ],
)
async def test_each_piece_of_an_unchunked_body_is_on_at_once(request_line_end: bytes, head: bytes) -> None:
    request = b"GET /v1/models " + request_line_end + b"\r\nHost: localhost\r\n\r\n"
    async with exchange(request=request) as (_, client, connection):
        connection.write(head)
        await client.head()
        delays_s = []

        for _ in range(5):
            await asyncio.sleep(0.05)  # as above
            delays_s.append(await arrival_s(lambda: connection.write(EVENT), lambda: client.exactly(30), EVENT))

        assert max(delays_s) < AT_ONCE_S, delays_s


async def test_half_of_a_body_of_known_length_is_on_at_once() -> None:
    async with exchange() as (_, client, connection):
        connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 60\r\n\r\n")
        head = await client.head()

        first_s = await arrival_s(lambda: connection.write(EVENT), lambda: client.exactly(30), EVENT)
        second_s = await arrival_s(lambda: connection.write(EVENT), lambda: client.exactly(30), EVENT)

        assert (head.value("Content-Length"), client.unread) == ("60", b"")
        assert max(first_s, second_s) < AT_ONCE_S


async def test_head_is_on_at_once_and_the_body_when_it_comes() -> None:
    async with exchange() as (_, client, connection):
        said_at = time.monotonic()
        connection.write(STREAM_HEAD)
        head = await client.head()
        head_s = time.monotonic() - said_at

        await asyncio.sleep(0.5)  # the silence between a head and its first event
        unread = client.unread
        event_s = await arrival_s(lambda: connection.write(chunk(EVENT)), lambda: client.exactly(36), chunk(EVENT))

        assert (head.status, unread) == (200, b"")
        assert max(head_s, event_s) < AT_ONCE_S


async def test_each_piece_of_an_upload_is_on_at_once() -> None:
    request = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with exchange(request=request) as (_, client, connection):
        delays_s = []

        for _ in range(10):
            await asyncio.sleep(0.05)  # pauses between the pieces, as above
            delays_s.append(
                await arrival_s(lambda: client.write(chunk(EVENT)), lambda: connection.exactly(36), chunk(EVENT))
            )

        assert max(delays_s) < AT_ONCE_S, delays_s


async def test_nothing_is_put_into_a_silence() -> None:
    async with exchange() as (_, client, connection):
        connection.write(STREAM_HEAD + chunk(EVENT))
        await client.until(b"\r\n\r\n")
        before = await client.exactly(36)

        await asyncio.sleep(1)  # the silence
        during = client.unread
        connection.write(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)
        after = await client.until(LAST_CHUNK)

        assert (before, during, after) == (chunk(EVENT), b"", chunk(b"data: [DONE]\n\n") + LAST_CHUNK)


# Without a limit of silence


@pytest.mark.parametrize("begins", [pytest.param(b"", id="before-the-head"), pytest.param(STREAM_HEAD, id="after-it")])
async def test_without_idle_timeout_silence_longer_than_every_limit_is_no_end(
    begins: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All limits are made short, so that none of them can end a running exchange unnoticed."""
    shorten_every_limit(monkeypatch)
    async with (
        scripted_upstream(nothing) as upstream,
        running_sidecar(upstream.url, gateway={"connect_timeout_s": 0.2}) as sidecar,
        raw_client(sidecar.url) as client,
    ):
        client.write(client.request("POST", "/v1/chat/completions", JSON, body=STREAMED_CHAT))
        connection = await upstream.connection()
        await connection.request()
        connection.write(begins)

        await asyncio.sleep(2)  # ten times each limit
        connection.write((STREAM_HEAD if not begins else b"") + chunk(EVENT) + LAST_CHUNK)
        answer = await client.answer()

        assert (answer.status, answer.body, connection.ending) == (200, EVENT, None)


def shorten_every_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets each constant of the data path that is a time to a tenth of a second, unless it is shorter."""
    modules = [
        module for name, module in sys.modules.items() if name == "sidecar.app" or name.startswith("sidecar.relay.")
    ]
    found = [
        (module, name)
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("_S") and isinstance(value, float) and value > 0.1
    ]
    assert len(found) >= 5
    for module, name in found:
        monkeypatch.setattr(module, name, 0.1)


# With a limit of silence

LIMIT_S = 0.4


async def test_silence_before_the_head_is_a_504_at_the_limit() -> None:
    async with exchange(LIMIT_S) as (sidecar, client, connection):
        asked_at = time.monotonic()
        answer = await client.answer()
        silent_s = time.monotonic() - asked_at
        await connection.ended(limit_s=1)

        error = answer.json()["error"]
        assert (answer.status, answer.value("X-Hermes-Sidecar-Error")) == (504, "upstream_timeout")
        assert (answer.value("Content-Type"), error["code"]) == ("application/json; charset=utf-8", "upstream_timeout")
        assert "0.4 s" in error["message"]
        assert "idle_timeout_s" in error["hint"]
        assert LIMIT_S * 0.95 <= silent_s <= LIMIT_S * 1.5
        (ended,) = await sidecar.ended_exchanges()
        assert (ended["outcome"], ended["status"]) == ("timeout", 504)


@pytest.mark.parametrize(
    ("head", "ending"),
    [
        pytest.param(STREAM_HEAD, "FIN", id="chunked"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 300\r\n\r\n", "FIN", id="known-length"),
        # Only a reset tells that a body which ends with the connection was not ended by the upstream.
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n", "RST", id="until-close"),
    ],
)
async def test_silence_after_the_head_breaks_the_connection(head: bytes, ending: str) -> None:
    async with exchange(LIMIT_S) as (sidecar, client, connection):
        piece = chunk(EVENT) if head == STREAM_HEAD else EVENT
        connection.write(head + piece)
        await client.head()
        await client.exactly(len(piece))
        heard_at = time.monotonic()
        ended_how = await client.ended()
        silent_s = time.monotonic() - heard_at
        await connection.ended(limit_s=1)

        assert (ended_how, client.unread) == (ending, b"")
        assert LIMIT_S * 0.95 <= silent_s <= LIMIT_S * 1.5
        (ended,) = await sidecar.ended_exchanges()
        assert (ended["outcome"], ended["status"]) == ("timeout", 200)


async def test_an_event_now_and_then_is_no_silence() -> None:
    async with exchange(LIMIT_S) as (_, client, connection):
        connection.write(STREAM_HEAD)

        for _ in range(8):
            await asyncio.sleep(LIMIT_S / 2)  # shorter than the limit each time, four times as long in sum
            connection.write(chunk(EVENT))
        connection.write(LAST_CHUNK)
        answer = await client.answer()

        assert answer.body == EVENT * 8


async def test_informational_answers_are_no_silence() -> None:
    async with exchange(LIMIT_S) as (_, client, connection):
        for _ in range(6):
            await asyncio.sleep(LIMIT_S / 2)  # as above
            connection.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        connection.write(ok(b"{}"))
        answer = await client.answer()

        assert (answer.status, answer.body) == (200, b"{}")


async def test_a_client_that_does_not_read_is_not_the_upstreams_silence() -> None:
    body = bytes(range(256)) * 131072  # 32 MB: more than the kernel takes in for a reader that pauses
    async with exchange(LIMIT_S, receive_buffer=65536) as (_, client, connection):
        client.stop_reading()
        sending = asyncio.ensure_future(connection.send(ok(body), limit_s=10))

        await asyncio.sleep(LIMIT_S * 4)  # the pause of the reader
        was_held_back = not sending.done()
        client.go_on_reading()
        answer = await client.answer()
        await sending

        assert (was_held_back, answer.status, answer.body == body) == (True, 200, True)


async def test_a_slow_upload_is_not_the_upstreams_silence() -> None:
    request = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 240\r\n\r\n"
    async with exchange(LIMIT_S, request) as (_, client, connection):
        for _ in range(8):
            await asyncio.sleep(LIMIT_S / 2)  # the client's pauses
            client.write(EVENT)
        await connection.exactly(240)
        connection.write(ok(b"{}"))
        answer = await client.answer()

        assert (answer.status, answer.body) == (200, b"{}")


async def test_a_client_that_pauses_its_upload_is_not_the_upstreams_silence() -> None:
    """The gateway has nothing to say before it has the request: it is the client that is silent."""
    request = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60\r\n\r\n"
    async with exchange(LIMIT_S, request) as (_, client, connection):
        client.write(EVENT)
        await connection.exactly(30)
        await asyncio.sleep(LIMIT_S * 3)  # the client's pause
        client.write(EVENT)
        await connection.exactly(30)
        connection.write(ok(b"{}"))
        answer = await client.answer()

        assert (answer.status, answer.body) == (200, b"{}")


async def test_the_limit_begins_when_the_upload_is_over() -> None:
    request = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60\r\n\r\n"
    async with exchange(LIMIT_S, request) as (_, client, connection):
        client.write(EVENT)
        await asyncio.sleep(LIMIT_S * 0.8)  # the client's pause
        client.write(EVENT)
        await connection.exactly(60)
        asked_at = time.monotonic()
        answer = await client.answer()
        silent_s = time.monotonic() - asked_at

        assert answer.status == 504
        assert LIMIT_S * 0.95 <= silent_s <= LIMIT_S * 1.5


async def test_an_upstream_that_does_not_take_the_upload_is_silent() -> None:
    async with (
        scripted_upstream(nothing) as upstream,
        running_sidecar(upstream.url, gateway={"idle_timeout_s": LIMIT_S}) as sidecar,
        raw_client(sidecar.url) as client,
    ):
        client.write(client.request("POST", "/v1/files", b"Content-Length: 100000000"))
        connection = await upstream.connection()
        await connection.head()
        connection.stop_reading()
        uploading = asyncio.ensure_future(client.send(bytes(100_000_000)))
        answer = await client.answer()
        uploading.cancel()

        assert (answer.status, answer.value("X-Hermes-Sidecar-Error")) == (504, "upstream_timeout")


async def test_a_quiet_connection_between_two_requests_is_no_silence() -> None:
    async with (
        scripted_upstream(ok(b"{}")) as upstream,
        running_sidecar(upstream.url, gateway={"idle_timeout_s": LIMIT_S}) as sidecar,
        raw_client(sidecar.url) as client,
    ):
        first = await client.ask("GET", "/v1/models")
        await asyncio.sleep(LIMIT_S * 3)  # the quiet
        second = await client.ask("POST", "/v1/chat/completions", JSON, body=CHAT)

        assert (first.status, second.status, client.ending) == (200, 200, None)
