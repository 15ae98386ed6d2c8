"""The sidecar in the test's own event loop, started as production starts it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from sidecar import server
from sidecar.capabilities.model import Cause, Finding, GatewayFacts, Picture
from sidecar.config import from_mapping
from sidecar.telemetry.lines import Line
from sidecar.telemetry.logs import as_dict
from sidecar.upstreams import Upstreams
from tests.support.scripted_upstream import Script, ScriptedUpstream, scripted_upstream
from tests.support.wire import LIMIT_S

LogLine = tuple[str, dict[str, object]]
"""(level, keys) of one line."""


class Sidecar:
    """A running sidecar and what it has logged."""

    def __init__(self) -> None:
        self.running: server.Running
        self.log: list[LogLine] = []
        self._logged = asyncio.Event()

    @property
    def url(self) -> str:
        return self.running.url

    @property
    def port(self) -> int:
        return self.running.port

    @property
    def exchanges(self) -> list[dict[str, object]]:
        """The lines of the exchanges that have ended."""
        return [line for _, line in self.log if line["event"] == "exchange_ended"]

    async def ended_exchanges(self, count: int = 1, *, limit_s: float = LIMIT_S) -> list[dict[str, object]]:
        """The lines of at least `count` ended exchanges, once they are there."""
        async with asyncio.timeout(limit_s):
            while len(self.exchanges) < count:
                self._logged.clear()
                await self._logged.wait()
        return self.exchanges

    def sink(self, lines: Sequence[Line]) -> None:
        self.log += [(str(keys["level"]), keys) for keys in map(as_dict, lines)]
        self._logged.set()


async def _no_probe(upstreams: Upstreams) -> Picture:
    """What a probe would find at a gateway that says nothing about itself."""
    chat = Finding(True, "probe", Cause.PRESENT, "taken for granted")
    facts = GatewayFacts(reachable=True, kind="generic", findings={"chatCompletions": chat})
    return replace(upstreams.blank_picture(), gateway=facts, probed_at=1.0)


@asynccontextmanager
async def running_sidecar(
    gateway_url: str, *, environ: Mapping[str, str] | None = None, probes: bool = False, **sections: Mapping[str, Any]
) -> AsyncIterator[Sidecar]:
    """A sidecar on a free port before `gateway_url`; `sections` as the configuration file has them.

    Without `probes` the gateway is asked nothing but what the test's clients ask: a scripted one sees only them.
    An exception that nobody caught, in a callback or a task, fails the test.
    """
    values: dict[str, dict[str, Any]] = {name: dict(keys) for name, keys in sections.items()}
    values.setdefault("listen", {}).setdefault("port", 0)
    values.setdefault("gateway", {}).setdefault("url", gateway_url)
    values.setdefault("store", {}).setdefault("url", "memory")  # no test meets what another learned
    sidecar = Sidecar()
    loop = asyncio.get_running_loop()
    uncaught: list[dict[str, Any]] = []
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: uncaught.append(context))
    try:
        with nullcontext() if probes else patch.object(Upstreams, "probe", _no_probe):
            sidecar.running = await server.start(from_mapping(values, environ or {}), sidecar.sink)
        try:
            yield sidecar
        finally:
            await sidecar.running.stop()
    finally:
        loop.set_exception_handler(before)
    assert not uncaught, uncaught[:3]


@asynccontextmanager
async def relayed(
    script: Script | bytes,
    *,
    records: bool = True,
    environ: Mapping[str, str] | None = None,
    probes: bool = False,
    **sections: Mapping[str, Any],
) -> AsyncIterator[tuple[ScriptedUpstream, Sidecar]]:
    """A scripted upstream and a sidecar before it."""
    async with (
        scripted_upstream(script, records=records) as upstream,
        running_sidecar(upstream.url, environ=environ, probes=probes, **sections) as sidecar,
    ):
        yield upstream, sidecar
