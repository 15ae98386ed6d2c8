"""An https gateway: verified, named in the handshake, refused in words, and its handshake not paid per request."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.authority import ca_file, server_tls
from tests.support.footprint import settled
from tests.support.gate import Gate, gate_before
from tests.support.raw_client import CHAT, JSON, STREAMED_CHAT, ask, chat, raw_client
from tests.support.raw_http import Answer
from tests.support.scripted_upstream import (
    LAST_CHUNK,
    STREAM_HEAD,
    Connection,
    Script,
    ScriptedUpstream,
    chunk,
    ok,
    scripted_upstream,
)
from tests.support.sidecars import Sidecar, running_sidecar

EVENT = b'data: {"choices":[{"delta":{"content":"word "}}]}\n\n'


@asynccontextmanager
async def over_tls(
    home: Path, script: Script | bytes, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[ScriptedUpstream, Sidecar]]:
    """An upstream named localhost with a certificate of the authority that the sidecar trusts, or with `tls`."""
    async with (
        scripted_upstream(script, tls=tls or server_tls("localhost")) as upstream,
        running_sidecar(f"https://localhost:{upstream.port}", gateway={"ca_file": ca_file(home)}) as sidecar,
    ):
        yield upstream, sidecar


# The relay over TLS


async def test_chat_works_streamed_and_not(tmp_path: Path) -> None:
    async def script(connection: Connection) -> None:
        while True:
            request = await connection.request()
            if b'"stream":true' in request.body:
                await connection.send(STREAM_HEAD + chunk(EVENT))
                await connection.send(chunk(EVENT) + LAST_CHUNK)
            else:
                connection.write(ok(b'{"id":"1"}'))

    async with over_tls(tmp_path, script) as (upstream, sidecar):
        plain = await chat(sidecar.url)
        streamed = await chat(sidecar.url, body=STREAMED_CHAT)

        assert (plain.status, plain.body) == (200, b'{"id":"1"}')
        assert (streamed.status, streamed.body) == (200, EVENT * 2)
        assert sorted(request.body for request in upstream.requests) == sorted([CHAT, STREAMED_CHAT])
        assert {value for request in upstream.requests for value in request.values("host")} == {
            f"localhost:{upstream.port}".encode()
        }


async def test_large_bodies_pass_both_ways(tmp_path: Path) -> None:
    upload, download = bytes(range(256)) * 12_000, bytes(reversed(range(256))) * 12_000

    async with over_tls(tmp_path, ok(download)) as (upstream, sidecar):
        answer = await ask(sidecar.url, "POST", "/v1/files", body=upload)

        assert answer.body == download
        assert upstream.only_request.body == upload


async def test_server_name_in_the_handshake_is_the_configured_host(tmp_path: Path) -> None:
    names: list[str | None] = []

    async with over_tls(tmp_path, ok(), server_tls("localhost", on_server_name=names.append)) as (_, sidecar):
        answer = await chat(sidecar.url)

        assert answer.status == 200
        assert set(names) == {"localhost"}


async def test_an_address_is_verified_and_not_sent_as_a_server_name(tmp_path: Path) -> None:
    """RFC 6066, 3: literal addresses are no server names."""
    names: list[str | None] = []
    tls = server_tls("127.0.0.1", on_server_name=names.append)
    async with (
        scripted_upstream(ok(), tls=tls) as upstream,
        running_sidecar(upstream.url, gateway={"ca_file": ca_file(tmp_path)}) as sidecar,
    ):
        answer = await chat(sidecar.url)

        assert answer.status == 200
        assert set(names) == {None}


async def test_leaving_client_closes_the_upstream_at_once(tmp_path: Path) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        connection.write(STREAM_HEAD + chunk(EVENT))

    async with over_tls(tmp_path, script) as (upstream, sidecar):
        async with raw_client(sidecar.url) as client:
            client.write(client.request("POST", "/v1/chat/completions", JSON, body=STREAMED_CHAT))
            await client.until(b"word")
            client.close()
            connection = next(connection for connection in upstream.connections if connection.requests)
            await connection.ended(limit_s=1)

        (line,) = await sidecar.ended_exchanges()
        assert line["outcome"] == "client_left"


async def test_upstream_that_breaks_off_breaks_the_client_off(tmp_path: Path) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + chunk(EVENT))
        connection.close()

    async with over_tls(tmp_path, script) as (_, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("POST", "/v1/chat/completions", JSON, body=STREAMED_CHAT))
        await client.head()
        rest = await client.to_end()
        (line,) = await sidecar.ended_exchanges()

        assert rest == chunk(EVENT)
        assert line["outcome"] == "upstream_broke"


@pytest.mark.parametrize("says_goodbye", [True, False], ids=["close-notify", "no-close-notify"])
async def test_a_body_that_ends_with_the_connection_is_whole_only_after_tls_said_so(
    says_goodbye: bool, tmp_path: Path
) -> None:
    """RFC 9112, 9.8: without a length, an answer "is complete only if a valid closure alert has been received".

    A gateway that is killed in the middle ends its TCP connection without one.
    """

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\n\r\nsome of it")
        if says_goodbye:
            connection.close()
        else:
            with socket.socket(fileno=os.dup(connection.transport.get_extra_info("socket").fileno())) as below_tls:
                below_tls.shutdown(socket.SHUT_WR)

    async with over_tls(tmp_path, script) as (_, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("GET", "/v1/files/1"))
        await client.head()
        ending = await client.ended()
        (line,) = await sidecar.ended_exchanges()

        expected = ("FIN", "complete") if says_goodbye else ("RST", "upstream_broke")
        assert (ending, line["outcome"]) == expected


# Refused in words


def words_of(answer: Answer) -> str:
    """The message of an `upstream_unreachable`, in lower case."""
    error = answer.json()["error"]
    assert (answer.status, answer.value("X-Hermes-Sidecar-Error")) == (502, "upstream_unreachable")
    assert (error["code"], error["type"]) == ("upstream_unreachable", "server_error")
    assert error["hint"]
    return str(error["message"]).lower()


@pytest.mark.parametrize(
    ("names", "by", "is_expired", "words"),
    [
        pytest.param(["localhost"], "another authority", False, ["certificate", "issuer"], id="another-authority"),
        pytest.param(["localhost"], "the right one", True, ["certificate", "expired"], id="expired"),
        pytest.param(["other.example"], "the right one", False, ["certificate", "localhost"], id="another-name"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_bad_certificate_is_refused_in_words(
    names: list[str], by: str, is_expired: bool, words: list[str], method: str, tmp_path: Path
) -> None:
    tls = server_tls(*names, by=by, is_expired=is_expired)
    async with over_tls(tmp_path, ok(), tls) as (upstream, sidecar):
        answer = await ask(sidecar.url, method, "/v1/models", body=CHAT if method == "POST" else b"")

        message = words_of(answer)
        assert f"https://localhost:{upstream.port}" in message
        assert [word for word in words if word not in message] == []
        assert upstream.requests == []


async def test_certificate_of_a_private_authority_without_ca_file_is_refused_in_words() -> None:
    async with (
        scripted_upstream(ok(), tls=server_tls("localhost")) as upstream,
        running_sidecar(f"https://localhost:{upstream.port}") as sidecar,
    ):
        answer = await chat(sidecar.url)

        assert "certificate" in words_of(answer)
        assert upstream.requests == []


async def test_a_port_that_speaks_plain_http_is_refused_in_words(tmp_path: Path) -> None:
    async def plain(connection: Connection) -> None:
        await connection.some()  # the first flight of a handshake, which is no request
        await connection.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        connection.close()

    async with (
        scripted_upstream(plain) as upstream,
        running_sidecar(f"https://localhost:{upstream.port}", gateway={"ca_file": ca_file(tmp_path)}) as sidecar,
    ):
        answer = await chat(sidecar.url)

        assert "tls" in words_of(answer)


@pytest.mark.parametrize("by_reset", [False, True], ids=["closes", "resets"])
async def test_a_port_that_hangs_up_on_the_handshake_is_refused_in_words(by_reset: bool, tmp_path: Path) -> None:
    async def hang_up(connection: Connection) -> None:
        await connection.some()
        if by_reset:
            connection.reset()
        else:
            connection.close()

    async with (
        scripted_upstream(hang_up) as upstream,
        running_sidecar(f"https://localhost:{upstream.port}", gateway={"ca_file": ca_file(tmp_path)}) as sidecar,
    ):
        answer = await chat(sidecar.url)

        assert "closed the connection" in words_of(answer)


async def test_a_handshake_that_never_ends_is_given_up_at_the_connect_limit(tmp_path: Path) -> None:
    async def silent(connection: Connection) -> None:
        await connection.ended()

    gateway = {"ca_file": ca_file(tmp_path), "connect_timeout_s": 0.4}
    async with (
        scripted_upstream(silent) as upstream,
        running_sidecar(f"https://localhost:{upstream.port}", gateway=gateway) as sidecar,
    ):
        answer = await chat(sidecar.url, limit_s=1)

        assert "0.4 s" in words_of(answer)
        for connection in upstream.connections:
            await connection.ended(limit_s=1)


async def test_client_that_leaves_during_the_handshake_ends_it(tmp_path: Path) -> None:
    async with (
        scripted_upstream(wait) as upstream,
        running_sidecar(f"https://localhost:{upstream.port}", gateway={"ca_file": ca_file(tmp_path)}) as sidecar,
    ):
        async with raw_client(sidecar.url) as client:
            client.write(client.request("POST", "/v1/chat/completions", JSON, body=CHAT))
            connection = await upstream.connection()
            await connection.some()
            client.close()
            await connection.ended(limit_s=1)

        (line,) = await sidecar.ended_exchanges()
        assert line["outcome"] == "client_left"


async def wait(connection: Connection) -> None:
    """Says nothing."""


async def test_a_tls_port_given_as_http_is_refused_in_words() -> None:
    async with (
        scripted_upstream(ok(), tls=server_tls("localhost")) as upstream,
        running_sidecar(f"http://localhost:{upstream.port}") as sidecar,
    ):
        answer = await chat(sidecar.url)

        assert (answer.status, answer.value("X-Hermes-Sidecar-Error")) == (502, "upstream_protocol_error")
        assert upstream.requests == []


# The handshake is not on a request's way


@asynccontextmanager
async def behind_a_gate(home: Path, script: Script | bytes) -> AsyncIterator[tuple[ScriptedUpstream, Gate, Sidecar]]:
    """A TLS upstream whose handshakes the test can hold back."""
    async with (
        scripted_upstream(script, tls=server_tls("localhost")) as upstream,
        gate_before(upstream.port) as gate,
        running_sidecar(f"https://localhost:{gate.port}", gateway={"ca_file": ca_file(home)}) as sidecar,
    ):
        yield upstream, gate, sidecar


async def test_gets_share_one_connection(tmp_path: Path) -> None:
    async with behind_a_gate(tmp_path, ok()) as (upstream, gate, sidecar):
        first = await ask(sidecar.url, "GET", "/v1/models")
        gate.shut()  # no further handshake can end
        answers = [await ask(sidecar.url, "GET", "/v1/models", limit_s=1) for _ in range(5)]

        assert {first.status, *(answer.status for answer in answers)} == {200}
        assert sorted(len(connection.requests) for connection in upstream.connections if connection.requests) == [6]


async def test_posts_find_a_connection_ready(tmp_path: Path) -> None:
    """Each POST is answered while no handshake can end, so it did not wait for one."""
    async with behind_a_gate(tmp_path, ok()) as (upstream, gate, sidecar):
        await ask(sidecar.url, "GET", "/v1/models")

        for number in range(4):
            await upstream.connection(number + 1)  # the spare; the first connection carried the GET
            gate.shut()
            # After a pause, no connection that served before is fresh enough for a request that must not be repeated.
            await asyncio.sleep(0.15)
            answer = await chat(sidecar.url, body=b"%d" % number, limit_s=1)
            assert answer.status == 200
            gate.open()

        bodies = sorted(request.body for request in upstream.requests if request.method == b"POST")
        assert bodies == [b"0", b"1", b"2", b"3"]


async def test_spares_are_given_up_when_it_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.relay.pool._SPARE_LIMITS_S", (0.3, 0.3))
    for name, limit_s in {"_SWEEP_S": 0.1, "_BUSY_WINDOW_S": 0.5, "_IDLE_LIMIT_S": 0.3}.items():
        monkeypatch.setattr(f"sidecar.relay.pool.{name}", limit_s)

    async with behind_a_gate(tmp_path, ok()) as (upstream, gate, sidecar):
        await ask(sidecar.url, "GET", "/v1/models")
        await upstream.connection(2)  # the first spare grew old while it was still busy, and was renewed

        assert await settled(lambda: all(connection.ending for connection in upstream.connections), limit_s=3)
        seen = gate.arrivals
        await asyncio.sleep(0.5)  # the quiet: nothing may be opened in it
        assert gate.arrivals == seen
        assert (await chat(sidecar.url)).status == 200


async def test_a_failing_spare_is_nobodys_failure(tmp_path: Path) -> None:
    """The gateway stops after the first answer: the spare cannot be opened, and only the next request says so."""
    async with over_tls(tmp_path, ok(b"{}", b"Connection: close")) as (upstream, sidecar):
        first = await chat(sidecar.url)
        await upstream.connection(1)
        await upstream.stop()
        second = await chat(sidecar.url)

        assert first.status == 200
        assert "nothing listens there" in words_of(second)


async def test_a_spare_that_the_upstream_closed_is_not_used(tmp_path: Path) -> None:
    """The upstream gives a new connection 30 ms for its first request, and half of the POSTs come later than that."""

    async def script(connection: Connection) -> None:
        while True:
            try:
                request = await connection.request(limit_s=0.03)
            except TimeoutError:
                connection.close()
                return
            connection.write(ok(request.body))

    async with over_tls(tmp_path, script) as (upstream, sidecar), raw_client(sidecar.url) as client:
        for number in range(40):
            body = b"%d" % number
            answer = await client.ask("POST", "/v1/chat/completions", JSON, body=body)
            assert (answer.status, answer.body) == (200, body), answer.body
            await asyncio.sleep(0.06 if number % 2 else 0.005)  # well after, or well before the upstream's limit

        assert sorted(int(request.body) for request in upstream.requests) == list(range(40))
