"""Sockets, signals and the drain: how the process starts, stops, and tells the world so."""

from __future__ import annotations

import asyncio
import errno
import gc
import signal
import socket
import sys
from pathlib import Path

import structlog
import uvloop

from sidecar import __version__
from sidecar.app import App, build
from sidecar.config import Settings, not_built_yet
from sidecar.relay.downstream import Downstream
from sidecar.telemetry import logs
from sidecar.telemetry.exchanges import Sink

_BACKLOG = 4096
"""Connections that may wait for the event loop: a burst of a thousand tabs is not turned away."""
_FAREWELL_S = 0.1
"""What is written at the end gets this long to leave before the connections are closed."""


class Running:
    """A sidecar that serves in this event loop."""

    def __init__(self, app: App, servers: list[asyncio.Server], url: str, port: int) -> None:
        self._app = app
        self._servers = servers
        self.url = url
        self.port = port

    async def drain(self, grace_s: float) -> None:
        """Takes no new requests and lets running exchanges end, for `grace_s` at most; then breaks them off.

        Cancelling it skips the rest of the grace.
        """
        relay = self._app.relay
        relay.is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                while any(not exchange.request.is_own for exchange in relay.exchanges):
                    relay.ended.clear()
                    await relay.ended.wait()
        except TimeoutError:
            structlog.get_logger().warning("drain_grace_over", broken_off=len(relay.exchanges))

    async def stop(self) -> None:
        """Closes everything, at once."""
        relay = self._app.relay
        relay.is_draining = True
        for server in self._servers:
            server.close()
        for exchange in list(relay.exchanges):
            exchange.drain()
        if any(not client.is_idle for client in relay.clients):
            await asyncio.sleep(_FAREWELL_S)
        for client in list(relay.clients):
            client.abort()
        await self._app.close()
        for server in self._servers:
            await server.wait_closed()


async def start(settings: Settings, sink: Sink | None = None) -> Running:
    """Serves in the running event loop. Raises OSError when an address is taken."""
    sockets = [_tcp_socket(settings.listen.host, settings.listen.port)]
    if settings.listen.unix_socket is not None:
        sockets.append(_unix_socket(settings.listen.unix_socket))
    loop = asyncio.get_running_loop()
    app = await build(settings, sink or logs.configure(settings.log.level, settings.log.format))
    servers = [
        await loop.create_server(lambda: Downstream(app.relay), sock=sock, backlog=_BACKLOG)
        if sock.family != socket.AF_UNIX
        else await loop.create_unix_server(lambda: Downstream(app.relay), sock=sock, backlog=_BACKLOG)
        for sock in sockets
    ]
    port = sockets[0].getsockname()[1]
    host = settings.listen.host
    return Running(app, servers, f"http://{f'[{host}]' if ':' in host else host}:{port}", port)


def _tcp_socket(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart must not wait for old connections
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _unix_socket(path: Path) -> socket.socket:
    """A socket file that only this user may open; one that a killed sidecar left behind is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _is_answered(path):
            path.unlink()
        sock.bind(str(path))
        path.chmod(0o600)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def serve(settings: Settings) -> int:
    """Runs in the foreground until a signal. The exit code: 0, or 1 if it could not start."""
    sink = logs.configure(settings.log.level, settings.log.format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, sink))


async def _serve(settings: Settings, sink: Sink) -> int:
    log = structlog.get_logger()
    signals = _Signals()  # before anybody is told that we listen: a service manager may stop us at once
    try:
        running = await start(settings, sink)
    except OSError as error:
        sys.stderr.write(_why_not_started(settings, error) + "\n")
        return 1
    log.info("listening", url=running.url, gateway=settings.gateway.url, version=__version__)
    for sentence in not_built_yet(settings):
        log.warning("not_built_yet", message=sentence)
    gc.collect()
    gc.freeze()  # what exists now stays for good: full collections need not walk it
    await signals.first.wait()
    log.info("draining", grace_s=settings.shutdown.grace_s)
    drain = asyncio.ensure_future(running.drain(settings.shutdown.grace_s))
    hurry = asyncio.ensure_future(signals.second.wait())
    await asyncio.wait((drain, hurry), return_when=asyncio.FIRST_COMPLETED)
    for task in (drain, hurry):
        task.cancel()
    await asyncio.gather(drain, hurry, return_exceptions=True)
    await running.stop()
    log.info("stopped")
    return 0


class _Signals:
    """SIGTERM and SIGINT: the first asks for a drain, the second for an end."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received)

    def _received(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def _why_not_started(settings: Settings, error: OSError) -> str:
    where = f"{settings.listen.host}:{settings.listen.port}"
    if error.errno == errno.EADDRINUSE:
        return f"hermes-sidecar: {where} is taken by another program; stop it, or set listen.port to a free port."
    if error.errno == errno.EACCES:
        return f"hermes-sidecar: no permission to listen on {where}; choose a port above 1023."
    return f"hermes-sidecar: cannot listen on {where}: {error.strerror or error}."
