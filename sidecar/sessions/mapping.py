"""Session mapping, pure: request fields to the session id for the gateway, and what the client gets back.

Law: the mapping never sees Authorization. Which conversation a request belongs to does not depend on who may ask.
Keys are bytes from the wire to the hash: decoding would merge keys that differ in one byte.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from sidecar.faults import invalid_session_key
from sidecar.relay.fields import FRIENDLY_IDS, ROUTE_KEYS, SESSION_IDS, Watched
from sidecar.relay.wire import Field
from sidecar.sessions.sources import (
    NO_DOCUMENT,
    BodySource,
    Document,
    HeaderSource,
    PromptCondition,
    Source,
    is_usable,
)

SIDECAR_SESSION: Final = b"X-Hermes-Sidecar-Session"
"""Tells the client where its session id came from."""
DERIVED_PREFIX: Final = b"hs-"
_LONGEST_ID: Final = 256
_DRIVE_LETTER: Final = re.compile(rb"[A-Za-z]:")
_VISIBLE_ASCII: Final = re.compile(rb"[\x21-\x7e]+")

_SESSION_ID_NAME: Final = b"X-Hermes-Session-Id"
_CLAUDE_SESSION_ID_NAME: Final = b"X-Claude-Session-Id"
_GIVEN_BACK: Final = ((ROUTE_KEYS[0], b"X-Hermes-Session-Key"), (FRIENDLY_IDS[0], b"X-Hermes-Friendly-Id"))


@dataclass(frozen=True, slots=True)
class MappingPolicy:
    """The settings that the mapping obeys, checked once at start."""

    sources: tuple[Source, ...]
    skip_when: tuple[bytes | PromptCondition, ...] = ()
    """What marks a side task: headers (lower-case names) with a usable value, or how a prompt begins."""
    forward_key: Literal["always", "never"] = "never"
    inject_body: bool = False
    """Give `/v1/runs` and `/v1/responses` the session id in the body field that they read."""

    @property
    def reads_bodies(self) -> bool:
        """Whether some rule looks into JSON bodies."""
        prompts = any(isinstance(condition, PromptCondition) for condition in self.skip_when)
        return prompts or any(isinstance(source, BodySource) for source in self.sources)

    def watched_names(self) -> frozenset[bytes]:
        sources = [source.name for source in self.sources if isinstance(source, HeaderSource)]
        return frozenset(sources) | {name for name in self.skip_when if isinstance(name, bytes)}


class Decision(NamedTuple):
    """What the mapping decided for one request."""

    session_id: bytes | None
    """The session that the request names."""
    source: str
    """`client`, `header:<name>`, `body:<path>`, `none` or `skipped`."""
    derived: bool
    added: tuple[Field, ...]
    """Fields for the upstream."""
    given_back: tuple[Field, ...]
    """Fields for the client's answer."""
    sent_id: bytes | None = None
    """The id that goes upstream: the newest one of that session."""
    needs_body: bool = False
    """Nothing is decided: it depends on the body, which has not been read."""


UNDECIDED: Final = Decision(None, "none", False, (), (), needs_body=True)


def decide(
    watched: Watched,
    policy: MappingPolicy,
    namespace: bytes = b"",
    *,
    document: Document | None = None,
    newest: Callable[[bytes], bytes] = lambda session_id: session_id,
) -> Decision:
    """The session that this request belongs to.

    `watched` holds the request's session fields by lower-case name; `namespace` stands before every id when clients
    are kept apart; `document` is the body's JSON object, None while it has not been read; `newest` tells under which id
    a session was continued. Raises the fault `invalid_session_key` where one header names two conversations.
    """
    found = _session_id(watched, policy, namespace, document)
    if found is None:
        return UNDECIDED
    session_id, source, derived = found
    sent_id = None if session_id is None else newest(session_id)
    added: list[Field] = []
    if sent_id is not None:
        added += ((_SESSION_ID_NAME, sent_id), (_CLAUDE_SESSION_ID_NAME, sent_id))
    if policy.forward_key == "always":
        added += [(name, namespace + forwarded_key(value, namespace)) for name, value in watched.get(ROUTE_KEYS[0], ())]
    given_back = [(spelled, watched[name][0][1]) for name, spelled in _GIVEN_BACK if name in watched]
    word = source
    if sent_id != session_id:
        word += "; followed"
    if derived:
        word += "; derived"
    given_back.append((SIDECAR_SESSION, word.encode("latin-1")))
    return Decision(session_id, source, derived, tuple(added), tuple(given_back), sent_id)


def forwarded_key(value: bytes, namespace: bytes) -> bytes:
    """The route key as the gateway gets it: itself, or a hash where it is longer than the gateway takes."""
    if len(namespace) + len(value) <= _LONGEST_ID:
        return value
    return DERIVED_PREFIX + hashlib.sha256(value).hexdigest()[:40].encode()


def _session_id(
    watched: Watched, policy: MappingPolicy, namespace: bytes, document: Document | None
) -> tuple[bytes | None, str, bool] | None:
    """Id, source and whether it was derived; None where that depends on a body which has not been read."""
    for condition in policy.skip_when:
        if isinstance(condition, bytes):
            if condition in watched and any(is_usable(value) for _, value in watched[condition]):
                return None, "skipped", False
        elif document is None:
            return None
        elif condition.holds(document):
            return None, "skipped", False
    for name in SESSION_IDS:
        value = _single_value(watched, name)
        if value is not None and is_usable(value):
            return namespace + value, "client", False
    for source in policy.sources:
        if isinstance(source, HeaderSource):
            value = _single_value(watched, source.name)
        elif document is None:
            return None
        else:
            value = source.value(document)
        if value is not None and is_usable(value):
            session_id = legal_id(source.prefix, value, room=_LONGEST_ID - len(namespace))
            return namespace + session_id, source.label, session_id != source.prefix + value
    return None, "none", False


_BODY_FIELDS: Final = {
    "runs": ("session_id", ("session_id",)),
    "responses": ("conversation", ("conversation", "previous_response_id")),
}
"""By route: the field to add, and those that a client may have given instead."""


def injection(route: str, document: Document, session_id: bytes | None) -> tuple[str, bytes] | None:
    """The body field that binds this request to its session, where the route reads one and the client gave none."""
    if session_id is None or route not in _BODY_FIELDS or document is NO_DOCUMENT:
        return None
    name, given = _BODY_FIELDS[route]
    return None if any(document.get(field) for field in given) else (name, session_id)


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

    `room` is what a namespace leaves of the longest id. Ids that begin like a derived one are derived as well, so that
    no key can be chosen to meet another key's hash.
    """
    wanted = prefix + value
    if len(wanted) <= room and is_legal(wanted) and not wanted.startswith(DERIVED_PREFIX):
        return wanted
    return DERIVED_PREFIX + hashlib.sha256(wanted).hexdigest()[:40].encode()


def is_legal(session_id: bytes) -> bool:
    """Whether the gateway accepts this id: visible ASCII, no `/`, `\\` or `..`, no drive letter, not over 256 long."""
    return len(session_id) <= _LONGEST_ID and _is_legal(session_id)


@lru_cache(maxsize=4096)
def _is_legal(session_id: bytes) -> bool:
    return (
        _VISIBLE_ASCII.fullmatch(session_id) is not None
        and b"/" not in session_id
        and b"\\" not in session_id
        and b".." not in session_id
        and _DRIVE_LETTER.match(session_id) is None
    )
