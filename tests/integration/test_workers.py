"""Several workers behind one port, as a user runs them: who answers, who is replaced, how they stop, what is shared."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.raw_client import JSON, STREAMED_CHAT, RawClient, ask, chat, raw_client
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
from tests.support.sidecar_process import SidecarProcess, run

NO_GATEWAY = "http://127.0.0.1:9"
EVENT = b'data: {"choices":[{"delta":{"content":"word "}}]}\n\n'
LIMIT_S = 10.0


@asynccontextmanager
async def two_workers(
    home: Path,
    gateway_url: str = NO_GATEWAY,
    settings: Mapping[str, str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> AsyncIterator[SidecarProcess]:
    """A sidecar with two workers that both listen. It must end with 0, without a traceback, and leave nobody behind."""
    wanted = {"LISTEN__WORKERS": "2", **(settings or {})}
    sidecar = await SidecarProcess.start(home, gateway_url, wanted, environ=environ)
    workers = await both_listen(sidecar)
    try:
        yield sidecar
    finally:
        workers += workers_of(sidecar)
        code = await sidecar.stop()
    assert code == 0, sidecar.log
    assert "Traceback" not in sidecar.log, sidecar.log
    assert [worker for worker in workers if is_alive(worker)] == []


def workers_of(sidecar: SidecarProcess) -> list[psutil.Process]:
    return psutil.Process(sidecar.pid).children() if psutil.pid_exists(sidecar.pid) else []


def is_alive(worker: psutil.Process) -> bool:
    return bool(worker.is_running()) and worker.status() != psutil.STATUS_ZOMBIE


async def both_listen(sidecar: SidecarProcess) -> list[psutil.Process]:
    """The two workers, once the kernel gives connections to both."""
    async with asyncio.timeout(LIMIT_S):
        while len(workers := [worker for worker in workers_of(sidecar) if listens(worker)]) < 2:
            await asyncio.sleep(0.02)  # other processes: they can only be looked at again
    return workers


def listens(worker: psutil.Process) -> bool:
    try:
        return any(connection.status == psutil.CONN_LISTEN for connection in worker.net_connections("tcp"))
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def client_of(sidecar: SidecarProcess, worker: psutil.Process) -> AsyncIterator[RawClient]:
    """A client whose connection this worker has."""
    async with AsyncExitStack() as stack:
        for _ in range(200):
            client = await stack.enter_async_context(raw_client(sidecar.url))
            await client.ask("GET", "/healthz")  # it is accepted then
            if owner(sidecar, client) == worker:
                yield client
                return
    pytest.fail("the kernel gives that worker no connection")


def owner(sidecar: SidecarProcess, client: RawClient) -> psutil.Process | None:
    """The worker that accepted this client."""
    port = client.transport.get_extra_info("sockname")[1]
    for worker in workers_of(sidecar):
        if any(connection.raddr and connection.raddr.port == port for connection in worker.net_connections("tcp")):
            return worker
    return None


class Gateway:
    """An upstream's script: answers a plain request at once; streams go on when the test says so."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def __call__(self, connection: Connection) -> None:
        while True:
            request = await clients_request(connection)
            if b'"stream":true' not in request.body:
                connection.write(ok(b'{"data":[]}'))
                continue
            connection.write(STREAM_HEAD + chunk(EVENT))
            await self.may_end.wait()
            connection.write(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)


async def begin_stream(client: RawClient) -> None:
    client.write(client.request("POST", "/v1/chat/completions", JSON, body=STREAMED_CHAT))
    assert (await client.head()).status == 200
    await client.exactly(len(chunk(EVENT)))


async def end_of_stream(client: RawClient) -> bytes:
    return await client.until(LAST_CHUNK)


# --- Who answers -----------------------------------------------------------------------------------------------------


async def test_both_answer_and_a_scrape_of_either_tells_of_both(tmp_path: Path) -> None:
    async with (
        scripted_upstream(Gateway()) as upstream,
        two_workers(tmp_path, upstream.url) as sidecar,
        AsyncExitStack() as stack,
    ):
        owners = []
        for _ in range(40):
            client = await stack.enter_async_context(raw_client(sidecar.url))
            assert (await client.ask("GET", "/v1/models")).status == 200
            owners.append(owner(sidecar, client))
        workers = workers_of(sidecar)
        figures = []
        for worker in workers:
            async with client_of(sidecar, worker) as scraper:
                figures.append((await scraper.ask("GET", "/metrics")).body.decode())

    assert {worker.pid for worker in owners if worker} == {worker.pid for worker in workers}
    for text in figures:
        assert value_of(text, 'hermes_sidecar_requests_total{code="200",method="GET",route="models"}') == 40
        assert value_of(text, 'hermes_sidecar_request_duration_seconds_count{route="models"}') == 40
        assert value_of(text, 'hermes_sidecar_session_mappings_total{outcome="none",source="none"}') == 40
        # Sums of these would be nonsense: seconds since 1970, the state of the one backend behind both.
        started = [worker.create_time() for worker in workers]
        assert min(started) - 1 < value_of(text, "process_start_time_seconds") < max(started) + 1
        assert max(float(value) for value in re.findall(r"^hermes_sidecar_status\{.*\} (.*)$", text, re.M)) == 1


def value_of(text: str, sample: str) -> float:
    (value,) = re.findall(rf"^{re.escape(sample)} (\S+)$", text, re.M)
    return float(value)


async def test_rotation_learned_by_one_is_followed_by_the_other(tmp_path: Path) -> None:
    """The default store, a file, lies between them."""
    rotated = ok(b"{}", b"X-Hermes-Session-Id: child-2")

    async def rotates(connection: Connection) -> None:
        while True:
            await clients_request(connection)
            connection.write(rotated)

    key = b"X-Hermes-Session-Key: k1"
    async with scripted_upstream(rotates) as upstream, two_workers(tmp_path, upstream.url) as sidecar:
        one, other = await both_listen(sidecar)
        async with client_of(sidecar, one) as first, client_of(sidecar, other) as second:
            before = await second.ask("GET", "/v1/models", key)  # it has heard of the session, and of no rotation
            await first.ask("POST", "/v1/chat/completions", JSON, key, body=STREAMED_CHAT)
            async with asyncio.timeout(LIMIT_S):
                while (after := await second.ask("GET", "/v1/models", key)).value("X-Hermes-Sidecar-Session") == (
                    before.value("X-Hermes-Sidecar-Session")
                ):
                    pass  # the write is on its way to the disk
        sent = [request.values("x-hermes-session-id") for request in upstream.requests if not request.is_probe]

    assert after.value("X-Hermes-Sidecar-Session") == "header:x-hermes-session-key; followed"
    assert [sent[0], sent[1], sent[-1]] == [[b"k1"], [b"k1"], [b"child-2"]]


# --- Who is replaced -------------------------------------------------------------------------------------------------


async def test_killed_worker_is_replaced_while_the_other_serves(tmp_path: Path) -> None:
    gateway = Gateway()
    async with scripted_upstream(gateway) as upstream, two_workers(tmp_path, upstream.url) as sidecar:
        killed, other = await both_listen(sidecar)
        async with client_of(sidecar, other) as streaming, client_of(sidecar, other) as asking:
            await begin_stream(streaming)
            killed.kill()
            assert (await asking.ask("GET", "/v1/models")).status == 200
            await sidecar.logged("worker_died", limit_s=LIMIT_S)
            workers = await both_listen(sidecar)
            (new,) = [worker for worker in workers if worker != other]
            async with client_of(sidecar, new) as client:
                assert (await client.ask("GET", "/v1/models")).status == 200
                assert b"hermes_sidecar_build_info" in (await client.ask("GET", "/metrics")).body
            gateway.may_end.set()
            assert (await end_of_stream(streaming)).endswith(LAST_CHUNK)

    assert killed not in workers
    assert sidecar.log.count("worker_died") == 1


async def test_worker_that_was_told_to_end_ends_well_and_is_replaced(tmp_path: Path) -> None:
    gateway = Gateway()
    async with scripted_upstream(gateway) as upstream, two_workers(tmp_path, upstream.url) as sidecar:
        told, other = await both_listen(sidecar)
        async with client_of(sidecar, told) as streaming:
            await begin_stream(streaming)
            told.terminate()
            told.terminate()
            await sidecar.logged("draining")
            gateway.may_end.set()
            assert (await end_of_stream(streaming)).endswith(LAST_CHUNK)
        await sidecar.logged("worker_died", limit_s=LIMIT_S)
        workers = await both_listen(sidecar)

    assert other in workers
    assert told not in workers


async def test_workers_of_a_killed_supervisor_end_by_themselves(tmp_path: Path) -> None:
    """Nobody would replace them, pass signals on to them, or give the port free."""
    gateway = Gateway()
    async with scripted_upstream(gateway) as upstream:
        sidecar = await SidecarProcess.start(tmp_path, upstream.url, {"LISTEN__WORKERS": "2"})
        workers = await both_listen(sidecar)
        async with client_of(sidecar, workers[0]) as streaming:
            await begin_stream(streaming)
            sidecar.send_signal(signal.SIGKILL)
            async with asyncio.timeout(LIMIT_S):
                while is_alive(workers[1]):
                    await asyncio.sleep(0.02)
            assert is_alive(workers[0])
            gateway.may_end.set()
            assert (await end_of_stream(streaming)).endswith(LAST_CHUNK)
            async with asyncio.timeout(LIMIT_S):
                while is_alive(workers[0]):
                    await asyncio.sleep(0.02)
        assert await sidecar.ended() == -signal.SIGKILL


# --- How they stop ---------------------------------------------------------------------------------------------------


def to_the_supervisor(sidecar: SidecarProcess) -> None:
    sidecar.send_signal()


def to_everybody(sidecar: SidecarProcess) -> None:
    """As a terminal does at Ctrl-C, and systemd where KillMode= is left at its default."""
    for process in (psutil.Process(sidecar.pid), *workers_of(sidecar)):
        process.send_signal(signal.SIGINT)


@pytest.mark.parametrize("stop", [to_the_supervisor, to_everybody])
async def test_stop_lets_the_streams_of_all_workers_finish(
    stop: Callable[[SidecarProcess], None], tmp_path: Path
) -> None:
    gateway = Gateway()
    async with scripted_upstream(gateway) as upstream, two_workers(tmp_path, upstream.url) as sidecar:
        one, other = await both_listen(sidecar)
        async with (
            client_of(sidecar, one) as first,
            client_of(sidecar, other) as second,
            client_of(sidecar, one) as third,
            client_of(sidecar, other) as fourth,
        ):
            await begin_stream(first)
            await begin_stream(second)
            stop(sidecar)
            await sidecar.logged('"draining"', count=2)
            late = [await client.ask("GET", "/v1/models") for client in (third, fourth)]
            gateway.may_end.set()
            ends = [await end_of_stream(first), await end_of_stream(second)]
        assert await sidecar.ended() == 0

    assert [(answer.status, answer.value("X-Hermes-Sidecar-Error")) for answer in late] == [(503, "draining")] * 2
    assert [end.endswith(b"data: [DONE]\n\n\r\n" + LAST_CHUNK) for end in ends] == [True, True]


async def test_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    gateway = Gateway()
    async with scripted_upstream(gateway) as upstream, two_workers(tmp_path, upstream.url) as sidecar:
        one, other = await both_listen(sidecar)
        async with client_of(sidecar, one) as first, client_of(sidecar, other) as second:
            await begin_stream(first)
            await begin_stream(second)
            sidecar.send_signal()
            await sidecar.logged('"draining"', count=2)
            sidecar.send_signal()
            assert await sidecar.ended(5) == 0
            rests = [await first.to_end(), await second.to_end()]

    assert not any(rest.endswith(LAST_CHUNK) for rest in rests)


async def test_sighup_reaches_all(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("the-first-token-of-clients\n")
    tokens.chmod(0o600)
    async with (
        scripted_upstream(Gateway()) as upstream,
        two_workers(tmp_path, upstream.url, {"LISTEN__TOKENS_FILE": str(tokens)}) as sidecar,
    ):
        one, other = await both_listen(sidecar)
        async with client_of(sidecar, one) as first, client_of(sidecar, other) as second:
            tokens.write_text("the-second-token-of-clients\n")
            sidecar.send_signal(signal.SIGHUP)
            await sidecar.logged('"reloaded"', count=2)
            statuses = [
                (await client.ask("GET", "/v1/models", b"Authorization: Bearer the-%b-token-of-clients" % word)).status
                for client in (first, second)
                for word in (b"first", b"second")
            ]

    assert statuses == [401, 200, 401, 200]


# --- Where they listen -----------------------------------------------------------------------------------------------


async def test_port_that_another_program_has_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, output = await run(tmp_path, "serve", settings={"LISTEN__PORT": port, "LISTEN__WORKERS": "2"})

    assert code == 1
    assert output.splitlines() == [
        f"hermes-sidecar: 127.0.0.1:{port} is taken by another program; stop it, or set listen.port to a free port."
    ]


async def test_port_of_another_sidecar_with_workers_is_taken_too(tmp_path: Path) -> None:
    """Both share their port with their own workers, so the kernel would let them share it with each other."""
    async with two_workers(tmp_path) as sidecar:
        port = sidecar.url.rpartition(":")[2]
        code, output = await run(tmp_path, "serve", settings={"LISTEN__PORT": port, "LISTEN__WORKERS": "2"})

    assert (code, len(output.splitlines())) == (1, 1)
    assert f"127.0.0.1:{port} is taken" in output


async def test_admin_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        admin = {"ADMIN__HOST": "127.0.0.1", "ADMIN__PORT": str(taken.getsockname()[1])}
        code, output = await run(tmp_path, "serve", settings={"LISTEN__PORT": "0", "LISTEN__WORKERS": "2", **admin})

    assert code == 1
    assert [line for line in output.splitlines() if line.startswith("hermes-sidecar: ")] != []
    assert "Traceback" not in output


async def test_unix_socket_and_admin_port_are_there_and_come_back_with_a_new_worker(tmp_path: Path) -> None:
    with free_port() as admin_port:
        settings = {
            "LISTEN__UNIX_SOCKET": str(tmp_path / "sidecar.sock"),
            "ADMIN__HOST": "127.0.0.1",
            "ADMIN__PORT": str(admin_port),
        }
    admin_url = f"http://127.0.0.1:{admin_port}"
    async with scripted_upstream(Gateway()) as upstream, two_workers(tmp_path, upstream.url, settings) as sidecar:
        for worker in await both_listen(sidecar):
            assert await over_unix(tmp_path / "sidecar.sock") == b"HTTP/1.1 200 OK"
            assert (await ask(admin_url, "GET", "/healthz")).status == 200
            text = (await ask(admin_url, "GET", "/metrics")).body.decode()
            assert value_of(text, 'hermes_sidecar_requests_total{code="200",method="GET",route="models"}') >= 1
            died = sidecar.log.count("worker_died")
            worker.kill()
            await sidecar.logged("worker_died", count=died + 1, limit_s=LIMIT_S)
            await both_listen(sidecar)
            async with asyncio.timeout(LIMIT_S):  # the worker that has them may be the one that was killed
                while not (await answers(admin_url) and (tmp_path / "sidecar.sock").is_socket()):
                    await asyncio.sleep(0.02)
            assert await over_unix(tmp_path / "sidecar.sock") == b"HTTP/1.1 200 OK"


@contextmanager
def free_port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


async def answers(url: str) -> bool:
    try:
        return (await ask(url, "GET", "/healthz")).status == 200
    except OSError:
        return False


async def over_unix(path: Path) -> bytes:
    async with asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
    return answer.partition(b"\r\n")[0]


# --- As a service ----------------------------------------------------------------------------------------------------


async def test_service_manager_hears_of_all_workers_as_of_one(tmp_path: Path) -> None:
    async with service_manager(tmp_path) as manager:
        environ = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "1000000"}
        async with two_workers(tmp_path, environ=environ) as sidecar:
            ready = await manager.told("READY", limit_s=LIMIT_S)
            await manager.counted("WATCHDOG", 4, limit_s=LIMIT_S)
            _, stuck = await both_listen(sidecar)
            stuck.suspend()
            try:
                async with asyncio.timeout(LIMIT_S):
                    while (count := len(manager.said("WATCHDOG"))) != await fed_a_while_later(manager):
                        pass  # what was on its way when the worker began to hang
            finally:
                stuck.resume()
            await manager.counted("WATCHDOG", count + 1, limit_s=LIMIT_S)
            sidecar.send_signal()
            await manager.told("STOPPING", limit_s=LIMIT_S)

    assert ready == {"READY": "1", "STATUS": f"Listening on {sidecar.url} with 2 workers"}
    assert manager.said("READY") == ["1"]
    assert manager.said("STOPPING") == ["1"]


async def fed_a_while_later(manager: ServiceManager) -> int:
    """How often the watchdog was fed, after more than its time: that nothing happens can only be waited for."""
    await asyncio.sleep(1.2)
    return len(manager.said("WATCHDOG"))


async def test_handed_socket_is_served_by_all(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as handed:
        sidecar = await SidecarProcess.start(tmp_path, NO_GATEWAY, {"LISTEN__WORKERS": "2"}, handed=[handed])
        try:
            workers = await both_listen(sidecar)
            assert sidecar.url == f"http://127.0.0.1:{handed.getsockname()[1]}"
            for worker in workers:
                async with client_of(sidecar, worker) as client:
                    assert (await client.ask("GET", "/healthz")).status == 200
            answer = await chat(sidecar.url)
        finally:
            code = await sidecar.stop()

    assert code == 0, sidecar.log
    assert answer.value("X-Hermes-Sidecar-Error") == "upstream_unreachable"
