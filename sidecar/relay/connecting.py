"""How a connection to an upstream is opened.

Law: every failure is one of three exceptions, and `in_words` says it to a person.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import aiohappyeyeballs

from sidecar.config.addresses import is_loopback
from sidecar.relay.upstream import Upstream
from sidecar.sockets import keep_tcp_alive

_NEXT_ADDRESS_S = 0.25
"""When a name has several addresses, the next one is tried after this silence (RFC 8305, 8)."""

LOOPBACK_SENT_AHEAD_BYTES = 128 * 1024
"""How far the sidecar may run ahead of an upstream on this machine. Loopback's segments have 64 KB, and with room for
less than two of them each would wait for its acknowledgement."""

Factory = Callable[[], Upstream]
Connector = Callable[[Factory], Awaitable[Upstream]]
"""Opens one connection. Raises OSError, ssl.SSLError or TimeoutError."""


def tcp_connector(host: str, port: int, tls: ssl.SSLContext | None) -> Connector:
    """Opens connections to a host, trying each of its addresses in turn (RFC 8305), verified where `tls` is given."""
    host_is_literal = _is_ip_literal(host)

    async def open_connection(factory: Factory) -> Upstream:
        loop = asyncio.get_running_loop()
        # Never through a proxy: HTTP_PROXY and its kin are not looked at, the gateway is called directly.
        if host_is_literal:
            _, upstream = await loop.create_connection(
                factory, host, port, ssl=tls, server_hostname=host if tls else None
            )
        else:
            try:
                infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except UnicodeError as exc:  # not every resolver's refusal of a name is an OSError
                raise socket.gaierror(socket.EAI_NONAME, "not a host name") from exc
            sock = await aiohappyeyeballs.start_connection(infos, happy_eyeballs_delay=_NEXT_ADDRESS_S)
            try:
                _, upstream = await loop.create_connection(
                    factory, sock=sock, ssl=tls, server_hostname=host if tls else None
                )
            except BaseException:  # also where whoever waited for it has left
                sock.close()
                raise
        _set_options(upstream.transport)
        return upstream

    return open_connection


def _set_options(transport: asyncio.BaseTransport) -> None:
    # One socket object for all options: the transport's own makes another for each.
    sock = socket.socket(fileno=transport.get_extra_info("socket").fileno())
    try:
        keep_tcp_alive(sock)
        run_less_far_ahead(sock, transport.get_extra_info("peername"))
    finally:
        sock.detach()


def run_less_far_ahead(sock: socket.socket, peer: tuple[Any, ...] | None) -> None:
    """Sends a peer on this machine no more than it reads soon: there is no network to be kept busy.

    An upload that waits in megabytes has left the processor's cache before anybody reads it.
    """
    if peer and is_loopback(peer[0]):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_SENT_AHEAD_BYTES)


def _is_ip_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def in_words(exc: OSError) -> str:
    """A failed connection in words."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"its certificate was not accepted ({exc.verify_message})"
    if isinstance(exc, ssl.SSLError):
        return "it does not speak TLS as expected"
    if isinstance(exc, ConnectionRefusedError):
        return "nothing listens there (connection refused)"
    if isinstance(exc, socket.gaierror):
        return "its name could not be resolved"
    if isinstance(exc, ConnectionResetError):
        return "it closed the connection while it was being opened"
    return f"the connection failed ({exc.strerror or type(exc).__name__})"
