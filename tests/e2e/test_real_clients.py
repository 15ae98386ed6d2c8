"""The clients that people use, each through the sidecar, and what its user sees.

Every client does every situation: before the demo gateway and the real hermes-agent for conversations, before an
upstream in bytes for what those do not do on command.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sidecar import faults
from sidecar.demo.gateway import DemoGateway
from tests.support import chat
from tests.support.hermes_agent import HermesAgent
from tests.support.real_clients import NAMES, Client, Job, Page, chat_page, real_client, the_rest, turn
from tests.support.scripted_upstream import (
    LAST_CHUNK,
    STREAM_HEAD,
    chunk,
    left_to_the_test,
    ok,
    scripted_upstream,
)
from tests.support.sidecars import Sidecar, running_sidecar
from tests.support.stub_model import Behaviour, StubModel

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    # The programs that a first test starts have limits of their own.
    pytest.mark.timeout(60, func_only=True),
]

COMPLETE = {"end": "complete"}
LEAVES_WITHIN_S = 1.0
TOOL = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = {"name": "get_weather", "arguments": {"city": "Zürich"}}

KINDS = {
    "openai-python": {401: "AuthenticationError", 502: "InternalServerError"},
    "openai-node": {401: "AuthenticationError", 502: "InternalServerError"},
    "ai-sdk": {401: "AI_APICallError", 502: "AI_APICallError"},
    "langchain": {401: "OpenAIAuthenticationError", 502: "OpenAIAPIError"},
    "litellm": {401: "AuthenticationError", 502: "BadGatewayError"},
    "curl": {401: "exit 22", 502: "exit 22"},
    "browser": {401: "Unauthorized", 502: "Bad Gateway"},
}
"""The class of each client's own error; curl has an exit code, and fetch only the status."""

streamed_or_not = pytest.mark.parametrize(
    "stream", [pytest.param(False, id="plain"), pytest.param(True, id="streamed")]
)


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=NAMES)
async def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    async with real_client(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


def before(
    client: Client, gateway_url: str, listen: Mapping[str, Any] | None = None, *, probes: bool = False
) -> AbstractAsyncContextManager[Sidecar]:
    """A sidecar that lets the client's page call, where it is one."""
    origins = [client.origin] if client.origin else []
    return running_sidecar(gateway_url, listen={"port": 0, "allowed_origins": origins, **(listen or {})}, probes=probes)


def event(delta: Mapping[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    document = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return chunk(b"data: " + json.dumps(document).encode() + b"\n\n")


DONE = event({}, "stop") + chunk(b"data: [DONE]\n\n") + LAST_CHUNK


def completion(message: Mapping[str, Any], finish_reason: str) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    document = {"id": "c-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return ok(json.dumps({**document, "usage": usage}).encode())


# Conversations


async def test_turns_with_one_key_are_one_conversation_of_the_demo_gateway(client: Client, word: str) -> None:
    key = f"{client.name}-{word}"
    gateway = await DemoGateway.start(key="the-key", word_delay_s=0.001)
    try:
        async with before(client, gateway.url, probes=True) as sidecar:
            url = f"{sidecar.url}/v1"
            turns = [
                await turn(client, Job(url, key, "Hello", "the-key", stream=False)),
                await turn(client, Job(url, key, "Hello", "the-key")),
                await turn(client, Job(url, key, "Look", "the-key", stream=False, image=chat.PIXEL)),
                await turn(client, Job(url, key, "Look", "the-key", image=chat.PIXEL)),
            ]
            refused = await turn(client, Job(url, key, "Hello", "not-the-key"))
    finally:
        await gateway.stop()

    said = "I am the demo gateway: no model, but a memory. I have seen {} of session {}, this one included."
    assert [seen.text for seen in turns] == [
        said.format("1 message", key),
        said.format("3 messages", key),
        said.format("5 messages", key) + " This one came with an image.",
        said.format("7 messages", key) + " This one came with an image.",
    ]
    assert [seen.end for seen in turns] == [COMPLETE] * 4
    assert [len(seen.pieces) > 10 for seen in turns] == [False, True, False, True]
    assert refused.end["kind"] == KINDS[client.name][401]
    assert "Invalid API key" in refused.end["text"]


async def test_turns_with_one_key_are_one_conversation_of_the_real_agent(
    client: Client, agent: HermesAgent, word: str
) -> None:
    key = f"{client.name}-{word}"
    async with before(client, agent.url, probes=True) as sidecar:
        url = f"{sidecar.url}/v1"
        turns = [
            await turn(client, Job(url, key, f"first {word}", agent.key, stream=False)),
            await turn(client, Job(url, key, f"second {word}", agent.key)),
            await turn(client, Job(url, key, f"look {word}", agent.key, image=chat.PIXEL)),
        ]
        refused = await turn(client, Job(url, key, "Hello", "not-the-key"))

    assert [seen.text for seen in turns] == [
        "stub saw 1 non-system messages; roles=['user']",
        "stub saw 3 non-system messages; roles=['user', 'assistant', 'user']",
        "stub saw 5 non-system messages; roles=['user', 'assistant', 'user', 'assistant', 'user']",
    ]
    assert [seen.end for seen in turns] == [COMPLETE] * 3
    assert [len(seen.pieces) > 1 for seen in turns] == [False, True, True]
    messages = await agent.messages(key)
    assert [message["role"] for message in messages] == ["user", "assistant"] * 3
    assert "[screenshot]" in messages[4]["content"]
    assert refused.end["kind"] == KINDS[client.name][401]
    assert "Invalid API key" in refused.end["text"]


async def test_the_agents_own_tools_do_not_disturb_the_answer(
    client: Client, agent: HermesAgent, model: StubModel, word: str
) -> None:
    """The agent tells of its work in events with a name, and takes no offer of the client's tools.

    No library looks at the name: an application finds such an event among its chunks, without `choices`, and has to
    pass over it, as ours do. The Vercel AI SDK reports an error for each by itself, and goes on.
    Source: NousResearch/hermes-agent#31778, danny-avila/LibreChat#12919, anomalyco/opencode#38106.
    """
    model.behave(word, Behaviour(calls_tool=True))
    async with before(client, agent.url) as sidecar:
        job = Job(f"{sidecar.url}/v1", f"{client.name}-{word}", f"use it {word}", agent.key, tool=TOOL)
        seen = await turn(client, job)

    assert (seen.end, seen.tools) == (COMPLETE, [])
    assert seen.complaints == ["AI_TypeValidationError"] * (2 if client.name == "ai-sdk" else 0)
    assert seen.text == "stub saw 3 non-system messages; roles=['user', 'assistant', 'tool']"


# An answer as it comes


async def test_each_piece_is_seen_before_the_next_is_sent(client: Client) -> None:
    async with scripted_upstream(left_to_the_test) as upstream, before(client, upstream.url) as sidecar:
        await client.begin(Job(f"{sidecar.url}/v1", "one"))
        connection = await upstream.connection()
        request = await connection.request()
        connection.write(STREAM_HEAD + event({"role": "assistant"}))
        for piece in ("Grüezi", " mitenand", " 👋"):
            connection.write(event({"content": piece}))
            assert await client.event() == {"piece": piece}
        connection.write(DONE)
        rest = await the_rest(client)

    assert (rest.pieces, rest.end) == ([], COMPLETE)
    assert request.values("x-hermes-session-id") == [b"one"]
    assert json.loads(request.body)["stream"] is True


async def test_a_thousand_pieces_at_once_are_a_thousand_pieces(client: Client) -> None:
    """They share chunks on the way, since a chunk's end means nothing."""
    words = [f"word {number} " for number in range(1000)]
    answer = STREAM_HEAD + b"".join(event({"content": word}) for word in words) + DONE
    async with scripted_upstream(answer) as upstream, before(client, upstream.url) as sidecar:
        seen = await turn(client, Job(f"{sidecar.url}/v1", "one"))

    assert (seen.pieces, seen.end) == (words, COMPLETE)


@streamed_or_not
async def test_a_tools_definition_and_its_call_pass(client: Client, stream: bool) -> None:
    arguments = json.dumps(CALL["arguments"], ensure_ascii=False)
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": CALL["name"], "arguments": ""}}
    rest = [{"index": 0, "function": {"arguments": part}} for part in (arguments[:9], arguments[9:])]
    streamed = STREAM_HEAD + b"".join(event({"tool_calls": [part]}) for part in ({**call}, *rest))
    whole = {**call, "function": {"name": CALL["name"], "arguments": arguments}}
    answer = streamed + event({}, "tool_calls") + DONE if stream else completion({"tool_calls": [whole]}, "tool_calls")
    async with scripted_upstream(answer) as upstream, before(client, upstream.url) as sidecar:
        seen = await turn(client, Job(f"{sidecar.url}/v1", "one", "Weather?", stream=stream, tool=TOOL))

    assert (seen.pieces, seen.tools, seen.end) == ([], [CALL], COMPLETE)
    (offered,) = json.loads(upstream.only_request.body)["tools"]
    assert offered["function"].items() >= TOOL.items()


# A user who leaves


@pytest.mark.parametrize("phase", ["silent", "silent-plain", "mid-stream"])
async def test_the_upstream_sees_stop_within_a_second(client: Client, phase: str) -> None:
    async with scripted_upstream(left_to_the_test) as upstream, before(client, upstream.url) as sidecar:
        await client.begin(Job(f"{sidecar.url}/v1", "one", stream=phase != "silent-plain"))
        connection = await upstream.connection()
        await connection.request()
        if phase == "mid-stream":
            connection.write(STREAM_HEAD + event({"content": "word"}))
            assert await client.event() == {"piece": "word"}
        left_at = time.monotonic()
        await client.leave()
        await connection.ended()
        seen = await the_rest(client)

    assert connection.ended_at is not None
    assert connection.ended_at - left_at < LEAVES_WITHIN_S
    assert (seen.pieces, seen.end) == ([], {"end": "left"})


# What goes wrong


def assert_tells(client: Client, end: Mapping[str, Any], fault: faults.Fault) -> None:
    assert (end["end"], end["kind"]) == ("error", KINDS[client.name][fault.status])
    assert end["status"] == (None if client.name == "curl" else fault.status)
    assert fault.message in end["text"]
    # LiteLLM makes an exception of its own from the message alone: that has to be enough.
    assert client.name == "litellm" or fault.hint in end["text"] + end.get("details", "")


@streamed_or_not
async def test_an_unreachable_gateway_is_told_in_our_words(client: Client, stream: bool) -> None:
    # Bound but not listening: nobody else can take the port, and connecting to it is refused.
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        async with before(client, url) as sidecar:
            seen = await turn(client, Job(f"{sidecar.url}/v1", "one", stream=stream))

    assert_tells(client, seen.end, faults.upstream_unreachable(url, "nothing listens there (connection refused)"))


@streamed_or_not
async def test_a_missing_client_token_is_told_in_our_words(client: Client, stream: bool, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("laptop:a-token-of-ours-0123456789\n")
    tokens.chmod(0o600)
    async with (
        scripted_upstream(left_to_the_test) as upstream,
        before(client, upstream.url, {"tokens_file": str(tokens)}) as sidecar,
    ):
        seen = await turn(client, Job(f"{sidecar.url}/v1", "one", stream=stream))

    assert_tells(client, seen.end, faults.client_token_required())
    assert upstream.connections == []


async def test_a_stream_that_breaks_off_is_an_error_and_no_short_answer(client: Client) -> None:
    async with scripted_upstream(left_to_the_test) as upstream, before(client, upstream.url) as sidecar:
        await client.begin(Job(f"{sidecar.url}/v1", "one"))
        connection = await upstream.connection()
        await connection.request()
        connection.write(STREAM_HEAD + event({"content": "half an"}))
        assert await client.event() == {"piece": "half an"}
        connection.reset()
        seen = await the_rest(client)

    assert (seen.pieces, seen.end["end"]) == ([], "error")


# EventSource

LISTEN = """
{
    const heard = [];
    let wake = () => {};
    const hear = (thing) => { heard.push(thing); wake(); };
    window.source = new EventSource(url);
    source.onmessage = (event) => hear(event.data);
    source.onerror = () => hear(source.readyState === EventSource.CONNECTING ? 'connecting again' : 'given up');
    window.heard = async () => {
        while (!heard.length) await new Promise((resolve) => (wake = resolve));
        return heard.shift();
    };
}
"""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def page(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    async with chat_page(tmp_path_factory.mktemp("page")) as running:
        yield running


async def test_event_source_goes_on_where_the_stream_broke_off_and_leaves_at_once(page: Page) -> None:
    async with scripted_upstream(left_to_the_test) as upstream, before(page, upstream.url) as sidecar:
        await page.tab.run(LISTEN, {"url": f"{sidecar.url}/v1/runs/r-1/events"})
        first = await upstream.connection()
        await first.request()
        first.write(STREAM_HEAD + chunk(b"retry: 10\n\n"))
        heard = []
        for number in (b"1", b"2"):
            first.write(chunk(b"id: %b\ndata: event %b\n\n" % (number, number)))
            heard.append(await page.tab.run("heard()"))
        first.reset()
        heard.append(await page.tab.run("heard()"))
        second = await upstream.connection(1)
        request = await second.request()
        second.write(STREAM_HEAD + chunk(b"id: 3\ndata: event 3\n\n"))
        heard.append(await page.tab.run("heard()"))
        left_at = time.monotonic()
        await page.tab.run("source.close()")
        await second.ended()

    assert heard == ["event 1", "event 2", "connecting again", "event 3"]
    assert request.target == b"/v1/runs/r-1/events"
    assert request.values("last-event-id") == [b"2"]
    assert second.ended_at is not None
    assert second.ended_at - left_at < LEAVES_WITHIN_S


async def test_event_source_hears_that_the_gateway_has_gone(page: Page) -> None:
    gateway = await DemoGateway.start()
    try:
        async with before(page, gateway.url, probes=True) as sidecar:
            await page.tab.run(LISTEN, {"url": f"{sidecar.url}/capabilities/events"})
            while json.loads(await page.tab.run("heard()"))["status"] != "partial":
                pass  # what is known before the first probe has ended
            await gateway.stop()
            await page.tab.run(
                "fetch(url, {method: 'POST'}).then(() => null)", {"url": f"{sidecar.url}/capabilities/refresh"}
            )
            told = json.loads(await page.tab.run("heard()"))
            await page.tab.run("source.close()")
    finally:
        await gateway.stop()

    assert (told["status"], told["gateway"]["reachable"]) == ("disconnected", False)
