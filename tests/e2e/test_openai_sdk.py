"""OpenAI's own Python client through the sidecar to the real hermes-agent: same calls, same exceptions."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from tests.support import chat
from tests.support.hermes_agent import HermesAgent
from tests.support.sidecar_process import SidecarProcess

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(60, func_only=True),
]


@asynccontextmanager
async def sdk(url: str, api_key: str, session_key: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """The client as an application sets it up; no retries, so that one call is one request."""
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key=api_key,
        max_retries=0,
        default_headers={chat.SESSION_KEY: session_key},
        # The developer's proxy variables are not this test's business.
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    ) as client:
        yield client


async def say(client: openai.AsyncOpenAI, prompt: str) -> str | None:
    completion = await client.chat.completions.create(
        model="hermes-agent", messages=[{"role": "user", "content": prompt}]
    )
    return completion.choices[0].message.content


async def say_streamed(client: openai.AsyncOpenAI, prompt: str) -> str:
    stream = await client.chat.completions.create(
        model="hermes-agent", messages=[{"role": "user", "content": prompt}], stream=True
    )
    pieces = [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
    return "".join(pieces).strip()


async def test_a_plain_turn_and_a_streamed_one_are_one_conversation(
    agent: HermesAgent, sidecar: SidecarProcess, word: str
) -> None:
    key = f"sdk-{word}"

    async with sdk(sidecar.url, agent.key, key) as client:
        answers = [await say(client, f"first {word}"), await say_streamed(client, f"second {word}")]

    assert answers == [
        "stub saw 1 non-system messages; roles=['user']",
        "stub saw 3 non-system messages; roles=['user', 'assistant', 'user']",
    ]
    assert [message["role"] for message in await agent.messages(key)] == ["user", "assistant"] * 2


async def test_models_are_listed(agent: HermesAgent, sidecar: SidecarProcess, word: str) -> None:
    async with sdk(sidecar.url, agent.key, word) as client:
        models = [model.id async for model in client.models.list()]

    assert models == ["hermes-agent"]


async def test_the_gateway_refusing_a_key_is_the_sdks_authentication_error(sidecar: SidecarProcess, word: str) -> None:
    async with sdk(sidecar.url, "not-the-key", word) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await say(client, f"first {word}")

    assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
    assert chat.SIDECAR_ERROR not in caught.value.response.headers


async def test_a_gateway_that_is_down_is_the_sdks_status_error_with_our_code(tmp_path: Path, word: str) -> None:
    # Bound but not listening: nobody else can take the port, and connecting to it is refused.
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        gateway_url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        async with (
            await SidecarProcess.start(tmp_path, gateway_url) as sidecar,
            sdk(sidecar.url, "any-key", word) as client,
        ):
            with pytest.raises(openai.APIStatusError) as plain:
                await say(client, f"first {word}")
            with pytest.raises(openai.APIStatusError) as streamed:
                await say_streamed(client, f"second {word}")

    for caught in (plain.value, streamed.value):
        assert (caught.status_code, caught.code, caught.type) == (502, "upstream_unreachable", "server_error")
        assert caught.response.headers[chat.SIDECAR_ERROR] == "upstream_unreachable"
