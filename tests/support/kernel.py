"""What the kernel knows about a connection, where neither end would tell."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from tests.support.wire import LIMIT_S, Wire

_TCP_TABLE = Path("/proc/net/tcp")


def unread_by_peer(wire: Wire) -> int:
    """Bytes that have reached the other side's socket and were not read from it. Both ends are on this machine."""
    sock: socket.socket = wire.transport.get_extra_info("socket")
    ours, theirs = (address[1] for address in (sock.getsockname(), sock.getpeername()))
    for line in _TCP_TABLE.read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        if (int(local.split(":")[1], 16), int(remote.split(":")[1], 16)) == (theirs, ours):
            return int(queues.split(":")[1], 16)
    return 0


async def fill_until_unread(wire: Wire, piece: bytes, *, limit_s: float = LIMIT_S) -> int:
    """Writes `piece` again and again until the other side's program no longer reads; the number of pieces.

    All that was written has reached the other side's socket then, and a FIN written now will, too.
    """
    written = 0
    async with asyncio.timeout(limit_s):
        while True:
            wire.write(piece)
            written += 1
            for _ in range(20):
                await asyncio.sleep(0.001)
                if unread_by_peer(wire) == 0:
                    break
            else:
                return written
