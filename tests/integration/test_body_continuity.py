"""Conversations that are named in the body, bodies that get a name, and side tasks that stay out: over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from typing import Any

import pytest

from tests.support.raw_client import CHAT, JSON, RawClient, ask, chat, raw_client
from tests.support.raw_http import Answer
from tests.support.scripted_upstream import Received, answering, ok
from tests.support.sidecars import Sidecar, relayed

SESSION: dict[str, Any] = {
    "sources": [{"header": "X-Hermes-Session-Key"}, {"body": "metadata.chat_id", "prefix": "body-"}],
    "body_limit_bytes": 2_000,
}
NAMED = b'{"model": "m", "metadata": {"chat_id": "c1"}, "messages": []}'
KEY = b"X-Hermes-Session-Key: k1"
CHUNKED = b"Transfer-Encoding: chunked"
COMPLETIONS = "/v1/chat/completions"


def padded(length: int) -> bytes:
    """A body of this length that names its conversation."""
    return NAMED + b" " * (length - len(NAMED))


def in_chunks(body: bytes, size: int = 7) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nTrailer: x\r\n\r\n"


def session_of(request: Received) -> list[bytes]:
    """The one id that the upstream was sent, under both names."""
    ids = request.values("x-hermes-session-id")
    assert ids == request.values("x-claude-session-id")
    return ids


def said(answer: Answer) -> str | None:
    return answer.value("X-Hermes-Sidecar-Session")


async def send_chunked(client: RawClient, body: bytes, path: str = COMPLETIONS, *fields: bytes) -> Answer:
    client.write(client.request("POST", path, JSON, CHUNKED, *fields) + in_chunks(body))
    return await client.answer()


async def mappings(sidecar: Sidecar) -> dict[tuple[str, str], int]:
    """How requests were mapped, by source and outcome, as the metrics count it; zeros left out."""
    text = (await ask(sidecar.url, "GET", "/metrics")).body.decode()
    cells = re.findall(r'^hermes_sidecar_session_mappings_total\{outcome="(.*)",source="(.*)"\} (\S+)$', text, re.M)
    return {(source, outcome): int(float(count)) for outcome, source, count in cells if float(count)}


# --- Conversations named in the body ---------------------------------------------------------------------------------


async def test_body_with_a_length_names_its_conversation_and_arrives_as_it_was() -> None:
    async with relayed(ok(), session=SESSION) as (upstream, sidecar):
        answer = await chat(sidecar.url, body=NAMED)

    assert said(answer) == "body:metadata.chat_id"
    assert session_of(upstream.only_request) == [b"body-c1"]
    assert upstream.only_request.wire_body == NAMED
    assert upstream.only_request.values("content-length") == [b"%d" % len(NAMED)]


async def test_chunked_body_names_its_conversation_and_arrives_with_its_framing() -> None:
    async with relayed(ok(), session=SESSION) as (upstream, sidecar), raw_client(sidecar.url) as client:
        answer = await send_chunked(client, NAMED)

    assert (answer.status, said(answer)) == (200, "body:metadata.chat_id")
    assert session_of(upstream.only_request) == [b"body-c1"]
    assert upstream.only_request.body == NAMED
    assert upstream.only_request.values("transfer-encoding") == [b"chunked"]
    assert upstream.only_request.values("content-length") == []


async def test_nothing_goes_upstream_before_the_body_is_whole() -> None:
    async with relayed(ok(), session=SESSION) as (upstream, sidecar), raw_client(sidecar.url) as client:
        request = client.request("POST", COMPLETIONS, JSON, body=NAMED)
        for piece in (request[:-20], request[-20:-1]):
            client.write(piece)
            assert (await ask(sidecar.url, "GET", "/healthz")).status == 200  # the piece has been read by then
            assert upstream.connections == []
        client.write(request[-1:])
        assert said(await client.answer()) == "body:metadata.chat_id"

    assert upstream.only_request.body == NAMED


async def test_body_is_not_waited_for_where_a_header_decides() -> None:
    """Sources count in their order, and a large upload must not wait for its own end."""
    async with relayed(answering(ok()), session=SESSION) as (upstream, sidecar), raw_client(sidecar.url) as client:
        request = client.request("POST", COMPLETIONS, JSON, KEY, body=NAMED)
        client.write(request[:-10])
        connection = await upstream.connection()
        await connection.has_received(NAMED[:-10])
        client.write(request[-10:])
        assert said(await client.answer()) == "header:x-hermes-session-key"

    assert session_of(upstream.only_request) == [b"k1"]
    assert upstream.only_request.body == NAMED


@pytest.mark.parametrize(
    ("path", "method"),
    [
        pytest.param("/v1/models", "POST", id="another-route"),
        pytest.param("/v1/chat/completions/", "POST", id="another-path"),
        pytest.param(COMPLETIONS, "PUT", id="another-method"),
    ],
)
async def test_bodies_of_other_requests_are_left_alone(path: str, method: str) -> None:
    async with relayed(ok(), session=SESSION) as (upstream, sidecar):
        answer = await ask(sidecar.url, method, path, JSON, body=NAMED)

    assert said(answer) == "none"
    assert session_of(upstream.only_request) == []
    assert upstream.only_request.body == NAMED


NOT_READ = [
    pytest.param(b"{not json" + NAMED, [], id="no-json"),
    pytest.param(b"[" + NAMED + b"]", [], id="a-list"),
    pytest.param(b'"c1"', [], id="a-text"),
    pytest.param(b"[" * 1_900, [], id="too-deep"),
    pytest.param(NAMED.decode().encode("utf-16"), [], id="utf-16"),
    pytest.param(b"\xff" + NAMED, [], id="no-utf-8"),
    pytest.param(gzip.compress(NAMED), [b"Content-Encoding: gzip"], id="gzip"),
    pytest.param(NAMED, [b"Content-Encoding: identity"], id="any-coding-at-all"),
    pytest.param(padded(2_001), [], id="over-the-limit"),
    pytest.param(padded(300_000), [], id="far-over-the-limit"),
]


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize(("body", "fields"), NOT_READ)
async def test_body_that_is_not_read_passes_as_it_is_and_is_counted(
    body: bytes, fields: list[bytes], framing: str
) -> None:
    async with relayed(ok(), session=SESSION) as (upstream, sidecar), raw_client(sidecar.url) as client:
        if framing == "length":
            answer = await client.ask("POST", COMPLETIONS, JSON, *fields, body=body)
        else:
            answer = await send_chunked(client, body, COMPLETIONS, *fields)
        counted = await mappings(sidecar)

    assert (answer.status, said(answer)) == (200, "none")
    assert session_of(upstream.only_request) == []
    assert upstream.only_request.body == body
    assert counted == {("none", "unread"): 1}


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_body_as_long_as_the_limit_is_read(framing: str) -> None:
    body = padded(2_000)
    session = SESSION | ({"body_limit_bytes": len(in_chunks(body))} if framing == "chunked" else {})
    async with relayed(ok(), session=session) as (upstream, sidecar), raw_client(sidecar.url) as client:
        answer = await (chat(sidecar.url, body=body) if framing == "length" else send_chunked(client, body))
        counted = await mappings(sidecar)

    assert said(answer) == "body:metadata.chat_id"
    assert upstream.only_request.body == body
    assert counted == {("body:metadata.chat_id", "mapped"): 1}


async def test_object_that_names_nothing_is_read_and_counts_as_such() -> None:
    async with relayed(ok(), session=SESSION) as (upstream, sidecar):
        answer = await chat(sidecar.url, body=b'{"metadata":{"chat_id":"{{CHAT_ID}}"},"messages":[]}')
        counted = await mappings(sidecar)

    assert said(answer) == "none"
    assert session_of(upstream.only_request) == []
    assert counted == {("none", "none"): 1}


async def test_client_that_asks_whether_to_go_on_is_told_so_and_then_read() -> None:
    async with relayed(ok(), session=SESSION) as (upstream, sidecar), raw_client(sidecar.url) as client:
        head = client.request("POST", COMPLETIONS, JSON, b"Expect: 100-continue", b"Content-Length: %d" % len(NAMED))
        client.write(head)
        assert (await client.head()).status == 100
        assert upstream.connections == []
        client.write(NAMED)
        assert said(await client.answer()) == "body:metadata.chat_id"

    assert upstream.only_request.values("expect") == []


async def test_client_that_leaves_before_its_body_is_whole_costs_the_gateway_nothing() -> None:
    async with relayed(ok(), session=SESSION) as (upstream, sidecar):
        async with raw_client(sidecar.url) as client:
            client.write(client.request("POST", COMPLETIONS, JSON, body=NAMED)[:-5])
            await ask(sidecar.url, "GET", "/healthz")
        ended = [line for line in await sidecar.ended_exchanges(2) if line["route"] == "chat_completions"]

    assert [line["outcome"] for line in ended] == ["client_left"]
    assert upstream.connections == []


async def test_body_that_stops_coming_is_a_timeout_and_costs_the_gateway_nothing() -> None:
    listen = {"body_timeout_s": 0.2}
    async with relayed(ok(), session=SESSION, listen=listen) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("POST", COMPLETIONS, JSON, body=NAMED)[:-5])
        answer = await client.answer()

    assert (answer.status, answer.value("X-Hermes-Sidecar-Error")) == (408, "request_timeout")
    assert upstream.connections == []


async def test_chunks_that_are_none_are_refused_and_cost_the_gateway_nothing() -> None:
    async with relayed(ok(), session=SESSION) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(client.request("POST", COMPLETIONS, JSON, CHUNKED) + b'5\r\n{"a":\r\nzz\r\n')
        answer = await client.answer()

    assert (answer.status, answer.value("X-Hermes-Sidecar-Error")) == (400, "invalid_request")
    assert upstream.connections == []


async def test_pipelined_bodies_keep_their_own_conversations() -> None:
    bodies = [
        json.dumps({"metadata": {"chat_id": f"c{number}"}, "pad": "x" * number * 90}).encode() for number in range(8)
    ]
    async with relayed(ok(), session=SESSION) as (upstream, sidecar), raw_client(sidecar.url) as client:
        client.write(
            b"".join(
                client.request("POST", COMPLETIONS, JSON, CHUNKED) + in_chunks(body)
                if number % 2
                else client.request("POST", COMPLETIONS, JSON, body=body)
                for number, body in enumerate(bodies)
            )
        )
        answers = [await client.answer() for _ in bodies]

    assert {said(answer) for answer in answers} == {"body:metadata.chat_id"}
    assert [(session_of(request), request.body) for request in upstream.requests] == [
        ([b"body-c%d" % number], body) for number, body in enumerate(bodies)
    ]


async def test_drain_lets_a_request_end_whose_body_is_still_coming() -> None:
    async with relayed(ok(), session=SESSION) as (upstream, sidecar), raw_client(sidecar.url) as client:
        request = client.request("POST", COMPLETIONS, JSON, body=NAMED)
        client.write(request[:-5])
        await ask(sidecar.url, "GET", "/healthz")
        draining = asyncio.ensure_future(sidecar.running.drain(5))
        async with asyncio.timeout(5):
            while (await ask(sidecar.url, "GET", "/readyz")).status != 503:
                pass
        client.write(request[-5:])
        answer = await client.answer()
        await draining

    assert (answer.status, said(answer)) == (200, "body:metadata.chat_id")
    assert upstream.only_request.body == NAMED


async def test_ids_in_bodies_never_reach_the_log() -> None:
    async with relayed(ok(), session=SESSION) as (_, sidecar):
        await chat(sidecar.url, body=NAMED.replace(b"c1", b"secret-conversation"))
        await sidecar.ended_exchanges()

    assert "secret-conversation" not in repr(sidecar.log)


# --- Bodies that get a name ------------------------------------------------------------------------------------------

INJECTING = {"inject_body": True}
RUN = b'{"input": "hi \\u00e9 \xc3\xa9",  "n": 1.50}\n'

INJECTED = [
    pytest.param("/v1/runs", "session_id", id="runs"),
    pytest.param("/v1/responses", "conversation", id="responses"),
]


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize(("path", "name"), INJECTED)
async def test_body_that_names_no_session_gets_it_and_a_length_that_fits(path: str, name: str, framing: str) -> None:
    async with relayed(ok(), session=INJECTING) as (upstream, sidecar), raw_client(sidecar.url) as client:
        if framing == "length":
            answer = await client.ask("POST", path, JSON, KEY, body=RUN)
        else:
            answer = await send_chunked(client, RUN, path, KEY)
        assert (await client.ask("GET", "/v1/models")).status == 200  # the connection is still in step

    request = upstream.requests[0]
    assert (answer.status, said(answer)) == (200, "header:x-hermes-session-key")
    assert request.body == RUN[:-2] + b',"%b":"k1"}\n' % name.encode()
    assert request.values("content-length") == [b"%d" % len(request.body)]
    assert request.values("transfer-encoding") == []
    assert session_of(request) == [b"k1"]


LEFT_ALONE = [
    pytest.param("/v1/runs", b'{"session_id":"zzz","input":"hi"}', [KEY], id="runs-with-a-session"),
    pytest.param("/v1/responses", b'{"conversation":"zzz","input":"hi"}', [KEY], id="responses-with-a-conversation"),
    pytest.param("/v1/responses", b'{"conversation":{"id":"z"},"input":"hi"}', [KEY], id="conversation-as-an-object"),
    pytest.param("/v1/responses", b'{"previous_response_id":"r1","input":"hi"}', [KEY], id="responses-that-go-on"),
    pytest.param("/v1/runs", RUN, [], id="no-key"),
    pytest.param("/v1/runs", RUN, [KEY, b"X-OpenWebUI-Task: title_generation"], id="a-side-task"),
    pytest.param("/v1/runs", RUN, [KEY, b"Content-Encoding: gzip"], id="compressed"),
    pytest.param("/v1/runs", b"[1]", [KEY], id="a-list"),
    pytest.param("/v1/runs", b"{broken", [KEY], id="no-json"),
    pytest.param("/v1/runs", RUN.decode().encode("utf-16"), [KEY], id="utf-16"),
    pytest.param("/v1/runs", RUN[:-2] + b" " * 1_048_576 + b"}", [KEY], id="over-the-limit"),
    pytest.param("/v1/runs/r1/stop", RUN, [KEY], id="below-the-route"),
    pytest.param(COMPLETIONS, CHAT, [KEY], id="chat"),
]


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize(("path", "body", "fields"), LEFT_ALONE)
async def test_body_that_is_none_of_its_business_is_left_alone(
    path: str, body: bytes, fields: list[bytes], framing: str
) -> None:
    async with relayed(ok(), session=INJECTING) as (upstream, sidecar), raw_client(sidecar.url) as client:
        if framing == "length":
            answer = await client.ask("POST", path, JSON, *fields, body=body)
        else:
            client.write(client.request("POST", path, JSON, CHUNKED, *fields) + in_chunks(body, size=9_000))
            answer = await client.answer()

    assert answer.status == 200
    assert upstream.only_request.body == body
    assert bool(upstream.only_request.values("content-length")) == (framing == "length")


@pytest.mark.parametrize(
    ("body", "injected"),
    [
        pytest.param(b'{"session_id":null,"input":"hi"}', {"input": "hi", "session_id": "k1"}, id="null"),
        pytest.param(b'{"session_id":"","input":"hi"}', {"input": "hi", "session_id": "k1"}, id="empty"),
        pytest.param(b"{}", {"session_id": "k1"}, id="an-empty-object"),
    ],
)
async def test_empty_name_is_none(body: bytes, injected: dict[str, str]) -> None:
    async with relayed(ok(), session=INJECTING) as (upstream, sidecar):
        await ask(sidecar.url, "POST", "/v1/runs", JSON, KEY, body=body)

    assert json.loads(upstream.only_request.body) == injected


async def test_injected_id_may_come_from_the_body_itself() -> None:
    session = INJECTING | {"sources": [{"body": "prompt_cache_key", "prefix": "zed-"}]}
    body = b'{"input":"hi","prompt_cache_key":"thread 1/2"}'
    async with relayed(ok(), session=session) as (upstream, sidecar):
        answer = await ask(sidecar.url, "POST", "/v1/responses", JSON, body=body)

    (session_id,) = session_of(upstream.only_request)
    assert said(answer) == "body:prompt_cache_key; derived"
    assert upstream.only_request.body == body[:-1] + b',"conversation":"%b"}' % session_id


async def test_injected_id_is_the_newest() -> None:
    script = answering(ok(b"{}", b"X-Hermes-Session-Id: child-2"))
    async with relayed(script, session=INJECTING) as (upstream, sidecar):
        await chat(sidecar.url, KEY)
        answer = await ask(sidecar.url, "POST", "/v1/runs", JSON, KEY, body=RUN)

    assert said(answer) == "header:x-hermes-session-key; followed"
    assert json.loads(upstream.requests[1].body)["session_id"] == "child-2"


async def test_without_the_setting_bodies_are_left_alone() -> None:
    async with relayed(ok()) as (upstream, sidecar):
        await ask(sidecar.url, "POST", "/v1/runs", JSON, KEY, body=RUN)

    assert upstream.only_request.wire_body == RUN
    assert session_of(upstream.only_request) == [b"k1"]


async def test_the_header_decides_and_a_session_in_the_body_stays() -> None:
    """A client may send both; the gateway's chat route reads only the header."""
    body = b'{"model":"m","session_id":"zzz","messages":[]}'
    async with relayed(ok(), session=INJECTING) as (upstream, sidecar):
        await chat(sidecar.url, KEY, body=body)

    assert session_of(upstream.only_request) == [b"k1"]
    assert upstream.only_request.wire_body == body


# --- Side tasks ------------------------------------------------------------------------------------------------------

TASKS = {"skip_when": [{"header": "X-OpenWebUI-Task"}, {"prompt": "### Task:"}]}
TITLE = "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history."


def asking(content: object) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], "stream": False}).encode()


@pytest.mark.parametrize(
    ("fields", "body", "source"),
    [
        pytest.param([b"X-OpenWebUI-Task: title_generation"], asking("hi"), "skipped", id="header"),
        pytest.param([b"X-OpenWebUI-Task: "], asking("hi"), "header:x-hermes-session-key", id="empty-header"),
        pytest.param([b"X-OpenWebUI-Task: {{TASK}}"], asking("hi"), "header:x-hermes-session-key", id="unfilled"),
        pytest.param([], asking(TITLE), "skipped", id="prompt"),
        pytest.param([], asking([{"type": "text", "text": TITLE}]), "skipped", id="prompt-in-parts"),
        pytest.param([b"X-Hermes-Session-Id: s1"], asking(TITLE), "skipped", id="own-id-as-well"),
        pytest.param([], asking("What does ### Task: mean?"), "header:x-hermes-session-key", id="words-in-the-middle"),
        pytest.param([], b"no json", "header:x-hermes-session-key", id="no-json"),
        pytest.param([], b" " * 1_048_600 + asking(TITLE), "header:x-hermes-session-key", id="too-long-to-be-read"),
    ],
)
async def test_side_tasks_stay_out_of_the_conversation(fields: list[bytes], body: bytes, source: str) -> None:
    async with relayed(ok(), session=TASKS) as (upstream, sidecar):
        answer = await chat(sidecar.url, KEY, *fields, body=body)

    assert said(answer) == source
    assert session_of(upstream.only_request) == ([] if source == "skipped" else [b"k1"])
    assert upstream.only_request.body == body
    assert answer.value("X-Hermes-Session-Key") == "k1"
