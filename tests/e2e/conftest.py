"""The real programs that this folder's tests run: one model, one hermes-agent and two sidecars for all of them.

They live as long as the test session, in its event loop; the tests keep apart by fresh session keys and prompts.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.hermes_agent import HermesAgent
from tests.support.sidecar_process import SidecarProcess
from tests.support.stub_model import StubModel


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def model() -> AsyncIterator[StubModel]:
    async with await StubModel.start() as stub:
        yield stub


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def agent(model: StubModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HermesAgent]:
    async with await HermesAgent.start(tmp_path_factory.mktemp("hermes"), model.url) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sidecar(agent: HermesAgent, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SidecarProcess]:
    """A sidecar that knows no key of the gateway's: its clients bring it."""
    async with await SidecarProcess.start(tmp_path_factory.mktemp("sidecar"), agent.url) as process:
        yield process


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sidecar_with_key(
    agent: HermesAgent, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SidecarProcess]:
    """A sidecar that adds the gateway's key."""
    home = tmp_path_factory.mktemp("sidecar-with-key")
    async with await SidecarProcess.start(home, agent.url, {"GATEWAY__TOKEN": agent.key}) as process:
        yield process


@pytest.fixture
def word() -> str:
    """A word that only this test uses, for its prompts and keys."""
    return f"word{secrets.token_hex(6)}"
