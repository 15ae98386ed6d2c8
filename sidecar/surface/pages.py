"""The sidecar's own pages. The table in `application` is their contents page."""

from __future__ import annotations

import html
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.resources import files
from string import Template

from aiohttp import web

from sidecar import __version__, faults
from sidecar.faults import Fault, FaultCode
from sidecar.surface.errors import envelope, fault_response

_NOT_YET = ("/capabilities", "/capabilities/events", "/capabilities/refresh", "/metrics")


@dataclass(frozen=True, slots=True)
class State:
    """What the pages tell. `gateway_fault` opens a connection to the gateway and reports what went wrong, or None."""

    gateway_url: str
    is_draining: Callable[[], bool]
    gateway_fault: Callable[[], Awaitable[Fault | None]]


def application(state: State) -> web.Application:
    app = web.Application(middlewares=[envelope])
    pages = _Pages(state)
    app.router.add_get("/healthz", pages.healthz)
    app.router.add_get("/readyz", pages.readyz)
    app.router.add_get("/sidecar/", pages.status)
    for path in _NOT_YET:
        app.router.add_route("*", path, pages.not_yet)
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

    async def healthz(self, _: web.Request) -> web.Response:
        """The process lives; nothing more is said, and nothing is asked of the gateway."""
        return web.json_response({"status": "ok", "version": __version__})

    async def readyz(self, _: web.Request) -> web.Response:
        """Whether a chat would find its way now."""
        if self._state.is_draining():
            return fault_response(faults.draining())
        fault = await self._state.gateway_fault()
        if fault is not None:
            return fault_response(fault, status=503)
        return web.json_response({"status": "ready", "reason": "The gateway accepts connections."})

    async def status(self, _: web.Request) -> web.Response:
        """The status page, as a person reads it."""
        fault = await self._state.gateway_fault()
        page = Template(files("sidecar.surface").joinpath("page/status.html").read_text("utf-8"))
        word, sentence = ("Connected", "The gateway accepts connections.")
        if fault is not None:
            word, sentence = ("Disconnected", f"{fault.message} {fault.hint}")
        text = page.substitute(
            word=word,
            sentence=html.escape(sentence),
            gateway=html.escape(self._state.gateway_url),
            version=__version__,
        )
        policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"
        return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": policy})

    async def not_yet(self, request: web.Request) -> web.Response:
        return fault_response(
            Fault(
                FaultCode.CAPABILITY_UNAVAILABLE,
                f"This version of the sidecar ({__version__}) does not have {request.path} yet.",
                "See CHANGELOG.md for what each version brings. Chat does not depend on it.",
            )
        )
