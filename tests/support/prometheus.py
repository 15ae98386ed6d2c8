"""A real Prometheus on a free port, which scrapes what its configuration says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.support.raw_client import ask
from tests.support.tools import needed

_LISTENS = re.compile(rb'msg="Listening on" address=(\S+)')
_START_LIMIT_S = 30.0


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def get(self, path: str, **parameters: str) -> Any:
        """The data of one API call; a call that Prometheus refuses fails with its words."""
        answer = await ask(self.url, "GET", f"/api/v1/{path}?{urlencode(parameters)}")
        told = answer.json()
        assert told["status"] == "success", told
        return told["data"]

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """What an instant query returns now."""
        result: list[dict[str, Any]] = (await self.get("query", query=expression))["result"]
        return result


@asynccontextmanager
async def prometheus(home: Path, configuration: Path) -> AsyncIterator[Prometheus]:
    process = await asyncio.create_subprocess_exec(
        needed("prometheus", package="prometheus"),
        f"--config.file={configuration}",
        f"--storage.tsdb.path={home / 'prometheus-data'}",
        "--web.listen-address=127.0.0.1:0",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    said = b""
    try:
        async with asyncio.timeout(_START_LIMIT_S):
            while (found := _LISTENS.search(said)) is None:
                line = await process.stderr.readline()
                assert line, said.decode(errors="replace")
                said += line
        reading = asyncio.ensure_future(process.stderr.read())  # so that it never waits for a reader
        yield Prometheus(f"http://{found[1].decode()}")
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    finally:
        process.terminate()
        await process.wait()
