"""A gateway that is down, silent or no HTTP server: the client gets the sidecar's own error, at once and in words."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.raw_client import CHAT, ask, chat, raw_client
from tests.support.raw_http import Answer
from tests.support.scripted_upstream import STREAM_HEAD, Connection, Script, ok
from tests.support.sidecars import relayed, running_sidecar

TOKEN = {"HERMES_SIDECAR_GATEWAY__TOKEN": "gateway-token"}


def _assert_own_error(answer: Answer, status: int, code: str) -> str:
    """The envelope, whole; its message."""
    assert answer.status == status
    assert answer.value("x-hermes-sidecar-error") == code
    assert (answer.value("content-type") or "").startswith("application/json")
    document = answer.json()
    assert document.keys() == {"error"}
    error = document["error"]
    assert error.keys() == {"message", "type", "code", "param", "hint"}
    assert (error["code"], error["type"], error["param"]) == (code, "server_error", None)
    assert error["message"].endswith(".")
    assert error["hint"]
    assert b"gateway-token" not in answer.body
    assert b"Traceback" not in answer.body
    return str(error["message"])


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_closed_port_is_an_unreachable_upstream(method: str) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # not listening: connections are refused
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        async with running_sidecar(url, environ=TOKEN) as sidecar:
            answer = await ask(sidecar.url, method, "/v1/models", body=CHAT if method == "POST" else b"", limit_s=2)

            message = _assert_own_error(answer, 502, "upstream_unreachable")
            assert "refused" in message
            assert url in message
            (line,) = await sidecar.ended_exchanges()
            assert (line["outcome"], line["code"]) == ("upstream_broke", "upstream_unreachable")


@asynccontextmanager
async def _never_accepting() -> AsyncIterator[str]:
    """An address whose connects are never answered: its accept queue is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers: list[socket.socket] = []
        try:
            for _ in range(4):
                filler = socket.socket()
                fillers.append(filler)
                filler.setblocking(False)
                filler.connect_ex(listener.getsockname())
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for filler in fillers:
                filler.close()


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_connects_that_are_never_answered_end_with_the_connect_timeout(method: str) -> None:
    async with (
        _never_accepting() as url,
        running_sidecar(url, gateway={"connect_timeout_s": 0.3}) as sidecar,
    ):
        begun = time.monotonic()
        answer = await ask(sidecar.url, method, "/v1/models", body=CHAT if method == "POST" else b"", limit_s=3)

        assert time.monotonic() - begun < 1.5
        assert answer.status in (502, 504)
        _assert_own_error(answer, answer.status, str(answer.value("x-hermes-sidecar-error")))


@pytest.mark.parametrize("large", [False, True], ids=["chat", "large-upload"])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_client_that_leaves_while_the_upstream_is_being_connected_is_noticed(large: bool, how: str) -> None:
    async with (
        _never_accepting() as url,
        running_sidecar(url, gateway={"connect_timeout_s": 60}) as sidecar,
        raw_client(sidecar.url) as client,
    ):
        body = CHAT if not large else b"x" * 200_000
        await client.send(client.request("POST", "/v1/chat/completions", body=body))
        with pytest.raises(TimeoutError):
            await client.head(limit_s=0.1)

        (client.close if how == "close" else client.reset)()

        (line,) = await sidecar.ended_exchanges(limit_s=1)
        assert line["outcome"] == "client_left"


HEAD = b"HTTP/1.1 200 OK\r\n"
RUBBISH = [
    pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n", id="ssh"),
    pytest.param(b"\x15\x03\x01\x00\x02\x02\x16", id="tls-alert"),
    pytest.param(b"220 mail ESMTP\r\n", id="smtp"),
    pytest.param(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00", id="http-2-settings"),
    pytest.param(b"HTTP/2 200 OK\r\n\r\n", id="http-2-status-line"),
    pytest.param(b"HTTP/1.1 banana\r\nContent-Length: 2\r\n\r\nok", id="no-status"),
    pytest.param(b"HTTP/1.1 20 OK\r\nContent-Length: 2\r\n\r\nok", id="short-status"),
    pytest.param(b"HTTP/1.1 2000 OK\r\nContent-Length: 2\r\n\r\nok", id="long-status"),
    pytest.param(b"HTTP/1.1 099 OK\r\nContent-Length: 2\r\n\r\nok", id="status-below-100"),
    pytest.param(b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok", id="lf-alone"),
    pytest.param(HEAD + b"Content-Length: 5\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", id="gzip-chunked"),
    pytest.param(HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!", id="two-lengths"),
    pytest.param(HEAD + b"Content-Length: +5\r\n\r\nhello", id="plus-length"),
    pytest.param(HEAD + b"X-A: 1\r\n folded\r\nContent-Length: 2\r\n\r\nok", id="folded"),
    pytest.param(HEAD + b"X-A : 1\r\nContent-Length: 2\r\n\r\nok", id="blank-before-colon"),
    pytest.param(HEAD + b"X-A: 1\x00\r\nContent-Length: 2\r\n\r\nok", id="nul"),
    pytest.param(HEAD + b"X-A: 1\rX-B: 2\r\nContent-Length: 2\r\n\r\nok", id="bare-cr"),
    pytest.param(HEAD + b"no colon here\r\nContent-Length: 2\r\n\r\nok", id="no-colon"),
    pytest.param(HEAD + b"X-Big: " + b"x" * 67_000 + b"\r\n\r\n", id="head-beyond-64-kib"),
    pytest.param(HEAD + b"X-Big: " + b"x" * 70_000, id="head-without-end"),
]


@pytest.mark.parametrize("rubbish", RUBBISH)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_rubbish_is_a_502_while_the_upstream_keeps_the_connection_open(rubbish: bytes, method: str) -> None:
    async with relayed(_saying(rubbish), environ=TOKEN) as (upstream, sidecar):
        answer = await ask(sidecar.url, method, "/v1/models", body=CHAT if method == "POST" else b"", limit_s=2)

        _assert_own_error(answer, 502, "upstream_protocol_error")
        assert len(upstream.connections) == 1
        await upstream.connections[0].ended(limit_s=1)


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"HTT", id="half-a-status-line"),
        pytest.param(HEAD + b"Content-Le", id="half-a-head"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n", id="interim-answer-only"),
        pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n", id="rubbish"),
    ],
)
async def test_upstream_that_ends_before_its_head_is_complete_is_a_502(said: bytes, how: str) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        connection.write(said)
        (connection.close if how == "close" else connection.reset)()

    async with relayed(script, environ=TOKEN) as (upstream, sidecar):
        answer = await chat(sidecar.url, limit_s=2)

        _assert_own_error(answer, 502, "upstream_protocol_error")
        assert len(upstream.requests) == 1
        (line,) = await sidecar.ended_exchanges()
        assert (line["outcome"], line["status"]) == ("upstream_broke", 502)


async def test_upstream_that_closes_before_it_reads_is_a_502() -> None:
    async def script(connection: Connection) -> None:
        connection.close()

    async with relayed(script) as (_, sidecar):
        get = await ask(sidecar.url, "GET", "/v1/models", limit_s=2)
        post = await chat(sidecar.url, limit_s=2)

        _assert_own_error(get, 502, "upstream_protocol_error")
        _assert_own_error(post, 502, "upstream_protocol_error")


async def test_answer_with_length_and_chunked_is_refused_or_read_as_chunked_alone() -> None:
    both = HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"

    async with relayed(_saying(both)) as (_, sidecar):
        answer = await chat(sidecar.url)

        if answer.status == 200:
            assert (answer.body, answer.values("content-length")) == (b"hello", [])
        else:
            _assert_own_error(answer, 502, "upstream_protocol_error")


async def test_switch_of_protocols_that_nobody_asked_for_is_a_502() -> None:
    switch = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"

    async with relayed(_saying(switch)) as (upstream, sidecar):
        answer = await chat(sidecar.url, limit_s=2)

        _assert_own_error(answer, 502, "upstream_protocol_error")
        await upstream.connections[0].ended(limit_s=1)


async def test_client_connection_stays_usable_after_a_gateway_fault() -> None:
    async def first_fails(connection: Connection) -> None:
        request = await connection.request()
        connection.write(b"rubbish" if request.target == b"/first" else ok())

    async with relayed(first_fails) as (_, sidecar), raw_client(sidecar.url) as client:
        failed = await client.ask("POST", "/first", body=CHAT)
        served = await client.ask("POST", "/second", body=CHAT)

        assert (failed.status, served.status) == (502, 200)


async def test_silence_beyond_the_idle_limit_is_a_504_before_the_head() -> None:
    async with relayed(_saying(b""), gateway={"idle_timeout_s": 0.3}) as (upstream, sidecar):
        begun = time.monotonic()
        answer = await chat(sidecar.url, limit_s=3)

        assert 0.25 < time.monotonic() - begun < 1.5
        _assert_own_error(answer, 504, "upstream_timeout")
        await upstream.connections[0].ended(limit_s=1)
        (line,) = await sidecar.ended_exchanges()
        assert line["outcome"] == "timeout"


async def test_silence_beyond_the_idle_limit_breaks_a_stream() -> None:
    async with relayed(_saying(STREAM_HEAD + b"2\r\nhi\r\n"), gateway={"idle_timeout_s": 0.3}) as (upstream, sidecar):
        async with raw_client(sidecar.url) as client:
            client.write(client.request("POST", "/v1/chat/completions", body=CHAT))
            head = await client.head()
            rest = await client.to_end(limit_s=2)

            assert (head.status, rest) == (200, b"2\r\nhi\r\n")
        await upstream.connections[0].ended(limit_s=1)
        (line,) = await sidecar.ended_exchanges()
        assert line["outcome"] == "timeout"


def _saying(said: bytes) -> Script:
    """A script that reads a request, says `said`, and stays silent with its connection open."""

    async def script(connection: Connection) -> None:
        await connection.request()
        connection.write(said)
        await asyncio.Event().wait()

    return script
