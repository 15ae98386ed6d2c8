"""Isolation, pure: what a client may ask for when clients are kept apart (`listen.isolate_clients`).

Law: what is not known to stay inside the client's own sessions is refused. The gateway has one key and sees all
sessions; whoever may name one in a path or a body reads it. So only routes are open where the sidecar itself sets the
session, or where the path names one that is the client's own.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote_to_bytes

from sidecar.faults import Fault, FaultCode

_OPEN_TO_ALL: Final = frozenset((b"/v1/chat/completions", b"/v1/models", b"/v1/capabilities", b"/health"))
_ONE_SESSION: Final = re.compile(rb"/api/sessions/([^/]+)(?:/[a-z/]*)?")


def check_scope(path: bytes, namespace: bytes) -> None:
    """Raises the fault `capability_unavailable` unless `path` can only touch the sessions of `namespace`.

    `path` is the raw path of the request. An id is judged as the gateway will decode it.
    """
    if path in _OPEN_TO_ALL:
        return
    match = _ONE_SESSION.fullmatch(path)
    if match is not None:
        session_id = unquote_to_bytes(match[1])
        if session_id.startswith(namespace) and not re.search(rb"[/\\%\x00-\x20]|\.\.", session_id):
            return
    raise Fault(
        FaultCode.CAPABILITY_UNAVAILABLE,
        "This sidecar keeps its clients apart, and this route could reach the conversations of others.",
        "Chat works. Your own sessions are at /api/sessions/ followed by an id that begins with your client name.",
    )
