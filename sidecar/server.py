"""Sockets, signals and the drain: how the process starts, stops, and tells the world so."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import resource
import signal
import socket
import sys
from pathlib import Path

import structlog
import uvloop

from sidecar import __version__
from sidecar.app import App, build
from sidecar.capabilities.model import Picture, status_of
from sidecar.capabilities.wording import summary_of
from sidecar.config import ConfigFaults, Settings, load, not_built_yet
from sidecar.relay.downstream import Downstream
from sidecar.telemetry import logs
from sidecar.telemetry.exchanges import Sink

_BACKLOG = 4096
"""Connections that may wait for the event loop: a burst of a thousand tabs is not turned away."""
_OTHER_FILES = 64
"""Files that the process needs besides its connections, and a reserve."""
_TAKE_LOOK_S = 0.05
"""How often a drain looks whether slow readers have taken their answers."""
_FAREWELL_S = 0.1
"""What is written at the end gets this long to leave before the connections are closed."""


class Running:
    """A sidecar that serves in this event loop."""

    def __init__(self, app: App, servers: list[asyncio.Server], url: str, port: int) -> None:
        self._app = app
        self._servers = servers
        self.url = url
        self.port = port

    def use(self, settings: Settings) -> None:
        """Judges new requests by new settings; running exchanges and the addresses stay as they are."""
        self._app.backend.use(settings)
        self._app.relay.log.use(logs.configure(settings.log.level, settings.log.format))

    def tell_changes(self, log: structlog.typing.FilteringBoundLogger) -> None:
        """One line for each change of the status: a gateway that goes away is one line, not one for each request."""
        said: list[str] = []

        def tell(picture: Picture) -> None:
            sentence = summary_of(picture)
            if picture.probed_at is not None and said != [sentence]:
                said[:] = [sentence]
                log.info("status", status=status_of(picture), message=sentence, gateway=picture.gateway.kind)

        self._app.monitor.on_change(tell)

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
                # No event tells that a transport's buffer is empty.
                while any(client.unsent_bytes for client in relay.clients):  # noqa: ASYNC110
                    await asyncio.sleep(_TAKE_LOOK_S)
        except TimeoutError:
            structlog.get_logger().warning("drain_grace_over", broken_off=len(relay.exchanges))

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


async def start(settings: Settings, sink: Sink | None = None) -> Running:
    """Serves in the running event loop. Raises OSError when an address is taken."""
    sockets: list[socket.socket] = []
    try:
        sockets.append(_tcp_socket(settings.listen.host, settings.listen.port))
        if settings.listen.unix_socket is not None:
            sockets.append(_unix_socket(settings.listen.unix_socket))
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    loop = asyncio.get_running_loop()
    app = await build(
        settings,
        sink or logs.configure(settings.log.level, settings.log.format),
        connections_at_most=_connections_at_most(),
    )
    servers = [
        await loop.create_server(lambda: Downstream(app.relay), sock=sock, backlog=_BACKLOG)
        if sock.family != socket.AF_UNIX
        else await loop.create_unix_server(lambda: Downstream(app.relay), sock=sock, backlog=_BACKLOG)
        for sock in sockets
    ]
    app.begin()
    port = sockets[0].getsockname()[1]
    host = settings.listen.host
    return Running(app, servers, f"http://{f'[{host}]' if ':' in host else host}:{port}", port)


def _connections_at_most() -> int:
    """How many clients this process can hold: each may need a file for itself and one for its upstream."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < most:  # many systems start processes with a limit of 1,024 and let them raise it
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (files - _OTHER_FILES) // 2


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
    except OSError as error:
        sock.close()
        raise OSError(error.errno, error.strerror, str(path)) from error
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
    running.tell_changes(log)
    for sentence in not_built_yet(settings):
        log.warning("not_built_yet", message=sentence)
    gc.collect()
    gc.freeze()  # what exists now stays for good: full collections need not walk it
    while not signals.first.is_set():
        await signals.received.wait()
        signals.received.clear()
        if signals.reload_wanted:
            signals.reload_wanted = False
            settings = _reload(running, settings)
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
    """SIGTERM and SIGINT: the first asks for a drain, the second for an end. SIGHUP asks to read the settings again."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.received = asyncio.Event()
        self.reload_wanted = False
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)

    def _stop(self) -> None:
        (self.second if self.first.is_set() else self.first).set()
        self.received.set()

    def _reload(self) -> None:
        self.reload_wanted = True
        self.received.set()


def _reload(running: Running, settings: Settings) -> Settings:
    """Reads the configuration again: tokens, origins, hosts, sources and log level. A faulty one changes nothing."""
    log = structlog.get_logger()
    try:
        fresh = load(settings.source_file)
    except ConfigFaults as error:
        for fault in error.faults:
            log.error("reload_refused", reason=fault)
        return settings
    running.use(fresh)
    changed = [name for name in ("gateway", "listen") if _address(fresh, name) != _address(settings, name)]
    if changed:
        log.warning("restart_needed", message=f"A new address in {' and '.join(changed)} takes effect at a restart.")
    structlog.get_logger().info("reloaded")
    return fresh


def _address(settings: Settings, section: str) -> tuple[object, ...]:
    if section == "gateway":
        return (settings.gateway.url, settings.gateway.ca_file)
    return (settings.listen.host, settings.listen.port, settings.listen.unix_socket)


def _why_not_started(settings: Settings, error: OSError) -> str:
    where, key = f"{settings.listen.host}:{settings.listen.port}", "listen.port to a free port"
    if error.filename:
        where, key = str(error.filename), "listen.unix_socket to a path that is free"
    if error.errno == errno.EADDRINUSE:
        return f"hermes-sidecar: {where} is taken by another program; stop it, or set {key}."
    if error.errno == errno.EACCES:
        return (
            f"hermes-sidecar: no permission to listen on {where}; set {key.split()[0]} to one that this user may open."
        )
    return f"hermes-sidecar: cannot listen on {where}: {error.strerror or error}."
