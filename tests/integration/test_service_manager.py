"""The sidecar as a systemd service: what it tells the service manager, and sockets that are handed to it.

Everything here runs the command in a process of its own; the service manager is the test.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from sidecar.demo.gateway import DemoGateway
from tests.support.raw_client import JSON, STREAMED_CHAT, RawClient, ask, raw_client
from tests.support.scripted_upstream import (
    LAST_CHUNK,
    STREAM_HEAD,
    Connection,
    chunk,
    clients_request,
    ok,
    scripted_upstream,
)
from tests.support.service_manager import ServiceManager, service_manager
from tests.support.sidecar_process import SidecarProcess, command, environment

NO_GATEWAY = "http://127.0.0.1:9"
EVENT = b'data: {"choices":[{"delta":{"content":"word "}}]}\n\n'
AT_ONCE = {"PROBE__INTERVAL_S": "0.1", "PROBE__RETRY_S": "0.1"}


@asynccontextmanager
async def managed(
    home: Path, gateway_url: str = NO_GATEWAY, *, is_abstract: bool = False, environ: dict[str, str] | None = None
) -> AsyncIterator[tuple[ServiceManager, SidecarProcess]]:
    """A running sidecar that tells a service manager how it is, and ends well."""
    async with service_manager(home, is_abstract=is_abstract) as manager:
        told = {"NOTIFY_SOCKET": manager.address, **(environ or {})}
        async with await SidecarProcess.start(home, gateway_url, AT_ONCE, environ=told) as sidecar:
            yield manager, sidecar


class Streams:
    """An upstream's script: each POST begins a stream, which ends when the test says so."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def __call__(self, connection: Connection) -> None:
        while (await clients_request(connection)).method == b"POST":
            connection.write(STREAM_HEAD + chunk(EVENT))
            await self.may_end.wait()
            connection.write(LAST_CHUNK)


async def begin_stream(client: RawClient) -> None:
    client.write(client.request("POST", "/v1/chat/completions", JSON, body=STREAMED_CHAT))
    assert (await client.head()).status == 200
    await client.exactly(len(chunk(EVENT)))


def listening_socket() -> socket.socket:
    """A socket as systemd opens it: bound and listening before the service is there."""
    return socket.create_server(("127.0.0.1", 0), backlog=512)


def url_of(sock: socket.socket) -> str:
    return f"http://127.0.0.1:{sock.getsockname()[1]}"


# --- What the service manager is told --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_abstract", [False, True], ids=["path", "abstract"])
async def test_ready_is_said_once_the_port_answers_gateway_or_not(is_abstract: bool, tmp_path: Path) -> None:
    async with service_manager(tmp_path, is_abstract=is_abstract) as manager:
        starting = asyncio.ensure_future(
            SidecarProcess.start(tmp_path, NO_GATEWAY, environ={"NOTIFY_SOCKET": manager.address})
        )
        ready = await manager.told("READY", "1", limit_s=20)
        answer = await ask(ready["STATUS"].removeprefix("Listening on "), "GET", "/healthz")
        async with await starting as sidecar:
            first = manager.messages[0][1]

    assert answer.status == 200
    assert first == ready == {"READY": "1", "STATUS": f"Listening on {sidecar.url}"}
    assert manager.said("READY") == ["1"]


async def test_status_has_the_status_word_and_follows_it(tmp_path: Path) -> None:
    gateway = await DemoGateway.start()
    async with managed(tmp_path, gateway.url) as (manager, sidecar):
        try:
            async with asyncio.timeout(10):
                while (answer := await ask(sidecar.url, "GET", "/readyz")).status != 200:
                    await asyncio.sleep(0.02)
            well = await manager.told("STATUS", "Partial: ")
        finally:
            await gateway.stop()
        ill = await manager.told("STATUS", "Disconnected: ")

    assert well["STATUS"] == f"Partial: {answer.json()['reason']}"
    assert "could not be reached" in ill["STATUS"]
    assert len(manager.said("STATUS")) <= 5  # a line for a change, not for a probe


async def test_watchdog_is_fed_from_the_event_loop_in_time(tmp_path: Path) -> None:
    async with managed(tmp_path, environ={"WATCHDOG_USEC": "800000"}) as (manager, _):
        moments = await manager.counted("WATCHDOG", 5, limit_s=10)

    assert max(after - before for before, after in pairwise(moments)) < 0.8
    assert set(manager.said("WATCHDOG")) == {"1"}


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="not-asked-for"),
        pytest.param({"WATCHDOG_USEC": "100000", "WATCHDOG_PID": "1"}, id="of-another-process"),
        pytest.param({"WATCHDOG_USEC": "0"}, id="zero"),
        pytest.param({"WATCHDOG_USEC": "soon"}, id="no-number"),
    ],
)
async def test_watchdog_is_left_alone_where_it_is_not_ours(environ: dict[str, str], tmp_path: Path) -> None:
    async with managed(tmp_path, environ=environ) as (manager, _):
        await manager.told("STATUS", "Disconnected: ")  # a probe has come and gone meanwhile

    assert manager.said("WATCHDOG") == []
    assert manager.said("STOPPING") == ["1"]


async def test_drain_is_told_and_asks_for_time(tmp_path: Path) -> None:
    script = Streams()
    async with (
        scripted_upstream(script) as upstream,
        managed(tmp_path, upstream.url) as (manager, sidecar),
        raw_client(sidecar.url) as client,
    ):
        await begin_stream(client)
        sidecar.send_signal()
        stopping = await manager.told("STOPPING", "1")
        more_time = await manager.told("EXTEND_TIMEOUT_USEC")
        script.may_end.set()
        await client.until(LAST_CHUNK)
        assert await sidecar.ended() == 0

    assert stopping == {"STOPPING": "1", "STATUS": "Draining: 1 running, 30 s at most"}
    assert int(more_time["EXTEND_TIMEOUT_USEC"]) > 5_000_000  # more than the time until it asks again
    assert manager.said("STATUS")[-1] == stopping["STATUS"]
    order = [key for _, message in manager.messages for key in message]
    assert order.index("READY") < order.index("STOPPING") < order.index("EXTEND_TIMEOUT_USEC")


@pytest.mark.parametrize(
    "address", [pytest.param("{home}/nobody", id="path"), pytest.param("@hermes-sidecar-nobody", id="abstract")]
)
async def test_service_manager_that_cannot_be_reached_is_one_warning(address: str, tmp_path: Path) -> None:
    environ = {"NOTIFY_SOCKET": address.format(home=tmp_path), "WATCHDOG_USEC": "100000"}
    async with await SidecarProcess.start(tmp_path, NO_GATEWAY, environ=environ) as sidecar:
        assert (await ask(sidecar.url, "GET", "/healthz")).status == 200
        await sidecar.logged("notify_failed")
        await sidecar.logged('"disconnected"')  # has told more since

    assert sidecar.log.count("notify_failed") == 1


async def test_log_has_journald_levels_where_it_goes_to_the_journal(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("wb+") as journal:
        there = os.fstat(journal.fileno())
        process = await asyncio.create_subprocess_exec(
            *command("serve"),
            env={
                **environment(tmp_path, {"LISTEN__PORT": "0", "GATEWAY__URL": NO_GATEWAY}),
                "JOURNAL_STREAM": f"{there.st_dev}:{there.st_ino}",
            },
            stderr=journal,
        )
        try:
            async with asyncio.timeout(20):
                while b'"disconnected"' not in (text := (tmp_path / "journal").read_bytes()):
                    await asyncio.sleep(0.02)
        finally:
            process.terminate()
            await process.wait()

    listening, status = text.decode().splitlines()[:2]
    assert listening.startswith("<6>{")
    assert status.startswith("<4>{")
    assert json.loads(listening[3:])["event"] == "listening"


# --- Sockets that are handed over ------------------------------------------------------------------------------------


async def test_handed_sockets_are_used_instead_of_the_configured_ones(tmp_path: Path) -> None:
    """A TCP and a Unix socket. The configured port is taken: binding it would end the sidecar."""
    with (
        listening_socket() as tcp,
        listening_socket() as taken,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unix,
    ):
        unix.bind(str(tmp_path / "sidecar.sock"))
        unix.listen()
        settings = {"LISTEN__PORT": str(taken.getsockname()[1])}
        async with await SidecarProcess.start(tmp_path, NO_GATEWAY, settings, handed=[tcp, unix]) as sidecar:
            over_tcp = await ask(url_of(tcp), "GET", "/healthz")
            reader, writer = await asyncio.open_unix_connection(tmp_path / "sidecar.sock")
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            async with asyncio.timeout(5):
                over_unix = await reader.read()
            writer.close()
            assert sidecar.url == url_of(tcp)

    assert over_tcp.status == 200
    assert over_unix.startswith(b"HTTP/1.1 200 OK\r\n")


async def test_sockets_for_another_process_are_left_alone(tmp_path: Path) -> None:
    with listening_socket() as handed:
        async with await SidecarProcess.start(tmp_path, NO_GATEWAY, handed=[handed], handed_to=1) as sidecar:
            answer = await ask(sidecar.url, "GET", "/healthz")
            handed.settimeout(5)
            with socket.create_connection(handed.getsockname(), timeout=5):
                accepted, _ = handed.accept()  # the test is still the only one that listens there
                accepted.close()
            assert sidecar.url != url_of(handed)

    assert answer.status == 200


async def test_restart_under_socket_activation_refuses_no_connection(tmp_path: Path) -> None:
    """Clients connect all the time while one process ends and the next one starts: each gets its answer."""
    statuses: list[int] = []
    restarted = asyncio.Event()

    async def keep_asking(url: str) -> None:
        while not restarted.is_set():
            answer = await ask(url, "GET", "/v1/models", limit_s=20)
            statuses.append(answer.status)

    async with scripted_upstream(_well) as upstream:
        with listening_socket() as held:
            clients: list[asyncio.Future[None]] = []
            for _ in range(3):
                async with await SidecarProcess.start(tmp_path, upstream.url, handed=[held]):
                    clients = clients or [asyncio.ensure_future(keep_asking(url_of(held))) for _ in range(8)]
                    enough = len(statuses) + 100
                    async with asyncio.timeout(20):
                        while len(statuses) < enough:
                            await asyncio.sleep(0.01)
            async with await SidecarProcess.start(tmp_path, upstream.url, handed=[held]):
                restarted.set()
                await asyncio.gather(*clients)

    assert len(statuses) > 300
    refused = [status for status in statuses if status != 200]
    assert refused.count(503) == len(refused)  # came in just before the signal, and was told to try again
    assert len(refused) <= 3 * len(clients)


async def test_who_comes_during_a_drain_is_answered_by_the_next_process(tmp_path: Path) -> None:
    script = Streams()
    async with scripted_upstream(script) as streams, scripted_upstream(_well) as well:
        with listening_socket() as held:
            first = await SidecarProcess.start(tmp_path, streams.url, handed=[held])
            async with raw_client(url_of(held)) as talking:
                await begin_stream(talking)
                first.send_signal()
                await first.logged("draining")
                waiting = asyncio.ensure_future(ask(url_of(held), "GET", "/v1/models", limit_s=20))
                script.may_end.set()
                await talking.until(LAST_CHUNK)
            assert await first.ended() == 0
            async with await SidecarProcess.start(tmp_path, well.url, handed=[held]):
                answer = await waiting

    assert (answer.status, answer.json()) == (200, {"data": []})


async def _well(connection: Connection) -> None:
    while True:
        await clients_request(connection)
        connection.write(ok(b'{"data":[]}'))
