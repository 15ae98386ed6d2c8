"""The socket pair behind the sidecar's own pages, where the one who asked has left before it was open."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress

import psutil
from aiohttp import web

from sidecar.relay.pool import Pool
from sidecar.surface import inprocess


def open_sockets() -> int:
    return len(psutil.Process().net_connections("unix"))


async def test_connection_that_nobody_waits_for_any_more_leaves_no_socket() -> None:
    runner = await inprocess.make_runner(web.Application())
    pool = Pool("own pages", inprocess.connector(runner), connect_timeout_s=1.0, keeps_spares=False)
    before = open_sockets()

    for steps in range(6):  # how far the opening has come when they leave
        opening = asyncio.get_running_loop().create_task(pool.connect())
        for _ in range(steps):
            await asyncio.sleep(0)
        if not opening.done():
            opening.cancel()
            with suppress(asyncio.CancelledError):
                await opening
        else:
            opening.result().leave()
    gc.collect()  # a socket that was only forgotten would warn, which fails the test
    async with asyncio.timeout(2):
        while open_sockets() > before:
            await asyncio.sleep(0.01)
    assert open_sockets() == before

    await pool.close()
    await runner.cleanup()
