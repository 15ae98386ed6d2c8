"""A certificate authority of the tests' own, and servers' TLS contexts that it vouches for."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import trustme


@cache
def authority(name: str = "the right one") -> trustme.CA:
    """Made once in a test run, since making keys is slow."""
    return trustme.CA(organization_name=name)


def ca_file(directory: Path, name: str = "the right one") -> str:
    """The authority's certificate as a file for `gateway.ca_file`."""
    path = directory / "authority.pem"
    authority(name).cert_pem.write_to_path(path)
    return str(path)


def server_tls(
    *names: str,
    by: str = "the right one",
    is_expired: bool = False,
    on_server_name: Callable[[str | None], None] | None = None,
) -> ssl.SSLContext:
    """A server's context with a certificate for `names`. `on_server_name` is told what each client asks for (SNI)."""
    now = datetime.now(UTC)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate = authority(by).issue_cert(
        *names,
        not_before=now - timedelta(days=20),
        not_after=now - timedelta(days=10) if is_expired else now + timedelta(days=10),
    )
    certificate.configure_cert(context)
    if on_server_name is not None:
        context.sni_callback = lambda _, name, __: on_server_name(name)
    return context
