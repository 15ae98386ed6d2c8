"""`verify` against the sidecar before real sockets: what it proves, and what it says when there is nothing to prove."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sidecar import server
from sidecar.config import from_mapping
from sidecar.demo.gateway import DemoGateway
from sidecar.verify import Verdict, verify
from tests.support.rotating_gateway import RotatingGateway
from tests.support.scripted_upstream import scripted_upstream

KEY = "a-key-of-the-gateway"
COMPLETION = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}]}
CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"ok"},"finish_reason":null}]}\n\n'

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def sidecar_before(gateway_url: str, **sections: dict[str, Any]) -> AsyncIterator[str]:
    """The URL of a sidecar whose gateway is `gateway_url`; `sections` are added to its configuration."""
    gateway = {"url": gateway_url} | sections.pop("gateway", {})
    values = {"listen": {"port": 0}, "gateway": gateway, "store": {"url": "memory"}} | sections
    running = await server.start(from_mapping(values))
    try:
        yield running.url
    finally:
        await running.stop()


@asynccontextmanager
async def demo_gateway(key: str | None = None) -> AsyncIterator[DemoGateway]:
    gateway = await DemoGateway.start(key=key, word_delay_s=0)
    try:
        yield gateway
    finally:
        await gateway.stop()


@asynccontextmanager
async def backend(chat: Handler) -> AsyncIterator[str]:
    """A server that has POST /v1/chat/completions, answered by `chat`, and nothing else."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def streamed(request: web.Request, *pieces: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
    return response


async def verified(url: str, *, bearer: str | None = None, turn_limit_s: float = 20.0) -> tuple[Verdict, list[str]]:
    """The verdict, and the lines that were said on the way to it."""
    lines: list[str] = []
    return await verify(url, bearer=bearer, say=lines.append, turn_limit_s=turn_limit_s), lines


# Through the sidecar


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_both_turns_are_proven_to_be_in_one_session_with_and_without_an_image(suffix: str) -> None:
    async with demo_gateway() as gateway, sidecar_before(gateway.url) as url:
        verdict, lines = await verified(url + suffix)

    assert verdict.ok
    assert verdict.session_id is not None
    assert verdict.session_id.startswith("verify-")
    assert verdict.sentence.startswith(
        f"Both turns landed in session {verdict.session_id}: both messages stand in its history. "
        "With an image: both turns landed in session verify-"
    )
    mapped = "X-Hermes-Sidecar-Session: header:x-hermes-session-key"
    assert lines[:3] == [
        f"turn 1 (text, not streamed): answered, session {verdict.session_id}, {mapped}",
        f"turn 2 (text, streamed): answered, session {verdict.session_id}, {mapped}",
        f"history of session {verdict.session_id}: first message there, second message there",
    ]
    assert len(lines) == 9
    assert lines[-1].startswith("Without a key: two turns, two sessions, api-")


async def test_key_that_is_not_mapped_is_found_out() -> None:
    async with demo_gateway() as gateway, sidecar_before(gateway.url, session={"sources": []}) as url:
        verdict, lines = await verified(url)

    assert not verdict.ok
    assert verdict.sentence.startswith("The sidecar did not map the key of turn 1 (text, not streamed)")
    assert len(lines) == 3


async def test_gateway_that_is_down_is_told_in_the_sidecars_own_words() -> None:
    async with demo_gateway() as gateway:
        gone = gateway.url
    async with sidecar_before(gone) as url:
        verdict, _ = await verified(url)

    assert not verdict.ok
    assert "(502 upstream_unreachable)" in verdict.sentence
    assert gone.removeprefix("http://") in verdict.sentence
    assert "Start the gateway" in verdict.sentence


async def test_sidecar_that_is_down_is_told() -> None:
    async with demo_gateway() as gateway:
        gone = gateway.url

    verdict, lines = await verified(gone)

    assert not verdict.ok
    assert verdict.sentence == (
        f"Nothing answers at {gone} (Connection refused). Start the sidecar (hermes-sidecar serve), "
        "or correct the address."
    )
    assert lines == ["turn 1 (text, not streamed): unreachable"]


async def test_gateway_that_wants_a_key_gets_it_from_the_sidecar(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(KEY + "\n")
    token_file.chmod(0o600)
    async with demo_gateway(KEY) as gateway:
        async with sidecar_before(gateway.url) as url:
            without, _ = await verified(url)
            from_caller, _ = await verified(url, bearer=KEY)
        async with sidecar_before(gateway.url, gateway={"token_file": str(token_file)}) as url:
            from_sidecar, lines = await verified(url)

    assert not without.ok
    assert without.sentence.startswith("The gateway wants a key, and got none or a wrong one (status 401")
    assert "gateway.token_file" in without.sentence
    assert from_caller.ok
    assert from_sidecar.ok
    assert KEY not in "".join([from_sidecar.sentence, *lines])


async def test_sidecar_that_wants_a_client_token_says_so(tmp_path: Path) -> None:
    tokens_file = tmp_path / "tokens"
    tokens_file.write_text("desk:a-client-token-of-the-desk\n")
    tokens_file.chmod(0o600)
    listen = {"port": 0, "tokens_file": str(tokens_file), "isolate_clients": True}
    async with demo_gateway() as gateway, sidecar_before(gateway.url, listen=listen) as url:
        without, _ = await verified(url)
        with_token, _ = await verified(url, bearer="a-client-token-of-the-desk")

    assert not without.ok
    assert without.sentence.startswith("The sidecar wants a client token (401 client_token_required)")
    assert with_token.ok
    assert (with_token.session_id or "").startswith("desk-verify-")


async def test_backend_without_sessions_is_fine_when_chat_works() -> None:
    bodies: list[Any] = []

    async def chat(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        if bodies[-1]["stream"]:
            return await streamed(request, CHUNK, b"data: [DONE]\n\n")
        return web.json_response(COMPLETION)

    async with backend(chat) as backend_url, sidecar_before(backend_url) as url:
        verdict, lines = await verified(url)

    assert verdict.ok
    assert verdict.session_id is None
    assert verdict.sentence.startswith("Chat works, and this backend keeps no sessions")
    assert "the history that the client itself sends" in verdict.sentence
    assert lines[-1] == "Without a key: the gateway names no session."
    assert [body["stream"] for body in bodies] == [False, True, False, True, False, False]
    assert [isinstance(body["messages"][0]["content"], list) for body in bodies] == [
        False, False, True, True, False, False,
    ]  # fmt: skip
    assert {body["model"] for body in bodies} == {"hermes-agent"}


# Straight at a backend that misbehaves: every one of these ends before the sidecar's part is looked at


async def silent(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets that event")


async def breaks_off(request: web.Request) -> web.StreamResponse:
    response = await streamed(request, CHUNK)
    assert request.transport is not None
    request.transport.abort()
    return response


async def ends_without_an_end(request: web.Request) -> web.StreamResponse:
    return await streamed(request, CHUNK)


async def plain_json(request: web.Request) -> web.StreamResponse:
    return web.json_response(COMPLETION)


async def agent_fails(request: web.Request) -> web.StreamResponse:
    failed = b'data: {"choices":[{"delta":{},"finish_reason":"error"}],"error":{"message":"no model"}}\n\n'
    return await streamed(request, failed, b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("second_turn", "words"),
    [
        pytest.param(silent, "Turn 2 (text, streamed) had no complete answer within 0.2 s", id="silent"),
        pytest.param(breaks_off, "The connection broke in turn 2", id="breaks-off"),
        pytest.param(ends_without_an_end, "The answer to turn 2 (text, streamed) stopped without an end", id="no-end"),
        pytest.param(plain_json, "a stream was asked for, and application/json came", id="not-streamed"),
        pytest.param(agent_fails, "its agent failed: no model.", id="agent-failed"),
    ],
)
async def test_streamed_turn_that_goes_wrong_is_told_apart(second_turn: Handler, words: str) -> None:
    async def chat(request: web.Request) -> web.StreamResponse:
        return await (second_turn if (await request.json())["stream"] else plain_json)(request)

    async with backend(chat) as url:
        # Only a turn that hangs ever meets the limit.
        verdict, lines = await verified(url, turn_limit_s=0.2 if second_turn is silent else 20.0)

    assert not verdict.ok
    assert words in verdict.sentence
    assert len(lines) == 2


async def test_redirect_is_not_followed() -> None:
    async def chat(request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect("/v1/chat/completions/")

    async with backend(chat) as url:
        verdict, _ = await verified(url)

    assert not verdict.ok
    assert "Turn 1 (text, not streamed) was not answered (status 307)" in verdict.sentence


async def test_page_that_answers_everything_is_no_chat() -> None:
    async def chat(request: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>", content_type="text/html")

    async with backend(chat) as url:
        verdict, _ = await verified(url)

    assert not verdict.ok
    assert "text/html came instead of JSON, perhaps the page of a dashboard" in verdict.sentence


async def test_server_that_is_no_sidecar_is_found_out() -> None:
    async with demo_gateway() as gateway:
        verdict, _ = await verified(gateway.url)

    assert not verdict.ok
    assert "that is no hermes-sidecar" in verdict.sentence


async def test_token_that_a_server_quotes_is_not_printed() -> None:
    async def chat(request: web.Request) -> web.StreamResponse:
        quoted = {"error": {"message": f"Bad key: {request.headers['Authorization']}"}}
        return web.Response(status=401, body=json.dumps(quoted).encode(), content_type="application/json")

    async with backend(chat) as url:
        verdict, lines = await verified(url, bearer=KEY)

    assert "Bad key: Bearer [the token]" in verdict.sentence
    assert KEY not in "".join([verdict.sentence, *lines])


@pytest.mark.parametrize(
    ("url", "bearer", "words"),
    [
        pytest.param("127.0.0.1:8650", None, "127.0.0.1:8650 is not an http address.", id="no-scheme"),
        pytest.param("ftp://127.0.0.1", None, "is not an http address.", id="other-scheme"),
        pytest.param("http://", None, "is not an http address.", id="no-host"),
        pytest.param("http://[::1", None, "is not an http address.", id="half-an-address"),
        pytest.param("http://127.0.0.1:99999", None, "is not an http address.", id="no-such-port"),
        pytest.param("http://a..b:1", None, "Nothing answers at http://a..b:1", id="no-such-name"),
        pytest.param("http://127.0.0.1:1", "a\r\nb", "The token holds a line break", id="token-with-a-line-break"),
    ],
)
async def test_argument_that_cannot_work_is_a_sentence_not_an_exception(
    url: str, bearer: str | None, words: str
) -> None:
    verdict, _ = await verified(url, bearer=bearer)

    assert not verdict.ok
    assert words in verdict.sentence


# Conversations that the gateway moves


async def rotation_verified(gateway: RotatingGateway, **sections: dict[str, Any]) -> tuple[Verdict, list[str]]:
    lines: list[str] = []
    async with scripted_upstream(gateway) as upstream, sidecar_before(upstream.url, **sections) as url:
        return await verify(url, bearer=None, say=lines.append, turn_limit_s=20.0, rotation=True), lines


async def test_rotation_is_proven_by_the_turn_after_it_streamed_and_not() -> None:
    gateway = RotatingGateway(rotates_after=3)

    verdict, lines = await rotation_verified(gateway)

    assert verdict.ok, verdict.sentence
    plain, streamed = gateway.chats[0], gateway.chats[5]
    assert gateway.chats == [plain] * 4 + ["child-2"] + [streamed] * 4 + ["child-4"]
    assert verdict.sentence == (
        f"The gateway moved the conversation from session {plain} to child-2 in turn 4 (not streamed, long), and turn "
        "5 (not streamed, long) went to child-2: both messages stand in the history there. Streamed: the gateway moved "
        f"the conversation from session {streamed} to child-4 in turn 4 (streamed, long), and turn 5 (streamed, long) "
        "went to child-4: both messages stand in the history there."
    )
    assert [line.partition(":")[0] for line in lines if line.startswith("turn 5")] == [
        "turn 5 (not streamed, long)",
        "turn 5 (streamed, long)",
    ]
    assert {len(message) for session in gateway.sessions.values() for message in session.messages} <= {
        *range(39_000, 41_000)
    }


async def test_gateway_that_does_not_rotate_leaves_nothing_to_prove() -> None:
    gateway = RotatingGateway(rotates_after=1_000)

    verdict, _ = await rotation_verified(gateway)

    assert verdict.ok
    assert verdict.sentence.startswith("Nothing to prove here: in 12 long turns the gateway kept the conversation in")
    assert len(gateway.chats) == 12


async def test_rotation_that_is_not_followed_is_found_out() -> None:
    gateway = RotatingGateway(rotates_after=1)

    verdict, _ = await rotation_verified(gateway, session={"follow_rotation": False})

    assert not verdict.ok
    assert "but the sidecar sent turn 3 (not streamed, long) to the old one" in verdict.sentence
    assert "session.follow_rotation must be true" in verdict.sentence
    assert len(gateway.chats) == 3


async def test_long_turn_that_fails_is_told_as_any_other() -> None:
    async def chat(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "too long"}}, status=413)

    async with backend(chat) as backend_url, sidecar_before(backend_url) as url:
        verdict = await verify(url, bearer=None, say=lambda _: None, rotation=True)

    assert not verdict.ok
    assert verdict.sentence.startswith("Turn 1 (not streamed, long) was not answered (status 413: too long).")
