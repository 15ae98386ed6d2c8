"""`demo` and `verify` as a person runs them: real processes, real sockets, the demo gateway behind them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sidecar import __version__
from sidecar.config import from_mapping
from sidecar.demo.gateway import DemoGateway
from sidecar.server import start
from tests.support.backends import HermesDashboard, answering_by
from tests.support.capabilities import conforming, refreshed
from tests.support.scripted_upstream import left_to_the_test, scripted_upstream

LIMIT_S = 30
MEMORY = {"url": "memory"}


@asynccontextmanager
async def command(*arguments: str, home: Path, **environ: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command in a process of its own, with nothing of this machine's configuration."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sidecar", *arguments),
        env={"PATH": os.environ["PATH"], "HOME": str(home), "HERMES_SIDECAR_LISTEN__PORT": "0", **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    async with asyncio.timeout(LIMIT_S):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def said(process: asyncio.subprocess.Process, line_start: str) -> list[str]:
    """The lines up to the first that begins with `line_start`."""
    assert process.stdout is not None
    lines: list[str] = []
    async with asyncio.timeout(LIMIT_S):
        while not lines or not lines[-1].startswith(line_start):
            line = await process.stdout.readline()
            assert line, f"it ended before it said {line_start!r}: {lines}"
            lines.append(line.decode().rstrip("\n"))
    return lines


async def test_demo_once_proves_continuity_and_ends(tmp_path: Path) -> None:
    async with command("demo", "--once", home=tmp_path) as process:
        code, out, err = await ended(process)

    assert (code, err) == (0, "")
    assert re.search(r"^Status page +http://127\.0\.0\.1:[0-9]+/sidecar/$", out, re.MULTILINE)
    assert out.splitlines()[-1].startswith("OK: ")


async def test_demo_takes_a_free_port_where_its_own_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with command("demo", "--once", home=tmp_path, HERMES_SIDECAR_LISTEN__PORT=str(port)) as process:
            code, out, err = await ended(process)

    assert (code, err) == (0, "")
    assert out.startswith(f"Port {port} is taken, so the demo uses a free one.\n")


async def test_demo_goes_on_serving_until_it_is_told_to_stop(tmp_path: Path) -> None:
    async with command("demo", home=tmp_path) as process:
        lines = await said(process, "Serving until Ctrl-C.")
        health = next(line.split()[-1] for line in lines if line.startswith("Health"))
        async with aiohttp.ClientSession() as session, session.get(health) as answer:
            status = answer.status
        process.send_signal(signal.SIGTERM)
        code, _, err = await ended(process)

    assert (status, code, err) == (200, 0, "")


async def test_demo_says_how_to_send_a_client_token_without_showing_one(tmp_path: Path) -> None:
    tokens_file = tmp_path / "tokens"
    tokens_file.write_text("ann:s3cr3t-Marker\n")

    async with command("demo", "--once", home=tmp_path, HERMES_SIDECAR_LISTEN__TOKENS_FILE=str(tokens_file)) as process:
        code, out, err = await ended(process)

    assert (code, err, "s3cr3t-Marker" in out) == (0, "", False)
    assert '-H "Authorization: Bearer $CLIENT_TOKEN"' in out


@pytest.fixture
async def demo_gateway() -> AsyncIterator[DemoGateway]:
    gateway = await DemoGateway.start()
    yield gateway
    await gateway.stop()


async def test_verify_starts_a_sidecar_where_none_runs(demo_gateway: DemoGateway, tmp_path: Path) -> None:
    async with command("verify", home=tmp_path, HERMES_SIDECAR_GATEWAY__URL=demo_gateway.url) as process:
        code, out, err = await ended(process)

    assert (code, err) == (0, "")
    assert "starting one for this check" in out.splitlines()[0]
    assert out.splitlines()[-1].startswith("OK: ")


async def test_verify_uses_the_sidecar_that_runs(demo_gateway: DemoGateway, tmp_path: Path) -> None:
    running = await start(from_mapping({"listen": {"port": 0}, "gateway": {"url": demo_gateway.url}}))
    try:
        async with command("verify", home=tmp_path, HERMES_SIDECAR_LISTEN__PORT=str(running.port)) as process:
            code, out, err = await ended(process)
    finally:
        await running.stop()

    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"Using the sidecar that runs at http://127.0.0.1:{running.port}"


async def test_verify_of_an_absent_gateway_fails_in_words(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    # Nobody listens there any more.
    async with command("verify", home=tmp_path, HERMES_SIDECAR_GATEWAY__URL=f"http://127.0.0.1:{port}") as process:
        code, out, err = await ended(process)

    assert (code, out.splitlines()[-1].startswith("FAILED: "), "Traceback" in err) == (1, True, False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_verify_is_interrupted_without_a_traceback(number: signal.Signals, tmp_path: Path) -> None:
    """The gateway takes the connection and is silent, so that the check is surely under way."""
    asked = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()  # until the sidecar leaves
        writer.close()

    silent = await asyncio.start_server(take, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    try:
        async with command("verify", home=tmp_path, HERMES_SIDECAR_GATEWAY__URL=f"http://127.0.0.1:{port}") as process:
            async with asyncio.timeout(LIMIT_S):
                await asked.wait()
            process.send_signal(number)
            code, _, err = await ended(process)
    finally:
        silent.close()

    assert (code, "Traceback" in err) == (130, False)


async def test_probe_of_the_demo_gateway(demo_gateway: DemoGateway, tmp_path: Path) -> None:
    async with command("probe", home=tmp_path, HERMES_SIDECAR_GATEWAY__URL=demo_gateway.url) as process:
        code, out, err = await ended(process)

    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "Chat works; skills, memory, config and scheduled jobs are not available on this backend."
    assert f"Gateway    {demo_gateway.url}  hermes-sidecar-demo {__version__}, key not set" in lines
    assert lines[-1] == "Next: Put hermes-agent's gateway behind the sidecar; chat works without it."


async def test_probe_as_json_says_what_the_capabilities_page_says(demo_gateway: DemoGateway, tmp_path: Path) -> None:
    running = await start(from_mapping({"listen": {"port": 0}, "gateway": {"url": demo_gateway.url}, "store": MEMORY}))
    try:
        page = await refreshed(running.url)
        async with command("probe", "--json", home=tmp_path, HERMES_SIDECAR_GATEWAY__URL=demo_gateway.url) as process:
            code, out, err = await ended(process)
    finally:
        await running.stop()

    assert (code, err) == (0, "")
    assert without_times(conforming(json.loads(out))) == without_times(page)


async def test_probe_asks_the_dashboard_too(demo_gateway: DemoGateway, tmp_path: Path) -> None:
    async with scripted_upstream(answering_by(HermesDashboard())) as dashboard:
        addresses = {"GATEWAY__URL": demo_gateway.url, "DASHBOARD__URL": dashboard.url}
        environ = {f"HERMES_SIDECAR_{name}": url for name, url in addresses.items()}
        async with command("probe", home=tmp_path, **environ) as process:
            code, out, err = await ended(process)

    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "Chat works; scheduled jobs are not available on this backend."
    assert f"Dashboard  {dashboard.url}  0.19.0" in out.splitlines()


async def test_probe_of_a_silent_gateway_is_interrupted_without_a_traceback(tmp_path: Path) -> None:
    async with scripted_upstream(left_to_the_test) as silent:
        environ = {"HERMES_SIDECAR_GATEWAY__URL": silent.url, "HERMES_SIDECAR_PROBE__TIMEOUT_S": "30.0"}
        async with command("probe", home=tmp_path, **environ) as process:
            await (await silent.connection(limit_s=LIMIT_S)).head(limit_s=LIMIT_S)
            process.send_signal(signal.SIGINT)
            code, out, err = await ended(process)

    assert (code, out, err) == (130, "", "")


def without_times(document: dict[str, Any]) -> dict[str, Any]:
    details = {name: {**detail, "checkedAt": None} for name, detail in document["details"].items()}
    return {**document, "details": details, "probedAt": None, "sidecar": None}
