"""Chat clients that people use, each as a small application of its own that the test tells what to ask.

The applications are in tests/support/clients; what they tell is what their user would see.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.browser import Tab, chromium
from tests.support.litellm import VERSION as LITELLM_VERSION
from tests.support.own_node import node, own_node_folder
from tests.support.own_venv import own_venv
from tests.support.tools import needed

PYTHON_PACKAGES = {
    "langchain": ("langchain-openai", "1.7.1", "langchain-openai==1.7.1"),
    "litellm": ("litellm", LITELLM_VERSION, f"litellm[proxy]=={LITELLM_VERSION}"),
}
NODE_PACKAGES = {
    "openai-node": ("openai@7.59.0",),
    "ai-sdk": ("@ai-sdk/openai-compatible@3.0.92", "ai@7.0.173"),
}
LIMIT_S = 10.0
_START_LIMIT_S = 60.0
_APPLICATIONS = Path(__file__).parent / "clients"


@dataclass(frozen=True)
class Job:
    """One turn, as the application is to ask for it. `url` is the base address, with /v1."""

    url: str
    session: str
    prompt: str = "Hello"
    key: str = "a-key"
    stream: bool = True
    image: str | None = None
    tool: Mapping[str, Any] | None = None


@dataclass
class Seen:
    """What the user has seen of one turn, and how it ended."""

    pieces: list[str] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Calls of the user's own tools: name, and arguments parsed."""
    complaints: list[str] = field(default_factory=list)
    """Errors that the library reports without ending the answer."""
    end: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(self.pieces).strip()


class Client:
    """An application that takes one turn at a time."""

    origin: str | None = None
    """Of the page that it is, if it is one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._is_busy = False

    async def begin(self, job: Job) -> None:
        if self._is_busy:  # with the turn of a test that failed before its end
            await self.leave()
            await the_rest(self)
        self._is_busy = True
        await self._order(asdict(job))

    async def leave(self) -> None:
        """The user presses Stop."""
        await self._order("leave")

    async def event(self) -> dict[str, Any]:
        """The next thing that the user sees."""
        event = await self._told()
        self._is_busy = "end" not in event
        return event

    async def _order(self, what: object) -> None:
        raise NotImplementedError

    async def _told(self) -> dict[str, Any]:
        raise NotImplementedError


async def turn(client: Client, job: Job) -> Seen:
    await client.begin(job)
    return await the_rest(client)


async def the_rest(client: Client) -> Seen:
    """All that comes up to the end of the turn."""
    seen = Seen()
    while not seen.end:
        event = await client.event()
        if "piece" in event:
            seen.pieces.append(event["piece"])
        elif "tool" in event:
            seen.tools.append({**event["tool"], "arguments": json.loads(event["tool"]["arguments"])})
        elif "complaint" in event:
            seen.complaints.append(event["complaint"])
        else:
            seen.end = event
    return seen


class _Application(Client):
    """A process that reads orders from its standard input and tells on its standard output."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        super().__init__(name)
        self._process = process

    async def started(self) -> None:
        assert await self._told(limit_s=_START_LIMIT_S) == {"ready": True}

    async def _order(self, what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        await self._process.stdin.drain()

    async def _told(self, *, limit_s: float = LIMIT_S) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(limit_s):
            line = await self._process.stdout.readline()
        assert line.startswith(b"{"), f"{self.name} said {line!r}"
        event: dict[str, Any] = json.loads(line)
        return event


class Page(Client):
    """A page of another origin than the sidecar's, in a real browser."""

    def __init__(self, tab: Tab, origin: str) -> None:
        super().__init__("browser")
        self.tab = tab
        self.origin = origin

    async def _order(self, what: object) -> None:
        await self.tab.run("order(what)", {"what": what})

    async def _told(self) -> dict[str, Any]:
        event: dict[str, Any] = await self.tab.run("next()")
        return event


def _python(program: Callable[[], Path], way: str) -> Callable[[], tuple[list[str], Path]]:
    return lambda: ([str(program()), str(_APPLICATIONS / "chat_client.py"), way], _APPLICATIONS)


def _node(packages: str, way: str) -> Callable[[], tuple[list[str], Path]]:
    def command() -> tuple[list[str], Path]:
        text = (_APPLICATIONS / "chat_client.mjs").read_text()
        # Handed over as text: a module finds its packages from where it is, and this one from where it is started.
        return [str(node()), "--input-type=module", "--eval", text, way], own_node_folder(
            packages, *NODE_PACKAGES[packages]
        )

    return command


def _venv(name: str) -> Callable[[], Path]:
    return lambda: own_venv(*PYTHON_PACKAGES[name]) / "bin" / "python"


def _this_python_for_curl() -> Path:
    needed("curl", package="curl")
    return Path(sys.executable)


_COMMANDS = {
    "openai-python": _python(lambda: Path(sys.executable), "openai"),
    "openai-node": _node("openai-node", "openai"),
    "ai-sdk": _node("ai-sdk", "ai"),
    "langchain": _python(_venv("langchain"), "langchain"),
    "litellm": _python(_venv("litellm"), "litellm"),
    "curl": _python(_this_python_for_curl, "curl"),
}
NAMES = (*_COMMANDS, "browser")


@asynccontextmanager
async def real_client(name: str, home: Path) -> AsyncIterator[Client]:
    """The application of that name, once it takes jobs; `home` is an empty directory."""
    async with chat_page(home) if name == "browser" else _application(name, home) as client:
        yield client


@asynccontextmanager
async def _application(name: str, home: Path) -> AsyncIterator[Client]:
    command, folder = _COMMANDS[name]()
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        # Nothing of the developer's: no proxy, no key of a provider.
        env={
            "HOME": str(home),
            "PATH": os.environ.get("PATH", os.defpath),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network for prices
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        limit=1 << 20,
    )
    try:
        application = _Application(name, process)
        await application.started()
        yield application
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def chat_page(home: Path) -> AsyncIterator[Page]:
    """The page, loaded; `home` is an empty directory."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="<!doctype html><title>A chat</title>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    origin = f"http://localhost:{runner.addresses[0][1]}"
    try:
        async with chromium(home, {}) as browser, browser.tab(f"{origin}/") as tab:
            await tab.run((_APPLICATIONS / "chat_client.js").read_text())
            yield Page(tab, origin)
    finally:
        await runner.cleanup()
