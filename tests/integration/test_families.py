"""Enhanced families on the data path: missing ones are told in words, the dashboard serves what the gateway lacks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support import backends
from tests.support.backends import HERMES, Answer, Answerer, HermesDashboard, answering_by, as_json, as_text
from tests.support.capabilities import refreshed
from tests.support.raw_client import ask, chat, raw_client
from tests.support.raw_http import Answer as Reply
from tests.support.scripted_upstream import Connection, Received, ScriptedUpstream, scripted_upstream
from tests.support.sidecars import Sidecar, running_sidecar

KEY = "gateway-Key-0123456789"
ENVIRON = {"HERMES_SIDECAR_GATEWAY__TOKEN": KEY}
SELDOM = {"interval_s": 3600.0, "retry_s": 3600.0}
TOKEN = b"first-Token-0123456789"
NEW_TOKEN = b"second-Token-0123456789"


@asynccontextmanager
async def before(gateway: Answerer, **sections: dict[str, Any]) -> AsyncIterator[tuple[ScriptedUpstream, Sidecar]]:
    """A sidecar that has probed a gateway."""
    async with (
        scripted_upstream(answering_by(gateway)) as upstream,
        running_sidecar(upstream.url, probes=True, probe=SELDOM, **sections) as sidecar,
    ):
        await refreshed(sidecar.url)
        yield upstream, sidecar


class Both:
    """A gateway, a dashboard, and a sidecar that has probed both."""

    def __init__(self, gateway: ScriptedUpstream, dashboard: ScriptedUpstream, sidecar: Sidecar) -> None:
        self.gateway = gateway
        self.dashboard = dashboard
        self.url = sidecar.url

    def asked_dashboard(self) -> list[Received]:
        """What clients' requests became there."""
        return [request for request in self.dashboard.requests if not request.is_probe]

    def asked_gateway(self) -> list[Received]:
        return [request for request in self.gateway.requests if not request.is_probe]


@asynccontextmanager
async def with_dashboard(
    dashboard: Answerer, gateway: Answerer | None = None, *, environ: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[Both]:
    async with (
        scripted_upstream(answering_by(gateway or backends.hermes_gateway(KEY))) as first,
        scripted_upstream(answering_by(dashboard)) as second,
        running_sidecar(
            first.url,
            probes=True,
            probe=SELDOM,
            environ=environ or ENVIRON,
            dashboard={"url": second.url, **settings},
        ) as sidecar,
    ):
        await refreshed(sidecar.url)
        yield Both(first, second, sidecar)


def fault(reply: Reply) -> tuple[int, str | None, str, str]:
    """Status, code, message and hint of an error of the sidecar's own."""
    error = reply.json()["error"]
    assert error["code"] == reply.value("X-Hermes-Sidecar-Error")
    return reply.status, error["code"], error["message"], error["hint"]


# Missing families


MEMORY = (
    404,
    "capability_unavailable",
    "Memory browser requires the memory API.",
    "Start the dashboard (hermes dashboard) and set dashboard.url.",
)


@pytest.mark.parametrize("path", ["/api/memory", "/api/memory/", "/api/memory?x=1", "/api/memory/providers/a%2Fb"])
@pytest.mark.parametrize(("method", "body"), [("GET", b""), ("POST", b"{}"), ("PATCH", b"{}"), ("DELETE", b"")])
async def test_any_request_to_a_missing_family_is_told_so(method: str, path: str, body: bytes) -> None:
    """Cases C6 and C10: never a raw 404, never a friendly 200, and nothing reaches the gateway."""
    async with before(backends.hermes_gateway()) as (upstream, sidecar):
        reply = await ask(sidecar.url, method, path, body=body)

    assert fault(reply) == MEMORY
    assert [request.target for request in upstream.requests if not request.is_probe] == []


async def test_answer_to_head_has_no_body() -> None:
    async with before(backends.hermes_gateway()) as (_, sidecar):
        reply = await ask(sidecar.url, "HEAD", "/api/memory")

    assert (reply.status, reply.value("X-Hermes-Sidecar-Error"), reply.body) == (404, "capability_unavailable", b"")


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (
            "sessions",
            "Session history isn't available on this backend yet; the conversation lives in the client and is "
            "temporary.",
        ),
        ("skills", "Skills browser requires the skills API."),
        ("memory", "Memory browser requires the memory API."),
        ("config", "Settings editor requires the config API."),
        ("jobs", "Scheduled jobs require the jobs API."),
    ],
)
async def test_each_family_of_a_plain_backend(family: str, message: str) -> None:
    async with before(backends.OLLAMA) as (_, sidecar):
        reply = await ask(sidecar.url, "GET", f"/api/{family}")

    hint = "Put hermes-agent's gateway behind the sidecar; chat works without it."
    assert fault(reply) == (404, "capability_unavailable", message, hint)


async def test_skills_of_a_gateway_that_has_them_elsewhere() -> None:
    async with before(backends.hermes_gateway()) as (_, sidecar):
        here, there = [await ask(sidecar.url, "GET", path) for path in ("/api/skills", "/v1/skills")]

    assert fault(here)[2] == "This gateway serves its skills at /v1/skills, not at /api/skills."
    assert (there.status, there.json()["data"]) == (200, [])


@pytest.mark.parametrize("path", ["/api/memoryx", "/api/mem", "/api", "/v1/memory", "/p/x/api/memory", "/API/memory"])
async def test_paths_beside_a_missing_family_are_the_gateways(path: str) -> None:
    async with before(backends.hermes_gateway()) as (_, sidecar):
        reply = await ask(sidecar.url, "GET", path)

    assert (reply.status, reply.body, reply.value("X-Hermes-Sidecar-Error")) == (404, b"404: Not Found", None)


NOT_FOUND_SESSION = as_json({"error": {"code": "session_not_found", "message": "x"}}, b"404 Not Found")


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(NOT_FOUND_SESSION, id="404-of-a-missing-object"),
        pytest.param(as_json({"error": "x"}, b"500 Internal Server Error"), id="500"),
        pytest.param(as_json({"error": "x"}, b"401 Unauthorized"), id="401"),
        pytest.param(as_text(b"", b"text/plain", b"403 Forbidden"), id="403"),
        pytest.param(as_json({"error": "x"}, b"429 Too Many Requests", b"Retry-After: 1"), id="429"),
        pytest.param(as_json({"error": "x"}, b"405 Method Not Allowed", b"Allow: GET"), id="405"),
        pytest.param(as_json({"error": "x"}, b"501 Not Implemented"), id="501"),
    ],
)
async def test_family_that_is_there_answers_for_itself(answer: bytes) -> None:
    """Case C9: each status and body as the gateway sent it."""
    routes: dict[str, Answer] = HERMES | {"/api/sessions/s1": answer}
    async with before(backends.hermes_gateway(routes=routes)) as (_, sidecar):
        reply = await ask(sidecar.url, "GET", "/api/sessions/s1")

    head, _, body = answer.partition(b"\r\n\r\n")
    assert (b"HTTP/1.1 %d %b" % (reply.status, reply.reason), reply.body) == (head.split(b"\r\n")[0], body)
    assert reply.value("X-Hermes-Sidecar-Error") is None


async def test_family_that_resets_is_a_502_in_words() -> None:
    async def resets(connection: Connection) -> None:
        connection.reset()

    async with before(backends.hermes_gateway(routes=HERMES | {"/api/sessions/s1": resets})) as (_, sidecar):
        reply = await ask(sidecar.url, "POST", "/api/sessions/s1", body=b"{}")

    assert fault(reply)[:2] == (502, "upstream_protocol_error")


async def test_request_right_after_the_start_waits_for_the_first_probe() -> None:
    may_answer = asyncio.Event()
    hermes = backends.hermes_gateway()

    async def late(connection: Connection) -> None:
        await may_answer.wait()
        connection.write(backends.NOT_FOUND)

    def answerer(request: Received) -> Answer:
        return late if request.target.startswith(b"/hermes-sidecar-") else hermes(request)

    async with (
        scripted_upstream(answering_by(answerer)) as upstream,
        running_sidecar(upstream.url, probes=True, probe=SELDOM) as sidecar,
        raw_client(sidecar.url) as client,
        raw_client(sidecar.url) as other,
    ):
        client.write(client.request("POST", "/api/memory", body=b"{}"))
        other.write(other.request("GET", "/api/sessions?limit=1"))
        chat_meanwhile = await chat(sidecar.url)
        early = bytes(client.received + other.received)
        may_answer.set()
        missing, present = await client.answer(), await other.answer()

    assert (chat_meanwhile.status, early) == (200, b"")
    assert fault(missing) == MEMORY
    assert (present.status, present.json()["data"]) == (200, [])
    targets = [request.target for request in upstream.requests if not request.is_probe]
    assert targets == [b"/v1/chat/completions", b"/api/sessions?limit=1"]


async def test_client_that_leaves_while_it_waits_for_the_first_probe_is_forgotten() -> None:
    async def silence(connection: Connection) -> None:
        await connection.ended(limit_s=60)

    async with (
        scripted_upstream(answering_by(lambda _: silence)) as upstream,
        running_sidecar(upstream.url, probes=True, probe=SELDOM) as sidecar,
    ):
        async with raw_client(sidecar.url) as client:
            client.write(client.request("GET", "/api/memory"))
            await (await upstream.connection()).asked()
        (line,) = await sidecar.ended_exchanges()

    assert (line["outcome"], line["route"]) == ("client_left", "memory")
    assert [request for request in upstream.requests if not request.is_probe] == []


# Filled from the dashboard


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/api/memory", {"active": "", "providers": []}),
        ("/api/config", {"model": "m"}),
        ("/api/skills", []),
        ("/api/memory?full=1", {"active": "", "providers": []}),
    ],
)
async def test_family_that_the_gateway_lacks_comes_from_the_dashboard(path: str, expected: Any) -> None:
    mine = (b"Authorization: Bearer clients-own", b"Cookie: a=b", b"X-Hermes-Session-Token: guessed")
    async with with_dashboard(HermesDashboard()) as both:
        reply = await ask(both.url, "GET", path, *mine)
        (request,) = both.asked_dashboard()

    assert (reply.status, reply.json()) == (200, expected)
    assert request.target == path.encode()
    assert request.values("x-hermes-session-token") == [TOKEN]
    assert request.names & {b"authorization", b"cookie", b"x-hermes-session-id"} == set()
    assert request.values("host") == [both.dashboard.url.removeprefix("http://").encode()]


async def test_jobs_are_found_under_the_dashboards_own_path() -> None:
    routes = {path: answer for path, answer in HERMES.items() if path != "/api/jobs"}
    gateway = backends.hermes_gateway(routes=routes)
    async with with_dashboard(HermesDashboard(), gateway, fill=["jobs"]) as both:
        reply = await ask(both.url, "GET", "/api/jobs?all=1")
        (request,) = both.asked_dashboard()

    assert (reply.status, reply.json(), request.target) == (200, [], b"/api/cron/jobs?all=1")


async def test_what_the_gateway_has_stays_the_gateways() -> None:
    async with with_dashboard(HermesDashboard(), fill=["sessions", "skills", "memory", "config", "jobs"]) as both:
        reply = await ask(both.url, "GET", "/api/sessions")

    assert reply.json() == {"object": "list", "data": []}
    assert both.asked_dashboard() == []


async def test_what_is_not_to_be_filled_is_missing() -> None:
    async with with_dashboard(HermesDashboard(), fill=["config"]) as both:
        reply = await ask(both.url, "GET", "/api/memory")

    assert fault(reply) == (*MEMORY[:3], 'The dashboard has it: add "memory" to dashboard.fill.')


async def test_dashboard_that_is_down_is_named() -> None:
    async with scripted_upstream(answering_by(HermesDashboard())) as gone:
        url = gone.url
    async with before(backends.hermes_gateway(), dashboard={"url": url}) as (_, sidecar):
        reply = await ask(sidecar.url, "GET", "/api/memory")

    assert fault(reply)[3] == "Start the dashboard (hermes dashboard): nothing that answers is at dashboard.url."


async def test_something_else_at_the_dashboards_address_is_named() -> None:
    async with with_dashboard(backends.single_page_app) as both:
        reply = await ask(both.url, "GET", "/api/memory")

    assert fault(reply)[3] == "dashboard.url answers, but not with the Hermes dashboard's page; correct dashboard.url."


async def test_dashboard_that_goes_away_is_named() -> None:
    async with with_dashboard(HermesDashboard()) as both:
        await both.dashboard.stop()
        reply = await ask(both.url, "GET", "/api/memory")

    status, code, message, hint = fault(reply)
    assert (status, code) == (502, "upstream_unreachable")
    assert message.startswith(f"The dashboard at {both.dashboard.url} could not be reached")
    assert ("dashboard.url" in hint, "gateway.url" in hint) == (True, False)


# The dashboard's token


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("GET", "/api/memory", b""), ("POST", "/api/config", b'{"a":1}'), ("POST", "/api/memory/x", b"x" * 5000)],
)
async def test_token_is_renewed_once_and_the_request_sent_again(method: str, path: str, body: bytes) -> None:
    dashboard = HermesDashboard()
    async with with_dashboard(dashboard) as both:
        dashboard.restart()
        replies = [await ask(both.url, method, path, body=body) for _ in range(2)]
        seen = [(r.target, r.values("x-hermes-session-token"), r.body) for r in both.asked_dashboard()]

    assert [reply.status for reply in replies] == [200, 200]
    target = path.encode()
    assert seen == [(target, [TOKEN], body), (target, [NEW_TOKEN], body), (target, [NEW_TOKEN], body)]
    assert TOKEN not in replies[0].body + replies[1].body


async def test_chunked_body_is_sent_again_as_well() -> None:
    dashboard = HermesDashboard()
    async with with_dashboard(dashboard) as both, raw_client(both.url) as client:
        dashboard.restart()
        head = b"POST /api/config HTTP/1.1\r\nHost: %b\r\nTransfer-Encoding: chunked\r\n\r\n" % client.host.encode()
        client.write(head + b"3\r\nabc\r\n0\r\n\r\n")
        reply = await client.answer()
        bodies = [request.body for request in both.asked_dashboard()]

    assert (reply.status, bodies) == (200, [b"abc", b"abc"])


async def test_many_clients_meet_a_new_dashboard_token_at_once() -> None:
    dashboard = HermesDashboard()
    async with with_dashboard(dashboard) as both:
        for _ in range(5):
            dashboard.restart(f"{dashboard.token}x")
            replies = await asyncio.gather(*(ask(both.url, "GET", "/api/memory") for _ in range(20)))
            assert [reply.status for reply in replies] == [200] * 20


@pytest.mark.parametrize(
    ("handed_out", "count"),
    [
        pytest.param("a-token-that-does-not-hold", 2, id="a-new-one"),
        pytest.param(TOKEN.decode(), 1, id="the-same-one"),
    ],
)
async def test_dashboard_that_refuses_what_its_page_hands_out_is_a_502(handed_out: str, count: int) -> None:
    """The client brought no token, so a 401 would look for the fault in the wrong place."""
    dashboard = HermesDashboard()
    async with with_dashboard(dashboard) as both:
        dashboard.restart()
        dashboard.handed_out = handed_out
        reply = await ask(both.url, "GET", "/api/memory")
        asked = len(both.asked_dashboard())

    assert fault(reply)[:3] == (
        502, "upstream_protocol_error", "The dashboard refuses the token that its own page hands out.",
    )  # fmt: skip
    assert asked == count


async def test_status_of_the_dashboard_other_than_401_passes() -> None:
    async with with_dashboard(HermesDashboard()) as both:
        reply = await ask(both.url, "GET", "/api/memory/no-such")

    assert (reply.status, reply.json()) == (404, {"detail": "No such API endpoint: /api/memory/no-such"})


async def test_neither_server_ever_sees_the_others_secret() -> None:
    """Case C7: the gateway's key at the gateway alone, the dashboard's token at the dashboard alone, neither shown."""
    dashboard = HermesDashboard()
    async with with_dashboard(dashboard, mount="/dashboard") as both:
        replies = [
            await ask(both.url, method, path, *fields, body=body)
            for method, path, body in (
                ("GET", "/capabilities", b""),
                ("POST", "/v1/chat/completions", b"{}"),
                ("GET", "/api/sessions", b""),
                ("GET", "/api/memory", b""),
                ("POST", "/api/config", b"{}"),
                ("GET", "/dashboard/api/status", b""),
                ("GET", "/sidecar/", b""),
            )
            for fields in ((), (b"Authorization: Bearer " + KEY.encode(),))
        ]
        dashboard.restart()
        replies.append(await ask(both.url, "GET", "/api/memory"))
        await refreshed(both.url)
        to_gateway = b"".join(bytes(connection.received) for connection in both.gateway.connections)
        to_dashboard = b"".join(bytes(connection.received) for connection in both.dashboard.connections)

    assert (TOKEN in to_gateway, NEW_TOKEN in to_gateway, KEY.encode() in to_gateway) == (False, False, True)
    assert (KEY.encode() in to_dashboard, NEW_TOKEN in to_dashboard) == (False, True)
    shown = b"".join(reply.body + b"".join(value for _, value in reply.fields) for reply in replies)
    assert (KEY.encode() in shown, TOKEN in shown, NEW_TOKEN in shown) == (False, False, False)


async def test_log_shows_no_token() -> None:
    dashboard = HermesDashboard()
    async with (
        scripted_upstream(answering_by(backends.hermes_gateway(KEY))) as first,
        scripted_upstream(answering_by(dashboard)) as second,
        running_sidecar(
            first.url, probes=True, probe=SELDOM, environ=ENVIRON, dashboard={"url": second.url}
        ) as sidecar,
    ):
        await refreshed(sidecar.url)
        dashboard.restart()
        await ask(sidecar.url, "GET", "/api/memory")
        await sidecar.ended_exchanges(2)
        log = json.dumps(sidecar.log, default=repr)

    assert [secret in log for secret in (KEY, TOKEN.decode(), NEW_TOKEN.decode())] == [False] * 3


# The whole dashboard below a prefix


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/dashboard", b"/"),
        ("/dashboard/", b"/"),
        ("/dashboard?x=1", b"/?x=1"),
        ("/dashboard/assets/index.js", b"/assets/index.js"),
        ("/dashboard/api/a%2Fb?q=%20", b"/api/a%2Fb?q=%20"),
    ],
)
async def test_mounted_dashboard_gets_the_rest_of_the_target(target: str, expected: bytes) -> None:
    async with with_dashboard(HermesDashboard(), mount="/dashboard") as both:
        reply = await ask(both.url, "GET", target, b"X-Hermes-Session-Token: mine")
        (request,) = both.asked_dashboard()

    assert request.target == expected
    assert request.values("x-forwarded-prefix") == [b"/dashboard"]
    assert request.values("x-hermes-session-token") == [b"mine"]
    assert request.values("host") == [both.dashboard.url.removeprefix("http://").encode()]
    assert request.values("authorization") == []
    assert reply.status in (200, 401)


async def test_path_that_only_begins_like_the_mount_is_the_gateways() -> None:
    async with with_dashboard(HermesDashboard(), mount="/dashboard") as both:
        await ask(both.url, "GET", "/dashboardx")

        assert (both.asked_dashboard(), [r.target for r in both.asked_gateway()]) == ([], [b"/dashboardx"])


async def test_websocket_of_the_mounted_dashboard() -> None:
    dashboard = HermesDashboard()

    async def socket(connection: Connection) -> None:
        connection.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        connection.write(b"hello " + await connection.exactly(4))

    def answerer(request: Received) -> Answer:
        return socket if request.target.startswith(b"/api/ws?") else dashboard(request)

    async with with_dashboard(answerer, mount="/dashboard") as both, raw_client(both.url) as client:
        upgrade = (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: x", b"Sec-WebSocket-Version: 13")
        client.write(client.request("GET", "/dashboard/api/ws?token=t", *upgrade))
        head = await client.head()
        client.write(b"ping")
        said = await client.exactly(10)

    assert (head.status, said) == (101, b"hello ping")
