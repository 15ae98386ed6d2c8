"""A service manager's ear: the socket that services tell how they are. Source: sd_notify(3)."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.wire import LIMIT_S

Message = dict[str, str]


class ServiceManager:
    """Keeps every message, with the moment at which it came."""

    def __init__(self, address: str) -> None:
        self.address = address
        """What NOTIFY_SOCKET says."""
        self.messages: list[tuple[float, Message]] = []
        self._came = asyncio.Event()

    def said(self, key: str) -> list[str]:
        """All values of one key, in order."""
        return [message[key] for _, message in self.messages if key in message]

    async def told(self, key: str, beginning: str = "", *, limit_s: float = LIMIT_S) -> Message:
        """The first message whose `key` begins so, once it is there."""
        async with asyncio.timeout(limit_s):
            while True:
                for _, message in self.messages:
                    if key in message and message[key].startswith(beginning):
                        return message
                self._came.clear()
                await self._came.wait()

    async def counted(self, key: str, count: int, *, limit_s: float = LIMIT_S) -> list[float]:
        """The moments of the first `count` messages with this key."""
        async with asyncio.timeout(limit_s):
            while len(self.said(key)) < count:
                self._came.clear()
                await self._came.wait()
        return [at for at, message in self.messages if key in message][:count]

    async def listen(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            data = await loop.sock_recv(sock, 65536)
            message = dict(line.split("=", 1) for line in data.decode().split("\n") if line)
            self.messages.append((loop.time(), message))
            self._came.set()


@asynccontextmanager
async def service_manager(directory: Path, *, is_abstract: bool = False) -> AsyncIterator[ServiceManager]:
    """One that listens at a path in `directory`, or under an abstract name."""
    address = f"@hermes-sidecar-test-{secrets.token_hex(8)}" if is_abstract else str(directory / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.bind("\0" + address[1:] if is_abstract else address)
        manager = ServiceManager(address)
        listening = asyncio.ensure_future(manager.listen(sock))
        try:
            yield manager
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
