"""A real Redis (or Valkey) for a test: started, stopped and started again by its handle, on a free loopback port."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from tests.support.tools import needed

_START_LIMIT_S = 10.0
_STOP_LIMIT_S = 10.0
_PORTS_TRIED = 5


class RedisServer:
    """The server and its directory. It writes each change down at once, so that a restart keeps what it had."""

    def __init__(self, directory: Path, *options: str) -> None:
        self._program = needed("redis-server", "valkey-server", package="redis-server")
        self._directory = directory
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        self.port = 0

    def url(self, *, port: int | None = None, user_info: str = "") -> str:
        return f"redis://{user_info}127.0.0.1:{port or self.port}/0"

    def start(self) -> None:
        """Ends when it accepts connections. Started again, it has the same port and the same data."""
        for _ in range(_PORTS_TRIED):
            port = self.port or _free_port()
            if self._is_ready_on(port):
                self.port = port
                return
        raise AssertionError("Redis does not start")

    def stop(self) -> None:
        """In good order: what it held is on its disk."""
        if self._process is not None:
            self._process.terminate()
            self._end()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._end()

    def _is_ready_on(self, port: int) -> bool:
        listen = ["--bind", "127.0.0.1", "--port", str(port)]
        keep = ["--dir", str(self._directory), "--save", "", "--appendonly", "yes", "--appendfsync", "always"]
        self._process = subprocess.Popen(
            [self._program, *listen, *keep, *self._options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        is_ready = threading.Event()
        has_spoken = threading.Event()
        threading.Thread(target=_read, args=(self._process, is_ready, has_spoken), daemon=True).start()
        if has_spoken.wait(_START_LIMIT_S) and is_ready.is_set():
            return True
        self.kill()
        return False

    def _end(self) -> None:
        assert self._process is not None
        self._process.wait(_STOP_LIMIT_S)
        self._process = None


def _read(process: subprocess.Popen[str], is_ready: threading.Event, has_spoken: threading.Event) -> None:
    """Reads to the end, so that the pipe never fills. `has_spoken`: it is ready, or has ended without being so."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if "eady to accept connections" in line:
                is_ready.set()
                has_spoken.set()
    has_spoken.set()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    directory = Path(mkdtemp(prefix="redis-"))
    server = RedisServer(directory, *options)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(directory)
