"""Which session the gateway is told, over the wire: one conversation key, one session id, whatever else is sent."""

from __future__ import annotations

import hashlib
import re

import pytest

from tests.support.raw_client import CHAT, ask, chat
from tests.support.scripted_upstream import Connection, answering, ok, scripted_upstream
from tests.support.sidecars import relayed, running_sidecar

KEY = b"X-Hermes-Session-Key: "
SID, CSID = "X-Hermes-Session-Id", "X-Claude-Session-Id"
OK = ok()


async def test_refusal_of_the_session_id_reaches_the_client_and_is_not_retried_without_it() -> None:
    """A gateway without a key of its own refuses the header: the first message works, the second must say why not."""
    refusal = b'{"error":{"message":"session continuation requires an API key"}}'

    async def keyless_gateway(connection: Connection) -> None:
        while True:
            request = await connection.request()
            refused = bool(request.values(SID))
            connection.write(ok(refusal, status=b"403 Forbidden") if refused else OK)

    async with relayed(keyless_gateway) as (upstream, sidecar):
        first = await chat(sidecar.url)
        second = await chat(sidecar.url, KEY + b"k1")

        assert (first.status, first.body) == (200, b'{"ok":true}')
        assert (second.status, second.reason, second.body) == (403, b"Forbidden", refusal)
        assert [request.values(SID) for request in upstream.requests] == [[], [b"k1"]]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        pytest.param([], [b"Bearer gateway-token"], id="none"),
        pytest.param([b"Authorization: Bearer other"], [b"Bearer other"], id="own"),
        pytest.param([b"Authorization: Bearer "], [b"Bearer gateway-token"], id="bearer-without-token"),
        pytest.param([b"Authorization:"], [b"Bearer gateway-token"], id="empty"),
    ],
)
async def test_gateway_token_is_added_only_where_the_client_has_none(sent: list[bytes], expected: list[bytes]) -> None:
    async with relayed(OK, environ={"HERMES_SIDECAR_GATEWAY__TOKEN": "gateway-token"}) as (upstream, sidecar):
        answer = await chat(sidecar.url, KEY + b"k1", *sent)

        assert answer.status == 200
        assert upstream.only_request.values("authorization") == expected
        assert upstream.only_request.values(SID) == [b"k1"]


async def test_header_decides_over_a_session_id_in_the_body() -> None:
    body = b'{"session_id":"zzz", "messages":[]}'

    async with relayed(OK) as (upstream, sidecar):
        await chat(sidecar.url, KEY + b"k1", body=body)

        assert upstream.only_request.values(SID) == [b"k1"]
        assert upstream.only_request.body == body


@pytest.mark.parametrize("body", [b'{"input":"hi"}', b'{"input":"hi","session_id":"zzz"}'])
async def test_runs_get_mapped_headers_and_keep_their_body(body: bytes) -> None:
    async with relayed(OK) as (upstream, sidecar):
        await ask(sidecar.url, "POST", "/v1/runs", KEY + b"k1", body=body)

        request = upstream.only_request
        assert (request.target, request.wire_body) == (b"/v1/runs", body)
        assert (request.values(SID), request.values(CSID)) == ([b"k1"], [b"k1"])
        assert request.values("content-length") == [b"%d" % len(body)]


@pytest.mark.parametrize(
    ("forward_key", "keys_upstream"),
    [
        pytest.param("auto", [], id="auto-before-a-plain-backend"),
        pytest.param("never", [], id="never"),
        pytest.param("always", [b"k1"], id="always"),
    ],
)
async def test_route_key_goes_upstream_only_as_forward_key_says(forward_key: str, keys_upstream: list[bytes]) -> None:
    names = (b"X-Hermes-Friendly-Id: tidy-otter", b"X-Claude-Session-Key: k2", b"X-Claude-Friendly-Id: other")

    async with relayed(OK, session={"forward_key": forward_key}) as (upstream, sidecar):
        answer = await chat(sidecar.url, KEY + b"k1", *names)

        request = upstream.only_request
        assert request.values("x-hermes-session-key") == keys_upstream
        assert not request.names & {b"x-hermes-friendly-id", b"x-claude-session-key", b"x-claude-friendly-id"}
        assert (request.values(SID), request.values(CSID)) == ([b"k1"], [b"k1"])
        assert answer.values("x-hermes-session-key") == [b"k1"]
        assert answer.values("x-hermes-friendly-id") == [b"tidy-otter"]


async def test_session_headers_of_the_gateway_reach_the_client_untouched() -> None:
    async with relayed(ok(b"{}", b"X-Hermes-Session-Id: child-2", b"X-Claude-Session-Id: child-3")) as (_, sidecar):
        answer = await chat(sidecar.url, KEY + b"k1")

        assert (answer.values(SID), answer.values(CSID)) == ([b"child-2"], [b"child-3"])
        assert answer.values("x-hermes-sidecar-session") == [b"header:x-hermes-session-key"]


async def test_identical_bodies_under_two_keys_are_two_sessions_and_without_a_key_none() -> None:
    """Not even the id that the gateway made up in an earlier answer is used for a client that names none."""
    async with relayed(ok(b"{}", b"X-Hermes-Session-Id: api-0123")) as (upstream, sidecar):
        for fields in ([KEY + b"k1"], [KEY + b"k2"], [], []):
            await chat(sidecar.url, *fields)

        assert [r.values(SID) for r in upstream.requests] == [[b"k1"], [b"k2"], [], []]
        assert [r.values(CSID) for r in upstream.requests] == [[b"k1"], [b"k2"], [], []]
        assert {request.body for request in upstream.requests} == {CHAT}


async def test_no_two_keys_share_an_id_and_a_restart_keeps_them() -> None:
    keys = [b"a:b/c", b"a_b_c", b"a:b:c", b"A:b:c", b"a b c", b"a%20b%20c", b"a..b", b"a.b", b"a-b-c", b"a/b/c"]
    keys.append(b"hs-" + hashlib.sha256(b"a b c").hexdigest()[:40].encode())
    runs: list[list[bytes]] = []

    async with scripted_upstream(OK) as upstream:
        for _ in range(2):
            async with running_sidecar(upstream.url) as sidecar:
                for key in keys:
                    await chat(sidecar.url, KEY + key)
        ids = [value for request in upstream.requests for value in request.values(SID)]
        runs = [ids[: len(keys)], ids[len(keys) :]]

    assert runs[0] == runs[1]
    assert len(set(runs[0])) == len(keys)
    assert all(_is_legal(session_id) for session_id in runs[0])


@pytest.mark.parametrize("key", [b"spaces/AAA/threads/B", b"..", b"C:x", rb"a\b", b"x" * 257, b"hs-mine"])
async def test_key_that_the_gateway_would_refuse_becomes_a_legal_derived_id(key: bytes) -> None:
    async with relayed(OK) as (upstream, sidecar):
        answer = await chat(sidecar.url, KEY + key)

        assert answer.status == 200
        assert answer.values("x-hermes-sidecar-session") == [b"header:x-hermes-session-key; derived"]
        assert upstream.only_request.values(SID) == [b"hs-" + hashlib.sha256(key).hexdigest()[:40].encode()]


async def test_keys_outside_ascii_differ_by_their_bytes_and_come_back_as_they_were() -> None:
    keys = [bytes.fromhex(digits) for digits in ("e4bc9ae8af9d", "636166e9", "636166e8", "ff")]

    async with relayed(OK) as (upstream, sidecar):
        answers = [await chat(sidecar.url, KEY + key) for key in keys]

        assert [answer.status for answer in answers] == [200] * 4
        assert [answer.values("x-hermes-session-key") for answer in answers] == [[key] for key in keys]
        ids = [request.values(SID)[0] for request in upstream.requests]
        assert ids == [b"hs-" + hashlib.sha256(key).hexdigest()[:40].encode() for key in keys]


async def test_two_different_keys_are_refused_before_anything_goes_upstream() -> None:
    async with relayed(OK) as (upstream, sidecar):
        answer = await chat(sidecar.url, KEY + b"k1", KEY + b"k2")

        assert answer.status == 400
        assert answer.value("x-hermes-sidecar-error") == "invalid_session_key"
        assert answer.json()["error"]["code"] == "invalid_session_key"
        assert b"k1" not in answer.body
        assert upstream.connections == []


@pytest.mark.parametrize(
    ("sent", "session_id", "source"),
    [
        pytest.param([KEY + b"k1", b"X-Hermes-Session-Id: other"], b"other", b"client", id="own-id-wins"),
        pytest.param([KEY + b"k1", b"X-Claude-Session-Id: other"], b"other", b"client", id="own-claude-id-wins"),
        pytest.param(
            [b"X-Claude-Session-Id: two", b"X-Hermes-Session-Id: one"], b"one", b"client", id="hermes-id-before-claude"
        ),
        pytest.param([KEY], None, b"none", id="empty"),
        pytest.param([KEY + b"  \t "], None, b"none", id="blanks"),
        pytest.param([KEY + b"new"], None, b"none", id="new"),
        pytest.param([KEY + b"undefined"], None, b"none", id="undefined"),
        pytest.param([KEY + b"{{chat_id}}"], None, b"none", id="unfilled-template"),
        pytest.param([KEY, b"X-Hermes-Session-Id: other"], b"other", b"client", id="empty-key-beside-own-id"),
        pytest.param([KEY + b"k1", KEY + b"k1"], b"k1", b"header:x-hermes-session-key", id="same-key-twice"),
        pytest.param(
            [b"x-claude-session-key: k1"], b"k1", b"header:x-claude-session-key", id="claude-key-only-lower-case"
        ),
        pytest.param([b"X-HERMES-SESSION-KEY: k1"], b"k1", b"header:x-hermes-session-key", id="capitals"),
        pytest.param(
            [b"X-OpenWebUI-Chat-Id: c1"], b"openwebui-c1", b"header:x-openwebui-chat-id", id="prefixed-source"
        ),
        pytest.param([KEY + b"k1", b"X-OpenWebUI-Task: title_generation"], None, b"skipped", id="side-task"),
    ],
)
async def test_session_headers_decide_in_their_order(
    sent: list[bytes], session_id: bytes | None, source: bytes
) -> None:
    """Whatever was sent, at most one line of each id goes upstream, with one value."""
    async with relayed(OK) as (upstream, sidecar):
        answer = await chat(sidecar.url, *sent)

        expected = [] if session_id is None else [session_id]
        request = upstream.only_request
        assert (request.values(SID), request.values(CSID)) == (expected, expected)
        assert answer.values("x-hermes-sidecar-session") == [source]
        assert answer.values(SID) == []


async def test_idempotency_keys_pass_and_are_never_made_up() -> None:
    async with relayed(answering(OK)) as (upstream, sidecar):
        for fields in ([KEY + b"k1", b"Idempotency-Key: i1"], [KEY + b"k2", b"Idempotency-Key: i1"], [KEY + b"k1"]):
            await chat(sidecar.url, *fields)

        assert [r.values("idempotency-key") for r in upstream.requests] == [[b"i1"], [b"i1"], []]
        assert [r.values(SID) for r in upstream.requests] == [[b"k1"], [b"k2"], [b"k1"]]


def _is_legal(session_id: bytes) -> bool:
    """What the gateway's own session guard takes."""
    return (
        re.fullmatch(rb"[\x21-\x7e]{1,256}", session_id) is not None
        and not re.match(rb"[A-Za-z]:", session_id)
        and not any(part in session_id for part in (b"/", b"\\", b".."))
    )
