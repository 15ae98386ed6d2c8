"""Operation before the real hermes-agent: a stop loses nobody's answer, and the figures of its streams are true."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support import chat
from tests.support.hermes_agent import HermesAgent
from tests.support.scraping import scrape
from tests.support.sidecar_process import SidecarProcess
from tests.support.stub_model import Behaviour, StubModel

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(60, func_only=True),
]


async def test_agents_run_goes_on_to_its_end_during_a_drain(
    model: StubModel, agent: HermesAgent, word: str, tmp_path: Path
) -> None:
    go_on = asyncio.Event()
    model.behave(word, Behaviour(silent_until=go_on))
    fields = [chat.bearer(agent.key), (chat.SESSION_KEY, f"drain-{word}")]
    sidecar = await SidecarProcess.start(tmp_path, agent.url)
    try:
        running = asyncio.ensure_future(chat.turn(sidecar.url, f"long {word}", fields, streamed=True))
        await model.turn_about(word)
        sidecar.send_signal()
        await sidecar.logged('"draining"')
        go_on.set()
        turn = await running
    finally:
        code = await sidecar.stop()

    assert code == 0
    assert turn.text == "stub saw 1 non-system messages; roles=['user']"
    assert [(m["role"], m["content"]) for m in await agent.messages(f"drain-{word}")] == [
        ("user", f"long {word}"),
        ("assistant", turn.text),
    ]


async def test_figures_of_a_streamed_turn_are_the_agents(
    model: StubModel, agent: HermesAgent, word: str, tmp_path: Path
) -> None:
    async with await SidecarProcess.start(tmp_path, agent.url) as sidecar:
        turn = await chat.turn(sidecar.url, f"count {word}", [chat.bearer(agent.key)], streamed=True)
        shown = await scrape(sidecar.url)

    events = turn.answer.body.count(b"data: ")
    assert shown.by("reason", "stream_ends_total") == {"complete": 1}
    assert shown.value("time_to_first_token_seconds_count") == 1
    assert shown.value("inter_event_seconds_count") == events - 1
    assert shown.value("relayed_bytes_total", direction="downstream") == len(turn.answer.wire_body)
    assert set(shown.by("type", "tokens_total")) == {"prompt", "completion"}
    assert shown.value("active_streams") == 0
