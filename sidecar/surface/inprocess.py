"""The sidecar's own pages as an upstream like the others, reached over a socket pair inside the process.

So own pages and relayed answers share one door, one drain and one set of ends, and aiohttp serves the pages.
"""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from sidecar.relay.pool import Connector, Factory
from sidecar.relay.upstream import Upstream


async def make_runner(app: web.Application) -> web.AppRunner:
    """The one way to start an aiohttp application here: handlers are cancelled when their client leaves."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    return runner


def connector(runner: web.AppRunner) -> Connector:
    """Opens connections to the runner's application."""

    async def open_connection(factory: Factory) -> Upstream:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        server = runner.server
        assert server is not None
        await loop.connect_accepted_socket(server, theirs)
        _, upstream = await loop.create_connection(factory, sock=ours)
        return upstream

    return open_connection
