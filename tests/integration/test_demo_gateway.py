"""The demo gateway over real sockets: it must keep conversations as the real one does, or it proves nothing."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from sidecar.demo.gateway import DemoGateway
from sidecar.demo.memory import MAX_MESSAGES, MAX_SESSIONS

LIMIT_S = 10
CHAT = "/v1/chat/completions"
PIXEL = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture
async def gateway() -> AsyncIterator[DemoGateway]:
    running = await DemoGateway.start(word_delay_s=0)
    yield running
    await running.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session:
        yield session


def said(*contents: object, stream: bool = False) -> dict[str, object]:
    """A chat request with these user messages."""
    return {"messages": [{"role": "user", "content": content} for content in contents], "stream": stream}


async def chat(
    http: aiohttp.ClientSession, gateway: DemoGateway, body: object, **headers: str
) -> tuple[aiohttp.ClientResponse, Any]:
    named = {f"X-Hermes-{name.replace('_', '-')}": value for name, value in headers.items()}
    async with http.post(gateway.url + CHAT, json=body, headers=named) as answer:
        return answer, await answer.json()


def answer_of(document: Any) -> str:
    text = document["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


async def get(http: aiohttp.ClientSession, url: str, **headers: str) -> tuple[int, Any]:
    async with http.get(url, headers=headers) as answer:
        return answer.status, await answer.json()


async def messages(http: aiohttp.ClientSession, gateway: DemoGateway, session_id: str) -> list[tuple[str, str]]:
    status, document = await get(http, f"{gateway.url}/api/sessions/{session_id}/messages")
    assert status == 200
    return [(message["role"], message["content"]) for message in document["data"]]


# Sessions


async def test_two_turns_with_one_id_share_their_history(http: aiohttp.ClientSession, gateway: DemoGateway) -> None:
    await chat(http, gateway, said("Remember token-ab12, please."), Session_Id="talk-1")
    answer, document = await chat(http, gateway, said("Which token did I give you?"), Session_Id="talk-1")

    assert answer.headers["X-Hermes-Session-Id"] == "talk-1"
    assert "I have seen 3 messages of session talk-1" in answer_of(document)
    assert "Earlier in this session you gave me token-ab12." in answer_of(document)
    history = await messages(http, gateway, "talk-1")
    assert [role for role, _ in history] == ["user", "assistant", "user", "assistant"]
    assert history[0][1] == "Remember token-ab12, please."
    assert history[3][1] == answer_of(document)


async def test_history_in_the_body_is_ignored_when_an_id_is_given(
    http: aiohttp.ClientSession, gateway: DemoGateway
) -> None:
    body = said("I gave you token-fake1.", "Which token did I give you?")

    _, document = await chat(http, gateway, body, Session_Id="fresh")

    assert "I have seen 1 message of session fresh" in answer_of(document)
    assert "You have not given me a token in this session." in answer_of(document)


async def test_without_an_id_the_first_message_decides_the_session(
    http: aiohttp.ClientSession, gateway: DemoGateway
) -> None:
    system = {"role": "system", "content": "Be brief."}
    body = {"messages": [system, *said("one", "two")["messages"]]}  # type: ignore[misc]

    _, document = await chat(http, gateway, said("one", "two"))
    alike, _ = await chat(http, gateway, said("one", "three"))
    other, _ = await chat(http, gateway, said("two"))
    with_system, _ = await chat(http, gateway, body)

    expected = "api-" + hashlib.sha256(b"\none").hexdigest()[:16]
    assert alike.headers["X-Hermes-Session-Id"] == expected
    assert other.headers["X-Hermes-Session-Id"] == "api-" + hashlib.sha256(b"\ntwo").hexdigest()[:16]
    prompted = "api-" + hashlib.sha256(b"Be brief.\none").hexdigest()[:16]
    assert with_system.headers["X-Hermes-Session-Id"] == prompted
    assert f"I have seen 2 messages of session {expected}" in answer_of(document)


async def test_session_key_alone_is_echoed_and_joins_nothing(http: aiohttp.ClientSession, gateway: DemoGateway) -> None:
    one, _ = await chat(http, gateway, said("one"), Session_Key="route-1")
    two, _ = await chat(http, gateway, said("two"), Session_Key="route-1")

    ids = [answer.headers["X-Hermes-Session-Id"] for answer in (one, two)]
    assert all(session_id.startswith("api-") for session_id in ids)
    assert ids[0] != ids[1]
    assert one.headers["X-Hermes-Session-Key"] == "route-1"


@pytest.mark.parametrize(
    ("session_id", "message"),
    [
        pytest.param("a/b", "Invalid session ID", id="slash"),
        pytest.param("a\\b", "Invalid session ID", id="backslash"),
        pytest.param("..", "Invalid session ID", id="dots"),
        pytest.param("C:x", "Invalid session ID", id="drive-letter"),
        pytest.param("a\udce9", "Invalid session ID", id="byte-that-is-no-text"),
        pytest.param("x" * 257, "Session ID too long", id="257-characters"),
    ],
)
async def test_illegal_session_id_is_refused(gateway: DemoGateway, session_id: str, message: str) -> None:
    body = json.dumps(said("one")).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        f"X-Hermes-Session-Id: {session_id}\r\n\r\n"
    )

    answer = await raw(gateway, head.encode(errors="surrogateescape") + body)

    head_bytes, _, document = answer.partition(b"\r\n\r\n")
    assert head_bytes.startswith(b"HTTP/1.1 400 ")
    assert json.loads(document)["error"]["message"] == message


async def raw(gateway: DemoGateway, request: bytes) -> bytes:
    """The whole answer to bytes that no well-behaved client would send."""
    async with asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        writer.write(request)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    return answer


@pytest.mark.parametrize("session_id", ["agent:main:x", "x" * 256, "ws-route-1", "a.b"])
async def test_legal_session_id_is_taken_as_it_is(
    http: aiohttp.ClientSession, gateway: DemoGateway, session_id: str
) -> None:
    answer, _ = await chat(http, gateway, said("one"), Session_Id=session_id)

    assert answer.status == 200
    assert answer.headers["X-Hermes-Session-Id"] == session_id
    assert len(await messages(http, gateway, session_id)) == 2


async def test_session_key_that_is_too_long_is_refused(http: aiohttp.ClientSession, gateway: DemoGateway) -> None:
    answer, document = await chat(http, gateway, said("one"), Session_Key="x" * 257)

    assert (answer.status, document["error"]["message"]) == (400, "Session key too long")


async def test_image_is_kept_as_a_placeholder(http: aiohttp.ClientSession, gateway: DemoGateway) -> None:
    content = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": PIXEL}}]

    _, document = await chat(http, gateway, said(content), Session_Id="seen")

    assert "This one came with an image." in answer_of(document)
    assert (await messages(http, gateway, "seen"))[0] == ("user", "Look:\n[screenshot]")


async def test_sessions_are_listed_newest_first(http: aiohttp.ClientSession, gateway: DemoGateway) -> None:
    for session_id in ("one", "two", "one", "three"):
        await chat(http, gateway, said("hello"), Session_Id=session_id)

    status, document = await get(http, f"{gateway.url}/api/sessions?limit=2")
    _, rest = await get(http, f"{gateway.url}/api/sessions?limit=2&offset=2")
    _, one = await get(http, f"{gateway.url}/api/sessions/one")

    assert (status, document["object"]) == (200, "list")
    assert [session["id"] for session in document["data"]] == ["three", "one"]
    assert [session["id"] for session in rest["data"]] == ["two"]
    assert (document["has_more"], rest["has_more"]) == (True, False)
    assert one["session"]["message_count"] == 4
    assert one["session"]["preview"] == "hello"


@pytest.mark.parametrize("path", ["/api/sessions/nobody", "/api/sessions/nobody/messages"])
async def test_unknown_session_is_a_json_404(http: aiohttp.ClientSession, gateway: DemoGateway, path: str) -> None:
    status, document = await get(http, gateway.url + path)

    assert (status, document["error"]["code"]) == (404, "session_not_found")


async def test_memory_is_bounded_and_the_oldest_goes_first(http: aiohttp.ClientSession, gateway: DemoGateway) -> None:
    for number in range(MAX_SESSIONS + 1):
        await chat(http, gateway, said("hello"), Session_Id=f"many-{number}")
    for number in range(MAX_MESSAGES // 2 + 1):
        await chat(http, gateway, said(f"message {number}"), Session_Id="long")

    _, document = await get(http, f"{gateway.url}/api/sessions?limit=200&offset=1")
    kept = [session["id"] for session in document["data"]]
    history = await messages(http, gateway, "long")

    assert len(kept) == MAX_SESSIONS - 1
    assert "many-0" not in kept
    assert "many-2" in kept
    assert len(history) == MAX_MESSAGES
    assert history[0] == ("user", "message 1")


# Answers


async def test_streamed_answer_has_the_shape_that_clients_expect(
    http: aiohttp.ClientSession, gateway: DemoGateway
) -> None:
    body = {"model": "any", **said("hello", stream=True)}
    async with http.post(gateway.url + CHAT, json=body, headers={"X-Hermes-Session-Id": "s"}) as answer:
        events = (await answer.text()).split("\n\n")

    assert answer.status == 200
    assert answer.content_type == "text/event-stream"
    assert answer.headers["X-Hermes-Session-Id"] == "s"
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert {(chunk["object"], chunk["model"], chunk["id"]) for chunk in chunks} == {
        ("chat.completion.chunk", "any", chunks[0]["id"])
    }
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0] == {"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}
    assert choices[-1] == {"index": 0, "delta": {}, "finish_reason": "stop"}
    usage = chunks[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] == 1
    words = [choice["delta"]["content"] for choice in choices[1:-1]]
    assert len(words) == usage["completion_tokens"]
    assert (await messages(http, gateway, "s"))[1] == ("assistant", "".join(words))


async def test_plain_answer_has_the_shape_that_clients_expect(
    http: aiohttp.ClientSession, gateway: DemoGateway
) -> None:
    answer, document = await chat(http, gateway, said("hello"))

    assert answer.content_type == "application/json"
    assert document["object"] == "chat.completion"
    assert document["model"] == "hermes-sidecar-demo"
    assert document["choices"][0]["finish_reason"] == "stop"
    assert document["choices"][0]["message"]["role"] == "assistant"
    assert document["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(b"{", "Invalid JSON in request body", id="no-json"),
        pytest.param(b"[" * 100_000, "Invalid JSON in request body", id="nested-beyond-reason"),
        pytest.param(b"[]", "Request body must be a JSON object", id="list"),
        pytest.param(b"{}", "Missing or invalid 'messages' field", id="no-messages"),
        pytest.param(b'{"messages":[1]}', "messages[0] is not an object", id="message-is-a-number"),
        pytest.param(
            b'{"messages":[{"role":"system","content":"x"}]}', "No user message found in messages", id="system-only"
        ),
        pytest.param(
            b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"file:///x"}}]}]}',
            "Image inputs must use http(s) URLs or data:image/... URLs.",
            id="image-from-a-file",
        ),
        pytest.param(
            b'{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}',
            "Image parts must include a non-empty image URL.",
            id="image-without-url",
        ),
        pytest.param(
            b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":"data:text/html,x"}]}]}',
            "Only image data URLs are supported. Non-image data payloads are not supported.",
            id="data-url-of-a-page",
        ),
        pytest.param(
            b'{"messages":[{"role":"user","content":[{"type":"file"}]}]}',
            "Unsupported content part type 'file'. Only text and image_url/input_image parts are supported.",
            id="file",
        ),
    ],
)
async def test_request_that_is_no_chat_is_refused_in_words(
    http: aiohttp.ClientSession, gateway: DemoGateway, body: bytes, message: str
) -> None:
    async with http.post(gateway.url + CHAT, data=body) as answer:
        document = await answer.json()

    assert (answer.status, document["error"]["message"]) == (400, message)


async def test_body_over_ten_megabytes_is_refused(http: aiohttp.ClientSession, gateway: DemoGateway) -> None:
    body = io.BytesIO(json.dumps(said("x" * 10_000_000)).encode())

    async with http.post(gateway.url + CHAT, data=body) as answer:
        document = await answer.json()

    assert (answer.status, document["error"]["code"]) == (413, "body_too_large")


async def test_get_on_the_chat_path_shows_that_chat_is_there(http: aiohttp.ClientSession, gateway: DemoGateway) -> None:
    async with http.get(gateway.url + CHAT) as answer:
        text = await answer.text()

    assert (answer.status, answer.headers["Allow"], text) == (405, "POST", "405: Method Not Allowed")


async def test_capabilities_promise_only_what_answers(http: aiohttp.ClientSession, gateway: DemoGateway) -> None:
    await chat(http, gateway, said("hello"), Session_Id="s")

    _, document = await get(http, gateway.url + "/v1/capabilities")
    statuses = {}
    for name, endpoint in document["endpoints"].items():
        url = gateway.url + endpoint["path"].format(session_id="s")
        async with http.request(endpoint["method"], url, json=said("hello")) as answer:
            statuses[name] = answer.status

    assert set(statuses.values()) == {200}
    assert document["features"]["session_continuity_header"] == "X-Hermes-Session-Id"
    assert document["features"]["skills_api"] is False
    async with http.get(gateway.url + "/v1/skills") as answer:
        assert (answer.status, answer.content_type) == (404, "text/plain")


async def test_health_and_models_name_the_demo(http: aiohttp.ClientSession, gateway: DemoGateway) -> None:
    _, health = await get(http, gateway.url + "/health")
    _, models = await get(http, gateway.url + "/v1/models")
    async with http.head(gateway.url + "/health") as head:
        head_status = head.status

    assert (health["status"], health["platform"]) == ("ok", "hermes-sidecar-demo")
    assert [model["id"] for model in models["data"]] == ["hermes-sidecar-demo"]
    assert head_status == 405


# Who may come in


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/api/sessions", "/nowhere"])
async def test_any_origin_is_refused_with_an_empty_403(
    http: aiohttp.ClientSession, gateway: DemoGateway, path: str
) -> None:
    async with http.get(gateway.url + path, headers={"Origin": gateway.url}) as answer:
        body = await answer.read()

    assert (answer.status, body) == (403, b"")


async def test_key_is_asked_for_everywhere_but_on_health(http: aiohttp.ClientSession) -> None:
    gateway = await DemoGateway.start(key="k" * 16, word_delay_s=0)
    try:
        refused = {}
        for authorization in ("", "Bearer wrong", "Basic " + "k" * 16, "Bearer é"):
            async with http.get(gateway.url + "/v1/models", headers={"Authorization": authorization}) as answer:
                refused[authorization] = (answer.status, (await answer.json())["error"]["code"])
        accepted, _ = await get(http, gateway.url + "/v1/models", Authorization="Bearer " + "k" * 16)
        health, _ = await get(http, gateway.url + "/health")
        chat_answer, _ = await chat(http, gateway, said("hello"))
        async with http.get(gateway.url + "/nowhere") as unknown:
            unknown_status = unknown.status
    finally:
        await gateway.stop()

    assert set(refused.values()) == {(401, "invalid_api_key")}
    assert (accepted, health, chat_answer.status, unknown_status) == (200, 200, 401, 404)


# Starting, leaving, stopping


async def test_client_that_leaves_ends_its_turn_while_the_next_word_is_waited_for(
    http: aiohttp.ClientSession,
) -> None:
    # The next word would come in an hour, so only the client's leaving can end this turn.
    gateway = await DemoGateway.start(word_delay_s=3600)
    try:
        async with http.post(
            gateway.url + CHAT, json=said("hello", stream=True), headers={"X-Hermes-Session-Id": "left"}
        ) as answer:
            await answer.content.readuntil(b"\n\n")
            assert len(await messages(http, gateway, "left")) == 1

        ends: list[str] = []
        async with asyncio.timeout(LIMIT_S):
            while not ends:
                _, document = await get(http, f"{gateway.url}/api/sessions/left/messages")
                ends = [message["finish_reason"] for message in document["data"] if message["role"] == "assistant"]
    finally:
        await gateway.stop()

    assert ends == ["interrupted"]


async def test_stop_does_not_wait_for_a_running_stream(http: aiohttp.ClientSession) -> None:
    gateway = await DemoGateway.start(word_delay_s=3600)
    async with http.post(gateway.url + CHAT, json=said("hello", stream=True)) as answer:
        await answer.content.readuntil(b"\n\n")

        async with asyncio.timeout(LIMIT_S):
            await gateway.stop()
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.content.read()
        await gateway.stop()


async def test_taken_port_is_an_os_error(gateway: DemoGateway) -> None:
    with pytest.raises(OSError, match="address already in use"):
        await DemoGateway.start(int(gateway.url.rpartition(":")[2]))
