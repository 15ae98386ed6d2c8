"""The sidecar as its users run it: the command `hermes-sidecar`, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import pytest

_PROJECT = Path(__file__).resolve().parents[2]
_START_LIMIT_S = 20.0
_STOP_LIMIT_S = 15.0
_COMMAND_LIMIT_S = 40.0


class SidecarProcess:
    """A running `hermes-sidecar serve` on a free port."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lines: list[str] = []
        self._listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._logged = asyncio.Event()
        self._reading = asyncio.ensure_future(self._read_log())
        self.url = ""

    @classmethod
    async def start(
        cls,
        home: Path,
        gateway_url: str,
        settings: Mapping[str, str] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        handed: Sequence[socket.socket] = (),
        handed_to: int | None = None,
    ) -> SidecarProcess:
        """A sidecar that listens, before `gateway_url`.

        `settings` are the configuration's environment variables without their common prefix, such as
        `GATEWAY__TOKEN`; `environ` are others, by their whole names. `home` is an empty directory: no configuration
        or state of the developer's is used. `handed` sockets reach it as systemd's socket activation would hand them
        over, meant for the process `handed_to` if that is given.
        """
        process = await asyncio.create_subprocess_exec(
            *(activated(handed, handed_to) if handed else command("serve")),
            pass_fds=[sock.fileno() for sock in handed],
            cwd=_PROJECT,
            env={
                **environment(home, {"LISTEN__PORT": "0", "GATEWAY__URL": gateway_url, **(settings or {})}),
                **(environ or {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        sidecar = cls(process)
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                sidecar.url = await sidecar._listening
        except TimeoutError:
            pytest.fail(f"the sidecar named no URL within {_START_LIMIT_S:g} s:\n{sidecar.log}")
        finally:
            if not sidecar.url:
                await sidecar.stop()
        return sidecar

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        code = await self.stop()
        assert code == 0, f"the sidecar ended with {code}:\n{self.log}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return "".join(self._lines)

    async def logged(self, mark: str, *, count: int = 1, limit_s: float = 5.0) -> None:
        """Returns once `mark` stands in the log, `count` times."""
        try:
            async with asyncio.timeout(limit_s):
                while self.log.count(mark) < count:
                    self._logged.clear()
                    await self._logged.wait()
        except TimeoutError:
            pytest.fail(f"no {mark!r} within {limit_s:g} s in the log:\n{self.log}")

    def send_signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Sends a signal and waits for nothing."""
        self._process.send_signal(number)

    async def stop(self) -> int:
        """Ends it as a service manager does, with SIGTERM; the exit code."""
        if self._process.returncode is None:
            self._process.terminate()
        return await self.ended()

    async def ended(self, limit_s: float = _STOP_LIMIT_S) -> int:
        """The exit code, once it has ended by itself or by a signal that it was sent."""
        try:
            async with asyncio.timeout(limit_s):
                code = await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
            pytest.fail(f"the sidecar did not end within {limit_s:g} s:\n{self.log}")
        await self._reading
        return code

    async def _read_log(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self._lines.append(line.decode(errors="replace"))
            self._logged.set()
            if not self._listening.done() and (url := _url_in(line)):
                self._listening.set_result(url)
        if not self._listening.done():
            self._listening.set_exception(RuntimeError(f"the sidecar ended before it listened:\n{self.log}"))


async def run(home: Path, *arguments: str, settings: Mapping[str, str]) -> tuple[int, str]:
    """Exit code and output of a command that ends by itself, such as `verify`; `settings` as in `start`."""
    process = await asyncio.create_subprocess_exec(
        *command(*arguments),
        cwd=_PROJECT,
        env=environment(home, settings),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(_COMMAND_LIMIT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode()


def command(*arguments: str) -> Sequence[str]:
    """`hermes-sidecar` with `arguments`, by the interpreter that runs the tests."""
    return [sys.executable, "-m", "sidecar", *arguments]


def activated(handed: Sequence[socket.socket], handed_to: int | None = None) -> Sequence[str]:
    """`hermes-sidecar serve` with sockets that were opened for it; they must be passed on to the process as well."""
    numbers = ",".join(str(sock.fileno()) for sock in handed)
    return [sys.executable, "-m", "tests.support.activation", numbers, "" if handed_to is None else str(handed_to)]


def environment(home: Path, settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of such a command: `settings` (names without prefix) and nothing of the developer's."""
    no_file = home / "sidecar.toml"
    no_file.touch()
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "HERMES_SIDECAR_CONFIG": str(no_file),
        **{f"HERMES_SIDECAR_{name}": value for name, value in settings.items()},
    }


def _url_in(line: bytes) -> str | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    url = entry.get("url") if isinstance(entry, dict) else None
    return url if isinstance(url, str) else None
