"""The real hermes-agent as a test's gateway and dashboard: each run has a home of its own."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import aiohttp

from tests.support import real_servers
from tests.support.own_venv import free_port, own_venv

VERSION = "0.19.0"
_START_LIMIT_S = 45.0


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
        port, key = free_port(), secrets.token_hex(16)
        _write_home(home, port, key, model_url, config or {})
        process = await _started(home, "output.log", "gateway", "run", "-v")
        agent = cls(process, home, f"http://127.0.0.1:{port}", key)
        log = home / "output.log"
        await real_servers.wait_until_up("hermes gateway run", process, agent._answers, log=log, limit_s=_START_LIMIT_S)
        return agent

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def home(self) -> Path:
        return self._home

    @property
    def log(self) -> str:
        return (self._home / "output.log").read_text(errors="replace")

    async def stop(self) -> None:
        await real_servers.stop(self._process)

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

    async def _answers(self) -> bool:
        # Asked with the key: whoever else may have taken the port meanwhile does not know it.
        status, _ = await self.get("/v1/models")
        return status == 200


class HermesDashboard:
    """A running `hermes dashboard` with the home of a gateway."""

    def __init__(self, process: asyncio.subprocess.Process, home: Path, port: int) -> None:
        self._process = process
        self._home = home
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    @classmethod
    async def start(cls, home: Path, *, port: int | None = None) -> HermesDashboard:
        """A dashboard that answers, on `port` if that is given; it makes a new token each time."""
        port = port or free_port()
        process = await _started(home, "dashboard.log", "dashboard", "--no-open", "--skip-build", "--port", str(port))
        dashboard = cls(process, home, port)
        log = home / "dashboard.log"
        await real_servers.wait_until_up(
            "hermes dashboard", process, dashboard._has_token, log=log, limit_s=_START_LIMIT_S
        )
        return dashboard

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        await real_servers.stop(self._process)

    async def restart(self) -> None:
        """A new process on the same port: the token that it handed out before is worth nothing then."""
        await self.stop()
        again = await HermesDashboard.start(self._home, port=self.port)
        self._process = again._process

    async def token(self) -> str:
        """What its page hands out now."""
        timeout = aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(timeout=timeout) as client, client.get(f"{self.url}/") as answer:
            page = await answer.text()
        return page.partition('__HERMES_SESSION_TOKEN__="')[2].partition('"')[0]

    async def _has_token(self) -> bool:
        return bool(await self.token())


async def _started(home: Path, log: str, *arguments: str) -> asyncio.subprocess.Process:
    """`hermes` with `arguments`, in its home; its output goes to the file `log` there."""
    with (home / log).open("wb") as output:
        return await asyncio.create_subprocess_exec(
            _executable(),
            *arguments,
            cwd=home,
            # Nothing of the developer's: no proxy, no provider's key, no ~/.hermes.
            env={"HOME": str(home), "HERMES_HOME": str(home), "PATH": os.environ.get("PATH", os.defpath)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


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


def _executable() -> Path:
    return own_venv("hermes-agent", VERSION, f"hermes-agent=={VERSION}", "aiohttp") / "bin" / "hermes"
