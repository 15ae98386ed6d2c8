"""`make bench` runs, so that it cannot rot: a tiny round, whose figures say nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from bench.table import ROWS, table
from tests.support.documents import ROOT
from tests.support.tools import needed

_LIMIT_S = 50.0


async def run(*arguments: str, path: str = os.environ.get("PATH", os.defpath)) -> tuple[int | None, str, str]:
    """Exit code, output and complaints of `python -m bench`; ended by its handle if it takes too long."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench",
        *arguments,
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_LIMIT_S):
            said, complained = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    return process.returncode, said.decode(), complained.decode()


async def test_tiny_round_measures_every_row_of_direct_and_sidecar() -> None:
    needed("wrk", package="wrk")

    code, said, complained = await run("--peers", "direct,sidecar", "--rounds", "1", "--seconds", "1")

    assert code == 0, complained
    rows = [line for line in said.splitlines() if line.startswith("| ")][2:]
    assert [row.split(" (")[0].removeprefix("| ") for row in rows] == [row.text for row in ROWS]
    assert all(float(row.split("|")[3].strip().replace(",", "")) > 0 for row in rows)


async def test_missing_tools_are_named_with_how_to_get_them(tmp_path: Path) -> None:
    if shutil.which("nginx", path="/usr/sbin:/usr/local/sbin"):
        wanted = "needs wrk. On Debian and Ubuntu: apt-get install wrk\n"
    else:
        wanted = "needs wrk and nginx-light. On Debian and Ubuntu: apt-get install wrk nginx-light\n"

    code, said, complained = await run(path=str(tmp_path))

    assert code == 2
    assert said == ""
    assert wanted in complained


@pytest.mark.parametrize("arguments", [["--peers", "direct,apache"], ["--rounds", "0"], ["--seconds", "3600"]])
async def test_what_it_cannot_measure_is_said_before_anything_starts(arguments: list[str]) -> None:
    code, said, complained = await run(*arguments)

    assert code == 2
    assert said == ""
    assert "error: " in complained


def test_table_holds_medians_and_the_ratio_to_each_base() -> None:
    shown = table(
        {
            "direct": {"first_byte_us": [20.0]},
            "nginx": {"first_byte_us": [100.0, 110.0, 900.0]},
            "sidecar": {"first_byte_us": [165.0, 60.0, 999.0]},
        }
    )

    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown.splitlines()]
    assert cells[0] == ["", "direct", "nginx", "sidecar", "sidecar / nginx"]
    assert cells[2:] == [["first byte of a stream, p50, µs (less is better)", "20", "110", "165", "1.50"]]
