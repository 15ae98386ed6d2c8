"""The real hermes-agent, its dashboard and LiteLLM: what is found out about them, and who serves what they lack."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support import chat, litellm, raw_http
from tests.support.capabilities import conforming, in_short
from tests.support.hermes_agent import HermesAgent, HermesDashboard
from tests.support.litellm import LiteLlm
from tests.support.sidecar_process import SidecarProcess, run
from tests.support.stub_model import StubModel

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    # The programs that the first test starts have limits of their own.
    pytest.mark.timeout(60, func_only=True),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def dashboard(agent: HermesAgent) -> AsyncIterator[HermesDashboard]:
    async with await HermesDashboard.start(agent.home) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def proxy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiteLlm]:
    async with await LiteLlm.start(tmp_path_factory.mktemp("litellm")) as running:
        yield running


async def probe(home: Path, **settings: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, document and table of `hermes-sidecar probe`."""
    code, text = await run(home, "probe", "--json", settings=settings)
    again, table = await run(home, "probe", settings=settings)
    assert code == again
    return code, conforming(json.loads(text)), table


async def refreshed(url: str) -> dict[str, Any]:
    answer = await raw_http.ask(url, "POST", "/capabilities/refresh")
    return conforming(answer.json())


def said(document: dict[str, Any]) -> tuple[str, str, str, str | None, str | None]:
    gateway = document["gateway"]
    return document["status"], document["mode"], in_short(document), gateway["kind"], gateway["version"]


def row(table: str, name: str) -> list[str]:
    """The cells of a capability: available, served by, evidence, the first line of its message."""
    (line,) = [line for line in table.splitlines() if line.startswith(f"{name} ")]
    return re.split(r" {2,}", line)[1:]


# hermes-agent


async def test_gateway_alone(agent: HermesAgent, tmp_path: Path) -> None:
    code, document, table = await probe(tmp_path, GATEWAY__URL=agent.url, GATEWAY__TOKEN=agent.key)

    assert (code, *said(document)) == (0, "partial", "enhanced", "++++? ++--+", "hermes-agent", "0.19.0")
    assert document["details"]["skills"]["path"] == "/v1/skills"
    assert table.splitlines()[0] == "Chat works; memory and config are not available on this backend."
    assert row(table, "memory") == ["no", "-", "probe", "Memory browser requires the memory API."]
    assert "Next: Start the dashboard (hermes dashboard) and set dashboard.url." in table
    assert agent.key not in table + json.dumps(document)


async def test_gateway_and_dashboard(agent: HermesAgent, dashboard: HermesDashboard, tmp_path: Path) -> None:
    code, document, table = await probe(
        tmp_path, GATEWAY__URL=agent.url, GATEWAY__TOKEN=agent.key, DASHBOARD__URL=dashboard.url
    )

    assert (code, *said(document)) == (0, "enhanced", "enhanced", "++++? +++++", "hermes-agent", "0.19.0")
    assert document["dashboard"] == {"url": dashboard.url, "reachable": True, "version": "0.19.0"}
    assert row(table, "memory") == ["yes", "dashboard", "probe", "Memory can be browsed."]
    token = await dashboard.token()
    assert [secret in table + json.dumps(document) for secret in (agent.key, token)] == [False, False]


async def test_gateway_without_its_key(agent: HermesAgent, tmp_path: Path) -> None:
    code, document, table = await probe(tmp_path, GATEWAY__URL=agent.url)

    assert (code, *said(document)) == (0, "connected", "portable", "++??? ??--?", "hermes-agent", "0.19.0")
    assert document["message"] == (
        "Connected in portable mode. Chat works; the backend asks for a key before it shows session history, skills and"
        " scheduled jobs."
    )
    assert "Give the sidecar the gateway's key (gateway.token_file)." in table


async def test_gateway_with_a_wrong_key(agent: HermesAgent, tmp_path: Path) -> None:
    code, document, _ = await probe(tmp_path, GATEWAY__URL=agent.url, GATEWAY__TOKEN="another-Key-0123456789")

    assert (code, document["status"]) == (0, "connected")
    assert document["details"]["sessions"]["unlock"] == (
        "The gateway refuses the key that the sidecar has; put the right one into gateway.token_file."
    )


async def test_dashboard_given_as_the_gateway(dashboard: HermesDashboard, tmp_path: Path) -> None:
    code, document, table = await probe(tmp_path, GATEWAY__URL=dashboard.url)

    assert (code, *said(document)) == (1, "disconnected", "disconnected", "?-??? ?????", "hermes-dashboard", "0.19.0")
    assert table.startswith("A web page answers at gateway.url: that is the Hermes dashboard, not the gateway.")


async def test_nothing_at_the_address(tmp_path: Path) -> None:
    code, document, table = await probe(tmp_path, GATEWAY__URL="http://127.0.0.1:9")

    assert (code, document["status"], document["gateway"]["reachable"]) == (1, "disconnected", False)
    assert table.startswith("The gateway at http://127.0.0.1:9 could not be reached: nothing listens there")
    assert "Traceback" not in table


async def test_probing_creates_no_session_and_calls_no_model(
    agent: HermesAgent, model: StubModel, tmp_path: Path
) -> None:
    _, before = await agent.get("/api/sessions")
    calls = len(model.calls)
    settings = {"GATEWAY__TOKEN": agent.key, "PROBE__INTERVAL_S": "0.05"}
    async with await SidecarProcess.start(tmp_path, agent.url, settings) as sidecar:
        for _ in range(10):
            await refreshed(sidecar.url)
    _, after = await agent.get("/api/sessions")

    assert (after["data"], len(model.calls)) == (before["data"], calls)


async def test_streamed_turn_and_clients_key_teach_what_the_sidecar_could_not_see(
    agent: HermesAgent, word: str, tmp_path: Path
) -> None:
    async with await SidecarProcess.start(tmp_path, agent.url) as sidecar:
        before = await refreshed(sidecar.url)
        fields = [chat.bearer(agent.key), (chat.SESSION_KEY, f"route-{word}")]
        await chat.turn(sidecar.url, f"look {word}", fields, streamed=True, image=chat.PIXEL)
        await raw_http.ask(sidecar.url, "GET", "/api/sessions", fields)
        after = await refreshed(sidecar.url)

    assert [in_short(before), in_short(after)] == ["++??? ??--?", "++?++ +?--?"]
    assert [after["details"][name]["evidence"] for name in ("streaming", "images", "sessions")] == ["observed"] * 3
    assert (after["status"], after["mode"]) == ("partial", "enhanced")


# GET /api/memory on each of them


async def test_memory_of_a_gateway_alone_is_told_in_words(agent: HermesAgent, tmp_path: Path) -> None:
    async with await SidecarProcess.start(tmp_path, agent.url, {"GATEWAY__TOKEN": agent.key}) as sidecar:
        answer = await raw_http.ask(sidecar.url, "GET", "/api/memory")

    assert (answer.status, answer.value(chat.SIDECAR_ERROR)) == (404, "capability_unavailable")
    assert answer.json()["error"] == {
        "message": "Memory browser requires the memory API.",
        "type": "invalid_request_error",
        "code": "capability_unavailable",
        "param": None,
        "hint": "Start the dashboard (hermes dashboard) and set dashboard.url.",
    }


async def test_memory_and_config_come_from_the_dashboard_also_when_it_restarts(
    agent: HermesAgent, tmp_path: Path
) -> None:
    """Its token is another one then. A client that goes on asking sees a gap while it is away, and no 401."""
    settings = {"GATEWAY__TOKEN": agent.key}
    async with await HermesDashboard.start(agent.home) as own:
        old_token = await own.token()
        settings["DASHBOARD__URL"] = own.url
        async with await SidecarProcess.start(tmp_path, agent.url, settings) as sidecar:
            first = [await raw_http.ask(sidecar.url, "GET", f"/api/{name}") for name in ("memory", "config", "skills")]
            restarting = asyncio.ensure_future(own.restart())
            meanwhile: list[raw_http.Answer] = []
            while not restarting.done():
                meanwhile.append(await raw_http.ask(sidecar.url, "GET", "/api/memory"))
                await asyncio.sleep(0.05)  # a client's pace
            await restarting
            after = [await raw_http.ask(sidecar.url, "GET", "/api/memory") for _ in range(3)]
            new_token = await own.token()
            log = sidecar.log

    assert old_token != new_token
    assert [answer.status for answer in first + after] == [200] * 6
    assert "providers" in first[0].json()
    assert {answer.status for answer in meanwhile} <= {200, 404, 502}
    for answer in meanwhile:
        if answer.status != 200:
            assert {"message", "hint", "code"} <= set(answer.json()["error"])
    shown = log + repr([first, meanwhile, after])
    assert [secret in shown for secret in (agent.key, old_token, new_token)] == [False] * 3


async def test_whole_dashboard_below_a_prefix(agent: HermesAgent, dashboard: HermesDashboard, tmp_path: Path) -> None:
    settings = {"GATEWAY__TOKEN": agent.key, "DASHBOARD__URL": dashboard.url, "DASHBOARD__MOUNT": "/dash"}
    async with await SidecarProcess.start(tmp_path, agent.url, settings) as sidecar:
        page = await raw_http.ask(sidecar.url, "GET", "/dash/")
        asset = re.search(rb'src="(/dash/assets/[^"]+)"', page.body)
        assert asset is not None
        script = await raw_http.ask(sidecar.url, "GET", asset[1].decode())
        token = await dashboard.token()
        config = await raw_http.ask(sidecar.url, "GET", "/dash/api/config", [("X-Hermes-Session-Token", token)])

    assert b'__HERMES_BASE_PATH__="/dash"' in page.body
    assert (script.status, "javascript" in str(script.value("Content-Type"))) == (200, True)
    assert (config.status, config.json()["model"]) == (200, "stub-model")


# LiteLLM


async def test_litellm_is_connected_in_portable_mode_and_no_model_is_called(proxy: LiteLlm, tmp_path: Path) -> None:
    code, document, table = await probe(tmp_path, GATEWAY__URL=proxy.url, GATEWAY__TOKEN=proxy.key)

    assert (code, *said(document)) == (0, "connected", "portable", "+++?? -----", "litellm", None)
    assert table.splitlines()[0] == (
        "Connected in portable mode. Chat works; advanced workspace tools are unavailable."
    )
    asked = set(re.findall(r'"([A-Z]+ /[^ "]*) HTTP', proxy.log))
    assert {"GET /v1/models", "GET /health/liveliness", "GET /v1/chat/completions"} <= asked
    assert "GET /health" not in asked
    assert {line for line in asked if not line.startswith("GET ")} == set()
    assert "acompletion" not in proxy.log


async def test_chat_through_the_sidecar_before_litellm(proxy: LiteLlm, tmp_path: Path) -> None:
    async with await SidecarProcess.start(tmp_path, proxy.url, {"GATEWAY__TOKEN": proxy.key}) as sidecar:
        answers = [
            await raw_http.ask(
                sidecar.url,
                "POST",
                chat.COMPLETIONS,
                [("Content-Type", "application/json"), (chat.SESSION_KEY, "route-1")],
                json.dumps(
                    {"model": litellm.MODEL, "stream": streamed, "messages": [{"role": "user", "content": "Hello"}]}
                ).encode(),
            )
            for streamed in (False, True)
        ]
        memory = await raw_http.ask(sidecar.url, "GET", "/api/memory")
        document = await refreshed(sidecar.url)

    assert [answer.status for answer in answers] == [200, 200]
    texts = [chat.text_of(answer.body, streamed=bool(number)) for number, answer in enumerate(answers)]
    assert texts == [litellm.ANSWER] * 2
    assert in_short(document) == "++++? -----"
    assert (memory.status, memory.json()["error"]["message"]) == (404, "Memory browser requires the memory API.")
    assert memory.json()["error"]["hint"] == "Put hermes-agent's gateway behind the sidecar; chat works without it."
