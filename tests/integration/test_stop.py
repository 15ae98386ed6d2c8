"""A stop in the test's own event loop, at moments that a process cannot be caught in from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.footprint import settled
from tests.support.raw_client import JSON, STREAMED_CHAT, RawClient, raw_client
from tests.support.raw_http import Answer
from tests.support.scripted_upstream import LAST_CHUNK, STREAM_HEAD, Connection, chunk, scripted_upstream
from tests.support.sidecars import Sidecar, running_sidecar

PIECE = bytes(range(256)) * 64  # 16 KiB: some of them fit between "the kernel takes no more" and backpressure
FRAMINGS = pytest.mark.parametrize("is_chunked", [True, False], ids=["chunked", "until-close"])


def waiting_bytes(sidecar: Sidecar) -> int:
    """What the sidecar has been given for its clients, and the kernel has not taken yet."""
    return sum(client.transport.get_write_buffer_size() for client in sidecar.running._app.relay.clients)


@asynccontextmanager
async def unread_end(*, is_chunked: bool) -> AsyncIterator[tuple[Sidecar, RawClient, Answer, bytearray]]:
    """A complete exchange whose end still waits in the sidecar, for a client that does not read.

    The upstream is not read on while anything waits, so that is what its last read brought; here it may be more.
    Gives the sidecar, the client, the answer's head, and the body that the upstream has sent.
    """
    sent = bytearray()

    async def script(connection: Connection) -> None:
        await connection.request()
        for downstream in sidecar.running._app.relay.clients:
            downstream.transport.set_write_buffer_limits(high=1 << 16)
        connection.write(STREAM_HEAD if is_chunked else b"HTTP/1.1 200 OK\r\n\r\n")
        while waiting_bytes(sidecar) == 0:
            sent.extend(PIECE)
            await connection.send(chunk(PIECE) if is_chunked else PIECE)
            await asyncio.sleep(0)  # lets the sidecar take it
        if is_chunked:
            connection.write(LAST_CHUNK)
        else:
            connection.close()

    async with (
        scripted_upstream(script, records=False) as upstream,
        running_sidecar(upstream.url) as sidecar,
        raw_client(sidecar.url, receive_buffer=32768) as client,
    ):
        client.write(client.request("POST", "/v1/chat/completions", JSON, body=STREAMED_CHAT))
        head = await client.head()
        client.stop_reading()
        assert await settled(lambda: [line["outcome"] for line in sidecar.exchanges] == ["complete"])
        assert waiting_bytes(sidecar) > 0
        yield sidecar, client, head, sent


async def stopped(sidecar: Sidecar, grace_s: float) -> None:
    """The stop as a signal brings it about."""
    await sidecar.running.drain(grace_s)
    await sidecar.running.stop()


@FRAMINGS
async def test_slow_reader_gets_the_end_of_its_answer(is_chunked: bool) -> None:
    async with unread_end(is_chunked=is_chunked) as (sidecar, client, head, sent):
        stopping = asyncio.ensure_future(stopped(sidecar, grace_s=5))
        await asyncio.sleep(0.5)  # the client's hesitation
        client.go_on_reading()
        answer = await client.rest_of(head)
        await stopping

        assert (len(answer.body), answer.body == sent) == (len(sent), True)
        assert await client.ended() == "FIN"


@FRAMINGS
async def test_reader_that_never_reads_is_broken_off_when_the_grace_is_over(is_chunked: bool) -> None:
    async with unread_end(is_chunked=is_chunked) as (sidecar, client, _, sent):
        async with asyncio.timeout(2):
            await stopped(sidecar, grace_s=0.3)
        client.go_on_reading()
        rest = await client.to_end()

        if is_chunked:
            assert not rest.endswith(LAST_CHUNK)
        else:  # only a reset tells that a body which ends with the connection is not whole
            assert (len(rest) < len(sent), client.ending) == (True, "RST")


@FRAMINGS
async def test_second_signal_does_not_wait_for_a_slow_reader(is_chunked: bool) -> None:
    async with unread_end(is_chunked=is_chunked) as (sidecar, _, _, _):
        draining = asyncio.ensure_future(sidecar.running.drain(30))
        draining.cancel()
        await asyncio.wait([draining])
        async with asyncio.timeout(1):
            await sidecar.running.stop()

        assert sidecar.running._app.relay.clients == set()
