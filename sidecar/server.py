"""A sidecar that serves in an event loop: its listeners, its drain, its end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from sidecar import sockets
from sidecar.app import App, build
from sidecar.capabilities.model import Picture
from sidecar.config import Settings
from sidecar.relay.downstream import Downstream
from sidecar.relay.request import Listener
from sidecar.supervisor import Place
from sidecar.telemetry import logs
from sidecar.telemetry.exchanges import Sink
from sidecar.telemetry.peers import Peers

_TAKE_LOOK_S = 0.05
"""How often a drain looks whether slow readers have taken their answers."""
_FAREWELL_S = 0.1
"""What is written at the end gets this long to leave before the connections are closed."""


class Running:
    """A sidecar that serves."""

    def __init__(
        self,
        app: App,
        servers: list[asyncio.Server],
        url: str,
        port: int,
        *,
        admin_url: str | None,
        is_handed: bool,
    ) -> None:
        """`is_handed`: somebody else keeps the relay's listening sockets, and hands them to the next process."""
        self._app = app
        self._is_handed = is_handed
        self._servers = servers
        self.url = url
        self.port = port
        self.admin_url = admin_url
        """Where the own pages are, if they are not beside the relay."""

    @property
    def picture(self) -> Picture:
        """What is known of the backend now."""
        return self._app.monitor.picture

    def on_change(self, listener: Callable[[Picture], None]) -> None:
        """Calls `listener` whenever what is known of the backend changes."""
        self._app.monitor.on_change(listener)

    def use(self, settings: Settings) -> None:
        """Judges new requests by new settings; running exchanges and the addresses stay as they are."""
        self._app.backend.use(settings)
        self._app.relay.log.use(logs.configure(settings.log.level, settings.log.format))

    @property
    def running_exchanges(self) -> int:
        """Exchanges that a drain waits for; listeners to our own event stream are none."""
        return sum(not exchange.request.is_own for exchange in self._app.relay.exchanges)

    async def drain(self, grace_s: float) -> None:
        """Takes no new requests and lets running exchanges end, for `grace_s` at most; then breaks them off.

        Cancelling it skips the rest of the grace.
        """
        relay = self._app.relay
        relay.is_draining = True
        if self._is_handed:  # new connections wait in the sockets' backlog for the next process
            for server in self._servers[: None if self.admin_url is None else -1]:
                server.close()
        try:
            async with asyncio.timeout(grace_s):
                while self.running_exchanges:
                    relay.ended.clear()
                    await relay.ended.wait()
                # No event tells that a transport's buffer is empty.
                while any(client.unsent_bytes for client in relay.clients):  # noqa: ASYNC110
                    await asyncio.sleep(_TAKE_LOOK_S)
        except TimeoutError:
            structlog.get_logger().warning("drain_grace_over", broken_off=self.running_exchanges)

    async def stop(self) -> None:
        """Closes everything, at once. Clients that have not taken all of their answer see that it is cut."""
        relay = self._app.relay
        relay.is_draining = True
        for server in self._servers:
            server.close()
        for exchange in list(relay.exchanges):
            exchange.drain()
        await asyncio.sleep(_FAREWELL_S if relay.clients else 0)
        for client in list(relay.clients):
            if client.unsent_bytes:
                client.cut(reset=True)
            else:
                client.abort()
        await self._app.close()
        for server in self._servers:
            await server.wait_closed()


async def start(
    settings: Settings,
    sink: Sink | None = None,
    *,
    handed: Sequence[socket.socket] = (),
    place: Place | None = None,
) -> Running:
    """Serves in the running event loop. Raises OSError when an address is taken.

    `handed` are listening sockets that somebody else opened; they take the place of `listen`. `place`: this is one of
    several workers that share the port.
    """
    is_first = place is None or place.number == 0
    has_admin = settings.admin.host is not None
    relay_listener: Listener = "relay" if has_admin else "all"
    listening: list[tuple[Listener, socket.socket]] = [(relay_listener, sock) for sock in handed]
    try:
        if not handed:
            shared = place is not None
            listen = settings.listen
            listening.append((relay_listener, sockets.tcp_socket(listen.host, listen.port, shared=shared)))
            if listen.unix_socket is not None and is_first:  # a file has one listener; the port has all
                listening.append((relay_listener, sockets.unix_socket(listen.unix_socket)))
        if settings.admin.host is not None and settings.admin.port is not None and is_first:
            listening.append(("admin", sockets.tcp_socket(settings.admin.host, settings.admin.port)))
    except OSError:
        for _, sock in listening:
            sock.close()
        raise
    where = listening[0][1].getsockname()
    url, port = _url(where), where[1] if isinstance(where, tuple) else 0
    app = await build(
        settings,
        sink or logs.configure(settings.log.level, settings.log.format),
        url=url,
        connections_at_most=sockets.connections_at_most(),
        peers=None if place is None else Peers(place.directory, place.number),
    )
    servers = [await _serve_on(sock, app, listener) for listener, sock in listening]
    app.begin()
    admin_url = _url(listening[-1][1].getsockname()) if listening[-1][0] == "admin" else None
    return Running(app, servers, url, port, admin_url=admin_url, is_handed=bool(handed))


def _url(where: tuple[Any, ...] | str) -> str:
    """A socket's own address, as a URL; `unix:` and a path for one without a port."""
    if not isinstance(where, tuple):
        return f"unix:{where}"
    host = f"[{where[0]}]" if ":" in where[0] else where[0]
    return f"http://{host}:{where[1]}"


async def _serve_on(sock: socket.socket, app: App, listener: Listener) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    sockets.set_for_clients(sock)
    if sock.family == socket.AF_UNIX:
        return await loop.create_unix_server(
            lambda: Downstream(app.relay, listener), sock=sock, backlog=sockets.BACKLOG
        )
    return await loop.create_server(lambda: Downstream(app.relay, listener), sock=sock, backlog=sockets.BACKLOG)
