"""A client that reads slowly or not at all: the upstream is held back, memory stays flat, nothing is lost."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import psutil
import pytest

from tests.support.raw_client import STREAMED_CHAT, ask, raw_client
from tests.support.scripted_upstream import LAST_CHUNK, STREAM_HEAD, Connection, chunk, ok, scripted_upstream
from tests.support.sidecar_process import SidecarProcess
from tests.support.sidecars import relayed

BLOCK = bytes(range(256)) * 4096  # 1 MiB
BLOCKS = 500


@pytest.mark.parametrize("framing", ["chunked", "known-length", "until-close"])
async def test_500_mb_for_a_client_that_does_not_read_are_held_back_and_arrive_later(
    tmp_path: Path, framing: str
) -> None:
    written = 0

    async def generous(connection: Connection) -> None:
        nonlocal written
        request = await connection.request()
        if request.method == b"GET":
            connection.write(ok())
            return
        if framing == "chunked":
            head, piece, end = STREAM_HEAD, chunk(BLOCK), LAST_CHUNK
        else:
            head, piece, end = b"HTTP/1.1 200 OK\r\n\r\n", BLOCK, b""
            if framing == "known-length":
                head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(BLOCK) * BLOCKS)
        connection.write(head)
        for _ in range(BLOCKS):
            await connection.send(piece, limit_s=50)
            written += 1
        await connection.send(end)
        if framing == "until-close":
            connection.close()

    piece = chunk(BLOCK) if framing == "chunked" else BLOCK
    expected = hashlib.sha256()
    for _ in range(BLOCKS):
        expected.update(piece)
    if framing == "chunked":
        expected.update(LAST_CHUNK)
    size = len(piece) * BLOCKS + (len(LAST_CHUNK) if framing == "chunked" else 0)

    async with (
        scripted_upstream(generous, records=False) as upstream,
        await SidecarProcess.start(tmp_path, upstream.url) as sidecar,
        raw_client(sidecar.url, records=False, receive_buffer=65536) as client,
    ):
        process = psutil.Process(sidecar.pid)
        before = process.memory_info().rss
        client.write(client.request("POST", "/v1/chat/completions", body=STREAMED_CHAT))
        head = await client.head()
        client.stop_reading()
        await (await upstream.connection()).held_back()

        assert head.status == 200
        assert written < 40
        assert process.memory_info().rss - before < 8 * 1024 * 1024
        assert (await ask(sidecar.url, "GET", "/v1/models", limit_s=1)).status == 200

        client.go_on_reading()
        arrived, left, most = hashlib.sha256(), size, 0
        while left:
            data = await client.some(limit_s=10)
            arrived.update(data)
            left -= len(data)
            most = max(most, process.memory_info().rss) if left % 97 == 0 else most
        assert arrived.digest() == expected.digest()
        assert max(most, process.memory_info().rss) - before < 12 * 1024 * 1024


async def test_client_that_pauses_again_and_again_loses_nothing() -> None:
    pieces = [chunk(b"%06d " % number * 5000) for number in range(300)]

    async def fast(connection: Connection) -> None:
        await connection.request()
        connection.write(STREAM_HEAD)
        for piece in pieces:
            await connection.send(piece, limit_s=20)
        connection.write(LAST_CHUNK)

    async with relayed(fast) as (_, sidecar), raw_client(sidecar.url, receive_buffer=8192) as client:
        client.write(client.request("POST", "/v1/chat/completions", body=STREAMED_CHAT))
        await client.head()
        for _ in range(10):
            client.stop_reading()
            await asyncio.sleep(0.02)
            client.go_on_reading()
            await asyncio.sleep(0.005)
        whole = b"".join(pieces) + LAST_CHUNK

        assert await client.exactly(len(whole)) == whole
        (line,) = await sidecar.ended_exchanges()
        assert line["outcome"] == "complete"


async def test_silence_of_a_client_that_does_not_read_is_not_the_upstreams() -> None:
    """idle_timeout_s judges the upstream; it is the client that holds things up here."""

    async def fast(connection: Connection) -> None:
        await connection.request()
        connection.write(STREAM_HEAD)
        for _ in range(20):
            await connection.send(chunk(BLOCK), limit_s=20)
        connection.write(LAST_CHUNK)

    async with (
        relayed(fast, gateway={"idle_timeout_s": 0.3}, records=False) as (_, sidecar),
        raw_client(sidecar.url, receive_buffer=8192) as client,
    ):
        client.write(client.request("POST", "/v1/chat/completions", body=STREAMED_CHAT))
        head = await client.head()
        client.stop_reading()
        await asyncio.sleep(1.0)
        client.go_on_reading()
        answer = await client.rest_of(head)

        assert answer.body == BLOCK * 20


async def test_break_of_the_upstream_reaches_a_client_that_reads_late() -> None:
    """What was already on its way arrives before the break shows."""

    async def breaks(connection: Connection) -> None:
        await connection.request()
        connection.write(STREAM_HEAD + chunk(b"x" * 200_000))
        await connection.told()
        connection.reset()

    async with relayed(breaks) as (upstream, sidecar), raw_client(sidecar.url, receive_buffer=4096) as client:
        client.write(client.request("POST", "/v1/chat/completions", body=STREAMED_CHAT))
        await client.head()
        client.stop_reading()
        upstream.connections[0].tell()
        (line,) = await sidecar.ended_exchanges()
        client.go_on_reading()
        rest = await client.to_end()

        assert line["outcome"] == "upstream_broke"
        assert LAST_CHUNK not in rest[-10:]
        assert rest in chunk(b"x" * 200_000)
