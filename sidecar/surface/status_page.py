"""The status page at `/sidecar/` and its files. `page/index.html` shows what is where, `view` what it says."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files

from aiohttp import web

from sidecar.capabilities.monitor import Monitor
from sidecar.surface.binding import Page
from sidecar.surface.view import Facts, view

_FILES = {"style.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    # Not no-referrer: with that a browser sends `Origin: null` along with the form, and the guard refuses it.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class StatusPage:
    def __init__(self, monitor: Monitor, facts: Callable[[], Facts]) -> None:
        self._monitor = monitor
        self._facts = facts

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/sidecar/", self.page)
        router.add_get("/sidecar/state.json", self.state)
        router.add_post("/sidecar/probe", self.probe)
        for name in _FILES:
            router.add_get(f"/sidecar/{name}", self.file)

    async def page(self, _: web.Request) -> web.Response:
        """The page with everything in it, for browsers with and without scripts."""
        return web.Response(text=_template().filled(view(self._facts())), content_type="text/html", headers=_HEADERS)

    async def state(self, _: web.Request) -> web.Response:
        """What the page shows, for its script."""
        return web.json_response(view(self._facts()))

    async def probe(self, _: web.Request) -> web.Response:
        """Probes, and leads back to the page: the button of a browser without scripts."""
        await self._monitor.refresh()
        raise web.HTTPSeeOther("./")

    async def file(self, request: web.Request) -> web.Response:
        name = request.path.rpartition("/")[2]
        return web.Response(text=_text(name), content_type=_FILES[name], charset="utf-8", headers=_HEADERS)


@cache
def _template() -> Page:
    return Page(_text("index.html"))


@cache
def _text(name: str) -> str:
    return files("sidecar.surface").joinpath("page", name).read_text("utf-8")
