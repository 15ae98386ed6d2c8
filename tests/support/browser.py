"""A real browser: headless Chromium, driven over its DevTools protocol.

The protocol is JSON over one WebSocket, and a test needs few of its commands; a driver program and its client would be
two more parts with versions of their own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.tools import needed

LIMIT_S = 15.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-sync",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-proxy-server",
    "--remote-debugging-port=0",
)


class PageError(AssertionError):
    """A script of the test's own failed in the page."""


class Browser:
    """A running browser; `tab` opens pages in it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}
        self._reading = asyncio.ensure_future(self._read())

    async def command(self, method: str, session: str | None = None, **parameters: object) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters}
        await self._socket.send_json(message if session is None else {**message, "sessionId": session})
        async with asyncio.timeout(LIMIT_S):
            reply = await answer
        if "error" in reply:
            raise PageError(f"{method}: {reply['error']}")
        result: dict[str, Any] = reply["result"]
        return result

    @asynccontextmanager
    async def tab(self, url: str) -> AsyncIterator[Tab]:
        """A page of its own at `url`, once it is loaded."""
        target = (await self.command("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.command("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        await tab.command("Page.enable")
        await tab.command("Page.setLifecycleEventsEnabled", enabled=True)
        await tab.open(url)
        try:
            yield tab
        finally:
            del self._tabs[session]
            await self.command("Target.closeTarget", targetId=target)

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if (answer := self._answers.pop(event.get("id", 0), None)) is not None:
                answer.set_result(event)
            elif (tab := self._tabs.get(event.get("sessionId", ""))) is not None and "method" in event:
                tab.told(event["method"], event["params"])


class Tab:
    """One page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self._shown = ""
        """The document that is shown, by the id of its loader."""
        self._loaded: set[str] = set()
        self._changed = asyncio.Event()
        self.requests: list[str] = []
        """The URLs that the page has asked for since `watch`."""
        self.complaints: list[str] = []
        """What stands in its console as an error or a warning since `watch`, scripts that failed included."""

    def told(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Page.frameNavigated" and "parentId" not in parameters["frame"]:
            self._shown = parameters["frame"]["loaderId"]
        elif method == "Page.lifecycleEvent" and parameters["name"] == "load":
            self._loaded.add(parameters["loaderId"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        self._changed.set()

    async def command(self, method: str, **parameters: object) -> dict[str, Any]:
        return await self._browser.command(method, self._session, **parameters)

    async def open(self, url: str) -> None:
        """Goes to `url` as if a person had typed it, and waits until it is loaded."""
        loader = (await self.command("Page.navigate", url=url))["loaderId"]
        await self._until(lambda: self._shown == loader and loader in self._loaded)

    async def watch(self) -> None:
        """Fills `requests` and `complaints` from now on."""
        for domain in ("Network", "Runtime", "Log"):
            await self.command(f"{domain}.enable")

    async def look_through(self, *, width: int, is_dark: bool = False, height: int = 900) -> None:
        """A window of that size, in CSS pixels, and what the system says about colours."""
        await self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.command("Emulation.setEmulatedMedia", features=[scheme])

    async def switch_scripts_off(self) -> None:
        """For the pages that are opened from now on."""
        await self.command("Emulation.setScriptExecutionDisabled", value=True)

    async def press(self, key: str) -> None:
        """One key, as from a keyboard: `Tab`, `Enter`, …"""
        number = {"Tab": 9, "Enter": 13, " ": 32}[key]
        text = {"text": "\r"} if key == "Enter" else {"text": " "} if key == " " else {}
        for kind in ("keyDown", "keyUp"):
            said: dict[str, object] = dict(text) if kind == "keyDown" else {}
            await self.command("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=number, **said)

    async def shows(self, script: str, names: Mapping[str, object] | None = None) -> Any:
        """What the expression gives, once that is true; whatever changes in the document is waited for."""
        return await self.run(
            f"""new Promise((done) => {{
                const look = () => {{
                    const value = {script};
                    if (value) {{ watcher.disconnect(); done(value) }}
                }};
                const watcher = new MutationObserver(look);
                watcher.observe(document, {{subtree: true, childList: true, attributes: true, characterData: true}});
                look();
            }})""",
            names,
        )

    async def click(self, selector: str) -> None:
        """Clicks, and waits until the page that this leads to is loaded."""
        left = self._shown
        await self.run(f"document.querySelector({json.dumps(selector)}).click()")
        await self._until(lambda: self._shown != left and self._shown in self._loaded)

    async def run(self, script: str, names: Mapping[str, object] | None = None) -> Any:
        """What the last expression of `script` gives, awaited; `names` are constants for it. Raises PageError."""
        constants = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in (names or {}).items())
        reply = await self.command(
            "Runtime.evaluate",
            expression=f"{{\n{constants}{script}\n}}",
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        if "exceptionDetails" in reply:
            raise PageError(json.dumps(reply["exceptionDetails"])[:2000])
        return reply["result"].get("value")

    async def text(self) -> str:
        """What the page shows."""
        return str(await self.run("document.body.innerText"))

    async def _until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not reached():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def chromium(profile: Path, names: Mapping[str, str]) -> AsyncIterator[Browser]:
    """A browser with an empty profile, for which each of `names` resolves to the address beside it."""
    program = needed("chromium", "chromium-browser", "google-chrome", package="chromium")
    rules = ", ".join(f"MAP {name} {address}" for name, address in names.items())
    process = await asyncio.create_subprocess_exec(
        *(str(program), *_FLAGS, f"--user-data-dir={profile}", f"--host-resolver-rules={rules}", "about:blank"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    draining: asyncio.Task[bytes] | None = None
    try:
        async with asyncio.timeout(LIMIT_S):
            said = b""
            while (found := re.search(rb"DevTools listening on (ws://\S+)", said)) is None:
                line = await process.stderr.readline()
                assert line, f"the browser did not start: {said.decode(errors='replace')}"
                said += line
        draining = asyncio.ensure_future(process.stderr.read())
        async with (
            aiohttp.ClientSession() as client,
            client.ws_connect(found[1].decode(), max_msg_size=0) as socket,
        ):
            browser = Browser(socket)
            try:
                yield browser
            finally:
                await browser.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        if draining is not None:
            await draining
