"""Session mapping, pure: request fields to the session id for the gateway, and what the client gets back.

Law: the mapping never sees Authorization. Which conversation a request belongs to does not depend on who may ask.
Keys are bytes from the wire to the hash: decoding would merge keys that differ in one byte.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

from sidecar.faults import invalid_session_key
from sidecar.relay.fields import FRIENDLY_IDS, ROUTE_KEYS, SESSION_IDS, Watched
from sidecar.relay.wire import Field
from sidecar.sessions.sources import HeaderSource, is_usable

SIDECAR_SESSION = b"X-Hermes-Sidecar-Session"
"""Tells the client where its session id came from."""
DERIVED_PREFIX = b"hs-"
_LONGEST_ID = 256
_DRIVE_LETTER = re.compile(rb"[A-Za-z]:")
_VISIBLE_ASCII = re.compile(rb"[\x21-\x7e]+")

_SESSION_ID_NAME, _CLAUDE_SESSION_ID_NAME = b"X-Hermes-Session-Id", b"X-Claude-Session-Id"
_GIVEN_BACK = ((ROUTE_KEYS[0], b"X-Hermes-Session-Key"), (FRIENDLY_IDS[0], b"X-Hermes-Friendly-Id"))


@dataclass(frozen=True, slots=True)
class MappingPolicy:
    """The settings that the mapping obeys, checked once at start."""

    sources: tuple[HeaderSource, ...]
    skip_when: tuple[bytes, ...] = ()
    """Lower-case names of headers whose non-empty value marks a side task."""
    forward_key: Literal["always", "never"] = "never"

    def watched_names(self) -> frozenset[bytes]:
        return frozenset(source.name for source in self.sources) | frozenset(self.skip_when)


@dataclass(frozen=True, slots=True)
class Decision:
    """What the mapping decided for one request."""

    session_id: bytes | None
    source: str
    """`client`, `header:<name>`, `none` or `skipped`."""
    derived: bool
    added: tuple[Field, ...]
    """Fields for the upstream."""
    given_back: tuple[Field, ...]
    """Fields for the client's answer."""


def decide(watched: Watched, policy: MappingPolicy, namespace: bytes = b"") -> Decision:
    """The session that this request belongs to.

    `watched` holds the request's session fields by lower-case name; `namespace` stands before every id when clients
    are kept apart. Raises the fault `invalid_session_key` where one header names two conversations.
    """
    session_id, source, derived = _session_id(watched, policy, namespace)
    added: list[Field] = []
    if session_id is not None:
        added += ((_SESSION_ID_NAME, session_id), (_CLAUDE_SESSION_ID_NAME, session_id))
    if policy.forward_key == "always":
        added += [(name, namespace + value) for name, value in watched.get(ROUTE_KEYS[0], ())]
    given_back = [(spelled, watched[name][0][1]) for name, spelled in _GIVEN_BACK if name in watched]
    word = source + "; derived" if derived else source
    given_back.append((SIDECAR_SESSION, word.encode("latin-1")))
    return Decision(session_id, source, derived, tuple(added), tuple(given_back))


def _session_id(watched: Watched, policy: MappingPolicy, namespace: bytes) -> tuple[bytes | None, str, bool]:
    for name in policy.skip_when:
        if any(is_usable(value) for _, value in watched.get(name, ())):
            return None, "skipped", False
    for name in SESSION_IDS:
        value = _single_value(watched, name)
        if value is not None and is_usable(value):
            return namespace + value, "client", False
    for header in policy.sources:
        value = _single_value(watched, header.name)
        if value is not None and is_usable(value):
            session_id = legal_id(header.prefix, value, room=_LONGEST_ID - len(namespace))
            return namespace + session_id, header.label, session_id != header.prefix + value
    return None, "none", False


def _single_value(watched: Watched, name: bytes) -> bytes | None:
    lines = watched.get(name)
    if not lines:
        return None
    value = lines[0][1]
    if len(lines) > 1 and any(other != value for _, other in lines):
        raise invalid_session_key()
    return value


def legal_id(prefix: bytes, value: bytes, *, room: int = _LONGEST_ID) -> bytes:
    """`prefix` and `value` as one id that the gateway accepts: themselves where it would, else a hash of them.

    The gateway refuses ids over 256 characters (`room` is what a namespace leaves of them), with `/`, `\\`, `..` or a
    drive letter in front. Ids that begin like a derived one are derived as well, so that no key can be chosen to meet
    another key's hash.
    """
    wanted = prefix + value
    if (
        len(wanted) <= room
        and _VISIBLE_ASCII.fullmatch(wanted) is not None
        and b"/" not in wanted
        and b"\\" not in wanted
        and b".." not in wanted
        and not wanted.startswith(DERIVED_PREFIX)
        and _DRIVE_LETTER.match(wanted) is None
    ):
        return wanted
    return DERIVED_PREFIX + hashlib.sha256(wanted).hexdigest()[:40].encode()
