"""slowhttptest against the real command: hundreds of clients that are as slow as they can be, and one honest one.

The rules one by one are in tests/integration/test_pace.py; here a program made for this attack tries its own ways.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path
from statistics import median

import psutil
import pytest

from tests.support.raw_client import chat
from tests.support.scripted_upstream import Connection, ok, scripted_upstream
from tests.support.sidecar_process import SidecarProcess
from tests.support.tools import needed

pytestmark = [pytest.mark.e2e]

CONNECTIONS = 300
LASTS_S = 5
LIMITS = {"LISTEN__HEAD_TIMEOUT_S": "1", "LISTEN__BODY_TIMEOUT_S": "1"}
TYPICAL_S, LONGEST_S = 0.25, 3.0  # measured: 0.01 and 0.1; the rest is for machines that have other things to do
BIG_BYTES = 1 << 20
HELD_AT_MOST_BYTES = 100 << 20  # a third of a megabyte a connection, of the one that each has asked for

ATTACKS = {
    "slow-head": ("-H", "-i", "2"),
    "slow-body": ("-B", "-i", "2", "-s", "8192"),
    "slow-read": ("-X", "-w", "512", "-y", "1024", "-n", "1", "-z", "32"),
}


async def gateway(connection: Connection) -> None:
    while True:
        request = await connection.request(limit_s=60)
        if request.target != b"/v1/files":
            connection.write(ok())
            continue
        connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % BIG_BYTES)
        for _ in range(BIG_BYTES // 65536):
            await connection.send(bytes(65536), limit_s=60)


@pytest.mark.parametrize("attack", ATTACKS)
async def test_slow_clients_hold_nobody_up_and_are_shown_the_door(attack: str, tmp_path: Path) -> None:
    """Slow senders are answered 408 one by one; slow readers may stay, and cost no more than a buffer each."""
    program = needed("slowhttptest", package="slowhttptest")
    async with (
        scripted_upstream(gateway, records=False) as upstream,
        await SidecarProcess.start(tmp_path, upstream.url, LIMITS) as sidecar,
    ):
        process = psutil.Process(sidecar.pid)
        before_bytes = process.memory_info().rss
        attacker = await asyncio.create_subprocess_exec(
            *(str(program), *ATTACKS[attack], "-u", f"{sidecar.url}/v1/files"),
            *("-c", str(CONNECTIONS), "-r", str(CONNECTIONS), "-l", str(LASTS_S), "-p", "2"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            ended = asyncio.ensure_future(attacker.communicate())
            answers: list[tuple[int, float]] = []
            most_bytes = 0
            async with asyncio.timeout(6 * LASTS_S):
                while not ended.done():
                    began_at = time.monotonic()
                    status = (await chat(sidecar.url)).status
                    answers.append((status, time.monotonic() - began_at))
                    most_bytes = max(most_bytes, process.memory_info().rss)
                    await asyncio.wait((ended,), timeout=0.05)
                report, _ = await ended
        finally:
            if attacker.returncode is None:
                attacker.kill()
                await attacker.wait()

        assert attacker.returncode == 0, report.decode()
        assert b"service available" in report
        assert b"NO\x1b" not in report, report.decode()
        assert {status for status, _ in answers} == {200}
        assert len(answers) > LASTS_S
        assert median(took_s for _, took_s in answers) < TYPICAL_S
        assert max(took_s for _, took_s in answers) < LONGEST_S
        assert most_bytes - before_bytes < HELD_AT_MOST_BYTES
        if attack != "slow-read":
            assert b"No open connections left" in report, report.decode()
            await sidecar.stop()  # the log is whole then
            assert sidecar.log.count('"request_timeout"') == CONNECTIONS
