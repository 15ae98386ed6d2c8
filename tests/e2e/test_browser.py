"""A real browser in front: what pages of other origins can do with the sidecar, and what an allowed one can."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from tests.support.browser import Browser, chromium
from tests.support.scripted_upstream import (
    LAST_CHUNK,
    STREAM_HEAD,
    Connection,
    ScriptedUpstream,
    chunk,
    ok,
)
from tests.support.sidecars import Sidecar, relayed

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

CHAT = "/v1/chat/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    async with chromium(
        tmp_path_factory.mktemp("profile"), {"evil.test": "127.0.0.1", "rebind.test": "127.0.0.1"}
    ) as running:
        yield running


class Site:
    """A web server with one page, which is the same at every path; a path that is asked for is remembered."""

    def __init__(self) -> None:
        self.port = 0
        self.page = "<!doctype html><title>a page</title>"
        self.seen = asyncio.Event()
        """Somebody has asked for /seen."""

    async def answer(self, request: web.Request) -> web.Response:
        if request.path == "/seen":
            self.seen.set()
        return web.Response(text=self.page, content_type="text/html")


@pytest_asyncio.fixture(loop_scope="module")
async def site() -> AsyncIterator[Site]:
    site = Site()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", site.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    site.port = runner.addresses[0][1]
    yield site
    await runner.cleanup()


ATTEMPTS = """
const body = '{"model":"m","messages":[{"role":"user","content":"run something"}]}';
const outcome = (promise) => promise.then(async (answer) => [answer.type, answer.status, await answer.text()])
    .catch((error) => error.name);
const fired = (thing, ...names) => new Promise((done) => {
    for (const name of names) thing.addEventListener(name, () => done(name));
});
const element = (tag, source, ...names) => {
    const made = document.createElement(tag);
    const happened = fired(made, ...names);
    made.src = source;
    document.body.append(made);
    return happened;
};
const form = (enctype) => {
    const frame = document.createElement('iframe');
    frame.name = 'frame-' + enctype;
    document.body.append(frame);
    const made = document.createElement('form');
    Object.assign(made, {method: 'POST', action: chat, target: frame.name, enctype});
    const field = document.createElement('input');
    Object.assign(field, {name: body, value: ''});
    made.append(field);
    document.body.append(made);
    const happened = fired(frame, 'load');
    made.submit();
    return happened;
};
const json = {'Content-Type': 'application/json'};
(async () => ({
    'fetch json': await outcome(fetch(chat, {method: 'POST', headers: json, body})),
    'fetch with token': await outcome(fetch(chat, {method: 'POST', headers: {Authorization: 'Bearer x'}, body})),
    'fetch text': await outcome(fetch(chat, {method: 'POST', body})),
    'fetch text unread': await outcome(fetch(chat, {method: 'POST', mode: 'no-cors', body})),
    'fetch form': await outcome(fetch(chat, {method: 'POST', body: new URLSearchParams({a: body})})),
    'fetch multipart unread': await outcome(fetch(chat, {method: 'POST', mode: 'no-cors', body: new FormData()})),
    'fetch without type': await outcome(fetch(chat, {method: 'POST', mode: 'no-cors', body: new Blob([body])})),
    'fetch to read': await outcome(fetch(chat)),
    'fetch own page': await outcome(fetch(sidecar + '/capabilities')),
    'fetch status page': await outcome(fetch(sidecar + '/sidecar/', {credentials: 'include'})),
    'delete': await outcome(fetch(sidecar + '/api/sessions/x', {method: 'DELETE'})),
    'beacon': navigator.sendBeacon(chat, body),
    'form urlencoded': await form('application/x-www-form-urlencoded'),
    'form text': await form('text/plain'),
    'form multipart': await form('multipart/form-data'),
    'event source': await fired(new EventSource(sidecar + '/capabilities/events'), 'open', 'error'),
    'websocket': await fired(new WebSocket(chat.replace('http', 'ws')), 'open', 'error'),
    'image': await element('img', chat, 'load', 'error'),
    'script': await element('script', chat, 'load', 'error'),
    'frame': await element('iframe', sidecar + '/sidecar/', 'load'),
    'read frames': Array.from(frames).map((frame) => {
        try { return frame.document.body.innerText } catch (error) { return error.name }
    }),
}))()
"""
NOTHING = {
    "fetch json": "TypeError",
    "fetch with token": "TypeError",
    "fetch text": "TypeError",
    "fetch text unread": ["opaque", 0, ""],
    "fetch form": "TypeError",
    "fetch multipart unread": ["opaque", 0, ""],
    "fetch without type": ["opaque", 0, ""],
    "fetch to read": "TypeError",
    "fetch own page": "TypeError",
    "fetch status page": "TypeError",
    "delete": "TypeError",
    "beacon": True,  # sent; that is all a page learns
    "form urlencoded": "load",
    "form text": "load",
    "form multipart": "load",
    "event source": "error",
    "websocket": "error",
    "image": "error",
    "script": "error",
    "frame": "load",
    "read frames": ["SecurityError"] * 4,
}


@pytest.mark.parametrize("name", ["evil.test", "localhost", "127.0.0.1"])
async def test_page_of_another_origin_can_neither_read_nor_post(browser: Browser, site: Site, name: str) -> None:
    """Each way that a page has of sending a request; the last two names are other programs on the same machine."""
    async with relayed(ok(), listen={"allowed_origins": ["http://localhost:1"]}) as (upstream, sidecar):
        async with browser.tab(f"http://{name}:{site.port}/") as tab:
            got = await tab.run(ATTEMPTS, {"sidecar": sidecar.url, "chat": sidecar.url + CHAT})
            await sidecar.ended_exchanges(18)

        assert got == NOTHING
        assert [request for request in upstream.requests if request.method != b"GET"] == []
        if name != "127.0.0.1":
            assert upstream.connections == []
            assert {exchange.get("code") for exchange in sidecar.exchanges} == {"origin_not_allowed"}


@asynccontextmanager
async def streaming_gateway(site: Site) -> AsyncIterator[tuple[ScriptedUpstream, Sidecar]]:
    """A gateway that says its second word when the page has read the first; the page's origin is allowed."""

    async def gateway(connection: Connection) -> None:
        while True:
            request = await connection.request(limit_s=30)
            if request.target == b"/v1/broken":
                connection.write(b"this is no HTTP\r\n\r\n")
            elif request.target != CHAT.encode():
                connection.write(ok(b"{}", b"Access-Control-Allow-Origin: *"))
            else:
                (session,) = request.values("x-hermes-session-id")
                head = (
                    STREAM_HEAD[:-2]
                    + b"X-Hermes-Session-Id: "
                    + session
                    + b"\r\nAccess-Control-Allow-Origin: *\r\n\r\n"
                )
                connection.write(head + chunk(b"data: one\n\n"))
                async with asyncio.timeout(10):
                    await site.seen.wait()
                connection.write(chunk(b"data: two\n\n") + LAST_CHUNK)

    async with relayed(gateway, listen={"allowed_origins": [f"http://localhost:{site.port}"]}) as both:
        yield both


CONVERSATION = """
(async () => {
    const answer = await fetch(chat, {
        method: 'POST',
        headers: {
            'Content-Type': 'application/json',
            'Authorization': 'Bearer its-own',
            'X-Hermes-Session-Key': 'chat-7',
            'Idempotency-Key': 'once',
            'X-Stainless-OS': 'Linux',
            'X-Stainless-Retry-Count': '0',
        },
        body: '{"stream":true}',
    });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    const pieces = [];
    for (let piece; !(piece = await reader.read()).done;) {
        pieces.push(piece.value);
        if (pieces.length === 1) await fetch('/seen');
    }
    const header = (name) => answer.headers.get(name);
    return {
        status: answer.status,
        pieces,
        id: header('X-Hermes-Session-Id'),
        key: header('X-Hermes-Session-Key'),
        source: header('X-Hermes-Sidecar-Session'),
        hasRequestId: !!header('X-Request-Id'),
    };
})()
"""


async def test_allowed_page_chats_with_streaming_and_reads_the_session_headers(browser: Browser, site: Site) -> None:
    async with streaming_gateway(site) as (upstream, sidecar):
        async with browser.tab(f"http://localhost:{site.port}/") as tab:
            got = await tab.run(CONVERSATION, {"chat": sidecar.url + CHAT})

        assert got == {
            "status": 200,
            "pieces": ["data: one\n\n", "data: two\n\n"],
            "id": "chat-7",
            "key": "chat-7",
            "source": "header:x-hermes-session-key",
            "hasRequestId": True,
        }
        request = upstream.only_request
        assert request.values("authorization") == [b"Bearer its-own"]
        assert request.values("x-stainless-os") == [b"Linux"]
        assert "origin" not in {name.decode() for name in request.names}


async def test_allowed_page_reads_why_something_went_wrong(browser: Browser, site: Site) -> None:
    script = """
    (async () => {
        const answer = await fetch(url, {headers: {'X-Hermes-Session-Key': 'chat-7'}});
        return [answer.status, answer.headers.get('X-Hermes-Sidecar-Error'), (await answer.json()).error.code];
    })()
    """
    async with streaming_gateway(site) as (_, sidecar), browser.tab(f"http://localhost:{site.port}/") as tab:
        got = await tab.run(script, {"url": sidecar.url + "/v1/broken"})

        assert got == [502, "upstream_protocol_error", "upstream_protocol_error"]


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE"])
async def test_allowed_page_uses_every_method(browser: Browser, site: Site, method: str) -> None:
    script = "fetch(url, {method, headers: {Authorization: 'Bearer x'}}).then((answer) => answer.status)"
    async with streaming_gateway(site) as (upstream, sidecar), browser.tab(f"http://localhost:{site.port}/") as tab:
        status = await tab.run(script, {"url": sidecar.url + "/api/sessions/x", "method": method})

        assert status == 200
        assert upstream.only_request.method == method.encode()


async def test_rebound_name_is_refused_although_the_page_is_of_the_same_origin(browser: Browser) -> None:
    """The attack: a page's name is made to point at this machine. For the browser it then talks to its own server."""
    script = """
    (async () => {
        const read = async (...request) => {
            const answer = await fetch(...request);
            return [answer.status, answer.headers.get('X-Hermes-Sidecar-Error')];
        };
        return [
            location.hostname,
            await read('/v1/models'),
            await read(chat, {method: 'POST', headers: {'Content-Type': 'application/json'}, body: '{}'}),
            await read('/capabilities'),
            await read('/healthz'),
        ];
    })()
    """
    async with relayed(ok()) as (upstream, sidecar):
        async with browser.tab(f"http://rebind.test:{sidecar.port}/") as tab:
            shown = await tab.text()
            got = await tab.run(script, {"chat": CHAT})

        refused = [421, "host_not_allowed"]
        assert got == ["rebind.test", refused, refused, refused, refused]
        assert "host_not_allowed" in shown
        assert upstream.connections == []


async def test_person_may_follow_a_foreign_link_to_the_status_page_and_nowhere_else(
    browser: Browser, site: Site
) -> None:
    async with relayed(ok()) as (upstream, sidecar):
        site.page = "".join(
            f'<a id="{name}" href="{sidecar.url}{path}">a link</a>'
            for name, path in (("status", "/sidecar/"), ("models", "/v1/models"), ("own", "/capabilities"))
        )
        shown: dict[str, Any] = {}
        for link in ("status", "models", "own"):
            async with browser.tab(f"http://evil.test:{site.port}/") as tab:
                await tab.click(f"#{link}")
                shown[link] = await tab.run("[location.pathname, document.title, document.body.innerText]")
        seen_before_typing = len(upstream.requests)
        async with browser.tab(f"{sidecar.url}/v1/models") as tab:
            typed = await tab.text()

        assert shown["status"][0] == "/sidecar/"
        assert "hermes-sidecar" in shown["status"][1]
        assert "Connected" in shown["status"][2]
        assert [("origin_not_allowed" in shown[link][2]) for link in ("models", "own")] == [True, True]
        assert typed == '{"ok":true}'
        # A browser asks for an icon by itself, and here it does so for the pages that the sidecar has shown.
        assert {request.target for request in upstream.requests[:seen_before_typing]} <= {b"/favicon.ico"}
