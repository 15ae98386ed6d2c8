"""The sidecar's own pages as an upstream like the others, reached over a socket pair inside the process.

So own pages and relayed answers share one door, one drain and one set of ends, and aiohttp serves the pages.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from aiohttp import web

from sidecar.relay.connecting import Connector, Factory
from sidecar.relay.upstream import Upstream

_silent = logging.getLogger("hermes_sidecar.pages")
_silent.addHandler(logging.NullHandler())
_silent.propagate = False


async def make_runner(app: web.Application) -> web.AppRunner:
    """The one way to start an aiohttp application here: handlers are cancelled when their client leaves."""
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,
        logger=_silent,  # it would log what clients sent; pages answer and log their own failures
    )
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
        try:
            await loop.connect_accepted_socket(server, theirs)
            _, upstream = await loop.create_connection(factory, sock=ours)
        except BaseException:  # also where whoever waited for the page has left
            ours.close()
            theirs.close()
            raise
        return upstream

    return open_connection
