"""Kept-alive connections to the upstream: a POST goes out once, and never fails because a connection went stale."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.support.raw_client import CHAT, JSON, chat, raw_client
from tests.support.scripted_upstream import STREAM_HEAD, Connection, Script, ok
from tests.support.sidecars import relayed

OK = ok()
IDLE_S = 0.015
POSTS = 200


async def test_posts_to_an_upstream_that_closes_idle_connections_early_all_succeed() -> None:
    """The client's rhythm is the upstream's limit, so that both happen at once again and again."""

    async def impatient(connection: Connection) -> None:
        await connection.request()
        connection.write(OK)
        while True:
            try:
                await connection.some_is_there(limit_s=IDLE_S)
            except TimeoutError:
                connection.close()
                return
            await connection.request()
            connection.write(OK)

    async with relayed(impatient) as (upstream, sidecar), raw_client(sidecar.url) as client:
        statuses = []
        for number in range(POSTS):
            answer = await client.ask("POST", "/v1/chat/completions", JSON, body=b'{"n":%d}' % number)
            statuses.append(answer.status)
            await asyncio.sleep(IDLE_S + (number % 9 - 4) / 4000)

        assert statuses == [200] * POSTS
        assert [request.body for request in upstream.requests] == [b'{"n":%d}' % number for number in range(POSTS)]


async def _one_answer_per_connection(connection: Connection) -> None:
    """Closes a reused connection as a request arrives on it: that request was never answered."""
    await connection.request()
    connection.write(OK)
    await connection.head(limit_s=30)
    connection.close()


async def _one_answer_per_connection_then_reset(connection: Connection) -> None:
    await connection.request()
    connection.write(OK)
    await connection.head(limit_s=30)
    connection.reset()


@pytest.mark.parametrize("script", [_one_answer_per_connection, _one_answer_per_connection_then_reset])
@pytest.mark.parametrize("first", [None, "GET", "HEAD"], ids=["posts-only", "after-gets", "after-heads"])
async def test_posts_to_an_upstream_that_closes_reused_connections_all_succeed(
    script: Script, first: str | None
) -> None:
    async with relayed(script) as (upstream, sidecar), raw_client(sidecar.url) as client:
        statuses = []
        for number in range(50):
            if first is not None:
                statuses.append((await client.ask(first, "/v1/models")).status)
            answer = await client.ask("POST", "/v1/chat/completions", JSON, body=b'{"n":%d}' % number)
            statuses.append(answer.status)

        assert set(statuses) == {200}
        posts = [r for connection in upstream.connections for r in _posts(connection)]
        assert sorted(posts) == sorted(b'{"n":%d}' % number for number in range(50))


@pytest.mark.parametrize("gets_between", [0, 1, 2])
@pytest.mark.parametrize("answers", [2, 3, 10])
async def test_upstream_that_closes_unannounced_after_some_answers_costs_at_most_one_post(
    answers: int, gets_between: int
) -> None:
    """Only GETs that were answered on a used connection earn it a POST, and the first loss ends that trust for good."""

    async def tiring(connection: Connection) -> None:
        for _ in range(answers):
            await connection.request(limit_s=30)
            connection.write(OK)
        await connection.head(limit_s=30)
        connection.close()

    async with relayed(tiring) as (upstream, sidecar), raw_client(sidecar.url) as client:
        gets, posts = [], []
        for number in range(60):
            gets += [(await client.ask("GET", "/v1/models")).status for _ in range(gets_between)]
            answer = await client.ask("POST", "/v1/chat/completions", JSON, body=b'{"n":%d}' % number)
            posts.append(answer.status)

        assert set(gets) <= {200}
        assert posts.count(502) <= 1
        assert set(posts) <= {200, 502}
        sent = [r for connection in upstream.connections for r in _posts(connection)]
        assert sorted(sent) == sorted(b'{"n":%d}' % number for number in range(60))


@pytest.mark.parametrize("streams", [0, 10])
async def test_posts_among_gets_to_an_upstream_that_closes_idle_connections_early_all_succeed(streams: int) -> None:
    """GETs have shown that the upstream answers twice on a connection, and long streams keep the sidecar busy."""

    async def impatient(connection: Connection) -> None:
        while True:
            try:
                await connection.some_is_there(limit_s=IDLE_S if connection.requests else 30)
            except TimeoutError:
                connection.close()
                return
            request = await connection.request()
            connection.write(STREAM_HEAD if request.target == b"/stream" else OK)
            if request.target == b"/stream":
                return

    async with (
        relayed(impatient) as (upstream, sidecar),
        raw_client(sidecar.url) as client,
        AsyncExitStack() as others,
    ):
        for _ in range(streams):
            other = await others.enter_async_context(raw_client(sidecar.url))
            other.write(other.request("GET", "/stream"))
            await other.head()
        statuses = []
        for number in range(POSTS):
            statuses += [(await client.ask("GET", "/v1/models")).status for _ in range(2)]
            await asyncio.sleep(IDLE_S + (number % 9 - 4) / 4000)
            answer = await client.ask("POST", "/v1/chat/completions", JSON, body=b'{"n":%d}' % number)
            statuses.append(answer.status)

        assert statuses == [200] * POSTS * 3
        sent = [request.body for request in upstream.requests if request.method == b"POST"]
        assert sent == [b'{"n":%d}' % number for number in range(POSTS)]


async def test_parallel_clients_posting_to_such_an_upstream_all_succeed() -> None:
    """Several clients at once make the upstream's connections look busy, and so alive."""

    async def posts(url: str, name: int) -> list[int]:
        async with raw_client(url) as client:
            return [
                (await client.ask("POST", "/v1/chat/completions", JSON, body=b'{"n":"%d-%d"}' % (name, number))).status
                for number in range(25)
            ]

    async with relayed(_one_answer_per_connection) as (upstream, sidecar):
        statuses = await asyncio.gather(*(posts(sidecar.url, name) for name in range(8)))

        assert statuses == [[200] * 25] * 8
        sent = [r for connection in upstream.connections for r in _posts(connection)]
        assert sorted(sent) == sorted(b'{"n":"%d-%d"}' % (name, number) for name in range(8) for number in range(25))


async def test_gets_to_such_an_upstream_are_repeated_once_and_succeed() -> None:
    async with relayed(_one_answer_per_connection) as (_, sidecar), raw_client(sidecar.url) as client:
        statuses = [(await client.ask("GET", "/v1/models")).status for _ in range(20)]

        assert statuses == [200] * 20


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_post_that_is_read_and_not_answered_is_a_502_and_not_sent_again(how: str) -> None:
    async def silent(connection: Connection) -> None:
        await connection.request()
        (connection.close if how == "close" else connection.reset)()

    async with relayed(silent) as (upstream, sidecar):
        answer = await chat(sidecar.url)

        assert answer.status == 502
        assert answer.value("x-hermes-sidecar-error") == "upstream_protocol_error"
        assert [request.body for request in upstream.requests] == [CHAT]
        assert len(upstream.connections) == 1


async def test_post_without_a_body_is_not_sent_again_either() -> None:
    async def silent(connection: Connection) -> None:
        await connection.request()
        connection.close()

    async with relayed(silent) as (upstream, sidecar), raw_client(sidecar.url) as client:
        answer = await client.ask("POST", "/api/jobs/1/run", b"Content-Length: 0")

        assert answer.status == 502
        assert len(upstream.connections) == 1


async def test_connection_is_reused_for_gets_that_follow_each_other() -> None:
    async with relayed(OK) as (upstream, sidecar), raw_client(sidecar.url) as client:
        for _ in range(5):
            await client.ask("GET", "/v1/models")

        assert len(upstream.connections) == 1


async def test_connection_that_the_upstream_wants_closed_is_not_reused() -> None:
    async with relayed(ok(b"{}", b"Connection: close")) as (upstream, sidecar), raw_client(sidecar.url) as client:
        answers = [await client.ask("GET", "/v1/models") for _ in range(3)]

        assert [answer.status for answer in answers] == [200] * 3
        assert [answer.values("connection") for answer in answers] == [[]] * 3
        assert len(upstream.connections) == 3


def _posts(connection: Connection) -> list[bytes]:
    """The bodies of all POSTs that arrived on a connection, answered or not, as the bytes show them."""
    found = []
    rest = bytes(connection.received)
    while rest:
        head, _, rest = rest.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        if head.startswith(b"POST"):
            found.append(rest[:length])
        rest = rest[length:]
    return found
