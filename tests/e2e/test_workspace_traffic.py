"""What Hermes Workspace sends, as recorded: it finds behind the sidecar what it finds at the gateway itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import chat, raw_http
from tests.support.hermes_agent import HermesAgent
from tests.support.sidecar_process import SidecarProcess
from tests.support.stub_model import StubModel

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(60, func_only=True),
]

# Node's fetch: Sec-Fetch-Mode without Sec-Fetch-Site or Origin. It is a program, not a page.
NODE_FIELDS = [
    ("accept", "*/*"),
    ("accept-language", "*"),
    ("sec-fetch-mode", "cors"),
    ("user-agent", "node"),
    ("accept-encoding", "gzip, deflate"),
]

PROBES = [
    ("GET", "/health", 200),
    ("GET", "/v1/models", 200),
    ("GET", "/v1/chat/completions", 405),
    ("GET", "/api/sessions", 200),
    ("GET", "/api/jobs", 200),
    ("GET", "/api/mcp", 404),
    ("POST", "/api/sessions/__probe__/chat/stream", 404),
]


@pytest.mark.parametrize(
    ("method", "target", "status"), [pytest.param(*row, id=f"{row[0]} {row[1]}") for row in PROBES]
)
async def test_a_probe_finds_the_same_with_and_without_the_sidecar(
    agent: HermesAgent, sidecar: SidecarProcess, method: str, target: str, status: int
) -> None:
    direct = await probe(agent.url, method, target, agent.key)
    through = await probe(sidecar.url, method, target, agent.key)

    assert through == direct
    assert direct[0] == status


@pytest.mark.parametrize("target", ["/api/skills", "/api/config"])
async def test_a_missing_family_is_missing_behind_the_sidecar_too_but_in_words(
    agent: HermesAgent, sidecar: SidecarProcess, target: str
) -> None:
    """Workspace asks for the status alone: any other than 404 and 403 would switch on a dead tab."""
    direct = await probe(agent.url, "GET", target, agent.key)
    status, _, document = await probe(sidecar.url, "GET", target, agent.key)

    assert (direct[0], status) == (404, 404)
    assert document["error"]["code"] == "capability_unavailable"
    assert document["error"]["hint"]


async def test_a_missing_session_stays_the_gateways_own_404(agent: HermesAgent, sidecar: SidecarProcess) -> None:
    """Workspace takes this 404 for "the route exists"; a 200, or another 404, would change what it shows."""
    status, content_type, document = await probe(sidecar.url, "POST", "/api/sessions/__probe__/chat/stream", agent.key)

    assert (status, content_type) == (404, "application/json; charset=utf-8")
    assert document["error"]["code"] == "session_not_found"


async def test_chat_turns_stay_in_the_session_that_workspace_names(
    model: StubModel, agent: HermesAgent, sidecar: SidecarProcess, word: str
) -> None:
    route = f"ws-{word}"

    turns = [await workspace_turn(sidecar.url, agent.key, route, f"turn {n} {word}") for n in (1, 2)]

    assert [turn.session_id for turn in turns] == [route, route]
    assert [turn.sidecar_session for turn in turns] == ["client", "client"]
    assert [turn.answer.value("Content-Type") for turn in turns] == ["text/event-stream"] * 2
    assert [turn.answer.value("Content-Encoding") for turn in turns] == [None, None]
    assert [call.roles for call in model.turns_about(word)] == [["user"], ["user", "assistant", "user"]]
    users = [message["content"] for message in await agent.messages(route) if message["role"] == "user"]
    assert users == [f"turn 1 {word}", f"turn 2 {word}"]


async def probe(url: str, method: str, target: str, key: str) -> tuple[int, str | None, Any]:
    """Status, content type and body of a recorded probe's answer, the body without its time stamps."""
    fields: list[tuple[str, str]] = [("connection", "keep-alive"), chat.bearer(key), *NODE_FIELDS]
    body = b""
    if method == "POST":
        fields, body = [("Content-Type", "application/json"), *fields], b"{}"
    answer = await raw_http.ask(url, method, target, fields, body)
    content_type = answer.value("Content-Type")
    if content_type is not None and content_type.startswith("application/json"):
        return answer.status, content_type, without_time_stamps(answer.json())
    return answer.status, content_type, answer.body


async def workspace_turn(url: str, key: str, route: str, prompt: str) -> chat.Turn:
    """The recorded request, header for header."""
    body = b'{"model":"hermes-agent","messages":[{"role":"user","content":"%s"}],"stream":true}' % prompt.encode()
    fields: list[tuple[str | bytes, str | bytes]] = [
        ("host", url.removeprefix("http://")),
        ("connection", "keep-alive"),
        ("Content-Type", "application/json"),
        chat.bearer(key),
        ("X-Hermes-Session-Id", route),
        ("X-Claude-Session-Id", route),
        *NODE_FIELDS,
        ("content-length", str(len(body))),
    ]
    async with raw_http.sending(url, "POST", chat.COMPLETIONS, fields, body) as exchange:
        answer = await exchange.whole(await exchange.head())
    assert answer.status == 200, answer.body
    return chat.Turn(answer, chat.text_of(answer.body, streamed=True))


def without_time_stamps(document: Any) -> Any:
    if isinstance(document, dict):
        return {name: without_time_stamps(value) for name, value in document.items() if name != "created"}
    if isinstance(document, list):
        return [without_time_stamps(item) for item in document]
    return document
