"""Where the gateway is: names with several addresses, addresses that do not answer, and no way round by a proxy."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from sidecar import sockets
from sidecar.relay import connecting
from tests.support.footprint import Footprint, settled
from tests.support.raw_client import CHAT, JSON, ask, chat, raw_client
from tests.support.raw_http import Answer
from tests.support.scripted_upstream import Connection, answering, ok, scripted_upstream
from tests.support.sidecar_process import SidecarProcess
from tests.support.sidecars import running_sidecar

Infos = list[tuple[Any, ...]]
Resolver = Callable[[int], Awaitable[Infos]]

NAME = "gateway.example"
HERE = "127.0.0.1"
REFUSING, SILENT = "127.0.0.2", "127.0.0.3"  # loopback, too; nothing listens there by itself


def resolve(monkeypatch: pytest.MonkeyPatch, name: str, find: Resolver) -> None:
    """Makes the running loop find `name` by `find`, and every other name as before."""
    loop = asyncio.get_running_loop()
    as_before = loop.getaddrinfo

    async def getaddrinfo(host: str, port: int, **options: Any) -> Infos:
        return await (find(port) if host == name else as_before(host, port, **options))

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str, name: str = NAME) -> None:
    """Makes the running loop find these `addresses`, in this order, for `name`."""

    async def find(port: int) -> Infos:
        tail = (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        return [
            (socket.AF_INET6, *tail, (address, port, 0, 0))
            if ":" in address
            else (socket.AF_INET, *tail, (address, port))
            for address in addresses
        ]

    resolve(monkeypatch, name, find)


@contextmanager
def unanswered_address(address: str = HERE, port: int = 0) -> Iterator[int]:
    """A port whose connects are never answered: its queue is full, and nobody takes from it."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, port))
        server.listen(0)
        where = server.getsockname()
        while True:
            filler = stack.enter_context(socket.socket())
            filler.settimeout(0.1)
            try:
                filler.connect(where)
            except TimeoutError:
                break
        yield where[1]


@contextmanager
def closed_port() -> Iterator[int]:
    """A port that is bound, so that nobody else gets it, but where nothing listens."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # but a test may share it
        held.bind((HERE, 0))
        yield held.getsockname()[1]


def error_of(answer: Answer) -> dict[str, str]:
    """The error of an `upstream_unreachable`."""
    assert (answer.status, answer.value("X-Hermes-Sidecar-Error")) == (502, "upstream_unreachable")
    assert answer.value("Content-Type") == "application/json; charset=utf-8"
    error: dict[str, str] = answer.json()["error"]
    assert error["code"] == "upstream_unreachable"
    return error


async def asked(url: str, method: str) -> tuple[Answer, float]:
    """The answer to GET /v1/models or to a chat, and how long it took."""
    asked_at = time.monotonic()
    answer = await (chat(url) if method == "POST" else ask(url, "GET", "/v1/models"))
    return answer, time.monotonic() - asked_at


METHODS = pytest.mark.parametrize("method", ["GET", "POST"])


# Several addresses


@METHODS
async def test_an_address_that_refuses_is_followed_by_the_next(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, REFUSING, HERE)
    async with scripted_upstream(ok()) as upstream, running_sidecar(f"http://{NAME}:{upstream.port}") as sidecar:
        answer, took_s = await asked(sidecar.url, method)

        assert (answer.status, len(upstream.requests)) == (200, 1)
        assert upstream.only_request.values("host") == [f"{NAME}:{upstream.port}".encode()]
        assert took_s < 0.2


@METHODS
async def test_an_address_that_never_answers_is_followed_by_the_next(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_to(monkeypatch, SILENT, HERE)
    async with scripted_upstream(ok()) as upstream, running_sidecar(f"http://{NAME}:{upstream.port}") as sidecar:
        with unanswered_address(SILENT, upstream.port):
            answer, took_s = await asked(sidecar.url, method)

        assert (answer.status, len(upstream.requests)) == (200, 1)
        assert took_s < 1


@pytest.mark.parametrize("addresses", [("::1", HERE), (HERE, "::1")], ids=["ipv6-first", "ipv4-first"])
@pytest.mark.parametrize("listens_at", [HERE, "::1"], ids=["at-ipv4", "at-ipv6"])
async def test_localhost_means_both_loopback_addresses(
    addresses: tuple[str, str], listens_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if listens_at == "::1" and not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    resolve_to(monkeypatch, *addresses, name="localhost")

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ok())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer_once, listens_at, 0)
    try:
        port = server.sockets[0].getsockname()[1]
        async with running_sidecar(f"http://localhost:{port}") as sidecar:
            answer = await ask(sidecar.url, "GET", "/v1/models")
    finally:
        server.close()

    assert answer.status == 200


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


async def test_a_literal_ipv6_address_is_a_gateway() -> None:
    if not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    hosts: list[bytes] = []

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        hosts.extend(line[6:] for line in head.split(b"\r\n") if line.lower().startswith(b"host: "))
        writer.write(ok())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer_once, "::1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        async with running_sidecar(f"http://[::1]:{port}") as sidecar:
            answer = await ask(sidecar.url, "GET", "/v1/models")
    finally:
        server.close()

    assert (answer.status, hosts) == (200, [f"[::1]:{port}".encode()])


# Nothing there


@METHODS
@pytest.mark.parametrize("host", [HERE, "localhost"])
async def test_a_closed_port_is_told_with_its_address_and_what_to_start(method: str, host: str) -> None:
    with closed_port() as port:
        async with running_sidecar(f"http://{host}:{port}") as sidecar:
            answer, took_s = await asked(sidecar.url, method)

    error = error_of(answer)
    assert f"http://{host}:{port}" in error["message"]
    assert "nothing listens there" in error["message"]
    assert "Start the gateway" in error["hint"]
    assert took_s < 1


async def test_a_name_whose_addresses_all_refuse_says_that_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most ordinary fault of all: `localhost` means ::1 and 127.0.0.1, and the gateway was not started."""
    resolve_to(monkeypatch, "::1", HERE, name="localhost")
    with closed_port() as port:
        async with running_sidecar(f"http://localhost:{port}") as sidecar:
            answer = await chat(sidecar.url)

    assert "nothing listens there" in error_of(answer)["message"]


@METHODS
@pytest.mark.parametrize("by_name", [False, True], ids=["by-address", "by-name"])
async def test_connects_that_are_never_answered_end_at_the_connect_limit(
    method: str, by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_to(monkeypatch, HERE)
    with unanswered_address() as port:
        url = f"http://{NAME if by_name else HERE}:{port}"
        async with running_sidecar(url, gateway={"connect_timeout_s": 0.5}) as sidecar:
            answer, took_s = await asked(sidecar.url, method)

    error = error_of(answer)
    assert url in error["message"]
    assert "0.5 s" in error["message"]
    assert 0.45 <= took_s < 1


async def test_a_client_that_leaves_while_connecting_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, HERE)
    with unanswered_address() as port:
        async with running_sidecar(f"http://{NAME}:{port}") as sidecar:
            before = Footprint.now()
            async with raw_client(sidecar.url) as client:
                client.write(client.request("POST", "/v1/chat/completions", JSON, body=CHAT))
                assert await settled(lambda: len(sidecar.running._app.relay.exchanges) == 1)
                assert await settled(lambda: len(asyncio.all_tasks()) > before.tasks)
            (line,) = await sidecar.ended_exchanges(limit_s=1)

            assert line["outcome"] == "client_left"
            assert await settled(lambda: Footprint.now() == before), (before, Footprint.now())


async def test_a_name_that_cannot_be_resolved_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    async def find(_: int) -> Infos:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    resolve(monkeypatch, NAME, find)
    async with running_sidecar(f"http://{NAME}:8642") as sidecar:
        answer = await chat(sidecar.url)

    error = error_of(answer)
    assert f"http://{NAME}:8642" in error["message"]
    assert "name could not be resolved" in error["message"]


async def test_a_resolver_that_never_answers_ends_at_the_connect_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def find(_: int) -> Infos:
        await asyncio.Event().wait()
        return []

    resolve(monkeypatch, NAME, find)
    async with running_sidecar(f"http://{NAME}:8642", gateway={"connect_timeout_s": 0.3}) as sidecar:
        answer, took_s = await asked(sidecar.url, "POST")

    assert "0.3 s" in error_of(answer)["message"]
    assert took_s < 1


async def test_a_name_that_no_resolver_takes_is_told_in_words() -> None:
    """A label of more than 63 letters fails in Python's own encoding of names, not in the resolver."""
    async with running_sidecar(f"http://{'a' * 64}.example:8642") as sidecar:
        answer = await chat(sidecar.url)

    assert "name could not be resolved" in error_of(answer)["message"]


async def test_the_gateway_is_found_as_soon_as_it_is_there() -> None:
    with closed_port() as port:
        async with running_sidecar(f"http://{HERE}:{port}") as sidecar:
            absent = await chat(sidecar.url)
            async with listening_at(port):
                present = await chat(sidecar.url)
            gone = await chat(sidecar.url)

    assert (absent.status, present.status, gone.status) == (502, 200, 502)


@asynccontextmanager
async def listening_at(port: int) -> AsyncIterator[None]:
    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ok(b"{}", b"Connection: close"))
        await writer.drain()
        writer.close()

    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((HERE, port))
    server = await asyncio.start_server(answer_once, sock=sock)
    try:
        yield
    finally:
        server.close()


# No way round


async def test_proxy_variables_and_netrc_are_ignored(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login somebody password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    async with scripted_upstream(ok()) as upstream, scripted_upstream(ok(b"from the proxy")) as proxy:
        names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
        environ = {**dict.fromkeys(names, proxy.url), "NETRC": str(tmp_path / ".netrc")}
        async with await SidecarProcess.start(tmp_path, upstream.url, environ=environ) as sidecar:
            answers = [await chat(sidecar.url), await ask(sidecar.url, "GET", "/v1/models")]
            await ask(sidecar.url, "GET", "/readyz")  # the sidecar's own questions go no other way

        assert [answer.status for answer in answers] == [200, 200]
        asked = [request.target for request in upstream.requests if not request.is_probe]
        assert asked == [b"/v1/chat/completions", b"/v1/models"]
        assert [request for request in upstream.requests if request.values("authorization")] == []
        hosts = {value for request in upstream.requests for value in request.values("host")}
        assert hosts == {f"127.0.0.1:{upstream.port}".encode()}
        assert proxy.connections == []


# Vanished peers


@pytest.mark.parametrize("by_name", [False, True], ids=["by-address", "by-name"])
async def test_both_sides_of_a_silent_exchange_are_kept_alive_by_tcp(
    by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents are silent for minutes: a peer that vanished must be found out by the kernel, in a minute or so."""
    resolve_to(monkeypatch, HERE)

    asked = asyncio.Event()

    async def silent(connection: Connection) -> None:
        await connection.request()
        asked.set()

    async with (
        scripted_upstream(silent) as upstream,
        running_sidecar(f"http://{NAME if by_name else HERE}:{upstream.port}") as sidecar,
        raw_client(sidecar.url) as client,
    ):
        client.write(client.request("POST", "/v1/chat/completions", JSON, body=CHAT))
        connection = await upstream.connection()
        async with asyncio.timeout(1):
            await asked.wait()
        towards_upstream = connection.transport.get_extra_info("peername")
        towards_client = client.transport.get_extra_info("sockname")

        assert _vanished_after_s(local=towards_upstream) <= 90
        assert _vanished_after_s(remote=towards_client) <= 90


@pytest.fixture
def ahead_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    """As far as a client may run ahead here: other than what sockets have by themselves on this system."""
    monkeypatch.setattr(sockets, "LOOPBACK_AHEAD_BYTES", 48 * 1024)
    return 48 * 1024


async def test_client_on_this_machine_runs_less_far_ahead(ahead_bytes: int) -> None:
    async with (
        scripted_upstream(answering(ok())) as upstream,
        running_sidecar(f"http://{HERE}:{upstream.port}") as sidecar,
        raw_client(sidecar.url) as client,
    ):
        client.write(client.request("GET", "/v1/models"))
        assert (await client.head()).status == 200
        (accepted,) = sidecar.running._app.relay.clients
        sock = accepted.transport.get_extra_info("socket")

        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) <= 2 * ahead_bytes


@pytest.mark.usefixtures("ahead_bytes")
def test_client_elsewhere_may_keep_the_network_busy() -> None:
    with sockets.tcp_socket("0.0.0.0", 0) as sock:
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        sockets.set_for_clients(sock)

        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == before


async def test_upstream_on_this_machine_is_sent_less_far_ahead() -> None:
    async with (
        scripted_upstream(answering(ok())) as upstream,
        running_sidecar(f"http://{HERE}:{upstream.port}") as sidecar,
        raw_client(sidecar.url) as client,
    ):
        client.write(client.request("GET", "/v1/models"))
        assert (await client.head()).status == 200
        towards_upstream = (await upstream.connection()).transport.get_extra_info("peername")

        with _own_socket(local=towards_upstream) as sock:
            ahead_bytes = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        counted = (1, 2)  # Linux adds a share of its own
        assert ahead_bytes in [times * connecting.LOOPBACK_SENT_AHEAD_BYTES for times in counted]


@pytest.mark.parametrize("peer", [("192.0.2.1", 443), ("2001:db8::1", 443, 0, 0), None])
def test_upstream_elsewhere_is_sent_as_much_as_the_network_takes(peer: tuple[Any, ...] | None) -> None:
    with socket.socket() as sock:
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        connecting.run_less_far_ahead(sock, peer)

        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before


def _vanished_after_s(*, local: tuple[str, int] | None = None, remote: tuple[str, int] | None = None) -> int:
    """When the kernel gives up the peer of that socket."""
    with _own_socket(local=local, remote=remote) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle_s, interval_s, count = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
    return idle_s + interval_s * count


def _own_socket(*, local: tuple[str, int] | None = None, remote: tuple[str, int] | None = None) -> socket.socket:
    """The socket of this process that has this address at this end, or a peer with that one."""
    (number,) = [
        connection.fd
        for connection in psutil.Process().net_connections("tcp")
        if connection.raddr and (connection.laddr == local or connection.raddr == remote)
    ]
    return socket.socket(fileno=os.dup(number))
