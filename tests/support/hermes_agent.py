"""The real hermes-agent as a test's gateway: installed once into a venv of its own, started in a home of its own.

It pins its own versions of the libraries that the sidecar uses, so it never shares the project's venv. Where it
cannot be had, the test is skipped with the reason; in CI (environment variable CI) that is a failure instead.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

import aiohttp
import pytest

VERSION = "0.19.0"
_PROJECT = Path(__file__).resolve().parents[2]
_INSTALL_LIMIT_S = 600.0
_START_LIMIT_S = 45.0
_STOP_LIMIT_S = 15.0


class HermesAgent:
    """A running `hermes gateway run`, with `url` and `key`; `log` is what it has printed so far."""

    def __init__(self, process: asyncio.subprocess.Process, home: Path, url: str, key: str) -> None:
        self._process = process
        self._home = home
        self.url = url
        self.key = key

    @classmethod
    async def start(cls, home: Path, model_url: str, *, config: Mapping[str, object] | None = None) -> HermesAgent:
        """A gateway that answers on its port, with `model_url` (an OpenAI-compatible server) as its model.

        `home` is an empty directory that becomes HOME and HERMES_HOME. `config` replaces or adds top-level sections
        of config.yaml. Fails the test, with the end of the log, if the gateway is not up in time.
        """
        executable = installed() / "bin" / "hermes"
        port, key = _free_port(), secrets.token_hex(16)
        _write_home(home, port, key, model_url, config or {})
        with (home / "output.log").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                executable,
                "gateway",
                "run",
                "-v",
                cwd=home,
                # Nothing of the developer's: no proxy, no provider's key, no ~/.hermes.
                env={"HOME": str(home), "HERMES_HOME": str(home), "PATH": os.environ.get("PATH", os.defpath)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        agent = cls(process, home, f"http://127.0.0.1:{port}", key)
        try:
            await agent._wait_until_up()
        except BaseException:
            await agent.stop()
            raise
        return agent

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def log(self) -> str:
        return (self._home / "output.log").read_text(errors="replace")

    async def stop(self) -> None:
        if self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(_STOP_LIMIT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    # Reading what it stored

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of the gateway's own API, asked directly and with its key."""
        headers = {"Authorization": f"Bearer {self.key}"}
        async with (
            aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=10)) as client,
            client.get(self.url + path) as answer,
        ):
            return answer.status, await answer.json()

    async def messages(self, session_id: str) -> list[dict[str, Any]]:
        """The stored history of a session, oldest first; fails if there is no such session."""
        status, document = await self.get(f"/api/sessions/{session_id}/messages")
        assert status == 200, f"session {session_id!r}: {status} {document}"
        messages: list[dict[str, Any]] = document["data"]
        return messages

    async def _wait_until_up(self) -> None:
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                # Asked with the key: whoever else may have taken the port meanwhile does not know it.
                while not await self._answers("/v1/models"):
                    if self._process.returncode is not None:
                        pytest.fail(f"hermes gateway run ended with {self._process.returncode}:\n{self.log[-4000:]}")
                    await asyncio.sleep(0.1)  # another process: it can only be asked again
        except TimeoutError:
            pytest.fail(f"hermes gateway run was not up after {_START_LIMIT_S:g} s:\n{self.log[-4000:]}")

    async def _answers(self, path: str) -> bool:
        try:
            status, _ = await self.get(path)
        except (aiohttp.ClientError, TimeoutError):
            return False
        return status == 200


def _write_home(home: Path, port: int, key: str, model_url: str, config: Mapping[str, object]) -> None:
    variables = {"API_SERVER_ENABLED": "true", "API_SERVER_KEY": key, "API_SERVER_PORT": str(port)}
    (home / ".env").write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    sections: dict[str, object] = {
        "model": {
            "default": "stub-model",
            "provider": "custom",
            "base_url": f"{model_url}/v1",
            "api_key": "stub-key",
            "context_length": 128_000,
        },
        "memory": {"memory_enabled": False},
        "security": {"tirith_enabled": False},  # it would download a scanner at start
    }
    # JSON is YAML.
    (home / "config.yaml").write_text(json.dumps(sections | dict(config), indent=2))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# Installing


@functools.cache
def installed() -> Path:
    """The venv that has hermes-agent in the tested version, made if need be."""
    venv = Path(os.environ.get("HERMES_AGENT_VENV", _PROJECT / ".cache" / f"hermes-agent-{VERSION}"))
    venv.parent.mkdir(parents=True, exist_ok=True)
    # One test run makes it, others wait: two at once would spoil it.
    with venv.with_name(venv.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _version_in(venv) != VERSION:
            _install(venv)
    return venv


def _version_in(venv: Path) -> str | None:
    question = "import aiohttp, importlib.metadata as m; print(m.version('hermes-agent'))"
    try:
        answer = subprocess.run([venv / "bin" / "python", "-c", question], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _install(venv: Path) -> None:
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(venv)],
        [*pip, f"hermes-agent=={VERSION}", "aiohttp"],
    ):
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S)
        except subprocess.CalledProcessError as exc:
            _unavailable(f"`{' '.join(command)}` failed: {exc.stderr.strip()[-600:]}")
        except (OSError, subprocess.TimeoutExpired) as exc:
            _unavailable(f"`{' '.join(command)}`: {exc}")


def _unavailable(why: str) -> NoReturn:
    reason = f"hermes-agent {VERSION} is not available: {why}"
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
