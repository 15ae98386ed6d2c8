"""What the sidecar finds out about backends: one table of them, scripted in bytes, and every trap for a prober."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import pytest

from tests.support import backends
from tests.support.backends import CHAT, HERMES, Answer, Answerer, answering_by, as_json, by_path
from tests.support.capabilities import count_probes, in_short, known, refreshed
from tests.support.raw_client import ask
from tests.support.scripted_upstream import Connection, Received, ScriptedUpstream, chunk, ok, scripted_upstream
from tests.support.sidecars import running_sidecar

KEY = "gateway-Key-0123456789"
ENVIRON = {"HERMES_SIDECAR_GATEWAY__TOKEN": KEY}
PORTABLE = "Connected in portable mode. Chat works; advanced workspace tools are unavailable."
QUICK = {"timeout_s": 0.3, "retry_s": 60.0, "interval_s": 60.0}


async def probed(
    answerer: Answerer, *, prefix: str = "", has_key: bool = False, **sections: dict[str, Any]
) -> tuple[dict[str, Any], ScriptedUpstream]:
    """The sidecar's document for a backend, and the backend with what it was asked."""
    async with (
        scripted_upstream(answering_by(answerer)) as upstream,
        running_sidecar(
            "", environ=ENVIRON if has_key else {}, probes=True, gateway={"url": upstream.url + prefix}, **sections
        ) as sidecar,
    ):
        document = await refreshed(sidecar.url)
        assert await known(sidecar.url) == document
    return document, upstream


# The table: health, chat, models, streaming, images; then sessions, skills, memory, config, jobs


@pytest.mark.parametrize(
    ("answerer", "prefix", "status", "signs", "kind", "version"),
    [
        pytest.param(backends.hermes_gateway(), "", "partial", "++++? ++--+", "hermes-agent", "0.19.0", id="hermes"),
        pytest.param(
            backends.hermes_gateway("k"), "", "connected", "++??? ??--?", "hermes-agent", "0.19.0", id="hermes-no-key"
        ),
        pytest.param(
            backends.HermesDashboard(),
            "", "disconnected", "?-??? ?????", "hermes-dashboard", "0.19.0", id="dashboard-as-gateway",
        ),
        pytest.param(backends.OLLAMA, "", "connected", "+++?? -----", "ollama", "0.14.2", id="ollama"),
        pytest.param(
            backends.llama_cpp("text", "image"), "", "connected", "+++?+ -----", "llama.cpp", None, id="llama.cpp-image"
        ),
        pytest.param(
            backends.llama_cpp("text"), "", "connected", "+++?- -----", "llama.cpp", None, id="llama.cpp-text"
        ),
        pytest.param(
            backends.llama_cpp(vision=True), "", "connected", "+++?+ -----", "llama.cpp", None, id="llama.cpp-props"
        ),
        pytest.param(backends.llama_cpp(), "", "connected", "+++?? -----", "llama.cpp", None, id="llama.cpp-old"),
        pytest.param(backends.VLLM, "", "connected", "+++?? -----", "vllm", "0.21.0", id="vllm"),
        pytest.param(backends.SGLANG, "", "connected", "+++?? -----", "sglang", None, id="sglang"),
        pytest.param(
            backends.lm_studio("llm", "vlm"), "", "connected", "+++?+ -----", "lm-studio", None, id="lm-studio-vlm"
        ),
        pytest.param(backends.lm_studio("llm"), "", "connected", "+++?- -----", "lm-studio", None, id="lm-studio-llm"),
        pytest.param(backends.LITELLM, "", "connected", "+++?+ -----", "litellm", None, id="litellm"),
        pytest.param(
            backends.OPENROUTER, "/api/v1", "connected", "+++?+ -----", "openrouter", None, id="openrouter-long-list"
        ),
        pytest.param(backends.WITHOUT_MODELS, "", "connected", "-+-?? -----", "generic", None, id="without-models"),
        pytest.param(backends.single_page_app, "", "disconnected", "?-??? ?????", "generic", None, id="spa"),
        pytest.param(backends.locked, "", "disconnected", "????? ?????", "generic", None, id="401-everywhere"),
        pytest.param(backends.redirecting, "", "disconnected", "????? ?????", "generic", None, id="redirects"),
        pytest.param(backends.echoing, "", "disconnected", "??-?? -----", "generic", None, id="echo"),
    ],
)  # fmt: skip
async def test_backend(
    answerer: Answerer, prefix: str, status: str, signs: str, kind: str, version: str | None
) -> None:
    document, upstream = await probed(answerer, prefix=prefix)

    gateway = document["gateway"]
    assert (document["status"], in_short(document), gateway["kind"], gateway["version"], gateway["reachable"]) == (
        status, signs, kind, version, True,
    )  # fmt: skip
    assert document["mode"] == {"partial": "enhanced", "connected": "portable"}.get(status, "disconnected")
    for request in upstream.requests:
        assert (request.method, request.body, request.is_probe) == (b"GET", b"", True)
        assert request.names == {b"host", b"accept", b"user-agent"}
        assert request.target not in (b"/health_generate", b"/login")
        assert request.target.startswith(prefix.removesuffix("/v1").encode() + b"/")


@pytest.mark.parametrize(
    ("answerer", "message"),
    [
        pytest.param(backends.OLLAMA, PORTABLE, id="portable"),
        pytest.param(
            backends.hermes_gateway(), "Chat works; memory and config are not available on this backend.", id="partial"
        ),
        pytest.param(
            backends.hermes_gateway("k"),
            "Connected in portable mode. Chat works; the backend asks for a key before it shows session history, skills"
            " and scheduled jobs.",
            id="without-key",
        ),
        pytest.param(
            backends.HermesDashboard(),
            "A web page answers at gateway.url: that is the Hermes dashboard, not the gateway. Point gateway.url to the"
            " gateway's port (8642), and dashboard.url to this one.",
            id="dashboard-as-gateway",
        ),
        pytest.param(
            backends.single_page_app,
            "A web page answers every path at gateway.url; it is probably the port of a dashboard or another site.",
            id="spa",
        ),
        pytest.param(
            backends.locked,
            "The backend refuses everything without a key. Give the sidecar the key (gateway.token_file).",
            id="401-everywhere",
        ),
        pytest.param(
            backends.redirecting,
            "The backend sends every path elsewhere (a redirect). Correct gateway.url.",
            id="redirects",
        ),
        pytest.param(
            by_path({}),
            "Something answers at gateway.url, but chat is not there: there is no such route.",
            id="404-everywhere",
        ),
    ],
)
async def test_sentence_and_readiness(answerer: Answerer, message: str) -> None:
    async with (
        scripted_upstream(answering_by(answerer)) as upstream,
        running_sidecar(upstream.url, probes=True) as sidecar,
    ):
        document = await refreshed(sidecar.url)
        ready = await ask(sidecar.url, "GET", "/readyz")

    assert document["message"] == message
    is_ready = document["status"] != "disconnected"
    assert (ready.status, ready.json()["reason"]) == (200 if is_ready else 503, message)


@pytest.mark.parametrize(
    ("answerer", "never"),
    [
        pytest.param(backends.LITELLM, b"/health", id="litellm-calls-every-model"),
        pytest.param(backends.SGLANG, b"/health", id="sglang-generates-a-token"),
        pytest.param(backends.LITELLM, b"/v1/skills", id="litellm-asks-its-providers"),
    ],
)
async def test_what_may_cost_something_is_never_asked(answerer: Answerer, never: bytes) -> None:
    _, upstream = await probed(answerer)

    targets = [request.target for request in upstream.requests]
    assert targets
    assert never not in targets


async def test_each_detail_says_what_was_asked_and_what_came() -> None:
    """Case C6: for each family what was asked, which status came, when, on what evidence, what would unlock it."""
    before = time.time()
    document, _ = await probed(backends.hermes_gateway())

    details = document["details"]
    assert {name: (d["path"], d["httpStatus"], d["evidence"]) for name, d in details.items()} == {
        "health": ("/health", 200, "probe"),
        "chatCompletions": (CHAT, 405, "declared"),
        "models": ("/v1/models", 200, "probe"),
        "streaming": ("/v1/capabilities", 200, "declared"),
        "images": (None, None, "none"),
        "sessions": ("/api/sessions", 200, "probe"),
        "skills": ("/v1/skills", 200, "probe"),
        "memory": ("/api/memory", 404, "probe"),
        "config": ("/api/config", 404, "probe"),
        "jobs": ("/api/jobs", 200, "probe"),
    }
    assert {name for name, d in details.items() if d["unlock"]} == {"memory", "config"}
    assert details["memory"]["unlock"] == "Start the dashboard (hermes dashboard) and set dashboard.url."
    assert time.strftime("%Y-%m-%dT%H:%M", time.gmtime(before)) <= details["sessions"]["checkedAt"]


async def test_key_of_the_gateway_opens_what_is_locked() -> None:
    document, upstream = await probed(backends.hermes_gateway(KEY), has_key=True)

    assert in_short(document) == "++++? ++--+"
    assert {tuple(request.values("authorization")) for request in upstream.requests} == {(b"Bearer " + KEY.encode(),)}
    assert KEY not in json.dumps(document)


async def test_wrong_key_is_told_as_such() -> None:
    document, _ = await probed(backends.hermes_gateway("another-Key"), has_key=True)

    assert document["details"]["sessions"]["httpStatus"] == 401
    assert document["details"]["sessions"]["unlock"] == (
        "The gateway refuses the key that the sidecar has; put the right one into gateway.token_file."
    )


# Public status, private data (C5)


async def test_families_that_ask_for_a_key_are_neither_there_nor_missing() -> None:
    routes: dict[str, Answer] = {"/health": as_json({"status": "ok"}), CHAT: backends.NO_GET}
    families = ("sessions", "skills", "memory", "config", "jobs")
    routes |= {f"/api/{family}": backends.UNAUTHORIZED for family in families}
    async with (
        scripted_upstream(answering_by(by_path(routes, backends.NOT_FOUND))) as upstream,
        running_sidecar(upstream.url, probes=True) as sidecar,
    ):
        document = await refreshed(sidecar.url)
        answers = [await ask(sidecar.url, "GET", f"/api/{family}") for family in families]

    assert in_short(document) == "++-?? ?????"
    assert (document["status"], document["mode"]) == ("connected", "portable")
    for family in families:
        detail = document["details"][family]
        assert (detail["httpStatus"], "authentication" in detail["reason"]) == (401, True)
    assert [(answer.status, answer.body) for answer in answers] == [
        (401, backends.UNAUTHORIZED.partition(b"\r\n\r\n")[2])
    ] * 5


# The chat route (C2)


@pytest.mark.parametrize(
    ("answer", "is_usable"),
    [
        pytest.param(backends.NO_GET, True, id="405-allow-post"),
        pytest.param(as_json({}, b"400 Bad Request"), True, id="400"),
        pytest.param(as_json({}, b"422 Unprocessable Content"), True, id="422"),
        pytest.param(backends.UNAUTHORIZED, True, id="401"),
        pytest.param(as_json({}, b"500 Internal Server Error"), None, id="500"),
        pytest.param(backends.NOT_FOUND, False, id="404"),
    ],
)
async def test_get_on_the_chat_route_shows_whether_chat_is_there(answer: bytes, is_usable: bool | None) -> None:
    document, _ = await probed(by_path({CHAT: answer}, backends.NOT_FOUND))

    assert document["coreCapabilities"]["chatCompletions"] is is_usable


# Answers of the wrong shape or size (C4)


async def endless(connection: Connection) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    await connection.send(head + chunk(b'{"data":['))
    while True:
        await connection.send(chunk(b'{"id":"x"},' * 1000))


async def endless_spaces(connection: Connection) -> None:
    await connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        await connection.send(chunk(b" " * 10_000))


async def fifty_megabytes(connection: Connection) -> None:
    size = 50 * 1024 * 1024
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n[1" % size
    await connection.send(head)
    for _ in range(size // 10_000):
        await connection.send(b",1" * 5_000)


async def silence(connection: Connection) -> None:
    await connection.ended(limit_s=60)


async def half_a_head(connection: Connection) -> None:
    connection.write(b"HTTP/1.1 200 OK\r\nContent-")
    connection.close()


async def half_a_body(connection: Connection) -> None:
    connection.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n[1,")
    connection.close()


async def trickle(connection: Connection) -> None:
    await connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n[")
    while True:
        await asyncio.sleep(0.02)  # a server that is slow on purpose
        await connection.send(b" ")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(ok(b"[]"), True, id="list"),
        pytest.param(ok(b'{"data":[]}'), True, id="data"),
        pytest.param(ok(b'{"items":[]}'), True, id="items"),
        pytest.param(ok(b"null"), None, id="null"),
        pytest.param(ok(b'{"error":"x"}'), None, id="error"),
        pytest.param(ok(b'{"data":'), None, id="invalid"),
        pytest.param(ok(b"\xff\xfe\x00"), None, id="no-text"),
        pytest.param(ok(b""), None, id="empty"),
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", None, id="204"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", None, id="two-lengths"),
        pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n", None, id="no-http"),
        pytest.param(backends.PAGE, None, id="page"),
        pytest.param(endless, True, id="endless-list"),
        pytest.param(endless_spaces, None, id="endless-spaces"),
        pytest.param(fifty_megabytes, True, id="50-mb"),
        pytest.param(silence, None, id="silence"),
        pytest.param(trickle, None, id="trickle"),
        pytest.param(half_a_head, None, id="half-a-head"),
        pytest.param(half_a_body, None, id="half-a-body"),
    ],
)
async def test_answer_for_one_family(answer: Answer, expected: bool | None) -> None:
    """A bounded number of bytes is read, the connection is left at once, and the rest is found as ever."""
    began = time.monotonic()
    document, upstream = await probed(backends.hermes_gateway(routes=HERMES | {"/api/jobs": answer}), probe=QUICK)
    took_s = time.monotonic() - began

    signs = {True: "+", False: "-", None: "?"}
    assert in_short(document) == f"++++? ++--{signs[expected]}"
    assert took_s < 2
    assert sum(request.target == b"/api/jobs" for request in upstream.requests) == count_probes(upstream.requests)


@pytest.mark.parametrize("answer", [pytest.param(endless, id="endless"), pytest.param(silence, id="silence")])
async def test_answers_that_never_end_for_everything(answer: Answer) -> None:
    began = time.monotonic()
    document, _ = await probed(lambda _: answer, probe=QUICK)

    assert document["status"] == "disconnected"
    assert time.monotonic() - began < 4


# No answer at all


async def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    async with running_sidecar(url, probes=True) as sidecar:
        document = await refreshed(sidecar.url)

    assert (document["status"], document["gateway"]["reachable"], in_short(document)) == (
        "disconnected", False, "--??? ?????",
    )  # fmt: skip
    assert document["message"] == (
        f"The gateway at {url} could not be reached: nothing listens there (connection refused)."
    )
    assert document["details"]["memory"]["unlock"] == "Start the gateway (hermes gateway run), or correct gateway.url."


async def closes(connection: Connection) -> None:
    connection.close()


async def resets(connection: Connection) -> None:
    connection.reset()


@pytest.mark.parametrize(
    ("answer", "reachable", "why"),
    [
        pytest.param(closes, True, "it closed the connection without an answer", id="closed"),
        pytest.param(resets, True, "it reset the connection before it answered", id="reset"),
        pytest.param(silence, False, "no answer within 0.3 s", id="silent"),
        pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n", True, "", id="no-http"),
    ],
)
async def test_gateway_that_takes_the_connection_and_gives_no_answer(answer: Answer, reachable: bool, why: str) -> None:
    document, _ = await probed(lambda _: answer, probe=QUICK)

    assert (document["status"], document["gateway"]["reachable"], in_short(document)) == (
        "disconnected", reachable, "--??? ?????",
    )  # fmt: skip
    assert document["message"].startswith("The gateway does not answer: ")
    assert why in document["message"]


# Where probes go, and what they leave


@pytest.mark.parametrize("spelling", ["", "/", "/v1", "/v1/"])
async def test_probe_and_chat_go_to_the_same_place(spelling: str) -> None:
    """Cases C11 and C12: one way of joining addresses."""
    async with (
        scripted_upstream(answering_by(backends.hermes_gateway())) as upstream,
        running_sidecar("", probes=True, gateway={"url": upstream.url + "/base" + spelling}) as sidecar,
    ):
        await refreshed(sidecar.url)
        await ask(sidecar.url, "POST", CHAT, body=b"{}")

    chats = [request for request in upstream.requests if request.target.endswith(b"/chat/completions")]
    assert {request.target for request in chats} == {b"/base/v1/chat/completions"}
    assert {request.is_probe for request in chats} == {True, False}


async def test_probe_leaves_no_connection_behind() -> None:
    async with (
        scripted_upstream(answering_by(backends.hermes_gateway())) as upstream,
        running_sidecar(upstream.url, probes=True, probe=QUICK) as sidecar,
    ):
        await refreshed(sidecar.url)
        for connection in upstream.connections:
            await connection.ended()

    assert upstream.connections


async def test_probe_sends_nothing_of_the_clients() -> None:
    """No credential, no cookie, no session header of a client, and no cookie that the backend set."""
    routes = {path: _with_cookie(answer) for path, answer in HERMES.items()}
    async with (
        scripted_upstream(answering_by(backends.hermes_gateway(routes=routes))) as upstream,
        running_sidecar(upstream.url, probes=True, probe=QUICK) as sidecar,
    ):
        mine = (b"Authorization: Bearer mine", b"Cookie: a=b", b"X-Hermes-Session-Key: k")
        await ask(sidecar.url, "POST", "/capabilities/refresh", *mine)
        await ask(sidecar.url, "GET", "/capabilities", *mine)
        await ask(sidecar.url, "GET", "/v1/models", *mine)
        await refreshed(sidecar.url)

    probes = [request for request in upstream.requests if request.is_probe]
    assert {frozenset(request.names) for request in probes} == {frozenset((b"host", b"accept", b"user-agent"))}


def _with_cookie(answer: Answer) -> Answer:
    assert isinstance(answer, bytes)
    return answer.replace(b"\r\n", b"\r\nSet-Cookie: tracked=1\r\n", 1)


async def test_redirect_is_not_followed() -> None:
    _, upstream = await probed(backends.redirecting)

    assert [request.target for request in upstream.requests if b"login" in request.target] == []


async def test_request_that_a_kept_connection_swallowed_is_asked_again() -> None:
    """A backend that answers once on a connection, without saying so: the probes are none the worse for it."""

    async def once(connection: Connection) -> None:
        request: Received = await connection.request()
        answer = backends.hermes_gateway()(request)
        assert isinstance(answer, bytes)
        connection.write(answer)
        await connection.head()
        connection.close()

    async with scripted_upstream(once) as upstream, running_sidecar(upstream.url, probes=True) as sidecar:
        document = await refreshed(sidecar.url)

    assert in_short(document) == "++++? ++--+"


async def test_log_tells_the_status_and_no_secret() -> None:
    async with (
        scripted_upstream(answering_by(backends.hermes_gateway(KEY))) as upstream,
        running_sidecar(upstream.url, probes=True, environ=ENVIRON) as sidecar,
    ):
        await refreshed(sidecar.url)

    assert KEY not in json.dumps(sidecar.log, default=repr)
