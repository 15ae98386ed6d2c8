"""Hundreds of clients that come and go: no ceiling, nothing leaks, and no half-read connection is used again."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

import psutil

from tests.support.raw_client import CHAT, STREAMED_CHAT, ask, chat, raw_client
from tests.support.scripted_upstream import LAST_CHUNK, STREAM_HEAD, Connection, chunk, ok
from tests.support.sidecars import relayed

CHATS = 300
STREAMS = 150


async def _streaming(connection: Connection) -> None:
    """Chats are streamed word by word for a while; everything else is answered at once."""
    while True:
        request = await connection.request(limit_s=30)
        if request.method == b"GET":
            connection.write(ok(request.target))
            continue
        connection.write(STREAM_HEAD)
        for number in range(40):
            await asyncio.sleep(0.01)
            connection.write(chunk(b"data: %d\n\n" % number))
        connection.write(LAST_CHUNK)


async def test_models_are_served_promptly_after_hundreds_of_cancelled_chats() -> None:
    chance = random.Random(300)

    async def cancelled_chat(url: str) -> None:
        async with raw_client(url) as client:
            client.write(client.request("POST", "/v1/chat/completions", body=STREAMED_CHAT))
            await asyncio.sleep(chance.uniform(0, 0.3))
            chance.choice([client.close, client.reset, client.finish])()

    files_before = psutil.Process().num_fds()
    async with relayed(_streaming) as (upstream, sidecar):
        await asyncio.gather(*(cancelled_chat(sidecar.url) for _ in range(CHATS)))
        answer = await ask(sidecar.url, "GET", "/v1/models", limit_s=1)
        for connection in upstream.connections[:CHATS]:
            if connection.received.startswith(b"POST"):
                await connection.ended(limit_s=2)
        lines = await sidecar.ended_exchanges(len(sidecar.exchanges))

        assert (answer.status, answer.body) == (200, b"/v1/models")
        assert {line["outcome"] for line in lines} <= {"client_left", "complete"}
    async with asyncio.timeout(2):
        while psutil.Process().num_fds() > files_before + 2:
            await asyncio.sleep(0.01)


async def test_half_read_connection_is_never_used_again() -> None:
    """Leaving and asking in turn, as fast as possible: each answer belongs to its own question."""

    async def numbered(connection: Connection) -> None:
        while True:
            request = await connection.request(limit_s=30)
            connection.write(ok(request.target, b"X-Pad: " + b"p" * 100)[:-3])
            await asyncio.sleep(0)
            connection.write(request.target[-3:])

    async with relayed(numbered) as (_, sidecar):
        for number in range(100, 200):
            async with raw_client(sidecar.url) as leaving:
                leaving.write(leaving.request("GET", f"/left/{number}"))
                for _ in range(number % 7):
                    await asyncio.sleep(0)
                leaving.reset()
            answer = await ask(sidecar.url, "GET", f"/asked/{number}", limit_s=2)

            assert answer.body == f"/asked/{number}".encode()


async def test_long_streams_do_not_keep_others_waiting() -> None:
    async def silent_stream(connection: Connection) -> None:
        while True:
            request = await connection.request(limit_s=30)
            connection.write(ok() if request.method == b"GET" or b"stream" not in request.body else STREAM_HEAD)

    async with relayed(silent_stream) as (upstream, sidecar):
        async with AsyncExitStack() as streams:
            for _ in range(STREAMS):
                client = await streams.enter_async_context(raw_client(sidecar.url))
                client.write(client.request("POST", "/v1/chat/completions", body=STREAMED_CHAT))
                await client.head()
            models = await ask(sidecar.url, "GET", "/v1/models", limit_s=1)
            turn = await chat(sidecar.url, limit_s=1)

            assert (models.status, turn.status) == (200, 200)
            assert len(upstream.connections) >= STREAMS + 1
        open_ones = [connection for connection in upstream.connections if STREAMED_CHAT in connection.received]
        for connection in open_ones:
            await connection.ended(limit_s=2)


async def test_parallel_requests_each_get_their_own_answer() -> None:
    async def echo(connection: Connection) -> None:
        while True:
            request = await connection.request(limit_s=30)
            await asyncio.sleep(len(request.body) % 7 / 1000)
            connection.write(ok(request.target + b" " + request.body))

    async def several(url: str, name: int) -> None:
        async with raw_client(url) as client:
            for number in range(20):
                target, body = f"/{name}/{number}", b"x" * (name * 20 + number + 1)
                method = "GET" if number % 3 == 0 else "POST"
                answer = await client.ask(method, target, body=body if method == "POST" else b"")
                assert answer.body == target.encode() + b" " + (body if method == "POST" else b"")

    async with relayed(echo) as (upstream, sidecar):
        await asyncio.gather(*(several(sidecar.url, name) for name in range(30)))

        assert len(upstream.requests) == 600


async def test_burst_of_connections_is_served() -> None:
    async with relayed(ok()) as (_, sidecar):
        answers = await asyncio.gather(*(chat(sidecar.url, body=CHAT) for _ in range(200)))

        assert {answer.status for answer in answers} == {200}


async def test_clients_that_never_send_anything_harm_nobody() -> None:
    async with relayed(ok()) as (upstream, sidecar):
        async with raw_client(sidecar.url) as idle, raw_client(sidecar.url) as half:
            half.write(b"POST /v1/chat/compl")
            answer = await chat(sidecar.url, limit_s=1)

            assert answer.status == 200
            assert (idle.ending, half.ending) == (None, None)
        assert len(upstream.connections) == 1
