"""Host and Origin rules, pure: is this request meant for the sidecar, and may a web page have sent it?

A proxy that writes its own Host and drops Origin switches off the upstream's own defences against DNS rebinding and
foreign pages, so these rules come before everything else. Sources: RFC 9110, 7.2 and 7.4; Fetch standard, CORS protocol
and Sec-Fetch metadata; the MCP specification's rules for local servers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from sidecar.faults import host_not_allowed, invalid_request, origin_not_allowed
from sidecar.relay.fields import Watched, list_members, values
from sidecar.relay.wire import Field

LOOPBACK_NAMES: Final = frozenset((b"localhost", b"127.0.0.1", b"[::1]"))
STATUS_PAGE: Final = b"/sidecar/"

_AUTHORITY: Final = re.compile(rb"(\[[0-9a-f:.]+\]|[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)(?::([0-9]{1,5}))?")
_ORIGIN: Final = re.compile(rb"https?://([^/?#@\s]+)")
_METHODS: Final = b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
_EXPOSED: Final = (
    b"X-Hermes-Session-Id, X-Claude-Session-Id, X-Hermes-Session-Key, X-Hermes-Friendly-Id, "
    b"X-Claude-Session-Key, X-Claude-Friendly-Id, X-Request-Id, X-Hermes-Sidecar-Session, X-Hermes-Sidecar-Error, "
    b"Retry-After"
)
_PREFLIGHT_MAX_AGE_S: Final = b"600"
_FIELD_NAMES: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z, \t]*")


@dataclass(frozen=True, slots=True)
class DoorPolicy:
    """Names and origins that are let in."""

    names: frozenset[bytes]
    """Host names without port, lower case, IPv6 in brackets."""
    origins: frozenset[bytes]
    """Allowed browser origins, lower case; b"*" lets every origin in."""

    @classmethod
    def of(cls, bound_host: str, allowed_hosts: Iterable[str], allowed_origins: Iterable[str]) -> DoorPolicy:
        names = {(f"[{host}]" if ":" in host else host).lower().encode() for host in (bound_host, *allowed_hosts)}
        return cls(
            names=LOOPBACK_NAMES | names, origins=frozenset(origin.lower().encode() for origin in allowed_origins)
        )


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that may come in; with an allowed Origin, `cors` are the fields that its answer carries."""

    cors: tuple[Field, ...] = ()
    is_preflight: bool = False


PROGRAM: Final = Admission()
"""No Origin and no foreign fetch metadata: a program, not a page."""


def check_host(watched: Watched, target_authority: bytes | None, minor: int, policy: DoorPolicy) -> None:
    """Raises the fault `host_not_allowed` unless the request names this sidecar.

    `target_authority` is the authority of an absolute-form target, which wins over Host (RFC 9112, 3.2.2); both are
    judged, since the upstream's reader may take the other one.
    """
    lines = watched.get(b"host", [])
    if len(lines) > 1:
        raise invalid_request("it has more than one Host")
    if not lines and minor >= 1:
        raise invalid_request("it has no Host")
    if not lines or not _is_own_name(lines[0][1], policy):
        raise host_not_allowed()
    if target_authority is not None and not _is_own_name(target_authority, policy):
        raise host_not_allowed()


@lru_cache(maxsize=1024)
def _is_own_name(authority: bytes, policy: DoorPolicy) -> bool:
    match = _AUTHORITY.fullmatch(authority.lower())
    return match is not None and match[1] in policy.names


def check_origin(method: bytes, path: bytes, watched: Watched, policy: DoorPolicy) -> Admission:
    """What the request's Origin and fetch metadata allow. Raises the fault `origin_not_allowed`.

    Judge Host first: an Origin is the sidecar's own if it has a name of ours and the port that Host has.
    """
    lines = watched.get(b"origin")
    if lines:
        origin = lines[0][1]
        if len(lines) > 1 or not _is_allowed_origin(origin, watched[b"host"][0][1], policy):
            raise origin_not_allowed()
        is_preflight = method == b"OPTIONS" and b"access-control-request-method" in watched
        return Admission(_cors_fields(origin), is_preflight)
    if b"cross-site" in list_members(values(watched, b"sec-fetch-site")) and not _is_navigation(method, path, watched):
        raise origin_not_allowed()
    return PROGRAM


def _is_allowed_origin(origin: bytes, host: bytes, policy: DoorPolicy) -> bool:
    origin = origin.lower()
    if origin == b"null":
        return False
    if origin in policy.origins:
        return True
    match = _ORIGIN.fullmatch(origin)
    if match is None:
        return False
    if b"*" in policy.origins:
        return True
    ours, theirs = _AUTHORITY.fullmatch(host.lower()), _AUTHORITY.fullmatch(match[1])
    return ours is not None and theirs is not None and ours[2] == theirs[2] and _is_own_name(match[1], policy)


def _is_navigation(method: bytes, path: bytes, watched: Watched) -> bool:
    """Whether a person followed a link to the status page: a top-level navigation, whose answer no page can read."""
    return (
        method == b"GET"
        and path == STATUS_PAGE
        and values(watched, b"sec-fetch-mode") == [b"navigate"]
        and values(watched, b"sec-fetch-dest") == [b"document"]
    )


def _cors_fields(origin: bytes) -> tuple[Field, ...]:
    return ((b"Access-Control-Allow-Origin", origin), (b"Access-Control-Expose-Headers", _EXPOSED))


def preflight_fields(watched: Watched) -> list[Field]:
    """What a preflight from an allowed origin is told, its CORS fields excepted. Source: Fetch standard, 4.8."""
    answer: list[Field] = [(b"Access-Control-Allow-Methods", _METHODS)]
    asked = b", ".join(values(watched, b"access-control-request-headers"))
    if asked and _FIELD_NAMES.fullmatch(asked):
        answer.append((b"Access-Control-Allow-Headers", asked))
    if values(watched, b"access-control-request-private-network") == [b"true"]:
        answer.append((b"Access-Control-Allow-Private-Network", b"true"))
    answer.append((b"Access-Control-Max-Age", _PREFLIGHT_MAX_AGE_S))
    return answer


def vary_on_origin(vary_lines: list[bytes]) -> list[Field]:
    """The Vary line to add so that caches keep answers to different origins apart; none if it is there already."""
    members = list_members(vary_lines)
    return [] if b"origin" in members or b"*" in members else [(b"Vary", b"Origin")]
