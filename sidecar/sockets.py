"""Listening sockets (a port, a Unix socket, or what systemd hands over), and the options that connections need."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from sidecar.config.addresses import is_loopback

BACKLOG = 4096
"""Connections that may wait for the event loop: a burst of a thousand tabs is not turned away."""
LOOPBACK_AHEAD_BYTES = 64 * 1024
"""How far a client on this machine may run ahead of what is read of it."""
_KEEP_ALIVE_OPTIONS = tuple(
    (getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
)
"""Agents are silent for many minutes; a dead peer or a forgetful NAT must be told from a working one."""
_FIRST_HANDED_FD = 3
_OTHER_FILES = 64
"""Files that the process needs besides its connections, and a reserve."""


def tcp_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound socket. `shared`: other processes of ours bind the same port. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart must not wait for old connections
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def set_for_clients(sock: socket.socket) -> None:
    """Sets once what every connection that `sock` accepts inherits, instead of once for each.

    Where no network has to be kept busy clients run less far ahead: an upload that waits in megabytes has left the
    processor's cache before anybody reads it.
    """
    where = sock.getsockname()
    if not isinstance(where, tuple):
        return
    keep_tcp_alive(sock)
    if is_loopback(where[0]):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOOPBACK_AHEAD_BYTES)


def keep_tcp_alive(sock: socket.socket) -> None:
    """Lets the kernel find out about a peer that vanished, within about a minute."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE_OPTIONS:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def unix_socket(path: Path) -> socket.socket:
    """A socket file that only this user may open; one that a killed sidecar left behind is replaced.

    Raises OSError with the path as its `filename`.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _is_answered(path):
            path.unlink()
        sock.bind(str(path))
        path.chmod(0o600)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, error.strerror, str(path)) from error
    sock.setblocking(False)
    return sock


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        try:
            caller.connect(str(path))
        except OSError:
            return False
    return True


def handed_sockets(environ: MutableMapping[str, str]) -> list[socket.socket]:
    """The listening sockets that systemd opened for this very process; empty without socket activation.

    Takes the variables out of `environ`, so that no child mistakes them for its own. Source: sd_listen_fds(3).
    """
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit():
        return []
    sockets = []
    for number in range(_FIRST_HANDED_FD, _FIRST_HANDED_FD + int(count)):
        sock = socket.socket(fileno=number)
        os.set_inheritable(number, False)
        sock.setblocking(False)
        sockets.append(sock)
    return sockets


def connections_at_most() -> int:
    """How many clients this process can hold: each may need a file for itself and one for its upstream."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < most:  # many systems start processes with a limit of 1,024 and let them raise it
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (files - _OTHER_FILES) // 2)
