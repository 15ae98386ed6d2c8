"""`hermes-sidecar verify` on the real hermes-agent: it proves continuity, and says in words where it is lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import sidecar_process
from tests.support.hermes_agent import HermesAgent
from tests.support.sidecar_process import SidecarProcess

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(60, func_only=True),
]


async def test_verify_names_the_sessions_that_hold_both_turns(agent: HermesAgent, tmp_path: Path) -> None:
    settings = {"LISTEN__PORT": "0", "GATEWAY__URL": agent.url, "GATEWAY__TOKEN": agent.key}

    code, output = await sidecar_process.run(tmp_path, "verify", settings=settings)

    assert code == 0, output
    await assert_both_turns_are_where_the_verdict_says(agent, output)
    assert agent.key not in output


async def test_verify_asks_the_sidecar_that_runs_already(
    agent: HermesAgent, sidecar_with_key: SidecarProcess, tmp_path: Path
) -> None:
    # No key of the gateway's here: only through the running sidecar can this be answered.
    settings = {"LISTEN__PORT": sidecar_with_key.url.rpartition(":")[2], "GATEWAY__URL": agent.url}

    code, output = await sidecar_process.run(tmp_path, "verify", settings=settings)

    assert code == 0, output
    await assert_both_turns_are_where_the_verdict_says(agent, output)
    assert sidecar_with_key.url in output


async def test_verify_says_that_no_source_maps_the_key(agent: HermesAgent, tmp_path: Path) -> None:
    settings = {
        "LISTEN__PORT": "0",
        "GATEWAY__URL": agent.url,
        "GATEWAY__TOKEN": agent.key,
        "SESSION__SOURCES": "[]",
    }

    code, output = await sidecar_process.run(tmp_path, "verify", settings=settings)

    assert code == 1, output
    verdict = output.splitlines()[-1]
    assert verdict.startswith("FAILED: The sidecar did not map the key")
    assert "session.sources" in verdict


async def assert_both_turns_are_where_the_verdict_says(agent: HermesAgent, output: str) -> None:
    """The verdict names two sessions, for turns without and with an image, and the gateway confirms both."""
    verdict = output.splitlines()[-1]
    assert verdict.startswith("OK: ")
    text_session, image_session = re.findall(r"both turns landed in session ([\w-]+)", verdict, re.IGNORECASE)
    histories = [await agent.messages(text_session), await agent.messages(image_session)]
    for history in histories:
        assert [message["role"] for message in history] == ["user", "assistant", "user", "assistant"]
    assert ["[screenshot]" in str(history[0]["content"]) for history in histories] == [False, True]
