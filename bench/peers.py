"""Those who are compared: each started as a process of its own on a free loopback port, and stopped by its handle."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from bench import streams
from bench.streams import BenchFailure

NAMES = ("direct", "nginx", "plain", "sidecar")
_ROOT = Path(__file__).resolve().parent.parent
_READY_S = 20.0
_STOP_S = 10.0
_QUIET_CPU_S = 0.005

_NGINX = """
worker_processes 1; daemon off; pid {directory}/nginx.pid; error_log {directory}/nginx.log error;
events {{ worker_connections 8192; }}
http {{
  access_log off; tcp_nodelay on; keepalive_requests 100000000; client_max_body_size 100m;
  client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy; fastcgi_temp_path {directory}/fastcgi;
  uwsgi_temp_path {directory}/uwsgi; scgi_temp_path {directory}/scgi;
  upstream gateway {{ server 127.0.0.1:{upstream}; keepalive 512; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://gateway; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering off; proxy_read_timeout 1h; proxy_send_timeout 1h;
    }}
  }}
}}
"""
"""The nginx that streams need, and nothing that costs it time: no access log, nothing buffered."""


class Cores(NamedTuple):
    """Who runs where; None where there is only one core to run on."""

    upstream: int | None
    client: int | None
    proxy: int | None

    @classmethod
    def of_this_machine(cls) -> Cores:
        usable = sorted(os.sched_getaffinity(0))
        if len(usable) < 2 or shutil.which("taskset") is None:
            return cls(None, None, None)
        return cls(usable[0], usable[1 if len(usable) > 2 else 0], usable[-1])


class Peer:
    """Somebody that answers on `port`; `process` is missing where nothing stands between client and upstream."""

    def __init__(self, name: str, port: int, process: subprocess.Popen[bytes] | None) -> None:
        self.name = name
        self.port = port
        self._process = process

    def _family(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def cpu_s(self) -> float:
        """Processor time of all its threads so far, to the nanosecond, unlike the ticks of `times`."""
        spent_ns = 0
        for process in self._family():
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                spent_ns += int((task / "schedstat").read_text().split()[0])
        return spent_ns / 1e9

    def memory_bytes(self) -> int:
        return sum(process.memory_info().rss for process in self._family())

    async def settled(self) -> None:
        """Returns once it has worked off what the measurement before left behind, or after two seconds."""
        for _ in range(20):
            before = self.cpu_s()
            await asyncio.sleep(0.1)
            if self.cpu_s() - before < _QUIET_CPU_S:
                return


@asynccontextmanager
async def upstream(core: int | None, directory: Path) -> AsyncIterator[int]:
    """A running fake gateway; its port."""
    port = _free_port()
    async with _process("upstream", [sys.executable, "-m", "bench.upstream", str(port)], core, directory) as process:
        await _ready(Peer("upstream", port, process), process, directory)
        yield port


@asynccontextmanager
async def peer(name: str, upstream_port: int, core: int | None, directory: Path) -> AsyncIterator[Peer]:
    """A running peer that answers chats."""
    if name == "direct":
        yield Peer(name, upstream_port, None)
        return
    port = _free_port()
    environ: Mapping[str, str] = {}
    if name == "nginx":
        config = directory / "nginx.conf"
        config.write_text(_NGINX.format(directory=directory, port=port, upstream=upstream_port))
        nginx = nginx_program()
        assert nginx is not None
        command = [nginx, "-p", str(directory), "-c", str(config), "-e", str(directory / "nginx.log")]
    elif name == "plain":
        command = [sys.executable, "-m", "bench.plain_proxy", str(port), f"http://127.0.0.1:{upstream_port}"]
    else:
        command = [sys.executable, "-m", "sidecar", "serve"]
        environ = _sidecar_environ(port, upstream_port, directory)
    async with _process(name, command, core, directory, environ) as process:
        started = Peer(name, port, process)
        await _ready(started, process, directory)
        yield started


@asynccontextmanager
async def soaked(
    upstream_port: int, core: int | None, directory: Path, told: Path
) -> AsyncIterator[tuple[Peer, psutil.Process]]:
    """A running sidecar that writes to `told` how it is inside when it gets SIGUSR1."""
    port = _free_port()
    command = [sys.executable, "-m", "bench.soaked", str(told), "serve"]
    environ = _sidecar_environ(port, upstream_port, directory)
    async with _process("sidecar", command, core, directory, environ) as process:
        started = Peer("sidecar", port, process)
        await _ready(started, process, directory)
        yield started, psutil.Process(process.pid)


def nginx_program() -> str | None:
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def _sidecar_environ(port: int, upstream_port: int, directory: Path) -> dict[str, str]:
    """As shipped: nothing is set but where it listens, where its gateway is, and that no file of the user's counts."""
    no_file = directory / "sidecar.toml"
    no_file.touch()
    return {
        "HERMES_SIDECAR_CONFIG": str(no_file),
        "HERMES_SIDECAR_LISTEN__PORT": str(port),
        "HERMES_SIDECAR_GATEWAY__URL": f"http://127.0.0.1:{upstream_port}",
        "HERMES_SIDECAR_STORE__URL": "memory",
    }


@asynccontextmanager
async def _process(
    name: str, command: Sequence[str], core: int | None, directory: Path, environ: Mapping[str, str] | None = None
) -> AsyncIterator[subprocess.Popen[bytes]]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HERMES_SIDECAR_")}
    pinned = command if core is None else ["taskset", "--cpu-list", str(core), *command]
    with (directory / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603, ASYNC220  our own command lines; starting is quick
            pinned, cwd=_ROOT, env={**inherited, **(environ or {})}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, _STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _ready(started: Peer, process: subprocess.Popen[bytes], directory: Path) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + _READY_S
    while process.poll() is None and loop.time() < until:
        if await streams.is_ready(started.port):
            await started.settled()
            return
        await asyncio.sleep(0.05)
    said = (directory / f"{started.name}.log").read_text(errors="replace")[-500:]
    raise BenchFailure(f"{started.name} did not start: {said}")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
