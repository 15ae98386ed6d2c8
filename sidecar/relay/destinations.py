"""Who answers where it is not the gateway, pure: the dashboard and the sidecar's own pages, and what each of them sees.

Law: the gateway's key and a browser's cookies reach neither a family at the dashboard nor an own page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from sidecar.guard.credentials import CredentialPolicy
from sidecar.relay import fields
from sidecar.relay.wire import Field, Fields

Destination = Literal["gateway", "dashboard", "own"]
"""Who answers a request: the gateway, the dashboard, or the sidecar's own pages."""

OWN_PATHS: Final = frozenset(
    (b"/capabilities", b"/capabilities/events", b"/capabilities/refresh", b"/metrics", b"/healthz", b"/readyz")
)
OWN_TREE: Final = b"/sidecar/"
OPEN_PATH: Final = b"/healthz"
"""Needs no client token: it says only that the process lives."""
_PAGE: Final = re.compile(rb"%b[A-Za-z0-9._-]{0,64}" % OWN_TREE)
_METHODS_OF_OWN_PAGES: Final = frozenset((b"GET", b"HEAD", b"POST"))
_SEEN_BY_OWN_PAGES: Final = frozenset((b"accept", b"last-event-id"))
_SEEN_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class DashboardRules:
    """The second upstream: its Host, what stands before its targets, and the prefix that opens all of it."""

    netloc: bytes
    prefix: bytes = b""
    mount: bytes = b""
    token: bytes | None = field(default=None, repr=False)
    """For requests to its families, and for nobody else."""


@dataclass(frozen=True, slots=True)
class Families:
    """Where the enhanced families are served, as far as it is known."""

    is_known: bool = False
    filled: frozenset[str] = frozenset()
    """Served by the dashboard, since the gateway lacks them."""
    missing: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Lacking on this backend: message and hint for the fault."""


def is_mounted(path: bytes, mount: bytes) -> bool:
    """Whether a path is the whole dashboard's, which stands below `mount`; b"" is nowhere."""
    return mount != b"" and (path == mount or path.startswith(mount + b"/"))


def mounted_target(
    target: bytes, dashboard: DashboardRules, authorization: list[Field], added: Fields, credentials: CredentialPolicy
) -> bytes:
    """The target of the whole dashboard, whose page brings its own token. Keeps the gateway's key away."""
    added.append((b"X-Forwarded-Prefix", dashboard.mount))
    added += credentials.to_dashboard(authorization)
    rest = target[len(dashboard.mount) :]
    return dashboard.prefix + (rest if rest[:1] == b"/" else b"/" + rest)


def family_target(route: str, target: bytes, dashboard: DashboardRules, passing: Fields, added: Fields) -> bytes:
    """The target of a family at the dashboard. Adds its token, and keeps cookies and other tokens away."""
    passing[:] = [line for line in passing if line[0].lower() not in (b"cookie", b"x-hermes-session-token")]
    if dashboard.token is not None:
        added.append((b"X-Hermes-Session-Token", dashboard.token))
    if route == "jobs":
        target = b"/api/cron/jobs" + target[len(b"/api/jobs") :]
    return dashboard.prefix + target


def is_own_path(path: bytes) -> bool:
    """Whether an own page may stand there, on a listener that has them beside the relay."""
    return path in OWN_PATHS or path.startswith(OWN_TREE)


def own_page_head(method: bytes, path: bytes, request_id: bytes, passing: Fields) -> bytes:
    """What an own page gets to see: enough to answer, and nothing that could leak or be too much for its server.

    Cookies of other programs on this host come along with every browser request. Queries and bodies mean nothing here.
    """
    kept = [line for line in passing if line[0].lower() in _SEEN_BY_OWN_PAGES and len(line[1]) <= _SEEN_BYTES]
    lines = [(b"Host", b"sidecar"), (b"X-Request-Id", request_id[:_SEEN_BYTES]), *kept]
    if path not in OWN_PATHS and _PAGE.fullmatch(path) is None:
        path = OWN_TREE + b"no-such-page"
    asked = method if method in _METHODS_OF_OWN_PAGES else b"PUT"  # any that none of them knows
    return b"%b %b HTTP/1.1\r\n" % (asked, path) + fields.joined(lines) + b"\r\n"
