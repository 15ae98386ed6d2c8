"""Answers without a body, and answers to HEAD: no byte of theirs is left for the next answer on the connection."""

from __future__ import annotations

import pytest

from tests.support.raw_client import raw_client
from tests.support.scripted_upstream import Connection, Script, ok
from tests.support.sidecars import relayed


def _before_a_get(first: bytes) -> Script:
    """Answers the first request with `first`, each other one with its target."""

    async def script(connection: Connection) -> None:
        while True:
            request = await connection.request()
            connection.write(first if request.target == b"/first" else ok(request.target))

    return script


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("method", "first", "length"),
    [
        pytest.param("GET", b"HTTP/1.1 204 No Content\r\n\r\n", [], id="204"),
        pytest.param("DELETE", b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n", [], id="204-with-length"),
        pytest.param("GET", b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n", [], id="204-chunked"),
        pytest.param("GET", b'HTTP/1.1 304 Not Modified\r\nETag: "a"\r\n\r\n', [], id="304"),
        pytest.param("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\n", [b"99"], id="304-with-length"),
        pytest.param("GET", b"HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n", [], id="304-chunked"),
        pytest.param("HEAD", HEAD + b"Content-Length: 5000\r\n\r\n", [b"5000"], id="head-with-length"),
        pytest.param("HEAD", HEAD + b"Transfer-Encoding: chunked\r\n\r\n", [], id="head-chunked"),
        pytest.param("HEAD", HEAD + b"Content-Type: text/plain\r\n\r\n", [], id="head-without-framing"),
        pytest.param("HEAD", b"HTTP/1.1 404 Not Found\r\nContent-Length: 7\r\n\r\n", [b"7"], id="head-404"),
        pytest.param("GET", HEAD + b"Content-Length: 0\r\n\r\n", [b"0"], id="empty-body"),
        pytest.param("POST", b"HTTP/1.1 205 Reset Content\r\nContent-Length: 0\r\n\r\n", [b"0"], id="205"),
    ],
)
async def test_answer_without_a_body_is_followed_by_an_intact_one(
    method: str, first: bytes, length: list[bytes]
) -> None:
    async with relayed(_before_a_get(first)) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request(method, "/first"))
        head = await client.head()
        after = await client.ask("GET", "/after")

        assert b"%d" % head.status == first[9:12]
        assert head.values("transfer-encoding") == []
        assert head.values("content-length") == length
        assert head.values("connection") == []
        assert (after.status, after.body) == (200, b"/after")
        assert [request.method for request in upstream.requests] == [method.encode(), b"GET"]


async def test_sequence_of_bodiless_answers_on_one_connection() -> None:
    answers = {
        b"/204": b"HTTP/1.1 204 No Content\r\n\r\n",
        b"/304": b"HTTP/1.1 304 Not Modified\r\n\r\n",
        b"/head": HEAD + b"Content-Length: 6\r\n\r\n",
    }

    async def script(connection: Connection) -> None:
        while True:
            target = (await connection.request()).target
            connection.write(answers.get(target, ok(target)))

    async with relayed(script) as (_, sidecar), raw_client(sidecar.url) as client:
        seen: list[tuple[int, bytes]] = []
        for method, target in (("GET", "/204"), ("GET", "/304"), ("HEAD", "/head")):
            for asked in ((method, target), ("GET", "/get")):
                answer = await client.ask(*asked)
                seen.append((answer.status, answer.body))

        get = (200, b"/get")
        assert seen == [(204, b""), get, (304, b""), get, (200, b""), get]


async def test_fault_for_a_head_request_has_no_body() -> None:
    async with relayed(b"rubbish") as (_, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("HEAD", "/v1/models"))
        head = await client.head()
        again = await client.ask("GET", "/v1/models")

        assert head.status == 502
        assert int(head.values("content-length")[0]) > 0
        assert again.status == 502
        assert again.json()["error"]["code"] == "upstream_protocol_error"


async def test_body_after_a_head_answer_is_not_passed_on() -> None:
    """Some upstreams send one; the next answer on the client's connection must not begin with it."""
    script = _before_a_get(HEAD + b"Content-Length: 5\r\n\r\nhello")

    async with relayed(script) as (_, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("HEAD", "/first"))
        await client.head()
        after = await client.ask("GET", "/after")

        assert (after.status, after.body) == (200, b"/after")
