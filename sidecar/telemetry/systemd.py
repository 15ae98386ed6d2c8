"""Telling systemd how we are: one datagram a message. Source: sd_notify(3).

Law: a service manager that cannot be reached is worth a warning, never a failure.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import MutableMapping

import structlog


class Notifier:
    """Sends state to `NOTIFY_SOCKET`; does nothing where there is none."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Takes the variables out of `environ`: children are not the service."""
        self._address = environ.pop("NOTIFY_SOCKET", "")
        usec, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        is_ours = pid in ("", str(os.getpid()))
        self.watchdog_s = int(usec) / 2e6 if self._address and usec.isdigit() and int(usec) and is_ours else 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._has_warned = False

    def send(self, **state: str | int) -> None:
        """For example `send(READY=1, STATUS="…")`. Line ends in values become blanks."""
        if not self._address:
            return
        text = "\n".join(f"{name}={str(value).replace(chr(10), ' ')}" for name, value in state.items())
        name = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto(text.encode(), name)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                structlog.get_logger().warning("notify_failed", reason=error.strerror or type(error).__name__)

    def keep_watchdog(self) -> None:
        """Says that we live, from the event loop, twice in each of the watchdog's periods."""
        if self.watchdog_s:
            self.send(WATCHDOG=1)
            self._timer = asyncio.get_running_loop().call_later(self.watchdog_s, self.keep_watchdog)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
