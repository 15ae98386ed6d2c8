"""The status page in a real browser: every state, both sizes, both colour schemes, and what a person can do there."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from sidecar.demo.gateway import DemoGateway
from tests.support.backends import (
    HERMES,
    LIST,
    OLLAMA,
    Answer,
    Answerer,
    answering_by,
    as_json,
    as_text,
    hermes_gateway,
)
from tests.support.browser import Browser, Tab, chromium
from tests.support.npm import npm_package
from tests.support.raw_client import JSON, STREAMED_CHAT, ask, raw_client
from tests.support.scripted_upstream import STREAM_HEAD, Connection, Received, scripted_upstream
from tests.support.sidecars import Sidecar, running_sidecar

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

AXE = ("axe-core", "4.14.1")
PAGE = "/sidecar/"
QUICK = {"interval_s": 600.0, "retry_s": 0.2, "timeout_s": 2.0}
NOWHERE = "http://127.0.0.1:1"
EVERYTHING = hermes_gateway(
    routes={
        **HERMES,
        "/api/memory": as_json({"providers": []}),
        "/api/config": as_json({"model": "m"}),
        "/api/skills": LIST,
    }
)
WORD = "document.querySelector('.word').textContent"
SENTENCE = "document.querySelector('.sentence').textContent"
IS_LIVE = "document.getElementById('live').dataset.state === 'on'"
VERDICT = "document.getElementById('verdict')"
SIZES = [pytest.param(1280, id="1280px"), pytest.param(360, id="360px")]
SCHEMES = [pytest.param(False, id="light"), pytest.param(True, id="dark")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    async with chromium(tmp_path_factory.mktemp("profile"), {}) as running:
        yield running


@asynccontextmanager
async def demo_gateway(port: int = 0, *, key: str | None = None) -> AsyncIterator[DemoGateway]:
    gateway = await DemoGateway.start(port, key=key)
    try:
        yield gateway
    finally:
        await gateway.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def demo() -> AsyncIterator[DemoGateway]:
    async with demo_gateway() as gateway:
        yield gateway


@asynccontextmanager
async def status_page(
    browser: Browser, sidecar: Sidecar, *, width: int = 1280, is_dark: bool = False, scripts: bool = True
) -> AsyncIterator[Tab]:
    """The page, live unless scripts are off. At its end nobody else was asked for anything, and nothing has failed."""
    async with browser.tab("about:blank") as tab:
        await tab.watch()
        await tab.look_through(width=width, is_dark=is_dark)
        if not scripts:
            await tab.switch_scripts_off()
        await tab.open(sidecar.url + PAGE)
        if scripts:
            await tab.shows(IS_LIVE)
        yield tab
        foreign = [url for url in tab.requests if urlsplit(url).netloc != urlsplit(sidecar.url).netloc]
        assert foreign == []
        assert tab.complaints == []


@asynccontextmanager
async def before(answerer: Answerer) -> AsyncIterator[Sidecar]:
    """A sidecar that has probed a backend which answers so."""
    async with (
        scripted_upstream(answering_by(answerer)) as upstream,
        running_sidecar(upstream.url, probes=True, probe=QUICK) as sidecar,
    ):
        await ask(sidecar.url, "POST", "/capabilities/refresh")
        yield sidecar


async def has_no_sideways_scroll(tab: Tab) -> bool:
    return bool(await tab.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


async def accessibility_faults(tab: Tab) -> list[str]:
    """What axe-core finds serious or critical, with everything unfolded."""
    await tab.run(
        "for (const one of document.querySelectorAll('details')) { one.removeAttribute('name'); one.open = true }"
    )
    await tab.run((npm_package(*AXE) / "axe.min.js").read_text("utf-8") + "; true")
    found = await tab.run(
        "axe.run(document, {resultTypes: ['violations']}).then((result) => JSON.stringify(result.violations))"
    )
    return [
        f"{fault['id']}: {node['html']} {node.get('failureSummary')}"
        for fault in json.loads(found)
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]


# The states


@pytest.mark.parametrize("is_dark", SCHEMES)
@pytest.mark.parametrize("width", SIZES)
@pytest.mark.parametrize(
    ("answerer", "word", "sentence"),
    [
        pytest.param(None, "Disconnected", "", id="disconnected"),
        pytest.param(OLLAMA, "Connected", "Connected in portable mode. Chat works;", id="portable"),
        pytest.param(hermes_gateway(), "Partial", "Chat works; memory and config are not available", id="partial"),
        pytest.param(EVERYTHING, "Enhanced", "Connected with everything", id="enhanced"),
    ],
)
async def test_state(
    browser: Browser, answerer: Answerer | None, word: str, sentence: str, width: int, is_dark: bool
) -> None:
    running = before(answerer) if answerer else running_sidecar(NOWHERE, probes=True, probe={**QUICK, "retry_s": 60.0})
    async with running as sidecar:
        await ask(sidecar.url, "POST", "/capabilities/refresh")
        async with status_page(browser, sidecar, width=width, is_dark=is_dark) as tab:
            assert await tab.run(WORD) == word
            assert str(await tab.run(SENTENCE)).startswith(sentence)
            assert await tab.run("document.title") == f"{word} · hermes-sidecar"
            sign = f"document.querySelector('.sign .if-{word.lower()}')"
            assert await tab.run(f"getComputedStyle({sign}).display") == "inline"
            assert await has_no_sideways_scroll(tab)
            assert await accessibility_faults(tab) == []
            assert await has_no_sideways_scroll(tab)


async def test_draining_is_told_while_the_page_is_open(browser: Browser) -> None:
    async def endless(connection: Connection) -> None:
        connection.write(STREAM_HEAD)
        await connection.ended(limit_s=60)

    def answer(request: Received) -> Answer:
        return endless if request.method == b"POST" else hermes_gateway()(request)

    async with before(answer) as sidecar, raw_client(sidecar.url) as client:
        client.write(client.request("POST", "/v1/chat/completions", JSON, body=STREAMED_CHAT))
        await client.head()
        async with status_page(browser, sidecar) as tab:
            assert await tab.shows(f"{WORD} === 'Partial'")
            draining = asyncio.ensure_future(sidecar.running.drain(30.0))

            assert await tab.shows(f"{WORD} === 'Draining'")
            assert "shutting down" in str(await tab.run(SENTENCE))
            assert await tab.run("document.querySelector('.figure').textContent") == "1"
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)


async def test_gateway_goes_and_comes_while_the_page_is_open(browser: Browser) -> None:
    unlock = "document.querySelector('[data-name=chatCompletions] .unlock').checkVisibility()"
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(demo_gateway())
        sidecar = await stack.enter_async_context(running_sidecar(gateway.url, probes=True, probe=QUICK))
        await ask(sidecar.url, "POST", "/capabilities/refresh")
        tab = await stack.enter_async_context(status_page(browser, sidecar))
        assert await tab.run(WORD) == "Partial"
        await tab.run("window.here = true")

        await gateway.stop()
        await tab.run("document.getElementById('probe').click()")
        assert await tab.shows(f"{WORD} === 'Disconnected'")
        assert await tab.shows(unlock)
        assert "Start the gateway" in await tab.text()

        async with demo_gateway(urlsplit(gateway.url).port or 0):
            assert await tab.shows(f"{WORD} === 'Partial'")
            assert await tab.shows(f"!{unlock}")
            assert await tab.run("window.here"), "the page was never loaded again"


async def test_lost_sidecar_is_said_and_found_again(browser: Browser, demo: DemoGateway) -> None:
    async with browser.tab("about:blank") as tab:
        async with running_sidecar(demo.url, probes=True) as first:
            await ask(first.url, "POST", "/capabilities/refresh")
            port = first.port
            await tab.open(first.url + PAGE)
            await tab.shows(IS_LIVE)

        assert await tab.shows(f"{WORD} === 'No contact'")
        assert "tries again" in str(await tab.run(SENTENCE))
        assert "connecting again" in str(await tab.run("document.getElementById('live').textContent"))
        assert await tab.run("document.documentElement.dataset.status") == "lost"
        assert await accessibility_faults(tab) == []

        async with running_sidecar(demo.url, probes=True, listen={"port": port}):
            assert await tab.shows(f"{WORD} === 'Partial'")
            assert await tab.shows(IS_LIVE)


async def test_backends_own_words_become_no_elements(browser: Browser) -> None:
    hostile = "</span><img src=x onerror=alert(1)><script>alert(2)</script>"
    delta = json.dumps({"choices": [{"delta": {"content": hostile}}]})
    stream = as_text(f"data: {delta}\n\ndata: [DONE]\n\n".encode(), b"text/event-stream")
    answers = iter([stream, as_json({"error": {"message": hostile}}, b"400 Bad Request")])

    def answer(request: Received) -> Answer:
        return next(answers) if request.method == b"POST" else hermes_gateway()(request)

    async with before(answer) as sidecar, browser.tab(sidecar.url + PAGE) as tab:
        await tab.shows(IS_LIVE)
        await tab.run("document.getElementById('try-send').click()")
        assert await tab.shows(f"{VERDICT}.dataset.good") == "false"

        assert await tab.run("document.querySelector('.answer-text').textContent") == hostile
        assert hostile in str(await tab.run(f"{VERDICT}.textContent"))
        assert await tab.run("[document.images.length, document.scripts.length]") == [0, 1]


# Without scripts


@pytest.mark.parametrize("width", SIZES)
async def test_page_without_scripts(browser: Browser, width: int) -> None:
    async with (
        before(hermes_gateway()) as sidecar,
        status_page(browser, sidecar, width=width, scripts=False) as tab,
    ):
        text = await tab.text()

        assert "Partial" in text
        assert "Chat works; memory and config are not available on this backend." in text
        assert "JavaScript is off" in text
        assert "The try-it box needs JavaScript" in text
        assert "Send two turns" not in text
        assert await has_no_sideways_scroll(tab)

        await tab.click("#probe")
        assert await tab.run("location.pathname") == PAGE
        assert "Partial" in await tab.text()


# What a person can do


async def test_two_turns_come_word_by_word_and_land_in_one_session(browser: Browser, demo: DemoGateway) -> None:
    async with running_sidecar(demo.url, probes=True) as sidecar:
        await ask(sidecar.url, "POST", "/capabilities/refresh")
        async with status_page(browser, sidecar) as tab:
            await tab.run(
                """window.seen = [];
                new MutationObserver(() => {
                    const now = document.querySelector('.answer-text')?.textContent;
                    if (now && now !== seen.at(-1)) seen.push(now);
                }).observe(document.getElementById('turns'), {subtree: true, childList: true, characterData: true});
                document.getElementById('try-send').click()"""
            )

            assert await tab.shows(f"{VERDICT}.dataset.good") == "true"
            assert "both turns landed in one session" in str(await tab.run(f"{VERDICT}.textContent"))
            seen = await tab.run("window.seen")
            assert len(seen) > 5
            assert all(later.startswith(earlier) for earlier, later in pairwise(seen))
            told = await tab.run(
                "['key', 'first', 'second', 'source'].map((it) => document.getElementById('told-' + it).textContent)"
            )
            key = told[0]
            assert told == [key, key, key, "header:x-hermes-session-key"]
            messages = (await ask(sidecar.url, "GET", f"/api/sessions/{key}/messages")).json()["data"]
            assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
            # The table and the figures know of it without a reload.
            assert await tab.shows("document.querySelector('#conversations tbody .number')?.textContent === '2'")
            assert await tab.run("document.querySelector('#figures .shares .number').textContent") == "2"


async def test_curl_lines_do_the_same(browser: Browser, demo: DemoGateway) -> None:
    async with running_sidecar(demo.url, probes=True) as sidecar, status_page(browser, sidecar) as tab:
        lines = str(await tab.run("document.getElementById('curl').textContent")).split("\n\n")

        said = []
        for line in lines:
            process = await asyncio.create_subprocess_exec(
                "sh", "-c", line, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
            )
            said.append((await asyncio.wait_for(process.communicate(), 10))[0].decode())

        assert len(said) == 2
        assert said[0].count('"content"') > 5
        assert "Earlier" in said[1]


@pytest.mark.parametrize("model", ["it's; $(touch /tmp/x) `id`", "\u202emodel\n"])
async def test_curl_line_quotes_what_the_backend_calls_its_model(browser: Browser, model: str) -> None:
    listed = as_json({"object": "list", "data": [{"id": model, "object": "model"}]})
    async with before(hermes_gateway(routes={**HERMES, "/v1/models": listed})) as sidecar:
        async with status_page(browser, sidecar) as tab:
            await tab.run("document.getElementById('try-send').click()")
            await tab.shows(f"{VERDICT}.dataset.good")
            line = str(await tab.run("document.getElementById('curl').textContent")).split("\n\n")[0]

        words = line.replace("curl -N", "printf '%s\\n'", 1)
        process = await asyncio.create_subprocess_exec("sh", "-c", words, stdout=asyncio.subprocess.PIPE)
        printed = (await asyncio.wait_for(process.communicate(), 10))[0].decode().splitlines()
        assert json.loads(printed[-1])["model"] == model
        assert line.isascii()


async def test_key_that_the_gateway_wants_is_sent_and_kept_nowhere(browser: Browser) -> None:
    key = f"gateway-key-{secrets.token_hex(8)}"
    async with (
        demo_gateway(key=key) as gateway,
        running_sidecar(gateway.url, probes=True) as sidecar,
        browser.tab(sidecar.url + PAGE) as tab,
    ):
        await tab.shows(IS_LIVE)
        await tab.run("document.getElementById('try-send').click()")
        assert await tab.shows(f"{VERDICT}.dataset.good") == "false"
        assert "The gateway refused the turn with status 401" in str(await tab.run(f"{VERDICT}.textContent"))

        await tab.run(f"document.getElementById('token').value = {json.dumps(key)}")
        await tab.run("document.getElementById('try-send').click()")
        assert await tab.shows(f"{VERDICT}.dataset.good === 'true'")

        assert '-H "Authorization: Bearer $TOKEN"' in str(await tab.run("document.getElementById('curl').textContent"))
        assert key not in str(await tab.run("document.documentElement.outerHTML"))
        stores = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        assert key not in str(await tab.run(stores))
        await tab.open(sidecar.url + PAGE)
        assert await tab.run("document.getElementById('token').value") == ""


async def test_stop_ends_the_turn_at_the_gateway(browser: Browser) -> None:
    left = asyncio.Event()

    async def endless(connection: Connection) -> None:
        connection.write(STREAM_HEAD)
        await connection.ended(limit_s=60)
        left.set()

    def answer(request: Received) -> Answer:
        return endless if request.method == b"POST" else hermes_gateway()(request)

    async with before(answer) as sidecar, status_page(browser, sidecar) as tab:
        await tab.run("document.getElementById('try-send').click()")
        await tab.shows("document.getElementById('turns').children.length === 1")
        await tab.run("document.getElementById('try-stop').click()")

        assert await tab.shows(f"{VERDICT}.textContent === 'Stopped.'")
        async with asyncio.timeout(5):
            await left.wait()


async def test_page_by_keyboard(browser: Browser) -> None:
    focused = "document.activeElement.id || document.activeElement.className || document.activeElement.textContent"
    async with before(hermes_gateway()) as sidecar, status_page(browser, sidecar) as tab:
        await tab.press("Tab")
        assert await tab.run(focused) == "skip"
        assert await tab.run("document.activeElement.getBoundingClientRect().top >= 0"), "the focused link can be seen"
        await tab.press("Enter")
        await tab.press("Tab")
        assert await tab.run(focused) == "probe"
        assert await tab.run("parseFloat(getComputedStyle(document.activeElement).outlineWidth)") >= 2
        await tab.press("Enter")
        assert await tab.shows("document.getElementById('probe-said').textContent.startsWith('Probed.')")
        assert await tab.run(focused) == "probe", "the button keeps the focus"


async def test_page_for_a_screen_reader(browser: Browser) -> None:
    async with before(hermes_gateway()) as sidecar, status_page(browser, sidecar) as tab:
        await tab.command("Accessibility.enable")
        nodes = (await tab.command("Accessibility.getFullAXTree"))["nodes"]
        seen = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]

        for landmark in ("banner", "navigation", "main", "contentinfo"):
            assert [role for role, _ in seen].count(landmark) == 1, landmark
        regions = {name for role, name in seen if role == "region"}
        assert regions == {
            "Status", "Connections", "What this backend can do", "Live figures", "Last conversations", "Try it",
            "Set up your frontend",
        }  # fmt: skip
        fields = {name for role, name in seen if role == "textbox"}
        assert fields == {"Bearer token (optional)", "Model (optional)"}
        plots = [name for role, name in seen if role == "image"]
        assert len(plots) == 2
        assert all("last ten minutes" in name for name in plots)
        live = await tab.run("document.querySelector('[role=status] .word').closest('[aria-live=polite]') !== null")
        assert live is True


async def test_page_asks_for_news_only_while_somebody_looks(browser: Browser) -> None:
    async with before(hermes_gateway()) as sidecar, status_page(browser, sidecar) as tab:
        pretend = """Object.defineProperty(document, 'visibilityState', {configurable: true, get: () => seen});
            window.planned = [];
            window.setTimeout = (_, after) => { planned.push(after); return 1 };
            document.dispatchEvent(new Event('visibilitychange'));
            document.getElementById('probe').click()"""
        probed = "document.getElementById('probe-said').textContent.startsWith('Probed.')"

        await tab.run(pretend, {"seen": "hidden"})
        await tab.shows(probed)
        while_hidden = await tab.run("planned")
        await tab.run("document.getElementById('probe-said').textContent = ''")
        await tab.run(pretend, {"seen": "visible"})
        await tab.shows(probed)

        assert while_hidden == []
        assert set(await tab.run("planned")) == {5000}
