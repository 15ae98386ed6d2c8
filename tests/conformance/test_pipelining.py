"""Several requests on one connection: each is answered, in order, and a refusal does not disturb its neighbours."""

from __future__ import annotations

import pytest

from tests.support.raw_client import CHAT, RawClient, raw_client
from tests.support.scripted_upstream import LAST_CHUNK, STREAM_HEAD, Connection, chunk, left_to_the_test, ok
from tests.support.sidecars import relayed


async def _echo(connection: Connection) -> None:
    while True:
        request = await connection.request()
        connection.write(ok(request.method + b" " + request.target + b" " + request.body))


def _sequence(client: RawClient) -> tuple[bytes, list[bytes]]:
    """Requests of all framings in one go, and the bodies of their answers."""
    chunked = b"POST /3 HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    requests = [
        client.request("GET", "/1"),
        client.request("POST", "/2", body=b"two"),
        chunked,
        client.request("POST", "/4", b"Content-Length: 0"),
        b"\r\n" + client.request("DELETE", "/5"),
        client.request("POST", "/6", body=b"x" * 100_000),
        client.request("GET", "/7"),
    ]
    answers = [b"GET /1 ", b"POST /2 two", b"POST /3 abc", b"POST /4 ", b"DELETE /5 ", b"POST /6 " + b"x" * 100_000]
    return b"".join(requests), [*answers, b"GET /7 "]


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with relayed(_echo) as (upstream, sidecar), raw_client(sidecar.url) as client:
        requests, expected = _sequence(client)
        client.write(requests)
        answers = [(await client.answer()).body for _ in expected]

        assert answers == expected
        assert len(upstream.requests) == len(expected)
        assert client.unread == b""


async def test_second_request_waits_for_the_end_of_the_first_answer() -> None:
    async with relayed(left_to_the_test) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("POST", "/first", body=CHAT) + client.request("POST", "/second", body=CHAT))
        connection = await upstream.connection()
        await connection.request()
        connection.write(STREAM_HEAD + chunk(b"one"))
        await client.until(chunk(b"one"))
        assert len(upstream.connections) == 1
        assert connection.unread == b""
        connection.write(chunk(b"two") + LAST_CHUNK)
        await client.until(LAST_CHUNK)
        second = connection if connection.unread else await upstream.connection(1)

        assert (await second.request()).target == b"/second"


async def test_megabytes_sent_ahead_are_held_back_and_arrive() -> None:
    """More than the sidecar keeps: it stops reading, and goes on when their turn comes."""
    bodies = [b"%d" % (number % 10) * 1_000_000 for number in range(20)]

    async def waits_once(connection: Connection) -> None:
        while True:
            request = await connection.request()
            if request.target == b"/first":
                await connection.told()
            connection.write(ok(request.target))

    async with relayed(waits_once, records=False) as (upstream, sidecar), raw_client(sidecar.url) as client:
        ahead = b"".join(client.request("POST", f"/{number}", body=body) for number, body in enumerate(bodies))
        with pytest.raises(TimeoutError):
            await client.send(client.request("GET", "/first") + ahead, limit_s=0.3)
        upstream.connections[0].tell()
        answers = [(await client.answer()).body for _ in range(21)]

        assert answers == [b"/first", *(b"/%d" % number for number in range(20))]
        assert [request.body for request in upstream.requests[1:]] == bodies


REFUSED = [
    pytest.param(b"GET /x HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421, id="host"),
    pytest.param(b"GET /x HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n", 403, id="origin"),
    pytest.param(
        b"GET /x HTTP/1.1\r\nHost: localhost\r\nX-Hermes-Session-Key: a\r\nX-Hermes-Session-Key: b\r\n\r\n",
        400,
        id="key",
    ),
    pytest.param(b"GET /x HTTP/1.1\r\nHost: localhost\r\nExpect: miracles\r\n\r\n", 417, id="expectation"),
]


@pytest.mark.parametrize(("refused", "status"), REFUSED)
async def test_refusal_between_two_pipelined_requests_is_answered_in_its_place(refused: bytes, status: int) -> None:
    async with relayed(_echo) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("GET", "/1") + refused + client.request("GET", "/2"))
        answers = [await client.answer() for _ in range(3)]

        assert [answer.status for answer in answers] == [200, status, 200]
        assert [request.target for request in upstream.requests] == [b"/1", b"/2"]


@pytest.mark.parametrize(("refused", "status"), REFUSED)
async def test_refused_post_is_followed_by_a_served_one_or_a_close(refused: bytes, status: int) -> None:
    """The body of a refused request is never read as a request."""
    inner = b"GET /inner HTTP/1.1\r\nHost: localhost\r\n\r\n"
    post = refused.replace(b"GET", b"POST").replace(b"\r\n\r\n", b"\r\nContent-Length: %d\r\n\r\n" % len(inner)) + inner

    async with relayed(_echo) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(post + client.request("GET", "/after"))
        first = await client.answer()
        rest = await (client.to_end() if first.values("connection") == [b"close"] else client.until(b"GET /after "))

        assert first.status == status
        assert rest == b"" or rest.endswith(b"GET /after ")
        assert {request.target for request in upstream.requests} <= {b"/after"}


async def test_request_after_connection_close_is_not_read() -> None:
    async with relayed(_echo) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("GET", "/1", b"Connection: close") + client.request("GET", "/2"))
        answer = await client.answer()

        assert answer.body == b"GET /1 "
        assert [value.lower() for value in answer.values("connection")] == [b"close"]
        assert await client.to_end() == b""
        assert [request.target for request in upstream.requests] == [b"/1"]


async def test_many_requests_on_one_connection() -> None:
    async with relayed(_echo) as (upstream, sidecar), raw_client(sidecar.url) as client:
        for number in range(500):
            answer = await client.ask("GET", f"/{number}")
            assert answer.body == b"GET /%d " % number

        assert len(upstream.connections) == 1
