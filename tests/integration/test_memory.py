"""Memory stays flat: a reader that stops, and an upstream that stops, hold the sender back instead of filling it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from tests.support.raw_client import raw_client
from tests.support.scripted_upstream import (
    LAST_CHUNK,
    STREAM_HEAD,
    Connection,
    chunk,
    clients_request,
    ok,
    scripted_upstream,
)
from tests.support.sidecar_process import SidecarProcess
from tests.support.wire import Wire

MB = 1_000_000
ALLOWED_BYTES = 16 * MB
BLOCK = bytes(range(250)) * 4000  # 1 MB


class Sender:
    """Sends blocks for ever, as fast as the other side takes them, and counts them."""

    def __init__(self, block: bytes) -> None:
        self.blocks = 0
        self._block = block

    async def send_to(self, wire: Wire, blocks: int) -> None:
        while self.blocks < blocks:
            await wire.send(self._block, limit_s=60)
            self.blocks += 1

    async def held_back(self) -> int:
        """How many blocks were sent until nothing went on for half a second."""
        while True:
            before = self.blocks
            await asyncio.sleep(0.5)  # the standstill
            if self.blocks == before:
                return before


def memory_of(sidecar: SidecarProcess) -> int:
    return psutil.Process(sidecar.pid).memory_info().rss


@pytest.mark.parametrize("framing", ["length", "chunked", "until-close"])
async def test_500_megabytes_to_a_reader_that_stops_hold_the_upstream_back(framing: str, tmp_path: Path) -> None:
    """Another client is served meanwhile; when the reader goes on, the bytes go on where they stopped."""
    total = 500
    sender = Sender(chunk(BLOCK) if framing == "chunked" else BLOCK)

    async def script(connection: Connection) -> None:
        while (await connection.request(limit_s=60)).target != b"/big":
            connection.write(ok(b"{}"))
        match framing:
            case "length":
                connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (total * MB))
            case "chunked":
                connection.write(STREAM_HEAD)
            case _:
                connection.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await sender.send_to(connection, total)
        if framing == "chunked":
            connection.write(LAST_CHUNK)

    async with (
        scripted_upstream(script, records=False) as upstream,
        await SidecarProcess.start(tmp_path, upstream.url) as sidecar,
        raw_client(sidecar.url, records=False) as client,
        raw_client(sidecar.url) as neighbour,
    ):
        assert (await neighbour.ask("GET", "/v1/models")).status == 200
        before = memory_of(sidecar)
        client.write(client.request("GET", "/big"))
        await client.head()
        client.stop_reading()

        sent = await sender.held_back()
        grown = memory_of(sidecar) - before
        other = await neighbour.ask("GET", "/v1/models", limit_s=1)
        client.go_on_reading()
        for _ in range(2 * sent):
            if framing == "chunked":
                await client.until(b"\r\n")
            assert await client.exactly(len(BLOCK)) == BLOCK
            if framing == "chunked":
                await client.until(b"\r\n")
        grown_later = memory_of(sidecar) - before

        assert sent < 40  # megabytes, for all buffers of the kernel together
        assert max(grown, grown_later) < ALLOWED_BYTES
        assert other.status == 200


async def test_upload_to_an_upstream_that_does_not_read_holds_the_client_back(tmp_path: Path) -> None:
    sender, uploading = Sender(BLOCK), asyncio.Event()

    async def script(connection: Connection) -> None:
        while (await connection.head(limit_s=60)).method == b"GET":
            connection.write(ok(b"{}"))
        connection.stop_reading()
        uploading.set()

    async with (
        scripted_upstream(script, records=False) as upstream,
        await SidecarProcess.start(tmp_path, upstream.url, {"SHUTDOWN__GRACE_S": "0"}) as sidecar,
        raw_client(sidecar.url) as client,
        raw_client(sidecar.url) as neighbour,
    ):
        assert (await neighbour.ask("GET", "/v1/models")).status == 200
        before = memory_of(sidecar)
        client.write(client.request("POST", "/v1/files", b"Content-Length: %d" % (500 * MB)))
        async with asyncio.timeout(5):
            await uploading.wait()
        sending = asyncio.ensure_future(sender.send_to(client, 500))

        sent = await sender.held_back()
        grown = memory_of(sidecar) - before
        other = await neighbour.ask("GET", "/v1/models", limit_s=1)
        sending.cancel()

        assert sent < 40
        assert grown < ALLOWED_BYTES
        assert other.status == 200


async def test_tunnel_to_a_reader_that_stops_holds_the_upstream_back(tmp_path: Path) -> None:
    sender = Sender(BLOCK)

    async def script(connection: Connection) -> None:
        await clients_request(connection)
        connection.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        await sender.send_to(connection, 500)

    async with (
        scripted_upstream(script, records=False) as upstream,
        await SidecarProcess.start(tmp_path, upstream.url, {"SHUTDOWN__GRACE_S": "0"}) as sidecar,
        raw_client(sidecar.url, records=False) as client,
    ):
        before = memory_of(sidecar)
        client.write(client.request("GET", "/ws", b"Connection: Upgrade", b"Upgrade: websocket"))
        await client.head()
        client.stop_reading()

        sent = await sender.held_back()
        grown = memory_of(sidecar) - before
        client.go_on_reading()
        for _ in range(2 * sent):
            assert await client.exactly(len(BLOCK)) == BLOCK

        assert sent < 40
        assert grown < ALLOWED_BYTES


async def test_500_megabytes_to_a_reader_that_reads_leave_no_memory_behind(tmp_path: Path) -> None:
    sender = Sender(BLOCK)

    async def script(connection: Connection) -> None:
        await clients_request(connection)
        connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (500 * MB))
        await sender.send_to(connection, 500)

    async with (
        scripted_upstream(script, records=False) as upstream,
        await SidecarProcess.start(tmp_path, upstream.url) as sidecar,
        raw_client(sidecar.url, records=False) as client,
    ):
        before = memory_of(sidecar)
        client.write(client.request("GET", "/big"))
        await client.head()
        received, most = 0, before
        while received < 500 * MB:
            received += len(await client.some())
            most = max(most, memory_of(sidecar))

        assert received == 500 * MB
        assert most - before < ALLOWED_BYTES
