"""What the docs tell people to type is typed: every marked block runs, before a demo gateway on free ports."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio

from sidecar.demo.gateway import DemoGateway
from tests.support.documents import ROOT, Block, runnable
from tests.support.own_node import node, own_node_folder
from tests.support.own_venv import own_venv
from tests.support.real_clients import NODE_PACKAGES, PYTHON_PACKAGES
from tests.support.sidecar_process import SidecarProcess, environment

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]

_BLOCK_LIMIT_S = 60.0
BLOCKS = runnable("sh", "python", "js")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def demo() -> AsyncIterator[DemoGateway]:
    gateway = await DemoGateway.start()
    yield gateway
    await gateway.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def before_demo(demo: DemoGateway, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SidecarProcess]:
    async with await SidecarProcess.start(tmp_path_factory.mktemp("sidecar"), demo.url) as process:
        yield process


def command_of(block: Block, text: str, folder: Path) -> list[str]:
    """How to run `text`, written to `folder` where its program wants a file."""
    needs = block.run.needs if block.run else None
    if block.language == "sh":
        return ["bash", "-euo", "pipefail", "-c", text]
    if block.language == "python":
        script = folder / "example.py"
        script.write_text(text)
        python = own_venv(*PYTHON_PACKAGES[needs]) / "bin" / "python" if needs else Path(sys.executable)
        return [str(python), str(script)]
    assert needs is not None, f"{block.place}: which packages does it need?"
    program = node()
    # Beside node_modules: that is where a module looks for its packages.
    script = own_node_folder(needs, *NODE_PACKAGES[needs]) / f"{folder.name}-{secrets.token_hex(4)}.mjs"
    script.write_text(text)
    return [str(program), str(script)]


def environment_of(sidecar: SidecarProcess, demo: DemoGateway, home: Path) -> Mapping[str, str]:
    """The reader's environment: the command is installed, and everything of theirs is at these addresses."""
    settings = {"LISTEN__PORT": sidecar.url.rpartition(":")[2], "GATEWAY__URL": demo.url}
    known = environment(home, settings)
    return known | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{known['PATH']}"}


@pytest.mark.parametrize("block", BLOCKS, ids=[block.place for block in BLOCKS])
async def test_block_does_what_the_page_says(
    block: Block, demo: DemoGateway, before_demo: SidecarProcess, tmp_path: Path
) -> None:
    text = block.text.replace("http://127.0.0.1:8650", before_demo.url).replace(".venv/bin/", "")
    command = command_of(block, text, tmp_path)

    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env=environment_of(before_demo, demo, tmp_path),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(_BLOCK_LIMIT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        if block.language == "js":
            Path(command[1]).unlink()

    assert process.returncode == 0, output.decode()
    assert block.run is not None
    assert (block.run.prints or "") in output.decode()
