"""Many chats at once, and many that end in the middle: everybody is served, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.support.footprint import Footprint, settled
from tests.support.raw_client import CHAT, JSON, STREAMED_CHAT, RawClient, chat, raw_client
from tests.support.scripted_upstream import (
    LAST_CHUNK,
    STREAM_HEAD,
    Connection,
    ScriptedUpstream,
    chunk,
    ok,
    scripted_upstream,
)
from tests.support.sidecars import Sidecar, running_sidecar

PROMPTLY_S = 1.0
EVENT = b'data: {"choices":[{"delta":{"content":"word "}}]}\n\n'
SEED = 20_261_130


async def models_and_streams(connection: Connection) -> None:
    """GET is answered at once; a streamed chat gets its head, then an event every few milliseconds without end."""
    while True:
        request = await connection.request(limit_s=60)
        if request.method == b"GET" or b'"stream":true' not in request.body:
            connection.write(ok(b"{}"))
            continue
        await asyncio.sleep(0.01)  # the model begins to think
        connection.write(STREAM_HEAD)
        while connection.ending is None:
            await connection.send(chunk(EVENT))
            await asyncio.sleep(0.005)  # the model's next word
        connection.close()
        return


async def promptly(url: str) -> tuple[int, float]:
    """Status and seconds of GET /v1/models."""
    asked_at = time.monotonic()
    async with raw_client(url) as client:
        answer = await client.ask("GET", "/v1/models")
    return answer.status, time.monotonic() - asked_at


def open_at(upstream: ScriptedUpstream) -> int:
    """How many of the upstream's connections are still open."""
    return sum(connection.ending is None for connection in upstream.connections)


def is_quiet(sidecar: Sidecar) -> bool:
    relay = sidecar.running._app.relay
    return not relay.exchanges and not relay.clients


@asynccontextmanager
async def leaving_nothing_behind() -> AsyncIterator[None]:
    """Fails if there are more sockets, tasks or living exchanges after the block than before it."""
    before = Footprint.now()
    yield
    if not await settled(lambda: Footprint.now() == before):
        assert Footprint.now() == before


async def cancelled_chat(url: str, dice: random.Random) -> str:
    """One chat that its client gives up at a moment that the dice choose; the name of that moment."""
    moment = dice.choice(["inside_head", "inside_body", "any_time", "after_head", "after_events"])
    by_reset = dice.random() < 0.5
    async with raw_client(url) as client:
        request = client.request("POST", "/v1/chat/completions", JSON, body=STREAMED_CHAT)
        body_at = request.index(b"\r\n\r\n") + 4
        match moment:
            case "inside_head":
                client.write(request[: dice.randrange(1, body_at)])
            case "inside_body":
                client.write(request[: dice.randrange(body_at, len(request))])
            case _:
                client.write(request)
        match moment:
            case "after_head":
                await client.head()
            case "after_events":
                await client.head()
                for _ in range(dice.randrange(1, 5)):
                    await client.until(b"\n\n")
            case _:
                await asyncio.sleep(dice.uniform(0, 0.03))  # a random moment is the situation
        if by_reset:
            client.reset()
        else:
            client.close()
    return moment


async def test_300_cancelled_chats_leave_a_working_sidecar_and_nothing_open() -> None:
    dice = random.Random(SEED)
    async with (
        leaving_nothing_behind(),
        scripted_upstream(models_and_streams) as upstream,
        running_sidecar(upstream.url) as sidecar,
    ):
        moments: Counter[str] = Counter()
        for _ in range(6):
            moments.update(await asyncio.gather(*(cancelled_chat(sidecar.url, dice) for _ in range(50))))
        answer = await chat(sidecar.url, body=CHAT)
        status, took_s = await promptly(sidecar.url)

        assert (moments.total(), len(moments)) == (300, 5)
        assert (answer.status, answer.body, status) == (200, b"{}", 200)
        assert took_s < PROMPTLY_S
        assert await settled(lambda: is_quiet(sidecar)), sidecar.running._app.relay
        # Two whole answers came, so at most two connections are kept for the next request.
        assert await settled(lambda: open_at(upstream) <= 2)
        answers = await asyncio.gather(*(chat(sidecar.url, body=CHAT) for _ in range(20)))
        assert {(again.status, again.body) for again in answers} == {(200, b"{}")}
        outcomes = Counter(line["outcome"] for line in sidecar.exchanges)
        assert set(outcomes) <= {"client_left", "complete"}


async def test_150_long_streams_at_once_hold_nobody_up() -> None:
    go_on = asyncio.Event()

    async def script(connection: Connection) -> None:
        while True:
            request = await connection.request(limit_s=60)
            if request.method == b"GET":
                connection.write(ok(b"{}"))
                continue
            connection.write(STREAM_HEAD + chunk(EVENT))
            await go_on.wait()
            connection.write(chunk(EVENT) + LAST_CHUNK)

    async with (
        leaving_nothing_behind(),
        scripted_upstream(script) as upstream,
        running_sidecar(upstream.url) as sidecar,
        many_clients(sidecar.url, 150) as clients,
    ):
        for client in clients:
            client.write(client.request("POST", "/v1/chat/completions", JSON, body=STREAMED_CHAT))
        heads = await asyncio.gather(*(client.head() for client in clients))
        firsts = await asyncio.gather(*(client.exactly(len(chunk(EVENT))) for client in clients))
        status, took_s = await promptly(sidecar.url)
        running = len(sidecar.running._app.relay.exchanges)
        go_on.set()
        rests = await asyncio.gather(*(client.until(LAST_CHUNK) for client in clients))

        assert {head.status for head in heads} == {200}
        assert set(firsts) == {chunk(EVENT)}
        assert (status, running) == (200, 150)
        assert took_s < PROMPTLY_S
        assert set(rests) == {chunk(EVENT) + LAST_CHUNK}
        assert len(upstream.requests) == 151
        assert Counter(line["outcome"] for line in await sidecar.ended_exchanges(151)) == {"complete": 151}


async def test_streams_that_the_upstream_breaks_leave_nothing_open() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        connection.write(STREAM_HEAD)
        await connection.send(chunk(EVENT))
        if int(connection.requests[0].values("x-number")[0]) % 2:
            connection.reset()
        else:
            connection.close()

    async with (
        leaving_nothing_behind(),
        scripted_upstream(script) as upstream,
        running_sidecar(upstream.url, gateway={"idle_timeout_s": 30}) as sidecar,
        many_clients(sidecar.url, 50) as clients,
    ):
        for number, client in enumerate(clients):
            number_field = b"X-Number: %d" % number
            client.write(client.request("POST", "/v1/chat/completions", JSON, number_field, body=STREAMED_CHAT))
        await asyncio.gather(*(client.to_end() for client in clients))
        for client in clients:
            client.close()

        assert not any(client.received.endswith(LAST_CHUNK) for client in clients)
        assert await settled(lambda: is_quiet(sidecar))
        assert await settled(lambda: open_at(upstream) == 0)
        lines = await sidecar.ended_exchanges(50)
        assert Counter(line["outcome"] for line in lines) == {"upstream_broke": 50}


@pytest.mark.parametrize("idle_timeout_s", [0, 30])
async def test_a_repeated_request_leaves_no_timer_behind(idle_timeout_s: float) -> None:
    """A safe request that met a stale connection is sent on a second one: what watched the first must end with it."""

    async def script(connection: Connection) -> None:
        await connection.request()
        connection.write(ok(b"{}"))
        await connection.head(limit_s=60)
        if connection is upstream.connections[0]:
            connection.reset()  # as if it had closed a moment before the request came
            return
        connection.write(ok(b"{}"))

    async with (
        leaving_nothing_behind(),
        scripted_upstream(script) as upstream,
        running_sidecar(upstream.url, gateway={"idle_timeout_s": idle_timeout_s}) as sidecar,
    ):
        async with raw_client(sidecar.url) as client:
            first = await client.ask("GET", "/v1/models")
            second = await client.ask("GET", "/v1/models")

        assert (first.status, second.status, len(upstream.connections)) == (200, 200, 2)
        assert await settled(lambda: is_quiet(sidecar))
        assert await settled(lambda: "Exchange" not in Footprint.now().living), "something still holds an exchange"


async def test_tunnels_that_end_in_every_way_leave_nothing_open() -> None:
    async def script(connection: Connection) -> None:
        request = await connection.request()
        connection.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        await connection.exactly(5)
        match request.target:
            case b"/upstream-closes":
                connection.close()
            case b"/upstream-resets":
                connection.reset()

    upgrade = (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13")
    endings = ["upstream-closes", "upstream-resets", "client-closes", "client-resets"]
    async with (
        leaving_nothing_behind(),
        scripted_upstream(script) as upstream,
        running_sidecar(upstream.url) as sidecar,
        many_clients(sidecar.url, 20) as clients,
    ):
        targets = [f"/{endings[number % 4]}" for number in range(20)]
        for client, target in zip(clients, targets, strict=True):
            client.write(client.request("GET", target, *upgrade))
            assert (await client.head()).status == 101
            client.write(b"frame")
        for client, target in zip(clients, targets, strict=True):
            match target:
                case "/client-closes":
                    client.close()
                case "/client-resets":
                    client.reset()
                case _:
                    await client.ended(limit_s=1)
                    client.close()

        for connection in upstream.connections:
            await connection.ended(limit_s=1)
        assert await settled(lambda: is_quiet(sidecar))
        assert len(await sidecar.ended_exchanges(20)) == 20


async def test_refused_requests_leave_nothing_open() -> None:
    async with (
        leaving_nothing_behind(),
        scripted_upstream(ok()) as upstream,
        running_sidecar(upstream.url) as sidecar,
        many_clients(sidecar.url, 40) as clients,
    ):
        requests = (
            b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\nContent-Length: 5\r\n\r\n",
            b"no HTTP at all\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000,
        )
        for number, client in enumerate(clients):
            client.write(requests[number % 4])
        answers = await asyncio.gather(*(client.answer() for client in clients))
        for client in clients:
            client.close()

        assert Counter(answer.status for answer in answers) == {421: 10, 403: 10, 400: 10, 431: 10}
        assert await settled(lambda: is_quiet(sidecar))
        assert upstream.connections == []


@asynccontextmanager
async def many_clients(url: str, count: int) -> AsyncIterator[list[RawClient]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(raw_client(url)) for _ in range(count)]
