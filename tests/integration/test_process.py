"""The command as a service manager runs it: how it starts, what it says, and how it stops in every situation."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import structlog

from sidecar import compiled, process
from sidecar.config import Settings
from tests.support.raw_client import CHAT, JSON, STREAMED_CHAT, RawClient, ask, chat, raw_client
from tests.support.raw_http import Answer
from tests.support.scripted_upstream import (
    LAST_CHUNK,
    STREAM_HEAD,
    Connection,
    Received,
    ScriptedUpstream,
    chunk,
    clients_request,
    ok,
    scripted_upstream,
)
from tests.support.sidecar_process import SidecarProcess, command, environment, run

EVENT = b'data: {"choices":[{"delta":{"content":"word "}}]}\n\n'
SOON_S = 1.5
"""From the last thing that holds it up to the end of the process, on a busy machine."""


@asynccontextmanager
async def serving(
    home: Path, gateway_url: str, *, stops_by_itself: bool = False, **settings: str
) -> AsyncIterator[SidecarProcess]:
    """A running sidecar, which must end with 0 and without a traceback."""
    sidecar = await SidecarProcess.start(home, gateway_url, settings)
    try:
        yield sidecar
    finally:
        code = await (sidecar.ended(5) if stops_by_itself else sidecar.stop())
    assert code == 0, sidecar.log
    assert "Traceback" not in sidecar.log, sidecar.log


async def end_of(sidecar: SidecarProcess, limit_s: float = SOON_S) -> tuple[int, float]:
    """The exit code, and how long the end took from now."""
    asked_at = time.monotonic()
    code = await sidecar.ended(limit_s)
    return code, time.monotonic() - asked_at


def log_lines(sidecar: SidecarProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in sidecar.log.splitlines()]


def code_of(answer: Answer) -> tuple[int, str]:
    """Status and code of an error of the sidecar's own, the header and the body agreeing."""
    code = str(answer.json()["error"]["code"])
    assert answer.value("X-Hermes-Sidecar-Error") == code
    return answer.status, code


async def streaming(client: RawClient) -> None:
    """Sends a streamed chat and reads the first event of its answer."""
    client.write(client.request("POST", "/v1/chat/completions", JSON, body=STREAMED_CHAT))
    assert (await client.head()).status == 200
    await client.exactly(len(chunk(EVENT)))


def of_clients(upstream: ScriptedUpstream) -> list[Received]:
    """What the upstream was asked by others than the sidecar itself."""
    return [request for request in upstream.requests if not request.is_probe]


class Stream:
    """An upstream's script: answers GET, begins a stream at each POST, and goes on when the test says so."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.streaming: list[Connection] = []

    async def __call__(self, connection: Connection) -> None:
        while True:
            request = await clients_request(connection)
            if request.method == b"GET":
                connection.write(ok(b"{}"))
                continue
            self.streaming.append(connection)
            connection.write(STREAM_HEAD + chunk(EVENT))
            await self.go_on.wait()
            connection.write(chunk(EVENT) + LAST_CHUNK)


# Starting


async def test_first_log_line_names_the_url_and_the_gateway(tmp_path: Path) -> None:
    async with serving(tmp_path, "http://127.0.0.1:9", LOG__LEVEL="debug") as sidecar:
        first = log_lines(sidecar)[0]
        answer = await ask(sidecar.url, "GET", "/healthz")

    assert (first["event"], first["url"], first["gateway"]) == ("listening", sidecar.url, "http://127.0.0.1:9")
    assert answer.status == 200


@pytest.mark.parametrize("modules", [[], ["relay/wire"]])
def test_start_tells_whether_it_is_compiled_and_warns_only_of_what_is_stale(
    modules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "modules", lambda: modules)
    monkeypatch.setattr(compiled, "stale", lambda: modules)

    with structlog.testing.capture_logs() as lines:
        process._say_listening("http://127.0.0.1:8650", Settings())

    assert lines[0]["compiled"] is bool(modules)
    assert [(line["event"], line["log_level"], line["modules"]) for line in lines[1:]] == (
        [("compiled_stale", "warning", modules)] if modules else []
    )


async def test_first_line_names_both_on_a_console(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *command("serve"),
        env=environment(tmp_path, {"LISTEN__PORT": "0", "LOG__FORMAT": "console"}),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(10):
            first = (await process.stderr.readline()).decode()
    finally:
        process.terminate()
        await process.wait()

    assert "http://127.0.0.1:8642" in first
    assert "http://127.0.0.1:" in first.replace("http://127.0.0.1:8642", "")


async def test_taken_port_is_one_line_that_names_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = await run(tmp_path, "serve", settings={"LISTEN__PORT": str(port)})

    assert code == 1
    assert len(output.splitlines()) == 1
    assert f"127.0.0.1:{port}" in output
    assert "taken" in output


async def test_second_sidecar_on_the_port_of_a_running_one_ends_and_harms_nobody(tmp_path: Path) -> None:
    async with scripted_upstream(ok()) as upstream, serving(tmp_path, upstream.url) as sidecar:
        port = str(urlsplit(sidecar.url).port)
        code, output = await run(tmp_path, "serve", settings={"LISTEN__PORT": port})
        answers = [await chat(sidecar.url) for _ in range(4)]

    assert (code, len(output.splitlines()), port in output) == (1, 1, True)
    assert [answer.status for answer in answers] == [200] * 4


async def test_absent_gateway_is_no_reason_not_to_start(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, so that nobody else gets it, but nothing listens
        gateway = f"http://127.0.0.1:{held.getsockname()[1]}"
        async with serving(tmp_path, gateway) as sidecar:
            answer = await chat(sidecar.url)
            health = await ask(sidecar.url, "GET", "/healthz")
            ready = await ask(sidecar.url, "GET", "/readyz")

    error = answer.json()["error"]
    assert code_of(answer) == (502, "upstream_unreachable")
    assert gateway in error["message"]
    assert "Start the gateway" in error["hint"]
    assert (health.status, ready.status) == (200, 503)


async def test_unknown_key_in_file_and_environment_are_told_with_the_nearest_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[gateway]\nconect_timeout_s = 1\n")

    code, output = await run(tmp_path, "serve", "--config", str(file), settings={"LISTEN__PROT": "1"})

    assert code == 2
    assert len(output.splitlines()) == 2
    assert "gateway.connect_timeout_s" in output
    assert "HERMES_SIDECAR_LISTEN__PORT" in output


async def test_unix_socket_is_served_beside_the_port_by_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "sidecar.sock"
    async with scripted_upstream(ok(b"{}")) as upstream:
        for _ in range(2):  # the second start finds what the first has left
            async with serving(tmp_path, upstream.url, LISTEN__UNIX_SOCKET=str(path)) as sidecar:
                mode = stat.S_IMODE(path.stat().st_mode)
                by_socket = await chat_over_unix_socket(path)
                by_port = await chat(sidecar.url)

            assert (mode, by_socket.partition(b"\r\n")[0], by_port.status) == (0o600, b"HTTP/1.1 200 OK", 200)


async def test_unix_socket_of_a_killed_sidecar_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "sidecar.sock"
    async with scripted_upstream(ok(b"{}")) as upstream:
        killed = await SidecarProcess.start(tmp_path, upstream.url, {"LISTEN__UNIX_SOCKET": str(path)})
        killed.send_signal(signal.SIGKILL)
        await killed.ended()
        assert path.is_socket()
        async with serving(tmp_path, upstream.url, LISTEN__UNIX_SOCKET=str(path)):
            answer = await chat_over_unix_socket(path)

    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("what", ["answered", "a file", "no directory"])
async def test_unix_socket_that_cannot_be_is_one_line_that_names_it(what: str, tmp_path: Path) -> None:
    path = tmp_path / "sidecar.sock"
    with socket.socket(socket.AF_UNIX) as other:
        match what:
            case "answered":
                other.bind(str(path))
                other.listen()
            case "a file":
                path.write_text("somebody's notes")
            case "no directory":
                path = tmp_path / "missing" / "sidecar.sock"
        code, output = await run(tmp_path, "serve", settings={"LISTEN__PORT": "0", "LISTEN__UNIX_SOCKET": str(path)})

    assert code == 1
    assert len(output.splitlines()) == 1, output
    assert str(path) in output
    if what == "a file":
        assert path.read_text() == "somebody's notes"


async def chat_over_unix_socket(path: Path) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n%b" % (len(CHAT), CHAT))
    async with asyncio.timeout(5):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


# Stopping while a stream runs


async def test_running_stream_ends_before_the_process_does(tmp_path: Path) -> None:
    script = Stream()
    async with (
        scripted_upstream(script) as upstream,
        serving(tmp_path, upstream.url, stops_by_itself=True) as sidecar,
        raw_client(sidecar.url) as client,
        raw_client(sidecar.url) as kept_alive,
    ):
        assert (await kept_alive.ask("GET", "/v1/models")).status == 200
        await streaming(client)
        sidecar.send_signal()
        await sidecar.logged("draining")

        meanwhile = [
            await chat(sidecar.url),
            await ask(sidecar.url, "GET", "/v1/models"),
            await kept_alive.ask("POST", "/v1/chat/completions", JSON, body=CHAT),
        ]
        ready, health = await ask(sidecar.url, "GET", "/readyz"), await ask(sidecar.url, "GET", "/healthz")
        seen_by_upstream = len(of_clients(upstream))
        script.go_on.set()
        rest = await client.until(LAST_CHUNK)
        code, took_s = await end_of(sidecar)

        assert [code_of(answer) for answer in meanwhile] == [(503, "draining")] * 3
        assert [int(answer.value("Retry-After") or 0) >= 1 for answer in meanwhile] == [True] * 3
        assert (code_of(ready), health.status) == ((503, "draining"), 200)
        assert seen_by_upstream == 2
        assert rest == chunk(EVENT) + LAST_CHUNK
        assert (code, took_s < SOON_S) == (0, True)


async def test_stream_that_outlasts_the_grace_is_broken_off(tmp_path: Path) -> None:
    script = Stream()
    async with (
        scripted_upstream(script) as upstream,
        serving(tmp_path, upstream.url, stops_by_itself=True, SHUTDOWN__GRACE_S="0.5") as sidecar,
        raw_client(sidecar.url) as client,
    ):
        await streaming(client)
        sidecar.send_signal()
        stopped_at = time.monotonic()
        rest = await client.to_end()
        broken_after_s = time.monotonic() - stopped_at
        code, took_s = await end_of(sidecar)
        await script.streaming[0].ended(limit_s=1)

        assert rest == b""  # no last chunk: the client must see that the answer is incomplete
        assert 0.4 <= broken_after_s < 0.5 + SOON_S
        assert (code, took_s < SOON_S) == (0, True)
        (ended,) = [line for line in log_lines(sidecar) if line["event"] == "exchange_ended"]
        assert ended["outcome"] == "drained"


async def test_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with (
        scripted_upstream(Stream()) as upstream,
        serving(tmp_path, upstream.url, stops_by_itself=True) as sidecar,
        raw_client(sidecar.url) as client,
    ):
        await streaming(client)
        sidecar.send_signal()
        await sidecar.logged("draining")
        sidecar.send_signal()
        code, took_s = await end_of(sidecar)
        rest = await client.to_end()

        assert (code, took_s < SOON_S, rest) == (0, True, b"")


async def test_chat_that_has_no_answer_yet_is_broken_off_at_the_end_of_the_grace(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def silent(connection: Connection) -> None:
        await clients_request(connection)
        asked.set()

    async with (
        scripted_upstream(silent) as upstream,
        serving(tmp_path, upstream.url, stops_by_itself=True, SHUTDOWN__GRACE_S="0.3") as sidecar,
        raw_client(sidecar.url) as client,
    ):
        client.write(client.request("POST", "/v1/chat/completions", JSON, body=STREAMED_CHAT))
        async with asyncio.timeout(5):
            await asked.wait()
        sidecar.send_signal()
        answer = await client.to_end()
        code, _ = await end_of(sidecar)

        assert (code, b" 200 " in answer) == (0, False)


# Stopping in other situations


async def test_idle_connections_do_not_hold_it_up(tmp_path: Path) -> None:
    async with (
        scripted_upstream(ok()) as upstream,
        serving(tmp_path, upstream.url, stops_by_itself=True) as sidecar,
        raw_client(sidecar.url) as used,
        raw_client(sidecar.url) as fresh,
        raw_client(sidecar.url) as begun,
    ):
        await used.ask("GET", "/v1/models")
        await fresh.ask("GET", "/healthz")
        begun.write(b"POST /v1/chat/completions HT")
        sidecar.send_signal()
        code, took_s = await end_of(sidecar)

        assert (code, took_s < SOON_S) == (0, True)
        for client in (used, fresh, begun):
            await client.ended(limit_s=1)


class Upload:
    """An upstream's script: reads an upload of 200,000 bytes, whose beginning it reports, and answers it."""

    def __init__(self) -> None:
        self.begun: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self.bodies: list[bytes] = []

    async def __call__(self, connection: Connection) -> None:
        while (await connection.head(limit_s=60)).method == b"GET":
            connection.write(ok(b"{}"))
        first = await connection.exactly(1)
        self.begun.set_result(connection)
        self.bodies.append(first + await connection.exactly(199_999))
        connection.write(ok(b"{}"))


async def test_upload_in_progress_is_finished(tmp_path: Path) -> None:
    script = Upload()
    async with (
        scripted_upstream(script) as upstream,
        serving(tmp_path, upstream.url, stops_by_itself=True) as sidecar,
        raw_client(sidecar.url) as client,
    ):
        client.write(client.request("POST", "/v1/files", b"Content-Length: 200000") + bytes(100_000))
        await asyncio.wait_for(script.begun, 5)
        sidecar.send_signal()
        await sidecar.logged("draining")
        client.write(bytes(100_000))
        answer = await client.answer()
        code, took_s = await end_of(sidecar)

        assert (answer.status, code, took_s < SOON_S) == (200, 0, True)
        assert script.bodies == [bytes(200_000)]


async def test_upload_that_outlasts_the_grace_never_looks_complete(tmp_path: Path) -> None:
    script = Upload()
    async with (
        scripted_upstream(script) as upstream,
        serving(tmp_path, upstream.url, stops_by_itself=True, SHUTDOWN__GRACE_S="0.3") as sidecar,
        raw_client(sidecar.url) as client,
    ):
        client.write(client.request("POST", "/v1/files", b"Content-Length: 200000") + bytes(100_000))
        connection = await asyncio.wait_for(script.begun, 5)
        sidecar.send_signal()
        await client.ended()
        code, took_s = await end_of(sidecar)
        await connection.ended(limit_s=1)

        assert (code, took_s < SOON_S, script.bodies) == (0, True, [])


@pytest.mark.parametrize("ends_itself", [True, False], ids=["ends", "goes-on"])
async def test_open_websocket_gets_the_grace(ends_itself: bool, tmp_path: Path) -> None:
    tunnels: list[Connection] = []

    async def echo(connection: Connection) -> None:
        await clients_request(connection)
        tunnels.append(connection)
        connection.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        while True:
            connection.write(await connection.some(limit_s=60))

    grace = "30" if ends_itself else "0.5"
    async with (
        scripted_upstream(echo) as upstream,
        serving(tmp_path, upstream.url, stops_by_itself=True, SHUTDOWN__GRACE_S=grace) as sidecar,
        raw_client(sidecar.url) as client,
    ):
        client.write(client.request("GET", "/ws", b"Connection: Upgrade", b"Upgrade: websocket"))
        assert (await client.head()).status == 101
        sidecar.send_signal()
        await sidecar.logged("draining")
        client.write(b"frame")
        echoed = await client.exactly(5)
        if ends_itself:
            client.close()
        code, took_s = await end_of(sidecar, 0.5 + SOON_S)
        await tunnels[0].ended(limit_s=1)

        assert (echoed, code) == (b"frame", 0)
        assert ends_itself or await client.ended(limit_s=1)
        assert took_s < SOON_S + 0.5


async def test_signal_right_after_the_start_ends_it_with_0(tmp_path: Path) -> None:
    async with scripted_upstream(ok()) as upstream:
        for number in (signal.SIGTERM, signal.SIGINT):
            async with serving(tmp_path, upstream.url, stops_by_itself=True) as sidecar:
                sidecar.send_signal(number)
                code, took_s = await end_of(sidecar)

            assert (code, took_s < SOON_S) == (0, True)


async def test_it_starts_again_at_once_on_the_same_port(tmp_path: Path) -> None:
    """The stopped one leaves connections in TIME_WAIT behind: it was the side that closed."""
    async with scripted_upstream(ok(b"{}")) as upstream:
        first = await SidecarProcess.start(tmp_path, upstream.url)
        port = str(urlsplit(first.url).port)
        async with raw_client(first.url) as client:
            await client.ask("GET", "/v1/models")
            assert await first.stop() == 0
            async with serving(tmp_path, upstream.url, LISTEN__PORT=port) as second:
                answer = await chat(second.url)

    assert (second.url, answer.status) == (first.url, 200)


# Secrets

TOKEN, CLIENT_TOKEN, COOKIE, QUERY, KEY, SESSION = (
    f"MARK-{what}-7f3a" for what in ("token", "client-token", "cookie", "query", "key", "session")
)
MARKERS = (TOKEN, CLIENT_TOKEN, COOKIE, QUERY, KEY, SESSION, "MARK-")


async def test_no_secret_stands_in_the_command_line(tmp_path: Path) -> None:
    async with serving(tmp_path, "http://127.0.0.1:9", GATEWAY__TOKEN=TOKEN) as sidecar:
        command_line = Path(f"/proc/{sidecar.pid}/cmdline").read_bytes()

    assert b"sidecar" in command_line
    assert TOKEN.encode() not in command_line


async def test_no_marker_ever_reaches_the_log_or_an_error(tmp_path: Path) -> None:
    """Tokens, cookies, queries, route keys and session ids, in good requests and in each kind of refused one."""
    tokens_file = tmp_path / "tokens"
    tokens_file.write_text(f"ann:{CLIENT_TOKEN}\n")
    tokens_file.chmod(0o600)
    target = f"/v1/chat/completions?secret={QUERY}"
    marked = (
        b"Authorization: Bearer " + CLIENT_TOKEN.encode(),
        b"Cookie: session=" + COOKIE.encode(),
        b"X-Hermes-Session-Key: " + KEY.encode(),
        b"X-Api-Key: " + TOKEN.encode(),
    )
    break_off = asyncio.Event()

    async def script(connection: Connection) -> None:
        while True:
            await connection.request(limit_s=60)
            if break_off.is_set():
                connection.reset()
                return
            connection.write(ok(b"{}"))

    faults: list[Answer] = []
    async with (
        scripted_upstream(script) as upstream,
        serving(
            tmp_path, upstream.url, GATEWAY__TOKEN=TOKEN, LISTEN__TOKENS_FILE=str(tokens_file), LOG__LEVEL="debug"
        ) as sidecar,
    ):
        url = sidecar.url
        good = [
            await ask(url, "POST", target, *marked, body=CHAT),
            await ask(url, "POST", target, *marked[:2], b"X-Hermes-Session-Id: " + SESSION.encode(), body=CHAT),
        ]
        pages = [
            await ask(url, "GET", path, *marked)
            for path in ("/healthz", "/readyz", "/sidecar/", "/capabilities", "/metrics")
        ]
        faults += [
            await ask(url, "POST", target, *marked[1:], b"Authorization: Bearer MARK-wrong", body=CHAT),
            await ask(url, "POST", target, *marked, b"X-Hermes-Session-Key: MARK-other-key", body=CHAT),
            await ask(url, "POST", target, *marked, b"Origin: http://MARK-origin.example", body=CHAT),
            await ask(url, "POST", target, *marked, b"Expect: MARK-expectation", body=CHAT),
            await ask(url, "POST", target, *marked, b"X-Bad : MARK-blank-before-colon", body=CHAT),
            await raw(url, f"GET {target} HTTP/1.1\r\nHost: MARK-host.example\r\nCookie: {COOKIE}\r\n\r\n"),
            await raw(url, f"MARK-garbage {QUERY}\r\nCookie: {COOKIE}\r\n\r\n"),
            await raw(url, f"GET {target} HTTP/1.1\r\nHost: localhost\r\nCookie: {COOKIE * 6000}\r\n\r\n"),
        ]
        break_off.set()
        faults.append(await ask(url, "POST", target, *marked, body=CHAT))
        await upstream.stop()
        faults.append(await ask(url, "POST", target, *marked, body=CHAT))

    assert [answer.status for answer in good] == [200] * 2
    assert [answer.status for answer in faults] == [401, 400, 403, 417, 400, 421, 400, 431, 502, 502]
    for answer in faults + pages:
        lines = b"\n".join(name + b": " + value for name, value in answer.fields if name != b"X-Hermes-Session-Key")
        assert b"MARK-" not in answer.body
        assert b"MARK-" not in lines
    assert [line for line in sidecar.log.splitlines() if "MARK-" in line] == []
    assert sum(line["event"] == "exchange_ended" for line in log_lines(sidecar)) == 14  # three were no requests


async def raw(url: str, request: str) -> Answer:
    async with raw_client(url) as client:
        client.write(request.encode())
        return await client.answer()


async def test_check_shows_no_secret(tmp_path: Path) -> None:
    tokens_file, token_file = tmp_path / "tokens", tmp_path / "token"
    tokens_file.write_text(f"ann:{CLIENT_TOKEN}\n")
    token_file.write_text(TOKEN)
    for file in (tokens_file, token_file):
        file.chmod(0o600)

    code, output = await run(
        tmp_path,
        "check",
        settings={"GATEWAY__TOKEN_FILE": str(token_file), "LISTEN__TOKENS_FILE": str(tokens_file)},
    )

    assert code == 0
    assert "# token: set" in output
    assert [marker for marker in MARKERS if marker in output] == []


async def test_credentials_in_the_gateways_url_are_refused_without_being_repeated(tmp_path: Path) -> None:
    for name in ("check", "serve"):
        code, output = await run(
            tmp_path, name, settings={"LISTEN__PORT": "0", "GATEWAY__URL": f"http://MARK-user:{TOKEN}@127.0.0.1:9"}
        )

        assert (code, len(output.splitlines())) == (2, 1)
        assert "gateway.url" in output
        assert "MARK-" not in output
