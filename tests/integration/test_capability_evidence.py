"""What traffic teaches, when the sidecar looks again, and who hears of it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from sidecar.capabilities.model import Cause, Finding, GatewayFacts, Picture
from sidecar.capabilities.monitor import Monitor
from tests.support import backends
from tests.support.backends import CHAT, HERMES, Answer, Answerer, answering_by, as_json, by_path
from tests.support.capabilities import conforming, count_probes, in_short, known, refreshed
from tests.support.raw_client import RawClient, ask, chat, raw_client
from tests.support.scripted_upstream import Connection, Received, ScriptedUpstream, scripted_upstream
from tests.support.sidecars import Sidecar, running_sidecar
from tests.support.wire import LIMIT_S

SELDOM = {"interval_s": 3600.0, "retry_s": 3600.0}
STREAMED = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}'
IMAGE_PART = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}'
WITH_IMAGE = b'{"messages":[{"role":"user","content":[{"type":"text","text":"x"},%b]}]}' % IMAGE_PART


class Switch:
    """A backend that can be replaced while it runs."""

    def __init__(self, answerer: Answerer) -> None:
        self.answerer = answerer

    def __call__(self, request: Received) -> Answer:
        return self.answerer(request)


async def becomes(url: str, status: str, *, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """The document, once it has this status. It is read from the stream of changes: nothing here causes a probe."""
    async with asyncio.timeout(limit_s), raw_client(url) as client:
        await listening(client)
        while (document := await event(client))["status"] != status:
            pass
        return document


async def listening(client: RawClient) -> None:
    client.write(client.request("GET", "/capabilities/events"))
    head = await client.head()
    assert (head.status, head.value("Content-Type")) == (200, "text/event-stream")


async def event(client: RawClient) -> dict[str, Any]:
    """The next document of a stream of changes."""
    await client.until(b"data: ")
    text = await client.until(b"\n\n")
    return conforming(json.loads(text))


# Observed evidence


async def test_streamed_chat_proves_streaming() -> None:
    backend = by_path({"/v1/models": backends.models()}, chat=backends.STREAM)
    async with (
        scripted_upstream(answering_by(backend)) as upstream,
        running_sidecar(upstream.url, probes=True, probe=SELDOM) as sidecar,
    ):
        before = await refreshed(sidecar.url)
        await chat(sidecar.url, body=STREAMED)
        after = await known(sidecar.url)

    assert (in_short(before), in_short(after)) == ("+++?? -----", "++++? -----")
    assert {key: after["details"]["streaming"][key] for key in ("evidence", "path", "httpStatus", "servedBy")} == {
        "evidence": "observed", "path": CHAT, "httpStatus": 200, "servedBy": "gateway",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(WITH_IMAGE, True, id="image-part"),
        pytest.param(WITH_IMAGE.replace(b'"type":"image_url"', b'"type" : "image_url"'), True, id="spaced"),
        pytest.param(
            b'{"input":[{"role":"user","content":[{"type":"input_image","image_url":"data:x"}]}]}', True, id="input"
        ),
        pytest.param(
            json.dumps({"messages": [{"role": "user", "content": IMAGE_PART.decode()}]}).encode(), None, id="in-text"
        ),
        pytest.param(b'{"messages":[{"role":"user","content":"image_url"}]}', None, id="the-word-alone"),
        pytest.param(b'{"tools":[{"enum":["text","image_url"]}]}', None, id="in-a-schema"),
    ],
)
async def test_answered_image_proves_images(body: bytes, expected: bool | None) -> None:
    async with (
        scripted_upstream(answering_by(by_path({"/v1/models": backends.models()}))) as upstream,
        running_sidecar(upstream.url, probes=True, probe=SELDOM) as sidecar,
    ):
        await refreshed(sidecar.url)
        await chat(sidecar.url, body=body)
        document = await known(sidecar.url)

    assert document["coreCapabilities"]["images"] is expected


async def test_refused_image_proves_nothing() -> None:
    backend = by_path({"/v1/models": backends.models()}, chat=as_json({"error": "no images"}, b"400 Bad Request"))
    async with (
        scripted_upstream(answering_by(backend)) as upstream,
        running_sidecar(upstream.url, probes=True, probe=SELDOM) as sidecar,
    ):
        await refreshed(sidecar.url)
        await chat(sidecar.url, body=WITH_IMAGE)
        document = await known(sidecar.url)

    assert document["coreCapabilities"]["images"] is None


async def test_observed_image_beats_metadata_that_knows_of_none() -> None:
    async with (
        scripted_upstream(answering_by(backends.llama_cpp("text"))) as upstream,
        running_sidecar(upstream.url, probes=True, probe=SELDOM) as sidecar,
    ):
        before = await refreshed(sidecar.url)
        await chat(sidecar.url, body=WITH_IMAGE)
        after = await refreshed(sidecar.url)

    assert [before["coreCapabilities"]["images"], after["coreCapabilities"]["images"]] == [False, True]


async def test_clients_200_proves_sessions_where_the_sidecar_has_no_key() -> None:
    key = "clients-Key-0123456789"
    async with (
        scripted_upstream(answering_by(backends.hermes_gateway(key))) as upstream,
        running_sidecar(upstream.url, probes=True, probe=SELDOM) as sidecar,
    ):
        before = await refreshed(sidecar.url)
        answer = await ask(sidecar.url, "GET", "/api/sessions", b"Authorization: Bearer " + key.encode())
        after = await known(sidecar.url)
        again = await refreshed(sidecar.url)

    assert answer.status == 200
    assert [before["mode"], after["mode"], again["mode"]] == ["portable", "enhanced", "enhanced"]
    assert after["details"]["sessions"]["evidence"] == "observed"
    assert after["details"]["sessions"]["unlock"] is None
    assert key not in json.dumps([after, again])


async def test_200_for_everything_proves_no_family_to_a_client_either() -> None:
    """LM Studio answers unknown paths with 200 and an error in JSON."""
    async with (
        scripted_upstream(answering_by(backends.lm_studio("llm"))) as upstream,
        running_sidecar(upstream.url, probes=True, probe=SELDOM) as sidecar,
    ):
        await refreshed(sidecar.url)
        await ask(sidecar.url, "GET", "/v1/skills")
        document = await known(sidecar.url)

    assert in_short(document) == "+++?- -----"


async def test_chat_that_only_traffic_could_show_stays_shown() -> None:
    """A backend that answers GET on its chat route with 404, and lists no models: each probe denies it."""
    async with (
        scripted_upstream(answering_by(by_path({}))) as upstream,
        running_sidecar(upstream.url, probes=True, probe=SELDOM) as sidecar,
    ):
        before = await refreshed(sidecar.url)
        await chat(sidecar.url)
        after = [(await refreshed(sidecar.url))["status"] for _ in range(4)]

    assert (before["status"], after) == ("disconnected", ["connected"] * 4)


async def test_one_failure_disproves_nothing_and_two_denials_do() -> None:
    switch = Switch(by_path({"/v1/models": backends.models()}, chat=backends.STREAM))
    async with (
        scripted_upstream(answering_by(switch)) as upstream,
        running_sidecar(upstream.url, probes=True, probe=SELDOM) as sidecar,
    ):
        await refreshed(sidecar.url)
        await chat(sidecar.url, body=STREAMED)
        switch.answerer = by_path({}, chat=as_json({"error": "x"}, b"500 Internal Server Error"))
        await chat(sidecar.url, body=STREAMED)
        signs = [in_short(await known(sidecar.url))]
        signs += [in_short(await refreshed(sidecar.url)) for _ in range(2)]

    assert signs == ["++++? -----", "-+-+? -----", "---+? -----"]


async def test_gateway_that_is_silent_once_is_not_gone() -> None:
    """It is at work on somebody's turn. Silent twice, it is."""

    async def silence(connection: Connection) -> None:
        await connection.ended(limit_s=60)

    switch = Switch(by_path({"/v1/models": backends.models()}))
    async with (
        scripted_upstream(answering_by(switch)) as upstream,
        running_sidecar(upstream.url, probes=True, probe=SELDOM | {"timeout_s": 0.1}) as sidecar,
    ):
        await refreshed(sidecar.url)
        await chat(sidecar.url)
        switch.answerer = lambda _: silence
        statuses = [(await refreshed(sidecar.url))["status"] for _ in range(2)]

    assert statuses == ["connected", "disconnected"]


async def test_another_backend_at_the_same_address_starts_from_nothing() -> None:
    switch = Switch(by_path({"/v1/models": backends.models()}, chat=backends.STREAM))
    async with (
        scripted_upstream(answering_by(switch)) as upstream,
        running_sidecar(upstream.url, probes=True, probe=SELDOM) as sidecar,
    ):
        await refreshed(sidecar.url)
        await chat(sidecar.url, body=STREAMED)
        switch.answerer = backends.OLLAMA
        document = await refreshed(sidecar.url)

    assert (document["gateway"]["kind"], in_short(document)) == ("ollama", "+++?? -----")


# When it looks


async def test_many_who_ask_cause_no_probe_and_many_who_refresh_cause_one() -> None:
    may_answer = asyncio.Event()
    hermes = backends.hermes_gateway()

    async def late(connection: Connection) -> None:
        await may_answer.wait()
        connection.write(backends.NOT_FOUND)

    def answerer(request: Received) -> Answer:
        is_control = request.target.startswith(b"/hermes-sidecar-")
        return late if is_control and count_probes(upstream.requests) == 2 else hermes(request)

    async with (
        scripted_upstream(answering_by(answerer)) as upstream,
        running_sidecar(upstream.url, probes=True, probe=SELDOM) as sidecar,
    ):
        await becomes(sidecar.url, "partial")
        readers = await asyncio.gather(*(known(sidecar.url) for _ in range(100)))
        refreshing = [asyncio.ensure_future(refreshed(sidecar.url)) for _ in range(20)]
        while count_probes(upstream.requests) < 2:
            await asyncio.sleep(0.005)  # any of its connections may bring it
        while_it_runs = await known(sidecar.url)
        may_answer.set()
        refreshers = await asyncio.gather(*refreshing)

    assert {document["status"] for document in [*readers, while_it_runs, *refreshers]} == {"partial"}
    assert count_probes(upstream.requests) == 2


async def test_gateway_that_comes_up_is_noticed_within_retry_s() -> None:
    async with scripted_upstream(answering_by(backends.hermes_gateway())) as first:
        port = first.port
    async with running_sidecar(
        f"http://127.0.0.1:{port}", probes=True, probe={"interval_s": 3600.0, "retry_s": 0.2}
    ) as sidecar:
        assert (await refreshed(sidecar.url))["status"] == "disconnected"
        server = ScriptedUpstream(answering_by(backends.hermes_gateway()), records=True)
        loop = asyncio.get_running_loop()
        server._server = await loop.create_server(
            lambda: Connection(server._made, server.requests.append, records=True), "127.0.0.1", port
        )
        came_up_at = time.monotonic()
        try:
            await becomes(sidecar.url, "partial")
            noticed_s = time.monotonic() - came_up_at
        finally:
            await server.stop()

    assert noticed_s < 0.2 + 0.5


async def test_trouble_of_a_client_is_looked_into_at_once() -> None:
    """The next look would be an hour away."""
    async with (
        scripted_upstream(answering_by(backends.hermes_gateway())) as upstream,
        running_sidecar(upstream.url, probes=True, probe=SELDOM) as sidecar,
    ):
        await becomes(sidecar.url, "partial")
        await upstream.stop()
        began = time.monotonic()
        answer = await chat(sidecar.url)
        document = await becomes(sidecar.url, "disconnected")
        took_s = time.monotonic() - began

    assert answer.status == 502
    assert document["gateway"]["reachable"] is False
    assert took_s < 2


async def resets(connection: Connection) -> None:
    connection.reset()


async def test_flapping_gateway_is_followed() -> None:
    switch = Switch(backends.locked)
    async with (
        scripted_upstream(answering_by(switch)) as upstream,
        running_sidecar(upstream.url, probes=True, probe={"interval_s": 0.05, "retry_s": 0.05}) as sidecar,
        raw_client(sidecar.url) as client,
    ):
        await listening(client)
        for answerer, status, kind in (
            (backends.hermes_gateway(), "partial", "hermes-agent"),
            (backends.single_page_app, "disconnected", "generic"),
            (backends.OLLAMA, "connected", "ollama"),
            (lambda _: resets, "disconnected", None),
            (backends.hermes_gateway(), "partial", "hermes-agent"),
        ):
            switch.answerer = answerer
            async with asyncio.timeout(LIMIT_S):
                while (found := await event(client))["status"] != status or found["gateway"]["kind"] != kind:
                    pass  # a probe that ran during the change may have seen half of each


async def test_idle_probing_reads_only_and_is_bounded_by_its_intervals() -> None:
    """Ten minutes with the interval of two, made 2000 times quicker: 0.3 s with one of 0.06 s."""
    async with (
        scripted_upstream(answering_by(backends.hermes_gateway())) as upstream,
        running_sidecar(upstream.url, probes=True, probe={"interval_s": 0.06, "retry_s": 0.01}) as sidecar,
    ):
        await becomes(sidecar.url, "partial")
        await asyncio.sleep(0.3)  # the time itself is what is measured here
        count = count_probes(upstream.requests)

    assert 3 <= count <= 7
    assert {(request.method, request.body) for request in upstream.requests} == {(b"GET", b"")}
    assert len(upstream.requests) <= count * 16
    assert {name for request in upstream.requests for name in request.names} == {b"host", b"accept", b"user-agent"}


async def test_chat_is_not_delayed_while_a_probe_hangs() -> None:
    async def silence(connection: Connection) -> None:
        await connection.ended(limit_s=60)

    def answerer(request: Received) -> Answer:
        return silence if request.is_probe else backends.COMPLETION

    async with (
        scripted_upstream(answering_by(answerer)) as upstream,
        running_sidecar(upstream.url, probes=True, probe={"timeout_s": 30.0}) as sidecar,
    ):
        await (await upstream.connection()).asked()
        began = time.monotonic()
        answers = [await chat(sidecar.url) for _ in range(5)]
        took_s = time.monotonic() - began
        document = await known(sidecar.url)

    assert [answer.status for answer in answers] == [200] * 5
    assert took_s < 1
    assert document["coreCapabilities"]["chatCompletions"] is True


# Who hears of it


async def test_listener_gets_the_document_at_once_and_at_each_change_and_no_more() -> None:
    switch = Switch(backends.hermes_gateway())
    async with (
        scripted_upstream(answering_by(switch)) as upstream,
        running_sidecar(upstream.url, probes=True, probe=SELDOM) as sidecar,
    ):
        await becomes(sidecar.url, "partial")
        async with raw_client(sidecar.url) as client:
            await listening(client)
            first = await event(client)
            for _ in range(3):
                await refreshed(sidecar.url)  # nothing new
            switch.answerer = backends.OLLAMA
            await refreshed(sidecar.url)
            second = await event(client)
            for _ in range(3):
                await refreshed(sidecar.url)
            unread = client.unread

    assert [first["status"], second["status"]] == ["partial", "connected"]
    assert b"data:" not in unread


async def test_new_token_of_the_dashboard_is_no_news() -> None:
    dashboard = backends.HermesDashboard()
    async with (
        scripted_upstream(answering_by(backends.hermes_gateway())) as upstream,
        scripted_upstream(answering_by(dashboard)) as second,
        running_sidecar(upstream.url, probes=True, probe=SELDOM, dashboard={"url": second.url}) as sidecar,
    ):
        await becomes(sidecar.url, "enhanced")
        async with raw_client(sidecar.url) as client:
            await listening(client)
            await event(client)
            dashboard.restart()
            await refreshed(sidecar.url)
            await refreshed(sidecar.url)
            unread = client.unread
        again = await ask(sidecar.url, "GET", "/api/memory")

    assert (b"data:" in unread, again.status) == (False, 200)


async def test_listener_that_leaves_is_taken_off() -> None:
    async with (
        scripted_upstream(answering_by(backends.hermes_gateway())) as upstream,
        running_sidecar(upstream.url, probes=True, probe=SELDOM) as sidecar,
    ):
        await refreshed(sidecar.url)
        listeners = listeners_of(sidecar)
        before = len(listeners)
        async with raw_client(sidecar.url) as client:
            await listening(client)
            await event(client)
            during = len(listeners)
        async with asyncio.timeout(LIMIT_S):
            while len(listeners) > before:
                await asyncio.sleep(0.01)  # nothing tells of it

    assert during == before + 1


def listeners_of(sidecar: Sidecar) -> list[Any]:
    return sidecar.running._app.monitor._listeners


@pytest.mark.parametrize(
    ("features", "policy", "crosses"),
    [
        pytest.param(backends.FEATURES, "auto", True, id="declared"),
        pytest.param({"chat_completions": True}, "auto", False, id="not-declared"),
        pytest.param(backends.FEATURES, "never", False, id="declared-but-never"),
        pytest.param({"chat_completions": True}, "always", True, id="not-declared-but-always"),
    ],
)
async def test_session_key_goes_to_a_gateway_that_declares_it(
    features: dict[str, Any], policy: str, crosses: bool
) -> None:
    declared = as_json({"object": "hermes.api_server.capabilities", "platform": "hermes-agent", "features": features})
    backend = backends.hermes_gateway(routes=HERMES | {"/v1/capabilities": declared})
    async with (
        scripted_upstream(answering_by(backend)) as upstream,
        running_sidecar(upstream.url, probes=True, probe=SELDOM, session={"forward_key": policy}) as sidecar,
    ):
        await becomes(sidecar.url, "partial")
        await chat(sidecar.url, b"X-Hermes-Session-Key: route-1")

    (turn,) = [request for request in upstream.requests if request.method == b"POST"]
    assert turn.values("x-hermes-session-key") == ([b"route-1"] if crosses else [])
    assert turn.values("x-hermes-session-id") == [b"route-1"]


# The monitor itself


def usable() -> Picture:
    chat_there = Finding(True, "probe", Cause.PRESENT, "x")
    return Picture(GatewayFacts(True, "generic", findings={"chatCompletions": chat_there}), probed_at=1.0)


async def test_fault_of_ours_in_a_probe_is_told_and_the_next_one_comes() -> None:
    faults: list[BaseException] = []
    went_well = asyncio.Event()
    boom = RuntimeError("boom")

    async def probe() -> Picture:
        if not faults:
            raise boom
        went_well.set()
        return usable()

    monitor = Monitor(probe, Picture(), interval_s=3600, retry_s=0.01, on_failure=faults.append)
    monitor.start()
    async with asyncio.timeout(LIMIT_S):
        await monitor.known.wait()
        await went_well.wait()
    await monitor.stop()

    assert faults == [boom]


async def test_trouble_while_a_probe_runs_leads_to_another() -> None:
    """What failed may have failed after the probe had looked."""
    count = 0
    second = asyncio.Event()

    async def probe() -> Picture:
        nonlocal count
        count += 1
        if count == 2:
            monitor.trouble()
        if count == 3:
            second.set()
        return usable()

    monitor = Monitor(probe, Picture(), interval_s=3600, retry_s=3600, on_failure=lambda _: None)
    await monitor.refresh()
    monitor.start()
    async with asyncio.timeout(LIMIT_S):
        await second.wait()
    await monitor.stop()

    assert count == 3


async def test_one_who_stops_waiting_stops_nobody_elses_probe() -> None:
    may_end = asyncio.Event()

    async def probe() -> Picture:
        await may_end.wait()
        return usable()

    monitor = Monitor(probe, Picture(), interval_s=3600, retry_s=3600, on_failure=lambda _: None)
    impatient, patient = asyncio.ensure_future(monitor.refresh()), asyncio.ensure_future(monitor.refresh())
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.gather(impatient, return_exceptions=True)
    may_end.set()

    async with asyncio.timeout(LIMIT_S):
        assert await patient == usable()
