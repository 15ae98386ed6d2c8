"""Real servers beside a test, each a process of its own: waited for until it answers, and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

_STOP_LIMIT_S = 15.0
_END_OF_LOG = 4000


async def wait_until_up(
    name: str,
    process: asyncio.subprocess.Process,
    is_up: Callable[[], Awaitable[bool]],
    *,
    log: Path,
    limit_s: float,
) -> None:
    """Ends when `is_up` says so; an answer that does not come counts as no.

    Stops the process and fails the test, with the end of its `log`, if it ends instead or is not up in time.
    """
    try:
        async with asyncio.timeout(limit_s):
            while not await _answers(is_up):
                if process.returncode is not None:
                    pytest.fail(f"{name} ended with {process.returncode}:\n{_end_of(log)}")
                await asyncio.sleep(0.1)  # another process: it can only be asked again
    except BaseException as reason:
        said = _end_of(log)  # before it tells of its end
        await stop(process)
        if isinstance(reason, TimeoutError):
            pytest.fail(f"{name} was not up after {limit_s:g} s:\n{said}")
        raise


async def stop(process: asyncio.subprocess.Process) -> None:
    """Asks it to end, and ends it if it takes too long. Nothing where it has ended by itself."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_STOP_LIMIT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _answers(is_up: Callable[[], Awaitable[bool]]) -> bool:
    try:
        return await is_up()
    except (aiohttp.ClientError, TimeoutError):
        return False


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-_END_OF_LOG:]
