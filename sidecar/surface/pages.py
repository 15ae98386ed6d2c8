"""The sidecar's own pages. The table in `application` is their contents page."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from sidecar import __version__, faults
from sidecar.capabilities.model import Picture, is_chat_usable, undated
from sidecar.capabilities.monitor import Monitor
from sidecar.capabilities.report import document
from sidecar.capabilities.wording import summary_of
from sidecar.surface.errors import envelope, fault_response
from sidecar.surface.status_page import StatusPage
from sidecar.surface.view import Facts
from sidecar.telemetry.figures import Figures
from sidecar.telemetry.metrics import Metrics
from sidecar.telemetry.recent import Recent

_EVENT_KEEPALIVE_S = 15.0
"""A comment line this often lets a listener, and the sidecar, notice that the other one has gone."""


@dataclass(frozen=True, slots=True)
class State:
    """What the pages tell about."""

    gateway_url: str
    started_at: float
    monitor: Monitor
    metrics: Metrics
    figures: Figures
    recent: Recent
    relay_url: str
    has_relay_beside: bool
    """The relay answers where these pages do."""
    workers: int
    is_draining: Callable[[], bool]

    def facts(self) -> Facts:
        return Facts(
            picture=self.monitor.picture,
            gateway_url=self.gateway_url,
            relay_url=self.relay_url,
            has_relay_beside=self.has_relay_beside,
            workers=self.workers,
            is_draining=self.is_draining(),
            started_at=self.started_at,
            window=self.figures.window(),
            stream_ends=self.metrics.cells.stream_ends,
            turns_by_source=self.recent.turns_by_source,
            conversations=self.recent.newest_first(),
        )


def application(state: State) -> web.Application:
    app = web.Application(middlewares=[envelope])
    pages = _Pages(state)
    app.router.add_get("/healthz", pages.healthz)
    app.router.add_get("/readyz", pages.readyz)
    app.router.add_get("/capabilities", pages.capabilities)
    app.router.add_get("/capabilities/events", pages.events, allow_head=False)
    app.router.add_post("/capabilities/refresh", pages.refresh)
    StatusPage(state.monitor, state.facts).add_to(app.router)
    app.router.add_get("/metrics", pages.metrics)
    app.on_response_prepare.append(_name_ourselves)
    return app


async def _name_ourselves(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = f"hermes-sidecar/{__version__}"
    response.headers["X-Hermes-Sidecar"] = __version__
    response.headers["Cache-Control"] = "no-store"
    response.headers["X-Content-Type-Options"] = "nosniff"


class _Pages:
    def __init__(self, state: State) -> None:
        self._state = state
        self._monitor = state.monitor

    async def healthz(self, _: web.Request) -> web.Response:
        """The process lives; nothing more is said, and nothing is asked of the gateway."""
        return web.json_response({"status": "ok", "version": __version__})

    async def readyz(self, _: web.Request) -> web.Response:
        """Whether a chat would find its way now."""
        if self._state.is_draining():
            return fault_response(faults.draining())
        picture = self._monitor.picture
        sentence = summary_of(picture)
        if is_chat_usable(picture):
            return web.json_response({"status": "ready", "reason": sentence})
        return web.json_response({"status": "not ready", "reason": sentence}, status=503)

    async def capabilities(self, _: web.Request) -> web.Response:
        """From memory, at once, however many ask."""
        return web.json_response(self._document(self._monitor.picture))

    async def refresh(self, _: web.Request) -> web.Response:
        """Probes now, together with whoever else asks at this moment."""
        return web.json_response(self._document(await self._monitor.refresh()))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """The document at once and at each change, as server-sent events."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        changed = asyncio.Event()
        take_off = self._monitor.on_change(lambda _: changed.set())
        told: Picture | None = None
        try:
            while True:
                changed.clear()
                picture = self._monitor.picture
                if (news := _news(picture)) != told:
                    told = news
                    text = json.dumps(self._document(picture))
                    await response.write(f"data: {text}\n\n".encode())
                while not changed.is_set():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_EVENT_KEEPALIVE_S):
                            await changed.wait()
                            break
                    await response.write(b": keepalive\n\n")
        finally:
            take_off()

    async def metrics(self, request: web.Request) -> web.Response:
        """For Prometheus; OpenMetrics only for those who ask for it."""
        body, content_type = await self._state.metrics.exposition_of_all(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    def _document(self, picture: Picture) -> dict[str, Any]:
        return document(picture, self._state.gateway_url, self._state.started_at)


def _news(picture: Picture) -> Picture:
    """What listeners are told of a picture: not its times, and not that the dashboard has a new token."""
    told = undated(picture)
    return replace(told, dashboard=replace(told.dashboard, token=None))
