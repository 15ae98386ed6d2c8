"""Sessions that the gateway continues under another id are followed: learned, kept, shared, not waited for long."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.sessions.store.base import StoreUnavailable
from sidecar.sessions.store.memory import MemoryLineage
from tests.support.raw_client import CHAT, JSON, STREAMED_CHAT, ask, chat, raw_client
from tests.support.raw_http import Answer
from tests.support.redis_server import redis_server
from tests.support.rotating_gateway import EVENT, RotatingGateway
from tests.support.scripted_upstream import (
    LAST_CHUNK,
    STREAM_HEAD,
    Connection,
    Received,
    Script,
    ScriptedUpstream,
    chunk,
    ok,
    scripted_upstream,
)
from tests.support.sidecars import Sidecar, relayed, running_sidecar

K1, K2 = b"X-Hermes-Session-Key: k1", b"X-Hermes-Session-Key: k2"
SID = "x-hermes-session-id"
FOLLOWED = "header:x-hermes-session-key; followed"
MAPPED = "header:x-hermes-session-key"


def naming(session_id: bytes, status: bytes = b"200 OK") -> bytes:
    """An answer that names the session it belongs to."""
    return ok(b"{}", b"X-Hermes-Session-Id: " + session_id, status=status)


def in_turn(*answers: bytes) -> Script:
    """Answers each request with the next of these, on whichever connection it comes; the last one goes on for ever."""
    left = list(answers)

    async def script(connection: Connection) -> None:
        while True:
            await connection.request(limit_s=60)
            connection.write(left.pop(0) if len(left) > 1 else left[0])

    return script


def sent(upstream: ScriptedUpstream) -> list[bytes]:
    """The session ids that went upstream, in order; the sidecar's own questions left out."""
    requests = [request for request in upstream.requests if not request.is_probe]
    assert all(request.values(SID) == request.values("x-claude-session-id") for request in requests)
    return [value for request in requests for value in request.values(SID) or [b""]]


def said(answer: Answer) -> str | None:
    return answer.value("X-Hermes-Sidecar-Session")


async def metric(sidecar: Sidecar, sample: str) -> float:
    text = (await ask(sidecar.url, "GET", "/metrics")).body.decode()
    return float(re.findall(rf"^hermes_sidecar_{re.escape(sample)} (\S+)$", text, re.M)[0])


# --- Answers that name a new session ---------------------------------------------------------------------------------


async def test_chain_of_rotations_is_followed_to_its_newest_id() -> None:
    script = in_turn(naming(b"k1"), naming(b"child-2"), naming(b"child-2"), naming(b"child-3"), naming(b"child-3"))
    async with relayed(script) as (upstream, sidecar):
        answers = [await chat(sidecar.url, K1) for _ in range(5)]
        rotations = await metric(sidecar, "session_rotations_total")
        mapped = await metric(sidecar, f'session_mappings_total{{outcome="followed",source="{MAPPED}"}}')

    assert sent(upstream) == [b"k1", b"k1", b"child-2", b"child-2", b"child-3"]
    # The gateway's own header reaches the client as it is.
    assert [answer.value(SID) for answer in answers] == ["k1", "child-2", "child-2", "child-3", "child-3"]
    assert [said(answer) for answer in answers] == [MAPPED, MAPPED, FOLLOWED, FOLLOWED, FOLLOWED]
    assert [answer.value("X-Hermes-Session-Key") for answer in answers] == ["k1"] * 5
    assert (rotations, mapped) == (2, 3)


async def test_own_session_id_of_a_client_is_followed_too() -> None:
    script = in_turn(naming(b"child-2"))
    async with relayed(script) as (upstream, sidecar):
        await chat(sidecar.url, b"X-Hermes-Session-Id: k1")
        by_name = await chat(sidecar.url, b"X-Hermes-Session-Id: k1")
        by_old_name = await chat(sidecar.url, b"X-Claude-Session-Id: k1")
        newest = await chat(sidecar.url, b"X-Hermes-Session-Id: child-2")

    assert sent(upstream) == [b"k1", b"child-2", b"child-2", b"child-2"]
    assert [said(by_name), said(by_old_name), said(newest)] == ["client; followed", "client; followed", "client"]


async def test_other_routes_go_to_the_newest_session_and_neighbours_stay() -> None:
    script = in_turn(naming(b"child-2"), ok())
    async with relayed(script) as (upstream, sidecar):
        await chat(sidecar.url, K1)
        await ask(sidecar.url, "POST", "/v1/responses", JSON, K1, body=CHAT)
        await ask(sidecar.url, "GET", "/v1/models", K1)
        await chat(sidecar.url, K2)
        await chat(sidecar.url, b"X-Hermes-Session-Key: k1 ")
        await chat(sidecar.url, b"X-Hermes-Session-Key: K1")
        await chat(sidecar.url)

    assert sent(upstream) == [b"k1", b"child-2", b"child-2", b"k2", b"child-2", b"K1", b""]


async def test_key_that_is_no_id_is_followed_as_well() -> None:
    script = in_turn(naming(b"child-2"))
    async with relayed(script) as (upstream, sidecar):
        first = await chat(sidecar.url, b"X-Hermes-Session-Key: a/b")
        second = await chat(sidecar.url, b"X-Hermes-Session-Key: a/b")

    assert sent(upstream)[1] == b"child-2"
    assert [said(first), said(second)] == [f"{MAPPED}; derived", f"{MAPPED}; followed; derived"]


async def test_circle_ends_at_the_id_that_it_began_with() -> None:
    script = in_turn(naming(b"b"), naming(b"c"), naming(b"a"), ok())
    names = [b"X-Hermes-Session-Id: " + name for name in (b"a", b"b", b"c")]
    async with relayed(script) as (upstream, sidecar):
        for name in (*names, *names):
            await chat(sidecar.url, name)

    assert sent(upstream) == [b"a", b"b", b"c", b"a", b"b", b"c"]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(naming(b"api-0123456789abcdef"), id="id-that-a-gateway-makes-up-when-it-ignores-the-header"),
        pytest.param(naming(b"k1"), id="the-same-id"),
        pytest.param(ok(), id="no-id"),
        pytest.param(naming(b""), id="empty-id"),
        pytest.param(naming(b"a/b"), id="slash"),
        pytest.param(naming(b"..%2f"), id="dots"),
        pytest.param(naming(b"C:x"), id="drive-letter"),
        pytest.param(naming(b"a b"), id="blank"),
        pytest.param(naming(b"caf\xe9"), id="no-ascii"),
        pytest.param(naming(b"x" * 257), id="too-long"),
        pytest.param(naming(b"child-2", b"400 Bad Request"), id="400"),
        pytest.param(naming(b"child-2", b"403 Forbidden"), id="403"),
        pytest.param(naming(b"child-2", b"502 Bad Gateway"), id="502"),
        pytest.param(naming(b"child-2", b"302 Found"), id="302"),
    ],
)
async def test_answer_that_tells_of_no_continuation_changes_nothing(answer: bytes) -> None:
    async with relayed(in_turn(answer, ok())) as (upstream, sidecar):
        await chat(sidecar.url, K1)
        second = await chat(sidecar.url, K1)
        rotations = await metric(sidecar, "session_rotations_total")

    assert sent(upstream) == [b"k1", b"k1"]
    assert said(second) == MAPPED
    assert rotations == 0


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/runs", "/v1/models", "/api/sessions/k1/chat"])
async def test_only_the_chat_route_tells_of_rotations(path: str) -> None:
    """`/v1/responses` answers with a fresh id each time."""
    async with relayed(in_turn(naming(b"child-2"), ok())) as (upstream, sidecar):
        await ask(sidecar.url, "POST", path, JSON, K1, body=CHAT)
        await chat(sidecar.url, K1)

    assert sent(upstream) == [b"k1", b"k1"]


async def test_turn_without_a_session_teaches_nothing() -> None:
    async with relayed(in_turn(naming(b"child-2"), ok())) as (upstream, sidecar):
        await chat(sidecar.url)
        await chat(sidecar.url, b"X-OpenWebUI-Task: tags", K1)
        await chat(sidecar.url, K1)

    assert sent(upstream) == [b"", b"", b"k1"]


async def test_switched_off_it_is_never_followed() -> None:
    async with relayed(in_turn(naming(b"child-2")), session={"follow_rotation": False}) as (upstream, sidecar):
        answers = [await chat(sidecar.url, K1) for _ in range(2)]

    assert sent(upstream) == [b"k1", b"k1"]
    assert [said(answer) for answer in answers] == [MAPPED, MAPPED]


async def test_isolated_clients_follow_their_own_sessions(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("ann:the-token-of-ann-0123\nbob:the-token-of-bob-0123\n")
    tokens.chmod(0o600)
    listen = {"tokens_file": str(tokens), "isolate_clients": True}
    ann, bob = (b"Authorization: Bearer the-token-of-%b-0123" % name for name in (b"ann", b"bob"))
    async with relayed(in_turn(naming(b"child-2"), ok()), listen=listen) as (upstream, sidecar):
        for fields in ([ann, K1], [ann, K1], [bob, K1], [bob, b"X-Hermes-Session-Id: ann-k1"]):
            await chat(sidecar.url, *fields)

    assert sent(upstream) == [b"ann-k1", b"child-2", b"bob-k1", b"bob-ann-k1"]


# --- Streamed turns: the session's record tells ----------------------------------------------------------------------


@asynccontextmanager
async def rotating(
    gateway: RotatingGateway, *, environ: dict[str, str] | None = None, **sections: Any
) -> AsyncIterator[Sidecar]:
    """A sidecar that has found out what it stands before."""
    async with (
        scripted_upstream(gateway) as upstream,
        running_sidecar(upstream.url, probes=True, environ=environ, **sections) as sidecar,
    ):
        async with asyncio.timeout(5):
            while sidecar.running.picture.probed_at is None:
                await asyncio.sleep(0.005)
        yield sidecar


async def streamed(sidecar: Sidecar, *fields: bytes) -> Answer:
    answer = await chat(sidecar.url, *(fields or (K1,)), body=STREAMED_CHAT)
    assert answer.status == 200, answer.body
    return answer


async def test_after_a_streamed_turn_the_record_is_asked_and_the_next_turn_goes_to_the_tip() -> None:
    gateway = RotatingGateway(rotates_after=2)
    async with rotating(gateway) as sidecar:
        answers = [await streamed(sidecar) for _ in range(8)]

    assert gateway.chats == ["k1"] * 3 + ["child-2"] * 2 + ["child-3"] * 2 + ["child-4"]
    assert [said(answer) for answer in answers] == [MAPPED] * 3 + [FOLLOWED] * 5
    assert [answer.value(SID) for answer in answers] == gateway.chats  # as the gateway said it
    assert all(request.is_probe for request in gateway.records)


async def test_record_is_asked_with_the_credentials_of_the_turn() -> None:
    """The sidecar has no key of its own here, and can see no sessions: the turn's key opens them."""
    gateway = RotatingGateway(rotates_after=1, key="the-key")
    bearer = b"Authorization: Bearer the-key"
    async with rotating(gateway) as sidecar:
        for _ in range(3):
            await streamed(sidecar, K1, bearer, b"Cookie: a=b", b"X-Custom: 1")

    assert gateway.chats == ["k1", "k1", "child-2"]
    assert {request.target for request in gateway.records} >= {b"/api/sessions/k1", b"/api/sessions/k1/messages"}
    assert {tuple(request.values("authorization")) for request in gateway.records} == {(b"Bearer the-key",)}
    assert {request.method for request in gateway.records} == {b"GET"}
    assert not any(request.values("cookie") or request.values("x-custom") for request in gateway.records)


async def test_record_is_asked_with_the_sidecars_key_where_the_client_has_none() -> None:
    gateway = RotatingGateway(rotates_after=1, key="the-key")
    async with rotating(gateway, environ={"HERMES_SIDECAR_GATEWAY__TOKEN": "the-key"}) as sidecar:
        for _ in range(3):
            await streamed(sidecar)

    assert gateway.chats == ["k1", "k1", "child-2"]


async def test_wrong_credentials_learn_nothing_and_disturb_nothing() -> None:
    gateway = RotatingGateway(rotates_after=1, key="the-key")
    async with rotating(gateway) as sidecar:
        for _ in range(3):
            await streamed(sidecar, K1, b"Authorization: Bearer another-key")
        assert [line for line in sidecar.log if line[1]["event"] == "internal_error"] == []

    assert gateway.chats == ["k1"] * 3


async def test_id_is_encoded_in_the_records_path() -> None:
    gateway = RotatingGateway(rotates_after=1)
    async with rotating(gateway) as sidecar:
        for _ in range(3):
            await streamed(sidecar, b"X-Hermes-Session-Key: agent:main?a#b%41")

    assert gateway.chats == ["agent:main?a#b%41"] * 2 + ["child-2"]
    assert gateway.records[0].target == b"/api/sessions/agent%3Amain%3Fa%23b%2541"


async def test_plain_turn_asks_no_record() -> None:
    gateway = RotatingGateway(rotates_after=1)
    async with rotating(gateway) as sidecar:
        for _ in range(3):
            await chat(sidecar.url, K1)

    assert gateway.chats == ["k1", "k1", "child-2"]
    assert gateway.records == []


@pytest.mark.parametrize("is_on", [True, False], ids=["without-sessions", "switched-off"])
async def test_gateway_without_sessions_is_not_asked(is_on: bool) -> None:
    gateway = RotatingGateway(rotates_after=1, has_records=not is_on)
    async with rotating(gateway, session={"follow_rotation": is_on}) as sidecar:
        for _ in range(3):
            await streamed(sidecar)

    assert gateway.records == []
    assert gateway.chats == ["k1"] * 3


@pytest.mark.parametrize("body", [pytest.param(STREAMED_CHAT, id="streamed"), pytest.param(CHAT, id="plain")])
async def test_turn_that_its_client_leaves_may_have_moved_the_session_too(body: bytes) -> None:
    """Somebody presses Stop. hermes-agent compresses before it asks its model, so the session is moved by then."""
    gateway = RotatingGateway(rotates_after=1)
    async with rotating(gateway) as sidecar:
        await chat(sidecar.url, K1)
        gateway.may_end.clear()
        async with raw_client(sidecar.url) as client:
            client.write(client.request("POST", "/v1/chat/completions", JSON, K1, body=body))
            if body is STREAMED_CHAT:
                await client.until(EVENT)
            async with asyncio.timeout(5):
                while len(gateway.chats) < 2:
                    await asyncio.sleep(0.005)
        async with asyncio.timeout(5):
            await gateway.record_asked.wait()
        gateway.may_end.set()
        third = await chat(sidecar.url, K1)

    assert said(third) == FOLLOWED
    assert gateway.chats == ["k1", "k1", "child-2"]


async def test_next_turn_waits_until_the_record_has_told() -> None:
    gateway = RotatingGateway(rotates_after=1)
    may_tell = asyncio.Event()

    async def hold(_: Received) -> None:
        await may_tell.wait()

    async with rotating(gateway) as sidecar:
        await streamed(sidecar)
        gateway.before_record = hold
        gateway.record_asked.clear()
        await streamed(sidecar)  # the client has its whole answer, whatever the record does
        async with asyncio.timeout(5):
            await gateway.record_asked.wait()
        asked_at = time.monotonic()
        third = asyncio.ensure_future(streamed(sidecar))
        neighbour = await chat(sidecar.url, K2)
        assert not third.done()
        may_tell.set()
        answer = await third
        took_s = time.monotonic() - asked_at

    assert said(answer) == FOLLOWED
    assert gateway.chats == ["k1", "k1", "k2", "child-2"]
    assert neighbour.status == 200
    assert took_s < 1


async def test_record_that_hangs_holds_the_next_turn_for_a_second_at_most() -> None:
    gateway = RotatingGateway(rotates_after=1)

    async def hang(_: Received) -> None:
        await asyncio.Event().wait()

    gateway.before_record = hang
    async with rotating(gateway) as sidecar:
        await streamed(sidecar)
        async with asyncio.timeout(5):
            await gateway.record_asked.wait()
        asked_at = time.monotonic()
        second = await streamed(sidecar)
        took_s = time.monotonic() - asked_at

    assert 0.9 < took_s < 1.5
    assert said(second) == MAPPED
    assert gateway.chats == ["k1", "k1"]


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        pytest.param(ok(b'{"end_reason":"user_exit"}'), naming(b""), id="ended-otherwise"),
        pytest.param(ok(b'{"end_reason":null}'), naming(b""), id="goes-on"),
        pytest.param(ok(b"[]"), naming(b""), id="a-list"),
        pytest.param(ok(b"no json"), naming(b""), id="no-json"),
        pytest.param(ok(b"", status=b"404 Not Found"), naming(b""), id="not-found"),
        pytest.param(ok(b"", status=b"500 Oops"), naming(b""), id="error"),
        pytest.param(b"HTTP/9 oops\r\n\r\n", naming(b""), id="garbage"),
        pytest.param(ok(b'{"end_reason":"compression"}'), ok(b'{"session_id":"k1"}'), id="tip-is-itself"),
        pytest.param(ok(b'{"end_reason":"compression"}'), ok(b'{"session_id":"api-1"}'), id="tip-is-made-up"),
        pytest.param(ok(b'{"end_reason":"compression"}'), ok(b'{"session_id":"a/b"}'), id="tip-is-illegal"),
        pytest.param(ok(b'{"end_reason":"compression"}'), ok(b'{"data":[]}'), id="no-tip"),
        pytest.param(
            ok(b'{"end_reason":"compression"}'),
            ok(rb'{"data":[{"content":"\"session_id\": \"evil\""}]}'),
            id="words-of-a-message",
        ),
        pytest.param(ok(b'{"end_reason":"compression"}'), ok(b"", status=b"404 Not Found"), id="no-messages"),
    ],
)
async def test_record_that_tells_of_no_continuation_changes_nothing(record: bytes, messages: bytes) -> None:
    otherwise = RotatingGateway(rotates_after=1_000)
    chats: list[bytes] = []

    async def script(connection: Connection) -> None:
        while True:
            request = await connection.request(limit_s=60)
            if request.target == b"/api/sessions/k1":
                connection.write(record)
            elif request.target == b"/api/sessions/k1/messages":
                connection.write(messages)
            elif request.method == b"POST":
                chats.extend(request.values(SID))
                connection.write(STREAM_HEAD + chunk(b"data: [DONE]\n\n") + LAST_CHUNK)
            else:
                answer = otherwise._otherwise(request)
                assert isinstance(answer, bytes)
                connection.write(answer)

    async with scripted_upstream(script) as upstream, running_sidecar(upstream.url, probes=True) as sidecar:
        async with asyncio.timeout(5):
            while sidecar.running.picture.probed_at is None:
                await asyncio.sleep(0.005)
        for _ in range(3):
            await streamed(sidecar)
        assert [line for line in sidecar.log if line[1]["event"] == "internal_error"] == []

    assert chats == [b"k1"] * 3


# --- Restarts, and several sidecars ----------------------------------------------------------------------------------


async def test_restart_remembers(tmp_path: Path) -> None:
    store = {"url": f"sqlite://{tmp_path}/state/lineage.sqlite3"}
    async with scripted_upstream(in_turn(naming(b"child-2"), naming(b"child-3"), ok())) as upstream:
        async with running_sidecar(upstream.url, store=store) as sidecar:
            await chat(sidecar.url, K1)
            await chat(sidecar.url, K1)
        async with running_sidecar(upstream.url, store=store) as sidecar:
            first = await chat(sidecar.url, K1)
            neighbour = await chat(sidecar.url, K2)

    assert sent(upstream) == [b"k1", b"child-2", b"child-3", b"k2"]
    assert [said(first), said(neighbour)] == [FOLLOWED, MAPPED]


async def until_followed(sidecar: Sidecar, *fields: bytes) -> str | None:
    """What a sidecar says once it has heard of a rotation that another one learned."""
    async with asyncio.timeout(5):
        while "followed" not in str(word := said(await ask(sidecar.url, "GET", "/v1/models", *fields))):
            pass
    return word


async def test_two_sidecars_with_one_redis_follow_each_other() -> None:
    with redis_server() as redis:
        gateway = RotatingGateway(rotates_after=1)
        async with (
            scripted_upstream(gateway) as upstream,
            running_sidecar(upstream.url, store={"url": redis.url()}) as one,
            running_sidecar(upstream.url, store={"url": redis.url()}) as other,
        ):
            await chat(other.url, K1)  # it has seen the session before
            await chat(one.url, K1)
            await until_followed(other, K1)
            await chat(other.url, K1)
            await until_followed(one, b"X-Hermes-Session-Id: child-2")
            await chat(one.url, K1)

    assert gateway.chats == ["k1", "k1", "child-2", "child-3"]


async def test_what_was_learned_while_redis_was_away_reaches_the_others_when_it_is_back() -> None:
    with redis_server() as redis:
        gateway = RotatingGateway(rotates_after=1)
        async with (
            scripted_upstream(gateway) as upstream,
            running_sidecar(upstream.url, store={"url": redis.url()}) as one,
            running_sidecar(upstream.url, store={"url": redis.url()}) as other,
        ):
            await chat(one.url, K1)
            redis.stop()
            asked_at = time.monotonic()
            await chat(one.url, K1)
            answer = await chat(one.url, K1)
            took_s = time.monotonic() - asked_at
            errors = await metric(one, "store_errors_total")
            redis.start()
            await until_followed(other, K1)

    assert said(answer) == FOLLOWED  # from memory
    assert gateway.chats == ["k1", "k1", "child-2"]
    assert errors >= 1
    assert took_s < 1.0


async def test_answer_that_names_a_new_session_comes_when_the_others_can_know_it() -> None:
    """Turn about over two sidecars with nothing between the turns: not one goes to a session that has moved on."""
    with redis_server() as redis:
        gateway = RotatingGateway(rotates_after=1)
        async with (
            scripted_upstream(gateway) as upstream,
            running_sidecar(upstream.url, store={"url": redis.url()}) as one,
            running_sidecar(upstream.url, store={"url": redis.url()}) as other,
        ):
            for turn in range(12):
                assert (await chat((one, other)[turn % 2].url, K1)).status == 200

    assert len(set(gateway.chats[1:])) == 11, gateway.chats


# --- A store in trouble ----------------------------------------------------------------------------------------------


class ShakyStore(MemoryLineage):
    """A store that does as it is told, in memory."""

    def __init__(self, *, takes_s: float = 0.0, raises: Exception | None = None, is_shared: bool = True) -> None:
        super().__init__()
        self.takes_s = takes_s
        self.raises = raises
        self.is_shared = is_shared
        self.asked = 0

    async def successor(self, session_id: bytes) -> bytes | None:
        await self._trouble()
        return await super().successor(session_id)

    async def remember(self, session_id: bytes, successor: bytes) -> None:
        await self._trouble()
        await super().remember(session_id, successor)

    async def _trouble(self) -> None:
        self.asked += 1
        await asyncio.sleep(self.takes_s)
        if self.raises is not None:
            raise self.raises


@asynccontextmanager
async def with_store(
    store: ShakyStore, script: Any, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[ScriptedUpstream, Sidecar]]:
    monkeypatch.setattr("sidecar.app.open_store", lambda *_, **__: store)
    async with relayed(script) as (upstream, sidecar):
        yield upstream, sidecar


async def test_store_that_fails_costs_no_chat_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ShakyStore(raises=StoreUnavailable("away"))
    script = in_turn(naming(b"child-2"))
    async with with_store(store, script, monkeypatch) as (upstream, sidecar):
        answers = [await chat(sidecar.url, K1) for _ in range(3)]
        errors = await metric(sidecar, "store_errors_total")

    assert [answer.status for answer in answers] == [200] * 3
    assert sent(upstream) == [b"k1", b"child-2", b"child-2"]  # from memory
    assert errors >= 3


async def test_store_that_is_skipped_is_no_further_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ShakyStore(raises=StoreUnavailable("a moment ago", is_skipped=True))
    async with with_store(store, ok(), monkeypatch) as (_, sidecar):
        assert (await chat(sidecar.url, K1)).status == 200
        errors = await metric(sidecar, "store_errors_total")

    assert errors == 0


async def test_store_with_a_mistake_in_it_costs_no_chat_and_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ShakyStore(raises=RuntimeError("a bug"))
    script = in_turn(naming(b"child-2"))
    async with with_store(store, script, monkeypatch) as (upstream, sidecar):
        answers = [await chat(sidecar.url, K1) for _ in range(2)]

    assert [answer.status for answer in answers] == [200, 200]
    assert sent(upstream) == [b"k1", b"child-2"]
    assert {line["error"] for _, line in sidecar.log if line["event"] == "internal_error"} == {"RuntimeError"}


async def test_long_chain_in_a_slow_store_delays_a_chat_for_a_quarter_of_a_second_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each answer comes within the limit; all of them would take a second and a half. The next turn goes on there."""
    store = ShakyStore(takes_s=0.1)
    for number in range(15):
        await MemoryLineage.remember(store, b"k%d" % (number + 1), b"k%d" % (number + 2))
    async with with_store(store, ok(), monkeypatch) as (upstream, sidecar):
        asked_at = time.monotonic()
        first = await chat(sidecar.url, K1)
        took_s = time.monotonic() - asked_at
        store.takes_s = 0
        second = await chat(sidecar.url, K1)
        errors = await metric(sidecar, "store_errors_total")

    assert 0.2 < took_s < 0.4
    assert [first.status, said(second)] == [200, FOLLOWED]
    assert sent(upstream)[1] == b"k16"
    assert errors == 1


@pytest.mark.parametrize(
    ("takes_s", "least_s"),
    [pytest.param(0.1, 0.1, id="slow"), pytest.param(5.0, 0.25, id="slower-than-anybody-waits")],
)
async def test_store_that_is_slow_to_learn_holds_the_answer_a_moment_and_loses_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, takes_s: float, least_s: float
) -> None:
    class SlowToLearn(ShakyStore):
        async def successor(self, session_id: bytes) -> bytes | None:
            return None

    body = b"x" * 300_000

    async def script(connection: Connection) -> None:
        while True:
            await connection.request(limit_s=60)
            head = b"HTTP/1.1 200 OK\r\nX-Hermes-Session-Id: child-2\r\nContent-Length: %d\r\n\r\n" % len(body)
            connection.write(head + body[:1000])
            connection.write(body[1000:])

    async with with_store(SlowToLearn(takes_s=takes_s), script, monkeypatch) as (_, sidecar):
        asked_at = time.monotonic()
        answer = await chat(sidecar.url, K1)
        took_s = time.monotonic() - asked_at

    assert answer.value(SID) == "child-2"
    assert answer.body == body
    assert least_s * 0.9 < took_s < least_s + 0.5


async def test_redis_that_hangs_delays_one_chat_for_a_quarter_of_a_second_and_the_next_ones_not(tmp_path: Path) -> None:
    async def hangs(connection: Connection) -> None:
        await connection.ended(limit_s=60)

    async with (
        scripted_upstream(hangs) as redis,
        relayed(ok(), store={"url": redis.url.replace("http", "redis") + "/0"}) as (_, sidecar),
    ):
        delays = []
        for _ in range(5):
            asked_at = time.monotonic()
            assert (await chat(sidecar.url, K1)).status == 200
            delays.append(time.monotonic() - asked_at)
        errors = await metric(sidecar, "store_errors_total")

    assert max(delays) < 0.4
    assert max(delays[1:]) < 0.1
    assert errors >= 1


async def test_what_is_being_written_at_the_end_is_written() -> None:
    """A worker that is stopped right after the answer that named a new session."""
    with redis_server() as redis:
        async with scripted_upstream(in_turn(naming(b"child-2"))) as upstream:
            async with running_sidecar(upstream.url, store={"url": redis.url()}) as sidecar:
                await chat(sidecar.url, K1)
            async with running_sidecar(upstream.url, store={"url": redis.url()}) as sidecar:
                await chat(sidecar.url, K1)

    assert sent(upstream) == [b"k1", b"child-2"]
