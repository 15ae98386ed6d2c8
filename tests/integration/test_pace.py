"""Slow clients and many clients: what they hold is bounded, and others do not notice them."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.raw_client import CHAT, JSON, RawClient, ask, chat, raw_client
from tests.support.raw_http import Answer
from tests.support.scripted_upstream import Connection, answering, ok, scripted_upstream
from tests.support.sidecar_process import SidecarProcess
from tests.support.sidecars import relayed
from tests.support.wire import Gone

OK = ok()
SHORT_S = 0.3
POST_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


def refused(answer: Answer, status: int, code: str) -> bool:
    return (answer.status, answer.value("x-hermes-sidecar-error"), answer.value("connection")) == (
        status,
        code,
        "close",
    )


async def trickle(client: RawClient, data: bytes, *, every_s: float = SHORT_S / 6) -> Answer:
    """Sends `data` byte by byte, as long as nobody answers; the answer."""
    for byte in data:
        client.write(bytes((byte,)))
        try:
            return await client.head(limit_s=every_s)
        except TimeoutError:
            continue
    pytest.fail("nobody minded")


# Slow heads


async def test_head_that_trickles_in_is_answered_408_and_nothing_goes_upstream() -> None:
    """Each byte is new, but the limit counts from the first."""
    async with relayed(OK, listen={"head_timeout_s": SHORT_S}) as (upstream, sidecar), raw_client(sidecar.url) as slow:
        head = await trickle(slow, POST_HEAD + b"X-Padding: " + b"a" * 200)
        answer = await slow.rest_of(head)

        assert refused(answer, 408, "request_timeout")
        assert await slow.to_end() == b""
        assert upstream.connections == []


async def test_head_of_a_second_request_has_the_same_limit() -> None:
    async with relayed(OK, listen={"head_timeout_s": SHORT_S}) as (upstream, sidecar), raw_client(sidecar.url) as slow:
        assert (await slow.ask("GET", "/v1/models")).status == 200
        slow.write(POST_HEAD)

        assert refused(await slow.answer(), 408, "request_timeout")
        assert len(upstream.requests) == 1


async def test_connection_between_two_requests_is_not_slow() -> None:
    """A pool of the client's keeps connections for minutes; only a request that has begun is under the limit."""
    async with relayed(OK, listen={"head_timeout_s": 0.1}) as (_, sidecar), raw_client(sidecar.url) as client:
        first = await client.ask("GET", "/v1/models")
        with pytest.raises(TimeoutError):
            await client.some(limit_s=0.6)
        second = await client.ask("GET", "/v1/models")

        assert (first.status, second.status) == (200, 200)


async def test_empty_lines_do_not_keep_a_connection_beyond_its_limit() -> None:
    """Lines before a request are ignored, but whoever sends nothing else has begun one all the same."""
    async with relayed(OK, listen={"head_timeout_s": SHORT_S}) as (_, sidecar), raw_client(sidecar.url) as slow:
        head = await trickle(slow, b"\r\n" * 20)

        assert head.status == 408


# Slow bodies


@pytest.mark.parametrize(
    ("framing", "part"),
    [
        pytest.param(b"Content-Length: 1000\r\n\r\n", b"a" * 10, id="length"),
        pytest.param(b"Transfer-Encoding: chunked\r\n\r\n", b"a\r\naaaaaaaaaa\r\n", id="chunked"),
        pytest.param(b"Transfer-Encoding: chunked\r\n\r\n", b"a;exten", id="inside-a-chunk-size"),
        pytest.param(b"Content-Length: 1000\r\n\r\n", b"", id="nothing-of-it"),
    ],
)
async def test_body_that_stops_is_answered_408_and_the_upstream_never_sees_it_complete(
    framing: bytes, part: bytes
) -> None:
    async with relayed(OK, listen={"body_timeout_s": SHORT_S}) as (upstream, sidecar), raw_client(sidecar.url) as slow:
        slow.write(POST_HEAD + framing + part)
        answer = await slow.answer()

        assert refused(answer, 408, "request_timeout")
        assert await slow.to_end() == b""
        connection = await upstream.connection()
        await connection.ended()
        assert (len(upstream.connections), upstream.requests) == (1, [])
        assert bytes(connection.received).partition(b"\r\n\r\n")[2] in (part, b"")


async def test_body_that_stops_after_the_answer_has_begun_breaks_the_answer_off() -> None:
    async def early(connection: Connection) -> None:
        await connection.head()
        connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")

    async with relayed(early, listen={"body_timeout_s": SHORT_S}) as (_, sidecar), raw_client(sidecar.url) as slow:
        slow.write(POST_HEAD + b"Content-Length: 1000\r\n\r\na")
        head = await slow.head()

        assert head.status == 200
        with pytest.raises(Gone):
            await slow.rest_of(head)
        assert slow.unread == b"half"


async def test_body_that_is_slow_but_comes_is_served() -> None:
    """The limit is on silence, not on the whole: an upload over a bad line takes as long as it takes."""
    async with relayed(OK, listen={"body_timeout_s": SHORT_S}) as (upstream, sidecar), raw_client(sidecar.url) as slow:
        slow.write(POST_HEAD + b"Content-Length: 8\r\n\r\n")
        for byte in b"patience":
            slow.write(bytes((byte,)))
            await asyncio.sleep(SHORT_S / 2)  # the test's subject: four times the limit in all
        answer = await slow.answer()

        assert (answer.status, upstream.only_request.body) == (200, b"patience")


async def test_upload_that_the_upstream_holds_back_is_not_the_clients_fault() -> None:
    """The sidecar itself stops reading then; the time is not the client's."""
    body = bytes(4 << 20)
    go_on = asyncio.Event()

    async def reluctant(connection: Connection) -> None:
        connection.stop_reading()
        await go_on.wait()
        connection.go_on_reading()
        request = await connection.request()
        connection.write(ok(b"%d" % len(request.body)))

    async with (
        relayed(reluctant, listen={"body_timeout_s": SHORT_S}) as (_, sidecar),
        raw_client(sidecar.url) as client,
    ):
        client.write(POST_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        with pytest.raises(TimeoutError):
            await client.some(limit_s=4 * SHORT_S)
        go_on.set()
        answer = await client.answer()

        assert (answer.status, answer.body) == (200, b"%d" % len(body))


async def test_upstream_that_takes_its_time_to_answer_is_not_the_clients_fault() -> None:
    async def thinking(connection: Connection) -> None:
        await connection.request()
        with pytest.raises(TimeoutError):
            await connection.some(limit_s=4 * SHORT_S)
        connection.write(OK)

    limits = {"body_timeout_s": SHORT_S, "head_timeout_s": SHORT_S}
    async with relayed(thinking, listen=limits) as (_, sidecar):
        assert (await chat(sidecar.url)).status == 200


# Many clients


async def test_connection_over_the_cap_is_told_so_and_there_is_room_again_when_one_leaves() -> None:
    async with relayed(OK, listen={"max_connections": 3}) as (upstream, sidecar), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(raw_client(sidecar.url)) for _ in range(3)]
        for client in clients:
            assert (await client.ask("GET", "/v1/models")).status == 200
        async with raw_client(sidecar.url) as fourth:
            turned_away = await fourth.answer()
            assert await fourth.to_end() == b""
        others = [(await client.ask("GET", "/v1/models")).status for client in clients]
        clients[0].close()
        await clients[0].ended()
        after = await _once_there_is_room(sidecar.url)

        assert refused(turned_away, 503, "too_many_connections")
        assert turned_away.value("retry-after") == "1"
        assert others == [200, 200, 200]
        assert after.status == 200
        assert len(upstream.requests) == 7


async def test_running_streams_count_and_are_not_cut_for_newcomers() -> None:
    go_on = asyncio.Event()

    async def streaming(connection: Connection) -> None:
        await connection.request()
        connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhalf")
        await go_on.wait()
        connection.write(b"rest")

    async with relayed(streaming, listen={"max_connections": 1}) as (_, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("POST", "/v1/chat/completions", JSON, body=CHAT))
        head = await client.head()
        assert await client.exactly(4) == b"half"
        async with raw_client(sidecar.url) as newcomer:
            assert refused(await newcomer.answer(), 503, "too_many_connections")
        go_on.set()

        assert head.status == 200
        assert await client.exactly(4) == b"rest"


FILES = 200
CAP = (FILES - 64) // 2  # what the sidecar would allow itself with so few files


@pytest.mark.skipif(sys.platform != "linux", reason="takes files away from a running process, which only Linux can")
async def test_flood_of_connections_leaves_files_for_those_who_were_there(tmp_path: Path) -> None:
    """Clients over the cap are turned away; that they stay on the line must not use up the process's files."""
    settings = {"LISTEN__MAX_CONNECTIONS": str(CAP)}
    async with (
        scripted_upstream(answering(OK)) as upstream,
        await SidecarProcess.start(tmp_path, upstream.url, settings) as sidecar,
        raw_client(sidecar.url) as there_before,
        AsyncExitStack() as stack,
    ):
        assert (await there_before.ask("GET", "/healthz")).status == 200
        resource.prlimit(sidecar.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
        flood = [await stack.enter_async_context(raw_client(sidecar.url)) for _ in range(2 * FILES)]
        for client in flood[CAP:]:
            with contextlib.suppress(Gone):  # without a file left the sidecar can only hang up
                await client.head()
        answer = await there_before.ask("POST", "/v1/chat/completions", JSON, body=CHAT)

        assert answer.status == 200


async def _once_there_is_room(url: str) -> Answer:
    """The sidecar learns of a leaving client a moment after the client knows of it."""
    async with asyncio.timeout(2):
        while (answer := await ask(url, "GET", "/v1/models")).status == 503:
            pass
    return answer
