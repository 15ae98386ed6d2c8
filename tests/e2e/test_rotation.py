"""Long conversations on the real hermes-agent, which it moves to new sessions: the sidecar goes along."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from redis import Redis

from sidecar.sessions.store.redis import KEY_PREFIX
from tests.support import chat, raw_http, sidecar_process
from tests.support.hermes_agent import HermesAgent
from tests.support.redis_server import RedisServer, redis_server
from tests.support.sidecar_process import SidecarProcess
from tests.support.stub_model import StubModel

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(90, func_only=True),
]

CONTEXT_TOKENS = 66_000
TURNS = 8
FILLER = " ".join(f"w{number:04d}" for number in range(6_700))
"""40 kB, of which eight do not fit into the context."""

Door = Callable[[int], tuple[str, raw_http.Fields]]
"""Where turn n is sent to, and what it brings along."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def rotating(model: StubModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HermesAgent]:
    """An agent that compresses a conversation into a new session once half of a small context is full."""
    config = {
        "compression": {"in_place": False, "threshold": 0.5, "protect_last_n": 2, "protect_first_n": 0},
        "model": {
            "default": "stub-model",
            "provider": "custom",
            "base_url": f"{model.url}/v1",
            "api_key": "stub-key",
            "context_length": CONTEXT_TOKENS,
        },
    }
    home = tmp_path_factory.mktemp("rotating-hermes")
    async with await HermesAgent.start(home, model.url, config=config) as agent:
        yield agent


def plain(turn: int) -> bool:
    return False


def streamed(turn: int) -> bool:
    return True


def by_turns(turn: int) -> bool:
    return turn % 2 == 0


async def at_once() -> None:
    pass


async def converse(
    door: Door,
    word: str,
    is_streamed: Callable[[int], bool],
    between: Callable[[], Awaitable[None]] = at_once,
) -> list[chat.Turn]:
    """Eight long turns; `between` is what the person does before the next one."""
    turns = []
    for number in range(1, TURNS + 1):
        url, fields = door(number)
        turns.append(await chat.turn(url, f"{prompt(number, word)} {FILLER}", fields, streamed=is_streamed(number)))
        await between()
    return turns


def prompt(number: int, word: str) -> str:
    return f"turn {number} {word}"


def tokens_seen(model: StubModel, word: str) -> int:
    """What the model was shown at most in one call of this conversation, counted as the agent does: four bytes each."""
    return max(len(json.dumps(call.messages)) // 4 for call in model.turns_about(word))


async def chain_of(agent: HermesAgent, key: str) -> list[str]:
    """The sessions of a conversation, first to last, as the agent has them."""
    _, history = await agent.get(f"/api/sessions/{key}/messages")
    chain = [str(history["session_id"])]
    while chain[0] != key:
        _, record = await agent.get(f"/api/sessions/{chain[0]}")
        chain.insert(0, str(record.get("session", record)["parent_session_id"]))
    return chain


@pytest.mark.parametrize(
    ("is_streamed", "client_has_key"),
    [
        pytest.param(plain, False, id="plain"),
        pytest.param(streamed, False, id="streamed"),
        pytest.param(streamed, True, id="streamed-and-the-client-has-the-key"),
        pytest.param(by_turns, True, id="by-turns"),
    ],
)
async def test_eight_long_turns_stay_one_conversation(
    model: StubModel,
    rotating: HermesAgent,
    word: str,
    is_streamed: Callable[[int], bool],
    client_has_key: bool,
    tmp_path: Path,
) -> None:
    key = f"route-{word}"
    settings = {} if client_has_key else {"GATEWAY__TOKEN": rotating.key}
    fields = [(chat.SESSION_KEY, key), *([chat.bearer(rotating.key)] if client_has_key else [])]
    async with await SidecarProcess.start(tmp_path, rotating.url, settings) as sidecar:
        turns = await converse(lambda _: (sidecar.url, fields), word, is_streamed)
        chain = await chain_of(rotating, key)
        last = await rotating.messages(chain[-1])

    assert len(chain) >= 3, chain  # two rotations
    assert tokens_seen(model, word) <= CONTEXT_TOKENS
    # A streamed answer names the session that the turn was sent to; the turn itself may have moved it on.
    assert turns[-1].session_id in (chain[-2:] if is_streamed(TURNS) else chain[-1:])
    users = [message["content"] for message in last if message["role"] == "user"]
    assert any(prompt(TURNS, word) in text for text in users)
    followed = [str(turn.sidecar_session).endswith("; followed") for turn in turns]
    assert followed == sorted(followed)  # once it is followed, it stays followed
    assert followed.count(True) >= 2


async def test_the_same_eight_turns_without_the_sidecar_overflow(
    model: StubModel, rotating: HermesAgent, word: str
) -> None:
    """What the sidecar is for. When this fails, the gateway has learned to do it by itself."""
    fields = [chat.bearer(rotating.key), (chat.SESSION_ID, f"route-{word}")]

    await converse(lambda _: (rotating.url, fields), word, by_turns)

    assert tokens_seen(model, word) > CONTEXT_TOKENS


async def test_two_sidecars_with_one_redis_take_turns_and_one_is_killed(
    model: StubModel, rotating: HermesAgent, word: str, tmp_path: Path
) -> None:
    key = f"route-{word}"
    homes = [tmp_path / "one", tmp_path / "other"]
    for home in homes:
        home.mkdir()
    with redis_server() as redis:
        settings = {"GATEWAY__TOKEN": rotating.key, "STORE__URL": redis.url()}
        one, other = [await SidecarProcess.start(home, rotating.url, settings) for home in homes]
        killed_before = 7

        def door(number: int) -> tuple[str, raw_http.Fields]:
            if number == killed_before:
                one.send_signal(signal.SIGKILL)
            alive = other if number >= killed_before or number % 2 else one
            return alive.url, [(chat.SESSION_KEY, key)]

        async def until_it_is_known() -> None:
            """A person takes seconds for the next turn; what one sidecar learned is in Redis after milliseconds."""
            newest = (await chain_of(rotating, key))[-1]
            async with asyncio.timeout(5):
                while tip_in(redis, key) != newest:
                    await asyncio.sleep(0.005)

        try:
            turns = await converse(door, word, by_turns, until_it_is_known)
        finally:
            codes = [await one.ended(), await other.stop()]
        chain = await chain_of(rotating, key)

    assert codes == [-signal.SIGKILL, 0]
    assert len(chain) >= 3, chain
    assert tokens_seen(model, word) <= CONTEXT_TOKENS
    assert turns[-1].session_id in chain[-2:]
    assert str(turns[-1].sidecar_session).endswith("; followed")


def tip_in(redis: RedisServer, key: str) -> str:
    with Redis(port=redis.port) as client:
        tip = key.encode()
        while (successor := client.get(KEY_PREFIX + tip)) is not None:
            assert isinstance(successor, bytes)
            tip = successor
    return tip.decode()


async def test_verify_rotation_proves_it(rotating: HermesAgent, tmp_path: Path) -> None:
    settings = {"LISTEN__PORT": "0", "GATEWAY__URL": rotating.url, "GATEWAY__TOKEN": rotating.key}

    code, output = await sidecar_process.run(tmp_path, "verify", "--rotation", settings=settings)

    assert code == 0, output
    verdict = output.splitlines()[-1]
    assert verdict.startswith("OK: The gateway moved the conversation from session verify-")
    assert verdict.count("both messages stand in the history there.") == 2
    assert " Streamed: the gateway moved" in verdict


# Routes that read the body


ALONE, TOGETHER = ["user"], ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("injects", "second_turn"),
    [pytest.param(False, ALONE, id="as-it-is"), pytest.param(True, TOGETHER, id="inject_body")],
)
async def test_two_responses_with_one_key(
    model: StubModel, agent: HermesAgent, word: str, injects: bool, second_turn: list[str], tmp_path: Path
) -> None:
    """The route reads `conversation` in its body, and no header."""
    answers = await asked_twice("/v1/responses", agent, word, tmp_path, injects=injects)

    assert [answer.status for answer in answers] == [200, 200]
    assert [call.roles for call in model.turns_about(word)] == [ALONE, second_turn]
    assert {answer.value(chat.SIDECAR_SESSION) for answer in answers} == {"header:x-hermes-session-key"}


@pytest.mark.parametrize("injects", [False, True], ids=["as-it-is", "inject_body"])
async def test_two_runs_with_one_key(
    model: StubModel, agent: HermesAgent, word: str, injects: bool, tmp_path: Path
) -> None:
    """The route reads `session_id` in its body: both runs stand in that session, though the model sees each alone."""
    answers = await asked_twice("/v1/runs", agent, word, tmp_path, injects=injects)

    assert [answer.status for answer in answers] == [202, 202]
    assert [call.roles for call in model.turns_about(word)] == [ALONE, ALONE]
    status, history = await agent.get(f"/api/sessions/route-{word}/messages")
    assert status == (200 if injects else 404)
    if injects:
        users = [message["content"] for message in history["data"] if message["role"] == "user"]
        assert users == [prompt(1, word), prompt(2, word)]


async def asked_twice(path: str, agent: HermesAgent, word: str, home: Path, *, injects: bool) -> list[raw_http.Answer]:
    """The answers to two requests under one key; a run, which is answered when it begins, is waited for."""
    settings = {"GATEWAY__TOKEN": agent.key, "SESSION__INJECT_BODY": str(injects).lower()}
    fields = [("Content-Type", "application/json"), (chat.SESSION_KEY, f"route-{word}")]
    answers = []
    async with await SidecarProcess.start(home, agent.url, settings) as sidecar:
        for number in (1, 2):
            body = json.dumps({"model": "hermes-agent", "input": prompt(number, word)}).encode()
            answers.append(await raw_http.ask(sidecar.url, "POST", path, fields, body))
            if answers[-1].status == 202:
                await run_over(sidecar.url, answers[-1].json()["run_id"], fields)
    return answers


async def run_over(url: str, run_id: str, fields: raw_http.Fields) -> None:
    async with asyncio.timeout(15):
        while True:
            answer = await raw_http.ask(url, "GET", f"/v1/runs/{run_id}", fields)
            if answer.json()["status"] not in ("queued", "started", "running", "in_progress"):
                return
            await asyncio.sleep(0.05)
