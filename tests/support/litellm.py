"""LiteLLM's proxy from PyPI, as a stock OpenAI-compatible backend with one model that it mocks itself."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
from pathlib import Path
from typing import Self

import aiohttp

from tests.support import real_servers
from tests.support.own_venv import free_port, own_venv

VERSION = "1.108.7"
MODEL = "mocked"
ANSWER = "This answer was made without a model."
_START_LIMIT_S = 90.0


class LiteLlm:
    """A running `litellm --config`, with `url` and `key`; `log` is what it has printed so far."""

    def __init__(self, process: asyncio.subprocess.Process, home: Path, url: str, key: str) -> None:
        self._process = process
        self._home = home
        self.url = url
        self.key = key

    @classmethod
    async def start(cls, home: Path) -> LiteLlm:
        """A proxy that answers. `home` is an empty directory. Fails the test if it is not up in time."""
        executable = own_venv("litellm", VERSION, f"litellm[proxy]=={VERSION}") / "bin" / "litellm"
        port, key = free_port(), f"sk-{secrets.token_hex(24)}"
        # Nothing listens at api_base: a model that were called after all would be an error in the log.
        params = {
            "model": "openai/mocked",
            "api_key": "none",
            "api_base": "http://127.0.0.1:9",
            "mock_response": ANSWER,
        }
        # JSON is YAML.
        (home / "config.yaml").write_text(
            json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": params}]}), encoding="utf-8"
        )
        with (home / "output.log").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(executable, "--config", home / "config.yaml", "--host", "127.0.0.1", "--port", str(port)),
                "--detailed_debug",  # it then tells of each model call
                cwd=home,
                env={
                    "HOME": str(home),
                    "PATH": os.environ.get("PATH", os.defpath),
                    "LITELLM_MASTER_KEY": key,
                    "LITELLM_TELEMETRY": "False",
                    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network for prices
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        proxy = cls(process, home, f"http://127.0.0.1:{port}", key)
        log = home / "output.log"
        await real_servers.wait_until_up("litellm", process, proxy._lists_models, log=log, limit_s=_START_LIMIT_S)
        return proxy

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def log(self) -> str:
        return (self._home / "output.log").read_text(errors="replace")

    async def stop(self) -> None:
        await real_servers.stop(self._process)

    async def _lists_models(self) -> bool:
        headers = {"Authorization": f"Bearer {self.key}"}
        timeout = aiohttp.ClientTimeout(total=10)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as client,
            client.get(f"{self.url}/v1/models") as answer,
        ):
            return answer.status == 200
