"""Header policy, pure: which fields cross, in which direction, and what is added.

Law: fields go in and come out as ordered byte pairs; nothing passes through a dict on its way, so repeats, order within
a name and bytes outside ASCII survive. A field is judged by its lower-case name and forwarded as it was spelled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sidecar.relay.wire import Field, Fields

HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""Fields that belong to one connection. Source: RFC 9110, 7.6.1, and the older list of RFC 2616, 13.5.1."""

SESSION_IDS: Final = (b"x-hermes-session-id", b"x-claude-session-id")
ROUTE_KEYS: Final = (b"x-hermes-session-key", b"x-claude-session-key")
FRIENDLY_IDS: Final = (b"x-hermes-friendly-id", b"x-claude-friendly-id")

REQUEST_WATCHED: Final = HOP_BY_HOP | frozenset(
    (
        b"host",
        b"content-length",
        b"content-encoding",
        b"expect",
        b"origin",
        b"access-control-request-method",
        b"access-control-request-headers",
        b"access-control-request-private-network",
        b"sec-fetch-site",
        b"sec-fetch-mode",
        b"sec-fetch-dest",
        b"authorization",
        b"via",
        b"x-forwarded-for",
        b"x-forwarded-proto",
        b"x-forwarded-host",
        b"x-request-id",
        b"traceparent",
        *SESSION_IDS,
        *ROUTE_KEYS,
        *FRIENDLY_IDS,
    )
)
"""Request fields that some rule looks at; the others pass without a look."""

STAYS_HERE: Final = HOP_BY_HOP | frozenset(
    (
        b"host",  # the upstream gets its own name
        b"content-length",  # written anew from the framing that was understood
        b"expect",  # answered here
        b"origin",  # judged here; hermes-agent answers 403 to any Origin that it does not know
        b"access-control-request-method",
        b"access-control-request-headers",
        b"access-control-request-private-network",
        b"authorization",  # decided by the guard's credential rule
        b"x-forwarded-for",
        *SESSION_IDS,  # decided by the session mapping
        *ROUTE_KEYS,
        *FRIENDLY_IDS,
    )
)

RESPONSE_WATCHED: Final = HOP_BY_HOP | frozenset(
    (b"content-length", b"vary", b"x-request-id", b"x-hermes-sidecar-session", *SESSION_IDS, *ROUTE_KEYS, *FRIENDLY_IDS)
)
_ENDS_HERE: Final = HOP_BY_HOP | frozenset((b"content-length", b"x-hermes-sidecar-session"))
"""Answer fields that are written anew, or not at all. A sidecar behind this one spoke to us, not to the client."""

Watched = dict[bytes, list[Field]]
"""The watched fields by lower-case name, each with its lines in wire order."""


def sort_out(fields: Fields, watched_names: frozenset[bytes]) -> tuple[Fields, Watched]:
    """The fields that pass unseen, and those that a rule wants to see."""
    passing: Fields = []
    watched: Watched = {}
    for field in fields:
        name = field[0].lower()
        if name in watched_names:
            if name in watched:
                watched[name].append(field)
            else:
                watched[name] = [field]
        else:
            passing.append(field)
    return passing, watched


def values(watched: Watched, name: bytes) -> list[bytes]:
    """The values of all lines of one watched field, in wire order."""
    lines = watched.get(name)
    return [value for _, value in lines] if lines else []


def list_members(lines: Iterable[bytes]) -> list[bytes]:
    """The members of a comma-separated field, over all its lines, in lower case; empty members are left out."""
    return [member for line in lines for raw in line.split(b",") if (member := raw.strip(b" \t").lower())]


def connection_options(watched: Watched) -> frozenset[bytes]:
    """The names that the Connection fields declare hop-by-hop, in lower case.

    Never raises: a member that is no name simply matches nothing. Source: RFC 9110, 7.6.1.
    """
    lines = watched.get(b"connection")
    return frozenset(list_members(value for _, value in lines)) if lines else frozenset()


def joined(fields: Fields) -> bytes:
    """The lines as they stand in a head."""
    return b"".join([b"%b: %b\r\n" % field for field in fields])


def to_upstream(
    passing: Fields,
    watched: Watched,
    nominated: frozenset[bytes],
    added: Iterable[Field],
    *,
    peer: bytes,
) -> Fields:
    """The fields of the request for the upstream, Host and framing excepted.

    `nominated` are the connection options, `added` what mapping and guard decided, `peer` the client's address for
    X-Forwarded-For. Via and X-Forwarded-* continue what proxies before us wrote.
    """
    if nominated and nominated - {b"close", b"keep-alive"}:
        out = [field for field in passing if field[0].lower() not in nominated]
    else:
        out = passing.copy()
    for name, lines in watched.items():
        if name not in STAYS_HERE and name not in nominated:
            out += lines
    if b"x-forwarded-for" in watched:
        peer = b", ".join([value for value in (*values(watched, b"x-forwarded-for"), peer) if value])
    out.append((b"X-Forwarded-For", peer))
    if b"x-forwarded-proto" not in watched:
        out.append((b"X-Forwarded-Proto", b"http"))
    if b"x-forwarded-host" not in watched and (host := watched.get(b"host")):
        out.append((b"X-Forwarded-Host", host[0][1]))
    out.append((b"Via", b"1.1 hermes-sidecar"))
    out += added
    return out


def to_downstream(fields: Fields) -> tuple[Fields, Watched]:
    """The answer's fields that may cross, framing excepted, and the watched ones for mapping and framing.

    Hop-by-hop fields, those that Connection names, and the upstream's own CORS fields are gone.
    """
    out: Fields = []
    watched: Watched = {}
    for field in fields:  # `sort_out` by hand: this runs for every answer
        name = field[0].lower()
        if name in RESPONSE_WATCHED:
            if name in watched:
                watched[name].append(field)
            else:
                watched[name] = [field]
        elif name[:15] != b"access-control-":
            out.append(field)
    if b"connection" in watched:
        strips = connection_options(watched) - {b"close", b"keep-alive", b"content-length", b"transfer-encoding"}
        if strips:
            out = [field for field in out if field[0].lower() not in strips]
            for name in strips:
                watched.pop(name, None)
    for name, lines in watched.items():
        if name not in _ENDS_HERE:
            out += lines
    watched.pop(b"x-hermes-sidecar-session", None)
    return out, watched
