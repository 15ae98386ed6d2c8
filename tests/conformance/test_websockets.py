"""WebSockets: a real tunnel between two real ends; a refusal is an ordinary answer; leaving closes the other side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import WSMsgType, web

from tests.support.kernel import fill_until_unread
from tests.support.raw_client import ask, raw_client
from tests.support.scripted_upstream import Connection, ok
from tests.support.sidecars import Sidecar, relayed, running_sidecar

MIB = 1024 * 1024
LIMIT_S = 5.0
UPGRADE = (
    b"Connection: Upgrade",
    b"Upgrade: websocket",
    b"Sec-WebSocket-Version: 13",
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)
SWITCH = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
)


class Echo:
    """A WebSocket server that answers what it hears, and notes how each conversation ended."""

    def __init__(self) -> None:
        self.ended: asyncio.Queue[int | None] = asyncio.Queue()
        self.headers: list[tuple[str, str]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/refused":
            return web.json_response({"error": "no sockets here"}, status=403, headers={"X-Why": "policy"})
        self.headers = list(request.headers.items())
        socket = web.WebSocketResponse(protocols=("chat.v2", "chat.v1"), max_msg_size=16 * MIB)
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.TEXT and message.data == "close please":
                await socket.close(code=4321, message=b"as you like")
            elif message.type is WSMsgType.TEXT and message.data == "vanish":
                assert request.transport is not None
                request.transport.abort()
            elif message.type is WSMsgType.TEXT:
                await socket.send_str(message.data)
            elif message.type is WSMsgType.BINARY:
                await socket.send_bytes(message.data)
        self.ended.put_nowait(socket.close_code)
        return socket


@asynccontextmanager
async def _ends() -> AsyncIterator[tuple[Echo, Sidecar, aiohttp.ClientSession]]:
    echo = Echo()
    app = web.Application()
    app.router.add_get("/{tail:.*}", echo.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        port = runner.addresses[0][1]
        async with running_sidecar(f"http://127.0.0.1:{port}") as sidecar, aiohttp.ClientSession() as session:
            yield echo, sidecar, session
    finally:
        await runner.cleanup()


async def test_messages_of_five_mebibytes_pass_both_ways() -> None:
    async with (
        _ends() as (_, sidecar, session),
        session.ws_connect(sidecar.url + "/v1/live", max_msg_size=16 * MIB) as socket,
    ):
        for data in (bytes(range(256)) * (5 * MIB // 256), b"", b"\x00"):
            await socket.send_bytes(data)
            assert (await socket.receive(timeout=LIMIT_S)).data == data
        await socket.send_str("é 🦦")
        assert (await socket.receive(timeout=LIMIT_S)).data == "é 🦦"


async def test_sub_protocol_is_the_upstreams_choice() -> None:
    async with _ends() as (echo, sidecar, session):
        async with session.ws_connect(sidecar.url + "/v1/live", protocols=("other", "chat.v1", "chat.v2")) as socket:
            assert socket.protocol == "chat.v1"
        assert ("Sec-WebSocket-Protocol", "other,chat.v1,chat.v2") in echo.headers


async def test_close_code_and_reason_of_the_upstream_reach_the_client() -> None:
    async with _ends() as (_, sidecar, session), session.ws_connect(sidecar.url + "/v1/live") as socket:
        await socket.send_str("close please")
        message = await socket.receive(timeout=LIMIT_S)

        assert (message.type, message.data, message.extra) == (WSMsgType.CLOSE, 4321, "as you like")


async def test_close_code_of_the_client_reaches_the_upstream() -> None:
    async with _ends() as (echo, sidecar, session):
        socket = await session.ws_connect(sidecar.url + "/v1/live")
        await socket.close(code=4777, message=b"bye")

        assert await asyncio.wait_for(echo.ended.get(), LIMIT_S) == 4777
        (line,) = await sidecar.ended_exchanges()
        assert (line["status"], line["outcome"]) == (101, "complete")


async def test_refused_upgrade_is_an_ordinary_answer() -> None:
    async with _ends() as (_, sidecar, _session), raw_client(sidecar.url) as client:
        answer = await client.ask("GET", "/refused", *UPGRADE)
        again = await client.ask("GET", "/refused")

        assert (answer.status, answer.body) == (403, b'{"error": "no sockets here"}')
        assert answer.values("x-why") == [b"policy"]
        assert answer.values("upgrade") == []
        assert again.status == 403


async def test_client_that_vanishes_is_gone_upstream() -> None:
    async with _ends() as (echo, sidecar, _session), raw_client(sidecar.url) as client:
        client.write(client.request("GET", "/v1/live", *UPGRADE))
        assert (await client.head()).status == 101
        client.reset()

        assert await asyncio.wait_for(echo.ended.get(), 1.0) in (None, 1006)


async def test_upstream_that_vanishes_is_gone_for_the_client() -> None:
    async with _ends() as (_, sidecar, session), session.ws_connect(sidecar.url + "/v1/live") as socket:
        await socket.send_str("vanish")
        message = await socket.receive(timeout=1.0)

        assert message.type in (WSMsgType.CLOSED, WSMsgType.CLOSE, WSMsgType.ERROR)
        assert socket.close_code == 1006


async def _switching(connection: Connection) -> None:
    await connection.request()
    connection.write(SWITCH + b"early from upstream")


async def test_tunnel_carries_bytes_that_came_with_the_heads_and_any_others() -> None:
    async with relayed(_switching) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("GET", "/v1/live", *UPGRADE) + b"early from client")
        head = await client.head()
        connection = upstream.connections[0]

        assert (head.status, head.reason) == (101, b"Switching Protocols")
        assert [value.lower() for value in head.values("connection")] == [b"upgrade"]
        assert head.values("upgrade") == [b"websocket"]
        assert head.values("sec-websocket-accept") == [b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="]
        assert await client.exactly(19) == b"early from upstream"
        assert await connection.exactly(17) == b"early from client"
        request = upstream.only_request
        assert [value.lower() for value in request.values("connection")] == [b"upgrade"]
        assert request.values("upgrade") == [b"websocket"]
        assert request.values("sec-websocket-key") == [b"dGhlIHNhbXBsZSBub25jZQ=="]
        for number in range(256):
            client.write(bytes([number]))
            assert await connection.exactly(1, limit_s=1) == bytes([number])
            connection.write(bytes([number]) * 2)
            assert await client.exactly(2, limit_s=1) == bytes([number]) * 2


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("who", ["client", "upstream"])
async def test_end_of_one_side_is_the_end_of_the_other(who: str, how: str) -> None:
    async with relayed(_switching) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("GET", "/v1/live", *UPGRADE))
        await client.until(b"early from upstream")
        leaving, staying = (client, upstream.connections[0]) if who == "client" else (upstream.connections[0], client)
        (leaving.close if how == "close" else leaving.reset)()

        await staying.ended(limit_s=1)
        (line,) = await sidecar.ended_exchanges()
        assert line["status"] == 101


async def test_end_of_a_side_that_the_other_does_not_read_from_is_noticed() -> None:
    """The client is held back by an upstream that does not read; it vanishes; the upstream hears of it."""

    async def not_reading(connection: Connection) -> None:
        await connection.request()
        connection.stop_reading()
        connection.write(SWITCH)

    async with relayed(not_reading, records=False) as (_, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("GET", "/v1/live", *UPGRADE))
        await client.head()
        await fill_until_unread(client, b"x" * 60_000)
        client.reset()

        await sidecar.ended_exchanges(limit_s=1)


async def test_tunnel_holds_a_fast_side_back() -> None:
    async def floods(connection: Connection) -> None:
        await connection.request()
        connection.write(SWITCH)
        for _ in range(100):
            await connection.send(b"y" * MIB, limit_s=20)

    async with relayed(floods) as (upstream, sidecar), raw_client(sidecar.url, records=False) as client:
        client.write(client.request("GET", "/v1/live", *UPGRADE))
        await client.head()
        client.stop_reading()
        await upstream.connections[0].held_back()
        client.go_on_reading()
        left = 100 * MIB
        while left:
            data = await client.some()
            assert data.count(b"y") == len(data)
            left -= len(data)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param([b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"], id="h2c"),
        pytest.param([b"Connection: Upgrade", b"Upgrade: h2c, websocket"], id="h2c-and-websocket"),
        pytest.param([b"Connection: Upgrade", b"Upgrade: TLS/1.3"], id="tls"),
        pytest.param([b"Upgrade: websocket"], id="not-in-connection"),
    ],
)
async def test_no_other_upgrade_crosses(fields: list[bytes]) -> None:
    """h2c would carry requests past every rule."""
    async with relayed(ok()) as (upstream, sidecar):
        answer = await ask(sidecar.url, "GET", "/v1/models", *fields)

        assert answer.status == 200
        assert not upstream.only_request.names & {b"upgrade", b"connection", b"http2-settings"}


async def test_upgrade_with_a_body_or_by_post_is_an_ordinary_request() -> None:
    async with relayed(ok()) as (upstream, sidecar):
        for method in ("POST", "GET"):
            answer = await ask(sidecar.url, method, "/v1/live", *UPGRADE, body=b"body")
            assert answer.status == 200

        assert [request.values("upgrade") for request in upstream.requests] == [[], []]
        assert [request.body for request in upstream.requests] == [b"body", b"body"]
