"""Conversations stay together on the real hermes-agent, and its streams pass as they are."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import chat, raw_http
from tests.support.hermes_agent import HermesAgent
from tests.support.recording_relay import RecordingRelay
from tests.support.sidecar_process import SidecarProcess
from tests.support.stub_model import Behaviour, StubModel

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    # The programs that the first test starts have limits of their own.
    pytest.mark.timeout(60, func_only=True),
]

streamed_or_not = pytest.mark.parametrize(
    "streamed", [pytest.param(False, id="plain"), pytest.param(True, id="streamed")]
)


@dataclass(frozen=True)
class Door:
    """Where a client calls, and what it brings along to be let in."""

    url: str
    fields: list[tuple[str, str]]


@pytest.fixture(params=["client-sends-key", "sidecar-adds-key"])
def door(
    request: pytest.FixtureRequest, agent: HermesAgent, sidecar: SidecarProcess, sidecar_with_key: SidecarProcess
) -> Door:
    if request.param == "client-sends-key":
        return Door(sidecar.url, [chat.bearer(agent.key)])
    return Door(sidecar_with_key.url, [])


@streamed_or_not
async def test_two_turns_with_one_key_land_in_the_session_of_that_name(
    model: StubModel, agent: HermesAgent, door: Door, word: str, streamed: bool
) -> None:
    key = f"route-{word}"
    fields = [*door.fields, (chat.SESSION_KEY, key)]

    first = await chat.turn(door.url, f"first {word}", fields, streamed=streamed)
    second = await chat.turn(door.url, f"second {word}", fields, streamed=streamed)

    assert [first.session_id, second.session_id] == [key, key]
    assert [first.sidecar_session, second.sidecar_session] == ["header:x-hermes-session-key"] * 2
    assert [first.answer.value(chat.SESSION_KEY), second.answer.value(chat.SESSION_KEY)] == [key, key]
    assert first.text == "stub saw 1 non-system messages; roles=['user']"
    assert second.text == "stub saw 3 non-system messages; roles=['user', 'assistant', 'user']"
    assert [call.roles for call in model.turns_about(word)] == [["user"], ["user", "assistant", "user"]]
    assert [(m["role"], m["content"]) for m in await agent.messages(key)] == [
        ("user", f"first {word}"),
        ("assistant", first.text),
        ("user", f"second {word}"),
        ("assistant", second.text),
    ]


@streamed_or_not
async def test_the_same_two_turns_without_the_sidecar_land_in_two_sessions(
    model: StubModel, agent: HermesAgent, word: str, streamed: bool
) -> None:
    """What the sidecar is for. When this fails, the gateway has learned to do it by itself."""
    fields = [chat.bearer(agent.key), (chat.SESSION_KEY, f"route-{word}")]

    first = await chat.turn(agent.url, f"first {word}", fields, streamed=streamed)
    second = await chat.turn(agent.url, f"second {word}", fields, streamed=streamed)

    ids = [str(first.session_id), str(second.session_id)]
    assert [session_id.startswith("api-") for session_id in ids] == [True, True]
    assert ids[0] != ids[1]
    assert [call.roles for call in model.turns_about(word)] == [["user"], ["user"]]


@streamed_or_not
async def test_an_image_turn_stands_in_the_history_of_its_session(
    agent: HermesAgent, door: Door, word: str, streamed: bool
) -> None:
    key = f"route-{word}"
    fields = [*door.fields, (chat.SESSION_KEY, key)]

    turn = await chat.turn(door.url, f"look {word}", fields, streamed=streamed, image=chat.PIXEL)

    assert turn.session_id == key
    user, assistant = await agent.messages(key)
    assert (user["role"], assistant["role"]) == ("user", "assistant")
    assert f"look {word}" in user["content"]
    assert "[screenshot]" in user["content"]


KEYS_THAT_ARE_NO_SESSION_IDS = [
    pytest.param(b"spaces/AAA/threads/%s", id="slashes"),
    pytest.param(b"..%s", id="dot-dot"),
    pytest.param(b"%s" + b"x" * 300, id="over-300-characters"),
    pytest.param("会话-café-%s".encode(), id="utf-8"),
]


@streamed_or_not
@pytest.mark.parametrize("pattern", KEYS_THAT_ARE_NO_SESSION_IDS)
async def test_a_key_that_the_gateway_would_refuse_gets_one_session_too(
    agent: HermesAgent, door: Door, word: str, pattern: bytes, streamed: bool
) -> None:
    key = pattern % word.encode()
    fields: raw_http.Fields = [*door.fields, (chat.SESSION_KEY, key)]

    first = await chat.turn(door.url, f"first {word}", fields, streamed=streamed)
    second = await chat.turn(door.url, f"second {word}", fields, streamed=streamed)

    derived = "hs-" + hashlib.sha256(key).hexdigest()[:40]
    assert [first.session_id, second.session_id] == [derived, derived]
    assert [first.sidecar_session, second.sidecar_session] == ["header:x-hermes-session-key; derived"] * 2
    assert [turn.answer.values(chat.SESSION_KEY) for turn in (first, second)] == [[key], [key]]
    users = [message["content"] for message in await agent.messages(derived) if message["role"] == "user"]
    assert users == [f"first {word}", f"second {word}"]


# Streams


@pytest.mark.parametrize(
    "with_silence",
    [
        pytest.param(False, id="tool"),
        # The gateway's comment comes after 30 s of silence; the figure is a constant in its source.
        pytest.param(True, id="tool-and-keepalive", marks=pytest.mark.timeout(100, func_only=True)),
    ],
)
async def test_a_stream_with_tool_events_and_comments_passes_byte_for_byte(
    model: StubModel, agent: HermesAgent, word: str, with_silence: bool, tmp_path: Path
) -> None:
    """Both wires of one exchange are compared: what the gateway sent, and what the client received."""
    may_answer = asyncio.Event()
    model.behave(word, Behaviour(calls_tool=True, silent_until=may_answer if with_silence else None, words=20))
    async with (
        await RecordingRelay.start(agent.url) as relay,
        await SidecarProcess.start(tmp_path, relay.url, {"GATEWAY__TOKEN": agent.key}) as sidecar,
    ):
        body = chat.body(f"use it {word}", streamed=True)
        fields = [*raw_http.framing(sidecar.url, body), (chat.SESSION_KEY, f"route-{word}")]
        async with (
            asyncio.timeout(75),
            raw_http.sending(sidecar.url, "POST", chat.COMPLETIONS, fields, body) as exchange,
        ):
            head = await exchange.head()
            if with_silence:
                await exchange.read_until(b": keepalive\n\n")
                may_answer.set()
            answer = await exchange.whole(head)

    gateway_head, _, gateway_body = bytes(relay.about(word.encode()).response).partition(b"\r\n\r\n")
    assert gateway_head.startswith(b"HTTP/1.1 200 ")
    assert answer.status == 200
    assert answer.wire_body == gateway_body
    assert answer.body.count(b"event: hermes.tool.progress\ndata: ") == 2
    assert answer.body.count(b": keepalive\n\n") == int(with_silence)
    assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_the_model_call_ends_when_the_client_leaves_mid_stream(model: StubModel, door: Door, word: str) -> None:
    # A word every 2 ms, for a minute. The pace matters: an interrupted hermes-agent 0.19 ends its model call with the
    # next word, if that comes before the turn is wound up; otherwise it reads on to the end in the background.
    model.behave(word, Behaviour(gap_s=0.002, words=30_000))
    body = chat.body(f"talk {word}", streamed=True)
    fields = [*raw_http.framing(door.url, body), *door.fields, (chat.SESSION_KEY, f"route-{word}")]

    async with asyncio.timeout(20), raw_http.sending(door.url, "POST", chat.COMPLETIONS, fields, body) as exchange:
        await exchange.read_until(b"messages; ")
        exchange.leave()
    call = await model.turn_about(word)
    async with asyncio.timeout(10):
        await call.client_left.wait()

    assert not call.finished.is_set()
    assert len(model.turns_about(word)) == 1
