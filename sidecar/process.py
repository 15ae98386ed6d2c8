"""The process in the foreground: signals, reading the configuration again, and telling the world how it is."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import socket
import sys

import structlog
import uvloop

from sidecar import __version__, compiled, sockets
from sidecar.capabilities.model import Picture, status_of
from sidecar.capabilities.wording import summary_of
from sidecar.config import ConfigFaults, Settings, load
from sidecar.server import Running, start
from sidecar.supervisor import ALIVE, AT_ONCE, READY, Place, Supervisor, hear_signals
from sidecar.telemetry import logs
from sidecar.telemetry.exchanges import Sink
from sidecar.telemetry.systemd import Notifier

_GC_THRESHOLDS = (10_000, 20, 20)
"""Ended exchanges are freed without the collector, which need not look as often as it does by default."""
_BEAT_S = 0.5
"""How often a worker tells its supervisor that it lives."""
_EXTEND_S = 5.0
"""How often a drain asks systemd for more time, each time for twice as long."""


def serve(settings: Settings) -> int:
    """Runs until a signal. The exit code: 0, or 1 if it could not start."""
    logs.configure(settings.log.level, settings.log.format)
    notifier = Notifier(os.environ)
    handed = sockets.handed_sockets(os.environ)
    if settings.listen.workers == 1:
        return _run(settings, notifier, handed, None)
    return _serve_with_workers(settings, notifier, handed)


def _serve_with_workers(settings: Settings, notifier: Notifier, handed: list[socket.socket]) -> int:
    listen = settings.listen
    held = list(handed)
    try:
        if not handed:
            if listen.port:  # alone first: to share it with a stranger who shares as well would be no fault
                sockets.tcp_socket(listen.host, listen.port).close()
            held.append(sockets.tcp_socket(listen.host, listen.port, shared=True))
            port = held[0].getsockname()[1]
            settings = settings.model_copy(update={"listen": listen.model_copy(update={"port": port})})
    except OSError as error:
        sys.stderr.write(_why_not_started(settings, error) + "\n")
        return 1
    url = f"http://{listen.host}:{settings.listen.port}"

    def on_ready() -> None:
        notifier.send(READY=1, STATUS=f"Listening on {url} with {listen.workers} workers")

    supervisor = Supervisor(
        listen.workers, lambda place: _run(settings, Notifier({}), handed, place), notifier, on_ready=on_ready
    )
    return supervisor.run(held)


def _run(settings: Settings, notifier: Notifier, handed: list[socket.socket], place: Place | None) -> int:
    sink = logs.configure(settings.log.level, settings.log.format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, sink, notifier, handed, place))


async def _serve(
    settings: Settings, sink: Sink, notifier: Notifier, handed: list[socket.socket], place: Place | None
) -> int:
    # Before anybody is told that we listen: a service manager may stop us at once.
    signals = _Signals(is_supervised=place is not None)
    try:
        running = await start(settings, sink, handed=handed, place=place)
    except OSError as error:
        sys.stderr.write(_why_not_started(settings, error) + "\n")
        return 1
    is_first = place is None or place.number == 0
    if is_first:
        _say_listening(running.url, settings, running.admin_url)
    if place is None:
        notifier.send(READY=1, STATUS=f"Listening on {running.url}")
        notifier.keep_watchdog()
    else:
        _keep_beating(place, READY)
    if is_first:
        _tell_changes(running, notifier, signals)
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # what exists now stays for good: full collections need not walk it

    while not signals.first.is_set():
        await signals.received.wait()
        signals.received.clear()
        if signals.reload_wanted:
            signals.reload_wanted = False
            settings = _reload(running, settings)

    await _end(running, settings, signals, notifier)
    return 0


def _say_listening(url: str, settings: Settings, admin_url: str | None = None) -> None:
    log = structlog.get_logger()
    admin = {} if admin_url is None else {"admin": admin_url}
    is_compiled = bool(compiled.modules())
    log.info("listening", url=url, gateway=settings.gateway.url, **admin, version=__version__, compiled=is_compiled)
    if changed := compiled.stale():
        log.warning(
            "compiled_stale",
            modules=changed,
            message="These modules run as they were compiled, not as their source is now. In a clone: make compiled.",
        )
    if settings.listen.workers > 1 and settings.store.url == "memory":
        log.warning(
            "store_not_shared",
            message="Each worker remembers rotated sessions for itself. Set store.url to sqlite or redis.",
        )


def _keep_beating(place: Place, beat: bytes = ALIVE) -> None:
    """Tells the supervisor that this event loop turns. One that was killed takes its workers along."""
    try:
        os.write(place.pulse, beat)
    except BlockingIOError:
        pass  # it is stopped, and has not read for hours
    except BrokenPipeError:
        os.kill(os.getpid(), signal.SIGTERM)
        return
    asyncio.get_running_loop().call_later(_BEAT_S, _keep_beating, place)


async def _end(running: Running, settings: Settings, signals: _Signals, notifier: Notifier) -> None:
    log = structlog.get_logger()
    grace_s = settings.shutdown.grace_s
    drain = asyncio.ensure_future(running.drain(grace_s))
    await asyncio.sleep(0)  # it has begun when it is told: whoever reads that may rely on it
    log.info("draining", grace_s=grace_s, running=running.running_exchanges)
    notifier.send(STOPPING=1, STATUS=f"Draining: {running.running_exchanges} running, {grace_s:g} s at most")
    hurry = asyncio.ensure_future(signals.second.wait())
    while not (drain.done() or hurry.done()):
        notifier.send(EXTEND_TIMEOUT_USEC=int(2e6 * _EXTEND_S))
        await asyncio.wait((drain, hurry), timeout=_EXTEND_S, return_when=asyncio.FIRST_COMPLETED)
    for task in (drain, hurry):
        task.cancel()
    await asyncio.gather(drain, hurry, return_exceptions=True)
    await running.stop()
    notifier.end()
    log.info("stopped")


def _tell_changes(running: Running, notifier: Notifier, signals: _Signals) -> None:
    """One line for each change of the status: a gateway that goes away is one line, not one for each request.

    Until a signal comes: from then on the drain is what there is to say.
    """
    said: list[str] = []

    def tell(picture: Picture) -> None:
        sentence = summary_of(picture)
        if picture.probed_at is None or said == [sentence] or signals.first.is_set():
            return
        said[:] = [sentence]
        status = status_of(picture)
        log = structlog.get_logger()
        (log.warning if status == "disconnected" else log.info)(
            "status", status=status, message=sentence, gateway=picture.gateway.kind
        )
        notifier.send(STATUS=f"{status.capitalize()}: {sentence}")

    running.on_change(tell)


class _Signals:
    """SIGTERM and SIGINT: the first asks for a drain, the second for an end. SIGHUP asks to read the settings again.

    For a supervised worker the second is another signal, since it may hear the first from several sides.
    """

    def __init__(self, *, is_supervised: bool) -> None:
        self._is_supervised = is_supervised
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.received = asyncio.Event()
        self.reload_wanted = False
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        if is_supervised:
            loop.add_signal_handler(AT_ONCE, self._stop_at_once)
            hear_signals()

    def _stop(self) -> None:
        if self.first.is_set() and not self._is_supervised:
            self.second.set()
        self.first.set()
        self.received.set()

    def _stop_at_once(self) -> None:
        self.second.set()
        self._stop()

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
    log = structlog.get_logger()
    changed = [name for name in ("gateway", "listen") if _address(fresh, name) != _address(settings, name)]
    if changed:
        log.warning("restart_needed", message=f"A new address in {' and '.join(changed)} takes effect at a restart.")
    log.info("reloaded")
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
