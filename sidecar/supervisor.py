"""Several workers that share one port: forks them, replaces one that dies, passes signals on.

Law: no event loop and no thread here, so that forking is safe. Each worker binds the port itself (SO_REUSEPORT); the
supervisor holds it as well, without listening, so that it can neither be lost nor taken.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from sidecar.telemetry.systemd import Notifier

_STOP = {signal.SIGTERM, signal.SIGINT}
_OBEYED = {*_STOP, signal.SIGHUP}
_HEARD = {*_OBEYED, signal.SIGCHLD}
AT_ONCE = signal.SIGUSR1
"""Tells a worker to end without a drain. A second SIGTERM cannot: a service manager or a terminal sends one to the
supervisor and to each worker as well, so that every worker hears the first of them twice."""
_TOO_SOON_S = 1.0
"""A worker that dies so soon after its start is started again only after as long a pause."""
_LOOK_S = 0.5
READY, ALIVE = b"R", b"."


@dataclass(frozen=True, slots=True)
class Place:
    """What a worker is told: its number, where the workers' sockets are, and where to say that it lives."""

    number: int
    directory: Path
    pulse: int
    """A file descriptor: READY once the worker listens, ALIVE for each beat of its event loop."""


Work = Callable[[Place], int]
"""A worker's life; the answer is its exit code."""


def hear_signals() -> None:
    """For a worker that knows now what to do on a signal: those that came before reach it at once."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)


@dataclass(slots=True)
class _Worker:
    pid: int
    pulse: int
    started_at: float
    beat_at: float
    is_ready: bool = False


class Supervisor:
    """The parent of the workers."""

    def __init__(self, count: int, work: Work, notifier: Notifier, *, on_ready: Callable[[], None]) -> None:
        self._count = count
        self._work = work
        self._notifier = notifier
        self._on_ready = on_ready
        self._workers: dict[int, _Worker] = {}
        self._is_stopping = False
        self._has_been_ready = False
        self._exit_code = 0

    def run(self, held: list[socket.socket]) -> int:
        """Runs until a signal, or until the workers cannot start. `held` sockets stay open meanwhile."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        with tempfile.TemporaryDirectory(prefix="hermes-sidecar-") as directory:
            for number in range(self._count):
                self._start(number, Path(directory))
            while self._workers:
                received = signal.sigtimedwait(_HEARD, _LOOK_S)
                if received is not None:
                    self._obey(signal.Signals(received.si_signo))
                self._listen()
                self._reap(Path(directory))
        for sock in held:
            sock.close()
        return self._exit_code

    def _start(self, number: int, directory: Path) -> None:
        pulse, workers_end = os.pipe()
        os.set_blocking(pulse, False)
        os.set_blocking(workers_end, False)
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for reading_end in (pulse, *(worker.pulse for worker in self._workers.values())):
                os.close(reading_end)  # so that a write fails once the supervisor is gone
            code = 1
            try:
                code = self._work(Place(number, directory, workers_end))
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.close(workers_end)
        now = time.monotonic()
        self._workers[number] = _Worker(pid, pulse, now, now)

    def _obey(self, number: signal.Signals) -> None:
        if number is signal.SIGCHLD:
            return
        if number in _STOP:
            if not self._is_stopping:
                self._notifier.send(STOPPING=1, STATUS="Draining")
            number = AT_ONCE if self._is_stopping else signal.SIGTERM
            self._is_stopping = True
        for worker in self._workers.values():
            os.kill(worker.pid, number)

    def _listen(self) -> None:
        """Hears the workers' pulses; the watchdog is fed only while all of them beat."""
        now = time.monotonic()
        pulses = [worker.pulse for worker in self._workers.values()]
        readable = select.select(pulses, [], [], 0)[0]
        for worker in self._workers.values():
            if worker.pulse in readable:
                said = os.read(worker.pulse, 4096)
                worker.is_ready = worker.is_ready or READY in said
                if said:
                    worker.beat_at = now
        if not self._has_been_ready and all(worker.is_ready for worker in self._workers.values()):
            self._has_been_ready = True
            self._on_ready()
        if self._is_stopping:
            self._notifier.send(EXTEND_TIMEOUT_USEC=10_000_000)
        watchdog_s = self._notifier.watchdog_s
        if watchdog_s and all(now - worker.beat_at < 2 * watchdog_s for worker in self._workers.values()):
            self._notifier.send(WATCHDOG=1)

    def _reap(self, directory: Path) -> None:
        for number, worker in list(self._workers.items()):
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid == 0:
                continue
            os.close(worker.pulse)
            del self._workers[number]
            code = os.waitstatus_to_exitcode(status)
            if self._is_stopping:
                self._exit_code = self._exit_code or (code if code > 0 else 0)
            elif not self._has_been_ready:  # it could not start, and has said why; the others would not either
                self._exit_code = code if code > 0 else 1
                self._obey(signal.SIGTERM)
            else:
                structlog.get_logger().error("worker_died", worker=number, exit_code=code)
                if time.monotonic() - worker.started_at < _TOO_SOON_S:
                    time.sleep(_TOO_SOON_S)
                self._start(number, directory)
